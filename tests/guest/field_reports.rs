//! What people who trace disks report: a slow part of several, a number that another disk gets, attempts that are
//! refused, two ends at one instant, names that nobody expects.

use io_uring::{IoUring, opcode, squeue, types};

use crate::{
    prelude::*,
    slow_io::{traced, traced_but_skipped},
};

tests![
    slow_io_explains_by_the_last_way,
    slow_io_and_exporter_see_ends_at_one_instant,
    slow_io_and_exporter_count_refusals_apart,
    slow_io_and_exporter_know_disks_by_their_diskseq,
    slow_io_and_exporter_write_hostile_names,
    slow_io_follows_md,
    slow_io_knows_whose_checksums_they_are,
    stage01_prints_a_hostile_threads_events,
    incident_of_the_day_is_solved,
];

/// Some writes of device mapper's own making, and what has to be true of each one's parts.
fn slow_io_explains_by_the_last_way() -> Result<()> {
    // Far above the 50 ms of dm-delay, whose worker may be late on a busy machine.
    const LATE: u64 = 400_000_000;
    const SLOW: u64 = 100_000_000;
    shell(
        "modprobe -a dm_delay dm_snapshot dm_thin_pool dm_raid raid1 dm_mirror dm_integrity dm_verity",
    )?;
    let late = NullBlk::timer("late", LATE / 1_000_000, "memory_backed=1")?;
    let quick = |name| NullBlk::new(name, "memory_backed=1");
    let (one, two, three) = (quick("one")?, quick("two")?, quick("three")?);
    let (late, one, two, three) = (&late.name, &one.name, &two.name, &three.name);
    // One part at a disk that takes 400 ms, and one that a target holds for 50 ms.
    let parts =
        Mapped::new("parts", &format!("0 8 linear /dev/{late} 0;8 8 delay /dev/{one} 8 50"))?;
    // md, below device mapper.
    let raid =
        Mapped::new("raid", &format!("0 8192 raid raid1 2 0 nosync 2 - /dev/{two} - /dev/{late}"))?;
    // One part whose request is known, and one whose bios for the disks lead to no other one.
    let table = format!("0 8192 mirror core 2 64 nosync 2 /dev/{two} 0 /dev/{late} 0");
    let mirror = Mapped::new("mirror", &table)?;
    let half =
        Mapped::new("half", &format!("0 8 linear /dev/{one} 0;8 8 linear {} 8", mirror.path()))?;
    // A snapshot's origin copies to a slow disk before it writes. A thin pool submits what it allocates itself.
    let slow = Mapped::new("slow", &format!("0 65536 delay /dev/{one} 65536 100"))?;
    let origin = Mapped::new("origin", &format!("0 65536 snapshot-origin /dev/{two}"))?;
    let snapshot = format!("0 65536 snapshot /dev/{two} {} P 8", slow.path());
    let _snapshot = Mapped::new("snapshot", &snapshot)?;
    let pool = Mapped::new("pool", &format!("0 65536 thin-pool /dev/{one} /dev/{three} 128 0"))?;
    shell(&format!("dmsetup message {} 0 'create_thin 0'", pool.path()))?;
    let thin = Mapped::new("thin", &format!("0 65536 thin {} 0", pool.path()))?;
    // Of the next two, clones end in functions of their own. The first one formats an empty disk.
    let checked = NullBlk::timer("checked", 20, "memory_backed=1")?;
    let table = format!("0 8192 integrity /dev/{} 0 - D 1 internal_hash:crc32c", checked.name);
    let integrity = Mapped::new("integrity", &table)?;
    // One block, of zeros: its hash is the root's.
    let zeros = NullBlk::timer("zeros", 20, "memory_backed=1")?;
    let hash = shell("head -c 4096 /dev/zero | sha256sum | cut -d ' ' -f 1")?;
    let table = format!("/dev/{0} /dev/{0} 4096 4096 1 1 sha256 {1} -", zeros.name, hash.trim());
    let verity = Mapped::new("verity", &format!("0 8 verity 1 {table}"))?;

    let write = |mapped: &Mapped, bs: &str, count: u32| {
        let dd = format!("dd if=/dev/zero of={} bs={bs} count={count}", mapped.path());
        shell(&format!("{dd} oflag=direct status=none"))
    };
    let (output, lines) = traced(&[], || {
        for mapped in [&parts, &parts, &half, &half, &raid] {
            write(mapped, "8k", 1)?;
        }
        write(&origin, "4k", 2)?;
        write(&thin, "64k", 2)?;
        write(&integrity, "4k", 2)?;
        disks::read(&verity.path(), 1)
    })?;
    let of = |mapped: &Mapped, bytes: u64| -> Result<Vec<Value>> {
        let mut lines = of_disk(&lines, &mapped.disk()?);
        lines.retain(|line| line["bytes"] == bytes && line["process"] == "dd");
        ensure!(!lines.is_empty(), "no write of {bytes} bytes: {output}");
        Ok(lines)
    };
    for line in [of(&parts, 8192)?, of(&raid, 8192)?].concat() {
        ensure!(part(&line, "device") >= LATE, "the disk had it for 400 ms: {line}");
    }
    for line in of(&half, 8192)? {
        let slow = part(&line, "total") >= LATE;
        ensure!(slow && line["device_ns"].is_null() && line["mapper_ns"].is_null(), "{line}");
    }
    for line in of(&origin, 4096)? {
        let told = part(&line, "mapper") >= SLOW && line["wait_ns"].is_null();
        ensure!(told && line["device_ns"].is_u64(), "the copy of a snapshot's origin: {line}");
    }
    for line in of(&thin, 65536)? {
        ensure!(line["device_ns"].is_u64(), "a whole block of a thin pool: {line}");
    }
    for line in [of(&integrity, 4096)?, of(&verity, 4096)?].concat() {
        ensure!(part(&line, "device") >= SLOW / 5, "the disk had it for 20 ms: {line}");
    }
    Ok(())
}

