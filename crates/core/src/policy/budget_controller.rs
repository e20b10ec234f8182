//! Controller that holds a running program at a slowdown: gives near memory when it waits too much,
//! takes some when it could wait more.
//!
//! Each window says how much processor time was useful and how much went into waiting for pages.
//!
//! *Event-driven*, waiting beyond what is allowed is added up (a cumulative sum, CUSUM). As soon as
//! the sum exceeds the tolerance the size is too little, and the budget grows, by twice as much
//! each time. When the program has been fast enough for a while, a *look* tests whether less would
//! do: a step down, which is on trial. Looks have a *budget*: half of what the program may lose, of
//! late. The cost of a look before it is given up is known beforehand. So a look is made when it
//! can be paid for, and a smaller one before that.
//!
//! A size that was too little is approached by halves. It is not tried again soon, and later and
//! later, until the program's behaviour changes: faults at twice or half the rate while its size
//! did not change.
//!
//! *Periodic* is the baseline to compare with: one unit at a time, at fixed times. After
//! DMSwitcher, section 3.3.2.

use crate::cast::saturating_u64;
use crate::geometry::PAGE_BYTES;
use core::time::Duration;

/// Length of a window. A look that fails costs at least one window.
pub const WINDOW: Duration = Duration::from_millis(25);
/// Size of a unit: one part in this many of the most memory that the program has had, but not less
/// than …
const UNIT_SHARE: u64 = 20;
const UNIT_MIN_BYTES: u64 = 1 << 20;
/// Least step that is worth a look: one part in this many of a unit.
const UNIT_PARTS: u64 = 8;
/// Part of the allowed slowdown below which a program is calm; looks may cost as much.
const CALM: f64 = 0.5;
/// Number of windows for which a size is on trial.
const TRIAL: u32 = 4;
/// Part by which a window counts less with each window that follows, in the recent mean …
const RECENT: f64 = 0.2;
/// … and in the account that looks are paid from: half after 35 seconds.
const ACCOUNT: f64 = 0.0005;
/// Tolerance: this part of a window, plus this multiple of the time to get back what was taken.
const PATIENCE: f64 = 0.4;
const PATIENCE_REFILLS: f64 = 1.5;
/// Pages that were taken come back at first: in each window, one part in this many of them is no
/// longer waited for.
const REFILLED: u64 = 32;
/// Time that a page takes to come back, as long as it is not known.
const PAGE_NS: f64 = 10_000.0;
/// Number of pages from which on that time is known.
const PAGES_MIN: f64 = 100.0;
/// Windows before a size that was too little is tried again, at first and at most.
const AGAIN_MIN: u32 = 40;
const AGAIN_MAX: u32 = 4096;
/// Greatest number of units given at once.
const GIVEN_MAX: u64 = 8;
/// Greatest number of units taken at once, and the part of the allowed slowdown below which more
/// than one is taken.
const TAKEN_MAX: u64 = 4;
const IDLE: f64 = 0.1;
/// Number of windows of a period, in periodic mode.
const PERIOD: u32 = 200;
/// Factor between fault rates, in either direction, that means another stage …
const STAGE: f64 = 2.0;
/// … if the higher rate reaches this many faults, over this much useful time.
const STAGE_FAULTS_MIN: f64 = 500.0;
const STAGE_NS: f64 = 5e8;

/// Times at which the controller decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cadence {
    /// Decides when something happens.
    EventDriven,
    /// Decides at fixed times.
    Periodic,
}

/// Activity of the program in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActivityWindow {
    /// Processor time of the program.
    pub busy_ns: f64,
    /// Time that its threads spent waiting for pages.
    pub waited_ns: f64,
    /// Page faults that this library served.
    pub faults: f64,
    /// Memory that is near.
    pub near_bytes: u64,
    /// Memory that the program has, near and far.
    pub all_bytes: u64,
    /// Faults that waited for a page from far memory.
    pub demand_reads: f64,
    /// Bytes that came from far memory or went there.
    pub moved_bytes: f64,
}

impl ActivityWindow {
    /// Returns the time that the program worked. A thread polls for its page first and sleeps
    /// later: where it waited longer than it was busy, it slept.
    pub(super) fn useful_ns(&self) -> f64 {
        if self.waited_ns < self.busy_ns { self.busy_ns - self.waited_ns } else { self.busy_ns }
    }

