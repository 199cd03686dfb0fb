//! The switches of all ftrace hooks and of all kprobes. Nobody is told where a hook does not run, so a run
//! watches them: also one that is off for a moment leaves calls uncounted.

use std::{
    fs::File,
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use anyhow::{Context, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init},
    io::dup,
};

use crate::{error::unsupported, message::say};

/// How long a switch may be off, at most, that is written through another mount of /proc than ours: inotify
/// does not see that.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// A file that holds 0 where the hooks of some kinds never run.
struct Switch {
    path: &'static str,
    /// The beginnings of the sections that name such hooks.
    kinds: &'static [&'static str],
    /// What switches it on.
    remedy: &'static str,
}

const SWITCHES: [Switch; 2] = [
    Switch {
        path: "/proc/sys/kernel/ftrace_enabled",
        kinds: &["kprobe", "kretprobe", "fentry/", "fexit/"],
        remedy: "sysctl kernel.ftrace_enabled=1",
    },
    Switch {
        path: "/sys/kernel/debug/kprobes/enabled",
        kinds: &["kprobe", "kretprobe"],
        remedy: "echo 1 > /sys/kernel/debug/kprobes/enabled",
    },
];

impl Switch {
    /// The first of these hooks that runs only where it is on.
    fn hook<'a>(&self, hooks: &'a [String]) -> Option<&'a String> {
        hooks.iter().find(|hook| self.kinds.iter().any(|kind| hook.starts_with(kind)))
    }
}

/// Whether a switch's file says 0. One that cannot be read says nothing.
fn is_off(file: &File) -> bool {
    let mut state = [0];
    file.read_at(&mut state, 0).is_ok_and(|read| read == 1) && state == *b"0"
}

/// Fails, with exit code 3, where these hooks could be attached and would never run: somebody has switched off
/// ftrace, which calls the programs at a function, or kprobes.
pub fn hooks_run(hooks: &[String]) -> Result<()> {
    for switch in &SWITCHES {
        if let Some(hook) = switch.hook(hooks)
            && File::open(switch.path).is_ok_and(|file| is_off(&file))
        {
            let Switch { path, remedy, .. } = switch;
            return unsupported(format!(
                "{path} is 0, and {hook} never runs. As root, {remedy} switches it on"
            ));
        }
    }
    Ok(())
}

/// A switch that is watched.
struct Watched {
    switch: &'static Switch,
    /// A hook that needs it.
    hook: String,
    /// Open, so that its inode, which is watched, stays the one that others open.
    file: File,
    /// inotify's number for it.
    watch: Option<i32>,
    /// What was found out: why some calls are not counted.
    gap: Option<String>,
}

/// The switches of some hooks, watched by a thread until the last of these is dropped.
#[derive(Clone)]
pub struct Watch(Arc<Mutex<State>>);

struct State {
    switches: Vec<Watched>,
    inotify: Option<OwnedFd>,
}

impl Watch {
    /// Begins to watch what these hooks need.
    pub fn new(program: &str, hooks: &[String]) -> Result<Watch> {
        let needed = SWITCHES.iter().filter_map(|switch| {
            let hook = switch.hook(hooks)?.clone();
            let file = File::open(switch.path).ok()?; // without debugfs, there is none
            Some(Watched { switch, hook, file, watch: None, gap: None })
        });
        let mut switches: Vec<Watched> = needed.collect();
        let inotify = if switches.is_empty() { Ok(None) } else { watch(&mut switches).map(Some) };
        let inotify = inotify.unwrap_or_else(|error| {
            say(&format!(
                "{program}: inotify cannot be used ({error}): that hooks are switched off for less than \
                 0.25 s would not be noticed\n"
            ));
            None
        });
        let state = Arc::new(Mutex::new(State { switches, inotify }));
        let (watched, has_none) = (Arc::downgrade(&state), lock(&state).switches.is_empty());
        let inotify = lock(&state).inotify.as_ref().map(dup).transpose().context("inotify")?;
        let look = move || {
            loop {
                let mut files: Vec<PollFd> =
                    inotify.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                poll(&mut files, Some(&LOOK)).ok();
                let Some(state) = watched.upgrade() else { return };
                lock(&state).look();
            }
        };
        if !has_none {
            thread::Builder::new().spawn(look).context("no thread could be started")?;
        }
        Ok(Watch(state))
    }

