//! `FarList`: a list that can be changed at both ends and anywhere between.

use super::chain::{Chain, ChainEnd, NOWHERE, Position};
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, Scope};

/// A list whose elements are near or far: the far counterpart of `LinkedList`.
///
/// Elements lie in chunks of about a page. The order of the chunks is kept near, 24 bytes per
/// chunk. So a walk in either direction fetches ahead, and a cursor moves without touching an
/// element.
///
/// ```
/// use farfield::{FarList, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let scope = heap.enter();
/// let mut list = FarList::new();
/// list.push_back(&scope, 1)?;
/// list.push_back(&scope, 3)?;
/// let mut cursor = list.cursor_front_mut();
/// cursor.insert_after(&scope, 2)?;
/// let all = list.iter(&scope).map(|element| element.copied()).collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(all, [1, 2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```compile_fail,E0502
/// # let heap = farfield::Heap::builder().build().unwrap();
/// # let mut list = farfield::FarList::<u32>::new();
/// let scope = heap.enter();
/// let first = list.iter(&scope).next();
/// list.push_back(&scope, 4).unwrap(); // error: cannot borrow `list` as mutable
/// println!("{first:?}");
/// ```
pub struct FarList<T: Send + 'static> {
    pub(super) chain: Chain<T>,
}

impl<T: Send + 'static> FarList<T> {
    /// Makes an empty list. It belongs to the heap of its first element.
    pub const fn new() -> FarList<T> {
        FarList { chain: Chain::new() }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.chain.len()
    }

    /// Checks whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Inserts an element before all others.
    pub fn push_front(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, ChainEnd::Front, value)
    }

    /// Inserts an element behind all others.
    pub fn push_back(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        self.chain.push(scope, ChainEnd::Back, value)
    }

    /// Takes the first element out, if there is one.
    pub fn pop_front(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop(scope, ChainEnd::Front)
    }

    /// Takes the last element out, if there is one.
    pub fn pop_back(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        self.chain.pop(scope, ChainEnd::Back)
    }

    /// Returns the first element, if there is one.
    pub fn front<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(ChainEnd::Front))
    }

    /// Returns the last element, if there is one.
    pub fn back<'a>(&'a self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.chain.end(ChainEnd::Back))
    }

    /// Returns the first element, to be changed, if there is one.
    pub fn front_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(ChainEnd::Front))
    }

    /// Returns the last element, to be changed, if there is one.
    pub fn back_mut<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.chain.end(ChainEnd::Back))
    }

    /// Iterates over all elements in order, from either end. All that it has passed stays near as
    /// long as the scope lasts; for long lists there is [`FarList::for_each`].
    pub fn iter<'a>(&'a self, scope: &'a Scope<'a>) -> ListIter<'a, T> {
        ListIter::new(&self.chain, scope)
    }

    /// Visits all elements in order, and renews the scope between chunks.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&T)) -> Result<(), FarError> {
        let mut at = self.chain.end(ChainEnd::Front);
        let mut ahead = ListPrefetcher::new(at, ChainEnd::Back);
        while let Some((first, len)) = self.chain.chunk_at(scope, at, AccessMode::Read)? {
            // SAFETY: so many elements lie there; near as long as the scope, which is renewed
            // below, when nobody has them.
            unsafe { core::slice::from_raw_parts(first, len) }.iter().for_each(&mut visit);
            at = self.chain.next_chunk(at, ChainEnd::Back);
            ahead.step(&self.chain, scope);
            scope.renew();
        }
        Ok(())
    }

    /// Visits all elements like [`FarList::for_each`], for a task: other tasks run while chunks are
    /// fetched.
    pub async fn fetch_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&T)) -> Result<(), FarError> {
        let mut at = self.chain.end(ChainEnd::Front);
        let mut ahead = ListPrefetcher::new(at, ChainEnd::Back);
        loop {
            let chunk = {
                let scope = &*scope;
                scope.retry(|| self.chain.chunk_at(scope, at, AccessMode::Read)).await?
            };
            let Some((first, len)) = chunk else { return Ok(()) };
            // SAFETY: as in `for_each`.
            unsafe { core::slice::from_raw_parts(first, len) }.iter().for_each(&mut visit);
            at = self.chain.next_chunk(at, ChainEnd::Back);
            ahead.step(&self.chain, scope);
            scope.renew();
        }
    }

    /// Visits all elements in order, to change them, and renews the scope between chunks.
    pub fn for_each_mut(&mut self, scope: &mut Scope<'_>, mut visit: impl FnMut(&mut T)) -> Result<(), FarError> {
        let mut at = self.chain.end(ChainEnd::Front);
        let mut ahead = ListPrefetcher::new(at, ChainEnd::Back);
        while let Some((first, len)) = self.chain.chunk_at(scope, at, AccessMode::Write)? {
            // SAFETY: as in `for_each`, and `&mut self` makes them exclusive.
            unsafe { core::slice::from_raw_parts_mut(first, len) }.iter_mut().for_each(&mut visit);
            at = self.chain.next_chunk(at, ChainEnd::Back);
            ahead.step(&self.chain, scope);
            scope.renew();
        }
        Ok(())
    }

    /// Checks whether an element equals `value`. Looks at the elements in order, and renews the
    /// scope between chunks.
    pub fn contains(&self, scope: &mut Scope<'_>, value: &T) -> Result<bool, FarError>
    where
        T: PartialEq,
    {
        let mut at = self.chain.end(ChainEnd::Front);
        let mut ahead = ListPrefetcher::new(at, ChainEnd::Back);
        while let Some((first, len)) = self.chain.chunk_at(scope, at, AccessMode::Read)? {
            // SAFETY: as in `for_each`.
            if unsafe { core::slice::from_raw_parts(first, len) }.contains(value) {
                return Ok(true);
            }
            at = self.chain.next_chunk(at, ChainEnd::Back);
            ahead.step(&self.chain, scope);
            scope.renew();
        }
        Ok(false)
    }

    /// Keeps only the elements that `keep` accepts. Renews the scope on the way. If it fails, all
    /// elements that `keep` has rejected are removed, except perhaps the last one.
    pub fn retain(&mut self, scope: &mut Scope<'_>, keep: impl FnMut(&mut T) -> bool) -> Result<(), FarError> {
        self.chain.retain(scope, keep)
    }

    /// Moves the elements of another list to the end of this one: whole chunks, so no element is
    /// touched. If it fails, elements that were not moved are still in the other list.
    pub fn append(&mut self, scope: &Scope<'_>, other: &mut FarList<T>) -> Result<(), FarError> {
        self.chain.append(scope, &mut other.chain)
    }

    /// Moves the elements from an index on into a new list: whole chunks, except the one that
    /// contains the index. If it fails, nothing has changed.
    ///
    /// # Panics
    /// If the index is beyond the end.
    pub fn split_off(&mut self, scope: &Scope<'_>, at: usize) -> Result<FarList<T>, FarError> {
        assert!(at <= self.len(), "cannot split off at index {at}: the len is {}", self.len());
        Ok(FarList { chain: self.chain.split_off(scope, at)? })
    }

    /// Drops all elements.
    pub fn clear(&mut self) {
        self.chain = Chain::new();
    }

    /// Returns a cursor at the first element.
    pub fn cursor_front(&self) -> Cursor<'_, T> {
        Cursor { chain: &self.chain, at: self.chain.end(ChainEnd::Front) }
    }

    /// Returns a cursor at the last element.
    pub fn cursor_back(&self) -> Cursor<'_, T> {
        Cursor { chain: &self.chain, at: self.chain.end(ChainEnd::Back) }
    }

    /// Returns a cursor at the first element, to change the list.
    pub fn cursor_front_mut(&mut self) -> CursorMut<'_, T> {
        CursorMut { at: self.chain.end(ChainEnd::Front), chain: &mut self.chain }
    }

    /// Returns a cursor at the last element, to change the list.
    pub fn cursor_back_mut(&mut self) -> CursorMut<'_, T> {
        CursorMut { at: self.chain.end(ChainEnd::Back), chain: &mut self.chain }
    }
}

