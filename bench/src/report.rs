//! From result lines to the page of all figures, with its plots, and to the terminal. The page of bars is in
//! [`crate::bar_page`].

use crate::bar::{Mean, Quorum};
use crate::built_in;
use crate::driver::describe;
use crate::experiment::{Experiment, Point, Value};
use crate::line::{ContenderResult, Line, PointResult, RatioResult, Status, read_all};
use crate::plot::{Plot, Series};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Figures worth a column, with their heading and what a unit of it divides by.
const FIGURES: &[(&str, &str, f64)] = &[
    ("cpu_ns_per_op", "CPU µs", 1e3),
    ("ns_per_fault", "µs/fault", 1e3),
    ("fault_ns_p50", "p50 µs", 1e3),
    ("fault_ns_p99", "p99 µs", 1e3),
    ("fault_s", "all faults s", 1.0),
    ("requests_per_s", "thousand/s", 1e3),
    ("latency_ns_p50", "p50 µs", 1e3),
    ("latency_ns_p90", "p90 µs", 1e3),
    ("latency_ns_p99", "p99 µs", 1e3),
    ("latency_ns_p99_9", "p99.9 µs", 1e3),
    ("short_ns", "short µs", 1e3),
    ("long_ns", "long µs", 1e3),
    ("crowded_ns", "crowded µs", 1e3),
    ("quiet_ns", "quiet µs", 1e3),
    ("many_ns", "many µs", 1e3),
    ("moves", "moves", 1.0),
    ("round_ns_p99", "p99 of rounds µs", 1e3),
    ("round_ns_max", "longest round µs", 1e3),
    ("misses_per_op", "misses", 1.0),
    ("map_misses_per_op", "of the map", 1.0),
    ("array_misses_per_op", "of the array", 1.0),
    ("misses", "all misses", 1.0),
    ("object_misses", "of them objects", 1.0),
    ("fetched_bytes", "fetched MiB", 1048576.0),
    ("demand_reads", "demand reads", 1.0),
    ("faults_major", "major faults", 1.0),
    ("pages_out", "pages out", 1.0),
    ("reclaim_ns_per_byte", "eviction ns/B", 1.0),
    ("reclaim_cycles_per_byte", "eviction cycles/B", 1.0),
    ("throttled", "waits for room", 1.0),
    ("pauses_over_1ms", "above 1 ms", 1.0),
    ("prefetch_accuracy", "prefetch accuracy", 1.0),
    ("prefetch_coverage", "prefetch coverage", 1.0),
    ("near_peak_bytes", "near peak MiB", 1048576.0),
    ("resident_peak_bytes", "resident peak MiB", 1048576.0),
    ("huge_bytes", "in huge pages MiB", 1048576.0),
    ("pool_moves", "moves", 1.0),
    ("near_share", "near share", 1.0),
    ("stored_bytes_per_page", "bytes per page", 1.0),
    ("over_best", "over the best", 1.0),
    ("cpu_user_s", "CPU user s", 1.0),
    ("cpu_system_s", "CPU system s", 1.0),
];

/// Nanoseconds, short.
fn time(ns: f64) -> String {
    match ns {
        ns if ns < 100.0 => format!("{ns:.2} ns"),
        ns if ns < 1000.0 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.2} µs", ns / 1e3),
        ns => format!("{:.2} ms", ns / 1e6),
    }
}

