//! Lists of jobs that ran somewhere: what each asked for, and how long it took.
//!
//! Columns are known by the names in the header, those of other programs included: `sacct` of Slurm
//! (`Submit`, `ReqCPUS`, `ReqMem`, `ElapsedRaw`, with bars between them and times as Unix seconds),
//! and the pods of Alibaba's cluster (`cpu_milli`, `memory_mib`, `creation_time`, `scheduled_time`,
//! `deletion_time`; Weng and others, USENIX ATC 2023).

use super::arrivals::ArrivalError;
use std::collections::BTreeMap;

/// Job of a list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracedJob {
    /// Arrival in seconds; the first of the list arrives at 0.
    pub arrival_s: f64,
    /// Cores that it asked for; parts of a core are rounded up.
    pub cores: u32,
    /// Memory that it asked for.
    pub memory_bytes: u64,
    /// Seconds that it ran.
    pub seconds: f64,
}

const ARRIVAL: &[(&str, f64)] = &[("arrival_s", 1.0), ("arrival_ms", 1e-3), ("Submit", 1.0), ("creation_time", 1.0)];
const CORES: &[(&str, f64)] = &[("cores", 1.0), ("ReqCPUS", 1.0), ("cpu_milli", 1e-3)];
const MEMORY: &[(&str, f64)] = &[("memory_mib", 1.0), ("ReqMem", 1.0)];
const SECONDS: &[(&str, f64)] = &[("seconds", 1.0), ("ElapsedRaw", 1.0)];
/// Instead of [`SECONDS`]: start and end.
const START: &[(&str, f64)] = &[("scheduled_time", 1.0)];
const END: &[(&str, f64)] = &[("deletion_time", 1.0)];

const MIB: f64 = (1u64 << 20) as f64;
const MIB_MAX: f64 = (1u64 << 40) as f64;
const CORES_MAX: f64 = 1e6;
/// Characters of a cell that an error repeats.
const SHOWN_MAX: usize = 40;

/// Column that was found, and the unit of its numbers.
#[derive(Clone, Copy)]
pub(super) struct TraceColumn {
    place: usize,
    unit: f64,
}

impl TraceColumn {
    pub(super) fn of(header: &[&str], names: &[(&str, f64)]) -> Option<TraceColumn> {
        let mut columns = header.iter().enumerate();
        columns.find_map(|(place, cell)| {
            let (_, unit) = names.iter().find(|(name, _)| name == cell)?;
            Some(TraceColumn { place, unit: *unit })
        })
    }

    fn needed(header: &[&str], names: &[(&str, f64)]) -> Result<TraceColumn, ArrivalError> {
        let known = || names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ");
        let missing = || ArrivalError::Row { line: 1, message: format!("no column is called {}", known()) };
        TraceColumn::of(header, names).ok_or_else(missing)
    }

    /// Returns the cell of this column.
    pub(super) fn cell<'a>(self, cells: &[&'a str]) -> &'a str {
        cells[self.place]
    }

    /// Reads a number of at least 0.
    pub(super) fn number(self, cells: &[&str]) -> Result<f64, String> {
        let cell = cells[self.place];
        let number = cell.parse::<f64>().ok().filter(|number| *number >= 0.0 && number.is_finite());
        let shown: String = cell.chars().take(SHOWN_MAX).collect();
        number.map(|number| number * self.unit).ok_or_else(|| format!("{shown:?} is not a number of at least 0"))
    }

    /// Reads a size in MiB: a number, or one with a unit as Slurm writes it (`4G`, `2000Mc` for each
    /// core, `8Gn` for the node).
    fn mib(self, cells: &[&str], cores: f64) -> Result<f64, String> {
        let cell = cells[self.place];
        let (size, each) = match cell.strip_suffix('c') {
            Some(size) => (size, cores),
            None => (cell.strip_suffix('n').unwrap_or(cell), 1.0),
        };
        let units = [('K', 1.0 / 1024.0), ('M', 1.0), ('G', 1024.0), ('T', 1024.0 * 1024.0)];
        let unit = units.into_iter().find_map(|(letter, unit)| Some((size.strip_suffix(letter)?, unit)));
        let (number, unit) = unit.unwrap_or((size, 1.0));
        let number = number.parse::<f64>().ok().map(|number| number * unit * each);
        let shown: String = cell.chars().take(SHOWN_MAX).collect();
        let number = number.filter(|mib| *mib > 0.0 && *mib <= MIB_MAX);
        number.ok_or_else(|| {
            format!("{shown:?} is not a size of memory above 0; write what the job used, or take it out")
        })
    }
}

