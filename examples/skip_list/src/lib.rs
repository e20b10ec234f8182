//! A far collection of one's own: a skip list (Pugh 1990) whose range sums are computed beside it, and
//! whose values are replaced there.
//!
//! It uses nothing but the public interface of `farfield`. The memory server loads this crate:
//! `farfield serve --functions target/release/libskip_list.so`. The guide goes through it:
//! `docs/guide/functions.md`.

use farfield::{
    AllocError, AtServer, AtServerMut, FarBox, FarError, FarFunction, FarFunctionMut, FarMut, FarPlace, FarPlaceMut,
    FarRef, FarView, FarViewMut, Fault, Heap, OffloadError, Scope, Where,
};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use std::ops::{Bound, RangeBounds};

farfield_plugin::export!(AtServer<RangeTotals>, AtServerMut<Replace>);

/// Levels of the list. With four nodes to one of the level above, they suffice for 16 million keys.
const LEVELS: usize = 12;

/// A node of one level. Its *interval* begins at its key and ends before the next node of its level.
///
/// Each node has one owner: the node before it, or the node above it if it is the first one of an
/// interval. So a level is cut into the intervals of the level above, and nothing is shared.
#[derive(FarView, FarViewMut)]
pub struct Node {
    key: u64,
    /// Number of keys in the interval.
    count: u64,
    /// Sum of their values.
    sum: i64,
    /// The next node of this level, unless it lies in another interval of the level above.
    next: Option<FarBox<Node>>,
    /// The first node of the interval, one level below.
    down: Option<FarBox<Node>>,
}

/// Number of keys in a range, and the sum of their values, which wraps around.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Totals {
    /// Number of keys.
    pub count: u64,
    /// Sum of the values.
    pub sum: i64,
}

impl Totals {
    fn plus(self, other: Totals) -> Totals {
        Totals { count: self.count.wrapping_add(other.count), sum: self.sum.wrapping_add(other.sum) }
    }

    fn minus(self, other: Totals) -> Totals {
        Totals { count: self.count.wrapping_sub(other.count), sum: self.sum.wrapping_sub(other.sum) }
    }
}

/// Computes the totals of a range of keys, at the client or at the memory server.
pub struct RangeTotals;

impl FarFunction for RangeTotals {
    const NAME: &'static str = "skip_list.range_totals";
    const VERSION: u32 = 1;
    type Root = Node;
    /// The smallest key of the range, and the first one behind it.
    type Argument = (u128, u128);
    type Answer = Totals;

    async fn run<P: FarPlace>(far: &P, head: FarRef<'_, Node>, (from, to): (u128, u128)) -> Result<Totals, Fault> {
        if from >= to {
            return Ok(Totals::default());
        }
        Ok(totals_before(far, head, to).await?.minus(totals_before(far, head, from).await?))
    }
}

/// Computes the totals of all keys before this one.
async fn totals_before<P: FarPlace>(far: &P, head: FarRef<'_, Node>, key: u128) -> Result<Totals, Fault> {
    let mut totals = Totals::default();
    let mut node = far.follow(head).await?;
    loop {
        if let Some(pointer) = node.next {
            let next = far.follow(pointer).await?;
            if u128::from(next.key) < key {
                // All of the node's interval lies before the key.
                totals = totals.plus(Totals { count: node.count, sum: node.sum });
                node = next;
                continue;
            }
        }
        match node.down {
            Some(pointer) => node = far.follow(pointer).await?,
            // On the lowest level, an interval is one key.
            None => return Ok(totals.plus(Totals { count: node.count, sum: node.sum })),
        }
    }
}

/// Replaces the value of a key that is there, at the client or at the memory server. Returns the one
/// before.
pub struct Replace;

impl FarFunctionMut for Replace {
    const NAME: &'static str = "skip_list.replace";
    const VERSION: u32 = 1;
    type Root = Node;
    /// The key, and its new value.
    type Argument = (u64, i64);
    type Answer = Option<i64>;

    async fn run<P: FarPlaceMut>(
        far: &P,
        head: FarMut<'_, Node>,
        (key, value): (u64, i64),
    ) -> Result<Option<i64>, Fault> {
        // On each level, the node whose interval has the key.
        let (mut path, mut pointer, mut is_head) = (Vec::with_capacity(LEVELS), head, true);
        let old = loop {
            let node = far.follow_mut(pointer).await?;
            if let Some(next) = node.next
                && far.follow_mut(next).await?.key <= key
            {
                (pointer, is_head) = (next, false);
                continue;
            }
            path.push(pointer);
            match node.down {
                Some(down) => pointer = down,
                None if is_head || node.key != key => return Ok(None),
                None => break node.sum,
            }
        };
        for pointer in path {
            far.change(pointer, |node| node.sum = node.sum.wrapping_add(value.wrapping_sub(old))).await?;
        }
        Ok(Some(old))
    }
}

