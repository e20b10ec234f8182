//! Counts of calls of functions over far pointers, with the reasons why they ran at the client.

use super::OffloadError;
use core::fmt;
use farfield_wic::CallError;

/// Reason why a call of a function over far pointers ran at the client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum ClientReason {
    /// The caller wanted it: [`Where::Client`](crate::Where::Client), or a task's `fetch`.
    Requested,
    /// Calls at the client were faster lately ([`Heap::call_choice`](crate::Heap::call_choice)), or were
    /// measured.
    Faster,
    /// The pool, or the member with the root, is of a kind that runs no functions over its pages: `ram:`,
    /// `ssd:`, `ec`.
    PoolKind,
    /// The memory server is an older one that runs no functions.
    OldServer,
    /// The memory server has no such function, or has it or a type that it meets in another version.
    NoFunction,
    /// No server had all pages at that time: one was being repaired, or the pool was being switched.
    NotWhole,
    /// The function met a page of another member of a stripe, or of another tier.
    OtherMember,
    /// Pages left the tier while the function ran there.
    MovedPages,
    /// The pages of the tier lie in too many pieces to be named.
    ScatteredPages,
    /// More pages had changed near than were worth writing back for the call, or the calling thread was
    /// in a scope.
    ChangedPages,
    /// The heap believes no server what to change ([`Verify::Keyed`](crate::Verify::Keyed)).
    Keyed,
    /// The function met a value that moves, so that only the heap finds it.
    Movable,
    /// The function met a collection whose table is near.
    TableNear,
    /// The server did not answer, or answered with an error: also one of the function itself, such as a
    /// fault, or because an argument is too long.
    Failed,
}

impl ClientReason {
    /// All reasons, in the order of [`CallCounts::at_client`].
    pub const ALL: [ClientReason; 14] = [
        ClientReason::Requested,
        ClientReason::Faster,
        ClientReason::PoolKind,
        ClientReason::OldServer,
        ClientReason::NoFunction,
        ClientReason::NotWhole,
        ClientReason::OtherMember,
        ClientReason::MovedPages,
        ClientReason::ScatteredPages,
        ClientReason::ChangedPages,
        ClientReason::Keyed,
        ClientReason::Movable,
        ClientReason::TableNear,
        ClientReason::Failed,
    ];

    /// Returns the reason in a few words.
    pub fn text(self) -> &'static str {
        match self {
            ClientReason::Requested => "requested",
            ClientReason::Faster => "faster there, or measured",
            ClientReason::PoolKind => "no functions over a pool of this kind",
            ClientReason::OldServer => "the server runs no functions",
            ClientReason::NoFunction => "the server does not have the function like this",
            ClientReason::NotWhole => "no server had all pages",
            ClientReason::OtherMember => "a page of another member",
            ClientReason::MovedPages => "pages left the tier meanwhile",
            ClientReason::ScatteredPages => "pages of the tier lie in too many pieces",
            ClientReason::ChangedPages => "too many pages had changed",
            ClientReason::Keyed => "the heap believes no server",
            ClientReason::Movable => "a value that moves",
            ClientReason::TableNear => "a table that is near",
            ClientReason::Failed => "the server failed, or refused",
        }
    }
}

impl fmt::Display for ClientReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Numbers of calls by where they ran, and why. A fold counts a call for each of its pieces.
///
/// Its text says it in a line: `3 at the server, 2 at the client (1 requested, 1 a table that is near)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallCounts {
    /// Number of calls that a server answered.
    pub at_server: u64,
    /// Number of calls that ran at the client, by reason, in the order of [`ClientReason::ALL`].
    pub at_client: [u64; ClientReason::ALL.len()],
}

impl CallCounts {
    /// Returns the number of calls that ran at the client for this reason.
    pub fn at_client_by(&self, reason: ClientReason) -> u64 {
        self.at_client[reason as usize]
    }

    pub(crate) fn add(&mut self, place: CallSite) {
        match place {
            CallSite::Server => self.at_server += 1,
            CallSite::Client(reason) => self.at_client[reason as usize] += 1,
        }
    }

