//! The launcher, with real guests where the guest itself is judged, else with a machine that needs no
//! boot (fake/qemu.rs). Every wait has a limit; reaching it is a failure.

#![allow(missing_docs, clippy::too_many_lines, clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tempfile::TempDir;

/// The limit for anything that needs a boot, also while several guests boot.
const LIMIT: Duration = Duration::from_secs(120);
/// The limit for what a launcher leaves to others to clean up.
const SOON: Duration = Duration::from_secs(10);
/// A shell whose program says `SOFTWARE.`, and waits. Said by the shell itself, that would be too early: a Ctrl-C that
/// comes before the program has started, dash keeps until it has ended.
const WAITS: &str = concat!("tail -fn1 '", env!("CARGO_MANIFEST_DIR"), "/../LICENSE-MIT'; true");

/// A private place for run directories, so that other guests do not interfere. A test that passes leaves
/// nothing of its launches there.
struct Place(TempDir);

impl Place {
    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_clean(self);
        }
    }
}

fn place() -> Place {
    Place(tempfile::Builder::new().prefix("vm").tempdir_in("/tmp").unwrap())
}

/// A launcher's command line, with its run directory below `place`.
fn vm(place: &Place, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm"));
    command.args(args).env("TMPDIR", place.path()).env_remove("VM_KERNEL").env_remove("VM_ARCH");
    command
}

/// The same with a machine that needs no boot. Its programs run on this machine: they touch nothing
/// outside of `$TMPDIR`.
fn fake(place: &Place, args: &[&str]) -> Command {
    without_boot(place, vm(place, args))
}

/// Makes the launchers that this command starts find the fake QEMU.
fn without_boot(place: &Place, mut command: Command) -> Command {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-qemu");
        for arch in ["x86_64", "aarch64"] {
            let name = dir.join(format!("qemu-system-{arch}"));
            let _ = fs::create_dir_all(dir.join("cache")).and_then(|()| fs::remove_file(&name));
            symlink(env!("CARGO_BIN_EXE_fake-qemu"), name).unwrap();
        }
        link_kernels(&dir.join("cache"));
        dir
    });
    // A cache of its own: a boot's time is remembered there.
    command.env("VM_CACHE", dir.join("cache")).env("VM_ACCEL", "tcg").env("TMPDIR", place.path());
    command.env("PATH", format!("{}:{}", dir.display(), std::env::var("PATH").unwrap()));
    command
}

