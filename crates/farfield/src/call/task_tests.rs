//! Guards against calls of tasks that answer otherwise than those that block, that wait for each other, and
//! that outlive their limits.

use super::fold::FarFold;
use super::function::FarFunction;
use super::function_mut::FarFunctionMut;
use super::place::FarPlace;
use super::place_mut::FarPlaceMut;
use super::tests::region_of;
use super::view_mut::FarMut;
use super::view_traits::FarRef;
use crate::task::Executor;
use crate::{
    CallError, FarBTreeMap, FarBox, FarList, FarString, FarView, FarViewMut, Heap, OffloadError, Plane, Where,
};
use core::ops::ControlFlow;
use core::time::Duration;
use farfield_wic::Fault;
use std::cell::RefCell;

#[derive(FarView)]
struct TaskBranch {
    name: FarString,
    numbers: FarList<u64>,
    by_key: FarBTreeMap<u32, u64>,
    next: Option<FarBox<TaskBranch>>,
}

thread_local! {
    /// Functions that have begun and ended, in order.
    static EVENTS: RefCell<Vec<(u64, bool)>> = const { RefCell::new(Vec::new()) };
}

/// DigestBranches of a list of branches.
struct DigestBranches;

impl FarFunction for DigestBranches {
    const NAME: &'static str = "test.digest";
    const VERSION: u32 = 1;
    type Root = TaskBranch;
    /// Number of the call, and the first key that counts.
    type Argument = (u64, u32);
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, TaskBranch>, (call, from): (u64, u32)) -> Result<u64, Fault> {
        EVENTS.with_borrow_mut(|events| events.push((call, true)));
        let (mut next, mut sum) = (Some(root), 0u64);
        while let Some(pointer) = next {
            let branch = far.follow(pointer).await?;
            sum = sum.rotate_left(9) ^ far.text(branch.name).await?.len() as u64;
            let mut numbers = far.items(branch.numbers);
            while let Some(number) = numbers.next().await? {
                sum = sum.rotate_left(9) ^ number;
            }
            let mut entries = far.range(branch.by_key, from..).rev();
            while let Some((key, value)) = entries.next().await? {
                sum = sum.rotate_left(9) ^ value ^ u64::from(key);
            }
            far.yield_now().await;
            next = branch.next;
        }
        EVENTS.with_borrow_mut(|events| events.push((call, false)));
        Ok(sum)
    }
}

fn branch(heap: &Heap, random: &mut fastrand::Rng, depth: u32) -> FarBox<TaskBranch> {
    let next = (depth > 0).then(|| branch(heap, random, depth - 1));
    let scope = heap.enter();
    let name = FarString::copy_of(&scope, &"n".repeat(random.usize(..50))).unwrap();
    let (mut numbers, mut by_key) = (FarList::new(), FarBTreeMap::new());
    for number in 0..random.u64(..3000) {
        numbers.push_back(&scope, number).unwrap();
        by_key.insert(&scope, random.u32(..1000), number).unwrap();
    }
    drop(scope);
    heap.alloc(TaskBranch { name, numbers, by_key, next }).map_err(|error| error.error).unwrap()
}

#[test]
fn calls_of_tasks_answer_alike_and_their_misses_overlap() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).plane(plane).build().unwrap();
        let mut random = fastrand::Rng::with_seed(3927);
        let roots: Vec<_> = (0..20).map(|_| branch(&heap, &mut random, 3)).collect();
        for from in [0, 300, 1000] {
            let call = |number: usize| heap.call::<DigestBranches>(&roots[number], (number as u64, from));
            let expected: Vec<u64> = (0..20).map(|number| call(number).at(Where::Client).run().unwrap()).collect();
            if plane == Plane::Page {
                // All of it is far, so each function has to wait.
                let _ = region_of(&heap);
            }
            EVENTS.with_borrow_mut(Vec::clear);
            let executor = Executor::new(&heap);
            let tasks: Vec<_> = (0..20).map(|number| executor.spawn(call(number).fetch())).collect();
            executor.block_on(async {
                for (task, expected) in tasks.into_iter().zip(&expected) {
                    assert_eq!(task.await.unwrap().as_ref(), Ok(expected), "{plane:?} from {from}");
                }
            });
            let events = EVENTS.with_borrow_mut(core::mem::take);
            assert_eq!(events.len(), 40);
            if plane == Plane::Page {
                let begun = events.iter().take_while(|(_, is_begin)| *is_begin).count();
                assert!(begun > 10, "{begun} functions had begun before one had ended");
            }
        }
        drop(roots);
        heap.verify();
    }
}

