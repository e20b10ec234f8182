//! Calls of functions that change values: who applies the changes, and when.
//!
//! A function runs over an overlay, at the client or at a server, and ends with a list of changes. The
//! heap checks the list, brings all values of it near, and then changes their bytes, which cannot
//! fail. So a call changes everything or nothing, whatever happens on the way.

#[cfg(test)]
mod tests;

use super::function_mut::{Changed, Changing, ChangingArgument, FarFunctionMut};
use super::overlay::{ChangeStop, OverlayLimits, ValueChange};
use super::view_mut::{FarMut, OwnedTypes};
use super::{CallCounts, ClientReason, HeapCall, Where};
use crate::Heap;
use crate::error::FarError;
use crate::heap::{AccessMode, HeapInner, Scope};
use crate::offload::OffloadError;
use crate::ptr::{BatchGet, FarBox, Pointer};
use crate::task::Executor;
use core::num::NonZeroU32;
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::heap::{FrameId, FrameWord, SlotHint, State};
use farfield_core::policy::call_placement::{CallPlacementDecision, Side};
use farfield_wic::CallError;

/// Default limit of the changes of a function, in bytes. An answer of a server has room for twice as
/// many.
const CHANGES_MAX: usize = 32 * 1024;

/// A call of a [`FarFunctionMut`], about to run.
#[must_use = "nothing runs before `run`"]
pub struct HeapCallMut<'h, F: FarFunctionMut> {
    call: HeapCall<'h, Changing<F>>,
}

impl<F: FarFunctionMut> core::fmt::Debug for HeapCallMut<'_, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "HeapCallMut({:?} from {:?}, {:?})", F::NAME, self.call.root, self.call.place)
    }
}

impl<F: FarFunctionMut> HeapCallMut<'_, F> {
    /// Sets the place where the function runs: see [`HeapCall::at`]. A heap with
    /// [`Verify::Keyed`](crate::Verify::Keyed) believes no server what to change: functions that
    /// change values run at the client then.
    pub fn at(mut self, place: Where) -> Self {
        self.call = self.call.at(place);
        self
    }

    /// Sets how long the function may take: see [`HeapCall::within`]. To bring the values near that
    /// it changes takes as long as it does.
    pub fn within(mut self, time: Duration) -> Self {
        self.call = self.call.within(time);
        self
    }

    /// Sets the most steps that the function may take: see [`HeapCall::steps`].
    pub fn steps(mut self, most: u64) -> Self {
        self.call = self.call.steps(most);
        self
    }

    /// Sets for how many bytes the changes may count. Default: 32 KiB.
    ///
    /// Bytes that differ in the end count, 16 bytes for each changed value, and 8 for each stretch of
    /// changed bytes in it. At a server, changes and answer have room for 64 KiB together.
    pub fn changes(mut self, bytes_max: usize) -> Self {
        self.call.argument.limits.bytes_max = bytes_max;
        self
    }

    /// Runs the function, applies its changes, and blocks until that is done.
    ///
    /// After an error, nothing has changed. Values that changed are near afterwards. See
    /// [`HeapCall::run`] for what happens to changed pages before a call at a server.
    ///
    /// # Errors
    /// Those of [`HeapCall::run`]; [`OffloadError::TooManyChanges`] and [`OffloadError::OwnerChanged`]
    /// if the function has stored too much, or another owner; [`OffloadError::WrongChanges`] if a
    /// server has answered with changes that cannot be. [`OffloadError::Far`] with
    /// [`FarError::NearFull`](crate::FarError::NearFull) if not all changed values can be near at
    /// the same time: the limit is that of one [`Scope`].
    ///
    /// # Panics
    /// If the function panics at the client.
    pub fn run(self) -> Result<F::Answer, OffloadError> {
        let mut call = self.call;
        if call.core.checksums.needs_whole_pages() {
            if call.place == Where::Server {
                return Err(CallError::Nowhere.into());
            }
            (call.place, call.client_reason) = (Where::Client, ClientReason::Keyed);
        }
        let (core, limits) = (call.core, call.argument.limits);
        call.run_with(|changed, side| finish::<F>(core, limits, changed, side))
    }

    /// Runs the function in the heap, for a task, and applies its changes, as [`HeapCall::fetch`] and
    /// [`HeapCallMut::run`] do: other tasks run while values come near.
    ///
    /// If the task is dropped, all changes are made, or none.
    ///
    /// # Errors
    /// Those of [`HeapCallMut::run`] at the client.
    pub async fn fetch(self) -> Result<F::Answer, OffloadError> {
        let (core, limits) = (self.call.core, self.call.argument.limits);
        let wanted = check::<F>(core, limits, self.call.fetch().await?, Side::Client)?;
        if !wanted.changes.is_empty() {
            // SAFETY: as `check` says. The root stays borrowed as long as this future.
            unsafe { apply(core, &wanted) }.await?;
        }
        Ok(wanted.answer)
    }
}

