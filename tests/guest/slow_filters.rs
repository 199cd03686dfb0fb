//! What `slow_io` and `ctracer` leave out; and what a filter names is replaced: it is followed, and a line says so.

use crate::{ctracer::calls, disks::Loop, prelude::*};

tests![
    slow_io_shows_what_is_wanted,
    slow_io_filters_follow_a_cgroup,
    slow_io_filters_follow_a_disk,
    slow_io_filters_follow_partitions_and_mapped_disks,
    slow_io_filters_end_with_the_process,
    slow_io_filters_know_a_process_by_its_start,
];

/// --min, --top, --histogram, --disk, --pid, --causes.
fn slow_io_shows_what_is_wanted() -> Result<()> {
    let null = NullBlk::timer("test", 20, "")?;
    // A disk with its partitions, a partition, and a name that `lsblk` shows.
    let disk = disks::virtio()?;
    let partition = format!("/dev/{}", disks::partitioned(&disk)?);
    let _mapped = Mapped::new("shown", &format!("0 4096 linear /dev/{disk} 0"))?;
    let gate = Gate::new()?;
    let process = Running::bash(&format!("{}; exec {}", Gate::WAIT, reads(&partition, 4)))?;
    let pid = process.id().to_string();
    let of_causes = ["--histogram", "--who", "stack", "--causes", "1"];
    let options = [
        ["--min", "0", "--top", "3", "--disk", &null.name].to_vec(),
        ["--min", "0", "--disk", "shown"].to_vec(),
        ["--min", "0", "--disk", &partition, "--pid", &pid].to_vec(),
        [&["--min", "10s", "-v", "--disk", &disk][..], &of_causes].concat(),
    ];
    let running = Running::stages(options.map(|options| ("slow_io", options)))?;
    // Those through device mapper come last: at the disk, nobody was seen to submit them, and there is room for one
    // cause.
    let all = [(null.name.as_str(), 10), (&disk, 3), ("mapper/shown", 5)];
    shell(&all.map(|(file, count)| reads(file, count)).join("; "))?;
    gate.open()?;
    process.end_well()?;
    disks::read(&partition, 1)?;
    let outputs = Running::interrupt_all(running)?;

    let of_dd = |output: &String| output.lines().filter(|line| line.contains(" RS ")).count();
    let counts: Vec<usize> = outputs.iter().map(of_dd).collect();
    ensure!(counts == [3, 5, 4, 0], "{counts:?}: {}", outputs.concat());
    // TIME DISK OP SECTOR KIB TOTAL
    let slowest = outputs[0].lines().filter(|line| line.ends_with(" dd"));
    let total =
        |line: &str| Ok(line.split_whitespace().nth(5).context("no total")?.parse::<f64>()?);
    let totals = slowest.map(total).collect::<Result<Vec<f64>>>()?;
    ensure!(totals.is_sorted_by(|a, b| a >= b) && totals[2] >= 20.0, "{}", outputs[0]);
    // Tables and histograms are of all bios, not only of the slow ones. Each dd is a cause.
    let counts = rows(&outputs[3], r"< +\S+ +\S+ +(\d+)").into_iter();
    let in_rows = counts.map(|[count]| Ok(count.parse::<u64>()?)).sum::<Result<u64>>()?;
    let all = ["I/Os completed", "more that nobody"].map(|what| count(&outputs[3], what));
    let bios = all.into_iter().sum::<Result<u64>>()?;
    ensure!(in_rows == bios && bios >= 8, "{in_rows} of {bios} in rows: {}", outputs[3]);
    ensure!(outputs[3].contains("blkdev_"), "a cause's stack: {}", outputs[3]);
    let from_above = rows(&outputs[3], r"^ +(\d+) of these had no submitter that was seen");
    ensure!(from_above == [["5"]], "through device mapper: {from_above:?}, {}", outputs[3]);
    let others = count(&outputs[3], "without a cause")?;
    ensure!((4..bios).contains(&others), "{others} of {bios} without a cause: {}", outputs[3]);
    Ok(())
}

