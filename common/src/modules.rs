//! The kernel's modules: whether an address still belongs to the module that it belonged to.

use std::{
    collections::HashMap,
    fs,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    sync::{Mutex, OnceLock, PoisonError},
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink,
        netlink::SocketAddrNetlink, recv, socket_with,
    },
};

/// The modules of the time when names may first be asked for, and what has become of them.
static SINCE: OnceLock<Mutex<Modules>> = OnceLock::new();

/// The modules, since a certain time.
pub(crate) struct Modules {
    /// Those of the beginning, by name.
    first: HashMap<String, u64>,
    /// The kernel's messages about modules that come and go.
    messages: Option<OwnedFd>,
    /// In this order. `None`: there were messages that nobody has read.
    changes: Vec<Option<Change>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    Loaded(String),
    Unloaded(String),
}

/// Begins to follow which modules come and go. Later calls change nothing.
pub(crate) fn follow() {
    SINCE.get_or_init(|| {
        let messages = messages().ok();
        Mutex::new(Modules { first: loaded(), messages, changes: Vec::new() })
    });
}

/// What has become of the modules since [`follow`].
pub(crate) fn fates() -> Fates {
    follow();
    match SINCE.get() {
        Some(modules) => modules.lock().unwrap_or_else(PoisonError::into_inner).fates(),
        None => Fates::new(&HashMap::new(), HashMap::new(), &[]),
    }
}

/// The modules that are loaded now, each with a number that no other one has, not even the same one loaded
/// again: the inode of its directory.
fn loaded() -> HashMap<String, u64> {
    let entries = fs::read_dir("/sys/module").into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        Some((entry.file_name().into_string().ok()?, entry.metadata().ok()?.ino()))
    });
    numbered.collect()
}

/// A socket with the messages that udev reads.
fn messages() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let uevents = Some(netlink::KOBJECT_UEVENT);
    let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, uevents)?;
    bind(&socket, &SocketAddrNetlink::new(0, 1))?; // the kernel's own, not udev's
    Ok(socket)
}

