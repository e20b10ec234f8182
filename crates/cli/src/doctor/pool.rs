//! Measurement of far memory: each leaf of a pool by itself, and the pool as a whole.

use anyhow::{Context, ensure};
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pager::runner::{self, Latency};
use farfield_pool::{Buffer, Completion, Lane, LaneRequest, Op, Priority, leaf_urls};
use std::time::{Duration, Instant};

/// Pages of the region that is measured: 16 MiB.
const PAGES: u64 = 4096;
/// Pages of a run, and number of runs in flight.
const RUN_PAGES: usize = 16;
const RUN_DEPTH: usize = 16;
/// Numbers of single-page reads in flight that are measured.
const DEPTHS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Time for each measurement.
const MEASURE: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 150 });
/// Longest time for one operation.
const DEADLINE: Duration = Duration::from_secs(5);
/// Share of the best rate from which a depth counts as deep enough.
const ENOUGH: f64 = 0.9;

/// Thoroughness of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ProbeEffort {
    /// Full measuring time of about two seconds, for people who read the figures.
    Thorough,
    /// Ends each measurement after a thousand operations, for a program that waits to begin. Takes
    /// a tenth of the full time if the pool is not slow.
    Quick,
}

impl ProbeEffort {
    fn is_enough(self, operations: u64, time: Duration) -> bool {
        time >= MEASURE || self == ProbeEffort::Quick && operations >= 1000
    }
}

/// Measured performance of one pool.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct PoolMeasurement {
    url: String,
    /// Reason why the pool could not be measured.
    error: Option<String>,
    /// Mechanism that the pool uses on this machine, if that varies.
    how: String,
    #[serde(flatten)]
    speed: Option<Speed>,
}

#[derive(Clone, Debug, serde::Serialize)]
struct Speed {
    /// Latency of one page at a time, median and 99th percentile.
    read_ns_p50: u64,
    read_ns_p99: u64,
    write_ns_p50: u64,
    write_ns_p99: u64,
    /// Read rates of single pages, by number in flight.
    depths: Vec<Rate>,
    /// The smallest depth that is as good as any.
    best_depth: usize,
    /// Bandwidth of runs of 16 pages, 16 in flight.
    run_read_bytes_per_s: f64,
    run_write_bytes_per_s: f64,
}

#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Rate {
    depth: usize,
    reads_per_s: f64,
}

impl PoolMeasurement {
    pub(crate) fn is_measured(&self) -> bool {
        self.error.is_none()
    }

    /// Returns the median time of reading one page, if the pool could be measured.
    pub(crate) fn read_ns(&self) -> Option<u64> {
        Some(self.speed.as_ref()?.read_ns_p50)
    }

    /// Converts the result for the advisor, with `url` as the name. Returns `None` if the pool
    /// could not be measured.
    pub(crate) fn for_advice(&self, url: &str) -> Option<farfield_core::policy::advice::MeasuredPool> {
        let speed = self.speed.as_ref()?;
        let (read_ns, bytes_per_s, best_depth) = (speed.read_ns_p50, speed.run_read_bytes_per_s, speed.best_depth);
        Some(farfield_core::policy::advice::MeasuredPool { url: url.into(), read_ns, bytes_per_s, best_depth })
    }

    /// Describes the result for people.
    pub(crate) fn text(&self) -> String {
        let level = if self.is_measured() { "ok  " } else { "FAIL" };
        let mut text = format!("{level}  {}", self.url);
        let mut line = |name: &str, said: String| text += &format!("\n      {name:<12} {said}");
        if let Some(error) = &self.error {
            line("error", error.clone());
        }
        if let Some(speed) = &self.speed {
            let ns = |ns: u64| Latency(Some(ns));
            let [read, slow_read] = [speed.read_ns_p50, speed.read_ns_p99].map(ns);
            let [write, slow_write] = [speed.write_ns_p50, speed.write_ns_p99].map(ns);
            line("one page", format!("read in {read} (p99 {slow_read}), written in {write} (p99 {slow_write})"));
            let rates = speed.depths.iter().map(|rate| format!("{}: {}", rate.depth, thousands(rate.reads_per_s)));
            line(
                "many pages",
                format!("best depth {}; reads by depth {}", speed.best_depth, rates.collect::<Vec<_>>().join(", ")),
            );
            let [read, write] = [speed.run_read_bytes_per_s, speed.run_write_bytes_per_s].map(|rate| rate / 1e9);
            line("runs of 16", format!("read {read:.2} GB/s, written {write:.2} GB/s"));
        }
        if !self.how.is_empty() {
            line("how", self.how.clone());
        }
        text
    }
}

fn thousands(rate: f64) -> String {
    if rate < 10_000.0 { format!("{rate:.0}/s") } else { format!("{:.0}k/s", rate / 1000.0) }
}

