//! Objects that refer to each other, with std's owners or in a collected heap: what it costs to follow a reference, and what
//! making and dropping trees costs when a collector frees them.

use crate::random::{Random, mix};
use crate::utilization::bounded_utilization;
use crate::{OffloadName, Options, Outcome, figures_of, figures_since};
use anyhow::{Result, bail};
use farfield::{FarError, Heap};
use farfield_gc::{FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root, SafepointWait};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// References that are followed between two safepoints: what is used between them cannot leave.
const STEPS_PER_SAFEPOINT: u64 = 64;

/// Depth of the trees that are dropped soon: 1023 nodes.
const SHORT_DEPTH: u32 = 9;

/// The far limit of the collected heap, in percent of the data that lives.
const LIMIT_PERCENT: u64 = 160;

/// Random order in which a walk visits all of so many nodes.
fn order(count: u64, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut order: Vec<u32> = (0..count as u32).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order
}

/// Returns the far limit of a collected heap for so much that lives, in bytes.
pub(crate) fn far_limit(live_bytes: u64) -> u64 {
    (live_bytes * LIMIT_PERCENT / 100).max(8 << 20)
}

/// A collected heap for so much that lives, if the data is to be in one.
pub(crate) fn collected(options: &Options, live_bytes: u64) -> Result<Option<(Heap, GcHeap)>> {
    let limit = far_limit(live_bytes);
    let Some(heap) = options.heap_with(0, limit.max(options.data_bytes() * 2))? else { return Ok(None) };
    let builder = GcHeap::in_heap(&heap).limit(limit).region(options.region_kib << 10);
    let is_at_servers = options.offload == OffloadName::All;
    let gc = builder.far_tracing(options.far_tracing()).evacuate_at_servers(is_at_servers).build()?;
    record_waits(&gc);
    Ok(Some((heap, gc)))
}

/// Most waits of threads for the collector that are recorded.
const WAITS_MAX: usize = 1 << 18;

/// Has a heap record what [`figures_of_collections`] reports.
pub(crate) fn record_waits(gc: &GcHeap) {
    gc.record_waits(WAITS_MAX);
}

/// Windows of time in which it is looked for how much threads wait, in ms.
const WINDOWS_MS: [(&str, u64); 4] = [("bmu_10ms", 10), ("bmu_50ms", 50), ("bmu_100ms", 100), ("bmu_1s", 1000)];

/// Adds for each length of a window the least share of one, so long or longer, in which a thread did not wait for the collector, from
/// the end of the filling on.
fn figures_of_waits(outcome: &mut Outcome, waits: &[SafepointWait]) {
    let Some((begun, ended)) = outcome.used() else { return };
    let since = |moment: Instant| moment.saturating_duration_since(begun).as_nanos() as u64;
    let mut threads: HashMap<_, Vec<_>> = HashMap::new();
    for wait in waits {
        threads.entry(wait.thread).or_default().push(since(wait.begun)..since(wait.begun + wait.time));
    }
    for (name, milliseconds) in WINDOWS_MS {
        let share = |waits: &[_]| bounded_utilization(waits, &(0..since(ended)), milliseconds * 1_000_000);
        let Some(none) = share(&[]) else { continue };
        outcome.figure(name, threads.values().filter_map(|waits| share(waits)).fold(none, f64::min));
    }
}

