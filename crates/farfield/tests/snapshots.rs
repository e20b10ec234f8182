//! Snapshots by serde, in JSON and in a binary format. Dangers: an element that is left out because it could not be had, an order that
//! changes, near memory beyond what a scope may hold when things lie inside each other.

mod common;

use common::{MIB, Over, Rng, assert_in_budget, seed};
use farfield::collections::Index;
use farfield::{
    FarArc, FarArray, FarBTreeMap, FarBox, FarBytes, FarError, FarList, FarMap, FarQueue, FarStack, FarString, FarVec,
    FarWeak, Heap, Plane,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];

fn heap(faults: &str, near: u64) -> Heap {
    heap_on(Plane::Page, faults, near)
}

fn heap_on(plane: Plane, faults: &str, near: u64) -> Heap {
    let builder = Heap::builder().plane(plane).near(near).near_max(near).far(1 << 30).patience(Duration::from_secs(10));
    builder.pool(format!("fault:{faults}@ram:")).paranoid(true).build().unwrap()
}

/// To each format and into another heap, on another plane; `check` looks at what came out. The twin is what a plain program would write.
fn round_trip<T: Serialize + DeserializeOwned>(value: &T, twin: impl Serialize, check: impl Fn(&Heap, &T)) {
    let json = serde_json::to_string(value).unwrap();
    let binary = postcard::to_stdvec(value).unwrap();
    assert!(json == serde_json::to_string(&twin).unwrap(), "the same text as of std's");
    assert!(binary == postcard::to_stdvec(&twin).unwrap(), "the same bytes as of std's");
    let other = heap_on(Plane::Object, "seed=2", MIB);
    let restored: T = other.restore(|| serde_json::from_str(&json)).unwrap();
    check(&other, &restored);
    drop(restored);
    other.verify();
    let other = heap_on(Plane::Hybrid, "seed=3", MIB);
    let restored: T = other.restore(|| postcard::from_bytes(&binary)).unwrap();
    check(&other, &restored);
    assert_in_budget(&other);
    // What was restored can be written again.
    assert!(postcard::to_stdvec(&restored).unwrap() == binary);
    drop(restored);
    assert_eq!((other.stats().pinned_bytes, other.stats().lost_values), (0, 0));
    other.verify();
}

#[test]
fn vectors_and_arrays() {
    let heap = heap("seed=1", MIB);
    let mut random = Rng::with_seed(seed());
    let twin: Vec<(u64, String)> = (0..40_000).map(|n| (random.u64(..), n.to_string())).collect();
    let mut vec = FarVec::new();
    vec.extend(&heap.enter(), twin.iter().cloned()).unwrap();
    round_trip(&vec, &twin, |heap, vec| {
        assert_eq!(vec.len(), twin.len());
        let mut at = 0;
        let mut scope = heap.enter();
        let mut scan = vec.scan(&mut scope);
        while let Some(chunk) = scan.next_chunk().unwrap() {
            assert!(chunk == &twin[at..at + chunk.len()]);
            at += chunk.len();
        }
    });
    round_trip(&FarVec::<u8>::new(), Vec::<u8>::new(), |_, vec| assert!(vec.is_empty()));
    let array = FarArray::from_fn(&heap.enter(), [30, 2, 500], |[a, b, c]| (a * b * c) as u32).unwrap();
    let elements: Vec<u32> = (0..30_000).map(|n| (n / 1000 * (n / 500 % 2) * (n % 500)) as u32).collect();
    round_trip(&array, (vec![30usize, 2, 500], elements), |heap, array| {
        assert_eq!(array.at(&heap.enter(), [29, 1, 499]), Ok(&(29 * 499)));
    });
    let restored: Result<FarArray<u32, 2>, _> = heap.restore(|| serde_json::from_str("[[2,3],[1,2,3,4,5]]"));
    assert!(restored.unwrap_err().to_string().contains("5 elements for an array of [2, 3]"));
    let restored: Result<FarArray<u32, 2>, _> = heap.restore(|| serde_json::from_str("[[5],[1,2,3,4,5]]"));
    assert!(restored.unwrap_err().to_string().contains("2 dimensions"));
}

