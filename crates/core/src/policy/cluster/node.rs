//! Near budgets of the jobs of one node, changed while they run and never promised twice.
//!
//! A division ([`split`](super::split)) says how much each job shall have. Memory moves slowly, and
//! a job may not follow at all. So a job that shall have less is told at once, and a job that shall
//! have more is told as room appears. Room is what nobody holds: a job holds its budget, or what it
//! was measured to have from outside, less a slack, if that is more. What a job keeps [beside](beside_bytes)
//! its budget, within the slack, is left out of the next division.

/// Slack, which a job may have beyond its budget: a part of what it has, and …
const SLACK_PART: u64 = 50;
/// … memory that is in no budget, like stacks.
const SLACK_BYTES: u64 = 16 << 20;
/// Steps in which memory beside budgets is counted. Smaller ones would move all budgets all the time.
const BESIDE_STEP_BYTES: u64 = 4 << 20;
/// Least increase of a budget that is worth telling a job, if it is not the last one.
const STEP_BYTES: u64 = 4 << 20;
/// Budgets are whole pages.
const PAGE: u64 = crate::geometry::PAGE_BYTES as u64;

/// Near budget of a running job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobBudget {
    /// Budget that the job was told.
    pub offered_bytes: u64,
    /// Near memory of the job, measured from outside.
    pub measured_bytes: u64,
    /// Budget that the job shall have.
    pub target_bytes: u64,
}

impl JobBudget {
    /// Returns the near memory that nobody else can have now, in bytes.
    pub fn held_bytes(&self) -> u64 {
        // The slack does not depend on the budget: a job never holds more because its budget falls.
        self.offered_bytes.max(self.settled_bytes())
    }

    /// Tells whether the job keeps within the budget that it was told, but for 2 % and 16 MiB.
    pub fn is_kept(&self) -> bool {
        self.settled_bytes() <= self.offered_bytes
    }

    /// Returns what the job has beyond the budget that it was told, in bytes.
    pub fn beyond_bytes(&self) -> u64 {
        self.measured_bytes.saturating_sub(self.offered_bytes)
    }

    /// Returns what the job has without its slack, in bytes.
    fn settled_bytes(&self) -> u64 {
        (self.measured_bytes - self.measured_bytes / SLACK_PART).saturating_sub(SLACK_BYTES)
    }
}

/// Moves budgets towards their targets: down at once, up as far as `memory_bytes` has room. Returns
/// the room that is left, in bytes. The sum of what jobs hold rises above `memory_bytes` by no call.
pub fn approach(jobs: &mut [JobBudget], memory_bytes: u64) -> u64 {
    for job in &mut *jobs {
        job.offered_bytes = job.offered_bytes.min(job.target_bytes);
    }
    let held = jobs.iter().fold(0u64, |sum, job| sum.saturating_add(job.held_bytes()));
    let mut room = memory_bytes.saturating_sub(held);
    for job in jobs.iter_mut().filter(|job| job.offered_bytes < job.target_bytes) {
        let held = job.held_bytes();
        let most = job.target_bytes.min(held.saturating_add(room));
        let offer = if most == job.target_bytes { most } else { most / PAGE * PAGE };
        if offer < job.target_bytes && offer < job.offered_bytes.saturating_add(STEP_BYTES) {
            continue;
        }
        job.offered_bytes = offer;
        room -= job.held_bytes().saturating_sub(held);
    }
    room
}

/// Returns what is to be kept free for a job that was measured to have `beyond_bytes` more than its budget
/// and is within its slack, if so far it was `before`: at once more, and less when it is two steps too
/// much.
pub fn beside_bytes(before: u64, beyond_bytes: u64) -> u64 {
    let needed = beyond_bytes.next_multiple_of(BESIDE_STEP_BYTES);
    if needed > before || needed + 2 * BESIDE_STEP_BYTES <= before { needed } else { before }
}

/// Returns the budget of a job with the near share `share`, in bytes: whole pages, and no less than
/// the least.
pub fn budget_bytes(share: f64, memory_bytes: u64, least_bytes: u64) -> u64 {
    let bytes = crate::cast::saturating_u64(share * memory_bytes as f64);
    if share >= 1.0 { memory_bytes } else { (bytes / PAGE * PAGE).clamp(least_bytes, memory_bytes) }
}

#[cfg(test)]
mod tests {
    //! Guards against near memory that two jobs are promised, and against memory that nobody gets.
    use super::*;
    use alloc::vec::Vec;

