//! Controller that settles where the far memory of a running job is: when to measure the places it
//! could have, and whether to move.
//!
//! *Event-driven*, places are measured when reads take several times what they took here, when the
//! program begins to read several times as much, or when the place has lost a part of itself. Where
//! the places had not been compared when the job began, they are measured once when it waits.
//! *Periodic*, the baseline to compare with, is at fixed times.
//!
//! Hysteresis keeps a job from moving to and fro. An event counts when it lasts, and only if the
//! program waits too much for it. Another place must promise to take a good part of the waiting
//! away, both being measured at the same moment in the same way. After a move nothing is asked for
//! a while, and for twice as long each time a move did not keep what it promised, or not for long.
//! After DMSwitcher, section 3.3.

use super::budget_controller::{ActivityWindow, Cadence};
use alloc::vec;
use alloc::vec::Vec;

/// Cost of a fault without the transfer of the page.
const FAULT_NS: f64 = 3500.0;
/// Number of reads in a window that is significant. At a place where each takes long there are
/// fewer, and the second number is enough if they took most of the time.
const READS_MIN: f64 = 100.0;
const SLOW_READS_MIN: f64 = 10.0;
/// Factor of the best read time seen here, and of the program's former read rate, that is an event
/// …
const SATURATED: f64 = 3.0;
const STAGE: f64 = 2.0;
/// … in this many windows in a row.
const LASTS: u32 = 3;
/// Part by which the best read time is forgotten in a window, so that a place may become slower for
/// good.
const FORGET: f64 = 0.005;
/// Windows for which a place may lack a part of itself: it repairs itself, and a server that is
/// silent may come back.
const LOST_LASTS: u32 = 60;
/// Part of the allowed loss below which another place is not needed.
const CALM: f64 = 0.5;
/// Part of the waiting that another place must take away.
const WORTH: f64 = 0.3;
/// Windows until places are measured again after they were measured in vain, at first and at most.
const AGAIN_MIN: u32 = 8;
const AGAIN_MAX: u32 = 512;
/// Windows of rest after a move, at first and at most, and as a multiple of the time that the move
/// took.
const REST_MIN: u32 = 40;
const REST_MAX: u32 = 2560;
const REST_TIMES: u32 = 4;
/// A job that leaves a place sooner than this multiple of the last rest moves too often.
const STAYS_TIMES: u32 = 4;
/// Number of windows by which a move is judged.
const TRIAL: u32 = 10;
/// Windows for which a place is left out after a move to it failed, at first and at most.
const BAN_MIN: u32 = 64;
const BAN_MAX: u32 = 4096;
/// Number of windows of a period, in periodic mode.
const PERIOD: u32 = 60;

/// Reason for measuring places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Reads take much longer than they took.
    Saturated,
    /// The program reads much more than before.
    Stage,
    /// The program waits, and the place was not chosen by measurement.
    Unknown,
    /// A server of the place is lost or silent, or lacks something, and has been for long.
    Lost,
    /// The period has passed.
    Time,
}

impl Cause {
    /// Returns the reason as a text for people.
    pub fn text(self) -> &'static str {
        match self {
            Cause::Saturated => "reads took several times what they took before",
            Cause::Stage => "the program began to read more",
            Cause::Unknown => "places had not been compared",
            Cause::Lost => "a server was lost there",
            Cause::Time => "it was time to look",
        }
    }
}

/// Measured speed of a place, just now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolPerformance {
    /// Time to read one page with nothing else under way.
    pub read_ns: f64,
    /// Throughput of runs of pages, with several under way.
    pub bytes_per_s: f64,
}

/// Decision to move to another place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacementMove {
    /// Index of the place to move to.
    pub to: usize,
    /// Reason for which places were measured.
    pub cause: Cause,
    /// Time lost as a part of useful time, here.
    pub lost: f64,
    /// Time lost as a part of useful time, as expected at the new place.
    pub lost_there: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Watching,
    Measuring(Cause),
    Moving { there: PlacementMove, windows: u32 },
}

