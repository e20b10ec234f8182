//! Decides where a function runs, at the client or at the server, from the times that both took
//! lately. (WICkit's choice, made at run time and not at start-up.)
//!
//! At the client a call takes as many round trips as it makes accesses. At the server it takes one,
//! and its turn in whatever queue there is. Both are measured, and so is the number of accesses.
//! The measure is the time *per call*: of many that are on their way together each waits longer
//! than one alone, and costs less. Neither load says anything about the other, so estimates are
//! kept for each load (how many calls are made together), and few calls may run at one side while
//! many run at the other.
//!
//! The other side is probed now and then, so seldom that it costs some two per cent. It must be
//! clearly better, or slightly better after each of several looks, before calls move there. A side
//! that was left for a while is slow to begin with (threads sleep, connections are opened), so its
//! first round does not count. As long as the other side looks clearly better it is probed again at
//! once, and an old estimate of it that no longer holds is soon forgotten.

use core::fmt;

/// Side at which a call runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The client, with one-sided accesses.
    Client,
    /// The server, beside the memory.
    Server,
}

impl Side {
    /// Returns the other side.
    pub fn other(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// Weight of a mean: each sample counts one part in this many.
const WEIGHT: u64 = 8;
/// Greatest multiple of the expected value that one sample counts as: it may be a hiccup.
const SAMPLE_MAX: u64 = 2;
/// Greatest multiple that the next sample counts as, if the last one was above its bound.
const SAMPLE_MAX_AGAIN: u64 = 8;
/// Tenths of our time below which the other side is clearly better.
const CLEARLY_TENTHS: u64 = 8;
/// Twentieths of our time below which the other side is slightly better, and how many looks in a
/// row must find that.
const SLIGHTLY_TWENTIETHS: u64 = 19;
const LOOKS_THAT_AGREE: u8 = 4;
/// Least number of calls from one look at the other side to the next, for each call that the look
/// takes.
const LOOK_EVERY_MIN: u64 = 32;
/// Cost of a look: at most one call in this many.
const LOOK_COST: u64 = 50;
/// Bound of the factor by which the other side counts as slower, because its estimate may be wrong.
const SLOWER_MAX: u64 = 32;
/// Greatest number of calls of one round of a look: more at a time say no more.
const LOOK_CALLS_MAX: u64 = 64;
/// Number of first looks that are made as soon as possible, whatever they found: one may have met a
/// hiccup.
const LOOKS_SOON: u8 = 2;
/// Greatest number of rounds of a look that finds the other side better.
const LOOK_ROUNDS_MAX: u8 = 16;
/// Number of loads that are told apart: 1 call at a time, 2 or 3, 4 to 7, and so on. The last is 64
/// or more.
const LOADS: usize = 7;

/// Exponentially weighted mean with bounded samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct BoundedMean {
    value: Option<u64>,
    /// Whether the last sample was above its bound.
    was_high: bool,
}

impl BoundedMean {
    const NEW: BoundedMean = BoundedMean { value: None, was_high: false };

    fn add(&mut self, sample: u64) {
        let Some(mean) = self.value else {
            self.value = Some(sample);
            return;
        };
        let most = |times: u64| mean.saturating_mul(times).max(times);
        let is_high = sample > most(SAMPLE_MAX);
        let times = if core::mem::replace(&mut self.was_high, is_high) { SAMPLE_MAX_AGAIN } else { SAMPLE_MAX };
        self.value = Some(mean - mean / WEIGHT + sample.min(most(times)) / WEIGHT);
    }

