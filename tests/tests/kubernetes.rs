//! A real API server and a real scheduler of Kubernetes with 40 nodes that are only objects, and the gate: do pods with far memory
//! start where near memory and the pool allow, wherever processes are killed, and are they told what they wait for?
//!
//! Danger: a node or a pool that is promised twice; pods that start without the gate, or never; a gate in whose absence other pods
//! wait, too. What is promised is computed from what the API server says, by the policy of `core`.
//!
//! The programs are made by `programs/kubernetes/build.sh`; `FARFIELD_KUBERNETES` is the folder that they are in. There is no kubelet:
//! nothing runs in pods.

use farfield_core::policy::cluster::{Cluster, GateJob, JobClass, NodeShape};
use farfield_tests::{Command, Running, Scratch, farfield, skip, wait_until};
use farfield_web::{ApiClient, Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Nodes that share the pool, and others.
const FAR_NODES: usize = 36;
const PLAIN_NODES: usize = 4;
/// Near memory of a node and memory and least of a job, in MiB: by memory one job fits on a node, by least three.
const NODE_MIB: u64 = 160 << 10;
const JOB_MIB: u64 = 112 << 10;
const LEAST_MIB: u64 = 45 << 10;
/// Room for the second and third jobs of 17 nodes, and no more.
const POOL_MIB: u64 = 3000 << 10;
const CPU_MILLI: u32 = 48_000;
const LONG: Duration = Duration::from_secs(1800);
const ADMIN: &str = "admin-of-the-test";
const ACCOUNT: &str = "gate-of-the-test";

/// API server, scheduler and gate in a folder of their own, ended when dropped.
struct RealKubernetes {
    scratch: Scratch,
    programs: PathBuf,
    api: ApiClient,
    ports: Vec<u16>,
    gate: Option<Running>,
    scheduler: Option<Running>,
    _api_server: Running,
    _etcd: Running,
}

fn text(path: &Path) -> &str {
    path.to_str().expect("an ASCII path")
}

fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("bound").port()).collect()
}

/// Programs of Kubernetes. `None`, with a reason, where they were not built.
fn programs() -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("FARFIELD_KUBERNETES").map(PathBuf::from) else {
        skip("FARFIELD_KUBERNETES is not set: build Kubernetes by tests/programs/kubernetes/build.sh");
        return None;
    };
    for name in ["etcd", "kube-apiserver", "kube-scheduler"] {
        if !folder.join(name).is_file() {
            skip(&format!("{name} is not in {}: run tests/programs/kubernetes/build.sh", folder.display()));
            return None;
        }
    }
    Some(folder)
}

