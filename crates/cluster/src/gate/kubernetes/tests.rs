//! Guards against a pool or a node that is promised twice while bindings are on their way, are lost, or
//! are told late; and against a question of nonsense.

use super::books::{BindOutcome, KubernetesBooks};
use super::extender::{AdmissionError, BindArgs, ExtenderArgs};
use super::objects::{NodeObject, PodObject, WatchEvent};
use farfield_core::policy::cluster::{GatePhase, GateRules, GateWait, PoolServers};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

const NODE_MIB: u64 = 100;

fn node(name: &str) -> NodeObject {
    let status = json!({ "allocatable": { "cpu": "8", "memory": format!("{NODE_MIB}Mi") },
        "conditions": [{ "type": "Ready", "status": "True" }] });
    let metadata = json!({ "name": name, "labels": { "farfield.dev/far": "true" } });
    serde_json::from_value(json!({ "metadata": metadata, "status": status })).unwrap()
}

fn pod_value(uid: &str, memory_mib: u64, least_mib: u64, node: Option<&str>) -> Value {
    let requests = json!({ "memory": format!("{least_mib}Mi"),
        "farfield.dev/far-mib": (memory_mib - least_mib).to_string() });
    json!({ "metadata": { "name": uid, "namespace": "n", "uid": uid, "creationTimestamp": "1970-01-01T00:01:40Z" },
        "spec": { "nodeName": node, "containers": [{ "resources": { "requests": requests } }] } })
}

fn pod(uid: &str, memory_mib: u64, least_mib: u64, node: Option<&str>) -> PodObject {
    serde_json::from_value(pod_value(uid, memory_mib, least_mib, node)).unwrap()
}

fn rules(pool_mib: u64) -> GateRules {
    GateRules {
        pool_bytes: Some(pool_mib << 20),
        servers: PoolServers::UNKNOWN,
        start_within_s: u64::MAX,
        overtake_within_s: 3600,
    }
}

fn books(nodes: &[&str]) -> KubernetesBooks {
    let mut books = KubernetesBooks::default();
    books.replace_nodes(&nodes.iter().map(|name| node(name)).collect::<Vec<_>>());
    books
}

fn asks(pod: &PodObject, nodes: &[&str]) -> ExtenderArgs {
    ExtenderArgs { pod: pod.clone(), nodes: Some(nodes.iter().map(|&name| name.to_owned()).collect()) }
}

fn binds(uid: &str, node: &str) -> BindArgs {
    let [pod_name, pod_uid] = [uid, uid].map(str::to_owned);
    BindArgs { pod_name, pod_namespace: "n".into(), pod_uid, node: node.into() }
}

const NOW: Duration = Duration::from_secs(1000);

#[test]
fn questions_are_read_and_answers_written_with_the_names_of_go() {
    let mut books = books(&["a", "b"]);
    books.enter_pod_event(&WatchEvent::Added(pod("old", 100, 50, Some("a"))));
    let question = json!({ "Pod": pod_value("new", 80, 40, None), "Nodes": null, "NodeNames": ["a", "b", "strange"] });
    let args: ExtenderArgs = serde_json::from_value(question).unwrap();
    let answer = serde_json::to_value(books.filter(&args, rules(100), 100).unwrap()).unwrap();
    assert_eq!((&answer["NodeNames"], &answer["Error"]), (&json!(["a", "b"]), &json!("")));
    let strange = answer["FailedAndUnresolvableNodes"]["strange"].as_str().unwrap();
    assert!(strange.contains("does not share the pool"), "{strange}");
    let scores = serde_json::to_value(books.prioritize(&args, rules(100), 100).unwrap()).unwrap();
    assert_eq!(
        scores,
        json!([{ "Host": "a", "Score": 1 }, { "Host": "b", "Score": 10 }, { "Host": "strange", "Score": 0 }])
    );
    let bind = json!({ "PodName": "new", "PodNamespace": "n", "PodUID": "new", "Node": "b" });
    assert_eq!(serde_json::from_value::<BindArgs>(bind).unwrap().pod_uid, "new");
    for nonsense in [json!({}), json!({ "pod": {} }), json!({ "Pod": 7 }), json!([]), json!(null)] {
        assert!(serde_json::from_value::<ExtenderArgs>(nonsense.clone()).is_err(), "{nonsense}");
        assert!(serde_json::from_value::<BindArgs>(nonsense).is_err());
    }
}

