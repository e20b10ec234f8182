//! For tests of words: all that can become of one.

use alloc::vec;
use alloc::vec::Vec;

/// The first word, and all that any sequence of transitions makes of it. `next`: what one transition makes of a word.
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
