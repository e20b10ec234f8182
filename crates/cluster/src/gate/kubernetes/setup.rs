//! What `farfield cluster init kubernetes` writes: manifests for `kubectl apply`, and a seccomp profile
//! for nodes. Manifests are JSON, which is YAML, too.

use super::{FAR_RESOURCE, NODE_LABEL, PREFIX};
use serde_json::{Map, Value, json};

/// Name of all objects of the gate.
const NAME: &str = "farfield-gate";
/// Port of the webhook in its container.
const WEBHOOK_PORT: u16 = 8443;
/// Port of metrics in its container.
const METRICS_PORT: u16 = 9480;
/// Address of the extender. Only the scheduler in the same pod reaches it.
pub const EXTENDER_ADDRESS: &str = "127.0.0.1:7480";
/// Path of the webhook.
pub const WEBHOOK_PATH: &str = "/mutate";
/// Name of the seccomp profile in the kubelet's folder of profiles.
pub const SECCOMP_PROFILE: &str = "farfield.json";
/// Folder of the webhook's certificate in the container.
const CERTIFICATE_FOLDER: &str = "/run/farfield/tls";
/// Folder of the scheduler's configuration in its container.
const CONFIG_FOLDER: &str = "/etc/farfield";
/// Profile of containers that allows what far memory needs, with conditions of container engines.
const PROFILE: &str = include_str!("../../../../../packaging/seccomp.json");

/// Cluster with far memory to be.
#[derive(Clone, Debug)]
pub struct KubernetesSetup {
    /// Namespace of the gate.
    pub namespace: String,
    /// Image that has `farfield`.
    pub image: String,
    /// Image that has `kube-scheduler`, of the release of the cluster.
    pub scheduler_image: String,
    /// Name of the scheduler of pods with far memory.
    pub scheduler: String,
    /// Size of the pool in MiB.
    pub pool_mib: u64,
    /// Memory servers that must answer, or nobody is admitted.
    pub servers: Vec<String>,
    /// URL of the webhook, if it does not run in the cluster.
    pub webhook_url: Option<String>,
    /// Conduct of the API server with annotated pods while the webhook does not answer: `Fail` or `Ignore`.
    pub failure_policy: String,
}

/// Certificate of the webhook, as PEM.
#[derive(Clone, Debug)]
pub struct WebhookCertificate {
    /// Certificate of the authority, which the API server believes.
    pub authority: String,
    /// Certificate of the webhook.
    pub certificate: String,
    /// Private key of the webhook.
    pub key: String,
}

/// Reason why no manifests can be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// A name that Kubernetes does not take.
    #[error("{option} {value:?}: a name has at most 63 small letters, digits and dashes, and begins with a letter")]
    Name {
        /// Option of the command line.
        option: &'static str,
        /// Value of the option.
        value: String,
    },
    /// An image without a name.
    #[error("{option} is the name of an image, with its registry and tag")]
    Image {
        /// Option of the command line.
        option: &'static str,
    },
    /// A pool that nobody has.
    #[error("--far is at least 1M and at most 4096T")]
    Pool,
    /// A webhook without encryption.
    #[error("--webhook-url {0:?}: the API server asks webhooks at https:// only")]
    Url(String),
}

/// File to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupFile {
    /// Name of the file.
    pub name: &'static str,
    /// Text of the file.
    pub text: String,
    /// Whether only its owner may read it.
    pub is_secret: bool,
    /// Purpose of the file.
    pub about: &'static str,
}

