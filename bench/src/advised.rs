//! `farfield run` with as much near memory as a slowdown allows: told by the advisor, held while the program runs, or found
//! by trying all sizes.

use crate::child;
use crate::contender::{self, Job, binary};
use crate::line::Sample;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who says how much near memory it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Advisor {
    /// `farfield advise`, by a profile of a program that never ran with far memory.
    Foretold,
    /// The same, by a profile with runs that seek the least.
    Tried,
    /// `farfield run --auto`, by the first of these profiles.
    Held,
    /// The same, at fixed times.
    HeldPeriodic,
    /// Runs with 100 %, 90 % … down to the first that is too slow.
    Best,
}

/// Steps of the search for the best.
const STEPS: u64 = 10;
/// As in `farfield run`.
const NEAR_BYTES_MIN: u64 = 16 << 20;

/// One sample; its figures say how much was near in the mean, by all that the program has.
pub(crate) fn sample(advisor: Advisor, job: &Job) -> Result<Sample> {
    let slo = job.slo.context("the parameter slo_percent is missing")?;
    let profile = job.scratch.join("profile.json");
    let mut watch = Command::new(binary(job)?);
    watch.args(["profile", "--quiet", "--interval", "20ms", "-o"]).arg(&profile);
    if advisor == Advisor::Tried {
        watch.args(["--slo", &slo.to_string()]);
    }
    watch.arg("--").arg(job.program).args(job.arguments);
    // Its own run, its run alone, and those with less near.
    let patience = job.patience * if advisor == Advisor::Tried { 8 } else { 1 };
    child::run(watch, job.scratch, patience)?.success().context("under farfield profile")?;
    let peak_bytes = number(&read(&profile)?, "/findings/anonymous_peak_bytes")? as u64;
    let slo_text = slo.to_string();
    let mut sample = match advisor {
        Advisor::Held | Advisor::HeldPeriodic => {
            let auto = if advisor == Advisor::Held { "--auto" } else { "--auto=periodic" };
            let near = bytes_text(job.near_bytes);
            let options = [auto, "--slo", &slo_text, "--near", &near, "--profile"].map(PathBuf::from);
            run(job, options.into_iter().chain([profile]))?
        }
        Advisor::Foretold | Advisor::Tried => {
            let mut ask = Command::new(binary(job)?);
            ask.args(["advise", "--json", "--slo", &slo_text]).arg(&profile);
            let answer = child::run(ask, job.scratch, job.patience)?;
            let advice: Value = serde_json::from_str(answer.success().context("of farfield advise")?)?;
            let mut sample = with_near(job, number(&advice, "/choice/near_bytes")? as u64)?;
            sample.figures.insert("slowdown_expected".into(), number(&advice, "/choice/slowdown")?);
            sample
        }
        Advisor::Best => best(job, slo, peak_bytes)?,
    };
    let near = *sample.figures.get("near_mean_bytes").context("a report without near_mean_bytes")?;
    sample.figures.insert("near_share".into(), near / peak_bytes.max(1) as f64);
    sample.figures.insert("memory_saved_times".into(), peak_bytes as f64 / near.max(1.0));
    Ok(sample)
}

/// The least near memory with which the program is within the slowdown, all larger sizes being so, too.
fn best(job: &Job, slo: f64, peak_bytes: u64) -> Result<Sample> {
    let alone = contender::native(job)?.ns_per_op;
    let mut found = None;
    for step in (1..=STEPS).rev() {
        // With all near there is room for the program itself, too.
        let room = if step == STEPS { NEAR_BYTES_MIN } else { 0 };
        let near_bytes = peak_bytes * step / STEPS + room;
        if near_bytes < NEAR_BYTES_MIN {
            break;
        }
        let sample = with_near(job, near_bytes)?;
        let is_fast = sample.ns_per_op <= alone * slo;
        if is_fast || found.is_none() {
            found = Some(sample);
        }
        if !is_fast {
            break;
        }
    }
    found.context("no size was tried")
}

fn with_near(job: &Job, near_bytes: u64) -> Result<Sample> {
    run(job, ["--near".into(), bytes_text(near_bytes).into()].into_iter())
}

fn run(job: &Job, options: impl Iterator<Item = PathBuf>) -> Result<Sample> {
    let report = job.scratch.join("report.json");
    fs::remove_file(&report).ok();
    let mut command = Command::new(binary(job)?);
    command.args(["run", "--quiet", "--report"]).arg(&report).args(options);
    command.arg("--").arg(job.program).args(job.arguments);
    let finished = child::run(command, job.scratch, job.patience)?;
    let mut sample = contender::sample(job, &finished).context("under farfield run")?;
    let text = fs::read_to_string(&report).context("farfield run wrote no report")?;
    sample.figures.extend(contender::report_figures(&text, job, &sample)?);
    Ok(sample)
}

fn bytes_text(bytes: u64) -> String {
    format!("{}B", bytes & !4095)
}

fn read(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).context("farfield profile wrote no profile")?;
    serde_json::from_str(&text).context("the profile is not JSON")
}

fn number(value: &Value, pointer: &str) -> Result<f64> {
    let number = value.pointer(pointer).and_then(Value::as_f64);
    ensure!(number.is_some(), "no {pointer} in what farfield said");
    Ok(number.unwrap_or_default())
}
