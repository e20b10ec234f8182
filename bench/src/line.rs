//! One run of one experiment is one JSON line; this is its schema.

use crate::bar::{Bar, BoundResult, FLOOR, MeanResult, QuorumResult, listed, sides};
use crate::experiment::Point;
use crate::machine::Machine;
use crate::stats::{Ratio, Summary, excess, ratio, summary};
use crate::workload::Phase;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Version of the schema.
pub const SCHEMA: u32 = 1;

/// One run of an experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment.
    pub experiment: String,
    /// When it began, UTC.
    pub time: String,
    /// The commit of the tree it ran in, or `unknown`.
    pub commit: String,
    /// Were there changes that are in no commit?
    pub dirty: bool,
    /// Where.
    pub machine: Machine,
    /// Seed of data and order.
    pub seed: u64,
    /// Samples asked for of each contender.
    pub runs: u32,
    /// Was it a smoke run?
    pub quick: bool,
    /// `ok`, or `unavailable` if the baseline could not run at some point.
    pub baseline: String,
    /// Why the baseline could not run, and what would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline_why: Option<String>,
    /// Swept parameters.
    pub axes: Vec<String>,
    /// Physical limits measured in this run, ns.
    pub limits: BTreeMap<String, f64>,
    /// Results by combination of parameters.
    pub points: Vec<PointResult>,
    /// Means over all points.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub means: Vec<MeanResult>,
    /// Figures that must not be exceeded at most points.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quorums: Vec<QuorumResult>,
}

/// Results at one combination of parameters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PointResult {
    /// The combination.
    pub parameters: Point,
    /// Bytes that each contender might keep near.
    pub near_bytes: u64,
    /// What one operation is.
    pub unit: String,
    /// What an operation costs at least, from the limits of this run, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor_ns: Option<f64>,
    /// By contender.
    pub contenders: Vec<ContenderResult>,
    /// Pairs of contenders compared.
    pub ratios: Vec<RatioResult>,
    /// Figures that must not be exceeded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bounds: Vec<BoundResult>,
}

/// A contender may exceed its limit by this factor for a moment.
pub const NEAR_TOLERANCE: f64 = 1.05;

/// One contender's samples.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContenderResult {
    /// Name.
    pub name: String,
    /// Could it run?
    pub status: Status,
    /// In the order taken.
    pub samples: Vec<Sample>,
    /// Of ns per operation.
    pub summary: Option<Summary>,
    /// Medians of the samples' other figures.
    pub figures: BTreeMap<String, f64>,
}

/// Could a contender run?
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Status {
    /// Yes.
    Ok,
    /// Not on this machine.
    Unavailable {
        /// What is missing.
        why: String,
        /// What to do about it.
        remedy: String,
    },
    /// It ran and went wrong.
    Failed {
        /// How.
        why: String,
    },
}

/// One execution of the program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Nanoseconds per operation of the measured phase.
    pub ns_per_op: f64,
    /// Operations in that phase.
    pub ops: u64,
    /// Equal for all contenders at one point.
    pub checksum: String,
    /// All phases of the program.
    pub phases: Vec<Phase>,
    /// Everything else that was counted.
    pub figures: BTreeMap<String, f64>,
}

/// Two contenders compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RatioResult {
    /// Whose time.
    pub of: String,
    /// Over whose time.
    pub to: String,
    /// The figure that is compared instead of the time of an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<String>,
    /// The contender that both are compared with first: the ratio is of what they take more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess_over: Option<String>,
    /// Below one: `of` is faster.
    #[serde(flatten)]
    pub ratio: Ratio,
    /// How many times its limit `of` kept near at worst, if that is more than [`NEAR_TOLERANCE`]: then the comparison is not
    /// between equals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_budget: Option<f64>,
    /// The bar that this pair is held to here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bar: Option<Bar>,
}

impl RatioResult {
    /// Does it hold its bar, within its budget? `None` without a bar.
    pub fn passes(&self) -> Option<bool> {
        self.bar.as_ref().map(|bar| self.ratio.ratio <= bar.at_most && self.over_budget.is_none())
    }

    /// What is compared.
    pub(crate) fn sides(&self) -> String {
        sides(&self.of, &self.to, self.figure.as_deref(), self.excess_over.as_deref())
    }

