//! Exercise retransmit: how many TCP segments each connection had to send again.

use std::{cmp::Reverse, mem::MaybeUninit, net::SocketAddr, process::ExitCode};

use anyhow::{Context, Result};
use common::{Cli, Session};
use libbpf_rs::{MapCore, MapFlags, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceSkelBuilder, types::connection as Connection};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Connection {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    session.attach([&skel.progs.sends_again, &skel.progs.answers_again])?;
    session.wait()?;
    session.detach()?;
    let mut lines = Vec::new();
    for key in skel.maps.connections.keys() {
        let value =
            skel.maps.connections.lookup(&key, MapFlags::ANY)?.context("an entry is gone")?;
        let mut connection = Connection::default();
        plain::copy_from_bytes(&mut connection, &key).ok().context("a key is too short")?;
        lines.push((u64::from_ne_bytes(value.try_into().ok().context("odd value")?), connection));
    }
    lines.sort_by_key(|(segments, _)| Reverse(*segments));
    for (segments, connection) in &lines {
        let from = address(connection, connection.from, connection.from_port);
        let to = address(connection, connection.to, connection.to_port);
        println!("{from} -> {to}: {segments} segments");
    }
    println!("{:>8} segments sent again", lines.iter().map(|(segments, _)| segments).sum::<u64>());
    println!("{:>8} dropped (map full)", common::counters(&skel.maps.bss_data)?.dropped);
    common::print_skipped(skel.object())
}

fn address(connection: &Connection, bytes: [u8; 16], port: u16) -> SocketAddr {
    let [a, b, c, d, ..] = bytes;
    match connection.is_ipv4 {
        0 => (bytes, port).into(),
        _ => ([a, b, c, d], port).into(),
    }
}
