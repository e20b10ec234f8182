//! Guards against walks over collections that differ at a server, in the heap and in std's
//! collections, and against bytes there that lead a walk astray: a length that is a lie, a node with
//! more entries than fit, a tree that bites its own tail.

use super::fold::{FarFold, FarFoldable, Fold, FoldEnd};
use super::function::{AtServer, FarAnswer, FarFunction};
use super::part::RootImage;
use super::place::{FarPlace, RegionStop};
use super::tests::{argument_of, region_of};
use super::view_traits::FarRef;
use crate::{
    FarArray, FarBTreeMap, FarBTreeSet, FarBox, FarBytes, FarError, FarList, FarQueue, FarStack, FarString, FarVec,
    FarView, Heap, OffloadError, Plane, Where,
};
use core::cmp::Ordering;
use core::ops::{ControlFlow, Range};
use farfield_wic::{CallError, Fault, Sim, Stop};
use std::collections::{BTreeMap, VecDeque};

/// Collections of all kinds, as one root.
#[derive(FarView, Default)]
struct Holdings {
    list: FarList<(u32, bool)>,
    queue: FarQueue<Option<u64>>,
    stack: FarStack<[u8; 3]>,
    numbers: FarVec<u64>,
    /// Elements that are larger than a page.
    large: FarVec<[u64; 700]>,
    names: FarVec<FarString>,
    leaves: FarBTreeMap<u32, FarBox<Leaf>>,
    /// Few entries to a node, so that the tree is high.
    wide: FarBTreeMap<(u16, i8), [u64; 60]>,
    set: FarBTreeSet<i64>,
    bytes: FarBytes,
}

#[derive(FarView)]
struct Leaf {
    name: FarString,
    below: FarBTreeMap<u32, LeafKind>,
}

#[derive(FarView, Clone, Copy)]
#[repr(u8)]
enum LeafKind {
    Small(u8),
    Large { number: u64 },
}

/// The same in this process.
#[derive(Default)]
struct Twin {
    list: VecDeque<(u32, bool)>,
    queue: VecDeque<Option<u64>>,
    stack: Vec<[u8; 3]>,
    numbers: Vec<u64>,
    large: Vec<u64>,
    names: Vec<String>,
    leaves: BTreeMap<u32, (String, BTreeMap<u32, LeafKind>)>,
    wide: BTreeMap<(u16, i8), u64>,
    set: BTreeMap<i64, ()>,
    bytes: Vec<u8>,
}

/// Ranges that are looked at.
type Part = (Range<u32>, Range<usize>);

/// Text of all that it finds.
struct TellHoldings;

