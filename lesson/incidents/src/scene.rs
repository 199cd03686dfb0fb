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

use incidents::{
    RECORD, WAY,
    measured::Activity,
    plan::{Below, Distractor, Fault, IncidentPlan, Model, Service, Table, Which},
};

use crate::{
    app::{ExtraLoad, FILES, Orders},
    machine::{ServiceStatus, cpu_ms, group, io_bytes, is_verbose, pid_of, shell, sysfs_name},
};

/// The programs beside the services.
const OTHERS: [&str; 6] = ["backupd", "reportd", "tidyd", "sensord", "indexd", "checkd"];
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

/// What any fault needs, whichever it is: a list of the loaded modules tells nothing.
const MODULES: &str =
    "nvme null_blk dm_mod dm_mirror dm_delay dm_flakey ext4 mq-deadline bfq configfs";
/// Sectors of each service's device of device mapper.
const SECTORS: u64 = 256 << 11;

/// The disks of an incident.
pub struct Scene {
    /// By service: the disk below its device of device mapper.
    below: [String; 3],
}

impl Scene {
    /// Makes what `plan` says, or the same without its fault, and starts the services.
    pub fn make(plan: &IncidentPlan, has_fault: bool) -> Result<Scene> {
        let fault = has_fault.then_some(plan.fault);
        shell(&format!("for module in {MODULES}; do modprobe $module; done"))?;
        shell("mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config")?;
        shell("echo '+io +memory +cpu' > /sys/fs/cgroup/cgroup.subtree_control")?;
        // With quick disks first, of which null_blk's keep their data: a slow one would take minutes.
        let scene = Scene::of_disks(plan, None)?;
        scene.map(plan, None, None)?;
        for service in Service::ALL {
            let (name, directory) = (service.name(), service.directory());
            let disk = format!("/dev/mapper/{name}");
            let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
            shell(&format!(
                "mkfs.ext4 -q -F -E {options} {disk}; mkdir -p {directory}; mount {disk} {directory}"
            ))?;
            for (file, size) in FILES {
                fs::write(format!("{directory}/{file}"), vec![0xa5; size as usize])?;
            }
            shell(&format!("umount {directory}; DM_DISABLE_UDEV=1 dmsetup remove --retry {name}"))?;
        }
        let model = plan.disk(fault);
        let scene = Scene::of_disks(plan, Some(model))?;
        scene.map(plan, fault, Some(model))?;
        for service in Service::ALL {
            let (name, directory) = (service.name(), service.directory());
            shell(&format!("mount -o noatime,nodiscard /dev/mapper/{name} {directory}"))?;
        }
        // What the services read belongs to the cgroup that reads it first.
        shell("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        if let Some(fault) = fault {
            scene.inject_fault(plan, fault)?;
        }
        scene.start(plan, fault)?;
        Ok(scene)
    }

    /// The disks, of which that of the slow service is as quick as `model` says, or quick.
    fn of_disks(plan: &IncidentPlan, model: Option<Model>) -> Result<Scene> {
        let virtio = "for disk in /sys/block/vd*; do
            grep -q bpfvm-data $disk/serial || basename $disk; done | head -1";
        let below = Service::ALL.map(|service| match plan.layouts[service as usize].below {
            Below::Virtio => shell(virtio),
            Below::Nvme => Ok("nvme0n1".to_owned()),
            Below::Timer(own) => {
                let is_slow = service == plan.service;
                null_blk(service.name(), if is_slow { model.unwrap_or(QUICK) } else { own })
            }
        });
        let [shop, web, mail] = below;
        Ok(Scene { below: [shop?, web?, mail?] })
    }

