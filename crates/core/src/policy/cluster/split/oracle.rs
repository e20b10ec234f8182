//! Exact division by memory-time, for tests: dynamic programming over bytes under Dinkelbach's
//! iteration. Jobs take steps of their table only.

use super::JobProgress;
use crate::policy::cluster::job::{JobClass, STEPS};
use alloc::vec::Vec;

/// Cost, N and C.
type Entry = Option<(f64, f64, f64)>;

/// Returns the least N / C over all divisions that use all memory, up to the least step of a job.
/// Shares of all steps must be whole numbers of bytes.
pub(super) fn best_ratio(classes: &[JobClass], jobs: &[JobProgress], memory_bytes: usize) -> f64 {
    let terms = |job: &JobProgress, step: usize| {
        let class = &classes[job.class];
        let share = class.share(step);
        let seconds = class.run_time().at(share);
        let weight = class.memory_bytes() as f64 * job.remaining.max(0.05);
        (weight * (share * seconds - class.seconds()), weight * (1.0 - share) * seconds)
    };
    let bytes = |job: &JobProgress, step: usize| {
        (classes[job.class].memory_bytes() as f64 * classes[job.class].share(step)).round() as usize
    };
    let step_bytes = jobs.iter().map(|job| bytes(job, 1) - bytes(job, 0)).min().unwrap();
    let mut lambda = 0.0;
    loop {
        // Cost with N and C of the best choice that uses so many bytes.
        let mut best: Vec<Entry> = alloc::vec![None; memory_bytes + 1];
        best[0] = Some((0.0, 0.0, 0.0));
        for job in jobs {
            let mut next: Vec<Entry> = alloc::vec![None; memory_bytes + 1];
            for (used, from) in best.iter().enumerate().filter_map(|(used, from)| Some((used, (*from)?))) {
                for step in 0..=STEPS {
                    let to = used + bytes(job, step);
                    if to > memory_bytes {
                        break;
                    }
                    let (near, far) = terms(job, step);
                    let cost = from.0 + near - lambda * far;
                    if next[to].is_none_or(|(least, ..)| cost < least) {
                        next[to] = Some((cost, from.1 + near, from.2 + far));
                    }
                }
            }
            best = next;
        }
        let ends = &best[memory_bytes + 1 - step_bytes..];
        let (_, near, far) = ends.iter().flatten().copied().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        let ratio = near / far;
        if ratio >= lambda - 1e-9 * ratio.abs() && lambda != 0.0 {
            return ratio;
        }
        lambda = ratio;
    }
}
