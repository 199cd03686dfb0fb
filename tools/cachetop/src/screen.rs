//! What the full screen shows, and what keys change.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use common_screen::{fit, width};
use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Color, Modifier, Style},
    text::{Line, Span, Text},
    widgets::{Cell, Row as Cells, Table},
};

use crate::counts::{Column, Counts, Row, sort};

/// The narrowest that a column of names gets.
const SHORTEST_NAME: usize = 7;

/// Columns of the bar of hits and misses, where there is room for it.
const BAR: usize = 10;
/// What has grown to twice as much since the last interval, and to so much at least, is marked.
const MUCH: u64 = 100;
/// Of hits, of misses, and of what has grown: none of them is that of a part of an I/O's time.
const HITS: Color = Color::Indexed(37);
const MISSES: Color = Color::Indexed(167);
const GROWN: Color = Color::Indexed(178);

/// A line of the table: a process, or all of one name together.
struct Shown {
    row: Row,
    /// Of a sum, how many processes it has.
    processes: Option<usize>,
    /// Whether it is a part of the sum above.
    is_part: bool,
}

/// A process, by its number; all of one name, by that alone.
type Key = (Option<u64>, String);

impl Shown {
    fn key(&self) -> Key {
        (self.processes.is_none().then_some(self.row.pid), self.row.comm.clone())
    }
}

/// What was counted before.
type Before = HashMap<Key, Counts>;

/// What is to be drawn.
pub struct View {
    rows: Vec<Row>,
    /// Of the interval before this one; none in the first.
    before: Option<Before>,
    /// Whether processes of one name are one line, but for these names.
    groups: bool,
    opened: BTreeSet<String>,
    /// The line that Enter is about, once a key has chosen one, and where it was then.
    chosen: Option<(Key, usize)>,
    has_colours: bool,
    sort: Column,
    reverse: bool,
    interval: Duration,
    time: Duration,
    /// How many rows have been scrolled out at the top.
    above: usize,
    /// How many rows the screen had room for, when it was last drawn.
    room: usize,
}

impl View {
    pub fn new(sort: Column, reverse: bool, interval: Duration, has_colours: bool) -> View {
        View {
            rows: Vec::new(),
            before: None,
            groups: true,
            opened: BTreeSet::new(),
            chosen: None,
            has_colours,
            sort,
            reverse,
            interval,
            time: Duration::ZERO,
            above: 0,
            room: 0,
        }
    }

    /// Takes the rows of an interval, `time` after the start.
    pub fn show(&mut self, rows: Vec<Row>, time: Duration) {
        let former = std::mem::replace(&mut self.rows, rows);
        self.before = (!self.time.is_zero()).then(|| {
            let mut before = Before::new();
            for row in former {
                for key in [(Some(row.pid), row.comm.clone()), (None, row.comm)] {
                    let sum = before.entry(key).or_default();
                    *sum = *sum + row.counts;
                }
            }
            before
        });
        self.time = time;
    }

    /// The lines of the table, as they are sorted: sums among single processes, and what is open below its sum.
    fn lines(&self) -> Vec<Shown> {
        let mut names = BTreeMap::<&str, Vec<&Row>>::new();
        for row in &self.rows {
            names.entry(&row.comm).or_default().push(row);
        }
        let is_sum = |rows: &[&Row]| self.groups && rows.len() > 1;
        let mut tops = Vec::new();
        for rows in names.values() {
            match is_sum(rows) {
                true => tops.push(sum(rows)),
                false => tops.extend(rows.iter().copied().cloned()),
            }
        }
        sort(&mut tops, self.sort, self.reverse);
        let mut lines = Vec::new();
        for row in tops {
            let rows = &names[&*row.comm];
            if !is_sum(rows) {
                lines.push(Shown { row, processes: None, is_part: false });
                continue;
            }
            let mut parts: Vec<Row> = rows.iter().copied().cloned().collect();
            sort(&mut parts, self.sort, self.reverse);
            let is_open = self.opened.contains(&row.comm);
            lines.push(Shown { row, processes: Some(parts.len()), is_part: false });
            if is_open {
                let part = |row| Shown { row, processes: None, is_part: true };
                lines.extend(parts.into_iter().map(part));
            }
        }
        lines
    }

    /// What each column wants for these lines.
    fn widths(&self, lines: &[Shown]) -> [(Column, usize); Column::ALL.len()] {
        Column::ALL.map(|column| {
            let texts = lines.iter().map(|line| width(&self.value(line, column)));
            (column, texts.fold(column.usual_width(), usize::max))
        })
    }

