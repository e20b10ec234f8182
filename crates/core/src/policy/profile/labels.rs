//! Labels for a whole program: what kind of memory it has, how it uses files, how densely it uses
//! memory.

use super::{AreaKind, Observation, Sample, epoch_ends};
use serde::{Deserialize, Serialize};

/// Part of a mapping's resident memory that must be used for it to count as used from end to end.
const DENSE: f64 = 0.9;

/// Anonymous share of a program's memory, by thirds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnonymousUse {
    /// Less than a third.
    Low,
    /// Up to two thirds.
    Medium,
    /// More than two thirds.
    High,
}

impl AnonymousUse {
    /// Returns the label of a share.
    pub fn of(share: f64) -> AnonymousUse {
        match share {
            share if share < 1.0 / 3.0 => AnonymousUse::Low,
            share if share <= 2.0 / 3.0 => AnonymousUse::Medium,
            _ => AnonymousUse::High,
        }
    }
}

/// Means by which a program accesses its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileUse {
    /// Little use of files.
    Little,
    /// System calls `read` and `write`: the kernel's cache can shrink without harm.
    Calls,
    /// Mappings: pages that leave come back by faults of the kernel.
    Mappings,
}

/// Bytes below which the use of files is little: every program reads libraries and settings.
const LITTLE_BYTES: u64 = 16 << 20;

impl FileUse {
    /// Compares the bytes that went through calls with the most mapped data that was in memory at
    /// once.
    pub fn of(observation: &Observation) -> FileUse {
        let is_data = |area: u32| observation.areas[area as usize].kind == AreaKind::File;
        let mapped = |sample: &Sample| {
            sample.areas.iter().filter(|area| is_data(area.area)).map(|area| area.resident_bytes).sum::<u64>()
        };
        let mapped = observation.samples.iter().map(mapped).max().unwrap_or(0);
        let calls = observation.read_bytes + observation.written_bytes;
        match mapped.max(calls) {
            most if most < LITTLE_BYTES => FileUse::Little,
            _ if mapped > calls => FileUse::Mappings,
            _ => FileUse::Calls,
        }
    }
}

/// Returns the anonymous part of what is resident, weighted by time.
pub(super) fn anonymous_share(samples: &[Sample]) -> f64 {
    let (mut anonymous, mut all, mut before) = (0.0, 0.0, 0);
    for sample in samples {
        let time = sample.at_ms.saturating_sub(before).max(1) as f64;
        before = sample.at_ms;
        anonymous += sample.anonymous_bytes as f64 * time;
        all += (sample.anonymous_bytes + sample.file_bytes) as f64 * time;
    }
    if all > 0.0 { anonymous / all } else { 0.0 }
}

/// Returns the part of the used memory that lies in mappings used from end to end.
pub(super) fn dense_share(samples: &[Sample]) -> f64 {
    let (mut dense, mut all) = (0u64, 0u64);
    for area in epoch_ends(samples).flat_map(|sample| &sample.areas) {
        all += area.used_bytes;
        if area.used_bytes as f64 >= area.resident_bytes as f64 * DENSE {
            dense += area.used_bytes;
        }
    }
    if all > 0 { dense as f64 / all as f64 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    //! Danger: a program that is told to use files as it does not.
    use super::super::{Area, AreaSample};
    use super::*;
    use alloc::{string::String, vec, vec::Vec};

    #[test]
    fn thirds_are_thirds() {
        let check = |share: f64, label: AnonymousUse| assert_eq!(AnonymousUse::of(share), label, "{share}");
        check(0.0, AnonymousUse::Low);
        check(0.33, AnonymousUse::Low);
        check(0.34, AnonymousUse::Medium);
        check(0.66, AnonymousUse::Medium);
        check(0.67, AnonymousUse::High);
        check(1.0, AnonymousUse::High);
    }

    #[test]
    fn a_short_peak_of_files_does_not_make_the_label() {
        let sample =
            |at_ms, anonymous_bytes, file_bytes| Sample { at_ms, anonymous_bytes, file_bytes, ..Sample::default() };
        assert_eq!(anonymous_share(&[sample(100, 10, 90), sample(1000, 90, 10)]), 0.82);
        assert_eq!(anonymous_share(&[]), 0.0);
    }

    #[test]
    fn files_are_used_by_whatever_moves_more() {
        let area = |kind| Area { process: 1, start: 0, end: 1 << 30, kind, name: String::new() };
        let check = |calls_mib: u64, code_mib: u64, mapped_mib: u64, expected| {
            let areas = |list: &[(u32, u64)]| -> Vec<AreaSample> {
                let one = |&(area, mib): &(u32, u64)| AreaSample { area, resident_bytes: mib << 20, used_bytes: 0 };
                list.iter().map(one).collect()
            };
            let observation = Observation {
                read_bytes: calls_mib << 20,
                areas: vec![area(AreaKind::Code), area(AreaKind::File)],
                samples: vec![Sample { areas: areas(&[(0, code_mib), (1, mapped_mib)]), ..Sample::default() }],
                ..Observation::default()
            };
            assert_eq!(FileUse::of(&observation), expected, "{calls_mib} {code_mib} {mapped_mib}");
        };
        check(1, 100, 2, FileUse::Little);
        check(100, 0, 20, FileUse::Calls);
        check(20, 0, 100, FileUse::Mappings);
    }

    #[test]
    fn dense_is_what_is_used_from_end_to_end() {
        let area = |resident_bytes, used_bytes| AreaSample { area: 0, resident_bytes, used_bytes };
        let sample = |epoch, list: &[AreaSample]| Sample { epoch, areas: list.to_vec(), ..Sample::default() };
        // Only the end of an epoch counts.
        let samples = [sample(0, &[area(100, 5)]), sample(0, &[area(100, 90), area(100, 10)])];
        assert_eq!(dense_share(&samples), 0.9);
        assert_eq!(dense_share(&[]), 0.0);
    }
}