/// An ordered map from keys to numbers, near or far, with the sum of any range in one round trip.
pub struct SkipList<'h> {
    heap: &'h Heap,
    /// First node of the highest level. Its key does not count: it comes before all others.
    head: FarBox<Node>,
    /// Source of the heights of new towers.
    random: Rng,
}

/// Result of a search.
struct Search {
    /// For each level, the totals of all keys before the interval of the last node before the key.
    before: [Totals; LEVELS],
    /// Totals of all keys before the key.
    all_before: Totals,
    /// The highest level on which the key has a node, and its value.
    found: Option<(usize, i64)>,
}

impl<'h> SkipList<'h> {
    /// Makes an empty list.
    pub fn new(heap: &'h Heap) -> Result<SkipList<'h>, FarError> {
        let head = tower(heap, 0, Totals::default(), LEVELS)?;
        Ok(SkipList { heap, head, random: Rng::with_seed(1990) })
    }

    /// Puts a value in. Returns the one that the key had.
    pub fn insert(&mut self, key: u64, value: i64) -> Result<Option<i64>, FarError> {
        let scope = self.heap.enter();
        let search = self.search(&scope, key)?;
        if let Some((level, old)) = search.found {
            let change = Totals { count: 0, sum: value.wrapping_sub(old) };
            let mut node = self.descend(&scope, key, level, change)?;
            let mut below = &mut node.next;
            while let Some(pointer) = below {
                node = pointer.get_mut(&scope)?;
                node.set(node.totals().plus(change));
                below = &mut node.down;
            }
            return Ok(Some(old));
        }

        // What can fail comes first: the new nodes are made, and the scope keeps them near.
        let own = Totals { count: 1, sum: value };
        let height = (self.random.u64(..).trailing_zeros() as usize / 2 + 1).min(LEVELS);
        let mut new = tower(self.heap, key, own, height)?;
        touch(&new, &scope)?;
        let left = self.descend(&scope, key, height - 1, own)?;
        split(left, new.get_mut(&scope)?, &scope, height - 1, &search, own)?;
        left.next = Some(new);
        Ok(None)
    }

    /// Removes a key. Returns its value.
    pub fn remove(&mut self, key: u64) -> Result<Option<i64>, FarError> {
        let scope = self.heap.enter();
        let Some((level, value)) = self.search(&scope, key)?.found else { return Ok(None) };
        let own = Totals { count: 1, sum: value };
        let left = self.descend(&scope, key, level, Totals::default().minus(own))?;
        if let Some(mut gone) = left.next.take() {
            merge(left, gone.get_mut(&scope)?, &scope, own)?;
        }
        Ok(Some(value))
    }

    /// Returns the value of a key.
    pub fn get(&self, key: u64) -> Result<Option<i64>, FarError> {
        Ok(self.search(&self.heap.enter(), key)?.found.map(|(_, value)| value))
    }

    /// Computes the totals of a range of keys at this place: with [`Where::Server`] in one round
    /// trip. Fails if the range is far and the pool is gone, and with `Where::Server` also if the
    /// server does not have this crate.
    pub fn range(&self, keys: impl RangeBounds<u64>, at: Where) -> Result<Totals, OffloadError> {
        let from = match keys.start_bound() {
            Bound::Included(key) => u128::from(*key),
            Bound::Excluded(key) => u128::from(*key) + 1,
            Bound::Unbounded => 0,
        };
        let to = match keys.end_bound() {
            Bound::Included(key) => u128::from(*key) + 1,
            Bound::Excluded(key) => u128::from(*key),
            Bound::Unbounded => 1 << 64,
        };
        self.heap.call::<RangeTotals>(&self.head, (from, to)).at(at).run()
    }

    /// Replaces the value of a key at this place, and returns the one before; `None` if the key is not
    /// there, and nothing changes. Fails as [`SkipList::range`] does, with nothing changed.
    pub fn replace(&mut self, key: u64, value: i64, at: Where) -> Result<Option<i64>, OffloadError> {
        self.heap.call_mut::<Replace>(&mut self.head, (key, value)).at(at).run()
    }

    /// Looks for a key. All nodes that a change of this key would meet are near afterwards, as long
    /// as the scope lasts, so such a change does not fail midway.
    fn search(&self, scope: &Scope<'_>, key: u64) -> Result<Search, FarError> {
        let mut search = Search { before: [Totals::default(); LEVELS], all_before: Totals::default(), found: None };
        let (mut node, mut passed) = (self.head.get(scope)?, Totals::default());
        for level in (0..LEVELS).rev() {
            while let Some(next) = &node.next {
                let next = next.get(scope)?;
                if next.key >= key {
                    if next.key == key && search.found.is_none() {
                        search.found = Some((level, touch_below(next, scope)?.sum));
                    }
                    break;
                }
                passed = passed.plus(node.totals());
                node = next;
            }
            search.before[level] = passed;
            match &node.down {
                Some(down) => node = down.get(scope)?,
                None => search.all_before = passed.plus(node.totals()),
            }
        }
        Ok(search)
    }

    /// Adds a change of this key to the intervals of the levels above this one. Returns the last
    /// node before the key on this level.
    fn descend<'s>(
        &'s mut self,
        scope: &'s Scope<'_>,
        key: u64,
        level: usize,
        change: Totals,
    ) -> Result<&'s mut Node, FarError> {
        let mut node = last_before(self.head.get_mut(scope)?, key, scope)?;
        for _ in level + 1..LEVELS {
            node.set(node.totals().plus(change));
            let Some(down) = &mut node.down else { unreachable!("each level but the lowest has one below") };
            node = last_before(down.get_mut(scope)?, key, scope)?;
        }
        Ok(node)
    }
}

