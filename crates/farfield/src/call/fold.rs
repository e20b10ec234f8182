//! Folds: functions that see one element of a collection after the other.
//!
//! What walks is the same for all folds. So it can cut a walk into calls that a server takes, each
//! with its part of the table of a long list, and carry the state from one to the next.
//!
//! A [`FarFold`] looks at the elements alone. A [`FarTraversal`] may follow their pointers, and each fold
//! is one.

use super::entries::{EntriesRef, EntryCursor};
use super::flat::{FlatCursor, FlatRef};
use super::function::FarFunction;
use super::items::ItemsRef;
use super::place::FarPlace;
use super::view_traits::{FarRef, FarView, Loan};
use super::{HeapCall, STEPS_MAX};
use crate::collections::{FarArray, FarBTreeMap, FarBTreeSet, FarFlatMap, FarList, FarQueue, FarStack, FarVec};
use crate::heap::HeapInner;
use crate::offload::OffloadError;
use bytemuck::Pod;
use core::cmp::Ordering;
use core::future::Future;
use core::marker::PhantomData;
use core::ops::{ControlFlow, Range};
use core::time::Duration;
use farfield_wic::{CallError, Fault, Where};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// A fold over a collection: code that sees one element after the other, at the client or at the
/// memory server. [`Heap::fold`](crate::Heap::fold) runs it.
///
/// A server that runs it has `AtServer<Fold<F>>` in its registry. To follow pointers in elements, write a
/// [`FarTraversal`]; to walk several collections, a [`FarFunction`].
///
/// ```
/// use core::ops::ControlFlow;
/// use farfield::{FarFold, FarQueue, FarView, Heap};
///
/// #[derive(FarView)]
/// struct Invoice {
///     customer: u32,
///     cents: u64,
/// }
///
/// /// Number and sum of the invoices of a customer.
/// struct OfCustomer;
///
/// impl FarFold for OfCustomer {
///     const NAME: &'static str = "example.of_customer";
///     const VERSION: u32 = 1;
///     type Over = FarQueue<Invoice>;
///     type Argument = u32;
///     type State = (u64, u64);
///
///     fn begin(_: &u32) -> (u64, u64) {
///         (0, 0)
///     }
///
///     fn step(state: &mut (u64, u64), invoice: InvoiceView<'_>, customer: &u32) -> ControlFlow<()> {
///         if invoice.customer == *customer {
///             *state = (state.0 + 1, state.1 + invoice.cents);
///         }
///         ControlFlow::Continue(())
///     }
/// }
///
/// let heap = Heap::builder().near(4 << 20).build()?;
/// let mut queue = FarQueue::new();
/// for number in 0..1000 {
///     queue.push(&heap.enter(), Invoice { customer: number % 10, cents: number.into() })?;
/// }
/// assert_eq!(heap.fold::<OfCustomer>(&queue, 7).run()?, (100, 50_200));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait FarFold: 'static {
    /// Name of the fold at servers, at most 64 bytes. Names that begin with `ff.` are reserved.
    const NAME: &'static str;
    /// Version, which changes when argument, state or their meaning changes. Other layouts of
    /// elements are noticed without that.
    const VERSION: u32;
    /// Type of the collection.
    type Over: FarFoldable;
    /// Argument; encoded, some KiB at most.
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// What was found so far. It goes from call to call; encoded, some KiB at most.
    type State: Clone + Serialize + DeserializeOwned + Send;

    /// Makes the state before the first element.
    fn begin(argument: &Self::Argument) -> Self::State;

    /// Says where a key lies, seen from the range of the fold: before it (`Less`), in it, or beyond
    /// it. What is not in the range is not read. Keys are those of an ordered map or set, and the
    /// indices of elements of other collections, in ascending order. Default: all are in it.
    fn position(_key: &<Self::Over as FarFoldable>::Key<'_>, _argument: &Self::Argument) -> Ordering {
        Ordering::Equal
    }

    /// Takes an element in. After `Break`, the fold has ended.
    fn step(
        state: &mut Self::State,
        item: <Self::Over as FarFoldable>::Item<'_>,
        argument: &Self::Argument,
    ) -> ControlFlow<()>;
}

