//! The rules of lives: which events belong to one object. Addresses are used again, and objects come
//! from other ones.
//!
//! A life is in a state, which is a set of bits. What a call does to it is an [`Effect`]: in which
//! states the call is the first one of another life, and which bits the call and its return set. The
//! tables below name the functions that do anything. Two programs carry an effect out: [`Lives`], of
//! all events, and `trace.bpf.c`, where a filter has to know before an event is recorded; it gets
//! each function's effect with its cookie.

use std::collections::HashMap;

use crate::{
    life::{Life, Link},
    value::hex,
};

/// What a function does to the life of an object.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    /// Initialises it: always a new life.
    Begin,
    /// Prepares it for work: a new life where the one before is complete.
    Prepare,
    /// Lets its work begin: a new life where the one before is complete, or where the call that completes
    /// it has not returned.
    Start,
    /// Sees every object once: at the second time, the end of the life before was missed.
    Once,
    /// Completes it; its owner may still look at it.
    Complete,
    /// Frees it: what comes at this address afterwards is a new life.
    Free,
    /// Makes another object of it, and returns that.
    Make(Link),
    /// Ties two of its arguments: the first one is the child of the second.
    Tie(Link),
}
use Does::*;

/// What is known about types, and about their functions; about most of them, nothing.
const RULES: &[(&str, Does, &[&str])] = &[
    ("bio", Begin, &["bio_init", "bio_reset"]),
    ("bio", Prepare, &["bio_add_page", "bio_add_folio", "__bio_add_page"]),
    ("bio", Prepare, &["bio_iov_iter_get_pages", "guard_bio_eod", "submit_bio", "submit_bio_wait"]),
    ("bio", Prepare, &["bio_associate_blkg", "bio_associate_blkg_from_css"]),
    ("bio", Prepare, &["bio_clone_blkg_association", "bio_init_clone", "__bio_clone"]),
    ("bio", Start, &["submit_bio"]),
    ("bio", Once, &["submit_bio"]),
    ("bio", Complete, &["bio_endio", "bio_uninit"]),
    ("bio", Free, &["bio_free"]),
    ("bio", Make(Link::Clone), &["bio_alloc_clone"]),
    ("bio", Make(Link::Split), &["bio_split"]),
    ("bio", Tie(Link::Clone), &["bio_init_clone", "__bio_clone"]),
    ("bio", Tie(Link::Chain), &["bio_chain"]),
    ("request", Begin, &["blk_rq_init"]),
    // Before these, the kernel does not set the time.
    ("request", Prepare, &["blk_mq_rq_late_init", "__rq_qos_track", "wbt_track"]),
    ("request", Start, &["blk_mq_start_request"]),
    ("request", Complete, &["blk_mq_end_request", "__blk_mq_end_request", "blk_mq_finish_request"]),
    // blk_mq_end_request_batch() takes no request: of a batch, these are told.
    ("request", Complete, &["nvme_complete_batch_req", "__rq_qos_done"]),
    ("request", Free, &["blk_mq_free_request", "__blk_mq_free_request"]),
    ("inode", Begin, &["inode_init_always", "inode_init_always_gfp"]),
    ("inode", Free, &["destroy_inode", "__destroy_inode"]),
    // Most folios are freed in batches, by functions that take none: the next use tells.
    ("folio", Once, &["filemap_add_folio", "folio_add_new_anon_rmap"]),
    ("folio", Free, &["__folio_put", "__folio_put_small"]),
    ("sk_buff", Free, &["kfree_skbmem", "__kfree_skb"]),
    ("task_struct", Once, &["wake_up_new_task"]),
    ("task_struct", Free, &["free_task"]),
];

/// The field that says when an object was made, where the type has one: another time is another life.
/// It is set a little later than an object begins.
const MADE: &[(&str, &str)] = &[("request", "start_time_ns")];

/// The bits of a state.
const KNOWN: u16 = 1; // has been passed to a function
const SEEN: u16 = 2; // to one that sees every object once
const COMPLETING: u16 = 4; // a call that completes or frees it has begun
const COMPLETED: u16 = 8; // and has returned
const FREED: u16 = 16;

/// The state of a life whose end only an fentry program has seen, as far as it differs from before.
pub const END_MISSED: u16 = COMPLETING | COMPLETED;

