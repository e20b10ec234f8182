//! `farfield top --serve`, as a browser's requests and another dashboard meet it.
//!
//! Danger: a page of a stranger that reads or changes jobs, a change without the token, and numbers that are old.
//! What the page makes of the answers is tested in a browser (`tests/browser`).

mod common;

use common::{DEADLINE, Folder, Running, farfield, run, text, until};
use farfield_web::{ApiClient, Method};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TOKEN: &str = "0123456789abcdef-token";
/// An argument of a job, as a stranger could choose it.
const HTML: &str = "<img src=x onerror=alert(1)>";

struct TestDashboard {
    running: Running,
    url: String,
}

impl TestDashboard {
    fn start(command: &mut Command) -> TestDashboard {
        let running = Running::start(command.stderr(Stdio::null()));
        let url = running.line();
        TestDashboard { running, url }
    }

    fn address(&self) -> &str {
        self.url.trim_start_matches("http://").trim_end_matches('/')
    }

    /// Sends a request and returns the whole answer. Each line of `head` ends with a line break.
    fn ask(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let length = body.len();
        let request = format!("{head}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: {}\r\n", self.address()), "")
    }

    fn json(&self, path: &str) -> serde_json::Value {
        let answer = self.get(path);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        serde_json::from_str(body).unwrap()
    }

    /// Posts a change as the page does.
    fn post(&self, path: &str, token: &str, body: &serde_json::Value) -> String {
        let address = self.address();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: application/json\r\n"
        );
        self.ask(&head, &body.to_string())
    }

    /// Returns the first event of the stream: the snapshot of all rows.
    fn rows(&self) -> serde_json::Value {
        let stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(&stream, "GET /events HTTP/1.1\r\nHost: {}\r\n\r\n", self.address()).unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0);
            if line.starts_with("HTTP/1.1 503 ") {
                // Streams that were just closed are noticed within a second.
                std::thread::sleep(Duration::from_millis(200));
                return self.rows();
            }
        }
        let mut event = String::new();
        while !event.ends_with("\n\n") {
            let mut size = String::new();
            stream.read_line(&mut size).unwrap();
            let mut chunk = vec![0; usize::from_str_radix(size.trim(), 16).unwrap() + 2];
            stream.read_exact(&mut chunk).unwrap();
            event += std::str::from_utf8(&chunk[..chunk.len() - 2]).unwrap();
        }
        let data = event.strip_prefix("event: snapshot\n").and_then(|event| event.split_once("data: ")).unwrap().1;
        serde_json::from_str::<serde_json::Value>(data).unwrap()["rows"].clone()
    }
}

