//! The clone of the workshop that a program works in. It is found when the program runs, because a
//! clone may be moved and copied, and two clones may share a target directory.
//!
//! Cargo takes a program of the old place, or of the other clone, for up to date. So
//! `.cargo/config.toml` sets [`VARIABLE`] to the clone's directory, and a constant reads it at build
//! time: where its value differs, cargo builds this crate again, and all that depend on it.

use std::{
    env,
    error::Error,
    fmt,
    path::{Path, PathBuf},
};

/// The variable that holds the clone's directory, in all that cargo starts in the clone.
pub const VARIABLE: &str = "WORKSHOP_ROOT";

/// Only for cargo, see above: started outside of the clone, it has no such variable.
const _: Option<&str> = option_env!("WORKSHOP_ROOT");

/// Files that, together, only the workshop's root has.
const MARKS: [&str; 3] = ["Cargo.toml", "vm/kernels.toml", "common/base/Cargo.toml"];

/// Why a program does not know where to work.
#[derive(Debug)]
pub enum NoRoot {
    /// It was started outside of a clone.
    Outside,
    /// It was built from the sources of one clone, and started in another one.
    Other {
        /// The clone that it was built from.
        built: PathBuf,
        /// The clone that it was started in.
        here: PathBuf,
    },
}

impl fmt::Display for NoRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = env::current_exe().unwrap_or_else(|_| "this program".into());
        let file = file.display();
        match self {
            NoRoot::Outside => write!(
                f,
                "{file} was started outside of the workshop: change to the directory of your clone, and \
                 start it there"
            ),
            NoRoot::Other { built, here } => write!(
                f,
                "{file} was built from the clone {}, but started in the clone {here}: nothing was done. \
                 Start it with cargo in {here}, which builds it again",
                built.display(),
                here = here.display()
            ),
        }
    }
}

impl Error for NoRoot {}

/// The root of the clone that this program was started in, or else lies in. An error where it was built
/// from another clone.
pub fn find() -> Result<PathBuf, NoRoot> {
    let named = |variable| env::var_os(variable).map(PathBuf::from);
    // Cargo sets the first for a program that it runs, also from a directory outside of the clone.
    let starts = [
        named("CARGO_MANIFEST_DIR"),
        named(VARIABLE),
        env::current_dir().ok(),
        env::current_exe().ok(),
    ];
    let here =
        starts.into_iter().flatten().find_map(|start| above(&start)).ok_or(NoRoot::Outside)?;
    let built = sources();
    if built == here { Ok(here) } else { Err(NoRoot::Other { built, here }) }
}

/// The clone whose sources cargo has built this from.
fn sources() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().nth(2).unwrap_or(package);
    // Where the clone has been moved, it was there.
    root.canonicalize().unwrap_or_else(|_| root.to_owned())
}

/// The workshop's root at or above this place.
fn above(start: &Path) -> Option<PathBuf> {
    let start = start.canonicalize().ok()?;
    let is_root = |place: &&Path| MARKS.iter().all(|mark| place.join(mark).is_file());
    start.ancestors().find(is_root).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_found_from_below() {
        let root = sources();
        let found = above(&root.join("vm/src/../workshop"));
        assert_eq!(found.as_ref(), Some(&root));
        assert_eq!((above(Path::new("/")), above(Path::new("/no/such"))), (None, None));
        assert_eq!(find().unwrap(), root);
        // Else cargo would not build a moved clone again.
        let clone = option_env!("WORKSHOP_ROOT").map(|clone| above(Path::new(clone)));
        assert_eq!(clone, Some(Some(root)));
    }
}
