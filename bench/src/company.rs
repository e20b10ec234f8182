//! Several jobs of `farfield run` at once: two that share a memory server behind a link, or have one each (the *swap wall*); and
//! one beside another that moves as many pages as it can, or beside a tenant that takes as much of one resource as it gets.

use crate::child;
use crate::contender::{Far, server_at};
use crate::job::{Job, binary, heap_on, job_on, job_with};
use crate::line::Sample;
use crate::link::Link;
use crate::overuse::Overuse;
use crate::server::Server;
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Who runs with whom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Company {
    /// One job, behind a link of its own.
    Alone,
    /// Two, behind the same link to the same server.
    Sharing,
    /// Two, each with a link and a server.
    Apart,
    /// One beside a job that floods a server of its own.
    BesideFlood,
    /// One beside a job that floods the same server.
    InFlood,
    /// One beside a job that floods the same server through a link of its own.
    InLinkedFlood,
    /// Two, each with a private server.
    Pair,
    /// One beside a thread that computes.
    BesideLoop,
    /// One beside another tenant, who overuses the same server.
    Overused,
}

/// Near memory and data of the job that floods, and how much of it must have come near before it counts as a flood.
const FLOOD_NEAR: &str = "16M";
const FLOOD_MIB: u64 = 96;
const FLOOD_PAGES: u64 = FLOOD_MIB * 256;
const FLOODS_WITHIN: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(20);

/// Tokens of the job and of the tenant that overuses, and that tenant's quota.
const JOB_TOKEN: &str = "token-of-the-job";
const OVERUSE_TOKEN: &str = "token-of-the-other";
const OVERUSE_QUOTA: &str = "64M";

/// One sample; of two jobs the time is what an operation takes when those of both are counted.
pub(crate) fn sample(company: Company, job: &Job<'_>) -> Result<Sample> {
    match company {
        Company::Alone => {
            let place = Place::new(1, job)?;
            let mut sample = job_on(Some(&place.link.url), job)?;
            sample.figures.insert("server_cpu_s".into(), place.server.cpu_seconds());
            Ok(sample)
        }
        Company::Sharing => two(&[Place::new(2, job)?], job),
        Company::Apart => two(&[Place::new(1, job)?, Place::new(1, job)?], job),
        Company::Pair => at_once(job, |_, job| job_on(None, job)),
        Company::BesideFlood => beside(false, false, job),
        Company::InFlood => beside(true, false, job),
        Company::InLinkedFlood => beside(true, true, job),
        Company::BesideLoop => beside_loop(job),
        Company::Overused => overused(job),
    }
}

/// A server behind a link.
struct Place {
    link: Link,
    server: Server,
}

impl Place {
    /// With room for so many jobs.
    fn new(jobs: u64, job: &Job<'_>) -> Result<Place> {
        let bytes_per_s = job.link_bytes_per_s.context("the parameter link_mib is missing")?;
        let server = server_at(Far::Tcp, "server", &Job { data_bytes: jobs * job.data_bytes, ..*job })?;
        Ok(Place { link: Link::to(&server.url, bytes_per_s)?, server })
    }
}

fn two(places: &[Place], job: &Job<'_>) -> Result<Sample> {
    let mut both = at_once(job, |index, job| job_on(Some(&places[index % places.len()].link.url), job))?;
    both.figures.insert("server_cpu_s".into(), places.iter().map(|place| place.server.cpu_seconds()).sum());
    Ok(both)
}

/// Two programs at once with their data in far heaps of that plane, at one server that shares its memory with them.
pub(crate) fn two_heaps(plane: &str, job: &Job<'_>) -> Result<Sample> {
    let server = server_at(Far::Private, "server", &Job { data_bytes: 2 * job.data_bytes, ..*job })?;
    let mut both = at_once(job, |_, job| heap_on(&server.url, plane, &[], job))?;
    both.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    Ok(both)
}