    /// Returns the sum of these counts.
    pub(crate) fn sum<'c>(all: impl Iterator<Item = &'c CallCounts>) -> CallCounts {
        all.fold(CallCounts::default(), |mut sum, counts| {
            sum.at_server += counts.at_server;
            sum.at_client.iter_mut().zip(counts.at_client).for_each(|(sum, count)| *sum += count);
            sum
        })
    }
}

impl fmt::Display for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: u64 = self.at_client.iter().sum();
        write!(f, "{} at the server, {all} at the client", self.at_server)?;
        let counted = ClientReason::ALL.into_iter().zip(self.at_client).filter(|(_, count)| *count > 0);
        for (index, (reason, count)) in counted.enumerate() {
            write!(f, "{}{count} {reason}", if index == 0 { " (" } else { ", " })?;
        }
        if all > 0 { f.write_str(")") } else { Ok(()) }
    }
}

/// Place where a call has run, for its statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallSite {
    Server,
    Client(ClientReason),
}

/// Reason why a server has not answered a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct MissingAnswer {
    pub(super) error: OffloadError,
    pub(super) reason: ClientReason,
}

impl MissingAnswer {
    /// The server does not run the function, as is known for this reason.
    pub(super) fn refused(reason: ClientReason) -> MissingAnswer {
        MissingAnswer { error: OffloadError::Call(CallError::Nowhere), reason }
    }

    /// The function met changed pages until that was not worth it any more.
    pub(super) const CHANGED: MissingAnswer =
        MissingAnswer { error: OffloadError::Call(CallError::NotNow), reason: ClientReason::ChangedPages };
    /// Pages left the tier while the function ran there.
    pub(super) const MOVED: MissingAnswer =
        MissingAnswer { error: OffloadError::Call(CallError::NotNow), reason: ClientReason::MovedPages };
    /// The pages of the tier cannot be named.
    pub(super) const SCATTERED: MissingAnswer =
        MissingAnswer { error: OffloadError::Call(CallError::NotNow), reason: ClientReason::ScatteredPages };
}

impl<E: Into<OffloadError>> From<E> for MissingAnswer {
    fn from(error: E) -> MissingAnswer {
        let error = error.into();
        MissingAnswer { error, reason: reason_of(error) }
    }
}

/// Returns the reason for which a call with this error at a server runs at the client.
fn reason_of(error: OffloadError) -> ClientReason {
    match error {
        OffloadError::Far(_) => ClientReason::ChangedPages,
        OffloadError::Call(CallError::Nowhere) => ClientReason::PoolKind,
        OffloadError::Call(CallError::NotNow) => ClientReason::NotWhole,
        OffloadError::Call(CallError::NoFunction { .. } | CallError::OtherVersion { .. })
        | OffloadError::OtherLayout { .. } => ClientReason::NoFunction,
        OffloadError::OtherMember => ClientReason::OtherMember,
        OffloadError::Movable => ClientReason::Movable,
        OffloadError::TableNear => ClientReason::TableNear,
        _ => ClientReason::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_say_where_calls_ran_and_why() {
        let mut counts = CallCounts::default();
        assert_eq!(counts.to_string(), "0 at the server, 0 at the client");
        for (index, reason) in ClientReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, index, "the order of the list");
            counts.add(CallSite::Client(reason));
            assert_eq!(counts.at_client_by(reason), 1);
        }
        counts = CallCounts::default();
        let [movable, requested] = [ClientReason::Movable, ClientReason::Requested].map(CallSite::Client);
        for site in [CallSite::Server, movable, requested, CallSite::Server] {
            counts.add(site);
        }
        let text = counts.to_string();
        assert_eq!(text, "2 at the server, 2 at the client (1 requested, 1 a value that moves)");
        let sum = CallCounts::sum([counts, counts].iter());
        assert_eq!((sum.at_server, sum.at_client_by(ClientReason::Movable)), (4, 2));
    }
}
