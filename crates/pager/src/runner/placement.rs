//! Moves a running job's far memory to another of the pools that it may have. It measures what
//! [`farfield_core::policy::placement_controller`] decides by, and carries the decision out as
//! `farfield pool switch` does.
//!
//! Pools are measured and tried out by threads of their own, because a server that does not answer
//! takes its time.

use super::{JobRefusal, PoolStatus, RunnerBlock, SloOptions, far, pool};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::policy::budget_controller::ActivityWindow;
use farfield_core::policy::placement_controller::{Cause, PlacementController, PlacementMove, PoolPerformance};
use farfield_os::serving;
use farfield_pool::{Buffer, Lane, LaneRequest, Op, Priority};
use std::thread::JoinHandle;
use std::time::Instant;

/// Length of a window of the policy.
const WINDOW: Duration = Duration::from_millis(500);
/// Number of pages that a pool is measured with; `RUN_PAGES` of them form a run.
const PAGES: u64 = 256;
const RUN_PAGES: usize = 16;
/// Number of runs in flight while the bandwidth is measured.
const RUNS: usize = 4;
/// Time for which each of the two figures is measured.
const MEASURE: Duration = Duration::from_millis(50);
/// Time that a pool may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// State of a job that may move between pools.
pub(super) struct PlacementDriver {
    controller: PlacementController,
    urls: Vec<String>,
    token: Vec<u8>,
    state: State,
    moves: u32,
    /// Sum of the measurements since the last window ended.
    window: ActivityWindow,
    last: Instant,
}

enum State {
    Watching,
    Measuring(JoinHandle<Vec<Option<PoolPerformance>>>),
    /// The pool with this number is tried out; the text says why the job is to move there.
    Trying(usize, String, JoinHandle<Result<(), JobRefusal>>),
    /// The job moves to the pool with this number.
    Moving(u32),
    /// A person has taken the job to a pool that is none of ours; we leave it there.
    Elsewhere,
}

impl PlacementDriver {
    /// Creates the state for a job that begins at the first of these pools.
    pub(super) fn new(options: &SloOptions, urls: Vec<String>, token: Vec<u8>) -> PlacementDriver {
        let controller = PlacementController::new(options.slo, options.cadence, urls.len(), options.is_compared);
        let (state, window) = (State::Watching, ActivityWindow::default());
        PlacementDriver { controller, urls, token, state, moves: 0, window, last: Instant::now() }
    }

    /// Returns the number of times that the job has moved to another pool by itself.
    pub(super) fn moves(&self) -> u32 {
        self.moves
    }

    /// Takes what happened since the last call. Returns a line for the user if there is news.
    pub(super) fn update(&mut self, control: &RunnerBlock, since: &ActivityWindow) -> Option<String> {
        self.window = self.window.combine(since);
        if self.last.elapsed() < WINDOW {
            return None;
        }
        self.last = Instant::now();
        let window = core::mem::take(&mut self.window);
        self.on_window(control, &window)
    }

    fn on_window(&mut self, control: &RunnerBlock, window: &ActivityWindow) -> Option<String> {
        let status = PoolStatus::read(control);
        self.follow(&status);
        let cause = self.controller.on_window(window, !status.degraded.is_empty());
        match core::mem::replace(&mut self.state, State::Watching) {
            State::Measuring(thread) if thread.is_finished() => {
                let nothing = vec![None; self.urls.len()];
                let there = self.controller.on_measured(&thread.join().unwrap_or(nothing))?;
                return self.begin(there);
            }
            State::Trying(index, cause, thread) if thread.is_finished() => {
                let tried = thread.join().unwrap_or_else(|_| Err(JobRefusal::Pool { reason: String::new() }));
                let url = core::slice::from_ref(&self.urls[index]);
                match tried.and_then(|()| pool::begin_switch(control, url, &self.token, &cause)) {
                    Ok(epoch) => self.state = State::Moving(epoch),
                    Err(why) => {
                        self.controller.on_moved(false);
                        return Some(format!("far memory stays where it is: {why}"));
                    }
                }
            }
            State::Moving(epoch) if status.epoch != epoch => {
                self.controller.on_moved(false);
                return Some(format!("far memory has come back to {}: {}", status.urls.join(" "), status.reason));
            }
            State::Moving(_) if status.moving.is_empty() => {
                self.controller.on_moved(true);
                self.moves += 1;
                control.config().pool_moves.store(self.moves, Ordering::Relaxed);
            }
            State::Watching => self.state = cause.map_or(State::Watching, |_| self.measure()),
            other => self.state = other,
        }
        None
    }

