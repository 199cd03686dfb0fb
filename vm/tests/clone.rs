//! A clone that is moved, copied, or shares a target directory with another one: a program works in the
//! clone that it was started in, or says that it was built from another one.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// What a small clone has of the workshop's own.
const FILES: [&str; 4] =
    [".cargo/config.toml", "vm/kernels.toml", "vm/runner", "common/base/src/root.rs"];

const PACKAGE: &str = "[package]\nname = \"NAME\"\nversion = \"0.1.0\"\nedition = \"2024\"\n";

/// Prints the root that it works in, and the directory of its own sources, and works there.
const MAIN: &str = r#"
fn main() {
    let root = common_base::root::find().unwrap_or_else(|error| panic!("{error}"));
    std::fs::write(root.join("wrote"), "").unwrap();
    println!("{} {}", root.display(), env!("CARGO_MANIFEST_DIR"));
}
"#;

/// A clone with the package of `root.rs`, and a program that uses it under the name of one that runs on
/// this machine.
fn small_clone(place: &Path) -> PathBuf {
    let clone = place.join("clone");
    let put = |name: &str, text: &str| {
        let file = clone.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    put("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"common/base\", \"lesson\"]\n");
    put("common/base/Cargo.toml", &PACKAGE.replace("NAME", "common-base"));
    put("common/base/src/lib.rs", "pub mod root;\n");
    let dependency = "[dependencies]\ncommon-base = { path = \"../common/base\" }\n";
    put("lesson/Cargo.toml", &(PACKAGE.replace("NAME", "lesson") + dependency));
    put("lesson/src/main.rs", MAIN);
    for file in FILES {
        let to = clone.join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(Path::new(HERE).join(file), to).unwrap();
    }
    clone
}

/// A command without what cargo has set for this test, in this directory.
fn command(program: impl AsRef<Path>, directory: &Path) -> Command {
    let mut command = Command::new(program.as_ref());
    command.current_dir(directory);
    let of_cargo =
        ["CARGO_MANIFEST_DIR", "WORKSHOP_ROOT", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"];
    for name in of_cargo {
        command.env_remove(name);
    }
    command
}

fn cargo(directory: &Path) -> Command {
    command(std::env::var("CARGO").unwrap_or("cargo".into()), directory)
}

fn text(output: &Output) -> (bool, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// Runs the program by this command: it has to work in this clone.
fn works_in(clone: &Path, command: &mut Command) {
    let (done, printed, errors) = text(&command.output().unwrap());
    let wanted = format!("{0} {0}/lesson", clone.display());
    assert!(done && printed == wanted, "{printed:?} for {wanted:?}: {errors}");
    fs::remove_file(clone.join("wrote")).unwrap();
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(copied.success());
}

fn place() -> (TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().canonicalize().unwrap();
    (place, path)
}

/// `cargo lesson` in a clone, with its own target directory.
fn lesson(clone: &Path) -> Command {
    let mut command = cargo(clone);
    command.arg("lesson");
    command
}

#[test]
fn a_moved_and_a_copied_clone_work_in_themselves() {
    let (_place, place) = place();
    let first = small_clone(&place);
    works_in(&first, &mut lesson(&first));
    let copied = place.join("copied");
    copy(&first, &copied);
    works_in(&copied, &mut lesson(&copied));
    works_in(&first, &mut lesson(&first));
    let moved = place.join("moved");
    fs::rename(&first, &moved).unwrap();
    works_in(&moved, &mut lesson(&moved));
    // From below, and from outside, where cargo finds no configuration of the clone.
    works_in(&moved, &mut lesson(&moved.join("lesson/src")));
    let manifest = moved.join("Cargo.toml");
    let run = ["run", "--quiet", "--package", "lesson", "--manifest-path"];
    works_in(&moved, cargo(&place).args(run).arg(&manifest));
    works_in(&moved, cargo(&copied).args(run).arg(&manifest));
}

#[test]
fn two_clones_with_one_target_directory_work_each_in_itself() {
    let (_place, place) = place();
    let (first, second, target) = (small_clone(&place), place.join("second"), place.join("target"));
    copy(&first, &second);
    for clone in [&first, &second, &first] {
        works_in(clone, lesson(clone).env("CARGO_TARGET_DIR", &target));
    }
    let program = target.join("debug/lesson");
    works_in(&first, &mut command(&program, &first));
    // Cargo did not start it: it is the first clone's.
    let (done, _, errors) = text(&command(&program, &second).output().unwrap());
    let said = errors.contains(&format!("built from the clone {}", first.display()))
        && errors.contains(&format!("started in the clone {}", second.display()));
    assert!(!done && said && !second.join("wrote").exists(), "{errors}");
    let (done, _, errors) = text(&command(&program, &place).output().unwrap());
    assert!(!done && errors.contains("outside of the workshop"), "{errors}");
}

/// The launcher itself: copied with its target directory, and started without cargo.
#[test]
fn a_copied_launcher_does_nothing_in_the_original() {
    let (_place, place) = place();
    let copied = small_clone(&place);
    let program = copied.join("target/debug/vm");
    fs::create_dir_all(program.parent().unwrap()).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_vm"), &program).unwrap();
    for directory in [&copied, &place] {
        let output = command(&program, directory).args(["run", "true"]).output().unwrap();
        let (_, _, errors) = text(&output);
        let wanted = format!("started in the clone {}", copied.display());
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.starts_with("vm: ") && errors.contains(&wanted), "{errors}");
    }
}
