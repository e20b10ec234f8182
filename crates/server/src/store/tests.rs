//! Guards against pages that change hands between regions, and against memory that is charged and never given back.

use super::*;
use farfield_core::geometry::PAGE_BYTES;
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The first layer among a region's descriptors.
const LAYERS: usize = farfield_core::wire::MapReply::TABLES as usize;

/// Of a server that has more than enough of everything.
pub(crate) fn ledger() -> Arc<Ledger> {
    ledger_of(|_| u64::MAX / 4)
}

pub(crate) fn ledger_of(limit: impl Fn(Resource) -> u64) -> Arc<Ledger> {
    Arc::new(Ledger::new(Arc::new(ResourceBudget::new(limit, false))))
}

pub(crate) fn account(limit_pages: Option<u64>, quota_pages: Option<u64>) -> Account {
    Account {
        server: Arc::new(PageCounter::new(limit_pages)),
        tenant: Arc::new(PageCounter::new(quota_pages)),
        ledger: ledger(),
    }
}

fn page_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(PAGE_BYTES / 8)
}

fn pages_of(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| page_of(*value)).collect()
}

fn read(region: &StoredRegion, page: u64) -> Option<(Vec<u8>, u64)> {
    let reader = region.reader();
    let found = reader.page(PageId(page)).unwrap()?;
    let mut bytes = vec![0; PAGE_BYTES];
    // SAFETY: a whole page, alive while the reader is; nobody writes it in these tests.
    unsafe { core::ptr::copy_nonoverlapping(found.bytes, bytes.as_mut_ptr(), PAGE_BYTES) };
    Some((bytes, found.sum))
}

#[test]
fn written_pages_are_read_back_and_discarded_pages_are_zero() {
    let account = account(None, None);
    let region = StoredRegion::new(1 << 30, account.clone()).unwrap();
    region.write(PageId(5), &pages_of(&[1, 2, 3]), |index| u64::from(index) + 70).unwrap();
    assert_eq!(read(&region, 6), Some((page_of(2), 71)));
    assert_eq!(read(&region, 8), None);
    assert_eq!(account.server.used_pages(), 3);
    region.write(PageId(6), &pages_of(&[9, 9]), |_| 1).unwrap();
    assert_eq!(account.server.used_pages(), 3, "written again is not more");
    assert_eq!(region.discard(PageId(0), 1 << 30).unwrap(), 3);
    assert_eq!(account.server.used_pages(), 0);
    assert_eq!(read(&region, 6), None);
    assert_eq!(region.discard(PageId(0), 1 << 30).unwrap(), 0);
}

#[test]
fn a_full_pool_stores_nothing() {
    let account = account(Some(10), Some(4));
    let region = StoredRegion::new(64, account.clone()).unwrap();
    region.write(PageId(0), &pages_of(&[1, 2, 3]), |_| 0).unwrap();
    assert_eq!(region.write(PageId(2), &pages_of(&[7, 7, 7]), |_| 0), Err(RegionStoreError::Full(Full::Tenant)));
    assert_eq!(read(&region, 2), Some((page_of(3), 0)));
    assert_eq!(read(&region, 3), None);
    region.write(PageId(2), &pages_of(&[7, 7]), |_| 0).unwrap();
    assert_eq!(account.tenant.used_pages(), 4);
}

#[test]
fn looking_at_what_is_not_there_costs_nothing() {
    let region = StoredRegion::new(1 << 30, account(None, None)).unwrap();
    for page in (0..1 << 30).step_by(1 << 20) {
        assert_eq!(read(&region, page), None);
        assert_eq!(region.discard(PageId(page), 100), Ok(0));
    }
    assert_eq!(region.table_bytes(), 0);
    region.write(PageId(1 << 29), &pages_of(&[1]), |_| 0).unwrap();
    assert_eq!(region.table_bytes(), 2 * 4096);
    assert_eq!(region.discard(PageId(0), 1 << 30), Ok(1));
    assert_eq!(region.table_bytes(), 0, "and what is discarded is given back");
}

