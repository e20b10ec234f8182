//! Runs of the program with less and less near memory. The advisor interpolates between their
//! results.

use crate::doctor::pool::{self, PoolMeasurement, ProbeEffort};
use anyhow::{Context, ensure};
use farfield_core::policy::advice::EstimateSource;
use farfield_core::policy::budget_search::BudgetSearch;
use farfield_core::policy::profile::{FarRun, Observation};
use farfield_pager::runner::{ByteSize, PlainRunner, ProgramExit, machine};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Interval of the callback in runs that are not sampled.
const SELDOM: Duration = Duration::from_secs(3600);
/// Precision of the least budget that is fast enough, as a share of the peak memory.
const PRECISION: f64 = 0.05;
/// Factor by which a run may exceed its allowed time before it is ended, and extra time to begin.
const CUT_TIMES: f64 = 2.0;
const BEGIN: Duration = Duration::from_secs(1);

/// A near budget to try.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NearBudget {
    Bytes(u64),
    /// Share of the program's peak of anonymous memory.
    Share(f64),
}

impl FromStr for NearBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<NearBudget, String> {
        match text.parse()? {
            crate::size::Size::Bytes(bytes) => Ok(NearBudget::Bytes(bytes & !4095)),
            crate::size::Size::Percent(percent) => Ok(NearBudget::Share(percent / 100.0)),
        }
    }
}

impl NearBudget {
    /// Returns the budget in bytes, but at least the least that `farfield run` accepts.
    pub(super) fn bytes(self, peak_bytes: u64) -> u64 {
        let bytes = match self {
            NearBudget::Bytes(bytes) => bytes,
            NearBudget::Share(share) => (peak_bytes as f64 * share) as u64 & !4095,
        };
        bytes.max(machine::NEAR_BYTES_MIN)
    }
}

/// Budgets to try.
#[derive(Clone, Debug)]
pub(super) enum Budgets<'a> {
    /// A list of budgets.
    Listed(&'a [NearBudget]),
    /// Search for the smallest budget with which the program takes at most this multiple of its
    /// native time.
    LeastWithin(f64),
}

/// Plan of runs with far memory.
pub(super) struct FarRunPlan<'a> {
    pub(super) budgets: Budgets<'a>,
    /// URLs of places, which are tried one after the other; empty for a private server.
    pub(super) far: &'a [String],
    pub(super) token_file: Option<&'a PathBuf>,
    pub(super) command: &'a [OsString],
    pub(super) quiet: bool,
}

/// A run that the plan calls for.
#[derive(Clone, Debug, PartialEq)]
struct Try {
    url: String,
    near_bytes: u64,
    /// Time after which the run is ended.
    most: Duration,
}

impl Budgets<'_> {
    /// Returns the next budget at a place where `tried` was run, or `None` at the end. `peak_bytes`
    /// is the program's peak memory. Listed budgets start with the largest; all below the minimum
    /// count as one.
    fn next(&self, tried: &[FarRun], peak_bytes: u64) -> Option<u64> {
        match self {
            Budgets::Listed(near) => {
                let mut sizes: Vec<u64> = near.iter().map(|near| near.bytes(peak_bytes)).collect();
                sizes.sort_unstable_by(|a, b| b.cmp(a));
                sizes.dedup();
                sizes.get(tried.len()).copied()
            }
            Budgets::LeastWithin(slo) => {
                let seek =
                    BudgetSearch { least: machine::NEAR_BYTES_MIN, most: peak_bytes & !4095, precision: PRECISION };
                let is_fast = |run: &FarRun| !run.is_cut && run.slowdown <= EstimateSource::Measured.allowed(*slo);
                seek.next(&tried.iter().map(|run| (run.near_bytes, is_fast(run))).collect::<Vec<_>>())
            }
        }
    }

    /// Returns the longest time for one run of a program that takes `native` by itself.
    fn most(&self, native: Duration) -> Duration {
        match self {
            Budgets::Listed(_) => Duration::MAX,
            Budgets::LeastWithin(slo) => native.mul_f64(slo * CUT_TIMES) + BEGIN,
        }
    }
}