impl KubernetesSetup {
    /// Checks what people have written.
    pub fn check(&self) -> Result<(), ManifestError> {
        for (option, value) in [("--namespace", &self.namespace), ("--scheduler", &self.scheduler)] {
            let is_name = value.starts_with(|c: char| c.is_ascii_lowercase())
                && !value.ends_with('-')
                && value.len() <= 63
                && value.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
            if !is_name {
                return Err(ManifestError::Name { option, value: value.clone() });
            }
        }
        for (option, image) in [("--image", &self.image), ("--scheduler-image", &self.scheduler_image)] {
            if image.is_empty() || image.contains(|c: char| c.is_whitespace() || c.is_control()) {
                return Err(ManifestError::Image { option });
            }
        }
        if !(1..=1 << 32).contains(&self.pool_mib) {
            return Err(ManifestError::Pool);
        }
        match &self.webhook_url {
            Some(url) if self.webhook_host().is_none() => Err(ManifestError::Url(url.clone())),
            _ => Ok(()),
        }
    }

    /// Returns the host in the URL of a webhook outside of the cluster.
    fn webhook_host(&self) -> Option<&str> {
        let rest = self.webhook_url.as_ref()?.strip_prefix("https://")?;
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host = match authority.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?.0,
            None => authority.split_once(':').map_or(authority, |(host, _)| host),
        };
        (!host.is_empty() && !host.contains('@')).then_some(host)
    }

    /// Returns the names that the webhook's certificate must have.
    pub fn webhook_names(&self) -> Vec<String> {
        let namespace = &self.namespace;
        let service = [format!("{NAME}.{namespace}.svc"), format!("{NAME}.{namespace}.svc.cluster.local")];
        service.into_iter().chain(self.webhook_host().map(str::to_owned)).collect()
    }

    /// Returns all files.
    pub fn files(&self, certificate: &WebhookCertificate) -> Vec<SetupFile> {
        let file = |name, value: Value, about| {
            let text = format!("{value:#}\n");
            SetupFile { name, text, is_secret: false, about }
        };
        let gate = [
            self.namespace(),
            self.account(),
            self.role(),
            self.binding("farfield-gate", json!({ "kind": "ClusterRole", "name": NAME })),
            self.binding("farfield-gate:scheduler", json!({ "kind": "ClusterRole", "name": "system:kube-scheduler" })),
            self.binding("farfield-gate:volumes", json!({ "kind": "ClusterRole", "name": "system:volume-scheduler" })),
            self.reader_of_authentication(),
            self.config_map(),
            self.service(),
            self.deployment(),
        ];
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": gate });
        let mut secret = file("secret.json", self.secret(certificate), "the webhook's certificate and its key");
        secret.is_secret = true;
        vec![
            file("gate.json", list, "the gate, beside a scheduler that asks it, and their rights"),
            secret,
            file(
                "webhook.json",
                self.webhook(certificate),
                "tells the API server to ask the gate about annotated pods",
            ),
            file(
                "scheduler.json",
                self.scheduler_configuration(),
                "configuration of that scheduler, also in gate.json",
            ),
            file("seccomp.json", seccomp(), "profile that allows userfaultfd, for each node"),
        ]
    }

    fn metadata(&self) -> Value {
        json!({ "name": NAME, "namespace": self.namespace, "labels": { "app.kubernetes.io/name": NAME } })
    }

    fn namespace(&self) -> Value {
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": self.namespace } })
    }

    fn account(&self) -> Value {
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": self.metadata() })
    }

    /// Rights of the gate: it reads nodes and pods, and binds pods.
    fn role(&self) -> Value {
        let rules = json!([
            { "apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["get", "list", "watch"] },
            { "apiGroups": [""], "resources": ["pods/binding"], "verbs": ["create"] },
        ]);
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": NAME },
            "rules": rules })
    }

    fn subject(&self) -> Value {
        json!([{ "kind": "ServiceAccount", "name": NAME, "namespace": self.namespace }])
    }

    fn binding(&self, name: &str, role: Value) -> Value {
        let mut role = role;
        role["apiGroup"] = "rbac.authorization.k8s.io".into();
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": { "name": name }, "roleRef": role, "subjects": self.subject() })
    }

    /// The scheduler checks who reads its metrics.
    fn reader_of_authentication(&self) -> Value {
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": { "name": NAME, "namespace": "kube-system" }, "subjects": self.subject(),
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role",
                "name": "extension-apiserver-authentication-reader" } })
    }

    fn scheduler_configuration(&self) -> Value {
        // One point of ours counts for more than all that other plug-ins give: near before far.
        let extender = json!({
            "urlPrefix": format!("http://{EXTENDER_ADDRESS}"), "enableHTTPS": false,
            "filterVerb": "filter", "prioritizeVerb": "prioritize", "bindVerb": "bind", "weight": 100,
            "nodeCacheCapable": true, "ignorable": false, "httpTimeout": "30s",
            "managedResources": [{ "name": FAR_RESOURCE, "ignoredByScheduler": true }],
        });
        json!({ "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "leaderElection": { "leaderElect": false }, "percentageOfNodesToScore": 100,
            "profiles": [{ "schedulerName": self.scheduler }], "extenders": [extender] })
    }

    fn config_map(&self) -> Value {
        let text = format!("{:#}", self.scheduler_configuration());
        let data = json!({ "scheduler.json": text });
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": self.metadata(), "data": data })
    }

    fn service(&self) -> Value {
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": self.metadata(), "spec": {
            "selector": { "app.kubernetes.io/name": NAME },
            "ports": [{ "name": "webhook", "port": 443, "targetPort": WEBHOOK_PORT }] } })
    }

    /// Returns a deployment of one replica, which ends before the next one starts: two would not know of
    /// each other's bindings.
    fn deployment(&self) -> Value {
        let mut command = vec![
            "gate".to_owned(),
            "kubernetes".into(),
            format!("--far={}M", self.pool_mib),
            format!("--webhook=0.0.0.0:{WEBHOOK_PORT}"),
            format!("--tls-cert={CERTIFICATE_FOLDER}/tls.crt"),
            format!("--tls-key={CERTIFICATE_FOLDER}/tls.key"),
            format!("--extender={EXTENDER_ADDRESS}"),
            format!("--metrics=0.0.0.0:{METRICS_PORT}"),
            format!("--scheduler={}", self.scheduler),
            format!("--seccomp-profile={SECCOMP_PROFILE}"),
        ];
        command.extend(self.servers.iter().map(|url| format!("--server={url}")));
        let security = json!({ "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] } });
        let health = json!({ "path": "/healthz", "port": WEBHOOK_PORT, "scheme": "HTTPS" });
        let token = json!({ "secretKeyRef": { "name": "farfield-token", "key": "token", "optional": true } });
        let gate = json!({
            "name": "gate", "image": self.image, "command": ["/usr/bin/farfield"], "args": command,
            "env": [{ "name": "FARFIELD_TOKEN", "valueFrom": token }],
            "ports": [{ "name": "webhook", "containerPort": WEBHOOK_PORT },
                { "name": "metrics", "containerPort": METRICS_PORT }],
            "readinessProbe": { "httpGet": health, "periodSeconds": 5 },
            "resources": { "requests": { "cpu": "50m", "memory": "64Mi" } },
            "volumeMounts": [{ "name": "tls", "mountPath": CERTIFICATE_FOLDER, "readOnly": true }],
            "securityContext": security,
        });
        let scheduler = json!({
            "name": "scheduler", "image": self.scheduler_image,
            // Pods that were refused are asked about again each half minute, also if nothing happens in the cluster.
            "command": ["kube-scheduler", format!("--config={CONFIG_FOLDER}/scheduler.json"),
                "--pod-max-in-unschedulable-pods-duration=30s"],
            "resources": { "requests": { "cpu": "100m", "memory": "128Mi" } },
            "volumeMounts": [{ "name": "config", "mountPath": CONFIG_FOLDER, "readOnly": true }],
            "securityContext": security,
        });
        let spec = json!({
            "serviceAccountName": NAME, "containers": [gate, scheduler],
            "securityContext": { "runAsNonRoot": true, "runAsUser": 7400, "runAsGroup": 7400, "fsGroup": 7400,
                "seccompProfile": { "type": "RuntimeDefault" } },
            "volumes": [{ "name": "tls", "secret": { "secretName": NAME } },
                { "name": "config", "configMap": { "name": NAME } }],
        });
        json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": self.metadata(), "spec": {
            "replicas": 1, "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": { "app.kubernetes.io/name": NAME } },
            "template": { "metadata": { "labels": { "app.kubernetes.io/name": NAME } }, "spec": spec } } })
    }

    fn secret(&self, certificate: &WebhookCertificate) -> Value {
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": self.metadata(), "type": "kubernetes.io/tls",
            "stringData": { "tls.crt": certificate.certificate, "tls.key": certificate.key } })
    }

    /// Only pods with our annotations are sent, so that no other pod waits for the gate.
    fn webhook(&self, certificate: &WebhookCertificate) -> Value {
        use base64::Engine as _;
        let authority = base64::engine::general_purpose::STANDARD.encode(&certificate.authority);
        let mut client: Map<String, Value> = Map::from_iter([("caBundle".to_owned(), authority.into())]);
        match &self.webhook_url {
            Some(url) => client.insert("url".into(), url.clone().into()),
            None => client.insert(
                "service".into(),
                json!({ "name": NAME, "namespace": self.namespace, "path": WEBHOOK_PATH, "port": 443 }),
            ),
        };
        let expression = format!(
            "has(object.metadata.annotations) && object.metadata.annotations.exists(name, name.startsWith('{PREFIX}'))"
        );
        let webhook = json!({
            "name": "pods.farfield.dev", "clientConfig": client, "admissionReviewVersions": ["v1"],
            "sideEffects": "None", "failurePolicy": self.failure_policy, "timeoutSeconds": 5,
            "reinvocationPolicy": "IfNeeded",
            "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"],
                "scope": "Namespaced" }],
            "matchConditions": [{ "name": "asks-for-far-memory", "expression": expression }],
        });
        json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": NAME }, "webhooks": [webhook] })
    }

    /// Returns the commands that make a node one that shares the pool.
    pub fn node_commands() -> [String; 2] {
        [
            format!("kubectl label node NODE {NODE_LABEL}=true"),
            format!("kubectl taint node NODE {NODE_LABEL}=true:NoSchedule"),
        ]
    }
}

