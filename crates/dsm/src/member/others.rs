//! A process that is a node of a program whose first process is another one.
//!
//! The first process starts it, or it joins from another machine. A started process reads its
//! invitation from its standard input and goes on reading: the end of the input is the end of the
//! first process, whatever it died of.

use super::first::Members;
use super::{Invitation, NodeEnd, build, etcd, say};
use crate::error::expelled;
use crate::message::{NodeAddress, ShareMessage, ShareReply};
use crate::node::{NoPlace, NodeBuilder, Peers, Running, StartPoint, keep_partitions};
use crate::{NodeId, NodeStartError};
use farfield_core::dsm::LaunchOrder;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};
use std::net::{ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

/// Set for started processes only. Its value says nothing: what they need to know is a secret.
pub(super) const VARIABLE: &str = "FARFIELD_SHARE";
/// Pause between two attempts to join.
const TRY_EVERY: Duration = Duration::from_millis(200);

/// Words to a started process by the one that has started it.
#[derive(Serialize, Deserialize)]
pub(crate) struct StartedNode {
    pub(super) invitation: Invitation,
    pub(super) build: u128,
    pub(super) token: String,
    /// Where it listens.
    pub(super) listen: String,
    /// Where the first node is reached.
    pub(super) first: NodeAddress,
}

/// Returns what this process was told, if it was started as a node.
pub(crate) fn invitation() -> Result<Option<StartedNode>, NodeStartError> {
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

fn of_first(problem: String) -> NodeStartError {
    NodeStartError::Node { node: NodeId(0), problem }
}

impl Invitation {
    /// Returns where the invited node begins, which listens at this URL.
    fn start_point(&self, build: u128, token: String, listen: String) -> StartPoint {
        let &Invitation { node, first_partition, .. } = self;
        StartPoint { id: NodeId(node), first_partition, build, token, listen, backup: self.backup.clone() }
    }

    /// Begins the node's part in elections, if there are any.
    fn begin_part(&self, running: &Running, config: &NodeBuilder) -> Result<(), NodeStartError> {
        self.election.as_ref().map_or(Ok(()), |election| etcd::begin(running, election, config))
    }

    /// Serves tasks and ends this process, or returns when this node is to run the program's body.
    fn take_part(&self, running: Running, asks: Option<(&str, Duration)>) -> Members {
        if let Some(why) = running.node.first.wait(asks, self.election.is_some()) {
            end(running.node.id, &why);
        }
        keep_partitions(self.first_partition, self.nodes);
        Members::of_leader(running)
    }
}

impl NodeBuilder {
    fn invited(&self, invitation: &Invitation) -> NodeBuilder {
        NodeBuilder {
            nodes: invitation.nodes,
            near_bytes: invitation.near_bytes,
            workers: invitation.workers,
            reads_in_place: invitation.reads_in_place,
            expel_after: invitation.expel_after,
            // The invitation says who decides.
            etcd: None,
            ..self.clone()
        }
    }
}

/// Serves tasks until the first process ends, and ends this one; or returns when this node is to run the program's
/// body, because those before it are gone.
pub(crate) fn serve(config: &NodeBuilder, started: StartedNode) -> Result<Members, NodeStartError> {
    let StartedNode { invitation, build: wanted, token, listen, first } = started;
    let build = build()?;
    let start = invitation.start_point(build, token, listen);
    let config = config.invited(&invitation);
    let running = Running::start(start, &config)?;
    if build != wanted {
        return Err(of_first("runs another build of the program".into()));
    }
    invitation.begin_part(&running, &config)?;
    hello(&running, first)?;
    let node = running.node.clone();
    let outlives = invitation.election.is_some();
    std::thread::Builder::new()
        .name("share-input".into())
        .spawn(move || {
            // Nothing more is sent: the input ends with the first process.
            let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
            if !(outlives && node.first.has_begun()) {
                node.first.program_ended();
            }
        })
        .map_err(NodeStartError::os("start a thread"))?;
    Ok(invitation.take_part(running, None))
}

/// Joins a program whose first process is elsewhere, serves tasks until that ends, and ends this process; or returns
/// when this node is to run the program's body.
pub(crate) fn join(config: &NodeBuilder, order: &LaunchOrder, first: &str) -> Result<Members, NodeStartError> {
    let build = build()?;
    let token = order.token.clone().unwrap_or_default();
    let mut invitation = invited(first, &token, build, order.wait)?;
    // Its servers may have another name here.
    if let Some((election, urls)) = invitation.election.as_mut().zip(order.etcd.as_ref()) {
        election.urls.clone_from(urls);
    }
    let listen = listen_towards(first)?;
    let config = config.invited(&invitation).with_order(order);
    config.check()?;
    let start = invitation.start_point(build, token, listen);
    let running = Running::start(start, &config)?;
    running.node.peers.reached_through(first);
    invitation.begin_part(&running, &config)?;
    hello(&running, NodeAddress { url: first.to_owned(), arena: None })?;
    say(&format!("node {} of {} runs", invitation.node, invitation.nodes));
    Ok(invitation.take_part(running, Some((first, config.expel_after))))
}

fn hello(running: &Running, first: NodeAddress) -> Result<(), NodeStartError> {
    let peers = &running.node.peers;
    peers.introduce(NodeId(0), first);
    let hello = ShareMessage::Hello { address: running.address() };
    let is_welcome = peers.ask(&running.node, NodeId(0), hello, |reply| match reply {
        ShareReply::Done => Some(true),
        ShareReply::NoPlace => Some(false),
        _ => None,
    });
    match is_welcome {
        Ok(true) => Ok(()),
        Ok(false) => Err(of_first("has given this node's place away, because it came too late: start it again".into())),
        Err(unanswered) => Err(of_first(unanswered.error.to_string())),
    }
}

/// Ends this process.
pub(super) fn end(id: NodeId, end: &NodeEnd) -> ! {
    let problem = match end {
        NodeEnd::Program => std::process::exit(0),
        NodeEnd::LeaseOver(why) => why.clone(),
        NodeEnd::FirstIsGone => "the first process of the program is gone".into(),
        NodeEnd::Unheard => "the first process of the program was not heard of for too long".into(),
        NodeEnd::Expelled(expulsion) => expelled(*expulsion),
    };
    say(&format!("node {id} ends: {problem}"));
    std::process::exit(1);
}

/// Asks the first process for a place among the nodes, again and again until it is there.
fn invited(first: &str, token: &str, build: u128, wait: Duration) -> Result<Invitation, NodeStartError> {
    let started = Instant::now();
    let mut is_said = false;
    loop {
        let problem = match Peers::ask_for_place(first, token, build) {
            Ok(invitation) => return Ok(invitation),
            Err(NoPlace::Ever(problem)) => return Err(of_first(format!("at {first} {problem}"))),
            Err(NoPlace::Yet(problem)) => problem,
        };
        if started.elapsed() > wait {
            let problem = format!("at {first} {problem}: tried for {} s (--wait)", wait.as_secs());
            return Err(of_first(problem));
        }
        if !is_said {
            say(&format!("waiting for the first process of the program, which {problem}"));
            is_said = true;
        }
        std::thread::sleep(TRY_EVERY);
    }
}

/// Returns an address of this machine at which the machine of the first process can reach it.
fn listen_towards(first: &str) -> Result<String, NodeStartError> {
    let what = "find the address of this machine that the first process can reach";
    let malformed = || NodeStartError::Argument("the first process is joined at tcp://HOST:PORT");
    let address = first.strip_prefix("tcp://").ok_or_else(malformed)?;
    let target = address.to_socket_addrs().map_err(NodeStartError::os(what))?.next().ok_or_else(malformed)?;
    // Nothing is sent: connecting chooses the route.
    let any = if target.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).map_err(NodeStartError::os(what))?;
    socket.connect(target).map_err(NodeStartError::os(what))?;
    let mut own = socket.local_addr().map_err(NodeStartError::os(what))?;
    own.set_port(0);
    Ok(format!("tcp://{own}"))
}
