//! The pool lies: it has lost a write, or answers with an old version, with another page, with zeros, with two versions in one; and what it says has
//! the right checksum. Danger: any byte of it in the hands of the program.

use crate::common::task::yield_now;
use crate::common::twin::steps;
use crate::common::{MIB, Rng, builder, seed};
use farfield::task::Executor;
use farfield::{FarBox, FarBytes, FarError, FarMap, FarVec, Heap, PoolError, Verify};
use futures_util::TryStreamExt;
use std::cell::{Cell, RefCell};
use std::future::ready;
use std::time::Duration;

const NEAR: u64 = 2 * MIB;

/// How a pool can lie. What is lost stays lost, so there is less of it.
const LIES: [&str; 5] = ["lose=0.002", "stale=0.05", "swap=0.05", "zero=0.05", "tear=0.05"];
/// In one pool.
const ALL_LIES: &str = "lose=0.001,stale=0.02,swap=0.02,zero=0.02,tear=0.02";

fn heap(url: &str, verify: Verify) -> Heap {
    let builder = builder().near(NEAR).near_max(NEAR).far(1 << 30).paranoid(true).verify(verify);
    builder.patience(Duration::from_secs(120)).pool(url).build().unwrap()
}

/// Values of some size, all words of each equal, and what they should be.
struct Held<const WORDS: usize> {
    far: Vec<FarBox<[u64; WORDS]>>,
    twin: Vec<u64>,
}

/// What was seen: values that were right, and errors that said that something was wrong.
#[derive(Default, Debug)]
struct Seen {
    right: Cell<u64>,
    corrupt: Cell<u64>,
}

fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

impl Seen {
    /// Everything that a heap says is right, or an error by name.
    #[track_caller]
    fn judge<T>(&self, found: Result<T, FarError>, is_right: impl FnOnce(T) -> bool) -> bool {
        match found {
            Ok(found) => assert!(is_right(found), "a byte that was never stored there"),
            Err(error) => {
                assert!(is_corrupt(error), "{error:?}");
                count(&self.corrupt);
                return false;
            }
        }
        count(&self.right);
        true
    }
}

fn is_corrupt(error: FarError) -> bool {
    matches!(error, FarError::Pool(PoolError::Corrupt { .. }))
}

impl<const WORDS: usize> Held<WORDS> {
    /// Values of so many bytes altogether.
    fn filled(heap: &Heap, bytes: u64) -> Held<WORDS> {
        let mut held = Held { far: Vec::new(), twin: Vec::new() };
        for word in 0..bytes / (8 * WORDS as u64) {
            held.make(heap, word);
        }
        held
    }

    /// One more. That the page where it would have belonged is lost keeps it out of no other.
    fn make(&mut self, heap: &Heap, word: u64) {
        self.far.push(heap.alloc([word; WORDS]).unwrap());
        self.twin.push(word);
    }

    fn is(words: &[u64; WORDS], word: u64) -> bool {
        words.iter().all(|found| *found == word)
    }

    /// Neighbours of one, so many at most, and no more than a scope can hold.
    fn some(&self, random: &mut Rng, most: usize) -> std::ops::Range<usize> {
        let most = most.min(NEAR as usize / 24 / (8 * WORDS)).max(1);
        let first = random.usize(..self.far.len());
        first..(first + 1 + random.usize(..most)).min(self.far.len())
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng, seen: &Seen) {
        let index = random.usize(..self.far.len());
        let scope = heap.enter();
        let (value, twin) = (&mut self.far[index], &mut self.twin[index]);
        match random.usize(..9) {
            0 | 1 => drop(seen.judge(value.get(&scope), |words| Self::is(words, *twin))),
            2 | 3 => {
                let word = random.u64(..);
                let change = |words: &mut [u64; WORDS]| {
                    let is_right = Self::is(words, *twin);
                    words.fill(word);
                    is_right
                };
                if seen.judge(value.get_mut(&scope), change) {
                    *twin = word;
                }
            }
            4 => drop(seen.judge(value.get_once(&scope), |words| Self::is(words, *twin))),
            5 => {
                drop(scope);
                seen.judge(value.pin(), |words| Self::is(&words, *twin));
            }
            6 => {
                let some = self.some(random, 8);
                let are_right = |found: Vec<&[u64; WORDS]>| {
                    found.iter().zip(&self.twin[some.clone()]).all(|(words, twin)| Self::is(words, *twin))
                };
                seen.judge(heap.get_many(&scope, &self.far[some.clone()]), are_right);
            }
            7 => {
                let some = self.some(random, 8);
                heap.prefetch(&self.far[some.clone()]);
                for index in some {
                    let found = self.far[index].get(&scope);
                    seen.judge(found, |words| Self::is(words, self.twin[index]));
                }
            }
            _ => {
                drop(scope);
                self.far.swap_remove(index);
                self.twin.swap_remove(index);
                self.make(heap, random.u64(..));
            }
        }
    }
}

