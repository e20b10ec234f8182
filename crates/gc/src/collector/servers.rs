//! Tracing at memory servers: objects that are far are looked at where they are (`ff.trace`).
//!
//! The collector keeps the marks, and asks the servers of the pool where the references of far
//! objects lead; several thousand objects at a time. So a cycle moves some ten bytes for each
//! object and reference instead of a page for each visit, takes no frame from the mutators, and
//! needs no state at the server: whoever answers, at whatever time, reads bytes of the snapshot or
//! later, because near pages that differ from their far copies are written first
//! ([decision 24](../../../../docs/decisions/0024-servers-trace-and-the-client-marks.md)).
//!
//! Over a stripe each object is asked for at the member that has the page that it waits for: that of
//! its entry, or its own. A member whose entry leads to another one's page answers so, and the
//! collector, which all references pass through, asks that one next. So members need not know each
//! other, and nothing travels between them.

use super::far_pages::Waiter;
use super::pace::FarPace;
use super::steps::CycleStep;
use crate::heap::{BrokenRule, FarTracing, GcInner};
use crate::pages::RegionSet;
use core::time::Duration;
use farfield::space::{FarLayout, FarServer};
use farfield_core::gc::LayoutTable;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::CallBody;
use farfield_wic::trace::{AskedObject, ObjectPlace, PageRun, PageShare, Trace, Traced, Tracing};
use std::collections::BTreeMap;
use std::time::Instant;

/// Most objects that are asked for in one call.
const CALL_MAX: usize = 2048;

/// Calls that are made together, if they are of so many objects; a server runs them side by side.
const CALLS: usize = 4;

/// Objects that are worth a call of their own. A heap in which fewer are far needs no flush.
const CALL_MIN: usize = 256;

/// Looks in a row, at least, for which fewer objects have waited than are worth a call, before one is made all
/// the same: the graph is a chain there, of which a server finds the next objects unasked.
const CHAIN_LOOKS: u64 = 256;

/// Near pages for each such look: the longer a flush may take, the later it is worth while.
const NEAR_PAGES_PER_LOOK: u64 = 64;

/// Most objects that a server looks at unasked, in one call.
const WINDOW_MAX: u32 = 4096;

/// Most bytes of an argument beside its objects.
const FIXED_BYTES_MAX: usize = 32 * 1024;

/// Bytes of an object in an argument, at most.
const OBJECT_BYTES: usize = 12;

// A share and the lengths of lists take less than the rest.
const _: () = assert!(FIXED_BYTES_MAX + CALL_MAX * OBJECT_BYTES + 64 <= CallBody::ARGUMENT_BYTES_MAX);

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
    pace: FarPace,
    /// When pages were read last; and those read before, and the objects traced before.
    last_read: Option<(Instant, u64, u64)>,
    /// Time that reading pages has taken.
    reading: Duration,
    /// Looks in a row for which fewer objects have waited than are worth a call.
    chain_looks: u64,
}

/// Objects and pages, as a decision sees them.
#[derive(Clone, Copy)]
pub(super) struct FarWork {
    /// Objects that were traced.
    pub(super) traced: u64,
    /// Pages that were read.
    pub(super) read: u64,
    /// Objects that wait.
    pub(super) waiters: usize,
    /// Pages for which they wait.
    pub(super) pages: usize,
}