#[test]
fn reasons_are_the_same_on_all_nodes_of_a_kind() {
    let mut books = books(&["a", "b", "c"]);
    for (uid, memory, node) in [("1", 100, "a"), ("2", 90, "b"), ("3", 100, "c")] {
        books.enter_pod_event(&WatchEvent::Added(pod(uid, memory, 30, Some(node))));
    }
    let new = pod("new", 80, 40, None);
    let answer = books.filter(&asks(&new, &["a", "b", "c"]), rules(50), 100).unwrap();
    assert_eq!(answer.node_names, Vec::<String>::new());
    let reasons: Vec<&str> = answer.failed_and_unresolvable_nodes.values().map(String::as_str).collect();
    assert_eq!(reasons, ["farfield: 20 MiB of the pool are missing"; 3]);
    let huge = books.filter(&asks(&pod("huge", 151, 40, None), &["a"]), rules(50), 100).unwrap();
    assert!(huge.failed_and_unresolvable_nodes["a"].contains("even if nothing else runs"));
    let no_pool = GateRules { pool_bytes: None, ..rules(0) };
    let silent = books.filter(&asks(&new, &["a"]), no_pool, 100).unwrap();
    assert!(silent.failed_and_unresolvable_nodes["a"].contains("a memory server does not answer"));
}

#[test]
fn what_is_no_question_of_ours_is_an_error() {
    let mut books = books(&["a"]);
    let new = pod("new", 80, 40, None);
    let whole = ExtenderArgs { pod: new.clone(), nodes: None };
    assert_eq!(books.filter(&whole, rules(1), 0), Err(AdmissionError::NoNames));
    assert!(matches!(books.filter(&asks(&PodObject::default(), &["a"]), rules(1), 0), Err(AdmissionError::NoJob(_))));
    let mut bind = |args: &BindArgs, pod: &PodObject| books.reserve_binding(args, pod, rules(100), 0, NOW);
    assert_eq!(bind(&binds("other", "a"), &new), Err(AdmissionError::OtherPod));
    assert_eq!(bind(&binds("new", "b"), &new), Err(AdmissionError::NoNode("b".into())));
    let bound = pod("new", 80, 40, Some("a"));
    assert_eq!(bind(&binds("new", "a"), &bound), Err(AdmissionError::NotWaiting("a".into())));
    let without: Value = json!({ "metadata": { "uid": "new" }, "spec": { "containers": [] } });
    let without: PodObject = serde_json::from_value(without).unwrap();
    assert!(matches!(bind(&binds("new", "a"), &without), Err(AdmissionError::NoJob(_))));
}