/// Values of all sizes: some that come alone where they can, pages, units of a few and of many pages.
fn random_steps(heap: &Heap, random: &mut Rng, few: u64) -> Seen {
    let seen = Seen::default();
    let mut small = Held::<8>::filled(heap, MIB);
    let mut middle = Held::<150>::filled(heap, MIB);
    let mut pages = Held::<512>::filled(heap, 2 * MIB);
    let mut units = Held::<1200>::filled(heap, MIB);
    let mut windows = Held::<9_000>::filled(heap, MIB);
    for _ in 0..steps(few) {
        match random.usize(..32) {
            0..16 => small.step(heap, random, &seen),
            16..21 => middle.step(heap, random, &seen),
            21..26 => pages.step(heap, random, &seen),
            26..31 => units.step(heap, random, &seen),
            _ => windows.step(heap, random, &seen),
        }
    }
    drop((small, middle, pages, units, windows));
    seen
}

#[test]
fn values_are_right_or_corrupt_when_the_pool_lies() {
    let seed = seed();
    for lie in LIES.iter().chain([&ALL_LIES]) {
        let heap = heap(&format!("fault:{lie},seed={seed}@ram:"), Verify::Checksum);
        let seen = random_steps(&heap, &mut Rng::with_seed(seed), 4_000);
        println!("{lie}: {seen:?}");
        assert!(seen.right.get() > 1_000, "{lie}: {seen:?}");
        assert!(seen.corrupt.get() > 2, "{lie}: the test needs lies: {seen:?}");
        heap.verify();
    }
}

#[test]
fn true_answers_are_never_called_corrupt() {
    for verify in [Verify::Checksum, Verify::Keyed] {
        for url in ["ram:", "stripe(ram:,ram:)", "mirror(ram:,ram:)", "ec(2,1,ram:,ram:,ram:)", "lz:?size=1G"] {
            let heap = heap(url, verify);
            let seen = random_steps(&heap, &mut Rng::with_seed(seed()), 1_000);
            assert_eq!(seen.corrupt.get(), 0, "{url}, {verify:?}");
            heap.verify();
        }
    }
}

/// A server that knows how checksums are computed finds other bytes that have the same.
#[test]
fn a_key_finds_forged_pages_too() {
    let seed = seed();
    for lie in ["forge=0.05", "stale=0.05", "swap=0.05"] {
        let heap = heap(&format!("fault:{lie},seed={seed}@ram:"), Verify::Keyed);
        let seen = random_steps(&heap, &mut Rng::with_seed(seed), 3_000);
        assert!(seen.right.get() > 500 && seen.corrupt.get() > 3, "{lie}: {seen:?}");
        heap.verify();
    }
}