impl FarFunction for TellHoldings {
    const NAME: &'static str = "test.tell_collections";
    const VERSION: u32 = 1;
    type Root = Holdings;
    type Argument = Part;
    type Answer = String;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Holdings>, (keys, places): Part) -> Result<String, Fault> {
        let store = far.follow(root).await?;
        let mut text = String::new();
        let mut list = far.items(store.list);
        while let Some(element) = list.next().await? {
            text.push_str(&format!("{element:?} "));
        }
        text.push_str("\npart: ");
        let mut list = far.items_in(store.list, places.clone());
        while let Some(element) = list.next().await? {
            text.push_str(&format!("{element:?} "));
        }
        text.push_str("\nback: ");
        let mut list = far.items_in(store.list, places.clone()).rev();
        while let Some(element) = list.next().await? {
            text.push_str(&format!("{element:?} "));
        }
        let mut numbers = far.items_in(store.numbers, places.clone()).rev();
        while let Some(elements) = numbers.next_chunk().await? {
            assert!(!elements.is_empty());
            elements.iter().for_each(|element| text.push_str(&format!("{element:?} ")));
        }
        let mut large = far.items(store.large).rev();
        while let Some(element) = large.next().await? {
            text.push_str(&format!("{:?} ", element[699]));
        }
        text.push_str("\nqueue: ");
        let mut queue = far.items(store.queue);
        while let Some(element) = queue.next().await? {
            text.push_str(&format!("{element:?} "));
        }
        text.push_str("\nstack: ");
        let mut stack = far.items_in(store.stack, places.start..);
        while let Some(element) = stack.next().await? {
            text.push_str(&format!("{element:?} "));
        }
        text.push_str("\nnumbers: ");
        let mut numbers = far.items_in(store.numbers, places.clone());
        // The first one alone, then what was read with it.
        while let Some(element) = numbers.next().await? {
            text.push_str(&format!("{element:?} "));
            let rest = numbers.next_chunk().await?.unwrap_or_default();
            rest.iter().for_each(|element| text.push_str(&format!("{element:?} ")));
        }
        text.push_str("\nlarge: ");
        let mut large = far.items(store.large);
        while let Some(element) = large.next().await? {
            text.push_str(&format!("{:?} ", element[0]));
            text.push_str(if element.iter().all(|number| *number == element[0]) { "" } else { "torn " });
        }
        text.push_str("\nnames: ");
        let mut names = far.items(store.names);
        while let Some(name) = names.next().await? {
            text.push_str(&far.text(name).await?);
        }
        let last = far.item(store.names, store.names.len().wrapping_sub(1)).await?;
        text.push_str(&format!("\nlast: {:?}", last.map(|name| name.len())));
        text.push_str("\nleaves: ");
        let mut leaves = far.range(store.leaves, keys.clone());
        while let Some((key, leaf)) = leaves.next().await? {
            let leaf = far.follow(leaf).await?;
            text.push_str(&format!("{key} {}: ", far.text(leaf.name).await?));
            let mut below = far.range(leaf.below, ..);
            while let Some((key, kind)) = below.next().await? {
                text.push_str(&format!("{key} {kind:?} "));
            }
        }
        text.push_str("\nwide: ");
        let mut wide = far.range_by(store.wide, |(key, _)| super::entries::position(&keys, &u32::from(*key)));
        while let Some((key, value)) = wide.next().await? {
            text.push_str(&format!("{key:?} {} ", value[59]));
        }
        text.push_str("\nwide back: ");
        let mut wide = far.range_by(store.wide, |(key, _)| super::entries::position(&keys, &u32::from(*key))).rev();
        while let Some((key, value)) = wide.next().await? {
            text.push_str(&format!("{key:?} {} ", value[59]));
        }
        let one = far.get(store.wide, (keys.start as u16, 0)).await?;
        text.push_str(&format!("\none: {:?}", one.map(|value| value[0])));
        let from = i64::from(keys.start)..=i64::from(keys.end);
        let count = far.range(store.set, from.clone()).count().await?;
        let mut rest = far.range(store.set, from.clone());
        let first = rest.next().await?.map(|(key, ())| key);
        let rest = rest.count().await?;
        let mut back = far.range(store.set, from).rev();
        let last = back.next().await?.map(|(key, ())| key);
        let before = back.count().await?;
        text.push_str(&format!(
            "\nset: {count}, {rest} after {first:?}, {before} before {last:?}, all {}",
            far.range(store.set, ..).count().await?
        ));
        let bytes = far.bytes(store.bytes, places.start..).await?;
        let mut some = [0; 5];
        let read = far.read(store.bytes, places.end, &mut some).await?;
        text.push_str(&format!("\nbytes: {bytes:?} {:?} of {}", &some[..read], store.bytes.len()));
        Ok(text)
    }
}

impl Twin {
    fn tell(&self, (keys, places): &Part) -> String {
        fn part<T: core::fmt::Debug>(items: impl Iterator<Item = T>, places: &Range<usize>) -> String {
            let items = items.skip(places.start).take(places.end.saturating_sub(places.start));
            items.map(|element| format!("{element:?} ")).collect()
        }
        let all = &(0..usize::MAX);
        let mut text = part(self.list.iter(), all);
        text += &format!("\npart: {}", part(self.list.iter(), places));
        fn part_back<T: core::fmt::Debug>(items: &[T], places: &Range<usize>) -> String {
            let places = places.start.min(items.len())..places.end.min(items.len());
            items[places.start.min(places.end)..places.end]
                .iter()
                .rev()
                .map(|element| format!("{element:?} "))
                .collect()
        }
        let list: Vec<_> = self.list.iter().collect();
        text += &format!("\nback: {}{}", part_back(&list, places), part_back(&self.numbers, places));
        text += &part_back(&self.large, all);
        text += &format!("\nqueue: {}", part(self.queue.iter(), all));
        text += &format!("\nstack: {}", part(self.stack.iter(), &(places.start..usize::MAX)));
        text += &format!("\nnumbers: {}", part(self.numbers.iter(), places));
        text += &format!("\nlarge: {}", part(self.large.iter(), all));
        text += &format!("\nnames: {}", self.names.concat());
        text += &format!("\nlast: {:?}", self.names.last().map(String::len));
        text += "\nleaves: ";
        for (key, (name, below)) in self.leaves.range(keys.clone()) {
            text += &format!("{key} {name}: ");
            for (key, kind) in below {
                let kind = match *kind {
                    LeafKind::Small(number) => LeafKindView::Small(number),
                    LeafKind::Large { number } => LeafKindView::Large { number },
                };
                text += &format!("{key} {kind:?} ");
            }
        }
        text += "\nwide: ";
        for (key, value) in self.wide.iter().filter(|(key, _)| keys.contains(&u32::from(key.0))) {
            text += &format!("{key:?} {value} ");
        }
        text += "\nwide back: ";
        for (key, value) in self.wide.iter().rev().filter(|(key, _)| keys.contains(&u32::from(key.0))) {
            text += &format!("{key:?} {value} ");
        }
        text += &format!("\none: {:?}", self.wide.get(&(keys.start as u16, 0)));
        let mut of_set: Vec<i64> =
            self.set.range(i64::from(keys.start)..=i64::from(keys.end)).map(|(key, ())| *key).collect();
        let count = of_set.len();
        let last = of_set.last().copied();
        let first = (!of_set.is_empty()).then(|| of_set.remove(0));
        let rest = of_set.len();
        text += &format!("\nset: {count}, {rest} after {first:?}, {rest} before {last:?}, all {}", self.set.len());
        let from = self.bytes.len().min(places.end);
        let some = &self.bytes[from..self.bytes.len().min(from + 5)];
        let bytes = &self.bytes[self.bytes.len().min(places.start)..];
        text + &format!("\nbytes: {bytes:?} {some:?} of {}", self.bytes.len())
    }