    /// Returns the slowdown: all time as a multiple of the useful time.
    pub fn slowdown(&self) -> f64 {
        slowdown(self.waited_ns, self.useful_ns())
    }

    /// Returns the time lost as a part of the useful time.
    pub(super) fn lost(&self) -> f64 {
        self.slowdown() - 1.0
    }

    /// Returns the activity of this window and the next one together.
    pub fn combine(&self, next: &ActivityWindow) -> ActivityWindow {
        ActivityWindow {
            busy_ns: self.busy_ns + next.busy_ns,
            waited_ns: self.waited_ns + next.waited_ns,
            faults: self.faults + next.faults,
            demand_reads: self.demand_reads + next.demand_reads,
            moved_bytes: self.moved_bytes + next.moved_bytes,
            ..*next
        }
    }

    /// Returns the window with its activity scaled by `part`.
    pub(super) fn faded(&self, part: f64) -> ActivityWindow {
        ActivityWindow {
            busy_ns: self.busy_ns * part,
            waited_ns: self.waited_ns * part,
            faults: self.faults * part,
            demand_reads: self.demand_reads * part,
            moved_bytes: self.moved_bytes * part,
            ..*self
        }
    }
}

/// Controller of a near budget for one running program.
#[derive(Clone, Debug)]
pub struct BudgetController {
    slo: f64,
    cadence: Cadence,
    /// Present budget, and its bounds.
    near_bytes: u64,
    least_bytes: u64,
    most_bytes: u64,
    all_bytes_max: u64,
    /// Windows since the program last grew.
    grown: u32,
    /// Totals since the start.
    useful_ns: f64,
    waited_ns: f64,
    /// Mean window of late, and the decaying sum of windows by which looks are paid.
    recent: ActivityWindow,
    account: ActivityWindow,
    /// Windows since the last change, and the waiting beyond what is allowed since then.
    windows: u32,
    debt_ns: f64,
    /// Amount of the last change, and the size before it if it is a look that is on trial.
    changed_bytes: u64,
    before_bytes: Option<u64>,
    /// Units to give, and to take, next time.
    given: u64,
    taken: u64,
    /// Largest size that was too little, if it is not forgotten, and windows until it is tried
    /// again.
    too_little: Option<RejectedSize>,
    again: u32,
    /// Present stage, and faults per useful second in the last stage with the present size. In
    /// periodic mode the present period.
    stage: ActivityWindow,
    rate: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct RejectedSize {
    bytes: u64,
    windows_left: u32,
}

impl BudgetController {
    /// Creates a controller that starts with `near_bytes` near and stays between `least_bytes` and
    /// `most_bytes`.
    pub fn new(slo: f64, cadence: Cadence, near_bytes: u64, least_bytes: u64, most_bytes: u64) -> BudgetController {
        assert!(slo > 1.0 && least_bytes <= near_bytes && near_bytes <= most_bytes);
        BudgetController {
            slo,
            cadence,
            near_bytes,
            least_bytes,
            most_bytes,
            all_bytes_max: 0,
            grown: 0,
            useful_ns: 0.0,
            waited_ns: 0.0,
            recent: ActivityWindow::default(),
            account: ActivityWindow::default(),
            windows: 0,
            debt_ns: 0.0,
            changed_bytes: 0,
            before_bytes: None,
            given: 1,
            taken: 1,
            too_little: None,
            again: AGAIN_MIN,
            stage: ActivityWindow::default(),
            rate: None,
        }
    }

    /// Returns the present budget.
    pub fn near_bytes(&self) -> u64 {
        self.near_bytes
    }

    /// Changes the largest budget, which is not below the least one. A larger budget than that is
    /// cut at once; room that appears is used only when the program needs it. Returns the budget.
    pub fn limit_to(&mut self, most_bytes: u64) -> u64 {
        self.most_bytes = most_bytes.max(self.least_bytes);
        if self.near_bytes > self.most_bytes {
            self.change(self.most_bytes);
        }
        self.near_bytes
    }

    /// Returns the slowdown since the start: all time as a multiple of the useful time.
    pub fn slowdown(&self) -> f64 {
        slowdown(self.waited_ns, self.useful_ns)
    }

