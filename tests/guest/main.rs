//! The guest tests: every figure that a stage prints, judged by something that we did not write.
//!
//! Runs as root in the VM (`cargo vm test`), one test after the other: the block layer's counters
//! are everybody's. Takes libtest's arguments: a filter, `--list`, `--exact`.

// A test reads from top to bottom: what it sets up, what it runs, what has to come out.
#![allow(clippy::too_many_lines)]

/// The tests of a module, by the names of their functions, in this order. Or `name => function`.
macro_rules! tests {
    ($($name:ident $(=> $test:expr)?),* $(,)?) => {
        pub const TESTS: &[crate::Test] = &[$((stringify!($name), tests!(@ $name $($test)?))),*];
    };
    (@ $name:ident) => { $name };
    (@ $name:ident $test:expr) => { $test };
}

mod appendix;
mod bios;
mod by_hand;
mod bytecode;
mod cachetop;
mod clean;
mod commands;
mod ctracer;
mod ctracer_filters;
mod ctracer_ftrace;
mod ctracer_types;
mod disks;
mod exercise_laws;
mod exercise_loads;
mod exercises;
mod exporter;
mod exporter_alerts;
mod exporter_phases;
mod exporter_server;
mod faults;
mod field_reports;
mod ftrace;
mod functions;
mod maps;
mod other_tools;
mod pagecache;
mod prelude;
mod readme;
mod requests;
mod run;
mod slow_answers;
mod slow_disk;
mod slow_filters;
mod slow_io;
mod slow_live;
mod table;
mod truth;

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::Ordering,
    time::Instant,
};

use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use workshop::{
    events::{Cost, GuestMessage, NOT_RUN},
    judging::Judging,
};

use crate::run::{NotJudged, OVER};

