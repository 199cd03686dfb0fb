//! `--errors`: holds events back, until it is known whether anything failed.

use crate::{
    decode::Layout,
    lives::Rules,
    model::{Event, Kind, Life, Trace},
};

/// At so many events, those of lives that ended well are dropped for the first time.
const FEW: usize = 20_000;

/// An event, and of a return, when the call began.
type Timed = (Event, Option<u64>);

/// Events of lives that may turn out to have an error.
pub struct Held {
    events: Vec<Timed>,
    /// By life.
    failed: Vec<bool>,
    /// The next time to drop events, in events.
    next: usize,
    /// Where a bio has its status, and for each function, whether it completes a bio.
    status: Option<usize>,
    completes: Vec<bool>,
    /// The memory of the events, in bytes.
    pub memory: usize,
}

impl Held {
    /// For events of this trace's functions.
    pub fn new(layout: &Layout, rules: &Rules, trace: &Trace) -> Held {
        let completes = |name: &str| rules.completes(name);
        Held {
            events: Vec::new(),
            failed: Vec::new(),
            next: FEW,
            status: layout.position("bi_status"),
            completes: trace.functions.iter().map(|found| completes(&found.name)).collect(),
            memory: 0,
        }
    }

    /// Whether an event says that something failed: a negative error number or an error in place of a
    /// pointer is returned, a status other than 0 is passed on, or a bio is completed with one. At
    /// other times, a bio's memory may still hold the status of the one before.
    fn is_error(&self, trace: &Trace, event: &Event) -> bool {
        let function = &trace.functions[event.function];
        let fails = match event.kind {
            Kind::Return { value } => function.returns.error(value).is_some(),
            Kind::Entry => {
                let mut statuses = function.others.iter().filter(|other| other.is_status);
                statuses.any(|other| event.registers[other.register] & 0xff != 0)
            }
        };
        let status = self.status.filter(|_| self.completes[event.function]);
        fails || status.is_some_and(|at| event.bytes.get(at).is_some_and(|&status| status != 0))
    }

    /// Keeps an event. `is_there`: whether the object of a life is still at its address.
    pub fn add(
        &mut self,
        trace: &Trace,
        event: Event,
        began: Option<u64>,
        is_there: impl Fn(usize) -> bool,
    ) {
        self.failed.resize(trace.lives.len(), false);
        self.failed[event.life] |= self.is_error(trace, &event);
        self.memory += event.memory();
        self.events.push((event, began));
        if self.events.len() >= self.next {
            self.events.retain(|(event, _)| self.failed[event.life] || is_there(event.life));
            self.memory = self.events.iter().map(|(event, _)| event.memory()).sum();
            self.next = FEW.max(2 * self.events.len());
        }
    }

    /// The events of the lives that have an error, in their order, and those lives, which are numbered
    /// anew; how many others there were.
    pub fn take(&mut self, lives: &[Life]) -> (Vec<Timed>, Vec<Life>, usize) {
        self.failed.resize(lives.len(), false);
        let numbers = self.failed.iter().scan(0, |next, &failed| {
            *next += usize::from(failed);
            Some(failed.then(|| *next - 1))
        });
        let numbers: Vec<Option<usize>> = numbers.collect();
        let mut events = std::mem::take(&mut self.events);
        events.retain_mut(|(event, _)| {
            let number = numbers[event.life];
            event.life = number.unwrap_or(0);
            number.is_some()
        });
        let kept = |(life, number): (&Life, &Option<usize>)| {
            let parent = |(parent, link)| Some((numbers[parent]?, link));
            number.map(|_| Life { parent: life.parent.and_then(parent), ..life.clone() })
        };
        let kept: Vec<Life> = lives.iter().zip(&numbers).filter_map(kept).collect();
        let others = lives.len() - kept.len();
        (events, kept, others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{calls::tests::sample, decode::tests::layout, lives::rules, value::Scalar};

    fn taken(trace: &Trace) -> (Vec<usize>, Vec<Life>, usize) {
        let mut held = Held::new(&layout("bio"), rules("bio"), trace);
        for event in &trace.events {
            held.add(trace, event.clone(), None, |_| true);
        }
        let (events, lives, others) = held.take(&trace.lives);
        (events.iter().map(|(event, _)| event.life).collect(), lives, others)
    }

    #[test]
    fn lives_with_an_error_are_kept() {
        let mut trace = sample();
        assert_eq!(taken(&trace), (vec![], vec![], 2));
        // The clone, which is the second life, is completed with a status.
        let at = layout("bio").position("bi_status").unwrap();
        trace.events[11].bytes[at] = 10;
        let (events, lives, others) = taken(&trace);
        assert_eq!((events, lives.len(), others), (vec![0; 4], 1, 1));
        assert_eq!((lives[0].address, lives[0].parent), (trace.lives[1].address, None));
        // Elsewhere, a status is not this life's.
        trace.events[11].bytes[at] = 0;
        trace.events[0].bytes[at] = 10;
        assert_eq!(taken(&trace).0.len(), 0);
        // A function returns an error: the value in the sample is 7.
        trace.functions[0].returns = Scalar::Signed(32);
        assert_eq!(taken(&trace).0.len(), 0);
        trace.events[9].kind = Kind::Return { value: 0xffff_fffb };
        assert_eq!(taken(&trace).0, [0; 8]);
    }

    #[test]
    fn lives_that_ended_well_are_dropped() {
        let trace = sample();
        let mut held = Held::new(&layout("bio"), rules("bio"), &trace);
        for number in 0..3 * FEW {
            held.add(&trace, trace.events[number % 12].clone(), None, |_| false);
        }
        assert!(held.events.len() < FEW && held.memory < FEW * 1_000, "{}", held.memory);
    }
}
