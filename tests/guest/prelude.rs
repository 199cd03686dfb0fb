//! What nearly every test uses: programs that run beside a load, disks, the kernel's own tracer.

pub use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs::{self, File, OpenOptions},
    io::Write,
    net::{TcpListener, TcpStream},
    ops::RangeInclusive,
    os::{
        fd::{AsFd, AsRawFd},
        unix::{
            fs::{FileExt, MetadataExt, OpenOptionsExt},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

pub use anyhow::{Context, Result, anyhow, bail, ensure};
pub use rustix::{
    fs::Advice,
    process::{Pid, Signal, kill_process_group},
};
pub use serde_json::Value;

pub(crate) use crate::{
    commands::{self, loaded, wait_until_unloaded},
    disks::{self, Failing, Mapped, Mounted, NullBlk, ScsiDebug, reads},
    exercise_loads::{self, Checksummed, Direct, Long, Mixed, Ram},
    exercises::EXERCISE,
    exporter::{self, Scrape},
    ftrace::{Event, Ftrace, Hook, TRACEFS, Tracer},
    functions::listed,
    maps::{Maps, Place, insert},
    pagecache::{self, MIB, Watched, new_file, page_size},
    run::{self, *},
    slow_io::{self, objects, of_disk, part},
    table::{laws, loads},
};
