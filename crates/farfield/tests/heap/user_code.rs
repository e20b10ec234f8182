//! Code of users that runs inside of our operations (`Eq`, `Ord`, `Hash`, `Borrow`, `Clone`, `Drop`, iterators, closures), and comes back to
//! the same scope for everything that needs room: whatever it does, what the operation and earlier ones have found stays.
//!
//! All of this is safe code. Danger: a scope that begins anew under a reference.

use crate::common::{MIB, Rng, builder, is_deep, seed};
use core::borrow::Borrow;
use core::cell::{Cell, RefCell};
use core::cmp::Ordering;
use core::hash::{Hash, Hasher};
use farfield::collections::{Change, FarBTreeMap, FarList, FarMap, FarQueue, FarVec, Index};
use farfield::task::Executor;
use farfield::{FarBox, Heap, Scope};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

/// What user code gets hold of wherever it runs: the heap, and the scope of the operation that it is called by.
struct World {
    heap: &'static Heap,
    scope: Rc<Scope<'static>>,
    /// A map that it changes.
    map: &'static FarMap<u64, [u64; 60]>,
    random: RefCell<Rng>,
    /// What user code holds beyond the call.
    kept: RefCell<Vec<FarBox<[u64; 60]>>>,
    /// One call in so many panics; 0: none.
    panics: u64,
}

thread_local! {
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
    /// User code is at it already.
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// While it exists, user code called by user code does nothing.
struct Busy;

impl Drop for Busy {
    fn drop(&mut self) {
        IS_BUSY.set(false);
    }
}

/// User code: anything, on the same scope.
fn anything() {
    let Ok(Some(world)) = WORLD.try_with(|world| world.borrow().clone()) else { return };
    if IS_BUSY.replace(true) {
        return;
    }
    let _busy = Busy;
    CALLS.set(CALLS.get() + 1);
    let World { heap, scope, map, random, kept, panics } = &*world;
    let mut random = random.borrow_mut();
    let key = random.u64(..) % 400;
    // Errors are of no interest: mostly the scope is full. Some need as much room as the heap has.
    match random.u64(..) % 12 {
        0 => drop(map.insert(scope, key, [key; 60]).is_ok()),
        1 => drop(map.remove(scope, &key).is_ok()),
        2 => drop(map.update(scope, key, |old| Change::Put([old.map_or(key, |old| old[59]); 60])).is_ok()),
        3 => {
            if let Ok(Some(value)) = map.get(scope, &key) {
                assert!(value.iter().all(|word| *word == key));
            }
        }
        // More than near memory, several times: what nobody holds leaves, and its frames are used by others.
        4 | 9 | 10 => {
            let mut other = FarVec::new();
            let full = (0..8000u64).try_for_each(|number| other.push(scope, [number; 64]).map_err(|_| ()));
            drop((full, other));
        }
        5 => {
            let inner = heap.enter();
            let mut other = FarList::new();
            let full = (0..300u64).try_for_each(|number| other.push_back(&inner, [number; 64]).map_err(|_| ()));
            drop((full, other));
        }
        6 | 11 => {
            let made: Vec<_> = (0..4000).map_while(|_| heap.alloc([key; 60]).ok()).collect();
            let mut kept = kept.borrow_mut();
            kept.clear();
            kept.extend(made);
        }
        7 => {
            let kept = kept.borrow();
            for value in kept.iter().map_while(|value| value.get(scope).ok()) {
                assert!(value.iter().all(|word| *word == value[0]));
            }
        }
        _ => kept.borrow_mut().clear(),
    }
    if *panics > 0 && random.u64(..).is_multiple_of(*panics) {
        panic!("user code panics");
    }
}

/// What is read before and after user code ran in between: whoever has a reference sees the same words.
fn stays<const N: usize>(words: &[u64; N], number: u64) {
    assert!(words.iter().all(|word| *word == number), "{number}: {words:?}");
    anything();
    assert!(words.iter().all(|word| *word == number), "{number} changed under a reference: {words:?}");
}

/// A key whose every use is code of a user.
struct Key([u64; 20]);

impl Key {
    fn new(number: u64) -> Key {
        Key([number; 20])
    }

    fn both(&self, other: &Key) {
        stays(&self.0, self.0[0]);
        stays(&other.0, other.0[0]);
        assert!(self.0.iter().all(|word| *word == self.0[0]));
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.both(other);
        self.0[0] == other.0[0]
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        self.both(other);
        self.0[0].cmp(&other.0[0])
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        stays(&self.0, self.0[0]);
        // Many alike, so that keys are compared with others.
        (self.0[0] % 8).hash(state);
    }
}

/// Borrowed as this one, keys are looked up by other code.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Number(u64);

impl Hash for Number {
    fn hash<H: Hasher>(&self, state: &mut H) {
        anything();
        (self.0 % 8).hash(state);
    }
}

struct Borrowing(Number);

impl PartialEq for Borrowing {
    fn eq(&self, other: &Borrowing) -> bool {
        self.0 == other.0
    }
}

impl Eq for Borrowing {}

impl Hash for Borrowing {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Borrow<Number> for Borrowing {
    fn borrow(&self) -> &Number {
        let before = self.0.0;
        anything();
        assert_eq!(self.0.0, before, "changed under a reference");
        &self.0
    }
}

/// A value with code of a user when it is copied and dropped; also of more than a page, which is dropped where it lies.
struct Value<const N: usize>([u64; N]);

impl<const N: usize> Value<N> {
    fn new(number: u64) -> Value<N> {
        Value([number; N])
    }
}

impl<const N: usize> Clone for Value<N> {
    fn clone(&self) -> Value<N> {
        stays(&self.0, self.0[0]);
        Value(self.0)
    }
}

impl<const N: usize> Drop for Value<N> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            stays(&self.0, self.0[0]);
        }
    }
}