    /// Changes both in the same way.
    fn change(&mut self, heap: &Heap, store: &mut Holdings, random: &mut fastrand::Rng, most: usize) {
        for _ in 0..random.usize(1..most) {
            let scope = heap.enter();
            let key = random.u32(..500);
            match random.u32(..16) {
                0 => {
                    let element = (random.u32(..), random.bool());
                    store.list.push_front(&scope, element).unwrap();
                    self.list.push_front(element);
                }
                1 => {
                    let element = (random.u32(..), random.bool());
                    store.list.push_back(&scope, element).unwrap();
                    self.list.push_back(element);
                }
                2 => assert_eq!(store.list.pop_front(&scope).unwrap(), self.list.pop_front()),
                // In the middle: chunks are split, and their places are not in the table's order.
                3 => {
                    let at = random.usize(..=self.list.len());
                    let mut cursor = store.list.cursor_front_mut();
                    (0..at).for_each(|_| cursor.move_next());
                    cursor.insert_before(&scope, (key, true)).unwrap();
                    self.list.insert(at, (key, true));
                }
                4 => {
                    let element = random.bool().then(|| random.u64(..));
                    store.queue.push(&scope, element).unwrap();
                    self.queue.push_back(element);
                }
                5 => assert_eq!(store.queue.pop(&scope).unwrap(), self.queue.pop_front()),
                6 => {
                    let element = [random.u8(..), 1, 2];
                    store.stack.push(&scope, element).unwrap();
                    self.stack.push(element);
                }
                7 => {
                    let element = random.u64(..);
                    store.numbers.push(&scope, element).unwrap();
                    self.numbers.push(element);
                }
                8 if self.large.len() < 20 => {
                    let element = random.u64(..);
                    store.large.push(&scope, [element; 700]).unwrap();
                    self.large.push(element);
                }
                8 => assert_eq!(store.large.pop(&scope).unwrap().map(|element| element[0]), self.large.pop()),
                9 => {
                    let name: String = (0..random.usize(..9)).map(|_| random.char(..)).collect();
                    store.names.push(&scope, FarString::copy_of(&scope, &name).unwrap()).unwrap();
                    self.names.push(name);
                }
                10 => {
                    let name = format!("leaf {key}");
                    let (mut below, mut of_below) = (FarBTreeMap::new(), BTreeMap::new());
                    for at in 0..random.u32(..9) {
                        let kind = match random.bool() {
                            true => LeafKind::Small(at as u8),
                            false => LeafKind::Large { number: u64::from(at) << 40 },
                        };
                        below.insert(&scope, at, kind).unwrap();
                        of_below.insert(at, kind);
                    }
                    let leaf = Leaf { name: FarString::copy_of(&scope, &name).unwrap(), below };
                    let leaf = heap.alloc(leaf).map_err(|error| error.error).unwrap();
                    store.leaves.insert(&scope, key, leaf).map_err(|error| error.error).unwrap();
                    self.leaves.insert(key, (name, of_below));
                }
                11 => {
                    assert_eq!(
                        store.leaves.remove(&scope, &key).unwrap().is_some(),
                        self.leaves.remove(&key).is_some()
                    );
                }
                12 => {
                    let key = (key as u16, random.i8(-1..2));
                    store.wide.insert(&scope, key, [u64::from(key.0) * 3; 60]).unwrap();
                    self.wide.insert(key, u64::from(key.0) * 3);
                }
                13 => {
                    let key = (key as u16, random.i8(-1..2));
                    assert_eq!(store.wide.remove(&scope, &key).unwrap().map(|value| value[7]), self.wide.remove(&key));
                }
                14 => {
                    let key = random.i64(-500..500);
                    store.set.insert(&scope, key).unwrap();
                    self.set.insert(key, ());
                }
                _ => {
                    let byte = random.u8(..);
                    store.bytes.push(&scope, byte).unwrap();
                    self.bytes.push(byte);
                }
            }
        }
    }
}

