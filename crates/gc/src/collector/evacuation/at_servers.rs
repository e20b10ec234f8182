//! Evacuation at memory servers: the server that has far pages copies their live objects into fresh
//! pages (`ff.evacuate`), so that no byte of an object passes through the client.
//!
//! The server gets far pages of which all is known here, and fresh pages that nobody else has. It says
//! which objects it has copied, and the checksum of each page that it has read. Then entries get their
//! new places at stops, as they do when the collector has copied: if the source is still far, with
//! that checksum. Until then, nothing that anybody sees has changed. So a call that fails is forgotten,
//! and the collector copies.
//!
//! Over a stripe whose groups are no smaller than regions, each member copies what it has to fresh pages
//! of its own.
//!
//! Servers fill whole pages. What would fill less than one is left to the collector, and so are pages
//! that are near.

use super::{Batch, Evacuation, Move, SourceBytes, SparseObject, SparsePage, retry};
use crate::collector::CycleStep;
use crate::collector::tracer::TableCharge;
use crate::error::GcError;
use crate::pages::{SparseUnit, UnitId, UnitPurpose};
use farfield::space::{FarLayout, FarServer, UnmadeUnits};
use farfield_core::gc::{CARDS_PER_PAGE, cards_of};
use farfield_wic::CallError;
use farfield_wic::evacuate::{CopiedObject, Evacuate, EvacuatedObject, EvacuationBatch, SourcePage};
use std::collections::{BTreeMap, VecDeque};

/// Sources of a call, at most.
const SOURCES_MAX: usize = 128;

/// Sources for which a server is asked, at least: to read fewer takes less time than a call.
const SOURCES_MIN: usize = 4;

/// Most objects of a call: so many for each page that the collector could copy instead, within these
/// bounds. An answer has room for more.
const OBJECTS_PER_PAGE: usize = 64;
const OBJECTS: (usize, usize) = (512, 4096);

/// Near memory that an object of a call takes.
const OBJECT_NEAR_BYTES: usize = size_of::<CopiedObject>() + size_of::<EvacuatedObject>() + size_of::<Move>();

/// Most bytes of an argument for layouts.
const LAYOUT_BYTES_MAX: usize = 32 * 1024;

/// Fresh page for a server to fill.
type Target = (UnitId, u32);

/// Sources and fresh pages of one call.
struct ServerBatch {
    layout: FarLayout,
    server: FarServer,
    sources: Vec<SparseUnit>,
    /// The sources, as the server gets them.
    pages: Vec<SourcePage>,
    targets: Vec<Target>,
    /// Number of the objects that the sources hold.
    objects: usize,
}

