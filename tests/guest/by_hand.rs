//! The four programs made by hand: their instructions, judged by bpftool, and their counts, by how often this
//! process has called.

use std::{collections::BTreeMap, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::run::{
    Running, Setting, beside_a_stopped, between, count, judged_weakly, preempts, shell, stage,
};

tests![
    by_hand_programs_are_as_written,
    by_hand_counts_on_every_cpu,
    by_hand_says_hello,
    by_hand_measures_a_sleep,
    by_hand_counts_what_is_lost,
    by_hand_counts_calls_that_return_twice,
    by_hand_counts_calls_that_never_return,
];

/// What each program is meant to do, as bpftool writes it. Behind `goto`: the instruction there.
const EMPTY: &str = "r0 = 0; exit";
const HELLO: &str = "r1 = 0x2121..6c6548; *(u64 *)(r10 -8) = r1; r1 = r10; r1 += -8; r2 = 8; \
     call bpf_trace_printk; r0 = 0; exit";
const COUNTER: &str = "*(u32 *)(r10 -4) = 0; r2 = r10; r2 += -4; r1 = map; call lookup; \
     if r0 == 0x0 goto (r0 = 0); r1 = *(u64 *)(r0 +0); r1 += 1; *(u64 *)(r0 +0) = r1; r0 = 0; exit";
const ENTER: &str = "call bpf_get_current_pid_tgid; *(u64 *)(r10 -16) = r0; call bpf_ktime_get_ns; \
     *(u64 *)(r10 -24) = r0; r1 = map; r2 = r10; r2 += -16; r3 = r10; r3 += -24; r4 = 0; \
     call update; if r0 == 0x0 goto (r0 = 0); \
     *(u32 *)(r10 -4) = 0; r2 = r10; r2 += -4; r1 = map; call lookup; \
     if r0 == 0x0 goto (r0 = 0); r1 = *(u64 *)(r0 +0); r1 += 1; *(u64 *)(r0 +0) = r1; r0 = 0; exit";
const EXIT: &str = "r6 = r1; call bpf_ktime_get_ns; r7 = r0; call bpf_get_current_pid_tgid; \
     *(u64 *)(r10 -16) = r0; r1 = map; r2 = r10; r2 += -16; call lookup; \
     if r0 != 0x0 goto (r1 = *(u64 *)(r0 +0)); \
     *(u32 *)(r10 -4) = 1; r2 = r10; r2 += -4; r1 = map; call lookup; \
     if r0 == 0x0 goto (r0 = 0); r1 = *(u64 *)(r0 +0); r1 += 1; *(u64 *)(r0 +0) = r1; r0 = 0; exit; \
     r1 = *(u64 *)(r0 +0); r7 -= r1; *(u64 *)(r10 -24) = r7; r1 = map; r2 = r10; r2 += -16; \
     call delete; r1 = r6; r2 = map; w3 = -1; r4 = r10; r4 += -24; r5 = 16; \
     call bpf_perf_event_output; if r0 == 0x0 goto (r0 = 0); \
     *(u32 *)(r10 -4) = 2; r2 = r10; r2 += -4; r1 = map; call lookup; \
     if r0 == 0x0 goto (r0 = 0); r1 = *(u64 *)(r0 +0); r1 += 1; *(u64 *)(r0 +0) = r1; r0 = 0; exit";

fn by_hand_programs_are_as_written() -> Result<()> {
    let programs: [(&str, &[(&str, &str)]); 4] = [
        ("empty", &[("empty", EMPTY)]),
        ("hello_open", &[("hello_open", HELLO)]),
        ("syscall_counter", &[("syscall_counter", COUNTER)]),
        ("syscall_profiler", &[("syscall_enter", ENTER), ("syscall_exit", EXIT)]),
    ];
    for (name, loaded) in programs {
        let running = Running::stage(name, &[])?;
        for (loaded, intended) in loaded {
            let dump = shell(&format!("bpftool prog dump xlated name {loaded}"))?;
            let found = instructions(&dump)?;
            ensure!(found == *intended, "{loaded}:\n{found}\nnot\n{intended}\nof\n{dump}");
        }
        running.interrupt()?;
    }
    Ok(())
}

/// bpftool's lines without what differs between kernels: numbers of maps, addresses and names of the
/// functions of maps, and the instructions that a call is replaced with where the kernel inlines it.
fn instructions(dump: &str) -> Result<String> {
    let mut lines = BTreeMap::new();
    for line in dump.lines() {
        let (number, rest) = line.trim().split_once(": (").with_context(|| line.to_owned())?;
        let (_, text) = rest.split_once(") ").with_context(|| line.to_owned())?;
        lines.insert(number.parse::<i64>()?, text.to_owned());
    }
    let targets = lines.clone();
    let mut found = Vec::new();
    let mut inlined_until = 0;
    for (&number, text) in &lines {
        if number < inlined_until {
            continue;
        }
        // From 6.10 on, an array's look-up: from the offset of its values, which has been found as an
        // addition, to the NULL for a key that is too large.
        if text == "r0 = *(u32 *)(r2 +0)" {
            let end = targets.range(number..).find(|(_, text)| *text == "r0 = 0");
            inlined_until = *end.context("a look-up without an end")?.0 + 1;
            found.pop();
            found.push("call lookup".to_owned());
            continue;
        }
        let map_function = ["lookup", "update", "delete"]
            .into_iter()
            .find(|what| text.starts_with("call ") && text.contains(&format!("map_{what}_elem")));
        found.push(if let Some((condition, offset)) = text.split_once(" goto pc") {
            let target = targets.get(&(number + 1 + offset.parse::<i64>()?));
            format!("{condition} goto ({})", target.context("a jump leads out")?)
        } else if let Some(what) = map_function {
            // A hash map's look-up returns the entry, whose value lies behind its key.
            if targets.get(&(number + 1)).is_some_and(|next| next == "if r0 == 0x0 goto pc+1") {
                let value = targets.get(&(number + 2)).map_or("", String::as_str);
                if value.starts_with("r0 += ") {
                    inlined_until = number + 3;
                }
            }
            format!("call {what}")
        } else if let Some((register, _)) = text.split_once(" = map[") {
            format!("{register} = map")
        } else if text == "r1 = 0x212121..." || text.starts_with("r1 = 0x21216f6c6c6548") {
            "r1 = 0x2121..6c6548".to_owned()
        } else {
            // `call bpf_perf_event_output_tp#-67760`: the helper's variant for tracepoints.
            text.split('#').next().unwrap_or_default().trim_end_matches("_tp").to_owned()
        });
    }
    Ok(found.join("; "))
}

/// Calls fchmodat() for a file that is not there, on the given CPU only, if one is given.
fn call_fchmodat(times: usize, cpu: Option<usize>) -> Result<()> {
    let call = move || -> Result<()> {
        if let Some(cpu) = cpu {
            let mut only = CpuSet::new();
            only.set(cpu);
            sched_setaffinity(None, &only)?;
        }
        for _ in 0..times {
            // SAFETY: a path that ends with a zero.
            unsafe { libc::syscall(libc::SYS_fchmodat, libc::AT_FDCWD, c"/nowhere".as_ptr(), 0) };
        }
        Ok(())
    };
    thread::spawn(call).join().expect("no panic")
}

/// The counter is a value for each possible CPU, also of those that are off.
fn by_hand_counts_on_every_cpu() -> Result<()> {
    let running = Running::stage("syscall_counter", &[])?;
    call_fchmodat(1000, Some(0))?;
    call_fchmodat(234, Some(1))?;
    let output = running.interrupt()?;
    for (what, expected) in [("on CPU 0", 1000), ("on CPU 1", 234), ("calls of", 1234)] {
        ensure!(count(&output, what)? == expected, "{what}: {output}");
    }
    let running = Running::stage("syscall_counter", &[])?;
    call_fchmodat(10, Some(1))?;
    let _off = Setting::new("/sys/devices/system/cpu/cpu1/online", "0")?;
    call_fchmodat(100, None)?;
    let output = running.interrupt()?;
    let started = stage("syscall_profiler", &["fchmodat", "--duration", "100ms"])?;
    ensure!(count(&output, "calls of")? == 110, "one CPU is off: {output}");
    ensure!(started.code == Some(0), "one CPU is off: {started:?}");
    Ok(())
}

fn by_hand_says_hello() -> Result<()> {
    let running = Running::stage("hello_open", &[])?;
    let task = thread::spawn(|| {
        for _ in 0..500 {
            // SAFETY: a path that ends with a zero.
            unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, c"/nowhere".as_ptr(), 0) };
        }
        rustix::thread::gettid().as_raw_nonzero()
    });
    let task = task.join().expect("no panic");
    let output = running.interrupt()?;
    let hellos: Vec<&str> = output.lines().filter(|line| line.ends_with(": Hello!!")).collect();
    let own = hellos.iter().filter(|line| line.contains(&format!("-{task} "))).count();
    ensure!(own == 500 && count(&output, "lines lost")? == 0, "{own}: {output}");
    ensure!(count(&output, "calls of openat()")? == hellos.len() as u64, "{output}");
    Ok(())
}

