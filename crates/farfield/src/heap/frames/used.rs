//! The frames that were ever used, for hands that go round them (CLOCK).

/// Ranges of the frames that were used: one in the ground and one in the annex, each up to an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Used {
    pub(super) high: u32,
    pub(super) annex: u32,
    pub(super) annex_high: u32,
}

impl Used {
    /// Returns the number of these frames.
    pub(crate) fn count(self) -> u32 {
        self.high - 1 + self.annex_high - self.annex - 1
    }

    /// Returns the frame after this one, in a circle.
    pub(crate) fn after(self, frame: u32) -> u32 {
        match frame + 1 {
            next if next < self.high => next,
            next if next <= self.annex && self.annex + 1 < self.annex_high => self.annex + 1,
            next if self.annex < next && next < self.annex_high => next,
            _ => 1,
        }
    }

    /// Iterates over all of them.
    pub(crate) fn iter(self) -> impl Iterator<Item = u32> {
        (1..self.high).chain(self.annex + 1..self.annex_high)
    }
}
