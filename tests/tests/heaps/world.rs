//! Everything that a heap can hold, and everything that can go on with it while its server dies.

use farfield::collections::Index;
use farfield::task::Executor;
use farfield::{
    FarArc, FarArray, FarBTreeMap, FarBox, FarBytes, FarError, FarList, FarMap, FarQueue, FarVec, Heap, PoolError,
    Scope,
};
use fastrand::Rng;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn is_gone(error: FarError) -> bool {
    matches!(error, FarError::Pool(PoolError::ServerGone { .. }))
}

/// Of 4 KiB on the page plane; small on the others, where larger ones come by pages, too.
pub(crate) type Value<const WORDS: usize> = [u64; WORDS];

/// What goes on while the server dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Get,
    GetMut,
    GetMany,
    FetchMany,
    Copy,
    Pin,
    Alloc,
    Fetch,
    Prefetch,
    WriteBack,
    Resize,
    Shared,
    Vector,
    Scan,
    Array,
    Bytes,
    Map,
    MapMany,
    MapTask,
    FarIndex,
    Tree,
    List,
    Queue,
}

pub(crate) const OPERATIONS: [Operation; 23] = [
    Operation::Get,
    Operation::GetMut,
    Operation::GetMany,
    Operation::FetchMany,
    Operation::Copy,
    Operation::Pin,
    Operation::Alloc,
    Operation::Fetch,
    Operation::Prefetch,
    Operation::WriteBack,
    Operation::Resize,
    Operation::Shared,
    Operation::Vector,
    Operation::Scan,
    Operation::Array,
    Operation::Bytes,
    Operation::Map,
    Operation::MapMany,
    Operation::MapTask,
    Operation::FarIndex,
    Operation::Tree,
    Operation::List,
    Operation::Queue,
];

impl Operation {
    /// Is near memory full of values with an owner each, which are read in the end?
    pub(crate) fn is_of_values(self) -> bool {
        (self as u8) < Operation::Shared as u8
    }
}

/// Everything that is in the heap.
pub(crate) struct World<const WORDS: usize> {
    pub(crate) heap: Heap,
    pub(crate) values: Vec<FarBox<Value<WORDS>>>,
    near: u64,
    rest: Rest,
}

/// Collections, and what they hold for sure.
struct Rest {
    shared: Vec<FarArc<Value<8>>>,
    vector: FarVec<Value<8>>,
    array: Option<FarArray<u64, 2>>,
    texts: Vec<FarBytes>,
    map: FarMap<u64, Value<8>>,
    far_index: FarMap<u64, Value<8>>,
    tree: FarBTreeMap<u64, Value<8>>,
    list: FarList<Value<8>>,
    queue: FarQueue<Value<8>>,
    /// All keys below it are there.
    keys: u64,
    /// The numbers in the list.
    listed: Range<u64>,
    /// The numbers in the queue.
    queued: Range<u64>,
}

/// Keys that are put in at random are below this.
const KEYS: usize = 40_000;

impl<const WORDS: usize> World<WORDS> {
    pub(crate) fn new(heap: Heap, near: u64) -> World<WORDS> {
        let rest = Rest {
            shared: Vec::new(),
            vector: FarVec::new(),
            array: None,
            texts: Vec::new(),
            map: FarMap::new(&heap).expect("room for a map"),
            far_index: FarMap::builder().index(Index::Far).build(&heap).expect("room for a map"),
            tree: FarBTreeMap::new(),
            list: FarList::new(),
            queue: FarQueue::new(),
            keys: 0,
            listed: 0..0,
            queued: 0..0,
        };
        World { heap, values: Vec::new(), near, rest }
    }

    fn add(&mut self) -> Result<(), FarError> {
        let mut value = [self.values.len() as u64; WORDS];
        value[0] = 0;
        self.values.push(self.heap.alloc(value)?);
        Ok(())
    }

