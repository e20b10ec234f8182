//! Tracing at memory servers: objects that are far are looked at where they are (`ff.trace`).
//!
//! The collector keeps the marks, and asks the server of the pool where the references of far
//! objects lead; several thousand objects at a time. So a cycle moves some ten bytes for each
//! object and reference instead of a page for each visit, takes no frame from the mutators, and
//! needs no state at the server: whoever answers, at whatever time, reads bytes of the snapshot or
//! later, because near pages that differ from their far copies are written first
//! ([decision 24](../../../../docs/decisions/0024-servers-trace-and-the-client-marks.md)).

use crate::heap::{FarTracing, GcInner};
use crate::pages::RegionSet;
use core::time::Duration;
use farfield_core::gc::LayoutTable;
use farfield_wic::trace::{PageRun, Trace, Traced, Tracing};
use std::time::Instant;

/// Time that an object may take, in the mean, while far pages are read, before servers are asked.
/// Objects that lie in the order in which they are followed take less.
const LOCAL_TIME: Duration = Duration::from_micros(1);

/// Most objects that are asked for in one call.
const CALL_MAX: usize = 2048;

/// Calls that are made together; a server runs them side by side.
const CALLS: usize = 4;

/// Objects that are worth a call of their own. A heap in which fewer are far needs no flush.
const CALL_MIN: usize = 256;

/// Most objects that a server looks at unasked, in one call.
const WINDOW_MAX: u32 = 4096;

/// Most bytes of an argument beside its entries.
const FIXED_BYTES_MAX: usize = 32 * 1024;

/// Bytes of a run of pages in an argument, at most.
const RUN_BYTES: usize = 10;

/// Servers that trace for one cycle.
pub(super) enum Servers {
    /// They are asked, or not, as what takes less time.
    On(Box<ServerChoice>),
    /// No server traces, or the heap believes none.
    Off,
}

/// Decision about servers, by measurement.
pub(super) struct ServerChoice {
    /// Set once near pages were written, so servers have the snapshot or what is later.
    ready: Option<ReadyServers>,
    is_asking: bool,
    /// Time of the last decision, and the objects that had been traced then.
    since: Option<(Instant, u64)>,
    /// Time that an object took before it.
    local_time: Duration,
}

/// What each call says, and how much more than what is asked for servers look at.
pub(super) struct ReadyServers {
    layouts: Vec<u8>,
    entry_pages: Vec<PageRun>,
    /// Grows while most of what is found unasked is new, and shrinks while it is not.
    window: u32,
}

impl Servers {
    /// Most objects that are asked for at a time.
    pub(super) const ENTRIES_MAX: usize = CALLS * CALL_MAX;

    /// Creates the choice for a cycle.
    pub(super) fn new(heap: &GcInner) -> Servers {
        if heap.far_tracing != FarTracing::Servers {
            return Servers::Off;
        }
        Servers::On(Box::new(ServerChoice { ready: None, is_asking: false, since: None, local_time: Duration::ZERO }))
    }

    /// Decides whether servers look at the `waiting` objects, after so many were `traced`. The first
    /// time that they do, writes what differs from its far copy.
    pub(super) fn are_for(
        &mut self,
        heap: &GcInner,
        old: &RegionSet,
        layouts: &LayoutTable,
        traced: u64,
        waiting: usize,
    ) -> bool {
        let Servers::On(choice) = self else { return false };
        if choice.is_asking {
            return true;
        }
        let Some((since, before)) = choice.since.replace((Instant::now(), traced)) else { return false };
        choice.local_time = since.elapsed() / u32::try_from(traced - before).unwrap_or(u32::MAX).max(1);
        if choice.local_time <= LOCAL_TIME || waiting < CALL_MIN {
            return false;
        }
        choice.ready = choice.ready.take().or_else(|| ReadyServers::prepare(heap, old, layouts));
        choice.is_asking = choice.ready.is_some();
        if !choice.is_asking {
            *self = Servers::Off;
        }
        matches!(self, Servers::On(_))
    }

    /// Asks servers about these objects, [`Servers::ENTRIES_MAX`] at most. Calls `take` with the
    /// entries and the answer of each call, which returns how many objects were found unasked, and how
    /// many of them were new. False if no server answers; then none is asked any more in this cycle.
    pub(super) fn ask<E>(
        &mut self,
        heap: &GcInner,
        entries: &[u32],
        mut take: impl FnMut(&[u32], Traced) -> Result<(usize, usize), E>,
    ) -> Result<bool, E> {
        let Servers::On(choice) = self else { return Ok(false) };
        let Some(ready) = &mut choice.ready else { return Ok(false) };
        let begun = Instant::now();
        let asked: Vec<&[u32]> = entries.chunks(entries.len().div_ceil(CALLS).max(CALL_MIN)).collect();
        let arguments = asked.iter().map(|entries| ready.argument(entries)).collect();
        let Ok(answers) = heap.pages.space().call::<Trace>(arguments) else {
            *self = Servers::Off;
            return Ok(false);
        };
        let (mut found, mut new) = (0, 0);
        for (entries, traced) in asked.into_iter().zip(answers) {
            let (of_call, new_of_call) = take(entries, traced)?;
            found += of_call;
            new += new_of_call;
        }
        ready.adapt(found, new);
        // Few objects at a time, or little that is new: reading pages may be faster.
        if begun.elapsed() / u32::try_from(entries.len() + new).unwrap_or(u32::MAX).max(1) > choice.local_time {
            (choice.is_asking, choice.since) = (false, None);
        }
        Ok(true)
    }
}

impl ReadyServers {
    /// Writes near pages of the snapshot that differ from their far copies; `None` if servers
    /// cannot be asked.
    fn prepare(heap: &GcInner, old: &RegionSet, layouts: &LayoutTable) -> Option<ReadyServers> {
        let (layouts, entry_pages) = (layouts.encode(), runs(heap.entries.pages()));
        if layouts.len() + entry_pages.len() * RUN_BYTES > FIXED_BYTES_MAX {
            return None;
        }
        let space = heap.pages.space();
        // Is there a server at all?
        let nothing = Tracing { layouts: Vec::new(), entry_pages: Vec::new(), entries: Vec::new(), most: 0 };
        space.call::<Trace>(vec![nothing]).ok()?;
        if heap.broken != Some(crate::BrokenRule::FlushBeforeTracing) {
            // SAFETY: units of the snapshot were made, and only the collector's thread, which we
            // are, releases them. Mutators change what was there at the snapshot as atomics only:
            // fields of objects, and entries.
            let flushed = unsafe { space.flush(&old.units()) };
            heap.counters.count_flushed(flushed.ok()?);
        }
        Some(ReadyServers { layouts, entry_pages, window: WINDOW_MAX / 4 })
    }

    fn argument(&self, entries: &[u32]) -> Tracing {
        Tracing {
            layouts: self.layouts.clone(),
            entry_pages: self.entry_pages.clone(),
            entries: entries.to_vec(),
            most: entries.len() as u32 + self.window,
        }
    }

    fn adapt(&mut self, found: usize, new: usize) {
        if found == 0 {
            return;
        }
        self.window = if new * 2 >= found { (self.window * 2).clamp(1, WINDOW_MAX) } else { self.window / 2 };
    }
}

/// Joins pages that follow each other.
fn runs(pages: impl Iterator<Item = u32>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(last) if last.first + last.count == page => last.count += 1,
            _ => runs.push(PageRun { first: page, count: 1 }),
        }
    }
    runs
}
