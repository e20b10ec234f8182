//! Page replacement on traces: how many pages come back under each policy, beside LRU, which knows all uses, and Belady's OPT,
//! which knows the future. Without a policy the program makes the accesses of the trace itself, so that the page-ins of a real
//! pager can be compared with those of the model.

mod recorded;
mod reference;
mod traces;

use crate::Options;
use crate::measure::Outcome;
use crate::random::mix;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use farfield_core::policy::replacement::{
    Fifo, Gclock, NearPages, ReplacementPolicy, S3Fifo, SecondChance, Sieve, Visibility,
};
use reference::{Lru, SegmentedFifo, belady_page_ins};
use std::hint::black_box;
use traces::Trace;

/// Pages that leave at once, as in the pager.
const BATCH: usize = 64;
const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// What a workload of traces needs to know.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReplacementOptions {
    /// Accesses of `replacement`: zipf-99, zipf-120, hot-cold, redis, matrix, chase, stencil, scan or phases; or recorded ones of the folder in
    /// FARFIELD_DATA, such as arc/P6.
    #[arg(long, default_value = "zipf-99")]
    trace: String,
    /// Pages that can be near.
    #[arg(long, default_value_t = 0)]
    near_pages: usize,
    /// The policy to simulate; without it the program makes the accesses.
    #[arg(long, value_enum)]
    replacement: Option<PolicyName>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum PolicyName {
    /// Knows the future.
    Opt,
    /// Knows all uses.
    Lru,
    /// The second chance, and all uses are known.
    Clock,
    Fifo,
    SecondChance,
    Gclock,
    S3Fifo,
    /// The same, and all uses are known.
    S3FifoUses,
    Sieve,
    /// The same, and all uses are known.
    SieveUses,
    /// FIFO whose last tenth is unmapped but kept: a use there is a soft fault.
    SegmentedFifo,
}

/// What a policy came to.
struct Simulated {
    page_ins: u64,
    soft_faults: u64,
    candidates: u64,
}

fn simulate(policy: PolicyName, trace: &Trace, near_pages: usize) -> Simulated {
    fn of<P: ReplacementPolicy>(policy: P, visibility: Visibility, trace: &Trace, near_pages: usize) -> Simulated {
        let mut near = NearPages::new(policy, visibility, near_pages, BATCH.min(near_pages / 8).max(1));
        trace.pages().for_each(|page| {
            near.access(page);
        });
        Simulated { page_ins: near.page_ins(), soft_faults: 0, candidates: near.candidates() }
    }
    let exact = |page_ins| Simulated { page_ins, soft_faults: 0, candidates: 0 };
    match policy {
        PolicyName::Opt => exact(belady_page_ins(&trace.pages().collect::<Vec<_>>(), near_pages)),
        PolicyName::Lru => exact(Lru::page_ins_of(trace.pages(), near_pages)),
        PolicyName::Clock => of(SecondChance, Visibility::Uses, trace, near_pages),
        PolicyName::Fifo => of(Fifo, Visibility::Faults, trace, near_pages),
        PolicyName::SecondChance => of(SecondChance, Visibility::Faults, trace, near_pages),
        PolicyName::Gclock => of(Gclock, Visibility::Faults, trace, near_pages),
        PolicyName::S3Fifo => of(S3Fifo, Visibility::Faults, trace, near_pages),
        PolicyName::S3FifoUses => of(S3Fifo, Visibility::Uses, trace, near_pages),
        PolicyName::Sieve => of(Sieve::default(), Visibility::Faults, trace, near_pages),
        PolicyName::SieveUses => of(Sieve::default(), Visibility::Uses, trace, near_pages),
        PolicyName::SegmentedFifo => {
            let mut near = SegmentedFifo::new(near_pages);
            trace.pages().for_each(|page| near.access(page));
            Simulated { page_ins: near.page_ins(), soft_faults: near.soft_faults(), candidates: 0 }
        }
    }
}

