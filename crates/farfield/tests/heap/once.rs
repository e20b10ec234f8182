//! What is used once, or called cold, leaves first, by whatever door; what is hinted comes. Dangers: a stream that displaces what others
//! use, a hint that does nothing, or that takes what is not its own.

use crate::common::heap;
use farfield::collections::Index;
use farfield::task::Executor;
use farfield::{FarArc, FarBTreeMap, FarBox, FarBytes, FarError, FarMap, FarString, FarVec, Heap};
use futures_util::TryStreamExt;
use std::future::ready;

/// Pages that are in use, and that stream by.
const HOT: u64 = 400;
const STREAMED: u64 = 1600;

/// Data of `STREAMED` pages, and `HOT` that are in use, in a heap that has room for half of that. How many of the hot ones have left when
/// the stream has gone by.
fn displaced<T>(make: impl Fn(&Heap) -> T, stream: impl Fn(&Heap, &mut T)) -> u64 {
    let heap = heap(4);
    let mut data = make(&heap);
    let hot: Vec<_> = (0..HOT).map(|index| heap.alloc([index; 512]).unwrap()).collect();
    let read_hot = || {
        let before = heap.stats().misses;
        for (index, value) in hot.iter().enumerate() {
            assert_eq!(value.read(|value| value[511]), Ok(index as u64));
        }
        heap.stats().misses - before
    };
    read_hot();
    let before = heap.stats();
    stream(&heap, &mut data);
    let after = heap.stats();
    let brought = after.misses + after.prefetches - before.misses - before.prefetches;
    assert!(brought > STREAMED / 2, "{brought} of {STREAMED} had to be brought");
    let left = read_hot();
    drop((data, hot));
    heap.verify();
    left
}

/// How something streams by, and its name.
type Way<'a, T> = (&'a str, &'a dyn Fn(&Heap, &mut T));

