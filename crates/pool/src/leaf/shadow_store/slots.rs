//! Places for pages on a medium: which are free, and which have room on the medium.
//!
//! A writer *claims* a number of places first and then takes them, so a full medium is found before
//! anything is written. Places get room on the medium in steps, ahead of need. Places that are
//! given back are used again; when many are free, groups of 64 free places lose their room again.
//! Everything is a number that changes atomically: no lane waits for another.

use super::medium::Medium;
use crate::bit_runs::{mask, run_of};
use crate::table::AtomicTable;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::geometry::PAGE_BYTES;
use farfield_os::Errno;

/// Number of places that get and lose their room together, which is the number of bits of a word.
const GROUP: u64 = u64::BITS as u64;
/// Number of groups that are searched for a whole run before a shorter one will do.
const LOOKS: u64 = 64;
/// Number of groups that get room at a time, if the medium has it: 16 MiB.
const STEP_GROUPS: u64 = 64;
/// Number of free places that keep their room; one more does for each eight in use.
const KEPT: u64 = 4096;
const GROUP_BYTES: u64 = GROUP * PAGE_BYTES as u64;

/// Reason for which there are no places.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoSpace {
    /// The medium has no room.
    Full,
    /// The places for new versions are all in use at the moment, or other places are just being
    /// given room. Another try may succeed.
    Busy,
    /// The system refused for another reason.
    Os(Errno),
}

/// Places on a medium, and which of them are free.
pub(crate) struct Slots {
    /// Bit for each place, set if it is free and has room.
    free: AtomicTable<AtomicU64>,
    /// Bit for each group, set if it was given room once and has none now.
    holes: AtomicTable<AtomicU64>,
    /// Number of bits of `free` that are set, less the places that are claimed.
    ready: AtomicU64,
    /// Number of groups that were given room at least once.
    grown: AtomicU64,
    /// Number of places with room.
    roomy: AtomicU64,
    groups: u64,
}

impl Slots {
    /// Creates places for `count` pages, rounded up to whole groups. The first `begun` of them have
    /// room and are not free.
    pub(crate) fn new(count: u64, begun: u64) -> Result<Slots, Errno> {
        let (groups, grown) = (count.max(begun).div_ceil(GROUP), begun.div_ceil(GROUP));
        Ok(Slots {
            free: AtomicTable::new(groups)?,
            holes: AtomicTable::new(groups.div_ceil(GROUP))?,
            ready: AtomicU64::new(0),
            grown: AtomicU64::new(grown),
            roomy: AtomicU64::new(begun),
            groups,
        })
    }

    /// Claims `count` places, and gives more places room if need be.
    pub(crate) fn claim(&self, medium: &Medium, count: u64) -> Result<(), NoSpace> {
        loop {
            let less = |ready: u64| ready.checked_sub(count);
            if self.ready.fetch_update(Ordering::Acquire, Ordering::Relaxed, less).is_ok() {
                return Ok(());
            }
            self.grow(medium)?;
        }
    }

    /// Gives claimed places back that were not taken.
    pub(crate) fn unclaim(&self, count: u64) {
        self.ready.fetch_add(count, Ordering::Release);
    }

    /// Takes up to `wanted` neighbouring places of those that the caller has claimed; returns the
    /// first and their number. It takes all `wanted` if there is such a run nearby, else the first
    /// run that it finds. `at` is where the caller's last places were.
    pub(crate) fn take(&self, at: &mut u64, wanted: u64) -> (u64, u64) {
        let mut looks = 0;
        loop {
            let grown = self.grown.load(Ordering::Acquire);
            let group = *at % grown;
            let word = self.free.at(group);
            let run = run_of(word.load(Ordering::Relaxed), wanted);
            looks += 1;
            let Some((shift, count)) = run.filter(|(_, count)| *count == wanted || looks > LOOKS) else {
                *at = group + 1;
                continue;
            };
            let mask = mask(shift, count);
            let before = word.fetch_and(!mask, Ordering::AcqRel);
            if before & mask == mask {
                *at = group;
                return (group * GROUP + shift, count);
            }
            // Another lane was faster with some of these places.
            word.fetch_or(before & mask, Ordering::Release);
        }
    }

