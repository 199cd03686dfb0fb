//! `cargo truth --next`: what a kernel that is newer than those of the page changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs::{self, File},
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::btf::{
    Btf, BtfKind, BtfType,
    types::{Array, FuncProto},
};
use regex_lite::Regex;
use truth::{Case, Tool, TruthReport, Verdict, shown};
use vm::run::Run;

/// The functions of a kernel and their arguments: `void (struct bio *)`. A tracepoint is one of them, under the
/// name that BTF has for it, `btf_trace_block_rq_issue`.
pub type Functions = BTreeMap<String, String>;

/// What BTF says of the functions of a kernel line, without those of its modules.
pub fn functions(run: &Run, launcher: &Path, kernel: &str) -> Result<Functions> {
    let file = tempfile::NamedTempFile::new()?;
    let ended = Command::new(launcher)
        .args(["run", "--arch", run.arch.name(), "--kernel", kernel, "--idle"])
        .args(["cat", "/sys/kernel/btf/vmlinux"])
        .current_dir(run.workspace())
        .stdout(File::create(file.path())?)
        .status()?;
    ensure!(ended.success(), "the guest that reads the types of {kernel} ended with {ended}");
    let btf = Btf::from_path(file.path()).with_context(|| format!("the types of {kernel}"))?;
    functions_of(&btf)
}

fn functions_of(btf: &Btf) -> Result<Functions> {
    let mut found = Functions::new();
    for id in 1..btf.len() {
        let Some(kind) = btf.type_by_id::<BtfType>((id as u32).into()) else { continue };
        let name = kind.name().unwrap_or_default().to_string_lossy().into_owned();
        let is_tracepoint = kind.kind() == BtfKind::Typedef && name.starts_with("btf_trace_");
        if kind.kind() != BtfKind::Func && !is_tracepoint {
            continue;
        }
        let mut next = kind.next_type().context("a function without arguments")?;
        if is_tracepoint {
            next = next.next_type().context("a tracepoint without arguments")?;
        }
        let prototype = FuncProto::try_from(next).ok().context("a function without arguments")?;
        found.insert(name, arguments(btf, &prototype, ""));
    }
    Ok(found)
}

/// `void (struct bio *)`; with the name `(*)`, that of a pointer to such a function.
fn arguments(btf: &Btf, prototype: &FuncProto, name: &str) -> String {
    let of = |kind: BtfType| self::kind(btf, Some(kind));
    let parameters =
        prototype.iter().map(|parameter| btf.type_by_id(parameter.ty).map_or("...".into(), of));
    let parameters: Vec<String> = parameters.collect();
    let returns = kind(btf, prototype.next_type());
    format!("{returns} {name}({})", parameters.join(", "))
}

/// A type as C writes it. What only annotates it (`__rcu`, `__user`) is left out.
fn kind(btf: &Btf, of: Option<BtfType>) -> String {
    let Some(of) = of.filter(|of| of.kind() != BtfKind::Void) else { return "void".to_owned() };
    let name = of.name().unwrap_or_default().to_string_lossy();
    let next = || kind(btf, of.next_type());
    match of.kind() {
        BtfKind::Ptr => match of.next_type().map(FuncProto::try_from) {
            Some(Ok(prototype)) => arguments(btf, &prototype, "(*)"),
            _ => format!("{} *", next()),
        },
        BtfKind::Const => format!("const {}", next()),
        BtfKind::Volatile | BtfKind::Restrict | BtfKind::TypeTag => next(),
        BtfKind::Array => match Array::try_from(of) {
            Ok(array) => {
                format!("{}[{}]", kind(btf, Some(array.contained_type())), array.capacity())
            }
            Err(_) => String::new(),
        },
        BtfKind::Struct | BtfKind::Fwd => format!("struct {name}"),
        BtfKind::Union => format!("union {name}"),
        BtfKind::Enum | BtfKind::Enum64 => format!("enum {name}"),
        _ => name.into_owned(),
    }
}

/// The names in quotes of all our programs that may be functions: `SEC("kprobe/submit_bio")`,
/// `kernel_function("bio_chain_endio")`.
pub fn names(workspace: &Path) -> Result<BTreeSet<String>> {
    let name = Regex::new(r#""(?:[\w.]+/)*(\w+_\w+)""#)?;
    let mut names = BTreeSet::new();
    let mut directories = vec![workspace.to_owned(), workspace.join("lesson/exercises")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).with_context(|| directory.display().to_string())? {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            let is_of_programs = directory != workspace
                || ["appendix", "common", "tools"].contains(&&*file)
                || file.starts_with("stage");
            if path.is_dir() && is_of_programs {
                directories.push(path);
            } else if [".c", ".h", ".rs"].iter().any(|end| file.ends_with(end)) {
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                let of_file = name.captures_iter(&text).filter_map(|found| found.get(1));
                names.extend(of_file.map(|name| name.as_str().to_owned()));
            }
        }
    }
    Ok(names)
}

