//! A class: learners who have joined report each verdict to the instructor's machine, and a page there shows
//! where everybody is. No code is reported, nothing is stored, and the page ends with the program.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use common_http::{Answer, MISDIRECTED, Names, Request, Server};
use serde::{Deserialize, Serialize};
use workshop::{
    fail::{USAGE, fail},
    say,
};

use crate::{
    exercise::Exercise,
    lesson::Lesson,
    state::{Joined, SavedState, now},
};

/// How long a learner waits for the class.
const TIME: Duration = Duration::from_secs(2);
/// The most learners that a class has.
const MOST: usize = 200;
/// The most characters of a name.
const NAME: usize = 40;
/// The type of a report. No page of a browser can send it here.
const KIND: &str = "application/toml";

const STYLE: &str = "<style>:root { color-scheme: light dark; font: 1rem/1.4 sans-serif }
    td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #8888; overflow-wrap: anywhere;
    unicode-bidi: isolate }</style>";

/// What a verdict was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClassOutcome {
    /// No verdict yet.
    Here,
    Left,
    /// It does not compile.
    Broken,
    /// The first judge that said no, by the name of its test.
    Refused {
        judge: String,
    },
    Passed,
    /// An incident was begun, or an answer to it judged: so many of its five parts are right.
    Incident {
        seed: u64,
        level: u8,
        answers: usize,
        right: usize,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassReport {
    key: u32,
    name: String,
    exercise: Option<String>,
    /// Since the exercise was started.
    minutes: u64,
    hints: usize,
    outcome: ClassOutcome,
}

/// Says hello to a class, which from then on gets this learner's verdicts.
pub fn join(lesson: &mut Lesson, address: String, name: String) -> Result<()> {
    check_name(&name).map_err(|error| fail(USAGE, error.to_string()))?;
    let exercise = lesson.chosen(None).ok();
    let state = &mut lesson.state;
    let before = state.progress.class.take().filter(|it| it.address == address);
    let key = before.map_or_else(|| std::process::id() ^ now() as u32, |class| class.key);
    let joined = Joined { address, name, key };
    tell(&joined, state, exercise.as_ref(), ClassOutcome::Here)?;
    state.change(|progress| progress.class = Some(joined.clone()))?;
    workshop::outln!(
        "Each `cargo lesson start` and `check` tells {} your name, the exercise, which judge\n\
         says no, the minutes since the start, how many hints you took, and your answers to \
         incidents;\nnever your code. `cargo lesson leave` ends that.",
        joined.address
    );
    Ok(())
}

fn tell(
    joined: &Joined,
    state: &SavedState,
    exercise: Option<&Exercise>,
    outcome: ClassOutcome,
) -> Result<()> {
    let known = exercise.map(|exercise| state.known(exercise)).unwrap_or_default();
    let report = ClassReport {
        key: joined.key,
        name: joined.name.clone(),
        exercise: exercise.map(|exercise| exercise.id.clone()),
        minutes: now().saturating_sub(known.started.unwrap_or(u64::MAX)) / 60,
        hints: known.hints,
        outcome,
    };
    send(&joined.address, &report)
        .with_context(|| format!("the class at {} cannot be told", joined.address))
}

/// Tells the class of a verdict, if this learner has joined one. What goes wrong there stops nobody here.
pub fn report(state: &SavedState, exercise: Option<&Exercise>, outcome: ClassOutcome) {
    if let Some(joined) = &state.progress.class
        && let Err(error) = tell(joined, state, exercise, outcome)
    {
        say!("{error:#}; `cargo lesson leave` ends the reports");
    }
}

/// Leaves the class, whether it answers or not. Whether there was one.
pub fn leave(state: &mut SavedState) -> Result<bool> {
    let Some(joined) = state.progress.class.take() else { return Ok(false) };
    tell(&joined, state, None, ClassOutcome::Left).ok();
    state.change(|progress| progress.class = None)?;
    Ok(true)
}

fn send(address: &str, report: &ClassReport) -> Result<()> {
    let place = address.to_socket_addrs()?.next().context("no such address")?;
    let mut stream = TcpStream::connect_timeout(&place, TIME)?;
    stream.set_read_timeout(Some(TIME))?;
    stream.set_write_timeout(Some(TIME))?;
    let body = toml::to_string(report)?;
    let length = body.len();
    let head = format!(
        "POST / HTTP/1.1\r\nHost: {address}\r\nContent-Type: {KIND}\r\nContent-Length: {length}"
    );
    stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes())?;
    let mut answer = [0; 1024];
    let length = stream.read(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer[..length]);
    let status = answer.lines().next().and_then(|line| line.strip_prefix("HTTP/1.1 "));
    match status {
        Some(ok) if ok.starts_with("200 ") => Ok(()),
        Some("409 Conflict") => bail!("somebody else has the name {}", report.name),
        Some(MISDIRECTED) => bail!(
            "it does not know itself by that name: join its IP address, or ask for a class that is \
             started with --host"
        ),
        Some(status) => bail!("it says {status}"),
        None => bail!("it is no class"),
    }
}