    /// One step of `operation`. What it finds is right.
    pub(crate) fn step(&mut self, operation: Operation, random: &mut Rng) -> Result<(), FarError> {
        let count = self.values.len();
        match operation {
            Operation::Alloc => return self.add(),
            Operation::Fetch => return self.fetch(random),
            Operation::MapTask => return self.rest.map_task(&self.heap, random),
            Operation::Resize => self.heap.set_near(self.near / 2 * (1 + random.usize(..2) as u64)),
            Operation::WriteBack => {
                let first = random.usize(..count - 16);
                let range = self.heap.far_range(&self.values[first]);
                self.heap.write_back(range)?;
            }
            _ => {}
        }
        let (heap, values) = (&self.heap, &mut self.values);
        let scope = heap.enter();
        let index = random.usize(..count);
        let right = |index: usize, value: &Value<WORDS>| assert_eq!(value[1..], [index as u64; WORDS][1..]);
        match operation {
            Operation::GetMut => {
                let value = values[index].get_mut(&scope)?;
                value[0] += 1;
                right(index, value);
            }
            Operation::GetMany => {
                let first = random.usize(..count - 16);
                let found = heap.get_many(&scope, &values[first..first + 16])?;
                found.into_iter().enumerate().for_each(|(at, value)| right(first + at, value));
            }
            Operation::FetchMany => {
                let first = random.usize(..count - 16);
                let found = Executor::new(heap).block_on(heap.fetch_many(&scope, &values[first..first + 16]))?;
                found.into_iter().enumerate().for_each(|(at, value)| right(first + at, value));
            }
            Operation::Copy => {
                drop(scope);
                values[index].write(|value| value[0] += 1)?;
                values[index].read_once(|value| right(index, value))?;
            }
            Operation::Pin => {
                let pinned = values[index].pin()?;
                drop(scope);
                right(index, &pinned);
            }
            Operation::Prefetch => {
                let first = random.usize(..count - 16);
                heap.prefetch(&values[first..first + 16]);
                let index = first + random.usize(..16);
                right(index, values[index].get(&scope)?);
            }
            operation if operation.is_of_values() => {
                right(index, values[index].get(&scope)?);
            }
            operation => {
                drop(scope);
                self.rest.step(heap, operation, random)?;
            }
        }
        Ok(())
    }

    fn fetch(&self, random: &mut Rng) -> Result<(), FarError> {
        let (heap, values) = (&self.heap, &self.values);
        let executor = Executor::new(heap);
        let fetch = |index: usize| {
            executor.spawn(async move {
                let scope = heap.enter();
                values[index].fetch(&scope).await.map(|value| assert_eq!(value[1..], [index as u64; WORDS][1..]))
            })
        };
        let tasks: Vec<_> = (0..16).map(|_| fetch(random.usize(..values.len()))).collect();
        executor.block_on(async {
            let mut all = Ok(());
            for task in tasks {
                all = all.and(task.await.expect("no task panics"));
            }
            all
        })
    }

