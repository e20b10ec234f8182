//! `farfield cluster`: prepares the scheduler of a cluster for far memory.

mod kubernetes;
mod users;

use crate::size::Size;
use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use farfield_cluster::gate::slurm::checks::ClusterFacts;
use farfield_cluster::gate::slurm::setup::{self, ClusterSetup};
use farfield_cluster::gate::slurm::{RESERVATION, Slurm};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Prepare the scheduler of a cluster for jobs with far memory.
#[derive(Args, Debug)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Subcommand, Debug)]
enum ClusterCommand {
    Init(Box<InitArgs>),
    Users(users::UsersArgs),
}

#[derive(Subcommand, Debug)]
enum InitScheduler {
    Kubernetes(kubernetes::KubernetesInitArgs),
}

/// Write what Slurm needs: a Lua script, lines of slurm.conf, and a reservation.
///
/// Run it where slurmctld runs, as root. It says what it writes, changes nothing that is right
/// already, and stops before it writes anything if slurm.conf has lines of its own for the same things.
/// With the word `kubernetes`, it writes manifests for Kubernetes instead.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct InitArgs {
    #[command(subcommand)]
    scheduler: Option<InitScheduler>,
    /// Size of the pool of far memory: what all jobs together may have far
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, required = true)]
    far: Option<Size>,
    /// Partition of jobs with far memory
    #[arg(long, value_name = "NAME", default_value = "far")]
    partition: String,
    /// Nodes of the partition, as Slurm writes them: node[1-8] [default: the partition exists]
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
    /// Folder of slurm.conf [default: that of the variable SLURM_CONF, or /etc/slurm]
    #[arg(long, value_name = "FOLDER")]
    config_dir: Option<PathBuf>,
    /// Say what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield cluster init --far 512G --nodes node[1-8] --dry-run   What would be written
  farfield cluster init --far 512G --nodes node[1-8]             512 GiB of far memory for eight nodes, in partition far
  farfield cluster init --far 1T                                 The pool has grown
  farfield cluster init kubernetes --help                        For Kubernetes
  farfield doctor --cluster                                      What is wrong, if anything

Then start `farfield agent` on each node and `farfield gate slurm` beside slurmctld (docs/guide/slurm.md).";

/// Runs a command about a cluster.
pub(crate) fn run(args: ClusterArgs) -> anyhow::Result<()> {
    match args.command {
        ClusterCommand::Init(args) => match &args.scheduler {
            Some(InitScheduler::Kubernetes(args)) => kubernetes::init(args),
            None => init(&args),
        },
        ClusterCommand::Users(args) => users::run(&args),
    }
}

/// A step of the preparation.
#[derive(serde::Serialize)]
struct SetupStep {
    what: String,
    /// Whether something changes.
    changes: bool,
    #[serde(skip)]
    action: StepAction,
}

enum StepAction {
    Write(PathBuf, String),
    Scontrol(Vec<String>),
    Nothing,
}