/// Many tasks wait at the same time, some for the same page.
#[test]
fn tasks_are_told_and_see_nothing_of_it() {
    let seed = seed();
    for lie in LIES {
        let heap = heap(&format!("fault:{lie},delay=20us,seed={seed}@ram:"), Verify::Checksum);
        let (mut held, seen) = (Held::<32>::filled(&heap, 3 * MIB), Seen::default());
        let mut random = Rng::with_seed(seed);
        // Later versions, so that there are old ones.
        for (value, twin) in held.far.iter_mut().zip(&mut held.twin) {
            if let Ok(words) = value.get_mut(&heap.enter()) {
                *twin = random.u64(..);
                words.fill(*twin);
            }
        }
        let executor = Executor::new(&heap);
        let random = RefCell::new(random);
        let tasks: Vec<_> = (0..24)
            .map(|task| {
                let (heap, held, seen, random) = (&heap, &held, &seen, &random);
                executor.spawn(async move {
                    for _ in 0..steps(100) {
                        let some = held.some(&mut random.borrow_mut(), 4);
                        let scope = heap.enter();
                        if task % 2 == 0 {
                            let found = held.far[some.start].fetch(&scope).await;
                            seen.judge(found, |words| Held::is(words, held.twin[some.start]));
                        } else {
                            let found = heap.fetch_many(&scope, &held.far[some.clone()]).await;
                            seen.judge(found, |all| {
                                all.iter().zip(&held.twin[some]).all(|(words, twin)| Held::is(words, *twin))
                            });
                        }
                        drop(scope);
                        yield_now().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            executor.block_on(task).unwrap();
        }
        drop(executor);
        assert!(seen.right.get() > 200 && seen.corrupt.get() > 3, "{lie}: {seen:?}");
        drop(held);
        heap.verify();
    }
}

/// The collections are made over a pool that is honest; the one that they are moved to is not. So the move keeps what is known of pages, and it
/// holds for what streams, walks and look-ups bring.
#[test]
fn collections_give_elements_or_errors() {
    const COUNT: u64 = 300_000;
    const KEYS: u64 = 8_000;
    type Words = [u64; 24];
    let seed = seed();
    for lie in LIES.map(|lie| lie.replace("0.002", "0.01")) {
        let heap = heap("ram:", Verify::Checksum);
        let scope = heap.enter();
        let mut vec = FarVec::new();
        vec.extend(&scope, (0..COUNT).map(|index| index * 3)).unwrap();
        let map = FarMap::new(&heap).unwrap();
        let mut texts = Vec::new();
        drop(scope);
        for key in 0..KEYS {
            let scope = heap.enter();
            map.insert(&scope, key, [key; 24] as Words).unwrap();
            texts.push(FarBytes::copy_of(&scope, format!("text {key}").as_bytes()).unwrap());
        }
        heap.switch_pool(format!("fault:{lie},seed={seed}@ram:"))
            .unwrap()
            .wait(Duration::from_secs(300))
            .unwrap()
            .unwrap();
        // From here on there are later versions, of some pages.
        let mut twin: Vec<u64> = (0..COUNT).map(|index| index * 3).collect();
        for index in (0..COUNT as usize).step_by(100) {
            if let Ok(Some(element)) = vec.get_mut(&heap.enter(), index) {
                *element += 1;
                twin[index] += 1;
            }
        }
        let (seen, mut random) = (Seen::default(), Rng::with_seed(seed));
        for step in 0..20 * steps(300) {
            // When a page leaves is a matter of time: it may take longer until one is met that the pool lies about.
            if step >= steps(300) && seen.corrupt.get() > 0 {
                break;
            }
            let start = random.usize(..COUNT as usize - 5_000);
            let range = start..start + 5_000;
            match random.usize(..5) {
                0 => {
                    let mut scope = heap.enter();
                    let mut at = start;
                    let mut scan = vec.scan_in(&mut scope, range);
                    loop {
                        match scan.next_chunk() {
                            Ok(None) => break,
                            found => {
                                let mut len = 0;
                                let is_there = seen.judge(found, |chunk| {
                                    let chunk = chunk.unwrap();
                                    len = chunk.len();
                                    *chunk == twin[at..at + len]
                                });
                                at += len;
                                if !is_there {
                                    break;
                                }
                            }
                        }
                    }
                }
                1 => {
                    let all = vec.stream(range.clone()).try_fold(Vec::new(), |mut all, batch| {
                        all.extend(batch);
                        ready(Ok(all))
                    });
                    let all = Executor::new(&heap).block_on(all);
                    seen.judge(all, |all| all == twin[range]);
                }
                2 => {
                    let scope = heap.enter();
                    let keys: Vec<u64> = (0..8).map(|_| random.usize(..KEYS as usize + 500) as u64).collect();
                    seen.judge(map.get_many(&scope, &keys), |found| {
                        let right = |key: &u64| (*key < KEYS).then_some([*key; 24]);
                        found.iter().zip(&keys).all(|(found, key)| found.copied() == right(key))
                    });
                }
                3 => {
                    let key = random.usize(..KEYS as usize);
                    let scope = heap.enter();
                    seen.judge(texts[key].get(&scope), |text| text == format!("text {key}").as_bytes());
                }
                _ => {
                    let key = random.usize(..KEYS as usize) as u64;
                    let found = Executor::new(&heap).block_on(async {
                        let scope = heap.enter();
                        map.fetch(&scope, &key).await.map(|found| found.copied())
                    });
                    seen.judge(found, |found| found == Some([key; 24]));
                }
            }
        }
        println!("{lie}: {seen:?}");
        assert!(seen.right.get() > 50, "{lie}: {seen:?}");
        assert!(seen.corrupt.get() > 0, "{lie}: the test needs lies: {seen:?}");
        drop((vec, map, texts));
        heap.verify();
    }
}
