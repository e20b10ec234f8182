//! The API server of Kubernetes, as far as the gate asks it.

use anyhow::Context;
use farfield_cluster::gate::kubernetes::CHARGED_ANNOTATION;
use farfield_cluster::gate::kubernetes::books::{KubernetesBooks, node_selector};
use farfield_cluster::gate::kubernetes::extender::BindArgs;
use farfield_cluster::gate::kubernetes::objects::{NodeObject, ObjectList, PodObject};
use farfield_cluster::gate::{BookChange, Scheduler, SchedulerJob, SchedulerState};
use farfield_web::{ApiAnswer, ApiClient, ApiLines, FetchError, Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time for an answer about one pod.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Longest time for a list.
const LIST_WITHIN: Duration = Duration::from_secs(30);
/// Most bytes of a list.
const LIST_BYTES_MAX: u64 = 512 << 20;
/// Most bytes of another answer, and of an event of a watch.
pub(super) const OBJECT_BYTES_MAX: u64 = 8 << 20;
/// Time after which the API server ends a watch, which then goes on from where it was.
pub(super) const WATCH_FOR: Duration = Duration::from_secs(40);
/// Folder of what a pod is given to talk to the API server.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Reason why the API server has not done what it was asked for.
#[derive(Debug)]
pub(super) enum ApiError {
    /// The API server does not answer.
    Fetch(FetchError),
    /// The token cannot be read.
    Token(anyhow::Error),
    /// The API server has refused.
    Refused { status: StatusCode, message: String },
    /// The answer is not what was asked for.
    Malformed(serde_json::Error),
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ApiError::Fetch(error) => write!(f, "the API server does not answer: {error}"),
            ApiError::Token(error) => write!(f, "--api-token-file: {error:#}"),
            ApiError::Refused { status, message } => write!(f, "the API server answers {}: {message}", status.as_u16()),
            ApiError::Malformed(error) => write!(f, "the API server's answer is not understood: {error}"),
        }
    }
}

impl std::error::Error for ApiError {}

impl ApiError {
    /// Tells whether the API server has certainly changed nothing.
    pub(super) fn is_final(&self) -> bool {
        match self {
            ApiError::Refused { status, .. } => status.is_client_error() && *status != StatusCode::REQUEST_TIMEOUT,
            ApiError::Token(_) => true,
            ApiError::Fetch(_) | ApiError::Malformed(_) => false,
        }
    }
}

impl From<FetchError> for ApiError {
    fn from(error: FetchError) -> ApiError {
        ApiError::Fetch(error)
    }
}

/// Client of an API server.
#[derive(Clone, Debug)]
pub(super) struct KubernetesApi {
    client: ApiClient,
    token_file: PathBuf,
    pool_bytes: u64,
}

impl KubernetesApi {
    /// Makes a client, of the API server of this pod if none is named. Asks for nothing yet.
    pub(super) fn new(
        url: Option<&str>,
        authorities: Option<&Path>,
        token_file: Option<&Path>,
        pool_bytes: u64,
    ) -> anyhow::Result<KubernetesApi> {
        let account = Path::new(ACCOUNT);
        let own = account.join("ca.crt");
        let (url, authorities) = match url {
            Some(url) => (url.to_owned(), authorities),
            None => (own_url().context("this is no pod of Kubernetes: give --api-server")?, authorities.or(Some(&own))),
        };
        let client = ApiClient::new(&url, authorities).context("--api-ca")?;
        let token_file = token_file.map_or_else(|| account.join("token"), Path::to_owned);
        Ok(KubernetesApi { client, token_file, pool_bytes })
    }

    /// Reads the token, which Kubernetes replaces each hour.
    fn token(&self) -> Result<String, ApiError> {
        let read = crate::token::read_file(&self.token_file)
            .and_then(|token| String::from_utf8(token).context("it is not UTF-8"))
            .with_context(|| self.token_file.display().to_string());
        read.map_err(ApiError::Token)
    }

    fn get<T: DeserializeOwned>(&self, path: &str, within: Duration, bytes_max: u64) -> Result<T, ApiError> {
        let answer = self.client.get(path, Some(&self.token()?), within, bytes_max)?;
        serde_json::from_slice(&accepted(answer)?).map_err(ApiError::Malformed)
    }

    /// Lists the pods that have not ended, as they are now.
    pub(super) fn list_pods(&self) -> Result<ObjectList<PodObject>, ApiError> {
        self.get(&format!("{}?{}", Pods::PATH, Pods::selector()), LIST_WITHIN, LIST_BYTES_MAX)
    }

