//! Keeps the books of a gate as the API server tells: a list, and then what changes.
//!
//! The API server ends a watch after a while, and it then goes on from the last version. Where it
//! cannot, the list is read again. A watch that has died silently ends at its deadline, before which the
//! books count as fresh.

use super::KubernetesGate;
use super::api::{ApiError, Nodes, OBJECT_BYTES_MAX, Pods, WATCH_FOR, WatchedKind};
use anyhow::Context;
use farfield_cluster::gate::kubernetes::objects::{NodeObject, PodObject, WatchEvent};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time without news from the API server after which nobody is admitted.
const FRESH_FOR: Duration = WATCH_FOR.saturating_add(Duration::from_secs(40));
/// First and longest pause after a failure.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Longest time until the first list.
const FIRST_WITHIN: Duration = Duration::from_secs(60);

/// Time of the last news from the API server, and the reason of the last failure since then.
#[derive(Default)]
pub(super) struct Freshness(Mutex<(Option<Instant>, Option<String>)>);

impl Freshness {
    fn refresh(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (Some(Instant::now()), None);
    }

    fn fail(&self, reason: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1 = Some(reason);
    }

    /// Returns the time since the last news.
    pub(super) fn age(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.map(|at| at.elapsed())
    }

    /// Returns an error in words if there was no news for too long.
    pub(super) fn check(&self, what: &str) -> Result<(), String> {
        let (at, reason) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = reason.as_deref().unwrap_or("the first answer has not come yet");
        match at {
            Some(at) if at.elapsed() < FRESH_FOR => Ok(()),
            Some(at) => Err(format!("{what} have not been read for {} s: {reason}", at.elapsed().as_secs())),
            None => Err(format!("{what} have not been read: {reason}")),
        }
    }
}

/// Starts a thread for pods and one for nodes.
pub(super) fn start(gate: &Arc<KubernetesGate>) -> anyhow::Result<()> {
    for (name, follow) in
        [("farfield-pods", follow::<Pods> as fn(&KubernetesGate) -> !), ("farfield-nodes", follow::<Nodes>)]
    {
        let gate = gate.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || follow(&gate)).context("no thread")?;
    }
    Ok(())
}

/// Waits until pods and nodes were listed.
pub(super) fn wait_until_fresh(gate: &KubernetesGate) -> anyhow::Result<()> {
    const LOOK_AGAIN: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + FIRST_WITHIN;
    loop {
        match gate.check_freshness() {
            Ok(()) => return Ok(()),
            Err(reason) if Instant::now() >= deadline => anyhow::bail!(reason),
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Kind of objects that the books have.
trait Followed: WatchedKind {
    fn freshness(gate: &KubernetesGate) -> &Freshness;
    /// Replaces all objects, and returns the version from which a watch goes on.
    fn list(gate: &KubernetesGate) -> Result<String, ApiError>;
    /// Enters an event. Returns the version after it, or `None` if the watch cannot go on.
    fn enter(gate: &KubernetesGate, event: &WatchEvent<Self::Object>) -> Option<String>;
}

impl Followed for Pods {
    fn freshness(gate: &KubernetesGate) -> &Freshness {
        &gate.pods
    }

    fn list(gate: &KubernetesGate) -> Result<String, ApiError> {
        let asked = gate.started.elapsed();
        let list = gate.api.list_pods()?;
        gate.books().replace_pods(&list.items, asked);
        Ok(list.version().to_owned())
    }

    fn enter(gate: &KubernetesGate, event: &WatchEvent<PodObject>) -> Option<String> {
        gate.books().enter_pod_event(event).then(|| event.object().map_or("", PodObject::version).to_owned())
    }
}

impl Followed for Nodes {
    fn freshness(gate: &KubernetesGate) -> &Freshness {
        &gate.nodes
    }

    fn list(gate: &KubernetesGate) -> Result<String, ApiError> {
        let list = gate.api.list_nodes()?;
        gate.books().replace_nodes(&list.items);
        Ok(list.version().to_owned())
    }

    fn enter(gate: &KubernetesGate, event: &WatchEvent<NodeObject>) -> Option<String> {
        gate.books().enter_node_event(event).then(|| event.object().map_or("", NodeObject::version).to_owned())
    }
}

/// Follows the API server for ever.
fn follow<K: Followed>(gate: &KubernetesGate) -> ! {
    let mut pause = PAUSES.0;
    loop {
        match list_and_watch::<K>(gate, &mut pause) {
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(%error, "what {} has is read again", K::PATH);
                K::freshness(gate).fail(error.to_string());
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }
}

/// Lists, and watches until that cannot go on.
fn list_and_watch<K: Followed>(gate: &KubernetesGate, pause: &mut Duration) -> Result<(), ApiError> {
    let mut version = K::list(gate)?;
    K::freshness(gate).refresh();
    *pause = PAUSES.0;
    while !gate.books().has_stale_reservation(gate.started.elapsed()) {
        let mut lines = gate.api.watch::<K>(&version)?;
        K::freshness(gate).refresh();
        let opened = Instant::now();
        // The end of a watch looks like an end of the stream, or comes at its deadline.
        while let Ok(Some(line)) = lines.next_line(OBJECT_BYTES_MAX) {
            let event: WatchEvent<K::Object> = serde_json::from_slice(&line).map_err(ApiError::Malformed)?;
            let Some(after) = K::enter(gate, &event) else { return Ok(()) };
            K::freshness(gate).refresh();
            version = after;
        }
        // An API server that ends each watch at once is not asked all the time.
        std::thread::sleep(PAUSES.0.saturating_sub(opened.elapsed()));
    }
    Ok(())
}