/// What the answer to one call has told.
#[derive(Clone, Copy, Default)]
pub(super) struct TakenAnswer {
    /// Objects that the server has tried to look at, of those asked for.
    pub(super) tried: usize,
    /// Objects that nobody had looked at, and the server has.
    pub(super) traced: usize,
    /// Objects that the server has found unasked, here or elsewhere.
    pub(super) found: usize,
    /// Objects among these that nobody had marked.
    pub(super) new: usize,
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
        Servers::On(Box::new(ServerChoice {
            ready: None,
            pace: FarPace::new(),
            last_read: None,
            reading: Duration::ZERO,
            chain_looks: 0,
        }))
    }

    /// Decides whether servers look at objects that wait; if not, their pages are read now. The first
    /// time that they do, writes what differs from its far copy.
    pub(super) fn are_for(&mut self, heap: &GcInner, old: &RegionSet, layouts: &LayoutTable, work: FarWork) -> bool {
        let Servers::On(choice) = self else { return false };
        if let Some((since, read, traced)) = choice.last_read.take() {
            let time = since.elapsed();
            choice.reading += time;
            choice.pace.add_pages(work.read - read, work.traced - traced, time);
        }
        let is_always = matches!(heap.broken, Some(BrokenRule::ServersAreFaster | BrokenRule::FlushBeforeTracing));
        choice.chain_looks = if work.waiters < CALL_MIN { choice.chain_looks + 1 } else { 0 };
        let chain_looks_max = heap.pages.space().near_bytes() / PAGE_BYTES as u64 / NEAR_PAGES_PER_LOOK;
        let is_worth_a_call = work.waiters >= CALL_MIN || choice.chain_looks > chain_looks_max.max(CHAIN_LOOKS);
        // If all that is far is soon read, a flush would take longer than that.
        let is_worth_a_flush = choice.ready.is_some() || choice.reading >= heap.flush_time();
        let is_faster = |pace: &mut FarPace| is_worth_a_flush && pace.decide_for_servers(work.waiters, work.pages);
        if !(is_worth_a_call && (is_always || is_faster(&mut choice.pace))) {
            choice.last_read = Some((Instant::now(), work.read, work.traced));
            return false;
        }
        choice.ready = choice.ready.take().or_else(|| ReadyServers::prepare(heap, old, layouts));
        if choice.ready.is_none() {
            *self = Servers::Off;
        }
        matches!(self, Servers::On(_))
    }

    /// Asks servers about objects that wait for these pages, [`Servers::ENTRIES_MAX`] at most. Calls
    /// `take` with the objects and the answer of each call. False if no server answers; then none is
    /// asked any more in this cycle.
    pub(super) fn ask<E>(
        &mut self,
        heap: &GcInner,
        waiting: &[(u32, Waiter)],
        mut take: impl FnMut(&[(u32, Waiter)], Traced) -> Result<TakenAnswer, E>,
    ) -> Result<bool, E> {
        let Servers::On(choice) = self else { return Ok(false) };
        let Some(ready) = &mut choice.ready else { return Ok(false) };
        let begun = Instant::now();
        let layout = heap.pages.space().layout();
        let mut of_servers: BTreeMap<FarServer, Vec<(u32, Waiter)>> = BTreeMap::new();
        for (page, waiter) in waiting {
            of_servers.entry(layout.place(*page).0).or_default().push((*page, *waiter));
        }
        let calls = (CALLS / of_servers.len().max(1)).max(1);
        let of_call = |all: usize| all.div_ceil(calls).clamp(CALL_MIN, CALL_MAX);
        let calls =
            of_servers.iter().flat_map(|(server, all)| all.chunks(of_call(all.len())).map(|some| (*server, some)));
        let asked: Vec<(FarServer, &[(u32, Waiter)])> = calls.collect();
        let arguments = asked.iter().map(|(server, some)| (*server, ready.argument(layout, *server, some)));
        heap.reach(CycleStep::AskingServers);
        let answers = heap.pages.space().call::<Trace>(layout, arguments.collect());
        heap.reach(CycleStep::ServersAnswered);
        let Ok(answers) = answers else {
            *self = Servers::Off;
            return Ok(false);
        };
        let mut all = TakenAnswer::default();
        for ((_, waiting), traced) in asked.into_iter().zip(answers) {
            let TakenAnswer { tried, traced, found, new } = take(waiting, traced)?;
            all.tried += tried;
            all.traced += traced;
            all.found += found;
            all.new += new;
        }
        if all.tried == 0 {
            // Whoever asks them again is answered the same.
            *self = Servers::Off;
            return Ok(true);
        }
        ready.adapt(all.found, all.new);
        choice.pace.add_at_servers(all.traced, begun.elapsed());
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
        // Are there servers at all?
        let ready = ReadyServers { layouts: Vec::new(), entry_pages: Vec::new(), window: 0 };
        let layout = space.layout();
        let nothing = |server| (server, ready.argument(layout, server, &[]));
        space.call::<Trace>(layout, layout.servers().into_iter().map(nothing).collect()).ok()?;
        heap.reach(CycleStep::Flushing);
        if heap.broken != Some(BrokenRule::FlushBeforeTracing) {
            let begun = Instant::now();
            // SAFETY: units of the snapshot were made, and only the collector's thread, which we
            // are, releases them. Mutators change what was there at the snapshot as atomics only:
            // fields of objects, and entries.
            let flushed = unsafe { space.flush(&old.units()) };
            heap.set_flush_time(begun.elapsed());
            heap.counters.count_flushed(flushed.ok()?);
        }
        heap.reach(CycleStep::Flushed);
        Some(ReadyServers { layouts, entry_pages, window: WINDOW_MAX / 4 })
    }

    fn argument(&self, layout: FarLayout, server: FarServer, waiting: &[(u32, Waiter)]) -> Tracing {
        let share = layout.deal().map_or(PageShare::ALL, |deal| PageShare {
            servers: deal.members() as u32,
            server: server.index(),
            group_pages: deal.group_pages() as u32,
        });
        Tracing {
            layouts: self.layouts.clone(),
            share,
            entry_pages: self.entry_pages.clone(),
            objects: waiting.iter().map(asked_object).collect(),
            most: waiting.len() as u32 + self.window,
        }
    }

    fn adapt(&mut self, found: usize, new: usize) {
        if found == 0 {
            return;
        }
        self.window = if new * 2 >= found { (self.window * 2).clamp(1, WINDOW_MAX) } else { self.window / 2 };
    }
}

/// Returns an object that waits for a page as servers are asked for it.
pub(super) fn asked_object((page, waiter): &(u32, Waiter)) -> AskedObject {
    AskedObject { entry: waiter.entry, place: waiter.card.map(|card| ObjectPlace { page: *page, card }) }
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
