//! The workload programs of the far heap. Each keeps its data in std's types, or in a far heap when `--pool` names one, and
//! does the same with it, so that contenders differ in nothing else. Prints one JSON line, as the C workloads do.

mod apps;
mod build_engine;
mod cache;
mod collected;
mod compute;
mod count;
mod course;
mod decide;
mod deref;
mod device;
mod entry;
mod frame;
mod gc_bench;
mod gc_cache;
mod gc_compute;
mod gc_maps;
mod graph;
mod graph_store;
mod hash;
mod latency;
mod list;
mod measure;
mod paced;
mod pack;
mod pagerank;
mod pages;
mod pauses;
mod polled;
#[cfg(feature = "frame")]
mod questions;
mod random;
mod real;
mod remote;
mod replacement;
mod scale;
mod schedule;
mod served;
mod share_counts;
mod shared;
mod shuffle;
#[cfg(feature = "sql")]
mod sql;
mod switch;
mod tasks;
mod tracing;
mod triangles;
mod trips;
mod utilization;
mod views;
mod walk;
mod web;
mod words;
mod zipf;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use farfield::{Heap, Hotness, Plane, Stats, Where};
use farfield_gc::FarTracing;
use measure::Outcome;
use std::process::ExitCode;

/// Shared memory of the applications.
mod dsm {
    pub(crate) use farfield_dsm::*;
    use std::ops::Range;

    /// Borrows a part of a slice: all of it comes, if it is elsewhere.
    pub(crate) fn part<'a, T: Far>(
        here: &'a Here<'_>,
        values: &'a DBox<[T]>,
        range: Range<usize>,
    ) -> Result<&'a [T], ShareError> {
        Ok(&values.get(here)?[range])
    }

    /// Runs what is measured of an application.
    pub(crate) fn measured<R>(body: impl FnOnce() -> R) -> R {
        body()
    }
}

