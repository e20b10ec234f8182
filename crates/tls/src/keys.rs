//! Key schedule: from the secret that a handshake exports to the keys of each connection.
//!
//! HKDF with SHA-256 (RFC 5869), by ring, on the stack.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::hkdf;

/// Length in bytes of a secret.
pub(crate) const SECRET_BYTES: usize = 32;
/// Length in bytes of the nonce that each side adds to the keys of a lane.
pub(crate) const NONCE_BYTES: usize = 32;
/// Length in bytes of the name by which a lane finds its session.
pub(crate) const SESSION_ID_BYTES: usize = 16;
/// Number of records after which a direction changes its key: 16 GiB at most. RFC 8446 (5.5) allows AES-GCM
/// some 2^24.5 records.
pub(crate) const RECORDS_PER_KEY: u64 = 1 << 20;

/// Label under which both sides export the session's secret from their handshake (RFC 5705).
pub(crate) const EXPORTER_LABEL: &[u8] = b"EXPORTER-farfield-session-1";

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

fn expand<const N: usize>(prk: &hkdf::Prk, label: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let labels = [label];
    let filled = prk.expand(&labels, Length(N)).and_then(|okm| okm.fill(&mut bytes));
    assert!(filled.is_ok(), "HKDF gives at most 255 blocks, and here are two");
    bytes
}

/// Secret of a session, from which the keys of all its connections come.
#[derive(Clone)]
pub struct EncryptionSecret {
    pub(crate) id: [u8; SESSION_ID_BYTES],
    pub(crate) secret: [u8; SECRET_BYTES],
}

impl core::fmt::Debug for EncryptionSecret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("EncryptionSecret")
    }
}

impl EncryptionSecret {
    /// Returns the keys of the connection that made the handshake.
    pub(crate) fn control_keys(&self) -> ConnectionKeys {
        self.connection_keys(&[0; NONCE_BYTES], &[0; NONCE_BYTES], b"farfield control 1")
    }

    /// Returns the keys of a lane.
    pub(crate) fn lane_keys(&self, client: &[u8; NONCE_BYTES], server: &[u8; NONCE_BYTES]) -> ConnectionKeys {
        self.connection_keys(client, server, b"farfield lane 1")
    }

    fn connection_keys(&self, client: &[u8], server: &[u8], label: &[u8]) -> ConnectionKeys {
        let mut salt = [0; 2 * NONCE_BYTES];
        salt[..NONCE_BYTES].copy_from_slice(client);
        salt[NONCE_BYTES..].copy_from_slice(server);
        let prk = hkdf::Salt::new(hkdf::HKDF_SHA256, &salt).extract(&self.secret);
        let both: [u8; 2 * SECRET_BYTES] = expand(&prk, label);
        let (mut to_server, mut to_client) = ([0; SECRET_BYTES], [0; SECRET_BYTES]);
        to_server.copy_from_slice(&both[..SECRET_BYTES]);
        to_client.copy_from_slice(&both[SECRET_BYTES..]);
        ConnectionKeys { to_server, to_client }
    }
}

/// Secrets of the two directions of a connection.
pub struct ConnectionKeys {
    to_server: [u8; SECRET_BYTES],
    to_client: [u8; SECRET_BYTES],
}

impl core::fmt::Debug for ConnectionKeys {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ConnectionKeys")
    }
}

impl ConnectionKeys {
    /// Returns the directions as the client sees them: what it seals, and what it opens.
    pub(crate) fn of_client(&self) -> (Direction, Direction) {
        (Direction::new(self.to_server), Direction::new(self.to_client))
    }

    /// Returns the directions as the server sees them: what it seals, and what it opens.
    pub(crate) fn of_server(&self) -> (Direction, Direction) {
        (Direction::new(self.to_client), Direction::new(self.to_server))
    }
}

/// Direction of a connection: its key, and the number of its next record.
///
/// The number is part of the nonce, so a record that is lost, repeated, reordered or changed does not open.
pub(crate) struct Direction {
    secret: [u8; SECRET_BYTES],
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    number: u64,
}

/// Error: the record was changed, or is not the next one of this connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NotAuthentic;