    /// The services' devices of device mapper; a slow leg is as slow as it is with `model` only.
    fn map(&self, plan: &IncidentPlan, fault: Option<Fault>, model: Option<Model>) -> Result<()> {
        for service in Service::ALL {
            let lower = format!("/dev/{}", self.lower(service));
            let (fault, model) = match service == plan.service {
                true => (fault, model),
                false => (None, None),
            };
            let size = SECTORS;
            let table = match (fault, plan.layouts[service as usize].table) {
                (Some(Fault::SlowWrites), _) => {
                    let ms = plan.between(350, 800);
                    format!("0 {size} delay {lower} 0 0 {lower} 0 {ms}")
                }
                (_, Table::Linear) => format!("0 {size} linear {lower} 0"),
                (_, Table::Delay) => format!("0 {size} delay {lower} 0 0"),
                (fault, Table::Mirror) => {
                    let leg = match (fault, model) {
                        (Some(Fault::SlowLeg), Some(model)) => {
                            Model { ms: plan.between(280, 450), ..model }
                        }
                        (_, model) => model.unwrap_or(QUICK),
                    };
                    let leg = null_blk(&format!("{}-2", service.name()), leg)?;
                    format!("0 {size} mirror core 2 1024 nosync 2 {lower} 0 /dev/{leg} 0")
                }
            };
            table_of(service, "create", &table)?;
        }
        Ok(())
    }

    /// What is wrong with disks that are there, and with the services' limits.
    fn inject_fault(&self, plan: &IncidentPlan, fault: Fault) -> Result<()> {
        let service = plan.service;
        let disk = self.lower(service);
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
                set(&format!("{group}/memory.max"), (6 << 20) - (plan.between(0, 1) << 20))?
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
                set(&format!("/sys/block/{}/queue/read_ahead_kb", upper(service)?), 0)?
            }
            Fault::SlowRange => {
                let ms = plan.between(350, 800);
                self.map_middle(service, &|below, from| format!("delay {below} {from} {ms}"))?;
            }
            Fault::Errors => {
                self.map_middle(service, &|below, from| format!("flakey {below} {from} 1 1"))?
            }
            _ => {}
        }
        Ok(())
    }

    /// Another target for the sectors in the middle of a service's data.
    fn map_middle(&self, service: Service, target: &dyn Fn(&str, u64) -> String) -> Result<()> {
        let (from, length) = middle(&format!("{}/data", service.directory()))?;
        let below = format!("/dev/{}", self.lower(service));
        let to = from + length;
        let table = format!(
            "0 {from} linear {below} 0\n{from} {length} {}\n{to} {} linear {below} {to}",
            target(&below, from),
            SECTORS - to
        );
        table_of(service, "reload", &table)?;
        shell(&format!("DM_DISABLE_UDEV=1 dmsetup resume {}", service.name())).map(drop)
    }

    /// Starts all programs.
    fn start(&self, plan: &IncidentPlan, fault: Option<Fault>) -> Result<()> {
        let all: Vec<PathBuf> = Service::ALL.iter().map(|one| one.directory().into()).collect();
        let place = plan.service as usize;
        for service in Service::ALL {
            let is_overloaded = service == plan.service && fault == Some(Fault::Overload);
            let extra = is_overloaded.then_some(ExtraLoad::Requests(7));
            let directories = vec![service.directory().into()];
            let disk_ms = if service == plan.service { for_lists(plan.sheet) } else { 20 };
            let orders = Orders { directories, extra, disk_ms, ..Orders::default() };
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
                    Some(ExtraLoad::Forget(35 - plan.between(0, 30)))
                }
                ("sensord", Some(Fault::RealTime)) => Some(ExtraLoad::Busy(plan.between(350, 500))),
                ("indexd", _) if plan.distractor == Some(Distractor::Nice) => {
                    Some(ExtraLoad::ComputeGently)
                }
                _ => None,
            };
            let orders = Orders { directories: all.clone(), place, extra, ..Orders::default() };
            let group = if name == "checkd" { CHECKS.to_owned() } else { ROOT.to_owned() };
            fs::create_dir_all(&group)?;
            program(name, &orders, &group)?;
        }
        let Some(distractor) = plan.distractor else { return Ok(()) };
        let number = |service| shell(&format!("cat /sys/block/{}/dev", self.lower(service)));
        // Of nobody who asks: whoever checks files may wait.
        set(&format!("{CHECKS}/io.max"), format!("{} riops=2", number(plan.service)?))?;
        let other = plan.quick_service();
        match distractor {
            Distractor::Limit => {
                let limit = format!("{} riops=50000", number(other)?);
                set(&format!("{}/io.max", group(other)?), limit)?;
            }
            Distractor::Readahead => {
                set(&format!("/sys/block/{}/queue/read_ahead_kb", upper(other)?), 256)?;
            }
            Distractor::Nice => {}
        }
        Ok(())
    }

    /// The disk that does the I/O of a service: `vdb`.
    pub fn lower(&self, service: Service) -> &str {
        &self.below[service as usize]
    }
}

