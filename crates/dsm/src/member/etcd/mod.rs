//! etcd as the one that decides: no node is special.
//!
//! Each node has a lease at etcd, with a key, and renews it; when it cannot, it ends before the lease is over
//! there. The newest view is a key as well. The first node that has its lease expels those that have none: it takes
//! over the backup, and exchanges the view for the next one ([`MemberStep`] says what a node may do). All read the
//! view four times a second, and most hear of it before. A node whose machine refuses a connection is not waited
//! for: the node before it in the ring of those with leases ends its lease.
//!
//! | key, under `/farfield/share/PROGRAM/` | value | goes with |
//! |---|---|---|
//! | `member/view` | changes of the view, as JSON | the program's lease |
//! | `member/node/N` | URL of node N | the lease of the node |
//! | `member/over` | none: the program has ended | a lease of a minute |
//! | `lost/N` | replicas of node N's backup that are of no use, or in other regions, as JSON | the program's lease |
//! | `taken/N` | none: node N's backup is taken over, and `lost/N` does not change | the program's lease |
//! | `name/NAME` | word and type of a named value, as JSON | the program's lease |

mod client;
mod urls;

use super::beats::{BEAT_EVERY, is_refused};
use super::{ElectionInvitation, MemberAuthority, NodeEnd, ReplicaVerdict, others, random_secret, say};
use crate::backup::{BackupAccess, BackupError, BackupSessions, ReplicaAccess};
use crate::node::{NodeBuilder, Running, ShareNode};
use crate::{NodeId, NodeStartError};
use client::{EtcdClient, EtcdCondition, EtcdError, EtcdStep, StoredValue};
use farfield_core::dsm::{
    BackupImage, LeaseTerm, LossCause, MemberStep, MemberView, NamedValue, OwnerWord, ViewChange, watched_node,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use urls::shown;

/// Longest wait for etcd when a node starts or ends.
const START_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for one answer of etcd while a node runs.
const WITHIN: Duration = Duration::from_secs(2);
/// Time between two looks at the view, and at the node that is watched.
const FOLLOW_EVERY: Duration = Duration::from_millis(250);
/// Time for which etcd keeps what it knows of a program when all of its nodes are gone.
const PROGRAM_TERM: Duration = Duration::from_secs(600);
/// Time between two renewals of that.
const PROGRAM_RENEWED_EVERY: Duration = Duration::from_secs(60);
/// Time for which it is said that a program has ended.
const OVER_TERM: Duration = Duration::from_secs(60);
/// Bit of `lost/N` that says that no replica is of use.
const ALL_REPLICAS: u16 = 1 << 8;

/// Part of a node in a program whose members etcd decides on.
struct EtcdAuthority {
    client: EtcdClient,
    invitation: ElectionInvitation,
    id: NodeId,
    nodes: u16,
    /// Number of the node's lease.
    lease: i64,
    /// The clock of [`LeaseTerm`].
    started: Instant,
    term: Mutex<LeaseTerm>,
    /// Time for which etcd grants leases.
    granted: Duration,
    /// State of this node's backup, as etcd knows it or will.
    backup: Mutex<StoredReplicas>,
    /// Regions of the other nodes' backups, which are there as long as a process has them open.
    _held: Vec<BackupSessions>,
}

/// State of a node's backup.
#[derive(Default, Serialize, Deserialize)]
struct StoredReplicas {
    /// Replicas that are of no use, a bit each.
    lost: u16,
    /// Replicas that are in other regions than at first, with the secrets by which these are joined.
    restored: Vec<(u8, String)>,
}

/// Keys under `member/`, as they are at one moment.
struct SeenMembers {
    view: MemberView,
    /// Revision of the view.
    revision: i64,
    leases: BTreeMap<u16, i64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(urls: &str) -> impl Fn(EtcdError) -> NodeStartError {
    let url = shown(urls);
    move |error| NodeStartError::Etcd { url: url.clone(), problem: error.to_string() }
}

fn open(urls: &str) -> Result<EtcdClient, NodeStartError> {
    EtcdClient::new(urls).map_err(|problem| NodeStartError::Etcd { url: shown(urls), problem })
}

/// Writes the first view of a new program to etcd.
pub(super) fn found(
    config: &NodeBuilder,
    urls: &str,
    backups: Vec<BackupAccess>,
) -> Result<ElectionInvitation, NodeStartError> {
    let client = open(urls)?;
    let term = PROGRAM_TERM.max(4 * config.expel_after);
    let (lease, _) = client.grant(term, START_WITHIN).map_err(failed(urls))?;
    let invitation = ElectionInvitation { urls: urls.into(), program: random_secret()?, lease, backups };
    let key = invitation.key("member/view");
    let put = EtcdStep::Put { key: &key, value: b"[]", lease };
    client.transact(&[EtcdCondition::Absent(&key)], &[put], START_WITHIN).map_err(failed(urls))?;
    Ok(invitation)
}

/// Begins the part of a node: from now on it has a lease.
pub(super) fn begin(
    running: &Running,
    invitation: &ElectionInvitation,
    config: &NodeBuilder,
) -> Result<(), NodeStartError> {
    let node = &running.node;
    let urls = &invitation.urls;
    let client = open(urls)?;
    let mut held = Vec::new();
    for access in invitation.backups.iter().zip(0..).filter(|(_, of)| *of != node.id.0).map(|(access, _)| access) {
        let problem = |error: BackupError| NodeStartError::Backup { url: access.url(), problem: error.to_string() };
        held.push(access.hold().map_err(problem)?);
    }
    let started = Instant::now();
    let (lease, term) = client.grant(config.expel_after, START_WITHIN).map_err(failed(urls))?;
    let authority = Arc::new(EtcdAuthority {
        client,
        invitation: invitation.clone(),
        id: node.id,
        nodes: config.nodes,
        lease,
        started,
        term: Mutex::new(LeaseTerm::granted(Duration::ZERO, term)),
        granted: term,
        backup: Mutex::default(),
        _held: held,
    });
    let (key, url) = (authority.node_key(node.id), running.address().url);
    let put = EtcdStep::Put { key: &key, value: url.as_bytes(), lease };
    authority.client.transact(&[], &[put], START_WITHIN).map_err(failed(urls))?;
    node.set_authority(authority.clone());
    for (name, keeps_lease) in [("share-lease", true), ("share-members", false)] {
        let (authority, node) = (authority.clone(), Arc::downgrade(node));
        let body = move || if keeps_lease { authority.keep_lease(&node) } else { authority.keep_view(&node) };
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        thread.map_err(NodeStartError::os("start a thread"))?;
    }
    Ok(())
}

impl ElectionInvitation {
    fn key(&self, of: &str) -> String {
        format!("/farfield/share/{}/{of}", self.program)
    }
}

impl EtcdAuthority {
    fn key(&self, of: &str) -> String {
        self.invitation.key(of)
    }

    fn node_key(&self, node: NodeId) -> String {
        self.key(&format!("member/node/{node}"))
    }

    /// Renews the lease, until the node ends, or ends the node before the lease is over.
    fn keep_lease(&self, node: &Weak<ShareNode>) {
        let mut problem = String::from("the process was stopped, or had no processor");
        loop {
            let Some(node) = node.upgrade() else { return };
            if let Some(end) = node.first.ended() {
                // Only the thread that runs the program's body has no other that ends the process.
                if end != NodeEnd::Program && node.first.leads() {
                    others::end(node.id, &end);
                }
                return;
            }
            let asked = self.started.elapsed();
            let left = lock(&self.term).left(asked);
            if left.is_zero() {
                let urls = shown(&self.invitation.urls);
                node.first.end(NodeEnd::LeaseOver(format!("its lease at etcd, {urls}, was not renewed: {problem}")));
                continue;
            }
            match self.client.renew(self.lease, left.min(WITHIN)) {
                Ok(Some(term)) => lock(&self.term).renew(asked, term),
                Ok(None) => node.first.end(self.lease_is_gone()),
                Err(error) => problem = error.to_string(),
            }
            let left = lock(&self.term).left(self.started.elapsed());
            node.first.pause(BEAT_EVERY.min(left));
        }
    }

    fn lease_is_gone(&self) -> NodeEnd {
        let urls = shown(&self.invitation.urls);
        NodeEnd::LeaseOver(format!("its lease at etcd, {urls}, is gone: the others go on without this node"))
    }

    /// Follows the view, and begins the next one if this node is to do that.
    fn keep_view(&self, node: &Weak<ShareNode>) {
        let mut renewed = Instant::now();
        loop {
            let Some(node) = node.upgrade().filter(|node| node.first.ended().is_none()) else { return };
            if node.first.has_begun()
                && let Ok(found) = self.client.range(&self.key("member/"), WITHIN)
            {
                self.follow(&node, &found);
                if node.first.leads() && renewed.elapsed() > PROGRAM_RENEWED_EVERY {
                    let _ = self.client.renew(self.invitation.lease, WITHIN);
                    renewed = Instant::now();
                }
            }
            node.first.pause(FOLLOW_EVERY);
        }
    }

    /// Follows what etcd says: learns the view, decides, and watches a node.
    fn follow(&self, node: &ShareNode, found: &BTreeMap<String, StoredValue>) {
        if found.contains_key("over") {
            return node.first.program_ended();
        }
        let view = found.get("view");
        let read = view.and_then(|view| Some((serde_json::from_slice(&view.value).ok()?, view.revision)));
        let Some((view, revision)) = read else { return node.first.end(self.lease_is_gone()) };
        let lease_of =
            |(key, value): (&String, &StoredValue)| Some((key.strip_prefix("node/")?.parse().ok()?, value.lease));
        let seen = SeenMembers { view, revision, leases: found.iter().filter_map(lease_of).collect() };
        node.learn(0, seen.view.since(0));
        let has_lease = |other| {
            let lease = seen.leases.get(&other);
            if other == self.id.0 { lease == Some(&self.lease) } else { lease.is_some() }
        };
        match MemberStep::next(self.id.0, self.nodes, &seen.view, has_lease) {
            MemberStep::Follow => {}
            MemberStep::Lead => node.first.lead(),
            MemberStep::Expel(other) => self.expel(node, NodeId(other), &seen),
            MemberStep::End => node.first.end(match seen.view.expulsion(self.id.0) {
                Some(expulsion) => NodeEnd::Expelled(Some(expulsion)),
                None => self.lease_is_gone(),
            }),
        }
        let watched = watched_node(self.id.0, self.nodes, has_lease).map(NodeId);
        if let Some((lease, other)) = watched.and_then(|other| Some((*seen.leases.get(&other.0)?, other)))
            && node.peers.url_of(other).is_some_and(|url| is_refused(&url))
        {
            // If that fails, the lease is over later.
            let _ = self.client.revoke(lease, WITHIN);
        }
    }

    /// Begins the next view, without a node whose lease is over, if the view is the one that was read.
    fn expel(&self, node: &ShareNode, gone: NodeId, seen: &SeenMembers) {
        let Ok(host) = self.take_over(node, gone, &seen.view) else { return };
        let is_ended = node.peers.url_of(gone).is_some_and(|url| is_refused(&url));
        let cause = if is_ended { LossCause::Ended } else { LossCause::LeaseOver(self.granted) };
        let change = ViewChange { node: gone.0, host, cause };
        let (mut view, before) = (seen.view.clone(), seen.view.number());
        let number = view.expel(change);
        let (view_key, node_key) = (self.key("member/view"), self.node_key(self.id));
        let value = serde_json::to_vec(&view).unwrap_or_default();
        let put = EtcdStep::Put { key: &view_key, value: &value, lease: self.invitation.lease };
        let conditions =
            [EtcdCondition::Revision(&view_key, seen.revision), EtcdCondition::Lease(&node_key, self.lease)];
        // If nobody knows whether it was written, it is read next.
        if self.client.transact(&conditions, &[put], WITHIN).is_ok_and(|written| written.is_done) {
            say(&format!("node {gone} is expelled in view {number}, by node {}, since {cause}", self.id));
            node.learn(before, &[change]);
            node.tell_view(before, change);
        }
    }

    /// Takes over the backup of a node that is gone, if it has one, with what it had kept of nodes lost before. Returns
    /// who will keep its objects. Another node may do the same: what counts is the view that is written.
    fn take_over(&self, node: &ShareNode, gone: NodeId, view: &MemberView) -> Result<Option<u16>, EtcdError> {
        if self.invitation.backups.is_empty() {
            return Ok(None);
        }
        let (mut image, mut lost) = (BackupImage::default(), Vec::new());
        for of in view.backups_of(gone.0).into_iter().map(NodeId) {
            match self.read_backup(of, &image)? {
                Ok(with) => image = with,
                Err(error) => {
                    say(&format!("the backup of node {of} is lost: {error}"));
                    if of == gone {
                        return Ok(None);
                    }
                    // Nor is it known what has become of what that node had kept.
                    lost.extend(view.backups_of(of.0));
                }
            }
        }
        // Those that are read later only say what has changed.
        image.retain(|word| !lost.contains(&node.home_of(word).0));
        node.prepare_promotion(gone, image);
        Ok(Some(self.id.0))
    }

    /// Takes over the backup of one node, and reads it on top of those that it had taken over.
    fn read_backup(&self, of: NodeId, taken_over: &BackupImage) -> Result<Result<BackupImage, BackupError>, EtcdError> {
        // From now on etcd takes no word of the node about its backup.
        let (taken, lost) = (self.key(&format!("taken/{of}")), self.key(&format!("lost/{of}")));
        let steps = [EtcdStep::Put { key: &taken, value: b"", lease: self.invitation.lease }, EtcdStep::Get(&lost)];
        let found = self.client.transact(&[], &steps, WITHIN)?.found;
        let state = match found.into_iter().flatten().next() {
            Some(state) => serde_json::from_slice(&state.value).map_err(|_| BackupError::Malformed),
            None => Ok(StoredReplicas::default()),
        };
        let access = self.invitation.backups.get(usize::from(of.0)).cloned().ok_or(BackupError::Malformed);
        let region = access.and_then(|mut access| {
            let StoredReplicas { lost, restored } = state?;
            restored.into_iter().for_each(|(replica, share)| access.set_share(replica, share));
            access.open_for_take_over(|replica| lost & (ALL_REPLICAS | 1 << replica) != 0)
        });
        Ok(region.and_then(|mut region| region.take_over(taken_over)))
    }

    /// Lets etcd know the state of this node's backup. Returns false if that is taken over already.
    fn insist_on_backup(&self, node: &ShareNode, state: &StoredReplicas) -> bool {
        let (taken, key) = (self.key(&format!("taken/{}", self.id)), self.key(&format!("lost/{}", self.id)));
        let value = serde_json::to_vec(state).unwrap_or_default();
        let put = EtcdStep::Put { key: &key, value: &value, lease: self.invitation.lease };
        self.insist(node, Some(EtcdCondition::Absent(&taken)), &put)
    }

    /// Asks for a step again and again until etcd has done it, or the node ends. Returns false if this node has no
    /// lease, or the condition does not hold.
    fn insist(&self, node: &ShareNode, condition: Option<EtcdCondition<'_>>, step: &EtcdStep<'_>) -> bool {
        let node_key = self.node_key(self.id);
        let conditions: Vec<_> = condition.into_iter().chain([EtcdCondition::Lease(&node_key, self.lease)]).collect();
        while node.first.ended().is_none() {
            if let Ok(done) = self.client.transact(&conditions, std::slice::from_ref(step), WITHIN) {
                return done.is_done;
            }
            node.first.pause(BEAT_EVERY);
        }
        false
    }
}

impl MemberAuthority for EtcdAuthority {
    fn is_elected(&self) -> bool {
        true
    }

    fn lose_backup(&self, node: &ShareNode, replica: Option<u8>) -> bool {
        let mut state = lock(&self.backup);
        state.lost |= replica.map_or(ALL_REPLICAS, |replica| 1 << (replica & 7));
        state.restored.retain(|(restored, _)| Some(*restored) != replica);
        self.insist_on_backup(node, &state)
    }

    fn restore_backup(&self, node: &ShareNode, replica: u8, access: ReplicaAccess) -> ReplicaVerdict {
        let mut state = lock(&self.backup);
        state.lost &= !(1 << (replica & 7));
        state.restored.retain(|(restored, _)| *restored != replica);
        state.restored.push((replica, access.into_share()));
        if self.insist_on_backup(node, &state) { ReplicaVerdict::Used } else { ReplicaVerdict::TakenOver }
    }

    fn keep_name(&self, node: &ShareNode, name: &str, value: Option<&NamedValue>) -> bool {
        // Whoever finds the name later finds the value, if this node is its home.
        if node.commit().is_err() {
            return false;
        }
        let key = self.key(&format!("name/{name}"));
        let text = value.and_then(|NamedValue { word, types, type_name }| {
            serde_json::to_vec(&(word.bits(), types.to_string(), type_name)).ok()
        });
        let step = match &text {
            Some(value) => EtcdStep::Put { key: &key, value, lease: self.invitation.lease },
            None => EtcdStep::Delete(&key),
        };
        self.insist(node, None, &step)
    }

    fn kept_names(&self, node: &ShareNode) -> Option<Vec<(String, NamedValue)>> {
        let named = |(name, StoredValue { value, .. })| {
            let (word, types, type_name): (u64, String, String) = serde_json::from_slice(&value).ok()?;
            Some((name, NamedValue { word: OwnerWord::from_bits(word)?, types: types.parse().ok()?, type_name }))
        };
        while node.first.ended().is_none() {
            if let Ok(found) = self.client.range(&self.key("name/"), WITHIN) {
                return Some(found.into_iter().filter_map(named).collect());
            }
            node.first.pause(BEAT_EVERY);
        }
        None
    }

    fn program_ended(&self) {
        // Who does not read it is told by a message, or loses its lease.
        if let Ok((lease, _)) = self.client.grant(OVER_TERM, START_WITHIN) {
            let (over, nodes) = (self.key("member/over"), self.key("member/node/"));
            let steps = [EtcdStep::Put { key: &over, value: b"", lease }, EtcdStep::DeleteAll(&nodes)];
            let _ = self.client.transact(&[], &steps, START_WITHIN);
        }
        let _ = self.client.revoke(self.invitation.lease, WITHIN);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against two views of one number, with a real etcd; skipped where it is not installed.
    use super::*;
    use crate::node::Peers;
    use farfield_core::dsm::{BackupBatch, BackupLog, Colour, Partition};
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command, Stdio};
    use std::sync::Barrier;

    const ETCD: &str = "/usr/bin/etcd";
    const NODES: u16 = 3;

    /// A server of etcd; killed when dropped.
    struct RealEtcd {
        folder: PathBuf,
        url: String,
        process: Child,
    }

    impl RealEtcd {
        fn start() -> RealEtcd {
            let listeners = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
            let addresses = listeners.map(|listener| listener.local_addr().unwrap());
            let folder = std::env::temp_dir().join(format!("farfield-etcd-{}", addresses[0].port()));
            let urls = addresses.map(|address| format!("http://{address}"));
            let mut command = Command::new(ETCD);
            command.arg("--data-dir").arg(&folder);
            command.args(["--listen-client-urls", &urls[0], "--advertise-client-urls", &urls[0]]);
            command.args(["--listen-peer-urls", &urls[1], "--initial-advertise-peer-urls", &urls[1]]);
            command.args(["--initial-cluster", &format!("default={}", urls[1])]);
            let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let [url, _] = urls;
            let etcd = RealEtcd { folder, url, process };
            let begun = Instant::now();
            while EtcdClient::new(&etcd.url).unwrap().grant(WITHIN, WITHIN).is_err() {
                assert!(begun.elapsed() < Duration::from_secs(60));
                std::thread::sleep(Duration::from_millis(20));
            }
            etcd
        }
    }

    impl Drop for RealEtcd {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    /// A node with a lease, which has no threads.
    fn member(invitation: &ElectionInvitation, id: u16) -> (Arc<ShareNode>, EtcdAuthority) {
        let peers = Peers::new(NODES, 7, String::new());
        let node = ShareNode::new(NodeId(id), 0, &NodeBuilder::new().near(1 << 20), peers, None).unwrap();
        let client = EtcdClient::new(&invitation.urls).unwrap();
        let (lease, granted) = client.grant(Duration::from_secs(60), START_WITHIN).unwrap();
        let authority = EtcdAuthority {
            client,
            invitation: invitation.clone(),
            id: node.id,
            nodes: NODES,
            lease,
            started: Instant::now(),
            term: Mutex::new(LeaseTerm::granted(Duration::ZERO, granted)),
            granted,
            backup: Mutex::default(),
            _held: Vec::new(),
        };
        let key = authority.node_key(node.id);
        authority.client.transact(&[], &[EtcdStep::Put { key: &key, value: b"", lease }], START_WITHIN).unwrap();
        (node, authority)
    }

    fn seen(of: &EtcdAuthority) -> SeenMembers {
        let found = of.client.range(&of.key("member/"), WITHIN).unwrap();
        let view = &found["view"];
        SeenMembers {
            view: serde_json::from_slice(&view.value).unwrap(),
            revision: view.revision,
            leases: BTreeMap::new(),
        }
    }

    #[test]
    fn one_of_two_that_believe_to_lead_writes_the_next_view() {
        if !Path::new(ETCD).is_file() {
            println!("SKIPPED: {ETCD} is not installed");
            return;
        }
        let etcd = RealEtcd::start();
        let config = NodeBuilder::new().near(1 << 20).nodes(NODES);
        for _ in 0..20 {
            let invitation = found(&config, &etcd.url, Vec::new()).unwrap();
            let candidates = [1, 2].map(|id| member(&invitation, id));
            let begin = Barrier::new(2);
            std::thread::scope(|threads| {
                for (node, authority) in &candidates {
                    threads.spawn(|| {
                        let seen = seen(authority);
                        begin.wait();
                        authority.expel(node, NodeId(0), &seen);
                    });
                }
            });
            let views = candidates.each_ref().map(|(node, _)| node.peers.view());
            assert_eq!(views.iter().sum::<u32>(), 1, "one has written it, and the other has not");
            let written = seen(&candidates[0].1);
            assert_eq!(written.view.number(), 1);
            // The other one reads it.
            for (node, authority) in &candidates {
                authority.follow(node, &authority.client.range(&authority.key("member/"), WITHIN).unwrap());
                assert_eq!(node.peers.expulsion(NodeId(0)), written.view.expulsion(0));
            }
        }
    }

    /// Node 1 keeps what node 2 had stored. When it dies, the memory server of one of the two is gone.
    #[test]
    fn what_is_left_of_several_backups_is_kept() {
        if !Path::new(ETCD).is_file() {
            println!("SKIPPED: {ETCD} is not installed");
            return;
        }
        let etcd = RealEtcd::start();
        let config = NodeBuilder::new().near(1 << 20).nodes(NODES);
        let word = |partition| OwnerWord::new(Partition::new(partition).unwrap(), 64, Colour(0)).unwrap();
        for gone in [1, 2] {
            let mut servers = [(); NODES as usize].map(|()| {
                let config = farfield_server::Config {
                    listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
                    functions: farfield_wic::Registry::standard(),
                    ..farfield_server::Config::default()
                };
                Some(farfield_server::Server::start(config).unwrap())
            });
            let url = |server: &Option<farfield_server::Server>| server.as_ref().unwrap().endpoints()[0].clone();
            let (backups, _sessions): (Vec<_>, Vec<_>) =
                servers.iter().map(|server| BackupAccess::create(&url(server), "", 1 << 20).unwrap()).unzip();
            let mut region = backups[1].open().unwrap();
            let log = BackupLog::new(region.layout(), region.commit_word().unwrap());
            let mut batch = BackupBatch::default();
            [1, 2].into_iter().for_each(|partition| batch.put(word(partition), &[7; 8]));
            let place = log.append(&batch).unwrap();
            region.write(log.commit(), &mut batch, place).unwrap();
            let (node, authority) = member(&found(&config, &etcd.url, backups).unwrap(), 0);
            servers[gone].take().unwrap().shutdown(Duration::ZERO);
            let lose = |lost, host| ViewChange { node: lost, host, cause: LossCause::Ended };
            let mut view = MemberView::default();
            view.expel(lose(2, Some(1)));
            node.expel(lose(2, Some(1)));
            let host = authority.take_over(&node, NodeId(1), &view).unwrap();
            assert_eq!(host, (gone == 2).then_some(0));
            node.expel(lose(1, host));
            let kept = [1, 2].map(|partition| node.read_for(word(partition), 0, 8).is_some());
            assert_eq!((kept, node.stats().promoted_objects), ([gone == 2, false], u64::from(gone == 2)));
        }
    }

    #[test]
    fn who_has_no_lease_writes_nothing() {
        if !Path::new(ETCD).is_file() {
            println!("SKIPPED: {ETCD} is not installed");
            return;
        }
        let etcd = RealEtcd::start();
        let config = NodeBuilder::new().near(1 << 20).nodes(NODES);
        let invitation = found(&config, &etcd.url, Vec::new()).unwrap();
        let (node, authority) = member(&invitation, 1);
        let word = OwnerWord::new(Partition::new(1).unwrap(), 64, Colour(0)).unwrap();
        let value = NamedValue { word, types: 7 << 70, type_name: "u64".into() };
        assert!(authority.keep_name(&node, "a", Some(&value)) && authority.lose_backup(&node, Some(1)));
        assert_eq!(authority.kept_names(&node), Some(vec![("a".to_owned(), value.clone())]));
        let seen = seen(&authority);
        authority.client.revoke(authority.lease, WITHIN).unwrap();
        assert!(!authority.keep_name(&node, "b", Some(&value)) && !authority.lose_backup(&node, Some(2)));
        authority.expel(&node, NodeId(0), &seen);
        assert_eq!(node.peers.view(), 0);
        let (other, of_other) = member(&invitation, 2);
        let lost = of_other.client.range(&of_other.key("lost/"), WITHIN).unwrap();
        assert_eq!(lost["1"].value, br#"{"lost":2,"restored":[]}"#);
        // A backup that is taken over is not given up any more.
        assert!(matches!(of_other.take_over(&other, NodeId(2), &MemberView::default()), Ok(None)));
        let taken = of_other.key("taken/2");
        of_other.client.transact(&[], &[EtcdStep::Put { key: &taken, value: b"", lease: 0 }], WITHIN).unwrap();
        assert!(!of_other.lose_backup(&other, None));
        assert_eq!(of_other.kept_names(&other).unwrap().len(), 1);
        // The node that has lost its lease learns that, and ends.
        authority.follow(&node, &authority.client.range(&authority.key("member/"), WITHIN).unwrap());
        assert!(matches!(node.first.ended(), Some(NodeEnd::LeaseOver(_))));
        of_other.program_ended();
        authority.follow(&other, &authority.client.range(&authority.key("member/"), WITHIN).unwrap());
        assert_eq!(other.first.ended(), Some(NodeEnd::Program));
    }
}
