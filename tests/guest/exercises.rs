//! Judges of the exercises that are no stage, and of every attempt. They run for `cargo lesson` only,
//! with the learner's program in the place of `exercise` or of a stage.

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    commands::{instances, loaded, wait_until_unloaded},
    run::{Running, subject},
};

pub const TESTS: &[Test] = &[("exercise_leaves_nothing", exercise_leaves_nothing)];

/// After Ctrl-C, the attempt exits with 0, and nothing of it is left in the kernel.
fn exercise_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    let running =
        Running::stage(&subject().context("VM_SUBJECT names no program: NAME=FILE")?, &[])?;
    ensure!(!loaded()?.is_subset(&before), "it says that it traces, and no BPF program is loaded");
    running.interrupt()?;
    wait_until_unloaded(&before)?;
    ensure!(instances().is_empty(), "these tracefs instances are left: {:?}", instances());
    Ok(())
}