impl RealKubernetes {
    /// Starts a cluster whose nodes are only objects, with the manifests that `farfield cluster init kubernetes` writes.
    fn start(name: &str) -> Option<RealKubernetes> {
        let programs = programs()?;
        let scratch = Scratch::new(name);
        let ports = free_ports(5);
        let at = text(scratch.path()).to_owned();
        let cert = |words: &[&str]| {
            let words = [&["cert"], words].concat();
            let done = Command::new(&scratch.folder("cert"), [vec![text(&farfield())], words].concat()).run();
            assert_eq!(done.code, 0, "{}", done.errors);
        };
        let certs = format!("{at}/certs");
        cert(&["init", &certs]);
        cert(&["server", &certs, "api", "127.0.0.1", "localhost", "kubernetes.default.svc"]);
        let tokens = format!(
            "{ADMIN},admin,1,\"system:masters\"\n{ACCOUNT},system:serviceaccount:farfield:farfield-gate,2,\"system:serviceaccounts\"\n"
        );
        let tokens = scratch.file("tokens.csv", tokens);
        scratch.file("token", format!("{ACCOUNT}\n"));
        let [client, peer] = [0, 1].map(|port| format!("http://127.0.0.1:{}", ports[port]));
        let start = |name: &str, words: Vec<String>| {
            let words = [vec![text(&programs.join(name)).to_owned()], words].concat();
            Command::new(&scratch.folder(name), words).within(LONG).start()
        };
        let etcd = start(
            "etcd",
            vec![
                format!("--data-dir={at}/etcd-data"),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=default={peer}"),
                "--unsafe-no-fsync=true".into(),
                "--log-level=error".into(),
            ],
        );
        let api_server = start(
            "kube-apiserver",
            vec![
                format!("--etcd-servers={client}"),
                format!("--tls-cert-file={certs}/api.pem"),
                format!("--tls-private-key-file={certs}/api.key"),
                format!("--secure-port={}", ports[2]),
                "--bind-address=127.0.0.1".into(),
                "--service-cluster-ip-range=10.0.0.0/24".into(),
                format!("--service-account-key-file={certs}/ca.pem"),
                format!("--service-account-signing-key-file={certs}/ca.key"),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                format!("--token-auth-file={}", text(&tokens)),
                "--authorization-mode=RBAC".into(),
                // There are no controllers, which would make accounts and say which nodes are ready.
                "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition".into(),
            ],
        );
        let url = format!("https://127.0.0.1:{}", ports[2]);
        let api = ApiClient::new(&url, Some(&scratch.path().join("certs/ca.pem"))).expect("a certificate");
        let mut cluster = RealKubernetes {
            scratch,
            programs: programs.clone(),
            api,
            ports,
            gate: None,
            scheduler: None,
            _api_server: api_server,
            _etcd: etcd,
        };
        wait_until("the API server is ready", || {
            assert!(!cluster._etcd.is_over(), "{}", cluster._etcd.errors());
            assert!(!cluster._api_server.is_over(), "{}", cluster._api_server.errors());
            let ready = cluster.api.get("/readyz", Some(ADMIN), Duration::from_secs(5), 1 << 20);
            ready.is_ok_and(|answer| answer.status == StatusCode::OK)
        });
        cluster.make_nodes();
        cluster.init();
        cluster.gate = Some(cluster.start_gate());
        cluster.create_manifest("webhook.json");
        cluster.start_scheduler();
        Some(cluster)
    }

    fn send(&self, method: Method, path: &str, message: &Value) -> (StatusCode, Value) {
        let bytes = message.to_string().into_bytes();
        let answer = self.api.send(method, path, Some(ADMIN), &bytes, Duration::from_secs(30), 64 << 20);
        let answer = answer.unwrap_or_else(|error| panic!("{path}: {error}"));
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
    }

    fn create(&self, path: &str, object: &Value) {
        let (status, answer) = self.send(Method::POST, path, object);
        assert!(status.is_success(), "{path}: {answer}");
    }

    fn get(&self, path: &str) -> Value {
        let answer = self.api.get(path, Some(ADMIN), Duration::from_secs(30), 64 << 20).expect("an answer");
        assert!(answer.status.is_success(), "{path}: {}", String::from_utf8_lossy(&answer.body));
        serde_json::from_slice(&answer.body).expect("JSON")
    }

