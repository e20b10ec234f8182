//! The hybrid plane: the path by which the objects of a far log page come, decided when it leaves
//! (Atlas, section 4.1).
//!
//! Objects that came one by one lie in pages with others that were wanted at about the same time.
//! If enough of a page is likely to be wanted together again, the page comes *whole* next time: one
//! miss instead of many, nothing to move, and nothing to write when it leaves unchanged. Otherwise
//! its objects come one by one, which sorts them anew. The measure is the *card access rate* (CAR):
//! the share of the page that was used since it came. Marks are kept for objects and not for cards
//! of 16 bytes, because a dereference gives a reference to the whole object.
//!
//! **What is enough?** A page that comes whole, and of which `used` objects are used before it
//! leaves, saves `used - 1` misses. But it takes the places of its other objects from something
//! else. These are worth what near memory is worth at the moment, the [`MarginalUtility`]. So the
//! page should come whole if the saving exceeds that. In a program that reads everything in turn, a
//! few objects are enough; in a cache, where each frame saves misses, most must be used. (Atlas has
//! a fixed threshold of CAR, 0.8; [`Builder::car_threshold`](crate::Builder::car_threshold) sets
//! one.)
//!
//! **How many will be used?** As many as last time, if the page came whole then. A page that was
//! filled near is used from end to end whatever the program does, which says nothing. So we look at
//! how much was used of the pages of that class that came whole lately. If that was too little, a
//! few come whole all the same, to see whether that is still so. Such a page is a *guess*: it is
//! decided about when it is missed, by what is known then.
//!
//! **And if that was wrong?** The objects of a far page may be missed one after the other within a
//! short time. When they are so many that the page would have paid for itself, the next one brings
//! the rest with it. So a wrong guess costs at most about twice what the right one would have cost.

use super::miss_history::MissHistory;
use super::{MarginalUtility, Objects};
use crate::error::BuildError;
use crate::heap::{HeapInner, ReservedArray, ThreadState, TransferUnit, count};
use crate::stats::Stats;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::heap::{IngressPath, LogClass, LogWord};

/// Decides about paths, and counts pages and misses. Only the evictor decides when pages leave.
pub(crate) struct Paths {
    /// Least CAR with which a page comes whole; `None`: the marginal utility decides.
    threshold: Option<f64>,
    /// Size in bytes up to which values have no handles.
    alone_above: usize,
    probes: [WholePageProbes; LogClass::COUNT],
    miss_histories: [MissHistory; LogClass::COUNT],
    pub(crate) utility: MarginalUtility,
    /// Misses of each far page in a row.
    miss_runs: ReservedArray<AtomicU32>,
    /// Number of pages that left, by CAR in tenths.
    pub(crate) rates: [AtomicU64; Stats::RATE_CLASSES],
    /// Number of these pages that come whole.
    pub(crate) by_page: AtomicU64,
    /// Bytes of objects that were used, in pages that left.
    pub(crate) used_bytes: AtomicU64,
}

/// Results of the pages of one class that came whole.
struct WholePageProbes {
    /// Share of the objects living in them that was used, in parts of [`ALL`]; recent pages weigh
    /// more.
    rate: AtomicU32,
    /// Number of pages that left untried.
    untried: AtomicU32,
}

const ALL: u32 = 1 << 16;
/// Weight of each probe, as a divisor: it counts a quarter.
const WEIGHT: u32 = 4;
/// Number of pages of which one comes whole while probes fail.
const TRY_EVERY: u32 = 16;

/// Misses of one far page in a row. The word has the clock of the first one (24 bits), whether the
/// page is a guess (1 bit), and their number (7 bits).
#[derive(Clone, Copy)]
struct MissRun(u32);

const CLOCK_SHIFT: u32 = 8;
const GUESS: u32 = 1 << 7;
const COUNT_MAX: u32 = GUESS - 1;
/// Part of near memory, as a divisor, after whose departure a row ends.
const ROW: u32 = 4;

impl MissRun {
    /// Returns the number of misses in the row at time `clock`, in a near memory of this many
    /// frames; 0 if the first one was long before.
    fn count(self, clock: u32, frames: u32) -> u32 {
        let ago = (clock.wrapping_sub(self.0 >> CLOCK_SHIFT)) & (u32::MAX >> CLOCK_SHIFT);
        if ago < frames / ROW { self.0 & COUNT_MAX } else { 0 }
    }

    /// Adds a miss to the row, or begins a new row.
    fn missed(self, clock: u32, frames: u32) -> MissRun {
        match self.count(clock, frames) {
            0 => MissRun(clock << CLOCK_SHIFT | self.0 & GUESS | 1),
            COUNT_MAX => self,
            _ => MissRun(self.0 + 1),
        }
    }
}

