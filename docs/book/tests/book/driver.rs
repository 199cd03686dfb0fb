//! A client of the WebDriver protocol, as far as the tests need it.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// A script that returns what is wrong with the page that is open.
pub const CHECK: &str = include_str!("check.js");
/// Widths of the window, and what the reader prefers.
pub const WAYS: [(u32, &str); 4] = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")];

/// A browser with one window.
pub struct Driver {
    child: Child,
    port: u16,
    session: String,
}

impl Driver {
    /// Starts chromedriver on a port of its choice, and a browser.
    pub fn start() -> Driver {
        let mut command = Command::new("chromedriver");
        let mut child =
            command.arg("--port=0").stdout(Stdio::piped()).spawn().expect("no chromedriver");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let port = lines.find_map(|line| {
            let line = line.unwrap();
            let port = line.split("successfully on port ").nth(1)?;
            Some(port.trim_end_matches('.').parse().unwrap())
        });
        let mut driver = Driver {
            child,
            port: port.expect("chromedriver names no port"),
            session: String::new(),
        };
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            // As root, Chromium refuses to start with its sandbox.
            "goog:chromeOptions": {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]},
        }}});
        let made = driver.call("POST", "/session", &wanted);
        driver.session = format!("/session/{}", made["sessionId"].as_str().unwrap());
        driver
    }

    /// Sends a command, and returns its value.
    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body =
            if method == "GET" || method == "DELETE" { String::new() } else { body.to_string() };
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(
            stream,
            "{method} {}{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.session,
            body.len()
        )
        .unwrap();
        let mut stream = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            match line.trim().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse().unwrap()
                }
                None if line.trim().is_empty() => break,
                _ => {}
            }
        }
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        let value = &answer["value"];
        assert!(value["error"].is_null(), "{method} {path} {body:.300}: {value}");
        value.clone()
    }

    /// A command of Chromium's own protocol.
    fn chromium(&self, command: &str, params: Value) -> Value {
        self.call("POST", "/goog/cdp/execute", &json!({"cmd": command, "params": params}))
    }

    /// Opens a page, and waits until it is loaded.
    pub fn open(&self, url: &str) {
        self.call("POST", "/url", &json!({ "url": url }));
    }

    /// The address of the page that is shown.
    pub fn address(&self) -> String {
        self.call("GET", "/url", &Value::Null).as_str().unwrap().to_owned()
    }

    /// Runs the body of a function in the page, and returns what that returns.
    pub fn run(&self, script: &str) -> Value {
        self.call("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// The size of the window's inside.
    pub fn size(&self, width: u32, height: u32) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.chromium("Emulation.setDeviceMetricsOverride", metrics);
    }

    /// What the reader prefers: `light` or `dark`.
    pub fn scheme(&self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.chromium("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// The windows that are open, the one that was opened last at the end.
    pub fn windows(&self) -> Vec<String> {
        let all = self.call("GET", "/window/handles", &Value::Null);
        all.as_array().unwrap().iter().map(|it| it.as_str().unwrap().to_owned()).collect()
    }

    /// Sends what follows to another window.
    pub fn switch(&self, window: &str) {
        self.call("POST", "/window", &json!({ "handle": window }));
    }

    /// Closes the window.
    pub fn close(&self) {
        self.call("DELETE", "/window", &Value::Null);
    }

    /// Whether there is a mouse, or a finger.
    pub fn touch(&self, is_touched: bool) {
        let points = if is_touched { json!({"enabled": true}) } else { json!({"enabled": false}) };
        self.chromium("Emulation.setTouchEmulationEnabled", points);
    }

    /// Touches a point, moves the finger so far, and lifts it: all in pixels.
    pub fn swipe(&self, x: f64, y: f64, by: f64) {
        let event = |kind: &str, points: Value| {
            let event = json!({"type": kind, "touchPoints": points});
            self.chromium("Input.dispatchTouchEvent", event);
        };
        event("touchStart", json!([{"x": x, "y": y}]));
        if by != 0.0 {
            event("touchMove", json!([{"x": x + by, "y": y}]));
        }
        event("touchEnd", json!([]));
    }

    /// Types into the element that a selector finds.
    pub fn type_into(&self, selector: &str, text: &str) {
        let found =
            self.call("POST", "/element", &json!({"using": "css selector", "value": selector}));
        let id = found.as_object().unwrap().values().next().unwrap().as_str().unwrap();
        self.call("POST", &format!("/element/{id}/value"), &json!({ "text": text }));
    }

    /// Emulates a printer instead of a screen, or a screen again.
    pub fn printer(&self, is_one: bool) {
        let media = if is_one { "print" } else { "" };
        self.chromium("Emulation.setEmulatedMedia", json!({ "media": media }));
    }

    /// How many pages the page that is open has in print.
    pub fn printed(&self) -> usize {
        let made = self.chromium("Page.printToPDF", json!({"preferCSSPageSize": true}));
        let pdf = base64(made["data"].as_str().unwrap());
        String::from_utf8_lossy(&pdf).lines().filter(|line| line.ends_with("/Type /Page")).count()
    }

    /// What was logged since the last call: `browser` (the console), `performance` (requests).
    pub fn log(&self, kind: &str) -> Vec<Value> {
        self.call("POST", "/se/log", &json!({ "type": kind })).as_array().unwrap().clone()
    }

    /// What the window shows, as PNG.
    pub fn picture(&self) -> Vec<u8> {
        let text = self.call("GET", "/screenshot", &Value::Null);
        base64(text.as_str().unwrap())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.call("DELETE", "", &Value::Null);
        }
        // It ends its browser, too.
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().ok();
        self.child.wait().ok();
    }
}

/// Polls until a script returns something that is not false or null.
pub fn wait(driver: &Driver, what: &str, script: &str) -> Value {
    let began = Instant::now();
    loop {
        let value = driver.run(script);
        if !matches!(value, Value::Null | Value::Bool(false)) {
            return value;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: not within 20 s");
        thread::sleep(Duration::from_millis(50));
    }
}

/// What the browser has asked for.
pub fn requests(driver: &Driver) -> Vec<String> {
    let log = driver.log("performance");
    let sent = log.iter().filter_map(|entry| {
        let message: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
        let message = &message["message"];
        (message["method"] == "Network.requestWillBeSent")
            .then(|| message["params"]["request"]["url"].as_str().unwrap().to_owned())
    });
    let sent: Vec<String> = sent.collect();
    assert!(!sent.is_empty(), "the browser logs no requests");
    sent
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => u32::from(c - b'A'),
        b'a'..=b'z' => u32::from(c - b'a') + 26,
        b'0'..=b'9' => u32::from(c - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let all = four.iter().fold(0, |all, c| all << 6 | value(*c)) << (6 * (4 - four.len()));
        bytes.extend_from_slice(&all.to_be_bytes()[1..four.len()]);
    }
    bytes
}
