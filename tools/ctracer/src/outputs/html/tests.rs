use std::{cell::RefCell, collections::HashMap, fs, process::Command};

use super::*;
use serde_json::Value;

use crate::report::tests::{Row, Sample, sample, trace};

fn page(sample: &Sample) -> String {
    let mut written = Vec::new();
    write(&mut written, &sample.report()).unwrap();
    String::from_utf8(written).unwrap()
}

/// The trace that the page carries.
fn carried(page: &str) -> Value {
    let start = page.find("<script id=\"data\" type=\"application/json\">").unwrap();
    let json = page[start..].split_once('>').unwrap().1.split_once("</script>").unwrap().0;
    serde_json::from_str(json).unwrap()
}

/// A thousand bios on two CPUs, each with a clone and 20 events more than the sample.
fn large(bios: usize) -> Sample {
    let mut rows: Vec<Row> = Vec::new();
    for bio in 0..bios {
        let start = 1_000_000 + bio as u64 * 40_000;
        let cpu = bio as u32 % 2;
        let mut at = |time, depth, function, life, is_return| {
            rows.push((start + time, cpu, 40 + cpu, depth, function, life, is_return));
        };
        at(0, 0, 0, 2 * bio, false);
        for step in 0..45 {
            at(100 + step * 200, 1, 1, 2 * bio + step as usize % 2, false);
            at(200 + step * 200, 1, 1, 2 * bio + step as usize % 2, true);
        }
        at(20_000, 0, 0, 2 * bio, true);
        at(25_000 + bio as u64 % 997, 0, 3, 2 * bio + 1, false);
        at(26_000 + bio as u64 % 997, 1, 3, 2 * bio, false);
        at(27_000 + bio as u64 % 997, 1, 3, 2 * bio, true);
        at(28_000 + bio as u64 % 997, 0, 3, 2 * bio + 1, true);
    }
    trace(&rows)
}

#[test]
fn the_numbers_are_those_of_the_json_lines() {
    let trace = sample();
    let data = carried(&page(&trace));
    let text = trace.text();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_kind = |kind: &'static str| lines.iter().filter(move |line| line["line"] == kind);

    let start: u64 = data["start"].as_str().unwrap().parse().unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    for (index, line) in of_kind("event").enumerate() {
        let [place, object, value, _, fields, changes] =
            &data["events"][index].as_array().unwrap()[..]
        else {
            panic!("{}", data["events"][index])
        };
        assert_eq!(start + number(&place[0]), line["time"]);
        assert_eq!((&place[1], &object[1]), (&line["cpu"], &line["depth"]));
        assert_eq!((&object[2], value), (&line["life"], &Value::Null));
        let function = number(&place[4]) as usize;
        assert_eq!(data["functions"][function]["name"], line["function"]);
        if line["kind"] == "return" {
            let call = &data["calls"][number(&object[4]) as usize];
            assert_eq!(number(&call[1]) - number(&call[0]), line["duration"]);
        }
        let shown: HashMap<&str, &Value> = [fields, changes]
            .into_iter()
            .filter_map(Value::as_array)
            .flatten()
            .filter_map(Value::as_array)
            .map(|values| (values[0].as_str().unwrap(), values.last().unwrap()))
            .collect();
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        for (name, value) in line["fields"].as_object().into_iter().flatten() {
            assert_eq!(*shown[name.as_str()], text(value));
        }
        for change in line["changes"].as_array().into_iter().flatten() {
            assert_eq!(*shown[change["field"].as_str().unwrap()], text(&change["after"]));
        }
    }
    for (index, line) in of_kind("life").enumerate() {
        let life = &data["lives"][index];
        let (begin, end) = (life["begin"].as_u64().unwrap(), life["end"].as_u64().unwrap());
        assert_eq!(
            (start + begin, end - begin),
            (line["begin"].as_u64().unwrap(), line["duration"].as_u64().unwrap())
        );
        for key in ["address", "generation", "parent", "link"] {
            assert_eq!(life[key], line[key]);
        }
    }
    let ledger = of_kind("ledger").next().unwrap().as_object().unwrap().iter();
    let ledger =
        ledger.filter(|(key, _)| *key != "line").map(|(key, value)| (key.clone(), value.clone()));
    assert_eq!(data["ledger"], Value::Object(ledger.collect()));
}

#[test]
fn a_name_cannot_end_the_script() {
    let mut trace = sample();
    trace.events[0].comm = "</script><b>".to_owned();
    trace.trace.release = "<i>".to_owned();
    let page = page(&trace);
    assert!(!page.contains("<b>") && !page.contains("<i>"));
    assert_eq!(carried(&page)["events"][0][0][2], "</script><b> 42");
}

thread_local! {
    /// A page that lies beside the one that is shown.
    static INNER: RefCell<String> = RefCell::default();
}

