//! The places where a function over far pointers runs: in the heap, and over the bytes of its
//! region.
//!
//! A place can stop its function: a `follow` that cannot go on never completes, and who polls the
//! function looks at the place after each poll. So no function goes on by ignoring that its budget
//! is used up, or that a page must not be read where it is.

use super::bytes::{self, BytesRef, TextRef};
use super::entries::{self, EntriesRef, EntryCursor};
use super::flat::{self, FlatCursor, FlatRef};
use super::items::{ItemCursor, ItemsRef};
use super::part::{FarPart, ObjectRef, PartBytes, RootImage};
use super::reach::{PageMap, ServerPages};
use super::view_traits::{FarRef, FarView, Loan, ViewSource};
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope};
use crate::ptr::Pointer;
use bytemuck::Pod;
use core::cell::{Cell, RefCell};
use core::cmp::Ordering;
use core::future::{Future, pending};
use core::hash::BuildHasher;
use core::ops::RangeBounds;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{CARD_BYTES, SlotHint};
use farfield_wic::{CallError, Fault, Place};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// The seal of [`FarPlace`]. What reads a part of an object relies on getting that part, and no other.
pub(super) mod sealed {
    /// Marker of the places of this crate.
    #[expect(unnameable_types, reason = "nobody else shall implement it")]
    pub trait Sealed {}
}

