//! `farfield top --metrics`: serves all jobs, heaps and nodes that this user may inspect to Prometheus.
//! They are looked for again at each scrape.

use super::{HeapRow, JobRow, JobView, View};
use crate::metrics::MetricKind::{self, Count, Gauge};
use crate::metrics::{MetricServer, count, escaped, metric};
use crate::pool::{PoolRow, ProtectionRow, ScrubRow};
use crate::share::NodeRow;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use std::io::Write as _;
use std::net::SocketAddr;

/// Serves until interrupted. First prints the URL, because the kernel chooses the port if it is 0.
pub(super) fn serve(address: SocketAddr) -> anyhow::Result<()> {
    let server = MetricServer::bind(address, "farfield", Box::new(ScrapeCollector))?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", server.url()?).and_then(|()| out.flush())?;
    Ok(server.serve()?)
}

/// Collector that looks for everything at each scrape. It asks no memory server, so none can make it late.
#[derive(Debug)]
pub(super) struct ScrapeCollector;

impl Collector for ScrapeCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), Error> {
        // Memory servers have metrics of their own, and no token of a job leaves this machine.
        let all = View::of_all(JobView::without_servers).read().map_err(|_| Error)?;
        encode_heaps(&all.heaps, &mut out)?;
        encode_nodes(&NodeRow::all(), &mut out)?;
        encode_jobs(&all.jobs, &mut out)
    }
}

/// Metrics of heaps: name in notices, kind and help text. The suffix for bytes becomes the unit.
const OF_HEAPS: [(&str, MetricKind, &str); 42] = [
    ("near_limit_bytes", Gauge, "Near budget"),
    ("near_bytes", Gauge, "Near memory in use, tables included"),
    ("table_bytes", Gauge, "Near memory of tables"),
    ("pinned_bytes", Gauge, "Near memory that is pinned"),
    ("pages", Gauge, "Pages in which values can lie, near or far"),
    ("value_pages", Gauge, "Pages of small values, near or far"),
    ("pages_to_come_whole", Gauge, "Pages of small values that come whole when they are far"),
    ("vacant_pages", Gauge, "Far pages with nothing in them for which the pool still has memory"),
    ("early_misses", Count, "Misses that an eighth more near memory would have saved"),
    ("whole_pages", Count, "Pages of small values that came whole"),
    ("left_to_come_whole", Count, "Pages of small values that left to come whole next time"),
    ("used_bytes", Count, "Bytes of small values that were used in pages that left"),
    ("fetched_bytes", Count, "Bytes that were read from the pool"),
    ("written_pages", Count, "Pages that left and had to be written"),
    ("clean_pages", Count, "Pages that left and were equal to their far copy"),
    ("dead_pages", Count, "Pages that left because nothing was in them any more"),
    ("taken_back", Count, "Pages that were about to leave and were used again"),
    ("throttled", Count, "Times that a thread had to make room, or wait for it"),
    ("moved_values", Count, "Small values that were moved to others of their kind"),
    ("discarded_pages", Count, "Far pages that were given back to the pool"),
    ("lost_values", Count, "Values whose destructor could not run"),
    ("prefetches", Count, "What was brought before anybody needed it"),
    ("prefetches_used", Count, "Of what came ahead of need, what was used"),
    ("prefetches_unused", Count, "Of what came ahead of need, what left unused"),
    ("gc_limit_bytes", Gauge, "Most far memory that collected objects and their entries can take"),
    ("gc_used_bytes", Gauge, "Far memory of collected objects and their entries"),
    ("gc_live_bytes", Gauge, "Bytes of objects that the last collection has found alive"),
    ("gc_live_objects", Gauge, "Objects that the last collection has found alive"),
    ("gc_roots", Gauge, "Roots of collected objects"),
    ("gc_collections", Count, "Collections that have ended"),
    ("gc_given_up", Count, "Collections that were given up"),
    ("gc_freed_pages", Count, "Pages that collections have given back"),
    ("gc_moved_objects", Count, "Objects that collections have moved out of sparse pages"),
    ("gc_moved_at_servers", Count, "Objects that memory servers have copied for that"),
    ("gc_evacuation_read_pages", Count, "Far pages that collections have read to move objects out of them"),
    ("gc_server_moves_given_up", Count, "Times that a memory server was asked to copy objects and did not"),
    ("gc_moves_given_up", Count, "Times that moving objects was given up"),
    ("gc_flushed_pages", Count, "Pages that collections have written, so that servers find what is near"),
    ("gc_pauses", Count, "Times that collections stopped the threads of the program"),
    ("gc_stalls", Count, "Times that a thread has waited for a collection, because the limit was reached"),
    ("gc_slow_loads", Count, "Loads of references that found objects by their entries"),
    ("gc_wrong_guesses", Count, "Loads among these whose reference led to another place"),
];

