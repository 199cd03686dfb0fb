//! The programs of the appendix: hello_world, bigreads, bitehist, kmalloc_callers.

use std::os::{
    fd::OwnedFd,
    unix::net::{UnixDatagram, UnixStream},
};

use crate::{
    prelude::*,
    readme::{block, shape},
};

tests![
    hello_world_shows_every_exec,
    bigreads_shows_what_strace_shows,
    bigreads_names_the_protocol_of_a_socket,
    bigreads_counts_lost_lines,
    bitehist_adds_up_to_the_disks_counters,
    kmalloc_callers_counts_a_modules_calls,
];

const DIRECTORY: &str = "/run/appendix";

/// A README shows what the program prints, with other numbers, but for single events and functions.
fn readme_agrees(name: &str, output: &str) -> Result<()> {
    let printed: Vec<String> = output.lines().map(shape).collect();
    let readme = fs::read_to_string(workspace().join(format!("appendix/{name}/README.md")))?;
    for line in block(&readme)?.lines() {
        let is_one = ["/", "()", " -> "].iter().any(|what| line.contains(what))
            || line.split_whitespace().next().is_none_or(|word| word.contains('.'));
        let shown = shape(line);
        let found = printed.iter().any(|printed| printed.ends_with(&shown));
        ensure!(is_one || found, "{name}/README.md: nothing like {line:?} was printed:\n{output}");
    }
    Ok(())
}

/// Runs a script of the shell under strace; what strace has written.
fn strace(options: &str, script: &str) -> Result<String> {
    let log = format!("{DIRECTORY}/strace");
    fs::create_dir_all(DIRECTORY)?;
    fs::write(format!("{DIRECTORY}/script"), script)?;
    shell(&format!("cd {DIRECTORY}; strace -f {options} -o {log} bash script >&2"))?;
    Ok(fs::read_to_string(log)?)
}

/// `PID call(… "argument" …) = result`: the process, the first text in quotes, the result.
fn call(line: &str) -> Option<(u32, String, i64)> {
    let (call, result) = line.rsplit_once(" = ")?;
    let (pid, call) = call.split_once(' ')?;
    let text = call.split('"').nth(1).unwrap_or_default();
    Some((pid.parse().ok()?, text.into(), result.split(' ').next()?.parse().ok()?))
}

fn hello_world_shows_every_exec() -> Result<()> {
    let long = "/".to_owned() + &"x/".repeat(200);
    let running = Running::stage("hello_world", &[])?;
    let script = "
        for i in 1 2 3 4 5 6 7 8 9 10; do /bin/true; done
        for i in 1 2 3; do /bin/missing; done
        PATH=/run/missing:/usr/bin:/bin; cat </dev/null
        echo '#!/bin/sh' >interpreted; chmod +x interpreted; ./interpreted
        /etc/passwd
        true";
    let log = strace("-e trace=execve,execveat", script)?;
    // By the other system call.
    let mut true_at = Command::new("/bin/true");
    // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
    unsafe {
        true_at.pre_exec(move || {
            let path = c"/run/missing/at".as_ptr();
            let none = std::ptr::null::<u8>();
            libc::syscall(libc::SYS_execveat, libc::AT_FDCWD, path, none, none, 0);
            Ok(())
        })
    };
    let true_at = Running::spawn(&mut true_at)?;
    let at = true_at.id();
    true_at.end_well()?;
    ensure!(Running::bash(&format!("exec {long}"))?.end()?.code != Some(0), "that ran");
    let output = running.interrupt()?;

    let mut expected: Vec<(u32, String, bool)> = log
        .lines()
        .filter_map(call)
        .map(|(pid, file, result)| (pid, file, result == 0))
        .chain([(at, "/run/missing/at".into(), false), (at, "/bin/true".into(), true)])
        .collect();
    let traced: Vec<u32> = expected.iter().map(|(pid, ..)| *pid).collect();
    let mut shown = Vec::new();
    for [pid, file, failed] in rows(&output, r"(\d+) [^/]*?(\.?/.*?)((?:  failed: .*)?)$") {
        let pid = pid.parse()?;
        if traced.contains(&pid) {
            shown.push((pid, file.to_owned(), failed.is_empty()));
        }
    }
    expected.sort();
    shown.sort();
    let failed = expected.iter().filter(|(.., ok)| !ok).count();
    ensure!(expected.len() >= 18 && failed >= 4, "strace saw too few: {log}");
    ensure!(shown == expected, "strace saw {expected:?}, hello_world {shown:?}: {output}");
    let cut = format!("{}…  failed: ", &long[..255]);
    ensure!(output.contains(&cut), "{output}");
    let all = count(&output, "programs executed")? + count(&output, "attempts failed")?;
    let lines = output.lines().filter(|line| line.contains('/')).count() as u64;
    ensure!(all == lines, "{lines} lines: {output}");
    readme_agrees("hello_world", &output)?;
    ensure_none(&output, &["lines lost"])
}

