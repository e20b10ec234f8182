//! `farfield gate`: lets jobs with far memory start, beside the scheduler of a cluster.

mod kubernetes;
mod metrics;
mod replay;

use crate::address::address;
use crate::server_stat::StatClient;
use anyhow::{Context, bail, ensure};
use clap::{Args, Subcommand};
use farfield_cluster::gate::slurm::checks::ClusterFacts;
use farfield_cluster::gate::slurm::{RESERVATION, Slurm};
use farfield_cluster::gate::{GateConfig, GateEvent, GateRound};
use farfield_core::policy::cluster::PoolServers;
use farfield_os::{disk, serving, signals};
use farfield_pager::runner::{ByteSize, agent_socket};
use metrics::SharedCounts;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Interval between two questions to the memory servers.
const ASK_SERVERS_EVERY: Duration = Duration::from_secs(5);
/// Longest pause after rounds that failed.
const PAUSE_MAX: Duration = Duration::from_secs(15);
/// Interval between two renewals of the reservation, which Slurm ends after a year.
const RENEW_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Let jobs with far memory start, beside the scheduler of a cluster.
#[derive(Args, Debug)]
pub(crate) struct GateArgs {
    #[command(subcommand)]
    scheduler: SchedulerArg,
}

/// Scheduler of a cluster.
#[derive(Subcommand, Debug)]
enum SchedulerArg {
    Slurm(SlurmArgs),
    Kubernetes(kubernetes::KubernetesArgs),
    Replay(replay::ReplayArgs),
}

/// Times of a gate that decides in rounds.
#[derive(Args, Debug)]
struct GatePatience {
    /// Interval between two looks at the scheduler
    #[arg(long, value_name = "TIME", value_parser = crate::serve::duration, default_value = "1s")]
    every: Duration,
    /// Time within which an admitted job must start, or it waits again
    #[arg(long, value_name = "TIME", value_parser = crate::serve::duration, default_value = "30s")]
    start_within: Duration,
    /// Time of waiting after which a job is overtaken by no other
    #[arg(long, value_name = "TIME", value_parser = crate::serve::duration, default_value = "60m")]
    overtake: Duration,
}

impl GatePatience {
    fn config(&self, is_dry_run: bool) -> GateConfig {
        GateConfig {
            start_within_s: self.start_within.as_secs().max(1),
            overtake_within_s: self.overtake.as_secs(),
            is_dry_run,
        }
    }
}

/// Let jobs of Slurm with far memory start, by squeue and scontrol.
///
/// Jobs say `--comment=farfield:least=0.5` to Slurm, which `farfield cluster init` has prepared. The
/// gate names a node for each, and charges it for its part of the pool of far memory. All that it
/// knows is in the scheduler: it can be ended and started again at any moment.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
struct SlurmArgs {
    /// Partition of jobs with far memory
    #[arg(long, value_name = "NAME", default_value = "far")]
    partition: String,
    /// Memory server that must answer, or nobody is admitted; it must have room for far memory of new jobs
    #[arg(long, value_name = "URL")]
    server: Vec<String>,
    /// Bytes that the memory servers store for each byte of a job: 2 for a mirror of two, 1.25 for ec(4,1)
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = copies)]
    copies: f64,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    patience: GatePatience,
    /// File whose lock keeps a second gate out [default: gate.lock beside the socket of this user's agent]
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    /// Answer Prometheus at http://ADDR:PORT/metrics
    #[arg(long, value_name = "ADDR:PORT", value_parser = address, conflicts_with_all = ["once", "dry_run", "explain"])]
    metrics: Option<SocketAddr>,
    /// Decide once, print what was decided, and end
    #[arg(long)]
    once: bool,
    /// Decide once and print it, but change nothing
    #[arg(long)]
    dry_run: bool,
    /// Say in a sentence what a job waits for, change nothing, and end
    #[arg(long, value_name = "JOB", conflicts_with_all = ["once", "dry_run", "json"])]
    explain: Option<String>,
    /// With --once or --dry-run: one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield gate slurm --server tcp://big:7400       Beside slurmctld, as its user or root, until it is told to stop
  farfield gate slurm --dry-run                     What it would do now
  farfield gate slurm --explain 4711                Why job 4711 waits
  farfield gate slurm --dry-run --json | jq '.events[] | select(.decision == \"waits\")'
  farfield gate slurm --metrics 127.0.0.1:9480      And answer Prometheus
  sbatch --mem=8G --comment=farfield:least=0.5 job.sh  A job: 8 GiB, of which at least half must be near

