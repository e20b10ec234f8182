//! The client's greeting, which anybody who can connect may send.
#![no_main]

use farfield_core::wire::{HEADER_BYTES, Hello, MAGIC, MessageHeader, MessageKind};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|rest: &[u8]| {
    // The magic is given, or nothing behind it would ever be reached.
    let body = [&MAGIC, rest].concat();
    let header = MessageHeader { kind: MessageKind::Hello as u8, body: body.len() as u32, ..MessageHeader::default() };
    let Ok(hello) = Hello::decode(&header, &body) else { return };
    assert!(hello.version_min <= hello.version_max);
    assert!(hello.token.len() <= Hello::TOKEN_BYTES_MAX && hello.client_name.len() <= Hello::NAME_BYTES_MAX);
    let mut again = Vec::new();
    hello.encode(&mut again);
    assert!(body.starts_with(&again[HEADER_BYTES..]));
});
