//! Who may read a dashboard, and who may change something: whoever shows a token.

use super::lock;
use anyhow::{Context, ensure};
use farfield_core::wire::Hello;
use farfield_server::same_bytes;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

/// Least bytes of a token: 16 random ones cannot be guessed.
const TOKEN_BYTES_MIN: usize = 16;
/// Time that a wrong token costs. Requests with wrong tokens wait for each other, so a guesser has
/// one guess a second, with however many connections.
const AFTER_GUESS: Duration = Duration::from_secs(1);

/// Token that people enter in a browser, and guesses at it.
pub(super) struct TokenGuard {
    option: &'static str,
    file: PathBuf,
    token: RwLock<Vec<u8>>,
    guesses: Mutex<()>,
}

impl TokenGuard {
    /// Reads the token that an option names. Fails if others could read or guess it.
    pub(super) fn open(option: &'static str, file: &Path) -> anyhow::Result<TokenGuard> {
        let token = RwLock::new(read_token(option, file)?);
        Ok(TokenGuard { option, file: file.to_owned(), token, guesses: Mutex::default() })
    }

    /// Reads the token again. If the file cannot be used, the token stays.
    pub(super) fn reload(&self) -> anyhow::Result<()> {
        let token = read_token(self.option, &self.file)?;
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
        Ok(())
    }

    /// Checks a token in constant time. Blocks for a second or more if it is wrong.
    pub(super) fn admits(&self, shown: &[u8]) -> bool {
        let is_right = same_bytes(&self.token.read().unwrap_or_else(PoisonError::into_inner), shown);
        if !is_right {
            let _one_at_a_time = lock(&self.guesses);
            std::thread::sleep(AFTER_GUESS);
        }
        is_right
    }
}

fn read_token(option: &str, file: &Path) -> anyhow::Result<Vec<u8>> {
    use std::os::unix::fs::PermissionsExt;
    let name = format!("{option} {}", file.display());
    let mode = std::fs::metadata(file).with_context(|| name.clone())?.permissions().mode();
    ensure!(mode & 0o077 == 0, "{name}: others can read it; run `chmod 600 {}`", file.display());
    let token = crate::token::read_file(file).with_context(|| name.clone())?;
    ensure!(
        (TOKEN_BYTES_MIN..=Hello::TOKEN_BYTES_MAX).contains(&token.len()),
        "{name}: a token has {TOKEN_BYTES_MIN} to {} characters; `openssl rand -hex 16` makes one",
        Hello::TOKEN_BYTES_MAX
    );
    Ok(token)
}