fn figure(value: f64) -> String {
    match value {
        v if v == v.trunc() && v.abs() < 1e15 => format!("{v:.0}"),
        v if v.abs() >= 100.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// Did a contender crash, hang or bring wrong data?
pub fn any_failed(line: &Line) -> bool {
    line.points.iter().flat_map(|p| &p.contenders).any(|c| matches!(c.status, Status::Failed { .. }))
}

/// Is every bar, bound, mean and quorum of the experiment held, at every point that it covers?
pub fn all_bars_held(experiment: &Experiment, line: &Line) -> bool {
    let points_hold = line.points.iter().all(|point| {
        let mut bars = experiment.bars.iter().filter(|bar| bar.covers(&bar.of, &bar.to, &point.parameters));
        let mut bounds = experiment.bounds.iter().filter(|bound| bound.covers(&bound.of, &point.parameters));
        bars.all(|bar| {
            let is_of_bar = |r: &&RatioResult| r.bar.is_some() && r.sides() == bar.sides();
            let found = point.ratios.iter().find(is_of_bar);
            found.is_some_and(|r| r.passes() == Some(true))
        }) && bounds.all(|bound| point.bounds.iter().any(|found| found.bound == *bound && found.passes()))
    });
    let mean_holds = |mean: &Mean| line.means.iter().any(|found| found.mean == *mean && found.passes() == Some(true));
    let quorum_holds = |quorum: &Quorum| line.quorums.iter().any(|found| found.quorum == *quorum && found.passes());
    points_hold
        && experiment.quorums.iter().all(quorum_holds)
        && experiment.means.iter().filter(|mean| mean.at_most.is_some()).all(mean_holds)
}

fn verdict(passes: bool) -> &'static str {
    if passes { "held" } else { "missed" }
}

/// A few lines for the terminal.
pub fn summary(line: &Line) -> String {
    let mut out = format!("{}  ({} runs, commit {})\n", line.experiment, line.runs, short(&line.commit));
    for point in &line.points {
        let floor = point.floor_ns.map_or(String::new(), |ns| format!("  (floor {} per {})", time(ns), point.unit));
        writeln!(out, "  {}{floor}", describe(&point.parameters, &line.axes)).ok();
        for contender in &point.contenders {
            let latency = latency(contender);
            writeln!(out, "    {:<13} {}{latency}", contender.name, outcome(contender, &point.unit)).ok();
        }
        for ratio in &point.ratios {
            let verdict = match (&ratio.bar, ratio.verdict()) {
                (Some(bar), Some(verdict)) => format!("  {verdict}, at most {}", bar.at_most),
                _ => String::new(),
            };
            let (r, low, high) = (ratio.ratio.ratio, ratio.ratio.low, ratio.ratio.high);
            writeln!(out, "    {}: {r:.3} ({low:.3} to {high:.3}){verdict}", ratio.sides()).ok();
        }
        for found in &point.bounds {
            let (bound, worst, verdict) = (&found.bound, found.worst, verdict(found.passes()));
            writeln!(out, "    {} {}: {worst:.3}  {verdict}, at most {}", bound.of, bound.figure, bound.at_most).ok();
        }
    }
    for found in &line.means {
        let (mean, value) = (&found.mean, found.ratio.map_or("not measured".into(), |ratio| format!("{ratio:.3}")));
        let judged = match (found.passes(), mean.at_most) {
            (Some(passes), Some(at_most)) => format!("  {}, at most {at_most}", verdict(passes)),
            _ => String::new(),
        };
        let judged = format!("{judged}{}", mean.aim.map_or(String::new(), |aim| format!("  aim {aim}")));
        let source = mean.source.as_ref().map_or(String::new(), |source| format!("{source}: "));
        writeln!(out, "  {source}{}, mean of {}: {value}{judged}", mean.sides(), mean.covered()).ok();
    }
    for found in &line.quorums {
        let (quorum, passes) = (&found.quorum, verdict(found.passes()));
        let points = format!("at {} of {} points", found.held, found.points);
        let (measured, at_most, share) = (quorum.measured(), quorum.at_most, quorum.share);
        writeln!(out, "  {measured} at most {at_most} {points}  {passes}, at least {share}").ok();
    }
    if let Some(why) = &line.baseline_why {
        writeln!(out, "  baseline: unavailable: {why}").ok();
    }
    out
}

/// How late answers came, if that was measured.
fn latency(contender: &ContenderResult) -> String {
    let percentiles = [
        ("p50", "latency_ns_p50"),
        ("p90", "latency_ns_p90"),
        ("p99", "latency_ns_p99"),
        ("p99.9", "latency_ns_p99_9"),
    ];
    let found = percentiles.iter().filter_map(|(name, figure)| Some((name, contender.figures.get(*figure)?)));
    found.map(|(name, ns)| format!(", {name} {}", time(*ns))).collect()
}

fn short(commit: &str) -> &str {
    commit.get(..10).unwrap_or(commit)
}

fn outcome(contender: &ContenderResult, unit: &str) -> String {
    match (&contender.status, &contender.summary) {
        (Status::Ok, Some(s)) => format!("{} per {unit} (spread {:.0} %)", time(s.median), s.spread * 100.0),
        (Status::Ok, None) => "no samples".into(),
        (Status::Unavailable { why, remedy }, _) => format!("unavailable: {why}; {remedy}"),
        (Status::Failed { why }, _) => format!("FAILED: {why}"),
    }
}

/// Writes the page of all figures at `output` and its plots beside it.
pub fn write(results: &Path, output: &Path) -> Result<()> {
    let lines = read(results)?;
    let folder = make_folder(output)?;
    let experiments = built_in::all()?;
    let newest = newest(&lines, &experiments);
    for line in &newest {
        fs::write(folder.join(plot_name(&heading(line, &experiments))), plot(line).svg())?;
    }
    fs::write(output, page(&newest, &experiments)).with_context(|| format!("cannot write {}", output.display()))
}

/// All result lines of a folder; it is an error if there are none.
pub(crate) fn read(results: &Path) -> Result<Vec<Line>> {
    let lines = read_all(results)?;
    ensure!(!lines.is_empty(), "no results in {}; run `farfield bench run all` first", results.display());
    Ok(lines)
}

/// Makes the folder of a page that is to be written. Returns it.
pub(crate) fn make_folder(output: &Path) -> Result<&Path> {
    ensure!(output.file_name().is_some(), "the output is no file name");
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

fn plot_name(heading: &str) -> String {
    format!("{}.svg", heading.replace(['/', ' '], "-"))
}

/// What a line says less than its experiment would: swept parameters of which it has one value.
fn fixed(line: &Line, experiments: &[Experiment]) -> Point {
    let swept = experiments.iter().find(|e| e.name == line.experiment).map(|e| e.axes(false)).unwrap_or_default();
    let values = line.points.first().map(|point| point.parameters.clone()).unwrap_or_default();
    values.into_iter().filter(|(key, _)| swept.contains(key) && !line.axes.contains(key)).collect()
}

/// Its name on the page.
fn heading(line: &Line, experiments: &[Experiment]) -> String {
    let fixed = fixed(line, experiments);
    if fixed.is_empty() { line.experiment.clone() } else { format!("{} {}", line.experiment, describe(&fixed, &[])) }
}

/// The newest run of each experiment, and older ones of values of its parameters that newer ones do not have; smoke runs only where there is no full
/// one.
pub(crate) fn newest<'a>(lines: &'a [Line], experiments: &[Experiment]) -> Vec<&'a Line> {
    let mut chosen: Vec<(&Line, Point)> = Vec::new();
    let (smoke, full): (Vec<&Line>, Vec<&Line>) = lines.iter().partition(|line| line.quick);
    for line in full.into_iter().rev().chain(smoke.into_iter().rev()) {
        let own = fixed(line, experiments);
        let has_all = |(newer, fixed): &(&Line, Point)| {
            let covers = fixed.iter().all(|(key, value)| own.get(key) == Some(value));
            newer.experiment == line.experiment && (covers || line.quick)
        };
        if !chosen.iter().any(has_all) {
            chosen.push((line, own));
        }
    }
    chosen.sort_by(|(one, fixed), (other, others)| {
        one.experiment.cmp(&other.experiment).then_with(|| describe(fixed, &[]).cmp(&describe(others, &[])))
    });
    chosen.into_iter().map(|(line, _)| line).collect()
}

