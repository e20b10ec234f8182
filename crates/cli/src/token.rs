//! The secret that a client shows to memory servers.

use anyhow::{Context, ensure};
use std::path::Path;

/// Holds the token if no file is given.
pub(crate) const ENV_TOKEN: &str = "FARFIELD_TOKEN";

/// The first line of `file`, or else the variable; empty if there is neither.
pub(crate) fn read(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let Some(file) = file else {
        return Ok(std::env::var_os(ENV_TOKEN).map(std::os::unix::ffi::OsStringExt::into_vec).unwrap_or_default());
    };
    let text = std::fs::read(file).with_context(|| format!("--token-file {}", file.display()))?;
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    ensure!(!line.is_empty(), "--token-file {}: its first line is empty", file.display());
    Ok(line.to_vec())
}
