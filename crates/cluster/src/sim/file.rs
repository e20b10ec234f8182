//! Scenario files: TOML that people write.
//!
//! A file takes a published cluster as its `base` and changes what it names, or describes nodes and
//! classes of jobs itself.

use super::arrivals::{ArrivalError, recorded};
use super::published::{self, Profiles};
use super::trace::{JobGroups, TracedJob, traced};
use super::{Arrival, Arrivals, JobKind, Rules, Scenario};
use farfield_core::policy::cluster::{NodeShape, RunTime};
use farfield_core::policy::curve::{Curve, Point};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Scenarios that are part of the program: name and text.
pub const BUILT_IN: [(&str, &str); 3] = [
    ("rack", include_str!("../../scenarios/rack.toml")),
    ("testbed", include_str!("../../scenarios/testbed.toml")),
    ("open", include_str!("../../scenarios/open.toml")),
];

/// Reason why a file is no scenario.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FileError {
    /// The file is not TOML, or has keys that are not known.
    #[error("{0}")]
    Syntax(String),
    /// A value makes no sense.
    #[error("`{key}` {message}")]
    Value {
        /// Key of the value.
        key: String,
        /// What is wrong, and what to write.
        message: String,
    },
    /// The file of recorded arrivals is wrong or is not there.
    #[error("arrivals file {file}: {message}")]
    Arrivals {
        /// Name of the file.
        file: String,
        /// What is wrong.
        message: String,
    },
}