fn part(random: &mut fastrand::Rng) -> Part {
    (random.u32(..300)..random.u32(300..600), random.usize(..300)..random.usize(..900))
}

#[test]
fn collections_are_walked_alike_in_the_heap_over_its_bytes_and_in_std() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(plane).build().unwrap();
        let mut random = fastrand::Rng::with_seed(3909);
        let (mut store, mut twin) = (Holdings::default(), Twin::default());
        for round in 0..12 {
            let part = part(&mut random);
            let expected = twin.tell(&part);
            let here = heap.call::<TellHoldings>(&store, part.clone()).at(Where::Client).run();
            assert_eq!(here.as_deref(), Ok(&*expected), "{plane:?}, round {round}");
            assert_eq!(
                heap.call::<TellHoldings>(&store, part.clone()).run().as_deref(),
                Ok(&*expected),
                "there is no server"
            );
            if plane == Plane::Page {
                let bytes = region_of(&heap);
                for seed in 0..3 {
                    let call = argument_of(&heap, FarRef::from(&store), part.clone());
                    let there = Sim::new(seed, bytes.clone()).run_one::<AtServer<TellHoldings>>(call);
                    assert!(
                        matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected),
                        "round {round}: {there:?}"
                    );
                }
            }
            twin.change(&heap, &mut store, &mut random, 900);
        }
        drop(store);
        heap.verify();
    }
}

/// A value in far memory that has collections.
#[derive(FarView)]
struct Chapter {
    title: FarString,
    words: FarBTreeMap<u32, u32>,
    pages: FarList<u32>,
    next: Option<FarBox<Chapter>>,
}

/// Length of all titles, number of words in a range, and number of pages if they are asked for.
struct Chapters;

impl FarFunction for Chapters {
    const NAME: &'static str = "test.chapters";
    const VERSION: u32 = 1;
    type Root = Chapter;
    type Argument = (Range<u32>, bool);
    type Answer = (usize, usize, usize);

    async fn run<P: FarPlace>(
        far: &P,
        root: FarRef<'_, Chapter>,
        (words, with_pages): (Range<u32>, bool),
    ) -> Result<(usize, usize, usize), Fault> {
        let (mut next, mut found) = (Some(root), (0, 0, 0));
        while let Some(pointer) = next {
            let chapter = far.follow(pointer).await?;
            found.0 += far.text(chapter.title).await?.chars().count();
            found.1 += far.range(chapter.words, words.clone()).count().await?;
            let mut pages = far.items(chapter.pages);
            while with_pages && pages.next().await?.is_some() {
                found.2 += 1;
            }
            next = chapter.next;
        }
        Ok(found)
    }
}

#[test]
fn trees_texts_and_short_lists_of_far_values_are_read_everywhere_and_long_lists_in_the_heap() {
    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    let mut next = None;
    for number in 0..40 {
        let scope = heap.enter();
        let title = FarString::copy_of(&scope, &"ä".repeat(number)).unwrap();
        let (mut words, mut pages) = (FarBTreeMap::new(), FarList::new());
        for word in 0..number as u32 * 50 {
            words.insert(&scope, word, word).unwrap();
            pages.push_back(&scope, word).unwrap();
        }
        drop(scope);
        next = Some(heap.alloc(Chapter { title, words, pages, next }).map_err(|error| error.error).unwrap());
    }
    let root = next.unwrap();
    let words = |range: Range<u32>| {
        (0..40u32).map(|number| range.end.min(number * 50).saturating_sub(range.start)).sum::<u32>()
    };
    let bytes = region_of(&heap);
    for range in [0..10, 100..1000, 1949..1950, 5000..6000] {
        let expected = (39 * 20, words(range.clone()) as usize, 0);
        let call = || heap.call::<Chapters>(&root, (range.clone(), false));
        assert_eq!(call().at(Where::Client).run(), Ok(expected));
        let argument = argument_of(&heap, FarRef::from(&root), (range.clone(), false));
        let there = Sim::new(1, bytes.clone()).run_one::<AtServer<Chapters>>(argument);
        assert!(matches!(there, Ok(FarAnswer::Done(there)) if there == expected), "{there:?}");
    }
    let expected = (39 * 20, words(0..10) as usize, 50 * 39 * 20);
    let argument = argument_of(&heap, FarRef::from(&root), (0..10, true));
    let there = Sim::new(1, bytes).run_one::<AtServer<Chapters>>(argument);
    assert!(matches!(there, Ok(FarAnswer::Done(there)) if there == expected), "{there:?}");
    let here = heap.call::<Chapters>(&root, (0..10, true)).at(Where::Client).run();
    assert_eq!(here, Ok(expected));
    // A list whose table is near.
    let mut pages = FarList::new();
    for page in 0..5000 {
        pages.push_back(&heap.enter(), page).unwrap();
    }
    let last = Chapter { title: FarString::new(), words: FarBTreeMap::new(), pages, next: Some(root) };
    let root = heap.alloc(last).map_err(|error| error.error).unwrap();
    let argument = argument_of(&heap, FarRef::from(&root), (0..10, true));
    let there = Sim::new(1, region_of(&heap)).run_one::<AtServer<Chapters>>(argument);
    assert!(matches!(there, Ok(FarAnswer::Stopped(RegionStop::TableNear))), "{there:?}");
    let here = heap.call::<Chapters>(&root, (0..10, true)).at(Where::Client).run();
    assert_eq!(here, Ok((expected.0, expected.1, expected.2 + 5000)));
}