pub(crate) fn figures_of_collections(outcome: &mut Outcome, gc: &GcHeap) {
    let stats = gc.stats();
    figures_of_waits(outcome, &gc.recorded_waits());
    for (name, value) in [
        ("collections", stats.collections as f64),
        ("collections_given_up", stats.given_up as f64),
        ("collection_ms", stats.last_collection.as_secs_f64() * 1e3),
        ("longest_pause_ms", stats.longest_pause.as_secs_f64() * 1e3),
        ("pause_p90_ms", stats.pause_quantile(0.9).as_secs_f64() * 1e3),
        ("pause_p99_ms", stats.pause_quantile(0.99).as_secs_f64() * 1e3),
        ("pauses", stats.pauses as f64),
        ("paused_ms", stats.paused.as_secs_f64() * 1e3),
        ("mean_pause_ms", stats.paused.as_secs_f64() * 1e3 / stats.pauses.max(1) as f64),
        ("far_bytes", stats.used_bytes as f64),
        ("live_bytes", stats.live_bytes as f64),
        ("far_over_live", stats.used_bytes as f64 / stats.live_bytes.max(1) as f64),
        ("moved_objects", stats.moved_objects as f64),
        ("live_objects", stats.live_objects as f64),
        ("traced_at_servers", stats.traced_at_servers as f64),
        ("flushed_pages", stats.flushed_pages as f64),
        ("read_pages", stats.read_pages as f64),
        ("brought_pages", stats.brought_pages as f64),
        ("traced_pages", (stats.read_pages + stats.brought_pages) as f64),
        ("arrived_objects", stats.arrived_objects as f64),
        ("waited_ms", stats.waited.as_secs_f64() * 1e3),
        ("stalls", stats.stalls as f64),
        ("stalled_ms", stats.stalled.as_secs_f64() * 1e3),
        ("longest_stall_ms", stats.longest_stall.as_secs_f64() * 1e3),
        ("slow_loads", stats.slow_loads as f64),
        ("wrong_guesses", stats.wrong_guesses as f64),
    ] {
        outcome.figure(name, value);
    }
}

/// A cycle of nodes of 64 bytes in random order, followed.
pub(crate) fn run_follow(options: &Options) -> Result<Outcome> {
    let all = options.data_bytes() / 64;
    let set = options.set_kib << 10;
    let count = if set == 0 { all } else { (set / 64).min(all) };
    let order = order(count, options.seed);
    match collected(options, options.data_bytes())? {
        None => Ok(follow_plain(options, &order)),
        Some((heap, gc)) => {
            let mut outcome = Outcome::new();
            follow_collected(options, &order, &heap, &gc, &mut outcome)?;
            figures_of_collections(&mut outcome, &gc);
            Ok(outcome)
        }
    }
}

/// 64 bytes, as a collected node has with its header.
struct PlainNode {
    numbers: [u64; 6],
    next: OnceLock<&'static PlainNode>,
}

fn numbers<const WORDS: usize>(index: u32, seed: u64) -> [u64; WORDS] {
    [mix(u64::from(index) ^ seed); WORDS]
}

fn follow_plain(options: &Options, order: &[u32]) -> Outcome {
    let mut outcome = Outcome::new();
    let nodes: &'static [PlainNode] = outcome.phase("fill", order.len() as u64, || {
        let node = |index| PlainNode { numbers: numbers(index, options.seed), next: OnceLock::new() };
        let nodes: &'static [PlainNode] = Vec::leak((0..order.len() as u32).map(node).collect());
        for (at, index) in order.iter().enumerate() {
            let next = order[(at + 1) % order.len()];
            let _ = nodes[*index as usize].next.set(&nodes[next as usize]);
        }
        nodes
    });
    let (mut node, mut sum) = (&nodes[order[0] as usize], 0u64);
    outcome.phase("follow", options.ops, || {
        for _ in 0..options.ops {
            sum = sum.wrapping_add(node.numbers[3]);
            let Some(next) = node.next.get() else { unreachable!("each was set") };
            node = next;
        }
    });
    outcome.checked(sum, 0);
    outcome
}

#[derive(FarObject)]
struct Node {
    numbers: [u64; 6],
    next: Ref<Node>,
}