#[test]
fn a_binding_on_its_way_is_counted_until_the_watch_tells_it() {
    let mut books = books(&["a"]);
    let (first, second) = (pod("1", 80, 40, None), pod("2", 80, 40, None));
    let admit = |books: &mut KubernetesBooks, pod: &PodObject, now| {
        books.reserve_binding(&binds(pod.uid(), "a"), pod, rules(50), 100, now).map(|admission| admission.far_bytes)
    };
    let far = |mib: u64| AdmissionError::Wait(GateWait::Far { missing_bytes: mib << 20 });
    assert_eq!(admit(&mut books, &first, NOW), Ok(0));
    assert_eq!(admit(&mut books, &second, NOW), Err(far(10)), "the first is on its way");
    books.settle("1", BindOutcome::Refused, NOW);
    assert_eq!(admit(&mut books, &second, NOW), Ok(0), "the first is not");
    // Its answer is lost: it can be sent again, to the same node only.
    books.settle("2", BindOutcome::Unknown, NOW);
    books.enter_node_event(&WatchEvent::Added(node("b")));
    let filtered = books.filter(&asks(&second, &["a", "b"]), rules(50), 100).unwrap();
    assert_eq!(filtered.node_names, ["a"]);
    assert!(filtered.failed_and_unresolvable_nodes["b"].contains("has not started it yet"));
    assert_eq!(admit(&mut books, &second, NOW), Ok(0));
    books.enter_node_event(&WatchEvent::Deleted(node("b")));
    // Its answer is lost, and neither a list that began earlier nor one soon afterwards says that it is not bound.
    books.settle("2", BindOutcome::Unknown, NOW);
    for later in [NOW, NOW + Duration::from_secs(80)] {
        books.replace_pods(&[first.clone(), second.clone()], later);
        assert_eq!(admit(&mut books, &first, later), Err(far(10)));
    }
    assert!(books.has_stale_reservation(NOW + Duration::from_secs(91)));
    books.replace_pods(&[first.clone(), second.clone()], NOW + Duration::from_secs(91));
    assert_eq!((books.reserved(), admit(&mut books, &first, NOW)), (0, Ok(0)));
    // It is bound, and a list that was asked for before does not say it yet.
    books.settle("1", BindOutcome::Bound, NOW);
    books.replace_pods(std::slice::from_ref(&first), NOW - Duration::from_secs(1));
    assert_eq!(admit(&mut books, &second, NOW), Err(far(10)));
    books.enter_pod_event(&WatchEvent::Modified(pod("1", 80, 40, Some("a"))));
    assert_eq!((books.reserved(), admit(&mut books, &second, NOW)), (0, Err(far(10))));
    books.enter_pod_event(&WatchEvent::Deleted(pod("1", 80, 40, Some("a"))));
    assert_eq!(admit(&mut books, &second, NOW), Ok(0));
}

#[test]
fn pods_of_nodes_that_are_gone_are_still_counted() {
    let mut books = books(&["a", "b"]);
    books.enter_pod_event(&WatchEvent::Added(pod("1", 100, 40, Some("a"))));
    let asked = asks(&pod("new", 130, 40, None), &["b"]);
    let fits = |books: &KubernetesBooks, pool| !books.filter(&asked, rules(pool), 100).unwrap().node_names.is_empty();
    assert!(fits(&books, 30));
    books.enter_node_event(&WatchEvent::Deleted(node("a")));
    assert!(!fits(&books, 89) && fits(&books, 90), "60 MiB of the other pod may be far");
    let state = books.state(90 << 20, 100);
    assert_eq!((state.nodes.len(), state.nodes[1].1.is_up), (2, false));
    books.enter_pod_event(&WatchEvent::Modified(
        serde_json::from_value({
            let mut over = pod_value("1", 100, 40, Some("a"));
            over["status"] = json!({ "phase": "Failed" });
            over
        })
        .unwrap(),
    ));
    assert!(fits(&books, 30), "its pod has ended");
}

#[test]
fn other_pods_take_near_memory_and_charges_are_the_overflow() {
    let mut books = books(&["a"]);
    let plain = json!({ "metadata": { "uid": "plain" }, "spec": { "nodeName": "a",
        "containers": [{ "resources": { "requests": { "memory": "30Mi", "cpu": "1500m" } } }] } });
    books.enter_pod_event(&WatchEvent::Added(serde_json::from_value(plain).unwrap()));
    books.enter_pod_event(&WatchEvent::Added(pod("1", 60, 20, Some("a"))));
    books.enter_pod_event(&WatchEvent::Added(pod("2", 60, 20, Some("a"))));
    let state = books.state(1 << 30, 100);
    assert_eq!((state.nodes[0].1.foreign_bytes, state.nodes[0].1.foreign_cores), (30 << 20, 1500));
    let charged: Vec<u64> = state
        .jobs
        .iter()
        .map(|job| match job.phase {
            Some(GatePhase::Running { far_bytes, .. }) => far_bytes >> 20,
            _ => panic!("{job:?}"),
        })
        .collect();
    assert_eq!(charged, [0, 50]);
}