impl FarRunPlan<'_> {
    /// Makes all runs and passes each to `done`. An error ends the plan, but completed runs are
    /// kept.
    pub(super) fn run(
        &self,
        runner: &PlainRunner,
        expected: ProgramExit,
        observation: &mut Observation,
        done: &mut dyn FnMut(&Observation, FarRun) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let peak_bytes = observation.anonymous_peak_bytes();
        self.say("once more, with nobody looking");
        let alone = runner.run(self.command, Duration::MAX, &mut || SELDOM)?;
        ensure!(alone.ended == expected, "the program ended differently than before: {:?}", alone.ended);
        observation.undisturbed_ms = (alone.wall.as_millis() as u64).max(1);
        let most = self.budgets.most(Duration::from_millis(observation.native_ms()));
        let private = [String::new()];
        for url in if self.far.is_empty() { &private } else { self.far } {
            let read_ns = self.measure(url)?.and_then(|place| place.read_ns());
            let at = if url.is_empty() { "a private server" } else { url };
            let mut tried = Vec::new();
            while let Some(near_bytes) = self.budgets.next(&tried, peak_bytes) {
                self.say(&format!("run {}: {} near, far at {at}", tried.len() + 1, ByteSize(near_bytes)));
                let this = Try { url: url.clone(), near_bytes, most };
                let run = FarRun { read_ns, ..self.run_once(runner, &this, expected, observation, peak_bytes)? };
                let more = if run.is_cut { "more than " } else { "" };
                self.say(&format!("  {more}{:.2} times its time", run.slowdown));
                tried.push(run.clone());
                done(observation, run)?;
            }
        }
        Ok(())
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            crate::say(text);
        }
    }

    /// Measures far memory before the program uses it. Returns `None` for a private server, which
    /// has no address yet.
    fn measure(&self, url: &str) -> anyhow::Result<Option<PoolMeasurement>> {
        if url.is_empty() {
            return Ok(None);
        }
        let token = crate::token::read(self.token_file.map(PathBuf::as_path))?;
        let place = pool::place(url, &token, ProbeEffort::Thorough);
        ensure!(place.is_measured(), "--far: {}", place.text());
        Ok(Some(place))
    }

    fn run_once(
        &self,
        runner: &PlainRunner,
        this: &Try,
        expected: ProgramExit,
        observation: &Observation,
        peak_bytes: u64,
    ) -> anyhow::Result<FarRun> {
        let report = std::env::temp_dir().join(format!("farfield-profile-{}.json", std::process::id()));
        let _removed = RemoveOnDrop(&report);
        let run = runner.run(&self.command_line(this, &report)?, this.most, &mut || SELDOM)?;
        let text = std::fs::read_to_string(&report).context("`farfield run` has left no report")?;
        let report: serde_json::Value = serde_json::from_str(&text).context("the report of `farfield run`")?;
        ensure!(
            run.is_cut || run.ended == expected,
            "with {} near the program ended differently than before: {:?}",
            ByteSize(this.near_bytes),
            run.ended
        );
        let number = |name: &str| report[name].as_u64().with_context(|| format!("no {name} in a report"));
        let wall_ms = report["wall_s"].as_f64().context("no wall_s in a report")? * 1000.0;
        Ok(FarRun {
            url: this.url.clone(),
            read_ns: None,
            near_bytes: this.near_bytes,
            near_share: this.near_bytes as f64 / peak_bytes.max(1) as f64,
            wall_ms: wall_ms as u64,
            slowdown: wall_ms / observation.native_ms() as f64,
            faults: number("faults")?,
            demand_reads: number("demand_reads")?,
            pages_in: number("pages_in")?,
            pages_out: number("pages_out")?,
            fault_ns_p50: report["fault_ns_p50"].as_u64(),
            is_cut: run.is_cut,
        })
    }

    fn command_line(&self, this: &Try, report: &std::path::Path) -> anyhow::Result<Vec<OsString>> {
        let farfield = std::env::current_exe().context("cannot tell where the farfield executable is")?;
        let mut words = vec![farfield.into(), "run".into(), "--quiet".into()];
        let near = format!("{}B", this.near_bytes);
        let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
        option("--near", near.into());
        option("--report", report.into());
        if !this.url.is_empty() {
            option("--far", (&this.url).into());
        }
        if let Some(file) = self.token_file {
            option("--token-file", file.into());
        }
        words.push("--".into());
        words.extend(self.command.iter().cloned());
        Ok(words)
    }
}

