//! Are columns copied, shuffled, sorted, counted and grouped where they are, and is the result that of a loop over a `Vec`?
//!
//! Danger: bytes of before at the server; far pages that nobody knows of, or that somebody writes who was given up; an answer that depends on what is near,
//! on the pool or on who uses the heap meanwhile. `FARFIELD_SEED` repeats the choices.

use farfield::collections::{CONDITIONS_MAX, KEYS_MAX, KeyColumn};
use farfield::{CallError, FarError, FarVec, Fault, Formula, Health, Heap, Number, OffloadError, Part, Plane, Where};
use farfield_server::{Config, Server};
use farfield_tests::{
    MIB, Over, PATIENCE, Scratch, ask_until, ask_until_gone, heap_at, seeded, serve_here, tier, wait_until,
};
use farfield_wic::{Aggregate, Registry};
use fastrand::Rng;
use std::cmp;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const NEAR: u64 = 2 * MIB;
const PLANES: [Plane; 3] = [Plane::Page, Plane::Object, Plane::Hybrid];
const PLACES: [Where; 3] = [Where::Client, Where::Server, Where::Auto];

/// A server of this process, and where it is found: across TCP, a socket, shared memory.
fn serve(functions: Registry) -> (Server, [String; 3]) {
    // A machine that does much else is slow, and who is pushed back does it near.
    serve_here(Config { functions, call_within: PATIENCE, ..Config::default() })
}

fn heap(url: &str, plane: Plane) -> Heap {
    heap_at(url, plane, NEAR)
}

fn word(random: &mut Rng) -> u64 {
    (0..3).fold(0, |word, _| word << 24 | random.usize(..1 << 24) as u64)
}

/// The same bits, whatever they say.
fn bits<T: Debug>(value: T) -> String {
    format!("{value:?}")
}

fn vec_of<N: Number>(heap: &Heap, numbers: &[N]) -> FarVec<N> {
    let mut vec = FarVec::new();
    for part in numbers.chunks(10_000) {
        vec.extend_from_slice(&heap.enter(), part).unwrap();
    }
    vec
}

#[track_caller]
fn compare<N: Number>(heap: &Heap, vec: &FarVec<N>, right: &[N]) {
    let mut scope = heap.enter();
    let (mut scan, mut at) = (vec.scan(&mut scope), 0);
    while let Some(numbers) = scan.next_chunk().unwrap() {
        let wanted = &right[at..at + numbers.len()];
        assert_eq!(bits(numbers), bits(wanted), "from {at} on");
        at += numbers.len();
    }
    assert_eq!((at, vec.len()), (right.len(), right.len()));
}

/// Near and far by turns: some are changed, some are read.
fn stir<N: Number>(heap: &Heap, random: &mut Rng, vec: &mut FarVec<N>, model: &mut [N], make: fn(u64) -> N) {
    for _ in 0..random.usize(..200) {
        let (index, number) = (random.usize(..model.len()), make(word(random)));
        *vec.get_mut(&heap.enter(), index).unwrap().unwrap() = number;
        model[index] = number;
        vec.read(random.usize(..model.len()), |_| ()).unwrap();
    }
}

/// While this goes on another thread reads the vector and changes something else in the heap.
fn beside<N: Number, R>(
    heap: &Heap,
    random: &mut Rng,
    (vec, model): (&FarVec<N>, &[N]),
    other: &mut FarVec<u64>,
    work: impl FnOnce() -> R,
) -> R {
    let is_over = AtomicBool::new(false);
    let mut of_reader = seeded(word(random));
    std::thread::scope(|threads| {
        let is_over = &is_over;
        let reader = threads.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let index = of_reader.usize(..model.len());
                assert_eq!(bits(vec.get(&heap.enter(), index).unwrap().unwrap()), bits(model[index]));
                let index = index % other.len();
                *other.get_mut(&heap.enter(), index).unwrap().unwrap() += 1;
            }
        });
        let over = Over(is_over);
        let result = work();
        drop(over);
        // A scope does not wait until a thread has given back what it had of the heap.
        reader.join().unwrap();
        result
    })
}

fn copy_and_take<N: Number>(heap: &Heap, random: &mut Rng, rounds: usize, make: fn(u64) -> N) {
    let count = (NEAR * 3 / 2) as usize / size_of::<N>();
    let mut model: Vec<N> = (0..count).map(|_| make(word(random))).collect();
    let mut vec = vec_of(heap, &model);
    let mut other = vec_of(heap, &Vec::from_iter(0..50_000u64));
    for _ in 0..rounds {
        for place in PLACES {
            stir(heap, random, &mut vec, &mut model, make);
            let (one, end) = (random.usize(..count + 1), random.usize(..count + 1));
            let range = one.min(end)..one.max(end);
            let copied = beside(heap, random, (&vec, &model), &mut other, || {
                vec.copy(heap).over(range.clone()).at(place).run().unwrap_or_else(|error| panic!("{place:?}: {error}"))
            });
            // It is a vector as any other.
            let (mut copied, mut copy) = (copied, model[range].to_vec());
            if !copy.is_empty() {
                stir(heap, random, &mut copied, &mut copy, make);
            }
            copied.push(&heap.enter(), model[0]).unwrap();
            copy.push(model[0]);
            compare(heap, &copied, &copy);

            let indices: Vec<u64> = (0..random.usize(..8_000)).map(|_| random.usize(..count) as u64).collect();
            let mut far = vec_of(heap, &indices);
            let is_far = random.usize(..2) == 0;
            if random.usize(..2) == 0 && !indices.is_empty() {
                // Some of it is near, and newer than what is far.
                heap.write_back(far.far_ranges(..)).unwrap();
                *far.get_mut(&heap.enter(), 0).unwrap().unwrap() = indices[0];
            }
            let taken = beside(heap, random, (&vec, &model), &mut other, || {
                let taking = if is_far { vec.take(heap, &far) } else { vec.take(heap, &indices) };
                taking.at(place).run().unwrap_or_else(|error| panic!("{place:?}: {error}"))
            });
            let right: Vec<N> = indices.iter().map(|index| model[*index as usize]).collect();
            compare(heap, &taken, &right);
        }
    }
    compare(heap, &vec, &model);
    drop((vec, other));
    heap.verify();
}

#[test]
fn copies_and_orders_are_those_of_a_loop_on_each_plane() {
    let mut random = seeded(0xc09);
    let (_server, urls) = serve(Registry::standard());
    for (plane, url) in PLANES.into_iter().zip(&urls) {
        let heap = heap(url, plane);
        let rounds = tier(1, 20);
        match plane {
            Plane::Page => copy_and_take(&heap, &mut random, rounds, |bits| bits),
            Plane::Object => {
                copy_and_take(&heap, &mut random, rounds, |bits| bits as u16);
                copy_and_take(&heap, &mut random, rounds, |bits| bits as f32);
            }
            _ => copy_and_take(&heap, &mut random, rounds, |bits| bits as u8 as i8),
        }
    }
}

