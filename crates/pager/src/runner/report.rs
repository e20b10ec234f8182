//! Output of a run: the report for programs, the summary and the progress line for people.

use super::budget::total_ns;
use super::{JobRefusal, JobTotals, ProtectionReport, SloReport};
use crate::control::{FaultMode, quantile_ns};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The report of one run, as `--report` writes it.
#[derive(Clone, Debug, serde::Serialize)]
#[allow(missing_docs, reason = "docs/cli.md describes each field")]
pub struct Report {
    pub version: &'static str,
    pub command: Vec<String>,
    /// Exit code that a shell would show without us: that of the program, or 128 + N for signal N.
    pub exit_code: i32,
    pub signal: Option<i32>,
    /// Exit code and reason if a process had to stop because of us.
    pub failure: Option<PagerFailure>,
    pub wall_s: f64,
    pub mode: &'static str,
    pub serving: &'static str,
    pub far: Vec<String>,
    /// Most that the budget was allowed to be.
    pub near_limit_bytes: u64,
    /// Offer in force at the end, and budget at the end.
    pub near_offer_last_bytes: u64,
    pub near_limit_last_bytes: u64,
    pub near_peak_bytes: u64,
    /// Mean over the time of the program.
    pub near_mean_bytes: u64,
    /// Largest sum of our own tables, buffers and stacks, which count as near.
    pub meta_peak_bytes: u64,
    pub far_peak_bytes: u64,
    /// Result of holding a slowdown, if one was held.
    pub hold: Option<SloReport>,
    /// Protection of far memory by a mirror or an erasure code.
    pub protection: Option<ProtectionReport>,
    pub processes: u32,
    pub fault_ns_p50: Option<u64>,
    pub fault_ns_p90: Option<u64>,
    pub fault_ns_p99: Option<u64>,
    pub fault_ns_p999: Option<u64>,
    pub fault_ns_max: Option<u64>,
    /// Sum of all fault service times, in seconds.
    pub fault_s: f64,
    /// Every event count by its name.
    #[serde(flatten)]
    pub counters: std::collections::BTreeMap<&'static str, u64>,
}

/// Exit code and reason of a process that had to stop because of us.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
#[allow(missing_docs, reason = "plain")]
pub struct PagerFailure {
    pub exit_code: i32,
    pub reason: String,
}

impl Report {
    /// Creates the part of a report that comes from the control block.
    pub(super) fn new(totals: &JobTotals, wall: Duration) -> Report {
        Report {
            version: env!("CARGO_PKG_VERSION"),
            command: Vec::new(),
            exit_code: 0,
            signal: None,
            failure: None,
            wall_s: wall.as_secs_f64(),
            mode: "auto",
            serving: totals.serving,
            far: Vec::new(),
            near_limit_bytes: totals.near_limit_bytes,
            near_offer_last_bytes: totals.near_limit_bytes,
            near_limit_last_bytes: totals.near_limit_bytes,
            near_peak_bytes: totals.near_peak_bytes,
            near_mean_bytes: 0,
            meta_peak_bytes: 0,
            far_peak_bytes: totals.far_peak_bytes,
            hold: None,
            protection: None,
            processes: totals.processes,
            fault_ns_p50: totals.fault_ns_quantile(1, 2),
            fault_ns_p90: totals.fault_ns_quantile(9, 10),
            fault_ns_p99: totals.fault_ns_quantile(99, 100),
            fault_ns_p999: totals.fault_ns_quantile(999, 1000),
            fault_ns_max: totals.fault_ns_quantile(1, 1),
            fault_s: total_ns(&totals.fault_ns_since(None)) / 1e9,
            counters: totals.counters.iter().copied().collect(),
        }
    }

