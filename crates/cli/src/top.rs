//! `farfield top`: shows what jobs, heaps and memory servers do now.

mod dashboard;
mod heaps;
mod metrics;
#[cfg(feature = "otlp")]
mod otlp;

use crate::address::address;
use crate::pool::PoolRow;
use crate::server_stat::{ServerStats, StatClient, servers_of};
use clap::Args;
use farfield_pager::control::{SLOTS, believed, quantile_ns};
use farfield_pager::runner::{
    ByteSize, CompactCount, ControlBlock, JobTotals, Latency, NearStatus, find_control, find_jobs, state_name,
};
use heaps::{HeapRow, HeapView};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Show what a job, a heap with a name, or a memory server, does with far memory.
///
/// On a terminal the view is refreshed each second; ^C ends it. Rates and latencies are those since
/// the last refresh, at first and with --once those since the start. Lines fit 80 columns; --json
/// has more.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// A process of the job (the program, a child of it, or its `farfield run`) or of the heap, or
    /// the URL of a memory server. Without it, all jobs and heaps of this user
    #[arg(value_name = "PID|URL")]
    targets: Vec<String>,
    /// Print once and end
    #[arg(long)]
    once: bool,
    /// One JSON object per refresh, for programs
    #[arg(long)]
    json: bool,
    /// Seconds between refreshes
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    every: f64,
    /// Answer Prometheus at http://ADDR:PORT/metrics instead, about all jobs, heaps and nodes of this user, until ^C
    #[arg(long, value_name = "ADDR:PORT", value_parser = address,
          conflicts_with_all = ["targets", "once", "json", "every"])]
    metrics: Option<SocketAddr>,
    /// Send the same to a collector of OpenTelemetry instead, each time after --every: OTLP over HTTP, to /v1/metrics
    /// if the URL has no path
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "http://HOST:PORT", conflicts_with_all = ["targets", "once", "json", "metrics", "serve"])]
    otlp: Option<String>,
    /// Serve a page at http://ADDR:PORT/ instead, which shows all jobs and heaps of this user, their
    /// servers, and the servers that are named, until ^C. ADDR is a loopback address, 127.0.0.1, unless
    /// there are --tls-cert and --read-token
    #[arg(long, value_name = "ADDR:PORT", value_parser = address,
          conflicts_with_all = ["once", "json", "every", "metrics"])]
    serve: Option<SocketAddr>,
    /// With --serve: show another machine, too, whose dashboard is at this URL, or a memory server and
    /// its tenants, whose metrics (`farfield serve --metrics`) are at this URL
    #[arg(long, value_name = "URL", requires = "serve")]
    join: Vec<String>,
    /// With --join https://…: certificates of the authorities that vouch for those (PEM)
    #[arg(long, value_name = "FILE", requires = "join")]
    join_ca: Option<std::path::PathBuf>,
    /// With --join https://…: file whose first line is the token that they ask for (their --read-token)
    #[arg(long, value_name = "FILE", requires = "join")]
    join_token: Option<std::path::PathBuf>,
    /// With --serve: let whoever enters the token on the first line of FILE change near budgets and
    /// pools of jobs on the page
    #[arg(long, value_name = "FILE", requires = "serve")]
    allow_changes: Option<std::path::PathBuf>,
    /// With --serve: certificate for https:// (PEM, as `farfield cert server` makes it). It and the tokens of
    /// --read-token and --allow-changes are read again on SIGHUP
    #[arg(long, value_name = "FILE", requires_all = ["serve", "tls_key"])]
    tls_cert: Option<std::path::PathBuf>,
    /// With --tls-cert: its key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<std::path::PathBuf>,
    /// With --serve: only whoever knows the token on the first line of FILE may read. Browsers ask for
    /// it as a password, with any user name
    #[arg(long, value_name = "FILE", requires = "serve")]
    read_token: Option<std::path::PathBuf>,
    /// File whose first line is the token for the memory servers [default: the variable FARFIELD_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<std::path::PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  farfield top                              All jobs and heaps of this user
  farfield top 4711                         The job that process 4711 belongs to
  farfield top tcp://big:7400               A memory server
  farfield top --metrics 127.0.0.1:7402     All jobs, heaps and nodes, for Prometheus
  farfield top --serve 127.0.0.1:7404       The same in a browser, at http://127.0.0.1:7404/
  farfield top --serve 127.0.0.1:7404 --join http://127.0.0.1:7405
                                            And another machine (ssh -N -L 7405:127.0.0.1:7404 node1)
  farfield top --serve 0.0.0.0:7404 --tls-cert big.pem --tls-key big.key --read-token token
                                            For other machines, at https://big:7404/
  farfield top --once --json 4711 | jq .jobs[0].near_bytes";

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("between 0.05 and 3600 seconds".into()),
    }
}

