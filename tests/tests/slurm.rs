//! A real Slurm of three nodes on this machine, with an agent for each node, a memory server and the gate: do more jobs run at
//! once than memory would allow, with right results, and does all that they had come back, whoever of them is killed?
//!
//! Danger: memory that is promised twice or never given back; jobs that start without the gate, or never; users who change what the
//! gate wrote. What is near is measured from outside, by the kernel.

use farfield_tests::{
    Command, Ended, MIB, Running, Scratch, Server, compile, farfield, marked_processes, program, skip, tier,
    wait_until, window_pss_bytes,
};
use serde_json::Value;
use std::fmt::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Near memory of a node, and memory and least of a job, in MiB: by memory one job fits on a node, by least three.
const NODE_MIB: u64 = 160;
const JOB_MIB: u64 = 112;
const LEAST_MIB: u64 = 45;
const POOL_MIB: u64 = 600;

/// Daemons of Slurm in a folder of their own, ended when dropped.
struct RealSlurm {
    scratch: Scratch,
    conf: PathBuf,
    controller: Option<Running>,
    nodes: Vec<Option<Running>>,
    _munged: Running,
}

impl RealSlurm {
    /// Starts a Slurm that knows nothing of far memory. `None`, with a reason, where it is not installed.
    fn start(name: &str) -> Option<RealSlurm> {
        for needed in ["munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "setpriv"] {
            program(needed)?;
        }
        // SAFETY: a system call without arguments.
        if unsafe { libc::geteuid() } != 0 {
            skip("Slurm's daemons run as root");
            return None;
        }
        let scratch = Scratch::new(name);
        let at = scratch.path().to_str().expect("an ASCII path").to_owned();
        for folder in ["run", "state", "spool", "log"] {
            scratch.folder(folder);
        }
        let key = scratch.file("munge.key", [7; 1024]);
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o400)).expect("ours");
        let ports = free_ports();
        let mut conf = format!(
            "ClusterName=test\nSlurmctldHost=localhost(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={at}/run/munge.socket\nSlurmctldPort={}\nStateSaveLocation={at}/state\n\
             SlurmdSpoolDir={at}/spool/%n\nSlurmctldPidFile={at}/run/slurmctld.pid\nSlurmdPidFile={at}/run/slurmd-%n.pid\n\
             SlurmctldLogFile={at}/log/slurmctld.log\nSlurmdLogFile={at}/log/%n.log\nProctrackType=proctrack/linuxproc\n\
             TaskPlugin=task/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_CPU_Memory\n\
             SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=10000\nReturnToService=2\n\
             MpiDefault=none\nSlurmdParameters=config_overrides\nKillWait=5\n",
            ports[0]
        );
        for (node, port) in NODES.iter().zip(&ports[1..]) {
            let _ = writeln!(
                conf,
                "NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory={NODE_MIB}"
            );
        }
        conf += "PartitionName=plain Nodes=n1 Default=YES State=UP\n";
        let conf = scratch.file("slurm.conf", conf);
        let munged = Command::new(
            &scratch.folder("munged"),
            [
                "munged".into(),
                "--force".into(),
                "--foreground".into(),
                format!("--key-file={at}/munge.key"),
                format!("--socket={at}/run/munge.socket"),
                format!("--pid-file={at}/run/munged.pid"),
                format!("--log-file={at}/log/munged.log"),
                format!("--seed-file={at}/run/munge.seed"),
            ],
        );
        let munged = munged.within(Duration::from_secs(1800)).start();
        wait_until("munged listens", || scratch.path().join("run/munge.socket").exists());
        let mut slurm = RealSlurm { scratch, conf, controller: None, nodes: Vec::new(), _munged: munged };
        slurm.start_controller();
        slurm.nodes = (0..NODES.len()).map(|node| Some(slurm.start_node(node))).collect();
        wait_until("all nodes are idle", || {
            slurm.run(&["sinfo", "-h", "-N", "-o", "%T"]).text().trim() == "idle"
                && slurm.run(&["scontrol", "-o", "show", "node"]).text().matches("State=IDLE ").count() == NODES.len()
        });
        Some(slurm)
    }

    fn daemon(&self, words: &[&str]) -> Running {
        let conf = self.conf.to_str().expect("an ASCII path");
        let words = words.iter().copied().chain(["-D", "-f", conf]);
        Command::new(&self.scratch.folder("daemon"), words).within(Duration::from_secs(1800)).start()
    }

    fn start_controller(&mut self) {
        self.controller = Some(self.daemon(&["slurmctld"]));
        wait_until("slurmctld answers", || self.run(&["scontrol", "ping"]).text().contains("UP"));
    }

    fn start_node(&self, node: usize) -> Running {
        self.daemon(&["slurmd", "-N", NODES[node]])
    }

    fn command(&self, words: &[&str]) -> Command {
        Command::new(&self.scratch.folder("command"), words).env("SLURM_CONF", &self.conf)
    }

    fn run(&self, words: &[&str]) -> Ended {
        self.command(words).run()
    }

    fn farfield(&self, words: &[&str]) -> Ended {
        let farfield = farfield();
        let all: Vec<&str> =
            [farfield.to_str().expect("an ASCII path")].into_iter().chain(words.iter().copied()).collect();
        self.run(&all)
    }

    /// Makes it a cluster with far memory.
    fn init(&self) {
        let far = format!("{POOL_MIB}M");
        let done = self.farfield(&["cluster", "init", "--far", &far, "--nodes", "n[1-3]"]);
        assert_eq!(done.code, 0, "{}{}", done.text(), done.errors);
    }

    /// Licences of the pool that are in use, in MiB.
    fn charged_mib(&self) -> u64 {
        let text = self.run(&["scontrol", "-o", "show", "licenses", "farmem"]).text();
        let used = text.split_whitespace().find_map(|word| word.strip_prefix("Used="));
        used.and_then(|used| used.parse().ok()).unwrap_or_else(|| panic!("no licences: {text}"))
    }

    /// Jobs in this state.
    fn jobs(&self, state: &str) -> Vec<String> {
        let states = format!("--states={state}");
        let text = self.run(&["squeue", "-h", "-r", &states, "-O", "JobArrayID"]).text();
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn state(&self, job: &str) -> String {
        self.run(&["squeue", "-h", "--states=all", "-j", job, "-O", "State:|,Reason:|,RestartCnt:|"]).text()
    }

    fn gate(&self, server: &Server) -> Running {
        self.gate_with(&["--server", server.url()])
    }

    fn gate_with(&self, options: &[&str]) -> Running {
        let lock = self.scratch.path().join("gate.lock");
        let farfield = farfield();
        let [farfield, lock] = [farfield, lock].map(|path| path.to_str().expect("an ASCII path").to_owned());
        let words = [farfield.as_str(), "gate", "slurm", "--every", "200ms", "--lock", &lock];
        let words: Vec<&str> = words.iter().chain(options).copied().collect();
        let running = self.command(&words).within(Duration::from_secs(1800)).start();
        wait_until("the gate works", || {
            assert!(!running.is_over(), "{}", running.errors());
            running.output().ends_with('\n')
        });
        running
    }

    fn agent(&self, node: &str, server: &Server) -> Running {
        self.agent_at(node, server.url())
    }

    fn agent_at(&self, node: &str, pool: &str) -> Running {
        let farfield = farfield();
        let [farfield, socket] =
            [farfield, self.socket(node)].map(|path| path.to_str().expect("an ASCII path").to_owned());
        let near = format!("{NODE_MIB}M");
        let words = [&farfield, "agent", "--near", &near, "--socket", &socket, "--pool", pool];
        let running = Command::new(&self.scratch.folder("agent"), words).within(Duration::from_secs(1800)).start();
        wait_until("the agent listens", || {
            assert!(!running.is_over(), "{}", running.errors());
            running.output().ends_with('\n')
        });
        running
    }

    fn socket(&self, node: &str) -> PathBuf {
        self.scratch.path().join(format!("{node}.sock"))
    }

    fn agent_jobs(&self, node: &str) -> Vec<Value> {
        let socket = self.socket(node);
        let status =
            self.farfield(&["agent", "--status", "--json", "--socket", socket.to_str().expect("an ASCII path")]);
        let status: Value =
            serde_json::from_str(&status.text()).unwrap_or_else(|error| panic!("{error}: {}", status.errors));
        status["jobs"].as_array().expect("a list").clone()
    }

    /// Submits a job that checks its memory until it is told to end. In one line it says that it may have less near.
    fn submit(&self, hog: &Path, options: &[&str]) -> Submitted {
        self.submit_rounds(hog, 0, options)
    }

    /// Submits such a job that checks its memory this often, unless it is 0.
    fn submit_rounds(&self, hog: &Path, rounds: u32, options: &[&str]) -> Submitted {
        let farfield = farfield();
        let script = format!(
            "#!/bin/sh\nexec {} run --quiet --wait 2m --agent={}/$SLURMD_NODENAME.sock -- {} 96 {rounds} 1\n",
            farfield.display(),
            self.scratch.path().display(),
            hog.display()
        );
        let script = self.scratch.file("job.sh", script);
        let output = format!("{}/job-%j.out", self.scratch.path().display());
        let [mem, comment] = [format!("--mem={JOB_MIB}M"), format!("--comment=farfield:least={LEAST_MIB}M")];
        let mut words = vec!["sbatch", "--parsable", &mem, &comment, "-o", &output];
        words.extend(options);
        words.push(script.to_str().expect("an ASCII path"));
        let done = self.run(&words);
        assert_eq!(done.code, 0, "{}", done.errors);
        Submitted { id: done.text().trim().to_owned(), mark: done.mark }
    }

    fn outputs(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.scratch.path()).expect("it exists");
        let files = files.map(|file| file.expect("readable").path());
        let outputs =
            files.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("job-")));
        outputs.map(|path| std::fs::read_to_string(path).expect("text")).collect()
    }

    /// Waits until nothing that a job had is in use.
    fn expect_all_given_back(&self, server: &Server) {
        wait_until("licences, near memory and far memory are given back", || {
            self.charged_mib() == 0
                && NODES.iter().all(|node| self.agent_jobs(node).is_empty())
                && server.metric("farfield_used_bytes") == 0
        });
    }
}

