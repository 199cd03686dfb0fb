//! Disks to test on, and what the kernel says of them.

use crate::prelude::*;

/// A virtio disk by its serial number: `cargo vm` gives each one.
fn by_serial(wanted: impl Fn(&str) -> bool) -> Result<String> {
    let disks = fs::read_dir("/sys/block")?.flatten();
    let mut names = disks.map(|disk| disk.file_name().to_string_lossy().into_owned());
    let found = names.find(|name| {
        let serial = fs::read_to_string(format!("/sys/block/{name}/serial")).unwrap_or_default();
        name.starts_with("vd") && wanted(serial.trim())
    });
    found.context("no such virtio disk: was the guest started with --disk virtio?")
}

/// The disk with the ext4 file system, `vda`.
pub fn data() -> Result<String> {
    by_serial(|serial| serial == "bpfvm-data")
}

/// A virtio disk to play with.
pub fn virtio() -> Result<String> {
    by_serial(|serial| serial != "bpfvm-data")
}

pub fn nvme() -> Result<String> {
    named("nvme0n1", "nvme")
}

pub fn scsi() -> Result<String> {
    named("sda", "scsi")
}

fn named(disk: &str, kind: &str) -> Result<String> {
    let exists = Path::new("/sys/block").join(disk).exists();
    ensure!(exists, "no {disk}: was the guest started with --disk {kind}?");
    Ok(disk.to_owned())
}

/// The command that reads 4 KiB so many times from a device, by its name or path, one after the other.
pub fn reads(device: &(impl AsRef<Path> + ?Sized), count: u32) -> String {
    let path = Path::new("/dev").join(device);
    format!("dd if={} of=/dev/null bs=4k count={count} iflag=direct status=none", path.display())
}

/// Runs it.
pub fn read(device: &(impl AsRef<Path> + ?Sized), count: u32) -> Result<()> {
    shell(&reads(device, count)).map(drop)
}

/// The first partition of a disk: `vda1`, `nvme0n1p1`.
pub fn partition(disk: &str) -> String {
    let p = if disk.ends_with(|c: char| c.is_ascii_digit()) { "p" } else { "" };
    format!("{disk}{p}1")
}

/// Makes one partition of a disk, of 32 MiB from sector 4096 on; its name.
pub fn partitioned(disk: &str) -> Result<String> {
    shell(&format!(
        "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
    ))?;
    Ok(partition(disk))
}

/// A file system in a directory, as long as it is needed.
pub struct Mounted {
    pub disk: String,
    pub path: String,
}

impl Mounted {
    /// That of the data disk, ext4, in /mnt/data.
    pub fn new() -> Result<Mounted> {
        // Else ext4 reads its block bitmaps at some instant of the first 5 s.
        let path = "/mnt/data".to_owned();
        Mounted { disk: data()?, path }.mount("ext4", "no_prefetch_block_bitmaps")
    }

    /// A new one of this kind on a disk, in `/run/KIND`. Options of mkfs may follow the kind.
    pub fn made(kind: &str, disk: &str, options: &str) -> Result<Mounted> {
        let (kind, mkfs) = kind.split_once(' ').unwrap_or((kind, ""));
        let force = if kind == "btrfs" { "--force" } else { "-F" };
        shell(&format!("modprobe {kind}; mkfs.{kind} -q {force} {mkfs} /dev/{disk}"))
            .with_context(|| format!("no {kind}: is the package with mkfs.{kind} installed?"))?;
        Mounted { disk: disk.to_owned(), path: format!("/run/{kind}") }.mount(kind, options)
    }

    fn mount(self, kind: &str, options: &str) -> Result<Mounted> {
        let Mounted { disk, path } = &self;
        shell(&format!("mkdir -p {path}; mount -t {kind} -o {options} /dev/{disk} {path}"))?;
        Ok(self)
    }

    /// Before the end, to see what that writes.
    pub fn unmount(&self) -> Result<()> {
        shell(&format!("umount {}", self.path)).map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What still runs there, after a failure, must not keep the tests after it from the disk.
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            fs::remove_dir_all(entry.path()).or_else(|_| fs::remove_file(entry.path())).ok();
        }
        self.unmount().or_else(|_| shell(&format!("umount -l {}", self.path)).map(drop)).ok();
    }
}

/// The kernel's counters of a disk so far (Documentation/block/stat.rst): read I/Os, read merges,
/// sectors, ms, write I/Os, write merges, …, discards from the 12th on, flushes from the 16th on.
pub fn stat(disk: &str) -> Result<Vec<u64>> {
    let text = fs::read_to_string(format!("/sys/block/{disk}/stat"))?;
    let fields: Vec<u64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    ensure!(fields.len() >= 17, "odd: {text}");
    Ok(fields)
}

