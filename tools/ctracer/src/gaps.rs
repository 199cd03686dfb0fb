//! Which part of an I/O's time lies between two steps of an object: wait, queue, device, end or mapper, as
//! `slow_io` divides it, or none of them.
//!
//! The functions tell. For a bio, the driver's start is not among them: from its request on, all is the
//! device's, the queue included. Of a request, all is known but what was before it.

use crate::record::{Event, Kind, Task, Trace};

/// The places of the parts in [`common::colours::PARTS`].
pub const WAIT: usize = 0;
pub const QUEUE: usize = 1;
pub const DEVICE: usize = 2;
pub const END: usize = 3;
pub const MAPPER: usize = 4;

/// What a function says about where its object is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Says {
    /// It is in this part from here on.
    In(usize),
    /// It still is where it was: a function that looks at what is queued.
    Still,
    /// The device is done with it.
    Done,
    /// Ties a part of a bio to the rest, which is its second argument: each part that completes calls the
    /// rest's completion.
    Ties,
}
use Says::*;

/// What is known of functions. A `*` at the end stands for anything.
const SAID: &[(&str, Says, &[&str])] = &[
    ("bio", In(WAIT), &["submit_bio", "submit_bio_noacct*", "__submit_bio*", "blk_mq_submit_bio"]),
    // The limit of a cgroup.
    ("bio", In(WAIT), &["__blk_throtl_bio", "throtl_*", "tg_*", "blk_cgroup_bio_start"]),
    ("bio", In(WAIT), &["blk_mq_attempt_bio_merge", "blk_attempt_plug_merge"]),
    ("bio", In(WAIT), &["blk_mq_sched_bio_merge", "__rq_qos_throttle", "wbt_wait"]),
    // Its request has been made, or it is merged into one.
    ("bio", In(DEVICE), &["__rq_qos_track", "wbt_track", "blk_mq_bio_to_request"]),
    ("bio", In(DEVICE), &["__rq_qos_merge"]),
    ("bio", Still, &["bio_seg_gap"]),
    ("bio", Done, &["bio_endio"]),
    ("bio", Ties, &["bio_chain"]),
    ("bio", In(MAPPER), &["dm_submit_bio*", "__map_bio", "clone_endio", "md_submit_bio"]),
    ("request", In(QUEUE), &["blk_rq_init", "blk_mq_rq_late_init", "__rq_qos_track", "wbt_track"]),
    ("request", In(QUEUE), &["blk_add_rq_to_plug", "blk_mq_insert_request*"]),
    ("request", In(QUEUE), &["blk_mq_sched_insert_request"]),
    ("request", In(DEVICE), &["blk_mq_start_request"]),
    ("request", In(QUEUE), &["blk_mq_requeue_request", "__blk_mq_requeue_request"]),
    ("request", In(END), &["blk_mq_end_request", "__blk_mq_end_request", "blk_update_request"]),
    // Where one of the above was missed, or a batch completes.
    ("request", In(END), &["blk_stat_add", "blk_mq_finish_request", "nvme_complete_batch_req"]),
    ("request", In(END), &["__rq_qos_done", "blk_mq_free_request", "__blk_mq_free_request"]),
];

/// When it returns, its bio has a request, or is merged into one, or has completed.
const MAKES: &str = "blk_mq_submit_bio";

/// An event, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub function: usize,
    pub life: usize,
    pub kind: Kind,
    pub time: u64,
    pub task: Task,
    pub depth: u32,
    pub argument: u8,
}

impl From<&Event> for Step {
    fn from(event: &Event) -> Step {
        let Event { number: function, life, kind, time, depth, argument, .. } = *event;
        Step { function, life, kind, time, task: event.task(), depth, argument }
    }
}

/// A part that an object leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left {
    pub part: usize,
    /// How long it was there, and the function with which that began.
    pub time: u64,
    pub since: usize,
}

/// Where an object is.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    part: Option<usize>,
    /// When that began, and with which function.
    since: (u64, usize),
    /// The call that said so, while it has not returned: what lies in it belongs to it.
    call: Option<(Task, u32)>,
    /// Parts of it were tied to it.
    is_tied: bool,
    is_done: bool,
}

/// Follows all objects of a trace, event by event.
#[derive(Default)]
pub struct Gaps {
    /// Of each function.
    said: Vec<Option<Says>>,
    makes: Option<usize>,
    is_request: bool,
    places: Vec<Place>,
}

