//! The driver of hints and batches: it begins what can begin now, and waits for nothing.

use super::{Departure, FetchTarget};
use crate::error::FarError;
use crate::heap::{EvictionUrgency, FetchFlight, HeapInner, InternalScope, Missed, ThreadState, count};
use core::sync::atomic::Ordering;
use farfield_core::heap::fault::FetchIntent;

/// Maximum number of flights of one thread that nobody waits for: until they land, they keep the
/// memory that they are read to.
pub(crate) const AHEAD_MAX: usize = 1024;

impl HeapInner {
    /// Starts to fetch units and objects without waiting. Returns how many are on their way now
    /// that were not.
    ///
    /// Gives no errors: an access that needs one asks again. For far values that live.
    pub(crate) fn prefetch(&self, record: &ThreadState, numbers: impl IntoIterator<Item = u32>) -> u32 {
        if self.frames.room() < self.reserve().low {
            // With our own hands, if the reclaimer is behind: a thread that misses would have to, a
            // little later.
            self.reclaimer.wake();
            let _ = self.evictor.try_run(self, self.reserve().low, EvictionUrgency::Background);
        }
        // The log pages to which objects come stay near until their flights keep them.
        let _inside = self.objects.is_some().then(|| InternalScope::new(self));
        let most = AHEAD_MAX.saturating_sub(record.in_flight.load(Ordering::Relaxed) as usize);
        let numbers = numbers.into_iter().take_while(|_| self.has_prefetch_room(1));
        let depart = |number| self.depart_now(record, number, FetchIntent::Prefetch);
        self.launch_ahead(record, numbers.filter_map(depart).take(most).collect())
    }

    /// Checks whether there is room for more prefetches.
    pub(crate) fn may_go_ahead(&self, record: &ThreadState) -> bool {
        self.has_prefetch_room(1) && (record.in_flight.load(Ordering::Relaxed) as usize) < AHEAD_MAX
    }

    /// Fetches what attempts have missed, as far as it is far and there is room now, and waits for
    /// it. Returns how many flights that were.
    pub(super) fn fetch_missed(&self, record: &ThreadState, missed: &[Missed]) -> Result<usize, FarError> {
        let depart = |(number, mode): &Missed| self.depart_now(record, *number, mode.fetch_intent());
        let flights: Vec<FetchFlight> = missed.iter().filter_map(depart).collect();
        let begun = flights.len();
        if begun > 0 {
            self.fetch_all(record, flights)?;
        }
        Ok(begun)
    }

    /// Takes the page or handle of this number for a flight, if it is far and there is room. The
    /// caller is inside a scope, if that is a handle.
    fn depart_now(&self, record: &ThreadState, number: u32, intent: FetchIntent) -> Option<FetchFlight> {
        let target = FetchTarget::ahead(self, number)?;
        let mut frame = None;
        loop {
            match target.depart(self, record, intent, false, frame).ok()? {
                Departure::NeedFrames => frame = Some(self.take_frames_now(target.frames(), intent)?),
                Departure::Flight(flight) => {
                    if intent == FetchIntent::Prefetch {
                        count(&record.counters.prefetches);
                    }
                    return Some(flight);
                }
                Departure::Lost => return None,
                Departure::NewUnit(_) => unreachable!("a far page is not made"),
            }
        }
    }
}
