//! What can go wrong, by name.

use crate::NodeId;
use crate::node::Unanswered;
use core::time::Duration;
use farfield_core::dsm::{Expulsion, REQUESTS_OF_NODE_MAX};

/// Error of an access to shared memory. It can travel between nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The node that kept the object is gone, and the object with it.
    #[error("node {node} is gone, and what it kept with it")]
    NodeLost {
        /// Node that kept it.
        node: NodeId,
    },
    /// The object was lent to a task that has not given it back.
    #[error("the object was lent to a task that has not given it back, because its node is gone")]
    Lost,
    /// The lock waits until this task has ended: a reader whose node is gone may have lent it what the value owns.
    #[error("node {node} is gone, and may have lent this task what the lock owns: the lock waits for the task's end")]
    Borrowed {
        /// Node of the reader.
        node: NodeId,
    },
    /// The node did not answer in time, although nobody has seen it die.
    #[error("node {node} has not answered within {} s", within.as_secs_f64())]
    Silent {
        /// Node that was asked.
        node: NodeId,
        /// Time for which it was waited.
        within: Duration,
    },
    /// The near memory of this node is used up by objects.
    #[error("{limit_bytes} bytes of near memory hold no object of {bytes} bytes beside the others (NodeBuilder::near)")]
    Full {
        /// Size of the object, in bytes.
        bytes: u64,
        /// Near memory of the node, in bytes.
        limit_bytes: u64,
    },
    /// Scopes refer to copies that take as much as the node's near memory, and that nobody wants any
    /// more.
    #[error("scopes hold {held_bytes} bytes of old copies: read in a scope of its own (Here::enter), and renew that")]
    ScopeTooLong {
        /// Bytes of these copies.
        held_bytes: u64,
    },
    /// The value is larger than an object or a message can be.
    #[error("a value of {bytes} bytes is too large to travel: {limit_bytes} bytes at most")]
    TooLarge {
        /// Size of the value, in bytes.
        bytes: u64,
        /// Greatest size, in bytes.
        limit_bytes: u64,
    },
    /// A task is given more mutable loans than the message that ends it can bring back.
    #[error("a task can have {most} mutable loans at most, not {loans}")]
    TooManyLoans {
        /// Mutable loans of the task.
        loans: usize,
        /// Most mutable loans of a task.
        most: usize,
    },
    /// The node takes no more tasks of other nodes before some have ended. Nothing was started.
    #[error("node {node} has {most} tasks of other nodes at most, and this one is number {tasks}")]
    TooManyTasks {
        /// Node that was asked.
        node: NodeId,
        /// Tasks with the one that was refused.
        tasks: u64,
        /// Most tasks of other nodes there.
        most: u64,
    },
    /// The arguments of the tasks of other nodes that wait at the node take as much as its near memory. Nothing was
    /// started.
    #[error("arguments of tasks that wait at node {node} take {limit_bytes} bytes at most, and {bytes} with this one")]
    TooManyArguments {
        /// Node that was asked.
        node: NodeId,
        /// Bytes with the arguments that were refused.
        bytes: u64,
        /// Most bytes that arguments may take there: its near memory.
        limit_bytes: u64,
    },
    /// So many tasks of this node wait for the lock or the channel that no more may. Nothing was done.
    #[error("node {node} keeps {most} requests of a node for a lock or a channel at most")]
    TooManyRequests {
        /// Node that keeps the lock or the channel.
        node: NodeId,
        /// Most requests of a node.
        most: u64,
    },
    /// The node is another build of the program, or no node of this program.
    #[error("node {node} runs another build of the program")]
    OtherBuild {
        /// Node that was asked.
        node: NodeId,
    },
    /// This node is not part of the program any more: the others take it for dead.
    #[error("{}", expelled(*.expulsion))]
    Expelled {
        /// When it was expelled, and why, as far as this node was told.
        expulsion: Option<Expulsion>,
    },
    /// The node does not keep the object any more. In safe code this does not happen.
    #[error("node {node} does not keep the object any more")]
    Stale {
        /// Node that was asked.
        node: NodeId,
    },
    /// The node does not do what it is asked to, because it ends, or because doing it failed.
    #[error("node {node} refuses what it is asked for: it ends, or doing it has failed")]
    Refused {
        /// Node that was asked.
        node: NodeId,
    },
    /// There is no node of this number.
    #[error("there is no node {node}")]
    UnknownNode {
        /// The number.
        node: NodeId,
    },
    /// A task panicked that the one which has failed was waiting for. What it said was printed at its node.
    #[error("a task that was waited for panicked")]
    TaskPanicked,
    /// A name was refused, or leads to no value of the type that was asked for. [`NameError`] says which.
    #[error("a value was not found, or not shared, by its name")]
    NameRefused,
}