    /// What to say of the bar. `None` without a bar.
    pub fn verdict(&self) -> Option<String> {
        Some(match (self.passes()?, self.over_budget) {
            (true, _) => "held".into(),
            (false, None) => "missed".into(),
            (false, Some(times)) => format!("over budget ({times:.2} times the limit)"),
        })
    }
}

impl ContenderResult {
    /// Sums up what was sampled.
    pub fn new(name: &str, status: Status, samples: Vec<Sample>) -> ContenderResult {
        let times: Vec<f64> = samples.iter().map(|s| s.ns_per_op).collect();
        let mut by_name: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (key, value) in samples.iter().flat_map(|s| &s.figures) {
            by_name.entry(key.clone()).or_default().push(*value);
        }
        let figures = by_name.into_iter().filter_map(|(key, values)| Some((key, summary(&values)?.median))).collect();
        ContenderResult { name: name.into(), status, summary: summary(&times), samples, figures }
    }

    /// How many times its limit it kept near at worst, if that is more than [`NEAR_TOLERANCE`].
    pub(crate) fn over_budget(&self) -> Option<f64> {
        let peaks = self.samples.iter().filter_map(|s| s.figures.get("near_peak_over_limit").copied());
        Some(peaks.fold(0.0, f64::max)).filter(|worst| *worst > NEAR_TOLERANCE)
    }

    /// This figure of all samples, in the order taken, or nanoseconds per operation; `None` unless all have it.
    pub(crate) fn values(&self, figure: Option<&str>) -> Option<Vec<f64>> {
        let value = |sample: &Sample| match figure {
            Some(name) => sample.figures.get(name).copied(),
            None => Some(sample.ns_per_op),
        };
        self.samples.iter().map(value).collect()
    }
}

/// Returns the contender with the least median, of those in a list such as `A or B` that ran and have the figure.
pub(crate) fn fastest<'a>(
    contenders: &'a [ContenderResult],
    names: &str,
    figure: Option<&str>,
) -> Option<&'a ContenderResult> {
    let median = |contender: &ContenderResult| Some(summary(&contender.values(figure)?)?.median);
    let named = contenders.iter().filter(|c| c.status == Status::Ok && listed(names).any(|name| name == c.name));
    let measured = named.filter_map(|contender| Some((contender, median(contender)?)));
    Some(measured.min_by(|(_, one), (_, other)| one.total_cmp(other))?.0)
}

/// Compares every Farfield contender with every other kind, and whatever a bar speaks of. Bars are attached.
pub fn ratios(contenders: &[ContenderResult], bars: &[Bar], point: &Point, floor_ns: Option<f64>) -> Vec<RatioResult> {
    let ours = |name: &str| name.starts_with("farfield") || name.starts_with("heap");
    let ran = || contenders.iter().filter(|contender| contender.status == Status::Ok);
    let mut ratios = Vec::new();
    for of in ran() {
        for to in ran() {
            let (own, of_time): (Vec<&Bar>, Vec<&Bar>) = bars
                .iter()
                .filter(|bar| bar.covers(&of.name, &to.name, point))
                .partition(|bar| bar.figure.is_some() || bar.excess_over.is_some());
            if let Some(bar) = of_time.first() {
                ratios.extend(RatioResult::of_bar(bar, of, contenders, floor_ns));
            } else if ours(&of.name) && !ours(&to.name) {
                ratios.extend(RatioResult::of_times(of, to));
            }
            ratios.extend(own.iter().filter_map(|bar| RatioResult::of_bar(bar, of, contenders, floor_ns)));
        }
        let is_over_no_contender = |bar: &&Bar| bar.opponents().count() > 1 || bar.to == FLOOR;
        let others = bars.iter().filter(is_over_no_contender).filter(|bar| bar.covers(&of.name, &bar.to, point));
        ratios.extend(others.filter_map(|bar| RatioResult::of_bar(bar, of, contenders, floor_ns)));
    }
    ratios
}

impl RatioResult {
    /// Compares the times of two contenders that no bar speaks of.
    fn of_times(of: &ContenderResult, to: &ContenderResult) -> Option<RatioResult> {
        Some(RatioResult {
            of: of.name.clone(),
            to: to.name.clone(),
            figure: None,
            excess_over: None,
            ratio: ratio(&of.values(None)?, &to.values(None)?)?,
            over_budget: of.over_budget(),
            bar: None,
        })
    }

