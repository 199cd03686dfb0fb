//! Compiles the empty programs.

fn main() {
    common_build::skeleton("src/floor.bpf.c");
}
