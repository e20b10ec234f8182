//! The tenants of a running server, whose tokens and quotas may change.

use crate::counters::ServerCounters;
use crate::sessions::Tenant;
use crate::store::{Ledger, PageCounter, ResourceBudget};
use crate::tenants::{Tenants, same_bytes};
use farfield_core::geometry::PAGE_BYTES;
use std::sync::{Arc, RwLock, RwLockReadGuard};

/// Tokens of before that a tenant is remembered by.
const FORMER_MAX: usize = 8;

/// All tenants that the server has had, and the tokens by which it knows them.
#[derive(Debug)]
pub(crate) struct TenantTable {
    budget: Arc<ResourceBudget>,
    /// In the order in which they were first named. A server without tokens has a single tenant
    /// without a name.
    rows: RwLock<Vec<KnownTenant>>,
    has_tokens: bool,
}

struct KnownTenant {
    tenant: Arc<Tenant>,
    /// Token; `None` if the tenant is not named any more.
    token: Option<Vec<u8>>,
    /// Tokens of before, the last one first.
    former: Vec<Vec<u8>>,
}

impl std::fmt::Debug for KnownTenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Tokens are secrets.
        self.tenant.fmt(f)
    }
}

/// Error: a server without tokens has no tenants whose tokens could change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the server was started without tokens, so it has none to exchange: start it with a token file")]
pub struct NoTokens;

/// Differences between the tenants of before and those of now.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TenantChanges {
    /// Tenants that are new, or named again.
    pub added: usize,
    /// Tenants with another token or quota.
    pub changed: usize,
    /// Tenants that are not named any more.
    pub removed: usize,
}

impl TenantTable {
    pub(crate) fn new(tenants: Option<&Tenants>, budget: &Arc<ResourceBudget>) -> TenantTable {
        let mut table = TenantTable { budget: budget.clone(), rows: RwLock::default(), has_tokens: tenants.is_some() };
        let rows = match tenants {
            None => {
                vec![KnownTenant { tenant: table.tenant("", None, None), token: Some(Vec::new()), former: Vec::new() }]
            }
            Some(_) => Vec::new(),
        };
        table.rows = RwLock::new(rows);
        if let Some(tenants) = tenants {
            table.replace(tenants);
        }
        table
    }

    fn rows(&self) -> RwLockReadGuard<'_, Vec<KnownTenant>> {
        self.rows.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tenant(&self, name: &str, quota_bytes: Option<u64>, ledger: Option<Ledger>) -> Arc<Tenant> {
        Arc::new(Tenant {
            name: name.to_owned(),
            quota: Arc::new(PageCounter::new(quota_bytes.map(pages))),
            ledger: ledger.map(Arc::new),
            counters: ServerCounters::default(),
        })
    }

    /// Returns the tenant that opens sessions with this token or, without a token, with one of these
    /// names in its certificate. Takes as long for a wrong token as for a right one.
    pub(crate) fn find(&self, token: &[u8], names: &[String]) -> Option<Arc<Tenant>> {
        let rows = self.rows();
        if !self.has_tokens {
            return rows.first().map(|row| row.tenant.clone());
        }
        if token.is_empty() {
            let is_named = |row: &&KnownTenant| row.token.is_some() && names.contains(&row.tenant.name);
            return rows.iter().find(is_named).map(|row| row.tenant.clone());
        }
        let matches = |row: &&KnownTenant| row.token.as_ref().is_some_and(|theirs| same_bytes(theirs, token));
        // All rows are compared, also behind the one that matches.
        let found = rows.iter().filter(matches).fold(None, |_, row| Some(row));
        found.map(|row| row.tenant.clone())
    }

