//! Objects of Kubernetes, as far as the gate reads them.
//!
//! Only what the API server has checked and users cannot change later is believed: requests in the
//! specification of a pod, not its annotations.

use super::quantity::{thousandths, units};
use super::{FAR_RESOURCE, NODE_LABEL, NODE_LABEL_VALUE};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;

/// Amounts of resources by name, as Kubernetes writes them.
type Amounts = BTreeMap<String, String>;

/// Takes `null` for an empty value, as Go writes it.
fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: String,
    namespace: String,
    uid: String,
    resource_version: String,
    creation_timestamp: Option<String>,
    deletion_timestamp: Option<String>,
    #[serde(deserialize_with = "nullable")]
    labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    #[serde(deserialize_with = "nullable")]
    requests: Amounts,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    #[serde(deserialize_with = "nullable")]
    resources: Resources,
    restart_policy: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    node_name: Option<String>,
    priority: Option<i32>,
    #[serde(deserialize_with = "nullable")]
    containers: Vec<Container>,
    #[serde(deserialize_with = "nullable")]
    init_containers: Vec<Container>,
    #[serde(deserialize_with = "nullable")]
    overhead: Amounts,
    #[serde(deserialize_with = "nullable")]
    scheduling_gates: Vec<serde::de::IgnoredAny>,
    resources: Option<Resources>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PodStatus {
    phase: Option<String>,
}

/// Pod as the API server sends it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodObject {
    metadata: Metadata,
    spec: PodSpec,
    status: PodStatus,
}

/// Facts of a pod that a gate decides by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Identity of the pod, which no other pod ever has.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod in its namespace.
    pub name: String,
    /// Node of the pod, if it has one.
    pub node: Option<String>,
    /// Near memory that the scheduler counts, in bytes: the least of a job.
    pub request_bytes: u64,
    /// Thousandths of processors that the scheduler counts.
    pub cpu_milli: u32,
    /// Memory beyond the request that may be far, in bytes; `None` for a pod without far memory.
    pub far_bytes: Option<u64>,
    /// Priority; higher is first.
    pub priority: i32,
    /// Time of the creation in seconds since the epoch.
    pub created_s: u64,
    /// Whether the pod has ended, and uses nothing any more.
    pub is_over: bool,
    /// Whether the pod waits for something that no scheduler decides, or is being deleted.
    pub is_held: bool,
}

impl PodObject {
    /// Reads what a gate needs. The error says what cannot be understood.
    pub fn facts(&self) -> Result<PodFacts, String> {
        let Metadata { name, namespace, uid, creation_timestamp, deletion_timestamp, .. } = &self.metadata;
        let far_mib = self.request(FAR_RESOURCE, units)?;
        let cpu_milli = self.request("cpu", thousandths)?.unwrap_or(0);
        let is_over = self.status.phase.as_deref().is_some_and(|phase| phase == "Succeeded" || phase == "Failed");
        Ok(PodFacts {
            uid: uid.clone(),
            namespace: namespace.clone(),
            name: name.clone(),
            node: self.spec.node_name.clone().filter(|node| !node.is_empty()),
            request_bytes: self.request("memory", units)?.unwrap_or(0),
            cpu_milli: u32::try_from(cpu_milli).map_err(|_| format!("{cpu_milli}m processors are too many"))?,
            far_bytes: far_mib.map(|mib| mib.saturating_mul(1 << 20)),
            priority: self.spec.priority.unwrap_or(0),
            created_s: creation_timestamp.as_deref().and_then(seconds).unwrap_or(0),
            is_over,
            is_held: deletion_timestamp.is_some() || !self.spec.scheduling_gates.is_empty(),
        })
    }

    /// Returns the effective request of a resource, as Kubernetes defines it: that of the containers
    /// and their sidecars, or of the initialisation if that is more, and the overhead.
    fn request(&self, name: &str, read: fn(&str) -> Option<u64>) -> Result<Option<u64>, String> {
        let mut is_named = false;
        let mut amount = |amounts: &Amounts| match amounts.get(name) {
            None => Ok(0),
            Some(text) => {
                is_named = true;
                read(text).ok_or_else(|| format!("its request of {name}, {text:?}, is no quantity"))
            }
        };
        let spec = &self.spec;
        let overhead = amount(&spec.overhead)?;
        let of_pod = spec.resources.as_ref().filter(|resources| resources.requests.contains_key(name));
        let mut peak = 0u64;
        let mut sum = 0u64;
        if let Some(resources) = of_pod {
            peak = amount(&resources.requests)?;
        } else {
            for container in &spec.init_containers {
                let own = amount(&container.resources.requests)?;
                peak = peak.max(sum.saturating_add(own));
                if container.restart_policy.as_deref() == Some("Always") {
                    sum = sum.saturating_add(own);
                }
            }
            for container in &spec.containers {
                sum = sum.saturating_add(amount(&container.resources.requests)?);
            }
        }
        let all = peak.max(sum).saturating_add(overhead);
        Ok(is_named.then_some(all))
    }