/// Measures every leaf of the pool, and the pool itself if it is more than a leaf.
pub(super) fn measure(url: &str, token: &[u8]) -> Vec<PoolMeasurement> {
    let mut urls: Vec<&str> = leaf_urls(url).collect();
    if urls != [url] {
        urls.push(url);
    }
    urls.into_iter().map(|url| place(url, token, ProbeEffort::Thorough)).collect()
}

/// Measures the pool as a whole.
pub(crate) fn place(url: &str, token: &[u8], effort: ProbeEffort) -> PoolMeasurement {
    let mut how = String::new();
    let speed = speed(url, token, effort, &mut how);
    let error = speed.as_ref().err().map(|error| format!("{error:#}"));
    PoolMeasurement { url: url.to_owned(), error, how, speed: speed.ok() }
}

fn speed(url: &str, token: &[u8], effort: ProbeEffort, how: &mut String) -> anyhow::Result<Speed> {
    let urls = farfield_pool::resolve_urls(&[url])?;
    let backend = runner::pool_builder(&urls, token)?.pages(PAGES).open()?;
    let mut lane = backend.open_lane()?;
    let mut load = Load {
        lane: &mut *lane,
        effort,
        random: fastrand::Rng::with_seed(7),
        done: Vec::with_capacity(DEPTHS[DEPTHS.len() - 1]),
    };
    load.fill()?;
    let runs = [LoadDirection::Read, LoadDirection::Write].map(|direction| load.rate(direction, RUN_PAGES, RUN_DEPTH));
    let [run_read, run_write] = runs;
    let run_bytes = (RUN_PAGES * PAGE_BYTES) as f64;
    let (read_ns_p50, read_ns_p99) = load.latency(LoadDirection::Read)?;
    let depths = DEPTHS
        .iter()
        .map(|&depth| Ok(Rate { depth, reads_per_s: load.rate(LoadDirection::Read, 1, depth)? }))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (write_ns_p50, write_ns_p99) = load.latency(LoadDirection::Write)?;
    let best = depths.iter().map(|rate| rate.reads_per_s).fold(0.0, f64::max);
    let best_depth = depths.iter().find(|rate| rate.reads_per_s >= ENOUGH * best).map_or(1, |rate| rate.depth);
    *how = backend.how();
    Ok(Speed {
        read_ns_p50,
        read_ns_p99,
        write_ns_p50,
        write_ns_p99,
        depths,
        best_depth,
        run_read_bytes_per_s: run_read? * run_bytes,
        run_write_bytes_per_s: run_write? * run_bytes,
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LoadDirection {
    Read,
    Write,
}

/// Load generator for a lane.
struct Load<'a> {
    lane: &'a mut dyn Lane,
    effort: ProbeEffort,
    /// Generator that picks pages.
    random: fastrand::Rng,
    done: Vec<Completion>,
}

impl Load<'_> {
    fn fill(&mut self) -> anyhow::Result<()> {
        let mut spare = buffer(RUN_PAGES);
        for page in (0..PAGES).step_by(RUN_PAGES) {
            self.submit(Op::Write { page: PageId(page), buffer: spare })?;
            spare = self.finish_one()?;
        }
        Ok(())
    }

    /// Returns a random page, or the first page of a random run.
    fn page(&mut self, pages: usize) -> PageId {
        PageId(self.random.u64(..PAGES / pages as u64) * pages as u64)
    }

    fn submit(&mut self, op: Op) -> anyhow::Result<()> {
        let request = LaneRequest { tag: 0, priority: Priority::Demand, deadline: DEADLINE, op };
        ensure!(self.lane.submit(request).is_ok(), "a lane refused an operation that it must take");
        Ok(())
    }

    fn begin(&mut self, direction: LoadDirection, buffer: Buffer) -> anyhow::Result<()> {
        let page = self.page(buffer.pages());
        self.submit(match direction {
            LoadDirection::Read => Op::Read { page, buffer },
            LoadDirection::Write => Op::Write { page, buffer },
        })
    }

    /// Waits until some operation is complete.
    fn collect(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + 2 * DEADLINE;
        while self.lane.poll(&mut self.done) == 0 {
            ensure!(Instant::now() < until, "no answer within {:?}", 2 * DEADLINE);
            self.lane.wait(DEADLINE);
        }
        Ok(())
    }

    fn finish_one(&mut self) -> anyhow::Result<Buffer> {
        self.collect()?;
        let completion = self.done.pop().context("something is done")?;
        completion.result?;
        completion.buffer.context("the buffer of a read or write comes back")
    }

    /// Returns the median and the 99th percentile of one page at a time, in nanoseconds.
    fn latency(&mut self, direction: LoadDirection) -> anyhow::Result<(u64, u64)> {
        let (start, mut spare, mut times) = (Instant::now(), buffer(1), Vec::new());
        // A processor that others keep busy may give this thread nothing for the whole measuring
        // time: one operation is always measured.
        while times.is_empty() || !self.effort.is_enough(times.len() as u64, start.elapsed()) {
            let before = Instant::now();
            self.begin(direction, spare)?;
            spare = self.finish_one()?;
            times.push(before.elapsed().as_nanos() as u64);
        }
        times.sort_unstable();
        Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
    }

    /// Returns the operations per second with `depth` of them in flight.
    fn rate(&mut self, direction: LoadDirection, pages: usize, depth: usize) -> anyhow::Result<f64> {
        for _ in 0..depth {
            self.begin(direction, buffer(pages))?;
        }
        let (start, mut ended) = (Instant::now(), 0u64);
        while self.lane.in_flight() > 0 {
            self.collect()?;
            let goes_on = !self.effort.is_enough(ended, start.elapsed());
            let mut done = std::mem::take(&mut self.done);
            for completion in done.drain(..) {
                completion.result?;
                ended += 1;
                if goes_on {
                    self.begin(direction, completion.buffer.context("the buffer of a read or write comes back")?)?;
                }
            }
            self.done = done;
        }
        Ok(ended as f64 / start.elapsed().as_secs_f64())
    }
}

/// Makes a buffer of pages of which half is noise, so that they compress to about half.
fn buffer(pages: usize) -> Buffer {
    let mut buffer = Buffer::new(pages);
    for (index, word) in buffer.bytes_mut().as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let noise = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        *word = if index % 512 < 256 { (noise ^ noise >> 29).to_le_bytes() } else { [1; 8] };
    }
    buffer.seal();
    buffer
}

