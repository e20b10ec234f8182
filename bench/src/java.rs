//! The workload's program in Java, under a collector of the JVM and Linux swap or `farfield run`.
//! A far collected heap is compared with it.
//!
//! Near memory is the limit of the point and, on top, what the JVM takes beside its heap. The limit of the heap is a
//! multiple of what lives, as in a far heap. Both are measured once in a run of the driver, with everything near.

use crate::child::{self, Late};
use crate::contender::{Store, swapped};
use crate::job::{Job, job_with};
use crate::line::Sample;
use crate::swap::unavailable;
use crate::workload::Output;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A garbage collector of HotSpot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Collector {
    G1,
    Zgc,
    Shenandoah,
}

/// Way in which the JVM's memory is served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Paging {
    /// Linux swap to compressed RAM, under a cgroup limit.
    Swap,
    /// `farfield run`.
    Farfield,
}

/// Workloads that have a program in Java, with its main class.
const CLASSES: &[(&str, &str)] = &[("build", "BuildEngine"), ("gc-cache", "GcCache"), ("graph-store", "GraphStore")];

/// All sources in Java.
const SOURCES: &[(&str, &str)] = &[
    ("BuildEngine.java", include_str!("../java/BuildEngine.java")),
    ("GcCache.java", include_str!("../java/GcCache.java")),
    ("GraphStore.java", include_str!("../java/GraphStore.java")),
    ("Harness.java", include_str!("../java/Harness.java")),
];

/// The limit of a JVM's heap, in percent of what lives, as a collected far heap has it.
const LIMIT_PERCENT: u64 = 160;
const LIMIT_BYTES_MIN: u64 = 8 << 20;
/// The version of Java that the programs are written in.
const RELEASE: &[&str] = &["--release", "17"];
/// No file in a shared folder, and an end when the heap is full.
const OPTIONS: &[&str] = &["-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError"];

impl Collector {
    fn name(self) -> &'static str {
        match self {
            Collector::G1 => "G1",
            Collector::Zgc => "ZGC",
            Collector::Shenandoah => "Shenandoah",
        }
    }

    /// Returns the option of the JVM that chooses this collector.
    fn option(self) -> &'static str {
        match self {
            Collector::G1 => "-XX:+UseG1GC",
            Collector::Zgc => "-XX:+UseZGC",
            Collector::Shenandoah => "-XX:+UseShenandoahGC",
        }
    }

    /// Returns the options of a collector that leaves no garbage, under which objects have the same layout.
    fn exact_options(self) -> &'static [&'static str] {
        match self {
            // Its references have colours, and eight bytes.
            Collector::Zgc => &["-XX:+UseSerialGC", "-XX:MarkSweepDeadRatio=0", "-XX:-UseCompressedOops"],
            Collector::G1 | Collector::Shenandoah => &["-XX:+UseSerialGC", "-XX:MarkSweepDeadRatio=0"],
        }
    }
}

/// Memory that a program takes under a collector, with everything near.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Footprint {
    /// Size of all objects that live at the end.
    live_bytes: u64,
    /// Anonymous memory beside the heap at the end.
    own_bytes: u64,
}

impl Footprint {
    fn heap_limit(live_bytes: u64) -> u64 {
        (live_bytes * LIMIT_PERCENT / 100).max(LIMIT_BYTES_MIN)
    }
}

