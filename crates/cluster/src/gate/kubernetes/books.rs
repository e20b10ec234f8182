//! Nodes and pods of a cluster as the API server tells them, and bindings on their way.
//!
//! A binding that was sent is not in the API server's answers yet. So it is *reserved*, before it is
//! sent, until a watch shows the pod with its node. A binding whose answer was lost stays reserved
//! for longer than the API server works on a request. Whoever starts anew reads everything again, and
//! has no reservations.

use super::objects::{NodeFacts, NodeObject, PodFacts, PodObject, WatchEvent};
use super::{FAR_RESOURCE, NODE_LABEL, NODE_LABEL_VALUE};
use crate::gate::{SchedulerJob, SchedulerState};
use farfield_core::policy::cluster::{GateJob, GateNode, GatePhase, JobClass, NodeShape};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time for which a binding without an answer stays reserved. The API server works on a request for
/// at most a minute, unless it is told otherwise.
const UNANSWERED_FOR: Duration = Duration::from_secs(90);

/// Most near memory that pods without far memory count with on a node. No node has so much, and sums of it
/// with those of jobs are numbers.
const FOREIGN_BYTES_MAX: u64 = 1 << 62;

/// Binding that was sent, or is about to be.
#[derive(Clone, Debug)]
struct Reservation {
    pod: PodFacts,
    node: String,
    progress: BindProgress,
}

/// Progress of a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BindProgress {
    /// The API server works on it, since this time.
    Sent(Duration),
    /// The API server has done it, at this time.
    Done(Duration),
    /// The answer was lost, at this time.
    Lost(Duration),
}

/// Outcome of a binding that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The API server has bound the pod.
    Bound,
    /// The API server has refused.
    Refused,
    /// The answer was lost: the pod may be bound or not.
    Unknown,
}

/// Nodes, pods and reservations. Times are durations since any moment that does not change.
#[derive(Clone, Debug, Default)]
pub struct KubernetesBooks {
    nodes: BTreeMap<String, NodeFacts>,
    pods: BTreeMap<String, PodFacts>,
    /// Pods that cannot be understood, by identity: name and reason.
    ignored: BTreeMap<String, (String, String)>,
    reservations: BTreeMap<String, Reservation>,
}

impl KubernetesBooks {
    /// Replaces all pods by a list that was asked for at `asked`. What was bound before is in it.
    pub fn replace_pods(&mut self, pods: &[PodObject], asked: Duration) {
        self.pods.clear();
        self.ignored.clear();
        for pod in pods {
            self.enter_pod(pod);
        }
        self.reservations.retain(|_, reservation| match reservation.progress {
            BindProgress::Done(at) => at >= asked,
            BindProgress::Sent(at) | BindProgress::Lost(at) => at + UNANSWERED_FOR >= asked,
        });
    }

    /// Replaces all nodes.
    pub fn replace_nodes(&mut self, nodes: &[NodeObject]) {
        self.nodes = nodes.iter().map(|node| (node.name().to_owned(), node.facts())).collect();
    }

    /// Enters what a watch of pods has told. Returns false if the watch cannot go on.
    pub fn enter_pod_event(&mut self, event: &WatchEvent<PodObject>) -> bool {
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => self.enter_pod(pod),
            WatchEvent::Deleted(pod) => {
                self.pods.remove(pod.uid());
                self.ignored.remove(pod.uid());
                self.reservations.remove(pod.uid());
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(_) => return false,
        }
        true
    }

