//! What the screen shows, and what keys change.

use std::{cmp::Reverse, collections::HashSet, sync::Arc, time::Duration};

use common_screen::{cut, fit};
use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    style::{Color, Modifier, Style},
    text::{Line, Text},
};

use super::{
    grid::{Grid, Row},
    rows::{self, Between},
    snapshot::Snapshot,
};
use crate::line::SlowIo;

/// The tables, by their places.
const DISKS: usize = 0;
const SLOWEST: usize = 1;
const WHO: usize = 2;
const HANGING: usize = 3;

/// In which order the screen has them: what hangs is the slowest of all.
const ORDER: [usize; 4] = [HANGING, DISKS, SLOWEST, WHO];
const NAMES: [&str; 4] = ["Disks", "Slowest", "Who", "Hanging"];

/// So many of the slowest are kept.
const KEPT: usize = 200;
/// With fewer lines than these, one table has all of them.
const FEW_LINES: usize = 14;
/// A screen whose figures are older than that says so.
const OLD: Duration = Duration::from_secs(3);

const KEYS: [(&str, &str); 12] = [
    ("q, Ctrl-C", "end, and print the tables"),
    ("Esc", "take the filter away; without one, end"),
    ("Tab, 1 to 4", "the next table, or one by its number"),
    ("← →, s", "sort the table by another column"),
    ("↑ ↓, PageUp, PageDown", "choose a row, and scroll"),
    ("Home", "back to the top, with no row chosen"),
    ("Enter", "filter: only the disk of the row; in table 3, only the process"),
    ("/", "filter: a part of a disk's or process's name, or a process's number"),
    ("t", "counts of the last second, or of all the time"),
    ("r", "begin the counts again (the tables at the end have all)"),
    ("p, space", "pause, and continue: the kernel counts on"),
    ("?", "these keys, or the tables"),
];

/// What rows a filter leaves.
#[derive(Clone, Debug)]
enum Filter {
    Disk(String),
    Process(Option<u32>, String),
    Text(String),
}

/// What is shown at present.
struct Shown {
    to: Arc<Snapshot>,
    /// The snapshot before that.
    before: Option<Arc<Snapshot>>,
    /// The slowest since the counts began, the slowest first.
    slow: Vec<Arc<SlowIo>>,
}

impl Shown {
    /// From the snapshot before to this one.
    fn seconds(&self) -> Option<f64> {
        self.before.as_ref().map(|before| self.to.at.saturating_sub(before.at) as f64 / 1e9)
    }
}

/// What is to be drawn.
pub struct View {
    min: Duration,
    /// When the run began, by the kernel's clock, in ns.
    began: u64,
    /// For how many seconds there have been no new figures, if for long.
    old: Option<u64>,
    has_colours: bool,
    /// Nobody has switched them off.
    hooks_run: bool,
    /// The last one that has come, and the one before.
    last: Option<Arc<Snapshot>>,
    before_last: Option<Arc<Snapshot>>,
    /// Where the counts begin; `None`: at the start.
    base: Option<Arc<Snapshot>>,
    slow: Vec<Arc<SlowIo>>,
    shown: Option<Shown>,
    rows: [Vec<Row>; 4],
    grids: [Grid; 4],
    active: usize,
    filter: Option<Filter>,
    /// What is being typed.
    prompt: Option<String>,
    only_last_second: bool,
    is_paused: bool,
    has_help: bool,
}

impl View {
    /// Of a run that has begun then, by the kernel's clock.
    pub fn new(min: Duration, began: u64, has_colours: bool) -> View {
        View {
            min,
            began,
            old: None,
            has_colours,
            hooks_run: true,
            last: None,
            before_last: None,
            base: None,
            slow: Vec::new(),
            shown: None,
            rows: Default::default(),
            grids: [
                Grid::new(rows::DISKS, "SLOW"),
                Grid::new(rows::SLOWEST, "TOTAL ms"),
                Grid::new(rows::WHO, "SUM ms"),
                Grid::new(rows::HANGING, "AGE"),
            ],
            active: DISKS,
            filter: None,
            prompt: None,
            only_last_second: false,
            is_paused: false,
            has_help: false,
        }
    }

    /// What time it is, by the kernel's clock, and whether the hooks still run. Whether that changes the screen.
    pub fn now(&mut self, now: u64, hooks_run: bool) -> bool {
        let at = self.last.as_ref().map_or(self.began, |last| last.at);
        let old = Duration::from_nanos(now.saturating_sub(at));
        let before = (self.old, self.hooks_run);
        (self.old, self.hooks_run) = ((old > OLD).then_some(old.as_secs()), hooks_run);
        before != (self.old, self.hooks_run)
    }

