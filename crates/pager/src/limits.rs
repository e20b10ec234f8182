//! Limits on address space and data of a program (`RLIMIT_AS`, `RLIMIT_DATA`), beside what we
//! reserve in it.
//!
//! The kernel counts our reservations too. So the kernel's limits are the program's limits plus
//! [`reserved_bytes`]: the runner sets them before it starts the program, and the library when the
//! program sets one. The kernel's limits pass through fork and exec as always, and are translated
//! back when the program asks.

use crate::window;
use farfield_core::geometry::PAGE_BYTES;

/// Bytes of the page words, the checksums, and the summary of both, for the whole window.
pub const TABLE_BYTES: u64 = window::PAGES * 16 + window::PAGES / 512;
/// Bytes allowed for our heap, alternate stacks and table of threads: far more than they take.
const ALLOWANCE_BYTES: u64 = 4 << 30;
/// Bytes of the window with its extents.
const WINDOW_BYTES: u64 = window::PAGES * PAGE_BYTES as u64;
/// Bytes mapped for far memory of a server on this machine, which is mapped as a whole: as much as
/// a region can have.
const MAPPED_BYTES: u64 = WINDOW_BYTES;

/// Limits that our reservations count against.
pub const RESOURCES: [libc::__rlimit_resource_t; 2] = [libc::RLIMIT_AS, libc::RLIMIT_DATA];

/// Returns the maximum of our bytes that the kernel counts against this limit.
pub const fn reserved_bytes(resource: libc::__rlimit_resource_t) -> u64 {
    match resource {
        libc::RLIMIT_AS => WINDOW_BYTES + MAPPED_BYTES + TABLE_BYTES + ALLOWANCE_BYTES,
        libc::RLIMIT_DATA => TABLE_BYTES + ALLOWANCE_BYTES,
        _ => 0,
    }
}

/// Converts a program's limit to the kernel's.
pub fn to_kernel(resource: libc::__rlimit_resource_t, limit: libc::rlimit) -> libc::rlimit {
    changed(limit, |bytes| bytes.saturating_add(reserved_bytes(resource)))
}

/// Converts the kernel's limit to the program's.
pub fn from_kernel(resource: libc::__rlimit_resource_t, limit: libc::rlimit) -> libc::rlimit {
    changed(limit, |bytes| bytes.saturating_sub(reserved_bytes(resource)))
}

fn changed(limit: libc::rlimit, change: impl Fn(u64) -> u64) -> libc::rlimit {
    let [rlim_cur, rlim_max] =
        [limit.rlim_cur, limit.rlim_max].map(|bytes| if bytes == libc::RLIM_INFINITY { bytes } else { change(bytes) });
    libc::rlimit { rlim_cur, rlim_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_reads_the_limit_that_it_set() {
        for (soft, hard) in [(0, 1 << 30), (5 << 30, libc::RLIM_INFINITY), (libc::RLIM_INFINITY, libc::RLIM_INFINITY)] {
            for resource in RESOURCES {
                let kernel = to_kernel(resource, libc::rlimit { rlim_cur: soft, rlim_max: hard });
                let read = from_kernel(resource, kernel);
                assert_eq!((read.rlim_cur, read.rlim_max), (soft, hard));
                assert!(kernel.rlim_cur >= reserved_bytes(resource));
            }
        }
    }
}
