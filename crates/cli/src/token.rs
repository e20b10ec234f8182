//! Token that a client shows to memory servers.

use anyhow::{Context, ensure};
use std::path::Path;

/// Environment variable that holds the token if no file is given.
pub(crate) const ENV_TOKEN: &str = "FARFIELD_TOKEN";

/// Returns the first line of `file`, or without a file the variable's value. Empty if there is
/// neither. Returns an error if the line is empty or has several words.
pub(crate) fn read(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let Some(file) = file else {
        return Ok(std::env::var_os(ENV_TOKEN).map(std::os::unix::ffi::OsStringExt::into_vec).unwrap_or_default());
    };
    read_file(file).with_context(|| format!("--token-file {}", file.display()))
}

/// Returns the first line of `file`. Returns an error if it is empty or has several words.
pub(crate) fn read_file(file: &Path) -> anyhow::Result<Vec<u8>> {
    token_of(&std::fs::read(file)?)
}

fn token_of(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
    ensure!(!line.is_empty(), "its first line is empty");
    ensure!(
        !line.iter().any(u8::is_ascii_whitespace),
        "its first line has more than one word, like a server's list of tenants; a client's file holds the token alone"
    );
    Ok(line.to_vec())
}

#[cfg(test)]
mod tests {
    //! Danger: a client that shows a server its list of all tokens, or a token with an invisible end.
    use super::*;

    #[test]
    fn a_token_is_one_word() {
        assert_eq!(token_of(b"8Xw0p3kq\n").unwrap(), b"8Xw0p3kq");
        assert_eq!(token_of(b" 8Xw0p3kq\r\nsecond line\n").unwrap(), b"8Xw0p3kq");
        assert!(token_of(b"\n").is_err());
        assert!(token_of(b"").is_err());
        assert!(token_of(b"alice 8Xw0p3kq 16G\n").unwrap_err().to_string().contains("tenants"));
    }
}
