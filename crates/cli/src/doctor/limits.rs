//! Checks of the limits of this machine, container and user.

use super::CheckResult;
use farfield_pager::runner::ByteSize;
use farfield_pager::runner::machine::{self, CgroupLimit, NEAR_BYTES_MIN};

/// Least number of mappings per process, which is the kernel's default. Far memory splits mappings,
/// so a program with many of them needs more.
const MAP_COUNT_MIN: u64 = 65530;
/// Least number of open files. The runner, the library and each lane need a few besides those of
/// the program.
const DESCRIPTORS_MIN: u64 = 256;

pub(super) fn memory(near_bytes: u64, memory_bytes: u64, limit: Option<CgroupLimit>) -> CheckResult {
    let name = "near memory";
    let place = match &limit {
        Some(limit) => {
            format!("limit of {} (cgroup v{}, {})", ByteSize(limit.bytes), limit.version, limit.file.display())
        }
        None => format!("{} in this machine, no limit by {}", ByteSize(memory_bytes), groups()),
    };
    let found = format!("{} near; {place}", ByteSize(near_bytes));
    if near_bytes < NEAR_BYTES_MIN {
        return CheckResult::fail(name, found, format!("give --near at least {}", ByteSize(NEAR_BYTES_MIN)));
    }
    if near_bytes > memory_bytes {
        return CheckResult::fail(name, found, "choose a smaller --near, or raise the limit of the container");
    }
    // Code, stacks, page tables and the private server are not in the budget.
    if near_bytes > memory_bytes / 10 * 9 {
        let advice = "leave room for code, stacks and page tables: at most 90 % of the memory";
        return CheckResult::warn(name, found, advice);
    }
    CheckResult::ok(name, found)
}

fn groups() -> String {
    machine::cgroup_version().map_or("control groups".into(), |version| format!("cgroup v{version}"))
}

pub(super) fn map_count() -> CheckResult {
    let name = "vm.max_map_count";
    match read_number("/proc/sys/vm/max_map_count") {
        Some(count) if count >= MAP_COUNT_MIN => CheckResult::ok(name, count.to_string()),
        Some(count) => {
            let advice =
                format!("sysctl vm.max_map_count={MAP_COUNT_MIN} or more: programs with many mappings would fail");
            CheckResult::warn(name, count.to_string(), advice)
        }
        None => unknown(name),
    }
}

pub(super) fn overcommit() -> CheckResult {
    let name = "vm.overcommit_memory";
    match read_number("/proc/sys/vm/overcommit_memory") {
        Some(0) => CheckResult::ok(name, "0: the kernel refuses only what is obviously too much"),
        Some(1) => CheckResult::ok(name, "1: the kernel refuses nothing"),
        Some(2) => CheckResult::warn(
            name,
            "2: the kernel counts far memory as if it were near, and refuses it beyond its commit limit",
            "sysctl vm.overcommit_memory=0",
        ),
        _ => unknown(name),
    }
}

pub(super) fn address_space() -> CheckResult {
    let name = "ulimit -v";
    match limit(libc::RLIMIT_AS) {
        None => CheckResult::ok(name, "unlimited"),
        Some(bytes) => CheckResult::warn(
            name,
            ByteSize(bytes).to_string(),
            "ulimit -v unlimited: far memory takes address space, also what is reserved and not used",
        ),
    }
}

pub(super) fn descriptors() -> CheckResult {
    let name = "ulimit -n";
    match limit(libc::RLIMIT_NOFILE) {
        Some(count) if count < DESCRIPTORS_MIN => CheckResult::warn(
            name,
            count.to_string(),
            format!("ulimit -n {DESCRIPTORS_MIN} or more: each thread has connections"),
        ),
        Some(count) => CheckResult::ok(name, count.to_string()),
        None => CheckResult::ok(name, "unlimited"),
    }
}

pub(super) fn locked_memory() -> CheckResult {
    let name = "ulimit -l";
    match limit(libc::RLIMIT_MEMLOCK) {
        Some(bytes) => CheckResult::ok(name, format!("{}; what a program locks stays near", ByteSize(bytes))),
        None => CheckResult::ok(name, "unlimited; what a program locks stays near"),
    }
}

pub(super) fn huge_pages() -> CheckResult {
    let name = "transparent huge pages";
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    match chosen(&text) {
        Some("always") => CheckResult::warn(
            name,
            "always: near memory can fill with huge pages of which little is used",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Some(other) => CheckResult::ok(name, other),
        None => CheckResult::ok(name, "none in this kernel"),
    }
}

/// Returns the word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

pub(super) fn processors() -> CheckResult {
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
        let advice = "with one processor, a private server and the program take turns: use a server on another \
                      machine, or give this one two processors";
        return CheckResult::warn(name, found, advice);
    }
    CheckResult::ok(name, found)
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

fn unknown(name: &'static str) -> CheckResult {
    CheckResult::warn(name, "cannot be read", "mount /proc, so that limits can be checked")
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    #[test]
    fn a_near_budget_must_fit() {
        let check = |near: u64, memory: u64, level: Severity| {
            assert_eq!(self::memory(near, memory, None).level, level, "{near}")
        };
        check(1 << 30, 2 << 30, Severity::Ok);
        check(1 << 20, 2 << 30, Severity::Fail);
        check(3 << 30, 2 << 30, Severity::Fail);
        check(2 << 30, 2 << 30, Severity::Warn);
        let limit = CgroupLimit { bytes: 2 << 30, file: "/sys/fs/cgroup/x/memory.max".into(), version: 2 };
        let finding = memory(1 << 30, 2 << 30, Some(limit));
        assert!(finding.found.contains("cgroup v2, /sys/fs/cgroup/x/memory.max"), "{}", finding.found);
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen(""), None);
    }
}