    fn make_nodes(&self) {
        for index in 0..FAR_NODES + PLAIN_NODES {
            let is_far = index < FAR_NODES;
            let name = if is_far { node_name(index) } else { format!("plain-{index:02}") };
            let amounts = json!({ "cpu": format!("{CPU_MILLI}m"), "memory": format!("{NODE_MIB}Mi"), "pods": "110" });
            let mut node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "spec": {}, "status": {
                "capacity": amounts, "allocatable": amounts, "conditions": [{ "type": "Ready", "status": "True",
                "lastHeartbeatTime": null, "lastTransitionTime": null, "reason": "Test", "message": "" }] } });
            if is_far {
                node["metadata"]["labels"] = json!({ "farfield.dev/far": "true" });
                node["spec"]["taints"] =
                    json!([{ "key": "farfield.dev/far", "value": "true", "effect": "NoSchedule" }]);
            }
            self.create("/api/v1/nodes", &node);
        }
    }

    /// Writes the manifests, and creates what is not to run in the cluster.
    fn init(&self) {
        let (to, far) = (self.manifest(""), format!("{POOL_MIB}M"));
        let url = format!("https://127.0.0.1:{}/mutate", self.ports[4]);
        let farfield = farfield();
        let words = [
            &["cluster", "init", "kubernetes", "--to", text(&to), "--far", &far][..],
            &["--image", "farfield:test", "--scheduler-image", "kube-scheduler:test", "--webhook-url", &url],
        ];
        let words = [vec![text(&farfield)], words.concat()].concat();
        let done = Command::new(&self.scratch.folder("init"), words).run();
        assert_eq!(done.code, 0, "{}", done.errors);
        self.create_manifest("gate.json");
        self.create_manifest("secret.json");
        let secret = self.read_manifest("secret.json");
        for name in ["tls.crt", "tls.key"] {
            self.scratch.file(name, secret["stringData"][name].as_str().expect("text"));
        }
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.scratch.path().join("manifests").join(name)
    }

    fn read_manifest(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.manifest(name)).expect("written")).expect("JSON")
    }

    /// Creates all objects of a manifest, as `kubectl apply` would. Each is checked by the API server.
    fn create_manifest(&self, name: &str) {
        let manifest = self.read_manifest(name);
        let items = manifest["items"].as_array().cloned().unwrap_or_else(|| vec![manifest.clone()]);
        for item in items {
            let group = match item["apiVersion"].as_str().expect("a version") {
                "v1" => "/api/v1".to_owned(),
                other => format!("/apis/{other}"),
            };
            let kind = item["kind"].as_str().expect("a kind").to_lowercase();
            let kind = format!("{kind}s");
            let path = match item["metadata"]["namespace"].as_str() {
                Some(namespace) => format!("{group}/namespaces/{namespace}/{kind}"),
                None => format!("{group}/{kind}"),
            };
            self.create(&path, &item);
        }
    }

    /// Starts the gate with the account that the manifests give it.
    fn start_gate(&self) -> Running {
        let running = Command::new(&self.scratch.folder("gate"), self.gate_words(&[])).within(LONG).start();
        wait_until("the gate is ready", || {
            assert!(!running.is_over(), "{}", running.errors());
            running.output().ends_with('\n')
        });
        running
    }

    fn gate_words(&self, more: &[&str]) -> Vec<String> {
        let at = text(self.scratch.path());
        let mut words = vec![
            text(&farfield()).to_owned(),
            "gate".into(),
            "kubernetes".into(),
            format!("--far={POOL_MIB}M"),
            format!("--api-server=https://127.0.0.1:{}", self.ports[2]),
            format!("--api-ca={at}/certs/ca.pem"),
            format!("--api-token-file={at}/token"),
        ];
        if more.is_empty() {
            words.extend([
                format!("--extender=127.0.0.1:{}", self.ports[3]),
                format!("--webhook=127.0.0.1:{}", self.ports[4]),
                format!("--tls-cert={at}/tls.crt"),
                format!("--tls-key={at}/tls.key"),
                "--seccomp-profile=farfield.json".into(),
            ]);
        }
        words.extend(more.iter().map(|word| (*word).to_owned()));
        words
    }

    /// Starts the scheduler by the configuration that was written, with a second profile for other pods.
    fn start_scheduler(&mut self) {
        let (at, port) = (text(self.scratch.path()).to_owned(), self.ports[2]);
        let kubeconfig = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": format!("https://127.0.0.1:{port}"),
                "certificate-authority": format!("{at}/certs/ca.pem") } }],
            "users": [{ "name": "test", "user": { "token": ACCOUNT } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }] });
        let kubeconfig = self.scratch.file("kubeconfig.json", kubeconfig.to_string());
        let mut config = self.read_manifest("scheduler.json");
        config["clientConnection"] = json!({ "kubeconfig": text(&kubeconfig), "qps": 500, "burst": 500 });
        config["extenders"][0]["urlPrefix"] = format!("http://127.0.0.1:{}", self.ports[3]).into();
        config["profiles"].as_array_mut().expect("a list").push(json!({ "schedulerName": "default-scheduler" }));
        // Pods that were refused are tried again soon.
        (config["podInitialBackoffSeconds"], config["podMaxBackoffSeconds"]) = (1.into(), 1.into());
        let config = self.scratch.file("scheduler.json", config.to_string());
        let words = [
            text(&self.programs.join("kube-scheduler")).to_owned(),
            format!("--config={}", text(&config)),
            "--secure-port=0".into(),
            "--pod-max-in-unschedulable-pods-duration=5s".into(),
        ];
        self.scheduler = Some(Command::new(&self.scratch.folder("scheduler"), words).within(LONG).start());
    }

    fn check_alive(&self) {
        for running in [&self.gate, &self.scheduler].into_iter().flatten() {
            assert!(!running.is_over(), "{}", running.errors());
        }
    }

    fn submit(&self, name: &str, memory_mib: u64, least_mib: u64) {
        self.create(PODS, &far_pod(name, memory_mib, least_mib));
    }

    fn delete(&self, name: &str) {
        let (status, answer) =
            self.send(Method::DELETE, &format!("{PODS}/{name}"), &json!({ "gracePeriodSeconds": 0 }));
        assert!(status.is_success(), "{name}: {answer}");
    }

    /// All pods with far memory.
    fn pods(&self) -> Vec<FarPod> {
        let list = self.get(PODS);
        list["items"].as_array().expect("a list").iter().filter_map(FarPod::of).collect()
    }

    /// Books of the policy, made of what the API server says.
    fn model(&self, pods: &[FarPod]) -> Cluster {
        let shape = NodeShape { cores: CPU_MILLI, reclaim_cores: 0, memory_bytes: NODE_MIB << 20 };
        let mut cluster = Cluster::new(&[shape; FAR_NODES], POOL_MIB << 20);
        for pod in pods.iter().filter(|pod| !pod.is_over) {
            if let Some(node) = pod.node {
                cluster.admit(node, &pod.class);
            }
        }
        cluster
    }

    /// Checks that nothing is promised twice.
    fn check_promises(&self, pods: &[FarPod]) {
        let model = self.model(pods);
        assert!(model.far_used_bytes() <= POOL_MIB << 20, "{} MiB of the pool are used", model.far_used_bytes() >> 20);
        for index in 0..FAR_NODES {
            let on = |pod: &&FarPod| pod.node == Some(index) && !pod.is_over;
            let least: u64 = pods.iter().filter(on).map(|pod| pod.class.least_bytes()).sum();
            assert!(least <= NODE_MIB << 20, "{}: {} MiB near", node_name(index), least >> 20);
        }
    }

    /// Waits until no pod waits that would fit, and checks that nothing is promised twice meanwhile. Returns the pods.
    fn settle(&self, what: &str) -> Vec<FarPod> {
        let mut pods = Vec::new();
        wait_until(what, || {
            self.check_alive();
            pods = self.pods();
            self.check_promises(&pods);
            let model = self.model(&pods);
            pods.iter().filter(|pod| pod.node.is_none()).all(|pod| model.find(&pod.class, 0).is_none())
        });
        pods
    }

    /// What the API server says about why a pod waits.
    fn reason(&self, name: &str) -> Option<String> {
        let pod = self.get(&format!("{PODS}/{name}"));
        let conditions = pod["status"]["conditions"].as_array()?;
        let scheduled = conditions.iter().find(|it| it["type"] == "PodScheduled" && it["status"] == "False")?;
        scheduled["message"].as_str().map(str::to_owned)
    }

    fn wait_for_reason(&self, name: &str, part: &str) {
        let mut last = None;
        wait_until(&format!("{name} is told {part:?}"), || {
            self.check_alive();
            let reason = self.reason(name);
            if last != reason {
                println!("{name}: {reason:?}");
                last.clone_from(&reason);
            }
            reason.is_some_and(|reason| reason.contains(part))
        });
    }

    /// Asks the extender, as the scheduler would, on which nodes a pod may start.
    fn filter(&self, class: &JobClass) -> Vec<String> {
        let (least_mib, memory_mib) = (class.least_bytes() >> 20, class.memory_bytes() >> 20);
        let requests = json!({ "cpu": "100m", "memory": format!("{least_mib}Mi"),
            "farfield.dev/far-mib": (memory_mib - least_mib).to_string() });
        let pod = json!({ "metadata": { "name": "asked", "namespace": "default", "uid": "asked" },
            "spec": { "containers": [{ "name": "main", "resources": { "requests": requests } }] } });
        let names: Vec<String> = (0..FAR_NODES).map(node_name).collect();
        let question = json!({ "Pod": pod, "Nodes": null, "NodeNames": names }).to_string();
        let extender = ApiClient::new(&format!("http://127.0.0.1:{}", self.ports[3]), None).expect("a URL");
        let answer =
            extender.send(Method::POST, "/filter", None, question.as_bytes(), Duration::from_secs(30), 1 << 20);
        let answer: Value = serde_json::from_slice(&answer.expect("an answer").body).expect("JSON");
        assert_eq!(answer["Error"], "", "{answer}");
        let fit = answer["NodeNames"].as_array().expect("a list");
        fit.iter().map(|name| name.as_str().expect("a name").to_owned()).collect()
    }

    fn is_bound(&self, name: &str) -> bool {
        self.get(&format!("{PODS}/{name}"))["spec"]["nodeName"].is_string()
    }
}

