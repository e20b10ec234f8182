//! Offload: code that runs where far values are, and not here (`farfield_wic`).
//!
//! A heap's far addresses are those of its region, so a function at the memory server finds the values of a collection whose pages are
//! far. Who calls sees to it that the server has the present bytes: they are far, or written back, and nobody changes them meanwhile.
//!
//! A server that is exchanged for another one ([`Heap::switch_pool`](crate::Heap::switch_pool)) holds everything until the switch is over. An answer counts only
//! if no switch went on when it came and none has ended since it was asked for; so none comes from a server that has given back what it read.

use crate::error::FarError;
use crate::heap::Core;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::{Aggregate, CallError, Caller, Function, Range, Where};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Why something that was to be done where far values are was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OffloadError {
    /// The values cannot be had, or written back.
    #[error(transparent)]
    Far(#[from] FarError),
    /// It was to run at the server, and did not. It can be asked for at the client, or with [`Where::Auto`].
    #[error(transparent)]
    Call(#[from] CallError),
    /// There are more different values than the answer may have.
    #[error("there are more than {most} different values: ask for fewer rows, or allow more")]
    TooMany {
        /// How many it may have.
        most: usize,
    },
}

/// Why functions that write pages did not all end well.
#[derive(Debug)]
pub(crate) struct Unwritten {
    pub(crate) error: CallError,
    /// None of them writes anything any more.
    pub(crate) is_over: bool,
}

/// Channels that are kept for the next call.
const IDLE_MAX: usize = 4;

/// A heap's means to call functions at the server of its pool.
#[derive(Default)]
pub(crate) struct Offload(Mutex<Channels>);

#[derive(Default)]
struct Channels {
    /// Switches of the pool before these were opened.
    switches: u64,
    idle: Vec<Caller>,
    /// Functions that the server does not run.
    refused: BTreeSet<&'static str>,
}

impl Core {
    /// Does the server run this function, as far as is known?
    pub(crate) fn may_offload<F: Function>(&self) -> bool {
        self.channels(|channels| !channels.refused.contains(F::NAME))
    }

    /// Calls a function of which the server has the bytes, once for each of these arguments. All answer, or it is an error.
    pub(crate) fn offload<F: Function>(&self, arguments: Vec<F::Argument>) -> Result<Vec<F::Answer>, CallError> {
        self.call::<F>(arguments).map_err(|(error, _)| error)
    }

    /// The same for a function that writes these pages (in the region: first byte, and pages), which are [claimed](Core::claim). While it runs the pool is
    /// not switched and no snapshot is made of it.
    pub(crate) fn offload_writing<F: Function>(
        &self,
        arguments: Vec<F::Argument>,
        pages: impl Iterator<Item = Range>,
    ) -> Result<Vec<F::Answer>, Unwritten> {
        let _still = self.backend.hold_still();
        if self.backend.progress().is_active {
            // It would be written at one side only.
            return Err(Unwritten { error: CallError::Nowhere, is_over: true });
        }
        pages.for_each(|range| {
            self.backend.will_be_written(PageId(range.offset / PAGE_BYTES as u64), range.count);
        });
        self.call::<F>(arguments).map_err(|(error, mut caller)| {
            // The server does what comes through one channel in order: when it answers this, what came before has ended.
            let last = caller.call::<Aggregate>(Range { offset: 0, count: 0 });
            let last = last.at(Where::Server).within(self.patience).run();
            let is_known = matches!(last, Ok(_) | Err(CallError::NoFunction { .. } | CallError::OtherVersion { .. }));
            // Nobody was asked.
            let is_over = is_known || error == CallError::Nowhere;
            Unwritten { error, is_over }
        })
    }

    /// If there is no answer, through which channel it was asked for.
    fn call<F: Function>(&self, arguments: Vec<F::Argument>) -> Result<Vec<F::Answer>, (CallError, Box<Caller>)> {
        let was_active = self.backend.progress().is_active;
        let (switches, idle) = self.channels(|channels| (channels.switches, channels.idle.pop()));
        let mut caller = idle.unwrap_or_else(|| Caller::new(self.backend.clone()));
        let calls = caller.calls::<F>(arguments).at(Where::Server).within(self.patience);
        let answers: Result<Vec<F::Answer>, CallError> = calls.run().into_iter().collect();
        let progress = self.backend.progress();
        let is_same = progress.switches == switches && !progress.is_active;
        match answers {
            Ok(answers) => {
                self.channels(|channels| {
                    if channels.switches == switches && channels.idle.len() < IDLE_MAX {
                        channels.idle.push(caller);
                        return None;
                    }
                    Some(caller)
                });
                // What comes from the old server when it is none any more is not an answer.
                if is_same {
                    Ok(answers)
                } else {
                    Err((CallError::Nowhere, Box::new(Caller::new(self.backend.clone()))))
                }
            }
            Err(error) => {
                let is_refusal =
                    matches!(error, CallError::Nowhere | CallError::NoFunction { .. } | CallError::OtherVersion { .. });
                // While the pool is switched there is no one server, and there will be one again.
                if is_refusal && is_same && !was_active {
                    self.channels(|channels| {
                        if channels.switches == switches {
                            channels.refused.insert(F::NAME);
                        }
                    });
                }
                Err((error, Box::new(caller)))
            }
        }
    }

    /// Those of the present server.
    fn channels<R>(&self, act: impl FnOnce(&mut Channels) -> R) -> R {
        let switches = self.backend.progress().switches;
        let mut channels = self.offload.0.lock().unwrap_or_else(PoisonError::into_inner);
        if channels.switches != switches {
            *channels = Channels { switches, ..Channels::default() };
        }
        act(&mut channels)
    }

    /// Gives the channels back before the pool ends.
    pub(crate) fn close_channels(&self) {
        self.channels(|channels| channels.idle.clear());
    }
}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Caller>();
};
