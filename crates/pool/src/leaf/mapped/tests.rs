//! Guards against bytes that are lost or mixed up, memory that is promised and not there, and
//! memory that is not given back.
//!
//! There is no memory-only node and no DAX here: node 0, files in memory and on disk stand in for them.

use super::*;
use crate::trial::{filled, one, read, write};
use crate::{Op, OpenError, PoolBuilder, conformance};
use farfield_os::memfd;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// A folder of its own, gone in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let parent = if Path::new("/dev/shm").is_dir() { "/dev/shm".into() } else { std::env::temp_dir() };
        let path = parent.join(format!("farfield-mapped-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn url(&self, options: &str) -> String {
        format!("dax:{}?{options}", self.0.display())
    }

    /// A file of so many MiB in it.
    fn file(&self, mib: u64) -> PathBuf {
        let path = self.0.join("far");
        std::fs::File::create(&path).unwrap().set_len(mib << 20).unwrap();
        path
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

/// May this process bind memory to a node? Containers often may not.
fn may_bind() -> bool {
    match PoolBuilder::new().url("numa:0?size=8M").pages(64).open() {
        Err(OpenError::Refused { text, .. }) if text.contains("CAP_SYS_NICE") || text.contains("no NUMA") => {
            eprintln!("skipped: {text}");
            false
        }
        opened => opened.map(|_| true).unwrap(),
    }
}

fn region(url: &str, pages: u64) -> MappedBackend {
    let config = match url.split_once(':').unwrap() {
        ("numa", text) => Config::parse_numa(text),
        (_, text) => Config::parse_dax(text),
    };
    MappedBackend::new(3, config.unwrap(), pages).map_err(|_| url.to_owned()).unwrap()
}

fn used_bytes(backend: &MappedBackend) -> u64 {
    // SAFETY: open as long as the backend.
    memfd::usage(unsafe { BorrowedFd::borrow_raw(backend.region.medium.file) }).unwrap().used_bytes
}

#[test]
fn memory_of_a_node_conforms_and_is_that_of_the_node() {
    if !may_bind() {
        return;
    }
    conformance::run(&PoolBuilder::new().url("numa:0?size=64M"));
    let backend = region("numa:0?size=64M", 4096);
    write(&mut *backend.open_lane().unwrap(), 7, 1, 1).unwrap();
    let address = backend.mapped().unwrap().page(PageId(7)).unwrap();
    assert_eq!(farfield_os::numa::node_at(address), Ok(0));
    assert!(backend.how().contains("node 0"), "{}", backend.how());
}

#[test]
fn files_conform_in_memory_and_on_disk_and_leave_nothing() {
    let folder = Folder::new("conform");
    conformance::run(&PoolBuilder::new().url(folder.url("size=64M")));
    assert_eq!(folder.names(), 0);
    let disk = std::env::temp_dir();
    conformance::run(&PoolBuilder::new().url(format!("dax:{}?size=64M", disk.display())));
}

#[test]
fn a_file_of_the_users_serves_one_region_at_a_time_and_stays() {
    let folder = Folder::new("named");
    let path = folder.file(64);
    let url = format!("dax:{}", path.display());
    let builder = PoolBuilder::new().url(&url).pages(4096);
    let backend = builder.open().unwrap();
    let mut lane = backend.open_lane().unwrap();
    for version in 1..4 {
        (0..4096).step_by(64).for_each(|page| write(&mut *lane, page, 64, version).unwrap());
    }
    (0..4096).step_by(64).for_each(|page| assert!(read(&mut *lane, page, 64).bytes() == filled(64, page, 3).bytes()));
    let other = builder.open().err().unwrap().to_string();
    assert!(other.contains("another process"), "{other}");
    assert!(backend.clone_region().unwrap_err().to_string().contains("folder"));
    drop((lane, backend));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 << 20);
    // Somebody's bytes are in it now.
    let error = builder.open().err().unwrap().to_string();
    assert!(error.contains("file=erase"), "{error}");
    let again = PoolBuilder::new().url(format!("{url}?file=erase")).pages(64).open().unwrap();
    assert!(
        read(&mut *again.open_lane().unwrap(), 0, 64).bytes().iter().all(|byte| *byte == 0),
        "a new region is empty"
    );
}

#[test]
fn a_file_that_is_cut_is_corrupt_and_no_signal() {
    let folder = Folder::new("cut");
    let path = folder.file(16);
    let backend = region(&format!("dax:{}", path.display()), 1024);
    let mut lane = backend.open_lane().unwrap();
    write(&mut *lane, 0, 64, 1).unwrap();
    assert!(backend.mapped().is_none());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let done = one(&mut *lane, Op::Read { page: PageId(5), buffer: crate::Buffer::new(1) });
    assert_eq!(done.result, Err(PoolError::Corrupt { page: PageId(5), server: 3 }));
}

#[test]
fn flipped_bits_are_found_and_written_again_the_page_is_well() {
    let folder = Folder::new("flip");
    let backend = region(&folder.url("size=64M"), 1024);
    let mut lane = backend.open_lane().unwrap();
    (0..32).for_each(|page| write(&mut *lane, page * 4, 4, 1).unwrap());
    let place = backend.region.places.get(41).unwrap();
    // SAFETY: a place of the region; nobody uses it meanwhile.
    unsafe { *backend.region.address(place).add(100) ^= 4 };
    for (page, pages) in [(41, 1), (40, 4)] {
        let done = one(&mut *lane, Op::Read { page: PageId(page), buffer: crate::Buffer::new(pages) });
        assert_eq!(done.result, Err(PoolError::Corrupt { page: PageId(41), server: 3 }));
        assert!(done.buffer.is_some());
    }
    assert!(read(&mut *lane, 42, 1).bytes() == filled(1, 42, 1).bytes(), "its neighbour is well");
    write(&mut *lane, 41, 1, 2).unwrap();
    assert!(read(&mut *lane, 41, 1).bytes() == filled(1, 41, 2).bytes());
}

#[test]
fn a_full_place_takes_no_new_pages_and_writes_old_ones_again() {
    let folder = Folder::new("full");
    let mut urls = vec![folder.url("size=8M")];
    urls.extend(may_bind().then(|| "numa:0?size=8M".to_owned()));
    for url in urls {
        let backend = PoolBuilder::new().url(&url).pages(1 << 20).open().unwrap();
        let mut lane = backend.open_lane().unwrap();
        let mut stored = 0;
        while write(&mut *lane, stored, 8, 1) == Ok(()) {
            stored += 8;
        }
        assert_eq!(stored, 2048, "{url} holds as much as its size says");
        assert_eq!(write(&mut *lane, stored, 8, 1), Err(PoolError::PoolFull { server: 0 }));
        for version in 2..5 {
            (0..stored).step_by(64).for_each(|page| write(&mut *lane, page, 64, version).unwrap());
        }
        for page in (0..stored).step_by(64) {
            assert!(read(&mut *lane, page, 64).bytes() == filled(64, page, 4).bytes());
        }
        assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 16 }).result, Ok(()));
        assert_eq!(write(&mut *lane, 5000, 16, 9), Ok(()));
        assert_eq!(write(&mut *lane, 5016, 1, 9), Err(PoolError::PoolFull { server: 0 }));
    }
}