/// What a function has answered, and what it wants changed: the values, and what of each.
struct CheckedChanges<A> {
    answer: A,
    pointers: Vec<Pointer>,
    changes: Vec<ValueChange>,
}

/// Applies what a function wants changed that ran at this side, and returns its answer.
fn finish<F: FarFunctionMut>(
    core: &HeapInner,
    limits: OverlayLimits,
    changed: Changed<F::Answer>,
    side: Side,
) -> Result<F::Answer, OffloadError> {
    let wanted = check::<F>(core, limits, changed, side)?;
    if !wanted.changes.is_empty() {
        // SAFETY: as `check` says.
        Executor::of(core).block_on(unsafe { apply(core, &wanted) })?;
    }
    Ok(wanted.answer)
}

/// Checks what a function wants changed that ran at this side.
///
/// Each run lies within a plain field of its type, and makes a value of it. A function that ran here has
/// stored to values of their types only. So has one that ran at a server, which is believed
/// (docs/design/trust.md), as far as this cannot tell. The root is borrowed mutably, and what boxes own
/// that it owns has no other owner (`FarMut`).
fn check<F: FarFunctionMut>(
    core: &HeapInner,
    limits: OverlayLimits,
    changed: Changed<F::Answer>,
    side: Side,
) -> Result<CheckedChanges<F::Answer>, OffloadError> {
    let types = OwnedTypes::of::<F::Root>();
    match changed {
        Changed::Done(answer, list) => {
            list.check(&types, limits).map_err(OffloadError::WrongChanges)?;
            let pointer = |change: &ValueChange| match side {
                Side::Client => Some(Pointer::from_halves(change.slot.0, NonZeroU32::new(change.slot.1)?)),
                Side::Server => pointer_of_server(core, &types, change),
            };
            let pointers: Option<Vec<Pointer>> = list.changes.iter().map(pointer).collect();
            let pointers = pointers.ok_or(OffloadError::WrongChanges("one is of a value that is not there"))?;
            Ok(CheckedChanges { answer, pointers, changes: list.changes })
        }
        // As many as the call allows, but more than an answer of a server has room for.
        Changed::Stopped(ChangeStop::TooMany { bytes }) if bytes <= limits.bytes_max => {
            Err(CallError::AnswerTooLong.into())
        }
        Changed::Stopped(ChangeStop::TooMany { bytes }) => {
            Err(OffloadError::TooManyChanges { bytes, most: limits.bytes_max })
        }
        Changed::Stopped(ChangeStop::Owner { type_index }) => {
            let name = types.get(type_index).map_or("(unknown)", |owned| owned.name);
            Err(OffloadError::OwnerChanged { name })
        }
    }
}

/// Changes all of these values, or none.
///
/// # Safety
/// A value of the change's type is at each pointer, and nobody else accesses it. Its runs lie within
/// plain fields of the type, and make values of them.
async unsafe fn apply<A>(core: &HeapInner, wanted: &CheckedChanges<A>) -> Result<(), FarError> {
    // All are near before anything changes, and stay until the end of the scope.
    let scope = Scope::new(core);
    let addresses = BatchGet::new(&scope, wanted.pointers.iter().collect(), AccessMode::Write).await?;
    for (address, change) in addresses.into_iter().zip(&wanted.changes) {
        for run in &change.runs {
            // SAFETY: the value begins at this address, which is valid as long as the scope. The caller
            // promises that the run lies in it, that nobody else accesses it, and that it is a value of
            // its type afterwards, too.
            unsafe { address.add(run.at).copy_from_nonoverlapping(run.bytes.as_ptr(), run.bytes.len()) };
        }
    }
    Ok(())
}

