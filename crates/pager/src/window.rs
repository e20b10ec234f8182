//! The window: the one address range, the same in every process of a job, in which far-capable memory lives.
//!
//! One fixed range makes the guard cheap: a system call touches far-capable memory if an argument has the window's
//! upper bits, which a seccomp filter can test. Page `n` of the window is page `n` of the process's region in the
//! pool, so no table of far addresses is needed.

use farfield_core::{PageId, geometry::PAGE_SHIFT};

/// First byte: 32 TiB, away from where Linux puts programs (85 TiB and up) and their mappings (just below 128 TiB),
/// from ZGC's heaps (4 to 20 TiB), Go's (0.75 TiB) and the sanitizers' shadows.
pub const BASE: usize = 0x2000_0000_0000;
/// Length in bytes: 16 TiB.
pub const LEN: usize = 0x1000_0000_0000;
/// Pages in the window: exactly what 32 bits can number.
pub const PAGES: u64 = (LEN >> PAGE_SHIFT) as u64;
/// Upper half of an address in the window, under [`HIGH_MASK`].
pub const HIGH: u32 = (BASE >> 32) as u32;
/// Mask for [`HIGH`].
pub const HIGH_MASK: u32 = !((LEN >> 32) as u32 - 1);

const _: () = assert!(PAGES == 1 << 32);
const _: () = assert!(BASE.is_multiple_of(LEN));

/// The gate: a page with our own `syscall` instructions, at the same place in every process of a job.
pub const GATE: usize = BASE - 0x10_0000;
/// Our own calls.
pub const GATE_OWN: usize = GATE;
/// Calls that we make for the program, after having brought their buffers near.
pub const GATE_FORWARD: usize = GATE + 16;

/// Descriptors that we keep in a program: numbers from here to [`DESCRIPTORS_END`]. Above 1024, the usual soft limit,
/// so that most programs cannot even name them.
pub const DESCRIPTORS: i32 = 1500;
/// First descriptor number that is not ours.
pub const DESCRIPTORS_END: i32 = 1628;

/// Is the address in the window?
pub const fn contains(address: usize) -> bool {
    address >= BASE && address < BASE + LEN
}

/// The page that holds the address.
pub const fn page_of(address: usize) -> PageId {
    PageId(((address - BASE) >> PAGE_SHIFT) as u64)
}

/// The address of the first byte of a page.
pub const fn address_of(page: PageId) -> usize {
    BASE + ((page.0 as usize) << PAGE_SHIFT)
}
