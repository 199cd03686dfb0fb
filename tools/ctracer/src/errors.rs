//! `--errors`: holds events back, until it is known whether anything failed.

use std::collections::HashSet;

use crate::{life::Life, record::Event};

/// At so many events, those of lives that ended well are dropped for the first time.
const FEW: usize = 20_000;

/// Events of lives that may turn out to have an error.
#[derive(Default)]
pub struct Held {
    events: Vec<Event>,
    /// By life.
    failed: Vec<bool>,
    /// The next time to drop events, in events.
    next: usize,
    /// The memory of the events, in bytes.
    pub memory: usize,
}

impl Held {
    /// Keeps an event. `present`: the lives of which more may come.
    pub fn add(&mut self, event: Event, is_error: bool, present: impl FnOnce() -> HashSet<usize>) {
        self.failed.resize(self.failed.len().max(event.life + 1), false);
        self.failed[event.life] |= is_error;
        self.memory += event.memory();
        self.events.push(event);
        if self.events.len() >= self.next.max(FEW) {
            let present = present();
            self.events.retain(|event| self.failed[event.life] || present.contains(&event.life));
            self.memory = self.events.iter().map(Event::memory).sum();
            self.next = 2 * self.events.len();
        }
    }

    /// The events of the lives that have an error, in their order, and those lives, which are numbered
    /// anew.
    pub fn take(mut self, lives: &[Life]) -> (Vec<Event>, Vec<Life>) {
        self.failed.resize(lives.len(), false);
        let (mut numbers, mut failed) = (vec![None; lives.len()], Vec::<Life>::new());
        for life in lives.iter().filter(|life| self.failed[life.life]) {
            numbers[life.life] = Some(failed.len());
            failed.push(Life { life: failed.len(), ..life.clone() });
        }
        for life in &mut failed {
            life.parent = life.parent.and_then(|parent| numbers[parent]);
            life.link = life.link.filter(|_| life.parent.is_some());
        }
        self.events.retain(|event| numbers[event.life].is_some());
        self.events.iter_mut().for_each(|event| event.life = numbers[event.life].unwrap_or(0));
        (self.events, failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample;

    fn held(error_at: Option<usize>) -> (Vec<usize>, Vec<Life>) {
        let (trace, mut held) = (sample(), Held::default());
        for (number, event) in trace.events.into_iter().enumerate() {
            held.add(event, error_at == Some(number), || HashSet::from([0, 1]));
        }
        let (events, lives) = held.take(&trace.lives);
        (events.iter().map(|event| event.life).collect(), lives)
    }

    #[test]
    fn lives_with_an_error_are_kept() {
        assert_eq!(held(None), (vec![], vec![]));
        let lives = sample().lives;
        let (events, kept) = held(Some(11));
        assert_eq!((events, kept.len()), (vec![0; 4], 1));
        // The clone is the first one now, and its parent is not shown.
        assert_eq!((kept[0].life, &kept[0].address), (0, &lives[1].address));
        assert_eq!((kept[0].parent, kept[0].link), (None, None));
        assert_eq!(held(Some(9)).0, [0; 8]);
    }

    #[test]
    fn lives_that_ended_well_are_dropped() {
        let (trace, mut held) = (sample(), Held::default());
        for number in 0..3 * FEW {
            held.add(trace.events[number % 12].clone(), false, HashSet::new);
        }
        assert!(held.events.len() < FEW && held.memory < FEW * 5_000, "{}", held.memory);
    }
}