/// Completed requests of a disk so far, without flushes.
pub fn requests(disk: &str) -> Result<u64> {
    stat(disk).map(|stat| stat[0] + stat[4] + stat[11])
}

/// Completed flushes of a disk so far: those that the disk was given.
pub fn flushes(disk: &str) -> Result<u64> {
    stat(disk).map(|stat| stat[15])
}

/// Completed requests and merged bios: every bio that was not split is one of either.
pub fn bios(disk: &str) -> Result<u64> {
    stat(disk).map(|stat| stat[0] + stat[1] + stat[4] + stat[5])
}

/// Requests that the disk has been given, and that have not completed.
pub fn in_flight(disk: &str) -> Result<u64> {
    let reads_and_writes = fs::read_to_string(format!("/sys/block/{disk}/inflight"))?;
    reads_and_writes.split_whitespace().map(|n| Ok(n.parse::<u64>()?)).sum()
}

/// Requests that any disk has been given, and that have not completed.
pub fn all_in_flight() -> Result<u64> {
    let disks = fs::read_dir("/sys/block")?.flatten();
    disks.map(|disk| in_flight(&disk.file_name().to_string_lossy())).sum()
}

/// A null_blk disk with one hardware queue per CPU, gone when dropped.
pub struct NullBlk {
    /// `nullb0`.
    pub name: String,
    /// In configfs.
    directory: String,
}

impl NullBlk {
    /// One whose timer ends each I/O after this time in ms, on the CPU that has submitted it.
    pub fn timer(directory: &str, ms: u64, more: &str) -> Result<NullBlk> {
        let timer = format!("irqmode=2 completion_nsec={} submit_queues=2", ms * 1_000_000);
        NullBlk::new(directory, &format!("{timer} {more}"))
    }

    /// A disk for one I/O at a time, whose timer ends each I/O after this time in ms.
    pub fn one_tag(directory: &str, ms: u64) -> Result<NullBlk> {
        NullBlk::timer(directory, ms, "hw_queue_depth=1 submit_queues=1")
    }

    /// Gives it a scheduler, in which what finds no tag waits as a request.
    pub fn queues(&self) -> Result<()> {
        shell("modprobe -q mq-deadline")?;
        fs::write(self.queue("scheduler"), "mq-deadline")?;
        fs::write(self.queue("nr_requests"), "64").context("nr_requests")
    }

    /// A file of its queue, for a value: `/sys/block/nullb0/queue/iostats`.
    pub fn queue(&self, file: &str) -> String {
        format!("/sys/block/{}/queue/{file}", self.name)
    }

    /// The command that takes the disk away, as if somebody pulled it.
    pub fn pull(&self) -> String {
        format!("echo 0 >{}/power", self.directory)
    }

    /// One whose timer ends an I/O 100 ms later: then the task that has submitted it sleeps, and the end
    /// interrupts no call of the submission, whose probes would miss it.
    pub fn slow() -> Result<NullBlk> {
        NullBlk::timer("test", 100, "submit_queues=1 memory_backed=1 size=64")
    }

    /// Each has its own `directory` in configfs; `settings` as in Documentation/block/null_blk.rst.
    pub fn new(directory: &str, settings: &str) -> Result<NullBlk> {
        let path = format!("/sys/kernel/config/nullb/{directory}");
        // Of a judge that was killed, in a guest that stays.
        fs::remove_dir(&path).ok();
        fs::create_dir(&path).context("null_blk's configfs")?;
        let mut disk = NullBlk { name: String::new(), directory: path };
        let path = &disk.directory;
        for setting in format!("size=1024 {settings} power=1").split_whitespace() {
            let (name, value) = setting.split_once('=').context("name=value")?;
            fs::write(format!("{path}/{name}"), value).with_context(|| setting.to_owned())?;
        }
        // Later kernels name the disk as the directory; before, it was nullb and a number.
        let index = fs::read_to_string(format!("{path}/index"))?;
        let named = [format!("nullb{}", index.trim()), directory.into()];
        let name = named.into_iter().find(|name| Path::new("/sys/block").join(name).exists());
        disk.name = name.context("null_blk made no disk")?;
        // Every bio is a request: counts of either can be compared.
        fs::write(format!("/sys/block/{}/queue/nomerges", disk.name), "2").context("nomerges")?;
        Ok(disk)
    }
}

impl Drop for NullBlk {
    fn drop(&mut self) {
        fs::remove_dir(&self.directory).ok();
    }
}

impl AsRef<str> for NullBlk {
    fn as_ref(&self) -> &str {
        &self.name
    }
}

