//! Zone maps: the smallest and the largest number of each chunk, known without reading it.
//!
//! Numbers are compared by their images ([`Number::image`]), whose order is Arrow's: total, −0
//! before +0, NaN outside of all others.
//!
//! Danger: a chunk that is skipped and has matching rows; a range that the server compares
//! differently.

use core::ops::{Bound, Range, RangeBounds};
use farfield::Number;

/// The images of the smallest and the largest value of a chunk, nulls left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Zone {
    pub(crate) low: u64,
    pub(crate) high: u64,
}

/// The zones of a column of numbers, chunk by chunk. A zone is `None` if the chunk has nulls only.
#[derive(Default, Debug)]
pub(crate) struct Zones {
    pub(crate) chunks: Vec<Option<Zone>>,
    /// Whether some number is not ordered as its image is: NaN or −0.
    pub(crate) is_odd: bool,
}

impl Zones {
    /// Appends the zone of a chunk with these numbers, nulls left out.
    pub(crate) fn push<N: Number>(&mut self, numbers: impl Iterator<Item = N>) {
        let mut zone: Option<Zone> = None;
        for number in numbers {
            let image = number.image();
            // Only −0 equals the number with the next image.
            self.is_odd |= !number.is_ordered() || N::of_image(image.wrapping_add(1)) == number;
            let Zone { low, high } = zone.unwrap_or(Zone { low: image, high: image });
            zone = Some(Zone { low: low.min(image), high: high.max(image) });
        }
        self.chunks.push(zone);
    }

    /// Returns the zone of all chunks together, if numbers are ordered as their images are.
    pub(crate) fn all(&self) -> Option<Zone> {
        let zones = self.chunks.iter().flatten().filter(|_| !self.is_odd);
        zones.copied().reduce(|one, other| Zone { low: one.low.min(other.low), high: one.high.max(other.high) })
    }
}

/// A range of images: from `low` on, and before `end`, which is `None` if the range has no upper
/// end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ImageRange {
    low: u64,
    end: Option<u64>,
}

/// Share of a chunk's values that are in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ZoneMatch {
    None,
    Some,
    All,
}

impl ImageRange {
    pub(crate) const ALL: ImageRange = ImageRange { low: 0, end: None };

    /// Returns the intersection of two ranges, or `None` if it is empty.
    pub(crate) fn common(self, other: ImageRange) -> Option<ImageRange> {
        let low = self.low.max(other.low);
        let end = self.end.into_iter().chain(other.end).min();
        end.is_none_or(|end| low < end).then_some(ImageRange { low, end })
    }

    /// Returns the images of the numbers in a range, or `None` if the range is empty.
    pub(crate) fn of<N: Number>(values: &impl RangeBounds<N>) -> Option<ImageRange> {
        let low = match values.start_bound() {
            Bound::Unbounded => 0,
            Bound::Included(low) => low.image(),
            Bound::Excluded(low) => low.image().checked_add(1)?,
        };
        let end = match values.end_bound() {
            Bound::Unbounded => None,
            Bound::Included(high) => high.image().checked_add(1),
            Bound::Excluded(high) => Some(high.image()),
        };
        end.is_none_or(|end| low < end).then_some(ImageRange { low, end })
    }

    pub(crate) fn contains(self, image: u64) -> bool {
        self.low <= image && self.end.is_none_or(|end| image < end)
    }

    /// Returns the share of a chunk with this zone that is in the range, nulls left out.
    pub(crate) fn share(self, zone: Option<Zone>) -> ZoneMatch {
        match zone {
            Some(zone) if self.contains(zone.low) && self.contains(zone.high) => ZoneMatch::All,
            Some(zone) if self.low <= zone.high && self.end.is_none_or(|end| zone.low < end) => ZoneMatch::Some,
            _ => ZoneMatch::None,
        }
    }

    /// Converts the range to bounds for a comparison of numbers instead of images. It holds for
    /// chunks with these zones, without NaN and −0, that each have [some](Share::Some) of the
    /// range. A bound that no number of the chunks crosses is left out: its image need not be a
    /// number.
    pub(crate) fn numbers<N: Number>(self, zones: &[Option<Zone>]) -> (Bound<N>, Bound<N>) {
        let zones = || zones.iter().flatten();
        let low = match zones().all(|zone| self.low <= zone.low) {
            true => Bound::Unbounded,
            false => Bound::Included(N::of_image(self.low)),
        };
        let end = match self.end {
            Some(end) if zones().any(|zone| end <= zone.high) => Bound::Excluded(N::of_image(end)),
            _ => Bound::Unbounded,
        };
        (low, end)
    }
}