fn sorted_and_ordered<N: Number>(
    heap: &Heap,
    random: &mut Rng,
    count: usize,
    make: fn(u64) -> N,
    compare_two: fn(&N, &N) -> cmp::Ordering,
) {
    let mut model: Vec<N> = (0..count).map(|_| make(word(random))).collect();
    let mut vec = vec_of(heap, &model);
    let mut other = vec_of(heap, &Vec::from_iter(0..50_000u64));
    for place in PLACES {
        stir(heap, random, &mut vec, &mut model, make);
        let range = random.usize(..count / 3)..count - random.usize(..count / 3);
        // All of it may have room near: so most is sent away, and some of what is near is newer than what is far.
        heap.write_back(vec.far_ranges(random.usize(..count / 3)..)).unwrap();
        stir(heap, random, &mut vec, &mut model, make);
        let (sorted, order) = beside(heap, random, (&vec, &model), &mut other, || {
            let sorting = || vec.sorted(heap).over(range.clone()).at(place);
            let is_right = |error: OffloadError| -> ! { panic!("{place:?}, {range:?}: {error}") };
            (sorting().run().unwrap_or_else(|e| is_right(e)), sorting().order().unwrap_or_else(|e| is_right(e)))
        });
        let mut right: Vec<u64> = range.clone().map(|index| index as u64).collect();
        right.sort_by(|one, other| compare_two(&model[*one as usize], &model[*other as usize]));
        compare(heap, &order, &right);
        let mut right: Vec<N> = right.into_iter().map(|index| model[index as usize]).collect();
        compare(heap, &sorted, &right);
        compare(heap, &vec.take(heap, &order).at(place).run().unwrap(), &right);
        // It is a vector as any other.
        let mut sorted = sorted;
        stir(heap, random, &mut sorted, &mut right, make);
        compare(heap, &sorted, &right);
    }
    compare(heap, &vec, &model);
    drop((vec, other));
    heap.verify();
}

/// As std orders them, and what is no number last.
macro_rules! by_number {
    ($float:ty) => {
        |one: &$float, other: &$float| {
            let class = |number: &$float| (number.is_nan(), number.is_nan() && number.is_sign_negative());
            class(one).cmp(&class(other)).then(one.total_cmp(other))
        }
    };
}

#[test]
fn sorted_copies_and_their_orders_are_those_of_a_loop_for_each_type_and_plane() {
    let mut random = seeded(0x50f7);
    let (_server, urls) = serve(Registry::standard());
    for (plane, url) in PLANES.into_iter().zip(&urls) {
        let heap = heap(url, plane);
        let random = &mut random;
        for _ in 0..tier(1, 10) {
            match plane {
                Plane::Page => {
                    sorted_and_ordered(&heap, random, 140_000, |bits| bits, u64::cmp);
                    sorted_and_ordered(&heap, random, tier(20_000, 70_000), |bits| bits as i32, i32::cmp);
                    let few = |bits| f32::from_bits(((bits as u32) << 20) | ((bits >> 40) as u32 % 3));
                    sorted_and_ordered(&heap, random, tier(20_000, 70_000), few, by_number!(f32));
                }
                Plane::Object => {
                    sorted_and_ordered(&heap, random, tier(20_000, 70_000), |bits| bits as i16 % 1000, i16::cmp);
                    sorted_and_ordered(&heap, random, tier(10_000, 20_000), |bits| bits as u8, u8::cmp);
                    sorted_and_ordered(&heap, random, tier(10_000, 30_000), |bits| bits as i64, i64::cmp);
                    sorted_and_ordered(&heap, random, 10_000, |bits| bits as u32, u32::cmp);
                }
                _ => {
                    // One in sixteen is infinite or no number.
                    let mixed = |bits: u64| f64::from_bits(if bits & 15 == 0 { bits | 0x7ff << 52 } else { bits });
                    sorted_and_ordered(&heap, random, 90_000, mixed, by_number!(f64));
                    sorted_and_ordered(&heap, random, tier(20_000, 70_000), |bits| bits as i8, i8::cmp);
                    sorted_and_ordered(&heap, random, tier(10_000, 30_000), |bits| bits as u16, u16::cmp);
                }
            }
        }
    }
}

#[test]
fn far_columns_are_sorted_far_and_runs_of_runs_too() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[2], Plane::Page);
    // More runs than are merged at once.
    let bytes: Vec<u8> = (0..(65 << 16) + 77u64).map(|number| (number.wrapping_mul(0x9e37_79b9) >> 16) as u8).collect();
    let vec = vec_of(&heap, &bytes);
    heap.write_back(vec.far_ranges(..)).unwrap();
    let before = heap.stats().fetched_bytes;
    let sorted = vec.sorted(&heap).run().unwrap();
    let order = vec.sorted(&heap).over(..500_000).order().unwrap();
    assert_eq!(heap.stats().fetched_bytes - before, 0);
    let mut right: Vec<u64> = (0..500_000).collect();
    right.sort_by_key(|index| bytes[*index as usize]);
    compare(&heap, &order, &right);
    let mut right = bytes;
    right.sort_unstable();
    compare(&heap, &sorted, &right);
    // What was between is not kept.
    drop((vec, sorted, order));
    heap.verify();
}

