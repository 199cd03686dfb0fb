//! The instructions of a program: what is wrong with them only where another CPU comes between.

use libbpf_rs::{MapType, query::MapInfo};

use crate::prelude::*;

/// An instruction of BPF: linux/bpf.h, struct bpf_insn.
#[derive(Clone, Copy)]
pub struct Instruction {
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    number: i32,
}

const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const JUMP: u8 = 0x05;
const STACK: u8 = 10;

impl Instruction {
    pub fn new(bytes: &[u8]) -> Instruction {
        let number = i32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let offset = i16::from_ne_bytes([bytes[2], bytes[3]]);
        Instruction { code: bytes[0], to: bytes[1] & 15, from: bytes[1] >> 4, offset, number }
    }

    /// The number of the kernel's function that it calls.
    pub fn calls(&self) -> Option<i32> {
        (self.code == CALL && self.from == 0).then_some(self.number)
    }

    /// `r1 = *(r0 + 8)`, of any size.
    fn is_load(&self) -> bool {
        self.code & 0xe7 == 0x61
    }

    /// `*(r0 + 8) = r1`, but for atomic ones.
    fn is_store(&self) -> bool {
        self.code & 0xe7 == 0x63
    }

    /// `*(r0 + 8) = 1`.
    fn is_store_of_number(&self) -> bool {
        self.code & 0xe7 == 0x62
    }

    /// Of a load or a store: how many bytes.
    fn size(&self) -> i16 {
        [4, 2, 1, 8][usize::from(self.code >> 3 & 3)]
    }

    /// Whether it computes, with 32 or 64 bits.
    fn computes(&self) -> bool {
        matches!(self.code & 7, 4 | 7)
    }

    /// Whether it uses what is in r0.
    fn reads_r0(&self) -> bool {
        let (to, from) = (self.to == 0, self.code & 8 != 0 && self.from == 0);
        match self.code & 7 {
            0 => false,
            1 => self.from == 0,
            2 => to, // the store of a constant has no register
            4 | 7 => from || to && self.code & 0xf0 != 0xb0,
            5 | 6 => self.code == EXIT || ![CALL, JUMP].contains(&self.code) && (to || from),
            _ => to || self.from == 0,
        }
    }
}

/// What a map is to two CPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    sharing: Sharing,
    /// The sizes of a key and of a value, in bytes.
    key: i16,
    value: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// A value of each CPU, thread or call.
    Own,
    /// All have the same values; global variables are one.
    Array,
    /// So have they here, where they have the same key.
    Hash,
}

impl Kind {
    pub fn of(map: &MapInfo) -> Kind {
        let sharing = match map.ty {
            MapType::PercpuHash
            | MapType::PercpuArray
            | MapType::LruPercpuHash
            | MapType::TaskStorage
            | MapType::RingBuf => Sharing::Own,
            MapType::Array => Sharing::Array,
            _ => Sharing::Hash,
        };
        Kind { sharing, key: map.key_size as i16, value: map.value_size }
    }
}

/// The numbers by which programs call functions of the kernel.
pub struct Functions(HashMap<String, i32>);

impl Functions {
    const NAMES: [&str; 10] = [
        "bpf_spin_lock",
        "bpf_get_smp_processor_id",
        "bpf_get_current_pid_tgid",
        "bpf_get_current_task",
        "bpf_get_current_task_btf",
        // The kernel puts the functions of each kind of map in the place of the helpers.
        "htab_map_delete_elem",
        "htab_lru_map_delete_elem",
        "htab_map_update_elem",
        "htab_lru_map_update_elem",
        "array_map_update_elem",
    ];

    pub fn new() -> Result<Functions> {
        let kallsyms = fs::read_to_string("/proc/kallsyms")?;
        let mut known = HashMap::new();
        for line in kallsyms.lines() {
            let name = line.split(' ').nth(2).unwrap_or_default();
            if name == "__bpf_call_base" || Self::NAMES.contains(&name) {
                known.insert(name.to_owned(), u64::from_str_radix(&line[..16], 16)?);
            }
        }
        let base = known.remove("__bpf_call_base").context("no __bpf_call_base")?;
        let number = |(name, address): (String, u64)| (name, address.wrapping_sub(base) as i32);
        Ok(Functions(known.into_iter().map(number).collect()))
    }

    pub fn number(&self, name: &str) -> Option<i32> {
        self.0.get(name).copied()
    }

    fn is(&self, called: Option<i32>, name: &str) -> bool {
        called.is_some() && called == self.number(name)
    }
}

