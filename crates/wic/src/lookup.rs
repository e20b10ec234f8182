//! `ff.lookup`: looks keys up in the buckets of a flat hash map ([`FlatBucket`]), many in one call.

use crate::access::Bytes;
use crate::{Fault, Function, Place};
use farfield_core::heap::FlatBucket;
use farfield_core::wire::CallBody;
use serde::{Deserialize, Serialize};

/// Looks keys up.
#[derive(Debug)]
pub struct Lookup;

/// Keys to look up, with the page to which each of them leads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LookupBatch {
    /// Bytes of a key.
    pub key_bytes: u32,
    /// Bytes of a value.
    pub value_bytes: u32,
    /// For each key, the offset of a page of its bucket, and the hash of the key.
    pub pages: Vec<(u64, u32)>,
    /// Keys, one after the other.
    pub keys: Bytes,
}

/// Result of looking up one key in one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LookupOutcome {
    /// The key is not in the bucket.
    Absent,
    /// The key is there; its value is the next one in the reply.
    Found,
    /// The key is not in this page, and the bucket has another one.
    Next,
}

/// Results of looking up several keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LookupReply {
    /// Result for each key.
    pub outcomes: Vec<LookupOutcome>,
    /// Values that were found, one after the other.
    pub values: Bytes,
}

impl Function for Lookup {
    const NAME: &'static str = "ff.lookup";
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = LookupBatch;
    type Answer = LookupReply;

    async fn run<P: Place>(place: &P, batch: LookupBatch) -> Result<LookupReply, Fault> {
        let key_bytes = batch.key_bytes as usize;
        // What is found is kept until the end.
        let bytes = (batch.pages.len() as u64).saturating_mul(batch.value_bytes.into());
        if bytes > CallBody::ANSWER_BYTES_MAX as u64 {
            return Err(Fault::TooLong { bytes });
        }
        let mut reply = LookupReply { outcomes: Vec::with_capacity(batch.pages.len()), values: Bytes(Vec::new()) };
        for (index, (page, hash)) in batch.pages.iter().enumerate() {
            let fault = Fault::OutOfRange { offset: *page };
            let layout = FlatBucket::new(key_bytes, batch.value_bytes as usize).ok_or(fault)?;
            let key = batch.keys.0.get(index * key_bytes..).and_then(|rest| rest.get(..key_bytes)).ok_or(fault)?;
            let head = place.read_range(*page, layout.head_bytes()).await?;
            let mut outcome = if layout.next(&head).is_some() { LookupOutcome::Next } else { LookupOutcome::Absent };
            for candidate in layout.candidates(&head, *hash) {
                let entry = layout.entry(candidate);
                let offset = page.checked_add(entry.start as u64).ok_or(fault)?;
                let bytes = place.read_range(offset, entry.len()).await?;
                let (of, value) = layout.split(&bytes);
                if of == key {
                    reply.values.0.extend_from_slice(value);
                    outcome = LookupOutcome::Found;
                    break;
                }
            }
            reply.outcomes.push(outcome);
        }
        Ok(reply)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against values of other keys, and against batches and pages that no map has made.
    use super::*;
    use crate::{Sim, Stop};
    use farfield_core::geometry::PAGE_BYTES;

    fn batch(pages: Vec<(u64, u32)>, keys: &[[u8; 4]]) -> LookupBatch {
        LookupBatch { key_bytes: 4, value_bytes: 8, pages, keys: Bytes(keys.concat()) }
    }

    #[test]
    fn keys_are_found_where_their_page_has_them() {
        let layout = FlatBucket::new(4, 8).unwrap();
        let mut region = vec![0; 3 * PAGE_BYTES];
        let (full, last) = region.split_at_mut(2 * PAGE_BYTES);
        layout.start(&mut full[PAGE_BYTES..], 0);
        layout.set_next(&mut full[PAGE_BYTES..], Some(1));
        for number in 0..layout.capacity() as u32 {
            let entry = [&number.to_le_bytes()[..], &(u64::from(number) * 7).to_le_bytes()].concat();
            // Several keys have the same hash.
            layout.push(&mut full[PAGE_BYTES..], number / 3, &entry);
        }
        layout.start(last, 0);
        let page = PAGE_BYTES as u64;
        let keys = [5u32, 100, 7, 5].map(u32::to_le_bytes);
        let pages = vec![(page, 1), (page, 33), (page, 1), (2 * page, 1)];
        for seed in 0..20 {
            let reply = Sim::new(seed, region.clone()).run_one::<Lookup>(batch(pages.clone(), &keys)).unwrap();
            let expected = [LookupOutcome::Found, LookupOutcome::Found, LookupOutcome::Next, LookupOutcome::Absent];
            assert_eq!(reply.outcomes, expected);
            assert_eq!(reply.values.0, [35u64, 700].map(u64::to_le_bytes).concat());
        }
    }

    #[test]
    fn forged_batches_are_faults() {
        let run = |batch| Sim::new(1, vec![0xFF; 2 * PAGE_BYTES]).steps(1000).run_one::<Lookup>(batch);
        let is_out_of_range = |result| matches!(result, Err(Stop::Fault(Fault::OutOfRange { .. })));
        assert!(is_out_of_range(run(batch(vec![(0, 1), (0, 2)], &[[1; 4]]))), "too few keys");
        assert!(is_out_of_range(run(batch(vec![(2 * PAGE_BYTES as u64, 1)], &[[1; 4]]))), "no such page");
        assert!(is_out_of_range(run(batch(vec![(u64::MAX - 1, 1)], &[[1; 4]]))));
        // The last page ends before its entries do.
        assert!(is_out_of_range(run(batch(vec![(2 * PAGE_BYTES as u64 - 2100, u32::MAX)], &[[1; 4]]))));
        let large = LookupBatch { key_bytes: u32::MAX, ..batch(vec![(0, 1)], &[[1; 4]]) };
        assert!(is_out_of_range(run(large)));
        // No batch makes a server keep more than an answer has.
        let many = LookupBatch { value_bytes: 1000, ..batch(vec![(0, u32::MAX); 66], &[[1; 4]; 66]) };
        assert!(matches!(run(many), Err(Stop::Fault(Fault::TooLong { bytes: 66_000 }))));
        // A page of nonsense has no such key.
        let reply = run(batch(vec![(0, u32::MAX)], &[[1; 4]])).unwrap();
        assert_eq!(reply.outcomes, [LookupOutcome::Next]);
    }
}
