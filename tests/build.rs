//! Compiles the BPF program that hooks a function of the past.

fn main() {
    common_build::skeleton("guest/gone.bpf.c");
}
