//! Groups: an object with all that is tied to it, which is fetched and moved as one.
//!
//! The owners of tied objects hold addresses of their process. A group travels as the bytes of its objects,
//! in the order of a walk: first the object itself, then those that are tied to it, then those that are tied
//! to these. Whoever receives it walks what has arrived in the same order, and so knows where each object is
//! and which address belongs into which owner.
#![allow(unsafe_code, reason = "objects are copied, and the addresses in them replaced")]

use super::ShareNode;
use crate::arena::ShareArena;
use crate::copies::ObjectCopy;
use crate::message::{ShareMessage, ShareReply, VALUE_BYTES_MAX};
use crate::ptr::MemberType;
use crate::stats::count;
use crate::task::code::ShippedCode;
use crate::{NodeId, OwnedObject, ShareError};
use core::ptr::NonNull;
use farfield_core::dsm::{BlockRights, OwnerWord};
use std::collections::VecDeque;

/// Objects begin at multiples of this, in a group that travels.
const ALIGN: usize = OwnerWord::ALIGN as usize;

/// Type of the objects that groups begin with.
#[derive(Clone, Copy)]
pub(crate) struct GroupType {
    pub(crate) root: MemberType,
    /// Code by which other nodes know the type.
    pub(crate) code: fn() -> ShippedCode,
    /// Code that frees the members of a group that was moved, without dropping them.
    pub(crate) release: fn() -> ShippedCode,
}

/// Addresses of the objects of a group.
///
/// # Safety
/// The objects are there, and nobody writes to them.
unsafe fn members(root: *const u8, root_type: MemberType) -> Vec<(*const u8, MemberType)> {
    let mut found = vec![(root, root_type)];
    let mut next = 0;
    while let Some((object, member)) = found.get(next).copied() {
        // SAFETY: the caller's promise.
        unsafe { member.visit_ties(object, &mut |tie| found.push((tie.target, tie.member))) };
        next += 1;
    }
    found
}

/// Copies a group.
///
/// # Safety
/// As for [`members`].
unsafe fn gather(root: *const u8, root_type: MemberType) -> Vec<u8> {
    let mut bytes = Vec::new();
    // SAFETY: the caller's promise.
    for (object, member) in unsafe { members(root, root_type) } {
        let start = bytes.len();
        bytes.resize(start + member.bytes.next_multiple_of(ALIGN), 0);
        // SAFETY: so many bytes of an object; all bytes of an arena are initialised.
        unsafe { core::ptr::copy_nonoverlapping(object, bytes[start..].as_mut_ptr(), member.bytes) };
    }
    bytes
}

/// Returns the bytes of a group as it travels; `None` if this version of it is not there.
///
/// # Safety
/// A group of this version begins with an object of this type.
pub(super) unsafe fn group_contents(arena: &ShareArena, word: OwnerWord, root: MemberType) -> Option<Vec<u8>> {
    // SAFETY: the caller's promise; as long as this version is read, there is no other one.
    arena.with_version(word, |address| unsafe { gather(address, root) })
}

/// Passes the objects that the members of a group own, if this version of it is there.
///
/// # Safety
/// As for [`group_contents`].
pub(super) unsafe fn visit_group(
    arena: &ShareArena,
    word: OwnerWord,
    root: MemberType,
    mut visit: impl FnMut(OwnedObject),
) {
    arena.with_version(word, |address| {
        // SAFETY: as above.
        for (object, member) in unsafe { members(address, root) } {
            // SAFETY: as above.
            unsafe { member.visit_owned(object, &mut visit) };
        }
    });
}

/// Where the objects of a group are in its bytes.
pub(super) struct GroupLayout {
    /// Offset and size of each object.
    objects: Vec<(usize, usize)>,
    /// Offsets of the owners of all objects but the first one, in the same order.
    owners: Vec<usize>,
}

