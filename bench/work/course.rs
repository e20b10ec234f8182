//! How the hybrid plane decides while a program runs (Atlas, Figure 7): the share of the pages that come whole, at moments that
//! divide the whole time evenly.

use crate::{Options, Outcome};
use anyhow::Result;
use farfield::{Heap, Stats};
use farfield_os::process;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Between two looks at the heap; a look takes some microseconds.
const INTERVAL: Duration = Duration::from_millis(2);

/// Does `work` with the data in `heap`; if `--moments` says so, with figures `whole_share_10` and so on, by percent of the time.
pub(crate) fn followed(options: &Options, heap: &Heap, work: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    if options.moments == 0 {
        return work();
    }
    let (alive, end) = mpsc::channel::<()>();
    thread::scope(|threads| {
        let looks = threads.spawn(move || {
            let mut looks = Vec::new();
            loop {
                looks.push((process::now_ns(), whole_share(&heap.stats())));
                if end.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return looks;
                }
            }
        });
        let outcome = work();
        drop(alive);
        let looks = looks.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let mut outcome = outcome?;
        for (percent, share) in at_moments(&looks, options.moments) {
            outcome.figure(&format!("whole_share_{percent}"), share);
        }
        Ok(outcome)
    })
}

/// Of the pages in which values can lie, those that come whole: as was decided, or because what is in them has no handles.
fn whole_share(stats: &Stats) -> f64 {
    let by_object = stats.value_pages - stats.pages_to_come_whole.min(stats.value_pages);
    if stats.pages == 0 { 0.0 } else { 1.0 - by_object.min(stats.pages) as f64 / stats.pages as f64 }
}

/// What the last look before each of so many moments found, by percent of the time; the last moment is the end.
fn at_moments(looks: &[(u64, f64)], moments: u64) -> Vec<(u64, f64)> {
    let (Some((first, _)), Some((last, _))) = (looks.first(), looks.last()) else { return Vec::new() };
    let at = |moment: u64| {
        let time = first + (last - first) * moment / moments;
        let next = looks.partition_point(|(look, _)| *look <= time);
        (100 * moment / moments, looks[next - 1].1)
    };
    (1..=moments).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_divide_the_time_and_not_the_looks() {
        let looks = [(100, 0.0), (101, 0.1), (102, 0.2), (150, 0.5), (199, 0.6), (200, 1.0)];
        assert_eq!(at_moments(&looks, 4), [(25, 0.2), (50, 0.5), (75, 0.5), (100, 1.0)]);
        assert_eq!(at_moments(&looks[..1], 2), [(50, 0.0), (100, 0.0)]);
        assert_eq!(at_moments(&[], 2), []);
    }

    #[test]
    fn pages_without_handles_come_whole() {
        let stats = Stats { pages: 100, value_pages: 60, pages_to_come_whole: 20, ..Stats::default() };
        assert_eq!(whole_share(&stats), 0.6);
        assert_eq!(whole_share(&Stats::default()), 0.0);
    }
}