/// A fold that may follow the pointers in the elements that it sees. [`Heap::fold`](crate::Heap::fold)
/// runs it, and a server that does has `AtServer<Fold<F>>` in its registry.
///
/// ```
/// use core::ops::ControlFlow;
/// use farfield::{FarBox, FarFoldable, FarList, FarPlace, FarTraversal, FarView, Fault, Heap};
///
/// #[derive(FarView)]
/// struct Order {
///     number: u32,
///     lines: FarBox<Lines>,
/// }
///
/// #[derive(FarView)]
/// struct Lines {
///     cents: [u32; 100],
/// }
///
/// /// Sum of all lines of the orders from a number on.
/// struct Turnover;
///
/// impl FarTraversal for Turnover {
///     const NAME: &'static str = "example.turnover";
///     const VERSION: u32 = 1;
///     type Over = FarList<Order>;
///     type Argument = u32;
///     type State = u64;
///
///     fn begin(_: &u32) -> u64 {
///         0
///     }
///
///     async fn visit<'f, P: FarPlace>(
///         far: &'f P,
///         sum: &mut u64,
///         order: OrderView<'f>,
///         from: &u32,
///     ) -> Result<ControlFlow<()>, Fault> {
///         if order.number >= *from {
///             let lines = far.follow(order.lines).await?;
///             *sum += lines.cents.iter().map(|cents| u64::from(*cents)).sum::<u64>();
///         }
///         Ok(ControlFlow::Continue(()))
///     }
/// }
///
/// let heap = Heap::builder().near(4 << 20).build()?;
/// let mut orders = FarList::new();
/// for number in 0..50 {
///     let lines = heap.alloc(Lines { cents: [number; 100] })?;
///     orders.push_back(&heap.enter(), Order { number, lines })?;
/// }
/// assert_eq!(heap.fold::<Turnover>(&orders, 48).run()?, 9_700);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait FarTraversal: 'static {
    /// Name of the fold at servers, as [`FarFold::NAME`].
    const NAME: &'static str;
    /// Version, as [`FarFold::VERSION`].
    const VERSION: u32;
    /// Most elements that one call visits, and in a tree those up to the end of a node. A server ends a
    /// call of more than a million steps: choose fewer elements if each takes many. Default: 16 Ki.
    const PIECE_ELEMENTS: usize = 16 * 1024;
    /// Type of the collection.
    type Over: FarFoldable;
    /// Argument, as [`FarFold::Argument`].
    type Argument: Clone + Serialize + DeserializeOwned + Send;
    /// State of the fold, as [`FarFold::State`]. Pointers do not outlive their element.
    type State: Clone + Serialize + DeserializeOwned + Send;

    /// Makes the state before the first element.
    fn begin(argument: &Self::Argument) -> Self::State;

    /// Says where a key lies, as [`FarFold::position`].
    fn position(_key: &<Self::Over as FarFoldable>::Key<'_>, _argument: &Self::Argument) -> Ordering {
        Ordering::Equal
    }

    /// Takes an element in. After `Break`, the fold has ended. It may pass on faults of its place.
    fn visit<'f, P: FarPlace>(
        far: &'f P,
        state: &mut Self::State,
        item: <Self::Over as FarFoldable>::Item<'f>,
        argument: &Self::Argument,
    ) -> impl Future<Output = Result<ControlFlow<()>, Fault>>;
}

impl<F: FarFold> FarTraversal for F {
    const NAME: &'static str = <F as FarFold>::NAME;
    const VERSION: u32 = <F as FarFold>::VERSION;
    const PIECE_ELEMENTS: usize = usize::MAX;
    type Over = F::Over;
    type Argument = F::Argument;
    type State = F::State;

    fn begin(argument: &F::Argument) -> F::State {
        <F as FarFold>::begin(argument)
    }

    fn position(key: &<F::Over as FarFoldable>::Key<'_>, argument: &F::Argument) -> Ordering {
        <F as FarFold>::position(key, argument)
    }