    /// The text of a cell.
    fn value(&self, line: &Shown, column: Column) -> String {
        match (column, line.processes) {
            (Column::Pid, Some(processes)) => format!("×{processes}"),
            (Column::Comm, Some(_)) => {
                let sign = if self.opened.contains(&line.row.comm) { '▾' } else { '▸' };
                format!("{sign} {}", line.row.comm)
            }
            (Column::Comm, None) if line.is_part => format!("  {}", line.row.comm),
            _ => column.value(&line.row),
        }
    }

    /// What was there in the interval before, and how a cell shows that.
    fn style(&self, line: &Shown, column: Column) -> Style {
        let Some(before) = self.before.as_ref().filter(|_| self.has_colours) else {
            return Style::new();
        };
        let before = before.get(&line.key());
        let of = |counts: &Counts| match column {
            Column::Reads => counts.reads,
            Column::Hits => counts.hits,
            Column::Misses => counts.misses,
            Column::Readahead => counts.readahead,
            Column::Dirtied => counts.dirtied,
            _ => 0,
        };
        let (now, before_now) = (of(&line.row.counts), before.map_or(0, of));
        match column {
            Column::Comm if before.is_none() => Style::new().add_modifier(Modifier::BOLD),
            _ if now >= MUCH && now >= before_now * 2 => Style::new().fg(GROWN),
            _ => Style::new(),
        }
    }