#[test]
fn lists_queues_and_stacks() {
    let heap = heap("seed=1", MIB);
    let twin: Vec<[u64; 20]> = (0..12_000).map(|n| [n; 20]).collect();
    let (mut list, mut queue, mut stack) = (FarList::new(), FarQueue::new(), FarStack::new());
    for element in &twin {
        let scope = heap.enter();
        list.push_back(&scope, *element).unwrap();
        queue.push(&scope, *element).unwrap();
        stack.push(&scope, *element).unwrap();
    }
    round_trip(&list, &twin, |heap, list| {
        let mut expected = twin.iter();
        list.for_each(&mut heap.enter(), |element| assert_eq!(Some(element), expected.next())).unwrap();
        assert!(expected.next().is_none());
    });
    round_trip(&queue, &twin, |heap, queue| {
        let scope = heap.enter();
        assert_eq!((queue.front(&scope).unwrap(), queue.len()), (Some(&[0; 20]), 12_000));
    });
    round_trip(&stack, &twin, |heap, stack| assert_eq!(stack.top(&heap.enter()).unwrap(), Some(&[11_999; 20])));
}

#[test]
fn bytes_and_strings() {
    let heap = heap("seed=1", MIB);
    let scope = heap.enter();
    for len in [0, 1, 4095, 4096, 4097, 100_000] {
        let twin: String = "wide ☃ ".chars().cycle().take(len).collect();
        let text = FarString::copy_of(&scope, &twin).unwrap();
        round_trip(&text, &twin, |heap, text| assert!(text.get(&heap.enter()).unwrap() == twin));
        let bytes = FarBytes::copy_of(&scope, twin.as_bytes()).unwrap();
        round_trip(&bytes, twin.as_bytes(), |heap, bytes| {
            assert!(bytes.get(&heap.enter()).unwrap() == twin.as_bytes())
        });
    }
}

#[test]
fn maps_and_trees() {
    let heap = heap("seed=1", 2 * MIB);
    let mut twin = BTreeMap::new();
    let mut tree = FarBTreeMap::new();
    let map: FarMap<str, [u8], Fixed> =
        FarMap::builder().index(Index::Far).hasher(Fixed::default()).build(&heap).unwrap();
    let mut random = Rng::with_seed(seed());
    for _ in 0..25_000 {
        let (key, value) =
            (format!("key {}", random.usize(..50_000)), random.u64(..).to_le_bytes().repeat(random.usize(..20)));
        tree.insert(&heap.enter(), key.clone(), value.clone()).unwrap();
        map.insert(&heap.enter(), key.as_str(), value.as_slice()).unwrap();
        twin.insert(key, value);
    }
    round_trip(&tree, &twin, |heap, tree| {
        let mut expected = twin.iter();
        tree.for_each(&mut heap.enter(), |key, value| assert_eq!(Some((key, value)), expected.next())).unwrap();
        assert!(expected.next().is_none());
    });
    // In any order, so not the bytes but what they say.
    let binary = postcard::to_stdvec(&map).unwrap();
    assert!(postcard::from_bytes::<BTreeMap<String, Vec<u8>>>(&binary).unwrap() == twin);
    let json: BTreeMap<String, Vec<u8>> = serde_json::from_value(serde_json::to_value(&map).unwrap()).unwrap();
    assert!(json == twin);
    let other = self::heap("seed=3", 2 * MIB);
    let restored: FarMap<str, [u8]> = other.restore(|| postcard::from_bytes(&binary)).unwrap();
    assert_eq!(restored.len(), twin.len() as u64);
    for (key, value) in &twin {
        assert_eq!(restored.get(&other.enter(), key.as_str()), Ok(Some(value.as_slice())));
    }
    drop((restored, map, tree));
    other.verify();
    heap.verify();
}

type Fixed = BuildHasherDefault<DefaultHasher>;

