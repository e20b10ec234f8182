//! Data segments: places that are used in bursts with long rests between them, and places that are
//! used all the time.
//!
//! A segment of the first kind (*long interval*) can be far as a whole between two bursts. Of the
//! second kind (*sequential access*), those that are used least can be far.

use super::{HeatMap, HeatMapRow};
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Part of a place below which its use in a column counts as a rest.
const USED: f64 = 0.02;
/// Factor that "much longer" stands for.
const MUCH: f64 = 10.0;

/// Pattern of the use of a place over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind {
    /// Rests are much longer than bursts.
    LongInterval,
    /// Bursts are much longer than rests.
    SequentialAccess,
    /// Neither of the two.
    Mixed,
}

/// Frequency of use of a segment's pages, by quarters of all segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageLevel {
    /// Lowest quarter.
    Lowest,
    /// Second lowest quarter, below the middle.
    Low,
    /// Third quarter, above the middle.
    Middle,
    /// Highest quarter: at most a quarter of the segments is used more.
    High,
}

/// A data segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSegment {
    /// Name of the segment, for people.
    pub name: String,
    /// Address of the first byte.
    pub start: u64,
    /// Most bytes of the segment that were in memory at once.
    pub bytes: u64,
    /// Bytes used that three of four columns did not exceed.
    pub used_bytes: u64,
    /// Kind of the segment.
    pub kind: SegmentKind,
    /// Uses of a page per second: the used part of the segment in a column, over time.
    pub uses_per_s: f64,
    /// Level of that frequency.
    pub level: UsageLevel,
    /// Mean length of a burst, in milliseconds.
    pub access_ms: u64,
    /// Mean length of a rest, in milliseconds.
    pub interval_ms: u64,
}

/// Returns all segments, the largest first.
pub(super) fn find(heat: &HeatMap) -> Vec<DataSegment> {
    let mut segments: Vec<DataSegment> =
        heat.rows.iter().filter(|row| row.bytes > 0).map(|row| segment(row, heat.slice_ms)).collect();
    let rates: Vec<f64> = segments.iter().map(|segment| segment.uses_per_s).collect();
    for segment in &mut segments {
        let hotter = rates.iter().filter(|&&rate| rate > segment.uses_per_s).count();
        segment.level =
            [UsageLevel::High, UsageLevel::Middle, UsageLevel::Low, UsageLevel::Lowest][hotter * 4 / rates.len()];
    }
    segments.sort_by_key(|segment| (core::cmp::Reverse(segment.bytes), segment.start));
    segments
}

/// Returns the number of bytes that can be far. They are long-interval segments, sequential ones at
/// a level below `hot`, and the part of the others that they hardly use.
pub fn offloadable_bytes(segments: &[DataSegment], hot: UsageLevel) -> u64 {
    let can_go = |segment: &DataSegment| match segment.kind {
        SegmentKind::LongInterval => segment.bytes,
        SegmentKind::SequentialAccess if segment.level < hot => segment.bytes,
        SegmentKind::SequentialAccess | SegmentKind::Mixed => segment.bytes.saturating_sub(segment.used_bytes),
    };
    segments.iter().map(can_go).sum()
}

fn segment(row: &HeatMapRow, slice_ms: u64) -> DataSegment {
    let (mut bursts, mut rests) = (Spans::default(), Spans::default());
    let (mut shares, mut seen_ms, mut before, mut used_bytes) = (0.0, 0, None, Vec::new());
    for slice in 0..row.used_bytes.len() {
        // Before the place came to be, and where there was no sample, it neither rests nor works.
        let Some(share) = row.share(slice) else {
            continue;
        };
        used_bytes.push(row.used_bytes[slice]);
        let used = share >= USED;
        let spans = if used { &mut bursts } else { &mut rests };
        spans.slices += 1;
        spans.spans += u64::from(before != Some(used));
        before = Some(used);
        shares += share;
        seen_ms += slice_ms;
    }
    let (access_ms, interval_ms) = (bursts.mean(slice_ms), rests.mean(slice_ms));
    let kind = if interval_ms as f64 >= access_ms as f64 * MUCH {
        SegmentKind::LongInterval
    } else if access_ms as f64 >= interval_ms as f64 * MUCH {
        SegmentKind::SequentialAccess
    } else {
        SegmentKind::Mixed
    };
    used_bytes.sort_unstable();
    DataSegment {
        name: row.name.clone(),
        start: row.start,
        bytes: row.bytes,
        used_bytes: used_bytes.get((used_bytes.len() * 3).saturating_sub(1) / 4).copied().unwrap_or(0),
        kind,
        uses_per_s: shares * 1000.0 / seen_ms.max(1) as f64,
        level: UsageLevel::High,
        access_ms,
        interval_ms,
    }
}

