//! Guards against pages that come back otherwise than they went, and memory that does not shrink.

use super::*;
use crate::conformance::Random;
use crate::trial::Over;
use crate::{Buffer, Completion, LaneRequest, Op, PoolBuilder, Priority, conformance};
use core::time::Duration;

fn one(lane: &mut dyn Lane, op: Op) -> Completion {
    let mut done = Vec::with_capacity(1);
    lane.submit(LaneRequest { tag: 5, priority: Priority::Demand, deadline: Duration::from_secs(30), op }).unwrap();
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(100));
    }
    done.pop().unwrap()
}

fn write(lane: &mut dyn Lane, page: u64, bytes: &[u8]) -> Result<(), PoolError> {
    let mut buffer = Buffer::new(bytes.len() / PAGE_BYTES);
    buffer.bytes_mut().copy_from_slice(bytes);
    buffer.seal();
    one(lane, Op::Write { page: PageId(page), buffer }).result
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Result<Buffer, PoolError> {
    let done = one(lane, Op::Read { page: PageId(page), buffer: Buffer::new(pages) });
    done.result.map(|()| done.buffer.unwrap())
}

/// A page of a random kind.
fn any_page(random: &mut Random) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    match random.below(6) {
        0 => {}
        1 => page.fill(random.below(256) as u8),
        2 => {
            let word = random.below(u64::MAX).to_le_bytes();
            page.as_chunks_mut::<8>().0.iter_mut().for_each(|chunk| *chunk = word);
        }
        3 => page.fill_with(|| random.below(256) as u8),
        // Noise in front, and nothing behind: any degree of compression.
        4 => {
            let noise = random.below(PAGE_BYTES as u64) as usize;
            page[..noise].fill_with(|| random.below(256) as u8);
        }
        _ => {
            let alphabet = 2 + random.below(30);
            page.fill_with(|| b'a' + random.below(alphabet) as u8);
        }
    }
    page
}

fn zstd_pages(region: &Region) -> usize {
    let mut bytes = [0; PAGE_BYTES];
    let is_zstd =
        |page: &u64| region.copy(*page, &mut bytes).is_some_and(|header| header.form() == Some(PageEncoding::Zstd));
    (0..region.pages).filter(is_zstd).count()
}

/// What zstd makes smaller than lz4 does.
fn text(page: u64) -> Vec<u8> {
    let mut random = Random(page << 20 | 0x7e47);
    let line =
        |line| format!("{line} GET /item/{} 200 {} ms\n", random.below(100_000), random.below(1000)).into_bytes();
    (0..).flat_map(line).take(PAGE_BYTES).collect()
}

#[test]
fn lz_conforms() {
    conformance::run(&PoolBuilder::new().url("lz:?size=64M"));
    conformance::run(&PoolBuilder::new().url("stripe(lz:?size=32M, lz:?size=32M)"));
}

