//! Random histories of operations on a pool whose members die, lie or are late, compared with what
//! was written.

use crate::conformance::Random;
use crate::{
    Backend, Buffer, CallChannel, CallEnd, CallFailure, CloneTicket, Completion, FarCall, Health, Lane, LaneRequest,
    Op, PagePart, PoolBuilder, PoolError, Priority, Protection,
};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use farfield_core::wire::ErrorCode;
use farfield_core::{PageId, geometry::PAGE_BYTES};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

pub(crate) const LONG: Duration = Duration::from_secs(7200);
/// URL of a member whose answers take an hour, longer than any test waits.
pub(crate) const NEVER: &str = "fault:delay=3600s@ram:";

pub(crate) fn open(url: &str, pages: u64) -> Arc<dyn Backend> {
    PoolBuilder::new().url(url).pages(pages).repair_thread().open().unwrap()
}

/// Error that [`SilentMember`] returns while it is silent.
pub(crate) const SILENT: PoolError = PoolError::TimedOut { server: 0, after: Duration::from_secs(1) };

/// Memory that answers nothing for a while, and to which no lane can be opened then.
pub(crate) struct SilentMember {
    ram: Arc<dyn Backend>,
    is_silent: Arc<AtomicBool>,
    /// Whether operations that change the memory are held back.
    holds_changes: Arc<AtomicBool>,
    /// Flags of single lanes; a lane whose flag is set answers nothing.
    stalls: Mutex<Vec<Weak<AtomicBool>>>,
    functions: Arc<Functions>,
}

/// Functions of a [`SilentMember`]. Their argument is the number of a page, and their answer is the
/// first word of that page. `fill` first writes the page with the version that follows the number.
#[derive(Default)]
pub(crate) struct Functions {
    /// Whether they do not end for now.
    pub(crate) is_busy: AtomicBool,
    /// Whether there are no such functions.
    pub(crate) lacks: AtomicBool,
    /// Whether they panic.
    pub(crate) panic: AtomicBool,
    /// Whether they answer something wrong.
    pub(crate) lies: AtomicBool,
    /// Number of functions that ran.
    pub(crate) count: AtomicUsize,
}

impl SilentMember {
    pub(crate) fn new(pages: u64) -> Arc<SilentMember> {
        let (is_silent, holds_changes, functions) = (Arc::default(), Arc::default(), Arc::default());
        let stalls = Mutex::default();
        Arc::new(SilentMember { ram: open("ram:", pages), is_silent, holds_changes, stalls, functions })
    }

    /// Returns the memory behind it, whether it is silent or not.
    pub(crate) fn memory(&self) -> &dyn Backend {
        &*self.ram
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn set_silent(&self, is_silent: bool) {
        self.is_silent.store(is_silent, Ordering::SeqCst);
    }

    pub(crate) fn set_holds_changes(&self, holds: bool) {
        self.holds_changes.store(holds, Ordering::SeqCst);
    }

    /// Stalls one of the open lanes, which then answers nothing; `None` ends all stalls.
    fn stall(&self, lane: Option<u64>) {
        let mut stalls = self.stalls.lock().unwrap();
        stalls.retain(|lane| lane.strong_count() > 0);
        for (number, stall) in (0..).zip(&*stalls) {
            let is_stalled = lane.is_some_and(|lane| lane % stalls.len() as u64 == number);
            stall.upgrade().iter().for_each(|stall| stall.store(is_stalled, Ordering::SeqCst));
        }
    }

    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::SeqCst)
    }
}

