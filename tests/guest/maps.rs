//! The maps of a program that runs beside the test, and its instructions.

use std::{collections::HashSet, fmt};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType,
    query::{MapInfo, MapInfoIter, ProgInfoIter},
};

use crate::run::shell;

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

/// The values of all arrays of which all CPUs share the entries; global variables are one of them.
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

    /// The map of this name.
    pub fn named(&self, name: &str) -> Result<MapHandle> {
        let found = self.added().find(|map| map.name.to_string_lossy() == name);
        let found = found.with_context(|| format!("your program has no map {name}"))?;
        Ok(MapHandle::from_map_id(found.id)?)
    }

    pub fn arrays(&self) -> Result<Arrays> {
        let mut arrays = Vec::new();
        for map in self.added().filter(|map| map.ty == MapType::Array && map.max_entries <= 1024) {
            let handle = MapHandle::from_map_id(map.id)?;
            for key in handle.keys() {
                let value = handle.lookup(&key, MapFlags::ANY)?.unwrap_or_default();
                arrays.push((map.name.to_string_lossy().into_owned(), key, value));
            }
        }
        Ok(Arrays(arrays))
    }

    /// Checks that no program loads a value of a map, adds to it, and stores it: where two CPUs do so at
    /// once, one addition is lost. That is too rare to be waited for, and never happens where QEMU emulates
    /// both CPUs in one thread. A map with values for each CPU makes such an addition right.
    pub fn ensure_atomic(&self) -> Result<()> {
        let for_each_cpu = |map: MapInfo| {
            [MapType::PercpuHash, MapType::PercpuArray, MapType::LruPercpuHash].contains(&map.ty)
        };
        if self.added().any(for_each_cpu) {
            return Ok(());
        }
        let programs = ProgInfoIter::default().map(|program| program.id);
        for id in programs.filter(|id| !self.programs_before.contains(id)) {
            let code = shell(&format!("bpftool prog dump xlated id {id}"))?;
            let steps = addition_in_steps(&code);
            ensure!(
                steps.is_none(),
                "your program adds to a value in steps, and another CPU may do so meanwhile; \
                 __sync_fetch_and_add() is one step:\n{}",
                steps.unwrap_or_default()
            );
        }
        Ok(())
    }
}

/// `r1 = *(u64 *)(r0 +0)`, `r1 += r6`, `*(u64 *)(r0 +0) = r1`, if they are there, in bpftool's text. r10
/// is the stack, which only this program knows.
fn addition_in_steps(code: &str) -> Option<String> {
    let lines: Vec<&str> = code.lines().filter_map(|l| Some(l.split_once(") ")?.1)).collect();
    for (number, line) in lines.iter().enumerate() {
        let Some((register, place)) = line.split_once(" = *(") else { continue };
        if !register.starts_with(['r', 'w']) || place.contains("(r10") {
            continue;
        }
        let (store, add) = (format!("*({place} = "), format!("{register} += "));
        let added = format!(" += {register}");
        let next = &lines[number + 1..lines.len().min(number + 8)];
        let Some(end) = next.iter().position(|line| line.starts_with(&store)) else { continue };
        if next[..end].iter().any(|line| line.starts_with(&add) || line.ends_with(&added)) {
            return Some(lines[number..number + end + 2].join("\n"));
        }
    }
    None
}

impl Arrays {
    /// The places of these words, where one entry has at least two of them.
    pub fn records(&self, words: [u64; 3]) -> Vec<Place> {
        let mut records = Vec::new();
        for (map, key, value) in &self.0 {
            let found = value
                .chunks_exact(8)
                .enumerate()
                .filter(|(_, word)| words.iter().any(|wanted| **word == wanted.to_ne_bytes()));
            let found = found.map(|(number, _)| Place {
                map: map.clone(),
                key: key.clone(),
                offset: number * 8,
            });
            let found: Vec<Place> = found.collect();
            if found.len() > 1 {
                records.extend(found);
            }
        }
        records
    }
}

/// Puts entries with these keys, and values of zeroes, into a map whose keys are addresses.
pub fn insert(map: &MapHandle, keys: impl IntoIterator<Item = u64>) -> Result<u64> {
    ensure!(map.key_size() == 8, "the keys have {} bytes; an address has 8", map.key_size());
    let value = vec![0; map.value_size() as usize];
    let mut inserted = 0;
    for key in keys {
        map.update(&key.to_ne_bytes(), &value, MapFlags::NO_EXIST).context("an entry")?;
        inserted += 1;
    }
    Ok(inserted)
}
