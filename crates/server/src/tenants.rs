//! Tenants: which clients may use a server, and how much of it.
//!
//! The token file has one tenant per line: name, token, quota (a size, or `-` for none), separated
//! by blanks. `#` starts a comment. A tenant with the token `-` has none: its clients come with a
//! certificate that has its name.

use crate::config::parse_size;
use farfield_core::wire::Hello;
use std::path::{Path, PathBuf};

/// A tenant as the token file describes it.
#[derive(Clone)]
pub struct TenantConfig {
    /// Name for logs and metrics.
    pub name: String,
    /// Secret that proves that a client belongs to this tenant. If it is empty, only a certificate
    /// with the tenant's name does.
    pub token: Vec<u8>,
    /// Most bytes that all regions of the tenant may hold together; `None` means no limit.
    pub quota_bytes: Option<u64>,
}

impl std::fmt::Debug for TenantConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token is a secret: it must not reach a log by way of `{:?}`.
        write!(f, "Tenant({:?}, quota {:?})", self.name, self.quota_bytes)
    }
}

/// All tenants of a server.
#[derive(Clone, Debug, Default)]
pub struct Tenants(pub Vec<TenantConfig>);

/// Reason why a token file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    /// The file cannot be read.
    #[error("cannot read the token file {}: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Other users of the machine can read the file.
    #[error("every user can read the token file {0}: run `chmod o-rwx {0}`", path.display())]
    Exposed {
        /// Path of the file.
        path: PathBuf,
    },
    /// A line is not `name token quota`. The text of the line is not repeated, because it holds a
    /// token.
    #[error("line {line} of the token file: {problem}; each line is `NAME TOKEN QUOTA`, QUOTA a size like 4G or `-`")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// Reason, as text.
        problem: &'static str,
    },
}

impl Tenants {
    /// Reads a token file. Returns an error if other users can read it, or if a line is malformed.
    pub fn load(path: &Path) -> Result<Tenants, TokenFileError> {
        use std::os::unix::fs::PermissionsExt;
        let unreadable = |source| TokenFileError::Unreadable { path: path.to_owned(), source };
        let mode = std::fs::metadata(path).map_err(unreadable)?.permissions().mode();
        if mode & 0o007 != 0 {
            return Err(TokenFileError::Exposed { path: path.to_owned() });
        }
        Self::parse(&std::fs::read_to_string(path).map_err(unreadable)?)
    }

    /// Parses the text of a token file.
    pub fn parse(text: &str) -> Result<Tenants, TokenFileError> {
        let mut tenants: Vec<TenantConfig> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let bad = |problem| TokenFileError::Line { line: index + 1, problem };
            let line = line.split('#').next().unwrap_or("");
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            let token = words.next().ok_or(bad("the token is missing"))?;
            let quota = words.next().ok_or(bad("the quota is missing"))?;
            if words.next().is_some() {
                return Err(bad("there are more than three words"));
            }
            if token.len() > Hello::TOKEN_BYTES_MAX {
                return Err(bad("the token is longer than 256 bytes"));
            }
            let quota_bytes = match quota {
                "-" => None,
                size => Some(parse_size(size).ok_or(bad("the quota is not a size"))?),
            };
            if tenants.iter().any(|other| other.name == name) {
                return Err(bad("the name was there before"));
            }
            let token = if token == "-" { &[] } else { token.as_bytes() };
            if !token.is_empty() && tenants.iter().any(|other| other.token == token) {
                return Err(bad("the token belongs to another tenant already"));
            }
            tenants.push(TenantConfig { name: name.to_owned(), token: token.to_vec(), quota_bytes });
        }
        Ok(Tenants(tenants))
    }
}

/// Compares tokens in constant time: the duration shows neither the first difference nor whether the
/// lengths are equal. Bytes beyond the longest token ([`Hello::TOKEN_BYTES_MAX`]) are not compared.
pub fn same_bytes(ours: &[u8], theirs: &[u8]) -> bool {
    let mut difference = ours.len() ^ theirs.len();
    for index in 0..Hello::TOKEN_BYTES_MAX {
        let byte = |bytes: &[u8]| bytes.get(index).copied().unwrap_or(0);
        difference |= usize::from(std::hint::black_box(byte(ours) ^ byte(theirs)));
    }
    difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_file_is_read_and_its_mistakes_are_named() {
        let tenants = Tenants::parse("# who\n\nalice  secret-a 1G # first\nbob secret-b -\n").unwrap();
        assert_eq!(tenants.0.len(), 2);
        assert_eq!((tenants.0[0].quota_bytes, tenants.0[1].quota_bytes), (Some(1 << 30), None));
        for (text, line) in
            [("a\n", 1), ("\na b\n", 2), ("a b c\n", 1), ("a b - d", 1), ("a b -\na c -", 2), ("a b -\nc b -", 2)]
        {
            let error = Tenants::parse(text).unwrap_err();
            assert!(error.to_string().starts_with(&format!("line {line} ")), "{error}");
        }
    }

    #[test]
    fn a_token_file_that_everybody_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("farfield-tokens-{}", std::process::id()));
        std::fs::write(&path, "a b -").unwrap();
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o644);
        let error = Tenants::load(&path).unwrap_err();
        assert!(error.to_string().contains("chmod o-rwx"), "{error}");
        mode(0o600);
        assert_eq!(Tenants::load(&path).unwrap().0.len(), 1);
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Tenants::load(&path), Err(TokenFileError::Unreadable { .. })));
    }
}