/// The place where a [`FarFunction`](crate::FarFunction) runs, as far as the function sees it. Only this
/// crate has places.
pub trait FarPlace: sealed::Sealed {
    /// Returns a copy of the value to which the pointer leads. At the client, the value comes near
    /// if it is far; at a memory server it is read where it is.
    ///
    /// Takes one step, and one more for each whole 4 KiB of the value.
    fn follow<'f, T: FarView>(
        &'f self,
        pointer: FarRef<'f, T>,
    ) -> impl Future<Output = Result<T::View<'f>, Fault>> + 'f;

    /// Takes a step. A loop that follows no pointer calls this, because a function can be ended
    /// only here and in [`FarPlace::follow`].
    fn yield_now(&self) -> impl Future<Output = ()>;

    /// Reads bytes, from the one with index `at` on. Returns how many: fewer than `into` has room for
    /// only at the end.
    ///
    /// Takes a step for each 64 KiB, and one for each whole 4 KiB.
    fn read<'f>(&'f self, bytes: BytesRef<'f>, at: usize, into: &mut [u8]) -> impl Future<Output = Result<usize, Fault>>
    where
        Self: Sized,
    {
        bytes::read(self, bytes, at, into)
    }

    /// Returns a copy of the bytes of this range that exist. Takes the steps of [`FarPlace::read`].
    ///
    /// Fails with [`Fault::TooLong`] if there are more than 16 MiB: read these in pieces.
    fn bytes<'f>(
        &'f self,
        bytes: BytesRef<'f>,
        range: impl RangeBounds<usize>,
    ) -> impl Future<Output = Result<Vec<u8>, Fault>>
    where
        Self: Sized,
    {
        bytes::copy(self, bytes, range)
    }

    /// Returns a copy of a text. Takes the steps of [`FarPlace::read`], and fails as [`FarPlace::bytes`]
    /// does.
    fn text<'f>(&'f self, text: TextRef<'f>) -> impl Future<Output = Result<String, Fault>>
    where
        Self: Sized,
    {
        bytes::text(self, text)
    }

    /// Returns a walk over the elements of a list, a queue, a stack (from its bottom), a vector or an
    /// array, in order.
    ///
    /// At a server, such a collection must be short, or a part of a root that is near ([`FarRef::near`]).
    /// The call continues at the client if it is inside of a far value and has more than four chunks, or
    /// 8 MiB as a vector or an array, because its table is near then.
    fn items<'f, T: FarView>(&'f self, items: ItemsRef<'f, T>) -> ItemCursor<'f, Self, T>
    where
        Self: Sized,
    {
        ItemCursor::new(self, items, ..)
    }

    /// Returns a walk over the elements with these indices, as far as they exist, as
    /// [`FarPlace::items`] does. It reads no elements before the first one.
    fn items_in<'f, T: FarView>(
        &'f self,
        items: ItemsRef<'f, T>,
        range: impl RangeBounds<usize>,
    ) -> ItemCursor<'f, Self, T>
    where
        Self: Sized,
    {
        ItemCursor::new(self, items, range)
    }

    /// Returns the element with this index, if there is one. Takes one step, and one more for each
    /// whole 4 KiB of the element.
    fn item<'f, T: FarView>(
        &'f self,
        items: ItemsRef<'f, T>,
        index: usize,
    ) -> impl Future<Output = Result<Option<T::View<'f>>, Fault>>
    where
        Self: Sized,
    {
        async move { ItemCursor::new(self, items, index..index.saturating_add(1)).next().await }
    }

    /// Returns a walk over the entries of an ordered map whose keys lie in a range, in the order of
    /// their keys: `far.range(map, 10..20)`, `far.range(map, ..)`.
    fn range<'f, K: FarView, V: FarView>(
        &'f self,
        map: EntriesRef<'f, K, V>,
        range: impl RangeBounds<K::View<'f>>,
    ) -> EntryCursor<'f, Self, K, V, impl Fn(&K::View<'f>) -> Ordering>
    where
        Self: Sized,
        K::View<'f>: Ord,
    {
        EntryCursor::new(self, map, move |key: &K::View<'f>| entries::position(&range, key))
    }

    /// Returns a walk over the entries of an ordered map for whose keys `position` returns `Equal`:
    /// for keys before these `Less`, for keys beyond them `Greater`. For keys whose views have no
    /// order of their own.
    fn range_by<'f, K: FarView, V: FarView, B: Fn(&K::View<'f>) -> Ordering>(
        &'f self,
        map: EntriesRef<'f, K, V>,
        position: B,
    ) -> EntryCursor<'f, Self, K, V, B>
    where
        Self: Sized,
    {
        EntryCursor::new(self, map, position)
    }

    /// Returns the value of a key of an ordered map, if there is one. Takes one step for each level
    /// of the tree, and one more for each whole 4 KiB of a node.
    fn get<'f, K: FarView, V: FarView>(
        &'f self,
        map: EntriesRef<'f, K, V>,
        key: K::View<'f>,
    ) -> impl Future<Output = Result<Option<V::View<'f>>, Fault>>
    where
        Self: Sized,
        K::View<'f>: Ord,
    {
        entries::get(self, map, move |other: &K::View<'f>| other.cmp(&key))
    }

    /// Returns the value of a key of a flat hash map, if there is one. Takes two steps, and more if the
    /// bucket has several pages or hashes are equal.
    ///
    /// The hash function must be one whose view is a hash function, such as
    /// [`SeededState`](crate::SeededState): keys of a map with another one are hashed by their program alone.
    ///
    /// ```compile_fail,E0277
    /// # use farfield::{FarFlatMap, FarFunction, FarPlace, FarRef, Fault};
    /// # struct Look;
    /// # impl FarFunction for Look {
    /// #     const NAME: &'static str = "example.look";
    /// #     const VERSION: u32 = 1;
    /// #     type Root = FarFlatMap<u64, u32>;
    /// #     type Argument = u64;
    /// #     type Answer = Option<u32>;
    /// #     async fn run<P: FarPlace>(far: &P, map: FarRef<'_, Self::Root>, key: u64) -> Result<Option<u32>, Fault> {
    /// let map = far.follow(map).await?;
    /// far.lookup(map, key).await // error: the trait bound `UnknownState: BuildHasher` is not satisfied
    /// #     }
    /// # }
    /// ```
    ///
    /// At a server, the map must be a part of a root that is near ([`FarRef::near`]). The call continues at
    /// the client if it is inside of a far value, or has more than 8 Ki places in its directory, some 4,000
    /// to 8,000 pages.
    fn lookup<'f, K: FarView + Pod, V: FarView + Pod, S: FarView>(
        &'f self,
        map: FlatRef<'f, K, V, S>,
        key: K,
    ) -> impl Future<Output = Result<Option<V::View<'f>>, Fault>>
    where
        Self: Sized,
        S::View<'f>: BuildHasher,
    {
        flat::lookup(self, map, key)
    }

    /// Returns a walk over all entries of a flat hash map, in no order. At a server, the map must be a part
    /// of a root that is near.
    fn entries<'f, K: FarView + Pod, V: FarView + Pod, S: FarView>(
        &'f self,
        map: FlatRef<'f, K, V, S>,
    ) -> FlatCursor<'f, Self, K, V, S>
    where
        Self: Sized,
    {
        FlatCursor::new(self, map, 0..usize::MAX)
    }

    /// Calls `read` with a part of a far object, which comes near for that at the client. If it
    /// returns `None`, the bytes are no value, and the function is ended.
    #[doc(hidden)]
    fn look<'f, R>(
        &'f self,
        part: FarPart<'f>,
        read: impl FnOnce(&PartBytes<'_, 'f>) -> Option<R>,
    ) -> impl Future<Output = Result<R, Fault>>;

    /// Begins to bring an object near that is read soon, where that makes sense.
    #[doc(hidden)]
    fn announce(&self, object: ObjectRef<'_>);

    /// Returns the tables that came with the call.
    #[doc(hidden)]
    fn tables(&self) -> &[u32];

    /// Ends the function, because it needs a table that is near at the client.
    #[doc(hidden)]
    fn halt_without_table<R>(&self) -> impl Future<Output = R>;
}

