//! The picture of the front door: the slowest I/O of README's run of stage 06, drawn.
//!
//! `BLESS=1 cargo test -p guest_tests --test picture` writes it, from what README shows. That is the output of
//! a real run: see `readmes_show_real_output`.

#![allow(clippy::too_many_lines, clippy::unwrap_used)]

use std::{env, fmt::Write, fs, path::Path};

const PICTURE: &str = "docs/slowest-io.svg";

/// The layers that an I/O passes: how the names of their functions begin, what a layer is called, what it is
/// for, and its colour. A function that fits none belongs to the layer of the one before.
const LAYERS: [(&[&str], &str, &str, &str); 4] = [
    (
        &["entry_", "do_syscall", "ksys_", "__x64_sys", "ret_from", "kthread"],
        "kernel entry",
        "a program, or a kernel thread",
        "#e2e8f0",
    ),
    (&["vfs_"], "files", "which file, and where in it", "#cfe0fb"),
    (
        &["filemap_", "page_cache", "read_pages", "do_writepages", "__filemap"],
        "page cache",
        "what files hold, in memory",
        "#cdeccf",
    ),
    (&["submit_bio", "blk_", "iomap_"], "block layer", "the I/O begins: a bio", "#f9cfc4"),
];

/// What stage 06 prints of the slowest bio.
#[derive(Debug, PartialEq)]
struct Slowest {
    /// When it was submitted and completed, in ns.
    times: [u64; 2],
    /// Its first sector, of 512 bytes.
    sector: u64,
    /// The name of its disk.
    disk: String,
    /// The functions, the outermost first, each with its module where it has one.
    stack: Vec<String>,
}

impl Slowest {
    fn parse(output: &str) -> Option<Slowest> {
        let line = |start: &str| output.lines().find_map(|line| line.strip_prefix(start));
        let time = |start: &str| line(start)?.rsplit(' ').next()?.parse().ok();
        let (sector, disk) = line("Bio Info : Sector (")?.split_once(") of ")?;
        Some(Slowest {
            times: [time("From: ")?, time("To  : ")?],
            sector: sector.parse().ok()?,
            disk: disk.split(' ').next()?.to_owned(),
            stack: output
                .lines()
                .filter_map(|line| Some(line.strip_prefix("=> ")?.into()))
                .collect(),
        })
    }

