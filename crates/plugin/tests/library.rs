//! Guards against a header that declares other tables than the server has, and against a file that
//! is taken for a library.

use farfield_plugin::{PluginError, with_library};
use farfield_wic::{Budget, Fault, Memory, Registry, Stop, Task};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A region whose bytes count from 0 on.
struct Counting(u64);

impl Memory for Counting {
    fn region_bytes(&self) -> u64 {
        self.0
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        into.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = at as u8);
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Fault> {
        Err(Fault::Internal)
    }

    fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
        work()
    }

    fn clock(&self) -> u64 {
        0
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-plugin-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Compiles a C source as a library.
    fn compile(&self, source: &Path, name: &str) -> PathBuf {
        let library = self.0.join(name);
        let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"]);
        let status = compiler.arg(header).arg(source).arg("-o").arg(&library).status().expect("a C compiler is there");
        assert!(status.success());
        library
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/library.c")
}

#[test]
fn a_library_in_c_runs() {
    let folder = Folder::new("c");
    let registry = with_library(Registry::new(), &folder.compile(&source(), "libsum.so")).unwrap();
    assert_eq!(registry.functions().collect::<Vec<_>>(), [("example.sum", 1)]);
    let region = Counting(3 * 4096);
    let sum: u64 = 3 * 16 * (0..256).sum::<u64>();
    let budget = |steps_max| Budget { steps_max, until: None };
    let tasks = [
        Task { argument: b"", budget: budget(100) },
        Task { argument: b"x", budget: budget(100) },
        Task { argument: b"", budget: budget(100) },
    ];
    let mut ended = Vec::new();
    let mut take = |index, result: Result<&[u8], Stop>, steps| ended.push((index, result.map(<[u8]>::to_vec), steps));
    registry.run("example.sum", 1, &region, &tasks, &mut take).unwrap();
    // 7 bits each, the lowest first.
    let encoded = [sum as u8 | 128, (sum >> 7) as u8 | 128, (sum >> 14) as u8].to_vec();
    assert!(sum >> 21 == 0 && sum >> 14 > 0);
    assert_eq!(ended, [(0, Ok(encoded.clone()), 6), (1, Err(Stop::Argument), 0), (2, Ok(encoded), 6)]);
    // A page is read for each step and more: the second call of a row finds the budget of both spent.
    let mut ended = Vec::new();
    let mut take = |index, result: Result<&[u8], Stop>, _| ended.push((index, result.map(<[u8]>::to_vec)));
    registry
        .run("example.sum", 1, &Counting(64 * 4096), &[Task { argument: b"", budget: budget(2) }], &mut take)
        .unwrap();
    assert_eq!(ended, [(0, Err(Stop::Overrun { steps: 2 }))]);
}

#[test]
fn a_file_that_is_no_library_is_refused() {
    let folder = Folder::new("none");
    let empty = folder.0.join("empty.c");
    std::fs::write(&empty, "int nothing(void); int nothing(void) { return 0; }\n").unwrap();
    let refused = |path: &Path| with_library(Registry::standard(), path).unwrap_err();
    assert!(matches!(refused(&folder.compile(&empty, "libnothing.so")), PluginError::NoFunctions { .. }));
    assert!(matches!(refused(&empty), PluginError::Linker { .. }));
    assert!(matches!(refused(&folder.0.join("absent.so")), PluginError::File { .. }));
    let other = std::fs::read_to_string(source()).unwrap().replace("{FF_ABI_VERSION,", "{FF_ABI_VERSION + 1,");
    let newer = folder.0.join("newer.c");
    std::fs::write(&newer, other).unwrap();
    let error = refused(&folder.compile(&newer, "libnewer.so"));
    assert!(matches!(error, PluginError::OtherInterface { theirs: 2, .. }), "{error}");
    let library = folder.compile(&source(), "libtwice.so");
    let once = with_library(Registry::standard(), &library).unwrap();
    assert!(matches!(with_library(once, &library).unwrap_err(), PluginError::Taken { .. }));
}
