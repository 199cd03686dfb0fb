//! Disks, services and what is wrong with them.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use incidents::plan::{Distractor, Fault, IncidentPlan, Service, Which};

use crate::{
    app::{ExtraLoad, FILES, Orders},
    machine::{ServiceStatus, is_verbose, shell, sysfs_name},
};

/// The programs beside the services.
const OTHERS: [&str; 5] = ["backupd", "reportd", "tidyd", "sensord", "indexd"];
/// Where their executables are.
const PROGRAMS: &str = "/usr/local/sbin";
/// In configfs: a directory makes a disk.
const NULL_BLK: &str = "/sys/kernel/config/nullb";
/// How long the services may take to start.
const START: Duration = Duration::from_secs(180);
/// How long the services run before it is looked whether they are slow.
pub const PERIOD: Duration = Duration::from_secs(10);

fn set(file: &str, value: impl ToString) -> Result<()> {
    let value = value.to_string();
    fs::write(file, &value).with_context(|| format!("cannot write {value} to {file}"))
}

/// The disks of an incident.
pub struct Scene {
    /// The disk below /dev/mapper/shop.
    below: String,
    /// By service: the block device of its file system.
    disks: [String; 3],
}

impl Scene {
    /// Makes what `plan` says, or the same without its fault, and starts the services.
    pub fn make(plan: &IncidentPlan, has_fault: bool) -> Result<Scene> {
        let fault = has_fault.then_some(plan.fault);
        shell("modprobe -a nvme null_blk dm_mod ext4 mq-deadline && modprobe configfs")?;
        shell("mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config")?;
        shell("echo '+io +memory +cpu' > /sys/fs/cgroup/cgroup.subtree_control")?;
        let below = shell(
            "for disk in /sys/block/vd*; do
                grep -q bpfvm-data $disk/serial || basename $disk; done | head -1",
        )?;
        // With quick disks first, of which null_blk's keep their data: a slow one would take minutes.
        let quick = null_blk("mail", plan, None)?;
        let disks = ["mapper/shop".into(), "nvme0n1".into(), quick];
        let mut scene = Scene { disks, below };
        let layout = fault.filter(|fault| *fault == Fault::SlowLeg);
        scene.map(plan, layout, None)?;
        for (service, disk) in Service::ALL.into_iter().zip(&scene.disks) {
            let (disk, directory) = (format!("/dev/{disk}"), service.directory());
            let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
            shell(&format!(
                "mkfs.ext4 -q -F -E {options} {disk}; mkdir -p {directory}; mount {disk} {directory}"
            ))?;
            for (file, size) in FILES {
                fs::write(format!("{directory}/{file}"), vec![0xa5; size as usize])?;
            }
            shell(&format!("umount {directory}"))?;
        }
        shell("DM_DISABLE_UDEV=1 dmsetup remove --retry shop")?;
        scene.disks[Service::Mail as usize] = null_blk("mail", plan, fault)?;
        scene.map(plan, fault, fault)?;
        for (service, disk) in Service::ALL.into_iter().zip(&scene.disks) {
            let directory = service.directory();
            shell(&format!("mount -o noatime,nodiscard /dev/{disk} {directory}"))?;
        }
        // What the services read belongs to the cgroup that reads it first.
        shell("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        if let Some(fault) = fault {
            scene.inject_fault(plan, fault)?;
        }
        scene.start(plan, fault)?;
        Ok(scene)
    }

    /// The disk of the shop, through device mapper; a leg of it is as slow as `of_leg` says.
    fn map(&self, plan: &IncidentPlan, fault: Option<Fault>, of_leg: Option<Fault>) -> Result<()> {
        let below = format!("/dev/{}", self.below);
        let size = shell(&format!("blockdev --getsz {below}"))?;
        let ms = plan.between(350, 800);
        let table = match fault {
            Some(Fault::SlowWrites) => {
                shell("modprobe dm_delay")?;
                format!("0 {size} delay {below} 0 0 {below} 0 {ms}")
            }
            Some(Fault::SlowLeg) => {
                shell("modprobe dm_mirror")?;
                let leg = null_blk("leg", plan, of_leg)?;
                format!("0 {size} mirror core 2 1024 nosync 2 {below} 0 /dev/{leg} 0")
            }
            _ => format!("0 {size} linear {below} 0"),
        };
        table_of("create", &table)
    }

