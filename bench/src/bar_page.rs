//! Page of bars, docs/benchmarks.md: all that must hold, from the newest receipts.
//!
//! A bar that is missed has a row, for all points that it covers, with the sentence in `[missed]` of the parameter file. Bars of
//! one experiment that are held share a row, which shows the nearest. All other figures are on the page of [`crate::report`].

use crate::built_in;
use crate::driver::describe;
use crate::experiment::Experiment;
use crate::line::{Line, file_name};
use crate::report::{make_folder, newest, read};
use anyhow::{Context, Result};
use std::fmt::Write;
use std::fs;
use std::path::Path;

const NO_REASON: &str = "Not explained yet.";

/// Writes the page of bars at `output`, with links to receipts and parameter files.
pub fn write(results: &Path, output: &Path) -> Result<()> {
    let lines = read(results)?;
    let folder = make_folder(output)?;
    let experiments = built_in::all()?;
    let text = page(&newest(&lines, &experiments), &experiments, &PageLinks { folder, results });
    fs::write(output, text).with_context(|| format!("cannot write {}", output.display()))
}

/// Links from a page in `folder` to what lies around the folder of results.
struct PageLinks<'a> {
    folder: &'a Path,
    results: &'a Path,
}

impl PageLinks<'_> {
    /// Returns a link to that file, seen from the folder of results; the text alone if there is no such file.
    fn to(&self, text: &str, file: &str) -> String {
        match relative(self.folder, &self.results.join(file)) {
            Some(path) => format!("[{text}]({path})"),
            None => text.to_owned(),
        }
    }

    /// Returns the name of an experiment, with a link to its parameter file.
    fn parameters(&self, experiment: &str) -> String {
        self.to(experiment, &format!("../experiments/{experiment}.toml"))
    }
}

/// Returns the path to a file as seen from a folder. `None` unless both exist.
fn relative(folder: &Path, file: &Path) -> Option<String> {
    let (folder, file) = (folder.canonicalize().ok()?, file.canonicalize().ok()?);
    let shared = folder.components().zip(file.components()).take_while(|(one, other)| one == other).count();
    let up = folder.components().skip(shared).map(|_| "..".to_owned());
    let down = file.components().skip(shared).map(|name| name.as_os_str().to_string_lossy().into_owned());
    Some(up.chain(down).collect::<Vec<_>>().join("/"))
}

/// One bar, with its values at all points that it covers.
struct BarRow {
    /// What the bar speaks of, as `[missed]` names it.
    subject: String,
    /// Points that the bar is for; empty if it is for all.
    at: String,
    /// Largest value that passes; the smallest one if `is_least`.
    limit: f64,
    is_least: bool,
    aim: String,
    values: Vec<f64>,
    held: usize,
    /// Receipts that the values are from.
    receipts: Vec<String>,
}

impl BarRow {
    /// Creates the row of a bar that nothing was measured for.
    fn new(subject: String, at: String, limit: f64) -> BarRow {
        let (aim, values, receipts) = (String::new(), Vec::new(), Vec::new());
        BarRow { subject, at, limit, is_least: false, aim, values, held: 0, receipts }
    }

    /// Is the bar held wherever it was measured, and was it?
    fn passes(&self) -> bool {
        self.held > 0 && self.held == self.values.len()
    }

    /// Returns the smallest and the largest value as text.
    fn measured(&self) -> String {
        let smallest = self.values.iter().copied().reduce(f64::min);
        let largest = self.values.iter().copied().reduce(f64::max);
        let text = |value: f64| format!("{value:.3}");
        match (smallest.map(text), largest.map(text)) {
            (Some(one), Some(other)) if one == other => one,
            (Some(one), Some(other)) => format!("{one} to {other}"),
            _ => "not measured".into(),
        }
    }

    /// Returns how near the worst value is to what the bar allows: 1 at the bar, less if it is held.
    fn nearness(&self) -> f64 {
        let worst = |value: &f64| if self.is_least { self.limit / value } else { value / self.limit };
        // Nothing of nothing is 0 over 0.
        self.values.iter().map(worst).filter(|nearness| !nearness.is_nan()).fold(0.0, f64::max)
    }

