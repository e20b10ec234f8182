//! A small history for Miri, which checks every access against the rules of the language:
//! `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" cargo +nightly miri test -p farfield --test miri`. Runs everywhere else too.
//! Danger: undefined behaviour that happens to work. The values have no padding and no pointers, because Miri cannot run the empty
//! assembly block that makes ordinary bytes of those (`launder` in the evictor).

use farfield::task::Executor;
use farfield::{
    Change, FarBox, FarFunctionMut, FarMap, FarMut, FarPlaceMut, FarVec, FarView, FarViewMut, Fault, Heap, Plane, Scope,
};
use std::time::Duration;

struct Pair([FarBox<[u64; 2]>; 2]);

#[test]
fn a_small_history() {
    let (near, count) = if cfg!(miri) { (1 << 18, 70) } else { (1 << 20, 280) };
    let heap = Heap::builder().near(near).near_max(near).far(1).patience(Duration::from_secs(3600)).build().unwrap();
    let mut pairs: Vec<FarBox<Pair>> = Vec::new();
    for index in 0..8 {
        let pair = [0, 1].map(|side| heap.alloc([index, side]).unwrap());
        pairs.push(heap.alloc(Pair(pair)).unwrap());
    }
    // Large enough that the first ones leave.
    let mut pages = Vec::new();
    for index in 0..count {
        pages.push(heap.alloc([index as u64; 512]).unwrap());
    }
    for (index, page) in pages.iter_mut().enumerate().step_by(16) {
        let scope = heap.enter();
        page.get_mut(&scope).unwrap()[1] += 1;
        let inner = heap.enter();
        assert_eq!(page.get(&inner).unwrap()[..2], [index as u64, index as u64 + 1]);
    }
    let thread = std::thread::scope(|threads| {
        let pages = &pages;
        let heap = &heap;
        let thread = threads.spawn(move || {
            let scope = heap.enter();
            pages[3].get(&scope).unwrap()[0]
        });
        {
            let scope = heap.enter();
            assert_eq!(pages[3].get(&scope).unwrap()[0], 3);
        }
        thread.join().unwrap()
    });
    assert_eq!(thread, 3);
    let Pair([first, _second]) = pairs.remove(3).into_inner().map_err(|(_, error)| error).unwrap();
    assert_eq!(first.into_inner().map_err(|(_, error)| error), Ok([3, 0]));
    for (index, pair) in pairs.iter().enumerate().skip(3) {
        let scope = heap.enter();
        let second = &pair.get(&scope).unwrap().0[1];
        assert_eq!(second.get(&scope).unwrap(), &[index as u64 + 1, 1]);
    }
    drop(pairs);
    let big = heap.alloc([7u8; 10_000]).unwrap();
    drop(pages);
    heap.verify();
    drop(heap);
    drop(big);
}

#[test]
fn a_small_vector() {
    let (near, count) = if cfg!(miri) { (1 << 18, 70 * 512) } else { (1 << 20, 280 * 512) };
    let heap = Heap::builder().near(near).near_max(near).far(1).patience(Duration::from_secs(3600)).build().unwrap();
    let mut vec = FarVec::new();
    let mut scope = heap.enter();
    for first in (0..count).step_by(512) {
        let page: Vec<u64> = (first..first + 512).collect();
        vec.extend_from_slice(&scope, &page).unwrap();
    }
    vec.swap(&scope, 0, 600).unwrap();
    assert_eq!(vec.swap_remove(&scope, 1), Ok(1));
    vec.insert(&scope, count as usize - 700, 5).unwrap();
    assert_eq!(vec.remove(&scope, count as usize - 600), Ok(count - 601));
    let mut scan = vec.scan_mut(&mut scope).once();
    let mut seen = 0;
    while let Some(chunk) = scan.next_chunk().unwrap() {
        chunk[0] += 1;
        seen += chunk.len();
    }
    assert_eq!(seen as u64, count - 1);
    assert_eq!(vec.get(&scope, 600), Ok(Some(&0)));
    let one = vec.chunks_mut(&scope).next().unwrap().unwrap();
    one[0] = 7;
    assert_eq!(one.len() % 512, 0);
    vec.truncate(&scope, 1000).unwrap();
    assert_eq!(vec.iter(&scope).map(|word| *word.unwrap()).filter(|word| *word == 7).count(), 2);
    drop(scope);
    let mut boxes = FarVec::new();
    for number in 0..700u64 {
        let scope = heap.enter();
        boxes.push(&scope, heap.alloc([number, 1]).unwrap()).unwrap();
    }
    drop(vec);
    heap.verify();
    drop(boxes);
    heap.verify();
}

