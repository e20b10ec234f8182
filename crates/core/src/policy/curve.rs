//! Slowdown of a program as a function of its near memory: a falling line through measurements.
//!
//! Measurements scatter, but more near memory never makes a program slower. So neighbours that
//! contradict this are replaced by their mean (isotonic regression, pool adjacent violators);
//! between points the line is straight. Below the least share that was tried nothing is predicted:
//! there may be a cliff.

use super::profile::Profile;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// A measurement, or a corner of the line.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Near memory, as a share of all that the program has.
    pub near: f64,
    /// Time as a multiple of the native time.
    pub slowdown: f64,
}

/// A falling line: slowdown as a function of near share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// Corners by rising near share; slowdowns never rise.
    points: Vec<Point>,
}

/// Quality of a line as a description of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// Number of measurements.
    pub points: usize,
    /// Share of the variance of the measurements that the line explains (R²); 1 if they do not
    /// differ.
    pub explained: f64,
    /// Largest relative error of the line at a measurement.
    pub error_max: f64,
    /// Mean relative error at a measurement that was left out of the line (cross-validation), inner
    /// ones only. `None` with fewer than three shares.
    pub left_out_error: Option<f64>,
}

impl Curve {
    /// Fits a line through measurements; `None` if there are none, or one is not a finite number.
    pub fn through(measured: &[Point]) -> Option<Curve> {
        let is_number = |point: &Point| point.near.is_finite() && point.slowdown.is_finite();
        if measured.is_empty() || !measured.iter().all(is_number) {
            return None;
        }
        let mut sorted = measured.to_vec();
        sorted.sort_by(|a, b| a.near.total_cmp(&b.near));
        // Blocks of one slowdown: near shares in them, with the sum and number of measurements.
        let mut blocks: Vec<(Vec<f64>, f64, usize)> = Vec::new();
        for same in sorted.chunk_by(|a, b| a.near == b.near) {
            blocks.push((Vec::from([same[0].near]), same.iter().map(|point| point.slowdown).sum(), same.len()));
            // More near and yet slower: merged with the block before.
            while let [.., before, last] = &mut blocks[..]
                && before.1 / (before.2 as f64) < last.1 / last.2 as f64
            {
                before.0.append(&mut last.0);
                before.1 += last.1;
                before.2 += last.2;
                blocks.pop();
            }
        }
        let points = blocks.into_iter().flat_map(|(shares, sum, number)| {
            let slowdown = sum / number as f64;
            shares.into_iter().map(move |near| Point { near, slowdown })
        });
        Some(Curve { points: points.collect() })
    }

    /// Fits a line through the runs of a profile with far memory at that place.
    pub fn of(profile: &Profile, url: &str) -> Option<(Curve, Fit)> {
        let runs = profile.far_runs.iter().filter(|run| run.url == url);
        let measured: Vec<Point> = runs.map(|run| Point { near: run.near_share, slowdown: run.slowdown }).collect();
        let curve = Curve::through(&measured)?;
        let fit = curve.fit(&measured);
        Some((curve, fit))
    }

    /// Returns the places at which a profile has runs, sorted.
    pub fn places(profile: &Profile) -> Vec<&str> {
        let mut places: Vec<&str> = profile.far_runs.iter().map(|run| run.url.as_str()).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Returns the corners of the line.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the slowdown with the share `near`; `None` below all that was tried.
    pub fn at(&self, near: f64) -> Option<f64> {
        let next = self.points.partition_point(|point| point.near < near);
        let Some(after) = self.points.get(next) else {
            return self.points.last().map(|last| last.slowdown);
        };
        if after.near == near {
            return Some(after.slowdown);
        }
        let before = self.points[..next].last()?;
        let part = (near - before.near) / (after.near - before.near);
        Some(before.slowdown + (after.slowdown - before.slowdown) * part)
    }

    /// Returns the least near share at which the slowdown is at most `slowdown`; `None` if none is
    /// known.
    pub fn least_near(&self, slowdown: f64) -> Option<f64> {
        let index = self.points.iter().position(|point| point.slowdown <= slowdown)?;
        let Some((before, after)) = index.checked_sub(1).map(|before| (self.points[before], self.points[index])) else {
            return Some(self.points[0].near);
        };
        let part = (before.slowdown - slowdown) / (before.slowdown - after.slowdown);
        Some(before.near + (after.near - before.near) * part)
    }

    /// Measures how well the line describes the measurements.
    pub fn fit(&self, measured: &[Point]) -> Fit {
        let number = measured.len().max(1) as f64;
        let mean = measured.iter().map(|point| point.slowdown).sum::<f64>() / number;
        let square = |value: f64| value * value;
        let (mut rest, mut all, mut error_max) = (0.0, 0.0, 0.0f64);
        for point in measured {
            let Some(said) = self.at(point.near) else { continue };
            rest += square(point.slowdown - said);
            all += square(point.slowdown - mean);
            error_max = error_max.max((point.slowdown - said).abs() / point.slowdown);
        }
        let explained = if all > 0.0 { 1.0 - rest / all } else { 1.0 };
        Fit { points: measured.len(), explained, error_max, left_out_error: left_out_error(measured) }
    }
}

fn left_out_error(measured: &[Point]) -> Option<f64> {
    let least = measured.iter().map(|point| point.near).fold(f64::INFINITY, f64::min);
    let most = measured.iter().map(|point| point.near).fold(0.0, f64::max);
    let (mut errors, mut number) = (0.0, 0);
    for point in measured.iter().filter(|point| point.near > least && point.near < most) {
        let others: Vec<Point> = measured.iter().filter(|other| other.near != point.near).copied().collect();
        let said = Curve::through(&others)?.at(point.near)?;
        errors += (said - point.slowdown).abs() / point.slowdown;
        number += 1;
    }
    (number > 0).then(|| errors / f64::from(number))
}

#[cfg(test)]
mod tests {
    //! Danger: a line that promises less slowdown than was ever measured.
    use super::*;

