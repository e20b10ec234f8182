//! Joining and splitting chains, by whole chunks: their elements stay where they are.

use super::{Chain, ChainEnd, NONE, NOWHERE, Position};
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};

impl<T: Send + 'static> Chain<T> {
    /// Moves the chunks of another chain to the end of this one. If it fails, chunks that were not
    /// moved are still in the other.
    pub(in crate::collections) fn append(&mut self, scope: &Scope<'_>, other: &mut Chain<T>) -> Result<(), FarError> {
        for heap_ref in [&self.heap_ref, &other.heap_ref].into_iter().flatten() {
            heap_ref.check(scope)?;
        }
        if self.len == 0 {
            core::mem::swap(self, other);
            return Ok(());
        }
        while other.len > 0 {
            self.reserve(scope)?;
            let first = other.first;
            self.adopt(other, first, NONE);
        }
        Ok(())
    }

    /// Moves the elements from index `at` on into a new chain. If it fails, all are where they
    /// were.
    pub(in crate::collections) fn split_off(&mut self, scope: &Scope<'_>, at: usize) -> Result<Chain<T>, FarError> {
        let mut tail = Chain::new();
        if let Some(heap_ref) = &self.heap_ref {
            heap_ref.check(scope)?;
        }
        if at == 0 {
            core::mem::swap(self, &mut tail);
            return Ok(tail);
        }
        let (mut chunk, mut index) = (self.first, at);
        while chunk != NONE && index >= usize::from(self.chunk(chunk).len) {
            index -= usize::from(self.chunk(chunk).len);
            chunk = self.chunk(chunk).next;
        }
        if index > 0 {
            let _brief = scope.begin_transient();
            scope.with_room(|| {
                let elements = self.elements(scope, chunk, AccessMode::Write)?;
                self.part(scope, Position { chunk, index }, elements)
            })?;
        }
        while chunk != NONE {
            if let Err(error) = tail.reserve(scope) {
                // Back to where they were; their places in the table are free.
                while tail.len > 0 {
                    let first = tail.first;
                    self.adopt(&mut tail, first, chunk);
                }
                return Err(error);
            }
            let next = self.chunk(chunk).next;
            tail.adopt(self, chunk, NONE);
            chunk = next;
        }
        Ok(tail)
    }

    /// Moves a chunk of another chain of the heap before a chunk of this one, or to the end if that
    /// is `NONE`. There must be near room for it.
    fn adopt(&mut self, other: &mut Chain<T>, number: u32, before: u32) {
        let mut chunk = other.unlink(number);
        (chunk.previous, chunk.next) = (self.beside(before, ChainEnd::Front), before);
        let len = usize::from(chunk.len);
        self.link(chunk);
        other.len -= len;
        self.len += len;
    }

    /// Keeps only the elements that `keep` accepts. If it fails, all elements that `keep` has
    /// rejected are removed, except perhaps the last one.
    pub(in crate::collections) fn retain(
        &mut self,
        scope: &mut Scope<'_>,
        mut keep: impl FnMut(&mut T) -> bool,
    ) -> Result<(), FarError> {
        let mut at = self.end(ChainEnd::Front);
        while let Some(element) = self.address(scope, at, AccessMode::Write)? {
            // SAFETY: as in `get_mut`; the scope is renewed below, when nobody has it.
            let next = if unsafe { keep(&mut *element) } {
                self.step(at, ChainEnd::Back)
            } else {
                scope.renew();
                self.remove(scope, at)?.map_or(NOWHERE, |(_, next)| next)
            };
            if next.is_in_other_chunk(at) {
                scope.renew();
                self.prefetch(scope, self.next_chunk(next, ChainEnd::Back));
            }
            at = next;
        }
        Ok(())
    }
}
