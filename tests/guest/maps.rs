//! The maps of a program that runs beside the test, read and written by the bpf() system call.

use std::{collections::HashSet, fmt};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapType,
    query::{MapInfo, MapInfoIter},
};

/// The maps that were loaded before; those of a program that is started now are the others.
pub struct Maps(HashSet<u32>);

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
        Maps(MapInfoIter::default().map(|map| map.id).collect())
    }

    fn added(&self) -> impl Iterator<Item = MapInfo> {
        MapInfoIter::default().filter(|map| !self.0.contains(&map.id))
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
