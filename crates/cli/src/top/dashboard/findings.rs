//! What is wrong with a job, a heap or a server, and what to do about it, in the words of
//! `farfield doctor`.
//!
//! Each finding is named by the state that it means. The worst one is the state of its row.

use super::super::heaps::HeapRow;
use super::super::{JobRow, ServerRow, TenantRow, printable};
use crate::doctor::CheckResult;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pager::runner::{ByteSize, Latency};

/// Percentage of a server's capacity from which on it counts as full.
const FULL_PERCENT: u64 = 95;
/// Faults of a job that take this much time per second make it wait.
const WAITING_S_PER_S: f64 = 0.5;
/// Bytes beyond the budget that are no finding: a switch of the pool may take 4 MiB.
const EXCESS_BYTES: u64 = 8 << 20;

/// Returns what there is to say about a job, the worst first.
pub(super) fn of_job(job: &JobRow) -> Vec<CheckResult> {
    if !job.alive {
        return Vec::new();
    }
    let checks = [servers, protection, degraded, returned, scrub, budget, tables, waiting, moving];
    sorted(checks.into_iter().filter_map(|check| check(job)).collect())
}

/// Returns what there is to say about a heap.
pub(super) fn of_heap(heap: &HeapRow) -> Vec<CheckResult> {
    let number = |name: &str| heap.counters.get(name).copied().unwrap_or(0);
    let mut findings = Vec::new();
    if number("held_by") != 0 {
        findings.push(CheckResult::warn(
            "held",
            format!("too little room for {}", Latency(Some(number("held_back_ns")))),
            format!("a scope of thread {} does not end: end it, or enter one for each step", number("held_by")),
        ));
    }
    findings
}

/// Returns what there is to say about a server, whoever uses it.
pub(super) fn of_server(server: &ServerRow) -> Vec<CheckResult> {
    lost(server).or_else(|| full(server)).into_iter().collect()
}

/// Returns what there is to say about a tenant of a server.
pub(super) fn of_tenant(tenant: &TenantRow) -> Vec<CheckResult> {
    let full = full_percent(tenant.used_bytes, tenant.quota_bytes.unwrap_or(0));
    let advice = "give it a larger quota in the token file of the server, or move one of its jobs to another pool: \
                  a job whose far memory is full ends with 94";
    full.map(|found| CheckResult::warn("full", format!("uses {found}"), advice)).into_iter().collect()
}

/// Returns what there is to say about a machine whose dashboard does not answer.
pub(super) fn of_machine(url: &str, error: &str) -> CheckResult {
    let advice = format!(
        "is `farfield top --serve` running there, and the tunnel to it (`ssh -N -L …`)? What is shown of it is old; \
         {url} is asked again and again"
    );
    CheckResult::fail("unreachable", printable(error), advice)
}

