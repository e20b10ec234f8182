//! Jobs on a real Slurm of four small nodes on this machine, with far memory and without (`cluster/real`).
//!
//! Two processors cannot show gains of cores, so jobs wait as well as compute (`bench/work/paced.rs`). Near memory is watched
//! from outside: it is the anonymous memory of all processes that Slurm has started on a node. The simulator is given the
//! jobs' measured curves, the moments at which they were submitted, and what Slurm takes between two jobs.

mod slurm;

use crate::child;
use crate::contender::{Far, server_at};
use crate::job::{Job, binary};
use crate::line::Sample;
use crate::server::Server;
use crate::workload::{Output, Phase};
use anyhow::{Context, Result, bail, ensure};
use farfield_cluster::sim::{self, Simulator};
use serde::{Deserialize, Serialize};
use slurm::{Shape, SlurmCluster};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

const MIB: u64 = 1 << 20;
const SHAPE: Shape = Shape { nodes: 4, cores: 4, near_mib: 512, partitions: KINDS.len() };
/// Near memory of a node that Slurm counts and the agent divides, where there is far memory. A job can have some MiB more
/// than its budget, and a runner has some, too.
const AGENT_MIB: u64 = 480;
const POOL_MIB: u64 = 1536;
/// Wait after each request. Sixteen jobs that all miss must not need more than the two processors.
const WAIT_US: u64 = 30_000;
/// Runs of each kind at once for its curve: with as much company as jobs have on the cluster.
const COPIES: usize = 4;
/// Part of a job's requests that is served for its curve.
const PROFILE_PART: f64 = 0.5;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Runs of the simulator, whose median counts.
const TRIALS: usize = 15;

/// Jobs that are alike.
struct JobKind {
    name: &'static str,
    count: usize,
    memory_mib: u64,
    /// What its program fills; the rest is the program's own.
    data_mib: u64,
    least_mib: u64,
    page_order: &'static str,
    burst: u64,
    /// Requests, as a part of those of the longest kind.
    requests_percent: u64,
}

/// Together they need 1.6 times as much memory as cores.
const KINDS: [JobKind; 3] = [
    JobKind {
        name: "large",
        count: 9,
        memory_mib: 288,
        data_mib: 272,
        least_mib: 128,
        page_order: "popular",
        burst: 150,
        requests_percent: 100,
    },
    JobKind {
        name: "scan",
        count: 9,
        memory_mib: 160,
        data_mib: 144,
        least_mib: 104,
        page_order: "scan",
        burst: 150,
        requests_percent: 85,
    },
    JobKind {
        name: "small",
        count: 6,
        memory_mib: 96,
        data_mib: 80,
        least_mib: 56,
        page_order: "popular",
        burst: 100,
        requests_percent: 60,
    },
];

/// Order of submission: kinds take turns, as far as there are jobs of each.
fn submissions() -> Vec<usize> {
    let most = KINDS.iter().map(|kind| kind.count).max().unwrap_or(0);
    (0..most).flat_map(|turn| (0..KINDS.len()).filter(move |&kind| turn < KINDS[kind].count)).collect()
}

impl JobKind {
    fn words(&self, requests: u64, seed: u64) -> Vec<String> {
        let words = [
            ("--data-mib", self.data_mib.to_string()),
            ("--ops", (requests * self.requests_percent / 100).to_string()),
            ("--seed", seed.to_string()),
            ("--burst", self.burst.to_string()),
            ("--wait-us", WAIT_US.to_string()),
            ("--page-order", self.page_order.to_owned()),
        ];
        let words = words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        ["paced".to_owned()].into_iter().chain(words).collect()
    }
}

/// How long a kind of job takes, in seconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    /// Without Farfield.
    native_s: f64,
    /// By the part of its memory that is near, largest first.
    by_share: Vec<(f64, f64)>,
}

