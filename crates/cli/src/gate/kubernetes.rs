//! `farfield gate kubernetes`: the webhook that reviews pods, and the extender of a scheduler.

mod api;
mod metrics;
mod watch;

use super::{PoolWatch, now_s, render};
use crate::address::address;
use crate::size::Size;
use anyhow::{Context, bail, ensure};
use api::KubernetesApi;
use clap::Args;
use farfield_cluster::gate::kubernetes::books::{BindOutcome, KubernetesBooks};
use farfield_cluster::gate::kubernetes::extender::{AdmissionError, BindAnswer, BindArgs, ExtenderArgs, FilterAnswer};
use farfield_cluster::gate::kubernetes::review::{ReviewAnswer, ReviewRules, ReviewVerdict, review};
use farfield_cluster::gate::kubernetes::setup::{EXTENDER_ADDRESS, WEBHOOK_PATH};
use farfield_cluster::gate::{GateConfig, Scheduler};
use farfield_core::policy::cluster::{GateRules, PoolServers};
use farfield_os::{serving, signals};
use farfield_web::{
    HttpLimits, Method, StatusCode, TlsIdentity, WebRequest, WebResponse, bytes, serve, serve_tls, text,
};
use metrics::PodCounts;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use watch::Freshness;

/// Interval between two questions to the memory servers, and between two looks whether the process ends.
const ASK_SERVERS_EVERY: Duration = Duration::from_secs(5);
/// Most bytes of a review or of a question of the scheduler. The API server stores no pod above 1.5 MB.
const BODY_BYTES_MAX: usize = 8 << 20;

/// Bounds on what the API server and the scheduler can make the gate hold.
const LIMITS: HttpLimits = HttpLimits {
    connections: 64,
    event_streams: 0,
    head_bytes: 16 * 1024,
    body_bytes: BODY_BYTES_MAX,
    request_within: Duration::from_secs(10),
    response_within: Duration::from_secs(10),
    idle_within: Duration::from_secs(120),
};

/// Let pods of Kubernetes with far memory start, by a webhook and an extender of its scheduler.
///
/// Pods say `farfield.dev/least: "0.5"` in an annotation. The webhook makes that part of their memory
/// their request, and the extender admits them as the pool of far memory allows. `farfield cluster init
/// kubernetes` writes the manifests. All that the gate knows is in the API server: it can be ended and
/// started again at any moment.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct KubernetesArgs {
    /// Size of the pool of far memory: what all pods together may have far
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    far: Size,
    /// Answer the API server's reviews of pods at https://ADDR:PORT/mutate
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, requires_all = ["tls_cert", "tls_key"])]
    webhook: Option<SocketAddr>,
    /// Certificate of the webhook (PEM), with those that lead to its authority; read again when it changes
    #[arg(long, value_name = "FILE", requires = "webhook")]
    tls_cert: Option<PathBuf>,
    /// Private key of the webhook (PEM)
    #[arg(long, value_name = "FILE", requires = "webhook")]
    tls_key: Option<PathBuf>,
    /// Answer the scheduler at http://ADDR:PORT, an address of this machine or pod only
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, default_value = EXTENDER_ADDRESS)]
    extender: SocketAddr,
    /// Name of the scheduler that asks the extender, which the webhook writes into pods
    #[arg(long, value_name = "NAME", default_value = "farfield")]
    scheduler: String,
    /// Seccomp profile in the kubelet's folder, which the webhook writes into pods that name none
    #[arg(long, value_name = "FILE")]
    seccomp_profile: Option<String>,
    /// Memory server that must answer, or nobody is admitted; it must have room for far memory of new pods
    #[arg(long, value_name = "URL")]
    server: Vec<String>,
    /// Bytes that the memory servers store for each byte of a pod: 2 for a mirror of two, 1.25 for ec(4,1)
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = super::copies)]
    copies: f64,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Time of waiting after which a pod is overtaken by no other of its priority or below
    #[arg(long, value_name = "TIME", value_parser = crate::serve::duration, default_value = "60m")]
    overtake: Duration,
    /// URL of the API server [default: that of the pod in which the gate runs]
    #[arg(long, value_name = "URL", requires = "api_token_file")]
    api_server: Option<String>,
    /// Certificates of the API server's authority (PEM) [default: those of the pod]
    #[arg(long, value_name = "FILE")]
    api_ca: Option<PathBuf>,
    /// File with the token for the API server, which is read again for each request [default: that of the pod]
    #[arg(long, value_name = "FILE")]
    api_token_file: Option<PathBuf>,
    /// Answer Prometheus at http://ADDR:PORT/metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, conflicts_with_all = ["dry_run", "explain"])]
    metrics: Option<SocketAddr>,
    /// Decide once about all pods and print it, but change nothing
    #[arg(long)]
    dry_run: bool,
    /// Say in a sentence what a pod waits for, change nothing, and end
    #[arg(long, value_name = "NAMESPACE/POD", conflicts_with = "dry_run")]
    explain: Option<String>,
    /// Log in JSON; with --dry-run: print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield gate kubernetes --far 512G --webhook 0.0.0.0:8443 --tls-cert tls.crt --tls-key tls.key \\
    --server tcp://big:7400                         In the pod of a scheduler, as the manifests start it
  farfield gate kubernetes --far 512G --dry-run     What it would do now, from the API server of this pod
  farfield gate kubernetes --far 512G --api-server https://10.0.0.1:6443 --api-ca ca.crt --api-token-file token \\
    --explain jobs/train-7                          Why the pod train-7 of the namespace jobs waits

