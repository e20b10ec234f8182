//! Offload: functions that run at the memory server, where far values are (`farfield_wic`).
//!
//! A heap's far addresses are those of its region, so a function at the memory server finds the
//! values of a collection whose pages are far. The caller ensures that the server has the current
//! bytes: they are far, or written back, and nobody changes them meanwhile.
//!
//! While a server is exchanged for another one ([`Heap::switch_pool`](crate::Heap::switch_pool)),
//! it holds everything until the switch is over. An answer counts only if no switch was active when
//! it came and none has ended since it was asked for. So no answer comes from a server that has
//! given back what it read.

use crate::call::{CallCounts, CallSite, ClientReason};
use crate::error::FarError;
use crate::heap::HeapInner;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::call_placement::CallPlacement;
use farfield_pool::{Backend, CallLane, Deal, PagePlaces, PoolError, WriteReservation};
use farfield_wic::{Aggregate, CallError, Caller, Function, Range, Where};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Reason why an operation was not done at the place of far values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OffloadError {
    /// The values could not be brought near or written back.
    #[error(transparent)]
    Far(#[from] FarError),
    /// The call of the function at the server failed. The operation can be asked for at the client,
    /// or with [`Where::Auto`].
    #[error(transparent)]
    Call(#[from] CallError),
    /// The server was built with another definition of a type that the function meets, or of one
    /// that is in it. Build client and server from the same source; types that different compilers
    /// build need `#[repr(C)]`.
    #[error(
        "the memory server has another version of the type {name}: build both sides from the same source, with \
         #[repr(C)] if by different compilers"
    )]
    OtherLayout {
        /// Name of the type.
        name: &'static str,
    },
    /// The function met a page at a member of a stripe, or at a tier, that another one has.
    #[error(
        "the function met a page that another server of the pool keeps: call with Where::Auto or Where::Client, which \
         find all pages"
    )]
    OtherMember,
    /// The function met a value at the server that can move, so that only the client finds it: a
    /// small one on the object or the hybrid plane.
    #[error(
        "the function met a value that moves, which no memory server can find: use Plane::Page, or call with \
         Where::Auto or Where::Client"
    )]
    Movable,
    /// The function met bytes at the server that are no value of the type that its pointer has.
    #[error("the bytes at offset {offset} of the region are no value of the type that the function expects there")]
    NoValue {
        /// Offset of the first byte in the region.
        offset: u64,
    },
    /// The function has stored more than its changes may count for ([`HeapCallMut::changes`]).
    /// Nothing has changed.
    ///
    /// [`HeapCallMut::changes`]: crate::HeapCallMut::changes
    #[error("the changes of the function count for {bytes} bytes and may count for {most}: allow more with `changes`")]
    TooManyChanges {
        /// Bytes for which the changes count, the last one included.
        bytes: usize,
        /// Most bytes for which they may count.
        most: usize,
    },
    /// The function has stored another far pointer in a value than the value has. Nothing has
    /// changed.
    #[error(
        "the function has stored another far pointer in a value of the type {name}: functions change plain fields, and \
         leave owners as they are"
    )]
    OwnerChanged {
        /// Name of the value's type.
        name: &'static str,
    },
    /// A memory server has answered with changes that no function makes. Nothing has changed.
    #[error("the memory server has answered with changes that cannot be: {0}")]
    WrongChanges(&'static str),
    /// The function met a long list, queue, vector or the like at the server, or a flat map, inside of a
    /// far value. The table that says where its elements are is near at the client, and goes along only
    /// with a root that is near, too. Directories of very large flat maps do not go along.
    #[error(
        "the function met a collection whose table is near: make the collection a part of the root, or call with \
         Where::Auto or Where::Client"
    )]
    TableNear,
    /// There are more different values than the answer may have.
    #[error("the column has more than {most} distinct values: ask for fewer rows, or raise the limit")]
    TooMany {
        /// Most different values that the answer may have.
        most: usize,
    },
}

/// Failure of functions that write pages.
#[derive(Debug)]
pub(crate) struct OffloadWriteError {
    pub(crate) error: CallError,
    /// Whether it is certain that none of the functions writes anything any more.
    pub(crate) is_over: bool,
}

/// Number of channels for the calls of one operation; a caller cuts its question into this many
/// calls.
pub(crate) const CHANNELS: usize = 4;
/// Most idle channels to one target that are kept for later calls.
const IDLE_MAX: usize = 4;

/// Place where functions run. It is the one server that keeps all pages (or each of several
/// mirrored servers), or one of the members across which the pages are striped, or a tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum OffloadTarget {
    Whole,
    Member(usize),
}

