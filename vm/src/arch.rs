//! What differs between the architectures of guests. Nothing else asks for one.

use std::env::consts;
use std::fmt;

use anyhow::Result;
use clap::ValueEnum;
use workshop::fail::{MACHINE, fail};

/// How a guest's code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the processor.
    Kvm,
    /// Translated by QEMU, several times slower.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "KVM",
            Accel::Tcg => "TCG",
        })
    }
}

/// An architecture that guests can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// PCs.
    #[value(name = "x86-64", aliases = ["x86_64", "amd64"])]
    X86_64,
    /// Arm's 64 bit processors.
    #[value(name = "arm64", alias = "aarch64")]
    Arm64,
}

/// The architecture of this program, and so of this machine; none where no guest can have it.
fn own() -> Option<Arch> {
    match consts::ARCH {
        "x86_64" => Some(Arch::X86_64),
        "aarch64" => Some(Arch::Arm64),
        _ => None,
    }
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 2] = [Arch::X86_64, Arch::Arm64];

    /// The guest's: the one that the user names, else this machine's own. An error where this machine runs
    /// no such guest.
    pub fn of_guest(named: Option<Arch>) -> Result<Arch> {
        let why = match (own(), named) {
            (None, _) => {
                format!("a guest is x86-64 or arm64, and this machine is {}", consts::ARCH)
            }
            (Some(Arch::Arm64), Some(Arch::X86_64)) => {
                "on an arm64 machine, a guest is arm64".to_owned()
            }
            (Some(own), named) => return Ok(named.unwrap_or(own)),
        };
        let otherwise = "with VM=0, `cargo run` runs a stage on this machine's own kernel";
        Err(fail(MACHINE, format!("{why}; {otherwise}")))
    }

    /// Whether it is another one than this machine's: its programs do not run here.
    pub fn is_foreign(self) -> bool {
        own() != Some(self)
    }

    fn pick<T>(self, x86_64: T, arm64: T) -> T {
        match self {
            Arch::X86_64 => x86_64,
            Arch::Arm64 => arm64,
        }
    }

    /// As it is named on the command line, and shown.
    pub fn name(self) -> &'static str {
        self.pick("x86-64", "arm64")
    }

    /// Whether `bench/budgets.toml` and `bench/RESULTS.md` are about it.
    pub fn has_budgets(self) -> bool {
        self == Arch::X86_64
    }

    /// Whether `cargo truth` compares tools for it, and `truth/TRUTH.md` is about it.
    pub fn has_peers(self) -> bool {
        self == Arch::X86_64
    }

    /// What the table of kernels in docs/kernels.md was written by.
    pub fn table_is_by(self) -> &'static str {
        self.pick("cargo vm test --kernel all", "cargo vm test --arch arm64 --kernel all")
    }

    /// Whether QEMU's machine has a display adapter unless it is told otherwise.
    pub fn has_vga(self) -> bool {
        self == Arch::X86_64
    }

    /// Rust's name of the machines that it builds for.
    pub fn rust_target(self) -> &'static str {
        self.pick("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
    }

    /// Whether a file that begins so is a kernel that QEMU boots: by the boot protocol's signature on
    /// x86-64 (Documentation/arch/x86/boot.rst), by an Image's header on arm64, which may be compressed.
    pub fn is_image(self, head: &[u8]) -> bool {
        let has =
            |at: usize, magic: &[u8]| head.get(at..).is_some_and(|head| head.starts_with(magic));
        match self {
            Arch::X86_64 => has(0x202, b"HdrS"),
            Arch::Arm64 => has(56, b"ARM\x64") || has(0, b"\x1f\x8b") || has(4, b"zimg"),
        }
    }

    /// The name of GCC's target, which is also that of the directories with libraries.
    pub fn gnu(self) -> &'static str {
        self.pick("x86_64-linux-gnu", "aarch64-linux-gnu")
    }

    /// Debian's name.
    pub fn debian(self) -> &'static str {
        self.pick("amd64", "arm64")
    }

    /// The name that a BPF program is compiled with: `__TARGET_ARCH_x86`.
    pub fn bpf(self) -> &'static str {
        self.pick("x86", "arm64")
    }

    /// The program that emulates it.
    pub fn qemu(self) -> &'static str {
        self.pick("qemu-system-x86_64", "qemu-system-aarch64")
    }

    /// QEMU's machine, accelerator and CPU, and what the kernel's command line begins with. `icount`: the
    /// guest's clock counts instructions.
    pub fn machine(self, accel: Accel, icount: bool) -> ([&'static str; 3], &'static str) {
        // All emulated CPUs run on one thread: with more, QEMU before 8.1 could execute outdated code for
        // ever after another CPU had changed it (fixed by its commit deba78709a), and attaching a BPF
        // program to a function of the kernel changes code. The tests take no longer this way.
        let tcg = "tcg,thread=single";
        // norandmaps: QEMU finds what it has translated by its address. A program that lies elsewhere each
        // time it starts is translated anew each time: three times the work for `ls`.
        match (self, accel) {
            (Arch::X86_64, Accel::Kvm) => (["pc", "kvm", "host"], "console=ttyS0"),
            // Its clock is the HPET: with another one, all figures of the bench would be others. On a busy host,
            // the kernel's test of its timer interrupt fails, and it panics: no_timer_check leaves that out, as
            // it is under KVM.
            (Arch::X86_64, Accel::Tcg) if icount => {
                (["pc", tcg, "max"], "console=ttyS0 tsc=unstable no_timer_check")
            }
            // Without these two features, the kernel copies and clears by loops and not by `rep movsb` and `rep
            // stosb`, which are emulated byte by byte: stage06 runs in 2.4 s instead of 2.8 s.
            (Arch::X86_64, Accel::Tcg) => (
                ["pc", tcg, "max,-erms,-fsrm"],
                match trusts_tsc() {
                    true => "console=ttyS0 norandmaps tsc=reliable no_timer_check",
                    false => "console=ttyS0 norandmaps tsc=unstable no_timer_check",
                },
            ),
            (Arch::Arm64, Accel::Kvm) => {
                (["virt,gic-version=host", "kvm", "host"], "console=ttyAMA0")
            }
            // Pointer authentication is computed in software: a boot takes three times as long with it.
            (Arch::Arm64, Accel::Tcg) => {
                (["virt,gic-version=3", tcg, "max,pauth=off"], "console=ttyAMA0 norandmaps")
            }
        }
    }
}

/// Whether this machine's kernel trusts the time stamp counters of its CPUs. Those of an emulated guest have the same
/// time, and one thread runs all its CPUs; but the guest's kernel cannot know that. If it doubts them, its clock is the
/// HPET, which takes microseconds to read, and the scheduler's clock stands still where the host delays a tick:
/// /proc/PID/schedstat then leaves out a part of a wait.
fn trusts_tsc() -> bool {
    let clocks = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    let clocks = std::fs::read_to_string(clocks).unwrap_or_default();
    clocks.split_whitespace().any(|clock| clock == "tsc")
}
