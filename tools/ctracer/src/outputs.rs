//! What is written: with each event, a text or a line of JSON; at the end a summary, and files.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};

use crate::{cli::Ctracer, decode::Layout, model::Trace};

mod folded;
mod html;
pub mod json;
mod perfetto;
pub mod summary;
pub mod text;

type WriteTrace = fn(&mut dyn Write, &Trace, &Layout) -> Result<()>;

/// Files that are open for writing, so that a wrong path is found before the trace and not after it.
pub struct Outputs {
    files: Vec<(PathBuf, File, WriteTrace)>,
}

impl Outputs {
    /// Creates the files that the command line asks for.
    pub fn create(cli: &Ctracer) -> Result<Outputs> {
        let outputs: [(&Option<PathBuf>, WriteTrace); 3] = [
            (&cli.files.perfetto, perfetto::write),
            (&cli.files.html, html::write),
            (&cli.files.folded, |w, trace, _| folded::write(w, trace)),
        ];
        let mut files = Vec::new();
        for (path, write) in outputs {
            if let Some(path) = path {
                let file = File::create(path).with_context(|| {
                    format!("{} cannot be written: give another path", path.display())
                })?;
                files.push((path.clone(), file, write));
            }
        }
        Ok(Outputs { files })
    }

    /// Writes them: each one, also where another one fails.
    pub fn write(self, trace: &Trace, layout: &Layout) -> Result<()> {
        let mut failed = Vec::new();
        for (path, file, write) in self.files {
            let mut file = BufWriter::new(file);
            match write(&mut file, trace, layout).and_then(|()| Ok(file.flush()?)) {
                Ok(()) => eprintln!("ctracer: {} written", path.display()),
                Err(error) => failed.push(format!("{} is incomplete: {error:#}", path.display())),
            }
        }
        ensure!(failed.is_empty(), "{}", failed.join("\nstage12: "));
        Ok(())
    }
}
