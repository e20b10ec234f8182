//! Waits for something that another node will say: by number, until it does or is gone.

use super::ShareNode;
use super::wait_table::{WaitCause, WaitSlot};
use crate::message::{ShareMessage, ShareReply, WaitAnswer};
use crate::node::AtomicStep;
use crate::node::peers::Unanswered;
use crate::{NodeId, ShareError};
use farfield_core::dsm::{HomeTicket, OwnerWord, WithdrawnTickets};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

impl<T, M> WaitSlot<T, M> {
    /// Waits for the answer, once. Lends the place of this thread's task meanwhile.
    pub(crate) fn wait(&self, node: &ShareNode) -> T {
        loop {
            // Centuries, for `wait_until` takes a time.
            if let Some(answer) = self.wait_until(node, Instant::now() + Duration::from_secs(1 << 32)) {
                return answer;
            }
        }
    }

    /// Waits for the answer until then. Returns `None` if it has not come.
    pub(crate) fn wait_until(&self, node: &ShareNode, until: Instant) -> Option<T> {
        if let Some(answer) = self.take() {
            return Some(answer);
        }
        let _noted = node.wait_notes.note(self.cause(), self.node());
        node.workers.while_waiting(node, || self.take_until(until))
    }
}

/// Waits of the threads of a node.
#[derive(Default)]
pub(crate) struct WaitNotes(Mutex<NotedWaits>);

#[derive(Default)]
struct NotedWaits {
    last: u64,
    notes: HashMap<u64, WaitNote>,
}

/// A wait of a thread.
#[derive(Clone, Copy)]
pub(crate) struct WaitNote {
    pub(crate) cause: WaitCause,
    /// Node that ends it.
    pub(crate) node: NodeId,
    pub(crate) since: Instant,
}

/// A wait that is noted until this is dropped.
pub(crate) struct Noted<'n>(&'n WaitNotes, u64);

impl WaitNotes {
    fn lock(&self) -> MutexGuard<'_, NotedWaits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that this thread waits for a node.
    pub(crate) fn note(&self, cause: WaitCause, node: NodeId) -> Noted<'_> {
        let mut waits = self.lock();
        waits.last += 1;
        let number = waits.last;
        waits.notes.insert(number, WaitNote { cause, node, since: Instant::now() });
        Noted(self, number)
    }

    /// Returns the waits, the longest first.
    pub(crate) fn all(&self) -> Vec<WaitNote> {
        let mut all: Vec<_> = self.lock().notes.values().copied().collect();
        all.sort_by_key(|note| note.since);
        all
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.0.lock().notes.remove(&self.1);
    }
}

/// Tickets of this node that may still be asked for, by the word of the channel.
#[derive(Default)]
pub(crate) struct OpenTickets(Mutex<BTreeSet<(u64, u64)>>);

/// A ticket that is open until this is dropped.
struct OpenTicket<'n>(&'n OpenTickets, (u64, u64));

impl OpenTickets {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<(u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, channel: OwnerWord, number: u64) -> OpenTicket<'_> {
        let ticket = (channel.bits(), number);
        self.lock().insert(ticket);
        OpenTicket(self, ticket)
    }

    /// Returns the number below which all tickets of a channel have their answers. One ticket is open.
    pub(crate) fn settled(&self, channel: OwnerWord) -> u64 {
        let open = self.lock();
        open.range((channel.bits(), 0)..).next().map_or(
            0,
            |(word, number)| {
                if *word == channel.bits() { *number } else { 0 }
            },
        )
    }
}

impl Drop for OpenTicket<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

/// Time for which something that others hold or have to do is waited for.
#[derive(Clone, Copy)]
pub(crate) enum WaitLimit {
    /// Nothing is waited for.
    None,
    /// The wait lasts for so long at most.
    Within(Duration),
    /// The wait lasts as long as the node of what is waited for lives.
    Unlimited,
}

impl WaitLimit {
    pub(crate) fn may_wait(self) -> bool {
        !matches!(self, WaitLimit::None)
    }
}

/// Answer to a wait at the home of a lock or a channel.
pub(crate) struct HomeAnswer(pub(crate) Result<WaitAnswer, ShareError>);

impl From<ShareError> for HomeAnswer {
    fn from(error: ShareError) -> HomeAnswer {
        HomeAnswer(Err(error))
    }
}

