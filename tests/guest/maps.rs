//! The maps of a program that runs beside the test.

use std::fmt;

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType, ProgramAttachType, ProgramType,
    btf::{Btf, types::Func},
    query::{
        LinkInfo, LinkInfoIter, LinkTypeInfo, MapInfo, MapInfoIter, ProgInfoIter,
        ProgInfoQueryOptions,
    },
};

use crate::{
    bytecode::{self, Functions, Instruction, Rules},
    prelude::*,
};

/// The maps and programs that were loaded before; those of a program that is started now are the others.
pub struct Maps {
    before: HashSet<u32>,
    programs_before: HashSet<u32>,
}

/// What an I/O or a read begins with.
const START_FUNCTIONS: [&str; 3] = ["submit_bio", "blk_mq_start_request", "filemap_read"];

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

    /// The bytes of the largest ring buffer, or 0.
    pub fn ring(&self) -> u32 {
        let rings = self.added().filter(|map| map.ty == MapType::RingBuf);
        rings.map(|map| map.max_entries).max().unwrap_or_default()
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
    /// waited for, and never happens where QEMU emulates both CPUs in one thread. See [`bytecode::fault`].
    /// `deletes_count`: also that the result of each delete of a start is looked at.
    pub fn ensure_atomic(&self, deletes_count: bool) -> Result<()> {
        let starts = self.added().find(|map| map.name == "starts").map_or(0, |map| map.id);
        self.own_places(starts, deletes_count).map(drop)
    }

    /// Checks that no two programs write to one record of a CPU: one of them may interrupt the other one.
    pub fn ensure_own_records(&self) -> Result<()> {
        let mut owners = BTreeMap::new();
        for (name, places) in self.own_places(0, false)? {
            for place in places {
                let owner = owners.entry(place).or_insert_with(|| name.clone());
                ensure!(
                    *owner == name,
                    "your programs {owner}() and {name}() write to one entry of a map, and one of them may \
                     interrupt the other one: give each of them an entry of its own"
                );
            }
        }
        Ok(())
    }

    /// The programs without a fault, and where each writes to memory of its CPU.
    fn own_places(
        &self,
        starts: u32,
        deletes_count: bool,
    ) -> Result<Vec<(String, BTreeSet<bytecode::Shared>)>> {
        let maps = self.added().map(|map| (map.id, bytecode::Kind::of(&map))).collect();
        let kernel = Functions::new()?;
        let own = self.code().map(|(name, has_arguments, code)| {
            let rules =
                Rules { maps: &maps, kernel: &kernel, starts, deletes_count, has_arguments };
            let own = bytecode::fault(&code, &rules);
            let own = own.map_err(|fault| anyhow!("your program {name}() {fault}"))?;
            Ok((name, own))
        });
        own.collect()
    }

    /// Checks that what sees the start of an I/O was attached last: else a start is seen whose end is not hooked yet.
    pub fn ensure_start_is_last(&self) -> Result<()> {
        let vmlinux = Btf::from_vmlinux()?;
        let ids = START_FUNCTIONS.map(|name| {
            let function = vmlinux.type_by_name::<Func<'_>>(name);
            function.map_or(0, |function| u32::from(function.type_id()))
        });
        // For a kprobe, the link does not say of which function on 6.1.
        let probes: Value = serde_json::from_str(&shell("bpftool --json perf show")?)?;
        let probes = probes.as_array().context("an odd list")?;
        let begins = |link: &LinkInfo| match &link.info {
            LinkTypeInfo::Tracing(it) => {
                let is_end = matches!(it.attach_type, ProgramAttachType::TraceFexit);
                ids.contains(&it.target_btf_id) && !is_end
            }
            _ => probes.iter().any(|it| {
                let function = it["func"].as_str().unwrap_or_default();
                it["prog_id"] == link.prog_id && START_FUNCTIONS.contains(&function)
            }),
        };
        let own = |link: &LinkInfo| !self.programs_before.contains(&link.prog_id);
        let (first, others): (Vec<_>, Vec<_>) =
            LinkInfoIter::default().filter(own).partition(begins);
        let earliest = first.iter().map(|link| link.id).min();
        let earliest = earliest.context("no program of yours is at the start of an I/O")?;
        let late = others.iter().find(|link| link.id > earliest).map(|link| link.prog_id);
        let late = ProgInfoIter::default().find(|program| Some(program.id) == late);
        let late = late.map(|program| program.name.to_string_lossy().into_owned());
        let name = late.as_deref().unwrap_or_default();
        ensure!(
            late.is_none(),
            "your program {name}() was attached after the one that sees an I/O begin: what begins between \
             them has an entry, and an end that nobody sees. Attach the start last"
        );
        Ok(())
    }

    /// The instructions of each program, and whether the hook hands arguments of a function to it.
    fn code(&self) -> impl Iterator<Item = (String, bool, Vec<Instruction>)> {
        let options = ProgInfoQueryOptions::default().include_xlated_prog_insns(true);
        let programs = ProgInfoIter::with_query_opts(options);
        programs.filter(|program| !self.programs_before.contains(&program.id)).map(|program| {
            let code = program.xlated_prog_insns.chunks_exact(8).map(Instruction::new);
            let has_arguments = program.ty != ProgramType::Tracepoint;
            (program.name.to_string_lossy().into_owned(), has_arguments, code.collect())
        })
    }

    /// Whether a program takes a lock.
    fn locks(&self) -> Result<bool> {
        let lock = Functions::new()?.number("bpf_spin_lock");
        let is_call = |it: &Instruction| it.calls() == lock && lock.is_some();
        Ok(self.code().any(|(.., code)| code.iter().any(is_call)))
    }
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
