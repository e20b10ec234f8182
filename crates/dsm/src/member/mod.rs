//! Who is a node, and who says so.
//!
//! The first process starts nodes on its own machine, and lets others join that know the program's token. From then on
//! one of two decides ([`MemberAuthority`]): the first process itself, with which all others end, asks each node for a
//! sign of life, and expels those that give none; or etcd, where each node has a lease, so that no node is special.

mod beats;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(not(feature = "etcd"))]
#[path = "etcd_absent.rs"]
mod etcd;
mod first;
mod order;
mod others;

pub(crate) use beats::FirstProcess;
pub(crate) use first::{Members, start};
pub(crate) use order::order;
pub(crate) use others::{invitation, join, serve};

use crate::backup::{BackupAccess, ReplicaAccess};
use crate::message::ShareMessage;
use crate::node::ShareNode;
use crate::{NodeId, NodeStartError, ShareError};
use farfield_core::dsm::{Expulsion, NamedValue};
use farfield_os::serving;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

/// The file of this program, even if it was replaced since it started.
const PROGRAM: &str = "/proc/self/exe";

/// Words of the first process to another one that is to be a node.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct Invitation {
    pub(crate) node: u16,
    pub(crate) nodes: u16,
    pub(crate) first_partition: u16,
    pub(crate) near_bytes: u64,
    pub(crate) workers: usize,
    /// Whether it reads objects in the memory of other nodes of its machine.
    pub(crate) reads_in_place: bool,
    pub(crate) expel_after: Duration,
    /// Where it keeps its backup.
    pub(crate) backup: Option<BackupAccess>,
    /// Store that decides on the members, if the first process does not.
    pub(crate) election: Option<ElectionInvitation>,
}

/// Knowledge of a node for its part in elections.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct ElectionInvitation {
    /// Servers of etcd.
    urls: String,
    /// Number of the program there.
    program: String,
    /// Lease with which what etcd knows of the program goes.
    lease: i64,
    /// Backups of all nodes, by number: any node may take over any. Empty without backups.
    backups: Vec<BackupAccess>,
}

/// Authority that decides on the members of a program, and keeps what must outlive each of them.
pub(crate) trait MemberAuthority: Send + Sync {
    /// Returns whether any node may lead: none is needed.
    fn is_elected(&self) -> bool;

    /// Records that a replica of the node's backup is of no use, or all of them. Whoever takes the backup over knows it
    /// when this returns. Returns false if somebody takes it over already: the node must end. Waits.
    fn lose_backup(&self, node: &ShareNode, replica: Option<u8>) -> bool;

    /// Records that a replica of the node's backup is in another region, and has all that counts. Whoever takes the
    /// backup over knows it when this returns. Waits.
    fn restore_backup(&self, node: &ShareNode, replica: u8, access: ReplicaAccess) -> ReplicaVerdict;

    /// Keeps which value has a name, or that none has it. Returns false if the node ends instead. Waits.
    fn keep_name(&self, node: &ShareNode, name: &str, value: Option<&NamedValue>) -> bool;

    /// Returns the names that are kept; `None` if the node ends instead. Waits.
    fn kept_names(&self, node: &ShareNode) -> Option<Vec<(String, NamedValue)>>;

    /// Records that the program has ended.
    fn program_ended(&self);
}

/// Answer to a node that has a new region for a replica of its backup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplicaVerdict {
    /// The backup may be taken over from there.
    Used,
    /// The region is not looked at by whoever takes the backup over.
    Unused,
    /// The backup is taken over already: the node must end.
    TakenOver,
}

/// Authority of the first process: what it knows need not outlive it.
pub(crate) struct SoloAuthority;

impl MemberAuthority for SoloAuthority {
    fn is_elected(&self) -> bool {
        false
    }

    fn lose_backup(&self, node: &ShareNode, replica: Option<u8>) -> bool {
        loop {
            match node.peers.tell(node, NodeId(0), ShareMessage::BackupLost { replica }) {
                Err(unanswered) if matches!(unanswered.error, ShareError::Silent { .. }) => {}
                Err(unanswered) if matches!(unanswered.error, ShareError::Expelled { .. }) => return false,
                // Without the first process this one ends, too.
                _ => return true,
            }
        }
    }

    fn restore_backup(&self, node: &ShareNode, replica: u8, access: ReplicaAccess) -> ReplicaVerdict {
        loop {
            let message = ShareMessage::BackupRestored { replica, access: access.clone() };
            return match node.peers.tell(node, NodeId(0), message).map_err(|unanswered| unanswered.error) {
                Ok(()) => ReplicaVerdict::Used,
                Err(ShareError::Silent { .. }) => continue,
                Err(ShareError::Expelled { .. }) => ReplicaVerdict::TakenOver,
                Err(_) => ReplicaVerdict::Unused,
            };
        }
    }

    fn keep_name(&self, _: &ShareNode, _: &str, _: Option<&NamedValue>) -> bool {
        true
    }

    fn kept_names(&self, _: &ShareNode) -> Option<Vec<(String, NamedValue)>> {
        Some(Vec::new())
    }

    fn program_ended(&self) {}
}

/// Why a node ends.
#[derive(Clone, PartialEq, Eq, Debug)]
enum NodeEnd {
    /// The program has ended.
    Program,
    /// The first process is gone.
    FirstIsGone,
    /// The first process has not been heard.
    Unheard,
    /// The others take this node for dead.
    Expelled(Option<Expulsion>),
    /// The node has no lease any more, or will have none; in words.
    #[cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "only etcd gives leases"))]
    LeaseOver(String),
}

fn random_secret() -> Result<String, NodeStartError> {
    let mut secret = [0; 16];
    serving::fill_random(&mut secret).map_err(|errno| NodeStartError::os("read random bytes")(errno.into()))?;
    Ok(secret.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

/// Returns the hash of the program's file, by which nodes know whether they are of one build.
fn build() -> Result<u128, NodeStartError> {
    let program = std::fs::read(Path::new(PROGRAM)).map_err(NodeStartError::os("read the file of this program"))?;
    Ok(twox_hash::XxHash3_128::oneshot(&program))
}

/// Writes a line to stderr. `eprintln!` is not used, because it panics if stderr is closed.
pub(crate) fn say(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("farfield: {text}\n").as_bytes());
}