    /// Lists the nodes that share the pool, as they are now.
    pub(super) fn list_nodes(&self) -> Result<ObjectList<NodeObject>, ApiError> {
        self.get(&format!("{}?{}", Nodes::PATH, Nodes::selector()), LIST_WITHIN, LIST_BYTES_MAX)
    }

    /// Opens a watch from a version on.
    pub(super) fn watch<K: WatchedKind>(&self, version: &str) -> Result<ApiLines, ApiError> {
        let path = format!(
            "{}?{}&watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={}",
            K::PATH,
            K::selector(),
            WATCH_FOR.as_secs()
        );
        Ok(self.client.lines(&path, Some(&self.token()?), WATCH_FOR + ANSWER_WITHIN)?)
    }

    /// Reads one pod, as it is now.
    pub(super) fn pod(&self, namespace: &str, name: &str) -> Result<PodObject, ApiError> {
        self.get(&pod_path(namespace, name), ANSWER_WITHIN, OBJECT_BYTES_MAX)
    }

    /// Binds a pod to a node. The API server refuses if it is not this pod any more, or is bound.
    pub(super) fn bind(&self, args: &BindArgs, far_bytes: u64) -> Result<(), ApiError> {
        let BindArgs { pod_name, pod_namespace, pod_uid, node } = args;
        let charged = far_bytes.div_ceil(1 << 20).to_string();
        let binding = json!({ "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": pod_name, "namespace": pod_namespace, "uid": pod_uid,
                "annotations": { CHARGED_ANNOTATION: charged } },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node } });
        let path = format!("{}/binding", pod_path(pod_namespace, pod_name));
        let message = binding.to_string().into_bytes();
        let token = self.token()?;
        let answer = self.client.send(Method::POST, &path, Some(&token), &message, ANSWER_WITHIN, OBJECT_BYTES_MAX)?;
        accepted(answer).map(drop)
    }
}

/// Names come from the scheduler and could be anything; those of Kubernetes are never escaped.
fn pod_path(namespace: &str, name: &str) -> String {
    let escaped = |name: &str| -> String {
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        name.chars().filter(is_plain).collect()
    };
    format!("/api/v1/namespaces/{}/pods/{}", escaped(namespace), escaped(name))
}

fn accepted(answer: ApiAnswer) -> Result<Vec<u8>, ApiError> {
    if answer.status.is_success() {
        return Ok(answer.body);
    }
    let status: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let message = status["message"].as_str().unwrap_or("without a reason").to_owned();
    Err(ApiError::Refused { status: answer.status, message })
}

/// Returns the URL that Kubernetes tells each pod.
fn own_url() -> Option<String> {
    let [host, port] = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"].map(|name| std::env::var(name).ok());
    let (host, port) = (host?, port?);
    Some(if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") })
}

/// Kind of objects that is watched.
pub(super) trait WatchedKind {
    /// Objects of the kind.
    type Object: DeserializeOwned;
    /// Path of their list.
    const PATH: &'static str;
    /// Which of them.
    fn selector() -> String;
}

/// Pods that have not ended.
pub(super) struct Pods;

impl WatchedKind for Pods {
    type Object = PodObject;
    const PATH: &'static str = "/api/v1/pods";

    fn selector() -> String {
        "fieldSelector=status.phase!%3DSucceeded,status.phase!%3DFailed".into()
    }
}

/// Nodes that share the pool.
pub(super) struct Nodes;

impl WatchedKind for Nodes {
    type Object = NodeObject;
    const PATH: &'static str = "/api/v1/nodes";

    fn selector() -> String {
        format!("labelSelector={}", node_selector().replace('/', "%2F").replace('=', "%3D"))
    }
}

impl Scheduler for KubernetesApi {
    type Error = ApiError;

    fn read(&mut self, now_s: u64) -> Result<SchedulerState, ApiError> {
        let mut books = KubernetesBooks::default();
        books.replace_nodes(&self.list_nodes()?.items);
        books.replace_pods(&self.list_pods()?.items, Duration::ZERO);
        Ok(books.state(self.pool_bytes, now_s))
    }

    /// Changes nothing: pods are bound when the scheduler asks, and their charges follow from their nodes.
    fn apply(&mut self, _job: &SchedulerJob, _change: &BookChange<'_>) -> Result<(), ApiError> {
        Ok(())
    }
}
