//! Signs of life: the first process asks each other node for one, and expels a node that gives none.
//!
//! A node that was expelled must not go on: others have taken back what they had lent to it. One of
//! this machine is killed before it is expelled. One of another machine ends when it has not been asked
//! for as long; it was asked last before it answered last, so it ends before it is expelled, if its
//! clock runs. If it does not, because the process is stopped, the first node that it says something to
//! tells it.

use super::first::Backups;
use super::{NodeEnd, say};
use crate::message::ShareMessage;
use crate::node::{NodeId, Peers, ShareNode};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use farfield_core::dsm::{BackupImage, Expulsion, LossCause, ViewChange};
use farfield_pool::CallChannel;
use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Time between two questions.
pub(super) const BEAT_EVERY: Duration = Duration::from_millis(500);
/// Pause between two looks at a process.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Longest time to find out whether anybody listens.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// Knowledge of a node about the first process, and about its own part.
pub(crate) struct FirstProcess {
    known: Mutex<Known>,
    changed: Condvar,
}

struct Known {
    heard: Instant,
    ended: Option<NodeEnd>,
    /// Whether all nodes know each other.
    has_begun: bool,
    /// Whether this node runs the program's body.
    leads: bool,
}

impl Default for FirstProcess {
    fn default() -> FirstProcess {
        let known = Known { heard: Instant::now(), ended: None, has_begun: false, leads: false };
        FirstProcess { known: Mutex::new(known), changed: Condvar::new() }
    }
}

impl FirstProcess {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the first process has asked for a sign of life.
    pub(crate) fn hear(&self) {
        self.lock().heard = Instant::now();
    }

    /// Records that the program has ended.
    pub(crate) fn program_ended(&self) {
        self.end(NodeEnd::Program);
    }

    /// Records that another node takes this one for dead, since when and why.
    pub(crate) fn expelled(&self, expulsion: Option<Expulsion>) {
        self.end(NodeEnd::Expelled(expulsion));
    }

    /// Returns whether the program has ended.
    pub(super) fn is_over(&self) -> bool {
        self.lock().ended == Some(NodeEnd::Program)
    }

    /// Records that all nodes know each other.
    pub(crate) fn begin(&self) {
        self.lock().has_begun = true;
    }

    /// Returns whether all nodes know each other.
    pub(super) fn has_begun(&self) -> bool {
        self.lock().has_begun
    }

    /// Records that this node runs the program's body.
    pub(super) fn lead(&self) {
        self.lock().leads = true;
        self.changed.notify_all();
    }

    /// Returns whether this node runs the program's body.
    pub(crate) fn leads(&self) -> bool {
        self.lock().leads
    }

    /// Returns why the node ends, if it does.
    #[cfg(feature = "etcd")]
    pub(super) fn ended(&self) -> Option<NodeEnd> {
        self.lock().ended.clone()
    }

