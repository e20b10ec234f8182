//! Rows of the page, and what of them has changed.
//!
//! A row has what a line of the page shows, in some 300 bytes. Details are asked for one by one.

use super::super::heaps::HeapRow;
use super::super::{JobRow, ServerRow, TenantRow, TopSnapshot};
use super::findings;
use crate::doctor::CheckResult;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Longest text of a command in a row; details have all of it.
const COMMAND_CHARS_MAX: usize = 200;

/// A machine, and what was last known of it.
pub(super) struct MachineState {
    /// URL of its dashboard; `here` for this machine.
    url: String,
    pub(super) snapshot: Result<Arc<TopSnapshot>, String>,
    /// Last snapshot before the machine could not be reached.
    last: Option<Arc<TopSnapshot>>,
}

/// Rows by identifier.
pub(super) type PageRows = BTreeMap<String, PageRow>;

/// Row of one of the tables.
#[derive(serde::Serialize, Debug)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub(super) enum PageRow {
    Job(JobLine),
    Heap(HeapLine),
    Server(ServerLine),
    Tenant(TenantLine),
    Machine(MachineLine),
}

/// Line of a job: sizes in bytes, rates per second, latencies in nanoseconds.
#[derive(serde::Serialize, Debug)]
pub(super) struct JobLine {
    machine: String,
    pid: u32,
    name: String,
    pub(super) near: u64,
    limit: u64,
    offer: u64,
    least: u64,
    pub(super) far: u64,
    pub(super) faults: f64,
    pub(super) p50: Option<u64>,
    pub(super) p99: Option<u64>,
    pages_in: f64,
    pages_out: f64,
    processes: usize,
    pool: String,
    /// Whether the page may offer to change it: the machine is this one.
    is_here: bool,
    #[serde(flatten)]
    verdict: Verdict,
}

#[derive(serde::Serialize, Debug)]
pub(super) struct HeapLine {
    machine: String,
    pid: u32,
    name: String,
    command: String,
    plane: String,
    near: u64,
    limit: u64,
    misses: f64,
    fetched: f64,
    #[serde(flatten)]
    verdict: Verdict,
}

#[derive(serde::Serialize, Debug)]
pub(super) struct ServerLine {
    machine: String,
    name: String,
    used: u64,
    capacity: u64,
    sessions: u64,
    connections: u64,
    reads: f64,
    writes: f64,
    /// Number of jobs of the machine whose far memory is there.
    jobs: usize,
    #[serde(flatten)]
    verdict: Verdict,
}

#[derive(serde::Serialize, Debug)]
pub(super) struct TenantLine {
    name: String,
    server: String,
    used: u64,
    /// 0: no quota.
    quota: u64,
    #[serde(flatten)]
    verdict: Verdict,
}

#[derive(serde::Serialize, Debug)]
pub(super) struct MachineLine {
    name: String,
    url: String,
    jobs: usize,
    heaps: usize,
    near: u64,
    far: u64,
    faults: f64,
    #[serde(flatten)]
    verdict: Verdict,
}

/// State of a row in one word, and what there is to say about it.
#[derive(serde::Serialize, Default, Debug)]
struct Verdict {
    state: &'static str,
    findings: Vec<CheckResult>,
}

impl Verdict {
    fn new(is_alive: bool, findings: Vec<CheckResult>) -> Verdict {
        let state = match findings.first() {
            _ if !is_alive => "ended",
            Some(worst) => worst.check,
            None => "ok",
        };
        Verdict { state, findings }
    }
}

impl MachineState {
    pub(super) fn new(url: &str) -> MachineState {
        MachineState { url: url.to_owned(), snapshot: Err("not read yet".to_owned()), last: None }
    }

    /// Takes what was read, or the reason why nothing was.
    pub(super) fn set(&mut self, snapshot: Result<TopSnapshot, String>) {
        self.snapshot = snapshot.map(Arc::new);
        if let Ok(snapshot) = &self.snapshot {
            self.last = Some(snapshot.clone());
        }
    }
}