/// A service is restarted, then with the cgroup above it. Others have its name elsewhere, or another name there.
fn slow_io_filters_follow_a_cgroup() -> Result<()> {
    const ROOT: &str = "/sys/fs/cgroup";
    let disk = NullBlk::new("again", "")?;
    shell(&format!(
        "mountpoint -q {ROOT} || mount -t cgroup2 none {ROOT}; mkdir -p {ROOT}/up/svc"
    ))?;
    let within = |cgroup: &str, count: u32| -> Result<String> {
        let procs = format!("{ROOT}/{cgroup}/cgroup.procs");
        shell(&format!("sh -c 'echo $$ >{procs}; exec {}'", reads(&disk.name, count)))
    };
    let running = Running::stages([
        ("slow_io", vec!["--min", "0", "--cgroup", "/up/svc", "--json"]),
        ("slow_io", vec!["--min", "0", "--cgroup", "/up/svc"]),
        ("slow_io", vec!["--min", "0", "--cgroup=/up", "--json"]),
    ])?;
    within("up/svc", 10)?;
    shell(&format!("cd {ROOT}/up; rmdir svc; mkdir svc"))?;
    within("up/svc", 20)?;
    shell(&format!("cd {ROOT}; rmdir up/svc up; mkdir -p up/svc/below up/svc2 svc sv"))?;
    within("up/svc/below", 40)?;
    for (other, count) in [("up/svc2", 1), ("svc", 2), ("sv", 3), ("up", 4)] {
        within(other, count)?;
    }
    shell(&format!("cd {ROOT}; rmdir up/svc/below up/svc up/svc2 up svc sv"))?;
    let outputs = Running::interrupt_all(running)?;
    for (output, expected) in [(&outputs[0], 70), (&outputs[2], 75)] {
        let lines = of_disk(&objects(output, "bio")?, &disk.name);
        ensure!(lines.len() == expected, "{} lines, not {expected}: {output}", lines.len());
    }
    // Also after the cgroup was removed, its name is known.
    let lines = of_disk(&objects(&outputs[0], "bio")?, &disk.name);
    let of_svc = lines.iter().filter(|line| line["cgroup"] == "/up/svc").count();
    ensure!(of_svc == 30, "{of_svc} lines of 30 have its path: {}", outputs[0]);
    let [fate] = &objects(&outputs[0], "filter")?[..] else { bail!("{}", outputs[0]) };
    let expected = serde_json::json!({
        "kind": "filter", "filter": "cgroup", "name": "/up/svc", "replaced": true, "gone": true,
    });
    ensure!(*fate == expected, "{fate}");
    let said = "\nThe cgroup /up/svc was made again, and is gone now. ";
    ensure!(outputs[1].contains(said), "{}", outputs[1]);
    Ok(())
}

/// A loop device is attached again: it is the same `gendisk`, with another diskseq. Another one comes meanwhile.
fn slow_io_filters_follow_a_disk() -> Result<()> {
    let [disk, other] = ["again", "other"].map(|name| Loop::new(name, 1 << 20));
    let (disk, other) = (disk?, other?);
    let [path, others] = [&disk, &other].map(|disk| format!("/dev/{}", disk.name));
    let attach = |path: &str| shell(&format!("losetup -d {path}; losetup {path} /run/again"));
    let mut running = Running::stages([
        ("slow_io", vec!["--min", "0", "--disk", &disk.name, "--json"]),
        ("slow_io", vec!["--min", "1h", "--disk", &path]),
        ("slow_io", vec!["--min", "0"]),
    ])?;
    let did = || disks::bios(&disk.name);
    // Attaching counts from 0, on some kernels.
    let mut all = 0;
    for (count, begins) in [(20, false), (30, true)] {
        if begins {
            attach(&path)?;
        }
        let before = did()?;
        // A disk that is new has a table of its own after a turn.
        for skip in [u64::from(count), u64::from(count) + 1] {
            shell(&format!("{} skip={skip}", reads(&disk.name, 1)))?;
            running[2].prints(&format!(" RS    {:>10} ", skip * 8))?;
        }
        disks::read(&disk.name, count - 2)?;
        let now = did()?;
        ensure!(now - before >= u64::from(count), "{before} to {now}: the oracle is odd");
        all += now - before;
        attach(&others)?;
        disks::read(&other.name, 7)?;
    }
    let outputs = Running::interrupt_all(running)?;
    let lines = objects(&outputs[0], "bio")?;
    let of_dd = lines.iter().filter(|line| line["process"] == "dd").count() as u64;
    ensure!(of_dd == all, "{of_dd} lines, and the disk did {all}: {}", outputs[0]);
    let is_other = lines.iter().find(|line| line["disk"] != disk.name.as_str());
    ensure!(is_other.is_none(), "{is_other:?}");
    let diskseqs: BTreeSet<_> = lines.iter().filter_map(|line| line["diskseq"].as_u64()).collect();
    ensure!(diskseqs.len() == 2, "not attached again: {diskseqs:?}");
    let [table] = &objects(&outputs[0], "disk")?[..] else { bail!("one table: {}", outputs[0]) };
    ensure!(table["bios"] == lines.len(), "{table}");
    let [fate] = &objects(&outputs[0], "filter")?[..] else { bail!("{}", outputs[0]) };
    ensure!(fate["replaced"] == true && fate["gone"] == false, "{fate}");

    let said = format!("\n{} was attached again, or replaced. ", disk.name);
    let headings =
        |output: &str| rows::<1>(output, &format!("({}.*): \\d+ I/Os$", disk.name)).len();
    ensure!(outputs[1].contains(&said) && headings(&outputs[1]) == 1, "{}", outputs[1]);
    let apart =
        diskseqs.iter().all(|n| outputs[2].contains(&format!("{} (diskseq {n}): ", disk.name)));
    ensure!(apart && headings(&outputs[2]) == 2, "{diskseqs:?}: {}", outputs[2]);
    Ok(())
}

