//! What other nodes, and tasks of this one, ask of what this node keeps without an owner: locks,
//! counts, atomic numbers and channels. Nothing here waits.

use super::locks::LockWish;
use super::{NodeId, ShareNode};
use crate::message::{ShareMessage, ShareReply};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use farfield_core::dsm::{BorrowRoot, HomeTicket, OwnerWord};
use serde::{Deserialize, Serialize};

/// Step of an atomic number.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) enum AtomicStep {
    Load,
    Store(u64),
    Swap(u64),
    /// Adds, modulo 2⁶⁴.
    Add(u64),
    And(u64),
    Or(u64),
    Xor(u64),
    CompareExchange {
        current: u64,
        new: u64,
    },
}

impl AtomicStep {
    /// Carries the step out, sequentially consistent. Returns the number as it was before.
    pub(crate) fn apply(self, number: &AtomicU64) -> u64 {
        match self {
            AtomicStep::Load => number.load(SeqCst),
            AtomicStep::Store(new) | AtomicStep::Swap(new) => number.swap(new, SeqCst),
            AtomicStep::Add(more) => number.fetch_add(more, SeqCst),
            AtomicStep::And(bits) => number.fetch_and(bits, SeqCst),
            AtomicStep::Or(bits) => number.fetch_or(bits, SeqCst),
            AtomicStep::Xor(bits) => number.fetch_xor(bits, SeqCst),
            AtomicStep::CompareExchange { current, new } => {
                number.compare_exchange(current, new, SeqCst, SeqCst).unwrap_or_else(|found| found)
            }
        }
    }
}

impl ShareNode {
    /// Serves a message about a lock, a count, an atomic number or a channel. Returns `None` for other
    /// messages, and for nonsense.
    pub(super) fn serve_shared(&self, sender: NodeId, message: ShareMessage<'_>) -> Option<ShareReply<'static>> {
        let ticket = |number| HomeTicket { node: sender.0, number };
        let said = |answer: Option<_>| answer.map_or(ShareReply::Waits, ShareReply::Answer);
        Some(match message {
            ShareMessage::Lock { word, ticket: number, mode, may_wait, may_borrow, locked } => {
                let wish = LockWish { mode, may_wait, may_borrow, is_new: false };
                said(self.ask_lock(OwnerWord::from_bits(word)?, ticket(number), wish, locked))
            }
            ShareMessage::Unlock { word, ticket: number, end } => {
                self.end_lock(OwnerWord::from_bits(word)?, ticket(number), end);
                ShareReply::Done
            }
            ShareMessage::Atomic { word, step } => {
                let word = OwnerWord::from_bits(word)?;
                self.step_number(word, step).map_or(ShareReply::Stale, ShareReply::Number)
            }
            ShareMessage::Share { word, more } => match self.count_handles(OwnerWord::from_bits(word)?, more) {
                true => ShareReply::Done,
                false => ShareReply::Stale,
            },
            // It was not in the backup of its node.
            ShareMessage::Send { word, .. } | ShareMessage::Receive { word, .. }
                if !self.keeps_channel(OwnerWord::from_bits(word)?) =>
            {
                ShareReply::Stale
            }
            ShareMessage::Send { word, ticket: number, settled, may_wait, value } => {
                said(self.send_value(OwnerWord::from_bits(word)?, ticket(number), settled, &value, may_wait))
            }
            ShareMessage::Receive { word, ticket: number, settled, may_wait } => {
                said(self.receive_value(OwnerWord::from_bits(word)?, ticket(number), settled, may_wait))
            }
            ShareMessage::Cancel { word, ticket: number } => {
                let (word, ticket) = (OwnerWord::from_bits(word)?, ticket(number));
                match self.cancel_channel(word, ticket) || self.cancel_lock(word, ticket) {
                    true => ShareReply::Done,
                    false => ShareReply::Stale,
                }
            }
            ShareMessage::Withdraw { word, ticket: number } => {
                self.withdraw(OwnerWord::from_bits(word)?, ticket(number));
                ShareReply::Done
            }
            ShareMessage::EndReceiver { word } => {
                self.end_receiver(OwnerWord::from_bits(word)?);
                ShareReply::Done
            }
            ShareMessage::OutlastBorrowers { of, root, ticket: number } => {
                let is_none = self.borrowers.lock().close(of, BorrowRoot::from_bits(root), ticket(number));
                if is_none { ShareReply::Done } else { ShareReply::Waits }
            }
            ShareMessage::Name { name, request } => self.serve_name(sender, name, &request)?,
            ShareMessage::NameWaitEnded { ticket: number } => {
                self.cancel_name(sender, number);
                ShareReply::Done
            }
            ShareMessage::Answered { ticket: number, answer } => {
                self.take_answer(number, answer);
                ShareReply::Done
            }
            _ => return None,
        })
    }
}