When it is ready it prints one line of JSON to stdout. It logs what it decides to stderr.";

/// Runs the gate until it is told to stop, or once.
pub(super) fn run(args: KubernetesArgs) -> anyhow::Result<()> {
    let Size::Bytes(pool_bytes) = args.far else {
        bail!("--far is a size, like 512G: the memory of other machines has no percentage")
    };
    ensure!(
        args.extender.ip().is_loopback(),
        "--extender {}: whoever reaches it binds pods, so its address is one of this machine, like {EXTENDER_ADDRESS}",
        args.extender
    );
    let mut api = KubernetesApi::new(
        args.api_server.as_deref(),
        args.api_ca.as_deref(),
        args.api_token_file.as_deref(),
        pool_bytes,
    )?;
    let mut servers = PoolWatch::new(&args.server, args.token_file.as_deref(), args.copies)?;
    if args.dry_run || args.explain.is_some() {
        return decide_once(&args, &mut api, servers.servers());
    }
    let stop = signals::bit(libc::SIGTERM) | signals::bit(libc::SIGINT) | signals::bit(libc::SIGHUP);
    signals::set_mask(stop);
    crate::log::start("info", args.json);
    let identity = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => {
            Some(Arc::new(TlsIdentity::read(certificate, key).context("--tls-cert, --tls-key")?))
        }
        _ => None,
    };
    let gate = Arc::new(KubernetesGate {
        books: Mutex::default(),
        pods: Freshness::default(),
        nodes: Freshness::default(),
        servers: Mutex::new(servers.servers()),
        pool_bytes,
        overtake_within_s: args.overtake.as_secs(),
        api,
        started: Instant::now(),
        counts: PodCounts::default(),
        review_rules: ReviewRules { scheduler: args.scheduler.clone(), seccomp_profile: args.seccomp_profile.clone() },
    });
    let extender = listen(args.extender, "--extender")?;
    let webhook = args.webhook.map(|address| listen(address, "--webhook")).transpose()?;
    let url = |listener: &TcpListener| listener.local_addr().map(|address| address.to_string());
    let addresses = (url(&extender)?, webhook.as_ref().map(url).transpose()?);
    watch::start(&gate)?;
    watch::wait_until_fresh(&gate).context("the API server cannot be read")?;
    spawn("farfield-extender", &gate, move |gate| serve(&extender, &LIMITS, || false, |request| gate.answer(request)))?;
    if let (Some(listener), Some(identity)) = (webhook, identity.clone()) {
        spawn("farfield-webhook", &gate, move |gate| {
            serve_tls(&listener, &LIMITS, &identity, || false, |request| gate.answer_review(request))
        })?;
    }
    let metrics = args.metrics.map(|address| metrics::serve(address, &gate)).transpose()?;
    let line = serde_json::json!({ "ready": true, "extender": addresses.0, "webhook": addresses.1,
        "metrics": metrics, "pool_bytes": pool_bytes, "pid": std::process::id() });
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to stdout")?;
    loop {
        let signal = serving::wait_for_signal(stop, ASK_SERVERS_EVERY)?;
        let shall_reload = signal == Some(libc::SIGHUP) && identity.is_some();
        if signal.is_some() && !shall_reload {
            break;
        }
        identity.iter().filter(|identity| shall_reload || identity.is_outdated()).for_each(|identity| reload(identity));
        *gate.servers() = servers.servers();
    }
    tracing::info!("told to stop; pods keep what they have, and those that wait go on waiting");
    Ok(())
}

