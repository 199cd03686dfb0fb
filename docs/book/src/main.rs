//! `cargo book`: makes the web book out of the workshop's READMEs, pages and sources.

mod code;
mod drawing;
mod exercise;
mod glossary;
mod markdown;
mod outline;
mod pages;
mod pdf;
mod serve;
mod slides;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use clap::Parser;

/// This machine lacks something that is needed.
const MACHINE: u8 = 3;

/// The web book: makes target/book out of the workshop's READMEs, pages and sources
#[derive(Parser)]
#[command(name = "cargo book")]
struct Cli {
    /// Shows the book at this address, until Ctrl-C
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:3000")]
    serve: Option<SocketAddr>,
    /// Prints the book to target/book/book.pdf, with Chromium
    #[arg(long)]
    pdf: bool,
}

/// A message for the user that ends the program with exit code 3.
#[derive(Debug)]
struct Machine(String);

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Machine {}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("book: {error:#}");
            ExitCode::from(if error.is::<Machine>() { MACHINE } else { 1 })
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).context("docs/book/ has no workspace")?;
    let book = pages::Book::read(root)?.write()?;
    println!("{}", book.join("index.html").display());
    if cli.pdf {
        println!("{}", pdf::print(&book)?.display());
    }
    match cli.serve {
        Some(address) => serve::serve(&book, address),
        None => Ok(()),
    }
}

/// `text`, to stand in HTML: also in an attribute, and in a row of a table in Markdown.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '|' => escaped += "&#124;",
            other => escaped.push(other),
        }
    }
    escaped
}

/// A path without `.` and `..`, as far as they can be resolved without a look at the disk.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => drop(normal.pop()),
            std::path::Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}
