//! The map of the stages: each one beside the stage that it begins with.

use std::fmt::Write;

use crate::escape::escape;

/// Of a box, and from one box to the next, in pixels.
const BOX: [usize; 2] = [84, 40];
const STEP: [usize; 2] = [96, 56];

/// A stage's directory, the address of its page, and the place of the stage that it begins with in the list.
pub type Stage = (String, String, Option<usize>);

/// Draws them. A stage continues the row of the stage that it begins with, if no other one does so; those that begin
/// afresh are at the left.
pub fn figure(stages: &[Stage]) -> String {
    let places = places(stages);
    let [width, height] = [0, 1].map(|side| {
        places.iter().map(|place| place[side]).max().unwrap_or(0) * STEP[side] + BOX[side] + 4
    });
    let at = |place: [usize; 2]| [place[0] * STEP[0] + 2, place[1] * STEP[1] + 2];
    let mut lines = String::new();
    let mut boxes = String::new();
    for ((directory, address, base), place) in stages.iter().zip(&places) {
        let [x, y] = at(*place);
        if let Some(base) = base {
            let [from_x, from_y] = at(places[*base]);
            let (from_x, from_y) = (from_x + BOX[0], from_y + BOX[1] / 2);
            let (to_y, middle) = (y + BOX[1] / 2, from_x + (STEP[0] - BOX[0]) / 2);
            let _ = write!(lines, "<path d=\"M{from_x} {from_y}H{middle}V{to_y}H{x}\"/>");
        }
        let (number, name) =
            directory.trim_start_matches("stage").split_once('_').unwrap_or(("", ""));
        let middle = x + BOX[0] / 2;
        let _ = write!(
            boxes,
            "<a href=\"{}\"><rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"5\"/>\
             <text x=\"{middle}\" y=\"{}\" class=\"number\">{number}</text>\
             <text x=\"{middle}\" y=\"{}\">{}</text></a>",
            escape(address),
            BOX[0],
            BOX[1],
            y + 17,
            y + 32,
            escape(name)
        );
    }
    format!(
        "<figure class=\"drawing map\"><svg viewBox=\"0 0 {width} {height}\" role=\"group\" \
         aria-label=\"The stages, each beside the one that it begins with\"><g class=\"lines\">{lines}</g>{boxes}</svg></figure>\n"
    )
}

/// Column and row of each: in the row of its base, or in the first one below whose place is free.
fn places(stages: &[Stage]) -> Vec<[usize; 2]> {
    let mut places: Vec<[usize; 2]> = Vec::new();
    for (number, (_, _, base)) in stages.iter().enumerate() {
        // The second stage has no base either, but follows the first.
        let base = base.or((number == 1).then_some(0)).map(|base| places[base]);
        let [column, row] = base.map_or([0, 0], |[column, row]| [column + 1, row]);
        let free = (row..).map(|row| [column, row]).find(|place| !places.contains(place));
        places.extend(free);
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_have_rows_of_their_own() {
        let bases = [None, None, Some(1), Some(2), Some(2), Some(4), None];
        let stages = bases.map(|base| ("stage00_x".to_owned(), "a.html".to_owned(), base));
        let expected = [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [4, 1], [0, 1]];
        assert_eq!(places(&stages), expected);
        let drawn = figure(&stages);
        assert_eq!(drawn.matches("<a href=\"a.html\">").count(), 7);
        assert_eq!(drawn.matches("<path ").count(), 4);
    }
}
