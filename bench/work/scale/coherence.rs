//! Ways to keep shared objects coherent, behind one contract: what a use of an object has to ask of whom.
//!
//! - [`Ownership`]: what `farfield-dsm` does. A reader fetches the object once for each version, a writer brings it to its node,
//!   and the value of a lock travels with the lock.
//! - [`Delegation`]: no copies; each use of an object goes to its home and back (Grappa, USENIX ATC 2015).
//! - [`Directory`](super::directory::Directory): blocks with a directory at their home (GAM, VLDB 2018).
//!
//! A state changes when a use begins, not when its messages arrive.

use super::engine::written_objects;
use super::trace::{ByteRange, ObjectId, Trace};

/// Question to a node, and the way of its answer.
#[derive(Clone, Debug)]
pub(super) struct Trip {
    pub(super) path: TripPath,
    /// Messages that go this way together.
    pub(super) messages: u64,
    /// Nodes that the first one asks before it goes on: a bit for each.
    pub(super) fan: u32,
    request_bytes: u64,
    answer_bytes: u64,
}

/// Nodes to which a trip leads, in order; the last one is where it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TripPath {
    first: u16,
    /// Node that the first one sends on to.
    between: Option<u16>,
    home: u16,
}

impl TripPath {
    /// Returns the place of the last node.
    pub(super) fn last(self) -> usize {
        if self.between.is_some() { 2 } else { 1 }
    }

    pub(super) fn node(self, place: usize) -> u16 {
        match (place, self.between) {
            (0, _) => self.first,
            (1, Some(between)) => between,
            _ => self.home,
        }
    }
}

impl Trip {
    /// Returns a trip from a node to another one and back that brings so many bytes, in pieces if there are many.
    pub(super) fn fetch(to: u16, from: u16, bytes: u32) -> Trip {
        let messages = u64::from(bytes).div_ceil(farfield_dsm::VALUE_BYTES_MAX as u64).max(1);
        Trip::round(to, from, messages, 0, bytes.into())
    }

    /// Returns a trip from a node to another one and back.
    pub(super) fn round(to: u16, from: u16, messages: u64, request_bytes: u64, answer_bytes: u64) -> Trip {
        let path = TripPath { first: to, between: None, home: from };
        Trip { path, messages, fan: 0, request_bytes, answer_bytes }
    }

    /// Sends the trip to another node before it goes back.
    pub(super) fn through(self, between: u16) -> Trip {
        Trip { path: TripPath { between: Some(between), ..self.path }, ..self }
    }

    /// Has the first node ask others before the trip goes on.
    pub(super) fn fan_out(self, fan: u32) -> Trip {
        Trip { fan, ..self }
    }

    /// Returns the bytes that go to a place on the path.
    pub(super) fn bytes(&self, place: usize) -> u64 {
        match place {
            0 => self.request_bytes,
            _ if place == self.path.last() => self.answer_bytes,
            _ => 0,
        }
    }
}

/// Messages that a use of an object needs.
#[derive(Default, Debug)]
pub(super) struct Fetch {
    /// Trips that the task waits for.
    pub(super) trips: Vec<Trip>,
    /// Object of which all tasks of the node have a copy when the trips are over.
    pub(super) copy: Option<ObjectId>,
    /// Node that is told later that the object has left it.
    pub(super) left: Option<u16>,
}

/// Place at which a task holds a lock.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum LockProtocol {
    /// The lock is given out at its home, with its value.
    AtHome,
    /// Whoever had the lock last has its value.
    Cached,
    /// The task goes on at the lock's home.
    Delegated,
}

