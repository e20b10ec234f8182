//! `ff.evacuate`: copies the live objects of sparse pages of a collected heap into fresh pages, where
//! the pages are kept, so that no byte of an object travels to the client and back (Mako, chapter 3:
//! evacuation at servers).
//!
//! The function changes nothing that anybody refers to: the fresh pages are the client's alone until
//! it lets entries lead there. It says which objects it has copied and how long they are, in the order
//! in which it has placed them, so the client knows the places ([`PageSequence`]). It also says the
//! checksum of each page, of those that it has read as well: the client moves only what lies in a page
//! that still has this checksum.

use crate::{Fault, Function, Place};
use farfield_core::checksum;
use farfield_core::gc::{LayoutTable, ObjectHeader, PageOccupancy, PageSequence, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use serde::{Deserialize, Serialize};

/// Most bytes of an answer.
const ROOM: usize = 48 * 1024;
/// Most bytes that a page takes in an answer, and that an object does.
const PAGE_ROOM: usize = 12;
const OBJECT_ROOM: usize = 8;

/// Copies live objects to fresh pages. A call must not write the pages that it reads.
#[derive(Debug)]
pub struct Evacuate;

/// Objects to copy, and pages for them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EvacuationBatch {
    /// Layouts of all types, [encoded](LayoutTable::encode).
    pub layouts: Vec<u8>,
    /// Pages that hold the objects.
    pub sources: Vec<SourcePage>,
    /// Output: pages that are filled in this order, each overwritten as a whole.
    pub targets: Vec<u32>,
}

/// Page with live objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SourcePage {
    /// Number of the page in the region.
    pub page: u32,
    /// Cards at which the live objects begin, as [bits](PageOccupancy::words).
    pub live: [u64; 4],
}

/// Objects that were copied.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Evacuated {
    /// The first of [`EvacuationBatch::sources`], as many as were read.
    pub sources: Vec<EvacuatedPage>,
    /// The objects, source by source. They lie in the targets where [`PageSequence`] places them.
    pub objects: Vec<EvacuatedObject>,
    /// Checksums of the first of [`EvacuationBatch::targets`], as many as were written.
    pub target_sums: Vec<u64>,
}

/// Page that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EvacuatedPage {
    /// Checksum of its bytes.
    pub sum: u64,
    /// Number of its live objects that were copied: the first ones. The next one did not fit into the
    /// targets or the answer, or cannot be read.
    pub objects: u32,
}

/// Object that was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EvacuatedObject {
    /// Entry of the object, as its header names it.
    pub entry: u32,
    /// Length in bytes.
    pub bytes: u32,
}

/// Place of an object, and that of its copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopiedObject {
    /// Entry of the object.
    pub entry: u32,
    /// Length in bytes.
    pub bytes: usize,
    /// Index of its page among [`EvacuationBatch::sources`].
    pub source: usize,
    /// Card of that page at which it begins.
    pub card: u8,
    /// Index of the page of its copy among [`EvacuationBatch::targets`].
    pub target: usize,
    /// Card of that page at which the copy begins.
    pub target_card: u8,
}

impl Evacuated {
    /// Returns the objects of an answer to a call for these sources and so many targets, in their order.
    /// `None` if the answer makes no sense, whoever has given it.
    pub fn copies(&self, sources: &[SourcePage], targets: usize) -> Option<Vec<CopiedObject>> {
        let mut objects = self.objects.iter();
        let mut places = PageSequence::new(self.target_sums.len().min(targets));
        let mut copies = Vec::with_capacity(self.objects.len());
        for (source, (asked, found)) in sources.iter().zip(&self.sources).enumerate() {
            let live = PageOccupancy::from_words(asked.live);
            if found.objects > live.count() {
                return None;
            }
            for card in live.iter().take(found.objects as usize) {
                let object = objects.next()?;
                let bytes = object.bytes as usize;
                if !(ObjectHeader::BYTES..=PAGE_BYTES - usize::from(card) * CARD_BYTES).contains(&bytes) {
                    return None;
                }
                let (target, target_card) = places.place(bytes)?;
                copies.push(CopiedObject { entry: object.entry, bytes, source, card, target, target_card });
            }
        }
        let is_whole = objects.next().is_none() && self.sources.len() <= sources.len();
        (is_whole && places.used() == self.target_sums.len()).then_some(copies)
    }
}