/// Makes an array of md's, by its files in /sys.
pub fn md(level: &str, layout: &str, disks: &[&str]) -> Result<String> {
    // Newer kernels may keep one that was cleared.
    let is_free = |name: &String| !Path::new("/sys/block").join(name).exists();
    let names =
        (0..100).map(|n| if n == 0 { format!("md_{level}") } else { format!("md_{level}_{n}") });
    let array = names.into_iter().find(is_free).context("no name for an array is free")?;
    fs::write("/sys/module/md_mod/parameters/new_array", &array)?;
    let add = |(slot, disk)| {
        format!("cat /sys/block/{disk}/dev >new_dev; echo {slot} >dev-{disk}/slot; ")
    };
    let members: String = disks.iter().enumerate().map(add).collect();
    shell(&format!(
        "cd /sys/block/{array}/md; echo {level} >level; echo {} >raid_disks; echo 8192 >component_size; \
         {layout} {members} echo none >resync_start; echo active >array_state",
        disks.len()
    ))?;
    Ok(array)
}

/// The slow disk of an array explains the bio: of a RAID 1, one below dm-delay; of a RAID 10, one that is slow itself;
/// of a RAID 5, that of a chunk that is read. What it writes in stripes is not explained at all.
fn slow_io_follows_md() -> Result<()> {
    const SLOW: u64 = 150_000_000;
    shell("modprobe -a dm_delay md_mod raid1 raid10 raid456")?;
    let quick = |name| NullBlk::new(name, "memory_backed=1");
    let slow = |name| NullBlk::timer(name, SLOW / 1_000_000, "memory_backed=1");
    let [a, b, c, d, e] = [quick("a")?, quick("b")?, quick("c")?, quick("d")?, quick("e")?];
    let [f, g] = [slow("f")?, slow("g")?];
    let delay = Mapped::new("delay", &format!("0 65536 delay /dev/{} 0 150", b.name))?;
    let chunks = |layout| format!("echo 65536 >chunk_size; echo {layout} >layout;");
    let raid1 = md("raid1", "", &[&a.name, &delay.disk()?])?;
    let raid10 = md("raid10", &chunks(258), &[&c.name, &f.name])?;
    let raid5 = md("raid5", &chunks(2), &[&d.name, &e.name, &g.name])?;
    let traced = traced(&[], || {
        shell(&format!(
            "cd /dev; for md in {raid1} {raid10} {raid5}; do \
             dd if=zero of=$md bs=4k count=3 oflag=direct status=none; done; \
             dd if={raid5} of=null bs=64k count=4 iflag=direct status=none"
        ))
    });
    shell("for md in /sys/block/md_raid*/md; do echo clear >$md/array_state; done")?;
    let (_, lines) = traced?;
    let of = |array: &str, operation: &str, bytes: u64, count: usize| -> Result<Vec<Value>> {
        let mut lines = of_disk(&lines, array);
        lines.retain(|line| line["operation"] == operation && line["bytes"] == bytes);
        ensure!(lines.len() == count, "not {count} {operation} of {array}: {lines:?}");
        Ok(lines)
    };
    for (array, name) in [(&raid1, "mapper"), (&raid10, "device")] {
        for line in of(array, "WS", 4096, 3)? {
            // md submits what is written later than it says; device mapper does not.
            let waited = line["wait_ns"].is_u64() == (name == "mapper");
            ensure!(part(&line, name) >= SLOW && waited, "a disk was slow, {name}: {line}");
        }
    }
    let reads = of(&raid5, "RS", 65536, 4)?;
    let is_known = reads.iter().all(|line| line["wait_ns"].is_u64());
    let slow = reads.iter().filter(|line| part(line, "device") >= SLOW).count();
    ensure!(is_known && slow == 1, "one of four chunks is on the slow disk: {reads:?}");
    let stripes = of(&raid5, "WS", 4096, 3)?;
    let is_known = stripes.iter().any(|line| !line["device_ns"].is_null());
    ensure!(!is_known, "stripes: {stripes:?}");
    Ok(())
}

