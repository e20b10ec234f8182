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

/// Measures the limits called `names`; one that this machine does not have is left out.
pub(crate) fn measure(names: &[String], scratch: &Path) -> Result<BTreeMap<String, f64>> {
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let program = Workload::named("probe")?.compile(scratch)?;
    let finished = child::run(Command::new(program), scratch, PATIENCE).context("probe")?;
    let output = Output::parse(finished.success().context("probe")?)?;
    let wanted = output.phases.iter().filter(|phase| names.contains(&phase.name));
    Ok(wanted.map(|phase| (phase.name.clone(), phase.ns_per_op())).collect())
}
