//! Look-up of elements of which most pages have many. They are loaded one by one, in order, and
//! each page is compared with its checksum when all are there.

use super::{ElementGather, PageStreamWriter, Pieces};
use crate::{Fault, Place};

/// Elements that are loaded together.
const LOADS: usize = 2048;

/// Elements of a column that are loaded in the order of their indices.
pub(super) struct DirectGather<'t, const BYTES: usize> {
    target: PageStreamWriter<'t>,
    offsets: Vec<u64>,
    elements: Vec<[u8; BYTES]>,
}

impl<'t, const BYTES: usize> DirectGather<'t, BYTES> {
    pub(super) fn new(target: PageStreamWriter<'t>) -> DirectGather<'t, BYTES> {
        DirectGather { target, offsets: Vec::with_capacity(LOADS), elements: vec![[0; BYTES]; LOADS] }
    }
}

impl<const BYTES: usize> ElementGather for DirectGather<'_, BYTES> {
    fn room(&self) -> usize {
        LOADS - self.offsets.len()
    }

    fn add(&mut self, column: &Pieces, index: u64) -> Option<()> {
        self.offsets.push(column.offset(index)?);
        Some(())
    }

    async fn put<P: Place>(&mut self, place: &P, _column: &Pieces) -> Result<(), Fault> {
        let elements = &mut self.elements[..self.offsets.len()];
        place.load_many(&self.offsets, elements).await?;
        self.offsets.clear();
        self.target.put(place, elements.as_flattened()).await
    }

    async fn end<P: Place>(&mut self, place: &P, column: &Pieces) -> Result<(), Fault> {
        self.put(place, column).await?;
        self.target.end(place).await
    }
}
