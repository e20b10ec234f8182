//! `ff.trace`: reads objects of a collected heap and tells where their references lead, so that a
//! client marks objects without bringing their pages near (Mako, chapter 3: tracing at servers).
//!
//! The function keeps nothing between calls. The client has the marks, and so decides what is
//! looked at. An object takes some ten bytes of an answer, and each reference up to five; its page
//! would take 4 KiB. The function also follows references by itself, up to the number of objects
//! that the client allows, so a list is not read at one object per round trip.
//!
//! Where several servers share the pages, an entry and its object may lie at different ones. Then the
//! server of the entry tells where the object lies, and the client asks the other server about it.
//!
//! The client knows that its objects are not moved, and that the bytes here are those of its
//! snapshot or later. An entry that is younger than these bytes leads anywhere. So what is found
//! here counts only if the object names its entry, and if the client agrees.

use crate::{Fault, Function, Place};
use farfield_core::Deal;
use farfield_core::gc::{ENTRIES_PER_PAGE, EntryWord, LayoutTable, ObjectHeader, RefWord, TypeLayout};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::CARD_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Objects whose bytes are read side by side.
const ABREAST: usize = 64;
/// Bytes of an object that are read first; most objects are not longer.
const HEAD_BYTES: usize = 64;
/// Most references of an object that is looked at here.
const REFERENCES_MAX: u64 = 2048;
/// Most bytes of the objects and references of an answer.
const ROOM: usize = 48 * 1024;
/// Most bytes that an object takes in an answer, one that lies elsewhere, and a reference.
const OBJECT_ROOM: usize = 24;
const ELSEWHERE_ROOM: usize = 12;
const REFERENCE_ROOM: usize = 5;

/// Traces objects.
#[derive(Debug)]
pub struct Trace;

/// Objects to trace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Tracing {
    /// Layouts of all types, [encoded](LayoutTable::encode).
    pub layouts: Vec<u8>,
    /// Pages that lie at the server that is asked.
    pub share: PageShare,
    /// Far pages of the entry pages, in the order of the entries.
    pub entry_pages: Vec<PageRun>,
    /// The objects.
    pub objects: Vec<AskedObject>,
    /// Most objects to look at, those that references lead to included.
    pub most: u32,
}

/// Part of the pages that one of several servers has, to which they are [dealt](Deal) out. Everything
/// else here numbers pages as the client does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PageShare {
    /// Number of servers that share the pages.
    pub servers: u32,
    /// Number of this server among them.
    pub server: u32,
    /// Number of pages that are kept together.
    pub group_pages: u32,
}

impl PageShare {
    /// All pages, at one server.
    pub const ALL: PageShare = PageShare { servers: 1, server: 0, group_pages: 1 };
}

/// Object to trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AskedObject {
    /// Entry of the object.
    pub entry: u32,
    /// Where it lies, if the client knows. Else the entry must lie at the server.
    pub place: Option<ObjectPlace>,
}

/// Place at which an object begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ObjectPlace {
    /// Page.
    pub page: u32,
    /// Card of the page.
    pub card: u8,
}

/// Pages that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PageRun {
    /// First page of the region.
    pub first: u32,
    /// Number of pages.
    pub count: u32,
}

/// Objects that were looked at.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Traced {
    /// Number of [`Tracing::objects`] that were tried, in their order.
    pub tried: u32,
    /// The objects: first those asked for, in their order, without those that cannot be looked at
    /// here, then others that they lead to. An object cannot be looked at if it has too many
    /// references, if it lies elsewhere, or if nothing of this entry lies where it says.
    pub objects: Vec<TracedObject>,
    /// Objects whose entries lie here, and they do not: first those asked for without a place, in
    /// their order, then others that references lead to.
    pub elsewhere: Vec<ElsewhereObject>,
    /// Entries that the strong references lead to, object by object.
    pub references: Vec<u32>,
}

