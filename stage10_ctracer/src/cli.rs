//! The command line.

use std::path::PathBuf;

use clap::Args;
use common::Options;
use glob::Pattern;

/// What only this program has.
#[derive(Args, Debug)]
pub struct Ctracer {
    /// The struct whose objects are followed: bio, request, folio, inode, sk_buff, task_struct ...
    #[arg(long = "type", value_name = "STRUCT", default_value = "bio")]
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
    #[arg(long, value_parser = common::process, allow_negative_numbers = true)]
    pub pid: Option<u32>,
    /// Follow only bios of this device, as lsblk shows it: 254:0
    #[arg(long, value_name = "MAJ:MIN", value_parser = device)]
    pub dev: Option<u32>,
    /// Follow one object in N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub sample: Option<u32>,
    /// End after so many events
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub max_events: u64,
    /// Print no call graph, only the summary
    #[arg(short, long)]
    pub quiet: bool,
    /// Print every event as a line of JSON in place of the call graph; the summary goes to stderr
    #[arg(long, conflicts_with = "quiet")]
    pub json: bool,
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

impl Options for Ctracer {
    fn prints_events(&self) -> bool {
        false
    }
}

/// `254:0` as the kernel keeps it.
fn device(text: &str) -> Result<u32, String> {
    let hint = "give the two numbers that lsblk shows, like 254:0";
    let (major, minor) = text.split_once(':').ok_or(hint)?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| hint.to_owned());
    let (major, minor) = (number(major)?, number(minor)?);
    if major >= 1 << 12 || minor >= 1 << 20 || (major, minor) == (0, 0) {
        return Err(format!("no device can have these numbers; {hint}"));
    }
    Ok(major << 20 | minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_two_numbers() {
        assert_eq!(device("254:3"), Ok(254 << 20 | 3));
        for wrong in ["", "254", "a:b", "0:0", "4096:0", "-1:0"] {
            assert!(device(wrong).unwrap_err().contains("lsblk"), "{wrong}");
        }
    }
}
