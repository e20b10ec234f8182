//! Programs that were built with a sanitizer.
//!
//! The runtime of the address sanitizer, where it is a library, ends the program unless it comes
//! first among all libraries. It then says that it must be preloaded, which does not help here. The
//! runtimes of the thread and the memory sanitizer have the whole address space dealt out, the
//! window too. So such programs are refused before, with advice that does help.

use core::ffi::CStr;

core::arch::global_asm!(".weak __asan_init", ".weak __tsan_init", ".weak __msan_init");

/// Gives the address of a function that may be in the program or a library of it, or 0.
macro_rules! weak_function {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: reads a word of this library that the loader has filled.
        unsafe {
            core::arch::asm!(
                concat!("mov {address}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                address = out(reg) address,
                options(pure, readonly, nostack),
            );
        }
        address
    }};
}

/// Returns advice about a program whose sanitizer would end it, if it has one. `options` is the
/// value of `ASAN_OPTIONS`.
pub fn refusal(options: Option<&CStr>) -> Option<&'static str> {
    let address_sanitizer = weak_function!("__asan_init");
    if address_sanitizer != 0
        && !is_in_program(address_sanitizer)
        && !lets_others_be_first(options.unwrap_or_default().to_bytes())
    {
        return Some(
            "the address sanitizer of this program must be loaded before far memory is: set \
             ASAN_OPTIONS=verify_asan_link_order=0, or link it with -static-libasan",
        );
    }
    (weak_function!("__tsan_init") != 0 || weak_function!("__msan_init") != 0).then_some(
        "the thread or memory sanitizer of this program needs the addresses at which far memory lies: build it \
         without, or with -fsanitize=address",
    )
}

/// Checks whether ASAN_OPTIONS switches off the check of the order of libraries. The last word
/// counts.
fn lets_others_be_first(options: &[u8]) -> bool {
    let words = options.split(|byte| matches!(byte, b':' | b',' | b' ' | b'\n' | b'\t'));
    let mut values = words.filter_map(|word| word.strip_prefix(b"verify_asan_link_order="));
    values.next_back().is_some_and(|value| matches!(value, b"0" | b"no" | b"false"))
}

/// Checks whether the address lies in the program's own file, as the kernel has loaded it.
fn is_in_program(address: usize) -> bool {
    // SAFETY: reads what the kernel gave this process.
    let (headers, count) = unsafe { (libc::getauxval(libc::AT_PHDR), libc::getauxval(libc::AT_PHNUM)) };
    if headers == 0 {
        return false;
    }
    // SAFETY: the program's headers are mapped, and stay.
    let headers = unsafe { core::slice::from_raw_parts(headers as *const libc::Elf64_Phdr, count as usize) };
    let own = headers.iter().find(|header| header.p_type == libc::PT_PHDR);
    let base = own.map_or(0, |own| (headers.as_ptr() as usize).wrapping_sub(own.p_vaddr as usize));
    let holds = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        header.p_type == libc::PT_LOAD && (start..start.wrapping_add(header.p_memsz as usize)).contains(&address)
    };
    headers.iter().any(holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_that_switch_the_check_off_are_let_through() {
        assert_eq!(refusal(None), None, "this test has no sanitizer, or one of its own");
        for options in
            ["verify_asan_link_order=0", "detect_leaks=0:verify_asan_link_order=false", "a=1 verify_asan_link_order=no"]
        {
            assert!(lets_others_be_first(options.as_bytes()), "{options}");
        }
        for options in ["", "verify_asan_link_order=1", "verify_asan_link_order=0:verify_asan_link_order=1", "order=0"]
        {
            assert!(!lets_others_be_first(options.as_bytes()), "{options}");
        }
    }

    #[test]
    fn a_function_of_the_program_lies_in_it() {
        assert!(is_in_program(a_function_of_the_program_lies_in_it as *const () as usize));
        assert!(!is_in_program(libc::getpid as *const () as usize));
    }
}