    /// Takes what has come.
    pub fn take(&mut self, mut snapshot: Snapshot) {
        self.slow.extend(snapshot.slow.drain(..).map(Arc::new));
        self.slow.sort_by_key(|io| (Reverse(io.latency), io.ended));
        self.slow.truncate(KEPT);
        self.before_last = self.last.replace(Arc::new(snapshot));
        if !self.is_paused {
            self.show_last();
        }
    }

    fn show_last(&mut self) {
        let (before, slow) = (self.before_last.clone(), self.slow.clone());
        self.shown = self.last.clone().map(|to| Shown { to, before, slow });
        self.make_rows();
    }

    /// The rows of all tables, as they are filtered and sorted.
    fn make_rows(&mut self) {
        let Some(Shown { to, before, slow }) = &self.shown else { return };
        let from = if self.only_last_second { before.as_ref() } else { self.base.as_ref() };
        let between = Between { from: from.map(Arc::as_ref), to, before: before.as_deref() };
        let since = from.map_or(0, |from| from.at);
        let slow = slow.iter().filter(|io| io.ended >= since).map(|io| rows::of_slow(io));
        self.rows = [between.disks(), slow.collect(), between.who(), between.hanging()];
        let users: HashSet<String> = match &self.filter {
            Some(filter) => self.rows[WHO]
                .iter()
                .filter(|row| has_process(filter, row))
                .map(|row| row.disk.clone())
                .collect(),
            None => HashSet::new(),
        };
        for (rows, grid) in self.rows.iter_mut().zip(&self.grids) {
            if let Some(filter) = &self.filter {
                let is_its = |row: &Row| row.process.is_none() && users.contains(&row.disk);
                rows.retain(|row| has_disk(filter, row) || has_process(filter, row) || is_its(row));
            }
            grid.sort(rows);
        }
        if self.active == HANGING && self.rows[HANGING].is_empty() {
            self.active = DISKS;
        }
    }