/// Runs the jobs once, with far memory or without.
pub(crate) fn sample(is_far: bool, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "paced", "the workload {} is no job of a cluster", job.workload.name);
    let requests = requests(job)?;
    let name = if is_far { "far" } else { "near" };
    let folder = job.scratch.join(name);
    let near_mib = if is_far { AGENT_MIB } else { SHAPE.near_mib };
    let mut slurm = SlurmCluster::start(&folder, Shape { near_mib, ..SHAPE })?;
    let measured = measured(job, requests)?;
    let server = is_far.then(|| server(job)).transpose()?;
    if let Some(server) = &server {
        start_far_memory(&mut slurm, &folder, &server.url, job)?;
    }
    let batch = Batch { folder: &folder, is_far, near_mib, job, requests };
    let pause_s = batch.pause_s(&mut slurm)?;
    let watch = NearWatch::new(&slurm.name);
    let (ended, near) = watch.during(|| batch.run(&mut slurm))?;
    let first_s = ended.iter().map(|job| job.submitted_s).fold(f64::INFINITY, f64::min);
    let makespan_s = ended.iter().map(|job| job.ended_s).fold(0.0, f64::max) - first_s;
    let simulated_s = predict(is_far, &measured, pause_s, &ended, first_s, &folder)?;
    let node = (SHAPE.near_mib * MIB) as f64;
    let mut figures = BTreeMap::from([
        ("makespan_s".to_owned(), makespan_s),
        ("simulated_s".to_owned(), simulated_s),
        ("simulated_error".to_owned(), (simulated_s / makespan_s - 1.0).abs()),
        ("near_over_node".to_owned(), near.values().copied().max().unwrap_or(0) as f64 / node),
        ("slurm_pause_s".to_owned(), pause_s),
        ("jobs_at_once".to_owned(), ended.iter().map(|job| job.ended_s - job.started_s).sum::<f64>() / makespan_s),
        ("memory_to_cores".to_owned(), memory_to_cores(&measured)),
    ]);
    for (kind, measured) in KINDS.iter().zip(&measured) {
        let slowest = measured.by_share.last().context("a curve has points")?.1;
        figures.insert(format!("slowdown_{}", kind.name), slowest / measured.native_s);
        let of_kind: Vec<f64> = ended
            .iter()
            .filter(|job| KINDS[job.kind].name == kind.name)
            .map(|job| job.ended_s - job.started_s)
            .collect();
        figures.insert(format!("seconds_{}", kind.name), of_kind.iter().sum::<f64>() / of_kind.len() as f64);
    }
    if let Some(server) = &server {
        figures.insert("server_cpu_s".into(), server.cpu_seconds());
    }
    let jobs = ended.len() as u64;
    let (faults_major, faults_minor) = (0, 0);
    let phase =
        Phase { name: "serve".into(), ops: jobs, seconds: makespan_s, cpu_seconds: 0.0, faults_major, faults_minor };
    let checksums: Vec<&str> = ended.iter().map(|job| job.checksum.as_str()).collect();
    Ok(Sample { ns_per_op: phase.ns_per_op(), ops: jobs, checksum: checksums.join(""), phases: vec![phase], figures })
}

/// Starts a memory server with room for all memory of all jobs: jobs leave copies there of what has come near again.
fn server(job: &Job<'_>) -> Result<Server> {
    let all_mib: u64 = KINDS.iter().map(|kind| kind.memory_mib * kind.count as u64).sum();
    // It has three times as much as the data.
    server_at(Far::Tcp, "server", &Job { data_bytes: all_mib / 3 * MIB, ..*job })
}

/// Requests of the longest kind of job.
fn requests(job: &Job<'_>) -> Result<u64> {
    let at = job.arguments.iter().position(|word| word == "--ops").context("the parameter ops is missing")?;
    Ok(job.arguments.get(at + 1).context("--ops has no value")?.parse()?)
}

/// Makes it a cluster with far memory: an agent for each node, and the gate.
fn start_far_memory(slurm: &mut SlurmCluster, folder: &Path, server: &str, job: &Job<'_>) -> Result<()> {
    let farfield = binary(job)?;
    let mut init = slurm.command(farfield);
    let nodes = format!("n[1-{}]", SHAPE.nodes);
    init.args(["cluster", "init", "--far", &format!("{POOL_MIB}M"), "--nodes", &nodes]);
    child::run(init, &folder.join("command"), job.patience)?.success().context("farfield cluster init")?;
    for node in slurm.nodes() {
        let mut agent = Command::new(farfield);
        agent
            .args(["agent", "--near", &format!("{AGENT_MIB}M"), "--pool", server, "--socket"])
            .arg(socket(folder, &node));
        slurm.start_daemon("agent", agent)?;
    }
    let mut gate = Command::new(farfield);
    gate.args(["gate", "slurm", "--every", "200ms", "--server", server, "--lock"]).arg(folder.join("gate.lock"));
    slurm.start_daemon("gate", gate)?;
    let sockets: Vec<PathBuf> = slurm.nodes().iter().map(|node| socket(folder, node)).collect();
    slurm.wait_until("all agents listen", |_| Ok(sockets.iter().all(|socket| socket.exists())))
}