    /// Fills what `operation` works on: values of three times `near`, and its collection.
    pub(crate) fn fill(&mut self, operation: Operation, count: &AtomicU64) -> Result<(), FarError> {
        for _ in 0..3 * self.near / size_of::<Value<WORDS>>() as u64 {
            self.add()?;
            count.fetch_add(1, Ordering::Relaxed);
        }
        if operation == Operation::Array {
            self.rest.array =
                Some(FarArray::from_fn(&self.heap.enter(), [512, 512], |[row, column]| (512 * row + column) as u64)?);
        }
        for number in 0..self.near / 64 {
            if !self.rest.fill(&self.heap, operation, number)? {
                break;
            }
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// How many values are there; all others are gone with the server, which is said.
    pub(crate) fn survivors(&self) -> usize {
        let mut good = 0;
        for (index, value) in self.values.iter().enumerate() {
            let scope = self.heap.enter();
            match value.get(&scope) {
                Ok(value) => {
                    assert_eq!(value[1..], [index as u64; WORDS][1..]);
                    good += 1;
                }
                Err(error) => assert!(is_gone(error), "{error:?}"),
            }
        }
        good
    }

    /// Everything is dropped; then the heap is in order.
    pub(crate) fn end(self) {
        let World { heap, values, rest, .. } = self;
        drop((values, rest));
        heap.verify();
    }
}

impl Rest {
    /// False: the operation needs no more.
    fn fill(&mut self, heap: &Heap, operation: Operation, number: u64) -> Result<bool, FarError> {
        let scope = heap.enter();
        match operation {
            Operation::Shared => self.shared.push(heap.alloc_shared([number; 8])?),
            Operation::Vector | Operation::Scan => self.vector.push(&scope, [number; 8])?,
            Operation::Bytes => self.texts.push(FarBytes::copy_of(&scope, &[number as u8; 64])?),
            Operation::Map | Operation::MapMany | Operation::MapTask => {
                self.map.insert(&scope, number, [number; 8])?;
                self.keys += 1;
            }
            Operation::FarIndex => {
                self.far_index.insert(&scope, number, [number; 8])?;
                self.keys += 1;
            }
            Operation::Tree => {
                self.tree.insert(&scope, number, [number; 8])?;
                self.keys += 1;
            }
            Operation::List => self.push_listed(&scope)?,
            Operation::Queue => self.push_queued(&scope)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn step(&mut self, heap: &Heap, operation: Operation, random: &mut Rng) -> Result<(), FarError> {
        let mut scope = heap.enter();
        let key = random.usize(..KEYS) as u64;
        let puts_in = random.usize(..2) == 0;
        match operation {
            // The server died before there was anything.
            Operation::Shared if self.shared.is_empty() => {}
            Operation::Vector if self.vector.is_empty() => {}
            Operation::Array if self.array.is_none() => {}
            Operation::Bytes if self.texts.is_empty() => {}
            Operation::Shared => {
                let index = random.usize(..self.shared.len());
                assert_eq!(self.shared[index].clone().get(&scope)?, &[index as u64; 8]);
            }
            Operation::Vector if random.usize(..4) == 0 => self.vector.push(&scope, [self.vector.len() as u64; 8])?,
            Operation::Vector => {
                let index = random.usize(..self.vector.len());
                assert_eq!(self.vector.get(&scope, index)?, Some(&[index as u64; 8]));
            }
            Operation::Scan => {
                let (mut scan, mut number) = (self.vector.scan(&mut scope), 0);
                while let Some(chunk) = scan.next_chunk()? {
                    for value in chunk {
                        assert_eq!(*value, [number; 8]);
                        number += 1;
                    }
                }
                assert_eq!(number, self.vector.len() as u64);
            }
            Operation::Array => {
                let Some(array) = &self.array else { unreachable!("it was filled") };
                let at = [random.usize(..512), random.usize(..512)];
                assert_eq!(array.get(&scope, at)?, Some(&((512 * at[0] + at[1]) as u64)));
            }
            Operation::Bytes => {
                let index = random.usize(..self.texts.len());
                self.texts[index].extend_from_slice(&scope, &[index as u8])?;
                let text = self.texts[index].get(&scope)?;
                assert!(text.len() > 64 && text.iter().all(|byte| *byte == index as u8));
            }
            Operation::Map if puts_in => drop(self.map.insert(&scope, key, [key; 8])?),
            Operation::Map => self.found(key, self.map.get(&scope, &key)?),
            Operation::MapMany => {
                let keys: Vec<u64> = (0..16).map(|_| random.usize(..KEYS) as u64).collect();
                let found = self.map.get_many(&scope, &keys)?;
                keys.iter().zip(found).for_each(|(key, found)| self.found(*key, found));
            }
            Operation::FarIndex if puts_in => drop(self.far_index.insert(&scope, key, [key; 8])?),
            Operation::FarIndex => self.found(key, self.far_index.get(&scope, &key)?),
            Operation::Tree if puts_in => drop(self.tree.insert(&scope, key, [key; 8])?),
            Operation::Tree => self.found(key, self.tree.get(&scope, &key)?),
            Operation::List if puts_in => self.push_listed(&scope)?,
            Operation::List => {
                let front = self.list.pop_front(&scope)?;
                assert_eq!(front, self.listed.next().map(|number| [number; 8]));
            }
            Operation::Queue if puts_in => self.push_queued(&scope)?,
            Operation::Queue => {
                let front = self.queue.pop(&scope)?;
                assert_eq!(front, self.queued.next().map(|number| [number; 8]));
            }
            other => unreachable!("{other:?} is none of a collection"),
        }
        Ok(())
    }

    fn map_task(&self, heap: &Heap, random: &mut Rng) -> Result<(), FarError> {
        let key = random.usize(..KEYS) as u64;
        let look = heap.fetch_with(|scope| Ok(self.map.get(scope, &key)?.copied()));
        let found = Executor::new(heap).block_on(look)?;
        self.found(key, found.as_ref());
        Ok(())
    }

    fn found(&self, key: u64, found: Option<&Value<8>>) {
        assert!(found.is_some() || key >= self.keys, "{key} was there");
        assert!(found.is_none_or(|value| *value == [key; 8]), "{key}: {found:?}");
    }

    fn push_listed(&mut self, scope: &Scope<'_>) -> Result<(), FarError> {
        self.list.push_back(scope, [self.listed.end; 8])?;
        self.listed.end += 1;
        Ok(())
    }

    fn push_queued(&mut self, scope: &Scope<'_>) -> Result<(), FarError> {
        self.queue.push(scope, [self.queued.end; 8])?;
        self.queued.end += 1;
        Ok(())
    }
}