/// What [`fault`] judges by.
pub struct Rules<'a> {
    pub maps: &'a HashMap<u32, Kind>,
    pub kernel: &'a Functions,
    /// The map whose values go with a delete, or 0; and whether the results of deletes count.
    pub starts: u32,
    pub deletes_count: bool,
    /// Whether the hook hands arguments of a function to the program.
    pub has_arguments: bool,
}

/// Whose a number is, or the memory that it points to.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Whose {
    #[default]
    Anybodys,
    /// The number of this CPU, or made of it.
    Cpu,
    /// The number of this thread, or its struct in the kernel.
    Thread,
    /// Both numbers, of the thread and of its process; and these, shifted to the left.
    PidTgid,
    Shifted,
    /// The arguments of the hook; and one of them: the address of an I/O, say, which nobody else works on now.
    Arguments,
    Argument,
    /// Memory of this CPU or thread.
    Memory,
}

/// A place in a map: which one, and where in its values.
pub type Shared = (u32, i32);

/// What is known of a register, or of a place on the stack.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Known {
    whose: Whose,
    /// It points to this map, or into a value of it, at this offset; and whether that entry is gone.
    map: u32,
    at: i32,
    is_gone: bool,
    /// Of a value of a hash map: the key is the same for all.
    is_one: bool,
    /// It points to this place on the stack.
    stack: Option<i16>,
    /// A constant; and which one, `at` says.
    is_constant: bool,
    /// It was read there, and whether it was changed since.
    read: Option<Shared>,
    is_changed: bool,
}

const NOTHING: Known = Known {
    whose: Whose::Anybodys,
    map: 0,
    at: 0,
    is_gone: false,
    is_one: false,
    stack: None,
    is_constant: false,
    read: None,
    is_changed: false,
};

/// All that is known at an instruction: of registers, `(1, 0)`, and of places on the stack, `(10, -8)`.
type State = BTreeMap<(u8, i16), Known>;

const GONE: &str = "reads the value after it has deleted the entry, whose memory may hold another I/O's start by \
     then: copy it before";
const UNCHECKED: &str = "does not look at what bpf_map_delete_elem() returns: two CPUs may delete an entry at once, \
     and only where it is 0 does the I/O count";
const STEPS: &str =
    "adds to a value in steps, and another CPU may do so meanwhile (load, add, store: instruction";
const ONE_STEP: &str = "); __sync_fetch_and_add() is one step";
const RECORD: &str = "writes to memory that all CPUs share, without a lock, what belongs together, or what it has \
     compared before: another CPU may do so meanwhile, and the words come from two I/Os, or the smaller one is what \
     stays. Give each CPU its own: BPF_MAP_TYPE_PERCPU_ARRAY";

/// So many steps at most: no program of an exercise comes near.
const STEPS_AT_MOST: usize = 400_000;

/// What a program does, on any of its ways, that is wrong where another CPU comes between:
/// - it adds in steps to a value that CPUs share: that of a global variable, of an array, or of a hash map under a
///   key that is neither this CPU's nor this thread's number, nor the I/O that the hook is about;
/// - it writes a record there, or what it has compared with what is there;
/// - it reads a value of the map `starts` once its entry is gone, or never looks whether a delete has succeeded.
///
/// Where it does not: where it writes to memory of this CPU, as far as the key is a constant.
pub fn fault(code: &[Instruction], rules: &Rules) -> Result<BTreeSet<Shared>, String> {
    let mut walk = Walk::new(code, rules);
    walk.all_ways()?;
    // A record has more than one member; one number may be compared before.
    let is_record = |place: &Shared| walk.written.iter().any(|it| it.0 == place.0 && it != place);
    let mixed = walk.written.iter().any(|place| walk.read.contains(place) || is_record(place));
    let is_read = |map: &u32| walk.read.iter().any(|place| place.0 == *map);
    if mixed || walk.replaced.iter().any(is_read) || walk.copied_over {
        return Err(RECORD.into());
    }
    if rules.deletes_count && !walk.deleted.is_subset(&walk.looked_at) {
        return Err(UNCHECKED.into());
    }
    Ok(walk.own)
}

/// One look at a program, on all its ways.
struct Walk<'a> {
    code: &'a [Instruction],
    rules: &'a Rules<'a>,
    /// Of what all CPUs have in common: what it reads, and what it writes that is no constant.
    read: BTreeSet<Shared>,
    written: BTreeSet<Shared>,
    /// The maps of which it replaces a value that all have; and whether that is one that is copied word by word.
    replaced: BTreeSet<u32>,
    copied_over: bool,
    /// What it writes to, of memory that each CPU has.
    own: BTreeSet<Shared>,
    /// The deletes from the map `starts`, and those whose result is looked at.
    deleted: HashSet<usize>,
    looked_at: HashSet<usize>,
}