    /// Waits for this time, or until the node ends. Returns whether it ends.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let ended = self.changed.wait_timeout_while(self.lock(), time, |known| known.ended.is_none());
        ended.unwrap_or_else(PoisonError::into_inner).0.ended.is_some()
    }

    /// Ends the node.
    pub(super) fn end(&self, end: NodeEnd) {
        self.lock().ended.get_or_insert(end);
        self.changed.notify_all();
    }

    /// Waits until the program, the first process, or this node's part in it has ended, and returns which; `None` if
    /// this node is to run the program's body. The first process is at a URL and asks for signs of life, or has another
    /// way to say that it has ended. A node that `outlives` it does not look after it once all nodes know each other.
    pub(super) fn wait(&self, asks: Option<(&str, Duration)>, outlives: bool) -> Option<NodeEnd> {
        let mut known = self.lock();
        known.heard = Instant::now();
        loop {
            if known.ended.is_some() || known.leads {
                return known.ended.clone();
            }
            let Some((url, expel_after)) = asks.filter(|_| !(outlives && known.has_begun)) else {
                known = self.changed.wait(known).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let silent = known.heard.elapsed();
            if silent >= expel_after {
                return Some(NodeEnd::Unheard);
            }
            if silent > 2 * BEAT_EVERY {
                drop(known);
                if is_refused(url) && !(outlives && self.has_begun()) {
                    return Some(NodeEnd::FirstIsGone);
                }
                known = self.lock();
            }
            known =
                self.changed.wait_timeout(known, BEAT_EVERY.min(expel_after)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Returns whether a machine says that nobody listens there.
pub(super) fn is_refused(url: &str) -> bool {
    let addresses = url.strip_prefix("tcp://").and_then(|address| address.to_socket_addrs().ok());
    let mut tried = addresses.into_iter().flatten().map(|address| TcpStream::connect_timeout(&address, CONNECT_WITHIN));
    tried.next().is_some_and(|tried| tried.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
}

/// A node that the first process looks after.
pub(super) struct LookedAfter {
    pub(super) id: NodeId,
    /// Process of the node, if it is of this machine.
    pub(super) child: Option<Arc<Mutex<Child>>>,
    pub(super) expel_after: Duration,
    /// Whether the program has begun.
    pub(super) has_begun: Arc<AtomicBool>,
    /// Whether somebody else decides once the program has begun.
    pub(super) is_elected: bool,
    /// Whether to say on stderr that it is gone.
    pub(super) is_said: bool,
    pub(super) backups: Arc<Backups>,
}

/// End of a node.
enum Fate {
    Ended,
    Silent,
    /// The program has ended.
    Over,
}

impl LookedAfter {
    /// Waits until the node is gone, and tells all others. As long as the program has not begun, another
    /// process may take the place of one that has joined.
    pub(super) fn look(&self, node: &Weak<ShareNode>) {
        loop {
            let fate = self.wait(node);
            let Some(node) = node.upgrade().filter(|node| !node.first.is_over()) else { return };
            // If the process of a node of this machine has ended before, the program does not begin.
            if self.is_elected && (self.has_begun.load(Relaxed) || self.child.is_some()) {
                return;
            }
            let (cause, problem) = match fate {
                Fate::Over => return,
                Fate::Ended => (LossCause::Ended, "has ended".to_owned()),
                Fate::Silent => {
                    self.kill();
                    let problem = format!("has not answered for {} s and is expelled", self.expel_after.as_secs_f64());
                    (LossCause::Silent(self.expel_after), problem)
                }
            };
            if self.is_said {
                say(&format!("node {} {problem}", self.id));
            }
            if self.has_begun.load(Relaxed) || self.child.is_some() {
                let host = self.promote(&node);
                node.expel(ViewChange { node: self.id.0, host, cause });
                return;
            }
            node.peers.forget(self.id);
        }
    }

    /// Takes over the backup of the node, which is gone, if it has one. Returns who keeps its objects.
    fn promote(&self, node: &ShareNode) -> Option<u16> {
        let mut access = self.backups.of(self.id)?.clone();
        // From now on the node is not heard if it wants to go on without a server, or without a backup.
        let (lost, restored) = node.peers.begin_take_over(self.id)?;
        restored.into_iter().for_each(|(replica, region)| access.set_share(replica, region.into_share()));
        let is_lost = |replica: u8| lost >> replica & 1 == 1;
        match access.open_for_take_over(is_lost).and_then(|mut region| region.take_over(&BackupImage::default())) {
            Ok(image) => {
                node.promote(self.id, image);
                Some(node.id.0)
            }
            Err(error) => {
                say(&format!("the backup of node {} is lost with it: {error}", self.id));
                None
            }
        }
    }

    fn kill(&self) {
        if let Some(child) = &self.child {
            let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn has_ended(&self) -> bool {
        self.child.as_ref().is_some_and(|child| super::first::status(child).is_some())
    }

    fn fate(&self, node: &Weak<ShareNode>, silent_since: Option<Instant>) -> Option<Fate> {
        if node.strong_count() == 0 || self.is_elected && self.has_begun.load(Relaxed) {
            return Some(Fate::Over);
        }
        let is_silent = silent_since.is_some_and(|since| since.elapsed() > self.expel_after);
        self.has_ended().then_some(Fate::Ended).or(is_silent.then_some(Fate::Silent))
    }

    fn wait(&self, node: &Weak<ShareNode>) -> Fate {
        let mut channel = None;
        // Time of the first question that was not answered. This process may have been stopped since the
        // last answer, so that does not count.
        let mut silent_since = None;
        loop {
            let asked = Instant::now();
            let url = node.upgrade().and_then(|node| node.peers.url_of(self.id));
            if url.is_some() {
                silent_since.get_or_insert(asked);
            }
            match self.ask(node, &mut channel, silent_since) {
                Said::Answered => silent_since = None,
                Said::Unanswered => {}
                Said::Broken => {
                    channel = None;
                    // A process of this machine is looked at itself.
                    if self.child.is_none() && url.is_some_and(|url| is_refused(&url)) {
                        return Fate::Ended;
                    }
                }
            }
            loop {
                if let Some(fate) = self.fate(node, silent_since) {
                    return fate;
                }
                if asked.elapsed() >= BEAT_EVERY {
                    break;
                }
                std::thread::sleep(LOOK_EVERY);
            }
        }
    }

    /// Asks for a sign of life, and waits for it as long as the node counts as alive.
    fn ask(
        &self,
        node: &Weak<ShareNode>,
        channel: &mut Option<Box<dyn CallChannel>>,
        silent_since: Option<Instant>,
    ) -> Said {
        let letter = {
            let Some(node) = node.upgrade() else { return Said::Unanswered };
            if channel.is_none() {
                *channel = node.peers.open_channel(self.id).ok().flatten();
            }
            node.peers.letter(&node, self.id, &ShareMessage::Beat)
        };
        match channel.as_deref_mut().zip(letter) {
            Some((channel, letter)) => say_on(channel, letter, || self.fate(node, silent_since).is_some()),
            None => Said::Broken,
        }
    }
}

/// End of something that was said.
pub(super) enum Said {
    Answered,
    Unanswered,
    /// The connection is lost.
    Broken,
}

/// Says something to a node, and waits for its answer until the wait is over.
pub(super) fn say_on(channel: &mut dyn CallChannel, letter: Vec<u8>, is_over: impl Fn() -> bool) -> Said {
    if channel.submit(Peers::call(letter)).is_err() {
        return Said::Broken;
    }
    let mut ended = Vec::with_capacity(1);
    while channel.poll(&mut ended) == 0 {
        if is_over() {
            return Said::Unanswered;
        }
        channel.wait(LOOK_EVERY);
    }
    match ended.pop().map(|end| end.result) {
        Some(Ok(_)) => Said::Answered,
        _ => Said::Broken,
    }
}
