//! Guards against bytes that are lost or mixed up where a file gives less than it promised, and
//! against files that stay behind.

use super::*;
use crate::{Buffer, Completion, LaneRequest, Op, PoolBuilder, Priority, conformance};
use core::time::Duration;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use std::os::fd::BorrowedFd;

const LONG: Duration = Duration::from_secs(30);

/// A folder of its own, gone in the end; and what is in it.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-ssd-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn url(&self, options: &str) -> String {
        format!("ssd:{}?{options}", self.0.display())
    }

    fn config(&self, options: &str) -> Config {
        Config::parse(self.url(options).strip_prefix("ssd:").unwrap()).unwrap()
    }

    fn names(&self) -> usize {
        std::fs::read_dir(&self.0).unwrap().count()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn filled(pages: usize, seed: u64) -> Buffer {
    let mut buffer = Buffer::new(pages);
    for (index, word) in buffer.bytes_mut().as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (index as u64 ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    }
    buffer.seal();
    buffer
}

fn one_by(lane: &mut dyn Lane, deadline: Duration, op: Op) -> Completion {
    let mut done = Vec::with_capacity(1);
    lane.submit(LaneRequest { tag: 5, priority: Priority::Demand, deadline, op }).unwrap();
    while lane.poll(&mut done) == 0 {
        lane.wait(Duration::from_millis(100));
    }
    done.pop().unwrap()
}

fn one(lane: &mut dyn Lane, op: Op) -> Completion {
    one_by(lane, LONG, op)
}

fn write(lane: &mut dyn Lane, page: u64, buffer: Buffer) -> Result<(), PoolError> {
    one(lane, Op::Write { page: PageId(page), buffer }).result
}

fn read(lane: &mut dyn Lane, page: u64, pages: usize) -> Result<Buffer, PoolError> {
    let done = one(lane, Op::Read { page: PageId(page), buffer: Buffer::new(pages) });
    done.result.map(|()| done.buffer.unwrap())
}

#[test]
fn a_file_conforms_and_leaves_nothing_behind() {
    for io in ["auto", "pread"] {
        let folder = Folder::new(io);
        conformance::run(&PoolBuilder::new().url(folder.url(&format!("size=64M&io={io}"))));
        assert_eq!(folder.names(), 0, "with io={io}");
    }
}

#[test]
fn a_stripe_of_files_conforms() {
    let folder = Folder::new("stripe");
    conformance::run(&PoolBuilder::new().urls([folder.url("size=64M"), folder.url("size=64M&io=pread")]));
}

#[test]
fn a_file_in_memory_conforms() {
    // Another file system: nothing here depends on one.
    if std::path::Path::new("/dev/shm").is_dir() {
        conformance::run(&PoolBuilder::new().url("ssd:/dev/shm?size=64M"));
    }
}

#[test]
fn truncated_and_overwritten_files_are_found() {
    for io in ["auto", "pread"] {
        let folder = Folder::new(&format!("cut-{io}"));
        let backend = SsdBackend::new(3, folder.config(&format!("size=64M&io={io}")), 1024).map_err(|_| ()).unwrap();
        let mut lane = backend.open_lane().unwrap();
        (0..32).for_each(|page| write(&mut *lane, page * 4, filled(4, page)).unwrap());
        let place = backend.region.places.get(41).unwrap();
        // One bit.
        let mut bytes = Buffer::new(1);
        let offset = PageId(place).offset();
        // SAFETY: the buffer's own bytes.
        unsafe {
            let address = bytes.bytes_mut().as_mut_ptr();
            assert_eq!(disk::read_at(backend.region.medium.file, address as usize, PAGE_BYTES, offset), Ok(PAGE_BYTES));
            *address.add(100) ^= 4;
            assert_eq!(
                disk::write_at(backend.region.medium.file, address as usize, PAGE_BYTES, offset),
                Ok(PAGE_BYTES)
            );
        }
        let corrupt = |page| PoolError::Corrupt { page: PageId(page), server: 3 };
        assert_eq!(read(&mut *lane, 41, 1).unwrap_err(), corrupt(41));
        assert_eq!(read(&mut *lane, 40, 4).unwrap_err(), corrupt(41), "as a part of a run");
        assert_eq!(read(&mut *lane, 42, 1).unwrap().page(0), filled(4, 10).page(2), "its neighbour is well");
        // Written again it is well.
        write(&mut *lane, 41, filled(1, 77)).unwrap();
        assert_eq!(read(&mut *lane, 41, 1).unwrap().page(0), filled(1, 77).page(0));
        // The end is gone. Lanes begin anywhere in the file, so the last place is not that of the last page.
        let place = |page: &u64| backend.region.places.get(*page).unwrap();
        let (first, last) = ((0..128).min_by_key(place).unwrap(), (0..128).max_by_key(place).unwrap());
        let kept = read(&mut *lane, first, 1).unwrap();
        disk::resize(backend.region.medium.file, PageId(place(&last)).offset()).unwrap();
        assert_eq!(read(&mut *lane, last, 1).unwrap_err(), corrupt(last));
        assert_eq!(read(&mut *lane, first, 1).map(|buffer| buffer.page(0) == kept.page(0)), Ok(true));
    }
}

#[test]
fn a_full_region_takes_no_new_pages_and_writes_old_ones_again() {
    let folder = Folder::new("full");
    let backend = PoolBuilder::new().url(folder.url("size=8M")).pages(1 << 20).open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    let mut stored = 0;
    while write(&mut *lane, stored, filled(8, stored)) == Ok(()) {
        stored += 8;
    }
    assert_eq!(stored, 2048, "as much as its size says");
    assert_eq!(write(&mut *lane, stored, filled(8, 1)), Err(PoolError::PoolFull { server: 0 }));
    for round in 1..4 {
        (0..stored).step_by(64).for_each(|page| write(&mut *lane, page, filled(64, page + round)).unwrap());
    }
    for page in (0..stored).step_by(64) {
        assert_eq!(read(&mut *lane, page, 64).unwrap().bytes(), filled(64, page + 3).bytes());
    }
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 16 }).result, Ok(()));
    assert_eq!(write(&mut *lane, 5000, filled(16, 9)), Ok(()));
    assert_eq!(write(&mut *lane, 5016, filled(1, 9)), Err(PoolError::PoolFull { server: 0 }));
}