/// Runs the Java program of the workload once.
pub(crate) fn sample(collector: Collector, paging: Paging, job: &Job<'_>) -> Result<Sample> {
    let workload = job.workload.name;
    let class = CLASSES.iter().find(|(name, _)| *name == workload).map(|(_, class)| *class);
    let class = class.with_context(|| format!("the workload {workload} has no program in Java"))?;
    let has = |name: &str| job.arguments.iter().any(|word| word == name);
    // Edges of a real graph are in a file that the Rust program has made.
    if job.arguments.windows(2).any(|pair| pair == ["--real", "1"]) && !has("--links") {
        return Err(unavailable("this program in Java knows made-up data only", "leave real = 1 out"));
    }
    if (collector, paging) == (Collector::Zgc, Paging::Farfield) {
        let why = "ZGC keeps its heap in shared memory, which farfield run leaves near";
        return Err(unavailable(why, "take another collector"));
    }
    let program = JavaProgram::compiled(class, job)?;
    let result = program.footprint(collector).and_then(|footprint| program.sample(collector, paging, footprint));
    result.map_err(|error| lost(error, collector))
}

/// Calls a collector unavailable that found no room or ran until the deadline: it has lost, and the run goes on.
fn lost(error: anyhow::Error, collector: Collector) -> anyhow::Error {
    let name = collector.name();
    if error.is::<Late>() {
        return unavailable(format!("under {name} the program {error}"), "raise near_percent or deadline_seconds");
    }
    if format!("{error:#}").contains("OutOfMemoryError") {
        let why = format!("{name} found no room within {LIMIT_PERCENT} % of what lives");
        return unavailable(why, "take another collector");
    }
    error
}

/// A compiled program, to be run by a JVM.
struct JavaProgram<'a> {
    class: &'static str,
    /// Folder of classes, and of what was measured.
    folder: PathBuf,
    job: &'a Job<'a>,
}

