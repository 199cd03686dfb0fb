//! The command line.

use std::{
    os::unix::fs::{FileTypeExt, MetadataExt},
    time::Duration,
};

use clap::Args;
use common::{Cli, Device, InFlight};

/// The command line of `slow_io`.
pub type SlowCli = Cli<Slow>;

/// Which bios, and how they are shown.
#[derive(Args, Debug)]
pub struct Slow {
    /// The shortest latency that is shown: 10ms, 500us, 0
    #[arg(long, value_name = "TIME", value_parser = latency, default_value = "10ms")]
    pub min: Duration,
    /// Only bios of this disk, its partitions included, or of this partition: vda, dm-0, /dev/mapper/home
    #[arg(long, value_name = "NAME", value_parser = disk)]
    pub disk: Option<Device>,
    /// Only bios that this process submits
    #[arg(long, value_name = "PID", value_parser = common::process, allow_negative_numbers = true)]
    pub pid: Option<u32>,
    /// Show below each line the stack of the submission
    #[arg(long)]
    pub stack: bool,
    /// One JSON object for each line
    #[arg(long)]
    pub json: bool,
    /// Only the N slowest, at the end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub top: Option<u32>,
    /// Show before each slow bio what completed on its disk in this time: 2s
    #[arg(long, value_name = "TIME", value_parser = common::duration, conflicts_with = "top")]
    pub before: Option<Duration>,
    /// At the end, who caused most of the latency: by process, disk and operation, or by stack, too
    #[arg(long, value_name = "stack", num_args = 0..=1, default_missing_value = "process")]
    pub who: Option<Who>,
    /// How many different causes --who has room for
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub causes: u32,
    /// At the end, how many bios of each disk took how long
    #[arg(long, conflicts_with = "json")]
    pub histogram: bool,
    /// The size of the maps.
    #[command(flatten)]
    pub room: InFlight,
}

/// By what --who tells causes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Who {
    /// By process, disk and operation.
    Process,
    /// By these, and by stack.
    Stack,
}

/// A latency; 0 needs no unit.
fn latency(text: &str) -> Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { common::duration(text) }
}

/// A block device by its name, as in /sys/class/block, which needs no /dev; or by its file, as device mapper
/// names it.
fn disk(name: &str) -> Result<Device, String> {
    let path = format!("/sys/class/block/{}/dev", name.trim_start_matches("/dev/"));
    let by_name = std::fs::read_to_string(path).ok().and_then(|dev| number(&dev));
    let found = by_name.or_else(|| {
        let mut paths = ["", "/dev/mapper/"].iter().map(|directory| format!("{directory}{name}"));
        paths.find_map(|path| by_file(&path))
    });
    found.map(Device).ok_or("there is no such disk; `lsblk` shows those that there are".into())
}

/// The number of a block device's file. stat(2) puts 12 bits of the major one between two pieces of the minor.
fn by_file(path: &str) -> Option<u32> {
    let file = std::fs::metadata(path).ok().filter(|file| file.file_type().is_block_device())?;
    let dev = file.rdev();
    Some(((dev >> 8 & 0xfff) << 20 | (dev >> 12 & 0xfff00) | (dev & 0xff)) as u32)
}

/// `254:16`, as the kernel has it in a dev_t.
pub fn number(dev: &str) -> Option<u32> {
    let (major, minor) = dev.trim().split_once(':')?;
    Some(major.parse::<u32>().ok()? << 20 | minor.parse::<u32>().ok()?)
}