#[test]
fn long_bytes_are_read_in_pieces() {
    struct BothEnds;

    impl FarFunction for BothEnds {
        const NAME: &'static str = "test.ends";
        const VERSION: u32 = 1;
        type Root = FarBytes;
        type Argument = usize;
        type Answer = (usize, Vec<u8>, u64);

        async fn run<P: FarPlace>(
            far: &P,
            root: FarRef<'_, FarBytes>,
            at: usize,
        ) -> Result<(usize, Vec<u8>, u64), Fault> {
            let bytes = far.follow(root).await?;
            let whole = far.bytes(bytes, ..).await?;
            let some = far.bytes(bytes, at..at.saturating_add(3)).await?;
            Ok((whole.len(), some, whole.iter().map(|byte| u64::from(*byte)).sum()))
        }
    }

    let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3910);
    for len in [0, 1, 65_535, 65_536, 65_537, 300_000] {
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        let far = FarBytes::copy_of(&heap.enter(), &bytes).unwrap();
        let sum = bytes.iter().map(|byte| u64::from(*byte)).sum();
        for at in [0, 65_535, len.saturating_sub(2), usize::MAX - 1] {
            let some = &bytes[at.min(len)..at.saturating_add(3).min(len)];
            let expected = (len, some.to_vec(), sum);
            assert_eq!(heap.call::<BothEnds>(&far, at).at(Where::Client).run(), Ok(expected.clone()));
            let argument = argument_of(&heap, FarRef::from(&far), at);
            let there = Sim::new(1, region_of(&heap)).run_one::<AtServer<BothEnds>>(argument);
            assert!(matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected), "{len} {at}: {there:?}");
        }
        // A length that is a lie takes no memory.
        for (lie, expected) in [
            (1 << 20, Fault::OutOfRange { offset: 0 }),
            ((16 << 20) + 1, Fault::TooLong { bytes: (16 << 20) + 1 }),
            (u64::MAX, Fault::TooLong { bytes: u64::MAX }),
        ] {
            let mut argument = argument_of(&heap, FarRef::from(&far), 0);
            let (words, _) = argument.near.as_mut().unwrap().bytes.as_chunks_mut();
            let word = words.iter_mut().find(|word| usize::from_ne_bytes(**word) == len);
            let (Some(word), true) = (word, len > 0) else { continue };
            *word = lie.to_ne_bytes();
            let there = Sim::new(1, region_of(&heap)).run_one::<AtServer<BothEnds>>(argument);
            let is_expected = match (&there, expected) {
                (Err(Stop::Fault(Fault::OutOfRange { .. })), Fault::OutOfRange { .. }) => true,
                (Err(Stop::Fault(fault)), expected) => *fault == expected,
                _ => false,
            };
            assert!(is_expected, "{len} for {lie}: {there:?}");
        }
    }
}

/// Runs a function over bytes at a server, and says how it ended. It must not panic.
fn end_of<F: FarFunction>(bytes: Vec<u8>, seed: u64, call: super::function::FarArgument<F::Argument>) -> String {
    let end = match Sim::new(seed, bytes).steps(5_000).run_one::<AtServer<F>>(call) {
        Err(Stop::Fault(fault)) => format!("{fault:?}"),
        Err(stop) => format!("{stop:?}"),
        Ok(FarAnswer::Stopped(stop)) => format!("{stop:?}"),
        Ok(_) => "Done".into(),
    };
    let end = end.split([' ', '(', '{']).next().unwrap().to_owned();
    assert_ne!(end, "Panicked", "seed {seed}");
    end
}

