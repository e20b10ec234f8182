//! Memory in pieces of many sizes, without `malloc`: slabs of 64 KiB, each cut into pieces of one
//! size.
//!
//! A piece is known by its *unit*, its offset in units of 64 bytes. A slab whose last piece comes
//! back is given back to the system. Everything is a number that changes atomically: no lane waits
//! for another.

use crate::table::AtomicTable;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_os::{Errno, memory};

pub(super) const UNIT_BYTES: usize = 64;
pub(super) const SLAB_BYTES: u64 = 64 << 10;
const UNITS: u64 = SLAB_BYTES / UNIT_BYTES as u64;
/// Units of the largest piece: a page as it is, and its head.
pub(super) const UNITS_MAX: usize = 65;
/// Number of words for the bits of a slab of the smallest pieces.
const BIT_WORDS: u64 = UNITS / 64;
/// Number of slabs that are searched for room before a new one is begun.
const LOOKS: u64 = 64;

/// State of a slab: the size of its pieces, in units, and how many are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct State(u64);

impl State {
    /// Unused slab, without memory.
    const FREE: State = State(0);
    /// Slab whose memory is being given back.
    const LEAVING: State = State(u64::MAX);

    fn new(units: u64, used: u64) -> State {
        State(units << 32 | used)
    }

    fn units(self) -> u64 {
        self.0 >> 32
    }

    fn used(self) -> u64 {
        self.0 & u64::from(u32::MAX)
    }

    /// Returns the state with one piece of `units` more, if the slab has such a piece free.
    fn try_take(self, units: u64) -> Option<State> {
        (self.units() == units && self.used() < UNITS / units).then(|| State(self.0 + 1))
    }

    /// Returns the state with one piece less.
    fn give(self) -> State {
        if self.used() == 1 { State::LEAVING } else { State(self.0 - 1) }
    }
}

/// Allocator of pieces of many sizes.
pub(super) struct Slabs {
    start: usize,
    count: u64,
    states: AtomicTable<AtomicU64>,
    bits: AtomicTable<AtomicU64>,
    /// Slab in which the last piece of each size was found.
    current: [AtomicU32; UNITS_MAX + 1],
    /// Number of slabs that were used at least once.
    begun: AtomicU64,
    /// Number of slabs that have memory.
    held: AtomicU64,
    /// Position behind the last slab that was found to be used again.
    rover: AtomicU64,
}

impl Slabs {
    /// Creates slabs of `bytes` at most.
    pub(super) fn new(bytes: u64) -> Result<Slabs, Errno> {
        // This is one slab fewer than 31 bits would name.
        let count = (bytes / SLAB_BYTES).min((1 << 31) / UNITS - 1);
        Ok(Slabs {
            start: memory::map_anonymous((count * SLAB_BYTES) as usize)?,
            count,
            states: AtomicTable::new(count)?,
            bits: AtomicTable::new(count * BIT_WORDS)?,
            current: [const { AtomicU32::new(0) }; UNITS_MAX + 1],
            begun: AtomicU64::new(0),
            held: AtomicU64::new(0),
            rover: AtomicU64::new(0),
        })
    }