/// The lines of bigreads: process, bytes, file.
fn big_reads(output: &str) -> Result<Vec<(u32, i64, String)>> {
    let rows = rows(output, r"\d+\.\d+ +\S+ +(\d+) +(\d+) +(\S+)$").into_iter();
    rows.map(|[pid, bytes, file]| Ok((pid.parse()?, bytes.parse()?, file.into()))).collect()
}

fn bigreads_shows_what_strace_shows() -> Result<()> {
    fs::create_dir_all(DIRECTORY)?;
    shell(&format!("dd if=/dev/zero of={DIRECTORY}/big bs=512K count=9 status=none"))?;
    let running = Running::stage("bigreads", &[])?;
    let script = "
        for size in 1048576 1048575 1048577 2M 4500K; do
            dd if=big of=/dev/null bs=$size status=none
        done
        dd if=/dev/zero of=/dev/null bs=3M count=2 status=none
        dd if=big of=/dev/null bs=1M count=1 skip=4 status=none
        dd if=big of=/dev/null bs=1M skip=100 status=none
        cat big >/dev/null";
    let log = strace("-y -e trace=read,pread64", script)?;
    let output = running.interrupt()?;
    let mut expected: Vec<(u32, i64, String)> = Vec::new();
    for line in log.lines() {
        // 123 read(3</run/appendix/big>, ...) = 1048576
        let Some((pid, _, bytes)) = call(line).filter(|(.., bytes)| *bytes >= 1 << 20) else {
            continue;
        };
        let path = line.split(['<', '>']).nth(1).with_context(|| line.to_owned())?;
        let file = Path::new(path).file_name().with_context(|| line.to_owned())?;
        expected.push((pid, bytes, file.to_string_lossy().into_owned()));
    }
    ensure!(expected.len() >= 12, "strace saw too few: {log}");
    let shown = big_reads(&output)?;
    ensure!(shown == expected, "strace saw {expected:?}, bigreads {shown:?}: {output}");
    ensure!(count(&output, "reads of at least 1048576 bytes")? == shown.len() as u64, "{output}");
    fs::remove_file(format!("{DIRECTORY}/big"))?;
    readme_agrees("bigreads", &output)?;
    ensure_none(&output, &["lines lost"])
}

/// Reads of one byte more than any other here, from what has no path.
fn bigreads_names_the_protocol_of_a_socket() -> Result<()> {
    const BYTES: usize = 54_321;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let tcp = TcpStream::connect(listener.local_addr()?)?;
    let (tcp_end, _) = listener.accept()?;
    let (unix, unix_end) = UnixStream::pair()?;
    let (datagram, datagram_end) = UnixDatagram::pair()?;
    let (pipe, pipe_end) = std::io::pipe()?;
    let ends: [(OwnedFd, OwnedFd, &str); 4] = [
        (tcp.into(), tcp_end.into(), "[TCP]"),
        (unix.into(), unix_end.into(), "[UNIX-STREAM]"),
        (datagram.into(), datagram_end.into(), "[UNIX]"),
        (pipe_end.into(), pipe.into(), "[pipe]"),
    ];
    let running = Running::stage("bigreads", &["--min", &BYTES.to_string()])?;
    let mut buffer = vec![0; BYTES];
    for (to, from, _) in &ends {
        // The buffers of none of them are smaller. Data may come in pieces: all is there first.
        ensure!(rustix::io::write(to, &buffer)? == BYTES, "not all was written");
        wait_until("the data", || Ok(rustix::io::ioctl_fionread(from)? == BYTES as u64))?;
        ensure!(rustix::io::read(from, &mut buffer)? == BYTES, "not all was read");
    }
    let output = running.interrupt()?;
    let shown = big_reads(&output)?.into_iter();
    let shown: Vec<String> = shown
        .filter(|(pid, bytes, _)| *pid == std::process::id() && *bytes == BYTES as i64)
        .map(|(.., file)| file)
        .collect();
    let expected: Vec<&str> = ends.iter().map(|(.., name)| *name).collect();
    ensure!(shown == expected, "{shown:?}, not {expected:?}: {output}");
    Ok(())
}

fn bigreads_counts_lost_lines() -> Result<()> {
    // The ring of 1 MiB has room for some 3,000 lines.
    let dd = "dd if=/dev/zero of=/dev/null bs=777 count=6000 status=none";
    let output = beside_a_stopped("bigreads", &["--min", "512"], || shell(dd))?;
    let shown = big_reads(&output)?.len() as u64;
    let (reads, lost) = (count(&output, "reads of at least 512")?, count(&output, "lines lost")?);
    ensure!(reads >= 6000 && lost > 1000, "{reads} reads, {lost} lost");
    ensure!(shown + lost == reads, "{shown} shown + {lost} lost, {reads} reads");
    Ok(())
}

