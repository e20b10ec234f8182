//! Claim of a job: what it asks the agent of its node for, as it is sent and kept.

use super::job::{ClassError, JobClass, RunTime};
use crate::policy::curve::{Curve, Point};
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Most points of a claim's curve.
pub const POINTS_MAX: usize = 32;
/// Points of the curve of a job that knows none. A line would make all divisions among such jobs alike.
const ASSUMED_POINTS: usize = 9;
/// Run time in seconds of a job of which none is known.
const SECONDS_UNKNOWN: f64 = 3600.0;

/// Near memory that a job asks for, and what it knows about having less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobClaim {
    /// Memory of the job in bytes.
    pub memory_bytes: u64,
    /// Least near memory with which the job runs, in bytes.
    pub least_bytes: u64,
    /// Slowdowns by near share, from a profile; empty if none is known.
    #[serde(default)]
    pub slowdowns: Vec<Point>,
    /// Run time in seconds with all memory near, if it is known.
    #[serde(default)]
    pub seconds: Option<f64>,
}

/// Reason why a claim cannot be met by any node.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ClaimError {
    /// More must be near than there is.
    #[error(
        "the least near memory ({least_bytes} bytes) must be above 0 and at most the job's memory ({memory_bytes})"
    )]
    Least {
        /// Least near memory.
        least_bytes: u64,
        /// Memory of the job.
        memory_bytes: u64,
    },
    /// A curve that is none.
    #[error("a profile has at most {POINTS_MAX} points, each with a share between 0 and 1 and a slowdown above 0")]
    Curve,
    /// Numbers of which no class of jobs can be made.
    #[error(transparent)]
    Class(#[from] ClassError),
}

impl JobClaim {
    /// Makes the class that policies decide by. A job without a profile is assumed to be as slow as
    /// its near share is small.
    pub fn class(&self) -> Result<JobClass, ClaimError> {
        let &JobClaim { memory_bytes, least_bytes, .. } = self;
        if least_bytes == 0 || least_bytes > memory_bytes {
            return Err(ClaimError::Least { least_bytes, memory_bytes });
        }
        let least = least_bytes as f64 / memory_bytes as f64;
        let assumed: [Point; ASSUMED_POINTS] = core::array::from_fn(|step| {
            let near = least + (1.0 - least) * step as f64 / (ASSUMED_POINTS - 1) as f64;
            Point { near, slowdown: 1.0 / near }
        });
        let points = if self.slowdowns.is_empty() { &assumed[..] } else { &self.slowdowns };
        let is_point = |point: &Point| point.near > 0.0 && point.near <= 1.0 && point.slowdown > 0.0;
        if points.len() > POINTS_MAX || !points.iter().all(is_point) {
            return Err(ClaimError::Curve);
        }
        let curve = Curve::through(points).ok_or(ClaimError::Curve)?;
        let run_time = RunTime::Measured { seconds: self.seconds.unwrap_or(SECONDS_UNKNOWN), curve };
        Ok(JobClass::new(1, memory_bytes, least, run_time)?)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a claim by which an agent would divide by zero.
    use super::*;

    fn claim(memory_bytes: u64, least_bytes: u64, slowdowns: &[(f64, f64)]) -> JobClaim {
        let slowdowns = slowdowns.iter().map(|&(near, slowdown)| Point { near, slowdown }).collect();
        JobClaim { memory_bytes, least_bytes, slowdowns, seconds: None }
    }

    #[test]
    fn a_claim_is_a_class() {
        let class = claim(1000, 500, &[]).class().unwrap();
        assert_eq!((class.memory_bytes(), class.least_bytes()), (1000, 500));
        assert_eq!(class.run_time().at(0.5) / class.run_time().at(1.0), 2.0);
        assert_eq!(claim(1000, 1000, &[]).class().unwrap().least(), 1.0);
        let known = JobClaim { seconds: Some(10.0), ..claim(1000, 250, &[(0.25, 1.5), (1.0, 1.0)]) };
        assert_eq!(known.class().unwrap().run_time().at(0.25), 15.0);
    }

    #[test]
    fn claims_of_nonsense_are_refused() {
        let least = |memory_bytes, least_bytes| ClaimError::Least { least_bytes, memory_bytes };
        assert_eq!(claim(10, 11, &[]).class().unwrap_err(), least(10, 11));
        assert_eq!(claim(10, 0, &[]).class().unwrap_err(), least(10, 0));
        assert_eq!(claim(u64::MAX, 1, &[]).class().unwrap_err(), ClaimError::Class(ClassError::Memory));
        for point in [(0.5, f64::NAN), (f64::NAN, 1.0), (0.5, -1.0), (0.5, f64::INFINITY), (1.5, 1.0), (0.0, 1.0)] {
            assert!(claim(10, 5, &[point, (1.0, 1.0)]).class().is_err(), "{point:?}");
        }
        assert_eq!(claim(10, 5, &[(1.0, 1.0); POINTS_MAX + 1]).class().unwrap_err(), ClaimError::Curve);
        assert!(matches!(claim(10, 5, &[(0.9, 1.0)]).class(), Err(ClaimError::Class(ClassError::Unmeasured { .. }))));
        for seconds in [0.0, f64::NAN, f64::INFINITY] {
            assert!(JobClaim { seconds: Some(seconds), ..claim(10, 5, &[]) }.class().is_err(), "{seconds}");
        }
    }
}