/// A number stands for an entry as long as the world does not change.
const KEYS: u64 = 300;

struct Stage {
    heap: &'static Heap,
    map: &'static FarMap<u64, [u64; 60]>,
    random: Rng,
}

impl Stage {
    /// Never freed: user code may have references to it that are `'static`.
    fn new(seed: u64) -> Stage {
        let heap: &'static Heap = Box::leak(Box::new(builder().near(MIB).near_max(MIB).far(1 << 30).build().unwrap()));
        Stage { heap, map: Box::leak(Box::new(FarMap::new(heap).unwrap())), random: Rng::with_seed(seed) }
    }

    /// Does something with a scope that user code uses too; the scope ends afterwards.
    fn with_scope<R>(&mut self, panics: u64, act: impl FnOnce(&Scope<'static>) -> R) -> Option<R> {
        let scope = Rc::new(self.heap.enter());
        let random = RefCell::new(Rng::with_seed(self.random.u64(..)));
        let world =
            World { heap: self.heap, scope: scope.clone(), map: self.map, random, kept: RefCell::default(), panics };
        WORLD.set(Some(Rc::new(world)));
        let done = catch_unwind(AssertUnwindSafe(|| act(&scope)));
        WORLD.set(None);
        match done {
            Ok(done) => Some(done),
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().copied().map(String::from);
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                assert!(panics > 0 && text == "user code panics", "{text}");
                None
            }
        }
    }
}

/// Runs a step as often as user code has been called many times, with and without panics in it.
fn often(rounds: usize, mut step: impl FnMut(&mut Stage, u64, u64)) {
    let mut stage = Stage::new(seed());
    let rounds = if is_deep() { rounds * 20 } else { rounds };
    CALLS.set(0);
    for round in 0..rounds {
        let number = stage.random.u64(..) % KEYS;
        let panics = if round % 3 == 2 { 40 } else { 0 };
        step(&mut stage, number, panics);
    }
    assert!(CALLS.get() > rounds as u64 / 4, "user code was called {} times", CALLS.get());
}

fn ignore<T>(_: T) {}

/// Panics of user code say nothing.
fn quietly() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload().downcast_ref::<&str>() != Some(&"user code panics") {
                hook(panic);
            }
        }));
    });
}