impl Function for Evacuate {
    const NAME: &'static str = "ff.evacuate";
    const VERSION: u32 = 2;
    type Argument = EvacuationBatch;
    type Answer = Evacuated;

    async fn run<P: Place>(place: &P, batch: EvacuationBatch) -> Result<Evacuated, Fault> {
        let Ok(layouts) = LayoutTable::decode(&batch.layouts) else { return Ok(Evacuated::default()) };
        let mut targets = TargetPages::new(place, &batch.targets)?;
        let (mut sources, mut objects) = (Vec::new(), Vec::new());
        let mut is_full = false;
        for source in &batch.sources {
            if is_full || !has_room(sources.len() + targets.sequence.used(), objects.len()) {
                break;
            }
            let bytes = place.read_range(offset_of(place, source.page)?, PAGE_BYTES).await?;
            let mut copied = EvacuatedPage { sum: checksum(&bytes), objects: 0 };
            for card in PageOccupancy::from_words(source.live).iter() {
                let Some((entry, object)) = object_at(&layouts, &bytes, card) else { break };
                is_full = !has_room(sources.len() + targets.sequence.used(), objects.len())
                    || !targets.add(place, object).await?;
                if is_full {
                    break;
                }
                objects.push(EvacuatedObject { entry, bytes: u32::try_from(object.len()).unwrap_or(u32::MAX) });
                copied.objects += 1;
            }
            sources.push(copied);
        }
        Ok(Evacuated { sources, objects, target_sums: targets.end(place).await? })
    }
}

/// Checks whether an answer that tells of so many pages and objects has room for an object more, and
/// for its two pages.
fn has_room(pages: usize, objects: usize) -> bool {
    (pages + 2) * PAGE_ROOM + (objects + 1) * OBJECT_ROOM <= ROOM
}

/// Returns the offset of a page in the region. Fails unless the page lies there.
fn offset_of<P: Place>(place: &P, page: u32) -> Result<u64, Fault> {
    let offset = u64::from(page) * PAGE_BYTES as u64;
    if offset + PAGE_BYTES as u64 <= place.region_bytes() { Ok(offset) } else { Err(Fault::OutOfRange { offset }) }
}

/// Returns the entry and the bytes of the object that begins at this card of a page; `None` if none
/// does.
fn object_at<'p>(layouts: &LayoutTable, page: &'p [u8], card: u8) -> Option<(u32, &'p [u8])> {
    let rest = page.get(usize::from(card) * CARD_BYTES..)?;
    let word = |offset: usize| Some(u64::from_le_bytes(*rest.get(offset..)?.first_chunk::<8>()?));
    let header = ObjectHeader(word(0)?);
    let layout = layouts.get(header.type_number()).filter(|_| header.entry() != 0)?;
    let elements = if layout.has_tail() { word(TypeLayout::TAIL_OFFSETS.0)? } else { 0 };
    let bytes = usize::try_from(layout.object_bytes(elements)?).ok()?;
    Some((header.entry(), rest.get(..bytes)?))
}

/// Pages that are filled with objects. One is held here until it is full.
struct TargetPages {
    /// Offsets of the pages in the region.
    offsets: Vec<u64>,
    sequence: PageSequence,
    held: Vec<u8>,
    sums: Vec<u64>,
}