impl<T: Send + 'static> Default for FarList<T> {
    fn default() -> FarList<T> {
        FarList::new()
    }
}

impl<T: Send + 'static> core::fmt::Debug for FarList<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarList({} elements)", self.len())
    }
}

/// A position in a [`FarList`]: an element, or the position behind the last one, which is also the
/// one before the first.
pub struct Cursor<'a, T: Send + 'static> {
    chain: &'a Chain<T>,
    at: Position,
}

impl<'a, T: Send + 'static> Cursor<'a, T> {
    /// Returns the element at the cursor, if there is one.
    pub fn current(&self, scope: &'a Scope<'_>) -> Result<Option<&'a T>, FarError> {
        self.chain.get(scope, self.at)
    }

    /// Moves the cursor to the next element, without touching an element.
    pub fn move_next(&mut self) {
        self.at = self.chain.step(self.at, ChainEnd::Back);
    }

    /// Moves the cursor to the previous element, without touching an element.
    pub fn move_prev(&mut self) {
        self.at = self.chain.step(self.at, ChainEnd::Front);
    }
}

impl<T: Send + 'static> core::fmt::Debug for Cursor<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Cursor({:?})", self.at)
    }
}

/// A position in a [`FarList`] at which the list can be changed.
pub struct CursorMut<'a, T: Send + 'static> {
    chain: &'a mut Chain<T>,
    at: Position,
}