/// Reads the certificate of the webhook again. What cannot be used stays as it is.
fn reload(identity: &TlsIdentity) {
    match identity.reload() {
        Ok(()) => tracing::info!("the certificate was read again"),
        Err(error) => tracing::error!(%error, "the certificate stays as it was, for this file cannot be used"),
    }
}

fn listen(address: SocketAddr, option: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).with_context(|| format!("{option} {address}"))
}

/// Starts a thread that serves until the process ends. A thread that cannot go on ends the process, so
/// that whoever started it starts it again.
fn spawn(
    name: &str,
    gate: &Arc<KubernetesGate>,
    serve: impl FnOnce(&KubernetesGate) -> std::io::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    let gate = gate.clone();
    let thread = std::thread::Builder::new().name(name.to_owned());
    let serve = move || {
        if let Err(error) = serve(&gate) {
            tracing::error!(%error, "the gate cannot serve");
            std::process::exit(1);
        }
    };
    thread.spawn(serve).context("no thread")?;
    Ok(())
}

/// Decides about all pods as if it was asked about each, prints it, and changes nothing.
fn decide_once(args: &KubernetesArgs, api: &mut KubernetesApi, servers: Option<PoolServers>) -> anyhow::Result<()> {
    let config = GateConfig { start_within_s: 1, overtake_within_s: args.overtake.as_secs(), is_dry_run: true };
    let round = config.round(api, servers, now_s())?;
    let text = match &args.explain {
        Some(pod) => {
            let pod = if pod.contains('/') { pod.clone() } else { format!("default/{pod}") };
            match round.explain(&pod) {
                Some(sentence) => sentence,
                None => explain_running(&pod, api)?,
            }
        }
        None if args.json => serde_json::to_string(&round)?,
        None => render(&round).trim_end().to_owned(),
    };
    // The write fails if stdout was closed.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

/// Says where a pod runs that does not wait.
fn explain_running(pod: &str, api: &mut KubernetesApi) -> anyhow::Result<String> {
    use farfield_core::policy::cluster::GatePhase;
    let state = api.read(now_s())?;
    let Some(job) = state.jobs.iter().find(|job| job.id == pod) else {
        bail!("{pod} is no pod with far memory, or has ended: kubectl get pods --all-namespaces")
    };
    Ok(match job.phase {
        Some(GatePhase::Running { node, far_bytes }) => {
            let node = &state.nodes[node].0;
            format!("{pod} is on {node}, and adds {} MiB to what the pool is used for", far_bytes >> 20)
        }
        _ => format!("{pod} waits"),
    })
}

/// Gate of Kubernetes, which its threads share.
struct KubernetesGate {
    books: Mutex<KubernetesBooks>,
    /// When pods were known last.
    pods: Freshness,
    /// When nodes were known last.
    nodes: Freshness,
    /// Memory servers behind the pool; `None` while one does not answer.
    servers: Mutex<Option<PoolServers>>,
    pool_bytes: u64,
    overtake_within_s: u64,
    api: KubernetesApi,
    started: Instant,
    counts: PodCounts,
    review_rules: ReviewRules,
}

impl KubernetesGate {
    fn books(&self) -> MutexGuard<'_, KubernetesBooks> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn servers(&self) -> MutexGuard<'_, Option<PoolServers>> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rules(&self) -> GateRules {
        let servers = *self.servers();
        GateRules {
            pool_bytes: servers.map(|_| self.pool_bytes),
            servers: servers.unwrap_or(PoolServers::UNKNOWN),
            start_within_s: u64::MAX,
            overtake_within_s: self.overtake_within_s,
        }
    }

    /// Answers a review of the API server.
    fn answer_review(&self, request: &WebRequest) -> WebResponse {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/healthz") => self.health(),
            (&Method::POST, WEBHOOK_PATH) => match review(request.body(), &self.review_rules) {
                Ok(ReviewAnswer { pod, message, verdict }) => {
                    match verdict {
                        ReviewVerdict::Untouched => tracing::debug!(pod, "does not ask for far memory"),
                        ReviewVerdict::Changed { memory_mib, least_mib } => {
                            self.counts.changed.fetch_add(1, Ordering::Relaxed);
                            tracing::info!(pod, memory_mib, least_mib, "gets far memory");
                        }
                        ReviewVerdict::Refused(reason) => {
                            self.counts.refused.fetch_add(1, Ordering::Relaxed);
                            tracing::info!(pod, reason, "refused");
                        }
                    }
                    json(&message)
                }
                Err(error) => text(StatusCode::BAD_REQUEST, error),
            },
            _ => text(StatusCode::NOT_FOUND, "reviews are posted to /mutate"),
        }
    }

    fn health(&self) -> WebResponse {
        match self.check_freshness() {
            Ok(()) => text(StatusCode::OK, "ok"),
            Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason),
        }
    }

    fn check_freshness(&self) -> Result<(), String> {
        self.pods.check("pods").and_then(|()| self.nodes.check("nodes"))
    }

    /// Returns the time since the last news of pods or nodes, whichever is older.
    fn age(&self) -> Option<Duration> {
        Some(self.pods.age()?.max(self.nodes.age()?))
    }

    /// Answers the scheduler.
    fn answer(&self, request: &WebRequest) -> WebResponse {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/healthz") => self.health(),
            (&Method::POST, "/filter") => answer_to(request, |args| self.filter(&args)),
            (&Method::POST, "/prioritize") => {
                answer_to(request, |args: ExtenderArgs| {
                    // Without scores, the scheduler goes by those of others.
                    self.books().prioritize(&args, self.rules(), now_s()).unwrap_or_default()
                })
            }
            (&Method::POST, "/bind") => answer_to(request, |args| self.bind(&args)),
            _ => text(StatusCode::NOT_FOUND, "the scheduler posts to /filter, /prioritize and /bind"),
        }
    }

    fn filter(&self, args: &ExtenderArgs) -> FilterAnswer {
        let pod = args.pod.id();
        let answer = match self.check_freshness() {
            Ok(()) => self.books().filter(args, self.rules(), now_s()).map_err(|error| error.to_string()),
            Err(stale) => Err(stale),
        };
        match answer {
            Ok(answer) => {
                let (fit, refused) = (answer.node_names.len(), answer.failed_and_unresolvable_nodes.len());
                let reason = answer.failed_and_unresolvable_nodes.values().next();
                match reason.filter(|_| fit == 0) {
                    Some(reason) => tracing::debug!(pod, refused, reason, "waits"),
                    None => tracing::debug!(pod, fit, refused, "may start"),
                }
                answer
            }
            Err(error) => {
                tracing::warn!(pod, error, "cannot be decided");
                FilterAnswer { error, ..FilterAnswer::default() }
            }
        }
    }

    fn bind(&self, args: &BindArgs) -> BindAnswer {
        let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
        match self.try_bind(args) {
            Ok(far_bytes) => {
                self.counts.bound.fetch_add(1, Ordering::Relaxed);
                tracing::info!(pod, node = args.node, far_bytes, "bound");
                BindAnswer::default()
            }
            Err(error) => {
                self.counts.not_bound.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(pod, node = args.node, %error, "not bound");
                BindAnswer { error: format!("farfield: {error}") }
            }
        }
    }

    /// Binds a pod. Reserves first what it needs, so that no other pod is promised the same.
    fn try_bind(&self, args: &BindArgs) -> Result<u64, BindError> {
        self.check_freshness().map_err(BindError::Stale)?;
        let pod = self.api.pod(&args.pod_namespace, &args.pod_name)?;
        let admission = self.books().reserve_binding(args, &pod, self.rules(), now_s(), self.started.elapsed())?;
        let bound = self.api.bind(args, admission.far_bytes);
        let outcome = match &bound {
            Ok(()) => BindOutcome::Bound,
            Err(error) if error.is_final() => BindOutcome::Refused,
            Err(_) => BindOutcome::Unknown,
        };
        self.books().settle(&args.pod_uid, outcome, self.started.elapsed());
        bound?;
        Ok(admission.far_bytes)
    }
}

/// Reason why a pod is not bound.
#[derive(Debug)]
enum BindError {
    Stale(String),
    Api(api::ApiError),
    Admission(AdmissionError),
}

impl std::fmt::Display for BindError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BindError::Stale(reason) => f.write_str(reason),
            BindError::Api(error) => error.fmt(f),
            BindError::Admission(error) => error.fmt(f),
        }
    }
}

impl From<api::ApiError> for BindError {
    fn from(error: api::ApiError) -> BindError {
        BindError::Api(error)
    }
}

impl From<AdmissionError> for BindError {
    fn from(error: AdmissionError) -> BindError {
        BindError::Admission(error)
    }
}

fn answer_to<Q: DeserializeOwned, A: Serialize>(request: &WebRequest, answer: impl FnOnce(Q) -> A) -> WebResponse {
    match serde_json::from_slice(request.body()) {
        Ok(question) => json(&answer(question)),
        Err(error) => text(StatusCode::BAD_REQUEST, format_args!("this is no question of a scheduler: {error}")),
    }
}

fn json(answer: &impl Serialize) -> WebResponse {
    match serde_json::to_vec(answer) {
        Ok(body) => bytes(StatusCode::OK, "application/json", body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}