/// Words of three times near.
fn words() -> Vec<u64> {
    (0..3 * NEAR / 8).map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// An order without any.
fn shuffled(len: usize) -> Vec<u64> {
    (0..len as u64).map(|place| place.wrapping_mul(0x9e37_79b1) % len as u64).collect()
}

#[test]
fn far_columns_and_their_results_stay_far() {
    let (_server, urls) = serve(Registry::standard());
    for url in &urls {
        let heap = heap(url, Plane::Page);
        let words = words();
        let vec = vec_of(&heap, &words);
        let indices = &shuffled(words.len())[..100_000];
        let order = vec_of(&heap, indices);
        let fetched = |act: &dyn Fn() -> FarVec<u64>| {
            let before = heap.stats().fetched_bytes;
            let made = act();
            (made, heap.stats().fetched_bytes - before)
        };
        for place in [Where::Auto, Where::Server] {
            let (copy, of_copy) = fetched(&|| vec.copy(&heap).at(place).run().unwrap());
            let (taken, of_taken) = fetched(&|| vec.take(&heap, &order).at(place).run().unwrap());
            assert!(of_copy <= NEAR && of_taken <= NEAR, "{place:?} fetched {of_copy} and {of_taken} bytes");
            compare(&heap, &copy, &words);
            let formula = || Formula::of(&vec) * &vec - Formula::constant(3);
            let (computed, of_computed) = fetched(&|| heap.compute(formula()).over(9..).at(place).run().unwrap());
            assert!(of_computed <= NEAR, "{place:?} fetched {of_computed} bytes");
            let squares = words[9..].iter().map(|word| word.wrapping_mul(*word).wrapping_sub(3));
            compare(&heap, &computed, &squares.collect::<Vec<_>>());
            drop(computed);
            let right: Vec<u64> = indices.iter().map(|index| words[*index as usize]).collect();
            compare(&heap, &taken, &right);
            // Copies of copies.
            let (again, of_again) = fetched(&|| taken.copy(&heap).over(77..).at(place).run().unwrap());
            assert!(of_again <= NEAR);
            compare(&heap, &again, &right[77..]);
        }
        let (_, of_here) = fetched(&|| vec.copy(&heap).at(Where::Client).run().unwrap());
        assert!(of_here > 2 * NEAR, "{of_here}: so it would have been seen");
        drop((vec, order));
        heap.verify();
    }
}

#[test]
fn far_memory_of_copies_is_used_again() {
    let (server, urls) = serve(Registry::standard());
    let heap = heap(&urls[0], Plane::Page);
    let words = words();
    let vec = vec_of(&heap, &words);
    for round in 0..tier(4, 40) {
        let copy = vec.copy(&heap).run().unwrap();
        // What comes to the same far addresses is written by others: near, and at the server.
        let near = vec_of(&heap, &words[..words.len() / 4]);
        assert_eq!(copy.aggregate(&heap).run().unwrap(), vec.aggregate(&heap).run().unwrap(), "round {round}");
        drop(copy);
        compare(&heap, &near, &words[..words.len() / 4]);
    }
    compare(&heap, &vec, &words);
    drop(vec);
    heap.verify();
    drop(heap);
    server.shutdown(Duration::ZERO);
}

#[test]
fn scopes_other_heaps_and_wrong_indices_are_said() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[1], Plane::Page);
    let words: Vec<u64> = (0..10_000).collect();
    let mut vec = vec_of(&heap, &words);
    {
        let scope = heap.enter();
        assert_eq!(vec.get(&scope, 5).unwrap(), Some(&5));
        let refused = Err(OffloadError::Far(FarError::NearFull));
        assert_eq!(vec.copy(&heap).at(Where::Server).run().map(drop), refused);
        assert_eq!(vec.take(&heap, &words).at(Where::Server).run().map(drop), refused);
        assert_eq!(vec.sorted(&heap).at(Where::Server).order().map(drop), refused);
        assert_eq!(vec.sorted(&heap).over(7..9).run().unwrap().len(), 2);
        assert_eq!(vec.copy(&heap).run().unwrap().len(), 10_000, "here it can be done");
        assert_eq!(vec.take(&heap, &words).run().unwrap().len(), 10_000);
    }
    *vec.get_mut(&heap.enter(), 9_999).unwrap().unwrap() = 1;
    compare(
        &heap,
        &vec.copy(&heap).over(9_990..).at(Where::Server).run().unwrap(),
        &[9990, 9991, 9992, 9993, 9994, 9995, 9996, 9997, 9998, 1],
    );
    compare(&heap, &vec.take(&heap, &vec![9_999, 0]).at(Where::Server).run().unwrap(), &[1, 0]);
    let elsewhere = Heap::builder().build().unwrap();
    let foreign = vec_of(&elsewhere, &[0u64]);
    let other_heap = Err(OffloadError::Far(FarError::OtherHeap));
    assert_eq!(vec.copy(&elsewhere).run().map(drop), other_heap);
    assert_eq!(vec.take(&elsewhere, &words).run().map(drop), other_heap);
    assert_eq!(vec.take(&heap, &foreign).run().map(drop), other_heap);
    assert_eq!(vec.sorted(&elsewhere).run().map(drop), other_heap);
    assert!(FarVec::<f32>::new().sorted(&heap).at(Where::Server).order().unwrap().is_empty());
    assert!(FarVec::<f32>::new().copy(&heap).at(Where::Server).run().unwrap().is_empty());
    for place in PLACES {
        for wrong in [&[0, 10_000][..], &[u64::MAX]] {
            let far = vec_of(&heap, wrong);
            for order in [farfield::collections::Order::Near(wrong), farfield::collections::Order::Far(&far)] {
                let taken = std::panic::AssertUnwindSafe(|| vec.take(&heap, order).at(place).run().map(drop));
                let panic = std::panic::catch_unwind(taken).expect_err("there is no such element");
                let text = panic.downcast_ref::<String>().unwrap();
                assert!(text.starts_with("index out of bounds: the len is 10000 but the index is "), "{text}");
            }
        }
    }
    drop((vec, foreign));
    heap.verify();
}

/// Servers of before know no formulas, and none knows those that are very long: then they are computed near.
#[test]
fn formulas_that_no_server_knows_are_computed_near() {
    fn long(column: &FarVec<i64>, times: i128) -> Formula<'_, i64> {
        (1..times).fold(Formula::of(column), |sum, _| sum + column)
    }
    let (_server, urls) = serve(Registry::standard());
    let (_old, of_old) = serve(Registry::new().with::<Aggregate>().with::<farfield_wic::columns::Group<i64>>());
    let numbers: Vec<i64> = (0..NEAR as i64 / 8).map(|row| row * 7919 % 1013 - 500).collect();
    for (url, times, name) in [(&urls[0], 5, None), (&urls[0], 70, Some("")), (&of_old[0], 5, Some("ff.compute.i64"))] {
        let heap = heap(url, Plane::Page);
        let column = vec_of(&heap, &numbers);
        let right: i128 = numbers.iter().map(|number| i128::from(*number) * times).sum();
        for place in [Where::Client, Where::Auto] {
            let found = heap.group((), long(&column, times)).at(place).run().unwrap();
            assert_eq!(found[0].1.sum(), right, "{url} {place:?}");
        }
        let found = heap.group((), long(&column, times)).at(Where::Server).run();
        match name {
            None => assert_eq!(found.unwrap()[0].1.sum(), right),
            Some("") => assert_eq!(found.map(drop), Err(OffloadError::Call(CallError::Nowhere))),
            Some(name) => assert_eq!(found.map(drop), Err(OffloadError::Call(CallError::NoFunction { name }))),
        }
        let sums = Vec::from_iter(numbers.iter().map(|number| number * times as i64));
        compare(&heap, &heap.compute(long(&column, times)).run().unwrap(), &sums);
        let refused = heap.compute(long(&column, times)).at(Where::Server).run().map(drop);
        match name {
            None => assert_eq!(refused, Ok(())),
            Some("") => assert_eq!(refused, Err(OffloadError::Call(CallError::Nowhere))),
            Some(_) => assert_eq!(refused, Err(OffloadError::Call(CallError::NoFunction { name: "ff.column.i64" }))),
        }
        // Columns as they are need no formula.
        assert_eq!(heap.group((), &column).at(Where::Server).run().unwrap()[0].1.count(), numbers.len() as u64);
    }
}