/// Far values of every kind, more of each than is near.
#[derive(Serialize, Deserialize)]
struct Everything {
    boxes: FarVec<FarBox<[u64; 8]>>,
    shared: Vec<FarArc<String>>,
    array: FarArray<u32, 2>,
    list: FarList<String>,
    queue: FarQueue<[u64; 5]>,
    stack: FarStack<u64>,
    texts: Vec<FarString>,
    bytes: FarBytes,
    tree: FarBTreeMap<String, FarBytes>,
    map: FarMap<str, [u8], Fixed>,
}

/// So many of each, or of the larger ones fewer.
const COUNT: u64 = 20_000;

impl Everything {
    fn new(heap: &Heap) -> Everything {
        let map = FarMap::builder().index(Index::Far).hasher(Fixed::default()).build(heap).unwrap();
        let array = FarArray::from_fn(&heap.enter(), [COUNT as usize / 100, 1000], |[a, b]| (a * b) as u32).unwrap();
        let text = |number: u64| "word ".repeat(number as usize % 200 + 1);
        let mut all = Everything {
            boxes: FarVec::new(),
            shared: (0..COUNT / 10).map(|number| heap.alloc_shared(text(number)).unwrap()).collect(),
            array,
            list: FarList::new(),
            queue: FarQueue::new(),
            stack: FarStack::new(),
            texts: (0..COUNT / 10).map(|n| FarString::copy_of(&heap.enter(), &text(n)).unwrap()).collect(),
            bytes: FarBytes::copy_of(&heap.enter(), &[7; 100_000]).unwrap(),
            tree: FarBTreeMap::new(),
            map,
        };
        for number in 0..COUNT {
            all.boxes.push(&heap.enter(), heap.alloc([number; 8]).unwrap()).map_err(|full| full.error).unwrap();
            let scope = heap.enter();
            all.list.push_back(&scope, number.to_string()).unwrap();
            all.queue.push(&scope, [number; 5]).unwrap();
            all.stack.push(&scope, number).unwrap();
        }
        for number in 0..COUNT / 4 {
            let scope = heap.enter();
            let bytes = FarBytes::copy_of(&scope, &number.to_le_bytes().repeat(40)).unwrap();
            all.tree.insert(&scope, number.to_string(), bytes).map_err(|full| full.error).unwrap();
            all.map.insert(&scope, number.to_string().as_str(), &number.to_le_bytes().repeat(30)[..]).unwrap();
        }
        all
    }

    /// It is what `new` makes.
    fn check(&self, heap: &Heap) {
        let text = |number: usize| "word ".repeat(number % 200 + 1);
        for number in 0..COUNT as usize {
            let seen = self.boxes.read(number, |value| value.read(|value| value[7]));
            assert_eq!(seen, Ok(Some(Ok(number as u64))));
        }
        self.shared.iter().enumerate().for_each(|(n, shared)| assert_eq!(shared.read(|one| *one == text(n)), Ok(true)));
        self.texts.iter().enumerate().for_each(|(n, one)| assert_eq!(one.get(&heap.enter()).unwrap(), text(n)));
        assert_eq!(self.array.read([150, 900], |element| *element), Ok(Some(135_000)));
        let mut numbers = 0..COUNT;
        let visit = |one: &String| assert_eq!(Some(one), numbers.next().map(|number| number.to_string()).as_ref());
        self.list.for_each(&mut heap.enter(), visit).unwrap();
        assert_eq!((numbers.next(), self.queue.len(), self.stack.len()), (None, COUNT as usize, COUNT as usize));
        assert_eq!(self.queue.front(&heap.enter()), Ok(Some(&[0; 5])));
        assert_eq!(self.stack.top(&heap.enter()), Ok(Some(&(COUNT - 1))));
        assert_eq!(self.bytes.get(&heap.enter()).unwrap(), [7; 100_000]);
        for number in 0..COUNT / 4 {
            let scope = heap.enter();
            let key = number.to_string();
            let bytes = self.tree.get(&scope, &key).unwrap().unwrap();
            assert_eq!(bytes.get(&scope).unwrap(), number.to_le_bytes().repeat(40));
            assert_eq!(self.map.get(&scope, key.as_str()).unwrap(), Some(&number.to_le_bytes().repeat(30)[..]));
        }
        assert_eq!((self.tree.len() as u64, self.map.len()), (COUNT / 4, COUNT / 4));
    }
}

