//! Whose data a bio carries.

use std::fmt;

use anyhow::{Result, anyhow};

use crate::event::{Completed, Event};

/// Functions by which direct I/O is known, in the order of `enum direct` in file.h.
pub const DIRECTS: [&str; 6] = [
    "iomap_dio_bio_end_io",
    "dio_bio_end_io",
    "dio_bio_end_aio",
    "blkdev_bio_end_io",
    "blkdev_bio_end_io_async",
    "submit_bio_wait_endio",
];

/// A file of a file system.
#[derive(Clone)]
pub struct File {
    pub inode: u64,
    /// How many names it has; 0: it was deleted.
    pub links: u32,
    /// Where it is in its file system, if that is known.
    pub path: Option<String>,
}

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let File { inode, links, path } = self;
        match path {
            Some(path) => write!(f, "{inode} {}", common::printable(path)),
            None if *links == 0 => write!(f, "{inode} (deleted)"),
            None => write!(f, "{inode}"),
        }
    }
}

/// A bio as the BPF program sends it, and its file. A record ends with the last name that is used; without --file, with
/// the bio.
pub fn sent(bytes: &[u8]) -> Result<(Completed, Option<File>)> {
    if let Ok(bio) = plain::from_bytes::<Completed>(bytes)
        && bytes.len() == size_of::<Completed>()
    {
        return Ok((*bio, None));
    }
    let mut event = Event::default();
    // SAFETY: the struct is integers and characters without padding.
    let whole = unsafe { plain::as_mut_bytes(&mut event) };
    let used = whole.get_mut(..bytes.len()).filter(|used| used.len() >= size_of::<Completed>());
    used.ok_or_else(|| anyhow!("a record of {} bytes", bytes.len()))?.copy_from_slice(bytes);
    let file = (event.inode != 0).then(|| {
        let names: Vec<u8> = event.names.iter().map(|&byte| byte as u8).collect();
        let path = path(names.get(..event.bytes as usize).unwrap_or_default());
        File { inode: event.inode, links: event.links, path }
    });
    Ok((event.bio, file))
}

/// The path of which these are the names, the file's first, each with a 0 behind it.
fn path(names: &[u8]) -> Option<String> {
    let names = names.strip_suffix(&[0])?.split(|&byte| byte == 0).rev();
    Some(names.fold(String::new(), |path, name| path + "/" + &String::from_utf8_lossy(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_begins_at_the_root() {
        assert_eq!(path(b"file\0of\0home\0").as_deref(), Some("/home/of/file"));
        assert_eq!(path(b"file\0").as_deref(), Some("/file"));
        assert_eq!(path(b""), None);
    }
}
