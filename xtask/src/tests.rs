//! The two tiers of tests.

use crate::chores::{self, cargo, farfield};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::time::{Duration, Instant};

/// A part of the tests that can be run by itself.
#[derive(Clone, Copy)]
struct Part {
    name: &'static str,
    /// One test at a time, because it looks at the whole machine or at clocks.
    alone: bool,
}

/// In the order in which they say most, soonest.
const PARTS: [Part; 10] = [
    Part { name: "unit", alone: false },
    Part { name: "models", alone: true },
    Part { name: "faults", alone: true },
    Part { name: "leftovers", alone: true },
    Part { name: "kills", alone: true },
    Part { name: "budget", alone: true },
    Part { name: "users", alone: true },
    Part { name: "examples", alone: false },
    Part { name: "probes", alone: false },
    Part { name: "programs", alone: false },
];

impl Part {
    fn run(self, runner_words: &[String], environment: &[(&str, &OsStr)]) -> Result<()> {
        println!("\n== {} ==", self.name);
        let mut words: Vec<String> = vec!["test".into(), "--no-fail-fast".into()];
        let what: &[&str] = match self.name {
            "unit" => &["--workspace", "--exclude", "farfield-tests"],
            "models" => &["-p", "farfield-pager", "--features", "model", "--test", "model"],
            name => &["-p", "farfield-tests", "--test", name],
        };
        words.extend(what.iter().map(|word| word.to_string()));
        words.push("--".into());
        if self.alone {
            words.push("--test-threads=1".into());
        }
        words.extend(runner_words.iter().cloned());
        cargo(&words, environment)
    }
}

/// The CI tier. The last line is the test runner's, unless something failed.
pub(crate) fn test(words: &[String]) -> Result<()> {
    let (parts, runner_words) = parse(words)?;
    // End-to-end tests use what users get.
    chores::build()?;
    let farfield = farfield();
    let environment = [("FARFIELD_BIN", farfield.as_os_str())];
    let failed: Vec<&str> =
        parts.iter().filter(|part| part.run(&runner_words, &environment).is_err()).map(|part| part.name).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn parse(words: &[String]) -> Result<(Vec<Part>, Vec<String>)> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let mut parts = Vec::new();
    for word in &words[..end] {
        match PARTS.iter().find(|part| part.name == word) {
            Some(part) => parts.push(*part),
            None => bail!("no part of the tests is called {word:?}: {}", PARTS.map(|part| part.name).join(" ")),
        }
    }
    if parts.is_empty() {
        parts.extend(PARTS);
    }
    Ok((parts, words.iter().skip(end + 1).cloned().collect()))
}

/// The second tier: everything larger, then fuzzing, then soaking; a summary in the end.
pub(crate) fn deep(words: &[String]) -> Result<()> {
    let minutes = minutes(words)?;
    chores::build()?;
    let farfield = farfield();
    let environment = [("FARFIELD_BIN", farfield.as_os_str()), ("FARFIELD_DEEP", OsStr::new("1"))];
    let mut lines = Vec::new();
    let mut failures = 0;
    let mut note = |name: &str, action: &mut dyn FnMut() -> Result<()>| {
        let started = Instant::now();
        let result = action();
        failures += u32::from(result.is_err());
        let verdict = result.map_or_else(|error| format!("FAILED: {error:#}"), |()| "ok".into());
        lines.push(format!("{name:<30} {:>6.0} s  {verdict}", started.elapsed().as_secs_f64()));
    };
    for part in PARTS {
        note(part.name, &mut || part.run(&[], &environment));
    }
    let targets = chores::fuzz_targets();
    if targets.is_empty() {
        println!("\nno fuzz targets (fuzz/fuzz_targets/*.rs)");
    }
    for target in targets {
        note(&format!("fuzz {target}"), &mut || chores::fuzz_one(&target, minutes * 60));
    }
    note("soak", &mut || soak_for(Duration::from_secs(minutes * 60)));
    println!("\n== deep tier ==\n{}", lines.join("\n"));
    ensure!(failures == 0, "{failures} failed");
    Ok(())
}

/// Random histories of memory calls, a new seed each time, until the time is over.
pub(crate) fn soak(words: &[String]) -> Result<()> {
    let minutes = minutes(words)?;
    chores::build()?;
    soak_for(Duration::from_secs(minutes * 60))
}

fn soak_for(time: Duration) -> Result<()> {
    let farfield = farfield();
    let started = Instant::now();
    let mut seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs() % 1_000_000 * 1000;
    while started.elapsed() < time {
        let text = seed.to_string();
        println!("\nseed {seed} (again: FARFIELD_SEED={seed} cargo x test probes -- random_histories)");
        let environment = [("FARFIELD_BIN", farfield.as_os_str()), ("FARFIELD_SEED", OsStr::new(&text))];
        let words = ["test", "-p", "farfield-tests", "--test", "probes", "--", "random_histories"];
        cargo(&words, &environment).with_context(|| format!("seed {seed}"))?;
        seed += 1000;
    }
    Ok(())
}

fn minutes(words: &[String]) -> Result<u64> {
    match words {
        [] => Ok(10),
        [one] => one.parse().context("the only word is a number of minutes"),
        _ => bail!("one word, a number of minutes"),
    }
}
