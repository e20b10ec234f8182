//! The slot word: 64 bits that say where one far object is, in two halves.
//!
//! ```text
//!  63              32 31          8 7      0
//! +------------------+-------------+--------+
//! | page             | frame, hint | card   |
//! +------------------+-------------+--------+
//!  never changes      [`SlotHint`]: changes while others read
//! ```
//!
//! Page and card are the far address. The frame is a guess: where the page was when the slot was
//! last used. The guess is checked against the page's [`FrameWord`](super::FrameWord), so a wrong
//! one costs time and never safety. Therefore slots can lie anywhere and be moved by anybody, and a
//! page that leaves need not find them.
//!
//! `frame << 8 | card` times 16 is the byte offset of the object in the frame arena: one shift, one addition.

use super::CARD_BYTES;
use crate::cast::low_u8;
use crate::geometry::PAGE_BYTES;

/// Index of a frame in its heap's arena. 0 is no frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameId(pub u32);

/// Frames that an arena can have (64 GiB), number 0 included. The last 24-bit number means
/// "nowhere".
pub const FRAMES_MAX: u32 = (1 << 24) - 1;

const _: () = assert!(PAGE_BYTES / CARD_BYTES == 1 << 8, "a card fits in eight bits");

/// The lower half of a slot word: a guessed frame and a card.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotHint(pub u32);

impl SlotHint {
    /// Creates the place of an object that begins at `card` of its page, which was last seen in
    /// `frame`.
    pub fn new(frame: FrameId, card: u8) -> SlotHint {
        assert!(frame.0 < FRAMES_MAX);
        SlotHint(frame.0 << 8 | u32::from(card))
    }

    /// Returns the object's first card in its page.
    #[inline]
    pub fn card(self) -> u8 {
        low_u8(u64::from(self.0))
    }

    /// Returns the guessed frame.
    #[inline]
    pub fn frame(self) -> FrameId {
        FrameId(self.0 >> 8)
    }

    /// Returns the place of the object with `frame` as a better guess.
    #[inline]
    pub fn in_frame(self, frame: FrameId) -> SlotHint {
        SlotHint::new(frame, self.card())
    }

    /// Returns the byte offset of the object in the arena, if the guess is right.
    #[inline]
    pub fn offset(self) -> usize {
        self.0 as usize * CARD_BYTES
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a guess that leaks into the far address, or the other way round.
    use super::*;

    #[test]
    fn halves_do_not_mix() {
        for frame in [0, 1, 2, 255, 256, 65_535, FRAMES_MAX - 1] {
            for card in 0..=255u8 {
                let place = SlotHint::new(FrameId(frame), card);
                assert_eq!((place.frame(), place.card()), (FrameId(frame), card));
                assert_eq!(place.offset(), frame as usize * PAGE_BYTES + usize::from(card) * CARD_BYTES);
                let moved = place.in_frame(FrameId(7));
                assert_eq!((moved.frame(), moved.card()), (FrameId(7), card));
            }
        }
    }
}