#[test]
fn runs_outside_of_the_region_are_refused() {
    let region = StoredRegion::new(64, account(None, None)).unwrap();
    for (first, count) in [(64, 1), (63, 2), (0, 65), (u64::MAX, 1), (u64::MAX, u64::MAX)] {
        assert_eq!(region.discard(PageId(first), count), Err(RegionStoreError::OutOfRange));
        assert_eq!(region.reader().check_run(PageId(first), count), Err(RegionStoreError::OutOfRange));
    }
    assert_eq!(region.write(PageId(63), &pages_of(&[1, 1]), |_| 0), Err(RegionStoreError::OutOfRange));
}

#[test]
fn overwritten_pages_of_a_dead_clone_are_given_back() {
    let account = account(None, None);
    let parent = StoredRegion::new(1024, account.clone()).unwrap();
    parent.write(PageId(0), &pages_of(&[1; 100]), |_| 0).unwrap();
    let child = StoredRegion::from_snapshot(parent.snapshot().unwrap(), account.clone()).unwrap();
    parent.write(PageId(0), &pages_of(&[2; 100]), |_| 0).unwrap();
    assert_eq!(account.server.used_pages(), 200);
    assert_eq!(parent.sweep(&|| false).unwrap(), 0, "the child still needs the old pages");
    assert_eq!(read(&child, 50), Some((page_of(1), 0)));
    drop(child);
    assert_eq!(parent.sweep(&|| false).unwrap(), 100);
    assert_eq!(account.server.used_pages(), 100);
    assert_eq!(parent.sweep(&|| false).unwrap(), 0);
    assert_eq!(read(&parent, 50), Some((page_of(2), 0)));
    drop(parent);
    assert_eq!(account.server.used_pages(), 0);
}

#[test]
fn a_sweep_that_takes_many_steps_finds_every_superseded_page() {
    const PAGES: u64 = 20_000;
    let account = account(None, None);
    let region = StoredRegion::new(PAGES, account.clone()).unwrap();
    for first in (0..PAGES).step_by(100) {
        region.write(PageId(first), &pages_of(&[1; 100]), |_| 0).unwrap();
    }
    drop(region.snapshot().unwrap());
    for page in (PAGES - 3000..PAGES).step_by(2) {
        region.write(PageId(page), &pages_of(&[2]), |_| 0).unwrap();
    }
    assert_eq!(account.server.used_pages(), PAGES + 1500);
    assert_eq!(region.sweep(&|| false), Ok(1500));
    assert_eq!(account.server.used_pages(), PAGES);
    for page in [0, PAGES - 3001, PAGES - 3000, PAGES - 2999, PAGES - 2, PAGES - 1] {
        let value = if page >= PAGES - 3000 && page % 2 == 0 { 2 } else { 1 };
        assert_eq!(read(&region, page), Some((page_of(value), 0)), "{page}");
    }
}

#[test]
fn a_snapshot_of_an_unchanged_region_adds_no_layer() {
    let region = StoredRegion::new(1024, account(None, None)).unwrap();
    region.write(PageId(0), &pages_of(&[1]), |_| 0).unwrap();
    for _ in 0..300 {
        drop(region.snapshot().unwrap());
    }
    assert_eq!(region.layer_count(), 2);
}

#[test]
fn room_set_aside_follows_the_region_through_a_snapshot() {
    let account = account(Some(100), None);
    let region = StoredRegion::new(1024, account.clone()).unwrap();
    let descriptors = region.descriptors(0, 10).unwrap();
    region.reserve(60).unwrap();
    assert_eq!(region.reserve(60), Err(RegionStoreError::Full(Full::Server)));
    // What a client does with its own mapping: 10 pages into the top layer.
    memfd_write(&descriptors.fds[LAYERS], &pages_of(&[5; 10]));
    assert_eq!(region.reserved_pages(), 50);
    let snapshot = region.snapshot().unwrap();
    assert_eq!((account.server.used_pages(), region.reserved_pages()), (60, 50));
    region.release(1000).unwrap();
    assert_eq!(account.server.used_pages(), 10);
    drop((snapshot, region));
    assert_eq!(account.server.used_pages(), 0);
}

