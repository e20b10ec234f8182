//! Objects in a `FarFlatMap`, whose index is far with them: near memory holds few of either.

use super::{Gets, OBJECT_BYTES, Object, Peer, bytes_of, object};
use crate::random::mix;
use anyhow::{Context, Result};
use farfield::{FarFlatMap, Heap};

/// Inserts in one scope.
const OPS_PER_SCOPE: u64 = 64;

/// 16 bytes.
type Key = [u64; 2];

pub(super) struct FlatMap<'h> {
    heap: &'h Heap,
    map: FarFlatMap<Key, [u8; OBJECT_BYTES]>,
    /// Keys that are looked up together.
    at_once: u64,
}

fn key(number: u64) -> Key {
    [number, mix(number)]
}

impl FlatMap<'_> {
    pub(super) fn new(heap: &Heap, at_once: u64) -> FlatMap<'_> {
        FlatMap { heap, map: FarFlatMap::new(), at_once }
    }
}

impl Peer for FlatMap<'_> {
    fn fill(&mut self, count: u64, seed: u64) -> Result<()> {
        for first in (0..count).step_by(OPS_PER_SCOPE as usize) {
            let scope = self.heap.enter();
            for number in first..count.min(first + OPS_PER_SCOPE) {
                let object: Object = object(number, seed);
                self.map.insert(&scope, key(number), bytes_of(&object))?;
            }
        }
        Ok(())
    }

    fn get(&mut self, gets: &mut Gets) -> Result<()> {
        loop {
            let numbers: Vec<u64> = (0..self.at_once).map_while(|_| gets.next()).collect();
            if numbers.is_empty() {
                return Ok(());
            }
            let keys: Vec<Key> = numbers.iter().map(|number| key(*number)).collect();
            let found = self.map.get_many(&self.heap.enter(), &keys)?;
            for (number, object) in numbers.iter().zip(found) {
                gets.arrived(*number, &object.context("the map has lost an object")?);
            }
        }
    }
}
