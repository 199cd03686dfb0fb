//! A top for the page cache: what each process finds in it, what it has to wait for, and what it
//! dirties.

mod counts;
mod screen;

use std::{
    io::{IsTerminal, Write, stdin, stdout},
    mem::MaybeUninit,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use common::{Cli, Session};
use common_screen::{Scene, Turn};
use libbpf_rs::{MapCore, skel::Skel};
use ratatui::{Frame, crossterm::event::KeyEvent};
use serde_json::json;

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use crate::{
    counts::{Column, Counts, Row, Sampler, sort},
    screen::View,
};
use trace::{OpenTraceSkel, TraceProgs, TraceSkel, TraceSkelBuilder};

/// The options that only this program has.
#[derive(Args, Debug)]
struct Options {
    /// How often to count anew: 1s, 500ms
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// The column to sort by, the largest value first; names and numbers of processes ascending
    #[arg(long, value_name = "COLUMN", value_enum, default_value_t = Column::Misses)]
    sort: Column,
    /// Sort the other way round
    #[arg(long)]
    reverse: bool,
    /// Print a table for each interval, also on a terminal
    #[arg(long)]
    batch: bool,
    /// Print a JSON object for each interval, one a line, and one with the totals
    #[arg(long, conflicts_with = "batch")]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let hint = "give a number and a unit, like 1s or 500ms";
    let interval = humantime::parse_duration(text).map_err(|e| format!("{e}; {hint}"))?;
    if interval < Duration::from_millis(100) || interval > Duration::from_secs(3600) {
        return Err(format!("the interval must be between 100ms and 1h; {hint}"));
    }
    Ok(interval)
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Options>, session: &mut Session) -> Result<()> {
    let options = &cli.own;
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let has_sessions = common::has_sessions()?;
    prepare(&mut open, has_sessions)?;
    let skel = session.load(open)?;
    attach(&skel.progs, has_sessions, session)?;
    session.begin()?;
    let mut sampler = Sampler::new();
    let map = &skel.maps.processes;
    let on_terminal = session.stdout_is_terminal() && stdin().is_terminal();
    if on_terminal && !options.batch && !options.json {
        let interval = options.interval;
        let view = View::new(options.sort, options.reverse, interval, session.has_colours());
        let sampler = &mut sampler;
        common_screen::show(&mut Top { interval, session, sampler, map, view })?;
        session.detach()?;
        sampler.sample(map)?;
    } else {
        print_intervals(options, session, &mut sampler, map)?;
    }
    if options.json {
        print_json_total(&skel, &sampler.total)
    } else {
        print_total(&skel, &sampler.total)
    }
}

/// Sets the constants, and loads for reads the programs that this kernel has.
fn prepare(open: &mut OpenTraceSkel<'_>, has_sessions: bool) -> Result<()> {
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.page_shift = common::page_shift();
    // Without io_uring, no read has this callback.
    constants.address_of_io_complete_rw = common::kernel_function_if_any("io_complete_rw")?;
    constants.pid_namespace = common::pid_namespace()?;
    open.progs.filemap_read_session.set_autoload(has_sessions);
    open.progs.filemap_read_entry.set_autoload(!has_sessions);
    open.progs.filemap_read_exit.set_autoload(!has_sessions);
    Ok(())
}

fn attach(progs: &TraceProgs<'_>, has_sessions: bool, session: &mut Session) -> Result<()> {
    let (dirtied, added) = (&progs.folio_dirtied, &progs.page_added);
    if has_sessions {
        session.attach([dirtied, added, &progs.filemap_read_session])
    } else {
        session.attach([dirtied, added, &progs.filemap_read_exit, &progs.filemap_read_entry])
    }
}

/// Prints a table, or a JSON object, for each interval. The last one ends when the programs are detached.
fn print_intervals(
    options: &Options,
    session: &mut Session,
    sampler: &mut Sampler,
    map: &impl MapCore,
) -> Result<()> {
    let mut is_last = false;
    while !is_last {
        let next = sampler.last + options.interval;
        while !session.is_over() && Instant::now() < next {
            let left = next.saturating_duration_since(Instant::now());
            thread::sleep(left.min(Duration::from_millis(50)));
        }
        is_last = session.is_over();
        if is_last {
            session.detach()?;
        }
        let (time, mut rows) = sampler.sample(map)?;
        sort(&mut rows, options.sort, options.reverse);
        if options.json {
            println!("{}", json!({ "seconds": time.as_secs_f64(), "processes": rows }));
        } else {
            print!("{}", table(sampler.start.elapsed(), &rows));
        }
        stdout().flush()?;
    }
    Ok(())
}

/// The last line of --json.
fn print_json_total(skel: &TraceSkel<'_>, total: &Counts) -> Result<()> {
    let counts = common::counters(&skel.maps.bss_data)?;
    let skipped = common::times_skipped(skel.object())?;
    println!(
        "{}",
        json!({
            "total": total, "refused": counts.refused,
            "in_flight": skel.maps.starts.keys().count(),
            "dropped": counts.dropped, "unmatched": counts.unmatched,
            "uncounted": counts.uncounted, "skipped": skipped,
        })
    );
    Ok(())
}

fn print_total(skel: &TraceSkel<'_>, total: &Counts) -> Result<()> {
    let counts = common::counters(&skel.maps.bss_data)?;
    println!("{:>8} reads through the page cache", total.reads);
    println!("{:>8} pages hit, {} missed: {}", total.hits, total.misses, ratio(total));
    println!("{:>8} readahead (pages brought in beyond those asked for)", total.readahead);
    println!("{:>8} pages dirtied", total.dirtied);
    println!("{:>8} refused (would have had to wait; not in the total)", counts.refused);
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or return not seen)", counts.dropped);
    println!("{:>8} unmatched (return without an entry)", counts.unmatched);
    println!("{:>8} not counted (map of processes full)", counts.uncounted);
    common::print_skipped(skel.object())
}