impl Backend for SilentMember {
    fn open_lane(&self) -> Result<Box<dyn Lane>, PoolError> {
        if self.is_silent() {
            return Err(SILENT);
        }
        let is_stalled = Arc::new(AtomicBool::new(false));
        self.stalls.lock().unwrap().push(Arc::downgrade(&is_stalled));
        Ok(Box::new(SilentLane {
            lane: self.ram.open_lane()?,
            is_silent: self.is_silent.clone(),
            is_stalled,
            holds_changes: self.holds_changes.clone(),
            held: Vec::new(),
        }))
    }
    fn open_calls(&self) -> Result<Box<dyn CallChannel>, PoolError> {
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
    is_stalled: Arc<AtomicBool>,
    holds_changes: Arc<AtomicBool>,
    /// Requests that arrived in silence. They are carried out when it is over, unless their
    /// deadline passes before.
    held: Vec<(Instant, LaneRequest)>,
}

impl SilentLane {
    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::SeqCst) || self.is_stalled.load(Ordering::SeqCst)
    }

    fn is_held(&self, op: &Op) -> bool {
        let is_change = matches!(op, Op::Write { .. } | Op::Discard { .. });
        self.is_silent() || is_change && self.holds_changes.load(Ordering::SeqCst)
    }
}

impl Lane for SilentLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.is_held(&request.op) {
            self.held.push((Instant::now(), request));
            return Ok(());
        }
        self.lane.submit(request)
    }
    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        let is_over = |(since, request): &(Instant, LaneRequest)| since.elapsed() >= request.deadline;
        while done.len() < done.capacity()
            && let Some(over) = self.held.iter().position(is_over)
        {
            let (_, LaneRequest { tag, op, .. }) = self.held.remove(over);
            done.push(Completion { tag, result: Err(SILENT), buffer: op.into_parts().1 });
        }
        if self.is_silent() {
            return done.len();
        }
        while let Some(next) = self.held.iter().position(|(_, request)| !self.is_held(&request.op)) {
            let (since, request) = self.held.remove(next);
            if let Err(back) = self.lane.submit(request) {
                self.held.insert(next, (since, back));
                break;
            }
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
    /// Results of functions, held back while they are busy.
    ended: Vec<CallEnd>,
}

impl CallChannel for SilentCalls {
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

/// Checks what pools that lose a member say about their protection: `alone`, and one with a `spare`
/// that comes in.
pub(crate) fn says_what_is_not_protected(alone: &str, spare: &str) {
    assert_eq!(open("stripe(ram:,ram:)", 64).protection(), None);
    for url in [alone, spare] {
        let backend = open(url, 256);
        let mut lane = backend.open_lane().unwrap();
        write(&mut *lane, 0, 128, 1).unwrap();
        let said = || backend.protection().unwrap();
        assert_eq!(said(), Protection::default(), "{url}");
        // It is unknown by which of these writes the member has failed.
        while said() == Protection::default() {
            write(&mut *lane, 0, 128, 1).unwrap();
        }
        if url == alone {
            let lost = Protection { missing_legs: 1, exposed_pages: 128, ..Protection::default() };
            assert_eq!(said(), lost, "{url}");
            continue;
        }
        wait_until("the spare holds everything", || said().missing_legs == 0);
        assert_eq!(said().exposed_pages, 0, "{url}");
        assert!(said().restored_pages > 0, "{url}: {:?}", said());
        let two = open(&format!("stripe({alone},{spare})"), 64).protection();
        assert_eq!(two, Some(Protection::default()), "{url}");
    }
}

/// Checks that a pool waits for the only member that has the newest version of a page.
///
/// The pool has two members or more. `sides[0]` fell silent before `sides[1]` was given what it had
/// missed. Page 0 is of version 2; only the first side, and whatever comes after the second, has
/// it. Operations that the pool receives meanwhile are answered when the first side speaks again,
/// and not refused.
pub(crate) fn waits_for_the_only_one(backend: &dyn Backend, sides: &[Arc<SilentMember>]) {
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
    // The members that have this write are enough, so the first is late.
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
        assert!(lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline: LONG, op }).is_ok());
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

/// Says that it is over when it is dropped, also by a test that fails: other threads wait for that.
pub(crate) struct Over<'a>(pub(crate) &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Longest stall of a lane, in ms: several times as long as a write waits for all members in these
/// tests, but short enough that no member is given up.
const STALL_MS: u64 = 120;

