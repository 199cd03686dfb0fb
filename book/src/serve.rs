//! `--serve`: the book over HTTP, for a look at it.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Component, Path},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

/// The longest request that is read.
const MOST: u64 = 8 << 10;

/// Serves the files of `book` until the program is ended.
pub fn serve(book: &Path, address: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}: choose another one with --serve"))?;
    println!("http://{}", listener.local_addr()?);
    for stream in listener.incoming() {
        let book = book.to_owned();
        // A browser that goes away in the middle of an answer is no error of ours.
        thread::spawn(move || stream.and_then(|stream| answer(&book, stream)).ok());
    }
    Ok(())
}

fn answer(book: &Path, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut lines = BufReader::new(stream.try_clone()?.take(MOST)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let mut words = request.split(' ');
    let found = match (words.next(), words.next()) {
        (Some("GET"), Some(target)) => file(book, target),
        _ => None,
    };
    let (status, kind, body) = match found {
        Some((kind, body)) => ("200 OK", kind, body),
        None => ("404 Not Found", "text/plain", b"The book has no such page.\n".to_vec()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(&body)
}

/// The type and content of what a request asks for, if it is below `book`.
fn file(book: &Path, target: &str) -> Option<(&'static str, Vec<u8>)> {
    let target = target.split(['?', '#']).next()?;
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
    Some((kind, fs::read(file).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_of_the_book_is_served() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(file(book, "/book.css?x=1#y").is_some_and(|(kind, _)| kind == "text/css"));
        for target in ["/../README.md", "/src/../../README.md", "//etc/passwd", "/no.css", "/."] {
            let is_outside = file(&book.join("src"), target).is_none();
            assert!(is_outside, "{target}");
        }
    }
}