impl Paths {
    /// Makes the tables for a heap of this many pages.
    pub(crate) fn new(threshold: Option<f64>, alone_above: usize, pages: u32) -> Result<Paths, BuildError> {
        let probes = |_| WholePageProbes { rate: AtomicU32::new(ALL), untried: AtomicU32::new(0) };
        Ok(Paths {
            threshold,
            alone_above,
            probes: core::array::from_fn(probes),
            miss_histories: Default::default(),
            utility: MarginalUtility::new(pages)?,
            miss_runs: ReservedArray::new(pages as usize)?,
            rates: Default::default(),
            by_page: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
        })
    }

    /// Returns the bytes of near memory that the tables cost.
    pub(super) fn table_bytes(&self, high_page: u32) -> u64 {
        u64::from(high_page) * 2 * size_of::<u32>() as u64
    }

    /// Decides whether a new value of this class and size is made without a handle.
    fn makes_without_handle(&self, class: LogClass, bytes: usize) -> bool {
        bytes <= self.alone_above
            || self.threshold.is_none() && self.miss_histories[class.index()].should_skip_handle(class)
    }

    /// Checks whether values of this class and size are made without handles, or mostly so.
    fn is_without_handles(&self, class: LogClass, bytes: usize) -> bool {
        bytes <= self.alone_above || self.threshold.is_none() && self.miss_histories[class.index()].skips_handles()
    }

    /// Chooses the path of the objects of a page that leaves, with this word and this many used
    /// objects.
    pub(super) fn choose(&self, class: LogClass, word: LogWord, used: u32) -> IngressPath {
        let comes_whole = match self.threshold {
            Some(threshold) => rate(class, used) >= threshold,
            None => {
                let usual = self.expected_uses(class, word);
                if word.came_whole() {
                    self.is_worth_whole_page(class, (f64::from(used) + usual) / 2.0)
                } else {
                    self.is_worth_whole_page(class, usual) || self.is_probe(class)
                }
            }
        };
        if comes_whole { IngressPath::Page } else { IngressPath::Object }
    }

    /// Estimates how many objects of a page with this word are used if it comes whole, as far as
    /// its class can tell.
    fn expected_uses(&self, class: LogClass, word: LogWord) -> f64 {
        let rate = self.probes[class.index()].rate.load(Ordering::Relaxed);
        f64::from(word.live()) * f64::from(rate) / f64::from(ALL)
    }

    /// Checks whether the next page of this class comes whole as a probe, whatever is known.
    fn is_probe(&self, class: LogClass) -> bool {
        self.probes[class.index()].untried.load(Ordering::Relaxed).is_multiple_of(TRY_EVERY)
    }

    /// Checks whether it pays that a page comes whole of which this many objects will be used.
    fn is_worth_whole_page(&self, class: LogClass, used: f64) -> bool {
        // Half, because objects that come one by one stay longer than their page would, each from
        // its own use on.
        used - 1.0 > self.utility.now() * (1.0 - used / f64::from(class.capacity()) / 2.0)
    }

    /// Counts a page that leaves as it is, of which this many objects were used, and which comes by
    /// this path next time.
    pub(super) fn count(&self, class: LogClass, path: IngressPath, used: u32) {
        let tenth = used as usize * Stats::RATE_CLASSES / class.capacity() as usize;
        self.rates[tenth.min(Stats::RATE_CLASSES - 1)].fetch_add(1, Ordering::Relaxed);
        self.used_bytes.fetch_add(u64::from(used) * class.bytes() as u64, Ordering::Relaxed);
        self.by_page.fetch_add(u64::from(path == IngressPath::Page), Ordering::Relaxed);
    }

    /// Learns from the stay of a page with this word, which is over.
    pub(super) fn learn(&self, class: LogClass, word: LogWord, used: u32) {
        let probes = &self.probes[class.index()];
        if !word.came_whole() {
            probes.untried.fetch_add(1, Ordering::Relaxed);
        } else if word.live() > 0 {
            let (before, now) = (probes.rate.load(Ordering::Relaxed), used.min(word.live()) * ALL / word.live());
            probes.rate.store(before - before / WEIGHT + now / WEIGHT, Ordering::Relaxed);
        }
    }

    /// Notes that a page with this word leaves. If it was only filled, it is a guess: the way it
    /// comes is decided when it is missed, by what is known then.
    pub(super) fn leaves(&self, page: u32, class: LogClass, word: LogWord) {
        let is_guess = self.threshold.is_none() && !word.came_whole() && !self.is_probe(class);
        self.miss_runs[page].store(if is_guess { GUESS } else { 0 }, Ordering::Relaxed);
    }

    /// Checks whether this far page comes whole when one of its objects is missed.
    fn comes_whole(&self, page: u32, class: LogClass, word: LogWord, frames: u32) -> bool {
        let is_guess = self.miss_runs[page].load(Ordering::Relaxed) & GUESS != 0;
        let is_likely = if is_guess {
            self.is_worth_whole_page(class, self.expected_uses(class, word))
        } else {
            word.path() == IngressPath::Page
        };
        is_likely || self.is_long_miss_run(page, frames)
    }