fn follow_collected(options: &Options, order: &[u32], heap: &Heap, gc: &GcHeap, outcome: &mut Outcome) -> Result<()> {
    let mut m = gc.enter();
    let first = outcome.phase("fill", order.len() as u64, || -> Result<Root<Node>, GcError> {
        // They lie in the order of their numbers, as the plain ones do.
        let table = m.with_room(|m| Ok(m.root(m.alloc_array(order.len().div_ceil(CHUNK), |_| Ref::null())?)))?;
        for first in (0..order.len()).step_by(CHUNK) {
            let len = CHUNK.min(order.len() - first);
            let chunk = m.with_room(|m| {
                let chunk = m.alloc_array(len, |_| Ref::<Node>::null())?;
                m.get(&table)?[first / CHUNK].store(m, Some(chunk));
                Ok(m.root(chunk))
            })?;
            for at in 0..len {
                m.with_room(|m| {
                    let numbers = numbers((first + at) as u32, options.seed);
                    let node = m.alloc(Node { numbers, next: Ref::null() })?;
                    m.get(&chunk)?[at].store(m, Some(node));
                    Ok(())
                })?;
            }
        }
        let node = |m: &Mutator<'_>, index: u32| {
            let (chunk, at) = (index as usize / CHUNK, index as usize % CHUNK);
            let chunk = m.get(&table)?[chunk].load(m)?.unwrap_or_else(|| unreachable!("each was set"));
            let node = chunk[at].load(m)?.unwrap_or_else(|| unreachable!("each was set"));
            Ok(m.root(node))
        };
        for (at, index) in order.iter().enumerate() {
            let next = order[(at + 1) % order.len()];
            m.with_room(|m| {
                let next = node(m, next)?;
                m.get(&node(m, *index)?)?.next.store(m, Some(m.get(&next)?));
                Ok(())
            })?;
        }
        m.with_room(|m| node(m, order[0]))
    })?;
    let (before, counted) = (heap.stats(), gc.stats());
    let (mut at, mut sum) = (first, 0u64);
    outcome.phase("follow", options.ops, || -> Result<(), GcError> {
        let mut left = options.ops;
        while left > 0 {
            let (mut node, mut steps) = (m.get(&at)?, 0);
            while steps < left.min(STEPS_PER_SAFEPOINT) {
                let next = match node.next.load(&m) {
                    // As much as can be used between two safepoints.
                    Err(GcError::Far(FarError::NearFull)) if steps > 0 => break,
                    next => next?.unwrap_or_else(|| unreachable!("each was set")),
                };
                sum = sum.wrapping_add(node.numbers[3]);
                node = next;
                steps += 1;
            }
            at.set(node);
            left -= steps;
            m.safepoint()?;
        }
        Ok(())
    })?;
    drop(m); // It has added what it counted.
    let stats = gc.stats();
    figures_since(outcome, &before, &heap.stats(), options.ops, 0);
    let wrong_guesses = stats.wrong_guesses - counted.wrong_guesses;
    outcome.figure("wrong_guess_share", wrong_guesses as f64 / options.ops.max(1) as f64);
    outcome.figure("slow_load_share", (stats.slow_loads - counted.slow_loads) as f64 / options.ops.max(1) as f64);
    outcome.checked(sum, 0);
    Ok(())
}

/// References in an array of a table.
pub(crate) const CHUNK: usize = 256;

