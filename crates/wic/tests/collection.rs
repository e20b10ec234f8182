//! A simulation of a client that collects a heap, and of three servers that share its pages and run the real functions. A seed decides
//! what happens next: a step of the program or of the collector, an eviction, a message that arrives, or a death.
//!
//! Danger: a live object that is freed, and a collection that ends before all is traced, because an answer is late, comes twice, comes
//! in another order, or from a server that is not what it was. The program's objects are compared with a model of the graph each time
//! they are used.
//!
//! Calls and answers are delayed and reordered at will. Answers, and calls that only read, arrive twice now and then; any message can
//! get lost. A call that writes is run once at most, as connections guarantee, but perhaps long after the client has given it up.
//! Servers can be deaf to calls, lose all their memory, or die. What the client does is written again here, with what it shares with
//! the product: the functions, the comparison of answers with questions, words, layouts and the order in which pages are filled. Each
//! of its rules can be switched off, and then a seed finds what goes wrong.

use farfield_core::gc::{
    ENTRIES_PER_PAGE, EntryWord, LayoutTable, ObjectHeader, PageFill, PageOccupancy, RefWord, TypeLayout,
};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, FrameId, SlotHint};
use farfield_core::{Deal, checksum};
use farfield_wic::Sim;
use farfield_wic::evacuate::{Evacuate, Evacuated, EvacuationBatch, SourcePage};
use farfield_wic::trace::{
    AskedAnswer, AskedObject, ElsewhereObject, ObjectPlace, PageRun, PageShare, Trace, Traced, Tracing,
};
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};

const SERVERS: usize = 3;
/// Pages that are kept together.
const GROUP_PAGES: u32 = 2;
const PAGES: u32 = 42;
/// One at each server. Objects lie behind them.
const ENTRY_PAGES: [u32; 3] = [0, 2, 4];
const FIRST_PAGE: u32 = 6;
/// Entries of each page that the heap uses, so that all pages are used.
const ENTRIES_USED: u32 = 50;
/// Objects that a page is filled with at most, so that there are many pages.
const OBJECTS_PER_PAGE: u32 = 8;
const NEAR_PAGES: usize = 5;
const OBJECT_BYTES: usize = 32;
const OBJECT_CARDS: u32 = (OBJECT_BYTES / CARD_BYTES) as u32;
const CALLS: usize = 3;
const ASKED_MAX: usize = 6;
/// Turns after which a call is given up, at least.
const CALL_TURNS: u64 = 25;

/// Rule of the client that a test switches off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// Marking ends when no call is under way.
    AwaitAnswers,
    /// Marking ends when nothing waits for a far page.
    LookAtWaiting,
    /// Whoever removes a reference logs where it led.
    LogRemoved,
    /// What is near is written before servers trace.
    FlushFirst,
    /// An answer counts once, and only while its call is under way.
    DropLateAnswers,
    /// What a server has not found is looked at here.
    LookAtMissing,
    /// An object that lies at another server is looked at.
    LookElsewhere,
    /// Objects of the snapshot's future are not taken for garbage.
    KeepYoung,
    /// A page counts as moved only if it is far, with the checksum that the server has read.
    CompareSums,
    /// Pages that a call may still write are not used again.
    LosePages,
}

const RULES: [Rule; 10] = [
    Rule::AwaitAnswers,
    Rule::LookAtWaiting,
    Rule::LogRemoved,
    Rule::FlushFirst,
    Rule::DropLateAnswers,
    Rule::LookAtMissing,
    Rule::LookElsewhere,
    Rule::KeepYoung,
    Rule::CompareSums,
    Rule::LosePages,
];

/// Why something could not be done.
enum Stop {
    /// A server has died, or has lost what it had.
    Lost,
    /// What must never happen.
    Broken(String),
}

impl core::fmt::Display for Stop {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Stop::Lost => f.write_str("a page was lost, and no server has failed"),
            Stop::Broken(what) => f.write_str(what),
        }
    }
}

fn broken<T>(what: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Broken(what.into()))
}

/// What has happened in runs.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    commits: u64,
    given_up: u64,
    freed: u64,
    traced_at_servers: u64,
    named_elsewhere: u64,
    late_answers: u64,
    calls_given_up: u64,
    moved: u64,
    sources_changed: u64,
    lost_heaps: u64,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.commits += other.commits;
        self.given_up += other.given_up;
        self.freed += other.freed;
        self.traced_at_servers += other.traced_at_servers;
        self.named_elsewhere += other.named_elsewhere;
        self.late_answers += other.late_answers;
        self.calls_given_up += other.calls_given_up;
        self.moved += other.moved;
        self.sources_changed += other.sources_changed;
        self.lost_heaps += other.lost_heaps;
    }
}

/// Object of the model. It is known by its entry as long as it is not freed.
#[derive(Clone, Debug)]
struct Node {
    id: u64,
    leads_to: [Option<u32>; 2],
}

