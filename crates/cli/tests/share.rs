//! `farfield share`: a program with shared memory on several nodes, which is this file.
//!
//! Danger: nodes that strangers join, programs that go on without a node that others have given up, processes that
//! stay behind, and a status that shows another program.
//!
//! The processes run this program, so it has a `main`. An argument names the tests that are run, by a part of their
//! names.

mod common;

use common::{DEADLINE, Folder, Running, farfield, run_tests, scrape, text, until, wanted_tests};
use farfield_dsm::{DArc, DMutex, Here, JoinError, NodeBuilder, NodeId, channel};
use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TESTS: &[(&str, fn())] = &[
    ("nodes_of_one_machine_are_as_many_as_asked_for", nodes_of_one_machine_are_as_many_as_asked_for),
    ("a_node_joins_by_url_and_ends_with_the_program", a_node_joins_by_url_and_ends_with_the_program),
    ("a_node_may_be_there_before_the_first_process", a_node_may_be_there_before_the_first_process),
    ("nodes_may_come_and_go_until_all_are_there", nodes_may_come_and_go_until_all_are_there),
    ("strangers_and_other_builds_do_not_join", strangers_and_other_builds_do_not_join),
    ("a_joined_node_that_dies_is_lost", a_joined_node_that_dies_is_lost),
    ("a_silent_node_is_expelled_and_ends", a_silent_node_is_expelled_and_ends),
    ("a_network_that_is_cut_ends_the_node_behind_it", a_network_that_is_cut_ends_the_node_behind_it),
    ("joined_nodes_end_with_the_first_process", joined_nodes_end_with_the_first_process),
    ("what_a_killed_node_has_handed_over_is_there", what_a_killed_node_has_handed_over_is_there),
    ("a_node_that_was_taken_over_ends", a_node_that_was_taken_over_ends),
    ("who_waits_for_whom_is_explained", who_waits_for_whom_is_explained),
    ("wrong_orders_are_refused_with_advice", wrong_orders_are_refused_with_advice),
];

/// Name of the program among the arguments.
const MEETS: &str = "--meets";
const WAITS: &str = "--waits";
const KEEPS: &str = "--keeps";

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let is = |name: &str| arguments.iter().any(|argument| argument == name);
    if is(MEETS) {
        std::process::exit(meets());
    }
    if is(WAITS) {
        std::process::exit(waits());
    }
    if is(KEEPS) {
        std::process::exit(keeps());
    }
    run_tests(TESTS, &wanted_tests());
}

// The program.

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("somebody reads");
}

fn process_at(here: &Here<'_>, node: NodeId) -> Result<u32, JoinError> {
    here.spawn_to(node, (), |_, ()| std::process::id())?.join(here)
}

/// Tells the process of each node, for each line of its input again. Ends with 7. Copies travel as between machines.
fn meets() -> i32 {
    let config = NodeBuilder::new().near(4 << 20).read_in_place(false);
    let ended = farfield_dsm::run(&config, |here| {
        let tell = || {
            for node in here.nodes() {
                match process_at(here, node) {
                    Ok(process) => say(&format!("node {node} process {process}")),
                    Err(error) => say(&format!("node {node}: {error}")),
                }
            }
        };
        tell();
        std::io::stdin().lock().lines().map_while(Result::ok).for_each(|_| tell());
    });
    match ended {
        Ok(()) => 7,
        Err(error) => {
            eprintln!("{error}");
            3
        }
    }
}