/// Controller of the place of one job. Places have numbers; the job begins at the first.
#[derive(Clone, Debug)]
pub struct PlacementController {
    slo: f64,
    cadence: Cadence,
    here: usize,
    state: State,
    /// Activity of late; older windows count less.
    recent: ActivityWindow,
    /// Least time of a read here, as far as it is not forgotten.
    best_ns: f64,
    /// Reads per useful second, before the program began to read more.
    rate: Option<f64>,
    /// Whether the places have ever been compared.
    is_compared: bool,
    /// Windows in a row with an event.
    saturated: u32,
    staged: u32,
    waiting: u32,
    degraded: u32,
    /// Windows until something may be asked.
    rest: u32,
    again: u32,
    /// Length of the next rest after a move.
    next_rest: u32,
    /// Windows since the last move that the job made by itself.
    stayed: Option<u32>,
    trial: Option<Trial>,
    bans: Vec<Ban>,
    period: u32,
}

/// Trial of a move: was it worth it?
#[derive(Clone, Copy, Debug)]
struct Trial {
    lost_before: f64,
    windows: u32,
}

#[derive(Clone, Copy, Debug)]
struct Ban {
    windows_left: u32,
    next: u32,
}

impl PlacementController {
    /// Creates a controller for `places` places. `is_compared`: the first is the best of them, by a
    /// measurement.
    pub fn new(slo: f64, cadence: Cadence, places: usize, is_compared: bool) -> PlacementController {
        assert!(slo > 1.0 && places > 0);
        PlacementController {
            slo,
            cadence,
            here: 0,
            state: State::Watching,
            recent: ActivityWindow::default(),
            best_ns: f64::INFINITY,
            rate: None,
            is_compared,
            saturated: 0,
            staged: 0,
            waiting: 0,
            degraded: 0,
            rest: 0,
            again: AGAIN_MIN,
            next_rest: REST_MIN,
            stayed: None,
            trial: None,
            bans: vec![Ban { windows_left: 0, next: BAN_MIN }; places],
            period: 0,
        }
    }

    /// Returns the index of the place where the job is.
    pub fn here(&self) -> usize {
        self.here
    }

    /// Takes the activity since the last call, and whether the place lacks a part of itself.
    /// `Some`: all places are to be [measured](PlacementController::on_measured).
    pub fn on_window(&mut self, window: &ActivityWindow, is_degraded: bool) -> Option<Cause> {
        match &mut self.state {
            State::Moving { windows, .. } => {
                *windows += 1;
                return None;
            }
            State::Measuring(_) => return None,
            State::Watching => {}
        }
        self.recent = self.recent.faded(0.5).combine(window);
        self.judge_move();
        self.bans.iter_mut().for_each(|ban| ban.windows_left = ban.windows_left.saturating_sub(1));
        self.rest = self.rest.saturating_sub(1);
        self.count(window, is_degraded);
        let cause = match self.cadence {
            _ if self.degraded >= LOST_LASTS && self.may_ask_for_loss() => Cause::Lost,
            _ if self.rest > 0 => return None,
            Cadence::Periodic => {
                self.period += 1;
                if self.period < PERIOD {
                    return None;
                }
                self.period = 0;
                Cause::Time
            }
            Cadence::EventDriven if self.saturated >= LASTS => Cause::Saturated,
            Cadence::EventDriven if self.staged >= LASTS => Cause::Stage,
            Cadence::EventDriven if self.waiting >= LASTS && !self.is_compared => Cause::Unknown,
            Cadence::EventDriven => return None,
        };
        self.state = State::Measuring(cause);
        Some(cause)
    }

    /// Checks whether a loss may be reported. It does not wait for the rest after a move, but for
    /// the rest after places were measured in vain.
    fn may_ask_for_loss(&self) -> bool {
        self.rest == 0 || self.degraded == LOST_LASTS
    }

