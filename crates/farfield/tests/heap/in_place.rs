//! Values that are made where they stay. Dangers: a value that overflows the stack on its way; an element that is dropped twice, or never,
//! when making the next one panics; a place that leaves, or stays in use.

use crate::common::{MIB, builder, heap};
use farfield::{AllocError, FarArc, FarBox, FarError, Heap, Init, Stats, Uninit, fields};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// 3 MiB.
const COUNT: usize = 3 << 17;

fn in_a_small_stack(act: impl FnOnce() + Send) {
    std::thread::scope(|threads| {
        std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(threads, act).unwrap().join().unwrap();
    });
}

fn roomy() -> Heap {
    builder().near(10 * MIB).near_max(10 * MIB).far(1 << 30).paranoid(true).build().unwrap()
}

/// Makes it leave.
fn press(heap: &Heap) {
    let pages: Vec<_> = (0..4000u64).map(|n| heap.alloc([n; 512]).unwrap()).collect();
    assert!(pages.iter().zip(0..).all(|(page, n)| page.read(|page| page[9]) == Ok(n)));
}

#[test]
fn a_large_array_is_made_in_a_small_stack() {
    let heap = roomy();
    in_a_small_stack(|| {
        let mut far = heap.alloc_array_with::<u64, COUNT>(|index| index as u64 * 3).unwrap();
        let sum = |far: &FarBox<[u64; COUNT]>| far.read(|array| array.iter().sum::<u64>()).unwrap();
        let expected = 3 * (COUNT as u64 * (COUNT as u64 - 1) / 2);
        assert_eq!(sum(&far), expected);
        press(&heap);
        assert_eq!(sum(&far), expected);
        far.write(|array| array[COUNT - 1] += 1).unwrap();
        // Out, and in again.
        let mut near = far.into_boxed().unwrap_or_else(|(_, error)| panic!("{error}"));
        near[0] = 5;
        let far = heap.alloc_boxed(near).unwrap();
        press(&heap);
        assert_eq!(sum(&far), expected + 6);
        let shared = FarArc::from(far);
        assert_eq!(shared.read(|array| (array[0], array[COUNT - 1])), Ok((5, 3 * (COUNT as u64 - 1) + 1)));
    });
    assert_eq!(heap.stats().pinned_bytes, 0);
    heap.verify();
}

/// Counts how many exist.
struct Counted(Arc<AtomicI64>, [u64; 5]);

impl Counted {
    fn new(alive: &Arc<AtomicI64>) -> Counted {
        alive.fetch_add(1, Ordering::Relaxed);
        Counted(alive.clone(), [7; 5])
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[test]
fn elements_are_dropped_once_though_making_the_next_one_panics() {
    fn check<const N: usize>(heap: &Heap) {
        let alive = Arc::new(AtomicI64::new(0));
        for last in [0, N / 3, N - 1] {
            let make = |index| {
                if index == last {
                    std::panic::panic_any("no more");
                }
                heap.alloc(Counted::new(&alive)).unwrap_or_else(|error| panic!("{}", error.error))
            };
            let made = catch_unwind(AssertUnwindSafe(|| heap.alloc_array_with::<_, N>(make)));
            assert_eq!(made.map(drop).unwrap_err().downcast_ref::<&str>(), Some(&"no more"));
            assert_eq!((alive.load(Ordering::Relaxed), heap.stats().pinned_bytes), (0, 0));
            heap.verify();
        }
        let made = heap.alloc_array_with::<_, N>(|_| Counted::new(&alive)).unwrap();
        assert_eq!(alive.load(Ordering::Relaxed), N as i64);
        press(heap);
        drop(made);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        heap.verify();
    }
    let heap = roomy();
    check::<3>(&heap);
    check::<70>(&heap);
    check::<3000>(&heap);
}

/// 3 MiB, in parts that are built in different ways.
struct Atlas {
    name: FarBox<String>,
    marks: [Counted; 3],
    sheets: [Sheet; 96],
    scale: (u8, Option<FarBox<u64>>),
}

struct Sheet {
    number: u32,
    owner: Counted,
    heights: [[u16; 128]; 128],
}

/// Builds it, if `step` lets each of its parts pass.
fn build_atlas<'p>(
    place: Uninit<'p, Atlas>,
    heap: &Heap,
    alive: &Arc<AtomicI64>,
    step: &dyn Fn() -> Result<(), FarError>,
) -> Result<Init<'p, Atlas>, FarError> {
    let counted = || step().map(|()| Counted::new(alive));
    fields!(
        place,
        Atlas {
            name: |place| Ok(place.write(heap.alloc(String::from("a"))?)),
            marks: |place| {
                let mut marks = place.each(|_, place| Ok(place.write(counted()?)))?;
                marks[2].1[0] = 9;
                Ok(marks)
            },
            sheets: |place| place.each(|number, place| fields!(
                place,
                Sheet {
                    number: |place| Ok(place.write(number as u32)),
                    owner: |place| Ok(place.write(counted()?)),
                    heights: |place| place.each(|row, place| Ok(place.write([(number + row) as u16; 128]))),
                }
            )),
            scale: |place| {
                step()?;
                Ok(place.write((7, Some(heap.alloc(8)?))))
            },
        }
    )
}