/// Of two parts that are left of a bio, the first one waits for the other, if that ends on the other CPU: at the
/// same function as our programs, after they have run. A stack takes as long as nothing else that a loop may do.
const MEET: &str = r#"
kfunc:bio_endio {
    $bio = (struct bio *)args->bio;
    if ((uint64)$bio->bi_end_io == kaddr("bio_chain_endio")) { $bio = (struct bio *)$bio->bi_private; }
    if ($bio->__bi_remaining.counter == 2) {
        $is_first = @ends[$bio] == 0;
        @ends[$bio] += 1;
        $i = 0;
        while ($i < 200 && @ends[$bio] < 2) { @stacks[kstack(78)] = count(); $i++; }
        if ($is_first) { delete(@ends[$bio]); }
    }
}
interval:ms:500 { printf("ready\n"); }"#;

/// Two parts of a bio that complete at one instant on two CPUs, which [`MEET`] makes longer. Few tags let the parts
/// wait, and wake on any CPU.
fn slow_io_and_exporter_see_ends_at_one_instant() -> Result<()> {
    needs("bpftrace")?;
    let disk =
        NullBlk::new("test", "irqmode=2 completion_nsec=200000 hw_queue_depth=2 submit_queues=1")?;
    let mut slower = Running::bash(&format!("exec bpftrace -B line -e '{MEET}' >&2"))?;
    slower.wait_for("ready")?;
    let running = Running::stage("slow_io", &["--min", "1h", "-v"])?;
    let server = exporter::start(&["--bios"])?;
    let options = "--bs=256k --ioengine=psync --numjobs=4 --number_ios=100 --size=512M";
    // Stage 10 leaves such bios out, 12 to 43 in a round: until it has lost some, nothing is judged.
    let mut lost = 0;
    for _ in 0..6 {
        let (_, lesson) = beside("stage10", &[], || fio_direct(&disk.name, options))?;
        lost += count(&lesson, "in flight")? + count(&lesson, "dropped")?;
        if lost > 8 {
            break;
        }
    }
    let scrape = Scrape::now()?;
    let output = running.interrupt()?;
    server.interrupt()?;
    slower.interrupt()?;
    if lost <= 8 {
        judged_weakly(&format!("stage 10 lost no more than {lost} bios"));
    }
    let completed = count(&output, "I/Os completed")?;
    for none in ["in flight", "dropped", "unmatched"] {
        ensure!(count(&output, none)? == 0, "{none}: {output}");
    }
    let bios = scrape.bios(&disk.name, "read");
    ensure!(bios >= 200 && completed >= bios, "{bios} bios at the exporter: {output}");
    scrape.is_complete()
}

