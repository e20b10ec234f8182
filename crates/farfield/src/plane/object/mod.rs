//! The object plane: on a miss only the value travels.
//!
//! A slot names a *handle*: an immobile word that says in which page and at which card the value
//! is. So values can move without an update of their slots. Values lie in *log pages*. Each log
//! page is filled from the beginning by one thread, with new values and with those that came near,
//! so that values used at about the same time lie together. Places that values leave are filled
//! again while their page is near (`holes`). A page is retired when its last value is gone. Its
//! number is used again when no scope is left that could have read a handle to it before
//! (`recycle_log`, epoch-based reclamation).
//!
//! Each file decides one question:
//!
//! | file | decides |
//! |---|---|
//! | `handles` | which handles are free |
//! | `log` | which log pages are free, and which thread fills which |
//! | `tags` | where a log page says which handles its values have |
//! | `holes` | which log pages are filled again |
//! | `ingress` | how a value is found |
//! | `flight` | how a value comes near |
//! | `values` | how values are made and freed |
//! | `evacuator` | which values lie together when log pages leave |
//! | `heat` | which objects are hot |
//! | `paths` | hybrid plane: whether a far page comes whole, or its values one by one |
//! | `marginal_utility` | how much near memory is worth, on which that decision rests |

mod evacuator;
mod flight;
mod handles;
mod heat;
mod holes;
mod ingress;
mod log;
mod marginal_utility;
mod miss_history;
mod paths;
mod tags;
mod values;

use crate::error::BuildError;
use core::cell::Cell;
use core::sync::atomic::AtomicU64;
pub(crate) use evacuator::Evacuator;
use farfield_core::heap::{Handle, Hotness, LogClass, LogWord};
pub(crate) use flight::ObjectFlight;
use handles::Handles;
pub(crate) use handles::ThreadHandles;
use heat::HotnessClock;
pub(crate) use log::LogPages;
use marginal_utility::MarginalUtility;
pub(crate) use paths::{FetchGranularity, Paths};

/// Number of a handle within its heap.
pub(crate) type ObjectId = u32;

/// State of a heap that only the object and hybrid plane have.
pub(crate) struct Objects {
    pub(crate) handles: Handles,
    pub(crate) log: LogPages,
    /// Number of objects that the evacuator has moved.
    pub(crate) moved: AtomicU64,
    heat: HotnessClock,
    /// Present on the hybrid plane only.
    pub(crate) paths: Option<Paths>,
}

/// State of a thread that only heaps of the object and hybrid plane need.
#[derive(Default)]
pub(crate) struct ThreadObjects {
    handles: ThreadHandles,
    /// Pages that the thread fills, one for each class; and others for values that come to be used
    /// once.
    pages: [[Cell<Option<OpenLogPage>>; LogClass::COUNT]; 2],
    /// Whether far values come now to be used once (streaming access).
    is_streaming: Cell<bool>,
}

/// A page that a thread fills, with its free places.
#[derive(Clone, Copy)]
struct OpenLogPage {
    page: u32,
    free: LogPageBitmap,
}

/// Set of places of a log page, by index.
#[derive(Clone, Copy, Default)]
struct LogPageBitmap([u64; 4]);

const _: () = assert!(LogClass::from_index(0).capacity() <= 256);

impl LogPageBitmap {
    /// Returns the set of all places of a page of this class.
    fn all(class: LogClass) -> LogPageBitmap {
        LogPageBitmap(core::array::from_fn(|word| {
            let from_here = class.capacity().saturating_sub(word as u32 * u64::BITS);
            if from_here >= u64::BITS { u64::MAX } else { (1 << from_here) - 1 }
        }))
    }

    /// Removes the first place from the set and returns it.
    fn take(&mut self) -> Option<u32> {
        let (at, word) = self.0.iter_mut().enumerate().find(|(_, word)| **word != 0)?;
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        Some(at as u32 * u64::BITS + bit)
    }
}

impl FromIterator<u32> for LogPageBitmap {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> LogPageBitmap {
        let mut places = LogPageBitmap::default();
        indices.into_iter().for_each(|index| places.0[(index / u64::BITS) as usize] |= 1 << (index % u64::BITS));
        places
    }
}

impl ThreadObjects {
    /// Returns the cell of the page to be filled now.
    fn page(&self, class: LogClass) -> &Cell<Option<OpenLogPage>> {
        &self.pages[usize::from(self.is_streaming.get())][class.index()]
    }

    /// Runs `look`, as a streaming access: the values that it finds are used once. Near ones do not
    /// become hot by that; far ones come to pages that leave first.
    pub(crate) fn run_streaming<R>(&self, look: impl FnOnce() -> R) -> R {
        let before = self.is_streaming.replace(true);
        let found = look();
        self.is_streaming.set(before);
        found
    }
}

impl Objects {
    /// Makes the state for a heap of `pages` pages and `near` bytes of near memory.
    pub(crate) fn new(
        pages: u32,
        near: u64,
        handles: u32,
        hotness: Hotness,
        paths: Option<Paths>,
    ) -> Result<Objects, BuildError> {
        Ok(Objects {
            handles: Handles::new(handles)?,
            log: LogPages::new(pages, near)?,
            moved: AtomicU64::new(0),
            heat: HotnessClock::new(hotness),
            paths,
        })
    }

    /// Returns the bytes of near memory that the tables cost.
    pub(crate) fn table_bytes(&self, high_page: u32) -> u64 {
        let paths = self.paths.as_ref().map_or(0, |paths| paths.table_bytes(high_page));
        self.handles.table_bytes() + self.log.table_bytes(high_page) + paths
    }

    /// Returns the least number of bytes that the tables cost for each page below the highest that
    /// was used.
    pub(crate) fn bytes_per_page(&self) -> usize {
        // Tags aside: a pointer for each segment.
        size_of::<LogWord>() + 1 + self.paths.as_ref().map_or(0, |_| 2 * size_of::<u32>())
    }

    /// Returns the handle of this number, for the verifier.
    pub(crate) fn handle(&self, object: ObjectId) -> Handle {
        Handle(self.handles[object].load(core::sync::atomic::Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against places that a page does not have, or that nobody takes.
    use super::*;

    #[test]
    fn all_places_of_a_page_are_taken_in_order() {
        for class in (0..LogClass::COUNT).map(LogClass::from_index) {
            let mut free = LogPageBitmap::all(class);
            let taken: Vec<u32> = core::iter::from_fn(|| free.take()).collect();
            assert_eq!(taken, (0..class.capacity()).collect::<Vec<_>>());
        }
    }
}