/// Object that was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TracedObject {
    /// Entry of the object.
    pub entry: u32,
    /// Page in which it begins.
    pub page: u32,
    /// Card of that page at which it begins.
    pub card: u8,
    /// Length in bytes.
    pub bytes: u32,
    /// Number of its references in [`Traced::references`].
    pub references: u32,
}

/// Object that lies at another server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ElsewhereObject {
    /// Entry of the object.
    pub entry: u32,
    /// Where it lies.
    pub place: ObjectPlace,
}

/// Answer for one object that was asked for, and that was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AskedAnswer<'a> {
    /// The object is the next one of [`Traced::objects`].
    Object,
    /// The object lies at another server.
    Elsewhere(&'a ElsewhereObject),
    /// The object cannot be looked at there: the client finds out why.
    Nothing,
}

/// An answer beside its question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answers<'a> {
    /// Answers for the first objects of the question. The others were not tried.
    pub asked: Vec<AskedAnswer<'a>>,
    /// Number of [`Traced::objects`] that were asked for: the first ones.
    pub objects: usize,
    /// Objects that lie elsewhere, and that the server has named unasked.
    pub elsewhere: &'a [ElsewhereObject],
}

impl Traced {
    /// Compares an answer with the objects that were asked for. The answer may be anything.
    pub fn answers(&self, asked: impl IntoIterator<Item = AskedObject>) -> Answers<'_> {
        let (mut objects, mut named) = (0, 0);
        let answer = |asked: AskedObject| {
            if self.objects.get(objects).is_some_and(|object| object.entry == asked.entry) {
                objects += 1;
                return AskedAnswer::Object;
            }
            // Who was asked for an object at its place names no other.
            match self.elsewhere.get(named).filter(|other| other.entry == asked.entry && asked.place.is_none()) {
                Some(other) => {
                    named += 1;
                    AskedAnswer::Elsewhere(other)
                }
                None => AskedAnswer::Nothing,
            }
        };
        let asked = asked.into_iter().take(self.tried as usize).map(answer).collect();
        Answers { asked, objects, elsewhere: self.elsewhere.get(named..).unwrap_or_default() }
    }

    /// Returns the objects, each with the entries that its references lead to.
    pub fn with_references(&self) -> impl Iterator<Item = (&TracedObject, &[u32])> {
        let mut left = self.references.as_slice();
        self.objects.iter().map(move |object| {
            let (of_object, rest) = left.split_at(left.len().min(object.references as usize));
            left = rest;
            (object, of_object)
        })
    }
}

impl Function for Trace {
    const NAME: &'static str = "ff.trace";
    const VERSION: u32 = 3;
    const ONLY_READS: bool = true;
    type Argument = Tracing;
    type Answer = Traced;

