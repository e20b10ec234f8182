//! Lanes to the members (mirror, ec) that a composed lane works through, and how it waits for them.

use crate::polling::Polling;
use crate::redundant::members::MemberLane;
use crate::redundant::rejoin::LaneMailbox;
use crate::{Completion, Lane};
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use farfield_core::MemberSet;
use farfield_os::process::now_ns;
use std::sync::Arc;

/// Time that a waiting lane sleeps at one member before it looks at the others.
pub(crate) const SLEEP_SLICE: Duration = Duration::from_micros(200);

/// Lanes to the members that this lane is connected to.
pub(crate) struct MemberLanes {
    lanes: Vec<Option<MemberLane>>,
    /// Mailbox for lanes to members that joined later.
    mailbox: Option<Arc<LaneMailbox>>,
    /// Index of the member at which it slept last.
    last: usize,
    /// Whether a wait polls all members before it sleeps at one.
    pub(crate) polling: Polling,
}

impl Deref for MemberLanes {
    type Target = [Option<MemberLane>];
    fn deref(&self) -> &[Option<MemberLane>] {
        &self.lanes
    }
}

impl DerefMut for MemberLanes {
    fn deref_mut(&mut self) -> &mut [Option<MemberLane>] {
        &mut self.lanes
    }
}

impl MemberLanes {
    pub(crate) fn new(lanes: Vec<Option<MemberLane>>) -> MemberLanes {
        MemberLanes { lanes, mailbox: None, last: 0, polling: Polling::default() }
    }

    /// Takes lanes together with a mailbox that was made before they were opened.
    pub(crate) fn with_mailbox(lanes: Vec<Option<MemberLane>>, mailbox: Option<Arc<LaneMailbox>>) -> MemberLanes {
        let known = MemberLanes { lanes, mailbox, last: 0, polling: Polling::default() };
        if let Some(mailbox) = &known.mailbox {
            mailbox.begin(known.open(MemberSet::first(known.lanes.len())));
        }
        known
    }

    /// Gives up the lanes to these members. Must be called while no operation of the composed lane
    /// is in flight.
    pub(crate) fn leave(&mut self, members: MemberSet) {
        let open = self.open(members);
        if let Some(mailbox) = self.mailbox.as_ref().filter(|_| !open.is_empty()) {
            mailbox.leave(open, &mut self.lanes);
        }
    }

    /// Returns those of these members to which there is a lane.
    pub(crate) fn open(&self, members: MemberSet) -> MemberSet {
        let is_open = |member: &usize| self.lanes[*member].is_some();
        members.iter().filter(is_open).collect()
    }

    /// Checks whether the mailbox holds a lane that has not been taken yet. If so, an operation
    /// that found too few members may find enough the next time.
    pub(crate) fn has_new_lanes(&self) -> bool {
        self.mailbox.as_ref().is_some_and(|mailbox| mailbox.is_full())
    }

    /// Checks whether there is, or will be, a lane to one of these members that is not in the set
    /// `knew`.
    pub(crate) fn has_news(&self, members: MemberSet, knew: MemberSet) -> bool {
        self.has_new_lanes() || !self.open(members).difference(knew).is_empty()
    }

    /// Takes new lanes from the mailbox, then submits the requests that wait for room at their
    /// member, as far as there is some.
    pub(crate) fn submit_waiting(&mut self) {
        if let Some(mailbox) = &self.mailbox {
            mailbox.take(&mut self.lanes);
        }
        self.lanes.iter_mut().flatten().for_each(MemberLane::submit_waiting);
    }

    /// Returns those of `members` that a write can go to now, because they have a free buffer for
    /// it. The result is all of them; or a set that is `enough`, if the others have given no buffer
    /// back for longer than `timeout`. `None`: the write must wait.
    pub(crate) fn takers(
        &mut self,
        members: MemberSet,
        now: u64,
        timeout: Option<Duration>,
        has_buffer: impl Fn(&MemberLane) -> bool,
        enough: impl Fn(MemberSet) -> bool,
    ) -> Option<MemberSet> {
        let mut takers = members;
        for member in members.iter() {
            let Some(lane) = self.lanes[member].as_mut().filter(|lane| !has_buffer(lane)) else { continue };
            if !lane.is_stuck(now, timeout) {
                return None;
            }
            takers = takers.difference(MemberSet::one(member));
        }
        enough(takers).then_some(takers)
    }

