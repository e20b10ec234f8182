//! Bitmap of the chunks of a region that were ever written, in memory that exists only where a bit
//! is set. Regions are far larger than the part that is written. So a summary has a bit for each
//! word (64 chunks), which says where to look.

use crate::table::AtomicTable;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bitmap of the chunks that were written (see the module documentation).
pub(crate) struct DirtyChunks {
    words: AtomicTable<AtomicU64>,
    /// Summary: a bit for each word that has bits, set before them.
    summary: AtomicTable<AtomicU64>,
    /// Index from which on no bit is set.
    end: AtomicU64,
}

impl DirtyChunks {
    pub(crate) fn new(chunks: u64) -> Result<DirtyChunks, farfield_os::Errno> {
        let words = chunks.div_ceil(64);
        Ok(DirtyChunks {
            words: AtomicTable::new(words)?,
            summary: AtomicTable::new(words.div_ceil(64))?,
            end: AtomicU64::new(0),
        })
    }

    fn word(&self, chunk: u64) -> &AtomicU64 {
        self.words.at(chunk / 64)
    }

    pub(crate) fn has(&self, chunk: u64) -> bool {
        chunk < self.end.load(Ordering::SeqCst) && self.word(chunk).load(Ordering::SeqCst) & 1 << (chunk % 64) != 0
    }

    /// Marks the chunk before something is written there; returns whether it is marked for the
    /// first time.
    pub(crate) fn mark(&self, chunk: u64) -> bool {
        if self.has(chunk) {
            return false;
        }
        let bit = 1 << (chunk % 64);
        let word = chunk / 64;
        self.summary.at(word / 64).fetch_or(1 << (word % 64), Ordering::SeqCst);
        let before = self.word(chunk).fetch_or(bit, Ordering::SeqCst);
        self.end.fetch_max(chunk + 1, Ordering::SeqCst);
        before & bit == 0
    }

    /// Returns the index behind the last chunk that was written.
    pub(crate) fn end(&self) -> u64 {
        self.end.load(Ordering::SeqCst)
    }

    /// Returns the first chunk that was written, from `from` on.
    pub(crate) fn next(&self, from: u64) -> Option<u64> {
        let end = self.end.load(Ordering::SeqCst);
        let mut chunk = from;
        while chunk < end {
            let rest = self.word(chunk).load(Ordering::SeqCst) >> (chunk % 64);
            if rest != 0 {
                return Some(chunk + u64::from(rest.trailing_zeros()));
            }
            chunk = self.next_word(chunk / 64 + 1, end)? * 64;
        }
        None
    }

    /// Returns the first word, from `from` on and for chunks before `end`, that may have bits.
    fn next_word(&self, from: u64, end: u64) -> Option<u64> {
        let mut word = from;
        while word < end.div_ceil(64) {
            let rest = self.summary.at(word / 64).load(Ordering::SeqCst) >> (word % 64);
            if rest != 0 {
                return Some(word + u64::from(rest.trailing_zeros()));
            }
            word = (word / 64 + 1) * 64;
        }
        None
    }

    /// Iterates over all written chunks, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let chunk = self.next(from)?;
            from = chunk + 1;
            Some(chunk)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_chunks_are_found() {
        let dirty = DirtyChunks::new(1 << 26).unwrap();
        let chunks = [0, 1, 63, 64, 190, 5000, 1 << 18, (1 << 26) - 1];
        assert!(chunks.iter().rev().all(|chunk| dirty.mark(*chunk)));
        assert!(!dirty.mark(63));
        assert_eq!(dirty.iter().collect::<Vec<_>>(), chunks);
        assert_eq!((dirty.next(65), dirty.next(5001)), (Some(190), Some(1 << 18)));
        assert_eq!(dirty.next((1 << 18) + 1), Some((1 << 26) - 1));
        assert!(dirty.has(190) && !dirty.has(189));
        assert_eq!(DirtyChunks::new(1).unwrap().next(0), None);
    }
}
