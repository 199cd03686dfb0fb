//! The picture of all cells: a bar for each tool and kernel.

use std::fmt::Write;

use anyhow::Result;

use crate::{Cell, Verdict};

/// Where the bars begin, from the left.
const LEFT: usize = 150;
/// Where the first row begins, from the top.
const TOP: usize = 84;
/// How high a row is.
const ROW: usize = 22;
/// How wide a load is.
const LOAD: usize = 6;

/// A colour, what it means, and which verdicts it shows.
type VerdictColour = (&'static str, &'static str, fn(&Verdict) -> bool);

const COLOURS: [VerdictColour; 4] = [
    ("#2e8b57", "right", |verdict| matches!(verdict, Verdict::Right)),
    ("#d9902f", "too small, and says so", |verdict| matches!(verdict, Verdict::Admitted { .. })),
    ("#c0392b", "wrong", |verdict| {
        matches!(verdict, Verdict::Wrong { .. } | Verdict::Broke { .. })
    }),
    ("#8e8e8e", "does not start on this kernel", |verdict| {
        matches!(verdict, Verdict::Refused { .. })
    }),
];

/// A picture that is drawn row by row.
pub struct Picture<'k> {
    kernels: Vec<&'k String>,
    /// How wide the bars of a kernel are at most, and the space behind them.
    wide: usize,
    /// Where the next row begins.
    y: usize,
    heads: Vec<(usize, &'static str)>,
    bars: String,
}

impl<'k> Picture<'k> {
    /// An empty one, for so many loads.
    pub fn new(kernels: Vec<&'k String>, loads: usize) -> Picture<'k> {
        Picture { kernels, wide: loads * LOAD + 30, y: TOP, heads: Vec::new(), bars: String::new() }
    }

    /// A heading, with so much space above.
    pub fn head(&mut self, heading: &'static str, space: usize) {
        self.heads.push((self.y + space, heading));
        self.y += ROW + space - 2;
    }

    /// A row of bars: of each kernel, the cells.
    pub fn row(&mut self, name: &str, cells: &[Vec<&Cell>]) -> Result<()> {
        writeln!(self.bars, "<text x=\"{}\" y=\"{}\">{name}</text>", 16, self.y + 13)?;
        for (block, cells) in cells.iter().enumerate() {
            self.bar(LEFT + block * self.wide, cells)?;
        }
        self.y += ROW;
        Ok(())
    }

    fn bar(&mut self, mut x: usize, cells: &[&Cell]) -> Result<()> {
        let (bars, y) = (&mut self.bars, self.y);
        for (fill, _, is_it) in COLOURS {
            let loads = cells.iter().filter(|cell| is_it(&cell.verdict)).count();
            if loads == 0 {
                continue;
            }
            let long = loads * LOAD;
            write!(
                bars,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{long}\" height=\"18\" fill=\"{fill}\"/>"
            )?;
            if loads > 1 {
                writeln!(
                    bars,
                    "<text x=\"{}\" y=\"{}\" fill=\"white\" text-anchor=\"middle\" \
                     font-size=\"11\">{loads}</text>",
                    x + long / 2,
                    y + 13
                )?;
            }
            x += long;
        }
        Ok(())
    }

    /// The whole picture, as SVG.
    pub fn finish(&self) -> Result<String> {
        let width = LEFT + self.wide * self.kernels.len().max(3);
        let height = self.y + 46;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"8\" y=\"24\" font-size=\"16\" font-weight=\"bold\">\
             Does a storage tracer print what is true?</text>\n\
             <text x=\"8\" y=\"44\">How many loads each tool measures right, of those that it was \
             run with. A figure is judged from outside.</text>\n"
        );
        for (block, kernel) in self.kernels.iter().enumerate() {
            let x = LEFT + block * self.wide;
            writeln!(svg, "<text x=\"{x}\" y=\"70\" font-weight=\"bold\">Linux {kernel}</text>")?;
        }
        for (y, head) in &self.heads {
            writeln!(svg, "<text x=\"8\" y=\"{}\" font-weight=\"bold\">{head}</text>", y + 13)?;
        }
        svg.push_str(&self.bars);
        legend(&mut svg, height - 26)?;
        svg.push_str("</svg>\n");
        Ok(svg)
    }
}

/// What the colours mean.
fn legend(svg: &mut String, y: usize) -> Result<()> {
    let mut x = 8;
    for (fill, what, _) in COLOURS {
        writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{fill}\"/>\
             <text x=\"{}\" y=\"{}\">{what}</text>",
            x + 20,
            y + 12
        )?;
        x += 40 + what.len() * 6;
    }
    Ok(())
}
