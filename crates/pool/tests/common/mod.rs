//! What scripts that play a memory server share.

use farfield_core::wire::{HEADER_BYTES, MessageHeader};
use std::io::Read;

/// The next request of a client; `None` when it hangs up.
pub(crate) fn frame(peer: &mut impl Read) -> Option<(MessageHeader, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    peer.read_exact(&mut header).ok()?;
    let header = MessageHeader::decode(&header).unwrap().unwrap();
    let mut body = vec![0; header.body as usize];
    peer.read_exact(&mut body).ok()?;
    Some((header, body))
}
