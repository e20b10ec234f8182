//! Folds of a [`FarMap`]: its index is near, or changed through atomics, so the heap reads it, and a call
//! takes along where the next entries are.
//!
//! Threads change a map through `&self`. A fold borrows it mutably, so nobody does meanwhile, and the
//! entries that the index names stay where they are.

use super::fold::{FarFoldable, FarTraversal, Fold, FoldEnd};
use super::part::{NearTables, ObjectRef};
use super::place::FarPlace;
use super::view_traits::{FarRef, FarView, Loan, ViewSource, ViewTypes, layout};
use super::{HeapCall, STEPS_MAX};
use crate::Heap;
use crate::collections::{EntryLayout, FarMap};
use crate::error::FarError;
use crate::heap::{HeapInner, Scope, SlotWord};
use crate::offload::OffloadError;
use core::fmt::Debug;
use core::hash::{BuildHasher, Hash};
use core::marker::PhantomData;
use core::ops::Range;
use core::time::Duration;
use farfield_core::heap::SlotHint;
use farfield_wic::{CallError, Fault, Where};
use std::hash::RandomState;
use std::time::Instant;

/// Most entries of one call. Where they are takes some 32 KiB of an argument, which has 64.
const CALL_ENTRIES: usize = if cfg!(test) { 100 } else { 4096 };

/// Entries of a [`FarMap`], as what a [`FarFold`](crate::FarFold) or a [`FarTraversal`] is over:
/// [`Heap::fold_map`] runs it.
pub struct MapEntries<K, V> {
    slots: Vec<SlotWord>,
    holds: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Debug for MapEntries<K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "MapEntries({})", self.slots.len())
    }
}

/// Where some entries of a map are.
pub struct MapEntriesRef<'f, K, V> {
    table: SlotTable<'f>,
    holds: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for MapEntriesRef<'_, K, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K, V> Copy for MapEntriesRef<'_, K, V> {}

impl<K, V> Debug for MapEntriesRef<'_, K, V> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("MapEntriesRef")
    }
}

/// Table of slots.
#[derive(Clone, Copy)]
enum SlotTable<'f> {
    /// Slots of this process.
    Slots(&'f [SlotWord]),
    /// Pairs of words of the tables that came with the call, from this word on.
    Sent { first: u32, count: u32 },
    /// Nothing of it, because it is in another process.
    Elsewhere,
}

impl<'f, K, V> MapEntriesRef<'f, K, V> {
    fn len(&self) -> usize {
        match self.table {
            SlotTable::Slots(slots) => slots.len(),
            SlotTable::Sent { count, .. } => count as usize,
            SlotTable::Elsewhere => 0,
        }
    }

    fn object(&self, index: usize, tables: &[u32]) -> Option<ObjectRef<'f>> {
        match self.table {
            // SAFETY: the entries were lent with the slots.
            SlotTable::Slots(slots) => slots.get(index).map(|slot| ObjectRef::of(*slot, unsafe { Loan::new() })),
            SlotTable::Sent { first, count } => {
                let words = tables.get(first as usize..)?.get(..(count as usize).checked_mul(2)?)?;
                let [number, card] = *words.get(index.checked_mul(2)?..)?.first_chunk()?;
                ObjectRef::elsewhere(u64::from(number) << 32 | u64::from(card as u8))
            }
            SlotTable::Elsewhere => None,
        }
    }
}

// SAFETY: the slots stay as they are while they are shared. The entries do, because only a fold has a value of
// this type, and it borrows their map mutably.
unsafe impl<K: FarView + Send + Sync, V: FarView + Send + Sync> FarView for MapEntries<K, V> {
    type View<'f> = MapEntriesRef<'f, K, V>;
    const NAME: &'static str = "FarMap";
    const LAYOUT: u64 = layout(
        Self::NAME,
        Self::ENTRY_BYTES,
        Self::VALUE_AT,
        &[(K::NAME, size_of::<K>(), K::LAYOUT), (V::NAME, size_of::<V>(), V::LAYOUT)],
    );

    fn view<'f>(&self, _: Loan<'f>) -> MapEntriesRef<'f, K, V> {
        // SAFETY: the slots are lent for that time, wherever the vector itself is moved.
        let slots = unsafe { &*core::ptr::from_ref(&*self.slots) };
        MapEntriesRef { table: SlotTable::Slots(slots), holds: PhantomData }
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<MapEntriesRef<'f, K, V>> {
        let word = |at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
        let table = match source {
            ViewSource::Root => SlotTable::Sent { first: word(0)?, count: word(4)? },
            ViewSource::Region => SlotTable::Elsewhere,
        };
        Some(MapEntriesRef { table, holds: PhantomData })
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        image[..4].copy_from_slice(&(tables.len() as u32).to_ne_bytes());
        image[4..8].copy_from_slice(&(self.slots.len() as u32).to_ne_bytes());
        for slot in &self.slots {
            let word = slot.word();
            tables.note((word >> 32) as u32);
            tables.push((word >> 32) as u32);
            tables.push(SlotHint(word as u32).card().into());
        }
    }

    fn add_pointees(types: &mut ViewTypes) {
        types.add::<K>();
        types.add::<V>();
    }
}

