//! Records of an encrypted connection: whatever is done to the stream, what opens is what was sent.
#![no_main]

use arbitrary::Arbitrary;
use farfield_tls::check_stream;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    content: &'a [u8],
    pieces: Vec<u16>,
    changes: Vec<(u16, u8)>,
    room: u16,
}

fuzz_target!(|input: Input<'_>| check_stream(input.content, &input.pieces, &input.changes, input.room));
