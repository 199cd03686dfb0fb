//! Compiles the BPF programs that no kernel takes.

fn main() {
    common_build::skeleton("src/gone.bpf.c");
    common_build::skeleton("src/refused.bpf.c");
}
