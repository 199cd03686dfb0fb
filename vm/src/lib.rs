//! The launcher: boots a known kernel in QEMU and runs programs in it. `cargo vm` is its command line;
//! `cargo lesson` and `cargo truth` call it, too.
//!
//! Whatever a command line says is resolved once, to a [`run::Run`], and passed on. No directory of these
//! modules uses one that uses it.

pub mod arch;
pub mod cargo;
pub mod commands;
pub mod fetch;
pub mod machine;
pub mod run;
pub mod session;

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;
    use std::path::{Path, PathBuf};

    fn sources(place: &Path) -> Vec<PathBuf> {
        if place.is_file() {
            return vec![place.to_owned()];
        }
        let entries = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|entry| sources(&entry)).collect()
    }

    #[test]
    fn no_directory_uses_one_that_uses_it() {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for file in sources(&src) {
            let below = file.strip_prefix(&src).unwrap().with_extension("");
            let own = below.components().next().unwrap().as_os_str().to_string_lossy().into_owned();
            let text = fs::read_to_string(&file).unwrap();
            let program = text.split("#[cfg(test)]").next().unwrap();
            let used = program.split("crate::").skip(1);
            let used = used.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
            let others = used.filter(|used| *used != own && !used.is_empty()).map(str::to_owned);
            uses.entry(own.clone()).or_default().extend(others);
        }
        assert!(
            uses["commands"].contains("run") && uses["machine"].contains("session"),
            "{uses:?}"
        );
        // Whoever uses nothing that is left can be read, and is left no more.
        while let Some(read) =
            uses.iter().find(|(_, used)| used.is_empty()).map(|(own, _)| own.clone())
        {
            uses.remove(&read);
            uses.values_mut().for_each(|used| {
                used.remove(&read);
            });
        }
        assert!(uses.is_empty(), "a circle: {uses:?}");
    }
}
