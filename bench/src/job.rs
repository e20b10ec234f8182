//! One sample of a program: how it is run, and what it and the kernel say afterwards.

use crate::child::{self, Finished};
use crate::line::Sample;
use crate::machine;
use crate::overuse::Overuse;
use crate::swap::unavailable;
use crate::workload::{Output, Workload};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// One sample to take.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) workload: &'a Workload,
    pub(crate) program: &'a Path,
    pub(crate) arguments: &'a [String],
    pub(crate) near_bytes: u64,
    pub(crate) data_bytes: u64,
    /// The slowdown that contenders who choose how much is near may have.
    pub(crate) slo: Option<f64>,
    /// The bandwidth between jobs and servers that have a link.
    pub(crate) link_bytes_per_s: Option<u64>,
    /// What a tenant beside the job takes.
    pub(crate) overuse: Option<Overuse>,
    pub(crate) patience: Duration,
    pub(crate) scratch: &'a Path,
    /// The `farfield` binary, if there is one.
    pub(crate) farfield: Option<&'a Path>,
    /// Folder of the lock and ledger for what touches the whole machine.
    pub(crate) ledger: &'a Path,
}

pub(crate) fn native(job: &Job<'_>) -> Result<Sample> {
    let mut command = Command::new(job.program);
    command.args(job.arguments);
    let finished = child::run(command, job.scratch, job.patience)?;
    sample(job, &finished)
}

/// What the program said of itself and the kernel said of it.
pub(crate) fn sample(job: &Job<'_>, finished: &Finished) -> Result<Sample> {
    let output = Output::parse(finished.success()?)?;
    ensure!(output.verified, "{} reads brought wrong data", output.errors);
    let phase = output.phase(job.workload.phase)?;
    let mut figures = output.figures.clone();
    figures.insert("faults_major".to_string(), phase.faults_major as f64);
    figures.insert("cpu_ns_per_op".to_string(), phase.cpu_seconds * 1e9 / phase.ops.max(1) as f64);
    figures.insert("wall_s".to_string(), finished.wall.as_secs_f64());
    figures.insert("cpu_user_s".to_string(), finished.ended.cpu_user.as_secs_f64());
    figures.insert("cpu_system_s".to_string(), finished.ended.cpu_system.as_secs_f64());
    figures.insert("resident_peak_bytes".to_string(), finished.ended.resident_peak_bytes as f64);
    // A slowdown is promised for the whole program, not for its measured phase.
    let ns_per_op = match job.slo {
        Some(_) => finished.wall.as_nanos() as f64 / phase.ops.max(1) as f64,
        None => phase.ns_per_op(),
    };
    Ok(Sample { ns_per_op, ops: phase.ops, checksum: output.checksum, phases: output.phases, figures })
}

/// `farfield run` with its far memory there, or at a private server.
pub(crate) fn job_on(url: Option<&str>, job: &Job<'_>) -> Result<Sample> {
    let far: Vec<OsString> = url.into_iter().flat_map(|url| ["--far".into(), url.into()]).collect();
    job_with(&far, job)
}

/// `farfield run` with the near memory of the point and these options.
pub(crate) fn job_with(options: &[OsString], job: &Job<'_>) -> Result<Sample> {
    let report = job.scratch.join("report.json");
    fs::remove_file(&report).ok();
    let mut command = Command::new(binary(job)?);
    command.args(["run", "--near", &format!("{}B", job.near_bytes), "--quiet", "--report"]).arg(&report);
    command.args(options).arg("--").arg(job.program).args(job.arguments);
    let finished = child::run(command, job.scratch, job.patience)?;
    let mut sample = sample(job, &finished).context("under farfield run")?;
    let text = fs::read_to_string(&report).context("farfield run wrote no report")?;
    sample.figures.extend(report_figures(&text, job, &sample)?);
    Ok(sample)
}

/// The program with its data in a far heap there.
pub(crate) fn heap_on(pool: &str, plane: &str, more: &[&str], job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.knows_heaps(), "the workload {} does not know far heaps", job.workload.name);
    let mut command = Command::new(job.program);
    command.args(job.arguments).args(["--near", &job.near_bytes.to_string(), "--pool", pool, "--plane", plane]);
    command.args(more);
    let finished = child::run(command, job.scratch, job.patience)?;
    let mut sample = sample(job, &finished).context("in a far heap")?;
    if let Some(peak) = sample.figures.get("near_peak_bytes") {
        sample.figures.insert("near_peak_over_limit".into(), peak / job.near_bytes as f64);
    }
    if let (Some(ns), Some(clock)) = (sample.figures.get("reclaim_ns_per_byte"), machine::clock_ghz()) {
        sample.figures.insert("reclaim_cycles_per_byte".into(), ns * clock);
    }
    Ok(sample)
}