impl<'a> JavaProgram<'a> {
    /// Compiles all programs, unless an earlier sample has.
    fn compiled(class: &'static str, job: &'a Job<'a>) -> Result<JavaProgram<'a>> {
        let folder = job.scratch.join("java");
        if !folder.exists() {
            let sources = job.scratch.join("java-sources");
            compile(&tool("javac"), &sources, &folder, job)?;
        }
        Ok(JavaProgram { class, folder, job })
    }

    /// Returns the arguments of the JVM: options, class and arguments of the program. The first argument of the
    /// workload is its name, which the class stands for.
    fn words(&self, options: &[String]) -> Vec<String> {
        let classes = self.folder.to_string_lossy().into_owned();
        let fixed = OPTIONS.iter().map(|option| (*option).to_owned());
        let class = ["-cp".to_owned(), classes, self.class.to_owned()];
        options.iter().cloned().chain(fixed).chain(class).chain(self.job.arguments[1..].iter().cloned()).collect()
    }

    /// Measures what the program takes, unless an earlier sample has.
    fn footprint(&self, collector: Collector) -> Result<Footprint> {
        let name = format!("{}{}", collector.name(), self.job.arguments.concat()).replace('/', "-");
        let known = self.folder.join(format!("{name}.json"));
        if let Ok(text) = fs::read_to_string(&known) {
            return serde_json::from_str(&text).context("what was measured of a JVM cannot be read");
        }
        self.ensure_known(collector)?;
        let text = |options: &[&str]| options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>();
        // In Rust the data is as large as the point says; in Java it is not eight times as large.
        let ample = 8 * self.job.data_bytes + (256 << 20);
        let exact = [text(collector.exact_options()), vec![size("-Xmx", ample)]].concat();
        let live_bytes = self.measured(&exact, "live_bytes")?;
        let limit = Footprint::heap_limit(live_bytes);
        let touched = text(&[collector.option(), "-XX:+AlwaysPreTouch"]);
        let touched = [touched, vec![size("-Xms", limit), size("-Xmx", limit)]].concat();
        let footprint = Footprint { live_bytes, own_bytes: self.measured(&touched, "own_bytes")? };
        fs::write(&known, serde_json::to_string(&footprint)?)?;
        Ok(footprint)
    }

    /// Not every JVM has every collector.
    fn ensure_known(&self, collector: Collector) -> Result<()> {
        let mut command = Command::new(tool("java"));
        command.args([collector.option(), "-version"]);
        let finished = child::run(command, self.job.scratch, self.job.patience)?;
        ensure!(
            finished.ended.code == 0,
            unavailable(
                format!("this JVM has no {}", collector.name()),
                "install OpenJDK 17 as distributions build it, or name another JDK in JAVA_HOME"
            )
        );
        Ok(())
    }

    /// Runs the program with everything near, and returns that figure of it.
    fn measured(&self, options: &[String], figure: &str) -> Result<u64> {
        let mut command = Command::new(tool("java"));
        command.args(self.words(options)).args(["--measure", "1"]);
        let finished = child::run(command, self.job.scratch, self.job.patience)?;
        let output = Output::parse(finished.success().context("with everything near")?)?;
        let value = output.figures.get(figure).with_context(|| format!("the Java program does not tell {figure}"))?;
        ensure!(*value > 0.0, "{figure} is {value}");
        Ok(*value as u64)
    }

    fn sample(&self, collector: Collector, paging: Paging, footprint: Footprint) -> Result<Sample> {
        let limit = Footprint::heap_limit(footprint.live_bytes);
        let words = self.words(&[collector.option().to_owned(), size("-Xmx", limit)]);
        let near_bytes = self.job.near_bytes + footprint.own_bytes;
        let job = Job { program: &tool("java"), arguments: &words, ..*self.job };
        let mut sample = match paging {
            Paging::Farfield => job_with(&[], &Job { near_bytes, ..job })?,
            Paging::Swap => swapped(Store::Zram, near_bytes, limit + footprint.own_bytes, &job)?,
        };
        for (name, bytes) in
            [("own_bytes", footprint.own_bytes), ("live_bytes", footprint.live_bytes), ("heap_limit_bytes", limit)]
        {
            sample.figures.insert(name.into(), bytes as f64);
        }
        Ok(sample)
    }
}

/// Compiles all sources. The folder of classes is there only if that succeeded.
fn compile(javac: &Path, sources: &Path, classes: &Path, job: &Job<'_>) -> Result<()> {
    ensure_javac(javac, job)?;
    let unfinished = sources.join("classes");
    fs::create_dir_all(&unfinished).with_context(|| format!("cannot make {}", unfinished.display()))?;
    let mut command = Command::new(javac);
    command.args(RELEASE).arg("-d").arg(&unfinished);
    for (name, text) in SOURCES {
        let source = sources.join(name);
        fs::write(&source, text)?;
        command.arg(source);
    }
    let finished = child::run(command, job.scratch, job.patience)?;
    finished.success().context("javac refuses the programs in Java")?;
    fs::rename(&unfinished, classes)?;
    Ok(())
}

/// Not every machine has a compiler of Java, and not every one of them knows this version.
fn ensure_javac(javac: &Path, job: &Job<'_>) -> Result<()> {
    let missing = |why: String| unavailable(why, "install OpenJDK 17 or newer (a JDK), or name one in JAVA_HOME");
    let mut command = Command::new(javac);
    command.args(RELEASE).arg("-version");
    let finished = child::run(command, job.scratch, job.patience).map_err(|error| {
        let is_missing = error.downcast_ref().is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::NotFound);
        if is_missing { missing(format!("there is no {}", javac.display())) } else { error }
    })?;
    finished.success().map_err(|error| missing(format!("{} cannot compile Java 17: {error:#}", javac.display())))?;
    Ok(())
}

/// Returns a program of the JDK that JAVA_HOME names, or of the one on the path.
fn tool(name: &str) -> PathBuf {
    match std::env::var_os("JAVA_HOME") {
        Some(home) => Path::new(&home).join("bin").join(name),
        None => PathBuf::from(name),
    }
}

/// Returns an option with a size in KiB.
fn size(option: &str, bytes: u64) -> String {
    format!("{option}{}k", bytes.div_ceil(1024))
}

#[cfg(test)]
mod tests {
    //! Dangers: a comparison that fails where there is no JDK, and a JVM with more or less memory than is said.
    use super::*;
    use crate::swap::Unavailable;
    use crate::workload::Workload;
    use std::time::Duration;

