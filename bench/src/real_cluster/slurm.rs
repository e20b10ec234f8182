//! A Slurm of the driver on this machine: one controller and several nodes, in a folder of their own, without systemd.

use crate::child::{self, Beside, Interrupted};
use crate::swap::unavailable;
use crate::sys;
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Programs of Slurm that are needed, with the Debian package that has each.
const PROGRAMS: [(&str, &str); 7] = [
    ("munged", "munge"),
    ("slurmctld", "slurmctld"),
    ("slurmd", "slurmd"),
    ("sbatch", "slurm-client"),
    ("scontrol", "slurm-client"),
    ("squeue", "slurm-client"),
    ("scancel", "slurm-client"),
];
const READY_WITHIN: Duration = Duration::from_secs(60);
const COMMAND_WITHIN: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Size of the cluster.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) nodes: usize,
    pub(super) cores: usize,
    pub(super) near_mib: u64,
    /// Partitions that have all nodes each, beside the one for far memory.
    pub(super) partitions: usize,
}

/// Daemons of a Slurm, and of ours beside it. All are ended when it is dropped, and its jobs before them.
pub(super) struct SlurmCluster {
    folder: PathBuf,
    conf: PathBuf,
    /// Name of the cluster, which jobs have in their environment.
    pub(super) name: String,
    shape: Shape,
    daemons: Vec<(&'static str, Beside, PathBuf)>,
}

impl SlurmCluster {
    /// Starts the daemons, and waits until all nodes are idle. Unavailable where Slurm is not installed.
    pub(super) fn start(folder: &Path, shape: Shape) -> Result<SlurmCluster> {
        ensure_installed()?;
        // Slurm would take up jobs and nodes of an earlier run again.
        fs::remove_dir_all(folder).ok();
        for name in ["run", "state", "spool", "log", "command"] {
            fs::create_dir_all(folder.join(name))?;
        }
        let key = folder.join("munge.key");
        fs::remove_file(&key).ok();
        fs::write(&key, [7; 1024])?;
        fs::set_permissions(&key, Permissions::from_mode(0o400))?;
        let name = format!("farfield{}", std::process::id());
        let conf = folder.join("slurm.conf");
        fs::write(&conf, configuration(folder, &name, shape)?)?;
        let daemons = Vec::new();
        let mut slurm = SlurmCluster { folder: folder.to_owned(), conf, name, shape, daemons };
        let at = folder.display();
        let mut munged = Command::new("munged");
        munged.args(["--force", "--foreground", &format!("--key-file={at}/munge.key")]);
        munged.arg(format!("--socket={at}/run/munge.socket")).arg(format!("--pid-file={at}/run/munged.pid"));
        munged.arg(format!("--log-file={at}/log/munged.log")).arg(format!("--seed-file={at}/run/munge.seed"));
        slurm.start_daemon("munged", munged)?;
        slurm.wait_until("munged listens", |slurm| Ok(slurm.folder.join("run/munge.socket").exists()))?;
        let conf = slurm.conf.clone();
        let mut controller = Command::new("slurmctld");
        controller.args(["-D", "-f"]).arg(&conf);
        slurm.start_daemon("slurmctld", controller)?;
        slurm.wait_until("slurmctld answers", |slurm| {
            Ok(slurm.run("scontrol", &["ping"]).is_ok_and(|text| text.contains("UP")))
        })?;
        for node in slurm.nodes() {
            let mut command = Command::new("slurmd");
            command.args(["-D", "-N", &node, "-f"]).arg(&conf);
            slurm.start_daemon("slurmd", command)?;
        }
        slurm.wait_until("all nodes are idle", |slurm| {
            Ok(slurm.run("scontrol", &["-o", "show", "node"])?.matches("State=IDLE ").count() == shape.nodes)
        })?;
        Ok(slurm)
    }

    /// Starts a daemon that knows this cluster.
    pub(super) fn start_daemon(&mut self, name: &'static str, mut command: Command) -> Result<()> {
        let scratch = self.folder.join(format!("daemon-{}", self.daemons.len()));
        fs::create_dir_all(&scratch)?;
        command.env("SLURM_CONF", &self.conf);
        self.daemons.push((name, Beside::start(command, &scratch)?, scratch));
        Ok(())
    }

    /// Names of the nodes.
    pub(super) fn nodes(&self) -> Vec<String> {
        (1..=self.shape.nodes).map(|node| format!("n{node}")).collect()
    }