/// A workload and its parameters.
#[derive(Clone, Debug, Parser)]
#[command(name = "farfield-work")]
struct Options {
    /// What to do.
    workload: Workload,
    /// Data in MiB.
    #[arg(long)]
    data_mib: u64,
    /// Operations that are timed.
    #[arg(long, default_value_t = 1 << 20)]
    ops: u64,
    /// Seed of data and order.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// How many of a hundred operations write.
    #[arg(long, default_value_t = 0)]
    write_percent: u64,
    /// Bytes of an object: 64 or 4096; of a map's entry: 16, 64 or 512; of a tile of a matrix or a chunk of a column, any.
    #[arg(long, default_value_t = 64)]
    object_bytes: u64,
    /// Only this much of the data is used, in KiB; 0: all.
    #[arg(long, default_value_t = 0)]
    set_kib: u64,
    /// Work per object in ns.
    #[arg(long, default_value_t = 0)]
    busy_ns: u64,
    /// A hundred times the exponent of Zipf's law, by which keys are chosen; 0: all alike.
    #[arg(long, default_value_t = 0)]
    zipf_percent: u64,
    /// Threads that share the operations.
    #[arg(long, default_value_t = 1)]
    threads: u64,
    /// Bytes that may be near, everything that the program needs to find its data included.
    #[arg(long, requires = "pool")]
    near: Option<u64>,
    /// Where far is; without it the data is in std's types.
    #[arg(long, requires = "near")]
    pool: Option<String>,
    /// 1: elements of arrays are read as what is used once, so that they displace nothing.
    #[arg(long, default_value_t = 0)]
    once: u64,
    /// Requests that arrive in a second, whether or not those before are answered; 0: each begins when the one before ends.
    #[arg(long, default_value_t = 0)]
    rate_per_s: u64,
    /// 1: real data of the folder in FARFIELD_DATA, where a workload knows some; 0: made up.
    #[arg(long, default_value_t = 0)]
    real: u64,
    /// The graph of real data, where a workload has one.
    #[arg(long, value_enum, default_value_t = real::GraphName::Cnr)]
    graph: real::GraphName,
    /// The edges of `graph-store`, as it has left them for others: a file.
    #[arg(long)]
    links: Option<std::path::PathBuf>,
    /// Bytes of a region of a collected heap, in KiB.
    #[arg(long, default_value_t = 1024)]
    region_kib: u64,
    /// What frees the objects of `gcbench` in plain memory.
    #[arg(long, value_enum, default_value_t = gc_bench::Library::Arc)]
    library: gc_bench::Library,
    /// Gets, walks or operations on their way at a time; with a rate, at most.
    #[arg(long, default_value_t = 256)]
    in_flight: u64,
    /// Nodes of a walk, or of shared memory.
    #[arg(long, default_value_t = 1)]
    nodes: u64,
    /// Processors of a simulated node of shared memory.
    #[arg(long, default_value_t = 16)]
    processors: u64,
    /// The pool is throttled: each answer comes so many µs later; 0: not.
    #[arg(long, default_value_t = 0)]
    latency_us: u64,
    /// And passes so many MiB of pages in a second; 0: no limit.
    #[arg(long, default_value_t = 0)]
    bandwidth_mib: u64,
    /// Keys of a map that are looked up together.
    #[arg(long, default_value_t = 1)]
    at_once: u64,
    /// Who keeps remote objects: loopback:, redis:HOST:PORT or tcp://HOST:PORT; for `pages` the URL of a pool;
    /// for `list`, `log` and `cuckoo` loopback:, client:URL, server:URL or auto:URL; for the first also grpc: or unbatched:URL, for the last two one-sided:URL;
    /// for `share-deref`, `share-read`, `share-lock`, `share-steal`, `share-recover` and `share-affinity` share:, for the second also share:place or loopback:,
    /// for the last also share:tied, share:anywhere or share:beside; for `share-counts` share:, for the other applications also share:place,
    /// for these also sim:ownership, sim:directory, sim:directory-of-many or sim:delegation,
    /// for `share-kv` also redis-cluster:HOST:PORT,..., for `share-social` also rpc: or grpc:;
    /// for `shift` and `walk` client:URL, server:URL or auto:URL; for `plain` loop: or function:.
    #[arg(long)]
    peer: Option<String>,
    /// 1: the contents of `pages` pack about 3 to 1; 0: they are noise.
    #[arg(long, default_value_t = 0)]
    compressible: u64,
    /// Where `pages` writes all pages, in order, instead of into a pool: a file or a block device.
    #[arg(long)]
    dump: Option<std::path::PathBuf>,
    /// The pool to which `switch` moves the heap's far memory.
    #[arg(long)]
    to: Option<String>,
    /// How often it moves, to that pool and back.
    #[arg(long, default_value_t = 1)]
    switches: u64,
    /// Where `switch` asks for such a move, without a heap: a folder.
    #[arg(long)]
    handshake: Option<String>,
    /// Hybrid plane: the least share of a page that must have been used for it to come whole, in percent; 0: the heap adapts.
    #[arg(long, default_value_t = 0)]
    car_percent: u64,
    /// Hybrid plane: values of more than so many bytes can come alone; if it is not said, as the heap has it.
    #[arg(long)]
    alone_above: Option<usize>,
    /// So many times, evenly over the time, it is noted how many pages come whole; 0: it is not.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=100))]
    moments: u64,
    /// What keeps small values near.
    #[arg(long, value_enum, default_value_t = HotnessName::Mark)]
    hotness: HotnessName,
    /// How the heap serves misses.
    #[arg(long, value_enum, default_value_t = PlaneName::Page)]
    plane: PlaneName,
    /// Where `trips` leaves its columns and answers for others, `questions` its table, and `graph-store` its edges.
    #[arg(long)]
    columns: Option<std::path::PathBuf>,
    /// What `trips` does where its columns are, and `web` where its array is.
    #[arg(long, value_enum, default_value_t = OffloadName::None)]
    offload: OffloadName,
    /// The way in which collections look at far objects.
    #[arg(long, value_enum, default_value_t = TracingName::Copies)]
    tracing: TracingName,
    /// Operations on a table, of a hundred: inserts, updates, and reads for the rest.
    #[arg(long, value_enum, default_value_t = MixName::InsertIntensive)]
    mix: MixName,
    /// What the clients of `share-kv` do; without it they read, and write as often as `--write-percent` says.
    #[arg(long, value_enum, default_value_t = YcsbName::None)]
    ycsb: YcsbName,
    /// 1: where an object lies says nothing of where it leads to, as after long use; 0: neighbours lead to each other.
    #[arg(long, default_value_t = 1)]
    aged: u64,
    /// Of the simulated clusters.
    #[command(flatten)]
    schedule: schedule::ScheduleOptions,
    /// Of the gate of a cluster.
    #[command(flatten)]
    decide: decide::DecideOptions,
    /// Of jobs that wait as well as compute.
    #[command(flatten)]
    paced: paced::PacedOptions,
    /// Of traces of pages.
    #[command(flatten)]
    replacement: replacement::ReplacementOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Workload {
    /// Objects behind pointers, in random order.
    Deref,
    /// Objects in order, with work at each.
    Compute,
    /// Words in order, again and again.
    Words,
    /// Gets from a hash map.
    Hash,
    /// Requests to a web front end.
    Web,
    /// Gets of small objects from a server.
    Remote,
    /// Walks of a linked list at a server.
    List,
    /// The same, where the best place to walk changes.
    Shift,
    /// The same, in the memory of the program.
    Plain,
    /// Walks over far pointers of a heap.
    Walk,
    /// Appends to a log at a server, and looks at its end.
    Log,
    /// Keys of a hash table at a server, put and looked up.
    Cuckoo,
    /// Pages of a pool, through one lane.
    Pages,
    /// Objects behind pointers, many on their way at a time.
    Tasks,
    /// Text packed.
    Pack,
    /// Text unpacked.
    Unpack,
    /// Questions about columns of numbers.
    Frame,
    /// Threads that change much at a time.
    Churn,
    /// Many threads that read now and then.
    Crowd,
    /// Requests to a cache whose popular keys change.
    Cache,
    /// Requests to a cache, all keys alike.
    CacheUniform,
    /// Ranks in a growing graph.
    Pagerank,
    /// Triangles of a growing graph.
    Triangles,
    /// Words of a text, counted.
    CountWords,
    /// Views of pages, some of which have many, counted.
    CountViews,
    /// Views of pages, all alike, counted.
    CountViewsUniform,
    /// Columns copied and shuffled.
    Shuffle,
    /// Columns copied, shuffled, and asked about.
    Trips,
    /// Questions in SQL.
    Sql,
    /// Questions to a data frame.
    Questions,
    /// Pages in random order while far memory moves.
    Switch,
    /// References between objects, followed.
    Follow,
    /// Trees of small objects, made and dropped.
    Trees,
    /// Such trees of many sizes, beside one that lives and a large array.
    Gcbench,
    /// Collections of a graph.
    Marking,
    /// The same, beside a program that makes garbage.
    Beside,
    /// Objects that are replaced in random order.
    Replace,
    /// Objects of 64 bytes of which nine tenths are dropped, and collections that move the rest together.
    Moves,
    /// A store of a graph, filled, changed and asked.
    GraphStore,
    /// Tables of words of texts, which are edited.
    Build,
    /// Requests to a cache that evicts within a limit.
    GcCache,
    /// Gets and updates of a map in no order.
    TrieMap,
    /// Gets and updates of a map in the order of its keys.
    OrderedMap,
    /// Scans of a map in the order of its keys, and updates.
    MapScan,
    /// Gets from a log, and appends to it, with trims.
    AppendLog,
    /// Rows of a table that are read, inserted and updated.
    Table,
    /// All nodes that each node of a graph reaches.
    Closure,
    /// Points that are assigned to the nearest of some centres, again and again.
    Clusters,
    /// Small objects behind owners of shared memory.
    ShareDeref,
    /// Objects of another node, read one at a time.
    ShareRead,
    /// A lock that three nodes take in turn.
    ShareLock,
    /// Tasks that find no room at their node and begin at another one.
    ShareSteal,
    /// Objects handed over by a node that is killed, with a backup or without.
    ShareRecover,
    /// Lists of links in shared memory, whose objects are tied or not, and tasks that know where these are or do not.
    ShareAffinity,
    /// Messages of each operation of shared memory.
    ShareCounts,
    /// A product of two matrices.
    ShareGemm,
    /// A data frame that is filtered, grouped, joined and sorted.
    ShareFrame,
    /// Questions about taxi trips, whose answers are known.
    ShareTaxi,
    /// A key-value store.
    ShareKv,
    /// A social network.
    ShareSocial,
    /// Batches of jobs on a simulated cluster.
    Schedule,
    /// All runs of a study, for their time.
    ScheduleSpeed,
    /// Runs of the published simulator, again.
    ScheduleReference,
    /// A recorded trace of a cluster, replayed.
    ScheduleTraces,
    /// Decisions of the gate of a large cluster, and divisions of a node.
    Decide,
    /// Requests that read some of the data, with waits between them.
    Paced,
    /// Accesses of a trace, made or simulated.
    Replacement,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PlaneName {
    Page,
    Object,
    Hybrid,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum OffloadName {
    None,
    Copy,
    Shuffle,
    Aggregate,
    All,
    /// By functions of the program's own.
    Own,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum TracingName {
    Frames,
    Copies,
    Arrivals,
    Servers,
}

/// Mixes of operations on Cassandra and QuickCached of MemLiner's evaluation (section 4.6.1).
#[derive(Clone, Copy, Debug, ValueEnum)]
enum MixName {
    InsertIntensive,
    UpdateIntensive,
    ReadIntensive,
    WriteDominant,
    ReadDominant,
}

impl MixName {
    /// Returns how many of a hundred operations insert, and how many update.
    fn percents(self) -> (u64, u64) {
        match self {
            MixName::InsertIntensive => (50, 25),
            MixName::UpdateIntensive => (50, 50),
            MixName::ReadIntensive => (50, 0),
            MixName::WriteDominant => (60, 0),
            MixName::ReadDominant => (20, 0),
        }
    }
}

/// Core workloads of YCSB (Cooper et al., SoCC 2010, Table 2).
#[derive(Clone, Copy, Debug, ValueEnum)]
enum YcsbName {
    None,
    /// Half of the operations write.
    A,
    /// One in twenty writes.
    B,
    /// All read.
    C,
    /// The latest keys are read; one in twenty is new.
    D,
    /// Up to a hundred keys are scanned; one in twenty is new.
    E,
    /// Half read a value and replace it.
    F,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HotnessName {
    Mark,
    Count,
    Recency,
}

impl Options {
    /// The far heap, if the data is to be in one. `beside` are bytes that the program itself keeps near to find its data.
    fn heap(&self, beside: u64) -> Result<Option<Heap>> {
        self.heap_with(beside, self.data_bytes() * 2)
    }

    /// The same, with so many far bytes; servers of the driver have room for the data three times over.
    fn heap_with(&self, beside: u64, far: u64) -> Result<Option<Heap>> {
        let (Some(near), Some(pool)) = (self.near, &self.pool) else { return Ok(None) };
        let near = near.checked_sub(beside).context("the pointers alone take more than may be near")?;
        let plane = match self.plane {
            PlaneName::Page => Plane::Page,
            PlaneName::Object => Plane::Object,
            PlaneName::Hybrid => Plane::Hybrid,
        };
        let hotness = match self.hotness {
            HotnessName::Mark => Hotness::Mark,
            HotnessName::Count => Hotness::Count,
            HotnessName::Recency => Hotness::Recency,
        };
        let pool = self.throttled(pool);
        let mut builder = Heap::builder().plane(plane).hotness(hotness).near(near).near_max(near).far(far).pool(pool);
        if self.car_percent > 0 {
            builder = builder.car_threshold(self.car_percent as f64 / 100.0);
        }
        if let Some(bytes) = self.alone_above {
            builder = builder.alone_above(bytes);
        }
        Ok(Some(builder.build()?))
    }

    /// Returns where functions run, and the pool: `client:URL`, `server:URL` or `auto:URL`.
    fn called_peer(&self) -> Result<(Where, &str)> {
        let peer = self.peer.as_deref().context("--peer is missing")?;
        match peer.split_once(':') {
            Some(("client", url)) => Ok((Where::Client, url)),
            Some(("server", url)) => Ok((Where::Server, url)),
            Some(("auto", url)) => Ok((Where::Auto, url)),
            _ => bail!("--peer must be client:URL, server:URL or auto:URL, not {peer}"),
        }
    }

    /// The pool, as slow as the options say.
    fn throttled(&self, pool: &str) -> String {
        let latency = (self.latency_us > 0).then(|| format!("latency={}us,", self.latency_us));
        let bandwidth = (self.bandwidth_mib > 0).then(|| format!("bandwidth={}M,", self.bandwidth_mib));
        match (latency, bandwidth) {
            (None, None) => pool.to_owned(),
            (latency, bandwidth) => {
                format!("throttle({}{}{pool})", latency.unwrap_or_default(), bandwidth.unwrap_or_default())
            }
        }
    }

    fn data_bytes(&self) -> u64 {
        self.data_mib << 20
    }

    fn far_tracing(&self) -> FarTracing {
        match self.tracing {
            TracingName::Frames => FarTracing::Frames,
            TracingName::Copies => FarTracing::Copies,
            TracingName::Arrivals => FarTracing::Arrivals,
            TracingName::Servers => FarTracing::Servers,
        }
    }
}

fn run(options: &Options) -> Result<Outcome> {
    ensure!(options.data_mib > 0, "--data-mib must be at least 1");
    ensure!(options.write_percent <= 100, "--write-percent must be 0 to 100");
    if let Some(outcome) = scale::run(options) {
        return outcome;
    }
    match options.workload {
        Workload::Deref => deref::run(options),
        Workload::Compute => compute::run(options),
        Workload::Words => words::run(options),
        Workload::Hash => hash::run(options),
        Workload::Web => web::run(options),
        Workload::Remote => remote::run(options),
        Workload::List => list::run(options),
        Workload::Shift => list::run_shift(options),
        Workload::Plain => list::run_plain(options),
        Workload::Walk => walk::run(options),
        Workload::Log => served::run_log(options),
        Workload::Cuckoo => served::run_cuckoo(options),
        Workload::Pages => pages::run(options),
        Workload::Tasks => tasks::run(options),
        Workload::Pack => pack::run(options, pack::Way::Pack),
        Workload::Unpack => pack::run(options, pack::Way::Unpack),
        Workload::Frame => frame::run(options),
        Workload::Churn => pauses::run(options, pauses::Scene::Churn),
        Workload::Crowd => pauses::run(options, pauses::Scene::Crowd),
        Workload::Cache => cache::run(options, cache::Trace::Skewed),
        Workload::Pagerank => pagerank::run(options),
        Workload::Triangles => triangles::run(options),
        Workload::CountWords => count::run(options),
        Workload::CountViews => views::run(options, views::Input::Skewed),
        Workload::CountViewsUniform => views::run(options, views::Input::Uniform),
        Workload::Shuffle => shuffle::run(options),
        Workload::Trips => trips::run(options),
        #[cfg(feature = "sql")]
        Workload::Sql => sql::run(options),
        #[cfg(not(feature = "sql"))]
        Workload::Sql => anyhow::bail!("build farfield-bench with --features sql"),
        #[cfg(feature = "frame")]
        Workload::Questions => questions::run(options),
        #[cfg(not(feature = "frame"))]
        Workload::Questions => anyhow::bail!("build farfield-bench with --features frame"),
        Workload::Switch => switch::run(options),
        Workload::Follow => collected::run_follow(options),
        Workload::Trees => collected::run_trees(options),
        Workload::Gcbench => gc_bench::run(options),
        Workload::Marking => tracing::run_marking(options),
        Workload::Beside => tracing::run_beside(options),
        Workload::Replace => collected::run_replace(options),
        Workload::Moves => collected::run_moves(options),
        Workload::GraphStore => graph_store::run(options),
        Workload::Build => build_engine::run(options),
        Workload::GcCache => gc_cache::run(options),
        Workload::TrieMap => gc_maps::run(options, gc_maps::Scene::Trie),
        Workload::OrderedMap => gc_maps::run(options, gc_maps::Scene::Ordered),
        Workload::MapScan => gc_maps::run(options, gc_maps::Scene::Scan),
        Workload::AppendLog => gc_maps::run(options, gc_maps::Scene::Log),
        Workload::Table => gc_maps::run(options, gc_maps::Scene::Table),
        Workload::Closure => gc_compute::run_closure(options),
        Workload::Clusters => gc_compute::run_clusters(options),
        Workload::ShareDeref => shared::run_deref(options),
        Workload::ShareRead => shared::run_read(options),
        Workload::ShareLock => shared::run_lock(options),
        Workload::ShareSteal => shared::run_steal(options),
        Workload::ShareRecover => shared::run_recover(options),
        Workload::ShareAffinity => shared::run_affinity(options),
        Workload::ShareCounts => share_counts::run(options),
        Workload::ShareFrame => apps::frame::run(options),
        Workload::ShareTaxi => apps::taxi::run(options),
        Workload::ShareGemm => apps::gemm::run(options),
        Workload::ShareSocial => apps::social::run(options),
        Workload::ShareKv => apps::kv::run(options),
        Workload::Schedule => schedule::run(options),
        Workload::ScheduleSpeed => schedule::run_speed(options),
        Workload::ScheduleReference => schedule::run_reference(options),
        Workload::ScheduleTraces => schedule::run_traces(options),
        Workload::Decide => decide::run(options),
        Workload::Paced => paced::run(options),
        Workload::Replacement => replacement::run(options),
        Workload::CacheUniform => cache::run(options, cache::Trace::Uniform),
    }
}

/// Figures of a heap, beside those of the program.
fn figures_of(outcome: &mut Outcome, stats: &Stats, beside: u64) {
    let left = stats.written_pages + stats.clean_pages + stats.dead_pages;
    for (name, value) in [
        ("misses", stats.misses),
        ("whole_pages", stats.whole_pages),
        ("fetched_bytes", stats.fetched_bytes),
        ("left_to_come_whole", stats.left_to_come_whole),
        ("used_bytes", stats.used_bytes),
        ("evict_ns", stats.evicting.as_nanos() as u64),
        ("object_misses", stats.object_misses),
        ("value_pages", stats.value_pages),
        ("pages_to_come_whole", stats.pages_to_come_whole),
        ("near_peak_bytes", stats.near_bytes + beside),
        ("table_bytes", stats.table_bytes + beside),
        ("pages_out", stats.written_pages),
        ("clean_drops", stats.clean_pages),
        ("throttled", stats.throttled),
        ("prefetched", stats.prefetches),
        ("prefetch_hits", stats.prefetches_used),
    ] {
        outcome.figure(name, value as f64);
    }
    outcome.figure("reclaim_ns_per_byte", stats.evicting.as_nanos() as f64 / (left.max(1) * 4096) as f64);
    // Of a program whose accesses show no order both are 1 of nothing.
    if stats.prefetches > 0 {
        outcome.figure("prefetch_accuracy", stats.prefetch_accuracy());
        outcome.figure("prefetch_coverage", stats.prefetch_coverage());
    }
}

/// The same, and the misses of each of `ops` operations since `before`.
fn figures_since(outcome: &mut Outcome, before: &Stats, stats: &Stats, ops: u64, beside: u64) {
    outcome.figure("misses_per_op", (stats.misses - before.misses) as f64 / ops as f64);
    figures_of(outcome, stats, beside);
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(outcome) => {
            println!("{}", outcome.line());
            ExitCode::from(u8::from(!outcome.is_right()))
        }
        Err(error) => {
            eprintln!("farfield-work: {error:#}");
            ExitCode::from(3)
        }
    }
}
