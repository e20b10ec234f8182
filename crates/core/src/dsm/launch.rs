//! What the command line asks of a program that shares memory.

use alloc::string::String;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Order of `farfield share run` to the program that it becomes, in an environment variable.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LaunchOrder {
    /// Process that it is for: programs that this one starts inherit the variable.
    pub process: u32,
    /// What the process is among the nodes.
    pub role: LaunchRole,
    /// Near memory of a node, in bytes. `None`: what the program says.
    pub near_bytes: Option<u64>,
    /// Tasks that a node runs at a time. `None`: what the program says.
    pub workers: Option<usize>,
    /// Time after which a node that does not answer is expelled. `None`: what the program says.
    pub expel_after: Option<Duration>,
    /// Secret by which nodes of several machines know each other.
    pub token: Option<String>,
    /// URL of the memory server that keeps backups of the nodes' objects. `None`: what the program says.
    pub backup: Option<String>,
    /// Token for that server.
    pub backup_token: Option<String>,
    /// URLs of the servers of etcd that decide on the members, with commas. `None`: what the program says.
    pub etcd: Option<String>,
    /// Longest wait for nodes of other machines.
    pub wait: Duration,
}

impl LaunchOrder {
    /// Name of the environment variable. Its value is JSON.
    pub const VARIABLE: &str = "FARFIELD_SHARE_ORDER";
}

/// What a process is among the nodes of its program.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum LaunchRole {
    /// The first node, which starts others on its machine.
    First {
        /// Number of nodes. `None`: what the program says.
        nodes: Option<u16>,
        /// Nodes of this machine. The others join.
        here: Option<u16>,
        /// Where nodes of other machines find the first one: a URL.
        listen: Option<String>,
    },
    /// A node that joins others.
    Joined {
        /// URL of the first node.
        first: String,
    },
}