impl TargetPages {
    /// Creates empty pages. Fails unless all of them lie in the region.
    fn new<P: Place>(place: &P, targets: &[u32]) -> Result<TargetPages, Fault> {
        let offsets: Vec<u64> = targets.iter().map(|page| offset_of(place, *page)).collect::<Result<_, Fault>>()?;
        let sequence = PageSequence::new(offsets.len());
        Ok(TargetPages { offsets, sequence, held: Vec::with_capacity(PAGE_BYTES), sums: Vec::new() })
    }

    /// Adds an object. Returns false if no page has room for it.
    async fn add<P: Place>(&mut self, place: &P, object: &[u8]) -> Result<bool, Fault> {
        let Some((page, card)) = self.sequence.place(object.len()) else { return Ok(false) };
        if page > self.sums.len() {
            self.write(place).await?;
        }
        // The object begins behind what is held; zeros lie in between.
        self.held.resize(usize::from(card) * CARD_BYTES, 0);
        self.held.extend_from_slice(object);
        Ok(true)
    }

    /// Writes the page that is held.
    async fn write<P: Place>(&mut self, place: &P) -> Result<(), Fault> {
        self.held.resize(PAGE_BYTES, 0);
        if let Some(offset) = self.offsets.get(self.sums.len()) {
            place.write(*offset, &self.held).await?;
            self.sums.push(checksum(&self.held));
        }
        self.held.clear();
        Ok(())
    }

    /// Writes the last page. Returns the checksums of all that were written.
    async fn end<P: Place>(mut self, place: &P) -> Result<Vec<u64>, Fault> {
        if self.sums.len() < self.sequence.used() {
            self.write(place).await?;
        }
        Ok(self.sums)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an object that is not copied as it is, or to another place than the client thinks, and against arguments of
    //! anybody that are believed.
    use super::*;
    use crate::{Sim, Stop};
    use farfield_core::gc::{TailLayout, cards_of};

    const PAGES: usize = 64;
    const NODE: u32 = 0;
    const BYTES: u32 = 1;

    fn layouts() -> LayoutTable {
        let mut layouts = LayoutTable::default();
        layouts.add(TypeLayout::new(24, vec![8, 16], vec![], None).unwrap()).unwrap();
        layouts.add(TypeLayout::new(16, vec![], vec![], Some(TailLayout::new(1, vec![], vec![]).unwrap())).unwrap());
        layouts
    }

    /// Small repeatable numbers.
    fn dice(seed: u64) -> impl FnMut(usize) -> usize {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move |sides| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % sides
        }
    }

    /// A region, and its live objects in the order of their pages.
    struct Heap {
        bytes: Vec<u8>,
        sources: Vec<SourcePage>,
        objects: Vec<(u32, Vec<u8>)>,
    }

    impl Heap {
        /// Fills pages 1 to `pages` with objects, of which one in three lives.
        fn new(seed: u64, pages: usize, longest: usize) -> Heap {
            let mut roll = dice(seed);
            let mut heap = Heap { bytes: vec![0xA5; PAGES * PAGE_BYTES], sources: Vec::new(), objects: Vec::new() };
            let mut entry = 0;
            for page in 1..=pages {
                let (mut live, mut card) = (PageOccupancy::EMPTY, 0);
                loop {
                    let tail = roll(longest);
                    let bytes = if roll(2) == 0 { 24 } else { 16 + tail };
                    if card + cards_of(bytes) as usize > PAGE_BYTES / CARD_BYTES {
                        break;
                    }
                    entry += 1;
                    let at = page * PAGE_BYTES + card * CARD_BYTES;
                    let kind = if bytes == 24 { NODE } else { BYTES };
                    let object = &mut heap.bytes[at..at + bytes];
                    object.iter_mut().for_each(|byte| *byte = roll(256) as u8);
                    object[..8].copy_from_slice(&ObjectHeader::new(entry, kind).0.to_le_bytes());
                    if kind == BYTES {
                        object[8..16].copy_from_slice(&(tail as u64).to_le_bytes());
                    }
                    if roll(3) == 0 {
                        live.insert(card as u8);
                        heap.objects.push((entry, object.to_vec()));
                    }
                    card += cards_of(bytes) as usize;
                }
                heap.sources.push(SourcePage { page: page as u32, live: live.words() });
            }
            heap
        }

