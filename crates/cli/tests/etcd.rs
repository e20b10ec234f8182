//! `farfield share run --etcd`: programs on several nodes, none of which is special.
//!
//! Danger: programs that end with a node, two nodes that lead, nodes that go on after others have given them up, and
//! counts that are lost with the node that kept them.
//!
//! A real etcd runs in a folder of each test. The processes run this program, so it has a `main`. An argument names the
//! tests that are run, by a part of their names.

mod common;

use common::{Folder, Running, farfield, run_tests, text, until, wanted_tests};
use farfield_dsm::{DArc, DMutex, Here, JoinError, NameError, NodeBuilder, NodeId};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TESTS: &[(&str, fn())] = &[
    ("the_next_node_leads_when_the_first_is_killed", the_next_node_leads_when_the_first_is_killed),
    ("the_last_node_leads_when_all_others_are_killed", the_last_node_leads_when_all_others_are_killed),
    ("what_was_handed_over_outlives_each_node_that_keeps_it", what_was_handed_over_outlives_each_node_that_keeps_it),
    ("a_node_that_has_joined_leads_when_the_first_is_killed", a_node_that_has_joined_leads_when_the_first_is_killed),
    ("a_stopped_node_is_fenced", a_stopped_node_is_fenced),
    ("a_stopped_node_of_the_same_machine_is_killed", a_stopped_node_of_the_same_machine_is_killed),
    ("nothing_is_lost_while_etcd_is_away_for_a_moment", nothing_is_lost_while_etcd_is_away_for_a_moment),
    ("nodes_end_when_etcd_stays_away", nodes_end_when_etcd_stays_away),
    ("wrong_servers_are_refused_with_advice", wrong_servers_are_refused_with_advice),
    ("etcd_may_want_tls_and_a_user", etcd_may_want_tls_and_a_user),
];

/// Tests of the deep tier, or by name.
const DEEP_TESTS: &[(&str, fn())] = &[
    ("most_of_the_servers_must_live", most_of_the_servers_must_live),
    ("a_memory_server_that_comes_back_is_taken_over_from", a_memory_server_that_comes_back_is_taken_over_from),
    ("leaders_are_killed_at_any_moment", leaders_are_killed_at_any_moment),
];

/// Name of the program among the arguments, before the file that ends it and the node that keeps the counter.
const COUNTS: &str = "--counts";
/// The same, with copies that travel as between machines.
const COUNTS_BY_COPIES: &str = "--counts-by-copies";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, name, end, home] = &arguments[..]
        && [COUNTS, COUNTS_BY_COPIES].contains(&&**name)
    {
        std::process::exit(counts(Path::new(end), NodeId(home.parse().expect("a number")), name == COUNTS));
    }
    if !Path::new(ETCD).is_file() {
        let is_ci = std::env::var("CI").is_ok_and(|value| value == "true" || value == "1");
        assert!(!is_ci, "{ETCD} is not installed (Debian: etcd-server); in CI every test must run");
        println!("SKIPPED: {ETCD} is not installed (Debian: etcd-server)");
        return;
    }
    let wanted = wanted_tests();
    let is_deep = std::env::var_os("FARFIELD_DEEP").is_some();
    let deep = DEEP_TESTS.iter().filter(|_| is_deep || !wanted.is_empty());
    run_tests(TESTS.iter().chain(deep), &wanted);
}

// The program.

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The test may have ended.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Finds the counter, or makes it at a node.
fn counter(here: &Here<'_>, home: NodeId) -> Result<DArc<DMutex<u64>>, JoinError> {
    match here.lookup("counter") {
        Err(NameError::Absent { .. }) => {}
        found => return Ok(found?),
    }
    let made = here.spawn_to(home, (), |here, ()| DArc::new(here, DMutex::new(here, 0u64)?))?.join(here)??;
    here.publish("counter", &made)?;
    Ok(made)
}

