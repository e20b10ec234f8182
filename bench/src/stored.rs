//! Pages that others keep compressed, or compress: zram and lz4's own benchmark, beside a lane to `lz:` with the same pages.

use crate::child;
use crate::contender::LOCK_WITHIN;
use crate::job::{Job, sample};
use crate::line::Sample;
use crate::swap::{self, ZramDevice, unavailable};
use crate::undo::{Ledger, Undo};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

const PAGE_BYTES: f64 = 4096.0;

/// Writes the pages to a zram device and looks what that takes for them.
pub(crate) fn zram(job: &Job<'_>) -> Result<Sample> {
    swap::ensure_allowed()?;
    let ledger = Ledger::open(job.ledger, LOCK_WITHIN)?;
    let mut undo = Undo::new(&ledger);
    let device = ZramDevice::new(job.data_bytes, &mut undo)?;
    let written = dump(&device.path(), job);
    let stored = device.stored_bytes();
    undo.finish()?;
    let mut sample = written?;
    let stored = stored.context("zram does not say what it stores")?;
    sample.figures.insert("stored_bytes_per_page".into(), stored as f64 * PAGE_BYTES / job.data_bytes as f64);
    Ok(sample)
}

/// Has lz4 measure itself on the pages, a block each: unpacking, or packing where the point writes.
pub(crate) fn lz4(job: &Job<'_>) -> Result<Sample> {
    let file = job.scratch.join("pages.data");
    let mut sample = dump(&file, job)?;
    let mut command = Command::new("lz4");
    command.args(["-b1", "-B4096"]).arg(&file);
    let finished = child::run(command, job.scratch, job.patience);
    fs::remove_file(&file).ok();
    let finished = match finished {
        Err(error) if child::is_absent(&error) => return Err(unavailable("lz4 is not installed", "install lz4")),
        finished => finished?,
    };
    finished.success().context("of lz4")?;
    let (packs, unpacks) = speeds(&finished.stderr).context("lz4 says nothing of its speed")?;
    let at = job.arguments.iter().position(|argument| argument == "--write-percent").map(|at| at + 1);
    let is_write = at.and_then(|at| job.arguments.get(at)).is_some_and(|percent| percent != "0");
    sample.ns_per_op = PAGE_BYTES * 1e3 / if is_write { packs } else { unpacks };
    Ok(sample)
}

/// Runs the program, which writes its pages there.
fn dump(path: &Path, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "pages", "the workload {} has no pages to keep", job.workload.name);
    let mut command = Command::new(job.program);
    command.args(job.arguments).arg("--dump").arg(path);
    let mut sample = sample(job, &child::run(command, job.scratch, job.patience)?)?;
    // Nothing was read.
    sample.checksum = String::new();
    Ok(sample)
}

/// Returns the speeds of packing and unpacking in MB/s, the last that are said together.
fn speeds(text: &str) -> Option<(f64, f64)> {
    let of_line = |line: &str| {
        let mut speeds = line.split("MB/s").map(|part| part.rsplit([' ', ',']).find(|word| !word.is_empty()));
        let mut next = || speeds.next()??.parse::<f64>().ok().filter(|speed| *speed > 0.0);
        Some((next()?, next()?))
    };
    text.split(['\r', '\n']).filter_map(of_line).next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_pair_of_speeds_counts() {
        let text = "using blocks of size 4 KB \n\r |-f 3 :  16 ->\r =-f 3 :  16 ->  8 (1.923), 200.3 MB/s , 786.2 MB/s\r \
                    |-f 3 :  16 ->  8 (1.923), 307.5 MB/s ,1088.9 MB/s\r =-f 3 :  16 ->  8 (1.923), 310.5 MB/s\r 1#\n";
        assert_eq!(speeds(text), Some((307.5, 1088.9)));
        assert_eq!(speeds("lz4: f: No such file"), None);
    }
}
