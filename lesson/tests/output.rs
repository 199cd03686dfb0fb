//! What `cargo lesson` does where its output cannot be written, or is not read to its end.

#![allow(clippy::unwrap_used)]

use std::{fs::File, os::unix::process::ExitStatusExt, process::Command};

fn lesson() -> Command {
    Command::new(env!("CARGO_BIN_EXE_lesson"))
}

#[test]
fn a_full_disk_is_said() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = lesson().stdout(full).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.starts_with("lesson: cannot write the output: No space left"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn a_reader_may_leave() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = lesson().stdout(writer).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    // The signal ends it, as it ends `ls`: see main().
    let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap());
    assert!(code == 128 + libc::SIGPIPE && errors.is_empty(), "{code} {errors}");
}