    /// Returns the number of bytes of memory that slabs have now.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed) * SLAB_BYTES
    }

    /// Returns an address in a piece.
    pub(super) fn address(&self, unit: u64, offset: usize) -> *mut u8 {
        assert!(offset < self.bytes_from(unit));
        (self.start + unit as usize * UNIT_BYTES + offset) as *mut u8
    }

    /// Returns the number of bytes from this unit to the end of the memory of slabs.
    pub(super) fn bytes_from(&self, unit: u64) -> usize {
        ((self.count * UNITS).saturating_sub(unit) as usize) * UNIT_BYTES
    }

    /// Returns the units of a piece that holds `bytes`. Rounding to fewer sizes loses less than an
    /// eighth.
    pub(super) fn units_for(bytes: usize) -> u64 {
        let units = bytes.div_ceil(UNIT_BYTES);
        assert!(units <= UNITS_MAX);
        let step = match units {
            0..=16 => 1,
            17..=32 => 2,
            _ => 4,
        };
        units.next_multiple_of(step).clamp(1, UNITS_MAX) as u64
    }

    /// Takes a piece for `bytes`; returns `None` if there is no memory left.
    pub(super) fn take(&self, bytes: usize) -> Option<u64> {
        let units = Self::units_for(bytes);
        let current = &self.current[units as usize];
        loop {
            let slab = u64::from(current.load(Ordering::Relaxed));
            if slab < self.count
                && let Some(unit) = self.take_in(slab, units)
            {
                return Some(unit);
            }
            let begun = self.begun.load(Ordering::Relaxed);
            let near = (1..=LOOKS.min(begun)).map(|next| (slab + next) % begun.max(1));
            let found = near.into_iter().find(|&slab| self.has_room(slab, units)).or_else(|| self.begin(units));
            // There is no new slab. Before the pool counts as full, all slabs are searched.
            let found = found.or_else(|| (0..begun).find(|&slab| self.has_room(slab, units)))?;
            current.store(found as u32, Ordering::Relaxed);
        }
    }

    fn state(&self, slab: u64) -> State {
        State(self.states.at(slab).load(Ordering::Acquire))
    }

    fn has_room(&self, slab: u64, units: u64) -> bool {
        self.state(slab).try_take(units).is_some()
    }

    fn change(&self, slab: u64, next: impl Fn(State) -> Option<State>) -> Option<State> {
        let next = |word| next(State(word)).map(|state| state.0);
        self.states.at(slab).fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok().map(State)
    }

    fn take_in(&self, slab: u64, units: u64) -> Option<u64> {
        self.change(slab, |state| state.try_take(units))?;
        // One of the pieces is ours: other lanes that claimed one may be faster with some, but
        // never with all.
        let pieces = UNITS / units;
        loop {
            for index in 0..pieces.div_ceil(64) {
                let word = self.bits.at(slab * BIT_WORDS + index);
                let here = (pieces - index * 64).min(64);
                let all = if here == 64 { u64::MAX } else { (1 << here) - 1 };
                let free = !word.load(Ordering::Relaxed) & all;
                let lowest = free & free.wrapping_neg();
                if lowest != 0 && word.fetch_or(lowest, Ordering::AcqRel) & lowest == 0 {
                    let piece = index * 64 + u64::from(lowest.trailing_zeros());
                    return Some(slab * UNITS + piece * units);
                }
            }
        }
    }

    /// Begins an unused slab for pieces of this size.
    fn begin(&self, units: u64) -> Option<u64> {
        let own = |slab: u64| {
            let own = |state| (state == State::FREE).then(|| State::new(units, 0));
            self.change(slab, own).map(|_| {
                self.held.fetch_add(1, Ordering::Relaxed);
                slab
            })
        };
        let begun = self.begun.load(Ordering::Relaxed);
        if self.held.load(Ordering::Relaxed) < begun {
            let from = self.rover.load(Ordering::Relaxed);
            let found = (0..begun).map(|next| (from + next) % begun).find_map(own);
            if let Some(slab) = found {
                self.rover.store(slab + 1, Ordering::Relaxed);
                return Some(slab);
            }
        }
        loop {
            let more = |begun: u64| (begun < self.count).then_some(begun + 1);
            let slab = self.begun.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
            if let Some(slab) = own(slab) {
                return Some(slab);
            }
        }
    }

    /// Gives a piece back.
    pub(super) fn give(&self, unit: u64) {
        let slab = unit / UNITS;
        let units = self.state(slab).units();
        let piece = unit % UNITS / units;
        let word = self.bits.at(slab * BIT_WORDS + piece / 64);
        let before = word.fetch_and(!(1 << (piece % 64)), Ordering::AcqRel);
        assert!(before >> (piece % 64) & 1 == 1, "a piece comes back twice");
        let before = self.change(slab, |state| Some(state.give()));
        if before.is_some_and(|state| state.give() == State::LEAVING) {
            let address = self.start + (slab * SLAB_BYTES) as usize;
            // SAFETY: nobody has a piece of this slab, and nobody gets one before it is free. A
            // reader that still looks at a piece that it does not own any more sees zeros, and that
            // the page is elsewhere.
            let _ = unsafe { memory::madvise(address, SLAB_BYTES as usize, libc::MADV_DONTNEED) };
            self.held.fetch_sub(1, Ordering::Relaxed);
            self.states.at(slab).store(State::FREE.0, Ordering::Release);
        }
    }
}