    /// Takes the activity since the last call, a [`WINDOW`] ago. Returns the new budget, if it
    /// changes.
    pub fn on_window(&mut self, window: ActivityWindow) -> Option<u64> {
        self.useful_ns += window.useful_ns();
        self.waited_ns += window.waited_ns;
        let grows = window.all_bytes > self.all_bytes_max + self.unit_bytes() / UNIT_PARTS / u64::from(TRIAL);
        self.grown = if grows { 0 } else { self.grown.saturating_add(1) };
        self.all_bytes_max = self.all_bytes_max.max(window.all_bytes);
        self.windows = self.windows.saturating_add(1);
        let before = self.near_bytes;
        match self.cadence {
            Cadence::EventDriven => self.decide(window),
            Cadence::Periodic => self.decide_at_times(window),
        }
        (self.near_bytes != before).then_some(self.near_bytes)
    }

    fn unit_bytes(&self) -> u64 {
        whole_pages((self.all_bytes_max / UNIT_SHARE).max(UNIT_MIN_BYTES))
    }

    /// Returns the part of useful time that may be lost: less when too much is lost already.
    fn allowed(&self) -> f64 {
        let part = if self.slowdown() > self.slo { CALM } else { 1.0 };
        (self.slo - 1.0) * part
    }

    fn decide(&mut self, window: ActivityWindow) {
        let recent = if self.recent.busy_ns > 0.0 { self.recent } else { window };
        self.recent = recent.faded(1.0 - RECENT).combine(&window.faded(RECENT));
        self.account = self.account.faded(1.0 - ACCOUNT).combine(&window);
        self.too_little = self.too_little.and_then(RejectedSize::fade);
        self.notice_stage(&window);
        let excess_ns = window.waited_ns - self.allowed() * window.useful_ns();
        self.debt_ns = (self.debt_ns + excess_ns).max(0.0);
        if self.debt_ns > self.patience_ns() {
            self.learn();
            return;
        }
        self.changed_bytes -= self.changed_bytes / REFILLED;
        let is_there = window.near_bytes <= self.near_bytes + self.unit_bytes() / 4;
        let is_calm = self.recent.lost() < (self.slo - 1.0) * CALM && self.slowdown() <= self.slo;
        // While a program still grows, its need is unknown.
        if self.windows.min(self.grown) >= TRIAL && is_there && is_calm {
            (self.before_bytes, self.given) = (None, 1);
            self.probe(window.near_bytes);
        }
    }

    /// Learns that the size is too little, and changes it.
    fn learn(&mut self) {
        let bytes = self.too_little.map_or(0, |too_little| too_little.bytes).max(self.near_bytes);
        self.too_little = Some(RejectedSize { bytes, windows_left: self.again });
        self.again = (self.again * 2).min(AGAIN_MAX);
        self.taken = 1;
        match self.before_bytes {
            Some(before) => self.change(before),
            None => {
                self.change(self.near_bytes + self.given * self.unit_bytes());
                self.given = (self.given * 2).min(GIVEN_MAX);
            }
        }
    }

    /// Tests whether less would do, starting from the memory that the program uses: unused room is
    /// not memory.
    fn probe(&mut self, used_bytes: u64) {
        // A program that does not wait at all can give more at once, until it is known how much is
        // too much.
        let is_idle = self.recent.lost() < (self.slo - 1.0) * IDLE && self.too_little.is_none();
        let units = if is_idle { self.taken } else { 1 };
        let from = self.near_bytes.min(used_bytes);
        let mut step = (units * self.unit_bytes()).min(self.affordable_bytes());
        if let Some(too_little) = self.too_little {
            step = step.min(from.saturating_sub(too_little.bytes) / 2);
        }
        let to = from.saturating_sub(step) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let to = to.max(self.least_bytes);
        if step < self.unit_bytes() / UNIT_PARTS || to >= self.near_bytes {
            return;
        }
        self.taken = if is_idle { (self.taken * 2).min(TAKEN_MAX) } else { 1 };
        let before = from.max(self.least_bytes);
        self.change(to);
        (self.changed_bytes, self.before_bytes) = (before - to, Some(before));
    }