/// Prints the view once, or until interrupted.
pub(crate) fn run(args: TopArgs) -> ExitCode {
    crate::finish(show(args))
}

fn show(args: TopArgs) -> anyhow::Result<()> {
    if let Some(address) = args.metrics {
        return metrics::serve(address);
    }
    #[cfg(feature = "otlp")]
    if let Some(url) = &args.otlp {
        return otlp::export(url, Duration::from_secs_f64(args.every));
    }
    let token = crate::token::read(args.token_file.as_deref())?;
    if let Some(address) = args.serve {
        return dashboard::serve(address, &args, token);
    }
    let mut view = View::open(&args.targets, token)?;
    let live = std::io::stdout().is_terminal() && !args.once && !args.json;
    loop {
        let snapshot = view.read()?;
        let mut out = std::io::stdout().lock();
        let text = match args.json {
            true => serde_json::to_string(&snapshot)? + "\n",
            false => render(&snapshot),
        };
        // The cursor goes to the top left and the screen is cleared in one write, so it does not
        // flicker.
        let written = match live {
            true => write!(out, "\x1b[H\x1b[2J{text}"),
            false => write!(out, "{text}"),
        };
        if written.and_then(|()| out.flush()).is_err() {
            return Ok(()); // Nobody reads any more.
        }
        drop(out);
        let lives = snapshot.jobs.iter().any(|job| job.alive) || snapshot.heaps.iter().any(|heap| heap.alive);
        if args.once || view.servers.is_empty() && !lives {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs_f64(args.every));
    }
}

/// Jobs, heaps and servers to watch.
struct View {
    jobs: Vec<JobView>,
    heaps: Vec<HeapView>,
    servers: Vec<ServerView>,
}

struct JobView {
    runner: u32,
    /// Start of the runner, which tells it from a later process with its pid.
    start_ticks: Option<u64>,
    command: String,
    control: ControlBlock,
    servers: Vec<ServerView>,
    before: Option<PreviousReading>,
}

/// The previous reading, from which rates are computed.
struct PreviousReading {
    at: Instant,
    totals: JobTotals,
    processes: BTreeMap<u32, Vec<(&'static str, u64)>>,
}

struct ServerView {
    url: String,
    server: StatClient,
    before: Option<(Instant, ServerStats)>,
}

impl View {
    fn open(targets: &[String], token: Vec<u8>) -> anyhow::Result<View> {
        let mut view = View { jobs: Vec::new(), heaps: Vec::new(), servers: Vec::new() };
        for target in targets {
            match target.parse::<u32>() {
                Ok(pid) => {
                    let heaps = HeapView::find(pid);
                    match find_control(pid) {
                        Ok(job) => view.jobs.push(JobView::open(job)),
                        Err(error) if heaps.is_empty() || error.kind() != ErrorKind::NotFound => {
                            return Err(error.into());
                        }
                        Err(_) => {}
                    }
                    view.heaps.extend(heaps);
                }
                Err(_) => view.servers.push(ServerView::open(target, token.clone(), None)?),
            }
        }
        if targets.is_empty() {
            view = View::of_all(JobView::open);
            anyhow::ensure!(
                !view.jobs.is_empty() || !view.heaps.is_empty(),
                "no job of this user runs under `farfield run`, and no heap has a name; name a process or the URL of a \
                 memory server"
            );
        }
        Ok(view)
    }

    /// Opens all jobs and heaps of this user.
    fn of_all(open: fn((u32, ControlBlock)) -> JobView) -> View {
        let jobs = find_jobs().into_iter().map(open).collect();
        View { jobs, heaps: HeapView::find_all(), servers: Vec::new() }
    }

    fn read(&mut self) -> anyhow::Result<TopSnapshot> {
        Ok(TopSnapshot {
            machine: machine_name(),
            tenants: Vec::new(),
            jobs: self.jobs.iter_mut().map(JobView::read).collect(),
            heaps: self.heaps.iter_mut().map(HeapView::read).collect(),
            servers: self.servers.iter_mut().map(ServerView::read).collect::<anyhow::Result<_>>()?,
        })
    }
}

impl ServerView {
    fn open(url: &str, token: Vec<u8>, server_uid: Option<u32>) -> anyhow::Result<ServerView> {
        Ok(ServerView { url: url.into(), server: StatClient::new(url, token, server_uid)?, before: None })
    }

