//! The metrics, and their two text formats.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use anyhow::{Context, Result};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, text},
    metrics::{MetricType, exemplar::Exemplar},
    registry::{Registry, Unit},
};

use crate::{
    series::{PARTS, Series, Sums, limits},
    trace::types::bss,
};

/// The text format that a client asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Format {
    /// That of the OpenMetrics standard.
    OpenMetrics,
    /// The older one of Prometheus, version 0.0.4.
    Prometheus,
}

impl Format {
    /// The header `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// What runs here.
#[derive(Clone, Debug)]
pub struct Build {
    /// Of the exporter.
    pub version: &'static str,
    /// The kernel's release.
    pub kernel: String,
}

/// What was not measured, and why.
#[derive(Debug)]
pub struct NotMeasured {
    bios: [(&'static str, u64); 4],
    reads: [(&'static str, u64); 3],
}

impl From<&bss> for NotMeasured {
    fn from(counts: &bss) -> NotMeasured {
        NotMeasured {
            bios: [
                ("dropped", counts.dropped),
                ("unmatched", counts.unmatched),
                ("refused", counts.refused),
                ("too_many_disks", counts.without_series),
            ],
            reads: [
                ("dropped", counts.reads_dropped),
                ("unmatched", counts.reads_unmatched),
                ("asynchronous", counts.reads_not_judged),
            ],
        }
    }
}

/// All that one scrape gets.
#[derive(Debug)]
pub struct Metrics {
    /// What runs.
    pub build: Build,
    /// The bios of each disk and operation.
    pub series: BTreeMap<Series, Sums>,
    /// Whether the parts of their latencies are known.
    pub with_parts: bool,
    /// Of each CPU: pages hit, missed, readahead.
    pub pages: Vec<[u64; 3]>,
    /// What was not measured.
    pub not_measured: NotMeasured,
    /// How often a BPF program was skipped.
    pub skipped: u64,
}

impl Metrics {
    /// The text that is served.
    pub fn encode(self, format: Format) -> Result<String> {
        let mut registry = Registry::with_prefix("storage");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        text::encode(&mut text, &registry).context("the metrics could not be written")?;
        Ok(if format == Format::OpenMetrics { text } else { older(&text) })
    }
}

const BIOS_NOT_MEASURED: &str = "Bios that are in no histogram; unmatched: completions of bios that \
    no submit_bio() started, such as the clones that md makes of a bio that is measured; refused: attempts \
    that would have had to wait (REQ_NOWAIT), and are made again";

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let help = "What runs: the exporter's version and the kernel's release";
        let mut info =
            encoder.encode_descriptor("exporter_build_info", help, None, MetricType::Gauge)?;
        let labels = [("version", self.build.version), ("kernel", &self.build.kernel)];
        info.encode_family(&labels)?.encode_gauge(&1_u64)?;

        let help = "Time from submit_bio() to bio_endio(), by disk and operation";
        let (seconds, histogram) = (Some(&Unit::Seconds), MetricType::Histogram);
        let mut family = encoder.encode_descriptor("bio_latency", help, seconds, histogram)?;
        for ((disk, operation), sums) in &self.series {
            let limits = limits().map(|ns| ns.map_or(f64::MAX, in_seconds));
            let buckets: Vec<_> = limits.zip(sums.buckets).collect();
            family
                .encode_family(&[("disk", &*escaped(disk)), ("op", operation)])?
                .encode_histogram(
                    in_seconds(sums.sum),
                    sums.buckets.iter().sum(),
                    &buckets,
                    None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>,
                )?;
        }
        if self.with_parts {
            let help = "Time that bios spent in each part of their way, as `slow_io` divides it; a part \
                        that cannot be told from the next one is included there; unknown: of bios \
                        of which no part is known";
            let mut family =
                encoder.encode_descriptor("bio_part", help, seconds, MetricType::Counter)?;
            for ((disk, operation), sums) in &self.series {
                // No bio had this part, or of none it is known, which is not 0.
                let parts = PARTS.into_iter().zip(sums.parts).filter(|(_, ns)| *ns > 0);
                for (part, ns) in parts {
                    let labels = [("disk", &*escaped(disk)), ("op", operation), ("part", part)];
                    count(&mut family, &labels, in_seconds(ns))?;
                }
            }
        }
        let help = "Pages that reads asked for and found in memory (hit) or did not (miss), and \
                    pages that were brought in beyond those (readahead)";
        let mut family =
            encoder.encode_descriptor("page_cache_pages", help, None, MetricType::Counter)?;
        for (index, result) in ["hit", "miss", "readahead"].into_iter().enumerate() {
            let pages: u64 = self.pages.iter().map(|cpu| cpu[index]).sum();
            count(&mut family, &[("result", result)], pages as f64)?;
        }
        for (name, help, counts) in [
            ("bios_not_measured", BIOS_NOT_MEASURED, &self.not_measured.bios[..]),
            ("reads_not_measured", "Reads whose pages are not counted", &self.not_measured.reads),
        ] {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for &(reason, number) in counts {
                count(&mut family, &[("reason", reason)], number as f64)?;
            }
        }
        let help = "How often the kernel skipped a BPF program that was running on the same CPU";
        let mut family =
            encoder.encode_descriptor("programs_skipped", help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabelSet, _, f64>(&self.skipped, None)
    }
}

fn count(family: &mut MetricEncoder, labels: &impl EncodeLabelSet, value: f64) -> fmt::Result {
    family.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

/// The value of a label, as both formats have it.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

fn in_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The older format: there, a counter's name has `_total` in its comments, too, and there are no units
/// and no end.
fn older(text: &str) -> String {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let counters: Vec<&str> = types.filter(|(_, kind)| *kind == "counter").map(|t| t.0).collect();
    let mut older = String::with_capacity(text.len());
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), ..) => continue,
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(&name) => {
                older += &format!("# {what} {name}_total {rest}\n");
            }
            _ => older.extend([line, "\n"]),
        }
    }
    older
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_have_all() {
        let metrics = || Metrics {
            build: Build { version: "1", kernel: "6".into() },
            series: BTreeMap::from([(
                ("v\"d\\a\n".to_owned(), "read"),
                Sums { parts: [0, 0, 0, 0, 1_000, 3_000_000_000], ..Sums::default() },
            )]),
            with_parts: true,
            pages: vec![[1, 2, 3], [10, 20, 30]],
            not_measured: NotMeasured {
                bios: [("dropped", 1), ("unmatched", 2), ("refused", 9), ("too_many_disks", 3)],
                reads: [("dropped", 4), ("unmatched", 5), ("asynchronous", 6)],
            },
            skipped: 7,
        };
        let new = metrics().encode(Format::OpenMetrics).unwrap();
        let old = metrics().encode(Format::Prometheus).unwrap();
        for line in [
            "storage_exporter_build_info{version=\"1\",kernel=\"6\"} 1",
            "storage_bio_latency_seconds_bucket{le=\"+Inf\",disk=\"v\\\"d\\\\a\\n\",op=\"read\"} 0",
            "storage_bio_part_seconds_total{disk=\"v\\\"d\\\\a\\n\",op=\"read\",part=\"mapper\"} 0.000001",
            "storage_bio_part_seconds_total{disk=\"v\\\"d\\\\a\\n\",op=\"read\",part=\"unknown\"} 3.0",
            "storage_page_cache_pages_total{result=\"miss\"} 22.0",
            "storage_bios_not_measured_total{reason=\"unmatched\"} 2.0",
            "storage_reads_not_measured_total{reason=\"asynchronous\"} 6.0",
            "storage_programs_skipped_total 7",
        ] {
            assert!(
                new.lines().any(|l| l == line) && old.lines().any(|l| l == line),
                "{line}: {new}"
            );
        }
        assert!(!new.contains("part=\"wait\""), "unknown is not 0: {new}");
        assert!(new.ends_with("# EOF\n") && new.contains("# UNIT storage_bio_latency_seconds"));
        assert!(new.contains("# TYPE storage_programs_skipped counter\n"), "{new}");
        assert!(old.contains("# TYPE storage_programs_skipped_total counter\n"), "{old}");
        assert!(!old.contains("# EOF") && !old.contains("# UNIT"), "{old}");
    }
}
