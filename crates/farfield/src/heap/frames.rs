//! Frames: the near memory that holds pages, and which of it is free.
//!
//! One arena of reserved address space, used from its low end. A frame is *warm* once it was
//! touched, until it is given back to the kernel. Warm frames, free or not, are what counts against
//! the limit.
//!
//! A unit of several pages needs contiguous frames, but free frames lie between those in use, which
//! scopes may refer to. So the arena has more frames than the limit can be: above the *base area*,
//! where all fit, lies the *overflow area*, for units only. A unit that finds no contiguous frames
//! in the base area gets them in the overflow area, where they become warm; as many separate frames
//! of the base area are given back to the kernel.

mod guards;
mod info;
mod used;

use super::memory::{Reserved, ReservedArray};
use crate::error::BuildError;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{FRAMES_MAX, FrameId, FreeRuns};
use guards::Guards;
pub(crate) use info::{FrameInfo, INFO_BYTES};
use std::sync::{Mutex, MutexGuard, PoisonError};
use used::UsedFrames;

/// The near memory of a heap.
pub(crate) struct Frames {
    arena: Reserved,
    pub(crate) infos: ReservedArray<FrameInfo>,
    free: Mutex<FreeFrames>,
    /// Approximate number of frames that can be taken now. For decisions that may be wrong.
    room: AtomicU32,
    /// Number of units that are Cooling: their frames become free as soon as the scopes end that
    /// could refer to them.
    cooling: AtomicU32,
    /// Maximum number of frames that may cost memory.
    limit: AtomicU32,
    /// Number of frames of units that are pinned.
    pinned: AtomicU32,
    /// End of the frames of the base area that were ever used.
    high: AtomicU32,
    /// End of the frames of the overflow area that were ever used.
    overflow_high: AtomicU32,
    /// Index of the overflow area's first frame. That frame is never used, so no unit lies in both
    /// areas.
    overflow_start: u32,
    /// Number of frames in the arena; the first is never used.
    count: u32,
    /// Of a paranoid heap.
    guards: Option<Guards>,
}

/// Rule that says which free frames a caller may take (watermarks of reclaim).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Watermark {
    /// Takes all frames but the reserve.
    Normal,
    /// Takes all frames but the reserve and so many more, one for each waiter that came before.
    Queued(u32),
    /// Takes the reserve too: for scopes that only their own end could give room.
    Emergency,
}

struct FreeFrames {
    /// Frames that are free and cost memory.
    warm: FreeRuns,
    /// Frames that are free and cost nothing.
    cold: FreeRuns,
    /// Maximum number of frames that may cost memory.
    limit: u32,
    /// Effective limit: above `limit` while a lowered limit is not reached yet, and equal to it
    /// otherwise.
    ceiling: u32,
    /// True if one returned frame was not yet counted for lowering the ceiling, which takes two.
    is_odd: bool,
    /// Number of frames that cost memory: those in use, the warm ones, and `tables`.
    resident: u32,
    /// Number of frames that the [`FrameInfo`]s of frames in the overflow area are worth.
    tables: u32,
}

const FRAMES_PER_HUGE: u32 = (2 << 20) / PAGE_BYTES as u32;

/// Maximum margin of free frames: a number of frames, and a divisor of the limit.
///
/// So many frames suffice for what comes before a reclaimer that was woken has made room. More than
/// that would be near memory that nothing lies in. The divisor adds a part of all frames for heaps
/// that many threads use.
const MARGIN: (u32, u32) = (1024, 128);

/// Number of frames that a scope can hold whatever others do; a sixteenth of all if that is less.
pub(super) const SCOPE_FRAMES: u32 = 2048;

/// Returns the number of free frames below which the reclaimer begins, in a near memory of `limit`
/// frames.
fn margin(limit: u32) -> u32 {
    (limit / 16).min(MARGIN.0 + limit / MARGIN.1)
}

