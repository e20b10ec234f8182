//! Pages that look at many jobs: what `farfield top --serve` takes, and how soon a page shows all jobs.
//!
//! The jobs are real ones, of a program whose numbers change each second, at one memory server. A page is what the page of the
//! dashboard does: it keeps the stream of events open and asks for the history every five seconds. Without a browser a page is
//! seen when it, its script, its style sheet and all rows have arrived.

use crate::child::{Beside, Interrupted};
use crate::job::{Job, binary};
use crate::line::Sample;
use crate::server::{Server, cpu_seconds_of};
use crate::sys;
use crate::workload::Phase;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often a page asks for the history.
const HISTORY_EVERY: Duration = Duration::from_secs(5);
/// How long one answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// How long all jobs may take until the dashboard shows them.
const JOBS_WITHIN: Duration = Duration::from_secs(240);
/// How long programs run at most, if nobody ends them.
const TICKS: &str = "3600";

/// Starts `--ops` jobs, opens `--threads` pages if anybody is to look, and watches for `--passes` seconds.
pub(crate) fn sample_of(is_seen: bool, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "ticks", "the workload {} is nothing to look at", job.workload.name);
    let [jobs, pages, seconds] = ["--ops", "--threads", "--passes"].map(|name| argument(job, name));
    let (jobs, pages) = (jobs? as usize, if is_seen { pages? as usize } else { 0 });
    let watched = Duration::from_secs(seconds?);
    let server = Server::of_jobs(job, jobs)?;
    let mut running = Vec::with_capacity(jobs);
    for _ in 0..jobs {
        let mut command = Command::new(binary(job)?);
        command.args(["run", "--quiet", "--near", &format!("{}B", job.near_bytes), "--far", &server.url, "--"]);
        command.arg(job.program).args(["--passes", TICKS, "--data-mib", &(job.data_bytes >> 20).to_string()]);
        running.push(Beside::start(command, job.scratch)?);
    }
    // A dashboard looks for new jobs the more rarely, the busier the machine is.
    wait_until("all jobs run", || Ok(jobs_here(job)? >= jobs))?;
    let dashboard = Dashboard::start(job)?;
    wait_until("all jobs are shown", || Ok(dashboard.job_rows()? >= jobs))?;
    running.iter_mut().try_for_each(Beside::ensure_runs)?;

    let (is_over, bytes) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (mut figures, mut first_s) = (BTreeMap::new(), 0.0);
    std::thread::scope(|scope| -> Result<()> {
        for _ in 0..pages {
            scope.spawn(|| bytes.fetch_add(dashboard.read_events(&is_over), Ordering::Relaxed));
        }
        let mut watch = || -> Result<()> {
            let (began, before) = (Instant::now(), cpu_seconds_of(dashboard.0.id()));
            let mut asks_at = began;
            wait_within("the time is over", watched + ANSWER_WITHIN, || {
                if Instant::now() >= asks_at {
                    asks_at += HISTORY_EVERY;
                    for _ in 0..pages {
                        dashboard.get("/api/history?id=&since=0")?;
                    }
                }
                Ok(began.elapsed() >= watched)
            })?;
            let share = (cpu_seconds_of(dashboard.0.id()) - before) / began.elapsed().as_secs_f64();
            figures.insert("processor_percent".to_owned(), 100.0 * share);
            let began = Instant::now();
            for path in ["/", "/page.css", "/page.js"] {
                dashboard.get(path)?;
            }
            ensure!(dashboard.job_rows()? >= jobs, "a page does not show all jobs");
            first_s = began.elapsed().as_secs_f64();
            Ok(())
        };
        let result = watch();
        is_over.store(true, Ordering::Relaxed);
        result
    })?;
    running.iter_mut().try_for_each(Beside::ensure_runs).context("while it was looked at")?;
    figures.insert("first_picture_ms".to_owned(), first_s * 1e3);
    if pages > 0 {
        let each = bytes.into_inner() as f64 / pages as f64 / watched.as_secs_f64();
        figures.insert("bytes_per_s".to_owned(), each);
    }
    let phase = Phase {
        name: job.workload.phase.into(),
        ops: 1,
        seconds: first_s,
        cpu_seconds: 0.0,
        faults_major: 0,
        faults_minor: 0,
    };
    Ok(Sample { ns_per_op: phase.ns_per_op(), ops: 1, checksum: String::new(), phases: vec![phase], figures })
}