/// Distribution of the pages over the members of the pool, with the number of switches of the pool
/// before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OffloadLayout {
    pub(crate) deal: Option<Deal>,
    switches: u64,
}

impl OffloadLayout {
    /// Returns the number of switches of the pool before.
    pub(crate) fn switches(&self) -> u64 {
        self.switches
    }

    /// Returns the target that keeps this byte of the region, and the byte's offset there.
    pub(crate) fn place(&self, offset: u64) -> (OffloadTarget, u64) {
        match self.deal.map(|deal| deal.place_byte(offset)) {
            Some((member, local)) => (OffloadTarget::Member(member), local),
            None => (OffloadTarget::Whole, offset),
        }
    }
}

/// Members of a pool that have different pages, if it has such.
pub(crate) struct OffloadMembers {
    pub(crate) layout: OffloadLayout,
    /// Where pages lie, if the members are tiers.
    pub(crate) tiers: Option<Arc<dyn PagePlaces>>,
}

impl OffloadMembers {
    /// Returns the number of members; `None` if the pool has no such.
    fn count(&self) -> Option<usize> {
        let tiers = || self.tiers.as_ref().map(|tiers| tiers.tiers());
        self.layout.deal.map(|deal| deal.members() as usize).or_else(tiers)
    }
}

/// Result of calls that were not all answered.
struct IncompleteCalls {
    /// Reason why the first one was not.
    error: CallError,
    /// Channels whose functions may not have ended.
    callers: Vec<Caller>,
}

/// Channels through which a heap calls functions at the server of its pool, and what became of calls.
#[derive(Default)]
pub(crate) struct Offload {
    channels: Mutex<Channels>,
    /// Calls of functions over far pointers, by name and version.
    counts: Mutex<BTreeMap<(&'static str, u32), CallCounts>>,
}

#[derive(Default)]
struct Channels {
    /// Number of switches of the pool before these channels were opened.
    switches: u64,
    idle: Vec<(OffloadTarget, Caller)>,
    /// Names of functions that a server does not run, and why.
    refused: BTreeMap<&'static str, BTreeMap<OffloadTarget, ClientReason>>,
    /// Measurements of functions over far pointers, by name and version.
    placements: BTreeMap<(&'static str, u32), CallPlacement>,
}

impl Channels {
    /// Notes that a server does not run a function.
    fn refuse(&mut self, name: &'static str, target: OffloadTarget, reason: ClientReason) {
        self.refused.entry(name).or_default().insert(target, reason);
    }
}

/// Limits of each call.
#[derive(Clone, Copy)]
struct OffloadTerms {
    within: Duration,
    steps_max: Option<u64>,
}

/// Calls for one target, with their indices among all calls.
type Bunch<A> = (OffloadTarget, Vec<(usize, A)>);

/// Splits the calls into bunches, some for each target, so that all channels have about as many
/// calls.
fn bunches<A>(calls: Vec<(OffloadTarget, A)>) -> Vec<Bunch<A>> {
    let mut targets: BTreeMap<OffloadTarget, Vec<(usize, A)>> = BTreeMap::new();
    for (place, (target, argument)) in calls.into_iter().enumerate() {
        targets.entry(target).or_default().push((place, argument));
    }
    let channels = (CHANNELS / targets.len().max(1)).max(1);
    let mut bunches = Vec::new();
    for (target, mut rest) in targets {
        let share = rest.len().div_ceil(channels);
        while rest.len() > share {
            let others = rest.split_off(share);
            bunches.push((target, core::mem::replace(&mut rest, others)));
        }
        bunches.push((target, rest));
    }
    bunches
}

/// Merges the results: all answers, in the order of the calls, or all failures as one.
fn merge_answers<A>(
    some: impl Iterator<Item = Result<Vec<(usize, A)>, IncompleteCalls>>,
) -> Result<Vec<A>, IncompleteCalls> {
    let mut all = Ok(Vec::new());
    for some in some {
        match (&mut all, some) {
            (Ok(all), Ok(some)) => all.extend(some),
            (Err(IncompleteCalls { callers, .. }), Err(failed)) => callers.extend(failed.callers),
            (Ok(_), Err(failed)) => all = Err(failed),
            (Err(_), Ok(_)) => {}
        }
    }
    let mut all = all?;
    all.sort_unstable_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, answer)| answer).collect())
}

impl HeapInner {
    /// Checks whether the server runs this function, as far as is known.
    pub(crate) fn may_offload<F: Function>(&self) -> bool {
        self.channels(|channels| !channels.refused.contains_key(F::NAME))
    }