/// Size of the overflow area as a multiple of the base area, as far as frames have numbers.
///
/// Units of all sizes that come and go need up to twice the room that they take; the rest is for
/// the worst case.
const OVERFLOW_FACTOR: u32 = 4;

impl Frames {
    /// Creates a base area of so many frames, without any memory yet: [`Frames::set_limit`] gives
    /// it some.
    pub(crate) fn new(base_frames: u32, paranoid: bool) -> Result<Frames, BuildError> {
        let count = base_frames.saturating_mul(1 + OVERFLOW_FACTOR).min(FRAMES_MAX);
        let arena = Reserved::new(count as usize * PAGE_BYTES)?;
        // SAFETY: nobody has a frame yet.
        let guards = paranoid.then(|| unsafe { Guards::new(&arena, count) });
        if guards.is_none() {
            // SAFETY: frame 0 is never given out; a slot that guesses it finds no memory and no secret.
            unsafe { arena.set_access(0, PAGE_BYTES, false) };
        }
        let mut cold = FreeRuns::new();
        cold.put(1, base_frames - 1);
        if count > base_frames + 1 {
            cold.put(base_frames + 1, count - base_frames - 1);
        }
        let free =
            FreeFrames { warm: FreeRuns::new(), cold, limit: 0, ceiling: 0, is_odd: false, resident: 0, tables: 0 };
        Ok(Frames {
            arena,
            infos: ReservedArray::new(count as usize)?,
            room: AtomicU32::new(free.room()),
            cooling: AtomicU32::new(0),
            limit: AtomicU32::new(0),
            free: Mutex::new(free),
            pinned: AtomicU32::new(0),
            high: AtomicU32::new(1),
            overflow_high: AtomicU32::new(base_frames + 1),
            overflow_start: base_frames,
            count,
            guards,
        })
    }

    /// Lets whole huge pages inside the limit back the arena; a part of one would cost more than it
    /// holds.
    fn prefer_huge(&self, from: u32, limit: u32) {
        let (from, to) = (from.next_multiple_of(FRAMES_PER_HUGE), limit / FRAMES_PER_HUGE * FRAMES_PER_HUGE);
        if from < to && self.guards.is_none() {
            self.arena.prefer_huge(from as usize * PAGE_BYTES, (to - from) as usize * PAGE_BYTES);
        }
    }

    fn lock(&self) -> MutexGuard<'_, FreeFrames> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the highest possible limit.
    pub(crate) fn limit_max(&self) -> u32 {
        self.overflow_start - 1
    }

    /// Returns the frames that were used so far.
    pub(crate) fn used(&self) -> UsedFrames {
        let [high, overflow_high] = [&self.high, &self.overflow_high].map(|end| end.load(Ordering::Relaxed));
        UsedFrames { high, overflow_start: self.overflow_start, overflow_high }
    }

