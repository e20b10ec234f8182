//! What was set up on the machine, and how to take it down again, whatever happens.
//!
//! Swap and cgroups outlive the process that made them. So each step is written down *before* it is taken: in memory,
//! undone in reverse order when the list is dropped (end, error, panic, Ctrl-C), and in a ledger file, replayed by the
//! next run if this process was killed before it could. Every step can be undone twice, or without having been done.

use crate::child::Interrupted;
use crate::{note, swap, sys};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// One thing to undo.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    /// Kill what is inside, remove.
    Cgroup(PathBuf),
    /// Stop swapping to this, if the swap header is ours.
    Swap(PathBuf),
    /// Give the memory of a zram device back.
    Zram(u32),
    /// Take away a zram device that we added.
    ZramAdded(u32),
    /// Delete.
    File(PathBuf),
    /// Write an old value back.
    Setting(PathBuf, String),
}

/// The kernel lets go of swap devices and cgroups a moment after their last user has ended.
const UNDO_WITHIN: Duration = Duration::from_secs(10);
const RETRY_AFTER: Duration = Duration::from_millis(20);

impl Step {
    fn undo(&self) -> io::Result<()> {
        let done = match self {
            Step::Cgroup(path) => cgroup_remove(path),
            Step::Swap(path) => swap::off_if_ours(path),
            Step::Zram(id) => swap::zram_reset(*id),
            Step::ZramAdded(id) => swap::zram_remove(*id),
            Step::File(path) => fs::remove_file(path),
            Step::Setting(path, value) => fs::write(path, value),
        };
        match done {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn undo_within(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            match self.undo() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= deadline => {
                    return Err(error).with_context(|| self.by_hand());
                }
                Err(_) => thread::sleep(RETRY_AFTER),
            }
        }
    }

    fn by_hand(&self) -> String {
        match self {
            Step::Cgroup(path) => format!("cannot remove the cgroup; by hand: rmdir {}", path.display()),
            Step::Swap(path) => format!("cannot stop swapping; by hand: swapoff {}", path.display()),
            Step::Zram(id) => format!("cannot reset zram; by hand: echo 1 > /sys/block/zram{id}/reset"),
            Step::ZramAdded(id) => {
                format!("cannot remove zram; by hand: echo {id} > /sys/class/zram-control/hot_remove")
            }
            Step::File(path) => format!("cannot delete; by hand: rm {}", path.display()),
            Step::Setting(path, value) => format!("cannot restore; by hand: echo {value} > {}", path.display()),
        }
    }
}

fn cgroup_remove(path: &Path) -> io::Result<()> {
    for pid in fs::read_to_string(path.join("cgroup.procs"))?.lines().filter_map(|line| line.parse::<i32>().ok()) {
        if pid > 1 {
            sys::kill(pid).ok(); // It may have ended meanwhile; the removal tells.
        }
    }
    fs::remove_dir(path)
}

/// The right to set up swap on this machine; one holder at a time.
pub(crate) struct Ledger {
    path: PathBuf,
    _lock: File,
}

