//! Starting a program on several nodes.

use super::notice::NoticeThread;
use super::{Door, FIRST_PARTITION, Here, NodeBackup, OF_PROCESS, Peers, ShareNode, within};
use crate::NodeStartError;
use crate::backup::BackupAccess;
use crate::member::{self, Members};
use crate::message::NodeAddress;
use core::sync::atomic::{AtomicBool, Ordering};
use farfield_core::dsm::{LaunchOrder, LaunchRole, Partition};
use farfield_server::{Config, ListenUrl, Server, TenantConfig, Tenants};
use farfield_wic::Registry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Least near memory of a node, in bytes.
const NEAR_BYTES_MIN: u64 = 1 << 20;
/// Time after which a node that does not answer is expelled, unless the program says otherwise: longer
/// than a message is waited for.
const EXPEL_AFTER: Duration = Duration::from_secs(15);
/// Least time after which a node is expelled: some signs of life may be late.
const EXPEL_AFTER_MIN: Duration = Duration::from_secs(2);

/// Time between two attempts to use a memory server again that has kept a backup and was given up.
const RESTORE_EVERY: Duration = Duration::from_secs(2);

/// Configuration of the nodes of a program.
#[derive(Clone, Debug)]
pub struct NodeBuilder {
    pub(crate) nodes: u16,
    pub(crate) near_bytes: u64,
    pub(crate) workers: usize,
    pub(crate) reads_in_place: bool,
    pub(crate) expel_after: Duration,
    /// Memory server that keeps backups, and the token for it.
    pub(crate) backup: Option<String>,
    pub(crate) backup_token: String,
    /// Servers of etcd that decide on the members.
    pub(crate) etcd: Option<String>,
}

impl Default for NodeBuilder {
    fn default() -> NodeBuilder {
        NodeBuilder::new()
    }
}

impl NodeBuilder {
    /// Creates a configuration of one node with 256 MiB of near memory and a worker for each core.
    pub fn new() -> NodeBuilder {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        NodeBuilder {
            nodes: 1,
            near_bytes: 256 << 20,
            workers,
            reads_in_place: true,
            expel_after: EXPEL_AFTER,
            backup: None,
            backup_token: String::new(),
            etcd: None,
        }
    }

    /// Sets the number of nodes. The process that calls [`run`] is the first; it starts the others.
    pub fn nodes(mut self, nodes: u16) -> NodeBuilder {
        self.nodes = nodes;
        self
    }

    /// Sets the memory of each node for objects and copies, in bytes.
    pub fn near(mut self, bytes: u64) -> NodeBuilder {
        self.near_bytes = bytes;
        self
    }

    /// Sets how many tasks run at a time at each node. A task that waits for another one does not
    /// count.
    pub fn workers(mut self, workers: usize) -> NodeBuilder {
        self.workers = workers;
        self
    }

    /// Sets whether objects of nodes on the same machine are read where they are (the default), or are
    /// copied as those of other machines are.
    pub fn read_in_place(mut self, is_in_place: bool) -> NodeBuilder {
        self.reads_in_place = is_in_place;
        self
    }

    /// Sets the time after which a node that does not answer the first process is expelled, as one that
    /// has died. 2 s at least.
    pub fn expel_after(mut self, silence: Duration) -> NodeBuilder {
        self.expel_after = silence;
        self
    }

    /// Sets the memory server that keeps a backup of each node's objects, but for those of the first node:
    /// `tcp://HOST:PORT` or `unix:PATH`; or several of them, of which one has to be left: `mirror(URL,URL)`. If a
    /// node dies, the first one keeps the objects that others own, as they were handed over
    /// (`docs/design/dsm.md` says which). A message waits until what it hands over is stored.
    ///
    /// Each backup takes up to three times the near memory of its node at each server.
    pub fn backup(mut self, url: impl Into<String>) -> NodeBuilder {
        self.backup = Some(url.into());
        self
    }

    /// Sets the token for the memory server that keeps backups.
    pub fn backup_token(mut self, token: impl Into<String>) -> NodeBuilder {
        self.backup_token = token.into();
        self
    }