    async fn run<P: Place>(place: &P, tracing: Tracing) -> Result<Traced, Fault> {
        let mut traced = Traced::default();
        let Ok(layouts) = LayoutTable::decode(&tracing.layouts) else {
            return Ok(Traced { tried: tracing.objects.len() as u32, ..traced });
        };
        let pages = HeapPages::new(&tracing.entry_pages, tracing.share, place.region_bytes());
        let mut seen: HashSet<u32> = tracing.objects.iter().map(|asked| asked.entry).collect();
        let mut found: Vec<u32> = Vec::new();
        let (mut room, mut looked_at) = (ROOM, 0);
        // Those asked for come first, in their order; then what they lead to, the latest first.
        let mut asked = tracing.objects.iter().copied();
        let mut batch = Vec::with_capacity(ABREAST);
        let mut heads = Heads::default();
        loop {
            batch.clear();
            batch.extend(asked.by_ref().take(ABREAST));
            let is_asked = !batch.is_empty();
            if !is_asked {
                let left = (tracing.most as usize).saturating_sub(looked_at);
                let first = found.len().saturating_sub(left.min(ABREAST));
                batch.extend(found.drain(first..).rev().map(|entry| AskedObject { entry, place: None }));
            }
            if batch.is_empty() {
                return Ok(traced);
            }
            looked_at += batch.len();
            heads.read(place, &pages, &batch).await?;
            for (index, asked) in batch.iter().enumerate() {
                // An answer that may be full ends here: the client asks for the rest.
                if room < OBJECT_ROOM + REFERENCES_MAX as usize * REFERENCE_ROOM {
                    return Ok(traced);
                }
                traced.tried += u32::from(is_asked);
                let before = traced.references.len();
                if let Some(place) = heads.elsewhere(&pages, index, asked) {
                    room -= ELSEWHERE_ROOM;
                    traced.elsewhere.push(ElsewhereObject { entry: asked.entry, place });
                    continue;
                }
                match heads.object(place, &pages, &layouts, index, asked.entry, &mut traced.references).await? {
                    Some(object) => {
                        let references = traced.references.get(before..).unwrap_or_default();
                        room -= OBJECT_ROOM + references.len() * REFERENCE_ROOM;
                        let is_next = |next: &u32| pages.entry_offset(*next).is_some() && seen.insert(*next);
                        found.extend(references.iter().copied().filter(is_next));
                        traced.objects.push(object);
                    }
                    None => traced.references.truncate(before),
                }
            }
        }
    }
}

/// Pages of the heap, as far as this server has them.
struct HeapPages {
    /// First entry page of each run, and its far page.
    runs: Vec<(u64, PageRun)>,
    /// How pages are dealt out; `None` if what the client says makes no sense. Then none is here.
    deal: Option<Deal>,
    server: usize,
    region_bytes: u64,
}

impl HeapPages {
    fn new(runs: &[PageRun], share: PageShare, region_bytes: u64) -> HeapPages {
        let mut first = 0;
        let place = |run: &PageRun| {
            let at = first;
            first += u64::from(run.count);
            (at, *run)
        };
        let runs = runs.iter().map(place).collect();
        let deal = Deal::new(share.servers.into(), share.group_pages.into());
        HeapPages { runs, deal, server: share.server as usize, region_bytes }
    }

    /// Checks whether another server has this page.
    fn is_elsewhere(&self, page: u64) -> bool {
        self.deal.is_some_and(|deal| deal.place(page).0 != self.server)
    }

    /// Returns the offset of a page in the region; `None` if it does not lie there.
    fn offset(&self, page: u64) -> Option<u64> {
        let (server, local) = self.deal?.place(page);
        let offset = local * PAGE_BYTES as u64;
        (server == self.server && offset + PAGE_BYTES as u64 <= self.region_bytes).then_some(offset)
    }

    /// Returns the number of bytes from the beginning of a page on that follow each other here.
    fn bytes_from(&self, page: u64) -> u64 {
        match self.deal {
            Some(deal) if deal.members() > 1 => (deal.group_pages() - deal.within(page)) * PAGE_BYTES as u64,
            Some(_) => u64::MAX,
            None => 0,
        }
    }

    /// Returns the offset of an entry's word in the region; `None` if there is no such entry here.
    fn entry_offset(&self, entry: u32) -> Option<u64> {
        let number = u64::from(entry / ENTRIES_PER_PAGE);
        let after = self.runs.partition_point(|(first, _)| *first <= number);
        let (first, run) = self.runs.get(after.checked_sub(1)?)?;
        let within = Some(number - first).filter(|within| *within < u64::from(run.count))?;
        Some(self.offset(u64::from(run.first) + within)? + u64::from(entry % ENTRIES_PER_PAGE) * 8)
    }
}

/// First bytes of some objects.
#[derive(Default)]
struct Heads {
    offsets: Vec<u64>,
    words: Vec<[u8; 8]>,
    /// Where the objects lie.
    entries: Vec<EntryWord>,
    /// Offsets of their first pages; `None` for those that are not here.
    pages: Vec<Option<u64>>,
    /// Where the first bytes begin: at the object, or before it if its page ends too soon.
    begins: Vec<u64>,
    bytes: Vec<[u8; HEAD_BYTES]>,
}