/// Small values: flights, by threads, batches, hints and tasks, and pages that are emptied.
fn small_values(heap: &Heap) {
    let count = if cfg!(miri) { 3000 } else { 12_000 };
    let mut values: Vec<FarBox<[u64; 16]>> = (0..count).map(|index| heap.alloc([index; 16]).unwrap()).collect();
    for (index, value) in values.iter_mut().enumerate().step_by(300) {
        let scope = heap.enter();
        value.get_mut(&scope).unwrap()[1] += 1;
        assert_eq!(value.get(&scope).unwrap()[..2], [index as u64, index as u64 + 1]);
    }
    assert!(heap.stats().misses > 0, "{:?}", heap.stats());
    // All of some pages, while others leave, and of those in between every thirtieth.
    for index in (0..500).chain((500..count as usize).step_by(30)).chain(0..500) {
        let scope = heap.enter();
        assert_eq!(values[index].get(&scope).unwrap()[15], index as u64);
    }
    heap.prefetch(&values[10..20]);
    {
        let scope = heap.enter();
        let seen = heap.get_many(&scope, &values[10..30]).unwrap();
        assert!(seen.iter().zip(10..).all(|(seen, index)| **seen == [index; 16]));
    }
    let executor = Executor::new(heap);
    for (index, value) in values.iter().enumerate().skip(40).take(8) {
        executor.spawn(async move {
            let scope = heap.enter();
            assert_eq!(*value.fetch(&scope).await.unwrap(), [index as u64; 16]);
        });
    }
    executor.run();
    drop(executor);
    heap.prefetch(&values[50..60]);
    std::thread::scope(|threads| {
        let values = &values;
        threads.spawn(move || assert_eq!(values[55].get(&heap.enter()).unwrap()[15], 55));
        assert_eq!(values[55].get(&heap.enter()).unwrap()[15], 55);
    });
    // Of each page a few are left.
    let mut index = 0;
    values.retain(|_| {
        index += 1;
        index % 8 == 0
    });
    for index in 0..count / 8 {
        values.push(heap.alloc([index; 16]).unwrap());
    }
    heap.verify();
    drop(values);
    heap.verify();
}

fn heap_of(plane: Plane) -> Heap {
    let near = if cfg!(miri) { 1 << 18 } else { 1 << 20 };
    let builder = Heap::builder().near(near).near_max(near).far(1).plane(plane).car_threshold(0.5);
    builder.patience(Duration::from_secs(3600)).build().unwrap()
}

/// Walks over collections by functions. Nothing leaves near memory, so values may have padding and pointers.
mod walks {
    use core::ops::ControlFlow;
    use farfield::{
        FarBTreeMap, FarBox, FarBytes, FarFold, FarFunction, FarList, FarPlace, FarRef, FarString, FarVec, FarView,
        Fault, Heap, Plane,
    };

    #[derive(FarView, Default)]
    struct Shelf {
        list: FarList<(u8, u32)>,
        vec: FarVec<FarString>,
        map: FarBTreeMap<u32, Item>,
        bytes: FarBytes,
    }

    #[derive(FarView)]
    #[repr(u8)]
    enum Item {
        Plain(Option<u16>),
        Far { below: FarBox<Shelf> },
    }

    struct Sum;

    impl FarFunction for Sum {
        const NAME: &'static str = "miri.sum";
        const VERSION: u32 = 1;
        type Root = Shelf;
        type Argument = ();
        type Answer = u64;