    /// Enters what a watch of nodes has told. Returns false if the watch cannot go on.
    pub fn enter_node_event(&mut self, event: &WatchEvent<NodeObject>) -> bool {
        match event {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                self.nodes.insert(node.name().to_owned(), node.facts());
            }
            WatchEvent::Deleted(node) => drop(self.nodes.remove(node.name())),
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(_) => return false,
        }
        true
    }

    fn enter_pod(&mut self, pod: &PodObject) {
        match pod.facts() {
            Ok(facts) => {
                if facts.node.is_some() || facts.is_over {
                    self.reservations.remove(pod.uid());
                }
                self.pods.insert(pod.uid().to_owned(), facts);
            }
            Err(reason) => drop(self.ignored.insert(pod.uid().to_owned(), (pod.id(), reason))),
        }
    }

    /// Reserves what a pod needs on a node, until [`settle`](KubernetesBooks::settle).
    pub(super) fn reserve(&mut self, pod: &PodFacts, node: &str, now: Duration) {
        let reservation = Reservation { pod: pod.clone(), node: node.to_owned(), progress: BindProgress::Sent(now) };
        self.reservations.insert(pod.uid.clone(), reservation);
    }

    /// Enters the outcome of a binding at the time `now`.
    pub fn settle(&mut self, uid: &str, outcome: BindOutcome, now: Duration) {
        match (outcome, self.reservations.get_mut(uid)) {
            (BindOutcome::Refused, _) => drop(self.reservations.remove(uid)),
            (BindOutcome::Bound, Some(reservation)) => reservation.progress = BindProgress::Done(now),
            (BindOutcome::Unknown, Some(reservation)) => reservation.progress = BindProgress::Lost(now),
            // A watch was faster.
            (_, None) => {}
        }
    }

    /// Tells whether a binding has been reserved for so long that pods should be listed again.
    pub fn has_stale_reservation(&self, now: Duration) -> bool {
        self.reservations.values().any(|reservation| match reservation.progress {
            BindProgress::Sent(at) | BindProgress::Done(at) | BindProgress::Lost(at) => at + UNANSWERED_FOR < now,
        })
    }

    /// Returns the number of bindings on their way.
    pub fn reserved(&self) -> usize {
        self.reservations.len()
    }

    /// Returns the state of the cluster as a gate decides about it. Cores are thousandths of
    /// processors.
    pub fn state(&self, pool_bytes: u64, now_s: u64) -> SchedulerState {
        let view = self.view(now_s, None);
        let nodes = view.names.iter().cloned().zip(view.nodes.iter().copied()).collect();
        let jobs = view.pods.iter().zip(view.jobs).map(|(pod, job)| SchedulerJob {
            id: pod.id(),
            class: job.class,
            waited_s: job.waited_s,
            phase: Some(job.phase),
            other_licenses: Vec::new(),
        });
        SchedulerState { nodes, jobs: jobs.collect(), pool_bytes, ignored: view.ignored }
    }

    /// Returns the node that a pod's binding was sent for.
    pub(super) fn reserved_node(&self, uid: &str) -> Option<&str> {
        self.reservations.get(uid).map(|reservation| reservation.node.as_str())
    }

    /// Returns nodes and jobs by index, jobs in the order of their priority and then of their age. The pod
    /// `asked` waits, also if its binding was sent.
    pub(super) fn view(&self, now_s: u64, asked: Option<&str>) -> ClusterView<'_> {
        let mut view = ClusterView::default();
        let mut index: BTreeMap<&str, usize> = BTreeMap::new();
        for node in self.nodes.values().filter(|node| node.is_far) {
            index.insert(&node.name, view.names.len());
            let shape = NodeShape { cores: node.cpu_milli, reclaim_cores: 0, memory_bytes: node.memory_bytes };
            view.names.push(node.name.clone());
            view.nodes.push(GateNode { shape, foreign_cores: 0, foreign_bytes: 0, is_up: node.is_up });
        }
        let is_asked = |pod: &PodFacts| asked == Some(pod.uid.as_str());
        let reserved = |pod: &PodFacts| self.reserved_node(&pod.uid).filter(|_| !is_asked(pod));
        let known = self.pods.values();
        // A pod whose binding was lost may be gone by now, and may be bound.
        let others = self.reservations.values().map(|it| &it.pod).filter(|pod| !self.pods.contains_key(&pod.uid));
        let mut pods: Vec<&PodFacts> = known.chain(others).filter(|pod| !pod.is_over).collect();
        pods.sort_by(|one, other| {
            let key = |pod: &PodFacts| (core::cmp::Reverse(pod.priority), pod.created_s);
            key(one).cmp(&key(other)).then_with(|| one.uid.cmp(&other.uid))
        });
        for pod in pods {
            let node = pod.node.as_deref().or_else(|| reserved(pod));
            let class = match pod.class() {
                None => {
                    if let Some(&node) = node.and_then(|node| index.get(node)) {
                        let node = &mut view.nodes[node];
                        node.foreign_cores = node.foreign_cores.saturating_add(pod.cpu_milli);
                        let bytes = node.foreign_bytes.saturating_add(pod.request_bytes);
                        node.foreign_bytes = bytes.min(FOREIGN_BYTES_MAX);
                    }
                    continue;
                }
                Some(Ok(class)) => class,
                Some(Err(reason)) => {
                    view.ignored.push((pod.id(), reason));
                    continue;
                }
            };
            let phase = match node {
                None if pod.is_held => GatePhase::Held,
                None => GatePhase::Waiting,
                Some(name) => {
                    // Where a node is gone, what its pods may have far is still counted, until they are gone, too.
                    let node = *index.entry(name).or_insert_with(|| {
                        let shape = NodeShape { cores: 0, reclaim_cores: 0, memory_bytes: 0 };
                        view.names.push(name.to_owned());
                        view.nodes.push(GateNode { shape, foreign_cores: 0, foreign_bytes: 0, is_up: false });
                        view.names.len() - 1
                    });
                    if !self.nodes.get(name).is_some_and(|node| node.is_far) {
                        let memory_bytes = &mut view.nodes[node].shape.memory_bytes;
                        *memory_bytes = memory_bytes.saturating_add(class.least_bytes());
                    }
                    GatePhase::Running { node, far_bytes: 0 }
                }
            };
            let waited_s = if phase == GatePhase::Waiting { now_s.saturating_sub(pod.created_s) } else { 0 };
            view.jobs.push(GateJob { class, phase, waited_s });
            view.pods.push(pod);
        }
        view.ignored.extend(self.ignored.values().cloned());
        view.charge();
        view
    }
}

