//! What must hold: ratios of two contenders, their mean over all points, and figures of one, at all points or at most of them.

use crate::driver::describe;
use crate::experiment::Point;
use crate::line::{ContenderResult, PointResult, Status, fastest};
use crate::stats::ratio;
use serde::{Deserialize, Serialize};

/// A ratio that must not be exceeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    /// Whose time.
    pub of: String,
    /// Over whose time. Of several, `A or B or C`, it is the best of those that ran. [`FLOOR`] is what an operation costs
    /// at least.
    pub to: String,
    /// The figure that is compared; without it the time of an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<String>,
    /// The contender whose time both have without far memory; then it is compared what each takes more than that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess_over: Option<String>,
    /// Largest ratio that passes.
    pub at_most: f64,
    /// The ratio we would like.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<f64>,
    /// Only points with these parameters.
    #[serde(default, rename = "where", skip_serializing_if = "Point::is_empty")]
    pub at: Point,
}

/// Name of the floor where a bar compares with it.
pub const FLOOR: &str = "floor";

/// Contenders in a list such as `A or B or C`.
pub(crate) fn listed(names: &str) -> impl Iterator<Item = &str> {
    names.split(" or ")
}

impl Bar {
    /// Names the two contenders, and what is compared if it is not the time.
    pub(crate) fn sides(&self) -> String {
        sides(&self.of, &self.to, self.figure.as_deref(), self.excess_over.as_deref())
    }

    /// Names the contenders that it is over.
    pub(crate) fn opponents(&self) -> impl Iterator<Item = &str> {
        listed(&self.to)
    }

    /// Does the bar speak of this pair at this point?
    pub fn covers(&self, of: &str, to: &str, point: &Point) -> bool {
        self.of == of && self.to == to && is_at(&self.at, point)
    }
}

/// A figure that must not be exceeded, by no sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// Whose figure.
    pub of: String,
    /// Its name.
    pub figure: String,
    /// Largest value that passes.
    pub at_most: f64,
    /// Only points with these parameters.
    #[serde(default, rename = "where", skip_serializing_if = "Point::is_empty")]
    pub at: Point,
}

/// A figure whose median, or a ratio of two contenders, must not exceed a value at so many of the points.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quorum {
    /// Whose figure or time.
    pub of: String,
    /// Over whose, if it is a ratio. Of several, `A or B`, it is the best of those that ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The figure; of a ratio without it the time of an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<String>,
    /// Largest value that passes.
    pub at_most: f64,
    /// Least part of the points at which it passes.
    pub share: f64,
    /// Only points with these parameters.
    #[serde(default, rename = "where", skip_serializing_if = "Point::is_empty")]
    pub at: Point,
}

/// A geometric mean of a ratio over points; may be a bar.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mean {
    /// Whose time.
    pub of: String,
    /// Over whose time.
    pub to: String,
    /// The figure that is compared; without it the time of an operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figure: Option<String>,
    /// Largest mean that passes; without it the mean is said and not judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// The mean we would like.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<f64>,
    /// Only points with these parameters.
    #[serde(default, rename = "where", skip_serializing_if = "Point::is_empty")]
    pub at: Point,
    /// No points with these parameters.
    #[serde(default, skip_serializing_if = "Point::is_empty")]
    pub except: Point,
    /// `to` is taken from the point that has these parameters and else the same.
    #[serde(default, skip_serializing_if = "Point::is_empty")]
    pub against: Point,
    /// What the ratio is the cost of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
}

/// A bound and what was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BoundResult {
    /// The bound.
    pub bound: Bound,
    /// The largest value of all samples.
    pub worst: f64,
}

/// A quorum and what was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct QuorumResult {
    /// The quorum.
    pub quorum: Quorum,
    /// Points that it covers.
    pub points: usize,
    /// Those at which the figure was measured and passes.
    pub held: usize,
}

/// A mean and what was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeanResult {
    /// The mean.
    pub mean: Mean,
    /// Its value; `None` unless both contenders ran at every point that it covers, within the limit.
    pub ratio: Option<f64>,
}

impl Mean {
    /// Names the two contenders, and the figure if it is not the time.
    pub(crate) fn sides(&self) -> String {
        let against =
            if self.against.is_empty() { String::new() } else { format!(" at {}", describe(&self.against, &[])) };
        sides(&self.of, &format!("{}{against}", self.to), self.figure.as_deref(), None)
    }

    /// Names what the mean compares where it is a bar.
    pub(crate) fn subject(&self) -> String {
        format!("{}, mean", self.sides())
    }