fn encode_heaps(heaps: &[HeapRow], out: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let labels = |heap: &HeapRow| {
        let process = ("process", heap.pid.to_string());
        vec![("heap", escaped(&heap.name)), ("plane", escaped(&heap.plane)), process]
    };
    for (name, kind, help) in OF_HEAPS {
        // Numbers that an older library does not publish are left out.
        let values = heaps.iter().filter_map(|heap| Some((labels(heap), *heap.counters.get(name)?)));
        metric(out, &format!("heap_{name}"), kind, help, values)?;
    }
    let by_path = heaps.iter().flat_map(|heap| {
        let number = |name: &str| heap.counters.get(name).copied().unwrap_or(0);
        let alone = number("object_misses");
        [("object", alone), ("page", number("misses").saturating_sub(alone))].map(|(path, misses)| {
            let mut labels = labels(heap);
            labels.push(("path", path.into()));
            (labels, misses)
        })
    });
    metric(out, "heap_misses", Count, "Values that were not near, by what was brought for them", by_path)?;
    let help = "Pages of small values that left, by the tenth of them that was used while they were near";
    let by_use = heaps.iter().flat_map(|heap| {
        heap.access_rates.iter().enumerate().map(|(tenth, pages)| {
            let mut labels = labels(heap);
            labels.push(("used_percent", (tenth * 10).to_string()));
            (labels, *pages)
        })
    });
    metric(out, "heap_left_pages", Count, help, by_use)?;
    let times = [
        ("evicting", "Processor time that making room took"),
        ("gc_paused", "Time for which collections stopped the threads of the program"),
    ];
    for (name, help) in times {
        let metric = format!("heap_{name}");
        let mut family = out.encode_descriptor(&metric, help, Some(&Unit::Seconds), MetricType::Counter)?;
        for heap in heaps {
            let Some(ns) = heap.counters.get(&format!("{name}_ns")) else { continue };
            count(family.encode_family(&labels(heap))?, *ns as f64 / 1e9)?;
        }
    }
    Ok(())
}

/// Metrics of nodes with shared memory: name in notices, kind and help text.
const OF_NODES: [(&str, MetricKind, &str); 15] = [
    ("near_limit_bytes", Gauge, "Memory for objects and copies"),
    ("object_bytes", Gauge, "Memory of objects"),
    ("copy_bytes", Gauge, "Memory of copies of other nodes' objects"),
    ("workers", Gauge, "Tasks that the node runs at a time"),
    ("running_tasks", Gauge, "Tasks that run"),
    ("queued_tasks", Gauge, "Tasks that wait for a worker"),
    ("messages", Count, "Messages that were sent and answered"),
    ("message_bytes", Count, "Bytes of these and of their answers"),
    ("fetches", Count, "Objects that other nodes were asked for"),
    ("moved_objects", Count, "Objects that came to be written"),
    ("spawns", Count, "Tasks that were sent to other nodes"),
    ("given_tasks", Count, "Of these, those that had waited at the node"),
    ("results", Count, "Results that were sent to other nodes"),
    ("frees", Count, "Objects that other nodes were told to free"),
    ("orphans", Count, "Objects that nobody can free before the program ends"),
];

fn encode_nodes(nodes: &[NodeRow], out: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let labels = |row: &NodeRow| {
        let (node, process) = (("node", row.node.to_string()), ("process", row.pid.to_string()));
        vec![node, process, ("program", escaped(&row.program))]
    };
    for (name, kind, help) in OF_NODES {
        let values = nodes.iter().filter_map(|row| Some((labels(row), *row.counters.get(name)?)));
        metric(out, &format!("node_{name}"), kind, help, values)?;
    }
    let lost = nodes.iter().map(|row| (labels(row), row.lost_nodes.len() as u64));
    metric(out, "node_lost_nodes", Gauge, "Nodes of its program that are gone", lost)?;
    let mut family =
        out.encode_descriptor("node_longest_wait", LONGEST_WAIT, Some(&Unit::Seconds), MetricType::Gauge)?;
    for row in nodes {
        let longest = row.waits.iter().map(|wait| wait.milliseconds).max().unwrap_or(0);
        family.encode_family(&labels(row))?.encode_gauge(&(longest as f64 / 1e3))?;
    }
    Ok(())
}

