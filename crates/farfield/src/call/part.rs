//! Parts of far objects, as functions read them: of a value, of bytes, of a chunk or of a node.
//!
//! A part is read as the layout of its object says, which only the object's collection knows. In
//! the heap that is memory, near for a moment; at a server it is bytes, of which none is believed.

use super::place::FarPlace;
use super::view_traits::{FarView, Loan, ViewSource};
use crate::heap::{HeapInner, SlotWord};
use core::marker::PhantomData;
use core::num::NonZeroU32;
use core::ops::Range;
use farfield_wic::Fault;
use serde::{Deserialize, Serialize};

/// Pointer to a far object that owns nothing, as [`FarRef`](super::FarRef) is one to a value.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct ObjectRef<'f> {
    /// The halves of the slot word.
    pub(super) place: u32,
    pub(super) number: NonZeroU32,
    /// Whether it was made of an owner in this process, which is borrowed for `'f`.
    pub(super) is_here: bool,
    borrows: PhantomData<&'f ()>,
}

impl<'f> ObjectRef<'f> {
    /// Makes a pointer to an object of a collection that is lent.
    pub(crate) fn of(slot: SlotWord, _: Loan<'f>) -> ObjectRef<'f> {
        let Some(object) = ObjectRef::elsewhere(slot.word()) else { unreachable!("a slot word names an object") };
        ObjectRef { is_here: true, ..object }
    }

    /// Makes a pointer to a unit of pages, of a collection that is lent.
    pub(crate) fn of_unit(page: u32, _: Loan<'f>) -> ObjectRef<'f> {
        let Some(object) = ObjectRef::unit_elsewhere(page) else { unreachable!("no page has number 0") };
        ObjectRef { is_here: true, ..object }
    }

    /// Makes a pointer of a slot word, which may be that of no object.
    pub(crate) fn elsewhere(word: u64) -> Option<ObjectRef<'f>> {
        let number = NonZeroU32::new((word >> 32) as u32)?;
        Some(ObjectRef { place: word as u32, number, is_here: false, borrows: PhantomData })
    }

    /// Makes a pointer to a unit that may not exist.
    pub(crate) fn unit_elsewhere(page: u32) -> Option<ObjectRef<'f>> {
        ObjectRef::elsewhere(u64::from(page) << 32)
    }

    /// Makes a pointer of the bytes of a cell that names an object; `None` if it names nothing.
    pub(crate) fn decode(cell: &[u8]) -> Option<ObjectRef<'f>> {
        ObjectRef::elsewhere(u64::from_ne_bytes(cell.try_into().ok()?))
    }

    /// Returns a part of the object.
    pub(crate) fn part(self, offset: usize, len: usize) -> FarPart<'f> {
        FarPart { object: self, offset, len }
    }
}

impl core::fmt::Debug for ObjectRef<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ObjectRef({})", self.number)
    }
}

/// A range of the bytes of a far object.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct FarPart<'f> {
    pub(super) object: ObjectRef<'f>,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The bytes of a part, while they are read.
#[doc(hidden)]
pub struct PartBytes<'b, 'f> {
    source: PartSource<'b>,
    len: usize,
    borrows: PhantomData<&'f ()>,
}

#[derive(Clone, Copy)]
enum PartSource<'b> {
    /// The object in this process, near during the call.
    Near(*const u8),
    /// Its bytes.
    Bytes(&'b [u8]),
}

impl<'b, 'f> PartBytes<'b, 'f> {
    /// # Safety
    /// A part of an object lies there, with so many bytes, as long as this is used. Nothing of it
    /// changes for `'f`, except guesses where values are.
    pub(super) unsafe fn near(address: *const u8, len: usize) -> PartBytes<'b, 'f> {
        PartBytes { source: PartSource::Near(address), len, borrows: PhantomData }
    }

    pub(super) fn of(bytes: &'b [u8]) -> PartBytes<'b, 'f> {
        PartBytes { source: PartSource::Bytes(bytes), len: bytes.len(), borrows: PhantomData }
    }

