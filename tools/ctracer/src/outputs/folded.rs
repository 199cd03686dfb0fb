//! Folded stacks: for each stack of traced functions, the time that was spent in the innermost one.
//! Any flame graph tool reads them.

use std::{collections::BTreeMap, io::Write};

use anyhow::Result;

use crate::report::TraceReport;

/// Writes a line `THREAD;FUNCTION;…;FUNCTION NANOSECONDS` for each stack, sorted by its text.
///
/// The time of a call whose return was not seen counts up to the last event within it.
pub fn write(w: &mut dyn Write, report: &TraceReport) -> Result<()> {
    let mut stacks: Vec<String> = Vec::with_capacity(report.calls.len());
    let mut times: BTreeMap<String, u64> = BTreeMap::new();
    for call in &report.calls {
        let outer = match call.parent {
            Some(parent) => stacks[parent].as_str(),
            None => &thread(&report.events[call.entry].comm),
        };
        let stack = format!("{outer};{}", report.events[call.entry].function);
        let time = times.entry(stack.clone()).or_default();
        *time = time.saturating_add(call.own_time());
        stacks.push(stack);
    }
    for (stack, time) in times {
        writeln!(w, "{stack} {time}")?;
    }
    Ok(())
}

/// The frame of a thread: `;` ends a frame, and an empty one is none.
fn thread(name: &str) -> String {
    match name.trim() {
        "" => "?".to_owned(),
        name => name.replace(';', "_"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample;

    #[test]
    fn a_thread_is_a_frame() {
        assert_eq!(["", " ", "a;b", "kworker/0:1"].map(thread), ["?", "?", "a_b", "kworker/0:1"]);
    }

    #[test]
    fn each_stack_has_its_own_time() {
        let mut written = Vec::new();
        write(&mut written, &sample().report()).unwrap();
        let expected = "\
fio;submit_bio 200
fio;submit_bio;submit_bio_noacct 300
fio;submit_bio;submit_bio_noacct;bio_alloc_clone 50
fio;submit_bio;submit_bio_noacct;submit_bio_noacct 100
swapper/1;bio_endio 200
swapper/1;bio_endio;bio_endio 100
";
        assert_eq!(String::from_utf8(written).unwrap(), expected);
    }
}