    /// Returns why a server does not run this function, as far as is known.
    pub(crate) fn offload_refusal_at<F: Function>(&self, target: OffloadTarget) -> Option<ClientReason> {
        self.channels(|channels| channels.refused.get(F::NAME)?.get(&target).copied())
    }

    /// Returns why no server of the pool runs this function over far pointers, as far as is known.
    pub(crate) fn call_refusal<F: Function>(&self) -> Option<ClientReason> {
        if self.may_offload::<F>() {
            return None;
        }
        let members = self.offload_members().count();
        self.channels(|channels| {
            let refused = channels.refused.get(F::NAME)?;
            let reason = |index| refused.get(&OffloadTarget::Member(index)).copied();
            match members {
                None => refused.get(&OffloadTarget::Whole).copied(),
                Some(count) => reason(0).filter(|_| (1..count).all(|index| reason(index).is_some())),
            }
        })
    }

    /// Counts a call of a function over far pointers.
    pub(crate) fn count_call<F: Function>(&self, site: CallSite) {
        self.counts(|counts| counts.entry((F::NAME, F::VERSION)).or_default().add(site));
    }

    /// Returns the counts of calls of one function over far pointers.
    pub(crate) fn call_counts<F: Function>(&self) -> CallCounts {
        self.counts(|counts| counts.get(&(F::NAME, F::VERSION)).copied().unwrap_or_default())
    }

    /// Returns the counts of calls of all such functions.
    pub(crate) fn all_call_counts(&self) -> CallCounts {
        self.counts(|counts| CallCounts::sum(counts.values()))
    }

