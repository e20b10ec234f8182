//! Values that are made where they stay. Dangers: a value that overflows the stack on its way; an element that is dropped twice, or never,
//! when making the next one panics; a place that leaves, or stays in use.

use crate::common::{MIB, builder, heap};
use farfield::{AllocError, FarArc, FarBox, FarError, Heap};
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
struct Counted(Arc<AtomicI64>, #[expect(dead_code, reason = "makes it larger")] [u64; 5]);

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