impl Drop for RealSlurm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.scratch.path().join("log/slurmctld.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            println!("slurmctld: {}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
            println!("jobs: {:?}", self.outputs());
        }
        // Jobs are no descendants of ours: Slurm ends them before it is ended.
        let _ = std::process::Command::new("scancel")
            .args(["--user=root", "--signal=KILL"])
            .env("SLURM_CONF", &self.conf)
            .output();
        let _ = std::process::Command::new("scancel").args(["--user=root"]).env("SLURM_CONF", &self.conf).output();
    }
}

/// Ports that were free a moment ago: the controller's, and one for each node.
fn free_ports() -> Vec<u16> {
    let listeners: Vec<TcpListener> =
        (0..=NODES.len()).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("bound").port()).collect()
}

/// A job, or an array of jobs, that was submitted.
struct Submitted {
    id: String,
    mark: String,
}

impl Submitted {
    /// Its programs that run.
    fn hogs(&self) -> Vec<i32> {
        let is_hog =
            |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "hog");
        marked_processes(&self.mark).into_iter().filter(is_hog).collect()
    }

    /// Its processes on this node, with those of Slurm that watch them.
    fn processes_on(&self, node: &str) -> Vec<i32> {
        let name = format!("SLURMD_NODENAME={node}");
        let is_there = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|word| word == name.as_bytes())
        };
        let own: Vec<i32> = marked_processes(&self.mark).into_iter().filter(is_there).collect();
        let parents = own.iter().filter_map(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse::<i32>().ok()
        });
        let is_step = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "slurmstepd")
        };
        // What watches ends first: nobody tells slurmctld how the job ended.
        let mut all: Vec<i32> = parents.filter(is_step).collect();
        all.extend(own);
        all
    }

    fn near_bytes(&self) -> u64 {
        marked_processes(&self.mark).into_iter().filter_map(window_pss_bytes).sum()
    }

    /// Tells its programs to end with their result.
    fn tell_to_end(&self) {
        for pid in self.hogs() {
            // SAFETY: a system call with two integers; the process carries the mark of this test.
            unsafe { libc::kill(pid, libc::SIGUSR1) };
        }
    }
}