/// What one plane has written, each of them reads; a snapshot does not say where it comes from.
#[test]
fn planes_read_what_planes_have_written() {
    let mut written: Vec<Vec<u8>> = Vec::new();
    for plane in PLANES {
        let source = heap_on(plane, "seed=1", 2 * MIB);
        let all = Everything::new(&source);
        let binary = postcard::to_stdvec(&all).unwrap();
        assert!(source.stats().misses > 1000, "{plane:?}: {:?}", source.stats());
        for plane in PLANES {
            let target = heap_on(plane, "seed=2", 2 * MIB);
            let restored: Everything = target.restore(|| postcard::from_bytes(&binary)).unwrap();
            restored.check(&target);
            assert_in_budget(&target);
            drop(restored);
            assert_eq!((target.stats().pinned_bytes, target.stats().lost_values), (0, 0));
            target.verify();
        }
        written.push(binary);
        drop(all);
        source.verify();
    }
    assert!(written.iter().all(|binary| *binary == written[0]), "the same bytes on each plane");
}

#[derive(Serialize, Deserialize)]
struct Album {
    title: FarString,
    tracks: FarVec<Track>,
    next: Option<FarBox<Album>>,
}

#[derive(Serialize, Deserialize)]
struct Track {
    samples: FarVec<u32>,
    label: FarArc<String>,
    notes: FarBTreeMap<u32, FarBytes>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct AlbumTwin {
    title: String,
    tracks: Vec<TrackTwin>,
    next: Option<Box<AlbumTwin>>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct TrackTwin {
    samples: Vec<u32>,
    label: String,
    notes: BTreeMap<u32, Vec<u8>>,
}

/// Each part is larger than what a scope may hold, and lies in others.
#[test]
fn far_values_in_far_values() {
    let heap = heap("seed=1", MIB);
    let label = heap.alloc_shared(String::from("label")).unwrap();
    let (mut album, mut twin) = (None, None);
    for number in 0..3u32 {
        let (mut tracks, mut track_twins) = (FarVec::new(), Vec::new());
        for track in 0..3 {
            let samples: Vec<u32> = (0..120_000).map(|n| n * track + number).collect();
            let mut far_samples = FarVec::new();
            far_samples.extend_from_slice(&heap.enter(), &samples).unwrap();
            let mut notes = FarBTreeMap::new();
            let mut note_twins = BTreeMap::new();
            for note in 0..40 {
                let text = vec![note as u8; 3000 + note as usize];
                let scope = heap.enter();
                notes.insert(&scope, note, FarBytes::copy_of(&scope, &text).unwrap()).unwrap();
                note_twins.insert(note, text);
            }
            let far = Track { samples: far_samples, label: label.clone(), notes };
            tracks.push(&heap.enter(), far).map_err(|error| error.error).unwrap();
            track_twins.push(TrackTwin { samples, label: "label".into(), notes: note_twins });
        }
        let title = FarString::copy_of(&heap.enter(), &format!("album {number}")).unwrap();
        let next = album.take();
        album = Some(heap.alloc(Album { title, tracks, next }).map_err(|error| error.error).unwrap());
        twin = Some(Box::new(AlbumTwin { title: format!("album {number}"), tracks: track_twins, next: twin.take() }));
    }
    // FarBytes are bytes in formats that know them; in postcard that is what a sequence is, too.
    round_trip(&album, &twin, |heap, album| {
        let first = album.as_ref().unwrap();
        let seen = first.read(|album| album.tracks.read(2, |track| track.samples.read(99_999, |sample| *sample)));
        assert_eq!(seen, Ok(Ok(Some(Ok(Some(99_999 * 2 + 2))))));
        assert_eq!(heap.stats().pinned_bytes, 0);
    });
    drop((album, label));
    heap.verify();
}

/// An entry of a map has a far part larger than near memory, and is replaced while it is written, and so are many others.
/// A folder whose children know it.
#[derive(Serialize, Deserialize)]
struct Folder {
    name: String,
    parent: FarWeak<Folder>,
    children: FarList<FarArc<Folder>>,
}

#[test]
fn weak_pointers_are_written_as_nothing_and_lead_nowhere() {
    let heap = heap("seed=1", MIB);
    let root = heap
        .alloc_cyclic(|root| {
            let mut children = FarList::new();
            for number in 0..300 {
                let child = Folder { name: number.to_string(), parent: root.clone(), children: FarList::new() };
                let child = heap.alloc_shared(child).map_err(|error| error.error).unwrap();
                children.push_back(&heap.enter(), child).map_err(|error| error.error).unwrap();
            }
            Folder { name: "root".into(), parent: FarWeak::new(), children }
        })
        .map_err(|error| error.error)
        .unwrap();
    /// What a plain program would write.
    #[derive(Serialize)]
    struct Twin {
        name: String,
        parent: Option<()>,
        children: Vec<Twin>,
    }
    let child = |number: u32| Twin { name: number.to_string(), parent: None, children: Vec::new() };
    let twin = Twin { name: "root".into(), parent: None, children: (0..300).map(child).collect() };
    round_trip(&root, &twin, |heap, root| {
        let children = root.read(|root| root.children.len()).unwrap();
        assert_eq!(children, 300);
        let scope = heap.enter();
        let root = root.get(&scope).unwrap();
        let child = root.children.iter(&scope).next_back().unwrap().unwrap();
        let child = child.get(&scope).unwrap();
        assert_eq!(child.name, "299");
        assert!(child.parent.upgrade().is_none() && child.parent.ptr_eq(&FarWeak::new()));
    });
    let parents = root.read(|root| root.children.front(&heap.enter()).unwrap().unwrap().clone()).unwrap();
    assert!(parents.read(|child| child.parent.upgrade().is_some()).unwrap(), "the heap's own still leads to it");
}

#[test]
fn large_values_of_a_map_that_others_change() {
    const SMALL: u32 = 200;
    let heap = heap("seed=1", MIB);
    let map: FarMap<u32, FarVec<u32>> = FarMap::new(&heap).unwrap();
    // Elements are numbers that follow each other; which ones says who made them.
    let put = |key: u32, first: u32| {
        let mut value = FarVec::new();
        let len = if key == 0 { 400_000 } else { 10 };
        value.extend(&heap.enter(), first..first + len).unwrap();
        map.insert(&heap.enter(), key, value).unwrap();
    };
    (0..=SMALL).for_each(|key| put(key, key));
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            let mut version = 0;
            while !stop.load(Ordering::Relaxed) {
                version += 1;
                (0..=SMALL).for_each(|key| put(key, key + version));
            }
            version
        });
        let over = Over(&stop);
        for _ in 0..8 {
            let snapshot = postcard::to_stdvec(&map).unwrap();
            let plain: BTreeMap<u32, Vec<u32>> = postcard::from_bytes(&snapshot).unwrap();
            assert_eq!(plain.len() as u32, SMALL + 1);
            for (key, value) in plain {
                assert_eq!(value.len(), if key == 0 { 400_000 } else { 10 });
                assert!((value[0]..).zip(&value).all(|(expected, element)| expected == *element) && value[0] >= key);
            }
        }
        drop(over);
        println!("{} changes of all", writer.join().unwrap());
    });
    let binary = postcard::to_stdvec(&map).unwrap();
    let other = self::heap("seed=2", MIB);
    let restored: FarMap<u32, FarVec<u32>> = other.restore(|| postcard::from_bytes(&binary)).unwrap();
    assert_eq!(restored.len(), u64::from(SMALL) + 1);
    drop((restored, map));
    assert_eq!((heap.stats().pinned_bytes, heap.stats().lost_values), (0, 0));
    other.verify();
    heap.verify();
}