/// Returns a pointer to a value that a server says has changed; `None` if none of its type can be
/// there.
fn pointer_of_server(core: &HeapInner, types: &OwnedTypes, change: &ValueChange) -> Option<Pointer> {
    let card = SlotHint(change.slot.0).card();
    // Values that move have handles, which come after the pages. A server changes none.
    let page = core.number_of(change.slot.1).filter(|number| *number < core.pages)?;
    let is_used = FrameWord(core.words[page].load(Ordering::Acquire)).state() != State::Empty;
    let has_room = core.segments.has_room(page, card, types.get(change.type_index)?.size);
    // The frame that the server has read is not believed: as a guess, frame 0 stands for none.
    (is_used && has_room).then(|| Pointer::new(core, page, SlotHint::new(FrameId(0), card)))
}

impl Heap {
    /// Prepares a call of a function that follows far pointers from this value on, and changes plain
    /// fields of what the value owns. It runs at the client, or at the memory server beside the values
    /// ([`HeapCallMut::at`]); the heap applies its changes when it has ended.
    ///
    /// `root` is borrowed mutably during the call, so nobody else sees what the function changes. A
    /// value that has other owners cannot be the root:
    ///
    /// ```compile_fail,E0308
    /// # use farfield::{FarFunctionMut, FarMut, FarPlaceMut, FarView, FarViewMut, Fault, Heap};
    /// # #[derive(FarView, FarViewMut)]
    /// # struct Leaf { number: u64 }
    /// # struct Add;
    /// # impl FarFunctionMut for Add {
    /// #     const NAME: &'static str = "example.add";
    /// #     const VERSION: u32 = 1;
    /// #     type Root = Leaf;
    /// #     type Argument = u64;
    /// #     type Answer = ();
    /// #     async fn run<P: FarPlaceMut>(far: &P, root: FarMut<'_, Leaf>, more: u64) -> Result<(), Fault> {
    /// #         far.change(root, |leaf| leaf.number += more).await
    /// #     }
    /// # }
    /// # let heap = Heap::builder().build().unwrap();
    /// let mut shared = heap.alloc_shared(Leaf { number: 1 }).unwrap();
    /// heap.call_mut::<Add>(&mut shared, 1).run().unwrap(); // error: expected `FarBox`, found `FarArc`
    /// ```
    ///
    /// Nor is anything of the value borrowed meanwhile:
    ///
    /// ```compile_fail,E0502
    /// # use farfield::{FarFunctionMut, FarMut, FarPlaceMut, FarView, FarViewMut, Fault, Heap};
    /// # #[derive(FarView, FarViewMut)]
    /// # struct Leaf { number: u64 }
    /// # struct Add;
    /// # impl FarFunctionMut for Add {
    /// #     const NAME: &'static str = "example.add";
    /// #     const VERSION: u32 = 1;
    /// #     type Root = Leaf;
    /// #     type Argument = u64;
    /// #     type Answer = ();
    /// #     async fn run<P: FarPlaceMut>(far: &P, root: FarMut<'_, Leaf>, more: u64) -> Result<(), Fault> {
    /// #         far.change(root, |leaf| leaf.number += more).await
    /// #     }
    /// # }
    /// # let heap = Heap::builder().build().unwrap();
    /// let mut leaf = heap.alloc(Leaf { number: 1 }).unwrap();
    /// let scope = heap.enter();
    /// let seen = leaf.get(&scope).unwrap();
    /// heap.call_mut::<Add>(&mut leaf, 1).run().unwrap(); // error: cannot borrow `leaf` as mutable
    /// println!("{}", seen.number);
    /// ```
    pub fn call_mut<'h, F: FarFunctionMut>(
        &'h self,
        root: &'h mut FarBox<F::Root>,
        argument: F::Argument,
    ) -> HeapCallMut<'h, F>
    where
        F::Root: Send,
    {
        let core = self.core();
        let first_handle = u64::from(core.first_page) + u64::from(core.pages);
        let limits = OverlayLimits { bytes_max: CHANGES_MAX, first_handle };
        HeapCallMut { call: HeapCall::new(core, FarMut::of_root(root).0, ChangingArgument { limits, argument }) }
    }

    /// Returns where calls of this function with [`Where::Auto`] run now: see [`Heap::call_choice`].
    pub fn call_mut_choice<F: FarFunctionMut>(&self) -> CallPlacementDecision {
        self.call_choice::<Changing<F>>()
    }

    /// Returns how many calls of this function ran where, and why: see [`Heap::call_counts`].
    pub fn call_mut_counts<F: FarFunctionMut>(&self) -> CallCounts {
        self.call_counts::<Changing<F>>()
    }
}
