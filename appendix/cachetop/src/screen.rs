//! What the full screen shows, and what keys change.

use std::time::Duration;

use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Alignment, Constraint, Layout},
    style::{Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row as Cells, Table},
};

use crate::counts::{Column, Counts, Row, sort};

/// The narrowest that the column COMM gets.
const SHORTEST_COMM: usize = 7;

/// What is to be drawn.
pub struct View {
    rows: Vec<Row>,
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
        View { rows: Vec::new(), sort, reverse, interval, time, above, room }
    }

    /// Takes the rows of an interval, `time` after the start.
    pub fn show(&mut self, rows: Vec<Row>, time: Duration) {
        self.rows = rows;
        self.time = time;
        sort(&mut self.rows, self.sort, self.reverse);
    }

    /// Does what a key means; whether to go on.
    pub fn key(&mut self, key: KeyEvent) -> bool {
        let columns = Column::ALL;
        let place = columns.iter().position(|&column| column == self.sort).unwrap_or_default();
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Left => self.sort = columns[(place + columns.len() - 1) % columns.len()],
            KeyCode::Right => self.sort = columns[(place + 1) % columns.len()],
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
        let title = format!(
            "cachetop  {} s, every {}, by {}{}",
            self.time.as_secs(),
            humantime::format_duration(self.interval),
            self.sort.title(),
            if self.reverse { " ↑" } else { "" },
        );
        let percent = total.hit_percent().map_or("-".into(), |percent| format!("{percent:.1} %"));
        let sums = format!(
            "{} hits, {} misses ({percent}), {} dirtied",
            total.hits, total.misses, total.dirtied
        );
        frame.render_widget(Text::from(vec![Line::from(title), Line::from(sums)]), top);

        self.room = usize::from(middle.height.saturating_sub(1));
        self.above = self.above.min(self.rows.len().saturating_sub(self.room));
        let columns = columns(usize::from(middle.width));
        let cell = |column: Column, text: String| {
            let alignment = if column == Column::Comm { Alignment::Left } else { Alignment::Right };
            Cell::from(Text::from(text).alignment(alignment))
        };
        let header = Cells::new(columns.iter().map(|&column| {
            let style = match column == self.sort {
                true => Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED),
                false => Style::new().add_modifier(Modifier::REVERSED),
            };
            cell(column, column.title().to_owned()).style(style)
        }));
        let shown = self.rows.iter().skip(self.above).take(self.room);
        let rows = shown
            .map(|row| Cells::new(columns.iter().map(|&column| cell(column, column.value(row)))));
        let widths = columns.iter().map(|&column| match column {
            Column::Comm => Constraint::Max(column.width() as u16),
            other => Constraint::Length(other.width() as u16),
        });
        frame.render_widget(Table::new(rows, widths).header(header), middle);

        let hidden = self.rows.len() - self.room.min(self.rows.len());
        let keys = match hidden {
            0 => "q quit  ←→ sort  r reverse".to_owned(),
            more => format!("q quit  ←→ sort  r reverse  ↑↓ {more} more"),
        };
        frame.render_widget(Line::from(keys), bottom);
    }
}

/// The columns that a screen of this width has room for: the less important ones go first.
fn columns(width: usize) -> Vec<Column> {
    let mut columns = Column::ALL.to_vec();
    let needed = |columns: &[Column]| -> usize {
        let widths = columns.iter().map(|&column| match column {
            Column::Comm => SHORTEST_COMM,
            other => other.width(),
        });
        widths.sum::<usize>() + columns.len() - 1
    };
    for unimportant in
        [Column::Reads, Column::Readahead, Column::Dirtied, Column::Pid, Column::Hits]
    {
        if needed(&columns) > width {
            columns.retain(|&column| column != unimportant);
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;

    fn view() -> View {
        let mut view = View::new(Column::Misses, false, Duration::from_secs(1));
        let row = |pid, comm: &str, reads, hits, misses, dirtied| Row {
            pid,
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
    PID COMM               READS     HITS   MISSES   HIT% READAHEAD  DIRTIED
     77 dd                    16        0      256    0.0       128     4096
4194303 postgres            1200 98765432        1  100.0         0        0
    512 kworker/u4:2-ev        0        0        0      -         0        3

q quit  ←→ sort  r reverse
";
        assert_eq!(screen(&mut view(), 80, 8), expected);
    }

    #[test]
    fn forty_columns_show_what_matters() {
        let expected = "\
cachetop  12 s, every 1s, by MISSES
98765432 hits, 257 misses (100.0 %), 409
    PID COMM        HITS   MISSES   HIT%
     77 dd             0      256    0.0
4194303 postgre 98765432        1  100.0
q quit  ←→ sort  r reverse  ↑↓ 1 more
";
        assert_eq!(screen(&mut view(), 40, 6), expected);
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
        assert!(press(&mut view, KeyCode::Char('x')) && press(&mut view, KeyCode::Char('c')));
        assert!(!press(&mut view, KeyCode::Char('q')) && !press(&mut view, KeyCode::Esc));
        assert!(!view.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }
}
