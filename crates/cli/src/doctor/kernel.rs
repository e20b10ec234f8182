//! Checks of kernel features, which are tried out rather than looked up.

use super::CheckResult;
use farfield_os::pagemap::{PageRun, Pagemap, category};
use farfield_os::uffd::{FaultOrigin, feature};
use farfield_os::{file, memory, seccomp};
use farfield_pager::runner::machine::{self, KERNEL_MIN};

const PAGE: usize = 4096;

pub(super) fn release() -> CheckResult {
    let name = "kernel";
    let (release, text) = machine::kernel_release();
    let (major, minor) = KERNEL_MIN;
    if release < KERNEL_MIN {
        return CheckResult::fail(name, format!("Linux {text}"), format!("use Linux {major}.{minor} or newer"));
    }
    CheckResult::ok(name, format!("Linux {text}"))
}

pub(super) fn userfaultfd() -> CheckResult {
    let name = "userfaultfd";
    match machine::try_uffd(FaultOrigin::UserMode, feature::SIGBUS | feature::WP_ASYNC) {
        Ok(()) => CheckResult::ok(name, "faults of user mode, with SIGBUS and WP_ASYNC"),
        Err(error) => CheckResult::fail(
            name,
            error.to_string(),
            "the kernel needs CONFIG_USERFAULTFD and must be 6.7 or newer; in a container, let the seccomp profile \
             pass userfaultfd (docker: --security-opt seccomp=packaging/seccomp.json)",
        ),
    }
}

pub(super) fn userfaultfd_privileged() -> CheckResult {
    let name = "faults inside calls";
    if machine::try_uffd(FaultOrigin::UserAndKernel, 0).is_ok() {
        return CheckResult::ok(name, "userfaultfd serves faults inside system calls too");
    }
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd").is_ok();
    if device {
        return CheckResult::ok(name, "/dev/userfaultfd can be opened");
    }
    CheckResult::warn(
        name,
        "not for this user: the buffers of system calls are brought near before each call",
        "nothing need be done; calls are faster with `sysctl vm.unprivileged_userfaultfd=1`, or with access to \
         /dev/userfaultfd",
    )
}

pub(super) fn userfaultfd_move() -> CheckResult {
    let name = "UFFDIO_MOVE";
    match machine::try_uffd(FaultOrigin::UserMode, feature::MOVE) {
        Ok(()) => CheckResult::ok(name, "available"),
        Err(error) => CheckResult::warn(
            name,
            error.to_string(),
            "use Linux 6.8 or newer; pages that leave are copied in its place",
        ),
    }
}

/// Two pages, of which the first is written. Unmapped when dropped.
struct ProbePages(usize);

impl ProbePages {
    fn new() -> farfield_os::Result<ProbePages> {
        let address = memory::map_anonymous(2 * PAGE)?;
        // SAFETY: mapped just now, writable, ours alone.
        unsafe { (address as *mut u8).write_volatile(1) };
        Ok(ProbePages(address))
    }
    fn first_byte(&self) -> u8 {
        // SAFETY: mapped in `new`, readable.
        unsafe { (self.0 as *const u8).read_volatile() }
    }
}

impl Drop for ProbePages {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; nothing refers to it.
        let _ = unsafe { memory::munmap(self.0, 2 * PAGE) };
    }
}

pub(super) fn pagemap_scan() -> CheckResult {
    let name = "PAGEMAP_SCAN";
    let scan = || {
        let pages = ProbePages::new()?;
        let pagemap = Pagemap::open()?;
        let mut runs = [PageRun::default(); 4];
        let found = pagemap.scan(pages.0, pages.0 + 2 * PAGE, category::PRESENT, &mut runs);
        file::close(pagemap.fd());
        Ok::<_, farfield_os::Errno>(found?.0 == 1 && runs[0].end - runs[0].start == PAGE as u64)
    };
    match scan() {
        Ok(true) => CheckResult::ok(name, "tells which pages are there and which were written"),
        Ok(false) => CheckResult::fail(name, "gives wrong answers", "use Linux 6.8 or newer"),
        Err(error) => CheckResult::fail(
            name,
            error.to_string(),
            "use Linux 6.7 or newer; in a container or sandbox, /proc/self/pagemap must be readable",
        ),
    }
}

