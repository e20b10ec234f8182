//! Tracing at memory servers: objects that are far are looked at where they are (`ff.trace`).
//!
//! The collector keeps the marks, and asks the server of the pool where the references of far
//! objects lead; several thousand objects at a time. So a cycle moves some ten bytes for each
//! object and reference instead of a page for each visit, takes no frame from the mutators, and
//! needs no state at the server: whoever answers, at whatever time, reads bytes of the snapshot or
//! later, because near pages that differ from their far copies are written first
//! ([decision 24](../../../../docs/decisions/0024-servers-trace-and-the-client-marks.md)).

use crate::heap::GcInner;
use crate::pages::RegionSet;
use farfield_core::gc::LayoutTable;
use farfield_wic::trace::{PageRun, Trace, Traced, Tracing};

/// Far objects that are brought near before servers are asked: a heap that has few needs no flush.
const LOCAL_FIRST: u32 = 64;

/// Most objects that are asked for in one call.
const CALL_MAX: usize = 2048;

/// Calls that are made together; a server runs them side by side.
const CALLS: usize = 4;

/// Objects that are worth a call of their own.
const CALL_MIN: usize = 256;

/// Most objects that a server looks at unasked, in one call.
const WINDOW_MAX: u32 = 4096;

/// Most bytes of an argument beside its entries.
const FIXED_BYTES_MAX: usize = 32 * 1024;

/// Bytes of a run of pages in an argument, at most.
const RUN_BYTES: usize = 10;

/// Servers that trace for one cycle.
pub(super) enum Servers {
    /// So many far objects were brought near; whether servers are worth the flush is not known.
    Unused(u32),
    /// Near pages were written, so servers have the snapshot or what is later.
    Ready(Box<ReadyServers>),
    /// No server traces, or the heap believes none.
    Off,
}

/// What each call says, and how much more than what is asked for servers look at.
pub(super) struct ReadyServers {
    layouts: Vec<u8>,
    entry_pages: Vec<PageRun>,
    /// Grows while most of what is found unasked is new, and shrinks while it is not.
    window: u32,
}

impl Servers {
    /// Decides about one more far object: whether servers look at it. The first time that they are
    /// to, writes what differs from its far copy.
    pub(super) fn are_for(&mut self, heap: &GcInner, old: &RegionSet, layouts: &LayoutTable) -> bool {
        match self {
            Servers::Off => false,
            Servers::Ready(_) => true,
            Servers::Unused(count) if *count < LOCAL_FIRST => {
                *count += 1;
                false
            }
            Servers::Unused(_) => {
                *self = ReadyServers::prepare(heap, old, layouts)
                    .map_or(Servers::Off, |ready| Servers::Ready(Box::new(ready)));
                matches!(self, Servers::Ready(_))
            }
        }
    }

    /// Asks servers about objects, and takes them out of `parked`. Calls `take` with the entries
    /// and the answer of each call, and adapts to the share of objects that were found unasked and
    /// that `take` says were new (of all of them, new). False if no server answers: what is parked
    /// stays, and no server is asked any more in this cycle.
    pub(super) fn ask<E>(
        &mut self,
        heap: &GcInner,
        parked: &mut Vec<u32>,
        mut take: impl FnMut(&[u32], Traced) -> Result<(usize, usize), E>,
    ) -> Result<bool, E> {
        let Servers::Ready(ready) = self else { return Ok(false) };
        let each = parked.len().div_ceil(CALLS).clamp(CALL_MIN, CALL_MAX);
        let first = parked.len().saturating_sub(each * CALLS);
        let asked: Vec<&[u32]> = parked[first..].chunks(each).collect();
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
        parked.truncate(first);
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
