//! What is larger than 32 bits can count. Danger: an offset or an index that is cut off. In the deep tier only: it takes gigabytes.

use crate::common::{MIB, builder, is_deep};
use farfield::{FarBytes, FarVec};

const GIB: u64 = 1 << 30;

/// Words that say where they are, and pages that `lz` keeps in 64 bytes.
#[test]
fn vectors_beyond_four_gib() {
    if !is_deep() {
        return println!("skipped: FARFIELD_DEEP=1 runs it");
    }
    let heap = builder().near(64 * MIB).near_max(64 * MIB).far(8 * GIB).pool("lz:?size=1G").build().unwrap();
    let count = (9 * GIB / 2 / 4096) as usize;
    let mut vector = FarVec::new();
    for number in 0..count as u64 {
        vector.push(&heap.enter(), [number; 512]).unwrap();
    }
    let mut scope = heap.enter();
    let (mut scan, mut number) = (vector.scan(&mut scope), 0);
    while let Some(chunk) = scan.next_chunk().unwrap() {
        for value in chunk {
            assert_eq!(*value, [number; 512]);
            number += 1;
        }
    }
    assert_eq!(number, count as u64);
    drop(scope);
    for index in (0..count).rev().step_by(65_521) {
        assert_eq!(vector.get(&heap.enter(), index).unwrap(), Some(&[index as u64; 512]));
    }
    drop(vector);
    heap.verify();
}

/// One value in one piece, which leaves and comes back.
#[test]
fn one_value_beyond_four_gib() {
    if !is_deep() {
        return println!("skipped: FARFIELD_DEEP=1 runs it");
    }
    // A value takes half of near memory at most.
    let near = 9 * GIB;
    let heap = builder().near(near).near_max(near).far(32 * GIB).pool("lz:?size=1G").build().unwrap();
    let len = (4 * GIB + 64 * MIB) as usize;
    let mut bytes = FarBytes::copy_of(&heap.enter(), &vec![7; len]).unwrap();
    let marks = [0, (1 << 32) - 1, 1 << 32, len - 1];
    for (mark, at) in marks.into_iter().enumerate() {
        bytes.get_mut(&heap.enter()).unwrap()[at] = mark as u8;
    }
    let written = heap.stats().written_pages;
    heap.set_near(64 * MIB);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(300);
    while heap.stats().written_pages < written + (len / 4096) as u64 {
        assert!(std::time::Instant::now() < deadline, "{:?}", heap.stats());
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    heap.set_near(near);
    let scope = heap.enter();
    let found = bytes.get(&scope).unwrap();
    for (mark, at) in marks.into_iter().enumerate() {
        assert_eq!(found[at], mark as u8);
    }
    assert_eq!(found.iter().filter(|byte| **byte != 7).count(), marks.len());
    drop(scope);
    drop(bytes);
    heap.verify();
}