        fn batch(&self, targets: &[u32]) -> EvacuationBatch {
            let layouts = layouts().encode();
            EvacuationBatch { layouts, sources: self.sources.clone(), targets: targets.to_vec() }
        }

        /// Copies to these pages, and checks all that there is then. Returns the number of objects.
        fn evacuate(&self, targets: &[u32]) -> usize {
            let sim = Sim::new(3, self.bytes.clone());
            let answer = sim.run_one::<Evacuate>(self.batch(targets)).unwrap();
            assert!(postcard::to_allocvec(&answer).unwrap().len() <= ROOM);
            let mut expected = self.bytes.clone();
            let mut places = PageSequence::new(targets.len());
            for (copied, (entry, bytes)) in answer.objects.iter().zip(&self.objects) {
                assert_eq!((copied.entry, copied.bytes as usize), (*entry, bytes.len()));
                let is_first = places.used();
                let (page, card) = places.place(bytes.len()).unwrap();
                let target = targets[page] as usize * PAGE_BYTES;
                if places.used() > is_first {
                    expected[target..target + PAGE_BYTES].fill(0);
                }
                expected[target + usize::from(card) * CARD_BYTES..][..bytes.len()].copy_from_slice(bytes);
            }
            assert!(sim.bytes() == expected, "the fresh pages have the objects, and nothing else has changed");
            let sum = |page: u32| checksum(&expected[page as usize * PAGE_BYTES..][..PAGE_BYTES]);
            assert_eq!(answer.target_sums, Vec::from_iter(targets[..places.used()].iter().map(|page| sum(*page))));
            let mut counted = 0;
            for (copied, source) in answer.sources.iter().zip(&self.sources) {
                assert_eq!(copied.sum, sum(source.page));
                assert!(copied.objects <= PageOccupancy::from_words(source.live).count());
                counted += copied.objects as usize;
            }
            assert_eq!(counted, answer.objects.len());
            let copies = answer.copies(&self.sources, targets.len()).unwrap();
            for (copy, (entry, bytes)) in copies.iter().zip(&self.objects) {
                assert_eq!((copy.entry, copy.bytes), (*entry, bytes.len()));
                for (page, card) in
                    [(self.sources[copy.source].page, copy.card), (targets[copy.target], copy.target_card)]
                {
                    let at = page as usize * PAGE_BYTES + usize::from(card) * CARD_BYTES;
                    assert_eq!(expected[at..at + bytes.len()], **bytes);
                }
            }
            assert_eq!(copies.len(), counted);
            counted
        }
    }

    #[test]
    fn live_objects_lie_in_fresh_pages_as_they_were() {
        for seed in 0..20 {
            let heap = Heap::new(seed, 8, [40, 300, 2000][seed as usize % 3]);
            let targets = [40, 20, 21, 63, 30, 22];
            assert_eq!(heap.evacuate(&targets), heap.objects.len());
            // What does not fit stays.
            assert!(heap.evacuate(&targets[..1]) < heap.objects.len());
            assert_eq!(heap.evacuate(&[]), 0);
        }
    }

    #[test]
    fn answers_end_before_they_are_too_long() {
        let mut heap = Heap::new(1, 1, 1);
        let (source, objects) = (heap.sources[0], heap.objects.clone());
        // More of one page than an answer has room for.
        heap.sources = vec![source; 7000 / objects.len()];
        heap.objects = objects.iter().cycle().take(heap.sources.len() * objects.len()).cloned().collect();
        let copied = heap.evacuate(&Vec::from_iter(2..PAGES as u32));
        assert!(copied > 4000 && copied < heap.objects.len(), "{copied}");
        heap.sources = vec![SourcePage { page: 1, live: [0; 4] }; 6000];
        heap.objects.clear();
        assert_eq!(heap.evacuate(&[40]), 0);
    }