    /// Returns what the bar speaks of, and where.
    fn subject_and_place(&self) -> String {
        if self.at.is_empty() { self.subject.clone() } else { format!("{} ({})", self.subject, self.at) }
    }

    /// Returns the bar as text.
    fn bar(&self) -> String {
        format!("{} {}", if self.is_least { '≥' } else { '≤' }, self.limit)
    }

    /// Returns the cells up to where the bar is held.
    fn cells(&self) -> String {
        let held =
            if self.values.is_empty() { "–".into() } else { format!("{} of {}", self.held, self.values.len()) };
        format!("{} | {} | {} | {} | {held}", self.subject_and_place(), self.bar(), self.aim, self.measured())
    }
}

/// Bars of one experiment that are still being collected from its receipts.
#[derive(Default)]
struct BarRows(Vec<BarRow>);

impl BarRows {
    /// Adds a value to the row of its bar. A bar without a value only has a row.
    fn add(&mut self, bar: BarRow, value: Option<f64>, passes: bool, receipt: &str) {
        let key = |row: &BarRow| (row.subject.clone(), row.at.clone(), row.bar(), row.aim.clone());
        let index = self.0.iter().position(|row| key(row) == key(&bar)).unwrap_or_else(|| {
            self.0.push(bar);
            self.0.len() - 1
        });
        let row = &mut self.0[index];
        if let Some(value) = value {
            row.values.push(value);
            row.held += usize::from(passes);
            if !row.receipts.iter().any(|known| known == receipt) {
                row.receipts.push(receipt.to_owned());
            }
        }
    }

    /// Adds all bars that a line has.
    fn add_line(&mut self, line: &Line) {
        let receipt = receipt(line);
        for point in &line.points {
            for ratio in &point.ratios {
                if let Some(bar) = &ratio.bar {
                    let row = BarRow::new(ratio.sides(), describe(&bar.at, &[]), bar.at_most);
                    let aim = bar.aim.map_or(String::new(), |aim| aim.to_string());
                    self.add(BarRow { aim, ..row }, Some(ratio.ratio.ratio), ratio.passes() == Some(true), &receipt);
                }
            }
            for found in &point.bounds {
                let bound = &found.bound;
                let row = BarRow::new(bound.subject(), describe(&bound.at, &[]), bound.at_most);
                self.add(row, Some(found.worst), found.passes(), &receipt);
            }
        }
        for found in &line.means {
            let mean = &found.mean;
            if let (Some(passes), Some(bar)) = (found.passes(), mean.at_most) {
                let at = if mean.at.is_empty() && mean.except.is_empty() { String::new() } else { mean.covered() };
                let aim = mean.aim.map_or(String::new(), |aim| aim.to_string());
                self.add(BarRow { aim, ..BarRow::new(mean.subject(), at, bar) }, found.ratio, passes, &receipt);
            }
        }
        for found in &line.quorums {
            let quorum = &found.quorum;
            let row = BarRow::new(quorum.subject(), describe(&quorum.at, &[]), quorum.share);
            let share = (found.points > 0).then(|| found.held as f64 / found.points as f64);
            self.add(BarRow { is_least: true, ..row }, share, found.passes(), &receipt);
        }
    }
}

/// Returns the name of a receipt: its commit, or that it is a smoke run.
fn receipt(line: &Line) -> String {
    if line.quick { "smoke run".into() } else { line.commit.get(..7).unwrap_or(&line.commit).into() }
}