/// A number among the arguments of the program.
fn argument(job: &Job<'_>, name: &str) -> Result<u64> {
    let at = job.arguments.iter().position(|word| word == name);
    let value = at.and_then(|at| job.arguments.get(at + 1)).with_context(|| format!("{name} is missing"))?;
    value.parse().with_context(|| format!("{name} {value}"))
}

/// Counts the jobs of this user on this machine.
fn jobs_here(job: &Job<'_>) -> Result<usize> {
    let output = Command::new(binary(job)?).args(["top", "--once", "--json"]).output()?;
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).context("farfield top printed no JSON")?;
    Ok(all["jobs"].as_array().map_or(0, Vec::len))
}

fn wait_until(what: &str, is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_within(what, JOBS_WITHIN, is_so)
}

fn wait_within(what: &str, within: Duration, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + within;
    while !is_so()? {
        if let Some(signal) = sys::stop_signal() {
            return Err(Interrupted(signal).into());
        }
        ensure!(Instant::now() < deadline, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// A `farfield top --serve`, and where it listens.
struct Dashboard(Child, String);

impl Dashboard {
    fn start(job: &Job<'_>) -> Result<Dashboard> {
        let mut command = Command::new(binary(job)?);
        command
            .args(["top", "--serve", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start farfield top")?;
        let mut line = String::new();
        let read = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        let dashboard = Dashboard(child, line.trim().trim_start_matches("http://").trim_end_matches('/').to_owned());
        ensure!(matches!(read, Some(Ok(1..))), "farfield top --serve said nothing");
        Ok(dashboard)
    }

    fn connect(&self, path: &str) -> Result<BufReader<TcpStream>> {
        let stream = TcpStream::connect(&self.1).context("the dashboard does not answer")?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        let close = if path == "/events" { "" } else { "Connection: close\r\n" };
        write!(&stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n{close}\r\n", self.1)?;
        Ok(BufReader::new(stream))
    }

    /// Reads all of an answer.
    fn get(&self, path: &str) -> Result<()> {
        let mut answer = Vec::new();
        self.connect(path)?.read_to_end(&mut answer)?;
        ensure!(answer.starts_with(b"HTTP/1.1 200 "), "{path} was refused");
        Ok(())
    }

    /// Reads the first event, which has all rows, and counts those of jobs.
    fn job_rows(&self) -> Result<usize> {
        let mut stream = self.connect("/events")?;
        let mut line = || -> Result<String> {
            let mut line = String::new();
            ensure!(stream.read_line(&mut line)? > 0, "the stream of events ended");
            Ok(line)
        };
        let first = line()?;
        ensure!(first.starts_with("HTTP/1.1 200 "), "events were refused: {}", first.trim());
        while line()? != "\r\n" {}
        let mut event = Vec::new();
        while !event.ends_with(b"\n\n") {
            let mut size = String::new();
            stream.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim(), 16).context("a chunk has no size")?;
            ensure!(size > 0, "the stream of events ended");
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk)?;
            event.extend_from_slice(&chunk[..size]);
        }
        let event = String::from_utf8(event).context("an event is no text")?;
        let data = event.lines().find_map(|line| line.strip_prefix("data: ")).context("an event has no data")?;
        let event: serde_json::Value = serde_json::from_str(data).context("an event is no JSON")?;
        let rows = event["rows"].as_object().context("an event has no rows")?;
        Ok(rows.values().filter(|row| row["kind"] == "job").count())
    }

    /// Reads events as a page does. Returns the number of bytes.
    fn read_events(&self, is_over: &AtomicBool) -> usize {
        let Ok(mut stream) = self.connect("/events") else { return 0 };
        let (mut total, mut piece) = (0, vec![0; 1 << 16]);
        while !is_over.load(Ordering::Relaxed) {
            match stream.read(&mut piece) {
                Ok(count @ 1..) => total += count,
                _ => break,
            }
        }
        total
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
