//! A job that waits as well as computes: it reads some of its data, checks it, and waits for the next request. So many of them
//! run at once on few processors, which is what jobs of a cluster do that need memory and not cores.

use crate::Options;
use crate::measure::Outcome;
use crate::random::{Random, mix};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use std::time::Duration;

/// The way in which a job uses its data, and how long it waits.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PacedOptions {
    /// Pages that are read for each request.
    #[arg(long, default_value_t = 100)]
    burst: u64,
    /// Wait between two requests in µs.
    #[arg(long, default_value_t = 10_000)]
    wait_us: u64,
    /// Which pages are read.
    #[arg(long, value_enum, default_value_t = PageOrder::Popular)]
    page_order: PageOrder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PageOrder {
    /// Four of five are of a fifth of the data.
    Popular,
    /// One after the other, again and again.
    Scan,
}

const WORDS_PER_PAGE: u64 = 512;

/// Fills the data, and serves so many requests.
pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let (pages, paced) = (options.data_bytes() / 4096, &options.paced);
    ensure!(pages >= 5, "the data must be at least five pages");
    let mut outcome = Outcome::new();
    let mut words = vec![0u64; (pages * WORDS_PER_PAGE) as usize];
    let word = |index: u64| mix(options.seed ^ index);
    outcome.phase("fill", pages, || {
        for (index, at) in words.iter_mut().enumerate() {
            *at = word(index as u64);
        }
    });
    let (mut random, mut next, mut sum, mut errors) = (Random::new(options.seed), 0, 0u64, 0);
    outcome.phase("serve", options.ops, || {
        for _ in 0..options.ops {
            for _ in 0..paced.burst {
                let page = match paced.page_order {
                    PageOrder::Popular if random.below(5) > 0 => random.below(pages / 5),
                    PageOrder::Popular => random.below(pages),
                    PageOrder::Scan => {
                        next = (next + 1) % pages;
                        next
                    }
                };
                let index = page * WORDS_PER_PAGE + random.below(WORDS_PER_PAGE);
                let found = words[index as usize];
                errors += u64::from(found != word(index));
                sum = mix(sum ^ found);
            }
            std::thread::sleep(Duration::from_micros(paced.wait_us));
        }
    });
    outcome.checked(sum, errors);
    Ok(outcome)
}