/// Runs the named test in a process of its own, with a limit on the length of files.
fn with_file_limit(name: &str, test: impl FnOnce()) {
    if std::env::var_os("FARFIELD_FILE_LIMIT").is_some() {
        return test();
    }
    let program = std::env::current_exe().unwrap();
    let command = format!("ulimit -f 16384; exec {} --exact leaf::ssd::tests::{name} --nocapture", program.display());
    let output =
        std::process::Command::new("sh").args(["-c", &command]).env("FARFIELD_FILE_LIMIT", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_limit_on_files_is_a_full_pool_and_no_signal() {
    // 16384 units are 8 MiB or, in some shells, 16 MiB.
    with_file_limit("a_limit_on_files_is_a_full_pool_and_no_signal", || {
        let folder = Folder::new("limit");
        let backend = PoolBuilder::new().url(folder.url("size=1G")).pages(1 << 20).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        let mut stored = 0;
        let error = loop {
            match write(&mut *lane, stored, filled(16, stored)) {
                Ok(()) => stored += 16,
                Err(error) => break error,
            }
        };
        assert_eq!(error, PoolError::PoolFull { server: 0 });
        assert!((1024..4096).contains(&stored), "{stored} pages");
        (0..stored).step_by(16).for_each(|page| write(&mut *lane, page, filled(16, page + 1)).unwrap());
        for page in (0..stored).step_by(16) {
            assert_eq!(read(&mut *lane, page, 16).unwrap().bytes(), filled(16, page + 1).bytes());
        }
    });
}

#[test]
fn discarded_room_goes_back_to_the_file_system() {
    let folder = Folder::new("discard");
    let backend = SsdBackend::new(0, folder.config("size=256M"), 1 << 32).map_err(|_| ()).unwrap();
    let mut lane = backend.open_lane().unwrap();
    // SAFETY: open as long as the backend.
    let used =
        || farfield_os::memfd::usage(unsafe { BorrowedFd::borrow_raw(backend.region.medium.file) }).unwrap().used_bytes;
    for page in (0..16384).step_by(64) {
        write(&mut *lane, (1 << 31) + page, filled(64, page)).unwrap();
    }
    assert!(used() >= 64 << 20);
    // All of it, although there are four billion pages.
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 1 << 32 }).result, Ok(()));
    assert!(used() <= 32 << 20, "{} bytes are left", used());
    assert_eq!(backend.region.stored.load(Ordering::Relaxed), 0);
    assert!(read(&mut *lane, (1 << 31) + 77, 3).unwrap().bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn a_late_operation_is_given_up_and_never_becomes_the_page() {
    let folder = Folder::new("late");
    let backend = SsdBackend::new(0, folder.config("size=64M"), 4096).map_err(|_| ()).unwrap();
    let mut lane = backend.open_lane().unwrap();
    (0..64).for_each(|page| write(&mut *lane, page, filled(1, page)).unwrap());
    let mut late = 0;
    for round in 0..40 {
        let buffer = filled(64, 1000 + round);
        let done = one_by(&mut *lane, Duration::ZERO, Op::Write { page: PageId(0), buffer });
        assert_eq!(done.buffer.map(|buffer| buffer.pages()), Some(64));
        match done.result {
            Ok(()) => (0..64).for_each(|page| write(&mut *lane, page, filled(1, page)).unwrap()),
            Err(PoolError::TimedOut { .. }) => late += 1,
            Err(other) => panic!("{other}"),
        }
        // Each page is one of the versions, whole.
        for page in 0..64 {
            let bytes = read(&mut *lane, page, 1).unwrap();
            let new = filled(64, 1000 + round);
            assert!(
                bytes.page(0) == filled(1, page).page(0) || bytes.page(0) == new.page(page as usize),
                "page {page}"
            );
            write(&mut *lane, page, filled(1, page)).unwrap();
        }
    }
    assert!(late > 0, "a deadline of zero passes");
    // No place was lost: the lane waits for its last transfers, and then all but the pages are free.
    drop(lane);
    assert_eq!(backend.region.stored.load(Ordering::Relaxed), 64);
    let region = &backend.region;
    region.slots.claim(&region.medium, region.spare + region.capacity - 64).unwrap();
}

#[test]
fn threads_that_write_and_read_the_same_pages_see_whole_versions() {
    let folder = Folder::new("threads");
    let backend = PoolBuilder::new().url(folder.url("size=64M")).pages(64).open().unwrap();
    std::thread::scope(|scope| {
        for me in 0..3u64 {
            let backend = &backend;
            scope.spawn(move || {
                let mut lane = backend.open_lane().unwrap();
                for round in 0..200 {
                    // Every page of a version begins with the number of the page.
                    let page = (me * 7 + round * 13) % 61;
                    let mut buffer = filled(3, me << 8 | round);
                    (0..3).for_each(|at| buffer.page_mut(at)[..8].copy_from_slice(&(page + at as u64).to_le_bytes()));
                    buffer.seal();
                    write(&mut *lane, page, buffer).unwrap();
                    let first = (page + me * 17) % 61;
                    let seen = read(&mut *lane, first, 3).unwrap();
                    for at in 0..3 {
                        let number = u64::from_le_bytes(seen.page(at)[..8].try_into().unwrap());
                        let is_zero = seen.page(at).iter().all(|byte| *byte == 0);
                        assert!(is_zero || number == first + at as u64, "page {} shows {number}", first + at as u64);
                    }
                    if round % 9 == 0 {
                        one(&mut *lane, Op::Discard { page: PageId(page), count: 2 }).result.unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn tickets_that_nobody_claims_are_swept_and_damaged_ones_refused() {
    let folder = Folder::new("tickets");
    let url = folder.url("size=64M");
    let builder = PoolBuilder::new().url(url).pages(4096);
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 9, filled(4, 9)).unwrap();
    let ticket = backend.clone_region().unwrap();
    let path = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&path).unwrap();
    for cut in [0, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        assert!(builder.claim(&ticket).is_err(), "{cut} bytes of {}", whole.len());
    }
    for at in (0..whole.len()).step_by(611) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        // A page that is damaged is found when it is read; anything else at once, or it does not matter.
        if let Ok(claimed) = builder.claim(&ticket) {
            let seen = read(&mut *claimed.open_lane().unwrap(), 9, 4);
            assert!(seen.is_err() || seen.unwrap().bytes() == filled(4, 9).bytes(), "byte {at}");
        }
    }
    std::fs::write(&path, &whole).unwrap();
    // As if its time had passed.
    let old = path.with_file_name(format!("farfield-{:032x}.clone", 7u128 << 96));
    std::fs::rename(&path, &old).unwrap();
    std::fs::write(folder.0.join("farfield-notes.clone"), "somebody else's").unwrap();
    assert_eq!(folder.names(), 2);
    drop(builder.open().unwrap());
    assert_eq!(folder.names(), 1, "only what is ours and old");
}

#[test]
fn a_process_that_is_killed_leaves_nothing() {
    if let Ok(path) = std::env::var("FARFIELD_SSD_CHILD") {
        let backend = PoolBuilder::new().url(format!("ssd:{path}?size=64M")).pages(4096).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        (0..512).for_each(|page| write(&mut *lane, page * 8, filled(8, page)).unwrap());
        println!("written");
        std::thread::sleep(LONG);
        panic!("nobody killed it");
    }
    use std::io::{BufRead, BufReader};
    let folder = Folder::new("kill");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "leaf::ssd::tests::a_process_that_is_killed_leaves_nothing", "--nocapture"])
        .env("FARFIELD_SSD_CHILD", &folder.0)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("written")));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(folder.names(), 0);
}

#[test]
fn an_unsuitable_file_is_refused() {
    let error = |url: &str| {
        PoolBuilder::new().url(url).pages(64).open().err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(error("ssd:/no/such/folder").contains("no such file"));
    assert!(error("ssd:/dev/null").contains("neither a folder nor a block device"));
    assert!(error("ssd:").contains("folder"));
    assert!(error("ssd:/tmp?size=1M").contains("4 MiB") || error("ssd:/tmp?size=1M").is_empty());
}

/// A loop device over a file, where this user may make one.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &std::path::Path) -> Option<LoopDevice> {
        let output = std::process::Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !name.is_empty()).then_some(LoopDevice(name))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_used_only_if_asked_clearly() {
    let folder = Folder::new("device");
    let file = folder.0.join("medium");
    std::fs::write(&file, [7; 4096]).unwrap();
    std::fs::File::options().write(true).open(&file).unwrap().set_len(64 << 20).unwrap();
    let Some(device) = LoopDevice::new(&file) else { return eprintln!("no loop devices here") };
    let builder = |options: &str| PoolBuilder::new().url(format!("ssd:{}{options}", device.0)).pages(4096);
    let refusal = builder("").open().err().unwrap().to_string();
    assert!(refusal.contains("device=erase"), "{refusal}");
    assert_eq!(std::fs::read(&file).unwrap()[..4096], [7; 4096]);
    let backend = builder("?device=erase").open().unwrap();
    assert!(builder("?device=erase").open().is_err(), "one region at a time");
    let mut lane = backend.open_lane().unwrap();
    (0..512).for_each(|page| write(&mut *lane, page * 8, filled(8, page)).unwrap());
    (0..512).for_each(|page| assert_eq!(read(&mut *lane, page * 8, 8).unwrap().bytes(), filled(8, page).bytes()));
    one(&mut *lane, Op::Discard { page: PageId(0), count: 4096 }).result.unwrap();
    assert!(read(&mut *lane, 100, 8).unwrap().bytes().iter().all(|byte| *byte == 0));
    assert!(backend.clone_region().unwrap_err().to_string().contains("folder"));
}