    /// Adds a sample of the side that is being probed. The old estimate is out of date if the side
    /// takes less than a third now: a single hiccup does not make that much difference.
    fn add_probe(&mut self, sample: u64) {
        match self.value {
            Some(mean) if sample < mean / 3 => self.value = Some(mean / 2 + sample / 2),
            _ => self.add(sample),
        }
    }
}

/// Present decision for a function, with the estimates behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallPlacementDecision {
    /// Side at which calls run.
    pub side: Side,
    /// Accesses of a call, in thousandths; `None` before the first.
    pub steps_thousandths: Option<u64>,
    /// Nanoseconds that a call takes at the client.
    pub client_ns: Option<u64>,
    /// Nanoseconds that a call takes at the server, with round trip and queue.
    pub server_ns: Option<u64>,
    /// Calls that ran at the client, and at the server.
    pub calls: [u64; 2],
    /// Number of times that calls moved to the other side.
    pub moves: u64,
    /// Whether the function is bound to the client, because the server does not run it.
    pub is_bound: bool,
    /// Number of calls made together to which side and times apply. It stands for all loads from
    /// this number to less than twice as many; 64 stands for all larger ones.
    pub together: u64,
}

impl fmt::Display for CallPlacementDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.side == Side::Client { "client" } else { "server" };
        write!(f, "at the {side}: ")?;
        if self.is_bound {
            f.write_str("the server does not run it")?;
        } else {
            let mut name = |what: &str, ns: Option<u64>| match ns {
                Some(ns) => write!(f, "{}.{} µs {what}, ", ns / 1000, ns % 1000 / 100),
                None => write!(f, "unknown {what}, "),
            };
            name("there", self.server_ns)?;
            name("here", self.client_ns)?;
            let steps = self.steps_thousandths.unwrap_or(0);
            write!(f, "{}.{} accesses", steps / 1000, steps % 1000 / 100)?;
        }
        let [here, there] = self.calls;
        write!(f, "; {} at a time; {here} calls here, {there} there, moved {} times", self.together, self.moves)
    }
}

/// Estimates for calls at one load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LoadEstimate {
    side: Side,
    /// Mean time of an access at the client, in nanoseconds.
    client_step: BoundedMean,
    /// Mean time of a call at the server, in nanoseconds.
    server_call: BoundedMean,
    /// Side of the last round.
    last: Option<Side>,
    /// Calls since the last look at the other side.
    since_look: u64,
    /// Rounds of the look that goes on; 0: none does.
    look_rounds: u8,
    /// Calls of the look that goes on, or was last.
    look_calls: u64,
    /// Number of looks that have ended; saturates.
    looks: u8,
    /// Number of looks in a row after which the other side was estimated to take slightly less.
    in_favour: u8,
}

impl LoadEstimate {
    const NEW: LoadEstimate = LoadEstimate {
        side: Side::Server,
        client_step: BoundedMean::NEW,
        server_call: BoundedMean::NEW,
        last: None,
        since_look: 0,
        look_rounds: 0,
        look_calls: 0,
        looks: 0,
        in_favour: 0,
    };

    fn estimate(&self, side: Side, steps: BoundedMean) -> Option<u64> {
        match side {
            Side::Client => Some((self.client_step.value?.saturating_mul(steps.value?) / 1000).max(1)),
            Side::Server => Some(self.server_call.value?.max(1)),
        }
    }

    /// Returns where the next round runs, and whether it is to find something out.
    fn next(&self, steps: BoundedMean) -> (Side, bool) {
        let other = self.side.other();
        let Some(ours) = self.estimate(self.side, steps) else { return (self.side, true) };
        let Some(theirs) = self.estimate(other, steps) else { return (other, true) };
        let slower = (theirs / ours).clamp(1, SLOWER_MAX);
        let every = if self.looks < LOOKS_SOON { LOOK_EVERY_MIN } else { LOOK_EVERY_MIN.max(slower * LOOK_COST) };
        let every = every.saturating_mul(self.look_calls.max(1));
        let looks = self.look_rounds > 0 || self.since_look >= every;
        (if looks { other } else { self.side }, looks)
    }

    fn end_look(&mut self) {
        self.look_rounds = 0;
        self.since_look = 0;
        self.looks = self.looks.saturating_add(1);
    }

