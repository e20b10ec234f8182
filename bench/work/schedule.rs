//! Schedules of a simulated cluster (CFM, EuroSys 2020). The measured phase is simulated time: the makespans of all batches.
//! Each policy is run beside the cluster without far memory, over the same jobs with the same seeds.

use crate::Options;
use crate::measure::Outcome;
use anyhow::{Context, Result, bail, ensure};
use farfield_cluster::sim::published::{self, Profiles};
use farfield_cluster::sim::replay::{Accounting, ClusterTrace, PolicyReport, ReplayConfig};
use farfield_cluster::sim::{self, Arrivals, Mix, Policy, Rules, RunSummary, Scenario, Simulator};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a schedule is made of.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ScheduleOptions {
    /// Who divides memory and orders jobs.
    #[arg(long, default_value = "memory-time")]
    policy: Policy,
    /// Nodes and jobs: `rack` or `testbed`.
    #[arg(long, default_value = "rack")]
    cluster: String,
    /// Rules of the simulation: `published` or `default`.
    #[arg(long, default_value = "published")]
    rules: String,
    /// How jobs arrive: `batch`, or `open` at 90 % of what the cluster could do.
    #[arg(long, default_value = "batch")]
    arrivals: String,
    /// A hundred times the ratio of memory to cores that jobs need.
    #[arg(long, default_value_t = 160)]
    m2c_percent: u64,
    /// How far mixes are from it at most.
    #[arg(long, default_value_t = 5)]
    m2c_within_percent: u64,
    /// Only mixes whose packability, in percent, is in the three up to this number: the makespan in one node as large as all,
    /// over that in the nodes. 0 takes all mixes.
    #[arg(long, default_value_t = 0)]
    packs_percent: u64,
    /// Far memory in GiB.
    #[arg(long, default_value_t = 192)]
    far_gib: u64,
    /// GiB by which each node's memory grows in the cluster that is compared with, which has no far memory.
    #[arg(long, default_value_t = 0)]
    local_gib: u64,
    /// Mixes of jobs.
    #[arg(long, default_value_t = 1)]
    mixes: usize,
    /// Runs of each mix.
    #[arg(long, default_value_t = 1)]
    trials: usize,
    /// Recorded trace that is replayed: `alibaba` or `bitbrains`.
    #[arg(long, default_value = "alibaba")]
    recording: String,
    /// Accounting of memory in a replay: by `peak`, or by `use` over time.
    #[arg(long, default_value = "peak")]
    accounting: String,
}

/// One mix under a policy, and beside it without far memory and under CFM's policy.
struct Compared {
    of_policy: RunSummary,
    near: RunSummary,
    paper: RunSummary,
    /// With more memory in each node, and none far.
    local: RunSummary,
}

impl Compared {
    /// A figure of the policy over that of CFM's.
    fn over_paper(&self, of: fn(&RunSummary) -> f64) -> f64 {
        of(&self.of_policy) / of(&self.paper)
    }

    /// By how much sooner all is done than without far memory, as a part.
    fn gain(&self, with: &RunSummary) -> f64 {
        self.near.makespan_s.median / with.makespan_s.median - 1.0
    }

    /// The part of the gain of more memory in each node that the policy lacks.
    fn short_of_local(&self) -> f64 {
        1.0 - self.gain(&self.of_policy) / self.gain(&self.local)
    }
}

fn scenario(options: &ScheduleOptions) -> Result<Scenario> {
    let (rules, profiles) = match options.rules.as_str() {
        "published" => (Rules::published(), Profiles::Polynomials),
        "default" => (Rules::default_rules(), Profiles::Lines),
        other => bail!("no rules are called {other}; write published or default"),
    };
    let scenario = match options.cluster.as_str() {
        "rack" => published::rack(rules, profiles),
        "testbed" => published::testbed(rules, profiles),
        other => bail!("no cluster is called {other}; write rack or testbed"),
    };
    Ok(Scenario { far_bytes: options.far_gib << 30, ..scenario })
}

