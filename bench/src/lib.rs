//! What `cargo vm bench` measures, the report that it writes, and what each program may cost. The
//! package `bench-measure` measures in the guest; this one needs neither clang nor libbpf, so that the
//! launcher, which installs them, can use it.

pub mod budgets;
pub mod plan;
pub mod report;

#[cfg(test)]
mod tests {
    use crate::plan::{BenchOutcome, Load, Measured, Run, Started};

    /// Results of two rows: nothing, and a program that adds `added`.
    pub(crate) fn outcomes(added: f64, kib: u64) -> Vec<BenchOutcome> {
        let measured = |elapsed: f64| {
            let run = |more| Run {
                elapsed: elapsed + more + 5.0,
                thread: Some(elapsed + more),
                later: 0.0,
            };
            vec![Measured { load: Load::Direct, runs: vec![run(0.0), run(2.0)] }]
        };
        let started = Started {
            attach_ms: 300.0,
            attach_cpu_ms: 100.0,
            attached_kib: kib,
            exit_ms: 50.0,
            programs: Vec::new(),
        };
        vec![
            BenchOutcome {
                name: "nothing".into(),
                measured: measured(5000.0),
                started: None,
                note: None,
            },
            BenchOutcome {
                name: "stage04 quiet".into(),
                measured: measured(5000.0 + added),
                started: Some(started),
                note: None,
            },
        ]
    }
}