    /// Moves calls if the other side is clearly better, or slightly better after some looks in a
    /// row. True: they moved.
    fn settle(&mut self, steps: BoundedMean, has_looked: bool) -> bool {
        let (ours, theirs) = (self.estimate(self.side, steps), self.estimate(self.side.other(), steps));
        let (Some(ours), Some(theirs)) = (ours, theirs) else { return false };
        if has_looked {
            self.in_favour = if theirs < ours / 20 * SLIGHTLY_TWENTIETHS { self.in_favour + 1 } else { 0 };
        }
        let moves = is_clearly_less(theirs, ours) || self.in_favour >= LOOKS_THAT_AGREE;
        if moves {
            self.side = self.side.other();
            self.in_favour = 0;
            self.end_look();
        }
        moves
    }
}

fn is_clearly_less(theirs: u64, ours: u64) -> bool {
    theirs < ours / 10 * CLEARLY_TENTHS
}

/// Returns the index of the row for calls that are made `calls` at a time.
fn load(calls: u64) -> usize {
    (calls.max(1).ilog2() as usize).min(LOADS - 1)
}

/// Decides where one function runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallPlacement {
    rows: [LoadEstimate; LOADS],
    /// Row of the last round.
    load: usize,
    /// Thousandths of an access per call.
    steps: BoundedMean,
    calls: [u64; 2],
    moves: u64,
    is_bound: bool,
}

impl Default for CallPlacement {
    fn default() -> CallPlacement {
        CallPlacement::new()
    }
}

impl CallPlacement {
    /// Creates the state of a function that has not run yet.
    pub fn new() -> CallPlacement {
        CallPlacement {
            rows: [LoadEstimate::NEW; LOADS],
            load: 0,
            steps: BoundedMean::NEW,
            calls: [0; 2],
            moves: 0,
            is_bound: false,
        }
    }

    /// Returns where the next of `calls` calls run that are to be made together, and how many of
    /// them.
    pub fn round(&self, calls: u64) -> (Side, u64) {
        if self.is_bound {
            return (Side::Client, calls);
        }
        match self.rows[load(calls)].next(self.steps) {
            (side, true) => (side, calls.min(LOOK_CALLS_MAX)),
            (side, false) => (side, calls),
        }
    }

    /// Takes the result of a round: `calls` calls ran at `side` together, in `nanos` nanoseconds.
    /// They made `steps` accesses; 0: not counted.
    pub fn on_ended(&mut self, side: Side, calls: u64, steps: u64, nanos: u64) {
        if calls == 0 {
            return;
        }
        self.calls[side as usize] += calls;
        if steps > 0 {
            self.steps.add(steps.saturating_mul(1000) / calls);
        }
        self.load = load(calls);
        let row = &mut self.rows[self.load];
        let is_warm = row.last.replace(side) == Some(side);
        if is_warm {
            let (belief, sample) = match side {
                Side::Client => (&mut row.client_step, nanos / steps.max(1)),
                Side::Server => (&mut row.server_call, nanos / calls),
            };
            if side == row.side { belief.add(sample) } else { belief.add_probe(sample) }
        }
        let mut has_looked = false;
        if side == row.side {
            row.since_look = row.since_look.saturating_add(calls);
        } else {
            row.look_calls = if row.look_rounds == 0 { calls } else { row.look_calls + calls };
            row.look_rounds += 1;
            let looks_better =
                row.estimate(row.side, self.steps).is_some_and(|ours| is_clearly_less(nanos / calls, ours));
            has_looked = is_warm && (!looks_better || row.look_rounds >= LOOK_ROUNDS_MAX);
            if has_looked {
                row.end_look();
            }
        }
        self.moves += u64::from(row.settle(self.steps, has_looked));
    }

