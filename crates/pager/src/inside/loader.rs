//! Where glibc's loader makes system calls.
//!
//! A program that is executed inside a job is loaded under our filter before our handlers are
//! there, so no call of the loader may trap. A filter sees the address that a call returns to. The
//! loader lies somewhere else in each process, but at whole pages: the offset in its page is the
//! same in all processes with this loader.

use crate::filter::{EARLY_CALLS, EarlyCall, PAGE_OFFSET};

/// Maximum distance in bytes from where a call's number is loaded to its `syscall`.
const REACH: usize = 48;
/// Maximum number of places of one call. A filter that lets more pass would know little.
const PLACES_MAX: usize = 4;

/// Returns where the loader of this process makes the calls that it may need before our handlers
/// are there. Returns none if the loader itself was started as the program.
pub fn early_calls() -> Vec<EarlyCall> {
    // SAFETY: reads what the kernel gave this process.
    let base = unsafe { libc::getauxval(libc::AT_BASE) } as usize;
    if base == 0 {
        return Vec::new();
    }
    // SAFETY: the kernel has loaded an ELF file there, whose first page holds its headers, and
    // which stays.
    let headers = unsafe {
        let file = &*(base as *const libc::Elf64_Ehdr);
        let headers = base + file.e_phoff as usize;
        core::slice::from_raw_parts(headers as *const libc::Elf64_Phdr, usize::from(file.e_phnum))
    };
    let code = headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0);
    code.flat_map(|header| {
        let start = base + header.p_vaddr as usize;
        // SAFETY: the segment is mapped, readable, and stays.
        let code = unsafe { core::slice::from_raw_parts(start as *const u8, header.p_filesz as usize) };
        find(code, start)
    })
    .collect()
}

/// Finds the calls in `code`, which lies at `start`: each `syscall` that is not far behind an
/// instruction `mov NUMBER, REGISTER`. (The loader's `_exit` has two, in no certain order.)
fn find(code: &[u8], start: usize) -> Vec<EarlyCall> {
    let mut found: Vec<EarlyCall> = Vec::new();
    for (at, bytes) in code.windows(5).enumerate() {
        let [0xb8..=0xbf, number @ ..] = bytes else { continue };
        let number = i64::from(u32::from_le_bytes(number.try_into().expect("four bytes")));
        if !EARLY_CALLS.contains(&number) {
            continue;
        }
        let behind = start + at + bytes.len();
        let reached = &code[at + bytes.len()..code.len().min(at + REACH)];
        for (distance, _) in reached.windows(2).enumerate().filter(|(_, bytes)| *bytes == [0x0f, 0x05]) {
            let call = EarlyCall { number, offset: (behind + distance + 2) as u32 & PAGE_OFFSET };
            let places = found.iter().filter(|other| other.number == number).count();
            if places < PLACES_MAX && !found.contains(&call) {
                found.push(call);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    //! Danger: a program with many libraries, or without one that it needs, is killed while it is
    //! loaded.
    use super::*;

    #[test]
    fn calls_are_found_where_they_return_to() {
        let mut code = vec![0x90; 8192];
        code[4080..4087].copy_from_slice(&[0xb8, 9, 0, 0, 0, 0x0f, 0x05]);
        // exit_group's number goes through another register, a few instructions before.
        code[5000..5005].copy_from_slice(&[0xbe, 231, 0, 0, 0]);
        code[5010..5012].copy_from_slice(&[0x0f, 0x05]);
        code[5020..5022].copy_from_slice(&[0x0f, 0x05]);
        // A number without a call behind it, and a call that nobody needs so early.
        code[6000..6005].copy_from_slice(&[0xb8, 20, 0, 0, 0]);
        code[7000..7007].copy_from_slice(&[0xb8, 2, 0, 0, 0, 0x0f, 0x05]);
        let found = find(&code, 0x7f00_0000_1000);
        let call = |number, offset| EarlyCall { number, offset };
        let ends = [5012, 5022].map(|at| call(libc::SYS_exit_group, at - 4096));
        assert_eq!(found, [call(libc::SYS_mmap, 4087), ends[0], ends[1]]);
        for len in 0..60 {
            find(&code[4080..4080 + len], 0);
            find(&code[4997..4997 + len], 0);
        }
    }

    #[test]
    fn the_loader_of_this_process_makes_each_of_these_calls() {
        let found = early_calls();
        for number in EARLY_CALLS {
            let places = found.iter().filter(|call| call.number == number).count();
            assert!((1..=PLACES_MAX).contains(&places), "call {number} at {places} places: {found:?}");
        }
    }
}
