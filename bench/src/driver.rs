//! The one driver of all experiments.
//!
//! At each point the contenders take turns, A B C A B C, so that drift of the machine hits all alike. A contender that
//! cannot run or goes wrong is left out of the following rounds of its point, and the line says why.

use crate::child::Interrupted;
use crate::contender;
use crate::experiment::{Experiment, Point, Value, arguments, near_bytes, number, overuse, workload};
use crate::job::Job;
use crate::line::{ContenderResult, Line, PointResult, SCHEMA, Sample, Status, ratios};
use crate::machine::{Machine, commit, utc_now};
use crate::swap::{Unavailable, unavailable};
use crate::undo::Ledger;
use crate::workload::NO_REAL_DATA;
use crate::{advised, bar, limits, note, sys, tables};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How to run an experiment.
pub struct Settings {
    /// Small sizes, one sample.
    pub quick: bool,
    /// Samples of each contender, instead of what the file says.
    pub runs: Option<u32>,
    /// Seed, instead of what the file says.
    pub seed: Option<u64>,
    /// Only these contenders and the baseline; empty for all.
    pub only: Vec<String>,
    /// The `farfield` binary, if there is one.
    pub farfield: Option<PathBuf>,
    /// The tree whose commit is noted.
    pub root: PathBuf,
    /// Programs, swap files and outputs of a run; removed in the end.
    pub scratch: PathBuf,
    /// Folder of lock and ledger.
    pub ledger: PathBuf,
    /// The command that cleans up if this process is killed, see [`keep`].
    pub keeper: Option<Vec<OsString>>,
}

/// A process that waits for our end, however that comes about.
struct Keeper(Child);

impl Keeper {
    fn start(command: &[OsString]) -> Result<Keeper> {
        let (program, arguments) = command.split_first().context("no command for the keeper")?;
        // In a group of its own, so that Ctrl-C does not reach it. It holds the reading end of a pipe; our end closes when
        // we end.
        let child = Command::new(program).args(arguments).stdin(Stdio::piped()).process_group(0).spawn();
        Ok(Keeper(child.with_context(|| format!("cannot start {}", program.to_string_lossy()))?))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().ok();
    }
}

/// Waits until the other end of `alive` is closed, then undoes what is left in the ledger: the body of the keeper.
pub fn keep(mut alive: impl std::io::Read, ledger: &Path) -> Result<()> {
    std::io::copy(&mut alive, &mut std::io::sink()).context("cannot wait for the driver")?;
    if ledger.exists() {
        Ledger::open(ledger, KEEPER_PATIENCE)?;
    }
    Ok(())
}

/// If another run takes the lock first, that one cleans up.
const KEEPER_PATIENCE: Duration = Duration::from_secs(10);

/// A folder that is removed with all that is in it.
struct Scratch(PathBuf);

impl Scratch {
    /// Makes the folder of this process. Removes those of runs that were killed.
    fn new(parent: &Path) -> Result<Scratch> {
        let path = parent.join(format!("{SCRATCH}{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        for entry in fs::read_dir(parent)?.flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_prefix(SCRATCH)?.parse::<u32>().ok());
            if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
                fs::remove_dir_all(entry.path()).ok(); // Another run may remove it, too.
            }
        }
        Ok(Scratch(path))
    }
}

/// Prefix of the names of scratch folders; the process id follows.
const SCRATCH: &str = "farfield-bench-";

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Runs one experiment and gives its line.
pub fn run(experiment: &Experiment, settings: &Settings) -> Result<Line> {
    sys::catch_stop_signals().context("cannot catch signals")?;
    let _keeper = settings.keeper.as_deref().filter(|_| sys::is_root()).map(Keeper::start).transpose()?;
    let scratch = Scratch::new(&settings.scratch)?;
    let (commit, dirty) = commit(&settings.root);
    let mut line = Line {
        schema: SCHEMA,
        experiment: experiment.name.clone(),
        time: utc_now(),
        commit,
        dirty,
        machine: Machine::this(),
        seed: settings.seed.unwrap_or(experiment.seed),
        runs: settings.runs.unwrap_or(if settings.quick { 1 } else { experiment.runs }),
        quick: settings.quick,
        baseline: "ok".into(),
        baseline_why: None,
        axes: experiment.axes(settings.quick),
        limits: limits::measure(&experiment.limits, &scratch.0)?,
        points: Vec::new(),
        means: Vec::new(),
        quorums: Vec::new(),
    };
    for point in experiment.points(settings.quick)? {
        note(&format!("{}  {}", experiment.name, describe(&point, &line.axes)));
        let result = run_point(experiment, settings, &line, &scratch.0, point)?;
        let baseline = result.contenders.iter().find(|c| c.name == experiment.baseline);
        match baseline.map(|c| &c.status) {
            Some(Status::Ok) | None => {}
            Some(Status::Unavailable { why, remedy }) => {
                line.baseline = "unavailable".into();
                line.baseline_why = Some(format!("{why}; {remedy}"));
            }
            Some(Status::Failed { why }) => {
                line.baseline = "unavailable".into();
                line.baseline_why = Some(why.clone());
            }
        }
        line.points.push(result);
    }
    line.means = bar::means(&line.points, &experiment.means);
    line.quorums = bar::quorums(&line.points, &experiment.quorums);
    Ok(line)
}