    fn draw(&self) -> Result<String, std::fmt::Error> {
        let (row, top) = (26, 64);
        let end = top + row * self.stack.len();
        let height = end + 106;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 {height}\" font-family=\"sans-serif\" \
             font-size=\"14\" fill=\"#1a202c\">\n\
             <title>The slowest I/O that stage 06 has seen: the functions that led to it, and how long it \
             took</title>\n\
             <rect x=\"1\" y=\"1\" width=\"858\" height=\"{}\" rx=\"8\" fill=\"#fff\" stroke=\"#a0aec0\"/>\n\
             <text x=\"20\" y=\"30\" font-size=\"17\" font-weight=\"bold\">The slowest disk I/O of five seconds</text>\n\
             <text x=\"20\" y=\"50\" fill=\"#4a5568\">Each function called the one below it. The last one hands \
             the I/O to the disk.</text>\n",
            height - 2
        );
        let mut layer = LAYERS[0];
        let mut named = "";
        for (depth, call) in self.stack.iter().enumerate() {
            let module = call.split_once(" [").map(|(_, module)| module.trim_end_matches(']'));
            let of_name =
                LAYERS.iter().find(|(names, ..)| names.iter().any(|name| call.starts_with(name)));
            layer = match (of_name, module) {
                (Some(layer), _) => *layer,
                (None, Some(_)) => (&[], "file system", "which sectors of which disk", "#fde8b5"),
                (None, None) => layer,
            };
            let (_, name, meaning, colour) = layer;
            let (x, y) = (20 + 14 * depth, top + row * depth);
            writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"22\" rx=\"3\" fill=\"{colour}\"/>\
                 <text x=\"{}\" y=\"{}\" font-family=\"monospace\" font-size=\"13\">{call}</text>",
                470 - x,
                x + 8,
                y + 16
            )?;
            if name != named {
                let (bar, text) = (y + 11, y + 16);
                writeln!(
                    svg,
                    "<path d=\"M474 {bar}h18\" stroke=\"#a0aec0\"/><text x=\"498\" y=\"{text}\">\
                     <tspan font-weight=\"bold\">{name}</tspan> {meaning}</text>"
                )?;
                named = name;
            }
        }
        let [from, to] = self.times;
        let (disk, sector) = (&self.disk, self.sector);
        let took = (to - from) as f64 / 1e6;
        let (axis, bar) = (end + 34, end + 18);
        writeln!(
            svg,
            "<rect x=\"160\" y=\"{bar}\" width=\"540\" height=\"32\" rx=\"3\" fill=\"#c53030\"/>\
             <text x=\"430\" y=\"{}\" text-anchor=\"middle\" fill=\"#fff\" font-weight=\"bold\">{disk}, sector {sector}: \
             {took:.1} ms</text>\n\
             <path d=\"M20 {axis}h140M700 {axis}h140\" stroke=\"#4a5568\" stroke-width=\"2\"/>\n\
             <g font-family=\"monospace\" font-size=\"13\"><text x=\"160\" y=\"{}\" text-anchor=\"middle\">submit_bio()</text>\
             <text x=\"700\" y=\"{}\" text-anchor=\"middle\">bio_endio()</text></g>\n\
             <g fill=\"#4a5568\" font-size=\"13\"><text x=\"160\" y=\"{}\" text-anchor=\"middle\">{:.3} ms after boot</text>\
             <text x=\"700\" y=\"{}\" text-anchor=\"middle\">{:.3} ms</text></g>\n</svg>",
            axis + 5,
            axis + 36,
            axis + 36,
            axis + 54,
            from as f64 / 1e6,
            axis + 54,
            to as f64 / 1e6
        )?;
        Ok(svg)
    }
}

#[test]
fn the_picture_is_that_of_the_run_that_readme_shows() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = fs::read_to_string(workspace.join("README.md")).unwrap();
    let slowest = Slowest::parse(&readme).expect("README.md shows no slowest bio");
    let picture = slowest.draw().unwrap();
    if env::var_os("BLESS").is_some_and(|bless| bless == "1") {
        fs::write(workspace.join(PICTURE), &picture).unwrap();
    }
    let is_new = fs::read_to_string(workspace.join(PICTURE)).is_ok_and(|file| file == picture);
    assert!(
        is_new,
        "{PICTURE} is not what README.md shows: BLESS=1 cargo test -p guest_tests --test picture"
    );
    // What the text and the description of the picture say is from the same run.
    let took = format!("{:.1} ms", (slowest.times[1] - slowest.times[0]) as f64 / 1e6);
    assert!(
        readme.contains(&format!("which took {took}")),
        "README.md says another time than {took}"
    );
    assert!(
        readme.contains(&format!("the I/O for {took}](")),
        "the picture's text says another time"
    );
}

#[test]
fn every_figure_is_taken_from_the_output() {
    let output = "From: submit_bio(bio=0x1) 1000\nTo  : bio_endio (bio=0x1) 2500000\n\
                  Bio Info : Sector (8) of vdb (254:16)\n=> vfs_read()\n=> f() [xfs]\n=> submit_bio()\n";
    let slowest = Slowest::parse(output).unwrap();
    let stack = ["vfs_read()", "f() [xfs]", "submit_bio()"].map(str::to_owned).into();
    let times = [1000, 2_500_000];
    assert_eq!(slowest, Slowest { times, sector: 8, disk: "vdb".into(), stack });
    let picture = slowest.draw().unwrap();
    for part in ["vdb, sector 8: 2.5 ms", "f() [xfs]", "0.001 ms after boot", "file system"] {
        assert!(picture.contains(part), "{picture}");
    }
    assert_eq!(Slowest::parse("=> vfs_read()"), None);
}
