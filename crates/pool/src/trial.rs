//! Histories of operations on a pool whose legs die, lie or are late, compared with what was written.

use crate::conformance::Random;
use crate::{
    Backend, Buffer, CallEnd, CallFailure, Calls, CloneTicket, Completion, FarCall, Health, Lane, Op, Opener, PagePart,
    PoolError, Priority, Protection, Request,
};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use farfield_core::wire::ErrorCode;
use farfield_core::{PageId, geometry::PAGE_BYTES};
use std::sync::Arc;
use std::time::Instant;

pub(crate) const LONG: Duration = Duration::from_secs(7200);
/// Nobody waits for an answer that takes an hour.
pub(crate) const NEVER: &str = "fault:delay=3600s@ram:";

pub(crate) fn open(url: &str, pages: u64) -> Arc<dyn Backend> {
    Opener::new().url(url).pages(pages).heals().open().unwrap()
}

/// What [`SilentSide`] answers while it is silent.
pub(crate) const SILENT: PoolError = PoolError::TimedOut { server: 0, after: Duration::from_secs(1) };

/// Memory that answers nothing for a while, and to which no lane can be opened then.
pub(crate) struct SilentSide {
    ram: Arc<dyn Backend>,
    is_silent: Arc<AtomicBool>,
    functions: Arc<Functions>,
}

/// The functions of a [`SilentSide`]. Their answer is the first word of a page, whose number is the argument; `fill` makes it of the version behind the number before.
#[derive(Default)]
pub(crate) struct Functions {
    /// They do not end as long as this is so.
    pub(crate) is_busy: AtomicBool,
    /// There are none of this name.
    pub(crate) lacks: AtomicBool,
    /// They panic.
    pub(crate) panic: AtomicBool,
    /// They answer something else.
    pub(crate) lies: AtomicBool,
    /// Of those that ran.
    pub(crate) count: AtomicUsize,
}

impl SilentSide {
    pub(crate) fn new(pages: u64) -> Arc<SilentSide> {
        let (is_silent, functions) = (Arc::default(), Arc::default());
        Arc::new(SilentSide { ram: open("ram:", pages), is_silent, functions })
    }

    /// What it holds, whether it is silent or not.
    pub(crate) fn memory(&self) -> &dyn Backend {
        &*self.ram
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn set_silent(&self, is_silent: bool) {
        self.is_silent.store(is_silent, Ordering::SeqCst);
    }

    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::SeqCst)
    }
}

impl Backend for SilentSide {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        if self.is_silent() {
            return Err(SILENT);
        }
        Ok(Box::new(SilentLane { lane: self.ram.open_lane()?, is_silent: self.is_silent.clone(), held: Vec::new() }))
    }
    fn open_calls(&self) -> Result<Box<dyn Calls>, PoolError> {
        if self.is_silent() {
            return Err(SILENT);
        }
        let (lane, is_silent, functions) = (self.ram.open_lane()?, self.is_silent.clone(), self.functions.clone());
        Ok(Box::new(SilentCalls { lane, is_silent, functions, queued: Vec::new(), ended: Vec::new() }))
    }
    fn clone_region(&self) -> Result<CloneTicket, PoolError> {
        if self.is_silent() { Err(SILENT) } else { self.ram.clone_region() }
    }
    fn answers(&self, _within: Duration) -> bool {
        !self.is_silent()
    }
    fn pages(&self) -> u64 {
        self.ram.pages()
    }
    fn health(&self) -> Health {
        self.ram.health()
    }
    fn abandon(&self) {}
}

struct SilentLane {
    lane: Box<dyn Lane>,
    is_silent: Arc<AtomicBool>,
    /// What was asked in silence, and is done when that is over.
    held: Vec<Request>,
}

impl Lane for SilentLane {
    fn submit(&mut self, request: Request) -> Result<(), Request> {
        if self.is_silent.load(Ordering::SeqCst) {
            self.held.push(request);
            return Ok(());
        }
        self.lane.submit(request)
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.is_silent.load(Ordering::SeqCst) {
            return 0;
        }
        for request in self.held.drain(..) {
            assert!(self.lane.submit(request).is_ok());
        }
        self.lane.poll(done)
    }
    fn in_flight(&self) -> usize {
        self.held.len() + self.lane.in_flight()
    }
    fn wait(&mut self, timeout: Duration) {
        std::thread::sleep(timeout.min(Duration::from_micros(100)));
    }
}

struct SilentCalls {
    lane: Box<dyn Lane>,
    is_silent: Arc<AtomicBool>,
    functions: Arc<Functions>,
    queued: Vec<FarCall>,
    /// What busy functions have found out.
    ended: Vec<CallEnd>,
}