#[test]
fn pools_without_one_server_and_servers_without_the_function_do_it_near() {
    let (_server, urls) = serve(Registry::standard());
    let (_old, of_old) = serve(Registry::new().with::<Aggregate>());
    let words: Vec<u64> = (0..NEAR * 3 / 2 / 8).collect();
    let order = shuffled(words.len());
    let right: Vec<u64> = order.iter().map(|index| words[*index as usize]).collect();
    let without = ["ram:".to_owned(), format!("stripe({},{})", urls[0], of_old[0])];
    // What only one server of a mirror has done the other would have to be given each time.
    let half = format!("mirror({},{})", urls[0], of_old[0]);
    for pool in without.iter().chain(&of_old).chain([&half]) {
        let heap = heap(pool, Plane::Page);
        let vec = vec_of(&heap, &words);
        for _ in 0..2 {
            compare(&heap, &vec.copy(&heap).run().unwrap(), &words);
            compare(&heap, &vec.take(&heap, &order[..3000].to_vec()).run().unwrap(), &right[..3000]);
            compare(&heap, &vec.sorted(&heap).over(5..20_000).run().unwrap(), &words[5..20_000]);
            let refused = [
                vec.copy(&heap).at(Where::Server).run().map(drop),
                vec.take(&heap, &order).at(Where::Server).run().map(drop),
                vec.sorted(&heap).at(Where::Server).order().map(drop),
            ];
            for refused in refused {
                let is_named = match refused {
                    Err(OffloadError::Call(CallError::NoFunction { name })) => {
                        ["ff.copy", "ff.take.8", "ff.sort"].contains(&name) && !without.contains(pool)
                    }
                    Err(OffloadError::Call(CallError::Nowhere)) => without.contains(pool),
                    _ => false,
                };
                assert!(is_named, "{pool}: {refused:?}");
            }
            assert_eq!(heap.health(), Health::Good, "{pool}");
        }
        drop(vec);
        heap.verify();
    }
}

/// Few values and many, by turns, so that answers are full at different rows.
fn key(random: &mut Rng, row: usize) -> i16 {
    if (row / 7000).is_multiple_of(2) { random.usize(..7) as i16 - 3 } else { random.usize(..3000) as i16 }
}

/// A column, and the numbers that it has.
type Twin<'c, N> = (&'c [N], &'c FarVec<N>);

/// Only some rows, by ranges of other columns: floating-point numbers by the order of all there are.
fn conditional(
    heap: &Heap,
    keys: Twin<'_, i16>,
    marks: Twin<'_, f32>,
    fares: Twin<'_, f64>,
    rows: Range<usize>,
    place: Where,
) {
    let all = (Bound::Unbounded, Bound::Unbounded);
    let above = |mark: f32, low: f32| mark.total_cmp(&low).is_ge();
    for (low, dear) in [(0.0f32, -500.0), (-0.0, 1e9), (1.5, f64::NEG_INFINITY), (f32::NAN, 0.0)] {
        let is_kept = |row: usize| above(marks.0[row], low) && fares.0[row].total_cmp(&dear).is_gt();
        let dear = (Bound::Excluded(dear), Bound::Unbounded);
        let found = heap.tally(keys.1).over(rows.clone()).within(marks.1, low..).within(fares.1, dear).at(place).run();
        let mut counts: BTreeMap<i16, u64> = BTreeMap::new();
        let kept = || rows.clone().filter(|row| is_kept(*row));
        kept().for_each(|row| *counts.entry(keys.0[row]).or_default() += 1);
        assert!(found.unwrap().into_iter().eq(counts), "{place:?}, {rows:?}, {low}");

        let said = |part: &Part<f64>| bits((part.count(), part.sum(), part.min(), part.max()));
        let group = || heap.group(keys.1, fares.1).over(rows.clone()).within(marks.1, low..).within(fares.1, dear);
        let found = group().at(place).run().unwrap();
        let twice = group().and(fares.1).at(place).run_all().unwrap();
        assert!(twice.iter().all(|(_, parts)| parts.len() == 2 && said(&parts[0]) == said(&parts[1])));
        let first = twice.iter().map(|(key, parts)| (*key, said(&parts[0])));
        assert!(first.eq(found.iter().map(|(key, part)| (*key, said(part)))), "{place:?}, {rows:?}");
        let mut wanted: BTreeMap<i16, Part<f64>> = BTreeMap::new();
        kept().for_each(|row| wanted.entry(keys.0[row]).or_default().add_all(&fares.0[row..=row], &all));
        let found = Vec::from_iter(found.iter().map(|(key, part)| (*key, said(part))));
        assert_eq!(found, Vec::from_iter(wanted.iter().map(|(key, part)| (*key, said(part)))), "{place:?}, {rows:?}");

        // What is computed of several columns, two of which have other types, beside one as it is.
        let product = || Formula::of(keys.1) * fares.1;
        let mixed = product() - (Formula::constant(0.3) - Formula::of(marks.1)) * fares.1 + Formula::of(keys.1);
        let found = heap.group(keys.1, mixed).and(fares.1).and(product()).over(rows.clone());
        let found = found.within(marks.1, low..).within(fares.1, dear).at(place).run_all().unwrap();
        let mut wanted: BTreeMap<i16, [Part<f64>; 3]> = BTreeMap::new();
        for row in kept() {
            let (key, mark, fare) = (f64::from(keys.0[row]), f64::from(marks.0[row]), fares.0[row]);
            let parts = wanted.entry(keys.0[row]).or_default();
            for (part, number) in parts.iter_mut().zip([key * fare - (0.3 - mark) * fare + key, fare, key * fare]) {
                part.add_all(&[number], &all);
            }
        }
        let found = Vec::from_iter(found.iter().map(|(key, parts)| (*key, Vec::from_iter(parts.iter().map(said)))));
        let wanted = Vec::from_iter(wanted.iter().map(|(key, parts)| (*key, Vec::from_iter(parts.iter().map(said)))));
        assert_eq!(found, wanted, "{place:?}, {rows:?}, {low}");

        let found = heap.group((), fares.1).over(rows.clone()).within(keys.1, 1..=2).within(marks.1, low..).at(place);
        let mut wanted = Part::default();
        rows.clone()
            .filter(|row| (1..=2).contains(&keys.0[*row]) && above(marks.0[*row], low))
            .for_each(|row| wanted.add_all(&fares.0[row..=row], &all));
        let found = found.run().unwrap().pop().map_or(Part::default(), |((), part)| part);
        assert_eq!(said(&found), said(&wanted), "{place:?}, {rows:?}");
    }
    let nothing = heap.group(keys.1, fares.1).within(keys.1, 5..5).at(place).run().unwrap();
    assert!(nothing.is_empty());
    // Whole numbers wrap around, and keep their lowest bits when they become shorter.
    let narrow = || Formula::<i8>::of(keys.1);
    let found =
        heap.group((), narrow() * narrow() - Formula::constant(100)).over(rows.clone()).at(place).run().unwrap();
    let mut wanted = Part::default();
    rows.for_each(|row| {
        let key = keys.0[row] as i8;
        wanted.add_all(&[key.wrapping_mul(key).wrapping_sub(100)], &(Bound::Unbounded, Bound::Unbounded));
    });
    assert_eq!(found.first().map_or(Part::default(), |(_, part)| part.clone()), wanted, "{place:?}");
}

