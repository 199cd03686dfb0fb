//! The maps of a program that runs beside the test, and its instructions.

use std::{fmt, ops::RangeInclusive};

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

/// The entries of all arrays and hash maps that all CPUs share, and that no lock guards; global variables
/// are one of them.
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

    /// Checks that no program loads a value that all CPUs share, adds to it, and stores it: where two CPUs do
    /// so at once, one addition is lost. That is too rare to be waited for, and never happens where QEMU
    /// emulates both CPUs in one thread.
    pub fn ensure_atomic(&self) -> Result<()> {
        let kinds = [MapType::PercpuHash, MapType::PercpuArray, MapType::LruPercpuHash];
        let per_cpu =
            self.added().filter(|map| kinds.contains(&map.ty)).map(|map| map.id).collect();
        for (name, code) in self.code() {
            let steps = addition_in_steps(&code, &per_cpu);
            let [first, last] = steps.unwrap_or_default();
            ensure!(
                steps.is_none(),
                "your program {name} adds to a value in steps, and another CPU may do so meanwhile \
                 (instructions {first} to {last}: load, add, store); __sync_fetch_and_add() is one step"
            );
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
        let kallsyms = fs::read_to_string("/proc/kallsyms")?;
        let address = |name: &str| -> Result<u64> {
            let line = kallsyms.lines().find(|line| line.split(' ').nth(2) == Some(name));
            Ok(u64::from_str_radix(
                line.context("no symbol")?.split(' ').next().context("odd")?,
                16,
            )?)
        };
        let call = address("bpf_spin_lock")?.wrapping_sub(address("__bpf_call_base")?) as i32;
        let is_call = |it: &Instruction| it.code == CALL && it.from == 0 && it.number == call;
        Ok(self.code().any(|(_, code)| code.iter().any(is_call)))
    }
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

    /// `r1 += …`, of 32 or 64 bits.
    fn is_addition(&self) -> bool {
        matches!(self.code, 0x04 | 0x07 | 0x0c | 0x0f)
    }
}

/// Where a value is loaded, added to, and stored, that lies in none of the maps `per_cpu`, nor on the stack,
/// which only this program knows.
fn addition_in_steps(code: &[Instruction], per_cpu: &HashSet<u32>) -> Option<[usize; 2]> {
    let calls_itself = code.iter().any(|it| it.code == CALL && it.from == 1);
    // The map that a register, or a place on the stack, points to or into, where that is known.
    let mut maps = HashMap::<(u8, i16), u32>::new();
    for (number, it) in code.iter().enumerate() {
        let (to, from) = ((it.to, 0), maps.get(&(it.from, 0)).copied());
        let is_own = |map: Option<u32>| map.is_some_and(|map| per_cpu.contains(&map));
        let map = match it.code {
            // The address of a map, or of a value in it: the kernel puts the map's number there.
            0x18 if matches!(it.from, 1 | 2) => Some(it.number as u32),
            0xbf => from,
            // An array is looked up without a call, by adding to the map's address.
            0x0f => from.or(maps.get(&to).copied()),
            _ if it.is_addition() => maps.get(&to).copied(),
            CALL => {
                let map = maps.get(&(1, 0)).copied();
                maps.retain(|(register, _), _| *register > 5);
                maps.extend(map.map(|map| ((0, 0), map)));
                continue;
            }
            _ if it.is_store() && it.to == STACK => {
                maps.remove(&(STACK, it.offset));
                maps.extend(from.map(|map| ((STACK, it.offset), map)));
                continue;
            }
            _ if it.is_load() && it.from == STACK => maps.get(&(STACK, it.offset)).copied(),
            // Where this CPU's value is, stands in the map.
            _ if it.is_load() => from.filter(|map| per_cpu.contains(map)),
            // `r0 <<= 3`, a jump, a store
            _ if it.code & 7 != 4 && it.code & 7 != 7 || it.code == 0 => continue,
            _ => None,
        };
        maps.remove(&to);
        maps.extend(map.map(|map| (to, map)));
        // What a function of the program gets as an argument is not known.
        let may_be_own = from.is_none() && calls_itself && !per_cpu.is_empty();
        if !it.is_load() || it.from == STACK || is_own(from) || may_be_own {
            continue;
        }
        let next = &code[number + 1..code.len().min(number + 8)];
        let is_end =
            |end: &Instruction| end.is_store() && (end.to, end.offset) == (it.from, it.offset);
        let Some(end) = next.iter().position(is_end) else { continue };
        let adds = |add: &Instruction| {
            add.is_addition() && (add.to == it.to || (add.code & 8 != 0 && add.from == it.to))
        };
        if next[..end].iter().any(adds) {
            return Some([number, number + end + 1]);
        }
    }
    None
}

impl Arrays {
    /// The places of the address of an I/O, in maps that have one of its times, too. What has it as its key is
    /// of that I/O alone.
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
