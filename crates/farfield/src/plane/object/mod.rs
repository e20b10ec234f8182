//! The object plane: on a miss only the value travels.
//!
//! A slot names a *handle*, an immobile word that says in which page and at which card the value is; so values move, and
//! nobody has to find their slots. Values lie in *log pages*, filled from the beginning by one thread each, with new values and
//! with those that came near; what is used at about the same time lies together. Places that values leave are filled again while
//! their page is near (`holes`); the page goes when its last value is gone, and its number is used again when no scope is left that could
//! have looked at a handle before (`recycle_log`).
//!
//! | file | decides |
//! |---|---|
//! | `handles` | which handles are free |
//! | `log` | which log pages are free, and who fills which |
//! | `tags` | where a log page says which handles its values have |
//! | `holes` | which log pages are filled again |
//! | `ingress` | how a value is found |
//! | `flight` | how it comes near |
//! | `values` | making and freeing |
//! | `evacuator` | what lies together when log pages leave |
//! | `heat` | which objects are hot |
//! | `paths` | hybrid plane: whether a far page comes whole, or its values one by one |
//! | `price` | what near memory is worth, by which that is decided |

mod evacuator;
mod flight;
mod habit;
mod handles;
mod heat;
mod holes;
mod ingress;
mod log;
mod paths;
mod price;
mod tags;
mod values;

use crate::error::BuildError;
use core::cell::Cell;
use core::sync::atomic::AtomicU64;
pub(crate) use evacuator::Evacuator;
use farfield_core::heap::{Handle, Hotness, LogClass, LogWord};
pub(crate) use flight::ObjectFlight;
use handles::Handles;
pub(crate) use handles::OwnHandles;
use heat::Heat;
pub(crate) use ingress::Sight;
pub(crate) use log::LogPages;
pub(crate) use paths::{Paths, Way};
use price::Price;

/// Number of a handle within its heap.
pub(crate) type ObjectId = u32;

/// What a heap of the object plane has beside the others.
pub(crate) struct Objects {
    pub(crate) handles: Handles,
    pub(crate) log: LogPages,
    /// Objects that the evacuator has moved.
    pub(crate) moved: AtomicU64,
    heat: Heat,
    /// On the hybrid plane.
    pub(crate) paths: Option<Paths>,
}

/// What a thread has in such a heap.
#[derive(Default)]
pub(crate) struct OwnObjects {
    handles: OwnHandles,
    /// The page that it fills, per class; and another for values that come to be used once.
    pages: [[Cell<Option<Filling>>; LogClass::COUNT]; 2],
    /// What is far now comes to be used once.
    once: Cell<bool>,
}

/// A page that a thread fills, and the places where it has put nothing yet.
#[derive(Clone, Copy)]
struct Filling {
    page: u32,
    free: Places,
}

/// Places of a log page, by index.
#[derive(Clone, Copy, Default)]
struct Places([u64; 4]);

const _: () = assert!(LogClass::from_index(0).capacity() <= 256);

impl Places {
    /// All of a page of this class.
    fn all(class: LogClass) -> Places {
        Places(core::array::from_fn(|word| {
            let from_here = class.capacity().saturating_sub(word as u32 * u64::BITS);
            if from_here >= u64::BITS { u64::MAX } else { (1 << from_here) - 1 }
        }))
    }

    /// Takes the first one out.
    fn take(&mut self) -> Option<u32> {
        let (at, word) = self.0.iter_mut().enumerate().find(|(_, word)| **word != 0)?;
        let bit = word.trailing_zeros();
        *word &= *word - 1;
        Some(at as u32 * u64::BITS + bit)
    }
}

impl FromIterator<u32> for Places {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> Places {
        let mut places = Places::default();
        indices.into_iter().for_each(|index| places.0[(index / u64::BITS) as usize] |= 1 << (index % u64::BITS));
        places
    }
}

impl OwnObjects {
    /// The page to be filled now.
    fn page(&self, class: LogClass) -> &Cell<Option<Filling>> {
        &self.pages[usize::from(self.once.get())][class.index()]
    }

    /// Values that `look` finds are used once: near, they are not hot by that; far, they come to pages that leave first.
    pub(crate) fn once<R>(&self, look: impl FnOnce() -> R) -> R {
        let before = self.once.replace(true);
        let found = look();
        self.once.set(before);
        found
    }
}

impl Objects {
    /// For a heap of so many pages, and so much near memory.
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
            heat: Heat::new(hotness),
            paths,
        })
    }

    /// Near memory that the tables cost.
    pub(crate) fn table_bytes(&self, high_page: u32) -> u64 {
        let paths = self.paths.as_ref().map_or(0, |paths| paths.table_bytes(high_page));
        self.handles.table_bytes() + self.log.table_bytes(high_page) + paths
    }

    /// What the tables here cost for each page below the highest that was used, at least.
    pub(crate) fn bytes_per_page(&self) -> usize {
        // Tags aside: a pointer for each segment.
        size_of::<LogWord>() + 1 + self.paths.as_ref().map_or(0, |_| 2 * size_of::<u32>())
    }

    /// For the verifier: the handle of this number.
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
            let mut free = Places::all(class);
            let taken: Vec<u32> = core::iter::from_fn(|| free.take()).collect();
            assert_eq!(taken, (0..class.capacity()).collect::<Vec<_>>());
        }
    }
}
