//! `cargo vm doctor`: what is here, what is missing, what to do about it.

use std::io::Write;

use anyhow::Result;
use host::fail::MACHINE;

use crate::arch;
use crate::guest::qemu;
use crate::launch::{self, Options, Program};
use crate::setup::apt;
use crate::setup::cache::Cache;
use crate::setup::kernels::Table;
use crate::setup::packages;
use crate::setup::root;
use crate::workspace;

/// Looks, boots once per kernel, and prints what it found. Returns the exit code.
pub fn main(options: &Options) -> Result<i32> {
    let mut status = 0;
    // Where nobody reads any more, the exit code still tells.
    let report = |topic: &str, text: String| {
        let _ = writeln!(std::io::stdout(), "{topic:<10} {text}");
    };

    let cache = Cache::open()?;
    let table = Table::load()?;
    let names = table.names(options.kernel.as_deref(), &cache)?;
    let missing = packages::missing(false)?;
    let for_tests = packages::missing(true)?;
    if for_tests.is_empty() {
        report("packages", "all here".into());
    } else {
        report(
            "packages",
            format!("missing: {} (`cargo vm setup` installs them with apt)", for_tests.join(" ")),
        );
    }
    report("cache", cache.describe());

    for line in &table.lines {
        report("kernel", format!("{:<6} {}", line.name, line.describe(&cache)));
    }
    if arch::is_foreign() {
        let (place, here) = root::state(&cache)?;
        let state = if here { "here" } else { "not fetched (cargo vm setup does)" };
        report("root", format!("{} {state}", place.display()));
        let rust = match workspace::has_rust_target(&workspace::root()?) {
            true => "here",
            false => "missing (cargo vm setup adds it by rustup)",
        };
        report("rust", format!("library for {}: {rust}", arch::guest().rust_target()));
    }
    let disks = packages::disks_to_make(&cache);
    report(
        "disks",
        match disks.as_slice() {
            [] => "here, intact".into(),
            names => format!("missing or changed: {} (the next run makes them)", names.join(", ")),
        },
    );
    match apt::archives() {
        Ok(archives) => {
            for archive in archives {
                let state = table.line(table.default()).and_then(|line| line.reach(&archive));
                report(
                    "archive",
                    match state {
                        Ok(()) => format!("{archive} answers"),
                        Err(why) => format!("{archive} {why:#} (needed for fetching kernels only)"),
                    },
                );
            }
        }
        Err(why) => report("archive", format!("{why:#}")),
    }
    report("kvm", kvm(&cache));
    if !missing.is_empty() {
        return Ok(MACHINE);
    }

    for name in names {
        let options = Options { kernel: Some(name.clone()), ..options.clone() };
        let program = Program::other(vec!["true".into()]);
        match launch::run(&options, &program) {
            Ok(outcome) => {
                let (seconds, accel) = (outcome.boot.as_secs_f64(), outcome.accel);
                report("boot", format!("{name:<6} {seconds:.1} s with {accel}"));
            }
            Err(why) => {
                crate::cleanup::clean_up();
                report("boot", format!("{name:<6} failed: {why:#}"));
                status = 1;
            }
        }
    }
    Ok(status)
}

/// What is known of KVM.
fn kvm(cache: &Cache) -> String {
    if arch::is_foreign() {
        return "not for guests of another architecture: they run without it (TCG)".into();
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        return "absent: guests run without it (TCG), several times slower".into();
    }
    if !qemu::kvm_is_accessible() {
        return "/dev/kvm is not open to this user: as a member of the group kvm it would be faster".into();
    }
    match qemu::kvm_note(cache) {
        Err(why) => format!("{why:#}"),
        Ok((None, _)) => "accessible; whether guests boot under it is not known yet".into(),
        Ok((Some(note), _)) if note.works => "works".into(),
        Ok(_) => {
            let forget = cache.path("kvm.json");
            format!(
                "accessible, but no guest boots under it: TCG is used until this machine restarts \
                 (removing {} makes it try again)",
                forget.display()
            )
        }
    }
}
