//! The files that a report is written to.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufReader, BufWriter, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use common::printable;

use crate::{cli::Files, recording, report::TraceReport};

mod folded;
mod html;
mod perfetto;

type WriteReport = fn(&mut dyn Write, &TraceReport) -> Result<()>;

/// Files that are open for writing, so that a wrong path is found before the trace and not after it: the
/// name of each, as a terminal may show it, and what writes it.
pub struct Outputs(Vec<(String, File, WriteReport)>);

impl Outputs {
    /// Opens the files that the command line asks for. Wrong usage where two of them are the same one,
    /// or one is `input`. One that is no file, as /dev/null, takes any number.
    pub fn create(files: &Files, input: Option<&File>) -> Result<Outputs> {
        let outputs: [(&Option<PathBuf>, WriteReport); 3] = [
            (&files.perfetto, perfetto::write),
            (&files.html, html::write),
            (&files.folded, folded::write),
        ];
        let place =
            |file: &File| file.metadata().map(|data| (data.is_file(), data.dev(), data.ino()));
        let mut places: Vec<_> = input.map(place).transpose()?.into_iter().collect();
        let mut created = Vec::new();
        for (path, write) in outputs {
            let Some(path) = path else { continue };
            let name = shown(path);
            // It is emptied when it is known that it is nothing else.
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
            let file =
                file.with_context(|| format!("{name} cannot be written: give another path"))?;
            let place = place(&file)?;
            if place.0 && places.contains(&place) {
                let why = "cannot hold two outputs, or be read meanwhile: give each its own file";
                clap::Error::raw(ErrorKind::ArgumentConflict, format!("{name} {why}\n")).exit();
            }
            places.push(place);
            created.push((name, file, write));
        }
        for (_, file, _) in &created {
            if file.metadata()?.is_file() {
                file.set_len(0)?;
            }
        }
        Ok(Outputs(created))
    }

    /// Writes them: each one, also where another one fails.
    pub fn write(self, report: TraceReport) -> Result<()> {
        let (report, mut failed) = (report.finish(), Vec::new());
        for (name, file, write) in self.0 {
            let mut file = BufWriter::new(file);
            match write(&mut file, &report).and_then(|()| Ok(file.flush()?)) {
                Ok(()) => say(&format!("{name} written")),
                Err(error) => failed.push(format!("{name} is incomplete: {error:#}")),
            }
        }
        ensure!(failed.is_empty(), "{}", failed.join("\nctracer: "));
        Ok(())
    }
}

/// `ctracer report`: writes files out of one of JSON lines. Of a damaged one, what can be told is
/// written, and the run fails.
pub fn report(path: &Path, memory: usize, files: &Files) -> Result<()> {
    let name = shown(path);
    let file = File::open(path).with_context(|| {
        format!("{name} cannot be read: give one that ctracer --json has written")
    })?;
    let read = recording::read(BufReader::new(&file), memory);
    let (report, damage) = read.with_context(|| name.clone())?;
    let written = Outputs::create(files, Some(&file)).and_then(|outputs| outputs.write(report));
    if let (Err(_), Some(damage)) = (&written, &damage) {
        say(&format!("{name}: {damage}"));
    }
    written?;
    damage.map_or(Ok(()), |damage| bail!("{name}: {damage}"))
}

/// Writes a line to stderr. `eprintln!` would panic where nobody reads it any more.
fn say(text: &str) {
    writeln!(io::stderr(), "ctracer: {text}").ok();
}

/// A path, as a terminal may show it.
fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

#[cfg(test)]
mod tests;