impl Drop for RealKubernetes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (name, running) in [("gate", &self.gate), ("scheduler", &self.scheduler)] {
                let errors = running.as_ref().map(Running::errors).unwrap_or_default();
                let tail: Vec<&str> = errors.lines().rev().take(30).collect();
                println!("{name}: {}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
        }
    }
}

const PODS: &str = "/api/v1/namespaces/default/pods";

fn node_name(index: usize) -> String {
    format!("far-{index:02}")
}

fn plain_pod(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": { "containers": [{ "name": "main",
        "image": "none:1", "resources": { "requests": { "cpu": "100m", "memory": "1Gi" } } }] } })
}

/// Pod that says by annotations alone that it may have less near.
fn far_pod(name: &str, memory_mib: u64, least_mib: u64) -> Value {
    let mut pod = plain_pod(name);
    pod["metadata"]["annotations"] =
        json!({ "farfield.dev/memory": format!("{memory_mib}Mi"), "farfield.dev/least": format!("{least_mib}Mi") });
    pod
}

/// Pod with far memory, as the API server has it.
struct FarPod {
    name: String,
    /// Index of its node.
    node: Option<usize>,
    is_over: bool,
    class: JobClass,
}

impl FarPod {
    fn of(pod: &Value) -> Option<FarPod> {
        let requests = &pod["spec"]["containers"][0]["resources"]["requests"];
        let far_mib: u64 = requests["farfield.dev/far-mib"].as_str().map(quantity_mib)?;
        let least_mib = quantity_mib(requests["memory"].as_str().expect("a request"));
        let class = GateJob::class(100, (least_mib + far_mib) << 20, least_mib << 20).expect("a job");
        let node = pod["spec"]["nodeName"].as_str();
        let index = |name: &str| name.strip_prefix("far-").and_then(|index| index.parse().ok());
        Some(FarPod {
            name: pod["metadata"]["name"].as_str().expect("a name").to_owned(),
            node: node.map(|name| index(name).unwrap_or_else(|| panic!("{name} does not share the pool"))),
            is_over: matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed")),
            class,
        })
    }
}