/// Run time of a job, in one column or two.
enum RunTimeColumns {
    Seconds(TraceColumn),
    StartAndEnd(TraceColumn, TraceColumn),
}

impl RunTimeColumns {
    fn of(header: &[&str]) -> Result<RunTimeColumns, ArrivalError> {
        match (TraceColumn::of(header, START), TraceColumn::of(header, END)) {
            (Some(start), Some(end)) if TraceColumn::of(header, SECONDS).is_none() => {
                Ok(RunTimeColumns::StartAndEnd(start, end))
            }
            _ => TraceColumn::needed(header, SECONDS).map(RunTimeColumns::Seconds),
        }
    }

    /// Reads the run time; `None` for a job that never ran.
    fn seconds(&self, cells: &[&str]) -> Result<Option<f64>, String> {
        let seconds = match self {
            RunTimeColumns::Seconds(column) if cells[column.place].is_empty() => 0.0,
            RunTimeColumns::StartAndEnd(start, _) if cells[start.place].is_empty() => 0.0,
            RunTimeColumns::Seconds(column) => column.number(cells)?,
            RunTimeColumns::StartAndEnd(start, end) => end.number(cells)? - start.number(cells)?,
        };
        if seconds < 0.0 {
            return Err("the job ends before it starts".into());
        }
        Ok((seconds > 0.0).then_some(seconds))
    }
}

/// Reads a list of jobs: lines with commas or bars between cells, and a header. Other columns are
/// ignored. Jobs that never ran are left out: their run time is empty or 0.
pub fn traced(text: &str) -> Result<Vec<TracedJob>, ArrivalError> {
    let mut lines = text.lines().enumerate();
    let header = lines.next().map_or("", |(_, line)| line.trim());
    let separator = if header.contains('|') { '|' } else { ',' };
    let header: Vec<&str> = header.split(separator).collect();
    let arrival = TraceColumn::needed(&header, ARRIVAL)?;
    let (cores, memory) = (TraceColumn::needed(&header, CORES)?, TraceColumn::needed(&header, MEMORY)?);
    let run = RunTimeColumns::of(&header)?;
    let mut jobs = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |message| ArrivalError::Row { line: index + 1, message };
        let cells: Vec<&str> = line.trim().split(separator).collect();
        if cells.len() != header.len() {
            return Err(wrong(format!("{} cells instead of {}; was the file cut short?", cells.len(), header.len())));
        }
        let Some(seconds) = run.seconds(&cells).map_err(wrong)? else { continue };
        let cores = cores.number(&cells).map_err(wrong)?.ceil();
        if !(1.0..=CORES_MAX).contains(&cores) {
            return Err(wrong(format!("a job needs 1 to {CORES_MAX} cores, not {cores}")));
        }
        let memory_bytes = (memory.mib(&cells, cores).map_err(wrong)? * MIB).ceil() as u64;
        jobs.push(TracedJob {
            arrival_s: arrival.number(&cells).map_err(wrong)?,
            cores: cores as u32,
            memory_bytes,
            seconds,
        });
    }
    let first_s = jobs.iter().map(|job| job.arrival_s).fold(f64::INFINITY, f64::min);
    jobs.iter_mut().for_each(|job| job.arrival_s -= first_s);
    if jobs.is_empty() { Err(ArrivalError::NoJobs) } else { Ok(jobs) }
}

/// Jobs that asked for the same and ran as long, and what each job of a list is.
pub(super) struct JobGroups {
    /// One job of each group.
    pub(super) groups: Vec<TracedJob>,
    /// Number of jobs of each group.
    pub(super) counts: Vec<usize>,
    /// Group of each job.
    pub(super) of_jobs: Vec<usize>,
}

