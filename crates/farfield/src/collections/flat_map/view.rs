//! What functions of users see of a flat map: its pages, and its directory if that comes with the call.

use super::FarFlatMap;
use crate::call::view::{Loan, NearTables, ViewSource, ViewTypes, layout};
use crate::call::{FarRef, FarView, FlatRef};
use bytemuck::Pod;
use core::mem::offset_of;

// SAFETY: the map, its directory and its pages stay as they are while they are shared: all changes take
// `&mut self`.
unsafe impl<K: FarView + Pod, V: FarView + Pod, S: FarView> FarView for FarFlatMap<K, V, S> {
    type View<'f> = FlatRef<'f, K, V, S>;
    const NAME: &'static str = "FarFlatMap";
    const LAYOUT: u64 = layout(
        Self::NAME,
        size_of::<Self>(),
        Self::BUCKET.head_bytes(),
        &[
            (K::NAME, size_of::<K>(), K::LAYOUT),
            (V::NAME, size_of::<V>(), V::LAYOUT),
            (S::NAME, offset_of!(Self, hasher), S::LAYOUT),
            ("len", offset_of!(Self, len), 0),
        ],
    );

    fn view<'f>(&self, loan: Loan<'f>) -> FlatRef<'f, K, V, S> {
        let pages = (self.pages.extents(), self.pages.made());
        FlatRef::new(pages, &self.directory, self.len, self.hasher.view(loan), loan)
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<FlatRef<'f, K, V, S>> {
        if source == ViewSource::Root {
            return FlatRef::decode_image(bytes);
        }
        let field = |at: usize, size: usize| bytes.get(at..at + size);
        let entries = u64::decode(field(offset_of!(Self, len), size_of::<u64>())?, source)?;
        let hasher = S::decode(field(offset_of!(Self, hasher), size_of::<S>())?, source)?;
        Some(FlatRef::elsewhere(entries, hasher))
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        // SAFETY: the view is gone when the borrow of the map ends.
        let view: FlatRef<'_, K, V, S> = self.view(unsafe { Loan::new() });
        let at = view.write_image(image, tables);
        self.hasher.write_image(&mut image[at..at + size_of::<S>()], tables);
    }

    fn add_pointees(types: &mut ViewTypes) {
        types.add::<K>();
        types.add::<V>();
    }
}

impl<'f, K: FarView + Pod, V: FarView + Pod, S: FarView> From<&'f FarFlatMap<K, V, S>>
    for FarRef<'f, FarFlatMap<K, V, S>>
{
    fn from(near: &'f FarFlatMap<K, V, S>) -> Self {
        FarRef::near(near)
    }
}
