//! Data of snapshots, kept until they are claimed.

/// Data of snapshots that were not claimed yet, by their secrets, newest last. A child of `fork`
/// has it as well. When there is more than `MAX`, the oldest entry is dropped.
pub(crate) struct UnclaimedSnapshots<T, const MAX: usize>([Option<(u128, T)>; MAX]);

impl<T, const MAX: usize> UnclaimedSnapshots<T, MAX> {
    pub(crate) const fn new() -> Self {
        UnclaimedSnapshots([const { None }; MAX])
    }

    /// Adds an entry and returns the oldest one if it had to make room.
    pub(crate) fn put(&mut self, secret: u128, what: T) -> Option<(u128, T)> {
        let place = self.0.iter().position(Option::is_none).unwrap_or(0);
        self.0[place..].rotate_left(1);
        self.0[MAX - 1].replace((secret, what))
    }

    pub(crate) fn take(&mut self, secret: u128) -> Option<T> {
        let place = self.0.iter_mut().find(|place| place.as_ref().is_some_and(|(known, _)| *known == secret))?;
        place.take().map(|(_, what)| what)
    }
}

/// Mixes the secrets of the members into a key that tells the snapshots of several pools apart.
pub(crate) fn key(secrets: &[u128]) -> u128 {
    secrets.iter().fold(0, |key, secret| key.rotate_left(7) ^ secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_wait_for_their_claim_whatever_comes_and_goes_beside_them() {
        let mut snapshots = UnclaimedSnapshots::<u32, 3>::new();
        assert_eq!(snapshots.put(1, 10), None);
        for key in 2..20 {
            assert_eq!(snapshots.put(key, 20), None);
            assert_eq!((snapshots.take(key), snapshots.take(key)), (Some(20), None), "good once");
        }
        assert_eq!((snapshots.put(20, 20), snapshots.put(21, 21)), (None, None));
        assert_eq!(snapshots.put(22, 22), Some((1, 10)), "the oldest goes");
        assert_eq!(snapshots.take(21), Some(21));
        assert_eq!((snapshots.put(23, 23), snapshots.put(24, 24)), (None, Some((20, 20))));
        assert_eq!((snapshots.take(1), snapshots.take(22)), (None, Some(22)));
    }
}