/// Runs a random history while single lanes of all members stall, in turns and at the same time. At
/// the end nothing stalls any more, and every page must be what was written last.
pub(crate) fn lanes_stall_in_turns(backend: &dyn Backend, sides: &[Arc<SilentMember>], seed: u64, operations: u64) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d) | 1);
            while !is_over.load(Ordering::SeqCst) {
                for side in sides {
                    side.stall((random.below(3) > 0).then(|| random.below(1 << 20)));
                }
                std::thread::sleep(Duration::from_millis(1 + random.below(STALL_MS)));
            }
            sides.iter().for_each(|side| side.stall(None));
        });
        let over = Over(&is_over);
        let (mut lanes, model) = random_history(backend, seed, operations);
        drop(over);
        wait_until("all legs hold everything", || {
            lanes.iter_mut().for_each(|lane| {
                lane.poll(&mut Vec::new());
            });
            backend.health() == Health::Good
        });
        model.check(&mut *lanes[0], &format!("FARFIELD_SEED={seed}"));
        // Check each member: any of them may be the one that is slow now.
        for side in sides {
            side.set_silent(true);
            model.check(&mut *lanes[1], &format!("FARFIELD_SEED={seed}, without one leg"));
            side.set_silent(false);
            wait_until("it is used again", || {
                lanes.iter_mut().for_each(|lane| {
                    lane.poll(&mut Vec::new());
                });
                backend.health() == Health::Good
            });
        }
    });
}

/// Checks that operations end with a time-out at their deadline while all members are silent,
/// however many there are. The pool must go on when the members speak again.
pub(crate) fn ends_in_time_without_an_answer(backend: &dyn Backend, sides: &[Arc<SilentMember>]) {
    let brief = Duration::from_millis(300);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 200, 1).unwrap();
    sides.iter().for_each(|side| side.set_silent(true));
    let mut done = Vec::with_capacity(256);
    let started = Instant::now();
    // More than there are buffers for.
    for tag in 0..100 {
        let op = match tag % 3 {
            0 => Op::Read { page: PageId(tag), buffer: Buffer::new(1) },
            1 => Op::Write { page: PageId(tag), buffer: filled(20, tag, 2) },
            _ => Op::Write { page: PageId(tag), buffer: filled(1, tag, 2) },
        };
        assert!(lane.submit(LaneRequest { tag, priority: Priority::Demand, deadline: brief, op }).is_ok());
    }
    while done.len() < 100 {
        assert!(started.elapsed() < TEST_TIMEOUT, "{} of 100 have ended", done.len());
        lane.wait(Duration::from_millis(10));
        lane.poll(&mut done);
    }
    let is_right = |done: &Completion| matches!(done.result, Err(PoolError::TimedOut { .. })) && done.tag < 100;
    assert!(done.iter().all(is_right), "{done:?}");
    sides.iter().for_each(|side| side.set_silent(false));
    wait_until("all legs hold everything", || {
        lane.poll(&mut Vec::new());
        backend.health() == Health::Good
    });
    for page in (0..200).step_by(7) {
        // It is one of the two versions, and the same from every member.
        let bytes = read(&mut *lane, page, 1);
        let is_either = [1, 2].iter().any(|version| bytes.bytes() == filled(1, page, *version).bytes());
        assert!(is_either, "page {page}");
        for side in sides {
            side.set_silent(true);
            assert!(read(&mut *lane, page, 1).bytes() == bytes.bytes(), "page {page}");
            side.set_silent(false);
        }
    }
    write(&mut *lane, 0, 200, 3).unwrap();
    assert_version(&mut *lane, 0, 200, 3);
}

pub(crate) fn one(lane: &mut dyn Lane, op: Op) -> Completion {
    one_within(lane, op, TEST_TIMEOUT)
}

