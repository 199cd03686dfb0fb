//! Why libbpf or the verifier refused a program, in a few lines.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use anyhow::anyhow;
use libbpf_rs::{PrintLevel, set_print};

use crate::message::say;

/// What was being done when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Reading the object.
    Open,
    /// Giving it to the kernel.
    Load,
    /// Hooking it.
    Attach,
}

/// What libbpf has said. Static, because libbpf has one callback for the whole process, without an
/// argument of its own.
static MESSAGES: Mutex<String> = Mutex::new(String::new());

fn messages() -> MutexGuard<'static, String> {
    MESSAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps libbpf's warnings, which hold the verifier's log, for [`explain`]. With `verbose`, also
/// prints whatever libbpf says to stderr.
pub(crate) fn keep_messages(verbose: bool) {
    let keep: fn(PrintLevel, String) = |level, line| {
        if matches!(level, PrintLevel::Warn) {
            messages().push_str(&line);
        }
    };
    let keep_and_print: fn(PrintLevel, String) = |level, line| {
        if matches!(level, PrintLevel::Warn) {
            messages().push_str(&line);
        }
        say(&line);
    };
    set_print(Some(match verbose {
        true => (PrintLevel::Debug, keep_and_print),
        false => (PrintLevel::Warn, keep),
    }));
}

/// Whether it was the verifier that refused a program.
pub(crate) fn by_verifier() -> bool {
    VerifierRefusal::parse(&messages()).is_some()
}

/// Whether the kernel had no memory for a map, a program or the types: also where a cgroup has no more. libbpf
/// continues without some of them, and fails at the next one.
pub(crate) fn for_lack_of_memory() -> bool {
    messages().lines().any(|line| line.contains("-ENOMEM") || line.contains("(-12)"))
}

/// The error that tells why `step` failed. `package` is the directory of the program's sources.
pub(crate) fn explain(
    step: Step,
    error: &libbpf_rs::Error,
    package: &str,
    verbose: bool,
) -> anyhow::Error {
    let log = messages();
    let reason = match VerifierRefusal::parse(&log) {
        Some(refusal) => refusal.describe(Path::new(package)),
        None => {
            let what = match step {
                Step::Open => "opened",
                Step::Load => "loaded",
                Step::Attach => "attached",
            };
            let warning = log.lines().next().map(|line| line.trim_start_matches("libbpf: "));
            let why = warning.map_or_else(|| format!("{error:#}"), str::to_owned);
            format!("the BPF program could not be {what}: {why}")
        }
    };
    let more =
        if verbose { "" } else { "\n  --verbose shows all that libbpf and the verifier say" };
    anyhow!("{reason}{more}")
}

/// How the message ends where a program reads what the kernel's structs do not have.
const MISSING: &str = "this kernel's BTF does not have";

/// What the verifier says when it rejects a program.
#[derive(Debug, PartialEq, Eq)]
struct VerifierRefusal<'a> {
    program: &'a str,
    reason: String,
    /// What it suggests: from 7.3 on.
    suggestion: Option<String>,
    /// The C code that it was looking at, and the comments before it, last one first: the text of
    /// a line, and from 6.8 on `file.c:24`.
    code: Vec<(&'a str, Option<&'a str>)>,
}

impl<'a> VerifierRefusal<'a> {
    fn parse(log: &'a str) -> Option<VerifierRefusal<'a>> {
        let (before, rest) = log.split_once("-- BEGIN PROG LOAD LOG --")?;
        let program = before.rsplit("prog '").next()?.split('\'').next()?;
        let said = rest.split_once("-- END PROG LOAD LOG --").map_or(rest, |(said, _)| said);
        // `; if (!start) @ trace.bpf.c:24`; before 6.8 without the place.
        let comment = |line: &'a str| {
            let text = line.strip_prefix("; ")?;
            Some(match text.rsplit_once(" @ ") {
                Some((text, place)) => (text.trim(), Some(place.trim())),
                None => (text.trim(), None),
            })
        };
        let code = said.lines().rev().filter_map(comment).collect();
        let lines = || said.lines().skip_while(|line| line.trim().is_empty());
        // From 7.3 on, the reason is a paragraph of its own.
        let paragraph = |title: &str| {
            let text: Vec<&str> = lines()
                .skip_while(|line| line.trim() != title)
                .skip(1)
                .take_while(|line| line.starts_with(' '))
                .map(str::trim)
                .collect();
            (!text.is_empty()).then(|| text.join(" "))
        };
        let last = || {
            let is_reason = |line: &&str| {
                let line = line.trim();
                let is_detail = ["processed ", "; ", "old state:", "cur state:", "stack depth "];
                !line.is_empty() && !is_detail.iter().any(|start| line.starts_with(start))
            };
            said.lines().rfind(is_reason).map(|line| line.trim().to_owned())
        };
        let mut reason = paragraph("Reason:").or_else(last)?;
        // The numbers of a bad access stand in the line before it.
        let detail =
            said.lines().rev().find_map(bad_access).filter(|_| reason.contains("memory range"));
        if let Some(detail) = detail {
            reason += &format!(" ({detail})");
        }
        Some(VerifierRefusal { program, reason, suggestion: paragraph("Suggestion:"), code })
    }

