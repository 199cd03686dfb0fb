//! The maps of a program that runs beside the test, and its instructions.

use std::fmt;

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType,
    query::{MapInfo, MapInfoIter, ProgInfoIter, ProgInfoQueryOptions},
};

use crate::prelude::*;

/// The maps and programs that were loaded before; those of a program that is started now are the others.
pub struct Maps {
    before: HashSet<u32>,
    programs_before: HashSet<u32>,
}

/// Where a record is: the map, the key, and the offset in the value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    map: String,
    key: Vec<u8>,
    offset: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let key = self.key.iter().rev().fold(0_u64, |key, byte| key << 8 | u64::from(*byte));
        write!(f, "entry {key} of {}", self.map)
    }
}

/// The entries of all arrays (global variables are one) and hash maps that CPUs share without a lock.
pub struct Arrays(Vec<(String, Vec<u8>, Vec<u8>)>);

impl Maps {
    pub fn new() -> Maps {
        Maps {
            before: MapInfoIter::default().map(|map| map.id).collect(),
            programs_before: ProgInfoIter::default().map(|program| program.id).collect(),
        }
    }

    fn added(&self) -> impl Iterator<Item = MapInfo> {
        MapInfoIter::default().filter(|map| !self.before.contains(&map.id))
    }

    /// The maps of this name, one of each run.
    pub fn named(&self, name: &str) -> Result<Vec<MapHandle>> {
        let found = self.added().filter(|map| map.name.to_string_lossy() == name);
        let found =
            found.map(|map| Ok(MapHandle::from_map_id(map.id)?)).collect::<Result<Vec<_>>>()?;
        ensure!(!found.is_empty(), "your program has no map {name}");
        Ok(found)
    }

    /// The number of entries in all maps `starts`: I/Os that the programs take to be in flight.
    pub fn in_flight(&self) -> Result<usize> {
        Ok(self.named("starts")?.iter().map(|starts| starts.keys().count()).sum())
    }

    pub fn arrays(&self) -> Result<Arrays> {
        let mut arrays = Vec::new();
        let shared = |map: &MapInfo| match map.ty {
            MapType::Array => map.max_entries <= 1024,
            kind => [MapType::Hash, MapType::LruHash].contains(&kind),
        };
        for map in self.added().filter(shared) {
            let handle = MapHandle::from_map_id(map.id)?;
            for key in handle.keys() {
                // Only a map with a lock can be looked up under it.
                let has_lock = handle.lookup(&key, MapFlags::LOCK).is_ok();
                if has_lock && self.locks()? {
                    continue;
                }
                let value = handle.lookup(&key, MapFlags::ANY)?.unwrap_or_default();
                arrays.push((map.name.to_string_lossy().into_owned(), key, value));
            }
        }
        Ok(Arrays(arrays))
    }

    /// Checks that no program does what is wrong only where another CPU comes between. That is too rare to be
    /// waited for, and never happens where QEMU emulates both CPUs in one thread. See [`fault`].
    pub fn ensure_atomic(&self) -> Result<()> {
        let starts = self.added().find(|map| map.name == "starts").map_or(0, |map| map.id);
        self.ensure_no_fault(starts)
    }

    /// Checks only that counts are added to in one step.
    pub fn ensure_atomic_counts(&self) -> Result<()> {
        self.ensure_no_fault(0)
    }

    /// `starts`: the map of whose deletes the results have to be looked at, or 0.
    fn ensure_no_fault(&self, starts: u32) -> Result<()> {
        let kinds = [MapType::PercpuHash, MapType::PercpuArray, MapType::LruPercpuHash];
        let per_cpu =
            self.added().filter(|map| kinds.contains(&map.ty)).map(|map| map.id).collect();
        // The kernel puts the function of hash maps in the place of the helper.
        let deletes = (starts, number("htab_map_delete_elem")?);
        for (name, code) in self.code() {
            let fault = fault(&code, &per_cpu, deletes);
            ensure!(fault.is_none(), "your program {name}() {}", fault.unwrap_or_default());
        }
        Ok(())
    }

