//! Experiments are parameter files; this reads them.
//!
//! A file names a workload's parameters, one value each (`[parameters]`) or several (`[sweep]`); each combination of
//! swept values is a *point*. `[quick]` overrides some of them for a smoke run. A bar is the ratio that a contender must
//! not exceed against a baseline.

use crate::bar::{Bar, Bound, FLOOR, Mean, Quorum, listed};
use crate::overuse::Overuse;
use crate::workload::Workload;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Value of a parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A count, a size or a switch.
    Number(u64),
    /// A name.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{number}"),
            Value::Text(text) => f.write_str(text),
        }
    }
}

impl std::str::FromStr for Value {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Value, Self::Err> {
        Ok(text.parse().map_or_else(|_| Value::Text(text.to_string()), Value::Number))
    }
}

/// One combination of parameters.
pub type Point = BTreeMap<String, Value>;

/// A parameter file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// `family/name`.
    pub name: String,
    /// What it measures, one or two sentences.
    pub about: String,
    /// What no system can beat here, and why.
    pub physics: String,
    /// The contender that all others are compared with first.
    #[serde(default = "default_baseline")]
    pub baseline: String,
    /// Who runs, in the order in which they take turns.
    pub contenders: Vec<String>,
    /// Probes whose figures belong beside the result.
    #[serde(default)]
    pub limits: Vec<String>,
    /// What an operation costs at least, from the probes.
    #[serde(default)]
    pub floor: Option<Floor>,
    /// Samples of each contender.
    #[serde(default = "default_runs")]
    pub runs: u32,
    /// Seed of the workload's data and order.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Longest time one sample may take.
    #[serde(default = "default_deadline_seconds")]
    pub deadline_seconds: u64,
    /// Parameters with one value.
    pub parameters: Point,
    /// Parameters with several values.
    #[serde(default)]
    pub sweep: BTreeMap<String, Vec<Value>>,
    /// Values of `[parameters]` for one workload, where several are swept; not in a smoke run.
    #[serde(default)]
    pub each: BTreeMap<String, Point>,
    /// Overrides for a smoke run.
    #[serde(default)]
    pub quick: Quick,
    /// What must hold.
    #[serde(default, rename = "bar")]
    pub bars: Vec<Bar>,
    /// Figures that must not be exceeded.
    #[serde(default, rename = "bound")]
    pub bounds: Vec<Bound>,
    /// Means over all points that must not be exceeded.
    #[serde(default, rename = "mean")]
    pub means: Vec<Mean>,
    /// Figures that must not be exceeded at most points.
    #[serde(default, rename = "quorum")]
    pub quorums: Vec<Quorum>,
    /// Why a bar is missed at present: one sentence for each, by what the bar compares or bounds.
    #[serde(default)]
    pub missed: BTreeMap<String, String>,
}

/// Overrides for a smoke run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quick {
    /// Replaces values of `[parameters]`.
    #[serde(default)]
    pub parameters: Point,
    /// Replaces lists of `[sweep]`.
    #[serde(default)]
    pub sweep: BTreeMap<String, Vec<Value>>,
}

/// What an operation costs at least.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// How many operations miss.
    pub misses: Misses,
    /// Probes whose sum a miss costs.
    pub per_miss: Vec<String>,
    /// Probes whose sum every operation costs.
    #[serde(default)]
    pub per_operation: Vec<String>,
}

/// Share of the operations that touch a page that is far.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misses {
    /// One minus the near share: pages are touched at random.
    FarShare,
    /// All as soon as not all fits: pages are touched in a circle by an evictor that knows recency only.
    All,
}

impl Floor {
    /// Nanoseconds per operation at `point` on `cores`; `None` if a probe did not run on this machine.
    pub fn ns(&self, point: &Point, limits: &BTreeMap<String, f64>, cores: u32) -> Option<f64> {
        let sum = |names: &[String]| names.iter().map(|name| limits.get(name).copied()).sum::<Option<f64>>();
        let near = (number(point, "near_percent").ok()? as f64 / 100.0).min(1.0);
        let misses = match self.misses {
            Misses::FarShare => 1.0 - near,
            Misses::All => f64::from(u8::from(near < 1.0)),
        };
        // Threads share the work as far as there are cores for them.
        let parallel = number(point, "threads").unwrap_or(1).clamp(1, u64::from(cores.max(1)));
        Some((misses * sum(&self.per_miss)? + sum(&self.per_operation)?) / parallel as f64)
    }
}

