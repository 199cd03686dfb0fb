//! A drawing made of characters, as the READMEs have it, as SVG: lines become lines, arrows arrows, and the
//! words stay text. The page's style gives it its colours.
//!
//! The crate svgbob was tried (0.7.6, with all 34 drawings). It takes characters of words for lines: in the storage
//! stack of the root README, the `()` of `read()` becomes an ellipse, the `_` of `submit_bio` and the `-` of `01-06`
//! become strokes; in stage 13, `rq->bio` becomes an arrow, the quotes around "events" vanish, and the `^` at the end
//! of a line is no tip. Hiding the words from it takes most of what this file does, and brings 68 more crates.

use std::{fmt::Write, ops::Range};

use common_base::colours::{PARTS, PartColour};

use crate::escape::escape;

/// A character's width and height.
const WIDTH: usize = 8;
const HEIGHT: usize = 17;

/// What stands between words and is no word.
#[derive(Clone, Copy, PartialEq)]
enum Cell {
    Space,
    Text,
    /// Lines from the middle to these sides.
    Lines(Sides),
    /// The tip of an arrow that comes from this side.
    Tip(Sides),
    /// `/`: true, `\`: false.
    Slope(bool),
    /// A part of a bar of `#`.
    Bar,
}

/// Left, right, up, down.
type Sides = [bool; 4];

const LEFT: Sides = [true, false, false, false];
const RIGHT: Sides = [false, true, false, false];
const UP: Sides = [false, false, true, false];
const DOWN: Sides = [false, false, false, true];

/// Whether a block of code is a drawing: it has lines, or arrows with a shaft.
pub fn is_one(text: &str) -> bool {
    ["--->", "<---", "+--", "--+", "|--", "──"].iter().any(|line| text.contains(line))
}

/// The drawing as a figure, in one line of HTML. Rows that are marked have a colour of their own.
pub fn figure(text: &str, is_marked: impl Fn(&str) -> bool) -> String {
    let grid: Vec<Vec<char>> = text.lines().map(|line| line.chars().collect()).collect();
    let columns = grid.iter().map(Vec::len).max().unwrap_or(0);
    let (width, height) = (columns * WIDTH, grid.len() * HEIGHT);
    let mut marks = String::new();
    for (row, _) in text.lines().enumerate().filter(|(_, line)| is_marked(line)) {
        let y = row * HEIGHT;
        let _ =
            write!(marks, "<rect class=\"mark\" y=\"{y}\" width=\"{width}\" height=\"{HEIGHT}\"/>");
    }
    let mut shapes = Shapes { has_parts: has_parts(text), ..Shapes::default() };
    for row in 0..grid.len() {
        for column in 0..grid[row].len() {
            shapes.add(&grid, row, column);
        }
    }
    let Shapes { lines, tips, bars, words, .. } = shapes;
    let label: Vec<&str> =
        text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).collect();
    format!(
        "<figure class=\"drawing\"><svg role=\"img\" aria-label=\"{}\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">{marks}<path class=\"lines\" d=\"{lines}\"/><path d=\"{tips}{bars}\"/>\
         {words}</svg></figure>",
        escape(&label.join(" ")),
    )
}

/// What a drawing consists of: three paths, and elements with text.
#[derive(Default)]
struct Shapes {
    lines: String,
    tips: String,
    bars: String,
    words: String,
    /// Whether the names of the parts of an I/O's time have their colours.
    has_parts: bool,
}

/// Whether a text is about the parts of an I/O's time: it has the names of four of them. Alone, `end` is a word.
fn has_parts(text: &str) -> bool {
    let of =
        |name: &str| text.split(|c: char| !c.is_alphanumeric()).any(|word| is_named(word, name));
    PARTS[..4].iter().all(|part| of(part.name))
}

/// Whether a line leads to these columns, and one away from them: between other words, it is one of them.
fn on_a_line(row: &[char], columns: Range<usize>) -> bool {
    let is_line = |c: Option<&char>| c == Some(&'-');
    let before = row[..columns.start].iter().rev().find(|c| **c != ' ');
    is_line(before) && is_line(row[columns.end..].iter().find(|c| **c != ' '))
}

fn is_named(word: &str, name: &str) -> bool {
    word == name || word == name.to_uppercase()
}

/// The part whose name a word is.
fn part_of(word: &str) -> Option<&'static PartColour> {
    PARTS.iter().find(|part| is_named(word, part.name))
}

