//! What a workload says in the end.

use farfield_bench::workload::{Output, Phase};
use farfield_os::process::{self, ResourceUsage};
use std::collections::BTreeMap;

/// Times, checks and figures of one run.
pub(crate) struct Outcome(Output);

impl Outcome {
    pub(crate) fn new() -> Outcome {
        Outcome(Output {
            phases: Vec::new(),
            checksum: String::new(),
            verified: true,
            errors: 0,
            figures: BTreeMap::new(),
        })
    }

    /// Times `ops` operations; adds them to what the phase has already, if it is the last one.
    pub(crate) fn phase<R>(&mut self, name: &str, ops: u64, work: impl FnOnce() -> R) -> R {
        let (started, before) = (process::now_ns(), process::usage());
        let result = work();
        let (ended, after) = (process::now_ns(), process::usage());
        let count = |of: fn(&ResourceUsage) -> u64| of(&after) - of(&before);
        self.add(Phase {
            name: name.into(),
            ops,
            seconds: (ended - started) as f64 / 1e9,
            cpu_seconds: count(|usage| usage.cpu_ns) as f64 / 1e9,
            faults_major: count(|usage| usage.faults_major),
            faults_minor: count(|usage| usage.faults_minor),
        });
        result
    }

    fn add(&mut self, more: Phase) {
        match self.0.phases.last_mut().filter(|phase| phase.name == more.name) {
            None => self.0.phases.push(more),
            Some(phase) => {
                phase.ops += more.ops;
                phase.seconds += more.seconds;
                phase.cpu_seconds += more.cpu_seconds;
                phase.faults_major += more.faults_major;
                phase.faults_minor += more.faults_minor;
            }
        }
    }

    /// A phase that the workload timed itself.
    pub(crate) fn timed(&mut self, name: &str, ops: u64, ns: u64) {
        let (seconds, cpu_seconds) = (ns as f64 / 1e9, 0.0);
        self.0.phases.push(Phase { name: name.into(), ops, seconds, cpu_seconds, faults_major: 0, faults_minor: 0 });
    }

    /// A phase that is all of these.
    pub(crate) fn all(&mut self, name: &str, phases: &[&str]) {
        let parts: Vec<Phase> = self.0.phases.iter().filter(|phase| phases.contains(&&*phase.name)).cloned().collect();
        parts.into_iter().for_each(|part| self.add(Phase { name: name.into(), ..part }));
    }

    /// Operations in a second of a phase.
    pub(crate) fn per_second(&self, name: &str) -> f64 {
        let phase = self.0.phases.iter().find(|phase| phase.name == name);
        phase.map_or(0.0, |phase| phase.ops as f64 / phase.seconds)
    }

    /// What was read, in a number, and how many reads brought wrong data.
    pub(crate) fn checked(&mut self, checksum: u64, errors: u64) {
        self.0.checksum = format!("{checksum:016x}");
        self.0.errors = errors;
        self.0.verified = errors == 0;
    }

    pub(crate) fn figure(&mut self, name: &str, value: f64) {
        self.0.figures.insert(name.into(), value);
    }

    pub(crate) fn is_right(&self) -> bool {
        self.0.verified
    }

    pub(crate) fn line(&self) -> String {
        serde_json::to_string(&self.0).expect("numbers and names")
    }
}
