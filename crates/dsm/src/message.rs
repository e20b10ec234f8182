//! Messages between nodes: calls of one function at the node's server.

use crate::backup::ReplicaAccess;
use crate::member::Invitation;
use crate::node::AtomicStep;
use crate::task::TaskRefusal;
use farfield_core::dsm::{Expulsion, NameRefusal, NodeLoad, ViewChange};
use farfield_core::lock::LockMode;
use farfield_core::wire::CallBody;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Name of the function.
pub(crate) const NAME: &str = "ff.dsm";
/// Version of the messages.
pub(crate) const VERSION: u32 = 1;

/// Room that is left for the rest of a message beside values.
const OVERHEAD_BYTES: usize = 256;
/// Greatest size of a value in a message, in bytes: the arguments of a task, its result, or a piece of a larger object.
pub const VALUE_BYTES_MAX: usize = CallBody::ARGUMENT_BYTES_MAX - OVERHEAD_BYTES;

/// Greatest size of a loan in the message that ends a task, in bytes.
pub(crate) const LOAN_BYTES: usize = 30;
/// Most mutable loans of a task: half of the message that ends it is left for the result.
pub(crate) const LOANS_MAX: usize = VALUE_BYTES_MAX / 2 / LOAN_BYTES;

/// View of a node, with what its reader may not know of it.
#[derive(Clone, Serialize, Deserialize, Debug, Default)]
pub(crate) struct ViewNews {
    /// Number of the view.
    pub(crate) number: u32,
    /// Changes since the view of the reader, as far as that is known.
    pub(crate) changes: Vec<ViewChange>,
}

impl ViewNews {
    /// Changes for which every message has room, beside its value. What is more is said before.
    pub(crate) const CHANGES_MAX: u32 = 4;

    /// Returns the number of the view before the changes.
    pub(crate) fn after(&self) -> u32 {
        self.number.saturating_sub(u32::try_from(self.changes.len()).unwrap_or(u32::MAX))
    }
}

/// Message with its sender.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Letter<'a> {
    /// Number of the node that sends it.
    pub(crate) sender: u16,
    /// Build of the program that sends it.
    pub(crate) build: u128,
    pub(crate) view: ViewNews,
    pub(crate) load: NodeLoad,
    #[serde(borrow)]
    pub(crate) message: ShareMessage<'a>,
}

/// A message as it is written.
#[derive(Serialize, Debug)]
pub(crate) struct LetterOut<'a, 'm> {
    pub(crate) sender: u16,
    pub(crate) build: u128,
    pub(crate) view: ViewNews,
    pub(crate) load: NodeLoad,
    pub(crate) message: &'a ShareMessage<'m>,
}

/// Where a node can be reached.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) struct NodeAddress {
    /// URL at which it listens.
    pub(crate) url: String,
    /// Memory of the node, for nodes of the same machine.
    pub(crate) arena: Option<ArenaAddress>,
}

/// Memory of a process that others can map.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) struct ArenaAddress {
    pub(crate) process: u32,
    pub(crate) descriptor: i32,
    pub(crate) bytes: u64,
    /// The first bytes, by which it is known.
    pub(crate) stamp: [u8; 16],
}

/// Place of code in the build, with a hash of its types.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct CodeRef {
    /// Offset in the section of trampolines, in bytes.
    pub(crate) offset: u32,
    /// Hash of the types that the code is for.
    pub(crate) types: u128,
    /// Number of values that a destructor drops.
    pub(crate) count: u64,
}

