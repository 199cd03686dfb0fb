//! The four programs made by hand: their counts, judged by how often this process has called.

use crate::prelude::*;

tests![
    by_hand_counts_on_every_cpu,
    by_hand_says_hello,
    by_hand_measures_a_sleep,
    by_hand_counts_what_is_lost,
    by_hand_counts_returns,
];

/// Calls fchmodat() or openat() for no file, in a thread, on a CPU if one is given; the thread's number.
fn call(syscall: libc::c_long, times: usize, cpu: Option<usize>) -> Result<String> {
    let call = move || -> Result<String> {
        cpu.map_or(Ok(()), stay_on)?;
        for _ in 0..times {
            // SAFETY: a path that ends with a zero.
            unsafe { libc::syscall(syscall, libc::AT_FDCWD, c"/nowhere".as_ptr(), 0) };
        }
        Ok(rustix::thread::gettid().as_raw_nonzero().to_string())
    };
    thread::spawn(call).join().expect("no panic")
}

/// The counter is a value for each possible CPU, also of those that are off.
fn by_hand_counts_on_every_cpu() -> Result<()> {
    let calls = [(1000, Some(0)), (234, Some(1))];
    let calls = || in_threads(calls, |(times, cpu)| call(libc::SYS_fchmodat, times, cpu));
    let (_, output) = beside("syscall_counter", &[], calls)?;
    for (what, expected) in [("on CPU 0", 1000), ("on CPU 1", 234), ("calls of", 1234)] {
        ensure!(count(&output, what)? == expected, "{what}: {output}");
    }
    let running = Running::stage("syscall_counter", &[])?;
    call(libc::SYS_fchmodat, 10, Some(1))?;
    let _off = Setting::new("/sys/devices/system/cpu/cpu1/online", "0")?;
    call(libc::SYS_fchmodat, 100, None)?;
    let output = running.interrupt()?;
    let started = stage("syscall_profiler", &["fchmodat", "--duration", "100ms"])?;
    ensure!(count(&output, "calls of")? == 110, "one CPU is off: {output}");
    ensure!(started.code == Some(0), "one CPU is off: {started:?}");
    Ok(())
}

fn by_hand_says_hello() -> Result<()> {
    let (task, output) = beside("hello_open", &[], || call(libc::SYS_openat, 500, None))?;
    let hellos: Vec<&str> = output.lines().filter(|line| line.ends_with(": Hello!!")).collect();
    let own = hellos.iter().filter(|line| line.contains(&format!("-{task} "))).count();
    ensure!(own == 500 && count(&output, "lines lost")? == 0, "{own}: {output}");
    ensure!(count(&output, "calls of openat()")? == hellos.len() as u64, "{output}");
    Ok(())
}

/// The durations that the profiler has printed of this process's threads whose numbers end so.
fn own_times(output: &str, thread: &str) -> Result<Vec<u64>> {
    let own = format!(r"(\d+) ns  process {} thread \d*{thread}$", std::process::id());
    rows(output, &own).into_iter().map(|[time]| Ok(time.parse()?)).collect()
}

fn by_hand_measures_a_sleep() -> Result<()> {
    const SLEEP: Duration = Duration::from_millis(20);
    // A thread of its own: the test sleeps elsewhere, too.
    let sleep = |()| {
        (0..25).for_each(|_| thread::sleep(SLEEP));
        Ok(rustix::thread::gettid().as_raw_nonzero().to_string())
    };
    let (sleeper, output) =
        beside("syscall_profiler", &["clock_nanosleep"], || in_threads([()], sleep))?;
    let sleeper = &sleeper[0];
    let own = own_times(&output, sleeper)?;
    ensure!(own.len() == 25, "{} of 25 calls: {output}", own.len());
    ensure!(own.iter().all(|time| u128::from(*time) >= SLEEP.as_nanos()), "too short: {output}");
    // The summary is about all lines, of whichever process.
    let all = rows(&output, r"(\d+) ns  process ");
    let sum = all.iter().map(|[time]| Ok(time.parse::<u64>()?)).sum::<Result<u64>>()?;
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

/// Both processes return from fork(), one of them from a call that it never made: on arm64, the kernel traces the
/// return of the one that made the call. Other calls never return: there is nothing to measure. In either case,
/// nothing stays in progress.
fn by_hand_counts_returns() -> Result<()> {
    const CALLS: u64 = 20;
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t) };
    // SAFETY: a signal that is handled.
    let handle = || assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
    let clone = || {
        // SAFETY: without CLONE_VM, the child has its own memory; it only ends.
        unsafe {
            match libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) {
                0 => libc::_exit(0),
                child => libc::waitpid(child as i32, std::ptr::null_mut(), 0),
            };
        }
    };
    let new = if cfg!(target_arch = "aarch64") { None } else { Some("returns in a new") };
    type Call<'a> = (&'a str, &'a dyn Fn(), Option<&'a str>);
    let calls: &[Call] = &[
        ("clone", &clone, new),
        ("rt_sigreturn", &handle, Some("without a return")),
        ("exit_group", &clone, Some("without a return")),
    ];
    for &(name, call, counted) in calls {
        let running = Running::stage("syscall_profiler", &[name])?;
        (0..CALLS).for_each(|_| call());
        let output = running.interrupt()?;
        let (calls, missed) = (count(&output, "calls of")?, missed(&output)?);
        // A few others call, too: the profiler itself returns from the handler of the test's SIGINT.
        ensure!((CALLS.saturating_sub(missed)..CALLS + 5).contains(&calls), "{name}: {output}");
        // A call that was missed, or whose return was, is not counted.
        let returns = counted != Some("without a return");
        let (slack, timed) = if returns { (missed, CALLS) } else { (0, 0) };
        let odd = counted.map_or(Ok(calls), |counted| count(&output, counted))?;
        ensure!((calls.saturating_sub(slack)..=calls + slack).contains(&odd), "{name}: {output}");
        let own = own_times(&output, "")?.len() as u64;
        ensure!((timed.saturating_sub(slack)..=timed).contains(&own), "{name}, {own}: {output}");
        for (what, most) in
            [("in progress", slack), ("unmatched", slack), ("lost", 0), ("dropped", 0)]
        {
            ensure!(count(&output, what)? <= most, "{name}, {what}: {output}");
        }
    }
    Ok(())
}
