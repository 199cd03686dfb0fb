//! Which events belong to one object: addresses are used again, and objects come from other ones.

use std::collections::HashMap;

use crate::model::{Function, Life, Link};

/// What the functions of a type do to an object's life.
pub struct Rules {
    /// Initialise an object: always a new life.
    begins: &'static [&'static str],
    /// Prepare an object for work: a new life where the one before is complete.
    prepares: &'static [&'static str],
    /// Let its work begin: the same, also where the call that completes the one before has not
    /// returned.
    starts: &'static [&'static str],
    /// See every object once: at the second time, the end of the life before was missed.
    once: &'static [&'static str],
    /// Complete an object; its owner may still look at it.
    completes: &'static [&'static str],
    /// Free it: what comes at this address afterwards is a new life.
    frees: &'static [&'static str],
    /// Make another object of it, which they return.
    makes: &'static [(&'static str, Link)],
    /// The field that says when an object was made, where the type has one: another time is another
    /// life. It is set a little later than an object begins.
    pub made: Option<&'static str>,
    /// Tie two of their arguments: positions of child and parent.
    ties: &'static [(&'static str, usize, usize, Link)],
}

impl Rules {
    /// What a function does to the life of its first object, as `trace.bpf.c` reads it in a cookie.
    pub fn effects(&self, function: &str) -> u64 {
        let all = [
            (31, self.begins),
            (30, self.frees),
            (29, self.completes),
            (28, self.prepares),
            (27, self.starts),
            (26, self.once),
        ];
        all.iter().fold(0, |sum, (bit, names)| sum | u64::from(names.contains(&function)) << bit)
    }

    /// Whether a function initialises an object of this type.
    pub fn begins(&self, function: &str) -> bool {
        self.begins.contains(&function)
    }

    /// Whether a function completes an object of this type.
    pub fn completes(&self, function: &str) -> bool {
        self.completes.contains(&function)
    }

    /// Whether they tell the first event of a life.
    pub fn tell_the_first_event(&self) -> bool {
        !self.starts.is_empty()
    }
}

const BIO: Rules = Rules {
    begins: &["bio_init", "bio_reset"],
    prepares: &[
        "bio_add_page",
        "bio_add_folio",
        "__bio_add_page",
        "bio_iov_iter_get_pages",
        "bio_associate_blkg",
        "bio_associate_blkg_from_css",
        "bio_clone_blkg_association",
        "guard_bio_eod",
        "submit_bio",
        "submit_bio_wait",
        "bio_init_clone",
        "__bio_clone",
    ],
    starts: &["submit_bio"],
    once: &["submit_bio"],
    completes: &["bio_endio", "bio_uninit"],
    frees: &["bio_free"],
    made: None,
    makes: &[("bio_alloc_clone", Link::Clone), ("bio_split", Link::Split)],
    ties: &[
        ("bio_init_clone", 0, 1, Link::Clone),
        ("__bio_clone", 0, 1, Link::Clone),
        ("bio_chain", 0, 1, Link::Chain),
    ],
};

const NONE: Rules = Rules {
    begins: &[],
    prepares: &[],
    starts: &[],
    once: &[],
    completes: &[],
    frees: &[],
    made: None,
    makes: &[],
    ties: &[],
};

const REQUEST: Rules = Rules {
    begins: &["blk_rq_init"],
    // Before these, the kernel does not set the time.
    prepares: &["blk_mq_rq_late_init", "__rq_qos_track", "wbt_track"],
    starts: &["blk_mq_start_request"],
    // blk_mq_end_request_batch() takes no request: of a batch, these are told.
    completes: &[
        "blk_mq_end_request",
        "__blk_mq_end_request",
        "blk_mq_finish_request",
        "nvme_complete_batch_req",
        "__rq_qos_done",
    ],
    made: Some("start_time_ns"),
    frees: &["blk_mq_free_request", "__blk_mq_free_request"],
    ..NONE
};

const INODE: Rules = Rules {
    begins: &["inode_init_always", "inode_init_always_gfp"],
    frees: &["destroy_inode", "__destroy_inode"],
    ..NONE
};