impl<'a> Walk<'a> {
    fn new(code: &'a [Instruction], rules: &'a Rules<'a>) -> Walk<'a> {
        Walk {
            code,
            rules,
            read: BTreeSet::new(),
            written: BTreeSet::new(),
            replaced: BTreeSet::new(),
            copied_over: false,
            own: BTreeSet::new(),
            deleted: HashSet::new(),
            looked_at: HashSet::new(),
        }
    }

    /// Follows all ways from the first instruction on; the error is a fault that one instruction shows.
    fn all_ways(&mut self) -> Result<(), String> {
        let mut begin = State::new();
        if self.rules.has_arguments {
            begin.insert((1, 0), Known { whose: Whose::Arguments, ..NOTHING });
        }
        let mut seen = HashSet::new();
        // Where a way continues, what is known there, and the delete whose result is in r0.
        let mut ways = vec![(0, begin, None)];
        while let Some((number, mut state, mut result)) = ways.pop() {
            if seen.len() > STEPS_AT_MOST {
                judged_weakly("the program has more ways than the judge follows");
                break;
            }
            let is_new = seen.insert((number, state.clone(), result));
            let Some(it) = self.code.get(number).filter(|_| is_new) else { continue };
            self.looked_at.extend(result.filter(|_| it.reads_r0()));
            let jump = (number + 1).saturating_add_signed(it.offset.into());
            match it.code {
                EXIT => continue,
                CALL if it.from == 1 => {
                    // Its arguments go along; the stack is another one.
                    let arguments = state.iter().filter(|((register, _), known)| {
                        (1..=5).contains(register) && known.stack.is_none()
                    });
                    let arguments = arguments.map(|(place, known)| (*place, *known)).collect();
                    // How far it is to the function, the kernel shows in the offset.
                    ways.push((jump, arguments, None));
                    self.call(it, &mut state);
                    result = None;
                }
                CALL => {
                    let is_delete = self.call(it, &mut state);
                    result = is_delete.then_some(number);
                    self.deleted.extend(result);
                }
                _ if matches!(it.code & 7, 5 | 6) => {
                    if it.code != JUMP {
                        ways.push((jump, state.clone(), result));
                    }
                }
                _ => {
                    self.step(number, it, &mut state)?;
                    result = result.filter(|_| it.to != 0 || !matches!(it.code & 7, 0 | 1 | 4 | 7));
                }
            }
            let next = number + 1 + usize::from(it.code == 0x18);
            ways.push((if it.code == JUMP { jump } else { next }, state, result));
        }
        Ok(())
    }

    /// A call that puts a value into a map, whatever is there (BPF_NOEXIST is 1).
    fn update(&mut self, map: Known, key: Known, flags: Known, state: &State) {
        let found = self.found(map.map, key.stack, state);
        let Some(kind) = self.rules.maps.get(&map.map) else { return };
        let is_new = flags.is_constant && flags.at == 1;
        if found.is_one && self.shared(found, 0).is_some() && !is_new {
            self.replaced.insert(map.map);
            self.copied_over |= kind.sharing == Sharing::Array && kind.value > 8;
        }
    }

    /// A call of the kernel: whether it deletes an entry of the map `starts`.
    fn call(&mut self, it: &Instruction, state: &mut State) -> bool {
        let of = |register| state.get(&(register, 0)).copied().unwrap_or(NOTHING);
        let (first, second, third) = (of(1), of(2), of(3));
        let called = it.calls();
        let kernel = self.rules.kernel;
        let is = |name| kernel.is(called, name);
        let is_delete = first.map == self.rules.starts
            && first.map != 0
            && first.whose != Whose::Memory
            && (is("htab_map_delete_elem") || is("htab_lru_map_delete_elem"));
        let whose = if is("bpf_get_smp_processor_id") {
            Whose::Cpu
        } else if is("bpf_get_current_pid_tgid") {
            Whose::PidTgid
        } else if is("bpf_get_current_task") || is("bpf_get_current_task_btf") {
            Whose::Thread
        } else {
            Whose::Anybodys
        };
        let updates = ["htab_map_update_elem", "htab_lru_map_update_elem", "array_map_update_elem"];
        if updates.into_iter().any(is) {
            self.update(first, second, of(4), state);
        }
        let mut known = Known { whose, ..NOTHING };
        if called.is_some() && first.map != 0 {
            known = self.found(first.map, second.stack, state);
        } else if let Some(at) = first.stack {
            // It writes there: bpf_probe_read_kernel().
            state
                .retain(|(register, slot), _| *register != STACK || *slot < at || *slot >= at + 64);
            if third.whose == Whose::Thread {
                state.insert((STACK, at), Known { whose: Whose::Thread, ..NOTHING });
            }
        }
        state.retain(|(register, _), _| *register > 5);
        state.values_mut().for_each(|it| it.is_gone |= is_delete && it.map == first.map);
        if known != NOTHING {
            state.insert((0, 0), known);
        }
        is_delete
    }

    /// The value that is found in a map under the key at this place on the stack.
    fn found(&self, map: u32, key: Option<i16>, state: &State) -> Known {
        let known = Known { map, ..NOTHING };
        let Some(kind) = self.rules.maps.get(&map) else { return known };
        let slots: Vec<Known> = key.map_or_else(Vec::new, |from| {
            let is_its = |((register, slot), _): &(&(u8, i16), _)| {
                *register == STACK && (from..from + kind.key).contains(slot)
            };
            state.iter().filter(is_its).map(|(_, known)| *known).collect()
        });
        let is_own = |known: &Known| match known.whose {
            Whose::Cpu => true,
            Whose::Thread | Whose::PidTgid | Whose::Argument => kind.sharing == Sharing::Hash,
            _ => false,
        };
        let is_own = kind.sharing == Sharing::Own || slots.iter().any(is_own);
        let whose = if is_own { Whose::Memory } else { Whose::Anybodys };
        let is_one = !slots.is_empty() && slots.iter().all(|slot| slot.is_constant);
        // Values of different keys are different places.
        let at = slots.first().filter(|_| is_one).map_or(0, |slot| slot.at.wrapping_shl(16));
        Known { whose, is_one, at, ..known }
    }

    /// Where CPUs share what a register points to, with this offset.
    fn shared(&self, pointer: Known, offset: i16) -> Option<Shared> {
        let kind = self.rules.maps.get(&pointer.map)?;
        let is_shared = pointer.whose != Whose::Memory && kind.sharing != Sharing::Own;
        is_shared.then(|| (pointer.map, pointer.at.wrapping_add(i32::from(offset))))
    }

    /// Whether all calls write to the same value there: not to one of each key.
    fn is_one(&self, pointer: Known) -> bool {
        let kind = self.rules.maps.get(&pointer.map);
        pointer.is_one || kind.is_some_and(|kind| kind.sharing == Sharing::Array)
    }

    /// An instruction that loads, stores or computes.
    fn step(&mut self, number: usize, it: &Instruction, state: &mut State) -> Result<(), String> {
        let (to, from) = ((it.to, 0), known(state, it.from, 0));
        if it.is_store() || it.is_store_of_number() {
            return self.store(number, it, state);
        }
        let result = match it.code {
            // The address of a map, or of a value in it: the kernel puts the map's number there.
            0x18 if matches!(it.from, 1 | 2) => {
                let at = self.code.get(number + 1).filter(|_| it.from == 2);
                let (map, at) = (it.number as u32, at.map_or(0, |it| it.number));
                let own = |kind: &Kind| kind.sharing == Sharing::Own && it.from == 2;
                let whose = self.rules.maps.get(&map).is_some_and(own);
                let whose = if whose { Whose::Memory } else { Whose::Anybodys };
                Known { map, at, whose, ..NOTHING }
            }
            _ if it.is_load() => self.load(it, from, state)?,
            _ if it.computes() => compute(it, known(state, it.to, 0), from),
            _ => NOTHING,
        };
        if it.code & 7 != 3 {
            state.remove(&to);
            if result != NOTHING {
                state.insert(to, result);
            }
        }
        Ok(())
    }

    fn load(&mut self, it: &Instruction, from: Known, state: &State) -> Result<Known, String> {
        if let Some(base) = from.stack {
            let slot = known(state, STACK, base + it.offset);
            let is_half = slot.whose == Whose::PidTgid && it.size() == 4;
            return Ok(Known { whose: if is_half { Whose::Thread } else { slot.whose }, ..slot });
        }
        if from.is_gone {
            return Err(GONE.into());
        }
        if let Some(place) = self.shared(from, it.offset) {
            if self.is_one(from) {
                self.read.insert(place);
            }
            return Ok(Known { read: Some(place), ..NOTHING });
        }
        Ok(match from.whose {
            // Where this CPU's value is, stands in the map.
            _ if self.is_of_cpu(from) => {
                // Of two entries, these places are 8 bytes apart, and the values are not.
                let Known { map, at, is_one, .. } = from;
                Known { map, at: at.wrapping_shl(16), is_one, whose: Whose::Memory, ..NOTHING }
            }
            Whose::Arguments if it.size() == 8 => Known { whose: Whose::Argument, ..NOTHING },
            whose @ (Whose::Thread | Whose::Cpu) if from.map == 0 => Known { whose, ..NOTHING },
            _ => NOTHING,
        })
    }

    fn store(&mut self, number: usize, it: &Instruction, state: &mut State) -> Result<(), String> {
        let (to, mut value) = (known(state, it.to, 0), known(state, it.from, 0));
        if it.is_store_of_number() {
            value = Known { is_constant: true, ..NOTHING };
        }
        if let Some(base) = to.stack {
            let at = base.saturating_add(it.offset);
            if value.whose == Whose::PidTgid && it.size() == 4 {
                value.whose = Whose::Thread;
            }
            state.remove(&(STACK, at));
            if value != NOTHING {
                state.insert((STACK, at), value);
            }
            return Ok(());
        }
        if to.whose == Whose::Memory && to.is_one && self.is_of_cpu(to) {
            self.own.insert((to.map, to.at.wrapping_add(i32::from(it.offset))));
        }
        let Some(place) = self.shared(to, it.offset) else { return Ok(()) };
        if value.read == Some(place) && value.is_changed {
            return Err(format!("{STEPS} {number}{ONE_STEP}"));
        }
        if self.is_one(to) && !value.is_constant {
            self.written.insert(place);
        }
        Ok(())
    }

    /// Whether it points into a map of which each CPU, thread or call has a value.
    fn is_of_cpu(&self, pointer: Known) -> bool {
        self.rules.maps.get(&pointer.map).is_some_and(|it| it.sharing == Sharing::Own)
    }
}

/// What is known of a register, or of a place on the stack.
fn known(state: &State, register: u8, offset: i16) -> Known {
    if (register, offset) == (STACK, 0) {
        return Known { stack: Some(0), ..NOTHING };
    }
    state.get(&(register, offset)).copied().unwrap_or(NOTHING)
}

/// The result of an instruction that computes.
fn compute(it: &Instruction, to: Known, from: Known) -> Known {
    const MOVE: u8 = 0xb0;
    let (operation, is_long, takes) = (it.code & 0xf0, it.code & 7 == 7, it.code & 8 != 0);
    if operation == MOVE {
        return match (takes, from.whose) {
            (false, _) => Known { is_constant: true, at: it.number, ..NOTHING },
            // The address of something that each CPU has: its number, or what runs there.
            (true, _) if is_long && it.offset == -1 && from.map == 0 => {
                Known { whose: Whose::Cpu, ..NOTHING }
            }
            (true, Whose::PidTgid) if !is_long => Known { whose: Whose::Thread, ..from },
            (true, _) => from,
        };
    }
    let from = if takes { from } else { NOTHING };
    let (is_add, by_32) = (operation == 0, !takes && it.number == 32);
    let whose = match (operation, to.whose) {
        (0x60, Whose::PidTgid) if by_32 => Whose::Shifted,
        (0x70 | 0xc0, Whose::Shifted) if by_32 => Whose::Thread,
        // An element of an array, by the number of this CPU.
        (0, Whose::Memory) => Whose::Memory,
        _ if is_add && from.whose == Whose::Memory => Whose::Memory,
        (_, Whose::Cpu) if from.map == 0 => Whose::Cpu,
        _ if is_add && (from.whose == Whose::Cpu || to.whose == Whose::Cpu) => Whose::Memory,
        (0, Whose::Thread | Whose::Arguments) if !takes => to.whose,
        _ => Whose::Anybodys,
    };
    if (operation, takes, to.is_constant) == (0x60, false, true) {
        return Known { at: to.at.wrapping_shl(it.number as u32), ..to };
    }
    let read = to.read.or(from.read);
    let value = Known { whose, read, is_changed: read.is_some(), ..NOTHING };
    if !is_add {
        return value;
    }
    // An array is looked up without a call, by adding to the map's address.
    let (pointer, index) = if from.map != 0 { (from, to) } else { (to, from) };
    let by = match takes {
        true if index.is_constant => index.at,
        true => 0,
        false => it.number,
    };
    let on_stack = to.stack.filter(|_| !takes).and_then(|at| at.checked_add(by as i16));
    if pointer.map == 0 {
        return Known { stack: on_stack.filter(|at| (-512..0).contains(at)), ..value };
    }
    let is_one = if takes { index.is_constant } else { pointer.is_one };
    let at = pointer.at.wrapping_add(by);
    Known { at, whose, is_one, stack: None, read: None, is_changed: false, ..pointer }
}
