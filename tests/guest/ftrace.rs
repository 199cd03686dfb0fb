//! The kernel's own tracer as a judge: its times and its stacks are not ours.

use crate::prelude::*;

pub const TRACEFS: &str = "/sys/kernel/tracing";

/// What ftrace records.
#[derive(Clone, Copy)]
pub enum Hook {
    /// Calls of a function, with its first argument. The event is named as the function. A probe misses
    /// what happens while another one runs.
    Function(&'static str),
    /// Calls of a function, with its first argument and the stack.
    Stack(&'static str),
    /// Calls of a function, with one of its arguments; 1 is the first one.
    Argument(&'static str, usize),
    /// Calls of a function, with one of its arguments as one of ftrace's types. The event has the
    /// function's name with `__other` behind.
    Other(&'static str, usize, &'static str),
    /// Returns of a function, with its value in the place of an argument, as one of ftrace's types:
    /// `s32`. The event has the function's name with `__return` behind.
    Value(&'static str, &'static str),
    /// Returns of a function without a value. The event has the function's name with `__return` behind.
    Return(&'static str),
    /// A tracepoint, `block/block_rq_issue`, and a filter for it.
    Tracepoint(&'static str, &'static str),
}

impl Hook {
    /// The lines of bpf_printk().
    pub const PRINTED: Hook = Hook::Tracepoint("bpf_trace/bpf_trace_printk", "");
}

/// An event that ftrace saw.
#[derive(Debug)]
pub struct Event {
    /// The function or the tracepoint.
    pub name: String,
    /// The name of the task, and its number: 0 for the idle task of each CPU.
    pub task: String,
    pub tid: u32,
    pub cpu: u32,
    /// `.` in a task, `s` in a softirq, `h` in a hardirq, `H` in one that interrupts a softirq.
    pub interrupt: char,
    /// ns, on the clock of bpf_ktime_get_ns(), rounded down to microseconds.
    pub time: u64,
    /// The first argument of a function: `0xffff888003a1c000`.
    pub argument: String,
    /// The text of a tracepoint.
    pub text: String,
    /// Functions, outermost first.
    pub stack: Vec<String>,
}

impl Event {
    /// Where it runs: what comes next there follows from it, also where a task is preempted, and goes to another
    /// CPU.
    pub fn place(&self) -> (u32, char, Option<u32>) {
        let stays = self.interrupt != '.' || self.tid == 0;
        (self.tid, self.interrupt, stays.then_some(self.cpu))
    }

    /// The first argument, as a number.
    pub fn address(&self) -> Result<u64> {
        Ok(u64::from_str_radix(self.argument.trim_start_matches("0x"), 16)?)
    }

    /// The sector of a block layer's event: `252,0 R 4096 () 1234 + 8 [fio]`, `252,0 R 1234 + 8 [fio]`.
    pub fn sector(&self) -> Result<u64> {
        let (before, _) = self.text.rsplit_once(" + ").with_context(|| self.text.clone())?;
        Ok(before.rsplit(' ').next().unwrap_or_default().parse()?)
    }
}

/// A tracefs instance of its own, gone when dropped.
pub struct Ftrace {
    /// Of the instance, and the group of its probes.
    name: String,
    instance: PathBuf,
    probes: Vec<String>,
}

impl Ftrace {
    /// Starts to record.
    pub fn new(hooks: &[Hook]) -> Result<Ftrace> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("judge{}", NUMBER.fetch_add(1, Relaxed));
        let instance = Path::new(TRACEFS).join("instances").join(&name);
        fs::create_dir(&instance)?;
        let mut ftrace = Ftrace { name, instance, probes: Vec::new() };
        ftrace.write("trace_clock", "mono")?;
        ftrace.write("buffer_size_kb", "16384")?;
        for hook in hooks {
            ftrace.enable(*hook)?;
        }
        Ok(ftrace)
    }

    fn enable(&mut self, hook: Hook) -> Result<()> {
        let first = if cfg!(target_arch = "aarch64") { "%x0" } else { "%di" };
        let (kind, function, suffix, value) = match hook {
            Hook::Tracepoint(name, filter) => {
                if !filter.is_empty() {
                    self.write(&format!("events/{name}/filter"), filter)?;
                }
                return self.write(&format!("events/{name}/enable"), "1");
            }
            Hook::Function(function) | Hook::Stack(function) => {
                ('p', function, "", format!("{first}:x64"))
            }
            Hook::Argument(function, number) => ('p', function, "", format!("$arg{number}:x64")),
            Hook::Other(function, n, kind) => ('p', function, "__other", format!("$arg{n}:{kind}")),
            Hook::Value(function, kind) => ('r', function, "__return", format!("$retval:{kind}")),
            Hook::Return(function) => ('r', function, "__return", String::new()),
        };
        let event = format!("{}/{function}{suffix}", self.name);
        let argument = if value.is_empty() { "" } else { " argument=" };
        probes(&format!("{kind}:{event} {function}{argument}{value}"))?;
        self.probes.push(event.clone());
        if matches!(hook, Hook::Stack(_)) {
            self.write(&format!("events/{event}/trigger"), "stacktrace")?;
        }
        self.write(&format!("events/{event}/enable"), "1")
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        fs::write(self.instance.join(file), text).with_context(|| format!("{file}: {text}"))
    }

    /// The events since the start or the last call, in the order of time.
    pub fn events(&self) -> Result<Vec<Event>> {
        self.write("tracing_on", "0")?;
        let text = fs::read_to_string(self.instance.join("trace"))?;
        self.write("trace", "")?;
        self.write("tracing_on", "1")?;
        nothing_is_lost(&text)?;
        parse(&text)
    }
}

fn nothing_is_lost(trace: &str) -> Result<()> {
    if let Ok(entries) = between(trace, "entries-in-buffer/entries-written: ", " ") {
        let (kept, written) = entries.split_once('/').context("odd header")?;
        ensure!(kept == written, "ftrace lost events: {entries}");
    }
    Ok(())
}

/// Adds a probe, or removes one.
fn probes(command: &str) -> Result<()> {
    let file = Path::new(TRACEFS).join("kprobe_events");
    let mut file = fs::OpenOptions::new().append(true).open(file)?;
    file.write_all(command.as_bytes()).with_context(|| command.to_owned())
}

impl Drop for Ftrace {
    fn drop(&mut self) {
        self.write("current_tracer", "nop").ok();
        fs::remove_dir(&self.instance).ok();
        for probe in &self.probes {
            probes(&format!("-:{probe}")).ok();
        }
    }
}

/// `dd-123 [000] ..... 4.924053: submit_bio: (submit_bio+0x0/0xa0) argument=0x…`, and, next of that
/// task, `dd-123 [000] ..... 4.925344: <stack trace>`, ` => submit_bio`, ` => …`, one a line.
fn parse(text: &str) -> Result<Vec<Event>> {
    let mut events: Vec<Event> = Vec::new();
    let mut of_task = HashMap::new();
    let mut current = None;
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        if let Some(frame) = line.strip_prefix(" => ") {
            // A stack of a trigger that belongs to no event that we know: an interrupted one.
            let Some(event) = current.and_then(|number: usize| events.get_mut(number)) else {
                continue;
            };
            let function = frame.split(['+', ' ']).next().unwrap_or_default();
            if function == event.name {
                // What is below is the probe's.
                event.stack.clear();
            }
            event.stack.insert(0, function.to_owned());
            continue;
        }
        let (task, rest) = line.split_once(" [").with_context(|| format!("odd: {line}"))?;
        let (head, event) = rest.split_once(": ").with_context(|| format!("odd: {line}"))?;
        if event.contains("<stack trace>") {
            current = of_task.get(task.trim()).copied();
            continue;
        }
        let (name, text) = event.split_once(": ").with_context(|| format!("odd: {line}"))?;
        let cpu = head.split(']').next().unwrap_or_default();
        let time = head.split_whitespace().last().unwrap_or_default().replace('.', "");
        let time = time.parse::<u64>().with_context(|| format!("odd: {line}"))? * 1000;
        let argument = text.split_once(" argument=").map_or("", |(_, argument)| argument);
        of_task.insert(task.trim().to_owned(), events.len());
        let (task, tid) = task.rsplit_once('-').with_context(|| format!("odd: {line}"))?;
        events.push(Event {
            name: name.trim().to_owned(),
            task: task.trim().to_owned(),
            tid: tid.trim().parse().with_context(|| format!("odd: {line}"))?,
            cpu: cpu.parse().with_context(|| format!("odd: {line}"))?,
            // `000] d.h1. 39.948507`
            interrupt: head
                .split_whitespace()
                .nth(1)
                .and_then(|flags| flags.chars().nth(2))
                .unwrap_or('.'),
            time,
            argument: argument.trim().to_owned(),
            text: text.to_owned(),
            stack: Vec::new(),
        });
    }
    Ok(events)
}

/// One of the tracers of functions, off when dropped.
pub struct Tracer {
    directory: PathBuf,
    options: &'static [&'static str],
}

impl Tracer {
    /// Records the calls of these functions, in an instance of its own.
    pub fn calls(functions: &HashSet<&str>) -> Result<Tracer> {
        let directory = Path::new(TRACEFS).join("instances/calls");
        fs::create_dir(&directory)?;
        Tracer { directory, options: &[] }.start("function", "32768", functions)
    }