    /// Counts a miss of an object of this far page, which comes alone.
    fn missed(&self, page: u32, frames: u32) {
        let run = &self.miss_runs[page];
        let next = MissRun(run.load(Ordering::Relaxed)).missed(self.utility.clock(), frames);
        run.store(next.0, Ordering::Relaxed);
    }

    /// Checks whether so many objects of this far page were missed lately that the rest had better
    /// come with the next one.
    fn is_long_miss_run(&self, page: u32, frames: u32) -> bool {
        let count = MissRun(self.miss_runs[page].load(Ordering::Relaxed)).count(self.utility.clock(), frames);
        count > 0 && self.threshold.is_none() && f64::from(count) >= self.utility.now()
    }
}

fn rate(class: LogClass, used: u32) -> f64 {
    f64::from(used) / f64::from(class.capacity())
}

/// Way by which a far object comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FetchGranularity {
    /// Alone, to a place of this class.
    Object(LogClass),
    /// With this page.
    Page(u32),
}

impl HeapInner {
    fn paths(&self) -> Option<&Paths> {
        self.objects.as_ref().and_then(|objects| objects.paths.as_ref())
    }

    /// Counts a miss in this page, which begins to come by this path.
    pub(crate) fn count_miss(&self, record: &ThreadState, page: u32, path: IngressPath) {
        count(&record.counters.misses);
        if path == IngressPath::Object {
            count(&record.counters.object_misses);
        }
        let Some(paths) = self.paths() else { return };
        if let Some(class) = self.objects.as_ref().and_then(|objects| objects.log.word(page).class()) {
            paths.miss_histories[class.index()].missed(path);
        }
        let frames = self.frames.limit();
        paths.utility.missed(page, frames);
        if path == IngressPath::Object {
            paths.missed(page, frames);
        }
    }

    /// Counts the departure of a unit that is about to leave.
    pub(crate) fn count_departure(&self, unit: TransferUnit) {
        if let Some(paths) = self.paths() {
            paths.utility.leaves(unit, self.frames.limit());
        }
    }
}

impl Objects {
    /// Decides whether a new value of this class and size is made without a handle.
    pub(crate) fn makes_without_handle(&self, class: LogClass, bytes: usize) -> bool {
        self.paths.as_ref().is_some_and(|paths| paths.makes_without_handle(class, bytes))
    }

    /// Checks whether values of this class and size are better off without handles. Some of them
    /// have handles all the same.
    pub(super) fn is_without_handles(&self, class: LogClass, bytes: usize) -> bool {
        self.paths.as_ref().is_some_and(|paths| paths.is_without_handles(class, bytes))
    }

    /// Returns the way by which an object of this page comes, if the page is Far, with this many
    /// frames of near memory. `None` if the page is on its way, or dead.
    pub(crate) fn fetch_granularity(&self, page: u32, frames: u32) -> Option<FetchGranularity> {
        let word = self.log.word(page);
        let class = word.class().filter(|_| !word.is_whole())?;
        let comes_whole = |paths: &Paths| word.fetch().is_some() && paths.comes_whole(page, class, word, frames);
        Some(if self.paths.as_ref().is_some_and(comes_whole) {
            FetchGranularity::Page(page)
        } else {
            FetchGranularity::Object(class)
        })
    }
}

#[cfg(test)]
mod tests {
    //! Guards against pages that come whole for nothing, and objects that come one by one for ever.
    use super::*;
    use crate::ptr::Follow;
    use crate::{FarBox, Heap, Plane};
    use farfield_core::heap::{FrameWord, State};

    const FRAMES: u32 = 800;

    /// Each page that leaves is missed so many times shortly afterwards.
    fn paths_at(misses: u32) -> Paths {
        let paths = Paths::new(None, 0, 1 << 16).unwrap();
        for page in 0..16 * FRAMES {
            paths.utility.leaves(TransferUnit { page, pages: 1 }, FRAMES);
            (0..misses).for_each(|_| paths.utility.missed(page, FRAMES));
        }
        paths
    }

    fn page_of(class: LogClass, came_whole: bool) -> LogWord {
        let mut word = LogWord::opened(class);
        (0..class.capacity()).for_each(|_| word = word.add());
        let word = word.closed().0;
        if came_whole { word.fetch().unwrap().fetched(true).0 } else { word }
    }

