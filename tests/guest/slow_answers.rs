//! What `slow_io` answers: about the slow ones, about what waits, and whose it is.

use rustix::thread::{gettid, set_name};

use crate::{field_reports::md, prelude::*};

tests![
    slow_io_answers_for_the_slow_ones,
    slow_io_says_what_it_has_not_measured,
    slow_io_knows_what_waits_behind_itself,
    slow_io_adds_up_what_the_driver_had,
    slow_io_shows_what_waits,
    slow_io_says_how_far_what_waits_has_come,
    slow_io_shows_what_is_older_than_itself,
    slow_io_shows_in_a_terminal_what_waits,
    slow_io_shows_a_leg_that_hangs,
    slow_io_shows_the_time_of_day,
    slow_io_draws_the_parts,
    slow_io_names_the_process,
    slow_io_knows_the_clock_of_a_namespace,
    slow_io_has_tables_below_an_array,
    slow_io_has_tables_below_others,
    slow_io_tells_commands_apart,
];

/// A busy, healthy neighbour beside a service that its cgroup throttles: most of the time of all is the disk's, and
/// most of the slow ones' is not.
fn slow_io_answers_for_the_slow_ones() -> Result<()> {
    let disk = NullBlk::timer("busy", 1, "hw_queue_depth=64 submit_queues=1")?;
    // 250 ms a read: a busy host stops the guest for some tens of ms.
    let limit = format!("{} riops=4", disks::numbers(&disk.name)?);
    let cgroup = slow_io::cgroup("throttled", "io.max", &limit)?;
    let options = |min| vec!["--min", min, "--disk", &disk.name];
    let running = Running::stages([
        ("slow_io", [&options("150ms")[..], &["--json"]].concat()),
        ("slow_io", options("150ms")),
        ("slow_io", options("1h")),
    ])?;
    let neighbour = "--iodepth=8 --number_ios=6000 --size=200M";
    let neighbour = Running::bash(&run::fio_direct_command(&disk.name, neighbour))?;
    let read = slow_io::read_throttled(&cgroup, &disk.name, 16);
    let neighbour = neighbour.end_well();
    let outputs = Running::interrupt_all(running);
    shell(&format!("rmdir {cgroup}"))?;
    read?;
    neighbour?;
    let outputs = outputs?;
    let [sums] = &objects(&outputs[0], "disk")?[..] else { bail!("one disk: {}", outputs[0]) };
    let sum = |part: &str| sums[part]["sum_ns"].as_u64().unwrap_or(0);
    ensure!(sum("device") > sum("wait"), "the neighbour is not busy enough: {sums}");
    let slow = &sums["slow"];
    let lines = objects(&outputs[0], "bio")?;
    ensure!(slow["bios"] == lines.len() && lines.len() >= 10, "{} lines: {slow}", lines.len());
    for name in ["requests", "wait_ns", "queue_ns", "device_ns", "end_ns", "total_ns"] {
        let sum: u64 = lines.iter().filter_map(|line| line[name].as_u64()).sum();
        ensure!(slow[name] == sum, "{name}: the lines sum up to {sum}, not {slow}");
    }
    is_about_its_lines(&outputs[1], &disk.name)?;
    let all = of_table(&outputs[2], &disk.name)?;
    let end = format!(
        "\n\n{}: none of {all} I/Os took 1h or longer.\n\nAll {all} I/Os{} were measured.\n",
        disk.name,
        if counts_all_skips()? { "" } else { " that were seen" }
    );
    let said = outputs[2].split_inclusive('\n').filter(|line| !line.contains(NOT_COUNTED));
    ensure!(said.collect::<String>().ends_with(&end), "{}", outputs[2]);
    ensure!(!outputs[2].contains("Of their time"), "{}", outputs[2]);
    Ok(())
}

/// What stands behind the programs whose skips a kernel does not count.
const NOT_COUNTED: &str = ": not counted on this kernel)";

/// Whether the kernel counts how often it skips each of slow_io's programs: not those of kprobes, which it takes where
/// the kernel preempts, before 6.7.
fn counts_all_skips() -> Result<bool> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    Ok(version >= (6, 7) || !preempts()?)
}

/// How many I/Os the table of a disk is about.
fn of_table<'a>(output: &'a str, disk: &str) -> Result<&'a str> {
    between(output, &format!("\n{disk}: "), " I/Os\n")
}

/// The sentence has the number of the lines, and the share of WAIT in their time.
fn is_about_its_lines(output: &str, disk: &str) -> Result<()> {
    let is_of_disk = |line: &&str| line.split_whitespace().nth(1) == Some(disk);
    let lines = output.lines().filter(is_of_disk);
    let column = |line: &str, place: usize| -> Result<f64> {
        let word = line.split_whitespace().nth(place).with_context(|| line.to_owned())?;
        Ok(word.trim_start_matches('*').parse()?)
    };
    let mut sums = [0.0; 2];
    let mut number = 0;
    for line in lines {
        number += 1;
        sums[0] += column(line, 5)?;
        sums[1] += column(line, 6)?;
    }
    let all = of_table(output, disk)?;
    let begin =
        format!("\n{disk}: {number} of {all} I/Os took 150ms or longer. Of their time, wait has ");
    let percent: f64 = between(output, &begin, " %:\n  -> before a request")?.parse()?;
    let share = sums[1] / sums[0] * 100.0;
    ensure!((percent - share).abs() < 0.6, "{percent} %, and the lines have {share}: {output}");
    Ok(())
}

