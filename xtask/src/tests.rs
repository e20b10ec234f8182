//! The tests of the CI tier, part by part.
//!
//! Everything but DataFusion is built by one invocation of cargo with one set of features, so each library is compiled once;
//! the test programs that come out are then run part by part. Only `models` (another pager) and `sql` (DataFusion) are built
//! by themselves.

use crate::chores::{self, cargo};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

/// A part of the tests that can be run by itself.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    /// One test at a time, because it looks at the whole machine or at clocks.
    alone: bool,
    tier: Tier,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// Runs in both tiers.
    Ci,
    /// Runs in the deep tier, or by name: DataFusion takes longer to build than everything else together.
    Deep,
}

const fn part(name: &'static str) -> Part {
    Part { name, alone: false, tier: Tier::Ci }
}

const fn alone(name: &'static str) -> Part {
    Part { name, alone: true, tier: Tier::Ci }
}

/// In the order in which they say most, soonest.
pub(crate) const PARTS: [Part; 21] = [
    part("unit"),
    alone("models"),
    alone("fabric"),
    alone("faults"),
    alone("heaps"),
    alone("survival"),
    alone("tiers"),
    alone("switch"),
    part("offload"),
    part("columns"),
    part("frames"),
    part("sandbox"),
    alone("leftovers"),
    alone("kills"),
    alone("budget"),
    alone("users"),
    part("examples"),
    part("situations"),
    part("probes"),
    part("programs"),
    Part { name: "sql", alone: false, tier: Tier::Deep },
];

/// The packages and features that all parts share, so that no library is built twice.
const COMMON: [&str; 3] = ["--workspace", "--exclude", "farfield-sql"];
const FEATURES: &str = "farfield/serde,farfield-bench/grpc";
const FEATURES_OF_FABRIC: &str =
    "farfield-fabric/libfabric,farfield-pool/fabric,farfield-server/fabric,farfield-cli/fabric";

/// The end-to-end tests: each of their programs is a part.
const END_TO_END: &str = "farfield-tests";

/// Crates with tests of DataFusion.
const SQL: [&str; 8] = [
    "-p",
    "farfield-sql",
    "-p",
    END_TO_END,
    "-p",
    "farfield-bench",
    "--features",
    "farfield-tests/sql,farfield-bench/sql",
];

/// A test program that cargo has built.
struct TestProgram {
    package: String,
    target: String,
    path: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
}

impl TestProgram {
    fn from_message(message: &Value) -> Option<TestProgram> {
        let path = message["executable"].as_str()?;
        let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let folder = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
        // `path+file:///…/crates/core#farfield-core@0.1.0`, or `…/bench#0.1.0` where folder and package have one name.
        let id = message["package_id"].as_str()?.rsplit('#').next()?;
        let package = id.split_once('@').map_or_else(
            || folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            |(name, _)| name.to_owned(),
        );
        let target = message["target"]["name"].as_str()?.to_owned();
        is_test.then(|| TestProgram { package, target, path: path.into(), folder })
    }

    fn part(&self) -> &str {
        match (self.package.as_str(), self.target.as_str()) {
            (END_TO_END, target) if PARTS.iter().any(|part| part.name == target) => target,
            (_, "fabric") => "fabric",
            _ => "unit",
        }
    }
}

/// Builds every test program of the common feature set, in one invocation of cargo.
fn build_programs() -> Result<Vec<TestProgram>> {
    let features = features();
    let mut words = vec!["test", "--no-run", "--message-format", "json-render-diagnostics"];
    words.extend(common(&features));
    let output = chores::cargo_command(&words, &[]).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests could not be built");
    let messages = String::from_utf8_lossy(&output.stdout);
    let parsed = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs: Vec<_> = parsed.filter_map(|message| TestProgram::from_message(&message)).collect();
    // Not in the order in which they were built, which differs.
    programs.sort_by(|one, other| (&one.package, &one.target).cmp(&(&other.package, &other.target)));
    Ok(programs)
}

fn features() -> String {
    if chores::has_libfabric() { format!("{FEATURES},{FEATURES_OF_FABRIC}") } else { FEATURES.into() }
}

fn common(features: &str) -> Vec<&str> {
    [&COMMON[..], &["--features", features]].concat()
}