#[test]
fn values_found_in_a_map_stay_near_while_keys_and_closures_run() {
    quietly();
    for index in [Index::Near, Index::Far] {
        let mut map: Option<FarMap<Key, Value<100>>> = None;
        often(60, |stage, number, panics| {
            let map = map.get_or_insert_with(|| FarMap::builder().index(index).build(stage.heap).unwrap());
            let step = stage.random.u64(..) % 8;
            stage.with_scope(panics, |scope| {
                let key = Key::new(number);
                match step {
                    0 | 1 => {
                        drop(map.insert(scope, key, Value::new(number)).map(|old| old.map(|old| stays(&old.0, number))))
                    }
                    2 => drop(map.get(scope, &key).map(|found| found.map(|found| stays(&found.0, number)))),
                    3 => drop(map.update(scope, key, |old| {
                        old.inspect(|old| stays(&old.0, number));
                        Change::Put(Value::new(number))
                    })),
                    4 => drop(map.update(scope, key, |old| {
                        old.inspect(|old| stays(&old.0, number));
                        Change::<Value<100>>::Keep
                    })),
                    5 => drop(map.remove_if(scope, &key, |value| {
                        stays(&value.0, number);
                        value.0[0] % 2 == 0
                    })),
                    6 => drop(map.insert_new(scope, key, Value::new(number)).map(drop)),
                    _ => {
                        // Two at a time, of which the first shall stay.
                        let first = map.get(scope, &key).ok().flatten();
                        let others = [Key::new(number + 1), Key::new(number + 2)];
                        let many = map.get_many(scope, others.iter().inspect(|_| anything()));
                        let many: Vec<_> = many.into_iter().flatten().collect();
                        anything();
                        first.inspect(|first| stays(&first.0, number));
                        for (found, number) in many.into_iter().zip([number + 1, number + 2]) {
                            found.inspect(|found| stays(&found.0, number));
                        }
                    }
                }
            });
        });
    }
}

#[test]
fn values_found_by_map_entries_stay_near() {
    quietly();
    let mut map: Option<FarMap<Borrowing, [u64; 200]>> = None;
    often(80, |stage, number, panics| {
        let map = map.get_or_insert_with(|| FarMap::new(stage.heap).unwrap());
        let step = stage.random.u64(..) % 2;
        stage.with_scope(panics, |scope| {
            if step > 0 {
                ignore(map.get(scope, &Number(number)).map(|found| found.map(|found| stays(found, number))));
                return;
            }
            if let Ok(entry) = map.entry(scope, Borrowing(Number(number))) {
                let value = entry.and_modify(|value| stays(value, number)).or_insert_with(|| {
                    anything();
                    [number; 200]
                });
                if let Ok(value) = value {
                    stays(value, number);
                }
            }
            ignore(map.prefetch(scope, [&Number(number)].into_iter().inspect(|_| anything())));
        });
    });
}

#[test]
fn values_found_in_a_tree_stay_near_while_keys_run() {
    quietly();
    let mut map: FarBTreeMap<Key, Value<30>> = FarBTreeMap::new();
    often(100, |stage, number, panics| {
        let step = stage.random.u64(..) % 6;
        stage.with_scope(panics, |scope| {
            let key = Key::new(number);
            match step {
                0 | 1 => {
                    drop(map.insert(scope, key, Value::new(number)).map(|old| old.map(|old| stays(&old.0, number))))
                }
                2 => drop(map.get(scope, &key).map(|found| found.map(|found| stays(&found.0, number)))),
                3 => drop(map.remove(scope, &key).map(|old| old.map(|old| stays(&old.0, number)))),
                4 => {
                    if let Ok(range) = map.range(scope, key..) {
                        for (key, value) in range.take(20).map_while(Result::ok) {
                            stays(&value.0, key.0[0]);
                            stays(&key.0, value.0[0]);
                        }
                    }
                }
                _ => {
                    if let Ok(entry) = map.entry(scope, key)
                        && let Ok(value) = entry.or_insert_with(|| {
                            anything();
                            Value::new(number)
                        })
                    {
                        stays(&value.0, number);
                    }
                }
            }
        });
    });
}

#[test]
fn values_found_in_vectors_and_chains_stay_near() {
    quietly();
    let (mut vec, mut queue) = (FarVec::<Value<40>>::new(), FarQueue::<Value<40>>::new());
    often(100, |stage, number, panics| {
        let step = stage.random.u64(..) % 8;
        if vec.len() > 3000 {
            vec.clear();
        }
        stage.with_scope(panics, |scope| {
            match step {
                0 => drop(vec.extend_from_slice(scope, &vec![Value::new(number); 30])),
                1 => drop(vec.resize(scope, vec.len() + 10, Value::new(number))),
                2 => drop(vec.truncate(scope, vec.len() - vec.len().min(25))),
                3 => drop(vec.extend(scope, (0..20).map(|_| Value::new(number)).inspect(|_| anything()))),
                4 => {
                    for value in vec.iter(scope).step_by(9).map_while(Result::ok) {
                        stays(&value.0, value.0[0]);
                    }
                }
                5 => {
                    // What the closure has been given by others outlives the search.
                    let mut found = Vec::new();
                    let result = vec.binary_search_by(scope, |value| {
                        let other = stage_get(&queue, scope);
                        found.extend(other);
                        stays(&value.0, value.0[0]);
                        value.0[0].cmp(&number)
                    });
                    for _ in 0..4 {
                        anything();
                    }
                    found.into_iter().for_each(|(value, number)| stays(value, number));
                    ignore(result);
                }
                6 => drop((0..15).try_for_each(|_| queue.push(scope, Value::new(number)).map_err(drop))),
                _ => {
                    if let Ok(Some(value)) = queue.pop(scope) {
                        stays(&value.0, value.0[0]);
                    }
                }
            }
        });
    });
    vec.clear();
}