/// Without room for all that is in flight, the end says how many were not measured; with -v, what is 0 as well.
fn slow_io_says_what_it_has_not_measured() -> Result<()> {
    let disk = NullBlk::timer("test", 5, "hw_queue_depth=64 submit_queues=1")?;
    let options = ["--min", "1h", "--in-flight", "4", "--disk", &disk.name];
    let running = Running::stages([
        ("slow_io", options.to_vec()),
        ("slow_io", [&options[..], &["-v"]].concat()),
    ])?;
    let load = fio_direct(&disk.name, "--ioengine=libaio --iodepth=16 --number_ios=200 --size=8M");
    let outputs = Running::interrupt_all(running)?;
    load?;
    for (output, with_all) in outputs.iter().zip([false, true]) {
        let (measured, dropped) =
            (of_table(output, &disk.name)?.parse::<u64>()?, count(output, "dropped (")?);
        ensure!(measured + dropped >= 200 && dropped > 50, "{measured} measured: {output}");
        let said = output.split_once("\nNot all was measured:\n").context("no word of it")?.1;
        ensure!(!output.contains("were measured."), "{output}");
        let zeros = said.lines().filter(|line| line.trim_start().starts_with("0 ")).count();
        ensure!(if with_all { zeros >= 4 } else { zeros == 0 }, "-v: {with_all}: {output}");
    }
    Ok(())
}

/// An I/O that is cut into requests, which the disk takes one after the other: it waits for its own.
fn slow_io_knows_what_waits_behind_itself() -> Result<()> {
    let disk = NullBlk::one_tag("one", 20)?;
    fs::write(disk.queue("max_sectors_kb"), "64")?;
    let load =
        format!("dd if=/dev/{} of=/dev/null bs=1M count=2 iflag=direct status=none", disk.name);
    let (_, output) =
        beside("slow_io", &["--min", "100ms", "--disk", &disk.name], || shell(&load))?;
    let words = output.split_whitespace().collect::<Vec<_>>().join(" ");
    let is_named = words.contains("-> behind requests of the same I/O, which was cut into 16 (");
    ensure!(is_named && words.contains("2 of 2 I/Os took 100ms or longer."), "{output}");
    ensure!(output.lines().all(|line| line.chars().count() <= 120), "{output}");
    Ok(())
}

/// A request that the driver gets twice: DEVICE is both times together. And one that no path takes is in QUEUE.
fn slow_io_adds_up_what_the_driver_had() -> Result<()> {
    const HALF: u64 = 40_000_000;
    let disk = ScsiDebug::new("ndelay=40000000 opts=0x100 every_nth=2 dev_size_mb=64")?;
    let load =
        || shell(&format!("dd if=/dev/{} of=/dev/null bs=64k count=8 iflag=direct", disk.name));
    let (_, lines) = slow_io::traced(&["--disk", &disk.name], load)?;
    let mut twice = lines;
    twice.retain(|line| line["starts"] == 2);
    ensure!(twice.len() >= 3, "{} of 8 reads come in two parts", twice.len());
    let odd = twice.iter().find(|line| part(line, "device") < 2 * HALF);
    ensure!(odd.is_none(), "the disk had it twice for {HALF} ns: {odd:?}");
    // A busy host stops the guest's CPU for some ms, also between the two.
    let is_most = |line: &&Value| part(line, "device") * 100 >= part(line, "total") * 80;
    let most = twice.iter().filter(is_most).count();
    ensure!(most * 2 > twice.len(), "most of it is the disk's: {twice:?}");

    const NO_PATH: u64 = 1_000_000_000;
    let table = format!(
        "0 65536 multipath 1 queue_if_no_path 0 1 1 service-time 0 1 2 /dev/{} 1 1",
        disk.name
    );
    shell("modprobe -a dm_multipath dm_service_time")?;
    let paths = Mapped::new("paths", &table)?;
    let load = || {
        let (name, path) = (paths.path(), &disk.name);
        shell(&format!(
            "dmsetup message {name} 0 'fail_path /dev/{path}'
             dd if={name} of=/dev/null bs=4k count=1 iflag=direct status=none & dd=$!
             until grep -qs __blkdev_direct_IO_simple /proc/$dd/stack; do sleep 0.05; done
             sleep {}; dmsetup message {name} 0 'reinstate_path /dev/{path}'; wait",
            NO_PATH / 1_000_000_000
        ))
    };
    let (output, lines) = slow_io::traced(&[], load)?;
    let lines = of_disk(&lines, &paths.disk()?);
    let longest = lines.iter().max_by_key(|line| part(line, "total"));
    let longest = longest.with_context(|| format!("no line: {output}"))?;
    let [queue, device] = ["queue", "device"].map(|name| part(longest, name));
    let is_right = queue >= NO_PATH * 8 / 10 && 2 * device < queue;
    ensure!(is_right, "no disk had it for {NO_PATH} ns: {longest}");
    Ok(())
}

