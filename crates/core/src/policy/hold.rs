//! Holds a program at a slowdown while it runs: gives near memory when it waits too much, takes it when it could wait more.
//!
//! Each window says how much processor time was useful and how much went into waiting for pages. *Event-driven*, every window may
//! change the near size by a unit: too slow means more, at once and twice as much each time; fast enough for a while
//! means less, at first up to four units at once. A size that was too little is not tried again soon, and later and later, until the program changes its ways: faults at
//! twice or half the rate while its size did not change. *Periodic* is what to compare with: one unit at a time, at
//! fixed times. After DMSwitcher, section 3.3.2.

use crate::geometry::PAGE_BYTES;

/// A unit is this part of the most memory that the program has had, but not less than …
const UNIT_SHARE: u64 = 20;
const UNIT_MIN_BYTES: u64 = 1 << 20;
/// Below this part of the allowed slowdown a window is calm.
const CALM: f64 = 0.5;
/// Calm windows before a unit is taken.
const CALM_WINDOWS: u32 = 2;
/// Windows before a size that was too little is tried again, at first and at most.
const AGAIN_MIN: u32 = 8;
const AGAIN_MAX: u32 = 256;
/// Units given at once, at most.
const GIVEN_MAX: u64 = 8;
/// Units taken at once, at most, and the part of the allowed slowdown below which more than one is taken.
const TAKEN_MAX: u64 = 4;
const IDLE: f64 = 0.1;
/// Windows of a period, in periodic mode.
const PERIOD: u32 = 10;
/// Faults at so many times the rate, or by it, are another stage …
const STAGE: f64 = 2.0;
/// … if they are worth speaking of.
const STAGE_FAULTS_MIN: f64 = 500.0;

/// When it decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cadence {
    /// When something happens.
    EventDriven,
    /// At fixed times.
    Periodic,
}

/// What happened in one window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    /// Processor time of the program.
    pub busy_ns: f64,
    /// Time that its threads spent waiting for pages.
    pub waited_ns: f64,
    /// Page faults that we served.
    pub faults: f64,
    /// What is near.
    pub near_bytes: u64,
    /// What the program has, near and far.
    pub all_bytes: u64,
    /// Of the faults, those that waited for a page from far memory.
    pub demand_reads: f64,
    /// What came from far memory and went there.
    pub moved_bytes: f64,
}

impl Window {
    /// Time that the program worked. A thread polls for its page first and sleeps later: where it waited longer than it was
    /// busy, it slept.
    pub(super) fn useful_ns(&self) -> f64 {
        if self.waited_ns < self.busy_ns { self.busy_ns - self.waited_ns } else { self.busy_ns }
    }

    /// Time lost by useful time.
    pub(super) fn lost(&self) -> f64 {
        slowdown(self.waited_ns, self.useful_ns()) - 1.0
    }

    /// What happened in both, one after the other.
    pub(super) fn and(&self, next: &Window) -> Window {
        Window {
            busy_ns: self.busy_ns + next.busy_ns,
            waited_ns: self.waited_ns + next.waited_ns,
            faults: self.faults + next.faults,
            demand_reads: self.demand_reads + next.demand_reads,
            moved_bytes: self.moved_bytes + next.moved_bytes,
            ..*next
        }
    }

