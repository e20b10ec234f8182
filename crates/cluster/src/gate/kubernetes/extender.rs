//! Answers to the scheduler of Kubernetes, which asks about one pod at a time.
//!
//! *Filter* and *prioritize* are the admission of [`farfield_core::policy::cluster::gate`]: nodes where
//! the least of all jobs fits near and the pool has room; the best is where all of the job is near. The
//! scheduler decides about one pod after another, but binds in the background. So *bind* decides again,
//! and reserves in the same step. Names of fields are those of Go.

use super::books::{ClusterView, KubernetesBooks};
use super::objects::{PodFacts, PodObject};
use farfield_core::policy::cluster::{GateJob, GateOffer, GatePhase, GateRules, GateWait, offer};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Highest score that an extender can give.
const BEST: i64 = 10;
/// Score of other nodes where all of a job is near.
const NEAR: i64 = 5;
/// Score of nodes where a job is partly far.
const FAR: i64 = 1;

/// Question about a pod.
#[derive(Clone, Debug, Deserialize)]
pub struct ExtenderArgs {
    /// Pod that waits.
    #[serde(rename = "Pod")]
    pub pod: PodObject,
    /// Nodes that the scheduler has found; absent if it sends whole nodes.
    #[serde(rename = "NodeNames")]
    pub nodes: Option<Vec<String>>,
}

/// Answer to *filter*.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct FilterAnswer {
    /// Nodes where the pod may start.
    pub node_names: Vec<String>,
    /// Reasons of all others. Nothing that the scheduler could evict would help there.
    pub failed_and_unresolvable_nodes: BTreeMap<String, String>,
    /// Reason why there is no answer, or empty.
    pub error: String,
}

/// Score of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority {
    /// Name of the node.
    pub host: String,
    /// Score from 0 to 10.
    pub score: i64,
}

/// Order to bind a pod.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindArgs {
    /// Name of the pod.
    pub pod_name: String,
    /// Namespace of the pod.
    pub pod_namespace: String,
    /// Identity of the pod.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// Node that the scheduler has chosen.
    pub node: String,
}

/// Answer to *bind*.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindAnswer {
    /// Reason why the pod was not bound, or empty.
    pub error: String,
}

/// Reason why a pod is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The pod waits for room.
    #[error(transparent)]
    Wait(#[from] GateWait),
    /// The scheduler does not send names of nodes.
    #[error("the scheduler sends whole nodes: set nodeCacheCapable in its configuration of the extender")]
    NoNames,
    /// The pod is none with far memory, or cannot be understood.
    #[error("{0}")]
    NoJob(String),
    /// The pod has a node, or has ended.
    #[error("the pod is bound to {0} already, or has ended")]
    NotWaiting(String),
    /// The node does not share the pool.
    #[error("node {0} does not share the pool: it has no label farfield.dev/far=true")]
    NoNode(String),
    /// The pod that waited is gone.
    #[error("the pod was deleted, and another one has its name")]
    OtherPod,
}

/// Admission of one pod, for programs and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Node of the pod.
    pub node: String,
    /// Part of the pool that the pod adds to its use, in bytes.
    pub far_bytes: u64,
}

impl KubernetesBooks {
    /// Says which of the nodes that the scheduler has found the pod may start on.
    pub fn filter(&self, args: &ExtenderArgs, rules: GateRules, now_s: u64) -> Result<FilterAnswer, AdmissionError> {
        let names = args.nodes.as_ref().ok_or(AdmissionError::NoNames)?;
        let pod = args.pod.facts().map_err(AdmissionError::NoJob)?;
        let mut answer = FilterAnswer::default();
        match self.offer(&pod, rules, now_s)? {
            Ok(offer) => {
                for name in names {
                    match offer.on(name) {
                        Ok(_) => answer.node_names.push(name.clone()),
                        Err(reason) => drop(answer.failed_and_unresolvable_nodes.insert(name.clone(), reason)),
                    }
                }
            }
            Err(wait) => {
                let reason = |name: &String| (name.clone(), sentence(wait));
                answer.failed_and_unresolvable_nodes = names.iter().map(reason).collect();
            }
        }
        Ok(answer)
    }

    /// Scores the nodes that are left: the one that the gate would choose, others where all is near,
    /// and the rest.
    pub fn prioritize(
        &self,
        args: &ExtenderArgs,
        rules: GateRules,
        now_s: u64,
    ) -> Result<Vec<HostPriority>, AdmissionError> {
        let names = args.nodes.as_ref().ok_or(AdmissionError::NoNames)?;
        let pod = args.pod.facts().map_err(AdmissionError::NoJob)?;
        let offer = self.offer(&pod, rules, now_s)??;
        let mut indices: Vec<usize> = names.iter().filter_map(|name| offer.index(name)).collect();
        indices.sort_unstable();
        let best = offer.offer.best(indices.iter().copied());
        let score = |name: &String| match offer.index(name).map(|index| (index, offer.offer.nodes[index])) {
            Some((index, Ok(_))) if Some(index) == best => BEST,
            Some((_, Ok(0))) => NEAR,
            Some((_, Ok(_))) => FAR,
            _ => 0,
        };
        Ok(names.iter().map(|name| HostPriority { host: name.clone(), score: score(name) }).collect())
    }

