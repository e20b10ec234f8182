//! Profile of a program's use of memory, as `farfield profile` writes it and `farfield advise`
//! reads it.
//!
//! [`Profile`] is the file: what was seen of the program while it ran as it always does
//! ([`Observation`]), how it fared with less near memory ([`FarRun`]), and what follows
//! ([`Findings`], computed by [`analyse`]). The idea, and the meaning of the words, is that of
//! DMSwitcher's analyser; `docs/design/profile.md` says where we had to choose.

mod heat;
mod labels;
mod segments;
mod stages;
mod working_set;

pub use heat::{HeatMap, HeatMapRow, SLICES_MAX};
pub use labels::{AnonymousUse, FileUse};
pub use segments::{DataSegment, SegmentKind, UsageLevel, offloadable_bytes};
pub use stages::{RunStage, StageKind, WINDOW_MS};
pub use working_set::{MissRate, WorkingSet};

use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Version of the file. A reader refuses others.
pub const VERSION: u32 = 1;

/// A profile file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Version of the file: [`VERSION`].
    pub version: u32,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Observation of the program without far memory.
    pub observation: Observation,
    /// Runs with far memory; empty if none was asked for.
    #[serde(default)]
    pub far_runs: Vec<FarRun>,
    /// Findings that follow from the observation.
    pub findings: Findings,
}

/// Observation from outside of the program as it always runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Wall time from the start of the program to its end.
    pub wall_ms: u64,
    /// Wall time of a run without sampling; 0 if there was none.
    #[serde(default)]
    pub undisturbed_ms: u64,
    /// Processor time of all its processes.
    pub cpu_ms: u64,
    /// Processors of the machine.
    pub processors: u32,
    /// Processes seen.
    pub processes: u32,
    /// Greatest number of threads alive at once.
    pub threads_max: u32,
    /// Bytes that `read` and similar calls moved.
    pub read_bytes: u64,
    /// Bytes that `write` and similar calls moved.
    pub written_bytes: u64,
    /// Cost of the sampling to the program.
    pub cost: Cost,
    /// Mappings that ever had 1 MiB or more in memory.
    pub areas: Vec<Area>,
    /// Samples in order of time.
    pub samples: Vec<Sample>,
}

impl Observation {
    /// Returns the most anonymous memory at once.
    pub fn anonymous_peak_bytes(&self) -> u64 {
        self.samples.iter().map(|sample| sample.anonymous_bytes).max().unwrap_or(0)
    }

    /// Returns the mean number of threads that work at once, at least one.
    pub fn parallelism(&self) -> f64 {
        (self.cpu_ms as f64 / self.wall_ms.max(1) as f64).max(1.0)
    }

    /// Returns the time that the program takes when left alone, in milliseconds.
    pub fn native_ms(&self) -> u64 {
        if self.undisturbed_ms > 0 { self.undisturbed_ms } else { self.wall_ms }
    }
}

/// Cost of the sampling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Cost of the first use of a page after its accessed bit was cleared, measured on this
    /// machine.
    pub first_use_ns: u64,
    /// Processor time that the sampler used, not counted as the program's.
    pub sampler_ms: u64,
    /// Number of pages whose bit was cleared and set again.
    pub first_uses: u64,
    /// Share of the program's processor time that went there, by these figures.
    pub share: f64,
}

/// A mapping of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Area {
    /// Process id.
    pub process: u32,
    /// Address of the first byte.
    pub start: u64,
    /// Address of the first byte behind the largest extent of the mapping.
    pub end: u64,
    /// Kind of memory behind the mapping.
    pub kind: AreaKind,
    /// `[heap]`, `[stack]`, a path; empty for a plain mapping.
    pub name: String,
}

/// Kind of memory that a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AreaKind {
    /// Memory of the program, which can be far.
    Anonymous,
    /// A file that holds code.
    Code,
    /// A file without code.
    File,
}

/// Result of one look at the program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since the start of the program.
    pub at_ms: u64,
    /// Number of times that accessed bits had been cleared before. Samples of one epoch count up
    /// from the same moment.
    pub epoch: u32,
    /// Time since the accessed bits were cleared.
    pub since_ms: u64,
    /// Resident anonymous memory.
    pub anonymous_bytes: u64,
    /// Resident memory of files.
    pub file_bytes: u64,
    /// Anonymous memory used since the bits were cleared.
    pub anonymous_used_bytes: u64,
    /// Memory of files used since the bits were cleared.
    pub file_used_bytes: u64,
    /// Anonymous memory in huge pages.
    pub huge_bytes: u64,
    /// Number of page faults that the kernel has served since the start.
    pub faults: u64,
    /// Processor time since the start.
    pub cpu_ms: u64,
    /// Threads alive.
    pub threads: u32,
    /// Use of each area.
    pub areas: Vec<AreaSample>,
}