    /// Takes the failure of `calls` calls at `side`. How long they took says nothing. A side
    /// without an estimate is assumed to be slow, so that the other one is used.
    pub fn on_failed(&mut self, side: Side, calls: u64) {
        let row = &mut self.rows[load(calls)];
        row.end_look();
        if row.estimate(side, self.steps).is_none()
            && let Some(known) = row.estimate(side.other(), self.steps)
        {
            let slow = known.saturating_mul(SLOWER_MAX);
            match side {
                Side::Server => row.server_call.add(slow),
                Side::Client => {
                    let steps = (*self.steps.value.get_or_insert(1000)).max(1);
                    row.client_step.add(slow.saturating_mul(1000) / steps);
                }
            }
        }
    }

    /// Binds the function to the client, because the server does not run it.
    pub fn on_refused(&mut self) {
        self.is_bound = true;
        self.rows.iter_mut().for_each(|row| row.side = Side::Client);
    }

    /// Returns the decision for calls at the load of the last ones, with the estimates behind it.
    pub fn choice(&self) -> CallPlacementDecision {
        let row = &self.rows[self.load];
        CallPlacementDecision {
            side: row.side,
            steps_thousandths: self.steps.value,
            client_ns: row.estimate(Side::Client, self.steps),
            server_ns: row.estimate(Side::Server, self.steps),
            calls: self.calls,
            moves: self.moves,
            is_bound: self.is_bound,
            together: 1 << self.load,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against functions that stay where they are slow, and against ones that never stay anywhere.
    use super::*;
    use alloc::string::ToString;

    /// A world: so many nanoseconds for an access at the client, and for a call at the server.
    struct World {
        placement: CallPlacement,
        step: u64,
        server: u64,
        random: fastrand::Rng,
        /// One call in so many takes a hundred times as long.
        hiccup_every: u64,
    }

    impl World {
        fn new(step: u64, server: u64) -> World {
            World {
                placement: CallPlacement::new(),
                step,
                server,
                random: fastrand::Rng::with_seed(0x5eed),
                hiccup_every: 100,
            }
        }

        fn jitter(&mut self) -> u64 {
            if self.random.u64(..self.hiccup_every) == 0 { 10_000 } else { self.random.u64(80..120) }
        }

        /// Nanoseconds of so many calls of `steps` accesses, and what the better place would have taken.
        fn run(&mut self, calls: u64, steps: u64) -> (u64, u64) {
            let (mut took, mut best) = (0, 0);
            for _ in 0..calls {
                let (side, _) = self.placement.round(1);
                let (here, there) = (self.step * steps, self.server);
                let mean = if side == Side::Client { here } else { there };
                let sample = mean * self.jitter() / 100;
                self.placement.on_ended(side, 1, steps, sample);
                took += mean;
                best += here.min(there);
            }
            (took, best)
        }
    }

    #[test]
    fn calls_settle_where_they_are_cheap() {
        for (step, server, steps, side) in [
            (7_000, 8_000, 16, Side::Server),
            (7_000, 8_000, 4, Side::Server),
            (7_000, 40_000, 1, Side::Client),
            (2_000, 30_000, 4, Side::Client),
            (2_000, 30_000, 1000, Side::Server),
        ] {
            let mut world = World::new(step, server);
            world.run(200, steps);
            let (took, best) = world.run(100_000, steps);
            assert_eq!(world.placement.choice().side, side, "{steps} of {step} against {server}");
            assert!(took <= best / 100 * 105, "{took} of {best}: {steps} of {step} against {server}");
        }
    }

    #[test]
    fn a_side_that_is_slightly_better_is_found() {
        for (step, server, side) in [(1_000, 8_800, Side::Server), (880, 10_000, Side::Client)] {
            for better_later in [false, true] {
                let mut world = World { hiccup_every: 1000, ..World::new(step, server) };
                if better_later {
                    (world.step, world.server) = (server / 10, step * 10);
                    world.run(20_000, 10);
                    (world.step, world.server) = (step, server);
                }
                world.run(5_000, 10);
                let (took, best) = world.run(100_000, 10);
                assert_eq!(world.placement.choice().side, side, "{step} against {server}");
                assert!(took <= best / 100 * 104, "{took} of {best}: {step} against {server}");
            }
        }
    }

    #[test]
    fn calls_move_when_the_load_does() {
        let mut world = World::new(5_000, 9_000);
        world.run(1000, 8);
        assert_eq!(world.placement.choice().side, Side::Server);
        world.server = 500_000;
        let (took, best) = world.run(20_000, 8);
        assert_eq!(world.placement.choice().side, Side::Client, "{}", world.placement.choice());
        assert!(took <= best / 100 * 140, "{took} of {best}");
        world.server = 9_000;
        world.run(20_000, 8);
        assert_eq!(world.placement.choice().side, Side::Server, "{}", world.placement.choice());
    }

    #[test]
    fn one_hiccup_in_the_beginning_is_soon_forgotten() {
        for (step, server, steps) in [(1_000, 30_000, 2), (7_000, 8_000, 16)] {
            let mut world = World::new(step, server);
            for _ in 0..4 {
                let (side, _) = world.placement.round(1);
                let here = if side == Side::Client { step * steps } else { server };
                let hiccup = if side == Side::Client { 4_000_000 } else { 0 };
                world.placement.on_ended(side, 1, steps, here + hiccup);
            }
            let (took, best) = world.run(100_000, steps);
            assert!(took <= best / 100 * 105, "{took} of {best}: {steps} of {step} against {server}");
        }
    }

    #[test]
    fn phases_of_one_run_are_followed() {
        // In shared memory: an access is soon made, and a call wakes somebody. `wickit/shift`.
        let mut world = World { hiccup_every: 10_000, ..World::new(700, 0) };
        let mut phase = |steps: u64, crowd: u64, calls: u64, percent: u64| {
            world.server = 12_000 + 300 * steps + crowd;
            let (took, best) = world.run(calls, steps);
            assert!(took <= best / 100 * percent, "{steps} steps, {took} of {best}: {}", world.placement.choice());
        };
        phase(2, 0, 400_000, 105);
        phase(256, 0, 20_000, 105);
        phase(256, 3_000_000, 10_000, 105);
        phase(256, 0, 20_000, 105);
        phase(2, 0, 400_000, 105);
    }

    #[test]
    fn calls_that_cost_the_same_everywhere_do_not_move_to_and_fro() {
        let mut world = World::new(8_000, 8_000);
        world.run(100_000, 1);
        assert!(world.placement.choice().moves < 250, "{}", world.placement.choice());
    }

    #[test]
    fn a_server_that_always_fails_is_tried_rarely() {
        let mut placement = CallPlacement::new();
        let mut failed = 0;
        for _ in 0..10_000 {
            match placement.round(1).0 {
                Side::Server => placement.on_ended(Side::Server, 1, 4, 10_000),
                Side::Client => {
                    failed += 1;
                    placement.on_failed(Side::Client, 1);
                }
            }
        }
        assert!((2..50).contains(&failed), "{failed}");
    }

    #[test]
    fn functions_that_the_server_does_not_run_stay_at_the_client() {
        let mut placement = CallPlacement::new();
        assert_eq!(placement.round(5), (Side::Server, 5));
        placement.on_refused();
        for _ in 0..10_000 {
            assert_eq!(placement.round(5), (Side::Client, 5));
            placement.on_ended(Side::Client, 1, 1000, u64::MAX);
        }
        assert!(placement.choice().to_string().contains("does not run it"));
    }

    /// Nanoseconds of a call by side, made alone and 64 at a time.
    struct Loads {
        placement: CallPlacement,
        alone: [u64; 2],
        together: [u64; 2],
        /// Where the last round was. The first one on the other side takes longer: who serves it sleeps.
        last: Side,
        wake: u64,
        random: fastrand::Rng,
    }

    const STEPS: u64 = 16;

    impl Loads {
        fn new(alone: [u64; 2], together: [u64; 2]) -> Loads {
            Loads {
                placement: CallPlacement::new(),
                alone,
                together,
                last: Side::Client,
                wake: 100_000,
                random: fastrand::Rng::with_seed(0x5eed),
            }
        }

        /// All of so many calls, as a caller makes them: what they took, and what they would have
        /// taken at the better side.
        fn make(&mut self, calls: u64) -> (u64, u64) {
            let costs = if calls < 8 { self.alone } else { self.together };
            let (mut took, mut left) = (0, calls);
            while left > 0 {
                let (side, count) = self.placement.round(left);
                assert!((1..=left).contains(&count));
                let wakes = if side == self.last { 0 } else { self.wake };
                self.last = side;
                let nanos = costs[side as usize] * count * self.random.u64(95..106) / 100 + wakes;
                self.placement.on_ended(side, count, count * STEPS, nanos);
                took += nanos;
                left -= count;
            }
            (took, calls * costs[0].min(costs[1]))
        }

        /// Rounds of these sizes, over and over, so often; how many percent of the best they took.
        fn run(&mut self, sizes: &[u64], times: u64) -> u64 {
            let (mut took, mut best) = (0, 0);
            for size in (0..times).flat_map(|_| sizes) {
                let (more, at_best) = self.make(*size);
                took += more;
                best += at_best;
            }
            took * 100 / best
        }

        fn side(&self, calls: u64) -> Side {
            self.placement.rows[load(calls)].side
        }
    }

    #[test]
    fn many_in_flight_go_where_a_call_costs_less() {
        // As measured: a walk of 16 nodes, alone and with 64 on their way.
        let mut loads = Loads::new([197_000, 41_600], [13_600, 8_200]);
        loads.run(&[64], 20);
        let percent = loads.run(&[64], 1000);
        assert_eq!(loads.side(64), Side::Server, "{}", loads.placement.choice());
        assert!(percent <= 105, "{percent} % of the best");
        // Whoever makes thousands at a time looks with a few of them.
        let mut loads = Loads::new([1, 1], [1_000_000, 10_000]);
        let percent = loads.run(&[50_000], 3);
        assert!(percent <= 150, "{percent} % of the best");
    }

    #[test]
    fn light_and_heavy_load_do_not_disturb_each_other() {
        for (alone, together) in [
            ([197_000, 41_600], [13_600, 8_200]),
            ([197_000, 41_600], [8_200, 13_600]),
            ([20_000, 45_000], [13_600, 8_200]),
            ([20_000, 45_000], [8_200, 13_600]),
        ] {
            let mut loads = Loads::new(alone, together);
            // Else both would be where most of the load is, and rightly.
            loads.wake = 2_000;
            loads.run(&[1, 64, 1, 1, 64], 100);
            let better = |costs: [u64; 2]| if costs[0] < costs[1] { Side::Client } else { Side::Server };
            assert_eq!(loads.side(1), better(alone), "alone {alone:?}");
            assert_eq!(loads.side(64), better(together), "together {together:?}");
        }
    }

    #[test]
    fn load_that_shifts_is_followed() {
        let mut loads = Loads::new([197_000, 41_600], [13_600, 8_200]);
        loads.run(&[64], 100);
        // Others want the server.
        loads.together[1] = 60_000;
        loads.run(&[64], 100);
        assert_eq!(loads.side(64), Side::Client, "{}", loads.placement.choice());
        let percent = loads.run(&[64], 1000);
        assert!(percent <= 115, "{percent} % of the best");
        loads.together[1] = 8_200;
        loads.run(&[64], 2000);
        assert_eq!(loads.side(64), Side::Server, "{}", loads.placement.choice());
        let percent = loads.run(&[64], 1000);
        assert!(percent <= 105, "{percent} % of the best");
    }
}