#[test]
fn more_jobs_run_than_memory_would_allow_and_all_comes_back_whoever_is_killed() {
    let Some(mut slurm) = RealSlurm::start("slurm") else { return };
    let Some(hog) = compile("hog", slurm.scratch.path()) else { return };
    slurm.init();
    let checked = slurm.farfield(&["doctor", "--cluster"]);
    assert_eq!(checked.code, 0, "{}", checked.text());
    let again = slurm.farfield(&["cluster", "init", "--far", &format!("{POOL_MIB}M"), "--nodes", "n[1-3]"]);
    assert!(again.code == 0 && !again.text().contains("writes"), "{}", again.text());
    let server = Server::start(&slurm.scratch, "server", ["--capacity", "2G", "--metrics", "127.0.0.1:0"]);
    let mut agents: Vec<Running> = NODES.iter().map(|node| slurm.agent(node, &server)).collect();

    // Without the gate, jobs wait.
    let array = slurm.submit(&hog, &["--array=1-9"]);
    let waiting = slurm.jobs("PENDING");
    assert_eq!(waiting.len(), 9, "{waiting:?}");
    let dry = slurm.farfield(&["gate", "slurm", "--dry-run", "--json", "--server", server.url()]);
    let dry: Value = serde_json::from_str(&dry.text()).unwrap_or_else(|error| panic!("{error}: {}", dry.errors));
    assert_eq!(dry["events"].as_array().map(Vec::len), Some(9), "{dry}");
    let mut gate = slurm.gate(&server);
    // By memory, three jobs fit: one on each node.
    wait_until("all nine run", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        array.hogs().len() == 9
    });
    wait_until("the books show what the nodes lack", || slurm.charged_mib() == 9 * JOB_MIB - 3 * NODE_MIB);
    for node in NODES {
        let jobs = slurm.agent_jobs(node);
        assert!(jobs.len() == 3 && jobs.iter().all(|job| job["is_running"] == true), "{node}: {jobs:?}");
    }
    wait_until("all have used their memory", || server.metric("farfield_used_bytes") > 300 * MIB);
    let near = array.near_bytes();
    assert!(near <= 3 * (NODE_MIB * MIB) + 9 * 18 * MIB, "the kernel sees {} MiB", near / MIB);
    let tenth = slurm.submit(&hog, &[]);
    let reason = slurm.farfield(&["gate", "slurm", "--explain", &tenth.id]);
    assert!(reason.text().contains("MiB near are missing"), "{}{}", reason.text(), reason.errors);

    // The pool shrinks below what is in use: nothing is taken from those that run.
    let init = |far: &str| {
        let done = slurm.farfield(&["cluster", "init", "--far", far, "--nodes", "n[1-3]"]);
        assert_eq!(done.code, 0, "{}{}", done.text(), done.errors);
    };
    init("64M");
    wait_until("the gate says what it has promised, and what the server stores", || {
        let dry = slurm.farfield(&["gate", "slurm", "--dry-run", "--json", "--server", server.url()]);
        let dry: Value = serde_json::from_str(&dry.text()).unwrap_or_else(|error| panic!("{error}: {}", dry.errors));
        dry["pool_bytes"].as_u64() == Some(64 * MIB)
            && dry["charged_bytes"].as_u64() == Some((9 * JOB_MIB - 3 * NODE_MIB) * MIB)
            && dry["stored_bytes"].as_u64().is_some_and(|stored| stored > 300 * MIB)
            && dry["capacity_bytes"].as_u64() == Some(2048 * MIB)
    });
    assert_eq!(slurm.run(&["scancel", &format!("{}_9", array.id)]).code, 0);
    wait_until("one has ended", || array.hogs().len() == 8);
    wait_until("there is room near, and not far", || {
        let reason = slurm.farfield(&["gate", "slurm", "--explain", &tenth.id, "--server", server.url()]);
        reason.text().contains("of the pool are missing")
            && reason.text().contains("of 64 MiB are promised; the memory servers")
    });
    assert!(tenth.hogs().is_empty() && array.hogs().len() == 8);
    init(&format!("{POOL_MIB}M"));
    wait_until("the tenth runs", || tenth.hogs().len() == 1);
    assert_eq!(array.hogs().len(), 8);
    let eleventh = slurm.submit(&hog, &[]);

    // One is cancelled, and the eleventh gets its place.
    assert_eq!(slurm.run(&["scancel", &format!("{}_4", array.id)]).code, 0);
    wait_until("the eleventh runs", || eleventh.hogs().len() == 1 && array.hogs().len() == 7);
    wait_until("and is charged", || slurm.charged_mib() == 9 * JOB_MIB - 3 * NODE_MIB);

    // The agent of a node, slurmd, the gate and slurmctld are killed; jobs go on, and none is lost or started twice.
    agents[0].signal(libc::SIGKILL);
    gate.signal(libc::SIGKILL);
    gate.wait();
    if let Some(node) = slurm.nodes[1].take() {
        node.signal(libc::SIGKILL);
        node.wait();
    }
    if let Some(controller) = slurm.controller.take() {
        controller.signal(libc::SIGTERM);
        controller.wait();
    }
    let running = || array.hogs().len() + tenth.hogs().len() + eleventh.hogs().len();
    assert_eq!(running(), 9);
    slurm.start_controller();
    slurm.nodes[1] = Some(slurm.start_node(1));
    agents[0] = slurm.agent(NODES[0], &server);
    gate = slurm.gate(&server);
    wait_until("the agent finds its jobs", || slurm.agent_jobs(NODES[0]).len() == 3);
    let twelfth = slurm.submit(&hog, &[]);
    assert_eq!(slurm.run(&["scancel", &tenth.id]).code, 0);
    wait_until("the twelfth takes the place of the tenth", || twelfth.hogs().len() == 1 && tenth.hogs().is_empty());
    assert_eq!(running(), 8, "nobody else has ended");
    wait_until("the books are right again", || slurm.charged_mib() == 9 * JOB_MIB - 3 * NODE_MIB);

    // All end with right results, and give everything back.
    for jobs in [&array, &eleventh, &twelfth] {
        jobs.tell_to_end();
    }
    wait_until("all have ended", || slurm.jobs("PENDING,RUNNING,COMPLETING").is_empty());
    let right = slurm.outputs().iter().filter(|output| output.contains("0 wrong")).count();
    assert_eq!(right, 9, "{:?}", slurm.outputs());
    slurm.expect_all_given_back(&server);
    assert!(!gate.is_over() && agents.iter().all(|agent| !agent.is_over()), "{}", gate.errors());
}

