//! The command line.

use std::time::Duration;

use clap::Args;
use common::{Cli, InFlight, Process};

use crate::{cgroups::OnlyCgroup, named::OnlyDisk};

/// The command line of `slow_io`.
pub type SlowCli = Cli<Slow>;

/// Which I/Os, and how they are shown.
#[derive(Args, Debug)]
pub struct Slow {
    /// The shortest latency that is shown: 10ms, 500us, 0
    #[arg(long, value_name = "TIME", value_parser = latency, default_value = "10ms")]
    pub min: Duration,
    /// Only I/Os of this disk, its partitions included, or of this partition: vda, dm-0, /dev/mapper/home
    #[arg(long, value_name = "NAME")]
    pub disk: Option<OnlyDisk>,
    /// Only I/Os that this process submits; ends when it has ended
    #[arg(long, value_name = "PID")]
    pub pid: Option<Process>,
    /// Show whose cgroup an I/O is of; with a PATH, only I/Os of that cgroup and those below: /system.slice
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "/")]
    pub cgroup: Option<OnlyCgroup>,
    /// Show which file an I/O reads or writes: its inode's number, and its path in the file system
    #[arg(long)]
    pub file: bool,
    /// The clock of a line's time [default: in a terminal day, else boot]
    #[arg(long, value_name = "CLOCK")]
    pub time: Option<Clock>,
    /// Show below each line the stack of the submission
    #[arg(long)]
    pub stack: bool,
    /// One JSON object for each line
    #[arg(long)]
    pub json: bool,
    /// A full screen: the disks, the slowest and the hanging I/Os, and who; `?` shows its keys
    #[arg(long, conflicts_with_all = ["json", "before"])]
    pub live: bool,
    /// Only the N slowest, at the end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub top: Option<u32>,
    /// Show before each slow I/O what completed on its disk in this time: 2s
    #[arg(long, value_name = "TIME", value_parser = common::duration, conflicts_with = "top")]
    pub before: Option<Duration>,
    /// At the end, who caused most of the latency: by process, disk and operation, or by stack, too
    #[arg(long, value_name = "stack", num_args = 0..=1, default_missing_value = "process")]
    pub who: Option<Who>,
    /// How many different causes --who has room for
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub causes: u32,
    /// At the end, how many I/Os of each disk took how long
    #[arg(long, conflicts_with = "json")]
    pub histogram: bool,
    /// The size of the maps.
    #[command(flatten)]
    pub room: InFlight,
}

/// So many of the slowest does --live print at its end.
const RECORD: u32 = 20;

impl Slow {
    /// How many of the slowest are printed, and those at the end only; `None`: all, as they complete.
    pub fn kept(&self) -> Option<u32> {
        self.top.or(self.live.then_some(RECORD))
    }

    /// Whether it is added up who caused the latencies.
    pub fn has_causes(&self) -> bool {
        self.who.is_some() || self.live
    }

    /// The clock of a line's time: in a terminal, somebody looks at one.
    pub fn clock(&self, is_terminal: bool) -> Clock {
        self.time.unwrap_or(if is_terminal { Clock::Day } else { Clock::Boot })
    }
}

/// Which clocks a line shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Clock {
    /// Seconds since the machine was started: the kernel's clock
    Boot,
    /// The time of day here
    Day,
    /// Date and time of day (UTC), beside the kernel's clock
    Wall,
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