/// The table of the parts as slow_io prints it: each bar gets its part's colour. None, where there is no bar.
pub fn table(text: &str) -> Option<String> {
    let (mut html, mut bars) = (String::new(), 0);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let part = words.next().and_then(part_of).filter(|_| words.nth(2) == Some("%"));
        let bar = line.len() - line.trim_end_matches('#').len();
        match part {
            Some(part) if bar > 0 => {
                let before = &line[..line.len() - bar];
                let letters = part.letter.to_string().repeat(bar);
                let _ = write!(
                    html,
                    "{}<span class=\"part\" style=\"background:{}\" title=\"{}\">{letters}</span>",
                    escape(before),
                    part.rgb,
                    part.name
                );
                bars += 1;
            }
            _ => html += &escape(line),
        }
        html.push('\n');
    }
    (bars > 0).then(|| format!("<pre><code class=\"nohighlight hljs\">{html}</code></pre>"))
}

impl Shapes {
    /// Adds what stands in a cell. A word is added whole, at its first character.
    fn add(&mut self, grid: &[Vec<char>], row: usize, column: usize) {
        let (x, y) = (column * WIDTH, row * HEIGHT);
        let middle = (x + WIDTH / 2, y + HEIGHT / 2);
        match cell(grid, row, column) {
            Cell::Lines(sides) => line(&mut self.lines, middle, reach(grid, row, column, sides)),
            Cell::Tip(from) => {
                line(&mut self.lines, middle, reach(grid, row, column, from));
                tip(&mut self.tips, middle, from);
            }
            Cell::Slope(is_rising) => {
                let (from, to) = if is_rising { (y + HEIGHT, y) } else { (y, y + HEIGHT) };
                let _ = write!(self.lines, "M{x} {from}L{} {to}", x + WIDTH);
            }
            Cell::Bar => {
                let _ = write!(self.bars, "M{x} {}h{WIDTH}v{}h-{WIDTH}z", y + 5, HEIGHT - 10);
            }
            Cell::Text if column == 0 || cell(grid, row, column - 1) != Cell::Text => {
                let is_text = |&at: &usize| cell(grid, row, at) == Cell::Text;
                let word: String =
                    (column..grid[row].len()).take_while(is_text).map(|at| grid[row][at]).collect();
                let (y, length) = (y + 13, word.chars().count() * WIDTH);
                let is_on_a_line = || on_a_line(&grid[row], column..column + word.chars().count());
                if let Some(part) = part_of(&word).filter(|_| self.has_parts && is_on_a_line()) {
                    let _ = write!(
                        self.words,
                        "<rect x=\"{x}\" y=\"{}\" width=\"{length}\" height=\"{HEIGHT}\" rx=\"3\" \
                         style=\"fill:{}\"/><text class=\"part\" x=\"{x}\" y=\"{y}\" \
                         textLength=\"{length}\">{word}</text>",
                        y - 13,
                        part.rgb
                    );
                    return;
                }
                let word = escape(&word);
                let _ = write!(
                    self.words,
                    "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\">{word}</text>"
                );
            }
            Cell::Text | Cell::Space => {}
        }
    }
}

fn at(grid: &[Vec<char>], row: Option<usize>, column: Option<usize>) -> char {
    let found = row.and_then(|row| grid.get(row)?.get(column?));
    found.copied().unwrap_or(' ')
}

/// The characters on the four sides.
fn around(grid: &[Vec<char>], row: usize, column: usize) -> [char; 4] {
    [
        at(grid, Some(row), column.checked_sub(1)),
        at(grid, Some(row), Some(column + 1)),
        at(grid, row.checked_sub(1), Some(column)),
        at(grid, Some(row + 1), Some(column)),
    ]
}

fn cell(grid: &[Vec<char>], row: usize, column: usize) -> Cell {
    let around = around(grid, row, column);
    let [left, right, above, below] = around;
    let is_word = left.is_alphanumeric() || right.is_alphanumeric();
    match grid[row][column] {
        ' ' => Cell::Space,
        '-' if is_line(&grid[row], column) => Cell::Lines([true, true, false, false]),
        '|' => Cell::Lines([false, false, true, true]),
        '+' => {
            let sides = [
                "-+".contains(left),
                "-+".contains(right),
                "|+v".contains(above),
                "|+v".contains(below),
            ];
            if sides.contains(&true) { Cell::Lines(sides) } else { Cell::Text }
        }
        '>' if "-─".contains(left) && is_line(&grid[row], column - 1) => Cell::Tip(LEFT),
        '<' if "-─".contains(right) => Cell::Tip(RIGHT),
        'v' if left == ' ' && right == ' ' => Cell::Tip(UP),
        '^' => Cell::Tip(DOWN),
        '/' if !is_word && !"/_".contains(right) => Cell::Slope(true),
        '\\' if !is_word => Cell::Slope(false),
        '#' if left == '#' || right == '#' => Cell::Bar,
        '─' => Cell::Lines([true, true, false, false]),
        '│' => Cell::Lines([false, false, true, true]),
        '┐' => Cell::Lines([true, false, false, true]),
        '└' => Cell::Lines([false, true, true, false]),
        '┴' => Cell::Lines([true, true, true, false]),
        _ => Cell::Text,
    }
}