/// Returns the whole page.
fn page(lines: &[&Line], experiments: &[Experiment], links: &PageLinks<'_>) -> String {
    let (mut missed, mut held, mut unjudged) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bars, mut bars_held) = (0, 0);
    for lines in lines.chunk_by(|one, other| one.experiment == other.experiment) {
        let name = &lines[0].experiment;
        let mut rows = BarRows::default();
        lines.iter().for_each(|line| rows.add_line(line));
        if rows.0.is_empty() {
            unjudged.push(links.to(name, &file_name(name)));
        }
        bars += rows.0.len();
        bars_held += rows.0.iter().filter(|row| row.passes()).count();
        let receipts_of = |rows: &[BarRow]| {
            let mut all: Vec<&str> = rows.iter().flat_map(|row| &row.receipts).map(String::as_str).collect();
            all.sort_unstable();
            all.dedup();
            links.to(&if all.is_empty() { receipt(lines[0]) } else { all.join(", ") }, &file_name(name))
        };
        let of_experiment = rows.0.len();
        let (passed, failed): (Vec<BarRow>, Vec<BarRow>) = rows.0.into_iter().partition(BarRow::passes);
        let experiment = experiments.iter().find(|experiment| experiment.name == *name);
        for row in failed {
            let reason = experiment.and_then(|experiment| experiment.missed.get(&row.subject));
            let (cells, reason) = (row.cells(), reason.map_or(NO_REASON, String::as_str));
            missed.push(format!("| {} | {cells} | {reason} | {} |", links.parameters(name), receipts_of(&[row])));
        }
        if let Some(nearest) = passed.iter().max_by(|one, other| one.nearness().total_cmp(&other.nearness())) {
            let (subject, bar, measured) = (nearest.subject_and_place(), nearest.bar(), nearest.measured());
            let held_of = format!("{} of {of_experiment} | {subject} | {bar} | {measured}", passed.len());
            held.push(format!("| {} | {held_of} | {} |", links.parameters(name), receipts_of(&passed)));
        }
    }
    let mut out = format!(
        "# Benchmarks\n\n\
         Written by `farfield bench report` from the newest receipts; do not edit. {} of {} bars are held.\n\n\
         A ratio compares samples taken in turns in one run; below 1 the first contender is faster. A bar\n\
         must hold, an aim should. *Measured* is the smallest to the largest value of all points of a bar,\n\
         and *held at* counts these points. Of bars that are held, the one that is nearest to its bound is shown.\n\
         {} says how all of this is measured.\n\
         `farfield bench report --full` writes all other figures and the plots into `target/benchmarks`.\n",
        bars_held,
        bars,
        links.to("bench.md", "../../docs/design/bench.md"),
    );
    let columns = "| experiment | what is measured | bar | aim | measured | held at | why | receipt |";
    table(&mut out, "Missed", columns, &missed);
    table(&mut out, "Held", "| experiment | bars held | the nearest | bar | measured | receipt |", &held);
    if !unjudged.is_empty() {
        writeln!(out, "\n## Without a bar\n\nReceipts that nothing judges: {}.", unjudged.join(", ")).ok();
    }
    out
}

fn table(out: &mut String, heading: &str, columns: &str, rows: &[String]) {
    if rows.is_empty() {
        return;
    }
    let rule = "|---".repeat(columns.matches('|').count() - 1);
    writeln!(out, "\n## {heading}\n\n{columns}\n{rule}|\n{}", rows.join("\n")).ok();
}

#[cfg(test)]
mod tests {
    //! Guards against a page that calls a missed bar held, grows until nobody reads it, or links to nothing.
    use super::*;
    use crate::bar::{Mean, MeanResult};

    /// Line as the driver wrote it, shortened: one point held, one missed, one contender failed.
    const FIXTURE: &str = include_str!("../tests/fixture.jsonl");
    const PAGE_LINES_MAX: usize = 190;

    fn fixture() -> Line {
        serde_json::from_str(FIXTURE.trim()).unwrap()
    }

    fn unlinked(lines: &[&Line]) -> String {
        let nowhere = Path::new("/nonexistent");
        page(lines, &built_in::all().unwrap(), &PageLinks { folder: nowhere, results: nowhere })
    }