/// Writes a file that nobody else can read. Returns its path.
fn private(folder: &Folder, name: &str, text: &str) -> String {
    let path = folder.path(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn job(folder: &Folder) -> Running {
    let mut command = run(folder, &["--quiet"], &["sh", "-c", "echo $$; read line; exit 5", HTML]);
    let job = Running::start(command.stdin(Stdio::piped()).stderr(Stdio::null()));
    job.line();
    job
}

#[test]
fn a_job_appears_changes_and_ends_on_the_page() {
    let folder = Folder::new("dashboard");
    let token = private(&folder, "token", TOKEN);
    let dashboard = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0", "--allow-changes", &token]));
    let mut job = job(&folder);
    let (pid, id) = (job.child.id(), format!("0-j-{}", job.child.id()));
    until("the job is there", || dashboard.rows()[&id].is_object());
    let row = dashboard.rows()[&id].clone();
    assert_eq!((&row["kind"], &row["state"], &row["limit"]), (&"job".into(), &"ok".into(), &(64u64 << 20).into()));
    assert!(row["name"].as_str().unwrap().contains(HTML), "texts arrive as they are: {row}");
    let is_ours = |all: serde_json::Value| {
        all["jobs"]
            .as_array()
            .unwrap()
            .iter()
            .any(|one| one["runner_pid"] == pid && one["near_limit_bytes"] == 64 << 20)
    };
    assert!(is_ours(dashboard.json("/api/top")));
    assert_eq!(dashboard.json(&format!("/api/row?id={id}"))["runner_pid"], pid);
    until("its history begins", || {
        let part = dashboard.json(&format!("/api/history?id={id}&since=0"));
        part["every_ms"] == 5000 && !part["samples"].as_array().unwrap().is_empty()
    });
    assert!(dashboard.get("/metrics").contains(&format!("runner=\"{pid}\"")));
    until("its server is asked", || {
        dashboard
            .rows()
            .as_object()
            .unwrap()
            .values()
            .any(|row| row["kind"] == "server" && row["capacity"].as_u64() > Some(0))
    });

    let size = |size: &str| serde_json::json!({"pid": pid, "size": size});
    let refused = dashboard.post("/api/near", "wrong", &size("96M"));
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    let refused = dashboard.post("/api/near", TOKEN, &size("1M"));
    assert!(refused.starts_with("HTTP/1.1 400 ") && refused.contains("16.0 MiB"), "{refused}");
    let changed = dashboard.post("/api/near", TOKEN, &size("96M"));
    assert!(changed.starts_with("HTTP/1.1 200 ") && changed.contains("96.0 MiB"), "{changed}");
    until("the budget is another one", || dashboard.rows()[&id]["limit"] == 96 << 20);
    let place = folder.path("place");
    std::fs::create_dir(&place).unwrap();
    let url = format!("ssd:{}?size=64M", place.display());
    let moved = dashboard.post("/api/pool", TOKEN, &serde_json::json!({"pid": pid, "url": url}));
    assert!(moved.starts_with("HTTP/1.1 200 "), "{moved}");
    until("the pool is another one", || dashboard.rows()[&id]["pool"] == url.as_str());

    drop(job.child.stdin.take());
    assert_eq!(job.wait().code(), Some(5));
    until("its end is shown", || dashboard.rows()[&id]["state"] == "ended");
}

#[test]
fn strangers_pages_and_changes_without_permission_are_refused() {
    let dashboard = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0"]));
    let status = |head: &str| dashboard.ask(head, "").split(' ').nth(1).unwrap().to_owned();
    let own = dashboard.address();
    assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: {own}\r\n")), "200");
    assert_eq!(status("GET / HTTP/1.1\r\nHost: localhost:8000\r\n"), "200", "by a tunnel");
    assert_eq!(status("GET /api/top HTTP/1.1\r\nHost: rebound.example:7404\r\n"), "403");
    assert_eq!(status("GET /api/top HTTP/1.1\r\n"), "403");
    assert_eq!(status(&format!("GET /api/top HTTP/1.1\r\nHost: {own}\r\nSec-Fetch-Site: cross-site\r\n")), "403");
    assert_eq!(status(&format!("POST /api/near HTTP/1.1\r\nHost: {own}\r\n")), "403");
    let read_only = dashboard.post("/api/near", TOKEN, &serde_json::json!({"pid": 1, "size": "1G"}));
    assert!(read_only.starts_with("HTTP/1.1 403 ") && read_only.contains("--allow-changes"), "{read_only}");
    let page = dashboard.get("/");
    assert!(page.contains("default-src 'none'") && !page.contains("http://") && !page.contains("https://"), "{page}");
    for path in ["/page.js", "/page.css", "/icon.svg", "/api/about"] {
        assert!(dashboard.get(path).starts_with("HTTP/1.1 200 "), "{path}");
    }
    assert!(dashboard.get("/../etc/passwd").starts_with("HTTP/1.1 404 "));
}

#[test]
fn other_machines_read_it_over_tls_with_a_token() {
    let folder = Folder::new("encrypted");
    let at = |name: &str| folder.path(&format!("certs/{name}")).to_str().unwrap().to_owned();
    for (kind, name) in [("init", None), ("server", Some("127.0.0.1"))] {
        let made = farfield().args(["cert", kind, folder.path("certs").to_str().unwrap()]).args(name).output().unwrap();
        assert!(made.status.success(), "{}", text(&made));
    }
    const READ_TOKEN: &str = "fedcba9876543210-token";
    let (readers, changes) = (private(&folder, "readers", READ_TOKEN), private(&folder, "changes", TOKEN));
    let (certificate, key) = (at("127.0.0.1.pem"), at("127.0.0.1.key"));
    let dashboard = TestDashboard::start(farfield().args([
        "top",
        "--serve",
        "0.0.0.0:0",
        "--tls-cert",
        &certificate,
        "--tls-key",
        &key,
        "--read-token",
        &readers,
        "--allow-changes",
        &changes,
    ]));
    assert!(dashboard.url.starts_with("https://0.0.0.0:"), "{}", dashboard.url);
    let url = dashboard.url.replace("0.0.0.0", "127.0.0.1");
    let client = ApiClient::new(&url, Some(at("ca.pem").as_ref())).unwrap();
    let get = |path: &str, token| client.get(path, token, DEADLINE, 1 << 20).unwrap().status.as_u16();
    for path in ["/", "/page.js", "/events", "/api/top", "/metrics"] {
        assert_eq!(get(path, None), 401, "{path}");
    }
    assert_eq!([get("/", Some(TOKEN)), get("/", Some("")), get("/", Some(READ_TOKEN))], [401, 401, 200]);
    until("the first look is over", || get("/api/top", Some(READ_TOKEN)) == 200);
    let change = client.send(Method::POST, "/api/near", Some(TOKEN), b"{}", DEADLINE, 1 << 20).unwrap();
    assert_eq!(change.status.as_u16(), 403, "it does not say on which page it began");
    let stranger = ApiClient::new(&url, None).unwrap();
    assert!(stranger.get("/", Some(READ_TOKEN), DEADLINE, 1 << 20).is_err(), "nobody vouches for it");
    // Another dashboard joins it with the token, and is told without.
    let authority = at("ca.pem");
    let join = ["top", "--serve", "127.0.0.1:0", "--join", &url, "--join-ca", &authority];
    let with = TestDashboard::start(farfield().args(join).args(["--join-token", &readers]));
    let without = TestDashboard::start(farfield().args(join));
    until("it is joined", || with.rows()["1-m"]["state"] == "ok");
    until("it says what it wants", || without.rows()["1-m"].to_string().contains("--join-token"));
}

#[test]
fn certificate_and_tokens_are_read_again_on_sighup() {
    const OLD: &str = "0123456789abcdef-old";
    const NEW: &str = "0123456789abcdef-new";
    let folder = Folder::new("exchanged");
    let at = |name: &str| folder.path(name).to_str().unwrap().to_owned();
    let install = common::exchangeable_certificates(&folder);
    install("old");
    let readers = private(&folder, "readers", OLD);
    let mut command = farfield();
    command.args(["top", "--serve", "127.0.0.1:0", "--tls-cert", &at("pem"), "--tls-key", &at("key")]);
    let mut running = Running::start(command.args(["--read-token", &readers]).stderr(Stdio::piped()));
    let mut said = BufReader::new(running.child.stderr.take().unwrap()).lines();
    let url = running.line();
    // Each question has a connection of its own: those that are open keep their certificate.
    let status = |authority: &str, token| {
        let client = ApiClient::new(&url, Some(at(&format!("{authority}/ca.pem")).as_ref())).unwrap();
        client.get("/", Some(token), DEADLINE, 1 << 20).map(|answer| answer.status.as_u16()).ok()
    };
    assert_eq!([status("old", OLD), status("old", NEW), status("new", OLD)], [Some(200), Some(401), None]);
    let mut after_sighup = |expected: &str| {
        running.signal(libc::SIGHUP);
        let line = said.next().unwrap().unwrap();
        assert!(line.contains(expected), "{line}");
    };
    // A key that is not the certificate's, and a token that is too short, change nothing.
    std::fs::copy(at("new/127.0.0.1.key"), at("key")).unwrap();
    after_sighup("key");
    install("old");
    private(&folder, "readers", "short");
    after_sighup("openssl rand");
    assert_eq!(status("old", OLD), Some(200));
    install("new");
    private(&folder, "readers", NEW);
    after_sighup("read again");
    assert_eq!([status("new", NEW), status("new", OLD), status("old", NEW)], [Some(200), Some(401), None]);
}

#[test]
fn a_dashboard_shows_the_jobs_of_another_one_and_that_it_is_gone() {
    let folder = Folder::new("joined");
    let job = job(&folder);
    let mut other = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0"]));
    let both = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0", "--join", &other.url]));
    let id = format!("1-j-{}", job.child.id());
    until("the job is there", || both.rows()[&id].is_object());
    let rows = both.rows();
    assert_eq!((&rows[&id]["is_here"], &rows["1-m"]["state"]), (&false.into(), &"ok".into()), "{rows}");
    other.running.signal(libc::SIGKILL);
    other.running.wait();
    until("it is unreachable", || both.rows()["1-m"]["state"] == "unreachable");
    let rows = both.rows();
    assert!(rows["1-m"]["findings"][0]["advice"].as_str().unwrap().contains("ssh -N -L"), "{rows}");
    assert!(rows[&id].is_object(), "what was known is still shown");
}

#[test]
fn a_server_and_its_tenants_are_shown_by_its_metrics() {
    let folder = Folder::new("tenants");
    let tenants = private(&folder, "tenants", "alice a-secret-token 1M\nbob b-secret-token -\n");
    let mut command = farfield();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-format", "json"]);
    let server = Running::start(command.args(["--token-file", &tenants]).stderr(Stdio::null()));
    let ready: serde_json::Value = serde_json::from_str(&server.line()).unwrap();
    let metrics = ready["metrics"].as_str().unwrap();
    let dashboard = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0", "--join", metrics]));
    until("the tenants are there", || dashboard.rows()["1-t-1"].is_object());
    let rows = dashboard.rows();
    let alice = &rows["1-t-0"];
    assert_eq!((&alice["name"], &alice["quota"], &alice["state"]), (&"alice".into(), &(1 << 20).into(), &"ok".into()));
    assert!(!rows.to_string().contains("secret"), "{rows}");
}

#[test]
fn what_cannot_be_served_is_refused_with_what_to_do() {
    let folder = Folder::new("refused");
    let open = folder.path("open");
    std::fs::write(&open, TOKEN).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644)).unwrap();
    let short = private(&folder, "short", "secret");
    let good = private(&folder, "good", TOKEN);
    let here = "127.0.0.1:0";
    let check = |arguments: &[&str], part: &str| {
        let output = farfield().args(["top", "--serve"]).args(arguments).output().unwrap();
        assert!(!output.status.success() && text(&output).contains(part), "{}", text(&output));
    };
    check(&["0.0.0.0:7404"], "ssh -N -L 7404:127.0.0.1:7404");
    check(&["[::]:7404"], "--tls-cert, --tls-key and --read-token");
    check(&["[::]:7404", "--read-token", &good], "--tls-cert, --tls-key and --read-token");
    check(&[here, "--read-token", &short], "openssl rand");
    check(&[here, "--tls-cert", &good], "--tls-key");
    check(&[here, "--tls-cert", &good, "--tls-key", &good], "no certificate");
    check(&[here, "4711"], "memory servers only");
    check(&[here, "--join", "ftp://x"], "http://HOST:PORT");
    check(&[here, "--join", "https://x"], "--join-ca");
    check(&[here, "--allow-changes", open.to_str().unwrap()], "chmod 600");
    check(&[here, "--allow-changes", &short], "openssl rand");
    check(&[here, "--once"], "--once");
}