/// Number of steps after which the place at the client lets pages leave that it has used.
const RENEW_EVERY: u64 = 16;
/// Number of steps after which the time is looked at.
const LOOK_EVERY: u64 = 64;

/// Reason why the place at the client has stopped its function.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeapStop {
    Far(FarError),
    Call(CallError),
}

/// Steps of a function in the heap, and their limits.
pub(super) struct StepCounter {
    taken: Cell<u64>,
    most: u64,
    began: Instant,
    within: Duration,
}

impl StepCounter {
    pub(super) fn new(most: u64, began: Instant, within: Duration) -> StepCounter {
        StepCounter { taken: Cell::new(0), most, began, within }
    }

    pub(super) fn taken(&self) -> u64 {
        self.taken.get()
    }

    /// Takes a step, and one more for each whole page. Fails if a limit is passed.
    pub(super) fn step(&self, bytes: usize) -> Result<(), CallError> {
        let before = self.taken.get();
        let taken = before + 1 + (bytes / PAGE_BYTES) as u64;
        self.taken.set(taken);
        if taken > self.most {
            return Err(CallError::Overrun { steps: before });
        }
        if before / LOOK_EVERY == taken / LOOK_EVERY { Ok(()) } else { self.check_time() }
    }

    /// Fails if the time is over.
    pub(super) fn check_time(&self) -> Result<(), CallError> {
        let is_over = self.began.elapsed() > self.within;
        if is_over { Err(CallError::TimedOut { after: self.within }) } else { Ok(()) }
    }
}

/// The place at the client: values are read near, and come near if they are far.
pub(super) struct HeapPlace<'h> {
    scope: RefCell<Scope<'h>>,
    steps: StepCounter,
    /// Number of steps at which the scope is renewed.
    renew_at: Cell<u64>,
    stop: Cell<Option<HeapStop>>,
}

impl<'h> HeapPlace<'h> {
    pub(super) fn new(core: &'h HeapInner, steps: StepCounter) -> HeapPlace<'h> {
        let (scope, renew_at) = (RefCell::new(Scope::new(core)), Cell::new(RENEW_EVERY));
        HeapPlace { scope, steps, renew_at, stop: Cell::new(None) }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps.taken()
    }

    pub(super) fn stopped(&self) -> Option<HeapStop> {
        self.stop.get()
    }

    async fn halt<R>(&self, stop: HeapStop) -> R {
        self.stop.set(Some(stop));
        pending().await
    }

    async fn step(&self, bytes: usize) {
        if let Err(error) = self.steps.step(bytes) {
            self.halt(HeapStop::Call(error)).await
        }
    }

    /// Brings something near, and lets pages leave that were used before if that is needed.
    async fn near<R>(&self, mut bring: impl FnMut() -> Result<R, FarError>) -> Result<R, Fault> {
        if self.steps.taken() >= self.renew_at.get() {
            self.renew();
        }
        let mut result = bring();
        if result.as_ref().err() == Some(&FarError::NearFull) {
            self.renew();
            result = bring();
        }
        match result {
            Ok(found) => Ok(found),
            Err(FarError::Pool(error)) => Err(error.into()),
            Err(error) => self.halt(HeapStop::Far(error)).await,
        }
    }

    /// Renews the scope. Views are copies, so nothing is kept by it.
    fn renew(&self) {
        self.renew_at.set(self.steps.taken() + RENEW_EVERY);
        self.scope.borrow_mut().renew();
    }
}

/// Reads a value, which comes near for that.
pub(super) fn view_in<'f, T: FarView>(scope: &Scope<'_>, pointer: FarRef<'f, T>) -> Result<T::View<'f>, FarError> {
    assert!(pointer.is_here, "the places of a function see only pointers of their own");
    if let Some(root) = pointer.near {
        // SAFETY: the root is borrowed for `'f`, and nothing that it owns is dropped or changed in
        // that time (`FarView`).
        return Ok(root.view(unsafe { Loan::new() }));
    }
    let slot = Pointer::from_halves(pointer.place, pointer.number);
    let value = slot.address(scope, AccessMode::Read)?.cast::<T>();
    // SAFETY: the pointer was made of an owner that is borrowed for `'f`, or of a view of such
    // a value (`is_here`), so a `T` is there, and neither it nor what it owns is dropped or
    // changed in that time (`FarView`). It is near as long as `scope`.
    Ok(unsafe { (*value).view(Loan::new()) })
}

/// Returns the bytes of a part, which comes near for that, and stays so as long as the scope lasts.
pub(super) fn part_in<'s, 'f>(scope: &'s Scope<'_>, part: FarPart<'f>) -> Result<PartBytes<'s, 'f>, FarError> {
    let FarPart { object, offset, len } = part;
    assert!(object.is_here, "the places of a function see only pointers of their own");
    let slot = Pointer::from_halves(object.place, object.number);
    let address = slot.address(scope, AccessMode::Read)?;
    // SAFETY: the pointer was made of a collection that is lent for `'f`, so the object is there, with these
    // bytes, and is neither freed nor changed in that time. It is near as long as the scope, which is borrowed.
    Ok(unsafe { PartBytes::near(address.add(offset), len) })
}

/// Returns what was found in a part of this process.
pub(super) fn found<R>(found: Option<R>) -> R {
    found.unwrap_or_else(|| unreachable!("the parts of a collection are as it made them"))
}

impl sealed::Sealed for HeapPlace<'_> {}

impl FarPlace for HeapPlace<'_> {
    async fn follow<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, Fault> {
        self.step(size_of::<T>()).await;
        self.near(|| view_in(&self.scope.borrow(), pointer)).await
    }