    /// What is wrong with disks that are there, and with the services' limits.
    fn inject_fault(&self, plan: &IncidentPlan, fault: Fault) -> Result<()> {
        let service = plan.service;
        let disk = &self.lower(service);
        let group = group(service)?;
        match fault {
            Fault::IoMax => {
                let number = shell(&format!("cat /sys/block/{disk}/dev"))?;
                let limit = match plan.which {
                    Which::Reads => format!("riops={}", 40 - plan.between(0, 16)),
                    _ => format!("wiops={}", 5 - plan.between(0, 2)),
                };
                set(&format!("{group}/io.max"), format!("{number} {limit}"))?;
            }
            Fault::MemoryMax => {
                set(&format!("{group}/memory.max"), (7 << 20) - (plan.between(0, 2) << 20))?
            }
            Fault::CpuMax => {
                let quota = 25_000 - plan.between(0, 10_000);
                set(&format!("{group}/cpu.max"), format!("{quota} 500000"))?;
            }
            Fault::FewRequests => {
                set(&format!("/sys/block/{disk}/queue/scheduler"), "mq-deadline")?;
                set(&format!("/sys/block/{disk}/queue/nr_requests"), 4)?;
            }
            Fault::Idling => {
                shell("modprobe bfq")?;
                let queue = format!("/sys/block/{disk}/queue");
                set(&format!("{queue}/scheduler"), "bfq")?;
                set(&format!("{queue}/iosched/low_latency"), 0)?;
                set(&format!("{queue}/iosched/strict_guarantees"), 1)?;
                set(&format!("{queue}/iosched/slice_idle_us"), plan.between(250_000, 350_000))?;
                set(&format!("{queue}/iosched/timeout_sync"), plan.between(800, 1000))?;
            }
            Fault::Writeback => {
                let queue = format!("/sys/block/{disk}/queue");
                set(&format!("{queue}/scheduler"), "mq-deadline")?;
                set(&format!("{queue}/nr_requests"), 512)?;
                set(&format!("{queue}/max_sectors_kb"), 64)?;
                // Else the kernel lets writeback wait before it has a request.
                set(&format!("{queue}/wbt_lat_usec"), 0)?;
            }
            Fault::Flushes => set(&format!("/sys/block/{disk}/queue/wbt_lat_usec"), 0)?,
            Fault::NoReadahead => {
                set(&format!("/sys/block/{}/queue/read_ahead_kb", self.upper(service)?), 0)?
            }
            Fault::SlowRange => {
                let ms = plan.between(350, 800);
                self.map_middle(&|below, from| format!("delay {below} {from} {ms}"))?;
            }
            Fault::Errors => {
                self.map_middle(&|below, from| format!("flakey {below} {from} 1 1"))?
            }
            _ => {}
        }
        Ok(())
    }

    /// Another target for the sectors in the middle of the shop's data.
    fn map_middle(&self, target: &dyn Fn(&str, u64) -> String) -> Result<()> {
        let (from, length) = middle(&format!("{}/data", Service::Shop.directory()))?;
        let below = format!("/dev/{}", self.below);
        let size: u64 = shell(&format!("blockdev --getsz {below}"))?.parse()?;
        let to = from + length;
        shell("modprobe -a dm_delay dm_flakey")?;
        let table = format!(
            "0 {from} linear {below} 0\n{from} {length} {}\n{to} {} linear {below} {to}",
            target(&below, from),
            size - to
        );
        table_of("reload", &table)?;
        shell("DM_DISABLE_UDEV=1 dmsetup resume shop").map(drop)
    }