/// Two partitions have one number, one after the other; a disk of device mapper is made again, with another number.
fn slow_io_filters_follow_partitions_and_mapped_disks() -> Result<()> {
    let null = NullBlk::new("parted", "memory_backed=1 size=64")?;
    let add = |n: u32| shell(&format!("addpart /dev/{} {n} {} 2048", null.name, n * 4096));
    let delete = |n: u32| shell(&format!("delpart /dev/{} {n}", null.name));
    let name =
        |n: u32| disks::partition(&null.name).trim_end_matches('1').to_owned() + &n.to_string();
    add(1)?;
    let first = name(1);
    let table = format!("0 4096 linear /dev/{} 0", disks::virtio()?);
    let mapped = Mapped::new("home", &table)?;
    let path = mapped.path();
    let running = Running::stages([
        ("slow_io", vec!["--min", "0", "--disk", &first, "--json"]),
        ("slow_io", vec!["--min", "0", "--disk", &path, "--json"]),
        ("slow_io", vec!["--min", "0", "--disk", "home"]),
    ])?;
    let number = disks::numbers(&first)?;
    disks::read(&first, 5)?;
    delete(1)?;
    add(2)?;
    ensure!(disks::numbers(&name(2))? == number, "another number: the test does not test");
    disks::read(&name(2), 3)?;
    add(1)?;
    ensure!(disks::numbers(&first)? != number, "the same number: the test does not test");
    disks::read(&first, 11)?;

    let was = mapped.disk()?;
    disks::read(&path, 6)?;
    drop(mapped);
    let other = Mapped::new("house", &table)?;
    ensure!(other.disk()? == was, "another disk: the test does not test");
    disks::read(&other.path(), 4)?;
    let mapped = Mapped::new("home", &table)?;
    disks::read(&path, 12)?;
    drop(mapped);
    let outputs = Running::interrupt_all(running)?;
    for (output, expected, gone) in [(&outputs[0], 16, false), (&outputs[1], 18, true)] {
        let lines = objects(output, "bio")?;
        let of_dd = lines.iter().filter(|line| line["process"] == "dd").count();
        ensure!(of_dd == expected, "{of_dd} lines of {expected}: {output}");
        let [fate] = &objects(output, "filter")?[..] else { bail!("{output}") };
        ensure!(fate["gone"] == gone, "{fate}: {output}");
    }
    let said = "\nhome was attached again, or replaced, and is gone now. ";
    ensure!(outputs[2].contains(said), "{}", outputs[2]);
    Ok(())
}

