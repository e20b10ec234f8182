//! The collector: a thread that runs one cycle after the other, when somebody asks for one.
//!
//! A *cycle* marks what the roots led to at its first stop (the *snapshot*), beside the mutators,
//! and frees at its second stop what is not marked. Nothing that mutators can see changes before
//! the second stop, so a cycle that fails, or is given up, has changed nothing.

mod deferral;
mod evacuation;
mod far_pages;
mod marking;
mod pace;
mod requests;
mod servers;
mod steps;
mod tracer;

pub(crate) use evacuation::MovedObjects;
pub(crate) use marking::Marking;
pub(crate) use requests::{CycleMode, CycleRequests};
pub use steps::CycleStep;
pub(crate) use steps::StepHook;
pub(crate) use tracer::LiveHeap;

use crate::error::GcError;
use crate::heap::{BrokenRule, FarTracing, GcInner};
use crate::pages::UnitPurpose;
use crate::stops::WorldStop;
use core::time::Duration;
use evacuation::Evacuation;
use farfield::space::SpaceScope;
use farfield::{BuildError, FarError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;
use tracer::{Drained, Mutators, Tracer};

/// Longest time that mutators wait while what they have logged last is traced.
const REST_TIME: Duration = Duration::from_millis(2);

/// Number of times that mutators go on because more was left than fits into [`REST_TIME`].
const REST_ATTEMPTS: u32 = 8;

/// The thread of a heap that collects. It waits for requests, and ends when this is dropped.
pub(crate) struct Collector {
    heap: Arc<GcInner>,
    thread: Option<JoinHandle<()>>,
}

impl Collector {
    /// Starts the thread of a heap.
    pub(crate) fn start(heap: &Arc<GcInner>) -> Result<Collector, BuildError> {
        let of_thread = Arc::clone(heap);
        let body = move || {
            of_thread.cycles.set_collector();
            while let Some(mode) = of_thread.cycles.next() {
                of_thread.cycles.end(of_thread.run_cycle(mode));
            }
        };
        let thread = std::thread::Builder::new().name("farfield-collect".to_owned()).spawn(body);
        let thread = thread.map_err(|why| BuildError::Os { what: "a thread that collects", why: why.to_string() })?;
        Ok(Collector { heap: Arc::clone(heap), thread: Some(thread) })
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.heap.cycles.close();
        // A waker that drops the heap on the collector's own thread must not wait for it.
        if let Some(thread) = self.thread.take().filter(|it| it.thread().id() != std::thread::current().id()) {
            // No cycle panics.
            let _ = thread.join();
        }
    }
}

impl GcInner {
    /// Runs a cycle, and decides when the next one is due.
    fn run_cycle(&self, mode: CycleMode) -> Result<(), GcError> {
        let _alone = self.begin_cycle();
        let (begun, used_before) = (Instant::now(), self.pages.used());
        // A waker of the program may run while the collector waits for the pool.
        let run = AssertUnwindSafe(|| Cycle::run(self, mode));
        let outcome = catch_unwind(run).unwrap_or(Err(GcError::Panicked));
        let (used, limit) = (self.pages.used(), self.pages.limit());
        match outcome {
            Ok(Some(used_at_end)) => {
                self.counters.count_time(begun.elapsed());
                self.pacing.plan(mode, used_at_end.saturating_sub(used_before), used, limit);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => {
                self.counters.count_given_up();
                self.pacing.retry_later(used, limit);
                Err(error)
            }
        }
    }
}

/// Times that the collector renews its scope because it holds too much near.
const RENEWALS: u32 = 8;

/// Calls `action`, which changes nothing if it fails, again if there was no frame while the scope was
/// open: others may need near memory, too.
fn retry<'a, R>(
    scope: &mut SpaceScope<'a>,
    mut action: impl FnMut(&SpaceScope<'a>) -> Result<R, GcError>,
) -> Result<R, GcError> {
    for _ in 0..RENEWALS {
        match action(scope) {
            Err(GcError::Far(FarError::NearFull)) => scope.renew(),
            result => return result,
        }
    }
    action(scope)
}

/// Cycle under way.
struct Cycle<'a> {
    heap: &'a GcInner,
    marking: Arc<Marking>,
    tracer: Tracer<'a>,
    /// Pages of entries that are not in use since the second stop.
    dead_entry_pages: Vec<u32>,
}

impl<'a> Cycle<'a> {
    /// Collects. Returns the number of pages in use when all was marked; `None` if nobody needs the
    /// heap any more.
    fn run(heap: &'a GcInner, mode: CycleMode) -> Result<Option<u64>, GcError> {
        let first = heap.stops.begin()?;
        let mut cycle = Cycle::begin(heap);
        heap.reach(CycleStep::SnapshotTaken);
        let mut stop = match mode {
            CycleMode::Stopped => Some(first),
            CycleMode::Concurrent => {
                cycle.resume(first);
                heap.reach(CycleStep::Marking);
                None
            }
        };
        let mut attempts = 0;
        let stop = loop {
            let held = match stop.take() {
                Some(stop) => stop,
                None => {
                    if cycle.tracer.drain(Mutators::Run)? == Drained::Closed {
                        return Ok(None);
                    }
                    heap.stops.begin()?
                }
            };
            assert!(heap.broken != Some(BrokenRule::WakersReturn), "as a waker would that does not return");
            attempts += 1;
            let may_go_on = mode == CycleMode::Concurrent && attempts <= REST_ATTEMPTS;
            // Mutators have shared what they had logged when they stopped.
            match cycle.tracer.drain(if may_go_on { Mutators::WaitFor(REST_TIME) } else { Mutators::Wait })? {
                Drained::Closed => return Ok(None),
                Drained::Empty => break held,
                Drained::OutOfTime => cycle.resume(held),
            }
        };
        let used = heap.pages.used();
        heap.reach(CycleStep::Committing);
        let live = cycle.commit();
        heap.reach(CycleStep::Committed);
        heap.counters.count(&live);
        cycle.resume(stop);
        heap.counters.count_freed(cycle.release_dead());
        heap.reach(CycleStep::Released);
        if heap.evacuate {
            cycle.evacuate(mode);
        }
        heap.reach(CycleStep::Ended);
        Ok(Some(used))
    }

    /// Begins a cycle while all mutators are stopped.
    fn begin(heap: &'a GcInner) -> Cycle<'a> {
        let marking = Arc::new(Marking::begin(&heap.entries, heap.far_tracing == FarTracing::Arrivals));
        let tracer = Tracer::new(heap, Arc::clone(&marking));
        let mut phase = heap.phase();
        phase.snapshots += 1;
        phase.marking = Some(Arc::clone(&marking));
        drop(phase);
        if heap.broken != Some(BrokenRule::CloseOpenPages) {
            heap.left_over().iter_mut().for_each(|it| it.close());
        }
        Cycle { heap, marking, tracer, dead_entry_pages: Vec::new() }
    }

    /// Lets mutators go on, and counts how long they were stopped.
    fn resume(&self, stop: WorldStop<'_>) {
        self.heap.counters.count_pause(stop.end());
    }

    /// Ends entries that are not marked, and with them weak references to their objects, while all
    /// mutators are stopped. Objects that are younger than the snapshot live.
    fn commit(&mut self) -> LiveHeap {
        let heap = self.heap;
        heap.pages.lock().replace_occupancy(&mut self.tracer.old);
        self.dead_entry_pages = heap.entries.replace_bits(|page, used| self.marking.live(page, used));
        let mut phase = heap.phase();
        phase.commits += 1;
        phase.marking = None;
        drop(phase);
        heap.left_over().iter_mut().for_each(|it| it.forget_entries());
        self.tracer.live
    }

    /// Moves objects out of sparse pages. What is in the way of that does no harm: a later cycle finds
    /// what is left.
    fn evacuate(&mut self, mode: CycleMode) {
        let is_needed = mode == CycleMode::Stopped;
        let Tracer { far, old, layouts, .. } = &mut self.tracer;
        let (moved, result) = Evacuation::run(self.heap, far.reader(), old, layouts, is_needed);
        self.heap.counters.count_moved(&moved, result.is_err());
    }

    /// Gives back units of the snapshot in which nothing lives, and pages of entries that nobody uses,
    /// and takes them out of the snapshot: mutators may fill them again at once. Returns the number of
    /// their pages.
    fn release_dead(&mut self) -> u64 {
        let (pages, snapshot) = (&self.heap.pages, &mut self.tracer.old);
        let mut freed = 0;
        for index in 0..snapshot.len() {
            let Some(old) = snapshot.get_mut(index).filter(|region| region.purpose != UnitPurpose::Entries) else {
                continue;
            };
            let dead: Vec<u32> = {
                let now = pages.lock();
                let is_dead = |unit: &u32| {
                    old.units.is_used(*unit)
                        && now.get(index).is_some_and(|region| region.occupancy[*unit as usize].is_empty())
                };
                (0..old.units.units()).filter(is_dead).collect()
            };
            for unit in dead {
                // SAFETY: units in use were made. No object of the unit was reachable at the second
                // stop, so no mutator has a reference into it since, and units of the snapshot are
                // not filled any more.
                unsafe { pages.release_unit((index, unit)) };
                old.units.give_back(unit);
                freed += u64::from(old.purpose.pages());
            }
        }
        for page in self.dead_entry_pages.drain(..) {
            let Some((index, unit)) = pages.lock().unit_of(page) else { unreachable!("a page of entries is a unit") };
            // SAFETY: the unit was made. The table has had no such page since the second stop, when
            // nobody had an address in it.
            unsafe { pages.release_unit((index, unit)) };
            freed += 1;
            // It may be younger than the snapshot.
            if let Some(old) = snapshot.get_mut(index).filter(|old| old.units.is_used(unit)) {
                old.units.give_back(unit);
            }
        }
        freed
    }
}

impl Drop for Cycle<'_> {
    fn drop(&mut self) {
        // Given up, or at its end: what is logged from now on is nobody's work.
        self.marking.end();
        self.heap.phase().marking = None;
    }
}
