//! Division by memory-time (CFM, section 4.4.2).
//!
//! A job with the share r near needs `r · f(r)` of near memory-time and `(1 - r) · f(r)` of far
//! memory-time for each byte and each part of its work. The division minimises the change N of
//! near memory-time over the far memory-time C:
//!
//! ```text
//! N = Σ w (r f(r) - f(1))    C = Σ w (1 - r) f(r)    w = memory · remaining work
//! ```
//!
//! subject to Σ memory · r = M. Dinkelbach's iteration turns the ratio into a sum: for a guess λ
//! of the ratio, minimise N - λ C; its ratio is the next guess. The sum separates over jobs, with
//! one constraint between them, so it falls to a Lagrange multiplier μ: each job moves along the
//! lower convex hull of its costs as long as a byte gains more than μ. μ is found by bisection.
//! What is left then is given where it helps most. An exact solution needs dynamic programming
//! over bytes; it is some ten times slower, and the oracle in tests.

use super::JobProgress;
use crate::cast::u16_of;
use crate::policy::cluster::job::{JobClass, STEPS};
use alloc::vec::Vec;

/// Iterations of Dinkelbach's method; it converges faster than linearly, two or three do.
const ROUNDS_MAX: usize = 5;
/// Relative change of the ratio at which it has converged.
const CONVERGED: f64 = 0.03;
/// Halvings of the interval of the multiplier. The rest is found step by step.
const HALVINGS: usize = 8;
/// Value of λ with which N - λ C is the total time of all bytes, apart from a constant.
const TOTAL_TIME: f64 = -1.0;
/// Part of a job's work that is counted as left at least, as published: a job about to end is not
/// given up.
const REMAINING_MIN: f64 = 0.05;

/// What is known of a class.
#[derive(Clone, Debug)]
struct ClassTable {
    memory: f64,
    floor: f64,
    /// Near share and run time at each step.
    share: Vec<f64>,
    seconds: Vec<f64>,
    hull: Hull,
}

/// Lower convex hull of a class's cost per byte, for one guess of the ratio.
#[derive(Clone, Debug)]
struct Hull {
    /// Guess that it belongs to; NaN at first.
    lambda: f64,
    /// Steps of the corners with their costs.
    corners: Vec<(u16, f64)>,
    /// Change of the cost per share along the edge to the next corner; rising.
    slopes: Vec<f64>,
    /// Cost at each step, and its change per share from one step to the next.
    costs: Vec<f64>,
    rises: Vec<f64>,
}

/// Solver, with room for its tables.
#[derive(Clone, Debug)]
pub(super) struct MemoryTime {
    classes: Vec<ClassTable>,
    /// For each job: weight of its work, and its corner of the hull.
    weights: Vec<f64>,
    corners: Vec<usize>,
    /// Corners at the two ends of the multiplier's interval.
    low_corners: Vec<usize>,
    high_corners: Vec<usize>,
    trial: Vec<f64>,
}

impl MemoryTime {
    pub(super) fn new(classes: &[JobClass], floor: fn(&JobClass) -> f64) -> MemoryTime {
        let classes = classes.iter().map(|class| ClassTable::new(class, floor(class))).collect();
        let (low_corners, high_corners) = (Vec::new(), Vec::new());
        MemoryTime { classes, weights: Vec::new(), corners: Vec::new(), low_corners, high_corners, trial: Vec::new() }
    }

    /// Improves a division that uses all memory.
    pub(super) fn split(&mut self, jobs: &[JobProgress], memory_bytes: u64, shares: &mut [f64]) {
        self.weights.clear();
        self.weights.extend(jobs.iter().map(|job| job.remaining.max(REMAINING_MIN)));
        self.minimise_ratio(jobs, memory_bytes, shares);
    }

    /// Improves a division in the same way if that saves near memory-time. If no division does, the
    /// least ratio would be that of the division that slows jobs most, so the total time is minimised.
    pub(super) fn split_if_worth(&mut self, jobs: &[JobProgress], memory_bytes: u64, shares: &mut [f64]) {
        self.split(jobs, memory_bytes, shares);
        if self.ratio(jobs, shares) > 0.0 && self.minimise(jobs, memory_bytes as f64, TOTAL_TIME) {
            shares.copy_from_slice(&self.trial);
        }
    }

    fn minimise_ratio(&mut self, jobs: &[JobProgress], memory_bytes: u64, shares: &mut [f64]) {
        let mut lambda = self.ratio(jobs, shares);
        for _ in 0..ROUNDS_MAX {
            if !self.minimise(jobs, memory_bytes as f64, lambda) {
                return;
            }
            let ratio = self.ratio(jobs, &self.trial);
            if ratio < lambda {
                shares.copy_from_slice(&self.trial);
            }
            if ratio > lambda - CONVERGED * lambda.abs() {
                return;
            }
            lambda = ratio;
        }
    }

