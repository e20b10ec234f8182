//! `farfield gate kubernetes` beside a small API server that can refuse, be silent and break off: guards
//! against a pool that is promised twice when answers are lost, and against messages of nonsense. A real
//! API server and a real scheduler are in `tests/tests/kubernetes.rs`.

mod common;

use common::{Folder, Running, farfield, scrape, text, until};
use farfield_web::{ApiClient, HttpLimits, Method, StatusCode, WebRequest, WebResponse, bytes, serve};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

/// Conduct of the API server when a pod is bound.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Conduct {
    Obeys,
    Refuses,
    /// Binds, and says that it failed.
    LosesAnswer,
    /// Neither binds nor knows whether it did.
    Fails,
}

struct ApiState {
    version: u64,
    nodes: Vec<Value>,
    pods: Vec<Value>,
    /// Events of pods, by version.
    events: Vec<(u64, Value)>,
    bindings: Vec<Value>,
    conduct: Conduct,
    /// Whether watches tell nothing.
    is_quiet: bool,
}

/// API server with pods and nodes, as far as the gate asks it.
#[derive(Clone)]
struct FakeApi(Arc<Mutex<ApiState>>);

impl FakeApi {
    /// Starts it in a thread that lives as long as the process. Returns its URL.
    fn start() -> (FakeApi, String) {
        let node = |name: &str| {
            json!({ "metadata": { "name": name, "labels": { "farfield.dev/far": "true" } }, "status": {
                "allocatable": { "cpu": "8", "memory": "100Mi" }, "conditions": [{ "type": "Ready", "status": "True" }] } })
        };
        let state = ApiState {
            version: 1,
            nodes: vec![node("a"), node("b")],
            pods: Vec::new(),
            events: Vec::new(),
            bindings: Vec::new(),
            conduct: Conduct::Obeys,
            is_quiet: false,
        };
        let api = FakeApi(Arc::new(Mutex::new(state)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = api.clone();
        std::thread::spawn(move || {
            serve(&listener, &HttpLimits::default(), || false, |request| served.answer(request))
        });
        (api, url)
    }

    fn add_pod(&self, name: &str, memory_mib: u64, least_mib: u64) -> Value {
        let requests =
            json!({ "memory": format!("{least_mib}Mi"), "farfield.dev/far-mib": (memory_mib - least_mib).to_string() });
        let pod = json!({ "metadata": { "name": name, "namespace": "jobs", "uid": format!("uid-{name}"),
            "creationTimestamp": "2099-01-01T00:00:00Z" },
            "spec": { "containers": [{ "name": "main", "resources": { "requests": requests } }] } });
        let mut state = self.0.lock().unwrap();
        state.pods.push(pod.clone());
        state.tell("ADDED", pod.clone());
        pod
    }

    fn behave(&self, conduct: Conduct, is_quiet: bool) {
        let mut state = self.0.lock().unwrap();
        (state.conduct, state.is_quiet) = (conduct, is_quiet);
    }

    fn bindings(&self) -> Vec<Value> {
        self.0.lock().unwrap().bindings.clone()
    }

    fn answer(&self, request: &WebRequest) -> WebResponse {
        let mut state = self.0.lock().unwrap();
        let (path, query) = (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
        if request.headers().get("authorization").and_then(|it| it.to_str().ok()) != Some("Bearer secret-of-the-test") {
            return status(StatusCode::UNAUTHORIZED);
        }
        let list = |items: &Vec<Value>| {
            reply(&json!({ "metadata": { "resourceVersion": state.version.to_string() }, "items": items }))
        };
        match (request.method(), path.as_str()) {
            (&Method::GET, "/api/v1/pods" | "/api/v1/nodes") if query.contains("watch=true") => {
                let since =
                    query.split('&').find_map(|word| word.strip_prefix("resourceVersion=")?.parse::<u64>().ok());
                let is_told =
                    |(version, _): &&(u64, Value)| path.ends_with("pods") && Some(*version) > since && !state.is_quiet;
                let lines: String =
                    state.events.iter().filter(is_told).map(|(_, event)| format!("{event}\n")).collect();
                bytes(StatusCode::OK, "application/json", lines.into_bytes())
            }
            (&Method::GET, "/api/v1/pods") => list(&state.pods),
            (&Method::GET, "/api/v1/nodes") => list(&state.nodes),
            (&Method::GET, path) => match state.find(path) {
                Some(index) => reply(&state.pods[index]),
                None => status(StatusCode::NOT_FOUND),
            },
            (&Method::POST, path) => {
                let Some(index) = path.strip_suffix("/binding").and_then(|path| state.find(path)) else {
                    return status(StatusCode::NOT_FOUND);
                };
                let binding: Value = serde_json::from_slice(request.body()).unwrap();
                match state.conduct {
                    Conduct::Refuses => return status(StatusCode::CONFLICT),
                    Conduct::Fails => return status(StatusCode::INTERNAL_SERVER_ERROR),
                    Conduct::Obeys | Conduct::LosesAnswer => {}
                }
                state.pods[index]["spec"]["nodeName"] = binding["target"]["name"].clone();
                state.bindings.push(binding);
                let pod = state.pods[index].clone();
                state.tell("MODIFIED", pod);
                status(if state.conduct == Conduct::Obeys { StatusCode::CREATED } else { StatusCode::GATEWAY_TIMEOUT })
            }
            _ => status(StatusCode::METHOD_NOT_ALLOWED),
        }
    }
}

impl ApiState {
    fn tell(&mut self, kind: &str, mut pod: Value) {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        let version = self.version;
        self.events.push((version, json!({ "type": kind, "object": pod })));
    }

    fn find(&self, path: &str) -> Option<usize> {
        let name = path.strip_prefix("/api/v1/namespaces/jobs/pods/")?;
        self.pods.iter().position(|pod| pod["metadata"]["name"] == name)
    }
}

fn reply(value: &Value) -> WebResponse {
    bytes(StatusCode::OK, "application/json", value.to_string().into_bytes())
}

fn status(status: StatusCode) -> WebResponse {
    let body = json!({ "kind": "Status", "message": format!("the test says {status}") });
    bytes(status, "application/json", body.to_string().into_bytes())
}

/// Command that starts a gate beside the API server, with a pool of 50 MiB. It writes the token to the folder.
fn gate_command(folder: &Folder, url: &str) -> Command {
    std::fs::write(folder.path("token"), "secret-of-the-test\n").unwrap();
    let mut command = farfield();
    command.args(["gate", "kubernetes", "--far", "50M", "--extender", "127.0.0.1:0", "--api-server", url]);
    command.arg("--api-token-file").arg(folder.path("token"));
    command
}

/// Gate that such a command has started.
struct Gate {
    running: Running,
    client: ApiClient,
    api: FakeApi,
    url: String,
    metrics: String,
    folder: Folder,
}

impl Gate {
    fn start(name: &str) -> Gate {
        let folder = Folder::new(name);
        let (api, url) = FakeApi::start();
        let (running, client, metrics) = Gate::run(&folder, &url);
        Gate { running, client, api, url, metrics, folder }
    }

    fn run(folder: &Folder, url: &str) -> (Running, ApiClient, String) {
        let running = Running::start(gate_command(folder, url).args(["--metrics", "127.0.0.1:0"]));
        let ready: Value = serde_json::from_str(&running.line()).unwrap();
        let client = ApiClient::new(&format!("http://{}", ready["extender"].as_str().unwrap()), None).unwrap();
        (running, client, ready["metrics"].as_str().unwrap().to_owned())
    }

    fn ask(&self, path: &str, question: &Value) -> Value {
        let message = question.to_string().into_bytes();
        let answer = self.client.send(Method::POST, path, None, &message, PATIENCE, 1 << 20).unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{}", String::from_utf8_lossy(&answer.body));
        serde_json::from_slice(&answer.body).unwrap()
    }

    fn filter(&self, pod: &Value) -> Value {
        self.ask("/filter", &json!({ "Pod": pod, "NodeNames": ["a", "b"] }))["NodeNames"].clone()
    }

    /// Orders to bind a pod. Returns the error, which is empty if it is bound.
    fn bind(&self, name: &str, node: &str) -> String {
        let order = json!({ "PodName": name, "PodNamespace": "jobs", "PodUID": format!("uid-{name}"), "Node": node });
        self.ask("/bind", &order)["Error"].as_str().unwrap().to_owned()
    }
}

#[test]
fn bindings_are_decided_again_and_lost_answers_are_counted() {
    let mut gate = Gate::start("kubernetes-bind");
    let [one, two, three, four] = ["one", "two", "three", "four"].map(|name| gate.api.add_pod(name, 90, 30));
    assert_eq!(gate.filter(&one), json!(["a", "b"]));
    let scores = gate.ask("/prioritize", &json!({ "Pod": one, "NodeNames": ["b", "a"] }));
    assert_eq!(scores, json!([{ "Host": "b", "Score": 5 }, { "Host": "a", "Score": 10 }]));
    let has_seen = |line: &str| scrape(&gate.metrics).lines().any(|this| this == line);
    until("the watch has told all four", || {
        has_seen("farfield_gate_waiting_jobs{reason=\"starting\"} 2")
            && has_seen("farfield_gate_waiting_jobs{reason=\"far\"} 2")
    });
    // Watches tell nothing from here on, so only reservations keep the pool from being promised twice.
    gate.api.behave(Conduct::Obeys, true);
    assert_eq!(gate.bind("one", "a"), "");
    assert_eq!(gate.filter(&two), json!(["b"]), "on a, 80 MiB of the pool would be needed");
    assert!(gate.bind("two", "a").contains("30 MiB of the pool are missing"));
    gate.api.behave(Conduct::Refuses, true);
    assert!(gate.bind("two", "b").contains("409"));
    assert_eq!(gate.filter(&three), json!(["b"]), "what was refused is not counted");
    gate.api.behave(Conduct::Fails, true);
    assert!(gate.bind("two", "b").contains("500"));
    assert_eq!(gate.filter(&three), json!([]), "nobody knows whether it was bound");
    gate.api.behave(Conduct::LosesAnswer, true);
    assert!(gate.bind("two", "b").contains("504"), "the same pod can be tried again");
    assert!(gate.bind("two", "b").contains("is bound to b already"));
    assert!(gate.bind("four", "c").contains("does not share the pool"));
    assert!(gate.bind("five", "a").contains("404"));
    let charged = |binding: &Value| binding["metadata"]["annotations"]["farfield.dev/charged-mib"].clone();
    let bindings = gate.api.bindings();
    assert_eq!(bindings.iter().map(charged).collect::<Vec<_>>(), ["0", "0"]);
    assert_eq!(bindings[0]["metadata"]["uid"], "uid-one");
    let metrics = scrape(&gate.metrics);
    for line in [
        "farfield_gate_bound_pods_total 1",
        "farfield_gate_refused_bindings_total 7",
        "farfield_gate_running_jobs 2",
        "farfield_gate_reserved_bindings 2",
        "farfield_gate_charged_bytes 0",
        "farfield_gate_pool_bytes 52428800",
        "farfield_gate_waiting_jobs{reason=\"far\"} 2",
        "farfield_gate_waiting_jobs{reason=\"near\"} 0",
    ] {
        assert!(metrics.lines().any(|this| this == line), "{line}\n{metrics}");
    }
    // Whoever starts anew knows the same from the API server.
    gate.running.signal(libc::SIGKILL);
    gate.running.wait();
    gate.api.behave(Conduct::Obeys, false);
    (gate.running, gate.client, gate.metrics) = Gate::run(&gate.folder, &gate.url);
    assert_eq!(gate.filter(&three), json!([]));
    // A pod ends, and the watch tells it.
    {
        let mut state = gate.api.0.lock().unwrap();
        let pod = state.pods.remove(0);
        state.tell("DELETED", pod);
    }
    until("its room is free", || gate.filter(&four) == json!(["a"]));
    let mut explain = farfield();
    explain.args(["gate", "kubernetes", "--far", "50M", "--api-server", &gate.url, "--explain", "jobs/two"]);
    let explained = explain.arg("--api-token-file").arg(gate.folder.path("token")).output().unwrap();
    assert!(text(&explained).contains("jobs/two is on b"), "{}", text(&explained));
}

#[test]
fn messages_of_nonsense_are_refused() {
    let gate = Gate::start("kubernetes-nonsense");
    let post = |path: &str, body: &[u8]| {
        gate.client.send(Method::POST, path, None, body, PATIENCE, 1 << 20).map(|answer| answer.status.as_u16())
    };
    for path in ["/filter", "/prioritize", "/bind"] {
        for body in [&b""[..], b"{", b"null", b"{\"pod\":{}}", b"\xff"] {
            assert_eq!(post(path, body).unwrap(), 400, "{path} {body:?}");
        }
    }
    assert_eq!(post("/other", b"{}").unwrap(), 404);
    // The gate closes before it has read all of it, which the client may notice while it writes.
    assert!(post("/filter", &vec![b' '; 9 << 20]).map_or(true, |status| status == 413));
    let healthy = gate.client.get("/healthz", None, PATIENCE, 100).unwrap();
    assert_eq!(healthy.status, StatusCode::OK);
    let whole = gate.ask("/filter", &json!({ "Pod": {}, "Nodes": { "items": [] } }));
    assert!(whole["Error"].as_str().unwrap().contains("nodeCacheCapable"), "{whole}");
}

#[test]
fn the_certificate_of_the_webhook_is_exchanged_while_it_serves() {
    let folder = Folder::new("kubernetes-exchanged");
    let install = common::exchangeable_certificates(&folder);
    install("old");
    let (_, url) = FakeApi::start();
    let mut command = gate_command(&folder, &url);
    command
        .args(["--webhook", "127.0.0.1:0"])
        .arg("--tls-cert")
        .arg(folder.path("pem"))
        .arg("--tls-key")
        .arg(folder.path("key"));
    let mut gate = Running::start(&mut command);
    let ready: Value = serde_json::from_str(&gate.line()).unwrap();
    let webhook = format!("https://{}", ready["webhook"].as_str().unwrap());
    // Each question has a connection of its own.
    let is_believed = |authority: &str| {
        let client = ApiClient::new(&webhook, Some(&folder.path(&format!("{authority}/ca.pem")))).unwrap();
        client.get("/healthz", None, PATIENCE, 100).is_ok_and(|answer| answer.status == StatusCode::OK)
    };
    assert_eq!(["old", "new"].map(is_believed), [true, false]);
    // As the kubelet does it: nobody says so.
    install("new");
    until("the new files are seen", || ["old", "new"].map(is_believed) == [false, true]);
    std::fs::write(folder.path("key"), "no key").unwrap();
    gate.signal(libc::SIGHUP);
    install("old");
    gate.signal(libc::SIGHUP);
    until("it was read again", || ["old", "new"].map(is_believed) == [true, false]);
    gate.signal(libc::SIGTERM);
    assert!(gate.wait().success());
}

#[test]
fn what_cannot_be_started_is_refused_with_what_to_do() {
    let folder = Folder::new("kubernetes-refused");
    std::fs::write(folder.path("token"), "wrong\n").unwrap();
    let refused = |words: &[&str]| {
        let mut command = farfield();
        command.env_remove("KUBERNETES_SERVICE_HOST").args(["gate", "kubernetes", "--far"]).args(words);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{words:?}");
        text(&output)
    };
    assert!(refused(&["1G", "--extender", "0.0.0.0:7480"]).contains("whoever reaches it binds pods"));
    assert!(refused(&["1G"]).contains("give --api-server"));
    assert!(refused(&["50%"]).contains("a size, like 512G"));
    assert!(refused(&["1G", "--webhook", "127.0.0.1:0"]).contains("--tls-cert"));
    let (_, url) = FakeApi::start();
    let token = folder.path("token");
    let dry = ["1G", "--dry-run", "--api-server", &url, "--api-token-file", token.to_str().unwrap()];
    assert!(refused(&dry).contains("answers 401"));
}

#[test]
fn manifests_are_written_and_only_their_owner_reads_the_key() {
    let folder = Folder::new("kubernetes-init");
    let to = folder.path("manifests");
    let init = |more: &[&str]| {
        let mut command = farfield();
        command.args(["cluster", "init", "kubernetes", "--far", "1G", "--image", "farfield:1"]);
        command.args(["--scheduler-image", "kube-scheduler:1", "--to"]).arg(&to).args(more).output().unwrap()
    };
    for _ in 0..2 {
        let done = init(&["--failure-policy", "ignore"]);
        assert!(done.status.success(), "{}", text(&done));
        assert!(text(&done).contains("kubectl label node"));
    }
    let read = |name: &str| common::json(&to.join(name));
    assert_eq!(read("webhook.json")["webhooks"][0]["failurePolicy"], "Ignore");
    assert_eq!(read("gate.json")["kind"], "List");
    for name in ["gate.json", "secret.json", "webhook.json", "scheduler.json", "seccomp.json"] {
        let mode = std::fs::metadata(to.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode & 0o077 == 0, name == "secret.json", "{name}: {mode:o}");
    }
    assert!(text(&init(&["--namespace", "Not A Name"])).contains("--namespace"));
    // Slurm's words are not mixed with those of Kubernetes.
    let mut mixed = farfield();
    assert!(!mixed.args(["cluster", "init", "--far", "1G", "kubernetes"]).output().unwrap().status.success());
    let mut nothing = farfield();
    assert!(text(&nothing.args(["cluster", "init"]).output().unwrap()).contains("--far"));
}
