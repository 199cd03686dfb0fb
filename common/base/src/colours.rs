//! One language of colour: each part of an I/O's time has the same colour, and the same letter, wherever it is drawn.

/// A part of an I/O's time, as it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct PartColour {
    /// Its name, as slow_io has it.
    pub name: &'static str,
    /// For whoever sees no colours.
    pub letter: char,
    /// In the palette of 256 colours of terminals.
    pub ansi: u8,
    /// The same, as pages write it: `#rrggbb`. Dark letters on it can be read.
    pub rgb: &'static str,
}

/// In the order in which an I/O goes through them; mapper, which may be anywhere, is the last one.
pub const PARTS: [PartColour; 5] = [
    PartColour { name: "wait", letter: 'w', ansi: 214, rgb: "#ffaf00" },
    PartColour { name: "queue", letter: 'q', ansi: 141, rgb: "#af87ff" },
    PartColour { name: "device", letter: 'd', ansi: 75, rgb: "#5fafff" },
    PartColour { name: "end", letter: 'e', ansi: 114, rgb: "#87d787" },
    PartColour { name: "mapper", letter: 'm', ansi: 211, rgb: "#ff87af" },
];

/// How many of `width` cells each part gets of a bar that stands for `whole`, rounded so that the bar is as long as
/// all parts together.
pub fn cells(parts: [u64; 5], whole: u64, width: usize) -> [usize; 5] {
    let exact = parts.map(|part| part as f64 * width as f64 / whole.max(1) as f64);
    let mut cells = exact.map(|part| part as usize);
    let all = (exact.iter().sum::<f64>().round() as usize).min(width);
    let missing = all.saturating_sub(cells.iter().sum());
    // To those that lost most by rounding down; of equal ones, to the first.
    let mut order = [0, 1, 2, 3, 4];
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    for place in order.into_iter().take(missing) {
        cells[place] += 1;
    }
    cells
}

/// A text on a part's colour, for a terminal.
pub fn painted(part: &PartColour, text: &str) -> String {
    // 16: black, whatever the terminal's own colours are.
    format!("\x1b[48;5;{}m\x1b[38;5;16m{text}\x1b[0m", part.ansi)
}

/// So many cells of each part, for a terminal: its letter on its colour.
pub fn bar(cells: [usize; 5]) -> String {
    let painted = PARTS.iter().zip(cells).filter(|(_, cells)| *cells > 0);
    painted
        .map(|(part, cells)| self::painted(part, &part.letter.to_string().repeat(cells)))
        .collect()
}

/// How well one colour can be read on another one, both as `#rrggbb`: the contrast ratio of WCAG 2.1, from 1 to 21,
/// which wants 4.5 for text. `None` where one is no such colour.
pub fn contrast(one: &str, other: &str) -> Option<f64> {
    let [one, other] = [luminance(components(one)?), luminance(components(other)?)];
    Some((one.max(other) + 0.05) / (one.min(other) + 0.05))
}

fn components(rgb: &str) -> Option<[u8; 3]> {
    let digits = rgb.strip_prefix('#').filter(|digits| digits.len() == 6)?;
    let [_, rgb @ ..] = u32::from_str_radix(digits, 16).ok()?.to_be_bytes();
    Some(rgb)
}

/// Of the sRGB components, WCAG 2.1's relative luminance.
fn luminance(rgb: [u8; 3]) -> f64 {
    let linear = rgb.map(|component| {
        let part = f64::from(component) / 255.0;
        if part <= 0.03928 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    });
    0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_parts() {
        assert_eq!(cells([98, 0, 2, 0, 0], 100, 30), [29, 0, 1, 0, 0]);
        assert_eq!(cells([1, 1, 1, 0, 0], 3, 10), [4, 3, 3, 0, 0]);
        assert_eq!(cells([25, 0, 25, 0, 0], 100, 10), [3, 0, 2, 0, 0], "half of it is known");
        assert_eq!(cells([0; 5], 0, 10), [0; 5]);
        assert_eq!(cells([u64::MAX, 0, 0, 0, 0], u64::MAX, 10), [10, 0, 0, 0, 0]);
        let mut seed = 1_u64;
        for _ in 0..10_000 {
            let parts = [(); 5].map(|()| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                seed >> 40
            });
            assert_eq!(cells(parts, parts.iter().sum(), 12).iter().sum::<usize>(), 12);
        }
    }

    #[test]
    fn a_letter_stands_on_its_colour() {
        assert_eq!(bar([0, 2, 0, 0, 0]), "\x1b[48;5;141m\x1b[38;5;16mqq\x1b[0m");
        assert_eq!(bar([0; 5]), "");
    }

    #[test]
    fn contrast_is_between_two_colours() {
        assert_eq!(contrast("#000000", "#ffffff"), Some(21.0));
        assert_eq!(contrast("#ffaf00", "#ffaf00"), Some(1.0));
        // A grey that is known for being the lightest one that can be read on white.
        assert_eq!(contrast("#767676", "#ffffff").map(|ratio| (ratio * 100.0) as u32), Some(454));
        assert_eq!((contrast("red", "#ffffff"), contrast("#fff", "#ffffff")), (None, None));
    }

    #[test]
    fn black_letters_can_be_read_and_both_palettes_agree() {
        for part in PARTS {
            let ratio = contrast(part.rgb, "#000000").unwrap();
            assert!(ratio >= 7.0, "{}: {ratio}", part.name);
            let rgb = components(part.rgb).unwrap();
            // The cube of 6 by 6 by 6 colours, from 16 on.
            let steps = [0, 95, 135, 175, 215, 255];
            let place = usize::from(part.ansi) - 16;
            assert_eq!([place / 36, place / 6 % 6, place % 6].map(|step| steps[step]), rgb);
            assert!(part.name.starts_with(part.letter));
        }
    }
}