/// A file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioFile {
    name: String,
    base: Option<String>,
    nodes: Option<u32>,
    memory_servers: Option<u32>,
    cores: Option<u32>,
    reclaim_cores: Option<u32>,
    near_mib: Option<u64>,
    far_mib: Option<u64>,
    jobs: Option<usize>,
    mix: Option<String>,
    #[serde(default)]
    rules: RulesTable,
    arrivals: Option<ArrivalsTable>,
    #[serde(default)]
    class: Vec<ClassRow>,
    trace: Option<TraceTable>,
    /// Prices, which are for [`plan`](crate::plan).
    #[serde(rename = "purchase")]
    _purchase: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesTable {
    #[serde(default)]
    published: bool,
    link_mib_per_s: Option<f64>,
    #[serde(default)]
    profile_error: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArrivalsTable {
    window_s: Option<f64>,
    per_s: Option<f64>,
    load: Option<f64>,
    file: Option<String>,
}

/// List of jobs that ran, and what is assumed of all of them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceTable {
    file: String,
    least: f64,
    slowdown: Vec<[f64; 2]>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassRow {
    name: String,
    count: usize,
    cores: u32,
    memory_mib: u64,
    least: f64,
    seconds: Option<f64>,
    #[serde(default)]
    slowdown: Vec<[f64; 2]>,
    polynomial: Option<Vec<f64>>,
}

/// Returns the scenario that is part of the program under this name.
pub fn built_in(name: &str) -> Option<Scenario> {
    let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
    Some(parse(text, |file| Err(format!("{file} is not part of the program"))).expect("tested"))
}

/// Reads a scenario file. `read` returns the text of a file of recorded arrivals.
pub fn parse(text: &str, read: impl Fn(&str) -> Result<String, String>) -> Result<Scenario, FileError> {
    let file: ScenarioFile = toml::from_str(text).map_err(|error| FileError::Syntax(error.to_string()))?;
    let rules = file.rules()?;
    let mut scenario = file.based_on(rules, &read)?;
    scenario.name = file.name.clone();
    let shape = &mut scenario.shape;
    shape.cores = file.cores.unwrap_or(shape.cores);
    shape.reclaim_cores = file.reclaim_cores.unwrap_or(shape.reclaim_cores);
    shape.memory_bytes = file.near_mib.map_or(Ok(shape.memory_bytes), |mib| bytes("near_mib", mib))?;
    scenario.far_bytes = file.far_mib.map_or(Ok(scenario.far_bytes), |mib| bytes("far_mib", mib))?;
    scenario.nodes = file.nodes.unwrap_or(scenario.nodes);
    scenario.memory_servers = file.memory_servers.unwrap_or(scenario.memory_servers);
    if let Some(arrivals) = &file.arrivals {
        scenario.arrivals = arrivals.of(&scenario, read)?;
    }
    Ok(scenario)
}

impl ScenarioFile {
    fn rules(&self) -> Result<Rules, FileError> {
        let RulesTable { published, link_mib_per_s, profile_error } = self.rules;
        let rules = if published { Rules::published() } else { Rules::default_rules() };
        let link_bytes_per_s = link_mib_per_s.map(|mib| above_zero("link_mib_per_s", mib)).transpose()?;
        if !(0.0..1.0).contains(&profile_error) {
            return Err(value("profile_error", "must be at least 0 and below 1; 0.2 is 20 %"));
        }
        Ok(Rules { link_bytes_per_s: link_bytes_per_s.map(|mib| mib * MIB as f64), profile_error, ..rules })
    }

    fn based_on(&self, rules: Rules, read: &impl Fn(&str) -> Result<String, String>) -> Result<Scenario, FileError> {
        let profiles = if self.rules.published { Profiles::Polynomials } else { Profiles::Lines };
        let base = match self.base.as_deref() {
            Some("rack") => published::rack(rules, profiles),
            Some("testbed") => published::testbed(rules, profiles),
            Some(_) => return Err(value("base", "must be \"rack\" or \"testbed\", or be left out")),
            None => return self.of_its_own(rules, read),
        };
        if !self.class.is_empty() || self.trace.is_some() {
            return Err(value("class", "and `trace` go with no `base`, which has classes of its own"));
        }
        let counts = published::counts(self.jobs.unwrap_or(6000), &ratio(self.mix.as_deref())?);
        Ok(Scenario { counts, ..base })
    }

    /// Makes the scenario of a file that describes all itself.
    fn of_its_own(&self, rules: Rules, read: &impl Fn(&str) -> Result<String, String>) -> Result<Scenario, FileError> {
        let missing = |key: &str| value(key, "is missing; without `base` a file describes its nodes and classes");
        let shape = NodeShape {
            cores: self.cores.ok_or_else(|| missing("cores"))?,
            reclaim_cores: 0,
            memory_bytes: bytes("near_mib", self.near_mib.ok_or_else(|| missing("near_mib"))?)?,
        };
        if self.jobs.is_some() || self.mix.is_some() {
            return Err(value("jobs", "and `mix` go with a `base`; give each class a `count` instead"));
        }
        let (kinds, counts, arrivals) = match &self.trace {
            Some(_) if !self.class.is_empty() => {
                return Err(value("class", "goes with no `trace`, which has all jobs"));
            }
            Some(trace) => trace.jobs(read)?,
            None if self.class.is_empty() => return Err(missing("class")),
            None => {
                let kinds = self.class.iter().map(ClassRow::kind).collect::<Result<_, _>>()?;
                (kinds, self.class.iter().map(|class| class.count).collect(), Arrivals::Window(0.0))
            }
        };
        Ok(Scenario {
            name: String::new(),
            kinds,
            counts,
            arrivals,
            nodes: self.nodes.ok_or_else(|| missing("nodes"))?,
            memory_servers: 0,
            shape,
            far_bytes: 0,
            rules,
        })
    }
}

impl ClassRow {
    fn kind(&self) -> Result<JobKind, FileError> {
        let wrong = |message: &str| value(&format!("class {}", self.name), message);
        let run_time = match (&self.polynomial, self.seconds) {
            (Some(coefficients), None) if self.slowdown.is_empty() => RunTime::Polynomial(coefficients.clone()),
            (None, Some(seconds)) => RunTime::Measured { seconds, curve: curve(&self.slowdown).map_err(wrong)? },
            _ => return Err(wrong("needs either `seconds` and `slowdown`, or `polynomial`")),
        };
        let Self { name, cores, memory_mib, least, .. } = self;
        let memory_bytes = bytes("memory_mib", *memory_mib)?;
        Ok(JobKind { name: name.clone(), cores: *cores, memory_bytes, least: *least, run_time, usage: Vec::new() })
    }
}

/// Returns the curve through pairs of a near share and a slowdown, with all memory near at full speed.
fn curve(slowdown: &[[f64; 2]]) -> Result<Curve, &'static str> {
    let mut points: Vec<Point> = slowdown.iter().map(|&[near, slowdown]| Point { near, slowdown }).collect();
    if points.iter().any(|p| !(p.near > 0.0 && p.near <= 1.0 && p.slowdown > 0.0)) {
        return Err("needs `slowdown` with pairs of a share up to 1 and a slowdown above 0");
    }
    if points.iter().all(|point| point.near < 1.0) {
        points.push(Point { near: 1.0, slowdown: 1.0 });
    }
    Curve::through(&points).ok_or("needs slowdowns that are numbers")
}

/// Most different jobs of a list: each is a class with a queue of its own.
const TRACE_CLASSES_MAX: usize = 20_000;

