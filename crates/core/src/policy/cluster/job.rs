//! Classes of jobs: what they ask for, and how long they take with how much of it near.

use crate::cast::saturating_u64;
use crate::policy::curve::Curve;
use alloc::vec::Vec;

/// Number of equal steps between the lowest and the full share of a class that divisions choose
/// from.
pub const STEPS: usize = 50;

/// Run time of a job as a function of the share of its memory that is near.
#[derive(Clone, Debug, PartialEq)]
pub enum RunTime {
    /// Run time in seconds with all memory near, and the slowdown with less.
    Measured {
        /// Seconds; the curve's slowdowns are multiples of it.
        seconds: f64,
        /// Slowdown by near share.
        curve: Curve,
    },
    /// Polynomial in the share with a value in seconds, highest power first. Published profiles are
    /// of this form. Outside the measured shares it can be anything, also rising.
    Polynomial(Vec<f64>),
}

impl RunTime {
    /// Returns the seconds with this share near. Below all that was measured, the slowest
    /// measurement holds.
    pub fn at(&self, share: f64) -> f64 {
        match self {
            RunTime::Measured { seconds, curve } => {
                let slowest = || curve.points().first().map_or(1.0, |point| point.slowdown);
                seconds * curve.at(share).unwrap_or_else(slowest)
            }
            RunTime::Polynomial(coefficients) => coefficients.iter().fold(0.0, |sum, next| sum * share + next),
        }
    }

    /// Returns the least share that was measured; polynomials do not say.
    fn least_measured(&self) -> f64 {
        match self {
            RunTime::Measured { curve, .. } => curve.points().first().map_or(1.0, |point| point.near),
            RunTime::Polynomial(_) => 0.0,
        }
    }
}

/// Jobs that ask for the same and behave alike.
#[derive(Clone, Debug, PartialEq)]
pub struct JobClass {
    cores: u32,
    memory_bytes: u64,
    least: f64,
    least_bytes: u64,
    floor: f64,
    run_time: RunTime,
    seconds: f64,
}

/// Reason why a class is not possible.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ClassError {
    /// A job without a core would never end.
    #[error("a job needs at least one core")]
    Cores,
    /// Nothing to divide.
    #[error("a job needs memory: more than 0 and less than 2^53 bytes")]
    Memory,
    /// The least share is not a share.
    #[error("the least share must be above 0 and at most 1, not {0}")]
    Least(f64),
    /// A promise about shares of which nothing is known.
    #[error("the least share is {least}, but nothing below {measured} was measured: measure it, or raise the share")]
    Unmeasured {
        /// Least share of the class.
        least: f64,
        /// Least share with a measurement.
        measured: f64,
    },
    /// A job that takes no time, for ever, or not a number.
    #[error("with a share of {share} near the job takes {seconds} s; it must be a number above 0")]
    RunTime {
        /// Near share.
        share: f64,
        /// Run time there.
        seconds: f64,
    },
}

impl JobClass {
    /// Makes a class of jobs that promise to run with the share `least` near, and not with less.
    pub fn new(cores: u32, memory_bytes: u64, least: f64, run_time: RunTime) -> Result<JobClass, ClassError> {
        JobClass::with_floor(cores, memory_bytes, least, least, run_time)
    }

    /// Makes a class that is admitted by its least share, but may then be given as little as
    /// `floor`, as the published simulator does.
    pub fn with_floor(
        cores: u32,
        memory_bytes: u64,
        least: f64,
        floor: f64,
        run_time: RunTime,
    ) -> Result<JobClass, ClassError> {
        if cores == 0 {
            return Err(ClassError::Cores);
        }
        if memory_bytes == 0 || memory_bytes >= 1 << 53 {
            return Err(ClassError::Memory);
        }
        for share in [least, floor] {
            if !(share > 0.0 && share <= 1.0) {
                return Err(ClassError::Least(share));
            }
        }
        let measured = run_time.least_measured();
        if least.min(floor) < measured - 1e-9 {
            return Err(ClassError::Unmeasured { least: least.min(floor), measured });
        }
        let mut class = JobClass { cores, memory_bytes, least, least_bytes: 0, floor, run_time, seconds: 0.0 };
        // A share that was made of bytes gives these bytes again, although its product may be rounded up.
        class.least_bytes = ceil(least * memory_bytes as f64 * (1.0 - f64::EPSILON)).min(memory_bytes);
        for step in 0..=STEPS {
            let share = class.share(step);
            let seconds = class.run_time.at(share);
            if !(seconds > 0.0 && seconds.is_finite()) {
                return Err(ClassError::RunTime { share, seconds });
            }
            class.seconds = seconds;
        }
        Ok(class)
    }

