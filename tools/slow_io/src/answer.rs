//! What a run says at its end: which I/Os were slow, and why, and what was not measured.

use anyhow::Result;
use common::{Session, Skips};
use libbpf_rs::{MapCore, ProgramMut, skel::Skel};
use serde_json::json;

use crate::{
    cli::Slow,
    sums::Disk,
    trace::{TraceProgs, TraceSkel},
    waiting,
};

/// Says of each disk how many of its I/Os were slow, and where their time went; in one sentence, which disks had none.
pub fn print_slow(disks: &[Disk], options: &Slow) {
    let (slow, quick): (Vec<&Disk>, Vec<&Disk>) = disks.iter().partition(|disk| disk.slow() > 0);
    println!();
    slow.iter().for_each(|disk| println!("{}", disk.verdict(options, disks)));
    if !quick.is_empty() {
        let names = quick.iter().map(|disk| disk.name()).collect::<Vec<_>>().join(", ");
        let all: u64 = quick.iter().map(|disk| disk.bios()).sum();
        let shown = humantime::format_duration(options.min);
        println!("{names}: none of {all} I/Os took {shown} or longer.");
    }
}

/// A start that it misses is an I/O that nobody has seen.
const START_PROBE: &str = "bio_start_probe";

/// What was counted beside the I/Os that were measured.
pub struct Counts {
    completed: u64,
    /// Of these, how many nobody was seen to submit.
    nobodys: u64,
    in_flight: u64,
    dropped: u64,
    unmatched: u64,
    refused: u64,
    commands: u64,
    lost: u64,
    /// With `--who`: without a cause.
    nobody: Option<u64>,
    skips: Skips,
    /// Those of `skips`, and what two programs for one event have missed each.
    skipped: u64,
}

impl Counts {
    /// To be called after the programs are detached.
    pub fn read(skel: &TraceSkel<'_>, options: &Slow, disks: &[Disk]) -> Result<Counts> {
        let dropped = common::counters(&skel.maps.bss_data)?.dropped;
        let in_flight = skel.maps.ios.keys().count() as u64;
        let skips = Skips::by_pairs(skel.object(), &pairs(skel, in_flight + dropped))?;
        Counts::of(skel, options, disks, (in_flight, skips))
    }

    /// While the programs are attached. `hanging`: so many I/Os have waited for long. If one of them has completed, and
    /// nobody has seen that, this is what it looks like.
    pub fn so_far(
        skel: &TraceSkel<'_>,
        session: &Session,
        options: &Slow,
        disks: &[Disk],
        hanging: u64,
    ) -> Result<Counts> {
        let dropped = common::counters(&skel.maps.bss_data)?.dropped;
        let times = session.skips(skel.object())?;
        let skips = Skips::so_far(skel.object(), times, &pairs(skel, hanging + dropped))?;
        Counts::of(skel, options, disks, (0, skips))
    }

    fn of(
        skel: &TraceSkel<'_>,
        options: &Slow,
        disks: &[Disk],
        (in_flight, skips): (u64, Skips),
    ) -> Result<Counts> {
        let counts = common::counters(&skel.maps.bss_data)?;
        Ok(Counts {
            completed: disks.iter().map(Disk::bios).sum(),
            nobodys: disks.iter().map(Disk::nobodys).sum(),
            in_flight,
            dropped: counts.dropped,
            unmatched: counts.unmatched,
            refused: counts.refused,
            commands: counts.commands,
            lost: counts.lost,
            nobody: options.has_causes().then_some(counts.nobody),
            // The look at the disks is made again.
            skips: skips.without("look_at_disk"),
            skipped: common::times_skipped(skel.object())?
                .saturating_sub(waiting::missed_looks(&skel.progs)?),
        })
    }

    /// How many I/Os have completed and were measured.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Whether all that completed was seen, or at least counted.
    pub fn are_all_seen(&self) -> bool {
        self.skips.counts(START_PROBE)
    }

    /// What was not measured: nothing of it where there is none.
    pub fn missing(&self) -> Vec<String> {
        let counts = [
            (self.dropped, "dropped"),
            (self.unmatched, "unmatched"),
            (self.lost, "slow I/Os lost"),
            (self.nobody.unwrap_or(0), "without a cause"),
            (self.skips.times(), "skipped"),
        ];
        let counts = counts.into_iter().filter(|(count, _)| *count > 0);
        counts.map(|(count, what)| format!("{count} {what}")).collect()
    }

    /// How many I/Os have no cause, as there was no room for one.
    pub fn without_cause(&self) -> u64 {
        self.nobody.unwrap_or(0)
    }

    /// The last line of --json.
    pub fn print_json(&self) {
        let counters = json!({
            "kind": "counters", "completed": self.completed, "no_submitter": self.nobodys,
            "in_flight": self.in_flight, "dropped": self.dropped, "unmatched": self.unmatched,
            "refused": self.refused, "commands": self.commands, "lost": self.lost,
            "without_cause": self.nobody.unwrap_or(0), "skipped": self.skipped,
        });
        println!("{counters}");
    }

    /// Whether all was measured, and what is not 0; `with_all`: the rest, too. `hooks_ran`: nobody has switched them off.
    pub fn print(&self, with_all: bool, hooks_ran: bool) {
        let missing = [self.dropped, self.unmatched, self.lost, self.nobody.unwrap_or(0)];
        let is_whole = missing.iter().all(|count| *count == 0) && self.skips.times() == 0;
        println!();
        if with_all || self.completed == 0 {
            let submitted = self.completed - self.nobodys;
            match self.completed {
                0 => common::print_total(0, "I/Os completed"),
                _ => println!("{submitted:>8} I/Os completed"),
            }
        }
        if with_all {
            println!("{:>8} more that nobody was seen to submit", self.nobodys);
        }
        if !is_whole {
            println!("Not all was measured:");
        } else if self.completed > 0 {
            let are_all_seen = hooks_ran && self.skips.counts(START_PROBE);
            let seen = if are_all_seen { "" } else { " that were seen" };
            println!("All {} I/Os{seen} were measured.", self.completed);
        }
        for (count, what) in [
            (self.in_flight, "in flight"),
            (self.dropped, "dropped (map full, or completion not seen)"),
            (self.unmatched, "unmatched (no start seen, on a disk without requests)"),
            (self.refused, "refused (must not wait and would have had to: it is submitted again)"),
            (self.commands, "commands to a disk (smartctl, a scan), not I/O"),
            (self.lost, "lines lost (ring buffer full)"),
        ] {
            if count > 0 || with_all {
                println!("{count:>8} {what}");
            }
        }
        if let Some(nobody) = self.nobody.filter(|count| *count > 0 || with_all) {
            println!("{nobody:>8} without a cause (more than --causes)");
        }
        if with_all {
            self.skips.print();
            return;
        }
        self.skips.print_times();
        if !self.skips.counts(START_PROBE) {
            self.skips.print_not_counted();
        }
    }
}

/// What is not known of a request is "-" in its line. So only a start or an end that nobody saw is a skip.
fn pairs<'a, 'obj>(
    skel: &'a TraceSkel<'obj>,
    unmeasured: u64,
) -> [([&'a ProgramMut<'obj>; 2], u64); 2] {
    let TraceProgs { bio_end, bio_end_probe, rq_end, rq_end_probe, .. } = &skel.progs;
    [([bio_end, bio_end_probe], unmeasured), ([rq_end, rq_end_probe], u64::MAX)]
}