    async fn visit<'f, P: FarPlace>(
        _: &'f P,
        state: &mut F::State,
        item: <F::Over as FarFoldable>::Item<'f>,
        argument: &F::Argument,
    ) -> Result<ControlFlow<()>, Fault> {
        Ok(<F as FarFold>::step(state, item, argument))
    }
}

/// A collection that can be folded ([`FarFold`]).
pub trait FarFoldable: FarView {
    /// Element as a fold sees it: the view of an element, or of a key and its value.
    type Item<'f>: Copy;
    /// What elements are in the order of: the view of a key, or the index.
    type Key<'f>;

    /// Cuts the elements of the fold's range into pieces, of which a call reads one.
    #[doc(hidden)]
    fn pieces<F: FarTraversal<Over = Self>>(&self, argument: &F::Argument) -> Vec<Range<usize>>;

    /// Folds the elements of a piece, from a place in it on if there is one.
    #[doc(hidden)]
    fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
        far: &'f P,
        view: Self::View<'f>,
        piece: (Range<usize>, Vec<u16>),
        argument: &F::Argument,
        state: &mut F::State,
    ) -> impl Future<Output = Result<FoldEnd, Fault>>;
}

/// Reason why a call of a fold has ended.
#[doc(hidden)]
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FoldEnd {
    /// The fold is over.
    Over,
    /// The piece is.
    Piece,
    /// The call has visited as many elements as it should. The fold goes on at this place of the piece.
    At(Vec<u16>),
}

/// Returns the indices whose position is `Equal`.
fn indices(len: usize, position: impl Fn(&usize) -> Ordering) -> Range<usize> {
    let first_not = |is: fn(Ordering) -> bool| {
        let (mut low, mut high) = (0, len);
        while low < high {
            let middle = low.midpoint(high);
            if is(position(&middle)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    };
    let end = first_not(Ordering::is_le);
    first_not(Ordering::is_lt).min(end)..end
}

macro_rules! foldable_items {
    ($($name:ident $(const $dims:ident)?;)*) => {$(
        impl<T: FarView + Send $(, const $dims: usize)?> FarFoldable for $name<T $(, $dims)?> {
            type Item<'f> = T::View<'f>;
            type Key<'f> = usize;

            fn pieces<F: FarTraversal<Over = Self>>(&self, argument: &F::Argument) -> Vec<Range<usize>> {
                let items = self.items();
                items.pieces(indices(items.len(), |index| F::position(index, argument)), F::PIECE_ELEMENTS)
            }

            async fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
                far: &'f P,
                items: ItemsRef<'f, T>,
                (piece, _): (Range<usize>, Vec<u16>),
                argument: &F::Argument,
                state: &mut F::State,
            ) -> Result<FoldEnd, Fault> {
                let mut items = far.items_in(items, piece);
                while let Some(item) = items.next().await? {
                    if F::visit(far, state, item, argument).await?.is_break() {
                        return Ok(FoldEnd::Over);
                    }
                }
                Ok(FoldEnd::Piece)
            }
        }
    )*};
}

foldable_items!(FarList; FarQueue; FarStack; FarVec; FarArray const D;);

/// Folds the entries of a tree. `item` makes what is visited of an entry.
async fn fold_entries<'f, F: FarTraversal, P: FarPlace, K: FarView, V: FarView>(
    far: &'f P,
    mut entries: EntryCursor<'f, P, K, V, impl Fn(&K::View<'f>) -> Ordering>,
    place: Vec<u16>,
    item: impl Fn((K::View<'f>, V::View<'f>)) -> <F::Over as FarFoldable>::Item<'f>,
    argument: &F::Argument,
    state: &mut F::State,
) -> Result<FoldEnd, Fault> {
    if !place.is_empty() {
        entries.resume(&place).await?;
    }
    let mut left = F::PIECE_ELEMENTS;
    loop {
        // A node is finished first.
        if left == 0
            && let Some(place) = entries.place().filter(|place| !place.is_empty())
        {
            return Ok(FoldEnd::At(place));
        }
        let Some(entry) = entries.next().await? else { return Ok(FoldEnd::Over) };
        if F::visit(far, state, item(entry), argument).await?.is_break() {
            return Ok(FoldEnd::Over);
        }
        left = left.saturating_sub(1);
    }
}

