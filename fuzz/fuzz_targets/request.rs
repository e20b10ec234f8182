//! Requests: what is understood, encoded again, is what was said.
#![no_main]

use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::{
    HEADER_BYTES, MessageHeader, MessageKind, Request, WireRequest, encode_request, write_body_bytes,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(Some(mut header)) = MessageHeader::decode(bytes) else { return };
    let mut body = bytes[HEADER_BYTES..].to_vec();
    if header.kind == MessageKind::Write as u8 && header.flags & 0x80 != 0 {
        // Fuzzers do not grow inputs to whole pages by themselves.
        header.count %= 4;
        body.resize(write_body_bytes(header.count), 7);
        header.body = body.len() as u32;
    }
    if header.kind == MessageKind::Call as u8 && header.flags & 0x80 != 0 {
        // Nor do they find lengths that agree with each other: so many bytes are its name.
        body = [&1u32.to_le_bytes()[..], &(body.len().min(64) as u16).to_le_bytes()[..], &body[..]].concat();
        header.body = body.len() as u32;
    }
    let Ok(request) = WireRequest::decode(&header, &body) else { return };
    if let Request::Write { pages, .. } = request.request {
        assert_eq!(pages.iter().count(), pages.count() as usize);
        assert_eq!(pages.bytes().len(), pages.count() as usize * PAGE_BYTES);
        for (index, (sum, bytes)) in pages.iter().enumerate() {
            assert_eq!(sum, pages.sum(index as u32));
            assert_eq!(bytes.len(), PAGE_BYTES);
        }
    }
    if let Request::Call { call, .. } = request.request {
        assert!(call.is_sendable() && call.body_bytes() == body.len());
    }
    let mut again = Vec::new();
    encode_request(&request, &mut again);
    let header = MessageHeader::decode(&again).unwrap().unwrap();
    assert_eq!(header.frame_bytes(), again.len());
    assert_eq!(WireRequest::decode(&header, &again[HEADER_BYTES..]), Ok(request));
});
