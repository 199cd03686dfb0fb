//! --disk, --pid, --cgroup PATH: what they name is followed, where it is replaced.

use anyhow::Result;
use common::Session;
use libbpf_rs::MapCore;

use crate::{
    cli::Slow,
    named::Fate,
    trace::{OpenTraceSkel, TraceSkel},
};

/// Tells the programs what is wanted, before they are loaded.
pub fn set(open: &mut OpenTraceSkel<'_>, options: &Slow) -> Result<()> {
    let constants = common::constants(&mut open.maps.rodata_data)?;
    if let Some(disk) = &options.disk {
        disk.set(constants);
    }
    if let Some(process) = &options.pid {
        (constants.only_process, constants.only_started) = (process.number, process.started);
    }
    constants.with_cgroup = options.cgroup.is_some();
    let depth = options.cgroup.as_ref().map_or(0, |cgroup| cgroup.depth());
    constants.only_depth = depth;
    open.progs.cgroup_made.set_autoload(depth > 0);
    Ok(open.maps.levels.set_max_entries(depth.max(1))?)
}

/// From here on, the cgroup is followed: before any bio is seen.
pub fn follow(skel: &TraceSkel<'_>, session: &mut Session, options: &Slow) -> Result<()> {
    match &options.cgroup {
        Some(cgroup) if cgroup.depth() > 0 => {
            cgroup.begin(&skel.maps.levels, &skel.maps.generations)?;
            session.attach([&skel.progs.cgroup_made])?;
            cgroup.catch_up(&skel.maps.levels, &skel.maps.generations)
        }
        _ => Ok(()),
    }
}

/// Whether nothing can come any more: the process has ended, and so have its bios.
pub fn is_over(skel: &TraceSkel<'_>, options: &Slow) -> bool {
    let has_ended = options.pid.as_ref().is_some_and(common::Process::has_ended);
    has_ended && skel.maps.ios.keys().next().is_none()
}

/// Says it for each filter that has been replaced or is gone; in JSON, for each one.
pub fn print(skel: &TraceSkel<'_>, options: &Slow) -> Result<()> {
    let counts = common::counters(&skel.maps.bss_data)?;
    let disk = options.disk.as_ref().map(|disk| disk.fate(counts.followed_disk)).transpose()?;
    let process = options.pid.as_ref().map(|process| Fate {
        kind: "filter",
        filter: "pid",
        name: process.number.to_string(),
        replaced: false,
        gone: process.has_ended(),
    });
    let cgroup = options.cgroup.as_ref().filter(|cgroup| cgroup.depth() > 0);
    let cgroup = cgroup.map(|cgroup| cgroup.fate(counts.made_again));
    let fates = [disk, process, cgroup].into_iter().flatten();
    if options.json {
        for fate in fates {
            println!("{}", serde_json::to_string(&fate)?);
        }
        return Ok(());
    }
    let texts: Vec<_> =
        fates.filter(|fate| fate.replaced || fate.gone).map(|fate| fate.to_string()).collect();
    if !texts.is_empty() {
        println!();
    }
    texts.iter().for_each(|text| println!("{text}"));
    Ok(())
}
