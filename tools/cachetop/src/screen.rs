//! What the full screen shows, and what keys change.

use std::time::Duration;

use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row as Cells, Table},
};

use crate::counts::{Column, Counts, Row, sort, width};

/// The narrowest that a column of names gets.
const SHORTEST_NAME: usize = 7;

/// What is to be drawn.
pub struct View {
    rows: Vec<Row>,
    /// What each column wants for these rows.
    widths: [(Column, usize); Column::ALL.len()],
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
    pub fn new(sort: Column, reverse: bool, interval: Duration) -> View {
        let (time, above, room) = (Duration::ZERO, 0, 0);
        let widths = Column::ALL.map(|column| (column, column.width(&[])));
        View { rows: Vec::new(), widths, sort, reverse, interval, time, above, room }
    }

    /// Takes the rows of an interval, `time` after the start.
    pub fn show(&mut self, rows: Vec<Row>, time: Duration) {
        self.rows = rows;
        self.widths = Column::ALL.map(|column| (column, column.width(&self.rows)));
        self.time = time;
        sort(&mut self.rows, self.sort, self.reverse);
    }

    /// Does what a key means; whether to continue.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let columns = Column::ALL;
        let place = columns.iter().position(|&column| column == self.sort).unwrap_or_default();
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Left => self.sort = columns[(place + columns.len() - 1) % columns.len()],
            KeyCode::Right => self.sort = columns[(place + 1) % columns.len()],
            KeyCode::Char('u') => self.sort = Column::User,
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::Down => self.above += 1,
            KeyCode::PageUp => self.above = self.above.saturating_sub(self.room),
            KeyCode::PageDown => self.above += self.room,
            KeyCode::Home => self.above = 0,
            _ => {}
        }
        sort(&mut self.rows, self.sort, self.reverse);
        true
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

        self.room = usize::from(middle.height.saturating_sub(1));
        self.above = self.above.min(self.rows.len().saturating_sub(self.room));
        let columns = columns(self.widths, self.sort, width);
        let header = Cells::new(columns.iter().map(|&(column, width)| {
            let style = match column == self.sort {
                true => Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED),
                false => Style::new().add_modifier(Modifier::REVERSED),
            };
            Cell::from(column.aligned(column.title(), width)).style(style)
        }));
        let shown = self.rows.iter().skip(self.above).take(self.room);
        let cell =
            |row, (column, width): (Column, usize)| column.aligned(&column.value(row), width);
        let rows = shown.map(|row| Cells::new(columns.iter().map(|&column| cell(row, column))));
        let widths = columns.iter().map(|&(_, width)| Constraint::Length(width as u16));
        frame.render_widget(Table::new(rows, widths).header(header), middle);

        let hidden = self.rows.len() - self.room.min(self.rows.len());
        let more = (hidden > 0).then(|| format!("↑↓ {hidden} more"));
        let keys = ["←→ sort", "u user", "r reverse"].map(str::to_owned);
        let keys: Vec<String> = ["q quit".to_owned()].into_iter().chain(more).chain(keys).collect();
        frame.render_widget(Line::from(fit(&keys, "  ", width)), bottom);
    }
}

/// As many of the parts of a line as fit, and `…` for the others. No part is cut: there are numbers in
/// them.
fn fit(parts: &[String], separator: &str, room: usize) -> String {
    let mut lines = (0..=parts.len()).rev().map(|count| {
        let rest = (count < parts.len()).then_some("…");
        let parts: Vec<&str> = parts[..count].iter().map(String::as_str).chain(rest).collect();
        parts.join(separator)
    });
    lines.find(|line| width(line) <= room).unwrap_or_default()
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
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1));
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

q quit  ←→ sort  u user  r reverse
";
        assert_eq!(screen(&mut view(), 80, 8), expected);
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
            let mut view = View::new(sort, false, Duration::from_secs(1));
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
        for (width, height) in [(1, 1), (2, 3), (10, 2), (20, 4), (300, 100)] {
            screen(&mut view(), width, height);
        }
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
