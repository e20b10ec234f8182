//! Calls of functions over far pointers: code of users, at the client or beside the values.
//!
//! At the client a function reads values near, and brings them near. At a memory server it follows
//! the same words, because a far address is one of the region ([`AtServer`]). The server must not
//! read a page of which the heap has a newer version near. So a call tells which pages those are.
//! A function that meets one of them stops; the page is written back, and the call begins again.
//! So only what lies in the function's reach is ever written for it, and nothing is when all of
//! that is clean.
//!
//! What a function can reach does not change during the call: its root is borrowed, and types with
//! [`FarView`] have no interior mutability. So a page that is not changed when the call begins has
//! the right bytes of these values until the end, whatever happens to other values in it.

mod bytes;
mod call_mut;
mod counts;
mod entries;
mod flat;
#[cfg(test)]
mod flat_tests;
mod fold;
mod function;
mod function_mut;
mod items;
mod map_fold;
#[cfg(test)]
mod map_fold_tests;
mod overlay;
mod part;
mod place;
mod place_mut;
mod place_task;
mod reach;
#[cfg(test)]
mod short_tests;
#[cfg(test)]
mod task_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traversal_tests;
mod view_mut;
mod view_options;
#[cfg(test)]
mod view_tests;
mod view_traits;
#[cfg(test)]
mod walk_tests;

pub use bytes::{BytesRef, TextRef};
pub use call_mut::HeapCallMut;
pub use counts::{CallCounts, ClientReason};
pub use entries::{EntriesRef, EntryCursor};
pub use flat::{FlatCursor, FlatRef};
pub use fold::{FarFold, FarFoldable, FarTraversal, Fold, HeapFold};
pub use function::{AtServer, FarFunction};
pub use function_mut::{AtServerMut, FarFunctionMut};
pub use items::{ItemCursor, ItemsRef};
pub use map_fold::{HeapMapFold, MapEntries, MapEntriesRef};
pub use place::FarPlace;
pub use place_mut::FarPlaceMut;
pub use view_mut::{FarMut, FarViewMut};
pub use view_traits::{FarRef, FarView};

/// What the code of `#[derive(FarView)]` uses, and what travels with a call.
#[doc(hidden)]
pub mod view {
    pub use super::fold::{FoldArgument, FoldEnd};
    pub use super::function::{FarAnswer, FarArgument};
    pub use super::function_mut::{Changed, Changing, ChangingArgument};
    pub use super::overlay::{ChangeList, ChangeStop, OverlayLimits, ValueChange};
    pub use super::part::{FarPart, NearTables, ObjectRef, PartBytes, RootImage};
    pub use super::place::{FarSpan, RegionStop};
    pub use super::reach::ServerPages;
    pub use super::view_mut::{Changeable, FieldKind, OwnedTypes, ViewField, ViewFields};
    pub use super::view_traits::{Loan, ViewSource, ViewTypes, layout};
}

pub(crate) use counts::CallSite;
pub(crate) use items::{ChunkPlace, ItemKind};

use crate::error::FarError;
use crate::heap::{FarRange, HeapInner};
use crate::offload::OffloadError;
use core::future::{Future, poll_fn};
use core::ops::Range;
use core::pin::pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use counts::MissingAnswer;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::call_placement::Side;
use farfield_wic::{CallError, Where};
use function::{FarAnswer, FarArgument};
use part::{ImageError, RootImage};
use place::{FarSpan, HeapPlace, RegionStop, StepCounter};
use place_task::{TaskPlace, stop_error};
use reach::{CallReach, RUNS_MAX};
use std::time::Instant;
use view_traits::ViewTypes;

/// Default limit of the steps of a function.
const STEPS_MAX: u64 = 1 << 20;
/// Most changed pages that a call names. As distances, they take some 32 KiB of the argument.
const CHANGED_MAX: usize = 16 * 1024;