/// Way to keep objects coherent.
pub(super) trait Coherence {
    fn lock_protocol(&self) -> LockProtocol;
    fn home(&self, object: ObjectId) -> u16;
    fn whole(&self, object: ObjectId) -> ByteRange;
    fn read(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch;
    fn write(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch;

    /// Returns what to fetch before it is read; `None` if copies are of no use.
    fn prefetch(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Option<Fetch> {
        Some(self.read(node, object, range))
    }

    /// Records that a copy has arrived.
    fn arrived(&mut self, _node: u16, _object: ObjectId) {}
}

/// Returns all bytes of an object.
pub(super) fn whole_object(trace: &Trace, object: ObjectId) -> ByteRange {
    ByteRange { begin: 0, len: trace.objects[object.index()].bytes }
}

/// One owner, or copies of the version that the owner names.
pub(super) struct Ownership<'t> {
    trace: &'t Trace,
    homes: Vec<u16>,
    /// Nodes that have a copy of the last version: a bit for each.
    copies: Vec<u32>,
}

impl<'t> Ownership<'t> {
    pub(super) fn new(trace: &'t Trace) -> Ownership<'t> {
        let homes = trace.objects.iter().map(|object| object.home).collect();
        Ownership { trace, homes, copies: trace.objects.iter().map(|object| object.readers).collect() }
    }
}

impl Coherence for Ownership<'_> {
    fn lock_protocol(&self) -> LockProtocol {
        LockProtocol::AtHome
    }

    fn home(&self, object: ObjectId) -> u16 {
        self.homes[object.index()]
    }

    fn whole(&self, object: ObjectId) -> ByteRange {
        whole_object(self.trace, object)
    }

    fn read(&mut self, node: u16, object: ObjectId, _range: ByteRange) -> Fetch {
        let home = self.home(object);
        if home == node || self.copies[object.index()] & 1 << node != 0 {
            return Fetch::default();
        }
        let trips = vec![Trip::fetch(home, node, self.whole(object).len)];
        Fetch { trips, copy: Some(object), left: None }
    }

    fn write(&mut self, node: u16, object: ObjectId, _range: ByteRange) -> Fetch {
        let home = self.home(object);
        self.copies[object.index()] = 0;
        if home == node {
            return Fetch::default();
        }
        self.homes[object.index()] = node;
        let trips = vec![Trip::fetch(home, node, self.whole(object).len)];
        Fetch { trips, copy: None, left: Some(home) }
    }

    fn arrived(&mut self, node: u16, object: ObjectId) {
        self.copies[object.index()] |= 1 << node;
    }
}

/// Each use at the home.
pub(super) struct Delegation<'t> {
    trace: &'t Trace,
    /// Objects that each node has: tables of words that nobody writes to stand for addresses that can be computed.
    is_everywhere: Vec<bool>,
}

impl<'t> Delegation<'t> {
    pub(super) fn new(trace: &'t Trace) -> Delegation<'t> {
        let written = written_objects(trace);
        let is_everywhere = (0..).zip(&trace.objects);
        let is_everywhere =
            is_everywhere.map(|(id, object)| object.owns_others && !written.contains(&ObjectId(id))).collect();
        Delegation { trace, is_everywhere }
    }

    fn is_there(&self, node: u16, object: ObjectId) -> bool {
        self.home(object) == node || self.is_everywhere[object.index()]
    }
}

impl Coherence for Delegation<'_> {
    fn lock_protocol(&self) -> LockProtocol {
        LockProtocol::Delegated
    }

    fn home(&self, object: ObjectId) -> u16 {
        self.trace.objects[object.index()].home
    }

    fn whole(&self, object: ObjectId) -> ByteRange {
        whole_object(self.trace, object)
    }

    fn read(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch {
        if self.is_there(node, object) {
            return Fetch::default();
        }
        Fetch { trips: vec![Trip::fetch(self.home(object), node, range.len)], ..Fetch::default() }
    }

    fn write(&mut self, node: u16, object: ObjectId, range: ByteRange) -> Fetch {
        if self.is_there(node, object) {
            return Fetch::default();
        }
        // What is written was read before: it comes, and goes back.
        let bytes = range.len.into();
        Fetch { trips: vec![Trip::round(self.home(object), node, 1, bytes, bytes)], ..Fetch::default() }
    }

    fn prefetch(&mut self, _node: u16, _object: ObjectId, _range: ByteRange) -> Option<Fetch> {
        None
    }
}
