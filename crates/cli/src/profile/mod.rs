//! `farfield profile`: records how a program uses its memory.

mod far;
mod picture;
mod proc;
mod sampler;
mod summary;

use anyhow::Context;
use clap::Args;
use far::{Budgets, FarRunPlan, NearBudget};
use farfield_core::policy::profile::{self, Observation, Profile, VERSION};
use farfield_pager::control::exit;
use farfield_pager::runner::{self, ByteSize, JobRefusal, PlainRunner, ProgramExit};
use sampler::Sampler;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Watch how a program uses its memory, and write it down.
///
/// The program runs as it always does, without far memory and with nothing of ours in it. It and
/// all its children are looked at from outside. What was seen goes to a file, and to a picture
/// beside it. With --near or --slo, the program then runs again, once more alone and once for each
/// size and place, and the file says how much slower it was.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub(crate) struct ProfileArgs {
    /// Shortest time between two samples: 20ms, 1s. It bounds how short a working set can be measured
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time)]
    interval: Duration,
    /// File for the profile, as JSON; the plot goes beside it, with the ending svg
    #[arg(long, short, value_name = "FILE.json", default_value = "farfield-profile.json")]
    output: PathBuf,
    /// Then run it again with far memory, once for each of these near budgets: sizes, or shares of
    /// its peak of anonymous memory, like 75%,50%,25%
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', group = "budgets")]
    near: Vec<NearBudget>,
    /// Then search for the least near budget with which its slowdown is at most this, to a twentieth
    /// of its memory, in runs with far memory. Runs that are much slower are ended (SIGTERM)
    #[arg(long, value_name = "TIMES", value_parser = crate::advise::slo, group = "budgets")]
    slo: Option<f64>,
    /// Where far memory is in those runs, as for `farfield run`. Several are tried one after the
    /// other; "stripe(URL,URL)" is one pool
    #[arg(long, value_name = "URL", requires = "budgets")]
    far: Vec<String>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print no progress line and no summary
    #[arg(long, short)]
    quiet: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  farfield profile -- sort -S 1G big.txt              To farfield-profile.json and farfield-profile.svg
  farfield profile -o train.json -- ./train --epochs 1
  farfield profile --interval 20ms -- ./short         For short programs, and for small working sets
  farfield profile --near 75%,50%,25% -- ./train      And how much slower it is with less near memory
  farfield profile --slo 1.4 -- ./train               With which least near memory it is still fast enough
  farfield profile --near 50%,25% --far tcp://big:7400 --far 'ssd:/var/tmp?size=8G' -- ./train
  jq .findings.hot_bytes train.json                   What it uses at once

Exit code: that of the program; 97, 126 and 127 as for `farfield run` if it was not started, 1 if the profile could \
not be
written. docs/design/profile.md says what the fields mean and what looking costs.";