/// Makes the rows of all machines.
pub(super) fn of_machines(machines: &[MachineState]) -> PageRows {
    let mut rows = PageRows::new();
    for (index, machine) in machines.iter().enumerate() {
        let empty = Arc::default();
        add_machine(&mut rows, index, machine, machine.last.as_ref().unwrap_or(&empty));
    }
    rows
}

fn add_machine(rows: &mut PageRows, index: usize, state: &MachineState, all: &TopSnapshot) {
    let name = if all.machine.is_empty() { state.url.clone() } else { all.machine.clone() };
    for job in &all.jobs {
        rows.insert(job_id(index, job), PageRow::Job(job_line(&name, index == 0, job)));
    }
    for (heap, id) in heaps(index, all) {
        rows.insert(id, PageRow::Heap(heap_line(&name, heap)));
    }
    for (id, server, jobs) in servers(index, all).into_values() {
        rows.insert(id, PageRow::Server(server_line(&name, server, jobs)));
    }
    for (number, tenant) in all.tenants.iter().enumerate() {
        rows.insert(format!("{index}-t-{number}"), PageRow::Tenant(tenant_line(tenant)));
    }
    let sum = |bytes: fn(&JobRow) -> u64| all.jobs.iter().map(bytes).fold(0, u64::saturating_add);
    let trouble = state.snapshot.as_ref().err().map(|error| findings::of_machine(&state.url, error));
    let machine = MachineLine {
        url: state.url.clone(),
        jobs: all.jobs.iter().filter(|job| job.alive).count(),
        heaps: all.heaps.len(),
        near: sum(|job| job.near_bytes),
        far: sum(|job| job.far_bytes),
        faults: rounded(all.jobs.iter().map(|job| job.faults_per_s).sum()),
        verdict: Verdict::new(true, trouble.into_iter().collect()),
        name,
    };
    rows.insert(format!("{index}-m"), PageRow::Machine(machine));
}

fn job_id(index: usize, job: &JobRow) -> String {
    format!("{index}-j-{}", job.runner_pid)
}

/// Returns the heaps with their identifiers: a process may have several.
fn heaps(index: usize, all: &TopSnapshot) -> impl Iterator<Item = (&HeapRow, String)> {
    let mut counts = BTreeMap::<u32, usize>::new();
    all.heaps.iter().map(move |heap| {
        let count = counts.entry(heap.pid).or_default();
        *count += 1;
        (heap, format!("{index}-h-{}-{count}", heap.pid))
    })
}

/// Returns each server once, with its identifier and the number of jobs that use it. If jobs see it
/// as several tenants, the one with most memory there counts.
fn servers(index: usize, all: &TopSnapshot) -> BTreeMap<&str, (String, &ServerRow, usize)> {
    let of_jobs = all.jobs.iter().flat_map(|job| job.servers.iter().map(|server| (server, 1)));
    let mut servers = BTreeMap::new();
    for (server, jobs) in all.servers.iter().map(|server| (server, 0)).chain(of_jobs) {
        let used = |server: &ServerRow| server.numbers.get("used_bytes").copied();
        let mut hasher = DefaultHasher::new();
        server.url.hash(&mut hasher);
        let id = format!("{index}-s-{:016x}", hasher.finish());
        let entry = servers.entry(server.url.as_str()).or_insert((id, server, 0));
        entry.2 += jobs;
        if used(server) > used(entry.1) {
            entry.1 = server;
        }
    }
    servers
}

pub(super) fn job_line(machine: &str, is_here: bool, job: &JobRow) -> JobLine {
    let sum = |rate: fn(&super::super::ProcessRow) -> f64| rounded(job.processes.iter().map(rate).sum());
    JobLine {
        machine: machine.to_owned(),
        pid: job.runner_pid,
        name: program_of(&job.command).chars().take(COMMAND_CHARS_MAX).collect(),
        near: job.near_bytes,
        limit: job.near_limit_bytes,
        offer: job.near_offer_bytes,
        least: job.near_least_bytes,
        far: job.far_bytes,
        faults: rounded(job.faults_per_s),
        p50: job.fault_ns_p50,
        p99: job.fault_ns_p99,
        pages_in: sum(|process| process.pages_in_per_s),
        pages_out: sum(|process| process.pages_out_per_s),
        processes: job.processes.len(),
        pool: job.pool.urls.join(" "),
        is_here,
        verdict: Verdict::new(job.alive, findings::of_job(job)),
    }
}