    /// Fails, with exit code 3, where a switch was off since this began.
    pub fn hooks_ran(&self) -> Result<()> {
        let mut state = lock(&self.0);
        state.look();
        match state.switches.iter().find_map(|switch| switch.gap.clone()) {
            Some(gap) => unsupported(gap),
            None => Ok(()),
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has inotify report who opens the switches and writes to them.
fn watch(switches: &mut [Watched]) -> io::Result<OwnedFd> {
    let inotify = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    // Opened: else inotify would take two that are closed, one after the other, for one.
    let events = WatchFlags::MODIFY | WatchFlags::OPEN | WatchFlags::CLOSE_WRITE;
    for switch in switches {
        switch.watch = Some(add_watch(&inotify, switch.switch.path, events)?);
    }
    Ok(inotify)
}

impl State {
    /// Looks at what has been written to the switches since the last look, and how they are now.
    fn look(&mut self) {
        let writes = self.inotify.as_ref().map_or_else(Vec::new, writes);
        for Watched { switch, hook, file, watch, gap } in &mut self.switches {
            let times = writes.iter().filter(|written| Some(**written) == *watch).count();
            let path = switch.path;
            let what = match times {
                _ if is_off(file) => "was 0 for a while",
                // It was 1, and is 1: one write has changed nothing.
                0 | 1 => continue,
                _ => "was written twice in a moment, and may have been 0",
            };
            gap.get_or_insert_with(|| format!("{path} {what}: then {hook} does not run"));
        }
    }
}

/// The watches of the files that have been written to, one for each writer: a shell truncates the file, too,
/// which is an event of its own.
fn writes(inotify: impl AsFd) -> Vec<i32> {
    let (mut buffer, mut written) = ([MaybeUninit::uninit(); 4096], Vec::new());
    let mut events = Reader::new(inotify.as_fd(), &mut buffer);
    loop {
        match events.next().map_err(io::Error::from) {
            Ok(event) if event.events().contains(ReadFlags::CLOSE_WRITE) => {
                written.push(event.wd())
            }
            Err(error) if error.kind() != ErrorKind::Interrupted => return written,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn needed(hook: &str) -> Vec<bool> {
        SWITCHES.iter().map(|switch| switch.hook(&[hook.to_owned()]).is_some()).collect()
    }

    #[test]
    fn hooks_have_switches() {
        assert_eq!(needed("kprobe/submit_bio"), [true, true]);
        assert_eq!(needed("kprobe.multi"), [true, true]);
        assert_eq!(needed("fentry/bio_endio"), [true, false]);
        assert_eq!(needed("tp_btf/block_rq_complete"), [false, false]);
    }

    /// Of a file in the place of the switch: what is said after these writes, all before one look.
    fn gap(writes: &[&str]) -> Option<String> {
        let path = std::env::temp_dir().join(format!("switch-{}-{writes:?}", std::process::id()));
        fs::write(&path, "1\n").unwrap();
        let path: &'static str = path.to_str().unwrap().to_owned().leak();
        let switch: &'static Switch = Box::leak(Box::new(Switch { path, kinds: &[], remedy: "" }));
        let (file, hook) = (File::open(path).unwrap(), "kprobe/f".to_owned());
        let mut switches = vec![Watched { switch, hook, file, watch: None, gap: None }];
        let inotify = Some(watch(&mut switches).unwrap());
        let mut state = State { switches, inotify };
        for text in writes {
            File::options()
                .write(true)
                .open(path)
                .unwrap()
                .write_all_at(text.as_bytes(), 0)
                .unwrap();
        }
        state.look();
        fs::remove_file(path).unwrap();
        state.switches.remove(0).gap
    }

    #[test]
    fn a_switch_that_was_off_leaves_a_gap() {
        assert_eq!((gap(&[]), gap(&["1\n"])), (None, None));
        assert!(gap(&["0\n"]).unwrap().contains("was 0 for a while: then kprobe/f does not"));
        assert!(gap(&["0\n", "1\n"]).unwrap().contains("may have been 0"));
    }
}