    /// Hits and misses, as a bar.
    fn bar(&self, counts: &Counts) -> Line<'static> {
        let Some(percent) = counts.hit_percent() else { return Line::default() };
        let hits = (percent * BAR as f64 / 100.0).round() as usize;
        let [full, rest] = match self.has_colours {
            true => [Style::new().fg(HITS), Style::new().fg(MISSES)],
            false => [Style::new(); 2],
        };
        let pieces = [("█", hits, full), ("░", BAR - hits, rest)];
        Line::from_iter(pieces.map(|(cell, count, style)| Span::styled(cell.repeat(count), style)))
    }

    /// Does what a key means; whether to continue.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let columns = Column::ALL;
        let place = columns.iter().position(|&column| column == self.sort).unwrap_or_default();
        let room = self.room;
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Left => self.sort = columns[(place + columns.len() - 1) % columns.len()],
            KeyCode::Right => self.sort = columns[(place + 1) % columns.len()],
            KeyCode::Char('u') => self.sort = Column::User,
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('g') => self.groups = !self.groups,
            KeyCode::Up => self.choose(|at| at.saturating_sub(1)),
            KeyCode::Down => self.choose(|at| at + 1),
            KeyCode::PageUp => self.page(|at| at.saturating_sub(room)),
            KeyCode::PageDown => self.page(|at| at + room),
            KeyCode::Home => (self.chosen, self.above) = (None, 0),
            KeyCode::Enter | KeyCode::Char(' ') => self.open(),
            _ => {}
        }
        true
    }

    /// Chooses another line; at first, that at the top.
    fn choose(&mut self, next: impl Fn(usize) -> usize) {
        let lines = self.lines();
        let at = self.at(&lines).map_or(self.above, next).min(lines.len().saturating_sub(1));
        self.chosen = lines.get(at).map(|line| (line.key(), at));
        self.show_chosen(&lines);
    }

    /// Chooses a line a screen further, and scrolls as far.
    fn page(&mut self, next: impl Fn(usize) -> usize) {
        if self.chosen.is_none() {
            self.choose(|at| at);
        }
        self.above = next(self.above);
        self.choose(next);
    }

    /// The place of the line that is chosen: where it is gone, what is in its place.
    fn at(&self, lines: &[Shown]) -> Option<usize> {
        let (key, place) = self.chosen.as_ref()?;
        let found = lines.iter().position(|line| line.key() == *key);
        Some(found.unwrap_or((*place).min(lines.len().saturating_sub(1))))
    }

    /// Scrolls no further than there are lines, and as far as the line that is chosen is.
    fn show_chosen(&mut self, lines: &[Shown]) {
        self.above = self.above.min(lines.len().saturating_sub(self.room));
        if let Some(at) = self.at(lines) {
            self.above = self.above.clamp((at + 1).saturating_sub(self.room.max(1)), at);
        }
    }

    /// Opens the sum that is chosen, or closes it: also from one of its parts.
    fn open(&mut self) {
        let lines = self.lines();
        let Some(line) = self.at(&lines).and_then(|at| lines.get(at)) else { return };
        if line.processes.is_none() && !line.is_part {
            return;
        }
        let name = &line.row.comm;
        if !self.opened.remove(name) {
            self.opened.insert(name.clone());
        }
        let sum = lines.iter().position(|it| it.row.comm == *name && it.processes.is_some());
        self.chosen = sum.map(|at| (lines[at].key(), at));
    }

    /// Draws everything.
    pub fn draw(&mut self, frame: &mut Frame) {
        let lines = [Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)];
        let [top, middle, bottom] = Layout::vertical(lines).areas(frame.area());
        let total: Counts = self.rows.iter().map(|row| row.counts).sum();
        let width = usize::from(frame.area().width);
        let title = [
            format!("cachetop  {} s", self.time.as_secs()),
            format!("every {}", humantime::format_duration(self.interval)),
            format!("by {}{}", self.sort.title(), if self.reverse { " ↑" } else { "" }),
        ];
        let percent = total.hit_percent().map_or("-".into(), |percent| format!("{percent:.1} %"));
        let sums = [
            format!("{} hits", total.hits),
            format!("{} misses ({percent})", total.misses),
            format!("{} dirtied", total.dirtied),
        ];
        let lines = [title, sums].map(|parts| Line::from(fit(&parts, ", ", width)));
        frame.render_widget(Text::from(lines.to_vec()), top);

        let lines = self.lines();
        self.room = usize::from(middle.height.saturating_sub(1));
        self.show_chosen(&lines);
        let at = self.at(&lines);
        let columns = columns(self.widths(&lines), self.sort, width);
        let used = columns.iter().map(|(_, width)| width + 1).sum::<usize>();
        let has_bar =
            columns.iter().any(|(column, _)| *column == Column::HitPercent) && used + BAR <= width;
        let header = columns.iter().map(|&(column, width)| {
            let style = match column == self.sort {
                true => Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED),
                false => Style::new().add_modifier(Modifier::REVERSED),
            };
            Cell::from(column.aligned(column.title(), width)).style(style)
        });
        let title = Cell::from("█hit ░miss").style(Style::new().add_modifier(Modifier::REVERSED));
        let header = Cells::new(header.chain(has_bar.then_some(title)));
        let shown = lines.iter().enumerate().skip(self.above).take(self.room);
        let rows = shown.map(|(place, line)| {
            let cells = columns.iter().map(|&(column, width)| {
                let text = column.aligned(&self.value(line, column), width);
                Cell::from(text).style(self.style(line, column))
            });
            let bar = has_bar.then(|| Cell::from(self.bar(&line.row.counts)));
            let row = Cells::new(cells.chain(bar));
            match at == Some(place) {
                true => row.style(Style::new().add_modifier(Modifier::REVERSED)),
                false => row,
            }
        });
        let widths = columns.iter().map(|&(_, width)| width).chain(has_bar.then_some(BAR));
        let widths = widths.map(|width| Constraint::Length(width as u16));
        frame.render_widget(Table::new(rows, widths).header(header), middle);

        let keys = self.keys(&lines);
        frame.render_widget(Line::from(fit(&keys, "  ", width)), bottom);
    }

    /// What the keys do now.
    fn keys(&self, lines: &[Shown]) -> Vec<String> {
        let hidden = lines.len() - self.room.min(lines.len());
        let more = match hidden {
            0 => "↑↓".to_owned(),
            _ => format!("↑↓ {hidden} more"),
        };
        let has_sums = lines.iter().any(|line| line.processes.is_some());
        let open = has_sums.then(|| "Enter open".to_owned());
        let groups = if self.groups { "g each" } else { "g by name" }.to_owned();
        let keys = ["←→ sort", "u user", "r reverse"].map(str::to_owned);
        ["q quit".to_owned(), more].into_iter().chain(open).chain(keys).chain([groups]).collect()
    }
}

/// Processes of one name together; its number is the smallest of theirs.
fn sum(rows: &[&Row]) -> Row {
    let first = rows.iter().min_by_key(|row| row.pid).copied();
    let user = first.and_then(|row| row.user.clone());
    Row {
        pid: first.map_or(0, |row| row.pid),
        user: user.filter(|user| rows.iter().all(|row| row.user.as_ref() == Some(user))),
        comm: first.map_or_else(String::new, |row| row.comm.clone()),
        counts: rows.iter().map(|row| row.counts).sum(),
    }
}

