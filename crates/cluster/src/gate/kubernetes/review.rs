//! Webhook of pods: what a pod with our annotations is changed into, or why it is refused.
//!
//! The API server sends a pod before it stores it. The memory request of the container becomes the
//! least near memory, so the scheduler counts the pod with that. A pod that has been changed already is
//! changed into the same again.

use super::quantity::units;
use super::{
    CHARGED_ANNOTATION, CONTAINER_ANNOTATION, FAR_RESOURCE, LEAST_ANNOTATION, MEMORY_ANNOTATION, NODE_LABEL,
    NODE_LABEL_VALUE, PREFIX,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Least near memory of any job in MiB, below which programs do not run.
const LEAST_MIB_MIN: u64 = 16;
/// Most MiB of a job.
const MEMORY_MIB_MAX: u64 = 1 << 32;
/// Name of a pod's scheduler unless it says another.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Settings of pods with far memory, beside their memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReviewRules {
    /// Name of the scheduler that asks the extender.
    pub scheduler: String,
    /// Seccomp profile on the nodes that allows `userfaultfd`, for containers that name none.
    pub seccomp_profile: Option<String>,
}

#[derive(Deserialize)]
struct AdmissionReview {
    #[serde(rename = "apiVersion")]
    api_version: String,
    request: AdmissionRequest,
}

#[derive(Deserialize)]
struct AdmissionRequest {
    uid: String,
    #[serde(default)]
    kind: ObjectKind,
    #[serde(default)]
    operation: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    object: Value,
}

#[derive(Default, Deserialize)]
struct ObjectKind {
    #[serde(default)]
    kind: String,
}

/// Reason why bytes are no review.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The bytes are no JSON, or not that of a review.
    #[error("this is no AdmissionReview: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The review has another version.
    #[error("{0:?} is not admission.k8s.io/v1: set admissionReviewVersions to [\"v1\"]")]
    Version(String),
}

/// Answer to a review.
#[derive(Clone, Debug, PartialEq)]
pub struct ReviewAnswer {
    /// Namespace and name of the pod, as far as they are known.
    pub pod: String,
    /// Message that is sent to the API server, as JSON.
    pub message: Value,
    /// Decision about the pod.
    pub verdict: ReviewVerdict,
}

/// Decision about a pod.
#[derive(Clone, Debug, PartialEq)]
pub enum ReviewVerdict {
    /// The pod does not ask for far memory, and is left as it is.
    Untouched,
    /// The pod gets far memory.
    Changed {
        /// Memory of its job in MiB.
        memory_mib: u64,
        /// Part of it that is near at the least, in MiB.
        least_mib: u64,
    },
    /// The pod is refused, with what its author should do.
    Refused(String),
}

/// Reviews a pod: decodes the message of the API server, decides, and encodes the answer.
pub fn review(message: &[u8], rules: &ReviewRules) -> Result<ReviewAnswer, ReviewError> {
    let AdmissionReview { api_version, request } = serde_json::from_slice(message)?;
    if api_version != "admission.k8s.io/v1" {
        return Err(ReviewError::Version(api_version));
    }
    let metadata = &request.object["metadata"];
    let name = metadata["name"].as_str().or_else(|| metadata["generateName"].as_str()).unwrap_or_default();
    let pod = format!("{}/{name}", request.namespace);
    let is_new_pod = request.kind.kind == "Pod" && request.operation == "CREATE";
    let changed = if is_new_pod { change(&request.object, rules) } else { Ok(None) };
    let mut response = json!({ "uid": request.uid, "allowed": changed.is_ok() });
    let verdict = match changed {
        Ok(None) => ReviewVerdict::Untouched,
        Ok(Some(change)) => {
            response["patchType"] = "JSONPatch".into();
            response["patch"] = STANDARD.encode(Value::Array(change.patch).to_string()).into();
            ReviewVerdict::Changed { memory_mib: change.memory_mib, least_mib: change.least_mib }
        }
        Err(reason) => {
            response["status"] = json!({ "code": 422, "reason": "Invalid", "message": format!("farfield: {reason}") });
            ReviewVerdict::Refused(reason)
        }
    };
    let message = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response });
    Ok(ReviewAnswer { pod, message, verdict })
}

