//! Messages between nodes that share memory: any bytes are one, or are refused.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| farfield_dsm::check_message(bytes));
