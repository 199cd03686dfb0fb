//! --who: which process, disk and operation caused the latencies.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use libbpf_rs::{MapCore, MapFlags};
use plain::Plain;
use serde_json::json;

use crate::{
    cli::{Slow, Who},
    disks::{Id, Names},
    operation::Operations,
    parts::{self, KEYS, NAMES, Parts},
    trace::{
        TraceMaps,
        types::{cause, cause_sum},
    },
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for cause {}
// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for cause_sum {}

/// What one cause has caused.
struct Row {
    of: cause,
    sum: cause_sum,
}

impl Row {
    /// The parts; `None` where one is known of no bio.
    fn parts(&self) -> Parts {
        std::array::from_fn(|n| (self.sum.known >> n & 1 == 1).then_some(self.sum.parts[n]))
    }
}

/// The causes, that of the largest sum first.
fn rows(maps: &TraceMaps<'_>) -> Result<Vec<Row>> {
    let mut rows: BTreeMap<Vec<u8>, Row> = BTreeMap::new();
    for mut key in maps.causes.keys() {
        let values = maps.causes.lookup_percpu(&key, MapFlags::ANY)?.into_iter().flatten();
        let mut of = cause::default();
        plain::copy_from_bytes(&mut of, &key).map_err(|_| anyhow!("struct cause"))?;
        // Both programs write for the same cause.
        of.program = 0;
        // SAFETY: the struct is integers and characters without padding.
        key = unsafe { plain::as_bytes(&of) }.to_vec();
        let row = rows.entry(key).or_insert(Row { of, sum: cause_sum::default() });
        for bytes in values {
            let other: &cause_sum =
                plain::from_bytes(&bytes).map_err(|_| anyhow!("struct cause_sum"))?;
            row.sum.bios += other.bios;
            row.sum.bytes += other.bytes;
            row.sum.sum += other.sum;
            row.sum.max = row.sum.max.max(other.max);
            row.sum.known |= other.known;
            row.sum.parts.iter_mut().zip(other.parts).for_each(|(part, other)| *part += other);
        }
    }
    let mut rows: Vec<_> = rows.into_values().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.sum.sum));
    Ok(rows)
}

/// Prints who caused the latencies: by process, disk and operation, and by stack.
pub fn print(
    maps: &TraceMaps<'_>,
    options: &Slow,
    operations: &Operations,
    names: &Names,
) -> Result<()> {
    let by_stack = options.who == Some(Who::Stack);
    if !options.json {
        println!(
            "\n{:>7} {:<15} {:<7} {:<5} {:>8} {:>10} {:>12} {:>10} ms MOST OF IT",
            "PID", "PROCESS", "DISK", "OP", "I/OS", "KIB", "SUM", "MAX"
        );
    }
    for row in rows(maps)? {
        let (Row { of, sum }, known) = (&row, row.parts());
        let stack = match by_stack {
            true if of.is_nobodys == 0 => common::stack(&maps.stacks, of.stack_id.into())?,
            _ => Vec::new(),
        };
        let id = Id { diskseq: of.diskseq, device: of.dev };
        let disk = names.name(id)?;
        let by = (of.is_nobodys == 0).then(|| (of.process, common::text(&of.comm)));
        let operation = operations.letters(of.operation);
        if options.json {
            let mut object = json!({
                "kind": "cause", "pid": by.as_ref().map(|by| by.0), "process": by.map(|by| by.1), "disk": &*disk,
                "operation": &*operation, "bios": sum.bios, "bytes": sum.bytes, "total_ns": sum.sum,
                "max_ns": sum.max, "stack": stack,
            });
            for (key, ns) in KEYS.into_iter().zip(known) {
                object[key] = json!(ns);
            }
            println!("{object}");
            continue;
        }
        let (pid, process) =
            by.map_or_else(|| ("-".to_owned(), "-".to_owned()), |by| (by.0.to_string(), by.1));
        // Bios of which no part is known may have taken the most of the time.
        let rest = sum.sum.saturating_sub(sum.parts.iter().sum());
        let largest = parts::largest(&known).filter(|&part| sum.parts[part] > rest);
        println!(
            "{pid:>7} {process:<15} {disk:<7} {operation:<5} {:>8} {:>10} {:>12} {:>10}    {}",
            sum.bios,
            sum.bytes / 1024,
            parts::ms(sum.sum),
            parts::ms(sum.max),
            largest.map_or("-", |part| NAMES[part])
        );
        stack.iter().for_each(|function| println!("=> {function}"));
    }
    Ok(())
}
