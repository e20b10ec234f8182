//! Finds the library that is loaded into the program.

use super::JobRefusal;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// File name of the library.
const LIBRARY: &str = "libfarfield_preload.so";
/// Environment variable with the path of the library; it overrides the search.
pub const ENV_PRELOAD: &str = "FARFIELD_PRELOAD";

/// Finds the library: at `chosen` (the value of [`ENV_PRELOAD`]), else beside `executable`, where
/// installations and cargo put it. Refuses a path with a space or a colon.
pub fn find_preload(chosen: Option<&OsStr>, executable: &Path) -> Result<PathBuf, JobRefusal> {
    let searched = match (chosen, executable.parent()) {
        (Some(path), _) => vec![PathBuf::from(path)],
        (None, Some(folder)) => vec![
            folder.join(LIBRARY),
            folder.join("../lib/farfield").join(LIBRARY),
            // Test binaries live one folder below the binaries that they are built with.
            folder.join("..").join(LIBRARY),
            folder.join("deps").join(LIBRARY),
        ],
        (None, None) => vec![],
    };
    let found = searched.iter().find_map(|path| path.canonicalize().ok().filter(|path| path.is_file()));
    let path = found.ok_or(JobRefusal::NoPreload { searched })?;
    // The loader splits its value at both characters.
    if path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
        return Err(JobRefusal::PreloadPath { path });
    }
    Ok(path)
}

/// Returns `LD_PRELOAD` for the program: our library first, the existing value after it.
pub(super) fn prepended(library: &Path, existing: Option<&OsStr>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        value.push(":");
        value.push(existing);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_where_it_is_installed() {
        let root = std::env::temp_dir().join(format!("farfield-preload-{}", std::process::id()));
        let check = |library: &str, executable: &str| {
            let library = root.join(library);
            std::fs::create_dir_all(library.parent().unwrap()).unwrap();
            std::fs::create_dir_all(root.join(executable).parent().unwrap()).unwrap();
            std::fs::write(&library, b"").unwrap();
            let found = find_preload(None, &root.join(executable)).unwrap();
            assert_eq!(found, library.canonicalize().unwrap());
            assert_eq!(find_preload(Some(library.as_os_str()), Path::new("/x")).unwrap(), found);
            std::fs::remove_dir_all(&root).unwrap();
        };
        check("bin/libfarfield_preload.so", "bin/farfield");
        check("lib/farfield/libfarfield_preload.so", "bin/farfield");
        check("release/libfarfield_preload.so", "release/farfield");
        let absent = find_preload(None, &root.join("bin/farfield")).unwrap_err().to_string();
        assert!(absent.contains("cargo build --release -p farfield-preload"), "{absent}");
        assert!(absent.contains(&*root.to_string_lossy()));
    }

    #[test]
    fn paths_that_the_loader_would_split_are_refused() {
        let root = std::env::temp_dir().join(format!("farfield preload-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let library = root.join(LIBRARY);
        std::fs::write(&library, b"").unwrap();
        assert!(matches!(
            find_preload(Some(library.as_os_str()), Path::new("/x")),
            Err(JobRefusal::PreloadPath { .. })
        ));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn libraries_that_were_preloaded_before_stay() {
        let ours = Path::new("/lib/ours.so");
        assert_eq!(prepended(ours, None), "/lib/ours.so");
        assert_eq!(prepended(ours, Some(OsStr::new(""))), "/lib/ours.so");
        assert_eq!(prepended(ours, Some(OsStr::new("a.so b.so"))), "/lib/ours.so:a.so b.so");
    }
}