        async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Shelf>, _: ()) -> Result<u64, Fault> {
            let (mut left, mut sum) = (vec![root], 0);
            while let Some(shelf) = left.pop() {
                let shelf = far.follow(shelf).await?;
                let mut list = far.items_in(shelf.list, 1..);
                while let Some((byte, number)) = list.next().await? {
                    sum += u64::from(byte) + u64::from(number);
                }
                if let Some(text) = far.item(shelf.vec, 3).await? {
                    sum += far.text(text).await?.len() as u64;
                }
                let mut map = far.range(shelf.map, 10..);
                while let Some((key, item)) = map.next().await? {
                    match item {
                        ItemView::Plain(number) => sum += u64::from(key) + u64::from(number.unwrap_or(0)),
                        ItemView::Far { below } => left.push(below),
                    }
                }
                sum += far.range(shelf.map, ..).count().await? as u64;
                sum += far.bytes(shelf.bytes, 1..3).await?.iter().map(|byte| u64::from(*byte)).sum::<u64>();
            }
            Ok(sum)
        }
    }

    struct Largest;

    impl FarFold for Largest {
        const NAME: &'static str = "miri.largest";
        const VERSION: u32 = 1;
        type Over = FarList<(u8, u32)>;
        type Argument = ();
        type State = u32;

        fn begin(_: &()) -> u32 {
            0
        }

        fn step(state: &mut u32, (_, number): (u8, u32), _: &()) -> ControlFlow<()> {
            *state = number.max(*state);
            ControlFlow::Continue(())
        }
    }

    fn shelf(heap: &Heap, below: Option<Shelf>) -> Shelf {
        let (mut shelf, scope) = (Shelf::default(), heap.enter());
        for number in 0..600 {
            shelf.list.push_front(&scope, (1, number)).unwrap();
            let item = Item::Plain((number % 2 == 0).then_some(3));
            shelf.map.insert(&scope, number, item).map_err(|error| error.error).unwrap();
        }
        for text in ["a", "b", "c", "four"] {
            shelf.vec.push(&scope, FarString::copy_of(&scope, text).unwrap()).map_err(|error| error.error).unwrap();
        }
        shelf.bytes.extend_from_slice(&scope, &[1, 2, 3, 4]).unwrap();
        if let Some(below) = below {
            let below = heap.alloc(below).map_err(|error| error.error).unwrap();
            shelf.map.insert(&scope, 1000, Item::Far { below }).map_err(|error| error.error).unwrap();
        }
        shelf
    }

    #[test]
    fn functions_walk_what_is_near() {
        for plane in [Plane::Page, Plane::Object] {
            let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1).plane(plane).build().unwrap();
            let root = shelf(&heap, Some(shelf(&heap, None)));
            let numbers: u64 = (0..600).sum();
            // The first of the list is the last number; keys below ten are not in the range.
            let of_one = (599 + numbers - 599) + 4 + (numbers - 45 + 295 * 3) + 600 + 5;
            assert_eq!(heap.call::<Sum>(&root, ()).run(), Ok(2 * of_one + 1));
            assert_eq!(heap.fold::<Largest>(&root.list, ()).run(), Ok(599));
        }
    }
}

#[test]
fn a_small_history_of_the_object_plane() {
    let heap = heap_of(Plane::Object);
    small_values(&heap);
    assert!(heap.stats().object_misses > 0, "{:?}", heap.stats());
}

/// Some pages come whole, of others values come alone.
#[test]
fn a_small_history_of_the_hybrid_plane() {
    let heap = heap_of(Plane::Hybrid);
    // Which do depends on what else the machine does.
    let both = || {
        small_values(&heap);
        let stats = heap.stats();
        stats.whole_pages > 0 && stats.object_misses > 0
    };
    assert!((0..10).any(|_| both()), "{:?}", heap.stats());
}

