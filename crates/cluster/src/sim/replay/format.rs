//! Formats of recorded traces.
//!
//! - `alibaba`: pods of Alibaba's GPU cluster (Weng and others, USENIX ATC 2023): one line for each,
//!   with cores and memory that it asked for, and when it was created, started and deleted. What
//!   pods used was not recorded. Containers of another trace of Alibaba can stand for it.
//! - `bitbrains`: virtual machines of Bitbrains (Shen and others, CCGrid 2015; GWA-T-12): a table for
//!   each, with a line for every five minutes: cores and memory provisioned, memory used.

use super::super::trace::TraceColumn;
use super::read::Lines;
use super::usage::UsageSeries;
use super::{ReplayError, SkippedJobs, TraceJob};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// Format of a recorded trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceFormat {
    /// Pods of Alibaba's cluster, one line each.
    Alibaba,
    /// Virtual machines of Bitbrains, one table each.
    Bitbrains,
}

/// No format of traces has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no format of traces is called {0:?}; write alibaba or bitbrains")]
pub struct TraceFormatError(String);

impl FromStr for TraceFormat {
    type Err = TraceFormatError;

    fn from_str(name: &str) -> Result<TraceFormat, TraceFormatError> {
        match name {
            "alibaba" => Ok(TraceFormat::Alibaba),
            "bitbrains" => Ok(TraceFormat::Bitbrains),
            _ => Err(TraceFormatError(name.to_owned())),
        }
    }
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TraceFormat::Alibaba => "alibaba",
            TraceFormat::Bitbrains => "bitbrains",
        })
    }
}

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;
/// Most memory of a job, in bytes: what a cluster can count.
const BYTES_MAX: f64 = (1u64 << 52) as f64;
const CORES_MAX: f64 = 1e6;
/// Latest time, in seconds.
const TIME_MAX: f64 = 1e12;
/// Times from here on are milliseconds: as seconds they would be in the year 5138.
const MILLISECONDS_FROM: f64 = 1e11;
/// Distance of two samples of a virtual machine, and of a container.
const MACHINE_SAMPLE_S: f64 = 300.0;
const CONTAINER_SAMPLE_S: f64 = 60.0;
/// Most different containers.
const CONTAINERS_MAX: usize = 100_000;

/// Line of a table as cells.
struct Cells<'a>(Vec<&'a str>);

impl<'a> Cells<'a> {
    fn of(line: &'a str, separator: char) -> Cells<'a> {
        Cells(line.split(separator).map(str::trim).collect())
    }

    /// Returns the number of a column, which is from 0 to `most`.
    fn number(&self, column: TraceColumn, most: f64) -> Result<f64, String> {
        let number = column.number(&self.0)?;
        if number <= most { Ok(number) } else { Err(format!("{number} is more than {most}, which no cluster has")) }
    }
}

impl Cells<'_> {
    /// Returns the number of a column if it is from 0 to 1.
    fn part(&self, column: TraceColumn) -> Result<Option<f64>, String> {
        let cell = column.cell(&self.0);
        let number = cell.parse::<f64>().ok().filter(|number| number.is_finite());
        let number =
            number.ok_or_else(|| format!("{:?} is not a number", cell.chars().take(40).collect::<String>()))?;
        Ok((0.0..=1.0).contains(&number).then_some(number))
    }
}

/// Columns of the pods.
pub(super) struct PodColumns {
    width: usize,
    cores: TraceColumn,
    memory: TraceColumn,
    created: TraceColumn,
    started: TraceColumn,
    deleted: TraceColumn,
}

/// Columns of a virtual machine.
struct MachineColumns {
    width: usize,
    time: TraceColumn,
    cores: TraceColumn,
    provisioned: TraceColumn,
    used: TraceColumn,
}

/// Returns the format of a table with this header.
pub(super) fn of_header(header: &str) -> Option<TraceFormat> {
    let has = |name: &str| header.contains(name);
    match () {
        () if has("cpu_milli") && has("memory_mib") => Some(TraceFormat::Alibaba),
        () if has("Memory capacity provisioned") => Some(TraceFormat::Bitbrains),
        () => None,
    }
}

fn column(header: &Cells<'_>, name: &str, unit: f64) -> Result<TraceColumn, String> {
    TraceColumn::of(&header.0, &[(name, unit)]).ok_or_else(|| format!("has no column {name}"))
}

fn check_width(cells: &Cells<'_>, width: usize) -> Result<(), String> {
    match cells.0.len() == width {
        true => Ok(()),
        false => Err(format!("has {} cells instead of {width}; was the file cut short?", cells.0.len())),
    }
}

impl PodColumns {
    pub(super) fn of(header: &str) -> Result<PodColumns, String> {
        let header = Cells::of(header, ',');
        Ok(PodColumns {
            width: header.0.len(),
            cores: column(&header, "cpu_milli", 1e-3)?,
            memory: column(&header, "memory_mib", MIB)?,
            created: column(&header, "creation_time", 1.0)?,
            started: column(&header, "scheduled_time", 1.0)?,
            deleted: column(&header, "deletion_time", 1.0)?,
        })
    }