/// Returns the program and its arguments out of the command line of `farfield run OPTIONS -- PROGRAM`.
fn program_of(command: &str) -> &str {
    command.split_once(" -- ").map_or(command, |(_, program)| program)
}

fn heap_line(machine: &str, heap: &HeapRow) -> HeapLine {
    let number = |name: &str| heap.counters.get(name).copied().unwrap_or(0);
    HeapLine {
        machine: machine.to_owned(),
        pid: heap.pid,
        name: heap.name.clone(),
        command: heap.command.chars().take(COMMAND_CHARS_MAX).collect(),
        plane: heap.plane.clone(),
        near: number("near_bytes"),
        limit: number("near_limit_bytes"),
        misses: rounded(heap.misses_per_s),
        fetched: rounded(heap.fetched_bytes_per_s),
        verdict: Verdict::new(heap.alive, findings::of_heap(heap)),
    }
}

fn server_line(machine: &str, server: &ServerRow, jobs: usize) -> ServerLine {
    let number = |name: &str| server.numbers.get(name).copied().unwrap_or(0);
    ServerLine {
        machine: machine.to_owned(),
        name: server.url.clone(),
        used: number("used_bytes").saturating_add(number("reserved_bytes")),
        capacity: number("capacity_bytes"),
        sessions: number("sessions"),
        connections: number("connections"),
        reads: rounded(server.read_pages_per_s),
        writes: rounded(server.written_pages_per_s),
        jobs,
        verdict: Verdict::new(true, findings::of_server(server)),
    }
}

fn tenant_line(tenant: &TenantRow) -> TenantLine {
    TenantLine {
        name: tenant.name.clone(),
        server: tenant.server.clone(),
        used: tenant.used_bytes,
        quota: tenant.quota_bytes.unwrap_or(0),
        verdict: Verdict::new(true, findings::of_tenant(tenant)),
    }
}

/// Rounds a rate to what people read, so that a row changes only when its line does.
fn rounded(rate: f64) -> f64 {
    let rounded = if rate < 10.0 { (rate * 10.0).round() / 10.0 } else { rate.round() };
    // The sum of no rates is -0.
    rounded + 0.0
}

/// Returns all that is known of one row.
pub(super) fn details(machines: &[MachineState], id: &str) -> Option<serde_json::Value> {
    let index: usize = id.split('-').next()?.parse().ok()?;
    let all = machines.get(index)?.last.as_ref()?;
    let job = all.jobs.iter().find(|job| job_id(index, job) == id).map(serde_json::to_value);
    let heap = || heaps(index, all).find(|(_, this)| this == id).map(|(heap, _)| serde_json::to_value(heap));
    let server = || servers(index, all).into_values().find(|it| it.0 == id).map(|it| serde_json::to_value(it.1));
    job.or_else(heap).or_else(server)?.ok()
}

/// Rows as they were last published, each as JSON.
#[derive(Default)]
pub(super) struct RowBook(BTreeMap<String, String>);

impl RowBook {
    /// Takes the rows as they are now. Returns the snapshot of all of them, and the change since
    /// the last time, as JSON.
    pub(super) fn update(&mut self, at_ms: u64, rows: PageRows) -> (String, String) {
        // Rows consist of numbers and texts, which can all be written.
        let text = |row: &PageRow| serde_json::to_string(row).unwrap_or_else(|_| "null".to_owned());
        let rows: BTreeMap<String, String> = rows.iter().map(|(id, row)| (id.clone(), text(row))).collect();
        let changed = rows.iter().filter(|(id, row)| self.0.get(*id) != Some(row));
        let gone: Vec<&String> = self.0.keys().filter(|id| !rows.contains_key(*id)).collect();
        let change = message(at_ms, changed, &gone);
        let snapshot = message(at_ms, rows.iter(), &[]);
        self.0 = rows;
        (snapshot, change)
    }
}

