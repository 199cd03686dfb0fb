//! From the ring buffer's bytes to events in the order of their times.

use std::{cell::RefCell, collections::HashMap, ops::Deref, rc::Rc, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use plain::Plain;

use crate::record::{Kind, Task};

/// What stands before the object's bytes: `struct event` of `trace.bpf.c`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Header {
    /// ns, CLOCK_MONOTONIC.
    pub time: u64,
    pub address: u64,
    /// What the function returned, at a return.
    pub value: u64,
    /// Identifies the call as long as it has not returned: the stack pointer at the entry, and in the
    /// lowest bits, how many of the calls before had the same one.
    pub stack: u64,
    pub function: u32,
    pub cpu: u32,
    pub tgid: u32,
    pub tid: u32,
    /// 0: a call; 1: a return; 2: an end that only the fentry program has seen.
    pub what: u32,
    /// Which object of the call.
    pub object: u32,
    readable: u64,
    /// Of the arguments, at a call.
    pub registers: [u64; 6],
    comm: [i8; 16],
}

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for Header {}

/// One object of one call, as the kernel reported it.
#[derive(Clone, Debug, Default)]
pub struct Raw {
    pub header: Header,
    /// The object's bytes; empty where they could not be read.
    pub bytes: Box<[u8]>,
}

impl Deref for Raw {
    type Target = Header;

    fn deref(&self) -> &Header {
        &self.header
    }
}

impl Raw {
    fn parse(bytes: &[u8]) -> Option<Raw> {
        let mut header = Header::default();
        header.copy_from_bytes(bytes).ok()?;
        let bytes = bytes.get(size_of::<Header>()..).filter(|_| header.readable != 0);
        Some(Raw { header, bytes: bytes.unwrap_or_default().into() })
    }

    /// Whether the function was called or has returned.
    pub fn kind(&self) -> Kind {
        if self.what == 1 { Kind::Return } else { Kind::Entry }
    }

    /// Whether it is no event, but says that the object's life ends in this call: its probe was skipped.
    pub fn is_end(&self) -> bool {
        self.what == 2
    }

    /// The thread's name. What a thread calls itself must not move the cursor.
    pub fn comm(&self) -> String {
        common::text(&self.comm)
    }

    /// The thread; every CPU has an idle thread of its own.
    pub fn task(&self) -> Task {
        (self.tid, if self.tid == 0 { self.cpu } else { 0 })
    }
}

/// CPUs write into the ring buffer side by side: an event may come after one that is younger by less
/// than this.
const DISORDER: u64 = 10_000_000;

/// How many events are taken from the ring buffer at a time, at most, and how many bytes. Without a
/// bound, a load that writes as fast as they are read would keep the reader busy for ever, and fill the
/// memory.
const BATCH: usize = 10_000;
const BATCH_BYTES: usize = 8 << 20;

/// The events that have come, and those that are old enough to be passed on.
pub struct Reader<'a> {
    ring: RingBuffer<'a>,
    waiting: Rc<RefCell<Vec<Raw>>>,
    batch: usize,
}

impl<'a> Reader<'a> {
    /// Reads this ring buffer, whose events have `size` bytes of an object.
    pub fn new(map: &'a dyn MapCore, size: usize) -> Result<Reader<'a>> {
        let waiting = Rc::<RefCell<Vec<Raw>>>::default();
        let (mut builder, coming) = (RingBufferBuilder::new(), Rc::clone(&waiting));
        let take = move |bytes: &[u8]| {
            coming.borrow_mut().extend(Raw::parse(bytes));
            0
        };
        builder.add(map, take).context("the ring buffer")?;
        let batch = (BATCH_BYTES / (size + size_of::<Raw>())).clamp(1, BATCH);
        Ok(Reader { ring: builder.build().context("the ring buffer")?, waiting, batch })
    }

    /// Takes a batch of events. False where there are no more.
    fn consume(&self) -> Result<bool> {
        let taken = self.ring.consume_raw_n(self.batch);
        ensure!(taken >= 0, "the ring buffer: {}", std::io::Error::from_raw_os_error(-taken));
        Ok(taken as usize == self.batch)
    }

    /// Returns the events that no older one can follow, in order; waits a moment where none have come.
    ///
    /// The program does not wake up the reader: that would cost more than the rest of the event, and
    /// make events of its own where the struct is a task_struct.
    pub fn poll(&self) -> Result<Vec<Raw>> {
        let before = self.waiting.borrow().len();
        if !self.consume()? {
            thread::sleep(Duration::from_millis(20));
        }
        let mut events = self.waiting.take();
        events.sort_by_key(|event| event.time);
        let newest = events.last().map_or(0, |event| event.time);
        // Where nothing has come since, what was written earlier is here.
        let bound = if events.len() == before { newest } else { newest.saturating_sub(DISORDER) };
        let young = events.split_off(events.partition_point(|event| event.time <= bound));
        self.waiting.replace(young);
        Ok(events)
    }

    /// All events that are left.
    pub fn rest(&self) -> Result<Vec<Raw>> {
        while self.consume()? {}
        let mut rest = self.waiting.take();
        rest.sort_by_key(|event| event.time);
        Ok(rest)
    }
}

/// Where an event belongs.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The call: they are numbered in the order in which they began.
    pub call: usize,
    /// How many traced calls of the same thread it lies in.
    pub depth: u32,
    pub began: u64,
    pub life: usize,
}