    /// The instructions of each program.
    fn code(&self) -> impl Iterator<Item = (String, Vec<Instruction>)> {
        let options = ProgInfoQueryOptions::default().include_xlated_prog_insns(true);
        let programs = ProgInfoIter::with_query_opts(options);
        programs.filter(|program| !self.programs_before.contains(&program.id)).map(|program| {
            let code = program.xlated_prog_insns.chunks_exact(8).map(Instruction::new);
            (program.name.to_string_lossy().into_owned(), code.collect())
        })
    }

    /// Whether a program takes a lock.
    fn locks(&self) -> Result<bool> {
        let call = number("bpf_spin_lock")?;
        let is_call = |it: &Instruction| it.code == CALL && it.from == 0 && it.number == call;
        Ok(self.code().any(|(_, code)| code.iter().any(is_call)))
    }
}

/// The number by which programs call this function of the kernel.
fn number(function: &str) -> Result<i32> {
    let kallsyms = fs::read_to_string("/proc/kallsyms")?;
    let address = |name: &str| -> Result<u64> {
        let line = kallsyms.lines().find(|line| line.split(' ').nth(2) == Some(name));
        Ok(u64::from_str_radix(&line.with_context(|| name.to_owned())?[..16], 16)?)
    };
    Ok(address(function)?.wrapping_sub(address("__bpf_call_base")?) as i32)
}

/// An instruction of BPF: linux/bpf.h, struct bpf_insn.
#[derive(Clone, Copy)]
struct Instruction {
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
    fn new(bytes: &[u8]) -> Instruction {
        let number = i32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let offset = i16::from_ne_bytes([bytes[2], bytes[3]]);
        Instruction { code: bytes[0], to: bytes[1] & 15, from: bytes[1] >> 4, offset, number }
    }

    /// `r1 = *(r0 + 8)`, of any size.
    fn is_load(&self) -> bool {
        self.code & 0xe7 == 0x61
    }

    /// `*(r0 + 8) = r1`.
    fn is_store(&self) -> bool {
        self.code & 0xe7 == 0x63
    }

    /// Whether it uses what is in r0.
    fn reads_r0(&self) -> bool {
        let (to, from) = (self.to == 0, self.code & 8 != 0 && self.from == 0);
        match self.code & 7 {
            0 => false,
            1 => self.from == 0,
            4 | 7 => from || to && self.code & 0xf0 != 0xb0,
            5 | 6 => self.code == EXIT || ![CALL, JUMP].contains(&self.code) && (to || from),
            _ => to || self.from == 0,
        }
    }

    /// `r1 += …`, of 32 or 64 bits.
    fn is_addition(&self) -> bool {
        matches!(self.code, 0x04 | 0x07 | 0x0c | 0x0f)
    }
}

const GONE: &str = "reads the value after it has deleted the entry, whose memory may hold another bio's start by \
     then: copy it before";
const UNCHECKED: &str = "does not look at what bpf_map_delete_elem() returns: two CPUs may delete an entry at once, \
     and only where it is 0 does the bio count";

