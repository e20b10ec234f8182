//! Bounded channels that hand values, and what they own, from task to task.
#![allow(unsafe_code, reason = "values travel as bytes")]

use crate::message::{ShareMessage, WaitAnswer};
use crate::node::{self, WaitCause, WaitLimit};
use crate::object::owned_by;
use crate::task::code::{ShippedCode, bytes_of};
use crate::{Far, FarGroup, Here, NodeId, OwnedObject, Portable, ShareError};
use core::marker::PhantomData;
use core::mem::size_of;
use core::time::Duration;
use farfield_core::dsm::OwnerWord;
use std::borrow::Cow;

/// Makes a channel for up to `bound` values, which are kept at this node until they are received. With
/// a bound of 0 each value is handed from sender to receiver.
///
/// Values of one sender arrive in order. Both ends can be sent to other nodes. If this node dies and has a
/// backup, the channel goes on at the first node. Fails if near memory is
/// full, or if a value is too large to travel.
pub fn channel<T: Far>(here: &Here<'_>, bound: usize) -> Result<(Sender<T>, Receiver<T>), ShareError> {
    let word = here.alloc(0u64)?.into_word();
    let (sender, receiver) = (Sender { word, value: PhantomData }, Receiver { word, value: PhantomData });
    here.node().begin_channel(word, bound, size_of::<T>() as u64, ShippedCode::of_destructor::<T>(1));
    Ok((sender, receiver))
}

/// Error of a send. What was not sent comes back, if it is certain that it was not.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError<T> {
    /// The value will not be received: the receiver was dropped, or its node is gone.
    #[error("nobody will receive the value")]
    Closed(T),
    /// The channel has no room for the value now: it has its bound, or its node's memory is full.
    #[error("there is no room for the value")]
    Full(T),
    /// The channel's node cannot be asked.
    #[error("the channel cannot be reached: {error}")]
    Share {
        /// What is wrong.
        error: ShareError,
        /// The value, unless the channel may have it.
        value: Option<T>,
    },
}

/// Error of a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// All values were received, and there will be no more.
    #[error("all senders are gone")]
    Closed,
    /// A node from which values were sent is gone, and its values were received. It is said once;
    /// others may still send.
    #[error("node {node}, which has sent, is gone")]
    SenderLost {
        /// The node.
        node: NodeId,
    },
    /// The channel's node cannot be asked. If it is silent, a value may be lost.
    #[error(transparent)]
    Share(#[from] ShareError),
}

// SAFETY: a value, or none, and plain errors.
unsafe impl<T: Far> Portable for SendError<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for SendError<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        match self {
            SendError::Closed(value) | SendError::Full(value) | SendError::Share { value: Some(value), .. } => {
                value.visit_owned(visit);
            }
            SendError::Share { value: None, .. } => {}
        }
    }
}
// SAFETY: as above.
unsafe impl<T: Far> Far for SendError<T> {}
// SAFETY: plain errors.
unsafe impl Portable for RecvError {}
// SAFETY: it has no ties.
unsafe impl FarGroup for RecvError {}
// SAFETY: as above.
unsafe impl Far for RecvError {}

/// End of a channel through which values are sent. There may be several ([`Sender::try_clone`]).
pub struct Sender<T: Far> {
    word: OwnerWord,
    value: PhantomData<T>,
}

// SAFETY: a word, which holds no address and stands for one sender wherever it is.
unsafe impl<T: Far> Portable for Sender<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for Sender<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::channel(self.word));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: Far> Far for Sender<T> {}

impl<T: Far> core::fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Sender(channel at node {})", NodeId::of(self.word))
    }
}

impl<T: Far> Sender<T> {
    /// Sends a value. Waits until the channel has room for it, and lends the place of the task
    /// meanwhile.
    pub fn send(&self, here: &Here<'_>, value: T) -> Result<(), SendError<T>> {
        self.send_limited(here, value, WaitLimit::Unlimited)
    }

    /// Sends a value if the channel has room for it.
    pub fn try_send(&self, here: &Here<'_>, value: T) -> Result<(), SendError<T>> {
        self.send_limited(here, value, WaitLimit::None)
    }

    /// Sends a value as [`Sender::send`] does, and gives up after this time.
    pub fn send_within(&self, here: &Here<'_>, value: T, within: Duration) -> Result<(), SendError<T>> {
        self.send_limited(here, value, WaitLimit::Within(within))
    }