    /// Returns the lines printed at the end.
    pub(super) fn summary(&self) -> String {
        let count = |name| self.counters.get(name).copied().unwrap_or(0);
        let mut text = format!(
            "farfield: {:.1} s, near peak {} of {}, far peak {}, {} ({})\n",
            self.wall_s,
            ByteSize(self.near_peak_bytes),
            ByteSize(self.near_limit_bytes),
            ByteSize(self.far_peak_bytes),
            plural(u64::from(self.processes), "process", "processes"),
            self.serving,
        );
        if let Some(slo_report) = &self.hold {
            text += &format!(
                "farfield: {} near in the mean; {:.2} × its time by what it waited, {:.2} were allowed; {}\n",
                ByteSize(self.near_mean_bytes),
                slo_report.slowdown,
                slo_report.slo,
                plural(u64::from(slo_report.changes), "change", "changes"),
            );
        }
        if let Some(ProtectionReport { is_whole, lapses: lapses @ 1.., unprotected_s, .. }) = self.protection {
            text += &format!(
                "farfield: far memory was not protected as its pool promises for {unprotected_s:.1} s ({}); in the end \
                 it was{}\n",
                plural(u64::from(lapses), "time", "times"),
                if is_whole { "" } else { " not" },
            );
        }
        if count("faults") > 0 {
            text += &format!(
                "farfield: {} faults (p50 {}, p99 {}), {} pages in ({} prefetched, {} of them used), {} pages out\n",
                CompactCount(count("faults")),
                Latency(self.fault_ns_p50),
                Latency(self.fault_ns_p99),
                CompactCount(count("pages_in")),
                CompactCount(count("prefetched")),
                percent(count("prefetch_hits"), count("prefetched")),
                CompactCount(count("pages_out")),
            );
        }
        text
    }
}

fn plural(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", CompactCount(number), if number == 1 { one } else { many })
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "0 %".into() } else { format!("{:.0} %", part as f64 * 100.0 / whole as f64) }
}

/// Returns the name of a mode, as `--mode` takes it.
pub fn mode_name(mode: FaultMode) -> &'static str {
    match mode {
        FaultMode::Auto => "auto",
        FaultMode::Signal => "signal",
        FaultMode::Thread => "thread",
    }
}

/// Returns one line about the current state, no wider than `columns`. Rate and latencies are those
/// since `before`, which was `seconds` ago.
pub(super) fn progress_line(
    totals: &JobTotals,
    before: Option<&JobTotals>,
    seconds: f64,
    elapsed: Duration,
    columns: usize,
) -> String {
    let recent = totals.fault_ns_since(before);
    let faults = totals.count("faults") - before.map_or(0, |before| before.count("faults")).min(totals.count("faults"));
    let line = format!(
        "farfield {}:{:02} near {:#}/{:#} far {:#} {} faults/s p50 {} p99 {}",
        elapsed.as_secs() / 60,
        elapsed.as_secs() % 60,
        ByteSize(totals.near_bytes),
        ByteSize(totals.near_limit_bytes),
        ByteSize(totals.far_bytes),
        CompactCount((faults as f64 / seconds.max(1e-3)) as u64),
        Latency(quantile_ns(&recent, 1, 2)),
        Latency(quantile_ns(&recent, 99, 100)),
    );
    // A line that wraps could not be erased whole.
    line.chars().take(columns.saturating_sub(1)).collect()
}

/// Bytes for people: 3.2 GiB. With `{:#}` it is 3.2G, where there is little room.
pub struct ByteSize(pub u64);

impl core::fmt::Display for ByteSize {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut unit = 0;
        let mut value = self.0 as f64;
        while value >= 1023.95 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        match (unit, f.alternate()) {
            (0, false) => write!(f, "{} B", self.0),
            (0, true) => write!(f, "{}B", self.0),
            (_, false) => write!(f, "{value:.1} {}", units[unit]),
            (_, true) => write!(f, "{value:.1}{}", &units[unit][..1]),
        }
    }
}

/// Count for people: 12.3k, 4.5M.
pub struct CompactCount(pub u64);

impl core::fmt::Display for CompactCount {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            n if n < 10_000 => write!(f, "{n}"),
            n if n < 1_000_000 => write!(f, "{:.1}k", n as f64 / 1e3),
            n if n < 1_000_000_000 => write!(f, "{:.1}M", n as f64 / 1e6),
            n => write!(f, "{:.1}G", n as f64 / 1e9),
        }
    }
}

/// Nanoseconds for people: 3.5 µs; a dash if there is no value.
pub struct Latency(pub Option<u64>);

impl core::fmt::Display for Latency {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            None => f.write_str("-"),
            Some(ns) if ns < 1_000 => write!(f, "{ns} ns"),
            Some(ns) if ns < 1_000_000 => write!(f, "{:.1} µs", ns as f64 / 1e3),
            Some(ns) if ns < 1_000_000_000 => write!(f, "{:.1} ms", ns as f64 / 1e6),
            Some(ns) => write!(f, "{:.1} s", ns as f64 / 1e9),
        }
    }
}

