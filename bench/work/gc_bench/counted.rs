//! Trees in dumpster, whose owners are counted, as those of `Arc` are, and which looks for cycles now and then. Threads could share
//! these.

use super::{Forest, Order, number_at, number_of_side, sum_of_bits};
use anyhow::{Context, Result};
use dumpster::Trace;
use dumpster::sync::Gc;
use std::sync::{Mutex, PoisonError};

#[derive(Trace)]
struct Node {
    number: u64,
    sides: Mutex<Option<(Gc<Node>, Gc<Node>)>>,
}

fn leaf(number: u64) -> Gc<Node> {
    Gc::new(Node { number, sides: Mutex::new(None) })
}

fn bottom_up(number: u64, depth: u32) -> Gc<Node> {
    let side = |side| bottom_up(number_of_side(number, side), depth - 1);
    Gc::new(Node { number, sides: Mutex::new((depth > 0).then(|| (side(1), side(2)))) })
}

/// Gives a leaf so much below it.
fn populate(node: &Node, depth: u32) {
    if depth == 0 {
        return;
    }
    let side = |side| leaf(number_of_side(node.number, side));
    let mut sides = node.sides.lock().unwrap_or_else(PoisonError::into_inner);
    let (first, second) = sides.insert((side(1), side(2)));
    populate(first, depth - 1);
    populate(second, depth - 1);
}

fn sum(node: &Node, depth: u32) -> u64 {
    let sides = node.sides.lock().unwrap_or_else(PoisonError::into_inner);
    match &*sides {
        Some((first, second)) if depth > 0 => {
            node.number.wrapping_add(sum(first, depth - 1)).wrapping_add(sum(second, depth - 1))
        }
        _ => node.number,
    }
}

#[derive(Default)]
pub(super) struct DumpsterForest {
    kept: Option<(Gc<Node>, Vec<f64>)>,
}

impl Forest for DumpsterForest {
    fn make(&mut self, depth: u32, order: Order, seed: u64) -> Result<u64> {
        let tree = match order {
            Order::BottomUp => bottom_up(seed, depth),
            Order::TopDown => {
                let tree = leaf(seed);
                populate(&tree, depth);
                tree
            }
        };
        Ok(sum(&tree, 1))
    }

    fn keep(&mut self, depth: u32, numbers: u64, seed: u64) -> Result<()> {
        let count = numbers as usize;
        self.kept = Some((bottom_up(seed, depth), (0..count).map(|at| number_at(at, count)).collect()));
        Ok(())
    }

    fn kept(&mut self) -> Result<[u64; 2]> {
        let (tree, numbers) = self.kept.as_ref().context("nothing lives")?;
        Ok([sum(tree, u32::MAX), sum_of_bits(numbers)])
    }
}
