//! GCBench (Ellis, Kovac and Boehm): trees of depths from 4 to 16 are made and dropped, from the top down and from the bottom up,
//! beside a tree that lives and a large array of numbers. Of each depth and each way there are about as many nodes.
//!
//! In plain memory nodes are behind `Arc`, or in a library of garbage collection (feature `collectors`).

#[cfg(feature = "collectors")]
mod arena;
#[cfg(feature = "collectors")]
mod counted;

use crate::collected::{Tree, collected, figures_of_collections, make_tree, sum_of_tree};
use crate::random::mix;
use crate::{Options, Outcome, figures_of};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use farfield_gc::{Gc, GcError, Mutator, Root};
use std::sync::Arc;

/// Depths of the trees that are dropped.
const DEPTHS: [u32; 7] = [4, 6, 8, 10, 12, 14, 16];
/// Numbers of the array, and the part of the data that they take at most.
const NUMBERS: u64 = 500_000;
const NUMBERS_PART: u64 = 16;
/// Bytes of a node in the collected heap, with its entry.
const NODE_BYTES: u64 = 40;
/// Depth of a tree that is made bottom up between two safepoints.
const STEP_DEPTH: u32 = 5;

/// What frees objects in plain memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Library {
    /// Owners who are counted: std.
    Arc,
    /// An incremental collector of one thread.
    GcArena,
    /// Owners who are counted, and a collector of cycles.
    Dumpster,
}

/// Order in which the nodes of a tree are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// A node before the two that it leads to.
    TopDown,
    BottomUp,
}

/// Trees in some kind of memory. Nodes have the number of their place.
trait Forest {
    /// Makes a tree, drops it, and returns the sum of the numbers of its first three nodes.
    fn make(&mut self, depth: u32, order: Order, seed: u64) -> Result<u64>;
    /// Makes what lives until the end.
    fn keep(&mut self, depth: u32, numbers: u64, seed: u64) -> Result<()>;
    /// Returns the sum of all numbers of the tree that lives, and that of the bits of the array's.
    fn kept(&mut self) -> Result<[u64; 2]>;
}

/// Number of a node on the first or second side of one.
fn number_of_side(number: u64, side: u64) -> u64 {
    mix(number ^ side)
}

/// Element of the array: the first half is set.
fn number_at(at: usize, count: usize) -> f64 {
    if at < count / 2 { 1.0 / (at + 1) as f64 } else { 0.0 }
}

fn sum_of_bits(numbers: &[f64]) -> u64 {
    numbers.iter().fold(0, |sum: u64, number| sum.wrapping_add(number.to_bits()))
}

fn node_count(depth: u32) -> u64 {
    (2 << depth) - 1
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    if let Some((heap, gc)) = collected(options, options.data_bytes())? {
        let mut forest = CollectedForest { m: gc.enter(), kept: None };
        let mut outcome = use_forest(options, &mut forest)?;
        drop(forest);
        figures_of(&mut outcome, &heap.stats(), 0);
        figures_of_collections(&mut outcome, &gc);
        return Ok(outcome);
    }
    match options.library {
        Library::Arc => use_forest(options, &mut PlainForest::default()),
        #[cfg(feature = "collectors")]
        Library::GcArena => use_forest(options, &mut arena::ArenaForest::new()),
        #[cfg(feature = "collectors")]
        Library::Dumpster => use_forest(options, &mut counted::DumpsterForest::default()),
        #[cfg(not(feature = "collectors"))]
        _ => anyhow::bail!("build farfield-bench with --features collectors"),
    }
}

fn use_forest(options: &Options, forest: &mut impl Forest) -> Result<Outcome> {
    let (mut outcome, seed) = (Outcome::new(), options.seed);
    let numbers = NUMBERS.min(options.data_bytes() / NUMBERS_PART / 8);
    let long_depth = ((options.data_bytes() - numbers * 8) / NODE_BYTES).ilog2() - 1;
    outcome.phase("fill", node_count(long_depth), || forest.keep(long_depth, numbers, seed))?;
    let nodes_each = options.ops / (2 * DEPTHS.len() as u64);
    let trees_of = |depth| (nodes_each / node_count(depth)).max(1);
    let nodes = DEPTHS.map(|depth| 2 * trees_of(depth) * node_count(depth)).iter().sum();
    let sum = outcome.phase("trees", nodes, || -> Result<u64> {
        let mut sum = 0u64;
        for depth in DEPTHS {
            for order in [Order::TopDown, Order::BottomUp] {
                for tree in 0..trees_of(depth) {
                    sum = sum.wrapping_add(forest.make(depth, order, seed ^ tree << 8 ^ u64::from(depth))?);
                }
            }
        }
        Ok(sum)
    })?;
    let kept = forest.kept()?;
    let expected = sum_of_bits(&(0..numbers as usize).map(|at| number_at(at, numbers as usize)).collect::<Vec<_>>());
    ensure!(kept[1] == expected, "the array has other numbers");
    outcome.checked(mix(sum ^ kept[0]), 0);
    Ok(outcome)
}

struct PlainNode {
    number: u64,
    sides: Option<[Arc<PlainNode>; 2]>,
}