impl ShareNode {
    /// Asks the home of a lock or a channel for something, and waits for it as long as the limit
    /// says. Returns its answer, and the number of the wait; `Busy` if the time is over.
    ///
    /// If the home dies and another node keeps the lock or the channel since, that one is asked with the same
    /// number: it knows what was answered to this wait before. On another error that leaves open whether the
    /// home has answered, the wish is taken back; the home hears that sooner or later.
    pub(crate) fn wait_at_home<'m>(
        &self,
        word: OwnerWord,
        cause: impl FnOnce(OwnerWord) -> WaitCause,
        limit: WaitLimit,
        request: impl Fn(u64) -> ShareMessage<'m>,
    ) -> Result<(u64, WaitAnswer), Unanswered> {
        let (started, cause) = (Instant::now(), cause(word));
        let mut home = self.host_of(word);
        let (number, mut slot) = self.waits.expect(home, cause, ());
        let _open = matches!(cause, WaitCause::Channel(_)).then(|| self.tickets.open(word, number));
        let mut may_have_arrived = false;
        loop {
            let answer = self.wait_at(home, word, (number, &slot), (limit, started), request(number));
            self.waits.take(number);
            let Err(mut unanswered) = answer else { return answer.map(|answer| (number, answer)) };
            let is_lost = matches!(unanswered.error, ShareError::NodeLost { .. });
            let host = self.host_of(word);
            if !is_lost && unanswered.may_have_arrived {
                self.outbox.tell(home, ShareMessage::Withdraw { word: word.bits(), ticket: number });
            }
            if matches!(unanswered.error, ShareError::Stale { .. }) && self.is_promoted(word) {
                // It was not in the backup, so it was not asked for just now.
                return Err(Unanswered { error: self.lost_with_home(word), may_have_arrived });
            }
            unanswered.may_have_arrived |= may_have_arrived;
            if !is_lost || host == home {
                return Err(unanswered);
            }
            may_have_arrived = unanswered.may_have_arrived;
            home = host;
            slot = self.waits.expect_again(number, home, cause, ());
        }
    }

    /// Asks one node, and waits for its answer.
    fn wait_at(
        &self,
        home: NodeId,
        word: OwnerWord,
        (number, slot): (u64, &WaitSlot<HomeAnswer>),
        (limit, started): (WaitLimit, Instant),
        request: ShareMessage<'_>,
    ) -> Result<WaitAnswer, Unanswered> {
        let answer = match self.at_home(home, request)? {
            ShareReply::Answer(answer) => return Ok(answer),
            ShareReply::Waits => match limit {
                WaitLimit::None => Some(Ok(WaitAnswer::Busy)),
                WaitLimit::Within(within) => slot.wait_until(self, started + within).map(|answer| answer.0),
                WaitLimit::Unlimited => Some(slot.wait(self).0),
            },
            _ => Some(Err(ShareError::Stale { node: home })),
        };
        let answer = match answer {
            Some(answer) => answer,
            // The time is over. The home knows whether the wait is, too.
            None => match self.at_home(home, ShareMessage::Cancel { word: word.bits(), ticket: number }) {
                Ok(ShareReply::Done) => Ok(WaitAnswer::Busy),
                Ok(_) => slot.wait(self).0,
                Err(unanswered) => return Err(Unanswered { may_have_arrived: true, ..unanswered }),
            },
        };
        answer.map_err(|error| Unanswered { error, may_have_arrived: true })
    }

    /// Takes back what a ticket of this node has asked of a lock or a channel, wherever that is kept now. Never waits.
    pub(super) fn withdraw_there(&self, word: OwnerWord, number: u64) {
        let host = self.host_of(word);
        if host == self.id {
            self.withdraw(word, HomeTicket { node: self.id.0, number });
        } else {
            self.outbox.tell(host, ShareMessage::Withdraw { word: word.bits(), ticket: number });
        }
    }

    /// Takes back what a ticket has asked for, whether that has arrived or not.
    pub(super) fn withdraw(&self, word: OwnerWord, ticket: HomeTicket) {
        // Whoever asks looks here first, so the request is found in one of the two places.
        self.withdrawn().withdraw(ticket);
        if self.cancel_channel(word, ticket) || self.leave_lock(word, ticket) {
            self.withdrawn().take(ticket);
        }
    }

    /// Returns the tickets that were withdrawn before their requests have arrived.
    pub(super) fn withdrawn(&self) -> MutexGuard<'_, WithdrawnTickets> {
        self.withdrawn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message to a home, which may be this node.
    pub(super) fn at_home(&self, home: NodeId, message: ShareMessage<'_>) -> Result<ShareReply<'static>, Unanswered> {
        if home != self.id {
            return self.peers.ask(self, home, message, |reply| match reply {
                ShareReply::Done => Some(ShareReply::Done),
                ShareReply::Stale => Some(ShareReply::Stale),
                ShareReply::Waits => Some(ShareReply::Waits),
                ShareReply::Number(number) => Some(ShareReply::Number(number)),
                ShareReply::Answer(answer) => Some(ShareReply::Answer(answer)),
                ShareReply::Word(word) => Some(ShareReply::Word(word)),
                ShareReply::NameRefused(refusal) => Some(ShareReply::NameRefused(refusal)),
                _ => None,
            });
        }
        Ok(self.serve_shared(self.id, message).unwrap_or(ShareReply::Stale))
    }

    /// Says what one that waits at this home has waited for. Never waits.
    pub(super) fn answer(&self, ticket: HomeTicket, answer: WaitAnswer) {
        if ticket.node == self.id.0 {
            self.take_answer(ticket.number, answer);
        } else {
            self.outbox.tell(NodeId(ticket.node), ShareMessage::Answered { ticket: ticket.number, answer });
        }
    }

    /// Takes the answer of a home. Who does not wait any more has told the home.
    pub(super) fn take_answer(&self, number: u64, answer: WaitAnswer) {
        if let Some(slot) = self.waits.take(number) {
            slot.put(HomeAnswer(Ok(answer)));
        }
    }

    /// Asks the home of a shared object for a number.
    pub(crate) fn number_at_home(&self, word: OwnerWord, step: AtomicStep) -> Result<u64, Unanswered> {
        loop {
            let host = self.host_of(word);
            return match self.at_home(host, ShareMessage::Atomic { word: word.bits(), step }) {
                Ok(ShareReply::Number(number)) => Ok(number),
                Ok(_) if self.is_promoted(word) => Err(self.lost_with_home(word).into()),
                Ok(_) => Err(ShareError::Stale { node: host }.into()),
                // Another node keeps the number since. A step that may have been made is not made twice.
                Err(Unanswered { error: ShareError::NodeLost { .. }, may_have_arrived })
                    if self.host_of(word) != host && (!may_have_arrived || step == AtomicStep::Load) =>
                {
                    continue;
                }
                Err(unanswered) => Err(unanswered),
            };
        }
    }
}
