//! The client's greeting, which anybody who can connect may send.
#![no_main]

use farfield_core::wire::{HEAD_BYTES, Head, Hello, Kind, MAGIC};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|rest: &[u8]| {
    // The magic is given, or nothing behind it would ever be reached.
    let body = [&MAGIC, rest].concat();
    let head = Head { kind: Kind::Hello as u8, body: body.len() as u32, ..Head::default() };
    let Ok(hello) = Hello::decode(&head, &body) else { return };
    assert!(hello.version_min <= hello.version_max);
    assert!(hello.token.len() <= Hello::TOKEN_BYTES_MAX && hello.client_name.len() <= Hello::NAME_BYTES_MAX);
    let mut again = Vec::new();
    hello.encode(&mut again);
    assert!(body.starts_with(&again[HEAD_BYTES..]));
});