    /// Adopts another pool that a person has given the job meanwhile.
    fn follow(&mut self, status: &PoolStatus) {
        if !matches!(self.state, State::Watching | State::Elsewhere) || !status.moving.is_empty() {
            return;
        }
        let is_here = |index: usize| status.urls.len() == 1 && status.urls[0] == self.urls[index];
        if is_here(self.controller.here()) && matches!(self.state, State::Watching) {
            return;
        }
        self.state = match (0..self.urls.len()).find(|index| is_here(*index)) {
            Some(index) => {
                self.controller.arrive(index);
                State::Watching
            }
            None => State::Elsewhere,
        };
    }

    fn measure(&self) -> State {
        let (urls, token) = (self.urls.clone(), self.token.clone());
        State::Measuring(std::thread::spawn(move || urls.iter().map(|url| figures(url, &token)).collect()))
    }

    fn begin(&mut self, there: PlacementMove) -> Option<String> {
        let (url, token, cause) = (self.urls[there.to].clone(), self.token.clone(), text(&there));
        let said = format!("far memory moves to {url}: {cause}");
        let thread = std::thread::spawn(move || far::check(&[url], &token, serving::effective_uid()).map(drop));
        self.state = State::Trying(there.to, cause, thread);
        Some(said)
    }
}

/// Returns the reason for a move as text.
fn text(there: &PlacementMove) -> String {
    let percent = |lost: f64| (lost * 100.0).min(99_999.0);
    let why = there.cause.text();
    match there.cause {
        Cause::Lost => why.to_owned(),
        _ => format!(
            "{why}; waiting took {:.0} % of its time, there {:.0} % are expected",
            percent(there.lost),
            percent(there.lost_there)
        ),
    }
}

/// Measures the latency and bandwidth of a pool; `None` if it does not answer.
fn figures(url: &str, token: &[u8]) -> Option<PoolPerformance> {
    let builder = far::pool_builder(&[url.to_owned()], token).ok()?.deadline(ANSWER_WITHIN);
    let backend = builder.inside_a_program().pages(PAGES).open().ok()?;
    let mut lane = backend.open_lane().ok()?;
    let mut work = Work { lane: &mut *lane, next: 0 };
    for _ in 0..PAGES as usize / RUN_PAGES {
        let mut buffer = Buffer::new(RUN_PAGES);
        buffer.bytes_mut().fill(1);
        buffer.seal();
        work.begin(buffer, Priority::Background, false)?;
        work.finish()?;
    }
    let read_ns = work.read_ns()?;
    Some(PoolPerformance { read_ns, bytes_per_s: work.bytes_per_s()? })
}

/// A lane with the next page number to use for measurements.
struct Work<'a> {
    lane: &'a mut dyn Lane,
    next: u64,
}

