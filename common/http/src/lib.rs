//! A server for a page or two: no more of HTTP than that needs.
//!
//! One thread serves all clients, and none of them can make another one wait: no call blocks, each
//! client has a time limit for its whole request, and one too many replaces the oldest.
//!
//! A browser can be made to send requests here by a page of somebody else: one whose name leads to its own
//! server first, and to this machine afterwards (*DNS rebinding*). Such a request has that name in its header
//! `Host`, so only requests to this machine's own names are answered, see [`Names`].

mod names;

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
pub use names::Names;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// How many clients may be connected at a time.
const CLIENTS: usize = 32;
/// The longest request, with its body.
const REQUEST: usize = 8 * 1024;
/// The most headers that a request may have.
const HEADERS: usize = 64;
/// The time from a client's connection to the last byte of its answer.
const TIME: Duration = Duration::from_secs(5);

/// The status for a name that is not ours.
pub const MISDIRECTED: &str = "421 Misdirected Request";
/// What a client reads who asks for a name that is not ours.
const FOREIGN: &str = "\
This server does not know itself by the name in the request's header Host. Use its IP address,
or start it with --host NAME, if the name is one of its own.
";

/// A request that is complete.
pub struct Request<'a> {
    /// One of those that the server takes.
    pub method: &'a str,
    /// Without what follows a `?`.
    pub path: &'a str,
    /// What was sent along.
    pub body: &'a [u8],
    headers: &'a [httparse::Header<'a>],
}

impl Request<'_> {
    /// The first header of this name, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(found.value).ok()
    }
}

/// What is sent back.
#[derive(Debug, PartialEq)]
pub struct Answer {
    /// `200 OK`
    pub status: &'static str,
    /// The type of the body: `text/html; charset=utf-8`
    pub kind: &'static str,
    /// What is shown, or read.
    pub body: Vec<u8>,
}

impl Answer {
    /// What was asked for.
    pub fn found(kind: &'static str, body: impl Into<Vec<u8>>) -> Answer {
        Answer { status: "200 OK", kind, body: body.into() }
    }

    /// A status that says why there is nothing else: `404 Not Found`.
    pub fn refused(status: &'static str) -> Answer {
        let body = format!("{status}\n").into_bytes();
        Answer { status, kind: "text/plain; charset=utf-8", body }
    }
}

struct Client {
    stream: TcpStream,
    until: Instant,
    request: Vec<u8>,
    answer: Vec<u8>,
    sent: usize,
}

/// Listens, and answers.
pub struct Server {
    listener: TcpListener,
    /// As the header `Allow` has them.
    methods: &'static str,
    names: Names,
    /// The oldest one first.
    clients: VecDeque<Client>,
}

impl Server {
    /// Serves those who connect to this socket and ask for one of these names, with these methods:
    /// `GET, POST`.
    pub fn new(listener: TcpListener, methods: &'static str, names: Names) -> Result<Server> {
        listener.set_nonblocking(true).context("the listening socket")?;
        Ok(Server { listener, methods, names, clients: VecDeque::new() })
    }

    /// Waits until a client has something to do, at most for this time, and does it.
    pub fn serve(
        &mut self,
        at_most: Duration,
        mut answer: impl FnMut(&Request) -> Result<Answer>,
    ) -> Result<()> {
        let timeout = Timespec {
            tv_sec: at_most.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: at_most.subsec_nanos().into(),
        };
        let mut files = vec![PollFd::new(&self.listener, PollFlags::IN)];
        files.extend(self.clients.iter().map(|client| {
            let wanted = if client.answer.is_empty() { PollFlags::IN } else { PollFlags::OUT };
            PollFd::new(&client.stream, wanted)
        }));
        match poll(&mut files, Some(&timeout)) {
            Err(error) if error != Errno::INTR => return Err(error).context("poll"),
            _ => (),
        }
        // At most so many at a time: the clients that are there have their turn, too.
        for _ in 0..CLIENTS {
            // An error is that of one client, which has gone again.
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                if self.clients.len() == CLIENTS {
                    self.clients.pop_front();
                }
                let (until, request) = (Instant::now() + TIME, Vec::new());
                let mut client = Client { stream, until, request, answer: Vec::new(), sent: 0 };
                if client.step(self.methods, &self.names, &mut answer)? {
                    self.clients.push_back(client);
                }
            }
        }
        for _ in 0..self.clients.len() {
            if let Some(mut client) = self.clients.pop_front()
                && client.until > Instant::now()
                && client.step(self.methods, &self.names, &mut answer)?
            {
                self.clients.push_back(client);
            }
        }
        Ok(())
    }
}

impl Client {
    /// Reads and writes what can be without waiting; whether there is more to do.
    fn step(
        &mut self,
        methods: &str,
        names: &Names,
        answer: &mut impl FnMut(&Request) -> Result<Answer>,
    ) -> Result<bool> {
        if self.answer.is_empty() {
            let mut buffer = [0; 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(n) => self.request.extend_from_slice(&buffer[..n]),
                Err(error) => return Ok(is_temporary(error.kind())),
            }
            let response = respond(&self.request, methods, names, answer)?;
            let Some(Answer { status, kind, body }) = response else { return Ok(true) };
            let length = body.len();
            self.answer = format!(
                "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
                 Allow: {methods}\r\nConnection: close\r\n\r\n"
            )
            .into_bytes();
            self.answer.extend_from_slice(&body);
        }
        match self.stream.write(&self.answer[self.sent..]) {
            Ok(n) => self.sent += n,
            Err(error) => return Ok(is_temporary(error.kind())),
        }
        let more = self.sent < self.answer.len();
        if !more {
            self.stream.shutdown(Shutdown::Write).ok();
        }
        Ok(more)
    }
}

