//! Pages in random order while everything that is far moves to another pool, once or to and fro: what an access takes before the switch,
//! during it and afterwards, and whether a write is lost.
//!
//! A program with a far heap begins the switch itself. Under `farfield run` it asks whoever has started it, by files in a folder: `begin`
//! names the process, `end` says how it went. Whoever has neither makes as many accesses in each phase.

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_of};
use anyhow::{Context, Result, ensure};
use farfield::{FarBox, FarError, Heap, PoolSwitch};
use farfield_os::process::now_ns;
use std::fs;
use std::path::Path;
use std::time::Duration;

const WORDS: usize = 512;
/// Accesses between two looks whether the switch is over.
const LOOK_EVERY: u64 = 64;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let count = options.data_bytes() / 4096;
    let mut outcome = Outcome::new();
    // What was written is known near: four bytes for each page, and eight of a pointer.
    match options.heap(count * 12)? {
        None => {
            let pages = Near((0..count).map(|index| Page(page(index, options.seed))).collect());
            let mover = options.handshake.as_deref().map_or(Mover::Nobody, |folder| Mover::Driver(Path::new(folder)));
            phases(&mut outcome, options, pages, mover)?;
        }
        Some(heap) => {
            let to = options.to.as_deref().context("--to is missing")?;
            let make = |index| heap.alloc(page(index, options.seed)).map_err(FarError::from);
            let pages = (0..count).map(make).collect::<Result<Vec<_>, _>>()?;
            let from = options.pool.as_deref().context("--pool is missing")?;
            let mover = Mover::Heap { heap: &heap, urls: [to, from], switch: None };
            phases(&mut outcome, options, Far(&heap, pages), mover)?;
            figures_of(&mut outcome, &heap.stats(), count * 12);
        }
    }
    Ok(outcome)
}

/// Word 0 counts the writes, all others are a pattern.
fn page(index: u64, seed: u64) -> [u64; WORDS] {
    let mut words = [pattern(index, seed); WORDS];
    words[0] = 0;
    words
}

fn pattern(index: u64, seed: u64) -> u64 {
    mix(index.wrapping_mul(3) ^ seed)
}

/// Where the pages are.
trait Pages {
    /// The first word and the last one.
    fn read(&mut self, index: usize) -> Result<(u64, u64), FarError>;
    /// The same, and one write more.
    fn write(&mut self, index: usize) -> Result<(u64, u64), FarError>;
}

/// Exactly a page: one that is far costs one fault.
#[repr(align(4096))]
struct Page([u64; WORDS]);

struct Near(Vec<Page>);

impl Pages for Near {
    fn read(&mut self, index: usize) -> Result<(u64, u64), FarError> {
        let words = &self.0[index].0;
        Ok((words[0], words[WORDS - 1]))
    }

    fn write(&mut self, index: usize) -> Result<(u64, u64), FarError> {
        let words = &mut self.0[index].0;
        words[0] += 1;
        Ok((words[0] - 1, words[WORDS - 1]))
    }
}

struct Far<'a>(&'a Heap, Vec<FarBox<[u64; WORDS]>>);

impl Pages for Far<'_> {
    fn read(&mut self, index: usize) -> Result<(u64, u64), FarError> {
        let scope = self.0.enter();
        let words = self.1[index].get(&scope)?;
        Ok((words[0], words[WORDS - 1]))
    }

    fn write(&mut self, index: usize) -> Result<(u64, u64), FarError> {
        let scope = self.0.enter();
        let words = self.1[index].get_mut(&scope)?;
        words[0] += 1;
        Ok((words[0] - 1, words[WORDS - 1]))
    }
}