/// Bytes that a report needs; they are kept free on the disk while the program runs.
const ROOM_BYTES: i64 = 64 * 1024;

/// File of the report, opened before the program starts so that trouble shows in time.
pub(super) struct ReportFile {
    file: File,
    path: PathBuf,
    staging: ReportStaging,
}

/// Form of the report while it is not written.
enum ReportStaging {
    /// A file without a name in the same folder (`O_TMPFILE`): gone with the runner, however that
    /// ends.
    Unnamed,
    /// A hidden file in the same folder, on file systems where every file has a name.
    Hidden(PathBuf),
    /// No regular file: a pipe, `/dev/null`.
    Stream,
}

impl ReportFile {
    pub(super) fn create(path: &Path) -> Result<ReportFile, JobRefusal> {
        let failed = |error| JobRefusal::Report { path: path.into(), error };
        let (file, until_whole) = if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
            (File::options().write(true).open(path).map_err(failed)?, ReportStaging::Stream)
        } else {
            ReportFile::create_beside(path).map_err(failed)?
        };
        let report = ReportFile { file, path: path.into(), staging: until_whole };
        report.reserve().map_err(failed)?;
        Ok(report)
    }

    /// Creates a new file in the folder of `path`.
    fn create_beside(path: &Path) -> io::Result<(File, ReportStaging)> {
        if path.file_name().is_none() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match File::options().write(true).custom_flags(libc::O_TMPFILE).mode(0o644).open(folder) {
            Ok(file) => Ok((file, ReportStaging::Unnamed)),
            Err(_) => {
                let create = |hidden: &Path| File::options().write(true).create_new(true).mode(0o644).open(hidden);
                let (file, hidden) = under_free_name(path, create)?;
                Ok((file, ReportStaging::Hidden(hidden)))
            }
        }
    }

    /// Reserves the room on the disk now. A file system that cannot promise room is assumed to have
    /// it.
    fn reserve(&self) -> io::Result<()> {
        if matches!(self.staging, ReportStaging::Stream) {
            return Ok(());
        }
        // SAFETY: a descriptor of ours and numbers.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, ROOM_BYTES) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            error => Err(error),
        }
    }

    /// Writes the report in one piece: readers see the old file or the new one.
    pub(super) fn write(mut self, report: &Report) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(report).map_err(io::Error::other)?;
        text.push(b'\n');
        self.file.write_all(&text)?;
        if matches!(self.staging, ReportStaging::Stream) {
            return Ok(());
        }
        // Gives back the reserved room behind the end.
        self.file.set_len(text.len() as u64)?;
        self.file.sync_all()?;
        if let ReportStaging::Unnamed = self.staging {
            let ((), hidden) = under_free_name(&self.path, |hidden| name(&self.file, hidden))?;
            self.staging = ReportStaging::Hidden(hidden);
        }
        if let ReportStaging::Hidden(hidden) = &self.staging {
            std::fs::rename(hidden, &self.path)?;
            // There is nothing to remove any more.
            self.staging = ReportStaging::Unnamed;
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        if let ReportStaging::Hidden(hidden) = &self.staging {
            let _ = std::fs::remove_file(hidden);
        }
    }
}

/// Makes a hidden file beside `path`. A file left by a killed runner that had our process id stays.
fn under_free_name<T>(path: &Path, mut make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<(T, PathBuf)> {
    let name = path.file_name().ok_or(io::Error::from_raw_os_error(libc::EISDIR))?;
    let mut attempt = 0;
    loop {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{attempt}", std::process::id()));
        let hidden = path.with_file_name(hidden);
        match make(&hidden) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            result => return Ok((result?, hidden)),
        }
    }
}

