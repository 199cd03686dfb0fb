//! What the `build.rs` of every program does.

mod clang;

use std::{
    env, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use libbpf_cargo::SkeletonBuilder;
use libbpf_rs::{Linker, libbpf_sys::API_HEADERS};

/// Where a clone has been moved or copied, cargo builds this crate and what uses it again, as this value
/// differs: so `HERE` is never in another clone. See common/base/src/root.rs.
const _: Option<&str> = option_env!("WORKSHOP_ROOT");

/// The directory of this package; the workspace's root is two above it.
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Compiles `source` (BPF C, in the package's `src/`, named `NAME.bpf.c`) with clang for the machine
/// that cargo builds for, and writes its Rust skeleton to `$OUT_DIR/NAME.skel.rs`. The variable
/// `CLANG` names another compiler than `clang`.
///
/// Ends the build with clang's own message where the program does not compile, and with what to
/// install where there is no clang.
pub fn skeleton(source: &str) {
    println!("cargo:rerun-if-changed={source}\ncargo:rerun-if-changed={HERE}/../bpf");
    println!("cargo:rerun-if-changed={HERE}/../../tools/bpf");
    for header in fs::read_dir("src").into_iter().flatten().flatten().map(|entry| entry.path()) {
        if header.extension().is_some_and(|extension| extension == "h") {
            println!("cargo:rerun-if-changed={}", header.display());
        }
    }
    println!("cargo:rerun-if-env-changed=CLANG");
    let variable = |name| env::var(name).unwrap_or_else(|_| fail(&format!("cargo sets no {name}")));
    let source = Path::new(&variable("CARGO_MANIFEST_DIR")).join(source);
    let clang = env::var("CLANG").ok().filter(|clang| !clang.is_empty());
    let clang = clang.as_deref().unwrap_or("clang");
    let out = PathBuf::from(variable("OUT_DIR"));
    if let Err(error) = build(clang, &source, &variable("CARGO_CFG_TARGET_ARCH"), &out) {
        fail(&error);
    }
}

/// The version of BPF's instruction set that a program is compiled for, whatever the compiler's default
/// is: every clang uses the same instructions. v2, and v3 for a program that exchanges values
/// atomically, or counts so and uses the count, which v2 cannot: itself, or join.h for it.
pub fn cpu(source: &Path) -> &'static str {
    let needs_v3 = ["__sync_val_compare_and_swap", "#include \"join.h\""];
    let text = fs::read_to_string(source).unwrap_or_default();
    if needs_v3.iter().any(|words| text.contains(words)) { "v3" } else { "v2" }
}

/// Compiles `source` for machines of the architecture `arch`, as rustc calls it, into `out`:
/// `NAME.bpf.o` and its Rust skeleton, `NAME.skel.rs`. An error is clang's message, and what it means
/// where only BPF has it; or names a map that is not in the section of maps.
pub fn build(clang: &str, source: &Path, arch: &str, out: &Path) -> Result<(), String> {
    let arch = match arch {
        "x86_64" => "-D__TARGET_ARCH_x86",
        "aarch64" => "-D__TARGET_ARCH_arm64",
        other => return Err(format!("vmlinux.h is for x86_64 and aarch64, not for {other}")),
    };
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    let name = name.trim_end_matches(".bpf.c");
    let compiled = out.join(format!("{name}.dwarf.o"));
    let object = out.join(format!("{name}.bpf.o"));
    let headers = headers(out).map_err(|error| format!("{}: {error}", out.display()))?;
    // From the workspace's root: an editor can open the paths in the messages.
    let root = Path::new(HERE).join("../..");
    let root = root.canonicalize().unwrap_or(root);
    let mut command = Command::new(clang);
    command
        .current_dir(&root)
        .args(["-g", "-O2", "-target", "bpf", "-Wall", "-Werror", arch])
        .arg(format!("-mcpu={}", cpu(source)))
        .args(["-I", "common/bpf", "-I", "tools/bpf", "-I"])
        .arg(&headers)
        .arg("-c")
        .arg(source.strip_prefix(&root).unwrap_or(source))
        .arg("-o")
        .arg(&compiled);
    let output = command.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            format!("{clang} is not installed: run cargo vm setup, or install the package clang")
        }
        _ => format!("{clang}: {error}"),
    })?;
    if !output.status.success() {
        let vmlinux = fs::read_to_string(root.join("common/bpf/vmlinux.h")).unwrap_or_default();
        return Err(clang::readable(&String::from_utf8_lossy(&output.stderr), &vmlinux));
    }
    let text = fs::read_to_string(source).unwrap_or_default();
    if let Some((line, name)) = clang::no_map(&text) {
        return Err(format!(
            "{}:{line}: error: {name} is no map, but an ordinary variable: libbpf makes maps of what \
             is in the section .maps. Write: }} {name} SEC(\".maps\");",
            source.strip_prefix(&root).unwrap_or(source).display()
        ));
    }
    let built = || -> anyhow::Result<()> {
        // Linking removes the debug information that the kernel does not read.
        let mut linker = Linker::new(&object)?;
        linker.add_file(&compiled)?;
        linker.link()?;
        let file = out.join(format!("{name}.skel.rs"));
        SkeletonBuilder::new().obj(&object).generate(&file)?;
        // The workspace's lints refuse what libbpf-cargo writes.
        let allow = "#[allow(dead_code, clippy::unwrap_used, clippy::too_many_lines)]";
        let skeleton = fs::read_to_string(&file)?.replacen("#[allow(dead_code)]", allow, 1);
        Ok(fs::write(file, skeleton)?)
    };
    built().map_err(|error| format!("no skeleton could be made of {}: {error:#}", object.display()))
}

