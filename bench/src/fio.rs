//! fio on a file of the scratch folder: what the disk gives to a program that is made for nothing else.

use crate::child;
use crate::job::Job;
use crate::line::Sample;
use crate::swap::unavailable;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

/// Order in which fio reads or writes blocks of its file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    Random,
    Sequential,
}

impl Order {
    /// Returns fio's name for reads or writes in this order.
    fn kind(self, is_write: bool) -> &'static str {
        match (self, is_write) {
            (Order::Random, false) => "randread",
            (Order::Random, true) => "randwrite",
            (Order::Sequential, false) => "read",
            (Order::Sequential, true) => "write",
        }
    }
}

/// The same operations as the workload `pages`, with io_uring, past the page cache, buffers and files registered.
pub(crate) fn sample(order: Order, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "pages", "the workload {} is none of fio's", job.workload.name);
    let number = |option: &str| -> Result<u64> {
        let at = job.arguments.iter().position(|argument| argument == option).map(|at| at + 1);
        let text = at.and_then(|at| job.arguments.get(at)).with_context(|| format!("{option} is missing"))?;
        text.parse().with_context(|| format!("{option} {text}"))
    };
    let (block, depth, ops) = (number("--object-bytes")?, number("--in-flight")?, number("--ops")?);
    let is_write = number("--write-percent")? > 0;
    let kind = order.kind(is_write);
    let file = job.scratch.join("fio.data");
    let mut command = Command::new("fio");
    command.args(["--name=pages", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1"]);
    command.args(["--randrepeat=1", "--norandommap=1", "--overwrite=1", "--output-format=json"]);
    command.arg(format!("--filename={}", file.display())).arg(format!("--rw={kind}"));
    command.args([format!("--bs={block}"), format!("--iodepth={depth}"), format!("--size={}", job.data_bytes)]);
    command.args([format!("--io_size={}", ops * block), format!("--randseed={}", number("--seed")?)]);
    let finished = match child::run(command, job.scratch, job.patience) {
        Err(error) if child::is_absent(&error) => return Err(unavailable("fio is not installed", "install fio")),
        finished => finished?,
    };
    std::fs::remove_file(&file).ok();
    let text = finished.success().context("of fio")?;
    // Notes may stand before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).context("fio's answer is not JSON")?;
    let side = format!("/jobs/0/{}", if is_write { "write" } else { "read" });
    let figure = |name: &str| report.pointer(&format!("{side}/{name}")).and_then(Value::as_f64);
    let iops = figure("iops").filter(|iops| *iops > 0.0).context("fio did nothing")?;
    let figures = [("fault_ns_p50", "clat_ns/percentile/50.000000"), ("fault_ns_p99", "clat_ns/percentile/99.000000")];
    let figures = figures.into_iter().filter_map(|(name, from)| Some((name.to_string(), figure(from)?)));
    let figures: BTreeMap<String, f64> = figures.collect();
    // It does not say what it read.
    Ok(Sample { ns_per_op: 1e9 / iops, ops, checksum: String::new(), phases: Vec::new(), figures })
}
