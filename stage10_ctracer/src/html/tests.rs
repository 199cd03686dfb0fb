use std::{fs, path::PathBuf, process::Command};

use super::*;
use crate::{calls::tests::sample, decode::tests::layout};

#[test]
fn write_it() {
    let mut out = Vec::new();
    write(&mut out, &sample(), &layout("bio")).unwrap();
    fs::write("/tmp/b2-page.html", out).unwrap();
}
