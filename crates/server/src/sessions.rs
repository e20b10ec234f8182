//! Sessions and leases: which regions exist, and how long they live.
//!
//! ```text
//!            Hello                    last connection lost
//!   (none) ─────────▶ held ──────────────────────────────────▶ on lease
//!                      ▲  │ Bye                                  │  │ lease over
//!                      │  ▼                                      │  ▼
//!                      │ ended ◀─────────────────────────────────┼─ ended
//!                      └────────────── Hello with its secret ────┘
//! ```
//! When a session ends, its regions are freed, and no later request finds them. The session itself
//! is counted until they are freed: if no session is counted any more, no memory of one is left
//! either.

use crate::counters::ServerCounters;
use crate::fabric::Exposure;
use crate::store::{Account, Charge, Exhausted, Ledger, PageCounter, RegionSnapshot, Resource, StoredRegion};
use farfield_core::RegionId;
use farfield_core::wire::SessionSecret;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

/// A tenant with its limits and counters.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    pub(crate) quota: Arc<PageCounter>,
    /// Ledger of the tenant's resources. `None` on a server without tokens: there each address has
    /// its own.
    pub(crate) ledger: Option<Arc<Ledger>>,
    pub(crate) counters: ServerCounters,
}

/// A client's session: regions that belong together and are freed together.
#[derive(Debug)]
pub(crate) struct ClientSession {
    /// Number for logs, because the secret must not be logged.
    pub(crate) number: u64,
    pub(crate) secret: SessionSecret,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) client_name: String,
    /// Account that pays for the session's regions.
    pub(crate) account: Account,
    _held: Charge,
    /// Memory that clients read one-sided.
    pub(crate) exposure: Exposure,
    /// Regions by id; `None` after the end of the session.
    regions: RwLock<Option<HashMap<RegionId, Arc<StoredRegion>>>>,
}

/// Error: the session is over and takes no region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SessionClosed;

impl ClientSession {
    pub(crate) fn region(&self, id: RegionId) -> Option<Arc<StoredRegion>> {
        let regions = self.regions.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        regions.as_ref()?.get(&id).cloned()
    }

    fn insert(&self, id: RegionId, region: StoredRegion) -> Result<(), SessionClosed> {
        let mut regions = self.regions.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        regions.as_mut().ok_or(SessionClosed)?.insert(id, Arc::new(region));
        Ok(())
    }

    /// Removes a region. It is freed when the last request on it is over.
    pub(crate) fn remove(&self, id: RegionId) -> Option<Arc<StoredRegion>> {
        let mut regions = self.regions.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let removed = regions.as_mut()?.remove(&id);
        self.exposure.remove(id);
        removed
    }

    fn region_count(&self) -> usize {
        let regions = self.regions.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        regions.as_ref().map_or(0, HashMap::len)
    }

    /// Returns all regions that the session has now.
    pub(crate) fn all(&self) -> Vec<Arc<StoredRegion>> {
        let regions = self.regions.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        regions.iter().flatten().map(|(_, region)| region.clone()).collect()
    }

    fn end(&self) -> Vec<Arc<StoredRegion>> {
        let mut regions = self.regions.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.exposure.end();
        regions.take().into_iter().flatten().map(|(_, region)| region).collect()
    }
}

#[derive(Debug)]
struct Entry {
    session: Arc<ClientSession>,
    connections: usize,
    /// Time at which the last connection was lost.
    lost_at: Option<Instant>,
    /// Whether the session's regions are being freed. No connection can join it any more.
    ending: bool,
}

#[derive(Debug)]
struct SnapshotTicket {
    snapshot: RegionSnapshot,
    tenant: Arc<Tenant>,
    expires: Instant,
}

/// All sessions of a server, and all tickets for unclaimed snapshots.
#[derive(Debug)]
pub(crate) struct Sessions {
    lease: Duration,
    ticket_life: Duration,
    entries: Mutex<HashMap<SessionSecret, Entry>>,
    tickets: Mutex<HashMap<u128, SnapshotTicket>>,
    next_session: AtomicU64,
    next_region: AtomicU64,
}