#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) enum ShareMessage<'a> {
    /// A started node is ready, and can be reached there.
    Hello { address: NodeAddress },
    /// All nodes can be reached there, by number.
    Peers { addresses: Vec<NodeAddress> },
    /// A process asks for a place among the nodes.
    Join,
    /// The first process wants a sign of life.
    Beat,
    /// The program has ended.
    Over,
    /// The sender has other work than it said before.
    Load,
    /// Nodes are gone: the letter says who, or here what it has no room for.
    View { after: u32, changes: Vec<ViewChange> },
    /// A replica of the sender's backup is of no use any more, or all of them.
    BackupLost { replica: Option<u8> },
    /// A replica of the sender's backup is in another region now, which has all that counts.
    BackupRestored { replica: u8, access: ReplicaAccess },
    /// A part of an object is wanted: bytes from an offset on.
    Fetch { word: u64, offset: u64, bytes: u64 },
    /// An object is wanted with all that is tied to it, from an offset on. It is of this type.
    FetchGroup { word: u64, offset: u64, root: CodeRef },
    /// An object has no owner any more: it is dropped, if it has a destructor, and its block is
    /// free.
    Free { word: u64, destructor: Option<CodeRef> },
    /// A task is to run.
    Spawn {
        task: u64,
        body: CodeRef,
        /// Whether the task is not taken if the node has no room for it now.
        if_room: bool,
        /// Roots of the borrows that the arguments may have, if they may have any.
        borrows: Option<Vec<u64>>,
        #[serde(borrow, with = "serde_bytes")]
        arguments: &'a [u8],
    },
    /// The scoped tasks are to be waited for that a dead node has sent with borrows of this root. The ticket is the
    /// sender's number of its wait.
    OutlastBorrowers { of: u16, root: u64, ticket: u64 },
    /// A task has ended.
    Ended {
        task: u64,
        #[serde(borrow)]
        outcome: TaskOutcome<'a>,
        /// Mutable loans that the task has used: numbers, words of the objects, and last words in
        /// the blocks in which they were lent; zeros if the object is lost.
        loans: Vec<(u64, u64, u64)>,
    },
    /// A lock is wanted. The ticket is the sender's number of its wait. The task that wants it may have been lent
    /// something of what the lock owns.
    Lock { word: u64, ticket: u64, mode: LockMode, may_wait: bool, may_borrow: bool, locked: LockedType },
    /// A lock is given back, or not wanted any more.
    Unlock { word: u64, ticket: u64, end: LockEnd },
    /// A short body is to be applied to the value under a lock, if nobody has that.
    Apply {
        word: u64,
        locked: LockedType,
        body: CodeRef,
        #[serde(borrow, with = "serde_bytes")]
        arguments: &'a [u8],
    },
    /// An atomic number is read or changed.
    Atomic { word: u64, step: AtomicStep },
    /// An object has more or fewer handles.
    Share { word: u64, more: i64 },
    /// A value is for a channel.
    Send {
        word: u64,
        ticket: u64,
        /// Tickets of the sender below this one have their answers, as far as this channel is concerned.
        settled: u64,
        may_wait: bool,
        #[serde(borrow, with = "serde_bytes")]
        value: Cow<'a, [u8]>,
    },
    /// A value of a channel is wanted.
    Receive { word: u64, ticket: u64, settled: u64, may_wait: bool },
    /// A wait for a lock or a channel is over.
    Cancel { word: u64, ticket: u64 },
    /// A request to a lock or a channel is withdrawn. It may still be on its way.
    Withdraw { word: u64, ticket: u64 },
    /// The receiver of a channel was dropped.
    EndReceiver { word: u64 },
    /// The home answers a wait of the receiver of this message.
    Answered { ticket: u64, answer: WaitAnswer },
    /// The first node is asked about a name of a shared value.
    Name {
        name: &'a str,
        #[serde(borrow)]
        request: NameRequest<'a>,
    },
    /// A wait of the sender for a name is over.
    NameWaitEnded { ticket: u64 },
}

/// What is asked about a name of a shared value.
#[derive(Clone, Copy, Serialize, Deserialize, Debug)]
pub(crate) enum NameRequest<'a> {
    /// The value of this word gets the name, with a handle that is counted.
    Publish { word: u64, types: u128, type_name: &'a str },
    /// The word of the value is wanted. With a ticket it is waited for.
    Find { types: u128, ticket: Option<u64> },
    /// The name is taken away, and the handle is the sender's.
    Unpublish { types: u128 },
}