    /// Counts for how many windows each event has lasted.
    fn count(&mut self, window: &ActivityWindow, is_degraded: bool) {
        self.degraded = if is_degraded { self.degraded.saturating_add(1) } else { 0 };
        let is_mostly_waiting = window.demand_reads >= SLOW_READS_MIN && window.lost() > 1.0;
        if window.demand_reads < READS_MIN && !is_mostly_waiting {
            // A program that hardly reads says nothing about the place.
            (self.saturated, self.staged, self.waiting) = (0, 0, 0);
            return;
        }
        let waits = window.lost() > (self.slo - 1.0) * CALM;
        self.waiting = if waits { self.waiting.saturating_add(1) } else { 0 };
        let read_ns = window.waited_ns / window.demand_reads;
        self.best_ns = (self.best_ns * (1.0 + FORGET)).min(read_ns);
        self.saturated = if waits && read_ns > self.best_ns * SATURATED { self.saturated + 1 } else { 0 };
        let rate = window.demand_reads * 1e9 / window.useful_ns().max(1.0);
        let before = *self.rate.get_or_insert(rate);
        let is_more = waits && rate > before * STAGE;
        self.staged = if is_more { self.staged + 1 } else { 0 };
        // A rate that stays high is the new usual one; a lower rate is at once.
        if !is_more || self.staged >= LASTS {
            self.rate = Some(if is_more { rate } else { (before + rate) / 2.0 });
        }
    }

    fn judge_move(&mut self) {
        self.stayed = self.stayed.map(|windows| windows.saturating_add(1));
        let Some(mut trial) = self.trial.take() else { return };
        trial.windows -= 1;
        if trial.windows > 0 {
            self.trial = Some(trial);
        } else if self.recent.lost() > trial.lost_before * (1.0 - WORTH / 2.0) {
            self.rest_longer();
            self.rest = self.rest.max(self.next_rest);
        }
    }

    fn rest_longer(&mut self) {
        self.next_rest = (self.next_rest * 2).min(REST_MAX);
    }

    /// Takes the figures of each place; `None` for one that does not answer. `Some`: the job is to
    /// move, and [did or did not](PlacementController::on_moved).
    pub fn on_measured(&mut self, figures: &[Option<PoolPerformance>]) -> Option<PlacementMove> {
        assert_eq!(figures.len(), self.bans.len());
        let State::Measuring(cause) = self.state else { return None };
        (self.state, self.is_compared) = (State::Watching, true);
        (self.saturated, self.staged, self.waiting) = (0, 0, 0);
        let lost = self.recent.lost();
        let usual_ns = self.recent.waited_ns / self.recent.demand_reads.max(1.0);
        // Cost of a read here now, measured like the others if possible.
        let cost_ns = figures[self.here].map_or(usual_ns, |here| FAULT_NS + here.read_ns).max(1.0);
        let expected = |figures: &PoolPerformance| {
            let by_reads = lost * (FAULT_NS + figures.read_ns) / cost_ns;
            let seconds = self.recent.moved_bytes / figures.bytes_per_s.max(1.0);
            // All bytes that move have to get through.
            by_reads.max(seconds * 1e9 / self.recent.useful_ns().max(1.0) - 1.0)
        };
        let others = figures.iter().enumerate().filter(|(place, _)| *place != self.here);
        let others = others.filter(|(place, _)| self.bans[*place].windows_left == 0);
        let best = others
            .filter_map(|(place, figures)| Some((place, expected(figures.as_ref()?))))
            .min_by(|(_, a), (_, b)| a.total_cmp(b));
        let is_worth = |lost_there: f64| match cause {
            // A place that has no spare left is worse than one that is a little slower.
            Cause::Lost => lost_there <= lost.max(self.slo - 1.0),
            _ => lost > (self.slo - 1.0) * CALM && lost_there <= lost * (1.0 - WORTH),
        };
        let Some((to, lost_there)) = best.filter(|(_, lost_there)| is_worth(*lost_there)) else {
            self.rest = self.again;
            self.again = (self.again * 2).min(AGAIN_MAX);
            return None;
        };
        let there = PlacementMove { to, cause, lost, lost_there };
        self.state = State::Moving { there, windows: 0 };
        Some(there)
    }