    /// Gives places back; their content is of no use any more.
    pub(crate) fn give(&self, first: u64, count: u64) {
        let (mut at, end) = (first, first + count);
        while at < end {
            let here = (end - at).min(GROUP - at % GROUP);
            self.free.at(at / GROUP).fetch_or(mask(at % GROUP, here), Ordering::Release);
            at += here;
        }
        self.ready.fetch_add(count, Ordering::Release);
    }

    /// Takes room from groups of these places that are all free, if more room is kept than is good.
    pub(crate) fn trim(&self, medium: &Medium, first: u64, count: u64) {
        for group in first / GROUP..(first + count).div_ceil(GROUP) {
            let (ready, roomy) = (self.ready.load(Ordering::Relaxed), self.roomy.load(Ordering::Relaxed));
            if ready <= KEPT + roomy.saturating_sub(ready) / 8 {
                return;
            }
            if self.free.at(group).load(Ordering::Relaxed) == u64::MAX {
                self.drop_room(medium, group);
            }
        }
    }

    fn drop_room(&self, medium: &Medium, group: u64) {
        let less = |ready: u64| ready.checked_sub(GROUP);
        if self.ready.fetch_update(Ordering::Acquire, Ordering::Relaxed, less).is_err() {
            return;
        }
        let word = self.free.at(group);
        let is_ours = word.compare_exchange(u64::MAX, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !is_ours {
            return self.unclaim(GROUP);
        }
        if !medium.take_room(group * GROUP_BYTES, GROUP_BYTES) {
            // The room of the group stays, and so do its places.
            word.store(u64::MAX, Ordering::Release);
            return self.unclaim(GROUP);
        }
        self.roomy.fetch_sub(GROUP, Ordering::Relaxed);
        self.holes.at(group / GROUP).fetch_or(1 << (group % GROUP), Ordering::Release);
    }

    /// Gives more places room.
    fn grow(&self, medium: &Medium) -> Result<(), NoSpace> {
        if let Some(group) = self.take_hole() {
            return self.fill(medium, group, 1).inspect_err(|_| {
                self.holes.at(group / GROUP).fetch_or(1 << (group % GROUP), Ordering::Release);
            });
        }
        let more = |grown: u64| (grown < self.groups).then(|| (grown + STEP_GROUPS).min(self.groups));
        let Ok(first) = self.grown.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more) else {
            return Err(NoSpace::Busy);
        };
        let count = STEP_GROUPS.min(self.groups - first);
        if self.fill(medium, first, count).is_ok() {
            return Ok(());
        }
        // The medium has not so much. Each group gets what little there is; the rest is tried again
        // when it is needed.
        let mut result = Ok(());
        for group in first..first + count {
            if result.is_ok() {
                result = self.fill(medium, group, 1);
            }
            if result.is_err() {
                self.holes.at(group / GROUP).fetch_or(1 << (group % GROUP), Ordering::Release);
            }
        }
        if self.ready.load(Ordering::Relaxed) > 0 { Ok(()) } else { result }
    }

    fn take_hole(&self) -> Option<u64> {
        let grown = self.grown.load(Ordering::Relaxed);
        for index in 0..grown.div_ceil(GROUP) {
            let word = self.holes.at(index);
            let bits = word.load(Ordering::Relaxed);
            let lowest = bits & bits.wrapping_neg();
            if lowest != 0 && word.fetch_and(!lowest, Ordering::AcqRel) & lowest != 0 {
                return Some(index * GROUP + u64::from(lowest.trailing_zeros()));
            }
        }
        None
    }

    fn fill(&self, medium: &Medium, first: u64, count: u64) -> Result<(), NoSpace> {
        match medium.give_room(first * GROUP_BYTES, count * GROUP_BYTES) {
            Ok(()) => {}
            Err(Errno(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOMEM)) => return Err(NoSpace::Full),
            Err(errno) => return Err(NoSpace::Os(errno)),
        }
        for group in first..first + count {
            self.free.at(group).store(u64::MAX, Ordering::Release);
        }
        self.roomy.fetch_add(count * GROUP, Ordering::Relaxed);
        self.ready.fetch_add(count * GROUP, Ordering::Release);
        Ok(())
    }

