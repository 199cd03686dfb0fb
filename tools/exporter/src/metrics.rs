//! The metrics, and their two text formats.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use anyhow::{Context, Result};
use prometheus_client::{
    collector::Collector,
    encoding::{
        DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, prometheus_text, text,
    },
    metrics::{MetricType, exemplar::Exemplar},
    registry::{Registry, Unit},
};

use crate::{
    audit::Gap,
    canary::Sight,
    requests::OTHERS,
    series::{PARTS, Series, Sums, Times, limits},
    stalls::Stall,
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
            Format::Prometheus => prometheus_text::CONTENT_TYPE,
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

/// Numbers by the reason of what they count.
pub type Reasons<const N: usize> = [(&'static str, u64); N];

/// What is measured of each disk and operation, and what is not.
#[derive(Debug)]
pub enum Ios {
    /// Requests, as the kernel's own counters have them.
    Requests {
        /// Of each disk and operation.
        series: BTreeMap<Series, Sums>,
        /// Requests that are in no histogram.
        not_measured: Reasons<3>,
        /// Attempts that were not the last one.
        retried: Reasons<2>,
        /// Requests that have the start of another one.
        shared_start: u64,
    },
    /// Bios.
    Bios {
        /// Of each disk and operation.
        series: BTreeMap<Series, Sums>,
        /// Whether the parts of their latencies are known.
        with_parts: bool,
        /// Bios that are in no histogram.
        not_measured: Reasons<4>,
    },
}

impl Ios {
    /// Requests: their histograms, and what [`Requests::others`](crate::requests::Requests::others) has.
    pub fn requests(series: BTreeMap<Series, Sums>, others: [u64; OTHERS]) -> Ios {
        let [no_statistics, passthrough, without_place, partial, requeued, shared_start] = others;
        Ios::Requests {
            series,
            not_measured: [
                ("no_statistics", no_statistics),
                ("passthrough", passthrough),
                ("too_many_disks", without_place),
            ],
            retried: [("partial", partial), ("requeued", requeued)],
            shared_start,
        }
    }

    /// Bios: their histograms, and what the BPF programs have counted.
    pub fn bios(series: BTreeMap<Series, Sums>, with_parts: bool, counts: &bss) -> Ios {
        let not_measured = [
            ("dropped", counts.dropped),
            ("unmatched", counts.unmatched),
            ("refused", counts.refused),
            ("too_many_disks", counts.without_series),
        ];
        Ios::Bios { series, with_parts, not_measured }
    }
}

/// The reads whose pages are not counted.
pub fn reads_not_measured(counts: &bss) -> Reasons<3> {
    [
        ("dropped", counts.reads_dropped),
        ("unmatched", counts.reads_unmatched),
        ("asynchronous", counts.reads_not_judged),
    ]
}

/// All that one scrape gets.
#[derive(Debug)]
pub struct Metrics {
    /// What runs.
    pub build: Build,
    /// Of the disks.
    pub ios: Ios,
    /// By how much that differs from what the kernel has counted.
    pub gaps: Vec<Gap>,
    /// Since when they complete nothing.
    pub stalls: Vec<Stall>,
    /// With `--canary`.
    pub canary: Option<Sight>,
    /// Of each CPU: pages hit, missed, readahead.
    pub pages: Vec<[u64; 3]>,
    /// Reads whose pages are not counted.
    pub reads_not_measured: Reasons<3>,
    /// How often each BPF program was skipped.
    pub skips: Vec<(String, u64)>,
}

impl Metrics {
    /// The text that is served.
    pub fn encode(self, format: Format) -> Result<String> {
        let mut registry = Registry::with_prefix("storage");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        let written = match format {
            Format::OpenMetrics => text::encode(&mut text, &registry),
            Format::Prometheus => prometheus_text::encode(&mut text, &registry),
        };
        written.context("the metrics could not be written")?;
        Ok(text)
    }
}

const BIOS_NOT_MEASURED: &str = "Bios that are in no histogram; unmatched: completions of bios that \
    no submit_bio() started, such as the clones that md makes of a bio that is measured; refused: attempts \
    that would have had to wait (REQ_NOWAIT), and are made again";
const REQUESTS_NOT_MEASURED: &str = "Requests that are in no histogram; no_statistics: of disks whose \
    queue/iostats is 0, where the kernel notes no time; passthrough: commands that a driver or an \
    application gives a disk";
const REQUESTS: &str = "Time from the allocation of a request to its completion, by disk and operation: await of \
    iostat";
const PHASES: [(&str, &str); 3] = [
    ("request_queue", "The part of that for which the driver did not have the request"),
    (
        "request_device",
        "The part of that for which the driver had the request, all its starts together",
    ),
    (
        "request_undivided",
        "All the time of requests that are in neither of these two: the kernel has not noted when the driver \
         got them, as of a write without data, which asks for a flush",
    ),
];
const REQUESTS_SHARED_START: &str = "Requests to which the kernel gave the start of another one, as it does \
    from 6.9 on in a plug: their latency is too long by the CPU time between the two";
const REQUESTS_RETRIED: &str = "Attempts that did not complete a request: of a part of it, or of none, \
    and then it was requeued; the latency of the request has all of them";

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let help = "What runs: the exporter's version and the kernel's release";
        let mut info =
            encoder.encode_descriptor("exporter_build_info", help, None, MetricType::Gauge)?;
        let labels = [("version", self.build.version), ("kernel", &self.build.kernel)];
        info.encode_family(&labels)?.encode_gauge(&1_u64)?;

        match &self.ios {
            Ios::Requests { series, .. } => requests(&mut encoder, series)?,
            Ios::Bios { series, with_parts, .. } => {
                let help = "Time from submit_bio() to bio_endio(), by disk and operation";
                let all = series.iter().map(|(of, sums)| (of, &sums.all));
                histograms(&mut encoder, "bio", help, all)?;
                if *with_parts {
                    parts(&mut encoder, series)?;
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
        match &self.ios {
            Ios::Requests { not_measured, retried, shared_start, .. } => {
                let name = "requests_not_measured";
                reasons(&mut encoder, name, REQUESTS_NOT_MEASURED, not_measured)?;
                reasons(&mut encoder, "requests_retried", REQUESTS_RETRIED, retried)?;
                let name = "requests_shared_start";
                total(&mut encoder, name, REQUESTS_SHARED_START, *shared_start)?;
            }
            Ios::Bios { not_measured, .. } => {
                reasons(&mut encoder, "bios_not_measured", BIOS_NOT_MEASURED, not_measured)?;
            }
        }
        gaps(&mut encoder, &self.gaps)?;
        stalls(&mut encoder, &self.stalls)?;
        if let Some(sight) = &self.canary {
            canary(&mut encoder, sight)?;
        }
        let help = "Reads whose pages are not counted";
        reasons(&mut encoder, "reads_not_measured", help, &self.reads_not_measured)?;
        let help = "How often the kernel skipped a BPF program that was running on the same CPU";
        let (name, counter) = ("programs_skipped", MetricType::Counter);
        let mut family = encoder.encode_descriptor(name, help, None, counter)?;
        for (program, times) in &self.skips {
            count(&mut family, &[("program", program.as_str())], *times as f64)?;
        }
        Ok(())
    }
}

/// A family of histograms, of all series that have this one.
fn histograms<'a>(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    series: impl Iterator<Item = (&'a Series, &'a Times)>,
) -> fmt::Result {
    let (seconds, histogram) = (Some(&Unit::Seconds), MetricType::Histogram);
    let mut family = encoder.encode_descriptor(name, help, seconds, histogram)?;
    for ((disk, operation), times) in series {
        let limits = limits().map(|ns| ns.map_or(f64::INFINITY, in_seconds));
        let buckets: Vec<_> = limits.zip(times.buckets).collect();
        family.encode_family(&[("disk", disk.as_str()), ("op", operation)])?.encode_histogram(
            in_seconds(times.sum),
            times.count(),
            &buckets,
            None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>,
        )?;
    }
    Ok(())
}

/// The times of requests, and the two that they consist of, as far as that is known.
fn requests(encoder: &mut DescriptorEncoder, series: &BTreeMap<Series, Sums>) -> fmt::Result {
    histograms(encoder, "request", REQUESTS, series.iter().map(|(of, sums)| (of, &sums.all)))?;
    for (phase, (name, help)) in PHASES.into_iter().enumerate() {
        // Of none of them is it known, which is not 0.
        let known = series.iter().map(|(of, sums)| (of, &sums.phases[phase]));
        histograms(encoder, name, help, known.filter(|(_, times)| times.count() > 0))?;
    }
    Ok(())
}

fn parts(encoder: &mut DescriptorEncoder, series: &BTreeMap<Series, Sums>) -> fmt::Result {
    let help = "Time that bios spent in each part of their way, as `slow_io` divides it; a part \
                that cannot be told from the next one is included there; unknown: of bios \
                of which no part is known";
    let unit = Some(&Unit::Seconds);
    let mut family = encoder.encode_descriptor("bio_part", help, unit, MetricType::Counter)?;
    for ((disk, operation), sums) in series {
        // No bio had this part, or of none it is known, which is not 0.
        let parts = PARTS.into_iter().zip(sums.parts).filter(|(_, ns)| *ns > 0);
        for (part, ns) in parts {
            let labels = [("disk", disk.as_str()), ("op", operation), ("part", part)];
            count(&mut family, &labels, in_seconds(ns))?;
        }
    }
    Ok(())
}

const UNACCOUNTED: &str = "Requests that only one of both has counted: missing_in exporter: the kernel, in \
    /sys/block/DISK/stat, and no histogram has them; missing_in kernel: the other way round";
const AUDITED: &str = "Whether the figures of a disk can be compared with the kernel's: 1 if so";
const STATISTICS: &str = "Whether the kernel keeps statistics of a disk, its queue/iostats: where this is 0, \
    its requests are in no histogram, and in not_measured";
const AGE: &str = "How long ago the kernel's counters of a disk were read: more than a scrape takes only where \
    reading /sys/block/DISK has to wait, as it may for a disk that hangs";

fn gaps(encoder: &mut DescriptorEncoder, gaps: &[Gap]) -> fmt::Result {
    let (name, counter) = ("unaccounted_requests", MetricType::Counter);
    let mut family = encoder.encode_descriptor(name, UNACCOUNTED, None, counter)?;
    for Gap { disk, missing_in, .. } in gaps {
        // Where they cannot be compared, none is served: 0 would say that they are the same.
        let (exporter, kernel) = missing_in.unzip();
        for (side, number) in [("exporter", exporter), ("kernel", kernel.flatten())] {
            if let Some(number) = number {
                let labels = [("disk", disk.as_str()), ("missing_in", side)];
                count(&mut family, &labels, number as f64)?;
            }
        }
    }
    let gauge = MetricType::Gauge;
    let mut family = encoder.encode_descriptor("disk_audited", AUDITED, None, gauge)?;
    for Gap { disk, missing_in, .. } in gaps {
        let is_audited = u64::from(missing_in.is_some());
        family.encode_family(&[("disk", disk)])?.encode_gauge(&is_audited)?;
    }
    let mut family = encoder.encode_descriptor("disk_statistics", STATISTICS, None, gauge)?;
    for Gap { disk, has_statistics, .. } in gaps {
        if let Some(has) = has_statistics {
            family.encode_family(&[("disk", disk)])?.encode_gauge(&u64::from(*has))?;
        }
    }
    let mut family = encoder.encode_descriptor("look_age", AGE, Some(&Unit::Seconds), gauge)?;
    for Gap { disk, age, .. } in gaps {
        family.encode_family(&[("disk", disk)])?.encode_gauge(&age.as_secs_f64())?;
    }
    Ok(())
}

const STALLED: &str = "For how long a disk is known to have had requests in flight, and to have completed none, by \
    /sys/block/DISK/stat";

fn stalls(encoder: &mut DescriptorEncoder, stalls: &[Stall]) -> fmt::Result {
    let (unit, gauge) = (Some(&Unit::Seconds), MetricType::Gauge);
    let mut family = encoder.encode_descriptor("disk_stalled", STALLED, unit, gauge)?;
    for Stall { disk, age } in stalls {
        family.encode_family(&[("disk", disk)])?.encode_gauge(&age.as_secs_f64())?;
    }
    Ok(())
}

const CANARY_LATENCY: &str = "How long the last read for --canary took by the histograms; not served where \
    other reads of the disk ended at its time, or none did, nor while a read is pending";
const CANARY_WAIT: &str = "How long the thread waited for that read; not served while another one is pending, or \
    if it failed";
const CANARY_PENDING: &str = "For how long the read for --canary has been pending at the time of this scrape; 0: \
    none is";
const CANARY_FAILED: &str = "Reads for --canary that got an error, or no data";

fn canary(encoder: &mut DescriptorEncoder, sight: &Sight) -> fmt::Result {
    let labels = [("disk", &*sight.disk)];
    for (name, help, number) in [
        ("canary_reads", "Reads made for --canary", sight.made),
        ("canary_reads_seen", "Those of them that the histograms contain", sight.seen),
        ("canary_reads_failed", CANARY_FAILED, sight.failed),
    ] {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        count(&mut family, &labels, number as f64)?;
    }
    for (name, help, seconds) in [
        ("canary_latency", CANARY_LATENCY, sight.latency),
        ("canary_wait", CANARY_WAIT, sight.waited),
        ("canary_pending", CANARY_PENDING, Some(sight.pending_for())),
    ] {
        let (unit, gauge) = (Some(&Unit::Seconds), MetricType::Gauge);
        let mut family = encoder.encode_descriptor(name, help, unit, gauge)?;
        if let Some(seconds) = seconds {
            family.encode_family(&labels)?.encode_gauge(&seconds)?;
        }
    }
    Ok(())
}

fn reasons(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    counts: &[(&str, u64)],
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for &(reason, number) in counts {
        count(&mut family, &[("reason", reason)], number as f64)?;
    }
    Ok(())
}

fn total(encoder: &mut DescriptorEncoder, name: &str, help: &str, number: u64) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    family.encode_counter::<NoLabelSet, _, f64>(&number, None)
}

fn count(family: &mut MetricEncoder, labels: &impl EncodeLabelSet, value: f64) -> fmt::Result {
    family.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
}

fn in_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(
        disk: &str,
        missing_in: Option<(u64, Option<u64>)>,
        has_statistics: Option<bool>,
        ms: u64,
    ) -> Gap {
        let (disk, age) = (disk.to_owned(), std::time::Duration::from_millis(ms));
        Gap { disk, missing_in, has_statistics, age }
    }

    /// What a scrape got: of one series, with a name that has to be escaped.
    fn metrics(ios: fn(BTreeMap<Series, Sums>) -> Ios) -> Metrics {
        let sums = Sums { parts: [0, 0, 0, 0, 1_000, 3_000_000_000], ..Sums::default() };
        Metrics {
            build: Build { version: "1", kernel: "6".into() },
            ios: ios(BTreeMap::from([(("v\"d\\a\n".to_owned(), "read"), sums)])),
            gaps: vec![
                gap("vda", Some((8, Some(9))), Some(true), 250),
                gap("vdb", Some((0, None)), None, 0),
                gap("vdc", None, Some(false), 4_000),
            ],
            stalls: vec![Stall { disk: "vda".into(), age: std::time::Duration::ZERO }],
            canary: Some(Sight {
                disk: "vda".into(),
                made: 11,
                seen: 10,
                failed: 1,
                latency: Some(0.5),
                waited: Some(0.75),
                pending: None,
            }),
            pages: vec![[1, 2, 3], [10, 20, 30]],
            reads_not_measured: [("dropped", 4), ("unmatched", 5), ("asynchronous", 6)],
            skips: vec![("bio_end".into(), 7), ("page_added".into(), 0)],
        }
    }

    fn bios(series: BTreeMap<Series, Sums>) -> Ios {
        let not_measured =
            [("dropped", 1), ("unmatched", 2), ("refused", 9), ("too_many_disks", 3)];
        Ios::Bios { series, with_parts: true, not_measured }
    }

    #[test]
    fn both_formats_have_all_of_requests() {
        let requests = || metrics(|series| Ios::requests(series, [1, 2, 3, 4, 5, 6]));
        both_have(
            [Format::OpenMetrics, Format::Prometheus].map(|format| requests().encode(format)),
            &[
                "storage_request_seconds_count{disk=\"v\\\"d\\\\a\\n\",op=\"read\"} 0",
                "storage_requests_not_measured_total{reason=\"no_statistics\"} 1.0",
                "storage_requests_not_measured_total{reason=\"passthrough\"} 2.0",
                "storage_requests_not_measured_total{reason=\"too_many_disks\"} 3.0",
                "storage_requests_retried_total{reason=\"partial\"} 4.0",
                "storage_requests_retried_total{reason=\"requeued\"} 5.0",
                "storage_requests_shared_start_total 6",
                "storage_unaccounted_requests_total{disk=\"vda\",missing_in=\"exporter\"} 8.0",
                "storage_unaccounted_requests_total{disk=\"vda\",missing_in=\"kernel\"} 9.0",
                "storage_unaccounted_requests_total{disk=\"vdb\",missing_in=\"exporter\"} 0.0",
                "storage_disk_audited{disk=\"vdb\"} 1",
                "storage_disk_audited{disk=\"vdc\"} 0",
                "storage_disk_statistics{disk=\"vda\"} 1",
                "storage_disk_statistics{disk=\"vdc\"} 0",
                "storage_look_age_seconds{disk=\"vda\"} 0.25",
                "storage_look_age_seconds{disk=\"vdc\"} 4.0",
                "storage_disk_stalled_seconds{disk=\"vda\"} 0.0",
                "storage_canary_reads_total{disk=\"vda\"} 11.0",
                "storage_canary_reads_seen_total{disk=\"vda\"} 10.0",
                "storage_canary_reads_failed_total{disk=\"vda\"} 1.0",
                "storage_canary_latency_seconds{disk=\"vda\"} 0.5",
                "storage_canary_wait_seconds{disk=\"vda\"} 0.75",
                "storage_canary_pending_seconds{disk=\"vda\"} 0.0",
            ],
        );
    }

    #[test]
    fn both_formats_have_all_of_bios() {
        let new = metrics(bios).encode(Format::OpenMetrics).unwrap();
        let old = metrics(bios).encode(Format::Prometheus).unwrap();
        let lines = [
            "storage_exporter_build_info{version=\"1\",kernel=\"6\"} 1",
            "storage_bio_seconds_count{disk=\"v\\\"d\\\\a\\n\",op=\"read\"} 0",
            "storage_bio_part_seconds_total{disk=\"v\\\"d\\\\a\\n\",op=\"read\",part=\"mapper\"} 0.000001",
            "storage_bio_part_seconds_total{disk=\"v\\\"d\\\\a\\n\",op=\"read\",part=\"unknown\"} 3.0",
            "storage_page_cache_pages_total{result=\"miss\"} 22.0",
            "storage_bios_not_measured_total{reason=\"unmatched\"} 2.0",
            "storage_reads_not_measured_total{reason=\"asynchronous\"} 6.0",
            "storage_programs_skipped_total{program=\"bio_end\"} 7.0",
            "storage_programs_skipped_total{program=\"page_added\"} 0.0",
        ];
        both_have([Ok(new.clone()), Ok(old.clone())], &lines);
        let unknown = ["part=\"wait\"", "vdb\",missing_in=\"kernel", "vdc\",missing"];
        assert!(!unknown.iter().any(|it| new.contains(it)), "unknown is not 0: {new}");
        assert!(new.ends_with("# EOF\n") && new.contains("# UNIT storage_bio_seconds"));
        assert!(new.contains("# TYPE storage_programs_skipped counter\n"), "{new}");
        assert!(old.contains("# TYPE storage_programs_skipped_total counter\n"), "{old}");
        assert!(!old.contains("# EOF") && !old.contains("# UNIT"), "{old}");
        let all = [
            "_bucket{le=\"+Inf\",disk=",
            "_bucket{disk=\"v\\\"d\\\\a\\n\",op=\"read\",le=\"+Inf\"} 0",
        ];
        assert!(new.contains(all[0]) && old.contains(all[1]), "{new}{old}");
    }

    fn both_have(texts: [Result<String>; 2], lines: &[&str]) {
        for text in texts.map(Result::unwrap) {
            for line in lines {
                assert!(text.lines().any(|l| l == *line), "{line}: {text}");
            }
        }
    }
}
