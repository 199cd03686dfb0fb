//! What clang says about a BPF program, in words that a learner can act on.

use std::collections::HashSet;

/// Said for every access to the stack, and means the stack as a whole.
const STACK: &str = "Looks like the BPF stack limit";

/// Texts in clang's errors, and what they mean.
const MEANINGS: &[(&[&str], &str)] = &[
    (
        &["ti3' is not supported"],
        "This code needs a number of 128 bits, which BPF does not have. If you did not write one:\n\
         clang turns a loop that adds up (`sum += i`) into a formula with such a number. Write\n\
         barrier_var(sum) into the loop to prevent that. Otherwise, compute with u64.",
    ),
    (
        &["function 'memset'", "function 'memcpy'", "function 'memmove'", "function 'memcmp'"],
        "A BPF program cannot call the C library. Clang calls this function to fill, copy or compare\n\
         memory if the size is large or not a constant. Use a small constant size. To copy more,\n\
         use bpf_probe_read_kernel(). Global variables and arrays in maps start as 0.",
    ),
    (
        &["function '__float", "function '__fix", "df3' is not supported", "sf3' is not supported"],
        "BPF has no floating-point numbers. Write `n * 3 / 2` for `n * 1.5`, or let main.rs compute\n\
         with fractions.",
    ),
    (
        &["Unsupport signed division", "unsupported signed division"],
        "This version of BPF divides unsigned numbers only. Declare both as u64: `(u64)n / 1000`.",
    ),
    (
        &[STACK],
        "A program has 512 bytes for all of its local variables together. Keep the large ones in a\n\
         map, for example in a BPF_MAP_TYPE_PERCPU_ARRAY with one entry.",
    ),
    (
        &[
            "too many args",
            "too many arguments",
            "stack arguments are not",
            "StructRet",
            "aggregate returns",
        ],
        "A function of a BPF program takes at most five numbers or pointers, and returns one of them.\n\
         Declare it `static __always_inline`: then clang makes it a part of its caller, without\n\
         these limits.",
    ),
    (
        &["implicitly declaring library function", "call to undeclared library function"],
        "A BPF program cannot call the C library. It calls helpers, which `man bpf-helpers` lists.\n\
         bpf_printk() prints a line.",
    ),
];

/// What it means where a program names a type of the kernel, or a member of one, that vmlinux.h does not have.
const EXCERPT: &str = "\
common/bpf/vmlinux.h is an excerpt: it declares those of the kernel's types and members that the
stages read, under the kernel's names. Check the spelling first. If the kernel has it, add it there:
a member as a line in its struct, wherever you like, with the kernel's type (libbpf finds its real
offset when it loads the program); a struct with only the members that you read, before the line
`#pragma clang attribute pop`. `bpftool btf dump file /sys/kernel/btf/vmlinux format c | less` in
`cargo vm shell` shows all that the kernel has.";

/// Clang's message: each error once, without the macros that it comes from and what clang says when it crashes,
/// and below them what the errors mean that only BPF has. `vmlinux` is the text of vmlinux.h.
pub(crate) fn readable(said: &str, vmlinux: &str) -> String {
    let (mut seen, mut kept, mut keep, mut keeps_notes) = (HashSet::new(), Vec::new(), true, true);
    for line in said.lines().take_while(|line| !line.starts_with("PLEASE submit a bug report")) {
        if line.starts_with("fatal error: ") {
            // `too many errors emitted`, or how a crash begins that an error has announced.
            keep = kept.is_empty();
        } else if line.contains(" error: ") || line.starts_with("Error at line ") {
            let stack = line.find(STACK).map(|start| &line[start..]);
            keep = seen.insert(stack.unwrap_or(line));
            keeps_notes = keep;
        } else if line.contains("note: expanded from ") || line.starts_with("note: (skipping ") {
            // A macro is libbpf's, and where the learner uses it stands in the error.
            keep = false;
        } else if line.contains(": note: ") || is_count(line) {
            keep = keeps_notes && !is_count(line);
        }
        kept.extend(keep.then_some(line));
    }
    let mut text = kept.join("\n").trim_end().to_owned();
    let meanings = MEANINGS.iter().filter(|(texts, _)| texts.iter().any(|it| text.contains(it)));
    let meant: Vec<&str> = meanings.map(|(_, meaning)| *meaning).collect();
    for meaning in
        meant.into_iter().chain(names_more_than_excerpt(&text, vmlinux).then_some(EXCERPT))
    {
        text += &format!("\n\nWhat this means:\n{meaning}");
    }
    text
}

/// `2 errors generated.`: of those that are shown, nobody needs the number.
fn is_count(line: &str) -> bool {
    line.ends_with(" generated.") && line.starts_with(|first: char| first.is_ascii_digit())
}

/// Whether an error is about a type or a constant that is declared nowhere, or about a member of a type that
/// vmlinux.h declares.
fn names_more_than_excerpt(text: &str, vmlinux: &str) -> bool {
    text.lines().filter(|line| line.contains(" error: ")).any(|line| {
        let of_kernel = || {
            let (_, name) = line.split_once("' in '")?;
            Some(vmlinux.contains(&format!("{} {{", name.split('\'').next()?)))
        };
        let is_kernels = |name: &str| name.ends_with("_t") || !name.contains(char::is_lowercase);
        let undeclared = line.split_once("undeclared identifier '").map(|(_, rest)| rest);
        let undeclared = undeclared.and_then(|rest| rest.split('\'').next());
        line.contains("incomplete definition of type 'struct ")
            || line.contains("unknown type name '")
            || undeclared.is_some_and(is_kernels)
            || line.contains("no member named '") && of_kernel() == Some(true)
    })
}

/// A variable that is described like a map, but is not in the section of maps: its line, and its name.
/// Clang accepts it.
pub(crate) fn no_map(source: &str) -> Option<(usize, &str)> {
    for (described, _) in source.match_indices("__uint(type,") {
        // `} starts SEC(".maps");`, and not the end of a type within it.
        let ends = source[described..].match_indices('}').map(|(end, _)| described + end + 1);
        let declared = ends.map(|end| (end, source[end..].split(';').next().unwrap_or_default()));
        let (end, declared) = declared.into_iter().find(|(_, text)| !text.starts_with(')'))?;
        let name = declared.split_whitespace().next().unwrap_or_default();
        // A type without a variable may describe the maps in a map.
        if !name.is_empty() && !declared.contains(".maps\"") {
            return Some((source[..end].lines().count(), name));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_has_its_section() {
        let map = |declared: &str| {
            format!(
                "int x;\nstruct {{\n\t__uint(type, BPF_MAP_TYPE_HASH);\n}}{declared};\nint y;\n"
            )
        };
        assert_eq!(no_map(&map(" starts SEC(\".maps\")")), None);
        assert_eq!(no_map(&map(" starts")), Some((4, "starts")));
        assert_eq!(no_map(&map(" starts SEC(\".map\")")), Some((4, "starts")));
        assert_eq!(no_map(&map("")), None);
        let second = map(" starts SEC(\".maps\")") + &map(" slowest");
        assert_eq!(no_map(&second), Some((9, "slowest")));
        let inner = "struct {\n\t__uint(type, X);\n\t__array(values, struct { int a; });\n} outer SEC(\".maps\");";
        assert_eq!(no_map(inner), None);
    }
}