/// The whole page.
fn page(lines: &[&Line], experiments: &[Experiment]) -> String {
    let mut out = String::from(
        "# All figures\n\n\
         Written by `farfield bench report --full` from `bench/results/*.jsonl`. Every ratio compares samples taken in \
         turns in one run; below 1 Farfield is faster. *Low* and *high* are the extremes over pairs of neighbouring \
         samples. The floor is what the probes of the same run allow at best. How it is measured: \
         `docs/design/bench.md`.\n\n## Bars\n\n",
    );
    out += "| experiment | at | ratio | measured | low to high | bar | aim | |\n|---|---|---|---|---|---|---|---|\n";
    for line in lines {
        let name = heading(line, experiments);
        for point in &line.points {
            for ratio in &point.ratios {
                let Some(bar) = &ratio.bar else { continue };
                let verdict = ratio.verdict().unwrap_or_default();
                let verdict = if ratio.passes() == Some(true) { verdict } else { format!("**{verdict}**") };
                let aim = bar.aim.map_or("".into(), |aim| format!("{aim}"));
                writeln!(
                    out,
                    "| [{}](#{}) | {} | {} | {:.3} | {:.3} to {:.3} | ≤ {} | {aim} | {verdict} |",
                    name,
                    anchor(&name),
                    described(point, line),
                    ratio.sides(),
                    ratio.ratio.ratio,
                    ratio.ratio.low,
                    ratio.ratio.high,
                    bar.at_most,
                )
                .ok();
            }
            for found in &point.bounds {
                let what = found.bound.subject();
                let at = described(point, line);
                let bar = format!("≤ {}", found.bound.at_most);
                bound_row(&mut out, &name, &at, &what, Some(found.worst), &bar, found.passes());
            }
        }
        for found in &line.means {
            if let (Some(passes), Some(at_most)) = (found.passes(), found.mean.at_most) {
                let (at, what, bar) = (found.mean.covered(), found.mean.subject(), format!("≤ {at_most}"));
                bound_row(&mut out, &name, &at, &what, found.ratio, &bar, passes);
            }
        }
        for found in &line.quorums {
            let quorum = &found.quorum;
            let what = quorum.subject();
            let at = if quorum.at.is_empty() { "all".into() } else { describe(&quorum.at, &[]) };
            let (value, bar) = (found.held as f64 / found.points.max(1) as f64, format!("≥ {}", quorum.share));
            bound_row(&mut out, &name, &at, &what, Some(value), &bar, found.passes());
        }
    }
    for line in lines {
        section(&mut out, line, experiments);
    }
    out
}

