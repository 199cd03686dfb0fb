//! What the launcher on the host and the agent in the guest say to each other.
//!
//! A message is four bytes of length (little endian), and as many bytes of postcard.
//! The session begins with [`Message::Hello`] from the guest and [`Message::Request`] from the
//! host, and ends with [`Message::Exit`].

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Read, Write};

use serde::{Deserialize, Serialize};

/// The most data that a message of output or input carries.
pub const CHUNK: usize = 32 * 1024;

/// A longer message than this is a broken stream. Linux limits a program's arguments and
/// environment to 6 MiB, whatever `ulimit -s` is: a [`Request`] with all of them fits.
const MAX_MESSAGE: usize = 8 * 1024 * 1024;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    /// Guest: the agent serves this port.
    Hello,
    /// Host: what to run.
    Request(Request),
    /// Host: a chunk of standard input.
    Stdin(Vec<u8>),
    /// Host: the end of standard input.
    StdinEof,
    /// Guest: the program has taken a chunk.
    StdinTaken,
    /// Guest: what the program has written; the terminal's output is [`Stream::Stdout`].
    Output(Stream, Vec<u8>),
    /// Host: the stream has been closed.
    Closed(Stream),
    Size(Size),
    /// Host: a signal for the program.
    Signal(i32),
    SignalTaken,
    /// Guest: the program has ended.
    Exit(Exit),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its exit code; 128 plus the signal's number where a signal ended it.
    pub status: i32,
    /// Other sessions that are still open in the guest.
    pub others: u32,
}

/// A terminal's size in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    pub rows: u16,
    pub cols: u16,
}

/// What the agent is asked to run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub argv: Vec<OsString>,
    /// The whole environment.
    pub env: Vec<(OsString, OsString)>,
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

/// How much of Linux's limit for arguments and environment (`getconf ARG_MAX`) these take, in
/// bytes: each string with its NUL, and a pointer to it.
pub fn size_of_arguments(argv: &[OsString], env: &[(OsString, OsString)]) -> usize {
    let string = |text: &OsStr| text.len() + 1 + size_of::<usize>();
    argv.iter().map(|argument| string(argument)).sum::<usize>()
        + env.iter().map(|(name, value)| name.len() + 1 + string(value)).sum::<usize>()
}

/// Writes one message, in one write where the stream takes it.
pub fn write_message(out: &mut impl Write, message: &Message) -> io::Result<()> {
    let mut whole = postcard::to_extend(message, vec![0; 4]).map_err(bad)?;
    let length = (whole.len() - 4) as u32;
    whole[..4].copy_from_slice(&length.to_le_bytes());
    out.write_all(&whole)?;
    out.flush()
}

/// Reads one message; `None` at the end of the stream between two messages.
pub fn read_message(input: &mut impl Read) -> io::Result<Option<Message>> {
    let mut length = [0; 4];
    let first = loop {
        match input.read(&mut length) {
            Ok(0) => return Ok(None),
            Ok(n) => break n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    };
    input.read_exact(&mut length[first..])?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(bad(format!("a message of {length} bytes")));
    }
    let mut data = vec![0; length];
    input.read_exact(&mut data)?;
    postcard::from_bytes(&data).map(Some).map_err(bad)
}

fn bad(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_stream_is_an_error_and_not_the_end() {
        for stream in [&[5, 0, 0, 0, 1][..], &[6, 5], &[1, 0, 0, 0, 99], &[255, 255, 255, 255, 0]] {
            assert!(read_message(&mut { stream }).is_err(), "{stream:?}");
        }
    }
}