#[test]
fn random_bytes_end_a_walk_in_time_and_never_in_a_panic() {
    const PAGES: u32 = 16;
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let first = heap.core().first_page;
    let mut random = fastrand::Rng::with_seed(3911);
    let mut ends = BTreeMap::<String, u32>::new();
    for round in 0..2000 {
        let mut bytes = vec![0; PAGES as usize * 4096];
        random.fill(&mut bytes);
        for word in bytes.chunks_exact_mut(8) {
            match random.u32(..8) {
                // Pointers that lead somewhere, small numbers, zeros and text, so that walks go on.
                0..4 => word[4..].copy_from_slice(&(first + random.u32(..PAGES + 2)).to_ne_bytes()),
                4 => word.copy_from_slice(&random.u64(..50).to_ne_bytes()),
                5 => word.fill(0),
                6 => word.iter_mut().for_each(|byte| *byte &= 0x7F),
                _ => {}
            }
        }
        let root = FarRef::<Chapter>::elsewhere(random.u32(..256), first + random.u32(..PAGES)).unwrap();
        let mut call = argument_of(&heap, root, (0..100, random.bool()));
        (call.span.pages, call.span.numbers) = (PAGES, u64::from(PAGES) + 10);
        *ends.entry(end_of::<Chapters>(bytes, round, call)).or_default() += 1;
    }
    println!("{ends:?}");
    assert!(["NoValue", "OutOfRange", "Movable"].iter().all(|end| ends.contains_key(*end)), "{ends:?}");
}

#[test]
fn collections_with_wrong_bytes_end_a_walk_in_time_and_never_in_a_panic() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3912);
    let (mut store, mut twin) = (Holdings::default(), Twin::default());
    twin.change(&heap, &mut store, &mut random, 4000);
    let (bytes, first) = (region_of(&heap), heap.core().first_page);
    let pages = (bytes.len() / 4096) as u32;
    let mut ends = BTreeMap::<String, u32>::new();
    for round in 0..600 {
        let mut bytes = bytes.clone();
        let mut call = argument_of(&heap, FarRef::from(&store), part(&mut random));
        let near = call.near.as_mut().unwrap();
        for _ in 0..random.usize(1..40) {
            let word = match random.u32(..4) {
                0 => random.u64(..),
                1 => random.u64(..300),
                2 => u64::from(first + random.u32(..pages)) << 32 | random.u64(..256),
                _ => u64::MAX,
            };
            match random.u32(..40) {
                0 => {
                    let at = random.usize(..near.bytes.len() / 8) * 8;
                    near.bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                }
                1 => {
                    let at = random.usize(..near.tables.len());
                    near.tables[at] = word as u32;
                }
                // The first bytes of pages, where nodes begin.
                2..10 => bytes[random.usize(..pages as usize) * 4096..][..8].copy_from_slice(&word.to_ne_bytes()),
                10 => near.tables.truncate(random.usize(..near.tables.len())),
                _ => {
                    let at = random.usize(..bytes.len() / 8) * 8;
                    bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                }
            }
            if near.tables.is_empty() {
                break;
            }
        }
        *ends.entry(end_of::<TellHoldings>(bytes, round, call)).or_default() += 1;
    }
    println!("{ends:?}");
    assert!(["NoValue", "OutOfRange", "Done"].iter().all(|end| ends.contains_key(*end)), "{ends:?}");
}

#[test]
fn roots_of_another_heap_and_tables_that_are_too_long_are_refused() {
    let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).build().unwrap();
    let other = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut store = Holdings::default();
    store.numbers.push(&heap.enter(), 7).unwrap();
    for place in [Where::Client, Where::Server, Where::Auto] {
        let call = other.call::<TellHoldings>(&store, (0..1, 0..1)).at(place).run();
        assert_eq!(call, Err(FarError::OtherHeap.into()), "{place:?}");
    }
    // A list of more chunks than fit into an argument.
    let mut list = FarList::<[u64; 512]>::new();
    for number in 0..17_000 {
        list.push_back(&heap.enter(), [number; 512]).unwrap();
    }
    let last = || heap.call::<Last>(&list, ());
    assert_eq!(last().at(Where::Client).run(), Ok(Some(16_999)));
    assert_eq!(last().run(), Ok(Some(16_999)), "and with `Auto` the heap answers");
    let there = last().at(Where::Server).run();
    assert!(matches!(there, Err(OffloadError::Call(CallError::ArgumentTooLong { .. }))), "{there:?}");
}

