//! What scripts that play a memory server share.

use farfield_core::wire::{HEAD_BYTES, MessageHeader};
use std::io::Read;

/// The next request of a client; `None` when it hangs up.
pub(crate) fn frame(peer: &mut impl Read) -> Option<(MessageHeader, Vec<u8>)> {
    let mut head = [0; HEAD_BYTES];
    peer.read_exact(&mut head).ok()?;
    let head = MessageHeader::decode(&head).unwrap().unwrap();
    let mut body = vec![0; head.body as usize];
    peer.read_exact(&mut body).ok()?;
    Some((head, body))
}