/// What a function does to the lives of its objects.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Effect {
    /// In a life with one of these bits, the call is the first one of another life.
    begins_if: u16,
    /// The bits that the call sets.
    at_call: u16,
    /// The bits that its return sets, where it is still the life of the call.
    at_return: u16,
    /// It initialises its object.
    pub begins: bool,
    /// The object may still say when the one before it was made.
    too_early: bool,
    makes: Option<Link>,
    ties: Option<Link>,
}

impl Effect {
    /// What remains of an effect for a call's other objects than the first one.
    pub const OF_OTHERS: u16 = FREED | SEEN | (KNOWN | SEEN) << 5;

    fn of_others(self) -> Effect {
        let (begins_if, at_call) = (self.begins_if & (FREED | SEEN), self.at_call & (KNOWN | SEEN));
        Effect { begins_if, at_call, at_return: 0, ..self }
    }

    /// As it stands in the highest bits of a cookie.
    pub fn cookie(self) -> u64 {
        let sets = self.begins_if | self.at_call << 5 | self.at_return << 10;
        u64::from(sets) << 48 | u64::from(self.too_early) << 47
    }

    /// Whether the call completes or frees its object.
    pub fn ends(self) -> bool {
        self.at_return != 0
    }
}

/// The rules of a type, by its name.
pub struct Rules<'a>(pub &'a str);

impl Rules<'_> {
    /// What a call of a function does.
    pub fn effect(&self, function: &str) -> Effect {
        let mut effect = Effect { begins_if: FREED, at_call: KNOWN, ..Effect::default() };
        let own = RULES.iter().filter(|(of, _, names)| *of == self.0 && names.contains(&function));
        for (_, does, _) in own {
            match *does {
                Begin => {
                    effect.begins = true;
                    effect.begins_if |= KNOWN;
                }
                Prepare => effect.begins_if |= COMPLETED,
                Start => effect.begins_if |= COMPLETING,
                Once => {
                    effect.begins_if |= SEEN;
                    effect.at_call |= SEEN;
                }
                Complete | Free => {
                    effect.at_call |= COMPLETING;
                    effect.at_return |= COMPLETED | if *does == Free { FREED } else { 0 };
                }
                Make(link) => effect.makes = Some(link),
                Tie(link) => effect.ties = Some(link),
            }
            effect.too_early |= [Begin, Prepare].contains(does);
        }
        effect
    }

    /// Whether they tell the first event of a life.
    pub fn tell_the_first_event(&self) -> bool {
        RULES.iter().any(|(of, does, _)| (*of, *does) == (self.0, Start))
    }

    /// The field that says when an object was made.
    pub fn made(&self) -> Option<&'static str> {
        MADE.iter().find(|(of, _)| *of == self.0).map(|(_, field)| *field)
    }
}

/// The object that has an address now.
#[derive(Default)]
struct Current {
    life: usize,
    state: u16,
    /// When the object was made, and the one before it; 0: not known.
    made: [u64; 2],
    bytes: Box<[u8]>,
}

/// All lives so far.
#[derive(Default)]
pub struct Lives {
    /// Of each function.
    effects: Vec<Effect>,
    /// The bytes of all objects in `current`.
    held: usize,
    current: HashMap<u64, Current>,
    /// The lives, in the order in which they began.
    pub lives: Vec<Life>,
}

impl Lives {
    /// For events of functions with these effects.
    pub fn new(effects: Vec<Effect>) -> Lives {
        Lives { effects, ..Lives::default() }
    }

    fn start(&mut self, address: u64, time: u64) -> usize {
        let life = self.lives.len();
        let before = self.current.remove(&address);
        let generation = before.as_ref().map_or(0, |old| self.lives[old.life].generation + 1);
        let made = before.as_ref().map_or(0, |old| old.made[0]);
        self.held -= before.map_or(0, |old| old.bytes.len());
        let (text, begin) = (hex(address), time);
        self.lives.push(Life { life, address: text, generation, begin, ..Life::default() });
        self.current.insert(address, Current { life, made: [0, made], ..Current::default() });
        life
    }

