//! The first process: it starts the others of its machine, waits for those of other machines, decides
//! who is gone, and all end with it.

use super::beats::{LOOK_EVERY, LookedAfter, say_on};
use super::others::{StartedNode, VARIABLE};
use super::{Invitation, PROGRAM, build, etcd, random_secret, say};
use crate::backup::{BackupAccess, BackupSessions};
use crate::message::ShareMessage;
use crate::node::{NodeBuilder, Running, ShareNode, StartPoint, take_partitions};
use crate::{NodeId, NodeStartError};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use farfield_core::dsm::{LaunchOrder, LaunchRole};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time until a started process is ready.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Longest time for which ended processes are waited for, before they are killed.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Time after which it is said that nodes are waited for.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// Where nodes of one machine listen.
const LOOPBACK: &str = "tcp://127.0.0.1:0";

/// The nodes of a program, at the first of them.
pub(crate) struct Members {
    running: Running,
    started: Vec<Started>,
    /// Whether the program has begun: all nodes are there.
    has_begun: Arc<AtomicBool>,
    backups: Arc<Backups>,
}

/// Regions in which nodes keep their backups. They are there as long as this process has them open, or, if others may
/// lead, one of these.
#[derive(Default)]
pub(super) struct Backups(BTreeMap<u16, (BackupAccess, BackupSessions)>);

impl Backups {
    fn create(config: &NodeBuilder) -> Result<Arc<Backups>, NodeStartError> {
        let Some(url) = &config.backup else { return Ok(Arc::default()) };
        let create = |node| Ok((node, BackupAccess::create(url, &config.backup_token, config.near_bytes)?));
        // If all end with this process, it needs none.
        let first = u16::from(config.etcd.is_none());
        (first..config.nodes).map(create).collect::<Result<_, _>>().map(|regions| Arc::new(Backups(regions)))
    }

    /// Returns the right to the region of a node.
    pub(super) fn of(&self, node: NodeId) -> Option<&BackupAccess> {
        self.0.get(&node.0).map(|(access, _)| access)
    }
}

/// A started process. Its input ends when this is dropped.
struct Started {
    id: NodeId,
    child: Arc<Mutex<Child>>,
    input: Option<ChildStdin>,
}

/// Place at which the nodes find each other.
struct Meeting {
    /// Where the first node listens.
    listen: String,
    /// Nodes of this machine.
    here: u16,
    token: String,
    /// Longest wait for nodes of other machines.
    wait: Duration,
    is_ordered: bool,
}

impl Meeting {
    fn new(nodes: u16, order: Option<&LaunchOrder>) -> Result<Meeting, NodeStartError> {
        let alone = Meeting {
            listen: LOOPBACK.into(),
            here: nodes,
            token: random_secret()?,
            wait: READY_WITHIN,
            is_ordered: order.is_some(),
        };
        let Some(LaunchOrder { role: LaunchRole::First { here, listen, .. }, token, wait, .. }) = order else {
            return Ok(alone);
        };
        let here = here.unwrap_or(nodes);
        if here == 0 || here > nodes {
            return Err(NodeStartError::Argument(
                "this machine runs at least one of the nodes, and at most all (--here)",
            ));
        }
        if here < nodes && listen.is_none() {
            return Err(NodeStartError::Argument("other machines join at an address of this one (--listen)"));
        }
        Ok(Meeting {
            listen: listen.clone().unwrap_or(alone.listen),
            here,
            token: token.clone().unwrap_or(alone.token),
            wait: if here < nodes { *wait } else { READY_WITHIN },
            is_ordered: true,
        })
    }

    /// Returns where the other nodes of this machine listen: at the same host.
    fn listen_of_others(&self) -> String {
        self.listen.rsplit_once(':').map_or_else(|| LOOPBACK.into(), |(host, _)| format!("{host}:0"))
    }
}

/// Returns how a process ended, if it has.
pub(super) fn status(child: &Mutex<Child>) -> Option<ExitStatus> {
    child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().ok().flatten()
}

/// Starts the nodes of this machine, and returns when all nodes know each other.
pub(crate) fn start(config: &NodeBuilder, order: Option<&LaunchOrder>) -> Result<Members, NodeStartError> {
    let meeting = Meeting::new(config.nodes, order)?;
    let build = build()?;
    let first_partition = take_partitions(config.nodes)?;
    let backups = Backups::create(config)?;
    let election = match &config.etcd {
        Some(urls) => {
            let backups = backups.0.values().map(|(access, _)| access.clone()).collect();
            Some(etcd::found(config, urls, backups)?)
        }
        None => None,
    };
    let start = StartPoint {
        id: NodeId(0),
        first_partition,
        build,
        token: meeting.token.clone(),
        listen: meeting.listen.clone(),
        backup: backups.of(NodeId(0)).cloned(),
    };
    let running = Running::start(start, config)?;
    if let Some(election) = &election {
        etcd::begin(&running, election, config)?;
        // If the lease is lost, nothing but the thread that renews it ends this process.
        running.node.first.lead();
    }
    let invitation = |node| Invitation {
        node,
        nodes: config.nodes,
        first_partition,
        near_bytes: config.near_bytes,
        workers: config.workers,
        reads_in_place: config.reads_in_place,
        expel_after: config.expel_after,
        backup: backups.of(NodeId(node)).cloned(),
        election: election.clone(),
    };
    running.node.peers.offer((meeting.here..config.nodes).map(invitation));
    let mut members = Members { running, started: Vec::new(), has_begun: Arc::default(), backups: backups.clone() };
    for node in 1..meeting.here {
        let told = StartedNode {
            invitation: invitation(node),
            build,
            token: meeting.token.clone(),
            listen: meeting.listen_of_others(),
            first: members.running.address(),
        };
        members.started.push(Started::new(NodeId(node), &told)?);
    }
    members.look_after_all(config, &meeting)?;
    members.wait_until_ready(&meeting)?;
    Ok(members)
}