fn memfd_write(fd: &std::os::fd::OwnedFd, bytes: &[u8]) {
    use std::os::fd::AsFd;
    farfield_os::memfd::write_at(fd.as_fd(), bytes, 0).unwrap();
}

#[test]
fn a_client_that_writes_more_than_it_set_aside_is_found_out() {
    let account = account(Some(8), None);
    let region = StoredRegion::new(1024, account.clone()).unwrap();
    let descriptors = region.descriptors(0, 10).unwrap();
    region.reserve(4).unwrap();
    memfd_write(&descriptors.fds[LAYERS], &pages_of(&[5; 4]));
    assert_eq!(region.audit().unwrap(), None);
    memfd_write(&descriptors.fds[LAYERS], &pages_of(&[5; 20]));
    assert_eq!(region.audit().unwrap(), Some(Full::Server));
    assert_eq!(account.server.used_pages(), 20);
}

#[test]
fn a_frozen_layer_cannot_be_written_through_its_descriptor() {
    use std::os::fd::AsFd;
    let region = StoredRegion::new(64, account(None, None)).unwrap();
    region.write(PageId(0), &pages_of(&[1]), |_| 0).unwrap();
    let _snapshot = region.snapshot().unwrap();
    let descriptors = region.descriptors(0, 10).unwrap();
    assert_eq!(descriptors.layers_total, 2);
    assert!(farfield_os::memfd::write_at(descriptors.fds[LAYERS].as_fd(), &[1], 0).is_err());
    assert!(farfield_os::memfd::write_at(descriptors.fds[LAYERS + 1].as_fd(), &[1], 0).is_ok());
}

#[test]
fn nonsense_in_a_shared_page_map_is_corruption_and_not_a_crash() {
    use std::os::fd::AsFd;
    let region = StoredRegion::new(64, account(None, None)).unwrap();
    let descriptors = region.descriptors(0, 10).unwrap();
    let nonsense: Vec<u8> = (0..64).map(|page| page as u8 + 2).collect();
    farfield_os::memfd::write_at(descriptors.fds[0].as_fd(), &nonsense, 0).unwrap();
    for page in 0..64 {
        assert_eq!(region.reader().page(PageId(page)).unwrap_err(), RegionStoreError::Corrupt(PageId(page)));
    }
    region.sweep(&|| false).unwrap();
    region.discard(PageId(0), 32).unwrap();
    let snapshot = region.snapshot().unwrap();
    let twin = StoredRegion::from_snapshot(snapshot, account(None, None)).unwrap();
    twin.sweep(&|| false).unwrap();
    twin.discard(PageId(0), 64).unwrap();
    assert_eq!(read(&twin, 40), None);
}

