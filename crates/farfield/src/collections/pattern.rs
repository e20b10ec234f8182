//! What a collection fetches ahead when its program says so, instead of what its thread's walks show.

/// Choice of what a vector or an array fetches ahead of need: see
/// [`FarVec::set_prefetch`](super::FarVec::set_prefetch).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PrefetchMode {
    /// The vector fetches ahead what the regular walks of a thread will need next, as they show it.
    #[default]
    Auto,
    /// The vector fetches nothing ahead.
    Off,
    /// The vector fetches these elements ahead, in this order, and nothing else, as with
    /// `static_prefetch` of AIFM (OSDI 2020).
    Static {
        /// Index of the first element.
        start: usize,
        /// Distance from each element to the next one; negative for a walk backwards.
        step: isize,
        /// Number of elements. Those that do not exist are passed over.
        count: usize,
    },
}

/// Most units that are fetched ahead of a walk.
const AHEAD_UNITS: usize = 64;

/// Elements of a [`PrefetchMode::Static`], in units of elements.
#[derive(Clone, Copy)]
pub(super) struct ElementPattern {
    start: i128,
    step: i128,
    count: i128,
    per_unit: i128,
}

impl ElementPattern {
    pub(super) fn new(start: usize, step: isize, count: usize, per_unit: usize) -> ElementPattern {
        ElementPattern { start: start as i128, step: step as i128, count: count as i128, per_unit: per_unit as i128 }
    }

    /// Returns the unit of the element with this number in the pattern; `None` behind its end, or
    /// before the first element of the collection.
    fn unit(&self, number: i128) -> Option<usize> {
        let index = self.start + number * self.step;
        (0..self.count).contains(&number).then(|| index.div_euclid(self.per_unit).try_into().ok()).flatten()
    }

    /// Returns the number of the first element in this unit, or behind it in the pattern's order.
    fn first_in(&self, unit: usize) -> i128 {
        let first = unit as i128 * self.per_unit;
        let distance = match self.step {
            0 => return 0,
            1.. => first - self.start,
            _ => self.start - (first + self.per_unit - 1),
        };
        // Rounded up.
        -(-distance).div_euclid(self.step.abs()).min(0)
    }

    /// Returns the units after this one, in the pattern's order: at most `most`, and none if no
    /// element of the pattern is in this unit.
    pub(super) fn units_after(self, unit: usize, most: usize) -> impl Iterator<Item = usize> + Clone {
        let begin = self.first_in(unit);
        let is_in = self.unit(begin) == Some(unit);
        let next = move |unit: &usize| self.unit(self.first_behind(*unit));
        let units = core::iter::successors(is_in.then_some(unit), next);
        units.skip(1).take(most.min(AHEAD_UNITS))
    }

    /// Returns the number of the first element behind this unit, in the pattern's order.
    fn first_behind(&self, unit: usize) -> i128 {
        match self.step {
            0 => self.count,
            1.. => self.first_in(unit + 1),
            _ => unit.checked_sub(1).map_or(self.count, |before| self.first_in(before)),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against elements that are fetched though nobody named them, or left out.
    use super::*;

    #[test]
    fn patterns_are_what_their_elements_say() {
        for per_unit in [1, 3, 8] {
            for step in [-17, -8, -3, -1, 0, 1, 2, 3, 7, 8, 9, 20] {
                for start in [0, 1, 7, 40, 63] {
                    for count in [0, 1, 2, 5, 30] {
                        let pattern = ElementPattern::new(start, step, count, per_unit);
                        let elements = (0..count as isize).map(|number| start as isize + number * step);
                        let mut units: Vec<usize> =
                            elements.take_while(|index| *index >= 0).map(|index| index as usize / per_unit).collect();
                        units.dedup();
                        for unit in 0..80 {
                            let after: Vec<usize> = pattern.units_after(unit, 4).collect();
                            let at = units.iter().position(|other| *other == unit);
                            let expected = at.map_or(&[][..], |at| &units[at + 1..(at + 5).min(units.len())]);
                            assert_eq!(after, expected, "{start} {step} {count}, {per_unit} a unit, after {unit}");
                        }
                    }
                }
            }
        }
    }
}
