//! Learns the curve of a job from how much slower it runs with the near memory that it has.
//!
//! A claim foretells a curve, from a profile of another run or from nothing. While the job runs, its
//! slowdown is measured at the shares that it has had. A measured share counts instead of what was
//! foretold near it. The rest of the curve keeps its shape: what it foretells above 1 is multiplied by
//! what was measured above 1 over what was foretold for the same shares.

use super::job::{JobClass, RunTime};
use crate::cast::{saturating_u64, usize_of};
use crate::policy::curve::{Curve, Point};
use alloc::vec::Vec;

/// Number of parts of the shares from 0 to 1, each of which has one measured point.
const PARTS: usize = 16;
/// Part of a new measurement in the point of its share.
const NEW_PART: f64 = 0.5;
/// Number of measurements after which a point that none of them was for is forgotten: programs have phases.
const FORGOTTEN_AFTER: u32 = 32;
/// Bounds of the factor on what was foretold. They are wide: what was foretold of a job without a profile says little.
const FACTOR: (f64, f64) = (1.0 / 64.0, 64.0);
/// Sum of foretold slowdowns above 1 below which no factor is taken from them.
const FORETOLD_MIN: f64 = 0.02;
/// Largest slowdown that a measurement counts as.
const SLOWDOWN_MAX: f64 = 1000.0;

/// What a running job has shown of its curve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LearnedCurve {
    points: [Option<Point>; PARTS],
    /// Number of measurements since the last one for each point.
    ages: [u32; PARTS],
}

impl LearnedCurve {
    /// Takes a measurement: a slowdown with this share near. Numbers that make no sense are left out.
    pub fn observe(&mut self, measured: Point) {
        let Point { near, slowdown } = measured;
        if !(near > 0.0 && near <= 1.0 && slowdown >= 1.0) {
            return;
        }
        let new = Point { near, slowdown: slowdown.min(SLOWDOWN_MAX) };
        let mean = |old: f64, new: f64| old + (new - old) * NEW_PART;
        for (point, age) in self.points.iter_mut().zip(&mut self.ages) {
            *age += 1;
            *point = point.filter(|_| *age <= FORGOTTEN_AFTER);
        }
        self.ages[part_of(near)] = 0;
        let point = &mut self.points[part_of(near)];
        *point =
            Some(point.map_or(new, |old| Point {
                near: mean(old.near, new.near),
                slowdown: mean(old.slowdown, new.slowdown),
            }));
    }

    /// Returns the measured points, with rising shares.
    pub fn points(&self) -> impl Iterator<Item = Point> {
        self.points.iter().flatten().copied()
    }

    /// Returns the class with the curve that the measurements and the foretold one make together. Its
    /// memory and least share are the same. A polynomial is left as it is.
    pub fn class(&self, foretold: &JobClass) -> JobClass {
        let RunTime::Measured { seconds, curve } = foretold.run_time() else { return foretold.clone() };
        if self.points.iter().all(Option::is_none) {
            return foretold.clone();
        }
        let measured: Vec<Point> = self.points().collect();
        let Some(measured) = Curve::through(&measured) else { return foretold.clone() };
        let factor = self.factor(foretold);
        let corners = curve.points().iter().map(|point| point.near).chain([foretold.least(), 1.0]);
        let mut points = measured.points().to_vec();
        for near in corners {
            // All near is all near, whatever is measured shortly below.
            let is_measured = self.points[part_of(near)].is_some() && near > foretold.least() && near < 1.0;
            if is_measured || points.iter().any(|point| point.near == near) {
                continue;
            }
            let slowdown = 1.0 + (foretold.run_time().at(near) / foretold.seconds() - 1.0) * factor;
            // Less near is not faster than what was measured with more, nor the reverse.
            let next = measured.points().partition_point(|point| point.near < near);
            let at_least = measured.points().get(next).map_or(1.0, |point| point.slowdown);
            let at_most = measured.points()[..next].last().map_or(SLOWDOWN_MAX, |point| point.slowdown);
            points.push(Point { near, slowdown: slowdown.min(at_most).max(at_least) });
        }
        let run_time = Curve::through(&points).map(|curve| RunTime::Measured { seconds: *seconds, curve });
        run_time.and_then(|run_time| foretold.with_run_time(run_time).ok()).unwrap_or_else(|| foretold.clone())
    }

    /// Returns what was measured above a slowdown of 1 over what was foretold for the same shares.
    fn factor(&self, foretold: &JobClass) -> f64 {
        let (mut measured, mut expected) = (0.0, 0.0);
        for point in self.points() {
            measured += point.slowdown - 1.0;
            expected += foretold.run_time().at(point.near) / foretold.seconds() - 1.0;
        }
        if expected < FORETOLD_MIN { 1.0 } else { (measured / expected).clamp(FACTOR.0, FACTOR.1) }
    }
}

