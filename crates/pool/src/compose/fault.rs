//! Wrappers `fault` and `throttle`: fault injection. A member is late or slow, loses answers,
//! corrupts pages or dies, as its plan says. The plan is seeded, so that a failure can be repeated.
//!
//! A member can also *lie*. It acknowledges a write and does not store it. Or it answers a read
//! with an older version of the page, another page, zeros, or a mixture of two versions. The
//! checksums that come with such an answer are right for its bytes, as from a server that has lost
//! something and does not know it. Only a client that remembers what was written can tell.

use crate::{
    Backend, Buffer, CloneTicket, Completion, Health, Lane, LaneRequest, Mapped, Op, PoolError, Protection, ScrubStats,
};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{Incarnation, PageId, checksum};
use farfield_os::process::{self, now_ns};
use farfield_os::sync::Mutex;
use fastrand::Rng;
use slab::Slab;
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;

/// Greatest number of operations of one lane at a time.
const SLOTS: usize = 256;
/// Time before an answer in which a wait polls. A sleep ends up to 90 µs late, so that no link of 10 µs
/// could be modelled by one.
const POLL_FOR: Duration = Duration::from_micros(100);

/// Plan of the faults to inject.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct FaultPlan {
    /// Least time that each operation takes.
    delay: Duration,
    /// Limit in bytes of pages per second, shared by the operations of all lanes, which pass one
    /// after the other; 0 means no limit.
    bandwidth: u64,
    /// Share of operations whose answer is lost, from 0 to 1, as are the other shares.
    drop: f64,
    /// Share of reads that come back with a flipped bit.
    corrupt: f64,
    /// Share of writes that are acknowledged and not stored.
    lose: f64,
    /// Share of reads that come back with the first version of a page that was written later.
    stale: f64,
    /// Share of reads that come back with another page.
    swap: f64,
    /// Share of reads that come back with zeros.
    zero: f64,
    /// Share of reads that come back with one half of the first version of a page, and one half of
    /// the present one.
    tear: f64,
    /// Share of reads that come back with a flipped bit and the checksum that was written. So a
    /// server would answer that computes other bytes with the same checksum.
    forge: f64,
    /// Operation at which the member dies, counted from 1 over all lanes; 0 means never.
    die: u64,
    /// Operation, counted likewise, from which on the member is full and stores nothing more; 0
    /// means never.
    full: u64,
    seed: u64,
}

impl FaultPlan {
    /// Parses `delay=100us,drop=0.01,corrupt=0.01,die=1000,seed=7`: any of the options, in any
    /// order.
    pub(crate) fn parse(spec: &str) -> Result<FaultPlan, String> {
        let mut plan = FaultPlan::default();
        for item in spec.split(',').filter(|item| !item.is_empty()) {
            plan.set(item)?;
        }
        Ok(plan)
    }

    /// Sets one of the options of `throttle(latency=100us,bandwidth=1G,URL)`.
    pub(crate) fn set_throttle(&mut self, item: &str) -> Result<(), String> {
        match item.split_once('=') {
            Some(("latency", time)) => self.set(&format!("delay={time}")),
            Some(("bandwidth", _)) => self.set(item),
            _ => Err(format!("write latency=100us or bandwidth=1G, not {item:?}")),
        }
    }

    fn set(&mut self, item: &str) -> Result<(), String> {
        let (name, value) = item.split_once('=').ok_or(format!("write NAME=VALUE, not {item:?}"))?;
        let wrong = || format!("the value of {name} in {item:?} is no {}", Self::wanted(name));
        match name {
            "delay" => self.delay = duration(value).ok_or_else(wrong)?,
            "bandwidth" => self.bandwidth = bytes(value).filter(|bytes| *bytes > 0).ok_or_else(wrong)?,
            "drop" => self.drop = share(value).ok_or_else(wrong)?,
            "corrupt" => self.corrupt = share(value).ok_or_else(wrong)?,
            "lose" => self.lose = share(value).ok_or_else(wrong)?,
            "stale" => self.stale = share(value).ok_or_else(wrong)?,
            "swap" => self.swap = share(value).ok_or_else(wrong)?,
            "zero" => self.zero = share(value).ok_or_else(wrong)?,
            "tear" => self.tear = share(value).ok_or_else(wrong)?,
            "forge" => self.forge = share(value).ok_or_else(wrong)?,
            "die" => self.die = value.parse().map_err(|_| wrong())?,
            "full" => self.full = value.parse().map_err(|_| wrong())?,
            "seed" => self.seed = value.parse().map_err(|_| wrong())?,
            _ => {
                return Err(format!(
                    "no fault is called {name:?}: known are delay, bandwidth, drop, corrupt, lose, stale, swap, zero, \
                     tear, forge, die, full, seed"
                ));
            }
        }
        Ok(())
    }