/// What hangs is the slowest of all: a line at the end, with its age, if it has waited for so long.
fn slow_io_shows_what_waits() -> Result<()> {
    let disk = Mapped::new("waits", &format!("0 131072 linear /dev/{} 0", disks::virtio()?))?;
    let name = disk.disk()?;
    let options = |min| vec!["--disk", &*name, "--min", min];
    let running = Running::stages([
        ("slow_io", [&options("300ms")[..], &["--json"]].concat()),
        ("slow_io", options("300ms")),
        ("slow_io", [&options("1h")[..], &["--json"]].concat()),
    ])?;
    disk.suspend(true)?;
    let began = Instant::now();
    let read = format!("exec dd if={} of=/dev/null bs=4k skip=9 count=1 iflag=direct", disk.path());
    let reader = Running::bash(&read)?;
    reader.waits_in("] __blkdev_direct_IO_simple+")?;
    thread::sleep(Duration::from_millis(600));
    let outputs = Running::interrupt_all(running);
    let elapsed = began.elapsed().as_nanos() as u64;
    disk.suspend(false)?;
    reader.end_well()?;
    let outputs = outputs?;
    let [waiting] = &objects(&outputs[0], "waiting")?[..] else {
        bail!("one waits: {}", outputs[0])
    };
    let age = waiting["age_ns"].as_u64().unwrap_or(0);
    ensure!((600_000_000..elapsed).contains(&age), "of at most {elapsed} ns: {waiting}");
    for (key, value) in [
        ("disk", Value::from(&*name)),
        ("operation", Value::from("RS")),
        ("sector", Value::from(72)),
        ("bytes", Value::from(4096)),
        ("process", Value::from("dd")),
    ] {
        ensure!(waiting[key] == value, "{key} is {value}: {waiting}");
    }
    let readme = fs::read_to_string(workspace().join("tools/slow_io/README.md"))?;
    let mut keys = waiting.as_object().into_iter().flat_map(|object| object.keys());
    let unknown = keys.find(|key| !readme.contains(&format!("`{key}`")));
    ensure!(unknown.is_none(), "the README does not explain {unknown:?} of what waits");
    ensure!(outputs[1].contains("\nStill waiting: 1, the oldest first\n"), "{}", outputs[1]);
    ensure!(
        objects(&outputs[2], "waiting")?.is_empty(),
        "it has not waited for 1 h: {}",
        outputs[2]
    );
    Ok(())
}

/// Reads a page of a disk or of a file, past the page cache.
fn read_page(path: &str, page: u32) -> Result<Running> {
    Running::bash(&format!(
        "exec dd if={path} of=/dev/null bs=4k skip={page} count=1 iflag=direct status=none"
    ))
}

/// Of what waits, the one that begins at this page.
fn at_page(output: &str, page: u32) -> Result<Value> {
    let waiting = objects(output, "waiting")?;
    let found = waiting.into_iter().find(|waiting| waiting["sector"] == page * 8);
    found.with_context(|| format!("nothing waits at page {page}: {output}"))
}

/// Whether each of these keys has this value.
fn has(waiting: &Value, expected: &[(&str, Value)]) -> Result<()> {
    for (key, value) in expected {
        ensure!(waiting[key] == *value, "{key} is {value}: {waiting}");
    }
    Ok(())
}

/// A disk that takes one request has one I/O, which came through device mapper. The next one has no request, or,
/// where there is a scheduler, one that lies in the queue.
fn slow_io_says_how_far_what_waits_has_come() -> Result<()> {
    const TIME: Duration = Duration::from_millis(600);
    let disk = ScsiDebug::new("max_queue=1 dev_size_mb=64 delay=0")?;
    let name = &*disk.name;
    let over = Mapped::new("over", &format!("0 65536 linear /dev/{name} 0"))?;
    shell("modprobe -q mq-deadline")?;
    // From here on, it takes many seconds: so many jiffies.
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/delay", "2500")?;
    for (scheduler, reached) in [("none", "none"), ("mq-deadline", "queue")] {
        fs::write(format!("/sys/block/{name}/queue/scheduler"), scheduler)?;
        let slow_io = Running::stage("slow_io", &["--json", "--min", "300ms"])?;
        let began = Instant::now();
        let first = read_page(&over.path(), 5)?;
        first.waits_in("] __blkdev_direct_IO_simple+")?;
        let second = read_page(&format!("/dev/{name}"), 6)?;
        second.waits_in("] __blkdev_direct_IO_simple+")?;
        thread::sleep(TIME);
        let busy = shell(&format!("cat /sys/kernel/debug/block/{name}/hctx*/busy"))?;
        let output = slow_io.interrupt()?;
        let elapsed = began.elapsed().as_nanos() as u64;
        first.end_well()?;
        second.end_well()?;
        ensure!(busy.matches(".state=in_flight").count() == 1, "the disk has one: {busy}");
        let ns = |waiting: &Value| waiting["reached_ns"].as_u64().unwrap_or(0);
        let is_since = |waiting| (TIME.as_nanos() as u64..elapsed).contains(&ns(waiting));
        let waiting = at_page(&output, 5)?;
        has(
            &waiting,
            &[
                ("disk", over.disk()?.into()),
                ("reached", "driver".into()),
                ("reached_disk", name.into()),
                ("requests", 1.into()),
                ("before_start", false.into()),
            ],
        )?;
        ensure!(is_since(&waiting), "it has had it for {TIME:?} and more: {waiting}");
        let waiting = at_page(&output, 6)?;
        has(&waiting, &[("disk", name.into()), ("reached", reached.into())])?;
        match reached {
            "none" => has(&waiting, &[("requests", 0.into()), ("reached_ns", Value::Null)])?,
            _ => ensure!(is_since(&waiting), "it is there for {TIME:?} and more: {waiting}"),
        }
    }
    Ok(())
}