#[test]
fn pages_of_all_kinds_agree_with_a_model() {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    println!("FARFIELD_SEED={seed}");
    let rounds = if std::env::var_os("FARFIELD_DEEP").is_some() { 400_000 } else { 8000 };
    let mut random = Random(seed | 1);
    let backend = LzBackend::new(0, Config { size_bytes: 4 << 20 }, 1 << 14).unwrap();
    let mut lanes = [backend.open_lane().unwrap(), backend.open_lane().unwrap()];
    let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut full = 0;
    for _ in 0..rounds {
        let lane = &mut *lanes[random.below(2) as usize];
        // More pages than there is room for.
        let page = random.below(6000);
        match random.below(10) {
            0..=5 => {
                let bytes = any_page(&mut random);
                match write(lane, page, &bytes) {
                    Ok(()) => drop(model.insert(page, bytes)),
                    Err(error) => {
                        assert_eq!(error, PoolError::PoolFull { server: 0 });
                        full += 1;
                        let half = random.below(3000);
                        assert_eq!(one(lane, Op::Discard { page: PageId(half), count: 3000 }).result, Ok(()));
                        model.retain(|page, _| !(half..half + 3000).contains(page));
                    }
                }
            }
            6..=8 => {
                let seen = read(lane, page, 3).unwrap();
                for at in 0..3 {
                    let expected = model.get(&(page + at)).map_or(&[0; PAGE_BYTES][..], |bytes| bytes);
                    assert!(seen.page(at as usize) == expected, "page {}", page + at);
                }
            }
            _ => {
                assert_eq!(one(lane, Op::Discard { page: PageId(page), count: 1 }).result, Ok(()));
                model.remove(&page);
            }
        }
    }
    assert!(full > 0, "it is never full");
    assert!(zstd_pages(&backend.region) > 0, "nothing was packed again");
    assert!(backend.region.slabs.held_bytes() <= 4 << 20);
    one(&mut *lanes[0], Op::Discard { page: PageId(0), count: 1 << 14 }).result.unwrap();
    assert_eq!((backend.region.slabs.held_bytes(), backend.region.stored.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn memory_use_follows_the_packed_size_of_the_pages() {
    let held = |page: &mut dyn FnMut(u64) -> Vec<u8>| {
        let backend = LzBackend::new(0, Config { size_bytes: 64 << 20 }, 4096).unwrap();
        let mut lane = backend.open_lane().unwrap();
        (0..4096).for_each(|at| write(&mut *lane, at, &page(at)).unwrap());
        (0..4096).for_each(|at| assert!(read(&mut *lane, at, 1).unwrap().page(0) == page(at), "page {at}"));
        backend.region.slabs.held_bytes()
    };
    assert_eq!(held(&mut |_| vec![0; PAGE_BYTES]), 0);
    assert_eq!(held(&mut |at| vec![1 + (at % 255) as u8; PAGE_BYTES]), 4096 * 64);
    let text = |at: u64| -> Vec<u8> {
        (0..).flat_map(|line: u64| format!("line {line} of page {at}\n").into_bytes()).take(PAGE_BYTES).collect()
    };
    let of_text = held(&mut { text });
    assert!(of_text < 6 << 20, "{of_text} bytes for 16 MiB of text");
    let noise = |at: u64| {
        let mut random = Random(at << 20 | 0xabcd);
        (0..PAGE_BYTES).map(|_| random.below(256) as u8).collect::<Vec<u8>>()
    };
    let of_noise = held(&mut { noise });
    assert!(of_noise < 19 << 20, "{of_noise} bytes for 16 MiB of noise");
}

#[test]
fn pages_that_nobody_uses_are_packed_again_when_memory_is_scarce() {
    let backend = LzBackend::new(0, Config { size_bytes: 4 << 20 }, 4096).unwrap();
    let region = &backend.region;
    let mut lane = backend.open_lane().unwrap();
    let mut at = 0;
    while !region.is_scarce() {
        write(&mut *lane, at, &text(at)).unwrap();
        at += 1;
    }
    assert!(zstd_pages(region) <= 1, "there was room");
    let fits = at * 2;
    // Again and again used.
    let hot = 7;
    while let Ok(()) = write(&mut *lane, at, &text(at)) {
        at += 1;
        assert!(read(&mut *lane, hot, 1).unwrap().page(0) == text(hot));
    }
    assert!(at > fits * 6 / 5, "{at} pages where lz4 alone has room for {fits}");
    assert!(zstd_pages(region) as u64 > at / 2, "{} of {at}", zstd_pages(region));
    let header = region.copy(hot, &mut [0; PAGE_BYTES]).unwrap();
    assert_eq!(header.form(), Some(PageEncoding::Lz4), "it is used");
    for page in 0..at {
        assert!(read(&mut *lane, page, 1).unwrap().page(0) == text(page), "page {page}");
    }
    // What is written is new.
    one(&mut *lane, Op::Discard { page: PageId(hot + 1), count: 1000 }).result.unwrap();
    write(&mut *lane, 1, &text(2)).unwrap();
    assert_eq!(region.copy(1, &mut [0; PAGE_BYTES]).unwrap().form(), Some(PageEncoding::Lz4));
}

#[test]
fn a_page_written_while_it_is_packed_keeps_the_write() {
    let backend = LzBackend::new(0, Config { size_bytes: 4 << 20 }, 64).unwrap();
    let (backend, is_over) = (&backend, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let packers: [_; 2] = core::array::from_fn(|_| {
            scope.spawn(move || {
                let mut packer = pack::Packer::new();
                while !is_over.load(Ordering::Relaxed) {
                    packer.step(&backend.region);
                }
            })
        });
        // Each thread has pages of its own, and always knows what they hold.
        let writers: [_; 2] = core::array::from_fn(|me| {
            scope.spawn(move || {
                let mut lane = backend.open_lane().unwrap();
                let mut packed = 0;
                for version in 1..4000 {
                    let page = me as u64 * 2 + version % 2;
                    write(&mut *lane, page, &text(version)).unwrap();
                    if version % 8 == 0 {
                        std::thread::yield_now();
                    }
                    let header = backend.region.copy(page, &mut [0; PAGE_BYTES]).unwrap();
                    packed += u32::from(header.form() == Some(PageEncoding::Zstd));
                    assert!(read(&mut *lane, page, 1).unwrap().page(0) == text(version), "version {version}");
                    assert!(
                        version == 1 || read(&mut *lane, page ^ 1, 1).unwrap().page(0) == text(version - 1),
                        "version {version}"
                    );
                }
                packed
            })
        });
        let over = Over(is_over);
        let packed: u32 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        drop(over);
        packers.into_iter().for_each(|packer| packer.join().unwrap());
        assert!(packed > 0, "nothing was packed");
    });
    let mut lane = backend.open_lane().unwrap();
    one(&mut *lane, Op::Discard { page: PageId(0), count: 64 }).result.unwrap();
    assert_eq!(backend.region.slabs.held_bytes(), 0, "every piece came back");
}

#[test]
fn a_flipped_bit_is_found() {
    let backend = LzBackend::new(2, Config { size_bytes: 16 << 20 }, 600).unwrap();
    let mut lane = backend.open_lane().unwrap();
    let (mut random, mut found) = (Random(7), 0);
    for page in 0..600 {
        let mut bytes = any_page(&mut random);
        bytes[..9].copy_from_slice(b"not empty");
        write(&mut *lane, page, &bytes).unwrap();
        let unit = backend.region.places.get(page).unwrap();
        // In the header or behind it.
        let (word, bit) = (random.below(3) as usize, 1 << random.below(64));
        let flip = || backend.region.word(unit, word).fetch_xor(bit, Ordering::Relaxed);
        flip();
        match read(&mut *lane, page, 1) {
            Err(error) => {
                assert_eq!(error, PoolError::Corrupt { page: PageId(page), server: 2 });
                found += 1;
            }
            // A length that is too long by more than a page changes nothing.
            Ok(seen) => assert!(seen.page(0) == bytes, "page {page}"),
        }
        flip();
        assert!(read(&mut *lane, page, 1).unwrap().page(0) == bytes);
    }
    assert!(found > 500, "{found} of 600");
}

#[test]
fn threads_that_write_and_read_the_same_pages_see_whole_versions() {
    let backend = PoolBuilder::new().url("lz:?size=16M").pages(64).open().unwrap();
    std::thread::scope(|scope| {
        for me in 0..3u64 {
            let backend = &backend;
            scope.spawn(move || {
                let mut lane = backend.open_lane().unwrap();
                let mut random = Random(me << 32 | 5);
                for _ in 0..2000 {
                    let page = random.below(8);
                    let mut bytes = any_page(&mut random);
                    bytes[..8].copy_from_slice(&(page + 1).to_le_bytes());
                    write(&mut *lane, page, &bytes).unwrap();
                    let other = random.below(8);
                    let seen = read(&mut *lane, other, 1).unwrap();
                    let number = u64::from_le_bytes(seen.page(0)[..8].try_into().unwrap());
                    assert!(number == other + 1 || seen.page(0).iter().all(|byte| *byte == 0));
                }
            });
        }
    });
}

#[test]
fn urls_say_how_much() {
    assert_eq!(Config::parse("?size=8G"), Ok(Config { size_bytes: 8 << 30 }));
    for (text, hint) in [("", "lz:?size=8G"), ("8G", "lz:?size"), ("?size=8", "unit"), ("?size=1M", "16M")] {
        assert!(Config::parse(text).is_err_and(|why| why.contains(hint)), "{text}");
    }
}