#[test]
fn jobs_of_a_node_that_goes_down_start_on_others_and_it_gets_new_ones_when_it_is_back() {
    let Some(mut slurm) = RealSlurm::start("slurm-down") else { return };
    let Some(hog) = compile("hog", slurm.scratch.path()) else { return };
    slurm.init();
    let server = Server::start(&slurm.scratch, "server", ["--capacity", "2G", "--metrics", "127.0.0.1:0"]);
    let mut agents: Vec<Running> = NODES.iter().map(|node| slurm.agent(node, &server)).collect();
    let gate = slurm.gate(&server);
    let jobs = slurm.submit(&hog, &["--array=1-6"]);
    wait_until("all run", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        jobs.hogs().len() == 6
    });
    // The first node has three: that is one all of whose memory was near, and two that fitted by their least.
    let lost = jobs.processes_on("n1");
    assert!(lost.len() >= 9, "{lost:?}");
    assert_eq!(slurm.agent_jobs("n1").len(), 3);

    // The node loses its power: everything there ends at once, and tells nobody.
    agents[0].signal(libc::SIGKILL);
    if let Some(node) = slurm.nodes[0].take() {
        node.signal(libc::SIGKILL);
        node.wait();
    }
    for pid in lost {
        // SAFETY: a system call with two integers; the process, or its child, carries the mark of this test.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    assert_eq!(slurm.run(&["scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=power"]).code, 0);
    wait_until("its jobs wait again, without their part of the pool", || {
        let licenses = slurm.run(&["squeue", "-h", "-r", "--states=PENDING", "-O", "Licenses"]).text();
        licenses.matches("farfield_gate:1").count() == 3
    });
    // Their turn has come: how long Slurm makes them wait is not the question.
    for job in slurm.jobs("PENDING") {
        assert_eq!(slurm.run(&["scontrol", "update", &format!("JobId={job}"), "StartTime=now"]).code, 0);
    }
    wait_until("all six run on the other nodes", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        jobs.hogs().len() == 6 && jobs.processes_on("n1").is_empty()
    });
    wait_until("the books show what two nodes lack", || slurm.charged_mib() == 6 * JOB_MIB - 2 * NODE_MIB);
    let seventh = slurm.submit(&hog, &[]);
    wait_until("the gate knows that the node is away", || {
        let reason = slurm.farfield(&["gate", "slurm", "--explain", &seventh.id, "--server", server.url()]);
        reason.text().contains("MiB near are missing")
    });
    assert!(seventh.hogs().is_empty());

    // The node is back, with nothing of what it had.
    agents[0] = slurm.agent("n1", &server);
    slurm.nodes[0] = Some(slurm.start_node(0));
    wait_until("the seventh runs there", || {
        // Slurm may have taken the node back already, and then says so.
        slurm.run(&["scontrol", "update", "NodeName=n1", "State=RESUME"]);
        !seventh.processes_on("n1").is_empty() && seventh.hogs().len() == 1
    });
    assert_eq!(slurm.agent_jobs("n1").len(), 1);
    for job in [&jobs, &seventh] {
        job.tell_to_end();
    }
    wait_until("all have ended", || slurm.jobs("PENDING,RUNNING,COMPLETING").is_empty());
    let right = slurm.outputs().iter().filter(|output| output.contains("0 wrong")).count();
    assert_eq!(right, 7, "{:?}", slurm.outputs());
    slurm.expect_all_given_back(&server);
}

