//! One connection: what was asked, and what is left to send.

use std::{
    io::{ErrorKind, IoSlice, Read, Write},
    net::{IpAddr, Ipv6Addr, Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::answer::Answer;

/// How long a client may stay where nothing moves.
pub(crate) const IDLE: Duration = Duration::from_secs(5);
/// How long a client may take for its request, also if it sends a byte now and then.
const ASKING: Duration = Duration::from_secs(10);

/// What goes out.
struct Outgoing {
    head: Vec<u8>,
    body: Arc<Vec<u8>>,
    sent: usize,
}

/// A client that is connected.
pub(crate) struct Client {
    stream: TcpStream,
    /// Whose it is, see [`owner`].
    pub owner: IpAddr,
    since: Instant,
    /// When bytes were last received or sent, or the client connected.
    pub moved: Instant,
    request: Vec<u8>,
    /// Whether bytes have come that nobody has looked at.
    pub has_spoken: bool,
    answer: Option<Outgoing>,
    is_over: bool,
}

impl Client {
    /// Reads at once what it has sent already.
    pub fn new(stream: TcpStream, address: IpAddr) -> Client {
        let (owner, now) = (owner(address), Instant::now());
        let request = Vec::new();
        let mut client = Client {
            stream,
            owner,
            since: now,
            moved: now,
            request,
            has_spoken: false,
            answer: None,
            is_over: false,
        };
        client.receive();
        client
    }

    /// Its socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether its request is complete: it gets an answer, or will at once.
    pub fn is_served(&self) -> bool {
        self.has_spoken || self.answer.is_some()
    }

    /// Whether it gets an answer.
    pub fn is_answered(&self) -> bool {
        self.answer.is_some()
    }

    /// The body that it gets.
    pub fn body(&self) -> Option<&Arc<Vec<u8>>> {
        self.answer.as_ref().map(|answer| &answer.body)
    }

    /// All that it has sent so far.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// Disconnects it. What it would have got needs no memory any more.
    pub fn end(&mut self) {
        (self.is_over, self.has_spoken, self.answer) = (true, false, None);
        self.stream.shutdown(Shutdown::Both).ok();
    }

    /// Whether it stays connected.
    pub fn stays(&self, now: Instant) -> bool {
        let asks_for = now.saturating_duration_since(self.since);
        let is_idle = now.saturating_duration_since(self.moved) >= IDLE;
        !self.is_over && !is_idle && (self.answer.is_some() || asks_for < ASKING)
    }

    /// Reads what there is to read.
    pub fn receive(&mut self) {
        let mut buffer = [0; 1024];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.is_over = true,
            Ok(n) => {
                self.request.extend_from_slice(&buffer[..n]);
                (self.moved, self.has_spoken) = (Instant::now(), true);
            }
            Err(error) => self.is_over |= !is_temporary(error.kind()),
        }
    }

    /// Begins to send an answer.
    pub fn answer(&mut self, answer: Answer, methods: &str) {
        let Answer { status, kind, body } = answer;
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
             Allow: {methods}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        self.answer = Some(Outgoing { head: head.into_bytes(), body, sent: 0 });
        self.send();
    }

    /// Sends as much as the socket takes.
    pub fn send(&mut self) {
        let Some(Outgoing { head, body, sent }) = &mut self.answer else { return };
        let parts = [&head[(*sent).min(head.len())..], &body[sent.saturating_sub(head.len())..]];
        match self.stream.write_vectored(&parts.map(IoSlice::new)) {
            Ok(n) => {
                *sent += n;
                self.moved = Instant::now();
            }
            Err(error) => self.is_over |= !is_temporary(error.kind()),
        }
        if *sent == head.len() + body.len() {
            self.stream.shutdown(Shutdown::Write).ok();
            self.is_over = true;
        }
    }
}

fn is_temporary(error: ErrorKind) -> bool {
    matches!(error, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Those that count as one client: an address, and of IPv6 a network of 64 bits, whose addresses a single
/// machine may have all.
fn owner(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_one_owner() {
        let owner = |text: &str| owner(text.parse().unwrap()).to_string();
        assert_eq!(owner("10.0.0.1"), "10.0.0.1");
        assert_eq!(owner("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(owner("2001:db8:1:2:3:4:5:6"), owner("2001:db8:1:2::9"));
        assert_ne!(owner("2001:db8:1:2::9"), owner("2001:db8:1:3::9"));
    }
}