/// The swept parameters of a point, or all if none is swept.
pub(crate) fn describe(point: &Point, axes: &[String]) -> String {
    let shown = point.iter().filter(|(key, _)| axes.is_empty() || axes.contains(key));
    shown.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
}

fn run_point(
    experiment: &Experiment,
    settings: &Settings,
    line: &Line,
    scratch: &Path,
    point: Point,
) -> Result<PointResult> {
    let workload = workload(&point)?;
    let (program, mut words) = workload.make(scratch)?;
    words.extend(arguments(&point, line.seed));
    let links = links_of(&point, scratch);
    words.extend(
        links.iter().flat_map(|folder| ["--links".into(), folder.join("links").to_string_lossy().into_owned()]),
    );
    let job = Job {
        workload,
        program: &program,
        arguments: &words,
        near_bytes: near_bytes(&point)?,
        data_bytes: number(&point, "data_mib")? << 20,
        slo: number(&point, "slo_percent").ok().map(|percent| percent as f64 / 100.0),
        link_bytes_per_s: number(&point, "link_mib").ok().map(|mib| mib << 20),
        overuse: overuse(&point)?,
        patience: Duration::from_secs(experiment.deadline_seconds),
        scratch,
        farfield: settings.farfield.as_deref(),
        ledger: &settings.ledger,
    };
    let mut folders = vec![scratch];
    folders.extend(settings.farfield.as_deref().and_then(Path::parent));
    let chosen =
        |name: &&String| settings.only.is_empty() || settings.only.contains(name) || **name == experiment.baseline;
    let names: Vec<&String> = experiment.contenders.iter().filter(chosen).collect();
    let mut samples: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    let mut setbacks: BTreeMap<&String, Status> = BTreeMap::new();
    let mut checksum: Option<String> = None;
    for round in 0..line.runs {
        for name in &names {
            if setbacks.contains_key(name) {
                continue;
            }
            line.machine.warm(job.data_bytes)?;
            let sample = ensure_possible(&job, &point)
                .and_then(|()| links.as_deref().map_or(Ok(()), |folder| ensure_links(folder, &job)))
                .and_then(|()| contender::known(name)?.sample(&job));
            match sample {
                // Whoever is no program of ours says nothing of what it read.
                Ok(sample)
                    if !sample.checksum.is_empty() && checksum.as_ref().is_some_and(|c| *c != sample.checksum) =>
                {
                    let why = "its result differs from that of the contender before".to_string();
                    report_setback(name, &why);
                    setbacks.insert(name, Status::Failed { why });
                }
                Ok(sample) => {
                    if !sample.checksum.is_empty() {
                        checksum.get_or_insert_with(|| sample.checksum.clone());
                    }
                    let (run, runs, unit) = (round + 1, line.runs, workload.unit);
                    note(&format!("  {run:>2}/{runs} {name:<13} {:>10.1} ns/{unit}", sample.ns_per_op));
                    samples.entry(name.as_str()).or_default().push(sample);
                }
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Err(error) => {
                    let status = setback(&error, &folders);
                    report_setback(name, &format!("{error:#}"));
                    setbacks.insert(name, status);
                }
            }
        }
    }
    if let Some(slo) = job.slo {
        advised::compare_with_best(&mut samples, slo);
    }
    let contenders: Vec<ContenderResult> = names
        .iter()
        .map(|name| {
            let status = setbacks.remove(name).unwrap_or(Status::Ok);
            ContenderResult::new(name, status, samples.remove(name.as_str()).unwrap_or_default())
        })
        .collect();
    let floor_ns = experiment.floor.as_ref().and_then(|floor| floor.ns(&point, &line.limits, line.machine.cores));
    Ok(PointResult {
        near_bytes: job.near_bytes,
        unit: workload.unit.into(),
        floor_ns,
        ratios: ratios(&contenders, &experiment.bars, &point, floor_ns),
        bounds: bar::bounds(&contenders, &experiment.bounds, &point),
        contenders,
        parameters: point,
    })
}

/// Returns the folder for the edges of a real graph, if the programs at this point read them from a file: so a graph takes none of
/// their memory before its edges arrive, and all read the same.
fn links_of(point: &Point, scratch: &Path) -> Option<PathBuf> {
    let is_store = workload(point).is_ok_and(|workload| workload.name == "graph-store");
    let value = |key: &str| point.get(key).map_or_else(|| "any".to_owned(), Value::to_string);
    (is_store && is_real(point)).then(|| scratch.join(format!("links-{}-{}", value("graph"), value("data_mib"))))
}

fn is_real(point: &Point) -> bool {
    number(point, "real").is_ok_and(|real| real == 1)
}

/// Writes those edges, unless that was done before.
fn ensure_links(folder: &Path, job: &Job<'_>) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let result = tables::write_columns(folder, job);
    if result.is_err() {
        fs::remove_dir_all(folder).ok();
    }
    result
}

