//! Guards against collections of far values that a function sees otherwise over the bytes of a region
//! than in the heap and in std's collections: a table in the value that says something else than the
//! collection, one that moves while it is read, and bytes that are no table.

use super::function::{AtServer, FarAnswer, FarFunction};
use super::place::{FarPlace, RegionStop};
use super::tests::{argument_of, region_of};
use super::view_traits::FarRef;
use crate::{FarArray, FarBox, FarList, FarQueue, FarStack, FarVec, FarView, Heap, Plane, Scope, Where};
use farfield_core::heap::SlotHint;
use farfield_wic::{Fault, Sim, Stop};
use std::collections::VecDeque;

/// A far value with a collection of each kind that has a table.
#[derive(FarView)]
struct Shelf {
    list: FarList<(u32, bool)>,
    queue: FarQueue<[u64; 90]>,
    stack: FarStack<[u8; 3]>,
    numbers: FarVec<u64>,
    /// Elements that are larger than a page.
    large: FarVec<[u64; 700]>,
    grid: FarArray<u16, 2>,
}

impl Shelf {
    fn empty(heap: &Heap) -> Shelf {
        let grid = FarArray::from_fn(&heap.enter(), [0, 0], |_| 0).unwrap();
        let (list, queue, stack) = (FarList::new(), FarQueue::new(), FarStack::new());
        Shelf { list, queue, stack, numbers: FarVec::new(), large: FarVec::new(), grid }
    }
}

#[derive(FarView, Default)]
struct Room {
    shelves: FarVec<FarBox<Shelf>>,
}

/// The same in this process.
#[derive(Default)]
struct ShelfTwin {
    list: VecDeque<(u32, bool)>,
    queue: VecDeque<u64>,
    stack: Vec<[u8; 3]>,
    numbers: Vec<u64>,
    large: Vec<u64>,
    grid: Vec<u16>,
}

/// Text of all that is on the shelves.
struct TellRoom;

impl FarFunction for TellRoom {
    const NAME: &'static str = "test.tell_room";
    const VERSION: u32 = 1;
    type Root = Room;
    type Argument = usize;
    type Answer = String;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Room>, at: usize) -> Result<String, Fault> {
        let mut text = String::new();
        let mut shelves = far.items(far.follow(root).await?.shelves);
        while let Some(shelf) = shelves.next().await? {
            let shelf = far.follow(shelf).await?;
            text.push_str(&format!("\n{} of ", shelf.list.len()));
            let mut list = far.items_in(shelf.list, at..);
            while let Some(element) = list.next().await? {
                text.push_str(&format!("{element:?} "));
            }
            let mut queue = far.items(shelf.queue);
            while let Some(element) = queue.next().await? {
                text.push_str(&format!("{} ", element[89]));
            }
            let mut stack = far.items(shelf.stack);
            while let Some(element) = stack.next().await? {
                text.push_str(&format!("{element:?} "));
            }
            text.push_str(&format!("{:?} of {} ", far.item(shelf.numbers, at).await?, shelf.numbers.len()));
            let mut numbers = far.items(shelf.numbers);
            while let Some(element) = numbers.next().await? {
                text.push_str(&format!("{element} "));
            }
            let mut large = far.items(shelf.large);
            while let Some(element) = large.next().await? {
                text.push_str(&format!("{} ", element[699]));
            }
            let mut grid = far.items(shelf.grid);
            while let Some(element) = grid.next().await? {
                text.push_str(&format!("{element} "));
            }
        }
        Ok(text)
    }
}

impl ShelfTwin {
    fn tell(&self, at: usize) -> String {
        let mut text = format!("\n{} of ", self.list.len());
        self.list.iter().skip(at).for_each(|element| text += &format!("{element:?} "));
        self.queue.iter().for_each(|element| text += &format!("{element} "));
        self.stack.iter().for_each(|element| text += &format!("{element:?} "));
        text += &format!("{:?} of {} ", self.numbers.get(at), self.numbers.len());
        self.numbers.iter().chain(&self.large).for_each(|element| text += &format!("{element} "));
        self.grid.iter().for_each(|element| text += &format!("{element} "));
        text
    }