/// A row of the table of bars without spread and aim.
fn bound_row(out: &mut String, name: &str, at: &str, what: &str, value: Option<f64>, bar: &str, passes: bool) {
    let verdict = match (value, passes) {
        (None, _) => "not measured",
        (_, true) => "held",
        (_, false) => "**missed**",
    };
    let value = value.map_or("–".into(), |value| format!("{value:.3}"));
    writeln!(out, "| [{name}](#{}) | {at} | {what} | {value} | | {bar} | | {verdict} |", anchor(name)).ok();
}

/// What a heading is called in a link.
fn anchor(heading: &str) -> String {
    let dashed = heading.to_lowercase().replace(' ', "-");
    dashed.chars().filter(|c| c.is_alphanumeric() || ['-', '_'].contains(c)).collect()
}

fn described(point: &PointResult, line: &Line) -> String {
    if line.axes.is_empty() { String::new() } else { describe(&point.parameters, &line.axes) }
}

fn section(out: &mut String, line: &Line, experiments: &[Experiment]) {
    let name = heading(line, experiments);
    writeln!(out, "\n## {name}\n").ok();
    if let Some(experiment) = experiments.iter().find(|e| e.name == line.experiment) {
        writeln!(out, "{}\n", experiment.about).ok();
        writeln!(out, "Limit: {}\n", experiment.physics).ok();
    }
    if !line.limits.is_empty() {
        let limits =
            line.limits.iter().map(|(name, ns)| format!("{name} {}", time(*ns))).collect::<Vec<_>>().join(", ");
        writeln!(out, "Measured in this run, per page: {limits}.\n").ok();
    }
    if line.baseline != "ok" {
        let why = line.baseline_why.as_deref().unwrap_or("unknown");
        writeln!(out, "> **Baseline unavailable**: {why}\n").ok();
    }
    if line.quick {
        writeln!(out, "> Smoke run: small sizes, one sample. No figure to quote.\n").ok();
    }
    writeln!(out, "![{name}]({})\n", plot_name(&name)).ok();
    table(out, line);
    means(out, line);
    receipt(out, line);
}

