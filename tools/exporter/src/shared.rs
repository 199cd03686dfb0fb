//! Maps whose memory this process shares with the kernel.

use std::{marker::PhantomData, ops::Deref, os::fd::AsFd, sync::atomic::AtomicU64};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{Map, MapCore};
use memmap2::{MmapMut, MmapOptions};
use rustix::param::page_size;

use crate::trace::types;

/// A type that consists of atomic integers only.
///
/// # Safety
/// Any bytes are a value of it, and it needs no more alignment than a page has.
pub unsafe trait Atomics {}

/// The values of an array of the flag `BPF_F_MMAPABLE`.
pub struct Shared<T> {
    memory: MmapMut,
    length: usize,
    of: PhantomData<T>,
}

impl<T: Atomics> Shared<T> {
    /// Maps the first `length` values into memory.
    pub fn new(map: &Map<'_>, length: usize) -> Result<Shared<T>> {
        ensure!(map.value_size() as usize == size_of::<T>(), "a value is {}", map.value_size());
        let bytes = (length * size_of::<T>()).next_multiple_of(page_size());
        // SAFETY: the kernel changes the memory, which is read and written by atomics only.
        let memory = unsafe { MmapOptions::new().len(bytes).map_mut(&map.as_fd()) }
            .with_context(|| format!("the map {:?} cannot be mapped", map.name()))?;
        Ok(Shared { memory, length, of: PhantomData })
    }
}

impl<T: Atomics> Deref for Shared<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is as long, starts with a page, and its bytes are values of T: `Atomics`.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.length) }
    }
}

/// `struct pages` of reads.h: of one CPU.
#[repr(C)]
pub struct Pages([AtomicU64; 3]);

const _: () = assert!(size_of::<Pages>() == size_of::<types::pages>());
// SAFETY: atomics only.
unsafe impl Atomics for Pages {}

impl Pages {
    /// Hit, missed, readahead.
    pub fn read(&self) -> [u64; 3] {
        read(&self.0)
    }
}

/// The values of some counters.
pub fn read<const N: usize>(counters: &[AtomicU64; N]) -> [u64; N] {
    counters.each_ref().map(|counter| counter.load(std::sync::atomic::Ordering::Relaxed))
}