fn socket(folder: &Path, node: &str) -> PathBuf {
    folder.join(format!("{node}.sock"))
}

/// A job that has ended. Times are seconds since the epoch.
struct EndedJob {
    kind: usize,
    node: String,
    submitted_s: f64,
    started_s: f64,
    ended_s: f64,
    checksum: String,
}

/// Jobs that are submitted to one cluster.
struct Batch<'a> {
    folder: &'a Path,
    is_far: bool,
    /// Near memory of a node.
    near_mib: u64,
    job: &'a Job<'a>,
    requests: u64,
}

impl Batch<'_> {
    /// Runs all jobs. Blocks until the last has ended.
    fn run(&self, slurm: &mut SlurmCluster) -> Result<Vec<EndedJob>> {
        let mut submitted = Vec::new();
        for (number, kind) in submissions().into_iter().enumerate() {
            let of = &KINDS[kind];
            let words = of.words(self.requests, number as u64);
            let id = self.submit(slurm, kind, of.memory_mib, of.least_mib, &words)?;
            submitted.push((kind, id, now_s()?));
        }
        self.wait_for(slurm, &submitted)
    }

    /// Measures what Slurm takes from the end of a job to the start of the next one, in seconds, by two small jobs for each
    /// node that are alone on it.
    fn pause_s(&self, slurm: &mut SlurmCluster) -> Result<f64> {
        let small = JobKind { data_mib: 16, ..KINDS[2] };
        let mut submitted = Vec::new();
        for number in 0..2 * SHAPE.nodes {
            let id = self.submit(slurm, 0, self.near_mib, self.near_mib, &small.words(100, number as u64))?;
            submitted.push((0, id, now_s()?));
        }
        let ended = self.wait_for(slurm, &submitted)?;
        let mut pauses = Vec::new();
        for node in slurm.nodes() {
            let mut here: Vec<&EndedJob> = ended.iter().filter(|job| job.node == node).collect();
            here.sort_by(|a, b| a.started_s.total_cmp(&b.started_s));
            pauses.extend(here.windows(2).map(|pair| pair[1].started_s - pair[0].ended_s));
        }
        ensure!(!pauses.is_empty(), "no node had two jobs one after the other");
        Ok(pauses.iter().sum::<f64>() / pauses.len() as f64)
    }

    /// Submits a job and returns its id. Without far memory each kind has a partition of its own, so that a job that does not
    /// fit keeps only jobs of its kind waiting, as behind the gate.
    fn submit(&self, slurm: &SlurmCluster, kind: usize, memory: u64, least: u64, words: &[String]) -> Result<String> {
        let program = [self.job.program.display().to_string()].into_iter().chain(words.iter().cloned());
        let program = program.collect::<Vec<_>>().join(" ");
        let runner = match self.is_far {
            true => {
                let farfield = binary(self.job)?.display();
                format!("{farfield} run --quiet --wait 5m --agent={}/$SLURMD_NODENAME.sock -- ", self.folder.display())
            }
            false => String::new(),
        };
        let script = format!(
            "#!/bin/sh\necho start $(date +%s.%N) $SLURMD_NODENAME\n{runner}{program}\ncode=$?\n\
             echo end $(date +%s.%N) $code\nexit $code\n"
        );
        let file = self.folder.join("job.sh");
        fs::write(&file, script)?;
        let file = file.to_str().context("a folder that is UTF-8")?;
        let output = format!("{}/job-%j.out", self.folder.display());
        let memory = format!("--mem={memory}M");
        let own = match self.is_far {
            true => format!("--comment=farfield:least={least}M"),
            false => format!("--partition=p{kind}"),
        };
        let words = ["--parsable", "--time=10", &memory, &own, "-o", &output, "-e", &output, "-D", "/", file];
        Ok(slurm.run("sbatch", &words)?.trim().to_owned())
    }

    fn wait_for(&self, slurm: &mut SlurmCluster, submitted: &[(usize, String, f64)]) -> Result<Vec<EndedJob>> {
        let file = |id: &str| self.folder.join(format!("job-{id}.out"));
        let has_ended =
            |id: &str| fs::read_to_string(file(id)).is_ok_and(|text| text.lines().any(|line| line.starts_with("end ")));
        let mut waiting: Vec<&str> = submitted.iter().map(|(_, id, _)| id.as_str()).collect();
        slurm.wait_within(self.job.patience, "all jobs have ended", |_| {
            waiting.retain(|id| !has_ended(id));
            Ok(waiting.is_empty())
        })?;
        let ended = |(kind, id, submitted_s): &(usize, String, f64)| {
            let text = fs::read_to_string(file(id))?;
            ended_job(&text, *kind, *submitted_s).with_context(|| format!("job {id} says {text:?}"))
        };
        submitted.iter().map(ended).collect()
    }
}

