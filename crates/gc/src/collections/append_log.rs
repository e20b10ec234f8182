//! Log to which objects are appended, and which forgets the oldest.
//!
//! The log consists of trees of fixed heights: the first is a leaf of 64 objects, the second has 64
//! such leaves, and so on. So nothing moves when the log grows.

use super::{GcError, Mutator};
use crate::FarObject;
use crate::object::{AnyObject, Atom, Referent};
use crate::reference::{Gc, Ref};
use core::marker::PhantomData;

/// Number of references in a node: a power of two.
const FANOUT: u64 = 1 << FANOUT_BITS;
const FANOUT_BITS: u32 = 6;
/// Number of trees, enough for 2⁶⁰ objects.
const TREES: usize = 10;

/// Log to which objects are appended. Each has an index, counted from 0, which is never used twice.
/// Those with the lowest indices can be [forgotten](AppendLog::trim).
#[derive(FarObject)]
pub struct AppendLog<T: Referent + ?Sized> {
    len: Atom<u64>,
    start: Atom<u64>,
    trees: [Ref<AnyObject>; TREES],
    objects: PhantomData<fn() -> Ref<T>>,
}

type Inner = [Ref<AnyObject>];
type Leaf<T> = [Ref<T>];

/// Object in place of a node whose objects are forgotten.
#[derive(FarObject)]
struct Trimmed;

/// Returns the number of objects of a tree, or of a node of this height.
const fn objects_of(height: usize) -> u64 {
    FANOUT.pow(height as u32 + 1)
}

/// Index of the first object of each tree.
const FIRSTS: [u64; TREES] = {
    let mut firsts = [0; TREES];
    let mut tree = 1;
    while tree < TREES {
        firsts[tree] = firsts[tree - 1] + objects_of(tree - 1);
        tree += 1;
    }
    firsts
};

/// Returns the tree of an index, and the index within the tree.
#[inline]
fn tree_of(index: u64) -> (usize, u64) {
    let mut tree = 0;
    while tree + 1 < TREES && FIRSTS[tree + 1] <= index {
        tree += 1;
    }
    (tree, index - FIRSTS[tree])
}

impl<T: Referent + ?Sized> Default for AppendLog<T> {
    fn default() -> AppendLog<T> {
        AppendLog::new()
    }
}

impl<T: Referent + ?Sized> AppendLog<T> {
    /// Makes an empty log. It can be filled when it is in a heap.
    pub fn new() -> AppendLog<T> {
        AppendLog {
            len: Atom::new(0),
            start: Atom::new(0),
            trees: [const { Ref::null() }; TREES],
            objects: PhantomData,
        }
    }

    /// Returns the number of objects that were ever appended: the index of the next one.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Returns the index of the first object that is not forgotten.
    pub fn start(&self) -> u64 {
        self.start.get()
    }

    /// Checks whether there is no object that is not forgotten.
    pub fn is_empty(&self) -> bool {
        self.start() == self.len()
    }

    /// Appends an object and returns its index.
    pub fn push(&self, m: &Mutator<'_>, object: Gc<'_, T>) -> Result<u64, GcError> {
        loop {
            let index = self.len();
            let is_appended = match self.leaf(m, index, true)? {
                Some(leaf) => leaf[(index % FANOUT) as usize].compare_exchange(m, None, Some(object)),
                // Others have appended so much meanwhile that it is forgotten already.
                None => false,
            };
            // It fails if another thread has done it, perhaps for us.
            let _ = self.len.compare_exchange(index, index + 1);
            if is_appended {
                return Ok(index);
            }
        }
    }

    /// Returns the object of an index, and brings it near; `None` if there is none yet, or if it is
    /// forgotten.
    pub fn get<'m>(&self, m: &'m Mutator<'_>, index: u64) -> Result<Option<Gc<'m, T>>, GcError> {
        if index < self.start() || index >= self.len() {
            return Ok(None);
        }
        match self.leaf(m, index, false)? {
            Some(leaf) => leaf[(index % FANOUT) as usize].load(m),
            None => Ok(None),
        }
    }