/// A task of node 1 keeps a lock of node 0 until the input ends, and a task of node 2 waits for it.
fn waits() -> i32 {
    let body = |here: &Here<'_>| -> Result<u64, JoinError> {
        let lock = DArc::new(here, DMutex::new(here, 1u64)?)?;
        here.publish("counter", &lock)?;
        let (ends, ended) = channel::<u64>(here, 1)?;
        let (took, taken) = channel::<u64>(here, 1)?;
        let holder = here.spawn_to(NodeId(1), (lock.try_clone(here)?, took, ended), |here, (lock, took, ended)| {
            let mut number = lock.get(here).unwrap().lock(here).unwrap();
            took.send(here, 1).unwrap();
            *number += ended.recv(here).unwrap();
        })?;
        taken.recv(here).unwrap();
        let waiter = here.spawn_to(NodeId(2), (), |here, ()| {
            *here.lookup::<DMutex<u64>>("counter").unwrap().get(here).unwrap().lock(here).unwrap()
        })?;
        let named = here.spawn_to(NodeId(2), (), |here, ()| {
            *here.lookup_within::<u64>("later", DEADLINE).unwrap().get(here).unwrap()
        })?;
        say("they wait");
        std::io::stdin().lock().read_to_end(&mut Vec::new()).expect("an input");
        ends.send(here, 40).unwrap();
        holder.join(here)?;
        here.publish("later", &DArc::new(here, 0u64)?)?;
        Ok(waiter.join(here)? + named.join(here)?)
    };
    let ended = farfield_dsm::run(&NodeBuilder::new().near(4 << 20), body);
    i32::from(ended.expect("the nodes start") != Ok(41))
}

/// The last node hands numbers over, again and again, until it is gone. Then the others read what they have. Copies
/// travel as between machines.
fn keeps() -> i32 {
    let ended = farfield_dsm::run(&NodeBuilder::new().near(4 << 20).read_in_place(false), |here| {
        let last = here.nodes().last().expect("a node");
        say(&format!("process {}", process_at(here, last).expect("it lives")));
        let mut kept = Vec::new();
        let counted = here.spawn_to(last, (), |here, ()| DArc::new(here, DMutex::new(here, 0u64)?));
        let counted = counted.expect("it lives").join(here).expect("it lives").expect("there is room");
        let ends = here.spawn_to(last, (), |here, ()| channel::<u64>(here, 1));
        let (sender, receiver) = ends.expect("it lives").join(here).expect("it lives").expect("there is room");
        let error = loop {
            let number = kept.len() as u64;
            // A lock that goes on without its home.
            *counted.get(here).expect("it is kept").lock(here).expect("it is kept") += 1;
            // So does a channel.
            sender.send(here, number).expect("it is kept");
            assert_eq!(receiver.recv(here), Ok(number));
            let made = here.spawn_to(last, (number,), |here, (number,)| here.alloc([number; 300]));
            match made.map_err(JoinError::from).and_then(|task| task.join(here)) {
                Ok(made) => kept.push(made.expect("there is room")),
                Err(error) => break error,
            }
            if kept.len() == 50 {
                say("they are handed over");
            }
        };
        let read = |number: usize| kept[number].get(here).map(|numbers| numbers.iter().all(|it| *it == number as u64));
        let count = counted.get(here).and_then(|lock| lock.lock(here).map(|count| *count));
        let is_right = (0..kept.len()).all(|number| read(number) == Ok(true)) && count == Ok(kept.len() as u64 + 1);
        say(&format!("{error}; {is_right}"));
        std::io::stdin().lock().read_to_end(&mut Vec::new()).expect("an input");
        i32::from(!is_right)
    });
    ended.expect("the nodes start")
}

// The tests.

fn program() -> PathBuf {
    std::env::current_exe().expect("this program")
}

fn share(options: &[&str]) -> Command {
    let mut command = farfield();
    command.args(["share", "run"]).args(options).arg("--").arg(program()).stdin(Stdio::piped());
    command
}

/// Numbers and processes of nodes, by the lines that tell them.
fn processes(run: &Running, nodes: usize) -> Vec<u32> {
    let process = |node| {
        let line = run.line();
        let process = line.strip_prefix(&format!("node {node} process "));
        process.unwrap_or_else(|| panic!("{line}")).parse().unwrap()
    };
    (0..nodes).map(process).collect()
}

