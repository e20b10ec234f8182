//! The second tier: every part of the tests with larger jobs, then under sanitizers and Miri, fuzzed and soaked.

use crate::chores::{self, cargo, farfield, nightly};
use crate::tests::{PARTS, Part, Suite};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::time::{Duration, Instant};

/// Crates with `unsafe` code, or threads, that run in ordinary processes. Not the pager: it lives in signal handlers of programs that
/// know no sanitizer, at addresses that the sanitizers keep for themselves. Not `core`, which has neither.
const SANITIZED: [&str; 6] =
    ["farfield-pool", "farfield-server", "farfield", "farfield-gc", "farfield-dsm", "farfield-plugin"];

const SANITIZERS: [&str; 2] = ["address", "thread"];

type Action = Box<dyn Fn(&Suite) -> Result<()>>;

/// Runs all of it, or the parts that are named, and prints what each took and how it ended.
pub(crate) fn deep(words: &[String]) -> Result<()> {
    let (minutes, chosen): (Vec<_>, Vec<_>) = words.iter().partition(|word| word.parse::<u64>().is_ok());
    let minutes = minutes_of(&minutes.into_iter().cloned().collect::<Vec<_>>())?;
    let parts = parts(minutes);
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|word| name.starts_with(word.as_str()));
    for word in &chosen {
        let names: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
        ensure!(names.iter().any(|name| name.starts_with(word.as_str())), "no part is called {word:?}: {names:?}");
    }
    let of_suite: Vec<_> = PARTS.into_iter().filter(|part| is_chosen(part.name)).collect();
    let suite = Suite::build(&of_suite, &[], true)?;
    let mut table = format!("{:<28} {:>7}  result\n", "part", "seconds");
    let mut failures = 0;
    for (name, run) in parts.iter().filter(|(name, _)| is_chosen(name)) {
        let started = Instant::now();
        let result = run(&suite);
        failures += u32::from(result.is_err());
        let verdict = result.map_or_else(|error| format!("FAILED: {error:#}"), |()| "ok".into());
        table += &format!("{name:<28} {:>7.0}  {verdict}\n", started.elapsed().as_secs_f64());
    }
    println!("\n== deep tier ==\n{table}");
    ensure!(failures == 0, "{failures} failed");
    Ok(())
}

fn parts(minutes: u64) -> Vec<(String, Action)> {
    let mut parts: Vec<(String, Action)> = Vec::new();
    for part in PARTS {
        parts.push((part.name.into(), Box::new(move |suite| run_part(suite, part))));
    }
    for sanitizer in SANITIZERS {
        parts.push((format!("sanitize {sanitizer}"), Box::new(move |_| sanitize_by(sanitizer, &SANITIZED))));
    }
    parts.push(("miri".into(), Box::new(|_| miri())));
    parts.push(("deny".into(), Box::new(|_| chores::deny())));
    for target in chores::fuzz_targets() {
        parts.push((format!("fuzz {target}"), Box::new(move |_| chores::fuzz_one(&target, minutes * 60))));
    }
    parts.push(("soak".into(), Box::new(move |_| soak_for(Duration::from_secs(minutes * 60)))));
    parts
}

fn run_part(suite: &Suite, part: Part) -> Result<()> {
    let outcomes = suite.run(&[part])?;
    let failed: Vec<_> = outcomes.iter().filter(|it| it.verdict.is_failure()).map(|it| it.name.as_str()).collect();
    ensure!(failed.is_empty(), "{}", failed.join(", "));
    Ok(())
}

/// The tests of crates under sanitizers: those that are named, or all.
pub(crate) fn sanitize(words: &[String]) -> Result<()> {
    let named = |known: &[&'static str]| -> Vec<&'static str> {
        let named: Vec<_> = known.iter().copied().filter(|name| words.iter().any(|word| word == name)).collect();
        if named.is_empty() { known.to_vec() } else { named }
    };
    let is_known = |word: &str| SANITIZERS.contains(&word) || SANITIZED.contains(&word);
    for word in words {
        ensure!(is_known(word), "{word:?} is neither a sanitizer {SANITIZERS:?} nor a crate {SANITIZED:?}");
    }
    named(&SANITIZERS).into_iter().try_for_each(|sanitizer| sanitize_by(sanitizer, &named(&SANITIZED)))
}

fn sanitize_by(sanitizer: &str, crates: &[&str]) -> Result<()> {
    println!("\n== {sanitizer} sanitizer ==");
    let mut command = nightly("cargo");
    command.args(["test", "--tests", "--no-fail-fast", "--target", "x86_64-unknown-linux-gnu"]);
    command.arg("--target-dir").arg(chores::target().join(format!("sanitize-{sanitizer}")));
    command.args(crates.iter().flat_map(|name| ["-p", name]));
    // Races are seen only if the standard library's locks are.
    if sanitizer == "thread" {
        command.arg("-Zbuild-std");
        let known = chores::project().join("xtask/thread-sanitizer.txt");
        command.env("TSAN_OPTIONS", format!("suppressions={}", known.display()));
    }
    command.env("RUSTFLAGS", format!("-Zsanitizer={sanitizer}"));
    // What lives until the process ends is no leak; the tests count what matters.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    // Functions need several times as much stack.
    command.env("RUST_MIN_STACK", (32 << 20).to_string());
    let status = command.status().context("cannot start rustup")?;
    ensure!(
        status.success(),
        "the tests failed under the {sanitizer} sanitizer, or a nightly toolchain with rust-src is absent (rustup \
         toolchain install nightly --component rust-src)"
    );
    Ok(())
}

/// Small histories of the far heap and of a collected heap, every access of which is checked against the rules of the language.
fn miri() -> Result<()> {
    println!("\n== miri ==");
    let mut command = nightly("cargo");
    command.args(["miri", "test", "-p", "farfield", "-p", "farfield-gc", "--test", "miri"]);
    // The clock is the machine's. Threads of the heap and their records live until the process ends.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-ignore-leaks");
    let status = command.status().context("cannot start rustup")?;
    ensure!(
        status.success(),
        "Miri found something, or it is absent (rustup toolchain install nightly --component miri rust-src)"
    );
    Ok(())
}

/// Random histories of memory calls, and exchanges of the pool under programs that check each page, a new seed each time,
/// until the time is over.
pub(crate) fn soak(words: &[String]) -> Result<()> {
    let minutes = minutes_of(words)?;
    chores::build()?;
    soak_for(Duration::from_secs(minutes * 60))
}

fn soak_for(time: Duration) -> Result<()> {
    let farfield = farfield();
    let started = Instant::now();
    let mut seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs() % 1_000_000 * 1000;
    while started.elapsed() < time {
        let text = seed.to_string();
        for (part, test) in [("probes", "random_histories"), ("switch", "no_write_is_lost")] {
            println!("\nseed {seed} (again: FARFIELD_SEED={seed} cargo x test {part} -- {test})");
            let environment = [("FARFIELD_BIN", farfield.as_os_str()), ("FARFIELD_SEED", OsStr::new(&text))];
            let words = ["test", "-p", "farfield-tests", "--test", part, "--", test];
            cargo(&words, &environment).with_context(|| format!("{part}, seed {seed}"))?;
        }
        seed += 1000;
    }
    Ok(())
}

fn minutes_of(words: &[String]) -> Result<u64> {
    match words {
        [] => Ok(10),
        [one] => one.parse().context("the only word is a number of minutes"),
        _ => bail!("one word, a number of minutes"),
    }
}
