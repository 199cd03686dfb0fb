//! What docs/slow-disk.md says of waits that are no slow I/O.

use crate::prelude::*;

tests![slow_disk_a_chain_of_quick_ios, slow_disk_waits_without_an_io];

/// Calls of fsync, and what each I/O takes: of 40 ms each.
const IO: Duration = Duration::from_millis(40);

/// An fsync is several I/Os, one after the other: it takes a multiple of one, and none is slow.
fn slow_disk_a_chain_of_quick_ios() -> Result<()> {
    let settings = "memory_backed=1 size=64 cache_size=8 hw_queue_depth=64 submit_queues=1";
    let disk = NullBlk::timer("chain", IO.as_millis() as u64, settings)?;
    let mounted = Mounted::made("ext4 -E lazy_itable_init=0", &disk.name, "noatime")?;
    let mut log = fs::File::create(format!("{}/log", mounted.path))?;
    log.sync_all()?;
    shell("sync")?;
    let mut calls = Vec::new();
    let options = ["--json", "--min", "100ms", "--disk", &disk.name];
    let (_, output) = beside("slow_io", &options, || {
        for _ in 0..9 {
            let began = Instant::now();
            log.write_all(&[1; 4096])?;
            log.sync_all()?;
            calls.push(began.elapsed());
        }
        Ok(())
    })?;
    calls.sort();
    let (fsync, table) = (calls[calls.len() / 2], &objects(&output, "disk")?[0]);
    let median = Duration::from_nanos(table["total"]["p50_ns"].as_u64().context("no p50")?);
    ensure!(fsync >= 4 * IO && calls[0] >= 2 * IO, "not a chain: {calls:?}");
    ensure!(fsync >= 2 * median && median >= IO, "an I/O takes {median:?}, fsync {fsync:?}");
    let (slow, all) = (objects(&output, "bio")?.len(), table["bios"].as_u64().unwrap_or(0));
    ensure!(all >= 27 && (slow as u64) < all / 4, "{slow} of {all} are slow: {output}");
    Ok(())
}

/// The stacks of a writer that waits for others' writes, and of one whose file system is frozen, are those of the page.
/// Neither has an I/O that waits.
fn slow_disk_waits_without_an_io() -> Result<()> {
    let page = fs::read_to_string(workspace().join("docs/slow-disk.md"))?;
    let waits_in = |writer: &Running, function: &str| {
        ensure!(page.contains(&format!("`{function}`")), "the page does not name {function}");
        writer.waits_in(function)
    };
    let settings = "memory_backed=1 size=64 hw_queue_depth=1 submit_queues=1";
    let disk = NullBlk::timer("dirty", 20, settings)?;
    let mounted = Mounted::made("ext4 -E lazy_itable_init=0", &disk.name, "noatime")?;
    fs::write(disk.queue("max_sectors_kb"), "16")?;
    // Bytes are 0 again where the ratio is set.
    let _ratio = ["/proc/sys/vm/dirty_ratio", "/proc/sys/vm/dirty_background_ratio"]
        .map(|ratio| Setting::new(ratio, fs::read_to_string(ratio).unwrap_or_default().trim()));
    fs::write("/proc/sys/vm/dirty_background_bytes", "2000000")?;
    fs::write("/proc/sys/vm/dirty_bytes", "4000000")?;
    let write = |count| {
        let file = format!("{}/file", mounted.path);
        Running::bash(&format!(
            "exec dd if=/dev/zero of={file} bs=64k count={count} conv=notrunc status=none"
        ))
    };
    let running = Running::stage("slow_io", &["--json", "--min", "0", "--disk", &disk.name])?;
    let writer = write(160)?;
    waits_in(&writer, "balance_dirty_pages")?;
    writer.end_well()?;
    let output = running.interrupt()?;
    let lines = objects(&output, "bio")?;
    let written = |process: &str| -> u64 {
        let is_its = |line: &&Value| {
            let name = line["process"].as_str().unwrap_or_default();
            name.starts_with(process) && line["operation"] == "W"
        };
        lines.iter().filter(is_its).filter_map(|line| line["bytes"].as_u64()).sum()
    };
    let [own, others] = ["dd", "kworker"].map(written);
    ensure!(others > 4_000_000 && own < others / 4, "{own} bytes of dd's own, {others}: {lines:?}");

    shell("sync")?;
    let running = Running::stage("slow_io", &["--json", "--min", "100ms", "--disk", &disk.name])?;
    shell(&format!("fsfreeze -f {}", mounted.path))?;
    let writer = write(1)?;
    let waits = waits_in(&writer, "percpu_rwsem_wait");
    let output = running.interrupt();
    shell(&format!("fsfreeze -u {}", mounted.path))?;
    waits?;
    writer.end_well()?;
    ensure!(objects(&output?, "waiting")?.is_empty(), "a frozen writer has no I/O");
    Ok(())
}
