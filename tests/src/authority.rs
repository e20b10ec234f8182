//! Certificates of an authority that a test makes, and servers with TLS.

use crate::{Command, Scratch, Server, farfield};
use std::path::PathBuf;

/// An authority, a certificate for servers at 127.0.0.1, and one for a client.
#[derive(Debug)]
pub struct TestAuthority {
    folder: PathBuf,
}

impl TestAuthority {
    /// Returns those of a scratch folder; makes them if they are not there yet (`farfield cert`).
    pub fn of(scratch: &Scratch) -> TestAuthority {
        let authority = TestAuthority { folder: scratch.path().join("certs") };
        if !authority.folder.exists() {
            let (farfield, at) = (farfield(), authority.folder.clone());
            for words in [&["init"][..], &["server", "127.0.0.1"], &["client", "alice"]] {
                let all = [farfield.as_os_str(), "cert".as_ref(), words[0].as_ref(), at.as_os_str()];
                let all = all.into_iter().chain(words[1..].iter().map(AsRef::as_ref));
                let ended = Command::new(&scratch.folder("cert"), all).run();
                assert_eq!(ended.code, 0, "{}", ended.errors);
            }
        }
        authority
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().expect("an ASCII path").to_owned()
    }

    /// The URL with which the client reaches a server at `url`.
    pub fn client_url(&self, url: &str) -> String {
        format!("{url}?ca={}&cert={}&key={}", self.path("ca.pem"), self.path("alice.pem"), self.path("alice.key"))
    }
}

impl Server {
    /// Starts one with TLS at `listen`, `tls://127.0.0.1:0` or where another one was; a URL of a client is taken, too.
    pub fn start_tls(scratch: &Scratch, name: &str, listen: &str, options: &[&str]) -> Server {
        let authority = TestAuthority::of(scratch);
        let [certificate, key, ca] = ["127.0.0.1.pem", "127.0.0.1.key", "ca.pem"].map(|name| authority.path(name));
        let own: [&str; 6] = ["--tls-cert", &certificate, "--tls-key", &key, "--tls-client-ca", &ca];
        let listen = listen.split('?').next().unwrap_or(listen).to_owned();
        let server = Server::start_at(scratch, name, listen, own.iter().chain(options));
        let url = authority.client_url(server.url());
        server.reached_at(url)
    }
}