/// Bits as a part of keys and as a condition, and keys of more than two columns.
fn of_bits_and_many(
    heap: &Heap,
    keys: Twin<'_, i16>,
    marks: Twin<'_, f32>,
    bits: Twin<'_, u64>,
    rows: Range<usize>,
    place: Where,
) {
    let bit = |row: usize| bits.0[row / 64] >> (row % 64) & 1;
    let columns = [KeyColumn::bits(bits.1, keys.0.len()), keys.1.into(), marks.1.into()];
    let key = |row: usize| [bit(row), keys.0[row].image(), marks.0[row].image(), 0, 0, 0, 0, 0];
    let found = heap.group(&columns[..], keys.1).over(rows.clone()).at(place).run().unwrap();
    let mut wanted: BTreeMap<[u64; KEYS_MAX], Part<i16>> = BTreeMap::new();
    let all = (Bound::Unbounded, Bound::Unbounded);
    rows.clone().for_each(|row| wanted.entry(key(row)).or_default().add_all(&keys.0[row..=row], &all));
    assert!(found.into_iter().eq(wanted), "{place:?}, {rows:?}");

    let asked = heap.tally((marks.1, keys.1, marks.1)).over(rows.clone()).marked(bits.1).within(keys.1, ..100);
    let found = asked.at(place).run().unwrap().into_iter();
    let found: BTreeMap<_, _> =
        found.map(|((mark, key, same), count)| ((mark.to_bits(), key, same.to_bits()), count)).collect();
    let mut wanted: BTreeMap<(u32, i16, u32), u64> = BTreeMap::new();
    for row in rows.clone().filter(|row| bit(*row) == 1 && keys.0[*row] < 100) {
        *wanted.entry((marks.0[row].to_bits(), keys.0[row], marks.0[row].to_bits())).or_default() += 1;
    }
    assert_eq!(found, wanted, "{place:?}, {rows:?}");
}

fn tally_group_rank_and_find(heap: &Heap, random: &mut Rng, places: &[Where], rounds: usize) {
    let count = 60_000;
    let keys: Vec<i16> = (0..count).map(|row| key(random, row)).collect();
    let marks: Vec<f32> = (0..count).map(|_| [0.0, -0.0, 1.5, f32::NAN][random.usize(..4)]).collect();
    let make: fn(u64) -> f64 = |bits| if bits.is_multiple_of(1001) { f64::NAN } else { (bits as i16 as f64) * 0.1 };
    let mut fares: Vec<f64> = (0..count).map(|_| make(word(random))).collect();
    let bits_of_rows: Vec<u64> = (0..count.div_ceil(64)).map(|_| word(random)).collect();
    let (of_keys, of_marks, mut of_fares) = (vec_of(heap, &keys), vec_of(heap, &marks), vec_of(heap, &fares));
    let of_bits = vec_of(heap, &bits_of_rows);
    let mut other = vec_of(heap, &Vec::from_iter(0..50_000u64));
    for place in places.repeat(rounds) {
        stir(heap, random, &mut of_fares, &mut fares, make);
        let (one, end) = (random.usize(..count + 1), random.usize(..count + 1));
        let rows = one.min(end)..one.max(end);
        // All of it has room near: so some of each column is sent away.
        let mut some = || random.usize(..count / 2)..random.usize(..count / 2) + count / 2;
        let (of_one, of_other) = (of_keys.far_ranges(some()), of_marks.far_ranges(some()));
        heap.write_back(of_one.chain(of_other).chain(of_fares.far_ranges(some()))).unwrap();
        heap.write_back(of_bits.far_ranges(random.usize(..bits_of_rows.len())..)).unwrap();
        let right = |error: OffloadError| -> ! { panic!("{place:?}, {rows:?}: {error}") };
        beside(heap, random, (&of_fares, &fares), &mut other, || {
            let found = heap.tally(&of_keys).over(rows.clone()).at(place).run().unwrap_or_else(|error| right(error));
            let mut wanted: BTreeMap<i16, u64> = BTreeMap::new();
            keys[rows.clone()].iter().for_each(|key| *wanted.entry(*key).or_default() += 1);
            assert!(found.into_iter().eq(wanted), "{place:?}, {rows:?}");

            let pairs = heap.tally((&of_marks, &of_keys)).over(rows.clone()).at(place).run();
            let mut wanted: BTreeMap<(u32, i16), u64> = BTreeMap::new();
            rows.clone().for_each(|row| *wanted.entry((marks[row].to_bits(), keys[row])).or_default() += 1);
            let pairs = pairs.unwrap_or_else(|error| right(error));
            let found: BTreeMap<_, _> =
                pairs.into_iter().map(|((mark, key), count)| ((mark.to_bits(), key), count)).collect();
            assert_eq!(found, wanted, "{place:?}, {rows:?}");

            let found = heap.group(&of_keys, &of_fares).over(rows.clone()).at(place).run();
            let mut wanted: BTreeMap<i16, Part<f64>> = BTreeMap::new();
            let all = (Bound::Unbounded, Bound::Unbounded);
            // In another order than anybody else.
            rows.clone().rev().for_each(|row| wanted.entry(keys[row]).or_default().add_all(&fares[row..=row], &all));
            let said = |(key, part): &(i16, Part<f64>)| bits((key, part.count(), part.sum(), part.min(), part.max()));
            let found = found.unwrap_or_else(|error| right(error));
            assert_eq!(
                Vec::from_iter(found.iter().map(said)),
                Vec::from_iter(wanted.into_iter().map(|pair| said(&pair)))
            );
            {
                let formula = Formula::of(&of_marks) * &of_fares - (Formula::constant(0.5) + Formula::of(&of_keys));
                let computed = heap.compute(formula).over(rows.clone()).at(place).run();
                let computed = computed.unwrap_or_else(|error| right(error));
                let number = |row: usize| f64::from(marks[row]) * fares[row] - (0.5 + f64::from(keys[row]));
                compare(heap, &computed, &Vec::from_iter(rows.clone().map(number)));
            }
            conditional(heap, (&keys, &of_keys), (&marks, &of_marks), (&fares, &of_fares), rows.clone(), place);
            of_bits_and_many(
                heap,
                (&keys, &of_keys),
                (&marks, &of_marks),
                (&bits_of_rows, &of_bits),
                rows.clone(),
                place,
            );
        });
        let mut sorted: Vec<f64> = fares[rows.clone()].iter().copied().filter(|fare| !fare.is_nan()).collect();
        sorted.sort_by(f64::total_cmp);
        let ranks = || of_fares.ranks(heap).over(rows.clone()).at(place);
        let middle = sorted.len().checked_sub(1).map(|last| sorted[last / 2]);
        assert_eq!(bits(ranks().median().unwrap_or_else(|error| right(error))), bits(middle));
        let rank = random.usize(..count);
        assert_eq!(bits(ranks().nth(rank as u64).unwrap()), bits(sorted.get(rank)));
        assert_eq!(bits(ranks().quantile(1.0).unwrap()), bits(sorted.last()));

        let low = make(word(random));
        for values in [(Bound::Included(low), Bound::Excluded(low + 300.0)), (Bound::Unbounded, Bound::Unbounded)] {
            let found =
                of_fares.find(heap, values).over(rows.clone()).at(place).run().unwrap_or_else(|error| right(error));
            let is_all = values.0 == Bound::Unbounded;
            let wanted = rows.clone().filter(|row| is_all || values.contains(&fares[*row])).map(|row| row as u64);
            compare(heap, &found, &Vec::from_iter(wanted));
        }
    }
    drop((of_keys, of_marks, of_fares, of_bits, other));
    heap.verify();
}

