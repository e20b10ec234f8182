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
    let mut random = fastrand::Rng::with_seed(42);
    let syllables =
        ["ka", "ri", "no", "tem", "sol", "ve", "da", "mi", "ur", "est", "lo", "pan", "gri", "fe", "os", "qua"];
    let mut file = BufWriter::new(File::create(path).with_context(|| path.display().to_string())?);
    let mut written = 0;
    let mut line = String::new();
    while written < bytes {
        line.clear();
        for _ in 0..random.u32(1..=9) {
            for _ in 0..random.u32(1..=3) {
                line += syllables[random.usize(..syllables.len())];
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
