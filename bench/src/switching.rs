//! Programs whose far memory moves from one memory server to another while they run.

use crate::contender::{Far, server_at};
use crate::job::{Job, binary, heap_on, job_on};
use crate::line::Sample;
use crate::server::Server;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(1);

/// A heap that moves to a second server by itself.
pub(crate) fn heap(far: Far, job: &Job<'_>) -> Result<Sample> {
    let [from, to] = servers(far, job)?;
    let mut sample = heap_on(&from.url, "page", &["--to", &to.url], job)?;
    add_servers(&mut sample, [from, to]);
    Ok(sample)
}

/// `farfield run`, and `farfield pool switch` each time the program asks for it: to the second server, and back.
pub(crate) fn run(far: Far, job: &Job<'_>) -> Result<Sample> {
    let [from, to] = servers(far, job)?;
    let folder = job.scratch.join("handshake");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let words = ["--handshake".to_owned(), folder.display().to_string()];
    let arguments: Vec<String> = job.arguments.iter().cloned().chain(words).collect();
    let told = Job { arguments: &arguments, ..*job };
    let is_over = AtomicBool::new(false);
    let sample = std::thread::scope(|scope| {
        let switcher = scope.spawn(|| switch_when_asked(binary(job)?, &folder, [&to.url, &from.url], &is_over));
        let sample = job_on(Some(&from.url), &told);
        is_over.store(true, Ordering::Release);
        let switched = switcher.join().expect("it does not panic");
        // What the program says of a switch that failed is what the command said.
        sample.and_then(|sample| switched.map(|()| sample))
    });
    fs::remove_dir_all(&folder)?;
    let mut sample = sample?;
    add_servers(&mut sample, [from, to]);
    Ok(sample)
}

fn servers(far: Far, job: &Job<'_>) -> Result<[Server; 2]> {
    Ok([server_at(far, "from", job)?, server_at(far, "to", job)?])
}

/// Adds what these servers have spent.
pub(crate) fn add_servers(sample: &mut Sample, servers: [Server; 2]) {
    let seconds: f64 = servers.iter().map(Server::cpu_seconds).sum();
    sample.figures.insert("server_cpu_s".into(), seconds);
}

/// Switches to each of these pools in turn whenever the program asks, until it has ended.
fn switch_when_asked(binary: &Path, folder: &Path, urls: [&str; 2], is_over: &AtomicBool) -> Result<()> {
    let mut switches = 0;
    while let Some(pid) = wait_until_asked(folder, is_over) {
        let url = urls[switches % urls.len()];
        let output = Command::new(binary).args(["pool", "switch", &pid, url]).output().context("farfield pool")?;
        let said = if output.status.success() { "ok".into() } else { String::from_utf8_lossy(&output.stderr) };
        // The program may ask again as soon as it has the answer.
        fs::remove_file(folder.join("begin"))?;
        fs::write(folder.join("end.new"), said.as_ref())?;
        fs::rename(folder.join("end.new"), folder.join("end"))?;
        switches += 1;
    }
    ensure!(switches > 0, "the program never asked for a switch");
    Ok(())
}

/// Returns the number of the process that asks; `None` if it has ended.
fn wait_until_asked(folder: &Path, is_over: &AtomicBool) -> Option<String> {
    loop {
        if let Ok(pid) = fs::read_to_string(folder.join("begin")) {
            return Some(pid);
        }
        if is_over.load(Ordering::Acquire) {
            return None;
        }
        std::thread::sleep(LOOK);
    }
}