    /// Records their calls and returns. This tracer has no instance: there is one for all.
    pub fn graph(functions: &HashSet<&str>) -> Result<Tracer> {
        let options = &["funcgraph-proc", "funcgraph-abstime", "funcgraph-tail"];
        let graph = Tracer { directory: TRACEFS.into(), options };
        graph.start("function_graph", "1024", functions)
    }

    fn start(self, tracer: &str, kib: &str, functions: &HashSet<&str>) -> Result<Tracer> {
        self.write("tracing_on", "0")?;
        self.write("trace_clock", "mono")?;
        // By their numbers in the list: for each name, the kernel would go through all of it.
        let list = fs::read_to_string(Path::new(TRACEFS).join("available_filter_functions"))?;
        let is_wanted =
            |line: &str| line.split(' ').next().is_some_and(|it| functions.contains(it));
        let numbers = (1..).zip(list.lines()).filter(|(_, line)| is_wanted(line));
        let numbers: Vec<String> = numbers.map(|(number, _)| number.to_string()).collect();
        ensure!(numbers.len() >= functions.len(), "{} of {functions:?}", numbers.len());
        self.write("set_ftrace_filter", &numbers.join("\n"))?;
        self.write("current_tracer", tracer)?;
        self.write("buffer_size_kb", kib)?;
        for option in self.options {
            self.write(&format!("options/{option}"), "1")?;
        }
        self.write("trace", "")?;
        self.write("tracing_on", "1")?;
        Ok(self)
    }

    /// What it has recorded; it records no more.
    pub fn text(&self) -> Result<String> {
        self.write("tracing_on", "0")?;
        let text = fs::read_to_string(self.directory.join("trace"))?;
        nothing_is_lost(&text)?;
        Ok(text)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        fs::write(self.directory.join(file), text).with_context(|| format!("{file}: {text:.80}"))
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        for option in self.options {
            self.write(&format!("options/{option}"), "0").ok();
        }
        let usual =
            [("current_tracer", "nop"), ("set_ftrace_filter", ""), ("trace_clock", "local")];
        for (file, text) in usual.into_iter().chain([("tracing_on", "1")]) {
            self.write(file, text).ok();
        }
        // The directory of all cannot be removed.
        fs::remove_dir(&self.directory).ok();
    }
}