/// A value of a queue and what it is made of.
fn stage_get<'a>(queue: &'a FarQueue<Value<40>>, scope: &'a Scope<'_>) -> Option<(&'a [u64; 40], u64)> {
    let value = queue.front(scope).ok()??;
    Some((&value.0, value.0[0]))
}

/// Those that are small are moved out of the heap before, those that are not are dropped where they lie.
#[test]
fn a_value_stays_while_its_destructor_runs() {
    quietly();
    let (mut large, mut small) = (Vec::<FarBox<Value<1200>>>::new(), Vec::<FarBox<Value<90>>>::new());
    often(60, |stage, number, panics| {
        while large.len() < 150 {
            large.push(stage.heap.alloc(Value::new(number)).unwrap_or_else(|error| panic!("{}", error.error)));
            small.push(stage.heap.alloc(Value::new(number)).unwrap_or_else(|error| panic!("{}", error.error)));
        }
        let at = (stage.random.u64(..) % 100) as usize;
        stage.with_scope(panics, |scope| {
            if number % 2 == 0 {
                anything();
            }
            drop((large.swap_remove(at), small.swap_remove(at)));
            ignore(large[at].get(scope).map(|value| stays(&value.0, value.0[0])));
        });
        // And in no scope but the heap's own.
        drop((large.swap_remove(at), small.swap_remove(at)));
    });
}

/// Look-ups of tasks hold what they have found; closures that keep references beyond them, and tasks that end early, do not change that.
#[test]
fn values_found_by_tasks_stay_near() {
    quietly();
    let mut map: Option<FarMap<Key, Value<100>>> = None;
    often(30, |stage, number, panics| {
        let map = map.get_or_insert_with(|| FarMap::new(stage.heap).unwrap());
        let heap = stage.heap;
        stage.with_scope(panics, |scope| {
            for number in number..number + 4 {
                drop(map.insert(scope, Key::new(number), Value::new(number)).map(drop));
            }
        });
        stage.with_scope(panics, |scope| {
            let kept = RefCell::new(Vec::new());
            let found = heap.get_many_with(scope, number..number + 4, |number| {
                kept.borrow_mut().extend(map.get(scope, &Key::new(*number))?.map(|value| (value, *number)));
                anything();
                map.get(scope, &Key::new(*number))
            });
            anything();
            for (value, number) in found.into_iter().flatten().zip(number..) {
                value.inspect(|value| stays(&value.0, number));
            }
            kept.into_inner().into_iter().for_each(|(value, number)| stays(&value.0, number));
        });
        stage.with_scope(panics, |scope| {
            let key = Key::new(number);
            let found = Executor::new(heap).block_on(map.fetch(scope, &key));
            if let Ok(Some(value)) = found {
                stays(&value.0, number);
            }
        });
    });
}

/// What a hint was given is not on its way before the iterator that gives it has ended: it may use the values itself, and panic.
#[test]
fn iterators_of_hints_use_what_they_have_given() {
    quietly();
    let patience = Duration::from_secs(20);
    let heap = builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30).patience(patience).build().unwrap();
    let values: Vec<FarBox<[u64; 512]>> =
        (0..1500).map(|number| heap.alloc([number; 512]).unwrap_or_else(|error| panic!("{}", error.error))).collect();
    for first in (0..1400).step_by(100) {
        // The one before has been given already.
        let given = (first..first + 40).map(|number| {
            if number > first {
                values[number - 1].read(|words| assert_eq!(words[7], number as u64 - 1)).unwrap();
            }
            &values[number]
        });
        heap.prefetch(given);
        let panics = (first + 40..first + 80).map(|number| {
            if number == first + 60 {
                panic!("user code panics");
            }
            &values[number]
        });
        assert!(catch_unwind(AssertUnwindSafe(|| heap.prefetch(panics))).is_err());
        for (number, value) in values.iter().enumerate().skip(first).take(80) {
            value.read(|words| assert_eq!(words[511], number as u64)).unwrap();
        }
    }
    drop(values);
    heap.verify();
}
