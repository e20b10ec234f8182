//! Slab of the requests in flight to a peer that answers by number. Each number is used once, and
//! its request is found without a search.
//!
//! Danger that the tests guard against: a late answer that is taken for the answer to the request
//! that has the slot by now.

/// Slab of the notes on requests in flight.
#[derive(Debug)]
pub(crate) struct RequestSlab<T> {
    slots: Vec<RequestSlot<T>>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct RequestSlot<T> {
    /// Number of the present entry, or of the last one.
    number: u64,
    value: Option<T>,
}

/// Error: this number was never given out.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct UnissuedNumber;

impl<T> RequestSlab<T> {
    /// Greatest number of entries at a time.
    pub(crate) const MAX: usize = 256;

    pub(crate) fn new() -> RequestSlab<T> {
        RequestSlab { slots: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an entry and returns its number. There must be room for it, otherwise this panics.
    pub(crate) fn add(&mut self, value: T) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots.len() < Self::MAX, "there are no more seats");
            self.slots.push(RequestSlot { number: self.slots.len() as u64, value: None });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.number += Self::MAX as u64;
        slot.value = Some(value);
        slot.number
    }

    /// Removes the entry with this number; `None` if it was removed before.
    pub(crate) fn remove(&mut self, number: u64) -> Result<Option<T>, UnissuedNumber> {
        let index = (number % Self::MAX as u64) as usize;
        let slot = self.slots.get_mut(index).filter(|slot| (Self::MAX as u64..=slot.number).contains(&number));
        let slot = slot.ok_or(UnissuedNumber)?;
        let value = slot.value.take_if(|_| slot.number == number);
        self.free.extend(value.is_some().then_some(index));
        Ok(value)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// Removes all entries for which `is_so` holds.
    pub(crate) fn extract_if(&mut self, is_so: impl Fn(&T) -> bool) -> impl Iterator<Item = T> {
        let free = &mut self.free;
        self.slots.iter_mut().enumerate().filter_map(move |(index, slot)| {
            let value = slot.value.take_if(|value| is_so(value))?;
            free.push(index);
            Some(value)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn each_number_is_used_once_and_who_has_it_is_found() {
        let mut slab = RequestSlab::new();
        let mut twin = BTreeMap::new();
        let mut gone = Vec::new();
        let mut dice = 1u64;
        for round in 0..20_000u32 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            match dice >> 62 {
                0 | 1 if twin.len() < RequestSlab::<u32>::MAX => {
                    let number = slab.add(round);
                    assert!(!gone.contains(&number));
                    assert_eq!(twin.insert(number, round), None);
                }
                2 => {
                    if let Some(number) = twin.keys().copied().nth((dice >> 32) as usize % twin.len().max(1)) {
                        assert_eq!(slab.remove(number), Ok(twin.remove(&number)));
                        gone.push(number);
                    }
                }
                _ if round % 512 == 0 => {
                    let mut left: Vec<u32> = slab.extract_if(|value| value % 3 == 0).collect();
                    let mut expected: Vec<u32> =
                        twin.extract_if(.., |_, value| *value % 3 == 0).map(|(_, value)| value).collect();
                    left.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(left, expected);
                }
                _ => {}
            }
            if let Some(number) = gone.get((dice >> 40) as usize % gone.len().max(1)) {
                assert_eq!(slab.remove(*number), Ok(None), "whoever sits there now");
            }
            assert_eq!(slab.len(), twin.len());
        }
        assert!(slab.values().copied().eq(slab.slots.iter().filter_map(|slot| twin.get(&slot.number).copied())));
        let next = twin.keys().next_back().map_or(0, |last| last + RequestSlab::<u32>::MAX as u64);
        for number in [0, 255, next + RequestSlab::<u32>::MAX as u64, u64::MAX] {
            assert_eq!(slab.remove(number), Err(UnissuedNumber), "{number}");
        }
    }
}