fn sorted(mut findings: Vec<CheckResult>) -> Vec<CheckResult> {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

fn lost(server: &ServerRow) -> Option<CheckResult> {
    let error = server.error.as_ref()?;
    let advice = "start it again at its URL, or mend the way to it: `farfield doctor --far URL` tries it out";
    Some(CheckResult::fail("lost", printable(error), advice))
}

fn full(server: &ServerRow) -> Option<CheckResult> {
    let number = |name: &str| server.numbers.get(name).copied().unwrap_or(0);
    let used = number("used_bytes").saturating_add(number("reserved_bytes"));
    full_percent(used, number("capacity_bytes")).map(|found| {
        CheckResult::warn(
            "full",
            format!("{} holds {found}", server.url),
            "give it more --capacity or its tenant a larger quota, or move a job away with `farfield pool switch JOB \
             URL`: a job whose far memory is full ends with 94",
        )
    })
}

/// Describes the use of what is nearly used up. A capacity of 0 is none.
fn full_percent(used: u64, capacity: u64) -> Option<String> {
    let percent = used.saturating_mul(100).checked_div(capacity)?;
    (percent >= FULL_PERCENT).then(|| format!("{} of {} ({percent} %)", ByteSize(used), ByteSize(capacity)))
}

/// Checks the servers of a job.
fn servers(job: &JobRow) -> Option<CheckResult> {
    let is_redundant = !job.pool.protection.is_empty();
    let lost = job.servers.iter().find_map(|server| Some((server, server.error.as_ref()?)));
    match lost {
        Some((server, error)) if is_redundant => Some(CheckResult::warn(
            "degraded",
            format!("{} does not answer: {}", server.url, printable(error)),
            "the job goes on without it; start it again at its URL, and it is filled by itself",
        )),
        Some((server, error)) => Some(CheckResult::fail(
            "lost",
            format!("{} does not answer: {}", server.url, printable(error)),
            "the job ends with 93 when it needs a page from there for 20 s; next time name two: \
             --far 'mirror(URL,URL)'",
        )),
        None => job.servers.iter().find_map(full),
    }
}

fn protection(job: &JobRow) -> Option<CheckResult> {
    let what = job.pool.unprotected()??;
    let advice = "do not stop another server of this pool; start the missing one again at its URL, or name a spare: \
                  --far 'mirror(URL,URL,spare=URL)'";
    Some(CheckResult::fail("unprotected", what, advice))
}

fn degraded(job: &JobRow) -> Option<CheckResult> {
    let count = job.pool.degraded.len();
    (count > 0 && job.pool.protection.is_empty()).then(|| {
        CheckResult::warn(
            "degraded",
            format!("a server is lost, silent or incomplete for {count} processes"),
            format!("`farfield pool status {}` says which; start it again at its URL", job.runner_pid),
        )
    })
}

fn returned(job: &JobRow) -> Option<CheckResult> {
    let reason = job.pool.reason.as_ref()?;
    Some(CheckResult::warn(
        "returned",
        format!("came back from {}: {}", job.pool.before.join(" "), printable(reason)),
        format!("make room there, or choose another pool: `farfield pool switch {} URL`", job.runner_pid),
    ))
}

fn scrub(job: &JobRow) -> Option<CheckResult> {
    let sum = |pages: fn(&crate::pool::ScrubRow) -> u64| job.pool.scrubbed.iter().map(pages).sum::<u64>();
    let (wrong, mended) = (sum(|row| row.wrong_pages), sum(|row| row.mended_pages));
    (wrong > 0).then(|| {
        CheckResult::warn(
            "rotten",
            format!("{wrong} pages were wrong at a server, {mended} of them are mended"),
            "examine the memory or the disk of the servers of this pool",
        )
    })
}

fn budget(job: &JobRow) -> Option<CheckResult> {
    let excess = job.near_bytes.checked_sub(job.near_limit_bytes).filter(|excess| *excess > EXCESS_BYTES)?;
    Some(CheckResult::warn(
        "over",
        format!("has {} more near than its budget of {}", ByteSize(excess), ByteSize(job.near_limit_bytes)),
        "it shrinks by itself; if it does not, its processes are stopped, or tables and pinned memory take the rest",
    ))
}

fn tables(job: &JobRow) -> Option<CheckResult> {
    (job.meta_bytes > job.near_limit_bytes / 2).then(|| {
        CheckResult::warn(
            "tables",
            format!("tables and buffers take {} of {}", ByteSize(job.meta_bytes), ByteSize(job.near_limit_bytes)),
            format!("give it more: `farfield near {} SIZE`", job.runner_pid),
        )
    })
}

/// Checks how much of its time a job waits for far memory.
fn waiting(job: &JobRow) -> Option<CheckResult> {
    let waits = job.faults_per_s * job.fault_ns_p50? as f64 / 1e9;
    (waits > WAITING_S_PER_S).then(|| {
        CheckResult::warn(
            "waiting",
            format!("its threads wait for far memory for {waits:.1} s in each second"),
            format!(
                "give it more near memory with `farfield near {} SIZE`, or a faster pool; `farfield advise` says how \
                 much",
                job.runner_pid
            ),
        )
    })
}

fn moving(job: &JobRow) -> Option<CheckResult> {
    let sum = |pages: fn(&crate::pool::MovingRow) -> u64| job.pool.moving.iter().map(pages).sum::<u64>();
    let size = |pages: u64| ByteSize(pages.saturating_mul(PAGE_BYTES as u64));
    let (pages, moved) = (size(sum(|row| row.pages)), size(sum(|row| row.moved_pages)));
    (!job.pool.moving.is_empty()).then(|| CheckResult {
        advice: format!("`farfield pool cancel {}` takes it back; both pools must stay until then", job.runner_pid),
        ..CheckResult::ok("moving", format!("moves to {}: {moved} of {pages}", job.pool.urls.join(" ")))
    })
}

#[cfg(test)]
mod tests {
    //! Guards against trouble that nobody is told of, and advice that does not fit.
    use super::super::super::tests::{numbers, wide_job};
    use super::*;
    use crate::doctor::Severity;
    use crate::pool::PoolRow;

    fn well() -> JobRow {
        let server = ServerRow {
            url: "tcp://a:1".into(),
            numbers: numbers([("used_bytes", 10), ("capacity_bytes", 1000)]),
            ..ServerRow::default()
        };
        JobRow {
            runner_pid: 7,
            alive: true,
            near_bytes: 1 << 30,
            near_limit_bytes: 1 << 30,
            meta_bytes: 0,
            faults_per_s: 0.0,
            servers: vec![server],
            ..wide_job()
        }
    }

    fn check(job: &JobRow, state: &str, level: Severity, advice: &str) {
        let findings = of_job(job);
        let first = findings.first().unwrap_or_else(|| panic!("nothing is said of {state}"));
        assert_eq!((first.check, first.level), (state, level), "{findings:?}");
        assert!(first.advice.contains(advice) && !first.found.is_empty(), "{findings:?}");
    }

    fn pool(json: serde_json::Value) -> PoolRow {
        let mut whole = serde_json::to_value(PoolRow::default()).unwrap();
        whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn nothing_is_said_of_a_job_that_is_well_or_has_ended() {
        assert!(of_job(&well()).is_empty());
        let ended = JobRow { alive: false, near_bytes: u64::MAX, ..well() };
        assert!(of_job(&ended).is_empty());
    }

    #[test]
    fn each_trouble_has_a_name_and_advice() {
        let with_servers = |server: ServerRow, pool: PoolRow| JobRow { servers: vec![server], pool, ..well() };
        let lost = || ServerRow { url: "tcp://a:1".into(), error: Some("refused".into()), ..ServerRow::default() };
        let whole = serde_json::json!({"protection": [{"pid": 8, "missing_legs": 0, "shared_legs": 0,
            "exposed_pages": 0, "restored_pages": 0}]});
        let bare = serde_json::json!({"protection": [{"pid": 8, "missing_legs": 1, "shared_legs": 0,
            "exposed_pages": 256, "restored_pages": 0}]});
        check(&with_servers(lost(), PoolRow::default()), "lost", Severity::Fail, "mirror(");
        check(&with_servers(lost(), pool(whole)), "degraded", Severity::Warn, "filled by itself");
        check(&JobRow { pool: pool(bare), ..well() }, "unprotected", Severity::Fail, "spare=");
        let full = ServerRow { numbers: numbers([("used_bytes", 960), ("capacity_bytes", 1000)]), ..lost() };
        check(&with_servers(ServerRow { error: None, ..full }, PoolRow::default()), "full", Severity::Warn, "94");
        let moving =
            serde_json::json!({"urls": ["tcp://b:2"], "moving": [{"pid": 8, "pages": 512, "moved_pages": 256}]});
        check(&JobRow { pool: pool(moving), ..well() }, "moving", Severity::Ok, "pool cancel 7");
        let degraded = serde_json::json!({"degraded": [8]});
        check(&JobRow { pool: pool(degraded), ..well() }, "degraded", Severity::Warn, "pool status 7");
        let back = serde_json::json!({"reason": "it is full", "before": ["tcp://b:2"]});
        check(&JobRow { pool: pool(back), ..well() }, "returned", Severity::Warn, "pool switch 7");
        check(&JobRow { near_bytes: 2 << 30, ..well() }, "over", Severity::Warn, "shrinks");
        check(&JobRow { meta_bytes: 1 << 30, ..well() }, "tables", Severity::Warn, "near 7");
        let slow = JobRow { faults_per_s: 100_000.0, fault_ns_p50: Some(10_000), ..well() };
        check(&slow, "waiting", Severity::Warn, "near 7");
        let no_limit =
            ServerRow { numbers: numbers([("used_bytes", 960), ("capacity_bytes", 0)]), ..ServerRow::default() };
        assert!(of_server(&no_limit).is_empty());
        let tenant = |quota| TenantRow { used_bytes: 95, quota_bytes: quota, ..TenantRow::default() };
        assert_eq!(of_tenant(&tenant(Some(100)))[0].check, "full");
        assert!(of_tenant(&tenant(Some(101))).is_empty() && of_tenant(&tenant(None)).is_empty());
    }

    #[test]
    fn the_worst_comes_first() {
        let moving = serde_json::json!({"moving": [{"pid": 8, "pages": 512, "moved_pages": 256}]});
        let job = JobRow { near_bytes: 2 << 30, pool: pool(moving), ..well() };
        let found: Vec<_> = of_job(&job).iter().map(|finding| finding.check).collect();
        assert_eq!(found, ["over", "moving"]);
    }
}
