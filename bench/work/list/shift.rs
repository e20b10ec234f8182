//! `shift`: walks whose best place changes while the program runs: short ones, long ones, long ones while others want the server, too, and
//! many at a time.
//!
//! Where they run: at the client (`--peer client:URL`), at the server (`server:URL`) or where it was faster lately (`auto:URL`).

use super::{Called, DEADLINE, Ring, Walker, open};
use crate::random::Random;
use crate::{Options, Outcome};
use anyhow::{Result, anyhow, bail, ensure};
use farfield_bench_functions::ListStart;
use farfield_pool::{Backend, PoolBuilder};
use farfield_wic::{Aggregate, Caller, Range, Summary, Where};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

struct Phase {
    name: &'static str,
    nodes: u64,
    together: u64,
    /// Others have long calls at the server meanwhile.
    is_crowded: bool,
    /// Walks for each hundred of `--ops`.
    walks_percent: u64,
}

/// At their best places all but the crowded one take about as long.
const PHASES: [Phase; 5] = [
    Phase { name: "short", nodes: 2, together: 1, is_crowded: false, walks_percent: 2000 },
    Phase { name: "long", nodes: 256, together: 1, is_crowded: false, walks_percent: 100 },
    Phase { name: "crowded", nodes: 256, together: 1, is_crowded: true, walks_percent: 50 },
    Phase { name: "quiet", nodes: 256, together: 1, is_crowded: false, walks_percent: 100 },
    Phase { name: "many", nodes: 16, together: 64, is_crowded: false, walks_percent: 1600 },
];
/// Clients that have a long call at the server all the time.
const OTHERS: usize = 4;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let ring = Ring::of(options)?;
    let (place, url) = options.called_peer()?;
    let mut called = Called::new(open(url, options)?, place, None);
    let mut outcome = Outcome::new();
    outcome.phase("fill", ring.nodes, || called.fill(ring))?;
    let mut random = Random::new(options.seed);
    let (mut sum, mut errors) = (0u64, 0);
    for Phase { name, nodes, together, is_crowded, walks_percent } in PHASES {
        let walks = (options.ops * walks_percent / 100).max(together);
        let firsts: Vec<u64> = (0..walks).map(|_| random.below(ring.nodes)).collect();
        let starts: Vec<ListStart> = firsts.iter().map(|first| ring.start(*first, nodes)).collect();
        let mut values = Vec::with_capacity(starts.len());
        let others = is_crowded.then(|| Others::begin(&*called.backend, url, ring)).transpose()?;
        outcome.phase(name, walks, || {
            starts.chunks(together as usize).try_for_each(|row| called.walk(row, &mut values))
        })?;
        others.map_or(Ok(()), Others::end)?;
        errors += ring.wrong(&firsts, nodes, &values)?;
        sum = values.iter().fold(sum, |sum, value| sum.wrapping_add(*value));
        outcome.figure(&format!("{name}_ns"), 1e9 / outcome.per_second(name));
    }
    outcome.all("shift", &PHASES.map(|phase| phase.name));
    if let Some((_, choice)) = called.caller.choices().next() {
        outcome.figure("moves", choice.moves as f64);
    }
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// Clients of the same region that add it up at the server, again and again.
struct Others {
    threads: Vec<JoinHandle<Result<()>>>,
    is_over: Arc<AtomicBool>,
}

impl Others {
    /// Each has had an answer.
    fn begin(backend: &dyn Backend, url: &str, ring: Ring) -> Result<Others> {
        let share = backend.share()?;
        let words = ring.words();
        let is_over = Arc::new(AtomicBool::new(false));
        let (began, has_begun) = mpsc::channel();
        let threads = (0..OTHERS).map(|_| {
            let backend = PoolBuilder::new().url(url).client_name("farfield-work").attach(&share)?;
            let (began, is_over) = (began.clone(), is_over.clone());
            Ok(std::thread::spawn(move || add_up(backend, words, &began, &is_over)))
        });
        let others = Others { threads: threads.collect::<Result<_>>()?, is_over: is_over.clone() };
        drop(began);
        if (0..OTHERS).any(|_| has_begun.recv().is_err()) {
            others.end()?;
            bail!("one of the others has ended");
        }
        Ok(others)
    }

    fn end(self) -> Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        self.threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("one of the others panicked"))?)
    }
}

fn add_up(backend: Arc<dyn Backend>, words: Summary, began: &mpsc::Sender<()>, is_over: &AtomicBool) -> Result<()> {
    let mut caller = Caller::new(backend);
    let mut began = Some(began);
    loop {
        let range = Range { offset: 0, count: words.count };
        let summary = caller.call::<Aggregate>(range).at(Where::Server).within(DEADLINE).run()?;
        ensure!(summary == words, "the others were told {summary:?}, not {words:?}");
        if let Some(began) = began.take() {
            began.send(()).ok();
        }
        if is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
    }
}