impl<'a> Evacuation<'a, '_> {
    /// Moves objects of far sources that servers copy, and leaves the other sources.
    pub(super) fn move_far_at_servers(&mut self) -> Result<(), GcError> {
        if !self.heap.evacuate_at_servers {
            return Ok(());
        }
        let layouts = self.layouts.encode();
        if layouts.len() > LAYOUT_BYTES_MAX {
            return Ok(());
        }
        let layout = self.heap.pages.space().layout();
        if !self.heap.pages.has_regions_at_servers(layout) {
            return Ok(());
        }
        let mut of_servers: BTreeMap<FarServer, VecDeque<SparseUnit>> = BTreeMap::new();
        for unit in self.sources.drain(..) {
            of_servers.entry(layout.place(unit.page).0).or_default().push_back(unit);
        }
        let mut others = Vec::new();
        for (server, sources) in of_servers {
            self.sources = sources;
            while !self.heap.cycles.is_closed()
                && let Some(batch) = self.choose(layout, server, &mut others)
            {
                if !self.move_batch_at_server(batch, &layouts, &mut others)? {
                    break;
                }
            }
            others.extend(self.sources.drain(..));
        }
        others.sort_unstable_by_key(|unit| unit.page);
        self.sources = others.into();
        Ok(())
    }

    /// Chooses far sources, of those that are left of this server's, and takes fresh pages there for
    /// what they hold. Moves sources that are near to `others`, and all of them if the server need not
    /// be asked.
    fn choose(&mut self, layout: FarLayout, server: FarServer, others: &mut Vec<SparseUnit>) -> Option<ServerBatch> {
        let space = self.heap.pages.space();
        if !space.may_call::<Evacuate>() {
            return None;
        }
        let (mut sources, mut pages) = (Vec::new(), Vec::new());
        let (mut cards, mut objects) = (0, 0);
        let objects_max = (self.heap.copied_pages * OBJECTS_PER_PAGE).clamp(OBJECTS.0, OBJECTS.1);
        while let Some(unit) = self.sources.pop_front() {
            let live = self.occupancy(unit.id);
            if sources.len() == SOURCES_MAX || objects + live.count() as usize > objects_max {
                self.sources.push_front(unit);
                break;
            }
            if space.is_near(unit.page) {
                others.push(unit);
                continue;
            }
            (cards, objects) = (cards + unit.cards, objects + live.count() as usize);
            sources.push(unit);
            pages.push(SourcePage { page: layout.place(unit.page).1, live: live.words() });
        }
        let wanted = if sources.len() < SOURCES_MIN { 0 } else { cards / CARDS_PER_PAGE };
        let targets = self.take_targets(layout, server, wanted);
        if targets.is_empty() {
            others.append(&mut sources);
            return None;
        }
        Some(ServerBatch { layout, server, sources, pages, targets, objects })
    }

    /// Takes up to so many fresh pages of a server. Half of the room that the limit leaves stays for
    /// mutators.
    fn take_targets(&self, layout: FarLayout, server: FarServer, wanted: u32) -> Vec<Target> {
        let pages = &self.heap.pages;
        let room = pages.limit().saturating_sub(pages.used());
        let most = u64::from(wanted).min((room / 2).max(1));
        let take = || {
            let is_reserved = pages.reserve_to_move();
            let take = || pages.take_unit_at(UnitPurpose::OBJECTS, layout, server).ok();
            let taken = is_reserved.then(take).flatten();
            if is_reserved && taken.is_none() {
                pages.unreserve(1);
            }
            taken
        };
        (0..most).map_while(|_| take()).collect()
    }

    /// Lets a server copy what lies in sources, and lets the entries lead there. Returns whether there
    /// may be more to copy for it.
    fn move_batch_at_server(
        &mut self,
        batch: ServerBatch,
        layouts: &[u8],
        others: &mut Vec<SparseUnit>,
    ) -> Result<bool, GcError> {
        let ServerBatch { layout, server, sources, pages, targets, objects } = batch;
        let mut charge = TableCharge::new(self.heap.pages.space());
        charge.add(objects * OBJECT_NEAR_BYTES);
        let target_pages: Vec<u32> = targets.iter().map(|(_, page)| *page).collect();
        let at_server = target_pages.iter().map(|page| layout.place(*page).1).collect();
        let argument = EvacuationBatch { layouts: layouts.to_vec(), sources: pages.clone(), targets: at_server };
        let space = self.heap.pages.space();
        self.heap.reach(CycleStep::AskingToCopy);
        let answer =
            space.call_to_make::<Evacuate>(layout, server, &target_pages, argument, |answer| &answer.target_sums);
        self.heap.reach(CycleStep::ServerCopied);
        let answer = match answer {
            Ok(answer) => answer,
            Err(UnmadeUnits { error, is_over }) => {
                self.moved.refused_calls += u64::from(error != CallError::Nowhere);
                for (id, _) in targets {
                    if is_over {
                        self.cancel_target(id);
                    } else {
                        self.heap.pages.lose_unit(id);
                    }
                }
                others.extend(sources);
                return Ok(false);
            }
        };
        let written = answer.target_sums.len().min(targets.len());
        let Some(copied) = answer.copies(&pages, targets.len()) else {
            self.moved.refused_calls += 1;
            self.release_targets(&targets, written);
            others.extend(sources);
            return Ok(false);
        };
        let sums = answer.sources.iter().map(|page| page.sum);
        let to_page = |(unit, sum)| SparsePage { unit, bytes: SourceBytes::Server { sum } };
        let mut rest = sources;
        let unread = rest.split_off(answer.sources.len().min(rest.len()));
        let mut batch = Batch { sources: rest.into_iter().zip(sums).map(to_page).collect(), ..Batch::default() };
        let mut progress = Progress::new(batch.sources.len());
        let moved_before = self.moved.objects;
        let result = self.publish(&mut batch, copied, &targets, &mut progress);
        batch.pins.clear();
        self.release_targets(&targets, written);
        let is_progress = self.moved.objects > moved_before && result.is_ok();
        for source in unread.into_iter().rev() {
            self.sources.push_front(source);
        }
        for (index, SparsePage { unit, .. }) in batch.sources.into_iter().enumerate().rev() {
            if self.release_if_empty(unit.id) {
                continue;
            }
            if progress.is_doubtful[index] {
                others.push(unit);
            } else if !progress.is_left[index] {
                // The fresh pages had no room for the rest.
                let cards = unit.cards.saturating_sub(progress.moved_cards[index]);
                self.sources.push_front(SparseUnit { cards, ..unit });
            }
        }
        result.map(|()| is_progress)
    }

    /// Lets the entries of copied objects lead to the copies, at a stop for some pages of entries each.
    fn publish(
        &mut self,
        batch: &mut Batch<'a>,
        mut copied: Vec<CopiedObject>,
        targets: &[Target],
        progress: &mut Progress,
    ) -> Result<(), GcError> {
        copied.retain(|copied| {
            let is_used = self.heap.entries.is_used(copied.entry);
            progress.is_doubtful[copied.source] |= !is_used;
            is_used
        });
        // Entry pages are as many as entries need, so a number tells its page.
        copied.sort_unstable_by_key(|copied| copied.entry);
        let mut copied: VecDeque<CopiedObject> = copied.into();
        while !copied.is_empty() && !self.heap.cycles.is_closed() {
            batch.moves.clear();
            batch.pins.clear();
            self.prepare(batch, &mut copied, targets, progress)?;
            if batch.moves.is_empty() {
                continue;
            }
            let stop = self.heap.stops.begin()?;
            self.heap.reach(CycleStep::Publishing);
            let is_moved = self.move_objects(batch);
            self.heap.counters.count_pause(stop.end());
            self.heap.reach(CycleStep::Published);
            self.note_moved(batch, &is_moved, &mut progress.is_left);
            for (it, _) in batch.moves.iter().zip(&is_moved).filter(|(_, is_moved)| **is_moved) {
                progress.moved_cards[it.object.source] += cards_of(it.object.bytes);
            }
        }
        Ok(())
    }

    /// Takes objects whose entries lie in some pages, brings these pages near, and pins them.
    fn prepare(
        &self,
        batch: &mut Batch<'a>,
        copied: &mut VecDeque<CopiedObject>,
        targets: &[Target],
        progress: &mut Progress,
    ) -> Result<(), GcError> {
        let mut scope = self.heap.pages.space().enter();
        let mut entry_pages: Vec<u32> = Vec::new();
        let mut group = Vec::new();
        while let Some(next) = copied.front() {
            let page = self.heap.entries.place(next.entry).0;
            if entry_pages.last() != Some(&page) {
                if entry_pages.len() == self.batch_pages {
                    break;
                }
                entry_pages.push(page);
            }
            group.extend(copied.pop_front());
        }
        scope.prefetch(entry_pages);
        for CopiedObject { entry, bytes, source, card, target, target_card } in group {
            let object = SparseObject { source, card, bytes, entry };
            let word = retry(&mut scope, |scope| self.heap.entries.load(scope, object.entry))?;
            if (word.page(), word.card()) != (batch.sources[object.source].unit.page, object.card) {
                // The page is not what the server has read, or the collector says what is wrong with it.
                progress.is_doubtful[object.source] = true;
            } else if batch.pin(&scope, self.heap.entries.place(object.entry).0)? {
                let (target, target_page) = targets[target];
                batch.moves.push(Move { object, generation: word.generation(), target, target_page, target_card });
            } else {
                progress.is_left[object.source] = true;
            }
            scope.renew();
        }
        Ok(())
    }

    /// Gives back a fresh page that was never made.
    fn cancel_target(&self, id: UnitId) {
        self.heap.pages.cancel_unit(id);
        self.heap.pages.unreserve(1);
    }

    /// Gives back fresh pages that have got nothing, of which the server has written the first ones.
    fn release_targets(&self, targets: &[Target], written: usize) {
        for (index, (id, _)) in targets.iter().enumerate() {
            if index >= written {
                self.cancel_target(*id);
            } else if self.occupancy(*id).is_empty() {
                // SAFETY: the server has made the unit, and no entry leads into it.
                unsafe { self.heap.pages.release_unit(*id) };
            }
        }
    }
}

/// What became of the sources of one call.
struct Progress {
    /// An object was not moved, because its page has changed or is near.
    is_left: Vec<bool>,
    /// The server's word about an object does not agree with what is known here.
    is_doubtful: Vec<bool>,
    /// Cards of the objects that were moved.
    moved_cards: Vec<u32>,
}

impl Progress {
    fn new(sources: usize) -> Progress {
        Progress { is_left: vec![false; sources], is_doubtful: vec![false; sources], moved_cards: vec![0; sources] }
    }
}