    /// Returns N / C of a division.
    fn ratio(&self, jobs: &[JobProgress], shares: &[f64]) -> f64 {
        let (mut near, mut far) = (0.0, 0.0);
        for ((job, weight), &share) in jobs.iter().zip(&self.weights).zip(shares) {
            let class = &self.classes[job.class];
            let seconds = class.at(share);
            near += weight * class.memory * (share * seconds - class.seconds[STEPS]);
            far += weight * class.memory * (1.0 - share) * seconds;
        }
        if far > 0.0 { near / far } else { f64::INFINITY }
    }

    /// Minimises N - λ C into `trial`. Returns false if the floors do not fit.
    fn minimise(&mut self, jobs: &[JobProgress], memory: f64, lambda: f64) -> bool {
        let (mut low, mut high, mut used) = (f64::INFINITY, f64::NEG_INFINITY, 0.0);
        self.low_corners.clear();
        self.high_corners.clear();
        for (job, weight) in jobs.iter().zip(&self.weights) {
            let class = &mut self.classes[job.class];
            class.make_hull(lambda);
            if let (Some(first), Some(last)) = (class.hull.slopes.first(), class.hull.slopes.last()) {
                low = low.min(weight * first);
                high = high.max(weight * last);
            }
            self.low_corners.push(0);
            self.high_corners.push(class.hull.slopes.len());
            used += class.memory * class.corner_share(0);
        }
        // Below the least slope all jobs have their floors, above the greatest they have all.
        if used > memory {
            return false;
        }
        low -= low.abs() * 1e-9 + f64::MIN_POSITIVE;
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            let needed = self.advance(jobs, middle);
            if needed <= memory {
                (low, used) = (middle, needed);
                core::mem::swap(&mut self.low_corners, &mut self.corners);
            } else {
                high = middle;
                core::mem::swap(&mut self.high_corners, &mut self.corners);
            }
        }
        self.corners.clone_from(&self.low_corners);
        self.climb(jobs, memory - used);
        true
    }

    /// Moves each job to the last corner whose edge has a slope below the multiplier, which is between
    /// its corners at the ends of the interval. Returns the bytes used.
    fn advance(&mut self, jobs: &[JobProgress], multiplier: f64) -> f64 {
        self.corners.clear();
        let mut used = 0.0;
        let ends = self.low_corners.iter().zip(&self.high_corners);
        for ((job, weight), (&low, &high)) in jobs.iter().zip(&self.weights).zip(ends) {
            let class = &self.classes[job.class];
            let bound = multiplier / weight;
            let corner = low + class.hull.slopes[low..high].partition_point(|slope| *slope < bound);
            used += class.memory * class.corner_share(corner);
            self.corners.push(corner);
        }
        used
    }

    /// Gives what is left where it helps most: whole edges of hulls, then a part of one.
    fn climb(&mut self, jobs: &[JobProgress], mut left: f64) {
        loop {
            let slope = |index: usize| -> Option<f64> {
                let hull = &self.classes[jobs[index].class].hull;
                Some(self.weights[index] * hull.slopes.get(self.corners[index])?)
            };
            let next = (0..jobs.len()).filter_map(|index| Some((slope(index)?, index)));
            let Some((_, index)) = next.min_by(|a, b| a.0.total_cmp(&b.0)) else { break };
            let class = &self.classes[jobs[index].class];
            let corner = self.corners[index];
            let bytes = class.memory * (class.corner_share(corner + 1) - class.corner_share(corner));
            if bytes > left {
                break;
            }
            left -= bytes;
            self.corners[index] += 1;
        }
        self.trial.clear();
        let shares = jobs.iter().zip(&self.corners).map(|(job, &corner)| self.classes[job.class].corner_share(corner));
        self.trial.extend(shares);
        self.fill(jobs, left);
    }

    /// Gives the last bytes, fewer than the next edge of any hull has, by true costs.
    fn fill(&mut self, jobs: &[JobProgress], mut left: f64) {
        let mut between = None;
        while left > 0.0 {
            let change = |index: usize| {
                let from = self.trial[index];
                let to = (from + left / self.classes[jobs[index].class].memory).min(1.0);
                let cost = self.cost(jobs, index, to) - self.cost(jobs, index, from);
                (to > from).then(|| (cost / (to - from) / self.classes[jobs[index].class].memory, index, to))
            };
            let best = (0..jobs.len()).filter_map(change).min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((_, index, to)) = best else { break };
            left -= (to - self.trial[index]) * self.classes[jobs[index].class].memory;
            self.trial[index] = to;
            between = Some(index);
        }
        if let Some(index) = between {
            self.exchange(jobs, index);
        }
    }

    /// Tries other places for the job that stands between two corners of its hull, with another job
    /// in exchange: there the hull promises less than the costs are.
    fn exchange(&mut self, jobs: &[JobProgress], between: usize) {
        let own = &self.classes[jobs[between].class];
        let mut best = (0.0, between, 0.0, 0.0);
        for other in (0..jobs.len()).filter(|other| *other != between) {
            let class = &self.classes[jobs[other].class];
            let (here, there) = (self.trial[between], self.trial[other]);
            let before = self.cost(jobs, between, here) + self.cost(jobs, other, there);
            let mut consider = |own_share: f64, other_share: f64| {
                let is_share = |share: f64, class: &ClassTable| share >= class.floor && share <= 1.0;
                if is_share(own_share, own) && is_share(other_share, class) {
                    let change = self.cost(jobs, between, own_share) + self.cost(jobs, other, other_share) - before;
                    if change < best.0 {
                        best = (change, other, own_share, other_share);
                    }
                }
            };
            for share in class.corners_around(self.corners[other]) {
                consider(here + (there - share) * class.memory / own.memory, share);
            }
            for share in own.corners_around(self.corners[between]) {
                consider(share, there + (here - share) * own.memory / class.memory);
            }
        }
        let (change, other, own_share, other_share) = best;
        if change < 0.0 {
            self.trial[between] = own_share;
            self.trial[other] = other_share;
        }
    }

    /// Returns the cost of a job at a share, for the hull's guess of the ratio.
    fn cost(&self, jobs: &[JobProgress], index: usize, share: f64) -> f64 {
        let class = &self.classes[jobs[index].class];
        self.weights[index] * class.memory * class.cost(share)
    }
}

