//! Code from strangers: any bytes are refused, or are code that can be had. Nothing of it runs here but what begins an instance.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = farfield_sandbox::Code::new(bytes);
});