#[test]
fn a_large_struct_is_built_in_a_small_stack() {
    assert!(size_of::<Atlas>() > 3 << 20);
    let (heap, alive) = (roomy(), Arc::new(AtomicI64::new(0)));
    in_a_small_stack(|| {
        let mut far = heap.alloc_with(|place| build_atlas(place, &heap, &alive, &|| Ok(()))).unwrap();
        press(&heap);
        let read = far.write(|atlas| {
            atlas.sheets[95].heights[127][127] += 1;
            let heights = atlas.sheets.iter().flat_map(|sheet| sheet.heights.iter().flatten());
            let numbers = atlas.sheets.iter().map(|sheet| sheet.number).sum::<u32>();
            let eight = atlas.scale.1.as_ref().map(|eight| eight.read(|eight| *eight));
            (heights.map(|height| u64::from(*height)).sum::<u64>(), numbers, atlas.marks[2].1, atlas.scale.0, eight)
        });
        let heights = (0..96).flat_map(|number| (0..128).map(move |row| (number + row) * 128)).sum::<u64>() + 1;
        assert_eq!(read, Ok((heights, 95 * 48, [9, 7, 7, 7, 7], 7, Some(Ok(8)))));
        assert_eq!(far.read(|atlas| atlas.name.read(String::clone)), Ok(Ok("a".into())));
        assert_eq!(alive.load(Ordering::Relaxed), 99);
        press(&heap);
        drop(far);
    });
    assert_eq!((alive.load(Ordering::Relaxed), heap.stats().pinned_bytes), (0, 0));
    heap.verify();
}

#[test]
fn what_fails_or_panics_while_it_is_built_leaves_nothing() {
    let (heap, alive) = (roomy(), Arc::new(AtomicI64::new(0)));
    let mut pages = None;
    for last in [0, 2, 3, 4, 50, 98, 99] {
        for panics in [false, true] {
            let steps = std::cell::Cell::new(0);
            let step = || {
                if steps.replace(steps.get() + 1) < last {
                    return Ok(());
                }
                assert!(!panics, "no more");
                Err(FarError::FarFull)
            };
            let built =
                catch_unwind(AssertUnwindSafe(|| heap.alloc_with(|place| build_atlas(place, &heap, &alive, &step))));
            assert_eq!(built.map(|built| built.map(drop)).ok(), (!panics).then_some(Err(FarError::FarFull)));
            assert_eq!((steps.get(), alive.load(Ordering::Relaxed)), (last + 1, 0));
            // The same pages are used again each time.
            let Stats { pinned_bytes, pages: now, .. } = heap.stats();
            assert_eq!((pinned_bytes, now), (0, *pages.get_or_insert(now)));
            heap.verify();
        }
    }
}

#[test]
fn a_builder_may_build_others_and_drop_what_it_has_built() {
    let (heap, alive) = (roomy(), Arc::new(AtomicI64::new(0)));
    let far = heap.alloc_with::<(Counted, FarBox<[u8; 9]>)>(|place| {
        let inner = heap.alloc_with(|place| place.each(|at, place| Ok(place.write(at as u8))))?;
        let refused = heap.alloc_with::<Counted>(|place| {
            drop(place.write(Counted::new(&alive)));
            Err(FarError::FarFull)
        });
        assert_eq!((refused.map(drop), alive.load(Ordering::Relaxed)), (Err(FarError::FarFull), 0));
        Ok(place.write((Counted::new(&alive), inner)))
    });
    let far = far.unwrap();
    assert_eq!(far.read(|(_, inner)| inner.read(|nine| *nine)), Ok(Ok([0, 1, 2, 3, 4, 5, 6, 7, 8])));
    assert_eq!(
        heap.alloc_with::<[String; 0]>(|place| place.each(|_, _| unreachable!())).unwrap().read(|no| no.len()),
        Ok(0)
    );
    drop(far);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    heap.verify();
}