#[derive(Default)]
struct Spans {
    slices: u64,
    spans: u64,
}

impl Spans {
    fn mean(&self, slice_ms: u64) -> u64 {
        self.slices * slice_ms / self.spans.max(1)
    }
}

#[cfg(test)]
mod tests {
    //! Danger: memory called cold that is hot.
    use super::*;
    use alloc::vec;

    /// Columns of 100 ms; `#` all used, `+` a quarter, `.` nothing, space: not there.
    fn row(start: u64, columns: &str) -> HeatMapRow {
        let used = |c: char| match c {
            '#' => 1000,
            '+' => 250,
            _ => 0,
        };
        HeatMapRow {
            name: String::new(),
            start,
            bytes: 1000,
            used_bytes: columns.chars().map(used).collect(),
            seen_ms: columns.chars().map(|c| if c == ' ' { 0 } else { 100 }).collect(),
        }
    }

    fn one(columns: &str) -> DataSegment {
        find(&HeatMap { slice_ms: 100, rows: vec![row(0, columns)] }).remove(0)
    }

    #[test]
    fn kinds_follow_from_bursts_and_rests() {
        let check = |columns: &str, kind: SegmentKind, access_ms: u64, interval_ms: u64| {
            let segment = one(columns);
            assert_eq!(
                (segment.kind, segment.access_ms, segment.interval_ms),
                (kind, access_ms, interval_ms),
                "{columns:?}"
            );
        };
        check("#..........", SegmentKind::LongInterval, 100, 1000);
        check("#.........", SegmentKind::Mixed, 100, 900);
        check("#..........#..........", SegmentKind::LongInterval, 100, 1000);
        check("..........", SegmentKind::LongInterval, 0, 1000);
        check("##########.", SegmentKind::SequentialAccess, 1000, 100);
        check("++++++++++", SegmentKind::SequentialAccess, 1000, 0);
        check("##..##..", SegmentKind::Mixed, 200, 200);
        check("      ##", SegmentKind::SequentialAccess, 200, 0);
        check("#  ..........", SegmentKind::LongInterval, 100, 1000);
    }

    #[test]
    fn rates_count_only_the_time_that_was_looked_at() {
        assert_eq!(one("##########").uses_per_s, 10.0);
        assert_eq!(one("     #####").uses_per_s, 10.0);
        assert_eq!(one("++++++++++").uses_per_s, 2.5);
    }

    #[test]
    fn the_hottest_is_never_offloaded_and_the_resting_always_is() {
        let heat = |rows: &[&str]| {
            let rows = rows.iter().enumerate().map(|(index, columns)| row(index as u64, columns)).collect();
            find(&HeatMap { slice_ms: 100, rows })
        };
        let bytes = |rows: &[&str], hot| offloadable_bytes(&heat(rows), hot);
        assert_eq!(bytes(&["##########"], UsageLevel::High), 0, "alone, it is the hottest");
        assert_eq!(bytes(&["#+++++++++"], UsageLevel::High), 750, "but of a part of it alone");
        assert_eq!(bytes(&["##########", "##########"], UsageLevel::High), 0, "equals have one level");
        assert_eq!(bytes(&["#..........", "###########"], UsageLevel::High), 1000);
        let four = ["###########", "+#+#+#+#+#+", "++++++++++#", "+++++++++++"];
        let levels: Vec<UsageLevel> = four.iter().enumerate().map(|(index, _)| heat(&four)[index].level).collect();
        assert_eq!(levels, [UsageLevel::High, UsageLevel::Middle, UsageLevel::Low, UsageLevel::Lowest]);
        assert_eq!(
            (bytes(&four, UsageLevel::High), bytes(&four, UsageLevel::Middle), bytes(&four, UsageLevel::Lowest)),
            (3000, 2000, 1500)
        );
    }

    #[test]
    fn segments_come_in_order_of_size() {
        let mut rows = vec![row(1, "##"), row(2, "##"), row(3, "##")];
        rows[1].bytes = 5000;
        rows[0].bytes = 0;
        let starts: Vec<u64> = find(&HeatMap { slice_ms: 100, rows }).iter().map(|segment| segment.start).collect();
        assert_eq!(starts, [2, 3]);
    }
}
