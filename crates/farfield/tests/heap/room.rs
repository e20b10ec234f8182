//! What a scope may hold it can hold, also in large values, whose frames must be neighbours. Danger: `NearFull` while there is room, because
//! single frames in use lie in between.

use crate::common::{MIB, Rng, assert_in_budget, heap, is_deep, seed};
use farfield::{FarBox, FarBytes, FarError, Heap};

const PAGE: usize = 4096;

/// Pages that a scope may hold: a sixteenth of what is near and no table, and one for tables that grow.
fn share(heap: &Heap) -> usize {
    let stats = heap.stats();
    ((stats.near_limit_bytes - stats.table_bytes) / 16).min(8 * MIB) as usize / PAGE - 1
}

/// Values of one page, more than are near.
fn singles(heap: &Heap, near_mib: u64) -> Vec<FarBox<[u64; 512]>> {
    (0..near_mib * MIB * 3 / 2 / PAGE as u64).map(|index| heap.alloc([index; 512]).unwrap()).collect()
}

/// Every other one is used often, so that frames that can be had lie alone.
fn use_singles(heap: &Heap, singles: &[FarBox<[u64; 512]>], random: &mut Rng) {
    for at in (0..singles.len()).step_by(2) {
        let at = if random.usize(..8) == 0 { random.usize(..singles.len()) } else { at };
        assert_eq!(singles[at].get(&heap.enter()).unwrap()[511], at as u64);
    }
}

/// A scope makes units of so many pages up to its share, or brings those that earlier scopes made, if they are kept.
fn a_scope_holds_units(near_mib: u64, unit: usize, kept: bool, random: &mut Rng) {
    let heap = heap(near_mib);
    let singles = singles(&heap, near_mib);
    let count = share(&heap) / unit;
    let mut units: Vec<FarBytes> = Vec::new();
    for round in 0..4 {
        use_singles(&heap, &singles, random);
        let scope = heap.enter();
        // From now on only what was about to leave does so before it ends.
        assert_eq!(singles[0].get(&scope).unwrap()[0], 0);
        let first = units.len() / 2;
        for index in first..first + count {
            let case = || format!("{near_mib} MiB, {unit} pages, round {round}, {} of {count}", index - first);
            if index == units.len() {
                let bytes = FarBytes::copy_of(&scope, &vec![index as u8; unit * PAGE]);
                units.push(bytes.unwrap_or_else(|error| panic!("{}: {error}", case())));
            }
            let bytes = units[index].get(&scope).unwrap_or_else(|error| panic!("{}: {error}", case()));
            assert_eq!([bytes[0], bytes[unit * PAGE - 1]], [index as u8; 2], "{}", case());
        }
        if !kept {
            units.clear();
        }
    }
    assert_in_budget(&heap);
    drop((singles, units));
    heap.verify();
}

#[test]
fn a_scope_can_hold_its_share_in_units_of_any_size() {
    let mut random = Rng::with_seed(seed());
    let sizes: &[u64] = if is_deep() { &[4, 17, 33, 64, 200] } else { &[4] };
    for near_mib in sizes {
        for unit in [2, 5, 16, 25, 64, 256] {
            if unit * PAGE * 20 <= (near_mib * MIB) as usize {
                a_scope_holds_units(*near_mib, unit, false, &mut random);
                a_scope_holds_units(*near_mib, unit, true, &mut random);
            }
        }
    }
}

#[test]
fn bytes_grow_among_single_pages() {
    let mut random = Rng::with_seed(seed());
    let heap = heap(17);
    let singles = singles(&heap, 17);
    for round in 0..8 {
        use_singles(&heap, &singles, &mut random);
        let scope = heap.enter();
        assert_eq!(singles[0].get(&scope).unwrap()[0], 0);
        // Each takes 128 KiB in the end, and while it moves there half as much.
        let mut all: Vec<FarBytes> = (0..7).map(|_| FarBytes::new()).collect();
        for part in 0..100 {
            for bytes in &mut all {
                let grown = bytes.extend_from_slice(&scope, &[part; 1000]);
                grown.unwrap_or_else(|error| panic!("round {round}, from {} bytes on: {error}", bytes.len()));
            }
        }
        for bytes in &all {
            assert!(bytes.get(&scope).unwrap().chunks(1000).zip(0..).all(|(chunk, part)| chunk == [part; 1000]));
        }
    }
    drop(singles);
    heap.verify();
}

/// The tables of what is far are near memory: values beyond them are refused, and nothing is lost.
#[test]
fn values_whose_tables_have_no_room_are_refused() {
    let heap = heap(1);
    let make = |byte: usize| FarBytes::copy_of(&heap.enter(), &vec![byte as u8; 16 * PAGE]);
    let mut values: Vec<FarBytes> = Vec::new();
    let error = loop {
        match make(values.len()) {
            Ok(value) => values.push(value),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FarError::TablesFull { .. }), "{error:?}");
    assert_in_budget(&heap);
    assert!(values.len() > 2000, "{}", values.len());
    for (index, value) in values.iter().enumerate().step_by(97) {
        assert_eq!(value.get(&heap.enter()).unwrap()[16 * PAGE - 1], index as u8);
    }
    // Others can have the room of those that end.
    values.pop();
    values.push(make(7).unwrap());
    drop(values);
    heap.verify();
}