impl Gaps {
    pub fn new(trace: &Trace) -> Gaps {
        let says = |name: &str| {
            let is_it = |known: &str| match known.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => known == name,
            };
            let mut own = SAID.iter().filter(|(of, ..)| *of == trace.type_name);
            own.find(|(.., names)| names.iter().any(|known| is_it(known))).map(|of| of.1)
        };
        let mut functions = trace.functions.iter();
        Gaps {
            said: trace.functions.iter().map(|function| says(&function.name)).collect(),
            makes: functions.position(|f| trace.type_name == "bio" && f.name == MAKES),
            is_request: trace.type_name == "request",
            places: Vec::new(),
        }
    }

    /// Takes the next event. Returns the part that the gap before it is, back to the event of its object
    /// before; and the part that the object leaves with it.
    pub fn take(&mut self, step: Step) -> (Option<usize>, Option<Left>) {
        let says = self.said.get(step.function).copied().flatten();
        if self.places.len() <= step.life {
            self.places.resize(step.life + 1, Place::default());
        }
        let place = &mut self.places[step.life];
        if self.is_request {
            return of_request(place, says, step);
        }
        let is_entry = step.kind == Kind::Entry;
        let is_within = place.call.is_some_and(|(task, depth)| {
            step.task == task && (step.depth > depth || !is_entry && step.depth == depth)
        });
        if is_entry {
            return enter(place, says, step, is_within);
        }
        let gap = place.part.filter(|_| is_within);
        let returns = place.call == Some((step.task, step.depth));
        if returns {
            place.call = None;
        }
        let left = match place.part {
            Some(MAPPER) if returns => {
                let left = place.left(MAPPER, step);
                place.part = None;
                Some(left)
            }
            Some(WAIT) if Some(step.function) == self.makes => place.go(DEVICE, step),
            _ => None,
        };
        (gap, left)
    }

    /// The memory of this, in bytes.
    pub fn memory(&self) -> usize {
        self.places.len() * size_of::<Place>()
    }
}

impl Place {
    /// The object gets to a part. Returns the one that it leaves.
    fn go(&mut self, part: usize, step: Step) -> Option<Left> {
        let old = self.part.filter(|&old| old != part);
        let left = old.map(|old| self.left(old, step));
        if self.part != Some(part) {
            (self.part, self.since) = (Some(part), (step.time, step.function));
        }
        left
    }

    fn left(&self, part: usize, step: Step) -> Left {
        let (began, since) = self.since;
        Left { part, time: step.time.saturating_sub(began), since }
    }
}

/// A request is in the queue until it is started, in the device until it completes.
fn of_request(place: &mut Place, says: Option<Says>, step: Step) -> (Option<usize>, Option<Left>) {
    let gap = place.part;
    match says {
        Some(In(part)) if step.kind == Kind::Entry => (gap, place.go(part, step)),
        _ => (gap, None),
    }
}

/// A bio is passed to a function.
fn enter(
    place: &mut Place,
    says: Option<Says>,
    step: Step,
    is_within: bool,
) -> (Option<usize>, Option<Left>) {
    let gap = match (place.part, says) {
        (Some(DEVICE), Some(Done)) => Some(DEVICE),
        // Completed before: a part of it, or its checksums were still to be verified.
        (None, Some(Done)) if place.is_done => Some(if place.is_tied { DEVICE } else { END }),
        (_, Some(Done)) => None,
        (part, Some(In(_) | Still)) => part,
        (part, _) => part.filter(|_| is_within),
    };
    match says {
        Some(In(part)) => {
            let stays = place.part == Some(part) || (place.part, part) == (Some(WAIT), DEVICE);
            if !(is_within && stays) {
                place.call = Some((step.task, step.depth));
            }
            place.is_done = false;
            (gap, place.go(part, step))
        }
        Some(Done) => {
            let left = gap.map(|part| place.left(part, step));
            let since = (step.time, step.function);
            *place = Place { part: None, since, call: None, is_done: true, ..*place };
            (gap, left)
        }
        Some(Ties) => {
            place.is_tied |= step.argument == 1;
            (gap, None)
        }
        _ => (gap, None),
    }
}

/// The part of each gap, in the order of the events that they lie before; and of each object, where it still
/// is after its last one.
pub fn of(trace: &Trace, events: &[Event]) -> (Vec<Option<usize>>, Vec<Option<usize>>) {
    let mut gaps = Gaps::new(trace);
    let found = events.iter().map(|event| gaps.take(event.into()).0).collect();
    // Without functions that complete it, each one would stay where it was seen last.
    let completes = gaps.said.iter().any(|says| [Some(Done), Some(In(END))].contains(says));
    (found, gaps.places.iter().map(|place| place.part.filter(|_| completes)).collect())
}

#[cfg(test)]
mod tests;