/// Whatever is read when the server dies: the snapshot fails, and says why.
#[test]
fn a_snapshot_of_unreadable_values_is_an_error() {
    for die in [700, 900] {
        let heap = heap(&format!("die={die}"), MIB);
        let (mut vec, mut tree, mut list) = (FarVec::new(), FarBTreeMap::new(), FarList::new());
        let map: FarMap<u64, u64> = FarMap::builder().index(Index::Far).build(&heap).unwrap();
        let mut made = 0u64;
        let fill = |made: u64, vec: &mut FarVec<u64>, tree: &mut FarBTreeMap<u64, u64>, list: &mut FarList<u64>| {
            let scope = heap.enter();
            let shop = || -> Result<(), FarError> {
                vec.push(&scope, made)?;
                tree.insert(&scope, made, made).map_err(FarError::from)?;
                list.push_back(&scope, made)?;
                map.insert(&scope, made, made).map_err(FarError::from)?;
                Ok(())
            };
            let mut shop = shop;
            shop().is_ok()
        };
        while made < 120_000 && fill(made, &mut vec, &mut tree, &mut list) {
            made += 1;
        }
        let boxed: Vec<FarBox<u64>> = (0..10).map_while(|n| heap.alloc(n).ok()).collect();
        // Until the server is gone, everything can be read.
        let mut failed = 0;
        for _ in 0..20 {
            for result in [
                postcard::to_stdvec(&vec),
                postcard::to_stdvec(&tree),
                postcard::to_stdvec(&list),
                postcard::to_stdvec(&map),
            ] {
                failed += u32::from(result.is_err());
            }
        }
        assert!(failed > 20, "{failed} with die={die}");
        for text in [serde_json::to_string(&vec), serde_json::to_string(&tree), serde_json::to_string(&list)] {
            let error = text.unwrap_err().to_string();
            assert!(error.contains("a far value could not be had") && error.contains("gone"), "{error}");
        }
        drop((vec, tree, list, map, boxed));
        heap.verify();
    }
}