    /// Starts all programs.
    fn start(&self, plan: &IncidentPlan, fault: Option<Fault>) -> Result<()> {
        let all: Vec<PathBuf> = Service::ALL.iter().map(|one| one.directory().into()).collect();
        let place = plan.service as usize;
        for service in Service::ALL {
            let is_overloaded = service == plan.service && fault == Some(Fault::Overload);
            let extra = is_overloaded.then_some(ExtraLoad::Requests(5));
            let directories = vec![service.directory().into()];
            let orders = Orders { directories, extra, ..Orders::default() };
            program(&service.process(), &orders, &group(service)?)?;
        }
        // All of them serve before anything else begins: what is wrong may keep one from ever getting there.
        let start = Instant::now();
        for service in Service::ALL {
            while ServiceStatus::load(service).is_err() {
                ensure!(start.elapsed() < START, "{} does not start", service.process());
                thread::sleep(Duration::from_millis(100));
            }
        }
        for name in OTHERS {
            let extra = match (name, fault) {
                ("backupd", Some(Fault::Writeback)) => Some(ExtraLoad::Copy(plan.between(10, 16))),
                ("backupd", Some(Fault::Reading)) => Some(ExtraLoad::Read(plan.between(160, 220))),
                ("reportd", Some(Fault::Flushes)) => Some(ExtraLoad::Fsync(plan.between(200, 260))),
                ("tidyd", Some(Fault::EmptiedCache)) => {
                    Some(ExtraLoad::Forget(plan.between(10, 40)))
                }
                ("sensord", Some(Fault::RealTime)) => Some(ExtraLoad::Busy(plan.between(350, 500))),
                ("indexd", _) if plan.distractor == Some(Distractor::Nice) => {
                    Some(ExtraLoad::ComputeGently)
                }
                _ => None,
            };
            // Without the fault, too. A scheduler that waits for one process lets others wait; of the service alone,
            // bfq soon joins the queues of all threads, and none waits for another one.
            let reads = plan.fault == Fault::Idling;
            let orders = Orders { directories: all.clone(), place, extra, reads };
            program(name, &orders, ROOT)?;
        }
        match plan.distractor {
            Some(Distractor::Limit) => {
                let other = Service::ALL[(plan.service as usize + 1) % 3];
                let number = shell(&format!("cat /sys/block/{}/dev", self.lower(other)))?;
                set(&format!("{}/io.max", group(other)?), format!("{number} riops=50000"))?;
            }
            Some(Distractor::Readahead) => {
                let other = Service::ALL[(plan.service as usize + 1) % 3];
                set(&format!("/sys/block/{}/queue/read_ahead_kb", self.upper(other)?), 256)?;
            }
            Some(Distractor::Nice) | None => {}
        }
        Ok(())
    }

    /// The disk that does the I/O of a service: `vdb`.
    pub fn lower(&self, service: Service) -> String {
        match service {
            Service::Shop => self.below.clone(),
            _ => self.disks[service as usize].clone(),
        }
    }

    /// The disk of its file system: `dm-0`.
    fn upper(&self, service: Service) -> Result<String> {
        sysfs_name(&format!("/dev/{}", self.disks[service as usize]))
    }

    /// Whether what is wrong shows: the slow requests of the service in a while, of all its requests.
    pub fn measure(&self, service: Service) -> Result<(u64, u64)> {
        thread::sleep(PERIOD / 2);
        let first = ServiceStatus::load(service)?;
        thread::sleep(PERIOD);
        let last = ServiceStatus::load(service)?;
        if is_verbose() {
            let log = format!(
                "cut -d' ' -f2 /var/log/{}.log | sort | uniq -c | xargs",
                service.process()
            );
            eprintln!("{}", shell(&log)?);
        }
        Ok((last.slow - first.slow, last.requests - first.requests))
    }
}