fn default_baseline() -> String {
    "swap-zram".into()
}
fn default_runs() -> u32 {
    5
}
fn default_seed() -> u64 {
    42
}
fn default_deadline_seconds() -> u64 {
    300
}

/// Parameters that the driver or a workload understands. The driver's own are not handed to the program.
const PARAMETERS: &[&str] = &[
    "workload",
    "near_percent",
    "data_mib",
    "ops",
    "threads",
    "write_percent",
    "compressible",
    "passes",
    "record_words",
    "object_bytes",
    "set_kib",
    "busy_ns",
    "zipf_percent",
    "once",
    "in_flight",
    "nodes",
    "at_once",
    "real",
    "rate_per_s",
    "latency_us",
    "bandwidth_mib",
    "car_percent",
    "hotness",
    "moments",
    "offload",
    "slo_percent",
    "link_mib",
    "overuse",
    "huge",
    "cluster",
    "rules",
    "arrivals",
    "m2c_percent",
    "m2c_within_percent",
    "packs_percent",
    "far_gib",
    "local_gib",
    "mixes",
    "trials",
    "recording",
    "accounting",
    "gate_nodes",
    "queue",
    "books",
    "trace",
    "tracing",
    "aged",
    "mix",
    "ycsb",
    "graph",
    "region_kib",
    "processors",
    "switches",
];
/// Most points of one experiment, so that a typing error does not run for a day.
const POINTS_MAX: usize = 64;
/// As in `farfield run`.
const NEAR_BYTES_MIN: u64 = 16 << 20;

impl Experiment {
    /// Reads a parameter file and checks all that can be checked before a run.
    pub fn parse(text: &str) -> Result<Experiment> {
        let experiment: Experiment = toml::from_str(text).context("not a parameter file")?;
        experiment.check().with_context(|| format!("experiment {}", experiment.name))?;
        Ok(experiment)
    }