impl<K: FarView + Send, V: FarView + Send> FarFoldable for FarBTreeMap<K, V> {
    type Item<'f> = (K::View<'f>, V::View<'f>);
    type Key<'f> = K::View<'f>;

    fn pieces<F: FarTraversal<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        core::iter::once(0..usize::MAX).collect()
    }

    async fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
        far: &'f P,
        entries: EntriesRef<'f, K, V>,
        (_, place): (Range<usize>, Vec<u16>),
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<FoldEnd, Fault> {
        let entries = far.range_by(entries, |key| F::position(key, argument));
        fold_entries::<F, P, K, V>(far, entries, place, |entry| entry, argument, state).await
    }
}

impl<T: FarView + Send> FarFoldable for FarBTreeSet<T> {
    type Item<'f> = T::View<'f>;
    type Key<'f> = T::View<'f>;

    fn pieces<F: FarTraversal<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        core::iter::once(0..usize::MAX).collect()
    }

    async fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
        far: &'f P,
        entries: EntriesRef<'f, T, ()>,
        (_, place): (Range<usize>, Vec<u16>),
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<FoldEnd, Fault> {
        let entries = far.range_by(entries, |key| F::position(key, argument));
        fold_entries::<F, P, T, ()>(far, entries, place, |(value, ())| value, argument, state).await
    }
}

impl<K: FarView + Pod, V: FarView + Pod, S: FarView> FarFoldable for FarFlatMap<K, V, S> {
    type Item<'f> = (K::View<'f>, V::View<'f>);
    /// Entries are in no order.
    type Key<'f> = ();

    fn pieces<F: FarTraversal<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        // SAFETY: the view is gone when the borrow of the map ends.
        let map: FlatRef<'_, K, V, S> = self.view(unsafe { Loan::new() });
        map.pieces(F::PIECE_ELEMENTS)
    }

    async fn fold<'f, F: FarTraversal<Over = Self>, P: FarPlace>(
        far: &'f P,
        map: FlatRef<'f, K, V, S>,
        (pages, _): (Range<usize>, Vec<u16>),
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<FoldEnd, Fault> {
        let mut entries = FlatCursor::new(far, map, pages);
        while let Some(entry) = entries.next().await? {
            if F::visit(far, state, entry, argument).await?.is_break() {
                return Ok(FoldEnd::Over);
            }
        }
        Ok(FoldEnd::Piece)
    }
}

/// A [`FarFold`] or [`FarTraversal`] as a [`FarFunction`] over a piece of its collection, for the registry of a server:
/// `AtServer<Fold<F>>`.
#[derive(Debug)]
pub struct Fold<F>(PhantomData<F>);

/// Argument of a call that folds a piece.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FoldArgument<S, A> {
    piece: Range<u64>,
    /// Place in it, if the piece was begun by another call.
    place: Vec<u16>,
    state: S,
    argument: A,
}

impl<F: FarTraversal> Fold<F> {
    /// Makes the argument of a call that folds these elements.
    pub(super) fn argument(
        piece: Range<usize>,
        state: F::State,
        argument: F::Argument,
    ) -> FoldArgument<F::State, F::Argument> {
        FoldArgument { piece: piece.start as u64..piece.end as u64, place: Vec::new(), state, argument }
    }
}

impl<S, A> FoldArgument<S, A> {
    /// Lets the call go on at a place of its piece.
    pub(super) fn at(self, place: Vec<u16>) -> FoldArgument<S, A> {
        FoldArgument { place, ..self }
    }
}

impl<F: FarTraversal> FarFunction for Fold<F> {
    const NAME: &'static str = F::NAME;
    const VERSION: u32 = F::VERSION;
    type Root = F::Over;
    type Argument = FoldArgument<F::State, F::Argument>;
    type Answer = (F::State, FoldEnd);

