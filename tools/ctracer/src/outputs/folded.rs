//! Folded stacks: for each stack of traced functions, the time that was spent in the innermost one.
//! Any flame graph tool reads them.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    io::Write,
};

use anyhow::{Result, ensure};

use crate::report::TraceReport;

/// The bytes that all stacks may take. Calls that lie in each other have long ones, which are mostly the
/// same in each.
const STACKS: usize = 256 << 20;

/// A stack, by the one that it extends (`None`: it is a thread's) and what it adds.
type Place<'a> = (Option<usize>, Cow<'a, str>);

/// Writes a line `THREAD;FUNCTION;…;FUNCTION NANOSECONDS` for each stack, sorted by its text.
///
/// The time of a call whose return was not seen counts up to the last event within it.
pub fn write(w: &mut dyn Write, report: &TraceReport) -> Result<()> {
    let mut stacks = Stacks::default();
    let mut of_call: Vec<usize> = Vec::with_capacity(report.calls.len());
    let mut times: Vec<u64> = Vec::new();
    for call in &report.calls {
        let event = &report.events[call.entry];
        let outer = match call.parent {
            Some(parent) => of_call[parent],
            None => stacks.place(None, thread(&event.comm))?,
        };
        let stack = stacks.place(Some(outer), Cow::from(&event.function))?;
        of_call.push(stack);
        times.resize(stacks.texts.len(), 0);
        times[stack] = times[stack].saturating_add(call.own_time());
    }
    let with_time: HashSet<usize> = of_call.into_iter().collect();
    let mut sorted: BTreeMap<&str, u64> = BTreeMap::new();
    for stack in with_time {
        let time = sorted.entry(&stacks.texts[stack]).or_default();
        *time = time.saturating_add(times[stack]);
    }
    for (stack, time) in sorted {
        writeln!(w, "{stack} {time}")?;
    }
    Ok(())
}

/// All stacks, each one once.
#[derive(Default)]
struct Stacks<'a> {
    places: HashMap<Place<'a>, usize>,
    texts: Vec<String>,
    bytes: usize,
}

impl<'a> Stacks<'a> {
    fn place(&mut self, outer: Option<usize>, frame: Cow<'a, str>) -> Result<usize> {
        let next = self.texts.len();
        match self.places.entry((outer, frame)) {
            Entry::Occupied(known) => Ok(*known.get()),
            Entry::Vacant(new) => {
                let frame = &new.key().1;
                let text = match outer {
                    Some(outer) => format!("{};{frame}", self.texts[outer]),
                    None => frame.clone().into_owned(),
                };
                self.bytes += text.len();
                let most = STACKS >> 20;
                ensure!(
                    self.bytes <= STACKS,
                    "the stacks take more than {most} MiB: record fewer events"
                );
                self.texts.push(text);
                Ok(*new.insert(next))
            }
        }
    }
}

/// The frame of a thread: `;` ends a frame, and an empty one is none.
fn thread(name: &str) -> Cow<'_, str> {
    match name.trim() {
        "" => "?".into(),
        name if name.contains(';') => name.replace(';', "_").into(),
        name => name.into(),
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
