//! Overlay: what a function has changed so far, over values that stay as they are until it has ended.
//!
//! A change of a value is what differs between its bytes and those that the function has stored: runs
//! of bytes, each within one plain field. So a change says nothing of owners and of padding, and
//! whoever gets one from a server can check it against the fields of the type.

use super::view_mut::{FieldKind, OwnedType, OwnedTypes, ViewField};
use farfield_core::checksum;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Bytes for which a changed value counts, beside its runs.
const VALUE_BYTES: usize = 16;
/// Bytes for which a run counts, beside its own.
const RUN_BYTES: usize = 8;
/// Longest stretch of equal bytes that is cheaper in a run than between two.
const GAP_MAX: usize = RUN_BYTES;

/// Some bytes of a value that have changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ByteRun {
    /// Offset in the value.
    pub(super) at: usize,
    pub(super) bytes: Vec<u8>,
}

/// A value that has changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ValueChange {
    /// Halves of a slot word of the value.
    pub(super) slot: (u32, u32),
    /// Index of its type among the [`OwnedTypes`] of the root.
    pub(super) type_index: usize,
    pub(super) runs: Vec<ByteRun>,
}

impl ValueChange {
    fn bytes(&self) -> usize {
        VALUE_BYTES + self.runs.iter().map(|run| RUN_BYTES + run.bytes.len()).sum::<usize>()
    }
}

/// All that a function has changed, with a checksum: whoever applies it believes no damaged byte.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeList {
    pub(super) changes: Vec<ValueChange>,
    pub(super) sum: u64,
}

impl ChangeList {
    pub(super) fn new(changes: Vec<ValueChange>) -> ChangeList {
        ChangeList { sum: digest(&changes), changes }
    }

    /// Checks that each change is one that a function over these types may have made, and that all are
    /// as they were made. Says nothing of where the values are.
    pub(super) fn check(&self, types: &OwnedTypes, limits: OverlayLimits) -> Result<(), &'static str> {
        if digest(&self.changes) != self.sum {
            return Err("they do not match their checksum");
        }
        if self.changes.iter().map(ValueChange::bytes).sum::<usize>() > limits.bytes_max {
            return Err("there are more of them than the call allows");
        }
        for change in &self.changes {
            let Some(owned) = types.get(change.type_index) else { return Err("one is of an unknown type") };
            if !change.runs.iter().all(|run| run.fits(owned)) {
                return Err("one is not within a plain field, or gives it no value of its type");
            }
        }
        Ok(())
    }
}

/// Returns the checksum of all that a list of changes says.
fn digest(changes: &[ValueChange]) -> u64 {
    let mut bytes = Vec::new();
    let mut add = |number: usize| bytes.extend((number as u64).to_le_bytes());
    for change in changes {
        let (place, number) = change.slot;
        [place as usize, number as usize, change.type_index, change.runs.len()].into_iter().for_each(&mut add);
        change.runs.iter().flat_map(|run| [run.at, run.bytes.len()]).for_each(&mut add);
    }
    for run in changes.iter().flat_map(|change| &change.runs) {
        bytes.extend(&run.bytes);
    }
    checksum(&bytes)
}

impl ByteRun {
    /// Checks whether the run lies within one plain field of the type, and gives it a value.
    fn fits(&self, owned: &OwnedType) -> bool {
        let index = owned.fields.partition_point(|field| field.at <= self.at);
        let Some(field) = index.checked_sub(1).and_then(|index| owned.fields.get(index)) else { return false };
        let is_whole = self.at == field.at && self.bytes.len() == field.len;
        let is_within = !self.bytes.is_empty() && self.bytes.len() <= field.len - (self.at - field.at).min(field.len);
        match field.kind {
            FieldKind::Number => is_within,
            FieldKind::Whole(is_value) => is_whole && is_value(&self.bytes),
            FieldKind::Owner => false,
        }
    }
}

/// Limits of an overlay, and what it needs to know of its heap.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OverlayLimits {
    /// Most bytes for which the changes may count.
    pub(super) bytes_max: usize,
    /// The first number that is one of a handle: numbers below are those of pages.
    pub(super) first_handle: u64,
}

/// Reason why a function was stopped that changes values.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ChangeStop {
    /// The changes count for more bytes than they may.
    TooMany {
        /// Bytes for which they count.
        bytes: usize,
    },
    /// The function has stored another owner in a value.
    Owner {
        /// Index of the value's type.
        type_index: usize,
    },
}

