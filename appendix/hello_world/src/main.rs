//! Every program that is executed, and every attempt that fails.

use std::{io::Error, mem::MaybeUninit, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use common::{Cli, Session};
use libbpf_rs::{RingBufferBuilder, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceSkelBuilder, types::event as Event};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Event {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, print_event)?;
    let ring = ring.build()?;
    println!("{:>8} {:<16} FILE", "PID", "COMM");
    let progs = &skel.progs;
    session.attach([&progs.process_exec, &progs.execve_exit, &progs.execveat_exit])?;
    session.begin()?;
    while !session.is_over() {
        match ring.poll(Duration::from_millis(100)) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::Interrupted => {
                return Err(error).context("the ring buffer could not be read");
            }
            _ => {}
        }
    }
    session.detach()?;
    ring.consume()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    println!("{:>8} programs executed", counts.executed);
    println!("{:>8} attempts failed", counts.failed);
    println!("{:>8} lines lost (ring buffer full)", counts.lost);
    common::print_skipped(skel.object())
}

fn print_event(bytes: &[u8]) -> i32 {
    let Ok(event) = plain::from_bytes::<Event>(bytes) else {
        return -1; // never: the BPF program writes nothing else
    };
    let file = name(event.directory, &common::text(&event.file));
    print!("{:>8} {:<16} {file}", event.pid, common::text(&event.comm));
    match event.error {
        0 => println!(),
        error => println!("  failed: {}", Error::from_raw_os_error(-error)),
    }
    0
}

/// The most bytes of a file's name that are shown.
const SHOWN: usize = 255;
/// In the place of an open directory: the current one.
const AT_FDCWD: i32 = -100;

/// A name that begins at an open directory, as the kernel writes it where the execution succeeds; cut
/// where it is too long.
fn name(directory: i32, file: &str) -> String {
    let mut name = match (directory, file) {
        (AT_FDCWD, file) => file.to_owned(),
        (_, file) if file.starts_with('/') => file.to_owned(),
        (directory, "") => format!("/dev/fd/{directory}"),
        (directory, file) => format!("/dev/fd/{directory}/{file}"),
    };
    if name.len() > SHOWN {
        // Not in the middle of a character.
        let end = (0..=SHOWN).rfind(|&end| name.is_char_boundary(end)).unwrap_or_default();
        name.truncate(end);
        name.push('…');
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_in_its_line() {
        let name = b"a b\nc\0d".map(|c| c as i8);
        assert_eq!(common::text(&name), "a b?c");
    }

    #[test]
    fn a_name_is_cut_where_it_is_too_long() {
        let long = "x".repeat(255);
        assert_eq!(name(AT_FDCWD, &long), long);
        assert_eq!(name(AT_FDCWD, &(long.clone() + "y")), long.clone() + "…");
        assert_eq!(name(AT_FDCWD, &(long[..254].to_owned() + "é")), long[..254].to_owned() + "…");
        assert_eq!(name(3, &long), format!("/dev/fd/3/{}…", &long[..245]));
    }

    #[test]
    fn a_relative_name_begins_at_its_directory() {
        assert_eq!(name(AT_FDCWD, "./run"), "./run");
        assert_eq!(name(5, "run"), "/dev/fd/5/run");
        assert_eq!(name(5, "/run"), "/run");
        assert_eq!(name(5, ""), "/dev/fd/5");
    }
}
