//! What every stage shares, and nothing that teaches: the command line and its exit codes, the
//! checks before loading, loading itself, the trace pipe, symbols, the names of disks.

#![warn(clippy::unwrap_used)]

mod cli;
mod device;
mod heatmap;
mod histogram;
mod load;
mod preflight;
mod process;
mod results;
mod stdout;
mod symbols;
mod trace_pipe;

pub use cli::{Cli, NoOptions, Options, Quiet, QuietCli, Room, Unsupported, deadline, main};
pub use device::Device;
pub use heatmap::{Heatmap, HeatmapCli, HeatmapOptions};
pub use histogram::{Histogram, readable};
pub use load::{Links, hook_first_of, load};
pub use process::{Pid, PidCli, pid_namespace};
pub use results::{constants, counters, page_shift, per_cpu, print_missed, print_total};
pub use symbols::print_stack;
pub use trace_pipe::print_trace_pipe;