fn is_there(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn tell_again(run: &mut Running) {
    run.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
}

/// Ends the program by the end of its input.
fn end(mut run: Running, code: i32) {
    drop(run.child.stdin.take());
    assert_eq!(run.wait().code(), Some(code));
}

fn nodes_of_one_machine_are_as_many_as_asked_for() {
    let run = Running::start(share(&["--nodes", "3", "--near", "8M", "--workers", "2"]).arg(MEETS));
    let found = processes(&run, 3);
    assert_eq!(found[0], run.child.id(), "the command became the first process");
    let mut view = serde_json::Value::Null;
    until("all nodes are shown", || {
        let output = farfield().args(["share", "status", "--json", &found[1].to_string()]).output().unwrap();
        view = serde_json::from_slice(&output.stdout).unwrap_or_default();
        view["nodes"].as_array().is_some_and(|nodes| nodes.len() == 3)
    });
    for (node, process) in found.iter().enumerate() {
        let row = &view["nodes"][node];
        let of = |name: &str| row["counters"][name].as_u64();
        assert_eq!((row["node"].as_u64(), row["pid"].as_u64()), (Some(node as u64), Some(u64::from(*process))));
        assert_eq!((of("near_limit_bytes"), of("workers")), (Some(8 << 20), Some(2)), "{row}");
    }
    let exporter = Running::start(farfield().args(["top", "--metrics", "127.0.0.1:0"]));
    let metrics = scrape(&exporter.line());
    let labels = format!("node=\"1\",process=\"{}\"", found[1]);
    let line = metrics.lines().find(|line| line.starts_with("farfield_node_workers{") && line.contains(&labels));
    assert!(line.is_some_and(|line| line.ends_with(" 2")), "{metrics}");
    let people = text(&farfield().args(["share", "status"]).output().unwrap());
    assert!(people.contains(&format!("node 2  process {}", found[2])), "{people}");
    // Another program is not shown with this one.
    let other = Running::start(share(&["--nodes", "1"]).arg(MEETS));
    let [first] = processes(&other, 1)[..] else { panic!() };
    let output = farfield().args(["share", "status", "--json", &first.to_string()]).output().unwrap();
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["nodes"].as_array().unwrap().len(),
        1
    );
    end(other, 7);
    end(run, 7);
    until("all processes end", || !found.iter().any(|process| is_there(*process)));
}

fn first_of_two(folder: &Folder, options: &[&str]) -> (Running, String) {
    first_of(folder, "2", options)
}

/// Starts the first process of so many nodes, and returns the URL at which the others join.
fn first_of(folder: &Folder, nodes: &str, options: &[&str]) -> (Running, String) {
    let errors = folder.path("first");
    let mut command = share(&[&["--nodes", nodes, "--listen", "tcp://127.0.0.1:0"], options].concat());
    let file = std::fs::File::create(&errors).unwrap();
    let run = Running::start(command.arg(MEETS).env("FARFIELD_TOKEN", "7e57").stderr(file));
    let mut url = None;
    until("the first process waits", || {
        let said = std::fs::read_to_string(&errors).unwrap();
        let after = said.split_once("--join ").map(|(_, after)| after.to_owned());
        url = after.and_then(|after| after.split_once(' ').map(|(url, _)| url.to_owned()));
        url.is_some()
    });
    (run, url.unwrap())
}

fn joins(url: &str) -> Command {
    let mut command = share(&["--join", url]);
    command.arg(MEETS).env("FARFIELD_TOKEN", "7e57").stderr(Stdio::piped());
    command
}

/// Two nodes, of which the second has joined.
fn two(folder: &Folder, options: &[&str]) -> (Running, Running) {
    let (first, url) = first_of_two(folder, options);
    let joined = Running::start(&mut joins(&url));
    assert_eq!(processes(&first, 2), [first.child.id(), joined.child.id()]);
    (first, joined)
}

