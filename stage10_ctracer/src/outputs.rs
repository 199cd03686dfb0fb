//! The files that are written at the end.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::PathBuf,
};

use anyhow::{Context, Result};

use crate::{cli::Ctracer, decode::Layout, folded, html, model::Trace, perfetto};

type WriteTrace = fn(&mut dyn Write, &Trace, &Layout) -> Result<()>;

/// Files that are open for writing, so that a wrong path is found before the trace and not after it.
pub struct Outputs {
    files: Vec<(PathBuf, File, WriteTrace)>,
}

impl Outputs {
    /// Creates the files that the command line asks for.
    pub fn create(cli: &Ctracer) -> Result<Outputs> {
        let outputs: [(&Option<PathBuf>, WriteTrace); 3] = [
            (&cli.perfetto, perfetto::write),
            (&cli.html, html::write),
            (&cli.folded, |w, trace, _| folded::write(w, trace)),
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

    /// Writes them.
    pub fn write(self, trace: &Trace, layout: &Layout) -> Result<()> {
        for (path, file, write) in self.files {
            let mut file = BufWriter::new(file);
            write(&mut file, trace, layout)
                .and_then(|()| Ok(file.flush()?))
                .with_context(|| format!("{} is incomplete", path.display()))?;
            eprintln!("stage10: {} written", path.display());
        }
        Ok(())
    }
}