/// File that is removed when this is dropped.
struct RemoveOnDrop<'a>(&'a std::path::Path);

impl Drop for RemoveOnDrop<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

#[cfg(test)]
mod tests {
    //! Danger: hours of runs of something that was not asked for.
    use super::*;

    fn run(near_bytes: u64, slowdown: f64, is_cut: bool) -> FarRun {
        FarRun {
            url: String::new(),
            read_ns: None,
            near_bytes,
            near_share: 0.0,
            wall_ms: 0,
            slowdown,
            faults: 0,
            demand_reads: 0,
            pages_in: 0,
            pages_out: 0,
            fault_ns_p50: None,
            is_cut,
        }
    }

    #[test]
    fn each_listed_size_is_tried_once_the_largest_first() {
        let near: Vec<NearBudget> = ["25%", "100%", "1%", "2%", "64M"].map(|text| text.parse().unwrap()).into();
        let (budgets, mut tried) = (Budgets::Listed(&near), Vec::new());
        while let Some(size) = budgets.next(&tried, 400 << 20) {
            tried.push(run(size, 9.0, false));
        }
        let sizes: Vec<u64> = tried.iter().map(|run| run.near_bytes >> 20).collect();
        assert_eq!((sizes, budgets.most(Duration::from_secs(1))), (vec![400, 100, 64, 16], Duration::MAX));
        assert!("0%".parse::<NearBudget>().is_err() && "12".parse::<NearBudget>().is_err());
    }

    #[test]
    fn the_least_size_that_is_fast_enough_is_found_and_slow_runs_are_ended() {
        let budgets = Budgets::LeastWithin(1.4);
        assert_eq!(budgets.most(Duration::from_secs(10)), Duration::from_secs(29));
        let mut tried = Vec::new();
        while let Some(size) = budgets.next(&tried, 400 << 20) {
            // Fast enough, with what advice leaves free; not quite; and by far not.
            let (slowdown, is_cut) = match size >> 20 {
                120.. => (1.35, false),
                100.. => (1.39, false),
                _ => (1.2, true),
            };
            tried.push(run(size, slowdown, is_cut));
        }
        let fast = tried.iter().filter(|run| run.slowdown == 1.35).map(|run| run.near_bytes >> 20).min().unwrap();
        assert!((120..=126).contains(&fast) && tried.len() <= 7, "{fast} {tried:?}");
    }

    #[test]
    fn a_run_is_that_of_the_program_with_its_options() {
        let command = ["sort".into(), "--near".into()];
        let token = PathBuf::from("/t");
        let budgets = Budgets::Listed(&[]);
        let plan = FarRunPlan { budgets, far: &[], token_file: Some(&token), command: &command, quiet: true };
        let this = Try { url: "tcp://b:1".into(), near_bytes: 16 << 20, most: Duration::MAX };
        let words = plan.command_line(&this, std::path::Path::new("/r")).unwrap();
        let words: Vec<&str> = words[1..].iter().map(|word| word.to_str().unwrap()).collect();
        let expected = "run --quiet --near 16777216B --report /r --far tcp://b:1 --token-file /t -- sort --near";
        assert_eq!(words.join(" "), expected);
    }
}