/// What was submitted before the tool started is found in the kernel: what a suspended disk holds, with its task; of
/// what a delaying target keeps to itself, the task that waits for it.
fn slow_io_shows_what_is_older_than_itself() -> Result<()> {
    let disk = disks::virtio()?;
    let held = Mapped::new("held", &format!("0 65536 linear /dev/{disk} 0"))?;
    let kept = Mapped::new("kept", &format!("0 65536 delay /dev/{disk} 0 60000"))?;
    held.suspend(true)?;
    let older = read_page(&held.path(), 7)?;
    let task = read_page(&kept.path(), 8)?;
    for reader in [&older, &task] {
        reader.waits_in("] __blkdev_direct_IO_simple+")?;
    }
    let began = Instant::now();
    let name = held.disk()?;
    let of_task = task.id().to_string();
    let options = ["--json", "--min", "300ms"];
    let running = Running::stages([
        ("slow_io", options.to_vec()),
        ("slow_io", [&options[..], &["--disk", &name]].concat()),
        ("slow_io", [&options[..], &["--pid", &of_task]].concat()),
    ])?;
    let newer = read_page(&held.path(), 9)?;
    newer.waits_in("] __blkdev_direct_IO_simple+")?;
    thread::sleep(Duration::from_millis(600));
    let outputs = Running::interrupt_all(running);
    let elapsed = began.elapsed().as_nanos() as u64;
    held.suspend(false)?;
    // The target submits what it keeps.
    kept.suspend(true)?;
    kept.suspend(false)?;
    let (older_id, task_id) = (older.id(), task.id());
    for reader in [older, task, newer] {
        reader.end_well()?;
    }
    let outputs = outputs?;
    let waiting = objects(&outputs[0], "waiting")?;
    ensure!(waiting.len() == 3, "three wait: {waiting:?}");
    let waiting = at_page(&outputs[0], 7)?;
    has(
        &waiting,
        &[
            ("before_start", true.into()),
            ("disk", (&*name).into()),
            ("operation", "RS".into()),
            ("bytes", 4096.into()),
            ("pid", older_id.into()),
            ("process", "dd".into()),
            ("reached", "none".into()),
        ],
    )?;
    let age = waiting["age_ns"].as_u64().unwrap_or(0);
    ensure!((600_000_000..elapsed).contains(&age), "the tool has run for {elapsed} ns: {waiting}");
    has(&at_page(&outputs[0], 9)?, &[("before_start", false.into())])?;
    let of_disk = objects(&outputs[1], "waiting")?;
    ensure!(of_disk.len() == 2 && of_disk.iter().all(|one| one["disk"] == *name), "{of_disk:?}");
    let [of_task] = &objects(&outputs[2], "waiting")?[..] else { bail!("one: {}", outputs[2]) };
    has(
        of_task,
        &[
            ("before_start", true.into()),
            ("pid", task_id.into()),
            ("function", "__blkdev_direct_IO_simple".into()),
            ("disk", Value::Null),
        ],
    )
}

const SCREEN: &str = "/run/screen";

/// Starts slow_io in a terminal, in a zone of its own, and waits until it traces.
fn in_terminal(options: &str) -> Result<Running> {
    in_terminal_of(80, "TERM=linux", options)
}

/// In a terminal of so many columns, with this environment.
fn in_terminal_of(columns: usize, environment: &str, options: &str) -> Result<Running> {
    fs::remove_file(SCREEN).ok();
    let path = program("slow_io");
    let command = format!("stty cols {columns}; exec {} {options}", path.display());
    let terminal = Running::bash(&format!(
        "export TZ={ZONE} {environment}; exec script -qfc '{command}' {SCREEN} </dev/null >/dev/null"
    ))?;
    wait_until("slow_io", || Ok(screen().contains("tracing for")))?;
    Ok(terminal)
}

/// What the terminal shows.
fn screen() -> String {
    String::from_utf8_lossy(&fs::read(SCREEN).unwrap_or_default()).into_owned()
}

/// Five and a half hours ahead of UTC; it needs no file of zones.
const ZONE: &str = "HERE-5:30";

