//! What the machine can do at best, measured in the same run as what we hold against it.

use crate::child;
use crate::workload::{Output, Workload};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Probes, as parameter files name them. All in ns per page.
pub(crate) const NAMES: &[&str] = &["signal_fault", "zero_fill", "memory_read", "memory_copy", "page_copy"];

const PATIENCE: Duration = Duration::from_secs(60);

/// A limit is the best of so many tries: what else runs on the machine can only make it worse.
const TRIES: u32 = 3;

/// Measures the limits called `names`; one that this machine does not have is left out.
pub(crate) fn measure(names: &[String], scratch: &Path) -> Result<BTreeMap<String, f64>> {
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let (program, _) = Workload::named("probe")?.make(scratch)?;
    let mut best: BTreeMap<String, f64> = BTreeMap::new();
    for _ in 0..TRIES {
        let finished = child::run(Command::new(&program), scratch, PATIENCE).context("probe")?;
        let output = Output::parse(finished.success().context("probe")?)?;
        for phase in output.phases.iter().filter(|phase| names.contains(&phase.name)) {
            let known = best.entry(phase.name.clone()).or_insert(f64::INFINITY);
            *known = known.min(phase.ns_per_op());
        }
    }
    Ok(best)
}