/// Returns the part that a share between 0 and 1 is in.
fn part_of(near: f64) -> usize {
    usize_of(saturating_u64(near * PARTS as f64)).min(PARTS - 1)
}

#[cfg(test)]
mod tests {
    //! Guards against a job that keeps near memory which it does not use, or lacks what it needs,
    //! because another run was different.
    use super::*;

    fn class(points: &[(f64, f64)]) -> JobClass {
        let points: Vec<_> = points.iter().map(|&(near, slowdown)| Point { near, slowdown }).collect();
        let run_time = RunTime::Measured { seconds: 100.0, curve: Curve::through(&points).unwrap() };
        JobClass::new(1, 1000, points[0].near, run_time).unwrap()
    }

    fn learned(points: &[(f64, f64)]) -> LearnedCurve {
        let mut learned = LearnedCurve::default();
        points.iter().for_each(|&(near, slowdown)| learned.observe(Point { near, slowdown }));
        learned
    }

    fn slowdown(class: &JobClass, near: f64) -> f64 {
        class.run_time().at(near) / class.seconds()
    }

    fn is_close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn without_measurements_the_claim_counts() {
        let claimed = class(&[(0.25, 4.0), (1.0, 1.0)]);
        assert_eq!(LearnedCurve::default().class(&claimed), claimed);
        for nonsense in [(0.0, 1.5), (1.1, 1.5), (0.5, 0.9), (f64::NAN, 2.0), (0.5, f64::NAN)] {
            assert_eq!(learned(&[nonsense]), LearnedCurve::default(), "{nonsense:?}");
        }
        assert_eq!(learned(&[(0.5, f64::INFINITY)]), learned(&[(0.5, SLOWDOWN_MAX)]));
    }

    #[test]
    fn a_measured_share_counts_and_the_rest_keeps_its_shape() {
        let claimed = class(&[(0.25, 4.0), (0.75, 2.0), (1.0, 1.0)]);
        // At 0.5 a slowdown of 3 was foretold: the job minds a quarter as much.
        let now = learned(&[(0.5, 1.5)]).class(&claimed);
        assert!(is_close(slowdown(&now, 0.5), 1.5) && is_close(slowdown(&now, 1.0), 1.0));
        assert!(is_close(slowdown(&now, 0.25), 1.75) && is_close(slowdown(&now, 0.75), 1.25));
        assert_eq!((now.memory_bytes(), now.least_bytes()), (claimed.memory_bytes(), claimed.least_bytes()));
        // And now twice as much. Half of a measurement is new.
        let now = learned(&[(0.5, 1.0), (0.5, 9.0)]).class(&claimed);
        assert!(is_close(slowdown(&now, 0.5), 5.0) && is_close(slowdown(&now, 0.75), 3.0));
    }

    #[test]
    fn a_job_that_was_said_to_mind_nothing_is_believed_until_it_does() {
        let claimed = class(&[(0.25, 1.0), (1.0, 1.0)]);
        assert_eq!(slowdown(&learned(&[(0.5, 1.0)]).class(&claimed), 0.3), 1.0);
        let now = learned(&[(0.5, 3.0)]).class(&claimed);
        assert!(is_close(slowdown(&now, 0.5), 3.0) && slowdown(&now, 0.75) < 3.0, "{now:?}");
        // Less near is not faster: what was foretold below is contradicted.
        assert!(is_close(slowdown(&now, 0.3), 3.0), "{now:?}");
    }

    #[test]
    fn what_was_measured_long_ago_is_forgotten() {
        let claimed = class(&[(0.25, 4.0), (1.0, 1.0)]);
        let mut learned = learned(&[(0.8, 9.0)]);
        (0..FORGOTTEN_AFTER).for_each(|_| learned.observe(Point { near: 0.5, slowdown: 2.0 }));
        assert!(slowdown(&learned.class(&claimed), 0.8) > 1.9);
        learned.observe(Point { near: 0.5, slowdown: 2.0 });
        assert!(slowdown(&learned.class(&claimed), 0.8) < 1.5);
    }

    #[test]
    fn any_measurements_make_a_class() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            let least = 0.05 + random.f64() * 0.9;
            let claimed = class(&[(least, 1.0 + random.f64() * 9.0), (1.0, 1.0)]);
            let points: Vec<(f64, f64)> =
                (0..random.usize(..40)).map(|_| (random.f64(), 0.5 + random.f64() * 2000.0)).collect();
            let now = learned(&points).class(&claimed);
            assert!(now.seconds() > 0.0 && now.least() == least);
            let rising = (0..100).map(|step| now.run_time().at(least + (1.0 - least) * f64::from(step) / 100.0));
            assert!(rising.is_sorted_by(|more, less| more + 1e-9 >= *less), "{points:?}");
        }
    }
}
