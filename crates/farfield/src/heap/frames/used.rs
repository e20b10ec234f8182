//! The frames that were ever used, for hands that go round them (CLOCK).

use core::ops::Range;

/// Ranges of the frames that were used: one in the base area and one in the overflow area, each up
/// to an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct UsedFrames {
    pub(super) high: u32,
    pub(super) overflow_start: u32,
    pub(super) overflow_high: u32,
}

impl UsedFrames {
    /// Returns the number of these frames.
    pub(crate) fn count(self) -> u32 {
        self.high - 1 + self.overflow_high - self.overflow_start - 1
    }

    /// Returns the frame after this one, in a circle.
    pub(crate) fn after(self, frame: u32) -> u32 {
        match frame + 1 {
            next if next < self.high => next,
            next if next <= self.overflow_start && self.overflow_start + 1 < self.overflow_high => {
                self.overflow_start + 1
            }
            next if self.overflow_start < next && next < self.overflow_high => next,
            _ => 1,
        }
    }

    /// Returns the range of the base area and that of the overflow area.
    pub(crate) fn ranges(self) -> [Range<u32>; 2] {
        [1..self.high, self.overflow_start + 1..self.overflow_high]
    }

    /// Iterates over all of them.
    pub(crate) fn iter(self) -> impl Iterator<Item = u32> {
        self.ranges().into_iter().flatten()
    }
}
