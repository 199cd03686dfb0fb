//! A table on the screen: its rows can be sorted, and one of them chosen. No number is cut: a column that has no room
//! goes.

use std::cmp::Ordering;

use common::colours::{self, PARTS};
use common_screen::{cut, width};
use ratatui::{
    style::{Color, Modifier, Style},
    text::{Line, Span},
};

/// Columns of a bar: at least, and at most.
const BAR: [usize; 2] = [10, 30];
/// The narrowest that a column of texts gets.
const SHORTEST: usize = 7;

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// What stands above it.
    pub title: &'static str,
    /// What it holds.
    pub holds: Holds,
    /// Those of the smallest number go first, where there is no room for all.
    pub keep: u8,
}

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// At the left; cut where it is too long.
    Text,
    /// At the right.
    Number,
    /// The parts of a time.
    Bar,
}

/// One value.
#[derive(Clone, Debug)]
pub enum Cell {
    /// Sorted ascending.
    Text(String),
    /// Sorted by its value, descending, as it is written.
    Number(f64, String),
    /// Not known.
    Unknown,
    /// Its parts, and the whole that they are of.
    Bar([u64; 5], u64),
}

impl Cell {
    /// A whole number.
    pub fn count(count: u64) -> Cell {
        Cell::Number(count as f64, count.to_string())
    }

    fn text(&self) -> &str {
        match self {
            Cell::Text(text) | Cell::Number(_, text) => text,
            Cell::Unknown => "-",
            Cell::Bar(..) => "",
        }
    }

    fn order(&self, other: &Cell) -> Ordering {
        match (self, other) {
            (Cell::Text(a), Cell::Text(b)) => a.cmp(b),
            (Cell::Number(a, _), Cell::Number(b, _)) => b.total_cmp(a),
            (Cell::Number(..), _) => Ordering::Less,
            (_, Cell::Number(..)) => Ordering::Greater,
            _ => Ordering::Equal,
        }
    }
}

/// A row, and what a filter asks about it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Tells it apart from the others, also in the next second.
    pub key: String,
    /// Its disk.
    pub disk: String,
    /// Its process, by number and name.
    pub process: Option<(Option<u32>, String)>,
    /// One for each column.
    pub cells: Vec<Cell>,
}

/// A table, and what keys have changed of it.
pub struct Grid {
    /// All of its columns.
    pub columns: &'static [Column],
    /// Which one the rows are sorted by.
    sort: usize,
    /// The row that keys have chosen, and where it was then.
    chosen: Option<(String, usize)>,
    /// How many rows have been scrolled out at the top.
    above: usize,
    /// How many rows there was room for, when it was last drawn.
    room: usize,
}

impl Grid {
    /// Sorted by this column.
    pub fn new(columns: &'static [Column], sort: &str) -> Grid {
        let sort = columns.iter().position(|column| column.title == sort).unwrap_or_default();
        Grid { columns, sort, chosen: None, above: 0, room: 0 }
    }