#[test]
fn a_pod_that_has_waited_long_is_not_overtaken() {
    let mut books = books(&["a"]);
    books.enter_pod_event(&WatchEvent::Added(pod("1", 80, 80, Some("a"))));
    books.enter_pod_event(&WatchEvent::Added(pod("old", 60, 60, None)));
    let young: Value = {
        let mut young = pod_value("young", 20, 20, None);
        young["metadata"]["creationTimestamp"] = "1970-01-01T01:00:00Z".into();
        young
    };
    let ask = |value: &Value, now_s| {
        let args = asks(&serde_json::from_value(value.clone()).unwrap(), &["a"]);
        let answer = books.filter(&args, rules(0), now_s).unwrap();
        answer.failed_and_unresolvable_nodes.get("a").cloned()
    };
    assert_eq!(ask(&young, 3699), None);
    assert!(ask(&young, 3700).unwrap().contains("has waited so long"));
    let mut first = young.clone();
    first["spec"]["priority"] = 1.into();
    assert_eq!(ask(&first, 3700), None, "it has a higher priority");
}

/// API server whose answers are late or lost.
#[derive(Default)]
struct ModelServer {
    pods: BTreeMap<String, (Value, Option<String>)>,
    /// Events that a watch has not told yet.
    events: Vec<WatchEvent<PodObject>>,
    /// Bindings that arrive later: pod and node.
    late: Vec<(String, String)>,
}

impl ModelServer {
    fn pod(&self, uid: &str) -> PodObject {
        let (value, node) = &self.pods[uid];
        let mut value = value.clone();
        value["spec"]["nodeName"] = node.clone().into();
        serde_json::from_value(value).unwrap()
    }

    fn bind(&mut self, uid: &str, node: &str) -> bool {
        let Some((_, at @ None)) = self.pods.get_mut(uid) else { return false };
        *at = Some(node.to_owned());
        self.events.push(WatchEvent::Modified(self.pod(uid)));
        true
    }

    fn list(&self) -> Vec<PodObject> {
        self.pods.keys().map(|uid| self.pod(uid)).collect()
    }

    /// Checks that no node and no pool has more than it can.
    fn check(&self, nodes: &[&str], pool_mib: u64, context: &str) {
        let mut overflow = 0;
        for node in nodes {
            let on = self.pods.values().filter(|(_, at)| at.as_deref() == Some(node));
            let (mut least, mut asked) = (0, 0);
            for (value, _) in on {
                let pod: PodObject = serde_json::from_value(value.clone()).unwrap();
                let facts = pod.facts().unwrap();
                least += facts.request_bytes >> 20;
                asked += (facts.request_bytes + facts.far_bytes.unwrap()) >> 20;
            }
            assert!(least <= NODE_MIB, "{context}: {node} has promised {least} MiB near");
            overflow += asked.saturating_sub(NODE_MIB);
        }
        assert!(overflow <= pool_mib, "{context}: {overflow} MiB of {pool_mib} are used");
    }
}

