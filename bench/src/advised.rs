//! `farfield run` with as much near memory as a slowdown allows: told by the advisor, held while the program runs, or found
//! by trying all sizes.

use crate::child;
use crate::job::{self, Job, binary};
use crate::line::Sample;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
/// A run that takes so many times as long as it may, and so much longer to begin with, is too slow, whatever comes.
const LATE: f64 = 2.0;
const START: Duration = Duration::from_secs(5);
/// As in `farfield run`.
const NEAR_BYTES_MIN: u64 = 16 << 20;

/// One sample; its figures say how much was near in the mean, by all that the program has.
pub(crate) fn sample(advisor: Advisor, job: &Job<'_>) -> Result<Sample> {
    let slo = job.slo.context("the parameter slo_percent is missing")?;
    let slo_text = slo.to_string();
    let profile = match advisor {
        // Its own run, its run alone, and those with less near.
        Advisor::Tried => profile(&["--slo", &slo_text], 8, job)?,
        _ => profile(&[], 1, job)?,
    };
    let peak_bytes = number(&read(&profile)?, "/findings/anonymous_peak_bytes")? as u64;
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
    let figure = |name: &str| sample.figures.get(name).copied().with_context(|| format!("a report without {name}"));
    let (near, limit) = (figure("near_mean_bytes")?, figure("near_limit_bytes")?);
    sample.figures.insert("near_share".into(), near / peak_bytes.max(1) as f64);
    // What is near in the mean depends on how long a program takes to fill its memory; what it may have near was chosen.
    sample.figures.insert("budget_share".into(), (limit / peak_bytes.max(1) as f64).min(1.0));
    sample.figures.insert("memory_saved_times".into(), peak_bytes as f64 / near.max(1.0));
    Ok(sample)
}

/// What `farfield profile` writes about the program, with these options and in so many times the time of a sample.
pub(crate) fn profile(options: &[&str], times: u32, job: &Job<'_>) -> Result<PathBuf> {
    let profile = job.scratch.join("profile.json");
    let mut watch = Command::new(binary(job)?);
    watch.args(["profile", "--quiet", "--interval", "20ms", "-o"]).arg(&profile).args(options);
    watch.arg("--").arg(job.program).args(job.arguments);
    child::run(watch, job.scratch, job.patience * times)?.success().context("under farfield profile")?;
    Ok(profile)
}

/// The least near memory with which the program is within the slowdown, all larger sizes being so, too. What is too slow is tried twice, each time beside the program
/// alone: a slow moment of the machine is no end of the search. What is slower by far is ended.
fn best(job: &Job<'_>, slo: f64, peak_bytes: u64) -> Result<Sample> {
    let mut alone = job::native(job)?;
    let mut found = None;
    for step in (1..=STEPS).rev() {
        // With all near there is room for the program itself, too.
        let room = if step == STEPS { NEAR_BYTES_MIN } else { 0 };
        let near_bytes = peak_bytes * step / STEPS + room;
        if near_bytes < NEAR_BYTES_MIN {
            break;
        }
        let mut sample = unless_late(job, near_bytes, &alone, slo)?;
        if !is_within(&sample, &alone, slo) {
            alone = job::native(job)?;
            sample = unless_late(job, near_bytes, &alone, slo)?;
        }
        if !is_within(&sample, &alone, slo) {
            found = found.or(sample);
            break;
        }
        found = sample;
    }
    found.context("the program is slower by far with all its memory near")
}

fn is_within(sample: &Option<Sample>, alone: &Sample, slo: f64) -> bool {
    sample.as_ref().is_some_and(|sample| sample.ns_per_op <= alone.ns_per_op * slo)
}

/// With so much near; `None`: it took some times as long as it may.
fn unless_late(job: &Job<'_>, near_bytes: u64, alone: &Sample, slo: f64) -> Result<Option<Sample>> {
    let wall = alone.figures.get("wall_s").copied().context("a sample without wall_s")?;
    let patience = job.patience.min(Duration::from_secs_f64(LATE * slo * wall) + START);
    match with_near(&Job { patience, ..*job }, near_bytes) {
        Err(error) if error.is::<child::Late>() => Ok(None),
        sample => sample.map(Some),
    }
}

