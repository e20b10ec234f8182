//! Forty bytes: what is understood is what was said.
#![no_main]

use farfield_core::wire::{HEAD_BYTES, Head};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Head::decode(bytes) {
        Ok(None) => assert!(bytes.len() < HEAD_BYTES),
        Ok(Some(head)) => assert_eq!(head.encode(), bytes[..HEAD_BYTES]),
        Err(_) => assert!(bytes.len() >= HEAD_BYTES),
    }
});