/// Its elements need room for far more than one scope can hold.
#[test]
fn makers_use_the_heap() {
    let heap = heap(2);
    let mut kept: Vec<FarBox<[u64; 500]>> = Vec::new();
    let array = heap.alloc_array_with::<FarBox<[u64; 40]>, 20_000>(|index| {
        if index % 10 == 0 {
            kept.push(heap.alloc([index as u64; 500]).unwrap());
            let scope = heap.enter();
            assert_eq!(kept[kept.len() / 2].get(&scope).unwrap()[3] % 10, 0);
        }
        heap.alloc([index as u64; 40]).unwrap()
    });
    let array = array.unwrap();
    assert!(heap.stats().written_pages > 1000, "{:?}", heap.stats());
    for index in (0..20_000).step_by(77) {
        let scope = heap.enter();
        assert_eq!(array.get(&scope).unwrap()[index].get(&scope).unwrap()[39], index as u64);
    }
    drop((array, kept));
    heap.verify();
}

#[test]
fn what_has_no_room_is_given_back() {
    let heap = heap(1);
    in_a_small_stack(|| {
        let large: Box<[u64; COUNT]> = vec![9; COUNT].into_boxed_slice().try_into().unwrap();
        let AllocError { error, value } = heap.alloc_boxed(large).unwrap_err();
        assert!(matches!(error, FarError::TooLarge { .. }), "{error}");
        assert_eq!(value[COUNT - 1], 9);
        let made = heap.alloc_array_with::<u64, COUNT>(|_| panic!("there is no room"));
        assert!(matches!(made, Err(FarError::TooLarge { .. })));
    });
    heap.verify();
}

#[test]
fn boxes_of_any_size_go_in_and_out() {
    fn check<const N: usize>(heap: &Heap) {
        let alive = Arc::new(AtomicI64::new(0));
        let all: Vec<_> =
            (0..50u8).map(|n| heap.alloc_boxed(Box::new((Counted::new(&alive), [n; N]))).unwrap()).collect();
        let nothing: Vec<_> = (0..50).map(|_| heap.alloc_boxed(Box::new([(); N])).unwrap()).collect();
        press(heap);
        assert_eq!(alive.load(Ordering::Relaxed), 50);
        for (far, n) in all.into_iter().zip(0..) {
            let near = far.into_boxed().unwrap_or_else(|(_, error)| panic!("{error}"));
            assert_eq!((near.1, alive.load(Ordering::Relaxed)), ([n; N], 50 - i64::from(n)));
        }
        drop(nothing);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        heap.verify();
    }
    let heap = roomy();
    check::<0>(&heap);
    check::<100>(&heap);
    check::<1300>(&heap);
    check::<5000>(&heap);
    check::<70_000>(&heap);
}

/// `?` gives the reason to whoever asks for it, and to errors of any kind.
#[test]
fn refusals_become_other_errors() {
    fn far(heap: &Heap) -> Result<(), FarError> {
        heap.alloc_array_with::<u64, COUNT>(|_| 0)?;
        Ok(())
    }
    fn alone(heap: &Heap) -> Result<(), FarError> {
        heap.alloc_boxed(Box::<[u64; COUNT]>::try_from(vec![0; COUNT].into_boxed_slice()).unwrap())?;
        Ok(())
    }
    fn any(heap: &Heap) -> Result<(), Box<dyn std::error::Error>> {
        heap.alloc_boxed(Box::<[u64; COUNT]>::try_from(vec![0; COUNT].into_boxed_slice()).unwrap())?;
        Ok(())
    }
    fn sent(heap: &Heap) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        heap.alloc_boxed(Box::<[u64; COUNT]>::try_from(vec![0; COUNT].into_boxed_slice()).unwrap())?;
        Ok(())
    }
    let heap = heap(1);
    let expected = far(&heap).unwrap_err();
    assert_eq!(alone(&heap).unwrap_err(), expected);
    assert_eq!(any(&heap).unwrap_err().to_string(), expected.to_string());
    assert_eq!(sent(&heap).unwrap_err().to_string(), expected.to_string());
}