/// The last element of a list.
struct Last;

impl FarFunction for Last {
    const NAME: &'static str = "test.last";
    const VERSION: u32 = 1;
    type Root = FarList<[u64; 512]>;
    type Argument = ();
    type Answer = Option<u64>;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, FarList<[u64; 512]>>, _: ()) -> Result<Option<u64>, Fault> {
        let list = far.follow(root).await?;
        Ok(far.item(list, list.len() - 1).await?.map(|element| element[511]))
    }
}

#[test]
fn arrays_are_read_in_the_order_of_memory() {
    struct Diagonal;

    impl FarFunction for Diagonal {
        const NAME: &'static str = "test.diagonal";
        const VERSION: u32 = 1;
        type Root = FarArray<u32, 2>;
        type Argument = usize;
        type Answer = Vec<u32>;

        async fn run<P: FarPlace>(
            far: &P,
            root: FarRef<'_, FarArray<u32, 2>>,
            columns: usize,
        ) -> Result<Vec<u32>, Fault> {
            let (table, mut found, mut at) = (far.follow(root).await?, Vec::new(), 0);
            while let Some(number) = far.item(table, at).await? {
                found.push(number);
                at += columns + 1;
            }
            Ok(found)
        }
    }

    let heap = Heap::builder().near(1 << 20).far(1 << 30).build().unwrap();
    let table = FarArray::from_fn(&heap.enter(), [90, 120], |[row, column]| (row * 1000 + column) as u32).unwrap();
    let expected: Vec<u32> = (0..90).map(|row| row * 1001).collect();
    assert_eq!(heap.call::<Diagonal>(&table, 120).at(Where::Client).run(), Ok(expected.clone()));
    let argument = argument_of(&heap, FarRef::from(&table), 120);
    let there = Sim::new(1, region_of(&heap)).run_one::<AtServer<Diagonal>>(argument);
    assert!(matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected), "{there:?}");
}

/// Collects the elements with some indices, up to one that ends the fold.
macro_rules! collecting {
    ($name:ident, $text:literal, $over:ty, $element:ty, |$item:ident| $value:expr) => {
        struct $name;

        impl FarFold for $name {
            const NAME: &'static str = $text;
            const VERSION: u32 = 1;
            type Over = $over;
            type Argument = (Range<usize>, $element);
            type State = (u64, Vec<$element>);

            fn begin(_: &Self::Argument) -> Self::State {
                (0, Vec::new())
            }

            fn position(index: &usize, (range, _): &Self::Argument) -> Ordering {
                super::entries::position(range, index)
            }

            fn step(
                (count, last): &mut Self::State,
                $item: <$over as FarFoldable>::Item<'_>,
                (_, end): &Self::Argument,
            ) -> ControlFlow<()> {
                let value: $element = $value;
                *count += 1;
                last.push(value);
                last.drain(..last.len().saturating_sub(3));
                if value == *end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            }
        }
    };
}

collecting!(FoldList, "test.fold_list", FarList<[u64; 256]>, u64, |item| item[255]);
collecting!(FoldVec, "test.fold_vec", FarVec<[u64; 300]>, u64, |item| item[299]);
collecting!(FoldQueue, "test.fold_queue", FarQueue<u16>, u16, |item| item);

/// Number and sum of the values of keys in a range, up to a value that ends the fold.
struct FoldMap;

impl FarFold for FoldMap {
    const NAME: &'static str = "test.fold_map";
    const VERSION: u32 = 1;
    type Over = FarBTreeMap<u32, u64>;
    type Argument = (Range<u32>, u64);
    type State = (u64, u64);

    fn begin(_: &Self::Argument) -> Self::State {
        (0, 0)
    }

    fn position(key: &u32, (range, _): &Self::Argument) -> Ordering {
        super::entries::position(range, key)
    }

