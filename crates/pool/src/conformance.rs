//! Conformance suite that every member must pass to be a backend.
//!
//! A failed claim panics with the observed values, as tests do. Random runs are seeded and print
//! their seed.

use crate::{
    Backend, Buffer, CloneTicket, Completion, Health, Lane, LaneRequest, Op, PagePart, PoolBuilder, PoolError, Priority,
};
use core::time::Duration;
use farfield_core::{PageId, checksum, geometry::PAGE_BYTES};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Number of pages of the regions that the suite works with.
const PAGES: u64 = 4096;
/// Longest time that an operation of the suite may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// Runs every claim except the one about death. The builder names the member; the suite sets its
/// number of pages.
pub fn run(builder: &PoolBuilder) {
    let builder = builder.clone().pages(PAGES).client_name("conformance");
    for (name, claim) in CLAIMS {
        eprintln!("conformance: {name}");
        claim(&builder);
    }
}

type Claim = fn(&PoolBuilder);

const CLAIMS: [(&str, Claim); 14] = [
    ("what was never written is zero", what_was_never_written_is_zero),
    ("what was written is read", what_was_written_is_read),
    ("a part of a page is read", a_part_of_a_page_is_read),
    ("the last write wins", the_last_write_wins),
    ("discarded pages are zero", discarded_pages_are_zero),
    ("a run may be half there", a_run_may_be_half_there),
    ("lanes of one backend see the same pages", lanes_see_the_same_pages),
    ("a lane may move between threads", a_lane_may_move_between_threads),
    ("many in flight all come back", many_in_flight_all_come_back),
    ("poll fills no more than there is room for", poll_fills_only_free_capacity),
    ("demand and background both complete", demand_and_background_both_complete),
    ("pages outside are refused with the buffer back", pages_outside_are_refused),
    ("a clone is isolated both ways", a_clone_is_isolated),
    ("random operations agree with a model", random_operations_agree_with_a_model),
];

/// Fills the buffer with test bytes that differ for each page and version.
fn fill(buffer: &mut Buffer, first: PageId, version: u64) {
    for index in 0..buffer.pages() {
        let seed = (first.0 + index as u64) << 20 ^ version;
        let from = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) as usize % PAGE_BYTES;
        let page = buffer.page_mut(index);
        page.copy_from_slice(&NOISE[from..from + PAGE_BYTES]);
        page[..8].copy_from_slice(&seed.to_le_bytes());
    }
    buffer.seal();
}

/// Bytes that do not compress (xorshift64). Making others for each page takes a fifth of the suite's time.
static NOISE: [u8; 2 * PAGE_BYTES] = {
    let (mut bytes, mut word, mut at) = ([0; 2 * PAGE_BYTES], 0x5eed_u64, 0);
    while at < bytes.len() {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        bytes[at] = (word >> 32) as u8;
        at += 1;
    }
    bytes
};

fn buffer(pages: usize) -> Buffer {
    Buffer::new(pages)
}

fn filled(pages: usize, first: u64, version: u64) -> Buffer {
    let mut buffer = buffer(pages);
    fill(&mut buffer, PageId(first), version);
    buffer
}

fn open(builder: &PoolBuilder) -> Arc<dyn Backend> {
    builder.open().unwrap_or_else(|error| panic!("{builder:?} does not open: {error}"))
}

fn lane(backend: &Arc<dyn Backend>) -> Box<dyn Lane> {
    backend.open_lane().expect("a lane opens")
}

/// Stall detector. It distinguishes a lane that makes no progress from a machine that is merely
/// busy: time must have passed, and there must have been enough looks.
struct StallDetector {
    since: Instant,
    looks: u32,
}

impl StallDetector {
    fn new() -> StallDetector {
        StallDetector { since: Instant::now(), looks: 0 }
    }