    fn describe(&self, package: &Path) -> String {
        let mut text = match self.missing() {
            Some(what) => format!("{}() needs {what}, which {MISSING}", self.program),
            None => format!("the verifier rejects {}(): {}", self.program, self.reason),
        };
        if let Some((code, _)) = self.code.first() {
            let at = |place: String| self.naming(&place).unwrap_or((place, (*code).to_owned()));
            match self.place(package).map(at) {
                Some((place, code)) => text += &format!("\n  {place}: {code}"),
                None => text += &format!("\n  at: {code}"),
            }
        }
        if let Some(suggestion) = &self.suggestion {
            text += &format!("\n  {suggestion}");
        }
        text
    }

    /// What libbpf, before the verifier looked, did not find in the kernel's BTF: of `failed to
    /// resolve CO-RE relocation <byte_off> [39] struct bio.x (0:0 @ offset 0)`, `struct bio.x`.
    fn missing(&self) -> Option<&str> {
        let relocation = self.reason.strip_prefix("failed to resolve CO-RE relocation ")?;
        let (_, what) = relocation.split_once("] ")?;
        Some(what.split_once(" (").map_or(what, |(what, _)| what))
    }

    /// The line that names the member which is missing, and its place: the compiler may count the instruction to
    /// the line before. The one nearest to `place`, in its file.
    fn naming(&self, place: &str) -> Option<(String, String)> {
        let member = self.missing()?.rsplit(['.', ' ']).next()?;
        let (file, line) = place.rsplit_once(':')?;
        let (source, line) = (fs::read_to_string(file).ok()?, line.parse::<usize>().ok()?);
        let in_a_name = |c: char| c.is_alphanumeric() || c == '_';
        let names_it = |text: &str| text.split(|c| !in_a_name(c)).any(|word| word == member);
        let lines = (1..).zip(source.lines()).filter(|(_, text)| names_it(text));
        let (line, text) = lines.min_by_key(|(number, _)| line.abs_diff(*number))?;
        Some((format!("{file}:{line}"), text.trim().to_owned()))
    }

    /// Where the code stands, `stage03_latency_map/src/trace.bpf.c:52`: the kernel says so, or it is
    /// searched for in the sources.
    fn place(&self, package: &Path) -> Option<String> {
        let (_, place) = self.code.first()?;
        let headers = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
        if let Some((file, line)) = place.and_then(|place| place.rsplit_once(':')) {
            let name = Path::new(file).file_name()?;
            let paths = [package.join("src").join(name), headers.join(name)];
            let path = paths.into_iter().find(|path| path.exists()).unwrap_or_else(|| file.into());
            return Some(format!("{}:{line}", shown(path)));
        }
        let entries = [package.join("src"), headers].map(|directory| fs::read_dir(directory).ok());
        let files = entries.into_iter().flatten().flatten().flatten().map(|entry| entry.path());
        let mut places = files
            .filter(|path| path.extension().is_some_and(|name| name == "c" || name == "h"))
            .filter_map(|path| Some((self.line_in(&fs::read_to_string(&path).ok()?)?, path)));
        places.next().map(|(line, path)| format!("{}:{line}", shown(path)))
    }

    /// The number of the line of `source` that the verifier looked at: of several lines that read
    /// the same, the one nearest to the line that it had looked at before.
    fn line_in(&self, source: &str) -> Option<usize> {
        let all = |code: &str| -> Vec<usize> {
            let numbered = (1..).zip(source.lines());
            numbered.filter(|(_, line)| line.trim() == code).map(|(number, _)| number).collect()
        };
        let (code, _) = self.code.first()?;
        let candidates = all(code);
        let others = self.code.iter().skip(1).map(|(code, _)| all(code));
        let anchor = others.into_iter().find(|lines| lines.len() == 1).map_or(0, |lines| lines[0]);
        candidates.into_iter().min_by_key(|line| line.abs_diff(anchor))
    }
}

/// Of `invalid access to map value, value_size=4 off=0 size=8`, in words.
fn bad_access(line: &str) -> Option<String> {
    let numbers = line.trim().strip_prefix("invalid access to map value, ")?;
    let number = |name| numbers.split(' ').find_map(|word| word.strip_prefix(name));
    let (value, offset, size) = (number("value_size=")?, number("off=")?, number("size=")?);
    Some(format!("{size} bytes at offset {offset} of a map's value, which has {value} bytes"))
}

