//! Many look-ups at a time: all that is far for any of them is requested before anything is
//! awaited.

use super::try_access::{AttemptKind, try_access};
use crate::Heap;
use crate::error::FarError;
use crate::heap::Scope;
use futures_util::future::try_join_all;

/// Number of look-ups between a hint and its use: what so many load ahead stays in the first cache.
const HINTED: usize = 16;

impl Heap {
    /// Looks up many keys, in any collection, and returns the results in the order of the keys.
    ///
    /// Look-ups of far values wait together, so many take little longer than one. `look_up` must
    /// only look, may be called several times for a key, and passes errors on. Blocks. Fails with
    /// [`FarError::NearFull`] if the scope cannot hold all that is found.
    ///
    /// ```
    /// # use farfield::{FarMap, Heap};
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let ages = FarMap::<u64, u32>::new(&heap)?;
    /// ages.insert(&heap.enter(), 7u64, 42u32)?;
    /// let scope = heap.enter();
    /// let found = heap.get_many_with(&scope, [7u64, 8], |number| ages.get(&scope, number))?;
    /// assert_eq!(found, [Some(&42), None]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// References end with their scope:
    ///
    /// ```compile_fail,E0505
    /// # let heap = farfield::Heap::builder().build().unwrap();
    /// # let ages = farfield::FarMap::<u64, u32>::new(&heap).unwrap();
    /// let scope = heap.enter();
    /// let found = heap.get_many_with(&scope, [7u64], |number| ages.get(&scope, number)).unwrap();
    /// drop(scope); // error: cannot move out of `scope` because it is borrowed
    /// println!("{found:?}");
    /// ```
    pub fn get_many_with<K, R>(
        &self,
        scope: &Scope<'_>,
        keys: impl IntoIterator<Item = K>,
        look_up: impl Fn(&K) -> Result<R, FarError>,
    ) -> Result<Vec<R>, FarError> {
        let keys: Vec<K> = keys.into_iter().collect();
        scope.look_up_many(&keys, |_| (), look_up)
    }

    /// Looks up many keys, as [`Heap::get_many_with`] does, without blocking the thread: other
    /// tasks run meanwhile.
    pub async fn fetch_many_with<K, R>(
        &self,
        scope: &Scope<'_>,
        keys: impl IntoIterator<Item = K>,
        look_up: impl Fn(&K) -> Result<R, FarError>,
    ) -> Result<Vec<R>, FarError> {
        // A result for one key stays near until there is a result for each.
        let held = scope.hold();
        let keys: Vec<K> = keys.into_iter().collect();
        let mut found: Vec<Option<R>> = Vec::with_capacity(keys.len());
        let mut waiting = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            match try_access(scope.record, AttemptKind::First, || look_up(key)) {
                Ok(result) => found.push(Some(result?)),
                Err(missed) => {
                    found.push(None);
                    let look_up = &look_up;
                    waiting.push(async move {
                        scope.await_missed(missed).await?;
                        Ok::<_, FarError>((index, scope.retry_from(AttemptKind::Retry, || look_up(key)).await?))
                    });
                }
            }
        }
        for (index, value) in try_join_all(waiting).await? {
            found[index] = Some(value);
        }
        drop(held);
        scope.mark_used();
        Ok(found.into_iter().flatten().collect())
    }
}

