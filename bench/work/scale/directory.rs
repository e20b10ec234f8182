//! Blocks with a directory: each block is in the memory of its home and in any number of caches, or in one cache that has
//! written to it (MSI). As GAM (VLDB 2018), whose blocks have 512 bytes; a message asks for one block.

use super::coherence::{Coherence, Fetch, LockProtocol, Trip, whole_object};
use super::trace::{ByteRange, ObjectId, Trace};

/// Bytes of a block.
const BLOCK_BYTES: u64 = 512;
/// Bytes of the header of an object.
const OBJECT_HEADER_BYTES: u64 = 16;
/// Alignment of objects.
const ALIGN: u64 = 16;

/// State of a block at its home.
#[derive(Clone, Copy, Default, Debug)]
struct BlockState {
    /// Nodes that have a copy, beside the home: a bit for each.
    sharers: u32,
    /// Node that has written to it, if that is not the home.
    owner: Option<u16>,
}

/// Kind of trip that a block needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct BlockTrip {
    to: u16,
    through: Option<u16>,
    fan: u32,
    has_data: bool,
}

/// A home's directory says who has which block.
pub(super) struct Directory<'t> {
    trace: &'t Trace,
    /// Place of each object in the memory of its home.
    places: Vec<u64>,
    /// Blocks of each node.
    blocks: Vec<Vec<BlockState>>,
    /// Whether one message asks for all blocks of an access that are needed of a node.
    asks_for_many: bool,
}

impl<'t> Directory<'t> {
    pub(super) fn new(trace: &'t Trace, asks_for_many: bool) -> Directory<'t> {
        let mut ends = vec![0u64; trace.nodes.into()];
        let places = trace.objects.iter().map(|object| {
            let end = &mut ends[usize::from(object.home)];
            let place = *end + OBJECT_HEADER_BYTES;
            *end = (place + u64::from(object.bytes)).next_multiple_of(ALIGN);
            place
        });
        let places = places.collect();
        let blocks = ends.iter().map(|end| vec![BlockState::default(); end.div_ceil(BLOCK_BYTES) as usize]).collect();
        let mut directory = Directory { trace, places, blocks, asks_for_many };
        for (id, object) in (0..).zip(&trace.objects) {
            let range = ByteRange { begin: 0, len: object.bytes };
            directory.blocks_of(ObjectId(id), range).for_each(|block| block.sharers |= object.readers);
        }
        directory
    }

    fn blocks_of(&mut self, object: ObjectId, range: ByteRange) -> impl Iterator<Item = &mut BlockState> {
        let begin = self.places[object.index()] + u64::from(range.begin);
        let end = begin + u64::from(range.len);
        let blocks = if range.len == 0 { 0..0 } else { begin / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) };
        let home = usize::from(self.trace.objects[object.index()].home);
        self.blocks[home][blocks.start as usize..blocks.end as usize].iter_mut()
    }

    /// Uses some blocks. Returns the trips that they need.
    fn access(
        &mut self,
        node: u16,
        object: ObjectId,
        range: ByteRange,
        access: fn(&mut BlockState, node: u16, home: u16) -> Option<BlockTrip>,
    ) -> Vec<Trip> {
        let home = self.home(object);
        let mut kinds: Vec<(BlockTrip, u64)> = Vec::new();
        for block in self.blocks_of(object, range) {
            let Some(trip) = access(block, node, home) else { continue };
            match kinds.iter_mut().rev().find(|(kind, _)| *kind == trip) {
                Some((_, count)) => *count += 1,
                None => kinds.push((trip, 1)),
            }
        }
        let trip = |(BlockTrip { to, through, fan, has_data }, count)| {
            let messages = if self.asks_for_many { 1 } else { count };
            let trip = Trip::round(to, node, messages, 0, if has_data { count * BLOCK_BYTES } else { 0 }).fan_out(fan);
            through.map_or(trip.clone(), |owner| trip.through(owner))
        };
        kinds.into_iter().map(trip).collect()
    }
}

fn read_block(block: &mut BlockState, node: u16, home: u16) -> Option<BlockTrip> {
    let bit = 1 << node;
    if block.owner == Some(node)
        || (node != home && block.sharers & bit != 0)
        || (node == home && block.owner.is_none())
    {
        return None;
    }
    let owner = block.owner.take();
    // The owner keeps a copy.
    block.sharers |= owner.map_or(0, |owner| 1 << owner) | if node == home { 0 } else { bit };
    let (to, through) = match owner {
        Some(owner) if node == home => (owner, None),
        owner => (home, owner),
    };
    Some(BlockTrip { to, through, fan: 0, has_data: true })
}

fn write_block(block: &mut BlockState, node: u16, home: u16) -> Option<BlockTrip> {
    let bit = 1 << node;
    let BlockState { sharers, owner } = *block;
    if owner == Some(node) || (node == home && owner.is_none() && sharers == 0) {
        return None;
    }
    *block = BlockState { sharers: 0, owner: (node != home).then_some(node) };
    let others = sharers & !bit;
    Some(match owner {
        Some(owner) if node == home => BlockTrip { to: owner, through: None, fan: 0, has_data: true },
        Some(owner) => BlockTrip { to: home, through: Some(owner), fan: 0, has_data: true },
        // The home has all others drop their copies.
        None => BlockTrip { to: home, through: None, fan: others, has_data: node != home && sharers & bit == 0 },
    })
}

impl Coherence for Directory<'_> {
    fn lock_protocol(&self) -> LockProtocol {
        LockProtocol::Cached
    }

    fn home(&self, object: ObjectId) -> u16 {
        self.trace.objects[object.index()].home
    }

    fn whole(&self, object: ObjectId) -> ByteRange {
        whole_object(self.trace, object)
    }

    fn read(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch {
        let trips = self.access(node, object, range, read_block);
        // Who reads a part of an object does not have the rest.
        let copy = (range == self.whole(object) && !trips.is_empty()).then_some(object);
        Fetch { trips, copy, left: None }
    }

    fn write(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch {
        Fetch { trips: self.access(node, object, range, write_block), ..Fetch::default() }
    }
}
