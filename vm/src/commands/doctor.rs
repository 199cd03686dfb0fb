//! `cargo vm doctor`: what is here, what is missing, what to do about it.

use anyhow::Result;
use workshop::fail::MACHINE;
use workshop::outln;

use crate::cargo::has_rust_target;
use crate::commands::launch::{self, AS_ROOT, GuestProgram};
use crate::fetch::cache::{Cache, find_tool};
use crate::fetch::packages;
use crate::fetch::rootfs::Rootfs;
use crate::machine::{kvm, sandbox};
use crate::run::{For, GuestOptions, Run};

/// Looks, boots once per kernel, and prints what it found. Returns the exit code.
pub fn main(run: &Run, options: &GuestOptions) -> Result<i32> {
    let mut status = 0;
    let report = |topic: &str, text: String| outln!("{topic:<10} {text}");

    let Run { cache, arch, table, source, .. } = run;
    let names = run.table.names(options.kernel())?;
    let missing = packages::missing(*arch, source, cache, For::Run)?;
    // What is said to be intact was read to its end.
    cache.forget_checks()?;
    report("packages", packages(run)?);
    report("cache", cache.describe());
    kept(cache).into_iter().for_each(|text| report("files", text));

    for line in &table.lines {
        report("kernel", format!("{:<6} {}", line.name, line.describe(cache)));
    }
    if arch.is_foreign() {
        let place = Rootfs::arm64()?.place(cache);
        let state = match cache.check(&place, None) {
            Ok(true) => "here, intact since it was unpacked (not pinned)".into(),
            Ok(false) => "not fetched (cargo vm setup does)".into(),
            Err(why) => format!("damaged ({why:#}); the next run makes it again"),
        };
        report("rootfs", format!("{} {state}", place.display()));
        let rust = match has_rust_target(&run.cargo, *arch) {
            true => "here",
            false => "missing (cargo vm setup adds it by rustup)",
        };
        report("rust", format!("library for {}: {rust}", arch.rust_target()));
    }
    let archives = source.archives().map(|archives| archives.join(" "));
    report("archive", archives.unwrap_or_else(|why| format!("{why:#}")));
    report("kvm", kvm(run));
    if find_tool(arch.qemu()).is_some() {
        report("sandbox", sandbox::describe(*arch, cache)?);
    }
    if launch::is_root() {
        report("user", AS_ROOT.into());
    }
    if !missing.is_empty() {
        return Ok(MACHINE);
    }

    for name in names {
        let options = GuestOptions { kernel: Some(name.clone()), ..options.clone() };
        let program = GuestProgram::other(vec!["true".into()]);
        let outcome = run.guest(&options).and_then(|guest| launch::run(run, &guest, &program));
        match outcome {
            Ok(outcome) => {
                let (seconds, accel) = (outcome.boot.as_secs_f64(), outcome.accel);
                report("boot", format!("{name:<6} {seconds:.1} s with {accel}"));
            }
            Err(why) => {
                crate::session::cleanup::clean_up();
                report("boot", format!("{name:<6} failed: {why:#}"));
                status = 1;
            }
        }
    }
    Ok(status)
}

/// Which packages are missing: for the lessons, and for the tests only.
fn packages(run: &Run) -> Result<String> {
    let missing = |purpose| packages::missing(run.arch, &run.source, &run.cache, purpose);
    let (lessons, mut tests) = (missing(For::Judge)?, missing(For::Test)?);
    tests.retain(|name| !lessons.contains(name));
    let how = match find_tool("apt-get") {
        Some(_) => "`cargo vm setup` installs them with apt",
        None => "`cargo vm setup` says how to install them here",
    };
    let (lessons, tests) = (lessons.join(" "), tests.join(" "));
    Ok(match (lessons.is_empty(), tests.is_empty()) {
        (true, true) => "all here".into(),
        (false, true) => format!("missing: {lessons} ({how})"),
        (true, false) => format!("missing, only for `cargo vm test` and `bench`: {tests} ({how})"),
        (false, false) => {
            format!("missing: {lessons}; only for `cargo vm test` and `bench`: {tests} ({how})")
        }
    })
}

/// What else the cache holds: what is damaged, and how much is not.
fn kept(cache: &Cache) -> Vec<String> {
    let kept = cache.kept();
    let damaged = kept.iter().filter_map(|place| {
        let why = cache.check(place, None).err()?;
        let place = place.display();
        Some(format!("{place} is damaged ({why:#}); what needs it makes it again"))
    });
    let mut lines: Vec<String> = damaged.collect();
    let intact = kept.len() - lines.len();
    lines.push(format!("{intact} others are intact (disk images, initramfs, packages, roots)"));
    lines
}

/// What is known of KVM.
fn kvm(run: &Run) -> String {
    if run.arch.is_foreign() {
        return "not for guests of another architecture: they run without it (TCG)".into();
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        return "absent: guests run without it (TCG), several times slower".into();
    }
    if !kvm::is_accessible() {
        return "/dev/kvm is not open to this user: as a member of the group kvm it would be faster".into();
    }
    match kvm::known(run.arch, &run.cache) {
        Err(why) => format!("{why:#}"),
        Ok((None, _)) => "accessible; whether guests boot under it is not known yet".into(),
        Ok((Some(note), _)) if note.works => "works".into(),
        Ok(_) => {
            let forget = run.cache.path("kvm.json");
            format!(
                "accessible, but no guest boots under it: TCG is used until this machine restarts \
                 (removing {} makes it try again)",
                forget.display()
            )
        }
    }
}