/// Programs of others are not on every machine, real data is not part of the project, and DataFusion not of every build.
fn ensure_possible(job: &Job<'_>, point: &Point) -> Result<()> {
    job.workload.ensure_installed(job.program, job.arguments)?;
    if job.workload.name == "sql" && !cfg!(feature = "sql") {
        return Err(unavailable("this harness was built without SQL", "build farfield-bench with --features sql"));
    }
    if job.workload.name == "questions" && !cfg!(feature = "frame") {
        return Err(unavailable("this harness was built without frames", "build farfield-bench with --features frame"));
    }
    if is_real(point) && std::env::var_os(REAL_DATA).is_none() {
        return Err(unavailable(NO_REAL_DATA, format!("name its folder in {REAL_DATA}")));
    }
    Ok(())
}

/// The environment variable that names the folder of real data.
const REAL_DATA: &str = "FARFIELD_DATA";

fn report_setback(name: &str, why: &str) {
    note(&format!("       {name:<13} left out: {why}"));
}

/// What a line says of an error. Lines are published, so folders of this machine do not get into them.
fn setback(error: &anyhow::Error, folders: &[&Path]) -> Status {
    let plain = |text: &str| {
        folders.iter().fold(text.to_string(), |text, folder| text.replace(&format!("{}/", folder.display()), ""))
    };
    let text = format!("{error:#}");
    match error.downcast_ref::<Unavailable>() {
        Some(Unavailable { why, remedy }) => Status::Unavailable { why: plain(why), remedy: remedy.clone() },
        None if text.contains(NO_REAL_DATA) => {
            let remedy = format!("put it, unpacked, into the folder that {REAL_DATA} names");
            Status::Unavailable { why: plain(&text), remedy }
        }
        None => Status::Failed { why: plain(&text) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unavailable_contender_is_told_from_a_failed_one() {
        let missing = unavailable("no zram", "modprobe zram").context("while setting up");
        assert_eq!(
            setback(&missing, &[]),
            Status::Unavailable { why: "no zram".into(), remedy: "modprobe zram".into() }
        );
        let wrong = anyhow::anyhow!("7 reads brought wrong data").context("under farfield run");
        assert!(matches!(setback(&wrong, &[]), Status::Failed { why } if why.contains("7 reads")));
        let absent = anyhow::anyhow!("ended with code 3: farfield-work: no real data: graphs/a.txt").context("native");
        assert!(matches!(setback(&absent, &[]), Status::Unavailable { why, .. } if why.ends_with("graphs/a.txt")));
        let missing_symbol = anyhow::anyhow!("/home/me/build/random: symbol lookup error: /home/me/lib.so");
        let folders = [Path::new("/home/me/build"), Path::new("/home/me")];
        let expected = Status::Failed { why: "random: symbol lookup error: lib.so".into() };
        assert_eq!(setback(&missing_symbol, &folders), expected);
    }

    #[test]
    fn native_runs_are_sampled_and_scratch_is_removed() {
        let text = r#"
            name = "test/native"
            about = "a"
            physics = "b"
            baseline = "native"
            contenders = ["native", "farfield"]
            limits = ["page_copy"]
            runs = 2
            [parameters]
            workload = "random"
            data_mib = 32
            near_percent = 50
            ops = 1000
        "#;
        let parent = std::env::temp_dir().join(format!("farfield-bench-driver-{}", std::process::id()));
        let settings = Settings {
            quick: false,
            runs: None,
            seed: None,
            only: vec![],
            farfield: None,
            root: parent.clone(),
            scratch: parent.clone(),
            ledger: parent.clone(),
            keeper: None,
        };
        let line = run(&Experiment::parse(text).unwrap(), &settings).unwrap();
        let contenders = &line.points[0].contenders;
        assert_eq!(contenders[0].samples.len(), 2);
        assert_eq!(contenders[0].samples[0].checksum, contenders[0].samples[1].checksum);
        assert!(matches!(contenders[1].status, Status::Unavailable { .. }));
        assert!(line.limits["page_copy"] > 0.0);
        assert_eq!(line.baseline, "ok");
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 0, "scratch is left behind");
        fs::remove_dir_all(&parent).unwrap();
    }

    #[test]
    fn folders_of_killed_runs_are_removed_by_the_next() {
        let parent = std::env::temp_dir().join(format!("farfield-bench-stale-{}", std::process::id()));
        let mut ended = Command::new("true").spawn().unwrap();
        let pid = ended.id();
        ended.wait().unwrap();
        let folder = |name: String| {
            fs::create_dir_all(parent.join(&name).join("files-0")).unwrap();
            parent.join(name)
        };
        let (stale, running, other) =
            (folder(format!("{SCRATCH}{pid}")), folder(format!("{SCRATCH}1")), folder("other".into()));
        let own = Scratch::new(&parent).unwrap();
        assert!(!stale.exists() && running.exists() && other.exists() && own.0.exists());
        drop(own);
        fs::remove_dir_all(&parent).unwrap();
    }
}
