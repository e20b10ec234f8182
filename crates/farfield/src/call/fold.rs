//! Folds: functions that see one element of a collection after the other.
//!
//! What walks is the same for all folds. So it can cut a walk into calls that a server takes, each
//! with its part of the table of a long list, and carry the state from one to the next.

use super::entries::EntriesRef;
use super::function::FarFunction;
use super::items::ItemsRef;
use super::place::FarPlace;
use super::view_traits::{FarRef, FarView};
use super::{HeapCall, STEPS_MAX};
use crate::collections::{FarArray, FarBTreeMap, FarBTreeSet, FarList, FarQueue, FarStack, FarVec};
use crate::heap::HeapInner;
use crate::offload::OffloadError;
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
/// A server that runs it has `AtServer<Fold<F>>` in its registry. To follow pointers in elements, or
/// to walk several collections, write a [`FarFunction`].
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

/// A collection that can be folded ([`FarFold`]).
pub trait FarFoldable: FarView {
    /// Element as a fold sees it: the view of an element, or of a key and its value.
    type Item<'f>: Copy;
    /// What elements are in the order of: the view of a key, or the index.
    type Key<'f>;

    /// Cuts the elements of the fold's range into pieces, of which a call reads one.
    #[doc(hidden)]
    fn pieces<F: FarFold<Over = Self>>(&self, argument: &F::Argument) -> Vec<Range<usize>>;

    /// Folds the elements of a piece. True if the fold has ended.
    #[doc(hidden)]
    fn fold<'f, F: FarFold<Over = Self>, P: FarPlace>(
        far: &'f P,
        view: Self::View<'f>,
        piece: Range<usize>,
        argument: &F::Argument,
        state: &mut F::State,
    ) -> impl Future<Output = Result<bool, Fault>>;
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

            fn pieces<F: FarFold<Over = Self>>(&self, argument: &F::Argument) -> Vec<Range<usize>> {
                let items = self.items();
                items.pieces(indices(items.len(), |index| F::position(index, argument)))
            }

            async fn fold<'f, F: FarFold<Over = Self>, P: FarPlace>(
                far: &'f P,
                items: ItemsRef<'f, T>,
                piece: Range<usize>,
                argument: &F::Argument,
                state: &mut F::State,
            ) -> Result<bool, Fault> {
                let mut items = far.items_in(items, piece);
                while let Some(item) = items.next().await? {
                    if F::step(state, item, argument).is_break() {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    )*};
}

foldable_items!(FarList; FarQueue; FarStack; FarVec; FarArray const D;);

impl<K: FarView + Send, V: FarView + Send> FarFoldable for FarBTreeMap<K, V> {
    type Item<'f> = (K::View<'f>, V::View<'f>);
    type Key<'f> = K::View<'f>;

    fn pieces<F: FarFold<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        core::iter::once(0..usize::MAX).collect()
    }

    async fn fold<'f, F: FarFold<Over = Self>, P: FarPlace>(
        far: &'f P,
        entries: EntriesRef<'f, K, V>,
        _: Range<usize>,
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<bool, Fault> {
        let mut entries = far.range_by(entries, |key| F::position(key, argument));
        while let Some(entry) = entries.next().await? {
            if F::step(state, entry, argument).is_break() {
                break;
            }
        }
        Ok(true)
    }
}

impl<T: FarView + Send> FarFoldable for FarBTreeSet<T> {
    type Item<'f> = T::View<'f>;
    type Key<'f> = T::View<'f>;

    fn pieces<F: FarFold<Over = Self>>(&self, _: &F::Argument) -> Vec<Range<usize>> {
        core::iter::once(0..usize::MAX).collect()
    }

    async fn fold<'f, F: FarFold<Over = Self>, P: FarPlace>(
        far: &'f P,
        entries: EntriesRef<'f, T, ()>,
        _: Range<usize>,
        argument: &F::Argument,
        state: &mut F::State,
    ) -> Result<bool, Fault> {
        let mut entries = far.range_by(entries, |key| F::position(key, argument));
        while let Some((value, ())) = entries.next().await? {
            if F::step(state, value, argument).is_break() {
                break;
            }
        }
        Ok(true)
    }
}

/// A [`FarFold`] as a [`FarFunction`] over a piece of its collection, for the registry of a server:
/// `AtServer<Fold<F>>`.
#[derive(Debug)]
pub struct Fold<F>(PhantomData<F>);

/// Argument of a call that folds a piece.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FoldArgument<S, A> {
    piece: Range<u64>,
    state: S,
    argument: A,
}

impl<F: FarFold> Fold<F> {
    /// Makes the argument of a call that folds these elements.
    pub(super) fn argument(
        piece: Range<usize>,
        state: F::State,
        argument: F::Argument,
    ) -> FoldArgument<F::State, F::Argument> {
        FoldArgument { piece: piece.start as u64..piece.end as u64, state, argument }
    }
}

impl<F: FarFold> FarFunction for Fold<F> {
    const NAME: &'static str = F::NAME;
    const VERSION: u32 = F::VERSION;
    type Root = F::Over;
    type Argument = FoldArgument<F::State, F::Argument>;
    type Answer = (F::State, bool);

    async fn run<P: FarPlace>(
        far: &P,
        root: FarRef<'_, F::Over>,
        call: FoldArgument<F::State, F::Argument>,
    ) -> Result<(F::State, bool), Fault> {
        let FoldArgument { piece, mut state, argument } = call;
        let index = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let view = far.follow(root).await?;
        let piece = index(piece.start)..index(piece.end);
        let is_over = F::Over::fold::<F, P>(far, view, piece, &argument, &mut state).await?;
        Ok((state, is_over))
    }
}

/// A fold of a collection, about to run ([`Heap::fold`](crate::Heap::fold)).
#[must_use = "nothing runs before `run`"]
pub struct HeapFold<'h, F: FarFold> {
    core: &'h HeapInner,
    over: &'h F::Over,
    argument: F::Argument,
    place: Where,
    within: Duration,
    steps_max: u64,
}

impl<F: FarFold> core::fmt::Debug for HeapFold<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "HeapFold({:?}, {:?})", F::NAME, self.place)
    }
}

impl<'h, F: FarFold> HeapFold<'h, F> {
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
    /// of 2048 chunks, a call for each; a map is one piece.
    ///
    /// # Errors
    /// Those of [`HeapCall::run`]. The state is lost.
    ///
    /// # Panics
    /// If the fold panics at the client.
    pub fn run(self) -> Result<F::State, OffloadError> {
        let (began, after) = (Instant::now(), self.within);
        let mut state = F::begin(&self.argument);
        for piece in self.over.pieces::<F>(&self.argument) {
            let left = after.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(CallError::TimedOut { after }.into());
            }
            let call = Fold::<F>::argument(piece.clone(), state, self.argument.clone());
            let call = HeapCall::<Fold<F>>::new(self.core, FarRef::near(self.over), call).window(piece);
            let (folded, is_over) = call.at(self.place).within(left).steps(self.steps_max).run()?;
            state = folded;
            if is_over {
                break;
            }
        }
        Ok(state)
    }
}