/// What a page looks like in Chromium after its script has run, and `script` after it; `None` where
/// there is no Chromium.
fn in_chromium(page: &str, fragment: &str, script: &str) -> Option<String> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let browser = names.into_iter().find_map(|name| which::which(name).ok());
    let Some(browser) = browser else {
        eprintln!("skipped: none of {names:?} is installed");
        return None;
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("page.html");
    let page = page.replace("</body>", &format!("<script>{script}</script></body>"));
    fs::write(&file, page).unwrap();
    fs::write(directory.path().join("inner.html"), INNER.with_borrow(String::clone)).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1500,950"])
        .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
        .args(["--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("file://{}#{fragment}", file.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown = String::from_utf8(output.stdout).unwrap();
    Some(shown.split("<script id=\"data\"").next().unwrap().to_owned())
}

#[test]
fn a_browser_shows_objects_calls_and_fields() {
    let Some(shown) = in_chromium(&page(&sample()), "0.1", "") else { return };
    for part in [
        "2 objects, 12 events, 800 ns",
        "2 of 2 objects",
        "<h2 id=\"name\">bio 0xffff888100001000 #0: WRITE 2048+8, 700 ns</h2>",
        "→ clone 0xffff888100001100",
        "<mark>bi_iter.bi_sector 2048 → 4096</mark>",
        "<tr class=\"now\"><td>bi_iter.bi_sector</td><td>4096</td>",
        "<td>REQ_OP_WRITE|REQ_SYNC|REQ_IDLE</td>",
        "at the call of submit_bio_noacct(), 100 ns",
        "<td>bio_alloc_clone</td><td class=\"number\">1</td><td class=\"number\" title=\"50 ns\">50 ns</td>",
    ] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
    // The slowest object stands first.
    let (first, second) = (shown.find("title=\"700 ns\"").unwrap(), shown.find("↳ clone").unwrap());
    assert!(first < second);
}

/// A page with a frame of some width, for a window has a least width. The title tells how wide the
/// object's pane is, how wide the list, how far the pane and the page scroll sideways, and how many
/// numbers of the table of functions are cut.
const FRAME: &str = r##"<!doctype html><title></title><body>
<iframe src="inner.html#0.1" style="border: 0; height: 900px; width: WIDTHpx"></iframe>
<script>
document.querySelector("iframe").onload = (event) => {
  const inner = event.target.contentDocument, id = (name) => inner.getElementById(name);
  const beyond = (element) => element.scrollWidth - element.clientWidth;
  const numbers = [...inner.querySelectorAll("#functions td.number")];
  const pane = id("object").getBoundingClientRect().right;
  const cut = numbers.filter((e) => beyond(e) > 0 || e.getBoundingClientRect().right > pane);
  document.title = [id("object").clientWidth, id("objects").clientWidth, beyond(id("object")),
    beyond(inner.documentElement), cut.length].join(" ");
};
</script></body>"##;

/// Phones and half screens: one column below 900 px, and at no width does anything scroll sideways.
#[test]
fn a_browser_shows_narrow_pages() {
    const HOUR: u64 = 3_599_999_999_999;
    let mut trace = sample();
    let name = "blk_mq_sched_bio_merge_with_a_long_name";
    trace.trace.functions[0].name = name.to_owned();
    for event in trace.events.iter_mut().filter(|event| event.function == "submit_bio") {
        event.function = name.to_owned();
    }
    for event in trace.events.iter_mut().skip(9) {
        event.time += HOUR;
        event.duration = event.duration.map(|duration| duration + HOUR);
    }
    trace.lives.iter_mut().for_each(|life| life.end = life.end.map(|end| end + HOUR));
    INNER.set(page(&trace));
    for width in [390, 500, 800, 1280, 1500] {
        let frame = FRAME.replace("WIDTH", &width.to_string());
        let Some(shown) = in_chromium(&frame, "", "") else { return };
        let (_, title) = shown.split_once("<title>").unwrap();
        let (title, _) = title.split_once("</title>").unwrap();
        let found: Vec<i64> = title.split(' ').map(|number| number.parse().unwrap()).collect();
        let [object, objects, beyond, all, cut] = found[..] else { panic!("{title}") };
        let least = if width < 900 { width - 20 } else { 380 };
        assert!(object >= least && objects >= least.min(370), "{width}: {title}");
        assert_eq!((beyond, all, cut), (0, 0, 0), "{width}: {title}");
    }
}

#[test]
fn a_browser_shows_an_empty_trace() {
    let mut empty = Sample::default();
    empty.trace.type_name = "bio".to_owned();
    let Some(shown) = in_chromium(&page(&empty), "0.0", "drawTimeline()") else {
        return;
    };
    assert!(shown.contains("0 objects, 0 events, 0 ns"), "{shown}");
    assert!(shown.contains("0 of 0 objects"), "{shown}");
}

#[test]
fn a_browser_filters_a_large_trace() {
    let trace = large(1_075);
    assert!(trace.events.len() > 100_000);
    let page = page(&trace);
    let address = &trace.lives[77].address;
    let script = format!(
        "const by = (id, text) => {{ $(id).value = text; $(id).dispatchEvent(new Event('input')); }};\
         by('cpu', '1'); document.title = $('found').textContent; by('cpu', ''); by('text', '{address}');"
    );
    let Some(shown) = in_chromium(&page, "77.3", &script) else { return };
    assert!(shown.contains("<title>1074 of 2150 objects</title>"), "{shown}");
    assert!(shown.contains("1 of 2150 objects"), "{shown}");
    assert!(shown.contains(&format!("<h2 id=\"name\">bio {address} #0")));
    let rows = shown.matches("class=\"row call").count();
    assert!((5..60).contains(&rows), "{rows} rows: only the visible ones are in the page");
}