impl GroupLayout {
    /// Walks a group that has arrived. Returns `None` if so many bytes are no such group.
    ///
    /// # Safety
    /// So many bytes that were gathered from a group of this type lie there, aligned to 16 bytes.
    unsafe fn of(group: *const u8, bytes: usize, root_type: MemberType) -> Option<GroupLayout> {
        let mut layout = GroupLayout { objects: Vec::new(), owners: Vec::new() };
        let (mut queue, mut end) = (VecDeque::from([root_type]), 0);
        while let Some(member) = queue.pop_front() {
            let offset = end;
            end += member.bytes.next_multiple_of(ALIGN);
            if end > bytes {
                return None;
            }
            layout.objects.push((offset, member.bytes));
            let mut visit = |tie: crate::Tie| {
                layout.owners.push(tie.slot.addr() - group.addr());
                queue.push_back(tie.member);
            };
            // SAFETY: the caller's promise.
            unsafe { member.visit_ties(group.wrapping_add(offset), &mut visit) };
        }
        (end == bytes).then_some(layout)
    }

    /// Gives the owners in a group the addresses of their objects.
    ///
    /// # Safety
    /// The group lies there, and nobody else uses it.
    unsafe fn connect(&self, group: *mut u8, address_of: impl Fn(usize) -> *mut u8) {
        for (object, owner) in (1..).zip(&self.owners) {
            // SAFETY: an owner lies there, which is an address.
            unsafe { group.wrapping_add(*owner).cast::<*mut u8>().write_unaligned(address_of(object)) };
        }
    }
}

/// Makes a copy of a group usable.
///
/// # Safety
/// As for [`GroupLayout::of`]. Nobody else uses the copy yet.
pub(super) unsafe fn connect_copy(copy: &ObjectCopy, bytes: usize, root_type: MemberType) -> Option<()> {
    let group = copy.address().cast_mut();
    // SAFETY: the caller's promise.
    let layout = unsafe { GroupLayout::of(group, bytes, root_type) }?;
    // SAFETY: as above.
    unsafe { layout.connect(group, |object| group.wrapping_add(layout.objects[object].0)) };
    Some(())
}

impl ShareNode {
    /// Stores an object that is tied to its owner at this node. Returns its address.
    pub(crate) fn store_tied(&self, bytes: &[u8]) -> Result<NonNull<u8>, ShareError> {
        let word = self.store(bytes)?;
        self.arena.add_tied(1);
        Ok(NonNull::new(self.arena.address(word)).expect("blocks are not at address zero"))
    }

    /// Frees an object whose owner it was tied to, and drops it first if it has a destructor. That is
    /// done by another thread, so lists of any length are dropped.
    pub(crate) fn free_tied(&self, object: NonNull<u8>, destructor: Option<ShippedCode>) {
        // An object of another program is nobody's.
        if let Some(word) = self.arena.word_at(object.as_ptr()) {
            self.arena.remove_tied(1);
            self.free(word, destructor);
        }
    }

    /// Frees the members of a group that is elsewhere now.
    ///
    /// # Safety
    /// A group of this type lies at this node, and nobody uses it.
    pub(crate) unsafe fn release_members(&self, root: *const u8, root_type: MemberType) {
        // SAFETY: the caller's promise.
        for (object, _) in unsafe { members(root, root_type) }.into_iter().skip(1) {
            if let Some(word) = self.arena.word_at(object.cast_mut()) {
                self.arena.remove_tied(1);
                self.free_block(word);
            }
        }
    }

    /// Reads a group for another node: its size, and so much of it as fits a message. Returns `None` if
    /// that version is not there any more.
    pub(crate) fn read_group_for(&self, word: OwnerWord, offset: u64, code: ShippedCode) -> Option<(u64, Vec<u8>)> {
        let root = code.member_type()?;
        let mut group = if self.is_here(word) {
            // A question that comes late meets another version.
            // SAFETY: a group of this version, because words of its type are asked for with its code.
            unsafe { group_contents(&self.arena, word, root) }?
        } else {
            self.read_promoted_group(word)?
        };
        let (bytes, start) = (group.len(), (offset as usize).min(group.len()));
        group.truncate((start + VALUE_BYTES_MAX).min(bytes));
        Some((bytes as u64, group.split_off(start)))
    }