/// Who carries out the switch.
enum Mover<'a> {
    Nobody,
    /// To each of these pools in turn.
    Heap {
        heap: &'a Heap,
        urls: [&'a str; 2],
        switch: Option<PoolSwitch>,
    },
    Driver(&'a Path),
}

impl Mover<'_> {
    /// Begins the switch of this number.
    fn begin(&mut self, number: u64) -> Result<()> {
        match self {
            Mover::Nobody => {}
            Mover::Heap { heap, urls, switch } => {
                *switch = Some(heap.switch_pool(urls[(number % 2) as usize])?);
            }
            Mover::Driver(folder) => {
                // The answer to the switch before; there is none at first.
                fs::remove_file(folder.join("end")).ok();
                // Whoever reads it finds all of it.
                fs::write(folder.join("begin.new"), std::process::id().to_string())?;
                fs::rename(folder.join("begin.new"), folder.join("begin"))?;
            }
        }
        Ok(())
    }

    fn is_over(&self) -> Result<bool> {
        match self {
            Mover::Nobody => Ok(false),
            Mover::Heap { switch, .. } => match switch.as_ref().and_then(|switch| switch.wait(Duration::ZERO)) {
                Some(end) => Ok(end.map(|()| true)?),
                None => Ok(false),
            },
            Mover::Driver(folder) => match fs::read_to_string(folder.join("end")) {
                Ok(said) => {
                    ensure!(said == "ok", "the pool was not switched: {said}");
                    Ok(true)
                }
                Err(_) => Ok(false),
            },
        }
    }
}

fn phases(outcome: &mut Outcome, options: &Options, pages: impl Pages, mut mover: Mover<'_>) -> Result<()> {
    let count = options.data_bytes() / 4096;
    let random = Random::new(options.seed);
    let mut walk = Walk { pages, random, writes: vec![0; count as usize], errors: 0, lost: 0, seed: options.seed };
    let share = options.write_percent;
    // What is near in the beginning was filled last.
    walk.accesses(&mut Times::new(), share, options.ops, || Ok(false))?;
    let mut times = [Times::new(), Times::new(), Times::new()];
    let [before, during, after] = &mut times;
    outcome.phase("before", options.ops, || walk.accesses(before, share, options.ops, || Ok(false)))?;
    let (most, switches) = if matches!(mover, Mover::Nobody) { (options.ops, 1) } else { (u64::MAX, options.switches) };
    let started = now_ns();
    for number in 0..switches {
        mover.begin(number)?;
        walk.accesses(during, share, most, || mover.is_over())?;
    }
    let took_ns = now_ns() - started;
    outcome.timed("during", during.count, took_ns);
    outcome.phase("after", options.ops, || walk.accesses(after, share, options.ops, || Ok(false)))?;
    for (name, times) in ["before", "during", "after"].iter().zip(&times) {
        outcome.figure(&format!("access_ns_p50_{name}"), times.percentile(0.5) as f64);
        outcome.figure(&format!("access_ns_p99_{name}"), times.percentile(0.99) as f64);
        outcome.figure(&format!("access_ns_p99_9_{name}"), times.percentile(0.999) as f64);
    }
    let [before, during, after] = times.map(|times| times.percentile(0.99) as f64);
    outcome.figure("p99_during_over_before", during / before);
    outcome.figure("p99_after_over_before", after / before);
    let switch_s = took_ns as f64 / 1e9 / switches as f64;
    outcome.figure("switches", switches as f64);
    outcome.figure("switch_s", switch_s);
    outcome.figure("data_bytes_per_switch_s", options.data_bytes() as f64 / switch_s);
    let sum =
        (0..count).try_fold(0u64, |sum, index| Ok::<_, FarError>(sum.wrapping_add(walk.check(index as usize)?)))?;
    outcome.figure("lost_writes", walk.lost as f64);
    outcome.checked(sum, walk.errors);
    Ok(())
}

/// Accesses in random order, each of which is timed and checked.
struct Walk<P> {
    pages: P,
    random: Random,
    writes: Vec<u32>,
    errors: u64,
    /// Of these, how often a page had fewer writes than were made.
    lost: u64,
    seed: u64,
}

impl<P: Pages> Walk<P> {
    /// At most so many, until it is over.
    fn accesses(
        &mut self,
        times: &mut Times,
        write_percent: u64,
        most: u64,
        is_over: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        for access in 0..most {
            if access.is_multiple_of(LOOK_EVERY) && is_over()? {
                break;
            }
            let index = self.random.below(self.writes.len() as u64) as usize;
            let writes = self.random.below(100) < write_percent;
            let started = now_ns();
            let found = if writes { self.pages.write(index)? } else { self.pages.read(index)? };
            times.add(now_ns() - started);
            self.seen(index, found);
            self.writes[index] += u32::from(writes);
        }
        Ok(())
    }