/// io_uring first asks without waiting. A disk of few tags refuses that, and it asks again: one read.
fn slow_io_and_exporter_count_refusals_apart() -> Result<()> {
    const READS: u64 = 150;
    let disk = NullBlk::timer("test", 10, "hw_queue_depth=4 submit_queues=1")?;
    fs::write(disk.queue("scheduler"), "none")?;
    let server = exporter::start(&["--bios"])?;
    let options = format!("--ioengine=io_uring --iodepth=32 --number_ios={READS} --size=64M");
    let load = || fio_direct(&disk.name, &options);
    let (output, lines, unseen) = traced_but_skipped(&["--disk", &disk.name], load)?;
    let scrape = Scrape::now()?;
    server.interrupt()?;
    // Where a task completes a refusal, an interrupt may complete another bio in the middle of the fentry program.
    // Only kernels that preempt have a second program, which sees that.
    let is_whole = unseen == 0 || preempts()?;
    if !is_whole {
        judged_weakly(&format!("{unseen} completions were skipped, and are counted as such"));
    }
    let refused = objects(&output, "counters")?[0]["refused"].as_u64().unwrap_or(0);
    let quickest = lines.iter().map(|line| part(line, "total")).min();
    ensure!(refused > 0, "no read was refused, the test does not test: {output}");
    // The exporter's program is another one, and skipped at other times.
    let skipped = match preempts()? {
        true => 0,
        false => scrape.skipped("") as u64,
    };
    // A start that is left may take the next one at its address with it.
    let is_near = |bios, unseen| (READS.saturating_sub(2 * unseen)..=READS).contains(&bios);
    let slow_ios = lines.len() as u64;
    ensure!(is_near(slow_ios, if is_whole { 0 } else { unseen }), "{slow_ios} of {READS} lines");
    ensure!(quickest >= Some(10_000_000), "no read takes less than the timer: {quickest:?} ns");
    let bios = scrape.bios(&disk.name, "read");
    ensure!(is_near(bios, skipped), "exporter: {bios} of {READS} reads, skipped {skipped}");
    let theirs = scrape.get("storage_bios_not_measured_total{reason=\"refused\"}") as u64;
    let apart = if is_whole { skipped } else { skipped + unseen };
    ensure!(theirs.abs_diff(refused) <= apart, "refused: exporter {theirs}, slow_io {refused}");
    Ok(())
}