    /// What it is sorted by.
    pub fn sorted_by(&self) -> &'static str {
        self.columns[self.sort].title
    }

    /// Sorts by the next column, or by the one before: a bar is none.
    pub fn sort_by_next(&mut self, step: usize) {
        let count = self.columns.len();
        loop {
            self.sort = (self.sort + step) % count;
            if self.columns[self.sort].holds != Holds::Bar {
                break;
            }
        }
    }

    /// As [`sort_by_next`](Grid::sort_by_next), the other way.
    pub fn sort_by_last(&mut self) {
        self.sort_by_next(self.columns.len() - 1);
    }

    /// Sorts them; equal ones keep their order.
    pub fn sort(&self, rows: &mut [Row]) {
        rows.sort_by(|a, b| a.cells[self.sort].order(&b.cells[self.sort]));
    }

    /// Chooses another row; at first, that at the top.
    pub fn choose(&mut self, rows: &[Row], next: impl Fn(usize) -> usize) {
        let at = self.at(rows).map_or(self.above, next).min(rows.len().saturating_sub(1));
        self.chosen = rows.get(at).map(|row| (row.key.clone(), at));
    }

    /// How many rows a page has.
    pub fn page(&self) -> usize {
        self.room.max(1)
    }

    /// Chooses none, and shows the top.
    pub fn reset(&mut self) {
        (self.chosen, self.above) = (None, 0);
    }

    /// The row that is chosen; if none is, the first.
    pub fn chosen<'a>(&self, rows: &'a [Row]) -> Option<&'a Row> {
        rows.get(self.at(rows).unwrap_or(0))
    }

    /// The place of the chosen row: where it is gone, what is in its place.
    fn at(&self, rows: &[Row]) -> Option<usize> {
        let (key, place) = self.chosen.as_ref()?;
        let found = rows.iter().position(|row| row.key == *key);
        Some(found.unwrap_or((*place).min(rows.len().saturating_sub(1))))
    }

    /// Its titles, and so many of its rows.
    pub fn lines(
        &mut self,
        rows: &[Row],
        room: usize,
        columns: usize,
        is_active: bool,
        has_colours: bool,
    ) -> Vec<Line<'static>> {
        self.room = room;
        self.above = self.above.min(rows.len().saturating_sub(room));
        let at = self.at(rows).filter(|_| is_active);
        if let Some(at) = at {
            self.above = self.above.clamp((at + 1).saturating_sub(room.max(1)), at);
        }
        let widths = self.widths(rows, columns);
        let mut lines = vec![self.titles(&widths, columns)];
        for (place, row) in rows.iter().enumerate().skip(self.above).take(room) {
            let mut line = Vec::new();
            for &(column, width) in &widths {
                if !line.is_empty() {
                    line.push(Span::raw(" "));
                }
                line.extend(self.cell(column, &row.cells[column], width, has_colours));
            }
            let style = match at == Some(place) {
                true => Style::new().add_modifier(Modifier::REVERSED),
                false => Style::new(),
            };
            lines.push(Line::from(line).style(style));
        }
        lines
    }

    fn titles(&self, widths: &[(usize, usize)], columns: usize) -> Line<'static> {
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let mut line = Vec::new();
        let mut used = 0;
        for &(column, width) in widths {
            if !line.is_empty() {
                line.push(Span::styled(" ", reversed));
                used += 1;
            }
            let style = match column == self.sort {
                true => reversed.add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
                false => reversed,
            };
            let text = self.aligned(column, self.columns[column].title, width);
            line.push(Span::styled(text, style));
            used += width;
        }
        line.push(Span::styled(" ".repeat(columns.saturating_sub(used)), reversed));
        Line::from(line)
    }

    fn cell(
        &self,
        column: usize,
        cell: &Cell,
        width: usize,
        has_colours: bool,
    ) -> Vec<Span<'static>> {
        let Cell::Bar(parts, whole) = cell else {
            return vec![Span::raw(self.aligned(column, cell.text(), width))];
        };
        let cells = colours::cells(*parts, *whole, width);
        let rest = width - cells.iter().sum::<usize>();
        let part = |(part, cells): (&colours::PartColour, usize)| {
            let letters = part.letter.to_string().repeat(cells);
            match has_colours {
                // 16: black, whatever the terminal's own colours are.
                true => Span::styled(
                    letters,
                    Style::new().fg(Color::Indexed(16)).bg(Color::Indexed(part.ansi)),
                ),
                false => Span::raw(letters),
            }
        };
        let parts = PARTS.iter().zip(cells).filter(|(_, cells)| *cells > 0).map(part);
        parts.chain([Span::raw(" ".repeat(rest))]).collect()
    }

    fn aligned(&self, column: usize, text: &str, columns: usize) -> String {
        let text = match self.columns[column].holds {
            Holds::Number => text.to_owned(),
            _ => cut(text, columns),
        };
        let rest = " ".repeat(columns.saturating_sub(width(&text)));
        if self.columns[column].holds == Holds::Number { rest + &text } else { text + &rest }
    }

    /// The columns that there is room for, and their widths: the column that the rows are sorted by goes last. One that
    /// says nothing of any row is left out.
    fn widths(&self, rows: &[Row], room: usize) -> Vec<(usize, usize)> {
        let wanted = |column: usize| {
            let texts = rows.iter().map(|row| width(row.cells[column].text()));
            let widest = texts.max().unwrap_or_default().max(width(self.columns[column].title));
            if self.columns[column].holds == Holds::Bar { BAR[1] } else { widest }
        };
        let least = |&(column, wanted): &(usize, usize)| match self.columns[column].holds {
            Holds::Text => wanted.min(SHORTEST.max(width(self.columns[column].title))),
            Holds::Number => wanted,
            Holds::Bar => BAR[0],
        };
        let needed = |columns: &[(usize, usize)]| {
            columns.iter().map(least).sum::<usize>() + columns.len().saturating_sub(1)
        };
        let is_empty = |column: usize| {
            self.columns[column].holds == Holds::Text
                && rows.iter().all(|row| row.cells[column].text().is_empty())
        };
        let all = 0..self.columns.len();
        let mut columns: Vec<(usize, usize)> = all
            .filter(|&column| column == self.sort || rows.is_empty() || !is_empty(column))
            .map(|column| (column, wanted(column)))
            .collect();
        let mut order: Vec<u8> = self.columns.iter().map(|column| column.keep).collect();
        order.sort_unstable();
        order.dedup();
        for goes in order {
            if needed(&columns) > room {
                columns
                    .retain(|&(place, _)| place == self.sort || self.columns[place].keep != goes);
            }
        }
        if needed(&columns) > room {
            columns.clear();
        }
        self.widened(columns, least, room)
    }

    /// Gives what is left of the room to texts, and then to bars.
    fn widened(
        &self,
        columns: Vec<(usize, usize)>,
        least: impl Fn(&(usize, usize)) -> usize,
        room: usize,
    ) -> Vec<(usize, usize)> {
        let mut widths: Vec<usize> = columns.iter().map(least).collect();
        let used = widths.iter().sum::<usize>() + widths.len().saturating_sub(1);
        let mut spare = room.saturating_sub(used);
        for holds in [Holds::Text, Holds::Bar] {
            for (place, &(column, wanted)) in columns.iter().enumerate() {
                if self.columns[column].holds == holds {
                    let more = (wanted - widths[place]).min(spare);
                    widths[place] += more;
                    spare -= more;
                }
            }
        }
        columns.into_iter().map(|(column, _)| column).zip(widths).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] = &[
        Column { title: "DISK", holds: Holds::Text, keep: 100 },
        Column { title: "I/OS", holds: Holds::Number, keep: 60 },
        Column { title: "SLOW", holds: Holds::Number, keep: 90 },
        Column { title: "PARTS", holds: Holds::Bar, keep: 95 },
        Column { title: "MAX ms", holds: Holds::Number, keep: 80 },
        Column { title: "NOTE", holds: Holds::Text, keep: 70 },
    ];

    fn row(disk: &str, bios: u64, slow: u64, max: &str, note: &str) -> Row {
        let max = Cell::Number(max.parse().unwrap_or_default(), max.to_owned());
        let cells = vec![
            Cell::Text(disk.to_owned()),
            Cell::count(bios),
            Cell::count(slow),
            Cell::Bar([0, 10, 80, 10, 0], 100),
            max,
            Cell::Text(note.to_owned()),
        ];
        Row { key: disk.to_owned(), disk: disk.to_owned(), process: None, cells }
    }

    fn drawn(grid: &mut Grid, rows: &[Row], room: usize, columns: usize) -> Vec<String> {
        let lines = grid.lines(rows, room, columns, true, false);
        lines.iter().map(|line| line.to_string().trim_end().to_owned()).collect()
    }

    #[test]
    fn the_largest_is_on_top_and_letters_stand_for_colours() {
        let mut rows = [row("vda", 10, 1, "3.000", ""), row("a-long-name", 5, 2, "12.500", "")];
        let mut grid = Grid::new(COLUMNS, "SLOW");
        grid.sort(&mut rows);
        let expected = [
            "DISK        I/OS SLOW PARTS      MAX ms",
            "a-long-name    5    2 qdddddddde 12.500",
            "vda           10    1 qdddddddde  3.000",
        ];
        assert_eq!(drawn(&mut grid, &rows, 9, 39), expected);
        grid.sort_by_next(1);
        assert_eq!(grid.sorted_by(), "MAX ms", "not by a bar");
        grid.sort_by_last();
        grid.sort_by_last();
        assert_eq!(grid.sorted_by(), "I/OS");
        grid.sort(&mut rows);
        assert!(drawn(&mut grid, &rows, 9, 80)[1].starts_with("vda "));
    }

    #[test]
    fn no_number_is_cut_at_any_width_and_the_sorted_column_goes_last() {
        let rows = [
            row("nvme0n1", 4_294_967_295, 123_456, "3600000.125", "EIO, 7 requests"),
            row("dm-数据", 7, 0, "0.001", ""),
        ];
        let known = ["4294967295", "123456", "3600000.125", "7", "0", "0.001"];
        for sort in ["DISK", "I/OS", "SLOW", "MAX ms", "NOTE"] {
            let mut grid = Grid::new(COLUMNS, sort);
            for columns in 0..200 {
                let lines = drawn(&mut grid, &rows, 5, columns);
                assert!(lines.iter().all(|line| width(line) <= columns), "{lines:?} at {columns}");
                let words = lines.iter().skip(1).flat_map(|line| line.split(' '));
                let digits = words.filter(|word| word.starts_with(|c: char| c.is_ascii_digit()));
                for word in digits.filter(|word| !["7"].contains(word) && !word.contains('…')) {
                    assert!(known.contains(&word), "{word} at {columns}: {lines:?}");
                }
                assert!(columns < 20 || lines[0].contains(sort), "{sort} at {columns}: {lines:?}");
            }
        }
    }

    #[test]
    fn the_chosen_row_stays_the_same_and_is_shown() {
        let mut rows: Vec<Row> =
            (0..20).map(|n| row(&format!("disk{n}"), n, 20 - n, "1.000", "")).collect();
        let mut grid = Grid::new(COLUMNS, "SLOW");
        grid.sort(&mut rows);
        drawn(&mut grid, &rows, 5, 80);
        for _ in 0..8 {
            grid.choose(&rows, |at| at + 1);
        }
        assert_eq!(grid.chosen(&rows).map(|row| &*row.key), Some("disk7"));
        assert!(drawn(&mut grid, &rows, 5, 80)[5].starts_with("disk7 "));
        rows.reverse();
        assert_eq!(grid.chosen(&rows).map(|row| &*row.key), Some("disk7"));
        assert!(drawn(&mut grid, &rows, 5, 80).iter().any(|line| line.starts_with("disk7 ")));
        drawn(&mut grid, &rows[..2], 0, 80);
        drawn(&mut grid, &[], 3, 1);
        assert!(grid.chosen(&[]).is_none());
    }
}
