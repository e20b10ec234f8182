//! Checks of the limits of this machine, container and user.

use super::Finding;
use farfield_pager::runner::ByteSize;
use farfield_pager::runner::machine::{self, CgroupLimit, NEAR_BYTES_MIN};

/// Least number of mappings per process, which is the kernel's default. Far memory splits mappings,
/// so a program with many of them needs more.
const MAP_COUNT_MIN: u64 = 65530;
/// Least number of open files. The runner, the library and each lane need a few besides those of
/// the program.
const DESCRIPTORS_MIN: u64 = 256;

pub(super) fn memory(near_bytes: u64, memory_bytes: u64, limit: Option<CgroupLimit>) -> Finding {
    let name = "near memory";
    let place = match &limit {
        Some(limit) => {
            format!("limit of {} (cgroup v{}, {})", ByteSize(limit.bytes), limit.version, limit.file.display())
        }
        None => format!("{} in this machine, no limit by {}", ByteSize(memory_bytes), groups()),
    };
    let found = format!("{} near; {place}", ByteSize(near_bytes));
    if near_bytes < NEAR_BYTES_MIN {
        return Finding::fail(name, found, format!("give --near at least {}", ByteSize(NEAR_BYTES_MIN)));
    }
    if near_bytes > memory_bytes {
        return Finding::fail(name, found, "choose a smaller --near, or raise the limit of the container");
    }
    // Code, stacks, page tables and the private server are not in the budget.
    if near_bytes > memory_bytes / 10 * 9 {
        let advice = "leave room for code, stacks and page tables: at most 90 % of the memory";
        return Finding::warn(name, found, advice);
    }
    Finding::ok(name, found)
}

fn groups() -> String {
    machine::cgroup_version().map_or("control groups".into(), |version| format!("cgroup v{version}"))
}

pub(super) fn map_count() -> Finding {
    let name = "vm.max_map_count";
    match read_number("/proc/sys/vm/max_map_count") {
        Some(count) if count >= MAP_COUNT_MIN => Finding::ok(name, count.to_string()),
        Some(count) => {
            let advice =
                format!("sysctl vm.max_map_count={MAP_COUNT_MIN} or more: programs with many mappings would fail");
            Finding::warn(name, count.to_string(), advice)
        }
        None => unknown(name),
    }
}

pub(super) fn overcommit() -> Finding {
    let name = "vm.overcommit_memory";
    match read_number("/proc/sys/vm/overcommit_memory") {
        Some(0) => Finding::ok(name, "0: the kernel refuses only what is obviously too much"),
        Some(1) => Finding::ok(name, "1: the kernel refuses nothing"),
        Some(2) => Finding::warn(
            name,
            "2: the kernel counts far memory as if it were near, and refuses it beyond its commit limit",
            "sysctl vm.overcommit_memory=0",
        ),
        _ => unknown(name),
    }
}

pub(super) fn address_space() -> Finding {
    let name = "ulimit -v";
    match limit(libc::RLIMIT_AS) {
        None => Finding::ok(name, "unlimited"),
        Some(bytes) => Finding::warn(
            name,
            ByteSize(bytes).to_string(),
            "ulimit -v unlimited: far memory takes address space, also what is reserved and not used",
        ),
    }
}

pub(super) fn descriptors() -> Finding {
    let name = "ulimit -n";
    match limit(libc::RLIMIT_NOFILE) {
        Some(count) if count < DESCRIPTORS_MIN => Finding::warn(
            name,
            count.to_string(),
            format!("ulimit -n {DESCRIPTORS_MIN} or more: each thread has connections"),
        ),
        Some(count) => Finding::ok(name, count.to_string()),
        None => Finding::ok(name, "unlimited"),
    }
}

pub(super) fn locked_memory() -> Finding {
    let name = "ulimit -l";
    match limit(libc::RLIMIT_MEMLOCK) {
        Some(bytes) => Finding::ok(name, format!("{}; what a program locks stays near", ByteSize(bytes))),
        None => Finding::ok(name, "unlimited; what a program locks stays near"),
    }
}

pub(super) fn huge_pages() -> Finding {
    let name = "transparent huge pages";
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match chosen(&text) {
        Some("always") => Finding::warn(
            name,
            "always: near memory can fill with huge pages of which little is used",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(other) => Finding::ok(name, other),
        None => Finding::ok(name, "none in this kernel"),
    }
}

/// Returns the word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

pub(super) fn processors() -> Finding {
    let name = "processors";
    // SAFETY: the set is plain bits, zeroed; the call writes at most its size.
    let usable = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => libc::CPU_COUNT(&set),
            _ => 0,
        }
    };
    // SAFETY: only reads a number.
    let all = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    let found = format!("{usable} of {all} may be used");
    if usable == 1 {
        let advice = "with one processor, a private server and the program take turns: use a server on another machine, or \
                      give this one two processors";
        return Finding::warn(name, found, advice);
    }
    Finding::ok(name, found)
}

/// Returns a limit of this process, or `None` if it is unlimited.
fn limit(which: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: room for the answer; if it fails, nothing limits us.
    unsafe { libc::getrlimit(which, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn unknown(name: &'static str) -> Finding {
    Finding::warn(name, "cannot be read", "mount /proc, so that limits can be checked")
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn a_near_budget_must_fit() {
        let check =
            |near: u64, memory: u64, level: Level| assert_eq!(self::memory(near, memory, None).level, level, "{near}");
        check(1 << 30, 2 << 30, Level::Ok);
        check(1 << 20, 2 << 30, Level::Fail);
        check(3 << 30, 2 << 30, Level::Fail);
        check(2 << 30, 2 << 30, Level::Warn);
        let limit = CgroupLimit { bytes: 2 << 30, file: "/sys/fs/cgroup/x/memory.max".into(), version: 2 };
        let finding = self::memory(1 << 30, 2 << 30, Some(limit));
        assert!(finding.found.contains("cgroup v2, /sys/fs/cgroup/x/memory.max"), "{}", finding.found);
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen(""), None);
    }
}
