//! The hybrid plane: by which path the objects of a log page come when it is far, decided when it leaves (Atlas, section 4.1).
//!
//! Objects that came one by one lie in pages with others that were wanted at about the same time. If most of a page was used while it was
//! near, its objects are likely to be wanted together again, and it comes *whole* next time: one miss instead of many, nothing
//! to move, and nothing to write when it leaves unchanged. Else its objects come one by one, which sorts them anew. The measure is the *card
//! access rate* (CAR): the share of the page that was used since it came. Marks are at objects and not at cards of 16 bytes, because a dereference
//! gives a reference to the whole object.

use super::Objects;
use core::sync::atomic::{AtomicU64, Ordering};
use farfield_core::heap::{Handle, LogClass, Path};

/// Decides about paths, and counts.
pub(crate) struct Paths {
    /// The least CAR with which a page comes whole.
    threshold: f64,
    /// Pages that left, by CAR in tenths.
    pub(crate) rates: [AtomicU64; RATES],
    /// Bytes of objects that were used in pages that left.
    pub(crate) used_bytes: AtomicU64,
}

/// Classes of CAR.
pub(crate) const RATES: usize = 10;

impl Paths {
    pub(crate) fn new(threshold: f64) -> Paths {
        Paths { threshold, rates: Default::default(), used_bytes: AtomicU64::new(0) }
    }

    /// How the objects of a page are to come, of which so many were used.
    pub(super) fn choose(&self, class: LogClass, used: u32) -> Path {
        if rate(class, used) >= self.threshold { Path::Page } else { Path::Object }
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
    pub(super) fn way(&self, page: u32) -> Option<Way> {
        let word = self.log.word(page);
        let class = word.class().filter(|_| !word.is_whole())?;
        Some(if word.fetch().is_some() { Way::Page(page) } else { Way::Object(class) })
    }

    /// A page leaves as it is, in which so many objects were used; the marks to be taken from them.
    pub(super) fn leaves(&self, page: u32, class: LogClass, used: u32) -> u64 {
        let Some(paths) = &self.paths else { return 0 };
        let tenth = (rate(class, used) * RATES as f64) as usize;
        paths.rates[tenth.min(RATES - 1)].fetch_add(1, Ordering::Relaxed);
        paths.used_bytes.fetch_add(u64::from(used) * class.bytes() as u64, Ordering::Relaxed);
        self.log.set_path(page, paths.choose(class, used));
        Handle::HOT | Handle::USED
    }
}