/// What differs between two kernels.
pub struct KernelDiff<'a> {
    /// The line of the page, and the newer one, as they are called.
    pub kernels: [&'a str; 2],
    /// Their functions.
    pub functions: &'a [Functions; 2],
    /// What our programs name.
    pub names: BTreeSet<String>,
    /// What was judged on each.
    pub reports: [&'a TruthReport; 2],
}

impl KernelDiff<'_> {
    /// The page: functions, then verdicts.
    pub fn markdown(&self, cases: &[Case], tools: &[Tool]) -> Result<String> {
        let [old, new] = self.kernels;
        let release = |at: usize| self.reports[at].releases.get(self.kernels[at]);
        let mut text = format!("# What will break next: {new} beside {old}\n\n");
        if let (Some(old), Some(new)) = (release(0), release(1)) {
            writeln!(text, "{new} beside {old}, by `cargo truth --next`.\n")?;
        }
        let is_ours = |name: &str| self.names.contains(name.trim_start_matches("btf_trace_"));
        let has_io =
            |of: &str| ["struct bio *", "struct request *"].iter().any(|kind| of.contains(kind));
        writeln!(text, "## Functions and tracepoints that our programs name\n")?;
        self.changes(&mut text, &|name, _| is_ours(name))?;
        writeln!(text, "\n## Others that have a `struct bio *` or a `struct request *`\n")?;
        self.changes(&mut text, &|name, of| !is_ours(name) && has_io(of))?;
        writeln!(text, "\n## Verdicts that differ\n")?;
        let mut rows = Vec::new();
        let mut same = 0;
        for case in cases {
            for tool in tools {
                let of = |at: usize| self.reports[at].cell(self.kernels[at], case, tool);
                let (Some(before), Some(now)) = (of(0), of(1)) else { continue };
                match outcome(&before.verdict) == outcome(&now.verdict) {
                    true => same += 1,
                    false => rows.push(format!(
                        "{} | {} | {} | {}",
                        case.name,
                        tool.name,
                        shown(before),
                        shown(now)
                    )),
                }
            }
        }
        writeln!(text, "{same} verdicts are the same, {} differ.", rows.len())?;
        table(&mut text, &format!("case | tool | {old} | {new}"), &rows)?;
        Ok(text)
    }

    /// Of the functions that are meant: which are gone, which have other arguments, which are new.
    fn changes(&self, text: &mut String, is_meant: &dyn Fn(&str, &str) -> bool) -> Result<()> {
        let [before, now] = self.functions;
        let (mut gone, mut other, mut same) = (Vec::new(), Vec::new(), 0);
        for (name, of) in before.iter().filter(|(name, of)| is_meant(name, of)) {
            match now.get(name) {
                None => gone.push(name),
                Some(now) if now != of => other.push(format!("`{name}` | `{of}` | `{now}`")),
                Some(_) => same += 1,
            }
        }
        let is_new =
            |(name, of): &(&String, &String)| is_meant(name, of) && !before.contains_key(*name);
        let new: Vec<&String> = now.iter().filter(is_new).map(|(name, _)| name).collect();
        for (what, names) in [("gone", gone), ("new", new)] {
            writeln!(text, "- {} {what}{}", names.len(), if names.is_empty() { "" } else { ":" })?;
            names.iter().try_for_each(|name| writeln!(text, "  `{name}`"))?;
        }
        writeln!(text, "- {} with other arguments, {same} with the same ones", other.len())?;
        table(text, &format!("function | {} | {}", self.kernels[0], self.kernels[1]), &other)
    }
}

/// A table of these rows, if there are any.
fn table(text: &mut String, head: &str, rows: &[String]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let columns = head.matches('|').count() + 1;
    writeln!(text, "\n| {head} |\n|{}", "---|".repeat(columns))?;
    Ok(rows.iter().try_for_each(|row| writeln!(text, "| {row} |"))?)
}

/// What two verdicts have to have in common to be the same: not their figures.
fn outcome(verdict: &Verdict) -> (u8, Option<truth::Question>) {
    let question = match verdict {
        Verdict::Wrong { question, .. } | Verdict::Admitted { question, .. } => Some(*question),
        _ => None,
    };
    (verdict.rank().0, question)
}

