//! Runs of the published simulator, to compare with: rows of `clustersim_reference_large.csv` and
//! `clustersim_reference_small.csv`.

use super::published::{self, Profiles};
use super::{Policy, Rules, Scenario};
use farfield_core::policy::cluster::SplitRule;
use std::collections::BTreeMap;

/// A run of the published simulator.
#[derive(Clone, Debug)]
pub struct ReferenceRun {
    /// Name of the configuration.
    pub configuration: String,
    /// Scenario with the published rules.
    pub scenario: Scenario,
    /// Policy.
    pub policy: Policy,
    /// Seed, which names another sequence there than here.
    pub seed: u64,
    /// Makespan in seconds.
    pub makespan_s: f64,
}

/// A row that is not one of the published simulator's runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the reference: {message}")]
pub struct ReferenceError {
    /// Number of the line, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// Reads runs in the rack.
pub fn large_runs(text: &str) -> Result<Vec<ReferenceRun>, ReferenceError> {
    rows(text, |row| {
        let rack = published::rack(Rules::published(), Profiles::Polynomials);
        let jobs = row.number("jobs_per_server")? * 40;
        let ratio = row.numbers("mix_quicksort:kmeans:memaslap:linpack:spark:tf-inception")?;
        if ratio.len() != published::CLASSES {
            return Err(format!("a mix has {} classes, not {}", published::CLASSES, ratio.len()));
        }
        let counts = published::counts(jobs as usize, &ratio);
        row.run(Scenario { counts, ..rack }, 3)
    })
}

/// Reads runs on the testbed.
pub fn small_runs(text: &str) -> Result<Vec<ReferenceRun>, ReferenceError> {
    rows(text, |row| {
        let mut testbed = published::testbed(Rules::published(), Profiles::Polynomials);
        let names: Vec<&str> = row.text("workloads")?.split(':').collect();
        let leasts = row.numbers("min_ratios_pct")?;
        let kinds = names.iter().zip(&leasts).map(|(name, &percent)| {
            let kind = testbed.kinds.iter().find(|kind| kind.name == *name);
            let mut kind = kind.cloned().ok_or_else(|| format!("no class is called {name}"))?;
            kind.least = f64::from(percent) / 100.0;
            Ok(kind)
        });
        testbed.kinds = kinds.collect::<Result<_, String>>()?;
        testbed.counts = published::counts(row.number("jobs")? as usize, &row.numbers("ratios")?);
        // The column says minutes; the simulator takes seconds.
        testbed.arrivals = super::Arrivals::Window(row.number("arrival_window_min")? as f64);
        row.run(testbed, 1)
    })
}

/// Cells of a row by the names of their columns.
struct Row<'a>(BTreeMap<&'a str, &'a str>);

impl Row<'_> {
    fn text(&self, name: &str) -> Result<&str, String> {
        self.0.get(name).copied().ok_or_else(|| format!("no column is called {name}"))
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let text = self.text(name)?;
        text.parse().map_err(|_| format!("{name} is not a number: {text:?}"))
    }

    fn numbers(&self, name: &str) -> Result<Vec<u32>, String> {
        let wrong = |_| format!("{name} is not numbers with colons between them");
        self.text(name)?.split(':').map(str::parse).collect::<Result<_, _>>().map_err(wrong)
    }

    /// Makes the run of this row; far memory has `reclaim` cores beside those of its column.
    fn run(&self, scenario: Scenario, reclaim: u32) -> Result<ReferenceRun, String> {
        let far_mib = self.number("far_mem_mb")?;
        let policy = match self.text("policy")? {
            "local-only" => Policy::NEAR,
            "proportional" => Policy::VARIABLE,
            "optimal" => Policy { split: Some(SplitRule::MemoryTime), ..Policy::MEMORY_TIME },
            other => return Err(format!("no policy is called {other}")),
        };
        let reclaim_cores = if policy.uses_far() { reclaim } else { 0 };
        let nodes = self.number("num_servers")? as u32;
        let mut scenario = Scenario { nodes, memory_servers: 0, far_bytes: far_mib << 20, ..scenario };
        scenario.shape.cores = self.number("cpus_per_server")? as u32 + reclaim_cores;
        scenario.shape.reclaim_cores = reclaim_cores;
        scenario.shape.memory_bytes = self.number("mem_mb_per_server")? << 20;
        let (configuration, seed) = (self.text("config")?.to_owned(), self.number("seed")?);
        let makespan_s = self.number("makespan_ms")? as f64 / 1000.0;
        Ok(ReferenceRun { configuration, scenario, policy, seed, makespan_s })
    }
}

fn rows<T>(text: &str, read: impl Fn(&Row<'_>) -> Result<T, String>) -> Result<Vec<T>, ReferenceError> {
    let mut lines = text.lines().enumerate();
    let header = lines.next().map_or(Vec::new(), |(_, line)| cells(line));
    let mut runs = Vec::new();
    for (index, line) in lines {
        let wrong = |message| ReferenceError { line: index + 1, message };
        let cells = cells(line);
        if cells.len() != header.len() {
            return Err(wrong(format!("{} cells instead of {}", cells.len(), header.len())));
        }
        runs.push(read(&Row(header.iter().copied().zip(cells).collect())).map_err(wrong)?);
    }
    Ok(runs)
}

/// Splits a line at commas outside quotation marks.
fn cells(line: &str) -> Vec<&str> {
    let mut quoted = false;
    let split = line.split(|letter| {
        quoted ^= letter == '"';
        letter == ',' && !quoted
    });
    split.map(|cell| cell.trim_matches('"')).collect()
}

#[cfg(test)]
mod tests {
    //! Guards against a comparison with another run than the one that a row describes.
    use super::*;

    const LARGE: &str = "\
mix_quicksort:kmeans:memaslap:linpack:spark:tf-inception,m2c,jobs_per_server,seed,config,num_servers,\
cpus_per_server,mem_mb_per_server,far_mem_mb,policy,makespan_ms
13:1:2:63:5:16,0.75,363,11,far+192G,39,45,196608,196608,optimal,6790123
";

    #[test]
    fn a_row_is_a_scenario() {
        let run = &large_runs(LARGE).unwrap()[0];
        assert_eq!((run.configuration.as_str(), run.seed, run.makespan_s), ("far+192G", 11, 6790.123));
        let shape = run.scenario.shape;
        assert_eq!((run.scenario.nodes, shape.cores, shape.reclaim_cores), (39, 48, 3));
        assert_eq!(run.scenario.counts, [1887, 145, 290, 9147, 726, 2323]);
        assert_eq!(run.policy, Policy::MEMORY_TIME);
    }

    #[test]
    fn wrong_rows_are_named() {
        let check = |from: &str, to: &str, complaint: &str| {
            let error = large_runs(&LARGE.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains(complaint), "{error}");
        };
        check("optimal", "best", "best");
        check(",6790123", "", "10 cells instead of 11");
        check("6790123", "NaN", "makespan_ms");
        check("13:1:2:63:5:16", "13:1", "6 classes");
    }

    #[test]
    fn commas_in_quotation_marks_are_text() {
        assert_eq!(cells("a,\"b, c\",d"), ["a", "b, c", "d"]);
    }
}
