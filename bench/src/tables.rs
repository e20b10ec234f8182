//! Libraries for tables, instead of the program: what a user of Python would take, at the same limit under Linux swap.

use crate::child;
use crate::contender::{Store, swapped};
use crate::job::Job;
use crate::line::Sample;
use crate::swap::unavailable;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A module of Python.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Library {
    Pandas,
    Polars,
}

/// The environment variable that names the Python with these modules.
pub(crate) const PYTHON: &str = "FARFIELD_PYTHON";
const SCRIPT: &str = include_str!("../workloads/trips.py");

impl Library {
    fn module(self) -> &'static str {
        match self {
            Library::Pandas => "pandas",
            Library::Polars => "polars",
        }
    }
}

/// The same questions about the same columns. What Python and the module take before anything is loaded comes on top of the limit.
pub(crate) fn sample(library: Library, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "trips", "{} can do nothing but trips", library.module());
    let python = PathBuf::from(std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into()));
    fs::create_dir_all(job.scratch)?;
    let script = job.scratch.join("trips.py");
    fs::write(&script, SCRIPT)?;
    let mut words = vec![script.to_string_lossy().into_owned(), library.module().into()];
    let own_bytes = resident(&python, &words, library, job.scratch, job.patience)?;
    let columns = job.scratch.join("columns");
    write_columns(&columns, job)?;
    words.push(columns.to_string_lossy().into_owned());
    let with_library = Job { program: &python, arguments: &words, ..*job };
    let sample = swapped(Store::Zram, job.near_bytes + own_bytes, job.data_bytes, &with_library);
    fs::remove_dir_all(&columns)?;
    let mut sample = sample?;
    sample.figures.insert("own_bytes".into(), own_bytes as f64);
    Ok(sample)
}

/// What the module takes for itself.
fn resident(python: &Path, words: &[String], library: Library, scratch: &Path, patience: Duration) -> Result<u64> {
    let mut command = Command::new(python);
    command.args(words);
    let missing = |why: String| {
        let remedy = format!("pip install numpy pandas polars, or name a Python that has them in {PYTHON}");
        unavailable(format!("{} has no {}: {why}", python.display(), library.module()), remedy)
    };
    let finished = child::run(command, scratch, patience).map_err(|error| missing(format!("{error:#}")))?;
    finished.success().map_err(|error| missing(format!("{error:#}")))?;
    Ok(finished.ended.resident_peak_bytes)
}

/// Has the program make the columns and the answers, or what else it leaves for others.
pub(crate) fn write_columns(folder: &Path, job: &Job<'_>) -> Result<()> {
    fs::create_dir_all(folder)?;
    let mut command = Command::new(job.program);
    command.args(job.arguments).arg("--columns").arg(folder);
    let finished = child::run(command, job.scratch, job.patience)?;
    finished.success().context("the columns cannot be written")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Danger: a comparison that fails where nobody can have what it compares with.
    use super::*;
    use crate::swap::Unavailable;

    #[test]
    fn a_missing_python_module_is_reported_with_advice() {
        let scratch = std::env::temp_dir().join(format!("farfield-bench-tables-{}", std::process::id()));
        fs::create_dir_all(&scratch).unwrap();
        for python in ["/bin/false", "/nothing/python3"] {
            let error = resident(Path::new(python), &[], Library::Polars, &scratch, Duration::from_secs(60));
            let error = error.unwrap_err();
            let Some(Unavailable { why, remedy }) = error.downcast_ref() else { panic!("{error:#}") };
            assert!(why.contains(python) && why.contains("polars") && remedy.contains("pip install"), "{error:#}");
        }
        fs::remove_dir_all(&scratch).unwrap();
    }
}