/// What a run of parts shares: the programs under test and the words for the test runner.
pub(crate) struct Suite {
    programs: Vec<TestProgram>,
    runner_words: Vec<String>,
    environment: Vec<(&'static str, std::ffi::OsString)>,
}

impl Suite {
    /// Builds what users get and, if one of `parts` runs them, the test programs.
    pub(crate) fn build(parts: &[Part], runner_words: &[String], deep: bool) -> Result<Suite> {
        // The deep tier runs what users get.
        let farfield = if deep { chores::build().map(|()| chores::farfield()) } else { chores::build_checked() }?;
        let needs_programs = parts.iter().any(|part| !matches!(part.name, "models" | "sql"));
        let programs = if needs_programs { build_programs()? } else { Vec::new() };
        let mut environment = vec![("FARFIELD_BIN", farfield.into_os_string())];
        if deep {
            environment.push(("FARFIELD_DEEP", "1".into()));
        }
        Ok(Suite { programs, runner_words: runner_words.to_vec(), environment })
    }

    pub(crate) fn run(&self, part: Part) -> Result<()> {
        println!("\n== {} ==", part.name);
        match part.name {
            "models" => self.cargo_test(part, &["-p", "farfield-pager", "--features", "model", "--test", "model"]),
            "sql" => {
                self.cargo_test(part, &[&SQL[..], &["--doc"]].concat())?;
                self.cargo_test(part, &[&SQL[..], &["--lib", "--test", "sql"]].concat())
            }
            "fabric" if !chores::has_libfabric() => {
                ensure!(std::env::var_os("CI").is_none(), "libfabric-dev and pkg-config must be installed");
                println!("skipped: libfabric-dev and pkg-config are not installed");
                Ok(())
            }
            "unit" => {
                chores::check_fuzz()?;
                let programs = self.run_programs(part);
                let features = features();
                let documentation = self.cargo_test(part, &[&common(&features)[..], &["--doc"]].concat());
                programs.and(documentation)
            }
            _ => self.run_programs(part),
        }
    }

    /// Runs the test programs of this part, as cargo would; all of them, also when one fails.
    fn run_programs(&self, part: Part) -> Result<()> {
        let programs: Vec<_> = self.programs.iter().filter(|program| program.part() == part.name).collect();
        ensure!(!programs.is_empty(), "no test program belongs to the part {}", part.name);
        let mut failed = Vec::new();
        for program in programs {
            println!("\n{} {}", program.package, program.target);
            let mut command = Command::new(&program.path);
            command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
            command.envs(self.environment.iter().map(|(name, value)| (name, value))).args(self.words(part));
            if !command.status().with_context(|| program.path.display().to_string())?.success() {
                failed.push(format!("{} {}", program.package, program.target));
            }
        }
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        Ok(())
    }

    fn cargo_test(&self, part: Part, of: &[&str]) -> Result<()> {
        let runner_words = self.words(part);
        let mut words: Vec<&str> = vec!["test", "--no-fail-fast"];
        words.extend(of);
        words.push("--");
        words.extend(runner_words.iter().map(String::as_str));
        let environment: Vec<(&str, &OsStr)> =
            self.environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect();
        cargo(&words, &environment)
    }

    fn words(&self, part: Part) -> Vec<String> {
        let alone = part.alone.then(|| "--test-threads=1".to_owned());
        alone.into_iter().chain(self.runner_words.iter().cloned()).collect()
    }
}

/// The CI tier, or the parts that are named. Prints what each part took; the last line counts the parts.
pub(crate) fn test(words: &[String]) -> Result<()> {
    let (parts, runner_words) = parse(words)?;
    let started = Instant::now();
    let suite = Suite::build(&parts, &runner_words, false)?;
    let mut table = format!("{:<12} {:>7}  result\n", "part", "seconds");
    table += &format!("{:<12} {:>7.0}  ok\n", "build", started.elapsed().as_secs_f64());
    let mut failed = Vec::new();
    for part in &parts {
        let started = Instant::now();
        let result = suite.run(*part);
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        table += &format!("{:<12} {:>7.0}  {verdict}\n", part.name, started.elapsed().as_secs_f64());
        if let Err(error) = result {
            eprintln!("{}: {error:#}", part.name);
            failed.push(part.name);
        }
    }
    println!("\n{table}\nparts: {} passed, {} failed", parts.len() - failed.len(), failed.len());
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
        parts.extend(PARTS.iter().filter(|part| part.tier == Tier::Ci));
    }
    Ok((parts, words.iter().skip(end + 1).cloned().collect()))
}
