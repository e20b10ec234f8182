//! What a workload says in the end.

use farfield_bench::workload::{Output, Phase};
use farfield_os::process::{self, ResourceUsage};
use std::collections::BTreeMap;
use std::time::Instant;

/// Times, checks and figures of one run.
pub(crate) struct Outcome {
    output: Output,
    /// Beginning of the first phase that fills nothing, and end of the last one.
    used: Option<(Instant, Instant)>,
}

/// Phase in which a workload makes its data.
const FILL: &str = "fill";

impl Outcome {
    pub(crate) fn new() -> Outcome {
        let output =
            Output { phases: Vec::new(), checksum: String::new(), verified: true, errors: 0, figures: BTreeMap::new() };
        Outcome { output, used: None }
    }

    /// Times `ops` operations; adds them to what the phase has already, if it is the last one.
    pub(crate) fn phase<R>(&mut self, name: &str, ops: u64, work: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let (started, before) = (process::now_ns(), process::usage());
        let result = work();
        let (ended, after) = (process::now_ns(), process::usage());
        if name != FILL {
            self.used = Some((self.used.map_or(begun, |used| used.0), Instant::now()));
        }
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
        match self.output.phases.last_mut().filter(|phase| phase.name == more.name) {
            None => self.output.phases.push(more),
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
        self.output.phases.push(Phase {
            name: name.into(),
            ops,
            seconds,
            cpu_seconds,
            faults_major: 0,
            faults_minor: 0,
        });
    }

    /// Returns the operations of a phase.
    pub(crate) fn ops(&self, name: &str) -> u64 {
        self.output.phases.iter().filter(|phase| phase.name == name).map(|phase| phase.ops).sum()
    }

    /// Returns the time of a phase.
    pub(crate) fn seconds(&self, name: &str) -> f64 {
        self.output.phases.iter().filter(|phase| phase.name == name).map(|phase| phase.seconds).sum()
    }

    /// Gives a phase another time, which was simulated.
    pub(crate) fn retime(&mut self, name: &str, ns: u64) {
        for phase in self.output.phases.iter_mut().filter(|phase| phase.name == name) {
            (phase.seconds, phase.cpu_seconds) = (ns as f64 / 1e9, 0.0);
        }
    }

    /// A phase that is all of these.
    pub(crate) fn all(&mut self, name: &str, phases: &[&str]) {
        let parts: Vec<Phase> =
            self.output.phases.iter().filter(|phase| phases.contains(&&*phase.name)).cloned().collect();
        parts.into_iter().for_each(|part| self.add(Phase { name: name.into(), ..part }));
    }

    /// Operations in a second of a phase.
    pub(crate) fn per_second(&self, name: &str) -> f64 {
        let phase = self.output.phases.iter().find(|phase| phase.name == name);
        phase.map_or(0.0, |phase| phase.ops as f64 / phase.seconds)
    }

    /// What was read, in a number, and how many reads brought wrong data.
    pub(crate) fn checked(&mut self, checksum: u64, errors: u64) {
        self.output.checksum = format!("{checksum:016x}");
        self.output.errors = errors;
        self.output.verified = errors == 0;
    }

    /// Returns when the phases began that use what was filled in, and when they ended.
    pub(crate) fn used(&self) -> Option<(Instant, Instant)> {
        self.used
    }

    pub(crate) fn figure(&mut self, name: &str, value: f64) {
        self.output.figures.insert(name.into(), value);
    }

    pub(crate) fn is_right(&self) -> bool {
        self.output.verified
    }

    pub(crate) fn line(&self) -> String {
        serde_json::to_string(&self.output).expect("numbers and names")
    }
}