    /// Asks for the bytes of a group.
    pub(super) fn fetch_group(&self, word: OwnerWord, group: &GroupType) -> Result<Vec<u8>, ShareError> {
        if word.is_lost() {
            return Err(ShareError::Lost);
        }
        count(&self.counters.fetches, 1);
        loop {
            let host = self.host_of(word);
            if host == self.id {
                return self.read_promoted_group(word).ok_or_else(|| self.lost_with_home(word));
            }
            return match self.fetch_group_from(host, word, group) {
                // Another node keeps it since, and all of it.
                Err(ShareError::NodeLost { .. }) if self.host_of(word) != host => continue,
                // It was not in the backup.
                Err(ShareError::Stale { .. }) if self.is_promoted(word) => Err(self.lost_with_home(word)),
                fetched => fetched,
            };
        }
    }

    fn fetch_group_from(&self, host: NodeId, word: OwnerWord, group: &GroupType) -> Result<Vec<u8>, ShareError> {
        let mut found = Vec::new();
        loop {
            let offset = found.len() as u64;
            let message = ShareMessage::FetchGroup { word: word.bits(), offset, root: (group.code)().reference() };
            let bytes = self.peers.ask(self, host, message, |reply| match reply {
                ShareReply::Group { bytes, piece } => {
                    found.extend_from_slice(piece);
                    (!piece.is_empty() || bytes == offset).then_some(bytes)
                }
                _ => None,
            });
            if found.len() as u64 >= bytes.map_err(|unanswered| unanswered.error)? {
                return Ok(found);
            }
        }
    }

    /// Prepares a mutable borrow of a group, as [`Here::writing`](super::Here::writing) does of an
    /// object.
    pub(super) fn write_group(
        &self,
        word: OwnerWord,
        group: &GroupType,
        rights: BlockRights,
    ) -> Result<(OwnerWord, *mut u8), ShareError> {
        if word.is_lost() {
            return Err(ShareError::Lost);
        }
        if self.is_here(word) && rights.may_write() {
            if let Some(next) = word.next_version() {
                self.forget_stored(word);
                self.arena.begin_version(next);
                return Ok((next, self.arena.address(word)));
            }
            if rights.frees_moved() {
                // Only the root has used up its colours: the others stay.
                let moved = self.bring(word, group.root.bytes, group.root.bytes, rights)?;
                self.arena.begin_version(moved.0);
                return Ok(moved);
            }
        }
        let new = self.bring_group(word, group)?;
        if rights.frees_moved() {
            self.free(word, Some((group.release)()));
        }
        Ok((new, self.arena.address(new)))
    }

    /// Makes a second group of the same contents at this node. Returns the word of its first object.
    fn bring_group(&self, word: OwnerWord, group: &GroupType) -> Result<OwnerWord, ShareError> {
        let bytes = match self.is_here(word) {
            // SAFETY: the group is there, and is borrowed mutably by the caller, who does not write.
            true => unsafe { gather(self.arena.address(word), group.root) },
            false => self.fetch_group(word, group)?,
        };
        let stale = ShareError::Stale { node: self.home_of(word) };
        // SAFETY: the bytes of a group of this type.
        unsafe { self.place_group(&bytes, group.root) }?.ok_or(stale)
    }