fn is_temporary(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// What a client gets for the bytes that it has sent; `None`: it has not said all of it.
fn respond(
    bytes: &[u8],
    methods: &str,
    names: &Names,
    answer: &mut impl FnMut(&Request) -> Result<Answer>,
) -> Result<Option<Answer>> {
    let refused = |status| Ok(Some(Answer::refused(status)));
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    let body = match head.parse(bytes) {
        Err(httparse::Error::TooManyHeaders) => {
            return refused("431 Request Header Fields Too Large");
        }
        Err(_) => return refused("400 Bad Request"),
        Ok(httparse::Status::Partial) if bytes.len() < REQUEST => return Ok(None),
        Ok(httparse::Status::Partial) => return refused("431 Request Header Fields Too Large"),
        Ok(httparse::Status::Complete(length)) => &bytes[length..],
    };
    // Who sends none, as HTTP/1.0 allows, is no browser.
    let hosts: Vec<&[u8]> = head
        .headers
        .iter()
        .filter(|it| it.name.eq_ignore_ascii_case("host"))
        .map(|it| it.value)
        .collect();
    match hosts.as_slice() {
        [] if head.version == Some(0) => (),
        [host] if names.has(host) => (),
        [_] => return Ok(Some(Answer { body: FOREIGN.into(), ..Answer::refused(MISDIRECTED) })),
        _ => return refused("400 Bad Request"),
    }
    let (method, path) = (head.method.unwrap_or_default(), head.path.unwrap_or_default());
    let path = path.split('?').next().unwrap_or_default();
    if !methods.split(", ").any(|it| it == method) {
        return refused("405 Method Not Allowed");
    }
    let mut request = Request { method, path, body, headers: head.headers };
    match request.header("content-length").map_or(Ok(0), str::parse::<usize>) {
        Ok(length) if length > REQUEST => refused("413 Content Too Large"),
        Ok(length) if length > body.len() => Ok(None),
        Ok(length) => {
            request.body = &body[..length];
            answer(&request).map(Some)
        }
        Err(_) => refused("400 Bad Request"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_complete_is_answered() {
        let asked = |text: &str| {
            let mut echo = |request: &Request| {
                let accept = request.header("ACCEPT").unwrap_or("-");
                let said = [request.method, request.path, accept].join(" ").into_bytes();
                Ok(Answer::found("text/plain", [&said, request.body].concat()))
            };
            respond(text.as_bytes(), "GET, POST", &Names::new(&[]), &mut echo).unwrap()
        };
        let found = |body: &str| Some(Answer::found("text/plain", body));
        let refused = |status| Some(Answer::refused(status));
        assert_eq!(asked("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), found("GET / -"));
        let accept = "GET /a?b HTTP/1.1\r\nHost: [::1]:80\r\naccept: text\r\n\r\n";
        assert_eq!(asked(accept), found("GET /a text"));
        assert_eq!(asked(&accept[..accept.len() - 1]), None);
        let post = |length: &str| {
            format!("POST /a HTTP/1.1\r\nHost: 10.0.0.1\r\nContent-Length: {length}\r\n\r\nabc")
        };
        assert_eq!(asked(&post("3")), found("POST /a -abc"));
        assert_eq!(asked(&post("2")), found("POST /a -ab"));
        assert_eq!(asked(&post("4")), None);
        assert_eq!(asked(&post("9999")), refused("413 Content Too Large"));
        assert_eq!(asked(&post("-1")), refused("400 Bad Request"));
        assert_eq!(
            asked("PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            refused("405 Method Not Allowed")
        );
        assert_eq!(asked("\u{16}\u{3}\u{1}"), refused("400 Bad Request"));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        assert_eq!(asked(&many), refused("431 Request Header Fields Too Large"));
        let long = format!("GET /{}", "a".repeat(REQUEST));
        assert_eq!(asked(&long), refused("431 Request Header Fields Too Large"));
    }

    #[test]
    fn only_requests_for_this_machine_are_answered() {
        let names = Names::new(&["prometheus.example.com".to_owned()]);
        let asked = |head: &str| {
            let mut echo = |_: &Request| Ok(Answer::found("text/plain", ""));
            respond(head.as_bytes(), "GET, POST", &names, &mut echo).unwrap().unwrap().status
        };
        for method in ["GET", "POST", "PUT"] {
            let foreign = format!("{method} / HTTP/1.1\r\nHost: evil.example:9435\r\n\r\n");
            assert_eq!(asked(&foreign), MISDIRECTED);
        }
        let head = "GET / HTTP/1.1\r\n";
        assert_eq!(asked(&format!("{head}hOsT: Prometheus.example.com\r\n\r\n")), "200 OK");
        assert_eq!(asked(&format!("{head}\r\n")), "400 Bad Request");
        let two = format!("{head}Host: localhost\r\nHost: evil.example\r\n\r\n");
        assert_eq!(asked(&two), "400 Bad Request");
        assert_eq!(asked("GET / HTTP/1.0\r\n\r\n"), "200 OK");
        assert_eq!(asked("GET / HTTP/1.0\r\nHost: evil.example\r\n\r\n"), MISDIRECTED);
    }
}