    /// Takes the end of a move: the job is at the new place (`is_there`), or it has come back.
    pub fn on_moved(&mut self, is_there: bool) {
        let State::Moving { there, windows } = self.state else { return };
        self.state = State::Watching;
        let ban = &mut self.bans[there.to];
        if !is_there {
            *ban = Ban { windows_left: ban.next, next: (ban.next * 2).min(BAN_MAX) };
            self.rest = AGAIN_MIN;
            return;
        }
        ban.next = BAN_MIN;
        match self.stayed {
            Some(stayed) if stayed < self.next_rest.saturating_mul(STAYS_TIMES) => self.rest_longer(),
            _ => self.next_rest = REST_MIN,
        }
        self.arrive(there.to);
        self.stayed = Some(0);
        self.rest = self.next_rest.max(windows.saturating_mul(REST_TIMES));
        // A move because of a loss was not made to wait less.
        let is_for_speed = there.cause != Cause::Lost;
        self.trial = is_for_speed.then_some(Trial { lost_before: there.lost, windows: TRIAL });
    }

    /// Notes that something else has moved the job to `here`: what was learned of the place is
    /// void.
    pub fn arrive(&mut self, here: usize) {
        assert!(here < self.bans.len());
        (self.here, self.state, self.recent) = (here, State::Watching, ActivityWindow::default());
        (self.best_ns, self.rate, self.trial) = (f64::INFINITY, None, None);
        (self.saturated, self.staged, self.waiting) = (0, 0, 0);
        (self.degraded, self.period) = (0, 0);
        (self.again, self.rest) = (AGAIN_MIN, REST_MIN);
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a job that stays where it starves, or that moves to and fro and does nothing else.
    use super::*;

    const SLO: f64 = 1.4;
    const QUICK: PoolPerformance = PoolPerformance { read_ns: 10_000.0, bytes_per_s: 1e9 };

    /// Half a second of a program that reads so many pages for each useful second.
    fn window(reads_per_s: f64, figures: PoolPerformance) -> ActivityWindow {
        let read_ns = FAULT_NS + figures.read_ns;
        let useful_ns = 5e8 / (1.0 + reads_per_s * read_ns / 1e9);
        let demand_reads = reads_per_s * useful_ns / 1e9;
        let (waited_ns, moved_bytes) = (demand_reads * read_ns, demand_reads * 4096.0);
        ActivityWindow {
            busy_ns: 5e8,
            waited_ns,
            demand_reads,
            moved_bytes,
            faults: demand_reads,
            ..ActivityWindow::default()
        }
    }

    fn slow(times: f64) -> PoolPerformance {
        PoolPerformance { read_ns: QUICK.read_ns * times, bytes_per_s: QUICK.bytes_per_s / times }
    }

    /// A job for so many windows, at places that are as `places` says of each moment; where each
    /// move went, and when, and how often places were measured. Moves take three windows.
    fn run(
        settle: &mut PlacementController,
        windows: u32,
        places: impl Fn(u32, usize) -> Vec<Option<PoolPerformance>>,
    ) -> (Vec<(u32, usize)>, u32) {
        let (mut moves, mut measured) = (Vec::new(), 0);
        for now in 0..windows {
            let figures = places(now, settle.here());
            let here = figures[settle.here()].expect("the job lives");
            let asked = settle.on_window(&window(30_000.0, here), false);
            if asked.is_none() {
                continue;
            }
            measured += 1;
            if let Some(there) = settle.on_measured(&figures) {
                moves.push((now, there.to));
                (0..3).for_each(|_| assert_eq!(settle.on_window(&window(30_000.0, here), false), None));
                settle.on_moved(true);
                assert_eq!(settle.here(), there.to);
            }
        }
        (moves, measured)
    }

    fn event_driven() -> PlacementController {
        PlacementController::new(SLO, Cadence::EventDriven, 2, true)
    }

    #[test]
    fn a_job_on_an_unchanged_pool_stays_and_measures_nothing() {
        // Also where another one would be better: it is as good as it was when it was chosen.
        assert_eq!(run(&mut event_driven(), 2000, |_, _| vec![Some(slow(5.0)), Some(QUICK)]), (vec![], 0));
    }

    #[test]
    fn a_job_placed_without_measurements_probes_once_when_it_waits() {
        let begun = || PlacementController::new(SLO, Cadence::EventDriven, 2, false);
        let (moves, measured) = run(&mut begun(), 2000, |_, _| vec![Some(slow(5.0)), Some(QUICK)]);
        assert!(matches!(moves[..], [(2, 1)]) && measured == 1, "{moves:?} {measured}");
        let (moves, measured) = run(&mut begun(), 2000, |_, _| vec![Some(QUICK), Some(slow(5.0))]);
        assert!(moves.is_empty() && measured == 1, "{moves:?} {measured}");
        let mut settle = begun();
        (0..2000).for_each(|_| assert_eq!(settle.on_window(&window(1000.0, QUICK), false), None, "it hardly waits"));
    }

    #[test]
    fn a_place_where_reads_take_so_long_that_there_are_few_is_left_too() {
        // Fifty reads in half a second.
        let first = slow(1000.0);
        assert!(window(30_000.0, first).demand_reads < READS_MIN);
        let mut settle = PlacementController::new(SLO, Cadence::EventDriven, 2, false);
        let (moves, _) = run(&mut settle, 2000, |_, _| vec![Some(first), Some(QUICK)]);
        assert!(matches!(moves[..], [(2, 1)]), "{moves:?}");
        let places = |now, _| vec![Some(if now < 100 { QUICK } else { first }), Some(slow(2.0))];
        let (moves, _) = run(&mut event_driven(), 2000, places);
        assert!(matches!(moves[..], [(100..=104, 1)]), "{moves:?}");
        // A few of which one took long are chance.
        let few = ActivityWindow { busy_ns: 5e8, waited_ns: 4e8, demand_reads: 9.0, ..ActivityWindow::default() };
        let mut settle = PlacementController::new(SLO, Cadence::EventDriven, 2, false);
        (0..100).for_each(|_| assert_eq!(settle.on_window(&few, false), None));
    }

    #[test]
    fn a_place_that_becomes_slow_is_left_once_and_soon() {
        let places = |now, _| vec![Some(if now < 100 { QUICK } else { slow(20.0) }), Some(slow(2.0))];
        let (moves, _) = run(&mut event_driven(), 2000, places);
        assert!(matches!(moves[..], [(100..=104, 1)]), "{moves:?}");
    }

    #[test]
    fn a_slow_pool_is_found_later_by_the_clock() {
        let places = |now, _| vec![Some(if now < 70 { QUICK } else { slow(20.0) }), Some(slow(2.0))];
        let (moves, _) = run(&mut PlacementController::new(SLO, Cadence::Periodic, 2, true), 2000, places);
        assert!(matches!(moves[..], [(115..=130, 1)]), "{moves:?}");
    }

    #[test]
    fn a_moment_is_no_reason() {
        let places = |now: u32, _| vec![Some(if now % 4 == 3 { slow(20.0) } else { QUICK }), Some(QUICK)];
        assert_eq!(run(&mut event_driven(), 2000, places), (vec![], 0));
    }

    #[test]
    fn probes_become_rarer_while_no_pool_is_better() {
        let places = |now, _| vec![Some(if now < 100 { QUICK } else { slow(20.0) }), Some(slow(15.0))];
        let (moves, measured) = run(&mut event_driven(), 2000, places);
        assert!(moves.is_empty() && (1..=8).contains(&measured), "{moves:?} {measured}");
    }

    #[test]
    fn two_places_that_are_slow_where_the_job_is_do_not_keep_it_moving() {
        // Whatever it uses is slow after a while, as when several jobs run after each other.
        let arrived = core::cell::Cell::new((0, 0));
        let places = |now: u32, here: usize| {
            if arrived.get().0 != here {
                arrived.set((here, now));
            }
            let is_slow = |place| place == here && now - arrived.get().1 >= 5;
            vec![Some(if is_slow(0) { slow(20.0) } else { QUICK }), Some(if is_slow(1) { slow(20.0) } else { QUICK })]
        };
        let (moves, _) = run(&mut event_driven(), 5000, places);
        assert!((1..=10).contains(&moves.len()), "{moves:?}");
    }

    #[test]
    fn a_program_that_waits_for_little_stays() {
        let mut settle = event_driven();
        for now in 0..500 {
            let figures = if now < 50 { QUICK } else { slow(5.0) };
            assert_eq!(settle.on_window(&window(1000.0, figures), false), None);
        }
    }

    #[test]
    fn a_program_that_begins_to_read_more_has_its_place_looked_at() {
        let mut settle = event_driven();
        (0..50).for_each(|_| assert_eq!(settle.on_window(&window(3000.0, slow(5.0)), false), None));
        let asked = (0..5).find_map(|_| settle.on_window(&window(30_000.0, slow(5.0)), false));
        assert_eq!(asked, Some(Cause::Stage));
        let there = settle.on_measured(&[Some(slow(5.0)), Some(QUICK)]).unwrap();
        assert!(there.to == 1 && there.lost_there < 0.5 * there.lost, "{there:?}");
    }

    #[test]
    fn a_place_that_lost_a_server_for_good_is_left_for_a_slower_one() {
        let mut settle = event_driven();
        let calm = window(1000.0, QUICK);
        (0..LOST_LASTS - 1).for_each(|_| assert_eq!(settle.on_window(&calm, true), None));
        assert_eq!(settle.on_window(&calm, false), None, "it has mended itself");
        (0..LOST_LASTS - 1).for_each(|_| assert_eq!(settle.on_window(&calm, true), None));
        assert_eq!(settle.on_window(&calm, true), Some(Cause::Lost));
        let there = settle.on_measured(&[Some(QUICK), Some(slow(10.0))]).unwrap();
        assert_eq!((there.to, there.cause), (1, Cause::Lost));
        settle.on_moved(true);
        (0..2000).for_each(|_| assert_eq!(settle.on_window(&window(1000.0, slow(10.0)), false), None));
    }

    #[test]
    fn a_place_that_cannot_be_moved_to_is_left_out_for_a_while() {
        let mut settle = PlacementController::new(SLO, Cadence::EventDriven, 3, true);
        (0..50).for_each(|_| assert_eq!(settle.on_window(&window(30_000.0, QUICK), false), None));
        let ask = |settle: &mut PlacementController| {
            let asked = (0..200).find_map(|_| settle.on_window(&window(30_000.0, slow(20.0)), false));
            asked.map(|_| settle.on_measured(&[Some(slow(20.0)), Some(QUICK), Some(slow(2.0))]).map(|there| there.to))
        };
        assert_eq!(ask(&mut settle), Some(Some(1)));
        settle.on_moved(false);
        assert_eq!(ask(&mut settle), Some(Some(2)), "the next best");
        assert_eq!(settle.here(), 0);
        settle.on_moved(true);
        assert_eq!(settle.here(), 2);
        let mut alone = event_driven();
        (0..50).for_each(|_| assert_eq!(alone.on_window(&window(30_000.0, QUICK), false), None));
        assert!((0..9).find_map(|_| alone.on_window(&window(30_000.0, slow(20.0)), false)).is_some());
        assert_eq!(alone.on_measured(&[None, None]), None, "nobody answers");
    }

    #[test]
    fn the_controller_always_knows_the_pool_of_the_job() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut next = move |below: u64| random.u64(..below);
        for cadence in [Cadence::EventDriven, Cadence::Periodic] {
            for _ in 0..100 {
                let places = 1 + next(4) as usize;
                let mut settle =
                    PlacementController::new(1.01 + next(100) as f64 / 100.0, cadence, places, next(2) == 0);
                let mut here = 0;
                for _ in 0..500 {
                    let mut number = |below| next(below) as f64;
                    let (busy_ns, waited_ns) = (number(1_000_000_000), number(1_000_000_000));
                    let (demand_reads, moved_bytes) = (number(100_000), number(1 << 30));
                    let window =
                        ActivityWindow { busy_ns, waited_ns, demand_reads, moved_bytes, ..ActivityWindow::default() };
                    if settle.on_window(&window, next(50) > 0).is_some() {
                        let figures: Vec<_> = (0..places)
                            .map(|_| {
                                let (read_ns, bytes_per_s) = (next(1 << 20) as f64, next(1 << 30) as f64);
                                (next(3) > 0).then_some(PoolPerformance { read_ns, bytes_per_s })
                            })
                            .collect();
                        if let Some(there) = settle.on_measured(&figures) {
                            assert!(there.to != here && there.to < places && figures[there.to].is_some());
                            let is_there = next(2) == 0;
                            settle.on_moved(is_there);
                            here = if is_there { there.to } else { here };
                        }
                    }
                    assert_eq!(settle.here(), here);
                }
            }
        }
    }
}