    fn read(&mut self) -> anyhow::Result<ServerRow> {
        let answer = self.server.ask()?;
        let now = Instant::now();
        // The counters of another incarnation started again at zero.
        let before = self.before.take().filter(|(_, before)| before.incarnation == answer.incarnation);
        let uptime = Duration::from_millis(answer.numbers["uptime_ms"]);
        let rate = |name: &str| match &before {
            None => per_second(answer.numbers[name], uptime),
            Some((at, before)) => per_second(answer.numbers[name].saturating_sub(before.numbers[name]), now - *at),
        };
        let row = ServerRow {
            url: self.url.clone(),
            error: None,
            // Hexadecimal, because most JSON readers would lose digits of such a number.
            incarnation: format!("{:016x}", answer.incarnation),
            read_pages_per_s: rate("read_pages"),
            written_pages_per_s: rate("written_pages"),
            numbers: answer.numbers.iter().map(|(name, value)| (Cow::Borrowed(*name), *value)).collect(),
        };
        self.before = Some((now, answer));
        Ok(row)
    }

    /// Reads the server of a job. Unlike `read`, returns an error as a row: the job is worth seeing
    /// even if its server is gone.
    fn read_or_say(&mut self) -> ServerRow {
        self.read().unwrap_or_else(|error| ServerRow {
            url: self.url.clone(),
            error: Some(format!("{error:#}")),
            ..ServerRow::default()
        })
    }
}

#[derive(serde::Serialize, serde::Deserialize, Default, Debug)]
struct TopSnapshot {
    machine: String,
    /// Tenants of a memory server whose metrics are read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tenants: Vec<TenantRow>,
    jobs: Vec<JobRow>,
    heaps: Vec<HeapRow>,
    servers: Vec<ServerRow>,
}

/// Numbers by name.
type NamedNumbers = BTreeMap<Cow<'static, str>, u64>;

#[derive(Clone, serde::Serialize, serde::Deserialize, Default, Debug)]
struct ServerRow {
    url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    incarnation: String,
    read_pages_per_s: f64,
    written_pages_per_s: f64,
    #[serde(flatten)]
    numbers: NamedNumbers,
}

/// A tenant of a memory server.
#[derive(serde::Serialize, serde::Deserialize, Default, Debug)]
struct TenantRow {
    server: String,
    name: String,
    used_bytes: u64,
    quota_bytes: Option<u64>,
}

#[derive(serde::Serialize, serde::Deserialize, Debug)]
struct JobRow {
    runner_pid: u32,
    command: String,
    /// Whether the runner is still alive.
    alive: bool,
    near_limit_bytes: u64,
    /// Most that the budget may be, and least that may be offered.
    near_offer_bytes: u64,
    near_least_bytes: u64,
    near_bytes: u64,
    near_peak_bytes: u64,
    /// Part of the near bytes that holds Farfield's own tables and buffers.
    meta_bytes: u64,
    far_bytes: u64,
    far_peak_bytes: u64,
    faults_per_s: f64,
    fault_ns_p50: Option<u64>,
    fault_ns_p99: Option<u64>,
    /// Share of the prefetched pages that were used, since the start.
    prefetch_accuracy: Option<f64>,
    counters: NamedNumbers,
    pool: PoolRow,
    processes: Vec<ProcessRow>,
    servers: Vec<ServerRow>,
}

#[derive(serde::Serialize, serde::Deserialize, Debug)]
struct ProcessRow {
    pid: u32,
    command: String,
    state: Cow<'static, str>,
    near_bytes: i64,
    meta_bytes: i64,
    far_bytes: i64,
    faults_per_s: f64,
    pages_in_per_s: f64,
    pages_out_per_s: f64,
    fault_ns_p50: Option<u64>,
    fault_ns_p99: Option<u64>,
    prefetch_accuracy: Option<f64>,
}

impl JobView {
    fn open(job: (u32, ControlBlock)) -> JobView {
        let mut view = JobView::without_servers(job);
        let (urls, token) = view.control.config().first.read();
        let open = |url: &str| ServerView::open(url, token.clone(), Some(view.uid())).ok();
        view.servers = urls.iter().flat_map(|url| servers_of(url)).filter_map(open).collect();
        view
    }

