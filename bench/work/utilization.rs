//! Bounded minimum mutator utilization (BMU; Sachindran and others, OOPSLA 2004): the least share of a window of time, so long or
//! longer, in which a thread does not wait for a collector. A pause that is cut into many short ones is as long in it as before.

use std::ops::Range;

/// Times, in ns from any moment, in which one thread has waited: in their order, none in another.
pub(crate) type Waits = [Range<u64>];

/// Returns the least share of a window in `span` that is not waited in, of all windows of `least` ns or longer; `None` if
/// the span is shorter.
pub(crate) fn bounded_utilization(waits: &Waits, span: &Range<u64>, least: u64) -> Option<f64> {
    let length = span.end.saturating_sub(span.start);
    if least == 0 || length < least {
        return None;
    }
    let waits: Vec<Range<u64>> = waits
        .iter()
        .map(|wait| wait.start.max(span.start)..wait.end.min(span.end))
        .filter(|wait| wait.start < wait.end)
        .collect();
    let timeline = Timeline::new(&waits);
    let share = |window: Range<u64>| {
        let waited = timeline.until(window.end) - timeline.until(window.start);
        1.0 - waited as f64 / (window.end - window.start) as f64
    };
    // Of windows of one length the worst begins with a wait or ends with one.
    let beginnings = waits.iter().map(|wait| wait.start.min(span.end - least));
    let ends = waits.iter().map(|wait| wait.end.saturating_sub(least).max(span.start));
    let shortest = beginnings.chain(ends).map(|start| share(start..start + least)).fold(1.0, f64::min);
    // A longer one that is worse than all that are shorter does both. One of twice the length is two windows, of which one is no
    // better.
    let mut worst = shortest;
    for (index, first) in waits.iter().enumerate() {
        let skipped = waits[index..].partition_point(|wait| wait.end - first.start < least);
        let longer = waits[index + skipped..].iter().take_while(|wait| wait.end - first.start < 2 * least);
        worst = longer.map(|last| share(first.start..last.end)).fold(worst, f64::min);
    }
    Some(worst)
}

/// Waits, and for each of them how long all before it took.
struct Timeline<'a> {
    waits: &'a Waits,
    before: Vec<u64>,
}

impl<'a> Timeline<'a> {
    fn new(waits: &'a Waits) -> Timeline<'a> {
        let mut sum = 0;
        let before = waits.iter().map(|wait| {
            sum += wait.end - wait.start;
            sum - (wait.end - wait.start)
        });
        Timeline { waits, before: before.collect() }
    }

    /// Returns how long was waited before this moment.
    fn until(&self, moment: u64) -> u64 {
        let begun = self.waits.partition_point(|wait| wait.start < moment);
        let Some(last) = begun.checked_sub(1) else { return 0 };
        self.before[last] + self.waits[last].end.min(moment) - self.waits[last].start
    }
}

#[cfg(test)]
mod tests {
    //! Danger: a share that is better than what a program has had.
    use super::*;
    use crate::random::Random;

    fn check(waits: &[(u64, u64)], least: u64, expected: f64) {
        let waits: Vec<Range<u64>> = waits.iter().map(|(start, end)| *start..*end).collect();
        let found = bounded_utilization(&waits, &(0..1000), least).unwrap();
        assert!((found - expected).abs() < 1e-12, "{waits:?}, {least}: {found}, not {expected}");
    }

    #[test]
    fn windows_up_to_the_longest_wait_have_no_use_and_longer_ones_some() {
        check(&[], 10, 1.0);
        check(&[(100, 110)], 10, 0.0);
        check(&[(100, 110)], 20, 0.5);
        check(&[(100, 110)], 1000, 0.99);
        check(&[(0, 10), (990, 1000)], 10, 0.0);
        check(&[(0, 10), (990, 1000)], 20, 0.5);
    }

    #[test]
    fn waits_that_follow_each_other_count_together() {
        check(&[(100, 110), (112, 122)], 11, 1.0 / 11.0);
        // Of the windows of 12 or longer, that of 22 is the worst.
        check(&[(100, 110), (112, 122)], 12, 2.0 / 22.0);
        check(&[(100, 110), (112, 122)], 22, 2.0 / 22.0);
        check(&[(100, 110), (112, 122)], 40, 0.5);
    }

    #[test]
    fn what_lies_outside_of_the_span_does_not_count() {
        let found = |waits: &Waits, span: Range<u64>| bounded_utilization(waits, &span, 100);
        let around = |waits: [Range<u64>; 2]| waits;
        assert_eq!(found(&around([0..150, 1050..2000]), 100..1100), Some(0.5));
        assert_eq!(found(&around([0..100, 1100..2000]), 100..1100), Some(1.0));
        assert_eq!(found(&[], 100..199), None);
    }

    #[test]
    fn no_window_of_any_length_is_worse() {
        for seed in 0..60 {
            let mut random = Random::new(seed);
            let (mut at, mut waits) = (random.below(10), Vec::new());
            loop {
                let wait = at..at + 1 + random.below(9);
                at = wait.end + 1 + random.below(if seed % 2 == 0 { 4 } else { 40 });
                if wait.end > 160 {
                    break;
                }
                waits.push(wait);
            }
            let mut until = vec![0];
            for moment in 0..160 {
                until.push(until[moment] + u64::from(waits.iter().any(|wait| wait.contains(&(moment as u64)))));
            }
            let waited = |window: &Range<u64>| until[window.end as usize] - until[window.start as usize];
            for least in [1, 5, 13, 50, 160] {
                let windows = (least..=160).flat_map(|length| (0..=160 - length).map(move |at| at..at + length));
                let share = |window: Range<u64>| 1.0 - waited(&window) as f64 / (window.end - window.start) as f64;
                let expected = windows.map(share).fold(1.0, f64::min);
                let found = bounded_utilization(&waits, &(0..160), least).unwrap();
                assert!((found - expected).abs() < 1e-12, "seed {seed}, {waits:?}, {least}: {found}, not {expected}");
            }
        }
    }
}
