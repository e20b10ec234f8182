//! Jobs and heaps of this machine, looked for again and again.

use super::super::heaps::{HeapRow, HeapView};
use super::super::{JobRow, JobView, TopSnapshot, machine_name};
use super::pace::StepInterval;
use super::servers::{ServerKey, ServerWatch};
use crate::server_stat::servers_of;
use farfield_pager::runner::{find_jobs, processes};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Interval between two searches through all processes, which take a hundredth of a processor at most.
const SEARCH: StepInterval = StepInterval { least: Duration::from_secs(1), share: 100 };
/// Time for which a job or a heap is shown after its end.
const SHOWN_AFTER_END: Duration = Duration::from_secs(60);

/// What is known of this machine beside its jobs: the servers that are asked.
pub(super) struct LocalMachine {
    pub(super) servers: ServerWatch,
    /// Servers that the user has named.
    named: Vec<ServerKey>,
}

impl LocalMachine {
    /// Refuses URLs that are none of servers that can be asked.
    pub(super) fn new(urls: &[String], token: Vec<u8>) -> anyhow::Result<LocalMachine> {
        let key = |url: &String| ServerKey::checked(url, token.clone());
        Ok(LocalMachine { servers: ServerWatch::default(), named: urls.iter().map(key).collect::<Result<_, _>>()? })
    }
}

/// Jobs and heaps that were found, with the readings from which rates are computed.
#[derive(Default)]
pub(super) struct LocalViews {
    /// By the pid of the runner.
    jobs: BTreeMap<u32, Watched<JobView>>,
    heaps: BTreeMap<(u32, u64), Watched<HeapView>>,
    search_at: Option<Instant>,
}

struct Watched<T> {
    view: T,
    ended: Option<Instant>,
}

impl<T> Watched<T> {
    fn new(view: T) -> Watched<T> {
        Watched { view, ended: None }
    }

    fn note(&mut self, is_alive: bool) {
        if !is_alive {
            self.ended.get_or_insert_with(Instant::now);
        }
    }

    fn is_shown(&self) -> bool {
        self.ended.is_none_or(|ended| ended.elapsed() < SHOWN_AFTER_END)
    }
}

impl LocalViews {
    /// Reads everything. Waits for no server: their rows are the last ones that came.
    pub(super) fn read(&mut self, local: &LocalMachine) -> TopSnapshot {
        self.search();
        let mut wanted = local.named.clone();
        let jobs: Vec<JobRow> = self.jobs.values_mut().map(|job| read_job(job, local, &mut wanted)).collect();
        let heaps: Vec<HeapRow> = self.heaps.values_mut().map(read_heap).collect();
        self.jobs.retain(|_, job| job.is_shown());
        self.heaps.retain(|_, heap| heap.is_shown());
        let servers = local.named.iter().filter_map(|key| local.servers.row(key)).collect();
        local.servers.watch_only(&wanted);
        TopSnapshot { machine: machine_name(), tenants: Vec::new(), jobs, heaps, servers }
    }

    /// Looks for new jobs and heaps among all processes, if that is due.
    fn search(&mut self) {
        let start = Instant::now();
        if self.search_at.is_some_and(|at| start < at) {
            return;
        }
        for (runner, control) in find_jobs() {
            // A pid can be that of a new job.
            if self.jobs.get(&runner).is_none_or(|job| !job.view.is_alive()) {
                self.jobs.insert(runner, Watched::new(JobView::without_servers((runner, control))));
            }
        }
        for heap in processes().flat_map(HeapView::find) {
            self.heaps.entry(heap.key()).or_insert_with(|| Watched::new(heap));
        }
        self.search_at = Some(Instant::now() + SEARCH.after(start.elapsed()));
    }
}

fn read_job(job: &mut Watched<JobView>, local: &LocalMachine, wanted: &mut Vec<ServerKey>) -> JobRow {
    let mut row = job.view.read();
    job.note(row.alive);
    if row.alive {
        let (_, urls, token) = job.view.control.config().pool();
        let uid = Some(job.view.uid());
        let key = |url: &str| ServerKey { url: url.to_owned(), token: token.clone(), uid };
        let keys: Vec<_> = urls.iter().flat_map(|url| servers_of(url)).map(key).collect();
        row.servers = keys.iter().filter_map(|key| local.servers.row(key)).collect();
        wanted.extend(keys);
    }
    row
}

fn read_heap(heap: &mut Watched<HeapView>) -> HeapRow {
    let row = heap.view.read();
    heap.note(row.alive);
    row
}
