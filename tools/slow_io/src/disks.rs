//! The disks and partitions that bios are for, by what identifies them.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use anyhow::Result;
use common::BlockDevice;

use crate::trace::types::submission;

/// A disk or partition: a device number alone may be another one's later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id {
    /// The disk's.
    pub diskseq: u64,
    /// Its own number, or that of a partition.
    pub device: u32,
}

impl From<&BlockDevice> for Id {
    fn from(there: &BlockDevice) -> Id {
        Id { diskseq: there.diskseq, device: there.device.0 }
    }
}

impl From<&submission> for Id {
    fn from(by: &submission) -> Id {
        Id { diskseq: by.diskseq, device: by.dev }
    }
}

/// The names of all that have been seen since the start.
#[derive(Default)]
pub struct Names(RefCell<HashMap<Id, Rc<str>>>);

impl Names {
    /// Looks which disks there are now.
    pub fn look(&self) -> Result<()> {
        let there = common::block_devices()?;
        let named = |there: BlockDevice| (Id::from(&there), common::printable(&there.name).into());
        self.0.borrow_mut().extend(there.into_iter().map(named));
        Ok(())
    }

    /// The name of a disk that is there now, by its number alone.
    pub fn of_device(&self, device: u32) -> Result<Rc<str>> {
        self.look()?;
        let known = self.0.borrow();
        let newest = known.keys().filter(|id| id.device == device).max();
        newest.map_or_else(|| self.name(Id { diskseq: 0, device }), |id| Ok(Rc::clone(&known[id])))
    }

    /// All that have been seen.
    pub fn all(&self) -> Vec<Id> {
        self.0.borrow().keys().copied().collect()
    }

    /// The name of one; its numbers where it came and went between two looks.
    pub fn name(&self, id: Id) -> Result<Rc<str>> {
        if !self.0.borrow().contains_key(&id) {
            self.look()?;
        }
        let numbers = || format!("{}:{}", id.device >> 20, id.device & 0xfffff).into();
        Ok(self.0.borrow().get(&id).cloned().unwrap_or_else(numbers))
    }
}