/// Reads the quantities that the API server writes: it prefers the largest unit.
fn quantity_mib(text: &str) -> u64 {
    let (number, scale) = match (text.strip_suffix("Gi"), text.strip_suffix("Mi"), text.strip_suffix('k')) {
        (Some(number), _, _) => (number, 1 << 10),
        (_, Some(number), _) => (number, 1),
        (_, _, Some(number)) => (number, 1000),
        _ => (text, 1),
    };
    number.parse::<u64>().unwrap_or_else(|_| panic!("{text}")) * scale
}

#[test]
fn pods_start_as_near_memory_and_the_pool_allow_whoever_is_killed() {
    let Some(mut cluster) = RealKubernetes::start("kubernetes") else { return };

    // A pod without annotations is nobody's business, and one with is changed before it is stored.
    cluster.create(PODS, &plain_pod("plain"));
    cluster.submit("job-0", JOB_MIB, LEAST_MIB);
    wait_until("both are bound", || cluster.is_bound("plain") && cluster.is_bound("job-0"));
    let plain = cluster.get(&format!("{PODS}/plain"));
    assert!(plain["spec"]["nodeName"].as_str().is_some_and(|node| node.starts_with("plain-")), "{plain}");
    let job = cluster.get(&format!("{PODS}/job-0"));
    assert_eq!(job["spec"]["nodeName"], "far-00", "the first node where all is near");
    assert_eq!(job["metadata"]["annotations"]["farfield.dev/charged-mib"], "0");
    let container = &job["spec"]["containers"][0];
    assert_eq!(container["resources"]["requests"]["memory"], "45Gi");
    let variables = container["env"].as_array().expect("a list");
    assert!(variables.contains(&json!({ "name": "FARFIELD_JOB_MEM", "value": format!("{JOB_MIB}M") })));
    assert_eq!(container["securityContext"]["seccompProfile"]["localhostProfile"], "farfield.json");

    // What cannot be is refused at once, with what to do.
    let (status, answer) = cluster.send(Method::POST, PODS, &far_pod("wrong", 100, 200));
    assert_eq!(status.as_u16(), 422, "{answer}");
    assert!(
        answer["message"].as_str().is_some_and(|text| text.contains("more than the memory of the job")),
        "{answer}"
    );

    // By memory, 36 jobs would run. The pool has room for 34 more, if second and third jobs come to the same nodes; for 42 at most.
    for index in 1..90 {
        cluster.submit(&format!("job-{index}"), JOB_MIB, LEAST_MIB);
    }
    let pods = cluster.settle("all run that fit");
    let running = pods.iter().filter(|pod| pod.node.is_some()).count();
    assert!((70..=78).contains(&running), "{running} run");
    let waiting: Vec<&FarPod> = pods.iter().filter(|pod| pod.node.is_none()).collect();
    cluster.wait_for_reason(&waiting[0].name, "MiB of the pool are missing");
    let words = cluster.gate_words(&["--explain", &waiting[0].name]);
    let explained = Command::new(&cluster.scratch.folder("explain"), words).run();
    assert!(explained.text().contains("of the pool are missing"), "{}{}", explained.text(), explained.errors);
    let dry = Command::new(&cluster.scratch.folder("dry"), cluster.gate_words(&["--dry-run", "--json"])).run();
    let dry: Value = serde_json::from_str(&dry.text()).unwrap_or_else(|error| panic!("{error}: {}", dry.errors));
    assert_eq!(dry["running"], running, "{dry}");
    assert_eq!(dry["charged_bytes"], cluster.model(&pods).far_used_bytes(), "{dry}");

    // Two pods that never fit are told so: one by the gate, and one, whose least no node has, by the scheduler.
    cluster.submit("huge", NODE_MIB + POOL_MIB + 1, LEAST_MIB);
    cluster.wait_for_reason("huge", "even if nothing else runs");
    cluster.submit("wide", NODE_MIB + 2, NODE_MIB + 1);
    cluster.wait_for_reason("wide", "Insufficient memory");
    cluster.delete("huge");
    cluster.delete("wide");

    // What ends gives its part back: deleted, or ended by itself.
    let ended: Vec<String> = pods.iter().filter(|pod| pod.node.is_some()).take(6).map(|pod| pod.name.clone()).collect();
    for name in &ended[..3] {
        cluster.delete(name);
    }
    for name in &ended[3..] {
        let mut pod = cluster.get(&format!("{PODS}/{name}"));
        pod["status"]["phase"] = "Succeeded".into();
        let (status, answer) = cluster.send(Method::PUT, &format!("{PODS}/{name}/status"), &pod);
        assert!(status.is_success(), "{answer}");
    }
    let pods = cluster.settle("others run instead");
    let now = pods.iter().filter(|pod| pod.node.is_some() && !pod.is_over).count();
    assert!((70..=78).contains(&now), "{now} run instead of {running}");

    // The gate is killed while pods are bound. Nothing is promised twice, and what fits runs in the end.
    for pod in pods.iter().filter(|pod| pod.node.is_some() && !pod.is_over) {
        cluster.delete(&pod.name);
    }
    for index in 100..140 {
        cluster.submit(&format!("job-{index}"), JOB_MIB, LEAST_MIB);
    }
    for round in 1..4 {
        let bound = |pods: &[FarPod]| pods.iter().filter(|pod| pod.node.is_some() && !pod.is_over).count();
        wait_until("some are bound", || bound(&cluster.pods()) >= round * 8);
        cluster.gate.take().expect("started").signal(libc::SIGKILL);
        cluster.check_promises(&cluster.pods());
        cluster.gate = Some(cluster.start_gate());
    }
    cluster.settle("all run that fit, after three gates");

    // Without the gate, pods that ask for far memory are refused, and others do not notice.
    cluster.gate.take().expect("started").signal(libc::SIGKILL);
    let (status, answer) = cluster.send(Method::POST, PODS, &far_pod("early", JOB_MIB, LEAST_MIB));
    assert!(status.is_server_error(), "{status}: {answer}");
    assert!(answer["message"].as_str().is_some_and(|text| text.contains("pods.farfield.dev")), "{answer}");
    cluster.create(PODS, &plain_pod("plain-2"));
    wait_until("a pod without annotations is bound", || cluster.is_bound("plain-2"));
    // Where the operator prefers that, they run as they are, with all of their memory near.
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/farfield-gate";
    let mut webhook = cluster.get(path);
    webhook["webhooks"][0]["failurePolicy"] = "Ignore".into();
    let (status, answer) = cluster.send(Method::PUT, path, &webhook);
    assert!(status.is_success(), "{answer}");
    wait_until("the API server ignores the webhook", || {
        let (status, _) = cluster.send(Method::POST, PODS, &far_pod("late", JOB_MIB, LEAST_MIB));
        status.is_success()
    });
    wait_until("it is bound as it is", || cluster.is_bound("late"));
    let late = cluster.get(&format!("{PODS}/late"));
    assert!(late["spec"]["containers"][0]["resources"]["requests"]["farfield.dev/far-mib"].is_null(), "{late}");
    // The gate comes back, and pods go on.
    cluster.gate = Some(cluster.start_gate());
    let pods = cluster.settle("nothing is lost");
    let gone = pods.iter().find(|pod| pod.node.is_some() && !pod.is_over).expect("one runs").name.clone();
    cluster.delete(&gone);
    cluster.settle("its room is used again");
}

