//! The slides of a class: keys lead through them, everything fits, and paper has room for them.

use serde_json::{Value, json};

use crate::{
    built::{book, url},
    driver::{CHECK, Driver, WAYS, requests, wait},
};

/// What does not fit on the slides that are shown: a list of sentences. What scrolls by itself may be wider.
const FITS: &str = "
    const said = [], shown = [...document.querySelectorAll('.slide')].filter(it => it.checkVisibility());
    for (const slide of shown) {
        const face = slide.querySelector('.face').getBoundingClientRect();
        const body = slide.querySelector('.body'), what = `slide ${slide.id}: `;
        if (body.scrollHeight > body.clientHeight + 1) said.push(what + `${body.scrollHeight} high, has ${body.clientHeight}`);
        const notes = slide.querySelector('aside').getBoundingClientRect();
        const end = matchMedia('print').matches ? slide.getBoundingClientRect().bottom : document.documentElement.scrollHeight;
        if (notes.bottom > end + 1) said.push(what + 'the notes do not fit');
        for (const pre of slide.querySelectorAll('.face pre')) {
            const scrolls = getComputedStyle(pre).overflowX === 'auto';
            if (!scrolls && pre.scrollWidth > pre.clientWidth + 1) said.push(what + `code of ${pre.scrollWidth} pixels in ${pre.clientWidth}`);
        }
        for (const element of slide.querySelectorAll('.face *')) {
            const box = element.getBoundingClientRect(), parent = element.closest('pre, figure');
            const scrolls = parent && getComputedStyle(parent).overflowX === 'auto';
            if (!scrolls && box.right > face.right + 1) said.push(what + element.tagName + ' is too wide');
            if (box.bottom > face.bottom + 1) said.push(what + element.tagName + ' is too low');
            const svg = element.closest('svg'), view = svg?.viewBox.baseVal;
            const scale = svg ? Math.min(svg.clientWidth / view.width, svg.clientHeight / view.height) : 1;
            const letters = parseFloat(getComputedStyle(element).fontSize) * scale;
            // From an eightieth of its width on, a slide's letters can be read from the last row.
            if (element.textContent.trim() && letters < face.width / 80) said.push(what + `letters of ${letters} pixels`);
        }
    }
    return said;";

/// How many slides are shown, and the number of the first one.
const NOW: &str = "
    const shown = [...document.querySelectorAll('.slide')].filter(it => it.checkVisibility());
    return [shown.length, Number(shown[0].id)];";

const RIGHT: &str = "\u{e014}";
const LEFT: &str = "\u{e012}";
const HOME: &str = "\u{e011}";
const END: &str = "\u{e010}";
const PAGE_DOWN: &str = "\u{e00f}";
const DOWN: &str = "\u{e015}";
const UP: &str = "\u{e013}";
const ENTER: &str = "\u{e007}";

fn said(driver: &Driver, script: &str) -> Vec<String> {
    let said = driver.run(script);
    said.as_array().unwrap().iter().map(Value::to_string).collect()
}

#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn keys_lead_through_slides_that_fit() {
    let (page, driver) = (url(&book().join("slides.html")), Driver::start());
    let mut wrong = Vec::new();
    for (width, scheme) in WAYS {
        driver.size(width, 844);
        driver.scheme(scheme);
        driver.open("about:blank");
        driver.open(&page);
        let number =
            driver.run("return document.querySelectorAll('.slide').length;").as_u64().unwrap();
        assert!(number > 100, "{number} slides");
        let mut judge = |at: u64| {
            let said = [said(&driver, FITS), said(&driver, CHECK)].concat();
            wrong.extend(said.iter().map(|what| format!("{at} {width} {scheme}: {what}")));
        };
        if width < 700 {
            // All below each other; a key moves to the next one.
            judge(0);
            driver.type_into("body", &RIGHT.repeat(3));
            let top = "return [location.hash, Math.round(document.querySelector(':target').getBoundingClientRect().top)];";
            assert_eq!(driver.run(top), json!(["#4", 0]));
            continue;
        }
        for at in 1..=number {
            assert_eq!(driver.run(NOW), json!([1, at]), "one slide, and in order");
            judge(at);
            driver.type_into("body", RIGHT);
        }
        let number_now = || driver.run(NOW)[1].as_u64().unwrap();
        for (key, to) in [
            (RIGHT, number),
            (HOME, 1),
            (LEFT, 1),
            (PAGE_DOWN, 2),
            (" ", 3),
            (DOWN, 4),
            (ENTER, 5),
            (UP, 4),
            (END, number),
            (LEFT, number - 1),
        ] {
            driver.type_into("body", key);
            assert_eq!(number_now(), to, "{key:?}");
        }
        driver.run("history.back(); return true;");
        wait(&driver, "the slide before", &format!("return location.hash === '#{number}';"));
        driver.type_into("body", "f");
        let full = "const face = document.querySelector('.slide:target .face');
            return document.fullscreenElement && !document.querySelector('nav').checkVisibility()
                && (face.clientWidth === innerWidth || face.clientHeight === innerHeight);";
        wait(&driver, "the full screen", full);
        driver.type_into("body", "f");
        wait(&driver, "the window", "return !document.fullscreenElement;");
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(driver.log("browser"), Vec::<Value>::new());
    let ours = url(book());
    let mut elsewhere = requests(&driver);
    elsewhere.retain(|it| !it.starts_with(&ours) && it != "about:blank");
    assert_eq!(elsewhere, Vec::<String>::new());
}