/// While it runs in a terminal, what waits has a line after a second, and one whenever its age has doubled. To look
/// for it keeps no program from running.
fn slow_io_shows_in_a_terminal_what_waits() -> Result<()> {
    let disk = Mapped::new("waits", &format!("0 65536 linear /dev/{} 0", disks::virtio()?))?;
    disk.suspend(true)?;
    let terminal = in_terminal(&format!("--min 100ms --disk {} --duration 9s", disk.disk()?))?;
    let reader = read_page(&disk.path(), 9)?;
    let ended = terminal.end_well();
    disk.suspend(false)?;
    reader.end_well()?;
    ended?;
    let screen = screen();
    let mut ages = Vec::new();
    for line in screen.lines().filter(|line| line.starts_with("waiting ")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        ensure!(words.len() > 6 && words[2..5] == ["RS", "72", "4"], "{line}");
        ensure!(words[6..8] == ["so", "far"], "{line}");
        ensure!(line.trim_end().ends_with(" dd; no request yet (suspended)"), "{line}");
        ages.push(words[5].parse::<f64>()?);
    }
    ensure!((2..=4).contains(&ages.len()) && ages[0] >= 1000.0, "{ages:?}: {screen}");
    ensure!(ages.windows(2).all(|two| two[1] >= 2.0 * two[0]), "{ages:?}");
    ensure!(screen.contains("\nStill waiting: 1, "), "{screen}");
    let mut skips = screen.lines().filter(|line| line.contains(" skipped ("));
    ensure!(skips.all(|line| line.contains(NOT_COUNTED)), "{screen}");
    ensure!(screen.contains(NOT_COUNTED) != counts_all_skips()?, "{screen}");
    Ok(())
}

/// A leg of a RAID 5 that takes long: the array's write has no request of its own, and the leg's nobody was seen to submit.
fn slow_io_shows_a_leg_that_hangs() -> Result<()> {
    shell("modprobe -a md_mod raid456")?;
    let hangs = ScsiDebug::new("max_queue=8 dev_size_mb=64 delay=0")?;
    let [a, b] = [NullBlk::new("a", "memory_backed=1")?, NullBlk::new("b", "memory_backed=1")?];
    let chunks = "echo 65536 >chunk_size; echo 2 >layout;";
    let array = md("raid5", chunks, &[&a.name, &b.name, &hangs.name])?;
    disks::read(&array, 1)?; // the first to open it looks for partitions
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/delay", "2500")?;
    let pid = std::process::id().to_string();
    let runs = Running::stages([
        ("slow_io", vec!["--json", "--min", "300ms"]),
        ("slow_io", vec!["--json", "--min", "300ms", "--disk", &a.name]),
        ("slow_io", vec!["--json", "--min", "300ms", "--pid", &pid]),
    ])?;
    let began = Instant::now();
    let write = format!("exec dd if=/dev/zero of=/dev/{array} bs=4k count=1 oflag=direct");
    let writer = Running::bash(&write)?;
    wait_until("the leg", || Ok(disks::in_flight(&hangs.name)? > 0))?;
    thread::sleep(Duration::from_millis(600));
    let outputs = Running::interrupt_all(runs);
    let elapsed = began.elapsed().as_nanos() as u64;
    writer.end_well()?;
    shell(&format!("echo clear >/sys/block/{array}/md/array_state"))?;
    let outputs = outputs?;
    let waiting = objects(&outputs[0], "waiting")?;
    let of = |disk: &str| of_disk(&waiting, disk).first().cloned().context("it does not wait");
    let leg = of(&hangs.name)?;
    has(
        &leg,
        &[
            ("reached", "driver".into()),
            ("reached_disk", (*hangs.name).into()),
            ("bytes", 4096.into()),
            ("pid", Value::Null),
            ("before_start", false.into()),
        ],
    )?;
    let age = leg["age_ns"].as_u64().unwrap_or(0);
    ensure!((600_000_000..elapsed).contains(&age), "of at most {elapsed} ns: {leg}");
    has(&of(&array)?, &[("process", "dd".into()), ("reached", "none".into())])?;
    for output in &outputs[1..] {
        ensure!(objects(output, "waiting")?.is_empty(), "of another disk, or process: {output}");
    }
    Ok(())
}

/// In a terminal, TIME is the time of day in the zone of whoever looks.
fn slow_io_shows_the_time_of_day() -> Result<()> {
    let disk = NullBlk::new("day", "")?;
    let terminal = in_terminal(&format!("--min 0 --disk {} --duration 5s", disk.name))?;
    let now = || {
        Ok::<String, anyhow::Error>(shell(&format!("TZ={ZONE} date +%T.%3N"))?.trim().to_owned())
    };
    let before = now()?;
    disks::read(&disk.name, 3)?;
    let after = now()?;
    terminal.end_well()?;
    let screen = screen();
    let is_its = |line: &&str| line.split_whitespace().nth(1) == Some(&disk.name);
    let times: Vec<&str> =
        screen.lines().filter(is_its).filter_map(|line| line.split_whitespace().next()).collect();
    // At midnight, a later time is smaller.
    let is_then = |time: &&str| before > after || (&*before..=&*after).contains(time);
    ensure!(times.len() == 3 && times.iter().all(is_then), "{before} to {after}: {screen}");
    Ok(())
}