    fn step(state: &mut Self::State, (_, value): (u32, u64), (_, end): &Self::Argument) -> ControlFlow<()> {
        *state = (state.0 + 1, state.1 + value);
        if value == *end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Runs each piece of a fold over the bytes of a region, as a server would.
fn fold_there<F: FarFold>(heap: &Heap, bytes: &[u8], over: &F::Over, argument: &F::Argument) -> (F::State, usize) {
    let (mut state, pieces) = (F::begin(argument), over.pieces::<F>(argument));
    for (number, piece) in pieces.iter().enumerate() {
        let call = Fold::<F>::argument(piece.clone(), state, argument.clone());
        let mut call = argument_of(heap, FarRef::near(over), call);
        call.near = Some(RootImage::of(heap.core(), over, piece.clone()).unwrap().0);
        let there = Sim::new(number as u64, bytes.to_vec()).run_one::<AtServer<Fold<F>>>(call);
        let Ok(FarAnswer::Done((folded, end))) = there else { panic!("a piece is folded") };
        state = folded;
        if end == FoldEnd::Over {
            break;
        }
    }
    (state, pieces.len())
}

#[test]
fn folds_are_cut_into_pieces_that_know_their_part_of_a_table() {
    let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3916);
    let (mut list, mut vec, mut queue, mut map) = (FarList::new(), FarVec::new(), FarQueue::new(), FarBTreeMap::new());
    let (mut of_list, mut of_vec, mut of_queue, mut of_map) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
    for number in 0..1200u64 {
        let scope = heap.enter();
        list.push_back(&scope, [number; 256]).unwrap();
        of_list.push(number);
        if number < 300 {
            vec.push(&scope, [number; 300]).unwrap();
            of_vec.push(number);
        }
        queue.push(&scope, number as u16).unwrap();
        of_queue.push(number as u16);
        let key = random.u32(..5000);
        map.insert(&scope, key, number).unwrap();
        of_map.insert(key, number);
    }
    let bytes = region_of(&heap);
    fn expected<T: Copy + PartialEq>(all: &[T], range: Range<usize>, end: T) -> (u64, Vec<T>) {
        let range = range.start.min(all.len())..range.end.min(all.len());
        let some = &all[range.start.min(range.end)..range.end];
        let some = some.iter().position(|value| *value == end).map_or(some, |last| &some[..=last]);
        (some.len() as u64, some[some.len().saturating_sub(3)..].to_vec())
    }
    let mut most = 0;
    for round in 0..40 {
        let start = random.usize(..1200);
        let range = if round == 0 { 0..usize::MAX } else { start..random.usize(start..1500) };
        let end = if round % 3 == 0 { u64::MAX } else { random.u64(..1200) };
        let known = expected(&of_list, range.clone(), end);
        let argument = (range.clone(), end);
        assert_eq!(heap.fold::<FoldList>(&list, argument.clone()).at(Where::Client).run(), Ok(known.clone()));
        assert_eq!(heap.fold::<FoldList>(&list, argument.clone()).run(), Ok(known.clone()), "there is no server");
        let (there, pieces) = fold_there::<FoldList>(&heap, &bytes, &list, &argument);
        assert_eq!(there, known, "{range:?} {end} in {pieces}");
        most = most.max(pieces);
        let known = expected(&of_vec, range.clone(), end);
        assert_eq!(heap.fold::<FoldVec>(&vec, argument.clone()).at(Where::Client).run(), Ok(known.clone()));
        assert_eq!(fold_there::<FoldVec>(&heap, &bytes, &vec, &argument).0, known);
        let argument = (range.clone(), end as u16);
        let known = expected(&of_queue, range.clone(), end as u16);
        assert_eq!(heap.fold::<FoldQueue>(&queue, argument.clone()).at(Where::Client).run(), Ok(known.clone()));
        assert_eq!(fold_there::<FoldQueue>(&heap, &bytes, &queue, &argument).0, known);
        let keys = range.start as u32..range.end.min(5000) as u32;
        let values: Vec<u64> = of_map.range(keys.clone()).map(|(_, value)| *value).collect();
        let values = values.iter().position(|value| *value == end).map_or(&values[..], |last| &values[..=last]);
        let known = (values.len() as u64, values.iter().sum());
        let argument = (keys, end);
        assert_eq!(heap.fold::<FoldMap>(&map, argument.clone()).at(Where::Client).run(), Ok(known));
        assert_eq!(fold_there::<FoldMap>(&heap, &bytes, &map, &argument).0, known);
    }
    // 1,200 elements of 2 KiB, two in a chunk, and 64 chunks in a piece.
    assert_eq!(most, 10);
    // What is not in the part of the table that came with a call is not taken for the end.
    let call = Fold::<FoldList>::argument(0..1200, (0, Vec::new()), (0..1200, u64::MAX));
    let mut call = argument_of(&heap, FarRef::near(&list), call);
    for window in [0..500, 500..1200, 700..701] {
        call.near = Some(RootImage::of(heap.core(), &list, window.clone()).unwrap().0);
        let there = Sim::new(0, bytes.clone()).run_one::<AtServer<Fold<FoldList>>>(call.clone());
        assert!(matches!(there, Ok(FarAnswer::Stopped(RegionStop::TableNear))), "{window:?}: {there:?}");
    }
}
