//! Which frames were used, for those who go round.

/// Frames that were used: of ground and annex, each up to an end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Used {
    pub(super) high: u32,
    pub(super) annex: u32,
    pub(super) annex_high: u32,
}

impl Used {
    /// How many.
    pub(crate) fn count(self) -> u32 {
        self.high - 1 + self.annex_high - self.annex - 1
    }

    /// The next one after this one, round and round.
    pub(crate) fn after(self, frame: u32) -> u32 {
        match frame + 1 {
            next if next < self.high => next,
            next if next <= self.annex && self.annex + 1 < self.annex_high => self.annex + 1,
            next if self.annex < next && next < self.annex_high => next,
            _ => 1,
        }
    }

    /// All of them.
    pub(crate) fn iter(self) -> impl Iterator<Item = u32> {
        (1..self.high).chain(self.annex + 1..self.annex_high)
    }
}
