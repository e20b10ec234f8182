//! The notice of a heap with a name, or of a node of shared memory: statistics for observers outside its
//! process. It is in a file without a path that the process keeps open.
//!
//! The text has one line per name and value. A program's library may be older or newer than the
//! command that looks, so readers pass over names that they do not know. The file is written while
//! others read it, so a checksum comes first.

use crate::checksum;
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::CStr;

/// Name of the file of a heap, as the kernel shows it.
pub const OF_HEAP: &CStr = c"farfield-heap";

/// Name of the file of a node.
pub const OF_NODE: &CStr = c"farfield-node";

/// Size of the file in bytes.
pub const FILE_BYTES: usize = 8192;

const SUM_BYTES: usize = 8;
const LENGTH_BYTES: usize = 8;

/// Longest text of a notice in bytes.
pub const TEXT_BYTES_MAX: usize = FILE_BYTES - SUM_BYTES - LENGTH_BYTES;

/// Writes statistics as lines of a notice: numbers, durations in ns, and lists of numbers. Each name is
/// that of its field behind `$prefix`. The caller names all fields of the type, so that none is
/// forgotten.
#[macro_export]
macro_rules! notice_lines {
    (
        $prefix:literal, $type:ident, $stats:expr;
        numbers $($number:ident)*; durations $($duration:ident)*; lists $($list:ident)*
    ) => {{
        let $type { $($number,)* $($duration,)* $($list,)* } = $stats;
        let mut text = String::new();
        $(text += &format!("{}{} {}\n", $prefix, stringify!($number), $number);)*
        $(text += &format!("{}{}_ns {}\n", $prefix, stringify!($duration), $duration.as_nanos());)*
        $(
            let numbers = $list.map(|number| number.to_string()).join(" ");
            text += &format!("{}{} {numbers}\n", $prefix, stringify!($list));
        )*
        text
    }};
}

/// Returns the first bytes of the file for this text: checksum of what follows, length, text.
pub fn seal(text: &str) -> Vec<u8> {
    assert!(text.len() <= TEXT_BYTES_MAX);
    let mut bytes = vec![0; SUM_BYTES];
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
    let sum = checksum(&bytes[SUM_BYTES..]);
    bytes[..SUM_BYTES].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Returns the text of a file. `None` if it is being written, or is another file.
pub fn open(file: &[u8]) -> Option<&str> {
    let (sum, rest) = file.split_first_chunk::<SUM_BYTES>()?;
    let length = usize::try_from(u64::from_le_bytes(*rest.first_chunk::<LENGTH_BYTES>()?)).ok()?;
    let sealed = rest.get(..length.checked_add(LENGTH_BYTES)?)?;
    if checksum(sealed) != u64::from_le_bytes(*sum) {
        return None;
    }
    core::str::from_utf8(&sealed[LENGTH_BYTES..]).ok()
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that are half of one moment and half of another.
    use super::*;

    #[test]
    fn a_notice_is_read_whole_or_not_at_all() {
        let (one, other) = (seal("misses 7\nplane page\n"), seal("misses 8\nplane page\n"));
        let mut file = vec![0; FILE_BYTES];
        assert_eq!(open(&file), None);
        file[..one.len()].copy_from_slice(&one);
        assert_eq!(open(&file), Some("misses 7\nplane page\n"));
        // The next one has been written up to here.
        let differ = (0..one.len()).rposition(|at| one[at] != other[at]).unwrap();
        for written in 1..other.len() {
            file[written - 1] = other[written - 1];
            let expected = (written > differ).then_some("misses 8\nplane page\n");
            assert_eq!(open(&file), expected, "{written}");
        }
    }

    #[test]
    fn other_files_are_no_notices() {
        let mut file = seal("misses 7\n");
        for at in 0..file.len() {
            file[at] ^= 1;
            assert_eq!(open(&file), None, "{at}");
            file[at] ^= 1;
            assert_eq!(open(&file[..at]), None, "{at}");
        }
        file[SUM_BYTES..SUM_BYTES + LENGTH_BYTES].fill(0xFF);
        assert_eq!(open(&file), None);
    }
}
