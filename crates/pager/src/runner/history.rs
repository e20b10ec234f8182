//! File in which runs of a program leave what they have shown, for the claims of later ones.
//!
//! The file belongs to its user, like a profile. It is read before a run and changed after it, under a
//! lock, so that runs side by side lose nothing of each other.

use super::report::ByteSize;
use farfield_core::policy::cluster::{FinishedRun, HISTORY_VERSION, RunHistory};
use farfield_os::disk;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Largest file that is read: more is none of ours.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Longest wait for another run that is changing the file.
const LOCK_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two attempts to take the lock.
const LOCK_EVERY: Duration = Duration::from_millis(20);

/// File with the record of earlier runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HistoryFile(pub PathBuf);

impl HistoryFile {
    /// Reads the record; an empty one if there is no file yet.
    pub fn read(&self) -> io::Result<RunHistory> {
        match File::open(&self.0) {
            Ok(file) => parse(file),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(RunHistory::default()),
            Err(error) => Err(error),
        }
    }

    /// Adds a run to the record, and returns the record. Blocks for some seconds at most while another
    /// run does the same. A run that is killed meanwhile leaves the record as it was.
    pub fn add(&self, run: &FinishedRun) -> io::Result<RunHistory> {
        let lock = lock(&self.beside(".lock"))?;
        let mut history = self.read()?;
        history.add(run);
        let (new, text) = (self.beside(".new"), serde_json::to_string_pretty(&history)?);
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        std::fs::rename(&new, &self.0)?;
        drop(lock);
        Ok(history)
    }

    /// Returns the path of a file of ours beside the record.
    fn beside(&self, ending: &str) -> PathBuf {
        let mut path = self.0.clone().into_os_string();
        path.push(ending);
        path.into()
    }
}

fn parse(file: File) -> io::Result<RunHistory> {
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text)?;
    let history: RunHistory = serde_json::from_slice(&text)?;
    match history.version {
        HISTORY_VERSION => Ok(history),
        other => Err(io::Error::other(format!("it has version {other}, and this farfield reads {HISTORY_VERSION}"))),
    }
}

/// Takes the lock, which the kernel releases when the file is closed.
fn lock(path: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
    let until = Instant::now() + LOCK_WITHIN;
    loop {
        match disk::lock(file.as_raw_fd()) {
            Ok(()) => return Ok(file),
            Err(errno) if errno.0 != libc::EAGAIN || Instant::now() >= until => return Err(errno.into()),
            Err(_) => std::thread::sleep(LOCK_EVERY),
        }
    }
}

/// Says what the runs have shown, and what the next one may ask for.
pub(super) fn summary(history: &RunHistory, memory_bytes: u64) -> String {
    let runs = if history.runs == 1 { "1 run".to_owned() } else { format!("{} runs", history.runs) };
    let peak = history.peak_bytes.iter().max().map_or(0, |bytes| *bytes);
    let had = format!("{runs}: at most {} of {}", ByteSize(peak), ByteSize(memory_bytes));
    match history.enough_bytes(memory_bytes) {
        Some(bytes) => format!("{had} that it asked for; --mem {}M would be enough", bytes.div_ceil(1 << 20)),
        None => format!("{had}; the next one claims by what they have shown"),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a record that two runs spoil, or that keeps a program from running.
    use super::*;
    use farfield_core::policy::cluster::HistoryPoint;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("farfield-history-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn run(near_bytes: u64) -> FinishedRun {
        let slowdown = Some(HistoryPoint { near_bytes, slowdown: 1.5 });
        FinishedRun { memory_bytes: 8 << 30, peak_bytes: 2 << 30, slowdown, seconds: Some(60.0) }
    }

    #[test]
    fn runs_side_by_side_lose_nothing_of_each_other() {
        let folder = Folder::new("side");
        let file = HistoryFile(folder.0.join("train.json"));
        assert_eq!(file.read().unwrap(), RunHistory::default());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..5).for_each(|_| drop(file.add(&run(4 << 30)).unwrap())));
            }
        });
        let history = file.read().unwrap();
        assert_eq!((history.runs, history.peak_bytes.len(), history.slowdowns.len()), (40, 8, 1));
        assert_eq!(
            summary(&history, 8 << 30),
            "40 runs: at most 2.0 GiB of 8.0 GiB that it asked for; --mem 2304M would be enough"
        );
        assert!(summary(&history, 2 << 30).ends_with("2.0 GiB; the next one claims by what they have shown"));
    }

    #[test]
    fn what_is_no_record_is_an_error_and_is_not_overwritten() {
        let folder = Folder::new("wrong");
        let file = HistoryFile(folder.0.join("train.json"));
        for text in ["", "{}", "[1]", "{\"version\":1}"] {
            std::fs::write(&file.0, text).unwrap();
            assert!(file.read().is_err() && file.add(&run(1)).is_err(), "{text}");
            assert_eq!(std::fs::read_to_string(&file.0).unwrap(), text);
        }
        let later = serde_json::to_string(&RunHistory { version: 2, ..RunHistory::default() }).unwrap();
        std::fs::write(&file.0, later).unwrap();
        assert!(file.read().unwrap_err().to_string().contains("version 2"));
        let nowhere = HistoryFile(folder.0.join("no/such/folder/train.json"));
        assert!(nowhere.read().is_ok() && nowhere.add(&run(1)).is_err());
    }
}
