//! The workload programs. Those for paging are plain C, compiled with the system's compiler, or scripts around programs that
//! people run, and know nothing of Farfield; those for the far heap are in Rust, in the program `farfield-work` (`bench/work`)
//! beside this one.

use crate::swap::unavailable;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One program and the phase of it that is measured.
pub struct Workload {
    /// Name of the program.
    pub name: &'static str,
    program: Program,
    /// The phase whose time is the result.
    pub phase: &'static str,
    /// What one operation of that phase is.
    pub unit: &'static str,
}

/// Where a program comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Program {
    /// This source in C.
    C(&'static str),
    /// This script, read by an interpreter.
    Script(&'static Script),
    /// `farfield-work`, which knows it by its name.
    Rust,
}

/// A source that an interpreter reads.
#[derive(PartialEq, Eq)]
struct Script {
    /// Name of the file.
    file: &'static str,
    text: &'static str,
    interpreter: &'static str,
    /// The environment variable that names another interpreter.
    variable: &'static str,
}

const PEOPLE_PY: Script = Script {
    file: "people.py",
    text: include_str!("../workloads/people.py"),
    interpreter: "python3",
    variable: "FARFIELD_PYTHON",
};
const PEOPLE_JS: Script = Script {
    file: "people.js",
    text: include_str!("../workloads/people.js"),
    interpreter: "node",
    variable: "FARFIELD_NODE",
};

const SPILL_PY: Script = Script {
    file: "spill.py",
    text: include_str!("../workloads/spill.py"),
    interpreter: "python3",
    variable: "FARFIELD_PYTHON",
};

macro_rules! c {
    ($name:literal, $phase:literal, $unit:literal) => {
        Workload {
            name: $name,
            program: Program::C(include_str!(concat!("../workloads/", $name, ".c"))),
            phase: $phase,
            unit: $unit,
        }
    };
}

const fn rust(name: &'static str, phase: &'static str, unit: &'static str) -> Workload {
    Workload { name, program: Program::Rust, phase, unit }
}

const fn people(name: &'static str, script: &'static Script, unit: &'static str) -> Workload {
    Workload { name, program: Program::Script(script), phase: "use", unit }
}

const WORKLOADS: &[Workload] = &[
    c!("random", "access", "access"),
    c!("scan", "scan", "page"),
    c!("stream", "triad", "page"),
    c!("quicksort", "sort", "record"),
    c!("kmeans", "cluster", "point"),
    c!("linpack", "solve", "kflop"),
    c!("zipf", "look-up", "look-up"),
    c!("bfs", "search", "edge"),
    c!("stages", "use", "access"),
    c!("wordcount", "count", "word"),
    c!("calls", "read", "call"),
    c!("probe", "signal_fault", "page"),
    c!("ticks", "tick", "page"),
    people("numpy", &PEOPLE_PY, "product"),
    people("pandas", &PEOPLE_PY, "row"),
    people("python", &PEOPLE_PY, "look-up"),
    people("sqlite", &PEOPLE_PY, "query"),
    people("redis", &PEOPLE_PY, "get"),
    people("sort", &PEOPLE_PY, "line"),
    people("node", &PEOPLE_JS, "look-up"),
    people("numpy-sort", &PEOPLE_PY, "number"),
    people("scikit-clusters", &PEOPLE_PY, "point"),
    people("scikit-boosting", &PEOPLE_PY, "row"),
    people("polars", &PEOPLE_PY, "row"),
    people("spill-look-ups", &SPILL_PY, "look-up"),
    people("spill-join", &SPILL_PY, "row"),
    people("spill-groups", &SPILL_PY, "row"),
    rust("deref", "access", "dereference"),
    rust("compute", "scan", "object"),
    rust("words", "scan", "word"),
    rust("hash", "get", "get"),
    rust("web", "request", "request"),
    rust("remote", "get", "get"),
    rust("list", "walk", "walk"),
    rust("shift", "shift", "walk"),
    rust("walk", "walk", "walk"),
    rust("plain", "walk", "walk"),
    rust("log", "ask", "operation"),
    rust("cuckoo", "ask", "operation"),
    rust("pages", "move", "operation"),
    rust("tasks", "read", "object"),
    rust("pack", "pack", "block"),
    rust("unpack", "pack", "block"),
    rust("frame", "ask", "row"),
    rust("churn", "round", "round"),
    rust("crowd", "round", "round"),
    rust("cache", "request", "request"),
    rust("cache-uniform", "request", "request"),
    rust("pagerank", "evolve", "edge"),
    rust("triangles", "evolve", "edge"),
    rust("count-words", "count", "word"),
    rust("count-views", "count", "view"),
    rust("count-views-uniform", "count", "view"),
    rust("shuffle", "move", "element"),
    rust("trips", "ask", "row"),
    rust("sql", "ask", "row"),
    rust("questions", "ask", "row"),
    rust("switch", "during", "access"),
    rust("follow", "follow", "reference"),
    rust("trees", "trees", "tree"),
    rust("gcbench", "trees", "node"),
    rust("marking", "collect", "collection"),
    rust("beside", "operate", "operation"),
    rust("replace", "replace", "object"),
    rust("moves", "collect", "collection"),
    rust("graph-store", "all", "edge"),
    rust("build", "edits", "edit"),
    rust("gc-cache", "request", "request"),
    rust("trie-map", "use", "operation"),
    rust("ordered-map", "use", "operation"),
    rust("map-scan", "use", "operation"),
    rust("append-log", "use", "operation"),
    rust("table", "use", "operation"),
    rust("closure", "join", "list"),
    rust("clusters", "assign", "point"),
    rust("share-deref", "access", "dereference"),
    rust("share-read", "get", "get"),
    rust("share-lock", "lock", "holding"),
    rust("share-steal", "given", "task"),
    rust("share-recover", "hand over", "object"),
    rust("share-affinity", "visit", "link"),
    rust("share-counts", "count", "operation"),
    rust("share-gemm", "multiply", "multiplication"),
    rust("share-frame", "ask", "row"),
    rust("share-taxi", "ask", "row"),
    rust("share-kv", "serve", "operation"),
    rust("share-social", "serve", "request"),
    rust("schedule", "schedule", "job"),
    rust("schedule-speed", "simulate", "run"),
    rust("schedule-reference", "compare", "run"),
    rust("schedule-traces", "replay", "job"),
    rust("decide", "decide", "job"),
    rust("paced", "serve", "request"),
    rust("replacement", "replay", "access"),
];
/// What sources in C include.
const HEADERS: &[(&str, &str)] =
    &[("common.h", include_str!("../workloads/common.h")), ("zipf.h", include_str!("../workloads/zipf.h"))];

/// What scripts in Python import.
const MODULE: (&str, &str) = ("phases.py", include_str!("../workloads/phases.py"));

/// Words by which a program says that a file of real data is missing.
pub const NO_REAL_DATA: &str = "no real data";

/// What a program prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Timed sections, in order.
    pub phases: Vec<Phase>,
    /// Equal for equal parameters and seed, whoever serves the memory.
    pub checksum: String,
    /// Did all data read back as written?
    pub verified: bool,
    /// How many reads did not.
    pub errors: u64,
    /// What else it counted.
    #[serde(default)]
    pub figures: BTreeMap<String, f64>,
}