/// Objects of 64 bytes of which nine tenths, spread evenly, are dropped; collections that move what is left together. With
/// `--offload all` memory servers move what is far.
pub(crate) fn run_moves(options: &Options) -> Result<Outcome> {
    let count = (options.data_bytes() / 72) as usize / CHUNK * CHUNK;
    let Some((heap, gc)) = collected(options, options.data_bytes())? else {
        bail!("moves needs a far heap: nothing moves in plain memory")
    };
    let mut outcome = Outcome::new();
    let mut m = gc.enter();
    let mut chunks: Vec<Root<[Ref<[u64; 6]>]>> = Vec::new();
    outcome.phase("fill", count as u64, || -> Result<(), GcError> {
        for chunk in 0..count / CHUNK {
            chunks.push(m.with_room(|m| {
                let objects = m.alloc_array(CHUNK, |_| Ref::<[u64; 6]>::null())?;
                for (within, object) in objects.iter().enumerate() {
                    object.store(m, Some(m.alloc([(chunk * CHUNK + within) as u64; 6])?));
                }
                Ok(m.root(objects))
            })?);
            m.safepoint()?;
        }
        Ok(())
    })?;
    let mut random = Random::new(options.seed);
    let lives: Vec<bool> = (0..count).map(|_| random.below(10) == 0).collect();
    for (chunk, lives) in chunks.iter().zip(lives.chunks(CHUNK)) {
        m.with_room(|m| {
            let objects = m.get(chunk)?;
            objects.iter().zip(lives).filter(|(_, lives)| !**lives).for_each(|(object, _)| object.store(m, None));
            Ok(())
        })?;
        m.safepoint()?;
    }
    let before = heap.stats();
    // The second collection moves what the first one has left.
    outcome.phase("collect", 2, || (0..2).try_for_each(|_| m.collect()))?;
    figures_since(&mut outcome, &before, &heap.stats(), 2, 0);
    figures_of_collections(&mut outcome, &gc);
    let stats = gc.stats();
    outcome.figure("moved_at_servers", stats.moved_at_servers as f64);
    outcome.figure("evacuation_read_pages", stats.evacuation_read_pages as f64);
    let (mut sum, mut errors) = (0u64, 0);
    for (at, chunk) in chunks.iter().enumerate() {
        m.with_room(|m| {
            for (within, object) in m.get(chunk)?.iter().enumerate() {
                let number = (at * CHUNK + within) as u64;
                let found = object.load(m)?.map(|object| object[3]);
                errors += u64::from(found != lives[number as usize].then_some(number));
                sum = sum.wrapping_add(found.unwrap_or(0));
            }
            Ok(())
        })?;
        m.safepoint()?;
    }
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// Objects of 64 bytes that are replaced in random order, so that garbage is spread evenly.
pub(crate) fn run_replace(options: &Options) -> Result<Outcome> {
    let count = (options.data_bytes() / 72) as usize / CHUNK * CHUNK;
    let mut random = Random::new(options.seed);
    let mut place = move || random.below(count as u64) as usize;
    let mut outcome = Outcome::new();
    let Some((heap, gc)) = collected(options, options.data_bytes())? else {
        let mut all: Vec<Arc<[u64; 6]>> =
            outcome.phase("fill", count as u64, || (0..count as u64).map(|at| Arc::new([at; 6])).collect());
        outcome.phase("replace", options.ops, || {
            for number in 0..options.ops {
                all[place()] = Arc::new([number; 6]);
            }
        });
        outcome.checked(all.iter().fold(0u64, |sum, it| sum.wrapping_add(it[3])), 0);
        return Ok(outcome);
    };
    let mut m = gc.enter();
    let mut chunks: Vec<Root<[Ref<[u64; 6]>]>> = Vec::new();
    let put = |m: &mut Mutator<'_>, chunk: &Root<[Ref<[u64; 6]>]>, within: usize, number: u64| {
        m.with_room(|m| {
            let new = m.alloc([number; 6])?;
            m.get(chunk)?[within].store(m, Some(new));
            Ok(())
        })?;
        m.safepoint()
    };
    outcome.phase("fill", count as u64, || -> Result<(), GcError> {
        for at in 0..count {
            if at.is_multiple_of(CHUNK) {
                chunks.push(m.with_room(|m| Ok(m.root(m.alloc_array(CHUNK, |_| Ref::null())?)))?);
            }
            put(&mut m, &chunks[at / CHUNK], at % CHUNK, at as u64)?;
        }
        Ok(())
    })?;
    let before = heap.stats();
    outcome.phase("replace", options.ops, || -> Result<(), GcError> {
        for number in 0..options.ops {
            let at = place();
            put(&mut m, &chunks[at / CHUNK], at % CHUNK, number)?;
        }
        Ok(())
    })?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
    m.collect()?;
    m.collect()?;
    figures_of_collections(&mut outcome, &gc);
    let mut sum = 0u64;
    for at in 0..count {
        let number = |m: &Mutator<'_>| {
            let object = m.get(&chunks[at / CHUNK])?[at % CHUNK].load(m)?;
            Ok(object.unwrap_or_else(|| unreachable!("each was set"))[3])
        };
        sum = sum.wrapping_add(m.with_room(number)?);
        m.safepoint()?;
    }
    outcome.checked(sum, 0);
    Ok(outcome)
}

/// A tree that lives, and others that are made and dropped beside it.
pub(crate) fn run_trees(options: &Options) -> Result<Outcome> {
    // A node takes 32 bytes in the collected heap, and 8 for its entry.
    let long_depth = (options.data_bytes() / 40).ilog2() - 1;
    match collected(options, options.data_bytes())? {
        None => {
            let mut outcome = Outcome::new();
            let lives = outcome.phase("fill", 1 << long_depth, || PlainTree::new(long_depth, options.seed));
            let mut sum = 0u64;
            outcome.phase("trees", options.ops, || {
                for at in 0..options.ops {
                    sum = sum.wrapping_add(PlainTree::new(SHORT_DEPTH, at).sum());
                }
            });
            outcome.checked(sum ^ lives.sum(), 0);
            Ok(outcome)
        }
        Some((heap, gc)) => {
            let mut outcome = Outcome::new();
            let mut m = gc.enter();
            let lives = outcome.phase("fill", 1 << long_depth, || make_tree(&mut m, long_depth, options.seed))?;
            let mut sum = 0u64;
            outcome.phase("trees", options.ops, || -> Result<(), GcError> {
                for at in 0..options.ops {
                    let tree = make_tree(&mut m, SHORT_DEPTH, at)?;
                    sum = sum.wrapping_add(sum_of_tree(&mut m, &tree)?);
                }
                Ok(())
            })?;
            outcome.checked(sum ^ sum_of_tree(&mut m, &lives)?, 0);
            figures_of(&mut outcome, &heap.stats(), 0);
            figures_of_collections(&mut outcome, &gc);
            Ok(outcome)
        }
    }
}