/// Writes libbpf's headers below `out`, and returns the directory to include from.
fn headers(out: &Path) -> std::io::Result<PathBuf> {
    let include = out.join("include");
    fs::create_dir_all(include.join("bpf"))?;
    for (name, content) in API_HEADERS {
        fs::write(include.join("bpf").join(name), content)?;
    }
    Ok(include)
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cargo builds programs for this machine only: what differs on the other one (registers, types)
    /// would break there first.
    #[test]
    fn every_program_compiles_for_every_machine() {
        let root = Path::new(HERE).join("../..");
        let out = tempfile::tempdir().unwrap();
        let mut programs = 0;
        let places = [root.clone(), root.join("tools"), root.join("appendix")];
        for directory in places.iter().flat_map(|place| place.read_dir().unwrap()) {
            let source = directory.unwrap().path().join("src/trace.bpf.c");
            if !source.exists() {
                continue;
            }
            for arch in ["x86_64", "aarch64"] {
                build("clang", &source, arch, out.path()).unwrap();
            }
            programs += 1;
        }
        assert!(programs >= 10, "{programs} programs");
    }

    /// What clang says about a wrong program.
    fn error_of(program: &str) -> String {
        let out = tempfile::tempdir().unwrap();
        let source = out.path().join("x.bpf.c");
        let text = format!(
            "#include \"vmlinux.h\"\n#include <bpf/bpf_helpers.h>\n#include <bpf/bpf_tracing.h>\n\
             #include <bpf/bpf_core_read.h>\nu64 total, more[400];\n\
             struct {{\n\t__uint(type, BPF_MAP_TYPE_HASH);\n\t__uint(max_entries, 16);\n\
             \t__type(key, u64);\n\t__type(value, u64);\n}} starts SEC(\".maps\");\n\
             {program}\nchar LICENSE[] SEC(\"license\") = \"GPL\";\n"
        );
        fs::write(&source, text).unwrap();
        build("clang", &source, "x86_64", out.path()).unwrap_err()
    }

    fn entry(body: &str) -> String {
        let hook = "SEC(\"kprobe/submit_bio\")\nint BPF_KPROBE(io_start, struct bio *bio, u64 n)";
        error_of(&format!("{hook}\n{{\n\t{body}\n\treturn 0;\n}}"))
    }

    #[test]
    fn errors_of_bpf_are_explained() {
        for (body, said, meant) in [
            (
                "u64 s = 0; for (u64 i = 0; i < n; i++) s += i; total = s;",
                "__multi3",
                "barrier_var(",
            ),
            ("__builtin_memset(more, 0, sizeof(more));", "'memset'", "C library"),
            ("total = n * 1.5;", "__muldf3", "floating-point"),
            ("total = (long)n / 7;", "signed division", "(u64)n"),
            ("total = strlen(\"x\");", "strlen", "man bpf-helpers"),
        ] {
            let error = entry(body);
            assert!(error.contains(said) && error.contains(meant), "{error}");
            assert!(error.lines().count() < 25, "{error}");
        }
        let six = "static __noinline int f(u64 a, u64 b, u64 c, u64 d, u64 e, u64 f)\n\
                   {\n\treturn a + b + c + d + e + f + total;\n}\n\
                   SEC(\"kprobe/submit_bio\")\nint g(u64 *n)\n{\n\treturn f(n[0], n[1], n[2], n[3], n[4], n[5]);\n}";
        assert!(error_of(six).contains("at most five"), "{}", error_of(six));
    }

    #[test]
    fn vmlinux_h_is_an_excerpt() {
        for (body, said) in [
            (
                "total = BPF_CORE_READ(bio, bi_nosuch);",
                "no member named 'bi_nosuch' in 'struct bio'",
            ),
            ("total = bio->bi_nosuch;", "no member named 'bi_nosuch' in 'struct bio'"),
            (
                "total = BPF_CORE_READ((struct nosuch *)bio, x);",
                "incomplete definition of type 'struct nosuch'",
            ),
            ("total = sizeof(nosuch_t);", "use of undeclared identifier 'nosuch_t'"),
            ("total = REQ_OP_NOSUCH;", "use of undeclared identifier 'REQ_OP_NOSUCH'"),
        ] {
            let error = entry(&format!("{body} struct own {{ int a; }} own; (void)own;"));
            assert_eq!(error.matches(said).count(), 1, "{error}");
            assert!(error.contains("common/bpf/vmlinux.h is an excerpt"), "{error}");
            for noise in ["expanded from", "skipping", "bpf_core_read.h", "generated."] {
                assert!(!error.contains(noise), "{error}");
            }
            assert!(error.lines().count() < 25, "{error}");
        }
        let own = entry("struct own { int a; } own = {}; total = own.b;");
        assert!(own.contains("no member named 'b'") && !own.contains("excerpt"), "{own}");
        let mistyped = entry("totl = 1;");
        assert!(!mistyped.contains("excerpt"), "{mistyped}");
        let unknown = error_of("nosuch_t x;");
        assert!(unknown.contains("unknown type name") && unknown.contains("excerpt"), "{unknown}");
        // A note that is no macro stays: it names the other line.
        let twice = error_of("int x;\nlong x;");
        assert!(twice.contains("note: previous definition is here"), "{twice}");
    }

    #[test]
    fn a_large_stack_is_said_once() {
        let error = entry(
            "u64 b[100] = {}; bpf_probe_read_kernel(b, sizeof(b), bio); \
             bpf_map_update_elem(&starts, b, b, 0);",
        );
        assert_eq!(error.matches("Looks like the BPF stack limit").count(), 1, "{error}");
        assert!(error.contains("PERCPU_ARRAY") && !error.contains("too many errors"), "{error}");
    }

    #[test]
    fn a_map_without_its_section_is_named() {
        let map = "struct {\n\t__uint(type, BPF_MAP_TYPE_HASH);\n} slowest;";
        let error = error_of(map);
        assert!(error.contains("x.bpf.c:14: error: slowest is no map"), "{error}");
        assert!(error.ends_with("Write: } slowest SEC(\".maps\");"), "{error}");
    }

    #[test]
    fn an_error_is_short() {
        let out = tempfile::tempdir().unwrap();
        let source = out.path().join("x.bpf.c");
        fs::write(&source, "int x = y;\n").unwrap();
        let error = build("clang", &source, "mips", out.path()).unwrap_err();
        assert!(error.contains("not for mips"), "{error}");
        let error = build("no-such-clang", &source, "x86_64", out.path()).unwrap_err();
        assert!(error.starts_with("no-such-clang is not installed: run cargo vm setup"), "{error}");
        let error = build("clang", &source, "x86_64", out.path()).unwrap_err();
        let place = format!("{}:1:9: error: ", source.display());
        assert!(error.starts_with(&place) && !error.contains("installed"), "{error}");
    }
}