impl ShareError {
    /// Returns the error of a request that a home does not keep beside the others.
    pub(crate) fn too_many_requests(node: NodeId) -> ShareError {
        ShareError::TooManyRequests { node, most: REQUESTS_OF_NODE_MAX as u64 }
    }
}

/// Returns what is said of a node that was expelled.
pub(crate) fn expelled(expulsion: Option<Expulsion>) -> String {
    expulsion.map_or_else(|| "this node was expelled".into(), |expulsion| format!("this node {expulsion}"))
}

/// Lets a task that waits for others fail with what they failed with.
impl From<JoinError> for ShareError {
    fn from(error: JoinError) -> ShareError {
        match error {
            JoinError::Panicked { .. } => ShareError::TaskPanicked,
            JoinError::Share(error) => error,
        }
    }
}

/// Error: a value has no name, or cannot get one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// No value has the name.
    #[error("no value has the name {name}")]
    Absent {
        /// Name that was asked for.
        name: String,
    },
    /// A value has the name already.
    #[error("another value has the name {name}: take it away first (Here::unpublish)")]
    Taken {
        /// Name that was asked for.
        name: String,
    },
    /// The value that has the name is of another type.
    #[error("the value of the name {name} is a {found}, not a {wanted}")]
    OtherType {
        /// Name that was asked for.
        name: String,
        /// Type of the value.
        found: String,
        /// Type that was asked for.
        wanted: &'static str,
    },
    /// This cannot be a name.
    #[error("a name is a word of 1 to 64 bytes, and {name:?} is none")]
    NoName {
        /// The text, or its begin.
        name: String,
    },
    /// The program has too many names.
    #[error("a program has {most} names at most, and {name} would be one more")]
    TooManyNames {
        /// Name that was refused.
        name: String,
        /// Most names of a program.
        most: u64,
    },
    /// Too many tasks of this node wait for names.
    #[error("{most} tasks of a node wait for names at most, and this one would wait for {name}")]
    TooManyWaits {
        /// Name that was asked for.
        name: String,
        /// Most waits of a node.
        most: u64,
    },
    /// A node that was asked cannot be reached, or has no room.
    #[error(transparent)]
    Share(#[from] ShareError),
}

impl From<Unanswered> for NameError {
    fn from(unanswered: Unanswered) -> NameError {
        NameError::Share(unanswered.error)
    }
}

/// Lets a task that needs a named value fail with a value that travels.
impl From<NameError> for ShareError {
    fn from(error: NameError) -> ShareError {
        match error {
            NameError::Share(error) => error,
            _ => ShareError::NameRefused,
        }
    }
}

/// Lets a program that needs a named value end as one whose task has no result does.
impl From<NameError> for JoinError {
    fn from(error: NameError) -> JoinError {
        JoinError::Share(error.into())
    }
}

/// Error: a task has no result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The task panicked.
    #[error("the task panicked: {message}")]
    Panicked {
        /// The text of the panic.
        message: String,
    },
    /// The result of the task cannot travel, or its node cannot be reached.
    #[error(transparent)]
    Share(#[from] ShareError),
}

/// Error: the nodes of a program could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeStartError {
    /// There are too few or too many nodes, or too little near memory.
    #[error("{0}")]
    Argument(&'static str),
    /// The operating system refuses memory, a file, or a process.
    #[error("cannot {what}: {source}")]
    Os {
        /// Action that was tried.
        what: &'static str,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// That is no address at which a node can listen.
    #[error(transparent)]
    Listen(farfield_server::BadUrl),
    /// The node's server cannot listen.
    #[error(transparent)]
    Server(#[from] farfield_server::StartError),
    /// The memory server for backups cannot be used.
    #[error("cannot keep backups at {url}: {problem}")]
    Backup {
        /// URL of the server.
        url: String,
        /// The reason, in words.
        problem: String,
    },
    /// The etcd that decides on the members cannot be used.
    #[error("cannot have etcd at {url} decide on the members: {problem}")]
    Etcd {
        /// URLs of its servers.
        url: String,
        /// The reason, in words.
        problem: String,
    },
    /// A started process has ended, or is not there in time.
    #[error("the process of node {node} {problem}")]
    Node {
        /// Number of the node.
        node: NodeId,
        /// Event, in words.
        problem: String,
    },
}

impl NodeStartError {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(std::io::Error) -> NodeStartError {
        move |source| NodeStartError::Os { what, source }
    }
}