/// Jobs, readers and length of the measurement.
const MEASURED_JOBS: usize = 200;
const MEASURED_READERS: usize = 5;
const MEASURED_FOR: Duration = Duration::from_secs(60);

#[test]
#[ignore = "helper: the program of a job whose numbers change each second, without far memory"]
fn helper_whose_numbers_change() {
    use std::sync::atomic::Ordering::Relaxed;
    let Some(path) = std::env::var_os(farfield_pager::config::ENV_CONTROL) else { return };
    let control = farfield_pager::runner::ControlBlock::open(path.as_ref()).unwrap();
    let slot = control.take_slot(std::process::id(), farfield_os::process::identity()).unwrap();
    // SAFETY: only asks.
    let parent = || unsafe { libc::getppid() };
    let (runner, mut random) = (parent(), fastrand::Rng::with_seed(std::process::id().into()));
    while parent() == runner {
        for count in [&slot.counters.faults, &slot.counters.pages_in, &slot.counters.fault_ns[60]] {
            count.fetch_add(random.u64(100..1000), Relaxed);
        }
        control.far_bytes.fetch_add(4096, Relaxed);
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Returns the processor time of a process.
fn processor_time(pid: u32) -> Duration {
    const TICKS_PER_S: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = [11, 12].map(|index: usize| fields[index].parse::<u64>().unwrap()).iter().sum();
    Duration::from_millis(ticks * 1000 / TICKS_PER_S)
}

/// Reads events as a page does, until `is_over`. Returns the number of bytes.
fn read_events(address: &str, is_over: &AtomicBool) -> usize {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let (mut total, mut piece) = (0, vec![0; 1 << 16]);
    while !is_over.load(Ordering::Relaxed) {
        total += stream.read(&mut piece).unwrap();
    }
    total
}

#[test]
#[ignore = "measurement of a minute, for an optimised build on a machine that is not busy: docs/design/web.md"]
fn measure_pages_that_look_at_many_jobs() {
    let folder = Folder::new("measured");
    let url = format!("unix:{}", folder.path("socket").display());
    let mut command = farfield();
    command.args(["serve", "--listen", &url, "--log-format", "json"]);
    let server = Running::start(command.stderr(Stdio::null()));
    server.line();
    let me = std::env::current_exe().unwrap();
    let words = [me.to_str().unwrap(), "--exact", "helper_whose_numbers_change", "--ignored", "--nocapture", "-q"];
    let mut command = run(&folder, &["--quiet", "--far", &url], &words);
    let start = || Running::start(command.stdin(Stdio::null()).stderr(Stdio::null()));
    let jobs: Vec<_> = std::iter::repeat_with(start).take(MEASURED_JOBS).collect();
    let dashboard = TestDashboard::start(farfield().args(["top", "--serve", "127.0.0.1:0"]));
    let pid = dashboard.running.child.id();
    let of_kind = |kind: &str| dashboard.rows().as_object().unwrap().values().filter(|row| row["kind"] == kind).count();
    until("all jobs are there", || of_kind("job") >= MEASURED_JOBS);

    let (is_over, address) = (AtomicBool::new(false), dashboard.address());
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..MEASURED_READERS).map(|_| scope.spawn(|| read_events(address, &is_over))).collect();
        let (began, before) = (Instant::now(), processor_time(pid));
        while began.elapsed() < MEASURED_FOR {
            // As often as pages ask for the history.
            (0..MEASURED_READERS).for_each(|_| drop(dashboard.json("/api/history?id=&since=0")));
            std::thread::sleep(Duration::from_secs(5));
        }
        let share = (processor_time(pid) - before).as_secs_f64() / began.elapsed().as_secs_f64();
        let began = Instant::now();
        ["/", "/page.css", "/page.js"].iter().for_each(|path| drop(dashboard.get(path)));
        let count = dashboard.rows().as_object().unwrap().len();
        let first = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let bytes: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        println!(
            "{} jobs, {MEASURED_READERS} readers: {:.2} % of a processor, {} KiB/s to each; page and {count} rows in {first:?}",
            jobs.len(),
            100.0 * share,
            bytes / MEASURED_READERS / 1024 / MEASURED_FOR.as_secs() as usize,
        );
    });
}
