//! The launcher: boots a known kernel in QEMU and runs programs in it. `cargo vm` is its command line;
//! `cargo lesson` and `cargo truth` call it, too.
//!
//! Whatever a command line says is resolved once, to a [`run::Run`], and passed on. No directory of these
//! modules uses one that uses it.

pub mod arch;
pub mod cargo;
pub mod commands;
pub mod fetch;
mod machine;
pub mod run;
pub mod session;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// No directory uses a later one. Whoever ports the launcher to another architecture has the first to
    /// read.
    const ORDER: [&str; 7] = ["arch", "session", "fetch", "cargo", "machine", "run", "commands"];

    fn sources(place: &Path) -> Vec<PathBuf> {
        if place.is_file() {
            return vec![place.to_owned()];
        }
        let entries = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|entry| sources(&entry)).collect()
    }

    #[test]
    fn no_directory_uses_a_later_one_and_one_file_asks_for_an_architecture() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let files = sources(&src);
        assert!(files.len() > 30, "{files:?}");
        for file in files {
            let own = file.strip_prefix(&src).unwrap().with_extension("");
            let own = ORDER.iter().position(|dir| own.starts_with(dir)).unwrap_or(ORDER.len());
            let later = ORDER.iter().skip(own + 1).map(|dir| format!("crate::{dir}"));
            let asks = ["Arch::X86_64", "Arch::Arm64", "consts::ARCH", "target_arch"];
            let asks = asks.into_iter().filter(|_| own > 0).map(str::to_owned);
            let text = fs::read_to_string(&file).unwrap();
            let program = text.split("#[cfg(test)]").next().unwrap();
            for refused in later.chain(asks) {
                assert!(!program.contains(&refused), "{}: {refused}", file.display());
            }
        }
    }
}
