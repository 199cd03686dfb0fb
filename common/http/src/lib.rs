//! A server for a page or two: no more of HTTP than that needs.
//!
//! One thread serves all clients, and none of them can make another one wait. No call blocks. A client
//! in whose connection nothing moves for a while is disconnected. Where there are too many clients, or
//! their answers need too much memory, those of the address that has most of them go first, and of
//! these the idle ones.
//!
//! A browser can be made to send requests here by a page of somebody else: one whose name leads to its own
//! server first, and to this machine afterwards (*DNS rebinding*). Such a request has that name in its header
//! `Host`, so only requests to this machine's own names are answered, see [`Names`].

mod answer;
mod client;
mod names;

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{Error, ErrorKind},
    net::{IpAddr, TcpListener},
    os::fd::AsRawFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub use answer::Answer;
use anyhow::{Context, Result};
use client::Client;
pub use names::Names;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// How many clients may be connected at a time.
const CLIENTS: usize = 64;
/// How many connections the kernel keeps for us until we accept them, if `net.core.somaxconn` allows it. The
/// standard library asks for 128. Where they are all taken, the kernel drops the SYN of the next client, which
/// sends it again after 1, 3, 7, 15 and 31 s.
const BACKLOG: i32 = 4096;
/// How many bytes the answers on their way may have together. What several clients get is counted once.
const MEMORY: usize = 64 << 20;
/// The longest request, with its body.
const REQUEST: usize = 8 * 1024;
/// The most headers that a request may have.
const HEADERS: usize = 64;
/// Where there is no room for a client, the next one is not accepted before.
const LACK: Duration = Duration::from_millis(10);

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

/// Listens, and answers.
pub struct Server {
    listener: TcpListener,
    /// As the header `Allow` has them.
    methods: &'static str,
    names: Names,
    clients: Vec<Client>,
}

impl Server {
    /// Serves those who connect to this socket and ask for one of these names, with these methods:
    /// `GET, POST`.
    pub fn new(listener: TcpListener, methods: &'static str, names: Names) -> Result<Server> {
        listener.set_nonblocking(true).context("the listening socket")?;
        // It listens already: this only changes the length of the queue.
        rustix::net::listen(&listener, BACKLOG).context("the queue of the listening socket")?;
        Ok(Server { listener, methods, names, clients: Vec::new() })
    }

    /// Waits until a client has something to do, at most for this time, and does it.
    ///
    /// All requests are read before `answer` is called for the first of them. So what it returns for one is as
    /// new as each of the others may expect.
    pub fn serve(
        &mut self,
        at_most: Duration,
        mut answer: impl FnMut(&Request) -> Result<Answer>,
    ) -> Result<()> {
        self.move_bytes(at_most)?;
        self.accept();
        for index in 0..self.clients.len() {
            let client = &mut self.clients[index];
            if std::mem::take(&mut client.has_spoken)
                && let Some(found) =
                    respond(client.request(), self.methods, &self.names, &mut answer)?
            {
                client.answer(found, self.methods);
                self.keep_to_memory(index);
            }
        }
        self.forget();
        Ok(())
    }

    /// Waits for clients, reads what they have sent, and sends what they can take.
    fn move_bytes(&mut self, at_most: Duration) -> Result<()> {
        let timeout = Timespec {
            tv_sec: at_most.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: at_most.subsec_nanos().into(),
        };
        let mut files = vec![PollFd::new(&self.listener, PollFlags::IN)];
        files.extend(self.clients.iter().map(|client| {
            let wanted = if client.is_answered() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(client.socket(), wanted)
        }));
        match poll(&mut files, Some(&timeout)) {
            Err(error) if error != Errno::INTR => return Err(error).context("poll"),
            _ => (),
        }
        let are_ready: Vec<bool> =
            files.iter().skip(1).map(|it| !it.revents().is_empty()).collect();
        for (client, _) in self.clients.iter_mut().zip(are_ready).filter(|(_, is_ready)| *is_ready)
        {
            if client.is_answered() { client.send() } else { client.receive() }
        }
        self.forget();
        Ok(())
    }

    /// Disconnects those who have got their answer, have gone, or have stood still for too long.
    fn forget(&mut self) {
        let now = Instant::now();
        self.clients.retain(|client| client.stays(now));
    }