    /// The life of an object that is passed to a function. `made`: the time at which it was made, as
    /// the object says; 0 where it does not.
    pub fn enter(
        &mut self,
        function: usize,
        object: usize,
        address: u64,
        time: u64,
        made: u64,
    ) -> usize {
        let effect = self.effects[function];
        let effect = if object > 0 { effect.of_others() } else { effect };
        let made = if effect.too_early { 0 } else { made };
        let is_new = |now: &Current| {
            let is_other = made != 0 && now.made[0] != 0 && made != now.made[0];
            now.state & effect.begins_if != 0 || is_other
        };
        if self.current.get(&address).is_none_or(is_new) {
            self.start(address, time);
        }
        let current = self.current.entry(address).or_default();
        // The object before has left its time in the memory.
        if made != current.made[1] && current.made[0] == 0 {
            current.made[0] = made;
        }
        current.state |= effect.at_call;
        let life = current.life;
        if effect.ends() {
            self.end(life, time);
        }
        life
    }

    fn end(&mut self, life: usize, time: u64) {
        let life = &mut self.lives[life];
        // Events of two CPUs may come in the wrong order, and none ends before it begins.
        let time = time.max(life.begin);
        (life.end, life.duration) = (Some(time), Some(time - life.begin));
    }

    /// The end of an object whose call was not seen. False where it has ended already, or is not known.
    pub fn end_again(&mut self, address: u64, time: u64) -> bool {
        let known = self.current.get_mut(&address).filter(|now| now.state & COMPLETING == 0);
        let Some(current) = known else { return false };
        current.state |= END_MISSED;
        let life = current.life;
        self.end(life, time);
        true
    }

    /// A call ties its objects, as soon as both are known.
    pub fn tie(&mut self, function: usize, lives: &[(u64, usize)]) {
        if let (Some(link), [(_, child), (_, parent), ..]) = (self.effects[function].ties, lives) {
            self.link(*child, *parent, link);
        }
    }

    /// A function returns that was called at `began`, and to which the object of this life was passed.
    pub fn leave(
        &mut self,
        function: usize,
        (address, life): (u64, usize),
        value: u64,
        (began, time): (u64, u64),
    ) {
        let Effect { at_call, at_return, makes, .. } = self.effects[function];
        let current = self.current.get_mut(&address).filter(|current| current.life == life);
        if let Some(current) = current.filter(|current| current.state & at_call == at_call) {
            current.state |= at_return;
            if at_return & FREED != 0 {
                self.end(life, time);
            }
        }
        // NULL and error codes are no pointers.
        if let Some(link) = makes.filter(|_| (value as i64) < -4095) {
            // What it has made is no older than the call: where it seems to be, its beginning was missed.
            let now = self.current.get(&value).filter(|now| now.state & FREED == 0);
            let made = now.map(|now| now.life).filter(|&life| self.lives[life].begin >= began);
            let child = made.unwrap_or_else(|| self.start(value, time));
            self.link(child, life, link);
        }
    }

    /// A split clones first, and chains afterwards: it remains a split.
    fn link(&mut self, child: usize, parent: usize, link: Link) {
        let known = self.lives[child].parent.is_some();
        if child != parent && (!known || link == Link::Split) {
            self.lives[child].parent = Some(parent);
            self.lives[child].link = Some(link);
        }
    }

    /// The bytes of this life's event before, in exchange for those of now. `None` where there are none
    /// now: the object cannot be read, or the memory belongs to another one by now.
    pub fn replace_bytes(
        &mut self,
        address: u64,
        life: usize,
        bytes: &[u8],
    ) -> Option<Option<Box<[u8]>>> {
        let current = self.current.get_mut(&address)?;
        if current.life != life || current.state & FREED != 0 || bytes.is_empty() {
            return None;
        }
        let before = std::mem::replace(&mut current.bytes, bytes.into());
        self.held = self.held + bytes.len() - before.len();
        Some((!before.is_empty()).then_some(before))
    }

    /// The memory that all this takes, in bytes.
    pub fn memory(&self) -> usize {
        const LIFE: usize = size_of::<Life>() + 32; // its address
        self.held + self.current.len() * size_of::<(u64, Current)>() + self.lives.len() * LIFE
    }

    /// Whether a function completes or frees its object.
    pub fn completes(&self, function: usize) -> bool {
        self.effects[function].ends()
    }