    /// Lets etcd decide on the members, so that no node is special: `http://HOST:2379`, or
    /// `https://USER:PASSWORD@HOST:2379?ca=FILE&cert=FILE&key=FILE`, or several of its servers with commas. What one of
    /// them says of the user and of files holds for all; other machines have these files, too. Each node has a lease
    /// there of the time that [`expel_after`](NodeBuilder::expel_after) says, in whole seconds, and ends when it cannot
    /// renew it.
    ///
    /// If the node dies that runs the program's body, the first one that is left runs it from its begin, in its own
    /// process. What the others keep, and what has a backup, is found by its name ([`Here::lookup`]);
    /// [`Here::view`] tells how many nodes are gone.
    #[cfg(feature = "etcd")]
    pub fn etcd(mut self, urls: impl Into<String>) -> NodeBuilder {
        self.etcd = Some(urls.into());
        self
    }

    pub(crate) fn check(&self) -> Result<(), NodeStartError> {
        if self.nodes == 0 || self.nodes > Partition::COUNT {
            return Err(NodeStartError::Argument("a program has 1 to 1024 nodes"));
        }
        if self.near_bytes < NEAR_BYTES_MIN {
            return Err(NodeStartError::Argument("a node needs 1 MiB of near memory or more"));
        }
        if self.workers == 0 {
            return Err(NodeStartError::Argument("a node needs a worker"));
        }
        if self.expel_after < EXPEL_AFTER_MIN {
            return Err(NodeStartError::Argument("a node is expelled after 2 s of silence or more"));
        }
        Ok(())
    }
}