#[test]
fn calls_of_tasks_end_at_their_limits() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let root = branch(&heap, &mut fastrand::Rng::with_seed(1), 5);
    let executor = Executor::new(&heap);
    let call = || heap.call::<DigestBranches>(&root, (0, 0));
    let ended = executor.block_on(call().steps(3).fetch());
    assert!(matches!(ended, Err(OffloadError::Call(CallError::Overrun { steps: 1..=3 }))), "{ended:?}");
    let ended = executor.block_on(call().within(Duration::ZERO).fetch());
    assert_eq!(ended, Err(OffloadError::Call(CallError::TimedOut { after: Duration::ZERO })));
    // A task that is dropped in the middle leaves nothing behind.
    let waiting = executor.spawn(call().fetch());
    drop(waiting);
    drop(executor);
    drop(root);
    heap.verify();
}

/// Sum of numbers from one on.
struct SumFrom;

impl FarFold for SumFrom {
    const NAME: &'static str = "test.sum_from";
    const VERSION: u32 = 1;
    type Over = FarList<[u64; 64]>;
    type Argument = u64;
    type State = u64;

    fn begin(_: &u64) -> u64 {
        0
    }

    fn step(sum: &mut u64, element: [u64; 64], from: &u64) -> ControlFlow<()> {
        *sum += if element[63] < *from { 0 } else { element[63] };
        ControlFlow::Continue(())
    }
}

#[test]
fn folds_of_tasks_answer_alike() {
    let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
    let mut list = FarList::new();
    for number in 0..5000 {
        list.push_back(&heap.enter(), [number; 64]).unwrap();
    }
    let executor = Executor::new(&heap);
    let tasks: Vec<_> = (0..8u64).map(|from| executor.spawn(heap.fold::<SumFrom>(&list, 600 * from).fetch())).collect();
    executor.block_on(async {
        for (from, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap(), Ok((600 * from as u64..5000).sum::<u64>()));
        }
    });
}

#[derive(FarView, FarViewMut)]
struct Counted {
    number: u64,
    payload: [u64; 100],
    next: Option<FarBox<Counted>>,
}

/// Adds to each number of a list, and returns how many there are. Ends with a fault if it is asked to.
struct AddAll;

impl FarFunctionMut for AddAll {
    const NAME: &'static str = "test.add_all";
    const VERSION: u32 = 1;
    type Root = Counted;
    type Argument = (u64, bool);
    type Answer = u64;

    async fn run<P: FarPlaceMut>(far: &P, first: FarMut<'_, Counted>, (add, fails): (u64, bool)) -> Result<u64, Fault> {
        let (mut next, mut count) = (Some(first), 0);
        while let Some(pointer) = next {
            far.change(pointer, |counted| (counted.number, counted.payload[99]) = (counted.number + add, add)).await?;
            (next, count) = (far.follow_mut(pointer).await?.next, count + 1);
        }
        if fails { Err(Fault::NotHere) } else { Ok(count) }
    }
}

#[test]
fn tasks_change_all_or_nothing() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).far(1 << 30).plane(plane).build().unwrap();
        let list = |length: u64| {
            (0..length).fold(None, |next, number| {
                let counted = Counted { number, payload: [0; 100], next };
                Some(heap.alloc(counted).map_err(|error| error.error).unwrap())
            })
        };
        let mut lists: Vec<FarBox<Counted>> = (1..30).filter_map(list).collect();
        let executor = Executor::new(&heap);
        let tasks: Vec<_> = lists
            .iter_mut()
            .enumerate()
            .map(|(index, first)| executor.spawn(heap.call_mut::<AddAll>(first, (1000, index % 4 == 3)).fetch()))
            .collect();
        executor.block_on(async {
            for (index, task) in tasks.into_iter().enumerate() {
                let ended = task.await.unwrap();
                match index % 4 {
                    3 => assert_eq!(ended, Err(OffloadError::Call(CallError::Fault(Fault::NotHere)))),
                    _ => assert_eq!(ended, Ok(index as u64 + 1)),
                }
            }
        });
        drop(executor);
        for (index, first) in lists.iter().enumerate() {
            let scope = heap.enter();
            let (add, mut next, mut number) = (if index % 4 == 3 { 0 } else { 1000 }, Some(first), index as u64 + 1);
            while let Some(counted) = next {
                let counted = counted.get(&scope).unwrap();
                number -= 1;
                assert_eq!((counted.number, counted.payload[99]), (number + add, add), "list {index}");
                next = counted.next.as_ref();
            }
            assert_eq!(number, 0);
        }
        drop(lists);
        heap.verify();
    }
}