    /// Checks whether a client that knows the secret of a session of this tenant may join it with
    /// this token, which may be one of before: the server gave the secret to a client that had one.
    /// Without a token, one of these names in its certificate must be the tenant's.
    pub(crate) fn may_join(&self, tenant: &Arc<Tenant>, token: &[u8], names: &[String]) -> bool {
        let rows = self.rows();
        let Some(row) = rows.iter().find(|row| Arc::ptr_eq(&row.tenant, tenant)) else { return false };
        if self.has_tokens && token.is_empty() {
            return names.contains(&row.tenant.name);
        }
        !self.has_tokens || row.token.iter().chain(&row.former).filter(|theirs| same_bytes(theirs, token)).count() > 0
    }

    /// Exchanges tokens and quotas. Sessions go on, also those of tenants that are not named any
    /// more.
    pub(crate) fn exchange(&self, tenants: &Tenants) -> Result<TenantChanges, NoTokens> {
        if self.has_tokens { Ok(self.replace(tenants)) } else { Err(NoTokens) }
    }

    fn replace(&self, tenants: &Tenants) -> TenantChanges {
        let mut rows = self.rows.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut changes = TenantChanges::default();
        for row in rows.iter_mut() {
            if !tenants.0.iter().any(|named| named.name == row.tenant.name) && row.retire() {
                changes.removed += 1;
            }
        }
        for named in &tenants.0 {
            let Some(row) = rows.iter_mut().find(|row| row.tenant.name == named.name) else {
                let ledger = Ledger::new(self.budget.clone());
                let tenant = self.tenant(&named.name, named.quota_bytes, Some(ledger));
                rows.push(KnownTenant { tenant, token: Some(named.token.clone()), former: Vec::new() });
                changes.added += 1;
                continue;
            };
            let quota = named.quota_bytes.map(pages);
            let is_other_quota = row.tenant.quota.limit_pages() != quota;
            match row.token.as_ref() == Some(&named.token) {
                true if is_other_quota => changes.changed += 1,
                true => {}
                false if row.retire() => changes.changed += 1,
                false => changes.added += 1,
            }
            row.token = Some(named.token.clone());
            row.tenant.quota.set_limit(quota);
        }
        changes
    }

    /// Returns the tenants that have a name, and a token or memory.
    pub(crate) fn named(&self) -> Vec<Arc<Tenant>> {
        let rows = self.rows();
        let shown = rows.iter().filter(|row| row.token.is_some() || row.tenant.quota.used_pages() > 0);
        shown.map(|row| row.tenant.clone()).filter(|tenant| !tenant.name.is_empty()).collect()
    }
}

impl KnownTenant {
    /// Makes the token one of before. Returns whether there was one.
    fn retire(&mut self) -> bool {
        let token = self.token.take();
        let had = token.is_some();
        self.former.splice(..0, token);
        self.former.truncate(FORMER_MAX);
        had
    }
}

fn pages(bytes: u64) -> u64 {
    bytes / PAGE_BYTES as u64
}

#[cfg(test)]
mod tests {
    //! Guards against a token that opens sessions of another tenant, or after it was taken back;
    //! against a tenant whose memory is forgotten because its token changed.

    use super::*;
    use crate::config::Config;

    fn table(text: &str) -> TenantTable {
        let budget = Arc::new(crate::server::budget(&Config::default(), 1024));
        TenantTable::new(Some(&Tenants::parse(text).unwrap()), &budget)
    }

    fn named(table: &TenantTable, name: &str) -> Arc<Tenant> {
        table.rows().iter().find(|row| row.tenant.name == name).unwrap().tenant.clone()
    }

    /// Returns the name of the tenant that opens sessions with this token.
    fn opener(table: &TenantTable, token: &str) -> Option<String> {
        table.find(token.as_bytes(), &[]).map(|tenant| tenant.name.clone())
    }

    fn joins(table: &TenantTable, name: &str, token: &str) -> bool {
        table.may_join(&named(table, name), token.as_bytes(), &[])
    }

    #[test]
    fn tokens_are_compared_as_a_whole() {
        let table = table("alice secret-a 1G\nbob secret-b -");
        assert_eq!(opener(&table, "secret-b").as_deref(), Some("bob"));
        assert!(joins(&table, "bob", "secret-b") && !joins(&table, "alice", "secret-b"));
        for wrong in ["", "secret", "secret-b\0", "secret-c", &"x".repeat(300)] {
            assert_eq!(opener(&table, wrong), None);
            assert!(!joins(&table, "bob", wrong));
        }
    }