When it is ready it prints one line of JSON to stdout. It logs what it decides to stderr.";

/// Runs a gate until it is told to stop, or once.
pub(crate) fn run(args: GateArgs) -> anyhow::Result<()> {
    match args.scheduler {
        SchedulerArg::Slurm(args) => run_slurm(args),
        SchedulerArg::Kubernetes(args) => kubernetes::run(args),
        SchedulerArg::Replay(args) => replay::run(&args),
    }
}

fn run_slurm(args: SlurmArgs) -> anyhow::Result<()> {
    let mut slurm = Slurm::new(&args.partition);
    let mut pool = PoolWatch::new(&args.server, args.token_file.as_deref(), args.copies)?;
    let is_dry_run = args.dry_run || args.explain.is_some();
    let config = args.patience.config(is_dry_run);
    ensure!(!args.json || args.once || args.dry_run, "--json is for --once and --dry-run");
    let every = args.patience.every;
    ensure!(every >= Duration::from_millis(50), "--every is at least 50ms");
    if is_dry_run || args.once {
        let _lock = if is_dry_run { None } else { Some(GateLock::take(args.lock.as_deref())?) };
        let round = config.round(&mut slurm, pool.servers(), now_s())?;
        return show(&args, &slurm, &round);
    }
    let stop = signals::bit(libc::SIGTERM) | signals::bit(libc::SIGINT) | signals::bit(libc::SIGHUP);
    signals::set_mask(stop);
    crate::log::start("info", false);
    let _lock = GateLock::take(args.lock.as_deref())?;
    renew_reservation(&slurm)?;
    let counts = SharedCounts::default();
    let served = args.metrics.map(|address| metrics::serve(address, counts.clone())).transpose()?;
    let started = Instant::now();
    let round = config.round(&mut slurm, pool.servers(), now_s())?;
    metrics::count_round(&counts, &round, started);
    let line = serde_json::json!({ "ready": true, "partition": args.partition, "pool_bytes": round.pool_bytes,
        "running": round.running, "metrics": served, "pid": std::process::id() });
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to stdout")?;
    log(&round);
    let (mut pause, mut renewed) = (every, Instant::now());
    while serving::wait_for_signal(stop, pause)?.is_none() {
        let started = Instant::now();
        match config.round(&mut slurm, pool.servers(), now_s()) {
            Ok(round) => {
                metrics::count_round(&counts, &round, started);
                log(&round);
                pause = every;
            }
            Err(error) => {
                metrics::count_failure(&counts);
                tracing::warn!(%error, "the scheduler cannot be read; jobs keep what they have");
                pause = (pause * 2).min(PAUSE_MAX.max(every));
            }
        }
        if renewed.elapsed() >= RENEW_EVERY {
            renewed = Instant::now();
            if let Err(error) = renew_reservation(&slurm) {
                tracing::error!("{error:#}");
            }
        }
    }
    tracing::info!("told to stop; jobs keep what they have, and those that wait go on waiting");
    Ok(())
}

/// Makes the reservation of the gate's licence last a year from now. Without it, jobs would start
/// without the gate.
fn renew_reservation(slurm: &Slurm) -> anyhow::Result<()> {
    let facts = ClusterFacts::read(slurm)?;
    ensure!(
        facts.has_reservation(),
        "Slurm has no active reservation {RESERVATION}, so jobs would start without the gate: run farfield cluster init"
    );
    let words = ["update", &format!("reservationname={RESERVATION}"), "endtime=now+365days"];
    slurm
        .command("scontrol", &words)
        .context("the reservation cannot be renewed: run the gate as root or Slurm's user")?;
    Ok(())
}