/// Groups neighbouring chunks with the same share.
pub(crate) fn runs(shares: impl IntoIterator<Item = ZoneMatch>) -> Vec<(ZoneMatch, Range<usize>)> {
    let mut runs: Vec<(ZoneMatch, Range<usize>)> = Vec::new();
    for (chunk, share) in shares.into_iter().enumerate() {
        match runs.last_mut() {
            Some((last, run)) if *last == share => run.end = chunk + 1,
            _ => runs.push((share, chunk..chunk + 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    //! All pairs of bounds over numbers of which every kind is there, against a plain comparison.
    use super::*;
    use core::cmp::Ordering;
    use core::fmt::Debug;

    fn bounds<N: Copy>(values: &[N]) -> Vec<Bound<N>> {
        let both = |value: &N| [Bound::Included(*value), Bound::Excluded(*value)];
        values.iter().flat_map(both).chain([Bound::Unbounded]).collect()
    }

    fn is_in<N: Copy>(value: N, range: (Bound<N>, Bound<N>), order: impl Fn(N, N) -> Ordering) -> bool {
        let above = match range.0 {
            Bound::Unbounded => true,
            Bound::Included(low) => order(low, value).is_le(),
            Bound::Excluded(low) => order(low, value).is_lt(),
        };
        let below = match range.1 {
            Bound::Unbounded => true,
            Bound::Included(high) => order(value, high).is_le(),
            Bound::Excluded(high) => order(value, high).is_lt(),
        };
        above && below
    }

    fn check<N: Number + Debug>(values: &[N], order: impl Fn(N, N) -> Ordering + Copy) {
        let ranges = bounds(values).into_iter().flat_map(|low| bounds(values).into_iter().map(move |high| (low, high)));
        for range in ranges {
            let kept = |value: N| is_in(value, range, order);
            let images = ImageRange::of(&range);
            for value in values {
                assert_eq!(
                    images.is_some_and(|images| images.contains(value.image())),
                    kept(*value),
                    "{value:?} {range:?}"
                );
            }
            let Some(images) = images else { continue };
            for (low, high) in (0..values.len()).flat_map(|low| (low..values.len()).map(move |high| (low, high))) {
                let chunk = &values[low..=high];
                let mut zones = Zones::default();
                zones.push(chunk.iter().copied());
                match images.share(zones.chunks[0]) {
                    ZoneMatch::All => assert!(chunk.iter().all(|value| kept(*value)), "{chunk:?} {range:?}"),
                    ZoneMatch::None => assert!(!chunk.iter().any(|value| kept(*value)), "{chunk:?} {range:?}"),
                    ZoneMatch::Some if zones.is_odd => {}
                    ZoneMatch::Some => {
                        let numbers = images.numbers::<N>(&zones.chunks);
                        for value in chunk {
                            assert_eq!(
                                numbers.contains(value),
                                kept(*value),
                                "{value:?} of {chunk:?} {range:?} {numbers:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_range_has_the_same_numbers_by_image_by_zone_and_by_comparison() {
        check(&[0u8, 1, 7, 254, 255], |a, b| a.cmp(&b));
        check(&[i64::MIN, -1, 0, 1, i64::MAX], |a, b| a.cmp(&b));
        check(&[0u64, 1, u64::MAX - 1, u64::MAX], |a, b| a.cmp(&b));
        let floats = [-f64::NAN, f64::NEG_INFINITY, -1.5, -0.0, 0.0, 5e-324, 2.5, f64::INFINITY, f64::NAN];
        check(&floats, |a, b| a.total_cmp(&b));
        check(&[f32::NEG_INFINITY, -1.0, 0.0, 1.0, f32::INFINITY], |a, b| a.total_cmp(&b));
        check(&[-0.0f32, 0.0, 1.0], |a, b| a.total_cmp(&b));
    }

    #[test]
    fn only_nan_and_negative_zero_are_odd() {
        let is_odd = |numbers: &[f64]| {
            let mut zones = Zones::default();
            zones.push(numbers.iter().copied());
            zones.is_odd
        };
        assert!(!is_odd(&[]) && !is_odd(&[0.0, 1.0, f64::MIN, f64::MAX, f64::NEG_INFINITY, f64::INFINITY, -5e-324]));
        assert!(is_odd(&[1.0, -0.0]) && is_odd(&[f64::NAN, 1.0]) && is_odd(&[-f64::NAN]));
        let mut zones = Zones::default();
        zones.push([0u8, 255].into_iter());
        zones.push([i64::MIN, i64::MAX].into_iter());
        assert!(!zones.is_odd);
    }

    #[test]
    fn neighbours_of_one_share_are_asked_for_together() {
        use ZoneMatch::{All, None, Some};
        assert_eq!(runs([]), []);
        assert_eq!(runs([All, All, Some, None, Some]), [(All, 0..2), (Some, 2..3), (None, 3..4), (Some, 4..5)]);
    }
}