/// A bar has the parts of an I/O in a letter and a colour each, beside their times, or, where there is no room for
/// these, alone: then a line fits. The same for a disk. Nothing of it where nobody wants colours.
fn slow_io_draws_the_parts() -> Result<()> {
    const DEVICE: &str = "\x1b[48;5;75m\x1b[38;5;16m";
    let disk = NullBlk::timer("drawn", 20, "")?;
    let limit = format!("{} riops=8", disks::numbers(&disk.name)?);
    let cgroup = slow_io::cgroup("drawn", "io.max", &limit)?;
    let read = || slow_io::read_throttled(&cgroup, &disk.name, 5);
    for (columns, environment) in [(80, "TERM=linux"), (130, "TERM=linux"), (80, "NO_COLOR=1")] {
        let options = format!("--min 0 --disk {} --duration 5s", disk.name);
        let terminal = in_terminal_of(columns, environment, &options)?;
        disks::read(&disk.name, 1)?;
        read()?;
        terminal.end_well()?;
        let screen = screen();
        if environment == "NO_COLOR=1" {
            let has_none = !screen.contains("\x1b[48") && !screen.contains("PARTS");
            ensure!(has_none && screen.contains("\x1b[1m") && screen.contains("####"), "{screen}");
            continue;
        }
        ensure!(screen.contains(DEVICE), "no colour: {screen}");
        let plain = without_colours(&screen);
        let is_its = |line: &&str| line.split_whitespace().nth(1) == Some(&disk.name);
        let rows: Vec<&str> = plain.lines().map(str::trim_end).filter(is_its).collect();
        ensure!(rows.len() == 6, "6 reads: {plain}");
        ensure!(rows.iter().all(|row| row.len() <= columns), "{columns}: {plain}");
        let mut drawn = BTreeSet::new();
        for row in rows {
            let words: Vec<&str> = row.split_whitespace().collect();
            // TIME DISK OP SECTOR KIB TOTAL, the four times where there is room, PARTS PID PROCESS.
            let bar = words[words.len() - 3];
            ensure!(words.len() == if columns > 120 { 13 } else { 9 }, "{row}");
            ensure!(bar.len() == 10 && bar.chars().all(|part| "wqde".contains(part)), "{row}");
            drawn.extend(bar.chars().max_by_key(|part| bar.matches(*part).count()));
            let times = if columns > 120 { &words[6..10] } else { &[] };
            for (part, time) in "wqde".chars().zip(times) {
                let share = time.parse::<f64>()? * 10.0 / words[5].parse::<f64>()?;
                let cells = bar.matches(part).count() as f64;
                ensure!((share - cells).abs() <= 1.0, "{part} in {row}");
            }
        }
        // The first one has only the disk's time, the others wait for their limit.
        ensure!(drawn == BTreeSet::from(['d', 'w']), "{drawn:?}: {plain}");
        let total = plain.lines().find(|line| line.trim_start().starts_with("total "));
        let bar = total.and_then(|line| line.split_whitespace().last()).unwrap_or_default();
        ensure!(bar.len() == 30 && bar.contains("wd") && !bar.contains('#'), "{plain}");
    }
    shell(&format!("rmdir {cgroup}")).map(drop)
}

/// A text of a terminal without what paints it.
fn without_colours(screen: &str) -> String {
    let mut pieces = screen.split("\x1b[");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.split_once('m').map_or("", |(_, rest)| rest))
}

/// PID and PROCESS are of the process, whatever its threads call themselves; so --who has one row for it.
fn slow_io_names_the_process() -> Result<()> {
    let disk = NullBlk::new("named", "")?;
    let path = format!("/dev/{}", disk.name);
    let (process, name) = (std::process::id(), fs::read_to_string("/proc/self/comm")?);
    let mut threads = BTreeSet::new();
    let (output, lines) = slow_io::traced(&["--who", "--disk", &disk.name], || {
        let tids = in_threads(0..4_u64, |n| {
            set_name(&std::ffi::CString::new(format!("worker-{n}"))?)?;
            let mut direct = Direct::open(&path)?;
            (0..5).try_for_each(|k| direct.read(4096, (n * 5 + k) * 4096).map(drop))?;
            Ok(gettid().as_raw_nonzero().get() as u64)
        })?;
        threads.extend(tids);
        Ok(())
    })?;
    let is_ours = |line: &&Value| line["pid"] == process && line["process"] == name.trim();
    ensure!(lines.len() == 20 && lines.iter().all(|line| is_ours(&line)), "{name}: {lines:?}");
    let seen: BTreeSet<u64> = lines.iter().filter_map(|line| line["tid"].as_u64()).collect();
    ensure!(seen == threads, "threads {threads:?}, not {seen:?}");
    let causes = objects(&output, "cause")?;
    ensure!(causes.len() == 1 && causes[0]["bios"] == 20, "one process: {causes:?}");
    Ok(())
}

/// In a time namespace, CLOCK_MONOTONIC is not the kernel's clock: a wall clock's time is right there, too.
fn slow_io_knows_the_clock_of_a_namespace() -> Result<()> {
    let disk = NullBlk::new("timed", "")?;
    let stage = program("slow_io");
    let command = format!("exec {} --min 0 --json --time wall --duration 5s", stage.display());
    let shifted = ["--time", "--monotonic", "86400", "--boottime", "86400", "--fork", "bash", "-c"];
    let mut running = Running::spawn(Command::new("unshare").args(shifted).arg(&command))?;
    running.wait_for("tracing")?;
    let now = || -> Result<u64> { Ok(shell("date +%s%N")?.trim().parse()?) };
    let began = now()?;
    shell(&reads(&disk.name, 3))?;
    let ended = now()?;
    let output = running.end_well()?.stdout;
    let lines = of_disk(&objects(&output, "bio")?, &disk.name);
    let is_then = |line: &Value| {
        line["ended_wall_ns"].as_u64().is_some_and(|time| (began..=ended).contains(&time))
    };
    ensure!(lines.len() == 3 && lines.iter().all(is_then), "{began} to {ended}: {output}");
    Ok(())
}