fn errors(run: &mut Running) -> String {
    let mut said = String::new();
    run.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

fn a_node_joins_by_url_and_ends_with_the_program() {
    let folder = Folder::new("joins");
    let (first, mut joined) = two(&folder, &[]);
    end(first, 7);
    assert_eq!(joined.wait().code(), Some(0));
}

fn a_node_may_be_there_before_the_first_process() {
    let folder = Folder::new("before");
    // A port that nobody has: one that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("tcp://127.0.0.1:{port}");
    let mut joined = Running::start(&mut joins(&url));
    let mut said = std::io::BufReader::new(joined.child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("waiting for the first process"), "{line}");
    let mut command = share(&["--nodes", "2", "--listen", &url]);
    let errors = std::fs::File::create(folder.path("first")).unwrap();
    let first = Running::start(command.arg(MEETS).env("FARFIELD_TOKEN", "7e57").stderr(errors));
    assert_eq!(processes(&first, 2), [first.child.id(), joined.child.id()]);
    end(first, 7);
    assert_eq!(joined.wait().code(), Some(0));
}

fn nodes_may_come_and_go_until_all_are_there() {
    let folder = Folder::new("come");
    let (first, url) = first_of(&folder, "3", &["--expel-after", "2s"]);
    let said = |text: &str| std::fs::read_to_string(folder.path("first")).unwrap().contains(text);
    let mut early = Running::start(&mut joins(&url));
    until("the first one is there", || said("waiting for node 2"));
    // It is asked for signs of life although the program has not begun: it would end otherwise.
    std::thread::sleep(Duration::from_secs(3));
    let mut late = Running::start(&mut joins(&url));
    assert_eq!(processes(&first, 3), [first.child.id(), early.child.id(), late.child.id()]);
    end(first, 7);
    assert_eq!((early.wait().code(), late.wait().code()), (Some(0), Some(0)));

    let (first, url) = first_of(&folder, "3", &[]);
    let mut dies = Running::start(&mut joins(&url));
    let mut begins = std::io::BufReader::new(dies.child.stderr.take().unwrap());
    begins.read_line(&mut String::new()).unwrap();
    dies.signal(libc::SIGKILL);
    dies.wait();
    until("its place is free", || said("node 1 has ended"));
    let mut others = [Running::start(&mut joins(&url)), Running::start(&mut joins(&url))];
    let mut found = processes(&first, 3);
    let mut expected = [first.child.id(), others[0].child.id(), others[1].child.id()];
    found[1..].sort_unstable();
    expected[1..].sort_unstable();
    assert_eq!(found, expected);
    end(first, 7);
    others.iter_mut().for_each(|other| assert_eq!(other.wait().code(), Some(0)));
}

fn strangers_and_other_builds_do_not_join() {
    let folder = Folder::new("strangers");
    let (first, url) = first_of_two(&folder, &[]);
    let stranger = joins(&url).env("FARFIELD_TOKEN", "other").output().unwrap();
    assert_eq!(stranger.status.code(), Some(3));
    assert!(text(&stranger).contains("wrong token"), "{}", text(&stranger));
    // The same program in a file with a byte more.
    let mut bytes = std::fs::read(program()).unwrap();
    bytes.push(0);
    let other = folder.program("other", bytes);
    let mut command = farfield();
    command.args(["share", "run", "--join", &url, "--"]).arg(other).arg(MEETS).env("FARFIELD_TOKEN", "7e57");
    let other = command.output().unwrap();
    assert_eq!(other.status.code(), Some(3));
    assert!(text(&other).contains("runs another build"), "{}", text(&other));
    let mut joined = Running::start(&mut joins(&url));
    processes(&first, 2);
    // There is no third place.
    let late = share(&["--join", &url, "--wait", "0"]).arg(MEETS).env("FARFIELD_TOKEN", "7e57").output().unwrap();
    assert!(text(&late).contains("has all its nodes"), "{}", text(&late));
    end(first, 7);
    assert_eq!(joined.wait().code(), Some(0));
}

fn a_joined_node_that_dies_is_lost() {
    let folder = Folder::new("dies");
    let (mut first, mut joined) = two(&folder, &[]);
    joined.signal(libc::SIGKILL);
    joined.wait();
    tell_again(&mut first);
    assert_eq!(first.line(), format!("node 0 process {}", first.child.id()));
    let line = first.line();
    assert!(line.contains("node 1 is gone"), "{line}");
    end(first, 7);
}

fn a_silent_node_is_expelled_and_ends() {
    let folder = Folder::new("silent");
    let (mut first, mut joined) = two(&folder, &["--expel-after", "2s"]);
    joined.stop();
    tell_again(&mut first);
    assert_eq!(first.line(), format!("node 0 process {}", first.child.id()));
    let line = first.line();
    assert!(line.contains("node 1 is gone"), "{line}");
    joined.signal(libc::SIGCONT);
    assert_eq!(joined.wait().code(), Some(1));
    let said = errors(&mut joined);
    assert!(said.contains("not heard of for too long") || said.contains("was expelled"), "{said}");
    end(first, 7);
}

/// Two network namespaces and a link between them.
struct Link([String; 2]);

impl Link {
    /// Returns none where that needs rights that the user does not have.
    fn new() -> Option<Link> {
        let names = ["a", "b"].map(|end| format!("ff{}{end}", std::process::id()));
        let link = Link(names);
        let [a, b] = &link.0;
        let is_made = ip(&["netns", "add", a])
            && ip(&["netns", "add", b])
            && ip(&["-n", a, "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", b])
            && ip(&["-n", a, "address", "add", "10.77.0.1/24", "dev", "veth"])
            && ip(&["-n", b, "address", "add", "10.77.0.2/24", "dev", "veth"])
            && [a, b]
                .iter()
                .all(|end| ["lo", "veth"].iter().all(|device| ip(&["-n", end, "link", "set", device, "up"])));
        is_made.then_some(link)
    }

    /// A command of `farfield share run` at one end.
    fn share(&self, end: usize, options: &[&str]) -> Command {
        let of_end = share(options);
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[end]]).arg(of_end.get_program()).args(of_end.get_args());
        command.arg(MEETS).env("FARFIELD_TOKEN", "7e57").stdin(Stdio::piped());
        command
    }

    fn cut(&self) {
        assert!(ip(&["-n", &self.0[0], "link", "set", "veth", "down"]));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for end in &self.0 {
            ip(&["netns", "delete", end]);
        }
    }
}