/// What a function has changed so far.
#[derive(Debug)]
pub(super) struct Overlay {
    limits: OverlayLimits,
    /// Changes by number of the value's page or handle, and by card.
    changes: BTreeMap<(u32, u8), ValueChange>,
    bytes: usize,
}

impl Overlay {
    pub(super) fn new(limits: OverlayLimits) -> Overlay {
        Overlay { limits, changes: BTreeMap::new(), bytes: 0 }
    }

    /// Returns what tells a value from all others.
    fn identity(&self, (place, number): (u32, u32)) -> (u32, u8) {
        // The card of a value that has a handle is a guess.
        (number, if u64::from(number) < self.limits.first_handle { place as u8 } else { 0 })
    }

    /// Puts what the function has stored in this value over its bytes. False if it has stored
    /// nothing there.
    pub(super) fn patch(&self, slot: (u32, u32), bytes: &mut [u8]) -> bool {
        let Some(change) = self.changes.get(&self.identity(slot)) else { return false };
        for run in &change.runs {
            bytes[run.at..run.at + run.bytes.len()].copy_from_slice(&run.bytes);
        }
        true
    }

    /// Checks whether the function has stored something else in this value.
    pub(super) fn has(&self, slot: (u32, u32)) -> bool {
        self.changes.contains_key(&self.identity(slot))
    }

    /// Notes what the function stores in a value of a type: `new` over `old`, the bytes of the value
    /// itself. Padding is zero in both.
    pub(super) fn store(
        &mut self,
        slot: (u32, u32),
        (type_index, fields): (usize, &[ViewField]),
        old: &[u8],
        new: &[u8],
    ) -> Result<(), ChangeStop> {
        let mut runs = Vec::new();
        for field in fields {
            let [before, after] = [old, new].map(|bytes| &bytes[field.at..field.at + field.len]);
            match field.kind {
                FieldKind::Number => add_runs(&mut runs, field.at, before, after),
                FieldKind::Whole(_) if before == after => {}
                FieldKind::Whole(_) => runs.push(ByteRun { at: field.at, bytes: after.to_vec() }),
                FieldKind::Owner if self.identity(slot_of(before)) == self.identity(slot_of(after)) => {}
                FieldKind::Owner => return Err(ChangeStop::Owner { type_index }),
            }
        }
        let identity = self.identity(slot);
        let before = self.changes.get(&identity).map_or(0, ValueChange::bytes);
        let change = ValueChange { slot, type_index, runs };
        let after = if change.runs.is_empty() { 0 } else { change.bytes() };
        let bytes = self.bytes - before + after;
        if bytes > self.limits.bytes_max {
            return Err(ChangeStop::TooMany { bytes });
        }
        self.bytes = bytes;
        match self.changes.entry(identity) {
            Entry::Occupied(present) if after == 0 => drop(present.remove()),
            Entry::Occupied(mut present) => drop(present.insert(change)),
            Entry::Vacant(_) if after == 0 => {}
            Entry::Vacant(absent) => drop(absent.insert(change)),
        }
        Ok(())
    }

    /// Returns all changes, in the order of their values.
    pub(super) fn into_list(self) -> ChangeList {
        ChangeList::new(self.changes.into_values().collect())
    }
}

/// Returns the halves of an encoded slot word; zeros for no owner.
fn slot_of(bytes: &[u8]) -> (u32, u32) {
    let half = |bytes: &[u8]| bytes.first_chunk().map_or(0, |half| u32::from_ne_bytes(*half));
    match half(&bytes[4..]) {
        0 => (0, 0),
        number => (half(bytes), number),
    }
}

/// Adds the runs in which the bytes of a field of numbers differ.
fn add_runs(runs: &mut Vec<ByteRun>, at: usize, before: &[u8], after: &[u8]) {
    let mut open: Option<core::ops::Range<usize>> = None;
    let mut close =
        |run: core::ops::Range<usize>| runs.push(ByteRun { at: at + run.start, bytes: after[run].to_vec() });
    for index in (0..before.len()).filter(|index| before[*index] != after[*index]) {
        match &mut open {
            Some(run) if index - run.end <= GAP_MAX => run.end = index + 1,
            open => {
                if let Some(run) = open.replace(index..index + 1) {
                    close(run);
                }
            }
        }
    }
    open.into_iter().for_each(close);
}

#[cfg(test)]
mod tests {
    //! Guards against changes that are lost or made up, and against those of a server that no function made.
    use super::*;
    use crate::{FarBox, FarView, FarViewMut};
    use core::mem::offset_of;