    /// Changes both in the same way.
    fn change(&mut self, scope: &Scope<'_>, shelf: &mut FarBox<Shelf>, random: &mut fastrand::Rng) {
        let shelf = shelf.get_mut(scope).unwrap();
        for _ in 0..random.usize(1..60) {
            match random.u32(..12) {
                0 => {
                    let element = (random.u32(..), random.bool());
                    shelf.list.push_front(scope, element).unwrap();
                    self.list.push_front(element);
                }
                1 => {
                    let element = (random.u32(..), random.bool());
                    shelf.list.push_back(scope, element).unwrap();
                    self.list.push_back(element);
                }
                2 => assert_eq!(shelf.list.pop_front(scope).unwrap(), self.list.pop_front()),
                3 => assert_eq!(shelf.list.pop_back(scope).unwrap(), self.list.pop_back()),
                // Chunks of five: they come and go, and four are most of what lies in the queue itself.
                4 if self.queue.len() < 15 => {
                    let element = random.u64(..);
                    shelf.queue.push(scope, [element; 90]).unwrap();
                    self.queue.push_back(element);
                }
                4 | 5 => {
                    let popped = shelf.queue.pop(scope).unwrap();
                    assert_eq!(popped.map(|element| element[0]), self.queue.pop_front());
                }
                6 => {
                    let element = [random.u8(..), 1, 2];
                    shelf.stack.push(scope, element).unwrap();
                    self.stack.push(element);
                }
                7 => assert_eq!(shelf.stack.pop(scope).unwrap(), self.stack.pop()),
                8 => {
                    let element = random.u64(..);
                    shelf.numbers.push(scope, element).unwrap();
                    self.numbers.push(element);
                }
                9 if self.large.len() < 12 => {
                    let element = random.u64(..);
                    shelf.large.push(scope, [element; 700]).unwrap();
                    self.large.push(element);
                }
                9 => assert_eq!(shelf.large.pop(scope).unwrap().map(|element| element[0]), self.large.pop()),
                10 => {
                    let rows = random.usize(1..5);
                    shelf.grid =
                        FarArray::from_fn(scope, [rows, 3], |[row, column]| (7 * row + column) as u16).unwrap();
                    self.grid = (0..rows).flat_map(|row| (0..3).map(move |column| (7 * row + column) as u16)).collect();
                }
                _ => {
                    if let Some(number) = self.numbers.last_mut() {
                        *number += 1;
                        *shelf.numbers.get_mut(scope, self.numbers.len() - 1).unwrap().unwrap() += 1;
                    }
                }
            }
        }
    }
}

fn heap(plane: Plane) -> Heap {
    Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).plane(plane).build().unwrap()
}

#[test]
fn short_collections_of_far_values_are_walked_alike_in_the_heap_over_its_bytes_and_in_std() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let (heap, mut random) = (heap(plane), fastrand::Rng::with_seed(3920));
        let (mut room, mut twins) = (Room::default(), Vec::<ShelfTwin>::new());
        for round in 0..10 {
            for _ in 0..3 {
                let shelf = heap.alloc(Shelf::empty(&heap)).map_err(|error| error.error).unwrap();
                room.shelves.push(&heap.enter(), shelf).map_err(|error| error.error).unwrap();
                twins.push(ShelfTwin::default());
            }
            for _ in 0..12 {
                let at = random.usize(..twins.len());
                let scope = heap.enter();
                let shelf = room.shelves.get_mut(&scope, at).unwrap().unwrap();
                twins[at].change(&scope, shelf, &mut random);
            }
            let at = random.usize(..30);
            let expected: String = twins.iter().map(|twin| twin.tell(at)).collect();
            for place in [Where::Client, Where::Auto] {
                let here = heap.call::<TellRoom>(&room, at).at(place).run();
                assert_eq!(here.as_deref(), Ok(&*expected), "{plane:?}, round {round}");
            }
            if plane == Plane::Page {
                let argument = argument_of(&heap, FarRef::from(&room), at);
                let there = Sim::new(round, region_of(&heap)).run_one::<AtServer<TellRoom>>(argument);
                assert!(matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected), "round {round}: {there:?}");
            }
        }
        drop(room);
        heap.verify();
    }
}

/// Sum of all elements of a list and of a vector in one far value.
struct SumShelf;

impl FarFunction for SumShelf {
    const NAME: &'static str = "test.sum_shelf";
    const VERSION: u32 = 1;
    type Root = Shelf;
    type Argument = (bool, usize);
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Shelf>, (queue, most): (bool, usize)) -> Result<u64, Fault> {
        let (shelf, mut sum) = (far.follow(root).await?, 0u64);
        if queue {
            let mut queue = far.items_in(shelf.queue, ..most);
            while let Some(element) = queue.next().await? {
                sum = sum.wrapping_add(element[0]);
            }
            return Ok(sum);
        }
        let mut numbers = far.items_in(shelf.numbers, ..most);
        while let Some(element) = numbers.next().await? {
            sum = sum.wrapping_add(element);
        }
        Ok(sum)
    }
}