/// Runs a program on several nodes: starts the other processes, runs `body` at this one, and ends
/// the others when it returns.
///
/// The other processes run this program with the arguments of this one. In them, `run` serves tasks
/// instead of running `body`, and ends the process when the first one ends; so what comes before
/// `run` is done in each process, and what comes after it in the first one only. A process runs one
/// program at a time. Owners and handles that outlive their program lead to nothing: they answer
/// `UnknownNode`, or an error of their node.
///
/// If etcd decides on the members, any process may come to run `body`: the first one that is left when those before it
/// are gone.
pub fn run<R>(config: &NodeBuilder, body: impl FnOnce(&Here<'_>) -> R) -> Result<R, NodeStartError> {
    let _running = OnlyProgram::begin()?;
    config.check()?;
    let members = members(config)?;
    let node = members.node();
    let result = within(node, false, || body(&Here::at(node)));
    members.end();
    Ok(result)
}

/// Starts this node. Returns the members if it is to run the program's body.
fn members(config: &NodeBuilder) -> Result<Members, NodeStartError> {
    if let Some(started) = member::invitation()? {
        return member::serve(config, started);
    }
    let order = member::order()?;
    if let Some(order @ LaunchOrder { role: LaunchRole::Joined { first }, .. }) = &order {
        return member::join(config, order, first);
    }
    let config = order.as_ref().map_or_else(|| config.clone(), |order| config.with_order(order));
    config.check()?;
    member::start(&config, order.as_ref())
}

/// The one program that a process runs at a time.
struct OnlyProgram;

static IS_RUNNING: AtomicBool = AtomicBool::new(false);

impl OnlyProgram {
    fn begin() -> Result<OnlyProgram, NodeStartError> {
        if IS_RUNNING.swap(true, Ordering::AcqRel) {
            return Err(NodeStartError::Argument("this process is a node already: it can be one node at a time"));
        }
        Ok(OnlyProgram)
    }
}

impl Drop for OnlyProgram {
    fn drop(&mut self) {
        IS_RUNNING.store(false, Ordering::Release);
    }
}

/// Partition that no program of this process has used.
static NEXT_PARTITION: Mutex<u16> = Mutex::new(0);

/// Keeps the partitions of a program, which another process has taken, from the next program of this one.
pub(crate) fn keep_partitions(first: u16, nodes: u16) {
    let mut next = NEXT_PARTITION.lock().unwrap_or_else(PoisonError::into_inner);
    *next = (*next).max(first.saturating_add(nodes));
}

/// Takes partitions for so many nodes that no program of this process has used. Returns the number
/// of the first one.
pub(crate) fn take_partitions(nodes: u16) -> Result<u16, NodeStartError> {
    let mut next = NEXT_PARTITION.lock().unwrap_or_else(PoisonError::into_inner);
    if nodes > Partition::COUNT.saturating_sub(*next) {
        return Err(NodeStartError::Argument("the programs that this process has run had 1024 nodes: start it anew"));
    }
    let first = *next;
    *next += nodes;
    Ok(first)
}

/// Description of a node that is not there yet.
pub(crate) struct StartPoint {
    pub(crate) id: super::NodeId,
    pub(crate) first_partition: u16,
    pub(crate) build: u128,
    /// Secret by which the nodes know each other.
    pub(crate) token: String,
    /// Where it listens: a URL.
    pub(crate) listen: String,
    /// Right to the region of its backup, if it has one.
    pub(crate) backup: Option<BackupAccess>,
}

/// Opens the backup of this node.
fn open_backup(access: &BackupAccess, config: &NodeBuilder) -> Result<NodeBackup, NodeStartError> {
    if config.near_bytes > access.object_bytes {
        return Err(NodeStartError::Argument(
            "a node with a backup has at most the near memory that the first process gives its nodes (--near)",
        ));
    }
    let opened = access.open().and_then(NodeBackup::new);
    opened.map_err(|error| NodeStartError::Backup { url: access.url().to_owned(), problem: error.to_string() })
}

/// A node with the server through which others reach it.
pub(crate) struct Running {
    pub(crate) node: Arc<ShareNode>,
    pub(crate) server: Server,
    _notice: NoticeThread,
}

impl Running {
    /// Starts a node that knows no other yet.
    pub(crate) fn start(start: StartPoint, config: &NodeBuilder) -> Result<Running, NodeStartError> {
        let StartPoint { id, first_partition, build, token, listen, backup: access } = start;
        let backup = access.clone().map(|access| open_backup(&access, config)).transpose()?;
        // Nodes of a program have one token; who sees this does not know it.
        let program = twox_hash::XxHash3_64::oneshot(token.as_bytes());
        let listen: ListenUrl = listen.parse().map_err(NodeStartError::Listen)?;
        let door = Arc::new(Door::default());
        let tenant = TenantConfig { name: "share".into(), token: token.as_bytes().to_vec(), quota_bytes: None };
        let server = Server::start(Config {
            listen: vec![listen],
            // Each peer has a region of one page, which it calls functions through.
            capacity_bytes: Some(64 << 20),
            tenants: Some(Tenants(vec![tenant])),
            lease: Duration::ZERO,
            functions: Registry::new().with_handler(crate::message::NAME, crate::message::VERSION, door.clone()),
            is_private: true,
            ..Config::default()
        })?;
        let node = ShareNode::new(id, first_partition, config, Peers::new(config.nodes, build, token), backup)
            .map_err(NodeStartError::os("reserve shared memory"))?;
        node.peers.introduce(id, node.address_at(server.endpoints()[0].clone()));
        door.open(Arc::downgrade(&node));
        FIRST_PARTITION.store(first_partition, Ordering::Relaxed);
        *OF_PROCESS.write().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&node);
        let notice = NoticeThread::start(&node, program)?;
        if let Some(access) = access.filter(BackupAccess::is_mirror) {
            let node = Arc::downgrade(&node);
            std::thread::Builder::new()
                .name("share-replicas".into())
                .spawn(move || {
                    while let Some(node) = node.upgrade() {
                        node.restore_replicas(&access);
                        if node.first.pause(RESTORE_EVERY) {
                            return;
                        }
                    }
                })
                .map_err(NodeStartError::os("start a thread"))?;
        }
        Ok(Running { node, server, _notice: notice })
    }

    /// Returns where others reach the node.
    pub(crate) fn address(&self) -> NodeAddress {
        self.node.address_at(self.server.endpoints()[0].clone())
    }
}