impl Work<'_> {
    fn begin(&mut self, buffer: Buffer, priority: Priority, is_read: bool) -> Option<()> {
        let count = buffer.pages() as u64;
        let page = PageId(self.next % (PAGES / count) * count);
        self.next += 1;
        let op = if is_read { Op::Read { page, buffer } } else { Op::Write { page, buffer } };
        self.lane.submit(LaneRequest { tag: 0, priority, deadline: ANSWER_WITHIN, op }).ok()
    }

    fn finish(&mut self) -> Option<Buffer> {
        let mut done = Vec::with_capacity(1);
        while self.lane.poll(&mut done) == 0 {
            // The operation ends by its deadline.
            self.lane.wait(ANSWER_WITHIN);
        }
        let ended = done.pop()?;
        ended.result.ok()?;
        ended.buffer
    }

    /// Returns the median latency of reads of one page at a time, in nanoseconds.
    fn read_ns(&mut self) -> Option<f64> {
        let (started, mut buffer, mut times) = (Instant::now(), Buffer::new(1), Vec::new());
        while started.elapsed() < MEASURE || times.len() < 3 {
            let before = Instant::now();
            self.begin(buffer, Priority::Demand, true)?;
            buffer = self.finish()?;
            times.push(before.elapsed().as_nanos() as f64);
        }
        times.sort_unstable_by(f64::total_cmp);
        Some(times[times.len() / 2])
    }

    /// Returns the read bandwidth, with [`RUNS`] runs in flight at background priority, behind what
    /// others wait for.
    fn bytes_per_s(&mut self) -> Option<f64> {
        (0..RUNS).try_for_each(|_| self.begin(Buffer::new(RUN_PAGES), Priority::Background, true))?;
        let (started, mut ended) = (Instant::now(), 0usize);
        while self.lane.in_flight() > 0 {
            let buffer = self.finish()?;
            ended += 1;
            if started.elapsed() < MEASURE {
                self.begin(buffer, Priority::Background, true)?;
            }
        }
        Some((ended * RUN_PAGES * PAGE_BYTES) as f64 / started.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a job that is told to move to a pool that is not there, or is not told.
    use super::*;
    use crate::config::Capture;
    use crate::control::FaultMode;
    use crate::runner::{Settings, create_control};
    use farfield_core::policy::budget_controller::Cadence;

    #[test]
    fn a_place_is_as_slow_as_it_is_and_one_that_is_not_there_has_no_figures() {
        let quick = figures("ram:", b"").unwrap();
        let slow = figures("throttle(latency=5ms,bandwidth=40M,ram:)", b"").unwrap();
        assert!(slow.read_ns > 5e6 && quick.read_ns < slow.read_ns, "{quick:?} {slow:?}");
        assert!(slow.bytes_per_s < 50e6 && quick.bytes_per_s > slow.bytes_per_s, "{quick:?} {slow:?}");
        for url in ["unix:/no/such/socket", "lz:?size=64M", "fault:die=3@ram:", "x"] {
            assert_eq!(figures(url, b""), None, "{url}");
        }
    }

    /// Half a second of which most was waiting.
    fn window(read_ns: f64) -> ActivityWindow {
        ActivityWindow { busy_ns: 5e8, waited_ns: 400.0 * read_ns, demand_reads: 400.0, ..ActivityWindow::default() }
    }

    #[test]
    fn a_job_whose_place_became_slow_is_told_to_move_and_why_and_is_let_go_when_it_is_taken_elsewhere() {
        let urls = vec!["throttle(latency=3ms,ram:)".to_owned(), "ram:".to_owned()];
        let settings = Settings {
            near_limit_bytes: 1 << 30,
            mode: FaultMode::Auto,
            huge_pages: false,
            capture: Capture::Everything,
            urls: urls[..1].to_vec(),
            token: vec![],
        };
        let control = create_control(&settings).unwrap();
        let options =
            SloOptions { slo: 1.2, cadence: Cadence::EventDriven, near_start_bytes: 1 << 30, is_compared: true };
        let mut driver = PlacementDriver::new(&options, urls.clone(), vec![]);
        assert_eq!((0..20).find_map(|_| driver.on_window(&control, &window(100_000.0))), None);
        let deadline = Instant::now() + Duration::from_secs(60);
        let wait_for = |driver: &mut PlacementDriver, what: &str| loop {
            assert!(Instant::now() < deadline, "{what}");
            match driver.on_window(&control, &window(1_000_000.0)) {
                Some(said) if said.contains(what) => return,
                Some(said) => panic!("{said}"),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        wait_for(&mut driver, "moves to ram:: reads took several times");
        while driver.moves() == 0 {
            assert!(Instant::now() < deadline);
            assert_eq!(driver.on_window(&control, &window(1_000_000.0)), None);
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = PoolStatus::read(&control);
        assert_eq!((status.urls, driver.controller.here()), (vec!["ram:".to_owned()], 1));
        assert!(status.cause.contains("reads took several times"), "{}", status.cause);
        assert_eq!((status.moves, status.before), (1, urls[..1].to_vec()));
        // Somebody else decides.
        let give = |url: &str| pool::begin_switch(&control, &[url.to_owned()], b"", "").unwrap();
        give("ram:?size=1G");
        driver.on_window(&control, &window(1e6));
        assert!(matches!(driver.state, State::Elsewhere) && PoolStatus::read(&control).cause.is_empty());
        assert!((0..50).all(|_| driver.on_window(&control, &window(1e7)).is_none()));
        give(&urls[0]);
        driver.on_window(&control, &window(1e6));
        assert!(matches!(driver.state, State::Watching) && driver.controller.here() == 0);
        assert_eq!(control.config().pool_epoch.load(Ordering::SeqCst), 3);
    }
}