/// Mixes whose ratio of memory to cores is near this one.
fn mixes(scenario: &Scenario, m2c_percent: u64, within_percent: u64, count: usize, seed: u64) -> Result<Vec<Mix>> {
    let [middle, within] = [m2c_percent, within_percent].map(|percent| percent as f64 / 100.0);
    let mixes = sim::mixes_between(scenario, middle - within, middle + within, count, seed);
    ensure!(mixes.len() == count, "only {} mixes need {middle} times as much memory as cores", mixes.len());
    Ok(mixes)
}

/// Mixes of that ratio whose packability is in the three percent up to `packs_percent`.
fn mixes_that_pack(options: &Options, scenario: &Scenario) -> Result<Vec<Mix>> {
    /// One mix in so many is found at least, or none of the rare ones.
    const ONE_IN: usize = 100;
    const AT_A_TIME: usize = 64;
    let schedule = &options.schedule;
    let (m2c, within) = (schedule.m2c_percent, schedule.m2c_within_percent);
    if schedule.packs_percent == 0 {
        return mixes(scenario, m2c, within, schedule.mixes, options.seed);
    }
    let [middle, within, high] = [m2c, within, schedule.packs_percent].map(|percent| percent as f64 / 100.0);
    let drawn = sim::mixes_between(scenario, middle - within, middle + within, schedule.mixes * ONE_IN, options.seed);
    let mut found = Vec::new();
    for some in drawn.chunks(AT_A_TIME) {
        let packability = on_threads(options.threads, some, |mix| {
            let scenario = with_jobs(scenario, mix, options.ops, false);
            let makespan_s =
                |scenario: &Scenario| anyhow::Ok(summary(scenario, Policy::NEAR, options.seed, 1)?.makespan_s.median);
            Ok(makespan_s(&in_one_node(&scenario))? / makespan_s(&scenario)?)
        })?;
        let is_wanted = |(_, packability): &(&Mix, f64)| *packability > high - 0.03 && *packability <= high;
        found.extend(some.iter().zip(packability).filter(is_wanted).map(|(mix, _)| mix.clone()));
        if found.len() >= schedule.mixes {
            found.truncate(schedule.mixes);
            return Ok(found);
        }
    }
    bail!("only {} of {} mixes pack that well: take fewer", found.len(), drawn.len())
}

/// The scenario with so many jobs of a mix, more if they need cores: then as long as if they needed memory.
fn with_jobs(scenario: &Scenario, mix: &Mix, jobs: u64, open: bool) -> Scenario {
    let jobs = jobs as f64 * (1.0 / mix.memory_to_cores).max(1.0);
    let mut scenario = Scenario { counts: published::counts(jobs as usize, &mix.ratio), ..scenario.clone() };
    if open {
        scenario.arrivals = Arrivals::Poisson(0.9 * scenario.jobs_per_s_max());
    }
    scenario
}

