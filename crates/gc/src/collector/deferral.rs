//! How long a cycle waits for the program to bring pages near, before it reads them itself.
//!
//! MemLiner (section 4.3) defers an object whose page is far up to four times, and less often the
//! fuller the heap is. A deferral that is counted in turns of a queue may be over in microseconds, or
//! never. Here time decides: a cycle waits no longer than it has worked, so it takes twice as long at
//! most, whatever the program does; after a wait for nothing it works as long as it has until then; and
//! it does not wait while the room is running out.

use core::time::Duration;

/// Time after which the collector looks which pages have come near. To look costs some 10 ns for each
/// page with waiters.
const ROUND: Duration = Duration::from_millis(10);

/// Waits of one cycle.
pub(super) struct Deferral {
    /// Pages that the limit left when the cycle began.
    room: u64,
    waited: Duration,
    /// Work before which there is no other wait.
    not_before: Duration,
}

impl Deferral {
    /// Creates a record of no waits for a cycle that begins with so much room, in pages.
    pub(super) fn new(room: u64) -> Deferral {
        Deferral { room, waited: Duration::ZERO, not_before: ROUND }
    }

    /// Returns how long the cycle waits now, `elapsed` after its beginning, if the limit leaves so
    /// much room; `None` if it does not wait.
    pub(super) fn next(&self, elapsed: Duration, room: u64) -> Option<Duration> {
        let worked = elapsed.saturating_sub(self.waited);
        let is_time = worked >= self.not_before && worked >= self.waited + ROUND;
        (is_time && 2 * room > self.room).then_some(ROUND)
    }

    /// Adds a wait that took so long and has ended `elapsed` after the beginning of the cycle.
    pub(super) fn add(&mut self, time: Duration, elapsed: Duration, is_in_vain: bool) {
        self.waited += time;
        if is_in_vain {
            self.not_before = 2 * elapsed.saturating_sub(self.waited);
        }
    }

    /// Returns how long the cycle has waited.
    pub(super) fn waited(&self) -> Duration {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    //! Guards against cycles that do not end, and against waits while the heap fills up.
    use super::*;

    #[test]
    fn a_cycle_waits_no_longer_than_it_works() {
        let mut deferral = Deferral::new(100);
        let (mut elapsed, mut worked) = (Duration::ZERO, Duration::ZERO);
        let mut rounds = 0;
        for step in 0..10_000u64 {
            let work = Duration::from_micros(step * 7919 % 3000);
            elapsed += work;
            worked += work;
            while let Some(wait) = deferral.next(elapsed, 100) {
                // A wait may take longer than it was asked for.
                let wait = wait + Duration::from_micros(step % 40);
                elapsed += wait;
                deferral.add(wait, elapsed, false);
                rounds += 1;
            }
            assert!(deferral.waited() <= worked + Duration::from_micros(40), "{step}");
            assert!(deferral.waited() + 2 * ROUND > worked, "{step}");
        }
        assert!(rounds > 1000 && elapsed == worked + deferral.waited());
    }

    #[test]
    fn a_cycle_waits_for_an_idle_program_a_few_times() {
        let mut deferral = Deferral::new(100);
        let (mut elapsed, mut rounds) = (Duration::ZERO, 0);
        for _ in 0..10_000 {
            elapsed += Duration::from_millis(1);
            if let Some(wait) = deferral.next(elapsed, 100) {
                elapsed += wait;
                deferral.add(wait, elapsed, true);
                rounds += 1;
            }
        }
        // After 10, 20, 40 ms and so on of 10 s.
        assert_eq!(rounds, 10);
    }

    #[test]
    fn nobody_waits_while_the_room_runs_out() {
        let deferral = Deferral::new(100);
        let long = Duration::from_secs(1);
        assert_eq!(deferral.next(long, 51), Some(ROUND));
        assert_eq!(deferral.next(long, 50), None);
        assert_eq!(Deferral::new(0).next(long, 0), None);
    }
}