/// I/Os and sectors of reads, writes and discards: beside fio's and the disk's counters. Flushes without data,
/// which the kernel counts as writes of 0 sectors, bitehist does not count.
fn bitehist_adds_up_to_the_disks_counters() -> Result<()> {
    // Completes in an interrupt, as disks do. From 7.0 on, a program that runs in a task may be skipped.
    let null = NullBlk::new(
        "test",
        "irqmode=2 completion_nsec=10000 submit_queues=2 memory_backed=1 discard=1",
    )?;
    for disk in [disks::nvme()?, null.name.clone()] {
        let cache = fs::read_to_string(format!("/sys/block/{disk}/queue/write_cache"))?;
        let running = Running::stage("bitehist", &["--per-disk", "--interval", "1h"])?;
        let before = disks::stat(&disk)?;
        let report = fio_direct(
            &disk,
            "--ioengine=psync --numjobs=8 --rw=randrw --bsrange=512-60k --blockalign=512 --size=64m \
             --number_ios=100 --fsync=10",
        )?;
        // Written back in requests of many merged pages.
        shell(&format!("dd if=/dev/zero of=/dev/{disk} bs=1M count=8 conv=fsync status=none"))?;
        if disk == null.name {
            shell(&format!("blkdiscard --force --length 4MiB /dev/{disk}"))?;
        }
        wait_until("the last I/O", || Ok(disks::in_flight(&disk)? == 0))?;
        let after = disks::stat(&disk)?;
        let output = running.interrupt()?;
        laws::agree("bitehist", &output)?;
        let fios = ["read", "write", "sync"].map(|kind| report[kind]["total_ios"].as_u64());
        let [Some(reads), Some(writes), Some(syncs)] = fios else { bail!("fio: {report}") };
        // Without a cache that writes go through, the kernel asks no disk for a flush. One is dd's.
        let flushes = if cache.trim() == "write back" { syncs + 1 } else { 0 };
        let numbers = disks::numbers(&disk)?;
        let mut ios = Vec::new();
        for (kind, field, flushes) in [("reads", 0, 0), ("writes", 4, flushes), ("discards", 11, 0)]
        {
            let pattern = format!(r"{disk} \({numbers}\) {kind}: (\d+) \S+ (\d+) ");
            let [found, sectors] = rows(&output, &pattern).first().copied().unwrap_or(["0", "0"]);
            let did = [field, field + 2].map(|field| after[field] - before[field]);
            let found = [found.parse::<u64>()? + flushes, sectors.parse()?];
            ensure!(found == did, "{disk} counted {did:?} {kind}: {output}");
            ios.push(found[0] - flushes);
        }
        ensure_none(&output, &["dropped", "unmatched", "in flight"])?;
        readme_agrees("bitehist", &output)?;
        // The writes of dd come on top, 8 MiB of them.
        let is_right = ios[0] == reads && ios[1] > writes && (ios[2] > 0) == (disk == null.name);
        ensure!(is_right, "{ios:?}: {report}");
    }
    Ok(())
}

/// The row of a function: calls, bytes asked for, bytes given.
fn row(output: &str, function: &str) -> Result<[u64; 3]> {
    let last = &output[output.rfind("from 0.0 s to ").context("no table")?..];
    let row = last.lines().find(|line| line.ends_with(&format!(" {function}")));
    let row = row.with_context(|| format!("no {function} in {last}"))?;
    let words: Vec<u64> = row.split_whitespace().map_while(|word| word.parse().ok()).collect();
    words[..3].try_into().context("odd row")
}

/// A table of device mapper with 2,000 linear targets: `linear_ctr()` makes a struct for each.
fn kmalloc_callers_counts_a_modules_calls() -> Result<()> {
    let disk = disks::virtio()?;
    let table: Vec<String> =
        (0..2000).map(|n| format!("{} 8 linear /dev/{disk} {}", n * 8, n * 8)).collect();
    let load = || Mapped::new("appendix", &table.join(";"));
    let (_, output) = beside("kmalloc_callers", &["--interval", "1h"], load)?;
    let [calls, asked, given] = row(&output, "linear_ctr() [dm_mod]")?;
    ensure!(calls == 2000, "{calls} calls: {output}");
    // A pointer and a sector, in a slab of 16 bytes.
    ensure!(asked == 2000 * 16 && given == 2000 * 16, "{asked} bytes, {given} given: {output}");
    let [all, asked, given] = row(&output, "(all)")?;
    ensure!(all > calls && given > asked, "{all} calls, {asked} bytes, {given} given: {output}");
    readme_agrees("kmalloc_callers", &output)?;
    ensure_none(&output, &["dropped"])
}
