//! Certificates of a test, in a folder that goes with it.

use farfield_server::ServerFiles;
use farfield_tls::authority::{Authority, Issued, Purpose, Validity};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// An authority, and the certificates of a server at this machine and of the client `alice`.
pub(crate) struct Certificates {
    folder: PathBuf,
    authority: Authority,
}

impl Certificates {
    pub(crate) fn new() -> Certificates {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("farfield-certificates-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        let (authority, own) = Authority::create(lasting()).unwrap();
        let certificates = Certificates { folder, authority };
        certificates.put("ca", &own);
        certificates.issue(Purpose::Server, "server", "127.0.0.1");
        certificates.issue(Purpose::Client, "client", "alice");
        certificates
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn put(&self, name: &str, issued: &Issued) {
        std::fs::write(self.path(&format!("{name}.pem")), &issued.certificate).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), &issued.key).unwrap();
    }

    /// Makes a certificate with this name, in the files NAME.pem and NAME.key.
    pub(crate) fn issue(&self, purpose: Purpose, file: &str, name: &str) {
        self.put(file, &self.authority.issue(purpose, &[name.to_owned()], lasting()).unwrap());
    }

    /// Files of the server, which lets in clients of the authority.
    pub(crate) fn server(&self) -> ServerFiles {
        ServerFiles {
            certificate: self.path("server.pem"),
            key: self.path("server.key"),
            client_ca: Some(self.path("ca.pem")),
        }
    }

    /// URL of a server at `endpoint`, for the client whose files are CLIENT.pem and CLIENT.key.
    pub(crate) fn url(&self, endpoint: &str, client: &str) -> String {
        let path = |name: &str| self.path(name).display().to_string();
        let (ca, certificate, key) = (path("ca.pem"), path(&format!("{client}.pem")), path(&format!("{client}.key")));
        format!("{endpoint}?ca={ca}&cert={certificate}&key={key}")
    }
}

fn lasting() -> Validity {
    Validity::lasting(Duration::from_secs(86_400))
}

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