#[cfg(test)]
mod tests {
    use truth::{Cell, Expected, Question};

    use super::*;

    /// Functions, and for each tool what it has printed of 10 reads; `None`: it does not start.
    fn kernel(
        functions: &[(&str, &str)],
        printed: &[(&str, Option<u64>)],
    ) -> (Functions, TruthReport) {
        let of = |(name, of): &(&str, &str)| (name.to_string(), of.to_string());
        let expected = Expected::exactly(10);
        let mut report = TruthReport::default();
        for &(tool, printed) in printed {
            let verdict = match printed {
                Some(10) => Verdict::Right,
                Some(printed) => Verdict::Wrong {
                    question: Question::Requests,
                    printed: Some(Expected::exactly(printed)),
                    expected,
                },
                None => Verdict::Refused { said: "no function".into() },
            };
            let (case, tool) = ("threads_1".to_owned(), tool.to_owned());
            let cell = Cell { case, tool, verdict, skipped: 0, runs: 1, exit: None, silent: false };
            report.add("x", cell);
        }
        (functions.iter().map(of).collect(), report)
    }

    #[test]
    fn what_differs_is_shown_once() {
        let bio = "void (struct bio *)";
        let (before, old) = kernel(
            &[("submit_bio", bio), ("bio_put", bio), ("bio_gone", bio), ("gone", "void (void)")],
            &[("bitesize", Some(10)), ("biolatency", Some(9)), ("biosnoop", Some(10))],
        );
        let (now, new) = kernel(
            &[("submit_bio", "int (struct bio *)"), ("bio_put", bio), ("bio_new", bio)],
            &[("bitesize", Some(8)), ("biolatency", Some(8)), ("biosnoop", None)],
        );
        let next = KernelDiff {
            kernels: ["x", "x"],
            functions: &[before, now],
            names: ["submit_bio".to_owned(), "bio_endio".to_owned()].into(),
            reports: [&old, &new],
        };
        let text = next.markdown(&truth::cases().unwrap(), &truth::tools().unwrap()).unwrap();
        let (ours, others) = text.split_once("## Others").unwrap();
        let has = |text: &str, line: &str| assert!(text.contains(line), "{line}: {text}");
        has(ours, "- 0 gone\n- 0 new\n- 1 with other arguments, 0 with the same ones");
        has(ours, "| `submit_bio` | `void (struct bio *)` | `int (struct bio *)` |");
        has(
            others,
            "- 1 gone:\n  `bio_gone`\n- 1 new:\n  `bio_new`\n- 0 with other arguments, 1 with",
        );
        has(others, "\n1 verdicts are the same, 2 differ.\n");
        has(others, "| threads_1 | bitesize | right | **wrong**");
        has(others, "| threads_1 | biosnoop | right | refuses");
        assert!(!others.contains("| biolatency |") && !others.contains("submit_bio"), "{others}");
    }

    /// What a compiler has made of declarations in C, whose arguments are known.
    #[test]
    fn functions_are_those_of_the_source() {
        let source = "struct bio { int a; }; typedef unsigned long long u64;
            typedef void (*btf_trace_done)(void *, struct bio *); btf_trace_done *keep;
            u64 first(const struct bio *of, void (*end)(struct bio *, int), char *name[3]) { return 1; }
            void second(void) {}";
        let directory = tempfile::tempdir().unwrap();
        let [file, object] = ["x.c", "x.o"].map(|name| directory.path().join(name));
        fs::write(&file, source).unwrap();
        let mut clang = Command::new("clang");
        clang.args(["-O2", "-g", "-target", "bpf", "-c"]).arg(&file).arg("-o").arg(&object);
        assert!(clang.status().unwrap().success());
        let found = functions_of(&Btf::from_path(&object).unwrap()).unwrap();
        let expected = [
            ("btf_trace_done", "void (void *, struct bio *)"),
            ("first", "u64 (const struct bio *, void (*)(struct bio *, int), char * *)"),
            ("second", "void ()"),
        ];
        let expected = expected.map(|(name, of)| (name.to_owned(), of.to_owned()));
        assert_eq!(found, Functions::from(expected));
    }

    #[test]
    fn our_programs_name_their_hooks() {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let names = names(workspace).unwrap();
        for hook in
            ["submit_bio", "block_rq_complete", "bio_chain_endio", "mm_filemap_add_to_page_cache"]
        {
            assert!(names.contains(hook), "{hook}");
        }
    }
}
