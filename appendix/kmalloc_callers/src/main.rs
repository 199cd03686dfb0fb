//! The kernel functions that call kmalloc(), and how often.

use std::{
    collections::HashMap,
    iter::zip,
    mem::MaybeUninit,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, Session};
use libbpf_rs::{MapCore, MapFlags, skel::Skel};

mod callers;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use callers::{Calls, Sites, since, table};
use trace::{TraceSkelBuilder, types};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for types::calls {}

/// `--interval`, `--top`.
#[derive(Args, Debug)]
struct TableOptions {
    /// Print a table in each interval: 1s, 500ms
    #[arg(short, long, value_name = "TIME", value_parser = common::duration, default_value = "1s")]
    interval: Duration,
    /// How many functions a table shows; the others are one row
    #[arg(short, long, value_name = "N", default_value_t = 10)]
    top: usize,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<TableOptions>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    common::functions_have_names()?;
    // From 7.0 on, a tp_btf program may be preempted: then it is skipped for other tasks.
    let classic = common::has_sessions()?;
    open.progs.kmalloc_classic.set_autoload(classic);
    open.progs.kmalloc_btf.set_autoload(!classic);
    let skel = session.load(open)?;
    let (record, arguments) = (&skel.progs.kmalloc_classic, &skel.progs.kmalloc_btf);
    session.attach([if classic { record } else { arguments }])?;
    session.begin()?;

    let mut names = Names::default();
    let (start, mut before, mut from) = (Instant::now(), Sites::new(), Duration::ZERO);
    while !session.is_over() {
        thread::sleep(Duration::from_millis(50));
        let to = start.elapsed();
        if to >= from + cli.own.interval && !session.is_over() {
            let now = read(&skel.maps.sites)?;
            println!("from {:.1} s to {:.1} s:", from.as_secs_f64(), to.as_secs_f64());
            println!("{}", names.table(&since(&now, &before), cli.own.top)?);
            (before, from) = (now, to);
        }
    }
    session.detach()?;
    let all = read(&skel.maps.sites)?;
    println!("from 0.0 s to {:.1} s:", start.elapsed().as_secs_f64());
    print!("{}", names.table(&all, cli.own.top)?);
    let counts = common::counters(&skel.maps.bss_data)?;
    println!("{:>10} dropped (no room in the map for another caller)", counts.dropped);
    common::print_skipped(skel.object())
}

fn read(map: &impl MapCore) -> Result<Sites> {
    let mut sites = Sites::new();
    for site in map.keys() {
        // The BPF program removes none: each key still has its value.
        let Some(value) = map.lookup(&site, MapFlags::ANY)? else { continue };
        let site = u64::from_ne_bytes(site.try_into().ok().context("odd size of a key")?);
        let mut read = types::calls::default();
        plain::copy_from_bytes(&mut read, &value).ok().context("a value is too short")?;
        let types::calls { calls, asked, given } = read;
        // One that is just being added.
        if calls > 0 {
            sites.insert(site, Calls { calls, asked, given });
        }
    }
    Ok(sites)
}

/// The functions of the addresses seen so far: looking one up means to read all of /proc/kallsyms.
#[derive(Default)]
struct Names(HashMap<u64, String>);

impl Names {
    fn table(&mut self, sites: &Sites, top: usize) -> Result<String> {
        let new: Vec<u64> = sites.keys().copied().filter(|s| !self.0.contains_key(s)).collect();
        // Of an address that is returned to, the call is just before.
        let calls: Vec<u64> = new.iter().map(|site| site - 1).collect();
        if !new.is_empty() {
            self.0.extend(zip(new, common::functions(&calls)?));
        }
        let name = |site| self.0.get(&site).cloned().unwrap_or_else(|| format!("{site:#x}"));
        Ok(table(sites, name, top))
    }
}