/// Patch of a pod, by which it gets far memory.
struct PodChange {
    patch: Vec<Value>,
    memory_mib: u64,
    least_mib: u64,
}

/// Returns how a pod is changed; `None` if it does not ask for far memory.
fn change(pod: &Value, rules: &ReviewRules) -> Result<Option<PodChange>, String> {
    let empty = Map::new();
    let annotations = pod["metadata"]["annotations"].as_object().unwrap_or(&empty);
    let known = [LEAST_ANNOTATION, MEMORY_ANNOTATION, CONTAINER_ANNOTATION, CHARGED_ANNOTATION];
    let ours = annotations.keys().filter(|name| name.starts_with(PREFIX));
    if let Some(unknown) = ours.clone().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("the annotation {unknown} is not known: there are {}", known[..3].join(", ")));
    }
    let text = |name: &str| annotations.get(name).and_then(Value::as_str);
    let Some(least) = text(LEAST_ANNOTATION) else {
        return match ours.into_iter().find(|name| *name != CHARGED_ANNOTATION) {
            Some(other) => Err(format!("{other} alone asks for nothing: add {LEAST_ANNOTATION}: \"0.5\"")),
            None => Ok(None),
        };
    };
    let spec = &pod["spec"];
    check_placement(spec, rules)?;
    let (index, container) = container(spec, text(CONTAINER_ANNOTATION))?;
    let memory_mib = memory_mib(text(MEMORY_ANNOTATION), container)?;
    let least_mib = least_mib(least, memory_mib)?;
    check_limit(container, memory_mib)?;

    let mut patch = Vec::new();
    let mut set = |path: String, value: Value| patch.push(json!({ "op": "add", "path": path, "value": value }));
    let escaped = MEMORY_ANNOTATION.replace('/', "~1");
    set(format!("/metadata/annotations/{escaped}"), format!("{memory_mib}Mi").into());
    // Another webhook may add containers, and this one is then asked again.
    let name = container["name"].as_str().unwrap_or_default();
    set(format!("/metadata/annotations/{}", CONTAINER_ANNOTATION.replace('/', "~1")), name.into());
    let at = format!("/spec/containers/{index}");
    set(format!("{at}/resources"), resources(container, memory_mib, least_mib));
    set(format!("{at}/env"), environment(container, memory_mib, least_mib));
    if let Some(security) = security(spec, container, rules) {
        set(format!("{at}/securityContext"), security);
    }
    set("/spec/schedulerName".into(), rules.scheduler.clone().into());
    let mut selector = object(&spec["nodeSelector"]);
    selector.insert(NODE_LABEL.into(), NODE_LABEL_VALUE.into());
    set("/spec/nodeSelector".into(), selector.into());
    let toleration = json!({ "key": NODE_LABEL, "operator": "Exists", "effect": "NoSchedule" });
    let mut tolerations = spec["tolerations"].as_array().cloned().unwrap_or_default();
    if !tolerations.contains(&toleration) {
        tolerations.push(toleration);
    }
    set("/spec/tolerations".into(), tolerations.into());
    Ok(Some(PodChange { patch, memory_mib, least_mib }))
}

