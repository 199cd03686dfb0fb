use std::{cell::RefCell, collections::HashMap, fs, process::Command};

use super::*;
use common::colours;
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
        "<h2 id=\"name\">bio #0: WRITE 2048+8, 700 ns</h2>",
        "after the first event of the trace, at 0xffff888100001000<",
        "→ clone #1",
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

/// The title that a page has got from a script.
fn title(shown: &str) -> &str {
    shown.split_once("<title>").unwrap().1.split_once("</title>").unwrap().0
}

/// The sample with a request: the device has the bio from 200 to 600 ns, and the clone from 400 to 500 ns.
fn with_a_request() -> Sample {
    let mut sample = sample();
    sample.trace.functions[2].name = "__rq_qos_track".to_owned();
    sample.trace.functions[1].name = "blk_mq_submit_bio".to_owned();
    for event in &mut sample.events {
        let known = ["submit_bio_noacct", "bio_alloc_clone"];
        let new = ["blk_mq_submit_bio", "__rq_qos_track"];
        let at = known.iter().position(|name| *name == event.function);
        event.function = at.map_or(event.function.clone(), |at| new[at].to_owned());
    }
    sample
}

/// Each part is drawn in its own colour, with its letter or its name, wherever it is drawn.
#[test]
fn a_browser_draws_the_parts_in_their_colours() {
    let page = page(&with_a_request());
    let script = "document.title = [...document.querySelectorAll('.part:not(.none), .badge:not(:empty), .gap .bar')]\
        .filter((e) => e.style.background).map((e) => [e.className, e.textContent, e.style.background,\
        getComputedStyle(e).color].join('|')).join(';')";
    let Some(shown) = in_chromium(&page, "0.2", script) else { return };
    let mut drawn = Vec::new();
    for element in title(&shown).split(';') {
        let [class, text, background, colour] = element.split('|').collect::<Vec<_>>()[..] else {
            panic!("{element}")
        };
        let hex = |rgb: &str| {
            let numbers = rgb.trim_start_matches("rgb(").trim_end_matches(')').split(", ");
            let hex = numbers.map(|number| format!("{:02x}", number.parse::<u8>().unwrap()));
            format!("#{}", hex.collect::<String>())
        };
        let part = PARTS.iter().find(|part| part.rgb == hex(background)).unwrap();
        let begins = part.letter.to_string();
        assert!(text.is_empty() || text == begins || text.starts_with(part.name), "{element}");
        let ratio = colours::contrast(&hex(colour), part.rgb).unwrap();
        assert!(text.is_empty() || ratio >= 4.5, "{ratio}: {element}");
        drawn.push(format!("{class} {text}"));
    }
    for expected in ["badge w", "badge d", "part wait 200 ns", "part device 400 ns", "bar "] {
        assert!(drawn.iter().any(|drawn| drawn == expected), "no {expected}: {drawn:?}");
    }
    for part in [
        "device 400 ns<span class=\"quiet\"> 57 %</span>",
        "wait 200 ns<span class=\"quiet\"> 29 %</span>",
        "other 100 ns<span class=\"quiet\"> 14 %</span>",
        "title=\"device, with the queue before it: 50 ns, 7.1 % of the life\"",
    ] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
}

/// What has not completed when the trace ends is still in a part of its time.
#[test]
fn a_browser_shows_where_an_object_still_is() {
    let mut sample = with_a_request();
    sample.events.retain(|event| event.life == 1 || event.function != "bio_endio");
    (sample.lives[0].end, sample.lives[0].duration) = (None, None);
    let Some(shown) = in_chromium(&page(&sample), "0.5", "") else { return };
    for part in [
        "device 600 ns<span class=\"quiet\"> 75 %</span>",
        "title=\"still device, with the queue before it: 150 ns, 18.8 % of the life\"",
        "≥ 150 ns",
    ] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
}

/// What the page's own colours are, in light and dark; and that text can be read on each.
#[test]
fn text_can_be_read_on_the_pages_colours() {
    let colour = |name: &str| -> [&str; 2] {
        let (_, value) = PAGE.split_once(&format!("  --{name}: light-dark(")).unwrap();
        let (light, dark) = value.split_once(')').unwrap().0.split_once(", ").unwrap();
        [light, dark]
    };
    let grounds = ["page", "pick", "mark", "box0", "box1", "box2"].map(|name| ("text", name));
    for (text, ground) in grounds.into_iter().chain([("quiet", "page"), ("quiet", "pick")]) {
        for (text, ground) in colour(text).into_iter().zip(colour(ground)) {
            let ratio = colours::contrast(text, ground).unwrap();
            assert!(ratio >= 4.5, "{ratio}: {text} on {ground}");
        }
    }
    // The parts' colours come with the data, from where all programs have them; no others may look like them.
    let data = carried(&page(&sample()));
    assert_eq!(data["colours"][2], serde_json::json!(["device", "d", "#5fafff"]));
    assert_eq!(data["colours"].as_array().unwrap().len(), PARTS.len());
    for text in [PAGE, SCRIPT] {
        assert!(PARTS.iter().all(|part| !text.contains(part.rgb)) && !text.contains("hsl("));
    }
}

/// Zoomed and moved to where nothing of the object is, the page offers the way back; so it does for the rest
/// of the time.
#[test]
fn a_browser_comes_back_from_nothing() {
    let script = "{ const said = [], count = () => said.push(document.querySelectorAll('.nothing').length, $('whole').disabled);\
        const place = timeline.getBoundingClientRect();\
        const wheel = (deltaY) => timeline.dispatchEvent(new WheelEvent('wheel', { deltaY, clientX: place.left + 99 }));\
        const drag = (movementX) => timeline.dispatchEvent(new PointerEvent('pointermove', { buttons: 1, movementX }));\
        count(); wheel(-1); wheel(-1); count(); for (let i = 0; i < 9; i++) drag(-500); count();\
        document.querySelector('.nothing button').click(); count();\
        for (let i = 0; i < 99; i++) wheel(-1); drag(9999); count(); pickHop(4); count(); $('whole').click(); count();\
        for (let i = 0; i < 9; i++) $('out').click(); count(); timeline.dispatchEvent(new Event('dblclick')); count();\
        document.title = said.join(' '); }";
    let Some(shown) = in_chromium(&page(&with_a_request()), "0.1", script) else { return };
    let expected = "0 true 0 false 1 false 0 true 1 false 0 false 0 true 0 false 0 true";
    assert_eq!(title(&shown), expected);
}

/// An object has the number that the terminal gives it.
#[test]
fn a_browser_finds_an_object_by_its_number() {
    let script = "$('text').value = '#1'; $('text').dispatchEvent(new Event('input'));\
        document.title = [$('found').textContent, $('name').textContent, location.hash].join(', ');";
    let Some(shown) = in_chromium(&page(&sample()), "0.1", script) else { return };
    assert!(title(&shown).starts_with("1 of 2 objects, bio #1: WRITE 2048"), "{}", title(&shown));
    assert!(title(&shown).ends_with(", #1.0"), "{}", title(&shown));
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
        let title = title(&shown);
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
    assert!(shown.contains("<h2 id=\"name\">bio #77: "));
    let rows = shown.matches("class=\"row call").count();
    assert!((5..60).contains(&rows), "{rows} rows: only the visible ones are in the page");
}