impl Calls for SilentCalls {
    fn submit(&mut self, call: FarCall) -> Result<(), FarCall> {
        self.queued.push(call);
        Ok(())
    }
    fn poll(&mut self, done: &mut Vec<CallEnd>) -> usize {
        if self.is_silent.load(Ordering::SeqCst) {
            return 0;
        }
        for FarCall { tag, name, argument, .. } in self.queued.drain(..) {
            self.functions.count.fetch_add(1, Ordering::SeqCst);
            let words: Vec<u64> = argument.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let result = if self.functions.lacks.load(Ordering::SeqCst) {
                Err(CallFailure::Server { code: ErrorCode::NoFunction, detail: 0 })
            } else if self.functions.panic.load(Ordering::SeqCst) {
                Err(CallFailure::Server { code: ErrorCode::Panicked, detail: 0 })
            } else {
                if name == "fill" {
                    write(&mut *self.lane, words[0], 1, words[1]).unwrap();
                }
                let mut answer = read(&mut *self.lane, words[0], 1).bytes()[..8].to_vec();
                answer[0] ^= u8::from(self.functions.lies.load(Ordering::SeqCst));
                Ok(answer)
            };
            self.ended.push(CallEnd { tag, result, steps: 1 });
        }
        if self.functions.is_busy.load(Ordering::SeqCst) {
            return 0;
        }
        done.append(&mut self.ended);
        done.len()
    }
    fn in_flight(&self) -> usize {
        self.queued.len() + self.ended.len()
    }
    fn wait(&mut self, timeout: Duration) {
        std::thread::sleep(timeout.min(Duration::from_millis(1)));
    }
}

/// Pools that lose a leg: `alone`, and one with a `spare` that comes in. What they say about it.
pub(crate) fn says_what_is_not_protected(alone: &str, spare: &str) {
    assert_eq!(open("stripe(ram:,ram:)", 64).protection(), None);
    for url in [alone, spare] {
        let backend = open(url, 256);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 128, 1).unwrap();
        let said = || backend.protection().unwrap();
        assert_eq!(said(), Protection::default(), "{url}");
        // Until the leg is lost, by which of these one does not know.
        while said() == Protection::default() {
            write(&mut *lane, 0, 128, 1).unwrap();
        }
        if url == alone {
            assert_eq!(said(), Protection { missing_legs: 1, exposed_pages: 128, restored_pages: 0 }, "{url}");
            continue;
        }
        wait_until("the spare holds everything", || said().missing_legs == 0);
        assert_eq!(said().exposed_pages, 0, "{url}");
        assert!(said().restored_pages > 0, "{url}: {:?}", said());
        let two = open(&format!("stripe({alone},{spare})"), 64).protection();
        assert_eq!(two, Some(Protection::default()), "{url}");
    }
}

/// A pool of two legs or more, of which `sides[0]` fell silent when `sides[1]` had not been given yet what it had missed: page 0 is of version 2, and only the first
/// and what comes after the second have it. What the pool is asked meanwhile is answered when the first speaks again, and not refused.
pub(crate) fn waits_for_the_only_one(backend: &dyn Backend, sides: &[Arc<SilentSide>]) {
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 200, 1).unwrap();
    sides[1].set_silent(true);
    write(&mut *lane, 0, 10, 2).unwrap();
    sides[0].set_silent(true);
    sides[1].set_silent(false);
    // Its late answers come.
    (0..100).for_each(|_| {
        lane.poll(&mut Vec::new());
    });
    // Whoever has this is enough, so the first is late.
    write(&mut *lane, 128, 10, 2).unwrap();
    assert_eq!(backend.health(), Health::Degraded);
    assert!(matches!(backend.clone_region(), Err(PoolError::TimedOut { .. })), "it would lack the pages");
    let ops = [
        Op::Read { page: PageId(0), buffer: Buffer::new(10) },
        Op::Write { page: PageId(8), buffer: filled(10, 8, 3) },
        Op::Discard { page: PageId(20), count: 10 },
    ];
    let mut done = Vec::with_capacity(ops.len());
    for (tag, op) in (0..).zip(ops) {
        assert!(lane.submit(Request { tag, priority: Priority::Demand, deadline: LONG, op }).is_ok());
        lane.wait(Duration::from_millis(5));
        lane.poll(&mut done);
    }
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    sides[0].set_silent(false);
    wait_until("all of it is answered", || {
        lane.poll(&mut done);
        done.len() == 3
    });
    assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
    assert_version(&mut *lane, 0, 8, 2);
    assert_version(&mut *lane, 8, 10, 3);
    assert_version(&mut *lane, 128, 10, 2);
    assert!(read(&mut *lane, 20, 10).bytes().iter().all(|byte| *byte == 0));
    wait_until("all legs hold everything", || {
        lane.poll(&mut done);
        backend.health() == Health::Good
    });
    backend.clone_region().unwrap().forget();
}

