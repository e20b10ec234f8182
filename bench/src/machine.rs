//! What the numbers were measured on.

use crate::sys;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a sample may use, by its data: near, far, the program's file, and what copies take.
const WARM_TIMES: u64 = 4;
const WARM_MORE_BYTES: u64 = 128 << 20;

/// Facts of the machine that figures depend on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model name of the processor.
    pub cpu: String,
    /// Processors that may be used.
    pub cores: u32,
    /// Physical memory.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Is there a hypervisor below?
    pub virtual_machine: bool,
    /// Was memory warmed before each sample? Where it was not, whoever touched memory that the hypervisor had taken back paid for that.
    #[serde(default)]
    pub is_warmed: bool,
    /// Transparent huge pages.
    pub huge_pages: String,
    /// `vm.swappiness`.
    pub swappiness: String,
    /// `vm.page-cluster`, the swap readahead.
    pub page_cluster: String,
    /// Compressors of zram, the one in use in brackets.
    pub zram_compressors: String,
    /// Load average of the last minute when the run began: how noisy the machine was.
    pub load: f64,
}

fn text(path: &str) -> String {
    fs::read_to_string(path).map_or("unknown".into(), |text| text.trim().to_string())
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start_matches([' ', '\t', ':']).trim()))
}

/// The processor's clock as the kernel says it; not on all machines.
pub(crate) fn clock_ghz() -> Option<f64> {
    Some(field(&text("/proc/cpuinfo"), "cpu MHz")?.parse::<f64>().ok()? / 1e3)
}

impl Machine {
    /// Facts of this machine.
    pub fn this() -> Machine {
        let processors = text("/proc/cpuinfo");
        let memory = text("/proc/meminfo");
        let kib = field(&memory, "MemTotal").and_then(|v| v.split(' ').next()?.parse::<u64>().ok()).unwrap_or(0);
        let huge = text("/sys/kernel/mm/transparent_hugepage/enabled");
        let huge = huge.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("unknown", |(name, _)| name);
        let virtual_machine =
            field(&processors, "flags").is_some_and(|f| f.split(' ').any(|flag| flag == "hypervisor"));
        Machine {
            cpu: field(&processors, "model name").unwrap_or("unknown").into(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            memory_bytes: kib << 10,
            kernel: text("/proc/sys/kernel/osrelease"),
            virtual_machine,
            is_warmed: virtual_machine,
            huge_pages: huge.into(),
            swappiness: text("/proc/sys/vm/swappiness"),
            page_cluster: text("/proc/sys/vm/page-cluster"),
            zram_compressors: text("/sys/block/zram0/comp_algorithm"),
            load: text("/proc/loadavg").split(' ').next().and_then(|v| v.parse().ok()).unwrap_or(0.0),
        }
    }

    /// Before a sample of so much data, where there is a hypervisor: it takes back what its guest has freed, and gives it again page by
    /// page when it is touched, which takes 12 µs in place of 2. Whoever comes first would pay for all. So the memory that a sample
    /// may use, in pages of either size, is touched and freed just before.
    pub(crate) fn warm(&self, data_bytes: u64) -> std::io::Result<()> {
        if !self.is_warmed {
            return Ok(());
        }
        let bytes = (data_bytes.saturating_mul(WARM_TIMES) + WARM_MORE_BYTES).min(self.memory_bytes / 4) as usize;
        sys::touch(bytes, true)?;
        sys::touch(bytes, false)
    }
}

/// The commit of the tree at `root`, and whether there are changes in no commit.
pub fn commit(root: &Path) -> (String, bool) {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let commit = git(&["rev-parse", "HEAD"]).unwrap_or("unknown".into());
    // What the benchmark itself writes does not count.
    let changes = git(&["status", "--porcelain", "--", ".", ":!bench/results", ":!docs/benchmarks*"]);
    (commit, changes.is_some_and(|text| !text.is_empty()))
}

/// Now, in UTC: 2026-01-31T23:59:59Z.
pub fn utc_now() -> String {
    utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
}

/// Seconds since 1970 as text. Days to a date as in "chrono-Compatible Low-Level Date Algorithms" (H. Hinnant).
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    let shifted = days + 719_468; // Days since 0000-03-01.
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_around_leap_days() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(utc(1_735_689_600), "2025-01-01T00:00:00Z");
    }

    #[test]
    fn a_description_of_this_machine_is_complete() {
        let machine = Machine::this();
        assert!(machine.memory_bytes > 1 << 20);
        assert!(machine.kernel.contains('.'));
    }
}
