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
        for (const element of slide.querySelectorAll('.face *')) {
            const box = element.getBoundingClientRect(), parent = element.closest('pre, figure');
            const scrolls = parent && getComputedStyle(parent).overflowX === 'auto';
            if (!scrolls && box.right > face.right + 1) said.push(what + element.tagName + ' is too wide');
            if (box.bottom > face.bottom + 1) said.push(what + element.tagName + ' is too low');
            const svg = element.closest('svg'), view = svg?.viewBox.baseVal;
            const scale = svg ? Math.min(svg.clientWidth / view.width, svg.clientHeight / view.height) : 1;
            const letters = parseFloat(getComputedStyle(element).fontSize) * scale;
            // In a hundredth of its width, a slide's letters can be read from the last row.
            if (element.textContent.trim() && letters < face.width / 100) said.push(what + `letters of ${letters} pixels`);
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
            (END, number),
            (LEFT, number - 1),
        ] {
            driver.type_into("body", key);
            assert_eq!(number_now(), to, "{key:?}");
        }
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
    let elsewhere: Vec<String> =
        requests(&driver).into_iter().filter(|it| !it.starts_with(&page)).collect();
    assert!(elsewhere.iter().all(|it| it == "about:blank"), "{elsewhere:?}");
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
