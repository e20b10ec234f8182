//! Schedule of repairs: which place to look at next for something that a member lacks, and when to
//! rest.

use super::members::Membership;
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::process::now_ns;

/// Number of places that are looked at in one go.
const LOOK: u64 = 512;
/// Pause after a failure.
const REST: Duration = Duration::from_millis(100);

/// Schedule of the repairs of one lane.
pub(super) struct RepairSchedule {
    pass: Option<RepairPass>,
    /// Time before which nothing begins. It is the end of time while repairs are stopped.
    rests_until: u64,
}

/// Pass over all places, for one member. The member is repaired when the pass finds nothing.
struct RepairPass {
    member: usize,
    /// Missed generation of the member when the pass began.
    missed_generation: u32,
    next: u64,
    is_clean: bool,
}

/// What a pass has found at one place.
pub(super) enum RepairLook<T> {
    /// The member lacks nothing there.
    Whole,
    /// The member lacks something that cannot be repaired now.
    Busy,
    /// The caller has claimed a repair. The pass goes on from the place `next`.
    Claimed { repair: T, next: u64 },
}

impl RepairSchedule {
    pub(super) fn new() -> RepairSchedule {
        RepairSchedule { pass: None, rests_until: 0 }
    }

    /// Starts nothing more until [`RepairSchedule::go_on`]; repairs that are under way end.
    pub(super) fn stop(&mut self) {
        self.rests_until = u64::MAX;
    }

    pub(super) fn go_on(&mut self) {
        self.rests_until = 0;
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.rests_until == u64::MAX
    }

    /// Rests after a failure.
    pub(super) fn rest(&mut self) {
        self.rests_until = self.rests_until.max(now_ns().saturating_add(REST.as_nanos() as u64));
    }

    pub(super) fn is_resting(&self) -> bool {
        self.rests_until > 0 && now_ns() < self.rests_until
    }

    /// Looks at some places for one where a member of `to_repair` lacks something. `next_place`
    /// returns the first place from this one on at which there may be something; `look` looks at a
    /// place for this member.
    pub(super) fn find<T>(
        &mut self,
        membership: &Membership,
        to_repair: MemberSet,
        next_place: impl Fn(u64) -> Option<u64>,
        mut look: impl FnMut(u64, usize) -> RepairLook<T>,
    ) -> Option<T> {
        let first = to_repair.iter().next()?;
        let pass = self.pass.get_or_insert_with(|| RepairPass {
            member: first,
            missed_generation: membership.missed_generation(first),
            next: 0,
            is_clean: true,
        });
        let member = pass.member;
        for _ in 0..LOOK {
            let Some(place) = next_place(pass.next).filter(|_| to_repair.has(member)) else {
                if pass.is_clean && to_repair.has(member) {
                    membership.set_repaired(member, pass.missed_generation);
                }
                self.pass = None;
                return None;
            };
            pass.next = place + 1;
            match look(place, member) {
                RepairLook::Whole => {}
                RepairLook::Busy => pass.is_clean = false,
                RepairLook::Claimed { repair, next } => {
                    (pass.is_clean, pass.next) = (false, next);
                    return Some(repair);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a member that counts as repaired while it lacks something.
    use super::*;
    use crate::redundant::members::PoolMember;
    use crate::trial::SilentMember;
    use core::cell::{Cell, RefCell};
    use std::collections::BTreeSet;

    #[test]
    fn a_member_is_repaired_only_after_a_pass_that_finds_nothing() {
        let member = || PoolMember { backend: Some(SilentMember::new(64)), leaves: 1, server: 0 };
        let membership = Membership::new(vec![member(), member()], vec![].into(), 1, false, MemberSet::MAX);
        membership.note_missed(1);
        let (lacks, is_busy) = (RefCell::new(BTreeSet::from([700, 701, 702, 1500])), Cell::new(true));
        let look = |place: u64, _| {
            if !lacks.borrow().contains(&place) {
                return RepairLook::Whole;
            }
            if place == 1500 && is_busy.take() {
                return RepairLook::Busy;
            }
            // A neighbour is repaired with the first.
            let next = if place == 700 { 702 } else { place + 1 };
            (place..next).for_each(|place| _ = lacks.borrow_mut().remove(&place));
            RepairLook::Claimed { repair: place, next }
        };
        let (mut schedule, mut found) = (RepairSchedule::new(), Vec::new());
        for _ in 0..100 {
            let to_repair = membership.repairable();
            found.extend(schedule.find(&membership, to_repair, |from| (from < 2000).then_some(from), look));
            if found == [700] && !lacks.borrow().contains(&3) {
                // The pass has gone by there already.
                lacks.borrow_mut().insert(3);
                membership.note_missed(1);
            }
            assert!(!membership.is_whole(1) || lacks.borrow().is_empty());
        }
        assert_eq!(found, [700, 702, 3, 1500]);
        assert!(membership.is_whole(1));
    }
}
