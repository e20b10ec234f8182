//! `FarSet` and `FarBTreeSet` are `HashSet` and `BTreeSet`, wherever their values are. Dangers: a value that is there twice, or
//! replaced by an equal one; a value that is lost when it is given back; ranges and visits that leave values out.

use crate::common::{Rng, heap, seed};
use farfield::{FarBTreeSet, FarSet, Heap};
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Ordered and hashed by its number alone, so that two equal ones can be told apart.
#[derive(Clone, Debug)]
struct Tagged {
    number: u64,
    tag: u64,
    _bulk: [u64; 30],
}

impl Tagged {
    fn new(number: u64, tag: u64) -> Tagged {
        Tagged { number, tag, _bulk: [number; 30] }
    }
}

impl PartialEq for Tagged {
    fn eq(&self, other: &Tagged) -> bool {
        self.number == other.number
    }
}

impl Eq for Tagged {}

impl std::hash::Hash for Tagged {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}

impl PartialOrd for Tagged {
    fn partial_cmp(&self, other: &Tagged) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Tagged {
    fn cmp(&self, other: &Tagged) -> std::cmp::Ordering {
        self.number.cmp(&other.number)
    }
}

impl std::borrow::Borrow<u64> for Tagged {
    fn borrow(&self) -> &u64 {
        &self.number
    }
}

#[test]
fn sets_with_a_quarter_near_are_std_sets() {
    let heap = heap(3);
    let mut random = Rng::with_seed(seed());
    let (hashed, mut ordered) = (FarSet::<Tagged>::new(&heap).unwrap(), FarBTreeSet::new());
    let (mut hashed_twin, mut ordered_twin) = (HashSet::new(), BTreeSet::new());
    let numbers = 32_000;
    for step in 0..40_000 {
        let (number, scope) = (random.u64(..numbers), heap.enter());
        match random.usize(..8) {
            0..5 => {
                let value = Tagged::new(number, step);
                assert_eq!(hashed.insert(&scope, value.clone()).unwrap(), hashed_twin.insert(value.clone()));
                assert_eq!(ordered.insert(&scope, value.clone()).unwrap(), ordered_twin.insert(value));
            }
            5 => {
                assert_eq!(hashed.remove(&scope, &number).unwrap(), hashed_twin.remove(&number));
                let taken = ordered.take(&scope, &number).unwrap().map(|value| value.tag);
                assert_eq!(taken, ordered_twin.take(&number).map(|value| value.tag));
            }
            6 => {
                let tag = |value: Option<&Tagged>| value.map(|value| value.tag);
                assert_eq!(tag(hashed.get(&scope, &number).unwrap()), tag(hashed_twin.get(&number)));
                assert_eq!(tag(ordered.get(&scope, &number).unwrap()), tag(ordered_twin.get(&number)));
                assert_eq!(hashed.contains(&scope, &number).unwrap(), hashed_twin.contains(&number));
                assert_eq!(ordered.contains(&scope, &number).unwrap(), ordered_twin.contains(&number));
            }
            _ => {
                let range = number..number + 40;
                let found = ordered.range::<u64, _>(&scope, range.clone()).unwrap().rev();
                let found: Vec<_> = found.map(|value| value.unwrap().tag).collect();
                let twins: Vec<_> = ordered_twin.range::<u64, _>(range).rev().map(|value| value.tag).collect();
                assert_eq!(found, twins);
            }
        }
    }
    all_are_alike(&heap, &hashed, &hashed_twin, &mut ordered, &mut ordered_twin);
    heap.verify();
}

fn all_are_alike(
    heap: &Heap,
    hashed: &FarSet<Tagged>,
    hashed_twin: &HashSet<Tagged>,
    ordered: &mut FarBTreeSet<Tagged>,
    ordered_twin: &mut BTreeSet<Tagged>,
) {
    let mut scope = heap.enter();
    let (mut found, mut twins) = (Vec::new(), Vec::from_iter(hashed_twin.iter().map(|value| value.tag)));
    hashed.for_each(&mut scope, |value| found.push(value.tag)).unwrap();
    found.sort_unstable();
    twins.sort_unstable();
    assert!(found == twins && found.len() as u64 == hashed.len());

    hashed.retain(&mut scope, |value| value.number % 3 == 0).unwrap();
    assert_eq!(hashed.len(), hashed_twin.iter().filter(|value| value.number % 3 == 0).count() as u64);
    hashed.clear(&mut scope).unwrap();
    assert!(hashed.is_empty());

    let mut found = Vec::new();
    ordered.for_each(&mut scope, |value| found.push(value.tag)).unwrap();
    assert!(found.iter().eq(ordered_twin.iter().map(|value| &value.tag)) && found.len() == ordered.len());
    let ends = |first: Option<&Tagged>, last: Option<&Tagged>| [first, last].map(|value| value.map(|value| value.tag));
    let far_ends = ends(ordered.first(&scope).unwrap(), ordered.last(&scope).unwrap());
    assert_eq!(far_ends, ends(ordered_twin.first(), ordered_twin.last()));
    for _ in 0..100 {
        scope.renew();
        let tag = |value: Option<Tagged>| value.map(|value| value.tag);
        assert_eq!(tag(ordered.pop_first(&scope).unwrap()), tag(ordered_twin.pop_first()));
        assert_eq!(tag(ordered.pop_last(&scope).unwrap()), tag(ordered_twin.pop_last()));
    }
    ordered.clear();
    assert!(ordered.is_empty() && ordered.first(&scope).unwrap().is_none());
}

/// A value that is there already is dropped, and so are all in the end.
#[test]
fn equal_values_are_dropped_once() {
    #[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
    struct Counted(Arc<u64>);
    let heap = heap(3);
    let values: Vec<_> = (0..1000).map(Arc::new).collect();
    let (hashed, mut ordered) = (FarSet::new(&heap).unwrap(), FarBTreeSet::new());
    for round in 0..3 {
        let mut scope = heap.enter();
        for value in &values {
            assert_eq!(hashed.insert(&scope, Counted(value.clone())).unwrap(), round == 0);
            assert_eq!(ordered.insert(&scope, Counted(value.clone())).unwrap(), round == 0);
            scope.renew();
        }
    }
    assert!(values.iter().all(|value| Arc::strong_count(value) == 3));
    drop((hashed, ordered));
    assert!(values.iter().all(|value| Arc::strong_count(value) == 1));
}
