//! `FarArray` is an array of arrays, wherever its elements are. Danger: an element under the wrong index.

use crate::common::twin::{Twin, twins};
use crate::common::{MIB, Rng, heap};
use farfield::{FarArray, Heap};

/// A table of `[u16; 24]`, whose size does not divide a page.
struct Tables {
    far: FarArray<[u16; 24], 2>,
    near: Vec<Vec<[u16; 24]>>,
}

/// A row takes six pages: as many as a scope can always have of the smallest heap.
const COLUMNS: usize = 500;

impl Twin for Tables {
    fn filled(heap: &Heap, bytes: u64, _: &mut Rng) -> Self {
        let rows = bytes as usize / COLUMNS / 48;
        let new = |[row, column]: [usize; 2]| [(row ^ column) as u16; 24];
        let near = (0..rows).map(|row| (0..COLUMNS).map(|column| new([row, column])).collect()).collect();
        Tables { far: FarArray::from_fn(&heap.enter(), [rows, COLUMNS], new).unwrap(), near }
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let (far, near) = (&mut self.far, &mut self.near);
        let scope = heap.enter();
        let [row, column] = far.dims().map(|dim| random.usize(..dim));
        let value = [random.u64(..) as u16; 24];
        match random.usize(..5) {
            0 => assert_eq!(far.at(&scope, [row, column]).unwrap(), &near[row][column]),
            1 => {
                *far.at_mut(&scope, [row, column]).unwrap() = value;
                near[row][column] = value;
            }
            2 => {
                let old = std::mem::replace(&mut near[row][column], value);
                assert_eq!(far.set(&scope, [row, column], value).unwrap(), old);
            }
            3 => {
                let range = far.part([row]);
                let mut at = column;
                for chunk in far.chunks_mut_in(&scope, range.start + column..range.end) {
                    for element in chunk.unwrap() {
                        near[row][at] = value;
                        *element = value;
                        at += 1;
                    }
                }
                assert_eq!(at, COLUMNS);
            }
            _ => assert_eq!(far.get(&scope, [row, COLUMNS + column]).unwrap(), None),
        }
    }

    fn compare(&self, heap: &Heap) {
        let mut scope = heap.enter();
        let mut scan = self.far.scan(&mut scope);
        let mut near = self.near.iter().flatten();
        while let Some(chunk) = scan.next_chunk().unwrap() {
            for element in chunk {
                assert_eq!(Some(element), near.next());
            }
        }
        assert_eq!(near.next(), None);
    }
}

twins!(tables, Tables, 2_000);

#[test]
fn parts_of_a_cube() {
    let heap = heap(1);
    let scope = heap.enter();
    let cube = FarArray::from_fn(&scope, [3, 4, 5], |[x, y, z]| x * 100 + y * 10 + z).unwrap();
    let part = |range| cube.chunks_in(&scope, range).flat_map(|chunk| chunk.unwrap().to_vec()).collect::<Vec<usize>>();
    assert_eq!(part(cube.part([1, 2])), [120, 121, 122, 123, 124]);
    assert_eq!(part(cube.part([2]))[..7], [200, 201, 202, 203, 204, 210, 211]);
    assert_eq!(part(cube.part([])).len(), 60);
    assert_eq!((cube.position([2, 3, 4]), cube.position([0, 4, 0])), (Some(59), None));
    let empty = FarArray::filled(&scope, [7, 0], 1u8).unwrap();
    assert!(empty.is_empty() && empty.get(&scope, [0, 0]).unwrap().is_none());
}

#[test]
#[should_panic(expected = "index [1, 9] out of bounds for [2, 9]")]
fn an_index_out_of_bounds_panics() {
    let heap = heap(1);
    let array = FarArray::filled(&heap.enter(), [2, 9], 0u8).unwrap();
    let _ = array.at(&heap.enter(), [1, 9]);
}

/// AIFM's test of arrays: C[i] = A[i] + B[i], all larger than near memory together.
#[test]
fn arrays_are_added() {
    let heap = heap(2);
    let mut scope = heap.enter();
    let count = 2 * MIB as usize / 8;
    let a = FarArray::from_fn(&scope, [count], |[index]| index as u64).unwrap();
    let b = FarArray::from_fn(&scope, [count], |[index]| 3 * index as u64).unwrap();
    let mut c = FarArray::filled(&scope, [count], 0u64).unwrap();
    for index in 0..count {
        let sum = a.at(&scope, [index]).unwrap() + b.at(&scope, [index]).unwrap();
        assert_eq!(c.set(&scope, [index], sum), Ok(0));
        if index % 1024 == 0 {
            scope.renew();
        }
    }
    let mut scan = c.scan(&mut scope);
    let mut index = 0;
    while let Some(chunk) = scan.next_chunk().unwrap() {
        for sum in chunk {
            assert_eq!(*sum, 4 * index);
            index += 1;
        }
    }
    drop((a, b));
    drop(scope);
    heap.verify();
}