/// Most folios are freed in batches, by functions that take none: the next use tells.
const FOLIO: Rules = Rules {
    once: &["filemap_add_folio", "folio_add_new_anon_rmap"],
    frees: &["__folio_put", "__folio_put_small"],
    ..NONE
};
const SK_BUFF: Rules = Rules { frees: &["kfree_skbmem", "__kfree_skb"], ..NONE };
const TASK: Rules = Rules { once: &["wake_up_new_task"], frees: &["free_task"], ..NONE };

/// What is known about a type; about most of them, nothing.
pub fn rules(type_name: &str) -> &'static Rules {
    match type_name {
        "bio" => &BIO,
        "request" => &REQUEST,
        "inode" => &INODE,
        "folio" => &FOLIO,
        "sk_buff" => &SK_BUFF,
        "task_struct" => &TASK,
        _ => &NONE,
    }
}

/// What a function does to a life; the same as in [`Rules`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Effect {
    begins: bool,
    prepares: bool,
    starts: bool,
    once: bool,
    completes: bool,
    frees: bool,
    /// The time at which an object was made does not count yet.
    too_early: bool,
    makes: Option<Link>,
    ties: Option<(usize, usize, Link)>,
}

/// The object that has an address now.
struct Current {
    life: usize,
    /// Has been passed to a function that sees it once.
    seen: bool,
    completed: bool,
    freed: bool,
    /// When the object was made, and the one before it; 0: not known.
    made: [u64; 2],
    /// Calls that have not returned.
    open: usize,
    bytes: Box<[u8]>,
}

/// All lives so far.
pub struct Lives {
    effects: Vec<Effect>,
    /// The bytes of all objects in `current`.
    held: usize,
    current: HashMap<u64, Current>,
    /// The lives, in the order in which they began.
    pub lives: Vec<Life>,
}