impl PlainNode {
    fn leaf(number: u64) -> Arc<PlainNode> {
        Arc::new(PlainNode { number, sides: None })
    }

    fn bottom_up(number: u64, depth: u32) -> Arc<PlainNode> {
        let side = |side| PlainNode::bottom_up(number_of_side(number, side), depth - 1);
        Arc::new(PlainNode { number, sides: (depth > 0).then(|| [side(1), side(2)]) })
    }

    /// Gives a leaf so much below it.
    fn populate(node: &mut Arc<PlainNode>, depth: u32) {
        if depth == 0 {
            return;
        }
        let node = Arc::get_mut(node).unwrap_or_else(|| unreachable!("a new node has one owner"));
        let sides = [1, 2].map(|side| PlainNode::leaf(number_of_side(node.number, side)));
        node.sides.insert(sides).iter_mut().for_each(|side| PlainNode::populate(side, depth - 1));
    }

    fn sum(&self, depth: u32) -> u64 {
        let sides = self.sides.iter().flatten().filter(|_| depth > 0);
        sides.fold(self.number, |sum, side| sum.wrapping_add(side.sum(depth - 1)))
    }
}

#[derive(Default)]
struct PlainForest {
    kept: Option<(Arc<PlainNode>, Vec<f64>)>,
}

impl Forest for PlainForest {
    fn make(&mut self, depth: u32, order: Order, seed: u64) -> Result<u64> {
        let tree = match order {
            Order::BottomUp => PlainNode::bottom_up(seed, depth),
            Order::TopDown => {
                let mut tree = PlainNode::leaf(seed);
                PlainNode::populate(&mut tree, depth);
                tree
            }
        };
        Ok(tree.sum(1))
    }

    fn keep(&mut self, depth: u32, numbers: u64, seed: u64) -> Result<()> {
        let count = numbers as usize;
        self.kept = Some((PlainNode::bottom_up(seed, depth), (0..count).map(|at| number_at(at, count)).collect()));
        Ok(())
    }

    fn kept(&mut self) -> Result<[u64; 2]> {
        let (tree, numbers) = self.kept.as_ref().context("nothing lives")?;
        Ok([tree.sum(u32::MAX), sum_of_bits(numbers)])
    }
}

struct CollectedForest<'gc> {
    m: Mutator<'gc>,
    kept: Option<(Root<Tree>, Root<[f64]>)>,
}

impl Forest for CollectedForest<'_> {
    fn make(&mut self, depth: u32, order: Order, seed: u64) -> Result<u64> {
        let m = &mut self.m;
        let tree = match order {
            Order::TopDown => make_tree(m, depth, seed)?,
            Order::BottomUp => bottom_up(m, depth, seed)?,
        };
        Ok(m.with_room(|m| {
            let tree = m.get(&tree)?;
            let mut sum = tree.number();
            for side in tree.sides() {
                sum = sum.wrapping_add(side.load(m)?.map_or(0, |side| side.number()));
            }
            Ok(sum)
        })?)
    }

    fn keep(&mut self, depth: u32, numbers: u64, seed: u64) -> Result<()> {
        let count = numbers as usize;
        let tree = make_tree(&mut self.m, depth, seed)?;
        let numbers = self.m.with_room(|m| Ok(m.root(m.alloc_array(count, |at| number_at(at, count))?)))?;
        self.kept = Some((tree, numbers));
        Ok(())
    }

    fn kept(&mut self) -> Result<[u64; 2]> {
        let (tree, numbers) = self.kept.as_ref().context("nothing lives")?;
        let sum = sum_of_tree(&mut self.m, tree)?;
        Ok([sum, self.m.with_room(|m| Ok(sum_of_bits(&m.get(numbers)?)))?])
    }
}

/// Makes a tree bottom up: what is made between two safepoints has no root before it is complete.
fn bottom_up(m: &mut Mutator<'_>, depth: u32, number: u64) -> Result<Root<Tree>, GcError> {
    if depth <= STEP_DEPTH {
        let tree = m.with_room(|m| Ok(m.root(grow_up(m, depth, number)?)))?;
        m.safepoint()?;
        return Ok(tree);
    }
    let first = bottom_up(m, depth - 1, number_of_side(number, 1))?;
    let second = bottom_up(m, depth - 1, number_of_side(number, 2))?;
    m.with_room(|m| {
        let tree = m.alloc(Tree::leaf(number))?;
        for (side, below) in tree.sides().iter().zip([&first, &second]) {
            side.store(m, Some(m.get(below)?));
        }
        Ok(m.root(tree))
    })
}

fn grow_up<'m>(m: &'m Mutator<'_>, depth: u32, number: u64) -> Result<Gc<'m, Tree>, GcError> {
    if depth == 0 {
        return Ok(m.alloc(Tree::leaf(number))?);
    }
    let first = grow_up(m, depth - 1, number_of_side(number, 1))?;
    let second = grow_up(m, depth - 1, number_of_side(number, 2))?;
    let tree = m.alloc(Tree::leaf(number))?;
    tree.sides().iter().zip([first, second]).for_each(|(side, below)| side.store(m, Some(below)));
    Ok(tree)
}