#[test]
fn gates_and_agents_that_are_killed_under_load_admit_nobody_twice_and_lose_no_job() {
    let Some(slurm) = RealSlurm::start("slurm-kills") else { return };
    let Some(hog) = compile("hog", slurm.scratch.path()) else { return };
    slurm.init();
    let server = Server::start(&slurm.scratch, "server", ["--capacity", "2G", "--metrics", "127.0.0.1:0"]);
    let mut agents: Vec<Running> = NODES.iter().map(|node| slurm.agent(node, &server)).collect();
    let mut gate = slurm.gate(&server);
    let count = tier(12, 250);
    let jobs = slurm.submit_rounds(&hog, 2, &[&format!("--array=1-{count}")]);
    let (mut random, mut kills, started) = (fastrand::Rng::with_seed(3), 0, Instant::now());
    while !slurm.jobs("PENDING,RUNNING,COMPLETING,REQUEUED,REQUEUE_HOLD,SPECIAL_EXIT").is_empty() {
        assert!(started.elapsed() < Duration::from_secs(1500), "{}", slurm.run(&["squeue"]).text());
        // Not to wait for anything: each kill comes at another moment.
        std::thread::sleep(Duration::from_millis(random.u64(..500)));
        match random.usize(..=NODES.len()) {
            0 => {
                gate.signal(libc::SIGKILL);
                gate.wait();
                gate = slurm.gate(&server);
            }
            node => {
                let agent = agents.remove(node - 1);
                agent.signal(libc::SIGKILL);
                agent.wait();
                agents.insert(node - 1, slurm.agent(NODES[node - 1], &server));
            }
        }
        kills += 1;
        // A job that found no agent is held, and may start again when an operator says so.
        for job in slurm.jobs("SPECIAL_EXIT") {
            slurm.run(&["scontrol", "release", &job]);
            slurm.run(&["scontrol", "update", &format!("JobId={job}"), "StartTime=now"]);
        }
        assert!(slurm.charged_mib() <= POOL_MIB);
        let near = jobs.near_bytes();
        assert!(near <= 3 * (NODE_MIB * MIB) + 9 * 18 * MIB, "the kernel sees {} MiB", near / MIB);
    }
    let right = slurm.outputs().iter().filter(|output| output.contains("0 wrong")).count();
    assert_eq!(right, count, "after {kills} kills: {:?}", slurm.outputs());
    slurm.expect_all_given_back(&server);
}

