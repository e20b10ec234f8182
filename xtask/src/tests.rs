//! The tests of the CI tier, part by part.
//!
//! The product without data frames is built by one invocation of cargo with one set of features, so each library is compiled
//! once; the test programs that come out are then run, three at a time. What belongs to the deep tier is built when its part
//! is run.

use crate::chores;
use crate::linting::{self, Findings};
use crate::passed::{self, Inputs};
use crate::runs::{self, Outcome, Run, Verdict};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A part of the tests that can be run by itself.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    beside: Beside,
    tier: Tier,
}

/// What may run beside a test.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Other tests of its program, and another program.
    Tests,
    /// Another program: its tests start several servers each, or look at clocks.
    Programs,
    /// Nothing: it looks at the whole machine.
    Nothing,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// Runs in both tiers.
    Ci,
    /// Runs in the deep tier, or by name. `experiments` are tests of the program that measures, and of its workloads: nothing of
    /// the product is made of them, and they take a tenth of the build. Arrow, Parquet, and `columns`, which has each question for
    /// each type of number, take an eighth of it.
    /// DataFusion takes longer to build than everything else together, the fuzz targets are
    /// a workspace of their own, the models need another pager, and libfabric another pool. Their libraries are built anew.
    Deep,
}

const fn part(name: &'static str) -> Part {
    Part { name, beside: Beside::Tests, tier: Tier::Ci }
}

const fn serial(name: &'static str) -> Part {
    Part { name, beside: Beside::Programs, tier: Tier::Ci }
}

const fn alone(name: &'static str) -> Part {
    Part { name, beside: Beside::Nothing, tier: Tier::Ci }
}

const fn deep(part: Part) -> Part {
    Part { tier: Tier::Deep, ..part }
}

/// In the order in which they begin: those that cargo builds, of which one runs at a time, and the longest, so that none of them
/// is left over at the end.
pub(crate) const PARTS: [Part; 32] = [
    part("lints"),
    serial("heaps"),
    part("doctests"),
    part("unit"),
    part("programs"),
    part("probes"),
    serial("survival"),
    serial("switch"),
    serial("faults"),
    serial("python"),
    serial("tiers"),
    part("offload"),
    part("sandbox"),
    part("examples"),
    part("situations"),
    alone("leftovers"),
    alone("kills"),
    alone("agents"),
    alone("budget"),
    alone("users"),
    deep(part("columns")),
    deep(part("frames")),
    deep(serial("python_frames")),
    deep(alone("slurm")),
    deep(alone("kubernetes")),
    deep(alone("packages")),
    deep(alone("browser")),
    deep(part("experiments")),
    deep(serial("models")),
    deep(serial("fabric")),
    deep(part("sql")),
    deep(part("fuzz-build")),
];

/// The packages and features that all parts share, so that no library is built twice.
const COMMON: [&str; 3] = ["--workspace", "--exclude", "farfield-sql"];
/// The program that measures.
const BENCH: &str = "farfield-bench";
/// Data frames, which are made of Arrow and Parquet.
const FRAME: &str = "farfield-frame";
/// Data frames for Python.
const PYTHON: &str = "farfield-python";
const FEATURES: &str = "farfield/serde";
/// Tests of one-sided reads.
const FABRIC: [&str; 12] = [
    "-p",
    "farfield-fabric",
    "-p",
    "farfield-pool",
    "-p",
    "farfield-server",
    "-p",
    "farfield-cli",
    "--features",
    FEATURES_OF_FABRIC,
    "--test",
    "fabric",
];
/// Other contenders of experiments and their libraries, some fifty, and what needs one of these: in the deep tier only.
const FEATURES_OF_GRPC: &str =
    "farfield-bench/grpc,farfield-bench/collectors,farfield-cli/otlp,farfield-cli/compiled,farfield-tests/compiled";
/// Tests of data frames and of columns.
const FEATURES_OF_FRAMES: &str = "farfield-tests/frames";
/// What writes man pages, for packages.
const FEATURES_OF_PAGES: &str = "farfield-cli/pages";
const FEATURES_OF_FABRIC: &str =
    "farfield-fabric/libfabric,farfield-pool/fabric,farfield-server/fabric,farfield-cli/fabric";