fn ip(words: &[&str]) -> bool {
    let ended = Command::new("ip").args(words).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}

/// The first process listens at all addresses, and has a second node there, which the joined one reaches through the
/// address of the first.
fn a_network_that_is_cut_ends_the_node_behind_it() {
    let Some(link) = Link::new() else {
        return println!("SKIPPED: network namespaces need root, and the program ip");
    };
    let url = "tcp://0.0.0.0:7410";
    let options = ["--nodes", "3", "--here", "2", "--listen", url, "--expel-after", "2s"];
    let mut first = Running::start(&mut link.share(0, &options));
    let mut joined = Running::start(link.share(1, &["--join", "tcp://10.77.0.1:7410"]).stderr(Stdio::piped()));
    let found = processes(&first, 3);
    assert_eq!([found[0], found[2]], [first.child.id(), joined.child.id()]);
    link.cut();
    assert_eq!(joined.wait().code(), Some(1));
    let said = errors(&mut joined);
    assert!(said.contains("not heard of for too long"), "{said}");
    tell_again(&mut first);
    assert_eq!(
        (first.line(), first.line()),
        (format!("node 0 process {}", found[0]), format!("node 1 process {}", found[1]),)
    );
    let line = first.line();
    assert!(line.contains("node 2 is gone"), "{line}");
    end(first, 7);
}

fn joined_nodes_end_with_the_first_process() {
    let folder = Folder::new("first");
    let (mut first, mut joined) = two(&folder, &[]);
    let begun = Instant::now();
    first.signal(libc::SIGKILL);
    first.wait();
    assert_eq!(joined.wait().code(), Some(1));
    assert!(begun.elapsed() < DEADLINE / 4, "it is refused, and not waited for");
    assert!(errors(&mut joined).contains("the first process of the program is gone"));
}

/// A memory server for backups, and its URL.
fn memory_server() -> (Running, String) {
    let server = Running::start(farfield().args(["serve", "--listen", "tcp://127.0.0.1:0"]));
    let ready: serde_json::Value = serde_json::from_str(&server.line()).expect("it says where it listens");
    let url = ready["endpoints"][0].as_str().expect("a URL").to_owned();
    (server, url)
}

fn what_a_killed_node_has_handed_over_is_there() {
    let (_server, url) = memory_server();
    let run = Running::start(share(&["--nodes", "3", "--backup", &url]).arg(KEEPS));
    let process: libc::pid_t = run.line().strip_prefix("process ").unwrap().parse().unwrap();
    assert_eq!(run.line(), "they are handed over");
    let status = || text(&farfield().args(["share", "status", &run.child.id().to_string()]).output().unwrap());
    until("its backup is shown", || {
        status().lines().any(|line| line.contains("backup:") && !line.contains(": 0 batches"))
    });
    // SAFETY: a process that this test has started.
    assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0);
    let line = run.line();
    assert!(line.contains("node 2 is gone") && line.ends_with("; true"), "{line}");
    until("who keeps them is shown", || status().contains("of nodes that are gone"));
    until("the view without the node is shown", || status().contains("lost: node 2 (view 1)"));
    end(run, 0);
}

