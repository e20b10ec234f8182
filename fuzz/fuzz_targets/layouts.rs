//! Layouts of a stranger's types: a table that is read can be written as it was, and no offset of it lies outside of its objects.
#![no_main]

use farfield_core::gc::LayoutTable;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = LayoutTable::decode(bytes) else { return };
    assert_eq!(table.encode(), bytes);
    for number in 0..table.len() as u32 {
        let layout = table.get(number).expect("below the number of types");
        let elements = if layout.has_tail() { 3 } else { 0 };
        let end = layout.object_bytes(elements).expect("three elements fit");
        for index in 0..layout.strong_count(elements) {
            let offset = layout.strong_offset(index);
            assert!(offset >= 8 && offset % 8 == 0 && offset + 8 <= end);
        }
        assert!(layout.weak_offsets(elements).all(|offset| offset >= 8 && offset % 8 == 0 && offset + 8 <= end));
    }
});