    /// The lives of the objects that are at an address now: no other one has come there.
    pub fn present(&self) -> impl Iterator<Item = usize> {
        self.current.values().map(|current| current.life)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0xffff_8880_0000_1000;
    const B: u64 = 0xffff_8880_0000_2000;

    fn lives_of(type_name: &str, names: &[&str]) -> Lives {
        Lives::new(names.iter().map(|name| Rules(type_name).effect(name)).collect())
    }

    fn leave(lives: &mut Lives, function: usize, life: usize, value: u64, began: u64, time: u64) {
        let address = lives.lives[life].address.trim_start_matches("0x");
        let address = u64::from_str_radix(address, 16).unwrap();
        lives.leave(function, (address, life), value, (began, time));
    }

    #[test]
    fn a_reused_address_is_another_life() {
        let mut lives = lives_of("bio", &["submit_bio", "bio_endio", "bio_put", "bio_free"]);
        let mut call = |function, time| {
            let life = lives.enter(function, 0, A, time, 0);
            leave(&mut lives, function, life, 0, time, time + 1);
            life
        };
        assert_eq!([call(0, 1), call(1, 3), call(2, 5), call(3, 7)], [0; 4]);
        assert_eq!([call(0, 11), call(1, 13)], [1; 2], "freed before");
        assert_eq!([call(0, 21), call(2, 23)], [2; 2], "completed before");
        assert_eq!([call(0, 31), call(2, 33)], [3; 2], "submitted before");
        assert_eq!(lives.lives[0].end, Some(8));
        let Life { generation, begin, end, parent, .. } = lives.lives[1];
        assert_eq!((generation, begin, end, parent), (1, 11, Some(13), None));
        assert_eq!((lives.lives[2].generation, lives.lives[2].end), (2, None));
    }

    #[test]
    fn an_end_may_be_seen_without_its_call() {
        let mut lives = lives_of("bio", &["submit_bio"]);
        for (again, time) in [(0, 1), (1, 11)] {
            let life = lives.enter(0, 0, A, time, 0);
            leave(&mut lives, 0, life, 0, time, time + 1);
            assert_eq!(life, again);
            assert!(!lives.end_again(B, time + 2));
            assert!(lives.end_again(A, time + 3));
            assert!(!lives.end_again(A, time + 4));
            assert_eq!(lives.lives[life].end, Some(time + 3));
        }
    }

    #[test]
    fn no_life_ends_before_it_begins() {
        let mut lives = lives_of("bio", &["submit_bio"]);
        let life = lives.enter(0, 0, A, 10, 0);
        assert!(lives.end_again(A, 5), "events of two CPUs, in the wrong order");
        let Life { begin, end, duration, .. } = lives.lives[life];
        assert_eq!((begin, end, duration), (10, Some(10), Some(0)));
    }

    #[test]
    fn a_completed_object_lives_on_while_it_is_completed() {
        let mut lives = lives_of("bio", &["bio_endio", "bio_add_page"]);
        let life = lives.enter(0, 0, A, 1, 0);
        assert_eq!(lives.enter(1, 0, A, 2, 0), life, "inside its completion");
        leave(&mut lives, 1, life, 0, 2, 3);
        leave(&mut lives, 0, life, 0, 1, 4);
        assert_ne!(lives.enter(1, 0, A, 5, 0), life);
    }

    #[test]
    fn a_split_is_a_child() {
        let mut lives = lives_of("bio", &["bio_split", "bio_alloc_clone", "bio_init", "bio_chain"]);
        let parent = lives.enter(0, 0, A, 1, 0);
        lives.enter(1, 0, A, 2, 0);
        let child = lives.enter(2, 0, B, 3, 0);
        leave(&mut lives, 2, child, 0, 3, 4);
        leave(&mut lives, 1, parent, B, 2, 5);
        assert_eq!(lives.lives[child].origin(), Some((parent, Link::Clone)));
        leave(&mut lives, 0, parent, B, 1, 6);
        lives.enter(3, 0, B, 7, 0);
        lives.enter(3, 1, A, 7, 0);
        lives.tie(3, &[(B, child), (A, parent)]);
        assert_eq!(lives.lives[child].origin(), Some((parent, Link::Split)));
        leave(&mut lives, 1, parent, 0, 7, 8);
        leave(&mut lives, 1, parent, (-12_i64) as u64, 7, 8);
        assert_eq!(lives.lives.len(), 2, "errors are no objects");
    }

    #[test]
    fn a_clone_whose_beginning_was_missed_is_another_life() {
        let mut lives =
            lives_of("bio", &["bio_alloc_clone", "bio_init", "submit_bio_noacct", "__bio_clone"]);
        let parent = lives.enter(2, 0, A, 1, 0);
        let old = lives.enter(1, 0, B, 2, 0);
        lives.enter(0, 0, A, 10, 0);
        leave(&mut lives, 0, parent, B, 10, 20);
        let clone = lives.enter(2, 0, B, 21, 0);
        assert_ne!(clone, old, "made before the call");
        assert_eq!((lives.lives[old].origin(), lives.lives[clone].origin()), {
            (None, Some((parent, Link::Clone)))
        });
        // One whose completion was seen is known as early as it is filled.
        let mut lives = lives_of("bio", &["bio_endio", "__bio_clone"]);
        let old = lives.enter(0, 0, B, 1, 0);
        leave(&mut lives, 0, old, 0, 1, 2);
        assert_ne!(lives.enter(1, 0, B, 3, 0), old);
        assert_eq!(lives.enter(1, 1, A, 3, 0), lives.enter(1, 1, A, 4, 0));
    }

    /// What happens to a request of a batch, and to the next one at its address, on 7.2.
    #[test]
    fn a_request_of_a_batch_ends() {
        let names = [
            "blk_mq_rq_late_init",
            "blk_mq_start_request",
            "nvme_complete_batch_req",
            "blk_stat_add",
            "blk_mq_requeue_request",
        ];
        let mut lives = lives_of("request", &names);
        let mut call = |function, time, made| {
            let life = lives.enter(function, 0, A, time, made);
            leave(&mut lives, function, life, 0, time, time + 1);
            life
        };
        // The first one is known by its start; when it was made is told later.
        assert_eq!([call(0, 1, 0), call(1, 3, 2), call(2, 5, 2), call(3, 7, 2)], [0; 4]);
        assert_eq!([call(0, 11, 2), call(3, 12, 2), call(1, 13, 12)], [1; 3], "prepared");
        assert_eq!([call(4, 14, 12), call(1, 15, 12)], [1; 2], "started again, not another one");
        assert_eq!([call(0, 21, 12), call(1, 23, 22)], [1, 2], "its end was missed");
        assert_eq!(lives.lives[0].end, Some(5));
        assert_eq!(lives.lives[1].end, None);
    }

    #[test]
    fn bytes_of_a_life_are_compared_with_its_own() {
        let mut lives = lives_of("bio", &["bio_init", "bio_free"]);
        let first = lives.enter(0, 0, A, 1, 0);
        assert_eq!(lives.replace_bytes(A, first, &[]), None, "unreadable");
        assert_eq!(lives.replace_bytes(A, first, &[1]), Some(None));
        assert_eq!(lives.replace_bytes(A, first, &[2]), Some(Some([1].into())));
        let second = lives.enter(0, 0, A, 2, 0);
        assert_eq!(lives.replace_bytes(A, first, &[3]), None, "its memory is another's");
        assert_eq!(lives.replace_bytes(A, second, &[4]), Some(None));
        assert_eq!(lives.present().collect::<Vec<_>>(), [second]);
        lives.enter(1, 0, A, 3, 0);
        leave(&mut lives, 1, second, 0, 3, 4);
        assert_eq!(lives.replace_bytes(A, second, &[5]), None, "freed");
    }

    /// What the BPF program reads in a cookie.
    #[test]
    fn an_effect_is_three_sets_of_bits() {
        let effect = |name: &str| {
            let effect = Rules("bio").effect(name);
            assert_eq!(effect.too_early, name == "bio_init" || name == "submit_bio");
            assert_eq!(effect.cookie() & 31 << 48, u64::from(effect.begins_if) << 48);
            (effect.begins_if, effect.at_call, effect.at_return)
        };
        assert_eq!(effect("bio_put"), (FREED, KNOWN, 0));
        assert_eq!(effect("bio_init"), (FREED | KNOWN, KNOWN, 0));
        let submits = FREED | SEEN | COMPLETING | COMPLETED;
        assert_eq!(effect("submit_bio"), (submits, KNOWN | SEEN, 0));
        assert_eq!(effect("bio_endio"), (FREED, KNOWN | COMPLETING, COMPLETED));
        assert_eq!(effect("bio_free"), (FREED, KNOWN | COMPLETING, COMPLETED | FREED));
        let all = Effect { begins_if: 31, at_call: 31, at_return: 31, ..Effect::default() };
        assert_eq!(all.of_others().cookie() >> 48, u64::from(Effect::OF_OTHERS));
    }
}