/// A learner, as the last report has it.
struct Learner {
    report: ClassReport,
    /// The outcome, in words.
    said: String,
    /// Verdicts on attempts at this exercise.
    attempts: u64,
    seen: Instant,
}

/// Shows who is where, until this process ends.
pub fn serve(exercises: &[Exercise], listen: SocketAddr, hosts: &[String]) -> Result<()> {
    let message = format!("cannot listen on {listen}: choose another one with --listen");
    let listener = TcpListener::bind(listen).context(message)?;
    workshop::outln!("http://{} shows who has joined. Ctrl-C ends it.", listener.local_addr()?);
    Class::new(exercises).serve(listener, Names::new(hosts))
}

struct Class<'e> {
    exercises: &'e [Exercise],
    learners: BTreeMap<String, Learner>,
}

impl Class<'_> {
    fn new(exercises: &[Exercise]) -> Class<'_> {
        Class { exercises, learners: BTreeMap::new() }
    }

    /// Serves its page, and takes reports, until this process ends.
    fn serve(mut self, listener: TcpListener, names: Names) -> Result<()> {
        let mut server = Server::new(listener, "GET, POST", names)?;
        loop {
            server.serve(Duration::from_millis(500), |request| Ok(self.answer(request)))?;
        }
    }

    fn answer(&mut self, request: &Request) -> Answer {
        if request.path != "/" {
            return Answer::refused("404 Not Found");
        }
        if request.method == "GET" {
            return Answer::found("text/html; charset=utf-8", self.page());
        }
        if request.header("content-type") != Some(KIND) {
            return Answer::refused("415 Unsupported Media Type");
        }
        let text = std::str::from_utf8(request.body).unwrap_or_default();
        match toml::from_str(text).ok().and_then(|report| Some((self.in_words(&report)?, report))) {
            Some((said, report)) => self.take(report, said),
            None => Answer::refused("400 Bad Request"),
        }
    }

    /// What came out, if the name is one, and the exercise and the judge are ours.
    fn in_words(&self, report: &ClassReport) -> Option<String> {
        check_name(&report.name).ok()?;
        let Some(id) = &report.exercise else {
            return match report.outcome {
                ClassOutcome::Here | ClassOutcome::Left => Some(String::new()),
                ClassOutcome::Incident { seed, level, answers, right } => {
                    let how = match (answers, right) {
                        (0, _) => "begun".to_owned(),
                        (_, 5) => format!("✓ solved with answer {answers}"),
                        _ => format!("✗ {right} of 5 parts right, in answer {answers}"),
                    };
                    Some(format!("incident {seed}, level {level}: {how}"))
                }
                _ => None,
            };
        };
        let exercise = self.exercises.iter().find(|exercise| exercise.id == *id)?;
        Some(match &report.outcome {
            ClassOutcome::Here | ClassOutcome::Left | ClassOutcome::Incident { .. } => {
                String::new()
            }
            ClassOutcome::Broken => "does not compile".to_owned(),
            ClassOutcome::Refused { judge } => {
                let judge = exercise.judges().into_iter().find(|it| it.test == *judge)?;
                format!("✗ {}", judge.title)
            }
            ClassOutcome::Passed => "✓ passed".to_owned(),
        })
    }

    fn take(&mut self, report: ClassReport, said: String) -> Answer {
        let before = self.learners.get(&report.name);
        if before.is_some_and(|it| it.report.key != report.key) {
            return Answer::refused("409 Conflict");
        }
        if before.is_none() && self.learners.len() == MOST {
            return Answer::refused("503 Service Unavailable");
        }
        let again =
            before.filter(|it| it.report.exercise == report.exercise).map_or(0, |it| it.attempts);
        // A learner has one name.
        self.learners.retain(|_, it| it.report.key != report.key);
        if report.outcome != ClassOutcome::Left {
            let attempts = again + u64::from(report.outcome != ClassOutcome::Here);
            let learner = Learner { attempts, said, seen: Instant::now(), report };
            self.learners.insert(learner.report.name.clone(), learner);
        }
        Answer::found("text/plain; charset=utf-8", "\n")
    }

    /// Where everybody is, those who are behind first, and which judge stops how many.
    fn page(&self) -> String {
        let place =
            |id: &Option<String>| self.exercises.iter().position(|it| Some(&it.id) == id.as_ref());
        let mut learners: Vec<(&String, &Learner)> = self.learners.iter().collect();
        learners.sort_by_key(|(_, learner)| place(&learner.report.exercise));
        let (mut rows, mut stopped) = (String::new(), BTreeMap::<_, Vec<&str>>::new());
        for (name, Learner { report, said, attempts, seen }) in learners {
            let ClassReport { exercise, minutes, hints, .. } = report;
            let exercise = place(exercise).map_or("", |place| &self.exercises[place].id);
            let ago = seen.elapsed().as_secs() / 60;
            rows += &row(&[
                name,
                exercise,
                said,
                &attempts.to_string(),
                &minutes.to_string(),
                &hints.to_string(),
                &format!("{ago} min ago"),
            ]);
            if let ClassOutcome::Refused { .. } = &report.outcome {
                stopped.entry((exercise, said)).or_default().push(name);
            }
        }
        let mut stopped: Vec<_> = stopped.into_iter().collect();
        stopped.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
        let judges: String = stopped
            .into_iter()
            .map(|((exercise, judge), names)| {
                row(&[&names.len().to_string(), exercise, judge, &names.join(", ")])
            })
            .collect();
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
             <meta http-equiv=\"refresh\" content=\"5\"><title>Class</title>\n{STYLE}\n\
             <h1>{} here</h1>\n<table><tr><th>name<th>exercise<th>last attempt<th>attempts<th>minutes<th>hints\
             <th>seen\n{rows}</table>\n<h2>Judges that say no</h2>\n<table><tr><th>to<th>exercise\
             <th>judge<th>names\n{judges}</table>\n",
            self.learners.len()
        )
    }
}

