//! `farfield advise`: recommends a place for far memory and a near budget, for a profiled program.

use crate::doctor::pool::{self, ProbeEffort};
use anyhow::{Context, ensure};
use clap::Args;
use farfield_core::policy::advice::{self, Advice, MeasuredPool, Question};
use farfield_core::policy::profile::Profile;
use farfield_pager::runner::{ByteSize, machine};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Pool that is measured in place of a private server, which keeps far memory in this machine's
/// memory.
const PRIVATE_STAND_IN: &str = "ram:";

/// Say where far memory should be, and how much near, for a program that `farfield profile` has watched.
///
/// Places are measured first, for a second or two each.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AdviseArgs {
    /// Slowdown that the program may have at most: 1.1 is 1.1 times its run time with all memory near
    #[arg(long, value_name = "TIMES", value_parser = slo)]
    slo: f64,
    /// Pool that could keep the far memory; give several to choose from [default: a private server on this machine]
    #[arg(long, value_name = "URL")]
    far: Vec<String>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
    /// Profile that `farfield profile` has written
    #[arg(value_name = "PROFILE")]
    profile: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  farfield profile -o train.json -- ./train                   Watch it once
  farfield advise --slo 1.4 train.json                        Far memory on this machine
  farfield advise --slo 1.2 --far tcp://big:7400 --far 'ssd:/var/tmp?size=32G' train.json
  farfield advise --slo 1.4 --json train.json | jq .choice.near_bytes
  farfield run --auto --slo 1.4 --profile train.json -- ./train  Do it

Exit code: 0 with a way to run it, 1 without.";

/// Parses a slowdown limit between 1.01 and 100.
pub(crate) fn slo(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(slo) if (1.01..=100.0).contains(&slo) => Ok(slo),
        _ => Err("between 1.01 and 100: 1.4 is at most 40 % slower".into()),
    }
}

/// Prints the advice.
pub(crate) fn run(args: &AdviseArgs) -> anyhow::Result<()> {
    let profile = crate::profile::read(&args.profile)?;
    let advice = advise(&profile, args.slo, &args.far, args.token_file.as_deref(), ProbeEffort::Thorough)?;
    let text = match args.json {
        true => serde_json::to_string(&advice)? + "\n",
        false => text_of(&advice, &profile),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    ensure!(advice.choice.is_some(), "there is no way that fits this machine");
    Ok(())
}

/// Measures the places and computes the advice.
pub(crate) fn advise(
    profile: &Profile,
    slo: f64,
    far: &[String],
    token_file: Option<&Path>,
    effort: ProbeEffort,
) -> anyhow::Result<Advice> {
    let token = crate::token::read(token_file)?;
    let private = [String::new()];
    let urls = if far.is_empty() { &private } else { far };
    let places: Vec<MeasuredPool> = urls.iter().map(|url| place(url, &token, effort)).collect::<anyhow::Result<_>>()?;
    let near_free_bytes = free_bytes();
    Ok(advice::advise(&Question { profile, slo, places: &places, near_free_bytes }))
}

fn place(url: &str, token: &[u8], effort: ProbeEffort) -> anyhow::Result<MeasuredPool> {
    let address = if url.is_empty() { PRIVATE_STAND_IN } else { url };
    let measured = pool::place(address, token, effort);
    ensure!(measured.is_measured(), "--far: {}", measured.text());
    measured.for_advice(url).context("a place that is well was measured")
}

/// Returns the memory in bytes that this machine or container could give as near memory now.
fn free_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10).min(machine::memory_bytes())
}

fn text_of(advice: &Advice, profile: &Profile) -> String {
    let mut text = advice.reasons.join("\n") + "\n";
    if let Some(choice) = &advice.choice {
        let far = if choice.url.is_empty() { String::new() } else { format!(" --far '{}'", choice.url) };
        text += &format!(
            "\nAt most {} × its time, with {} near:\n  farfield run --near {}M{far} -- {}\n",
            advice.slo,
            ByteSize(choice.near_bytes),
            choice.near_bytes.div_ceil(1 << 20),
            profile.command.join(" "),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    //! Danger: advice that nobody can follow.
    use super::*;
    use farfield_core::policy::profile::{Observation, Sample, VERSION, analyse};

    fn profile() -> Profile {
        let sample = |at: u64| Sample {
            at_ms: at * 100,
            since_ms: at % 10 * 100 + 100,
            epoch: (at / 10) as u32,
            anonymous_bytes: 400 << 20,
            anonymous_used_bytes: 50 << 20,
            ..Sample::default()
        };
        let samples = (1..100).map(sample).collect();
        let observation = Observation { wall_ms: 10_000, cpu_ms: 10_000, samples, ..Observation::default() };
        let findings = analyse(&observation);
        Profile { version: VERSION, command: vec!["./train".into()], observation, far_runs: vec![], findings }
    }

    #[test]
    fn advice_is_a_command_that_can_be_typed() {
        let profile = profile();
        let far = ["ram:".to_string(), "stripe(ram:,lz:?size=64M)".to_string()];
        let advice = advise(&profile, 1.4, &far, None, ProbeEffort::Quick).unwrap();
        assert_eq!(advice.ways.len(), 2);
        let choice = advice.choice.clone().unwrap();
        assert!(choice.near_bytes < 200 << 20 && far.contains(&choice.url), "{advice:?}");
        let text = text_of(&advice, &profile);
        let command =
            format!("farfield run --near {}M --far '{}' -- ./train", choice.near_bytes.div_ceil(1 << 20), choice.url);
        assert!(text.contains(&command), "{text}");
        let private = advise(&profile, 1.4, &[], None, ProbeEffort::Quick).unwrap();
        assert!(text_of(&private, &profile).contains("M -- ./train"));
    }

    #[test]
    fn a_place_that_is_not_there_is_an_error() {
        let error = advise(&profile(), 1.4, &["unix:/no/such/socket".into()], None, ProbeEffort::Quick)
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such/socket"), "{error}");
    }

    #[test]
    fn times_are_more_than_one() {
        assert_eq!(slo("1.4"), Ok(1.4));
        for wrong in ["1", "0.9", "x", "1e9", "NaN", "inf"] {
            assert!(slo(wrong).is_err(), "{wrong}");
        }
    }
}
