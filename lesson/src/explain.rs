//! What the verifier means: the refusals that a beginner meets most.

/// How a refusal ends that is libbpf's: it has not found a type or a member.
const MISSING: &str = "which this kernel's BTF does not have";

/// A text in the message, and what it means.
const REFUSALS: &[(&str, &str)] = &[
    (
        "invalid mem access 'map_value_or_null'",
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
            ("cannot call GPL-restricted function from non-GPL compatible program", "licence"),
            ("x() needs struct bio.bi_sectr, which this kernel's BTF does not have", "vmlinux.h"),
        ] {
            let said = format!("mine-03: the verifier rejects io_end(): {said}\n");
            assert!(refusal(&said).is_some_and(|meaning| meaning.contains(word)), "{said}");
        }
        assert_eq!(refusal("the verifier rejects x(): something new"), None);
    }

    #[test]
    fn a_build_script_is_not_quoted() {
        let cargo = "error: failed to run custom build command for `mine-03`\n\nCaused by:\n  \
                     process didn't exit successfully: `x`\n  --- stderr\nmine/03/src/trace.bpf.c:9:5: error: no\n";
        assert_eq!(compiler(cargo), "mine/03/src/trace.bpf.c:9:5: error: no");
        assert_eq!(compiler("error[E0425]: x\n"), "error[E0425]: x");
    }
}