/// Reads what a job wrote.
fn ended_job(text: &str, kind: usize, submitted_s: f64) -> Result<EndedJob> {
    let fields = |name: &str| -> Result<Vec<&str>> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.with_context(|| format!("no line {name}"))?.split_whitespace().collect())
    };
    let (start, end) = (fields("start")?, fields("end")?);
    let [started_s, node] = start[..] else { bail!("start has no time and node") };
    let [ended_s, code] = end[..] else { bail!("end has no time and code") };
    ensure!(code == "0", "it ended with code {code}");
    let line = text.lines().find(|line| line.starts_with('{')).context("no line of results")?;
    let output = Output::parse(line)?;
    ensure!(output.verified, "{} reads brought wrong data", output.errors);
    Ok(EndedJob {
        kind,
        node: node.to_owned(),
        submitted_s,
        started_s: started_s.parse()?,
        ended_s: ended_s.parse()?,
        checksum: output.checksum,
    })
}

fn now_s() -> Result<f64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64())
}

/// Looks at the near memory of all nodes again and again.
struct NearWatch {
    cluster: String,
}

impl NearWatch {
    fn new(cluster: &str) -> NearWatch {
        NearWatch { cluster: format!("SLURM_CLUSTER_NAME={cluster}") }
    }

    /// Does some work, and returns the most near memory that each node had meanwhile, in bytes.
    fn during<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<(R, BTreeMap<String, u64>)> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut most: BTreeMap<String, u64> = BTreeMap::new();
                while !is_over.load(Ordering::Relaxed) {
                    for (node, bytes) in self.now() {
                        let most = most.entry(node).or_default();
                        *most = bytes.max(*most);
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
                most
            });
            let result = work();
            is_over.store(true, Ordering::Relaxed);
            let most = watch.join().expect("it does not panic");
            let result = result?;
            ensure!(!most.is_empty(), "no process of a job was seen");
            Ok((result, most))
        })
    }

    /// Anonymous memory of all processes that Slurm has started on each node, in bytes.
    ///
    /// While it looks at one process after the other, memory goes from one to another, and would be
    /// counted at both. So it looks again in the reverse order, and the smaller sum counts.
    fn now(&self) -> BTreeMap<String, u64> {
        let processes = self.processes();
        let mut nodes = sums(processes.iter());
        for (node, bytes) in sums(processes.iter().rev()) {
            nodes.entry(node).and_modify(|first| *first = bytes.min(*first));
        }
        nodes
    }

    /// All processes that Slurm has started: the node of each, and its folder in `/proc`.
    fn processes(&self) -> Vec<(String, PathBuf)> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let mut processes = Vec::new();
        for entry in entries.flatten() {
            if !entry.file_name().to_string_lossy().starts_with(|c: char| c.is_ascii_digit()) {
                continue;
            }
            // Whoever ends meanwhile is left out.
            let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
            let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            let mut node = None;
            let mut is_ours = false;
            for variable in &mut variables {
                is_ours |= variable == self.cluster.as_str();
                node = node.or_else(|| variable.strip_prefix("SLURMD_NODENAME=").map(str::to_owned));
            }
            if let (true, Some(node)) = (is_ours, node) {
                processes.push((node, entry.path()));
            }
        }
        processes
    }
}

/// Sums the anonymous memory of processes by their nodes, in bytes.
fn sums<'a>(processes: impl Iterator<Item = &'a (String, PathBuf)>) -> BTreeMap<String, u64> {
    let mut nodes: BTreeMap<String, u64> = BTreeMap::new();
    for (node, process) in processes {
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = anonymous.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        *nodes.entry(node.clone()).or_default() += kib.unwrap_or(0) * 1024;
    }
    nodes
}