impl Drop for Slabs {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; addresses end with `self`.
        let _ = unsafe { memory::munmap(self.start, (self.count * SLAB_BYTES) as usize) };
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two pages in one piece, and memory that is not given back.
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn pieces_are_large_enough_and_little_is_lost() {
        for bytes in 1..=UNITS_MAX * UNIT_BYTES {
            let piece = Slabs::units_for(bytes) as usize * UNIT_BYTES;
            assert!(piece >= bytes && piece < bytes + UNIT_BYTES + bytes / 8, "{piece} for {bytes}");
        }
    }

    #[test]
    fn random_pieces_never_overlap_and_all_memory_comes_back() {
        let slabs = Slabs::new(4 << 20).unwrap();
        let (mut random, mut taken) = (fastrand::Rng::with_seed(0x5eed), BTreeMap::new());
        let mut full = 0;
        for _ in 0..40_000 {
            if random.u8(..5) < 3 {
                let bytes = random.usize(1..4161);
                let Some(unit) = slabs.take(bytes) else {
                    full += 1;
                    let some: Vec<u64> = taken.keys().copied().step_by(2).collect();
                    for unit in some {
                        taken.remove(&unit);
                        slabs.give(unit);
                    }
                    continue;
                };
                let end = unit + Slabs::units_for(bytes);
                let before = taken.range(..=unit).next_back().map_or(0, |(_, end)| *end);
                let after = taken.range(unit..).next().map_or(u64::MAX, |(unit, _)| *unit);
                assert!(before <= unit && end <= after, "{unit}..{end} overlaps");
                taken.insert(unit, end);
            } else if let Some((&unit, _)) = taken.range(random.u64(..1 << 14)..).next() {
                taken.remove(&unit);
                slabs.give(unit);
            }
        }
        assert!(full > 0, "it is never full");
        taken.into_keys().for_each(|unit| slabs.give(unit));
        assert_eq!(slabs.held_bytes(), 0);
        // And all of it can be taken again.
        let pieces: Vec<u64> = core::iter::from_fn(|| slabs.take(4096)).collect();
        assert_eq!(pieces.len() as u64, (4 << 20) / SLAB_BYTES * (UNITS / 64));
    }

    #[test]
    fn threads_never_share_a_piece() {
        let slabs = Slabs::new(2 << 20).unwrap();
        std::thread::scope(|scope| {
            for me in 1..=3u8 {
                let slabs = &slabs;
                scope.spawn(move || {
                    for round in 0..3000usize {
                        let pieces: Vec<u64> =
                            (0..7).filter_map(|n| slabs.take(64 + (round * 7 + n) % 5 * 300)).collect();
                        for &unit in &pieces {
                            // SAFETY: the piece is this thread's.
                            unsafe { slabs.address(unit, 0).write_bytes(me, 64) };
                        }
                        std::thread::yield_now();
                        for &unit in &pieces {
                            // SAFETY: as above.
                            assert!((0..64).all(|at| unsafe { slabs.address(unit, at).read() } == me));
                            slabs.give(unit);
                        }
                    }
                });
            }
        });
        assert_eq!(slabs.held_bytes(), 0);
    }
}