impl Lives {
    /// For events of these functions.
    pub fn new<'a>(rules: &Rules, functions: impl Iterator<Item = &'a Function>) -> Lives {
        let effect = |function: &Function| {
            let name = function.name.as_str();
            let has = |names: &[&str]| names.contains(&name);
            Effect {
                begins: has(rules.begins),
                prepares: has(rules.prepares),
                starts: has(rules.starts),
                once: has(rules.once),
                completes: has(rules.completes),
                frees: has(rules.frees),
                too_early: has(rules.begins) || has(rules.prepares),
                makes: rules.makes.iter().find(|(known, _)| *known == name).map(|(_, link)| *link),
                ties: rules
                    .ties
                    .iter()
                    .find(|(known, ..)| *known == name)
                    .map(|(_, child, parent, link)| (*child, *parent, *link)),
            }
        };
        let effects = functions.map(effect).collect();
        Lives { effects, held: 0, current: HashMap::new(), lives: Vec::new() }
    }

    fn start(&mut self, address: u64, time: u64) -> usize {
        let life = self.lives.len();
        let before = self.current.get(&address).map(|current| current.life);
        let made = self.current.get(&address).map_or(0, |current| current.made[0]);
        let generation = before.map_or(0, |before| self.lives[before].generation + 1);
        self.lives.push(Life { address, generation, begin: time, ..Life::default() });
        let current = Current {
            life,
            seen: false,
            completed: false,
            freed: false,
            made: [0, made],
            open: 0,
            bytes: Box::default(),
        };
        let before = self.current.insert(address, current);
        self.held -= before.map_or(0, |before| before.bytes.len());
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
        let made = if effect.too_early { 0 } else { made };
        let is_new = self.current.get(&address).is_none_or(|current| {
            current.freed
                || (made != 0 && current.made[0] != 0 && made != current.made[0])
                || (effect.begins && object == 0)
                || (effect.once && current.seen)
                || (effect.starts && object == 0 && current.completed)
                || (effect.prepares && object == 0 && current.completed && current.open == 0)
        });
        let life = match self.current.get(&address) {
            Some(current) if !is_new => current.life,
            _ => self.start(address, time),
        };
        if let Some(current) = self.current.get_mut(&address) {
            current.open += 1;
            // The object before has left its time in the memory.
            if made != current.made[1] && current.made[0] == 0 {
                current.made[0] = made;
            }
            current.seen |= effect.once;
            if (effect.completes || effect.frees) && object == 0 {
                current.completed = true;
                self.lives[life].end = Some(time);
            }
        }
        life
    }

    /// The end of an object whose call was not seen. False where it has ended already, or is not known.
    pub fn end_again(&mut self, lives: &mut [Life], address: u64, time: u64) -> bool {
        let known = self.current.get_mut(&address).filter(|current| !current.completed);
        known.is_some_and(|current| {
            current.completed = true;
            lives[current.life].end = Some(time);
            true
        })
    }

    /// A call ties its objects, as soon as all of them are known.
    pub fn tie(&mut self, function: usize, lives: &[(u64, usize)]) {
        let Some((child, parent, link)) = self.effects[function].ties else { return };
        if let (Some((_, child)), Some((_, parent))) = (lives.get(child), lives.get(parent)) {
            self.link(*child, *parent, link);
        }
    }

    /// A function returns that was called at `began`, and to which the object of this life was passed.
    pub fn leave(&mut self, function: usize, life: usize, value: u64, began: u64, time: u64) {
        let effect = self.effects[function];
        let address = self.lives[life].address;
        if let Some(current) = self.current.get_mut(&address).filter(|c| c.life == life) {
            current.open = current.open.saturating_sub(1);
            if effect.frees {
                current.freed = true;
                self.lives[life].end = Some(time);
            }
        }
        // NULL and error codes are no pointers.
        if let Some(link) = effect.makes.filter(|_| (value as i64) < -4095) {
            // What it has made is no older than the call: where it seems to be, its beginning was missed.
            let child = match self.current.get(&value) {
                Some(current) if !current.freed && self.lives[current.life].begin >= began => {
                    current.life
                }
                _ => self.start(value, time),
            };
            self.link(child, life, link);
        }
    }

    /// A split clones first, and chains afterwards: it remains a split.
    fn link(&mut self, child: usize, parent: usize, link: Link) {
        let known = self.lives[child].parent.map(|(_, link)| link);
        if child != parent && (known.is_none() || link == Link::Split) {
            self.lives[child].parent = Some((parent, link));
        }
    }

    /// The bytes of this life's event before, in exchange for those of now. `None`: there is no event
    /// before, or the memory belongs to another object by now.
    pub fn replace_bytes(&mut self, life: usize, bytes: &[u8]) -> Option<Box<[u8]>> {
        let current = self.current.get_mut(&self.lives[life].address)?;
        if current.life != life || current.freed || bytes.is_empty() {
            return None;
        }
        let before = std::mem::replace(&mut current.bytes, bytes.into());
        self.held += bytes.len();
        self.held -= before.len();
        (!before.is_empty()).then_some(before)
    }

    /// The memory that all this takes, in bytes.
    pub fn memory(&self) -> usize {
        // Lives are in the trace while nothing happens to them.
        self.held + self.current.len() * size_of::<(u64, Current)>()
    }

    /// Whether this is the last of `lives` at its address so far.
    pub fn is_last(&self, lives: &[Life], life: usize) -> bool {
        self.current.get(&lives[life].address).is_some_and(|current| current.life == life)
    }

    /// Whether the object of this life is still at its address.
    pub fn is_there(&self, life: usize) -> bool {
        let current = self.current.get(&self.lives[life].address);
        current.is_some_and(|current| current.life == life && !current.freed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u64 = 0xffff_8880_0000_1000;
    const B: u64 = 0xffff_8880_0000_2000;

    fn lives(names: &[&str]) -> Lives {
        let function = |name: &&str| Function { name: (*name).to_owned(), ..Function::default() };
        let functions: Vec<Function> = names.iter().map(function).collect();
        Lives::new(rules("bio"), functions.iter())
    }

    #[test]
    fn a_reused_address_is_another_life() {
        let mut lives = lives(&["submit_bio", "bio_endio", "bio_put", "bio_free"]);
        let mut call = |function, time| {
            let life = lives.enter(function, 0, A, time, 0);
            lives.leave(function, life, 0, time, time + 1);
            life
        };
        assert_eq!([call(0, 1), call(1, 3), call(2, 5), call(3, 7)], [0; 4]);
        assert_eq!([call(0, 11), call(1, 13)], [1; 2], "freed before");
        assert_eq!([call(0, 21), call(2, 23)], [2; 2], "completed before");
        assert_eq!([call(0, 31), call(2, 33)], [3; 2], "submitted before");
        assert_eq!(lives.lives[0].end, Some(8));
        assert_eq!(
            lives.lives[1],
            Life { address: A, generation: 1, begin: 11, end: Some(13), parent: None }
        );
        assert_eq!((lives.lives[2].generation, lives.lives[2].end), (2, None));
    }

    #[test]
    fn an_end_may_be_seen_without_its_call() {
        let mut lives = lives(&["submit_bio"]);
        let mut all = Vec::new();
        for (again, time) in [(0, 1), (1, 11)] {
            std::mem::swap(&mut lives.lives, &mut all);
            let life = lives.enter(0, 0, A, time, 0);
            lives.leave(0, life, 0, time, time + 1);
            std::mem::swap(&mut lives.lives, &mut all);
            assert_eq!(life, again);
            assert!(!lives.end_again(&mut all, B, time + 2));
            assert!(lives.end_again(&mut all, A, time + 3));
            assert!(!lives.end_again(&mut all, A, time + 4));
            assert_eq!(all[life].end, Some(time + 3));
        }
    }

    #[test]
    fn a_completed_object_lives_on_while_it_is_completed() {
        let mut lives = lives(&["bio_endio", "bio_add_page"]);
        let life = lives.enter(0, 0, A, 1, 0);
        assert_eq!(lives.enter(1, 0, A, 2, 0), life, "inside its completion");
        lives.leave(1, life, 0, 2, 3);
        lives.leave(0, life, 0, 1, 4);
        assert_ne!(lives.enter(1, 0, A, 5, 0), life);
    }

    #[test]
    fn a_split_is_a_child() {
        let mut lives = lives(&["bio_split", "bio_alloc_clone", "bio_init", "bio_chain"]);
        let parent = lives.enter(0, 0, A, 1, 0);
        lives.enter(1, 0, A, 2, 0);
        let child = lives.enter(2, 0, B, 3, 0);
        lives.leave(2, child, 0, 3, 4);
        lives.leave(1, parent, B, 2, 5);
        assert_eq!(lives.lives[child].parent, Some((parent, Link::Clone)));
        lives.leave(0, parent, B, 1, 6);
        lives.enter(3, 0, B, 7, 0);
        lives.enter(3, 1, A, 7, 0);
        lives.tie(3, &[(B, child), (A, parent)]);
        assert_eq!(lives.lives[child].parent, Some((parent, Link::Split)));
        lives.leave(1, parent, 0, 7, 8);
        lives.leave(1, parent, (-12_i64) as u64, 7, 8);
        assert_eq!(lives.lives.len(), 2, "errors are no objects");
    }

    #[test]
    fn a_clone_whose_beginning_was_missed_is_another_life() {
        let mut lives = lives(&["bio_alloc_clone", "bio_init", "submit_bio_noacct", "__bio_clone"]);
        let parent = lives.enter(2, 0, A, 1, 0);
        let old = lives.enter(1, 0, B, 2, 0);
        lives.enter(0, 0, A, 10, 0);
        lives.leave(0, parent, B, 10, 20);
        let clone = lives.enter(2, 0, B, 21, 0);
        assert_ne!(clone, old, "made before the call");
        assert_eq!((lives.lives[old].parent, lives.lives[clone].parent), {
            (None, Some((parent, Link::Clone)))
        });
        // One whose completion was seen is known as early as it is filled.
        let mut lives = super::tests::lives(&["bio_endio", "__bio_clone"]);
        let old = lives.enter(0, 0, B, 1, 0);
        lives.leave(0, old, 0, 1, 2);
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
        let function = |name: &&str| Function { name: (*name).to_owned(), ..Function::default() };
        let functions: Vec<Function> = names.iter().map(function).collect();
        let mut lives = Lives::new(rules("request"), functions.iter());
        let mut call = |function, time, made| {
            let life = lives.enter(function, 0, A, time, made);
            lives.leave(function, life, 0, time, time + 1);
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
        let mut lives = lives(&["bio_init", "bio_free"]);
        let first = lives.enter(0, 0, A, 1, 0);
        assert_eq!(lives.replace_bytes(first, &[1]), None);
        assert_eq!(lives.replace_bytes(first, &[2]).as_deref(), Some(&[1][..]));
        let second = lives.enter(0, 0, A, 2, 0);
        assert_eq!(lives.replace_bytes(first, &[3]), None, "its memory is another's");
        assert_eq!(lives.replace_bytes(second, &[4]), None);
        lives.enter(1, 0, A, 3, 0);
        lives.leave(1, second, 0, 3, 4);
        assert!(!lives.is_there(second));
    }
}