    fn wanted(name: &str) -> &'static str {
        match name {
            "delay" => "duration, as in 100us, 5ms or 1s",
            "bandwidth" => "bytes in a second, as in 500M or 2G",
            "drop" | "corrupt" | "lose" | "stale" | "swap" | "zero" | "tear" | "forge" => "share between 0 and 1",
            _ => "whole number",
        }
    }
}

/// Writes the plan in the form that [`FaultPlan::parse`] reads, as in `delay=100us,seed=7`.
impl Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |name: &str, number: u64| (number != 0).then(|| format!("{name}={number}"));
        // The number gets as many digits as tell it from its neighbours.
        let share = |name: &str, share: f64| (share != 0.0).then(|| format!("{name}={share:?}"));
        let delay = (!self.delay.is_zero()).then(|| format!("delay={}", duration_text(self.delay)));
        let items = [
            delay,
            number("bandwidth", self.bandwidth),
            share("drop", self.drop),
            share("corrupt", self.corrupt),
            share("lose", self.lose),
            share("stale", self.stale),
            share("swap", self.swap),
            share("zero", self.zero),
            share("tear", self.tear),
            share("forge", self.forge),
            number("die", self.die),
            number("full", self.full),
            number("seed", self.seed),
        ];
        f.write_str(&items.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

/// Units of time, in nanoseconds.
const UNITS: [(&str, u64); 7] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("h", 3_600_000_000_000),
    ("d", 86_400_000_000_000),
];

/// Parses a duration such as 100us, 5ms, 1s, 10min, 12h or 1d. `None` if the text is no duration,
/// or exceeds 64 bits of nanoseconds.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = (text[..digits].parse::<u64>().ok()?, &text[digits..]);
    let (_, ns) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.checked_mul(*ns).map(Duration::from_nanos)
}

/// Formats a duration in the largest unit that expresses it exactly.
pub(crate) fn duration_text(duration: Duration) -> String {
    let ns = duration.as_nanos();
    let fits = |(_, unit): &&(&str, u64)| ns.is_multiple_of((*unit).into());
    let (name, unit) = UNITS.iter().rev().find(fits).unwrap_or(&UNITS[0]);
    format!("{}{name}", ns / u128::from(*unit))
}

/// Parses a number of bytes, as in 4096, 64K, 500M or 2G. The units are powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let shift = match &text[digits..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    text[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn share(text: &str) -> Option<f64> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share))
}

/// Way in which the answer to a read lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lie {
    Stale,
    Swap,
    Zero,
    Tear,
    Forge,
}

/// Greatest number of pages whose first version a lying member keeps.
const FIRST_VERSIONS: usize = 1 << 14;

/// State that lanes and backend share, such as the number of operations so far.
struct FaultInjection {
    plan: FaultPlan,
    server: u16,
    /// First versions of pages, for a member that lies.
    first: Mutex<BTreeMap<u64, Box<[u8]>>>,
    operations: AtomicU64,
    lanes: AtomicU64,
    /// Time (ns) at which the last byte of all operations so far has passed.
    passed_at: AtomicU64,
}