    #[derive(FarView, FarViewMut)]
    struct Leaf {
        flag: bool,
        mark: char,
        numbers: [u16; 40],
        wide: u64,
        next: Option<FarBox<Leaf>>,
        last: u8,
    }

    const PAGES: u64 = 1000;

    fn overlay(bytes_max: usize) -> (Overlay, OwnedTypes) {
        (Overlay::new(OverlayLimits { bytes_max, first_handle: PAGES }), OwnedTypes::of::<Leaf>())
    }

    fn bytes_of_leaf() -> Vec<u8> {
        let mut bytes = vec![0; size_of::<Leaf>()];
        bytes[offset_of!(Leaf, mark)..][..4].copy_from_slice(&u32::from('x').to_ne_bytes());
        bytes[offset_of!(Leaf, next)..][..8].copy_from_slice(&[5, 9, 9, 9, 7, 0, 0, 0]);
        bytes
    }

    #[test]
    fn what_was_stored_last_is_read_and_listed() {
        let mut random = fastrand::Rng::with_seed(41);
        for _ in 0..200 {
            let (mut overlay, types) = overlay(1 << 20);
            let owned = types.get(0).unwrap();
            let plain: Vec<_> = owned.fields.iter().filter(|field| !matches!(field.kind, FieldKind::Owner)).collect();
            let olds: Vec<Vec<u8>> = (0..6).map(|_| bytes_of_leaf()).collect();
            let mut news = olds.clone();
            for _ in 0..random.usize(..40) {
                let value = random.usize(..6);
                if random.u8(..5) == 0 {
                    news[value] = olds[value].clone();
                }
                for _ in 0..random.usize(..9) {
                    let field = plain[random.usize(..plain.len())];
                    let at = field.at + random.usize(..field.len);
                    match field.kind {
                        FieldKind::Number => news[value][at] = random.u8(..3),
                        _ if field.len == 1 => news[value][at] = random.u8(..2),
                        _ => news[value][field.at..][..4].copy_from_slice(&u32::from(random.char(..)).to_ne_bytes()),
                    }
                }
                let slot = (random.u32(..) << 8 | value as u32, 3);
                overlay.store(slot, (0, &owned.fields), &olds[value], &news[value]).unwrap();
                let mut read = olds[value].clone();
                assert_eq!(overlay.patch(slot, &mut read), news[value] != olds[value]);
                assert_eq!(read, news[value]);
            }
            let (limits, total) = (overlay.limits, overlay.bytes);
            let list = overlay.into_list();
            assert_eq!(list.check(&types, limits), Ok(()));
            assert_eq!(list.changes.iter().map(ValueChange::bytes).sum::<usize>(), total);
            let mut applied = olds;
            for change in &list.changes {
                for run in &change.runs {
                    applied[change.slot.0 as usize & 0xFF][run.at..][..run.bytes.len()].copy_from_slice(&run.bytes);
                }
            }
            assert_eq!(applied, news);
        }
    }

    #[test]
    fn owners_stay_and_guesses_of_their_place_do_not_matter() {
        let (mut overlay, types) = overlay(1 << 20);
        let fields = &types.get(0).unwrap().fields;
        let next = offset_of!(Leaf, next);
        let mut store = |at: usize, byte: u8| {
            let mut new = bytes_of_leaf();
            new[next + at] = byte;
            overlay.store((0, 1), (0, fields), &bytes_of_leaf(), &new)
        };
        // The frame is a guess.
        assert_eq!(store(1, 3), Ok(()));
        // Another card, another page, another owner far away, none.
        for (at, byte) in [(0, 6), (4, 8), (7, 1), (4, 0)] {
            assert_eq!(store(at, byte), Err(ChangeStop::Owner { type_index: 0 }));
        }
        assert!(overlay.into_list().changes.is_empty());
        // A handle has no card.
        let (mut overlay, _) = self::overlay(1 << 20);
        let with = |place: u8| {
            let mut bytes = bytes_of_leaf();
            bytes[next..next + 8].copy_from_slice(&[place, 0, 0, 0, 0, 0, 1, 0]);
            bytes
        };
        assert_eq!(overlay.store((0, 1), (0, fields), &with(1), &with(2)), Ok(()));
    }