/// A call of a [`FarFunction`], about to run.
#[must_use = "nothing runs before `run`"]
pub struct HeapCall<'h, F: FarFunction> {
    core: &'h HeapInner,
    root: FarRef<'h, F::Root>,
    argument: F::Argument,
    place: Where,
    /// Reason why the call runs at the client, if [`HeapCall::place`] is that.
    client_reason: ClientReason,
    within: Duration,
    steps_max: u64,
    /// Elements that are read, if the root is a collection.
    window: Range<usize>,
}

impl<F: FarFunction> core::fmt::Debug for HeapCall<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "HeapCall({:?} from {:?}, {:?})", F::NAME, self.root, self.place)
    }
}

impl<'h, F: FarFunction> HeapCall<'h, F> {
    pub(crate) fn new(core: &'h HeapInner, root: FarRef<'h, F::Root>, argument: F::Argument) -> HeapCall<'h, F> {
        HeapCall {
            core,
            root,
            argument,
            place: Where::Auto,
            client_reason: ClientReason::Requested,
            within: core.patience,
            steps_max: STEPS_MAX,
            window: 0..usize::MAX,
        }
    }

    /// Sets the place where the function runs. Default: [`Where::Auto`], which chooses the one that
    /// was faster lately, and continues at the client whenever a server cannot answer.
    ///
    /// [`Where::Server`] needs a pool with one server that has the function, or with a mirror of
    /// such servers. Over a stripe or tiers, it needs one of those that has all pages that the function
    /// meets.
    pub fn at(mut self, place: Where) -> Self {
        self.place = place;
        self
    }

    /// Sets how long the call may take. Default: the heap's
    /// [patience](crate::Builder::patience). A server has a limit of its own.
    pub fn within(mut self, time: Duration) -> Self {
        self.within = time;
        self
    }

    /// Sets the most steps that the function may take. Default: about a million. A server has a
    /// limit of its own.
    pub fn steps(mut self, most: u64) -> Self {
        self.steps_max = most.max(1);
        self
    }

    /// Sets which elements the function reads, if the root is a collection.
    fn window(mut self, elements: Range<usize>) -> Self {
        self.window = elements;
        self
    }

    /// Runs the function, and blocks until it has ended.
    ///
    /// At a server, the function cannot read pages that were changed and have not left since. The
    /// call writes those back that the function meets, as [`Heap::write_back`] does: they are far
    /// afterwards. While the calling thread is in a scope of the heap, that is impossible: then
    /// [`Where::Server`] ends with [`FarError::NearFull`], and [`Where::Auto`] continues at the client.
    ///
    /// # Errors
    /// [`OffloadError::Far`] if a value cannot be brought near or written back;
    /// [`OffloadError::Call`] if the function passed on a fault, took too many steps or too long,
    /// or cannot run at the server; the others name what the server refused.
    ///
    /// # Panics
    /// If the function panics at the client.
    ///
    /// [`Heap::write_back`]: crate::Heap::write_back
    pub fn run(self) -> Result<F::Answer, OffloadError> {
        self.run_with(|answer, _| Ok(answer))
    }

    /// Runs the function in the heap, for a task: other tasks run while its values are fetched, so the
    /// misses of many calls overlap. It runs at the client, wherever [`HeapCall::at`] would have it run: a
    /// call at a server keeps its thread until the answer has come.
    ///
    /// The task may wait without a scope, and stays on its thread
    /// ([which tasks may do what](crate::task)).
    ///
    /// ```
    /// # use farfield::{FarBox, FarFunction, FarPlace, FarRef, FarView, Fault, Heap, task::Executor};
    /// # #[derive(FarView)]
    /// # struct Node { number: u64, next: Option<FarBox<Node>> }
    /// # struct Sum;
    /// # impl FarFunction for Sum {
    /// #     const NAME: &'static str = "example.sum";
    /// #     const VERSION: u32 = 1;
    /// #     type Root = Node;
    /// #     type Argument = ();
    /// #     type Answer = u64;
    /// #     async fn run<P: FarPlace>(far: &P, first: FarRef<'_, Node>, _: ()) -> Result<u64, Fault> {
    /// #         let (mut next, mut sum) = (Some(first), 0);
    /// #         while let Some(pointer) = next {
    /// #             let node = far.follow(pointer).await?;
    /// #             (sum, next) = (sum + node.number, node.next);
    /// #         }
    /// #         Ok(sum)
    /// #     }
    /// # }
    /// # let heap = Heap::builder().near(4 << 20).build()?;
    /// # let list = |number| heap.alloc(Node { number, next: Some(heap.alloc(Node { number, next: None })?) });
    /// let lists: Vec<FarBox<Node>> = (0..100).map(list).collect::<Result<_, _>>()?;
    /// let executor = Executor::new(&heap);
    /// let sums: Vec<_> = lists.iter().map(|list| executor.spawn(heap.call::<Sum>(list, ()).fetch())).collect();
    /// let sum = executor.block_on(async {
    ///     let mut sum = 0;
    ///     for one in sums {
    ///         sum += one.await??;
    ///     }
    ///     Ok::<u64, Box<dyn std::error::Error>>(sum)
    /// })?;
    /// assert_eq!(sum, 9900);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`HeapCall::run`] at the client.
    pub async fn fetch(self) -> Result<F::Answer, OffloadError> {
        self.core.count_call::<AtServer<F>>(CallSite::Client(ClientReason::Requested));
        let place = TaskPlace::new(self.core, StepCounter::new(self.steps_max, Instant::now(), self.within));
        let mut function = pin!(F::run(&place, self.root, self.argument));
        poll_fn(|context| {
            let polled = function.as_mut().poll(context);
            match place.stopped() {
                Some(stop) => Poll::Ready(Err(stop_error(stop))),
                None => polled.map(|answer| answer.map_err(|fault| CallError::Fault(fault).into())),
            }
        })
        .await
    }

    /// Runs the function, and passes its answer to `finish`, with the side where it ran. That is part
    /// of the call: if it fails, the answer counts as none.
    fn run_with<R>(self, finish: impl Fn(F::Answer, Side) -> Result<R, OffloadError>) -> Result<R, OffloadError> {
        let began = Instant::now();
        let (result, site) = match self.place {
            Where::Client => {
                let answer = self.run_at_client(began, &mut 0);
                (answer.and_then(|answer| finish(answer, Side::Client)), CallSite::Client(self.client_reason))
            }
            Where::Server => {
                let answer = self.run_at_server(began, Effort::FULL).map_err(|missing| missing.error)?;
                (finish(answer, Side::Server), CallSite::Server)
            }
            _ => self.run_auto(began, finish),
        };
        self.core.count_call::<AtServer<F>>(site);
        result
    }

    fn time_left(&self, began: Instant) -> Result<Duration, CallError> {
        let left = self.within.saturating_sub(began.elapsed());
        if left.is_zero() { Err(CallError::TimedOut { after: self.within }) } else { Ok(left) }
    }

    fn run_at_client(&self, began: Instant, steps: &mut u64) -> Result<F::Answer, OffloadError> {
        let place = HeapPlace::new(self.core, StepCounter::new(self.steps_max, began, self.within));
        let mut function = pin!(F::run(&place, self.root, self.argument.clone()));
        // The place never waits without blocking the thread, so one poll is all.
        let polled = function.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        *steps = place.steps();
        match (place.stopped(), polled) {
            (Some(stop), _) => Err(stop_error(stop)),
            (None, Poll::Ready(answer)) => answer.map_err(|fault| CallError::Fault(fault).into()),
            (None, Poll::Pending) => Err(CallError::Stuck.into()),
        }
    }

    /// Runs the function at the server. Pages that it meets and must not read there are written
    /// back.
    fn run_at_server(&self, began: Instant, effort: Effort) -> Result<F::Answer, MissingAnswer> {
        let (near, mut page) = match self.root.near {
            Some(root) => {
                let image = RootImage::of(self.core, root, self.window.clone());
                let (image, page) = image.map_err(|error| match error {
                    ImageError::OtherHeap => OffloadError::Far(FarError::OtherHeap),
                    ImageError::TooLong { bytes } => CallError::ArgumentTooLong { bytes }.into(),
                })?;
                (Some(image), page)
            }
            None => match self.core.number_of(self.root.number.get()) {
                None => return Err(FarError::OtherHeap.into()),
                Some(number) if number >= self.core.pages => return Err(OffloadError::Movable.into()),
                Some(number) => (None, Some(number)),
            },
        };
        let types = ViewTypes::of::<F::Root>();
        // Tables, the pages of a tier, and the names of changed pages share the room of an argument.
        let changed_max = CHANGED_MAX.saturating_sub(near.as_ref().map_or(0, |near| near.tables.len()));
        let mut may_go_elsewhere = near.is_some();
        for round in 0..effort.rounds {
            let members = self.core.offload_members();
            let runs_max = if members.tiers.is_some() { 2 * RUNS_MAX } else { 0 };
            let changed = self.changed_pages(began, effort, changed_max.saturating_sub(runs_max))?;
            let reach = CallReach::of(&members, page)?;
            let refusal = self.core.offload_refusal_at::<AtServer<F>>(reach.target);
            if let Some(reason) = refusal.filter(|_| !effort.asks_again) {
                return Err(MissingAnswer::refused(reason));
            }
            let call = FarArgument {
                span: FarSpan {
                    first: self.core.first_page,
                    pages: self.core.pages,
                    numbers: self.core.numbers(),
                    changed: distances(&changed),
                },
                layouts: types.layouts().to_vec(),
                root: (self.root.place, self.root.number.get()),
                argument: self.argument.clone(),
                near: near.clone(),
                pages: reach.pages.clone(),
            };
            let within = self.time_left(began)? / effort.time_parts;
            let place = (reach.target, members.layout.switches());
            let answer = self.core.offload_one::<AtServer<F>>(place, call, within, self.steps_max);
            if !reach.is_kept() {
                // The function may have read zeros, so whatever came of it does not count.
                if effort.asks_again { continue } else { return Err(MissingAnswer::MOVED) }
            }
            let met = match answer? {
                FarAnswer::Done(answer) => return Ok(answer),
                FarAnswer::OtherLayout(index) => {
                    self.core.refuse_offload_at::<AtServer<F>>(reach.target);
                    return Err(OffloadError::OtherLayout { name: types.name(index as usize) }.into());
                }
                FarAnswer::Stopped(RegionStop::Movable) => return Err(OffloadError::Movable.into()),
                FarAnswer::Stopped(RegionStop::NoValue(offset)) => return Err(OffloadError::NoValue { offset }.into()),
                FarAnswer::Stopped(RegionStop::TableNear) => return Err(OffloadError::TableNear.into()),
                FarAnswer::Stopped(RegionStop::OtherMember(other)) if may_go_elsewhere => {
                    // A root that is near leads to several members. The function is tried where it went.
                    (page, may_go_elsewhere) = (Some(other), false);
                    continue;
                }
                FarAnswer::Stopped(RegionStop::OtherMember(_)) => return Err(OffloadError::OtherMember.into()),
                FarAnswer::Stopped(RegionStop::Changed(page)) => page,
            };
            // The page that was met, and the more of those around it the oftener that happens: a
            // function that meets only changed pages ends after few rounds.
            let most = 4usize.saturating_pow(round);
            let first = changed.partition_point(|page| *page < met).saturating_sub(most / 2);
            self.write_back(changed[first..].iter().take(most), began, effort)?;
        }
        Err(MissingAnswer::CHANGED)
    }

    /// Returns the pages that the server must not read, at most so many.
    fn changed_pages(&self, began: Instant, effort: Effort, most: usize) -> Result<Vec<u32>, MissingAnswer> {
        loop {
            if let Some(pages) = self.core.changed_pages(most) {
                return Ok(pages);
            }
            // Too many to be named.
            if !effort.may_write_all {
                return Err(MissingAnswer::CHANGED);
            }
            let all = self.core.changed_pages(usize::MAX).unwrap_or_default();
            self.write_back(all.iter().skip(most / 2), began, effort)?;
        }
    }

    fn write_back<'p>(
        &self,
        pages: impl Iterator<Item = &'p u32>,
        began: Instant,
        effort: Effort,
    ) -> Result<(), OffloadError> {
        let ranges = pages.map(|page| FarRange::in_page(*page, 0, PAGE_BYTES));
        let within = self.time_left(began)?.min(effort.write_back_within);
        Ok(self.core.write_back_within(ranges, within)?)
    }

    /// Runs the function where calls were faster lately, and at the client if the server has no
    /// answer. Also returns where that was.
    fn run_auto<R>(
        &self,
        began: Instant,
        finish: impl Fn(F::Answer, Side) -> Result<R, OffloadError>,
    ) -> (Result<R, OffloadError>, CallSite) {
        let core = self.core;
        let at_client = |steps: &mut u64| finish(self.run_at_client(began, steps)?, Side::Client);
        let at_server = || Ok::<R, MissingAnswer>(finish(self.run_at_server(began, Effort::AUTO)?, Side::Server)?);
        let nanos = || u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let refusal = core.call_refusal::<AtServer<F>>();
        let side = match refusal {
            None => core.with_placement::<AtServer<F>, _>(|placement| placement.round(1).0),
            Some(_) => Side::Client,
        };
        let mut steps = 0;
        let (result, site, is_known) = match side {
            Side::Client => {
                let reason = refusal.unwrap_or(ClientReason::Faster);
                (at_client(&mut steps), CallSite::Client(reason), true)
            }
            Side::Server => match at_server() {
                Ok(answer) => (Ok(answer), CallSite::Server, true),
                // It only reads, so it can run again. What the server did for nothing counts as
                // its time.
                Err(MissingAnswer { reason, .. }) => {
                    let refusal = core.call_refusal::<AtServer<F>>();
                    (at_client(&mut 0), CallSite::Client(refusal.unwrap_or(reason)), refusal.is_none())
                }
            },
        };
        core.with_placement::<AtServer<F>, _>(|placement| match &result {
            Ok(_) if is_known => placement.on_ended(side, 1, steps, nanos()),
            Ok(_) => {}
            Err(_) => placement.on_failed(side, 1),
        });
        (result, site)
    }
}

/// Lengths to which a call at the server goes.
#[derive(Clone, Copy, Debug)]
struct Effort {
    /// Most times that the function begins.
    rounds: u32,
    /// The server has one part in so many of the time that is left.
    time_parts: u32,
    /// Longest time of one write-back.
    write_back_within: Duration,
    /// Whether pages are written back that the function may never meet, because there are too many
    /// to be named.
    may_write_all: bool,
    /// Whether a server is asked that did not run the function before, or whose pages moved meanwhile.
    asks_again: bool,
}

impl Effort {
    const AUTO: Effort = Effort {
        rounds: 4,
        // The heap is to have its turn when the server is silent.
        time_parts: 2,
        write_back_within: Duration::from_millis(2),
        may_write_all: false,
        asks_again: false,
    };
    const FULL: Effort = Effort {
        rounds: u32::MAX,
        time_parts: 1,
        write_back_within: Duration::MAX,
        may_write_all: true,
        asks_again: true,
    };
}

/// Returns the first of these numbers, and the distances from one to the next.
fn distances(pages: &[u32]) -> Vec<u32> {
    let mut last = 0;
    let distance = |page: &u32| page - core::mem::replace(&mut last, *page);
    pages.iter().map(distance).collect()
}
