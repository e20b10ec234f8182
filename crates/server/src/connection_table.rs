//! Connection slots: their number is limited, and each costs a thread.
//!
//! A connection that has not sent a valid `Hello` yet is *unauthenticated*. Its slot can be taken
//! back. Unauthenticated connections hold at most half of all slots, or 64 if that is more. When a
//! slot is needed, the address with the most of them loses its oldest one. So they cannot keep out
//! a client that connects and authenticates. Slots of authenticated clients are charged to their
//! ledgers.

use crate::address::PeerAddress;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Connections beyond the limit that are told why they are turned away, or are on their way out.
/// Further ones are closed without an answer.
const BEYOND_MAX: usize = 64;

/// Unauthenticated connections that are always allowed at once, even on a small server: a job opens
/// many connections when it begins.
const UNAUTHENTICATED_MIN: usize = 64;

#[derive(Debug)]
struct ConnectionEntry {
    fd: Arc<OwnedFd>,
    address: PeerAddress,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The connection has not authenticated yet.
    Unauthenticated,
    /// The connection has authenticated.
    Authenticated,
    /// The slot was given to another connection, or the connection never had one.
    Evicted,
}

/// A connection that was accepted.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) number: u64,
    pub(crate) fd: Arc<OwnedFd>,
    /// Whether there is no slot for the connection, which is to be told so.
    pub(crate) is_turned_away: bool,
    /// Whether another connection lost its slot to this one.
    pub(crate) has_evicted: bool,
}

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct ConnectionTable {
    max: usize,
    /// Entries by connection number, which is the order in which connections were accepted.
    entries: Mutex<BTreeMap<u64, ConnectionEntry>>,
    next: AtomicU64,
}

impl ConnectionTable {
    pub(crate) fn new(max: usize) -> ConnectionTable {
        ConnectionTable { max, entries: Mutex::default(), next: AtomicU64::new(0) }
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<u64, ConnectionEntry>> {
        self.entries.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Accepts a connection. Returns `None` if there are too many even to be told that there are
    /// too many.
    pub(crate) fn admit(&self, fd: OwnedFd, address: PeerAddress) -> Option<Admitted> {
        let mut entries = self.entries();
        if entries.len() >= self.max.saturating_add(BEYOND_MAX) {
            return None;
        }
        let (mut staying, mut unauthenticated) = (0, 0);
        for entry in entries.values() {
            staying += usize::from(entry.state != State::Evicted);
            unauthenticated += usize::from(entry.state == State::Unauthenticated);
        }
        let is_short = staying >= self.max || unauthenticated >= (self.max / 2).max(UNAUTHENTICATED_MIN);
        let evicted =
            if is_short { oldest_unauthenticated(&entries).and_then(|number| entries.get_mut(&number)) } else { None };
        let has_evicted = evicted.is_some();
        if let Some(entry) = evicted {
            entry.state = State::Evicted;
            farfield_os::serving::shut_down(entry.fd.as_fd());
        }
        let is_turned_away = staying >= self.max && !has_evicted;
        let fd = Arc::new(fd);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let state = if is_turned_away { State::Evicted } else { State::Unauthenticated };
        entries.insert(number, ConnectionEntry { fd: fd.clone(), address, state });
        Some(Admitted { number, fd, is_turned_away, has_evicted })
    }

    /// Marks a connection as authenticated.
    pub(crate) fn mark_authenticated(&self, number: u64) {
        if let Some(entry) = self.entries().get_mut(&number)
            && entry.state == State::Unauthenticated
        {
            entry.state = State::Authenticated;
        }
    }

    pub(crate) fn remove(&self, number: u64) {
        self.entries().remove(&number);
    }

    pub(crate) fn len(&self) -> usize {
        self.entries().len()
    }

    /// Calls `how` with every connection.
    pub(crate) fn each(&self, how: fn(BorrowedFd<'_>)) {
        self.entries().values().for_each(|entry| how(entry.fd.as_fd()));
    }
}

/// Returns the oldest unauthenticated connection of the address that has the most of them.
fn oldest_unauthenticated(entries: &BTreeMap<u64, ConnectionEntry>) -> Option<u64> {
    let mut by_address = HashMap::<PeerAddress, (usize, u64)>::new();
    for (number, entry) in entries.iter().filter(|(_, entry)| entry.state == State::Unauthenticated) {
        by_address.entry(entry.address).or_insert((0, *number)).0 += 1;
    }
    let most = by_address.into_values().max_by_key(|(count, first)| (*count, std::cmp::Reverse(*first)));
    most.map(|(_, first)| first)
}

#[cfg(test)]
mod tests {
    //! Guards against unauthenticated connections that keep others out, and against connections
    //! that are counted and not there.

    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn come(entries: &ConnectionTable, user: u32) -> (Option<Admitted>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (entries.admit(ours.into(), PeerAddress::User(user)), theirs)
    }

    fn is_closed(stream: &mut UnixStream) -> bool {
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn strangers_give_way_to_whoever_comes_and_the_loudest_address_first() {
        let entries = ConnectionTable::new(8);
        let mut quiet = come(&entries, 1);
        let mut loud: Vec<_> = (0..7).map(|_| come(&entries, 2)).collect();
        assert!(loud.iter().all(|(admitted, _)| admitted.as_ref().is_some_and(|one| !one.has_evicted)));
        let next = come(&entries, 3);
        assert!(next.0.unwrap().has_evicted);
        assert!(is_closed(&mut loud[0].1) && !is_closed(&mut loud[1].1) && !is_closed(&mut quiet.1));
    }

    #[test]
    fn welcome_connections_keep_their_places_and_the_next_is_told_that_there_is_none() {
        let entries = ConnectionTable::new(3);
        let mut kept: Vec<_> = (0..3)
            .map(|_| {
                let (admitted, stream) = come(&entries, 1);
                entries.mark_authenticated(admitted.as_ref().unwrap().number);
                (admitted.unwrap(), stream)
            })
            .collect();
        for _ in 0..BEYOND_MAX {
            assert!(come(&entries, 2).0.unwrap().is_turned_away);
        }
        assert!(come(&entries, 2).0.is_none(), "and that is all that is said");
        assert!(kept.iter_mut().all(|(_, stream)| !is_closed(stream)));
        (0..1000).for_each(|number| entries.remove(number));
        assert_eq!(entries.len(), 0);
        assert!(!come(&entries, 2).0.unwrap().is_turned_away);
    }
}