impl FaultInjection {
    /// Returns the time (ns) at which `bytes` more bytes have passed, behind those of earlier
    /// operations.
    fn pass(&self, now: u64, bytes: u64) -> u64 {
        if self.plan.bandwidth == 0 || bytes == 0 {
            return now;
        }
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.plan.bandwidth);
        let takes = u64::try_from(takes).unwrap_or(u64::MAX);
        let after = |free: u64| free.max(now).saturating_add(takes);
        let before = self.passed_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(after(free)));
        after(before.unwrap_or(now))
    }

    fn is_dead(&self) -> bool {
        self.plan.die != 0 && self.operations.load(Ordering::Relaxed) >= self.plan.die
    }

    fn is_full(&self) -> bool {
        self.plan.full != 0 && self.operations.load(Ordering::Relaxed) >= self.plan.full
    }

    fn gone(&self) -> PoolError {
        PoolError::ServerGone { server: self.server, incarnation: Incarnation(0) }
    }

    /// Keeps the first version of each page that is written, for lies that need one.
    fn note_write(&self, op: &Op) {
        let FaultPlan { stale, swap, tear, .. } = self.plan;
        let Op::Write { page, buffer } = op else { return };
        if stale + swap + tear == 0.0 {
            return;
        }
        let mut first = self.first.lock();
        for index in 0..buffer.pages() {
            if first.len() < FIRST_VERSIONS {
                first.entry(page.0 + index as u64).or_insert_with(|| buffer.page(index).into());
            }
        }
    }

    /// Replaces one page of an answer by a lie, with the checksum that fits it (except for
    /// [`Lie::Forge`]). `any` is an arbitrary number.
    fn lie(&self, lie: Lie, page: PageId, any: u64, buffer: &mut Buffer) {
        let index = any as usize % buffer.pages();
        let page = page.0 + index as u64;
        let first = self.first.lock();
        let target = buffer.page_mut(index);
        match lie {
            Lie::Zero => target.fill(0),
            Lie::Forge => {
                target[any as usize >> 16 & (PAGE_BYTES - 1)] ^= 4;
                return;
            }
            Lie::Stale => match first.get(&page) {
                Some(old) => target.copy_from_slice(old),
                None => return,
            },
            Lie::Tear => match first.get(&page) {
                Some(old) => target[..PAGE_BYTES / 2].copy_from_slice(&old[..PAGE_BYTES / 2]),
                None => return,
            },
            Lie::Swap => match first.iter().nth((any >> 32) as usize % first.len().max(1)) {
                Some((_, other)) => target.copy_from_slice(other),
                None => return,
            },
        }
        buffer.sums_mut()[index] = checksum(buffer.page(index));
    }
}

/// Member with a plan of faults.
pub(crate) struct FaultBackend {
    inner: Arc<dyn Backend>,
    injection: Arc<FaultInjection>,
}

impl FaultBackend {
    pub(crate) fn new(server: u16, inner: Arc<dyn Backend>, plan: FaultPlan) -> FaultBackend {
        let injection = FaultInjection {
            plan,
            server,
            operations: AtomicU64::new(0),
            lanes: AtomicU64::new(0),
            passed_at: AtomicU64::new(0),
            first: Mutex::new(BTreeMap::new()),
        };
        FaultBackend { inner, injection: Arc::new(injection) }
    }
}

impl Backend for FaultBackend {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        if self.injection.is_dead() {
            return Err(self.injection.gone());
        }
        let lane = self.injection.lanes.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(FaultLane {
            inner: self.inner.open_lane()?,
            injection: self.injection.clone(),
            random: Rng::with_seed(self.injection.plan.seed ^ lane << 32), // Another for each lane.
            under_way: Slab::with_capacity(SLOTS),
            held: Vec::with_capacity(SLOTS),
            arrived: Vec::with_capacity(SLOTS),
        }))
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        // Loads that bypass the lanes could not be delayed, lost or counted.
        None
    }

    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        if self.injection.is_dead() { Err(self.injection.gone()) } else { self.inner.clone_region() }
    }

    fn pages(&self) -> u64 {
        self.inner.pages()
    }

    fn health(&self) -> Health {
        if self.injection.is_dead() { Health::Gone } else { self.inner.health() }
    }

    fn scrub_stats(&self) -> Option<ScrubStats> {
        self.inner.scrub_stats()
    }

    fn incarnation(&self) -> Option<Incarnation> {
        self.inner.incarnation()
    }

    fn protection(&self) -> Option<Protection> {
        self.inner.protection()
    }

    fn answers(&self, within: Duration) -> bool {
        self.inner.answers(within)
    }

    fn is_rejoin_due(&self) -> bool {
        self.inner.is_rejoin_due()
    }

    fn rejoin(&self) {
        self.inner.rejoin();
    }

    fn release(&self) {
        self.inner.release();
    }

    fn abandon(&self) {
        self.inner.abandon();
    }
}