/// `97.7 % hits`
fn ratio(counts: &Counts) -> String {
    counts.hit_percent().map_or("no reads".into(), |percent| format!("{percent:.1} % hits"))
}

/// One interval, for a file or a pipe.
fn table(time: Duration, rows: &[Row]) -> String {
    let total: Counts = rows.iter().map(|row| row.counts).sum();
    let line = |cells: Vec<String>| cells.join(" ").trim_end().to_owned() + "\n";
    let mut text = format!(
        "\n{:.1} s: {} hits, {} misses, {}, {} dirtied\n",
        time.as_secs_f64(),
        total.hits,
        total.misses,
        ratio(&total),
        total.dirtied
    );
    let widths = Column::ALL.map(|column| (column, column.width(rows)));
    text += &line(widths.map(|(column, width)| column.aligned(column.title(), width)).to_vec());
    for row in rows {
        let cell = |(column, width): (Column, usize)| column.aligned(&column.value(row), width);
        text += &line(widths.map(cell).to_vec());
    }
    text
}

/// The full screen, and where it takes the counts from.
struct Top<'a, Map> {
    interval: Duration,
    session: &'a Session,
    sampler: &'a mut Sampler,
    map: &'a Map,
    view: View,
}

impl<Map: MapCore> Scene for Top<'_, Map> {
    fn turn(&mut self) -> Result<Turn> {
        if self.session.is_over() {
            return Ok(Turn::End);
        }
        if self.sampler.last.elapsed() < self.interval {
            return Ok(Turn::Same);
        }
        let (_, rows) = self.sampler.sample(self.map)?;
        self.view.show(rows, self.sampler.start.elapsed());
        Ok(Turn::New)
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        self.view.draw(frame);
    }

    fn key(&mut self, key: KeyEvent) -> bool {
        self.view.key(key)
    }

    /// What was counted meanwhile belongs to the sums of the run, and to no interval.
    fn continued(&mut self) -> Result<()> {
        self.sampler.sample(self.map).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_has_a_unit_and_bounds() {
        assert_eq!(interval("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["", "1", "0s", "10ms", "2h", "-1s"] {
            assert!(interval(wrong).unwrap_err().contains("500ms"), "{wrong}");
        }
    }

    #[test]
    fn a_table_has_a_line_for_each_process() {
        let counts = Counts { reads: 3, hits: 30, misses: 10, readahead: 8, dirtied: 0 };
        let user = Some("root".into());
        let rows = [Row { pid: 7, user, comm: "dd".into(), counts }];
        let expected = "\n2.5 s: 30 hits, 10 misses, 75.0 % hits, 0 dirtied
    PID USER     COMM              READS    HITS  MISSES  HIT% READAHEAD DIRTIED
      7 root     dd                    3      30      10  75.0         8       0\n";
        assert_eq!(table(Duration::from_millis(2500), &rows), expected);
        assert!(table(Duration::from_secs(1), &[]).contains("no reads"));
    }
}
