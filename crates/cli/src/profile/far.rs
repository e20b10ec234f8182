//! The same program with less and less near memory: what the advisor interpolates between.

use crate::doctor::pool::{self, Care, Place};
use anyhow::{Context, ensure};
use farfield_core::policy::profile::{FarRun, Observation};
use farfield_pager::runner::{Bytes, Ended, PlainRunner, machine};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Nobody looks at these runs; this is how often that nobody does.
const SELDOM: Duration = Duration::from_secs(3600);

/// A near budget to try.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Near {
    Bytes(u64),
    /// Of the most anonymous memory that the program had.
    Share(f64),
}

impl FromStr for Near {
    type Err = String;

    fn from_str(text: &str) -> Result<Near, String> {
        match text.parse()? {
            crate::size::Size::Bytes(bytes) => Ok(Near::Bytes(bytes & !4095)),
            crate::size::Size::Percent(percent) => Ok(Near::Share(percent / 100.0)),
        }
    }
}

impl Near {
    /// At least what `farfield run` takes.
    pub(super) fn bytes(self, peak_bytes: u64) -> u64 {
        let bytes = match self {
            Near::Bytes(bytes) => bytes,
            Near::Share(share) => (peak_bytes as f64 * share) as u64 & !4095,
        };
        bytes.max(machine::NEAR_BYTES_MIN)
    }
}

/// What to try.
pub(super) struct Plan<'a> {
    pub(super) near: &'a [Near],
    /// One after the other, each by itself; empty for a private server.
    pub(super) far: &'a [String],
    pub(super) token_file: Option<&'a PathBuf>,
    pub(super) command: &'a [OsString],
    pub(super) quiet: bool,
}

/// One run of the plan.
#[derive(Clone, Debug, PartialEq)]
struct Try {
    url: String,
    near_bytes: u64,
}

impl Plan<'_> {
    /// All runs, the most near memory first. What is less than the least budget is tried once.
    fn tries(&self, peak_bytes: u64) -> Vec<Try> {
        let mut sizes: Vec<u64> = self.near.iter().map(|near| near.bytes(peak_bytes)).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        let private = [String::new()];
        let urls = if self.far.is_empty() { &private } else { self.far };
        urls.iter().flat_map(|url| sizes.iter().map(move |&near_bytes| Try { url: url.clone(), near_bytes })).collect()
    }

    /// Makes all runs. `done` gets each; an error ends it, what is done stays done.
    pub(super) fn run(
        &self,
        runner: &PlainRunner,
        expected: Ended,
        observation: &mut Observation,
        done: &mut dyn FnMut(&Observation, FarRun) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let peak_bytes = observation.anonymous_peak_bytes();
        let tries = self.tries(peak_bytes);
        self.say("once more, with nobody looking");
        let alone = runner.run(self.command, &mut || SELDOM)?;
        ensure!(alone.ended == expected, "the program ended in another way than before: {:?}", alone.ended);
        observation.undisturbed_ms = (alone.wall.as_millis() as u64).max(1);
        let mut measured: Option<(String, Option<Place>)> = None;
        for (index, this) in tries.iter().enumerate() {
            let place = match &measured {
                Some((url, place)) if *url == this.url => place.clone(),
                _ => self.measure(&this.url)?,
            };
            measured = Some((this.url.clone(), place.clone()));
            let at = if this.url.is_empty() { "a private server" } else { &this.url };
            self.say(&format!("run {} of {}: {} near, far at {at}", index + 1, tries.len(), Bytes(this.near_bytes)));
            let run = self.run_once(runner, this, expected, observation, peak_bytes)?;
            done(observation, FarRun { read_ns: place.and_then(|place| place.read_ns()), ..run })?;
        }
        Ok(())
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            crate::say(text);
        }
    }

    /// How fast far memory is before the program uses it; a private server has no address yet.
    fn measure(&self, url: &str) -> anyhow::Result<Option<Place>> {
        if url.is_empty() {
            return Ok(None);
        }
        let token = crate::token::read(self.token_file.map(PathBuf::as_path))?;
        let place = pool::place(url, &token, Care::Thorough);
        ensure!(place.is_well(), "--far: {}", place.text());
        Ok(Some(place))
    }

    fn run_once(
        &self,
        runner: &PlainRunner,
        this: &Try,
        expected: Ended,
        observation: &Observation,
        peak_bytes: u64,
    ) -> anyhow::Result<FarRun> {
        let report = std::env::temp_dir().join(format!("farfield-profile-{}.json", std::process::id()));
        let _removed = Removed(&report);
        let ended = runner.run(&self.command_line(this, &report)?, &mut || SELDOM)?.ended;
        let text = std::fs::read_to_string(&report).context("`farfield run` has left no report")?;
        let report: serde_json::Value = serde_json::from_str(&text).context("the report of `farfield run`")?;
        ensure!(
            ended == expected,
            "with {} near the program ended in another way than before: {ended:?}",
            Bytes(this.near_bytes)
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

/// A file that goes when we are done with it.
struct Removed<'a>(&'a std::path::Path);

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

#[cfg(test)]
mod tests {
    //! Danger: hours of runs of something that was not asked for.
    use super::*;

    #[test]
    fn each_place_is_tried_with_each_size_once_the_largest_first() {
        let near: Vec<Near> = ["25%", "100%", "1%", "2%", "64M"].map(|text| text.parse().unwrap()).into();
        let far = ["ssd:/a".to_string(), "tcp://b:1".to_string()];
        let plan = Plan { near: &near, far: &far, token_file: None, command: &[], quiet: true };
        let tries = plan.tries(400 << 20);
        let sizes = |url: &str| -> Vec<u64> {
            tries.iter().filter(|this| this.url == url).map(|this| this.near_bytes >> 20).collect()
        };
        assert_eq!((sizes("ssd:/a"), sizes("tcp://b:1")), (vec![400, 100, 64, 16], vec![400, 100, 64, 16]));
        let private = Plan { far: &[], near: &near[..1], ..plan };
        assert_eq!(private.tries(400 << 20), [Try { url: String::new(), near_bytes: 100 << 20 }]);
        assert!("0%".parse::<Near>().is_err() && "12".parse::<Near>().is_err());
    }

    #[test]
    fn a_run_is_that_of_the_program_with_its_options() {
        let command = ["sort".into(), "--near".into()];
        let token = PathBuf::from("/t");
        let plan = Plan { near: &[], far: &[], token_file: Some(&token), command: &command, quiet: true };
        let this = Try { url: "tcp://b:1".into(), near_bytes: 16 << 20 };
        let words = plan.command_line(&this, std::path::Path::new("/r")).unwrap();
        let words: Vec<&str> = words[1..].iter().map(|word| word.to_str().unwrap()).collect();
        let expected = "run --quiet --near 16777216B --report /r --far tcp://b:1 --token-file /t -- sort --near";
        assert_eq!(words.join(" "), expected);
    }
}