/// Returns the profile in the form of the OCI's runtime specification, which the kubelet hands to
/// runtimes. It has no conditions: what capabilities would allow is left out, because containers with
/// far memory need none.
fn seccomp() -> Value {
    let profile: Value = serde_json::from_str(PROFILE).unwrap_or_else(|_| unreachable!("the file is JSON, by a test"));
    let is_kept = |call: &&Value| {
        let includes = &call["includes"];
        let arches = includes["arches"].as_array();
        includes["caps"].is_null() && arches.is_none_or(|arches| arches.contains(&"amd64".into()))
    };
    let calls = profile["syscalls"].as_array().into_iter().flatten().filter(is_kept).map(|call| {
        let mut call = call.as_object().cloned().unwrap_or_default();
        for member in ["includes", "excludes", "comment"] {
            call.remove(member);
        }
        Value::Object(call)
    });
    let calls: Vec<Value> = calls.collect();
    json!({ "defaultAction": profile["defaultAction"], "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"], "syscalls": calls })
}

#[cfg(test)]
mod tests {
    //! Guards against names that become something else in a manifest, and a profile that allows more
    //! than it should.
    use super::*;

    fn setup() -> KubernetesSetup {
        KubernetesSetup {
            namespace: "farfield".into(),
            image: "farfield:1".into(),
            scheduler_image: "kube-scheduler:v1".into(),
            scheduler: "farfield".into(),
            pool_mib: 4096,
            servers: vec!["tcp://big:7400".into()],
            webhook_url: None,
            failure_policy: "Fail".into(),
        }
    }

