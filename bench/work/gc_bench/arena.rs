//! Trees in gc-arena: an incremental collector of one thread, which works between two uses of its arena.

use super::{Forest, Order, number_at, number_of_side, sum_of_bits};
use anyhow::{Context, Result};
use gc_arena::barrier::unlock;
use gc_arena::lock::Lock;
use gc_arena::{Arena, Collect, Gc, Mutation, Rootable};

#[derive(Collect)]
#[collect(no_drop)]
struct Node<'gc> {
    number: u64,
    sides: Lock<Option<[NodePtr<'gc>; 2]>>,
}

type NodePtr<'gc> = Gc<'gc, Node<'gc>>;

fn leaf<'gc>(mutation: &Mutation<'gc>, number: u64) -> NodePtr<'gc> {
    Gc::new(mutation, Node { number, sides: Lock::new(None) })
}

fn bottom_up<'gc>(mutation: &Mutation<'gc>, number: u64, depth: u32) -> NodePtr<'gc> {
    let side = |side| bottom_up(mutation, number_of_side(number, side), depth - 1);
    let sides = (depth > 0).then(|| [side(1), side(2)]);
    Gc::new(mutation, Node { number, sides: Lock::new(sides) })
}

/// Gives a leaf so much below it.
fn populate<'gc>(mutation: &Mutation<'gc>, node: NodePtr<'gc>, depth: u32) {
    if depth == 0 {
        return;
    }
    let sides = [1, 2].map(|side| leaf(mutation, number_of_side(node.number, side)));
    unlock!(Gc::write(mutation, node), Node, sides).set(Some(sides));
    sides.into_iter().for_each(|side| populate(mutation, side, depth - 1));
}

fn sum(node: NodePtr<'_>, depth: u32) -> u64 {
    let sides = node.sides.get().filter(|_| depth > 0);
    sides.into_iter().flatten().fold(node.number, |all, side| all.wrapping_add(sum(side, depth - 1)))
}

/// What lives.
#[derive(Collect)]
#[collect(no_drop)]
struct Kept<'gc> {
    tree: Option<NodePtr<'gc>>,
    numbers: Vec<f64>,
}

pub(super) struct ArenaForest(Arena<Rootable![Kept<'_>]>);

impl ArenaForest {
    pub(super) fn new() -> ArenaForest {
        ArenaForest(Arena::new(|_| Kept { tree: None, numbers: Vec::new() }))
    }
}

impl Forest for ArenaForest {
    fn make(&mut self, depth: u32, order: Order, seed: u64) -> Result<u64> {
        let sum = self.0.mutate(|mutation, _| {
            let tree = match order {
                Order::BottomUp => bottom_up(mutation, seed, depth),
                Order::TopDown => {
                    let tree = leaf(mutation, seed);
                    populate(mutation, tree, depth);
                    tree
                }
            };
            sum(tree, 1)
        });
        self.0.collect_debt();
        Ok(sum)
    }

    fn keep(&mut self, depth: u32, numbers: u64, seed: u64) -> Result<()> {
        let count = numbers as usize;
        self.0.mutate_root(|mutation, kept| {
            kept.tree = Some(bottom_up(mutation, seed, depth));
            kept.numbers = (0..count).map(|at| number_at(at, count)).collect();
        });
        self.0.collect_debt();
        Ok(())
    }

    fn kept(&mut self) -> Result<[u64; 2]> {
        self.0.mutate(|_, kept| Ok([sum(kept.tree.context("nothing lives")?, u32::MAX), sum_of_bits(&kept.numbers)]))
    }
}