    #[test]
    fn an_exchanged_token_joins_sessions_and_opens_none() {
        let table = table("alice one 1G\nbob two -\ncarol three -");
        let alice = table.find(b"one", &[]).unwrap();
        let changes = table.exchange(&Tenants::parse("alice uno 2G\ncarol three -\ndave four -").unwrap()).unwrap();
        assert_eq!(changes, TenantChanges { added: 1, changed: 1, removed: 1 });
        assert_eq!((opener(&table, "one"), opener(&table, "two")), (None, None));
        assert!(joins(&table, "alice", "one") && joins(&table, "alice", "uno") && joins(&table, "bob", "two"));
        assert!(Arc::ptr_eq(&alice, &table.find(b"uno", &[]).unwrap()), "its memory counts on");
        assert_eq!(alice.quota.limit_pages(), Some(pages(2 << 30)));
        assert_eq!(opener(&table, "four").as_deref(), Some("dave"));
        let names: Vec<_> = table.named().iter().map(|tenant| tenant.name.clone()).collect();
        assert_eq!(names, ["alice", "carol", "dave"]);
        // A tenant that comes back is the one that it was.
        let changes = table.exchange(&Tenants::parse("bob two -\nalice three -").unwrap()).unwrap();
        assert_eq!(changes, TenantChanges { added: 1, changed: 1, removed: 2 });
        assert_eq!(opener(&table, "two").as_deref(), Some("bob"));
        assert_eq!(table.exchange(&Tenants::parse("bob two -\nalice three -").unwrap()), Ok(TenantChanges::default()));
    }

    #[test]
    fn a_token_that_went_to_another_tenant_opens_its_sessions_and_joins_those_of_both() {
        let table = table("alice one -\ncarol three -");
        table.exchange(&Tenants::parse("alice three -").unwrap()).unwrap();
        assert_eq!(opener(&table, "three").as_deref(), Some("alice"));
        assert!(joins(&table, "alice", "three") && joins(&table, "carol", "three"));
        assert!(!joins(&table, "carol", "one"));
    }

    #[test]
    fn a_certificate_has_the_name_of_its_tenant_and_a_token_counts_more() {
        let table = table("alice one -\nbob - -\ncarol - -");
        let of = |token: &[u8], names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            table.find(token, &names).map(|tenant| tenant.name.clone())
        };
        assert_eq!(of(b"", &["alice"]).as_deref(), Some("alice"));
        assert_eq!(of(b"", &["nobody", "bob"]).as_deref(), Some("bob"));
        assert_eq!(of(b"one", &["bob"]).as_deref(), Some("alice"));
        for (token, names) in [(&b""[..], &[][..]), (b"", &["nobody"]), (b"-", &[]), (b"wrong", &["bob"])] {
            assert_eq!(of(token, names), None, "{names:?}");
        }
        let may = |name: &str, names: &[String]| table.may_join(&named(&table, name), b"", names);
        assert!(may("bob", &["bob".to_owned()]) && !may("bob", &["carol".to_owned()]) && !may("bob", &[]));
        table.exchange(&Tenants::parse("alice one -").unwrap()).unwrap();
        assert_eq!(table.find(b"", &["bob".to_owned()]).map(|tenant| tenant.name.clone()), None);
        assert!(table.may_join(&named(&table, "bob"), b"", &["bob".to_owned()]), "sessions go on");
    }

    #[test]
    fn a_server_without_tokens_has_none_to_exchange() {
        let budget = Arc::new(crate::server::budget(&Config::default(), 1024));
        let table = TenantTable::new(None, &budget);
        assert_eq!(opener(&table, "anything").as_deref(), Some(""));
        assert!(joins(&table, "", "anything"));
        assert_eq!(table.exchange(&Tenants::default()), Err(NoTokens));
    }
}
