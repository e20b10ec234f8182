//! `farfield cluster init kubernetes`: writes manifests, and a certificate for the webhook.

use crate::size::Size;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use farfield_cluster::gate::kubernetes::setup::{KubernetesSetup, SECCOMP_PROFILE, SetupFile, WebhookCertificate};
use farfield_tls::authority::{Authority, Purpose, Validity};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Write manifests for Kubernetes: the gate beside a scheduler, a webhook, rights, and a seccomp profile.
///
/// It writes files into a folder and changes nothing in the cluster. Each run makes a new certificate
/// for the webhook, so apply all files again.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct KubernetesInitArgs {
    /// Folder for the files, which is made if it is not there
    #[arg(long, value_name = "FOLDER")]
    to: PathBuf,
    /// Size of the pool of far memory: what all pods together may have far
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    far: Size,
    /// Image that has farfield
    #[arg(long, value_name = "IMAGE")]
    image: String,
    /// Image that has kube-scheduler, of the cluster's release
    #[arg(long, value_name = "IMAGE")]
    scheduler_image: String,
    /// Memory server that must answer, or nobody is admitted
    #[arg(long, value_name = "URL")]
    server: Vec<String>,
    /// Namespace of the gate
    #[arg(long, value_name = "NAME", default_value = "farfield")]
    namespace: String,
    /// Name of the scheduler of pods with far memory
    #[arg(long, value_name = "NAME", default_value = "farfield")]
    scheduler: String,
    /// URL of the webhook, for a gate that does not run in the cluster
    #[arg(long, value_name = "URL")]
    webhook_url: Option<String>,
    /// Fate of pods that ask for far memory while the webhook does not answer
    #[arg(long, value_enum, default_value_t = FailurePolicy::Fail)]
    failure_policy: FailurePolicy,
    /// Days for which the webhook's certificate is valid
    #[arg(long, value_name = "N", default_value_t = 3650, value_parser = clap::value_parser!(u16).range(1..=36500))]
    days: u16,
}

/// Fate of pods that ask for far memory while the webhook does not answer.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FailurePolicy {
    /// They are refused
    Fail,
    /// They run without far memory, with what they request
    Ignore,
}

const EXAMPLES: &str = "\
Examples:
  farfield cluster init kubernetes --to manifests --far 512G --server tcp://big:7400 \\
    --image farfield:0.1.0 --scheduler-image kube-scheduler:v1.36.3
  kubectl apply -f manifests/gate.json -f manifests/secret.json -f manifests/webhook.json

Then copy seccomp.json to each node, and label the nodes that share the pool (docs/guide/kubernetes.md).";

/// Writes all files.
pub(super) fn init(args: &KubernetesInitArgs) -> anyhow::Result<()> {
    let Size::Bytes(pool_bytes) = args.far else {
        bail!("--far is a size, like 512G: the memory of other machines has no percentage")
    };
    let setup = KubernetesSetup {
        namespace: args.namespace.clone(),
        image: args.image.clone(),
        scheduler_image: args.scheduler_image.clone(),
        scheduler: args.scheduler.clone(),
        pool_mib: pool_bytes >> 20,
        servers: args.server.clone(),
        webhook_url: args.webhook_url.clone(),
        failure_policy: match args.failure_policy {
            FailurePolicy::Fail => "Fail".into(),
            FailurePolicy::Ignore => "Ignore".into(),
        },
    };
    setup.check()?;
    let lasting = || Validity::lasting(Duration::from_secs(u64::from(args.days) * 86_400));
    let (authority, own) = Authority::create(lasting())?;
    let names = setup.webhook_names();
    let issued = authority.issue(Purpose::Server, &names, lasting());
    let issued = issued.with_context(|| format!("{names:?} cannot all be names in a certificate"))?;
    let certificate =
        WebhookCertificate { authority: own.certificate, certificate: issued.certificate, key: issued.key };
    std::fs::create_dir_all(&args.to).with_context(|| args.to.display().to_string())?;
    let mut out = std::io::stdout();
    for file in setup.files(&certificate) {
        let path = args.to.join(file.name);
        write(&path, &file).with_context(|| path.display().to_string())?;
        // The write fails if stdout was closed.
        let _ = writeln!(out, "writes {}: {}", path.display(), file.about);
    }
    let folder = args.to.display();
    let [label, taint] = KubernetesSetup::node_commands();
    let profile = format!("/var/lib/kubelet/seccomp/{SECCOMP_PROFILE}");
    let _ = writeln!(
        out,
        "\nOn each node that shares the pool: copy {folder}/seccomp.json to {profile}, and start \
         `farfield agent`. Then:\n"
    );
    let files = ["gate", "secret", "webhook"].map(|name| format!("-f {folder}/{name}.json")).join(" ");
    let _ = writeln!(out, "  kubectl apply {files}\n  {label}\n  {taint}");
    Ok(())
}

/// Writes a file that takes the place of one that is there. A secret is its owner's from its first byte on.
fn write(path: &Path, file: &SetupFile) -> std::io::Result<()> {
    let fresh = path.with_extension("new");
    let _ = std::fs::remove_file(&fresh);
    let mode = if file.is_secret { 0o600 } else { 0o644 };
    let mut written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
    written.write_all(file.text.as_bytes())?;
    std::fs::rename(&fresh, path)
}
