//! The guest tests: every figure that a stage prints, judged by something that we did not write.
//!
//! Runs as root in the VM (`cargo vm test`), one test after the other: the block layer's counters
//! are everybody's. Takes libtest's arguments: a filter, `--list`, `--exact`.

mod bios;
mod commands;
mod ctracer;
mod disks;
mod faults;
mod ftrace;
mod load;
mod pagecache;
mod readme;
mod requests;
mod run;

use std::{env, fs, path::Path, process::Command};

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

/// A test's name, and the test.
type Test = (&'static str, fn() -> Result<()>);

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let tests = [
        commands::TESTS,
        requests::TESTS,
        bios::TESTS,
        readme::TESTS,
        pagecache::TESTS,
        faults::TESTS,
        load::TESTS,
        ctracer::TESTS,
    ]
    .concat();
    let (part, parts) = part(&env::var("VM_TESTS_PART").unwrap_or_default()).unwrap_or((0, 1));
    let trials = tests
        .into_iter()
        .skip(part)
        .step_by(parts)
        .map(|(name, test)| {
            Trial::test(name, move || test().map_err(|e| Failed::from(format!("{e:#}"))))
        })
        .collect();
    if !arguments.list {
        prepare();
    }
    libtest_mimic::run(&arguments, trials).exit()
}

/// `1/2`: every second test from the second one on.
fn part(text: &str) -> Option<(usize, usize)> {
    let (part, parts) = text.split_once('/')?;
    let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
    (part < parts).then_some((part, parts))
}

/// Leaves the data disk alone: its journal would submit bios of its own. And the programs, configfs
/// and the modules that the tests need.
fn prepare() {
    assert!(Path::new("/run/bpf-vm").exists(), "the guest tests run in the VM only: cargo vm test");
    assert!(rustix::process::geteuid().is_root(), "the guest tests run as root");
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    println!("kernel {}", release.trim());
    // The workspace is shared without a cache: a stage started from it takes twice as long.
    let copied = run::PROGRAMS;
    fs::create_dir_all(copied).expect(copied);
    for stage in run::stages().expect("the workspace's stages") {
        let stage = stage.split('_').next().unwrap_or(&stage);
        let from = run::built().join(stage);
        fs::copy(&from, Path::new(copied).join(stage))
            .unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }
    for command in [
        "umount /mnt/data",
        "modprobe -a nvme virtio_scsi sd_mod dm_mod dm_delay configfs",
        "mount -t configfs configfs /sys/kernel/config",
        // khugepaged makes 2 MiB of a heap of 400 KiB, and on 7.2 it reads files that are mapped:
        // neither is the work of who is tested.
        "echo never >/sys/kernel/mm/transparent_hugepage/enabled",
        "modprobe null_blk nr_devices=0",
    ] {
        // Some are done already on some kernels; what is really missing, the tests will tell.
        Command::new("sh").args(["-c", &format!("{command} 2>/dev/null")]).status().ok();
    }
}