    /// Returns the first of the places that never had room, which all lie behind it.
    pub(crate) fn end(&self) -> u64 {
        self.grown.load(Ordering::Acquire) * GROUP
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two pages in one place, places that get lost, and room that is not given back.
    use super::*;
    use farfield_os::{disk, file, memfd};
    use std::collections::BTreeSet;
    use std::ffi::CString;
    use std::os::fd::BorrowedFd;

    fn new_file() -> Medium {
        let folder = CString::new(std::env::temp_dir().into_os_string().into_encoded_bytes()).unwrap();
        Medium::file(disk::create_unnamed(&folder).unwrap())
    }

    fn used_bytes(medium: &Medium) -> u64 {
        // SAFETY: open as long as the test runs.
        memfd::usage(unsafe { BorrowedFd::borrow_raw(medium.file) }).unwrap().used_bytes
    }

    #[test]
    fn places_are_given_once_and_again_when_they_are_back() {
        let medium = &new_file();
        let slots = Slots::new(200, 0).unwrap();
        let (mut at, mut taken) = (0, BTreeSet::new());
        for round in 0..3 {
            // 200 places are four groups.
            for _ in 0..256 / 8 {
                slots.claim(medium, 8).unwrap();
                let mut left = 8;
                while left > 0 {
                    let (first, count) = slots.take(&mut at, left);
                    (first..first + count).for_each(|place| assert!(taken.insert(place), "{place} in round {round}"));
                    left -= count;
                }
            }
            assert_eq!(slots.claim(medium, 1), Err(NoSpace::Busy));
            assert_eq!(taken.len(), 256);
            // Back in another order.
            taken.iter().filter(|place| *place % 3 == 0).for_each(|place| slots.give(*place, 1));
            taken.iter().filter(|place| *place % 3 != 0).for_each(|place| slots.give(*place, 1));
            taken.clear();
        }
    }

    #[test]
    fn room_that_many_gave_back_goes_back_to_the_medium_and_comes_again() {
        let medium = &new_file();
        let slots = Slots::new(5 * KEPT, 0).unwrap();
        let mut at = 0;
        for round in 0..2 {
            let mut taken = Vec::new();
            slots.claim(medium, 4 * KEPT).unwrap();
            let mut left = 4 * KEPT;
            while left > 0 {
                let (first, count) = slots.take(&mut at, left.min(GROUP));
                taken.push((first, count));
                left -= count;
            }
            let full = used_bytes(medium);
            assert!(full >= 4 * KEPT * PAGE_BYTES as u64, "{full} in round {round}");
            for &(first, count) in &taken {
                slots.give(first, count);
                slots.trim(medium, first, count);
            }
            let kept = used_bytes(medium);
            assert!(kept < 2 * KEPT * PAGE_BYTES as u64, "{kept} of {full} in round {round}");
        }
        assert!(file::size(medium.file).unwrap() <= 5 * KEPT * PAGE_BYTES as u64);
    }

    #[test]
    fn threads_never_share_a_place() {
        let medium = &new_file();
        let slots = Slots::new(512, 0).unwrap();
        let owners: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for me in 1..=3u64 {
                let (slots, owners) = (&slots, &owners);
                scope.spawn(move || {
                    let mut at = me * 2;
                    for _ in 0..20_000 {
                        // While another thread gives places room there may be none.
                        while let Err(why) = slots.claim(medium, 5) {
                            assert_eq!(why, NoSpace::Busy);
                            std::thread::yield_now();
                        }
                        let mut left = 5;
                        let mut taken = [(0, 0); 5];
                        for slot in &mut taken {
                            *slot = if left > 0 { slots.take(&mut at, left) } else { (0, 0) };
                            left -= slot.1;
                        }
                        for (first, count) in taken {
                            for place in first..first + count {
                                assert_eq!(owners[place as usize].swap(me, Ordering::Relaxed), 0);
                            }
                        }
                        for (first, count) in taken.into_iter().filter(|(_, count)| *count > 0) {
                            (first..first + count).for_each(|place| owners[place as usize].store(0, Ordering::Relaxed));
                            slots.give(first, count);
                        }
                    }
                });
            }
        });
        slots.claim(medium, 512).unwrap();
    }
}
