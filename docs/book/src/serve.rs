//! `--serve`: the book over HTTP, for a look at it from another machine, or out of a container.
//!
//! `mdbook serve` cannot do that: it makes the book itself, from the chapters alone, so that the pages of sources, the
//! pictures and the slides would be missing. It also has to be installed.

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Component, Path},
    time::Duration,
};

use anyhow::{Context, Result};
use common_http::{Answer, Server};

/// Serves the files of `book` until the program is ended.
pub fn serve(book: &Path, address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}: choose another one with --serve"))?;
    println!("http://{}", listener.local_addr()?);
    let mut server = Server::new(listener, "GET")?;
    loop {
        server.serve(Duration::from_secs(1), |request| {
            let found = file(book, request.path);
            Ok(found.unwrap_or_else(|| Answer::refused("404 Not Found")))
        })?;
    }
}

/// What a request asks for, if it is below `book`.
fn file(book: &Path, target: &str) -> Option<Answer> {
    let path = Path::new(target.trim_start_matches('/'));
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
    let mut file = book.join(path);
    if target.ends_with('/') {
        file.push("index.html");
    }
    let kind = match file.extension()?.to_str()? {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css",
        "js" => "text/javascript",
        "svg" => "image/svg+xml",
        "woff2" => "font/woff2",
        "pdf" => "application/pdf",
        _ => "application/octet-stream",
    };
    Some(Answer::found(kind, fs::read(file).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_of_the_book_is_served() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(file(book, "/book.css").is_some_and(|it| it.kind == "text/css"));
        for target in ["/../README.md", "/src/../../README.md", "//etc/passwd", "/no.css", "/."] {
            let is_outside = file(&book.join("src"), target).is_none();
            assert!(is_outside, "{target}");
        }
    }
}