/// A timed section of a program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Phase {
    /// Name.
    pub name: String,
    /// Operations in it.
    pub ops: u64,
    /// How long it took.
    pub seconds: f64,
    /// CPU time of all threads of the program in it.
    #[serde(default)]
    pub cpu_seconds: f64,
    /// Major faults that the kernel counted.
    pub faults_major: u64,
    /// Minor faults that the kernel counted.
    pub faults_minor: u64,
}

impl Phase {
    /// Nanoseconds per operation.
    pub fn ns_per_op(&self) -> f64 {
        self.seconds * 1e9 / self.ops.max(1) as f64
    }
}

impl Output {
    /// Reads the line that a program printed.
    pub fn parse(text: &str) -> Result<Output> {
        let output: Output =
            serde_json::from_str(text.trim()).with_context(|| format!("not a result line: {text:?}"))?;
        ensure!(output.phases.iter().all(|p| p.seconds.is_finite() && p.seconds >= 0.0), "a phase has no time");
        Ok(output)
    }

    /// The phase called `name`.
    pub fn phase(&self, name: &str) -> Result<&Phase> {
        self.phases.iter().find(|p| p.name == name).with_context(|| format!("the program reports no phase {name}"))
    }
}

impl Workload {
    /// The program called `name`.
    pub fn named(name: &str) -> Result<&'static Workload> {
        let known = || WORKLOADS.iter().map(|w| w.name).collect::<Vec<_>>().join(", ");
        WORKLOADS
            .iter()
            .find(|w| w.name == name)
            .with_context(|| format!("no workload is called {name}; known are {}", known()))
    }

    /// Can it keep its data in a far heap?
    pub fn knows_heaps(&self) -> bool {
        self.program == Program::Rust
    }

    /// Makes the program, in `folder` if it must be compiled; says where it is, and the words that it begins with.
    pub fn make(&self, folder: &Path) -> Result<(PathBuf, Vec<String>)> {
        match self.program {
            Program::C(source) => Ok((self.compile(source, folder)?, Vec::new())),
            Program::Script(script) => {
                fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
                let file = folder.join(script.file);
                fs::write(&file, script.text)?;
                fs::write(folder.join(MODULE.0), MODULE.1)?;
                let words = vec![file.to_string_lossy().into_owned(), self.name.to_owned()];
                Ok((script.interpreter(), words))
            }
            Program::Rust => {
                let this = std::env::current_exe().context("cannot find this program")?;
                let program = this.with_file_name("farfield-work");
                ensure!(
                    program.is_file(),
                    "there is no farfield-work beside this program; build it: cargo build --release -p farfield-bench"
                );
                Ok((program, vec![self.name.to_owned()]))
            }
        }
    }

    /// Checks that this machine has what a script around other programs needs. `words` are those
    /// of [`Workload::make`], and any others.
    pub(crate) fn ensure_installed(&self, program: &Path, words: &[String]) -> Result<()> {
        let Program::Script(script) = self.program else { return Ok(()) };
        let remedy = || format!("install it, or name another {} in {}", script.interpreter, script.variable);
        let output = Command::new(program).args(words).arg("--check").output();
        let output = output.map_err(|error| unavailable(format!("no {}: {error}", program.display()), remedy()))?;
        if !output.status.success() {
            let missing = String::from_utf8_lossy(&output.stderr);
            return Err(unavailable(format!("{} misses {}", self.name, missing.trim()), remedy()));
        }
        Ok(())
    }

    fn compile(&self, text: &str, folder: &Path) -> Result<PathBuf> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for (name, text) in HEADERS {
            fs::write(folder.join(name), text)?;
        }
        let source = folder.join(format!("{}.c", self.name));
        fs::write(&source, text)?;
        let program = folder.join(self.name);
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let output = Command::new(&compiler)
            .args(["-O2", "-pthread", "-o"])
            .arg(&program)
            .arg(&source)
            .output()
            .with_context(|| format!("cannot run {compiler}; install a C compiler or set CC"))?;
        if !output.status.success() {
            bail!("{compiler} refuses {}.c:\n{}", self.name, String::from_utf8_lossy(&output.stderr));
        }
        Ok(program)
    }
}