    /// Returns the largest step whose look can be paid for. A look may take a window and the
    /// tolerance until it is given up, and what was taken has to come back.
    fn affordable_bytes(&self) -> u64 {
        let left_ns = CALM * (self.slo - 1.0) * self.account.useful_ns() - self.account.waited_ns;
        let refill_ns = (left_ns - (1.0 + PATIENCE) * self.recent.busy_ns) / (PATIENCE_REFILLS + 1.0);
        saturating_u64(refill_ns / self.page_ns()) * PAGE_BYTES as u64
    }

    fn patience_ns(&self) -> f64 {
        let pages = self.changed_bytes / PAGE_BYTES as u64;
        PATIENCE * self.recent.busy_ns + PATIENCE_REFILLS * self.page_ns() * pages as f64
    }

    /// Returns the time that a page took to come back, of late.
    fn page_ns(&self) -> f64 {
        // About half of the pages that move come back; prefetched pages have not been waited for.
        let pages = (self.account.moved_bytes / PAGE_BYTES as f64 / 2.0).max(self.account.demand_reads);
        if pages < PAGES_MIN { PAGE_NS } else { self.account.waited_ns / pages }
    }

    fn change(&mut self, to: u64) {
        let to = to.clamp(self.least_bytes, self.most_bytes);
        self.changed_bytes = to.abs_diff(self.near_bytes);
        (self.near_bytes, self.before_bytes) = (to, None);
        (self.windows, self.debt_ns) = (0, 0.0);
        (self.stage, self.rate) = (ActivityWindow::default(), None);
    }

    /// Detects a new stage. A program that does something else needs something else, so what was
    /// learned is void.
    fn notice_stage(&mut self, window: &ActivityWindow) {
        if self.windows <= TRIAL {
            return;
        }
        self.stage = self.stage.combine(window);
        if self.stage.useful_ns() < STAGE_NS {
            return;
        }
        let rate = self.stage.faults * 1e9 / self.stage.useful_ns();
        self.stage = ActivityWindow::default();
        if let Some(before) = self.rate {
            let (low, high) = (before.min(rate), before.max(rate));
            if high >= STAGE_FAULTS_MIN && high > low * STAGE {
                self.too_little = None;
                self.again = AGAIN_MIN;
            }
        }
        self.rate = Some(rate);
    }

    fn decide_at_times(&mut self, window: ActivityWindow) {
        self.stage = self.stage.combine(&window);
        if self.windows < PERIOD {
            return;
        }
        let lost = self.stage.lost();
        (self.stage, self.windows) = (ActivityWindow::default(), 0);
        if lost > self.allowed() {
            self.change(self.near_bytes + self.unit_bytes());
        } else if lost < (self.slo - 1.0) * CALM && self.slowdown() <= self.slo {
            let less = self.near_bytes.min(window.near_bytes).saturating_sub(self.unit_bytes());
            self.change(whole_pages(less).min(self.near_bytes));
        }
    }
}

impl RejectedSize {
    /// Returns the mark one window later; `None` when it is forgotten.
    fn fade(self) -> Option<RejectedSize> {
        let windows_left = self.windows_left.checked_sub(1)?;
        Some(RejectedSize { windows_left, ..self })
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES as u64)
}

fn slowdown(waited_ns: f64, useful_ns: f64) -> f64 {
    1.0 + waited_ns / useful_ns.max(1.0)
}

#[cfg(test)]
mod tests {
    //! Danger: a program that is starved of memory, or one that is given all because it once waited.
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A program that uses `used` of its memory evenly, and makes so many accesses per useful
    /// second to it that miss when what they need is far.
    #[derive(Clone, Copy)]
    struct Program {
        all: u64,
        used: u64,
        accesses_per_s: f64,
        fault_ns: f64,
    }

    impl Program {
        fn lost(&self, near: u64) -> f64 {
            let far = 1.0 - (near as f64 / self.used as f64).min(1.0);
            far * self.accesses_per_s * self.fault_ns / 1e9
        }

        /// A window on one processor.
        fn window(&self, near: u64) -> ActivityWindow {
            let busy_ns = WINDOW.as_nanos() as f64;
            let waited_ns = busy_ns - busy_ns / (1.0 + self.lost(near));
            let faults = waited_ns / self.fault_ns;
            ActivityWindow {
                busy_ns,
                waited_ns,
                faults,
                demand_reads: faults,
                near_bytes: near.min(self.all),
                all_bytes: self.all,
                ..ActivityWindow::default()
            }
        }

