//! Tags: the handle of each object of a log page.
//!
//! Tags lie at the end of the page and travel with it, unless the objects would leave no room for
//! them (`LogClass::has_tags_aside`). The tags of such pages are in near memory, in a group for
//! each segment that has had such a page.

use super::ObjectId;
use crate::error::BuildError;
use crate::heap::{ReservedArray, Zeroed};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use farfield_core::heap::{LogClass, SEGMENT_PAGES, TAG_BYTES, TAGS_ASIDE};

/// Tags that do not lie in their pages.
pub(super) struct TagTable {
    groups: ReservedArray<SegmentTags>,
    bytes: AtomicU64,
}

/// Tags of the pages of a segment; null until the segment has had a page with such tags.
struct SegmentTags(AtomicPtr<Tags>);

// SAFETY: an atomic pointer, for which zero is null.
unsafe impl Zeroed for SegmentTags {}

type Tags = [[AtomicU32; TAGS_ASIDE]; SEGMENT_PAGES as usize];

impl TagTable {
    pub(super) fn new(pages: u32) -> Result<TagTable, BuildError> {
        Ok(TagTable { groups: ReservedArray::new(pages.div_ceil(SEGMENT_PAGES) as usize)?, bytes: AtomicU64::new(0) })
    }

    /// Returns the bytes of near memory that the tags cost.
    pub(super) fn table_bytes(&self, high_page: u32) -> u64 {
        u64::from(high_page.div_ceil(SEGMENT_PAGES)) * size_of::<SegmentTags>() as u64
            + self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the tags of this page, if there has ever been room for them.
    fn of(&self, page: u32) -> Option<&[AtomicU32; TAGS_ASIDE]> {
        // Acquire: the thread that made the group has written zeros.
        let tags = self.groups[page / SEGMENT_PAGES].0.load(Ordering::Acquire);
        // SAFETY: null, or a box that `make_room` gave away, which is freed with us and shared
        // until then.
        unsafe { tags.as_ref() }.map(|tags| &tags[(page % SEGMENT_PAGES) as usize])
    }

    /// Checks whether this page has room for tags.
    pub(super) fn has_room(&self, page: u32) -> bool {
        self.of(page).is_some()
    }

    /// Makes room for the tags of this page. Returns true if near memory was taken for that.
    pub(super) fn make_room(&self, page: u32) -> bool {
        if self.has_room(page) {
            return false;
        }
        let made = Box::into_raw(Box::<Tags>::default());
        let group = &self.groups[page / SEGMENT_PAGES].0;
        // Release: a thread that finds the group finds zeros.
        if group.compare_exchange(core::ptr::null_mut(), made, Ordering::Release, Ordering::Relaxed).is_ok() {
            self.bytes.fetch_add(size_of::<Tags>() as u64, Ordering::Relaxed);
            return true;
        }
        // SAFETY: our own box of above, which nobody else knows: another page of the segment was
        // first.
        drop(unsafe { Box::from_raw(made) });
        false
    }
}

impl Drop for TagTable {
    fn drop(&mut self) {
        // Used groups are in front, so the rest need not be read (that would cost memory).
        let group_bytes = size_of::<Tags>() as u64;
        let mut left = self.bytes.load(Ordering::Relaxed) / group_bytes;
        for group in 0..self.groups.len() as u32 {
            if left == 0 {
                break;
            }
            let tags = self.groups[group].0.load(Ordering::Relaxed);
            if !tags.is_null() {
                left -= 1;
                // SAFETY: a box that `make_room` gave away; we are the last to know it.
                drop(unsafe { Box::from_raw(tags) });
            }
        }
    }
}

/// Access to the tags of a log page.
#[derive(Clone, Copy)]
pub(super) struct PageTags<'a> {
    class: LogClass,
    table: Option<&'a [AtomicU32; TAGS_ASIDE]>,
}

