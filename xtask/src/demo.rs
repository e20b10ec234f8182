//! The demo: an unmodified program with a quarter of its memory, compared with itself.

use crate::{chores, measured, text};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::process::Command;

const MIB: f64 = 1048576.0;
/// Enough that a quarter hurts, little enough that the demo takes a minute with the build.
const TEXT_BYTES: u64 = 150_000_000;
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

fn show(folder: &Path) -> Result<()> {
    let [input, native_output, far_output, report] =
        ["text", "native", "far", "report.json"].map(|name| folder.join(name));
    let what = text::write(&input, TEXT_BYTES)?;
    let input_bytes = std::fs::metadata(&input)?.len();
    println!(
        "\nThe job:  sort {:.0} MiB of text ({what}) in memory, with GNU sort as it comes from Debian.",
        input_bytes as f64 / MIB
    );

    let sort = |output: &Path, command: &mut Command| -> Result<measured::Measured> {
        // One order on every machine, and all of it in memory rather than in temporary files.
        command.arg("--buffer-size=4G").arg("--parallel=2").arg("-o").arg(output).arg(&input).env("LC_ALL", "C");
        measured::run(command)
    };
    let native = sort(&native_output, &mut Command::new("sort"))?;
    let need = native.peak_rss_bytes;
    println!("Native:   {:.1} s; it needs {:.0} MiB.", native.wall.as_secs_f64(), need as f64 / MIB);

    let near = (need / 4).max(NEAR_BYTES_MIN) & !4095;
    println!("Now with a quarter of that near and the rest far, in a memory server that runs beside it:\n");
    println!("  farfield run --near {:.0}M -- sort ...\n", near as f64 / MIB);
    let mut command = Command::new(chores::farfield());
    command.arg("run").arg("--near").arg(format!("{near}B")).arg("--report").arg(&report).args(["--", "sort"]);
    let far = sort(&far_output, &mut command)?;
    let report: Value = serde_json::from_slice(&std::fs::read(&report)?).context("the report is not JSON")?;
    print_report(&report, need)?;

    ensure!(equal(&native_output, &far_output)?, "THE OUTPUTS DIFFER: that is a bug of farfield; please report it");
    let slower = far.wall.as_secs_f64() / native.wall.as_secs_f64();
    println!(
        "\nThe two outputs, {:.0} MiB each, are equal byte for byte.",
        std::fs::metadata(&far_output)?.len() as f64 / MIB
    );
    println!(
        "It took {:.1} s, {slower:.1} times as long: that is the price of three quarters of its memory being somewhere else.",
        far.wall.as_secs_f64()
    );
    if report["pages_out"].as_u64() == Some(0) {
        bail!("no page left near memory, so this demo has shown nothing; that is a bug, please report it");
    }
    println!("\nTry your own:  {} run --near 25% -- YOUR PROGRAM", shortest(&chores::farfield()));
    Ok(())
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