/// Note on an operation that the inner lane has.
struct FaultedOperation {
    tag: u64,
    page: PageId,
    ready_at: u64,
    deadline_at: u64,
    deadline: Duration,
    lost: bool,
    corrupt: bool,
    lie: Option<Lie>,
    /// Random number that chooses the page of a run, and another page.
    any: u64,
    is_part: bool,
}

struct FaultLane {
    inner: Box<dyn Lane>,
    injection: Arc<FaultInjection>,
    random: Rng,
    under_way: Slab<FaultedOperation>,
    /// Completions that ended, each with the time (ns) at which it becomes visible.
    held: Vec<(u64, Completion)>,
    arrived: Vec<Completion>,
}

impl FaultLane {
    fn chance(&mut self, share: f64) -> bool {
        self.random.f64() < share
    }

    /// Decides whether, and how, the answer to the next read lies.
    fn draw_lie(&mut self) -> Option<Lie> {
        let FaultPlan { stale, swap, zero, tear, forge, .. } = self.injection.plan;
        let lies = [(Lie::Stale, stale), (Lie::Swap, swap), (Lie::Zero, zero), (Lie::Tear, tear), (Lie::Forge, forge)];
        // No number is drawn for a lie that cannot occur, so that a plan without lies has the same
        // injection as ever.
        lies.into_iter().find(|(_, share)| *share > 0.0 && self.chance(*share)).map(|(lie, _)| lie)
    }

    /// Decides how an operation that really ended appears to end, and when.
    fn decide(&self, known: &FaultedOperation, mut completion: Completion) -> (u64, Completion) {
        completion.tag = known.tag;
        if self.injection.is_dead() {
            completion.result = Err(self.injection.gone());
            return (0, completion);
        }
        if known.lost || known.ready_at > known.deadline_at {
            completion.result = Err(PoolError::TimedOut { server: self.injection.server, after: known.deadline });
            return (known.deadline_at, completion);
        }
        if known.corrupt
            && completion.result.is_ok()
            && let Some(buffer) = &mut completion.buffer
        {
            completion.result = match known.is_part {
                // The checksum of the part, which found the error, is not in the buffer.
                true => Err(PoolError::Corrupt { page: known.page, server: self.injection.server }),
                false => self.flip(known.page, buffer),
            };
        }
        if let (Some(lie), Ok(()), Some(buffer)) = (known.lie, completion.result, &mut completion.buffer) {
            self.injection.lie(lie, known.page, known.any, buffer);
        }
        (known.ready_at, completion)
    }

    /// Flips a bit of the last page, then checks the pages as a member does whose wire flipped it.
    fn flip(&self, page: PageId, buffer: &mut Buffer) -> Result<(), PoolError> {
        let last = buffer.pages() - 1;
        buffer.page_mut(last)[1234] ^= 1;
        for index in 0..buffer.pages() {
            if checksum(buffer.page(index)) != buffer.sums()[index] {
                let page = PageId(page.0 + index as u64);
                return Err(PoolError::Corrupt { page, server: self.injection.server });
            }
        }
        Ok(())
    }
}

