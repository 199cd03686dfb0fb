//! `cargo vm`: boots a known kernel in QEMU and runs the stages in it.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};
use vm::arch::Arch;
use vm::commands::{self, LINES, background, bench, bundle, doctor, setup, shell, test};
use vm::run::{GuestOptions, Run, named};

/// Boots a known kernel in QEMU and runs the stages in it.
#[derive(Parser)]
#[command(name = "cargo vm", bin_name = "cargo vm")]
struct Cli {
    /// The guest's architecture [default: this machine's]
    #[arg(long, global = true, env = "VM_ARCH", value_enum)]
    arch: Option<Arch>,
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Run a stage, or any command, in the guest
    Run(commands::run::Options),
    /// Open a shell in the guest; called again, a second terminal in the same guest
    Shell(GuestOptions),
    /// Run the unit tests on the host and the guest tests in the VM
    Test(test::Options),
    /// Measure what the programs cost, in guest instructions per I/O, beside bpftrace and bcc
    Bench(bench::Options),
    /// Report what is installed, what is missing, and how long a boot takes
    #[command(mut_arg("kernel", |kernel| kernel.value_name("LINE|all|DIR").help(LINES)))]
    Doctor(GuestOptions),
    /// Install, fetch and prepare everything that the other commands need
    Setup(setup::Options),
    /// Pin the newest kernels of the pinned lines, or of these, in vm/pinned.toml
    Repin {
        /// Kernel lines: 6.1, 6.1-rt
        lines: Vec<String>,
    },
    /// Write one file with the kernels, the crates and the web book, for machines without a network
    Bundle {
        /// Kernel line, or `all` [default: 6.1; arm64: 6.12]
        #[arg(long, env = "VM_KERNEL", value_name = "LINE|all")]
        kernel: Option<String>,
        /// The file to write: workshop.tar.zst
        file: PathBuf,
    },
    /// Started by `cargo run` and `cargo test` for a program of the workspace
    #[command(hide = true)]
    Runner {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        all: Vec<OsString>,
    },
    #[command(flatten)]
    Hidden(background::Hidden),
}

fn main() {
    let cli = Cli::parse();
    let on_host = !matches!(cli.command, Cmd::Hidden(background::Hidden::Agent));
    commands::main(on_host, || dispatch(cli))
}

fn dispatch(Cli { arch, command }: Cli) -> Result<i32> {
    let run = || Run::new(arch);
    match command {
        Cmd::Run(options) => commands::run::main(&run()?, &options),
        Cmd::Shell(options) => shell::main(&run()?, &options),
        Cmd::Test(options) => test::main(&run()?, &options),
        Cmd::Bench(options) => bench::main(&run()?, &options),
        Cmd::Doctor(options) => doctor::main(&run()?, &options),
        Cmd::Setup(options) => setup::main(&run()?, &options).map(|()| 0),
        Cmd::Repin { lines } => setup::repin(&run()?, &lines).map(|()| 0),
        Cmd::Bundle { kernel, file } => {
            bundle::write(&run()?, &file, named(kernel.as_deref())).map(|()| 0)
        }
        Cmd::Runner { all } => commands::run::runner(&run()?, &all),
        Cmd::Hidden(hidden) => hidden.main(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_programs_arguments_are_its_own() {
        let parsed = |line: &str| match Cli::try_parse_from(line.split(' ')).ok()?.command {
            Cmd::Run(run) => {
                Some((run.idle, run.program.join(" ".as_ref()).into_string().unwrap()))
            }
            _ => None,
        };
        let program = "stage06 --quiet --timeout 1";
        assert_eq!(parsed(&format!("vm run --idle {program}")), Some((true, program.into())));
        assert_eq!(parsed("vm run grep -- -v"), Some((false, "grep -- -v".into())));
        assert_eq!((parsed("vm run --no-such stage06"), parsed("vm run")), (None, None));
    }
}