/// What a program does, on any of its ways, that is wrong where another CPU comes between. It adds in steps to a
/// value that lies in none of the maps `own`, of each CPU, nor on the stack, which only this program knows; it
/// reads a value of the map `starts` once its entry is gone, by a call of `delete`; or never looks whether it is.
fn fault(code: &[Instruction], own: &HashSet<u32>, deletes: (u32, i32)) -> Option<String> {
    let calls_itself = code.iter().any(|it| it.code == CALL && it.from == 1);
    let (mut seen, mut deleted, mut looked_at) = (HashSet::new(), HashSet::new(), HashSet::new());
    // Where a way continues; the map that a register, or a place on the stack, points to or into, where that is
    // known, and whether its entry is gone; the delete whose result is in r0.
    let mut ways = vec![(0, BTreeMap::<(u8, i16), (u32, bool)>::new(), None)];
    while let Some((number, mut maps, mut result)) = ways.pop() {
        let is_new = seen.insert((number, maps.clone(), result));
        let Some(it) = code.get(number).filter(|_| is_new) else { continue };
        looked_at.extend(result.filter(|_| it.reads_r0()));
        let (mut to, from) = ((it.to, 0), maps.get(&(it.from, 0)).copied());
        let (map, is_gone) = from.unwrap_or_default();
        let is_own = own.contains(&map);
        let jump = (number + 1).saturating_add_signed(it.offset.into());
        let map = match it.code {
            EXIT => continue,
            // The address of a map, or of a value in it: the kernel puts the map's number there.
            0x18 => matches!(it.from, 1 | 2).then_some((it.number as u32, false)),
            0xbf => from,
            // An array is looked up without a call, by adding to the map's address.
            0x0f => from.or(maps.get(&to).copied()),
            CALL => {
                to = (0, 0);
                let map = maps.get(&(1, 0)).map(|(map, _)| (*map, false));
                maps.retain(|(register, _), _| *register > 5);
                let is_delete = map == Some((deletes.0, false)) && it.number == deletes.1;
                result = is_delete.then_some(number);
                deleted.extend(result);
                maps.values_mut().for_each(|(map, gone)| *gone |= is_delete && *map == deletes.0);
                if it.from == 1 {
                    ways.push((jump, BTreeMap::new(), None));
                }
                map
            }
            _ if it.is_store() && it.to == STACK => {
                to.1 = it.offset;
                from
            }
            _ if it.is_load() && it.from == STACK => maps.get(&(STACK, it.offset)).copied(),
            _ if it.is_load() && is_gone => return Some(GONE.into()),
            // Where this CPU's value is, stands in the map.
            _ if it.is_load() => from.filter(|_| is_own),
            _ if matches!(it.code & 7, 4 | 7) && !it.is_addition() => None, // `r0 <<= 3`
            _ if !matches!(it.code & 7, 5 | 6) || it.code == JUMP => maps.get(&to).copied(),
            _ => {
                ways.push((jump, maps.clone(), result));
                maps.get(&to).copied()
            }
        };
        maps.remove(&to);
        maps.extend(map.map(|map| (to, map)));
        result = result.filter(|_| it.to != 0 || !matches!(it.code & 7, 0 | 1 | 4 | 7));
        let next = number + 1 + usize::from(it.code == 0x18);
        ways.push((if it.code == JUMP { jump } else { next }, maps, result));
        // What a function of the program gets as an argument is not known.
        let may_be_own = from.is_none() && calls_itself && !own.is_empty();
        if !it.is_load() || it.from == STACK || is_own || may_be_own {
            continue;
        }
        let next = &code[number + 1..code.len().min(number + 8)];
        let is_end = |e: &Instruction| e.is_store() && (e.to, e.offset) == (it.from, it.offset);
        let Some(end) = next.iter().position(is_end) else { continue };
        let adds = |add: &Instruction| {
            add.is_addition() && (add.to == it.to || (add.code & 8 != 0 && add.from == it.to))
        };
        if next[..end].iter().any(adds) {
            return Some(format!(
                "adds to a value in steps, and another CPU may do so meanwhile (load, add, store: instruction \
                 {number} and the next ones); __sync_fetch_and_add() is one step"
            ));
        }
    }
    (!deleted.is_subset(&looked_at)).then(|| UNCHECKED.into())
}

impl Arrays {
    /// Where the address of an I/O is, but as a key, in maps that have one of its times, too.
    pub fn records(&self, io: u64, times: RangeInclusive<u64>) -> Vec<Place> {
        let mut records = Vec::new();
        for (map, key, value) in self.0.iter().filter(|(_, key, _)| **key != io.to_ne_bytes()) {
            let words = |value: &[u8]| value.chunks_exact(8).map(word).collect::<Vec<_>>();
            let of_map = self.0.iter().filter(|(other, ..)| other == map);
            if !of_map.flat_map(|(.., value)| words(value)).any(|word| times.contains(&word)) {
                continue;
            }
            let found = words(value).into_iter().enumerate().filter(|(_, word)| *word == io);
            records.extend(found.map(|(number, _)| Place {
                map: map.clone(),
                key: key.clone(),
                offset: number * 8,
            }));
        }
        records
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

/// Puts entries with these keys, and values of zeroes, into a map whose keys are addresses.
pub fn insert(map: &MapHandle, keys: &[u64]) -> Result<()> {
    ensure!(map.key_size() == 8, "the keys have {} bytes; an address has 8", map.key_size());
    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_ne_bytes()).collect();
    let values = vec![0; map.value_size() as usize * keys.len()];
    let count = keys.len() as u32;
    map.update_batch(&bytes, &values, count, MapFlags::ANY, MapFlags::ANY).context("entries")
}
