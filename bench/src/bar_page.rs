//! Page of bars, docs/benchmarks.md: all that must hold, from the newest receipts.
//!
//! Points that one bar covers share a row, and so do bars of an experiment with one bound that are held. The sentence on
//! a missed bar is in `[missed]` of the parameter file. All other figures are on the page of [`crate::report`].

use crate::bar::Bar;
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

/// Row of the page: one bar, with its values at all points that it covers, or several with one bound that are held.
struct BarRow {
    /// What the bar speaks of, as `[missed]` names it.
    subject: String,
    /// Points that the bar is for; empty if it is for all.
    at: String,
    bar: String,
    aim: String,
    values: Vec<f64>,
    held: usize,
    /// Receipts that the values are from.
    receipts: Vec<String>,
}

impl BarRow {
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

    /// Adds another bar of the same bound.
    fn join(&mut self, other: BarRow) {
        self.subject = format!("{}; {}", self.subject, other.subject);
        self.values.extend(other.values);
        self.held += other.held;
        let new = other.receipts.into_iter().filter(|receipt| !self.receipts.contains(receipt));
        let new: Vec<String> = new.collect();
        self.receipts.extend(new);
    }

    /// Returns the cells up to where the bar is held.
    fn cells(&self) -> String {
        let at = if self.at.is_empty() { String::new() } else { format!(" ({})", self.at) };
        let held =
            if self.values.is_empty() { "–".into() } else { format!("{} of {}", self.held, self.values.len()) };
        format!("{}{at} | {} | {} | {} | {held}", self.subject, self.bar, self.aim, self.measured())
    }
}

/// Rows of the page that are still being collected from receipts of one experiment.
#[derive(Default)]
struct BarRows(Vec<BarRow>);

impl BarRows {
    /// Adds a value to the row of its bar. A bar without a value only has a row.
    fn add(&mut self, key: [String; 4], value: Option<f64>, passes: bool, receipt: &str) {
        let [subject, at, bar, aim] = key;
        let same = |row: &BarRow| row.subject == subject && row.at == at && row.bar == bar && row.aim == aim;
        let index = self.0.iter().position(same).unwrap_or_else(|| {
            self.0.push(BarRow { subject, at, bar, aim, values: vec![], held: 0, receipts: vec![] });
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

    /// Returns the rows; bars that are held and differ only in what they speak of have one together.
    fn grouped(self) -> Vec<BarRow> {
        let mut grouped: Vec<BarRow> = Vec::new();
        for row in self.0 {
            let is_alike = |other: &&mut BarRow| {
                other.passes() && row.passes() && [&other.at, &other.bar, &other.aim] == [&row.at, &row.bar, &row.aim]
            };
            match grouped.iter_mut().find(is_alike) {
                Some(other) => other.join(row),
                None => grouped.push(row),
            }
        }
        grouped
    }

    /// Adds all bars that a line has.
    fn add_line(&mut self, line: &Line) {
        let receipt = receipt(line);
        for point in &line.points {
            for ratio in &point.ratios {
                if let Some(bar) = &ratio.bar {
                    let key = [ratio.sides(), describe(&bar.at, &[]), at_most(bar.at_most), aim(bar)];
                    self.add(key, Some(ratio.ratio.ratio), ratio.passes() == Some(true), &receipt);
                }
            }
            for found in &point.bounds {
                let bound = &found.bound;
                let key = [bound.subject(), describe(&bound.at, &[]), at_most(bound.at_most), String::new()];
                self.add(key, Some(found.worst), found.passes(), &receipt);
            }
        }
        for found in &line.means {
            let mean = &found.mean;
            if let (Some(passes), Some(bar)) = (found.passes(), mean.at_most) {
                let at = if mean.at.is_empty() && mean.except.is_empty() { String::new() } else { mean.covered() };
                self.add([mean.subject(), at, at_most(bar), String::new()], found.ratio, passes, &receipt);
            }
        }
        for found in &line.quorums {
            let quorum = &found.quorum;
            let key = [quorum.subject(), describe(&quorum.at, &[]), format!("≥ {}", quorum.share), String::new()];
            let share = (found.points > 0).then(|| found.held as f64 / found.points as f64);
            self.add(key, share, found.passes(), &receipt);
        }
    }
}

fn at_most(bar: f64) -> String {
    format!("≤ {bar}")
}

fn aim(bar: &Bar) -> String {
    bar.aim.map_or(String::new(), |aim| aim.to_string())
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
        for row in rows.grouped() {
            let receipts = if row.receipts.is_empty() { receipt(lines[0]) } else { row.receipts.join(", ") };
            let receipts = links.to(&receipts, &file_name(name));
            let start = format!("| {} | {}", links.parameters(name), row.cells());
            if row.passes() {
                held.push(format!("{start} | {receipts} |"));
            } else {
                let experiment = experiments.iter().find(|experiment| experiment.name == *name);
                let reason = experiment.and_then(|experiment| experiment.missed.get(&row.subject));
                missed.push(format!("{start} | {} | {receipts} |", reason.map_or(NO_REASON, String::as_str)));
            }
        }
    }
    let mut out = format!(
        "# Benchmarks\n\n\
         Written by `farfield bench report` from the newest receipts; do not edit. {} of {} bars are held.\n\n\
         A ratio compares samples taken in turns in one run; below 1 the first contender is faster. A bar\n\
         must hold, an aim should. *Measured* is the smallest to the largest value of all points of a bar,\n\
         and *held at* counts these points. {} says how all of this is measured.\n\
         `farfield bench report --full` writes all other figures and the plots into `target/benchmarks`.\n",
        bars_held,
        bars,
        links.to("bench.md", "../../docs/design/bench.md"),
    );
    let columns = "| experiment | what is measured | bar | aim | measured | held at |";
    table(&mut out, "Missed", &format!("{columns} why | receipt |"), &missed);
    table(&mut out, "Held", &format!("{columns} receipt |"), &held);
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
    const PAGE_LINES_MAX: usize = 150;

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
        let row = "| paging/random | farfield / swap-zram | ≤ 0.5 | 0.4 | 0.450 | 1 of 1 | 0123456 |";
        check(&unlinked(&[&line]), "Held", row);
        line.quick = true;
        check(&unlinked(&[&line]), "Held", "| 1 of 1 | smoke run |");
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
        assert!(both.contains("| heap / native, mean | ≤ 1.1 |  | 1.000 | 1 of 1 | 0123456 |"), "{both}");
        assert!(!both.contains("## Missed"), "{both}");
    }

    /// Targets of all links of a page.
    fn targets(page: &str) -> Vec<&str> {
        page.split("](").skip(1).map(|rest| rest.split_once(')').unwrap().0).collect()
    }

    #[test]
    fn the_page_has_at_most_150_lines_and_its_links_exist() {
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
