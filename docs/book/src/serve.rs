//! `--serve`: the book over HTTP, for a look at it from another machine, or out of a container.
//!
//! `mdbook serve` cannot do that: it makes the book itself, from the chapters alone, so that the pages of sources, the
//! pictures and the slides would be missing. It also has to be installed.

use std::{
    collections::HashMap,
    fs,
    net::{SocketAddr, TcpListener},
    path::{Component, Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use common_http::{Answer, Names, Server};

/// Serves the files of `book` under these names until the program is ended.
pub fn serve(book: &Path, address: SocketAddr, names: Names) -> Result<()> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}: choose another one with --serve"))?;
    println!("http://{}", listener.local_addr()?);
    answer(book, listener, names)
}

fn answer(book: &Path, listener: TcpListener, names: Names) -> Result<()> {
    let mut server = Server::new(listener, "GET", names)?;
    let mut sent = Sent::default();
    loop {
        server.serve(Duration::from_secs(1), |request| {
            let found = file(book, request.path, &mut sent);
            Ok(found.unwrap_or_else(|| Answer::refused("404 Not Found")))
        })?;
    }
}

/// The files that are being sent: a class that opens the book at once gets one copy of each.
#[derive(Default)]
struct Sent(HashMap<PathBuf, (SystemTime, Weak<Vec<u8>>)>);

impl Sent {
    fn read(&mut self, file: PathBuf) -> Option<Arc<Vec<u8>>> {
        let changed = fs::metadata(&file).ok()?.modified().ok()?;
        if let Some((known, bytes)) = self.0.get(&file)
            && *known == changed
            && let Some(bytes) = bytes.upgrade()
        {
            return Some(bytes);
        }
        let bytes = Arc::new(fs::read(&file).ok()?);
        self.0.insert(file, (changed, Arc::downgrade(&bytes)));
        Some(bytes)
    }
}

/// What a request asks for, if it is below `book`.
fn file(book: &Path, target: &str, sent: &mut Sent) -> Option<Answer> {
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
    Some(Answer::shared(kind, sent.read(file)?))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpStream,
        thread,
    };

    use super::*;

    #[test]
    fn the_book_is_served_under_this_machines_names_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let names = Names::new(&["book.example.com".to_owned()]);
        thread::spawn(|| answer(Path::new(env!("CARGO_MANIFEST_DIR")), listener, names));
        for (host, status) in [
            ("localhost", "200"),
            ("127.0.0.1", "200"),
            ("book.example.com", "200"),
            ("evil.example", "421"),
        ] {
            let mut stream = TcpStream::connect(address).unwrap();
            let port = address.port();
            let request = format!("GET /book.css HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{host}: {answer}");
        }
    }

    #[test]
    fn nothing_outside_of_the_book_is_served() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut sent = Sent::default();
        let css = file(book, "/book.css", &mut sent).unwrap();
        let again = file(book, "/book.css", &mut sent).unwrap();
        assert!(css.kind == "text/css" && Arc::ptr_eq(&css.body, &again.body));
        for target in ["/../README.md", "/src/../../README.md", "//etc/passwd", "/no.css", "/."] {
            let is_outside = file(&book.join("src"), target, &mut sent).is_none();
            assert!(is_outside, "{target}");
        }
    }
}