    async fn yield_now(&self) {
        self.step(0).await;
        // The time is looked at each time, because a step may take long.
        if let Err(error) = self.steps.check_time() {
            self.halt(HeapStop::Call(error)).await
        }
    }

    async fn look<'f, R>(
        &'f self,
        part: FarPart<'f>,
        read: impl FnOnce(&PartBytes<'_, 'f>) -> Option<R>,
    ) -> Result<R, Fault> {
        self.step(part.len).await;
        let mut read = Some(read);
        // As long as the scope is borrowed, what `read` calls cannot renew it.
        let result = self.near(|| {
            let scope = self.scope.borrow();
            let bytes = part_in(&scope, part)?;
            Ok(read.take().map(|read| found(read(&bytes))))
        });
        Ok(result.await?.unwrap_or_else(|| unreachable!("a part is read once")))
    }

    fn announce(&self, object: ObjectRef<'_>) {
        let scope = self.scope.borrow();
        scope.core.prefetch(scope.record, scope.core.number_of(object.number.get()));
    }

    fn tables(&self) -> &[u32] {
        &[]
    }

    async fn halt_without_table<R>(&self) -> R {
        unreachable!("tables are at the client")
    }
}

/// Part of a call that says how its heap lies in the region.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FarSpan {
    /// Number of the heap's first page among those of all heaps of its process.
    pub(super) first: u32,
    /// Number of its pages, and of all numbers that its pointers may have: the rest are handles.
    pub(super) pages: u32,
    pub(super) numbers: u64,
    /// Pages whose far copies are older than what the heap has near, in ascending order: the first
    /// one, then distances.
    pub(super) changed: Vec<u32>,
}

/// Reason why the place at a server has stopped its function.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RegionStop {
    /// The function has met this page, of which the client has a newer version.
    Changed(u32),
    /// The function has met a value that can move, which only the client can find.
    Movable,
    /// The bytes at this offset are no value of the type that the pointer has.
    NoValue(u64),
    /// The function has met a collection whose table is near at the client.
    TableNear,
    /// The function has met this page, which the server does not have.
    OtherMember(u32),
}

impl RegionStop {
    fn other_member(page: u64) -> RegionStop {
        RegionStop::OtherMember(u32::try_from(page).unwrap_or(u32::MAX))
    }
}

/// The place over the bytes of the heap's region, wherever those are read.
pub(super) struct RegionPlace<'p, P: Place> {
    place: &'p P,
    first: u32,
    pages: u32,
    numbers: u64,
    changed: Vec<u32>,
    map: PageMap,
    /// The root, if it is near at the client.
    root: RootImage,
    stop: Cell<Option<RegionStop>>,
}