impl Heads {
    /// Reads entries, and the first bytes of their objects.
    async fn read<P: Place>(&mut self, place: &P, pages: &HeapPages, asked: &[AskedObject]) -> Result<(), Fault> {
        self.offsets.clear();
        // An entry that does not exist, or is not needed, reads as the first word, which is no entry of an object's.
        let offset = |asked: &AskedObject| Some(asked.entry).filter(|_| asked.place.is_none());
        let offset = |asked: &AskedObject| offset(asked).and_then(|entry| pages.entry_offset(entry));
        self.offsets.extend(asked.iter().map(|asked| offset(asked).unwrap_or(0)));
        self.words.clear();
        self.words.resize(asked.len(), [0; 8]);
        if asked.iter().any(|asked| asked.place.is_none()) {
            place.read_many(&self.offsets, &mut self.words).await?;
        }
        let word = |(asked, word): (&AskedObject, &[u8; 8])| match asked.place {
            Some(ObjectPlace { page, card }) => EntryWord::new(page, card, 0),
            None if offset(asked).is_some() => EntryWord(u64::from_le_bytes(*word)),
            None => EntryWord::FRESH,
        };
        self.entries.clear();
        self.entries.extend(asked.iter().zip(&self.words).map(word));
        let page = |at: &EntryWord| pages.offset(at.page().into()).filter(|_| at.is_used());
        self.pages.clear();
        self.pages.extend(self.entries.iter().map(page));
        let begin = |(at, page): (&EntryWord, &Option<u64>)| {
            page.map_or(0, |page| page + (usize::from(at.card()) * CARD_BYTES).min(PAGE_BYTES - HEAD_BYTES) as u64)
        };
        self.begins.clear();
        self.begins.extend(self.entries.iter().zip(&self.pages).map(begin));
        self.bytes.clear();
        self.bytes.resize(asked.len(), [0; HEAD_BYTES]);
        place.read_many(&self.begins, &mut self.bytes).await
    }

    /// Returns where an object lies whose entry is here, if another server has that page.
    fn elsewhere(&self, pages: &HeapPages, index: usize, asked: &AskedObject) -> Option<ObjectPlace> {
        let at = self.entries.get(index).filter(|at| asked.place.is_none() && at.is_used())?;
        pages.is_elsewhere(at.page().into()).then(|| ObjectPlace { page: at.page(), card: at.card() })
    }

