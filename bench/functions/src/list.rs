//! `bench.list`: walks a linked list.

use farfield_wic::{Fault, Function, Place};
use serde::{Deserialize, Serialize};

/// Walks a linked list whose nodes are two little-endian words: the offset of the next node, or
/// [`List::END`], and a value.
#[derive(Debug)]
pub struct List;

/// Start of the walk, and its longest length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ListStart {
    /// Offset of the first node.
    pub node: u64,
    /// Most steps from a node to the next one. They are the only end of a list that is a ring.
    pub hops: u32,
}

/// End of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ListEnd {
    /// Offset of the last node.
    pub node: u64,
    /// Value of the last node.
    pub value: u64,
    /// Steps from the first node to this one: fewer than asked for if the list ends there.
    pub hops: u32,
}

impl List {
    /// Offset of the next node in the last one.
    pub const END: u64 = u64::MAX;
    /// Bytes of a node.
    pub const NODE_BYTES: usize = 16;
}

impl Function for List {
    const NAME: &'static str = "bench.list";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = ListStart;
    type Answer = ListEnd;

    async fn run<P: Place>(place: &P, start: ListStart) -> Result<ListEnd, Fault> {
        let (mut node, mut hops) = (start.node, 0);
        loop {
            let words: [u8; List::NODE_BYTES] = place.read(node).await?;
            let ([next, value], _) = words.as_chunks::<8>() else { unreachable!("a node is two words") };
            let (next, value) = (u64::from_le_bytes(*next), u64::from_le_bytes(*value));
            if hops == start.hops || next == List::END {
                return Ok(ListEnd { node, value, hops });
            }
            (node, hops) = (next, hops + 1);
        }
    }
}