    fn files(setup: &KubernetesSetup) -> Vec<(SetupFile, Value)> {
        let [authority, certificate, key] = ["ca", "cert", "key"].map(str::to_owned);
        let files = setup.files(&WebhookCertificate { authority, certificate, key });
        files.into_iter().map(|file| (file.clone(), serde_json::from_str(&file.text).unwrap())).collect()
    }

    #[test]
    fn every_file_is_json_and_only_the_secret_has_the_key() {
        let files = files(&setup());
        for (file, value) in &files {
            assert_eq!(file.is_secret, file.name == "secret.json");
            assert_eq!(value["stringData"]["tls.key"] == "key", file.is_secret, "{}", file.name);
            assert!(value.is_object());
        }
        let gate = &files[0].1["items"];
        let deployment = gate.as_array().unwrap().iter().find(|item| item["kind"] == "Deployment").unwrap();
        let container = &deployment["spec"]["template"]["spec"]["containers"][0];
        let words = container["args"].as_array().unwrap();
        assert!(words.contains(&"--far=4096M".into()) && words.contains(&"--server=tcp://big:7400".into()));
        let config = gate.as_array().unwrap().iter().find(|item| item["kind"] == "ConfigMap").unwrap();
        let inner: Value = serde_json::from_str(config["data"]["scheduler.json"].as_str().unwrap()).unwrap();
        assert_eq!(inner, files[3].1);
    }