fn check_placement(spec: &Value, rules: &ReviewRules) -> Result<(), String> {
    if spec["nodeName"].as_str().is_some_and(|name| !name.is_empty()) {
        return Err("the scheduler chooses the node of a pod with far memory: drop spec.nodeName".into());
    }
    match spec["schedulerName"].as_str() {
        None | Some("" | DEFAULT_SCHEDULER) => {}
        Some(name) if name == rules.scheduler => {}
        Some(name) => {
            let own = &rules.scheduler;
            return Err(format!(
                "pods with far memory are scheduled by {own}: drop spec.schedulerName, which is {name}"
            ));
        }
    }
    if spec["resources"]["requests"]["memory"].is_string() || spec["resources"]["limits"]["memory"].is_string() {
        return Err("far memory is that of a container: drop the memory of spec.resources".into());
    }
    Ok(())
}

/// Returns the container whose memory can be far, and its index.
fn container<'a>(spec: &'a Value, name: Option<&str>) -> Result<(usize, &'a Value), String> {
    let containers = spec["containers"].as_array().map(Vec::as_slice).unwrap_or_default();
    match (name, containers) {
        (None, [only]) => Ok((0, only)),
        (None, []) => Err("the pod has no container".into()),
        (None, [..]) => Err(format!("the pod has several containers: say which one by {CONTAINER_ANNOTATION}: NAME")),
        (Some(name), _) => {
            let found = containers.iter().enumerate().find(|(_, container)| container["name"].as_str() == Some(name));
            found.ok_or_else(|| format!("{CONTAINER_ANNOTATION}: the pod has no container {name:?}"))
        }
    }
}

/// Returns the memory of the job in MiB, rounded up.
fn memory_mib(annotation: Option<&str>, container: &Value) -> Result<u64, String> {
    let request = container["resources"]["requests"]["memory"].as_str();
    let (what, text) = match (annotation, request) {
        (Some(text), _) => (MEMORY_ANNOTATION, text),
        (None, Some(text)) => ("the container's request of memory", text),
        (None, None) => {
            return Err(format!(
                "say how much memory the job needs, near and far: resources.requests.memory, or \
                 {MEMORY_ANNOTATION}: 8Gi"
            ));
        }
    };
    let mib = units(text).map(|bytes| bytes.div_ceil(1 << 20));
    match mib {
        Some(mib) if (1..=MEMORY_MIB_MAX).contains(&mib) => Ok(mib),
        Some(_) => Err(format!("{what} is {text}, which is nothing, or more than any node has")),
        None => Err(format!("{what} is {text:?}, which is no quantity: write it like 8Gi")),
    }
}

/// Returns the least near memory in MiB, rounded up.
fn least_mib(text: &str, memory_mib: u64) -> Result<u64, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let mib = if is_plain {
        let part = text.parse::<f64>().ok().filter(|part| *part > 0.0 && *part <= 1.0);
        // A part of an integer is an integer again, although its product may be rounded up.
        part.map(|part| ceil(part * memory_mib as f64 - 1e-6))
    } else {
        units(text).map(|bytes| bytes.div_ceil(1 << 20))
    };
    let mib = mib.ok_or_else(|| {
        format!("{LEAST_ANNOTATION} is {text:?}, which is neither a part, like \"0.5\", nor a quantity, like 4Gi")
    })?;
    let least_mib = mib.max(LEAST_MIB_MIN);
    if least_mib > memory_mib {
        return Err(format!(
            "the least near memory, {least_mib} MiB, is more than the memory of the job, {memory_mib} MiB"
        ));
    }
    Ok(least_mib)
}

/// Rounds a number up that is at least 0 and below 2^53.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "its argument is in range")]
fn ceil(number: f64) -> u64 {
    number.ceil().max(0.0) as u64
}

