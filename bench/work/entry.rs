//! Entries of maps: keys and values that derive from a number.

use crate::random::mix;

pub(crate) type Key = [u8; 12];

pub(crate) fn key(number: u64, seed: u64) -> Key {
    let mut key = [0; 12];
    key[..8].copy_from_slice(&mix(number ^ seed).to_le_bytes());
    key[8..].copy_from_slice(&(number as u32).to_le_bytes());
    key
}

pub(crate) fn value<const BYTES: usize>(number: u64) -> [u8; BYTES] {
    let mut value = [number as u8; BYTES];
    value[..4].copy_from_slice(&(mix(number) as u32).to_le_bytes());
    value
}

/// A number of a value, different for most.
pub(crate) fn word<const BYTES: usize>(value: &[u8; BYTES]) -> u64 {
    u64::from(u32::from_le_bytes([value[0], value[1], value[2], value[3]]))
}
