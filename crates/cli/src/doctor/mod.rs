//! `farfield doctor`: checks whether far memory works here and how well, and gives advice.
//!
//! Each check is a small function that returns a [`CheckResult`]; the list of them is in
//! [`findings`].

mod cluster;
mod kernel;
mod limits;
mod memory;
mod network;
pub(crate) mod pool;

use crate::size::Size;
use clap::Args;
use farfield_pager::runner::{self, machine};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Check whether programs can have far memory here, and how fast it would be.
///
/// Each line says ok, warn or fail, what was found, and what to do about it. Exits with 1 if anything fails.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Check this near budget against the available memory
    #[arg(long, value_name = "SIZE", default_value = "50%")]
    near: Size,
    /// Connect to this memory server and measure it
    #[arg(long, value_name = "URL")]
    far: Vec<String>,
    /// Measure this pool instead of the machine: each leaf of the URL, and the whole pool. Stores 16
    /// MiB there for some seconds
    #[arg(long, value_name = "URL")]
    pool: Vec<String>,
    /// Check the cluster of this machine instead: Slurm, jobs of this partition, the memory servers
    /// that --far names, and the agent if this is a node
    #[arg(long, value_name = "PARTITION", num_args = 0..=1, require_equals = true, default_missing_value = "far",
          conflicts_with_all = ["near", "pool"])]
    cluster: Option<String>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield doctor                              This machine, this user
  farfield doctor --far tcp://big:7400         And the way to a memory server: connects, reads, writes, measures
  farfield doctor --pool 'ssd:/var/tmp?size=1G'  How fast far memory in a file would be
  farfield doctor --pool 'numa:1?size=1G'      Or that of NUMA node 1, such as a CXL expander
  farfield doctor --pool 'mirror(tcp://a:7400,tcp://b:7400)' --json
                                               Latency, bandwidth and depth of both legs and of the mirror
  farfield doctor --near 4G                    Does a near budget of 4 GiB fit here?
  farfield doctor --cluster --far tcp://big:7400  What would spoil far memory for jobs of Slurm
  farfield doctor --json | jq '.checks[] | select(.level != \"ok\")'";

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    Ok,
    /// Far memory works, but not as well, or not for everything.
    Warn,
    /// Programs cannot have far memory.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct CheckResult {
    pub(crate) check: &'static str,
    pub(crate) level: Severity,
    pub(crate) found: String,
    /// Advice for the user; empty if nothing has to be done.
    pub(crate) advice: String,
}

impl CheckResult {
    pub(crate) fn ok(check: &'static str, found: impl Into<String>) -> CheckResult {
        CheckResult { check, level: Severity::Ok, found: found.into(), advice: String::new() }
    }
    pub(crate) fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> CheckResult {
        CheckResult { check, level: Severity::Warn, found: found.into(), advice: advice.into() }
    }
    pub(crate) fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> CheckResult {
        CheckResult { check, level: Severity::Fail, found: found.into(), advice: advice.into() }
    }
}

/// Runs all checks and prints what they found.
pub(crate) fn run(args: DoctorArgs) -> ExitCode {
    let token = match crate::token::read(args.token_file.as_deref()) {
        Ok(token) => token,
        Err(error) => return crate::finish(Err(error)),
    };
    if !args.pool.is_empty() {
        return pools(&args.pool, &token, args.json);
    }
    let findings = match &args.cluster {
        Some(partition) => cluster::findings(partition, &args.far, &token),
        None => findings(args.near, &args.far, &token),
    };
    let failed = findings.iter().any(|finding| finding.level == Severity::Fail);
    let text = match args.json {
        true => format!(
            "{:#}",
            serde_json::json!({ "ok": !failed, "version": env!("CARGO_PKG_VERSION"), "checks": findings })
        ),
        false => findings.iter().map(line).collect::<Vec<_>>().join("\n"),
    };
    // If stdout was closed (`| head`), the exit code still tells the result.
    let _ = std::io::stdout().write_all((text + "\n").as_bytes());
    ExitCode::from(u8::from(failed))
}

/// Measures pools and prints the results.
fn pools(urls: &[String], token: &[u8], json: bool) -> ExitCode {
    let places: Vec<_> = urls.iter().flat_map(|url| pool::measure(url, token)).collect();
    let well = places.iter().all(pool::PoolMeasurement::is_measured);
    let text = match json {
        true => {
            format!("{:#}", serde_json::json!({ "ok": well, "version": env!("CARGO_PKG_VERSION"), "places": places }))
        }
        false => places.iter().map(pool::PoolMeasurement::text).collect::<Vec<_>>().join("\n"),
    };
    let _ = std::io::stdout().write_all((text + "\n").as_bytes());
    ExitCode::from(u8::from(!well))
}

fn line(finding: &CheckResult) -> String {
    let level = match finding.level {
        Severity::Ok => "ok  ",
        Severity::Warn => "warn",
        Severity::Fail => "FAIL",
    };
    let mut text = format!("{level}  {:<22} {}", finding.check, finding.found);
    if !finding.advice.is_empty() {
        text += &format!("\n      {:<22} -> {}", "", finding.advice);
    }
    text
}

fn findings(near: Size, far: &[String], token: &[u8]) -> Vec<CheckResult> {
    let memory = machine::memory_bytes();
    let mut findings = vec![
        kernel::release(),
        kernel::userfaultfd(),
        kernel::userfaultfd_privileged(),
        kernel::userfaultfd_move(),
        kernel::pagemap_scan(),
        kernel::vmsplice(),
        kernel::process_madvise(),
        kernel::seccomp(),
        kernel::no_new_privileges(),
        kernel::io_uring(),
        limits::memory(near.bytes(memory), memory, machine::cgroup_limit()),
        limits::map_count(),
        limits::overcommit(),
        limits::address_space(),
        limits::descriptors(),
        limits::locked_memory(),
        limits::huge_pages(),
        limits::processors(),
        memory::expanders(),
        library(),
        network::loopback(),
    ];
    findings.extend(far.iter().map(|url| network::server(url, token)));
    findings
}

fn library() -> CheckResult {
    let name = "preload library";
    let chosen = std::env::var_os(runner::ENV_PRELOAD);
    let found = std::env::current_exe().map(|executable| runner::find_preload(chosen.as_deref(), &executable));
    match found {
        Ok(Ok(path)) => CheckResult::ok(name, path.display().to_string()),
        Ok(Err(refusal)) => CheckResult::fail(name, "cannot be used", refusal.to_string()),
        Err(error) => CheckResult::fail(name, error.to_string(), format!("set {}", runner::ENV_PRELOAD)),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: advice that is missing where it is needed.
    use super::*;

    #[test]
    fn each_failed_check_comes_with_advice() {
        let findings = findings(Size::Percent(50.0), &["tcp://127.0.0.1:1".into()], b"");
        for finding in &findings {
            assert_eq!(finding.level == Severity::Ok, finding.advice.is_empty(), "{finding:?}");
            assert!(!finding.found.is_empty(), "{finding:?}");
        }
        let mut names: Vec<_> = findings.iter().map(|finding| finding.check).collect();
        names.dedup();
        assert_eq!(names.len(), findings.len());
        let server = findings.last().unwrap();
        assert_eq!((server.check, server.level), ("memory server", Severity::Fail));
    }

    #[test]
    fn advice_stands_below_what_was_found() {
        let text = line(&CheckResult::warn("name", "found", "do this"));
        assert!(text.starts_with("warn  name") && text.contains("found\n") && text.ends_with("-> do this"), "{text}");
        assert_eq!(line(&CheckResult::ok("name", "found")).lines().count(), 1);
    }
}