/// Page of the client.
#[derive(Clone, Default)]
struct Page {
    is_made: bool,
    near: Option<Vec<u8>>,
    /// Checksum of the far copy, if there is one.
    sum: Option<u64>,
    /// Where objects begin, as the last collection has found them, and those that were made since.
    objects: PageOccupancy,
    /// The page is filled since the snapshot of the cycle that runs.
    is_young: bool,
    /// A call may still write it.
    is_lost: bool,
}

#[derive(Clone)]
enum Call {
    Trace(Tracing),
    Evacuate(EvacuationBatch),
}

#[derive(Clone)]
enum Answer {
    Traced(Traced),
    Evacuated(Evacuated),
}

#[derive(Clone)]
enum Message {
    Call { server: usize, id: u64, call: Call },
    Answer { id: u64, answer: Answer },
}

struct Server {
    bytes: Vec<u8>,
    is_alive: bool,
    is_deaf: bool,
}

/// Call for objects that is under way, or was.
#[derive(Clone)]
struct TraceCall {
    server: usize,
    until: u64,
    asked: Vec<AskedObject>,
}

/// Call for the objects of sparse pages that is under way.
#[derive(Clone)]
struct EvacuateCall {
    id: u64,
    until: u64,
    sources: Vec<u32>,
    pages: Vec<SourcePage>,
    targets: Vec<u32>,
}

/// Cycle that marks.
#[derive(Default)]
struct Cycle {
    old: BTreeSet<u32>,
    marked: BTreeSet<u32>,
    /// What must be marked in the end.
    reachable: BTreeSet<u32>,
    stack: Vec<u32>,
    waiting: BTreeMap<u32, Option<ObjectPlace>>,
    found: BTreeMap<u32, PageOccupancy>,
    calls: BTreeMap<u64, TraceCall>,
    is_flushed: bool,
    is_without_servers: bool,
}

struct World {
    rule: Option<Rule>,
    random: Rng,
    deal: Deal,
    servers: Vec<Server>,
    /// Messages under way, and the turns in which they can arrive.
    network: Vec<(u64, Message)>,
    pages: Vec<Page>,
    used: BTreeSet<u32>,
    open: Option<(u32, PageFill)>,
    roots: BTreeSet<u32>,
    model: BTreeMap<u32, Node>,
    next_id: u64,
    next_call: u64,
    turn: u64,
    cycle: Option<Cycle>,
    evacuation: Option<EvacuateCall>,
    log: Vec<u32>,
    /// Calls that were answered or given up, for a client that believes late answers.
    past: BTreeMap<u64, TraceCall>,
    counts: Counts,
}

fn layouts() -> LayoutTable {
    let mut layouts = LayoutTable::default();
    layouts.add(TypeLayout::new(OBJECT_BYTES as u32, vec![8, 16], vec![], None).unwrap()).unwrap();
    layouts
}

fn entry_place(entry: u32) -> (u32, usize) {
    (ENTRY_PAGES[(entry / ENTRIES_PER_PAGE) as usize], (entry % ENTRIES_PER_PAGE) as usize * 8)
}

impl World {
    fn new(seed: u64, rule: Option<Rule>) -> World {
        let deal = Deal::new(SERVERS as u64, GROUP_PAGES.into()).unwrap();
        let bytes = vec![0; PAGES as usize / SERVERS * PAGE_BYTES];
        let server = || Server { bytes: bytes.clone(), is_alive: true, is_deaf: false };
        let mut pages = vec![Page::default(); PAGES as usize];
        for page in ENTRY_PAGES {
            pages[page as usize] = Page { is_made: true, near: Some(vec![0; PAGE_BYTES]), ..Page::default() };
        }
        World {
            rule,
            random: Rng::with_seed(seed),
            deal,
            servers: (0..SERVERS).map(|_| server()).collect(),
            network: Vec::new(),
            pages,
            used: BTreeSet::new(),
            open: None,
            roots: BTreeSet::new(),
            model: BTreeMap::new(),
            next_id: 1,
            next_call: 0,
            turn: 0,
            cycle: None,
            evacuation: None,
            log: Vec::new(),
            past: BTreeMap::new(),
            counts: Counts::default(),
        }
    }

    fn is_off(&self, rule: Rule) -> bool {
        self.rule == Some(rule)
    }

    fn one_in(&mut self, many: usize) -> bool {
        self.random.usize(..many) == 0
    }

    // Near and far memory.

    fn server_of(&self, page: u32) -> usize {
        self.deal.place(page.into()).0
    }

    /// The bytes of a page at its server.
    fn far_bytes(&mut self, page: u32) -> Result<&mut [u8], Stop> {
        let (server, local) = self.deal.place(page.into());
        let Server { bytes, is_alive, .. } = &mut self.servers[server];
        let at = local as usize * PAGE_BYTES;
        if *is_alive { Ok(&mut bytes[at..at + PAGE_BYTES]) } else { Err(Stop::Lost) }
    }