/// A job has all of its memory near when there is room.
fn check_limit(container: &Value, memory_mib: u64) -> Result<(), String> {
    let Some(text) = container["resources"]["limits"]["memory"].as_str() else { return Ok(()) };
    match units(text) {
        Some(bytes) if bytes >> 20 >= memory_mib => Ok(()),
        _ => Err(format!(
            "the container's limit of memory, {text}, is below the memory of the job, {memory_mib} MiB, and would \
             end a job that has all of it near: raise resources.limits.memory, or drop it"
        )),
    }
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

fn resources(container: &Value, memory_mib: u64, least_mib: u64) -> Value {
    let mut resources = object(&container["resources"]);
    let far = Value::from((memory_mib - least_mib).to_string());
    let mut requests = object(&container["resources"]["requests"]);
    requests.insert("memory".into(), format!("{least_mib}Mi").into());
    requests.insert(FAR_RESOURCE.into(), far.clone());
    // Kubernetes wants both to be the same for a resource that it does not know.
    let mut limits = object(&container["resources"]["limits"]);
    limits.insert(FAR_RESOURCE.into(), far);
    resources.insert("requests".into(), requests.into());
    resources.insert("limits".into(), limits.into());
    resources.into()
}

/// `farfield run --agent` reads these variables.
fn environment(container: &Value, memory_mib: u64, least_mib: u64) -> Value {
    let ours = [("FARFIELD_JOB_MEM", memory_mib), ("FARFIELD_JOB_LEAST", least_mib)];
    let mut variables = container["env"].as_array().cloned().unwrap_or_default();
    variables.retain(|variable| !ours.iter().any(|(name, _)| variable["name"].as_str() == Some(name)));
    variables.extend(ours.map(|(name, mib)| json!({ "name": name, "value": format!("{mib}M") })));
    variables.into()
}

/// Returns a security context with a seccomp profile, where neither pod nor container names one.
fn security(spec: &Value, container: &Value, rules: &ReviewRules) -> Option<Value> {
    let profile = rules.seccomp_profile.as_ref()?;
    let has_one = |value: &Value| value["securityContext"]["seccompProfile"].is_object();
    if has_one(container) || has_one(spec) {
        return None;
    }
    let mut security = object(&container["securityContext"]);
    security.insert("seccompProfile".into(), json!({ "type": "Localhost", "localhostProfile": profile }));
    Some(security.into())
}

#[cfg(test)]
mod tests {
    //! Guards against a pod that counts with less than its author asked for, or is changed twice, and
    //! against messages that are none.
    use super::*;

    fn rules() -> ReviewRules {
        ReviewRules { scheduler: "farfield".into(), seccomp_profile: Some("farfield.json".into()) }
    }

    fn message(pod: &Value) -> Vec<u8> {
        let request = json!({ "uid": "1", "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "namespace": "n", "operation": "CREATE", "object": pod });
        json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request })
            .to_string()
            .into_bytes()
    }

    fn pod(annotations: Value, container: Value) -> Value {
        let mut container = container;
        container["name"] = "main".into();
        json!({ "metadata": { "generateName": "p-", "annotations": annotations }, "spec": { "containers": [container] } })
    }

    fn asks(least: &str, memory: &str) -> Value {
        pod(json!({ LEAST_ANNOTATION: least }), json!({ "resources": { "requests": { "memory": memory } } }))
    }

    fn refusal(pod: &Value) -> String {
        let answer = review(&message(pod), &rules()).unwrap();
        assert_eq!(answer.message["response"]["allowed"], false, "{pod}");
        assert!(answer.message["response"]["patch"].is_null());
        match answer.verdict {
            ReviewVerdict::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    /// Applies the patch of an answer, whose operations all are `add` of members of objects.
    fn patched(pod: &Value) -> Value {
        let answer = review(&message(pod), &rules()).unwrap();
        let response = &answer.message["response"];
        assert_eq!((&response["allowed"], &response["uid"]), (&json!(true), &json!("1")));
        let patch = STANDARD.decode(response["patch"].as_str().unwrap()).unwrap();
        let patch: Value = serde_json::from_slice(&patch).unwrap();
        let mut pod = pod.clone();
        for operation in patch.as_array().unwrap() {
            assert_eq!(operation["op"], "add");
            let (parent, member) = operation["path"].as_str().unwrap().rsplit_once('/').unwrap();
            let parent = pod.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            parent.insert(member.replace("~1", "/"), operation["value"].clone());
        }
        pod
    }

    #[test]
    fn a_pod_counts_with_its_least_and_says_the_rest() {
        let before = pod(
            json!({ LEAST_ANNOTATION: "0.5", "other": "x" }),
            json!({
                "resources": { "requests": { "memory": "3000Mi", "cpu": "2" }, "limits": { "memory": "4Gi" } },
                "env": [{ "name": "A", "value": "b" }, { "name": "FARFIELD_JOB_MEM", "value": "1T" }],
                "securityContext": { "runAsUser": 7 },
            }),
        );
        let after = patched(&before);
        let container = &after["spec"]["containers"][0];
        let requests = json!({ "memory": "1500Mi", "cpu": "2", FAR_RESOURCE: "1500" });
        assert_eq!(
            container["resources"],
            json!({ "requests": requests,
            "limits": { "memory": "4Gi", FAR_RESOURCE: "1500" } })
        );
        assert_eq!(
            container["env"],
            json!([{ "name": "A", "value": "b" },
            { "name": "FARFIELD_JOB_MEM", "value": "3000M" }, { "name": "FARFIELD_JOB_LEAST", "value": "1500M" }])
        );
        let profile = json!({ "type": "Localhost", "localhostProfile": "farfield.json" });
        assert_eq!(container["securityContext"], json!({ "runAsUser": 7, "seccompProfile": profile }));
        assert_eq!(
            after["metadata"]["annotations"],
            json!({ LEAST_ANNOTATION: "0.5", "other": "x",
            MEMORY_ANNOTATION: "3000Mi", CONTAINER_ANNOTATION: "main" })
        );
        assert_eq!(after["spec"]["schedulerName"], "farfield");
        assert_eq!(after["spec"]["nodeSelector"], json!({ NODE_LABEL: "true" }));
        assert_eq!(after["spec"]["tolerations"].as_array().map(Vec::len), Some(1));
        assert_eq!(patched(&after), after, "once more changes nothing");
    }

    #[test]
    fn parts_and_quantities_are_rounded_up() {
        for (least, memory, expected) in [
            ("0.5", "101Mi", (101, 51)),
            ("1", "101Mi", (101, 101)),
            ("0.1", "1000Mi", (1000, 100)),
            ("0.001", "100Mi", (100, 16)),
            ("50Mi", "100M", (96, 50)),
            ("1Gi", "2G", (1908, 1024)),
            ("20000001", "100Mi", (0, 0)),
        ] {
            let answer = review(&message(&asks(least, memory)), &rules()).unwrap();
            match answer.verdict {
                ReviewVerdict::Changed { memory_mib, least_mib } => {
                    assert_eq!((memory_mib, least_mib), expected, "{least}")
                }
                other => {
                    assert!(expected == (0, 0) && matches!(other, ReviewVerdict::Refused(_)), "{least}: {other:?}")
                }
            }
        }
        let said = pod(json!({ LEAST_ANNOTATION: "0.25", MEMORY_ANNOTATION: "4Gi" }), json!({}));
        assert_eq!(patched(&said)["spec"]["containers"][0]["resources"]["requests"]["memory"], "1024Mi");
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_to_do() {
        let with = |member: &str, value: Value| {
            let mut pod = asks("0.5", "1Gi");
            pod["spec"][member] = value;
            pod
        };
        let annotated =
            |annotations: Value| pod(annotations, json!({ "resources": { "requests": { "memory": "1Gi" } } }));
        let limited = |limit: &str| {
            let resources = json!({ "requests": { "memory": "1Gi" }, "limits": { "memory": limit } });
            pod(json!({ LEAST_ANNOTATION: "0.5" }), json!({ "resources": resources }))
        };
        for (pod, expected) in [
            (asks("half", "1Gi"), "neither a part"),
            (asks("0", "1Gi"), "neither a part"),
            (asks("1.5", "1Gi"), "neither a part"),
            (asks("-0.5", "1Gi"), "neither a part"),
            (asks("", "1Gi"), "neither a part"),
            (asks("2Gi", "1Gi"), "is more than the memory of the job"),
            (asks("0.5", "8Mi"), "is more than the memory of the job"),
            (asks("0.5", "0"), "which is nothing"),
            (asks("0.5", "7Ei"), "more than any node has"),
            (asks("0.5", "much"), "write it like 8Gi"),
            (pod(json!({ LEAST_ANNOTATION: "0.5" }), json!({})), "say how much memory"),
            (annotated(json!({ "farfield.dev/leest": "0.5" })), "is not known"),
            (annotated(json!({ MEMORY_ANNOTATION: "1Gi" })), "alone asks for nothing"),
            (annotated(json!({ LEAST_ANNOTATION: "0.5", CONTAINER_ANNOTATION: "x" })), "no container \"x\""),
            (with("containers", json!([{ "name": "a" }, { "name": "b" }])), "say which one"),
            (with("containers", json!([])), "no container"),
            (with("nodeName", "n1".into()), "drop spec.nodeName"),
            (with("schedulerName", "other".into()), "drop spec.schedulerName"),
            (with("resources", json!({ "requests": { "memory": "1Gi" } })), "drop the memory of spec.resources"),
            (limited("1023Mi"), "raise resources.limits.memory"),
        ] {
            let reason = refusal(&pod);
            assert!(reason.contains(expected), "{expected}: {reason}");
        }
        for allowed in [limited("1Gi"), with("schedulerName", "default-scheduler".into())] {
            assert!(matches!(review(&message(&allowed), &rules()).unwrap().verdict, ReviewVerdict::Changed { .. }));
        }
    }

    #[test]
    fn other_pods_and_other_requests_are_left_as_they_are() {
        let plain = pod(json!({ "other": "x" }), json!({}));
        let answer = review(&message(&plain), &rules()).unwrap();
        assert_eq!((answer.verdict, answer.pod.as_str()), (ReviewVerdict::Untouched, "n/p-"));
        assert_eq!(answer.message["response"], json!({ "uid": "1", "allowed": true }));
        let update = String::from_utf8(message(&asks("0.5", "1Gi"))).unwrap().replace("CREATE", "UPDATE");
        assert_eq!(review(update.as_bytes(), &rules()).unwrap().verdict, ReviewVerdict::Untouched);
    }

    #[test]
    fn messages_of_nonsense_are_refused_and_never_panic() {
        let good = message(&asks("0.5", "1Gi"));
        for bad in ["", "{", "null", "[]", "7", "{\"apiVersion\":\"admission.k8s.io/v1\"}", "{\"request\":null}"] {
            assert!(matches!(review(bad.as_bytes(), &rules()), Err(ReviewError::Malformed(_))), "{bad}");
        }
        let old = String::from_utf8(good.clone()).unwrap().replace("k8s.io/v1\"", "k8s.io/v1beta1\"");
        assert!(matches!(review(old.as_bytes(), &rules()), Err(ReviewError::Version(_))));
        let deep = format!("{{\"request\":{}", "[".repeat(100_000));
        assert!(review(deep.as_bytes(), &rules()).is_err());
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..1 + random.usize(..3) {
                let at = random.usize(..bytes.len().max(1));
                match random.u8(..3) {
                    0 if at < bytes.len() => bytes[at] = random.u8(..),
                    1 if at < bytes.len() => drop(bytes.remove(at)),
                    _ => bytes.truncate(at),
                }
            }
            if let Ok(ReviewAnswer { verdict: ReviewVerdict::Changed { memory_mib, least_mib }, .. }) =
                review(&bytes, &rules())
            {
                assert!(least_mib <= memory_mib && least_mib >= LEAST_MIB_MIN);
            }
        }
    }
}