    /// Records one more look; panics with `what` after too long without progress.
    fn look(&mut self, progress: bool, what: impl FnOnce() -> String) {
        if progress {
            *self = StallDetector::new();
            return;
        }
        self.looks += 1;
        assert!(self.looks < 100 || self.since.elapsed() < DEADLINE * 2, "{}", what());
    }
}

/// Submits, waiting for room where there is none, and panics if room never comes.
fn submit(lane: &mut dyn Lane, done: &mut Vec<Completion>, mut request: LaneRequest) {
    let mut stall = StallDetector::new();
    while let Err(back) = lane.submit(request) {
        request = back;
        let moved = lane.poll(done);
        stall.look(moved > 0, || "a lane stays full".to_owned());
    }
}

/// Submits without polling for completions. Any lane has room for ten, but not at every moment (for
/// example while it is moved to another side).
fn submit_unseen(lane: &mut dyn Lane, mut request: LaneRequest) {
    let mut stall = StallDetector::new();
    while let Err(back) = lane.submit(request) {
        request = back;
        lane.wait(Duration::from_millis(1));
        stall.look(false, || "a lane has no room for ten".to_owned());
    }
}

fn request(tag: u64, op: Op) -> LaneRequest {
    LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op }
}

/// Waits until nothing is in flight.
fn finish(lane: &mut dyn Lane, done: &mut Vec<Completion>) {
    let mut stall = StallDetector::new();
    while lane.in_flight() > 0 {
        if done.len() == done.capacity() {
            done.reserve(64);
        }
        let moved = lane.poll(done);
        if moved == 0 {
            lane.wait(Duration::from_millis(100));
        }
        stall.look(moved > 0, || format!("{} operations never complete", lane.in_flight()));
    }
}

/// Runs one operation from start to end.
fn one(lane: &mut dyn Lane, op: Op) -> (Result<(), PoolError>, Option<Buffer>) {
    let mut done = Vec::with_capacity(4);
    submit(lane, &mut done, request(77, op));
    finish(lane, &mut done);
    assert_eq!(done.len(), 1, "one operation, one completion");
    let completion = done.remove(0);
    assert_eq!(completion.tag, 77);
    (completion.result, completion.buffer)
}