    /// Looks at the object of an entry that was read, and adds the entries that it leads to.
    /// `None` if it cannot be looked at here.
    async fn object<P: Place>(
        &self,
        place: &P,
        pages: &HeapPages,
        layouts: &LayoutTable,
        index: usize,
        entry: u32,
        references: &mut Vec<u32>,
    ) -> Result<Option<TracedObject>, Fault> {
        let (Some(at), Some(Some(page)), Some(begin), Some(head)) =
            (self.entries.get(index), self.pages.get(index), self.begins.get(index), self.bytes.get(index))
        else {
            return Ok(None);
        };
        let within_page = u64::from(at.card()) * CARD_BYTES as u64;
        let first = page + within_page;
        let known = usize::try_from(first.wrapping_sub(*begin)).ok().and_then(|skip| head.get(skip..)).unwrap_or(&[]);
        let word = |bytes: &[u8], offset: usize| Some(u64::from_le_bytes(*bytes.get(offset..)?.first_chunk::<8>()?));
        let header = word(known, 0).map(ObjectHeader).filter(|header| header.entry() == entry);
        let Some(layout) = header.and_then(|header| layouts.get(header.type_number())) else { return Ok(None) };
        let elements = if layout.has_tail() { word(known, TypeLayout::TAIL_OFFSETS.0) } else { Some(0) };
        let Some(elements) = elements else { return Ok(None) };
        let (count, bytes) = (layout.strong_count(elements), layout.object_bytes(elements));
        let Some(bytes) = bytes.and_then(|bytes| u32::try_from(bytes).ok()).filter(|_| count <= REFERENCES_MAX) else {
            return Ok(None);
        };
        let end = if count == 0 { 0 } else { layout.strong_offset(count - 1) as usize + 8 };
        let rest;
        // All of it lies in the region, and what follows its first page there is not another's.
        let room = pages.bytes_from(at.page().into()).min(pages.region_bytes - page) - within_page;
        let object = if end <= known.len() {
            known
        } else if end <= crate::RANGE_BYTES_MAX && end as u64 <= room {
            rest = place.read_range(first, end).await?;
            &rest
        } else {
            return Ok(None);
        };
        let before = references.len();
        for index in 0..count {
            let reference = word(object, layout.strong_offset(index) as usize).map(RefWord);
            references.extend(reference.and_then(RefWord::entry));
        }
        let references = (references.len() - before) as u32;
        Ok(Some(TracedObject { entry, page: at.page(), card: at.card(), bytes, references }))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against references that are not told, or are another object's, and against bytes of anybody that are believed.
    use super::*;
    use crate::Sim;
    use farfield_core::gc::TailLayout;
    use farfield_core::heap::{FrameId, SlotHint};
    use std::collections::BTreeMap;

    const PAGES: usize = 96;
    /// Entry pages lie in two runs.
    const ENTRY_PAGES: [PageRun; 2] = [PageRun { first: 3, count: 1 }, PageRun { first: 10, count: 2 }];
    const NODE: u32 = 0;
    const ARRAY: u32 = 1;

    /// A region with objects, and where they lead.
    struct Graph {
        bytes: Vec<u8>,
        leads_to: BTreeMap<u32, Vec<u32>>,
        /// Where the next object goes.
        next: usize,
    }

    fn layouts() -> LayoutTable {
        let mut layouts = LayoutTable::default();
        layouts.add(TypeLayout::new(24, vec![8, 16], vec![], None).unwrap()).unwrap();
        let tail = TailLayout::new(16, vec![8], vec![0]).unwrap();
        layouts.add(TypeLayout::new(16, vec![], vec![], Some(tail)).unwrap()).unwrap();
        layouts
    }

    impl Graph {
        fn new() -> Graph {
            Graph { bytes: vec![0; PAGES * PAGE_BYTES], leads_to: BTreeMap::new(), next: 20 * PAGE_BYTES }
        }

        fn put(&mut self, offset: usize, word: u64) {
            self.bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        }

        fn set_entry(&mut self, entry: u32, word: EntryWord) {
            let page = [3, 10, 11][(entry / ENTRIES_PER_PAGE) as usize];
            self.put(page * PAGE_BYTES + (entry % ENTRIES_PER_PAGE) as usize * 8, word.0);
        }

        /// Adds an object; `None` stands for a null reference.
        fn add(&mut self, entry: u32, type_number: u32, references: &[Option<u32>]) {
            let bytes = if type_number == NODE { 24 } else { 16 + 16 * references.len() };
            let left = PAGE_BYTES - self.next % PAGE_BYTES;
            if left < bytes && bytes <= PAGE_BYTES {
                self.next += left;
            }
            let at = self.next;
            self.next = (at + bytes).next_multiple_of(CARD_BYTES);
            self.set_entry(entry, EntryWord::new((at / PAGE_BYTES) as u32, (at % PAGE_BYTES / CARD_BYTES) as u8, 3));
            self.put(at, ObjectHeader::new(entry, type_number).0);
            let (first, stride) = if type_number == NODE { (8, 8) } else { (24, 16) };
            if type_number == ARRAY {
                self.put(at + 8, references.len() as u64);
            }
            for (index, reference) in references.iter().enumerate() {
                let word = reference.map_or(RefWord::NULL, |to| RefWord::new(to, SlotHint::new(FrameId(7), 1)));
                self.put(at + first + index * stride, word.0);
            }
            self.leads_to.insert(entry, references.iter().flatten().copied().collect());
        }

        fn trace(&self, entries: &[u32], most: u32) -> Traced {
            let traced = Sim::new(1, self.bytes.clone()).run_one::<Trace>(tracing(entries, most)).unwrap();
            assert_eq!(traced.elsewhere, []);
            traced
        }

        /// The regions of servers that share the pages.
        fn dealt(&self, deal: Deal) -> Vec<Vec<u8>> {
            let mut regions = vec![Vec::new(); deal.members() as usize];
            for page in 0..(PAGES as u64).next_multiple_of(deal.members() * deal.group_pages()) {
                let bytes = self.bytes.chunks(PAGE_BYTES).nth(page as usize).unwrap_or(&[0; PAGE_BYTES]);
                regions[deal.place(page).0].extend_from_slice(bytes);
            }
            regions
        }

        /// Each object of an answer leads where it should. Returns their entries.
        fn check(&self, traced: &Traced) -> Vec<u32> {
            let mut references = traced.references.iter().copied();
            for object in &traced.objects {
                let found: Vec<u32> = references.by_ref().take(object.references as usize).collect();
                assert_eq!(found, self.leads_to[&object.entry], "{object:?}");
                let at = object.page as usize * PAGE_BYTES + usize::from(object.card) * CARD_BYTES;
                let header = ObjectHeader(u64::from_le_bytes(*self.bytes[at..].first_chunk().unwrap()));
                assert_eq!(header.entry(), object.entry);
            }
            assert_eq!(references.next(), None);
            traced.objects.iter().map(|object| object.entry).collect()
        }
    }

    fn tracing(entries: &[u32], most: u32) -> Tracing {
        let objects = entries.iter().map(|entry| AskedObject { entry: *entry, place: None }).collect();
        let (layouts, entry_pages) = (layouts().encode(), ENTRY_PAGES.to_vec());
        Tracing { layouts, share: PageShare::ALL, entry_pages, objects, most }
    }

    #[test]
    fn any_answer_is_compared_with_its_question() {
        let place = ObjectPlace { page: 9, card: 1 };
        let object = |entry, references| TracedObject { entry, page: 1, card: 2, bytes: 32, references };
        let other = |entry| ElsewhereObject { entry, place };
        let asked = |entry, place| AskedObject { entry, place };
        let question = [asked(1, None), asked(2, None), asked(3, Some(place)), asked(4, None), asked(5, None)];
        let traced = Traced {
            tried: 4,
            objects: vec![object(1, 2), object(4, 1), object(8, 7)],
            elsewhere: vec![other(2), other(3), other(9)],
            references: vec![11, 12, 13, 14],
        };
        let Answers { asked: answers, objects, elsewhere } = traced.answers(question);
        let named = AskedAnswer::Elsewhere(&traced.elsewhere[0]);
        // 3 was asked for at its place, so that nobody names another one is what counts.
        assert_eq!(answers, [AskedAnswer::Object, named, AskedAnswer::Nothing, AskedAnswer::Object]);
        assert_eq!((objects, elsewhere), (2, &traced.elsewhere[1..]));
        let references: Vec<_> =
            traced.with_references().map(|(object, references)| (object.entry, references)).collect();
        // There are fewer than the last object says.
        assert_eq!(references, [(1, &[11, 12][..]), (4, &[13]), (8, &[14])]);
        let nothing = Traced { tried: u32::MAX, ..Traced::default() };
        assert_eq!(nothing.answers(question).asked, [AskedAnswer::Nothing; 5]);
        assert_eq!(Traced::default().answers(question).asked, []);
    }

    /// A list whose objects, and entries, lie at all servers: each is found by asking the server of the entry, and then
    /// the one that this names.
    #[test]
    fn servers_that_share_the_pages_name_each_other() {
        let mut graph = Graph::new();
        for entry in 1..1400u32 {
            graph.add(entry, NODE, &[Some(entry + 1), Some(entry * 7 % 1400 + 1)]);
        }
        graph.add(1400, NODE, &[None, Some(2)]);
        let long: Vec<_> = (0..600).map(|index| Some(1 + index)).collect();
        graph.add(1401, ARRAY, &long);
        let place_of = |entry: u32| {
            let object = graph.trace(&[entry], 0).objects[0];
            ObjectPlace { page: object.page, card: object.card }
        };
        for (servers, group_pages) in [(2, 1), (2, 16), (3, 1), (3, 4), (5, 2)] {
            let deal = Deal::new(servers.into(), group_pages.into()).unwrap();
            let regions = graph.dealt(deal);
            let ask = |server: usize, asked: AskedObject, most: u32| {
                let share = PageShare { servers, server: server as u32, group_pages };
                let tracing = Tracing { share, objects: vec![asked], ..tracing(&[], most) };
                Sim::new(1, regions[server].clone()).run_one::<Trace>(tracing).unwrap()
            };
            for (entry, most) in (1..1400).step_by(57).flat_map(|entry| [(entry, 0), (entry, 50)]) {
                let entry_page = [3, 10, 11][(entry / ENTRIES_PER_PAGE) as usize];
                let (of_entry, place) = (deal.place(entry_page).0, place_of(entry));
                let of_object = deal.place(place.page.into()).0;
                for server in 0..servers as usize {
                    let traced = ask(server, AskedObject { entry, place: None }, most);
                    let found = graph.check(&traced);
                    let is_here = server == of_entry && server == of_object;
                    assert_eq!((traced.tried, found.first() == Some(&entry)), (1, is_here));
                    let named = traced.elsewhere.first().filter(|it| it.entry == entry).map(|it| it.place);
                    assert_eq!(named, (server == of_entry && server != of_object).then_some(place));
                    // What is named unasked is where the server says.
                    for it in &traced.elsewhere {
                        assert!(it.place == place_of(it.entry) && deal.place(it.place.page.into()).0 != server);
                    }
                    let traced = ask(server, AskedObject { entry, place: Some(place) }, most);
                    assert_eq!(graph.check(&traced).first() == Some(&entry), server == of_object);
                    assert!(traced.elsewhere.iter().all(|it| it.entry != entry));
                }
            }
            // It has several pages. A server that lacks one of them does not look at it.
            let place = place_of(1401);
            let server = deal.place(place.page.into()).0;
            let traced = ask(server, AskedObject { entry: 1401, place: Some(place) }, 0);
            let pages = (usize::from(place.card) * CARD_BYTES + 16 + 16 * long.len()).div_ceil(PAGE_BYTES) as u64;
            let is_whole = deal.within(place.page.into()) + pages <= group_pages.into();
            assert_eq!(graph.check(&traced), Vec::from_iter(is_whole.then_some(1401)), "{servers} by {group_pages}");
        }
        // Shares that make no sense have no page.
        for (servers, server, group_pages) in
            [(0, 0, 1), (2, 0, 3), (2, 2, 1), (1, u32::MAX, 1), (u32::MAX, 0, 1 << 31)]
        {
            let share = PageShare { servers, server, group_pages };
            let objects = vec![
                AskedObject { entry: 900, place: None },
                AskedObject { entry: 900, place: Some(ObjectPlace { page: u32::MAX, card: 255 }) },
            ];
            let traced =
                Sim::new(1, graph.bytes.clone()).run_one::<Trace>(Tracing { share, objects, ..tracing(&[], 9) });
            let traced = traced.unwrap();
            assert!(traced.tried == 2 && traced.objects.iter().all(|object| servers == u32::MAX && object.entry > 0));
        }
    }

    #[test]
    fn objects_lead_where_they_did_wherever_they_lie() {
        let mut graph = Graph::new();
        // In all three entry pages, with objects up to the last card of a page.
        for number in 0..400u32 {
            graph.add(1 + number * 3, NODE, &[Some((number * 7 % 400) * 3 + 1), (number % 3 > 0).then_some(4)]);
        }
        graph.add(1500, ARRAY, &[Some(1), None, Some(7), Some(1)]);
        graph.add(1501, ARRAY, &[]);
        let long: Vec<_> = (0..2000).map(|index| Some(1 + index % 100 * 3)).collect();
        graph.add(1502, ARRAY, &long);
        let asked: Vec<u32> = graph.leads_to.keys().copied().collect();
        let traced = graph.trace(&asked, 0);
        assert_eq!((graph.check(&traced), traced.tried as usize), (asked.clone(), asked.len()));
        assert_eq!(traced.objects.last().map(|object| object.bytes), Some(16 + 16 * 2000));
    }

    #[test]
    fn a_list_is_followed_as_far_as_the_client_allows() {
        let mut graph = Graph::new();
        (1..1000u32).for_each(|entry| graph.add(entry, NODE, &[Some(entry + 1), Some(1)]));
        graph.add(1000, NODE, &[None, Some(2)]);
        for (most, found) in [(0, 1), (1, 1), (2, 2), (100, 100), (5000, 1000)] {
            let traced = graph.trace(&[1], most);
            assert_eq!(graph.check(&traced), Vec::from_iter(1..=found), "{most}");
            assert_eq!(traced.tried, 1);
        }
    }

    #[test]
    fn answers_end_before_they_are_too_long() {
        let mut graph = Graph::new();
        let full: Vec<_> = (0..100).map(|index| Some(1 + index)).collect();
        (1..100u32).for_each(|entry| graph.add(entry, ARRAY, &full));
        let asked: Vec<u32> = (1..100).collect();
        let traced = graph.trace(&asked, 1000);
        assert!(traced.tried > 50 && traced.tried < 99, "{}", traced.tried);
        assert_eq!(graph.check(&traced), asked[..traced.tried as usize]);
        assert!(postcard::to_allocvec(&traced).unwrap().len() <= ROOM);
        let rest = graph.trace(&asked[traced.tried as usize..], 0);
        assert_eq!(graph.check(&rest), asked[traced.tried as usize..]);
    }

    #[test]
    fn what_is_no_object_of_its_entry_is_left_out() {
        let mut graph = Graph::new();
        let too_long: Vec<_> = vec![Some(1); REFERENCES_MAX as usize + 1];
        graph.add(9, ARRAY, &too_long);
        graph.add(1, NODE, &[Some(2), Some(3)]);
        graph.add(2, NODE, &[Some(600), Some(5000)]);
        graph.add(4, NODE, &[None, None]);
        // 3 was never used; 5 leads to another's object, 6 out of the region, 7 to a number of no type, 8 to the end of a page.
        let at_4 = graph.trace(&[4], 0).objects[0];
        graph.set_entry(5, EntryWord::new(at_4.page, at_4.card, 0));
        graph.set_entry(6, EntryWord::new(u32::MAX, 255, 0));
        graph.set_entry(7, EntryWord::new(40, 0, 0));
        graph.put(40 * PAGE_BYTES, ObjectHeader::new(7, 2).0);
        graph.set_entry(8, EntryWord::new(PAGES as u32 - 1, 255, 0));
        graph.put(PAGES * PAGE_BYTES - CARD_BYTES, ObjectHeader::new(8, NODE).0);
        let traced = graph.trace(&[1, 3, 5, 6, 7, 8, 9, 0, 4], 100);
        assert_eq!((graph.check(&traced), traced.tried), (vec![1, 4, 2], 9));
        let tracing = Tracing { layouts: vec![1, 2, 3], ..tracing(&[1, 2], 9) };
        let traced = Sim::new(1, graph.bytes).run_one::<Trace>(tracing).unwrap();
        assert_eq!(traced, Traced { tried: 2, ..Traced::default() });
    }
}