    /// Accepts all who have connected: those who stay in the kernel's queue keep others out.
    fn accept(&mut self) {
        for _ in 0..BACKLOG {
            match self.listener.accept() {
                Ok((stream, address)) if stream.set_nonblocking(true).is_ok() => {
                    if self.clients.len() >= CLIENTS {
                        self.end_one(|_| true);
                        self.forget();
                    }
                    self.clients.push(Client::new(stream, address.ip()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_for_lack_of_room(&error) => {
                    if !self.end_one(|_| true) {
                        thread::sleep(LACK); // no client of ours is in the way, and poll would not wait
                        return;
                    }
                    self.forget();
                }
                _ => (), // a client that has gone again
            }
        }
    }

    /// Disconnects clients until the answers need no more memory than they may. The one of this index has just
    /// got one.
    fn keep_to_memory(&mut self, newest: usize) {
        while self.memory() > MEMORY {
            let newest = self.clients[newest].socket().as_raw_fd();
            let is_older = |it: &Client| it.is_answered() && it.socket().as_raw_fd() != newest;
            if !self.end_one(is_older) {
                return;
            }
        }
    }

    /// How many bytes all bodies have.
    fn memory(&self) -> usize {
        let bodies = self.clients.iter().filter_map(Client::body);
        let bodies: HashMap<_, _> = bodies.map(|it| (Arc::as_ptr(it), it.len())).collect();
        bodies.values().sum()
    }

    /// Disconnects one of these clients, if there is any: of the address that has most of them, one that has asked
    /// for nothing yet, or else gets an answer, and where nothing has moved for longest.
    fn end_one(&mut self, among: impl Fn(&Client) -> bool) -> bool {
        let mut counts = HashMap::<IpAddr, usize>::new();
        for client in self.clients.iter().filter(|client| among(client)) {
            *counts.entry(client.owner).or_default() += 1;
        }
        let clients = self.clients.iter_mut().filter(|client| among(client));
        let first = |it: &&mut Client| (counts[&it.owner], !it.is_served(), Reverse(it.moved));
        clients.max_by_key(first).map(Client::end).is_some()
    }
}

/// Whether a connection could not be accepted because the process, or the machine, has no room for it.
fn is_for_lack_of_room(error: &Error) -> bool {
    let lack = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| lack.contains(&errno))
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
        [_] => {
            return Ok(Some(Answer {
                body: Arc::new(FOREIGN.into()),
                ..Answer::refused(MISDIRECTED)
            }));
        }
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
    use std::{
        io::{Read, Write},
        net::{SocketAddr, TcpStream},
    };

    use super::{client::IDLE, *};

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

    /// A server on the loopback interface, and where it is.
    fn server() -> (Server, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (Server::new(listener, "GET", Names::new(&[])).unwrap(), address)
    }

    fn connect(address: SocketAddr) -> TcpStream {
        TcpStream::connect_timeout(&address, Duration::from_millis(900)).unwrap()
    }

    fn ask(address: SocketAddr) -> TcpStream {
        let mut client = connect(address);
        client.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        client
    }

    /// Lets a server answer for a while, each request with so many bytes of its own.
    fn serve(server: &mut Server, length: usize, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            let mut answer = |_: &Request| Ok(Answer::found("text/plain", vec![b'a'; length]));
            server.serve(Duration::from_millis(5), &mut answer).unwrap();
            assert!(server.clients.len() <= CLIENTS && server.memory() <= MEMORY);
        }
    }

    /// More than both ends of a connection have buffers for.
    const LARGE: usize = 24 << 20;

    #[test]
    fn a_client_stays_as_long_as_bytes_move() {
        let (mut server, address) = server();
        let (silent, mut slow) = (connect(address), ask(address));
        let reader = thread::spawn(move || {
            let mut all = Vec::new();
            for pause in [2, 2, 2, 0] {
                (&mut slow).take(LARGE as u64 / 4).read_to_end(&mut all).unwrap();
                thread::sleep(Duration::from_secs(pause));
            }
            slow.read_to_end(&mut all).unwrap();
            all.len()
        });
        let start = Instant::now();
        while !reader.is_finished() {
            serve(&mut server, LARGE, Duration::from_millis(100));
        }
        assert!(reader.join().unwrap() > LARGE && start.elapsed() > IDLE, "{:?}", start.elapsed());
        assert!(server.clients.is_empty(), "the silent one is still there");
        drop(silent);
    }

    #[test]
    fn idle_clients_go_first() {
        let (mut server, address) = server();
        let mut served = ask(address);
        serve(&mut server, LARGE, Duration::from_millis(50));
        let silent: Vec<TcpStream> = (0..5 * CLIENTS).map(|_| connect(address)).collect();
        serve(&mut server, LARGE, Duration::from_millis(50));
        assert_eq!(server.clients.len(), CLIENTS);
        let reader = thread::spawn(move || served.read_to_end(&mut Vec::new()));
        while !reader.is_finished() {
            serve(&mut server, LARGE, Duration::from_millis(20));
        }
        assert!(reader.join().unwrap().unwrap() > LARGE);
        drop(silent);
    }

    #[test]
    fn clients_that_do_not_read_need_little_memory() {
        let (mut server, address) = server();
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(ask(address));
            serve(&mut server, LARGE, Duration::from_millis(20));
        }
        assert_eq!(server.clients.len(), MEMORY / LARGE);
        // What all get needs no more memory than what one gets.
        let body = Arc::new(vec![b'a'; LARGE]);
        clients.extend((0..20).map(|_| ask(address)));
        for _ in 0..5 {
            let mut answer = |_: &Request| Ok(Answer::shared("text/plain", Arc::clone(&body)));
            server.serve(Duration::from_millis(5), &mut answer).unwrap();
        }
        let sharing = server.clients.iter().filter_map(Client::body);
        assert_eq!(sharing.filter(|it| Arc::ptr_eq(it, &body)).count(), 20);
    }
}