/// Counts until there is a file, and says it after another node has heard of it.
fn counts(end: &Path, home: NodeId, is_in_place: bool) -> i32 {
    let body = |here: &Here<'_>| -> Result<(), JoinError> {
        let counter = counter(here, home)?;
        for node in here.nodes() {
            if let Ok(task) = here.spawn_to(node, (), |_, ()| std::process::id()) {
                say(&format!("node {node} process {}", task.join(here)?));
            }
        }
        say(&format!("node {} leads in view {}", here.id(), here.view()));
        let mut last = here.id();
        while !end.exists() {
            let count = {
                let mut count = counter.get(here)?.lock(here)?;
                *count += 1;
                *count
            };
            // One that is gone does not count, and need not be known yet.
            last = here.nodes().last().unwrap_or(last);
            let heard = here.spawn_to(last, (count,), |_, (count,)| count).map_err(JoinError::from);
            if heard.and_then(|task| task.join(here)).is_ok() && count % 10 == 0 {
                say(&format!("count {count}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    };
    match farfield_dsm::run(&NodeBuilder::new().near(4 << 20).read_in_place(is_in_place), body) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            eprintln!("the body: {error}");
            3
        }
        Err(error) => {
            eprintln!("{error}");
            4
        }
    }
}

// etcd.

const ETCD: &str = "/usr/bin/etcd";

/// A server of etcd in a folder of its own; killed when dropped.
struct EtcdServer {
    folder: PathBuf,
    name: String,
    /// Port for clients.
    port: u16,
    /// Port for clients over TLS, and the folder with the certificates, if there is one.
    tls: Option<(u16, PathBuf)>,
    /// All servers with their names and URLs, for each other.
    cluster: String,
    process: Option<Child>,
}

/// Starts an etcd of so many servers.
fn etcd(folder: &Folder, servers: usize) -> Vec<EtcdServer> {
    // Ports that nobody has: they were free a moment ago.
    let listeners: Vec<_> = (0..2 * servers).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ports: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
    drop(listeners);
    let peers = ports[servers..].iter().enumerate();
    let cluster: Vec<_> = peers.map(|(server, port)| format!("s{server}=http://127.0.0.1:{port}")).collect();
    let server = |number: usize| EtcdServer {
        folder: folder.path(&format!("etcd{number}")),
        name: format!("s{number}"),
        port: ports[number],
        tls: None,
        cluster: cluster.join(","),
        process: None,
    };
    let mut all: Vec<_> = (0..servers).map(server).collect();
    all.iter_mut().for_each(EtcdServer::start);
    all.iter().for_each(EtcdServer::wait);
    all
}

fn urls(etcd: &[EtcdServer]) -> String {
    etcd.iter().map(EtcdServer::url).collect::<Vec<_>>().join(",")
}

impl EtcdServer {
    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Starts the server, with what it has stored.
    fn start(&mut self) {
        let (mut clients, own) = (self.url(), format!("{}=", self.name));
        let peers = self.cluster.split(',').find_map(|server| server.strip_prefix(&own)).expect("it is one of them");
        let mut command = Command::new(ETCD);
        if let Some((port, certificates)) = &self.tls {
            clients += &format!(",https://127.0.0.1:{port}");
            command.arg("--cert-file").arg(certificates.join("etcd.pem"));
            command.arg("--key-file").arg(certificates.join("etcd.key"));
        }
        command.args(["--name", &self.name, "--data-dir"]).arg(&self.folder);
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]);
        command.args(["--initial-cluster", &self.cluster]);
        self.process = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("etcd starts"));
    }

    /// Waits until the server is healthy.
    fn wait(&self) {
        until("etcd is healthy", || self.ask("GET", "/health", "").contains("true"));
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut answer = String::new();
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return answer };
        let bytes = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {bytes}\r\n\r\n");
        let _ = stream.write_all((head + body).as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
        answer
    }

    /// Returns the answer about all keys of programs.
    fn keys(&self) -> String {
        // From /farfield/ to /farfield0.
        let range = r#"{"key":"L2ZhcmZpZWxkLw==","range_end":"L2ZhcmZpZWxkMA==","keys_only":true}"#;
        self.ask("POST", "/v3/kv/range", range)
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

// The tests.

/// A program of several nodes, and its etcd.
struct CountingProgram {
    etcd: Vec<EtcdServer>,
    folder: Folder,
    run: Running,
    /// Processes by node.
    processes: Vec<u32>,
}

fn kill(process: u32) {
    // SAFETY: a process that this test has started.
    assert_eq!(unsafe { libc::kill(process.cast_signed(), libc::SIGKILL) }, 0);
}

fn is_there(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// `farfield share run OPTIONS -- THIS --counts-by-copies`
fn share(folder: &Folder, options: &[&str], home: u16, errors: &str) -> Command {
    share_program(COUNTS_BY_COPIES, folder, options, home, errors)
}

fn share_program(name: &str, folder: &Folder, options: &[&str], home: u16, errors: &str) -> Command {
    let mut command = farfield();
    command.args(["share", "run"]).args(options).arg("--").arg(std::env::current_exe().unwrap());
    command.arg(name).arg(folder.path("end")).arg(home.to_string());
    let errors = std::fs::File::create(folder.path(errors)).unwrap();
    command.env("FARFIELD_TOKEN", "7e57").stdin(Stdio::null()).stderr(errors);
    command
}

impl CountingProgram {
    /// Starts three nodes, one of which keeps the counter.
    fn start(name: &str, home: u16, options: &[&str]) -> CountingProgram {
        CountingProgram::with_etcd(name, COUNTS_BY_COPIES, home, options, 1)
    }

    fn with_etcd(name: &str, program: &str, home: u16, options: &[&str], servers: usize) -> CountingProgram {
        let folder = Folder::new(name);
        let etcd = etcd(&folder, servers);
        let urls = urls(&etcd);
        let options = [&["--nodes", "3", "--etcd", &urls], options].concat();
        let run = Running::start(&mut share_program(program, &folder, &options, home, "errors"));
        let mut counting = CountingProgram { etcd, folder, run, processes: Vec::new() };
        counting.processes = counting.leader(0, 0);
        counting
    }

    /// Waits until a node leads in a view. Returns the processes of the nodes that live.
    fn leader(&self, node: u16, view: u32) -> Vec<u32> {
        let mut processes = Vec::new();
        loop {
            let line = self.run.line();
            if line == format!("node {node} leads in view {view}") {
                return processes;
            }
            assert!(!line.contains("leads"), "{line}");
            processes.extend(line.split_once(" process ").map(|(_, process)| process.parse::<u32>().unwrap()));
        }
    }

    /// The next count that is said.
    fn count(&self) -> u64 {
        self.run.line().strip_prefix("count ").expect("a count").parse().unwrap()
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(self.folder.path("errors")).unwrap()
    }

    /// Ends the program. All processes end, and etcd forgets it.
    fn end(self) {
        std::fs::write(self.folder.path("end"), "").unwrap();
        until("all processes end", || !self.processes.iter().any(|process| is_there(*process)));
        let keys = self.etcd[0].keys();
        assert!(keys.contains(r#""count":"1""#), "all but the word that the program has ended: {keys}");
        assert!(!self.errors().contains("ends:"), "{}", self.errors());
    }
}

fn the_next_node_leads_when_the_first_is_killed() {
    let counting = CountingProgram::start("next", 2, &[]);
    assert_eq!((counting.processes.len(), counting.processes[0]), (3, counting.run.child.id()));
    let count = counting.count();
    let begun = Instant::now();
    kill(counting.processes[0]);
    assert_eq!(counting.leader(1, 1), counting.processes[1..]);
    // A machine that refuses connections is not waited for: a lease is 15 s.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(counting.count() >= count);
    assert!(counting.errors().contains("node 0 is expelled in view 1, by node 1, since it has ended"));
    until("who leads is shown", || {
        let status = farfield().args(["share", "status", &counting.processes[1].to_string()]).output().unwrap();
        text(&status).lines().any(|line| line.contains("node 1  process ") && line.ends_with("  leads"))
    });
    counting.end();
}

fn the_last_node_leads_when_all_others_are_killed() {
    let counting = CountingProgram::start("last", 2, &[]);
    let count = counting.count();
    counting.processes[..2].iter().for_each(|process| kill(*process));
    assert_eq!(counting.leader(2, 2), counting.processes[2..]);
    assert!(counting.count() >= count);
    counting.end();
}

/// A memory server that frees regions as soon as nobody has them open, and its URL.
fn memory_server() -> (Running, String) {
    memory_server_at("tcp://127.0.0.1:0", "0s")
}

fn memory_server_at(url: &str, lease: &str) -> (Running, String) {
    let server = Running::start(farfield().args(["serve", "--listen", url, "--lease", lease]));
    let ready: serde_json::Value = serde_json::from_str(&server.line()).expect("it says where it listens");
    let url = ready["endpoints"][0].as_str().expect("a URL").to_owned();
    (server, url)
}

/// The counter of the first node is kept by the second one, which changes it, and then by the third.
fn what_was_handed_over_outlives_each_node_that_keeps_it() {
    let (_server, url) = memory_server();
    let counting = CountingProgram::start("kept", 0, &["--backup", &url]);
    let mut count = counting.count();
    for (node, process) in (1..).zip(&counting.processes[..2]) {
        kill(*process);
        counting.leader(node, node.into());
        let next = counting.count();
        assert!(next >= count, "{next} after {count}");
        count = next + 10;
        until("it is changed", || counting.count() >= count);
    }
    counting.end();
}

fn a_node_that_has_joined_leads_when_the_first_is_killed() {
    let folder = Folder::new("joined");
    let etcd = etcd(&folder, 1);
    let options = ["--nodes", "2", "--listen", "tcp://127.0.0.1:0", "--etcd", &urls(&etcd)];
    let first = Running::start(&mut share(&folder, &options, 1, "first"));
    let mut url = None;
    until("the first process waits", || {
        let said = std::fs::read_to_string(folder.path("first")).unwrap();
        url = said.split_once("--join ").and_then(|(_, after)| Some(after.split_once(' ')?.0.to_owned()));
        url.is_some()
    });
    let mut joined = Running::start(&mut share(&folder, &["--join", &url.unwrap()], 1, "joined"));
    until("it counts", || first.line().starts_with("count "));
    first.signal(libc::SIGKILL);
    until("the other one leads", || joined.line() == "node 1 leads in view 1");
    assert!(joined.line().starts_with("count "));
    std::fs::write(folder.path("end"), "").unwrap();
    assert_eq!(joined.wait().code(), Some(0));
}

/// It leads, and is stopped for longer than its lease. When it goes on, it does nothing that another one sees.
fn a_stopped_node_is_fenced() {
    let mut counting = CountingProgram::start("stopped", 2, &["--expel-after", "2s"]);
    counting.count();
    counting.run.stop();
    counting.leader(1, 1);
    counting.count();
    let said = "node 0 is expelled in view 1, by node 1, since it has not renewed its lease of 2 s";
    assert!(counting.errors().contains(said), "{}", counting.errors());
    counting.run.signal(libc::SIGCONT);
    assert_eq!(counting.run.wait().code(), Some(1));
    let errors = counting.errors();
    assert!(errors.contains("node 0 ends: its lease at etcd") || errors.contains("was expelled"), "{errors}");
    counting.count();
    std::fs::write(counting.folder.path("end"), "").unwrap();
    until("all processes end", || !counting.processes.iter().any(|process| is_there(*process)));
}

/// It reads in place what the others may change from now on.
fn a_stopped_node_of_the_same_machine_is_killed() {
    let mut counting = CountingProgram::with_etcd("in-place", COUNTS, 2, &["--expel-after", "2s"], 1);
    counting.count();
    counting.run.stop();
    counting.leader(1, 1);
    assert_eq!(counting.run.wait().signal(), Some(libc::SIGKILL));
    counting.end();
}

fn nothing_is_lost_while_etcd_is_away_for_a_moment() {
    let mut counting = CountingProgram::start("away", 2, &["--expel-after", "10s"]);
    let mut count = counting.count();
    counting.etcd[0].kill();
    let away = Instant::now();
    while away.elapsed() < Duration::from_secs(3) {
        let next = counting.count();
        assert!(next > count);
        count = next;
    }
    counting.etcd[0].start();
    counting.etcd[0].wait();
    // What etcd has stored still decides.
    kill(counting.processes[0]);
    counting.leader(1, 1);
    assert!(counting.count() >= count);
    counting.end();
}

fn nodes_end_when_etcd_stays_away() {
    let mut counting = CountingProgram::start("stays", 2, &["--expel-after", "2s"]);
    counting.count();
    counting.etcd[0].kill();
    assert_eq!(counting.run.wait().code(), Some(1));
    until("all processes end", || !counting.processes.iter().any(|process| is_there(*process)));
    let errors = counting.errors();
    for node in 0..3 {
        let said = format!("node {node} ends: its lease at etcd, {}, was not renewed", counting.etcd[0].url());
        assert!(errors.contains(&said) && errors.contains("it cannot be reached"), "{errors}");
    }
}

/// Of three servers one may die, and nobody decides when two are gone.
fn most_of_the_servers_must_live() {
    let mut counting = CountingProgram::with_etcd("most", COUNTS, 2, &["--expel-after", "6s"], 3);
    counting.count();
    counting.etcd[0].kill();
    kill(counting.processes[0]);
    assert_eq!(counting.leader(1, 1), counting.processes[1..]);
    counting.count();
    counting.etcd[1].kill();
    until("all processes end", || !counting.processes.iter().any(|process| is_there(*process)));
    let errors = counting.errors();
    for node in 1..3 {
        let said = format!("node {node} ends: its lease at etcd, {}, was not renewed", urls(&counting.etcd));
        assert!(errors.contains(&said), "{errors}");
    }
    assert!(errors.contains("most of its servers must run") || errors.contains("it cannot be reached"), "{errors}");
}

/// One of two memory servers comes back, and is the only one when the first node dies.
fn a_memory_server_that_comes_back_is_taken_over_from() {
    let [(first, first_url), (last, last_url)] = [(); 2].map(|()| memory_server_at("tcp://127.0.0.1:0", "10s"));
    let counting = CountingProgram::start("back", 0, &["--backup", &format!("mirror({first_url},{last_url})")]);
    counting.count();
    let servers = || {
        let pid = counting.processes[0].to_string();
        let status = farfield().args(["share", "status", "--json", &pid]).output().unwrap();
        let view: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap_or_default();
        view["nodes"][0]["counters"]["backup_servers"].as_u64()
    };
    until("both keep it", || servers() == Some(2));
    drop(first);
    until("one is lost", || servers() == Some(1));
    let _again = memory_server_at(&first_url, "10s");
    until("it is filled", || servers() == Some(2));
    drop(last);
    until("the other one is lost", || servers() == Some(1));
    let mut count = 0;
    while let Ok(next) = counting.run.line_now() {
        count = next.strip_prefix("count ").map_or(count, |next| next.parse().unwrap());
    }
    kill(counting.processes[0]);
    counting.leader(1, 1);
    assert!(counting.count() >= count && count > 0);
    counting.end();
}

/// The node that leads is killed at any moment, with etcd and what it keeps on its way.
fn leaders_are_killed_at_any_moment() {
    let (_server, url) = memory_server();
    for round in 0..50 {
        let counting = CountingProgram::start("moments", round % 3, &["--backup", &url]);
        let mut count = counting.count();
        for (node, view) in [(1, 1), (2, 2)] {
            // Moments are spread over some counts and a step of the threads that watch.
            std::thread::sleep(Duration::from_millis(u64::from(round) * 17 % 600));
            while let Ok(next) = counting.run.line_now() {
                count = next.strip_prefix("count ").map_or(count, |next| next.parse().unwrap());
            }
            kill(counting.processes[usize::from(node) - 1]);
            counting.leader(node, view);
            assert!(counting.count() >= count, "round {round}");
        }
        std::fs::write(counting.folder.path("end"), "").unwrap();
        until("all processes end", || !counting.processes.iter().any(|process| is_there(*process)));
    }
}

fn wrong_servers_are_refused_with_advice() {
    let folder = Folder::new("wrong");
    for (url, advice) in [
        ("http://127.0.0.1:1", "start it, or name more of its servers"),
        ("https://127.0.0.1:1", "?ca=FILE"),
        ("tcp://127.0.0.1:1", "write http://HOST:2379"),
    ] {
        let output = share(&folder, &["--nodes", "2", "--etcd", url], 0, "errors").output().unwrap();
        let errors = std::fs::read_to_string(folder.path("errors")).unwrap();
        assert!(output.status.code() == Some(4) && errors.contains(advice), "{errors}{}", text(&output));
    }
}

fn etcd_may_want_tls_and_a_user() {
    let folder = Folder::new("tls");
    let certificates = folder.path("certificates");
    let path = certificates.to_str().unwrap();
    for arguments in [&["init", path][..], &["server", path, "etcd", "127.0.0.1"], &["client", path, "node"]] {
        assert!(farfield().arg("cert").args(arguments).output().unwrap().status.success());
    }
    let mut servers = etcd(&folder, 1);
    for (name, message) in [
        ("user/add", r#"{"name":"root","password":"p@ss,word"}"#),
        ("role/add", r#"{"name":"root"}"#),
        ("user/grant", r#"{"user":"root","role":"root"}"#),
        ("enable", "{}"),
    ] {
        let answer = servers[0].ask("POST", &format!("/v3/auth/{name}"), message);
        assert!(answer.contains("200 OK"), "{name}: {answer}");
    }
    servers[0].kill();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    servers[0].tls = Some((port, certificates.clone()));
    servers[0].start();
    servers[0].wait();
    let url = |password: &str, authority: &str| {
        format!(
            "https://root:{password}@127.0.0.1:{port}?ca={path}/{authority}&cert={path}/node.pem&key={path}/node.key"
        )
    };
    for (url, advice) in [
        (url("wr%6Fng", "ca.pem"), "authentication failed"),
        (url("p%40ss%2Cword", "node.pem"), "certificate"),
        (url("p%40ss%2Cword", "absent.pem"), "absent.pem"),
        (format!("https://127.0.0.1:{port}?ca={path}/ca.pem"), "user name is empty"),
    ] {
        let output = share(&folder, &["--nodes", "2", "--etcd", &url], 0, "errors").output().unwrap();
        let errors = std::fs::read_to_string(folder.path("errors")).unwrap();
        assert!(output.status.code() == Some(4) && errors.contains(advice), "{errors}{}", text(&output));
        assert!(!errors.contains("root:"), "{errors}");
    }
    let options = ["--nodes", "3", "--etcd", &url("p%40ss%2Cword", "ca.pem")];
    let run = Running::start(&mut share(&folder, &options, 2, "errors"));
    let mut counting = CountingProgram { etcd: servers, folder, run, processes: Vec::new() };
    counting.processes = counting.leader(0, 0);
    let count = counting.count();
    // The token of a server that begins anew has ended.
    counting.etcd[0].kill();
    counting.etcd[0].start();
    counting.etcd[0].wait();
    kill(counting.processes[0]);
    assert_eq!(counting.leader(1, 1), counting.processes[1..]);
    assert!(counting.count() >= count);
    std::fs::write(counting.folder.path("end"), "").unwrap();
    until("all processes end", || !counting.processes.iter().any(|process| is_there(*process)));
    assert!(!counting.errors().contains("ends:"), "{}", counting.errors());
}