    /// Returns the view of a value in the part; `None` if the bytes there are no such value, or if
    /// the value is not inside.
    ///
    /// # Safety
    /// In an object of this process, a `T` lies at this offset, and is aligned.
    pub(crate) unsafe fn value<T: FarView>(&self, offset: usize) -> Option<T::View<'f>> {
        let end = offset.checked_add(size_of::<T>()).filter(|end| *end <= self.len)?;
        match self.source {
            // SAFETY: inside the part, and a `T` as the caller says, which does not change
            // (`PartBytes::near`).
            PartSource::Near(address) => Some(unsafe { (*address.add(offset).cast::<T>()).view(Loan::new()) }),
            PartSource::Bytes(bytes) => T::decode(&bytes[offset..end], ViewSource::Region),
        }
    }

    /// Appends the views of so many values side by side.
    ///
    /// # Safety
    /// As for [`PartBytes::value`], for each of them.
    pub(crate) unsafe fn values<T: FarView>(
        &self,
        offset: usize,
        count: usize,
        views: &mut Vec<T::View<'f>>,
    ) -> Option<()> {
        let end = count.checked_mul(size_of::<T>()).and_then(|len| offset.checked_add(len));
        let end = end.filter(|end| *end <= self.len)?;
        match self.source {
            PartSource::Near(address) => {
                // SAFETY: as in `value`, for each of them.
                let view = |index| unsafe { (*address.add(offset).cast::<T>().add(index)).view(Loan::new()) };
                views.extend((0..count).map(view));
                Some(())
            }
            PartSource::Bytes(_) if size_of::<T>() == 0 => {
                (0..count).try_for_each(|_| T::decode(&[], ViewSource::Region).map(|view| views.push(view)))
            }
            PartSource::Bytes(bytes) => T::decode_many(&bytes[offset..end], ViewSource::Region, views),
        }
    }

    /// Copies bytes of the part.
    ///
    /// # Safety
    /// In an object of this process, these bytes are initialised.
    pub(crate) unsafe fn copy(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let end = offset.checked_add(into.len()).filter(|end| *end <= self.len)?;
        match self.source {
            // SAFETY: inside the part, and initialised as the caller says.
            PartSource::Near(address) => unsafe {
                into.as_mut_ptr().copy_from_nonoverlapping(address.add(offset), into.len());
            },
            PartSource::Bytes(bytes) => into.copy_from_slice(&bytes[offset..end]),
        }
        Some(())
    }

    /// Returns the object that a cell in the part names; `None` if it names none.
    ///
    /// # Safety
    /// In an object of this process, a cell of a slot lies at this offset.
    #[expect(clippy::cast_ptr_alignment, reason = "cells are aligned to 8 bytes")]
    pub(crate) unsafe fn object(&self, offset: usize) -> Option<ObjectRef<'f>> {
        let end = offset.checked_add(size_of::<u64>()).filter(|end| *end <= self.len)?;
        match self.source {
            // SAFETY: inside the part, and a cell as the caller says; nobody changes what it names
            // (`PartBytes::near`).
            PartSource::Near(address) => unsafe {
                let cell = &*address.add(offset).cast::<crate::heap::SlotCell>();
                cell.load().map(|slot| ObjectRef::of(slot, Loan::new()))
            },
            PartSource::Bytes(bytes) => ObjectRef::decode(&bytes[offset..end]),
        }
    }
}

/// Ends the function because the bytes at a part are no value. Only at a server.
pub(super) async fn refuse<'f, P: FarPlace, R>(far: &'f P, object: ObjectRef<'f>) -> Result<R, Fault> {
    far.look(object.part(0, 0), |_| None).await
}

/// A root that is near, as it goes to a server: the bytes of its fields, and the tables of its
/// collections.
#[doc(hidden)]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RootImage {
    pub(super) bytes: Vec<u8>,
    pub(super) tables: Vec<u32>,
}

/// Most words of tables that a call takes along. A chunk has three in some seven bytes, and an argument
/// 64 KiB.
const TABLE_WORDS_MAX: usize = 27 * 1024;

/// Tables of collections that are near, while the image of their owner is made.
#[doc(hidden)]
#[derive(Debug)]
pub struct NearTables {
    first: u32,
    numbers: u64,
    words: Vec<u32>,
    /// Page of the first pointer of the image, or the number of a value that moves.
    page: Option<u32>,
    is_foreign: bool,
    window: Range<usize>,
}

impl NearTables {
    /// Returns which elements of a collection the call reads.
    pub(crate) fn window(&self) -> Range<usize> {
        self.window.clone()
    }

    /// Notes that a pointer is part of the image.
    pub(crate) fn note(&mut self, number: u32) {
        self.is_foreign |= u64::from(number.wrapping_sub(self.first)) >= self.numbers;
        self.page.get_or_insert(number.wrapping_sub(self.first));
    }

    /// Appends a word, unless there are too many. The call is refused then.
    pub(crate) fn push(&mut self, word: u32) {
        if self.words.len() <= TABLE_WORDS_MAX {
            self.words.push(word);
        }
    }

    /// Returns the number of words.
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }
}

/// Reason why no image can be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ImageError {
    OtherHeap,
    TooLong { bytes: u64 },
}

impl RootImage {
    /// Makes the image of a value whose far pointers should be those of this heap. Of tables, it has
    /// what is needed for the elements with numbers in `window`. Also returns a page to which it leads.
    pub(super) fn of<T: FarView>(
        core: &HeapInner,
        value: &T,
        window: Range<usize>,
    ) -> Result<(RootImage, Option<u32>), ImageError> {
        let mut bytes = vec![0; size_of::<T>()];
        let (first, numbers) = (core.first_page, core.numbers());
        let mut tables = NearTables { first, numbers, words: Vec::new(), page: None, is_foreign: false, window };
        value.write_image(&mut bytes, &mut tables);
        match tables {
            NearTables { is_foreign: true, .. } => Err(ImageError::OtherHeap),
            NearTables { words, .. } if words.len() > TABLE_WORDS_MAX => {
                Err(ImageError::TooLong { bytes: size_of_val(&*words) as u64 })
            }
            NearTables { words, page, .. } => Ok((RootImage { bytes, tables: words }, page)),
        }
    }
}