#[test]
fn counts_groups_ranks_and_places_are_those_of_a_loop_on_each_plane() {
    let mut random = seeded(0x9c0);
    let (_server, urls) = serve(Registry::standard());
    for (plane, url) in PLANES.into_iter().zip(&urls) {
        tally_group_rank_and_find(&heap(url, plane), &mut random, &PLACES, tier(1, 10));
    }
}

/// So many that several threads look at them, all of them near or most.
#[test]
fn many_near_rows_are_counted_as_by_a_loop() {
    let (_server, urls) = serve(Registry::standard());
    let mut random = seeded(17);
    let keys: Vec<u16> = (0..700_000).map(|_| random.usize(..5000) as u16).collect();
    let fares: Vec<f64> = keys.iter().map(|key| f64::from(*key) * 0.1 - random.usize(..90) as f64).collect();
    let all = (Bound::Unbounded, Bound::Unbounded);
    let (mut counts, mut parts) = (BTreeMap::<u16, u64>::new(), BTreeMap::<u16, Part<f64>>::new());
    for (key, fare) in keys.iter().zip(&fares) {
        *counts.entry(*key).or_default() += 1;
        parts.entry(*key).or_default().add_all(&[*fare], &all);
    }
    let mut sorted = fares.clone();
    sorted.sort_unstable_by(f64::total_cmp);
    let dear = (0..700_000u64).filter(|row| fares[*row as usize] > 490.0).collect::<Vec<_>>();
    let said = |part: &Part<f64>| bits((part.count(), part.sum(), part.min(), part.max()));
    for (near, plane) in [(16, Plane::Page), (6, Plane::Page), (16, Plane::Hybrid)] {
        let heap = Heap::builder().near(near * MIB).far(1 << 28).plane(plane).pool(&urls[1]).patience(PATIENCE);
        let heap = heap.build().unwrap();
        let (of_keys, of_fares) = (vec_of(&heap, &keys), vec_of(&heap, &fares));
        assert!(heap.tally(&of_keys).run().unwrap().into_iter().eq(counts.clone()), "{near} MiB near");
        let groups = heap.group(&of_keys, &of_fares).run().unwrap();
        let wanted = parts.iter().map(|(key, part)| (*key, said(part)));
        assert!(groups.iter().map(|(key, part)| (*key, said(part))).eq(wanted), "{near} MiB near");
        let median = of_fares.ranks(&heap).median().unwrap();
        assert_eq!(median.map(f64::to_bits), Some(sorted[349_999].to_bits()), "{near} MiB near");
        let few = heap.group(&of_keys, &of_fares).most(counts.len() - 1).run();
        assert_eq!(few.unwrap_err(), OffloadError::TooMany { most: counts.len() - 1 });
        let found = of_fares.find(&heap, (Bound::Excluded(490.0), Bound::Unbounded)).run().unwrap();
        compare(&heap, &found, &dear);
    }
}

#[test]
fn over_a_stripe_rows_are_asked_for_where_all_their_columns_are() {
    let mut random = seeded(0x9c2);
    let (_one, of_one) = serve(Registry::standard());
    let (_other, of_other) = serve(Registry::standard());
    let pools = [
        (Plane::Hybrid, format!("stripe({},{},{})", of_one[2], of_other[0], of_one[1])),
        (Plane::Page, format!("stripe({},{})", of_one[0], of_other[2])),
    ];
    for (plane, url) in pools.into_iter().take(tier(1, 2)) {
        let heap = heap(&url, plane);
        // The columns of some rows are at different members: these are looked at here.
        tally_group_rank_and_find(&heap, &mut random, &[Where::Client, Where::Auto], tier(1, 10));
        let numbers: Vec<u16> = (0..NEAR as usize).map(|row| (row * row) as u16 % 1000).collect();
        let column = vec_of(&heap, &numbers);
        heap.write_back(column.far_ranges(..)).unwrap();
        let before = heap.stats().fetched_bytes;
        for place in [Where::Server, Where::Auto] {
            let found = heap.tally(&column).over(7..).at(place).run().unwrap();
            let mut wanted: BTreeMap<u16, u64> = BTreeMap::new();
            numbers[7..].iter().for_each(|number| *wanted.entry(*number).or_default() += 1);
            assert!(found.into_iter().eq(wanted), "{url} {place:?}");
            let mut sorted = numbers[..numbers.len() - 5].to_vec();
            sorted.sort_unstable();
            let nth = column.ranks(&heap).over(..sorted.len()).at(place).nth(1_234_567).unwrap();
            assert_eq!(nth, Some(sorted[1_234_567]), "{url} {place:?}");
        }
        // What finds its guess and its answers is near.
        let fetched = heap.stats().fetched_bytes - before;
        assert!(fetched <= NEAR / 2, "{url} fetched {fetched} bytes");
        for place in [Where::Server, Where::Auto] {
            let found = column.find(&heap, 17..19).at(place).run().unwrap();
            let wanted = (0..numbers.len()).filter(|row| (17..19).contains(&numbers[*row]));
            compare(&heap, &found, &Vec::from_iter(wanted.map(|row| row as u64)));
        }
        let apart = heap.group(&column, &vec_of(&heap, &vec![1u64; numbers.len()])).at(Where::Server).run().map(drop);
        assert_eq!(apart, Err(OffloadError::Call(CallError::Nowhere)));
    }
}

