//! What the programs, which need libbpf, and the launcher, which is built without it, both need.

pub mod root;