    /// Returns the address of the arena's first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.arena.base()
    }

    /// Returns the number of bytes of the arena.
    pub(crate) fn arena_bytes(&self) -> usize {
        self.count as usize * PAGE_BYTES
    }

    /// Returns the address of a frame's first byte.
    pub(crate) fn address(&self, frame: FrameId) -> *mut u8 {
        assert!(frame.0 != 0 && frame.0 < self.count);
        // SAFETY: inside the arena.
        unsafe { self.arena.base().add(frame.0 as usize * PAGE_BYTES) }
    }

    /// Checks whether the arena contains this address.
    pub(crate) fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.arena.base() as usize) < self.count as usize * PAGE_BYTES
    }

    /// Returns the frame in which this address of the arena lies.
    pub(crate) fn at(&self, address: *const u8) -> FrameId {
        assert!(self.contains(address as usize));
        FrameId(((address as usize - self.arena.base() as usize) / PAGE_BYTES) as u32)
    }

    /// Adds a pin to the unit in these frames. False if too much is pinned: half of the frames may
    /// be.
    pub(crate) fn pin(&self, first: FrameId, count: u32) -> bool {
        let is_first = self.infos[first.0].pins.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first && self.pinned.fetch_add(count, Ordering::Relaxed) + count > self.limit() / 2 {
            self.unpin(first, count);
            return false;
        }
        true
    }

    /// Removes a pin from the unit in these frames.
    pub(crate) fn unpin(&self, first: FrameId, count: u32) {
        // Release: a thread that reads 0 sees all that was done with the unit while it was pinned.
        if self.infos[first.0].pins.fetch_sub(1, Ordering::Release) == 1 {
            self.pinned.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Returns the number of frames of units that are pinned.
    pub(crate) fn pinned(&self) -> u32 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Returns the approximate number of frames that can be taken now.
    pub(crate) fn room(&self) -> u32 {
        self.room.load(Ordering::Relaxed)
    }

    /// Returns the approximate number of units that are Cooling.
    pub(crate) fn cooling(&self) -> u32 {
        // Below 0 for a moment if a unit is rescued before it was counted.
        (self.cooling.load(Ordering::Relaxed) as i32).max(0) as u32
    }

    /// Counts a unit that became Cooling (`is`), or that is so no more.
    pub(crate) fn count_cooling(&self, is: bool) {
        self.cooling.fetch_add(if is { 1 } else { u32::MAX }, Ordering::Relaxed);
    }

    /// Returns the low watermark: the reclaimer works when fewer frames are free.
    pub(crate) fn low(&self) -> u32 {
        margin(self.limit()).max(4)
    }

    /// Checks whether the reclaimer is late, so that a scope that began now might not be able to
    /// hold as much as scopes may.
    #[inline]
    pub(crate) fn is_scarce(&self) -> bool {
        let (room, limit) = (self.room(), self.limit());
        // The first condition is false where there is much room. The last adds nothing in heaps up
        // to 128 MiB.
        room < (limit / 16).max(4) && room + self.cooling() < limit / 8 && room < SCOPE_FRAMES.max(self.low())
    }

    /// Returns the number of frames that a caller can take that cannot go on without. These are
    /// more than [`Frames::room`] while a lowered limit is not reached yet.
    pub(crate) fn spare(&self) -> u32 {
        self.lock().spare()
    }

    /// Returns [`Frames::spare`] without the reserve.
    pub(crate) fn open_spare(&self) -> u32 {
        let free = self.lock();
        free.spare().saturating_sub(free.reserve())
    }

    /// Returns [`Frames::room`] without the reserve.
    pub(crate) fn open_room(&self) -> u32 {
        let free = self.lock();
        free.room().saturating_sub(free.reserve())
    }

    /// Returns the number of frames that only [`Watermark::Emergency`] may take.
    pub(crate) fn reserve(&self) -> u32 {
        self.lock().reserve()
    }

    /// Returns the maximum number of frames that may cost memory.
    #[inline]
    pub(crate) fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the limit in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.limit()) * PAGE_BYTES as u64
    }

    /// Returns the number of frames that cost memory, and how many of them are in use.
    pub(crate) fn resident(&self) -> (u32, u32) {
        let free = self.lock();
        (free.resident, free.in_use() - free.tables)
    }

    /// Checks whether more frames are in use than the limit: it was lowered, and perhaps nobody
    /// will ever ask for a frame again.
    pub(crate) fn is_over_limit(&self) -> bool {
        let free = self.lock();
        free.in_use() > free.limit
    }

    /// Takes `count` contiguous frames and returns the first. The caller owns them and their bytes,
    /// which are arbitrary. `None` if there are too few for this watermark.
    pub(crate) fn take(&self, count: u32, watermark: Watermark) -> Option<FrameId> {
        let mut free = self.lock();
        let kept = match watermark {
            Watermark::Queued(others) => free.reserve() + others,
            Watermark::Normal => free.reserve(),
            Watermark::Emergency => 0,
        };
        if free.in_use() + count + kept > free.ceiling {
            return None;
        }
        let mut first = free.warm.take_below(self.end_for(count), count);
        while first.is_none() {
            first = self.take_cold(&mut free, count);
            // Many separate warm frames are no run. Given back, they make room for one, with the
            // cold frames between them.
            if first.is_some() || free.warm.is_empty() {
                break;
            }
            self.decommit(&mut free);
        }
        self.room.store(free.room(), Ordering::Relaxed);
        drop(free);
        let first = first?;
        let high = if first < self.overflow_start { &self.high } else { &self.overflow_high };
        high.fetch_max(first + count, Ordering::Relaxed);
        if let Some(guards) = &self.guards {
            guards.open(&self.arena, first, count);
        }
        Some(FrameId(first))
    }

    /// Returns the end of the frames in which units of so many pages may lie.
    fn end_for(&self, count: u32) -> u32 {
        if count == 1 { self.overflow_start } else { self.count }
    }

    /// Takes cold frames, which cost memory from now on, if the ceiling allows it.
    fn take_cold(&self, free: &mut FreeFrames, count: u32) -> Option<u32> {
        if free.resident + count > free.ceiling {
            return None;
        }
        let first = free.cold.take_below(self.end_for(count), count)?;
        let in_overflow = (first + count).saturating_sub(self.overflow_start) as usize;
        let tables = free.tables.max((in_overflow * INFO_BYTES).div_ceil(PAGE_BYTES) as u32);
        let cost = count + tables - free.tables;
        if free.resident + cost > free.ceiling {
            free.cold.put(first, count);
            return None;
        }
        free.resident += cost;
        free.tables = tables;
        Some(first)
    }

    /// Gives a run of warm frames back to the kernel (decommit).
    fn decommit(&self, free: &mut FreeFrames) {
        let excess = free.resident.saturating_sub(free.limit).max(64);
        let Some((first, count)) = free.warm.take_last(excess) else { return };
        // SAFETY: the frames are free and the lock is held, so nobody uses them.
        unsafe { self.arena.give_back(first as usize * PAGE_BYTES, count as usize * PAGE_BYTES) };
        if let Some(guards) = &self.guards {
            // SAFETY: as above.
            unsafe { guards.protect(&self.arena, first, count) };
        }
        free.cold.put(first, count);
        free.resident -= count;
    }

    /// Puts `count` frames back. The caller owned them; nobody can reach their bytes any more.
    pub(crate) fn put(&self, first: FrameId, count: u32) {
        for frame in first.0..first.0 + count {
            self.infos[frame].page.store(0, Ordering::Relaxed);
        }
        // Its pins were leaked (`mem::forget`), or it would not be freed.
        if self.infos[first.0].pins.swap(0, Ordering::Relaxed) > 0 {
            self.pinned.fetch_sub(count, Ordering::Relaxed);
        }
        if let Some(guards) = &self.guards {
            // SAFETY: the frames are the caller's, who says that nobody reaches them.
            unsafe { guards.close(&self.arena, first, count) };
        }
        let mut free = self.lock();
        free.warm.put(first.0, count);
        self.trim(&mut free);
        // A lower limit is reached in steps: of two frames that come back, one can be taken.
        let back = count + u32::from(free.is_odd);
        free.is_odd = !back.is_multiple_of(2);
        free.ceiling = free.limit.max(free.ceiling - back / 2);
        self.room.store(free.room(), Ordering::Relaxed);
    }

    fn trim(&self, free: &mut FreeFrames) {
        while free.resident > free.limit && !free.warm.is_empty() {
            self.decommit(free);
        }
    }

    /// Sets how many frames may cost memory. If more do, they are given back as they become free.
    pub(crate) fn set_limit(&self, limit: u32) {
        let limit = limit.min(self.limit_max());
        let mut free = self.lock();
        if limit == free.limit {
            return;
        }
        let before = core::mem::replace(&mut free.limit, limit);
        self.limit.store(limit, Ordering::Relaxed);
        self.trim(&mut free);
        // Nobody waits until the limit is reached; see `put`.
        free.ceiling = limit.max(free.ceiling.min(free.in_use() + free.reserve()));
        self.room.store(free.room(), Ordering::Relaxed);
        drop(free);
        if limit > before + FRAMES_PER_HUGE {
            self.prefer_huge(before, limit);
        }
    }

    /// Checks whether the frame is free, for the verifier.
    pub(crate) fn is_free(&self, frame: FrameId) -> bool {
        let free = self.lock();
        free.warm.contains(frame.0) || free.cold.contains(frame.0)
    }
}