#[test]
fn the_scheduler_and_the_policy_decide_alike_on_random_histories() {
    let Some(cluster) = RealKubernetes::start("kubernetes-random") else { return };
    let mut random = farfield_tests::seeded(43);
    let mut model = cluster.model(&[]);
    let mut running: BTreeMap<String, (usize, JobClass)> = BTreeMap::new();
    let (mut admitted, mut refused) = (0, 0);
    for step in 0..farfield_tests::tier(150, 300) {
        if random.u8(..4) == 0 && !running.is_empty() {
            let name = running.keys().nth(random.usize(..running.len())).expect("one of them").clone();
            let (node, class) = running.remove(&name).expect("there");
            cluster.delete(&name);
            model.release(node, &class);
        } else {
            let memory_mib = (8 << 10) + random.u64(..(400 << 10));
            let least_mib = (memory_mib / 10 + random.u64(..memory_mib)).min(memory_mib);
            let name = format!("step-{step}");
            let class = GateJob::class(100, memory_mib << 20, least_mib << 20).expect("a job");
            // The gate watches the API server: what was deleted is gone for it a moment later.
            let fits = |node: &usize| model.fits_on(*node, &class);
            let expected: Vec<String> = (0..FAR_NODES).filter(fits).map(node_name).collect();
            wait_until("gate and policy say the same of every node", || cluster.filter(&class) == expected);
            cluster.submit(&name, memory_mib, least_mib);
            let expected = model.find(&class, 0);
            let mut found = None;
            match expected {
                Some(node) => {
                    wait_until("it is bound", || {
                        cluster.check_alive();
                        found = cluster.get(&format!("{PODS}/{name}"))["spec"]["nodeName"].as_str().map(str::to_owned);
                        found.is_some()
                    });
                    assert_eq!(found, Some(node_name(node)), "step {step}: {memory_mib} MiB, least {least_mib} MiB");
                    model.admit(node, &class);
                    running.insert(name, (node, class));
                    admitted += 1;
                }
                None => {
                    wait_until("it is told why it waits", || {
                        cluster.check_alive();
                        assert!(!cluster.is_bound(&name), "step {step}: {memory_mib} MiB, least {least_mib} MiB");
                        cluster.reason(&name).is_some()
                    });
                    cluster.delete(&name);
                    refused += 1;
                }
            }
        }
        cluster.check_promises(&cluster.pods());
    }
    println!("{admitted} were admitted, {refused} refused");
    assert!(admitted > 40 && refused > 5, "{admitted} were admitted, {refused} refused");
}