const LONGEST_WAIT: &str = "Longest time for which a task has waited for something that another one has to do";

fn encode_jobs(jobs: &[JobRow], out: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    // The command line is left out, because arguments may be private.
    let labels = |job: &JobRow| {
        let program = job.processes.first().map_or("", |process| &process.command);
        vec![("program", escaped(program)), ("runner", job.runner_pid.to_string())]
    };
    type Bytes = fn(&JobRow) -> u64;
    let sizes: [(&str, Bytes, &str); 5] = [
        ("job_near_limit_bytes", |job| job.near_limit_bytes, "Near budget"),
        ("job_near_offer_bytes", |job| job.near_offer_bytes, "Most that the near budget may be"),
        ("job_near_least_bytes", |job| job.near_least_bytes, "Least that may be offered"),
        ("job_near_bytes", |job| job.near_bytes, "Near memory in use"),
        ("job_far_bytes", |job| job.far_bytes, "Far memory in use"),
    ];
    for (name, bytes, help) in sizes {
        metric(out, name, Gauge, help, jobs.iter().map(|job| (labels(job), bytes(job))))?;
    }
    type OfPool = fn(&PoolRow) -> u64;
    let of_pools: [(&str, MetricKind, OfPool, &str); 11] = [
        ("job_pool_switches", Count, |pool| pool.switches.into(), "Pools that it was given, way back included"),
        ("job_pool_moves", Count, |pool| pool.moves.into(), "Pools to which it moved by itself"),
        ("job_moving_processes", Gauge, |pool| pool.moving.len() as u64, "Processes that still move to its pool"),
        (
            "job_degraded_processes",
            Gauge,
            |pool| pool.degraded.len() as u64,
            "Processes whose pool lacks a server, or whose servers lack something",
        ),
        (
            "job_scrub_looked_pages",
            Gauge,
            |pool| scrubbed(pool, |row| row.looked_pages),
            "Pages that scrubs of its living processes have looked at",
        ),
        ("job_scrub_wrong_pages", Gauge, |pool| scrubbed(pool, |row| row.wrong_pages), "Of these, wrong ones"),
        (
            "job_scrub_mended_pages",
            Gauge,
            |pool| scrubbed(pool, |row| row.mended_pages),
            "Of these, those that were mended",
        ),
        (
            "job_missing_legs",
            Gauge,
            |pool| protection(pool, |row| row.missing_legs),
            "Servers of mirrors and erasure codes that are lost, silent, or lack something, counted at each of its \
             processes",
        ),
        (
            "job_shared_legs",
            Gauge,
            |pool| protection(pool, |row| row.shared_legs),
            "Members beyond the first that share a server with another member, counted at each process of the job",
        ),
        (
            "job_exposed_pages",
            Gauge,
            |pool| protection(pool, |row| row.exposed_pages),
            "Pages that may have fewer copies or parts than they should, at most",
        ),
        (
            "job_restored_pages",
            Gauge,
            |pool| protection(pool, |row| row.restored_pages),
            "Pages that such servers were given because they lacked them",
        ),
    ];
    for (name, kind, number, help) in of_pools {
        metric(out, name, kind, help, jobs.iter().map(|job| (labels(job), number(&job.pool))))?;
    }
    let Some(job) = jobs.first() else { return Ok(()) };
    for name in job.counters.keys() {
        let values = jobs.iter().map(|job| (labels(job), job.counters[name]));
        metric(out, &format!("job_{name}"), Count, "See `farfield top --json`", values)?;
    }
    Ok(())
}

fn protection(pool: &PoolRow, number: fn(&ProtectionRow) -> u64) -> u64 {
    pool.protection.iter().map(number).sum()
}

fn scrubbed(pool: &PoolRow, number: fn(&ScrubRow) -> u64) -> u64 {
    pool.scrubbed.iter().map(number).sum()
}