/// Measures each kind of job once in a run of the experiment: alone, and with less and less near.
fn measured(job: &Job<'_>, requests: u64) -> Result<Vec<Measured>> {
    let cache = job.scratch.join("curves.json");
    if let Ok(text) = fs::read_to_string(&cache) {
        return Ok(serde_json::from_str(&text)?);
    }
    let server = server(job)?;
    let part = (requests as f64 * PROFILE_PART) as u64;
    let native = all_at_once(job, part, |_| None)?;
    let mut curves: Vec<Measured> =
        native.into_iter().map(|native_s| Measured { native_s, by_share: Vec::new() }).collect();
    for step in [0.0, 0.5, 1.0] {
        let near = |kind: &JobKind| kind.memory_mib - ((kind.memory_mib - kind.least_mib) as f64 * step) as u64;
        let seconds = all_at_once(job, part, |kind| Some((near(kind), server.url.clone())))?;
        for ((curve, kind), seconds) in curves.iter_mut().zip(&KINDS).zip(seconds) {
            curve.by_share.push((near(kind) as f64 / kind.memory_mib as f64, seconds));
        }
    }
    fs::write(cache, serde_json::to_string(&curves)?)?;
    Ok(curves)
}

/// Runs some of each kind at once, with so many MiB near or without Farfield, and returns how long each kind would take with
/// all of its requests, in seconds.
fn all_at_once(
    job: &Job<'_>,
    requests: u64,
    near: impl Fn(&JobKind) -> Option<(u64, String)> + Sync,
) -> Result<Vec<f64>> {
    let run = |kind: &JobKind, copy: usize| -> Result<f64> {
        let scratch = job.scratch.join(format!("profile-{}-{copy}", kind.name));
        fs::create_dir_all(&scratch)?;
        let mut command = match near(kind) {
            Some((mib, url)) => {
                let mut command = Command::new(binary(job)?);
                command.args(["run", "--quiet", "--near", &format!("{mib}M"), "--far", &url, "--"]).arg(job.program);
                command
            }
            None => Command::new(job.program),
        };
        command.args(kind.words(requests, copy as u64));
        let finished = child::run(command, &scratch, job.patience)?;
        let output = Output::parse(finished.success()?)?;
        ensure!(output.verified, "{} reads brought wrong data", output.errors);
        let serve_s = output.phase("serve")?.seconds;
        Ok(finished.wall.as_secs_f64() - serve_s + serve_s / PROFILE_PART)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<Vec<_>> =
            KINDS.iter().map(|kind| (0..COPIES).map(|copy| scope.spawn(move || run(kind, copy))).collect()).collect();
        let of_kind = |threads: Vec<std::thread::ScopedJoinHandle<'_, Result<f64>>>| -> Result<f64> {
            let seconds = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
            Ok(seconds.collect::<Result<Vec<f64>>>()?.iter().sum::<f64>() / COPIES as f64)
        };
        // All are joined before an error is returned.
        let seconds: Vec<Result<f64>> = threads.into_iter().map(of_kind).collect();
        seconds.into_iter().collect()
    })
}

/// How much more memory than cores the jobs need, over their time.
fn memory_to_cores(measured: &[Measured]) -> f64 {
    let sum = |of: fn(&JobKind) -> f64| -> f64 {
        KINDS.iter().zip(measured).map(|(kind, measured)| of(kind) * kind.count as f64 * measured.native_s).sum()
    };
    sum(|kind| kind.memory_mib as f64) / sum(|_| 1.0) * SHAPE.cores as f64 / SHAPE.near_mib as f64
}

/// Returns the makespan that the simulator foretells, in seconds.
fn predict(
    is_far: bool,
    measured: &[Measured],
    pause_s: f64,
    jobs: &[EndedJob],
    first_s: f64,
    folder: &Path,
) -> Result<f64> {
    let (text, arrivals) = scenario(is_far, measured, pause_s, jobs, first_s)?;
    fs::write(folder.join("scenario.toml"), &text)?;
    let scenario = sim::parse(&text, |_| Ok(arrivals.clone()))?;
    let policy = if is_far { "variable" } else { "near" }.parse()?;
    let mut simulator = Simulator::new(&scenario, policy)?;
    let summary = sim::summarise(&mut simulator, (&scenario.name, "real"), 1, TRIALS, |_| {})?;
    Ok(summary.makespan_s.median)
}