fn table(out: &mut String, line: &Line) {
    let present = |name: &str| line.points.iter().flat_map(|p| &p.contenders).any(|c| c.figures.contains_key(name));
    let columns: Vec<_> = FIGURES.iter().filter(|(name, ..)| present(name)).collect();
    *out += "| at | contender | time | spread | / swap-zram | / native | / floor |";
    columns.iter().for_each(|(_, heading, _)| *out += &format!(" {heading} |"));
    *out += "\n|---|---|---|---|---|---|---|";
    columns.iter().for_each(|_| *out += "---|");
    out.push('\n');
    for point in &line.points {
        for contender in &point.contenders {
            let Some(summary) = contender.summary.filter(|_| contender.status == Status::Ok) else {
                let outcome = outcome(contender, &point.unit).replace('|', "\\|").replace('\n', " ");
                writeln!(out, "| {} | {} | {outcome} |", described(point, line), contender.name).ok();
                continue;
            };
            let over = |to: &str| {
                let median = |c: &ContenderResult| Some(c.summary.filter(|_| c.status == Status::Ok)?.median);
                let other = point.contenders.iter().find(|c| c.name == to).and_then(median);
                other.filter(|_| contender.name != to).map_or("".into(), |o| format!("{:.3}", summary.median / o))
            };
            // All near does not miss: the floor of missing says nothing of it.
            let floor = point.floor_ns.filter(|ns| *ns > 0.0 && contender.name != "native");
            write!(
                out,
                "| {} | {} | {} per {} | {:.0} % | {} | {} | {} |",
                described(point, line),
                contender.name,
                time(summary.median),
                point.unit,
                summary.spread * 100.0,
                over("swap-zram"),
                over("native"),
                floor.map_or("".into(), |ns| format!("{:.2}", summary.median / ns)),
            )
            .ok();
            for (name, _, divisor) in &columns {
                let cell = contender.figures.get(*name).map_or(String::new(), |v| figure(v / divisor));
                write!(out, " {cell} |").ok();
            }
            out.push('\n');
        }
    }
}

/// Means that are no bars.
fn means(out: &mut String, line: &Line) {
    let said: Vec<_> = line.means.iter().filter(|found| found.mean.at_most.is_none()).collect();
    if said.is_empty() {
        return;
    }
    *out += "\n| mean of | cost of | ratio | |\n|---|---|---|---|\n";
    for found in said {
        let value = found.ratio.map_or("–".into(), |value| format!("{value:.3}"));
        let source = found.mean.source.as_deref().unwrap_or_default();
        let aim = found.mean.aim.map_or(String::new(), |aim| format!(" (aim {aim})"));
        writeln!(out, "| {} | {source} | {} | {value}{aim} |", found.mean.covered(), found.mean.sides()).ok();
    }
}

