//! The command line.

use std::time::Duration;

use clap::{Args, Parser};
pub use common_base::duration;

/// The options that all programs have, and those of the program's own.
#[derive(Parser, Debug)]
pub struct Cli<Own: Args = NoOptions> {
    /// How long to trace: 10s, 2m, 500ms [default: until Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    pub duration: Option<Duration>,
    /// Show the messages of libbpf and the verifier
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
    #[arg(allow_negative_numbers = true, default_value_t = 16384)]
    pub in_flight: u32,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_lines_are_consistent() {
        Cli::<NoOptions>::command().debug_assert();
        Cli::<InFlight>::command().debug_assert();
        assert_eq!(Cli::<InFlight>::parse_from(["stage00"]).own.in_flight, 16384);
        assert!(Cli::<NoOptions>::try_parse_from(["stage01", "-q"]).is_err());
        assert!(Cli::<InFlight>::try_parse_from(["stage00", "--in-flight", "0"]).is_err());
    }
}
