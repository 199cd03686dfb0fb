//! Reads what the tools print, as a reader does: rows and columns.

use serde::{Deserialize, Serialize};

/// A row of the table that slow_io prints of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// `wait`, or `total`.
    pub name: String,
    /// Percent of the time of all I/Os.
    pub share: f64,
    /// Half of the I/Os were quicker, in ms.
    pub p50: f64,
    /// All but one in a hundred, in ms.
    pub p99: f64,
    /// The longest, in ms.
    pub max: f64,
}

/// The parts of the first table in a text: `wait  6006.934  83 %  0.034  1006.632  4500.472`.
pub fn parts(text: &str) -> Vec<Part> {
    let mut found: Vec<Part> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, _, share, "%", p50, p99, max, ..] = words[..] else { continue };
        let number = |word: &str| word.parse::<f64>().ok();
        let numbers = (number(share), number(p50), number(p99), number(max));
        let (Some(share), Some(p50), Some(p99), Some(max)) = numbers else { continue };
        if found.iter().any(|part| part.name == name) {
            break;
        }
        found.push(Part { name: name.to_owned(), share, p50, p99, max });
    }
    found
}

/// The part with this name.
pub fn part<'p>(parts: &'p [Part], name: &str) -> Option<&'p Part> {
    parts.iter().find(|part| part.name == name)
}

/// The part that has most of the time.
pub fn largest(parts: &[Part]) -> Option<&Part> {
    let parts = parts.iter().filter(|part| part.name != "total");
    parts.max_by(|one, other| one.share.total_cmp(&other.share))
}

/// The numbers of a column, by the name in another one: both columns are known by their titles, and titles have no
/// spaces, nor have the cells up to the later of both columns.
pub fn column(text: &str, name: &str, value: &str) -> Vec<(String, f64)> {
    let (mut places, mut rows) = (None, Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let place = |title: &str| words.iter().position(|word| *word == title);
        if let (Some(of_name), Some(of_value)) = (place(name), place(value)) {
            places = Some((of_name, of_value));
            continue;
        }
        let Some((of_name, of_value)) = places else { continue };
        let cells = (words.get(of_name), words.get(of_value).and_then(|word| word.parse().ok()));
        if let (Some(name), Some(value)) = cells {
            rows.push(((*name).to_owned(), value));
        }
    }
    rows
}

/// The sum of a column over the names that begin so.
pub fn sum(rows: &[(String, f64)], names: &[&str]) -> f64 {
    let is_theirs = |row: &&(String, f64)| names.iter().any(|name| row.0.starts_with(name));
    rows.iter().filter(is_theirs).map(|(_, value)| value).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_slow_io_is_read() {
        let text = "dm-0: 138 I/Os\n                  sum  share        p50        p99        max ms\n    \
                    wait     6006.934   83 %      0.034   1006.632   4500.472    ####\n   \
                    mapper     1046.857   14 %      0.073      9.437   1000.461    ####\n    \
                    total     7251.167  100 %      0.917   1006.632   4508.023    ##\n\
                    nvme0n1: 1 I/Os\n    wait     1.0   99 %      0.034   1006.632   4500.472    ####\n";
        let parts = parts(text);
        assert_eq!(parts.iter().map(|part| part.share).collect::<Vec<_>>(), [83.0, 14.0, 100.0]);
        assert_eq!(largest(&parts).map(|part| part.name.as_str()), Some("wait"));
        assert_eq!(part(&parts, "total").map(|part| part.p50), Some(0.917));
        assert_eq!(part(&parts, "queue"), None);
    }

    #[test]
    fn columns_are_known_by_their_titles() {
        let text = "    PID PROCESS         DISK    OP        I/OS        KIB\n    \
                    460 maild           mail    R          370      16508\n    \
                    454 jbd2/mail-8     mail    W           21         21\n";
        let rows = column(text, "PROCESS", "I/OS");
        assert_eq!((sum(&rows, &["jbd2"]), sum(&rows, &[""])), (21.0, 391.0));
        assert!(column(text, "COMM", "I/OS").is_empty());
    }
}
