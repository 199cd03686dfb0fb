//! What nearly every test uses: programs that run beside a load, disks, the kernel's own tracer.

pub use std::{fs, path::Path, process::Command};

pub use anyhow::{Context, Result, bail, ensure};
pub use rustix::process::Signal;
pub use serde_json::Value;

pub(crate) use crate::{
    disks::{self, Mapped, Mounted, NullBlk, ScsiDebug},
    ftrace::{Event, Ftrace, Hook},
    run::{self, *},
};
