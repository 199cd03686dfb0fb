//! The names of disks and partitions.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::printable;

/// A disk or a partition, by its kernel `dev_t`: major << 20 | minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(pub u32);

/// The device of a request that has no disk.
const NONE: Device = Device(0);

impl Device {
    fn sysfs(self) -> PathBuf {
        format!("/sys/dev/block/{}:{}", self.0 >> 20, self.0 & 0xfffff).into()
    }

    /// Name in /dev: `vda1`, `dm-0`; `None` for one without a node there: gone, or a path of nvme multipath.
    pub fn name(self) -> Option<String> {
        let path = fs::canonicalize(self.sysfs()).ok()?;
        Some(printable(&path.file_name()?.to_string_lossy()))
    }

    /// For a partition, its disk's name and the sector (512 bytes) of the disk where it starts.
    pub fn partition_of(self) -> Option<(String, u64)> {
        let path = fs::canonicalize(self.sysfs()).ok()?;
        let start = fs::read_to_string(path.join("start")).ok()?;
        let disk = printable(&path.parent()?.file_name()?.to_string_lossy());
        Some((disk, start.trim().parse().ok()?))
    }

    /// `Sector (N) of vda1 (254:1), sector A of vda`: relative to the device named first, and, for
    /// a partition, absolute.
    ///
    /// The kernel writes -1 where there is no sector.
    pub fn sector(self, sector: u64) -> String {
        if self == NONE {
            return self.to_string();
        }
        if sector == u64::MAX {
            return format!("no sector (a flush, or another command) of {self}");
        }
        let relative = format!("Sector ({sector}) of {self}");
        match self.partition_of() {
            Some((disk, start)) => format!("{relative}, sector {} of {disk}", start + sector),
            None => relative,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if *self == NONE {
            return f.write_str("no disk (a driver's command)");
        }
        let name = self.name().unwrap_or_else(|| "a device without a node".into());
        write!(f, "{name} ({}:{})", self.0 >> 20, self.0 & 0xfffff)
    }
}

/// A disk or a partition that is there now.
#[derive(Clone, Debug)]
pub struct BlockDevice {
    /// Its number: an earlier device may have had it, and a later one may get it.
    pub device: Device,
    /// The number of the disk that it is, or is a partition of; no other disk has it until the machine is
    /// started again. `gendisk.diskseq`, since 5.15.
    pub diskseq: u64,
    /// Whether it is a partition.
    pub is_partition: bool,
    /// As /sys/class/block has it. It may hold anything but a slash: see [`printable`].
    pub name: String,
}

/// All disks and partitions with a number. Fails where /sys is not mounted.
pub fn block_devices() -> Result<Vec<BlockDevice>> {
    let path = "/sys/class/block";
    let mut devices = Vec::new();
    for entry in fs::read_dir(path).context(path)? {
        let path = entry.context(path)?.path();
        devices.extend(block_device(&path)); // or it has just gone
    }
    Ok(devices)
}

fn block_device(path: &Path) -> Option<BlockDevice> {
    let read = |file: &str| fs::read_to_string(path.join(file)).ok();
    let device: Device = read("dev")?.trim().parse().ok()?;
    let own = read("diskseq");
    let is_partition = own.is_none();
    let diskseq = own.or_else(|| read("../diskseq"))?.trim().parse().ok()?;
    let name = path.file_name()?.to_string_lossy().into_owned();
    Some(BlockDevice { device, diskseq, is_partition, name })
}

impl std::str::FromStr for Device {
    type Err = ();

    /// `254:16`
    fn from_str(numbers: &str) -> Result<Device, ()> {
        let (major, minor) = numbers.split_once(':').ok_or(())?;
        let number = |text: &str| text.parse::<u32>().map_err(drop);
        Ok(Device(number(major)? << 20 | number(minor)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_a_node_keeps_its_numbers() {
        let device = Device(4095 << 20 | 7);
        assert_eq!(device.sector(8), "Sector (8) of a device without a node (4095:7)");
    }

    #[test]
    fn a_flush_has_no_sector() {
        let device = Device(4095 << 20 | 7);
        let flush = "no sector (a flush, or another command) of a device without a node (4095:7)";
        assert_eq!(device.sector(u64::MAX), flush);
    }

    #[test]
    fn a_drivers_command_has_no_disk() {
        assert_eq!(Device(0).sector(u64::MAX), "no disk (a driver's command)");
    }
}