/// The end-to-end tests: each of their programs is a part.
const END_TO_END: &str = "farfield-tests";

/// Models whose threads run under a scheduler: loom for the words of the heap and of collections, and for copies of
/// shared objects; shuttle for the pager, and for tasks, waits and channels of shared memory.
const MODELS: [[&str; 6]; 5] = [
    ["-p", "farfield-core", "--features", "model", "--test", "*_model"],
    ["-p", "farfield-gc", "--features", "model", "--test", "model"],
    ["-p", "farfield-dsm", "--features", "model", "--test", "model"],
    ["-p", "farfield-dsm", "--features", "model", "--test", "schedules"],
    ["-p", "farfield-pager", "--features", "model", "--test", "model"],
];

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

/// The tests of the heap run once for each plane (`FARFIELD_PLANE`), without those that hold on others only. The hybrid plane is
/// made of the other two, and its own tests are in `one_plane`: all of them run on it in the deep tier.
const PLANES: [(&str, &str); 3] = [("page", "object_flights::"), ("object", "one_plane::"), ("hybrid", "one_plane::")];
const PLANES_OF_CI: usize = 2;

/// Tests of collections, whose code is the same on each plane: CI runs them on the first one.
const OF_COLLECTIONS: [&str; 8] =
    ["array::", "btree::", "bytes::", "flat_map::", "list::", "many::", "sets::", "vec::"];

/// Packages whose tests start the product's programs.
const STARTS_PRODUCT: [&str; 5] = [END_TO_END, BENCH, "farfield-cli", "farfield-pager", "farfield-preload"];

/// Test programs that run at a time, on two cores: many of them wait for servers most of the time. A fourth makes all
/// of them poll more, and takes a sixth more processor time.
const AT_ONCE: usize = 3;

/// How long one test program of the CI tier may run.
const PATIENCE: Duration = Duration::from_secs(1200);

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

    fn is_heap(&self) -> bool {
        (self.package.as_str(), self.target.as_str()) == ("farfield", "heap")
    }

    fn part(&self) -> &str {
        match (self.package.as_str(), self.target.as_str()) {
            (BENCH, _) => "experiments",
            (FRAME, _) => "frames",
            (END_TO_END, target) if PARTS.iter().any(|part| part.name == target) => target,
            _ => "unit",
        }
    }
}

