//! A memory cgroup with a limit, of version 1 or 2, whichever the machine has.

use crate::swap::unavailable;
use crate::undo::{Step, Undo};
use anyhow::{Context, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where memory cgroups are made on this machine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hierarchy {
    pub(crate) version: u32,
    root: PathBuf,
}

impl Hierarchy {
    /// Looks for a mounted hierarchy that has the memory controller.
    pub(crate) fn find() -> Result<Hierarchy> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
        Hierarchy::among(&mounts, |root| fs::read_to_string(root.join("cgroup.controllers"))).ok_or_else(|| {
            let remedy = "mount the memory controller, for example mount -t cgroup2 none /sys/fs/cgroup";
            unavailable("no memory cgroup controller is mounted", remedy)
        })
    }

    fn among(mounts: &str, controllers: impl Fn(&Path) -> io::Result<String>) -> Option<Hierarchy> {
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            let (Some(root), Some(kind), Some(options)) = (words.next(), words.next(), words.next()) else { continue };
            let root = PathBuf::from(root);
            match kind {
                "cgroup" if options.split(',').any(|option| option == "memory") => {
                    return Some(Hierarchy { version: 1, root });
                }
                "cgroup2" if controllers(&root).is_ok_and(|text| text.split_whitespace().any(|c| c == "memory")) => {
                    return Some(Hierarchy { version: 2, root });
                }
                _ => {}
            }
        }
        None
    }
}

/// A cgroup that holds its processes to `limit_bytes` of memory and lets them swap as much as they like.
pub(crate) struct Cgroup {
    version: u32,
    path: PathBuf,
}

impl Cgroup {
    pub(crate) fn new(hierarchy: &Hierarchy, limit_bytes: u64, undo: &mut Undo<'_>) -> Result<Cgroup> {
        if hierarchy.version == 2 {
            delegate_memory(&hierarchy.root, undo)?;
        }
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = hierarchy.root.join(format!("farfield-bench-{}-{number}", std::process::id()));
        undo.note(Step::Cgroup(path.clone()))?;
        fs::create_dir(&path).map_err(|error| {
            unavailable(
                format!("cannot make a cgroup in {}: {error}", hierarchy.root.display()),
                "run as root, or under systemd-run --scope -p Delegate=yes",
            )
        })?;
        let limit = if hierarchy.version == 2 { "memory.max" } else { "memory.limit_in_bytes" };
        fs::write(path.join(limit), limit_bytes.to_string()).context("the kernel refuses the memory limit")?;
        Ok(Cgroup { version: hierarchy.version, path })
    }

    /// A command that enters the cgroup and becomes `program`.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs")).arg(program);
        command
    }

    /// Most memory that was charged.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        let file = if self.version == 2 { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.path.join(file)).ok()?.trim().parse().ok()
    }

    /// How many processes the kernel killed here for want of memory.
    pub(crate) fn oom_kills(&self) -> u64 {
        let file = if self.version == 2 { "memory.events" } else { "memory.oom_control" };
        let text = fs::read_to_string(self.path.join(file)).unwrap_or_default();
        oom_kills(&text)
    }
}

fn oom_kills(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// Lets children of the root have the memory controller (version 2).
fn delegate_memory(root: &Path, undo: &mut Undo<'_>) -> Result<()> {
    let file = root.join("cgroup.subtree_control");
    let now = fs::read_to_string(&file).unwrap_or_default();
    if now.split_whitespace().any(|c| c == "memory") {
        return Ok(());
    }
    undo.note(Step::Setting(file.clone(), "-memory".into()))?;
    fs::write(&file, "+memory").map_err(|error| {
        unavailable(
            format!("cannot pass the memory controller on in {}: {error}", root.display()),
            "run as root in the root cgroup, or under systemd-run --scope -p Delegate=yes",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(mounts: &str, controllers: &str) -> Option<Hierarchy> {
        Hierarchy::among(mounts, |_| Ok(controllers.into()))
    }

    #[test]
    fn version_1_version_2_and_both() {
        let v1 =
            "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(find(v1, "").unwrap(), Hierarchy { version: 1, root: "/sys/fs/cgroup/memory".into() });
        assert_eq!(find(v2, "cpu memory pids").unwrap(), Hierarchy { version: 2, root: "/sys/fs/cgroup".into() });
        // Hybrid: version 2 is mounted, but version 1 has the controllers.
        assert_eq!(find(&format!("{v2}{v1}"), "").unwrap().version, 1);
        assert_eq!(find(v2, "cpu pids"), None);
        assert_eq!(find("proc /proc proc rw 0 0\n", ""), None);
    }

    #[test]
    fn oom_kills_are_counted_in_both_formats() {
        assert_eq!(oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), 3);
        assert_eq!(oom_kills("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n"), 1);
        assert_eq!(oom_kills(""), 0);
    }
}