impl Sessions {
    pub(crate) fn new(lease: Duration, ticket_life: Duration) -> Sessions {
        Sessions {
            lease,
            ticket_life,
            entries: Mutex::default(),
            tickets: Mutex::default(),
            next_session: AtomicU64::new(1),
            next_region: AtomicU64::new(1),
        }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<SessionSecret, Entry>> {
        self.entries.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tickets(&self) -> MutexGuard<'_, HashMap<u128, SnapshotTicket>> {
        self.tickets.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Opens a session with one connection.
    pub(crate) fn open(
        &self,
        secret: SessionSecret,
        tenant: Arc<Tenant>,
        account: Account,
        client_name: &str,
    ) -> Result<Arc<ClientSession>, Exhausted> {
        let held = account.ledger.charge(Resource::Sessions, 1)?;
        let session = Arc::new(ClientSession {
            number: self.next_session.fetch_add(1, Ordering::Relaxed),
            secret,
            tenant,
            client_name: client_name.to_owned(),
            account,
            _held: held,
            exposure: Exposure::default(),
            regions: RwLock::new(Some(HashMap::new())),
        });
        let entry = Entry { session: session.clone(), connections: 1, lost_at: None, ending: false };
        self.entries().insert(secret, entry);
        Ok(session)
    }

    /// Adds a connection to a session that is held or on lease. A tenant can join its own sessions
    /// only.
    pub(crate) fn join(&self, secret: SessionSecret, tenant: &Arc<Tenant>) -> Option<Arc<ClientSession>> {
        let mut entries = self.entries();
        let may_join = |entry: &&mut Entry| !entry.ending && Arc::ptr_eq(&entry.session.tenant, tenant);
        let entry = entries.get_mut(&secret).filter(may_join)?;
        entry.connections += 1;
        entry.lost_at = None;
        Some(entry.session.clone())
    }

    /// Returns the tenant of the session with this secret. The secret is useless without a token of
    /// that tenant.
    pub(crate) fn tenant_of(&self, secret: SessionSecret) -> Option<Arc<Tenant>> {
        self.entries().get(&secret).map(|entry| entry.session.tenant.clone())
    }

    /// Removes a connection from a session. With the last one the lease starts, or the session ends
    /// if the lease is zero. Returns whether it ended.
    pub(crate) fn leave(&self, session: &ClientSession, now: Instant) -> bool {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&session.secret) else { return false };
        entry.connections -= 1;
        if entry.connections > 0 || entry.ending {
            return false;
        }
        entry.lost_at = Some(now);
        drop(entries);
        let left = |entry: &Entry| entry.session.secret == session.secret && entry.connections == 0;
        self.lease.is_zero() && self.end_if(left).len() == 1
    }

    /// Ends a session at once, even if it has connections.
    pub(crate) fn end(&self, session: &ClientSession) {
        self.end_if(|entry| entry.session.secret == session.secret);
    }

    /// Ends the sessions for which `picked` is true. Returns those that this call ended, with the
    /// number of regions that each had.
    fn end_if(&self, picked: impl Fn(&Entry) -> bool) -> Vec<(Arc<ClientSession>, usize)> {
        let mut ending = Vec::new();
        for entry in self.entries().values_mut().filter(|entry| !entry.ending && picked(entry)) {
            entry.ending = true;
            ending.push((entry.session.clone(), 0));
        }
        // Freeing gigabytes takes a while, so it is not done under the lock.
        ending.iter_mut().for_each(|(session, regions)| *regions = session.end().len());
        let mut entries = self.entries();
        ending.iter().for_each(|(session, _)| drop(entries.remove(&session.secret)));
        ending
    }

    /// Ends the sessions whose lease is over, and drops tickets that were not claimed in time.
    /// Returns the sessions that ended, with the number of regions that each had.
    pub(crate) fn expire(&self, now: Instant) -> Vec<(Arc<ClientSession>, usize)> {
        let over = |lost_at: Instant| now.saturating_duration_since(lost_at) >= self.lease;
        let unclaimed: Vec<_> = self.tickets().extract_if(|_, ticket| ticket.expires <= now).collect();
        drop(unclaimed);
        self.end_if(|entry| entry.lost_at.is_some_and(over))
    }

    /// Adds a region to a session. Returns an error if the session has ended.
    pub(crate) fn add_region(&self, session: &ClientSession, region: StoredRegion) -> Result<RegionId, SessionClosed> {
        let id = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        session.insert(id, region)?;
        Ok(id)
    }

    /// Keeps a snapshot until a client of the tenant claims it with `secret`, or the ticket
    /// expires. The tenant pays for it as for a region.
    pub(crate) fn add_ticket(&self, secret: u128, snapshot: RegionSnapshot, tenant: Arc<Tenant>, now: Instant) {
        self.tickets().insert(secret, SnapshotTicket { snapshot, tenant, expires: now + self.ticket_life });
    }

    /// Takes the snapshot behind a ticket. Returns it once, and only to the tenant that made it.
    pub(crate) fn claim(&self, secret: u128, tenant: &Arc<Tenant>, now: Instant) -> Option<RegionSnapshot> {
        let mut tickets = self.tickets();
        let ticket = tickets.get(&secret)?;
        if !Arc::ptr_eq(&ticket.tenant, tenant) || ticket.expires <= now {
            return None;
        }
        tickets.remove(&secret).map(|ticket| ticket.snapshot)
    }

    /// Checks whether a snapshot of this tenant waits to be claimed.
    pub(crate) fn awaits_claim(&self, tenant: &Arc<Tenant>) -> bool {
        self.tickets().values().any(|ticket| Arc::ptr_eq(&ticket.tenant, tenant))
    }

    /// Checks whether there is neither a region nor a snapshot that may become one.
    pub(crate) fn is_empty(&self) -> bool {
        self.tickets().is_empty() && self.all().iter().all(|session| session.region_count() == 0)
    }

    /// Returns all sessions that exist now.
    pub(crate) fn all(&self) -> Vec<Arc<ClientSession>> {
        self.entries().values().map(|entry| entry.session.clone()).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.entries().len()
    }

    /// Ends all sessions and drops all tickets.
    pub(crate) fn clear(&self) {
        self.end_if(|_| true);
        let tickets: Vec<_> = self.tickets().drain().collect();
        drop(tickets);
    }
}

impl Tenant {
    /// Returns the account that pays for what a client of this tenant keeps. `address` makes the
    /// ledger if the tenant has none of its own.
    pub(crate) fn account(&self, server: &Arc<PageCounter>, address: impl FnOnce() -> Arc<Ledger>) -> Account {
        let ledger = self.ledger.clone().unwrap_or_else(address);
        Account { server: server.clone(), tenant: self.quota.clone(), ledger }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against regions that live on after their owner, and against strangers who join.
    use super::*;
    use farfield_core::PageId;

    fn tenant() -> Arc<Tenant> {
        let ledger = crate::store::tests::ledger();
        Arc::new(Tenant {
            name: "t".into(),
            quota: Arc::new(PageCounter::new(None)),
            ledger: Some(ledger),
            counters: ServerCounters::default(),
        })
    }

    fn account(tenant: &Tenant, capacity: &Arc<PageCounter>) -> Account {
        tenant.account(capacity, || unreachable!("it has a ledger"))
    }

    fn open(
        sessions: &Sessions,
        secret: u128,
        tenant: &Arc<Tenant>,
        capacity: &Arc<PageCounter>,
    ) -> Arc<ClientSession> {
        sessions.open(SessionSecret(secret), tenant.clone(), account(tenant, capacity), "test").unwrap()
    }

    #[test]
    fn a_lease_ends_what_nobody_comes_back_for() {
        let lease = Duration::from_secs(10);
        let sessions = Sessions::new(lease, lease);
        let (tenant, stranger) = (tenant(), tenant());
        let capacity = Arc::new(PageCounter::new(None));
        let secret = SessionSecret(7);
        let session = open(&sessions, secret.0, &tenant, &capacity);
        let region = StoredRegion::new(10, account(&tenant, &capacity)).unwrap();
        region.write(PageId(0), &[1; 4096], |_| 0).unwrap();
        let id = sessions.add_region(&session, region).unwrap();
        let start = Instant::now();
        assert!(sessions.expire(start + lease * 9).is_empty(), "held");
        assert!(!sessions.leave(&session, start));
        assert!(sessions.join(secret, &stranger).is_none());
        assert!(sessions.expire(start + lease / 2).is_empty(), "on lease");
        assert!(sessions.join(secret, &tenant).is_some());
        assert!(sessions.expire(start + lease * 9).is_empty(), "held again");
        assert!(session.region(id).is_some());
        assert!(!sessions.leave(&session, start));
        assert_eq!(capacity.used_pages(), 1);
        assert_eq!(sessions.expire(start + lease).len(), 1);
        assert_eq!(capacity.used_pages(), 0);
        assert!(session.region(id).is_none());
        assert!(sessions.join(secret, &tenant).is_none());
        let late = StoredRegion::new(10, account(&tenant, &capacity)).unwrap();
        assert_eq!(sessions.add_region(&session, late), Err(SessionClosed));
    }

    #[test]
    fn a_session_is_counted_until_its_memory_is_free_and_joined_by_nobody_meanwhile() {
        let sessions = Sessions::new(Duration::ZERO, Duration::ZERO);
        let (tenant, capacity) = (tenant(), Arc::new(PageCounter::new(None)));
        let session = open(&sessions, 7, &tenant, &capacity);
        for _ in 0..8 {
            let region = StoredRegion::new(256, account(&tenant, &capacity)).unwrap();
            region.write(PageId(0), &[1; 256 * 4096], |_| 0).unwrap();
            sessions.add_region(&session, region).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| sessions.end(&session));
            while sessions.count() > 0 {
                // Joined before the end began, or not at all; whoever joins finds what was there, or nothing.
                if capacity.used_pages() < 8 * 256 {
                    assert!(sessions.join(SessionSecret(7), &tenant).is_none());
                }
            }
            assert_eq!(capacity.used_pages(), 0, "no session, but its memory");
        });
    }