impl<T: Send + 'static> CursorMut<'_, T> {
    /// Returns the element at the cursor, to be changed, if there is one.
    pub fn current<'a>(&'a mut self, scope: &'a Scope<'_>) -> Result<Option<&'a mut T>, FarError> {
        self.chain.get_mut(scope, self.at)
    }

    /// Moves the cursor to the next element, without touching an element.
    pub fn move_next(&mut self) {
        self.at = self.chain.step(self.at, ChainEnd::Back);
    }

    /// Moves the cursor to the previous element, without touching an element.
    pub fn move_prev(&mut self) {
        self.at = self.chain.step(self.at, ChainEnd::Front);
    }

    /// Inserts an element before the one at the cursor; if the cursor is behind the last element,
    /// at the end of the list. The cursor stays at its element.
    pub fn insert_before(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        let nowhere = self.at == NOWHERE;
        let added = self.chain.insert(scope, self.at, value)?;
        self.at = if nowhere { NOWHERE } else { self.chain.step(added, ChainEnd::Back) };
        Ok(())
    }

    /// Inserts an element behind the one at the cursor; if the cursor is behind the last element,
    /// at the front of the list. The cursor stays at its element.
    pub fn insert_after(&mut self, scope: &Scope<'_>, value: T) -> Result<(), AllocError<T>> {
        let nowhere = self.at == NOWHERE;
        let next = self.chain.step(self.at, ChainEnd::Back);
        let added = self.chain.insert(scope, next, value)?;
        self.at = if nowhere { NOWHERE } else { self.chain.step(added, ChainEnd::Front) };
        Ok(())
    }

    /// Takes the element at the cursor out, and moves the cursor to the next one.
    pub fn remove_current(&mut self, scope: &Scope<'_>) -> Result<Option<T>, FarError> {
        let Some((value, next)) = self.chain.remove(scope, self.at)? else { return Ok(None) };
        self.at = next;
        Ok(Some(value))
    }
}

impl<T: Send + 'static> core::fmt::Debug for CursorMut<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CursorMut({:?})", self.at)
    }
}

/// An iterator over elements of a list in order. See [`FarList::iter`].
pub struct ListIter<'a, T: Send + 'static> {
    chain: &'a Chain<T>,
    scope: &'a Scope<'a>,
    ends: [Position; 2],
    left: usize,
    /// Chunks passed from each end. From the second one on, chunks ahead are fetched.
    chunks: [usize; 2],
}

impl<'a, T: Send + 'static> ListIter<'a, T> {
    pub(super) fn new(chain: &'a Chain<T>, scope: &'a Scope<'a>) -> ListIter<'a, T> {
        let ends = [chain.end(ChainEnd::Front), chain.end(ChainEnd::Back)];
        ListIter { chain, scope, ends, left: chain.len(), chunks: [0; 2] }
    }

    fn take(&mut self, end: ChainEnd) -> Option<Result<&'a T, FarError>> {
        self.left = self.left.checked_sub(1)?;
        let (side, towards) = if end == ChainEnd::Front { (0, ChainEnd::Back) } else { (1, ChainEnd::Front) };
        let at = self.ends[side];
        let element = self.chain.get(self.scope, at);
        match element {
            Ok(_) => {
                self.ends[side] = self.chain.step(at, towards);
                if self.ends[side].is_in_other_chunk(at) {
                    self.chunks[side] += 1;
                    if self.chunks[side] > 1 {
                        let next = self.chain.next_chunk(self.ends[side], towards);
                        self.chain.prefetch(self.scope, next);
                    }
                }
            }
            Err(_) => self.left = 0,
        }
        element.transpose()
    }
}

impl<'a, T: Send + 'static> Iterator for ListIter<'a, T> {
    type Item = Result<&'a T, FarError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.take(ChainEnd::Front)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.min(1), Some(self.left))
    }
}

impl<T: Send + 'static> DoubleEndedIterator for ListIter<'_, T> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.take(ChainEnd::Back)
    }
}

impl<T: Send + 'static> core::fmt::Debug for ListIter<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ListIter({} left)", self.left)
    }
}

/// Prefetcher of a long walk through a list.
struct ListPrefetcher {
    at: Position,
    towards: ChainEnd,
    passed: usize,
}

/// Chunks that are fetched ahead.
const WINDOW: usize = 8;

impl ListPrefetcher {
    fn new(at: Position, towards: ChainEnd) -> ListPrefetcher {
        ListPrefetcher { at, towards, passed: 0 }
    }

    /// Notes that the walk has passed a chunk, and prefetches. After the first chunk, it fetches
    /// nothing yet, for the sake of short walks.
    fn step<T: Send + 'static>(&mut self, chain: &Chain<T>, scope: &Scope<'_>) {
        self.passed += 1;
        let steps = match self.passed {
            1 => 1,
            2 => WINDOW,
            _ => 1,
        };
        for _ in 0..steps {
            if self.at == NOWHERE {
                return;
            }
            self.at = chain.next_chunk(self.at, self.towards);
            if self.passed > 1 {
                chain.prefetch(scope, self.at);
            }
        }
    }
}
