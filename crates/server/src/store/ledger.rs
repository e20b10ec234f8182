//! Ledgers of shared resources other than memory, of which the machine has a limited amount.
//!
//! A resource is charged when it is allocated, and a guard, [`Charge`], gives it back. A holder (a
//! tenant, or without tokens an address) may hold as much of a resource as is still free for
//! others: *dynamic thresholds* (Choudhury and Hahne 1998), as switches share their buffers. A
//! holder that takes all it can has half. Something is always left for the next holder, however
//! many there are, and no share per holder has to be configured.

use crate::work_semaphore::{RecentWork, WorkSemaphore, WorkTurn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A limited resource of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resource {
    /// Open files of the process (`RLIMIT_NOFILE`).
    Descriptors,
    /// Mappings of the process (`vm.max_map_count`).
    Mappings,
    /// Bytes of address space.
    AddressBytes,
    /// Sessions, also those on lease.
    Sessions,
    /// Connections, each of which has a thread.
    Connections,
    /// Bytes of connection buffers beyond what each connection has from the beginning.
    BufferBytes,
}

impl Resource {
    pub(crate) const ALL: [Resource; 6] = [
        Resource::Descriptors,
        Resource::Mappings,
        Resource::AddressBytes,
        Resource::Sessions,
        Resource::Connections,
        Resource::BufferBytes,
    ];

    /// Returns the amount that a holder may have as long as any is left, so that small servers are
    /// usable.
    fn floor(self) -> u64 {
        match self {
            Resource::Descriptors => 64,
            Resource::Mappings => 64,
            Resource::AddressBytes => 0,
            Resource::Sessions | Resource::Connections => 8,
            Resource::BufferBytes => 8 << 20,
        }
    }

    /// Returns the resource's name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Resource::Descriptors => "descriptors",
            Resource::Mappings => "mappings",
            Resource::AddressBytes => "address_bytes",
            Resource::Sessions => "sessions",
            Resource::Connections => "connections",
            Resource::BufferBytes => "buffer_bytes",
        }
    }
}

/// A counter for each resource.
#[derive(Debug, Default)]
struct ResourceCounters {
    descriptors: AtomicU64,
    mappings: AtomicU64,
    address_bytes: AtomicU64,
    sessions: AtomicU64,
    connections: AtomicU64,
    buffer_bytes: AtomicU64,
}

impl ResourceCounters {
    fn of(&self, resource: Resource) -> &AtomicU64 {
        match resource {
            Resource::Descriptors => &self.descriptors,
            Resource::Mappings => &self.mappings,
            Resource::AddressBytes => &self.address_bytes,
            Resource::Sessions => &self.sessions,
            Resource::Connections => &self.connections,
            Resource::BufferBytes => &self.buffer_bytes,
        }
    }

    fn get(&self, resource: Resource) -> u64 {
        self.of(resource).load(Ordering::Relaxed)
    }
}

/// Limit and use of each resource on the server.
#[derive(Debug)]
pub(crate) struct ResourceBudget {
    limits: ResourceCounters,
    /// Whether one holder may have all of it.
    is_private: bool,
    held: ResourceCounters,
    /// Which holders use the processors.
    recent_work: Arc<RecentWork>,
    /// Permits to accept connections and to authenticate clients.
    pub(crate) newcomers: Arc<WorkSemaphore>,
}

impl ResourceBudget {
    pub(crate) fn new(limit: impl Fn(Resource) -> u64, is_private: bool) -> ResourceBudget {
        let recent_work = Arc::new(RecentWork::default());
        let newcomers = permits(&recent_work, is_private);
        let (limits, held) = (ResourceCounters::default(), ResourceCounters::default());
        let budget = ResourceBudget { limits, is_private, held, recent_work, newcomers };
        Resource::ALL.into_iter().for_each(|one| budget.limits.of(one).store(limit(one), Ordering::Relaxed));
        budget
    }

    pub(crate) fn limit(&self, resource: Resource) -> u64 {
        self.limits.get(resource)
    }

    pub(crate) fn held(&self, resource: Resource) -> u64 {
        self.held.get(resource)
    }
}

/// Error: this holder cannot have more of the resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Exhausted(pub(crate) Resource);

/// Resources held by one tenant, or without tokens by one address.
#[derive(Debug)]
pub(crate) struct Ledger {
    budget: Arc<ResourceBudget>,
    held: ResourceCounters,
    permits: Arc<WorkSemaphore>,
}

/// Longest wait for a permit. No thread that has one waits for one that has none, so this only ends
/// what should not be.
const WORK_WAIT_MAX: Duration = Duration::from_secs(10);

/// Makes the permits of one holder. On a private server they leave no processor to others.
fn permits(recent_work: &Arc<RecentWork>, is_private: bool) -> Arc<WorkSemaphore> {
    let recent_work = if is_private { Arc::default() } else { recent_work.clone() };
    Arc::new(WorkSemaphore::new(recent_work, WORK_WAIT_MAX))
}

impl Ledger {
    pub(crate) fn new(budget: Arc<ResourceBudget>) -> Ledger {
        let permits = permits(&budget.recent_work, budget.is_private);
        Ledger { budget, held: ResourceCounters::default(), permits }
    }

    /// Returns the turns of a thread that works for the holder. It has no permit yet.
    pub(crate) fn turn(&self) -> WorkTurn {
        WorkTurn::new(self.permits.clone())
    }

    /// Checks whether the holder has so much of a resource that it might soon be refused more.
    pub(crate) fn is_short(&self, resource: Resource) -> bool {
        let free = self.budget.limit(resource).saturating_sub(self.budget.held(resource));
        self.held(resource) > free - free / 4
    }