    fn why(error: &anyhow::Error) -> &str {
        let Some(Unavailable { why, .. }) = error.downcast_ref() else { panic!("{error:#}") };
        why
    }

    fn with_job<R>(name: &str, workload: &str, arguments: &[&str], run: impl FnOnce(&Job<'_>) -> R) -> R {
        let scratch = std::env::temp_dir().join(format!("farfield-bench-java-{name}-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let job = Job {
            workload: Workload::named(workload).unwrap(),
            program: &scratch,
            arguments: &arguments,
            near_bytes: 16 << 20,
            data_bytes: 4 << 20,
            slo: None,
            link_bytes_per_s: None,
            overuse: None,
            patience: Duration::from_secs(120),
            scratch: &scratch,
            farfield: None,
            ledger: &scratch,
        };
        let result = run(&job);
        fs::remove_dir_all(&scratch).unwrap();
        result
    }

    #[test]
    fn a_missing_or_old_compiler_is_reported_with_advice() {
        with_job("missing", "build", &["build"], |job| {
            for javac in ["/nothing/javac", "/bin/false"] {
                let error = compile(Path::new(javac), &job.scratch.join("s"), &job.scratch.join("c"), job).unwrap_err();
                assert!(why(&error).contains(javac), "{error:#}");
            }
        });
    }

    #[test]
    fn what_java_cannot_do_is_said_before_anything_runs() {
        let run = |name, workload, arguments: &[&str], collector, paging| {
            with_job(name, workload, arguments, |job| sample(collector, paging, job)).unwrap_err()
        };
        let real = run("real", "gc-cache", &["gc-cache", "--real", "1"], Collector::G1, Paging::Swap);
        assert!(why(&real).contains("made-up data"), "{real:#}");
        let shared = run("shared", "gc-cache", &["gc-cache"], Collector::Zgc, Paging::Farfield);
        assert!(why(&shared).contains("shared memory"), "{shared:#}");
        let other = run("other", "hash", &["hash"], Collector::G1, Paging::Swap);
        assert!(other.to_string().contains("no program in Java"), "{other:#}");
    }

    #[test]
    fn what_a_jvm_takes_is_measured_once_for_each_collector() {
        let arguments = ["gc-cache", "--seed", "7", "--data-mib", "4", "--ops", "2000", "--zipf-percent", "99"];
        with_job("footprint", "gc-cache", &arguments, |job| {
            let program = match JavaProgram::compiled("GcCache", job) {
                Ok(program) => program,
                Err(error) => return eprintln!("skipped: {}", why(&error)),
            };
            for collector in [Collector::G1, Collector::Zgc, Collector::Shenandoah] {
                let first = match program.footprint(collector) {
                    Ok(first) => first,
                    Err(error) => {
                        eprintln!("skipped: {}", why(&error));
                        continue;
                    }
                };
                // 5178 values of 544 bytes, and the JVM's own objects.
                assert!((3 << 20..16 << 20).contains(&first.live_bytes), "{collector:?}: {first:?}");
                assert!((10 << 20..400 << 20).contains(&first.own_bytes), "{collector:?}: {first:?}");
                let again = program.footprint(collector).unwrap();
                let both = |footprint: Footprint| (footprint.live_bytes, footprint.own_bytes);
                assert_eq!(both(first), both(again));
            }
        });
    }

    #[test]
    fn a_heap_that_is_full_is_a_loss() {
        let error = lost(anyhow::anyhow!("ended with code 3: java.lang.OutOfMemoryError"), Collector::G1);
        assert!(why(&error).contains("160 %"), "{error:#}");
        let error = lost(anyhow::anyhow!("7 reads brought wrong data"), Collector::G1);
        assert!(!error.is::<Unavailable>(), "{error:#}");
    }
}