#[test]
fn what_is_not_in_the_table_of_a_value_is_read_by_the_heap() {
    let heap = Heap::builder().near(4 << 20).near_max(4 << 20).far(1 << 30).build().unwrap();
    let mut shelf = Shelf::empty(&heap);
    // Five in a chunk, and four chunks in the queue itself; 8 MiB of numbers.
    let (elements, numbers) = (21u64, (8 << 20) / 8 + 1);
    for number in 0..elements - 1 {
        shelf.queue.push(&heap.enter(), [number; 90]).unwrap();
    }
    shelf.numbers.extend(&heap.enter(), 0..numbers).unwrap();
    let mut shelf = heap.alloc(shelf).map_err(|error| error.error).unwrap();
    let there = |heap: &Heap, shelf: &FarBox<Shelf>, argument: (bool, usize)| {
        let call = argument_of(heap, FarRef::from(shelf), argument);
        Sim::new(1, region_of(heap)).run_one::<AtServer<SumShelf>>(call)
    };
    let known = there(&heap, &shelf, (true, usize::MAX));
    assert!(matches!(known, Ok(FarAnswer::Done(190))), "{known:?}");
    {
        let scope = heap.enter();
        shelf.get_mut(&scope).unwrap().queue.push(&scope, [elements - 1; 90]).unwrap();
    }
    let sum = (elements - 1) * elements / 2;
    let long = there(&heap, &shelf, (true, usize::MAX));
    assert!(matches!(long, Ok(FarAnswer::Stopped(RegionStop::TableNear))), "{long:?}");
    assert_eq!(heap.call::<SumShelf>(&shelf, (true, usize::MAX)).at(Where::Client).run(), Ok(sum));
    let sum: u64 = (0..numbers).sum();
    let most = numbers as usize - 1;
    let known = there(&heap, &shelf, (false, most));
    assert!(matches!(known, Ok(FarAnswer::Done(there)) if there == sum - (numbers - 1)), "{known:?}");
    let long = there(&heap, &shelf, (false, usize::MAX));
    assert!(matches!(long, Ok(FarAnswer::Stopped(RegionStop::TableNear))), "{long:?}");
    assert_eq!(heap.call::<SumShelf>(&shelf, (false, usize::MAX)).at(Where::Client).run(), Ok(sum));
}

#[test]
fn tables_of_values_with_wrong_bytes_end_a_walk_in_time_and_never_in_a_panic() {
    let (heap, mut random) = (heap(Plane::Page), fastrand::Rng::with_seed(3921));
    let (mut shelf, mut twin) =
        (heap.alloc(Shelf::empty(&heap)).map_err(|error| error.error).unwrap(), ShelfTwin::default());
    (0..30).for_each(|_| twin.change(&heap.enter(), &mut shelf, &mut random));
    let bytes = region_of(&heap);
    let (place, number) = (FarRef::from(&shelf).place, FarRef::from(&shelf).number.get());
    let first = heap.core().first_page;
    let at = (number - first) as usize * 4096 + usize::from(SlotHint(place).card()) * 16;
    let mut ends = std::collections::BTreeMap::<String, u32>::new();
    for round in 0..3000 {
        let mut bytes = bytes.clone();
        for _ in 0..random.usize(1..4) {
            let at = at + random.usize(..size_of::<Shelf>() / 4) * 4;
            let word = match random.u32(..4) {
                0 => random.u32(..),
                1 => random.u32(..6),
                2 => first + random.u32(..40),
                _ => u32::MAX,
            };
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        let call = argument_of(&heap, FarRef::from(&shelf), (random.bool(), usize::MAX));
        let end = match Sim::new(round, bytes).steps(5_000).run_one::<AtServer<SumShelf>>(call) {
            Err(Stop::Fault(fault)) => format!("{fault:?}"),
            Err(stop) => format!("{stop:?}"),
            Ok(FarAnswer::Stopped(stop)) => format!("{stop:?}"),
            Ok(_) => "Done".into(),
        };
        let end = end.split([' ', '(', '{']).next().unwrap().to_owned();
        assert_ne!(end, "Panicked", "round {round}");
        *ends.entry(end).or_default() += 1;
    }
    println!("{ends:?}");
    assert!(["NoValue", "OutOfRange", "TableNear", "Done"].iter().all(|end| ends.contains_key(*end)), "{ends:?}");
}
