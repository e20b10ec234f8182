//! Walks over all entries of a map, a page at a time.

use super::FarFlatMap;
use crate::error::FarError;
use crate::heap::Scope;
use bytemuck::{Pod, bytes_of, pod_read_unaligned as from_bytes};

/// Pages that a walk requests together.
const PAGES_AHEAD: usize = 16;

/// A copy of an entry, with the hash of its key.
struct EntryCopy<K, V> {
    hash: u32,
    key: K,
    value: V,
}

impl<K: Pod, V: Pod, S> FarFlatMap<K, V, S> {
    /// Begins to fetch the pages after this one of a walk, some at a time.
    fn prefetch_walk(&self, scope: &Scope<'_>, page: usize) {
        if page.is_multiple_of(PAGES_AHEAD) {
            self.pages.prefetch(scope, (page..page + 2 * PAGES_AHEAD).filter(|page| *page < self.pages.made()));
        }
    }

    /// Returns copies of the entries of a page.
    fn entries(&self, scope: &Scope<'_>, page: u32) -> Result<Vec<EntryCopy<K, V>>, FarError> {
        self.read(scope, page, |bytes| {
            let entry = |index| {
                let (key, value) = Self::BUCKET.split(&bytes[Self::BUCKET.entry(index)]);
                EntryCopy { hash: Self::BUCKET.hash(bytes, index), key: from_bytes(key), value: from_bytes(value) }
            };
            (0..Self::BUCKET.count(bytes)).map(entry).collect()
        })
    }

    /// Visits all entries, in no order. Renews the scope on the way.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &V)) -> Result<(), FarError> {
        self.check(scope)?;
        for page in 0..self.pages.made() {
            self.prefetch_walk(scope, page);
            self.entries(scope, page as u32)?.iter().for_each(|entry| visit(&entry.key, &entry.value));
            scope.renew();
        }
        Ok(())
    }

    /// Keeps only the entries that `keep` accepts, which may change their values. Renews the scope
    /// on the way.
    ///
    /// If it fails, or if `keep` panics, the pages before have been changed, and the others have
    /// not.
    pub fn retain(&mut self, scope: &mut Scope<'_>, mut keep: impl FnMut(&K, &mut V) -> bool) -> Result<(), FarError> {
        self.check(scope)?;
        for page in 0..self.pages.made() {
            self.prefetch_walk(scope, page);
            let mut entries = self.entries(scope, page as u32)?;
            let (count, mut is_changed) = (entries.len(), false);
            entries.retain_mut(|entry| {
                let before = entry.value;
                let is_kept = keep(&entry.key, &mut entry.value);
                is_changed |= !is_kept || bytes_of(&before) != bytes_of(&entry.value);
                is_kept
            });
            if is_changed {
                self.write(scope, page as u32, |bytes| {
                    let (depth, next) = (Self::BUCKET.depth(bytes), Self::BUCKET.next(bytes));
                    Self::BUCKET.start(bytes, depth);
                    Self::BUCKET.set_next(bytes, next);
                    for entry in &entries {
                        Self::BUCKET.push(bytes, entry.hash, &[bytes_of(&entry.key), bytes_of(&entry.value)].concat());
                    }
                })?;
                self.len -= (count - entries.len()) as u64;
            }
            scope.renew();
        }
        Ok(())
    }
}