/// A path that an editor can open: relative to the directory where the user stands, if it is below.
fn shown(path: PathBuf) -> String {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(&path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "libbpf: prog 'io_end': BPF program load failed: Permission denied\n\
        libbpf: prog 'io_end': -- BEGIN PROG LOAD LOG --\n\
        0: R1=ctx(off=0,imm=0)\n; found = bpf_map_lookup_elem(&starts, &io);\n7: (85) call\n\
        ; start = *found;\n12: (79) r1 = *(u64 *)(r0 +0)\n\
        R0 invalid mem access 'map_value_or_null'\n\
        cur state: R1=scalar()\nprocessed 12 insns (limit 1000000)\n-- END PROG LOAD LOG --\n";

    #[test]
    fn the_reason_is_the_verifiers_last_word() {
        let refusal = VerifierRefusal::parse(OLD).unwrap();
        assert_eq!(refusal.program, "io_end");
        assert_eq!(refusal.reason, "R0 invalid mem access 'map_value_or_null'");
        assert_eq!(refusal.code[0], ("start = *found;", None));
        assert_eq!(VerifierRefusal::parse("libbpf: failed to find BTF\n"), None);
    }

    #[test]
    fn the_line_is_found_in_the_source() {
        let refusal = VerifierRefusal::parse(OLD).unwrap();
        let source = "\tstart = *found;\n\n\n\n\n\tfound = bpf_map_lookup_elem(&starts, &io);\n\n\tstart = *found;\n";
        assert_eq!(refusal.line_in(source), Some(8));
        assert_eq!(refusal.line_in("nothing like it"), None);
    }

    #[test]
    fn a_bad_access_names_both_sizes() {
        let log = "libbpf: prog 'io_end': -- BEGIN PROG LOAD LOG --\n\
            ; struct start start = *found;\n9: (79) r1 = *(u64 *)(r0 +0)\n\
            invalid access to map value, value_size=4 off=0 size=8\n\
            R0 min value is outside of the allowed memory range\n\
            processed 9 insns (limit 1000000)\n-- END PROG LOAD LOG --\n";
        assert_eq!(
            VerifierRefusal::parse(log).unwrap().reason,
            "R0 min value is outside of the allowed memory range (8 bytes at offset 0 of a map's \
             value, which has 4 bytes)"
        );
    }

    #[test]
    fn a_missing_member_is_no_matter_of_the_verifier() {
        let log = "libbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n\
            ; return bio->bi_sectr; @ trace.bpf.c:9\n0: <invalid CO-RE relocation>\n\
            failed to resolve CO-RE relocation <byte_off> [39] struct bio.bi_sectr (0:0 @ offset 0)\n\
            processed 1 insns (limit 1000000)\n-- END PROG LOAD LOG --\n";
        assert_eq!(
            VerifierRefusal::parse(log).unwrap().describe(Path::new("/nowhere")),
            "x() needs struct bio.bi_sectr, which this kernel's BTF does not have\n  \
             trace.bpf.c:9: return bio->bi_sectr;"
        );
    }

    #[test]
    fn a_missing_member_is_shown_where_the_source_names_it() {
        let package = tempfile::tempdir().unwrap();
        let file = package.path().join("src/trace.bpf.c");
        fs::create_dir(package.path().join("src")).unwrap();
        let source = "u64 bi_sectr_x;\n\n\tu64 io = 1;\n\tu64 sector = READ(bio, bi_sectr);\n";
        fs::write(&file, source).unwrap();
        let log = |code: &str| {
            format!(
                "libbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n; {code}\n2: <invalid CO-RE relocation>\n\
                 failed to resolve CO-RE relocation <byte_off> [3] struct bio.bi_iter.bi_sectr (0:5:0 @ offset 24)\n\
                 -- END PROG LOAD LOG --\n"
            )
        };
        for code in ["u64 io = 1;", "u64 io = 1; @ trace.bpf.c:3"] {
            let log = log(code);
            let said = VerifierRefusal::parse(&log).unwrap().describe(package.path());
            let shown = format!("{}:4: u64 sector = READ(bio, bi_sectr);", file.display());
            assert!(said.ends_with(&shown), "{code}: {said}");
        }
        fs::write(&file, "\tu64 io = 1;\n").unwrap();
        let log = log("u64 io = 1;");
        let said = VerifierRefusal::parse(&log).unwrap().describe(package.path());
        assert!(said.ends_with(":1: u64 io = 1;"), "{said}");
    }

    #[test]
    fn newer_kernels_say_the_line_and_the_reason() {
        let log = "libbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n\
            ; return *found; @ trace.bpf.c:24\n0: (95) exit\nR0 !read_ok\n\n\
            Verification failed: Register Type Safety: Unreadable register\n\n\
            Reason:\n  R0 has never been initialized on this path,\n  so it cannot be read.\n\n\
            At:\n  insn 0\n        | ^-- error: R0 is not readable\n\n\
            Suggestion:\n  Initialize R0.\n\nprocessed 1 insns (limit 1000000)\n-- END PROG LOAD LOG --\n";
        let refusal = VerifierRefusal::parse(log).unwrap();
        assert_eq!(
            refusal.describe(Path::new("/nowhere")),
            "the verifier rejects x(): R0 has never been initialized on this path, so it cannot be read.\n  \
             trace.bpf.c:24: return *found;\n  Initialize R0."
        );
    }
}