impl TraceTable {
    /// Reads the jobs: classes, how many there are of each, and arrivals.
    fn jobs(
        &self,
        read: &impl Fn(&str) -> Result<String, String>,
    ) -> Result<(Vec<JobKind>, Vec<usize>, Arrivals), FileError> {
        let wrong = |message| FileError::Arrivals { file: self.file.clone(), message };
        let curve = curve(&self.slowdown).map_err(|message| value("trace", message))?;
        let jobs = traced(&read(&self.file).map_err(wrong)?).map_err(|error| wrong(error.to_string()))?;
        let grouped = JobGroups::of(&jobs);
        if grouped.groups.len() > TRACE_CLASSES_MAX {
            let message = format!("more than {TRACE_CLASSES_MAX} different jobs: round their memory and seconds");
            return Err(wrong(message));
        }
        let kind = |job: &TracedJob| JobKind {
            name: format!("{} cores, {} MiB, {} s", job.cores, job.memory_bytes / MIB, job.seconds),
            cores: job.cores,
            memory_bytes: job.memory_bytes,
            least: self.least,
            run_time: RunTime::Measured { seconds: job.seconds, curve: curve.clone() },
            usage: Vec::new(),
        };
        let arrivals = grouped.of_jobs.iter().zip(&jobs).map(|(&class, job)| Arrival { class, at_s: job.arrival_s });
        let arrivals = Arrivals::Recorded(arrivals.collect());
        Ok((grouped.groups.iter().map(kind).collect(), grouped.counts, arrivals))
    }
}

impl ArrivalsTable {
    fn of(&self, scenario: &Scenario, read: impl Fn(&str) -> Result<String, String>) -> Result<Arrivals, FileError> {
        match (self.window_s, self.per_s, self.load, &self.file) {
            (Some(window_s), None, None, None) if window_s >= 0.0 && window_s.is_finite() => {
                Ok(Arrivals::Window(window_s))
            }
            (None, Some(per_s), None, None) => Ok(Arrivals::Poisson(above_zero("per_s", per_s)?)),
            (None, None, Some(load), None) => {
                Ok(Arrivals::Poisson(above_zero("load", load)? * scenario.jobs_per_s_max()))
            }
            (None, None, None, Some(file)) => {
                let wrong = |message| FileError::Arrivals { file: file.clone(), message };
                let names: Vec<&str> = scenario.kinds.iter().map(|kind| kind.name.as_str()).collect();
                let text = read(file).map_err(wrong)?;
                let arrivals = recorded(&text, &names).map_err(|error: ArrivalError| wrong(error.to_string()))?;
                Ok(Arrivals::Recorded(arrivals))
            }
            _ => Err(value("arrivals", "needs one of `window_s`, `per_s`, `load` and `file`, at least 0")),
        }
    }
}

const MIB: u64 = 1 << 20;
const MIB_MAX: u64 = 1 << 40;

fn value(key: &str, message: &str) -> FileError {
    FileError::Value { key: key.to_owned(), message: message.to_owned() }
}

fn bytes(key: &str, mib: u64) -> Result<u64, FileError> {
    if mib > MIB_MAX { Err(value(key, "is more than 2^40 MiB")) } else { Ok(mib * MIB) }
}

fn above_zero(key: &str, number: f64) -> Result<f64, FileError> {
    if number > 0.0 && number.is_finite() { Ok(number) } else { Err(value(key, "must be a number above 0")) }
}

/// Reads parts of a mix with colons between them.
fn ratio(mix: Option<&str>) -> Result<Vec<u32>, FileError> {
    let mix = mix.ok_or_else(|| value("mix", "is missing: parts of the six published classes, \"63:1:22:11:1:2\""))?;
    let parts: Result<Vec<u32>, _> = mix.split(':').map(str::parse).collect();
    let is_right = |parts: &Vec<u32>| {
        parts.len() == published::CLASSES
            && parts.iter().all(|part| *part <= 1_000_000)
            && parts.iter().any(|part| *part > 0)
    };
    let names = published::names().join(":");
    parts.ok().filter(is_right).ok_or_else(|| value("mix", &format!("must be six whole numbers for {names}")))
}

#[cfg(test)]
mod tests {
    //! Guards against a file that means something else than it says.
    use super::*;

    const OWN: &str = r#"
        name = "own"
        nodes = 2
        cores = 8
        near_mib = 1000
        far_mib = 500
        memory_servers = 1
        [arrivals]
        window_s = 5
        [[class]]
        name = "train"
        count = 10
        cores = 2
        memory_mib = 600
        least = 0.5
        seconds = 100
        slowdown = [[0.5, 1.5]]
    "#;

    fn none(_: &str) -> Result<String, String> {
        Err("none".into())
    }