    fn send_limited(&self, here: &Here<'_>, value: T, limit: WaitLimit) -> Result<(), SendError<T>> {
        here.node().stage(|| owned_by(&value));
        let bytes = bytes_of(value);
        let word = self.word.bits();
        let request = |ticket| {
            let (may_wait, settled) = (limit.may_wait(), here.node().tickets.settled(self.word));
            ShareMessage::Send { word, ticket, settled, may_wait, value: Cow::Borrowed(&bytes) }
        };
        let answer = here.node().wait_at_home(self.word, WaitCause::Channel, limit, request);
        // SAFETY: the bytes of the value, which the channel does not have, and which are used once.
        let value = || unsafe { bytes.as_ptr().cast::<T>().read_unaligned() };
        match answer {
            Ok((_, WaitAnswer::Sent)) => Ok(()),
            Ok((_, WaitAnswer::Busy | WaitAnswer::Full)) => Err(SendError::Full(value())),
            Ok((_, WaitAnswer::TooMany)) => {
                let error = ShareError::too_many_requests(NodeId::of(self.word));
                Err(SendError::Share { error, value: Some(value()) })
            }
            Ok(_) => Err(SendError::Closed(value())),
            Err(unanswered) => {
                let value = (!unanswered.may_have_arrived).then(value);
                Err(SendError::Share { error: unanswered.error, value })
            }
        }
    }

    /// Returns another sender of this channel. Sends at most one message to the channel's node.
    pub fn try_clone(&self, here: &Here<'_>) -> Result<Sender<T>, ShareError> {
        here.node().share(self.word).map_err(|unanswered| unanswered.error)?;
        Ok(Sender { word: self.word, value: PhantomData })
    }
}

impl<T: Far> Drop for Sender<T> {
    fn drop(&mut self) {
        node::with_current(|node| node.unshare(self.word));
    }
}

/// End of a channel at which values are received.
pub struct Receiver<T: Far> {
    word: OwnerWord,
    value: PhantomData<T>,
}

// SAFETY: a word, which holds no address and stands for the receiver wherever it is.
unsafe impl<T: Far> Portable for Receiver<T> {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl<T: Far> FarGroup for Receiver<T> {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        visit(OwnedObject::channel(self.word));
    }
}
// SAFETY: the word never changes.
unsafe impl<T: Far> Far for Receiver<T> {}

impl<T: Far> core::fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Receiver(channel at node {})", NodeId::of(self.word))
    }
}

impl<T: Far> Receiver<T> {
    #[cfg(test)]
    pub(crate) fn owner_word(&self) -> OwnerWord {
        self.word
    }

    /// Receives the oldest value. Waits until there is one, and lends the place of the task meanwhile.
    pub fn recv(&self, here: &Here<'_>) -> Result<T, RecvError> {
        self.recv_limited(here, WaitLimit::Unlimited)?.ok_or(RecvError::Closed)
    }

    /// Receives the oldest value, if there is one.
    pub fn try_recv(&self, here: &Here<'_>) -> Result<Option<T>, RecvError> {
        self.recv_limited(here, WaitLimit::None)
    }

    /// Receives the oldest value as [`Receiver::recv`] does, and gives up after this time.
    pub fn recv_within(&self, here: &Here<'_>, within: Duration) -> Result<Option<T>, RecvError> {
        self.recv_limited(here, WaitLimit::Within(within))
    }

    fn recv_limited(&self, here: &Here<'_>, limit: WaitLimit) -> Result<Option<T>, RecvError> {
        let word = self.word.bits();
        let request = |ticket| {
            let (may_wait, settled) = (limit.may_wait(), here.node().tickets.settled(self.word));
            ShareMessage::Receive { word, ticket, settled, may_wait }
        };
        let answer = here.node().wait_at_home(self.word, WaitCause::Channel, limit, request);
        match answer.map_err(|unanswered| unanswered.error)?.1 {
            WaitAnswer::Received(bytes) if bytes.len() == size_of::<T>() => {
                // SAFETY: the bytes of a value that was sent, which nobody else has.
                Ok(Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }))
            }
            WaitAnswer::Busy => Ok(None),
            WaitAnswer::TooMany => Err(ShareError::too_many_requests(NodeId::of(self.word)).into()),
            WaitAnswer::SenderGone(node) => Err(RecvError::SenderLost { node: NodeId(node) }),
            _ => Err(RecvError::Closed),
        }
    }
}

impl<T: Far> Drop for Receiver<T> {
    fn drop(&mut self) {
        node::with_current(|node| node.end_receiving(self.word));
    }
}