/// It is stopped, and taken for dead. When it goes on, it does nothing that another one sees.
fn a_node_that_was_taken_over_ends() {
    let (_server, url) = memory_server();
    let folder = Folder::new("fenced");
    let errors_at = folder.path("first");
    let options = ["--nodes", "2", "--listen", "tcp://127.0.0.1:0", "--expel-after", "2s", "--backup", &url];
    let mut command = share(&options);
    command.arg(KEEPS).env("FARFIELD_TOKEN", "7e57").stderr(std::fs::File::create(&errors_at).unwrap());
    let first = Running::start(&mut command);
    let mut joins_at = None;
    until("the first process waits", || {
        let said = std::fs::read_to_string(&errors_at).unwrap();
        joins_at = said.split_once("--join ").and_then(|(_, after)| Some(after.split_once(' ')?.0.to_owned()));
        joins_at.is_some()
    });
    let mut command = share(&["--join", &joins_at.unwrap()]);
    let mut joined = Running::start(command.arg(KEEPS).env("FARFIELD_TOKEN", "7e57").stderr(Stdio::piped()));
    assert_eq!(first.line(), format!("process {}", joined.child.id()));
    assert_eq!(first.line(), "they are handed over");
    joined.stop();
    let line = first.line();
    assert!(line.contains("node 1 is gone") && line.ends_with("; true"), "{line}");
    joined.signal(libc::SIGCONT);
    assert_eq!(joined.wait().code(), Some(1));
    let said = errors(&mut joined);
    assert!(said.contains("not heard of for too long") || said.contains("was expelled"), "{said}");
    end(first, 0);
}

fn who_waits_for_whom_is_explained() {
    let run = Running::start(share(&["--nodes", "3"]).arg(WAITS));
    assert_eq!(run.line(), "they wait");
    let mut said = String::new();
    // Each node writes its own notice, a few times a second.
    until("both waits are explained", || {
        said = text(&farfield().args(["share", "explain", &run.child.id().to_string()]).output().unwrap());
        let waits = ["which a task of node 1 holds; 1 wait for it", "for channel ", "to be published under a name"];
        waits.iter().all(|wait| said.contains(wait))
    });
    assert!(said.contains("for lock "), "{said}");
    let status = || text(&farfield().args(["share", "status", &run.child.id().to_string()]).output().unwrap());
    until("the name is listed", || status().contains("name counter: a farfield_dsm::"));
    assert!(status().contains("DMutex<u64> at node 0\n"), "{}", status());
    end(run, 0);
}

fn wrong_orders_are_refused_with_advice() {
    let refused = |options: &[&str], advice: &str| {
        let output = share(options).arg(MEETS).env_remove("FARFIELD_TOKEN").output().unwrap();
        assert!(!output.status.success());
        assert!(text(&output).contains(advice), "{options:?}: {}", text(&output));
    };
    refused(&["--nodes", "3", "--listen", "tcp://0.0.0.0:0"], "--token-file");
    refused(&["--nodes", "0"], "1 to 1024 nodes");
    refused(&["--nodes", "2", "--here", "1"], "--listen");
    refused(&["--nodes", "2", "--here", "3"], "--here");
    refused(&["--nodes", "2", "--near", "1K"], "1 MiB");
    refused(&["--nodes", "2", "--backup", "ram:"], "one memory server");
    refused(&["--nodes", "2", "--expel-after", "1s"], "2 s");
    refused(&["--join", "unix:/tmp/x"], "tcp://HOST:PORT");
    refused(&["--join", "tcp://127.0.0.1:1", "--wait", "0"], "cannot be reached");
    let nothing = farfield().args(["share", "run", "--nodes", "2", "--", "/no/such/program"]).output().unwrap();
    assert_eq!(nothing.status.code(), Some(97));
    let nobody = farfield().args(["share", "explain", "1"]).output().unwrap();
    assert!(text(&nobody).contains("is no node"), "{}", text(&nobody));
}