/// Runs two at once, each in a folder of its own.
fn at_once(job: &Job<'_>, run: impl Fn(usize, &Job<'_>) -> Result<Sample> + Sync) -> Result<Sample> {
    let mut both = each_at_once(&[0, 1], job, |index, job| run(*index, job)).into_iter();
    let mut next = || both.next().context("two programs ran")?;
    together(next()?, next()?)
}

/// Runs one for each of these at once, in folders of their own.
pub(crate) fn each_at_once<T: Sync, R: Send>(
    of: &[T],
    job: &Job<'_>,
    run: impl Fn(&T, &Job<'_>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let one = |index: usize, of: &T| {
        let folder = job.scratch.join(format!("job-{index}"));
        fs::create_dir_all(&folder)?;
        run(of, &Job { scratch: &folder, ..*job })
    };
    thread::scope(|scope| {
        let threads: Vec<_> = of.iter().enumerate().map(|(index, of)| scope.spawn(move || one(index, of))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

/// Throughputs add up. Of the other figures the mean, but of limits the worse.
pub(crate) fn together(first: Sample, second: Sample) -> Result<Sample> {
    ensure!(first.checksum == second.checksum, "the two jobs did not find the same");
    let (a, b) = (first.ns_per_op, second.ns_per_op);
    let mut both = first;
    both.ns_per_op = a * b / (a + b);
    both.ops += second.ops;
    for (name, other) in &second.figures {
        both.figures.entry(name.clone()).and_modify(|own| {
            *own = if name == "near_peak_over_limit" { own.max(*other) } else { (*own + other) / 2.0 };
        });
    }
    both.figures.insert("slower_over_faster".into(), a.max(b) / a.min(b));
    Ok(both)
}

/// Runs a job beside one that floods: the same server or another, as fast as it can or through a link.
fn beside(is_same: bool, is_linked: bool, job: &Job<'_>) -> Result<Sample> {
    // Each has room for both.
    let both = Job { data_bytes: job.data_bytes + (FLOOD_MIB << 20), ..*job };
    let server = server_at(Far::Tcp, "server", &both)?;
    let other = (!is_same).then(|| server_at(Far::Tcp, "other", &both)).transpose()?;
    let url = other.as_ref().map_or(&server.url, |other| &other.url);
    let flood = Flood::start(&if is_linked { linked(url, job)? } else { url.clone() }, job)?;
    let mut sample = job_on(Some(&server.url), job)?;
    sample.figures.insert("flood_pages_per_s".into(), flood.end()?);
    sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    Ok(sample)
}

/// Returns the URL of that server through a link of the job's bandwidth, which takes no processor.
fn linked(url: &str, job: &Job<'_>) -> Result<String> {
    let bytes_per_s = job.link_bytes_per_s.context("the parameter link_mib is missing")?;
    Ok(format!("throttle(bandwidth={bytes_per_s},{url})"))
}

/// A job that shares the processors of this machine with a thread that computes.
fn beside_loop(job: &Job<'_>) -> Result<Sample> {
    let server = server_at(Far::Tcp, "server", job)?;
    let folder = job.scratch.join("loop");
    fs::create_dir_all(&folder)?;
    // If this process is killed, the loop ends when the time of a sample is over.
    let mut command = Command::new("timeout");
    command.args([&job.patience.as_secs().to_string(), "sh", "-c", "while :; do :; done"]);
    let mut busy = child::Beside::start(command, &folder)?;
    let sample = job_on(Some(&server.url), job)?;
    busy.ensure_runs()?;
    Ok(sample)
}

/// A job, and another tenant, who overuses its server.
fn overused(job: &Job<'_>) -> Result<Sample> {
    let kind = job.overuse.context("the parameter overuse is missing")?;
    let tokens = private_file(job, "tokens", &format!("job {JOB_TOKEN} -\nother {OVERUSE_TOKEN} {OVERUSE_QUOTA}\n"))?;
    let token = private_file(job, "token", JOB_TOKEN)?;
    let server = Server::with_tenants(job, &tokens)?;
    let mut overuse = start_overuse(kind, &server.url, job)?;
    let options = ["--far", &server.url, "--token-file"].map(OsString::from).into_iter().chain([token.into()]);
    let mut sample = job_with(&options.collect::<Vec<_>>(), job)?;
    overuse.ensure_runs()?;
    sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    sample.figures.insert("server_private_bytes".into(), server.private_bytes() as f64);
    Ok(sample)
}

fn private_file(job: &Job<'_>, name: &str, text: &str) -> Result<PathBuf> {
    let path = job.scratch.join(name);
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path)
}

/// Starts a tenant that overuses the server at `url`, and waits until all its connections have been answered.
fn start_overuse(kind: Overuse, url: &str, job: &Job<'_>) -> Result<child::Beside> {
    let folder = job.scratch.join("overuse");
    fs::create_dir_all(&folder)?;
    let ready = folder.join("ready");
    fs::remove_file(&ready).ok();
    // The lowest priority: elsewhere it would have a machine of its own.
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(std::env::current_exe().context("cannot find this program")?);
    command.args(["overuse", "--url", url, "--token", OVERUSE_TOKEN, "--of", &kind.name(), "--ready"]).arg(&ready);
    let mut overuse = child::Beside::start(command, &folder)?;
    while !ready.exists() {
        overuse.ensure_runs()?;
        thread::sleep(LOOK);
    }
    Ok(overuse)
}

/// A job that reads and writes in order, for ever.
struct Flood<'a> {
    child: child::Beside,
    job: &'a Job<'a>,
    started: Instant,
    /// What it had brought near by then.
    pages: u64,
}

impl<'a> Flood<'a> {
    /// Runs when its pages come back.
    fn start(url: &str, job: &'a Job<'a>) -> Result<Flood<'a>> {
        let folder = job.scratch.join("flood");
        fs::create_dir_all(&folder)?;
        let (program, _) = Workload::named("stream")?.make(&folder)?;
        let mut command = Command::new(binary(job)?);
        command.args(["run", "--quiet", "--near", FLOOD_NEAR, "--far", url, "--"]).arg(program);
        command.args(["--passes", "1000000000", "--data-mib", &FLOOD_MIB.to_string()]);
        let child = child::Beside::start(command, &folder)?;
        let mut flood = Flood { child, job, started: Instant::now(), pages: 0 };
        let deadline = Instant::now() + FLOODS_WITHIN;
        while flood.pages < FLOOD_PAGES {
            ensure!(Instant::now() < deadline, "the job that floods did not begin within {FLOODS_WITHIN:?}");
            flood.child.ensure_runs()?;
            thread::sleep(LOOK);
            flood.pages = flood.pages_in().unwrap_or(0);
        }
        flood.started = Instant::now();
        Ok(flood)
    }

    fn pages_in(&self) -> Result<u64> {
        let pid = self.child.pid().to_string();
        let output = Command::new(binary(self.job)?).args(["top", "--once", "--json", &pid]).output()?;
        let top: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        top["jobs"][0]["counters"]["pages_in"].as_u64().context("farfield top shows no such job")
    }

    /// Pages a second that came near meanwhile.
    fn end(mut self) -> Result<f64> {
        let (pages, seconds) = (self.pages_in()?, self.started.elapsed().as_secs_f64());
        self.child.ensure_runs()?;
        Ok((pages - self.pages) as f64 / seconds.max(1e-9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn sample(ns_per_op: f64, checksum: &str, over: f64) -> Sample {
        let figures = [("near_peak_over_limit", over), ("faults", ns_per_op)];
        let figures: BTreeMap<_, _> = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Sample { ns_per_op, ops: 10, checksum: checksum.into(), phases: vec![], figures }
    }

    #[test]
    fn throughputs_add_up_and_nothing_is_hidden() {
        let both = together(sample(30.0, "a", 1.2), sample(60.0, "a", 0.9)).unwrap();
        assert_eq!((both.ns_per_op, both.ops), (20.0, 20));
        assert_eq!(both.figures["near_peak_over_limit"], 1.2);
        assert_eq!((both.figures["faults"], both.figures["slower_over_faster"]), (45.0, 2.0));
        assert!(together(sample(1.0, "a", 1.0), sample(1.0, "b", 1.0)).is_err());
    }
}
