//! The cache server's parsers: any bytes are a request, a part of one, or refused, and no more is used than there is.
#![no_main]
#![allow(dead_code, reason = "answers are written elsewhere")]

#[path = "../../crates/farfield/examples/memcached/binary.rs"]
mod binary;
#[path = "../../crates/farfield/examples/memcached/request.rs"]
mod request;
#[path = "../../crates/farfield/examples/memcached/text.rs"]
mod text;

use libfuzzer_sys::fuzz_target;
use request::Parsed;

fuzz_target!(|input: &[u8]| {
    if let Parsed::Whole(_, used) = text::parse(input, 1_000) {
        assert!(used > 0 && used <= input.len());
    }
    if let (_, Parsed::Whole(_, used)) = binary::parse(input, 1_000) {
        assert!(used >= 24 && used <= input.len());
    }
});