    fn check(&self) -> Result<()> {
        ensure!(self.name.split('/').count() == 2, "`name` must read family/name");
        ensure!((1..=1000).contains(&self.runs), "`runs` must be 1 to 1000");
        ensure!(self.contenders.contains(&self.baseline), "the baseline {} is not among the contenders", self.baseline);
        for name in &self.contenders {
            crate::contender::known(name)?;
        }
        for limit in &self.limits {
            ensure!(crate::limits::NAMES.contains(&limit.as_str()), "no probe is called {limit}");
        }
        for limit in self.floor.iter().flat_map(|floor| floor.per_miss.iter().chain(&floor.per_operation)) {
            ensure!(self.limits.contains(limit), "`floor` names {limit}, which is not among `limits`");
        }
        for bar in &self.bars {
            for side in bar.opponents().chain([bar.of.as_str()]).chain(bar.excess_over.as_deref()) {
                let is_known = self.contenders.iter().any(|name| name == side);
                let is_floor = bar.to == FLOOR && side == FLOOR && self.floor.is_some() && bar.figure.is_none();
                ensure!(is_known || is_floor, "a bar speaks of {side}, which is not among the contenders");
            }
            ensure!(
                bar.at_most > 0.0 && bar.aim.is_none_or(|aim| aim <= bar.at_most),
                "a bar's `aim` exceeds `at_most`"
            );
            let covered = self.points(false)?.iter().any(|p| bar.covers(&bar.of, &bar.to, p));
            ensure!(covered, "a bar's `where` matches no point");
        }
        for bound in &self.bounds {
            ensure!(
                self.contenders.contains(&bound.of),
                "a bound speaks of {}, which is not among the contenders",
                bound.of
            );
            let covered = self.points(false)?.iter().any(|point| bound.covers(&bound.of, point));
            ensure!(covered, "a bound's `where` matches no point");
        }
        for quorum in &self.quorums {
            for side in quorum.to.as_deref().into_iter().flat_map(listed).chain([quorum.of.as_str()]) {
                let is_known = self.contenders.iter().any(|name| name == side);
                ensure!(is_known, "a quorum speaks of {side}, which is not among the contenders");
            }
            ensure!(quorum.to.is_some() || quorum.figure.is_some(), "a quorum needs a `figure`, or `to`");
            ensure!(quorum.share > 0.0 && quorum.share <= 1.0, "a quorum's `share` must be above 0 and at most 1");
            let covered = self.points(false)?.iter().any(|point| quorum.covers(point));
            ensure!(covered, "a quorum's `where` matches no point");
        }
        for side in self.means.iter().flat_map(|mean| [&mean.of, &mean.to]) {
            ensure!(self.contenders.contains(side), "a mean speaks of {side}, which is not among the contenders");
        }
        for mean in &self.means {
            let is_below = mean.at_most.is_none_or(|at_most| mean.aim.is_none_or(|aim| aim <= at_most));
            ensure!(is_below, "a mean's `aim` exceeds `at_most`");
            let points = self.points(false)?;
            let mut covered = points.iter().filter(|point| mean.covers(point));
            ensure!(covered.all(|point| points.contains(&mean.opposite(point))), "a mean's `against` matches no point");
        }
        let subjects = self.subjects();
        for subject in self.missed.keys() {
            ensure!(
                subjects.contains(subject),
                "`missed` speaks of \"{subject}\", which no bar does; bars speak of \"{}\"",
                subjects.join("\", \"")
            );
        }
        for (name, overrides) in &self.each {
            Workload::named(name)?;
            for key in overrides.keys() {
                ensure!(self.parameters.contains_key(key), "`each` overrides {key}, which is not in `parameters`");
            }
        }
        for key in self.quick.parameters.keys() {
            ensure!(self.parameters.contains_key(key), "`quick` overrides {key}, which is not in `parameters`");
        }
        for key in self.quick.sweep.keys() {
            ensure!(self.sweep.contains_key(key), "`quick` overrides {key}, which is not in `sweep`");
        }
        self.points(true)?;
        Ok(())
    }

    /// Names what the bars compare or bound, as in [`Experiment::missed`].
    fn subjects(&self) -> Vec<String> {
        let judged = self.means.iter().filter(|mean| mean.at_most.is_some());
        let bars = self.bars.iter().map(Bar::sides).chain(self.bounds.iter().map(Bound::subject));
        bars.chain(judged.map(Mean::subject)).chain(self.quorums.iter().map(Quorum::subject)).collect()
    }

    /// All combinations of parameters, the last swept name varying fastest.
    pub fn points(&self, quick: bool) -> Result<Vec<Point>> {
        let mut base = self.parameters.clone();
        let mut sweep = self.sweep.clone();
        if quick {
            base.extend(self.quick.parameters.clone());
            sweep.extend(self.quick.sweep.clone());
        }
        let mut points = vec![base];
        for (key, values) in &sweep {
            ensure!(!values.is_empty(), "`sweep` of {key} is empty");
            ensure!(!self.parameters.contains_key(key), "{key} is both in `parameters` and in `sweep`");
            points = points
                .iter()
                .flat_map(|point| {
                    values.iter().map(move |value| {
                        let mut point = point.clone();
                        point.insert(key.clone(), value.clone());
                        point
                    })
                })
                .collect();
            ensure!(points.len() <= POINTS_MAX, "more than {POINTS_MAX} points");
        }
        for point in &mut points {
            if let Some(Value::Text(name)) = point.get("workload").filter(|_| !quick) {
                point.extend(self.each.get(name).cloned().unwrap_or_default());
            }
            check_point(point)?;
        }
        Ok(points)
    }

