//! The other nodes: where they listen, which of them are gone, and connections to them.

use super::{NodeId, ShareNode, WITHIN, WaitCause};
use crate::ShareError;
use crate::backup::ReplicaAccess;
use crate::member::{Invitation, ReplicaVerdict};
use crate::message::{
    self, AnswerLetter, ArenaAddress, Letter, LetterOut, NodeAddress, ShareMessage, ShareReply, VALUE_BYTES_MAX,
    ViewNews,
};
use crate::stats::count;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use farfield_core::dsm::{Expulsion, MemberView, NodeLoad, OwnerWord, ViewChange};
use farfield_core::wire::{CallBody, ErrorCode};
use farfield_pool::{Backend, CallChannel, CallFailure, FarCall, PoolBuilder, PoolError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The nodes of a program, by number. This one is among them.
pub(crate) struct Peers {
    build: u128,
    token: String,
    peers: Box<[PeerNode]>,
    introduced: Condvar,
    addresses: Mutex<Vec<Option<NodeAddress>>>,
    /// The newest view of the members. Its number is known without the lock.
    view: Mutex<MemberView>,
    view_number: AtomicU32,
    /// Number of nodes that are gone.
    lost: Mutex<u16>,
    node_lost: Condvar,
    /// Places for nodes of other machines, with the time at which each was promised last.
    places: Mutex<Vec<(Invitation, Option<Instant>)>>,
    /// URL at which the first node is reached from another machine.
    through: OnceLock<String>,
}

/// Time after which a wait for an answer looks whether its node is gone.
const LOSS_SEEN_WITHIN: Duration = Duration::from_millis(50);
/// Time for which a place is kept for a process that was promised it.
const PLACE_KEPT_FOR: Duration = Duration::from_secs(10);

/// Error: a process has no place among the nodes.
pub(crate) enum NoPlace {
    /// A place may be free later.
    Yet(String),
    /// No place will be free.
    Ever(String),
}

/// Knowledge of the first process about the backup of a node.
#[derive(Default)]
struct PeerBackup {
    /// Replicas that are older than what others know, a bit each.
    lost_replicas: u8,
    /// All of them are.
    is_lost: bool,
    is_taken_over: bool,
    /// Replicas that are in other regions than at first, with sessions that keep these.
    restored: Vec<(u8, ReplicaAccess, Arc<dyn Backend>)>,
}

#[derive(Default)]
struct PeerNode {
    is_lost: AtomicBool,
    /// What is known of the node's backup.
    backup: Mutex<PeerBackup>,
    /// Load of the node, as it has told last.
    heard: AtomicU64,
    /// Load of this node, as that one was told last.
    told: AtomicU64,
    /// Number of the node's view, as it has told last.
    view: AtomicU32,
    /// The region through which the node is called, once it was.
    backend: Mutex<Option<Arc<dyn Backend>>>,
    /// Channels that nobody uses now.
    channels: Mutex<Vec<Box<dyn CallChannel>>>,
}

/// Error: a message has no answer.
#[derive(Debug)]
pub(crate) struct Unanswered {
    pub(crate) error: ShareError,
    /// Whether the other node may have done what the message asks for. What the message hands over is
    /// nobody's then: its new owner may have handed it on.
    pub(crate) may_have_arrived: bool,
}

impl From<ShareError> for Unanswered {
    fn from(error: ShareError) -> Unanswered {
        Unanswered { error, may_have_arrived: false }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peers {
    /// A number of nodes of this build, which know each other by this token.
    pub(crate) fn new(count: u16, build: u128, token: String) -> Peers {
        let peers = (0..count).map(|_| PeerNode::default()).collect();
        let addresses = Mutex::new(vec![None; usize::from(count)]);
        Peers {
            build,
            token,
            peers,
            introduced: Condvar::new(),
            addresses,
            view: Mutex::default(),
            view_number: AtomicU32::new(0),
            lost: Mutex::new(0),
            node_lost: Condvar::new(),
            places: Mutex::default(),
            through: OnceLock::new(),
        }
    }

    pub(crate) fn build(&self) -> u128 {
        self.build
    }

    pub(crate) fn count(&self) -> u16 {
        u16::try_from(self.peers.len()).unwrap_or(u16::MAX)
    }

    /// Records where a node listens. Returns false if there is no such node, or another process is it.
    pub(crate) fn introduce(&self, node: NodeId, address: NodeAddress) -> bool {
        let mut addresses = lock(&self.addresses);
        let Some(unknown) = addresses.get_mut(usize::from(node.0)).filter(|known| known.is_none()) else {
            return false;
        };
        *unknown = Some(address);
        self.introduced.notify_all();
        true
    }

    /// Records where all nodes listen.
    pub(crate) fn introduce_all(&self, all: Vec<NodeAddress>) -> bool {
        let mut addresses = lock(&self.addresses);
        let is_all = all.len() == addresses.len();
        if is_all {
            *addresses = all.into_iter().map(|address| Some(self.seen_from_here(address))).collect();
            self.introduced.notify_all();
        }
        is_all
    }

    /// Sets how the first node is reached, if it is on another machine.
    pub(crate) fn reached_through(&self, first: &str) {
        let _ = self.through.set(first.to_owned());
    }

    /// Returns an address as it is here: nodes that listen at all addresses of the first node's machine
    /// are where that machine is reached.
    fn seen_from_here(&self, mut address: NodeAddress) -> NodeAddress {
        let host = |url: &str| url.rsplit_once(':').map(|(host, port)| (host.to_owned(), port.to_owned()));
        if let Some((through, _)) = self.through.get().and_then(|url| host(url))
            && let Some((listens, port)) = host(&address.url)
            && ["tcp://0.0.0.0", "tcp://[::]"].contains(&listens.as_str())
        {
            address.url = format!("{through}:{port}");
        }
        address
    }

    /// Offers places for nodes of other machines.
    pub(crate) fn offer(&self, places: impl Iterator<Item = Invitation>) {
        *lock(&self.places) = places.map(|place| (place, None)).collect();
    }

    /// Promises a place to a process, if there is one for which no node is there.
    pub(crate) fn promise_place(&self) -> Option<Invitation> {
        let addresses = lock(&self.addresses);
        let mut places = lock(&self.places);
        let is_free = |promised: &Option<Instant>| promised.is_none_or(|when| when.elapsed() > PLACE_KEPT_FOR);
        let (place, promised) = places
            .iter_mut()
            .find(|(place, promised)| addresses[usize::from(place.node)].is_none() && is_free(promised))?;
        *promised = Some(Instant::now());
        Some(place.clone())
    }

    /// Forgets a process that has joined: another one may take its place.
    pub(crate) fn forget(&self, node: NodeId) {
        let Some(peer) = self.peers.get(usize::from(node.0)) else { return };
        *lock(&peer.backend) = None;
        lock(&peer.channels).clear();
        let mut addresses = lock(&self.addresses);
        addresses[usize::from(node.0)] = None;
        lock(&self.places)
            .iter_mut()
            .filter(|(place, _)| place.node == node.0)
            .for_each(|(_, promised)| *promised = None);
    }

    /// Asks the first node of a program for a place.
    pub(crate) fn ask_for_place(first: &str, token: &str, build: u128) -> Result<Invitation, NoPlace> {
        let builder = PoolBuilder::new().url(first).token(token.to_owned()).client_name("share").pages(1);
        let backend = builder.deadline(WITHIN).open().map_err(|failure| {
            let problem = format!("cannot be reached: {failure}");
            match failure.pool_error() {
                Some(PoolError::Refused { reason, .. }) => NoPlace::Ever(format!("refuses this process: {reason}")),
                Some(PoolError::ServerGone { .. } | PoolError::TimedOut { .. } | PoolError::Os(_)) => {
                    NoPlace::Yet(problem)
                }
                _ => NoPlace::Ever(problem),
            }
        })?;
        let yet = |problem: &str| NoPlace::Yet(problem.to_owned());
        let mut channel = backend.open_calls().map_err(|_| yet("takes no calls"))?;
        let letter = postcard::to_allocvec(&Letter {
            sender: u16::MAX,
            build,
            view: ViewNews::default(),
            load: NodeLoad::default(),
            message: ShareMessage::Join,
        });
        let letter = letter.map_err(|_| yet("cannot be asked"))?;
        channel.submit(Peers::call(letter)).map_err(|_| yet("takes no calls"))?;
        let mut ended = Vec::with_capacity(1);
        while channel.poll(&mut ended) == 0 {
            channel.wait(WITHIN);
        }
        let answer = ended.pop().and_then(|end| end.result.ok()).ok_or_else(|| yet("does not answer yet"))?;
        match postcard::from_bytes(&answer).map(|answer: AnswerLetter<'_>| answer.reply) {
            Ok(ShareReply::Invited(invitation)) => Ok(invitation),
            Ok(ShareReply::NoPlace) => Err(yet("has all its nodes")),
            _ => Err(NoPlace::Ever("runs another build of the program: start the same file on all machines".into())),
        }
    }

    /// Waits until it is known where every node listens, and returns that. Returns the number of
    /// the first one that is missing after this time.
    pub(crate) fn all(&self, within: Duration) -> Result<Vec<NodeAddress>, NodeId> {
        let until = Instant::now() + within;
        let mut addresses = lock(&self.addresses);
        loop {
            let Some(missing) = addresses.iter().position(Option::is_none) else {
                return Ok(addresses.iter().flatten().cloned().collect());
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NodeId(u16::try_from(missing).unwrap_or(u16::MAX)));
            }
            addresses = self.introduced.wait_timeout(addresses, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns the number of this node's view.
    pub(crate) fn view(&self) -> u32 {
        self.view_number.load(Ordering::Acquire)
    }

    /// Returns the view with what has changed since the one of a node, as far as this one knows.
    fn news_for(&self, node: NodeId) -> ViewNews {
        let known = self.peers.get(usize::from(node.0)).map_or(0, |peer| peer.view.load(Ordering::Relaxed));
        self.news_since(known)
    }

    /// Returns the view with what has changed after another one.
    pub(crate) fn news_since(&self, known: u32) -> ViewNews {
        // Most of the time nothing has changed.
        let number = self.view();
        if number <= known {
            return ViewNews { number, changes: Vec::new() };
        }
        let view = lock(&self.view);
        ViewNews { number: view.number(), changes: view.since(known).to_vec() }
    }

    /// Records which view a node has, as it has told.
    pub(crate) fn note_view(&self, node: NodeId, number: u32) {
        if let Some(peer) = self.peers.get(usize::from(node.0)) {
            peer.view.fetch_max(number, Ordering::Relaxed);
        }
    }

    /// Returns when and why a node was expelled, if this one knows.
    pub(crate) fn expulsion(&self, node: NodeId) -> Option<Expulsion> {
        lock(&self.view).expulsion(node.0)
    }

    /// Begins a view at the first node, and calls `act` with its change. Returns the number of the view before. What
    /// this node says has the new number before `act`, and others learn of the change after it.
    pub(crate) fn begin_view(&self, change: ViewChange, act: impl FnOnce(&ViewChange)) -> u32 {
        let mut view = lock(&self.view);
        let number = view.expel(change);
        self.view_number.store(view.number(), Ordering::Release);
        act(&change);
        number - 1
    }

    /// Learns what has changed after a view. Calls `act` with each change that is new, in order; the view has it
    /// when that returns, so nobody sees the change before.
    pub(crate) fn learn(&self, after: u32, changes: &[ViewChange], act: impl Fn(&ViewChange)) {
        let mut view = lock(&self.view);
        for change in view.news(after, changes) {
            act(&change);
            view.expel(change);
            self.view_number.store(view.number(), Ordering::Release);
        }
    }

    /// Records that a node is gone.
    pub(crate) fn lose(&self, node: NodeId) {
        if let Some(peer) = self.peers.get(usize::from(node.0)) {
            peer.is_lost.store(true, Ordering::Release);
            lock(&peer.channels).clear();
            *lock(&self.lost) += 1;
            self.node_lost.notify_all();
        }
    }

    /// Returns where the memory of a node is that lives on this machine.
    pub(crate) fn arena_of(&self, node: NodeId) -> Option<ArenaAddress> {
        self.peer(node).ok()?;
        lock(&self.addresses).get(usize::from(node.0))?.as_ref()?.arena.clone()
    }

    /// Records that a replica of a node's backup is of no use, or all of them. Returns false if it is taken over
    /// already: the node must not go on then.
    pub(crate) fn lose_backup(&self, node: NodeId, replica: Option<u8>) -> bool {
        let Some(peer) = self.peers.get(usize::from(node.0)) else { return false };
        let mut backup = lock(&peer.backup);
        if backup.is_taken_over {
            return false;
        }
        match replica {
            Some(replica) => {
                backup.lost_replicas |= 1u8.checked_shl(replica.into()).unwrap_or(0);
                backup.restored.retain(|(restored, ..)| *restored != replica);
            }
            None => backup.is_lost = true,
        }
        true
    }

    /// Records that a replica of a node's backup is in another region. Waits for its memory server.
    pub(crate) fn restore_backup(&self, node: NodeId, replica: u8, access: ReplicaAccess) -> ReplicaVerdict {
        let Some(peer) = self.peers.get(usize::from(node.0)).filter(|_| replica < 8) else {
            return ReplicaVerdict::Unused;
        };
        let Ok(session) = access.attach() else { return ReplicaVerdict::Unused };
        let mut backup = lock(&peer.backup);
        if backup.is_taken_over {
            return ReplicaVerdict::TakenOver;
        }
        backup.lost_replicas &= !(1 << replica);
        backup.restored.retain(|(restored, ..)| *restored != replica);
        backup.restored.push((replica, access, session));
        ReplicaVerdict::Used
    }

    /// Begins to take over the backup of a node. Returns the replicas of no use, a bit each, and those that are in
    /// other regions than at first; `None` if all are of no use.
    pub(crate) fn begin_take_over(&self, node: NodeId) -> Option<(u8, Vec<(u8, ReplicaAccess)>)> {
        let mut backup = lock(&self.peers.get(usize::from(node.0))?.backup);
        backup.is_taken_over = true;
        let restored = backup.restored.iter().map(|(replica, access, _)| (*replica, access.clone())).collect();
        (!backup.is_lost).then_some((backup.lost_replicas, restored))
    }

    /// Returns whether a node is gone.
    pub(crate) fn is_lost(&self, node: NodeId) -> bool {
        matches!(self.peer(node), Err(ShareError::NodeLost { .. }))
    }

    fn peer(&self, node: NodeId) -> Result<&PeerNode, ShareError> {
        let peer = self.peers.get(usize::from(node.0)).ok_or(ShareError::UnknownNode { node })?;
        if peer.is_lost.load(Ordering::Acquire) { Err(ShareError::NodeLost { node }) } else { Ok(peer) }
    }

    /// Says what is wrong with a node that cannot be reached. A lost connection is a hint only: waits
    /// for somebody to say that the node is gone, up to [`WITHIN`] after `started`.
    fn unreachable(&self, node: NodeId, started: Instant) -> ShareError {
        let mut lost = lock(&self.lost);
        loop {
            if let Err(error) = self.peer(node) {
                return error;
            }
            let left = WITHIN.saturating_sub(started.elapsed());
            if left.is_zero() {
                return ShareError::Silent { node, within: WITHIN };
            }
            lost = self.node_lost.wait_timeout(lost, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns where a node listens.
    pub(crate) fn url_of(&self, node: NodeId) -> Option<String> {
        Some(lock(&self.addresses).get(usize::from(node.0))?.as_ref()?.url.clone())
    }

    /// Returns a channel to a node that nobody else uses.
    fn channel(&self, node: NodeId, started: Instant) -> Result<Box<dyn CallChannel>, ShareError> {
        let free = lock(&self.peer(node)?.channels).pop();
        match free {
            Some(channel) => Ok(channel),
            None => self.open_channel(node)?.ok_or_else(|| self.unreachable(node, started)),
        }
    }

    /// Opens a channel to a node; `None` if it cannot be reached now.
    pub(crate) fn open_channel(&self, node: NodeId) -> Result<Option<Box<dyn CallChannel>>, ShareError> {
        let mut backend = lock(&self.peer(node)?.backend);
        if backend.is_none() {
            let url = self.url_of(node).ok_or(ShareError::UnknownNode { node })?;
            let builder = PoolBuilder::new().url(url).token(self.token.clone()).client_name("share").pages(1);
            *backend = builder.deadline(WITHIN).open().ok();
        }
        Ok(backend.as_ref().and_then(|backend| backend.open_calls().ok()))
    }

    /// Returns a message to a node as it travels.
    pub(crate) fn letter(&self, from: &ShareNode, to: NodeId, message: &ShareMessage<'_>) -> Option<Vec<u8>> {
        let (load, view) = (self.tell_load(from, to), self.news_for(to));
        postcard::to_allocvec(&LetterOut { sender: from.id.0, build: self.build, view, load, message }).ok()
    }

    /// Returns what a node is told of this one's load.
    pub(crate) fn tell_load(&self, from: &ShareNode, to: NodeId) -> NodeLoad {
        from.workers.tell_load(|load| {
            if let Some(peer) = self.peers.get(usize::from(to.0)) {
                peer.told.fetch_max(load.bits(), Ordering::Relaxed);
            }
            load
        })
    }

    /// Records what a node has told of its load. Returns whether it has told nothing later.
    pub(crate) fn note_heard(&self, node: NodeId, load: NodeLoad) -> bool {
        let peer = self.peers.get(usize::from(node.0));
        peer.is_some_and(|peer| peer.heard.fetch_max(load.bits(), Ordering::Relaxed) < load.bits())
    }

    /// Records that a task is given to a node, which has less room then.
    pub(crate) fn note_given(&self, node: NodeId) {
        let less = |bits| {
            let load = NodeLoad::from_bits(bits);
            Some(NodeLoad { room: load.room.saturating_sub(1), ..load }.bits())
        };
        if let Some(peer) = self.peers.get(usize::from(node.0)) {
            let _ = peer.heard.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Returns what each node has told of its load, and what it was told; without nodes that are gone.
    pub(crate) fn loads(&self) -> impl Iterator<Item = (NodeId, NodeLoad, NodeLoad)> + '_ {
        let load = |word: &AtomicU64| NodeLoad::from_bits(word.load(Ordering::Relaxed));
        let there = self.peers.iter().zip(0..).filter(|(peer, _)| !peer.is_lost.load(Ordering::Acquire));
        there.map(move |(peer, number)| (NodeId(number), load(&peer.heard), load(&peer.told)))
    }

    /// Returns the call that brings a message to a node.
    pub(crate) fn call(argument: Vec<u8>) -> FarCall {
        let (name, version) = (message::NAME, message::VERSION);
        FarCall { tag: 0, deadline: WITHIN, steps_max: 0, name, version, argument }
    }

    /// Sends a message and waits for its answer, which `read` reads. Both nodes know of the same losses then, as far
    /// as the message and the answer may follow from them.
    pub(crate) fn ask<T>(
        &self,
        from: &ShareNode,
        to: NodeId,
        message: ShareMessage<'_>,
        read: impl FnOnce(ShareReply<'_>) -> Option<T>,
    ) -> Result<T, Unanswered> {
        if !message.is_read() {
            from.commit()?;
        }
        let started = Instant::now();
        loop {
            self.tell_views(from, to, &message, started)?;
            let answer = self.ask_once(from, to, &message, started)?;
            let AnswerLetter { view, load, reply } =
                postcard::from_bytes(&answer).map_err(|_| ShareError::OtherBuild { node: to })?;
            from.hear_load(to, load);
            self.note_view(to, view.number);
            from.learn(view.after(), &view.changes);
            return match reply {
                ShareReply::View { after, changes } => {
                    from.learn(after, &changes);
                    continue;
                }
                ShareReply::Expelled(expulsion) => {
                    from.first.expelled(expulsion);
                    Err(ShareError::Expelled { expulsion }.into())
                }
                // It will be said that the node is gone, and who keeps its objects.
                ShareReply::TakenOver => {
                    Err(Unanswered { error: self.unreachable(to, started), may_have_arrived: true })
                }
                ShareReply::OtherBuild => Err(ShareError::OtherBuild { node: to }.into()),
                reply => read(reply).ok_or(ShareError::Stale { node: to }.into()),
            };
        }
    }

    /// Tells a node who is gone, if a letter has no room for all of that.
    fn tell_views(
        &self,
        from: &ShareNode,
        to: NodeId,
        message: &ShareMessage<'_>,
        started: Instant,
    ) -> Result<(), Unanswered> {
        let known = self.peer(to)?.view.load(Ordering::Relaxed);
        if self.view().saturating_sub(known) <= ViewNews::CHANGES_MAX || matches!(message, ShareMessage::View { .. }) {
            return Ok(());
        }
        let message = ShareMessage::View { after: known, changes: self.news_since(known).changes };
        // The message itself has not left.
        let answer = self.ask_once(from, to, &message, started).map_err(|unanswered| unanswered.error)?;
        if let Ok(AnswerLetter { view, .. }) = postcard::from_bytes(&answer) {
            self.note_view(to, view.number);
        }
        Ok(())
    }

    /// Sends a message and waits for the bytes of its answer.
    fn ask_once(
        &self,
        from: &ShareNode,
        to: NodeId,
        message: &ShareMessage<'_>,
        started: Instant,
    ) -> Result<Vec<u8>, Unanswered> {
        let argument = self.letter(from, to, message).ok_or(ShareError::Stale { node: to })?;
        let limit_bytes = CallBody::ARGUMENT_BYTES_MAX as u64;
        if argument.len() as u64 > limit_bytes {
            return Err(ShareError::TooLarge { bytes: argument.len() as u64, limit_bytes }.into());
        }
        let sent = argument.len() as u64;
        let mut channel = self.channel(to, started)?;
        if channel.submit(Peers::call(argument)).is_err() {
            return Err(self.unreachable(to, started).into());
        }
        let mut ended = Vec::with_capacity(1);
        let noted = from.wait_notes.note(WaitCause::Answer, to);
        let may_have_arrived = true;
        loop {
            // A node may have answered before it died.
            let lost = self.peer(to).err();
            if channel.poll(&mut ended) > 0 {
                break;
            }
            if let Some(error) = lost {
                return Err(Unanswered { error, may_have_arrived });
            }
            channel.wait(LOSS_SEEN_WITHIN);
        }
        drop(noted);
        let answer = match ended.pop().map(|end| end.result) {
            Some(Ok(answer)) => answer,
            Some(Err(CallFailure::Server { code, .. })) if code != ErrorCode::TimedOut => {
                return Err(Unanswered { error: ShareError::Refused { node: to }, may_have_arrived });
            }
            // The channel is of no use any more.
            _ => return Err(Unanswered { error: self.unreachable(to, started), may_have_arrived }),
        };
        count(&from.counters.messages, 1);
        count(&from.counters.message_bytes, sent + answer.len() as u64);
        if let Ok(peer) = self.peer(to) {
            lock(&peer.channels).push(channel);
        }
        Ok(answer)
    }

    /// Sends a message that has no other answer than that it was received.
    pub(crate) fn tell(&self, from: &ShareNode, to: NodeId, message: ShareMessage<'_>) -> Result<(), Unanswered> {
        self.ask(from, to, message, |reply| matches!(reply, ShareReply::Done).then_some(()))
    }

    /// Asks for the bytes of an object.
    pub(crate) fn fetch(
        &self,
        from: &ShareNode,
        to: NodeId,
        word: OwnerWord,
        bytes: usize,
    ) -> Result<Vec<u8>, ShareError> {
        let mut found = Vec::with_capacity(bytes);
        // Nobody writes to it meanwhile, so large objects come in pieces.
        loop {
            let piece = (bytes - found.len()).min(VALUE_BYTES_MAX);
            let message = ShareMessage::Fetch { word: word.bits(), offset: found.len() as u64, bytes: piece as u64 };
            let answer = self.ask(from, to, message, |reply| match reply {
                ShareReply::Bytes(bytes) if bytes.len() == piece => {
                    found.extend_from_slice(bytes);
                    Some(())
                }
                _ => None,
            });
            answer.map_err(|unanswered| unanswered.error)?;
            if found.len() == bytes {
                return Ok(found);
            }
        }
    }
}