fn show(args: &SlurmArgs, slurm: &Slurm, round: &GateRound) -> anyhow::Result<()> {
    let text = if args.json {
        serde_json::to_string(round)? + "\n"
    } else if let Some(job) = &args.explain {
        explain(job, slurm, round)? + "\n"
    } else {
        render(round)
    };
    // The write fails if stdout was closed.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Says what a job does, from the gate's decisions or from Slurm.
fn explain(job: &str, slurm: &Slurm, round: &GateRound) -> anyhow::Result<String> {
    ensure!(
        job.chars().all(|c| c.is_ascii_digit() || c == '_') && !job.is_empty(),
        "--explain {job}: a job is a number, like 17, or 17_3 for a task of an array"
    );
    if let Some(sentence) = round.explain(job) {
        return Ok(sentence);
    }
    let of_array = format!("{job}_");
    let tasks = round.events.iter().filter_map(|event| {
        let (GateEvent::Waits { job, .. } | GateEvent::Admitted { job, .. }) = event else { return None };
        job.starts_with(&of_array).then(|| round.explain(job))?
    });
    let tasks: Vec<String> = tasks.collect();
    if !tasks.is_empty() {
        return Ok(tasks.join("\n"));
    }
    let words =
        ["--noheader", "--all", "--states=all", &format!("--jobs={job}"), "--Format=State:|,Licenses:|,NodeList:|"];
    let found = slurm.command("squeue", &words)?;
    let mut fields = found.lines().next().unwrap_or_default().split('|');
    match (fields.next().filter(|state| !state.is_empty()), fields.next(), fields.next()) {
        (Some(state), Some(licenses), Some(node)) => {
            Ok(match licenses.split(',').any(|name| name.starts_with("farmem:")) {
                true => format!("job {job} is {state} on {node} with {licenses} (MiB of the pool)"),
                false => format!("job {job} is {state} and has no part of the pool"),
            })
        }
        _ => bail!("Slurm knows no job {job} any more"),
    }
}

fn render(round: &GateRound) -> String {
    let mut text = match round.pool_bytes {
        Some(bytes) => {
            let stored = round.stored_bytes.map_or(String::new(), |bytes| format!(", {} stored", ByteSize(bytes)));
            format!("pool of {}, {} charged{stored}; ", ByteSize(bytes), ByteSize(round.charged_bytes))
        }
        None => "a memory server does not answer; ".to_owned(),
    };
    let _ = writeln!(text, "{} jobs run", round.running);
    for event in &round.events {
        let _ = match event {
            GateEvent::Admitted { job, node, far_bytes } => {
                writeln!(text, "{job:>12}  starts on {node}, with {} of the pool", ByteSize(*far_bytes))
            }
            GateEvent::Charged { job, far_bytes } => {
                writeln!(text, "{job:>12}  has {} of the pool", ByteSize(*far_bytes))
            }
            GateEvent::Withdrawn { job } => writeln!(text, "{job:>12}  has not started, and waits again"),
            GateEvent::Waits { job, reason } => writeln!(text, "{job:>12}  waits: {reason}"),
            GateEvent::Ignored { job, reason } => writeln!(text, "{job:>12}  is left alone: {reason}"),
            GateEvent::Refused { job, error, .. } => writeln!(text, "{job:>12}  {error}"),
        };
    }
    text
}

fn log(round: &GateRound) {
    for event in &round.events {
        match event {
            GateEvent::Admitted { job, node, far_bytes } => tracing::info!(job, node, far_bytes, "admitted"),
            GateEvent::Charged { job, far_bytes } => tracing::info!(job, far_bytes, "charged"),
            GateEvent::Withdrawn { job } => tracing::warn!(job, "had not started, and waits again"),
            GateEvent::Waits { job, reason } => tracing::debug!(job, %reason, "waits"),
            GateEvent::Ignored { job, reason } => tracing::debug!(job, reason, "is left alone"),
            GateEvent::Refused { job, change, error } => {
                tracing::warn!(job, change, error, "Slurm refused a change");
            }
        }
    }
}

/// Seconds since the epoch.
fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Memory servers that must answer, asked every few seconds.
struct PoolWatch {
    servers: Vec<StatClient>,
    copies: f64,
    asked: Option<(Instant, Option<PoolServers>)>,
}

impl PoolWatch {
    fn new(urls: &[String], token_file: Option<&Path>, copies: f64) -> anyhow::Result<PoolWatch> {
        let token = crate::token::read(token_file)?;
        let client = |url: &String| StatClient::new(url, token.clone(), None).context("--server");
        Ok(PoolWatch { servers: urls.iter().map(client).collect::<anyhow::Result<_>>()?, copies, asked: None })
    }

    /// Returns what the servers have and store; `None` if one does not answer. Blocks for five seconds
    /// at most for each step of each server's answer.
    fn servers(&mut self) -> Option<PoolServers> {
        if let Some((at, servers)) = self.asked
            && at.elapsed() < ASK_SERVERS_EVERY
        {
            return servers;
        }
        let was_reached = self.asked.is_none_or(|(_, servers)| servers.is_some());
        let (mut stored, mut capacity, mut is_reached) = (0u64, 0u64, true);
        for server in &mut self.servers {
            match server.ask() {
                Ok(stats) => {
                    let of = |name| stats.numbers.get(name).copied().unwrap_or(0);
                    stored = stored.saturating_add(of("used_bytes")).saturating_add(of("reserved_bytes"));
                    capacity = match of("capacity_bytes") {
                        0 => u64::MAX, // It has no limit.
                        bytes => capacity.saturating_add(bytes),
                    };
                }
                Err(error) => {
                    is_reached = false;
                    if was_reached {
                        tracing::warn!("{error:#}; nobody is admitted");
                    }
                }
            }
        }
        if is_reached && !was_reached {
            tracing::info!("the memory servers answer again");
        }
        let once = |bytes: u64| if bytes == u64::MAX { bytes } else { (bytes as f64 / self.copies) as u64 };
        let known = PoolServers { stored_bytes: once(stored), capacity_bytes: once(capacity) };
        let servers = if self.servers.is_empty() { PoolServers::UNKNOWN } else { known };
        let servers = is_reached.then_some(servers);
        self.asked = Some((Instant::now(), servers));
        servers
    }
}

/// Reads the number of bytes that are stored for each byte of a job.
fn copies(text: &str) -> Result<f64, String> {
    let copies: f64 = text.parse().map_err(|_| "write a number, like 2 or 1.25".to_owned())?;
    if (1.0..=16.0).contains(&copies) { Ok(copies) } else { Err("it is at least 1 and at most 16".to_owned()) }
}

/// Lock that one gate of a machine has. The kernel releases it when the gate ends, however it does.
struct GateLock(#[expect(dead_code, reason = "open as long as the lock is held")] File);

impl GateLock {
    fn take(path: Option<&Path>) -> anyhow::Result<GateLock> {
        let path = path.map_or_else(|| agent_socket().with_file_name("farfield-gate.lock"), Path::to_owned);
        let context = || format!("--lock {}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(context)?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(&path).with_context(context)?;
        ensure!(
            disk::lock(file.as_raw_fd()).is_ok(),
            "a gate runs already and has locked {}: end it first",
            path.display()
        );
        Ok(GateLock(file))
    }
}

#[cfg(test)]
mod tests {
    //! Danger: two gates at once, and a view that hides who waits.
    use super::*;
    use farfield_core::policy::cluster::GateWait;

    #[test]
    fn there_is_one_gate_at_a_time() {
        let folder = std::env::temp_dir().join(format!("farfield-gate-{}", std::process::id()));
        let path = folder.join("gate.lock");
        let first = GateLock::take(Some(&path)).unwrap();
        let refused = GateLock::take(Some(&path)).err().unwrap().to_string();
        assert!(refused.contains("a gate runs already"), "{refused}");
        drop(first);
        assert!(GateLock::take(Some(&path)).is_ok());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_view_says_what_happens_to_whom() {
        let events = vec![
            GateEvent::Admitted { job: "1".into(), node: "n1".into(), far_bytes: 60 << 20 },
            GateEvent::Waits { job: "2_7".into(), reason: GateWait::Far { missing_bytes: 60 << 20 } },
        ];
        let round = GateRound {
            pool_bytes: Some(64 << 30),
            stored_bytes: Some(1 << 30),
            running: 3,
            events,
            ..GateRound::default()
        };
        let text = render(&round);
        for part in
            ["pool of 64.0 GiB", "1.0 GiB stored", "3 jobs run", "1  starts on n1, with 60.0 MiB", "2_7  waits: 60 MiB"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(render(&GateRound::default()).contains("a memory server does not answer"));
    }
}