    fn counts<R>(&self, act: impl FnOnce(&mut BTreeMap<(&'static str, u32), CallCounts>) -> R) -> R {
        act(&mut self.offload.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns how the pages of the pool are distributed over its members now.
    pub(crate) fn offload_layout(&self) -> OffloadLayout {
        // In this order, so that a switch in between is noticed.
        let switches = self.backend.progress().switches;
        OffloadLayout { switches, deal: self.backend.deal() }
    }

    /// Returns which members of the pool have different pages now.
    pub(crate) fn offload_members(&self) -> OffloadMembers {
        let layout = self.offload_layout();
        let tiers = if layout.deal.is_none() { self.backend.places() } else { None };
        OffloadMembers { layout, tiers }
    }

    /// Calls a function once for each of these arguments. The function only reads, and each target
    /// has the bytes that it needs. Fails unless all calls are answered.
    pub(crate) fn offload<F: Function>(
        &self,
        layout: OffloadLayout,
        calls: Vec<(OffloadTarget, F::Argument)>,
    ) -> Result<Vec<F::Answer>, CallError> {
        self.call::<F>(layout.switches, calls, None).map_err(|failed| failed.error)
    }

    /// Calls a function once that only reads, at a server that has all that it needs, as was found after
    /// so many switches of the pool.
    pub(crate) fn offload_one<F: Function>(
        &self,
        (target, switches): (OffloadTarget, u64),
        argument: F::Argument,
        within: Duration,
        steps_max: u64,
    ) -> Result<F::Answer, CallError> {
        let terms = OffloadTerms { within, steps_max: Some(steps_max) };
        let call = (target, vec![(0, argument)]);
        let answers = self.call_through_one::<F>(switches, call, None, terms).map_err(|failed| failed.error)?;
        answers.into_iter().next().map(|(_, answer)| answer).ok_or(CallError::Answer)
    }

    /// Notes that a server does not run this function as this program has it.
    pub(crate) fn refuse_offload_at<F: Function>(&self, target: OffloadTarget) {
        self.channels(|channels| channels.refuse(F::NAME, target, ClientReason::NoFunction));
    }

    /// Runs `act` with the measurements by which calls of this function are placed.
    pub(crate) fn with_placement<F: Function, R>(&self, act: impl FnOnce(&mut CallPlacement) -> R) -> R {
        self.channels(|channels| act(channels.placements.entry((F::NAME, F::VERSION)).or_default()))
    }

    /// Calls a function that writes these pages, once for each of these arguments. The pages are
    /// given as ranges of the region (first byte, number of pages), and are
    /// [claimed](HeapInner::claim). While the calls run, the pool is not switched and no snapshot
    /// is made of it.
    pub(crate) fn offload_writing<F: Function>(
        &self,
        arguments: Vec<F::Argument>,
        pages: impl Iterator<Item = Range>,
    ) -> Result<Vec<F::Answer>, OffloadWriteError> {
        self.offload_writing_at::<F>(self.offload_layout(), OffloadTarget::Whole, arguments, pages)
    }

    /// Calls a function that writes these pages as [`HeapInner::offload_writing`] does, at a target
    /// that has all of them according to this layout. Arguments count pages as the target does.
    pub(crate) fn offload_writing_at<F: Function>(
        &self,
        layout: OffloadLayout,
        target: OffloadTarget,
        arguments: Vec<F::Argument>,
        pages: impl Iterator<Item = Range>,
    ) -> Result<Vec<F::Answer>, OffloadWriteError> {
        let _still = self.backend.hold_still();
        let progress = self.backend.progress();
        let nowhere = OffloadWriteError { error: CallError::Nowhere, is_over: true };
        if progress.is_active || progress.switches != layout.switches {
            // The pages would be written at one of the two pools only, or at one that has others there.
            return Err(nowhere);
        }
        let switches = layout.switches;
        let Some(backend) = self.backend_at(target) else { return Err(nowhere) };
        let mut runs: Vec<_> = pages.map(|range| (PageId(range.offset / PAGE_BYTES as u64), range.count)).collect();
        runs.iter().for_each(|(first, count)| self.backend.mark_dirty(*first, *count));
        if let OffloadTarget::Member(_) = target {
            for (first, _) in &mut runs {
                let (of, local) = layout.place(first.offset());
                assert!(of == target, "the target has these pages");
                *first = PageId::containing(local);
            }
        }
        let calls = arguments.into_iter().map(|argument| (target, argument)).collect();
        let writes = match backend.begin_writes(&runs) {
            Ok(writes) => writes,
            Err(PoolError::Refused { reason: CallLane::NOWHERE, .. }) => {
                return self.call::<F>(switches, calls, None).map_err(|failed| {
                    let is_over = failed.callers.into_iter().all(|caller| self.has_ended(caller));
                    OffloadWriteError { error: failed.error, is_over }
                });
            }
            Err(error) => return Err(OffloadWriteError { error: error.into(), is_over: true }),
        };
        let answers = self.call::<F>(switches, calls, Some(&*writes));
        let ended = writes.end();
        let is_over = ended.err().is_none_or(|unwritten| unwritten.is_over);
        match answers {
            Ok(answers) if ended.is_ok() => Ok(answers),
            Ok(_) => Err(OffloadWriteError { error: CallError::NotNow, is_over }),
            Err(failed) => Err(OffloadWriteError { error: failed.error, is_over }),
        }
    }

    /// Returns the backend whose region a target has; `None` if there is no such member now.
    fn backend_at(&self, target: OffloadTarget) -> Option<Arc<dyn Backend>> {
        match target {
            OffloadTarget::Whole => Some(self.backend.clone()),
            OffloadTarget::Member(index) => self.backend.member(index),
        }
    }

    /// Checks whether everything has ended that was asked for through this channel. The server
    /// handles requests in order: when it answers this one, the earlier ones have ended.
    fn has_ended(&self, mut caller: Caller) -> bool {
        let last = caller.call::<Aggregate>(Range { offset: 0, count: 0 });
        let last = last.at(Where::Server).within(self.patience).run();
        matches!(last, Ok(_) | Err(CallError::NoFunction { .. } | CallError::OtherVersion { .. }))
    }

    /// Calls a function through several channels at a time, because a server has one thread for
    /// each channel. `switches` is the number of switches of the pool when the calls were made up.
    fn call<F: Function>(
        &self,
        switches: u64,
        calls: Vec<(OffloadTarget, F::Argument)>,
        writes: Option<&dyn WriteReservation>,
    ) -> Result<Vec<F::Answer>, IncompleteCalls> {
        let terms = OffloadTerms { within: self.patience, steps_max: None };
        let mut bunches = bunches(calls);
        let Some(last) = bunches.pop() else { return Ok(Vec::new()) };
        if bunches.is_empty() {
            return merge_answers([self.call_through_one::<F>(switches, last, writes, terms)].into_iter());
        }
        std::thread::scope(|threads| {
            let ask = |bunch| {
                let call = || self.call_through_one::<F>(switches, bunch, writes, terms);
                std::thread::Builder::new().name("farfield-call".into()).spawn_scoped(threads, call)
            };
            let others: Vec<_> = bunches.into_iter().map(ask).collect();
            let last = self.call_through_one::<F>(switches, last, writes, terms);
            let answers = others.into_iter().map(|other| match other {
                Ok(other) => other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // No thread could be made.
                Err(_) => Err(IncompleteCalls { error: CallError::Nowhere, callers: Vec::new() }),
            });
            merge_answers(answers.chain([last]))
        })
    }

    fn call_through_one<F: Function>(
        &self,
        switches: u64,
        (target, calls): Bunch<F::Argument>,
        writes: Option<&dyn WriteReservation>,
        terms: OffloadTerms,
    ) -> Result<Vec<(usize, F::Answer)>, IncompleteCalls> {
        let was_active = self.backend.progress().is_active;
        let idle = self.channels(|channels| {
            let is_fit =
                |(of, _): &(OffloadTarget, Caller)| *of == target && writes.is_none() && channels.switches == switches;
            let index = channels.idle.iter().position(is_fit)?;
            Some(channels.idle.swap_remove(index).1)
        });
        let nowhere = PoolError::Refused { server: 0, reason: CallLane::NOT_NOW };
        let caller = match (idle, writes) {
            (Some(idle), _) => Ok(idle),
            (None, writes) => self.backend_at(target).ok_or(nowhere).and_then(|backend| match writes {
                Some(writes) => Ok(Caller::through(backend, writes.open()?)),
                None => Ok(Caller::new(backend)),
            }),
        };
        let mut caller = match caller {
            Ok(caller) => caller,
            Err(error) => return Err(self.failed::<F>(target, error.into(), switches, !was_active, None)),
        };
        let (places, arguments): (Vec<usize>, Vec<F::Argument>) = calls.into_iter().unzip();
        let calls = caller.calls::<F>(arguments).at(Where::Server).within(terms.within);
        let calls = match terms.steps_max {
            Some(steps_max) => calls.steps(steps_max),
            None => calls,
        };
        let answers: Result<Vec<F::Answer>, CallError> = calls.run().into_iter().collect();
        let progress = self.backend.progress();
        let is_same = progress.switches == switches && !progress.is_active;
        match answers {
            Ok(answers) => {
                // A late answer of the old server does not count.
                if !is_same {
                    return Err(IncompleteCalls { error: CallError::Nowhere, callers: Vec::new() });
                }
                self.channels(|channels| {
                    let is_wanted = channels.idle.iter().filter(|(of, _)| *of == target).count() < IDLE_MAX;
                    if writes.is_none() && channels.switches == switches && is_wanted {
                        channels.idle.push((target, caller));
                        return None;
                    }
                    Some(caller)
                });
                Ok(places.into_iter().zip(answers).collect())
            }
            Err(error) => {
                // The caller that began the writes knows which functions may still run.
                let caller = Some(caller).filter(|_| writes.is_none());
                Err(self.failed::<F>(target, error, switches, is_same && !was_active, caller))
            }
        }
    }

    /// Turns the error of a call into an [`IncompleteCalls`], and remembers functions that the
    /// server does not run. The calls were made after `switches` switches; with `is_same`, no
    /// switch happened meanwhile.
    fn failed<F: Function>(
        &self,
        target: OffloadTarget,
        error: CallError,
        switches: u64,
        is_same: bool,
        caller: Option<Caller>,
    ) -> IncompleteCalls {
        let refusal = match error {
            CallError::NoFunction { .. } | CallError::OtherVersion { .. } => Some(ClientReason::NoFunction),
            CallError::Nowhere => {
                let is_server = self.backend_at(target).is_some_and(|backend| backend.incarnation().is_some());
                Some(if is_server { ClientReason::OldServer } else { ClientReason::PoolKind })
            }
            _ => None,
        };
        // While the pool is switched there is no single server, but there will be one again.
        if let Some(reason) = refusal.filter(|_| is_same) {
            self.channels(|channels| {
                if channels.switches == switches {
                    channels.refuse(F::NAME, target, reason);
                }
            });
        }
        // Either no server was asked, or one that may still be running the function.
        let is_unasked = matches!(error, CallError::Nowhere | CallError::NotNow);
        IncompleteCalls { error, callers: caller.into_iter().filter(|_| !is_unasked).collect() }
    }

    /// Runs `act` with the channels to the present server; channels to earlier ones are dropped.
    fn channels<R>(&self, act: impl FnOnce(&mut Channels) -> R) -> R {
        let switches = self.backend.progress().switches;
        let mut channels = self.offload.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if channels.switches != switches {
            *channels = Channels { switches, ..Channels::default() };
        }
        act(&mut channels)
    }

    /// Closes the idle channels before the pool ends.
    pub(crate) fn close_channels(&self) {
        self.channels(|channels| channels.idle.clear());
    }
}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Caller>();
};