fn write(lane: &mut dyn Lane, page: u64, buffer: Buffer) -> Buffer {
    let (result, buffer) = one(lane, Op::Write { page: PageId(page), buffer });
    assert_eq!(result, Ok(()), "writing page {page}");
    buffer.expect("the buffer of a write comes back")
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Buffer {
    let mut buffer = buffer(pages);
    buffer.bytes_mut().fill(0xee);
    let (result, buffer) = one(lane, Op::Read { page: PageId(page), buffer });
    assert_eq!(result, Ok(()), "reading page {page}");
    let buffer = buffer.expect("the buffer of a read comes back");
    for index in 0..pages {
        let sum = checksum(buffer.page(index));
        assert_eq!(buffer.sums()[index], sum, "checksum of page {} after a read", page + index as u64);
    }
    buffer
}

fn discard(lane: &mut dyn Lane, page: u64, count: u64) {
    let (result, buffer) = one(lane, Op::Discard { page: PageId(page), count });
    assert_eq!(result, Ok(()), "discarding page {page}");
    assert!(buffer.is_none());
}

fn assert_pages(buffer: &Buffer, first: u64, version: u64) {
    let expected = filled(buffer.pages(), first, version);
    for index in 0..buffer.pages() {
        assert!(buffer.page(index) == expected.page(index), "page {} is not version {version}", first + index as u64);
    }
}

fn assert_zero(buffer: &Buffer) {
    assert!(buffer.bytes().iter().all(|byte| *byte == 0), "pages that are not there are not zero");
}

fn what_was_never_written_is_zero(builder: &PoolBuilder) {
    let backend = open(builder);
    assert_eq!(backend.pages(), PAGES);
    assert_eq!(backend.health(), Health::Good);
    let mut lane = lane(&backend);
    assert_zero(&read(&mut *lane, 0, 1));
    assert_zero(&read(&mut *lane, PAGES - 33, 33));
}

fn what_was_written_is_read(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    for (page, pages) in [(0, 1), (PAGES - 1, 1), (100, 64), (1001, 7), (2040, 33)] {
        assert_pages(&write(&mut *lane, page, filled(pages, page, 1)), page, 1);
        assert_pages(&read(&mut *lane, page, pages), page, 1);
    }
    assert_pages(&read(&mut *lane, 120, 5), 120, 1);
}

fn a_part_of_a_page_is_read(builder: &PoolBuilder) {
    let mut lane = lane(&open(builder));
    write(&mut *lane, 30, filled(2, 30, 5));
    let whole = read(&mut *lane, 30, 2);
    for (page, offset, len) in [(30, 0, PAGE_BYTES), (31, 0, 1), (30, PAGE_BYTES - 1, 1), (31, 1000, 97), (29, 16, 64)]
    {
        let part = PagePart::new(offset, len).unwrap();
        let mut target = buffer(1);
        target.bytes_mut().fill(0xEE);
        let (result, back) = one(&mut *lane, Op::ReadPart { page: PageId(page), part, buffer: target });
        assert_eq!(result, Ok(()));
        let back = back.expect("buffers always come back");
        let expected =
            if page == 29 { &[0; PAGE_BYTES][part.range()] } else { &whole.page(page as usize - 30)[part.range()] };
        assert_eq!(&back.page(0)[part.range()], expected, "{len} bytes at {offset} of page {page}");
        let sum = if page == 29 { checksum(&[0; PAGE_BYTES]) } else { whole.sums()[page as usize - 30] };
        assert_eq!(back.sums(), [sum], "a part says of which version of page {page} it is");
    }
    // Among other operations, many at a time.
    let mut done = Vec::with_capacity(64);
    for tag in 0..60 {
        let op = match tag % 3 {
            0 => Op::Read { page: PageId(30), buffer: buffer(2) },
            _ => {
                let part = PagePart::new(tag as usize * 16, 16).unwrap();
                Op::ReadPart { page: PageId(30 + tag % 2), part, buffer: buffer(1) }
            }
        };
        submit(&mut *lane, &mut done, request(tag, op));
    }
    finish(&mut *lane, &mut done);
    assert_eq!(done.len(), 60);
    for completion in done {
        assert_eq!(completion.result, Ok(()));
        let (tag, back) = (completion.tag, completion.buffer.unwrap());
        if tag % 3 != 0 {
            let range = tag as usize * 16..tag as usize * 16 + 16;
            assert_eq!(&back.page(0)[range.clone()], &whole.page((tag % 2) as usize)[range]);
            assert_eq!(back.sums(), [whole.sums()[(tag % 2) as usize]]);
        }
    }
}

fn the_last_write_wins(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    write(&mut *lane, 10, filled(20, 10, 1));
    write(&mut *lane, 15, filled(5, 15, 2));
    assert_pages(&read(&mut *lane, 10, 5), 10, 1);
    assert_pages(&read(&mut *lane, 15, 5), 15, 2);
    assert_pages(&read(&mut *lane, 20, 10), 20, 1);
}

fn discarded_pages_are_zero(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    write(&mut *lane, 200, filled(40, 200, 1));
    discard(&mut *lane, 210, 20);
    assert_pages(&read(&mut *lane, 200, 10), 200, 1);
    assert_zero(&read(&mut *lane, 210, 20));
    assert_pages(&read(&mut *lane, 230, 10), 230, 1);
    discard(&mut *lane, 0, PAGES); // Also what is not there.
    assert_zero(&read(&mut *lane, 190, 60));
    write(&mut *lane, 215, filled(1, 215, 2));
    assert_pages(&read(&mut *lane, 215, 1), 215, 2);
}

fn a_run_may_be_half_there(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    for page in (300..430).filter(|page| page % 3 == 0) {
        write(&mut *lane, page, filled(1, page, 1));
    }
    let run = read(&mut *lane, 300, 130);
    for page in 300..430 {
        let bytes = run.page((page - 300) as usize);
        match page % 3 {
            0 => assert!(bytes == filled(1, page, 1).bytes(), "page {page}"),
            _ => assert!(bytes.iter().all(|byte| *byte == 0), "page {page}"),
        }
    }
}

fn lanes_see_the_same_pages(builder: &PoolBuilder) {
    let backend = open(builder);
    let (mut first, mut second) = (lane(&backend), lane(&backend));
    write(&mut *first, 5, filled(3, 5, 1));
    assert_pages(&read(&mut *second, 5, 3), 5, 1);
    write(&mut *second, 6, filled(1, 6, 2));
    assert_pages(&read(&mut *first, 6, 1), 6, 2);
    drop(second);
    assert_pages(&read(&mut *first, 6, 1), 6, 2);
}

fn a_lane_may_move_between_threads(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    let mut done = Vec::with_capacity(8);
    submit(&mut *lane, &mut done, request(1, Op::Write { page: PageId(9), buffer: filled(4, 9, 1) }));
    let (mut lane, mut done) = std::thread::spawn(move || {
        finish(&mut *lane, &mut done);
        (lane, done)
    })
    .join()
    .expect("the other thread");
    assert_eq!(done.remove(0).result, Ok(()));
    assert_pages(&read(&mut *lane, 9, 4), 9, 1);
}

fn many_in_flight_all_come_back(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    let mut done = Vec::with_capacity(2048);
    // Far more than any lane takes at once: some are given back and submitted again.
    for tag in 0..1000 {
        let page = tag * 4;
        submit(&mut *lane, &mut done, request(tag, Op::Write { page: PageId(page), buffer: filled(2, page, 1) }));
    }
    finish(&mut *lane, &mut done);
    let mut buffers = check_tags(&mut done, 1000);
    for tag in 0..1000 {
        let buffer = buffers.pop().expect("every buffer came back");
        submit(&mut *lane, &mut done, request(tag, Op::Read { page: PageId(tag * 4), buffer }));
    }
    finish(&mut *lane, &mut done);
    done.sort_by_key(|completion| completion.tag);
    for (tag, completion) in done.iter().enumerate() {
        assert_pages(completion.buffer.as_ref().expect("a buffer"), tag as u64 * 4, 1);
    }
    check_tags(&mut done, 1000);
    assert_eq!(lane.in_flight(), 0);
}

/// Checks that every tag below `count` came exactly once, without an error; returns the buffers.
fn check_tags(done: &mut Vec<Completion>, count: u64) -> Vec<Buffer> {
    let mut tags: Vec<u64> = done.iter().map(|completion| completion.tag).collect();
    tags.sort_unstable();
    assert!(tags.iter().copied().eq(0..count), "a tag was lost or came twice");
    done.drain(..)
        .map(|completion| {
            assert_eq!(completion.result, Ok(()), "operation {}", completion.tag);
            completion.buffer.expect("a buffer")
        })
        .collect()
}

fn poll_fills_only_free_capacity(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    let mut done = Vec::with_capacity(3);
    for tag in 0..10 {
        submit_unseen(&mut *lane, request(tag, Op::Write { page: PageId(tag), buffer: filled(1, tag, 1) }));
    }
    let (mut stall, mut seen) = (StallDetector::new(), 0);
    while seen < 10 {
        let capacity = done.capacity();
        lane.poll(&mut done);
        assert_eq!(done.capacity(), capacity, "poll must not allocate");
        assert_eq!(lane.in_flight(), 10 - seen - done.len());
        seen += done.len();
        stall.look(!done.is_empty(), || format!("only {seen} of 10 completed"));
        done.clear();
    }
}

fn demand_and_background_both_complete(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    let mut done = Vec::with_capacity(512);
    for tag in 0..300 {
        let priority = if tag % 10 == 9 { Priority::Demand } else { Priority::Background };
        let op = Op::Write { page: PageId(tag * 8), buffer: filled(8, tag * 8, 1) };
        submit(&mut *lane, &mut done, LaneRequest { tag, priority, deadline: DEADLINE, op });
    }
    finish(&mut *lane, &mut done);
    check_tags(&mut done, 300);
    assert_pages(&read(&mut *lane, 1000, 64), 1000, 1);
}

fn pages_outside_are_refused(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut lane = lane(&backend);
    for (page, pages) in [(PAGES, 1), (PAGES - 3, 4), (u64::MAX, 1), (u64::MAX - 1, 3)] {
        let page = PageId(page);
        for op in [Op::Read { page, buffer: buffer(pages) }, Op::Write { page, buffer: filled(pages, 0, 0) }] {
            let (result, buffer) = one(&mut *lane, op);
            assert!(matches!(result, Err(PoolError::Refused { .. })), "{result:?}");
            assert!(buffer.is_some(), "the buffer comes back with an error");
        }
        let (result, _) = one(&mut *lane, Op::Discard { page, count: pages as u64 });
        assert!(matches!(result, Err(PoolError::Refused { .. })), "{result:?}");
    }
    // The lane is as good as before.
    write(&mut *lane, 1, filled(1, 1, 1));
    assert_pages(&read(&mut *lane, 1, 1), 1, 1);
}

fn a_clone_is_isolated(builder: &PoolBuilder) {
    let backend = open(builder);
    let mut parent = lane(&backend);
    write(&mut *parent, 0, filled(64, 0, 1));
    let ticket: CloneTicket = backend.clone_region().expect("a region can be cloned");
    let child_backend = builder.claim(&ticket).expect("a ticket is good once");
    assert!(child_backend.pages() >= PAGES);
    let mut child = lane(&child_backend);
    assert_pages(&read(&mut *child, 0, 64), 0, 1);
    write(&mut *parent, 0, filled(16, 0, 2));
    discard(&mut *parent, 16, 8);
    write(&mut *child, 32, filled(8, 32, 3));
    discard(&mut *child, 40, 8);
    write(&mut *child, 100, filled(1, 100, 3));
    // The parent sees what it did and nothing of the child.
    assert_pages(&read(&mut *parent, 0, 16), 0, 2);
    assert_zero(&read(&mut *parent, 16, 8));
    assert_pages(&read(&mut *parent, 24, 40), 24, 1);
    assert_zero(&read(&mut *parent, 100, 1));
    // And the other way round.
    assert_pages(&read(&mut *child, 0, 32), 0, 1);
    assert_pages(&read(&mut *child, 32, 8), 32, 3);
    assert_zero(&read(&mut *child, 40, 8));
    assert_pages(&read(&mut *child, 48, 16), 48, 1);
    assert!(builder.claim(&ticket).is_err(), "a ticket is good once only");
    // Clones of clones, and a parent that goes away.
    let grandchild_backend = builder.claim(&child_backend.clone_region().expect("a clone of a clone")).expect("claim");
    let mut grandchild = lane(&grandchild_backend);
    drop(parent);
    drop(backend);
    write(&mut *child, 33, filled(1, 33, 4));
    discard(&mut *child, 48, 16);
    assert_pages(&read(&mut *grandchild, 0, 32), 0, 1);
    assert_pages(&read(&mut *grandchild, 32, 8), 32, 3);
    assert_pages(&read(&mut *grandchild, 48, 16), 48, 1);
    assert_pages(&read(&mut *child, 33, 1), 33, 4);
    // Many generations: a server that keeps layers must merge them in time.
    for generation in 0..300 {
        let unclaimed = child_backend.clone_region().expect("clones never run out");
        let page = generation % 64;
        write(&mut *child, page, filled(1, page, 1000 + generation));
        drop(builder.claim(&unclaimed).expect("claim"));
    }
    assert_pages(&read(&mut *child, 43, 1), 43, 1000 + 299 - (299 % 64) + 43);
    assert_pages(&read(&mut *grandchild, 32, 8), 32, 3);
}

/// Small random generator, so that a failure can be repeated from the seed that was printed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Returns a random number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

fn random_operations_agree_with_a_model(builder: &PoolBuilder) {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    eprintln!("conformance: FARFIELD_SEED={seed}");
    let mut random = Random(seed | 1);
    let backend = open(builder);
    let mut lane = lane(&backend);
    let mut model: BTreeMap<u64, u64> = BTreeMap::new();
    for version in 1..600 {
        let page = random.below(PAGES - 64);
        let pages = 1 + random.below(64);
        match random.below(10) {
            0..5 => {
                write(&mut *lane, page, filled(pages as usize, page, version));
                (page..page + pages).for_each(|page| {
                    model.insert(page, version);
                });
            }
            5..9 => {
                let run = read(&mut *lane, page, pages as usize);
                for index in 0..pages {
                    let bytes = run.page(index as usize);
                    match model.get(&(page + index)) {
                        None => assert!(bytes == [0; PAGE_BYTES], "page {} is not zero", page + index),
                        Some(version) => {
                            let expected = filled(1, page + index, *version);
                            assert!(bytes == expected.bytes(), "page {} is not version {version}", page + index);
                        }
                    }
                }
            }
            _ => {
                discard(&mut *lane, page, pages);
                (page..page + pages).for_each(|page| {
                    model.remove(&page);
                });
            }
        }
    }
}

/// Checks the claim about death. `kill` ends the member for good while operations are in flight.
/// All of them complete, with an error or (if they were faster) without. Every later operation
/// fails with [`PoolError::ServerGone`].
pub fn death(builder: &PoolBuilder, kill: impl FnOnce()) {
    let builder = builder.clone().pages(PAGES).client_name("conformance");
    let backend = open(&builder);
    let mut lane = lane(&backend);
    let mut idle = self::lane(&backend);
    let mut done = Vec::with_capacity(1024);
    write(&mut *lane, 0, filled(64, 0, 1));
    for tag in 0..100 {
        let page = PageId(tag * 8);
        let op = match tag % 3 {
            0 => Op::Write { page, buffer: filled(8, tag * 8, 2) },
            1 => Op::Read { page, buffer: buffer(8) },
            _ => Op::Discard { page, count: 8 },
        };
        submit(&mut *lane, &mut done, request(tag, op));
    }
    kill();
    finish(&mut *lane, &mut done);
    assert_eq!(done.len(), 100, "every operation completes");
    for completion in &done {
        assert_eq!(completion.buffer.is_some(), completion.tag % 3 != 2, "buffers come back from the dead");
        assert!(
            matches!(completion.result, Ok(()) | Err(PoolError::ServerGone { .. })),
            "operation {}: {:?}",
            completion.tag,
            completion.result
        );
    }
    for lane in [&mut lane, &mut idle] {
        let start = Instant::now();
        loop {
            let (result, buffer) = one(&mut **lane, Op::Read { page: PageId(0), buffer: buffer(1) });
            assert!(buffer.is_some());
            match result {
                Err(PoolError::ServerGone { .. }) => break,
                // One-sided memory may be readable a little longer than its server lives.
                Ok(()) => assert!(start.elapsed() < DEADLINE, "the dead server still answers"),
                Err(other) => panic!("not ServerGone but {other:?}"),
            }
            lane.wait(Duration::from_millis(1));
        }
    }
    assert_eq!(backend.health(), Health::Gone);
    assert!(backend.open_lane().is_err());
    assert!(backend.clone_region().is_err());
}