    /// Gives each of these parameters one value, or several to sweep; all together have to make sense in a full run, or in a smoke run.
    pub fn set(&mut self, settings: &[(String, Vec<Value>)], quick: bool) -> Result<()> {
        for (key, values) in settings {
            for parameters in [&mut self.parameters, &mut self.quick.parameters] {
                parameters.remove(key);
            }
            self.each.values_mut().for_each(|overrides| drop(overrides.remove(key)));
            self.quick.sweep.remove(key);
            self.sweep.insert(key.clone(), values.clone());
        }
        self.points(quick).map(drop).with_context(|| format!("experiment {}", self.name))
    }

    /// Names of the swept parameters that have more than one value.
    pub fn axes(&self, quick: bool) -> Vec<String> {
        let mut sweep = self.sweep.clone();
        if quick {
            sweep.extend(self.quick.sweep.clone());
        }
        sweep.into_iter().filter(|(_, values)| values.len() > 1).map(|(key, _)| key).collect()
    }
}

fn check_point(point: &Point) -> Result<()> {
    for (key, value) in point {
        ensure!(
            PARAMETERS.contains(&key.as_str()),
            "no parameter is called {key}; known are {}",
            PARAMETERS.join(", ")
        );
        match (key.as_str(), value) {
            ("workload", Value::Text(name)) => drop(Workload::named(name)?),
            ("workload", Value::Number(_)) => bail!("`workload` must be a name"),
            // The program knows the rules.
            ("overuse", Value::Text(_)) => drop(overuse(point)?),
            (
                "hotness" | "offload" | "tracing" | "mix" | "ycsb" | "graph" | "cluster" | "rules" | "arrivals"
                | "recording" | "accounting" | "queue" | "books" | "trace",
                Value::Text(_),
            ) => {}
            (_, Value::Text(text)) => bail!("{key} must be a number, not {text:?}"),
            (_, Value::Number(_)) => {}
        }
    }
    workload(point)?;
    let data = number(point, "data_mib")?;
    ensure!((1..=1 << 20).contains(&data), "data_mib must be 1 to 1048576");
    let percent = number(point, "near_percent")?;
    ensure!((1..=1000).contains(&percent), "near_percent must be 1 to 1000");
    ensure!(
        number(point, "link_mib").map_or(true, |mib| (1..=1 << 20).contains(&mib)),
        "link_mib must be 1 to 1048576"
    );
    ensure!(near_bytes(point)? >= NEAR_BYTES_MIN, "less than 16 MiB near, the least that farfield run takes");
    Ok(())
}

/// The workload of a point.
pub fn workload(point: &Point) -> Result<&'static Workload> {
    match point.get("workload") {
        Some(Value::Text(name)) => Workload::named(name),
        _ => bail!("`workload` is missing"),
    }
}

/// What a tenant beside the job takes, if there is one.
pub(crate) fn overuse(point: &Point) -> Result<Option<Overuse>> {
    point.get("overuse").map(|name| Overuse::named(&name.to_string())).transpose()
}

/// A number among a point's parameters.
pub fn number(point: &Point, key: &str) -> Result<u64> {
    match point.get(key) {
        Some(Value::Number(number)) => Ok(*number),
        Some(Value::Text(text)) => bail!("{key} must be a number, not {text:?}"),
        None => bail!("`{key}` is missing"),
    }
}

/// The limit on near memory: that share of the data. From 100 % on, 16 MiB more for the program itself, so that
/// "all near" means what it says.
pub fn near_bytes(point: &Point) -> Result<u64> {
    let data = number(point, "data_mib")? << 20;
    let percent = number(point, "near_percent")?;
    let share = data * percent / 100;
    Ok(if percent >= 100 { share + (16 << 20) } else { share } & !4095)
}

