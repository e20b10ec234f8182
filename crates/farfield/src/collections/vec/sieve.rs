//! Keeping some elements, and dropping the others.

use super::FarVec;
use crate::error::FarError;
use crate::heap::{AccessMode, Scope};

impl<T: Send + 'static> FarVec<T> {
    /// Keeps the elements that `keep` accepts, in their order. Renews the scope on the way.
    ///
    /// The other elements are dropped at the end. If it fails before, they lie, in any order,
    /// between those that are kept and those that were not looked at.
    pub fn retain(&mut self, scope: &mut Scope<'_>, mut keep: impl FnMut(&T) -> bool) -> Result<(), FarError> {
        self.sieve(scope, AccessMode::Read, false, |_, element| keep(element))
    }

    /// Keeps the elements that `keep` accepts, as [`FarVec::retain`]; `keep` may change them.
    pub fn retain_mut(&mut self, scope: &mut Scope<'_>, mut keep: impl FnMut(&mut T) -> bool) -> Result<(), FarError> {
        self.sieve(scope, AccessMode::Write, false, |_, element| keep(element))
    }

    /// Keeps the first of consecutive elements that are equal. Otherwise as [`FarVec::retain`].
    pub fn dedup(&mut self, scope: &mut Scope<'_>) -> Result<(), FarError>
    where
        T: PartialEq,
    {
        self.dedup_by(scope, |element, before| element == before)
    }

    /// Keeps the first of consecutive elements with equal keys. Otherwise as [`FarVec::retain`].
    pub fn dedup_by_key<K: PartialEq>(
        &mut self,
        scope: &mut Scope<'_>,
        mut key: impl FnMut(&T) -> K,
    ) -> Result<(), FarError> {
        self.dedup_by(scope, |element, before| key(element) == key(before))
    }

    /// Keeps the first of consecutive elements that are the same. `is_same` compares an element
    /// with the one that was kept before it. Otherwise as [`FarVec::retain`].
    pub fn dedup_by(&mut self, scope: &mut Scope<'_>, mut is_same: impl FnMut(&T, &T) -> bool) -> Result<(), FarError> {
        self.sieve(scope, AccessMode::Read, true, |before, element| {
            before.is_none_or(|before| !is_same(element, before))
        })
    }

    /// Keeps the elements that `keep` accepts. It gets each element and, if `by_pairs`, the one
    /// that was kept before it. It may change them only if `mode` is `AccessMode::Write`.
    ///
    /// Elements are swapped and not moved, so the vector is whole whenever this ends.
    fn sieve(
        &mut self,
        scope: &mut Scope<'_>,
        mode: AccessMode,
        by_pairs: bool,
        mut keep: impl FnMut(Option<&mut T>, &mut T) -> bool,
    ) -> Result<(), FarError> {
        scope.renew();
        let _patient = scope.allow_blocking();
        let (mut kept, mut at) = (0, 0);
        while at < self.len {
            let moves = kept < at;
            let mode = if moves { AccessMode::Write } else { mode };
            let _held = scope.hold();
            let last = kept.checked_sub(1).filter(|_| by_pairs);
            let mut before = last.map(|last| self.element(scope, last, mode)).transpose()?;
            let source = self.element(scope, at, mode)?;
            let target = self.element(scope, kept, mode)?;
            let steps = (Self::PER_UNIT - at % Self::PER_UNIT).min(self.len - at);
            let room = Self::PER_UNIT - kept % Self::PER_UNIT;
            let (first, from) = (kept, at);
            while at - from < steps && kept - first < room {
                // SAFETY: elements of units that are near as long as the scope is held, and ours
                // alone; the one that was kept before is another one. References end before they
                // are swapped.
                unsafe {
                    let element = source.add(at - from);
                    at += 1;
                    if !keep(before.map(|before| &mut *before), &mut *element) {
                        if moves {
                            continue;
                        }
                        // From here on elements move.
                        break;
                    }
                    let place = target.add(kept - first);
                    if moves {
                        place.swap(element);
                    }
                    kept += 1;
                    before = by_pairs.then_some(place);
                }
            }
        }
        self.truncate(scope, kept)
    }
}