/// Parses a time between 5 ms and 60 s: a number and `ms` or `s`.
fn time(text: &str) -> Result<Duration, String> {
    let unit = |ending, scale: f64| Some(text.strip_suffix(ending)?.parse::<f64>().ok()? * scale);
    let seconds =
        unit("ms", 1e-3).or_else(|| unit("s", 1.0)).ok_or("a time is a number and a unit, like 100ms or 2s")?;
    match seconds {
        seconds if (0.005..=60.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("between 5ms and 60s".into()),
    }
}

/// Runs the program, writes the profile, and ends as the program ended.
pub(crate) fn run(args: ProfileArgs) -> ExitCode {
    let report = |error: &anyhow::Error, code| {
        crate::say(&format!("{error:#}"));
        ExitCode::from(code as u8)
    };
    // Files that cannot be written are found before the run.
    if let Err(error) = writable(&args.output) {
        return report(&error, exit::REFUSED);
    }
    let ended = match profile(&args) {
        Ok(ended) => ended,
        Err(error) => match error.downcast::<JobRefusal>() {
            Ok(JobRefusal::Interrupted { signal }) => runner::die_by(signal),
            Ok(refusal) => return report(&anyhow::Error::msg(refusal.to_string()), refusal.exit_code()),
            Err(error) => return report(&error, 1),
        },
    };
    match ended {
        ProgramExit::Code(code) => ExitCode::from(code as u8),
        ProgramExit::Signal(signal) => runner::die_by(signal),
    }
}

fn profile(args: &ProfileArgs) -> anyhow::Result<ProgramExit> {
    let runner = PlainRunner::new(crate::pipe::was_ignored())?;
    let (ended, mut observation) = observe(args, &runner)?;
    anyhow::ensure!(
        !observation.samples.is_empty(),
        "the program ended before the first sample, so there is nothing to profile"
    );
    let mut profile = Profile {
        version: VERSION,
        command: args.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        findings: profile::analyse(&observation),
        observation: observation.clone(),
        far_runs: Vec::new(),
    };
    write(&args.output, &profile)?;
    let listed = (!args.near.is_empty()).then_some(Budgets::Listed(&args.near));
    if let Some(budgets) = listed.or(args.slo.map(Budgets::LeastWithin)) {
        let (far, token_file, command) = (&args.far, args.token_file.as_ref(), &args.command);
        let plan = FarRunPlan { budgets, far, token_file, command, quiet: args.quiet };
        // Runs that were measured are kept, whatever happens to the rest.
        plan.run(&runner, ended, &mut observation, &mut |observation, run| {
            profile.observation.undisturbed_ms = observation.undisturbed_ms;
            profile.far_runs.push(run);
            write(&args.output, &profile)
        })?;
    }
    if !args.quiet {
        let picture = picture_path(&args.output);
        let files = format!("farfield: written to {}, picture in {}\n", args.output.display(), picture.display());
        let _ = std::io::stderr().write_all((summary::of(&profile) + &files).as_bytes());
    }
    Ok(ended)
}

fn observe(args: &ProfileArgs, runner: &PlainRunner) -> Result<(ProgramExit, Observation), JobRefusal> {
    let mut sampler = Sampler::new(args.interval);
    let mut progress =
        SamplingProgress { enabled: !args.quiet, started: Instant::now(), told: Instant::now(), shown: false };
    let run = runner.run(&args.command, Duration::MAX, &mut || {
        let next = sampler.take_sample();
        progress.update(&sampler);
        next
    });
    progress.erase();
    let run = run?;
    Ok((run.ended, sampler.finish(run.wall)))
}

fn picture_path(output: &Path) -> PathBuf {
    output.with_extension("svg")
}

fn writable(output: &Path) -> anyhow::Result<()> {
    let options = || {
        let mut options = std::fs::File::options();
        options.append(true).create(true);
        options
    };
    for path in [output.to_path_buf(), picture_path(output)] {
        options().open(&path).with_context(|| format!("--output {}: cannot be written", path.display()))?;
    }
    Ok(())
}

fn write(output: &Path, profile: &Profile) -> anyhow::Result<()> {
    let json = serde_json::to_string(profile)?;
    let picture = picture::draw(profile);
    for (path, text) in [(output.to_path_buf(), json), (picture_path(output), picture)] {
        std::fs::write(&path, text)
            .with_context(|| format!("the profile could not be written to {}", path.display()))?;
    }
    Ok(())
}

/// Reads a profile from a file. Returns an error if it has another version.
pub(crate) fn read(path: &Path) -> anyhow::Result<Profile> {
    let context = || format!("{} is no profile", path.display());
    let text = std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let value: serde_json::Value = serde_json::from_str(&text).with_context(context)?;
    let version = value["version"].as_u64().with_context(context)?;
    anyhow::ensure!(
        version == u64::from(VERSION),
        "{} is a profile of version {version}, this command reads version {VERSION}; make it again",
        path.display()
    );
    serde_json::from_value(value).with_context(context)
}

/// Progress line on the terminal.
struct SamplingProgress {
    enabled: bool,
    started: Instant,
    told: Instant,
    shown: bool,
}

impl SamplingProgress {
    fn update(&mut self, sampler: &Sampler) {
        let Some(sample) = sampler.last().filter(|_| self.enabled && self.told.elapsed() >= Duration::from_secs(1))
        else {
            return;
        };
        self.told = Instant::now();
        let Some(columns) = runner::progress_columns() else {
            self.shown = false;
            return;
        };
        let seconds = self.started.elapsed().as_secs();
        let (anonymous, used) = (ByteSize(sample.anonymous_bytes), ByteSize(sample.anonymous_used_bytes));
        let line = format!(
            "farfield profile {}:{:02} anonymous {anonymous:#}, used in the last {:.1} s {used:#}, files {:#}",
            seconds / 60,
            seconds % 60,
            sample.since_ms as f64 / 1000.0,
            ByteSize(sample.file_bytes),
        );
        let line: String = line.chars().take(columns.saturating_sub(1)).collect();
        let _ = std::io::stderr().write_all(format!("\r\x1b[2K{line}").as_bytes());
        self.shown = true;
    }

    fn erase(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = std::io::stderr().write_all(b"\r\x1b[2K");
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a profile that is read as something it is not.
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(time("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(time("1.5s"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "100", "s", "ms", "-1s", "1ms", "2h", "1e9s", "NaNs"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_profile_is_read_back_and_other_files_are_refused() {
        let folder = std::env::temp_dir().join(format!("farfield-profile-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("p.json");
        let observation = Observation { wall_ms: 5, ..Observation::default() };
        let findings = profile::analyse(&observation);
        let mut profile =
            Profile { version: VERSION, command: vec!["x".into()], observation, far_runs: vec![], findings };
        write(&path, &profile).unwrap();
        assert_eq!(read(&path).unwrap(), profile);
        profile.version = 99;
        write(&path, &profile).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("version 99"));
        std::fs::write(&path, "{}").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("no profile"));
        assert!(writable(&folder.join("no/such/p.json")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