/// Arguments of the program at this point.
pub fn arguments(point: &Point, seed: u64) -> Vec<String> {
    let mut arguments = vec!["--seed".to_string(), seed.to_string()];
    for (key, value) in point {
        if !["workload", "near_percent", "slo_percent", "link_mib", "overuse"].contains(&key.as_str()) {
            arguments.push(format!("--{}", key.replace('_', "-")));
            arguments.push(value.to_string());
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"
        name = "paging/small"
        about = "a"
        physics = "b"
        contenders = ["native", "swap-zram"]
        [parameters]
        workload = "random"
        data_mib = 128
        near_percent = 25
        [sweep]
        threads = [1, 2]
        compressible = [0, 1]
        [quick.parameters]
        data_mib = 64
        [[bar]]
        of = "native"
        to = "swap-zram"
        at_most = 0.5
        where = { threads = 2 }
    "#;

    #[test]
    fn sweep_is_the_product_of_its_lists() {
        let experiment = Experiment::parse(SMALL).unwrap();
        let points = experiment.points(false).unwrap();
        let seen: Vec<_> =
            points.iter().map(|p| (number(p, "compressible").unwrap(), number(p, "threads").unwrap())).collect();
        assert_eq!(seen, [(0, 1), (0, 2), (1, 1), (1, 2)]);
        assert_eq!(experiment.axes(false), ["compressible", "threads"]);
    }

    #[test]
    fn quick_overrides_and_the_rest_stays() {
        let experiment = Experiment::parse(SMALL).unwrap();
        let point = &experiment.points(true).unwrap()[0];
        assert_eq!(number(point, "data_mib").unwrap(), 64);
        assert_eq!(near_bytes(point).unwrap(), 16 << 20);
    }

    #[test]
    fn driver_parameters_stay_with_the_driver() {
        let experiment = Experiment::parse(SMALL).unwrap();
        let arguments = arguments(&experiment.points(false).unwrap()[1], 7);
        assert_eq!(arguments.join(" "), "--seed 7 --compressible 0 --data-mib 128 --threads 2");
    }

    #[test]
    fn bar_covers_only_its_points() {
        let experiment = Experiment::parse(SMALL).unwrap();
        let points = experiment.points(false).unwrap();
        let covered = points.iter().filter(|p| experiment.bars[0].covers("native", "swap-zram", p)).count();
        assert_eq!(covered, 2);
    }

    #[test]
    fn floor_follows_the_near_share() {
        let floor = |misses| Floor {
            misses,
            per_miss: vec!["signal_fault".into(), "page_copy".into()],
            per_operation: vec!["memory_read".into()],
        };
        let mut limits = BTreeMap::from([("signal_fault".to_string(), 3000.0), ("page_copy".to_string(), 200.0)]);
        let at = |percent| Point::from([("near_percent".to_string(), Value::Number(percent))]);
        assert_eq!(floor(Misses::All).ns(&at(25), &limits, 2), None, "a probe is missing");
        limits.insert("memory_read".into(), 100.0);
        assert_eq!(floor(Misses::FarShare).ns(&at(25), &limits, 2), Some(2500.0));
        assert_eq!(floor(Misses::All).ns(&at(25), &limits, 2), Some(3300.0));
        assert_eq!(floor(Misses::All).ns(&at(150), &limits, 2), Some(100.0));
        let mut four = at(25);
        four.insert("threads".into(), Value::Number(4));
        assert_eq!(floor(Misses::All).ns(&four, &limits, 2), Some(1650.0));
    }

    #[test]
    fn parameters_can_be_set_and_are_checked_again() {
        let mut experiment = Experiment::parse(SMALL).unwrap();
        let number = |key: &str, value| (key.to_string(), vec![Value::Number(value)]);
        let shares = ("near_percent".to_string(), vec![Value::Number(50), Value::Number(75)]);
        experiment.set(&[shares, number("threads", 4)], false).unwrap();
        assert_eq!(experiment.points(false).unwrap().len(), 4);
        assert_eq!(experiment.axes(true), ["compressible", "near_percent"]);
        experiment.set(&[number("ops", 1)], false).unwrap();
        assert!(experiment.clone().set(&[number("opps", 1)], false).is_err());
        assert!(experiment.clone().set(&[("data_mib".into(), vec![Value::Text("big".into())])], false).is_err());
        // So little is near of the data of one of both kinds of run only, and of much data in neither.
        assert!(experiment.clone().set(&[number("near_percent", 13)], true).is_err());
        experiment.clone().set(&[number("near_percent", 13)], false).unwrap();
        experiment.set(&[number("near_percent", 3), number("data_mib", 1024)], true).unwrap();
    }

    #[test]
    fn one_workload_of_several_has_values_of_its_own() {
        let text = SMALL
            .replace("workload = \"random\"", "")
            .replace("[sweep]", "[sweep]\n workload = [\"random\", \"scan\"]");
        let mut experiment = Experiment::parse(&(text + "\n[each.scan]\ndata_mib = 256")).unwrap();
        let sizes = |experiment: &Experiment, quick| -> Vec<(String, u64)> {
            let points = experiment.points(quick).unwrap();
            let mut sizes: Vec<_> =
                points.iter().map(|p| (p["workload"].to_string(), number(p, "data_mib").unwrap())).collect();
            sizes.dedup();
            sizes.sort();
            sizes.dedup();
            sizes
        };
        assert_eq!(sizes(&experiment, false), [("random".into(), 128), ("scan".into(), 256)]);
        assert_eq!(sizes(&experiment, true), [("random".into(), 64), ("scan".into(), 64)]);
        experiment.set(&[("data_mib".into(), vec![Value::Number(512)])], false).unwrap();
        assert_eq!(sizes(&experiment, false), [("random".into(), 512), ("scan".into(), 512)]);
    }

    fn check(from: &str, to: &str, complaint: &str) {
        assert!(SMALL.contains(from), "{from:?} is not in the sample");
        let error = Experiment::parse(&SMALL.replace(from, to)).unwrap_err();
        assert!(format!("{error:#}").contains(complaint), "{from} -> {to}: {error:#}");
    }

    #[test]
    fn mistakes_in_a_file_are_named() {
        check("about", "abut", "abut");
        check("workload = \"random\"", "workload = \"rondom\"", "rondom");
        check("workload = \"random\"", "", "`workload` is missing");
        check("threads = [1, 2]", "threads = []", "`sweep` of threads is empty");
        check("threads = [1, 2]", "thread = [1, 2]", "no parameter is called thread");
        check("near_percent = 25", "near_percent = 1", "16 MiB");
        check("near_percent = 25", "near_percent = \"x\"", "must be a number");
        check("[\"native\", \"swap-zram\"]", "[\"native\"]", "baseline");
        check("[\"native\", \"swap-zram\"]", "[\"native\", \"swap-zram\", \"memcached\"]", "memcached");
        check("to = \"swap-zram\"", "to = \"swap-zram or swap-fire\"", "a bar speaks of swap-fire");
        check("to = \"swap-zram\"", "to = \"floor\"", "a bar speaks of floor");
        check("to = \"swap-zram\"", "to = \"swap-zram\"\nexcess_over = \"heap\"", "a bar speaks of heap");
        check("where = { threads = 2 }", "where = { threads = 3 }", "matches no point");
        check("[quick.parameters]\n        data_mib = 64", "[quick.parameters]\n        ops = 1", "ops");
        check("[quick.parameters]", "[each.scan]\n ops = 1\n[quick.parameters]", "`each` overrides ops");
        let mean = "[[mean]]\n of = \"native\"\n to = \"native\"\n against = { threads = 3 }\n[quick.parameters]";
        check("[quick.parameters]", mean, "`against` matches no point");
        let quorum = |share: f64| {
            let text = "[[quorum]]\n of = \"native\"\n figure = \"x\"\n at_most = 1\n share = ";
            format!("{text}{share}\n[quick.parameters]")
        };
        check("[quick.parameters]", &quorum(9.0), "`share` must be above 0");
        check("[quick.parameters]", &quorum(0.9).replace("\"native\"", "\"heap\""), "a quorum speaks of heap");
        check("[quick.parameters]", &quorum(0.9).replace("figure = \"x\"", ""), "a quorum needs a `figure`, or `to`");
        let ratio = quorum(0.9).replace("figure = \"x\"", "to = \"native or heap\"");
        check("[quick.parameters]", &ratio, "a quorum speaks of heap");
        check("[quick.parameters]", "[each.scam]\n data_mib = 64\n[quick.parameters]", "scam");
        let missed = "[missed]\n\"native / swap-file\" = \"Why.\"\n[quick.parameters]";
        check("[quick.parameters]", missed, "which no bar does; bars speak of \"native / swap-zram\"");
    }
}
