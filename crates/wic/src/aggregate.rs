//! `ff.aggregate`: sum, smallest, largest and number of the words of a range.

use crate::{Fault, Function, Place};
use serde::{Deserialize, Serialize};

/// Bytes read between two turns of the other tasks.
const CHUNK_BYTES: u64 = 32 * 1024;

/// Computes number, sum, smallest and largest of little-endian words that lie side by side.
#[derive(Debug)]
pub struct Aggregate;

/// Words side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Range {
    /// Offset of the first word.
    pub offset: u64,
    /// Number of words.
    pub count: u64,
}

/// Number, sum, smallest and largest of some words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Number of words.
    pub count: u64,
    /// Sum of the words; never too large for its type.
    pub sum: u128,
    /// Smallest word; `u64::MAX` if there are none.
    pub min: u64,
    /// Largest word; 0 if there are none.
    pub max: u64,
}

impl Function for Aggregate {
    const NAME: &'static str = "ff.aggregate";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = Range;
    type Answer = Summary;

    async fn run<P: Place>(place: &P, range: Range) -> Result<Summary, Fault> {
        let end = range.count.checked_mul(8).and_then(|bytes| range.offset.checked_add(bytes));
        let end = end.filter(|end| *end <= place.region_bytes()).ok_or(Fault::OutOfRange { offset: range.offset })?;
        let mut summary = Summary { count: range.count, sum: 0, min: u64::MAX, max: 0 };
        let mut offset = range.offset;
        while offset < end {
            let len = (end - offset).min(CHUNK_BYTES);
            let bytes = place.read_range(offset, len as usize).await?;
            for word in bytes.as_chunks::<8>().0 {
                let word = u64::from_le_bytes(*word);
                summary.sum += u128::from(word);
                summary.min = summary.min.min(word);
                summary.max = summary.max.max(word);
            }
            offset += len;
        }
        Ok(summary)
    }
}