    #[test]
    fn the_more_near_memory_is_worth_the_more_must_be_used() {
        let class = LogClass::of(64, 8).unwrap();
        let least = |misses: u32| {
            let whole = |used: &u32| paths_at(misses).is_worth_whole_page(class, f64::from(*used));
            (0..=class.capacity()).find(whole).unwrap()
        };
        assert_eq!(least(0), 2);
        // A marginal utility of 8, and of 40.
        assert_eq!((least(1), least(5)), (9, 31));
        // Two objects of a page are not worth what eight misses are, however many there are.
        let large = LogClass::of(1300, 8).unwrap();
        assert!(paths_at(0).is_worth_whole_page(large, 2.0) && !paths_at(1).is_worth_whole_page(large, 3.0));
    }

    #[test]
    fn a_page_that_was_only_filled_comes_as_others_of_its_class_did() {
        let class = LogClass::of(64, 8).unwrap();
        let (filled, whole) = (page_of(class, false), page_of(class, true));
        let paths = paths_at(1);
        let all = class.capacity();
        assert_eq!(paths.choose(class, filled, all), IngressPath::Page, "the first ones are tried");
        (0..32).for_each(|_| paths.learn(class, whole, 1));
        assert_eq!(paths.choose(class, whole, 1), IngressPath::Object);
        let tried = (0..2 * TRY_EVERY).filter(|_| {
            let path = paths.choose(class, filled, all);
            paths.learn(class, filled, all);
            path == IngressPath::Page
        });
        assert_eq!(tried.count(), 2);
        (0..32).for_each(|_| paths.learn(class, whole, all / 2));
        assert_eq!(paths.choose(class, filled, 0), IngressPath::Page);
        let other = LogClass::of(32, 8).unwrap();
        assert_eq!(paths.choose(other, page_of(other, false), 0), IngressPath::Page, "another class is tried");
    }

    #[test]
    fn a_guess_is_made_when_the_page_is_missed() {
        let class = LogClass::of(64, 8).unwrap();
        let (filled, whole) = (page_of(class, false), page_of(class, true));
        let paths = paths_at(1);
        // The first one is a probe.
        paths.learn(class, filled, 60);
        let comes_whole = |page| paths.comes_whole(page, class, page_of(class, false).leave(IngressPath::Page), FRAMES);
        paths.leaves(1, class, filled);
        paths.leaves(2, class, whole);
        assert!(comes_whole(1) && comes_whole(2));
        (0..32).for_each(|_| paths.learn(class, whole, 1));
        assert!(!comes_whole(1) && comes_whole(2));
        // While it is missed in a row it stays a guess.
        paths.missed(1, FRAMES);
        assert!(!comes_whole(1));
        (0..32).for_each(|_| paths.learn(class, whole, 60));
        assert!(comes_whole(1));
    }

    #[test]
    fn a_row_of_misses_ends() {
        let mut run = MissRun(0);
        let mut clock = u32::MAX - 5;
        for count in 1..=300 {
            run = run.missed(clock, FRAMES);
            assert_eq!(run.count(clock, FRAMES), count.min(COUNT_MAX));
        }
        clock = clock.wrapping_add(FRAMES / ROW - 1);
        assert_eq!(run.count(clock, FRAMES), COUNT_MAX);
        clock = clock.wrapping_add(1);
        assert_eq!(run.count(clock, FRAMES), 0);
        assert_eq!(run.missed(clock, FRAMES).count(clock, FRAMES), 1);
    }

    #[test]
    fn the_rest_of_a_page_comes_when_its_objects_are_missed_in_a_row() {
        for (threshold, expected) in [(None, 2), (Some(0.8), 60)] {
            let mut builder =
                Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(Plane::Hybrid).alone_above(0);
            if let Some(share) = threshold {
                builder = builder.car_threshold(share);
            }
            let heap = builder.build().unwrap();
            let core = heap.core();
            let objects = core.objects.as_ref().unwrap();
            let values: Vec<FarBox<[u64; 8]>> = (0..6000).map(|index| heap.alloc([index; 8]).unwrap()).collect();
            drop((0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect::<Vec<_>>());
            let is_far = |page: u32| FrameWord(core.words[page].load(Ordering::Acquire)).state() == State::Far;
            let page =
                (0..core.segments.high_page()).find(|page| objects.log.word(*page).live() == 60 && is_far(*page));
            let page = page.expect("a full page that is far");
            objects.log.send(page, IngressPath::Object);
            objects.paths.as_ref().unwrap().miss_runs[page].store(0, Ordering::Relaxed);
            let before = heap.stats();
            for (index, value) in values.iter().enumerate() {
                let number = value.pointer().number_in(core).unwrap() - core.pages;
                if objects.handle(number).is_in(page) {
                    assert_eq!(value.get(&heap.enter()).unwrap()[0], index as u64);
                }
            }
            let after = heap.stats();
            assert_eq!(after.misses - before.misses, expected);
            assert_eq!(after.whole_pages - before.whole_pages, u64::from(threshold.is_none()));
            drop(values);
            heap.verify();
        }
    }
}
