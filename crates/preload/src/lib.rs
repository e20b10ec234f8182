//! The shared library that `farfield run` loads into a program.
//!
//! Only the entry point and the allocator; everything else is in `farfield_pager::inside`.

use core::ffi::{c_char, c_int};
use farfield_pager::inside::{heap::Heap, start};

#[global_allocator]
static HEAP: Heap = Heap;

extern "C" fn constructor(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
    // SAFETY: glibc's loader passes argc, argv and the environment to constructors.
    unsafe { start::start(environment) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;