impl Started {
    fn new(id: NodeId, told: &StartedNode) -> Result<Started, NodeStartError> {
        let mut command = Command::new(PROGRAM);
        command.args(std::env::args_os().skip(1)).env(VARIABLE, "node").stdin(Stdio::piped());
        let mut child = command.spawn().map_err(NodeStartError::os("start the process of a node"))?;
        let mut input = child.stdin.take();
        let mut line = serde_json::to_string(told).unwrap_or_default();
        line.push('\n');
        let started = |input| Started { id, child: Arc::new(Mutex::new(child)), input };
        match input.as_mut().map(|input| input.write_all(line.as_bytes())) {
            Some(Err(source)) => {
                drop(started(input));
                Err(NodeStartError::Os { what: "invite a node", source })
            }
            _ => Ok(started(input)),
        }
    }
}

impl Drop for Started {
    /// Ends the process: by the end of its input, and by a signal if that is not enough.
    fn drop(&mut self) {
        self.input = None;
        let until = Instant::now() + END_WITHIN;
        while status(&self.child).is_none() {
            if Instant::now() > until {
                let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Members {
    /// Creates the members as a node knows them that has come to lead: it has started none.
    pub(super) fn of_leader(running: Running) -> Members {
        Members { running, started: Vec::new(), has_begun: Arc::default(), backups: Arc::default() }
    }

    pub(crate) fn node(&self) -> &Arc<ShareNode> {
        &self.running.node
    }

    /// Waits until all nodes are there, and tells each where the others are.
    fn wait_until_ready(&self, meeting: &Meeting) -> Result<(), NodeStartError> {
        let node = self.node();
        let begun = Instant::now();
        let mut said = None;
        let addresses = loop {
            for started in &self.started {
                if let Some(status) = status(&started.child) {
                    return Err(NodeStartError::Node {
                        node: started.id,
                        problem: format!("has ended before it was ready: {status}"),
                    });
                }
            }
            match node.peers.all(LOOK_EVERY) {
                Ok(addresses) => break addresses,
                Err(missing) if begun.elapsed() > meeting.wait => {
                    let problem = format!("is not there after {} s", meeting.wait.as_secs());
                    return Err(NodeStartError::Node { node: missing, problem });
                }
                Err(missing) => {
                    if meeting.is_ordered && begun.elapsed() > SAY_AFTER && said != Some(missing) {
                        let (nodes, url) = (node.peers.count(), self.running.address().url);
                        say(&format!("waiting for node {missing} of {nodes}: farfield share run --join {url} …"));
                        said = Some(missing);
                    }
                }
            }
        };
        self.has_begun.store(true, Relaxed);
        for other in (1..node.peers.count()).map(NodeId) {
            let message = ShareMessage::Peers { addresses: addresses.clone() };
            let told = node.peers.tell(node, other, message);
            told.map_err(|unanswered| NodeStartError::Node { node: other, problem: unanswered.error.to_string() })?;
        }
        node.first.begin();
        Ok(())
    }

    /// Starts a thread for each other node, which sees it die.
    fn look_after_all(&self, config: &NodeBuilder, meeting: &Meeting) -> Result<(), NodeStartError> {
        for id in (1..config.nodes).map(NodeId) {
            let child = self.started.iter().find(|started| started.id == id).map(|started| started.child.clone());
            let has_begun = self.has_begun.clone();
            let (expel_after, is_said, is_elected) = (config.expel_after, meeting.is_ordered, config.etcd.is_some());
            let backups = self.backups.clone();
            let looked_after = LookedAfter { id, child, expel_after, has_begun, is_elected, is_said, backups };
            let node = Arc::downgrade(self.node());
            std::thread::Builder::new()
                .name("share-watch".into())
                .spawn(move || looked_after.look(&node))
                .map_err(NodeStartError::os("start a thread"))?;
        }
        Ok(())
    }

    /// Ends the other processes.
    pub(crate) fn end(self) {
        let node = self.node();
        node.first.program_ended();
        node.authority().program_ended();
        // Those that end with the input that they have from this process need not be told.
        let is_tied =
            |id: &NodeId| !node.authority().is_elected() && self.started.iter().any(|started| started.id == *id);
        let others = (0..node.peers.count()).map(NodeId).filter(|id| *id != node.id);
        for other in others.filter(|id| !is_tied(id) && !node.peers.is_lost(*id)) {
            // A node that does not hear it ends when it has not been asked for a sign of life for too
            // long.
            let channel = node.peers.open_channel(other).ok().flatten();
            if let Some((mut channel, letter)) = channel.zip(node.peers.letter(node, other, &ShareMessage::Over)) {
                let begun = Instant::now();
                say_on(&mut *channel, letter, || begun.elapsed() > END_WITHIN);
            }
        }
    }
}