    /// Reads a pod; `None` if it is counted among those that were skipped.
    pub(super) fn job(&self, line: &str, skipped: &mut SkippedJobs) -> Result<Option<TraceJob>, String> {
        let cells = Cells::of(line, ',');
        check_width(&cells, self.width)?;
        let cores = cells.number(self.cores, CORES_MAX)?.ceil() as u32;
        let memory_bytes = cells.number(self.memory, BYTES_MAX)?.ceil() as u64;
        let arrival_s = cells.number(self.created, TIME_MAX)?;
        if self.started.cell(&cells.0).is_empty() || self.deleted.cell(&cells.0).is_empty() {
            skipped.never_ran += 1;
            return Ok(None);
        }
        let seconds = cells.number(self.deleted, TIME_MAX)? - cells.number(self.started, TIME_MAX)?;
        if seconds < 0.0 {
            return Err("ends before it starts".into());
        }
        Ok(skipped.unless_empty(TraceJob { arrival_s, seconds, cores, memory_bytes, usage: None }))
    }
}

impl MachineColumns {
    fn of(header: &str) -> Result<MachineColumns, String> {
        let header = Cells::of(header, ';');
        Ok(MachineColumns {
            width: header.0.len(),
            time: column(&header, "Timestamp [ms]", 1.0)?,
            cores: column(&header, "CPU cores", 1.0)?,
            provisioned: column(&header, "Memory capacity provisioned [KB]", KIB)?,
            used: column(&header, "Memory usage [KB]", KIB)?,
        })
    }
}

/// Reads the table of a virtual machine after its header; `None` if it is counted among those that
/// were skipped. It asks for the most that was provisioned, from its first sample to its last.
pub(super) fn machine(
    header: &str,
    lines: &mut Lines<'_>,
    skipped: &mut SkippedJobs,
    on_line: &mut dyn FnMut(),
) -> Result<Option<TraceJob>, ReplayError> {
    let columns = MachineColumns::of(header).map_err(|message| lines.wrong(message))?;
    let mut usage = UsageSeries::new(MACHINE_SAMPLE_S);
    let (mut cores, mut provisioned) = (0.0f64, 0.0f64);
    loop {
        let read = (|line: &str| {
            let cells = Cells::of(line, ';');
            check_width(&cells, columns.width)?;
            let time = cells.number(columns.time, TIME_MAX * 1e3)?;
            let time_s = if time >= MILLISECONDS_FROM { time * 1e-3 } else { time };
            cores = cores.max(cells.number(columns.cores, CORES_MAX)?);
            provisioned = provisioned.max(cells.number(columns.provisioned, BYTES_MAX)?);
            let used = cells.number(columns.used, BYTES_MAX)?;
            if usage.push(time_s, used) { Ok(()) } else { Err(format!("goes back in time, to {time}")) }
        })(match lines.next()? {
            Some(line) => line,
            None => break,
        });
        read.map_err(|message: String| lines.wrong(message))?;
        on_line();
    }
    if usage.samples() == 0 {
        skipped.never_ran += 1;
        return Ok(None);
    }
    Ok(skipped.unless_empty(TraceJob {
        arrival_s: usage.first_s(),
        seconds: usage.span_s(),
        cores: cores.ceil() as u32,
        memory_bytes: provisioned.ceil() as u64,
        usage: Some(usage),
    }))
}

/// Reads a table of containers: the part of its memory that each used, by time, in any order of
/// containers. Those of one sample say nothing over time and are left out. Samples that are not from
/// 0 to 1 are counted in `skipped`.
pub(super) fn containers(
    lines: &mut Lines<'_>,
    skipped: &mut u64,
    on_line: &mut dyn FnMut(),
) -> Result<Vec<UsageSeries>, ReplayError> {
    let Some(header) = lines.next()?.map(str::to_owned) else { return Ok(Vec::new()) };
    let header = Cells::of(&header, ',');
    let width = header.0.len();
    let columns = ["value", "timestamp_anon", "container_ip"].map(|name| column(&header, name, 1.0));
    let [value, time, container] = columns.map(|column| column.map_err(|message| lines.wrong(message)));
    let (value, time, container) = (value?, time?, container?);
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut series: Vec<UsageSeries> = Vec::new();
    loop {
        let read = (|line: &str| {
            let cells = Cells::of(line, ',');
            check_width(&cells, width)?;
            // A difference of counters can be a little less than nothing.
            let Some(used) = cells.part(value)? else {
                *skipped += 1;
                return Ok(());
            };
            let at_s = cells.number(time, TIME_MAX)?;
            let name = container.cell(&cells.0);
            let index = match known.get(name) {
                Some(index) => *index,
                None if known.len() >= CONTAINERS_MAX => return Err(format!("is of container {CONTAINERS_MAX} + 1")),
                None => {
                    known.insert(name.to_owned(), series.len());
                    series.push(UsageSeries::new(CONTAINER_SAMPLE_S));
                    series.len() - 1
                }
            };
            if series[index].push(at_s, used) { Ok(()) } else { Err(format!("goes back in time, to {at_s}")) }
        })(match lines.next()? {
            Some(line) => line,
            None => break,
        });
        read.map_err(|message: String| lines.wrong(message))?;
        on_line();
    }
    series.retain(|series| series.samples() > 1);
    Ok(series)
}