impl<'a> PageTags<'a> {
    /// Returns the access to the tags of this page, which is one of this class.
    pub(super) fn new(table: &'a TagTable, page: u32, class: LogClass) -> PageTags<'a> {
        PageTags { class, table: table.of(page).filter(|_| class.has_tags_aside()) }
    }

    /// Returns the object of this index, by the page's bytes; `None` if there never was one.
    ///
    /// # Safety
    /// `page` is the address of a page that nobody but the caller writes, or of which the caller
    /// knows that this tag is not written.
    pub(super) unsafe fn get(&self, page: *const u8, index: u32) -> Option<ObjectId> {
        let tag = match self.class.tag_offset(index) {
            // SAFETY: inside the page, and passed on to the caller; aligned as `tag_offset` says,
            // or read as bytes.
            Some(offset) => u32::from_le_bytes(unsafe { page.add(offset).cast::<[u8; TAG_BYTES]>().read() }),
            // Relaxed: a thread that has the page, or keeps it Far, came after the thread that
            // filled it.
            None => self.table?[index as usize].load(Ordering::Relaxed),
        };
        tag.checked_sub(1)
    }

    /// Sets the object of this index.
    ///
    /// # Safety
    /// `page` is the address of a page that only the caller fills, and the place is the caller's.
    pub(super) unsafe fn set(&self, page: *mut u8, index: u32, object: ObjectId) {
        let tag = object + 1;
        match self.class.tag_offset(index) {
            // SAFETY: inside the page, and nobody else writes or reads this tag, as the caller
            // says.
            Some(offset) => unsafe { page.add(offset).cast::<[u8; TAG_BYTES]>().write(tag.to_le_bytes()) },
            None => {
                let Some(table) = self.table else { unreachable!("opened without room for tags") };
                table[index as usize].store(tag, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against values that fill their page and are not found by whoever moves them, or take
    //! tags from each other.
    use super::*;
    use crate::{FarBox, Heap, Plane};

    #[test]
    fn groups_are_made_once_and_counted() {
        let table = TagTable::new(64).unwrap();
        let class = LogClass::of(1024, 8).unwrap();
        let before = table.table_bytes(64);
        assert!(!table.has_room(17) && table.make_room(17) && !table.make_room(18) && table.make_room(63));
        assert!(table.has_room(16) && !table.has_room(15));
        assert_eq!(table.table_bytes(64) - before, 2 * size_of::<Tags>() as u64);
        for page in 16..32 {
            for index in 0..class.capacity() {
                // SAFETY: none of these tags is in a page.
                unsafe { PageTags::new(&table, page, class).set(core::ptr::null_mut(), index, page << 8 | index) };
            }
        }
        for page in 16..32 {
            // SAFETY: as above.
            let tag = |index| unsafe { PageTags::new(&table, page, class).get(core::ptr::null(), index) };
            assert!((0..class.capacity()).all(|index| tag(index) == Some(page << 8 | index)));
        }
    }

    fn check<const BYTES: usize>(plane: Plane) {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(64 << 20).plane(plane).build().unwrap();
        let mut values: Vec<FarBox<[u8; BYTES]>> =
            (0..(4 << 20) / BYTES).map(|index| heap.alloc([index as u8; BYTES]).unwrap()).collect();
        for round in 0..6 {
            // Some are hot, all are looked at in another order than they were made, a few end.
            for at in 0..values.len() {
                let at = (at * 7919 + round) % values.len();
                let value = values[at].read(|value| *value).unwrap();
                assert!(value.iter().all(|byte| *byte == value[0]));
                assert_eq!(values[at / 16].read(|value| value[0] == value[BYTES - 1]), Ok(true));
            }
            for _ in 0..values.len() / 20 {
                values.swap_remove(values.len() / 3);
            }
        }
        let mut seen = [0; 256];
        values.iter().for_each(|value| seen[usize::from(value.read(|value| value[0]).unwrap())] += 1);
        assert!(seen.iter().all(|count| *count > 0));
        heap.verify();
        drop(values);
        heap.verify();
    }

    #[test]
    fn values_that_fill_their_page_are_moved_and_found() {
        for plane in [Plane::Object, Plane::Hybrid] {
            check::<512>(plane);
            check::<1024>(plane);
        }
    }
}
