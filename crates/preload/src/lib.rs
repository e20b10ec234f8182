//! The shared library that `farfield run` loads into a program.
//!
//! Only the entry point and the allocator; everything else is in `farfield_pager::inside`.

use farfield_pager::inside::{heap::Heap, start};

#[global_allocator]
static HEAP: Heap = Heap;

extern "C" fn constructor() {
    start::start();
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;