    /// Returns the class with another run time. Fails as [`JobClass::new`] does.
    pub(super) fn with_run_time(&self, run_time: RunTime) -> Result<JobClass, ClassError> {
        JobClass::with_floor(self.cores, self.memory_bytes, self.least, self.floor, run_time)
    }

    /// Returns the cores that a job of this class takes.
    pub fn cores(&self) -> u32 {
        self.cores
    }

    /// Returns the memory that a job of this class asks for.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Returns the share of it that must be near.
    pub fn least(&self) -> f64 {
        self.least
    }

    /// Returns that share in bytes, rounded up.
    pub fn least_bytes(&self) -> u64 {
        self.least_bytes
    }

    /// Returns the lowest share that a division may give.
    pub fn floor(&self) -> f64 {
        self.floor
    }

    /// Returns the run time as a function of the near share.
    pub fn run_time(&self) -> &RunTime {
        &self.run_time
    }

    /// Returns the run time in seconds with all memory near.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Returns the share of a step between the floor and 1.
    pub(super) fn share(&self, step: usize) -> f64 {
        if step == STEPS { 1.0 } else { self.floor + (1.0 - self.floor) * step as f64 / STEPS as f64 }
    }
}

/// Returns the least whole number that is not below a number that is not negative.
fn ceil(number: f64) -> u64 {
    let whole = saturating_u64(number);
    whole + u64::from((whole as f64) < number)
}

#[cfg(test)]
mod tests {
    //! Guards against classes about which a schedule would divide by zero, or promise what nobody
    //! measured.
    use super::*;
    use crate::policy::curve::Point;

    fn measured(points: &[(f64, f64)]) -> RunTime {
        let points: Vec<_> = points.iter().map(|&(near, slowdown)| Point { near, slowdown }).collect();
        RunTime::Measured { seconds: 100.0, curve: Curve::through(&points).unwrap() }
    }

    #[test]
    fn run_times_follow_the_curve_and_the_polynomial() {
        let line = measured(&[(0.5, 2.0), (1.0, 1.0)]);
        assert_eq!([1.0, 0.75, 0.5, 0.1].map(|share| line.at(share)), [100.0, 150.0, 200.0, 200.0]);
        assert_eq!(RunTime::Polynomial(Vec::from([2.0, 3.0, 1.0])).at(0.5), 3.0);
    }

    #[test]
    fn impossible_classes_are_refused() {
        let line = || measured(&[(0.5, 2.0), (1.0, 1.0)]);
        let check = |cores, memory, least, run_time, error| {
            assert_eq!(JobClass::new(cores, memory, least, run_time).unwrap_err(), error);
        };
        check(0, 1, 1.0, line(), ClassError::Cores);
        check(1, 0, 1.0, line(), ClassError::Memory);
        check(1, 1 << 53, 1.0, line(), ClassError::Memory);
        check(1, 1, 1.5, line(), ClassError::Least(1.5));
        check(1, 1, 0.4, line(), ClassError::Unmeasured { least: 0.4, measured: 0.5 });
        let falls_below_zero = RunTime::Polynomial(Vec::from([1.0, -1.0]));
        check(1, 1, 0.5, falls_below_zero, ClassError::RunTime { share: 0.5, seconds: -0.5 });
        assert!(matches!(JobClass::new(1, 1, f64::NAN, line()), Err(ClassError::Least(_))));
        let nan = RunTime::Polynomial(Vec::from([f64::NAN]));
        assert!(matches!(JobClass::new(1, 1, 1.0, nan), Err(ClassError::RunTime { .. })));
    }

    #[test]
    fn least_bytes_are_rounded_up() {
        let class = JobClass::new(1, 1001, 0.5, measured(&[(0.5, 2.0), (1.0, 1.0)])).unwrap();
        assert_eq!((class.least_bytes(), class.share(0), class.share(STEPS)), (501, 0.5, 1.0));
        for (memory, least) in (1..200u64).flat_map(|memory| (1..=memory).map(move |least| (memory << 20, least << 20)))
        {
            let constant = RunTime::Polynomial(Vec::from([1.0]));
            let class = JobClass::new(1, memory, least as f64 / memory as f64, constant).unwrap();
            assert_eq!(class.least_bytes(), least, "of {memory}: nodes that are just large enough are not missed");
        }
        let exempt = JobClass::new(1, 1001, 1.0, measured(&[(1.0, 1.0)])).unwrap();
        assert_eq!((exempt.least_bytes(), exempt.share(7), exempt.seconds()), (1001, 1.0, 100.0));
    }
}