/// The durations that the profiler has printed of this process's threads whose numbers end so.
fn own_times(output: &str, thread: &str) -> Result<Vec<u64>> {
    let own = format!(" ns  process {} thread ", std::process::id());
    let lines = output.lines().filter_map(|line| line.split_once(&own));
    let lines = lines.filter(|(_, found)| found.ends_with(thread));
    lines.map(|(time, _)| time.trim().parse().context("odd time")).collect()
}

fn by_hand_measures_a_sleep() -> Result<()> {
    const SLEEP: Duration = Duration::from_millis(20);
    let running = Running::stage("syscall_profiler", &["clock_nanosleep"])?;
    // A thread of its own: the test sleeps elsewhere, too.
    let sleeper = thread::spawn(|| {
        (0..25).for_each(|_| thread::sleep(SLEEP));
        rustix::thread::gettid().as_raw_nonzero()
    });
    let sleeper = sleeper.join().expect("no panic").to_string();
    let output = running.interrupt()?;
    let own = own_times(&output, &sleeper)?;
    ensure!(own.len() == 25, "{} of 25 calls: {output}", own.len());
    ensure!(own.iter().all(|time| u128::from(*time) >= SLEEP.as_nanos()), "too short: {output}");
    // The summary is about all lines, of whichever process.
    let lines = output.lines().filter_map(|line| line.split_once(" ns  process "));
    let all: Vec<u64> = lines.map(|(time, _)| time.trim().parse()).collect::<Result<_, _>>()?;
    let sum: u64 = all.iter().sum();
    ensure!(count(&output, "calls of")? == all.len() as u64, "{output}");
    ensure!(count(&output, "ns in all")? == sum, "not {sum}: {output}");
    let average: u64 = between(&output, "average ", " ns")?.parse()?;
    ensure!(average == sum / all.len() as u64, "average: {output}");
    for what in ["lost", "dropped", "skipped"] {
        ensure!(count(&output, what)? == 0, "{what}: {output}");
    }
    Ok(())
}

