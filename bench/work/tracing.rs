//! Collections of a graph of small objects, by each way to look at those that are far: alone, and beside a program.

use crate::collected::{CHUNK, collected, figures_of_collections, make_tree, sum_of_tree};
use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since};
use anyhow::{Result, bail};
use farfield::Heap;
use farfield_gc::{FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root};

/// Node of a graph: 64 bytes with its header.
#[derive(FarObject)]
struct Node {
    number: u64,
    edges: [Ref<Node>; 4],
    padding: [u64; 2],
}

/// In a heap that is not aged, nodes lead to others that were made up to so many before or after them.
const NEIGHBOURS: u64 = 512;

/// Parts of the table that are used one after the other while a graph is made.
const TABLE_PARTS: u64 = 8;

/// Depth of the trees that the program drops: 63 nodes, 2 KiB.
const TREE_DEPTH: u32 = 5;

/// Operations between two looks at the statistics.
const OPS_PER_LOOK: u64 = 32;

type Table = Root<[Ref<[Ref<Node>]>]>;

fn heaps(options: &Options) -> Result<(Heap, GcHeap)> {
    match collected(options, options.data_bytes() * 5 / 4)? {
        Some(heaps) => Ok(heaps),
        None => bail!("this workload needs a far heap: nothing is traced in plain memory"),
    }
}

fn node_count(options: &Options) -> u64 {
    (options.data_bytes() / 72).next_multiple_of(CHUNK as u64)
}

/// Loads the part of a table in which this node is.
fn chunk<'m>(m: &'m Mutator<'_>, table: &Table, at: u64) -> Result<Gc<'m, [Ref<Node>]>, GcError> {
    Ok(m.get(table)?[at as usize / CHUNK].load(m)?.unwrap_or_else(|| unreachable!("it was set")))
}

/// Loads a node of a table.
fn node<'m>(m: &'m Mutator<'_>, table: &Table, at: u64) -> Result<Gc<'m, Node>, GcError> {
    Ok(chunk(m, table, at)?[at as usize % CHUNK].load(m)?.unwrap_or_else(|| unreachable!("it was set")))
}

/// Makes a graph, each node of which leads to four others: anywhere in an *aged* heap, and else to neighbours.
fn make_graph(options: &Options, m: &mut Mutator<'_>) -> Result<Table, GcError> {
    let count = node_count(options);
    let chunks = count as usize / CHUNK;
    let table = m.with_room(|m| Ok(m.root(m.alloc_array(chunks, |_| Ref::<[Ref<Node>]>::null())?)))?;
    for chunk in 0..chunks {
        m.with_room(|m| {
            let nodes = m.alloc_array(CHUNK, |_| Ref::<Node>::null())?;
            for (within, node) in nodes.iter().enumerate() {
                let number = (chunk * CHUNK + within) as u64;
                node.store(m, Some(m.alloc(Node { number, edges: Default::default(), padding: [0; 2] })?));
            }
            m.get(&table)?[chunk].store(m, Some(nodes));
            Ok(())
        })?;
        m.safepoint()?;
    }
    // The table is gone through in parts that fit near. Nodes that are led to need not come near.
    for part in 0..TABLE_PARTS {
        for at in 0..count {
            let target = |edge| target(options, at, edge, count);
            let in_part = |edge: &u64| target(*edge) * TABLE_PARTS / count == part;
            m.with_room(|m| {
                for edge in (0..4).filter(in_part) {
                    let target = target(edge);
                    let of_table = chunk(m, &table, target)?;
                    node(m, &table, at)?.edges[edge as usize].copy_from(m, &of_table[target as usize % CHUNK]);
                }
                Ok(())
            })?;
            m.safepoint()?;
        }
    }
    Ok(table)
}

/// The node that an edge leads to.
fn target(options: &Options, at: u64, edge: u64, count: u64) -> u64 {
    let random = mix(options.seed ^ (4 * at + edge));
    match options.aged {
        0 => (at + count - NEIGHBOURS + random % (2 * NEIGHBOURS)) % count,
        _ => random % count,
    }
}

/// Collections that find nearly all of a graph alive, while nothing changes.
pub(crate) fn run_marking(options: &Options) -> Result<Outcome> {
    let (heap, gc) = heaps(options)?;
    let mut outcome = Outcome::new();
    let mut m = gc.enter();
    let _root = outcome.phase("fill", node_count(options), || {
        let table = make_graph(options, &mut m)?;
        m.with_room(|m| Ok(m.root(node(m, &table, 0)?)))
    })?;
    // The table goes, and with it the few nodes that only the table leads to.
    m.collect()?;
    let before = heap.stats();
    outcome.phase("collect", options.ops, || (0..options.ops).try_for_each(|_| m.collect()))?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
    figures_of_collections(&mut outcome, &gc);
    outcome.checked(gc.stats().live_objects, 0);
    Ok(outcome)
}

/// Misses of operations, and their number.
#[derive(Clone, Copy, Default)]
struct Misses {
    misses: u64,
    ops: u64,
}

impl Misses {
    fn per_op(self) -> f64 {
        self.misses as f64 / self.ops.max(1) as f64
    }
}

/// A program that makes garbage and walks through a graph, beside the collections that this causes.
pub(crate) fn run_beside(options: &Options) -> Result<Outcome> {
    let (heap, gc) = heaps(options)?;
    let mut outcome = Outcome::new();
    let mut m = gc.enter();
    let mut random = Random::new(options.seed);
    let count = node_count(options);
    let table = outcome.phase("fill", count, || make_graph(options, &mut m))?;
    m.collect()?;
    let before = heap.stats();
    let (mut sum, mut far_peak) = (0u64, 0);
    let (mut during, mut between) = (Misses::default(), Misses::default());
    outcome.phase("operate", options.ops, || -> Result<(), GcError> {
        let look = || (heap.stats().misses, gc.stats().collections, gc.is_collecting());
        let mut last = look();
        for op in 0..options.ops {
            let tree = make_tree(&mut m, TREE_DEPTH, op)?;
            sum = sum.wrapping_add(sum_of_tree(&mut m, &tree)?);
            drop(tree);
            let (first, edges) = (random.below(count), random.below(u64::MAX));
            sum = sum.wrapping_add(m.with_room(|m| {
                let mut at = node(m, &table, first)?;
                let mut sum = at.number;
                for step in 1..options.nodes {
                    let edge = (edges >> (2 * step % 64)) as usize % at.edges.len();
                    at = at.edges[edge].load(m)?.unwrap_or_else(|| unreachable!("each was set"));
                    sum = sum.wrapping_add(at.number);
                }
                Ok(sum)
            })?);
            m.safepoint()?;
            if (op + 1) % OPS_PER_LOOK == 0 {
                let now = look();
                far_peak = far_peak.max(gc.stats().used_bytes);
                // What is in part during a collection counts as neither.
                if (last.1, last.2) == (now.1, now.2) {
                    let of = if now.2 { &mut during } else { &mut between };
                    *of = Misses { misses: of.misses + now.0 - last.0, ops: of.ops + OPS_PER_LOOK };
                }
                last = now;
            }
        }
        Ok(())
    })?;
    figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
    figures_of_collections(&mut outcome, &gc);
    outcome.figure("far_peak_bytes", far_peak as f64);
    outcome.figure("misses_per_op_during", during.per_op());
    outcome.figure("misses_per_op_between", between.per_op());
    if during.ops > 0 && between.misses > 0 {
        outcome.figure("misses_during_over_between", during.per_op() / between.per_op());
    }
    outcome.checked(sum, 0);
    Ok(outcome)
}