    /// Does what a key means; whether to continue.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return false;
        }
        if self.prompt.is_some() {
            self.type_filter(key.code);
            return true;
        }
        match key.code {
            KeyCode::Char('q') => return false,
            KeyCode::Esc if self.has_help => self.has_help = false,
            KeyCode::Esc if self.filter.is_none() => return false,
            KeyCode::Esc => self.set_filter(None),
            KeyCode::Char('?') => self.has_help = !self.has_help,
            KeyCode::Char('/') => self.prompt = Some(String::new()),
            KeyCode::Enter => self.filter_by_chosen(),
            KeyCode::Tab => self.next_table(1),
            KeyCode::BackTab => self.next_table(ORDER.len() - 1),
            KeyCode::Char(number @ '1'..='4') => {
                let table = number as usize - '1' as usize;
                if table != HANGING || !self.rows[HANGING].is_empty() {
                    self.active = table;
                }
            }
            KeyCode::Char('t') => self.only_last_second = !self.only_last_second,
            KeyCode::Char('r') => self.begin_again(),
            KeyCode::Char('p' | ' ') => self.pause(),
            KeyCode::Char('s') | KeyCode::Right => self.grids[self.active].sort_by_next(1),
            KeyCode::Left => self.grids[self.active].sort_by_last(),
            code => self.choose(code),
        }
        self.make_rows();
        true
    }

    fn choose(&mut self, code: KeyCode) {
        let (grid, rows) = (&mut self.grids[self.active], &self.rows[self.active]);
        let page = grid.page();
        match code {
            KeyCode::Up => grid.choose(rows, |at| at.saturating_sub(1)),
            KeyCode::Down => grid.choose(rows, |at| at + 1),
            KeyCode::PageUp => grid.choose(rows, |at| at.saturating_sub(page)),
            KeyCode::PageDown => grid.choose(rows, |at| at + page),
            KeyCode::Home => grid.reset(),
            _ => {}
        }
    }

    fn next_table(&mut self, step: usize) {
        let place = ORDER.iter().position(|&table| table == self.active).unwrap_or_default();
        self.active = ORDER[(place + step) % ORDER.len()];
        if self.active == HANGING && self.rows[HANGING].is_empty() {
            self.next_table(step);
        }
    }

    fn begin_again(&mut self) {
        self.base.clone_from(&self.last);
        self.slow.clear();
        self.only_last_second = false;
        self.is_paused = false;
        self.show_last();
    }

    fn pause(&mut self) {
        self.is_paused = !self.is_paused;
        if !self.is_paused {
            self.show_last();
        }
    }

    fn set_filter(&mut self, filter: Option<Filter>) {
        self.filter = filter;
        self.grids.iter_mut().for_each(Grid::reset);
    }

    fn filter_by_chosen(&mut self) {
        let row = self.grids[self.active].chosen(&self.rows[self.active]);
        let filter = match row {
            Some(Row { process: Some((pid, name)), .. }) if self.active == WHO => {
                Filter::Process(*pid, name.clone())
            }
            Some(row) => Filter::Disk(row.disk.clone()),
            None => return,
        };
        self.set_filter(Some(filter));
    }

    fn type_filter(&mut self, code: KeyCode) {
        let Some(mut text) = self.prompt.take() else { return };
        match code {
            KeyCode::Esc => return,
            KeyCode::Enter => {
                self.set_filter((!text.is_empty()).then_some(Filter::Text(text)));
                self.make_rows();
                return;
            }
            KeyCode::Backspace => drop(text.pop()),
            KeyCode::Char(letter) => text.push(letter),
            _ => {}
        }
        self.prompt = Some(text);
    }

    /// Draws everything.
    pub fn draw(&mut self, frame: &mut Frame<'_>) {
        let (width, height) = (usize::from(frame.area().width), usize::from(frame.area().height));
        let mut lines = vec![Line::from(fit(&self.title(), "  ", width)), self.measured(width)];
        let room = height.saturating_sub(lines.len() + 1);
        match self.has_help {
            true => lines.extend(help(width)),
            false => lines.extend(self.tables(room, width)),
        }
        lines.truncate(height.saturating_sub(1));
        lines.resize(height.saturating_sub(1), Line::default());
        lines.push(Line::from(self.last_line(width)));
        frame.render_widget(Text::from(lines), frame.area());
    }

    fn title(&self) -> Vec<String> {
        let at = self.shown.as_ref().map_or(self.began, |shown| shown.to.at);
        let seconds = |ns: u64| ns / 1_000_000_000;
        let mut parts = vec![format!("slow_io {} s", seconds(at.saturating_sub(self.began)))];
        parts.extend(self.is_paused.then(|| "PAUSED".to_owned()));
        parts.extend(self.filter.as_ref().map(|filter| match filter {
            Filter::Disk(name) => format!("ONLY disk {name}"),
            Filter::Process(Some(pid), name) => format!("ONLY process {pid} {name}"),
            Filter::Process(None, _) => "ONLY I/O that nobody was seen to submit".to_owned(),
            Filter::Text(text) => format!("ONLY {}", common::printable(text)),
        }));
        parts.push(match (&self.base, self.only_last_second) {
            (_, true) => match self.shown.as_ref().and_then(Shown::seconds) {
                Some(seconds) => format!("counts: the last {seconds:.1} s"),
                None => "counts: since the start".to_owned(),
            },
            (None, _) => "counts: since the start".to_owned(),
            (Some(base), _) => {
                format!("counts: since r, {} s", seconds(at.saturating_sub(base.at)))
            }
        });
        parts.push(format!("slow: {} or longer", humantime::format_duration(self.min)));
        parts
    }

    /// Whether all was measured, as large as the figures themselves.
    fn measured(&self, width: usize) -> Line<'static> {
        let Some(shown) = &self.shown else { return Line::from("No figures yet.") };
        let counts = &shown.to.counts;
        let (missing, hanging) = (counts.missing(), shown.to.waiting.len());
        let mut parts = Vec::new();
        if !self.hooks_run {
            parts.push("HOOKS WERE SWITCHED OFF: what came meanwhile is not counted".to_owned());
        }
        parts.extend(self.old.map(|seconds| format!("NO NEW FIGURES for {seconds} s")));
        if !missing.is_empty() {
            parts.push("NOT ALL WAS MEASURED:".to_owned());
            parts.extend(missing);
        }
        let is_bad = !parts.is_empty();
        if !is_bad && counts.completed() == 0 {
            parts.push("No I/O has completed yet.".to_owned());
        } else if !is_bad {
            let are_all_seen = counts.are_all_seen();
            let seen = if are_all_seen { "" } else { " that were seen" };
            parts.push(format!("All {} I/Os{seen} were measured.", counts.completed()));
        }
        if hanging > 0 {
            parts.insert(0, format!("{hanging} HANGING"));
        }
        let line = Line::from(fit(&parts, "  ", width));
        match is_bad || hanging > 0 {
            true => line.style(self.alarm()),
            false => line,
        }
    }

    fn alarm(&self) -> Style {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        if self.has_colours { bold.fg(Color::Indexed(203)) } else { bold }
    }

    fn tables(&mut self, room: usize, width: usize) -> Vec<Line<'static>> {
        let shown = ORDER.into_iter().filter(|&table| match room < FEW_LINES {
            true => table == self.active,
            false => table != HANGING || !self.rows[HANGING].is_empty(),
        });
        let shown: Vec<usize> = shown.collect();
        let wanted =
            shown.iter().map(|&table| (self.rows[table].len().max(1), table == self.active));
        let rooms = share(room.saturating_sub(2 * shown.len()), &wanted.collect::<Vec<_>>());
        let mut lines = Vec::new();
        for (table, room) in shown.into_iter().zip(rooms) {
            let is_active = table == self.active;
            let heading = Line::from(fit(&self.heading(table, room), "  ", width));
            lines.push(match (table == HANGING, is_active) {
                (true, _) => heading.style(self.alarm()),
                (_, true) => heading.style(Style::new().add_modifier(Modifier::BOLD)),
                _ => heading,
            });
            let rows = &self.rows[table];
            let grid = &mut self.grids[table];
            lines.extend(grid.lines(rows, room, width, is_active, self.has_colours));
            if rows.is_empty() && room > 0 {
                lines.push(Line::from(cut(&self.none(table), width)));
            }
        }
        lines
    }

    fn heading(&self, table: usize, room: usize) -> Vec<String> {
        let sign = if table == self.active { '▸' } else { ' ' };
        let count = self.rows[table].len();
        let mut parts = vec![format!("{sign}{} {}", table + 1, NAMES[table])];
        if count > room {
            parts[0] += &format!(", {room} of {count}");
        }
        parts.push(format!("by {}", self.grids[table].sorted_by().trim_end_matches(" ms")));
        let is_of_process = self.filter.as_ref().is_some_and(|it| !matches!(it, Filter::Disk(_)));
        if table == DISKS && is_of_process {
            parts.push("(the counts of a disk are everybody's)".to_owned());
        }
        let are_all = self.shown.as_ref().is_none_or(|shown| shown.slow.len() < KEPT);
        if table == SLOWEST && !are_all {
            parts.push(format!("(only the {KEPT} slowest are kept)"));
        }
        parts
    }

    /// What a table says that has no row.
    fn none(&self, table: usize) -> String {
        let shown = humantime::format_duration(self.min);
        let what = match table {
            SLOWEST => format!("no I/O took {shown} or longer"),
            _ => "no I/O has completed".to_owned(),
        };
        what + if self.filter.is_some() { " that the filter leaves" } else { "" }
    }

    fn last_line(&self, width: usize) -> String {
        if let Some(text) = &self.prompt {
            let text = common::printable(text);
            return cut(&format!("filter: {text}_  (Enter: filter, Esc: not)"), width);
        }
        let enter =
            if self.active == WHO { "Enter only its process" } else { "Enter only its disk" };
        let esc = self.filter.is_some().then_some("Esc all");
        let keys = ["q quit"].into_iter().chain(esc);
        let keys = keys.chain(["? keys", "Tab table", "←→ sort", "↑↓ row", enter, "/ filter"]);
        let keys = keys.chain(["t second", "r reset", "p pause"]);
        fit(&keys.map(str::to_owned).collect::<Vec<_>>(), "  ", width)
    }
}