impl<'p, P: Place> RegionPlace<'p, P> {
    pub(super) fn new(place: &'p P, span: FarSpan, server: ServerPages, root: Option<RootImage>) -> RegionPlace<'p, P> {
        let mut changed = span.changed;
        let mut last = 0u32;
        for page in &mut changed {
            last = last.saturating_add(*page);
            *page = last;
        }
        let (first, pages, numbers) = (span.first, span.pages, span.numbers);
        let root = root.unwrap_or(RootImage { bytes: Vec::new(), tables: Vec::new() });
        let map = PageMap::new(server);
        RegionPlace { place, first, pages, numbers, changed, map, root, stop: Cell::new(None) }
    }

    pub(super) fn stopped(&self) -> Option<RegionStop> {
        self.stop.get()
    }

    async fn halt<R>(&self, stop: RegionStop) -> R {
        self.stop.set(Some(stop));
        pending().await
    }

    /// Reads bytes of an object, and returns their offset in the region, too.
    async fn fetch(&self, place: u32, number: u32, offset: usize, len: usize) -> Result<(u64, P::Bytes<'_>), Fault> {
        let number = number.wrapping_sub(self.first);
        if number >= self.pages && u64::from(number) < self.numbers {
            return self.halt(RegionStop::Movable).await;
        }
        let card = u64::from(SlotHint(place).card());
        let start = u64::from(number) * PAGE_BYTES as u64 + card * CARD_BYTES as u64;
        let offset = start.saturating_add(offset as u64);
        if number >= self.pages {
            // A step, so that a function that goes on all the same ends.
            self.place.yield_now().await;
            return Err(Fault::OutOfRange { offset });
        }
        let first = offset / PAGE_BYTES as u64;
        let last = offset.saturating_add((len as u64).saturating_sub(1)) / PAGE_BYTES as u64;
        let local = match (self.map.place(first, last), self.changed(first, last)) {
            (Err(page), _) if self.map.is_fixed() => return self.halt(RegionStop::other_member(page)).await,
            // A page that is written back may come to lie here.
            (_, Some(page)) => return self.halt(RegionStop::Changed(page)).await,
            (Err(page), None) => return self.halt(RegionStop::other_member(page)).await,
            (Ok(local), None) => local,
        };
        let bytes = self.place.read_range(PageId(local).offset() + offset % PAGE_BYTES as u64, len).await;
        let bytes = bytes.map_err(|fault| match fault {
            Fault::Corrupt { page } => Fault::Corrupt { page: self.map.page_of(page) },
            fault => fault,
        });
        Ok((offset, bytes?))
    }

    /// Returns the first of these pages of which the client has a newer version.
    fn changed(&self, first: u64, last: u64) -> Option<u32> {
        let index = self.changed.partition_point(|page| u64::from(*page) < first);
        self.changed.get(index).copied().filter(|page| u64::from(*page) <= last)
    }
}

impl<P: Place> sealed::Sealed for RegionPlace<'_, P> {}

impl<P: Place> FarPlace for RegionPlace<'_, P> {
    async fn follow<'f, T: FarView>(&'f self, pointer: FarRef<'f, T>) -> Result<T::View<'f>, Fault> {
        if pointer.is_root {
            self.place.yield_now().await;
            let bytes = Some(&*self.root.bytes).filter(|bytes| bytes.len() == size_of::<T>());
            let view = bytes.and_then(|bytes| T::decode(bytes, ViewSource::Root));
            return match view {
                Some(view) => Ok(view),
                None => self.halt(RegionStop::NoValue(0)).await,
            };
        }
        let (offset, bytes) = self.fetch(pointer.place, pointer.number.get(), 0, size_of::<T>()).await?;
        let view = T::decode(&bytes, ViewSource::Region);
        drop(bytes);
        match view {
            Some(view) => Ok(view),
            None => self.halt(RegionStop::NoValue(offset)).await,
        }
    }

    async fn look<'f, R>(
        &'f self,
        part: FarPart<'f>,
        read: impl FnOnce(&PartBytes<'_, 'f>) -> Option<R>,
    ) -> Result<R, Fault> {
        let FarPart { object, offset, len } = part;
        let (offset, bytes) = self.fetch(object.place, object.number.get(), offset, len).await?;
        let found = read(&PartBytes::of(&bytes));
        drop(bytes);
        match found {
            Some(found) => Ok(found),
            None => self.halt(RegionStop::NoValue(offset)).await,
        }
    }

    fn announce(&self, _: ObjectRef<'_>) {}

    fn tables(&self) -> &[u32] {
        &self.root.tables
    }

    async fn halt_without_table<R>(&self) -> R {
        self.halt(RegionStop::TableNear).await
    }

    async fn yield_now(&self) {
        self.place.yield_now().await;
    }
}