impl Node {
    fn totals(&self) -> Totals {
        Totals { count: self.count, sum: self.sum }
    }

    fn set(&mut self, Totals { count, sum }: Totals) {
        (self.count, self.sum) = (count, sum);
    }
}

/// Makes a node for each of so many levels, each with these totals. Returns the highest one.
fn tower(heap: &Heap, key: u64, Totals { count, sum }: Totals, height: usize) -> Result<FarBox<Node>, FarError> {
    let node =
        |down| heap.alloc(Node { key, count, sum, next: None, down }).map_err(|error: AllocError<_>| error.error);
    (1..height).try_fold(node(None)?, |below, _| node(Some(below)))
}

/// Brings the nodes of a tower near. Returns the lowest one.
fn touch<'s>(top: &'s FarBox<Node>, scope: &'s Scope<'_>) -> Result<&'s Node, FarError> {
    touch_below(top.get(scope)?, scope)
}

fn touch_below<'s>(mut node: &'s Node, scope: &'s Scope<'_>) -> Result<&'s Node, FarError> {
    while let Some(down) = &node.down {
        node = down.get(scope)?;
    }
    Ok(node)
}

/// Returns the last node before a key, from this one of the same level on.
fn last_before<'s>(mut node: &'s mut Node, key: u64, scope: &'s Scope<'_>) -> Result<&'s mut Node, FarError> {
    loop {
        let is_last = match &node.next {
            Some(next) => next.get(scope)?.key >= key,
            None => true,
        };
        if is_last {
            return Ok(node);
        }
        let Some(next) = &mut node.next else { unreachable!("it was there") };
        node = next.get_mut(scope)?;
    }
}

/// Gives a new node the part of its left neighbour's interval that lies behind its key, and what it
/// has itself (`own`); the same on all levels below.
fn split(
    left: &mut Node,
    new: &mut Node,
    scope: &Scope<'_>,
    level: usize,
    search: &Search,
    own: Totals,
) -> Result<(), FarError> {
    let kept = search.all_before.minus(search.before[level]);
    new.set(left.totals().minus(kept).plus(own));
    left.set(kept);
    new.next = left.next.take();
    if let (Some(left), Some(new)) = (&mut left.down, &mut new.down) {
        let new = new.get_mut(scope)?;
        let left = last_before(left.get_mut(scope)?, new.key, scope)?;
        split(left, new, scope, level - 1, search, own)?;
    }
    Ok(())
}

/// Gives the interval of a node that goes to its left neighbour, except what it has itself (`own`);
/// the same on all levels below.
fn merge(left: &mut Node, gone: &mut Node, scope: &Scope<'_>, own: Totals) -> Result<(), FarError> {
    left.set(left.totals().plus(gone.totals()).minus(own));
    left.next = gone.next.take();
    if let (Some(left), Some(gone)) = (&mut left.down, &mut gone.down) {
        let gone = gone.get_mut(scope)?;
        merge(last_before(left.get_mut(scope)?, gone.key, scope)?, gone, scope, own)?;
    }
    Ok(())
}
