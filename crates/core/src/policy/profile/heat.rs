//! Heat map: how much of each place in memory was used, over time. Rows are places, columns are
//! times.

use super::{AreaKind, Observation, epoch_ends};
use crate::cast::usize_of;
use alloc::string::String;
use alloc::vec::Vec;
use alloc::{format, vec};
use serde::{Deserialize, Serialize};

/// Greatest number of columns.
pub const SLICES_MAX: usize = 240;

/// A heat map: the use of each place over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeatMap {
    /// Width of a column in milliseconds.
    pub slice_ms: u64,
    /// Rows in order of process and address.
    pub rows: Vec<HeatMapRow>,
}

/// Use of one place over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeatMapRow {
    /// Name of the place, for people.
    pub name: String,
    /// Address of the first byte.
    pub start: u64,
    /// Most bytes of the place that were in memory at once.
    pub bytes: u64,
    /// Bytes used, by column. A page counts once for each time that accessed bits were cleared.
    pub used_bytes: Vec<u64>,
    /// Milliseconds that each column saw: how long accessed bits had been gathering. 0 where there
    /// was no sample.
    pub seen_ms: Vec<u64>,
}

impl HeatMapRow {
    /// Returns the part of the place that was used in that column, at most 1; `None` where there
    /// was no sample.
    pub fn share(&self, slice: usize) -> Option<f64> {
        let seen = self.seen_ms[slice] > 0 && self.bytes > 0;
        seen.then(|| (self.used_bytes[slice] as f64 / self.bytes as f64).min(1.0))
    }
}

impl HeatMap {
    /// Computes the map of the anonymous areas of an observation. The use in an epoch goes to the
    /// columns that it covers, evenly.
    pub fn of(observation: &Observation) -> HeatMap {
        let Some(last) = observation.samples.last() else {
            return HeatMap::default();
        };
        // A column is no narrower than an epoch, or most would be empty.
        let epochs = u64::from(last.epoch) + 1;
        let slices = epochs.min(SLICES_MAX as u64);
        let slice_ms = last.at_ms.div_ceil(slices).max(1);
        let slices = usize_of(last.at_ms.div_ceil(slice_ms).max(1));
        let mut rows: Vec<Option<HeatMapRow>> = vec![None; observation.areas.len()];
        for sample in epoch_ends(&observation.samples) {
            for seen in &sample.areas {
                let area = &observation.areas[seen.area as usize];
                if area.kind != AreaKind::Anonymous {
                    continue;
                }
                let row = rows[seen.area as usize].get_or_insert_with(|| HeatMapRow {
                    name: format!("{} {:#x} {}", area.process, area.start, area.name),
                    start: area.start,
                    bytes: 0,
                    used_bytes: vec![0; slices],
                    seen_ms: vec![0; slices],
                });
                row.bytes = row.bytes.max(seen.resident_bytes);
                row.spread(slice_ms, sample.at_ms, sample.since_ms, seen.used_bytes);
            }
        }
        let mut rows: Vec<(u32, HeatMapRow)> =
            rows.into_iter().zip(&observation.areas).filter_map(|(row, area)| Some((area.process, row?))).collect();
        rows.sort_by_key(|(process, row)| (*process, row.start));
        HeatMap { slice_ms, rows: rows.into_iter().map(|(_, row)| row).collect() }
    }
}

impl HeatMapRow {
    /// Notes that `used` bytes were used in the `since_ms` before `at_ms`.
    fn spread(&mut self, slice_ms: u64, at_ms: u64, since_ms: u64, used: u64) {
        let since_ms = since_ms.clamp(1, at_ms.max(1));
        let from = at_ms.saturating_sub(since_ms);
        for slice in from / slice_ms..=at_ms.saturating_sub(1).max(from) / slice_ms {
            let (begin, end) = (from.max(slice * slice_ms), at_ms.max(from + 1).min((slice + 1) * slice_ms));
            let slice = usize_of(slice);
            // A page used in a long epoch counts as used in each of the columns that the epoch
            // covers.
            self.used_bytes[slice] = self.used_bytes[slice].max(used);
            self.seen_ms[slice] = (self.seen_ms[slice] + end - begin).min(slice_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: heat at the wrong place or time, which looks as good as the right one.
    use super::super::{Area, AreaSample, Sample};
    use super::*;

    fn area(process: u32, start: u64, kind: AreaKind) -> Area {
        Area { process, start, end: start + 100, kind, name: String::new() }
    }

    #[test]
    fn the_heat_map_shows_where_and_when_memory_is_used() {
        let areas =
            vec![area(2, 50, AreaKind::Anonymous), area(1, 90, AreaKind::Anonymous), area(1, 10, AreaKind::File)];
        let sample = |epoch: u32, first: u64, second: u64| Sample {
            at_ms: u64::from(epoch + 1) * 100,
            since_ms: 100,
            epoch,
            areas: vec![
                AreaSample { area: 0, resident_bytes: 100, used_bytes: first },
                AreaSample { area: 1, resident_bytes: 200, used_bytes: second },
                AreaSample { area: 2, resident_bytes: 300, used_bytes: 300 },
            ],
            ..Sample::default()
        };
        let samples = vec![sample(0, 100, 0), sample(1, 0, 50), sample(2, 0, 200), sample(3, 25, 0)];
        let heat = HeatMap::of(&Observation { areas, samples, ..Observation::default() });
        let shares = |row: usize| (0..4).map(|slice| heat.rows[row].share(slice).unwrap()).collect::<Vec<_>>();
        assert_eq!(heat.rows.iter().map(|row| (row.start, row.bytes)).collect::<Vec<_>>(), [(90, 200), (50, 100)]);
        assert_eq!((shares(0), shares(1)), (vec![0.0, 0.25, 1.0, 0.0], vec![1.0, 0.0, 0.0, 0.25]));
    }

    #[test]
    fn epochs_of_any_length_fit_into_the_columns() {
        for epochs in [1, 2, 3, 100, 1000] {
            let mut at_ms = 0;
            let sample = |epoch: u32| {
                let since_ms = u64::from(epoch * 7919 % 997);
                at_ms += since_ms;
                let seen = AreaSample { area: 0, resident_bytes: 10, used_bytes: 10 };
                Sample { at_ms, since_ms, epoch, areas: vec![seen], ..Sample::default() }
            };
            let samples: Vec<Sample> = (0..epochs).map(sample).collect();
            let areas = vec![area(1, 0, AreaKind::Anonymous)];
            let heat = HeatMap::of(&Observation { areas, samples, ..Observation::default() });
            assert!(heat.rows[0].used_bytes.len() <= SLICES_MAX);
            assert!(heat.rows[0].seen_ms.iter().all(|&seen| seen <= heat.slice_ms), "{epochs}");
        }
        assert_eq!(HeatMap::of(&Observation::default()), HeatMap::default());
    }
}