/// A disk goes, and another one gets its number; a partition goes, and one of another disk gets its number. Disks
/// that come while slow_io runs have sums of their own, however many.
fn slow_io_and_exporter_know_disks_by_their_diskseq() -> Result<()> {
    let server = exporter::start(&["--bios"])?;
    let running = Running::stage("slow_io", &["--json", "--min", "0"])?;
    let named = |n: u32| NullBlk::new(&format!("many{n}"), "size=16");
    let many = (0..24).map(named).collect::<Result<Vec<_>>>()?;
    let settings = "memory_backed=1 size=64";
    let is_served = |disk: &str| -> Result<()> {
        let (served, did) = (Scrape::now()?.bios(disk, "read"), disks::stat(disk)?[0]);
        ensure!(served == did, "{disk}: {served} reads are served, it did {did}");
        Ok(())
    };
    let first = NullBlk::new("first", settings)?;
    let number = disks::numbers(&first.name)?;
    disks::read(&first.name, 10)?;
    drop(first);
    let second = NullBlk::new("second", settings)?;
    ensure!(disks::numbers(&second.name)? == number, "another number: the test does not test");
    disks::read(&second.name, 7)?;
    is_served(&second.name)?;

    let other = NullBlk::new("other", settings)?;
    let [gone, new] = [&second, &other].map(|disk| disks::partition(&disk.name));
    let mut numbers = Vec::new();
    for (disk, partition, count) in [(&second, &gone, 20), (&other, &new, 5)] {
        shell(&format!("addpart /dev/{} 1 2048 65536", disk.name))?;
        numbers.push(disks::numbers(partition)?);
        disks::read(partition, count)?;
        is_served(&disk.name)?;
        shell(&format!("delpart /dev/{} 1", disk.name))?;
        is_served(&disk.name)?;
    }
    ensure!(numbers[0] == numbers[1], "{numbers:?}: the test does not test");
    is_served(&second.name)?;
    many.iter().zip(1..).try_for_each(|(disk, count)| disks::read(&disk.name, count))?;
    server.interrupt()?;
    let output = running.interrupt()?;
    let (mut lines, tables) = (objects(&output, "bio")?, objects(&output, "disk")?);
    lines.retain(|line| line["process"] == "dd");
    let [of_gone, of_new] = [&gone, &new].map(|disk| of_disk(&lines, disk).len());
    ensure!((of_gone, of_new) == (20, 5), "{gone} {of_gone}, {new} {of_new}: {output}");
    for (disk, count) in many.iter().zip(1_u64..) {
        let tables = of_disk(&tables, &disk.name);
        let bios: u64 = tables.iter().filter_map(|table| table["bios"].as_u64()).sum();
        ensure!((count..count + 5).contains(&bios), "{}: {bios} of {count}: {tables:?}", disk.name);
    }
    Ok(())
}

/// The name of a disk may hold what ends a label, or moves a terminal's cursor.
fn slow_io_and_exporter_write_hostile_names() -> Result<()> {
    let names = ["q\"uote", "back\\slash", "new\nline", "\x1b[31mred"];
    let server = exporter::start(&["--bios"])?;
    let running = Running::stage("slow_io", &["--min", "0"])?;
    let disks: Vec<NullBlk> =
        names.iter().map(|name| NullBlk::new(name, "")).collect::<Result<_>>()?;
    if disks.iter().zip(names).any(|(disk, name)| disk.name != name) {
        judged_weakly("null_blk names its disks itself here");
    }
    for disk in &disks {
        let dev = fs::read_to_string(format!("/sys/block/{}/dev", disk.name))?;
        let node = format!("mknod /run/node b {}", dev.trim().replace(':', " "));
        shell(&format!("{node}; {}; rm /run/node", reads("/run/node", 3)))?;
    }
    let scrape = Scrape::now()?;
    for disk in &disks {
        let name = &disk.name;
        let label = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        ensure!(scrape.bios(&label, "read") >= 3, "{name:?} as {label}: {:?}", scrape.0.keys());
    }
    server.interrupt()?;
    let output = running.interrupt()?;
    let odd = output.chars().find(|c| c.is_control() && *c != '\n');
    ensure!(odd.is_none(), "{odd:?} in {output:?}");
    let lines = output.lines().filter(|line| line.ends_with(" dd")).count();
    ensure!(lines == 3 * names.len(), "{lines} lines: {output}");
    Ok(())
}

