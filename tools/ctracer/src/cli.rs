//! The command line.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand, builder::NonEmptyStringValueParser};
use glob::Pattern;

use crate::filter::Filter;

/// What only this program has.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Ctracer {
    /// Something else than a trace.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The struct whose objects are followed: bio, request, folio, inode, sk_buff, task_struct ...
    #[arg(long = "type", value_name = "STRUCT", default_value = "bio")]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub type_name: String,
    /// List the functions that take the struct, and why some cannot be traced; trace nothing
    #[arg(long)]
    pub list: bool,
    /// Trace only functions whose name matches, like 'bio_*'; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub only: Vec<Pattern>,
    /// Leave out functions whose name matches; may be given several times
    #[arg(long, value_name = "GLOB")]
    pub skip: Vec<Pattern>,
    /// Follow only what this process begins (bios, requests) or passes to a function (other structs)
    #[arg(long)]
    pub pid: Option<common::Process>,
    /// Follow only bios of the device that has this number, as lsblk shows it: 254:0
    #[arg(long, value_name = "MAJ:MIN", value_parser = device)]
    pub dev: Option<u32>,
    /// Follow only objects with such fields, from the first call at which they have: 'bi_opf & 0xff == 1
    /// and bi_iter.bi_size >= 65536'
    #[arg(long, value_name = "FILTER", value_parser = crate::filter::parse)]
    pub filter: Option<Filter>,
    /// Show only objects with an error: a call that returned a negative error number, or a status other
    /// than 0; nothing is printed before the end
    #[arg(long)]
    pub errors: bool,
    /// Follow one object in N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub sample: Option<u32>,
    /// End after so many events
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub max_events: u64,
    /// End when the trace takes so much memory: 64M, 1G
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    pub memory: usize,
    /// Print no call graph, only the summary
    #[arg(short, long)]
    pub quiet: bool,
    /// Print every event as a line of JSON in place of the call graph; the summary goes to stderr
    #[arg(long, conflicts_with = "quiet")]
    pub json: bool,
    /// The files to write.
    #[command(flatten)]
    pub files: Files,
}

/// The files to write at the end.
#[derive(Args, Debug)]
pub struct Files {
    /// Write a trace for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Write a page for any browser
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the time per function as folded stacks, for flame graphs
    #[arg(long, value_name = "FILE")]
    pub folded: Option<PathBuf>,
}

impl Files {
    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.perfetto.is_some() || self.html.is_some() || self.folded.is_some()
    }
}

/// Something else than a trace.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write files out of what --json has printed; needs no root
    #[command(group(
        ArgGroup::new("output").args(["perfetto", "html", "folded"]).required(true).multiple(true)
    ))]
    Report {
        /// The JSON lines of a trace
        file: PathBuf,
        /// Read up to the event at which the report takes so much memory: 64M, 1G
        #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = size)]
        memory: usize,
        /// The files to write.
        #[command(flatten)]
        files: Files,
    },
}

/// `64M` in bytes.
fn size(text: &str) -> Result<usize, String> {
    let hint = "give a number and a unit: 64M, 1G";
    let units = [('M', 1_000_000_usize), ('G', 1_000_000_000)];
    let size = units.iter().find_map(|(unit, bytes)| {
        let number = text.strip_suffix(*unit)?.parse::<usize>().ok()?;
        number.checked_mul(*bytes).filter(|&size| size > 0)
    });
    size.ok_or_else(|| hint.to_owned())
}

/// `254:0` as the kernel keeps it.
fn device(text: &str) -> Result<u32, String> {
    let device = text.parse::<common::Device>().ok().map(|device| device.0);
    // Numbers that are too large have lost their highest bits.
    let is_it =
        |&device: &u32| device != 0 && format!("{}:{}", device >> 20, device & 0xfffff) == text;
    let hint = "no device can have these numbers: give those that lsblk shows, like 254:0";
    device.filter(is_it).ok_or_else(|| hint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_a_unit() {
        assert_eq!((size("64M"), size("1G")), (Ok(64_000_000), Ok(1_000_000_000)));
        for wrong in ["", "M", "64", "0M", "-1M", "1K", "99999999999999999999G", "6\u{e9}"] {
            assert!(size(wrong).unwrap_err().contains("64M"), "{wrong}");
        }
    }

    #[test]
    fn a_device_has_two_numbers() {
        assert_eq!(device("254:3"), Ok(254 << 20 | 3));
        for wrong in ["", "254", "a:b", "0:0", "4096:0", "-1:0"] {
            assert!(device(wrong).unwrap_err().contains("lsblk"), "{wrong}");
        }
    }
}
