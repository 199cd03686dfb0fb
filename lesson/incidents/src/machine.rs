//! The machine of an incident, as whoever looks at it finds it: its disks, and what its services have counted.

use std::{fs, os::unix::fs::MetadataExt, process::Command};

use anyhow::{Context, Result, ensure};
use incidents::plan::Service;

/// Runs a command of the shell; its standard output.
pub fn shell(command: &str) -> Result<String> {
    let output = Command::new("sh").args(["-ec", command]).output().context("cannot start sh")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {}", said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What a service has counted since it was started.
#[derive(Clone, Copy, Debug)]
pub struct ServiceStatus {
    /// All of its requests.
    pub requests: u64,
    /// The requests that were slow.
    pub slow: u64,
}

impl ServiceStatus {
    /// Of a service, as it says itself.
    pub fn load(service: Service) -> Result<ServiceStatus> {
        let file = format!("/run/{}.status", service.process());
        let text = fs::read_to_string(&file).context(file)?;
        let value = |name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| value.trim().parse().ok()).context("an odd status")
        };
        Ok(ServiceStatus { requests: value("requests")?, slow: value("slow")? })
    }
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

/// The disks below it, or itself.
pub fn below(disk: &str) -> Result<Vec<String>> {
    let slaves = fs::read_dir(format!("/sys/block/{disk}/slaves"))?;
    let mut names: Vec<String> = slaves
        .map(|slave| Ok(slave?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    if names.is_empty() {
        names.push(disk.to_owned());
    }
    names.sort_by_key(|name| !name.starts_with("vd"));
    Ok(names)
}

/// Whether to tell what is measured: for who works on incidents.
pub fn is_verbose() -> bool {
    std::env::var_os("INCIDENT_VERBOSE").is_some()
}
