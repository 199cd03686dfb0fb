//! What the verifier means: the refusals that a beginner meets most.

use std::{collections::BTreeMap, sync::LazyLock};

use serde::Deserialize;

/// How a refusal ends that is libbpf's: it has not found a type or a member.
const MISSING: &str = "which this kernel's BTF does not have";

/// Texts in a message, and what each of them means.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VerifierRefusal {
    says: Vec<String>,
    means: String,
}

/// Built in, and read in a test: it can be read.
static REFUSALS: LazyLock<BTreeMap<String, Vec<VerifierRefusal>>> =
    LazyLock::new(|| toml::from_str(include_str!("../refusals.toml")).unwrap_or_default());

/// Whether a program was refused before it ran, by the verifier or by libbpf.
pub fn is_refused(message: &str) -> bool {
    message.contains("the verifier rejects") || message.contains(MISSING)
}

/// How a judge's message begins where the program ends before it is judged: see `tests/guest/run.rs`.
pub const NO_START: &str = "your program does not start:";

/// Whether a message says by itself what happened: the program was refused, did not start, or has failed. What it
/// should have printed explains nothing then.
pub fn is_about_itself(message: &str) -> bool {
    let signs =
        [NO_START, "panicked at ", "your program: exit code ", "your program: no exit code"];
    is_refused(message) || signs.iter().any(|sign| message.contains(sign))
}

/// What a refusal means, where it is one of those that beginners meet.
pub fn refusal(message: &str) -> Option<&'static str> {
    let meant = |refusal: &&VerifierRefusal| refusal.says.iter().any(|text| message.contains(text));
    REFUSALS.values().flatten().find(meant).map(|refusal| &*refusal.means)
}

/// What rustc means where main.rs names what trace.bpf.c does not have.
pub fn missing_field(said: &str) -> Option<&'static str> {
    let missing = said.contains("error[E0609]: no field `");
    let of_skeleton = ["Maps<", "Progs<"].iter().any(|name| said.contains(name));
    (missing && of_skeleton).then_some(
        "The skeleton is made from trace.bpf.c. In `maps`, it has a field for each map, which is a \
         variable with SEC(\".maps\"), and `bss_data` for global variables that are not static; in \
         `progs`, one for each function with SEC(). Their names there and in main.rs have to be \
         the same.",
    )
}

/// The compiler's own words in what cargo says when a build script ends with an error.
pub fn compiler(cargo: &str) -> &str {
    match cargo.split_once("--- stderr\n") {
        Some((_, said)) => said.split("\nwarning: build failed").next().unwrap_or(said),
        None => cargo,
    }
    .trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusals_of_the_readmes_are_explained() {
        for (said, word) in [
            ("R0 invalid mem access 'map_value_or_null'", "NULL"),
            ("R1 invalid mem access 'scalar'", "BPF_CORE_READ"),
            (
                "R0 min value is outside of the allowed memory range (8 bytes at offset 0 of a map's \
                 value, which has 4 bytes)",
                "__type(value",
            ),
            ("R0 max value is outside of the allowed memory range", "mask it"),
            (
                "math between map_value pointer and register with unbounded min value is not allowed",
                "mask it",
            ),
            ("R3 type=map_value_or_null expected=fp, pkt, pkt_meta, map_key, map_value", "NULL"),
            ("invalid bpf_context access off=112 size=8", "BPF_KPROBE"),
            ("only read is supported", "only read"),
            (
                "At program exit the register R0 has unknown scalar value should have been in [0, 0]",
                "return 0",
            ),
            ("cannot call GPL-restricted function from non-GPL compatible program", "licence"),
            ("x() needs struct bio.bi_sectr, which this kernel's BTF does not have", "vmlinux.h"),
        ] {
            let said = format!("mine-03: the verifier rejects io_end(): {said}\n");
            assert!(refusal(&said).is_some_and(|meaning| meaning.contains(word)), "{said}");
        }
        assert_eq!(refusal("the verifier rejects x(): something new"), None);
    }

    #[test]
    fn a_field_of_the_skeleton_is_explained() {
        let said = "error[E0609]: no field `starts` on type `TraceMaps<'_>`\n  --> maps/src/main.rs:29:31\n";
        assert!(missing_field(said).is_some_and(|meaning| meaning.contains("SEC(\".maps\")")));
        assert!(missing_field(&said.replace("Maps", "Progs")).is_some());
        assert_eq!(missing_field(&said.replace("TraceMaps<'_>", "Counts")), None);
    }

    #[test]
    fn a_build_script_is_not_quoted() {
        let cargo = "error: failed to run custom build command for `mine-03`\n\nCaused by:\n  \
                     process didn't exit successfully: `x`\n  --- stderr\nmine/03/src/trace.bpf.c:9:5: error: no\n";
        assert_eq!(compiler(cargo), "mine/03/src/trace.bpf.c:9:5: error: no");
        assert_eq!(compiler("error[E0425]: x\n"), "error[E0425]: x");
    }
}
