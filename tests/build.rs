//! Compiles the BPF programs that belong to no stage.

fn main() {
    common_build::skeleton("src/gone.bpf.c");
    common_build::skeleton("src/refused.bpf.c");
    common_build::skeleton("src/unattached.bpf.c");
}