        /// The least near memory within `slo`.
        fn least(&self, slo: f64) -> u64 {
            (1..=1000).map(|part| self.all * part / 1000).find(|&near| self.lost(near) <= slo - 1.0).unwrap()
        }
    }

    fn hold(slo: f64, cadence: Cadence) -> BudgetController {
        BudgetController::new(slo, cadence, 1000 * MIB, 16 * MIB, 2000 * MIB)
    }

    /// Windows of so many seconds.
    fn windows(seconds: f64) -> u32 {
        (seconds / WINDOW.as_secs_f64()) as u32
    }

    /// Runs the program for so many seconds; mean near memory of the second half.
    fn run(hold: &mut BudgetController, program: Program, seconds: f64) -> u64 {
        let (mut near, all) = (0, windows(seconds));
        for window in 0..all {
            near += if window >= all / 2 { hold.near_bytes() } else { 0 };
            hold.on_window(program.window(hold.near_bytes()));
        }
        near / u64::from(all - all / 2)
    }

    const EVEN: Program = Program { all: 1000 * MIB, used: 1000 * MIB, accesses_per_s: 2e5, fault_ns: 10_000.0 };

    #[test]
    fn the_program_stays_within_its_time_and_near_the_least_memory() {
        for slo in [1.2, 1.4, 1.6, 1.8] {
            let mut hold = hold(slo, Cadence::EventDriven);
            let near = run(&mut hold, EVEN, 300.0);
            assert!(hold.slowdown() <= slo * 1.01, "{slo}: {}", hold.slowdown());
            let least = EVEN.least(slo);
            assert!(near >= least - 20 * MIB && near <= least + 200 * MIB, "{slo}: {} {}", near / MIB, least / MIB);
        }
    }

    #[test]
    fn unused_memory_is_taken_at_any_allowed_slowdown() {
        let cold = Program { used: 200 * MIB, accesses_per_s: 1e7, ..EVEN };
        let mut hold = hold(1.2, Cadence::EventDriven);
        let near = run(&mut hold, cold, 300.0);
        assert!(near < 260 * MIB && hold.slowdown() < 1.2, "{} {}", near / MIB, hold.slowdown());
    }

    /// A unit below what it uses costs a hundred times its time.
    const CLIFF: Program = Program { accesses_per_s: 2e8, ..EVEN };

    #[test]
    fn a_cliff_is_not_tried_again_and_again() {
        let mut hold = hold(1.4, Cadence::EventDriven);
        let fell = (0..windows(600.0)).filter(|_| {
            let window = CLIFF.window(hold.near_bytes());
            hold.on_window(window);
            window.waited_ns > window.useful_ns()
        });
        let fell = fell.count();
        assert!(fell <= 200, "{fell} windows: a hundredth of its time");
    }

    #[test]
    fn looks_never_cost_more_than_the_program_may_lose_whenever_it_ends() {
        for slo in [1.05, 1.1, 1.2, 1.4, 1.8] {
            for accesses_per_s in [1e4, 1e5, 1e6, 1e7, 1e8] {
                let mut hold = hold(slo, Cadence::EventDriven);
                let program = Program { accesses_per_s, ..EVEN };
                for window in 0..windows(60.0) {
                    hold.on_window(program.window(hold.near_bytes()));
                    let (seconds, slowdown) = (f64::from(window) * WINDOW.as_secs_f64(), hold.slowdown());
                    assert!(slowdown <= slo * 1.01, "{slo}, {accesses_per_s}: {slowdown} after {seconds} s");
                }
            }
        }
    }

    #[test]
    fn a_short_wait_at_the_start_says_nothing() {
        let mut hold = BudgetController::new(1.4, Cadence::EventDriven, 300 * MIB, 16 * MIB, 1000 * MIB);
        let window =
            |waited_ns| ActivityWindow { busy_ns: 25e6, waited_ns, all_bytes: 1000 * MIB, ..ActivityWindow::default() };
        assert_eq!(hold.on_window(window(12e6)), None);
        assert!((0..3).any(|_| hold.on_window(window(20e6)).is_some()), "but longer ones do");
    }