    fn seen(&mut self, index: usize, (writes, last): (u64, u64)) {
        let made = u64::from(self.writes[index]);
        let is_right = writes == made && last == pattern(index as u64, self.seed);
        self.errors += u64::from(!is_right);
        self.lost += u64::from(writes < made);
    }

    /// In the end; the same whoever has the pages and however long the switch took.
    fn check(&mut self, index: usize) -> Result<u64, FarError> {
        let found = self.pages.read(index)?;
        self.seen(index, found);
        Ok(found.1)
    }
}

/// How often an access took how long: 32 classes for each power of two, so that it takes little room and no time. What is said is at most 3 %
/// too little.
struct Times {
    classes: Vec<u64>,
    count: u64,
}

const CLASS_BITS: u32 = 5;

impl Times {
    fn new() -> Times {
        Times { classes: vec![0; Times::class(u64::MAX) + 1], count: 0 }
    }

    fn class(ns: u64) -> usize {
        let shift = ns.max(1).ilog2().saturating_sub(CLASS_BITS);
        ((shift << CLASS_BITS) as u64 + (ns >> shift)) as usize
    }

    fn least(class: usize) -> u64 {
        let shift = (class >> CLASS_BITS).saturating_sub(1);
        (class - (shift << CLASS_BITS)) as u64 * (1 << shift)
    }

    fn add(&mut self, ns: u64) {
        self.classes[Times::class(ns)] += 1;
        self.count += 1;
    }

    /// The time that so many did not exceed.
    fn percentile(&self, share: f64) -> u64 {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let class = self.classes.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        class.map_or(0, Times::least)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against percentiles that are wrong, and against a lost write that nobody counts.
    use super::*;

    /// Pages that forget a write.
    struct Forgetful(Vec<u64>, u64);

    impl Pages for Forgetful {
        fn read(&mut self, index: usize) -> Result<(u64, u64), FarError> {
            Ok((self.0[index], pattern(index as u64, 7)))
        }

        fn write(&mut self, index: usize) -> Result<(u64, u64), FarError> {
            let found = self.read(index)?;
            self.1 = self.1.saturating_sub(1);
            self.0[index] += u64::from(self.1 != 1);
            Ok(found)
        }
    }

    #[test]
    fn a_write_that_is_lost_is_counted() {
        let lost = |forgets: u64| {
            let (pages, random) = (Forgetful(vec![0; 8], forgets), Random::new(3));
            let mut walk = Walk { pages, random, writes: vec![0; 8], errors: 0, lost: 0, seed: 7 };
            walk.accesses(&mut Times::new(), 100, 200, || Ok(false)).unwrap();
            (0..8).for_each(|index| assert!(walk.check(index).is_ok()));
            assert_eq!(walk.errors, walk.lost);
            walk.lost > 0
        };
        assert!(!lost(0) && lost(200) && lost(100));
    }

    #[test]
    fn percentiles_are_nearly_those_of_a_sorted_list() {
        let (mut random, mut times, mut list) = (Random::new(7), Times::new(), Vec::new());
        for _ in 0..100_000 {
            let ns = 1u64 << random.below(36) | random.next() >> 40;
            times.add(ns);
            list.push(ns);
        }
        list.sort_unstable();
        for share in [0.001, 0.5, 0.99, 0.999, 1.0] {
            let (found, right) = (times.percentile(share), list[(100_000.0 * share) as usize - 1]);
            assert!(found <= right && right - found <= right / 32, "{share}: {found} for {right}");
        }
        assert_eq!(Times::new().percentile(0.5), 0);
    }

    #[test]
    fn classes_cover_all_times() {
        for ns in [0, 1, 31, 32, 63, 64, 65, 127, 128, 1_000_003, u64::MAX] {
            let class = Times::class(ns);
            assert!(Times::least(class) <= ns, "{ns}");
            assert!(ns == u64::MAX || Times::least(class + 1) > ns, "{ns}");
        }
        (1..Times::class(u64::MAX)).for_each(|class| assert!(Times::least(class - 1) < Times::least(class)));
    }
}