/// Regions and their clones, against what each of them should hold.
#[test]
fn random_operations_on_a_family_of_clones_match_a_model() {
    const PAGES: u64 = 200;
    for seed in 1..=6 {
        let mut dice = Rng::with_seed(0x9e37_79b9_7f4a_7c15 ^ seed);
        let account = account(None, None);
        let mut family = vec![(StoredRegion::new(PAGES, account.clone()).unwrap(), BTreeMap::new())];
        for step in 0..1500u64 {
            let alive = family.len();
            let at = dice.usize(..alive);
            let first = dice.u64(..PAGES);
            let count = 1 + dice.u64(..(PAGES - first).min(20));
            let (region, model) = &mut family[at];
            match dice.u64(..20) {
                0..=9 => {
                    let values: Vec<u64> = (0..count).map(|index| step * 1000 + index + 1).collect();
                    region.write(PageId(first), &pages_of(&values), |index| values[index as usize] ^ 5).unwrap();
                    model.extend((first..).zip(values));
                }
                10..=13 => {
                    let expected = (first..first + count).filter(|page| model.remove(page).is_some()).count() as u64;
                    assert_eq!(region.discard(PageId(first), count), Ok(expected), "seed {seed}");
                }
                14..=16 => drop(region.sweep(&|| false).unwrap()),
                17..=18 if alive < 5 => {
                    let snapshot = region.snapshot().unwrap();
                    let model = model.clone();
                    family.push((StoredRegion::from_snapshot(snapshot, account.clone()).unwrap(), model));
                }
                // A snapshot that nobody claims, as happens when a program forks and the child never asks.
                17..=18 => drop(region.snapshot().unwrap()),
                _ if alive > 1 => drop(family.swap_remove(at)),
                _ => {}
            }
            let (region, model) = &family[dice.usize(..family.len())];
            let page = dice.u64(..PAGES);
            let expected = model.get(&page).map(|value| (page_of(*value), value ^ 5));
            assert_eq!(read(region, page), expected, "seed {seed} step {step} page {page}");
        }
        for (region, model) in &family {
            region.sweep(&|| false).unwrap();
            for page in 0..PAGES {
                assert_eq!(read(region, page), model.get(&page).map(|value| (page_of(*value), value ^ 5)));
            }
        }
        // With one survivor, what is charged is what it holds.
        family.truncate(1);
        let (region, model) = family.pop().unwrap();
        region.sweep(&|| false).unwrap();
        let held: BTreeSet<_> = model.keys().collect();
        assert_eq!(account.server.used_pages(), held.len() as u64, "seed {seed}");
        drop(region);
        assert_eq!(account.server.used_pages(), 0, "seed {seed}");
    }
}

#[test]
fn layers_are_merged_before_there_are_too_many() {
    let account = account(None, None);
    let region = StoredRegion::new(1000, account.clone()).unwrap();
    let mut kept = Vec::new();
    for round in 0..200u64 {
        region.write(PageId(round), &pages_of(&[round + 1]), |_| round).unwrap();
        let snapshot = region.snapshot().unwrap();
        if round % 7 == 0 {
            kept.push((round, StoredRegion::from_snapshot(snapshot, account.clone()).unwrap()));
        }
    }
    assert!(region.layer_count() <= 64);
    for round in 0..200 {
        assert_eq!(read(&region, round), Some((page_of(round + 1), round)));
    }
    for (born, clone) in &kept {
        assert_eq!(read(clone, *born), Some((page_of(born + 1), *born)));
        assert_eq!(read(clone, born + 1), None);
    }
    kept.clear();
    region.sweep(&|| false).unwrap();
    assert_eq!(account.server.used_pages(), 200);
}

/// Reads a page in the three ways that there are.
fn read_every_way(region: &StoredRegion, page: u64) -> Result<Option<u64>, RegionStoreError> {
    let part = farfield_core::wire::PagePart::new(8, 8).unwrap();
    let reader = region.reader();
    reader.announce(PageId(page), part);
    let found = reader.page(PageId(page))?;
    let mut scratch = [0; PAGE_BYTES];
    let of_part = u64::from_le_bytes(reader.part(PageId(page), part, &mut scratch)?.0.try_into().unwrap());
    let mut values = [[0; 8]; 1];
    reader.load(&[PageId(page).offset() + 8], &mut values)?;
    assert_eq!(u64::from_le_bytes(values[0]), of_part);
    drop(reader);
    let whole = read(region, page).map(|(bytes, _)| u64::from_le_bytes(bytes[..8].try_into().unwrap()));
    assert_eq!((found.is_some(), of_part), (whole.is_some(), whole.unwrap_or(0)));
    Ok(whole)
}