impl JobGroups {
    /// Groups jobs, in the order of the first job of each group.
    pub(super) fn of(jobs: &[TracedJob]) -> JobGroups {
        let mut known = BTreeMap::new();
        let mut grouped = JobGroups { groups: Vec::new(), counts: Vec::new(), of_jobs: Vec::new() };
        for job in jobs {
            let next = grouped.groups.len();
            let group = *known.entry((job.cores, job.memory_bytes, job.seconds.to_bits())).or_insert(next);
            if group == next {
                grouped.groups.push(*job);
                grouped.counts.push(0);
            }
            grouped.counts[group] += 1;
            grouped.of_jobs.push(group);
        }
        grouped
    }
}

#[cfg(test)]
mod tests {
    //! Guards against jobs that a list does not have, or has with other sizes.
    use super::*;

    fn job(arrival_s: f64, cores: u32, mib: u64, seconds: f64) -> TracedJob {
        TracedJob { arrival_s, cores, memory_bytes: mib << 20, seconds }
    }

    #[test]
    fn columns_are_known_by_their_names() {
        let jobs =
            traced("name,memory_mib,cores,seconds,arrival_s\na,512,2,60,5\n\nb,1024,1,0,6\nc,1.5,1,7.5,8\n").unwrap();
        let small = TracedJob { memory_bytes: 3 << 19, ..job(3.0, 1, 0, 7.5) };
        assert_eq!(jobs, [job(0.0, 2, 512, 60.0), small], "one never ran");
    }

    #[test]
    fn lists_of_slurm_are_read() {
        let text = "Submit|ReqCPUS|ReqMem|ElapsedRaw|State\n1000|4|8G|60|COMPLETED\n1010|2|1500M|30|FAILED\n\
                    1020|2|500Mc|30|TIMEOUT\n1030|2|3000Mn|30|TIMEOUT\n1040|1|1G|0|CANCELLED by 7\n";
        let expected =
            [job(0.0, 4, 8192, 60.0), job(10.0, 2, 1500, 30.0), job(20.0, 2, 1000, 30.0), job(30.0, 2, 3000, 30.0)];
        assert_eq!(traced(text).unwrap(), expected);
    }

    #[test]
    fn pods_of_alibaba_are_read() {
        let text = "name,cpu_milli,memory_mib,num_gpu,creation_time,deletion_time,scheduled_time\n\
                    p0,3152,5600,0,100,500,200\np1,1000,100,0,90,95,\n";
        assert_eq!(traced(text).unwrap(), [job(0.0, 4, 5600, 300.0)]);
    }

    #[test]
    fn equal_jobs_are_one_group() {
        let grouped = JobGroups::of(&[job(0.0, 1, 5, 7.0), job(3.0, 2, 5, 7.0), job(9.0, 1, 5, 7.0)]);
        assert_eq!((grouped.counts, grouped.of_jobs, grouped.groups.len()), (vec![2, 1], vec![0, 1, 0], 2));
    }

    #[test]
    fn bad_rows_are_named() {
        let header = "arrival_s,cores,memory_mib,seconds\n";
        let check = |row: &str, complaint: &str| {
            let error = traced(&format!("{header}0,1,1,1\n{row}\n")).unwrap_err().to_string();
            assert!(error.contains("line 3") && error.contains(complaint), "{row}: {error}");
        };
        check("1,1,1", "3 cells instead of 4");
        check("nan,1,1,1", "\"nan\"");
        check("-1,1,1,1", "\"-1\"");
        check("1,0,1,1", "cores");
        check("1,1e9,1,1", "cores");
        check("1,1,0,1", "memory");
        check("1,1,inf,1", "memory");
        check("1,1,5Q,1", "5Q");
        check("1,1,1,soon", "soon");
        check(&format!("1,1,{},1", "9".repeat(500)), "999");
        let error = |text: &str| traced(text).unwrap_err().to_string();
        assert!(error("").contains("arrival_s"));
        assert!(error("arrival_s,cores,memory_mib\n").contains("seconds or ElapsedRaw"));
        assert!(error(header).contains("no jobs"));
        let ends_early = "creation_time,cores,memory_mib,scheduled_time,deletion_time\n0,1,1,9,5\n";
        assert!(error(ends_early).contains("ends before"));
    }
}
