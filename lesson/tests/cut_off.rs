//! A check that is cut off, at each phase and by each signal: the next check of an official answer passes.

#![allow(clippy::unwrap_used)]

mod room;

use std::{fs, thread, time::Duration};

use room::{Room, Running};

/// When the check is cut off: what it has said, and how long after that.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Build,
    Boot,
    Judge,
    Between,
    CleaningUp,
}

impl Phase {
    fn reached(self, check: &mut Running) {
        let (said, then) = match self {
            Phase::Build => ("", 300),
            Phase::Boot => ("booting the default kernel", 2000),
            Phase::Judge => ("2 judges, the default kernel", 2500),
            Phase::Between => ("✓ prints a line for every bio", 0),
            Phase::CleaningUp => ("✓ leaves nothing in the kernel", 0),
        };
        check.expect(said);
        thread::sleep(Duration::from_millis(then));
    }
}

const CUT_OFF: &str =
    "an earlier check was cut off; its virtual machine is ended, and a new one boots";
const INTERRUPTED: &str =
    "interrupted: the virtual machine is ended, too, and the next check boots a new one";

/// The official answer to exercise 01, and what stands before its main().
fn answer(room: &Room, before: &str) {
    for file in ["main.rs", "trace.bpf.c"] {
        let text = fs::read_to_string(room.workshop("stage01_submit_bio/src").join(file)).unwrap();
        let text = if file == "main.rs" { text.replacen("fn main()", before, 1) } else { text };
        fs::write(room.path("mine/01/src").join(file), text).unwrap();
    }
}

fn assert_answer_passes(room: &Room, after: &str) -> String {
    let (code, said) = room.run(&["check", "01"]);
    assert!(code == 0 && said.contains("\nDone. "), "after {after}: {code} {said}");
    said
}

#[test]
#[ignore = "boots a guest for each of the signals, which takes minutes: .github/workflows/ci.yml"]
fn a_check_that_is_cut_off() {
    let Some(room) = Room::new() else { return };
    assert_eq!(room.run(&["start", "01"]).0, 0);
    answer(&room, "fn main()");
    assert_answer_passes(&room, "nothing");
    let (kill, int, term, hup) = (libc::SIGKILL, libc::SIGINT, libc::SIGTERM, libc::SIGHUP);
    for (phase, signal) in [
        (Phase::Build, int),
        (Phase::Build, kill),
        (Phase::Judge, hup),
        (Phase::Between, term),
        (Phase::CleaningUp, int),
        (Phase::CleaningUp, kill),
        (Phase::Judge, kill),
        (Phase::Between, kill),
        (Phase::Judge, int),
    ] {
        let after = format!("signal {signal}, {phase:?}");
        if let Phase::Build = phase {
            answer(&room, "/// Built anew.\nfn main()");
        }
        let mut check = Running::new(room.lesson(&["check", "01"]));
        phase.reached(&mut check);
        check.signal(signal);
        let (code, said) = check.end();
        match phase {
            // It may have passed in that moment.
            Phase::CleaningUp => {
                assert!([0, 128 + signal].contains(&code), "{after}: {code} {said}")
            }
            _ => assert_eq!(code, 128 + signal, "{after}: {said}"),
        }
        let guests = room.guests();
        let next = assert_answer_passes(&room, &after);
        // Between two judges, nothing is cut off, and the next one may have begun.
        if matches!(phase, Phase::Judge | Phase::Build) {
            let is_running = matches!(phase, Phase::Judge);
            assert_eq!(said.contains(INTERRUPTED), is_running && signal != kill, "{after}: {said}");
            assert_eq!(guests, usize::from(!is_running || signal == kill), "{after}");
            assert_eq!(next.contains(CUT_OFF), is_running && signal == kill, "{after}: {next}");
        }
    }
}

#[test]
#[ignore = "boots a guest for each of the signals, which takes minutes: .github/workflows/ci.yml"]
fn a_boot_that_is_cut_off() {
    let Some(room) = Room::new() else { return };
    assert_eq!(room.run(&["start", "01"]).0, 0);
    answer(&room, "fn main()");
    for (signal, left) in [(libc::SIGKILL, 1), (libc::SIGINT, 0)] {
        let mut check = Running::new(room.lesson(&["check", "01"]));
        Phase::Boot.reached(&mut check);
        check.signal(signal);
        let (code, said) = check.end();
        assert_eq!((code, room.guests()), (128 + signal, left), "{said}");
        assert_answer_passes(&room, "a boot that was cut off");
        room.run(&["stop"]);
    }
}

