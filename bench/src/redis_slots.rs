//! Slots of Redis Cluster: each key belongs to one of them, and each node serves a range.

use std::ops::Range;

const SLOTS: usize = 16384;

/// Returns the slot of a key without braces: CRC-16/XMODEM modulo the number of slots.
fn slot_of(key: &[u8]) -> usize {
    let crc = key.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    });
    usize::from(crc) % SLOTS
}

/// Returns the slots that a node serves, one of so many.
pub(crate) fn slots_of_node(node: usize, nodes: usize) -> Range<usize> {
    let first = |node: usize| (node * SLOTS).div_ceil(nodes);
    first(node)..first(node + 1)
}

/// Returns the node that serves a key, one of so many.
pub fn node_of_key(key: &[u8], nodes: usize) -> usize {
    slot_of(key) * nodes / SLOTS
}

#[cfg(test)]
mod tests {
    //! Danger: a client that asks the wrong node is told so, and each operation takes two messages.

    use super::*;

    #[test]
    fn a_key_has_the_slot_that_redis_gives_it() {
        // From the specification of Redis Cluster, and `CLUSTER KEYSLOT`.
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        assert_eq!(slot_of(b"foo"), 12182);
    }

    #[test]
    fn each_slot_has_the_node_whose_keys_are_sent_there() {
        for nodes in [1, 2, 3, 7] {
            for slot in 0..SLOTS {
                let node = slot * nodes / SLOTS;
                assert!(slots_of_node(node, nodes).contains(&slot), "slot {slot} of {nodes} nodes");
            }
        }
    }
}