/// Whether a row is of the disk that the filter names.
fn has_disk(filter: &Filter, row: &Row) -> bool {
    match filter {
        Filter::Disk(name) => row.disk == *name,
        Filter::Process(..) => false,
        Filter::Text(text) => row.disk.contains(text),
    }
}

/// Whether a row is of the process that the filter names.
fn has_process(filter: &Filter, row: &Row) -> bool {
    let Some((pid, name)) = &row.process else { return false };
    match filter {
        Filter::Disk(_) => false,
        Filter::Process(its, its_name) => pid == its && name == its_name,
        Filter::Text(text) => {
            name.contains(text) || pid.is_some_and(|pid| pid.to_string() == *text)
        }
    }
}

/// How many lines each table gets, of those that it wants: the active one gets two where the others get one.
fn share(room: usize, wanted: &[(usize, bool)]) -> Vec<usize> {
    let mut given = vec![0; wanted.len()];
    let mut left = room;
    while left > 0 {
        let before = left;
        for (given, &(wanted, is_active)) in given.iter_mut().zip(wanted) {
            let more = (wanted - *given).min(if is_active { 2 } else { 1 }).min(left);
            *given += more;
            left -= more;
        }
        if left == before {
            break;
        }
    }
    given
}

fn help(width: usize) -> Vec<Line<'static>> {
    let line = |(key, what): (&str, &str)| Line::from(cut(&format!(" {key:<22} {what}"), width));
    [Line::default()].into_iter().chain(KEYS.map(line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_share_the_lines_by_what_they_want() {
        assert_eq!(share(15, &[(2, true), (20, false), (20, false)]), [2, 7, 6]);
        assert_eq!(share(9, &[(9, false), (9, true), (9, false)]), [3, 4, 2]);
        assert_eq!(share(9, &[(1, true), (2, false)]), [1, 2]);
        assert_eq!(share(0, &[(1, true)]), [0]);
    }
}