impl Direction {
    fn new(secret: [u8; SECRET_BYTES]) -> Direction {
        let (key, iv) = key_and_iv(&secret);
        Direction { secret, key, iv, number: 0 }
    }

    /// Seals `bytes` in place as the next record, and returns its tag.
    pub(crate) fn seal(&mut self, head: &[u8], bytes: &mut [u8]) -> Tag {
        let tag = self.key.seal_in_place_separate_tag(self.nonce(), Aad::from(head), bytes);
        self.advance();
        tag.unwrap_or_else(|_| unreachable!("a record is shorter than AES-GCM allows"))
    }

    /// Opens the next record in place: `bytes` is its content, followed by the tag.
    pub(crate) fn open(&mut self, head: &[u8], bytes: &mut [u8]) -> Result<(), NotAuthentic> {
        let opened = self.key.open_in_place(self.nonce(), Aad::from(head), bytes);
        opened.map_err(|_| NotAuthentic)?;
        self.advance();
        Ok(())
    }

    fn nonce(&self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    fn advance(&mut self) {
        self.number += 1;
        if self.number.is_multiple_of(RECORDS_PER_KEY) {
            self.secret = expand(&hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &self.secret), b"farfield next 1");
            (self.key, self.iv) = key_and_iv(&self.secret);
        }
    }

    #[cfg(test)]
    pub(crate) fn set_number(&mut self, number: u64) {
        self.number = number;
    }
}

fn key_and_iv(secret: &[u8; SECRET_BYTES]) -> (LessSafeKey, [u8; NONCE_LEN]) {
    let prk = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, secret);
    let key: [u8; 32] = expand(&prk, b"farfield key 1");
    let key = UnboundKey::new(&AES_256_GCM, &key).map(LessSafeKey::new);
    (key.unwrap_or_else(|_| unreachable!("the key has the algorithm's length")), expand(&prk, b"farfield iv 1"))
}

#[cfg(test)]
mod tests {
    //! Guards against two connections, or two directions, with one key.
    use super::*;

    fn sealed(direction: &mut Direction) -> ([u8; 5], [u8; 16]) {
        let mut bytes = *b"pages";
        let tag = direction.seal(b"head", &mut bytes);
        (bytes, tag.as_ref().try_into().unwrap())
    }

    #[test]
    fn each_connection_and_each_direction_has_keys_of_its_own() {
        let session = EncryptionSecret { id: [1; 16], secret: [2; 32] };
        let mut seen = std::collections::HashSet::new();
        let nonces = [([3; 32], [4; 32]), ([4; 32], [3; 32]), ([3; 32], [5; 32]), ([0; 32], [0; 32])];
        let lanes = nonces.map(|(client, server)| session.lane_keys(&client, &server));
        for keys in lanes.iter().chain([&session.control_keys()]) {
            let (mut sealing, mut opening) = keys.of_client();
            assert!(seen.insert(sealed(&mut sealing)));
            assert!(seen.insert(sealed(&mut sealing)), "each record has a nonce of its own");
            assert!(seen.insert(sealed(&mut opening)));
            let (mut server_sealing, mut server_opening) = keys.of_server();
            let (mut bytes, tag) = sealed(&mut server_sealing);
            assert!(seen.contains(&(bytes, tag)), "the server seals with what the client opens");
            let mut whole = [&bytes[..], &tag].concat();
            assert_eq!(server_opening.open(b"head", &mut whole), Err(NotAuthentic), "of the other direction");
            (bytes, _) = sealed(&mut keys.of_client().0);
            assert_ne!(&bytes, b"pages");
        }
    }

    #[test]
    fn both_sides_change_the_key_at_the_same_record() {
        let keys = EncryptionSecret { id: [1; 16], secret: [2; 32] }.control_keys();
        let ((mut sealing, _), (_, mut opening)) = (keys.of_client(), keys.of_server());
        for direction in [&mut sealing, &mut opening] {
            direction.set_number(RECORDS_PER_KEY - 1);
        }
        let before = sealing.secret;
        for _ in 0..3 {
            let (bytes, tag) = sealed(&mut sealing);
            opening.open(b"head", &mut [&bytes[..], &tag].concat()).unwrap();
        }
        assert_ne!(before, sealing.secret);
    }
}