    #[test]
    fn a_limit_is_kept_and_what_is_taken_back_counts_no_more() {
        let (mut overlay, types) = overlay(100);
        let fields = &types.get(0).unwrap().fields;
        let mut new = bytes_of_leaf();
        new[offset_of!(Leaf, wide)..][..8].fill(1);
        for card in 0..3 {
            assert_eq!(overlay.store((card, 1), (0, fields), &bytes_of_leaf(), &new), Ok(()));
        }
        assert_eq!(overlay.store((3, 1), (0, fields), &bytes_of_leaf(), &new), Err(ChangeStop::TooMany { bytes: 128 }));
        assert_eq!(overlay.store((1, 1), (0, fields), &bytes_of_leaf(), &bytes_of_leaf()), Ok(()));
        assert_eq!(overlay.store((3, 1), (0, fields), &bytes_of_leaf(), &new), Ok(()));
        assert_eq!(overlay.into_list().changes.len(), 3);
    }

    #[test]
    fn whatever_a_list_says_it_touches_plain_fields_only_and_leaves_values() {
        let (_, types) = overlay(0);
        let limits = OverlayLimits { bytes_max: 1 << 20, first_handle: PAGES };
        let fields = &types.get(0).unwrap().fields;
        let is_plain = |at: usize| {
            let is_in = |field: &&ViewField| (field.at..field.at + field.len).contains(&at);
            fields.iter().find(is_in).is_some_and(|field| !matches!(field.kind, FieldKind::Owner))
        };
        let (mut random, mut accepted) = (fastrand::Rng::with_seed(42), 0);
        for _ in 0..20_000 {
            let at = random.usize(..size_of::<Leaf>() + 3);
            let bytes: Vec<u8> = (0..random.usize(..6)).map(|_| random.choice([0, 1, 2, 255]).unwrap()).collect();
            let (type_index, slot) = (random.usize(..5) / 4, (random.u32(..), random.u32(..)));
            let runs = vec![ByteRun { at, bytes }];
            let list = ChangeList::new(vec![ValueChange { slot, type_index, runs }]);
            // As it comes, and as it comes with a bit that is wrong.
            let mut encoded = postcard::to_allocvec(&list).unwrap();
            let decoded: ChangeList = postcard::from_bytes(&encoded).unwrap();
            let bit = random.usize(..8 * encoded.len());
            encoded[bit / 8] ^= 1 << (bit % 8);
            if let Ok(damaged) = postcard::from_bytes::<ChangeList>(&encoded) {
                assert!(damaged.check(&types, limits).is_err(), "bit {bit} of {list:?}");
            }
            if decoded.check(&types, limits).is_err() {
                continue;
            }
            accepted += 1;
            let run = &decoded.changes[0].runs[0];
            assert!((run.at..run.at + run.bytes.len()).all(is_plain), "{run:?}");
            let mut value = bytes_of_leaf();
            value[run.at..][..run.bytes.len()].copy_from_slice(&run.bytes);
            assert!(Leaf::decode_mut(&value).is_some(), "{run:?}");
        }
        assert!((1000..19_000).contains(&accepted), "{accepted}");
    }