    /// Makes a group at this node of bytes that have arrived. Returns the word of its first object; `None` if
    /// so many bytes are no such group.
    ///
    /// # Safety
    /// They were gathered from a group of this type.
    pub(super) unsafe fn place_group(&self, bytes: &[u8], root: MemberType) -> Result<Option<OwnerWord>, ShareError> {
        // Objects are walked where they are aligned.
        let mut aligned = vec![0u128; bytes.len().div_ceil(size_of::<u128>())];
        let at = aligned.as_mut_ptr().cast::<u8>();
        // SAFETY: room for so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        // SAFETY: the caller's promise.
        let Some(layout) = (unsafe { GroupLayout::of(at, bytes.len(), root) }) else { return Ok(None) };
        let mut words: Vec<OwnerWord> = Vec::with_capacity(layout.objects.len());
        for (_, bytes) in &layout.objects {
            match self.take(*bytes as u64) {
                Ok(word) => words.push(word),
                Err(error) => {
                    words.into_iter().for_each(|word| self.free_block(word));
                    return Err(error);
                }
            }
        }
        // SAFETY: the buffer is this function's.
        unsafe { layout.connect(at, |object| self.arena.address(words[object])) };
        for ((offset, bytes), word) in layout.objects.iter().zip(&words) {
            let (from, to) = (at.wrapping_add(*offset), self.arena.address(*word));
            // SAFETY: a new block of that size. The addresses in the bytes are copied with what they lead to.
            unsafe { core::ptr::copy_nonoverlapping(from, to, *bytes) };
        }
        self.arena.add_tied(words.len() as u64 - 1);
        self.arena.begin_version(words[0]);
        count(&self.counters.moved_objects, words.len() as u64);
        Ok(Some(words[0]))
    }

    /// Frees a block that was brought here for a loan whose lender is dead. Of a group nobody knows the
    /// type any more.
    pub(super) fn free_unclaimed(&self, word: OwnerWord) {
        if self.arena.is_group(word) { count(&self.counters.orphans, 1) } else { self.free(word, None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FarGroup, Tie};

    /// An owner, as a `TBox` is one, of plain memory.
    struct PlainTie(NonNull<PlainLink>);
    struct PlainLink(u64, Option<PlainTie>);

    // SAFETY: nothing else uses the memory.
    unsafe impl Send for PlainTie {}
    // SAFETY: as above.
    unsafe impl Sync for PlainTie {}
    // SAFETY: one tie, which is named.
    unsafe impl FarGroup for PlainLink {
        const HAS_TIES: bool = true;

        fn visit_ties(&self, visit: &mut dyn FnMut(Tie)) {
            if let Some(tie) = &self.1 {
                let (slot, target) = ((&raw const tie.0).cast(), tie.0.as_ptr().cast_const().cast());
                visit(Tie { slot, target, member: MemberType::of::<PlainLink>() });
            }
        }
    }

    #[test]
    fn a_group_arrives_as_it_was_or_not_at_all() {
        let third = PlainLink(3, None);
        let second = PlainLink(2, Some(PlainTie(NonNull::from(&third))));
        let first = PlainLink(1, Some(PlainTie(NonNull::from(&second))));
        let root = MemberType::of::<PlainLink>();
        // SAFETY: a group that nobody writes to.
        let bytes = unsafe { gather((&raw const first).cast(), root) };
        let mut arrived = vec![0u128; bytes.len() / ALIGN];
        let group = arrived.as_mut_ptr().cast::<u8>();
        // SAFETY: room for so many bytes.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), group, bytes.len()) };
        for len in (0..bytes.len()).step_by(ALIGN) {
            // SAFETY: so many bytes of a group, of which the rest is there, too.
            assert!(unsafe { GroupLayout::of(group, len, root) }.is_none(), "{len}");
        }
        // SAFETY: the whole group.
        let layout = unsafe { GroupLayout::of(group, bytes.len(), root) }.unwrap();
        // SAFETY: nobody else uses it.
        unsafe { layout.connect(group, |object| group.wrapping_add(layout.objects[object].0)) };
        // SAFETY: as above; the addresses lead into it now.
        let first = unsafe { &*arrived.as_mut_ptr().cast::<PlainLink>() };
        let links = std::iter::successors(Some(first), |link| {
            // SAFETY: as above.
            link.1.as_ref().map(|tie| unsafe { tie.0.as_ref() })
        });
        let links: Vec<_> = links.map(|link| (link.0, core::ptr::from_ref(link).cast::<u8>())).collect();
        let expected = [0, 16, 32].map(|offset| group.wrapping_add(offset).cast_const());
        assert_eq!(links, [(1, expected[0]), (2, expected[1]), (3, expected[2])]);
    }
}
