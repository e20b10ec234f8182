//! What a lane that works through legs (mirror, ec) has of them, and how it waits.

use crate::legs::LegLane;
use crate::rejoin::Door;
use crate::{Completion, Lane};
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use farfield_core::Legs;
use farfield_os::process::now_ns;
use std::sync::Arc;

/// How long a waiting lane polls all legs before it sleeps at one, after which time it offers the core to others between two looks, and how long it sleeps
/// at one before it looks at the others.
const SPIN: Duration = Duration::from_micros(50);
const YIELD_AFTER: Duration = Duration::from_micros(12);
pub(crate) const SLEEP_SLICE: Duration = Duration::from_micros(200);

/// A lane to each leg that there is a way to.
pub(crate) struct LegLanes {
    lanes: Vec<Option<LegLane>>,
    /// Where ways to legs come that came later.
    door: Option<Arc<Door>>,
    /// Where it slept last.
    last: usize,
}

impl Deref for LegLanes {
    type Target = [Option<LegLane>];
    fn deref(&self) -> &[Option<LegLane>] {
        &self.lanes
    }
}

impl DerefMut for LegLanes {
    fn deref_mut(&mut self) -> &mut [Option<LegLane>] {
        &mut self.lanes
    }
}

impl LegLanes {
    pub(crate) fn new(lanes: Vec<Option<LegLane>>) -> LegLanes {
        LegLanes { lanes, door: None, last: 0 }
    }

    /// With a door that is older than they are.
    pub(crate) fn behind(lanes: Vec<Option<LegLane>>, door: Option<Arc<Door>>) -> LegLanes {
        let known = LegLanes { lanes, door, last: 0 };
        if let Some(door) = &known.door {
            door.begin(known.open(Legs::first(known.lanes.len())));
        }
        known
    }

    /// Gives up its ways to these legs; called when nothing of the lane is under way.
    pub(crate) fn leave(&mut self, legs: Legs) {
        let open = self.open(legs);
        if let Some(door) = self.door.as_ref().filter(|_| !open.is_empty()) {
            door.leave(open, &mut self.lanes);
        }
    }

    /// Those of these legs that there is a way to.
    pub(crate) fn open(&self, legs: Legs) -> Legs {
        let is_open = |leg: &usize| self.lanes[*leg].is_some();
        legs.iter().filter(is_open).collect()
    }

    /// Is there a way to a leg that it has not taken yet? Then too few may be enough the next time.
    pub(crate) fn is_behind_the_news(&self) -> bool {
        self.door.as_ref().is_some_and(|door| door.is_full())
    }

    /// Is there, or will there be, a way to one of these legs that was not there when a way led to those that it `knew`?
    pub(crate) fn has_news(&self, legs: Legs, knew: Legs) -> bool {
        self.is_behind_the_news() || !self.open(legs).but(knew).is_empty()
    }

    /// What waits for room at its leg, as far as there is some by now.
    pub(crate) fn submit_waiting(&mut self) {
        if let Some(door) = &self.door {
            door.take(&mut self.lanes);
        }
        self.lanes.iter_mut().flatten().for_each(LegLane::submit_waiting);
    }

    /// Those of these legs that a write can go to now, by who has a buffer for it. All of them; or `enough` of them, if the others have given none back for
    /// longer than this `patience`, because what they were asked is not answered. `None`: not now.
    pub(crate) fn takers(
        &mut self,
        legs: Legs,
        now: u64,
        patience: Option<Duration>,
        has_buffer: impl Fn(&LegLane) -> bool,
        enough: impl Fn(Legs) -> bool,
    ) -> Option<Legs> {
        let mut takers = legs;
        for leg in legs.iter() {
            let Some(lane) = self.lanes[leg].as_mut().filter(|lane| !has_buffer(lane)) else { continue };
            if !lane.is_stuck(now, patience) {
                return None;
            }
            takers = takers.but(Legs::one(leg));
        }
        enough(takers).then_some(takers)
    }

    /// Takes what has arrived from a leg; was there anything?
    pub(crate) fn poll(&mut self, leg: usize, arrived: &mut Vec<Completion>) -> bool {
        let Some(known) = self.lanes[leg].as_mut().filter(|known| known.lane.in_flight() > 0) else { return false };
        known.lane.poll(arrived);
        !arrived.is_empty()
    }

    /// Sleeps at each busy leg in turn, so that a silent one delays the others by a slice at most.
    pub(crate) fn sleep(&mut self, most: Duration) {
        for _ in 0..self.lanes.len() {
            self.last = (self.last + 1) % self.lanes.len();
            if let Some(leg) = &mut self.lanes[self.last]
                && leg.lane.in_flight() > 0
            {
                return leg.lane.wait(most.min(SLEEP_SLICE));
            }
        }
    }
}

/// A lane that works through legs.
pub(crate) trait Legged: Lane {
    fn legs(&mut self) -> &mut LegLanes;
    /// Does what can be done now.
    fn work(&mut self);
    /// Is there something for the caller?
    fn has_ended(&self) -> bool;
    /// When there is something to do even if no leg answers.
    fn alarm_at(&self) -> u64;

    /// As [`Lane::wait`].
    fn wait_for_legs(&mut self, timeout: Duration) {
        let start = now_ns();
        let limit = start.saturating_add(timeout.as_nanos() as u64);
        let spin_until = limit.min(start + SPIN.as_nanos() as u64);
        loop {
            self.work();
            let now = now_ns();
            if self.has_ended() || self.in_flight() == 0 || now >= limit {
                return;
            }
            if now < spin_until {
                // Longer than a round trip takes: perhaps one of the servers waits for this very core.
                if now - start > YIELD_AFTER.as_nanos() as u64 {
                    farfield_os::process::yield_now();
                }
                continue;
            }
            let until = limit.min(self.alarm_at());
            self.legs().sleep(Duration::from_nanos(until.saturating_sub(now)));
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a leg that answers nothing any more, and has all its buffers, holds up writes that the others could take.
    use super::*;
    use crate::Opener;
    use crate::legs::WRITE_PATIENCE;

    #[test]
    fn a_leg_that_gives_no_buffer_back_is_left_out_after_a_while_if_the_others_are_enough() {
        let backend = Opener::new().url("ram:").pages(64).open().unwrap();
        let lane = || Some(LegLane::new(backend.open_lane().unwrap(), 4));
        let mut lanes = LegLanes::new((0..3).map(|_| lane()).collect());
        let all = Legs::first(3);
        let takers = |lanes: &mut LegLanes, now: u64, least: usize| {
            lanes.takers(all, now, Some(WRITE_PATIENCE), |leg| leg.has_buffer(2), |legs| legs.count() >= least)
        };
        assert_eq!(takers(&mut lanes, 5, 3), Some(all));
        let mut taken = Vec::new();
        while let Some(buffer) = lanes[1].as_mut().unwrap().take_buffer(2) {
            taken.push(buffer);
        }
        let late = 5 + WRITE_PATIENCE.as_nanos() as u64 + 1;
        assert_eq!(takers(&mut lanes, 5, 2), None, "it may be about to answer");
        assert_eq!(takers(&mut lanes, late, 2), Some(all.but(Legs::one(1))));
        assert_eq!(takers(&mut lanes, late, 3), None, "nothing goes without it");
        lanes[1].as_mut().unwrap().give_buffer(taken.pop().unwrap());
        assert_eq!(takers(&mut lanes, late, 3), Some(all), "it has answered");
        taken.push(lanes[1].as_mut().unwrap().take_buffer(2).unwrap());
        assert_eq!(takers(&mut lanes, late, 2), None, "and has as long again");
    }
}