pub(crate) fn one(lane: &mut dyn Lane, op: Op) -> Completion {
    let mut request = Request { tag: 0, priority: Priority::Demand, deadline: LONG, op };
    while let Err(back) = lane.submit(request) {
        request = back;
        lane.wait(Duration::from_millis(1));
    }
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(100));
    }
    done.remove(0)
}

pub(crate) fn filled(pages: usize, page: u64, version: u64) -> Buffer {
    let mut buffer = Buffer::new(pages);
    for index in 0..pages {
        let word = ((page + index as u64) << 32 | version).to_le_bytes();
        buffer.page_mut(index).as_chunks_mut::<8>().0.fill(word);
    }
    buffer.seal();
    buffer
}

pub(crate) fn write(lane: &mut dyn Lane, page: u64, pages: usize, version: u64) -> Result<(), PoolError> {
    one(lane, Op::Write { page: PageId(page), buffer: filled(pages, page, version) }).result
}

pub(crate) fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Buffer {
    let Completion { result, buffer, .. } = one(lane, Op::Read { page: PageId(page), buffer: Buffer::new(pages) });
    assert_eq!(result, Ok(()), "page {page}");
    buffer.unwrap()
}

pub(crate) fn assert_version(lane: &mut dyn Lane, page: u64, pages: usize, version: u64) {
    assert!(read(lane, page, pages).bytes() == filled(pages, page, version).bytes(), "page {page}");
}

/// How long tests wait for what happens in the background.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for what happens in the background.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let (started, mut looks) = (Instant::now(), 0);
    while !is_so() {
        looks += 1;
        assert!(looks < 100 || started.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two lanes of a pool of which a leg never answers.
pub(crate) fn goes_on_degraded(url: &str) {
    let backend = open(url, 256);
    let mut lane = backend.open_lane().unwrap();
    let mut other = backend.open_lane().unwrap();
    assert!(read(&mut *lane, 0, 100).bytes().iter().all(|byte| *byte == 0));
    write(&mut *lane, 0, 100, 1).unwrap();
    write(&mut *other, 50, 20, 2).unwrap();
    assert_version(&mut *lane, 0, 50, 1);
    assert_version(&mut *lane, 50, 20, 2);
    let part = PagePart::new(100, 60).unwrap();
    let answer = one(&mut *other, Op::ReadPart { page: PageId(55), part, buffer: Buffer::new(1) });
    assert_eq!(answer.result, Ok(()));
    assert_eq!(answer.buffer.unwrap().page(0)[part.range()], filled(1, 55, 2).page(0)[part.range()]);
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 60 }).result, Ok(()));
    assert!(read(&mut *other, 0, 60).bytes().iter().all(|byte| *byte == 0));
    assert_eq!(backend.health(), Health::Degraded);
}