fn init(args: &InitArgs) -> anyhow::Result<()> {
    let slurm = Slurm::new(&args.partition);
    let facts = ClusterFacts::read(&slurm).context("start slurmctld first")?;
    let (user, slurm_uid) = facts.slurm_user().context("scontrol show config does not name SlurmUser")?;
    let Some(Size::Bytes(pool_bytes)) = args.far else {
        bail!("--far is a size, like 512G: the memory of other machines has no percentage")
    };
    let wanted = ClusterSetup {
        partition: args.partition.clone(),
        nodes: args.nodes.clone(),
        pool_mib: pool_bytes >> 20,
        slurm_uid,
    };
    wanted.check()?;
    let folder = config_folder(args.config_dir.as_deref())?;
    let steps = steps(&wanted, &folder, &facts, &user)?;
    for step in &steps {
        if !args.json {
            let mark = match (step.changes, args.dry_run) {
                (false, _) => "ok     ",
                (true, true) => "would  ",
                (true, false) => "does   ",
            };
            // The write fails if stdout was closed.
            let _ = writeln!(std::io::stdout(), "{mark}{}", step.what);
        }
        if !args.dry_run && step.changes {
            step.act(&slurm)?;
        }
    }
    if !args.dry_run {
        let after = ClusterFacts::read(&slurm)?;
        ensure!(
            after.has_reservation(),
            "Slurm has not taken the changes over: restart slurmctld, and run this again (its log says why)"
        );
    }
    let text = match args.json {
        true => serde_json::json!({ "dry_run": args.dry_run, "steps": steps }).to_string(),
        false if args.dry_run => "Nothing was written.".into(),
        false => {
            "Copy the files to the same folder of each node, unless nodes are configless. Then start `farfield agent` \
                  on each node and `farfield gate slurm` here, and look at `farfield doctor --cluster`."
                .into()
        }
    };
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

fn steps(wanted: &ClusterSetup, folder: &Path, facts: &ClusterFacts, user: &str) -> anyhow::Result<Vec<SetupStep>> {
    let main = folder.join("slurm.conf");
    let slurm_conf =
        std::fs::read_to_string(&main).with_context(|| format!("{}: give --config-dir", main.display()))?;
    let script = folder.join(setup::SCRIPT);
    let job_submit = folder.join(setup::JOB_SUBMIT);
    let existing = match std::fs::read_to_string(&job_submit) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| job_submit.display().to_string()),
    };
    let script_path = script.to_str().context("--config-dir: the path is not UTF-8")?;
    let conf = wanted.conf(&slurm_conf)?;
    let call = setup::job_submit(existing.as_deref(), script_path).map_err(|lines| {
        anyhow::anyhow!("{} is the site's own. Add these lines, and run this again:\n{lines}", job_submit.display())
    })?;
    let mut steps = vec![
        write_step(&script, wanted.script(), "the script that understands --comment=farfield:least=0.5")?,
        match call {
            Some(text) => write_step(&job_submit, text, "the script that Slurm calls, which calls it")?,
            None => SetupStep::kept(format!("{} calls it already", job_submit.display())),
        },
        write_step(&main, conf, "at its end, licences, plug-in and partition")?,
    ];
    // Also where Slurm has not read what is in the files.
    if steps.iter().any(|step| step.changes) || !facts.has_reservation() {
        let what = "tells slurmctld: scontrol reconfigure".to_owned();
        steps.push(SetupStep { what, changes: true, action: StepAction::Scontrol(vec!["reconfigure".into()]) });
    }
    if facts.has_reservation() {
        steps.push(SetupStep::kept(format!("the reservation {RESERVATION} is there")));
    } else {
        if facts.names_reservation() {
            let words = vec!["delete".into(), format!("reservation={RESERVATION}")];
            let what = format!("deletes the reservation {RESERVATION}, which is not active");
            steps.push(SetupStep { what, changes: true, action: StepAction::Scontrol(words) });
        }
        let words = ClusterSetup::reservation(user);
        let what = format!("makes the reservation: scontrol {}", words.join(" "));
        steps.push(SetupStep { what, changes: true, action: StepAction::Scontrol(words) });
    }
    Ok(steps)
}

/// A file that is written unless it has this text.
fn write_step(path: &Path, text: String, about: &str) -> anyhow::Result<SetupStep> {
    let same = match std::fs::read_to_string(path) {
        Ok(existing) => existing == text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let what = format!("{}{}: {about}", if same { "" } else { "writes " }, path.display());
    Ok(SetupStep { what, changes: !same, action: StepAction::Write(path.to_owned(), text) })
}

impl SetupStep {
    fn kept(what: String) -> SetupStep {
        SetupStep { what, changes: false, action: StepAction::Nothing }
    }

    fn act(&self, slurm: &Slurm) -> anyhow::Result<()> {
        match &self.action {
            StepAction::Write(path, text) => replace(path, text).with_context(|| path.display().to_string()),
            StepAction::Scontrol(words) => {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                slurm
                    .command("scontrol", &words)
                    .map(drop)
                    .context("the files are written; Slurm refused the rest, which may need a restart of slurmctld")
            }
            StepAction::Nothing => Ok(()),
        }
    }
}

/// Replaces a file in one step, with the rights that it had.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    // Two dots in front: no daemon that reads the folder takes it for a configuration.
    let mut name = std::ffi::OsString::from("..");
    name.push(path.file_name().unwrap_or_default());
    let hidden = path.with_file_name(name);
    let mut file = std::fs::File::create(&hidden)?;
    file.write_all(text.as_bytes())?;
    if let Ok(metadata) = std::fs::metadata(path) {
        file.set_permissions(metadata.permissions())?;
        std::os::unix::fs::fchown(&file, Some(owner(&metadata).0), Some(owner(&metadata).1))?;
    }
    file.sync_all()?;
    std::fs::rename(&hidden, path)
}

fn owner(metadata: &std::fs::Metadata) -> (u32, u32) {
    use std::os::unix::fs::MetadataExt;
    (metadata.uid(), metadata.gid())
}

fn config_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let folder = match (given, std::env::var_os("SLURM_CONF")) {
        (Some(folder), _) => folder.to_owned(),
        (None, Some(file)) => PathBuf::from(file).parent().map(Path::to_owned).unwrap_or_default(),
        (None, None) => PathBuf::from("/etc/slurm"),
    };
    std::path::absolute(&folder).with_context(|| folder.display().to_string())
}