fn row(cells: &[&str]) -> String {
    let cells =
        cells.iter().map(|cell| format!("<td>{}", cell.replace('&', "&amp;").replace('<', "&lt;")));
    format!("<tr>{}\n", cells.collect::<String>())
}

/// Whether a name can stand on the page.
fn check_name(name: &str) -> Result<()> {
    let length = name.chars().count();
    let is_good =
        (1..=NAME).contains(&length) && name.trim() == name && !name.contains(char::is_control);
    ensure!(is_good, "a name has 1 to {NAME} characters, and no spaces around them");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use workshop::workspace;

    fn learner(name: &str, key: u32, exercise: &str, outcome: ClassOutcome) -> ClassReport {
        let exercise = Some(exercise.to_owned()).filter(|id| !id.is_empty());
        ClassReport { key, name: name.into(), exercise, minutes: 7, hints: 1, outcome }
    }

    fn says_no(judge: &str) -> ClassOutcome {
        ClassOutcome::Refused { judge: judge.to_owned() }
    }

    /// What a class answers to these bytes.
    fn raw(address: &str, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).ok();
        String::from_utf8(answer).unwrap()
    }

    /// A class that lasts as long as the tests: its address, and its exercises.
    fn class() -> (&'static str, &'static [Exercise]) {
        let exercises: &[Exercise] = Exercise::all(&workspace()).unwrap().leak();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().leak();
        let class = Class::new(exercises);
        thread::spawn(|| class.serve(listener, Names::new(&[])));
        (address, exercises)
    }

    #[test]
    fn thirty_learners_are_shown_beside_clients_that_misbehave() {
        let (address, exercises) = class();
        let mut slow: Vec<TcpStream> =
            (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
        slow.iter_mut().for_each(|stream| stream.write_all(b"POST / HT").unwrap());
        let judge = &exercises[3].steps[0].judges[1];
        thread::scope(|scope| {
            for number in 0..30 {
                scope.spawn(move || {
                    let name = format!("<b>learner</b> & {number}");
                    let say =
                        |outcome| send(address, &learner(&name, number, "04", outcome)).unwrap();
                    send(address, &learner(&name, number, "", ClassOutcome::Here)).unwrap();
                    say(ClassOutcome::Broken);
                    say(says_no(&judge.test));
                    match number % 3 {
                        0 => say(ClassOutcome::Passed),
                        1 => say(says_no(&judge.test)),
                        _ => {
                            send(address, &learner(&name, number, "", ClassOutcome::Left)).unwrap()
                        }
                    }
                });
            }
        });
        let page = raw(address, b"GET / HTTP/1.0\r\n\r\n");
        assert!(page.contains("<h1>20 here</h1>") && !page.contains("<b>"), "{page}");
        assert_eq!(page.matches("<td>04<td>✓ passed<td>3<td>7<td>1<td>").count(), 10);
        let stopped = format!("<td>10<td>04<td>✗ {}<td>", judge.title);
        assert!(page.contains(&stopped), "{page}");
        assert!(page.contains("&lt;b>learner&lt;/b> &amp; 0<td>"), "{page}");
    }

    #[test]
    fn answers_to_incidents_are_shown() {
        let (address, _) = class();
        for (name, (answers, right)) in [("a", (0, 0)), ("b", (2, 3)), ("c", (4, 5))] {
            let outcome = ClassOutcome::Incident { seed: 4711, level: 2, answers, right };
            send(address, &learner(name, name.as_bytes()[0].into(), "", outcome)).unwrap();
        }
        let page = raw(address, b"GET / HTTP/1.0\r\n\r\n");
        for how in ["begun", "✗ 3 of 5 parts right, in answer 2", "✓ solved with answer 4"] {
            assert!(page.contains(&format!("<td>incident 4711, level 2: {how}<td>")), "{page}");
        }
    }

    #[test]
    fn nobody_can_fill_or_confuse_a_class() {
        let (address, _) = class();
        let refused = |report: ClassReport| send(address, &report).unwrap_err().to_string();
        let joined = |name: &str, key| learner(name, key, "", ClassOutcome::Here);
        for name in ["", " a", "a\nb", "\u{1b}[2J", &"a".repeat(NAME + 1)] {
            assert!(refused(joined(name, 1)).contains("400"), "{name:?}");
        }
        assert!(refused(learner("a", 1, "no", ClassOutcome::Passed)).contains("400"));
        assert!(refused(learner("a", 1, "04", says_no("no"))).contains("400"));
        for key in 0..MOST as u32 {
            send(address, &joined(&format!("a{key}"), key)).unwrap();
        }
        assert!(refused(joined("b", 1000)).contains("503"));
        assert!(refused(joined("a1", 2)).contains("somebody else"));
        // A learner who takes another name has one afterwards.
        send(address, &learner("a3", 3, "", ClassOutcome::Left)).unwrap();
        send(address, &joined("b", 4)).unwrap();
        let page = raw(address, b"GET / HTTP/1.0\r\n\r\n");
        assert!(page.contains(&format!("<h1>{} here</h1>", MOST - 1)) && !page.contains(">a4<"));
        // A browser's form, garbage, more than a request may have, and another page.
        for (request, status) in [
            ("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain", " 415 "),
            ("\0\x01", " 400 "),
            ("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999", " 413 "),
            ("GET /etc/passwd HTTP/1.1\r\nHost: localhost", " 404 "),
        ] {
            let answer = raw(address, format!("{request}\r\n\r\n").as_bytes());
            assert!(answer.contains(status), "{request}: {answer}");
        }
    }

    /// A page in a learner's or the instructor's browser, whose name leads to the class since it was fetched: it
    /// may send and read what it likes, and its name is in each request.
    #[test]
    fn a_page_of_somebody_else_neither_reports_nor_reads() {
        let (address, _) = class();
        let port = address.rsplit(':').next().unwrap();
        let report = toml::to_string(&learner("mallory", 1, "", ClassOutcome::Here)).unwrap();
        let asked = |host: &str| {
            let post = format!(
                "POST / HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {KIND}\r\n\
                 Content-Length: {}\r\n\r\n{report}",
                report.len()
            );
            let get = format!("GET / HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
            [post, get].map(|request| raw(address, request.as_bytes()))
        };
        for foreign in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example"] {
            for answer in asked(foreign) {
                let is_refused = answer.starts_with("HTTP/1.1 421 ") && answer.contains("--host");
                assert!(is_refused && !answer.contains("here"), "{foreign}: {answer}");
            }
        }
        let page = raw(address, b"GET / HTTP/1.0\r\n\r\n");
        assert!(page.contains("<h1>0 here</h1>"), "{page}");
        let [reported, page] = asked("127.0.0.1");
        assert!(
            reported.starts_with("HTTP/1.1 200 ") && page.contains("<h1>1 here</h1>"),
            "{page}"
        );
    }
}