fn receipt(out: &mut String, line: &Line) {
    let machine = &line.machine;
    let fixed: Vec<String> = line.points.first().map_or(Vec::new(), |point| {
        let fixed = point.parameters.iter().filter(|(key, _)| !line.axes.contains(key));
        fixed.map(|(key, value)| format!("{key}={value}")).collect()
    });
    writeln!(
        out,
        "\n`farfield bench run {}{} --runs {} --seed {}` · {} · commit {}{} · {}, {} cores, {} GiB{}, Linux {}, huge pages \
         {}, page-cluster {}, zram {} · load {:.2} · {}",
        line.experiment,
        if line.quick { " --quick" } else { "" },
        line.runs,
        line.seed,
        fixed.join(" "),
        short(&line.commit),
        if line.dirty { " with changes" } else { "" },
        machine.cpu,
        machine.cores,
        (machine.memory_bytes as f64 / f64::from(1 << 30)).round(),
        match (machine.virtual_machine, machine.is_warmed) {
            (true, true) => ", virtual, its memory warmed",
            (true, false) => ", virtual",
            (false, _) => "",
        },
        machine.kernel,
        machine.huge_pages,
        machine.page_cluster,
        machine.zram_compressors,
        machine.load,
        line.time,
    )
    .ok();
}

/// Figures of this name and a percent of the time are a course.
const COURSE: &str = "whole_share_";

/// What a run shows over time, if it does (Atlas, Figure 7).
fn course(line: &Line) -> Option<Plot> {
    let moments = |contender: &ContenderResult| -> BTreeMap<u32, f64> {
        let moment = |(name, value): (&String, &f64)| Some((name.strip_prefix(COURSE)?.parse().ok()?, *value));
        contender.figures.iter().filter_map(moment).collect()
    };
    let mut places: Vec<u32> = Vec::new();
    let mut courses = Vec::new();
    for point in &line.points {
        for contender in &point.contenders {
            let course = moments(contender);
            if contender.status == Status::Ok && !course.is_empty() {
                places.extend(course.keys());
                courses.push((format!("{} {}", contender.name, described(point, line)), course));
            }
        }
    }
    places.sort_unstable();
    places.dedup();
    let series = |(name, course): (String, BTreeMap<u32, f64>)| Series {
        name: name.trim_end().into(),
        values: places.iter().map(|place| course.get(place).map(|share| (*share, *share, *share))).collect(),
    };
    (!courses.is_empty()).then(|| Plot {
        title: line.experiment.clone(),
        places: places.iter().map(u32::to_string).collect(),
        lines: true,
        x_label: "percent of the time".into(),
        y_label: "share of pages that come whole".into(),
        series: courses.into_iter().map(series).collect(),
    })
}

fn plot(line: &Line) -> Plot {
    course(line).unwrap_or_else(|| times(line))
}