/// A running launcher: what it prints, and where to type.
struct Running {
    child: Child,
    input: File,
    output: Receiver<Vec<u8>>,
    errors: Receiver<Vec<u8>>,
    /// Output that has been read, but not been expected yet.
    text: String,
    /// The terminal's slave side, where there is one.
    terminal: Option<File>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn reader(mut file: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = file.read(&mut buffer) {
            if sender.send(buffer[..n].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Starts it, as the leader of a new session where it has a terminal. What these tests were started to
/// ignore (`nohup cargo vm test &`), it does not.
fn start(command: &mut Command, has_terminal: bool) -> Child {
    // SAFETY: async-signal-safe system calls, no memory of the parent touched.
    unsafe {
        command.pre_exec(move || {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            if has_terminal {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(std::io::stdin())?;
            }
            Ok(())
        });
    }
    command.spawn().unwrap()
}

impl Running {
    fn on_pipes(mut command: Command) -> Running {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = start(&mut command, false);
        Running {
            input: OwnedFd::from(child.stdin.take().unwrap()).into(),
            output: reader(child.stdout.take().unwrap()),
            errors: reader(child.stderr.take().unwrap()),
            child,
            text: String::new(),
            terminal: None,
        }
    }

    /// Starts it as a shell would in a terminal of 101 columns.
    fn on_terminal(mut command: Command) -> Running {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = File::from(openpt(flags).unwrap());
        unlockpt(&master).unwrap();
        let slave = File::from(ioctl_tiocgptpeer(&master, flags).unwrap());
        resize(&master, 101);
        for set in [Command::stdin, Command::stdout, Command::stderr] {
            set(&mut command, Stdio::from(slave.try_clone().unwrap()));
        }
        Running {
            child: start(&mut command, true),
            input: master.try_clone().unwrap(),
            output: reader(master),
            errors: channel().1,
            text: String::new(),
            terminal: Some(slave),
        }
    }

    fn type_in(&mut self, text: &str) {
        self.input.write_all(text.as_bytes()).unwrap();
    }

    /// Reads output until `wanted` came; returns all that came up to and with it.
    fn expect(&mut self, wanted: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.text.find(wanted) {
                let rest = self.text.split_off(at + wanted.len());
                return std::mem::replace(&mut self.text, rest);
            }
            let left = LIMIT.saturating_sub(start.elapsed());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.text.push_str(&String::from_utf8_lossy(&bytes)),
                Err(e) => panic!("no {wanted:?} ({e}) in {:?}, {:?}", self.text, self.all_errors()),
            }
        }
    }

    /// Closes our end of its output.
    fn stop_reading(&mut self) {
        self.output = channel().1; // the reader finds nobody to send to, and ends
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end: exit code (or minus the signal), rest of output, errors.
    fn end(mut self) -> (i32, String, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            let late = start.elapsed() > LIMIT;
            assert!(!late, "still running; {:?} {:?}", self.text, self.all_errors());
            std::thread::sleep(Duration::from_millis(20));
        };
        let code = status.code().unwrap_or_else(|| -status.signal().unwrap());
        while let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(500)) {
            self.text.push_str(&String::from_utf8_lossy(&bytes));
        }
        (code, std::mem::take(&mut self.text), self.all_errors())
    }

    fn all_errors(&self) -> String {
        let mut all = Vec::new();
        while let Ok(bytes) = self.errors.recv_timeout(Duration::from_millis(200)) {
            all.extend(bytes);
        }
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Whether the terminal has a shell's settings: it echoes.
    fn echoes(&self) -> bool {
        let settings = tcgetattr(self.terminal.as_ref().unwrap()).unwrap();
        settings.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
    }
}

/// A run of this script, in the fake guest and on a terminal, when it has printed `ready`.
fn raw(place: &Place, script: &str) -> Running {
    let mut run = Running::on_terminal(fake(place, &["run", "sh", "-c", script]));
    run.expect("ready");
    assert!(!run.echoes(), "not raw");
    run
}

/// Whether a launcher waits for the guest to answer a signal: it has a thread for that.
fn is_watching(launcher: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{launcher}/task")).unwrap().flatten();
    let names = threads.map(|thread| fs::read_to_string(thread.path().join("comm")));
    names.flatten().any(|name| name.trim() == "watch")
}

fn resize(terminal: impl AsFd, cols: u16) {
    tcsetwinsize(terminal, Winsize { ws_row: 40, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })
        .unwrap();
}

/// The processes of QEMU whose guests belong to `place`.
fn qemus(place: &Path) -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let is_one = |pid: &Pid| {
        let words = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        let words = String::from_utf8_lossy(&words);
        [place.to_str().unwrap(), "qemu-system", "-kernel"].iter().all(|word| words.contains(word))
    };
    let pid = |name: &str| Pid::from_raw(name.parse().ok()?);
    entries.filter_map(|entry| pid(entry.file_name().to_str()?)).filter(is_one).collect()
}

/// Where the launchers with this TMPDIR have their run directories.
fn parent(tmpdir: &Path) -> PathBuf {
    tmpdir.join(format!("bpf-vm-{}", rustix::process::geteuid().as_raw()))
}

fn run_dirs(place: &Path) -> Vec<PathBuf> {
    let inside = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let parents = inside(place).filter(|path| path.to_string_lossy().contains("/bpf-vm-"));
    parents.flat_map(|parent| inside(&parent)).filter(|path| path.is_dir()).collect()
}

/// Waits until nothing of a launch is left: no QEMU, no run directory.
fn assert_clean(place: &Place) {
    let left = || (qemus(place.path()), run_dirs(place.path()));
    let start = Instant::now();
    while start.elapsed() < SOON && left() != Default::default() {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(left(), Default::default());
}

/// A cache that contains only the kernels.
fn new_cache() -> TempDir {
    let cache = tempfile::tempdir().unwrap();
    link_kernels(cache.path());
    cache
}

/// Puts the kernels into a cache. They are fetched if they are missing.
fn link_kernels(cache: &Path) {
    let mut setup = vm(&place(), &["setup"]);
    assert!(setup.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
    let home = std::env::var("HOME").unwrap_or_default();
    let real = std::env::var("VM_CACHE")
        .or_else(|_| std::env::var("XDG_CACHE_HOME").map(|dir| dir + "/bpf-vm"))
        .unwrap_or(home + "/.cache/bpf-vm");
    let _ = fs::remove_file(cache.join("kernels"));
    symlink(Path::new(&real).join("kernels"), cache.join("kernels")).unwrap();
}

/// A PATH where QEMU is this shell script, from which `qemu-system-x86_64` is the real one.
fn qemu_instead(place: &Place, script: &str) -> String {
    executable(place.path(), "qemu-system-x86_64", &format!("PATH=${{PATH#*:}}\n{script}"));
    format!("{}:{}", place.path().display(), std::env::var("PATH").unwrap())
}

/// A shell script that can be started.
fn executable(dir: &Path, name: &str, script: &str) -> PathBuf {
    let file = dir.join(name);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    file
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs it without input. Returns its exit code and errors.
fn result(command: &mut Command) -> (i32, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn kvm_is_accessible() -> bool {
    File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Real guests: the first boot with an empty cache (except for the kernels), and then two at once, of
/// which one runs a stage, on terminals. Input and output, what the guest contains, KVM tried once and
/// remembered, separate disks, the workload, Ctrl-C.
#[test]
fn a_run_and_then_two_at_once() {
    let place = place();
    let cache = new_cache();
    // A launcher with another TMPDIR was here. That this user is root is said once.
    let elsewhere = tempfile::tempdir_in("/tmp").unwrap();
    let path = qemu_instead(&place, "exit 1");
    let mut command = vm(&place, &["run", "true"]);
    command.env("VM_CACHE", cache.path()).env("PATH", path).env("TMPDIR", elsewhere.path());
    let (code, first) = result(command.env("VM_ACCEL", "tcg"));
    let as_root = "vm: this user is root: ";
    let is_root = rustix::process::geteuid().is_root();
    assert!(code == 125 && first.contains(as_root) == is_root, "{code} {first}");
    fs::write(parent(elsewhere.path()).join("console"), "private").unwrap();
    let shared =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("from-guest-{}", std::process::id()));
    let script = format!(
        "cat; exec >&2
         echo inside $(cat /run/bpf-vm) is $(uname -r)
         echo data $(findmnt -no FSTYPE /mnt/data) $(cat /sys/block/vda/serial)
         for m in /sys/kernel/tracing /sys/kernel/debug /sys/fs/bpf; do echo $m $(findmnt -no FSTYPE $m); done
         echo nets $(ls /sys/class/net)
         modprobe null_blk && ls -d /sys/block/nullb0
         ls -d /sys/block/vdb /sys/block/nvme0n1 /sys/block/sda
         touch /only-in-the-guest && echo wrote
         echo written > {shared}
         command -v vm
         [ -d {hidden} -a -d {elsewhere} ] && echo hidden $(find {hidden} {elsewhere} -mindepth 1 | wc -l)
         ls /run/vm/conf
         CARGO=false {dir}/runner echo runs inside
         exit 7",
        shared = shared.display(),
        dir = env!("CARGO_MANIFEST_DIR"),
        hidden = parent(place.path()).display(),
        elsewhere = parent(elsewhere.path()).display()
    );
    let mut data = vec![0; 1 << 20];
    File::open("/dev/urandom").unwrap().read_exact(&mut data).unwrap();
    let stdin = place.path().join("stdin");
    fs::write(&stdin, &data).unwrap();
    // With this QEMU no guest ever boots under KVM; without KVM, it is the real QEMU.
    let tried = place.path().join("tried-kvm");
    let path = qemu_instead(
        &place,
        &format!(
            "case \"$*\" in *'-accel kvm'*) echo x >> {}; exec sleep 1000;; esac\n\
             exec qemu-system-x86_64 \"$@\"",
            tried.display()
        ),
    );
    let launch = |args: &[&str]| {
        let mut command = vm(&place, args);
        command.env("VM_CACHE", cache.path()).env("PATH", &path).env_remove("VM_ACCEL");
        command
    };
    let kvm = kvm_is_accessible();
    let mut args: Vec<&str> =
        "run --disk virtio --disk nvme --disk scsi sh -c".split(' ').collect();
    // Almost as many arguments as Linux accepts, each almost as long as it may be.
    let long = "x".repeat(130_000);
    args.extend([&script].into_iter().chain([&long; 14]).map(String::as_str));
    let output = launch(&args).stdin(File::open(&stdin).unwrap()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    assert!(errors.contains("vm: booting 6.1, about 20 s without KVM\n"), "{errors}");
    assert_eq!(fs::read_dir(cache.path().join("boot-times")).unwrap().count(), 1);
    assert!(output.stdout == data, "stdout is not what went in ({} bytes)", output.stdout.len());
    let inside = errors.lines().find_map(|line| line.strip_prefix("inside ")).unwrap();
    let (marked, release) = inside.split_once(" is ").unwrap();
    assert_eq!(marked, release);
    // What the workspace builds is found by its name, and the runner just runs it.
    let vm = env!("CARGO_BIN_EXE_vm");
    let wanted = "data ext4 bpfvm-data, /sys/kernel/tracing tracefs, /sys/kernel/debug debugfs, \
                  /sys/fs/bpf bpf, nets lo, /sys/block/nullb0, /sys/block/vdb, \
                  /sys/block/nvme0n1, /sys/block/sda, wrote, hidden 0, /run/vm/conf, runs inside";
    for wanted in wanted.split(", ").chain([vm]) {
        assert!(errors.lines().any(|line| line == wanted), "{wanted:?} not in {errors}");
    }
    assert!(!errors.contains(as_root), "{errors}");
    assert!(!Path::new("/only-in-the-guest").exists());
    assert_eq!(fs::read_to_string(&shared).unwrap(), "written\n");
    fs::remove_file(&shared).unwrap();

    let says = errors.contains("vm: KVM is accessible, but no guest boots under it");
    assert_eq!((says, tried.exists()), (kvm, kvm), "{errors}");

    let own = |name: &str| {
        let file = "/mnt/data/own";
        format!("[ -e {file} ] || echo new; echo {name} > {file}; sync; sleep 1; cat {file}")
    };
    let script = format!("stty size; tty; ls /mnt/data; {}; cat", own("run"));
    let stage = executable(
        place.path(),
        "debug/stage06",
        &format!(
            "[ $WORKSHOP_PARSE_ONLY ] && exit
         trap 'echo summary; exit 4' INT; read line || echo nothing to read
             {}; until [ -s /mnt/data/file ]; do sleep 0.1; done
             echo started; for i in 1 2 3 4 5 6 7 8; do sleep 1; done",
            own("stage")
        ),
    );
    let mut run = Running::on_terminal(launch(&["run", "sh", "-c", &script]));
    let mut stage = Running::on_terminal(launch(&["runner", stage.to_str().unwrap()]));
    let before = stage.expect("nothing to read\r\nnew\r\nstage\r\n");
    assert!(!before.contains("KVM is"), "not remembered: {before}");
    let mut qemu = Command::new("qemu-system-x86_64");
    let qemu = qemu.args(["-sandbox", "on", "-version"]).stdout(Stdio::null()).status().unwrap();
    for pid in qemus(place.path()) {
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
        assert!(!qemu.success() || status.contains("Seccomp:\t2"), "no sandbox: {status}");
    }
    // A stage reads no standard input, so the terminal is left alone: Ctrl-C is a signal.
    stage.expect("started");
    assert!(stage.echoes(), "raw");
    stage.type_in("\x03");
    stage.expect("summary");
    assert_eq!(stage.end().0, 4);
    let before = run.expect("40 101\r\n/dev/pts/0\r\nlost+found\r\nnew\r\nrun\r\n");
    assert!(!before.contains("KVM is"), "not remembered: {before}");
    assert!(!run.echoes(), "not raw");
    run.type_in("\x03");
    assert_eq!(run.end().0, 130);
    let times = fs::read_to_string(&tried).unwrap_or_default().lines().count();
    assert_eq!(times, usize::from(kvm), "KVM was tried again");
}

/// KVM that is accessible and does not work. Needs no boot.
#[test]
fn kvm_does_not_work() {
    if !kvm_is_accessible() {
        return;
    }
    let place = place();
    let cache = new_cache();
    let script = "case $1 in --version) echo this one; exit;; esac; echo \"$*\" >&2; $THEN";
    let path = qemu_instead(&place, script);
    let run = |accel: &str, then: &str| {
        let mut command = vm(&place, &["run", "true"]);
        command.env("VM_CACHE", cache.path()).env("PATH", &path);
        command.env("THEN", then).env("VM_ACCEL", accel);
        let (code, _, errors) = Running::on_pipes(command).end();
        (code, errors)
    };
    let note = cache.path().join("kvm.json");
    let bad = |texts: &[&str]| {
        let (code, errors) = run("auto", "exit 1");
        let has = |text: &&str| errors.contains(text);
        assert!(code == 125 && texts.iter().all(has), "{code} {errors}");
        assert!(has(&"vm: QEMU could not run the guest"), "{errors}");
        errors
    };
    // A guest that ends by itself says nothing about KVM. Nothing is known: it is tried without KVM as
    // well, but nothing is learnt.
    bad(&["KVM is accessible, but QEMU could not run the guest", "-accel tcg"]);
    assert!(!note.exists());
    // It hangs, though VM_ACCEL asks for KVM.
    let start = Instant::now();
    let (code, errors) = run("kvm", "exec sleep 1000");
    assert!(start.elapsed() < Duration::from_secs(17), "{:?}", start.elapsed());
    assert_eq!(code, 3, "{errors}");
    let wanted = "vm: VM_ACCEL=kvm, but under KVM the guest has not started";
    assert!(errors.contains(wanted) && errors.contains("unset VM_ACCEL"), "{errors}");
    assert!(!note.exists());
    // KVM is known to work: the guest is at fault.
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let known = format!(r#"{{"boot_id":"{}","qemu":"this one","works":true}}"#, boot_id.trim());
    fs::write(&note, &known).unwrap();
    assert!(!bad(&["-accel kvm"]).contains("continuing without"));
    assert_eq!(fs::read_to_string(&note).unwrap(), known);
}

/// One guest, several terminals: everything about sessions.
#[test]
fn sessions_of_a_shell() {
    let place = place();
    let shell = || fake(&place, &["shell"]);
    let mut first = Running::on_terminal(shell());
    first.type_in("stty size; tty; PS1=\n");
    first.expect("40 101");
    first.expect("/dev/pts/");

    // Keys and size of the terminal go to the guest.
    first.type_in("sh -c \"echo sl''eeping; exec sleep 1000\"\n");
    first.expect("sleeping");
    assert!(!first.echoes(), "not raw");
    first.type_in("\x03");
    first.type_in("echo sta''tus $?\n");
    first.expect("status 130");
    resize(first.terminal.as_ref().unwrap(), 77);
    first.signal(Signal::WINCH);
    first.type_in("until [ \"$(stty size)\" = '40 77' ]; do sleep 0.1; done; echo re''sized\n");
    first.expect("resized");

    // Without a terminal: the signal's number in the status, standard error separate.
    let mut second = Running::on_pipes(shell());
    second.type_in("ulimit -c 0; echo out; echo err >&2; kill -SEGV $$\n");
    let (code, out, errors) = second.end();
    assert_eq!((code, out.as_str()), (139, "out\n"));
    assert!(errors.contains("joining") && errors.ends_with("err\n"), "{errors}");

    let mut other = Running::on_pipes(fake(&place, &["shell", "--disk", "nvme"]));
    other.type_in("exit\n");
    assert!(other.end().2.contains("--disk, --cpus and --memory only apply to a new one"));

    // A signal to the launcher is passed on to the program.
    let mut third = Running::on_pipes(shell());
    third.type_in("trap 'echo summary; exit 3' INT\necho ready\nwhile :; do sleep 0.1; done\n");
    third.expect("ready\n");
    third.signal(Signal::INT);
    let (code, out, _) = third.end();
    assert_eq!((code, out.as_str()), (3, "summary\n"));

    // If a program does not end, the third signal ends the launcher.
    let mut fourth = Running::on_pipes(shell());
    fourth.type_in("trap '' TERM\necho ready\nwhile :; do sleep 0.1; done\n");
    fourth.expect("ready\n");
    // Two signals in quick succession may arrive as one.
    for _ in 0..30 {
        if fourth.child.try_wait().unwrap().is_none() {
            fourth.signal(Signal::TERM);
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    let (code, _, errors) = fourth.end();
    assert_eq!(code, 143, "{errors}");

    // The reader of the output closes it: the program gets SIGPIPE.
    let mut fifth = Running::on_pipes(shell());
    fifth.type_in("exec yes\n");
    fifth.expect("y\ny\n");
    fifth.stop_reading();
    assert_eq!(fifth.end().0, 141);

    // The reader waits for a while, as a pager does: the guest has not stopped responding.
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = shell();
    command.stdin(Stdio::piped()).stdout(writer).stderr(Stdio::null());
    let mut sixth = start(&mut command, false);
    drop(command); // and with it our end of the pipe
    let script = b"trap 'exit 3' INT; while :; do echo y; done\n";
    sixth.stdin.as_mut().unwrap().write_all(script).unwrap();
    let mut before = 0;
    wait_for("the pipe is full", || {
        std::thread::sleep(Duration::from_millis(200));
        let now = rustix::io::ioctl_fionread(&reader).unwrap();
        now > 0 && now == std::mem::replace(&mut before, now)
    });
    kill_process(Pid::from_child(&sixth), Signal::INT).unwrap();
    wait_for("the launcher waits for the guest's answer", || is_watching(sixth.id()));
    std::io::copy(&mut { reader }, &mut std::io::sink()).unwrap();
    assert_eq!(sixth.wait().unwrap().code(), Some(3));

    // The guest runs until its last terminal is closed.
    let mut last = Running::on_pipes(shell());
    last.type_in("echo here\n");
    last.expect("here\n");
    first.type_in("exit 5\n");
    first.expect("the guest keeps running for 1 other terminal");
    last.type_in("echo still; exit 6\n");
    assert_eq!(last.end().0, 6);
    assert!(first.echoes(), "the terminal is not restored");
    assert_eq!(first.end().0, 5);
}

/// What `cargo lesson` uses: a real guest that runs one program after another, more than it has ports.
#[test]
fn a_guest_that_stays() {
    let place = place();
    let background =
        |args: &[&str]| Running::on_pipes(vm(&place, &[&["background", "test"], args].concat()));
    let script = |text: &str| background(&["run", "sh", "-c", text]);
    let mut boot = background(&["boot"]);
    boot.expect("ready\n");
    // A signal ends the program and what it has started, and not the guest.
    let mut first = script(WAITS);
    first.expect("SOFTWARE.\n");
    first.signal(Signal::INT);
    assert_eq!((first.end().0, background(&["run", "pgrep", "-x", "tail"]).end().0), (130, 1));

    // So does the end of the reader, and that of the launcher, whatever the program still says.
    let mut second = script("exec yes");
    second.expect("y\ny\n");
    second.stop_reading();
    assert_eq!(second.end().0, 141);
    let mut third = script("exec yes");
    third.expect("y\ny\n");
    third.signal(Signal::KILL);
    assert_eq!(third.end().0, -9);
    for n in 0..20 {
        let last = "until ! pgrep -x yes >/dev/null; do sleep 0.1; done";
        let run = script(&format!("{last}; echo out {n}; echo err >&2; exit {n}"));
        assert_eq!(run.end(), (n, format!("out {n}\n"), "err\n".to_owned()));
    }
    assert_eq!((background(&["stop"]).end().0, boot.end().0), (0, 143));
}

/// The commands about a guest that stays, and how it ends.
#[test]
fn a_guest_that_stays_ends() {
    let place = place();
    let background =
        |args: &[&str]| Running::on_pipes(fake(&place, &[&["background", "test"], args].concat()));
    let status = |args: &[&str]| background(args).end().0;
    let script = |text: &str| background(&["run", "sh", "-c", text]);
    assert_eq!([status(&["stop"]), status(&["run", "true"])], [1, 125]);
    let mut boot = background(&["boot"]);
    // What comes while it boots waits for it.
    wait_for("the guest", || status(&["run", "true"]) == 0);
    boot.expect("ready\n");
    let (code, _, errors) = background(&["boot"]).end();
    assert!(code == 1 && errors.contains("another command is starting this guest"), "{errors}");
    assert_eq!(status(&["run", "no-such-program"]), 127);

    // While a program runs, another one waits.
    let mut first = script(WAITS);
    first.expect("SOFTWARE.\n");
    let second = script("echo second");
    let waits = second.errors.recv_timeout(LIMIT).unwrap();
    assert_eq!(String::from_utf8_lossy(&waits), "vm: waiting for an earlier check to end\n");
    first.signal(Signal::INT);
    assert_eq!((first.end().0, second.end().0), (130, 0));

    // A guest that hangs is noticed, and ended.
    let program = "echo ready; while :; do sleep 0.5; echo; done";
    let mut last = background(&["run", "--patience", "2s", "sh", "-c", program]);
    last.expect("ready\n\n\n\n\n\n");
    kill_process(qemus(place.path())[0], Signal::STOP).unwrap();
    let (code, _, errors) = last.end();
    assert_eq!(code, 125, "{errors}");
    assert!(errors.contains("vm: the guest has stopped responding, and was stopped"), "{errors}");
    assert_eq!(boot.end().0, 143);
    assert_clean(&place);

    // It ends after some time without a program; one that takes longer than that keeps it.
    let mut boot = background(&["boot", "--idle", "1s"]);
    boot.expect("ready\n");
    let (code, out, errors) = script("sleep 2; echo done").end();
    assert_eq!((code, &*out), (0, "done\n"), "{errors}");
    assert_eq!(boot.end().0, 0);
    assert_clean(&place);

    // And when its launcher is killed.
    let mut boot = background(&["boot"]);
    boot.expect("ready\n");
    let mut run = script("echo ready; sleep 1000");
    run.expect("ready\n");
    boot.signal(Signal::KILL);
    assert_eq!(run.end().0, 125);
    assert_eq!(Running::on_pipes(fake(&place, &["run", "true"])).end().0, 0);
}

/// A real guest, with two terminals, panics. The files that the launchers use are out of reach of its
/// root, or read with care.
#[test]
fn the_guest_panics() {
    let place = place();
    let secret = place.path().join("secret");
    fs::write(&secret, "the secret").unwrap();
    let shell = || vm(&place, &["shell"]);
    let mut first = Running::on_pipes(shell());
    let script = format!(
        "cd /run/vm; for name in lock info.json ports ports.lock ready console qemu.log up failed s1.sock
         do rm -f $name; ln -s {} $name; done; echo linked\n",
        secret.display()
    );
    first.type_in(&script);
    first.expect("linked\n");
    let mut second = Running::on_pipes(shell());
    second.type_in("echo sec''ond; sleep 1000\n");
    second.expect("second\n");
    first.type_in("echo c > /proc/sysrq-trigger; sleep 1000\n");
    let (code, out, errors) = first.end();
    assert_eq!((code, out.as_str()), (125, ""), "{errors}");
    let panicked =
        "vm: the guest's kernel panicked: sysrq triggered crash; the last lines of its console:\n";
    assert!(errors.contains(panicked) && errors.lines().count() > 15, "{errors}");
    assert!(!errors.contains("the secret"), "{errors}");
    let (code, _, errors) = second.end();
    assert_eq!(code, 125);
    assert!(errors.contains("the terminal that started it shows why"), "{errors}");
    assert_eq!(fs::read_to_string(&secret).unwrap(), "the secret");
}

/// A shell with job control: after `fg`, the terminal is the guest's again.
#[test]
fn stopped_and_continued() {
    let place = place();
    let mut bash = Command::new("bash");
    bash.args(["--norc", "--noprofile", "--noediting", "-i"]).env("PS1", "").env_remove("HISTFILE");
    let mut shell = Running::on_terminal(without_boot(&place, bash));
    let program = r#"echo ready; while read line; do echo "<$line $(stty size)>"; done"#;
    shell.type_in(&format!("{} run sh -c '{program}'\n", env!("CARGO_BIN_EXE_vm")));
    // The first is the echo of what was typed.
    shell.expect("ready; while");
    shell.expect("ready\r\n");
    let bash = shell.child.id();
    let children = fs::read_to_string(format!("/proc/{bash}/task/{bash}/children")).unwrap();
    let launcher = Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    assert!(!shell.echoes(), "not raw");

    let stop = |shell: &mut Running| {
        kill_process(launcher, Signal::STOP).unwrap();
        shell.expect("Stopped");
        wait_for("the shell has its terminal", || shell.echoes());
    };
    stop(&mut shell);
    resize(shell.terminal.as_ref().unwrap(), 66);
    shell.type_in("fg\n");
    wait_for("raw after fg", || !shell.echoes());
    shell.type_in("a\r");
    shell.expect("<a 40 66>");

    shell.type_in("\x04");
    wait_for("the terminal is restored", || shell.echoes());
    shell.type_in("echo sta''tus $?; exit\n");
    shell.expect("status 0");
    assert_eq!(shell.end().0, 0);
}

/// `nohup cargo vm run … &` outlives its terminal.
#[test]
fn the_terminal_is_closed_under_nohup() {
    let place = place();
    let (log, closed) = (place.path().join("log"), place.path().join("closed"));
    let script = format!(
        "nohup {} run sh -c 'echo ready; until [ -e $0 ]; do sleep 0.1; done; echo done' {} > {} 2>&1 & wait",
        env!("CARGO_BIN_EXE_vm"),
        closed.display(),
        log.display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]);
    let shell = Running::on_terminal(without_boot(&place, shell));
    let text = || fs::read_to_string(&log).unwrap_or_default();
    wait_for("it runs", || text().contains("ready"));
    // The end of the session's leader is the end of the terminal: SIGHUP for all.
    shell.signal(Signal::KILL);
    assert_eq!(shell.end().0, -9);
    fs::write(closed, "").unwrap();
    wait_for("it has ended", || text().contains("done") || qemus(place.path()).is_empty());
    assert!(text().contains("done"), "{}", text());
}

/// More arguments than Linux takes in the guest; the host takes them, as its limit is set higher.
#[test]
fn too_many_arguments() {
    let place = place();
    let script = "ulimit -s 32768 || exit 99
        x=$(head -c 130000 /dev/zero | tr '\\0' x)
        set -- $x $x $x $x $x; set -- $* $* $* $* $*
        exec $VM run true $*";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("VM", env!("CARGO_BIN_EXE_vm"));
    let (code, _, errors) = Running::on_pipes(without_boot(&place, shell)).end();
    if code == 99 {
        return; // this user may not have a larger stack, and so no more arguments
    }
    assert_eq!(code, 2, "{errors}");
    assert!(errors.contains("vm: true: its arguments and environment take 31"), "{errors}");
    assert!(errors.contains("more than Linux accepts"), "{errors}");
}

/// A program reads keys where it says so in its Cargo.toml: cachetop. Other stages leave the terminal
/// alone: a pager has its keys.
#[test]
fn who_reads_the_keys() {
    let place = place();
    let top = executable(
        place.path(),
        "debug/cachetop",
        "[ $WORKSHOP_PARSE_ONLY ] && exit; echo started; read line && echo got $line",
    );
    let mut run = Running::on_terminal(fake(&place, &["runner", top.to_str().unwrap()]));
    run.expect("started");
    assert!(!run.echoes(), "not raw");
    run.type_in("a key\r");
    run.expect("got a key");
    assert_eq!(run.end().0, 0);

    let stage = executable(
        place.path(),
        "debug/stage06",
        "[ $WORKSHOP_PARSE_ONLY ] && exit; read line || echo started; sleep 1",
    );
    let mut run = Running::on_terminal(fake(&place, &["runner", stage.to_str().unwrap()]));
    run.expect("started");
    assert!(run.echoes(), "raw");
    assert_eq!(run.end().0, 0);
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        "$0 runner $1 | cat; read line; echo the pager got $line",
        env!("CARGO_BIN_EXE_vm"),
        stage.to_str().unwrap(),
    ]);
    let mut run = Running::on_terminal(without_boot(&place, shell));
    run.expect("started");
    assert!(run.echoes(), "raw");
    run.type_in("a key\n");
    run.expect("the pager got a key");
    assert_eq!(run.end().0, 0);
}

/// Signals to a launcher that builds or tests. cargo and what it starts are scripts here.
#[test]
fn nothing_outlives_a_launcher_that_builds() {
    let place = place();
    let script = "[ $1 = metadata ] && exec $REAL \"$@\"
        sh -c \"trap '' TERM; echo \\$\\$ >> $STARTED; sleep 1000\" &
        echo $$ >> $STARTED; wait";
    let cargo = executable(place.path(), "cargo", script);
    let alive = |pid: &str| {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    };
    let launches = [
        (&["run", "stage06"][..], Signal::TERM),
        (&["run", "stage06"], Signal::HUP),
        (&["test"], Signal::TERM),
        (&["test"], Signal::INT),
    ];
    let launchers = launches.map(|(command, signal)| {
        let started = place.path().join(format!("{}-{}", command[0], signal.as_raw()));
        let mut launcher = vm(&place, command);
        launcher.env("CARGO", &cargo).env("STARTED", &started).env("REAL", env!("CARGO"));
        let run = Running::on_pipes(launcher);
        let mut pids = Vec::new();
        wait_for("cargo runs", || {
            let text = fs::read_to_string(&started).unwrap_or_default();
            pids = text.lines().map(str::to_owned).collect();
            pids.len() == 2
        });
        assert!(pids.iter().all(|pid| alive(pid)));
        run.signal(signal);
        (command, signal, run, pids, Instant::now())
    });
    for (command, signal, run, pids, start) in launchers {
        let (code, _, errors) = run.end();
        assert_eq!(code, 128 + signal.as_raw(), "{command:?}: {errors}");
        // One of them ignores SIGTERM, and gets SIGKILL after 5 s.
        assert!(start.elapsed() < Duration::from_secs(15));
        assert!(!pids.iter().any(|pid| alive(pid)), "{command:?} {signal:?} left {pids:?}");
    }

    // A child that it did not start: it was the shell's before the shell became the launcher.
    let started = place.path().join("started");
    let mut shell = Command::new("sh");
    shell.env("TMPDIR", place.path()).args(["-c", "sleep 1000 & echo $! > $0; exec $1 run stage6"]);
    shell.arg(&started).arg(env!("CARGO_BIN_EXE_vm"));
    shell.stdout(Stdio::null()).stderr(Stdio::null());
    assert_eq!(shell.status().unwrap().code(), Some(2));
    let pid = fs::read_to_string(&started).unwrap();
    assert!(alive(pid.trim()));
    kill_process(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn qemu_killed() {
    let place = place();
    let mut run = raw(&place, "echo rea''dy; sleep 1000");
    let qemus = qemus(place.path());
    assert_eq!(qemus.len(), 1);
    kill_process(qemus[0], Signal::KILL).unwrap();
    run.expect("vm: QEMU was killed by signal 9");
    assert!(run.echoes(), "the terminal is not restored");
    assert_eq!(run.end().0, 125);
}

/// On a raw terminal, Ctrl-C is a byte; if a hung guest does not respond to it, the launcher ends.
#[test]
fn the_guest_hangs() {
    let place = place();
    let mut run = raw(&place, "trap '' INT; echo rea''dy; cat");
    // A program may ignore it.
    run.type_in("\x03");
    run.expect("^C"); // the terminal's echo, which is an answer
    let launcher = run.child.id();
    wait_for("the launcher has seen the answer", || !is_watching(launcher));
    run.type_in("still here\n");
    run.expect("still here"); // the terminal's echo
    run.expect("still here"); // cat's answer
    // The guest's output must have arrived completely: a part of it would count as a response.
    std::thread::sleep(Duration::from_millis(500));
    kill_process(qemus(place.path())[0], Signal::STOP).unwrap();
    for key in "is it alive?\x03".split_inclusive(|_| true) {
        run.type_in(key);
        std::thread::sleep(Duration::from_millis(20)); // each is read by itself
    }
    run.expect("vm: the guest has stopped responding");
    assert!(run.echoes(), "the terminal is not restored");
    assert_eq!(run.end().0, 130);
}

#[test]
fn launcher_killed() {
    let place = place();
    let run = raw(&place, "echo rea''dy; sleep 1000");
    assert_eq!((qemus(place.path()).len(), run_dirs(place.path()).len()), (1, 1));
    run.signal(Signal::KILL);
    wait_for("QEMU has ended", || qemus(place.path()).is_empty());
    assert_eq!(run.end().0, -9);
    // The next launcher removes what it has left.
    assert_eq!(Running::on_pipes(fake(&place, &["run", "true"])).end().0, 0);
}

#[test]
fn out_of_time() {
    let place = place();
    let start = Instant::now();
    let (code, _, errors) =
        Running::on_pipes(fake(&place, &["run", "--timeout", "1s", "sleep", "1000"])).end();
    assert_eq!(code, 125, "{errors}");
    assert!(errors.contains("vm: the program has not ended within 1s (--timeout)"), "{errors}");
    assert!(start.elapsed() >= Duration::from_secs(1));
}

/// What vm/runner starts in the guest and what on the host. The launcher is `echo` here.
#[test]
fn the_runner_tells_what_is_for_the_guest() {
    let place = place();
    let script = |name: &str, text: &str| executable(place.path(), name, text);
    let cargo = script("cargo", "echo guest: \"$@\"");
    let text = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let runner = |program: &Path, vm: &str| {
        let mut runner = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/runner"));
        text(runner.arg(program).arg("x y").env("CARGO", &cargo).env("VM", vm))
    };
    let here = |name: &str| script(name, "echo here: \"$@\"");
    let stage = here("debug/stage06");
    let wanted = format!("--package vm -- runner {} x y\n", stage.display());
    let got = runner(&stage, "");
    assert!(got.starts_with("guest: run ") && got.ends_with(&wanted), "{got}");
    assert_eq!(runner(&stage, "0"), "here: x y\n");
    assert!(runner(&here("debug/deps/guest-0123"), "").starts_with("guest: "));
    for name in
        ["debug/deps/launcher-0123", "debug/examples/e", "rust_out", "debug/vm", "debug/truth"]
    {
        assert_eq!(runner(&here(name), ""), "here: x y\n", "{name}");
    }
    // A stage's help needs no guest.
    assert_eq!(
        text(&mut vm(&place, &["runner", stage.to_str().unwrap(), "--help"])),
        "here: --help\n"
    );
}

/// Wrong usage of a program is reported by the program itself, before a guest boots. What is no program of
/// the workshop would start its work here, and is not asked.
#[test]
fn a_program_checks_its_own_usage() {
    let place = place();
    let path = qemu_instead(&place, "echo QEMU runs >&2; exit 1");
    let run = |name: &str, script: &str| {
        let program = executable(place.path(), &format!("debug/{name}"), script);
        let mut command = vm(&place, &["runner", program.to_str().unwrap(), "--no-such"]);
        result(command.env("PATH", &path).env("VM_ACCEL", "tcg"))
    };
    let (code, errors) = run("stage06", "[ $WORKSHOP_PARSE_ONLY = 1 ] && echo no $1 >&2 && exit 2");
    assert_eq!((code, errors.as_str()), (2, "no --no-such\n"));
    let fine = [("stage06", "[ $WORKSHOP_PARSE_ONLY = 1 ]"), ("other", "echo it runs here >&2")];
    for (name, script) in fine {
        let (code, errors) = run(name, script);
        assert_eq!(code, 125, "{errors}");
        assert!(errors.contains("QEMU runs") && !errors.contains("it runs here"), "{errors}");
    }
}

/// A command that names programs gets them as they are now; one that does not compile stops it.
#[test]
fn programs_that_a_command_names_are_built() {
    let place = place();
    let path = qemu_instead(&place, "echo QEMU runs >&2; exit 1");
    let real = std::env::var("CARGO").unwrap_or("cargo".into());
    let script = format!("[ $1 != build ] && exec {real} \"$@\"\necho asked: \"$@\" >&2\nexit 1");
    let cargo = executable(place.path(), "cargo", &script);
    let run = |args: &[&str]| {
        let mut command = vm(&place, args);
        result(command.env("CARGO", &cargo).env("PATH", &path).env("VM_ACCEL", "tcg"))
    };
    let (_, alone) = run(&["run", "stage01"]);
    let (code, named) = run(&["run", "bash", "-c", "stage01 --quiet | tail -1"]);
    assert_eq!(code, 1, "{named}");
    assert!(named.contains("asked: build --package stage01 "), "{named}");
    assert!(named.contains("vm: cargo build --package stage01 "), "{named}");
    assert_eq!(named, alone);
    let (code, other) = run(&["run", "bash", "-c", "ls stage01_submit_bio"]);
    assert_eq!(code, 125, "{other}");
    assert!(other.contains("QEMU runs") && !other.contains("asked"), "{other}");
}

/// Errors that need no boot: each is one clear message.
#[test]
fn clear_messages() {
    let place = place();
    let refused = |command: &mut Command, status: i32, texts: &[&str]| {
        let (code, errors) = result(command);
        let says = texts.iter().all(|text| errors.contains(text));
        assert!(code == status && says, "{code} {errors}");
    };
    let of = |args: &[&str], texts: &[&str]| refused(&mut vm(&place, args), 2, texts);
    of(&["run", "--kernel", "4.4", "true"], &["vm: there is no kernel line 4.4", "6.12"]);
    of(&["run", "--kernel", "/etc", "true"], &["/etc ", "lib/modules"]);
    of(&["run", "stage6"], &["vm: there is no program stage6", "stage06"]);
    of(&["run", "mine-none"], &["vm: there is no program mine-none; "]);
    refused(vm(&place, &["run", "true"]).env("VM_ACCEL", "warp"), 2, &["VM_ACCEL=warp"]);
    refused(vm(&place, &["run", "true"]).env("VM_SANDBOX", "yes"), 2, &["VM_SANDBOX=yes"]);
    let path = qemu_instead(&place, "kill -SYS $$");
    let wanted = ["its sandbox forbids", "VM_SANDBOX=0 runs it without"];
    let mut killed = vm(&place, &["run", "true"]);
    refused(killed.env("PATH", path).env("VM_ACCEL", "tcg"), 125, &wanted);
    let disks = ["--disk=nvme"; 25].into_iter();
    let disks: Vec<&str> = ["run"].into_iter().chain(disks).chain(["true"]).collect();
    let message = "vm: too many disks: 25 times --disk, the guest takes 24\n";
    assert_eq!(result(&mut vm(&place, &disks)), (2, message.to_owned()));
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let inside = tempfile::Builder::new().prefix("t").tempdir_in(shared).unwrap();
    let wanted = ["set TMPDIR to a directory elsewhere"];
    refused(vm(&place, &["run", "true"]).env("TMPDIR", inside.path()), 2, &wanted);
    refused(&mut vm(&place, &["agent"]), 3, &[]);
}
