//! A server for one kind of client, which reads the metrics: no more of HTTP than that needs.
//!
//! One thread serves all clients, and none of them can make another one wait: no call blocks, each
//! client has a time limit for its whole request, and one too many replaces the oldest.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::metrics::Format;

/// How many clients may be connected at a time.
const CLIENTS: usize = 32;
/// The longest request.
const REQUEST: usize = 8 * 1024;
/// The most headers that a request may have.
const HEADERS: usize = 64;
/// The time from a client's connection to the last byte of its answer.
const TIME: Duration = Duration::from_secs(5);

const START: &str = "<!DOCTYPE html>\n<title>exporter</title>\n\
    <p>Latencies of disks, for Prometheus: <a href=\"/metrics\">metrics</a>\n";

struct Client {
    stream: TcpStream,
    until: Instant,
    request: Vec<u8>,
    answer: Vec<u8>,
    sent: usize,
}

/// A request that is complete.
#[derive(Debug, PartialEq)]
enum Request {
    Metrics(Format),
    Start,
    Refused(&'static str),
}

/// Listens, and answers.
pub struct Server {
    listener: TcpListener,
    /// The oldest one first.
    clients: VecDeque<Client>,
}

impl Server {
    /// Serves those who connect to this socket.
    pub fn new(listener: TcpListener) -> Result<Server> {
        listener.set_nonblocking(true).context("the listening socket")?;
        Ok(Server { listener, clients: VecDeque::new() })
    }

    /// Waits until a client has something to do, at most for this time, and does it.
    pub fn serve(
        &mut self,
        at_most: Duration,
        mut metrics: impl FnMut(Format) -> Result<String>,
    ) -> Result<()> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
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
                if client.step(&mut metrics)? {
                    self.clients.push_back(client);
                }
            }
        }
        for _ in 0..self.clients.len() {
            if let Some(mut client) = self.clients.pop_front()
                && client.until > Instant::now()
                && client.step(&mut metrics)?
            {
                self.clients.push_back(client);
            }
        }
        Ok(())
    }
}

impl Client {
    /// Reads and writes what can be without waiting; whether there is more to do.
    fn step(&mut self, metrics: &mut impl FnMut(Format) -> Result<String>) -> Result<bool> {
        if self.answer.is_empty() {
            let mut buffer = [0; 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(n) => self.request.extend_from_slice(&buffer[..n]),
                Err(error) => return Ok(is_temporary(error.kind())),
            }
            let Some(request) = parse(&self.request) else { return Ok(true) };
            self.answer = answer(request, metrics)?;
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

/// What a client asks for; `None`: it has not said all of it.
fn parse(bytes: &[u8]) -> Option<Request> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Err(httparse::Error::TooManyHeaders) => {
            return Some(Request::Refused("431 Request Header Fields Too Large"));
        }
        Err(_) => return Some(Request::Refused("400 Bad Request")),
        Ok(status) if status.is_partial() && bytes.len() < REQUEST => return None,
        Ok(status) if status.is_partial() => {
            return Some(Request::Refused("431 Request Header Fields Too Large"));
        }
        Ok(_) => (),
    }
    if request.method != Some("GET") {
        return Some(Request::Refused("405 Method Not Allowed"));
    }
    let path = request.path.and_then(|path| path.split('?').next());
    let accepts = |header: &httparse::Header| {
        header.name.eq_ignore_ascii_case("accept")
            && header.value.windows(28).any(|word| word == b"application/openmetrics-text")
    };
    Some(match path {
        Some("/metrics") if request.headers.iter().any(accepts) => {
            Request::Metrics(Format::OpenMetrics)
        }
        Some("/metrics") => Request::Metrics(Format::Prometheus),
        Some("/") => Request::Start,
        _ => Request::Refused("404 Not Found"),
    })
}

fn answer(request: Request, metrics: &mut impl FnMut(Format) -> Result<String>) -> Result<Vec<u8>> {
    let (status, kind, body) = match request {
        Request::Metrics(format) => ("200 OK", format.content_type(), metrics(format)?),
        Request::Start => ("200 OK", "text/html; charset=utf-8", START.to_owned()),
        Request::Refused(status) => (status, "text/plain; charset=utf-8", format!("{status}\n")),
    };
    let length = body.len();
    Ok(format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Allow: GET\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_get_of_two_paths() {
        let parse = |text: &str| parse(text.as_bytes());
        let refused = |status| Some(Request::Refused(status));
        assert_eq!(parse("GET / HTTP/1.1\r\n\r\n"), Some(Request::Start));
        let metrics = |format| Some(Request::Metrics(format));
        assert_eq!(parse("GET /metrics?a HTTP/1.1\r\n\r\n"), metrics(Format::Prometheus));
        let accept =
            "GET /metrics HTTP/1.1\r\naccept: application/openmetrics-text;q=1,*/*\r\n\r\n";
        assert_eq!(parse(accept), metrics(Format::OpenMetrics));
        assert_eq!(parse(&accept[..accept.len() - 1]), None);
        assert_eq!(parse("GET /metricsx HTTP/1.1\r\n\r\n"), refused("404 Not Found"));
        assert_eq!(parse("POST /metrics HTTP/1.1\r\n\r\n"), refused("405 Method Not Allowed"));
        assert_eq!(parse("\u{16}\u{3}\u{1}"), refused("400 Bad Request"));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        assert_eq!(parse(&many), refused("431 Request Header Fields Too Large"));
        let long = format!("GET /{}", "a".repeat(REQUEST));
        assert_eq!(parse(&long), refused("431 Request Header Fields Too Large"));
    }
}
