//! A folder of one test, gone afterwards.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A new folder in the temporary folder of the machine; removed when dropped. With `FARFIELD_KEEP=1` it stays, and its path is
/// printed, so that a failure can be looked at.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// A fresh one; `name` is for people.
    pub fn new(name: &str) -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ff-test-{}-{number}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the temporary folder can be written");
        // The path of the compiled programs must be open to a job that gives up root.
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("the folder is ours");
        Scratch { path }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A new folder inside.
    pub fn folder(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        std::fs::create_dir_all(&path).expect("a folder inside a scratch folder");
        path
    }

    /// A file inside, with this content.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path.join(name);
        std::fs::write(&path, content).expect("room in the temporary folder");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::env::var_os("FARFIELD_KEEP").is_some() {
            println!("kept: {}", self.path.display());
            return;
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