/// Makes or simulates the accesses of a trace.
pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let parameters = &options.replacement;
    let trace = Trace::open(&parameters.trace, options)?;
    let mut outcome = Outcome::new();
    let mut near_pages = parameters.near_pages;
    if trace.is_recorded() {
        // A recorded trace has its own size; the share of it that is near is that of the data.
        let share = near_pages as f64 * PAGE_BYTES as f64 / options.data_bytes() as f64;
        near_pages = ((f64::from(trace.page_count()) * share) as usize).max(16);
    }
    ensure!(near_pages >= 16, "--near-pages must be at least 16");
    let accesses = trace.pages().count() as u64;
    match parameters.replacement {
        Some(policy) => {
            let simulated = outcome.phase("replay", accesses, || simulate(policy, &trace, near_pages));
            let page_ins = simulated.page_ins as f64;
            outcome.figure("page_ins", page_ins);
            outcome.figure("page_ins_over_lru", page_ins / Lru::page_ins_of(trace.pages(), near_pages).max(1) as f64);
            outcome.figure("soft_faults", simulated.soft_faults as f64);
            outcome.figure("candidates_per_page_in", simulated.candidates as f64 / page_ins.max(1.0));
            // The accesses are those of the trace, whoever keeps its pages.
            outcome.checked(0, 0);
        }
        None => {
            ensure!(!trace.is_recorded(), "a recorded trace names pages, not memory: give --replacement");
            touch(&trace, accesses, options.seed, &mut outcome)?;
            outcome.figure("lru_page_ins", Lru::page_ins_of(trace.pages(), near_pages) as f64);
        }
    }
    Ok(outcome)
}

/// Makes the accesses, as a program does.
fn touch(trace: &Trace, accesses: u64, seed: u64, outcome: &mut Outcome) -> Result<()> {
    let count = trace.page_count() as usize;
    let mut words: Vec<u64> = Vec::new();
    words.try_reserve_exact(count * PAGE_WORDS).context("no memory for the data")?;
    let pattern = |page: usize| mix(page as u64 ^ seed);
    outcome.phase("fill", count as u64, || {
        (0..count).for_each(|page| words.extend((0..PAGE_WORDS).map(|word| pattern(page) + word as u64)));
    });
    let wrong = outcome.phase("replay", accesses, || {
        let mut random = seed;
        let mut wrong = 0;
        // The trace begins with the filling.
        for page in trace.pages().skip(count).map(|page| page as usize) {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let word = (random >> 40) as usize % PAGE_WORDS;
            wrong += u64::from(black_box(&words)[page * PAGE_WORDS + word] != pattern(page) + word as u64);
        }
        wrong
    });
    outcome.checked(0, wrong);
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Guards against a model that counts wrongly: by hand, and against each other.
    use super::*;

    #[test]
    fn nothing_is_better_than_opt_and_lru_is_exact() {
        for name in traces::NAMES {
            let trace = Trace::made(name, 4 << 20, 20_000, 5).unwrap();
            let count = trace.page_count();
            assert!(trace.pages().all(|page| page < count), "{name} names a page that it has not");
            assert!(trace.pages().take(count as usize).eq(0..count), "{name} does not begin by filling all pages");
            let near = count as usize / 3;
            let of = |policy| simulate(policy, &trace, near).page_ins;
            let best = of(PolicyName::Opt);
            for &policy in PolicyName::value_variants() {
                assert!(of(policy) >= best, "{policy:?} has fewer page-ins than OPT on {name}");
                let all = simulate(policy, &trace, count as usize + BATCH);
                assert_eq!(all.page_ins, 0, "{policy:?} evicts although all fits, on {name}");
            }
        }
    }

    #[test]
    fn known_counts() {
        // From the textbook (Belady, Nelson, Shedler 1969): more memory, more faults by FIFO.
        let anomaly = [0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 3, 4];
        let fifo = |capacity| {
            let mut near = NearPages::new(Fifo, Visibility::Faults, capacity, 1);
            anomaly.iter().for_each(|&page| {
                near.access(page);
            });
            near.page_ins()
        };
        assert_eq!((fifo(3), fifo(4)), (9 - 5, 10 - 5));
        assert_eq!(Lru::page_ins_of(anomaly.into_iter(), 3), 10 - 5);
        assert_eq!(belady_page_ins(&anomaly, 3), 7 - 5);
        let mut segmented = SegmentedFifo::new(10);
        // Page 0 is next to leave when it is used, and so stays.
        (0..10).chain([0]).chain(10..18).chain([0]).for_each(|page| segmented.access(page));
        assert_eq!(segmented.page_ins(), 0);
    }
}
