//! Notices that heaps and nodes of this machine publish, found among the files that their processes have open.

use farfield_core::notice;
use farfield_pager::runner::find_memfds;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A notice and the file in which the next one will be.
pub(crate) struct FoundNotice {
    pub(crate) pid: u32,
    path: PathBuf,
    inode: u64,
    pub(crate) notice: Notice,
}

impl FoundNotice {
    /// Returns the notices of one process in files of this name.
    pub(crate) fn find(pid: u32, file_name: &CStr) -> Vec<FoundNotice> {
        let Ok(paths) = find_memfds(pid, file_name) else { return Vec::new() };
        let mut found: Vec<_> = paths.filter_map(|path| FoundNotice::open(pid, path)).collect();
        // A process may have the same notice open twice.
        let mut seen = BTreeSet::new();
        found.retain(|notice| seen.insert(notice.inode));
        found
    }

    /// Returns the number of the file, which no other notice has while this one is there.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    fn open(pid: u32, path: PathBuf) -> Option<FoundNotice> {
        let (inode, notice) = Notice::read(&path)?;
        // Otherwise the notice was inherited and belongs to the parent.
        (notice.number("pid") == u64::from(own_pid(pid)?)).then_some(FoundNotice { pid, path, inode, notice })
    }

    /// Returns what the file says now. `None` if it is not there any more.
    pub(crate) fn read(&self) -> Option<Notice> {
        Notice::read(&self.path).filter(|(inode, _)| *inode == self.inode).map(|(_, notice)| notice)
    }
}

/// Returns the number of a process in its own PID namespace.
fn own_pid(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// Lines of a notice, by name.
pub(crate) struct Notice(BTreeMap<String, String>);

impl Notice {
    /// Reads a notice. Returns the inode number of its file, too.
    fn read(path: &Path) -> Option<(u64, Notice)> {
        // The notice may be in the middle of an update, which takes a microsecond.
        const TRIES: usize = 10;
        let read = |_| {
            let mut bytes = Vec::new();
            let mut file = std::fs::File::open(path).ok()?;
            std::io::Read::read_to_end(&mut file, &mut bytes).ok()?;
            let lines = notice::open(&bytes)?.lines().filter_map(|line| line.split_once(' '));
            let lines = lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            Some((file.metadata().ok()?.ino(), Notice(lines)))
        };
        (0..TRIES).find_map(read)
    }

    /// Returns a text, or an empty one if the library's version does not publish it.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// Returns a number, or 0 if the library's version does not publish it.
    pub(crate) fn number(&self, name: &str) -> u64 {
        self.text(name).parse().unwrap_or(0)
    }

    /// Returns numbers; those that are none are passed over.
    pub(crate) fn numbers(&self, name: &str) -> Vec<u64> {
        self.text(name).split(' ').filter_map(|value| value.parse().ok()).collect()
    }

    /// Returns all lines that are a number.
    pub(crate) fn counters(&self) -> BTreeMap<String, u64> {
        self.0.iter().filter_map(|(name, value)| Some((name.clone(), value.parse().ok()?))).collect()
    }

    /// Returns the words of the lines `PREFIX_0`, `PREFIX_1`, and so on.
    pub(crate) fn rows(&self, prefix: &str) -> impl Iterator<Item = Vec<&str>> {
        let line = move |index| self.0.get(&format!("{prefix}_{index}"));
        (0..).map_while(line).map(|line| line.split(' ').collect())
    }
}