/// Its ring of one page overflows.
fn by_hand_counts_what_is_lost() -> Result<()> {
    let output = beside_a_stopped("syscall_profiler", &["getppid", "--pages", "1"], || {
        for _ in 0..5000 {
            let _ = rustix::process::getppid();
        }
        Ok(())
    })?;
    let (lost, own) = (count(&output, "lost")?, own_times(&output, "")?.len() as u64);
    ensure!(lost > 4000 && own + lost == 5000, "{own} and {lost} lost: {output}");
    ensure!(count(&output, "in progress")? == 0, "{output}");
    Ok(())
}

/// Both processes return from fork(), one of them from a call that it never made. On arm64, the kernel
/// traces the return of the one that made the call.
fn by_hand_counts_calls_that_return_twice() -> Result<()> {
    const FORKS: usize = 20;
    let fork = |number: libc::c_long| {
        for _ in 0..FORKS {
            // SAFETY: without CLONE_VM, the child has its own memory; it only ends. All other arguments
            // but the signal for its end are 0.
            unsafe {
                match libc::syscall(number, libc::SIGCHLD, 0, 0, 0, 0) {
                    0 => libc::_exit(0),
                    child => libc::waitpid(child as i32, std::ptr::null_mut(), 0),
                };
            }
        }
    };
    let calls = [
        ("clone", libc::SYS_clone),
        #[cfg(target_arch = "x86_64")]
        ("fork", libc::SYS_fork),
    ];
    for (name, number) in calls {
        let running = Running::stage("syscall_profiler", &[name])?;
        fork(number);
        let output = running.interrupt()?;
        let missed = missed(&output)?;
        let is = |seen: u64, events: u64| (events.saturating_sub(missed)..=events).contains(&seen);
        ensure!(is(own_times(&output, "")?.len() as u64, FORKS as u64), "{name}: {output}");
        let calls = count(&output, "calls of")?;
        // Those whose call or whose return was missed are no calls.
        let new = if cfg!(target_arch = "aarch64") { 0 } else { calls + missed };
        let children = count(&output, "returns in a new")?;
        ensure!(children + 2 * missed >= new && children <= new, "{name}: {output}");
        for what in ["in progress", "unmatched"] {
            ensure!(count(&output, what)? <= missed, "{name}, {what}: {output}");
        }
        for what in ["lost", "dropped"] {
            ensure!(count(&output, what)? == 0, "{name}, {what}: {output}");
        }
    }
    Ok(())
}