#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn paper_has_room() {
    let driver = Driver::start();
    driver.open(&url(&book().join("handout.html")));
    assert_eq!(driver.printed(), 1, "the handout is one sheet");
    driver.open(&url(&book().join("slides.html")));
    let number = driver.run("return document.querySelectorAll('.slide').length;").as_u64().unwrap();
    assert_eq!(driver.printed() as u64, number.div_ceil(2));
    driver.printer(true);
    assert_eq!(said(&driver, FITS), Vec::<String>::new());
}

/// On a phone on its side: a tap at a side, a swipe, and the buttons.
#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn fingers_lead_through_slides() {
    let driver = Driver::start();
    driver.size(844, 390);
    driver.touch(true);
    driver.open(&url(&book().join("slides.html")));
    let number_now = || driver.run(NOW)[1].as_u64().unwrap();
    for (x, by, to) in [
        (700.0, 0.0, 2),    // a tap on the right
        (422.0, 0.0, 2),    // in the middle
        (422.0, -120.0, 3), // a swipe to the left
        (422.0, 120.0, 2),  // and to the right
        (100.0, 0.0, 1),    // a tap on the left
        (100.0, 0.0, 1),    // there is nothing before
        (422.0, 20.0, 1),   // too short for a swipe, too long for a tap
    ] {
        driver.swipe(x, 100.0, by);
        assert_eq!(number_now(), to, "at {x}, by {by}");
    }
    let place =
        "const box = document.querySelector('button[data-do=next]').getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2, Math.min(box.width, box.height)];";
    let place = driver.run(place);
    let [x, y, size] = [0, 1, 2].map(|at| place[at].as_f64().unwrap());
    assert!(size >= 44.0, "a finger needs 44 pixels, the button has {size}");
    driver.swipe(x, y, 0.0);
    wait(&driver, "the second slide", "return location.hash === '#2';");
    let face = "return document.querySelector('.now .face').clientHeight / innerHeight;";
    assert!(driver.run(face).as_f64().unwrap() > 0.95, "the slide has the height of the window");
    assert_eq!(driver.log("browser"), Vec::<Value>::new());
}

/// The presenter's window has the notes, the next slide and a clock; what is done in one window is done in the other.
#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn the_presenter_has_a_window() {
    let driver = Driver::start();
    driver.size(1280, 720);
    driver.open(&url(&book().join("slides.html")));
    driver.type_into("body", RIGHT);
    driver.type_into("body", "p");
    let windows = driver.windows();
    let [projector, presenter] = &windows[..] else { panic!("{windows:?}") };
    driver.switch(presenter);
    wait(&driver, "the slide that is shown", "return location.hash === '#2';");
    // The notes of stage 00 are at its first slide, the third of all.
    driver.type_into("body", RIGHT);
    let shown = "const of = name => [...document.querySelectorAll(name)].filter(it => it.checkVisibility());
        const number = it => Number(it.closest('.slide').id);
        return [of('.face').map(number), of('aside').map(number), of('aside')[0]?.textContent.startsWith('Say:'),
                /^0:00:\\d\\d$/.test(of('#clock')[0].textContent)];";
    assert_eq!(driver.run(shown), json!([[3, 4], [3], true, true]));
    driver.type_into("body", RIGHT);
    assert_eq!(driver.run(shown), json!([[4, 5], [3], true, true]), "the notes stay for the stage");
    driver.switch(projector);
    wait(&driver, "the slide of the presenter", "return location.hash === '#4';");
    let notes = "return [...document.querySelectorAll('aside')].some(it => it.checkVisibility());";
    assert_eq!(driver.run(notes), json!(false), "the notes are the presenter's");
    driver.type_into("body", LEFT);
    driver.type_into("body", "b");
    let is_blank = "return document.documentElement.classList.contains('blank');";
    wait(
        &driver,
        "a blank screen",
        "return !document.querySelector('.now .face').checkVisibility({ visibilityProperty: true });",
    );
    driver.switch(presenter);
    wait(&driver, "the slide of the projector", "return location.hash === '#3';");
    wait(&driver, "the presenter to know", is_blank);
    driver.type_into("body", "b");
    driver.switch(projector);
    wait(
        &driver,
        "the slide again",
        "return !document.documentElement.classList.contains('blank');",
    );
    // A projector that is loaded again is found again; without a presenter, the notes are back.
    driver.run("location.reload(); return true;");
    driver.switch(presenter);
    driver.type_into("body", END);
    let last = driver.run("return location.hash;");
    driver.switch(projector);
    wait(&driver, "the last slide", &format!("return location.hash === {last};"));
    driver.switch(presenter);
    driver.close();
    driver.switch(projector);
    wait(&driver, "the notes", notes);
    assert_eq!(driver.log("browser"), Vec::<Value>::new());
}
