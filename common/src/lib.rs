//! What the programs of the workshop share, and nothing that teaches: the command line and its exit
//! codes, checks of the machine, loading and attaching, the trace pipe, symbols, names of disks.

mod addresses;
pub mod btf;
mod cli;
mod clock;
mod device;
mod error;
pub mod hookable;
pub mod kallsyms;
mod message;
mod modules;
mod mounted;
#[cfg(feature = "pages")]
mod pages;
mod preflight;
mod process;
mod program;
mod refusal;
mod results;
mod room;
mod session;
mod status;
mod stdout;
mod switches;
mod symbols;
mod trace_pipe;

pub use addresses::{
    ends_of_clones, functions_have_names, kernel_function, kernel_function_if_any,
    kernel_functions_if_any,
};
pub use cli::{Cli, InFlight, NoOptions, duration};
pub use clock::kernel_clock;
pub use common_base::{colours, printable};
pub use device::{BlockDevice, Device, block_devices};
pub use error::{Unsupported, Usage, unsupported};
pub use preflight::{has_function, has_sessions, pages_have, preempts, tracefs};
pub use process::{Pid, PidCli, Process, pid_namespace, process};
pub use program::{Program, main};
pub use results::{
    Skips, constants, counters, of_measured, page_shift, per_cpu, print_skipped,
    print_skipped_by_both, print_total, program_info, text, times_skipped,
};
pub use session::Session;
pub use status::block_status;
pub use symbols::{functions, print_stack, stack};
pub use trace_pipe::TracePipe;