/// Builds every program of the common feature set, in one invocation of cargo: each would build libraries that differ in what tests
/// want of them. Returns the test programs, and what was found in the project meanwhile.
fn build_programs(scope: Scope, environment: &[(&'static str, OsString)]) -> Result<(Vec<TestProgram>, Findings)> {
    // Who lints reads what is found, and shows it at the end. Otherwise cargo shows it at once.
    let format = if environment.is_empty() { "json-render-diagnostics" } else { "json" };
    let mut words: Vec<String> = ["build", "--all-targets", "--message-format", format].map(String::from).into();
    words.extend(scope.words());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = chores::cargo_command(&words, &borrowed(environment))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    let messages = String::from_utf8_lossy(&output.stdout);
    let parsed: Vec<Value> = messages.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if !output.status.success() {
        parsed.iter().filter_map(linting::rendered).for_each(|shown| eprint!("{shown}"));
        bail!("the tests could not be built");
    }
    let mut findings = Findings::default();
    parsed.iter().for_each(|message| findings.read(message));
    let mut programs: Vec<_> = parsed.iter().filter_map(TestProgram::from_message).collect();
    // Not in the order in which they were built, which differs.
    programs.sort_by(|one, other| (&one.package, &one.target).cmp(&(&other.package, &other.target)));
    Ok((programs, findings))
}

fn borrowed<'a>(environment: &'a [(&'static str, OsString)]) -> Vec<(&'a str, &'a OsStr)> {
    environment.iter().map(|(name, value)| (*name, value.as_os_str())).collect()
}

/// What is built beside the product and the tests of the CI tier.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Scope {
    /// The program that measures.
    has_bench: bool,
    /// Another contender of it.
    has_grpc: bool,
    /// Data frames, and tests of columns.
    has_frames: bool,
}

impl Scope {
    fn of(parts: &[Part], is_deep: bool) -> Scope {
        let has = |names: &[&str]| is_deep || parts.iter().any(|part| names.contains(&part.name));
        Scope {
            has_bench: has(&["experiments"]),
            has_grpc: is_deep,
            has_frames: has(&["columns", "frames", "python_frames"]),
        }
    }

    /// Words for cargo: packages and features.
    fn words(self) -> Vec<String> {
        let without = |package, has: bool| (!has).then_some(["--exclude", package]).into_iter().flatten();
        let features = features(self.has_grpc, self.has_frames);
        COMMON
            .into_iter()
            .chain(without(BENCH, self.has_bench))
            .chain(without(FRAME, self.has_frames))
            .chain(without(PYTHON, self.has_frames))
            .chain(["--features", &features])
            .map(String::from)
            .collect()
    }
}

fn features(has_grpc: bool, has_frames: bool) -> String {
    let mut features = vec![FEATURES];
    features.extend(has_grpc.then_some(FEATURES_OF_GRPC));
    features.extend(has_frames.then_some(FEATURES_OF_FRAMES));
    features.join(",")
}

fn common(features: &str) -> Vec<&str> {
    [&COMMON[..], &["--features", features]].concat()
}

/// Word of `cargo x lints` that leaves gRPC out.
const WITHOUT_GRPC: &str = "--without-grpc";

/// Formatting, clippy and API documentation of everything but DataFusion, with all features.
pub(crate) fn lints(words: &[String]) -> Result<()> {
    let has_grpc = match words {
        [] => true,
        [word] if word == WITHOUT_GRPC => false,
        _ => bail!("cargo x lints [{WITHOUT_GRPC}]"),
    };
    let mut features = format!("{},{FEATURES_OF_PAGES}", features(has_grpc, true));
    if chores::has_libfabric() {
        features = format!("{features},{FEATURES_OF_FABRIC}");
    }
    chores::fmt(&["--check".into()])?;
    chores::lint(&common(&features))?;
    chores::doc(&common(&features))
}

/// What runs of parts share: the test programs, and the words for the test runner.
pub(crate) struct Suite {
    programs: Vec<TestProgram>,
    /// What was found in the project while it was built.
    findings: Findings,
    runner_words: Vec<String>,
    environment: Vec<(&'static str, OsString)>,
    is_deep: bool,
    scope: Scope,
    /// Whether clippy and the documentation come with the build and the doctests.
    is_linting: bool,
    /// Whether programs run that have passed with the same inputs.
    runs_again: bool,
}

impl Suite {
    /// Builds the product and, if one of `parts` runs them, the test programs.
    pub(crate) fn build(parts: &[Part], runner_words: &[String], is_deep: bool) -> Result<Suite> {
        let by_cargo = ["models", "fabric", "sql", "lints", "doctests", "fuzz-build"];
        // Tests of DataFusion start servers.
        let needs_programs = parts.iter().any(|part| !by_cargo.contains(&part.name) || part.name == "sql");
        let has = |name| parts.iter().any(|part| part.name == name);
        // Where nothing was built before.
        let is_linting =
            needs_programs && has("lints") && has("doctests") && std::env::var_os("CI").is_some() && !is_deep;
        let mut environment = if is_linting { linting::environment()? } else { Vec::new() };
        let scope = Scope::of(parts, is_deep);
        let (programs, findings) =
            if needs_programs { build_programs(scope, &environment)? } else { Default::default() };
        let farfield = if is_deep {
            // What users get.
            chores::build()?;
            if has("python_frames") {
                // DataFusion takes long to build, so queries from Python are tried where others are.
                chores::build_python(has("sql"))?;
            }
            Some(chores::farfield())
        } else if needs_programs {
            Some(chores::keep_checked()?)
        } else {
            None
        };
        environment.extend(farfield.map(|path| ("FARFIELD_BIN", path.into_os_string())));
        if is_deep {
            environment.push(("FARFIELD_DEEP", "1".into()));
        }
        Ok(Suite {
            programs,
            findings,
            runner_words: runner_words.to_vec(),
            environment,
            is_deep,
            scope,
            is_linting,
            runs_again: true,
        })
    }

    /// Runs parts: those that may [`AT_ONCE`] programs at a time, in the CI tier. Returns what became of each program.
    pub(crate) fn run(&self, parts: &[Part]) -> Result<Vec<Outcome>> {
        let may_meet = |part: &&Part| part.beside != Beside::Nothing && !self.is_deep;
        let (together, alone): (Vec<_>, Vec<_>) = parts.iter().partition(may_meet);
        let runs = |parts: Vec<&Part>| -> Result<Vec<Run>> {
            let runs: Vec<_> = parts.into_iter().map(|part| self.runs(*part)).collect::<Result<_>>()?;
            Ok(runs.into_iter().flatten().collect())
        };
        let is_deep = self.is_deep || parts.iter().any(|part| part.tier == Tier::Deep);
        let patience = PATIENCE * if is_deep { 60 } else { 1 };
        let together = runs(together)?;
        let at_once = together.len().clamp(1, AT_ONCE);
        let mut outcomes = Vec::new();
        for (runs, at_once) in [(together, at_once), (runs(alone)?, 1)] {
            let has_passed = |run: &Run| {
                let inputs = run.inputs.as_ref().filter(|_| !self.runs_again);
                inputs.is_some_and(|inputs| passed::has_passed(&run.name, inputs))
            };
            let (unchanged, runs): (Vec<_>, Vec<_>) = runs.into_iter().partition(has_passed);
            let verdict = Verdict::Unchanged;
            outcomes.extend(unchanged.into_iter().map(|Run { part, name, .. }| Outcome {
                part,
                name,
                seconds: 0.0,
                cpu: 0.0,
                verdict,
            }));
            outcomes.extend(runs::all(runs, at_once, patience)?);
        }
        if self.is_linting {
            let verdict = if self.findings.report()? { Verdict::Passed } else { Verdict::Failed };
            outcomes.push(Outcome {
                part: "lints",
                name: "lints with the build".into(),
                seconds: 0.0,
                cpu: 0.0,
                verdict,
            });
        }
        Ok(outcomes)
    }

    /// What a part runs.
    fn runs(&self, part: Part) -> Result<Vec<Run>> {
        Ok(match part.name {
            "models" => MODELS.map(|of| self.by_cargo(part, &of)).into(),
            "sql" => {
                let of = [&SQL[..], &["--lib", "--test", "sql"]].concat();
                vec![self.by_cargo(part, &[&SQL[..], &["--doc"]].concat()), self.by_cargo(part, &of)]
            }
            "lints" if self.is_linting => {
                let command = chores::cargo_command(&["fmt", "--all", "--check"], &[]);
                vec![Run { part: part.name, name: "formatting".into(), command, is_cargo: false, inputs: None }]
            }
            "lints" => {
                let words = ["x", "lints", WITHOUT_GRPC];
                let words = if self.is_deep { &words[..2] } else { &words[..] };
                let command = chores::cargo_command(words, &[]);
                vec![Run { part: part.name, name: part.name.into(), command, is_cargo: true, inputs: None }]
            }
            "doctests" => {
                let mut words = self.scope.words();
                words.push("--doc".into());
                vec![self.by_cargo(part, &words.iter().map(String::as_str).collect::<Vec<_>>())]
            }
            "fuzz-build" => {
                let (name, command) = (part.name.into(), chores::fuzz_check());
                vec![Run { part: part.name, name, command, is_cargo: true, inputs: None }]
            }
            "fabric" => {
                ensure!(chores::has_libfabric(), "libfabric-dev and pkg-config must be installed");
                vec![self.by_cargo(part, &FABRIC)]
            }
            _ => {
                let programs: Vec<_> = self.programs.iter().filter(|program| program.part() == part.name).collect();
                ensure!(!programs.is_empty(), "no test program belongs to the part {}", part.name);
                let runs: Vec<_> =
                    programs.into_iter().map(|program| self.by_program(part, program)).collect::<Result<_>>()?;
                runs.into_iter().flatten().collect()
            }
        })
    }

    /// A test program, as cargo would run it; the heap's once for each plane.
    fn by_program(&self, part: Part, program: &TestProgram) -> Result<Vec<Run>> {
        let run = |plane: Option<(&str, &str)>| {
            let mut words = self.words(part);
            let mut name = format!("{} {}", program.package, program.target);
            if let Some((plane, not_on_it)) = plane {
                let is_other = plane != PLANES[0].0 && !self.is_deep;
                let left_out = [not_on_it].into_iter().chain(OF_COLLECTIONS.into_iter().filter(|_| is_other));
                words.extend(left_out.flat_map(|tests| ["--skip", tests]).map(String::from));
                name = format!("{name} {plane}");
            }
            let inputs = self.inputs(part, program)?.map(|inputs| inputs.words(&words));
            let mut command = Command::new(&program.path);
            command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder).args(words);
            command.envs(self.environment.iter().map(|(name, value)| (name, value)));
            command.envs(plane.map(|(plane, _)| ("FARFIELD_PLANE", plane)));
            Ok(Run { part: part.name, name, command, is_cargo: false, inputs })
        };
        if !program.is_heap() {
            return Ok(vec![run(None)?]);
        }
        let planes = if self.is_deep { PLANES.len() } else { PLANES_OF_CI };
        PLANES[..planes].iter().map(|plane| run(Some(*plane))).collect()
    }

    /// What the result of a test program depends on; `None` if that is too much to say: tests of the project look at all its files.
    fn inputs(&self, part: Part, program: &TestProgram) -> Result<Option<Inputs>> {
        if program.package == "xtask" || self.is_deep {
            return Ok(None);
        }
        // Its sources, too: tests compile programs of their own.
        let mut inputs = Inputs::default().words(["CI", "FARFIELD_SEED"].map(std::env::var_os)).files(&program.path)?;
        inputs = inputs.files(&program.folder)?;
        if STARTS_PRODUCT.contains(&program.package.as_str()) {
            for name in chores::PRODUCT {
                inputs = inputs.files(&chores::target().join("debug").join(name))?;
            }
        }
        if part.name == "examples" {
            inputs = inputs.files(&chores::target().join("debug/examples"))?;
        }
        Ok(Some(inputs))
    }

    /// What cargo builds by itself.
    fn by_cargo(&self, part: Part, of: &[&str]) -> Run {
        let runner_words = self.words(part);
        let mut words: Vec<&str> = vec!["test", "--no-fail-fast"];
        words.extend(of);
        words.push("--");
        words.extend(runner_words.iter().map(String::as_str));
        let command = chores::cargo_command(&words, &borrowed(&self.environment));
        Run { part: part.name, name: part.name.into(), command, is_cargo: true, inputs: None }
    }

    fn words(&self, part: Part) -> Vec<String> {
        let serial = (part.beside != Beside::Tests).then(|| "--test-threads=1".to_owned());
        serial.into_iter().chain(self.runner_words.iter().cloned()).collect()
    }
}

/// The CI tier, or the parts that are named. Prints what each program took; the last line counts the parts.
pub(crate) fn test(words: &[String]) -> Result<()> {
    let (is_all, words) = match words {
        [] => (true, words),
        [first, rest @ ..] if first == "--again" => (false, rest),
        _ => (false, words),
    };
    let (parts, runner_words) = parse(words)?;
    let started = Instant::now();
    let mut suite = Suite::build(&parts, &runner_words, false)?;
    // Whoever names a part wants it to run.
    suite.runs_again = !is_all;
    let built = started.elapsed().as_secs_f64();
    let mut outcomes = suite.run(&parts)?;
    outcomes.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    let mut table = format!("{:<36} {:>7} {:>7}  result\n", "program", "seconds", "cpu");
    table += &format!("{:<36} {built:>7.0} {:>7}  ok\n", "build", "");
    for Outcome { name, seconds, cpu, verdict, .. } in &outcomes {
        table += &format!("{name:<36} {seconds:>7.0} {cpu:>7.0}  {}\n", verdict.text());
    }
    let failed = |part: &&Part| outcomes.iter().any(|it| it.part == part.name && it.verdict.is_failure());
    let failed: Vec<_> = parts.iter().filter(failed).map(|part| part.name).collect();
    let all = started.elapsed().as_secs_f64();
    println!("\n{table}{:<36} {all:>7.0}\n", "all");
    println!("parts: {} passed, {} failed", parts.len() - failed.len(), failed.len());
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