/// A call that has not returned: its number, stack pointer, function, beginning, address and life of each
/// of its objects, and how many of them have returned.
struct Open {
    call: usize,
    stack: u64,
    function: u32,
    began: u64,
    objects: Vec<(u64, usize)>,
    returned: usize,
}

/// The traced calls that every thread is in.
#[derive(Default)]
pub struct Calls {
    threads: HashMap<Task, Vec<Open>>,
    count: usize,
}

/// Kernel stacks have 16 KiB and begin at a multiple of it.
const STACK_SIZE: u64 = 16 << 10;

impl Calls {
    /// A call, and its objects so far: a second one belongs to the call of the first.
    pub fn enter(&mut self, event: &Raw, life: usize) -> (Place, &[(u64, usize)]) {
        let calls = self.threads.entry(event.task()).or_default();
        let (stack, function, began) = (event.stack, event.function, event.time);
        // What lies deeper in the same stack has returned, and the return was lost. Of calls with the
        // same stack pointer, those with a higher number in the lowest bits are deeper.
        let is_gone = |open: &Open| {
            open.stack / STACK_SIZE == stack / STACK_SIZE && open.stack ^ 7 <= stack ^ 7
        };
        // The events of a call have one time. At another one, it is the function's next call: the return
        // of the one before was lost, and the next one's first object is filtered out.
        let is_same = |open: &Open| open.is(event) && open.began == began;
        let is_further = event.object > 0 && calls.last().is_some_and(is_same);
        if !is_further {
            while calls.last().is_some_and(is_gone) {
                calls.pop();
            }
            let (call, objects) = (self.count, Vec::with_capacity(1));
            calls.push(Open { call, stack, function, began, objects, returned: 0 });
            self.count += 1;
        }
        let depth = calls.len() - 1;
        let open = &mut calls[depth];
        open.objects.push((event.address, life));
        (Place { call: open.call, depth: depth as u32, began: open.began, life }, &open.objects)
    }

    /// A return. The call has ended when all its objects have returned.
    pub fn leave(&mut self, event: &Raw) -> Option<Place> {
        let calls = self.threads.get_mut(&event.task())?;
        let depth = calls.iter().rposition(|open| open.is(event))?;
        let open = &mut calls[depth];
        open.returned += 1;
        let life = open.objects.iter().find(|(address, _)| *address == event.address);
        let (call, began, has_ended) = (open.call, open.began, open.returned >= open.objects.len());
        let place = life.map(|&(_, life)| Place { call, depth: depth as u32, began, life });
        calls.truncate(depth + usize::from(!has_ended));
        if calls.is_empty() {
            self.threads.remove(&event.task());
        }
        place
    }

    /// How many calls have not returned.
    pub fn open(&self) -> usize {
        self.threads.values().map(Vec::len).sum()
    }
}

impl Open {
    fn is(&self, event: &Raw) -> bool {
        self.stack == event.stack && self.function == event.function
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(time: u64, what: u32, object: u32) -> Raw {
        let address = 0xff00 + u64::from(object);
        let header = Header { time, what, object, address, tid: 1, stack: 64, ..Header::default() };
        Raw { header, bytes: Box::default() }
    }

    #[test]
    fn a_second_object_comes_at_the_time_of_the_first() {
        let mut calls = Calls::default();
        assert_eq!(calls.enter(&event(10, 0, 0), 0).0.call, 0);
        assert_eq!(calls.enter(&event(10, 0, 1), 1).0.call, 0);
        // The return is lost, and of the next call, only the second object passes the filter.
        let next = calls.enter(&event(20, 0, 1), 1).0;
        assert_eq!((next.call, next.depth, next.began), (1, 0, 20));
        let place = calls.leave(&event(30, 1, 1)).unwrap();
        assert_eq!((place.call, place.began, calls.open()), (1, 20, 0));
    }
}
