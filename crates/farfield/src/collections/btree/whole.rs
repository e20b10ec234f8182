//! Walks through all entries, however many: the scope is renewed on the way.

use super::walk::BTreePath;
use super::{At, FarBTreeMap};
use crate::error::{AllocError, FarError};
use crate::heap::{AccessMode, Scope};

impl<K: Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Visits all entries in order, and renews the scope between nodes.
    pub fn for_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &V)) -> Result<(), FarError> {
        // SAFETY: as in `get_key_value`; the scope is renewed when nobody has them.
        self.visit(scope, AccessMode::Read, false, |(node, index)| unsafe {
            visit(&*node.key(index), &*node.value(index))
        })
    }

    /// Visits all entries like [`FarBTreeMap::for_each`], with the hint that they will not be used
    /// again soon. Nodes that have to be brought near are evicted first, and nodes that were near
    /// stay.
    pub fn for_each_once(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &V)) -> Result<(), FarError> {
        // SAFETY: as in `for_each`.
        self.visit(scope, AccessMode::Read, true, |(node, index)| unsafe {
            visit(&*node.key(index), &*node.value(index))
        })
    }

    /// Visits all entries in order, to change values, and renews the scope between nodes.
    pub fn for_each_mut(&mut self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &mut V)) -> Result<(), FarError> {
        // SAFETY: as in `for_each`, and `&mut self` makes it exclusive.
        self.visit(scope, AccessMode::Write, false, |(node, index)| unsafe {
            visit(&*node.key(index), &mut *node.value(index))
        })
    }

    fn visit(
        &self,
        scope: &mut Scope<'_>,
        mode: AccessMode,
        once: bool,
        mut visit: impl FnMut(At<K, V>),
    ) -> Result<(), FarError> {
        let mut path = self.end_path(scope, false)?;
        while let Some((node, index)) = path.entry(scope, mode)? {
            visit((node, index));
            let is_end = index + 1 == node.len() || node.height > 0;
            let before = (once && is_end).then(|| path.clone());
            scope.with_room(|| path.advance::<K, V>(scope, true))?;
            if is_end {
                scope.renew();
            }
            if let Some(before) = before {
                before.leave_for(&path, scope.core);
            }
        }
        Ok(())
    }

    /// Visits all entries like [`FarBTreeMap::for_each`], for a task: other tasks run while nodes
    /// are fetched.
    pub async fn fetch_each(&self, scope: &mut Scope<'_>, mut visit: impl FnMut(&K, &V)) -> Result<(), FarError> {
        let mut path = {
            let scope = &*scope;
            scope.retry(|| self.end_path(scope, false)).await?
        };
        loop {
            let end_of_node = {
                let scope = &*scope;
                let found = scope.retry(|| path.entry::<K, V>(scope, AccessMode::Read)).await?;
                let Some((node, index)) = found else { return Ok(()) };
                // SAFETY: as in `get_key_value`; the scope is renewed below, when nobody has them.
                unsafe { visit(&*node.key(index), &*node.value(index)) };
                scope.retry(|| scope.with_room(|| path.advance::<K, V>(scope, true))).await?;
                index + 1 == node.len() || node.height > 0
            };
            if end_of_node {
                scope.renew();
            }
        }
    }
}

impl<K: Ord + Send + 'static, V: Send + 'static> FarBTreeMap<K, V> {
    /// Keeps only the entries that `keep` accepts. It is called in order, and the scope is renewed
    /// on the way. If it fails, all entries that `keep` has rejected are removed, except perhaps
    /// the last one.
    pub fn retain(&mut self, scope: &mut Scope<'_>, mut keep: impl FnMut(&K, &mut V) -> bool) -> Result<(), FarError> {
        let mut path = self.end_path(scope, false)?;
        while let Some((node, index)) = path.entry::<K, V>(scope, AccessMode::Write)? {
            // SAFETY: as in `get_mut`; the scope is renewed below, when nobody has them.
            if unsafe { keep(&*node.key(index), &mut *node.value(index)) } {
                scope.with_room(|| path.advance::<K, V>(scope, true))?;
                if index + 1 == node.len() || node.height > 0 {
                    scope.renew();
                }
            } else {
                scope.renew();
                path = self.drop_entry(scope, &path)?;
            }
        }
        Ok(())
    }

    /// Takes the entry at a place out, and drops it when the next one is found. Returns the place
    /// of the next one.
    fn drop_entry(&mut self, scope: &Scope<'_>, path: &BTreePath) -> Result<BTreePath, FarError> {
        let mut place = path.numbers();
        let (key, _value) = {
            let _brief = scope.begin_transient();
            scope.with_room(|| self.take(scope, &mut place))?
        };
        self.len -= 1;
        self.path_to(scope, &key, true)
    }

    /// Moves all entries of another map into this one, in order; they replace entries with equal
    /// keys. Renews the scope on the way. If it fails, entries that were not moved are still in the
    /// other map, except for one that could not be put in: it is given back.
    pub fn append(
        &mut self,
        scope: &mut Scope<'_>,
        other: &mut FarBTreeMap<K, V>,
    ) -> Result<(), AllocError<Option<(K, V)>>> {
        let without_entry = |error| AllocError { error, value: None };
        other.check(scope).map_err(without_entry)?;
        if self.is_empty() {
            core::mem::swap(self, other);
        }
        while let Some((key, value)) = other.pop_first(scope).map_err(without_entry)? {
            let put = self.insert(scope, key, value);
            put.map_err(|full| AllocError { error: full.error, value: Some(full.value) })?;
            scope.renew();
        }
        Ok(())
    }
}