    #[test]
    fn built_in_scenarios_parse() {
        for (name, _) in BUILT_IN {
            let scenario = built_in(name).unwrap();
            assert!(scenario.name == name && scenario.counts.iter().sum::<usize>() > 500);
        }
        assert!(built_in("racks").is_none());
        let load = built_in("open").unwrap().arrivals;
        assert!(matches!(load, Arrivals::Poisson(per_s) if (0.1..10.0).contains(&per_s)), "{load:?}");
    }

    #[test]
    fn a_file_describes_its_own_cluster() {
        let scenario = parse(OWN, none).unwrap();
        assert_eq!((scenario.nodes, scenario.shape.memory_bytes, scenario.far_bytes), (2, 1000 * MIB, 500 * MIB));
        assert_eq!(scenario.kinds[0].run_time.at(0.75), 125.0);
        let read = |file: &str| Ok(format!("class,arrival_s\n{},1\n", file.trim_end_matches(".csv")));
        let scenario = parse(&OWN.replace("window_s = 5", "file = \"train.csv\""), read).unwrap();
        assert!(matches!(scenario.arrivals, Arrivals::Recorded(arrivals) if arrivals.len() == 1));
    }

    #[test]
    fn a_list_of_jobs_is_a_scenario() {
        let (cluster, _) = OWN.split_once("[arrivals]").unwrap();
        let trace = "[trace]\nfile = \"jobs.csv\"\nleast = 0.5\nslowdown = [[0.5, 1.5]]\n";
        let read = |_: &str| Ok("arrival_s,cores,memory_mib,seconds\n9,2,600,100\n5,1,100,60\n7,2,600,100\n".into());
        let scenario = parse(&format!("{cluster}{trace}"), read).unwrap();
        assert_eq!(scenario.counts, [2, 1]);
        assert_eq!((scenario.kinds[0].memory_bytes, scenario.kinds[0].run_time.at(0.75)), (600 * MIB, 125.0));
        let arrival = |class, at_s| Arrival { class, at_s };
        assert_eq!(scenario.arrivals, Arrivals::Recorded(vec![arrival(0, 4.0), arrival(1, 0.0), arrival(0, 2.0)]));
        // Other arrivals of the same jobs.
        let drawn = parse(&format!("{cluster}[arrivals]\nload = 0.5\n{trace}"), read).unwrap();
        assert!(matches!(drawn.arrivals, Arrivals::Poisson(_)) && drawn.counts == [2, 1]);
        let error = |text: String| parse(&text, read).unwrap_err().to_string();
        assert!(error(format!("{OWN}{trace}")).contains("`trace`"));
        assert!(error(format!("{cluster}{}", trace.replace("1.5", "nan"))).contains("`trace` needs"));
        assert!(error(format!("base = \"rack\"\nmix = \"1:1:1:1:1:1\"\n{cluster}{trace}")).contains("`trace`"));
        let short = parse(&format!("{cluster}{trace}"), |_| Ok("arrival_s,cores,memory_mib,seconds\n9,2".into()));
        assert!(short.unwrap_err().to_string().contains("jobs.csv: line 2"));
    }

    #[test]
    fn mistakes_are_named() {
        let check = |from: &str, to: &str, complaint: &str| {
            assert!(OWN.contains(from), "{from}");
            let error = parse(&OWN.replace(from, to), none).unwrap_err().to_string();
            assert!(error.contains(complaint), "{to}: {error}");
        };
        check("nodes", "nods", "nods");
        check("nodes = 2", "", "`nodes` is missing");
        check("near_mib = 1000", "near_mib = 99999999999999", "2^40");
        check("near_mib = 1000", "near_mib = -1", "near_mib");
        check("window_s = 5", "window_s = nan", "`arrivals`");
        check("window_s = 5", "per_s = inf", "`per_s` must be a number above 0");
        check("window_s = 5", "load = 0", "`load`");
        check("window_s = 5", "file = \"x.csv\"", "x.csv: none");
        check("[[0.5, 1.5]]", "[[0.5, nan]]", "class train");
        check("[[0.5, 1.5]]", "[[5, 1.5]]", "class train");
        check("seconds = 100", "", "class train");
        check("name = \"own\"", "name = \"own\"\nbase = \"rock\"", "\"testbed\"");
        check("name = \"own\"", "name = \"own\"\nbase = \"rack\"\nmix = \"1:2:3:4:5:6\"", "`class`");
        check("[arrivals]", "[rules]\nprofile_error = 2\n[arrivals]", "profile_error");
        assert!(parse("name = \"x\"\nbase = \"rack\"\nmix = \"1:2\"", none).unwrap_err().to_string().contains("six"));
        assert!(parse(&OWN[..120], none).is_err(), "cut short");
    }
}
