//! BPF by hand: no BPF library, no compiler, no object file.
//!
//! [`insn`] makes instructions, [`bpf`] gives them to the kernel with bpf(2), [`perf`] attaches them
//! to tracepoints with perf_event_open(2) and reads what they send, [`trace_pipe`] reads what they
//! print. [`cli`] holds what the four programs share besides. [`message`] and [`tracefs`] serve all of
//! these modules.

pub mod bpf;
pub mod cli;
pub mod insn;
pub mod message;
pub mod perf;
pub mod trace_pipe;
pub mod tracefs;