/// Of long columns some rows are looked at first: here they say what is so, nothing, or the contrary.
#[test]
fn ranks_of_long_columns_are_right_whatever_their_first_rows_say() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[2], Plane::Page);
    let mut random = seeded(0x9c1);
    let rows = (1 << 20) + 4321;
    let shapes: [&mut dyn FnMut(usize) -> i16; 5] = [
        &mut |_| word(&mut random) as i16,
        &mut |row| (row / 40) as i16,
        &mut |_| -7,
        // One in eight units has the smallest, or the largest, and so has half of those that are looked at.
        &mut |row| if row / 2048 % 8 == 0 { i16::MIN } else { (row % 3) as i16 },
        &mut |row| if row / 2048 % 8 == 0 { i16::MAX } else { (row % 3) as i16 },
    ];
    for (shape, number) in shapes.into_iter().enumerate() {
        let numbers: Vec<i16> = (0..rows).map(number).collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        let column = vec_of(&heap, &numbers);
        heap.write_back(column.far_ranges(..)).unwrap();
        for place in PLACES {
            let ranks = || column.ranks(&heap).at(place);
            assert_eq!(ranks().median().unwrap(), Some(sorted[(rows - 1) / 2]), "{shape} {place:?}");
            let ranks_of_all = [0, 1, rows / 100, rows / 8, rows / 2 + 9, rows - 2, rows - 1, rows];
            for rank in ranks_of_all.into_iter().skip(shape % tier(4, 1)).step_by(tier(4, 1)) {
                let found = ranks().nth(rank as u64).unwrap();
                assert_eq!(found, sorted.get(rank).copied(), "{shape} {place:?} {rank}");
            }
            assert_eq!(ranks().quantile(0.99).unwrap(), Some(sorted[(rows as f64 * 0.99).ceil() as usize - 1]));
        }
    }
}

#[test]
fn questions_about_far_columns_leave_them_far() {
    let (_server, urls) = serve(Registry::standard());
    let heap = heap(&urls[2], Plane::Page);
    let words = words();
    let keys: Vec<u8> = words.iter().map(|word| (word >> 61) as u8).collect();
    let (of_words, of_keys) = (vec_of(&heap, &words), vec_of(&heap, &keys));
    // All of it is far.
    heap.write_back(of_words.far_ranges(..).chain(of_keys.far_ranges(..))).unwrap();
    let before = heap.stats().fetched_bytes;
    assert_eq!(heap.tally(&of_keys).run().unwrap().len(), 8);
    assert_eq!(heap.group(&of_keys, &of_words).run().unwrap().len(), 8);
    assert_eq!(heap.group((), &of_words).within(&of_keys, 3..).run().unwrap().len(), 1);
    let product = || Formula::of(&of_keys) * &of_words;
    let right = || words.iter().zip(&keys).map(|(word, key)| u128::from(word.wrapping_mul(u64::from(*key)))).sum();
    assert_eq!(heap.group((), product()).run().unwrap()[0].1.sum(), right());
    // The words as bits, of the first rows.
    let first_bits = [KeyColumn::bits(&of_words, of_keys.len()), (&of_keys).into()];
    assert_eq!(heap.tally(&first_bits[..]).run().unwrap().len(), 16);
    let marked = heap.group((), &of_words).marked(&of_words).run().unwrap();
    let set = |row: &usize| words[row / 64] >> (row % 64) & 1 == 1;
    assert_eq!(marked[0].1.count(), (0..words.len()).filter(set).count() as u64);
    assert_eq!(of_words.ranks(&heap).nth(0).unwrap(), words.iter().copied().min());
    assert_eq!(of_words.find(&heap, words[5]..=words[5]).run().unwrap().len(), 1);
    assert_eq!(heap.stats().fetched_bytes - before, 0);
    // More values than answers have room for are had here, and that is no other answer.
    assert_eq!(heap.tally(&of_words).over(..70_000).run().unwrap().len(), 70_000);
    let refused = heap.tally(&of_words).most(1000).run().map(drop);
    assert_eq!(refused, Err(OffloadError::TooMany { most: 1000 }));
    let refused = heap.group(&of_words, &of_keys).most(10).at(Where::Client).run().map(drop);
    assert_eq!(refused, Err(OffloadError::TooMany { most: 10 }));
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| heap.tally((&of_words, &FarVec::<u8>::new())).run()));
    assert!(panic.is_err(), "columns of a table have equal lengths");
    let short = FarVec::<u8>::new();
    let panics = |ask: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask)).is_err();
    assert!(panics(&|| drop(heap.tally(&of_words).within(&short, ..))) && panics(&|| drop(heap.tally(()))));
    let (bits, too_many) = (vec_of(&heap, &[7u64]), vec![KeyColumn::from(&of_keys); KEYS_MAX + 1]);
    assert!(panics(&|| _ = KeyColumn::bits(&bits, 65)) && panics(&|| drop(heap.tally(&of_keys).marked(&bits))));
    assert!(panics(&|| drop(heap.tally(&too_many[..]))) && heap.tally(&too_many[1..]).run().unwrap().len() == 8);
    let many = |count: usize| {
        let asked = (0..count).fold(heap.tally(&of_keys), |asked, _| asked.within(&of_keys, 1..));
        asked.run().unwrap()
    };
    assert_eq!(many(CONDITIONS_MAX).len(), 7);
    assert!(panics(&|| drop(many(CONDITIONS_MAX + 1))));
}

#[test]
fn a_server_that_dies_gives_an_error_by_name() {
    for place in PLACES {
        let (server, urls) = serve(Registry::standard());
        let heap = heap(&urls[0], Plane::Page);
        let words = words();
        let vec = vec_of(&heap, &words);
        ask_until_gone(server, &format!("{place:?}"), || vec.copy(&heap).over(5..).at(place).run().map(drop));
        drop(vec);
        heap.verify();
    }
}