/// A leg of the pool answers late, and when it has what it lacked another one dies.
pub(crate) fn brings_up_to_date(url: &str) {
    let backend = open(url, 64);
    let mut lane = backend.open_lane().unwrap();
    for version in 1..5 {
        write(&mut *lane, 10, 10, version).unwrap();
    }
    assert_eq!(backend.health(), Health::Degraded, "it has not answered");
    wait_until("it lacks nothing", || {
        // Its answers are seen by whoever polls.
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    for _ in 0..400 {
        assert_version(&mut *lane, 10, 10, 4);
        if backend.health() != Health::Good {
            return assert_version(&mut *lane, 10, 10, 4);
        }
    }
    panic!("nothing died");
}

pub(crate) const PAGES: u64 = 400;

/// What every page holds, by the version written last; operations on several lanes at a time, none of which meet on a page.
pub(crate) struct Model {
    pub(crate) versions: Vec<u64>,
    busy: Vec<bool>,
    /// By tag: first page, pages, and the version that is written (`None`: read, `Some(0)`: discarded).
    under_way: Vec<Option<(u64, u64, Option<u64>)>>,
}

impl Model {
    fn new() -> Model {
        Model { versions: vec![0; PAGES as usize], busy: vec![false; PAGES as usize], under_way: vec![None; 12] }
    }

    fn begin(&mut self, random: &mut Random, lanes: &mut [Box<dyn Lane>], version: u64) {
        let Some(tag) = self.under_way.iter().position(Option::is_none) else { return };
        let page = random.below(PAGES);
        let count = (1 + [0, 3, 40][random.below(3) as usize]).min(PAGES - page);
        let pages = page as usize..(page + count) as usize;
        if self.busy[pages.clone()].iter().any(|busy| *busy) {
            return;
        }
        let lane = random.below(lanes.len() as u64) as usize;
        let (op, writes) = match random.below(8) {
            0 => (Op::Discard { page: PageId(page), count }, Some(0)),
            1..4 => (Op::Write { page: PageId(page), buffer: filled(count as usize, page, version) }, Some(version)),
            _ => (Op::Read { page: PageId(page), buffer: Buffer::new(count as usize) }, None),
        };
        // It may take nothing now.
        let request = Request { tag: tag as u64, priority: Priority::Demand, deadline: LONG, op };
        if lanes[lane].submit(request).is_ok() {
            self.busy[pages].fill(true);
            self.under_way[tag] = Some((page, count, writes));
        }
    }

    fn end(&mut self, completion: Completion) {
        let (page, count, writes) = self.under_way[completion.tag as usize].take().expect("it was submitted");
        assert_eq!(completion.result, Ok(()), "{count} pages from {page} on, {writes:?}");
        for index in 0..count {
            let at = (page + index) as usize;
            self.busy[at] = false;
            match (writes, &completion.buffer) {
                (Some(version), _) => self.versions[at] = version,
                (None, Some(buffer)) => {
                    let expected = match self.versions[at] {
                        0 => [0; PAGE_BYTES].to_vec(),
                        version => filled(1, at as u64, version).bytes().to_vec(),
                    };
                    assert!(buffer.page(index as usize) == expected, "page {at} is not version {}", self.versions[at]);
                }
                (None, None) => panic!("buffers always come back"),
            }
        }
    }

    /// Until nothing is under way in the lane.
    fn finish(&mut self, lane: &mut dyn Lane) {
        let mut done = Vec::with_capacity(16);
        while lane.in_flight() > 0 {
            lane.poll(&mut done);
            done.drain(..).for_each(|completion| self.end(completion));
        }
    }

    /// Nothing is under way: does every page hold what it should?
    pub(crate) fn check(&self, lane: &mut dyn Lane, context: &str) {
        for page in 0..PAGES {
            let buffer = read(lane, page, 1);
            let version = self.versions[page as usize];
            let right = if version == 0 { vec![0; PAGE_BYTES] } else { filled(1, page, version).bytes().to_vec() };
            assert!(buffer.bytes() == right, "page {page} is not version {version} at the end: {context}");
        }
    }
}

/// So many random operations on three lanes, some of which go and come: the lanes, with nothing under way any more, and what every page should hold.
pub(crate) fn random_history(backend: &dyn Backend, seed: u64, operations: u64) -> (Vec<Box<dyn Lane>>, Model) {
    let mut lanes: Vec<_> = (0..3).map(|_| backend.open_lane().unwrap()).collect();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut model, mut done) = (Model::new(), Vec::with_capacity(16));
    for version in 1..=operations {
        model.begin(&mut random, &mut lanes, version);
        let lane = random.below(3) as usize;
        lanes[lane].poll(&mut done);
        done.drain(..).for_each(|completion| model.end(completion));
        if version % 1500 == 0 {
            // A thread goes, another comes.
            model.finish(&mut *lanes[lane]);
            lanes[lane] = backend.open_lane().unwrap();
        }
    }
    lanes.iter_mut().for_each(|lane| model.finish(&mut **lane));
    (lanes, model)
}

/// A random history, and at the end every page is what was written last. `die=last` is a death after all of them: by then a spare holds everything.
pub(crate) fn survive(url: &str, heals: bool, seed: u64, operations: u64) {
    let dies_last = url.contains("die=last");
    let url = &url.replace("die=last", &format!("die={}", 4 * operations + 2000));
    let context = format!("FARFIELD_SEED={seed} {url} heals: {heals}");
    println!("{context}");
    let opener = Opener::new().url(url).pages(PAGES);
    let backend = if heals { opener.heals() } else { opener }.open().unwrap();
    let (mut lanes, mut model) = random_history(&*backend, seed, operations);
    if url.contains("spare=ram:") {
        wait_until("the spare holds everything", || {
            lanes.iter_mut().for_each(|lane| {
                lane.poll(&mut Vec::new());
            });
            backend.health() == Health::Good
        });
    }
    if dies_last {
        // Now the leg from which it was copied goes.
        let mut version = operations;
        while backend.health() == Health::Good {
            version += 1;
            // Something at every leg.
            write(&mut *lanes[1], 7, 20, version).unwrap();
            model.versions[7..27].fill(version);
        }
    }
    model.check(&mut *lanes[0], &context);
}
