//! Exact division by memory-time, for tests and experiments: dynamic programming over bytes under
//! Dinkelbach's iteration. Jobs take steps of their table only.
//!
//! `farfield-bench` includes this file, so it uses what is public.

use super::{JobClass, JobProgress, STEPS, Vec};

/// Part of a job's work that is counted as left at least, as published.
const REMAINING_MIN: f64 = 0.05;

/// Cost, N and C.
type Entry = Option<(f64, f64, f64)>;

/// Returns N / C of a division.
pub(super) fn ratio(classes: &[JobClass], jobs: &[JobProgress], shares: &[f64]) -> f64 {
    let of = |(job, share): (&JobProgress, &f64)| terms(&classes[job.class], job, *share);
    let (near, far) = jobs.iter().zip(shares).map(of).fold((0.0, 0.0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
    near / far
}

/// Returns N and C of a job with this share.
fn terms(class: &JobClass, job: &JobProgress, share: f64) -> (f64, f64) {
    let seconds = class.run_time().at(share);
    let weight = class.memory_bytes() as f64 * job.remaining.max(REMAINING_MIN);
    (weight * (share * seconds - class.seconds()), weight * (1.0 - share) * seconds)
}

/// Returns the least N / C over all divisions that use all memory, up to the least step of a job.
/// Shares of all steps must be whole numbers of bytes.
pub(super) fn best_ratio(classes: &[JobClass], jobs: &[JobProgress], memory_bytes: usize) -> f64 {
    let share = |job: &JobProgress, step: usize| {
        let floor = classes[job.class].floor();
        if step == STEPS { 1.0 } else { floor + (1.0 - floor) * step as f64 / STEPS as f64 }
    };
    let bytes =
        |job: &JobProgress, step: usize| (classes[job.class].memory_bytes() as f64 * share(job, step)).round() as usize;
    let nothing = || {
        let mut entries: Vec<Entry> = Vec::new();
        entries.resize(memory_bytes + 1, None);
        entries
    };
    let step_bytes = jobs.iter().map(|job| bytes(job, 1) - bytes(job, 0)).min().unwrap();
    let mut lambda = 0.0;
    loop {
        // Cost with N and C of the best choice that uses so many bytes.
        let mut best = nothing();
        best[0] = Some((0.0, 0.0, 0.0));
        for job in jobs {
            let mut next = nothing();
            for (used, from) in best.iter().enumerate().filter_map(|(used, from)| Some((used, (*from)?))) {
                for step in 0..=STEPS {
                    let to = used + bytes(job, step);
                    if to > memory_bytes {
                        break;
                    }
                    let (near, far) = terms(&classes[job.class], job, share(job, step));
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
