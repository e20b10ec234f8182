//! Libraries that keep what does not fit on a disk, at the same memory limit: what a user of Python has without far memory.

use crate::cgroup::{Cgroup, Hierarchy};
use crate::child::{self, Finished};
use crate::contender::LOCK_WITHIN;
use crate::job::{Job, sample};
use crate::line::Sample;
use crate::swap::{self, unavailable};
use crate::undo::{Ledger, Undo};
use anyhow::{Context, Result, ensure};
use std::process::Command;

/// Means of a library against want of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Means {
    /// A file that NumPy maps.
    Memmap,
    /// The streaming engine of Polars.
    PolarsStreaming,
    /// Temporary files of DuckDB.
    DuckDb,
    /// Data frames of Dask, a part at a time, on the threads of one process.
    Dask,
}

/// Exit code of the script when a library has no memory left.
const OUT_OF_MEMORY: i32 = 3;

impl Means {
    /// Its name in the script.
    fn name(self) -> &'static str {
        match self {
            Means::Memmap => "memmap",
            Means::PolarsStreaming => "polars",
            Means::DuckDb => "duckdb",
            Means::Dask => "dask",
        }
    }
}

/// Runs the script in a cgroup with the near limit, and no swap. What Python and its modules take before anything is loaded comes
/// on top of the limit. Files that the script reads and writes are charged while the kernel keeps them in memory.
pub(crate) fn sample_of(means: Means, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name.starts_with("spill-"), "{} can do nothing but spill-…", means.name());
    swap::ensure_allowed()?;
    swap::ensure_none_active()?;
    let words = [job.arguments, &["--how".into(), means.name().into()]].concat();
    job.workload.ensure_installed(job.program, &words)?;
    let mut own = Command::new(job.program);
    own.args(&words).arg("--own");
    let own = child::run(own, job.scratch, job.patience)?;
    own.success().context("the modules cannot be imported")?;
    let own_bytes = own.ended.resident_peak_bytes;
    let limit_bytes = job.near_bytes + own_bytes;
    let ledger = Ledger::open(job.ledger, LOCK_WITHIN)?;
    let mut undo = Undo::new(&ledger);
    let group = Cgroup::new(&Hierarchy::find()?, limit_bytes, &mut undo)?;
    let mut command = group.command(job.program);
    // What a library counts as its own is less than what it takes.
    command.args(&words).args(["--limit", &(job.near_bytes * 3 / 5).to_string()]);
    let finished = child::run(command, job.scratch, job.patience);
    let (oom_kills, peak) = (group.oom_kills(), group.peak_bytes());
    undo.finish()?;
    let finished = finished?;
    ensure_had_memory(&finished, oom_kills, means)?;
    let mut sample = sample(job, &finished)?;
    sample.figures.insert("own_bytes".into(), own_bytes as f64);
    if let Some(peak) = peak {
        sample.figures.insert("near_peak_bytes".into(), peak as f64);
        sample.figures.insert("near_peak_over_limit".into(), peak as f64 / limit_bytes as f64);
    }
    Ok(sample)
}

fn ensure_had_memory(finished: &Finished, oom_kills: u64, means: Means) -> Result<()> {
    let why = match finished.ended.code {
        OUT_OF_MEMORY => finished.stderr.trim().lines().next().unwrap_or("it said that memory was out").to_owned(),
        _ if oom_kills > 0 && finished.ended.signal == 9 => "the kernel killed it for want of memory".to_owned(),
        _ => return Ok(()),
    };
    Err(unavailable(format!("{} cannot do this at this limit: {why}", means.name()), "raise near_percent"))
}

#[cfg(test)]
mod tests {
    //! Danger: a library that gives up for want of memory is taken for a broken one, or a broken one for that.
    use super::*;
    use crate::swap::Unavailable;
    use crate::sys::Ended;
    use std::time::Duration;

    #[test]
    fn want_of_memory_is_told_from_other_failures() {
        let check = |code: i32, signal: i32, oom_kills: u64, is_want: bool| {
            let (cpu_user, cpu_system) = (Duration::ZERO, Duration::ZERO);
            let ended = Ended { code, signal, cpu_user, cpu_system, resident_peak_bytes: 0 };
            let (stdout, stderr) = (String::new(), "no room\nmore".to_owned());
            let finished = Finished { ended, wall: Duration::ZERO, stdout, stderr };
            let result = ensure_had_memory(&finished, oom_kills, Means::DuckDb);
            assert_eq!(result.is_err_and(|error| error.is::<Unavailable>()), is_want, "{code} {signal} {oom_kills}");
        };
        check(OUT_OF_MEMORY, 0, 0, true);
        check(137, 9, 1, true);
        check(137, 9, 0, false);
        check(1, 0, 1, false);
        check(0, 0, 0, false);
    }
}
