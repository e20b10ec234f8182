//! Order of waiting jobs.
//!
//! The published order is that of arrival, and any job that fits may overtake one that does not. A
//! job that fits nowhere can then wait for ever. Here overtaking is bounded: a job is overtaken
//! only by jobs that arrived within a window after it. The window is at least as long as the longest job:
//! a shorter one would keep nodes idle for most of a job's time, before a job that needs much.
//!
//! The longest job first would leave short ones to fill the end of a batch (Graham, 1969), but then
//! jobs that need memory no longer run beside those that need cores. So only the long jobs go first,
//! and the rest stay mixed as they arrived. Profiles make run times known.

use alloc::vec::Vec;

/// A class is long if its run time is at least this part of the longest known.
const LONG: f64 = 0.5;

/// Order in which the oldest waiting jobs of the classes are tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QueueOrder {
    /// Oldest first; jobs that fit overtake those that do not, without bound.
    Arrival,
    /// Long jobs first, then the oldest. No job is overtaken by one that arrived after it by more than
    /// the window.
    LongFirst {
        /// Bound of overtaking in seconds, where no job takes longer.
        window_s: f64,
    },
}

/// Oldest waiting job of a class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueHead {
    /// Class of the job.
    pub class: usize,
    /// Arrival of the job in seconds.
    pub arrival_s: f64,
    /// Run time of the job in seconds with all its memory near.
    pub run_s: f64,
}

impl QueueOrder {
    /// Sorts the heads of all queues into the order in which they are tried, and removes those that
    /// may not start before an older job has. `longest_s` is the longest run time of any job so far,
    /// also of those that run or have ended.
    pub fn sort(self, heads: &mut Vec<QueueHead>, longest_s: f64) {
        match self {
            QueueOrder::Arrival => heads.sort_unstable_by(oldest_first),
            QueueOrder::LongFirst { .. } => {
                let oldest_s = heads.iter().map(|head| head.arrival_s).fold(f64::INFINITY, f64::min);
                heads.retain(|head| self.may_overtake(head.arrival_s, oldest_s, longest_s));
                let is_short = |head: &QueueHead| head.run_s < LONG * longest_s;
                heads.sort_unstable_by(|a, b| is_short(a).cmp(&is_short(b)).then(oldest_first(a, b)));
            }
        }
    }

    /// Decides whether a job may start before one that waits and arrived at `oldest_s`. `longest_s` is as
    /// for [`sort`](QueueOrder::sort).
    pub fn may_overtake(self, arrival_s: f64, oldest_s: f64, longest_s: f64) -> bool {
        match self {
            QueueOrder::Arrival => true,
            QueueOrder::LongFirst { window_s } => arrival_s <= oldest_s + window_s.max(longest_s),
        }
    }
}

fn oldest_first(a: &QueueHead, b: &QueueHead) -> core::cmp::Ordering {
    a.arrival_s.total_cmp(&b.arrival_s).then(a.class.cmp(&b.class))
}

#[cfg(test)]
mod tests {
    //! Guards against a job that waits for ever.
    use super::*;

    fn classes(order: QueueOrder, heads: &[(f64, f64)]) -> Vec<usize> {
        classes_of(order, heads, 30.0)
    }

    fn classes_of(order: QueueOrder, heads: &[(f64, f64)], longest_s: f64) -> Vec<usize> {
        let head = |(class, &(arrival_s, run_s))| QueueHead { class, arrival_s, run_s };
        let mut heads: Vec<_> = heads.iter().enumerate().map(head).collect();
        order.sort(&mut heads, longest_s);
        heads.iter().map(|head| head.class).collect()
    }

    #[test]
    fn heads_are_tried_oldest_first_or_long_first() {
        let heads = [(3.0, 10.0), (1.0, 14.0), (2.0, 30.0), (4.0, 15.0)];
        assert_eq!(classes(QueueOrder::Arrival, &heads), [1, 2, 0, 3]);
        assert_eq!(classes(QueueOrder::LongFirst { window_s: 9.0 }, &heads), [2, 3, 1, 0]);
        assert_eq!(classes(QueueOrder::LongFirst { window_s: 9.0 }, &heads[..2]), [1, 0], "all long jobs have started");
    }

    #[test]
    fn nobody_overtakes_from_outside_the_window() {
        let order = QueueOrder::LongFirst { window_s: 1.0 };
        let heads = [(3.0, 0.1), (1.0, 0.2), (2.0, 0.9)];
        assert_eq!(classes_of(order, &heads, 1.0), [2, 1]);
        assert_eq!(classes_of(order, &heads, 2.0), [1, 2, 0], "jobs take longer than the window");
        let may = |arrival_s, longest_s| order.may_overtake(arrival_s, 1.0, longest_s);
        assert!(may(2.0, 0.5) && !may(2.1, 0.5) && may(3.0, 2.0) && !may(3.1, 2.0));
        assert!(QueueOrder::Arrival.may_overtake(1e9, 0.0, 0.0));
    }
}
