//! Making and freeing values of the object plane.

use super::{ObjectId, Objects};
use crate::error::FarError;
use crate::heap::{Backoff, HeapInner, ThreadState};
use core::sync::atomic::Ordering;
use core::time::Duration;
use farfield_core::heap::{Handle, LogClass, ObjectLocation, SlotHint};
use std::alloc::Layout;

impl HeapInner {
    /// Checks whether there is a handle for one more value. Handles take up to a quarter of the
    /// near memory that other tables leave, and none once all tables together have five eighths.
    /// The rest is for other tables: values without a handle still come by pages, but a collection
    /// whose index cannot grow is of no use.
    pub(crate) fn may_have_handle(&self, objects: &Objects, record: &ThreadState) -> bool {
        let most = || {
            let near = self.near.load(Ordering::Relaxed);
            let tables = self.table_bytes();
            let others = tables.saturating_sub(objects.handles.table_bytes());
            let is_full = tables > near / 8 * 5;
            if is_full { 0 } else { near.saturating_sub(others) / 4 / size_of::<Handle>() as u64 }
        };
        objects.handles.has_room(&record.objects.handles, most)
    }

    /// Makes room for a new object of this class, near and dirty; returns its handle and its place.
    /// The caller is inside a scope, in which it fills the place. Until that scope ends nobody
    /// moves the object.
    pub(crate) fn make_object(
        &self,
        record: &ThreadState,
        objects: &Objects,
        class: LogClass,
        renewable: bool,
    ) -> Result<(ObjectId, SlotHint), FarError> {
        let (object, grown) = objects.handles.take(&record.objects.handles)?;
        if grown {
            self.fit();
        }
        match self.place_object(record, objects, object, class, renewable) {
            Ok(spot) => {
                self.references.fetch_add(1, Ordering::Relaxed);
                let handle = Handle::settle(spot.page, spot.place.card());
                objects.handles[object].store(handle.0, Ordering::Release);
                Ok((object, spot.place))
            }
            Err(error) => {
                objects.handles.give(&record.objects.handles, object);
                Err(error)
            }
        }
    }

    /// Moves the object of the slot with this number to a place for an object of this layout.
    /// `copy` copies the bytes there; its result is returned with the place. Returns `None` if the
    /// object has no handle, or if all or most new objects of this layout have none. The caller
    /// owns the object, nobody else uses it, and the caller has found it near in its present scope.
    pub(crate) fn move_within<R>(
        &self,
        record: &ThreadState,
        number: u32,
        layout: Layout,
        copy: impl FnOnce(SlotHint) -> R,
    ) -> Result<Option<(SlotHint, R)>, FarError> {
        let (Some((objects, object)), Some(class)) =
            (self.object_of(number), LogClass::of(layout.size(), layout.align()))
        else {
            return Ok(None);
        };
        if objects.is_without_handles(class, layout.size()) {
            return Ok(None);
        }
        let spot = self.place_object(record, objects, object, class, false)?;
        let result = copy(spot.place);
        let handle = &objects.handles[object];
        let mut seen = Handle(handle.load(Ordering::Relaxed));
        loop {
            // The page was near when our scope saw it, and leaves after that: nobody else moves the
            // object.
            let ObjectLocation::At { page, .. } = seen.location() else { unreachable!("near, and ours") };
            let next = seen.moved(spot.page, spot.place.card());
            // Only marks change meanwhile. Release: a reader that finds the object there finds its
            // bytes.
            match handle.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.lose_log(&objects.log, page);
                    return Ok(Some((spot.place, result)));
                }
                Err(now) => seen = Handle(now),
            }
        }
    }

    /// Frees an object that the caller owns. The caller gives up its reference to the heap itself.
    pub(crate) fn free_object(&self, record: &ThreadState, objects: &Objects, object: ObjectId) {
        let handle = &objects.handles[object];
        let mut backoff = Backoff::new(Duration::MAX);
        loop {
            let seen = Handle(handle.load(Ordering::Acquire));
            match seen.location() {
                ObjectLocation::At { page, .. } => {
                    let free = Handle::free(None);
                    if handle.compare_exchange(seen.0, free.0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                        self.lose_log(&objects.log, page);
                        return objects.handles.give(&record.objects.handles, object);
                    }
                }
                // A prefetch brings the object. The lanes ensure that this ends.
                ObjectLocation::Moving => {
                    self.help(record, Some(self.pages + object));
                    backoff.wait().unwrap_or(());
                }
                ObjectLocation::Nowhere => unreachable!("an object that is freed twice"),
            }
        }
    }
}