fn write_value(region: &StoredRegion, page: u64, value: u64) -> Result<(), RegionStoreError> {
    let bytes = page_of(value);
    region.write(PageId(page), &bytes, |_| farfield_core::checksum(&bytes))
}

#[test]
fn without_mappings_pages_are_stored_read_and_stored_again() {
    for mappings in [2, 3, 5] {
        // Page map and checksums take two; then some or none are left for notes and layers.
        let ledger = ledger_of(|resource| if resource == Resource::Mappings { mappings } else { u64::MAX / 4 });
        let account = Account { ledger: ledger.clone(), ..account(None, None) };
        let region = StoredRegion::new(4 << 18, account).unwrap();
        for lap in 0..3 {
            for page in (0..4 << 18).step_by(1 << 17) {
                write_value(&region, page, page + lap).unwrap();
                assert_eq!(read_every_way(&region, page), Ok(Some(page + lap)));
            }
        }
        assert_eq!(ledger.held(Resource::Mappings), mappings, "all that there are, and no more");
        assert!(matches!(region.snapshot(), Err(RegionStoreError::TooMany(Resource::Mappings))));
    }
}

#[test]
fn a_page_outside_of_the_region_is_out_of_range_in_every_way() {
    let region = StoredRegion::new(100, account(None, None)).unwrap();
    for page in [100, 1 << 32, 1 << 40, u64::MAX >> 12, u64::MAX] {
        let part = farfield_core::wire::PagePart::new(8, 8).unwrap();
        let reader = region.reader();
        reader.announce(PageId(page), part);
        assert_eq!(reader.page(PageId(page)).map(drop), Err(RegionStoreError::OutOfRange));
        assert_eq!(reader.part(PageId(page), part, &mut [0; PAGE_BYTES]), Err(RegionStoreError::OutOfRange));
    }
}

#[test]
fn a_clone_pays_for_its_tables_and_is_refused_when_it_cannot() {
    let account = account(None, Some(6000));
    let region = StoredRegion::new(1 << 30, account.clone()).unwrap();
    for page in 0..1000 {
        write_value(&region, page << 18, page).unwrap();
    }
    let before = account.tenant.bookkeeping_pages();
    assert!(before >= 2000, "one page of the map and one of the checksums for each");
    let snapshot = region.snapshot().unwrap();
    assert!(account.tenant.bookkeeping_pages() >= 2 * before - 10, "and as many for the clone");
    assert!(matches!(region.snapshot(), Err(RegionStoreError::Full(Full::Tenant))));
    assert_eq!(write_value(&region, 5, 5), Ok(()), "what fits still fits");
    drop(snapshot);
    region.sweep(&|| false).unwrap();
    drop(region.snapshot().unwrap());
    drop(region);
    assert_eq!((account.tenant.used_pages(), account.tenant.bookkeeping_pages()), (0, 0));
    assert!(account.ledger.is_empty());
}

#[test]
fn notes_give_way_to_pages() {
    let account = account(None, Some(8192));
    let region = StoredRegion::new(1 << 20, account.clone()).unwrap();
    // A page of notes for each page that is read in parts.
    for page in 0..4000 {
        write_value(&region, page << 7, page).unwrap();
        assert_eq!(read_every_way(&region, page << 7), Ok(Some(page)));
    }
    for page in 4000..5500 {
        write_value(&region, page << 7, page).unwrap();
        assert_eq!(read_every_way(&region, page << 7), Ok(Some(page)), "noted or not");
    }
}