    #[test]
    fn what_people_write_is_checked() {
        assert_eq!(setup().check(), Ok(()));
        for name in ["", "A", "a b", "a\"", "-a", "a-", "1a", &"a".repeat(64)] {
            assert!(KubernetesSetup { namespace: name.into(), ..setup() }.check().is_err(), "{name:?}");
        }
        assert!(KubernetesSetup { image: "a b".into(), ..setup() }.check().is_err());
        assert_eq!(KubernetesSetup { pool_mib: 0, ..setup() }.check(), Err(ManifestError::Pool));
        let at = |url: &str| KubernetesSetup { webhook_url: Some(url.into()), ..setup() };
        for (url, host) in
            [("https://127.0.0.1:8443/mutate", "127.0.0.1"), ("https://[::1]/m", "::1"), ("https://a", "a")]
        {
            assert_eq!(at(url).check(), Ok(()), "{url}");
            assert_eq!(at(url).webhook_names().last().map(String::as_str), Some(host));
        }
        for url in ["http://a", "https://", "https://u@a", "a"] {
            assert_eq!(at(url).check(), Err(ManifestError::Url(url.into())), "{url}");
        }
        let webhook = &files(&at("https://a/mutate"))[2].1["webhooks"][0]["clientConfig"];
        assert_eq!((&webhook["url"], &webhook["service"]), (&"https://a/mutate".into(), &Value::Null));
    }

    #[test]
    fn the_profile_allows_what_far_memory_needs_and_nothing_that_needs_capabilities() {
        let profile = seccomp();
        assert_eq!((&profile["defaultAction"], &profile["defaultErrnoRet"]), (&json!("SCMP_ACT_ERRNO"), &json!(38)));
        let calls = profile["syscalls"].as_array().unwrap();
        let actions = |name: &str| -> Vec<&str> {
            let has = |call: &&Value| call["names"].as_array().unwrap().contains(&name.into());
            calls.iter().filter(has).map(|call| call["action"].as_str().unwrap()).collect()
        };
        for name in ["userfaultfd", "vmsplice", "process_madvise", "arch_prctl", "clone", "mmap"] {
            assert_eq!(actions(name), ["SCMP_ACT_ALLOW"], "{name}");
        }
        for name in ["mount", "bpf", "clone3", "init_module", "chroot", "kexec_load", "unshare"] {
            assert_eq!(actions(name), ["SCMP_ACT_ERRNO"], "{name}");
        }
        // It depends on its arguments.
        assert_eq!(actions("socket").len(), 3);
        assert!(calls.iter().all(|call| call.get("includes").is_none() && call.get("excludes").is_none()));
    }
}