/// How many events the tool may have missed: as often as the kernel has skipped its programs, which only
/// one that preempts tasks does. It was once or twice; a tool that says it of half the calls is wrong.
fn missed(output: &str) -> Result<u64> {
    let skipped = count(output, "skipped")?;
    ensure!(skipped == 0 || preempts()? && skipped < 10, "{skipped} skipped: {output}");
    if skipped > 0 {
        judged_weakly(&format!("a program was skipped {skipped} times"));
    }
    Ok(skipped)
}

/// There is nothing to measure, and nothing stays in progress.
fn by_hand_counts_calls_that_never_return() -> Result<()> {
    const CALLS: u64 = 20;
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t) };
    let handle = || {
        // SAFETY: a signal that is handled.
        unsafe { libc::raise(libc::SIGUSR1) };
    };
    let end_thread = || thread::spawn(|| ()).join().expect("no panic");
    let end_process = || {
        // SAFETY: the child only ends.
        unsafe {
            match libc::fork() {
                0 => libc::_exit(0),
                child => libc::waitpid(child, std::ptr::null_mut(), 0),
            }
        };
    };
    let calls: [(&str, &dyn Fn()); 3] =
        [("rt_sigreturn", &handle), ("exit", &end_thread), ("exit_group", &end_process)];
    for (name, call) in calls {
        let running = Running::stage("syscall_profiler", &[name])?;
        for _ in 0..CALLS {
            call();
        }
        let output = running.interrupt()?;
        // A few others call, too: the profiler itself returns from the handler of the test's SIGINT.
        let counted = count(&output, "calls of")?;
        let missed = missed(&output)?;
        ensure!((CALLS.saturating_sub(missed)..CALLS + 5).contains(&counted), "{name}: {output}");
        ensure!(count(&output, "without a return")? == counted, "{name}: {output}");
        for what in ["in progress", "unmatched", "lost", "dropped"] {
            ensure!(count(&output, what)? == 0, "{name}, {what}: {output}");
        }
    }
    Ok(())
}