impl ClassTable {
    fn new(class: &JobClass, floor: f64) -> ClassTable {
        debug_assert!(floor > 0.0);
        let span = 1.0 - floor;
        let share: Vec<f64> = (0..=STEPS)
            .map(|step| if step == STEPS { 1.0 } else { floor + span * step as f64 / STEPS as f64 })
            .collect();
        let seconds = share.iter().map(|share| class.run_time().at(*share)).collect();
        let hull = Hull {
            lambda: f64::NAN,
            corners: Vec::with_capacity(STEPS + 1),
            slopes: Vec::with_capacity(STEPS),
            costs: Vec::with_capacity(STEPS + 1),
            rises: Vec::with_capacity(STEPS),
        };
        ClassTable { memory: class.memory_bytes() as f64, floor, share, seconds, hull }
    }

    /// Returns the run time at a share, straight between steps.
    fn at(&self, share: f64) -> f64 {
        if share >= 1.0 || self.floor >= 1.0 {
            return self.seconds[STEPS];
        }
        let place = ((share - self.floor) / (1.0 - self.floor)).max(0.0) * STEPS as f64;
        let step = crate::cast::usize_of(crate::cast::saturating_u64(place)).min(STEPS - 1);
        let part = place - step as f64;
        self.seconds[step] + (self.seconds[step + 1] - self.seconds[step]) * part
    }

    /// Returns the cost per byte and work at a share, for the hull's guess of the ratio.
    fn cost(&self, share: f64) -> f64 {
        let seconds = self.at(share);
        seconds * (share - self.hull.lambda * (1.0 - share))
    }

    fn corner_share(&self, corner: usize) -> f64 {
        self.share[usize::from(self.hull.corners[corner].0)]
    }

    /// Returns the shares of the corners before and after this one.
    fn corners_around(&self, corner: usize) -> [f64; 2] {
        let last = self.hull.slopes.len();
        [corner.saturating_sub(1), (corner + 1).min(last)].map(|corner| self.corner_share(corner))
    }

    /// Makes the lower convex hull for a guess of the ratio (Andrew's monotone chain).
    fn make_hull(&mut self, lambda: f64) {
        if self.hull.lambda == lambda {
            return;
        }
        let ClassTable { share, seconds, hull, floor, .. } = self;
        hull.lambda = lambda;
        hull.corners.clear();
        hull.slopes.clear();
        if *floor >= 1.0 {
            hull.corners.push((u16_of(STEPS), 0.0));
            return;
        }
        let step_share = (1.0 - *floor) / STEPS as f64;
        // Without the chain's branches between them, these are computed side by side.
        let costs = seconds.iter().zip(&*share).map(|(seconds, share)| seconds * (share - lambda * (1.0 - share)));
        hull.costs.clear();
        hull.costs.extend(costs);
        hull.rises.clear();
        hull.rises.extend(hull.costs.windows(2).map(|pair| (pair[1] - pair[0]) / step_share));
        for (step, &cost) in (0..=u16_of(STEPS)).zip(&hull.costs) {
            while let Some(&(before, before_cost)) = hull.corners.last() {
                let slope = match step - before {
                    1 => hull.rises[usize::from(before)],
                    steps => (cost - before_cost) / (f64::from(steps) * step_share),
                };
                if hull.slopes.last().is_none_or(|last| *last < slope) {
                    hull.slopes.push(slope);
                    break;
                }
                hull.slopes.pop();
                hull.corners.pop();
            }
            hull.corners.push((step, cost));
        }
    }
}
