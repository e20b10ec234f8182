//! A function that follows pointers: each of its reads depends on the one before.

use farfield_wic::{Fault, Function, Place};
use serde::{Deserialize, Serialize};

/// Walks a linked list whose nodes are two words: the offset of the next node, or `END`, and a value.
#[derive(Debug)]
pub(crate) struct List;

/// Start of the walk, and its longest length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ListStart {
    pub(crate) node: u64,
    pub(crate) hops: u32,
}

/// End of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ListEnd {
    pub(crate) node: u64,
    pub(crate) value: u64,
    pub(crate) hops: u32,
}

impl List {
    /// Offset of the next node in the last one.
    pub(crate) const END: u64 = u64::MAX;
}

impl Function for List {
    const NAME: &'static str = "test.list";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = ListStart;
    type Answer = ListEnd;

    async fn run<P: Place>(place: &P, start: ListStart) -> Result<ListEnd, Fault> {
        let (mut node, mut hops) = (start.node, 0);
        loop {
            let words: [u8; 16] = place.read(node).await?;
            let ([next, value], _) = words.as_chunks::<8>() else { unreachable!("a node is two words") };
            let (next, value) = (u64::from_le_bytes(*next), u64::from_le_bytes(*value));
            if hops == start.hops || next == List::END {
                return Ok(ListEnd { node, value, hops });
            }
            (node, hops) = (next, hops + 1);
        }
    }
}