fn message<'a>(at_ms: u64, rows: impl Iterator<Item = (&'a String, &'a String)>, gone: &[&String]) -> String {
    let mut text = format!("{{\"at\":{at_ms},\"rows\":{{");
    for (index, (id, row)) in rows.enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // Identifiers have digits, letters and dashes only. Writing into a string cannot fail.
        let _ = write!(text, "{comma}\"{id}\":{row}");
    }
    let _ = write!(text, "}},\"gone\":{}}}", serde_json::json!(gone));
    text
}

#[cfg(test)]
mod tests {
    //! Guards against rows that are sent though nothing changed, and rows that stay for ever.
    use super::super::super::tests::wide_job;
    use super::*;

    fn snapshot(jobs: Vec<JobRow>) -> TopSnapshot {
        TopSnapshot { machine: "node<1>".into(), jobs, ..TopSnapshot::default() }
    }

    fn job(pid: u32) -> JobRow {
        JobRow { runner_pid: pid, command: "<b>\"'&\u{2028}".into(), ..wide_job() }
    }

    fn ids(text: &str) -> Vec<String> {
        let message: serde_json::Value = serde_json::from_str(text).unwrap();
        message["rows"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn only_changed_rows_are_sent_and_names_arrive_as_they_are() {
        let mut machine = MachineState::new("here");
        let mut book = RowBook::default();
        machine.set(Ok(snapshot(vec![job(1), job(2)])));
        let (all, first) = book.update(1, of_machines(std::slice::from_ref(&machine)));
        assert_eq!((all.clone(), ids(&all).len()), (first, 4), "two jobs, their server, the machine");
        let message: serde_json::Value = serde_json::from_str(&all).unwrap();
        assert_eq!(message["rows"]["0-j-1"]["name"], "<b>\"'&\u{2028}");
        assert_eq!(message["rows"]["0-j-1"]["machine"], "node<1>");
        let same = book.update(2, of_machines(std::slice::from_ref(&machine))).1;
        assert_eq!(same, "{\"at\":2,\"rows\":{},\"gone\":[]}");
        machine.set(Ok(snapshot(vec![JobRow { far_bytes: 1, ..job(2) }])));
        let (all, change) = book.update(3, of_machines(std::slice::from_ref(&machine)));
        assert_eq!(ids(&all).len(), 3);
        assert!(ids(&change).contains(&"0-j-2".into()) && change.contains("\"gone\":[\"0-j-1\"]"), "{change}");
    }

    #[test]
    fn the_name_of_a_job_is_its_program() {
        assert_eq!(program_of("farfield run --near 4G -- ./train -- x"), "./train -- x");
        assert_eq!(program_of("farfield keep --for 7"), "farfield keep --for 7");
    }

    #[test]
    fn a_machine_that_is_gone_keeps_its_rows_and_says_so() {
        let mut machines = vec![MachineState::new("here"), MachineState::new("http://x:1")];
        machines[1].set(Ok(snapshot(vec![job(1)])));
        machines[1].set(Err("refused".into()));
        let rows = of_machines(&machines);
        let Some(PageRow::Machine(machine)) = rows.get("1-m") else { panic!("{rows:?}") };
        assert_eq!((machine.verdict.state, machine.name.as_str()), ("unreachable", "node<1>"));
        assert!(rows.contains_key("1-j-1"));
        assert_eq!(details(&machines, "1-j-1").unwrap()["runner_pid"], 1);
        for id in ["", "9-j-1", "1-j-2", "x", "0-j-1"] {
            assert!(details(&machines, id).is_none(), "{id}");
        }
    }

    #[test]
    fn what_one_dashboard_sends_another_one_reads() {
        let sent = serde_json::to_vec(&snapshot(vec![job(1)])).unwrap();
        let read: TopSnapshot = serde_json::from_slice(&sent).unwrap();
        assert_eq!(serde_json::to_vec(&read).unwrap(), sent);
    }
}