/// The process ends while the disk has its readahead: the tool shows that, too, and ends.
fn slow_io_filters_end_with_the_process() -> Result<()> {
    let null = NullBlk::new("ends", "memory_backed=1 size=64")?;
    shell("modprobe dm_delay")?;
    let disk = Mapped::new("ends", &format!("0 8192 delay /dev/{} 0 2000", null.name))?;
    let (path, name) = (disk.path(), disk.disk()?);
    // Who closes a disk last waits for its readahead.
    let _open = File::open(&path)?;
    let gate = Gate::new()?;
    let read = format!("exec dd if={path} of=/dev/null bs=4k count=4 status=none");
    let process = Running::bash(&format!("{}\n{read}", Gate::WAIT))?;
    let pid = process.id().to_string();
    let options = ["--min", "0", "--disk", &path, "--pid", &pid];
    let running = Running::stages([
        ("slow_io", options.to_vec()),
        ("slow_io", [&options[..], &["--json"]].concat()),
    ])?;
    gate.open()?;
    process.end_well()?;
    let ended = now();
    let outputs = running.into_iter().map(|running| Ok(running.end_well()?.stdout));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let said = format!("\nProcess {pid} has ended: ");
    ensure!(outputs[0].contains(&said), "{}", outputs[0]);
    let lines = of_disk(&objects(&outputs[1], "bio")?, &name);
    let later = lines.iter().filter(|line| line["ended_ns"].as_u64() > Some(ended)).count();
    let counters = objects(&outputs[1], "counters")?;
    ensure!(later > 0 && counters[0]["in_flight"] == 0, "after {ended}: {}", outputs[1]);
    Ok(())
}

/// The number of a process is used again: the second one has it, and is left out.
fn slow_io_filters_know_a_process_by_its_start() -> Result<()> {
    let disk = NullBlk::new("used", "")?;
    let gate = Gate::new()?;
    let first = Running::bash(&format!("{}\nexec {}", Gate::WAIT, reads(&disk.name, 4)))?;
    let pid = first.id();
    let number = pid.to_string();
    let mut running = Running::stages([
        ("slow_io", vec!["--min", "0", "--pid", &number, "--json"]),
        ("ctracer", vec!["--json", "--pid", &number, "--only=submit_bio", "--only=bio_endio"]),
    ])?;
    // The namespace's clock is ahead, and so is what /proc says there about a start.
    let shifted = ["--time", "--boottime", "86400", "--fork"];
    let mut elsewhere = Command::new("unshare");
    elsewhere
        .args(shifted)
        .arg(program("slow_io"))
        .args(["--min", "0", "--json", "--pid", &number]);
    let mut elsewhere = Running::spawn(&mut elsewhere)?;
    elsewhere.wait_for(": tracing ")?;
    // Else slow_io ends with the process. What is in the kernel is not stopped.
    running.iter().try_for_each(|running| running.signal(Signal::STOP))?;
    gate.open()?;
    first.end_well()?;
    // A thread of the kernel may get the next number.
    wait_until("the number to be used again", || {
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())?;
        let second = Running::bash(&format!("exec {}", reads(&disk.name, 7)))?;
        let has_it = second.id() == pid;
        second.end_well()?;
        Ok(has_it)
    })?;
    running.iter().try_for_each(|running| running.signal(Signal::CONT))?;
    let ctracer = running.pop().context("ctracer")?;
    ctracer.signal(Signal::INT)?;
    let ctracer = ctracer.end_well()?;
    let slow_io = running.pop().context("slow_io")?.end_well()?;
    for output in [slow_io.stdout, elsewhere.end_well()?.stdout] {
        let lines = of_disk(&objects(&output, "bio")?, &disk.name);
        ensure!(lines.len() == 4, "{} lines of 4: {output}", lines.len());
        let [fate] = &objects(&output, "filter")?[..] else { bail!("{output}") };
        ensure!(fate["filter"] == "pid" && fate["gone"] == true, "{fate}");
    }
    let lines = ctracer.stdout.lines().map(serde_json::from_str);
    let lines = lines.collect::<Result<Vec<Value>, _>>()?;
    let submitted = calls(&lines, "submit_bio").count();
    ensure!(submitted == 4, "{submitted} of 4: {}", ctracer.stdout);
    let said = format!("ctracer: process {pid} has ended\n");
    ensure!(ctracer.stderr.contains(&said), "{}", ctracer.stderr);
    Ok(())
}