/// Random histories of a family of regions. What is paid for is what is held, at every step and when all are gone.
#[test]
fn charged_pages_equal_held_pages() {
    let steps = if std::env::var_os("FARFIELD_DEEP").is_some() { 200_000 } else { 3000 };
    let mut dice = Rng::with_seed(0xacc0);
    // Room for some of it, so that charges are refused in the midst of things.
    let account = account(Some(3000), Some(2500));
    let (mut regions, mut snapshots) = (Vec::<StoredRegion>::new(), Vec::<RegionSnapshot>::new());
    for step in 0..steps {
        let pages = 1 << (10 + dice.u64(..12));
        if regions.is_empty() || dice.usize(..40) == 0 {
            regions.extend(StoredRegion::new(pages, account.clone()).ok());
            continue;
        }
        let at = dice.usize(..regions.len());
        let region = &regions[at];
        let page = dice.u64(..region.pages());
        match dice.usize(..20) {
            0..=9 => drop(write_value(region, page, step)),
            10 | 11 => {
                let value = read_every_way(region, page);
                assert!(value.is_ok(), "reads never fail: {value:?}");
            }
            12 | 13 => drop(region.discard(PageId(page), (region.pages() - page).min(1 << dice.u64(..14))).unwrap()),
            14 => snapshots.extend(region.snapshot().ok()),
            15 if !snapshots.is_empty() => {
                let snapshot = snapshots.swap_remove(dice.usize(..snapshots.len()));
                regions.extend(StoredRegion::from_snapshot(snapshot, account.clone()).ok());
            }
            16 if !snapshots.is_empty() => drop(snapshots.swap_remove(dice.usize(..snapshots.len()))),
            17 if dice.usize(..3) == 0 => drop(regions.swap_remove(at)),
            18 => drop(region.sweep(&|| false).unwrap()),
            _ => {}
        }
        for file in regions.iter().flat_map(StoredRegion::files) {
            let (paid, real) = file.paid_and_real_pages();
            assert!(paid >= real, "step {step}: {real} pages, {paid} paid");
        }
        if step % 100 == 0 {
            for region in &regions {
                region.sweep(&|| false).unwrap();
                region.files().take(2).for_each(|file| {
                    let (paid, real) = file.paid_and_real_pages();
                    assert_eq!(paid, real, "step {step}");
                });
            }
        }
        assert!(account.tenant.used_pages() <= 2500);
    }
    drop((regions, snapshots));
    for meter in [&account.server, &account.tenant] {
        assert_eq!((meter.used_pages(), meter.bookkeeping_pages()), (0, 0));
    }
    assert!(account.ledger.is_empty(), "{:?}", account.ledger);
}

#[test]
fn a_sweep_that_is_interrupted_goes_on_the_next_time() {
    const PAGES: u64 = 40_000;
    let account = account(None, None);
    let region = StoredRegion::new(PAGES, account.clone()).unwrap();
    for first in (0..PAGES).step_by(1000) {
        region.write(PageId(first), &pages_of(&[1; 1000]), |_| 0).unwrap();
    }
    drop(region.snapshot().unwrap());
    for page in (0..PAGES).step_by(40) {
        region.write(PageId(page), &pages_of(&[2]), |_| 0).unwrap();
    }
    let mut turns = 0;
    while account.server.used_pages() > PAGES {
        assert!(region.sweep(&|| true).unwrap() < 1000, "a part of it");
        turns += 1;
        assert!(turns < 100, "it comes to an end");
    }
    assert!(turns > 1);
}

#[test]
fn a_client_that_has_a_region_mapped_which_is_gone_finds_no_zeros() {
    use farfield_os::memfd::{read_at, usage};
    use std::os::fd::AsFd;
    let region = StoredRegion::new(1000, account(None, None)).unwrap();
    write_value(&region, 5, 7).unwrap();
    let descriptors = region.descriptors(0, 8).unwrap();
    drop(region);
    let [map, sums, _, top] = &descriptors.fds[..] else { panic!("one layer") };
    let (mut entry, mut sum) = ([0; 1], [0xEE; 8]);
    read_at(map.as_fd(), &mut entry, 5).unwrap();
    read_at(sums.as_fd(), &mut sum, 5 * 8).unwrap();
    assert_eq!((entry, sum), ([1], [0; 8]), "the page is there, and no bytes match its checksum");
    assert_eq!(usage(top.as_fd()).unwrap().used_bytes, 0);
}
