//! Places of connections: there are only so many, and each costs a thread.
//!
//! A connection that has not said who it is holds its place by grace: at most half of all places are held so,
//! and when one is needed, the one that has waited longest gives it up, of the address that has most of them.
//! So strangers cannot keep out a client that comes and says who it is. What welcome clients hold is
//! on their ledgers.

use crate::address::Address;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// So many more than the limit are told why they are turned away, or are on their way out; the rest is just closed.
const BEYOND_MAX: usize = 64;

/// So many may be about to say who they are at once, also at a small server: a job connects many times when it begins.
const STRANGERS_MIN: usize = 64;

#[derive(Debug)]
struct Place {
    fd: Arc<OwnedFd>,
    address: Address,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// It has not said who it is.
    Stranger,
    /// It is welcome.
    Welcome,
    /// Its place was given away, or it never had one.
    Leaving,
}

/// A connection that is let in.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) number: u64,
    pub(crate) fd: Arc<OwnedFd>,
    /// There is no place for it: it is to be told so.
    pub(crate) is_turned_away: bool,
    /// Another connection gave up its place.
    pub(crate) has_evicted: bool,
}

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct Places {
    max: usize,
    /// In the order in which they came.
    places: Mutex<BTreeMap<u64, Place>>,
    next: AtomicU64,
}

impl Places {
    pub(crate) fn new(max: usize) -> Places {
        Places { max, places: Mutex::default(), next: AtomicU64::new(0) }
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<u64, Place>> {
        self.places.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Lets a connection in; `None` if there are too many even to be told so.
    pub(crate) fn admit(&self, fd: OwnedFd, address: Address) -> Option<Admitted> {
        let mut places = self.places();
        if places.len() >= self.max.saturating_add(BEYOND_MAX) {
            return None;
        }
        let (mut staying, mut strangers) = (0, 0);
        for place in places.values() {
            staying += usize::from(place.state != State::Leaving);
            strangers += usize::from(place.state == State::Stranger);
        }
        let is_short = staying >= self.max || strangers >= (self.max / 2).max(STRANGERS_MIN);
        let evicted =
            if is_short { longest_stranger(&places).and_then(|number| places.get_mut(&number)) } else { None };
        let has_evicted = evicted.is_some();
        if let Some(place) = evicted {
            place.state = State::Leaving;
            farfield_os::serving::shut_down(place.fd.as_fd());
        }
        let is_turned_away = staying >= self.max && !has_evicted;
        let fd = Arc::new(fd);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let state = if is_turned_away { State::Leaving } else { State::Stranger };
        places.insert(number, Place { fd: fd.clone(), address, state });
        Some(Admitted { number, fd, is_turned_away, has_evicted })
    }

    /// A connection has said who it is.
    pub(crate) fn welcome(&self, number: u64) {
        if let Some(place) = self.places().get_mut(&number)
            && place.state == State::Stranger
        {
            place.state = State::Welcome;
        }
    }

    pub(crate) fn remove(&self, number: u64) {
        self.places().remove(&number);
    }

    pub(crate) fn len(&self) -> usize {
        self.places().len()
    }

    /// Does `how` to every connection.
    pub(crate) fn each(&self, how: fn(BorrowedFd<'_>)) {
        self.places().values().for_each(|place| how(place.fd.as_fd()));
    }
}

/// The stranger who has waited longest, of the address that has most of them.
fn longest_stranger(places: &BTreeMap<u64, Place>) -> Option<u64> {
    let mut by_address = HashMap::<Address, (usize, u64)>::new();
    for (number, place) in places.iter().filter(|(_, place)| place.state == State::Stranger) {
        by_address.entry(place.address).or_insert((0, *number)).0 += 1;
    }
    let most = by_address.into_values().max_by_key(|(count, first)| (*count, std::cmp::Reverse(*first)));
    most.map(|(_, first)| first)
}

#[cfg(test)]
mod tests {
    //! Guards against strangers who keep others out, and against connections that are counted and not there.

    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn come(places: &Places, user: u32) -> (Option<Admitted>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (places.admit(ours.into(), Address::User(user)), theirs)
    }

    fn is_closed(stream: &mut UnixStream) -> bool {
        matches!(stream.read(&mut [0]), Ok(0))
    }

    #[test]
    fn strangers_give_way_to_whoever_comes_and_the_loudest_address_first() {
        let places = Places::new(8);
        let mut quiet = come(&places, 1);
        let mut loud: Vec<_> = (0..7).map(|_| come(&places, 2)).collect();
        assert!(loud.iter().all(|(admitted, _)| admitted.as_ref().is_some_and(|one| !one.has_evicted)));
        let next = come(&places, 3);
        assert!(next.0.unwrap().has_evicted);
        assert!(is_closed(&mut loud[0].1) && !is_closed(&mut loud[1].1) && !is_closed(&mut quiet.1));
    }

    #[test]
    fn welcome_connections_keep_their_places_and_the_next_is_told_that_there_is_none() {
        let places = Places::new(3);
        let mut kept: Vec<_> = (0..3)
            .map(|_| {
                let (admitted, stream) = come(&places, 1);
                places.welcome(admitted.as_ref().unwrap().number);
                (admitted.unwrap(), stream)
            })
            .collect();
        for _ in 0..BEYOND_MAX {
            assert!(come(&places, 2).0.unwrap().is_turned_away);
        }
        assert!(come(&places, 2).0.is_none(), "and that is all that is said");
        assert!(kept.iter_mut().all(|(_, stream)| !is_closed(stream)));
        (0..1000).for_each(|number| places.remove(number));
        assert_eq!(places.len(), 0);
        assert!(!come(&places, 2).0.unwrap().is_turned_away);
    }
}
