//! The command line.

use std::time::Duration;

use clap::{Args, Command, Parser};
pub use common_base::duration;

/// Wrong usage.
pub(crate) const USAGE: u8 = 2;
/// This machine cannot run the program.
pub(crate) const UNSUPPORTED: u8 = 3;

/// What the help says below the options.
pub(crate) const NOTES: &str = "\
Ctrl-C and SIGTERM end the program as --duration does: it prints its results.
Privileges: root. For all programs but stage12 and ctracer, these capabilities are enough:
CAP_BPF and CAP_PERFMON (to load BPF programs), CAP_DAC_READ_SEARCH (to read tracefs),
CAP_SYSLOG (to see the addresses of functions), and CAP_DAC_OVERRIDE for event lines.";

/// The exit codes, and what each of them means.
pub(crate) const EXIT_STATUS: [(u8, &str); 4] = [
    (0, "done"),
    (1, "failed"),
    (USAGE, "wrong usage"),
    (UNSUPPORTED, "this machine cannot run it"),
];

/// The options that all programs have, and those of the program's own.
#[derive(Parser, Debug)]
pub struct Cli<Own: Args = NoOptions> {
    /// How long to trace: 10s, 2m, 500ms [default: until Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub duration: Option<Duration>,
    /// Show the messages of libbpf and the verifier, and the counters that a tool leaves out
    #[arg(short, long)]
    pub verbose: bool,
    /// The options that only this program has.
    #[command(flatten)]
    pub own: Own,
}

/// No options beyond the common ones.
#[derive(Args, Debug)]
pub struct NoOptions {}

/// `--in-flight`.
#[derive(Args, Debug)]
pub struct InFlight {
    /// How many I/Os the map has room for at a time; more are counted as dropped
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    #[arg(default_value_t = 16384)]
    pub in_flight: u32,
}

/// What the values of options are called that are numbers, times or sizes.
const NUMBERS: [&str; 5] = ["N", "TIME", "BYTES", "SIZE", "PID"];

/// Has the parser take `-1ms` behind such an option for its value, and say what is wrong with it: clap would
/// take it for other options, and say that there are none.
pub(crate) fn with_negative_values(command: Command) -> Command {
    let is_number = |arg: &clap::Arg| {
        let mut names = arg.get_value_names().into_iter().flatten();
        !arg.is_positional() && names.any(|name| NUMBERS.contains(&name.as_str()))
    };
    let command = command.mut_args(|arg| match is_number(&arg) {
        true => arg.allow_hyphen_values(true),
        false => arg,
    });
    command.mut_subcommands(with_negative_values)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_negative_value_is_a_value() {
        let mut command = with_negative_values(Cli::<InFlight>::command());
        for (option, value) in [("--in-flight", "-1"), ("--duration", "-1ms")] {
            let error = command.try_get_matches_from_mut(["stage00", option, value]).unwrap_err();
            let said = error.to_string();
            assert!(said.contains(&format!("invalid value '{value}'")), "{said}");
        }
    }

    #[test]
    fn the_command_lines_are_consistent() {
        Cli::<NoOptions>::command().debug_assert();
        Cli::<InFlight>::command().debug_assert();
        assert_eq!(Cli::<InFlight>::parse_from(["stage00"]).own.in_flight, 16384);
        assert!(Cli::<NoOptions>::try_parse_from(["stage01", "-q"]).is_err());
        assert!(Cli::<InFlight>::try_parse_from(["stage00", "--in-flight", "0"]).is_err());
    }
}
