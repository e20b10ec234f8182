//! What a program does with its memory, as `farfield profile` writes it and `farfield advise` reads it.
//!
//! [`Profile`] is the file: what was seen of the program while it ran as it always does ([`Observation`]), how it fared with
//! less near memory ([`FarRun`]), and what follows ([`Findings`], computed by [`analyse`]). The idea, and what the words
//! mean, is DMSwitcher's analyser; `docs/design/profile.md` says where we had to choose.

mod heat;
mod labels;
mod segments;
mod stages;
mod working_set;

pub use heat::{Heat, Row, SLICES_MAX};
pub use labels::{AnonymousUse, FileUse};
pub use segments::{Level, Segment, SegmentKind, offloadable_bytes};
pub use stages::{Stage, StageKind, WINDOW_MS};
pub use working_set::{MissRate, WorkingSet};

use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Version of the file. A reader refuses others.
pub const VERSION: u32 = 1;

/// A profile file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What was seen of it without far memory.
    pub observation: Observation,
    /// How it fared with far memory; empty if that was not asked for.
    #[serde(default)]
    pub far_runs: Vec<FarRun>,
    /// What follows from the observation.
    pub findings: Findings,
}

/// The program as it always runs, seen from outside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// From its start to its end.
    pub wall_ms: u64,
    /// Wall time of a run that nobody looked at; 0 if there was none.
    #[serde(default)]
    pub undisturbed_ms: u64,
    /// Processor time of all its processes.
    pub cpu_ms: u64,
    /// Processors of the machine.
    pub processors: u32,
    /// Processes seen.
    pub processes: u32,
    /// Most threads alive at once.
    pub threads_max: u32,
    /// Bytes that `read` and its kin moved.
    pub read_bytes: u64,
    /// Bytes that `write` and its kin moved.
    pub written_bytes: u64,
    /// What looking cost the program.
    pub cost: Cost,
    /// Mappings that ever had 1 MiB or more in memory.
    pub areas: Vec<Area>,
    /// In order of time.
    pub samples: Vec<Sample>,
}

impl Observation {
    /// Most anonymous memory at once.
    pub fn anonymous_peak_bytes(&self) -> u64 {
        self.samples.iter().map(|sample| sample.anonymous_bytes).max().unwrap_or(0)
    }

    /// How many threads work at once in the mean, at least one.
    pub fn parallelism(&self) -> f64 {
        (self.cpu_ms as f64 / self.wall_ms.max(1) as f64).max(1.0)
    }

    /// How long the program takes when left alone.
    pub fn native_ms(&self) -> u64 {
        if self.undisturbed_ms > 0 { self.undisturbed_ms } else { self.wall_ms }
    }
}

/// What looking cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// What the first use of a page costs after its accessed bit was cleared, measured on this machine.
    pub first_use_ns: u64,
    /// Processor time that the sampler used, not the program's.
    pub sampler_ms: u64,
    /// Pages whose bit was cleared and came back.
    pub first_uses: u64,
    /// The program's time that went there by these figures, of its processor time.
    pub share: f64,
}

/// One mapping of one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Area {
    /// Process id.
    pub process: u32,
    /// First byte.
    pub start: u64,
    /// First byte behind its largest extent.
    pub end: u64,
    /// What lies behind it.
    pub kind: AreaKind,
    /// `[heap]`, `[stack]`, a path; empty for a plain mapping.
    pub name: String,
}

/// What a mapping is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AreaKind {
    /// Memory of the program: what can be far.
    Anonymous,
    /// A file that holds code.
    Code,
    /// Another file.
    File,
}

/// One look.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Since the start of the program.
    pub at_ms: u64,
    /// How often accessed bits had been cleared before: samples of one epoch count up from the same moment.
    pub epoch: u32,
    /// Since they were cleared.
    pub since_ms: u64,
    /// Anonymous memory that is resident.
    pub anonymous_bytes: u64,
    /// Of files, the same.
    pub file_bytes: u64,
    /// Anonymous memory used since the bits were cleared.
    pub anonymous_used_bytes: u64,
    /// Of files, the same.
    pub file_used_bytes: u64,
    /// Anonymous memory in huge pages.
    pub huge_bytes: u64,
    /// Page faults that the kernel has served since the start.
    pub faults: u64,
    /// Processor time since the start.
    pub cpu_ms: u64,
    /// Threads alive.
    pub threads: u32,
    /// By area.
    pub areas: Vec<AreaSample>,
}

/// One area in one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaSample {
    /// Index in [`Observation::areas`].
    pub area: u32,
    /// Resident bytes.
    pub resident_bytes: u64,
    /// Bytes used since the bits were cleared.
    pub used_bytes: u64,
}

/// One run with far memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FarRun {
    /// Pool URL; empty for a private server.
    pub url: String,
    /// What one page took to be read there just before, if it was measured.
    pub read_ns: Option<u64>,
    /// The near budget.
    pub near_bytes: u64,
    /// The budget as a share of the peak of anonymous memory.
    pub near_share: f64,
    /// From the start of the program to its end.
    pub wall_ms: u64,
    /// By the native time.
    pub slowdown: f64,
    /// Page faults that were served.
    pub faults: u64,
    /// Of these, the ones that waited for far memory.
    pub demand_reads: u64,
    /// Pages that came near, demand and prefetch.
    pub pages_in: u64,
    /// Pages written to far memory.
    pub pages_out: u64,
    /// Median of the time of a fault; none without faults.
    pub fault_ns_p50: Option<u64>,
    /// It was ended, for it was too slow by far: all figures are the least that they can be.
    #[serde(default)]
    pub is_cut: bool,
}

/// What follows from an observation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    /// Most anonymous memory at once.
    pub anonymous_peak_bytes: u64,
    /// Most of files at once.
    pub file_peak_bytes: u64,
    /// How much of what is resident is anonymous, over time.
    pub anonymous_share: f64,
    /// In words.
    pub anonymous_use: AnonymousUse,
    /// Calls or mappings.
    pub file_use: FileUse,
    /// Anonymous memory used within the shortest time that was looked at: to be near. 0 if it is not known.
    pub hot_bytes: u64,
    /// How long that time was.
    pub hot_within_ms: u64,
    /// Of what is used, how much lies in mappings used from end to end: huge pages would carry little that is not.
    pub dense_share: f64,
    /// Threads that work at once, in the mean.
    pub parallelism: f64,
    /// Preparation and execution.
    pub stages: Vec<Stage>,
    /// Data segments, the largest first.
    pub segments: Vec<Segment>,
    /// What could be far by the kinds of the segments.
    pub offloadable_bytes: u64,
    /// Use of each area over time.
    pub heat: Heat,
}

impl Findings {
    /// Would huge pages carry little that is not used? So they do where mappings used from end to end have nine tenths of what is used.
    pub fn is_dense(&self) -> bool {
        self.dense_share >= 0.9
    }
}

/// What an observation says.
pub fn analyse(observation: &Observation) -> Findings {
    let samples = &observation.samples;
    let (hot_bytes, hot_within_ms) = WorkingSet::of(observation).hot();
    let heat = Heat::of(observation);
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
        offloadable_bytes: offloadable_bytes(&segments, Level::High),
        segments,
        heat,
    }
}

/// The last sample of each epoch: everything that was used in it.
fn epoch_ends(samples: &[Sample]) -> impl Iterator<Item = &Sample> {
    let ends = |index: usize| samples.get(index + 1).is_none_or(|next| next.epoch != samples[index].epoch);
    samples.iter().enumerate().filter(move |(index, _)| ends(*index)).map(|(_, sample)| sample)
}
