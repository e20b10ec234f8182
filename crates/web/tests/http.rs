//! The answering side as clients meet it, over real sockets.
//!
//! Guards against clients that make a server hold memory or threads: long heads, slow heads, many
//! connections, and readers that do not read. Also against answers that let a page load strangers.

use farfield_web::{ApiClient, EventChannel, FetchError, HttpLimits, StatusCode, WebRequest, WebResponse};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time that only a failing test uses up.
const PATIENCE: Duration = Duration::from_secs(30);

struct TestServer {
    address: SocketAddr,
    channel: Arc<EventChannel>,
    is_over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TestServer {
    fn start(limits: HttpLimits) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (channel, is_over) = (Arc::new(EventChannel::default()), Arc::new(AtomicBool::new(false)));
        let (events, over) = (channel.clone(), is_over.clone());
        let thread = std::thread::spawn(move || {
            let answer = |request: &WebRequest| answer(request, &events);
            farfield_web::serve(&listener, &limits, || over.load(Ordering::Relaxed), answer).unwrap();
        });
        TestServer { address, channel, is_over, thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes and returns all that comes back until the server closes.
    fn ask(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut stream = self.connect();
        // A server that refuses may have closed already.
        let _ = stream.write_all(bytes.as_ref());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn answer(request: &WebRequest, channel: &Arc<EventChannel>) -> WebResponse {
    match request.uri().path() {
        "/events" => farfield_web::events(channel.clone()),
        "/echo" => farfield_web::text(StatusCode::OK, String::from_utf8_lossy(request.body())),
        "/slow" => {
            std::thread::sleep(Duration::from_millis(500));
            farfield_web::text(StatusCode::OK, "late")
        }
        "/" => farfield_web::text(StatusCode::OK, "front page"),
        _ => farfield_web::text(StatusCode::NOT_FOUND, "no such page"),
    }
}

fn quick() -> HttpLimits {
    HttpLimits {
        request_within: Duration::from_millis(300),
        response_within: Duration::from_millis(300),
        idle_within: Duration::from_millis(300),
        ..HttpLimits::default()
    }
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn requests_are_answered_one_after_the_other_on_one_connection() {
    let server = TestServer::start(quick());
    let answer = server.ask(
        "GET / HTTP/1.1\r\nHost: x\r\n\r\nPOST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloHEAD / \
         HTTP/1.1\r\nHost: x\r\n\r\nPOST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nGET /x \
         HTTP/1.1\r\nConnection: close\r\n\r\n",
    );
    assert_eq!(answer.matches("HTTP/1.1 200 OK\r\n").count(), 4, "{answer}");
    assert_eq!(answer.matches("front page\n").count(), 1, "HEAD has no body: {answer}");
    assert!(answer.contains("hello\n") && answer.contains("abc\n"), "{answer}");
    assert!(answer.contains("HTTP/1.1 404 Not Found\r\n") && answer.ends_with("no such page\n"), "{answer}");
}

#[test]
fn every_answer_forbids_what_comes_from_elsewhere() {
    let server = TestServer::start(quick());
    for path in ["/", "/x"] {
        let answer = server.ask(format!("GET {path} HTTP/1.0\r\n\r\n"));
        for header in [
            "content-security-policy: default-src 'none'; script-src 'self';",
            "require-trusted-types-for 'script'",
            "x-content-type-options: nosniff",
            "cross-origin-resource-policy: same-origin",
            "cache-control: no-store",
        ] {
            assert!(answer.contains(header), "{header}: {answer}");
        }
        assert!(!answer.to_lowercase().contains("set-cookie") && !answer.contains("access-control-allow"), "{answer}");
    }
}

#[test]
fn what_is_no_request_is_refused() {
    let server = TestServer::start(quick());
    let check = |bytes: &[u8], status: &str| {
        let answer = server.ask(bytes);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{}: {answer}", bytes.escape_ascii());
    };
    check(b"rubbish\r\n\r\n", "400");
    check(b"\xff\x00\r\n\r\n", "400");
    check(b"GET / HTTP/2\r\n\r\n", "400");
    check(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "400");
    check(b"POST /echo HTTP/1.1\r\nContent-Length: x\r\n\r\n", "400");
    check(b"POST /echo HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", "4");
    check(format!("POST /echo HTTP/1.1\r\nContent-Length: 10000\r\n\r\n{}", "x".repeat(10_000)).as_bytes(), "413");
    check(format!("GET /{} HTTP/1.1\r\n", "x".repeat(8192)).as_bytes(), "431");
    check(format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(200)).as_bytes(), "431");
}

#[test]
fn a_request_that_does_not_come_in_time_ends_its_connection() {
    let server = TestServer::start(quick());
    let start = Instant::now();
    assert!(server.ask("GET / HTTP/1.1\r\nHost: ").starts_with("HTTP/1.1 408 "));
    assert!(server.ask("POST /echo HTTP/1.1\r\nContent-Length: 9\r\n\r\n").starts_with("HTTP/1.1 408 "));
    assert_eq!(server.ask(""), "", "nothing is said to a client that says nothing");
    // One byte now and then does not extend the time.
    let mut stream = server.connect();
    let mut sent = 0;
    while stream.write_all(b"G").is_ok() && start.elapsed() < PATIENCE {
        sent += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(sent < 1000, "the connection has ended: {sent}");
}

#[test]
fn clients_beyond_the_limit_are_told_so_and_places_come_back() {
    let server = TestServer::start(HttpLimits { connections: 2, request_within: PATIENCE, ..quick() });
    let held: Vec<_> = (0..2).map(|_| server.connect()).collect();
    until("both places are taken", || {
        server.ask("GET / HTTP/1.1\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 503 ")
    });
    drop(held);
    until("a place is free", || server.ask("GET / HTTP/1.1\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

#[test]
fn events_come_in_order_and_streams_are_bounded() {
    let server = TestServer::start(HttpLimits { event_streams: 1, ..quick() });
    let mut stream = server.connect();
    stream.write_all(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    until("it reads", || server.channel.readers() == 1);
    let refused = server.ask("GET /events HTTP/1.1\r\nConnection: close\r\n\r\n");
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    server.channel.publish("one".into(), "to one");
    let mut answer = String::new();
    let mut read_until = |end: &str| {
        let mut piece = [0; 1024];
        while !answer.contains(end) {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{answer}");
            answer += std::str::from_utf8(&piece[..count]).unwrap();
        }
    };
    read_until("data: one");
    server.channel.publish("two".into(), "to two");
    read_until("data: to two");
    assert!(
        answer.contains("content-type: text/event-stream") && answer.contains("event: snapshot\nid: 1\n"),
        "{answer}"
    );
    drop(stream);
    until("that it is gone is noticed without an event", || server.channel.readers() == 0);
    let old = server.ask("GET /events HTTP/1.0\r\n\r\n");
    assert!(old.starts_with("HTTP/1.1 505 "), "{old}");
}

#[test]
fn a_reader_that_does_not_read_is_dropped() {
    let server = TestServer::start(quick());
    let mut stream = server.connect();
    stream.write_all(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    until("it reads", || server.channel.readers() == 1);
    // More than buffers of the kernel hold.
    let large = "x".repeat(1 << 20);
    until("it is dropped", || {
        server.channel.publish(String::new(), &large);
        server.channel.readers() == 0
    });
}

#[test]
fn the_client_bounds_time_and_size_and_follows_nobody() {
    let server = TestServer::start(HttpLimits { request_within: PATIENCE, ..quick() });
    let client = ApiClient::new(&format!("http://{}", server.address), None).unwrap();
    let get = |path: &str, within: Duration, most: u64| client.get(path, None, within, most);
    assert_eq!(get("/", PATIENCE, 100).unwrap().body, b"front page\n");
    assert_eq!(get("/x", PATIENCE, 100).unwrap().status, StatusCode::NOT_FOUND);
    assert!(matches!(get("/", PATIENCE, 5), Err(FetchError::Transport(_))));
    assert!(matches!(get("/slow", Duration::from_millis(50), 100), Err(FetchError::Transport(_))));
    let nobody = ApiClient::new("https://127.0.0.1:1", None).unwrap();
    assert!(nobody.get("/", None, PATIENCE, 100).is_err());
}