    #[test]
    fn what_is_no_object_ends_its_page() {
        let mut heap = Heap::new(2, 3, 100);
        let first =
            |heap: &Heap, page: usize| PageOccupancy::from_words(heap.sources[page].live).iter().nth(1).unwrap();
        let at = PAGE_BYTES + usize::from(first(&heap, 0)) * CARD_BYTES;
        let of_first = PageOccupancy::from_words(heap.sources[0].live).count() as usize;
        for header in [ObjectHeader::new(0, NODE), ObjectHeader::new(7, 2), ObjectHeader::new(7, BYTES)] {
            heap.bytes[at..at + 8].copy_from_slice(&header.0.to_le_bytes());
            heap.bytes[at + 8..at + 16].copy_from_slice(&u64::MAX.to_le_bytes());
            let sim = Sim::new(1, heap.bytes.clone());
            let answer = sim.run_one::<Evacuate>(heap.batch(&[40, 41, 42])).unwrap();
            assert_eq!((answer.sources[0].objects, answer.sources.len()), (1, 3));
            assert_eq!(answer.objects[1].entry, heap.objects[of_first].0, "the next page goes on");
        }
        // The last card has room for a header, and for no object.
        heap.sources = vec![SourcePage { page: 1, live: [0, 0, 0, 1 << 63] }];
        heap.bytes[2 * PAGE_BYTES - CARD_BYTES..][..8].copy_from_slice(&ObjectHeader::new(7, NODE).0.to_le_bytes());
        let run = |batch: EvacuationBatch| Sim::new(1, heap.bytes.clone()).run_one::<Evacuate>(batch);
        assert_eq!(run(heap.batch(&[40])).unwrap().objects, []);
        assert_eq!(run(EvacuationBatch { layouts: vec![1, 2], ..heap.batch(&[40]) }), Ok(Evacuated::default()));
    }

    #[test]
    fn pages_outside_of_the_region_are_faults_and_nothing_is_written() {
        let heap = Heap::new(3, 2, 100);
        for page in [PAGES as u32, u32::MAX] {
            let offset = u64::from(page) * PAGE_BYTES as u64;
            let outside = Err(Stop::Fault(Fault::OutOfRange { offset }));
            let mut batch = heap.batch(&[40, page]);
            let sim = Sim::new(1, heap.bytes.clone());
            assert_eq!(sim.run_one::<Evacuate>(batch.clone()), outside);
            batch.targets = vec![40];
            batch.sources[0].page = page;
            assert_eq!(sim.run_one::<Evacuate>(batch), outside);
            assert!(sim.bytes() == heap.bytes);
        }
    }

    /// Sources that are targets, or targets twice: the bytes are anybody's, and only those pages change.
    #[test]
    fn any_argument_ends_and_changes_its_targets_only() {
        for seed in 0..300 {
            let (heap, mut roll) = (Heap::new(seed, 6, 400), dice(seed + 1000));
            let mut batch = heap.batch(&[]);
            batch.targets = (0..roll(8)).map(|_| roll(PAGES) as u32).collect();
            for source in &mut batch.sources {
                source.page = roll(PAGES) as u32;
                source.live.iter_mut().for_each(|word| *word = (roll(1 << 30) as u64) << roll(35));
            }
            let at = roll(batch.layouts.len());
            batch.layouts[at] ^= 1 << roll(8);
            let sim = Sim::new(seed, heap.bytes.clone());
            let answer = sim.run_one::<Evacuate>(batch.clone()).unwrap();
            assert!(answer.target_sums.len() <= batch.targets.len());
            let after = sim.bytes();
            let is_target = |page: usize| batch.targets.contains(&(page as u32));
            let pages = after.chunks(PAGE_BYTES).zip(heap.bytes.chunks(PAGE_BYTES)).enumerate();
            pages.for_each(|(page, (after, before))| assert!(after == before || is_target(page), "page {page}"));
        }
    }
}
