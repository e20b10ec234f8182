//! Forty bytes: what is understood is what was said.
#![no_main]

use farfield_core::wire::{HEADER_BYTES, MessageHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match MessageHeader::decode(bytes) {
        Ok(None) => assert!(bytes.len() < HEADER_BYTES),
        Ok(Some(header)) => assert_eq!(header.encode(), bytes[..HEADER_BYTES]),
        Err(_) => assert!(bytes.len() >= HEADER_BYTES),
    }
});