    pub(crate) fn held(&self, resource: Resource) -> u64 {
        self.held.get(resource)
    }

    /// Charges `amount` for as long as the returned guard lives.
    pub(crate) fn charge(self: &Arc<Self>, resource: Resource, amount: u64) -> Result<Charge, Exhausted> {
        let (own, all) = (self.held.of(resource), self.budget.held.of(resource));
        let fits = |own: u64, all: u64| {
            let limit = self.budget.limit(resource);
            all <= limit && (self.budget.is_private || own <= (limit - all).max(resource.floor()))
        };
        let with = |counter: u64| counter.saturating_add(amount);
        // Checked before the counters change: a holder that is refused again and again must not
        // make others see less than there is.
        if !fits(with(own.load(Ordering::Relaxed)), with(all.load(Ordering::Relaxed))) {
            return Err(Exhausted(resource));
        }
        let own = with(own.fetch_add(amount, Ordering::Relaxed));
        let all = with(all.fetch_add(amount, Ordering::Relaxed));
        // From here on the guard gives the amount back, also if other threads were faster.
        let charge = Charge { ledger: self.clone(), resource, amount };
        if fits(own, all) { Ok(charge) } else { Err(Exhausted(resource)) }
    }

    /// Checks whether the holder has nothing.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        Resource::ALL.iter().all(|resource| self.held(*resource) == 0)
    }
}

/// A held amount of a resource, given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    ledger: Arc<Ledger>,
    resource: Resource,
    amount: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.held.of(self.resource).fetch_sub(self.amount, Ordering::Relaxed);
        self.ledger.budget.held.of(self.resource).fetch_sub(self.amount, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    //! Guards against one holder that takes everything, and against what is charged and never given back.

    use super::*;
    use fastrand::Rng;

    #[test]
    fn a_client_that_takes_all_it_can_leaves_as_much_for_others() {
        let budget = Arc::new(ResourceBudget::new(|_| 3000, false));
        let holder = || Arc::new(Ledger::new(budget.clone()));
        let take_all = |ledger: &Arc<Ledger>| -> Vec<Charge> {
            std::iter::from_fn(|| ledger.charge(Resource::Mappings, 1).ok()).collect()
        };
        let (first, second, third) = (holder(), holder(), holder());
        let kept = take_all(&first);
        assert_eq!(kept.len(), 1500);
        let others = take_all(&second);
        assert_eq!(others.len(), 750);
        assert!(!take_all(&third).is_empty(), "however many come");
        drop(kept);
        assert_eq!(take_all(&third).len(), 1125, "what is given back is there for all");
        drop(others);
        assert!(first.is_empty() && second.is_empty() && third.is_empty());
        assert_eq!(budget.held(Resource::Mappings), 0);
    }

    #[test]
    fn a_small_server_can_be_used_and_not_beyond_what_it_has() {
        let budget = Arc::new(ResourceBudget::new(|_| 3, false));
        let ledger = Arc::new(Ledger::new(budget));
        let held: Vec<Charge> = std::iter::from_fn(|| ledger.charge(Resource::Connections, 1).ok()).collect();
        assert_eq!(held.len(), 3);
        assert_eq!(ledger.charge(Resource::Connections, u64::MAX).err(), Some(Exhausted(Resource::Connections)));
        assert_eq!(ledger.held(Resource::Connections), 3, "what is refused is not kept");
    }

    #[test]
    fn the_only_job_of_a_server_may_have_all() {
        let budget = Arc::new(ResourceBudget::new(|_| 100, true));
        let ledger = Arc::new(Ledger::new(budget.clone()));
        let held = ledger.charge(Resource::Mappings, 100).unwrap();
        assert!(ledger.charge(Resource::Mappings, 1).is_err());
        drop(held);
        let all = budget.newcomers.max_now();
        assert_eq!((ledger.permits.max_now(), budget.newcomers.max_now()), (all, all), "nothing is left to others");
        let other = Ledger::new(budget);
        assert_eq!((other.permits.max_now(), ledger.permits.max_now()), (all, all));
    }

    #[test]
    fn a_ledger_holds_what_was_charged_and_not_returned() {
        let budget = Arc::new(ResourceBudget::new(|_| 1000, false));
        let ledgers = [(); 3].map(|()| Arc::new(Ledger::new(budget.clone())));
        let mut held: Vec<(usize, Charge)> = Vec::new();
        let mut dice = Rng::with_seed(0x1ed9e4);
        for step in 0..4000 {
            if dice.usize(..5) < 2 && !held.is_empty() {
                held.swap_remove(dice.usize(..held.len()));
            } else {
                let (who, resource) = (dice.usize(..3), Resource::ALL[dice.usize(..6)]);
                let charged = ledgers[who].charge(resource, dice.u64(..40));
                held.extend(charged.ok().map(|charge| (who, charge)));
            }
            for resource in Resource::ALL {
                let of = |who: Option<usize>| -> u64 {
                    let mine = held
                        .iter()
                        .filter(|(one, charge)| who.is_none_or(|who| who == *one) && charge.resource == resource);
                    mine.map(|(_, charge)| charge.amount).sum()
                };
                assert_eq!(budget.held(resource), of(None), "step {step}");
                assert!(budget.held(resource) <= 1000);
                assert!((0..3).all(|who| ledgers[who].held(resource) == of(Some(who))), "step {step}");
            }
        }
        drop(held);
        assert!(ledgers.iter().all(|ledger| ledger.is_empty()));
    }
}