/// Room for the data and what else there is, as a URL says it.
pub(crate) fn twice(job: &Job<'_>) -> String {
    format!("{}M", (2 * job.data_bytes).div_ceil(1 << 20))
}

pub(crate) fn binary<'a>(job: &Job<'a>) -> Result<&'a Path> {
    job.farfield
        .ok_or_else(|| unavailable("no farfield binary beside this one", "build it, or name it with --farfield PATH"))
}

/// Figures of a `farfield run` report, and those that follow from them.
pub(crate) fn report_figures(text: &str, job: &Job<'_>, sample: &Sample) -> Result<BTreeMap<String, f64>> {
    let report: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).context("the report is not JSON")?;
    let mut figures: BTreeMap<String, f64> =
        report.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
    figures.remove("exit_code");
    if let Some(moves) = report.get("hold").and_then(|hold| hold.get("pool_moves")?.as_f64()) {
        figures.insert("pool_moves".into(), moves);
    }
    let get = |name: &str| figures.get(name).copied();
    let demand_reads = get("demand_reads").context("the report has no demand_reads")?;
    let mut derived = Vec::new();
    if demand_reads > 0.0 {
        // First touches happen while filling; what the measured phase waits for are reads. Reads of other phases are in
        // the count too, so that this is a lower bound where a check phase follows.
        derived.push(("ns_per_fault", sample.ns_per_op * sample.ops as f64 / demand_reads));
    }
    if let (Some(reclaim_ns), Some(out), Some(clean), Some(zero)) =
        (get("reclaim_ns"), get("pages_out"), get("clean_drops"), get("zero_pages"))
        && out + clean + zero > 0.0
    {
        derived.push(("reclaim_ns_per_byte", reclaim_ns / ((out + clean + zero) * 4096.0)));
    }
    if let (Some(prefetched), Some(hits)) = (get("prefetched"), get("prefetch_hits")) {
        if prefetched > 0.0 {
            derived.push(("prefetch_accuracy", hits / prefetched));
        }
        if hits + demand_reads > 0.0 {
            derived.push(("prefetch_coverage", hits / (hits + demand_reads)));
        }
    }
    if let Some(peak) = get("near_peak_bytes") {
        derived.push(("near_peak_over_limit", peak / job.near_bytes as f64));
    }
    figures.extend(derived.into_iter().map(|(name, value)| (name.to_string(), value)));
    Ok(figures)
}

/// Finds the `farfield` binary: the one named, or the one beside this program.
pub(crate) fn find_farfield(named: Option<PathBuf>) -> Result<Option<PathBuf>> {
    if let Some(path) = named {
        ensure!(path.is_file(), "there is no {}", path.display());
        return Ok(Some(path));
    }
    let this = std::env::current_exe().context("cannot find this program")?;
    Ok(Some(this.with_file_name("farfield")).filter(|path| path.is_file()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_follow_from_a_report() {
        let text = r#"{"version":"0.1.0","exit_code":0,"failure":null,"near_peak_bytes":1000,"fault_ns_p99":9000,
            "faults":100,"first_touches":40,"demand_reads":60,"prefetched":50,"prefetch_hits":40,"pages_out":10,
            "clean_drops":5,"zero_pages":5,"reclaim_ns":81920,"hold":{"slo":1.05,"pool_moves":2}}"#;
        let path = Path::new("/");
        let job = Job {
            workload: Workload::named("random").unwrap(),
            program: path,
            arguments: &[],
            near_bytes: 2000,
            data_bytes: 4000,
            slo: None,
            link_bytes_per_s: None,
            overuse: None,
            patience: Duration::ZERO,
            scratch: path,
            farfield: None,
            ledger: path,
        };
        let sample =
            Sample { ns_per_op: 30.0, ops: 10, checksum: String::new(), phases: vec![], figures: BTreeMap::new() };
        let figures = report_figures(text, &job, &sample).unwrap();
        assert_eq!(figures["reclaim_ns_per_byte"], 1.0);
        assert_eq!(figures["prefetch_accuracy"], 0.8);
        assert_eq!(figures["prefetch_coverage"], 0.4);
        assert_eq!(figures["near_peak_over_limit"], 0.5);
        assert_eq!(figures["ns_per_fault"], 5.0);
        assert_eq!((figures["fault_ns_p99"], figures["pool_moves"]), (9000.0, 2.0));
        assert!(report_figures("{}", &job, &sample).is_err());
    }

    #[test]
    fn missing_binary_is_said_not_guessed() {
        assert!(find_farfield(Some("/nonexistent/farfield".into())).is_err());
    }
}