pub(crate) fn one_within(lane: &mut dyn Lane, op: Op, deadline: Duration) -> Completion {
    let mut request = LaneRequest { tag: 0, priority: Priority::Demand, deadline, op };
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

/// Longest time that tests wait for background work.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for background work until `is_so` holds.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let (started, mut looks) = (Instant::now(), 0);
    while !is_so() {
        looks += 1;
        assert!(looks < 100 || started.elapsed() < TEST_TIMEOUT, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks two lanes of a pool of which a member never answers.
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

/// Checks a pool of which one member answers late, and another dies once the first has what it
/// lacked.
pub(crate) fn brings_up_to_date(url: &str) {
    let backend = open(url, 64);
    let mut lane = backend.open_lane().unwrap();
    for version in 1..5 {
        write(&mut *lane, 10, 10, version).unwrap();
    }
    assert_eq!(backend.health(), Health::Degraded, "it has not answered");
    wait_until("it lacks nothing", || {
        // The thread that polls sees the answers.
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

/// Model of the pool: the version of each page that was written last. Operations run on several
/// lanes at a time, and no two of them meet on a page.
pub(crate) struct PoolModel {
    pub(crate) versions: Vec<u64>,
    busy: Vec<bool>,
    /// Operations by tag: first page, pages, and the version that is written (`None`: a read,
    /// `Some(0)`: a discard).
    under_way: Vec<Option<(u64, u64, Option<u64>)>>,
}

impl PoolModel {
    fn new() -> PoolModel {
        PoolModel { versions: vec![0; PAGES as usize], busy: vec![false; PAGES as usize], under_way: vec![None; 12] }
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
        // The lane may be full now.
        let request = LaneRequest { tag: tag as u64, priority: Priority::Demand, deadline: LONG, op };
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

    /// Polls until nothing is in flight in the lane.
    fn finish(&mut self, lane: &mut dyn Lane) {
        let mut done = Vec::with_capacity(16);
        while lane.in_flight() > 0 {
            lane.poll(&mut done);
            done.drain(..).for_each(|completion| self.end(completion));
        }
    }

    /// Checks that every page holds what it should. Nothing may be in flight.
    pub(crate) fn check(&self, lane: &mut dyn Lane, context: &str) {
        for page in 0..PAGES {
            let buffer = read(lane, page, 1);
            let version = self.versions[page as usize];
            let right = if version == 0 { vec![0; PAGE_BYTES] } else { filled(1, page, version).bytes().to_vec() };
            assert!(buffer.bytes() == right, "page {page} is not version {version} at the end: {context}");
        }
    }
}

/// Runs random operations on three lanes, which are closed and opened anew now and then. Returns
/// the lanes, with nothing in flight any more, and what every page should hold.
pub(crate) fn random_history(backend: &dyn Backend, seed: u64, operations: u64) -> (Vec<Box<dyn Lane>>, PoolModel) {
    let mut lanes: Vec<_> = (0..3).map(|_| backend.open_lane().unwrap()).collect();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut model, mut done) = (PoolModel::new(), Vec::with_capacity(16));
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

/// Runs a random history, after which every page must be what was written last. `die=last` is a
/// death after all operations: by then a spare holds everything.
pub(crate) fn survive(url: &str, repairs: bool, seed: u64, operations: u64) {
    let dies_last = url.contains("die=last");
    let url = &url.replace("die=last", &format!("die={}", 4 * operations + 2000));
    let context = format!("FARFIELD_SEED={seed} {url} heals: {repairs}");
    println!("{context}");
    let builder = PoolBuilder::new().url(url).pages(PAGES);
    let backend = if repairs { builder.repair_thread() } else { builder }.open().unwrap();
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
        // Now the member from which it was copied goes.
        let mut version = operations;
        while backend.health() == Health::Good {
            version += 1;
            // Something at every member.
            write(&mut *lanes[1], 7, 20, version).unwrap();
            model.versions[7..27].fill(version);
        }
    }
    model.check(&mut *lanes[0], &context);
}