    async fn run<P: FarPlace>(
        far: &P,
        root: FarRef<'_, F::Over>,
        call: FoldArgument<F::State, F::Argument>,
    ) -> Result<(F::State, FoldEnd), Fault> {
        let FoldArgument { piece, place, mut state, argument } = call;
        let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let view = far.follow(root).await?;
        let piece = (index(piece.start)..index(piece.end), place);
        let end = F::Over::fold::<F, P>(far, view, piece, &argument, &mut state).await?;
        Ok((state, end))
    }
}

/// A fold of a collection, about to run ([`Heap::fold`](crate::Heap::fold)).
#[must_use = "nothing runs before `run`"]
pub struct HeapFold<'h, F: FarTraversal> {
    core: &'h HeapInner,
    over: &'h F::Over,
    argument: F::Argument,
    place: Where,
    within: Duration,
    steps_max: u64,
}

impl<F: FarTraversal> core::fmt::Debug for HeapFold<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "HeapFold({:?}, {:?})", F::NAME, self.place)
    }
}

impl<'h, F: FarTraversal> HeapFold<'h, F> {
    pub(crate) fn new(core: &'h HeapInner, over: &'h F::Over, argument: F::Argument) -> HeapFold<'h, F> {
        HeapFold { core, over, argument, place: Where::Auto, within: core.patience, steps_max: STEPS_MAX }
    }

    /// Sets the place where the fold runs, as [`HeapCall::at`] does. Default: [`Where::Auto`], which
    /// chooses anew for each piece.
    pub fn at(mut self, place: Where) -> Self {
        self.place = place;
        self
    }

    /// Sets how long all of the fold may take. Default: the heap's
    /// [patience](crate::Builder::patience). A server has a limit for each piece.
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Sets the most steps that the fold of a piece may take: one for each chunk or node, and one more
    /// for each whole 4 KiB of it. Default: about a million.
    pub fn steps(mut self, most: u64) -> Self {
        self.steps_max = most.max(1);
        self
    }

    /// Runs the fold, and blocks until it has ended. Lists, vectors and the like are folded in pieces
    /// of 2048 chunks, or fewer for a [`FarTraversal`], a call for each. An ordered map is one piece; a call
    /// of a [`FarTraversal`] stops behind a node of it.
    ///
    /// # Errors
    /// Those of [`HeapCall::run`]. The state is lost.
    ///
    /// # Panics
    /// If the fold panics at the client.
    pub fn run(self) -> Result<F::State, OffloadError> {
        let (began, mut state) = (Instant::now(), F::begin(&self.argument));
        for piece in self.over.pieces::<F>(&self.argument) {
            let mut place = Vec::new();
            loop {
                let (folded, end) = self.piece(began, piece.clone(), place, state)?.run()?;
                state = folded;
                match end {
                    FoldEnd::Over => return Ok(state),
                    FoldEnd::Piece => break,
                    FoldEnd::At(next) => place = next,
                }
            }
        }
        Ok(state)
    }

    /// Runs the fold in the heap, for a task, as [`HeapCall::fetch`] does.
    ///
    /// # Errors
    /// Those of [`HeapFold::run`] at the client.
    pub async fn fetch(self) -> Result<F::State, OffloadError> {
        let (began, mut state) = (Instant::now(), F::begin(&self.argument));
        for piece in self.over.pieces::<F>(&self.argument) {
            let mut place = Vec::new();
            loop {
                let (folded, end) = self.piece(began, piece.clone(), place, state)?.fetch().await?;
                state = folded;
                match end {
                    FoldEnd::Over => return Ok(state),
                    FoldEnd::Piece => break,
                    FoldEnd::At(next) => place = next,
                }
            }
        }
        Ok(state)
    }

    /// Returns the call that folds a piece, from a place on.
    fn piece(
        &self,
        began: Instant,
        piece: Range<usize>,
        place: Vec<u16>,
        state: F::State,
    ) -> Result<HeapCall<'h, Fold<F>>, OffloadError> {
        let after = self.within;
        let left = after.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Err(CallError::TimedOut { after }.into());
        }
        let call = Fold::<F>::argument(piece.clone(), state, self.argument.clone()).at(place);
        let call = HeapCall::<Fold<F>>::new(self.core, FarRef::near(self.over), call).window(piece);
        Ok(call.at(self.place).within(left).steps(self.steps_max))
    }
}
