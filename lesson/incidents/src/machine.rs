//! The machine of an incident, as whoever looks at it finds it: its disks, and what its services have counted.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use incidents::{measured::ServiceActivity, plan::Service};

/// Runs a command of the shell; its standard output.
pub fn shell(command: &str) -> Result<String> {
    let output = Command::new("sh").args(["-ec", command]).output().context("cannot start sh")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What a service has counted since it was started.
#[derive(Clone, Debug)]
pub struct ServiceStatus(ServiceActivity);

impl ServiceStatus {
    /// Of a service, as it says itself.
    pub fn load(service: Service) -> Result<ServiceStatus> {
        let file = format!("/run/{}.latencies", service.process());
        let text = fs::read_to_string(&file).with_context(|| file.clone())?;
        Ok(ServiceStatus(ServiceActivity::parse(&text).with_context(|| format!("{file}: {text}"))?))
    }

    /// What has come since then.
    pub fn since(&self, then: &ServiceStatus) -> ServiceActivity {
        self.0.since(&then.0)
    }
}

/// A service's cgroup.
pub fn group(service: Service) -> Result<String> {
    let group = format!("/sys/fs/cgroup/{}", service.name());
    fs::create_dir_all(&group)?;
    Ok(group)
}

/// The directory in /proc of the process of a name.
pub fn pid_of(name: &str) -> Option<PathBuf> {
    let processes = fs::read_dir("/proc").ok()?.flatten().map(|process| process.path());
    // One that has ended has a name as long as nobody asks for its status, and no command line.
    let mut alive =
        processes.filter(|path| fs::read(path.join("cmdline")).is_ok_and(|it| !it.is_empty()));
    alive.find(|path| fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name))
}

/// The CPU time that a process has used, in ms.
pub fn cpu_ms(process: &Path) -> Option<u64> {
    cpu_of(process).map(|(_, ticks)| ticks * 10)
}

/// The name of a process, and what CPU time it has used, in ticks of 10 ms.
pub fn cpu_of(process: &Path) -> Option<(String, u64)> {
    let text = fs::read_to_string(process.join("stat")).ok()?;
    let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
    // From the state, the third field of proc(5), on.
    let mut times = rest.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
    Some((name.to_owned(), times.next()? + times.next()?))
}

/// How many bytes it has read from disks, and written for them.
pub fn io_bytes(process: &Path) -> Option<u64> {
    let text = fs::read_to_string(process.join("io")).ok()?;
    let of =
        |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(of("read_bytes:")? + of("write_bytes:")?)
}

/// The disk of a service's file system: `dm-0`.
pub fn disk_of(service: Service) -> Result<String> {
    let source = shell(&format!("findmnt -n -o SOURCE {}", service.directory()))?;
    sysfs_name(&source)
}

/// The kernel's name of a block device in /dev, which may have another one there: `dm-0`.
pub fn sysfs_name(device: &str) -> Result<String> {
    let number = fs::metadata(device).with_context(|| device.to_owned())?.rdev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}"))?;
    Ok(link.file_name().context("no name")?.to_string_lossy().into_owned())
}

/// The disks below one of device mapper's, in the order of its table.
pub fn below(disk: &str) -> Result<Vec<String>> {
    let number = shell(&format!("cat /sys/block/{disk}/dev"))?;
    let (major, minor) = number.split_once(':').context("an odd number")?;
    let table = shell(&format!("dmsetup table -j {major} -m {minor}"))?;
    let is_number =
        |word: &&str| word.contains(':') && word.starts_with(|c: char| c.is_ascii_digit());
    let mut names = Vec::new();
    for word in table.split_whitespace().filter(is_number) {
        let link = fs::read_link(format!("/sys/dev/block/{word}"))?;
        let name = link.file_name().context("no name")?.to_string_lossy().into_owned();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    ensure!(!names.is_empty(), "no disk below {disk}: {table}");
    Ok(names)
}

/// Whether to tell what is measured: for who works on incidents.
pub fn is_verbose() -> bool {
    std::env::var_os("INCIDENT_VERBOSE").is_some()
}