/// The stream displaces what is in use, and does not when it says that it uses things once.
fn check<T>(what: &str, make: impl Fn(&Heap) -> T, plain: impl Fn(&Heap, &mut T), once: &[Way<'_, T>]) {
    let plain = displaced(&make, plain);
    assert!(plain > HOT * 3 / 4, "{what}: {plain} of {HOT} are displaced by what does not say so");
    for (how, once) in once {
        // A thread that makes room and gets no processor for long has others leave, too: the best of a few.
        let (mut least, mut tries) = (HOT, 0);
        while least >= HOT / 10 && tries < 4 {
            least = least.min(displaced(&make, once));
            tries += 1;
        }
        println!("{what}: {plain} of {HOT} displaced, {least} by {how} ({tries})");
        assert!(least < HOT / 10, "{what}: {least} of {HOT} are displaced by {how}");
    }
}

fn run(heap: &Heap, task: impl Future<Output = Result<(), FarError>>) {
    Executor::new(heap).block_on(task).unwrap();
}

#[test]
fn boxes_that_are_used_once_displace_nothing() {
    let make = |heap: &Heap| (0..STREAMED).map(|index| heap.alloc([index; 512]).unwrap()).collect::<Vec<_>>();
    check(
        "boxes",
        make,
        |_, boxes| boxes.iter().for_each(|value| assert!(value.read(|value| value[0] == value[511]).unwrap())),
        &[
            ("write_once", &|_, boxes| {
                boxes.iter_mut().for_each(|value| value.write_once(|value| value.fill(7)).unwrap());
                assert_eq!(boxes[3].read_once(|value| value[511]), Ok(7));
            }),
            ("fetch_once", &|heap, boxes| {
                run(heap, async {
                    for (index, value) in boxes.iter().enumerate() {
                        assert_eq!(value.fetch_once(&heap.enter()).await?[511], index as u64);
                    }
                    Ok(())
                });
            }),
        ],
    );
    let make = |heap: &Heap| (0..STREAMED).map(|n| heap.alloc_shared([n; 512]).unwrap()).collect::<Vec<FarArc<_>>>();
    check(
        "shared values",
        make,
        |_, values| values.iter().for_each(|value| assert!(value.read(|value| value[0] == value[511]).unwrap())),
        &[("fetch_once", &|heap, values| {
            run(heap, async {
                for (index, value) in values.iter().enumerate() {
                    assert_eq!(value.fetch_once(&heap.enter()).await?[511], index as u64);
                }
                Ok(())
            });
        })],
    );
}

#[test]
fn large_values_that_are_used_once_displace_nothing() {
    let make = |heap: &Heap| (0..STREAMED).map(|index| heap.alloc([index; 700]).unwrap()).collect::<Vec<_>>();
    check(
        "large values",
        make,
        |_, boxes| boxes.iter().for_each(|value| assert!(value.read(|value| value[0] == value[699]).unwrap())),
        &[("read_once", &|_, boxes| {
            boxes.iter().for_each(|value| assert!(value.read_once(|value| value[0] == value[699]).unwrap()));
        })],
    );
}

#[test]
fn elements_that_are_used_once_displace_nothing() {
    let make = |heap: &Heap| {
        let mut vec = FarVec::new();
        vec.extend(&heap.enter(), 0..STREAMED * 512).unwrap();
        vec
    };
    let stepped = |vec: &FarVec<u64>| (0..vec.len()).step_by(512);
    let add = |(at, sum): (u64, u64), batch: Vec<u64>| {
        assert!(batch.iter().zip(at..).all(|(element, expected)| *element == expected));
        ready(Ok((at + batch.len() as u64, sum + batch.iter().sum::<u64>())))
    };
    let expected = (STREAMED * 512, STREAMED * 512 * (STREAMED * 512 - 1) / 2);
    check(
        "elements",
        make,
        |heap, vec| assert_eq!(Executor::new(heap).block_on(vec.stream(..).try_fold((0, 0), add)), Ok(expected)),
        &[
            ("fetch_once", &|heap, vec| {
                run(heap, async {
                    for index in stepped(vec) {
                        assert_eq!(vec.fetch_once(&heap.enter(), index).await?, Some(&(index as u64)));
                    }
                    assert_eq!(vec.fetch_once(&heap.enter(), vec.len()).await?, None);
                    Ok(())
                });
            }),
            ("get_once", &|heap, vec| {
                stepped(vec)
                    .for_each(|index| assert_eq!(vec.get_once(&heap.enter(), index), Ok(Some(&(index as u64)))));
            }),
            ("stream_once", &|heap, vec| {
                let sum = vec.stream_once(..).try_fold((0, 0), add);
                assert_eq!(Executor::new(heap).block_on(sum), Ok(expected));
            }),
        ],
    );
}

#[test]
fn entries_that_are_used_once_displace_nothing() {
    for index in [Index::Near, Index::Far] {
        let make = |heap: &Heap| {
            let map = FarMap::builder().index(index).build(heap).unwrap();
            (0..STREAMED).for_each(|key| assert_eq!(map.insert(&heap.enter(), key, [key; 500]), Ok(None)));
            map
        };
        let is_right = |key: u64, found: Option<&[u64; 500]>| assert_eq!(found.map(|value| value[499]), Some(key));
        check(
            "entries",
            make,
            |heap, map| (0..STREAMED).for_each(|key| is_right(key, map.get(&heap.enter(), &key).unwrap())),
            &[
                ("get_once", &|heap, map| {
                    (0..STREAMED).for_each(|key| is_right(key, map.get_once(&heap.enter(), &key).unwrap()));
                    assert_eq!(map.get_once(&heap.enter(), &STREAMED), Ok(None));
                }),
                ("fetch_once", &|heap, map| {
                    run(heap, async {
                        for key in 0..STREAMED {
                            is_right(key, map.fetch_once(&heap.enter(), &key).await?);
                        }
                        assert_eq!(map.fetch_once(&heap.enter(), &STREAMED).await?, None);
                        Ok(())
                    });
                }),
            ],
        );
    }
}

/// Small entries come one by one where they have handles, to pages that leave first.
#[test]
fn small_entries_that_are_used_once_displace_nothing() {
    const SMALL: u64 = STREAMED * 12;
    let make = |heap: &Heap| {
        let map = FarMap::new(heap).unwrap();
        (0..SMALL).for_each(|key| assert_eq!(map.insert(&heap.enter(), key, [key; 32]), Ok(None)));
        map
    };
    // In another order than that in which they lie.
    let keys = || (0..SMALL).map(|step| step * 7919 % SMALL);
    check(
        "small entries",
        make,
        |heap, map| keys().for_each(|key| assert_eq!(map.get(&heap.enter(), &key), Ok(Some(&[key; 32])))),
        &[("get_once", &|heap, map| {
            keys().for_each(|key| assert_eq!(map.get_once(&heap.enter(), &key), Ok(Some(&[key; 32]))));
        })],
    );
}

#[test]
fn bytes_and_texts_that_are_used_once_displace_nothing() {
    let make = |heap: &Heap| {
        let bytes = |number: u64| FarBytes::copy_of(&heap.enter(), &[number as u8; 4000]).unwrap();
        (0..STREAMED).map(bytes).collect::<Vec<_>>()
    };
    let is_right = |index: usize, bytes: &[u8]| assert!(bytes.len() == 4000 && bytes[3999] == index as u8);
    check(
        "bytes",
        make,
        |heap, all| {
            all.iter().enumerate().for_each(|(index, bytes)| is_right(index, bytes.get(&heap.enter()).unwrap()))
        },
        &[
            ("get_once", &|heap, all| {
                for (index, bytes) in all.iter().enumerate() {
                    is_right(index, bytes.get_once(&heap.enter()).unwrap());
                }
                assert_eq!(FarBytes::new().get_once(&heap.enter()), Ok(&[][..]));
            }),
            ("fetch_once", &|heap, all| {
                run(heap, async {
                    for (index, bytes) in all.iter().enumerate() {
                        is_right(index, bytes.fetch_once(&heap.enter()).await?);
                    }
                    Ok(())
                });
            }),
        ],
    );
    let text = "fär ".repeat(800);
    let make =
        |heap: &Heap| (0..STREAMED).map(|_| FarString::copy_of(&heap.enter(), &text).unwrap()).collect::<Vec<_>>();
    check(
        "texts",
        make,
        |heap, all| all.iter().for_each(|one| assert_eq!(one.get(&heap.enter()), Ok(&text[..]))),
        &[
            ("get_once", &|heap, all| {
                all.iter().for_each(|one| assert_eq!(one.get_once(&heap.enter()), Ok(&text[..])));
            }),
            ("fetch_once", &|heap, all| {
                run(heap, async {
                    for one in all {
                        assert_eq!(one.fetch_once(&heap.enter()).await?, text);
                    }
                    Ok(())
                });
            }),
        ],
    );
}

/// Entries of which five take a node of two pages: so many nodes are inner ones.
#[test]
fn a_walk_through_a_deep_tree_that_is_made_once_displaces_nothing() {
    let entries = STREAMED * 3;
    let make = |heap: &Heap| {
        let mut tree = FarBTreeMap::new();
        (0..entries).for_each(|key| assert_eq!(tree.insert(&heap.enter(), key, [key; 110]), Ok(None)));
        tree
    };
    let walk = |tree: &FarBTreeMap<u64, [u64; 110]>, heap: &Heap, once: bool| {
        let mut expected = 0..entries;
        let visit = |key: &u64, value: &[u64; 110]| assert_eq!((expected.next(), value[109]), (Some(*key), *key));
        let mut scope = heap.enter();
        if once { tree.for_each_once(&mut scope, visit) } else { tree.for_each(&mut scope, visit) }.unwrap();
        assert_eq!(expected.next(), None);
    };
    check(
        "deep trees",
        make,
        |heap, tree| walk(tree, heap, false),
        &[("for_each_once", &|heap, tree| walk(tree, heap, true))],
    );
}

#[test]
fn walks_through_trees_that_are_made_once_displace_nothing() {
    // Six entries to a leaf. A few leaves to a scope: what a scope holds cannot leave.
    let (entries, part) = (STREAMED * 8, 16);
    let make = |heap: &Heap| {
        let mut tree = FarBTreeMap::new();
        (0..entries).for_each(|key| assert_eq!(tree.insert(&heap.enter(), key, [key; 40]), Ok(None)));
        tree
    };
    check(
        "trees",
        make,
        |heap, tree| tree.for_each(&mut heap.enter(), |key, value| assert_eq!(value, &[*key; 40])).unwrap(),
        &[
            ("for_each_once", &|heap, tree| {
                let mut expected = 0..entries;
                let visit = |key: &u64, value: &[u64; 40]| assert_eq!((expected.next(), value[39]), (Some(*key), *key));
                tree.for_each_once(&mut heap.enter(), visit).unwrap();
                assert_eq!(expected.next(), None);
            }),
            ("range.once", &|heap, tree| {
                for from in (0..entries / part).map(|number| number * part) {
                    let scope = heap.enter();
                    let found = tree.range(&scope, from..from + part).unwrap().once();
                    assert!(found.map(|entry| *entry.unwrap().0).eq(from..from + part));
                }
            }),
            ("range.once, from the back", &|heap, tree| {
                for from in (0..entries / part).rev().map(|number| number * part) {
                    let scope = heap.enter();
                    let found = tree.range(&scope, from..from + part).unwrap().once().rev();
                    assert!(found.map(|entry| *entry.unwrap().0).eq((from..from + part).rev()));
                }
            }),
            ("range_mut.once", &|heap, tree| {
                for from in (0..entries / part).map(|number| number * part) {
                    let scope = heap.enter();
                    for entry in tree.range_mut(&scope, from..from + part).unwrap().once() {
                        entry.unwrap().1[0] += 1;
                    }
                }
                assert_eq!(tree.get(&heap.enter(), &5).unwrap().map(|value| value[0]), Some(6));
            }),
        ],
    );
}

/// Of what was used alike, what is called cold has left when something else comes, and the rest has not.
fn cold_goes<T>(make: impl Fn(&Heap) -> T, cold: impl Fn(&Heap, &T, u64), read: impl Fn(&Heap, &T, u64)) {
    const THINGS: u64 = 200;
    let heap = heap(4);
    let alloc = |index: u64| -> FarBox<[u64; 512]> { heap.alloc([index; 512]).unwrap() };
    // Fills what is near, so that room must be made.
    let others: Vec<_> = (0..2000).map(alloc).collect();
    let things = make(&heap);
    let misses = |first: u64| {
        let before = heap.stats().misses;
        (first..THINGS).step_by(2).for_each(|number| read(&heap, &things, number));
        heap.stats().misses - before
    };
    misses(0);
    misses(1);
    (0..THINGS).step_by(2).for_each(|number| cold(&heap, &things, number));
    let more: Vec<_> = (0..150).map(alloc).collect();
    let (warm, cold) = (misses(1), misses(0));
    assert!(warm < 10 && cold > 50, "{warm} and {cold} of 100 have left: {:?}", heap.stats());
    drop((things, others, more));
    heap.verify();
}

#[test]
fn values_marked_as_cold_leave_first() {
    let make = |heap: &Heap| {
        let map = FarMap::new(heap).unwrap();
        (0..200u64).for_each(|key| assert_eq!(map.insert(&heap.enter(), key, [key; 500]), Ok(None)));
        map
    };
    let read = |heap: &Heap, map: &FarMap<u64, [u64; 500]>, key| {
        assert_eq!(map.get(&heap.enter(), &key), Ok(Some(&[key; 500])));
    };
    cold_goes(make, |heap, map, key| map.cold(&heap.enter(), &key), read);
    let make = |heap: &Heap| {
        (0..200u8).map(|number| FarBytes::copy_of(&heap.enter(), &[number; 4000]).unwrap()).collect::<Vec<_>>()
    };
    let read = |heap: &Heap, all: &Vec<FarBytes>, number| {
        assert_eq!(all[number as usize].get(&heap.enter()).unwrap()[3999], number as u8);
    };
    cold_goes(make, |_, all, number| all[number as usize].cold(), read);
    let text = "fär ".repeat(800);
    let make = |heap: &Heap| (0..200).map(|_| FarString::copy_of(&heap.enter(), &text).unwrap()).collect::<Vec<_>>();
    let read = |heap: &Heap, all: &Vec<FarString>, number| {
        assert_eq!(all[number as usize].get(&heap.enter()), Ok(&text[..]));
    };
    cold_goes(make, |_, all, number| all[number as usize].cold(), read);
    FarString::new().cold();
}

#[test]
fn hinted_values_are_fetched() {
    for index in [Index::Near, Index::Far] {
        let heap = heap(4);
        let map = FarMap::<u64, [u64; 500]>::builder().index(index).build(&heap).unwrap();
        (0..STREAMED).for_each(|key| assert_eq!(map.insert(&heap.enter(), key, [key; 500]), Ok(None)));
        let texts: Vec<_> =
            (0..STREAMED).map(|n| FarBytes::copy_of(&heap.enter(), &[n as u8; 4000]).unwrap()).collect();
        // What was made last goes, and its room is free.
        let ballast: Vec<_> = (0..600u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        drop(ballast);
        let keys: Vec<u64> = (0..40).collect();
        // Where the index is far: its page, then what that names.
        let mut begun = map.prefetch(&heap.enter(), &keys);
        keys.iter().for_each(|key| assert_eq!(map.contains_key(&heap.enter(), &(key + STREAMED)), Ok(false)));
        begun += map.prefetch(&heap.enter(), &keys);
        let before = heap.stats();
        assert!(before.prefetches as usize >= begun && begun >= 40, "{begun} of 40: {before:?}");
        keys.iter().for_each(|key| assert_eq!(map.get(&heap.enter(), key), Ok(Some(&[*key; 500]))));
        let after = heap.stats();
        assert_eq!(after.misses, before.misses, "{index:?}");
        texts[..20].iter().for_each(FarBytes::prefetch);
        texts[..20].iter().for_each(|text| assert_eq!(text.get(&heap.enter()).unwrap().len(), 4000));
        let last = heap.stats();
        assert!(last.misses - after.misses <= 2 && last.prefetches_used >= after.prefetches_used + 18, "{last:?}");
        drop((map, texts));
        heap.verify();
    }
    // Of another heap: passed over.
    let (one, other) = (heap(1), heap(1));
    let map = FarMap::<u64, u64>::new(&one).unwrap();
    map.insert(&one.enter(), 7u64, 7u64).unwrap();
    assert_eq!(map.prefetch(&other.enter(), [&7u64]), 0);
    map.cold(&other.enter(), &7);
    assert_eq!(map.get_once(&other.enter(), &7), Err(FarError::OtherHeap));
}
