//! Questions about a table in a far heap, asked by the program in Rust and by a script in Python, of the same file.

use crate::child;
use crate::contender::{Far, heap, server_at};
use crate::job::{Job, sample};
use crate::line::Sample;
use crate::swap::unavailable;
use crate::tables::{PYTHON, write_columns};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = include_str!("../workloads/questions.py");
/// The workload.
pub(crate) const NAME: &str = "questions";

/// Asks in Rust.
pub(crate) fn in_rust(far: Far, plane: &str, job: &Job<'_>) -> Result<Sample> {
    with_table(job, |folder| heap(far, plane, &["--columns", &folder.to_string_lossy()], job))
}

/// Asks in Python, by `farfield.Heap`, with the same budget at the same server.
pub(crate) fn in_python(far: Far, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == NAME, "heaps of Python can do nothing but {NAME}");
    let python = PathBuf::from(std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into()));
    fs::create_dir_all(job.scratch)?;
    let script = job.scratch.join("questions.py");
    fs::write(&script, SCRIPT)?;
    let remedy = || format!("install the wheel of `cargo x wheel`, and name the Python that has it in {PYTHON}");
    let missing = |why: String| unavailable(format!("{} has no heaps: {why}", python.display()), remedy());
    let checked = Command::new(&python).arg(&script).arg("--check").output();
    let checked = checked.map_err(|error| missing(error.to_string()))?;
    if !checked.status.success() {
        return Err(missing(String::from_utf8_lossy(&checked.stderr).trim().to_owned()));
    }
    with_table(job, |folder| {
        let server = server_at(far, "server", job)?;
        let mut command = Command::new(&python);
        command.arg(&script).arg(folder.join("trips.csv")).arg(&server.url);
        command.args([job.near_bytes, far_bytes(job)].map(|bytes| bytes.to_string()));
        let finished = child::run(command, job.scratch, job.patience)?;
        let mut sample = sample(job, &finished).context("in a heap of Python")?;
        sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
        Ok(sample)
    })
}

/// Returns how much may be far: a sort writes its columns several times. Servers have room for the data three times over.
fn far_bytes(job: &Job<'_>) -> u64 {
    job.data_bytes / 4 * 11
}

/// Has the program make the table, which is removed afterwards.
fn with_table(job: &Job<'_>, work: impl FnOnce(&Path) -> Result<Sample>) -> Result<Sample> {
    let folder = job.scratch.join("columns");
    write_columns(&folder, job)?;
    let sample = work(&folder);
    fs::remove_dir_all(&folder)?;
    sample
}
