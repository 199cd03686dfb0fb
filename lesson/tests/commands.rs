//! What a learner types, without a guest.

#![allow(clippy::unwrap_used)]

mod room;

use std::{fs, os::unix::fs::PermissionsExt};

use room::{Room, Running};

/// A name of an exercise means the same to every command that takes one.
#[test]
fn every_command_takes_the_name_of_an_exercise() {
    let Some(room) = Room::new() else { return };
    for id in ["2", "04"] {
        assert_eq!(room.run(&["start", id]).0, 0);
    }
    // 04 is the current one, and stays it.
    let (code, said) = room.run(&["hint", "2"]);
    assert!(code == 0 && said.starts_with("Hint 1 of 3, exercise 02"), "{code} {said}");
    let (code, said) = room.run(&["solution", "02"]);
    let anyhow = "`cargo lesson solution 02 --anyhow` shows the answer";
    assert!(code == 1 && said.contains(anyhow), "{code} {said}");
    let (code, said) = room.run(&["solution", "02", "--anyhow"]);
    assert!(code == 0 && said.starts_with("diff -u mine/02/src stage02_bio_endio/src"), "{said}");
    let (code, said) = room.run(&["hint"]);
    assert!(code == 0 && said.starts_with("Hint 1 of 3, exercise 04"), "{code} {said}");
    let (code, said) = room.run(&["reset", "02", "--yes"]);
    assert!(code == 0 && said.contains("Your attempt is in mine.old/02-1 now"), "{code} {said}");
    // It is the current one now.
    assert!(room.run(&["hint"]).1.starts_with("Hint 1 of 3, exercise 02"));
    for command in [&["start"][..], &["check"], &["hint"], &["solution"], &["reset", "--yes"]] {
        let (code, said) = room.run(&[command, &["nonsense"]].concat());
        assert!(
            code == 2 && said.contains("there is no exercise nonsense; there are 01, "),
            "{said}"
        );
    }
}

/// What a command advises works.
#[test]
fn an_attempt_that_is_no_package_is_started_over() {
    let Some(room) = Room::new() else { return };
    let missing = "mine/04 does not exist: `cargo lesson start 04` makes it";
    let (code, said) = room.run(&["check", "04"]);
    assert!(code == 2 && said.contains(missing), "{code} {said}");
    for left in ["", "Cargo.toml"] {
        assert_eq!(room.run(&["start", "04"]).0, 0);
        // Another one is the current one.
        assert_eq!(room.run(&["start", "01"]).0, 0);
        let mine = room.path("mine/04");
        fs::rename(&mine, room.path("gone")).unwrap();
        fs::create_dir(&mine).unwrap();
        if !left.is_empty() {
            fs::copy(room.path("gone").join(left), mine.join(left)).unwrap();
        }
        fs::remove_dir_all(room.path("gone")).unwrap();
        let advice = "`cargo lesson reset 04` moves what is there to mine.old/ and starts over";
        for command in ["start", "check"] {
            let (code, said) = room.run(&[command, "04"]);
            assert!(code == 2 && said.contains(advice), "{command}: {code} {said}");
        }
        let (code, said) = room.run(&["solution", "04", "--anyhow"]);
        assert!(code == 0 && said.contains("The answer is stage04_max_latency/src."), "{said}");
        let (code, said) = room.run(&["reset", "04", "--yes"]);
        assert!(code == 0 && mine.join("src/main.rs").exists(), "{code} {said}");
        assert_eq!(room.run(&["start", "04"]).0, 0);
    }
    // Also where it is the current one.
    fs::remove_file(room.path("mine/04/Cargo.toml")).unwrap();
    let (code, said) = room.run(&["check"]);
    assert!(code == 2 && said.contains("mine/04 has no Cargo.toml"), "{code} {said}");
    assert!(said.contains("`cargo lesson reset 04`"), "{said}");
}

/// An error of the compiler is said before the judges are built: that takes minutes the first time.
#[test]
fn a_typo_is_answered_before_the_judges_are_built() {
    let Some(room) = Room::new() else { return };
    assert_eq!(room.run(&["start", "01"]).0, 0);
    // Notes what cargo is asked for.
    let (cargo, asked) = (room.path("cargo"), room.path("asked"));
    let real = std::env::var("CARGO").unwrap();
    let script = format!("#!/bin/sh\necho \"$*\" >>{}\nexec {real} \"$@\"\n", asked.display());
    fs::write(&cargo, script).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    for (file, text, says) in [
        ("main.rs", "fn main( {\n", "mine/01/src/main.rs:1"),
        (
            "trace.bpf.c",
            "#include \"vmlinux.h\"\nint x(struct bio *bio)\n{\n\treturn bio->bi_nosuch;\n}\n",
            "common/bpf/vmlinux.h is an excerpt",
        ),
    ] {
        fs::write(room.path("mine/01/src").join(file), text).unwrap();
        let mut check = room.lesson(&["check"]);
        check.env("CARGO", &cargo);
        let (code, said) = Running::new(check).end();
        assert!(code == 1 && said.contains(says), "{code} {said}");
        assert!(said.contains("Your program does not compile yet."), "{said}");
        let asked = fs::read_to_string(&asked).unwrap();
        assert!(asked.contains("--package mine-01") && !asked.contains("guest_tests"), "{asked}");
        assert_eq!(room.guests(), 0);
    }
}