impl<K: Send + Sync + 'static, V: Send + Sync + 'static> MapEntries<K, V> {
    const VALUE_AT: usize = EntryLayout::<K, V>::value_at(size_of::<K>());
    const ENTRY_BYTES: usize = Self::VALUE_AT + size_of::<V>();
}

/// Entries that are fetched ahead.
const WINDOW: usize = 16;

impl<K: FarView + Send + Sync, V: FarView + Send + Sync> FarFoldable for MapEntries<K, V> {
    type Item<'f> = (K::View<'f>, V::View<'f>);
    /// Entries are in no order.
    type Key<'f> = ();

    fn pieces<F: FarTraversal<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        core::iter::once(0..self.slots.len()).collect()
    }

    async fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
        far: &'f P,
        entries: MapEntriesRef<'f, K, V>,
        (piece, _): (Range<usize>, Vec<u16>),
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<FoldEnd, Fault> {
        let mut ahead = piece.start;
        for index in piece.start..piece.end.min(entries.len()) {
            while ahead < index + WINDOW {
                ahead += 1;
                if let Some(object) = entries.object(ahead, far.tables()) {
                    far.announce(object);
                }
            }
            let Some(object) = entries.object(index, far.tables()) else {
                // A step, so that a function that goes on all the same ends.
                far.yield_now().await;
                return Err(Fault::OutOfRange { offset: 0 });
            };
            let part = object.part(0, Self::ENTRY_BYTES);
            // SAFETY: in this process, an entry of the map is there, key and value at these places.
            let entry = far.look(part, |part| unsafe { part.value::<K>(0).zip(part.value::<V>(Self::VALUE_AT)) });
            if F::visit(far, state, entry.await?, argument).await?.is_break() {
                return Ok(FoldEnd::Over);
            }
        }
        Ok(FoldEnd::Piece)
    }
}

/// A fold of a [`FarMap`], about to run ([`Heap::fold_map`]).
#[must_use = "nothing runs before `run`"]
pub struct HeapMapFold<'h, F: FarTraversal, K, V, S = RandomState>
where
    K: Send + Sync + 'static,
    V: Send + Sync + 'static,
{
    core: &'h HeapInner,
    map: &'h mut FarMap<K, V, S>,
    argument: F::Argument,
    place: Where,
    within: Duration,
    steps_max: u64,
}

impl<F: FarTraversal, K: Send + Sync + 'static, V: Send + Sync + 'static, S> Debug for HeapMapFold<'_, F, K, V, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "HeapMapFold({:?}, {:?})", F::NAME, self.place)
    }
}

impl<F, K, V, S> HeapMapFold<'_, F, K, V, S>
where
    F: FarTraversal<Over = MapEntries<K, V>>,
    K: FarView + Send + Sync + Hash + Eq,
    V: FarView + Send + Sync,
    S: BuildHasher,
{
    /// Sets the place where the fold runs, as [`HeapFold::at`](crate::HeapFold::at) does.
    pub fn at(mut self, place: Where) -> Self {
        self.place = place;
        self
    }

    /// Sets how long all of the fold may take. Default: the heap's [patience](crate::Builder::patience).
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Sets the most steps of one call: one for each entry, and one more for each whole 4 KiB of it.
    pub fn steps(mut self, most: u64) -> Self {
        self.steps_max = most.max(1);
        self
    }

    /// Runs the fold, and blocks until it has ended. The heap reads the index, and a call has some 4,000
    /// entries, or fewer for a [`FarTraversal`].
    ///
    /// # Errors
    /// Those of [`HeapCall::run`]. The state is lost.
    ///
    /// # Panics
    /// If the fold panics at the client.
    pub fn run(self) -> Result<F::State, OffloadError> {
        let (began, after) = (Instant::now(), self.within);
        let most = CALL_ENTRIES.min(F::PIECE_ELEMENTS.max(1));
        let (mut state, mut next) = (F::begin(&self.argument), Some(0));
        while next.is_some() {
            let left = after.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(CallError::TimedOut { after }.into());
            }
            let entries = MapEntries { slots: self.slots(&mut next, most)?, holds: PhantomData };
            if entries.slots.is_empty() {
                break;
            }
            let call = Fold::<F>::argument(0..entries.slots.len(), state, self.argument.clone());
            let call = HeapCall::<Fold<F>>::new(self.core, FarRef::near(&entries), call);
            let (folded, end) = call.at(self.place).within(left).steps(self.steps_max).run()?;
            state = folded;
            if end == FoldEnd::Over {
                break;
            }
        }
        Ok(state)
    }

    /// Returns the slots of entries from a position of the index on, and moves on.
    fn slots(&self, next: &mut Option<u32>, most: usize) -> Result<Vec<SlotWord>, FarError> {
        let (mut slots, mut of_bucket) = (Vec::with_capacity(most), Vec::new());
        let mut scope = Scope::new(self.core);
        while let Some(at) = next
            && slots.len() < most
        {
            *next = self.map.slots_at(&scope, *at, &mut of_bucket)?;
            slots.append(&mut of_bucket);
            scope.renew();
        }
        Ok(slots)
    }
}