/// Ends all of an incident, or what there is of it.
pub fn end() {
    let services = Service::ALL.map(Service::process);
    for name in services.iter().map(String::as_str).chain(OTHERS) {
        let _ = shell(&format!("pkill -KILL -x {name}"));
    }
    for service in Service::ALL {
        let (directory, name) = (service.directory(), service.process());
        let start = Instant::now();
        // What was killed may still wait for its last I/O.
        while shell(&format!("! mountpoint -q {directory} || umount {directory}")).is_err()
            && start.elapsed() < Duration::from_secs(60)
        {
            thread::sleep(Duration::from_millis(100));
        }
        let _ = group(service).map(fs::remove_dir);
        let _ = fs::remove_file(format!("/run/{name}.status"));
        let _ = fs::remove_file(format!("/var/log/{name}.log"));
    }
    let _ = shell("DM_DISABLE_UDEV=1 dmsetup remove --retry shop");
    for disk in ["mail", "leg"] {
        let _ = fs::remove_dir(format!("{NULL_BLK}/{disk}"));
    }
    let _ = set("/sys/block/nvme0n1/queue/read_ahead_kb", 128);
}

/// Where each thread counts as much as the cgroup of a service.
const ROOT: &str = "/sys/fs/cgroup";

/// A service's cgroup.
fn group(service: Service) -> Result<String> {
    let group = format!("{ROOT}/{}", service.name());
    fs::create_dir_all(&group)?;
    Ok(group)
}

/// A disk of null_blk's, in memory, or the same with other settings; its name.
fn null_blk(name: &str, plan: &IncidentPlan, fault: Option<Fault>) -> Result<String> {
    let (ms, tags) = match fault {
        Some(Fault::SlowLeg) if name == "leg" => (plan.between(280, 450), 64),
        _ => plan.mail_disk(fault),
    };
    let directory = format!("{NULL_BLK}/{name}");
    fs::create_dir_all(&directory).context("null_blk's directory")?;
    set(&format!("{directory}/power"), 0)?;
    for (file, value) in [
        ("memory_backed", 1),
        ("size", 256),
        ("irqmode", 2),
        ("completion_nsec", ms * 1_000_000),
        ("hw_queue_depth", tags),
        ("submit_queues", 1),
        ("power", 1),
    ] {
        set(&format!("{directory}/{file}"), value)?;
    }
    // Later kernels name the disk as the directory; before, it was nullb and a number.
    let index = fs::read_to_string(format!("{directory}/index"))?;
    let names = [format!("nullb{}", index.trim()), name.to_owned()];
    let found = names.into_iter().find(|name| Path::new("/sys/block").join(name).exists());
    let disk = found.context("null_blk made no disk")?;
    set(&format!("/sys/block/{disk}/queue/scheduler"), "none")?;
    Ok(disk)
}

/// Creates the shop's device of device mapper, or gives it another table.
fn table_of(what: &str, table: &str) -> Result<()> {
    shell(&format!("DM_DISABLE_UDEV=1 dmsetup {what} shop <<'END'\n{table}\nEND"))?;
    Ok(())
}

/// The middle half of a file on its disk: its first sector, and how many.
fn middle(file: &str) -> Result<(u64, u64)> {
    let text = shell(&format!("filefrag -e -b512 {file}"))?;
    // "   0:        0..   32767:      67584..    100351:  32768: last,eof"
    let extents = text.lines().filter_map(|line| {
        let fields: Vec<&str> =
            line.split([':', ' ', '.']).filter(|field| !field.is_empty()).collect();
        fields.first()?.parse::<u32>().ok()?;
        Some((fields.get(3)?.parse::<u64>().ok()?, fields.get(5)?.parse::<u64>().ok()?))
    });
    let longest = extents.max_by_key(|(_, length)| *length);
    let Some((from, length)) = longest else { bail!("{file} has no extents: {text}") };
    Ok((from + length / 4 / 8 * 8, length / 2 / 8 * 8))
}

/// Starts a program under its name, in a cgroup.
fn program(name: &str, orders: &Orders, group: &str) -> Result<()> {
    let path = Path::new(PROGRAMS).join(name);
    if !path.exists() {
        fs::create_dir_all(PROGRAMS)?;
        fs::copy("/proc/self/exe", &path)?;
    }
    let mut command = Command::new(&path);
    command.current_dir("/").env_clear().process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
    set(&format!("{group}/cgroup.procs"), child.id())?;
    let mut stdin = child.stdin.take().context("no pipe")?;
    stdin.write_all(&serde_json::to_vec(orders)?)?;
    Ok(())
}