impl Lane for FaultLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        // A slot in `held` is kept for everything in flight.
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        let LaneRequest { tag, priority, deadline, op } = request;
        let op = match op {
            Op::Write { buffer, .. } if self.injection.is_full() => {
                let result = Err(PoolError::PoolFull { server: self.injection.server });
                self.held.push((0, Completion { tag, result, buffer: Some(buffer) }));
                return Ok(());
            }
            Op::Write { buffer, .. } if self.injection.plan.lose > 0.0 && self.chance(self.injection.plan.lose) => {
                self.injection.operations.fetch_add(1, Ordering::Relaxed);
                self.held.push((0, Completion { tag, result: Ok(()), buffer: Some(buffer) }));
                return Ok(());
            }
            op => op,
        };
        self.injection.note_write(&op);
        let slot = self.under_way.vacant_key();
        let page = match &op {
            Op::Read { page, .. } | Op::ReadPart { page, .. } | Op::Write { page, .. } | Op::Discard { page, .. } => {
                *page
            }
        };
        let bytes = match &op {
            Op::Read { buffer, .. } | Op::Write { buffer, .. } => buffer.bytes().len(),
            Op::ReadPart { part, .. } => part.range().len(),
            Op::Discard { .. } => 0,
        };
        let is_read = matches!(op, Op::Read { .. } | Op::ReadPart { .. });
        let is_part = matches!(op, Op::ReadPart { .. });
        if let Err(back) = self.inner.submit(LaneRequest { tag: slot as u64, priority, deadline, op }) {
            return Err(LaneRequest { tag, ..back });
        }
        self.injection.operations.fetch_add(1, Ordering::Relaxed);
        let plan = self.injection.plan;
        let now = now_ns();
        let after = |start: u64, wait: Duration| start.saturating_add(wait.as_nanos() as u64);
        let (lost, corrupt) = (self.chance(plan.drop), is_read && self.chance(plan.corrupt));
        let (lie, any) = (if is_read { self.draw_lie() } else { None }, self.random.u64(..));
        let (ready_at, deadline_at) = (after(self.injection.pass(now, bytes as u64), plan.delay), after(now, deadline));
        let operation =
            FaultedOperation { tag, page, ready_at, deadline_at, deadline, lost, corrupt, lie, any, is_part };
        let inserted = self.under_way.insert(operation);
        debug_assert_eq!(inserted, slot, "nothing was inserted since");
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        self.inner.poll(&mut self.arrived);
        while let Some(completion) = self.arrived.pop() {
            let slot = completion.tag as usize;
            let Some(known) = self.under_way.try_remove(slot) else { continue };
            let judged = self.decide(&known, completion);
            self.held.push(judged);
        }
        if self.held.is_empty() {
            return 0;
        }
        let (now, dead, before) = (now_ns(), self.injection.is_dead(), done.len());
        let mut index = 0;
        while index < self.held.len() && done.len() < done.capacity() {
            if self.held[index].0 > now && !dead {
                index += 1;
                continue;
            }
            let (_, mut completion) = self.held.swap_remove(index);
            if dead {
                completion.result = Err(self.injection.gone());
            }
            done.push(completion);
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.under_way.len() + self.held.len()
    }

    fn wait(&mut self, timeout: Duration) {
        let now = now_ns();
        if let Some(first) = self.held.iter().map(|(at, _)| *at).min() {
            if first > now && !self.injection.is_dead() {
                let left = Duration::from_nanos(first - now).min(timeout);
                match left.checked_sub(POLL_FOR) {
                    _ if !self.under_way.is_empty() => self.inner.wait(left),
                    Some(early) if !early.is_zero() => process::sleep(early),
                    _ => process::yield_now(),
                }
            }
            return;
        }
        self.inner.wait(timeout);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against faults that do not happen, which would make every test that uses them worthless.
    use super::*;
    use crate::{PagePart, PoolBuilder, Priority, conformance};

    fn lane(spec: &str) -> (Arc<dyn Backend>, Box<dyn Lane>) {
        let backend = PoolBuilder::new().url(format!("fault:{spec}@ram:")).pages(64).open().unwrap();
        let lane = backend.open_lane().unwrap();
        (backend, lane)
    }

    /// Reads one page so many times; the results.
    fn read(lane: &mut dyn Lane, times: usize, deadline: Duration) -> Vec<Result<(), PoolError>> {
        let mut done = Vec::with_capacity(1);
        (0..times)
            .map(|_| {
                let op = Op::Read { page: PageId(3), buffer: Buffer::new(1) };
                lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline, op }).unwrap();
                while lane.poll(&mut done) == 0 {
                    lane.wait(Duration::from_millis(100));
                }
                done.pop().unwrap().result
            })
            .collect()
    }

    const LONG: Duration = Duration::from_secs(10);

    #[test]
    fn a_plan_without_faults_changes_nothing() {
        conformance::run(&PoolBuilder::new().url("fault:seed=1@ram:"));
        conformance::run(&PoolBuilder::new().url("fault:delay=20us@ram:"));
        conformance::run(&PoolBuilder::new().url("throttle(latency=20us, bandwidth=4G, stripe(ram:, ram:))"));
    }

    #[test]
    fn a_delay_is_as_long_as_it_says_or_refused() {
        let delay = |text: &str| FaultPlan::parse(&format!("delay={text}")).map(|plan| plan.delay);
        assert_eq!(delay("1500us"), Ok(Duration::from_micros(1500)));
        assert_eq!(delay("18446744073s"), Ok(Duration::from_secs(18_446_744_073)));
        for wrong in ["18446744074s", "99999999999999999999ns", "3", "ms", "3weeks", "é"] {
            assert!(delay(wrong).is_err_and(|why| why.contains("no duration")), "{wrong}");
        }
    }

    #[test]
    fn bytes_pass_one_after_the_other() {
        let plan = FaultPlan::parse("bandwidth=4096000").unwrap();
        let new = AtomicU64::new;
        let injection = FaultInjection {
            plan,
            server: 0,
            operations: new(0),
            lanes: new(0),
            passed_at: new(0),
            first: Mutex::new(BTreeMap::new()),
        };
        let page_ns = 1_000_000;
        assert_eq!(injection.pass(5, 4096), 5 + page_ns);
        assert_eq!(injection.pass(7, 4096), 5 + 2 * page_ns, "behind the first");
        assert_eq!(injection.pass(9, 0), 9, "what has no bytes waits for none");
        assert_eq!(injection.pass(10 * page_ns, 8192), 10 * page_ns + 2 * page_ns, "after a pause nobody is in front");
        assert_eq!(injection.pass(0, u64::MAX), u64::MAX, "and nothing wraps");
        // Twice: what one lane has asked for is in front of what the other asks for.
        let (backend, mut first) = lane("bandwidth=4K");
        let mut second = backend.open_lane().unwrap();
        let start = std::time::Instant::now();
        let op = |page| Op::Read { page: PageId(page), buffer: Buffer::new(1) };
        let request = |op| LaneRequest { tag: 0, priority: Priority::Demand, deadline: LONG, op };
        first.submit(request(op(1))).unwrap();
        let after = Duration::from_millis(1500);
        second.submit(LaneRequest { deadline: after, ..request(op(2)) }).unwrap();
        let mut done = Vec::with_capacity(2);
        for lane in [&mut first, &mut second] {
            while lane.poll(&mut done) == 0 {
                lane.wait(Duration::from_millis(100));
            }
        }
        assert_eq!(done[0].result, Ok(()));
        assert!(start.elapsed() >= Duration::from_secs(1), "a page takes a second");
        assert_eq!(done[1].result, Err(PoolError::TimedOut { server: 0, after }), "two take two");
    }

    #[test]
    fn answers_are_late_lost_or_corrupt_as_planned() {
        let (_backend, mut late) = lane("delay=3ms");
        let start = std::time::Instant::now();
        assert_eq!(read(&mut *late, 1, LONG), [Ok(())]);
        assert!(start.elapsed() >= Duration::from_millis(3));
        let after = Duration::from_millis(1);
        assert_eq!(read(&mut *late, 1, after), [Err(PoolError::TimedOut { server: 0, after })]);
        let (_backend, mut lossy) = lane("drop=0.5,seed=3");
        // Long enough for an answer that is not dropped, however busy the machine.
        let lost = read(&mut *lossy, 40, Duration::from_millis(100)).iter().filter(|result| result.is_err()).count();
        assert!((8..32).contains(&lost), "{lost} of 40");
        let (_backend, mut noisy) = lane("corrupt=1");
        assert_eq!(read(&mut *noisy, 1, LONG), [Err(PoolError::Corrupt { page: PageId(3), server: 0 })]);
    }

    #[test]
    fn a_short_delay_takes_no_longer_than_it_says() {
        let (_backend, mut near) = lane("delay=10us");
        let mut took = || {
            let start = now_ns();
            assert_eq!(read(&mut *near, 1, LONG), [Ok(())]);
            now_ns() - start
        };
        let least = (0..200).map(|_| took()).min().unwrap();
        // A sleep of 10 µs takes 60, and of all 200 one is not disturbed.
        assert!((10_000..40_000).contains(&least), "{least} ns");
    }

    /// Writes page 3 with this byte, and again with the next one; what is read of it then, whole and in part.
    fn written_twice(spec: &str) -> [(Vec<u8>, u64); 2] {
        let (_backend, mut lane) = lane(spec);
        let mut done = Vec::with_capacity(1);
        let mut run = |op| {
            lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: LONG, op }).unwrap();
            while lane.poll(&mut done) == 0 {
                lane.wait(Duration::from_millis(100));
            }
            let completion = done.pop().unwrap();
            assert_eq!(completion.result, Ok(()), "a lie is no error");
            completion.buffer.unwrap()
        };
        for (page, byte) in [(4, 9), (3, 1), (3, 2)] {
            let mut buffer = Buffer::new(1);
            buffer.page_mut(0).fill(byte);
            buffer.seal();
            run(Op::Write { page: PageId(page), buffer });
        }
        let part = PagePart::new(1000, 64).unwrap();
        let part = |buffer| Op::ReadPart { page: PageId(3), part, buffer };
        [run(Op::Read { page: PageId(3), buffer: Buffer::new(1) }), run(part(Buffer::new(1)))]
            .map(|buffer| (buffer.page(0)[1000..1064].to_vec(), buffer.sums()[0]))
    }

    #[test]
    fn lies_come_with_the_checksum_of_what_they_say() {
        let sum = |byte: u8| checksum(&[byte; PAGE_BYTES]);
        let of = |byte: u8| [(vec![byte; 64], sum(byte)), (vec![byte; 64], sum(byte))];
        assert_eq!(written_twice("seed=1"), of(2));
        assert_eq!(written_twice("lose=1"), of(0));
        assert_eq!(written_twice("stale=1"), of(1));
        assert_eq!(written_twice("zero=1"), of(0));
        for (bytes, seen) in written_twice("swap=1") {
            assert!([1, 9].contains(&bytes[0]) && seen == sum(bytes[0]), "a version of some page");
        }
        let mut torn = [2; PAGE_BYTES];
        torn[..PAGE_BYTES / 2].fill(1);
        let forged = written_twice("forge=1");
        assert!(forged.iter().all(|(_, seen)| *seen == sum(2)), "the checksum is that of what was written");
        assert_eq!(written_twice("tear=1").map(|(bytes, seen)| (bytes[0], seen)), [(1, checksum(&torn)); 2]);
    }

    #[test]
    fn an_injected_death_comes_on_time_and_lasts() {
        let (backend, mut lane) = lane("die=4");
        let results = read(&mut *lane, 5, LONG);
        let gone = Err(PoolError::ServerGone { server: 0, incarnation: Incarnation(0) });
        assert_eq!(results, [Ok(()), Ok(()), Ok(()), gone, gone]);
        assert_eq!(backend.health(), Health::Gone);
        assert!(backend.open_lane().is_err());
    }

    #[test]
    fn a_full_member_refuses_writes_and_serves_reads() {
        let (_backend, mut lane) = lane("full=3");
        let mut done = Vec::with_capacity(1);
        let mut write = |lane: &mut dyn Lane, byte| {
            let mut buffer = Buffer::new(1);
            buffer.page_mut(0).fill(byte);
            buffer.seal();
            let op = Op::Write { page: PageId(3), buffer };
            lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: LONG, op }).unwrap();
            while lane.poll(&mut done) == 0 {
                lane.wait(Duration::from_millis(100));
            }
            done.pop().unwrap()
        };
        assert_eq!(write(&mut *lane, 1).result, Ok(()));
        assert_eq!(read(&mut *lane, 2, LONG), [Ok(()), Ok(())]);
        let refused = write(&mut *lane, 2);
        assert_eq!(refused.result, Err(PoolError::PoolFull { server: 0 }));
        assert_eq!(refused.buffer.unwrap().page(0)[0], 2, "the buffer comes back");
        let op = Op::Read { page: PageId(3), buffer: Buffer::new(1) };
        lane.submit(LaneRequest { tag: 0, priority: Priority::Demand, deadline: LONG, op }).unwrap();
        while lane.poll(&mut done) == 0 {
            lane.wait(Duration::from_millis(100));
        }
        assert_eq!(done.pop().unwrap().buffer.unwrap().page(0)[0], 1, "what was stored before");
    }

    #[test]
    fn the_same_seed_is_the_same_fate() {
        let injection = |seed| {
            let (_backend, mut lane) = lane(&format!("corrupt=0.5,seed={seed}"));
            read(&mut *lane, 50, LONG)
        };
        assert_eq!(injection(1), injection(1));
        assert_ne!(injection(1), injection(2));
    }
}