impl ShareMessage<'_> {
    /// Returns whether the message only reads objects, or is about the nodes themselves: nobody learns from it
    /// what its sender has done.
    pub(crate) fn is_read(&self) -> bool {
        use ShareMessage::{
            BackupLost, BackupRestored, Beat, Fetch, FetchGroup, Hello, Join, Load, OutlastBorrowers, Over, Peers, View,
        };
        matches!(
            self,
            Hello { .. }
                | Peers { .. }
                | Join
                | Beat
                | Over
                | Load
                | View { .. }
                | BackupLost { .. }
                | BackupRestored { .. }
                | Fetch { .. }
                | FetchGroup { .. }
                | OutlastBorrowers { .. }
        )
    }
}

/// Type of a value under a lock.
#[derive(Clone, Copy, Serialize, Deserialize, Debug)]
pub(crate) struct LockedType {
    pub(crate) bytes: u64,
    /// Whether it may own objects.
    pub(crate) owns_others: bool,
    /// Destructor of the value, if it needs one and nodes have backups.
    pub(crate) destructor: Option<CodeRef>,
}

/// End of a holding of a lock. Writers at other nodes bring the value back.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) enum LockEnd {
    Released(#[serde(with = "serde_bytes")] Option<Vec<u8>>),
    /// The holder panicked.
    Panicked(#[serde(with = "serde_bytes")] Option<Vec<u8>>),
    /// The holder is gone, and its value with it.
    Abandoned,
}

/// Answer to who waits for a lock or a channel.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) enum WaitAnswer {
    /// The lock is held now. The value is with it if its home is elsewhere.
    Granted {
        was_left: bool,
        #[serde(with = "serde_bytes")]
        value: Vec<u8>,
    },
    /// The value under the lock is lost.
    Lost,
    /// The lock waits for this task: a reader at this node, which is gone, may have lent it what the lock owns.
    Borrowed(u16),
    /// The lock or the channel would have to be waited for.
    Busy,
    /// The channel has the value, or its receiver.
    Sent,
    /// The value is the receiver's.
    Received(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The other end of the channel is closed.
    Closed,
    /// The home of the channel has no room for the value.
    Full,
    /// The home keeps so many requests of the node that it takes no more.
    TooMany,
    /// A node that has sent values is gone.
    SenderGone(u16),
    /// The tasks that were waited for have ended.
    Ended,
    /// A value has the name that was waited for.
    Named,
}

/// End of a task.
#[derive(Clone, Copy, Serialize, Deserialize, Debug)]
pub(crate) enum TaskOutcome<'a> {
    /// It returned; the bytes of its result.
    Returned(#[serde(borrow, with = "serde_bytes")] &'a [u8]),
    /// The task panicked, and said this.
    Panicked(&'a str),
    /// The result is too large to travel, in bytes.
    TooLarge(u64),
}

/// Answer to a message, with the view and the load of the node that gives it.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct AnswerLetter<'a> {
    pub(crate) view: ViewNews,
    pub(crate) load: NodeLoad,
    #[serde(borrow)]
    pub(crate) reply: ShareReply<'a>,
}

/// Answer to a message, without these.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) enum ShareReply<'a> {
    /// The request is done.
    Done,
    /// The bytes of the object.
    Bytes(#[serde(borrow, with = "serde_bytes")] &'a [u8]),
    /// A part of the bytes of a group, which has so many.
    Group {
        bytes: u64,
        #[serde(borrow, with = "serde_bytes")]
        piece: &'a [u8],
    },
    /// The object is not there.
    Stale,
    /// The sender is of another build.
    OtherBuild,
    /// The sender was taken for dead. It is told when and why, if this node knows.
    Expelled(Option<Expulsion>),
    /// So much has changed after the sender's view. Nothing is done: it says its message again.
    View { after: u32, changes: Vec<ViewChange> },
    /// The node was taken for dead, and another one keeps its objects: nothing is done.
    TakenOver,
    /// The sender is to be that node.
    Invited(Invitation),
    /// All nodes are there, another process is that node, the node has no room for the task, or the lock is not free.
    NoPlace,
    /// The body was applied.
    Applied(#[serde(borrow)] TaskOutcome<'a>),
    /// The node takes no more tasks for now.
    TooMuch(TaskRefusal),
    /// An atomic number as it was before.
    Number(u64),
    /// The wait is over at once.
    Answer(WaitAnswer),
    /// The sender waits for a message ([`ShareMessage::Answered`]).
    Waits,
    /// The word of the value that has the name.
    Word(u64),
    /// The name is not given, or leads to nothing.
    NameRefused(NameRefusal),
}

/// Checks what holds for any bytes that a node is sent: they are refused, or are a message or an answer that is
/// written and read again as it is, and that takes no more memory than they may make it take.
#[cfg(any(test, feature = "conformance"))]
pub fn check_message(bytes: &[u8]) {
    if let Ok(letter) = postcard::from_bytes::<Letter<'_>>(bytes) {
        let written = postcard::to_allocvec(&letter).expect("it was read");
        assert!(written.len() <= bytes.len(), "a number is written in as few bytes as there are");
        let read: Letter<'_> = postcard::from_bytes(&written).expect("it was written");
        assert_eq!(format!("{read:?}"), format!("{letter:?}"));
        let changes = match &letter.message {
            ShareMessage::View { changes, .. } => changes.len(),
            _ => 0,
        };
        let entries = letter.view.changes.len() + changes;
        let roots = match &letter.message {
            ShareMessage::Spawn { borrows, .. } => borrows.as_ref().map_or(0, Vec::len),
            ShareMessage::Ended { loans, .. } => loans.len(),
            ShareMessage::Peers { addresses } => addresses.len(),
            _ => 0,
        };
        assert!(entries + roots <= bytes.len(), "each takes a byte at least");
        assert!(letter.view.after() <= letter.view.number);
    }
    if let Ok(answer) = postcard::from_bytes::<AnswerLetter<'_>>(bytes) {
        let written = postcard::to_allocvec(&answer).expect("it was read");
        let read: AnswerLetter<'_> = postcard::from_bytes(&written).expect("it was written");
        assert_eq!(format!("{read:?}"), format!("{answer:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;
    use farfield_core::dsm::LossCause;

    #[test]
    fn any_bytes_are_refused_or_are_a_message() {
        let mut random = fastrand::Rng::with_seed(31);
        let change = |node| ViewChange { node, host: Some(0), cause: LossCause::Silent(Duration::from_secs(15)) };
        let code = CodeRef { offset: 9, types: 7 << 70, count: 1 };
        let loans = vec![(1, 2, 3), (4, 0, 0)];
        let messages = [
            ShareMessage::Spawn {
                task: 7,
                body: code,
                if_room: true,
                borrows: Some(vec![1, 1 << 60]),
                arguments: &[5; 30],
            },
            ShareMessage::Ended { task: 7, outcome: TaskOutcome::Panicked("text"), loans },
            ShareMessage::View { after: 3, changes: vec![change(4), change(5)] },
            ShareMessage::OutlastBorrowers { of: 3, root: 1 << 50, ticket: 9 },
            ShareMessage::Withdraw { word: 1 << 40, ticket: 8 },
            ShareMessage::Apply {
                word: 1 << 40,
                locked: LockedType { bytes: 8, owns_others: true, destructor: Some(code) },
                body: code,
                arguments: &[6; 9],
            },
            ShareMessage::Answered { ticket: 3, answer: WaitAnswer::Granted { was_left: true, value: vec![8; 20] } },
            ShareMessage::Name {
                name: "table",
                request: NameRequest::Publish { word: 1 << 40, types: 7 << 80, type_name: "u64" },
            },
        ];
        let letter = |message| {
            let (view, load) = (ViewNews { number: 2, changes: vec![change(1), change(2)] }, NodeLoad::default());
            postcard::to_allocvec(&Letter { sender: 1, build: 7, view, load, message }).unwrap()
        };
        let letters = messages.map(letter);
        let mut whole = 0;
        for round in 0..60_000 {
            let mut bytes = letters[round % letters.len()].clone();
            match random.u8(..4) {
                0 => bytes.truncate(random.usize(..bytes.len())),
                1 => bytes = (0..random.usize(..80)).map(|_| random.u8(..)).collect(),
                2 => {}
                _ => {
                    let at = random.usize(..bytes.len());
                    bytes[at] = random.u8(..);
                }
            }
            check_message(&bytes);
            whole += u32::from(postcard::from_bytes::<Letter<'_>>(&bytes).is_ok());
        }
        assert!(whole > 20_000, "{whole}");
    }
}