/// Reads that carry checksums of their own (before 6.13, io_uring takes none): the block layer verifies none of
/// these, and bio_endio() comes once. Beside them, some whose checksums are the block layer's own: for these it comes twice.
fn slow_io_knows_whose_checksums_they_are() -> Result<()> {
    const READS: u64 = 20;
    let disk = ScsiDebug::new("dix=1 dif=1 dev_size_mb=16 delay=0")?;
    let path = format!("/dev/{}", disk.name);
    shell(&format!("dd if=/dev/zero of={path} bs=1M count=4 oflag=direct status=none"))?;
    let mut with_own = 0;
    let (_, lines) = traced(&["--disk", &disk.name], || {
        disks::read(&path, READS as u32)?;
        with_own = reads_with_own_checksums(&path, READS)?;
        Ok(())
    })?;
    let lines = lines.len() as u64;
    ensure!(with_own == READS && lines == 2 * READS, "{with_own} reads of {READS}, {lines} lines");
    Ok(())
}

/// How many of so many reads of 4 KiB the kernel took and completed.
fn reads_with_own_checksums(path: &str, count: u64) -> Result<u64> {
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    let (mut data, mut sums) = (Page([0; 4096]), Page([0; 4096]));
    // struct io_uring_attr_pi of <linux/io_uring.h>: flags, app_tag and length; address; seed; reserved.
    let attribute = [64_u64 << 32, sums.0.as_mut_ptr() as u64, 0, 0];
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut ring = IoUring::new(8)?;
    let mut good = 0;
    for n in 0..count {
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), data.0.as_mut_ptr(), 4096);
        let read = read.offset(n * 4096).build();
        // SAFETY: an entry is the kernel's struct io_uring_sqe, 64 bytes; its last two words are attr_ptr and
        // attr_type_mask.
        let read: squeue::Entry = unsafe {
            let mut words: [u64; 8] = std::mem::transmute(read);
            words[6..].copy_from_slice(&[attribute.as_ptr() as u64, 1]);
            std::mem::transmute(words)
        };
        // SAFETY: data, sums and attribute live until the completion, which is waited for.
        unsafe { ring.submission().push(&read) }.context("the queue is full")?;
        ring.submit_and_wait(1)?;
        good += u64::from(ring.completion().next().is_some_and(|done| done.result() == 4096));
    }
    Ok(good)
}

/// A thread's name may hold a newline, and what moves a terminal's cursor: its events are a line each.
fn stage01_prints_a_hostile_threads_events() -> Result<()> {
    // ftrace knows the name of a thread that has slept.
    let disk = NullBlk::timer("test", 20, "")?;
    let running = Running::stage("stage01", &[])?;
    let read = reads(&disk.name, 5);
    // A thread has the name of the file that it executes.
    shell(&format!(
        "cd /run; for name in 'n\\nl' '\\033[31mred'; do \
           name=$(printf \"$name\"); cp /bin/dd \"$name\"; \"./$name\" {}; rm \"$name\"; done",
        read.trim_start_matches("dd ")
    ))?;
    let output = running.interrupt()?;
    let events = output.lines().filter(|line| line.contains("bpf_trace_printk: ")).count();
    let lines = output.lines().filter(|line| line.contains("submit_bio(bio=")).count();
    let printed = count(&output, "trace lines")?;
    ensure!(lines >= 10 && (events, printed) == (lines, lines as u64), "{lines} lines: {output}");
    for name in ["n?l-", "?[31mred-"] {
        let of_it = output.lines().filter(|line| line.trim_start().starts_with(name)).count();
        ensure!(of_it >= 4, "{of_it} of 5 lines of {name}: {output:?}");
    }
    let odd = output.chars().find(|c| c.is_control() && *c != '\n');
    ensure!(odd.is_none(), "{odd:?} in {output:?}");
    Ok(())
}

/// What `cargo lesson incident` makes is not there without its fault, and our tools find it: each day another fault.
fn incident_of_the_day_is_solved() -> Result<()> {
    // It makes its machine at least twice, where the fault does not show six times, and waits in each for services.
    const LIMIT: Duration = Duration::from_secs(500);
    let mut incidents = Command::new(run::built().join("incidents"));
    let proof =
        Running::spawn(incidents.args(["prove", "--number", &workshop::today().to_string()]))?;
    let ended = proof.end_within(LIMIT)?;
    ensure!(ended.code == Some(0), "{}{}", ended.stderr, ended.stdout);
    Ok(())
}
