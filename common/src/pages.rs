//! Man pages and completions of a program, for its Debian package: see `.ci/deb`.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;

use crate::cli::{EXIT_STATUS, NOTES};

/// The directory to which a program writes these instead of running.
pub const DIRECTORY: &str = "WORKSHOP_PAGES";

/// Writes them: `slow_io.1`, `slow_io.bash`, `_slow_io` for zsh, `slow_io.fish`.
pub fn write(command: Command, directory: &Path) -> io::Result<()> {
    let mut whole = command.clone().disable_help_subcommand(true);
    whole.build();
    write_man(&whole, directory)?;
    let name = command.get_name().to_owned();
    let mut command = command;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, &name, directory)?;
    }
    Ok(())
}

/// The page of a command, and those of its subcommands.
fn write_man(command: &Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write_man(subcommand, directory)?;
    }
    let man = Man::new(command.clone());
    let mut file = File::create(directory.join(man.get_filename()))?;
    file.write_all(&page(command, &man)?)
}

fn page(command: &Command, man: &Man) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    writeln!(page, ".SH \"EXIT STATUS\"")?;
    for (code, meaning) in EXIT_STATUS {
        writeln!(page, ".TP\n\\fB{code}\\fR\n{meaning}")?;
    }
    // What the help says below the options is about tracing, which a subcommand does not do.
    if command.get_after_help().is_some() {
        writeln!(page, ".SH NOTES\n{}", NOTES.replace('-', "\\-"))?;
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_says_how_the_program_ends() {
        let directory = tempfile::tempdir().unwrap();
        let command = Command::new("disks")
            .version("1")
            .after_help("more")
            .subcommand(Command::new("report").about("reports"));
        write(command, directory.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        for page in ["disks.1", "disks-report.1"].map(read) {
            let (_, status) = page.split_once(".SH \"EXIT STATUS\"\n").unwrap();
            for (code, meaning) in EXIT_STATUS {
                assert!(status.contains(&format!("\\fB{code}\\fR\n{meaning}\n")), "{page}");
            }
            assert!(!page.contains("EXTRA") && !page.contains("help(1)"), "{page}");
        }
        assert!(read("disks.1").contains(".SH NOTES\nCtrl\\-C "));
        assert!(read("disks.1").contains("disks\\-report(1)"));
        for name in ["disks.bash", "_disks", "disks.fish"] {
            assert!(read(name).contains("report"), "{name}");
        }
    }
}