impl Script {
    fn interpreter(&self) -> PathBuf {
        std::env::var_os(self.variable).unwrap_or_else(|| self.interpreter.into()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_line_is_read() {
        let line = r#"{"workload":"scan","data_bytes":4096,"phases":[{"name":"scan","ops":4,"seconds":0.000002,
            "faults_major":3,"faults_minor":1}],"checksum":"0a","errors":0,"verified":true}"#;
        let output = Output::parse(line).unwrap();
        assert_eq!(output.phase("scan").unwrap().ns_per_op(), 500.0);
        assert!(output.phase("sort").is_err());
    }

    #[test]
    fn half_a_line_is_an_error() {
        assert!(Output::parse("{\"workload\":\"scan\"").is_err());
        assert!(Output::parse("").is_err());
    }

    #[test]
    fn programs_find_what_they_wrote_and_the_same_each_time() {
        let folder = std::env::temp_dir().join(format!("farfield-bench-workload-{}", std::process::id()));
        for workload in WORKLOADS.iter().filter(|workload| !workload.knows_heaps()) {
            let (program, words) = workload.make(&folder).unwrap();
            if let Err(error) = workload.ensure_installed(&program, &words) {
                println!("not tried: {error:#}");
                continue;
            }
            // An operation of a program around others may be all of its work.
            const WHOLE: [&str; 7] =
                ["numpy", "pandas", "sort", "numpy-sort", "scikit-clusters", "scikit-boosting", "polars"];
            let is_whole = WHOLE.contains(&workload.name) || workload.name.starts_with("spill-");
            let ops = if is_whole { "2" } else { "1000" };
            let arguments = ["--data-mib", "16", "--passes", "2", "--seed", "7", "--ops", ops];
            let run = || Command::new(&program).args(&words).args(arguments).current_dir(&folder).output().unwrap();
            let parse = |output: std::process::Output| Output::parse(&String::from_utf8(output.stdout).unwrap());
            let (first, second) = (parse(run()).unwrap(), parse(run()).unwrap());
            assert!(first.verified && first.checksum == second.checksum, "{}", workload.name);
            // Where there is no userfaultfd, the probe has no such phase.
            let phase = first.phase(workload.phase).map_or(0, |phase| phase.ops);
            assert!(phase > 0 || workload.name == "probe", "{}", workload.name);
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn unknown_workload_names_those_known() {
        let error = Workload::named("raytrace").err().unwrap();
        assert!(error.to_string().contains("quicksort"));
    }
}