#[test]
fn jobs_that_lose_their_server_start_again_when_there_is_one() {
    let Some(slurm) = RealSlurm::start("slurm-server") else { return };
    let Some(hog) = compile("hog", slurm.scratch.path()) else { return };
    slurm.init();
    let options = ["--capacity", "2G", "--metrics", "127.0.0.1:0"];
    let server = Server::start(&slurm.scratch, "server", options);
    let _agents = NODES.map(|node| slurm.agent(node, &server));
    let gate = slurm.gate(&server);
    let jobs = slurm.submit(&hog, &["--array=1-9"]);
    wait_until("all run", || jobs.hogs().len() == 9);
    // Three on each node, so none has all of its memory near.
    wait_until("they use far memory", || server.metric("farfield_used_bytes") > 300 * MIB);
    let url = server.url().to_owned();
    server.kill();
    wait_until("all have lost it", || jobs.hogs().is_empty());
    wait_until("they wait again", || slurm.jobs("PENDING").len() == 9);
    wait_until("their near memory is given back", || NODES.iter().all(|node| slurm.agent_jobs(node).is_empty()));
    wait_until("their part of the pool is given back", || slurm.charged_mib() == 0);
    wait_until("the gate has taken its admissions back, and knows that the server is away", || {
        let licenses = slurm.run(&["squeue", "-h", "-r", "-O", "Licenses"]).text();
        licenses.matches("farfield_gate:1").count() == 9 && gate.errors().contains("nobody is admitted")
    });
    // Their turn has come: whether they wait for two minutes, as Slurm wants, is not the question.
    for task in 1..=9 {
        let job = format!("JobId={}_{task}", jobs.id);
        assert_eq!(slurm.run(&["scontrol", "update", &job, "StartTime=now"]).code, 0);
    }
    wait_until("the gate says why", || {
        let reason = slurm.farfield(&["gate", "slurm", "--server", &url, "--explain", &format!("{}_1", jobs.id)]);
        reason.text().contains("a memory server does not answer")
    });
    assert!(jobs.hogs().is_empty(), "nobody starts");
    let server = Server::start_at(&slurm.scratch, "again", url, options);
    wait_until("all run again", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        jobs.hogs().len() == 9
    });
    jobs.tell_to_end();
    wait_until("all have ended", || slurm.jobs("PENDING,RUNNING,COMPLETING").is_empty());
    for task in 1..=9 {
        let state = slurm.state(&format!("{}_{task}", jobs.id));
        assert!(state.trim() == "COMPLETED|None|1|", "{state}");
    }
    slurm.expect_all_given_back(&server);
}