/// A test's name, and the test.
type Test = (&'static str, fn() -> Result<()>);

/// On one kernel, these are enough: they judge user space, or code that another test judges on all.
const ONCE: &[&str] = &[
    "refusals_say_why",
    "a_killed_run_leaves_an_instance_until_the_next",
    "a_reader_may_go",
    "one_file_takes_both_streams",
    "readmes_show_real_output",
    "readmes_name_what_exists",
    "the_clock_may_be_set",
    "cachetop_leaves_the_terminal_and_comes_back",
    "exporter_survives_hostile_clients",
    "exporter_has_a_place_for_everybody",
    "exporter_runs_as_its_unit_says",
    "exporter_beside_prometheus",
    "slow_io_and_exporter_write_hostile_names",
    "stage01_prints_a_hostile_threads_events",
    "slow_io_shows_what_is_wanted",
    "slow_io_records_what_came_before",
    "slow_io_ends_beside_a_busy_disk",
    "slow_io_counts_lost_lines",
    "bigreads_counts_lost_lines",
    "by_hand_counts_what_is_lost",
    "ctracer_says_what_it_has_lost",
    "ctracer_keeps_to_its_memory",
    "ctracer_writes_each_output",
    "incident_of_the_day_is_solved",
];

/// Where kernels share the tests, these run on each: they are the hardest on the hooks.
const EVERYWHERE: &[&str] = &["loads_threads", "loads_stacked"];

fn main() {
    if let Some(cells) = truth::cells(prepare) {
        return cells.unwrap_or_else(|error| panic!("{error:#}"));
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let tests = [
        commands::TESTS,
        requests::TESTS,
        bios::TESTS,
        readme::TESTS,
        pagecache::TESTS,
        faults::TESTS,
        appendix::TESTS,
        cachetop::TESTS,
        exporter::TESTS,
        exporter_alerts::TESTS,
        exporter_phases::TESTS,
        exporter_server::TESTS,
        by_hand::TESTS,
        functions::TESTS,
        ctracer::TESTS,
        ctracer_ftrace::TESTS,
        ctracer_filters::TESTS,
        ctracer_types::TESTS,
        slow_answers::TESTS,
        slow_disk::TESTS,
        slow_filters::TESTS,
        slow_io::TESTS,
        slow_live::TESTS,
        field_reports::TESTS,
        table::TESTS,
    ]
    .concat();
    for name in ONCE.iter().chain(EVERYWHERE) {
        assert!(tests.iter().any(|(test, _)| test == name), "no test {name}");
    }
    for group in ::truth::all_cases().expect("the cases").iter().filter_map(|it| it.group.as_ref())
    {
        let name = format!("loads_{group}");
        assert!(tests.iter().any(|(test, _)| *test == name), "no test {name}");
    }
    let Judging { partition, share, without_once, judges, .. } = run::judging();
    let trial = |(name, test): Test| Trial::ignorable_test(name, move || verdict(test));
    let trials = match judges.is_empty() {
        false => self::judges(&[&tests, exercises::TESTS, exercise_laws::TESTS].concat(), judges),
        true => {
            let tests = tests.into_iter().filter(|(name, _)| !without_once || !ONCE.contains(name));
            let own = |n: usize, name| n % share.of == share.number || EVERYWHERE.contains(&name);
            let tests = tests.enumerate().filter(|(number, (name, _))| own(*number, *name));
            tests
                .skip(partition.number)
                .step_by(partition.of)
                .map(|(_, test)| trial(test))
                .collect()
        }
    };
    // The guest stays for other attempts.
    let stays = !arguments.list && !judges.is_empty();
    if !arguments.list {
        prepare();
    }
    if stays {
        clean::keep_first().expect("the guest's state");
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if stays {
        let left = clean::left().unwrap_or_else(|error| vec![format!("{error:#}")]);
        GuestMessage::Left(left).print();
    }
    conclusion.exit()
}

/// Runs a test. What it cost, and why one could not judge, are messages of their own: the runner shows them.
fn verdict(test: fn() -> Result<()>) -> Result<Completion, Failed> {
    let (start, _) = (Instant::now(), run::cost::take());
    let result = test();
    let cost = Cost { took: start.elapsed().as_millis() as u64, ..run::cost::take() };
    GuestMessage::Cost(cost).print();
    match result
        .map_err(|error| (error.downcast_ref::<NotJudged>().is_some(), format!("{error:#}")))
    {
        Ok(()) => Ok(Completion::Completed),
        Err((true, reason)) => {
            GuestMessage::NotJudged(reason.clone()).print();
            Ok(Completion::ignored_with(reason))
        }
        Err((false, error)) => Err(Failed::from(error)),
    }
}

extern "C" fn interrupted(_: libc::c_int) {
    OVER.store(true, Ordering::Relaxed);
}

/// The tests of these names, in their order, for `cargo lesson`. After one that fails, the others do
/// not run; nor after a Ctrl-C, when the one that runs still removes its disks: the guest stays.
fn judges(tests: &[Test], names: &'static [String]) -> Vec<Trial> {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler sets a flag, and nothing else.
        unsafe { libc::signal(signal, interrupted as *const () as libc::sighandler_t) };
    }
    let judges = names.iter().map(|name| {
        let found = tests.iter().find(|(test, _)| test == name);
        (name, found.unwrap_or_else(|| panic!("no test {name}")).1)
    });
    let trial = |(name, test): (&String, fn() -> Result<()>)| {
        Trial::ignorable_test(name, move || {
            if OVER.load(Ordering::Relaxed) {
                return Err(Failed::from(NOT_RUN));
            }
            let judged = verdict(test);
            OVER.fetch_or(judged.is_err(), Ordering::Relaxed);
            judged
        })
    };
    judges.map(trial).collect()
}

/// Exists once the guest is prepared.
const PREPARED: &str = "/run/guest-tests";

/// Modules, configfs; and the data disk is left alone, whose journal would submit bios of its own.
fn prepare() {
    assert!(Path::new("/run/bpf-vm").exists(), "the guest tests run in the VM only: cargo vm test");
    assert!(rustix::process::geteuid().is_root(), "the guest tests run as root");
    GuestMessage::Kernel(run::release().unwrap_or_default()).print();
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mounted = mounts.contains(" /mnt/data ").then_some("umount /mnt/data");
    // `cargo lesson` runs judges many times in one guest.
    let prepared = Path::new(PREPARED).exists();
    let commands = [
        "modprobe -a nvme virtio_scsi sd_mod dm_mod dm_delay configfs",
        "mount -t configfs configfs /sys/kernel/config",
        // khugepaged makes 2 MiB of a heap of 400 KiB, and on 7.2 it reads files that are mapped:
        // neither is the work of who is tested.
        "echo never >/sys/kernel/mm/transparent_hugepage/enabled",
        "modprobe null_blk nr_devices=0",
        // Attaching and detaching wait for grace periods of RCU, which take longest where the CPUs are busy.
        "echo 1 >/sys/kernel/rcu_expedited",
    ];
    let commands = commands.into_iter().filter(|_| !prepared);
    for command in mounted.into_iter().chain(commands) {
        // Some are done already on some kernels; what is really missing, the tests will tell.
        Command::new("sh").args(["-c", command]).stderr(Stdio::null()).status().ok();
    }
    fs::write(PREPARED, "").ok();
}
