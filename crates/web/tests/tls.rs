//! Server and client over TLS, over real sockets.
//!
//! Guards against a client that believes a stranger, or waits for ever; and against clients that hold a
//! server in a handshake.

use farfield_web::{
    ApiClient, FetchError, HttpLimits, Method, StatusCode, TlsIdentity, WebRequest, WebResponse, bytes, serve_tls,
};
use rcgen::{CertificateParams, KeyPair};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time that only a failing test uses up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Folder with certificates for 127.0.0.1, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-web-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Writes a certificate that signs itself, and its key.
    fn issue(&self, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
        let paths = [format!("{name}.pem"), format!("{name}.key")].map(|file| self.0.join(file));
        std::fs::write(&paths[0], certificate.pem()).unwrap();
        std::fs::write(&paths[1], key.serialize_pem()).unwrap();
        let [certificate, key] = paths;
        (certificate, key)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct TlsServer {
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TlsServer {
    fn start(certificate: &Path, key: &Path, limits: HttpLimits) -> TlsServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let identity = TlsIdentity::read(certificate, key).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let thread = std::thread::spawn(move || {
            serve_tls(&listener, &limits, &identity, || over.load(Ordering::Relaxed), echo).unwrap();
        });
        TlsServer { address, is_over, thread: Some(thread) }
    }

    fn client(&self, authorities: &Path) -> ApiClient {
        ApiClient::new(&format!("https://{}", self.address), Some(authorities)).unwrap()
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn echo(request: &WebRequest) -> WebResponse {
    match request.uri().path() {
        "/lines" => bytes(StatusCode::OK, "text/plain", &b"one\n\nthree\ncut"[..]),
        "/refused" => bytes(StatusCode::FORBIDDEN, "text/plain", &b"no"[..]),
        _ => bytes(StatusCode::OK, "application/octet-stream", request.body().clone()),
    }
}

fn limits() -> HttpLimits {
    HttpLimits { body_bytes: 1 << 20, idle_within: Duration::from_millis(200), ..HttpLimits::default() }
}

#[test]
fn messages_come_whole_and_a_refusal_is_an_answer() {
    let folder = Folder::new("whole");
    let (certificate, key) = folder.issue("server");
    let server = TlsServer::start(&certificate, &key, limits());
    let client = server.client(&certificate);
    let message: Vec<u8> = (0..900_000u32).map(|index| index.to_le_bytes()[index as usize % 4]).collect();
    for _ in 0..3 {
        let answer = client.send(Method::PUT, "/", Some("token"), &message, PATIENCE, 1 << 20).unwrap();
        assert!(answer.status == StatusCode::OK && answer.body == message);
    }
    let refused = client.get("/refused", None, PATIENCE, 1 << 20).unwrap();
    assert_eq!((refused.status, refused.body.as_slice()), (StatusCode::FORBIDDEN, &b"no"[..]));
    assert!(client.get("/lines", None, PATIENCE, 3).is_err(), "more than the client takes");
    let large = client.send(Method::POST, "/", None, &vec![0; (1 << 20) + 1], PATIENCE, 1 << 20);
    assert!(large.is_err() || large.is_ok_and(|answer| answer.status == StatusCode::PAYLOAD_TOO_LARGE));
}

#[test]
fn lines_come_one_by_one_and_are_bounded() {
    let folder = Folder::new("lines");
    let (certificate, key) = folder.issue("server");
    let server = TlsServer::start(&certificate, &key, limits());
    let client = server.client(&certificate);
    let mut lines = client.lines("/lines", None, PATIENCE).unwrap();
    assert_eq!(lines.next_line(10).unwrap().as_deref(), Some(&b"one"[..]));
    assert_eq!(lines.next_line(10).unwrap().as_deref(), Some(&b""[..]));
    assert!(lines.next_line(3).is_err(), "it is longer");
    let mut lines = client.lines("/lines", None, PATIENCE).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| lines.next_line(10).transpose()).take(4).collect();
    assert!(all[..3].iter().all(Result::is_ok) && all[3].is_err(), "the last one is cut: {all:?}");
    assert!(matches!(client.lines("/refused", None, PATIENCE), Err(FetchError::Status(StatusCode::FORBIDDEN))));
}

#[test]
fn strangers_are_not_believed_and_files_of_nonsense_are_named() {
    let folder = Folder::new("strangers");
    let ((certificate, key), (other, other_key)) = (folder.issue("server"), folder.issue("other"));
    let server = TlsServer::start(&certificate, &key, limits());
    assert!(server.client(&other).get("/", None, PATIENCE, 100).is_err(), "another authority");
    let plain = ApiClient::new(&format!("http://{}", server.address), None).unwrap();
    assert!(plain.get("/", None, PATIENCE, 100).is_err(), "no TLS");
    assert!(server.client(&certificate).get("/", None, PATIENCE, 100).is_ok());
    for (certificate, key, named) in [
        (&key, &key, "server.key"),
        (&certificate, &certificate, "server.pem"),
        (&certificate, &other_key, "other.key"),
        (&folder.0.join("none"), &key, "none"),
    ] {
        let error = TlsIdentity::read(certificate, key).unwrap_err().to_string();
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[test]
fn a_handshake_that_does_not_end_is_ended() {
    let folder = Folder::new("slow");
    let (certificate, key) = folder.issue("server");
    let limits = HttpLimits { connections: 1, request_within: Duration::from_millis(300), ..limits() };
    let server = TlsServer::start(&certificate, &key, limits);
    let mut silent = TcpStream::connect(server.address).unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    // The head of a record of TLS, and then one byte at a time: each of them is in time, and all together are not.
    let _ = silent.write_all(&[22, 3, 1, 2, 0]);
    let mut slow = silent.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        let deadline = Instant::now() + PATIENCE;
        while slow.write_all(&[1]).is_ok() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let started = Instant::now();
    let mut rest = Vec::new();
    let _ = silent.read_to_end(&mut rest);
    assert!(started.elapsed() < PATIENCE / 2, "it was held for {:?}", started.elapsed());
    writer.join().unwrap();
    // Its place is free again, as soon as the server has noticed.
    let deadline = Instant::now() + PATIENCE;
    while server.client(&certificate).get("/", None, PATIENCE, 100).is_err() {
        assert!(Instant::now() < deadline, "there is no place");
    }
}
