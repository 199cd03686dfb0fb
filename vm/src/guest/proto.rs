//! Frames between the launcher on the host and the agent in the guest.
//!
//! A frame is one byte of kind, four bytes of length (little endian), and the payload.
//! The session begins with [`Kind::Hello`] from the guest and [`Kind::Request`] from the
//! host, and ends with [`Kind::Exit`].

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Serialize};

/// How many bytes of standard input may be in flight: sent to the guest, and not yet taken by
/// the program. The limit keeps signals and window sizes from queueing behind unread data.
pub const STDIN_WINDOW: usize = 256 * 1024;

/// The most data that a frame of output or input carries.
pub const CHUNK: usize = 32 * 1024;

/// A longer frame than this is a broken stream. Linux limits a program's arguments and
/// environment to 6 MiB, whatever `ulimit -s` is: a [`Request`] with all of them fits.
const MAX_FRAME: usize = 8 * 1024 * 1024;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// What a frame is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$doc])* $name = $value,)*
        }

        impl Kind {
            fn from_byte(byte: u8) -> Option<Kind> {
                match byte {
                    $($value => Some(Kind::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Guest: the agent serves this port.
    Hello = 1,
    /// Host: what to run, a [`Request`].
    Request = 2,
    /// Host: standard input.
    Stdin = 3,
    /// Host: the end of standard input.
    StdinEof = 4,
    /// Guest: the program has taken this many bytes of standard input (u32).
    StdinTaken = 5,
    /// Guest: standard output, or the terminal's output.
    Stdout = 6,
    /// Guest: standard error.
    Stderr = 7,
    /// Host: standard output has been closed.
    StdoutClosed = 8,
    /// Host: standard error has been closed.
    StderrClosed = 9,
    /// Host: the terminal's size, a [`Size`] as two u16: rows, columns.
    Size = 10,
    /// Host: a signal for the program (i32).
    Signal = 11,
    /// Guest: the signal was delivered.
    SignalTaken = 12,
    /// Guest: the program has ended: status (i32), other sessions still open (u32).
    Exit = 13,
}

/// A frame as it was read.
#[derive(Debug)]
pub struct Frame {
    /// Its kind.
    pub kind: Kind,
    /// Its content.
    pub data: Vec<u8>,
}

impl Frame {
    /// The little-endian u32 at the offset `at`, 0 where the frame is too short.
    pub fn u32_at(&self, at: usize) -> u32 {
        let bytes = self.data.get(at..at + 4);
        bytes.map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
}

/// A terminal's size in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Lines.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

impl Size {
    /// The payload of a [`Kind::Size`] frame.
    pub fn to_bytes(self) -> [u8; 4] {
        let (r, c) = (self.rows.to_le_bytes(), self.cols.to_le_bytes());
        [r[0], r[1], c[0], c[1]]
    }

    /// The size that a frame carries.
    pub fn from_frame(frame: &Frame) -> Size {
        let both = frame.u32_at(0);
        Size { rows: both as u16, cols: (both >> 16) as u16 }
    }
}

/// What the agent is asked to run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// Program and arguments.
    #[serde(skip)]
    pub argv: Vec<OsString>,
    /// The whole environment.
    #[serde(skip)]
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    pub cwd: OsString,
    /// Standard input comes from a terminal in raw mode.
    pub stdin_tty: bool,
    /// Standard output goes to a terminal.
    pub stdout_tty: bool,
    /// Standard error goes to a terminal.
    pub stderr_tty: bool,
    /// The terminal's size, where one of the three is a terminal.
    pub size: Option<Size>,
    /// A second program, which runs for as long as the program does.
    pub workload: Option<OsString>,
}

impl Request {
    /// The payload of a [`Kind::Request`] frame: the number of arguments and the small fields as
    /// JSON, then each argument and each variable, with a NUL before it. None of them contains
    /// one, and as JSON they would be four times as long.
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(&(self.argv.len(), self))?;
        for argument in &self.argv {
            bytes.push(0);
            bytes.extend_from_slice(argument.as_bytes());
        }
        for (name, value) in &self.env {
            bytes.push(0);
            bytes.extend_from_slice(name.as_bytes());
            bytes.push(b'=');
            bytes.extend_from_slice(value.as_bytes());
        }
        Ok(bytes)
    }

    /// The request that a frame carries.
    pub fn from_frame(frame: &Frame) -> serde_json::Result<Request> {
        let mut pieces = frame.data.split(|&byte| byte == 0);
        let head = pieces.next().unwrap_or_default();
        let (arguments, mut request): (usize, Request) = serde_json::from_slice(head)?;
        let owned = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        request.argv = pieces.by_ref().take(arguments).map(owned).collect();
        // As for getenv(3), a `=` at the very start belongs to the name.
        request.env = pieces
            .filter_map(|variable| {
                let at = 1 + variable.get(1..)?.iter().position(|&byte| byte == b'=')?;
                Some((owned(&variable[..at]), owned(&variable[at + 1..])))
            })
            .collect();
        Ok(request)
    }
}

/// How much of Linux's limit for arguments and environment (`getconf ARG_MAX`) these take, in
/// bytes: each string with its NUL, and a pointer to it.
pub fn size_of_arguments(argv: &[OsString], env: &[(OsString, OsString)]) -> usize {
    let string = |text: &OsStr| text.len() + 1 + size_of::<usize>();
    argv.iter().map(|argument| string(argument)).sum::<usize>()
        + env.iter().map(|(name, value)| name.len() + 1 + string(value)).sum::<usize>()
}

/// Writes one frame, in one write where the stream takes it.
pub fn write_frame(out: &mut impl Write, kind: Kind, data: &[u8]) -> io::Result<()> {
    let mut whole = Vec::with_capacity(5 + data.len());
    whole.push(kind as u8);
    whole.extend_from_slice(&(data.len() as u32).to_le_bytes());
    whole.extend_from_slice(data);
    out.write_all(&whole)?;
    out.flush()
}

/// Reads one frame; `None` at the end of the stream between two frames.
pub fn read_frame(input: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut first = [0];
    loop {
        match input.read(&mut first) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let bad = |what: String| io::Error::new(ErrorKind::InvalidData, what);
    let kind =
        Kind::from_byte(first[0]).ok_or_else(|| bad(format!("unknown frame kind {}", first[0])))?;
    let mut length = [0; 4];
    input.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(bad(format!("a frame of {length} bytes")));
    }
    let mut data = vec![0; length];
    input.read_exact(&mut data)?;
    Ok(Some(Frame { kind, data }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let mut wire = Vec::new();
        write_frame(&mut wire, Kind::Stdout, b"a\0b\xff").unwrap();
        write_frame(&mut wire, Kind::StdinEof, b"").unwrap();
        let size = Size { rows: 24, cols: 300 };
        write_frame(&mut wire, Kind::Size, &size.to_bytes()).unwrap();
        let mut wire = wire.as_slice();
        let frame = read_frame(&mut wire).unwrap().unwrap();
        assert_eq!((frame.kind, frame.data.as_slice()), (Kind::Stdout, &b"a\0b\xff"[..]));
        assert_eq!(read_frame(&mut wire).unwrap().unwrap().kind, Kind::StdinEof);
        assert_eq!(Size::from_frame(&read_frame(&mut wire).unwrap().unwrap()), size);
        assert!(read_frame(&mut wire).unwrap().is_none());
    }

    #[test]
    fn a_broken_stream_is_an_error_and_not_the_end() {
        for wire in [&[6, 5, 0, 0, 0, 1][..], &[6, 5], &[99, 0, 0, 0, 0], &[6, 255, 255, 255, 255]]
        {
            assert!(read_frame(&mut { wire }).is_err(), "{wire:?}");
        }
    }

    #[test]
    fn a_request_keeps_every_byte() {
        let odd = OsString::from_vec(vec![b'x', 0xff, b'\n', b'=']);
        let request = Request {
            argv: vec![odd.clone(), "".into(), "a=b".into()],
            env: vec![("A".into(), odd.clone()), ("=B".into(), "".into())],
            cwd: odd.clone(),
            stdin_tty: true,
            stdout_tty: true,
            stderr_tty: false,
            size: Some(Size { rows: 1, cols: 2 }),
            workload: None,
        };
        let frame = Frame { kind: Kind::Request, data: request.to_bytes().unwrap() };
        let back = Request::from_frame(&frame).unwrap();
        assert_eq!((&back.argv, &back.env, &back.cwd), (&request.argv, &request.env, &odd));
        assert_eq!((back.stdin_tty, back.size), (true, request.size));
        assert_eq!(size_of_arguments(&back.argv, &back.env), (5 + 1 + 4) + (7 + 4) + 5 * 8);
        assert!(Request::from_frame(&Frame { kind: Kind::Request, data: vec![] }).is_err());
    }
}