/// Of a run with --json, the table of a disk, or null; and how many programs were skipped, which may have missed as many
/// ends.
fn table_of(output: &str, disk: &str) -> Result<(Value, u64)> {
    let skipped = objects(output, "counters")?[0]["skipped"].as_u64().unwrap_or(0);
    let tables = of_disk(&objects(output, "disk")?, disk);
    Ok((tables.first().cloned().unwrap_or(Value::Null), skipped))
}

/// All that the disk has done was submitted by nobody, and its table has all of it.
fn has_all(output: &str, disk: &str, did: u64) -> Result<Value> {
    let (table, skipped) = table_of(output, disk)?;
    let has = table["bios"].as_u64().unwrap_or(0);
    let is_near = has <= did && did - has <= skipped;
    ensure!(did > 0 && is_near, "{disk} has done {did}, {skipped} skipped: {table}, {output}");
    ensure!(table["no_submitter"] == has, "{disk}: all are of the array: {table}");
    Ok(table)
}

/// A RAID 5 with a slow leg: what it writes in stripes has no parts. The legs' tables have all that they did, the slow
/// one's with the time of its timer; and the sentence leads there.
fn slow_io_has_tables_below_an_array() -> Result<()> {
    const SLOW: u64 = 150_000_000;
    shell("modprobe -a md_mod raid456")?;
    let [a, b] = [NullBlk::new("a", "memory_backed=1")?, NullBlk::new("b", "memory_backed=1")?];
    let slow = NullBlk::timer("slow", SLOW / 1_000_000, "memory_backed=1")?;
    let legs = [&slow.name, &a.name, &b.name];
    let chunks = "echo 65536 >chunk_size; echo 2 >layout;";
    // The first parity is on the last one.
    let array = md("raid5", chunks, &[&a.name, &b.name, &slow.name])?;
    disks::read(&array, 1)?; // the first to open it looks for partitions
    let pid = std::process::id().to_string();
    let runs = Running::stages([
        ("slow_io", vec!["--json", "--min", "100ms"]),
        ("slow_io", vec!["--min", "100ms"]),
        ("slow_io", vec!["--json", "--min", "0", "--disk", &slow.name]),
        ("slow_io", vec!["--json", "--min", "0", "--pid", &pid]),
        ("slow_io", vec!["--min", "100ms", "--disk", &array]),
    ])?;
    let count = || legs.iter().map(|leg| disks::requests(leg)).collect::<Result<Vec<u64>>>();
    let before = count()?;
    shell(&format!("dd if=/dev/zero of=/dev/{array} bs=4k count=6 oflag=direct status=none"))?;
    wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))?;
    let did: Vec<u64> = count()?.iter().zip(before).map(|(now, before)| now - before).collect();
    let outputs = Running::interrupt_all(runs);
    shell(&format!("echo clear >/sys/block/{array}/md/array_state"))?;
    let outputs = outputs?;

    for (leg, did) in legs.iter().zip(&did) {
        has_all(&outputs[0], leg, *did)?;
    }
    for output in [&outputs[0], &outputs[2]] {
        let table = has_all(output, &slow.name, did[0])?;
        let [bios, device, queue] =
            [&table["bios"], &table["device"]["sum_ns"], &table["queue"]["sum_ns"]]
                .map(Value::as_u64);
        ensure!(device >= bios.map(|bios| bios * SLOW) && queue < device, "its timer: {table}");
        ensure!(table["wait"].is_null() && table["mapper"].is_null(), "nobody knows: {table}");
        let lines = of_disk(&objects(output, "bio")?, &slow.name);
        let is_right = |line: &Value| {
            line["process"].is_null() && line["pid"].is_null() && line["bytes"] == 4096
        };
        ensure!(table["bios"] == lines.len() && lines.iter().all(is_right), "{lines:?}");
        ensure!(table["slow"]["bios"] == lines.len(), "{table}");
    }
    ensure!(objects(&outputs[0], "counters")?[0]["unmatched"] == 0, "{}", outputs[0]);
    let others = objects(&outputs[2], "disk")?.len() + objects(&outputs[3], "disk")?.len();
    ensure!(others == 1, "of another disk, or process: {} {}", outputs[2], outputs[3]);
    is_led_below(&outputs[1], &array, &slow.name)?;
    let below =
        "-> the disks below it have tables of their own without --disk, --pid and --cgroup: ";
    let named = between(&outputs[4], below, "\n")?;
    ensure!(legs.iter().all(|leg| named.contains(leg.as_str())), "{}", outputs[4]);
    Ok(())
}

/// The array's sentence leads to the slow disk's table; there, a line counts those without a process.
fn is_led_below(output: &str, array: &str, slow: &str) -> Result<()> {
    let of_array = output.split(&format!("\n{array}: ")).last().context("no word of the array")?;
    let first = between(of_array, "have tables of their own, the slowest first: ", ", ")?;
    ensure!(first == slow, "{slow} is the slowest: {output}");
    let of_slow = format!("\n{slow}: ");
    let mut of_slow = output.split(&of_slow).skip(1);
    let table = of_slow.next().context("no table of the disk")?;
    ensure!(of_slow.next().is_some_and(|it| it.contains("Of their time, device has")), "{output}");
    let counted = between(table, "max ms\n", " of these had no submitter that was seen")?;
    ensure!(counted.lines().count() == 5, "below the table: {output}");
    Ok(())
}

