//! Tells how much memory a job may use on this machine, and whether the kernel can do what we need.

use super::JobRefusal;
use farfield_os::pipe::PagePipe;
use farfield_os::uffd::{FaultOrigin, Uffd, feature};
use std::path::{Path, PathBuf};

/// Minimum near memory, in bytes, with which a program makes progress.
pub const NEAR_BYTES_MIN: u64 = 16 << 20;
/// Oldest kernel with all that we use (`PAGEMAP_SCAN` and `WP_ASYNC` came in 6.7, `UFFDIO_MOVE` in
/// 6.8).
pub const KERNEL_MIN: (u32, u32) = (6, 8);

/// Returns the memory of this machine in bytes, or that of this container if it is less.
pub fn memory_bytes() -> u64 {
    let total = total_bytes();
    cgroup_limit().map_or(total, |limit| limit.bytes.min(total))
}

fn total_bytes() -> u64 {
    // SAFETY: both calls only read numbers.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(4096)
}

/// Memory limit of a control group that this process is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CgroupLimit {
    /// Limit in bytes.
    pub bytes: u64,
    /// File that states the limit.
    pub file: PathBuf,
    /// Version of the control groups, 1 or 2.
    pub version: u32,
}

/// Returns the tightest memory limit of the control groups of this process, if there is one.
pub fn cgroup_limit() -> Option<CgroupLimit> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_of(&membership, Path::new("/sys/fs/cgroup"), total_bytes())
}

/// Returns the version of the control groups that count memory here, if there are any.
pub fn cgroup_version() -> Option<u32> {
    version_of(&std::fs::read_to_string("/proc/self/cgroup").ok()?)
}

fn version_of(membership: &str) -> Option<u32> {
    let controllers = || membership.lines().filter_map(|line| line.split(':').nth(1));
    if controllers().any(|list| list.split(',').any(|controller| controller == "memory")) {
        return Some(1);
    }
    controllers().any(str::is_empty).then_some(2)
}

/// Returns [`cgroup_limit`] for a given `/proc/PID/cgroup`. A limit of the whole machine or more
/// counts as none.
fn limit_of(membership: &str, root: &Path, machine_bytes: u64) -> Option<CgroupLimit> {
    let mut tightest: Option<CgroupLimit> = None;
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (version, mount, name) = if controllers.is_empty() {
            (2, root.to_path_buf(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (1, root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        // In a container the path may be that of the host; the groups we can see are then at the
        // mount itself.
        let below = mount.join(path.trim_start_matches('/'));
        let groups = below.ancestors().take_while(|group| group.starts_with(&mount));
        for group in groups {
            let file = group.join(name);
            let Ok(text) = std::fs::read_to_string(&file) else { continue };
            let Ok(bytes) = text.trim().parse::<u64>() else { continue };
            if bytes < machine_bytes && tightest.as_ref().is_none_or(|limit| bytes < limit.bytes) {
                tightest = Some(CgroupLimit { bytes, file, version });
            }
        }
    }
    tightest
}

/// Returns the release of the running kernel: `(major, minor)` and its text.
pub fn kernel_release() -> ((u32, u32), String) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    (parse_release(&text), text.trim().to_string())
}

fn parse_release(text: &str) -> (u32, u32) {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Refuses a kernel that cannot serve page faults for us.
pub(super) fn check_kernel() -> Result<(), JobRefusal> {
    let (release, text) = kernel_release();
    if release < KERNEL_MIN {
        let (major, minor) = KERNEL_MIN;
        let what = format!("Linux {text} is too old: far memory needs {major}.{minor} or newer");
        return Err(JobRefusal::Kernel { what });
    }
    if let Err(error) = try_uffd(FaultOrigin::UserMode, feature::SIGBUS | feature::WP_ASYNC) {
        let what = format!(
            "userfaultfd with its features SIGBUS and WP_ASYNC is not available ({error}): the kernel must be built \
             with CONFIG_USERFAULTFD, and a container's seccomp profile must let userfaultfd through"
        );
        return Err(JobRefusal::Kernel { what });
    }
    if let Err(error) = try_page_pipe() {
        let what = format!(
            "pages cannot leave, because vmsplice is not allowed here ({error}): a container's seccomp profile must \
             let vmsplice through"
        );
        return Err(JobRefusal::Kernel { what });
    }
    if !can_filter() {
        let what = "seccomp filters are not available: the kernel must be built with CONFIG_SECCOMP_FILTER".into();
        return Err(JobRefusal::Kernel { what });
    }
    Ok(())
}

/// Tries to open a userfaultfd with these features, and closes it.
pub fn try_uffd(scope: FaultOrigin, features: u64) -> farfield_os::Result<()> {
    let uffd = Uffd::open(scope, features)?;
    farfield_os::file::close(uffd.fd());
    Ok(())
}

/// Tries to give references to pages to a pipe, as pages do that leave.
pub fn try_page_pipe() -> farfield_os::Result<()> {
    let pipe = PagePipe::open(1)?;
    let taken = pipe.take(&[]);
    pipe.fds().into_iter().for_each(farfield_os::file::close);
    taken.map(drop)
}

/// Checks whether the kernel knows the filter action that we use.
pub fn can_filter() -> bool {
    const SECCOMP_GET_ACTION_AVAIL: libc::c_uint = 2;
    let action = libc::SECCOMP_RET_TRAP;
    // SAFETY: the call reads one live integer.
    unsafe { libc::syscall(libc::SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

#[cfg(test)]
mod tests {
    //! Danger: a budget larger than what the container may use, so that the kernel kills the job.
    use super::*;

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(parse_release("6.18.44-generic"), (6, 18));
        assert_eq!(parse_release("6.8.0\n"), (6, 8));
        assert_eq!(parse_release("5.15"), (5, 15));
        assert_eq!(parse_release(""), (0, 0));
        assert!(parse_release("6.18") > KERNEL_MIN && parse_release("6.7.9") < KERNEL_MIN);
    }

    #[test]
    fn the_version_is_that_of_the_memory_controller() {
        assert_eq!(version_of("0::/user.slice\n"), Some(2));
        assert_eq!(version_of("4:cpu,memory:/\n0::/\n"), Some(1));
        assert_eq!(version_of("4:cpu:/\n"), None);
    }

    #[test]
    fn the_tightest_group_counts() {
        let root = std::env::temp_dir().join(format!("farfield-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/memory.max", "1000\n");
        write("a/b/memory.max", "max\n");
        write("memory/c/memory.limit_in_bytes", "2000\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let check = |membership: &str| limit_of(membership, &root, 1 << 30).map(|limit| (limit.bytes, limit.version));
        assert_eq!(check("0::/a/b\n"), Some((1000, 2)));
        assert_eq!(check("0::/\n"), None);
        assert_eq!(check("4:memory:/c/gone\n0::/\n"), Some((2000, 1)));
        assert_eq!(check("4:memory:/elsewhere\n1:cpu:/\n"), None, "as large as the machine");
        assert_eq!(check("nonsense"), None);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
