//! Where a function runs, at the client or at the server: by what both took lately (WICkit's choice, made at run time and not at start-up).
//!
//! At the client a call takes as many round trips as it makes accesses; at the server one, and its turn in whatever queue there is. Both
//! are measured, and the number of accesses, too. The other side is asked now and then, so seldom that it costs some two
//! per cent, and must be clearly better before calls move there.

use core::fmt;

/// Where a call runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// With one-sided accesses.
    Client,
    /// Beside the memory.
    Server,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// Of eight samples each counts as much as the last.
const WEIGHT: u64 = 8;
/// One sample may be so many times what was expected; what is more is believed when it comes again.
const SAMPLE_MAX: u64 = 8;
/// The other side must take less than so many tenths.
const CLEARLY_TENTHS: u64 = 8;
/// Calls from one look at the other side to the next, at least.
const LOOK_EVERY_MIN: u64 = 64;
/// A look may cost one call in so many.
const LOOK_COST: u64 = 50;
/// The other side counts as so many times slower at most: what is believed of it may be wrong.
const SLOWER_MAX: u64 = 32;

/// A mean that forgets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Mean(Option<u64>);

impl Mean {
    fn add(&mut self, sample: u64) {
        self.0 = Some(match self.0 {
            None => sample,
            Some(mean) => {
                let sample = sample.min(mean.saturating_mul(SAMPLE_MAX).max(SAMPLE_MAX));
                mean - mean / WEIGHT + sample / WEIGHT
            }
        });
    }
}

/// What is believed, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Where calls run.
    pub side: Side,
    /// Accesses of a call, in thousandths; `None` before the first.
    pub steps_thousandths: Option<u64>,
    /// Nanoseconds that a call takes at the client.
    pub client_ns: Option<u64>,
    /// Nanoseconds that a call takes at the server, with round trip and queue.
    pub server_ns: Option<u64>,
    /// Calls that ran at the client, and at the server.
    pub calls: [u64; 2],
    /// How often calls moved to the other side.
    pub moves: u64,
    /// Nothing runs at the server.
    pub is_bound: bool,
}

impl fmt::Display for Choice {
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
        write!(f, "; {here} calls here, {there} there, moved {} times", self.moves)
    }
}

/// Where one function runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    side: Side,
    /// Thousandths of an access per call.
    steps: Mean,
    /// Nanoseconds of an access at the client.
    client_step: Mean,
    /// Nanoseconds of a call at the server.
    server_call: Mean,
    since_look: u64,
    calls: [u64; 2],
    moves: u64,
    is_bound: bool,
}

impl Default for Placement {
    fn default() -> Placement {
        Placement::new()
    }
}

impl Placement {
    /// Of a function that has not run yet.
    pub fn new() -> Placement {
        Placement {
            side: Side::Server,
            steps: Mean(None),
            client_step: Mean(None),
            server_call: Mean(None),
            since_look: 0,
            calls: [0; 2],
            moves: 0,
            is_bound: false,
        }
    }

    fn estimate(&self, side: Side) -> Option<u64> {
        match side {
            Side::Client => Some((self.client_step.0?.saturating_mul(self.steps.0?) / 1000).max(1)),
            Side::Server => Some(self.server_call.0?.max(1)),
        }
    }

    /// Where the next calls run.
    pub fn side(&self) -> Side {
        if self.is_bound {
            return Side::Client;
        }
        let other = self.side.other();
        let (Some(ours), Some(theirs)) = (self.estimate(self.side), self.estimate(other)) else {
            // What was never tried is tried first.
            return if self.estimate(self.side).is_none() { self.side } else { other };
        };
        let slower = (theirs / ours).clamp(1, SLOWER_MAX);
        let look_every = LOOK_EVERY_MIN.max(slower * LOOK_COST);
        if self.since_look >= look_every { other } else { self.side }
    }

    /// So many calls ran there, one after the other or side by side, with so many accesses (0: nobody counted) in so many nanoseconds.
    pub fn on_ended(&mut self, side: Side, calls: u64, steps: u64, nanos: u64) {
        if calls == 0 {
            return;
        }
        self.calls[side as usize] += calls;
        if steps > 0 {
            self.steps.add(steps.saturating_mul(1000) / calls);
        }
        match side {
            Side::Client => self.client_step.add(nanos / steps.max(1)),
            Side::Server => self.server_call.add(nanos / calls),
        }
        self.since_look = if side == self.side { self.since_look + calls } else { 0 };
        if let (Some(ours), Some(theirs)) = (self.estimate(self.side), self.estimate(self.side.other()))
            && theirs < ours / 10 * CLEARLY_TENTHS
        {
            self.side = self.side.other();
            self.since_look = 0;
            self.moves += 1;
        }
    }

    /// Calls failed there. How long that took says nothing; who was never heard of is believed to be slow, so that the other is used.
    pub fn on_failed(&mut self, side: Side) {
        self.since_look = 0;
        if self.estimate(side).is_none()
            && let Some(known) = self.estimate(side.other())
        {
            match side {
                Side::Server => self.server_call.add(known.saturating_mul(SLOWER_MAX)),
                Side::Client => {
                    let steps = self.steps.0.unwrap_or(1000).max(1);
                    self.steps = Mean(Some(steps));
                    self.client_step.add(known.saturating_mul(SLOWER_MAX).saturating_mul(1000) / steps);
                }
            }
        }
    }

    /// The server does not run this function.
    pub fn on_refused(&mut self) {
        self.is_bound = true;
        self.side = Side::Client;
    }

    /// What is believed, and why.
    pub fn choice(&self) -> Choice {
        Choice {
            side: self.side,
            steps_thousandths: self.steps.0,
            client_ns: self.estimate(Side::Client),
            server_ns: self.estimate(Side::Server),
            calls: self.calls,
            moves: self.moves,
            is_bound: self.is_bound,
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
        placement: Placement,
        step: u64,
        server: u64,
        random: u64,
    }

    impl World {
        fn new(step: u64, server: u64) -> World {
            World { placement: Placement::new(), step, server, random: 0x5eed }
        }

        fn jitter(&mut self) -> u64 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            // One in a hundred takes a hundred times as long.
            if self.random.is_multiple_of(100) { 10_000 } else { 80 + self.random % 40 }
        }

        /// Nanoseconds of so many calls of `steps` accesses, and what the better place would have taken.
        fn run(&mut self, calls: u64, steps: u64) -> (u64, u64) {
            let (mut took, mut best) = (0, 0);
            for _ in 0..calls {
                let side = self.placement.side();
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
    fn calls_that_cost_the_same_everywhere_do_not_move_to_and_fro() {
        let mut world = World::new(8_000, 8_000);
        world.run(100_000, 1);
        assert!(world.placement.choice().moves < 200, "{}", world.placement.choice());
    }

    #[test]
    fn who_always_fails_is_asked_seldom() {
        let mut placement = Placement::new();
        let mut failed = 0;
        for _ in 0..10_000 {
            match placement.side() {
                Side::Server => placement.on_ended(Side::Server, 1, 4, 10_000),
                Side::Client => {
                    failed += 1;
                    placement.on_failed(Side::Client);
                }
            }
        }
        assert!((2..50).contains(&failed), "{failed}");
    }

    #[test]
    fn what_the_server_does_not_run_stays() {
        let mut placement = Placement::new();
        assert_eq!(placement.side(), Side::Server);
        placement.on_refused();
        for _ in 0..10_000 {
            assert_eq!(placement.side(), Side::Client);
            placement.on_ended(Side::Client, 1, 1000, u64::MAX);
        }
        assert!(placement.choice().to_string().contains("does not run it"));
    }
}