    /// Returns up to `most` objects from an index on, or from the first one that is not forgotten. What
    /// is far is read together.
    pub fn range<'m>(&self, m: &'m Mutator<'_>, from: u64, most: usize) -> Result<Vec<Gc<'m, T>>, GcError> {
        let mut at = from.max(self.start());
        let end = at.saturating_add(most as u64).min(self.len());
        let mut found = Vec::new();
        while at < end {
            // Each tree begins at a multiple of the size of a leaf.
            let next = end.min((at / FANOUT + 1) * FANOUT);
            if let Some(leaf) = self.leaf(m, at, false)? {
                let first = (at % FANOUT) as usize;
                let wanted: Vec<_> = Gc::get(leaf)[first..first + (next - at) as usize].iter().collect();
                found.extend(m.load_many(&wanted)?.into_iter().flatten());
            }
            at = next;
        }
        Ok(found)
    }

    /// Returns the leaf of an index; `None` if it is forgotten, or if it is not there and not to be
    /// made.
    fn leaf<'m>(&self, m: &'m Mutator<'_>, index: u64, makes: bool) -> Result<Option<Gc<'m, Leaf<T>>>, GcError> {
        let (tree, within) = tree_of(index);
        let mut node = load_or_make::<T>(m, &self.trees[tree], tree, makes)?;
        for height in (0..tree).rev() {
            let Some(inner) = node.and_then(|node| node.downcast::<Inner>(m)) else { return Ok(None) };
            let slot = &Gc::get(inner)[(within >> (FANOUT_BITS * (height as u32 + 1)) & (FANOUT - 1)) as usize];
            node = load_or_make::<T>(m, slot, height, makes)?;
        }
        Ok(node.and_then(|node| node.downcast(m)))
    }

    /// Forgets the objects before an index, so that they are collected, as far as nothing else leads to
    /// them; those that share a node of 64 with others only when all of these are forgotten. After an error
    /// some of them may be forgotten; call it again.
    pub fn trim(&self, m: &Mutator<'_>, before: u64) -> Result<(), GcError> {
        let before = before.min(self.len());
        let start = self.start();
        if before <= start {
            return Ok(());
        }
        let trimmed = m.alloc(Trimmed)?.as_any();
        for (tree, slot) in self.trees.iter().enumerate() {
            trim_node(m, slot, tree, FIRSTS[tree], start..before, trimmed)?;
        }
        let mut start = start;
        while start < before
            && let Err(other) = self.start.compare_exchange(start, before)
        {
            start = other;
        }
        Ok(())
    }
}

/// Returns the node of this height that a reference leads to, and makes it if it shall be there.
#[inline]
fn load_or_make<'m, T: Referent + ?Sized>(
    m: &'m Mutator<'_>,
    slot: &Ref<AnyObject>,
    height: usize,
    makes: bool,
) -> Result<Option<Gc<'m, AnyObject>>, GcError> {
    let found = slot.load(m)?;
    if found.is_some() || !makes {
        return Ok(found);
    }
    make::<T>(m, slot, height)
}

#[cold]
fn make<'m, T: Referent + ?Sized>(
    m: &'m Mutator<'_>,
    slot: &Ref<AnyObject>,
    height: usize,
) -> Result<Option<Gc<'m, AnyObject>>, GcError> {
    let made = match height {
        0 => m.alloc_array(FANOUT as usize, |_| Ref::<T>::null())?.as_any(),
        _ => m.alloc_array(FANOUT as usize, |_| Ref::<AnyObject>::null())?.as_any(),
    };
    slot.compare_exchange(m, None, Some(made));
    // Perhaps another thread was first.
    slot.load(m)
}

/// Puts `trimmed` in place of the nodes from this one on all of whose objects lie before the end of
/// `range`. Those before its beginning are there already.
fn trim_node(
    m: &Mutator<'_>,
    slot: &Ref<AnyObject>,
    height: usize,
    first: u64,
    range: core::ops::Range<u64>,
    trimmed: Gc<'_, AnyObject>,
) -> Result<(), GcError> {
    let end = first + objects_of(height);
    if end <= range.start || first >= range.end {
        return Ok(());
    }
    if end <= range.end {
        slot.store(m, Some(trimmed));
    } else if height > 0
        && let Some(inner) = slot.load(m)?.and_then(|node| node.downcast::<Inner>(m))
    {
        for (child, slot) in inner.iter().enumerate() {
            let first = first + child as u64 * objects_of(height - 1);
            trim_node(m, slot, height - 1, first, range.clone(), trimmed)?;
        }
    }
    Ok(())
}
