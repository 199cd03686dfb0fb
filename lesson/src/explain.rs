//! What the verifier means: the refusals that a beginner meets most.

/// How a refusal ends that is libbpf's: it has not found a type or a member.
const MISSING: &str = "which this kernel's BTF does not have";

/// A text in the message, and what it means.
const REFUSALS: &[(&str, &str)] = &[
    (
        "map_value_or_null",
        "A look-up in a map returns NULL when there is no such key. Test the pointer before you use \
         it: `if (!found) return 0;`.",
    ),
    (
        "invalid mem access 'scalar'",
        "You read through a number. To the verifier, an argument of a kprobe is a number and not a \
         pointer, and so is what you read from memory: use BPF_CORE_READ(). If it was a pointer, \
         it may be NULL on a path that you did not test.",
    ),
    (
        "invalid indirect read from stack",
        "A helper would read a variable that you have not written in full, padding included. \
         Initialise it: `struct key key = {};`.",
    ),
    (
        "invalid read from stack",
        "A variable is read before it has a value. Initialise it where you declare it.",
    ),
    (
        "!read_ok",
        "A variable is read before it has a value on some path, or a program ends without `return`. \
         Initialise the variable, and return 0.",
    ),
    (
        "back-edge",
        "The kernel sees a loop whose end it cannot prove. Give the loop a constant upper bound: \
         `for (int i = 0; i < 64; i++)`.",
    ),
    (
        "jumps is too complex",
        "The verifier followed thousands of branches and came to no end, usually because of a loop. \
         Give the loop a constant upper bound: `for (int i = 0; i < 64 && whole; i++)`.",
    ),
    (
        "program is too large",
        "The verifier followed more than a million instructions, usually because of a loop with a \
         large bound, or of branches in a loop. Make the bound smaller.",
    ),
    (
        "infinite loop detected",
        "The verifier came to a state that it had seen before: the loop does not get closer to its \
         end. Count it up with a constant upper bound.",
    ),
    (
        "of a map's value, which has",
        "The program reads or writes beyond the end of what a look-up returned. Where the map has \
         smaller values than you think, compare `__type(value, ...)` with the type of your pointer. \
         Where you add an index, test it before, or mask it: `slots[i & 31]`.",
    ),
    (
        "outside of the allowed memory range",
        "The offset into a map's value, an array or a buffer may lie outside of it. Test the index \
         before you use it, or mask it: `slots[i & 31]`.",
    ),
    (
        "unbounded min value",
        "To the verifier, the index may be any number, also a negative one. Declare it as u64, and \
         test it before you use it, or mask it: `slots[i & 31]`.",
    ),
    (
        "min value is negative",
        "To the verifier, the index or the size may be negative. Declare it as u64, and test it \
         against a constant, or mask it: `slots[i & 31]`.",
    ),
    (
        "invalid bpf_context access",
        "The program takes an argument that its hook does not have. BPF_KPROBE() reads the CPU's \
         registers, and goes with SEC(\"kprobe/...\"); BPF_PROG() goes with SEC(\"fentry/...\") and \
         SEC(\"tp_btf/...\"). And the hook has only the arguments that the kernel declares for it.",
    ),
    (
        "only read is supported",
        "The program writes to memory of the kernel, which it may only read. Keep what you want to \
         change in a variable of your own, or in a map.",
    ),
    (
        "At program exit the register R0",
        "This kind of program has to return 0: `return 0;` on every path.",
    ),
    (
        "invalid access to map value",
        "The offset into a map's value may lie outside of it. Test the index before you use it, or \
         mask it: `slots[i & 31]`.",
    ),
    (
        "unbounded memory access",
        "The verifier knows no upper bound of an index or a size. Test it against a constant, or \
         mask it: `slots[i & 31]`.",
    ),
    (
        "cannot call GPL-restricted function",
        "The helper is for programs under a licence that is compatible with the GPL. Keep the line \
         `char LICENSE[] SEC(\"license\") = \"Dual BSD/GPL\";`.",
    ),
    (
        "unknown func",
        "This kernel has no such helper, or not for this type of program. `man bpf-helpers` lists \
         them.",
    ),
    (
        MISSING,
        "There is no such type or member: it has another name in this kernel, or vmlinux.h \
         misspells it. bpf_core_field_exists() asks before you read.",
    ),
    (
        "stack is too large",
        "A program has 512 bytes of stack. Keep larger data in a map, for example in a per-CPU \
         array.",
    ),
    (
        "arg#",
        "The argument of a helper has the wrong type. Compare with the helper's signature in \
         `man bpf-helpers`: a map is passed as `&name`, a key and a value as pointers.",
    ),
    (
        "expected=",
        "The argument of a helper has the wrong type. Compare with the helper's signature in \
         `man bpf-helpers`: a map is passed as `&name`, a key and a value as pointers.",
    ),
];

/// Whether a program was refused before it ran, by the verifier or by libbpf.
pub fn is_refused(message: &str) -> bool {
    message.contains("the verifier rejects") || message.contains(MISSING)
}

/// What a refusal means, where it is one of those that beginners meet.
pub fn refusal(message: &str) -> Option<&'static str> {
    REFUSALS.iter().find(|(text, _)| message.contains(text)).map(|(_, meaning)| *meaning)
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
