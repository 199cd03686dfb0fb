//! The book that the tests look at.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

/// The book, built once.
pub fn book() -> &'static Path {
    static BOOK: LazyLock<PathBuf> = LazyLock::new(|| {
        let output = Command::new(env!("CARGO_BIN_EXE_book")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let index = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        index.parent().unwrap().to_owned()
    });
    &BOOK
}

/// The pages of the book.
pub fn pages(place: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(place).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "html") {
            found.push(path);
        }
    }
}

/// The address of a file.
pub fn url(file: &Path) -> String {
    format!("file://{}", file.display())
}