/// Says of each sample with a budget how far it is from the best: how many times the near memory of `farfield-best` it may have, or how many
/// times the allowed time it takes, whichever is more. Who has less near memory and is too slow is not better than the best.
pub(crate) fn compare_with_best(samples: &mut BTreeMap<&str, Vec<Sample>>, slo: f64) {
    let best: Vec<f64> = samples.get("farfield-best").into_iter().flatten().filter_map(budget_share).collect();
    let native: Vec<f64> = samples.get("native").into_iter().flatten().map(|sample| sample.ns_per_op).collect();
    for samples in samples.values_mut() {
        // Whoever failed in one round is in no later one, so the same place is the same round.
        for (sample, (best, native)) in samples.iter_mut().zip(best.iter().zip(&native)) {
            if let Some(share) = budget_share(sample) {
                sample.figures.insert("over_best".into(), (share / best).max(sample.ns_per_op / (native * slo)));
            }
        }
    }
}

fn budget_share(sample: &Sample) -> Option<f64> {
    sample.figures.get("budget_share").copied()
}

fn with_near(job: &Job<'_>, near_bytes: u64) -> Result<Sample> {
    run(job, ["--near".into(), bytes_text(near_bytes).into()].into_iter())
}

fn run(job: &Job<'_>, options: impl Iterator<Item = PathBuf>) -> Result<Sample> {
    let report = job.scratch.join("report.json");
    fs::remove_file(&report).ok();
    let mut command = Command::new(binary(job)?);
    command.args(["run", "--quiet", "--report"]).arg(&report).args(options);
    command.arg("--").arg(job.program).args(job.arguments);
    let finished = child::run(command, job.scratch, job.patience)?;
    let mut sample = job::sample(job, &finished).context("under farfield run")?;
    let text = fs::read_to_string(&report).context("farfield run wrote no report")?;
    sample.figures.extend(job::report_figures(&text, job, &sample)?);
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

#[cfg(test)]
mod tests {
    //! Danger: a choice that is too slow counts as better than the best, because it has less near memory.
    use super::*;

    fn sample(ns_per_op: f64, budget_share: Option<f64>) -> Sample {
        let figures = budget_share.map(|share| ("budget_share".to_string(), share)).into_iter().collect();
        Sample { ns_per_op, ops: 1, checksum: String::new(), phases: vec![], figures }
    }

    #[test]
    fn a_choice_is_as_far_from_the_best_as_its_memory_or_its_time() {
        let mut samples = BTreeMap::from([
            ("native", vec![sample(10.0, None), sample(20.0, None)]),
            ("farfield-best", vec![sample(14.0, Some(0.5)), sample(25.0, Some(0.4))]),
            ("farfield-tried", vec![sample(13.0, Some(0.6)), sample(35.0, Some(0.2))]),
            ("farfield-foretold", vec![sample(10.0, Some(1.0))]),
        ]);
        compare_with_best(&mut samples, 1.4);
        let over = |name: &str| -> Vec<Option<f64>> {
            samples[name].iter().map(|sample| sample.figures.get("over_best").copied()).collect()
        };
        assert_eq!(over("native"), [None, None]);
        assert_eq!(over("farfield-best"), [Some(1.0), Some(1.0)]);
        assert_eq!(over("farfield-tried"), [Some(0.6 / 0.5), Some(35.0 / 28.0)]);
        assert_eq!(over("farfield-foretold"), [Some(2.0)]);
        samples.remove("farfield-best");
        for sample in samples.values_mut().flatten() {
            sample.figures.remove("over_best");
        }
        compare_with_best(&mut samples, 1.4);
        assert!(samples.values().flatten().all(|sample| !sample.figures.contains_key("over_best")));
    }
}