impl Modules {
    fn fates(&mut self) -> Fates {
        // The list first: what comes after it has a message.
        let now = loaded();
        let mut message = [MaybeUninit::uninit(); 8192];
        while let Some(socket) = &self.messages {
            match recv(socket, &mut message, RecvFlags::empty()) {
                Ok(((message, _), _)) => self.changes.extend(Change::parse(message).map(Some)),
                Err(Errno::NOBUFS) => self.changes.push(None),
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        if self.messages.is_none() {
            self.changes = vec![None];
        }
        Fates::new(&self.first, now, &self.changes)
    }
}

impl Change {
    /// Of `add@/module/xfs`, with more behind a zero. `None`: it is about something else.
    fn parse(message: &[u8]) -> Option<Change> {
        let head = message.split(|&byte| byte == 0).next()?;
        let (action, name) = std::str::from_utf8(head).ok()?.split_once("@/module/")?;
        match action {
            "add" => Some(Change::Loaded(name.to_owned())),
            "remove" => Some(Change::Unloaded(name.to_owned())),
            _ => None,
        }
    }
}

/// What has become of the modules.
pub(crate) struct Fates {
    /// Those that are loaded, and whether their memory was no other module's meanwhile.
    loaded: HashMap<String, bool>,
    /// Those that have been unloaded, in the order of their names.
    pub(crate) unloaded: Vec<String>,
}

impl Fates {
    fn new(
        first: &HashMap<String, u64>,
        now: HashMap<String, u64>,
        changes: &[Option<Change>],
    ) -> Fates {
        let lost = first.iter().filter(|(name, number)| now.get(*name) != Some(*number));
        let removed = changes.iter().filter_map(|change| match change {
            Some(Change::Unloaded(name)) => Some(name),
            _ => None,
        });
        let mut unloaded: Vec<String> =
            lost.map(|(name, _)| name).chain(removed).cloned().collect();
        unloaded.sort();
        unloaded.dedup();
        // A module that was loaded before the first one was unloaded took no other one's place.
        let before = changes.split(|change| !matches!(change, Some(Change::Loaded(_)))).next();
        let before = before.unwrap_or_default();
        let is_own = |name: &String, number: &u64| {
            first.get(name) == Some(number)
                || unloaded.is_empty() && !changes.contains(&None)
                || !unloaded.contains(name) && before.contains(&Some(Change::Loaded(name.clone())))
        };
        let own = |(name, number)| {
            let is_own = is_own(&name, &number);
            (name, is_own)
        };
        Fates { loaded: now.into_iter().map(own).collect(), unloaded }
    }

    /// Whether what lies in the memory of a module, `[xfs]`, has always been that module. The kernel names other
    /// code in this way, too, which is no module: `[bpf]`.
    pub(crate) fn is_own(&self, module: &str) -> bool {
        let name = module.trim_matches(['[', ']']);
        self.loaded
            .get(name)
            .copied()
            .unwrap_or(["bpf", "__builtin__ftrace", "__builtin__kprobes"].contains(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(modules: &[(&str, u64)]) -> HashMap<String, u64> {
        modules.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
    }

    #[test]
    fn a_message_names_a_module() {
        let loaded = Change::parse(b"add@/module/xfs\0ACTION=add\0DEVPATH=/module/xfs\0");
        assert_eq!(loaded, Some(Change::Loaded("xfs".into())));
        assert_eq!(Change::parse(b"remove@/module/xfs"), Some(Change::Unloaded("xfs".into())));
        assert_eq!(Change::parse(b"change@/devices/virtual/block/dm-0\0ACTION=change\0"), None);
    }

    #[test]
    fn a_module_in_the_place_of_another_one_is_not_believed() {
        let first = numbered(&[("ext4", 1), ("xfs", 2), ("dm_mod", 3)]);
        let loaded = |name: &str| Some(Change::Loaded(name.into()));
        let unloaded = |name: &str| Some(Change::Unloaded(name.into()));
        let fates = |now: &[(&str, u64)], changes: &[Option<Change>]| {
            let fates = Fates::new(&first, numbered(now), changes);
            let own = ["[ext4]", "[dm_mod]", "[btrfs]", "[bpf]"].map(|name| fates.is_own(name));
            (own, fates.unloaded.join(" "))
        };
        let all = [("ext4", 1), ("xfs", 2), ("dm_mod", 3)];
        assert_eq!(fates(&all, &[]), ([true, true, false, true], String::new()));
        let more = [("ext4", 1), ("xfs", 2), ("dm_mod", 3), ("btrfs", 9)];
        let own = ([true; 4], String::new());
        assert_eq!(fates(&more, &[loaded("btrfs")]), own);
        let other = [("ext4", 1), ("dm_mod", 3), ("btrfs", 9)];
        let place = [true, true, false, true];
        let changes = [unloaded("xfs"), loaded("btrfs")];
        assert_eq!(fates(&other, &changes), (place, "xfs".into()));
        let changes = [loaded("btrfs"), unloaded("xfs")];
        assert_eq!(fates(&other, &changes), ([true; 4], "xfs".into()));
        // One that was there only in between.
        let changes = [loaded("f2fs"), unloaded("f2fs"), loaded("btrfs")];
        assert_eq!(fates(&more, &changes), (place, "f2fs".into()));
        // Not all messages have been read.
        assert_eq!(fates(&more, &[None, loaded("btrfs")]), (place, String::new()));
        // Loaded again.
        let again = [("ext4", 1), ("xfs", 2), ("dm_mod", 8)];
        let changes = [unloaded("dm_mod"), loaded("dm_mod")];
        assert_eq!(fates(&again, &changes), ([true, false, false, true], "dm_mod".into()));
    }
}
