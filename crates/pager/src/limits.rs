//! Limits on address space and data of a program (`RLIMIT_AS`, `RLIMIT_DATA`), beside what we reserve in it.
//!
//! The kernel counts our reservations too. So it is told the program's limits plus [`reserved_bytes`]: by the runner
//! before it starts the program, and by the library when the program sets one. What the kernel knows passes through
//! fork and exec as always, and is translated back when the program asks.

use crate::window;
use farfield_core::geometry::PAGE_BYTES;

/// Page words, checksums, and the summary of both, for the whole window.
pub const TABLE_BYTES: u64 = window::PAGES * 16 + window::PAGES / 512;
/// Our heap, alternate stacks, table of threads: room for far more than they take.
const ALLOWANCE_BYTES: u64 = 4 << 30;
/// The window with its extents.
const WINDOW_BYTES: u64 = window::PAGES * PAGE_BYTES as u64;
/// Far memory of a server on this machine, which is mapped as a whole: as much as a region can have.
const MAPPED_BYTES: u64 = WINDOW_BYTES;

/// The limits that our reservations count against.
pub const RESOURCES: [libc::__rlimit_resource_t; 2] = [libc::RLIMIT_AS, libc::RLIMIT_DATA];

/// Returns what the kernel counts of ours against this limit, at most.
pub const fn reserved_bytes(resource: libc::__rlimit_resource_t) -> u64 {
    match resource {
        libc::RLIMIT_AS => WINDOW_BYTES + MAPPED_BYTES + TABLE_BYTES + ALLOWANCE_BYTES,
        libc::RLIMIT_DATA => TABLE_BYTES + ALLOWANCE_BYTES,
        _ => 0,
    }
}

/// Returns the kernel's limit for a program's.
pub fn to_kernel(resource: libc::__rlimit_resource_t, limit: libc::rlimit) -> libc::rlimit {
    changed(limit, |bytes| bytes.saturating_add(reserved_bytes(resource)))
}

/// Returns the program's limit for the kernel's.
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
