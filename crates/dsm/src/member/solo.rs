//! Membership without a service: the first process starts the others, decides who is gone, and all
//! end with it.
//!
//! A started process reads its invitation from its standard input and goes on reading: the end of
//! the input is the end of the first process, whatever it died of.

use crate::message::{NodeAddress, ShareMessage};
use crate::node::{NodeBuilder, Running, ShareNode, take_partitions};
use crate::{NodeId, NodeStartError};
use farfield_os::serving;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::{BufRead, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Set for started processes only. Its value says nothing: what they need to know is a secret.
const VARIABLE: &str = "FARFIELD_SHARE";
/// The file of this program, even if it was replaced since it started.
const PROGRAM: &str = "/proc/self/exe";
/// Longest time until a started process is ready.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// Longest time for which ended processes are waited for, before they are killed.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Pause between two looks at a process.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What a started process is told by the one that has started it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Invitation {
    node: u16,
    nodes: u16,
    first_partition: u16,
    token: String,
    build: u128,
    /// Where the first node is reached.
    first: NodeAddress,
}

/// Returns the invitation of this process, if it was started as a node.
pub(crate) fn invitation() -> Result<Option<Invitation>, NodeStartError> {
    if std::env::var_os(VARIABLE).is_none() {
        return Ok(None);
    }
    let mut line = String::new();
    let read =
        std::io::stdin().lock().read_line(&mut line).map_err(NodeStartError::os("read the invitation of this node"))?;
    // Whoever has the variable and no invitation inherited it, as a program that a node has
    // started.
    if read == 0 {
        return Ok(None);
    }
    let malformed = || NodeStartError::Argument("the first line of the input of a started node is its invitation");
    serde_json::from_str(&line).map(Some).map_err(|_| malformed())
}

/// Hash of the program's file, by which nodes know whether they are of one build.
fn build() -> Result<u128, NodeStartError> {
    let program = std::fs::read(Path::new(PROGRAM)).map_err(NodeStartError::os("read the file of this program"))?;
    Ok(twox_hash::XxHash3_128::oneshot(&program))
}

/// Serves tasks until the first process ends, and ends this one.
pub(crate) fn serve<R>(config: &NodeBuilder, invitation: Invitation) -> Result<R, NodeStartError> {
    let Invitation { node, nodes, first_partition, token, build: wanted, first } = invitation;
    let found = build()?;
    let config = NodeBuilder { nodes, ..config.clone() };
    let running = Running::start(NodeId(node), first_partition, &config, found, &token)?;
    let of_node = |problem: String| NodeStartError::Node { node: NodeId(0), problem };
    if found != wanted {
        return Err(of_node("runs another build of the program".into()));
    }
    running.node.peers.introduce(NodeId(0), first);
    let hello = ShareMessage::Hello { address: running.address() };
    running
        .node
        .peers
        .tell(&running.node, NodeId(0), hello)
        .map_err(|unanswered| of_node(unanswered.error.to_string()))?;
    // Nothing more is sent: the input ends with the first process.
    let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
    std::process::exit(0);
}

/// The nodes of a program, at the first of them.
pub(crate) struct Members {
    running: Running,
    started: Vec<Started>,
}

/// A started process. Its input ends when this is dropped.
struct Started {
    id: NodeId,
    child: Arc<Mutex<Child>>,
    input: Option<ChildStdin>,
}

fn wait_for(child: &Mutex<Child>) -> Option<std::process::ExitStatus> {
    child.lock().unwrap_or_else(PoisonError::into_inner).try_wait().ok().flatten()
}

/// Starts all nodes, and returns when they know each other.
pub(crate) fn start(config: &NodeBuilder) -> Result<Members, NodeStartError> {
    let mut secret = [0; 16];
    serving::fill_random(&mut secret).map_err(|errno| NodeStartError::os("read random bytes")(errno.into()))?;
    let token = secret.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let build = build()?;
    let first_partition = take_partitions(config.nodes)?;
    let running = Running::start(NodeId(0), first_partition, config, build, &token)?;
    let first = running.address();
    let mut members = Members { running, started: Vec::new() };
    for node in 1..config.nodes {
        let invitation = Invitation {
            node,
            nodes: config.nodes,
            first_partition,
            token: token.clone(),
            build,
            first: first.clone(),
        };
        members.started.push(Started::new(NodeId(node), &invitation)?);
    }
    members.wait_until_ready()?;
    Ok(members)
}

impl Started {
    fn new(id: NodeId, invitation: &Invitation) -> Result<Started, NodeStartError> {
        let mut command = Command::new(PROGRAM);
        command.args(std::env::args_os().skip(1)).env(VARIABLE, "node").stdin(Stdio::piped());
        let mut child = command.spawn().map_err(NodeStartError::os("start the process of a node"))?;
        let mut input = child.stdin.take();
        let mut line = serde_json::to_string(invitation).unwrap_or_default();
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
        while wait_for(&self.child).is_none() {
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
    pub(crate) fn node(&self) -> &Arc<ShareNode> {
        &self.running.node
    }

    fn wait_until_ready(&self) -> Result<(), NodeStartError> {
        let node = self.node();
        let until = Instant::now() + READY_WITHIN;
        let addresses = loop {
            for started in &self.started {
                if let Some(status) = wait_for(&started.child) {
                    return Err(NodeStartError::Node {
                        node: started.id,
                        problem: format!("has ended before it was ready: {status}"),
                    });
                }
            }
            match node.peers.all(LOOK_EVERY) {
                Ok(addresses) => break addresses,
                Err(missing) if Instant::now() > until => {
                    let problem = format!("is not ready after {} s", READY_WITHIN.as_secs());
                    return Err(NodeStartError::Node { node: missing, problem });
                }
                Err(_) => {}
            }
        };
        for started in &self.started {
            let message = ShareMessage::Peers { addresses: addresses.clone() };
            let told = node.peers.tell(node, started.id, message);
            told.map_err(|unanswered| NodeStartError::Node {
                node: started.id,
                problem: unanswered.error.to_string(),
            })?;
            let (node, id, child) = (Arc::downgrade(node), started.id, started.child.clone());
            let watch = move || {
                while wait_for(&child).is_none() {
                    std::thread::sleep(LOOK_EVERY);
                }
                if let Some(node) = node.upgrade() {
                    lost(&node, id);
                }
            };
            std::thread::Builder::new()
                .name("share-watch".into())
                .spawn(watch)
                .map_err(NodeStartError::os("start a thread"))?;
        }
        Ok(())
    }

    /// Ends the other processes.
    pub(crate) fn end(self) {
        drop(self);
    }
}

/// Tells all nodes that one is gone.
fn lost(node: &ShareNode, id: NodeId) {
    node.lose(id);
    for other in (1..node.peers.count()).map(NodeId).filter(|other| *other != id) {
        // Whoever cannot be told is gone, too.
        let _ = node.peers.tell(node, other, ShareMessage::Lost { node: id.0 });
    }
}