    /// Names the points that it is over.
    pub(crate) fn covered(&self) -> String {
        match (self.at.is_empty(), self.except.is_empty()) {
            (true, true) => "all".into(),
            (false, true) => describe(&self.at, &[]),
            (true, false) => format!("all but {}", describe(&self.except, &[])),
            (false, false) => format!("{}, but {}", describe(&self.at, &[]), describe(&self.except, &[])),
        }
    }

    /// Does the mean cover this point?
    pub fn covers(&self, point: &Point) -> bool {
        is_at(&self.at, point) && (self.except.is_empty() || !is_at(&self.except, point))
    }

    /// The parameters with which `to` is measured that `of` at this point is compared with.
    pub fn opposite(&self, point: &Point) -> Point {
        point.iter().chain(&self.against).map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

impl BoundResult {
    /// Is it held?
    pub fn passes(&self) -> bool {
        self.worst <= self.bound.at_most
    }
}

impl QuorumResult {
    /// Is it held?
    pub fn passes(&self) -> bool {
        self.held > 0 && self.held as f64 >= self.quorum.share * self.points as f64
    }
}

impl MeanResult {
    /// Is it held? `None` if it is not judged.
    pub fn passes(&self) -> Option<bool> {
        let at_most = self.mean.at_most?;
        Some(self.ratio.is_some_and(|ratio| ratio <= at_most))
    }
}

fn is_at(wanted: &Point, point: &Point) -> bool {
    wanted.iter().all(|(key, value)| point.get(key) == Some(value))
}

/// Names two contenders that are compared, and what is compared if it is not the time.
pub(crate) fn sides(of: &str, to: &str, figure: Option<&str>, excess_over: Option<&str>) -> String {
    let figure = figure.map_or(String::new(), |figure| format!(", {figure}"));
    let excess = excess_over.map_or(String::new(), |base| format!(", excess over {base}"));
    format!("{of} / {to}{figure}{excess}")
}

impl Quorum {
    /// Names what is bounded.
    pub(crate) fn subject(&self) -> String {
        format!("{} ≤ {}, part of the points", self.measured(), self.at_most)
    }

    /// Names the figure or the ratio.
    pub(crate) fn measured(&self) -> String {
        match &self.to {
            Some(to) => sides(&self.of, to, self.figure.as_deref(), None),
            None => format!("{} {}", self.of, self.figure.as_deref().unwrap_or_default()),
        }
    }

    /// Returns what was measured at a point; `None` if it was not, or not within the limit.
    fn value(&self, point: &PointResult) -> Option<f64> {
        let of = point.contenders.iter().find(|c| c.name == self.of && c.status == Status::Ok)?;
        let figure = self.figure.as_deref();
        let Some(to) = &self.to else { return of.figures.get(figure?).copied() };
        let to = fastest(&point.contenders, to, figure)?;
        let ratio = ratio(&of.values(figure)?, &to.values(figure)?)?.ratio;
        of.over_budget().is_none().then_some(ratio)
    }

    /// Does the quorum cover this point?
    pub fn covers(&self, point: &Point) -> bool {
        is_at(&self.at, point)
    }
}

impl Bound {
    /// Names what is bounded.
    pub(crate) fn subject(&self) -> String {
        format!("{} {}", self.of, self.figure)
    }

    /// Does the bound speak of this contender at this point?
    pub fn covers(&self, of: &str, point: &Point) -> bool {
        self.of == of && is_at(&self.at, point)
    }
}

/// The bounds that speak of this point, of contenders that ran and have the figure.
pub(crate) fn bounds(contenders: &[ContenderResult], bounds: &[Bound], point: &Point) -> Vec<BoundResult> {
    let measured = |bound: &Bound| {
        let contender = contenders.iter().find(|c| bound.covers(&c.name, point) && c.status == Status::Ok)?;
        let worst = contender.values(Some(&bound.figure))?.into_iter().reduce(f64::max)?;
        Some(BoundResult { bound: bound.clone(), worst })
    };
    bounds.iter().filter_map(measured).collect()
}

/// The quorums, over those of these points that they cover.
pub(crate) fn quorums(points: &[PointResult], quorums: &[Quorum]) -> Vec<QuorumResult> {
    let passes = |point: &PointResult, quorum: &Quorum| quorum.value(point).is_some_and(|v| v <= quorum.at_most);
    let over_all = |quorum: &Quorum| {
        let covered: Vec<_> = points.iter().filter(|point| quorum.covers(&point.parameters)).collect();
        let held = covered.iter().filter(|point| passes(point, quorum)).count();
        QuorumResult { quorum: quorum.clone(), points: covered.len(), held }
    };
    quorums.iter().map(over_all).collect()
}

/// The means, over those of these points that they cover.
pub(crate) fn means(points: &[PointResult], means: &[Mean]) -> Vec<MeanResult> {
    let of_point = |point: &PointResult, mean: &Mean| {
        let opposite = mean.opposite(&point.parameters);
        let contender = |name: &str, at: &Point| {
            let point = points.iter().find(|point| point.parameters == *at)?;
            point.contenders.iter().find(|c| c.name == name && c.status == Status::Ok)
        };
        let (of, to) = (contender(&mean.of, &point.parameters)?, contender(&mean.to, &opposite)?);
        let figure = mean.figure.as_deref();
        let ratio = ratio(&of.values(figure)?, &to.values(figure)?)?.ratio;
        of.over_budget().is_none().then_some(ratio.ln())
    };
    let over_all = |mean: &Mean| {
        let covered = points.iter().filter(|point| mean.covers(&point.parameters));
        let logs: Option<Vec<f64>> = covered.map(|point| of_point(point, mean)).collect();
        let ratio =
            logs.filter(|logs| !logs.is_empty()).map(|logs| (logs.iter().sum::<f64>() / logs.len() as f64).exp());
        MeanResult { mean: mean.clone(), ratio }
    };
    means.iter().map(over_all).collect()
}

#[cfg(test)]
mod tests {
    //! Danger: a figure that was not measured, or was of one good sample only, counts as held.

    use super::*;
    use crate::experiment::Value;
    use crate::line::{Sample, ratios};
    use std::collections::BTreeMap;

    fn contender(name: &str, samples: &[(f64, Option<f64>)]) -> ContenderResult {
        let sample = |(ns_per_op, pause): &(f64, Option<f64>)| Sample {
            ns_per_op: *ns_per_op,
            ops: 1,
            checksum: "0".into(),
            phases: vec![],
            figures: pause.iter().map(|pause| ("pause".to_string(), *pause)).collect::<BTreeMap<_, _>>(),
        };
        ContenderResult::new(name, Status::Ok, samples.iter().map(sample).collect())
    }

    fn point(contenders: Vec<ContenderResult>) -> PointResult {
        PointResult {
            parameters: Point::new(),
            near_bytes: 0,
            unit: "x".into(),
            floor_ns: None,
            ratios: ratios(&contenders, &[], &Point::new(), None),
            bounds: vec![],
            contenders,
        }
    }

    #[test]
    fn the_worst_sample_decides_about_a_bound() {
        let bound = Bound { of: "heap".into(), figure: "pause".into(), at_most: 5.0, at: Point::new() };
        let check = |samples: &[(f64, Option<f64>)]| {
            let found = bounds(&[contender("heap", samples)], std::slice::from_ref(&bound), &Point::new());
            found.first().map(BoundResult::passes)
        };
        assert_eq!(check(&[(1.0, Some(1.0)), (1.0, Some(5.0))]), Some(true));
        assert_eq!(check(&[(1.0, Some(6.0)), (1.0, Some(1.0))]), Some(false));
        assert_eq!(check(&[(1.0, Some(1.0)), (1.0, None)]), None, "not measured each time");
    }

    #[test]
    fn a_quorum_counts_points_by_their_median_and_one_that_was_not_measured_against_it() {
        let quorum: Quorum =
            toml::from_str("of = 'heap'\nfigure = 'pause'\nat_most = 5\nshare = 0.75\nwhere = { once = 1 }").unwrap();
        let at = |once: u64, samples: &[(f64, Option<f64>)]| PointResult {
            parameters: Point::from([("once".to_string(), Value::Number(once))]),
            ..point(vec![contender("heap", samples)])
        };
        let good = || at(1, &[(1.0, Some(1.0)), (1.0, Some(9.0)), (1.0, Some(2.0))]);
        let bad = || at(1, &[(1.0, Some(6.0))]);
        let check = |points: &[PointResult]| {
            let found = &quorums(points, std::slice::from_ref(&quorum))[0];
            (found.held, found.points, found.passes())
        };
        assert_eq!(check(&[good(), good(), good(), bad(), at(0, &[(1.0, Some(6.0))])]), (3, 4, true));
        assert_eq!(check(&[good(), good(), bad()]), (2, 3, false));
        assert_eq!(check(&[good(), good(), good(), at(1, &[(1.0, None)])]), (3, 4, true));
        assert_eq!(check(&[good(), good(), at(1, &[(1.0, None)])]), (2, 3, false));
        assert_eq!(check(&[]), (0, 0, false), "nothing was measured");
    }

    #[test]
    fn a_quorum_of_ratios_is_over_the_best_that_ran() {
        let quorum: Quorum =
            toml::from_str("of = 'hybrid'\nto = 'page or object'\nat_most = 1.1\nshare = 0.66").unwrap();
        assert_eq!(quorum.subject(), "hybrid / page or object ≤ 1.1, part of the points");
        let at = |page: f64, object: f64, hybrid: &[(f64, Option<f64>)]| {
            let mut page = contender("page", &[(page, None)]);
            if page.samples[0].ns_per_op == 0.0 {
                page.status = Status::Failed { why: "x".into() };
            }
            point(vec![page, contender("object", &[(object, None)]), contender("hybrid", hybrid)])
        };
        let check = |points: &[PointResult]| {
            let found = &quorums(points, std::slice::from_ref(&quorum))[0];
            (found.held, found.passes())
        };
        let slow = || at(10.0, 20.0, &[(12.0, None)]);
        assert_eq!(check(&[at(10.0, 20.0, &[(11.0, None)]), at(20.0, 10.0, &[(10.0, None)]), slow()]), (2, true));
        assert_eq!(check(&[at(10.0, 20.0, &[(11.0, None)]), slow(), slow()]), (1, false));
        assert_eq!(check(&[at(0.0, 20.0, &[(12.0, None)])]), (1, true), "a contender that failed is no opponent");
        let mut greedy = at(10.0, 20.0, &[(5.0, None)]);
        greedy.contenders[2].samples[0].figures.insert("near_peak_over_limit".into(), 2.0);
        assert_eq!(check(&[greedy]), (0, false), "what exceeds its limit holds no bar");
    }

    #[test]
    fn a_mean_is_geometric_and_needs_all_points() {
        let at = |ours: f64| point(vec![contender("native", &[(1.0, None)]), contender("heap", &[(ours, None)])]);
        let mean = |text: &str| toml::from_str::<Mean>(&format!("of = 'heap'\nto = 'native'\n{text}")).unwrap();
        let judged = mean("at_most = 1.1");
        let points = [numbered(0, at(0.5)), numbered(1, at(2.0))];
        let found = &means(&points, std::slice::from_ref(&judged))[0];
        assert!((found.ratio.unwrap() - 1.0).abs() < 1e-12 && found.passes() == Some(true));
        assert_eq!(means(&points, &[mean("")])[0].passes(), None, "not judged");
        let missing = numbered(1, point(vec![contender("native", &[(1.0, None)])]));
        assert_eq!(means(&[numbered(0, at(0.5)), missing], &[judged])[0].passes(), Some(false));
    }

    /// A point with a parameter of its own.
    fn numbered(number: u64, point: PointResult) -> PointResult {
        PointResult { parameters: Point::from([("near_percent".to_string(), Value::Number(number))]), ..point }
    }

    #[test]
    fn a_mean_compares_points_that_differ_in_what_it_names() {
        let at = |number, ours: f64| numbered(number, point(vec![contender("heap", &[(ours, None)])]));
        let mean: Mean = toml::from_str(
            "of = 'heap'\nto = 'heap'\nwhere = { near_percent = 100 }\nagainst = { near_percent = 200 }",
        )
        .unwrap();
        let of = |points: &[PointResult]| means(points, std::slice::from_ref(&mean))[0].ratio;
        assert_eq!(of(&[at(50, 9.0), at(100, 3.0), at(200, 2.0)]), Some(1.5f64.ln().exp()));
        assert_eq!(of(&[at(50, 9.0), at(100, 3.0)]), None, "the other point is missing");
    }

    #[test]
    fn a_mean_of_a_figure_needs_it_of_every_sample() {
        let mean: Mean = toml::from_str("of = 'heap'\nto = 'native'\nfigure = 'pause'").unwrap();
        let of = |ours: &[(f64, Option<f64>)]| {
            let point = point(vec![contender("native", &[(1.0, Some(4.0))]), contender("heap", ours)]);
            means(&[point], std::slice::from_ref(&mean))[0].ratio
        };
        assert!((of(&[(9.0, Some(2.0)), (9.0, Some(2.0))]).unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(of(&[(9.0, Some(2.0)), (9.0, None)]), None);
    }

    #[test]
    fn a_mean_covers_the_points_that_it_names() {
        let at = |percent, ours: f64| {
            let contenders = vec![contender("native", &[(1.0, None)]), contender("heap", &[(ours, None)])];
            let parameters = Point::from([("near_percent".to_string(), Value::Number(percent))]);
            PointResult { parameters, ..point(contenders) }
        };
        let points = [at(25, 2.0), at(50, 8.0), at(100, 1.0)];
        let check = |text: &str, expected: f64| {
            let mean: Mean = toml::from_str(&format!("of = 'heap'\nto = 'native'\n{text}")).unwrap();
            let found = means(&points, &[mean])[0].ratio.unwrap();
            assert!((found - expected).abs() < 1e-9, "{text}: {found}");
        };
        check("where = { near_percent = 50 }", 8.0);
        check("except = { near_percent = 100 }", 4.0);
        check("", 16f64.cbrt());
    }
}