#[cfg(test)]
mod tests {
    //! Danger: figures of something else, and a failure that looks like a figure.
    use super::*;

    #[test]
    fn every_leaf_and_the_whole_are_measured() {
        let places = measure("stripe(ram:, lz:?size=64M)", b"");
        let urls: Vec<&str> = places.iter().map(|place| place.url.as_str()).collect();
        assert_eq!(urls, ["ram:", "lz:?size=64M", "stripe(ram:, lz:?size=64M)"]);
        for place in &places {
            let speed = place.speed.as_ref().unwrap_or_else(|| panic!("{place:?}"));
            assert!(speed.read_ns_p50 > 0 && speed.read_ns_p50 <= speed.read_ns_p99);
            assert!(speed.write_ns_p50 > 0 && speed.run_read_bytes_per_s > 0.0 && speed.run_write_bytes_per_s > 0.0);
            assert!(speed.depths.len() == DEPTHS.len() && DEPTHS.contains(&speed.best_depth));
            assert!(place.text().contains("best depth"), "{}", place.text());
        }
        // Half of each page is noise: it takes half of its memory.
        let size = |text: &str| text.split(" MiB").next().and_then(|size| size.rsplit(' ').next()?.parse::<f64>().ok());
        let (pages, held) = places[1].how.split_once("in ").unwrap();
        let (pages, held) = (size(pages).unwrap(), size(held).unwrap());
        assert!(held > 0.4 * pages && held < 0.7 * pages, "{}", places[1].how);
    }

    #[test]
    fn a_quick_look_sees_what_a_thorough_one_sees() {
        let [quick, thorough] =
            [ProbeEffort::Quick, ProbeEffort::Thorough].map(|effort| place("throttle(latency=2ms, ram:)", b"", effort));
        for place in [&quick, &thorough] {
            let speed = place.speed.as_ref().unwrap_or_else(|| panic!("{place:?}"));
            assert!(speed.read_ns_p50 >= 2_000_000 && speed.depths.len() == DEPTHS.len(), "{place:?}");
        }
        assert!(
            ProbeEffort::Quick.is_enough(1000, Duration::ZERO) && !ProbeEffort::Quick.is_enough(999, Duration::ZERO)
        );
        assert!(
            !ProbeEffort::Thorough.is_enough(u64::MAX, Duration::ZERO) && ProbeEffort::Thorough.is_enough(0, MEASURE)
        );
    }

    #[test]
    fn a_leaf_that_cannot_be_measured_is_reported_beside_the_others() {
        let places = measure("stripe(ram:, fault:die=100@ram:, unix:/no/such/socket)", b"");
        assert_eq!(places.iter().map(PoolMeasurement::is_measured).collect::<Vec<_>>(), [true, true, false, false]);
        assert!(places[2].text().starts_with("FAIL") && places[2].text().contains("no such file"), "{places:?}");
        let wrong = measure("ftp://x", b"");
        assert!(wrong[0].error.as_ref().is_some_and(|error| error.contains("known are")), "{wrong:?}");
        let dying = measure("fault:die=1000@ram:", b"");
        assert!(dying.last().is_some_and(|place| !place.is_measured()), "{dying:?}");
    }
}
