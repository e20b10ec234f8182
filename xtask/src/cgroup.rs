//! What Linux by itself makes of a program with less memory than it needs: a cgroup with a limit.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A memory cgroup, which is removed when this is dropped.
pub(crate) struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// Makes one with a limit. Fails where this user may not, or no memory controller is mounted; the error says which.
    pub(crate) fn new(limit_bytes: u64) -> Result<MemoryCgroup> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
        let Some((parent, limit)) = memory_controller(&mounts) else { bail!("no memory controller is mounted") };
        let folder = parent.join(format!("farfield-demo-{}", std::process::id()));
        fs::create_dir(&folder).context("only root may limit the memory of others")?;
        let group = MemoryCgroup(folder);
        fs::write(group.0.join(limit), limit_bytes.to_string()).context("the kernel refuses the limit")?;
        Ok(group)
    }

    /// Returns a command that enters the cgroup and becomes `program`.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(self.0.join("cgroup.procs")).arg(program);
        command
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // A group with a program in it stays. It had none a moment ago.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Returns where memory cgroups are made, and the name of the file with the limit.
fn memory_controller(mounts: &str) -> Option<(PathBuf, &'static str)> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (root, kind, options) = (Path::new(words.next()?), words.next()?, words.next()?);
        let is_of_two = || {
            // Children have the controllers that their parent hands on.
            let text = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
            text.split_whitespace().any(|controller| controller == "memory")
        };
        match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                Some((root.to_owned(), "memory.limit_in_bytes"))
            }
            "cgroup2" if is_of_two() => Some((root.to_owned(), "memory.max")),
            _ => None,
        }
    })
}

/// Returns where this machine swaps to, in words.
pub(crate) fn swap() -> String {
    let text = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let areas: Vec<&str> = text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    if areas.is_empty() { "this machine has no swap".into() } else { format!("swap: {}", areas.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_among_mounts() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/memory cgroup rw,memory 0 0";
        assert_eq!(memory_controller(mounts), Some((PathBuf::from("/cg/memory"), "memory.limit_in_bytes")));
        assert_eq!(memory_controller("cgroup2 /nowhere cgroup2 rw 0 0"), None);
    }
}
