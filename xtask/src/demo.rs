//! The demo: unmodified programs with a quarter of their memory, compared with themselves, and with Linux under the same limit.

use crate::cgroup::{self, MemoryCgroup};
use crate::{chores, measured, text};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const MIB: f64 = 1048576.0;
/// Enough that a quarter hurts, little enough that the demo takes a minute with the build.
const TEXT_BYTES: u64 = 150_000_000;
/// A program under the limit of Linux is given so many times as long as it takes with all memory, and not less than this.
const LIMITED_FACTOR: u32 = 20;
const LIMITED_WITHIN_MIN: Duration = Duration::from_secs(30);
/// `farfield run` takes no less.
const NEAR_BYTES_MIN: u64 = 16 << 20;

pub(crate) fn run() -> Result<()> {
    println!("Building farfield and the library it loads into programs ...");
    chores::build()?;
    let folder = chores::target().join("demo");
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let result = show(&folder);
    // Hundreds of megabytes that nobody needs afterwards.
    let _ = std::fs::remove_dir_all(&folder);
    result
}

/// A program of the system, and what is shown with it.
struct Job {
    /// What it does, in words.
    does: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    /// What its slowdown stands for.
    moral: &'static str,
}

const JOBS: [Job; 2] = [
    Job {
        does: "GNU sort sorts it in memory: all of it is used, again and again.",
        program: "sort",
        // All of it in memory rather than in temporary files.
        arguments: &["--buffer-size=4G", "--parallel=2"],
        moral: "that is the price of three quarters of its memory being somewhere else",
    },
    Job {
        does: "awk keeps every line of it, and then works with a fiftieth of them.",
        program: "awk",
        arguments: &["{ line[NR] = $0 } \
             END { for (round = 0; round < 250; round++) for (i = 1; i <= NR / 50; i++) words += split(line[i], word); \
                   print NR, words }"],
        moral: "most of its memory is idle by then, and only its way there was paid for",
    },
];

fn show(folder: &Path) -> Result<()> {
    let input = folder.join("text");
    let what = text::write(&input, TEXT_BYTES)?;
    println!("\nThe data:  {:.0} MiB of text ({what}).", std::fs::metadata(&input)?.len() as f64 / MIB);
    for job in JOBS {
        job.show(&input, folder)?;
    }
    println!("\nTry your own:  {} run --near 25% -- YOUR PROGRAM", shortest(&chores::farfield()));
    Ok(())
}

impl Job {
    /// Adds the arguments, and says where the output goes.
    fn configure(&self, command: &mut Command, input: &Path, output: &Path) -> Result<()> {
        let output = File::create(output).with_context(|| output.display().to_string())?;
        // One order on every machine.
        command.args(self.arguments).arg(input).env("LC_ALL", "C").stdout(output);
        Ok(())
    }

    fn show(&self, input: &Path, folder: &Path) -> Result<()> {
        let [native_output, far_output, report] = ["native", "far", "report.json"].map(|name| folder.join(name));
        println!("\nThe job:   {}", self.does);
        let mut command = Command::new(self.program);
        self.configure(&mut command, input, &native_output)?;
        let native = measured::run(&mut command)?;
        let need = native.peak_rss_bytes;
        println!("Native:    {:.1} s; it needs {:.0} MiB.", native.wall.as_secs_f64(), need as f64 / MIB);

        let near = (need / 4).max(NEAR_BYTES_MIN) & !4095;
        self.show_limited(input, &far_output, near, native.wall)?;
        println!("With a quarter of that near and the rest far, in a memory server that runs beside it:\n");
        println!("  farfield run --near {:.0}M -- {} ...\n", near as f64 / MIB, self.program);
        let mut command = Command::new(chores::farfield());
        command
            .arg("run")
            .arg("--near")
            .arg(format!("{near}B"))
            .arg("--report")
            .arg(&report)
            .args(["--", self.program]);
        self.configure(&mut command, input, &far_output)?;
        let far = measured::run(&mut command)?;
        let report: Value = serde_json::from_slice(&std::fs::read(&report)?).context("the report is not JSON")?;
        print_report(&report, need)?;

        ensure!(equal(&native_output, &far_output)?, "THE OUTPUTS DIFFER: that is a bug of farfield; please report it");
        let slower = far.wall.as_secs_f64() / native.wall.as_secs_f64();
        println!(
            "\nThe two outputs are equal byte for byte. It took {:.1} s, {slower:.1} times as long: {}.",
            far.wall.as_secs_f64(),
            self.moral
        );
        if report["pages_out"].as_u64() == Some(0) {
            bail!("no page left near memory, so this demo has shown nothing; that is a bug, please report it");
        }
        Ok(())
    }

    /// Runs the program under the same limit by Linux alone, where that is allowed.
    fn show_limited(&self, input: &Path, output: &Path, near: u64, native: Duration) -> Result<()> {
        let limit = format!("{:.0} MiB and no farfield ({})", near as f64 / MIB, cgroup::swap());
        let group = match MemoryCgroup::new(near) {
            Ok(group) => group,
            Err(error) => {
                println!("Linux:     not tried with {limit}: {error:#}.");
                return Ok(());
            }
        };
        let mut command = group.command(self.program);
        self.configure(&mut command, input, output)?;
        let patience = (native * LIMITED_FACTOR).max(LIMITED_WITHIN_MIN);
        match measured::run_for(&mut command, patience)?.succeeded() {
            Ok(limited) => println!("Linux:     {:.1} s with {limit}.", limited.wall.as_secs_f64()),
            Err(limited) if limited.status.is_none() => {
                println!("Linux:     not done after {} s with {limit}.", patience.as_secs());
            }
            Err(limited) => {
                let is_killed = limited.status.and_then(|status| status.signal()) == Some(libc::SIGKILL);
                println!("Linux:     {} with {limit}.", if is_killed { "killed by the kernel" } else { "failed" });
            }
        }
        Ok(())
    }
}

fn print_report(report: &Value, need: u64) -> Result<()> {
    let number = |name: &str| report[name].as_u64().with_context(|| format!("the report has no {name}: {report}"));
    let mib = |bytes: u64| bytes as f64 / MIB;
    println!(
        "\n  near memory   limit {:7.1} MiB   peak {:7.1} MiB   (native: {:.1} MiB)",
        mib(number("near_limit_bytes")?),
        mib(number("near_peak_bytes")?),
        mib(need)
    );
    println!("  far memory                        peak {:7.1} MiB", mib(number("far_peak_bytes")?));
    let micros = |name: &str| report[name].as_u64().map_or("-".into(), |ns| format!("{:.1} µs", ns as f64 / 1e3));
    println!(
        "  page faults   {}   half of them within {}, 99 of 100 within {}",
        number("faults")?,
        micros("fault_ns_p50"),
        micros("fault_ns_p99")
    );
    println!(
        "  pages         {} out, {} in, {} of them before they were asked for",
        number("pages_out")?,
        number("pages_in")?,
        number("prefetched")?
    );
    Ok(())
}

/// As a user in the project's folder would type it.
fn shortest(path: &Path) -> String {
    path.strip_prefix(chores::project()).unwrap_or(path).display().to_string()
}

fn equal(one: &Path, other: &Path) -> Result<bool> {
    let open = |path: &Path| File::open(path).with_context(|| path.display().to_string());
    let (mut one, mut other) = (BufReader::new(open(one)?), BufReader::new(open(other)?));
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let read = fill(&mut one, &mut left)?;
        if read != fill(&mut other, &mut right)? || left[..read] != right[..read] {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read(&mut buffer[done..])? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}