    /// Returns the version of the object, from which a watch goes on.
    pub fn version(&self) -> &str {
        &self.metadata.resource_version
    }

    /// Returns the identity of the pod.
    pub fn uid(&self) -> &str {
        &self.metadata.uid
    }

    /// Returns namespace and name, separated by a slash.
    pub fn id(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct NodeSpec {
    unschedulable: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct NodeCondition {
    r#type: String,
    status: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct NodeStatus {
    #[serde(deserialize_with = "nullable")]
    allocatable: Amounts,
    #[serde(deserialize_with = "nullable")]
    conditions: Vec<NodeCondition>,
}

/// Node as the API server sends it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeObject {
    metadata: Metadata,
    spec: NodeSpec,
    status: NodeStatus,
}

/// Facts of a node that a gate decides by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFacts {
    /// Name of the node.
    pub name: String,
    /// Thousandths of processors for pods.
    pub cpu_milli: u32,
    /// Near memory for pods in bytes.
    pub memory_bytes: u64,
    /// Whether pods with far memory can start there.
    pub is_up: bool,
    /// Whether the node shares the pool.
    pub is_far: bool,
}

impl NodeObject {
    /// Reads what a gate needs. Nothing starts on a node whose amounts cannot be understood.
    pub fn facts(&self) -> NodeFacts {
        let amount = |name, read: fn(&str) -> Option<u64>| self.status.allocatable.get(name).and_then(|it| read(it));
        let is_ready = self.status.conditions.iter().any(|it| it.r#type == "Ready" && it.status == "True");
        let is_far = self.metadata.labels.get(NODE_LABEL).is_some_and(|value| value == NODE_LABEL_VALUE);
        NodeFacts {
            name: self.metadata.name.clone(),
            cpu_milli: amount("cpu", thousandths).and_then(|milli| u32::try_from(milli).ok()).unwrap_or(0),
            memory_bytes: amount("memory", units).unwrap_or(0),
            is_up: is_ready && is_far && !self.spec.unschedulable,
            is_far,
        }
    }

    /// Returns the version of the object, from which a watch goes on.
    pub fn version(&self) -> &str {
        &self.metadata.resource_version
    }

    /// Returns the name of the node.
    pub fn name(&self) -> &str {
        &self.metadata.name
    }
}

/// List of objects, with the version from which a watch goes on.
#[derive(Clone, Debug, Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub struct ObjectList<T> {
    #[serde(default)]
    metadata: ListMetadata,
    /// The objects.
    #[serde(default = "Vec::new", deserialize_with = "nullable")]
    pub items: Vec<T>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ListMetadata {
    resource_version: String,
}

impl<T> ObjectList<T> {
    /// Returns the version of the list.
    pub fn version(&self) -> &str {
        &self.metadata.resource_version
    }
}

/// Event of a watch.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum WatchEvent<T> {
    /// The object is new.
    Added(T),
    /// The object has changed.
    Modified(T),
    /// The object is gone.
    Deleted(T),
    /// Nothing has changed up to a version.
    Bookmark(T),
    /// The watch cannot go on: list again.
    Error(serde::de::IgnoredAny),
}

impl<T> WatchEvent<T> {
    /// Returns the object of the event; `None` for an error.
    pub fn object(&self) -> Option<&T> {
        match self {
            WatchEvent::Added(object)
            | WatchEvent::Modified(object)
            | WatchEvent::Deleted(object)
            | WatchEvent::Bookmark(object) => Some(object),
            WatchEvent::Error(_) => None,
        }
    }
}

/// Reads a time such as `2026-11-29T16:55:15Z` as seconds since the epoch.
fn seconds(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, separator| -> Option<[u64; 3]> {
        let mut parts = text.split(separator).map(|part| part.parse::<u64>().ok().filter(|it| *it < 10_000));
        let all = [parts.next()??, parts.next()??, parts.next()??];
        parts.next().is_none().then_some(all)
    };
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time.split('.').next()?, ':')?;
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 1970-01-01 in the Gregorian calendar, with years that begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    Some((days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    //! Guards against a pod that counts with less than its scheduler counts.
    use super::*;

    fn facts(text: &str) -> Result<PodFacts, String> {
        serde_json::from_str::<PodObject>(text).unwrap().facts()
    }

    #[test]
    fn a_pod_counts_as_the_scheduler_counts_it() {
        let requests = |memory: &str| format!(r#"{{"resources":{{"requests":{{"memory":"{memory}"}}}}}}"#);
        let sidecar = r#"{"restartPolicy":"Always","resources":{"requests":{"memory":"10","cpu":"250m"}}}"#;
        let pod = format!(
            r#"{{"metadata":{{"name":"p","namespace":"n","uid":"u","creationTimestamp":"2026-11-29T16:55:15Z"}},
            "spec":{{"priority":7,"overhead":{{"memory":"1"}},"initContainers":[{sidecar},{}],
            "containers":[{},{},{{"resources":{{"requests":{{"farfield.dev/far-mib":"3"}}}}}}]}},
            "status":{{"phase":"Pending"}}}}"#,
            requests("100"),
            requests("20"),
            requests("40"),
        );
        let expected = PodFacts {
            uid: "u".into(),
            namespace: "n".into(),
            name: "p".into(),
            node: None,
            request_bytes: 111,
            cpu_milli: 250,
            far_bytes: Some(3 << 20),
            priority: 7,
            created_s: 1_795_971_315,
            is_over: false,
            is_held: false,
        };
        assert_eq!(facts(&pod), Ok(expected.clone()));
        assert_eq!(facts(&pod.replace("\"100\"", "\"1\"")).unwrap().request_bytes, 71);
        let of_pod = pod.replace("\"priority\"", r#""resources":{"requests":{"memory":"500"}},"priority""#);
        assert_eq!(facts(&of_pod).unwrap().request_bytes, 501);
        let bound = pod.replace("\"priority\"", r#""nodeName":"n1","priority""#).replace("Pending", "Failed");
        let bound = facts(&bound).unwrap();
        assert_eq!((bound.node.as_deref(), bound.is_over), (Some("n1"), true));
    }

    #[test]
    fn what_go_writes_as_null_is_empty_and_nonsense_is_refused() {
        let empty =
            r#"{"metadata":{"uid":"u","labels":null},"spec":{"containers":null,"overhead":null,"nodeName":""}}"#;
        let pod = facts(empty).unwrap();
        assert_eq!((pod.request_bytes, pod.cpu_milli, pod.far_bytes, pod.node), (0, 0, None, None));
        let nonsense = r#"{"spec":{"containers":[{"resources":{"requests":{"memory":"much"}}}]}}"#;
        assert!(facts(nonsense).unwrap_err().contains("\"much\""));
        assert!(serde_json::from_str::<PodObject>(r#"{"spec":{"containers":7}}"#).is_err());
        let held = r#"{"spec":{"schedulingGates":[{"name":"quota"}]}}"#;
        assert!(facts(held).unwrap().is_held);
        assert!(facts(r#"{"metadata":{"deletionTimestamp":"2026-11-29T16:55:15Z"}}"#).unwrap().is_held);
    }

    #[test]
    fn a_node_is_up_if_it_is_labelled_ready_and_not_cordoned() {
        let node = r#"{"metadata":{"name":"a","labels":{"farfield.dev/far":"true"}},"spec":{},"status":{
            "allocatable":{"cpu":"47500m","memory":"190Gi"},"conditions":[{"type":"Ready","status":"True"}]}}"#;
        let facts = |text: &str| serde_json::from_str::<NodeObject>(text).unwrap().facts();
        let name = "a".to_owned();
        let up = NodeFacts { name, cpu_milli: 47_500, memory_bytes: 190 << 30, is_up: true, is_far: true };
        assert_eq!(facts(node), up);
        for (from, to) in [("true", "no"), ("True", "Unknown"), (r#""spec":{}"#, r#""spec":{"unschedulable":true}"#)] {
            assert!(!facts(&node.replace(from, to)).is_up, "{to}");
        }
        assert_eq!(facts(&node.replace("190Gi", "all")).memory_bytes, 0);
    }

    #[test]
    fn times_are_read() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-02-29T23:59:59Z", Some(951_868_799)),
            ("2026-11-29T16:55:15.123456Z", Some(1_795_971_315)),
            ("2026-11-29T16:55:15+01:00", None),
            ("1969-12-31T00:00:00Z", None),
            ("2026-13-01T00:00:00Z", None),
            ("99999-01-01T00:00:00Z", None),
            ("T", None),
            ("", None),
        ] {
            assert_eq!(seconds(text), expected, "{text}");
        }
    }

    #[test]
    fn lists_and_events_are_read() {
        let list: ObjectList<PodObject> =
            serde_json::from_str(r#"{"metadata":{"resourceVersion":"7"},"items":null}"#).unwrap();
        assert_eq!((list.version(), list.items.len()), ("7", 0));
        let event = |text: &str| serde_json::from_str::<WatchEvent<PodObject>>(text);
        let added = event(r#"{"type":"ADDED","object":{"metadata":{"uid":"u","resourceVersion":"8"}}}"#).unwrap();
        assert!(matches!(added, WatchEvent::Added(pod) if pod.uid() == "u" && pod.version() == "8"));
        assert!(matches!(event(r#"{"type":"ERROR","object":{"code":410}}"#), Ok(WatchEvent::Error(_))));
        assert!(event(r#"{"type":"OTHER","object":{}}"#).is_err());
    }
}