/// The columns that a screen has room for, and their widths: the less important ones go first, and the
/// one that the rows are sorted by last. Names are cut before that, numbers never.
fn columns(
    widths: [(Column, usize); Column::ALL.len()],
    sort: Column,
    room: usize,
) -> Vec<(Column, usize)> {
    let least = |&(column, width): &(Column, usize)| match column.is_text() {
        true => SHORTEST_NAME.min(width),
        false => width,
    };
    let needed = |columns: &[(Column, usize)]| {
        columns.iter().map(least).sum::<usize>() + columns.len().saturating_sub(1)
    };
    let mut columns = widths.to_vec();
    let unimportant = [
        Column::Reads,
        Column::Readahead,
        Column::User,
        Column::Dirtied,
        Column::Pid,
        Column::Hits,
        Column::HitPercent,
        Column::Comm,
        Column::Misses,
    ];
    for goes in unimportant.into_iter().filter(|&column| column != sort).chain([sort]) {
        if needed(&columns) > room {
            columns.retain(|&(column, _)| column != goes);
        }
    }
    let mut spare = room.saturating_sub(needed(&columns));
    for column in &mut columns {
        let width = column.1.min(least(column) + spare);
        spare -= width - least(column);
        column.1 = width;
    }
    columns
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ratatui::{Terminal, backend::TestBackend};

    use super::*;

    fn view() -> View {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1), false);
        let row = |pid, comm: &str, reads, hits, misses, dirtied| Row {
            pid,
            user: Some(if pid == 77 { "backup" } else { "root" }.into()),
            comm: comm.into(),
            counts: Counts { reads, hits, misses, readahead: misses / 2, dirtied },
        };
        view.show(
            vec![
                row(512, "kworker/u4:2-ev", 0, 0, 0, 3),
                row(4_194_303, "postgres", 1200, 98_765_432, 1, 0),
                row(77, "dd", 16, 0, 256, 4096),
            ],
            Duration::from_secs(12),
        );
        view
    }

    fn screen(view: &mut View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content.chunks(width.into()).map(|line| {
            let line: String = line.iter().map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned() + "\n"
        });
        lines.collect()
    }

    fn press(view: &mut View, code: KeyCode) -> bool {
        view.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn eighty_columns_show_everything() {
        let expected = "\
cachetop  12 s, every 1s, by MISSES
98765432 hits, 257 misses (100.0 %), 4099 dirtied
    PID USER     COMM             READS     HITS  MISSES  HIT% READAHEAD DIRTIED
     77 backup   dd                  16        0     256   0.0       128    4096
4194303 root     postgres          1200 98765432       1 100.0         0       0
    512 root     kworker/u4:2-…       0        0       0     -         0       3

q quit  ↑↓  ←→ sort  u user  r reverse  g each
";
        assert_eq!(screen(&mut view(), 80, 8), expected);
    }

    #[test]
    fn processes_of_one_name_are_a_line_that_opens() {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1), false);
        let row = |pid, comm: &str, hits, misses| Row {
            pid,
            user: Some("root".into()),
            comm: comm.into(),
            counts: Counts { hits, misses, ..Counts::default() },
        };
        let rows = vec![row(9, "dd", 10, 30), row(5, "fio", 0, 40), row(8, "dd", 20, 20)];
        view.show(rows, Duration::from_secs(1));
        // Of each line, PID, COMM and MISSES.
        let lines = |view: &mut View| -> Vec<String> {
            let screen = screen(view, 100, 10);
            let rows = screen.lines().skip(3).take_while(|line| !line.is_empty());
            rows.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
        };
        let sum = "×2 root ▸ dd 0 30 50 37.5 0 0 ████░░░░░░";
        let fio = "5 root fio 0 0 40 0.0 0 0 ░░░░░░░░░░";
        assert_eq!(lines(&mut view), [sum, fio]);
        press(&mut view, KeyCode::Enter);
        assert_eq!(lines(&mut view), [sum, fio], "no line is chosen");
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Enter);
        let parts =
            ["9 root dd 0 10 30 25.0 0 0 ███░░░░░░░", "8 root dd 0 20 20 50.0 0 0 █████░░░░░"];
        let open = sum.replace('▸', "▾");
        assert_eq!(lines(&mut view), [&open, parts[0], parts[1], fio]);
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Down);
        press(&mut view, KeyCode::Char(' '));
        assert_eq!(lines(&mut view), [sum, fio], "closed from a part of it");
        press(&mut view, KeyCode::Char('g'));
        assert_eq!(lines(&mut view), [fio, parts[0], parts[1]], "each alone, by misses");
    }

    #[test]
    fn what_grows_has_a_colour_and_what_is_new_is_bold() {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1), true);
        let row = |pid, misses| Row {
            pid,
            user: None,
            comm: format!("p{pid}"),
            counts: Counts { misses, ..Counts::default() },
        };
        view.show(vec![row(1, 100), row(2, 100)], Duration::from_secs(1));
        let styles = |view: &View, column| -> Vec<Style> {
            view.lines().iter().map(|line| view.style(line, column)).collect()
        };
        assert!(
            styles(&view, Column::Misses).iter().all(|style| *style == Style::new()),
            "the first"
        );
        view.show(vec![row(1, 200), row(2, 199), row(3, 99)], Duration::from_secs(2));
        let grown = Style::new().fg(GROWN);
        assert_eq!(styles(&view, Column::Misses), [grown, Style::new(), Style::new()]);
        let bold = Style::new().add_modifier(Modifier::BOLD);
        assert_eq!(styles(&view, Column::Comm), [Style::new(), Style::new(), bold]);
    }

    #[test]
    fn forty_columns_show_what_matters() {
        let expected = "\
cachetop  12 s, every 1s, by MISSES
98765432 hits, 257 misses (100.0 %), …
    PID COMM          HITS  MISSES  HIT%
     77 dd               0     256   0.0
4194303 postgres  98765432       1 100.0
q quit  ↑↓ 1 more  ←→ sort  u user  …
";
        assert_eq!(screen(&mut view(), 40, 6), expected);
    }

    #[test]
    fn no_number_is_cut_at_any_width() {
        let row = |pid, user: &str, comm: &str, count: u64| Row {
            pid,
            user: Some(user.into()),
            comm: comm.into(),
            counts: Counts {
                reads: count,
                hits: count * 2,
                misses: count * 4,
                readahead: count * 8,
                dirtied: count * 16,
            },
        };
        // Each count has digits of its own, so that a part of one is none of the others.
        let rows = [
            row(61, "systemd-network", "systemd", 3_517),
            row(4_194_303, "a-name-of-thirty-two-characters", "Web Content-数据", 987_654_321),
            row(523, "root", "dd", 1_020_304_050_607),
        ];
        let mut shown = HashSet::new();
        for (count, sort) in (1..=rows.len()).flat_map(|n| Column::ALL.map(|column| (n, column))) {
            let rows = &rows[..count];
            let total: Counts = rows.iter().map(|row| row.counts).sum();
            let sums = [12, total.hits, total.misses, total.dirtied].map(|n| n.to_string());
            let cells = rows.iter().flat_map(|row| Column::ALL.map(|column| column.value(row)));
            let known: HashSet<String> = cells.chain(sums).collect();
            let mut view = View::new(sort, false, Duration::from_secs(1), false);
            view.show(rows.to_vec(), Duration::from_secs(12));
            for width in 1..=200 {
                let text = screen(&mut view, width, 7);
                let words = text.split([' ', '\n', '(', ')', ',']);
                for word in words.filter(|word| word.starts_with(|c: char| c.is_ascii_digit())) {
                    assert!(known.contains(word) || word == "1s", "{word} at {width}:\n{text}");
                    shown.insert(word.to_owned());
                }
                for name in text.split_whitespace().filter(|word| word.starts_with("a-na")) {
                    let is_marked =
                        name.ends_with('…') || name == "a-name-of-thirty-two-characters";
                    assert!(is_marked, "{name} at {width}:\n{text}");
                }
                // The column by which the rows are sorted goes last.
                let header = text.lines().nth(2).unwrap_or_default();
                assert!(width < 20 || header.contains(sort.title()), "{width}:\n{text}");
            }
        }
        let all = rows.iter().flat_map(|row| Column::ALL.map(|column| (column, column.value(row))));
        for (_, value) in all.filter(|(column, _)| !column.is_text()) {
            assert!(shown.contains(&value), "{value} is never shown");
        }
    }

    #[test]
    fn any_size_can_be_drawn() {
        let row = |pid| Row {
            pid,
            user: None,
            comm: "a-name-of-15-ch".into(),
            counts: Counts { hits: pid, misses: 9 - pid, ..Counts::default() },
        };
        for (width, height) in [(1, 1), (2, 3), (10, 2), (20, 4), (300, 100)] {
            screen(&mut view(), width, height);
            let mut groups = view();
            groups.show((1..8).map(row).collect(), Duration::from_secs(13));
            for key in [KeyCode::Down, KeyCode::Enter, KeyCode::PageDown, KeyCode::PageDown] {
                press(&mut groups, key);
                screen(&mut groups, width, height);
            }
            // Lines and rows of the terminal go.
            groups.show(vec![row(3)], Duration::from_secs(14));
            screen(&mut groups, width, height.div_ceil(2));
            press(&mut groups, KeyCode::Enter);
            screen(&mut groups, width, 1);
        }
    }

    #[test]
    fn the_line_that_is_chosen_stays_the_same_process() {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1), false);
        let row = |pid, name: &str, misses| Row {
            pid,
            user: None,
            comm: name.into(),
            counts: Counts { misses, ..Counts::default() },
        };
        let chosen = |view: &View| {
            let lines = view.lines();
            view.at(&lines).map(|at| (lines[at].row.pid, at))
        };
        view.show(vec![row(1, "a", 30), row(2, "b", 20), row(3, "c", 10)], Duration::from_secs(1));
        screen(&mut view, 80, 20);
        for _ in 0..2 {
            press(&mut view, KeyCode::Down);
        }
        assert_eq!(chosen(&view), Some((2, 1)));
        view.show(vec![row(1, "a", 30), row(2, "b", 40), row(3, "c", 10)], Duration::from_secs(2));
        assert_eq!(chosen(&view), Some((2, 0)), "it has more misses now");
        view.show(vec![row(3, "c", 10)], Duration::from_secs(3));
        assert_eq!(chosen(&view), Some((3, 0)), "it is gone");
        view.show(vec![row(3, "c", 10), row(2, "b", 9)], Duration::from_secs(4));
        assert_eq!(chosen(&view), Some((2, 1)), "it is back");
        // Without sums, Enter opens nothing, and chooses nothing else.
        view.show(vec![row(3, "c", 10), row(4, "c", 9), row(2, "b", 8)], Duration::from_secs(5));
        press(&mut view, KeyCode::Char('g'));
        press(&mut view, KeyCode::Enter);
        assert_eq!(chosen(&view), Some((2, 2)));
        assert!(view.opened.is_empty());
    }

    #[test]
    fn a_long_name_of_a_sum_is_whole_where_there_is_room() {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1), false);
        let row = |pid| Row {
            pid,
            user: None,
            comm: "a-name-of-15-ch".into(),
            counts: Counts::default(),
        };
        view.show(vec![row(1), row(2)], Duration::from_secs(1));
        assert!(
            screen(&mut view, 120, 8).contains(" ▸ a-name-of-15-ch "),
            "{}",
            screen(&mut view, 120, 8)
        );
    }

    #[test]
    fn keys_sort_and_scroll() {
        let mut view = view();
        let first = |view: &mut View| {
            let screen = screen(view, 80, 5);
            screen.lines().nth(3).unwrap().split_whitespace().next().unwrap().to_owned()
        };
        assert_eq!(first(&mut view), "77");
        press(&mut view, KeyCode::Left);
        assert_eq!(first(&mut view), "4194303", "by hits");
        press(&mut view, KeyCode::Char('r'));
        assert_eq!(first(&mut view), "77");
        press(&mut view, KeyCode::Down);
        assert_eq!(first(&mut view), "77", "the line at the top is chosen");
        press(&mut view, KeyCode::Down);
        assert_eq!(first(&mut view), "512");
        for _ in 0..9 {
            press(&mut view, KeyCode::PageDown);
        }
        assert_eq!(first(&mut view), "4194303", "not further than the last row");
        press(&mut view, KeyCode::Home);
        assert_eq!(first(&mut view), "77");
        press(&mut view, KeyCode::Char('r'));
        press(&mut view, KeyCode::Char('u'));
        assert_eq!(first(&mut view), "77", "backup, before root");
        press(&mut view, KeyCode::Char('r'));
        assert_eq!(first(&mut view), "4194303", "root, and of its processes the busiest");
        assert!(press(&mut view, KeyCode::Char('x')) && press(&mut view, KeyCode::Char('c')));
        assert!(!press(&mut view, KeyCode::Char('q')) && !press(&mut view, KeyCode::Esc));
        assert!(!view.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }
}