/// State of a cluster by index.
#[derive(Default)]
pub(super) struct ClusterView<'a> {
    pub(super) names: Vec<String>,
    pub(super) nodes: Vec<GateNode>,
    pub(super) pods: Vec<&'a PodFacts>,
    pub(super) jobs: Vec<GateJob>,
    ignored: Vec<(String, String)>,
}

impl ClusterView<'_> {
    /// Charges each job for what it adds to the overflow of its node, in the order of the jobs. So the
    /// charges of a node are its overflow.
    fn charge(&mut self) {
        let mut asked: Vec<u64> = self.nodes.iter().map(|node| node.foreign_bytes).collect();
        for job in &mut self.jobs {
            if let GatePhase::Running { node, far_bytes } = &mut job.phase {
                let memory_bytes = self.nodes[*node].shape.memory_bytes;
                let before = asked[*node].saturating_sub(memory_bytes);
                asked[*node] += job.class.memory_bytes();
                *far_bytes = asked[*node].saturating_sub(memory_bytes) - before;
            }
        }
    }
}

impl PodFacts {
    /// Returns namespace and name, separated by a slash.
    pub fn id(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Makes the class of a pod with far memory; `None` for any other. The error says what the pod
    /// lacks.
    pub(super) fn class(&self) -> Option<Result<JobClass, String>> {
        let far_bytes = self.far_bytes?;
        let memory_bytes = self.request_bytes.saturating_add(far_bytes);
        // A scheduler lets pods without a request of processors start where none is free.
        let class = GateJob::class(self.cpu_milli.max(1), memory_bytes, self.request_bytes);
        Some(class.map_err(|error| {
            format!("a pod with {FAR_RESOURCE} and {} bytes of memory is no job: {error}", self.request_bytes)
        }))
    }
}

/// Returns the label of nodes that share the pool, as a selector of the API server.
pub fn node_selector() -> String {
    format!("{NODE_LABEL}={NODE_LABEL_VALUE}")
}
