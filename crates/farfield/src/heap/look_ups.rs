//! Many look-ups at a time: what is far for any of them is asked for before anything is waited for.

use super::attempt::attempt;
use super::{Heap, Scope};
use crate::error::FarError;
use crate::task::Executor;
use futures_util::future::try_join_all;

impl Heap {
    /// Looks many keys up, in any collection: those whose values are far wait together, so many take little longer than one. In the
    /// order of the keys. `look_up` only looks, and may be called several times for a key; it passes errors on. The scope must be
    /// able to hold all that is found ([`FarError::NearFull`]).
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
        Executor::new(self).block_on(self.fetch_many_with(scope, keys, look_up))
    }

    /// The same, for a task: while they are on their way, others run.
    pub async fn fetch_many_with<K, R>(
        &self,
        scope: &Scope<'_>,
        keys: impl IntoIterator<Item = K>,
        look_up: impl Fn(&K) -> Result<R, FarError>,
    ) -> Result<Vec<R>, FarError> {
        // What is found for one key stays near until there is something for each.
        let held = scope.hold();
        let keys: Vec<K> = keys.into_iter().collect();
        let mut found: Vec<Option<R>> = Vec::with_capacity(keys.len());
        let mut waiting = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            match attempt(scope.record, || look_up(key)) {
                Ok(result) => found.push(Some(result?)),
                Err(missed) => {
                    found.push(None);
                    let look_up = &look_up;
                    waiting.push(async move {
                        scope.await_missed(missed).await?;
                        Ok::<_, FarError>((index, scope.retry(|| look_up(key)).await?))
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

#[cfg(test)]
mod tests {
    //! Guards against scopes that begin anew while references are out.
    use super::*;
    use crate::FarMap;

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
}