/// Gives a file without a name a name.
fn name(file: &File, path: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let to = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: two strings that end with zero, and numbers.
    match unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: half a report, a lost report, or numbers that people misread.
    use super::*;
    use crate::control::{BUCKETS, bucket_of};

    fn totals() -> JobTotals {
        let mut totals = JobTotals {
            near_limit_bytes: 4 << 30,
            near_bytes: 3 << 30,
            near_peak_bytes: 4 << 30,
            far_bytes: 10 << 30,
            far_peak_bytes: 12 << 30,
            processes: 1,
            processes_alive: 1,
            serving: "signal",
            counters: vec![("faults", 1000), ("pages_in", 2000), ("prefetched", 1000), ("prefetch_hits", 900)],
            fault_ns: [0; BUCKETS],
        };
        totals.fault_ns[bucket_of(4000)] = 1000;
        totals
    }

    #[test]
    fn numbers_read_well() {
        let check = |bytes: u64, text: &str| assert_eq!(ByteSize(bytes).to_string(), text);
        check(0, "0 B");
        check(1023, "1023 B");
        check(1024, "1.0 KiB");
        check((1 << 20) - 1, "1.0 MiB");
        check(3 << 29, "1.5 GiB");
        check(u64::MAX, "16.0 EiB");
        assert_eq!(format!("{:#} {:#}", ByteSize(3 << 29), ByteSize(7)), "1.5G 7B");
        assert_eq!(CompactCount(9999).to_string(), "9999");
        assert_eq!(CompactCount(12_345).to_string(), "12.3k");
        assert_eq!(Latency(Some(3_500)).to_string(), "3.5 µs");
        assert_eq!(Latency(None).to_string(), "-");
    }

    #[test]
    fn a_progress_line_fits_the_terminal_and_speaks_of_the_last_second() {
        let (before, mut now) = (totals(), totals());
        now.counters[0].1 += 12_345;
        now.fault_ns[bucket_of(100_000)] = 10;
        let line = |columns| progress_line(&now, Some(&before), 1.0, Duration::from_secs(75), columns);
        let whole = line(200);
        assert!(whole.starts_with("farfield 1:15 near 3.0G/4.0G far 10.0G 12.3k faults/s p50 1"), "{whole}");
        assert!(whole.contains("p50 10") && whole.chars().count() < 80, "{whole}");
        assert_eq!(line(40).chars().count(), 39);
        assert_eq!(line(0), "");
        assert!(progress_line(&now, None, 1.0, Duration::ZERO, 200).contains("13.3k faults/s p50 4.0 µs"));
    }

    #[test]
    fn a_report_is_written_whole_and_leaves_nothing_else() {
        let folder = std::env::temp_dir().join(format!("farfield-report-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("run.json");
        std::fs::write(&path, "old").unwrap();
        let names = || std::fs::read_dir(&folder).unwrap().count();
        drop(ReportFile::create(&path).unwrap());
        assert_eq!((names(), std::fs::read_to_string(&path).unwrap()), (1, "old".into()), "called off");
        let report = Report::new(&totals(), Duration::from_millis(1500));
        ReportFile::create(&path).unwrap().write(&report).unwrap();
        assert_eq!(names(), 1);
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!((&value["faults"], &value["wall_s"]), (&1000.into(), &1.5.into()));
        assert_eq!(value["fault_ns_p50"], value["fault_ns_p99"]);
        let all = value["fault_s"].as_f64().unwrap();
        assert!((0.0035..0.0045).contains(&all), "a thousand of 4 µs: {all}");
        assert!(report.summary().contains("900") || report.summary().contains("90 % of them used"));
        let (left, hidden) = under_free_name(&path, |hidden| File::create_new(hidden)).unwrap();
        ReportFile::create(&path).unwrap().write(&report).unwrap();
        assert_eq!(names(), 2, "somebody else's, whose runner had our number, stays");
        let on_old_systems = ReportFile { file: left, path: path.clone(), staging: ReportStaging::Hidden(hidden) };
        on_old_systems.write(&report).unwrap();
        assert_eq!(names(), 1);
        let (file, hidden) = under_free_name(&path, |hidden| File::create_new(hidden)).unwrap();
        drop(ReportFile { file, path: path.clone(), staging: ReportStaging::Hidden(hidden) });
        assert_eq!(names(), 1, "called off");
        ReportFile::create(Path::new("/dev/null")).unwrap().write(&report).unwrap();
        assert!(std::fs::metadata("/dev/null").unwrap().len() == 0);
        assert!(matches!(ReportFile::create(&folder.join("no/such/run.json")), Err(JobRefusal::Report { .. })));
        assert!(ReportFile::create(Path::new("/")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
