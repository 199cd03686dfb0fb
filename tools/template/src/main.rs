//! Which threads could not run because they waited for I/O, and how long.

use std::cell::Cell;
use std::io::{self, ErrorKind, Write};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use libbpf_rs::RingBufferBuilder;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

mod tool {
    include!(concat!(env!("OUT_DIR"), "/tool.skel.rs"));
}
use tool::{ToolSkelBuilder, types::event as Event};

/// Prints a line for each thread that slept uninterruptibly, which is mostly for I/O.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// Print only sleeps of at least this many milliseconds
    #[arg(long, value_name = "MS", default_value_t = 10, allow_negative_numbers = true)]
    min: u32,
    /// How long to trace: 10s, 2m, 500ms [default: until Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    duration: Option<Duration>,
}

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Event {}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst))?;

    // Open: libbpf reads the object. Until it is loaded, constants and sizes of maps can be set.
    let mut object = MaybeUninit::uninit();
    let mut open = ToolSkelBuilder::default().open(&mut object).context("cannot open")?;
    let constants = open.maps.rodata_data.as_mut().context("the object has no constants")?;
    constants.min_ns = u64::from(cli.min) * 1_000_000;
    // Load: the kernel's verifier checks the program. This needs privileges.
    let skel = open.load().map_err(|error| {
        // EPERM. Where the verifier rejects the program, it is EACCES or EINVAL, and no privilege helps.
        let refused = format!("{error:#}").ends_with("(os error 1)");
        anyhow::Error::new(error).context(match refused {
            true => "cannot load the BPF program: this needs root, or CAP_BPF and CAP_PERFMON",
            false => "cannot load the BPF program",
        })
    })?;
    let start = Instant::now();
    let is_over = || {
        stop.load(Ordering::SeqCst) || cli.duration.is_some_and(|limit| start.elapsed() >= limit)
    };
    // The ring buffer calls this for each record that the program has submitted.
    let (mut lines, mut written, is_attached) = (0, Ok(()), Cell::new(true));
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, |bytes| {
        if written.is_ok() {
            match print(bytes) {
                Ok(()) => lines += 1,
                Err(error) => {
                    written = Err(error);
                    stop.store(true, Ordering::SeqCst);
                }
            }
        }
        // poll() returns when the buffer is empty, and a busy kernel may fill it faster than this
        // prints. An error makes poll() return after this record.
        if is_attached.get() && is_over() { -1 } else { 0 }
    })?;
    let ring = ring.build().context("cannot make the ring buffer")?;
    // Attach: from here on, the kernel runs the program.
    let link = skel.progs.thread_switch.attach().context("cannot attach to sched_switch")?;
    eprintln!("tracing; stop with Ctrl-C");
    while !is_over() {
        match ring.poll(Duration::from_millis(100)) {
            Err(error) if !is_over() && error.kind() != libbpf_rs::ErrorKind::Interrupted => {
                return Err(error).context("cannot read the ring buffer");
            }
            _ => {}
        }
    }
    drop(link); // detaches
    is_attached.set(false);
    ring.consume().context("cannot read the rest of the ring buffer")?;
    drop(ring);
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {} // nobody reads: `… | head`
        written => written.context("cannot write a line")?,
    }
    let counts = skel.maps.bss_data.as_ref().context("the object has no counters")?;
    eprintln!("{lines} lines, {} lost (ring buffer full)", counts.lost);
    eprintln!("{} sleeps not measured (map full)", counts.dropped);
    Ok(())
}

/// Reads a time like `10s`.
fn duration(text: &str) -> Result<Duration, String> {
    let hint = "give a number and a unit, like 10s, 500ms or 2m";
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err(format!("the duration must be longer than zero; {hint}")),
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("{error}; {hint}")),
    }
}

/// Prints a record as a line.
fn print(bytes: &[u8]) -> io::Result<()> {
    let event = plain::from_bytes::<Event>(bytes).map_err(|_| ErrorKind::InvalidData)?;
    let name: Vec<u8> = event.comm.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    let name = String::from_utf8_lossy(&name).replace(char::is_control, "?");
    let ms = event.ns as f64 / 1e6;
    writeln!(io::stdout(), "{name:<16} pid {:>7} tid {:>7} {ms:>10.3} ms", event.pid, event.tid)
}