    /// Opens a job whose servers are not asked.
    fn without_servers((runner, control): (u32, ControlBlock)) -> JobView {
        let start_ticks = start_ticks(runner);
        JobView { runner, start_ticks, command: command_line(runner), control, servers: Vec::new(), before: None }
    }

    /// Returns the user of the job's runner.
    fn uid(&self) -> u32 {
        self.control.config().runner_uid.load(Ordering::Relaxed)
    }

    /// Checks whether the job's runner is still there.
    fn is_alive(&self) -> bool {
        self.start_ticks.is_some() && start_ticks(self.runner) == self.start_ticks
    }

    fn read(&mut self) -> JobRow {
        let now = Instant::now();
        let totals = JobTotals::read(&self.control);
        let since_last = self.before.as_ref().map(|before| now - before.at);
        let (mut processes, mut seen) = (Vec::new(), BTreeMap::new());
        let taken = (self.control.processes.load(Ordering::Acquire) as usize).min(SLOTS);
        for slot in &self.control.slots[..taken] {
            let pid = slot.process();
            if pid == 0 {
                continue;
            }
            let named = slot.counters.named();
            let count = |name: &str| value(&named, name);
            let earlier = self.before.as_ref().and_then(|before| before.processes.get(&pid));
            let rate = |name: &str| match (since_last, earlier) {
                (Some(since), Some(earlier)) => per_second(count(name).saturating_sub(value(earlier, name)), since),
                _ => age(pid).map_or(0.0, |age| per_second(count(name), age)),
            };
            let fault_ns = std::array::from_fn(|index| slot.counters.fault_ns[index].load(Ordering::Relaxed));
            processes.push(ProcessRow {
                pid,
                command: name_of(pid),
                state: Cow::Borrowed(state_name(slot.state.load(Ordering::Relaxed))),
                near_bytes: believed(&slot.near_bytes),
                meta_bytes: believed(&slot.meta_bytes),
                far_bytes: believed(&slot.far_bytes),
                faults_per_s: rate("faults"),
                pages_in_per_s: rate("pages_in"),
                pages_out_per_s: rate("pages_out"),
                fault_ns_p50: quantile_ns(&fault_ns, 1, 2),
                fault_ns_p99: quantile_ns(&fault_ns, 99, 100),
                prefetch_accuracy: part(count("prefetch_hits"), count("prefetched")),
            });
            seen.insert(pid, named);
        }
        let before = self.before.as_ref().map(|before| &before.totals);
        let recent = totals.fault_ns_since(before);
        let faults = totals.count("faults");
        let faults_per_s = match (before, since_last) {
            (Some(before), Some(since)) => per_second(faults.saturating_sub(before.count("faults")), since),
            _ => age(self.runner).map_or(0.0, |age| per_second(faults, age)),
        };
        let near = NearStatus::read(&self.control);
        let row = JobRow {
            runner_pid: self.runner,
            command: self.command.clone(),
            alive: self.is_alive(),
            near_limit_bytes: totals.near_limit_bytes,
            near_offer_bytes: near.near_offer_bytes,
            near_least_bytes: near.near_least_bytes,
            near_bytes: totals.near_bytes,
            near_peak_bytes: totals.near_peak_bytes,
            meta_bytes: believed(&self.control.meta_bytes).max(0) as u64,
            far_bytes: totals.far_bytes,
            far_peak_bytes: totals.far_peak_bytes,
            faults_per_s,
            fault_ns_p50: quantile_ns(&recent, 1, 2),
            fault_ns_p99: quantile_ns(&recent, 99, 100),
            prefetch_accuracy: part(totals.count("prefetch_hits"), totals.count("prefetched")),
            counters: totals.counters.iter().map(|(name, value)| (Cow::Borrowed(*name), *value)).collect(),
            pool: PoolRow::read(&self.control),
            processes,
            servers: self.servers.iter_mut().map(ServerView::read_or_say).collect(),
        };
        self.before = Some(PreviousReading { at: now, totals, processes: seen });
        row
    }
}

fn value(counters: &[(&'static str, u64)], name: &str) -> u64 {
    counters.iter().find(|(this, _)| *this == name).map_or(0, |(_, value)| *value)
}

fn per_second(count: u64, since: Duration) -> f64 {
    count as f64 / since.as_secs_f64().max(1e-3)
}

/// Returns the time since a process started, or `None` if it is gone.
pub(crate) fn age(pid: u32) -> Option<Duration> {
    /// Clock ticks per second in `/proc`, on every x86-64.
    const TICKS_PER_S: f64 = 100.0;
    let started = start_ticks(pid)? as f64;
    let now: f64 = std::fs::read_to_string("/proc/uptime").ok()?.split(' ').next()?.parse().ok()?;
    Some(Duration::from_secs_f64((now - started / TICKS_PER_S).max(0.0)))
}

/// Returns the time at which a process started, in clock ticks since the machine did, or `None` if
/// it is gone.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields are counted from behind the name, which may contain any character. State is the third
    // field, start time the 22nd.
    stat.rsplit(')').next()?.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Returns the name of this machine.
fn machine_name() -> String {
    printable(std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end())
}

fn part(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Returns the command line of a process, as one line without control characters.
pub(crate) fn command_line(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    printable(&String::from_utf8_lossy(bytes.strip_suffix(b"\0").unwrap_or(&bytes)).replace('\0', " "))
}

fn name_of(pid: u32) -> String {
    printable(std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end())
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn render(snapshot: &TopSnapshot) -> String {
    let mut text = String::new();
    for job in &snapshot.jobs {
        render_job(job, &mut text);
    }
    for heap in &snapshot.heaps {
        heaps::render(heap, &mut text);
    }
    for server in &snapshot.servers {
        let _ = writeln!(text, "server {}  incarnation {}", server.url, server.incarnation);
        let (reads, writes) =
            (CompactCount(server.read_pages_per_s as u64), CompactCount(server.written_pages_per_s as u64));
        let _ = writeln!(text, "  {reads} pages read/s, {writes} pages written/s");
        for (name, value) in &server.numbers {
            let shown = match name.rsplit_once('_') {
                Some((_, "bytes")) => ByteSize(*value).to_string(),
                Some((_, "ms")) => Latency(Some(value.saturating_mul(1_000_000))).to_string(),
                _ => CompactCount(*value).to_string(),
            };
            let _ = writeln!(text, "  {name:<16} {shown:>12}");
        }
    }
    text
}

/// Most columns of a line for people.
const COLUMNS: usize = 80;

/// Cuts a line to [`COLUMNS`].
fn cut(line: &str) -> String {
    line.chars().take(COLUMNS).collect()
}

/// Writes short texts, as many on a line as fit there.
fn write_parts(text: &mut String, parts: &[String]) {
    let mut line = String::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        let is_full = line.chars().count() + 3 + part.chars().count() > COLUMNS;
        if !line.is_empty() && is_full {
            let _ = writeln!(text, "{line}");
            line.clear();
        }
        line += if line.is_empty() { "  " } else { "   " };
        line += part;
    }
    let _ = writeln!(text, "{line}");
}

fn render_job(job: &JobRow, text: &mut String) {
    let line = format!("job {}{}  {}", job.runner_pid, if job.alive { "" } else { "  (ended)" }, job.command);
    // Writing into a string cannot fail.
    let _ = writeln!(text, "{}", cut(&line));
    let count = |name: &str| CompactCount(job.counters.get(name).copied().unwrap_or(0));
    let parts = [
        format!(
            "near {} of {} (peak {}, tables {})",
            ByteSize(job.near_bytes),
            ByteSize(job.near_limit_bytes),
            ByteSize(job.near_peak_bytes),
            ByteSize(job.meta_bytes),
        ),
        format!("offered {}, least {}", ByteSize(job.near_offer_bytes), ByteSize(job.near_least_bytes)),
        format!("far {} (peak {})", ByteSize(job.far_bytes), ByteSize(job.far_peak_bytes)),
        format!("{} pages in, {} out", count("pages_in"), count("pages_out")),
        format!(
            "{} faults ({}/s, p50 {}, p99 {})",
            count("faults"),
            CompactCount(job.faults_per_s as u64),
            Latency(job.fault_ns_p50),
            Latency(job.fault_ns_p99),
        ),
        format!("prefetch {}", percent(job.prefetch_accuracy)),
    ];
    write_parts(text, &parts);
    for server in &job.servers {
        let _ = writeln!(text, "  server {}", server.url);
        let _ = writeln!(text, "{}", cut(&format!("    {}", server_line(server))));
    }
    if let Some(protected) = job.pool.protected() {
        let _ = writeln!(text, "  {protected}");
    }
    let _ = writeln!(
        text,
        "{:>7} {:<7} {:>7} {:>7} {:>8} {:>6} {:>6} {:>8} COMMAND",
        "PID", "STATE", "NEAR", "FAR", "FAULTS/S", "IN/S", "OUT/S", "P99"
    );
    let bytes = |bytes: i64| format!("{:#}", ByteSize(bytes.max(0) as u64));
    for process in &job.processes {
        let line = format!(
            "{:>7} {:<7} {:>7} {:>7} {:>8} {:>6} {:>6} {:>8} {}",
            process.pid,
            process.state,
            bytes(process.near_bytes.saturating_add(process.meta_bytes)),
            bytes(process.far_bytes),
            CompactCount(process.faults_per_s as u64).to_string(),
            CompactCount(process.pages_in_per_s as u64).to_string(),
            CompactCount(process.pages_out_per_s as u64).to_string(),
            Latency(process.fault_ns_p99).to_string(),
            process.command,
        );
        let _ = writeln!(text, "{}", cut(&line));
    }
}

/// Describes a server of a job in one line.
fn server_line(server: &ServerRow) -> String {
    if let Some(error) = &server.error {
        return printable(error);
    }
    let number = |name: &str| server.numbers.get(name).copied().unwrap_or(0);
    format!(
        "{:#} of {:#}, {} pages read/s, {} written/s, {} connections",
        ByteSize(number("used_bytes")),
        ByteSize(number("capacity_bytes")),
        CompactCount(server.read_pages_per_s as u64),
        CompactCount(server.written_pages_per_s as u64),
        CompactCount(number("connections")),
    )
}

fn percent(part: Option<f64>) -> String {
    part.map_or("-".into(), |part| format!("{:.0} %", part * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_cannot_write_to_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a?[2Jb?c");
    }

    pub(super) fn numbers<const N: usize>(named: [(&'static str, u64); N]) -> NamedNumbers {
        named.into_iter().map(|(name, value)| (Cow::Borrowed(name), value)).collect()
    }

    /// A job with the widest numbers that there can be.
    pub(super) fn wide_job() -> JobRow {
        let most = u64::MAX;
        JobRow {
            runner_pid: 4_194_304,
            command: "x".repeat(200),
            alive: false,
            near_limit_bytes: 1023 << 30,
            near_offer_bytes: 1023 << 30,
            near_least_bytes: 1023 << 30,
            near_bytes: 1023 << 30,
            near_peak_bytes: 1023 << 30,
            meta_bytes: 1023 << 20,
            far_bytes: 1023 << 30,
            far_peak_bytes: 1023 << 30,
            faults_per_s: 999_900.0,
            fault_ns_p50: Some(999_900),
            fault_ns_p99: Some(999_900_000),
            prefetch_accuracy: Some(1.0),
            counters: numbers([("faults", most), ("pages_in", 999_900_000), ("pages_out", 999_900_000)]),
            pool: PoolRow::default(),
            processes: vec![ProcessRow {
                pid: 4_194_304,
                command: "a-name-of-fifte".into(),
                state: "dormant".into(),
                near_bytes: 1000 << 30,
                meta_bytes: 23 << 30,
                far_bytes: 1023 << 30,
                faults_per_s: 999_900.0,
                pages_in_per_s: 999_900.0,
                pages_out_per_s: 999_900.0,
                fault_ns_p50: Some(999_900),
                fault_ns_p99: Some(999_900),
                prefetch_accuracy: Some(1.0),
            }],
            servers: vec![ServerRow {
                url: "tcp://127.0.0.1:7400".into(),
                error: None,
                incarnation: String::new(),
                read_pages_per_s: 999_900.0,
                written_pages_per_s: 999_900.0,
                numbers: numbers([("used_bytes", 1023 << 30), ("capacity_bytes", 1023 << 30), ("connections", 9999)]),
            }],
        }
    }

    #[test]
    fn rows_of_jobs_fit_80_columns_and_show_whole_commands() {
        let mut text = String::new();
        render_job(&wide_job(), &mut text);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert_eq!(widest, Some(COLUMNS), "{text}");
        assert!(text.contains(" a-name-of-fifte\n") && text.contains("9999 connections\n"), "{text}");
    }

    #[test]
    fn processes_have_an_age() {
        let old = age(std::process::id()).unwrap();
        assert!(old < age(1).unwrap() + Duration::from_millis(10), "nobody is older than the first: {old:?}");
        assert_eq!(age(u32::MAX), None);
    }

    #[test]
    fn refresh_times_are_sane() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for wrong in ["0", "-1", "nan", "inf", "x", "4000"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