    #[test]
    fn points_of_a_bar_share_a_row_and_one_miss_is_a_miss() {
        let mut line = fixture();
        let check = |page: &str, heading: &str, row: &str| {
            let section = page.split("\n## ").find(|section| section.starts_with(heading));
            assert!(section.is_some_and(|section| section.contains(row)), "{heading}: {row}\n---\n{page}");
        };
        let missed = unlinked(&[&line]);
        check(&missed, "Missed", "| paging/random | farfield / swap-zram | ≤ 0.5 | 0.4 | 0.450 to 0.600 | 1 of 2 | ");
        check(&missed, "Missed", " | 0123456 |");
        assert!(missed.contains("0 of 1 bars are held") && !missed.contains("## Held"), "{missed}");
        line.points.truncate(1);
        let row = "| paging/random | 1 of 1 | farfield / swap-zram | ≤ 0.5 | 0.450 | 0123456 |";
        check(&unlinked(&[&line]), "Held", row);
        line.quick = true;
        check(&unlinked(&[&line]), "Held", "| 0.450 | smoke run |");
        line.points.clear();
        check(&unlinked(&[&line]), "Without", "paging/random.");
    }

    #[test]
    fn a_mean_that_was_not_measured_is_missed_unless_another_receipt_has_it() {
        let mean: Mean = toml::from_str("of = 'heap'\nto = 'native'\nat_most = 1.1").unwrap();
        let run = |ratio| {
            let mut line = fixture();
            line.points.clear();
            line.means = vec![MeanResult { mean: mean.clone(), ratio }];
            line
        };
        let row =
            "| paging/random | heap / native, mean | ≤ 1.1 |  | not measured | – | Not explained yet. | 0123456 |";
        assert!(unlinked(&[&run(None)]).contains(row));
        let both = unlinked(&[&run(None), &run(Some(1.0))]);
        assert!(both.contains("| 1 of 1 | heap / native, mean | ≤ 1.1 | 1.000 | 0123456 |"), "{both}");
        assert!(!both.contains("## Missed"), "{both}");
    }

    #[test]
    fn of_bars_that_are_held_the_nearest_is_shown() {
        let run = |ratios: [f64; 3]| {
            let mut line = fixture();
            line.points.clear();
            let means = [("a", 2.0), ("b", 1.1), ("c", 10.0)].map(|(figure, at_most)| {
                let text = format!("of = 'heap'\nto = 'native'\nfigure = '{figure}'\nat_most = {at_most}");
                toml::from_str::<Mean>(&text).unwrap()
            });
            line.means =
                means.into_iter().zip(ratios).map(|(mean, ratio)| MeanResult { mean, ratio: Some(ratio) }).collect();
            unlinked(&[&line])
        };
        let page = run([1.5, 1.05, 2.0]);
        assert!(page.contains("| 3 of 3 | heap / native, b, mean | ≤ 1.1 | 1.050 |"), "{page}");
        let page = run([1.5, 1.15, 2.0]);
        assert!(page.contains("| 2 of 3 | heap / native, a, mean | ≤ 2 | 1.500 |"), "{page}");
        assert!(page.contains("| heap / native, b, mean | ≤ 1.1 |  | 1.150 | 0 of 1 |"), "{page}");
    }

    /// Targets of all links of a page.
    fn targets(page: &str) -> Vec<&str> {
        page.split("](").skip(1).map(|rest| rest.split_once(')').unwrap().0).collect()
    }

    #[test]
    fn the_page_is_short_and_its_links_exist() {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let scratch = std::env::temp_dir().join(format!("farfield-bench-bars-{}", std::process::id()));
        let (committed, written) = (tree.join("docs/benchmarks.md"), scratch.join("docs/benchmarks.md"));
        write(&tree.join("bench/results"), &written).unwrap();
        for output in [committed, written] {
            let page = fs::read_to_string(&output).unwrap();
            let (lines, targets) = (page.lines().count(), targets(&page));
            assert!(lines <= PAGE_LINES_MAX, "{} has {lines} lines", output.display());
            assert!(targets.len() > 100, "{} has {} links", output.display(), targets.len());
            for target in targets {
                assert!(output.parent().unwrap().join(target).is_file(), "{}: {target}", output.display());
            }
        }
        fs::remove_dir_all(&scratch).unwrap();
    }
}