pub(super) fn vmsplice() -> CheckResult {
    let name = "vmsplice";
    match machine::try_page_pipe() {
        Ok(()) => CheckResult::ok(name, "pages that leave stay readable until they are stored"),
        Err(error) => CheckResult::fail(
            name,
            error.to_string(),
            "in a container, let the seccomp profile pass vmsplice (podman: --security-opt \
             seccomp=packaging/seccomp.json)",
        ),
    }
}

pub(super) fn process_madvise() -> CheckResult {
    let name = "process_madvise";
    let drop_one = || {
        let pages = ProbePages::new()?;
        let pidfd = memory::pidfd_self()?;
        let range = libc::iovec { iov_base: pages.0 as *mut libc::c_void, iov_len: PAGE };
        // SAFETY: the page is ours and its content is not needed.
        let dropped = unsafe { memory::drop_scattered(pidfd, &[range]) };
        file::close(pidfd);
        Ok::<_, farfield_os::Errno>(dropped? == PAGE && pages.first_byte() == 0)
    };
    match drop_one() {
        Ok(true) => CheckResult::ok(name, "scattered pages can leave in one call"),
        Ok(false) => CheckResult::warn(name, "drops nothing", SLOWER),
        Err(error) => CheckResult::warn(name, error.to_string(), SLOWER),
    }
}

const SLOWER: &str = "use Linux 6.13 or newer, and in a container let the seccomp profile pass process_madvise; \
                      without it pages leave one call at a time, which is slower";

pub(super) fn seccomp() -> CheckResult {
    let name = "seccomp";
    let advice =
        "the kernel needs CONFIG_SECCOMP_FILTER; in a container, let the seccomp profile pass seccomp and prctl";
    if !machine::can_filter() {
        return CheckResult::fail(name, "filters are not available", advice);
    }
    match in_child(install_filter) {
        true => CheckResult::ok(name, "a filter for all threads can be installed"),
        false => CheckResult::fail(name, "a filter cannot be installed", advice),
    }
}

fn install_filter() -> bool {
    const RETURN: u16 = 0x06;
    let allow = seccomp::Instruction { code: RETURN, jump_true: 0, jump_false: 0, constant: libc::SECCOMP_RET_ALLOW };
    seccomp::set_no_new_privileges().is_ok() && seccomp::install(&[allow]).is_ok()
}

/// Runs `test` in a child process, because its effect cannot be undone. Returns its result.
fn in_child(test: fn() -> bool) -> bool {
    // SAFETY: the child only makes system calls through our gate and then `_exit`; it takes no lock
    // and allocates nothing.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = i32::from(!test());
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: room for the status; the child ends by itself at once.
    pid > 0 && unsafe { libc::waitpid(pid, &mut status, 0) } == pid && status == 0
}

pub(super) fn no_new_privileges() -> CheckResult {
    let name = "gaining privileges";
    if seccomp::may_filter_with_privileges() {
        return CheckResult::ok(name, "programs of a job may use setuid programs");
    }
    CheckResult::warn(
        name,
        "the filter needs NO_NEW_PRIVS, so setuid programs (sudo, su, ping) do not work inside a job",
        "start those outside of `farfield run`, or run it with CAP_SYS_ADMIN",
    )
}

pub(super) fn io_uring() -> CheckResult {
    let name = "io_uring";
    match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default().trim() {
        "0" => CheckResult::ok(name, "enabled"),
        "1" => CheckResult::ok(name, "for some users only; without it ssd: moves one page run at a time"),
        "2" => CheckResult::ok(name, "disabled; ssd: moves one page run at a time"),
        _ => CheckResult::ok(name, "this kernel does not say; without it ssd: moves one page run at a time"),
    }
}