/// Whether a `-` belongs to a line, and not to words such as `01-06`, `rq->bio`, `--json` and `8 - 4`.
fn is_line(row: &[char], column: usize) -> bool {
    let is_dash = |&at: &usize| row.get(at) == Some(&'-');
    let start = (0..=column).rev().take_while(is_dash).last().unwrap_or(column);
    let end = (column..row.len()).take_while(is_dash).last().unwrap_or(column) + 1;
    let before = start.checked_sub(1).map_or(' ', |before| row[before]);
    let after = row.get(end).copied().unwrap_or(' ');
    let within_a_word = |from: char, to: Option<&char>| {
        from.is_alphanumeric() && to.is_some_and(|to| to.is_alphanumeric())
    };
    // `01-06`, `rq->bio`
    let next = if after == '>' { row.get(end + 1) } else { row.get(end) };
    let joins = "+|<>\\/".contains(before) || "+|<>\\/".contains(after);
    (joins || end - start > 2) && !within_a_word(before, next)
}

/// How far lines go from the middle to each side, in halves of a cell: to its edge, or to the middle of a
/// neighbour that has a line of its own there.
fn reach(grid: &[Vec<char>], row: usize, column: usize, sides: Sides) -> [usize; 4] {
    let neighbours = around(grid, row, column);
    std::array::from_fn(|side| match (sides[side], neighbours[side]) {
        (false, _) => 0,
        (true, '|' | '+' | '│') if side < 2 => 2,
        (true, '-') if side >= 2 => 2,
        _ => 1,
    })
}

fn line(path: &mut String, (x, y): (usize, usize), [left, right, up, down]: [usize; 4]) {
    let (half, rise) = (WIDTH / 2, HEIGHT.div_ceil(2));
    if left + right > 0 {
        let _ = write!(path, "M{} {y}H{}", x - left * half, x + right * half);
    }
    if up + down > 0 {
        let _ = write!(path, "M{x} {}V{}", (y + 1).saturating_sub(up * rise), y + down * rise);
    }
}

fn tip(path: &mut String, (x, y): (usize, usize), from: Sides) {
    let (x, y) = (x as i32, y as i32);
    let (dx, dy) = match from {
        LEFT => (1, 0),
        RIGHT => (-1, 0),
        UP => (0, 1),
        _ => (0, -1),
    };
    let (x, y) = (x + 5 * dx, y + 5 * dy);
    let [(ax, ay), (bx, by)] =
        [(dy, dx), (-dy, -dx)].map(|(px, py)| (x - 9 * dx + 4 * px, y - 9 * dy + 4 * py));
    let _ = write!(path, "M{x} {y}L{ax} {ay}L{bx} {by}z");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(svg: &str) -> Vec<&str> {
        svg.split("<text ").skip(1).filter_map(|text| text.split(['>', '<']).nth(1)).collect()
    }

    #[test]
    fn words_stay_and_lines_are_drawn() {
        let svg = figure(" a_b(c) ---> 01-06 --x 8 - 4 a->b\n   |\n   v\n", |_| false);
        assert_eq!(words(&svg), ["a_b(c)", "01-06", "--x", "8", "-", "4", "a-&gt;b"]);
        // Three pieces of the shaft, the arrow's own half, the line down and its end.
        let lines = svg.split("class=\"lines\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(lines, "M64 8H72M72 8H80M80 8H88M88 8H92M28 17V34M28 34V42");
        assert_eq!(svg.matches('z').count(), 2);
    }

    #[test]
    fn the_parts_of_a_time_have_their_colours_where_all_are_meant() {
        let drawn = |text| figure(text, |_| false).matches("class=\"part\"").count();
        assert_eq!(drawn(" |-- WAIT --|-- QUEUE --|-- DEVICE --|-- END --|"), 4);
        assert_eq!(drawn(" |-- wait --|-- the end --|"), 0);
        let tree =
            "+-- wait -> a\n+-- queue -> b\n+-- device -> c\n+-- end -> d\n+-- they wait -> e";
        assert_eq!(drawn(tree), 4, "the last one is a word");
        let row = |name: &str, bar| format!("{name:>8} 2393.673 4 % 5.242 8.912 10.168    {bar}\n");
        let text = row("device", "##") + &row("end", "") + &row("total", "###");
        let html = table(&text).unwrap();
        assert!(html.contains("style=\"background:#5fafff\" title=\"device\">dd</span>"), "{html}");
        assert_eq!((html.matches("<span").count(), html.matches("###").count()), (1, 1));
        assert_eq!(table(&row("other", "##")), None);
        assert_eq!(table("device ##"), None, "no table");
    }

    #[test]
    fn a_drawing_is_told_from_code() {
        assert!(["a ---> b", "+--+", " └─x ──"].iter().all(|text| is_one(text)));
        assert!(!["a->b", "cargo run -- --json", "| a | b |"].iter().any(|text| is_one(text)));
    }
}