#[test]
fn jobs_behind_a_mirror_go_on_without_a_server_and_nobody_starts_until_it_is_back() {
    let Some(slurm) = RealSlurm::start("slurm-mirror") else { return };
    let Some(hog) = compile("hog", slurm.scratch.path()) else { return };
    slurm.init();
    let options = ["--capacity", "2G", "--metrics", "127.0.0.1:0"];
    let [one, two] = ["one", "two"].map(|name| Server::start_tcp(&slurm.scratch, name, options));
    let [first, second] = [&one, &two].map(|server| server.url().to_owned());
    let pool = format!("mirror({first},{second})");
    let _agents = NODES.map(|node| slurm.agent_at(node, &pool));
    let asked = ["--server", &first, "--server", &second, "--copies", "2"];
    let gate = slurm.gate_with(&asked);
    let jobs = slurm.submit(&hog, &["--array=1-6"]);
    wait_until("all run", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        jobs.hogs().len() == 6
    });
    wait_until("both servers have what is far", || {
        [&one, &two].iter().all(|server| server.metric("farfield_used_bytes") > 100 * MIB)
    });
    two.kill();
    wait_until("the gate knows", || gate.errors().contains("nobody is admitted"));
    let late = slurm.submit(&hog, &[]);
    wait_until("the gate says why", || {
        let words = ["gate", "slurm", "--explain", &late.id];
        let words: Vec<&str> = words.iter().chain(&asked).copied().collect();
        slurm.farfield(&words).text().contains("a memory server does not answer")
    });
    // All that ran go on, and end with right results.
    assert!(jobs.hogs().len() == 6 && late.hogs().is_empty());
    jobs.tell_to_end();
    wait_until("all six have ended", || slurm.jobs("RUNNING,COMPLETING").is_empty());
    let right = || slurm.outputs().iter().filter(|output| output.contains("0 wrong")).count();
    assert_eq!(right(), 6, "{:?}", slurm.outputs());
    assert_eq!(slurm.jobs("PENDING"), [late.id.as_str()]);
    let _two = Server::start_at(&slurm.scratch, "again", second, options);
    wait_until("the seventh runs", || {
        assert!(!gate.is_over(), "{}", gate.errors());
        late.hogs().len() == 1
    });
    late.tell_to_end();
    wait_until("it has ended", || slurm.jobs("PENDING,RUNNING,COMPLETING").is_empty());
    assert_eq!(right(), 7, "{:?}", slurm.outputs());
}

