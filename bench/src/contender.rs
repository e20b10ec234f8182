//! Who runs a workload: nobody in between (native), Linux swap, or Farfield by one of its doors.

use crate::advised::{self, Advisor};
use crate::cgroup::{Cgroup, Hierarchy};
use crate::child;
use crate::company::{self, Company};
use crate::fio::{self, Order};
use crate::front;
use crate::java::{self, Collector, Paging};
use crate::job::{Job, heap_on, job_on, job_with, native, sample, twice};
use crate::line::Sample;
use crate::places::{self, Chooser};
use crate::questions;
use crate::real_cluster;
use crate::server::Server;
use crate::spill::{self, Means};
use crate::stored;
use crate::swap::{self, Area, Traffic, unavailable};
use crate::switching::{self, add_servers};
use crate::sys::Processors;
use crate::tables::{self, Library};
use crate::undo::{Ledger, Undo};
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Who serves the memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Contender {
    /// All near, nothing in between.
    Native,
    /// Linux swap under a cgroup limit.
    Swap(Store),
    /// Two programs at once under Linux swap, each with a cgroup and its limit.
    SwapPair(Store),
    /// `farfield run`.
    Farfield(Far),
    /// The same, private, all its memory in huge pages while nothing has to leave.
    FarfieldHuge,
    /// The program switches far memory on in its own process.
    Enabled,
    /// `farfield run` with what an advisor says.
    Advised(Advisor),
    /// The program keeps its data in a far heap, whose plane has this name.
    Heap(Far, &'static str),
    /// Two programs at once with their data in far heaps of that plane, at one server.
    HeapPair(&'static str),
    /// The same on the page plane, and it does what it can where its data is.
    HeapOffload(Far),
    /// The same, but by functions of the program's own, which its server has.
    HeapOwn(Far),
    /// The same on the page plane, and two servers share its far pages: in groups as large as regions of a collected heap, or
    /// in smaller ones.
    HeapStripe(Far, Group),
    /// The same on the page plane, whose far memory moves to a second server of that kind.
    HeapSwitch(Far),
    /// A script of Python keeps its data in a far heap.
    HeapPython(Far),
    /// `farfield run` whose far memory moves so.
    FarfieldSwitch(Far),
    /// `farfield run`, beside others of its kind.
    FarfieldIn(Company),
    /// `farfield run` at one of several places.
    FarfieldAt(Chooser),
    /// The program asks somebody for each object.
    Peer(Peer),
    /// A library for tables, under Linux swap to compressed RAM.
    Tables(Library),
    /// A library that keeps what does not fit on a disk.
    Spill(Means),
    /// The same program in Java, whose memory is served in this way.
    Java(Collector, Paging),
    /// The program keeps its objects in a library of garbage collection, all near.
    Collector(&'static str),
    /// The program simulates a cluster under a policy of this name.
    Policy(&'static str),
    /// Jobs of the program on a real Slurm, with far memory or without.
    Slurm(bool),
    /// The program simulates near memory under a policy of page replacement of this name.
    Replacement(&'static str),
    /// fio, instead of the program.
    Fio(Order),
    /// A zram device that keeps the program's pages.
    ZramStore,
    /// lz4's own benchmark, of the program's pages.
    Lz4,
    /// The dashboard beside many jobs of the program, whether or not pages look at it.
    Dashboard { is_seen: bool },
}

/// Who keeps remote objects, across TCP loopback.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Peer {
    /// A loop in the program that does nothing but answer.
    Loopback,
    /// A service of gRPC in the program, by tonic.
    Grpc,
    /// A Redis server of the driver.
    Redis,
    /// Three of them that divide the keys: Redis Cluster.
    RedisCluster,
    /// A `farfield serve` of the driver, through one lane.
    Lane,
    /// The same, encrypted by the server and the program.
    TlsLane,
    /// The same in clear, through a tunnel of stunnel that encrypts it.
    TunnelLane,
    /// The same, and its memory shared.
    SharedLane,
    /// The same, read through this provider of libfabric.
    FabricLane(&'static str),
    /// Two of them that hold the same, through one lane.
    MirrorLane,
    /// Five of them that hold pages and their parity, through one lane.
    EcLane,
    /// The same; one of them is lost when the pages are filled.
    DegradedEcLane,
    /// A file in the scratch folder, through one lane.
    DiskLane,
    /// Compressed memory of the program, through one lane.
    CompressedLane,
    /// A `farfield serve` of the driver, whose memory a function reads from the program. If it is private, its memory is shared, and both have processors of
    /// their own.
    CalledHere(Far),
    /// The same, each access sent by itself.
    CalledUnbatched,
    /// The same, and the function runs there.
    CalledThere(Far),
    /// The same, and measurements choose.
    CalledAnywhere(Far),
    /// The same, but the server was not built with the function: it is shipped, and run by this engine.
    Shipped(&'static str),
    /// Nodes of shared memory, which the program starts and uses in this way.
    Share(&'static str),
    /// Nodes of shared memory that the program simulates, whose objects are kept coherent in this way.
    SimulatedShare(&'static str),
    /// Nobody: a loop, over the program's own memory.
    Loop,
    /// Nobody: a function in the server's place, over the program's own memory.
    Function,
    /// A `farfield serve` of the driver, whose pages a client that is written for it reads and writes.
    OneSided,
}

/// Neighbouring pages that lie at the same one of two servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Group {
    /// 64 KiB.
    Small,
    /// 1 MiB, a region of a collected heap.
    Region,
}

/// Where Linux swaps to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Store {
    /// Compressed RAM.
    Zram,
    /// A file on the disk that holds the scratch folder.
    File,
}

/// Where Farfield keeps far pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Far {
    /// A server on this machine, shared memory; of `farfield run` the private one.
    Private,
    /// A `farfield serve` of the driver, over TCP loopback.
    Tcp,
    /// The same, 50 µs away: each answer comes 100 µs later.
    LateTcp,
    /// In the program, compressed; what that takes is not in its near budget.
    Compressed,
}

/// The contender of that name.
pub(crate) fn known(name: &str) -> Result<Contender> {
    Ok(match name {
        "native" => Contender::Native,
        "swap-zram" => Contender::Swap(Store::Zram),
        "swap-file" => Contender::Swap(Store::File),
        "swap-zram-pair" => Contender::SwapPair(Store::Zram),
        "farfield" => Contender::Farfield(Far::Private),
        "farfield-tcp" => Contender::Farfield(Far::Tcp),
        "farfield-huge" => Contender::FarfieldHuge,
        "farfield-enabled" => Contender::Enabled,
        "farfield-foretold" => Contender::Advised(Advisor::Foretold),
        "farfield-tried" => Contender::Advised(Advisor::Tried),
        "farfield-auto" => Contender::Advised(Advisor::Held),
        "farfield-auto-periodic" => Contender::Advised(Advisor::HeldPeriodic),
        "farfield-best" => Contender::Advised(Advisor::Best),
        "heap" => Contender::Heap(Far::Private, "page"),
        "heap-tcp" => Contender::Heap(Far::Tcp, "page"),
        "heap-offload" => Contender::HeapOffload(Far::Private),
        "heap-offload-tcp" => Contender::HeapOffload(Far::Tcp),
        "heap-own" => Contender::HeapOwn(Far::Private),
        "heap-own-tcp" => Contender::HeapOwn(Far::Tcp),
        "heap-objects" => Contender::Heap(Far::Private, "object"),
        "heap-objects-tcp" => Contender::Heap(Far::Tcp, "object"),
        "heap-late" => Contender::Heap(Far::LateTcp, "page"),
        "heap-objects-late" => Contender::Heap(Far::LateTcp, "object"),
        "heap-hybrid" => Contender::Heap(Far::Private, "hybrid"),
        "heap-hybrid-tcp" => Contender::Heap(Far::Tcp, "hybrid"),
        "heap-hybrid-late" => Contender::Heap(Far::LateTcp, "hybrid"),
        "heap-pair" => Contender::HeapPair("page"),
        "heap-objects-pair" => Contender::HeapPair("object"),
        "heap-hybrid-pair" => Contender::HeapPair("hybrid"),
        "heap-python" => Contender::HeapPython(Far::Private),
        "heap-python-tcp" => Contender::HeapPython(Far::Tcp),
        "loopback" => Contender::Peer(Peer::Loopback),
        "redis" => Contender::Peer(Peer::Redis),
        "redis-cluster" => Contender::Peer(Peer::RedisCluster),
        "heap-lz" => Contender::Heap(Far::Compressed, "page"),
        "heap-stripe" => Contender::HeapStripe(Far::Private, Group::Small),
        "heap-stripe-tcp" => Contender::HeapStripe(Far::Tcp, Group::Small),
        "heap-stripe-regions" => Contender::HeapStripe(Far::Private, Group::Region),
        "heap-stripe-regions-tcp" => Contender::HeapStripe(Far::Tcp, Group::Region),
        "gc-arena" => Contender::Collector("gc-arena"),
        "dumpster" => Contender::Collector("dumpster"),
        "heap-switch" => Contender::HeapSwitch(Far::Private),
        "heap-switch-tcp" => Contender::HeapSwitch(Far::Tcp),
        "farfield-switch" => Contender::FarfieldSwitch(Far::Private),
        "farfield-switch-tcp" => Contender::FarfieldSwitch(Far::Tcp),
        "farfield-linked" => Contender::FarfieldIn(Company::Alone),
        "farfield-pair-shared" => Contender::FarfieldIn(Company::Sharing),
        "farfield-pair-own" => Contender::FarfieldIn(Company::Apart),
        "farfield-beside-flood" => Contender::FarfieldIn(Company::BesideFlood),
        "farfield-in-flood" => Contender::FarfieldIn(Company::InFlood),
        "farfield-in-linked-flood" => Contender::FarfieldIn(Company::InLinkedFlood),
        "farfield-pair" => Contender::FarfieldIn(Company::Pair),
        "farfield-beside-loop" => Contender::FarfieldIn(Company::BesideLoop),
        "farfield-overused" => Contender::FarfieldIn(Company::Overused),
        "farfield-ssd" => Contender::FarfieldAt(Chooser::Disk),
        "farfield-distant" => Contender::FarfieldAt(Chooser::Distant),
        "farfield-adapt" => Contender::FarfieldAt(Chooser::Profile),
        "farfield-adapt-late" => Contender::FarfieldAt(Chooser::Nobody),
        "lane-tcp" => Contender::Peer(Peer::Lane),
        "lane-tls" => Contender::Peer(Peer::TlsLane),
        "lane-tunnel" => Contender::Peer(Peer::TunnelLane),
        "lane-shm" => Contender::Peer(Peer::SharedLane),
        "lane-fabric-tcp" => Contender::Peer(Peer::FabricLane("tcp")),
        "lane-mirror" => Contender::Peer(Peer::MirrorLane),
        "lane-ec" => Contender::Peer(Peer::EcLane),
        "lane-ec-degraded" => Contender::Peer(Peer::DegradedEcLane),
        "lane-ssd" => Contender::Peer(Peer::DiskLane),
        "lane-lz" => Contender::Peer(Peer::CompressedLane),
        "rpc" => Contender::Peer(Peer::Loopback),
        "grpc" => Contender::Peer(Peer::Grpc),
        "wic-client" => Contender::Peer(Peer::CalledHere(Far::Tcp)),
        "wic-client-shm" => Contender::Peer(Peer::CalledHere(Far::Private)),
        "wic-client-unbatched" => Contender::Peer(Peer::CalledUnbatched),
        "wic-server" => Contender::Peer(Peer::CalledThere(Far::Tcp)),
        "wic-server-shm" => Contender::Peer(Peer::CalledThere(Far::Private)),
        "wic-auto" => Contender::Peer(Peer::CalledAnywhere(Far::Tcp)),
        "wic-auto-shm" => Contender::Peer(Peer::CalledAnywhere(Far::Private)),
        "wic-shipped" => Contender::Peer(Peer::Shipped("interpreted")),
        "wic-compiled" => Contender::Peer(Peer::Shipped("compiled")),
        "share" => Contender::Peer(Peer::Share("")),
        "share-in-place" => Contender::Peer(Peer::Share("place")),
        "share-backup" => Contender::Peer(Peer::Share("backup")),
        "share-tied" => Contender::Peer(Peer::Share("tied")),
        "share-anywhere" => Contender::Peer(Peer::Share("anywhere")),
        "share-beside" => Contender::Peer(Peer::Share("beside")),
        "sim-ownership" => Contender::Peer(Peer::SimulatedShare("ownership")),
        "sim-directory" => Contender::Peer(Peer::SimulatedShare("directory")),
        "sim-directory-of-many" => Contender::Peer(Peer::SimulatedShare("directory-of-many")),
        "sim-delegation" => Contender::Peer(Peer::SimulatedShare("delegation")),
        "sim-here" => Contender::Peer(Peer::SimulatedShare("here")),
        "loop" => Contender::Peer(Peer::Loop),
        "function" => Contender::Peer(Peer::Function),
        "one-sided" => Contender::Peer(Peer::OneSided),
        "pandas" => Contender::Tables(Library::Pandas),
        "polars" => Contender::Tables(Library::Polars),
        "java-g1" => Contender::Java(Collector::G1, Paging::Swap),
        "java-zgc" => Contender::Java(Collector::Zgc, Paging::Swap),
        "java-shenandoah" => Contender::Java(Collector::Shenandoah, Paging::Swap),
        "java-g1-farfield" => Contender::Java(Collector::G1, Paging::Farfield),
        "java-zgc-farfield" => Contender::Java(Collector::Zgc, Paging::Farfield),
        "java-shenandoah-farfield" => Contender::Java(Collector::Shenandoah, Paging::Farfield),
        "sim-near" => Contender::Policy("near"),
        "sim-uniform" => Contender::Policy("uniform:0.75"),
        "sim-variable" => Contender::Policy("variable"),
        "sim-memory-time" => Contender::Policy("memory-time"),
        "sim-memory-time-long" => Contender::Policy("memory-time+long"),
        "sim-worth" => Contender::Policy("worth"),
        "slurm-near" => Contender::Slurm(false),
        "slurm-far" => Contender::Slurm(true),
        "opt" => Contender::Replacement("opt"),
        "lru" => Contender::Replacement("lru"),
        "clock" => Contender::Replacement("clock"),
        "fifo" => Contender::Replacement("fifo"),
        "second-chance" => Contender::Replacement("second-chance"),
        "gclock" => Contender::Replacement("gclock"),
        "s3-fifo" => Contender::Replacement("s3-fifo"),
        "s3-fifo-uses" => Contender::Replacement("s3-fifo-uses"),
        "sieve" => Contender::Replacement("sieve"),
        "sieve-uses" => Contender::Replacement("sieve-uses"),
        "segmented-fifo" => Contender::Replacement("segmented-fifo"),
        "numpy-memmap" => Contender::Spill(Means::Memmap),
        "polars-streaming" => Contender::Spill(Means::PolarsStreaming),
        "duckdb" => Contender::Spill(Means::DuckDb),
        "dask" => Contender::Spill(Means::Dask),
        "dashboard" => Contender::Dashboard { is_seen: true },
        "dashboard-unseen" => Contender::Dashboard { is_seen: false },
        "fio" => Contender::Fio(Order::Random),
        "zram-store" => Contender::ZramStore,
        "lz4" => Contender::Lz4,
        "fio-sequential" => Contender::Fio(Order::Sequential),
        _ => bail!(
            "no contender is called {name}; known are native, swap-zram, swap-file, farfield, farfield-tcp, farfield-enabled, farfield-foretold, farfield-tried, \
             farfield-auto, farfield-auto-periodic, farfield-best, heap, heap-tcp, heap-offload, heap-offload-tcp, heap-own, heap-own-tcp, \
             heap-objects, heap-objects-tcp, heap-late, heap-objects-late, heap-hybrid, heap-hybrid-tcp, heap-hybrid-late, heap-pair, heap-objects-pair, heap-hybrid-pair, heap-python, heap-python-tcp, loopback, redis, redis-cluster, lane-tcp, lane-tls, lane-tunnel, lane-shm, lane-fabric-tcp, \
             lane-mirror, lane-ec, lane-ec-degraded, lane-ssd, lane-lz, rpc, grpc, wic-client, wic-client-shm, wic-client-unbatched, wic-server, \
             wic-server-shm, wic-auto, wic-auto-shm, wic-shipped, wic-compiled, share, share-in-place, share-backup, share-tied, share-anywhere, share-beside, sim-ownership, sim-directory, sim-directory-of-many, sim-delegation, sim-here, loop, function, one-sided, heap-lz, heap-stripe, heap-stripe-tcp, heap-stripe-regions, heap-stripe-regions-tcp, gc-arena, dumpster, heap-switch, heap-switch-tcp, farfield-switch, \
             farfield-switch-tcp, farfield-linked, farfield-pair-shared, farfield-pair-own, farfield-beside-flood, \
             farfield-in-flood, farfield-in-linked-flood, farfield-pair, swap-zram-pair, farfield-beside-loop, farfield-overused, farfield-ssd, farfield-distant, farfield-adapt, farfield-adapt-late, pandas, polars, numpy-memmap, polars-streaming, duckdb, dask, dashboard, dashboard-unseen, java-g1, java-zgc, java-shenandoah, java-g1-farfield, java-zgc-farfield, java-shenandoah-farfield, fio, fio-sequential, zram-store, lz4, sim-near, sim-uniform, sim-variable, \
             sim-memory-time, sim-memory-time-long, sim-worth, slurm-near, slurm-far, opt, lru, clock, fifo, second-chance, gclock, s3-fifo, s3-fifo-uses, sieve, sieve-uses, segmented-fifo"
        ),
    })
}

/// The kernel sometimes kills a process at a small limit although swap is free; then the sample is taken again. None that was killed
/// seven times ever ran.
const OOM_RETRIES: u64 = 7;
pub(crate) const LOCK_WITHIN: Duration = Duration::from_secs(600);

impl Contender {
    /// Runs the program once.
    pub(crate) fn sample(self, job: &Job<'_>) -> Result<Sample> {
        match self {
            Contender::Native => native(job),
            Contender::Swap(store) => swapped(store, job.near_bytes, job.data_bytes, job),
            Contender::SwapPair(store) => swapped_at_once(2, store, job.near_bytes, job.data_bytes, job),
            Contender::Farfield(far) => farfield(far, job),
            Contender::FarfieldHuge => job_with(&["--huge-pages".into()], job),
            Contender::Enabled => enabled(job),
            Contender::Advised(advisor) => advised::sample(advisor, job),
            Contender::Heap(far, plane) if job.workload.name == questions::NAME => questions::in_rust(far, plane, job),
            Contender::HeapPython(far) => questions::in_python(far, job),
            Contender::HeapPair(plane) => company::two_heaps(plane, job),
            Contender::Heap(far, plane) => heap(far, plane, &[], job),
            Contender::HeapOffload(far) => heap(far, "page", &["--offload", "all"], job),
            Contender::HeapOwn(far) => heap_with_functions(far, job),
            Contender::HeapStripe(far, group) => striped(far, group, job),
            Contender::Collector(name) => collected(name, job),
            Contender::HeapSwitch(far) => switching::heap(far, job),
            Contender::FarfieldSwitch(far) => switching::run(far, job),
            Contender::FarfieldIn(company) => company::sample(company, job),
            Contender::FarfieldAt(chooser) => places::sample(chooser, job),
            Contender::Peer(peer) => remote(peer, job),
            Contender::Tables(library) => tables::sample(library, job),
            Contender::Spill(means) => spill::sample_of(means, job),
            Contender::Java(collector, paging) => java::sample(collector, paging, job),
            Contender::Policy(name) => simulated(name, job),
            Contender::Slurm(is_far) => real_cluster::sample(is_far, job),
            Contender::Replacement(name) => replaced(name, job),
            Contender::Fio(order) => fio::sample(order, job),
            Contender::ZramStore => stored::zram(job),
            Contender::Lz4 => stored::lz4(job),
            Contender::Dashboard { is_seen } => front::sample_of(is_seen, job),
        }
    }
}

/// A script, which enables far memory in its interpreter.
fn enabled(job: &Job<'_>) -> Result<Sample> {
    let arguments = [job.arguments, &["--enable".to_string(), job.near_bytes.to_string()]].concat();
    job.workload.ensure_installed(job.program, &arguments)?;
    native(&Job { arguments: &arguments, ..*job })
}

/// The program, which simulates a cluster under this policy.
fn simulated(policy: &str, job: &Job<'_>) -> Result<Sample> {
    let schedules = ["schedule", "schedule-traces"].contains(&job.workload.name);
    ensure!(schedules, "the workload {} schedules nothing", job.workload.name);
    let mut command = Command::new(job.program);
    command.args(job.arguments).args(["--policy", policy]);
    sample(job, &child::run(command, job.scratch, job.patience)?)
}

/// The arguments of a program that replays a trace, which has to know how much is near.
fn trace_arguments(job: &Job<'_>) -> Result<Vec<String>> {
    ensure!(job.workload.name == "replacement", "the workload {} replays no trace", job.workload.name);
    let near_pages = (job.near_bytes / 4096).to_string();
    Ok([job.arguments, &["--near-pages".to_string(), near_pages]].concat())
}

/// The program, which simulates near memory under this policy.
fn replaced(policy: &str, job: &Job<'_>) -> Result<Sample> {
    let mut command = Command::new(job.program);
    command.args(trace_arguments(job)?).args(["--replacement", policy]);
    sample(job, &child::run(command, job.scratch, job.patience)?)
}

/// The program under `farfield run`, which makes the accesses; how many pages came back, compared with LRU.
fn replayed(far: Far, job: &Job<'_>) -> Result<Sample> {
    let arguments = trace_arguments(job)?;
    let mut sample = farfield_with(far, &Job { arguments: &arguments, ..*job })?;
    if let (Some(&page_ins), Some(&lru)) = (sample.figures.get("pages_in"), sample.figures.get("lru_page_ins")) {
        sample.figures.insert("page_ins".into(), page_ins);
        sample.figures.insert("page_ins_over_lru".into(), page_ins / lru.max(1.0));
    }
    Ok(sample)
}

/// The program of a job under Linux swap, so much of it near, which takes so much memory in all.
pub(crate) fn swapped(store: Store, near_bytes: u64, all_bytes: u64, job: &Job<'_>) -> Result<Sample> {
    swapped_at_once(1, store, near_bytes, all_bytes, job)
}

/// Runs the program `jobs` times at once, each in a cgroup of its own with that limit; all swap to one area.
fn swapped_at_once(jobs: u64, store: Store, near_bytes: u64, all_bytes: u64, job: &Job<'_>) -> Result<Sample> {
    swap::ensure_allowed()?;
    let hierarchy = Hierarchy::find()?;
    let ledger = Ledger::open(job.ledger, LOCK_WITHIN)?;
    for attempt in 0..=OOM_RETRIES {
        let mut undo = Undo::new(&ledger);
        // Room for everything twice over: slots of pages that have come back are freed late.
        let bytes = jobs * all_bytes * 2 + (64 << 20);
        let area = match store {
            Store::Zram => Area::zram(bytes, &mut undo)?,
            Store::File => Area::file(&job.scratch.join("swap"), bytes, &mut undo)?,
        };
        let groups = (0..jobs).map(|_| Cgroup::new(&hierarchy, near_bytes, &mut undo)).collect::<Result<Vec<_>>>()?;
        let before = Traffic::now();
        let finished = company::each_at_once(&groups, job, |group, job| {
            let mut command = group.command(job.program);
            command.args(job.arguments);
            child::run(command, job.scratch, job.patience)
        });
        let traffic = Traffic::now().since(before);
        let oom_kills: u64 = groups.iter().map(Cgroup::oom_kills).sum();
        let peak = groups.iter().filter_map(Cgroup::peak_bytes).max();
        let store_peak = area.store_peak_bytes();
        let kind = area.kind.clone();
        undo.finish()?;
        let finished = finished.into_iter().collect::<Result<Vec<_>>>()?;
        if oom_kills > 0 && finished.iter().any(|finished| finished.ended.signal == 9) {
            continue;
        }
        let samples = finished.iter().map(|finished| sample(job, finished)).collect::<Result<Vec<_>>>();
        let samples = samples.with_context(|| format!("under swap to {kind}"))?;
        let together = samples.into_iter().map(Ok).reduce(|one, other| company::together(one?, other?));
        let mut sample = together.context("no program ran")??;
        let swapping_expected = job.near_bytes < job.data_bytes;
        ensure!(!swapping_expected || traffic.pages_out > 0, "the limit did not make the program swap to {kind}");
        let faults = sample.figures["faults_major"];
        if faults > 0.0 {
            sample.figures.insert("ns_per_fault".into(), sample.ns_per_op * sample.ops as f64 / faults);
        }
        sample.figures.insert("swap_pages_in".into(), traffic.pages_in as f64);
        sample.figures.insert("swap_pages_out".into(), traffic.pages_out as f64);
        sample.figures.insert("oom_retries".into(), attempt as f64);
        sample.figures.insert("cgroup_version".into(), f64::from(hierarchy.version));
        if let Some(peak) = peak {
            sample.figures.insert("near_peak_bytes".into(), peak as f64);
            sample.figures.insert("near_peak_over_limit".into(), peak as f64 / near_bytes as f64);
        }
        if let Some(store) = store_peak {
            sample.figures.insert("store_peak_bytes".into(), store as f64);
        }
        return Ok(sample);
    }
    Err(unavailable(
        format!(
            "at this limit the kernel killed the program {} times for want of memory, although swap was free",
            OOM_RETRIES + 1
        ),
        "run it when the machine is quiet, or raise near_percent",
    ))
}

fn farfield(far: Far, job: &Job<'_>) -> Result<Sample> {
    if job.workload.name == "replacement" { replayed(far, job) } else { farfield_with(far, job) }
}

fn farfield_with(far: Far, job: &Job<'_>) -> Result<Sample> {
    let server = match far {
        Far::Private | Far::Compressed => None,
        Far::Tcp | Far::LateTcp => Some(server_at(far, "server", job)?),
    };
    let mut sample = job_on(server.as_ref().map(|server| server.url.as_str()), job)?;
    if let Some(server) = server {
        sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    }
    Ok(sample)
}

/// The program with its data in a far heap of that plane.
pub(crate) fn heap(far: Far, plane: &str, more: &[&str], job: &Job<'_>) -> Result<Sample> {
    let server = match far {
        Far::Compressed => None,
        Far::Private | Far::Tcp | Far::LateTcp => Some(server_at(far, "server", job)?),
    };
    let pool = match (far, &server) {
        (Far::LateTcp, Some(server)) => format!("fault:delay=100us@{}", server.url),
        (_, Some(server)) => server.url.clone(),
        (_, None) => format!("lz:?size={}", twice(job)),
    };
    let mut sample = heap_on(&pool, plane, more, job)?;
    if let Some(server) = server {
        sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    }
    Ok(sample)
}

/// The program with its data in a far heap at a server that has functions of the program's own.
fn heap_with_functions(far: Far, job: &Job<'_>) -> Result<Sample> {
    let server = Server::with_workloads(job, &address(far, "server", job))?;
    let mut sample = heap_on(&server.url, "page", &["--offload", "own"], job)?;
    sample.figures.insert("server_cpu_s".into(), server.cpu_seconds());
    Ok(sample)
}

/// The program with its data in a far heap at two servers that share the pages.
fn striped(far: Far, group: Group, job: &Job<'_>) -> Result<Sample> {
    let servers = [server_at(far, "one", job)?, server_at(far, "two", job)?];
    let group = match group {
        Group::Small => "",
        Group::Region => "?group=1M",
    };
    let mut sample = heap_on(&format!("stripe({},{}){group}", servers[0].url, servers[1].url), "page", &[], job)?;
    add_servers(&mut sample, servers);
    Ok(sample)
}

/// The program, whose objects a library collects.
fn collected(library: &str, job: &Job<'_>) -> Result<Sample> {
    ensure!(job.workload.name == "gcbench", "the workload {} knows no libraries", job.workload.name);
    if !cfg!(feature = "collectors") {
        let remedy = "build farfield-bench with --features collectors";
        return Err(unavailable("this harness was built without other collectors", remedy));
    }
    let arguments = [job.arguments, &["--library".to_owned(), library.to_owned()]].concat();
    native(&Job { arguments: &arguments, ..*job })
}

/// A memory server of that kind.
pub(crate) fn server_at(far: Far, name: &str, job: &Job<'_>) -> Result<Server> {
    Server::farfield(job, &address(far, name, job))
}

/// Returns the address at which a server of that kind listens.
fn address(far: Far, name: &str, job: &Job<'_>) -> String {
    match far {
        // It shares its memory with the program.
        Far::Private | Far::Compressed => {
            format!("unix:{}", job.scratch.join(format!("{name}.sock")).display())
        }
        Far::Tcp | Far::LateTcp => "tcp://127.0.0.1:0".to_owned(),
    }
}

/// Servers of Redis Cluster: as many as a cluster has at least.
const REDIS_NODES: usize = 3;

fn remote(peer: Peer, job: &Job<'_>) -> Result<Sample> {
    let name = job.workload.name;
    ensure!(
        ["remote", "pages", "list", "shift", "walk", "plain", "log", "cuckoo"].contains(&name)
            || name.starts_with("share-"),
        "the workload {name} asks nobody for objects"
    );
    let tcp = |count: usize| (0..count).map(|_| server_at(Far::Tcp, "server", job)).collect::<Result<Vec<_>>>();
    let called = match peer {
        Peer::CalledHere(far) | Peer::CalledThere(far) | Peer::CalledAnywhere(far) => Some(far),
        _ => None,
    };
    // Beside a client that shares its memory, a server that is busy takes no processor from it, as if each had a machine.
    let apart = (called == Some(Far::Private)).then(Processors::two_sides).flatten();
    let servers = match peer {
        Peer::Redis => vec![Server::redis(job)?],
        Peer::RedisCluster => Server::redis_cluster(job, REDIS_NODES)?,
        Peer::Lane | Peer::OneSided => tcp(1)?,
        Peer::TlsLane => vec![Server::tls(job)?],
        Peer::TunnelLane => {
            let server = server_at(Far::Tcp, "server", job)?;
            vec![Server::tunnel(job, &server)?, server]
        }
        Peer::CalledUnbatched => vec![Server::with_workloads(job, &address(Far::Tcp, "server", job))?],
        Peer::CalledHere(far) | Peer::CalledThere(far) | Peer::CalledAnywhere(far) => {
            let server = Server::with_workloads(job, &address(far, "server", job))?;
            if let Some((_, theirs)) = apart {
                server.keep_on(theirs)?;
            }
            vec![server]
        }
        Peer::Shipped(engine) => {
            guest()?;
            vec![Server::sandbox(job, engine)?]
        }
        Peer::Grpc if !cfg!(feature = "grpc") => {
            return Err(unavailable(
                "this harness was built without gRPC",
                "build farfield-bench with --features grpc",
            ));
        }
        Peer::SharedLane => vec![server_at(Far::Private, "server", job)?],
        Peer::FabricLane(provider) => vec![Server::fabric(job, provider)?],
        Peer::MirrorLane => tcp(2)?,
        Peer::EcLane | Peer::DegradedEcLane => tcp(5)?,
        Peer::Loopback | Peer::Grpc | Peer::Share(_) | Peer::SimulatedShare(_) | Peer::Loop | Peer::Function => vec![],
        Peer::DiskLane | Peer::CompressedLane => vec![],
    };
    let bytes = twice(job);
    let urls = servers.iter().map(|server| server.url.as_str()).collect::<Vec<_>>().join(",");
    let url = match peer {
        Peer::Redis | Peer::Lane | Peer::SharedLane => urls,
        Peer::RedisCluster => format!("redis-cluster:{}", urls.replace("redis:", "")),
        Peer::TlsLane | Peer::TunnelLane => servers[0].url.clone(),
        Peer::FabricLane(_) => format!("fabric:{urls}"),
        Peer::CalledHere(_) => format!("client:{urls}"),
        Peer::CalledUnbatched => format!("unbatched:{urls}"),
        Peer::CalledThere(_) => format!("server:{urls}"),
        Peer::CalledAnywhere(_) => format!("auto:{urls}"),
        Peer::Shipped(_) => format!("shipped:{urls}"),
        Peer::OneSided => format!("one-sided:{urls}"),
        Peer::MirrorLane => format!("mirror({urls})"),
        Peer::EcLane => format!("ec(4,1,{urls})"),
        // Pages are filled 64 at a time, which is one operation of each server.
        Peer::DegradedEcLane => format!("ec(4,1,fault:die={}@{urls})", job.data_bytes.div_ceil(64 * 4096) + 1),
        Peer::DiskLane => format!("ssd:{}?size={bytes}", job.scratch.display()),
        Peer::CompressedLane => format!("lz:?size={bytes}"),
        Peer::Loopback if name == "share-social" => "rpc:".to_owned(),
        Peer::Loopback => "loopback:".to_owned(),
        Peer::Grpc => "grpc:".to_owned(),
        Peer::Share(way) => format!("share:{way}"),
        Peer::SimulatedShare(way) => format!("sim:{way}"),
        Peer::Loop => "loop:".to_owned(),
        Peer::Function => "function:".to_owned(),
    };
    let mut command = Command::new(job.program);
    command.args(job.arguments).args(["--peer", &url]);
    if let Some((ours, _)) = apart {
        ours.keep_command(&mut command);
    }
    let finished = child::run(command, job.scratch, job.patience)?;
    let mut sample = sample(job, &finished)?;
    if !servers.is_empty() {
        sample.figures.insert("server_cpu_s".into(), servers.iter().map(Server::cpu_seconds).sum());
    }
    Ok(sample)
}

/// Functions as WebAssembly: a file that the workload program reads.
fn guest() -> Result<()> {
    const GUEST: &str = "FARFIELD_GUEST";
    ensure!(
        std::env::var_os(GUEST).is_some_and(|path| Path::new(&path).is_file()),
        unavailable(
            "no functions as WebAssembly",
            format!(
                "cargo build --profile guest --target wasm32-unknown-unknown -p farfield-guest, and name farfield_guest.wasm in {GUEST}"
            )
        )
    );
    Ok(())
}