/// A loop device on a file of holes, gone when dropped.
pub struct Loop {
    /// `loop0`.
    pub name: String,
    file: String,
}

impl Loop {
    /// Of so many bytes.
    pub fn new(name: &str, bytes: u64) -> Result<Loop> {
        let file = format!("/run/{name}");
        let path = shell(&format!(
            "modprobe loop; truncate -s {bytes} {file}; losetup --show --find {file}"
        ))?;
        Ok(Loop { name: path.trim().trim_start_matches("/dev/").to_owned(), file })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        shell(&format!("losetup --detach /dev/{}; rm {}", self.name, self.file)).ok();
    }
}

/// A disk of scsi_debug, gone when dropped.
pub struct ScsiDebug {
    /// `sdb`.
    pub name: String,
}

impl ScsiDebug {
    /// `parameters` of the module.
    pub fn new(parameters: &str) -> Result<ScsiDebug> {
        // Debian's kernels for arm64 do without.
        if shell("modprobe --dry-run --quiet scsi_debug").is_err() {
            return not_judged("this kernel has no module scsi_debug");
        }
        ensure!(!ScsiDebug::is_loaded(), "scsi_debug is loaded, with other parameters");
        shell(&format!("modprobe scsi_debug {parameters}"))?;
        let mut disk = ScsiDebug { name: String::new() };
        let find = "grep -l scsi_debug /sys/block/sd*/device/model | cut -d/ -f4";
        wait_until("scsi_debug's disk", || {
            disk.name = shell(find).unwrap_or_default().trim().to_owned();
            Ok(!disk.name.is_empty() && Path::new("/dev").join(&disk.name).exists())
        })?;
        Ok(disk)
    }

    fn is_loaded() -> bool {
        Path::new("/sys/module/scsi_debug").exists()
    }
}

impl Drop for ScsiDebug {
    fn drop(&mut self) {
        // A disk that is still looked at keeps the module.
        let gone = || Ok(shell("rmmod scsi_debug").is_ok() || !ScsiDebug::is_loaded());
        wait_until("the end of scsi_debug", gone).ok();
    }
}

/// A device mapper table, gone when dropped.
pub struct Mapped {
    name: String,
}

impl Mapped {
    /// `table`: as `dmsetup create` reads it, `;` between its lines.
    pub fn new(name: &str, table: &str) -> Result<Mapped> {
        let table = table.replace(';', "\n");
        let read_only = if table.contains(" verity ") { "--readonly" } else { "" };
        shell(&format!(
            "DM_DISABLE_UDEV=1 dmsetup create {read_only} {name} <<'END'\n{table}\nEND\n"
        ))?;
        Ok(Mapped { name: name.into() })
    }

    /// One of dm-multipath without a path, which has room for one request, and lets it wait until it [fails].
    ///
    /// [fails]: Failing
    pub fn hung(name: &str) -> Result<Mapped> {
        shell("modprobe dm_multipath")?;
        let _one = Setting::new("/sys/module/dm_mod/parameters/dm_mq_queue_depth", "1")?;
        Mapped::new(name, "0 131072 multipath 1 queue_if_no_path 0 0 0")
    }

    /// Tells the target that.
    pub fn message(&self, what: &str) -> Result<()> {
        shell(&format!("dmsetup message {} 0 {what}", self.name)).map(drop)
    }

    /// `/dev/mapper/NAME`.
    pub fn path(&self) -> String {
        format!("/dev/mapper/{}", self.name)
    }

    /// Lets I/O wait, or continue.
    pub fn suspend(&self, on: bool) -> Result<()> {
        let verb = if on { "suspend --noflush --nolockfs" } else { "resume" };
        shell(&format!("DM_DISABLE_UDEV=1 dmsetup {verb} {}", self.name)).map(|_| ())
    }

    /// `dm-0`.
    pub fn disk(&self) -> Result<String> {
        let name = shell(&format!("dmsetup info -c --noheadings -o blkdevname {}", self.name))?;
        Ok(name.trim().to_owned())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Nobody must wait for ever for one that a failed test has suspended.
        let end =
            "export DM_DISABLE_UDEV=1; dmsetup resume NAME || true; dmsetup remove --retry NAME";
        shell(&end.replace("NAME", &self.name)).ok();
    }
}

/// When dropped, all that waits in a disk that [hangs](Mapped::hung) fails, and whoever waits for that ends.
pub struct Failing<'a>(pub &'a Mapped);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        self.0.message("fail_if_no_path").ok();
    }
}

/// `major:minor` of a device in /dev.
pub fn numbers(device: &str) -> Result<String> {
    let device = fs::metadata(format!("/dev/{device}")).context(device.to_owned())?.rdev();
    Ok(format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)))
}
