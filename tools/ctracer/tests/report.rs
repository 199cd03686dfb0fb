//! `ctracer report` as a program: its exit codes and messages. It needs no root.

#![allow(missing_docs, clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

/// The exit code, and what it says.
fn report(arguments: &[&str]) -> (i32, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_ctracer")).arg("report").args(arguments).output().unwrap();
    let code = output.status.code().expect("no signal ends it");
    (code, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_damaged_file_is_reported_up_to_its_damage() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/recording/return_before_call.jsonl");
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("page.html");
    let (code, said) = report(&[file, "--html", page.to_str().unwrap()]);
    let expected = "line 3 is damaged, and what follows is not read: call 0 returns at 50 ns, earlier \
                    than it began (100 ns). The report is made of the lines before";
    assert!(said.contains(expected) && !said.contains("panicked"), "{said}");
    assert_eq!(code, 1, "{said}");
    assert!(fs::read_to_string(&page).unwrap().contains("\"ledger\":null"));
    // Both are said where an output fails, too.
    let (code, said) = report(&[file, "--html", "/dev/full"]);
    assert!(
        said.contains("line 3 is damaged") && said.contains("/dev/full is incomplete"),
        "{said}"
    );
    assert_eq!(code, 1, "{said}");
}

#[test]
fn what_is_no_recording_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let [empty, other] = ["empty", "other"].map(|name| directory.path().join(name));
    fs::write(&empty, "").unwrap();
    fs::write(&other, "\u{1b}[2J no JSON\n").unwrap();
    let page = directory.path().join("page.html");
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    for (file, code, expected) in [
        (text(&empty), 1, "the file is empty"),
        (text(&other), 1, "line 1 is damaged"),
        (text(directory.path()), 1, "Is a directory"),
        ("/nonesuch".to_owned(), 1, "cannot be read"),
        ("/dev/zero".to_owned(), 1, "line 1 is damaged: it is longer than 16 MiB"),
    ] {
        let (ended, said) = report(&[&file, "--html", &text(&page)]);
        assert!(said.contains(expected) && !said.contains('\u{1b}'), "{file}: {said:?}");
        assert_eq!(ended, code, "{file}: {said}");
    }
    for arguments in [&[][..], &["/dev/null"], &["/dev/null", "--html", "/x", "--memory", "1"]] {
        assert_eq!(report(arguments).0, 2, "{arguments:?}");
    }
}