#[test]
fn random_histories_with_late_events_lost_answers_and_restarts_promise_nothing_twice() {
    const NODES: [&str; 4] = ["a", "b", "c", "d"];
    let mut bound = 0;
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let pool_mib = random.u64(..300);
        let nodes = &NODES[..1 + random.usize(..NODES.len())];
        let (mut server, mut books, mut now) = (ModelServer::default(), books(nodes), Duration::ZERO);
        for round in 0..200 {
            now += Duration::from_secs(random.u64(..5));
            let context = format!("seed {seed}, round {round}");
            match random.u8(..10) {
                0..=2 => {
                    let (uid, memory) = (format!("{round}"), 1 + random.u64(..150));
                    server.pods.insert(uid.clone(), (pod_value(&uid, memory, 1 + random.u64(..memory), None), None));
                    server.events.push(WatchEvent::Added(server.pod(&uid)));
                }
                3..=6 if !server.pods.is_empty() => {
                    // The scheduler binds a pod to a node of its own choice. It may be wrong about what waits.
                    let uid = server.pods.keys().nth(random.usize(..server.pods.len())).unwrap().clone();
                    let node = nodes[random.usize(..nodes.len())];
                    let pod = server.pod(&uid);
                    if books.reserve_binding(&binds(&uid, node), &pod, rules(pool_mib), 100, now).is_err() {
                        continue;
                    }
                    let outcome = match random.u8(..4) {
                        0 => {
                            server.late.push((uid.clone(), node.to_owned()));
                            BindOutcome::Unknown
                        }
                        1 => {
                            server.bind(&uid, node);
                            BindOutcome::Unknown
                        }
                        _ if server.bind(&uid, node) => BindOutcome::Bound,
                        _ => BindOutcome::Refused,
                    };
                    bound += u32::from(outcome == BindOutcome::Bound);
                    books.settle(&uid, outcome, now);
                }
                7 if !server.pods.is_empty() => {
                    let uid = server.pods.keys().nth(random.usize(..server.pods.len())).unwrap().clone();
                    let pod = server.pod(&uid);
                    server.pods.remove(&uid);
                    server.events.push(WatchEvent::Deleted(pod));
                }
                8 => {
                    // The watch breaks, or the gate is killed: all is read again. What was on its way arrives before that.
                    for (uid, node) in std::mem::take(&mut server.late) {
                        server.bind(&uid, &node);
                    }
                    server.events.clear();
                    if random.bool() {
                        books = self::books(nodes);
                    }
                    books.replace_pods(&server.list(), now);
                }
                _ => {
                    for (uid, node) in std::mem::take(&mut server.late) {
                        server.bind(&uid, &node);
                    }
                    let told = random.usize(..=server.events.len());
                    for event in server.events.drain(..told) {
                        assert!(books.enter_pod_event(&event));
                    }
                }
            }
            server.check(nodes, pool_mib, &context);
        }
        // In the end the books are what the API server says.
        for event in server.events.drain(..) {
            books.enter_pod_event(&event);
        }
        for (uid, (_, node)) in &server.pods {
            let state = books.state(pool_mib << 20, 100);
            let job = state.jobs.iter().find(|job| job.id == format!("n/{uid}")).unwrap();
            let running = match job.phase {
                Some(GatePhase::Running { node, .. }) => Some(state.nodes[node].0.clone()),
                _ => None,
            };
            let is_reserved = node.is_none() && books.reserved() > 0;
            assert!(running == *node || is_reserved, "seed {seed}: {uid} is at {node:?}, not at {running:?}");
        }
    }
    assert!(bound > 1000, "{bound}");
}

#[test]
fn any_bytes_are_a_message_or_an_error() {
    let mut random = fastrand::Rng::with_seed(5);
    let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [pod_value("1", 80, 40, Some("a"))] });
    let event = json!({ "type": "ADDED", "object": pod_value("1", 80, 40, None) });
    let question = json!({ "Pod": pod_value("1", 80, 40, None), "NodeNames": ["a"] });
    for text in [list, event, question].map(|value| value.to_string()) {
        super::check_message(text.as_bytes());
        for _ in 0..20_000 {
            let mut bytes = text.clone().into_bytes();
            let at = random.usize(..bytes.len());
            match random.u8(..3) {
                0 => bytes[at] = random.u8(32..127),
                1 => bytes.truncate(at),
                // Numbers that are larger than all that is counted.
                _ => drop(bytes.splice(at..at, b"9".repeat(random.usize(..20)))),
            }
            super::check_message(&bytes);
        }
    }
}