    fn points(list: &[(f64, f64)]) -> Vec<Point> {
        list.iter().map(|&(near, slowdown)| Point { near, slowdown }).collect()
    }

    fn curve(list: &[(f64, f64)]) -> Curve {
        Curve::through(&points(list)).unwrap()
    }

    #[test]
    fn between_points_the_line_is_straight() {
        let curve = curve(&[(1.0, 1.0), (0.5, 2.0), (0.25, 4.0)]);
        let check = |near: f64, slowdown: Option<f64>| assert_eq!(curve.at(near), slowdown, "{near}");
        check(0.25, Some(4.0));
        check(0.375, Some(3.0));
        check(0.5, Some(2.0));
        check(0.75, Some(1.5));
        check(2.0, Some(1.0));
        check(0.2, None);
        let least = |slowdown: f64| curve.least_near(slowdown);
        assert_eq!(
            [least(0.9), least(1.0), least(1.5), least(3.0), least(9.0)],
            [None, Some(1.0), Some(0.75), Some(0.375), Some(0.25)]
        );
    }

    #[test]
    fn neighbours_that_contradict_become_their_mean() {
        assert_eq!(curve(&[(0.5, 1.0), (1.0, 2.0)]).points(), points(&[(0.5, 1.5), (1.0, 1.5)]));
        assert_eq!(curve(&[(0.5, 1.0), (0.5, 2.0)]).points(), points(&[(0.5, 1.5)]));
        assert_eq!(
            curve(&[(0.5, 2.0), (0.75, 1.0), (1.0, 1.5)]).points(),
            points(&[(0.5, 2.0), (0.75, 1.25), (1.0, 1.25)])
        );
        assert_eq!(curve(&[(0.5, 1.0), (0.75, 1.0), (1.0, 4.0)]).points()[0].slowdown, 2.0, "a chain of them");
        assert!(Curve::through(&[]).is_none() && Curve::through(&points(&[(0.5, f64::NAN)])).is_none());
    }

    #[test]
    fn a_fit_says_how_good_it_is() {
        let good = points(&[(0.25, 3.0), (0.5, 2.0), (1.0, 1.0)]);
        let fit = Curve::through(&good).unwrap().fit(&good);
        assert_eq!((fit.points, fit.explained, fit.error_max), (3, 1.0, 0.0));
        let line = 3.0 - 2.0 * (0.25 / 0.75);
        assert!((fit.left_out_error.unwrap() - (line - 2.0) / 2.0).abs() < 1e-12);
        let bad = points(&[(0.5, 1.0), (1.0, 2.0)]);
        let fit = Curve::through(&bad).unwrap().fit(&bad);
        assert_eq!((fit.explained, fit.error_max, fit.left_out_error), (0.0, 0.5, None));
        let flat = points(&[(0.5, 1.0), (1.0, 1.0)]);
        assert_eq!(Curve::through(&flat).unwrap().fit(&flat).explained, 1.0);
    }

    #[test]
    fn random_measurements_make_the_best_falling_line() {
        let mut random = fastrand::Rng::with_seed(0x9e37);
        let mut next = move || f64::from(random.u32(..1000)) / 1000.0;
        for _ in 0..2000 {
            let measured: Vec<Point> = (0..1 + (next() * 8.0) as usize)
                .map(|_| Point { near: (next() * 8.0) as usize as f64 / 8.0, slowdown: 1.0 + next() })
                .collect();
            let curve = Curve::through(&measured).unwrap();
            assert!(curve.points().windows(2).all(|p| p[0].near < p[1].near && p[0].slowdown >= p[1].slowdown - 1e-12));
            for step in 0..=20 {
                let slowdown = 1.0 + f64::from(step) / 20.0;
                if let Some(near) = curve.least_near(slowdown) {
                    assert!(curve.at(near).unwrap() <= slowdown + 1e-9);
                    let below = curve.at(near - 1e-6);
                    assert!(below.is_none_or(|below| below >= slowdown - 1e-4), "{curve:?} {slowdown} {near}");
                }
            }
            // No other falling line is nearer: moving a block up or down, or a cut of it, makes it worse.
            let error = |curve: &Curve| -> f64 {
                measured
                    .iter()
                    .map(|m| {
                        let off = m.slowdown - curve.at(m.near).unwrap();
                        off * off
                    })
                    .sum()
            };
            let best = error(&curve);
            for cut in 0..curve.points.len() {
                for change in [-0.01, 0.01] {
                    let mut other = curve.clone();
                    let moved = if change > 0.0 { 0..cut + 1 } else { cut..other.points.len() };
                    moved.for_each(|index| other.points[index].slowdown += change);
                    assert!(error(&other) >= best - 1e-9);
                }
            }
        }
    }
}
