//! Reads that return many bytes at once.

use std::{mem::MaybeUninit, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, Session};
use libbpf_rs::{RingBufferBuilder, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceSkelBuilder, types::event as Event};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Event {}

/// `--min`.
#[derive(Args, Debug)]
struct Min {
    /// The fewest bytes that a read must return to be shown: 4096, 64K, 1M, 1G (of 1024)
    #[arg(long, value_name = "BYTES", default_value = "1M", value_parser = bytes)]
    min: u64,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Min>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    common::constants(&mut open.maps.rodata_data)?.min_bytes = cli.own.min;
    let has_sessions = common::has_sessions()?;
    open.progs.vfs_read_session.set_autoload(has_sessions);
    open.progs.vfs_read_exit.set_autoload(!has_sessions);
    let skel = session.load(open)?;
    let start = common::kernel_clock();
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, |bytes| print_event(bytes, start))?;
    let ring = ring.build()?;
    println!("{:>12} {:<16} {:>8} {:>10} FILE", "TIME(s)", "COMM", "PID", "BYTES");
    let (session_program, exit) = (&skel.progs.vfs_read_session, &skel.progs.vfs_read_exit);
    session.attach([if has_sessions { session_program } else { exit }])?;
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
    println!("{:>8} reads of at least {} bytes", counts.reads, cli.own.min);
    println!("{:>8} lines lost (ring buffer full)", counts.lost);
    common::print_skipped(skel.object())
}

fn print_event(bytes: &[u8], start: u64) -> i32 {
    let Ok(event) = plain::from_bytes::<Event>(bytes) else {
        return -1; // never: the BPF program writes nothing else
    };
    let seconds = event.time.saturating_sub(start) as f64 / 1e9;
    let (comm, file) = (common::text(&event.comm), name(&event.file, event.mode));
    println!("{seconds:>12.6} {comm:<16} {:>8} {:>10} {file}", event.pid, event.bytes);
    0
}

/// The last part of the file's path, or in brackets what it is where it has none.
fn name(file: &[i8], mode: u32) -> String {
    match (common::text(file), mode & 0o170_000) {
        (name, 0o010_000) if name.is_empty() => "[pipe]".into(),
        // The kernel names a socket by its protocol.
        (protocol, 0o140_000) => format!("[{protocol}]"),
        (name, _) if name.is_empty() => "[no name]".into(),
        (name, _) => name,
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    let hint = "give a number of bytes, like 4096, 64K, 1M or 1G";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| hint.to_owned())?;
    let shift = match &text[digits.len()..] {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        unit => return Err(format!("{unit:?} is no unit; {hint}")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("the number is too large; {hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_unit_of_1024() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64K"), Ok(65_536));
        assert_eq!((bytes("1M"), bytes("2g")), (Ok(1 << 20), Ok(2 << 30)));
        for wrong in ["", "M", "-1", "1.5M", "1MB", "99999999999G"] {
            assert!(bytes(wrong).unwrap_err().contains("64K"), "{wrong}");
        }
    }

    #[test]
    fn what_has_no_path_is_in_brackets() {
        assert_eq!(name(&[0; 4], 0o010_600), "[pipe]");
        assert_eq!(name(&b"TCP\0".map(|c| c as i8), 0o140_777), "[TCP]");
        assert_eq!(name(&[98, 0, 98], 0o100_600), "b");
    }
}