    /// A part of it.
    pub(super) fn faded(&self, part: f64) -> Window {
        Window {
            busy_ns: self.busy_ns * part,
            waited_ns: self.waited_ns * part,
            faults: self.faults * part,
            demand_reads: self.demand_reads * part,
            moved_bytes: self.moved_bytes * part,
            ..*self
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Hold {
    slo: f64,
    cadence: Cadence,
    /// Present budget, and what it must be between.
    near_bytes: u64,
    least_bytes: u64,
    most_bytes: u64,
    all_bytes_max: u64,
    /// Since the start.
    useful_ns: f64,
    waited_ns: f64,
    /// Since the last decision, in periodic mode.
    period: Window,
    windows: u32,
    calm: u32,
    /// Units to give, and to take, next time.
    given: u64,
    taken: u64,
    /// The largest size that was too little, if it is not forgotten, and when to try it again.
    too_little: Option<TooLittle>,
    again: u32,
    /// Faults for useful second in the last window with the present size.
    rate: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct TooLittle {
    bytes: u64,
    windows_left: u32,
}

impl Hold {
    /// Starts with so much near; stays between `least` and `most`.
    pub fn new(slo: f64, cadence: Cadence, near_bytes: u64, least_bytes: u64, most_bytes: u64) -> Hold {
        assert!(slo > 1.0 && least_bytes <= near_bytes && near_bytes <= most_bytes);
        Hold {
            slo,
            cadence,
            near_bytes,
            least_bytes,
            most_bytes,
            all_bytes_max: 0,
            useful_ns: 0.0,
            waited_ns: 0.0,
            period: Window::default(),
            windows: 0,
            calm: 0,
            given: 1,
            taken: 1,
            too_little: None,
            again: AGAIN_MIN,
            rate: None,
        }
    }

    /// Present budget.
    pub fn near_bytes(&self) -> u64 {
        self.near_bytes
    }

    /// Time by useful time, since the start.
    pub fn slowdown(&self) -> f64 {
        slowdown(self.waited_ns, self.useful_ns)
    }

    /// What happened since the last call. The new budget, if it changes.
    pub fn on_window(&mut self, window: Window) -> Option<u64> {
        self.useful_ns += window.useful_ns();
        self.waited_ns += window.waited_ns;
        self.all_bytes_max = self.all_bytes_max.max(window.all_bytes);
        let before = self.near_bytes;
        match self.cadence {
            Cadence::EventDriven => self.decide(window),
            Cadence::Periodic => self.decide_at_times(window),
        }
        (self.near_bytes != before).then_some(self.near_bytes)
    }

    fn unit_bytes(&self) -> u64 {
        (self.all_bytes_max / UNIT_SHARE).max(UNIT_MIN_BYTES).next_multiple_of(PAGE_BYTES as u64)
    }

    /// What a window may lose of its useful time: less when too much is lost already.
    fn allowed(&self) -> f64 {
        let part = if self.slowdown() > self.slo { CALM } else { 1.0 };
        (self.slo - 1.0) * part
    }

    fn decide(&mut self, window: Window) {
        let lost = window.lost();
        self.notice_stage(&window);
        if let Some(too_little) = &mut self.too_little {
            too_little.windows_left = too_little.windows_left.saturating_sub(1);
        }
        if lost > self.allowed() {
            let bytes = self.too_little.map_or(0, |too_little| too_little.bytes).max(self.near_bytes);
            self.too_little = Some(TooLittle { bytes, windows_left: self.again });
            self.again = (self.again * 2).min(AGAIN_MAX);
            self.calm = 0;
            self.give(self.given);
            (self.given, self.taken) = ((self.given * 2).min(GIVEN_MAX), 1);
            return;
        }
        self.given = 1;
        self.calm = if lost < (self.slo - 1.0) * CALM { self.calm + 1 } else { 0 };
        // Whoever does not wait at all can give more at once, until it is known how much is too much.
        let is_idle = lost < (self.slo - 1.0) * IDLE && self.too_little.is_none();
        if self.calm >= CALM_WINDOWS && self.slowdown() <= self.slo {
            self.take(window.near_bytes, if is_idle { self.taken } else { 1 });
            self.taken = if is_idle { (self.taken * 2).min(TAKEN_MAX) } else { 1 };
        }
    }

    /// A program that does something else needs something else: what was learned is void.
    fn notice_stage(&mut self, window: &Window) {
        let rate = window.faults * 1e9 / window.useful_ns().max(1.0);
        if let Some(before) = self.rate {
            let (low, high) = (before.min(rate), before.max(rate));
            if high >= STAGE_FAULTS_MIN && high > low * STAGE {
                self.too_little = None;
                self.again = AGAIN_MIN;
            }
        }
        self.rate = Some(rate);
    }

    fn decide_at_times(&mut self, window: Window) {
        self.period = self.period.and(&window);
        self.windows += 1;
        if self.windows < PERIOD {
            return;
        }
        let lost = self.period.lost();
        (self.period, self.windows) = (Window::default(), 0);
        if lost > self.allowed() {
            self.give(1);
        } else if lost < (self.slo - 1.0) * CALM && self.slowdown() <= self.slo {
            self.take(window.near_bytes, 1);
        }
    }

    fn give(&mut self, units: u64) {
        self.near_bytes = (self.near_bytes + units * self.unit_bytes()).min(self.most_bytes);
        self.rate = None;
    }

    /// Units of what it uses: room that it does not use is no memory.
    fn take(&mut self, used_bytes: u64, units: u64) {
        let less = self.near_bytes.min(used_bytes).saturating_sub(units * self.unit_bytes());
        let bytes = (less / PAGE_BYTES as u64 * PAGE_BYTES as u64).max(self.least_bytes);
        let burnt = self.too_little.is_some_and(|too_little| bytes <= too_little.bytes && too_little.windows_left > 0);
        if burnt || bytes >= self.near_bytes {
            return;
        }
        self.near_bytes = bytes;
        self.calm = 0;
        self.rate = None;
    }
}

fn slowdown(waited_ns: f64, useful_ns: f64) -> f64 {
    1.0 + waited_ns / useful_ns.max(1.0)
}

#[cfg(test)]
mod tests {
    //! Danger: a program that is starved of memory, or one that is given all because it once waited.
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A program that uses `used` of its memory evenly, and makes so many accesses per useful second to it that miss when what they
    /// need is far.
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

        /// A window of one second on one processor; a share of the waiting is slept.
        fn window(&self, near: u64) -> Window {
            let useful = 1e9 / (1.0 + self.lost(near));
            let waited_ns = 1e9 - useful;
            let faults = waited_ns / self.fault_ns;
            Window {
                busy_ns: 1e9,
                waited_ns,
                faults,
                near_bytes: near.min(self.all),
                all_bytes: self.all,
                ..Window::default()
            }
        }

        /// The least near memory within `slo`.
        fn least(&self, slo: f64) -> u64 {
            (1..=1000).map(|part| self.all * part / 1000).find(|&near| self.lost(near) <= slo - 1.0).unwrap()
        }
    }

    fn hold(slo: f64, cadence: Cadence) -> Hold {
        Hold::new(slo, cadence, 1000 * MIB, 16 * MIB, 2000 * MIB)
    }

    /// Runs the program for so many seconds; mean near memory of the second half.
    fn run(hold: &mut Hold, program: Program, seconds: u32) -> u64 {
        let mut near = 0;
        for second in 0..seconds {
            near += if second >= seconds / 2 { hold.near_bytes() } else { 0 };
            hold.on_window(program.window(hold.near_bytes()));
        }
        near / u64::from(seconds - seconds / 2)
    }

    const EVEN: Program = Program { all: 1000 * MIB, used: 1000 * MIB, accesses_per_s: 2e5, fault_ns: 10_000.0 };

    #[test]
    fn the_program_stays_within_its_time_and_near_the_least_memory() {
        for slo in [1.2, 1.4, 1.6, 1.8] {
            let mut hold = hold(slo, Cadence::EventDriven);
            let near = run(&mut hold, EVEN, 600);
            assert!(hold.slowdown() <= slo * 1.01, "{slo}: {}", hold.slowdown());
            let least = EVEN.least(slo);
            assert!(near >= least - 20 * MIB && near <= least + 200 * MIB, "{slo}: {} {}", near / MIB, least / MIB);
        }
    }

    #[test]
    fn what_is_not_used_is_taken_whatever_is_allowed() {
        let cold = Program { used: 200 * MIB, accesses_per_s: 1e7, ..EVEN };
        let mut hold = hold(1.2, Cadence::EventDriven);
        let near = run(&mut hold, cold, 600);
        assert!(near < 260 * MIB && hold.slowdown() < 1.2, "{} {}", near / MIB, hold.slowdown());
    }

    #[test]
    fn a_cliff_is_not_tried_again_and_again() {
        // A unit below what it uses costs a hundred times its time.
        let cliff = Program { accesses_per_s: 2e8, ..EVEN };
        let mut hold = hold(1.4, Cadence::EventDriven);
        let mut fell = 0;
        for _ in 0..2000 {
            let window = cliff.window(hold.near_bytes());
            fell += u32::from(window.waited_ns > window.useful_ns());
            hold.on_window(window);
        }
        assert!(fell <= 16, "{fell} windows of 2000");
    }

    #[test]
    fn a_new_stage_is_noticed_soon_and_later_by_the_clock() {
        let seconds_until_fast = |cadence| {
            let mut hold = hold(1.4, cadence);
            let idle = Program { used: 50 * MIB, ..EVEN };
            run(&mut hold, idle, 600);
            let before = hold.near_bytes();
            assert!(before < 150 * MIB);
            let seconds = (0..600).find(|_| {
                let window = EVEN.window(hold.near_bytes());
                hold.on_window(window);
                EVEN.lost(hold.near_bytes()) <= 0.4
            });
            seconds.unwrap()
        };
        let (event, periodic) = (seconds_until_fast(Cadence::EventDriven), seconds_until_fast(Cadence::Periodic));
        assert!(event <= 6, "{event}");
        assert!(periodic >= 60, "{periodic}");
    }

    #[test]
    fn a_place_that_becomes_slow_is_met_with_memory() {
        let mut hold = hold(1.4, Cadence::EventDriven);
        let before = run(&mut hold, EVEN, 300);
        let slow = Program { fault_ns: 5.0 * EVEN.fault_ns, ..EVEN };
        let after = run(&mut hold, slow, 300);
        let least = slow.least(1.4);
        assert!(before < least && after >= least && hold.slowdown() <= 1.42, "{} {}", before / MIB, after / MIB);
    }

    #[test]
    fn it_stays_within_its_bounds_whatever_happens() {
        let mut random = 3u64;
        let mut next = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for cadence in [Cadence::EventDriven, Cadence::Periodic] {
            for _ in 0..200 {
                let least = (1 + next(100)) * MIB;
                let most = least + next(1000) * MIB;
                let mut hold = Hold::new(1.01 + next(100) as f64 / 100.0, cadence, most, least, most);
                for _ in 0..200 {
                    let (busy_ns, waited_ns) = (next(2_000_000_000) as f64, next(2_000_000_000) as f64);
                    let (near_bytes, all_bytes) = (next(1 << 30), next(1 << 31));
                    let before = hold.near_bytes();
                    let faults = next(100_000) as f64;
                    let change = hold.on_window(Window {
                        busy_ns,
                        waited_ns,
                        faults,
                        near_bytes,
                        all_bytes,
                        ..Window::default()
                    });
                    assert!((least..=most).contains(&hold.near_bytes()));
                    assert_eq!(change, (hold.near_bytes() != before).then_some(hold.near_bytes()));
                    assert!(hold.slowdown().is_finite());
                }
            }
        }
    }
}
