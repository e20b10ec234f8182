//! The code that this process has, ready to run or still arriving piece by piece.
//!
//! Code is identified by the SHA-256 of its bytes. A client that knows the digest has had the code,
//! so all sessions share one store. The least recently used code is dropped first, and a caller
//! that misses it ships it again.

use crate::engine::{GuestCode, is_compiled_full};
use core::fmt;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::VecDeque;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Most bytes of code.
pub(crate) const CODE_BYTES_MAX: usize = 2 << 20;
/// Most codes that are kept, and most bytes of them.
const KEPT_MAX: (usize, usize) = (64, 32 << 20);
/// Most codes that arrive at a time.
const PARTIAL_MAX: usize = 8;

/// Identity of code: the SHA-256 of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Digest([u8; 32]);

impl Digest {
    /// Computes the digest of these bytes.
    pub(crate) fn of(code: &[u8]) -> Digest {
        Digest(Sha256::digest(code).into())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Answer to a piece of code.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ShipReply {
    /// The next piece begins at this offset.
    Next(u32),
    /// The code is complete and can run.
    Whole,
    /// The code cannot run, for this reason.
    Refused(String),
}

/// Code of which pieces are still missing.
struct PartialCode {
    digest: Digest,
    len: u32,
    bytes: Vec<u8>,
}

/// Code that a process has.
#[derive(Default)]
pub(crate) struct CodeStore {
    /// Code that can run; the most recently used comes last.
    ready: VecDeque<(Digest, GuestCode)>,
    partial: VecDeque<PartialCode>,
}

static STORE: LazyLock<Mutex<CodeStore>> = LazyLock::new(Mutex::default);

/// Runs `work` with the store of this process, locked.
pub(crate) fn with_store<R>(work: impl FnOnce(&mut CodeStore) -> R) -> R {
    work(&mut STORE.lock().unwrap_or_else(PoisonError::into_inner))
}

impl CodeStore {
    /// Returns the code, if it is here, and marks it as the most recently used.
    pub(crate) fn get(&mut self, digest: &Digest) -> Option<GuestCode> {
        let index = self.ready.iter().position(|(known, _)| known == digest)?;
        let found = self.ready.remove(index)?;
        let code = found.1.clone();
        self.ready.push_back(found);
        for (_, older) in &self.ready {
            if !is_compiled_full() {
                break;
            }
            older.drop_compiled();
        }
        Some(code)
    }

    /// Keeps code, and drops the least recently used if there is too much.
    pub(crate) fn keep(&mut self, digest: Digest, code: GuestCode) {
        self.ready.retain(|(known, _)| *known != digest);
        self.ready.push_back((digest, code));
        let bytes = |ready: &VecDeque<(Digest, GuestCode)>| ready.iter().map(|(_, code)| code.bytes()).sum::<usize>();
        while self.ready.len() > KEPT_MAX.0 || bytes(&self.ready) > KEPT_MAX.1 {
            self.ready.pop_front();
        }
    }

    /// Takes the piece at offset `at` of code that has `len` bytes. Returns the code when it is
    /// complete.
    fn take(&mut self, digest: Digest, len: u32, at: u32, bytes: &[u8]) -> Result<Vec<u8>, ShipReply> {
        if len as usize > CODE_BYTES_MAX {
            return Err(ShipReply::Refused(format!("it has {len} bytes, and may have {CODE_BYTES_MAX}")));
        }
        let is_it = |partial: &PartialCode| partial.digest == digest && partial.len == len;
        let mut partial = match self.partial.iter().position(is_it).and_then(|index| self.partial.remove(index)) {
            Some(partial) => partial,
            None => PartialCode { digest, len, bytes: Vec::new() },
        };
        let have = partial.bytes.len() as u32;
        if at == have && bytes.len() as u32 <= len - have {
            partial.bytes.extend_from_slice(bytes);
        }
        let have = partial.bytes.len() as u32;
        if have == len {
            return Ok(partial.bytes);
        }
        self.partial.push_back(partial);
        if self.partial.len() > PARTIAL_MAX {
            self.partial.pop_front();
        }
        Err(ShipReply::Next(have))
    }
}

/// Takes the piece at offset `at` of code that has `len` bytes, and makes it ready to run when it is
/// complete.
pub(crate) fn take_piece(digest: Digest, len: u32, at: u32, bytes: &[u8]) -> ShipReply {
    if with_store(|store| store.get(&digest)).is_some() {
        return ShipReply::Whole;
    }
    let code = match with_store(|store| store.take(digest, len, at, bytes)) {
        Ok(code) => code,
        Err(piece) => return piece,
    };
    if Digest::of(&code) != digest {
        return ShipReply::Refused("its bytes are not those that were announced".into());
    }
    // The store is not locked while the code is validated.
    match GuestCode::new(&code) {
        Ok(ready) => {
            with_store(|store| store.keep(digest, ready));
            ShipReply::Whole
        }
        Err(failure) => ShipReply::Refused(failure.0),
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
                Err(ShipReply::Next(next)) => at = next,
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
        assert_eq!(store.take(one, 1000, 0, &code[..100]), Err(ShipReply::Next(100)));
        assert_eq!(store.take(two, 1000, 0, &other[..300]), Err(ShipReply::Next(300)));
        assert_eq!(store.take(one, 1000, 0, &code[..100]), Err(ShipReply::Next(100)));
        assert_eq!(store.take(one, 1000, 200, &code[200..300]), Err(ShipReply::Next(100)));
        assert_eq!(store.take(one, 1000, 100, &[0; 901]), Err(ShipReply::Next(100)), "more than there is");
        assert_eq!(pieces(&mut store, &code, one), code);
        assert_eq!(pieces(&mut store, &other, two), other);
        assert!(store.partial.is_empty());
        assert!(matches!(store.take(one, u32::MAX, 0, &[]), Err(ShipReply::Refused(_))));
    }

    #[test]
    fn unfinished_shipments_are_dropped() {
        let mut store = CodeStore::default();
        for begun in 0..100u32 {
            assert_eq!(store.take(Digest::of(&begun.to_le_bytes()), 10, 0, &[1]), Err(ShipReply::Next(1)));
            assert!(store.partial.len() <= PARTIAL_MAX);
        }
    }

    #[test]
    fn bytes_that_are_not_those_announced_are_refused() {
        let digest = Digest::of(b"\0asm of somebody else");
        let reply = take_piece(digest, 4, 0, b"\0asm");
        assert!(matches!(&reply, ShipReply::Refused(reason) if reason.contains("announced")), "{reply:?}");
        assert!(with_store(|store| store.get(&digest)).is_none());
    }
}