#[test]
fn a_server_that_is_killed_while_it_sorts_gives_an_error_by_name() {
    let scratch = Scratch::new("columns-sort");
    for (number, place) in PLACES.into_iter().enumerate() {
        let server = farfield_tests::Server::start_tcp::<&str>(&scratch, &format!("server-{number}"), []);
        let heap = heap(server.url(), Plane::Page);
        let words = words();
        let vec = vec_of(&heap, &words);
        // Two answers, and then one is on its way.
        let rows = if place == Where::Client { words.len() - 5000.. } else { 5.. };
        ask_until(
            || server.kill(),
            &format!("{place:?}"),
            || {
                vec.sorted(&heap).over(rows.clone()).at(place).order().map(drop)?;
                vec.sorted(&heap).over(rows.clone()).at(place).run().map(drop)?;
                // Its elements are far, if others came meanwhile.
                vec.copy(&heap).at(Where::Client).run().map(drop)
            },
        );
        drop(vec);
        heap.verify();
    }
}

#[test]
fn over_a_mirror_columns_are_made_and_asked_at_its_servers() {
    let mut random = seeded(0x22);
    let (_one, of_one) = serve(Registry::standard());
    let (_other, of_other) = serve(Registry::standard());
    let url = format!("mirror({},{})", of_one[0], of_other[2]);
    for plane in PLANES.into_iter().take(tier(1, PLANES.len())) {
        let heap = heap(&url, plane);
        copy_and_take(&heap, &mut random, tier(1, 10), |bits| bits);
        tally_group_rank_and_find(&heap, &mut random, &PLACES, tier(1, 10));
    }
    let heap = heap(&url, Plane::Page);
    sorted_and_ordered::<u64>(&heap, &mut random, 100_000, |bits| bits, u64::cmp);
    // Both hold what was made: nothing is copied from one to the other afterwards.
    let words = words();
    let vec = vec_of(&heap, &words);
    let before = heap.stats();
    let copy = vec.copy(&heap).at(Where::Server).run().unwrap();
    let after = heap.stats();
    assert!(after.fetched_bytes - before.fetched_bytes <= 2 * NEAR, "it was made here");
    assert_eq!(heap.health(), Health::Good);
    compare(&heap, &copy, &words);
}

/// Copies, orders and sorted copies, made where the numbers are as long as a server holds everything.
fn make_some(heap: &Heap, random: &mut Rng, vec: &FarVec<u64>, words: &[u64]) {
    let place = if random.usize(..2) == 0 { Where::Auto } else { Where::Server };
    let from = random.usize(..words.len() / 2);
    let near = |made: Result<FarVec<u64>, OffloadError>, again: &dyn Fn() -> Result<FarVec<u64>, OffloadError>| {
        match made {
            Ok(made) => made,
            // By name, and here it can be done.
            Err(OffloadError::Call(error)) if place == Where::Server => {
                let is_known = matches!(error, CallError::NotNow | CallError::Fault(Fault::Lost(_)));
                assert!(is_known, "{error:?}");
                again().unwrap()
            }
            Err(error) => panic!("{place:?}: {error:?}"),
        }
    };
    let copy = || vec.copy(heap).over(from..);
    let copied = near(copy().at(place).run(), &|| copy().run());
    compare(heap, &copied, &words[from..]);
    let indices: Vec<u64> = (0..20_000).map(|_| random.usize(..words.len()) as u64).collect();
    let taken = near(vec.take(heap, &indices).at(place).run(), &|| vec.take(heap, &indices).run());
    let right: Vec<u64> = indices.iter().map(|index| words[*index as usize]).collect();
    compare(heap, &taken, &right);
    let sorting = || vec.sorted(heap).over(from..);
    let sorted = near(sorting().at(place).run(), &|| sorting().run());
    let mut right = words[from..].to_vec();
    right.sort_unstable();
    compare(heap, &sorted, &right);
}

#[test]
fn results_are_whole_while_servers_of_a_mirror_are_killed() {
    let mut random = seeded(0xc0de);
    let scratch = Scratch::new("columns-kills");
    let begin = |number: usize, url: &str| {
        farfield_tests::Server::start_at::<&str>(&scratch, &format!("server-{number}"), url.to_owned(), [])
    };
    let mut servers = [begin(0, "tcp://127.0.0.1:0"), begin(1, "tcp://127.0.0.1:0")].map(Some);
    let urls = servers.each_ref().map(|server| server.as_ref().unwrap().url().to_owned());
    let heap = heap(&format!("mirror({})", urls.join(",")), Plane::Page);
    let words = words();
    let vec = vec_of(&heap, &words);
    let (rounds, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let mut of_killer = seeded(word(&mut random));
    std::thread::scope(|threads| {
        let killer = threads.spawn(|| {
            let _over = Over(&is_over);
            for kill in 0..tier(2, 40) {
                let from = rounds.load(Ordering::Relaxed) + of_killer.usize(..2);
                wait_until("all goes on", || rounds.load(Ordering::Relaxed) >= from);
                wait_until("both hold everything", || heap.health() == Health::Good);
                std::thread::sleep(Duration::from_millis(of_killer.usize(..300) as u64));
                servers[kill % 2].take().unwrap().kill();
                std::thread::sleep(Duration::from_millis(of_killer.usize(..200) as u64));
                servers[kill % 2] = Some(begin(kill % 2, &urls[kill % 2]));
            }
        });
        while !is_over.load(Ordering::Relaxed) {
            make_some(&heap, &mut random, &vec, &words);
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        killer.join().unwrap();
    });
    make_some(&heap, &mut random, &vec, &words);
    compare(&heap, &vec, &words);
    drop(vec);
    heap.verify();
}

#[test]
fn copies_are_whole_while_the_pool_is_exchanged() {
    let (_one, of_one) = serve(Registry::standard());
    let (_two, of_two) = serve(Registry::standard());
    let heap = heap(&of_one[0], Plane::Page);
    let words = words();
    let vec = vec_of(&heap, &words);
    let before = vec.copy(&heap).run().unwrap();
    for to in [&of_two[0], &of_one[1], &of_two[2]] {
        let switch = heap.switch_pool(to.as_str()).unwrap();
        let is_over = AtomicBool::new(false);
        let kept = std::thread::scope(|threads| {
            let asker = threads.spawn(|| {
                let mut last = None;
                while !is_over.load(Ordering::Relaxed) {
                    last = Some(vec.copy(&heap).over(..words.len() / 4).run().unwrap());
                }
                last
            });
            let switched = switch.wait(PATIENCE);
            is_over.store(true, Ordering::Relaxed);
            switched.expect("it ends").unwrap();
            asker.join().unwrap()
        });
        compare(&heap, &vec.copy(&heap).at(Where::Server).run().unwrap(), &words);
        // What was made before the pool was exchanged, at its server or here, is there.
        compare(&heap, &before, &words);
        kept.iter().for_each(|kept| compare(&heap, kept, &words[..words.len() / 4]));
    }
    drop((vec, before));
    heap.verify();
}