/// Does all tasks on so many threads; results are in the order of the tasks.
fn on_threads<T: Sync, R: Send>(threads: u64, tasks: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while let Some((index, task)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|index| Some((index, tasks.get(index)?)))
                {
                    let result = work(task);
                    results.lock().expect("no thread panics").push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics");
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The scenario with so much more memory in each node.
fn with_local(scenario: &Scenario, gib: u64) -> Scenario {
    let mut scenario = scenario.clone();
    scenario.shape.memory_bytes += gib << 30;
    scenario
}

/// The scenario with one node that is as large as all of them.
fn in_one_node(scenario: &Scenario) -> Scenario {
    let mut large = Scenario { nodes: 1, ..scenario.clone() };
    large.shape.cores *= scenario.nodes;
    large.shape.memory_bytes *= u64::from(scenario.nodes);
    large
}

fn summary(scenario: &Scenario, policy: Policy, seed: u64, trials: usize) -> Result<RunSummary> {
    let mut simulator = Simulator::new(scenario, policy)?;
    Ok(sim::summarise(&mut simulator, (&scenario.name, &policy.to_string()), seed, trials, |_| {})?)
}

/// Batches of several mixes, or jobs that keep arriving.
pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let schedule = &options.schedule;
    let scenario = scenario(schedule)?;
    let open = match schedule.arrivals.as_str() {
        "batch" => false,
        "open" => true,
        other => bail!("no arrivals are called {other}; write batch or open"),
    };
    let mixes = mixes_that_pack(options, &scenario)?;
    let compared = on_threads(options.threads, &mixes, |mix| {
        let scenario = with_jobs(&scenario, mix, options.ops, open);
        let of = |policy: Policy| summary(&scenario, policy, options.seed, schedule.trials);
        let of_policy = of(schedule.policy)?;
        let beside = |policy| if policy == schedule.policy { Ok(of_policy.clone()) } else { of(policy) };
        // Without far memory there is nothing to compare with.
        let paper = if schedule.policy.uses_far() { Policy::MEMORY_TIME } else { schedule.policy };
        let near = beside(Policy::NEAR)?;
        let local = match schedule.local_gib {
            0 => near.clone(),
            gib => summary(&with_local(&scenario, gib), Policy::NEAR, options.seed, schedule.trials)?,
        };
        Ok(Compared { near, paper: beside(paper)?, local, of_policy })
    })?;
    let mut outcome = Outcome::new();
    let jobs: u64 = compared.iter().map(|mix| mix.of_policy.jobs as u64).sum();
    let simulated_s: f64 = compared.iter().map(|mix| mix.of_policy.makespan_s.median).sum();
    outcome.timed("schedule", jobs, (simulated_s * 1e9) as u64);
    let mut figure = |name: &str, of: fn(&Compared) -> f64| {
        let values = sorted(compared.iter().map(of).collect());
        outcome.figure(name, median(&values));
        outcome.figure(&format!("{name}_max"), values[values.len() - 1]);
    };
    figure("over_near", |mix| mix.of_policy.makespan_s.median / mix.near.makespan_s.median);
    if schedule.local_gib > 0 {
        figure("local_over_near", |mix| mix.local.makespan_s.median / mix.near.makespan_s.median);
        figure("over_local", |mix| mix.of_policy.makespan_s.median / mix.local.makespan_s.median);
        figure("short_of_local", Compared::short_of_local);
    }
    figure("over_memory_time", |mix| mix.over_paper(|summary| summary.makespan_s.median));
    figure("turnaround_over_memory_time", |mix| mix.over_paper(|summary| summary.turnaround_mean_s.median));
    figure("turnaround_p99_over_memory_time", |mix| mix.over_paper(|summary| summary.turnaround_p99_s.median));
    figure("slowdown_p50", |mix| mix.of_policy.slowdown_p50.median);
    figure("slowdown_p99", |mix| mix.of_policy.slowdown_p99.median);
    figure("far_peak_gib", |mix| mix.of_policy.far_peak_bytes.median / f64::from(1 << 30));
    // What was asked is the same whoever schedules it.
    outcome.checked(jobs, 0);
    Ok(outcome)
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

/// Far memory of the rack's configurations, in GiB.
const FAR_GIB: [u64; 7] = [192, 384, 768, 1536, 2112, 3072, 4032];

/// The thirteen configurations of the study: without far memory, with more near memory, in one large node, with far memory.
fn configurations(rack: &Scenario) -> Vec<(Scenario, Policy)> {
    let far = |gib: u64| Scenario { far_bytes: gib << 30, ..rack.clone() };
    let near = |more_gib: u64| (with_local(rack, more_gib), Policy::NEAR);
    let mut configurations = vec![near(0), near(48), near(96), (in_one_node(rack), Policy::NEAR)];
    configurations.extend([192, 1536].map(|gib| (far(gib), Policy::VARIABLE)));
    configurations.extend(FAR_GIB.map(|gib| (far(gib), Policy::MEMORY_TIME)));
    configurations
}

/// All runs of the study, for their real time.
pub(crate) fn run_speed(options: &Options) -> Result<Outcome> {
    let schedule = &options.schedule;
    let rack = scenario(schedule)?;
    let mut tasks = Vec::new();
    for m2c_percent in [80, 120, 160] {
        for mix in mixes(&rack, m2c_percent, schedule.m2c_within_percent, schedule.mixes, options.seed)? {
            let rack = with_jobs(&rack, &mix, options.ops, false);
            tasks.extend(configurations(&rack));
        }
    }
    let runs = (tasks.len() * schedule.trials) as u64;
    let mut outcome = Outcome::new();
    let makespans = outcome.phase("simulate", runs, || {
        on_threads(options.threads, &tasks, |(scenario, policy)| {
            let mut simulator = Simulator::new(scenario, *policy)?;
            let seeds = (0..schedule.trials as u64).map(|trial| options.seed + trial);
            let makespans = seeds.map(|seed| Ok(simulator.run(seed)?.makespan_s));
            makespans.collect::<Result<Vec<f64>>>()
        })
    })?;
    let bits = makespans.iter().flatten().fold(0u64, |sum, makespan| sum.rotate_left(1) ^ makespan.to_bits());
    outcome.figure("runs", runs as f64);
    outcome.checked(bits, 0);
    Ok(outcome)
}

/// The published simulator's runs again: by how much ours differ.
pub(crate) fn run_reference(options: &Options) -> Result<Outcome> {
    let folder = std::env::var_os("FARFIELD_DATA").context("name the folder of real data in FARFIELD_DATA")?;
    let read = |name: &str| {
        let path = PathBuf::from(&folder).join("cfm").join(name);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let large = sim::large_runs(&read("clustersim_reference_large.csv")?)?;
    let small = sim::small_runs(&read("clustersim_reference_small.csv")?)?;
    let mut outcome = Outcome::new();
    let trials = options.schedule.trials;
    for (cluster, runs) in [("rack", large), ("testbed", small)] {
        let errors = on_threads(options.threads, &runs, |run| {
            let makespan_s = summary(&run.scenario, run.policy, run.seed, trials)?.makespan_s.median;
            Ok((run.configuration.clone(), run.policy.to_string(), makespan_s / run.makespan_s - 1.0))
        })?;
        let mut names: Vec<(&str, &str)> = errors.iter().map(|error| (error.0.as_str(), error.1.as_str())).collect();
        names.sort_unstable();
        names.dedup();
        let mut worst_median = 0f64;
        for name in &names {
            let of = errors.iter().filter(|error| (error.0.as_str(), error.1.as_str()) == *name);
            let values = sorted(of.map(|error| error.2).collect());
            let median = median(&values);
            worst_median = worst_median.max(median.abs());
            outcome.figure(&format!("{cluster} {} {} median", name.0, name.1), median);
        }
        let worst = |wide: bool| {
            let is_wide = |name: &str| ["largebin", "far+2112G"].contains(&name);
            let errors = errors.iter().filter(|error| is_wide(&error.0) == wide);
            errors.map(|error| error.2.abs()).fold(0.0, f64::max)
        };
        outcome.figure(&format!("{cluster}_median_error"), worst_median);
        outcome.figure(&format!("{cluster}_run_error"), worst(false));
        outcome.figure(&format!("{cluster}_run_error_wide"), worst(true));
    }
    let recorded = recorded_error(&read)?;
    outcome.figure("recorded_error", recorded);
    outcome.timed("compare", 732, 1);
    outcome.checked(732, 0);
    Ok(outcome)
}

/// Files of the recorded traces in the folder of real data, unpacked or as they are published: jobs, and what stands for their
/// use of memory over time.
const RECORDINGS: [(&str, [&str; 2], [&str; 2]); 2] = [
    (
        "alibaba",
        ["alibaba/openb_pod_list_default.csv", "alibaba/openb_pod_list_default.csv.zst"],
        ["alibaba/pod_memory_util_anon.csv", "alibaba/pod_memory_util_anon.tar.gz"],
    ),
    (
        "bitbrains",
        [
            "bitbrains/bitbrains_rnd_2013-08_days1-7_500vms.tar",
            "bitbrains/bitbrains_rnd_2013-08_days1-7_500vms.tar.zst",
        ],
        ["", ""],
    ),
];

/// The first of these files that is there.
fn recorded_file(folder: &Path, names: &[&str]) -> Result<PathBuf> {
    let mut paths = names.iter().map(|name| folder.join("cluster-traces").join(name));
    let found = paths.find(|path| path.exists());
    found.with_context(|| format!("no cluster-traces/{} in {}", names.join(" or "), folder.display()))
}

/// A recorded trace under a policy, beside no far memory, by one accounting.
pub(crate) fn run_traces(options: &Options) -> Result<Outcome> {
    let schedule = &options.schedule;
    let folder = std::env::var_os("FARFIELD_DATA").context("name the folder of real data in FARFIELD_DATA")?;
    let folder = Path::new(&folder);
    let recording = RECORDINGS.iter().find(|(name, ..)| *name == schedule.recording);
    let (_, jobs, usage) = recording.with_context(|| format!("no recording is called {}", schedule.recording))?;
    let mut trace = ClusterTrace::read(&recorded_file(folder, jobs)?, None, &mut |_| {})?;
    if !trace.has_usage() {
        trace.read_containers(&recorded_file(folder, usage)?, &mut |_| {})?;
    }
    let accounting = match schedule.accounting.as_str() {
        "peak" => Accounting::Peak,
        "use" => Accounting::Use,
        other => bail!("no accounting is called {other}; write peak or use"),
    };
    let config = ReplayConfig {
        cores: 96,
        near_bytes: None,
        memory_to_cores: schedule.m2c_percent as f64 / 100.0,
        nodes: None,
        far_bytes: None,
        profiles: "all".parse()?,
    };
    let trials = (options.seed, schedule.trials);
    let report = trace.replay(&config, &[schedule.policy], &[accounting], trials, &mut |_| {})?;
    let policies = &report.accountings[0].policies;
    let of_policy = policies.last().context("no far memory is always run")?;
    let over = |of: fn(&PolicyReport) -> f64| 1.0 / (1.0 + of(of_policy));
    let gib = |bytes: f64| bytes / f64::from(1 << 30);
    let mut outcome = Outcome::new();
    outcome.timed("replay", report.trace.jobs as u64, (of_policy.runs.makespan_s.median * 1e9) as u64);
    outcome.figure("over_near", over(|report| report.gain.makespan.median));
    outcome.figure("turnaround_over_near", over(|report| report.gain.turnaround.median));
    outcome.figure("over_requests", over(|report| report.gain_over_requests.makespan.median));
    outcome.figure("turnaround_over_requests", over(|report| report.gain_over_requests.turnaround.median));
    outcome.figure("slowdown_p50", of_policy.runs.slowdown_p50.median);
    outcome.figure("slowdown_p99", of_policy.runs.slowdown_p99.median);
    outcome.figure("far_peak_gib", gib(of_policy.runs.far_peak_bytes.median));
    outcome.figure("evictions", of_policy.evictions.median);
    outcome.figure("lost_share", of_policy.lost_share.median);
    outcome.figure("stranded_share", 1.0 - report.trace.used_share.unwrap_or(1.0));
    outcome.figure("nodes", f64::from(report.cluster.nodes));
    outcome.figure("near_gib", gib(report.cluster.near_bytes as f64));
    let left_out = report.trace.skipped.all() as f64;
    outcome.figure("left_out_share", left_out / (left_out + report.trace.jobs as f64));
    // What was asked is the same whoever schedules it.
    outcome.checked(report.trace.jobs as u64, 0);
    Ok(outcome)
}

/// The larger error of the makespans of the two runs whose arrivals were recorded.
fn recorded_error(read: &impl Fn(&str) -> Result<String>) -> Result<f64> {
    let runs = sim::small_runs(&read("clustersim_reference_small.csv")?)?;
    let mut worst = 0f64;
    for (file, makespan_s) in [("local8", 10_893.229), ("far32G_prop", 8531.640)] {
        let run = runs.iter().find(|run| (run.makespan_s - makespan_s).abs() < 1e-3);
        let run = run.with_context(|| format!("no row of the reference has the makespan {makespan_s}"))?;
        let names: Vec<&str> = run.scenario.kinds.iter().map(|kind| kind.name.as_str()).collect();
        let text = read(&format!("clustersim_jobs_{file}_seed2000.csv"))?;
        let arrivals = Arrivals::Recorded(sim::recorded(&text, &names)?);
        let scenario = Scenario { arrivals, ..run.scenario.clone() };
        let makespan_s = Simulator::new(&scenario, run.policy)?.run(1)?.makespan_s;
        worst = worst.max((makespan_s / run.makespan_s - 1.0).abs());
    }
    Ok(worst)
}
