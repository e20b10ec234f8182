//! The published rules give what the published simulator gives.
//!
//! Guards against a compatibility mode that is compatible with nothing. Random draws differ, so
//! makespans are compared, with the median of several seeds on our side where all of
//! the reference is; from recorded arrivals also the start of each job. `tests/data` has a part of it. All of it is read where
//! `../shared/data/cfm` lies beside the project, and its 432 runs in the rack with FARFIELD_DEEP=1.

use farfield_cluster::sim::{Arrivals, Policy, ReferenceRun, Simulator, large_runs, recorded, small_runs};
use std::collections::BTreeMap;
use std::path::Path;

const JOBS: &str = include_str!("data/jobs_far32G.csv");
const LARGE: &str = include_str!("data/reference_large.csv");

/// Returns a file of the shared data, or says that it is not there.
fn shared(name: &str) -> Option<String> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let set = std::env::var_os("FARFIELD_DATA").map(|folder| Path::new(&folder).join("cfm"));
    let folder = set.unwrap_or_else(|| project.join("../shared/data/cfm"));
    let text = std::fs::read_to_string(folder.join(name)).ok();
    if text.is_none() {
        println!("skipped: {} is not there", folder.join(name).display());
    }
    text
}

/// Returns by how many percent the median makespan of these seeds differs.
fn error_percent(run: &ReferenceRun, seeds: u64) -> f64 {
    let mut simulator = Simulator::new(&run.scenario, run.policy).unwrap();
    let makespan = |round| simulator.run(run.seed + 1000 * round).unwrap().makespan_s;
    let mut makespans: Vec<f64> = (0..seeds).map(makespan).collect();
    makespans.sort_by(f64::total_cmp);
    (makespans[makespans.len() / 2] / run.makespan_s - 1.0) * 100.0
}

fn bound_percent(run: &ReferenceRun) -> f64 {
    if ["largebin", "far+2112G"].contains(&run.configuration.as_str()) { 8.0 } else { 5.0 }
}

/// Returns the errors of all runs by configuration and policy.
fn errors(runs: &[ReferenceRun], seeds: u64, bound: impl Fn(&ReferenceRun) -> f64) -> BTreeMap<String, Vec<f64>> {
    let mut errors: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for run in runs {
        let error = error_percent(run, seeds);
        assert!(error.abs() <= bound(run), "{} {}: {error} %", run.configuration, run.policy);
        errors.entry(format!("{} {}", run.configuration, run.policy)).or_default().push(error);
    }
    errors
}

fn median(errors: &mut [f64]) -> f64 {
    errors.sort_by(f64::total_cmp);
    let half = errors.len() / 2;
    if errors.len() % 2 == 1 { errors[half] } else { f64::midpoint(errors[half - 1], errors[half]) }
}

/// Compares a run from recorded arrivals job by job.
fn check_jobs(run: &ReferenceRun, text: &str) {
    let names: Vec<&str> = run.scenario.kinds.iter().map(|kind| kind.name.as_str()).collect();
    let mut scenario = run.scenario.clone();
    scenario.arrivals = Arrivals::Recorded(recorded(text, &names).unwrap());
    let mut simulator = Simulator::new(&scenario, run.policy).unwrap();
    let makespan_s = simulator.run(1).unwrap().makespan_s;
    assert!((makespan_s / run.makespan_s - 1.0).abs() < 0.001, "{makespan_s} instead of {}", run.makespan_s);
    let cell = |line: &str, column: usize| line.split(',').nth(column).unwrap().parse::<f64>().unwrap() / 1000.0;
    let mut times: Vec<[f64; 3]> =
        text.lines().skip(1).map(|line| [2, 3, 4].map(|column| cell(line, column))).collect();
    times.sort_by(|a, b| a[0].total_cmp(&b[0]));
    assert_eq!(times.len(), simulator.records().len());
    for (&[arrival_s, start_s, end_s], job) in times.iter().zip(simulator.records()) {
        assert!((arrival_s - job.arrival_s).abs() < 1e-6);
        // Each start is up to 0.1 s late at random, and so is what waits for it.
        assert!((start_s - job.start_s).abs() < 2.0 && (end_s - job.end_s).abs() < 2.0, "{job:?}, not {start_s}");
    }
}

/// Returns the run of the small reference of which all jobs were recorded.
fn recorded_run(runs: &[ReferenceRun], makespan_s: f64) -> ReferenceRun {
    runs.iter().find(|run| (run.makespan_s - makespan_s).abs() < 1e-3).expect("a row with this makespan").clone()
}

#[test]
fn recorded_arrivals_give_the_recorded_schedule() {
    let header = "workloads,ratios,jobs,arrival_window_min,seed,config,num_servers,cpus_per_server,mem_mb_per_server,\
                  far_mem_mb,policy,min_ratios_pct,makespan_ms";
    let row = "quicksort:kmeans:memaslap,2:2:1,600,15,2000,8 servers + 32G far,8,7,32768,32768,proportional,55:65:60,\
               8531640";
    let run = &small_runs(&format!("{header}\n{row}\n")).unwrap()[0];
    assert_eq!(run.policy, Policy::VARIABLE);
    check_jobs(run, JOBS);
    let Some((runs, jobs)) =
        shared("clustersim_reference_small.csv").zip(shared("clustersim_jobs_local8_seed2000.csv"))
    else {
        return;
    };
    check_jobs(&recorded_run(&small_runs(&runs).unwrap(), 10_893.229), &jobs);
}

#[test]
fn makespans_in_the_rack_are_the_published_ones() {
    let runs = large_runs(LARGE).unwrap();
    assert_eq!(errors(&runs, 1, bound_percent).len(), 12);
    if std::env::var_os("FARFIELD_DEEP").is_none_or(|deep| deep != "1") {
        return;
    }
    let Some(text) = shared("clustersim_reference_large.csv") else { return };
    let runs = large_runs(&text).unwrap();
    assert_eq!(runs.len(), 432);
    for (configuration, mut errors) in errors(&runs, 9, bound_percent) {
        let median = median(&mut errors);
        println!("{configuration:32} {median:+.2} % ({:+.2} to {:+.2})", errors[0], errors[errors.len() - 1]);
        assert!(median.abs() <= 0.5, "{configuration}: {median} %");
    }
}

#[test]
fn makespans_on_the_testbed_are_the_published_ones() {
    let Some(text) = shared("clustersim_reference_small.csv") else { return };
    let runs = small_runs(&text).unwrap();
    assert_eq!(runs.len(), 300);
    // So few jobs run at a time that one more or less at the end is a twentieth of the makespan.
    for (configuration, mut errors) in errors(&runs, 3, |_| 8.0) {
        let median = median(&mut errors);
        println!("{configuration:48} {median:+.2} % ({:+.2} to {:+.2})", errors[0], errors[errors.len() - 1]);
        assert!(median.abs() <= 1.0, "{configuration}: {median} %");
    }
}
