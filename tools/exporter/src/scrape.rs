//! A scrape: what was measured until now, compared with the kernel's counts, as metrics.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use common::Session;
use libbpf_rs::skel::Skel;

use crate::{
    audit::Audit,
    canary::Canary,
    metrics::{Build, Format, Ios, Metrics, reads_not_measured},
    requests::Requests,
    series::{Histograms, Series, Sums},
    shared::{Pages, Shared},
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
    fn read(&self) -> Result<BTreeMap<Series, Sums>> {
        match self {
            Measured::Requests(requests) => requests.read(),
            Measured::Bios(histograms) => histograms.read(),
        }
    }
}

/// All that a scrape reads.
pub struct Scraper<'a> {
    skel: &'a TraceSkel<'a>,
    measured: Measured<'a>,
    with_parts: bool,
    pages: Shared<Pages>,
    build: Build,
    audit: Audit,
    /// With `--canary`: it reads after each scrape.
    pub canary: Option<Canary>,
}

impl<'a> Scraper<'a> {
    /// Begins to compare with what the kernel counts: the programs have to be attached by now.
    pub fn new(
        skel: &'a TraceSkel<'a>,
        measured: Measured<'a>,
        with_parts: bool,
        cpus: u32,
    ) -> Result<Scraper<'a>> {
        let pages = Shared::new(&skel.maps.pages, cpus as usize)?;
        let kernel =
            fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel's release")?;
        let build = Build { version: env!("CARGO_PKG_VERSION"), kernel: kernel.trim().to_owned() };
        let is_of_bios = matches!(measured, Measured::Bios(_));
        let audit = Audit::begin(is_of_bios, || measured.read())?;
        Ok(Scraper { skel, measured, with_parts, pages, build, audit, canary: None })
    }

    /// The text of all metrics. Fails where the programs do not run any more.
    pub fn scrape(&mut self, session: &Session, format: Format) -> Result<String> {
        session.hooks_still_run()?;
        let counts = common::counters(&self.skel.maps.bss_data)?;
        let look = self.audit.look()?; // before our figures are read
        let series = self.measured.read()?;
        let gaps = self.audit.compare(&look, &series);
        let ios = match &self.measured {
            Measured::Requests(requests) => Ios::requests(series, requests.others()),
            Measured::Bios(_) => Ios::bios(series, self.with_parts, counts),
        };
        let metrics = Metrics {
            build: self.build.clone(),
            ios,
            gaps,
            canary: self.canary.as_ref().map(Canary::sight),
            pages: self.pages.iter().map(Pages::read).collect(),
            reads_not_measured: reads_not_measured(counts),
            skipped: session.times_skipped(self.skel.object())?,
        };
        let text = metrics.encode(format);
        if let Some(canary) = &mut self.canary {
            canary.fly();
        }
        text
    }
}