impl Scope<'_> {
    /// Looks up many keys for [`Heap::get_many_with`]. `hint` is called with the next few keys
    /// before they are looked up.
    ///
    /// Works in rounds: all keys are looked up without waiting; what they missed is fetched at the
    /// same time; those that missed something are looked up again, which may miss what they found
    /// there. No key costs more than its look-ups and its flight.
    pub(crate) fn look_up_many<K, R>(
        &self,
        keys: &[K],
        hint: impl Fn(&[K]),
        look_up: impl Fn(&K) -> Result<R, FarError>,
    ) -> Result<Vec<R>, FarError> {
        if self.record.is_nonblocking.get() {
            return keys.iter().map(look_up).collect();
        }
        // A result for one key stays near until there is a result for each.
        let held = self.hold();
        let mut found: Vec<Option<R>> = Vec::with_capacity(keys.len());
        let (mut left, mut missed) = (Vec::new(), Vec::new());
        for some in keys.chunks(HINTED) {
            hint(some);
            for key in some {
                found.push(match try_access(self.record, AttemptKind::First, || look_up(key)) {
                    Ok(result) => Some(result?),
                    Err(what) => {
                        left.push(found.len());
                        missed.push(what);
                        None
                    }
                });
            }
        }
        while !left.is_empty() {
            if self.core.fetch_missed(self.record, &missed)? == 0 {
                // No room without waiting, or others fetch it all: one key waits.
                missed.swap_remove(0);
                let first = left.swap_remove(0);
                found[first] = Some(look_up(&keys[first])?);
                continue;
            }
            missed.clear();
            for index in core::mem::take(&mut left) {
                match try_access(self.record, AttemptKind::Retry, || look_up(&keys[index])) {
                    Ok(result) => found[index] = Some(result?),
                    Err(what) => {
                        left.push(index);
                        missed.push(what);
                    }
                }
            }
        }
        drop(held);
        self.mark_used();
        Ok(found.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    //! Guards against scopes that begin anew while references are out, misses that wait one after
    //! the other, and values that are hot because they came.
    use super::*;
    use crate::plane::Plane;
    use crate::ptr::Follow;
    use crate::{FarBox, FarMap};
    use core::cell::Cell;

    #[test]
    fn the_scope_of_what_was_found_is_used() {
        let heap = Heap::builder().near(4 << 20).build().unwrap();
        let map = FarMap::<u64, u64>::new(&heap).unwrap();
        map.insert(&heap.enter(), 7, 42).unwrap();
        let scope = heap.enter();
        assert!(scope.is_renewable());
        let found = heap.get_many_with(&scope, [7, 8], |key| map.get(&scope, key)).unwrap();
        assert_eq!(found, [Some(&42), None]);
        assert!(!scope.is_renewable());
    }

    /// Values of which the first ones have left, in a heap with room: what was made last is near,
    /// and its room is free at once.
    fn far_values(heap: &Heap) -> Vec<FarBox<[u64; 64]>> {
        let mut values: Vec<_> = (0..8192u64).map(|index| heap.alloc([index; 64]).unwrap()).collect();
        values.truncate(6144);
        assert!(heap.stats().written_pages > 0);
        values
    }

    #[test]
    fn misses_of_a_batch_are_fetched_in_one_round() {
        for plane in [Plane::Page, Plane::Object, Plane::Hybrid] {
            let heap = Heap::builder().near(2 << 20).near_max(2 << 20).plane(plane).build().unwrap();
            let values = far_values(&heap);
            let scope = heap.enter();
            let looks = Cell::new(0);
            let misses = heap.stats().misses;
            // One of each page, so that on every plane each is a miss.
            let keys = (0..16).map(|index| index * 8);
            let found = heap.get_many_with(&scope, keys.clone(), |key| {
                looks.set(looks.get() + 1);
                values[*key].get(&scope)
            });
            assert!(found.unwrap().into_iter().zip(keys).all(|(value, key)| *value == [key as u64; 64]));
            assert_eq!((heap.stats().misses - misses, looks.get()), (16, 32), "{plane:?}");
        }
    }

    #[test]
    fn fetched_values_are_hot_when_they_are_used_again() {
        let heap = Heap::builder().near(2 << 20).near_max(2 << 20).plane(Plane::Object).build().unwrap();
        let values = far_values(&heap);
        let objects = heap.core().objects.as_ref().unwrap();
        let number = |value: &FarBox<[u64; 64]>| value.pointer().number_in(heap.core()).unwrap() - heap.core().pages;
        let hot = || values[..8].iter().filter(|value| objects.handle(number(value)).is_hot()).count();
        assert_eq!(hot(), 0);
        for expected in [0, 8] {
            let scope = heap.enter();
            heap.get_many_with(&scope, 0..8, |key| values[*key].get(&scope)).unwrap();
            assert_eq!(hot(), expected);
        }
    }
}