/// Keys, closures and destructors that use the scope of the operation that they run in.
fn user_code(heap: &Heap) {
    const KEYS: u64 = 8;
    let rounds = if cfg!(miri) { 2 } else { 10 };
    let map: FarMap<u64, [u64; 200]> = FarMap::new(heap).unwrap();
    (0..KEYS).for_each(|key| map.insert(&heap.enter(), key, [key; 200]).map(drop).unwrap());
    // Needs more than a scope can have.
    let fill = |scope: &Scope<'_>| {
        let mut other = FarVec::new();
        while other.len() < 600 && other.push(scope, [7u64; 64]).is_ok() {}
    };
    let stays = |scope: &Scope<'_>, value: &[u64; 200], key: u64| {
        fill(scope);
        assert_eq!(*value, [key; 200]);
    };
    for key in (0..rounds).map(|round| round % KEYS) {
        let scope = heap.enter();
        let updated = map.update(&scope, key, |old| {
            old.inspect(|value| stays(&scope, value, key));
            Change::Put([key; 200])
        });
        if let Ok(Some(old)) = updated {
            stays(&scope, old, key);
        }
        let scope = heap.enter();
        let kept = map.remove_if(&scope, &key, |value| {
            stays(&scope, value, key);
            false
        });
        assert!(matches!(kept, Ok(Some(_))));
        // References that a closure was given outlive the search.
        let scope = heap.enter();
        let mut numbers = FarVec::new();
        numbers.extend(&scope, 0..4u64).unwrap();
        let mut kept = None;
        let found = numbers.binary_search_by(&scope, |number| {
            kept = map.get(&scope, &key).ok().flatten();
            number.cmp(&key)
        });
        assert!(found.is_ok());
        kept.inspect(|value| stays(&scope, value, key));
    }
    drop(map);
    heap.verify();
}

#[test]
fn user_code_on_the_scope_of_an_operation() {
    [Plane::Page, Plane::Object].map(heap_of).iter().for_each(user_code);
}

#[derive(FarView, FarViewMut)]
struct Link {
    numbers: [u32; 2],
    next: Option<FarBox<Link>>,
}

/// Adds to all numbers of a chain, twice, and answers with their sum in between.
struct Add;

impl FarFunctionMut for Add {
    const NAME: &'static str = "miri.add";
    const VERSION: u32 = 1;
    type Root = Link;
    type Argument = u32;
    type Answer = u32;

    async fn run<P: FarPlaceMut>(far: &P, first: FarMut<'_, Link>, more: u32) -> Result<u32, Fault> {
        let (mut next, mut sum) = (Some(first), 0);
        while let Some(pointer) = next {
            far.change(pointer, |link| link.numbers[0] += more).await?;
            let mut link = far.follow_mut(pointer).await?;
            sum += link.numbers[0];
            link.numbers[1] += more;
            far.store(pointer, link).await?;
            next = link.next;
        }
        Ok(sum)
    }
}

#[test]
fn a_call_that_changes_values() {
    for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
        let near = if cfg!(miri) { 1 << 18 } else { 1 << 20 };
        let builder = Heap::builder().near(near).near_max(near).far(1).plane(plane);
        let heap = builder.patience(Duration::from_secs(3600)).build().unwrap();
        let mut chain = heap.alloc(Link { numbers: [1, 1], next: None }).unwrap();
        for number in 2..6 {
            chain = heap.alloc(Link { numbers: [number; 2], next: Some(chain) }).unwrap();
        }
        assert_eq!(heap.call_mut::<Add>(&mut chain, 10).run(), Ok(65));
        let few = heap.call_mut::<Add>(&mut chain, 10).changes(100).run();
        assert!(few.is_err(), "{few:?}");
        assert_eq!(heap.call_mut::<Add>(&mut chain, 0).run(), Ok(65));
        let scope = heap.enter();
        let (mut next, mut number) = (Some(&chain), 15);
        while let Some(link) = next {
            let link = link.get(&scope).unwrap();
            assert_eq!(link.numbers, [number; 2]);
            (next, number) = (link.next.as_ref(), number - 1);
        }
        assert_eq!(number, 10);
        drop(scope);
        drop(chain);
        heap.verify();
    }
}
