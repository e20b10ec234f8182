//! The last hour of each job and of all together, in memory of a known size.

use super::rows::{PageRow, PageRows};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Interval between two samples.
pub(super) const EVERY: Duration = Duration::from_secs(5);
/// Samples of a series: one hour.
const SAMPLES_MAX: usize = 720;
/// Most series. With all their samples they take 18 MiB; jobs beyond have no history.
const SERIES_MAX: usize = 1024;
/// Name of the series of all jobs together.
const TOTAL: &str = "total";

/// State of a job, or of all jobs, at one time.
#[derive(Clone, Copy, PartialEq, Debug)]
struct HistorySample {
    /// Seconds since 1970, which fit until 2106.
    at_s: u32,
    near_pages: u32,
    far_pages: u32,
    faults_per_s: f32,
    fault_us_p50: f32,
    fault_us_p99: f32,
}

/// Samples of one job or heap.
#[derive(Default)]
struct Series(VecDeque<HistorySample>);

#[derive(Default)]
pub(super) struct History {
    series: BTreeMap<String, Series>,
    last_ms: Option<u64>,
}

/// Part of a series, as JSON output: rows of milliseconds, near bytes, far bytes, faults per
/// second, and the median and the 99th percentile of fault latencies in nanoseconds.
#[derive(serde::Serialize, Debug)]
pub(super) struct SeriesPart {
    every_ms: u64,
    samples: Vec<(u64, u64, u64, f32, u64, u64)>,
}

impl History {
    /// Notes the state of all rows, if a sample is due. Series of rows that are gone end.
    pub(super) fn note(&mut self, at_ms: u64, rows: &PageRows) {
        let every = EVERY.as_millis() as u64;
        // Half a second early is not too early: looks have an interval of their own.
        if self.last_ms.is_some_and(|last| at_ms >= last && at_ms < last + every - 500) {
            return;
        }
        self.last_ms = Some(at_ms);
        self.series.retain(|id, _| id == TOTAL || rows.contains_key(id));
        let mut total = HistorySample::zero(at_ms);
        for (id, row) in rows {
            let PageRow::Job(job) = row else { continue };
            let sample = HistorySample {
                near_pages: pages(job.near),
                far_pages: pages(job.far),
                faults_per_s: job.faults as f32,
                fault_us_p50: micros(job.p50),
                fault_us_p99: micros(job.p99),
                ..total
            };
            total.add(&HistorySample { at_s: 0, ..sample });
            self.push(id, HistorySample { at_s: total.at_s, ..sample });
        }
        self.push(TOTAL, total);
    }

    fn push(&mut self, id: &str, sample: HistorySample) {
        if !self.series.contains_key(id) && self.series.len() >= SERIES_MAX {
            return;
        }
        let samples = &mut self.series.entry(id.to_owned()).or_default().0;
        if samples.len() == SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    /// Returns the samples of a series after a time; an empty identifier means all jobs together.
    pub(super) fn since(&self, id: &str, since_ms: u64) -> SeriesPart {
        let series = self.series.get(if id.is_empty() { TOTAL } else { id });
        let samples = series.into_iter().flat_map(|series| &series.0);
        let samples =
            samples.filter(|sample| u64::from(sample.at_s) * 1000 > since_ms).map(HistorySample::row).collect();
        SeriesPart { every_ms: EVERY.as_millis() as u64, samples }
    }
}

impl HistorySample {
    fn zero(at_ms: u64) -> HistorySample {
        HistorySample {
            at_s: u32::try_from(at_ms / 1000).unwrap_or(u32::MAX),
            near_pages: 0,
            far_pages: 0,
            faults_per_s: 0.0,
            fault_us_p50: 0.0,
            fault_us_p99: 0.0,
        }
    }

    /// Adds a job to the total. Latencies of the total are the worst of all jobs.
    fn add(&mut self, job: &HistorySample) {
        self.near_pages = self.near_pages.saturating_add(job.near_pages);
        self.far_pages = self.far_pages.saturating_add(job.far_pages);
        self.faults_per_s += job.faults_per_s;
        self.fault_us_p50 = self.fault_us_p50.max(job.fault_us_p50);
        self.fault_us_p99 = self.fault_us_p99.max(job.fault_us_p99);
    }

    fn row(&self) -> (u64, u64, u64, f32, u64, u64) {
        let [near, far] = [self.near_pages, self.far_pages].map(|pages| u64::from(pages) << 12);
        let [p50, p99] = [self.fault_us_p50, self.fault_us_p99].map(|us| (us * 1e3) as u64);
        (u64::from(self.at_s) * 1000, near, far, self.faults_per_s, p50, p99)
    }
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes >> 12).unwrap_or(u32::MAX)
}

fn micros(ns: Option<u64>) -> f32 {
    ns.unwrap_or(0) as f32 / 1e3
}

#[cfg(test)]
mod tests {
    //! Guards against a history that grows without end, and one that is of somebody else.
    use super::super::super::JobRow;
    use super::super::super::tests::wide_job;
    use super::super::rows::job_line;
    use super::*;

    fn rows(ids: impl Iterator<Item = usize>) -> PageRows {
        let near_bytes = |id: usize| (id as u64 + 1) << 20;
        let job = |id| JobRow { near_bytes: near_bytes(id), far_bytes: 4096, faults_per_s: 2.0, ..wide_job() };
        ids.map(|id| (format!("0-j-{id}"), PageRow::Job(job_line("m", true, &job(id))))).collect()
    }

    #[test]
    fn an_hour_is_kept_and_no_more_than_so_many_series() {
        let mut history = History::default();
        for step in 0..SAMPLES_MAX as u64 + 10 {
            history.note(1_000_000 + step * 5000, &rows(0..2));
            history.note(1_000_000 + step * 5000 + 1000, &rows(0..2));
        }
        let part = history.since("0-j-1", 0);
        assert_eq!(part.samples.len(), SAMPLES_MAX, "looks in between are none");
        assert_eq!(part.samples[0].0, 1_050_000);
        assert_eq!((part.samples[0].1, part.samples[0].2, part.samples[0].3), (2 << 20, 4096, 2.0));
        assert_eq!(history.since("", part.samples[SAMPLES_MAX - 2].0).samples[0].1, 3 << 20, "all together");
        let last = part.samples[SAMPLES_MAX - 1].0;
        history.note(last + 5000, &rows(1..5000));
        assert!(history.since("0-j-0", 0).samples.is_empty(), "it is gone");
        assert_eq!((history.series.len(), history.since("0-j-1", last).samples.len()), (SERIES_MAX, 1));
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_stop_the_history() {
        let mut history = History::default();
        history.note(10_000_000, &rows(0..1));
        history.note(5_000_000, &rows(0..1));
        assert_eq!(history.since("", 0).samples.len(), 2);
    }
}