impl Ledger {
    /// Waits for the lock at most `patience`, then undoes what a killed run has left behind.
    pub(crate) fn open(folder: &Path, patience: Duration) -> Result<Ledger> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let lock = File::create(folder.join("lock")).with_context(|| format!("cannot lock {}", folder.display()))?;
        let deadline = Instant::now() + patience;
        while !sys::try_lock(&lock)? {
            if let Some(signal) = sys::stop_signal() {
                return Err(Interrupted(signal).into());
            }
            if Instant::now() >= deadline {
                bail!("another bench run is using swap on this machine; wait until it has ended");
            }
            thread::sleep(RETRY_AFTER);
        }
        let ledger = Ledger { path: folder.join("ledger.json"), _lock: lock };
        for step in ledger.read()?.iter().rev() {
            note(&format!("bench: undoing what a killed run left behind: {step:?}"));
            step.undo_within(UNDO_WITHIN)?;
        }
        ledger.write(&[])?;
        Ok(ledger)
    }

    fn read(&self) -> Result<Vec<Step>> {
        match fs::read_to_string(&self.path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| {
                let path = self.path.display();
                format!("{path} is damaged; check swapon --show by hand, then delete it")
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", self.path.display())),
        }
    }

    fn write(&self, steps: &[Step]) -> Result<()> {
        // A new file renamed over the old one, so that a kill in between leaves one of the two whole.
        let fresh = self.path.with_extension("new");
        fs::write(&fresh, serde_json::to_string(steps)?)?;
        fs::rename(&fresh, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Steps to undo, last first, when this is dropped.
pub(crate) struct Undo<'a> {
    ledger: &'a Ledger,
    steps: Vec<Step>,
    patience: Duration,
}

impl<'a> Undo<'a> {
    pub(crate) fn new(ledger: &'a Ledger) -> Undo<'a> {
        Undo { ledger, steps: Vec::new(), patience: UNDO_WITHIN }
    }

    /// Notes a step. Call before taking it.
    pub(crate) fn note(&mut self, step: Step) -> Result<()> {
        self.steps.push(step);
        self.ledger.write(&self.steps)
    }

    /// Undoes everything now and says what could not be.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.run()
    }

    fn run(&mut self) -> Result<()> {
        let mut first_error = None;
        let mut stuck = Vec::new();
        while let Some(step) = self.steps.pop() {
            if let Err(error) = step.undo_within(self.patience) {
                note(&format!("bench: {error:#}"));
                first_error.get_or_insert(error);
                stuck.insert(0, step); // Stays in the ledger for the next run.
            }
        }
        self.ledger.write(&stuck)?;
        first_error.map_or(Ok(()), Err)
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if !self.steps.is_empty() {
            self.run().ok(); // Already reported.
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against the worst thing a benchmark can do: leave the machine different from how it found it.
    use super::*;
    use core::ops::Deref;
    use std::panic;

    /// Gone afterwards.
    struct Folder(PathBuf);

    impl Deref for Folder {
        type Target = Path;
        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    fn folder(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-bench-undo-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Children that other tests start have a locked file until they are programs of their own.
    fn open(path: &Path) -> Ledger {
        Ledger::open(path, Duration::from_secs(10)).unwrap()
    }

    #[test]
    fn steps_are_undone_last_first() {
        let folder = folder("order");
        let setting = folder.join("setting");
        fs::write(&setting, "changed").unwrap();
        let ledger = open(&folder);
        let mut undo = Undo::new(&ledger);
        undo.note(Step::Setting(setting.clone(), "first".into())).unwrap();
        undo.note(Step::Setting(setting.clone(), "second".into())).unwrap();
        undo.finish().unwrap();
        assert_eq!(fs::read_to_string(setting).unwrap(), "first");
        assert_eq!(ledger.read().unwrap(), []);
    }

    #[test]
    fn panic_and_early_return_undo_too() {
        let folder = folder("panic");
        let ledger = open(&folder);
        let file = folder.join("file");
        fs::write(&file, "").unwrap();
        let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            let mut undo = Undo::new(&ledger);
            undo.note(Step::File(file.clone())).unwrap();
            panic!("in the middle");
        }));
        assert!(outcome.is_err());
        assert!(!file.exists());
        assert_eq!(ledger.read().unwrap(), []);
    }

    #[test]
    fn one_stuck_step_does_not_hold_up_the_others_and_stays_in_the_ledger() {
        let folder = folder("stuck");
        let ledger = open(&folder);
        let (file, full) = (folder.join("file"), folder.join("full"));
        fs::write(&file, "").unwrap();
        fs::create_dir_all(full.join("inside")).unwrap();
        let mut undo = Undo::new(&ledger);
        undo.patience = Duration::from_millis(50);
        undo.note(Step::File(file.clone())).unwrap();
        undo.note(Step::File(full.clone())).unwrap(); // A folder cannot be removed like a file.
        assert!(format!("{:#}", undo.finish().unwrap_err()).contains("by hand"));
        assert!(!file.exists());
        assert_eq!(ledger.read().unwrap(), [Step::File(full)]);
    }

    #[test]
    fn killed_run_is_cleaned_up_by_the_next() {
        let folder = folder("killed");
        let file = folder.join("file");
        fs::write(&file, "").unwrap();
        let ledger = open(&folder);
        let mut undo = Undo::new(&ledger);
        undo.note(Step::File(file.clone())).unwrap();
        std::mem::forget(undo); // As SIGKILL would.
        drop(ledger);
        assert!(file.exists());
        open(&folder);
        assert!(!file.exists());
    }

    #[test]
    fn undoing_what_was_never_done_is_fine() {
        let folder = folder("never");
        let ledger = open(&folder);
        let mut undo = Undo::new(&ledger);
        undo.note(Step::File(folder.join("file"))).unwrap();
        undo.note(Step::Cgroup(folder.join("cgroup"))).unwrap();
        undo.note(Step::Swap(folder.join("swap"))).unwrap();
        undo.finish().unwrap();
    }

    #[test]
    fn second_run_waits_and_then_gives_up() {
        let folder = folder("lock");
        let first = open(&folder);
        let refused = Ledger::open(&folder, Duration::from_millis(50)).err().unwrap();
        assert!(refused.to_string().contains("another bench run"));
        drop(first);
        open(&folder);
    }

    #[test]
    fn damaged_ledger_is_not_ignored() {
        let folder = folder("damaged");
        fs::write(folder.join("ledger.json"), "[{\"swap\":").unwrap();
        let refused = Ledger::open(&folder, Duration::ZERO).err().unwrap();
        assert!(refused.to_string().contains("damaged"));
    }
}
