//! The code that this process has: what arrives piece by piece, and what is compiled.
//!
//! Code is known by the SHA-256 of its bytes. Whoever can name that has had the code, so all sessions share one store; what
//! is used least goes first, and is shipped again by whoever misses it.

use crate::engine::Compiled;
use core::fmt;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Longest code.
pub(crate) const CODE_BYTES_MAX: usize = 2 << 20;
/// Codes that are kept compiled.
const COMPILED_MAX: usize = 64;
/// Codes that are on their way at a time.
const ARRIVING_MAX: usize = 8;

/// What code is known by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// That of these bytes.
    pub(crate) fn of(code: &[u8]) -> Digest {
        Digest(Sha256::digest(code).into())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What came of a piece.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Piece {
    /// The next one begins here.
    Next(u32),
    /// The code can run.
    Whole,
    /// The code cannot run, because of this.
    Refused(String),
}

/// Code on its way.
struct Arriving {
    digest: Digest,
    len: u32,
    bytes: Vec<u8>,
}

/// The code that a process has.
#[derive(Default)]
pub(crate) struct CodeStore {
    /// The one that was used last comes last.
    compiled: VecDeque<(Digest, Compiled)>,
    arriving: VecDeque<Arriving>,
}

static STORE: LazyLock<Mutex<CodeStore>> = LazyLock::new(Mutex::default);

/// Does something with the store of this process.
pub(crate) fn with_store<R>(work: impl FnOnce(&mut CodeStore) -> R) -> R {
    work(&mut STORE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl CodeStore {
    /// The code, if it is here.
    pub(crate) fn get(&mut self, digest: &Digest) -> Option<Compiled> {
        let index = self.compiled.iter().position(|(known, _)| known == digest)?;
        let found = self.compiled.remove(index)?;
        let compiled = found.1.clone();
        self.compiled.push_back(found);
        Some(compiled)
    }

    /// Keeps compiled code.
    pub(crate) fn keep(&mut self, digest: Digest, compiled: Compiled) {
        self.compiled.retain(|(known, _)| *known != digest);
        self.compiled.push_back((digest, compiled));
        if self.compiled.len() > COMPILED_MAX {
            self.compiled.pop_front();
        }
    }

    /// Takes a piece of code that has so many bytes; the bytes, when they are all there.
    fn take(&mut self, digest: Digest, len: u32, at: u32, bytes: &[u8]) -> Result<Vec<u8>, Piece> {
        if len as usize > CODE_BYTES_MAX {
            return Err(Piece::Refused(format!("it has {len} bytes, and may have {CODE_BYTES_MAX}")));
        }
        let is_it = |arriving: &Arriving| arriving.digest == digest && arriving.len == len;
        let mut arriving = match self.arriving.iter().position(is_it).and_then(|index| self.arriving.remove(index)) {
            Some(arriving) => arriving,
            None => Arriving { digest, len, bytes: Vec::new() },
        };
        let have = arriving.bytes.len() as u32;
        if at == have && bytes.len() as u32 <= len - have {
            arriving.bytes.extend_from_slice(bytes);
        }
        let have = arriving.bytes.len() as u32;
        if have == len {
            return Ok(arriving.bytes);
        }
        self.arriving.push_back(arriving);
        if self.arriving.len() > ARRIVING_MAX {
            self.arriving.pop_front();
        }
        Err(Piece::Next(have))
    }
}

/// Takes a piece of code that has so many bytes, and compiles the code when it is all there.
pub(crate) fn take_piece(digest: Digest, len: u32, at: u32, bytes: &[u8]) -> Piece {
    if with_store(|store| store.get(&digest)).is_some() {
        return Piece::Whole;
    }
    let code = match with_store(|store| store.take(digest, len, at, bytes)) {
        Ok(code) => code,
        Err(piece) => return piece,
    };
    if Digest::of(&code) != digest {
        return Piece::Refused("its bytes are not those that were announced".into());
    }
    // Nobody else waits while it is compiled.
    match Compiled::new(&code) {
        Ok(compiled) => {
            with_store(|store| store.keep(digest, compiled));
            Piece::Whole
        }
        Err(broken) => Piece::Refused(broken.0),
    }
}

#[cfg(test)]
mod tests {
    //! Danger: code that is made of pieces of two codes, and a store that grows with what strangers begin to send.
    use super::*;

    fn pieces(store: &mut CodeStore, code: &[u8], digest: Digest) -> Vec<u8> {
        let mut at = 0;
        loop {
            let piece = &code[at as usize..code.len().min(at as usize + 100)];
            match store.take(digest, code.len() as u32, at, piece) {
                Ok(whole) => return whole,
                Err(Piece::Next(next)) => at = next,
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn code_arrives_whole_whoever_else_sends_some() {
        let code: Vec<u8> = (0..1000u32).map(|index| (index * 7) as u8).collect();
        let other: Vec<u8> = code.iter().rev().copied().collect();
        let [one, two] = [&code, &other].map(|code| Digest::of(code));
        let mut store = CodeStore::default();
        // Two send the same at once, a third one something else; pieces come twice, too late and too early.
        assert_eq!(store.take(one, 1000, 0, &code[..100]), Err(Piece::Next(100)));
        assert_eq!(store.take(two, 1000, 0, &other[..300]), Err(Piece::Next(300)));
        assert_eq!(store.take(one, 1000, 0, &code[..100]), Err(Piece::Next(100)));
        assert_eq!(store.take(one, 1000, 200, &code[200..300]), Err(Piece::Next(100)));
        assert_eq!(store.take(one, 1000, 100, &[0; 901]), Err(Piece::Next(100)), "more than there is");
        assert_eq!(pieces(&mut store, &code, one), code);
        assert_eq!(pieces(&mut store, &other, two), other);
        assert!(store.arriving.is_empty());
        assert!(matches!(store.take(one, u32::MAX, 0, &[]), Err(Piece::Refused(_))));
    }

    #[test]
    fn what_nobody_finishes_goes() {
        let mut store = CodeStore::default();
        for begun in 0..100u32 {
            assert_eq!(store.take(Digest::of(&begun.to_le_bytes()), 10, 0, &[1]), Err(Piece::Next(1)));
            assert!(store.arriving.len() <= ARRIVING_MAX);
        }
    }

    #[test]
    fn bytes_that_are_not_those_announced_are_refused() {
        let digest = Digest::of(b"\0asm of somebody else");
        let said = take_piece(digest, 4, 0, b"\0asm");
        assert!(matches!(&said, Piece::Refused(reason) if reason.contains("announced")), "{said:?}");
        assert!(with_store(|store| store.get(&digest)).is_none());
    }
}
