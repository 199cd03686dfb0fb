//! A scrape: what was measured until now, compared with the kernel's counts, as metrics.

use std::{collections::BTreeMap, fs, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use common::Session;
use libbpf_rs::skel::Skel;

use crate::{
    audit::{Audit, Gap, Ours},
    canary::Canary,
    looks::{Look, Looks},
    metrics::{Build, Format, Ios, Metrics, reads_not_measured},
    requests::Requests,
    series::{Histograms, Series, Sums},
    shared::{Pages, Shared},
    stalls::Stalls,
    trace::TraceSkel,
};

/// What the histograms are of.
pub enum Measured<'a> {
    /// Requests, as the kernel's own counters have them.
    Requests(Requests),
    /// Bios, from their submission on.
    Bios(Histograms<'a>),
}

impl Measured<'_> {
    fn read(&self, look: &Look) -> Result<Ours> {
        let series = match self {
            Measured::Requests(requests) => requests.read(look),
            Measured::Bios(histograms) => histograms.read(look)?,
        };
        Ok(Ours { series, at: Instant::now() })
    }
}

/// All that a scrape reads.
pub struct Scraper<'a> {
    skel: &'a TraceSkel<'a>,
    measured: Measured<'a>,
    with_parts: bool,
    pages: Shared<Pages>,
    build: Build,
    looks: Looks,
    /// The last one.
    look: Look,
    audit: Audit,
    stalls: Stalls,
    /// With `--canary`: it reads after each scrape.
    pub canary: Option<Canary>,
}

impl<'a> Scraper<'a> {
    /// Begins to compare with what the kernel counts: the programs have to be attached by now.
    pub fn new(
        skel: &'a TraceSkel<'a>,
        measured: Measured<'a>,
        with_parts: bool,
        looks: Looks,
        cpus: u32,
    ) -> Result<Scraper<'a>> {
        let pages = Shared::new(&skel.maps.pages, cpus as usize)?;
        let kernel =
            fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel's release")?;
        let build = Build { version: env!("CARGO_PKG_VERSION"), kernel: kernel.trim().to_owned() };
        let audit = Audit::new(matches!(measured, Measured::Bios(_)));
        let (look, stalls, canary) = (Look::default(), Stalls::default(), None);
        let mut scraper = Scraper {
            skel,
            measured,
            with_parts,
            pages,
            build,
            looks,
            look,
            audit,
            stalls,
            canary,
        };
        // The first look has the names of the disks. The second one has ours before it, and after it.
        scraper.figures()?;
        scraper.figures()?;
        Ok(scraper)
    }

    /// What was measured, and what the kernel has counted beside that.
    fn figures(&mut self) -> Result<(BTreeMap<Series, Sums>, Vec<Gap>)> {
        let awaited = self.audit.awaits_disks();
        let before = awaited.then(|| self.measured.read(&self.look)).transpose()?;
        self.look = self.looks.look()?; // before our figures are read
        let ours = self.measured.read(&self.look)?;
        let gaps = self.audit.compare(before.as_ref(), &self.look, &ours);
        Ok((ours.series, gaps))
    }

    /// The text of all metrics. Fails where the programs do not run any more. Waits for no disk, and for no file:
    /// what may let it wait is read by [`Looks`], and by the [`Canary`].
    pub fn scrape(&mut self, session: &Session, format: Format) -> Result<String> {
        let counts = common::counters(&self.skel.maps.bss_data)?;
        let (series, gaps) = self.figures()?;
        let ios = match &self.measured {
            Measured::Requests(requests) => Ios::requests(series, requests.others()),
            Measured::Bios(_) => Ios::bios(series, self.with_parts, counts),
        };
        let metrics = Metrics {
            build: self.build.clone(),
            ios,
            gaps,
            stalls: self.stalls.of(&self.look),
            canary: self.canary.as_ref().map(Canary::sight),
            pages: self.pages.iter().map(Pages::read).collect(),
            reads_not_measured: reads_not_measured(counts),
            skips: session.skips(self.skel.object())?,
        };
        let text = metrics.encode(format);
        if let Some(canary) = &mut self.canary {
            canary.fly();
        }
        text
    }
}

/// The texts for all who have asked before the first of them was made.
#[derive(Default)]
pub struct Texts(Vec<(Format, Arc<Vec<u8>>)>);

impl Texts {
    /// That of this format, made if there is none yet.
    pub fn get(
        &mut self,
        format: Format,
        make: impl FnOnce() -> Result<String>,
    ) -> Result<Arc<Vec<u8>>> {
        if let Some((_, text)) = self.0.iter().find(|(known, _)| *known == format) {
            return Ok(Arc::clone(text));
        }
        let text = Arc::new(make()?.into_bytes());
        self.0.push((format, Arc::clone(&text)));
        Ok(text)
    }
}