    fn bring(&mut self, page: u32) -> Result<(), Stop> {
        if !self.pages[page as usize].is_made {
            return broken(format!("page {page} is used and was given back"));
        }
        if self.pages[page as usize].near.is_none() {
            let bytes = self.far_bytes(page)?.to_vec();
            if self.pages[page as usize].sum != Some(checksum(&bytes)) {
                // Nobody but a server that has lost its memory answers so.
                return if self.counts.lost_heaps == 0 { broken("a page is another one") } else { Err(Stop::Lost) };
            }
            self.pages[page as usize].near = Some(bytes);
        }
        Ok(())
    }

    fn word(&mut self, page: u32, offset: usize) -> Result<u64, Stop> {
        self.bring(page)?;
        let near = self.pages[page as usize].near.as_ref().expect("it was just brought");
        Ok(u64::from_le_bytes(*near[offset..].first_chunk().unwrap()))
    }

    fn set_word(&mut self, page: u32, offset: usize, word: u64) -> Result<(), Stop> {
        self.bring(page)?;
        let near = self.pages[page as usize].near.as_mut().expect("it was just brought");
        near[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        Ok(())
    }

    /// Writes a page that is near, if it differs from its far copy.
    fn write_back(&mut self, page: u32) -> Result<(), Stop> {
        let Some(near) = self.pages[page as usize].near.clone() else { return Ok(()) };
        let sum = checksum(&near);
        if self.pages[page as usize].sum != Some(sum) {
            self.far_bytes(page)?.copy_from_slice(&near);
            self.pages[page as usize].sum = Some(sum);
        }
        Ok(())
    }

    fn near_pages(&self) -> Vec<u32> {
        (0..PAGES).filter(|page| self.pages[*page as usize].near.is_some()).collect()
    }

    fn evict(&mut self) -> Result<(), Stop> {
        let near = self.near_pages();
        if near.len() > NEAR_PAGES || !near.is_empty() && self.one_in(3) {
            let page = near[self.random.usize(..near.len())];
            self.write_back(page)?;
            self.pages[page as usize].near = None;
        }
        Ok(())
    }

    /// Takes a page that nobody has, at this server if one is named.
    fn take_page(&mut self, server: Option<usize>) -> Option<u32> {
        let is_free = |page: &u32| {
            let Page { is_made, is_lost, .. } = &self.pages[*page as usize];
            !is_made && !is_lost && server.is_none_or(|server| self.server_of(*page) == server)
        };
        let free: Vec<u32> = (FIRST_PAGE..PAGES).filter(is_free).collect();
        (!free.is_empty()).then(|| free[self.random.usize(..free.len())])
    }

    // The program.

    fn place_of(&mut self, entry: u32) -> Result<ObjectPlace, Stop> {
        let (page, offset) = entry_place(entry);
        let at = EntryWord(self.word(page, offset)?);
        if !at.is_used() || at.page() < FIRST_PAGE || at.page() >= PAGES {
            return broken(format!("entry {entry} leads nowhere"));
        }
        Ok(ObjectPlace { page: at.page(), card: at.card() })
    }

    fn object_word(&mut self, at: ObjectPlace, index: usize) -> Result<u64, Stop> {
        self.word(at.page, usize::from(at.card) * CARD_BYTES + index * 8)
    }

    /// Uses an object, which must be what the model says.
    fn check(&mut self, entry: u32) -> Result<ObjectPlace, Stop> {
        let Some(node) = self.model.get(&entry).cloned() else { return broken(format!("entry {entry} was freed")) };
        let at = self.place_of(entry)?;
        let words: [Result<u64, Stop>; 4] = core::array::from_fn(|index| self.object_word(at, index));
        let [header, one, two, id] = words;
        let found = (ObjectHeader(header?).entry(), RefWord(one?).entry(), RefWord(two?).entry(), id?);
        if found != (entry, node.leads_to[0], node.leads_to[1], node.id) {
            return broken(format!("{found:?} instead of entry {entry}, {node:?}"));
        }
        Ok(at)
    }

    fn reachable(&self) -> BTreeSet<u32> {
        let mut found: BTreeSet<u32> = self.roots.clone();
        let mut stack: Vec<u32> = found.iter().copied().collect();
        while let Some(entry) = stack.pop() {
            let next = self.model.get(&entry).map_or([None; 2], |node| node.leads_to);
            stack.extend(next.into_iter().flatten().filter(|next| found.insert(*next)));
        }
        found
    }

    /// Follows references from a root.
    fn walk(&mut self) -> Result<Option<(u32, ObjectPlace)>, Stop> {
        let Some(root) = self.random.choice(self.roots.iter().copied().collect::<Vec<_>>()) else { return Ok(None) };
        let (mut entry, mut at) = (root, self.check(root)?);
        for _ in 0..self.random.usize(..5) {
            if let Some(next) = self.model[&entry].leads_to[self.random.usize(..2)] {
                (entry, at) = (next, self.check(next)?);
            }
        }
        Ok(Some((entry, at)))
    }

    fn store(&mut self, entry: u32, at: ObjectPlace, slot: usize, to: Option<u32>) -> Result<(), Stop> {
        let before = self.model[&entry].leads_to[slot];
        if let (Some(cycle), Some(before)) = (&mut self.cycle, before)
            && self.rule != Some(Rule::LogRemoved)
            && cycle.old.contains(&before)
            && cycle.marked.insert(before)
        {
            self.log.push(before);
        }
        let word = to.map_or(RefWord::NULL, |to| RefWord::new(to, SlotHint::new(FrameId(1), 1)));
        self.set_word(at.page, usize::from(at.card) * CARD_BYTES + 8 + slot * 8, word.0)?;
        self.model.get_mut(&entry).expect("it lives").leads_to[slot] = to;
        Ok(())
    }

    /// Makes an object that leads nowhere. `None` if there is no room.
    fn alloc(&mut self) -> Result<Option<u32>, Stop> {
        let entries = (0..3).flat_map(|page| (1..=ENTRIES_USED).map(move |entry| page * ENTRIES_PER_PAGE + entry));
        let free = entries.filter(|entry| !self.used.contains(entry));
        let Some(entry) = self.random.choice(free.collect::<Vec<_>>()) else { return Ok(None) };
        if self.open.is_none_or(|(page, fill)| {
            fill.next(OBJECT_CARDS).is_none() || self.pages[page as usize].objects.count() >= OBJECTS_PER_PAGE
        }) {
            let Some(page) = self.take_page(None) else { return Ok(None) };
            let near = Some(vec![0; PAGE_BYTES]);
            self.pages[page as usize] = Page { is_made: true, near, is_young: self.cycle.is_some(), ..Page::default() };
            self.open = Some((page, PageFill::default()));
        }
        let (page, mut fill) = self.open.expect("it was just opened");
        let card = fill.next(OBJECT_CARDS).expect("it has room");
        fill.insert(OBJECT_CARDS);
        let (entry_page, offset) = entry_place(entry);
        let before = EntryWord(self.word(entry_page, offset)?);
        let Some(at) = before.next(page, card, 0) else { return Ok(None) };
        let first = usize::from(card) * CARD_BYTES;
        let words = [ObjectHeader::new(entry, 0).0, RefWord::NULL.0, RefWord::NULL.0, self.next_id];
        for (index, word) in words.into_iter().enumerate() {
            self.set_word(page, first + index * 8, word)?;
        }
        self.set_word(entry_page, offset, at.0)?;
        self.open = Some((page, fill));
        self.pages[page as usize].objects.insert(card);
        self.used.insert(entry);
        self.model.insert(entry, Node { id: self.next_id, leads_to: [None; 2] });
        self.next_id += 1;
        Ok(Some(entry))
    }

    /// One step of the program, from one safepoint to the next.
    fn mutate(&mut self) -> Result<(), Stop> {
        let slot = self.random.usize(..2);
        match (self.walk()?, self.random.usize(..10)) {
            (None, _) | (_, 0) if self.roots.len() < 6 => {
                if let Some(entry) = self.alloc()? {
                    self.roots.insert(entry);
                }
            }
            (Some((entry, at)), 1..=4) => {
                if let Some(new) = self.alloc()? {
                    // What was there moves into the new object: nothing else leads to it.
                    let before = self.model[&entry].leads_to[slot];
                    let new_at = self.check(new)?;
                    self.store(new, new_at, 0, before)?;
                    self.store(entry, at, slot, Some(new))?;
                }
            }
            (Some((entry, at)), 5..=6) => {
                // A reference moves from one object to another.
                if let Some((to, to_at)) = self.walk()? {
                    let moved = self.model[&entry].leads_to[slot];
                    self.store(to, to_at, 1 - slot, moved)?;
                    self.store(entry, at, slot, None)?;
                }
            }
            (Some((entry, _)), 7) => {
                self.roots.insert(entry);
            }
            (Some((entry, at)), 8) => self.store(entry, at, slot, None)?,
            _ if self.roots.len() > 2 => {
                let root = self.random.choice(self.roots.iter().copied().collect::<Vec<_>>()).expect("there are some");
                self.roots.remove(&root);
            }
            _ => {}
        }
        Ok(())
    }

    // The network.

    fn send(&mut self, message: Message) {
        if self.one_in(40) {
            return;
        }
        let is_repeatable = matches!(message, Message::Answer { .. } | Message::Call { call: Call::Trace(_), .. });
        let copies = if is_repeatable && self.one_in(6) { 2 } else { 1 };
        for _ in 0..copies {
            let delay = if self.one_in(6) { self.random.u64(..400) } else { self.random.u64(..12) };
            self.network.push((self.turn + delay, message.clone()));
        }
    }

    fn call(&mut self, server: usize, call: Call) -> u64 {
        self.next_call += 1;
        self.send(Message::Call { server, id: self.next_call, call });
        self.next_call
    }

    /// A message arrives, whichever it is.
    fn deliver(&mut self) -> Result<(), Stop> {
        let here = (0..self.network.len()).filter(|index| self.network[*index].0 <= self.turn);
        let Some(index) = self.random.choice(here.collect::<Vec<_>>()) else { return Ok(()) };
        match self.network.swap_remove(index).1 {
            Message::Call { server, id, call } => self.serve(server, id, call),
            Message::Answer { id, answer: Answer::Traced(traced) } => self.take_traced(id, &traced),
            Message::Answer { id, answer: Answer::Evacuated(evacuated) } => self.take_evacuated(id, &evacuated),
        }
    }

    fn serve(&mut self, server: usize, id: u64, call: Call) -> Result<(), Stop> {
        let Server { bytes, is_alive, is_deaf } = &mut self.servers[server];
        if !*is_alive || *is_deaf {
            return Ok(());
        }
        let sim = Sim::new(id, core::mem::take(bytes));
        let answer = match call {
            Call::Trace(tracing) => sim.run_one::<Trace>(tracing).map(Answer::Traced),
            Call::Evacuate(batch) => sim.run_one::<Evacuate>(batch).map(Answer::Evacuated),
        };
        *bytes = sim.bytes();
        if let Ok(answer) = answer {
            self.send(Message::Answer { id, answer });
        }
        Ok(())
    }

    // The collector.

    fn begin_cycle(&mut self) {
        for page in &mut self.pages {
            page.is_young = false;
        }
        // Pages of the snapshot are not filled any more.
        self.open = None;
        self.log.clear();
        let (old, roots) = (self.used.clone(), self.roots.clone());
        let reachable = self.reachable();
        let stack = roots.iter().copied().collect();
        self.cycle = Some(Cycle { old, marked: roots, reachable, stack, ..Cycle::default() });
    }

    fn cycle(&mut self) -> &mut Cycle {
        self.cycle.as_mut().expect("a cycle marks")
    }

    fn mark(&mut self, entry: u32) {
        let cycle = self.cycle();
        if cycle.old.contains(&entry) && cycle.marked.insert(entry) {
            cycle.stack.push(entry);
        }
    }

    /// Looks at an object that lies at this place, wherever the page is.
    fn trace_at(&mut self, entry: u32, at: ObjectPlace) -> Result<(), Stop> {
        if ObjectHeader(self.object_word(at, 0)?).entry() != entry {
            return broken(format!("the object at the place of entry {entry} has another entry"));
        }
        let references = [self.object_word(at, 1)?, self.object_word(at, 2)?];
        self.occupy(entry, at)?;
        references.into_iter().filter_map(|word| RefWord(word).entry()).for_each(|next| self.mark(next));
        Ok(())
    }

    fn occupy(&mut self, entry: u32, at: ObjectPlace) -> Result<(), Stop> {
        if self.pages[at.page as usize].is_young || !self.pages[at.page as usize].is_made {
            return broken(format!("entry {entry} leads to a page that is not in the snapshot"));
        }
        let is_new = self.cycle().found.entry(at.page).or_insert(PageOccupancy::EMPTY).insert(at.card);
        if is_new { Ok(()) } else { broken(format!("two objects begin at the place of entry {entry}")) }
    }

    fn trace(&mut self, entry: u32) -> Result<(), Stop> {
        let at = self.place_of(entry)?;
        self.trace_at(entry, at)
    }

    fn trace_or_wait(&mut self, entry: u32) -> Result<(), Stop> {
        let is_near = |world: &World, page: u32| world.pages[page as usize].near.is_some();
        let mut place = None;
        if is_near(self, entry_place(entry).0) {
            let at = self.place_of(entry)?;
            if is_near(self, at.page) {
                return self.trace_at(entry, at);
            }
            place = Some(at);
        }
        self.cycle().waiting.insert(entry, place);
        Ok(())
    }

    /// One step of the collector. True if the cycle has ended.
    fn collect(&mut self) -> Result<bool, Stop> {
        if let Some(entry) = self.cycle().stack.pop() {
            self.trace_or_wait(entry)?;
            return Ok(false);
        }
        let logged = core::mem::take(&mut self.log);
        if !logged.is_empty() {
            self.cycle().stack.extend(logged);
            return Ok(false);
        }
        let turn = self.turn;
        let late: Vec<u64> =
            self.cycle().calls.iter().filter(|(_, call)| call.until < turn).map(|(id, _)| *id).collect();
        for id in late {
            let call = self.cycle().calls.remove(&id).expect("it is under way");
            let cycle = self.cycle();
            cycle.waiting.extend(call.asked.iter().map(|asked| (asked.entry, asked.place)));
            cycle.is_without_servers = true;
            self.counts.calls_given_up += 1;
            self.past.insert(id, call);
        }
        let is_with_servers = !self.cycle().is_without_servers && self.cycle().calls.len() < CALLS;
        let (is_waiting, is_calling) = (!self.cycle().waiting.is_empty(), !self.cycle().calls.is_empty());
        match () {
            () if is_waiting && is_with_servers && !self.one_in(6) => self.ask()?,
            () if is_waiting && !self.is_off(Rule::LookAtWaiting) => self.read_page()?,
            () if is_calling && !self.is_off(Rule::AwaitAnswers) => {}
            () => return self.commit().map(|()| true),
        }
        Ok(false)
    }

    /// Looks at one object that waits, whose page is read for that.
    fn read_page(&mut self) -> Result<(), Stop> {
        let (entry, place) = self.cycle().waiting.pop_first().expect("one waits");
        match place {
            Some(at) => self.trace_at(entry, at),
            None => self.trace(entry),
        }
    }

    fn ask(&mut self) -> Result<(), Stop> {
        if !self.cycle().is_flushed {
            self.cycle().is_flushed = true;
            if !self.is_off(Rule::FlushFirst) {
                self.near_pages().into_iter().try_for_each(|page| self.write_back(page))?;
            }
        }
        let of = |world: &World, (entry, place): (&u32, &Option<ObjectPlace>)| {
            world.server_of(place.map_or(entry_place(*entry).0, |at| at.page))
        };
        let waiting = self.cycle().waiting.clone();
        let first = self.random.choice(waiting.iter().collect::<Vec<_>>()).expect("one waits");
        let server = of(self, first);
        let here = waiting.iter().filter(|waiter| of(self, *waiter) == server).take(ASKED_MAX);
        let asked: Vec<AskedObject> = here.map(|(entry, place)| AskedObject { entry: *entry, place: *place }).collect();
        for asked in &asked {
            self.cycle().waiting.remove(&asked.entry);
        }
        let runs = ENTRY_PAGES.map(|page| PageRun { first: page, count: 1 });
        let share = PageShare { servers: SERVERS as u32, server: server as u32, group_pages: GROUP_PAGES };
        let most = asked.len() as u32 + self.random.u32(..8);
        let (layouts, objects) = (layouts().encode(), asked.clone());
        let id = self.call(server, Call::Trace(Tracing { layouts, share, entry_pages: runs.to_vec(), objects, most }));
        let until = self.turn + CALL_TURNS + self.random.u64(..200);
        self.cycle().calls.insert(id, TraceCall { server, until, asked });
        Ok(())
    }

    /// Takes an answer as the tracer of `farfield-gc` does.
    fn take_traced(&mut self, id: u64, traced: &Traced) -> Result<(), Stop> {
        let under_way = self.cycle.as_mut().and_then(|cycle| cycle.calls.remove(&id));
        let is_late = under_way.is_none();
        self.counts.late_answers += u64::from(is_late);
        let call = match under_way {
            Some(call) => call,
            None if self.is_off(Rule::DropLateAnswers) && self.cycle.is_some() => match self.past.get(&id) {
                Some(call) => call.clone(),
                None => return Ok(()),
            },
            None => return Ok(()),
        };
        self.past.insert(id, call.clone());
        let answers = traced.answers(call.asked.iter().copied());
        let (tried, rest) = call.asked.split_at(answers.asked.len());
        self.cycle().waiting.extend(rest.iter().map(|asked| (asked.entry, asked.place)));
        for (answer, asked) in answers.asked.iter().zip(tried) {
            match answer {
                AskedAnswer::Object => {}
                AskedAnswer::Elsewhere(other) => self.wait_elsewhere(other),
                AskedAnswer::Nothing if self.is_off(Rule::LookAtMissing) => {}
                AskedAnswer::Nothing => self.trace(asked.entry)?,
            }
        }
        // All that were looked at, or named, are marked before references to them are.
        let mark = |world: &mut World, entry| {
            let cycle = world.cycle();
            cycle.old.contains(&entry) && cycle.marked.insert(entry)
        };
        let are_new: Vec<bool> = (traced.objects.iter().enumerate())
            .map(|(index, object)| index < answers.objects || mark(self, object.entry))
            .collect();
        let named: Vec<&ElsewhereObject> = answers.elsewhere.iter().filter(|other| mark(self, other.entry)).collect();
        for ((object, references), _) in traced.with_references().zip(&are_new).filter(|(_, is_new)| **is_new) {
            self.occupy(object.entry, ObjectPlace { page: object.page, card: object.card })?;
            self.counts.traced_at_servers += 1;
            references.iter().for_each(|next| self.mark(*next));
        }
        named.into_iter().for_each(|other| self.wait_elsewhere(other));
        Ok(())
    }

    fn wait_elsewhere(&mut self, other: &ElsewhereObject) {
        self.counts.named_elsewhere += 1;
        if !self.is_off(Rule::LookElsewhere) {
            self.cycle().waiting.insert(other.entry, Some(other.place));
        }
    }

    fn commit(&mut self) -> Result<(), Stop> {
        let cycle = self.cycle.take().expect("a cycle marks");
        if let Some(missed) = cycle.reachable.difference(&cycle.marked).next() {
            return broken(format!("marking has ended, and entry {missed} of the snapshot is not marked"));
        }
        let keeps_young = !self.is_off(Rule::KeepYoung);
        let lives = |entry: &u32| cycle.marked.contains(entry) || keeps_young && !cycle.old.contains(entry);
        let (live, dead): (BTreeSet<u32>, BTreeSet<u32>) = self.used.iter().partition(|entry| lives(entry));
        if let Some(freed) = self.reachable().intersection(&dead).next() {
            return broken(format!("entry {freed} is freed, and its object lives"));
        }
        self.used = live;
        self.model.retain(|entry, _| !dead.contains(entry));
        self.counts.freed += dead.len() as u64;
        self.counts.commits += 1;
        for page in FIRST_PAGE..PAGES {
            let old = &mut self.pages[page as usize];
            if old.is_made && !old.is_young {
                old.objects = cycle.found.get(&page).copied().unwrap_or(PageOccupancy::EMPTY);
                self.release_if_empty(page);
            }
        }
        Ok(())
    }

    fn release_if_empty(&mut self, page: u32) {
        if self.pages[page as usize].objects.is_empty() {
            self.pages[page as usize] = Page::default();
        }
    }

    /// Lets a server move what lies in its sparse far pages.
    fn begin_evacuation(&mut self) {
        let server = self.random.usize(..SERVERS);
        let is_source = |page: &u32| {
            let Page { is_made, near, objects, .. } = &self.pages[*page as usize];
            let is_open = self.open.is_some_and(|(open, _)| open == *page);
            *is_made && near.is_none() && !is_open && objects.count() < OBJECTS_PER_PAGE
        };
        let sources: Vec<u32> =
            (FIRST_PAGE..PAGES).filter(|page| self.server_of(*page) == server && is_source(page)).take(4).collect();
        if sources.is_empty() {
            return;
        }
        let Some(target) = self.take_page(Some(server)) else { return };
        // It is nobody's, and nobody else takes it.
        self.pages[target as usize].is_lost = true;
        let local = |page: u32| self.deal.place(page.into()).1 as u32;
        let source = |page: &u32| SourcePage { page: local(*page), live: self.pages[*page as usize].objects.words() };
        let pages: Vec<SourcePage> = sources.iter().map(source).collect();
        let targets = vec![local(target)];
        let batch = EvacuationBatch { layouts: layouts().encode(), sources: pages.clone(), targets };
        let id = self.call(server, Call::Evacuate(batch));
        let until = self.turn + CALL_TURNS + self.random.u64(..100);
        self.evacuation = Some(EvacuateCall { id, until, sources, pages, targets: vec![target] });
    }

    fn end_late_evacuation(&mut self) {
        if let Some(call) = self.evacuation.take_if(|call| call.until < self.turn) {
            self.counts.calls_given_up += 1;
            for target in call.targets {
                self.pages[target as usize].is_lost = !self.is_off(Rule::LosePages);
            }
        }
    }

    /// Lets entries lead to the copies, at a stop.
    fn take_evacuated(&mut self, id: u64, answer: &Evacuated) -> Result<(), Stop> {
        let Some(call) = self.evacuation.take_if(|call| call.id == id) else {
            self.counts.late_answers += 1;
            return Ok(());
        };
        let Some(copies) = answer.copies(&call.pages, call.targets.len()) else {
            return broken("the answer of a server makes no sense");
        };
        for (index, target) in call.targets.iter().enumerate() {
            let sum = answer.target_sums.get(index).copied();
            self.pages[*target as usize] = Page { is_made: sum.is_some(), sum, ..Page::default() };
        }
        for copy in copies {
            let (source, target) = (call.sources[copy.source], call.targets[copy.target]);
            let Page { near, sum, objects, .. } = &self.pages[source as usize];
            let is_same = near.is_none() && *sum == Some(answer.sources[copy.source].sum);
            if !(is_same || self.is_off(Rule::CompareSums)) || !objects.contains(copy.card) {
                self.counts.sources_changed += 1;
                continue;
            }
            let (page, offset) = entry_place(copy.entry);
            let at = EntryWord(self.word(page, offset)?);
            if !self.used.contains(&copy.entry) || (at.page(), at.card()) != (source, copy.card) {
                return broken(format!("entry {} is not that of the object that was copied", copy.entry));
            }
            self.set_word(page, offset, EntryWord::new(target, copy.target_card, at.generation()).0)?;
            self.pages[source as usize].objects.remove(copy.card);
            self.pages[target as usize].objects.insert(copy.target_card);
            self.counts.moved += 1;
        }
        call.sources.iter().chain(&call.targets).for_each(|page| self.release_if_empty(*page));
        Ok(())
    }

    // What happens.

    /// Something happens to a server, mostly to its functions alone.
    fn fail(&mut self) {
        let server = self.random.usize(..SERVERS);
        // Nothing is missing at a server that has its memory.
        let what = if self.is_off(Rule::LookAtMissing) { 1 } else { self.random.usize(..24) };
        match what {
            0 => {
                self.servers[server].is_alive = false;
                self.counts.lost_heaps = 1;
            }
            // It is started again, and has nothing: one that is asked just now, if there is one.
            1 | 2 => {
                let asked = self.cycle.as_ref().and_then(|cycle| cycle.calls.values().next());
                self.servers[asked.map_or(server, |call| call.server)].bytes.fill(0);
                self.counts.lost_heaps = 1;
            }
            _ => self.servers[server].is_deaf = true,
        }
    }

    /// A step of the collector, or the beginning of a cycle or of an evacuation.
    fn collector_turn(&mut self) -> Result<(), Stop> {
        self.end_late_evacuation();
        if self.cycle.is_some() {
            return match self.collect() {
                Err(Stop::Lost) => {
                    // Given up: nothing has changed.
                    self.cycle = None;
                    self.counts.given_up += 1;
                    Ok(())
                }
                result => result.map(|_| ()),
            };
        }
        if self.evacuation.is_none() {
            if self.one_in(3) { self.begin_cycle() } else { self.begin_evacuation() }
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), Stop> {
        self.turn += 1;
        match self.random.usize(..100) {
            0..20 => self.mutate(),
            20..40 => self.evict(),
            40..70 => self.deliver(),
            70..99 => self.collector_turn(),
            _ => {
                match self.random.usize(..4) {
                    0 => self.fail(),
                    _ => self.servers.iter_mut().for_each(|server| server.is_deaf = false),
                }
                Ok(())
            }
        }
    }

    /// Nothing changes any more: after a cycle, what is in use is what is reachable.
    fn end(&mut self) -> Result<(), Stop> {
        self.servers.iter_mut().for_each(|server| server.is_deaf = false);
        while self.evacuation.is_some() || self.cycle.is_some() {
            self.turn += 1;
            self.deliver()?;
            self.end_late_evacuation();
            if self.cycle.is_some() {
                self.collect()?;
            }
        }
        self.begin_cycle();
        loop {
            self.turn += 1;
            self.deliver()?;
            if self.collect()? {
                break;
            }
        }
        let reachable = self.reachable();
        if self.used != reachable {
            return broken("garbage is left although nothing has changed");
        }
        reachable.into_iter().try_for_each(|entry| self.check(entry).map(|_| ()))
    }

    fn run(&mut self, turns: u64) -> Result<(), Stop> {
        for _ in 0..turns {
            self.turn()?;
        }
        self.end()
    }
}

/// Runs the world of a seed. What was lost with a server is no failure.
fn run(seed: u64, rule: Option<Rule>) -> Result<Counts, String> {
    let mut world = World::new(seed, rule);
    match world.run(2000) {
        Ok(()) => Ok(world.counts),
        Err(Stop::Lost) if world.counts.lost_heaps > 0 => Ok(world.counts),
        Err(stop) => Err(format!("seed {seed}: {stop}")),
    }
}

fn first_seed() -> u64 {
    std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn no_live_object_is_freed_and_no_collection_ends_early() {
    let is_deep = std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1");
    let seeds = if is_deep { 5000 } else { 40 };
    let mut all = Counts::default();
    for seed in first_seed()..first_seed() + seeds {
        all.add(run(seed, None).unwrap_or_else(|why| panic!("{why} (FARFIELD_SEED={seed})")));
    }
    println!("{seeds} seeds: {all:?}");
    assert!(all.commits > 5 * seeds && all.freed > 20 * seeds && all.moved > 5 * seeds);
    assert!(all.traced_at_servers > 10 * seeds && all.named_elsewhere > 2 * seeds);
    for count in [all.late_answers, all.calls_given_up, all.sources_changed, all.lost_heaps] {
        assert!(count > 0);
    }
}

#[test]
fn a_client_without_one_of_its_rules_frees_what_lives_or_finds_something_else() {
    for rule in RULES {
        let noticed = (first_seed()..first_seed() + 1000).find_map(|seed| run(seed, Some(rule)).err());
        println!("{rule:?}: {noticed:?}");
        assert!(noticed.is_some(), "nobody notices that {rule:?} is switched off");
    }
}
