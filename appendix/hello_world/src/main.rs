//! Every program that is executed, and every attempt that fails.

use std::{io::Error, mem::MaybeUninit, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, Options, Session};
use libbpf_rs::{
    OpenProgramMut, RingBufferBuilder,
    btf::{
        Btf, BtfKind, BtfType,
        types::{Func, FuncProto},
    },
    skel::Skel,
};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceSkelBuilder, types::event as Event};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Event {}

/// No options of its own, and no lines of `bpf_printk()`.
#[derive(Args, Debug)]
struct NoLines {}

impl Options for NoLines {
    fn prints_events(&self) -> bool {
        false
    }
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_: &Cli<NoLines>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let execveat = takes_registers(&open.progs.execveat_exit)?;
    open.progs.execveat_exit.set_autoload(execveat);
    let skel = session.load(open)?;
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, print_event)?;
    let ring = ring.build()?;
    println!("{:>8} {:<16} FILE", "PID", "COMM");
    let progs = &skel.progs;
    let hooks = [&progs.process_exec, &progs.execve_exit, &progs.execveat_exit];
    session.attach(hooks.into_iter().take(if execveat { 3 } else { 2 }))?;
    if !execveat {
        println!("failures of execveat() are not shown: this kernel's BTF does not describe it");
    }
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

/// Whether the kernel's BTF describes the argument of the function that the program hooks: on Debian's
/// 5.10, the struct of `execveat()` has a name only, and the verifier lets no program read it.
fn takes_registers(program: &OpenProgramMut) -> Result<bool> {
    let section = program.section().to_string_lossy();
    let btf = Btf::from_vmlinux().context("the kernel's BTF could not be read")?;
    let function = btf.type_by_name::<Func>(section.trim_start_matches("fexit/"));
    let prototype = function.and_then(|function| function.next_type()).map(FuncProto::try_from);
    let argument =
        prototype.and_then(|found| found.ok()?.iter().next().map(|argument| argument.ty));
    let pointer = argument.and_then(|ty| btf.type_by_id::<BtfType>(ty));
    let pointed = pointer.and_then(|ty| ty.skip_mods_and_typedefs().next_type());
    Ok(pointed.is_some_and(|ty| ty.skip_mods_and_typedefs().kind() == BtfKind::Struct))
}

fn print_event(bytes: &[u8]) -> i32 {
    let Ok(event) = plain::from_bytes::<Event>(bytes) else {
        return -1; // never: the BPF program writes nothing else
    };
    let file = match text(&event.file) {
        // The kernel has cut it: the last byte is the 0 that ends it.
        file if file.len() == event.file.len() - 1 => file + "…",
        file => file,
    };
    print!("{:>8} {:<16} {file}", event.pid, text(&event.comm));
    match event.error {
        0 => println!(),
        error => println!("  failed: {}", Error::from_raw_os_error(-error)),
    }
    0
}

/// A string of C. Control characters would change more than their line: they are replaced.
fn text(string: &[i8]) -> String {
    let bytes: Vec<u8> = string.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_in_its_line() {
        let name = b"a b\nc\0d".map(|c| c as i8);
        assert_eq!(text(&name), "a b?c");
    }
}