    /// Takes the completions that have arrived from a member; returns whether there were any.
    pub(crate) fn poll(&mut self, member: usize, arrived: &mut Vec<Completion>) -> bool {
        let Some(known) = self.lanes[member].as_mut().filter(|known| known.lane.in_flight() > 0) else { return false };
        known.lane.poll(arrived);
        !arrived.is_empty()
    }

    /// Sleeps at one busy member, another at each call, so that a silent member delays the others
    /// by one slice at most.
    pub(crate) fn sleep(&mut self, most: Duration) {
        for _ in 0..self.lanes.len() {
            self.last = (self.last + 1) % self.lanes.len();
            if let Some(member) = &mut self.lanes[self.last]
                && member.lane.in_flight() > 0
            {
                return member.lane.wait(most.min(SLEEP_SLICE));
            }
        }
    }
}

/// Lane that works through members.
pub(crate) trait CompositeLane: Lane {
    fn member_lanes(&mut self) -> &mut MemberLanes;
    /// Advances its operations as far as possible without blocking.
    fn work(&mut self);
    /// Checks whether there is a completion for the caller.
    fn has_ended(&self) -> bool;
    /// Returns the time in ns at which there is something to do even if no member answers.
    fn alarm_at(&self) -> u64;

    /// Implements [`Lane::wait`].
    fn wait_for_members(&mut self, timeout: Duration) {
        let start = now_ns();
        let limit = start.saturating_add(timeout.as_nanos() as u64);
        loop {
            self.work();
            if self.has_ended() || self.in_flight() == 0 {
                self.member_lanes().polling.renew();
                return;
            }
            let now = now_ns();
            if now >= limit {
                return;
            }
            if self.member_lanes().polling.goes_on(start, now) {
                continue;
            }
            let until = limit.min(self.alarm_at());
            self.member_lanes().sleep(Duration::from_nanos(until.saturating_sub(now)));
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a member that answers nothing any more, and has all its buffers, holds up writes
    //! that the others could take.
    use super::*;
    use crate::PoolBuilder;
    use crate::redundant::members::WRITE_TIMEOUT;

    #[test]
    fn a_leg_that_gives_no_buffer_back_is_left_out_after_a_while_if_the_others_are_enough() {
        let backend = PoolBuilder::new().url("ram:").pages(64).open().unwrap();
        let lane = || Some(MemberLane::new(backend.open_lane().unwrap(), 4));
        let mut lanes = MemberLanes::new((0..3).map(|_| lane()).collect());
        let all = MemberSet::first(3);
        let takers = |lanes: &mut MemberLanes, now: u64, least: usize| {
            lanes.takers(
                all,
                now,
                Some(WRITE_TIMEOUT),
                |member| member.has_buffer(2),
                |members| members.count() >= least,
            )
        };
        assert_eq!(takers(&mut lanes, 5, 3), Some(all));
        let mut taken = Vec::new();
        while let Some(buffer) = lanes[1].as_mut().unwrap().take_buffer(2) {
            taken.push(buffer);
        }
        let late = 5 + WRITE_TIMEOUT.as_nanos() as u64 + 1;
        assert_eq!(takers(&mut lanes, 5, 2), None, "it may be about to answer");
        assert_eq!(takers(&mut lanes, late, 2), Some(all.difference(MemberSet::one(1))));
        assert_eq!(takers(&mut lanes, late, 3), None, "nothing goes without it");
        lanes[1].as_mut().unwrap().give_buffer(taken.pop().unwrap());
        assert_eq!(takers(&mut lanes, late, 3), Some(all), "it has answered");
        taken.push(lanes[1].as_mut().unwrap().take_buffer(2).unwrap());
        assert_eq!(takers(&mut lanes, late, 2), None, "and has as long again");
    }
}
