//! What nearly every test uses: programs that run beside a load, disks, the kernel's own tracer.

pub use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

pub use anyhow::{Context, Result, anyhow, bail, ensure};
pub use rustix::{fs::Advice, process::Signal};
pub use serde_json::Value;

pub(crate) use crate::{
    disks::{self, Mapped, Mounted, NullBlk, ScsiDebug, reads},
    ftrace::{Event, Ftrace, Hook},
    run::{self, *},
};