/// How long an I/O may take for a list not to be slow: where a disk takes one at a time, they wait for each other.
fn for_lists(sheet: Model) -> u64 {
    if sheet.tags == 1 { sheet.ms * 4 } else { sheet.ms }
}

/// The disk of a service's file system: `dm-0`.
fn upper(service: Service) -> Result<String> {
    sysfs_name(&format!("/dev/mapper/{}", service.name()))
}

/// What the services and the others do in a while: by service, and by process.
pub fn measure() -> Result<Activity> {
    let all = Service::ALL.map(Service::process);
    let names = || all.iter().map(String::as_str).chain(OTHERS);
    let used = |name: &str| {
        let process = pid_of(name)?;
        Some((cpu_ms(&process)?, io_bytes(&process).unwrap_or(0)))
    };
    let load = || -> Result<Vec<ServiceStatus>> {
        Service::ALL.into_iter().map(ServiceStatus::load).collect()
    };
    let (first, before) = (load()?, names().map(used).collect::<Vec<_>>());
    let start = Instant::now();
    thread::sleep(PERIOD);
    let (last, after) = (load()?, names().map(used).collect::<Vec<_>>());
    let seconds = start.elapsed().as_secs_f64();
    let mut activity = Activity { seconds, ..Activity::default() };
    for (first, last) in first.iter().zip(&last) {
        activity.services.push(last.since(first));
    }
    for ((name, before), after) in names().zip(before).zip(after) {
        let Some(((cpu, io), (cpu_before, io_before))) = after.zip(before) else { continue };
        let cpu = cpu.saturating_sub(cpu_before) as f64 / seconds / 10.0;
        let kib = io.saturating_sub(io_before) as f64 / seconds / 1024.0;
        activity.processes.insert(name.to_owned(), (cpu.round() as u64, kib.round() as u64));
    }
    if is_verbose() {
        let services = activity.services.iter();
        let counts: Vec<_> = services
            .map(|of| [0, 1, 2, 3].map(|kind| (of.count(&[kind]), of.percentile(&[kind], 50))))
            .collect();
        eprintln!("{counts:?} {:?}", activity.processes);
    }
    Ok(activity)
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
        let _ = fs::remove_file(format!("/run/{name}.latencies"));
        let _ = fs::remove_file(format!("/run/{name}.customers"));
        let _ = fs::remove_file(format!("/var/log/{name}.log"));
    }
    let _ = fs::remove_dir(CHECKS);
    let _ = fs::remove_file(RECORD);
    let _ = fs::remove_file(WAY);
    for service in Service::ALL {
        let name = service.name();
        let _ = shell(&format!("DM_DISABLE_UDEV=1 dmsetup remove --retry {name}"));
        for disk in [name.to_owned(), format!("{name}-2")] {
            let _ = fs::remove_dir(format!("{NULL_BLK}/{disk}"));
        }
    }
    // The one that a cure has put in the place of another one.
    let _ = fs::remove_dir(format!("{NULL_BLK}/spare"));
}

/// The cgroup of `checkd`.
pub const CHECKS: &str = "/sys/fs/cgroup/checks";
/// A disk on which it is quick to make files.
const QUICK: Model = Model { ms: 2, tags: 64 };

/// Where each thread counts as much as the cgroup of a service.
const ROOT: &str = "/sys/fs/cgroup";

/// A disk of null_blk's, in memory, or the same with other settings; its name.
fn null_blk(name: &str, model: Model) -> Result<String> {
    let Model { ms, tags } = model;
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

/// Creates the device of device mapper of a service, or gives it another table.
fn table_of(service: Service, what: &str, table: &str) -> Result<()> {
    let name = service.name();
    shell(&format!("DM_DISABLE_UDEV=1 dmsetup {what} {name} <<'END'\n{table}\nEND"))?;
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