/// Writes a scenario file, and the file of arrivals that it names.
fn scenario(
    is_far: bool,
    measured: &[Measured],
    pause_s: f64,
    jobs: &[EndedJob],
    first_s: f64,
) -> Result<(String, String)> {
    let far_mib = if is_far { POOL_MIB } else { 0 };
    let mut text = format!(
        "name = \"real\"\nnodes = {}\ncores = {}\nnear_mib = {}\nfar_mib = {far_mib}\nmemory_servers = 1\n\
         [arrivals]\nfile = \"arrivals.csv\"\n",
        SHAPE.nodes,
        SHAPE.cores,
        if is_far { AGENT_MIB } else { SHAPE.near_mib }
    );
    for (kind, measured) in KINDS.iter().zip(measured) {
        let whole_s = measured.by_share.first().context("a curve has points")?.1;
        let seconds = pause_s + if is_far { whole_s } else { measured.native_s };
        let points = measured.by_share.iter().map(|(share, s)| format!("[{share:.4}, {:.4}]", (s + pause_s) / seconds));
        let least = kind.least_mib as f64 / kind.memory_mib as f64;
        let curve = if is_far { points.collect::<Vec<_>>().join(", ") } else { "[1.0, 1.0]".to_owned() };
        let least = if is_far { least } else { 1.0 };
        let _ = writeln!(
            text,
            "[[class]]\nname = \"{}\"\ncount = {}\ncores = 1\nmemory_mib = {}\nleast = {least}\nseconds = {seconds}\n\
             slowdown = [{curve}]",
            kind.name, kind.count, kind.memory_mib
        );
    }
    let mut arrivals = "class,arrival_s\n".to_owned();
    for job in jobs {
        let _ = writeln!(arrivals, "{},{}", KINDS[job.kind].name, job.submitted_s - first_s);
    }
    Ok((text, arrivals))
}

#[cfg(test)]
mod tests {
    //! Danger: a job that failed and counts, and a scenario that is not that of the jobs.
    use super::*;

    const RESULT: &str = r#"{"phases":[],"checksum":"0a","verified":true,"errors":0,"figures":{}}"#;

    #[test]
    fn a_job_counts_only_if_it_has_ended_well() {
        let text = format!("start 10.5 n2\n{RESULT}\nend 12.0 0\n");
        let job = ended_job(&text, 1, 9.0).unwrap();
        assert_eq!((job.node.as_str(), job.started_s, job.ended_s, job.checksum.as_str()), ("n2", 10.5, 12.0, "0a"));
        let wrong = |from: &str, to: &str| ended_job(&text.replace(from, to), 1, 9.0).is_err();
        assert!(wrong("12.0 0", "12.0 93") && wrong("true", "false") && wrong("end", "") && wrong("n2", ""));
        assert!(wrong(RESULT, ""));
    }

    #[test]
    fn the_simulator_gets_the_jobs_as_they_were() {
        let kinds = submissions();
        assert_eq!(kinds.len(), 24);
        for (index, kind) in KINDS.iter().enumerate() {
            assert_eq!(kinds.iter().filter(|this| **this == index).count(), kind.count);
            assert!(kind.data_mib < kind.memory_mib && kind.least_mib < kind.memory_mib);
        }
        let measured: Vec<Measured> = KINDS
            .iter()
            .map(|kind| {
                let least = kind.least_mib as f64 / kind.memory_mib as f64;
                let native_s = 0.1 * kind.requests_percent as f64;
                Measured { native_s, by_share: vec![(1.0, native_s), (least, 1.2 * native_s)] }
            })
            .collect();
        let job = |(number, kind): (usize, usize)| EndedJob {
            kind,
            node: "n1".into(),
            submitted_s: 100.0 + number as f64 / 10.0,
            started_s: 0.0,
            ended_s: 0.0,
            checksum: String::new(),
        };
        let jobs: Vec<EndedJob> = kinds.into_iter().enumerate().map(job).collect();
        let folder = std::env::temp_dir().join(format!("farfield-bench-real-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let [near, far] = [false, true].map(|is_far| predict(is_far, &measured, 0.5, &jobs, 100.0, &folder).unwrap());
        fs::remove_dir_all(&folder).unwrap();
        assert!(near > 20.0 && near < 60.0 && far < near, "{near} {far}");
        assert!((1.55..1.65).contains(&memory_to_cores(&measured)), "{}", memory_to_cores(&measured));
    }
}
