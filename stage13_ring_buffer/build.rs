//! Compiles `src/trace.bpf.c` and writes its Rust skeleton.

fn main() {
    common_build::skeleton("src/trace.bpf.c");
}