    /// Compares what a bar speaks of; `None` if that was not measured.
    fn of_bar(
        bar: &Bar,
        of: &ContenderResult,
        contenders: &[ContenderResult],
        floor_ns: Option<f64>,
    ) -> Option<RatioResult> {
        let figure = bar.figure.as_deref();
        let own = of.values(figure)?;
        let values = |names: &str| fastest(contenders, names, figure)?.values(figure);
        let to = if bar.to == FLOOR { vec![floor_ns?; own.len()] } else { values(&bar.to)? };
        let ratio = match &bar.excess_over {
            Some(base) => excess(&own, &to, &values(base)?)?,
            None => ratio(&own, &to)?,
        };
        Some(RatioResult {
            of: of.name.clone(),
            to: bar.to.clone(),
            figure: bar.figure.clone(),
            excess_over: bar.excess_over.clone(),
            ratio,
            over_budget: of.over_budget(),
            bar: Some(bar.clone()),
        })
    }
}

/// Name of the results file of an experiment.
pub(crate) fn file_name(experiment: &str) -> String {
    format!("{}.jsonl", experiment.replace('/', "-"))
}

/// Adds a line to the results file of its experiment.
pub fn append(folder: &Path, line: &Line) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(file_name(&line.experiment));
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    // One write, so that a reader or a second run never sees half a line.
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

