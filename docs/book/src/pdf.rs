//! The book as a PDF, by Chromium.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// Debian's name, and those of other distributions.
const BROWSERS: [&str; 4] =
    ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// This machine has no browser that could print the book.
#[derive(Debug)]
pub struct NoBrowser;

impl std::fmt::Display for NoBrowser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("--pdf needs Chromium, which is not installed: apt install chromium")
    }
}

impl std::error::Error for NoBrowser {}

/// Prints the book to `book.pdf` in its directory.
pub fn print(book: &Path) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let find = |name: &&&str| std::env::split_paths(&path).any(|place| place.join(name).is_file());
    let browser = BROWSERS.iter().find(find).ok_or(NoBrowser)?;
    let pdf = book.join("book.pdf");
    let mut command = Command::new(browser);
    command.args(["--headless=new", "--disable-gpu", "--no-pdf-header-footer"]);
    // Chromium refuses to run as root with its sandbox; it reads our own pages only.
    if rustix::process::geteuid().is_root() {
        command.arg("--no-sandbox");
    }
    command.arg(format!("--print-to-pdf={}", pdf.display())).arg(book.join("print.html"));
    let output = command.output().with_context(|| format!("cannot start {browser}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && pdf.exists(), "{browser} printed nothing: {}", said.trim());
    Ok(pdf)
}
