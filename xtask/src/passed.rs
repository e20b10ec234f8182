//! Test programs that have passed, with what they were made of. Those that nothing has changed for
//! are not run again.
//!
//! A file counts as unchanged if its length and the time of its last change are what they were, as
//! for cargo: what it does not build again it leaves alone. The kernel, and programs that tests
//! start, are not looked at.

use crate::chores;
use anyhow::{Context, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// What the result of a test program depends on, as one number.
#[derive(Default)]
pub(crate) struct Inputs(DefaultHasher);

impl Inputs {
    /// Adds words: arguments, or parts of the environment.
    pub(crate) fn words(mut self, words: impl Hash) -> Inputs {
        words.hash(&mut self.0);
        self
    }

    /// Adds a file, or all files of a folder. What is not there is nothing.
    pub(crate) fn files(mut self, path: &Path) -> Result<Inputs> {
        let mut waiting = vec![path.to_owned()];
        while let Some(path) = waiting.pop() {
            let Ok(found) = path.metadata() else { continue };
            if found.is_dir() {
                let entries = std::fs::read_dir(&path).with_context(|| path.display().to_string())?;
                let mut entries: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
                // Not in the order of the folder, which differs from one to the next.
                entries.sort();
                waiting.append(&mut entries);
            } else {
                (path, found.len(), found.modified()?).hash(&mut self.0);
            }
        }
        Ok(self)
    }

    fn number(&self) -> String {
        format!("{:016x}\n", self.0.finish())
    }
}

fn record(name: &str) -> PathBuf {
    chores::target().join("test-passed").join(name.replace(['/', ' '], "-"))
}

/// Returns whether the program has passed with these inputs when it ran last.
pub(crate) fn has_passed(name: &str, inputs: &Inputs) -> bool {
    std::fs::read_to_string(record(name)).is_ok_and(|number| number == inputs.number())
}

/// Forgets what is known of the program, because it runs again.
pub(crate) fn forget(name: &str) -> Result<()> {
    match std::fs::remove_file(record(name)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(record(name).display().to_string())
        }
        _ => Ok(()),
    }
}

/// Records that the program has passed with these inputs.
pub(crate) fn keep(name: &str, inputs: &Inputs) -> Result<()> {
    let path = record(name);
    let folder = path.parent().context("it is in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    std::fs::write(&path, inputs.number()).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_and_other_words_are_other_inputs() {
        let folder = std::env::temp_dir().join(format!("farfield-passed-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("inner")).unwrap();
        let inputs = || Inputs::default().files(&folder).unwrap();
        std::fs::write(folder.join("inner/one"), "1").unwrap();
        let before = inputs();
        assert_eq!(before.number(), inputs().number());
        assert_ne!(before.number(), inputs().words("--skip").number());
        std::fs::write(folder.join("inner/one"), "12").unwrap();
        assert_ne!(before.number(), inputs().number());

        let name = format!("passed {}", std::process::id());
        assert!(!has_passed(&name, &before));
        keep(&name, &before).unwrap();
        assert!(has_passed(&name, &before) && !has_passed(&name, &inputs()));
        forget(&name).unwrap();
        forget(&name).unwrap();
        assert!(!has_passed(&name, &before));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
