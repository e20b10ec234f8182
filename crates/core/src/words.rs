//! Test support: all words that transitions can reach.

use alloc::vec;
use alloc::vec::Vec;

/// Returns the first word and all words that any sequence of transitions makes of it. `next`
/// returns the results of single transitions.
pub(crate) fn reachable<Word: Copy + PartialEq>(first: Word, next: impl Fn(Word) -> Vec<Word>) -> Vec<Word> {
    let mut seen = vec![first];
    let mut at = 0;
    while at < seen.len() {
        for candidate in next(seen[at]) {
            if !seen.contains(&candidate) {
                seen.push(candidate);
            }
        }
        at += 1;
    }
    seen
}