#[test]
fn room_is_claimed_before_pages_are_stored_and_given_back() {
    let folder = Folder::new("room");
    let backend = region(&folder.url("size=256M"), 1 << 32);
    let mut lane = backend.open_lane().unwrap();
    assert_eq!(used_bytes(&backend), 0);
    write(&mut *lane, 1 << 31, 1, 1).unwrap();
    assert!(used_bytes(&backend) >= 16 << 20, "ahead of need");
    (0..16384).step_by(64).for_each(|page| write(&mut *lane, (1 << 31) + page, 64, 1).unwrap());
    assert!(used_bytes(&backend) >= 64 << 20);
    assert_eq!(one(&mut *lane, Op::Discard { page: PageId(0), count: 1 << 32 }).result, Ok(()));
    assert!(used_bytes(&backend) <= 32 << 20, "{} bytes are left", used_bytes(&backend));
    assert!(read(&mut *lane, (1 << 31) + 77, 3).bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn threads_that_write_and_read_the_same_pages_see_whole_versions() {
    let folder = Folder::new("threads");
    let backend = PoolBuilder::new().url(folder.url("size=64M")).pages(64).open().unwrap();
    std::thread::scope(|scope| {
        for me in 1..4u64 {
            let backend = &backend;
            scope.spawn(move || {
                let mut lane = backend.open_lane().unwrap();
                for round in 0..2000 {
                    let page = (me * 7 + round * 13) % 61;
                    write(&mut *lane, page, 3, me << 16 | round).unwrap();
                    let first = (page + me * 17) % 61;
                    let seen = read(&mut *lane, first, 3);
                    for at in 0..3 {
                        let word = u64::from_le_bytes(seen.page(at)[..8].try_into().unwrap());
                        let is_zero = seen.page(at).iter().all(|byte| *byte == 0);
                        assert!(
                            is_zero || word >> 32 == first + at as u64,
                            "page {} shows {word:x}",
                            first + at as u64
                        );
                    }
                    if round % 9 == 0 {
                        assert_eq!(one(&mut *lane, Op::Discard { page: PageId(page), count: 2 }).result, Ok(()));
                    }
                }
            });
        }
    });
}

#[test]
fn a_ticket_that_is_forgotten_takes_its_memory_along() {
    let folder = Folder::new("forget");
    let builder = PoolBuilder::new().urls([folder.url("size=64M"), "ram:".to_owned()]).pages(4096);
    let backend = builder.open().unwrap();
    write(&mut *backend.open_lane().unwrap(), 0, 64, 1).unwrap();
    let files = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        files.filter_map(|file| std::fs::read_link(file.path()).ok()).filter(|path| path.starts_with(&folder.0)).count()
    };
    assert_eq!(files(), 1);
    let ticket = backend.clone_region().unwrap();
    assert_eq!(files(), 2);
    ticket.forget();
    assert_eq!(files(), 1);
    assert!(builder.claim(&ticket).is_err());
}

#[test]
fn an_unsuitable_device_is_refused_with_a_hint() {
    let error = |url: &str| {
        PoolBuilder::new().url(url).pages(64).open().err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (url, hint) in [
        ("numa:1000", "no NUMA node 1000"),
        ("numa:0?size=99T", "asks for more"),
        ("dax:/no/such/folder", "no such file"),
        ("dax:/dev/null", "nor a DAX device"),
    ] {
        assert!(error(url).contains(hint), "{url}: {}", error(url));
    }
    let folder = Folder::new("refused");
    let url = format!("dax:{}", folder.file(1).display());
    assert!(error(&url).contains("less than 4 MiB"), "{}", error(&url));
    assert!(error(&format!("{url}?size=2M")).contains("truncate"), "{}", error(&format!("{url}?size=2M")));
}