struct PlainTree {
    number: u64,
    sides: Option<[Arc<PlainTree>; 2]>,
}

impl PlainTree {
    fn new(depth: u32, seed: u64) -> Arc<PlainTree> {
        let side = |side| PlainTree::new(depth - 1, mix(seed ^ side));
        Arc::new(PlainTree { number: seed, sides: (depth > 0).then(|| [side(1), side(2)]) })
    }

    fn sum(&self) -> u64 {
        self.sides.iter().flatten().fold(self.number, |sum, side| sum.wrapping_add(side.sum()))
    }
}

#[derive(FarObject)]
pub(crate) struct Tree {
    number: u64,
    sides: [Ref<Tree>; 2],
}

impl Tree {
    pub(crate) fn leaf(number: u64) -> Tree {
        Tree { number, sides: Default::default() }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn sides(&self) -> &[Ref<Tree>; 2] {
        &self.sides
    }
}

/// Depth of a tree that is made, or summed, between two safepoints.
const STEP_DEPTH: u32 = 5;

/// Makes a tree top down, so that only the tops of what is left to make need roots.
pub(crate) fn make_tree(m: &mut Mutator<'_>, depth: u32, seed: u64) -> Result<Root<Tree>, GcError> {
    let root = m.with_room(|m| Ok(m.root(m.alloc(Tree::leaf(seed))?)))?;
    let mut tops = vec![(root.clone(), depth, seed)];
    while let Some((top, depth, seed)) = tops.pop() {
        let grown = m.with_room(|m| {
            let mut left = Vec::new();
            grow(m, m.get(&top)?, depth, seed, STEP_DEPTH, &mut left)?;
            Ok(left)
        })?;
        tops.extend(grown);
        m.safepoint()?;
    }
    Ok(root)
}

fn grow(
    m: &Mutator<'_>,
    tree: Gc<'_, Tree>,
    depth: u32,
    seed: u64,
    steps: u32,
    left: &mut Vec<(Root<Tree>, u32, u64)>,
) -> Result<(), GcError> {
    if depth == 0 {
        return Ok(());
    }
    if steps == 0 {
        left.push((m.root(tree), depth, seed));
        return Ok(());
    }
    for (side, at) in tree.sides.iter().zip(1..) {
        let seed = mix(seed ^ at);
        let grown = m.alloc(Tree::leaf(seed))?;
        side.store(m, Some(grown));
        grow(m, grown, depth - 1, seed, steps - 1, left)?;
    }
    Ok(())
}

pub(crate) fn sum_of_tree(m: &mut Mutator<'_>, tree: &Root<Tree>) -> Result<u64, GcError> {
    let (mut sum, mut tops) = (0u64, vec![tree.clone()]);
    while let Some(top) = tops.pop() {
        let (more, left) = m.with_room(|m| {
            let mut left = Vec::new();
            let sum = add(m, m.get(&top)?, STEP_DEPTH, &mut left)?;
            Ok((sum, left))
        })?;
        sum = sum.wrapping_add(more);
        tops.extend(left);
        m.safepoint()?;
    }
    Ok(sum)
}

fn add(m: &Mutator<'_>, tree: Gc<'_, Tree>, steps: u32, left: &mut Vec<Root<Tree>>) -> Result<u64, GcError> {
    if steps == 0 {
        left.push(m.root(tree));
        return Ok(0);
    }
    let mut sum = tree.number;
    for side in &tree.sides {
        if let Some(side) = side.load(m)? {
            sum = sum.wrapping_add(add(m, side, steps - 1, left)?);
        }
    }
    Ok(sum)
}