fn times(line: &Line) -> Plot {
    let mut names: Vec<&str> = Vec::new();
    for contender in line.points.iter().flat_map(|p| &p.contenders) {
        if !names.contains(&contender.name.as_str()) {
            names.push(&contender.name);
        }
    }
    let value = |point: &PointResult, name: &str| {
        let contender = point.contenders.iter().find(|c| c.name == name && c.status == Status::Ok)?;
        contender.summary.map(|s| (s.median, s.min, s.max))
    };
    let largest = line.points.iter().flat_map(|p| names.iter().filter_map(move |n| value(p, n))).map(|v| v.2);
    let (divisor, unit) = if largest.fold(0.0, f64::max) >= 2000.0 { (1e3, "µs") } else { (1.0, "ns") };
    let scaled = |(a, b, c): (f64, f64, f64)| (a / divisor, b / divisor, c / divisor);
    let numbers = |axis: &String| {
        line.points.iter().all(|p| matches!(p.parameters.get(axis), Some(Value::Number(_)))) && line.points.len() > 2
    };
    let lines = line.axes.len() == 1 && line.axes.iter().all(numbers);
    let place = |point: &PointResult| match &line.axes[..] {
        [axis] => point.parameters.get(axis).map_or(String::new(), ToString::to_string),
        _ => describe(&point.parameters, &line.axes),
    };
    let per = line.points.first().map_or("operation", |p| p.unit.as_str());
    let mixed = line.points.iter().any(|p| p.unit != per);
    Plot {
        title: line.experiment.clone(),
        places: if line.axes.is_empty() { vec![String::new()] } else { line.points.iter().map(place).collect() },
        lines,
        x_label: line.axes.join(", "),
        y_label: format!("{unit} per {}", if mixed { "operation" } else { per }),
        series: names
            .iter()
            .map(|name| Series {
                name: name.to_string(),
                values: line.points.iter().map(|p| value(p, name).map(scaled)).collect(),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a page that shows the wrong run, hides that a baseline is missing, or calls a missed bar held.
    use super::*;
    use crate::bar::QuorumResult;

    /// A line as the driver wrote it, shortened: one point held, one missed, one contender failed.
    const FIXTURE: &str = include_str!("../tests/fixture.jsonl");

    fn fixture() -> Line {
        serde_json::from_str(FIXTURE.trim()).unwrap()
    }

    #[test]
    fn page_of_a_line_shows_bars_ratios_and_receipt() {
        let line = fixture();
        let page = page(&[&line], &built_in::all().unwrap());
        for expected in [
            "| [paging/random](#pagingrandom) | compressible=0 | farfield / swap-zram | 0.450 | 0.450 to 0.500 | ≤ 0.5 | 0.4 | held |",
            "| [paging/random](#pagingrandom) | compressible=1 | farfield / swap-zram | 0.600 | 0.600 to 0.600 | ≤ 0.5 | 0.4 | **missed** |",
            "| compressible=0 | swap-zram | 8.00 µs per access | 5 % |  | 160.000 | 3.05 |",
            "| compressible=0 | swap-file | unavailable: swap is already active on /dev/sda2; run swapoff",
            "| compressible=1 | farfield-tcp | FAILED: 7 reads brought wrong data |",
            "signal_fault 3.50 µs",
            "![paging/random](paging-random.svg)",
            "--runs 3 --seed 42",
            "commit 0123456789 with changes",
        ] {
            assert!(page.contains(expected), "{expected}\n---\n{page}");
        }
        assert!(!page.contains("Smoke run") && !page.contains("Baseline unavailable"));
    }

    #[test]
    fn a_run_with_moments_is_drawn_over_time() {
        let mut line = fixture();
        assert!(course(&line).is_none());
        let figures = &mut line.points[1].contenders[0].figures;
        figures.extend([("whole_share_50".to_string(), 0.25), ("whole_share_100".to_string(), 0.5)]);
        let plot = course(&line).unwrap();
        assert_eq!(plot.places, ["50", "100"]);
        assert_eq!(plot.series.len(), 1);
        assert_eq!(plot.series[0].name, "native compressible=1");
        assert_eq!(plot.series[0].values, [Some((0.25, 0.25, 0.25)), Some((0.5, 0.5, 0.5))]);
    }

    #[test]
    fn missing_baseline_and_smoke_runs_are_said() {
        let mut line = fixture();
        line.quick = true;
        line.baseline = "unavailable".into();
        line.baseline_why = Some("no zram; modprobe zram".into());
        let page = page(&[&line], &built_in::all().unwrap());
        assert!(page.contains("**Baseline unavailable**: no zram; modprobe zram"));
        assert!(page.contains("Smoke run"));
        assert!(summary(&line).contains("baseline: unavailable: no zram"));
    }

    #[test]
    fn newest_full_run_wins_over_older_and_over_smoke_runs() {
        let lines: Vec<Line> = [("1", false), ("2", false), ("3", true)]
            .into_iter()
            .map(|(time, quick)| Line { time: time.into(), quick, ..fixture() })
            .collect();
        let newest = |lines| newest(lines, &[]).iter().map(|line| line.time.clone()).collect::<Vec<_>>();
        assert_eq!(newest(&lines), ["2"]);
        assert_eq!(newest(&lines[2..]), ["3"]);
    }

    #[test]
    fn older_runs_stay_for_values_that_newer_ones_do_not_have() {
        let experiments = built_in::all().unwrap();
        let run = |time: &str, zipf: Option<u64>, quick| {
            let mut line = Line { experiment: "aifm/hash-near".into(), time: time.into(), quick, ..fixture() };
            line.axes = vec!["near_percent".into()];
            if let Some(zipf) = zipf {
                line.points[0].parameters.insert("zipf_percent".into(), Value::Number(zipf));
            } else {
                line.axes.push("zipf_percent".into());
            }
            line
        };
        let newest =
            |lines: &[Line]| newest(lines, &experiments).iter().map(|line| line.time.clone()).collect::<Vec<_>>();
        let lines =
            [run("1", Some(80), false), run("2", Some(0), false), run("3", Some(0), false), run("4", None, true)];
        assert_eq!(newest(&lines), ["3", "1"]);
        assert_eq!(heading(&lines[0], &experiments), "aifm/hash-near zipf_percent=80");
        let lines = [run("1", Some(80), false), run("2", None, false), run("3", Some(0), false)];
        assert_eq!(newest(&lines), ["2", "3"]);
    }

    #[test]
    fn bars_are_held_only_if_measured() {
        let experiment = built_in::all().unwrap().into_iter().find(|e| e.name == "paging/random").unwrap();
        let mut line = fixture();
        assert!(any_failed(&line));
        assert!(!all_bars_held(&experiment, &line));
        line.points.truncate(1);
        // Bars over TCP and against a file have no ratio in the line: unknown is not held.
        assert!(!all_bars_held(&experiment, &line));
        let only_zram = Experiment { bars: experiment.bars[..1].to_vec(), ..experiment };
        assert!(all_bars_held(&only_zram, &line));
    }

    #[test]
    fn a_quorum_is_said_and_judged() {
        let text = "of = 'farfield'\nfigure = 'over_best'\nat_most = 1.05\nshare = 0.9";
        let quorum: Quorum = toml::from_str(text).unwrap();
        let mut experiment = built_in::all().unwrap().into_iter().find(|e| e.name == "paging/random").unwrap();
        (experiment.bars, experiment.quorums) = (vec![], vec![quorum.clone()]);
        let mut line = fixture();
        assert!(!all_bars_held(&experiment, &line), "what was not measured is not held");
        line.quorums = vec![QuorumResult { quorum, points: 10, held: 9 }];
        assert!(all_bars_held(&experiment, &line));
        assert!(summary(&line).contains("farfield over_best at most 1.05 at 9 of 10 points  held, at least 0.9"));
        let row = "| all | farfield over_best ≤ 1.05, part of the points | 0.900 | | ≥ 0.9 | | held |";
        let text = page(&[&line], &[experiment.clone()]);
        assert!(text.contains(row), "{text}");
        line.quorums[0].held = 8;
        assert!(!all_bars_held(&experiment, &line));
    }

    #[test]
    fn line_survives_a_round_trip() {
        let line = fixture();
        let again: Line = serde_json::from_str(&serde_json::to_string(&line).unwrap()).unwrap();
        assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&line).unwrap());
    }

    #[test]
    fn page_and_plots_are_written_where_they_link() {
        let folder = std::env::temp_dir().join(format!("farfield-bench-report-{}", std::process::id()));
        crate::line::append(&folder.join("results"), &fixture()).unwrap();
        // A line of another harness, and a blank one.
        fs::write(folder.join("results/other.jsonl"), "{\"what\":1}\n\n").unwrap();
        write(&folder.join("results"), &folder.join("benchmarks.md")).unwrap();
        let page = fs::read_to_string(folder.join("benchmarks.md")).unwrap();
        let link = page.split("](").find_map(|part| Some(part.split_once(".svg)")?.0)).unwrap();
        assert!(folder.join(format!("{link}.svg")).is_file());
        fs::write(folder.join("results/other.jsonl"), "{\"schema\":1}\n").unwrap();
        let error = write(&folder.join("results"), &folder.join("benchmarks.md")).unwrap_err();
        assert!(format!("{error:#}").contains("other.jsonl:1"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