    #[test]
    fn a_program_that_grows_keeps_what_it_has_until_it_has_grown() {
        let mut hold = hold(1.4, Cadence::EventDriven);
        for window in 1..=windows(10.0) {
            let grown = Program { all: u64::from(window) * 2 * MIB, used: MIB, ..EVEN };
            assert_eq!(hold.on_window(grown.window(hold.near_bytes())), None, "{window}");
        }
        let grown = Program { all: 800 * MIB, used: MIB, ..EVEN };
        assert!(run(&mut hold, grown, 60.0) < 100 * MIB);
    }

    #[test]
    fn a_new_stage_is_noticed_soon_and_later_by_the_clock() {
        let seconds_until_fast = |cadence| {
            let mut hold = hold(1.4, cadence);
            let idle = Program { used: 50 * MIB, ..EVEN };
            run(&mut hold, idle, 300.0);
            let before = hold.near_bytes();
            assert!(before < 150 * MIB, "{}", before / MIB);
            let until = (0..windows(600.0)).find(|_| {
                hold.on_window(EVEN.window(hold.near_bytes()));
                EVEN.lost(hold.near_bytes()) <= 0.44
            });
            f64::from(until.unwrap()) * WINDOW.as_secs_f64()
        };
        let (event, periodic) = (seconds_until_fast(Cadence::EventDriven), seconds_until_fast(Cadence::Periodic));
        assert!(event <= 5.0, "{event}");
        assert!(periodic >= 30.0, "{periodic}");
    }

    #[test]
    fn a_place_that_becomes_slow_is_met_with_memory() {
        let mut hold = hold(1.4, Cadence::EventDriven);
        let before = run(&mut hold, EVEN, 300.0);
        let slow = Program { fault_ns: 5.0 * EVEN.fault_ns, ..EVEN };
        let after = run(&mut hold, slow, 300.0);
        let least = slow.least(1.4);
        assert!(before < least && after >= least && hold.slowdown() <= 1.42, "{} {}", before / MIB, after / MIB);
    }

    #[test]
    fn a_smaller_limit_holds_at_once_and_a_larger_one_is_used_as_needed() {
        let mut hold = hold(1.4, Cadence::EventDriven);
        assert!(run(&mut hold, EVEN, 60.0) > 700 * MIB);
        assert_eq!(hold.limit_to(300 * MIB), 300 * MIB);
        // The program waits far more than it may, and there is nothing to give it.
        run(&mut hold, EVEN, 60.0);
        assert_eq!(hold.near_bytes(), 300 * MIB);
        assert_eq!(hold.limit_to(2000 * MIB), 300 * MIB, "nothing is taken before it is needed");
        let near = run(&mut hold, EVEN, 60.0);
        let least = EVEN.least(1.4);
        assert!(near >= least && near <= least + 300 * MIB, "{} {}", near / MIB, least / MIB);
        assert_eq!(hold.limit_to(0), 16 * MIB, "never below the least");
    }

    #[test]
    fn the_budget_always_stays_within_its_bounds() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut next = move |below: u64| random.u64(..below);
        for cadence in [Cadence::EventDriven, Cadence::Periodic] {
            for _ in 0..200 {
                let least = (1 + next(100)) * MIB;
                let most = least + next(1000) * MIB;
                let mut hold = BudgetController::new(1.01 + next(100) as f64 / 100.0, cadence, most, least, most);
                for _ in 0..200 {
                    let (busy_ns, waited_ns) = (next(2_000_000_000) as f64, next(2_000_000_000) as f64);
                    let (near_bytes, all_bytes) = (next(1 << 30), next(1 << 31));
                    let before = hold.near_bytes();
                    let faults = next(100_000) as f64;
                    let change = hold.on_window(ActivityWindow {
                        busy_ns,
                        waited_ns,
                        faults,
                        near_bytes,
                        all_bytes,
                        ..ActivityWindow::default()
                    });
                    assert!((least..=most).contains(&hold.near_bytes()));
                    assert_eq!(change, (hold.near_bytes() != before).then_some(hold.near_bytes()));
                    assert!(hold.slowdown().is_finite());
                }
            }
        }
    }
}