    #[test]
    fn a_ticket_is_good_once_in_time_and_for_its_tenant() {
        let life = Duration::from_secs(30);
        let sessions = Sessions::new(life, life);
        let (tenant, stranger) = (tenant(), tenant());
        let capacity = Arc::new(PageCounter::new(None));
        let region = StoredRegion::new(10, account(&tenant, &capacity)).unwrap();
        let now = Instant::now();
        sessions.add_ticket(1, region.snapshot().unwrap(), tenant.clone(), now);
        sessions.add_ticket(2, region.snapshot().unwrap(), tenant.clone(), now);
        assert!(sessions.claim(1, &stranger, now).is_none());
        assert!(sessions.claim(1, &tenant, now).is_some());
        assert!(sessions.claim(1, &tenant, now).is_none());
        assert!(sessions.claim(2, &tenant, now + life).is_none());
        sessions.expire(now + life);
        assert!(sessions.claim(2, &tenant, now).is_none());
    }

    #[test]
    fn without_a_lease_the_last_connection_takes_everything_with_it() {
        let sessions = Sessions::new(Duration::ZERO, Duration::ZERO);
        let session = open(&sessions, 7, &tenant(), &Arc::new(PageCounter::new(None)));
        assert!(sessions.join(SessionSecret(7), &session.tenant).is_some());
        assert!(!sessions.leave(&session, Instant::now()));
        assert!(sessions.leave(&session, Instant::now()));
        assert_eq!(sessions.count(), 0);
    }
}