/// Use of one area in one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaSample {
    /// Index in [`Observation::areas`].
    pub area: u32,
    /// Resident bytes.
    pub resident_bytes: u64,
    /// Bytes used since the bits were cleared.
    pub used_bytes: u64,
}

/// Result of one run with far memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FarRun {
    /// Pool URL; empty for a private server.
    pub url: String,
    /// Time to read one page at this place just before the run, if it was measured.
    pub read_ns: Option<u64>,
    /// The near budget.
    pub near_bytes: u64,
    /// The budget as a share of the peak of anonymous memory.
    pub near_share: f64,
    /// Wall time from the start of the program to its end.
    pub wall_ms: u64,
    /// Wall time as a multiple of the native time.
    pub slowdown: f64,
    /// Page faults that were served.
    pub faults: u64,
    /// Page faults that waited for far memory.
    pub demand_reads: u64,
    /// Pages that came near, demand and prefetch.
    pub pages_in: u64,
    /// Pages written to far memory.
    pub pages_out: u64,
    /// Median time of a fault; `None` without faults.
    pub fault_ns_p50: Option<u64>,
    /// Whether the run was ended early because it was much too slow: all figures are lower bounds.
    #[serde(default)]
    pub is_cut: bool,
}

/// Conclusions from an observation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// Most anonymous memory at once.
    pub anonymous_peak_bytes: u64,
    /// Most resident memory of files at once.
    pub file_peak_bytes: u64,
    /// Anonymous share of the resident memory, over time.
    pub anonymous_share: f64,
    /// Label of that share.
    pub anonymous_use: AnonymousUse,
    /// Means by which the program accesses its files: calls or mappings.
    pub file_use: FileUse,
    /// Anonymous memory used within the shortest time that was sampled, which should be near. 0 if
    /// it is not known.
    pub hot_bytes: u64,
    /// Length of that time, in milliseconds.
    pub hot_within_ms: u64,
    /// Part of the used memory that lies in mappings used from end to end: huge pages would carry
    /// little that is not used.
    pub dense_share: f64,
    /// Mean number of threads that work at once.
    pub parallelism: f64,
    /// Stages of preparation and execution.
    pub stages: Vec<RunStage>,
    /// Data segments, the largest first.
    pub segments: Vec<DataSegment>,
    /// Bytes that could be far, by the kinds of the segments.
    pub offloadable_bytes: u64,
    /// Use of each area over time.
    pub heat: HeatMap,
}

impl Findings {
    /// Checks whether huge pages would carry little that is not used. So it is where mappings used
    /// from end to end have nine tenths of what is used.
    pub fn is_dense(&self) -> bool {
        self.dense_share >= 0.9
    }
}

/// Computes the findings of an observation.
pub fn analyse(observation: &Observation) -> Findings {
    let samples = &observation.samples;
    let (hot_bytes, hot_within_ms) = WorkingSet::of(observation).hot();
    let heat = HeatMap::of(observation);
    let segments = segments::find(&heat);
    let anonymous_share = labels::anonymous_share(samples);
    Findings {
        anonymous_peak_bytes: observation.anonymous_peak_bytes(),
        file_peak_bytes: samples.iter().map(|sample| sample.file_bytes).max().unwrap_or(0),
        anonymous_share,
        anonymous_use: AnonymousUse::of(anonymous_share),
        file_use: FileUse::of(observation),
        hot_bytes,
        hot_within_ms,
        dense_share: labels::dense_share(samples),
        parallelism: observation.parallelism(),
        stages: stages::find(samples),
        offloadable_bytes: offloadable_bytes(&segments, UsageLevel::High),
        segments,
        heat,
    }
}

/// Iterates over the last sample of each epoch, which counts everything that was used in it.
fn epoch_ends(samples: &[Sample]) -> impl Iterator<Item = &Sample> {
    let ends = |index: usize| samples.get(index + 1).is_none_or(|next| next.epoch != samples[index].epoch);
    samples.iter().enumerate().filter(move |(index, _)| ends(*index)).map(|(_, sample)| sample)
}