/// md that checks a RAID 1, one leg of which has a queue; and the path of a multipath.
fn slow_io_has_tables_below_others() -> Result<()> {
    shell("modprobe -a md_mod raid1 dm_multipath dm_service_time")?;
    let [a, path] = ["a", "path"].map(|name| NullBlk::new(name, "memory_backed=1"));
    let (a, path, queued) = (a?, path?, NullBlk::one_tag("queued", 5)?);
    queued.queues()?;
    let array = md("raid1", "", &[&a.name, &queued.name])?;
    disks::read(&array, 1)?;
    let table = format!("0 65536 multipath 0 0 1 1 service-time 0 1 2 /dev/{} 1 1", path.name);
    let mapped = Mapped::new("paths", &table)?;
    disks::read(&mapped.path(), 1)?;
    let legs = [&a.name, &queued.name, &path.name];
    let count = || legs.iter().map(|leg| disks::requests(leg)).collect::<Result<Vec<u64>>>();
    let before = count()?;
    let (_, output) = beside("slow_io", &["--json", "--min", "1h"], || {
        shell(&format!("echo check >/sys/block/{array}/md/sync_action"))?;
        let action = format!("/sys/block/{array}/md/sync_action");
        wait_until("the end of the check", || Ok(fs::read_to_string(&action)?.trim() == "idle"))?;
        disks::read(&mapped.path(), 10)?;
        wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))
    })?;
    let did: Vec<u64> = count()?.iter().zip(before).map(|(now, before)| now - before).collect();
    shell(&format!("echo clear >/sys/block/{array}/md/array_state"))?;
    for (leg, did) in legs.iter().zip(&did) {
        has_all(&output, leg, *did)?;
    }
    ensure!(did[1] > 50 && did[2] == 10, "{did:?}: {output}");
    let (table, _) = table_of(&output, &queued.name)?;
    let [queue, device] = ["queue", "device"].map(|part| table[part]["sum_ns"].as_u64());
    ensure!(queue > device && device >= Some(did[1] * 5_000_000 * 9 / 10), "it queues: {table}");
    let (table, _) = table_of(&output, &mapped.disk()?)?;
    ensure!(table["bios"] == 10 && table["no_submitter"] == 0, "dd's: {table}");
    Ok(())
}

/// What a disk is asked beside all I/O: as often as SCSI counts, without what is in `stat`.
fn slow_io_tells_commands_apart() -> Result<()> {
    let disk = ScsiDebug::new("dev_size_mb=64")?;
    let path = format!("/sys/block/{}/device", disk.name);
    let commands = || -> Result<u64> {
        let done = fs::read_to_string(format!("{path}/iodone_cnt"))?;
        let done = u64::from_str_radix(done.trim().trim_start_matches("0x"), 16)?;
        Ok(done - disks::requests(&disk.name)? - disks::flushes(&disk.name)?)
    };
    let runs = Running::stages([
        ("slow_io", vec!["--json", "--min", "0", "--disk", &disk.name]),
        ("slow_io", vec!["--json", "--min", "0"]),
        ("slow_io", vec!["--min", "1h", "-v"]),
        ("slow_io", vec!["--json", "--min", "0", "--pid", "1"]),
    ])?;
    let before = [commands()?, disks::requests(&disk.name)?];
    shell(&format!("for i in 1 2 3; do echo 1 >{path}/rescan; done"))?;
    disks::read(&disk.name, 10)?;
    wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))?;
    let now = [commands()?, disks::requests(&disk.name)?];
    let outputs = Running::interrupt_all(runs)?;
    let [asked, did] = [now[0] - before[0], now[1] - before[1]];
    ensure!(asked >= 10, "{asked} commands: the test does not test");
    for (output, exact) in [(&outputs[0], true), (&outputs[1], false)] {
        let counters = &objects(output, "counters")?[0];
        let [commands, skipped] =
            ["commands", "skipped"].map(|name| counters[name].as_u64().unwrap_or(0));
        let is_right = commands + skipped >= asked && (!exact || commands <= asked);
        ensure!(is_right && counters["unmatched"] == 0, "{asked} commands: {counters}");
        let lines = of_disk(&objects(output, "bio")?, &disk.name);
        let is_near = lines.len() as u64 <= did && did - lines.len() as u64 <= skipped;
        ensure!(is_near, "{did} I/Os, {} lines: {output}", lines.len());
    }
    let counted = count(&outputs[2], "commands to a disk")?;
    let skipped: u64 = rows(&outputs[2], r"(\d+) skipped \(")
        .into_iter()
        .map(|[times]| times.parse::<u64>().unwrap_or(0))
        .sum();
    ensure!(counted + skipped >= asked, "{asked} commands: {}", outputs[2]);
    let of_process = &objects(&outputs[3], "counters")?[0];
    ensure!(of_process["commands"] == 0, "these have no process: {of_process}");
    Ok(())
}