#[test]
fn what_cannot_be_is_refused_and_users_change_nothing_of_the_gates() {
    let Some(slurm) = RealSlurm::start("slurm-refusals") else { return };
    let before = slurm.farfield(&["doctor", "--cluster", "--json"]);
    let before_json: Value = serde_json::from_str(&before.text()).expect("JSON");
    assert!(before.code == 1 && before_json["ok"] == false, "{before_json}");
    let early = slurm.farfield(&["gate", "slurm", "--once"]);
    assert!(early.code == 1 && early.errors.contains("farfield cluster init"), "{}", early.errors);
    let dry = slurm.farfield(&["cluster", "init", "--far", "64M", "--nodes", "n[1-3]", "--dry-run"]);
    assert!(dry.code == 0 && dry.text().contains("would  writes"), "{}{}", dry.text(), dry.errors);
    assert!(!slurm.scratch.path().join("job_submit.lua").exists());
    slurm.init();

    let script = slurm.scratch.file("wait.sh", "#!/bin/sh\nexec sleep 1000\n");
    let script = script.to_str().expect("an ASCII path").to_owned();
    let submit = |options: &[&str]| {
        let words: Vec<&str> = ["sbatch", "--parsable", "-o", "/dev/null"]
            .iter()
            .chain(options)
            .copied()
            .chain([script.as_str()])
            .collect();
        slurm.run(&words)
    };
    let refused = |options: &[&str], part: &str| {
        let done = submit(options);
        assert!(done.code != 0 && done.errors.contains(part), "{options:?}: {}", done.errors);
    };
    let half = "--comment=farfield:least=0.5";
    refused(&[half], "--mem=8G");
    refused(&[half, "--mem=0"], "--mem=8G");
    refused(&[half, "--mem-per-cpu=100M"], "--mem=8G");
    refused(&["--mem=64M", "--comment=farfield:least=1.5"], "neither a part");
    refused(&["--mem=64M", "--comment=farfield:least=lots"], "neither a part");
    refused(&["--mem=64M", "--comment=farfield:least=1G"], "more than the memory");
    refused(&["--mem=64M", "--comment=farfield=0.5"], "not understood");
    refused(&["--mem=64M", half, "-N2"], "one node");
    refused(&["--mem=64M", half, "--exclusive"], "--exclusive");
    refused(&["--mem=64M", half, "-w", "n2"], "--nodelist");
    refused(&["--mem=64M", half, "-x", "n2"], "--exclude");
    refused(&["--mem=64M", half, "-C", "fast"], "--constraint");
    refused(&["--mem=64M", half, "-p", "plain"], "partition far");
    refused(&["--mem=64M", "-p", "far"], "how much must be near");
    refused(&["--mem=64M", "-L", "farmem:7"], "given by the gate");
    refused(&["--mem=64M", "-L", "farfield_gate:1"], "nobody's");

    // A thousand jobs wait, and one round decides about all.
    let thousand = submit(&["--mem=64M", half, "--array=1-1000"]);
    assert_eq!(thousand.code, 0, "{}", thousand.errors);
    let decided = || {
        let dry = slurm.farfield(&["gate", "slurm", "--dry-run", "--json"]);
        let dry: Value = serde_json::from_str(&dry.text()).unwrap_or_else(|error| panic!("{error}: {}", dry.errors));
        let events = dry["events"].as_array().expect("a list").clone();
        ["admitted", "waits"].map(|kind| events.iter().filter(|event| event["decision"] == kind).count())
    };
    // By their least, five on each node, and the pool has room for that. Slurm has to look at them before.
    wait_until("all are decided about", || decided() == [15, 985]);
    assert_eq!(slurm.run(&["scancel", thousand.text().trim()]).code, 0);
    wait_until("they are gone", || slurm.jobs("PENDING").is_empty());

    // A job without far memory is what it was.
    let plain = submit(&["--mem=64M"]);
    assert_eq!(plain.code, 0, "{}", plain.errors);
    wait_until("it runs", || slurm.state(plain.text().trim()).starts_with("RUNNING"));

    // Another user's job, and what that user may not do with it.
    let as_nobody = |words: &[&str]| {
        let all: Vec<&str> =
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].iter().chain(words).copied().collect();
        slurm.run(&all)
    };
    let theirs = as_nobody(&["sbatch", "--parsable", "-o", "/dev/null", "-D", "/tmp", "--mem=64M", half, &script]);
    assert_eq!(theirs.code, 0, "{}", theirs.errors);
    let id = theirs.text().trim().to_owned();
    let job = format!("JobId={id}");
    for change in [
        "Licenses=",
        "Licenses=farmem:1",
        "MinMemoryNode=8",
        "NodeList=n2",
        "ExcNodeList=n2",
        "Features=fast",
        "NumNodes=2",
        "Partition=plain",
        "AdminComment=farfield:mem=1,least=1",
    ] {
        let done = as_nobody(&["scontrol", "update", &job, change]);
        assert_ne!(done.code, 0, "{change}: {}{}", done.text(), done.errors);
    }
    assert_eq!(as_nobody(&["scontrol", "update", &job, "JobName=mine"]).code, 0);
    let seen = slurm
        .run(&["squeue", "-h", "-j", &id, "-O", "Licenses:|,ReqNodes:|,Partition:|,admin_comment:|,MinMemory:|"])
        .text();
    assert_eq!(seen.trim(), "farfield_gate:1||far|farfield:mem=64,least=32|32M|");
    // A gate of theirs can decide, and write nothing.
    let farfield = farfield();
    let lock = format!("/tmp/farfield-gate-test-{}.lock", std::process::id());
    let words = [farfield.to_str().expect("an ASCII path"), "gate", "slurm", "--once", "--lock", &lock];
    let theirs_gate = as_nobody(&words);
    let _ = std::fs::remove_file(&lock);
    assert!(
        !theirs_gate.text().contains("starts on n2") && slurm.state(&id).starts_with("PENDING"),
        "{}",
        theirs_gate.text()
    );

    // Lines of the site are not overwritten.
    let mut conf = std::fs::read_to_string(&slurm.conf).expect("ours");
    conf = conf.replace("ClusterName", "Licenses=matlab:3\nClusterName");
    std::fs::write(&slurm.conf, &conf).expect("ours");
    let conflict = slurm.farfield(&["cluster", "init", "--far", "64M"]);
    assert!(
        conflict.code == 1 && conflict.errors.contains("Licenses=matlab:3,farmem:64,farfield_gate:1"),
        "{}",
        conflict.errors
    );
    assert_eq!(std::fs::read_to_string(&slurm.conf).expect("ours"), conf);
}