/// All lines in a folder, oldest first. A line that cannot be read is an error that names it.
pub fn read_all(folder: &Path) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    let mut paths: Vec<_> = match fs::read_dir(folder) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", folder.display())),
    };
    paths.retain(|path| path.extension().is_some_and(|e| e == "jsonl"));
    paths.sort();
    for path in paths {
        let text = fs::read_to_string(&path)?;
        for (index, row) in text.lines().enumerate().filter(|(_, row)| !row.trim().is_empty()) {
            let value: serde_json::Value =
                serde_json::from_str(row).with_context(|| format!("{}:{}: not JSON", path.display(), index + 1))?;
            // Lines of other harnesses may share the folder.
            if value.get("schema").and_then(serde_json::Value::as_u64) != Some(u64::from(SCHEMA)) {
                continue;
            }
            let line = serde_json::from_value(value)
                .with_context(|| format!("{}:{}: not a result line", path.display(), index + 1))?;
            lines.push(line);
        }
    }
    lines.sort_by(|a: &Line, b: &Line| a.time.cmp(&b.time));
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contender(name: &str, times: &[f64]) -> ContenderResult {
        let samples = times
            .iter()
            .map(|&ns_per_op| Sample {
                ns_per_op,
                ops: 1,
                checksum: "0".into(),
                phases: vec![],
                figures: BTreeMap::from([("faults".to_string(), ns_per_op * 2.0)]),
            })
            .collect();
        ContenderResult::new(name, Status::Ok, samples)
    }

    #[test]
    fn figures_are_summed_up_by_their_median() {
        let c = contender("farfield", &[1.0, 9.0, 2.0]);
        assert_eq!(c.summary.unwrap().median, 2.0);
        assert_eq!(c.figures["faults"], 4.0);
    }

    #[test]
    fn ours_is_compared_with_others_and_bars_are_attached() {
        let bar = Bar {
            of: "farfield".into(),
            to: "swap-zram".into(),
            figure: None,
            excess_over: None,
            at_most: 0.5,
            aim: None,
            at: Point::new(),
        };
        let contenders = [contender("native", &[1.0]), contender("swap-zram", &[10.0]), contender("farfield", &[6.0])];
        let ratios = ratios(&contenders, &[bar], &Point::new(), None);
        let pairs: Vec<_> = ratios.iter().map(|r| (r.of.as_str(), r.to.as_str(), r.passes())).collect();
        assert_eq!(pairs, [("farfield", "native", None), ("farfield", "swap-zram", Some(false))]);
    }

    #[test]
    fn a_bar_of_a_figure_compares_that_and_one_of_times_beside_it_those() {
        let bar = |figure: Option<&str>, at_most| Bar {
            of: "farfield".into(),
            to: "farfield-tcp".into(),
            figure: figure.map(String::from),
            excess_over: None,
            at_most,
            aim: None,
            at: Point::new(),
        };
        let mut tcp = contender("farfield-tcp", &[10.0]);
        tcp.samples[0].figures.insert("faults".into(), 60.0);
        let contenders = [tcp, contender("farfield", &[15.0])];
        let bars = [bar(Some("faults"), 0.5), bar(None, 1.0), bar(Some("pauses"), 1.0)];
        let found: Vec<_> = ratios(&contenders, &bars, &Point::new(), None)
            .iter()
            .map(|found| (found.sides(), found.ratio.ratio, found.passes()))
            .collect();
        let expected = [("farfield / farfield-tcp", 1.5, false), ("farfield / farfield-tcp, faults", 0.5, true)];
        assert_eq!(found, expected.map(|(sides, ratio, passes)| (sides.to_string(), ratio, Some(passes))));
    }

    #[test]
    fn a_bar_over_several_contenders_is_over_the_best_that_ran() {
        let to = "java-zgc or java-g1 or java-shenandoah";
        let bar: Bar = toml::from_str(&format!("of = 'heap'\nto = '{to}'\nat_most = 0.5")).unwrap();
        let judged = |others: &[ContenderResult]| -> Vec<(f64, Option<bool>)> {
            let contenders = [&[contender("heap", &[4.0])], others].concat();
            let found = ratios(&contenders, std::slice::from_ref(&bar), &Point::new(), None);
            found.iter().filter(|found| found.bar.is_some()).map(|found| (found.ratio.ratio, found.passes())).collect()
        };
        let (slow, fast) = (contender("java-g1", &[16.0]), contender("java-shenandoah", &[5.0]));
        assert_eq!(judged(&[slow.clone(), fast.clone()]), [(0.8, Some(false))]);
        let mut killed = fast;
        killed.status = Status::Unavailable { why: "killed".into(), remedy: "none".into() };
        assert_eq!(judged(&[slow, killed.clone()]), [(0.25, Some(true))]);
        assert_eq!(judged(&[killed]), []);
    }

    #[test]
    fn an_excess_stands_beside_the_ratio_and_a_floor_is_no_contender() {
        let bars = [
            "to = 'swap-zram'\nexcess_over = 'native'\nat_most = 0.35",
            "to = 'floor'\nat_most = 1.5",
            "to = 'swap-zram'\nat_most = 0.5",
        ];
        let bars = bars.map(|bar| toml::from_str::<Bar>(&format!("of = 'farfield'\n{bar}")).unwrap());
        let check = |native: f64, floor_ns, expected: &[(&str, f64, bool)]| {
            let contenders =
                [contender("native", &[native]), contender("swap-zram", &[20.0]), contender("farfield", &[12.0])];
            let found = ratios(&contenders, &bars, &Point::new(), floor_ns);
            let judged = found.iter().filter_map(|found| Some((found.sides(), found.ratio.ratio, found.passes()?)));
            let expected = expected.iter().map(|(sides, ratio, passes)| (sides.to_string(), *ratio, *passes));
            assert_eq!(judged.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        };
        let (plain, excess) = ("farfield / swap-zram", "farfield / swap-zram, excess over native");
        let (time, floor) = ((plain, 0.6, false), ("farfield / floor", 1.5, true));
        check(10.0, Some(8.0), &[time, (excess, 0.2, true), floor]);
        check(4.0, Some(6.0), &[time, (excess, 0.5, false), ("farfield / floor", 2.0, false)]);
        check(20.0, None, &[time]);
        // At a floor of nothing there is nothing to compare with.
        check(30.0, Some(0.0), &[time]);
    }

    #[test]
    fn one_sample_over_budget_spoils_the_bar() {
        let bar = Bar {
            of: "farfield".into(),
            to: "swap-zram".into(),
            figure: None,
            excess_over: None,
            at_most: 0.5,
            aim: None,
            at: Point::new(),
        };
        let mut ours = contender("farfield", &[1.0, 1.0]);
        let check = |ours: &ContenderResult, passes: bool| {
            let swap = contender("swap-zram", &[10.0, 10.0]);
            let ratios = ratios(&[swap, ours.clone()], std::slice::from_ref(&bar), &Point::new(), None);
            assert_eq!(ratios[0].passes(), Some(passes), "{:?}", ratios[0].verdict());
        };
        check(&ours, true);
        ours.samples[0].figures.insert("near_peak_over_limit".into(), 1.01);
        check(&ours, true);
        ours.samples[1].figures.insert("near_peak_over_limit".into(), 2.0);
        check(&ours, false);
    }

    #[test]
    fn contender_that_failed_has_no_ratio() {
        let mut failed = contender("farfield", &[1.0]);
        failed.status = Status::Failed { why: "x".into() };
        assert!(ratios(&[failed, contender("swap-zram", &[2.0])], &[], &Point::new(), None).is_empty());
    }
}