#[test]
#[ignore = "boots a guest for each of the signals, which takes minutes: .github/workflows/ci.yml"]
fn ctrl_c_in_a_terminal() {
    let Some(room) = Room::new() else { return };
    assert_eq!(room.run(&["start", "01"]).0, 0);
    answer(&room, "fn main()");
    for phase in [Phase::Build, Phase::Boot, Phase::Judge, Phase::Between] {
        if let Phase::Build = phase {
            answer(&room, "/// Built anew.\nfn main()");
        }
        let mut check = Running::on_terminal(room.lesson(&["check", "01"]));
        phase.reached(&mut check);
        check.type_in("\x03");
        let (code, said) = check.end();
        let ended = room.guests() == 0 || matches!(phase, Phase::Between);
        assert!(code == 130 && ended, "{phase:?}: {code} {said}");
        assert!(!said.contains("does not compile"), "{phase:?}: {said}");
        assert_answer_passes(&room, &format!("Ctrl-C, {phase:?}"));
        // The next one boots, too.
        room.run(&["stop"]);
    }
    // The watch has judged, and waits: its guest is as it was, and stays.
    answer(&room, "fn main() { std::process::exit(0) }\n#[allow(dead_code)]\nfn other()");
    let mut watch = Running::on_terminal(room.lesson(&["check", "--watch"]));
    watch.expect("Waiting for you to save a file");
    watch.type_in("\x03");
    let (code, said) = watch.end();
    assert_eq!((code, room.guests()), (130, 1), "{said}");
    let why =
        "your program does not start: it ended with exit code 0; it never said \": tracing \"";
    assert!(said.contains(why) && !said.contains("expected:"), "{said}");
    answer(&room, "fn main()");
    assert!(!assert_answer_passes(&room, "the watch").contains("booting"));
}

/// The attempt runs as root beside its judge, and ends it; or it leaves something.
#[test]
#[ignore = "boots several guests, which takes minutes: .github/workflows/ci.yml"]
fn what_an_attempt_does_to_the_guest() {
    let Some(room) = Room::new() else { return };
    assert_eq!(room.run(&["start", "01"]).0, 0);
    let with = |code: &str| {
        answer(&room, &format!("#[allow(warnings)]\nfn before() {{ {code} }}\nfn main()"));
        let file = room.path("mine/01/src/main.rs");
        let text = fs::read_to_string(&file).unwrap();
        let (head, tail) = text.split_once("\nfn main()").unwrap();
        let tail = tail.replacen("{\n", "{\n    before();\n", 1);
        fs::write(file, format!("{head}\nfn main(){tail}")).unwrap();
    };
    let sh = |script: &str| {
        format!("std::process::Command::new(\"sh\").args([\"-c\", {script:?}]).status().unwrap();")
    };
    // Nothing is left of these: the guest stays.
    for (code, says) in [
        ("panic!(\"here\")", "panicked at mine/01/src/main.rs:"),
        ("loop { std::thread::park() }", "waiting for \": tracing \", up to a minute or two"),
    ] {
        with(code);
        let mut check = Running::new(room.lesson(&["check", "01"]));
        check.expect(says);
        check.signal(libc::SIGTERM);
        let (_, said) = check.end();
        assert!(!said.contains("expected:"), "{code}: {said}");
    }
    answer(&room, "fn main()");
    assert_answer_passes(&room, "these");
    for (script, says, next) in [
        ("kill -9 $(ps -o ppid= $PPID)", "status 137", CUT_OFF),
        // Verdicts of its own, too.
        (
            "J=$(ps -o ppid= $PPID | tr -d ' '); for t in stage01_has_a_line_for_every_bio exercise_leaves_nothing; do \
             echo '{ \"type\": \"test\", \"name\": \"'$t'\", \"event\": \"ok\" }' >/proc/$J/fd/1; done; kill -9 $J",
            "which does not go with these verdicts",
            CUT_OFF,
        ),
        (
            "bpftool map create /sys/fs/bpf/left type array key 4 value 4 entries 1 \
             name left",
            "leaves what it has pinned, which stays loaded: pin /sys/fs/bpf/left.",
            "has left something (",
        ),
        (
            "dmsetup create left --table '0 8 error' --noudevsync",
            "",
            "something (disk dm-0); its virtual machine is ended, and a new one boots",
        ),
        ("echo 7 >/proc/sys/vm/swappiness", "", "something (/proc/sys/vm/swappiness is \"7\""),
    ] {
        with(&sh(script));
        let (code, said) = room.run(&["check", "01"]);
        assert!(said.contains(says), "{script}: {code} {said}");
        if script.contains("kill") {
            assert!(code == 1 && !said.contains('✓'), "{script}: {code} {said}");
        }
        answer(&room, "fn main()");
        let after = assert_answer_passes(&room, script);
        assert!(after.contains(next), "{script}: {after}");
        assert!(!assert_answer_passes(&room, script).contains("booting"));
    }
}