    /// Decides whether a pod, as the API server has just told it, may be bound to the node that the
    /// scheduler has chosen, and reserves what it needs there. Who sends the binding then
    /// [settles](KubernetesBooks::settle) the reservation.
    pub fn reserve_binding(
        &mut self,
        args: &BindArgs,
        pod: &PodObject,
        rules: GateRules,
        now_s: u64,
        now: Duration,
    ) -> Result<Admission, AdmissionError> {
        let pod = pod.facts().map_err(AdmissionError::NoJob)?;
        if pod.uid != args.pod_uid {
            return Err(AdmissionError::OtherPod);
        }
        if pod.node.is_some() || pod.is_over {
            return Err(AdmissionError::NotWaiting(pod.node.unwrap_or_default()));
        }
        // Whose turn it is was decided when the scheduler asked.
        let rules = GateRules { overtake_within_s: u64::MAX, ..rules };
        let offer = self.offer(&pod, rules, now_s)??;
        let index = offer.index(&args.node).ok_or_else(|| AdmissionError::NoNode(args.node.clone()))?;
        let far_bytes = offer.offer.nodes[index]?;
        self.reserve(&pod, &args.node, now);
        Ok(Admission { node: args.node.clone(), far_bytes })
    }

    /// Decides about a pod that may not be in the books yet.
    fn offer(
        &self,
        pod: &PodFacts,
        rules: GateRules,
        now_s: u64,
    ) -> Result<Result<NamedOffer, GateWait>, AdmissionError> {
        let no_job =
            || AdmissionError::NoJob(format!("{} has no far memory: it needs {}", pod.id(), super::FAR_RESOURCE));
        let class = pod.class().ok_or_else(no_job)?.map_err(AdmissionError::NoJob)?;
        let mut view = self.view(now_s, Some(&pod.uid));
        let asked = match view.pods.iter().position(|other| other.uid == pod.uid) {
            Some(asked) => asked,
            None => {
                let phase = if pod.is_held { GatePhase::Held } else { GatePhase::Waiting };
                let key = |pod: &PodFacts| (core::cmp::Reverse(pod.priority), pod.created_s);
                let at = view.pods.partition_point(|other| key(other) <= key(pod));
                view.jobs.insert(at, GateJob { class, phase, waited_s: now_s.saturating_sub(pod.created_s) });
                at
            }
        };
        let ClusterView { names, nodes, jobs, .. } = view;
        let mut offer = match offer(&nodes, &jobs, asked, rules) {
            Ok(offer) => offer,
            Err(wait) => return Ok(Err(wait)),
        };
        // A binding whose answer was lost may still succeed, so it can only be sent again.
        if let Some(reserved) = self.reserved_node(&pod.uid) {
            for (_, fit) in names.iter().zip(&mut offer.nodes).filter(|(name, _)| *name != reserved) {
                *fit = Err(GateWait::Starting);
            }
        }
        Ok(Ok(NamedOffer { names, offer }))
    }
}

/// Offer with names of nodes.
struct NamedOffer {
    names: Vec<String>,
    offer: GateOffer,
}

impl NamedOffer {
    fn index(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
    }

    /// Returns the part of the pool that the pod would add on this node, or the reason why it may not
    /// start there.
    fn on(&self, name: &str) -> Result<u64, String> {
        let index = self.index(name).ok_or_else(|| AdmissionError::NoNode(name.to_owned()).to_string())?;
        self.offer.nodes[index].map_err(|wait| sentence(self.best_of_its_kind(wait)))
    }

    /// Replaces the amounts of a reason by those of the node that lacks the least, because the
    /// scheduler counts the nodes that have the same reason.
    fn best_of_its_kind(&self, wait: GateWait) -> GateWait {
        let same = |other: &GateWait| core::mem::discriminant(other) == core::mem::discriminant(&wait);
        let missing = |wait: &GateWait| match *wait {
            GateWait::Near { missing_bytes } | GateWait::Far { missing_bytes } => missing_bytes,
            _ => 0,
        };
        let reasons = self.offer.nodes.iter().filter_map(|fit| fit.err()).filter(same);
        reasons.min_by_key(missing).unwrap_or(wait)
    }
}

/// Says a reason among those of other plug-ins.
fn sentence(wait: GateWait) -> String {
    format!("farfield: {wait}")
}
