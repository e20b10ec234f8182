//! What stands before the pages of a read: presence map and checksums must agree with the length.
#![no_main]

use arbitrary::Arbitrary;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{MessageHeader, MessageKind, ReadReply, read_prefix_bytes};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    asked: u16,
    count: Option<u32>,
    body: Option<u32>,
    present: u16,
    prefix: &'a [u8],
}

fuzz_target!(|input: Input<'_>| {
    let asked = u32::from(input.asked) % 300;
    let present = u32::from(input.present) % (asked + 1);
    let right = (read_prefix_bytes(asked, present) + present as usize * PAGE_BYTES) as u32;
    let count = input.count.unwrap_or(asked);
    let header = MessageHeader {
        kind: MessageKind::Read.answer(),
        count,
        body: input.body.unwrap_or(right),
        ..MessageHeader::default()
    };
    let Ok(bytes) = ReadReply::prefix_bytes(&header, asked) else { return };
    assert!(bytes <= header.body as usize);
    let mut prefix = input.prefix.to_vec();
    prefix.resize(bytes, 0);
    let Ok(reply) = ReadReply::decode(&header, asked, &prefix) else { return };
    let there = (0..asked).filter(|index| reply.is_present(*index)).count();
    assert_eq!(there, reply.present() as usize);
    assert_eq!(bytes + there * PAGE_BYTES, header.body as usize);
    for nth in 0..reply.present() {
        reply.sum_of_present(nth);
    }
});