    const MIB: u64 = 1 << 20;

    fn job(offered: u64, measured: u64, target: u64) -> JobBudget {
        JobBudget { offered_bytes: offered * MIB, measured_bytes: measured * MIB, target_bytes: target * MIB }
    }

    #[test]
    fn a_job_grows_only_into_what_another_has_left() {
        let mut jobs = [job(800, 790, 500), job(200, 190, 500)];
        assert!(approach(&mut jobs, 1000 * MIB) < PAGE);
        // Told at once, and not yet out: 758 are held, without the slack.
        assert_eq!(jobs.map(|job| job.offered_bytes / MIB), [500, 241]);
        jobs[0].measured_bytes = 600 * MIB;
        approach(&mut jobs, 1000 * MIB);
        assert_eq!(jobs.map(|job| job.offered_bytes / MIB), [500, 428]);
        jobs[0].measured_bytes = 520 * MIB;
        approach(&mut jobs, 1000 * MIB);
        assert_eq!(jobs.map(|job| job.offered_bytes / MIB), [500, 500]);
    }

    #[test]
    fn a_job_that_ignores_its_budget_takes_from_nobody() {
        let mut jobs = [job(300, 900, 300), job(100, 100, 700)];
        assert_eq!(approach(&mut jobs, 1000 * MIB), 0);
        assert_eq!(jobs[1].offered_bytes, 134 * MIB, "the slack of the first is beside the memory");
        let mut jobs = [job(300, 900, 950), job(50, 50, 50)];
        assert_eq!(approach(&mut jobs, 1000 * MIB), 0, "what it has already needs no room");
        assert_eq!(jobs[0].offered_bytes, 950 * MIB);
    }

    #[test]
    fn random_histories_never_overbook_and_end_at_their_targets() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let memory = (500 + random.u64(..2000)) * MIB;
            let count = 1 + random.usize(..12) as u64;
            let mut jobs: Vec<JobBudget> = (0..count).map(|_| job(0, 0, 0)).collect();
            for round in 0..60 {
                let is_last = round >= 40;
                if !is_last {
                    let mut left = memory;
                    for job in &mut jobs {
                        job.target_bytes = random.u64(..=left) / PAGE * PAGE;
                        left -= job.target_bytes;
                    }
                }
                let before: u64 = jobs.iter().map(JobBudget::held_bytes).sum();
                let room = approach(&mut jobs, memory);
                let held: u64 = jobs.iter().map(JobBudget::held_bytes).sum();
                assert!(held <= memory.max(before), "seed {seed}: {held} of {memory}");
                assert!(room <= memory - held.min(memory), "seed {seed}");
                for job in &mut jobs {
                    assert!(job.offered_bytes <= job.target_bytes, "seed {seed}");
                    let is_slow = !is_last && random.bool();
                    let keeps = random.u64(..=job.offered_bytes);
                    job.measured_bytes = if is_slow { job.measured_bytes.max(keeps) } else { keeps };
                }
            }
            assert!(jobs.iter().all(|job| job.offered_bytes == job.target_bytes), "seed {seed}: {jobs:?}");
        }
    }

    #[test]
    fn memory_beside_budgets_is_kept_free_in_steps() {
        let after = |before, beyond| beside_bytes(before * MIB, beyond * MIB) / MIB;
        assert_eq!((after(0, 0), after(0, 1), after(4, 4), after(4, 5)), (0, 4, 4, 8));
        assert_eq!((after(8, 5), after(8, 4), after(8, 1), after(8, 0)), (8, 8, 8, 0));
        // Whatever was kept free before, it is enough now, and not much more than enough.
        for before in (0..40).step_by(4) {
            for beyond in 0..40 {
                let free = after(before, beyond);
                assert!(free >= beyond && free < beyond + 12, "{before} {beyond}");
            }
        }
        // What moves a little does not move budgets.
        for beyond in 0..40u64 {
            let free = after(0, beyond);
            (0..=3).for_each(|less| assert_eq!(after(free, beyond.saturating_sub(less)), free, "{beyond} {less}"));
        }
    }

    #[test]
    fn budgets_are_whole_pages_and_never_below_the_least() {
        assert_eq!(budget_bytes(1.0, 10_000, 5000), 10_000);
        assert_eq!(budget_bytes(0.5, 100_000, 1), 49_152);
        assert_eq!(budget_bytes(0.5, 10_000, 5000), 5000);
        assert_eq!(budget_bytes(f64::NAN, 10_000, 5000), 5000);
    }
}
