//! Man page and completions of a program, for its Debian package: see `.ci/deb`.

use std::{io, path::Path};

use clap::Command;
use clap_complete::{Shell, generate_to};

/// The directory to which a program writes these instead of running.
pub const DIRECTORY: &str = "WORKSHOP_PAGES";

/// Writes them: `slow_io.1`, `slow_io.bash`, `_slow_io` for zsh, `slow_io.fish`.
pub fn write(mut command: Command, directory: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, &name, directory)?;
    }
    clap_mangen::generate_to(command, directory)
}
