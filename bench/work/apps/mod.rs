//! Applications that share memory, written as users of `farfield-dsm` write them, and each once more with std's types and
//! threads (DRust, OSDI 2024, Table 5.1): products of matrices, a key-value store, data frames, a social network; and
//! questions about a real table.
//!
//! Both do the same work with the same kernels and give the same checksum. `--threads` is the number of threads of all nodes
//! together, `--nodes` the number of nodes. The nodes run this program with the same arguments, so nothing is done before `run`.

mod chunked;
pub(crate) mod frame;
pub(crate) mod gemm;
pub(crate) mod kv;
pub(crate) mod social;
mod sorting;
pub(crate) mod taxi;

use super::dsm;
use crate::{Options, Outcome};
use anyhow::{Context, Result, bail, ensure};
use dsm::{DVec, Far, Here, JoinError, NodeBuilder, ShareError};
use std::ops::Range;
use std::sync::Mutex;

/// Memory of each node.
const NEAR_BYTES: u64 = 2 << 30;

/// Nodes on which an application runs.
pub(crate) struct Nodes {
    pub(crate) count: u16,
    /// Tasks that run at a time at each node.
    workers: usize,
    pub(crate) is_in_place: bool,
}

impl Nodes {
    /// Returns the nodes that the options ask for; `None` if the data is in std's types.
    pub(crate) fn of(options: &Options) -> Result<Option<Nodes>> {
        let is_in_place = match options.peer.as_deref() {
            None => return Ok(None),
            Some("share:") => false,
            Some("share:place") => true,
            Some(other) => bail!("--peer must be share: or share:place, not {other}"),
        };
        Nodes::with(options, is_in_place).map(Some)
    }

    fn with(options: &Options, is_in_place: bool) -> Result<Nodes> {
        ensure!((1..=64).contains(&options.nodes), "--nodes must be 1 to 64");
        ensure!((1..=1024).contains(&options.threads), "--threads must be 1 to 1024");
        let workers = options.threads.div_ceil(options.nodes) as usize;
        Ok(Nodes { count: options.nodes as u16, workers, is_in_place })
    }

    /// Runs a body at the first node.
    pub(crate) fn run<R>(&self, body: impl FnOnce(&Here<'_>) -> Result<R>) -> Result<R> {
        let config = NodeBuilder::new().nodes(self.count).near(NEAR_BYTES).workers(self.workers);
        let config = config.read_in_place(self.is_in_place);
        dsm::run(&config, body).context("the nodes do not start")?
    }
}

/// Counts of all nodes together: messages, bytes of messages, objects that have moved, bytes of objects.
pub(crate) type Counts = [u64; 4];

/// Returns the counts of this node.
fn own_counts(here: &Here<'_>) -> Counts {
    let stats = here.stats();
    [stats.messages, stats.message_bytes, stats.moved_objects, stats.object_bytes]
}

/// Returns the counts of all nodes. Asking another node sends a message there and one back.
pub(crate) fn counts(here: &Here<'_>) -> Result<Counts, JoinError> {
    let mut all = [0; 4];
    for node in here.nodes() {
        let counts = if node == here.id() {
            own_counts(here)
        } else {
            here.spawn_to(node, (), |here, ()| own_counts(here))?.join(here)?
        };
        all.iter_mut().zip(counts).for_each(|(all, more)| *all += more);
    }
    Ok(all)
}

/// Adds what each of `ops` operations has sent since `before`.
fn count_since(here: &Here<'_>, before: Counts, ops: u64, outcome: &mut Outcome) -> Result<(), JoinError> {
    let [messages, bytes, moved, _] = counts(here)?;
    // Each other node was sent the task that has counted before, and has said that it ended.
    let counting = 2 * (here.nodes().count() as u64 - 1);
    let messages = (messages - before[0]).saturating_sub(counting);
    let each = |count: u64| count as f64 / ops.max(1) as f64;
    outcome.figure("messages", messages as f64);
    outcome.figure("messages_per_op", each(messages));
    outcome.figure("bytes_per_op", each(bytes - before[1]));
    outcome.figure("moves_per_op", each(moved - before[2]));
    Ok(())
}

/// Does some work with each item, in so many threads, which take one item after the other.
fn in_threads<T: Send>(threads: u64, items: impl Iterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let items = Mutex::new(items);
    let next = || items.lock().expect("no workload panics").next();
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| std::iter::from_fn(next).for_each(&work));
        }
    });
}

/// Stores values side by side at this node.
fn store<T: Far + Copy>(here: &Here<'_>, values: &[T]) -> Result<DVec<T>, ShareError> {
    let mut stored = DVec::with_chunk(values.len());
    stored.extend_from_slice(here, values)?;
    Ok(stored)
}

/// Borrows some of the values that lie side by side.
fn part<'a, T: Far>(here: &'a Here<'_>, values: &'a DVec<T>, range: Range<usize>) -> Result<&'a [T], ShareError> {
    values.chunk(here, 0)?.map_or(Ok(&[]), |values| dsm::part(here, values, range))
}

/// Borrows values that lie side by side.
fn all<'a, T: Far>(here: &'a Here<'_>, values: &'a DVec<T>) -> Result<&'a [T], ShareError> {
    values.chunk(here, 0)?.map_or(Ok(&[]), |values| values.get(here))
}
