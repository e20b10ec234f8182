//! The hybrid plane: by which path the objects of a log page come when it is far, decided when it leaves (Atlas, section 4.1).
//!
//! Objects that came one by one lie in pages with others that were wanted at about the same time. If most of a page was used while it was
//! near, its objects are likely to be wanted together again, and it comes *whole* next time: one miss instead of many, nothing
//! to move, and nothing to write when it leaves unchanged. Else its objects come one by one, which sorts them anew. The measure is the *card
//! access rate* (CAR): the share of the page that was used since it came. Marks are at objects and not at cards of 16 bytes, because a dereference
//! gives a reference to the whole object.
//!
//! A page that was filled near is used from end to end whatever the program does, so its CAR says nothing; only that of a page that came
//! whole does. Atlas lets each such page come whole once. Unless the threshold is fixed, we look at how much was used of those of the same class lately, and
//! if it was too little, only a few come whole, to see whether that is still so.
//!
//! How little is too little? A page of n objects of which the share c is used saves cn - 1 misses, and keeps (1 - c)n places from objects of
//! which a part p would be used again before they leave. That is even at c = (p + 1/n) / (1 + p): 0.3 for p = 0.3 and many objects, 0.5 for p = 1.

use super::Objects;
use crate::stats::Stats;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farfield_core::heap::{LogClass, LogWord, Path};

/// Decides about paths, and counts. Only the evictor decides.
pub(crate) struct Paths {
    /// The least CAR with which a page comes whole; `None`: as trials say.
    threshold: Option<f64>,
    trials: [Trials; LogClass::COUNT],
    /// Pages that left, by CAR in tenths.
    pub(crate) rates: [AtomicU64; Stats::RATE_CLASSES],
    /// Of these, those that come whole.
    pub(crate) by_page: AtomicU64,
    /// Bytes of objects that were used in pages that left.
    pub(crate) used_bytes: AtomicU64,
}

/// How pages of one class did that came whole.
struct Trials {
    /// Their CAR, of [`ALL`]; later ones count more.
    rate: AtomicU32,
    /// Pages that left untried.
    untried: AtomicU32,
}

/// The least CAR with which it is good that a page comes whole.
const GOOD: f64 = 0.5;
const ALL: u32 = 1 << 16;
/// Each trial counts a quarter.
const WEIGHT: u32 = 4;
/// While trials fail, one page of so many comes whole.
const TRY_EVERY: u32 = 4;

impl Paths {
    pub(crate) fn new(threshold: Option<f64>) -> Paths {
        let trials = |_| Trials { rate: AtomicU32::new(ALL), untried: AtomicU32::new(0) };
        Paths {
            threshold,
            trials: core::array::from_fn(trials),
            rates: Default::default(),
            by_page: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
        }
    }

    /// How the objects of a page with this word are to come, of which so many were used.
    pub(super) fn choose(&self, class: LogClass, word: LogWord, used: u32) -> Path {
        let is_used = rate(class, used) >= self.threshold.unwrap_or(GOOD);
        let is_likely = || {
            let trials = &self.trials[class.index()];
            self.threshold.is_some()
                || word.came_whole()
                || f64::from(trials.rate.load(Ordering::Relaxed)) >= GOOD * f64::from(ALL)
                || trials.untried.load(Ordering::Relaxed).is_multiple_of(TRY_EVERY)
        };
        if is_used && is_likely() { Path::Page } else { Path::Object }
    }

    /// A page leaves as it is, of which so many objects were used, and which comes by this path next time.
    pub(super) fn count(&self, class: LogClass, path: Path, used: u32) {
        let tenth = used as usize * Stats::RATE_CLASSES / class.capacity() as usize;
        self.rates[tenth.min(Stats::RATE_CLASSES - 1)].fetch_add(1, Ordering::Relaxed);
        self.used_bytes.fetch_add(u64::from(used) * class.bytes() as u64, Ordering::Relaxed);
        self.by_page.fetch_add(u64::from(path == Path::Page), Ordering::Relaxed);
    }

    /// The stay of a page with this word is over.
    pub(super) fn learn(&self, class: LogClass, word: LogWord, used: u32) {
        let trials = &self.trials[class.index()];
        if word.came_whole() {
            let (before, now) = (trials.rate.load(Ordering::Relaxed), used * ALL / class.capacity());
            trials.rate.store(before - before / WEIGHT + now / WEIGHT, Ordering::Relaxed);
        } else {
            trials.untried.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn rate(class: LogClass, used: u32) -> f64 {
    f64::from(used) / f64::from(class.capacity())
}

/// How a far object is to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// Alone, to a place of this class.
    Object(LogClass),
    /// With this page.
    Page(u32),
}

impl Objects {
    /// How an object of this page is to come, if the page is Far; `None` if it is on its way, or dead.
    pub(crate) fn way(&self, page: u32) -> Option<Way> {
        let word = self.log.word(page);
        let class = word.class().filter(|_| !word.is_whole())?;
        Some(if word.fetch().is_some() { Way::Page(page) } else { Way::Object(class) })
    }
}
