//! Text for the demo: German law where it lies beside the project, made-up words everywhere else.

use anyhow::{Context, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes about `bytes` of text to `path` and says what it is.
pub(crate) fn write(path: &Path, bytes: u64) -> Result<&'static str> {
    let packed = super::chores::project().join("../shared/data/text/gesetze-de.txt.zst");
    if packed.is_file() && unpack(&packed, path) {
        return Ok("all German federal statutes");
    }
    generate(path, bytes)?;
    Ok("generated words")
}

fn unpack(packed: &Path, path: &Path) -> bool {
    let Ok(file) = File::create(path) else { return false };
    let status = Command::new("zstd").args(["-dcq"]).arg(packed).stdout(file).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn generate(path: &Path, bytes: u64) -> Result<()> {
    let mut state = 42u64;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 31)
    };
    let syllables =
        ["ka", "ri", "no", "tem", "sol", "ve", "da", "mi", "ur", "est", "lo", "pan", "gri", "fe", "os", "qua"];
    let mut file = BufWriter::new(File::create(path).with_context(|| path.display().to_string())?);
    let mut written = 0;
    let mut line = String::new();
    while written < bytes {
        line.clear();
        for _ in 0..next() % 9 + 1 {
            for _ in 0..next() % 3 + 1 {
                line += syllables[(next() >> 60) as usize];
            }
            line.push(' ');
        }
        line.pop();
        line.push('\n');
        file.write_all(line.as_bytes())?;
        written += line.len() as u64;
    }
    file.flush().with_context(|| path.display().to_string())
}
