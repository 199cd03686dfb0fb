//! `cargo book`: makes the web book out of the workshop's READMEs, pages and sources.

mod code;
mod drawing;
mod escape;
mod exercise;
mod glossary;
mod map;
mod markdown;
mod outline;
mod pages;
mod pdf;
mod serve;
mod slides;

use std::{net::SocketAddr, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use common_http::Names;

/// The exit code where this machine lacks something that is needed.
const MACHINE: u8 = 3;

/// The web book: makes target/book out of the workshop's READMEs, pages and sources
#[derive(Parser)]
#[command(name = "cargo book")]
struct Cli {
    /// Shows the book at this address, until Ctrl-C
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:3000")]
    serve: Option<SocketAddr>,
    /// A name of this machine that browsers ask for, beside its host name; may be given several times
    #[arg(long, value_name = "NAME", requires = "serve")]
    host: Vec<String>,
    /// Prints the book to target/book/book.pdf, with Chromium
    #[arg(long)]
    pdf: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("book: {error:#}");
            ExitCode::from(if error.is::<pdf::NoBrowser>() { MACHINE } else { 1 })
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let book = pages::Book::read(&common_base::root::find()?)?.write()?;
    println!("{}", book.join("index.html").display());
    if cli.pdf {
        println!("{}", pdf::print(&book)?.display());
    }
    match cli.serve {
        Some(address) => serve::serve(&book, address, Names::new(&cli.host)),
        None => Ok(()),
    }
}
