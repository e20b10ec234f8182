//! Kubernetes as the scheduler of a cluster with far memory.
//!
//! Nothing of ours is in Kubernetes. A webhook makes the memory request of a pod its least near memory
//! and enters the rest as a resource of our own ([`review`]). So the scheduler counts near memory by
//! itself. It asks an extender about pods with that resource ([`extender`]): which nodes, of those that
//! it finds, does the pool of far memory allow, and which of them is the best? The extender also binds
//! them, because only there is it certain that nobody else was promised the same.
//!
//! All that is known is in the API server ([`books`]): requests in specifications, which nobody
//! changes after admission, and the nodes of pods. Annotations are read once, by the webhook.

pub mod books;
pub mod extender;
pub mod objects;
pub mod quantity;
pub mod review;
pub mod setup;
#[cfg(test)]
mod tests;

/// Annotation of a pod that asks for far memory: the least near memory of its job, as a part, like
/// `0.5`, or as a quantity, like `4Gi`.
pub const LEAST_ANNOTATION: &str = "farfield.dev/least";
/// Annotation with the memory of the job, near and far; without it, what the container requests.
pub const MEMORY_ANNOTATION: &str = "farfield.dev/memory";
/// Annotation with the name of the container whose memory can be far, where there are several.
pub const CONTAINER_ANNOTATION: &str = "farfield.dev/container";
/// Annotation that a bound pod gets: how much it added to the pool's use, in MiB.
pub const CHARGED_ANNOTATION: &str = "farfield.dev/charged-mib";
/// Beginning of the names of all our annotations.
pub const PREFIX: &str = "farfield.dev/";
/// Resource of a pod: MiB of its memory beyond what it requests, which may be far.
pub const FAR_RESOURCE: &str = "farfield.dev/far-mib";
/// Label, and key of the taint, of nodes that share the pool.
pub const NODE_LABEL: &str = "farfield.dev/far";
/// Value of that label.
pub const NODE_LABEL_VALUE: &str = "true";

/// Reads bytes as every message that the gate gets, and answers those that are one. Fuzz targets and
/// tests call it: nothing that a peer sends may panic.
pub fn check_message(bytes: &[u8]) {
    use farfield_core::policy::cluster::{GateRules, PoolServers};
    use std::time::Duration;
    let rules = review::ReviewRules { scheduler: "farfield".into(), seccomp_profile: Some("farfield.json".into()) };
    let _ = review::review(bytes, &rules);
    let mut books = books::KubernetesBooks::default();
    if let Ok(list) = serde_json::from_slice::<objects::ObjectList<objects::NodeObject>>(bytes) {
        books.replace_nodes(&list.items);
    }
    if let Ok(list) = serde_json::from_slice::<objects::ObjectList<objects::PodObject>>(bytes) {
        books.replace_pods(&list.items, Duration::ZERO);
    }
    if let Ok(event) = serde_json::from_slice(bytes) {
        books.enter_node_event(&event);
    }
    if let Ok(event) = serde_json::from_slice(bytes) {
        books.enter_pod_event(&event);
    }
    let rules =
        GateRules { pool_bytes: Some(1 << 40), servers: PoolServers::UNKNOWN, start_within_s: 1, overtake_within_s: 1 };
    if let Ok(args) = serde_json::from_slice::<extender::ExtenderArgs>(bytes) {
        let _ = books.filter(&args, rules, 100);
        let _ = books.prioritize(&args, rules, 100);
    }
    let _ = books.state(1 << 40, 100);
}
