//! Divisions that know nothing of run times.

use crate::policy::cluster::job::JobClass;
use alloc::vec::Vec;

/// Rounds of [`uniform`]; each pins at least one more job to its least share, or is the last.
const ROUNDS_MAX: usize = 64;

/// Gives all jobs one share of their memory, and those whose least share is higher that one.
pub(super) fn uniform<'a>(jobs: impl Iterator<Item = &'a JobClass> + Clone, memory_bytes: u64, shares: &mut Vec<f64>) {
    let mut level = 0.0;
    for _ in 0..ROUNDS_MAX {
        let (mut left, mut asked) = (memory_bytes as f64, 0.0);
        for job in jobs.clone() {
            match job.least() > level {
                true if level > 0.0 => left -= job.least_bytes() as f64,
                _ => asked += job.memory_bytes() as f64,
            }
        }
        let next = if asked > 0.0 { left / asked } else { level };
        if level > 0.0 && next >= level - 1e-12 {
            break;
        }
        level = next;
    }
    shares.extend(jobs.map(|job| level.max(job.least()).min(1.0)));
}

/// Takes from each job the same part of what it can spare, `excess_bytes` in all.
pub(super) fn variable<'a>(jobs: impl Iterator<Item = &'a JobClass> + Clone, excess_bytes: u64, shares: &mut Vec<f64>) {
    let spare = |job: &JobClass| (1.0 - job.least()) * job.memory_bytes() as f64;
    let all: f64 = jobs.clone().map(spare).sum();
    let part = if all > 0.0 { (excess_bytes as f64 / all).min(1.0) } else { 0.0 };
    shares.extend(jobs.map(|job| 1.0 - part * (1.0 - job.least())));
}