    #[test]
    fn changes_that_no_function_made_are_refused() {
        let (_, types) = overlay(0);
        let limits = OverlayLimits { bytes_max: 200, first_handle: PAGES };
        let list = |type_index, at, bytes: &[u8]| {
            ChangeList::new(vec![ValueChange {
                slot: (0, 1),
                type_index,
                runs: vec![ByteRun { at, bytes: bytes.to_vec() }],
            }])
        };
        let check = |type_index, at, bytes: &[u8]| list(type_index, at, bytes).check(&types, limits);
        let (flag, mark, wide) = (offset_of!(Leaf, flag), offset_of!(Leaf, mark), offset_of!(Leaf, wide));
        let (numbers, next, last) = (offset_of!(Leaf, numbers), offset_of!(Leaf, next), offset_of!(Leaf, last));
        assert_eq!(check(0, flag, &[1]), Ok(()));
        assert_eq!(check(0, mark, &u32::from('\u{1F30D}').to_ne_bytes()), Ok(()));
        assert_eq!(check(0, numbers + 3, &[255; 77]), Ok(()));
        let wrong = Err("one is not within a plain field, or gives it no value of its type");
        for (at, bytes) in [
            (flag, &[2][..]),
            (mark, &[0, 0, 0, 255]),
            (mark, &0xD800u32.to_ne_bytes()),
            (mark + 1, &[0]),
            (next, &[1]),
            (next + 7, &[1]),
            (wide, &[]),
            (last, &[1, 1]),
            (size_of::<Leaf>(), &[0]),
            (usize::MAX, &[0]),
            (usize::MAX - 1, &[0; 9]),
        ] {
            assert_eq!(check(0, at, bytes), wrong, "{at} {bytes:?}");
        }
        // Bytes between fields, and from one field into the next.
        for at in 0..size_of::<Leaf>() {
            let field =
                types.get(0).unwrap().fields.iter().find(|field| (field.at..field.at + field.len).contains(&at));
            let is_number = field.is_some_and(|field| matches!(field.kind, FieldKind::Number));
            assert_eq!(check(0, at, &[7]).is_ok(), is_number, "{at}");
            let is_inside = field.is_some_and(|field| at + 2 <= field.at + field.len);
            assert_eq!(check(0, at, &[7, 7]).is_ok(), is_number && is_inside, "{at}");
        }
        assert_eq!(check(1, wide, &[1]), Err("one is of an unknown type"));
        let many = Err("there are more of them than the call allows");
        let long = list(0, numbers, &[0; 177]);
        assert_eq!(long.check(&types, limits), many);
        // A bit anywhere.
        let sound = list(0, wide, &[1, 2, 3]);
        let damaged = Err("they do not match their checksum");
        for change in [
            |change: &mut ValueChange| change.slot.0 ^= 1,
            |change: &mut ValueChange| change.slot.1 ^= 1 << 9,
            |change: &mut ValueChange| change.type_index ^= 1,
            |change: &mut ValueChange| change.runs[0].at ^= 2,
            |change: &mut ValueChange| change.runs[0].bytes[2] ^= 16,
            |change: &mut ValueChange| change.runs.push(ByteRun { at: 0, bytes: vec![0] }),
        ] {
            let mut other = sound.clone();
            change(&mut other.changes[0]);
            assert_eq!(other.check(&types, limits), damaged);
        }
        assert_eq!(sound.check(&types, limits), Ok(()));
    }

    #[derive(FarView, FarViewMut)]
    #[repr(u8)]
    #[allow(dead_code)]
    enum Phase {
        New,
        Old { year: u16, is_known: bool } = 4,
    }

    #[derive(FarView, FarViewMut)]
    struct Phased {
        number: u32,
        phase: Phase,
        limit: Option<u8>,
        last: u8,
    }

    #[test]
    fn an_enum_changes_as_a_whole_and_to_a_value_only() {
        let (types, limits) = (OwnedTypes::of::<Phased>(), OverlayLimits { bytes_max: 200, first_handle: PAGES });
        let check = |at: usize, bytes: &[u8]| {
            let runs = vec![ByteRun { at, bytes: bytes.to_vec() }];
            ChangeList::new(vec![ValueChange { slot: (0, 1), type_index: 0, runs }]).check(&types, limits).is_ok()
        };
        let encoded = |phase: PhaseViewMut<'_>| {
            let mut bytes = vec![0xEE; size_of::<Phase>()];
            Phase::encode(&phase, &mut bytes);
            bytes
        };
        let phase = offset_of!(Phased, phase);
        let old = encoded(PhaseViewMut::Old { year: 0x1234, is_known: true });
        assert!(check(phase, &old) && check(phase, &encoded(PhaseViewMut::New)));
        assert!(matches!(Phase::decode_mut(&old), Some(PhaseViewMut::Old { year: 0x1234, is_known: true })));
        for at in 0..old.len() {
            let mut wrong = old.clone();
            // No variant has this tag, and no `bool` this number. Other bytes are padding, or the year.
            wrong[at] = 2;
            assert_eq!(check(phase, &wrong), Phase::decode_mut(&wrong).is_some(), "{at}");
            assert!(!check(phase + at, &old[at..]) || at == 0, "a part of a value");
            assert!(!check(phase, &old[..at]));
        }
        assert!(Phase::decode_mut(&[1; size_of::<Phase>()]).is_none());
        let limit = offset_of!(Phased, limit);
        for some in [None, Some(0), Some(255)] {
            let mut bytes = vec![0xEE; size_of::<Option<u8>>()];
            <Option<u8>>::encode(&some, &mut bytes);
            assert!(check(limit, &bytes) && !check(limit, &bytes[..1]) && !check(limit + 1, &bytes[1..]));
            assert_eq!(<Option<u8>>::decode_mut(&bytes), Some(some));
            bytes[0] = 7;
            assert!(!check(limit, &bytes));
        }
    }
}