#[test]
fn a_snapshot_without_room_is_an_error_and_leaves_nothing() {
    // The index is near, and larger than near memory.
    let text = serde_json::to_string(&(0..80_000u64).map(|n| (n, n)).collect::<BTreeMap<_, _>>()).unwrap();
    let heap = heap("seed=1", MIB);
    let restored: Result<FarMap<u64, u64>, _> = heap.restore(|| serde_json::from_str(&text));
    let error = restored.unwrap_err().to_string();
    assert!(error.contains("a far value could not be made") && error.contains("tables"), "{error}");
    heap.verify();
    let restored: FarVec<FarVec<u64>> = heap.restore(|| serde_json::from_str("[[1,2],[3]]")).unwrap();
    assert_eq!(restored.read(1, |inner| inner.len()), Ok(Some(1)));
}

#[test]
fn without_a_heap_there_is_no_far_value() {
    let error = serde_json::from_str::<FarVec<u8>>("[1]").unwrap_err().to_string();
    assert!(error.contains("Heap::restore"), "{error}");
    let (one, two) = (heap("seed=1", MIB), heap("seed=1", MIB));
    let nested = one.restore(|| {
        let inner: FarBox<u8> = two.restore(|| serde_json::from_str("7")).unwrap();
        let outer: FarBox<u8> = serde_json::from_str("8").unwrap();
        (inner, outer)
    });
    assert_eq!(nested.0.get(&two.enter()), Ok(&7));
    assert_eq!(nested.1.get(&one.enter()), Ok(&8));
    // After a panic too.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| one.restore(|| panic!("on purpose"))));
    assert!(panicked.is_err());
    assert!(serde_json::from_str::<FarBox<u8>>("7").is_err());
}