    /// A command that knows this cluster.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", &self.conf);
        command
    }

    /// Runs a command of Slurm and returns what it wrote.
    pub(super) fn run(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = self.command(program);
        command.args(words);
        let finished = child::run(command, &self.folder.join("command"), COMMAND_WITHIN)?;
        Ok(finished.success().with_context(|| format!("{program} {}", words.join(" ")))?.to_owned())
    }

    /// Waits until something is so. Fails when a daemon has ended, or after a minute.
    pub(super) fn wait_until(&mut self, what: &str, is_so: impl FnMut(&SlurmCluster) -> Result<bool>) -> Result<()> {
        self.wait_within(READY_WITHIN, what, is_so)
    }

    /// Waits until something is so. Fails when a daemon has ended, or it has taken so long.
    pub(super) fn wait_within(
        &mut self,
        within: Duration,
        what: &str,
        mut is_so: impl FnMut(&SlurmCluster) -> Result<bool>,
    ) -> Result<()> {
        let until = Instant::now() + within;
        while !is_so(self)? {
            if let Some(signal) = sys::stop_signal() {
                return Err(Interrupted(signal).into());
            }
            for (name, daemon, scratch) in &mut self.daemons {
                let said = || fs::read_to_string(scratch.join("stderr")).unwrap_or_default();
                daemon.ensure_runs().with_context(|| format!("{name}: {}", said().trim()))?;
            }
            ensure!(Instant::now() < until, "after {} s it is not so that {what}", within.as_secs());
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

impl Drop for SlurmCluster {
    fn drop(&mut self) {
        // Jobs are no descendants of ours: Slurm ends them before it is ended.
        self.run("scancel", &["--user=root", "--signal=KILL", "--full"]).ok();
        self.run("scancel", &["--user=root"]).ok();
        let until = Instant::now() + Duration::from_secs(10);
        while self.run("squeue", &["-h", "-o", "%i"]).is_ok_and(|jobs| !jobs.trim().is_empty())
            && Instant::now() < until
        {
            std::thread::sleep(LOOK_EVERY);
        }
        // Ours first, the controller last.
        while self.daemons.pop().is_some() {}
    }
}

fn ensure_installed() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Daemons are where a user's path may not lead.
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    for (program, package) in PROGRAMS {
        if !folders.iter().any(|folder| folder.join(program).is_file()) {
            return Err(unavailable(
                format!("Slurm is not installed: there is no {program}"),
                format!("install it (Debian: {package}; all of slurmctld slurmd slurm-client munge)"),
            ));
        }
    }
    if !sys::is_root() {
        return Err(unavailable("Slurm's daemons run as root", "run it as root"));
    }
    Ok(())
}

fn configuration(folder: &Path, name: &str, shape: Shape) -> Result<String> {
    let at = folder.to_str().context("the scratch folder has a name that is not UTF-8")?;
    if at.len() > 80 {
        bail!("the scratch folder {at} has too long a name for the socket of munged");
    }
    // Free a moment ago: the controller's, and one for each node.
    let listeners = (0..=shape.nodes).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
    let mut conf = format!(
        "ClusterName={name}\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n\
         AuthType=auth/munge\nAuthInfo=socket={at}/run/munge.socket\nSlurmctldPort={}\nStateSaveLocation={at}/state\n\
         SlurmdSpoolDir={at}/spool/%n\nSlurmctldPidFile={at}/run/slurmctld.pid\n\
         SlurmdPidFile={at}/run/slurmd-%n.pid\nSlurmctldLogFile={at}/log/slurmctld.log\nSlurmdLogFile={at}/log/%n.log\n\
         ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n\
         SelectTypeParameters=CR_CPU_Memory\n\
         SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=10000\n\
         ReturnToService=2\nMpiDefault=none\nSlurmdParameters=config_overrides\nKillWait=5\n",
        ports[0]
    );
    for (node, port) in ports[1..].iter().enumerate() {
        let _ = writeln!(
            conf,
            "NodeName=n{} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={} RealMemory={}",
            node + 1,
            shape.cores,
            shape.near_mib
        );
    }
    for partition in 0..shape.partitions {
        let is_default = if partition == 0 { " Default=YES" } else { "" };
        let _ = writeln!(conf, "PartitionName=p{partition} Nodes=n[1-{}] State=UP{is_default}", shape.nodes);
    }
    Ok(conf)
}