impl Heap {
    /// Prepares a fold over the entries of a map, in no order. It runs at the client, or at the memory
    /// server beside the entries ([`HeapMapFold::at`]). The map is borrowed mutably, so no other thread
    /// changes it meanwhile.
    ///
    /// ```
    /// use core::ops::ControlFlow;
    /// use farfield::{FarFold, FarMap, Heap, MapEntries};
    ///
    /// /// Number and sum of the values from a limit on.
    /// struct AtLeast;
    ///
    /// impl FarFold for AtLeast {
    ///     const NAME: &'static str = "example.at_least";
    ///     const VERSION: u32 = 1;
    ///     type Over = MapEntries<u32, u64>;
    ///     type Argument = u64;
    ///     type State = (u64, u64);
    ///
    ///     fn begin(_: &u64) -> (u64, u64) {
    ///         (0, 0)
    ///     }
    ///
    ///     fn step(state: &mut (u64, u64), (_, value): (u32, u64), limit: &u64) -> ControlFlow<()> {
    ///         if value >= *limit {
    ///             *state = (state.0 + 1, state.1 + value);
    ///         }
    ///         ControlFlow::Continue(())
    ///     }
    /// }
    ///
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let mut map: FarMap<u32, u64> = FarMap::new(&heap)?;
    /// for number in 0..100 {
    ///     map.insert(&heap.enter(), number, u64::from(number))?;
    /// }
    /// assert_eq!(heap.fold_map::<AtLeast, _, _, _>(&mut map, 90).run()?, (10, 945));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A map that others may change is not folded:
    ///
    /// ```compile_fail,E0502
    /// # use core::ops::ControlFlow;
    /// # use farfield::{FarFold, FarMap, Heap, MapEntries};
    /// # struct Count;
    /// # impl FarFold for Count {
    /// #     const NAME: &'static str = "example.count";
    /// #     const VERSION: u32 = 1;
    /// #     type Over = MapEntries<u32, u64>;
    /// #     type Argument = ();
    /// #     type State = u64;
    /// #     fn begin(_: &()) -> u64 { 0 }
    /// #     fn step(state: &mut u64, _: (u32, u64), _: &()) -> ControlFlow<()> {
    /// #         *state += 1;
    /// #         ControlFlow::Continue(())
    /// #     }
    /// # }
    /// # let heap = Heap::builder().build().unwrap();
    /// # let mut map: FarMap<u32, u64> = FarMap::new(&heap).unwrap();
    /// let other = &map;
    /// heap.fold_map::<Count, _, _, _>(&mut map, ()).run().unwrap(); // error: cannot borrow `map` as mutable
    /// other.insert(&heap.enter(), 1, 1).unwrap();
    /// ```
    pub fn fold_map<'h, F, K, V, S>(
        &'h self,
        map: &'h mut FarMap<K, V, S>,
        argument: F::Argument,
    ) -> HeapMapFold<'h, F, K, V, S>
    where
        F: FarTraversal<Over = MapEntries<K, V>>,
        K: FarView + Send + Sync + Hash + Eq,
        V: FarView + Send + Sync,
        S: BuildHasher,
    {
        let core = self.core();
        HeapMapFold { core, map, argument, place: Where::Auto, within: core.patience, steps_max: STEPS_MAX }
    }
}

#[cfg(test)]
impl<K: FarView + Send + Sync + Hash + Eq, V: FarView + Send + Sync> MapEntries<K, V> {
    /// All entries of a map.
    pub(super) fn of(heap: &Heap, map: &mut FarMap<K, V>) -> MapEntries<K, V> {
        let (mut slots, mut of_bucket, mut next) = (Vec::new(), Vec::new(), Some(0));
        while let Some(at) = next {
            next = map.slots_at(&heap.enter(), at, &mut of_bucket).unwrap();
            slots.append(&mut of_bucket);
        }
        MapEntries { slots, holds: PhantomData }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }
}