impl FreeFrames {
    /// Returns the number of frames that can be taken; 0 while the limit is exceeded.
    fn room(&self) -> u32 {
        self.limit.saturating_sub(self.in_use())
    }

    /// Returns the number of frames below the ceiling that are not in use.
    fn spare(&self) -> u32 {
        self.ceiling - self.in_use()
    }

    fn in_use(&self) -> u32 {
        self.resident - self.warm.len() as u32
    }

    /// Returns the number of frames that only [`Watermark::Emergency`] may take.
    fn reserve(&self) -> u32 {
        margin(self.limit) / 2
    }
}

/// Makes the compiler assume that all bytes of the frame were written.
///
/// Values have bytes that no type gives a meaning (padding). In memory that the kernel gave us they
/// are bytes like any others; the compiler must not conclude otherwise from the types that were
/// written there. It has to assume that the empty assembly block wrote all of them.
pub(crate) fn launder(address: *mut u8) {
    #[cfg(not(miri))]
    // SAFETY: no instruction; memory is clobbered by default.
    unsafe {
        core::arch::asm!("/* {0} */", in(reg) address, options(nostack, preserves_flags));
    }
    #[cfg(miri)]
    let _ = address;
}

/// Copies a page word by word, because others may change its words meanwhile.
///
/// # Safety
/// The page lies in a frame, and whoever changes its words meanwhile does so with atomics.
#[expect(clippy::cast_ptr_alignment, reason = "a frame is aligned to its size")]
pub(crate) unsafe fn copy_words(page: *mut u8, into: &mut [u8]) {
    launder(page);
    for (index, chunk) in into.chunks_exact_mut(size_of::<u64>()).take(PAGE_BYTES / size_of::<u64>()).enumerate() {
        // SAFETY: inside the page, by `take`; frames are aligned, and their memory is initialised (see `launder`).
        // The caller rules out anything but atomics.
        let word = unsafe { AtomicU64::from_ptr(page.cast::<u64>().add(index)) };
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    //! Guards against free frames that nobody can have.
    use super::*;

    /// A lower limit must neither stop everybody until it is reached, nor be exceeded for ever.
    #[test]
    fn a_lower_limit_is_reached_while_frames_are_taken() {
        let frames = Frames::new(2000, false).unwrap();
        frames.set_limit(1600);
        let mut used: Vec<FrameId> = core::iter::from_fn(|| frames.take(1, Watermark::Normal)).collect();
        assert_eq!(used.len(), 1600 - 50);
        frames.set_limit(1280);
        assert_eq!((frames.room(), frames.spare()), (0, 40));
        let mut put = 0;
        while frames.spare() != frames.room() {
            // Whoever needs one finds it after two came back.
            for _ in 0..2 {
                frames.put(used.pop().unwrap(), 1);
                put += 1;
            }
            used.push(frames.take(1, Watermark::Normal).expect("one of two"));
            assert!(put < 2 * (1600 - 1280), "{} in use after {put}", used.len());
        }
        while frames.take(1, Watermark::Emergency).is_some() {}
        assert_eq!((frames.resident(), frames.spare()), ((1280, 1280), 0));
    }

    #[test]
    #[should_panic(expected = "was written to after it came back")]
    fn a_paranoid_heap_notices_who_writes_to_a_frame_that_holds_nothing() {
        let frames = Frames::new(64, true).unwrap();
        frames.set_limit(32);
        // The first one that comes back is protected, the second is not.
        let [one, other] = [(); 2].map(|()| frames.take(1, Watermark::Normal).expect("there are 32"));
        frames.put(one, 1);
        frames.put(other, 1);
        // SAFETY: inside the arena, and not protected; nobody else is here.
        unsafe { frames.address(other).add(17).write(0) };
        while frames.take(1, Watermark::Emergency).is_some() {}
    }

    #[test]
    fn large_heaps_keep_no_larger_part_free_than_smaller_ones() {
        for limit in (64..1 << 22).step_by(61) {
            let kept = margin(limit);
            assert!(kept <= limit / 16 && kept <= margin(limit + 61), "{limit}");
            assert!(limit > 1 << 14 || kept == limit / 16, "{limit}");
        }
        // Of 256 MiB and 16 GiB: 6 and 132 MiB.
        assert_eq!((margin(1 << 16), margin(1 << 22)), (1536, 33792));
    }

    /// Tables grow all the time: what the reserve is must stay.
    #[test]
    fn the_reserve_stays_unused_after_a_limit_was_lowered() {
        let frames = Frames::new(2000, false).unwrap();
        frames.set_limit(1600);
        let mut used: Vec<FrameId> = core::iter::from_fn(|| frames.take(1, Watermark::Normal)).collect();
        for limit in (1280..1600).rev().step_by(16) {
            frames.set_limit(limit);
            used.drain(..64).for_each(|frame| frames.put(frame, 1));
            used.extend(core::iter::from_fn(|| frames.take(1, Watermark::Normal)));
        }
        while frames.resident().1 > frames.limit() - frames.reserve() {
            frames.put(used.pop().unwrap(), 1);
        }
        assert_eq!(frames.spare(), frames.reserve());
        assert_eq!(frames.take(1, Watermark::Normal), None);
    }

    /// Whatever came and went, in whatever order, with single frames in between.
    #[test]
    fn adjacent_frames_are_found_while_there_is_room() {
        for seed in 1..9 {
            let mut random = fastrand::Rng::with_seed(seed);
            let frames = Frames::new(4353, false).unwrap();
            frames.set_limit(4352);
            let mut used: Vec<(FrameId, u32)> = Vec::new();
            for step in 0..20_000 {
                let most = 1 << random.u32(..10);
                let count = random.u32(1..=most);
                while frames.open_spare() < count {
                    let (first, count) = used.swap_remove(random.usize(..used.len()));
                    frames.put(first, count);
                }
                let Some(first) = frames.take(count, Watermark::Normal) else {
                    panic!("seed {seed}, step {step}: {} free, but no {count}", frames.open_spare());
                };
                assert!(count > 1 || first.0 < frames.overflow_start, "a single frame in the annex");
                used.push((first, count));
                assert!(frames.resident().0 <= frames.limit());
            }
            let seen = frames.used();
            assert!(seen.overflow_high > seen.overflow_start + 1);
            let turn = core::iter::successors(Some(1), |frame| Some(seen.after(*frame)));
            let turn: Vec<u32> = turn.take(seen.count() as usize + 1).collect();
            assert_eq!(turn, seen.iter().chain([1]).collect::<Vec<_>>());
            assert!(used.iter().all(|(first, _)| turn.contains(&first.0)), "the hand comes by");
        }
    }

    #[test]
    fn neighbours_are_found_though_others_cost_memory() {
        let frames = Frames::new(201, false).unwrap();
        frames.set_limit(200);
        let singles: Vec<FrameId> = core::iter::from_fn(|| frames.take(1, Watermark::Normal)).collect();
        assert_eq!(singles.len(), 200 - 6);
        singles.iter().step_by(2).for_each(|frame| frames.put(*frame, 1));
        let first = frames.take(90, Watermark::Normal).unwrap();
        assert!(first.0 > frames.overflow_start);
        assert!(frames.resident().0 <= 200);
        // What is warm there is for single frames too, but elsewhere.
        frames.put(first, 90);
        let again: Vec<FrameId> = core::iter::from_fn(|| frames.take(1, Watermark::Normal)).collect();
        assert_eq!(again.len(), 96);
        assert!(again.iter().all(|frame| frame.0 < frames.overflow_start));
    }
}
