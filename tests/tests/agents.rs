//! Do jobs share the near memory of a machine as they were promised, whoever of them, or the agent, does what it should not?
//!
//! Danger: two jobs that are promised the same memory; a job that starts before there is room, or never; a budget that holds only in books.
//! What is near is measured from outside, by the kernel.

use farfield_pager::runner::{ControlBlock, find_control, offer_near};
use farfield_tests::{
    Command, Ended, FarRun, MIB, Running, Scratch, Server, compile, farfield, kill_marked, marked_processes, tier,
    wait_until, window_pss_bytes,
};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `farfield WORDS`.
fn command(scratch: &Scratch, words: &[&str]) -> Ended {
    let farfield = farfield();
    let all = [farfield.to_str().expect("an ASCII path")].into_iter().chain(words.iter().copied());
    Command::new(&scratch.folder("command"), all).run()
}

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.text()).unwrap_or_else(|error| panic!("{error}: {}{}", ended.text(), ended.errors))
}

/// A job that checks all its memory again and again until it is killed.
fn hog(scratch: &Scratch, options: &[&str], mib: &str, processes: &str) -> Option<Running> {
    let hog = compile("hog", scratch.path())?;
    Some(FarRun::new(scratch, options, [hog.to_str().expect("an ASCII path"), mib, "0", processes]).start())
}

/// Near memory of a job, as the kernel sees it.
fn seen_bytes(job: &Running) -> u64 {
    marked_processes(job.mark()).into_iter().filter_map(window_pss_bytes).sum()
}

/// Blocks of a job.
fn control_of(job: &Running) -> ControlBlock {
    find_control(job.pid().unsigned_abs()).expect("a job of ours").1
}

/// What a job may have with this budget: 2 % and 16 MiB more.
fn allowed(budget_mib: u64) -> u64 {
    budget_mib * MIB + budget_mib * MIB / 50 + 16 * MIB
}

/// A running agent.
struct Agent {
    running: Running,
    socket: String,
}

impl Agent {
    fn start(scratch: &Scratch, name: &str, options: &[&str]) -> Agent {
        let socket = scratch.path().join("agent.sock");
        let socket = socket.to_str().expect("an ASCII path").to_owned();
        let farfield = farfield();
        let words = [farfield.to_str().expect("an ASCII path"), "agent", "--socket", &socket];
        let running = Command::new(&scratch.folder(name), words.into_iter().chain(options.iter().copied()))
            .within(Duration::from_secs(1800))
            .start();
        wait_until("the agent listens", || {
            assert!(!running.is_over(), "{}", running.errors());
            running.output().ends_with('\n')
        });
        Agent { running, socket }
    }

    /// For `farfield run`.
    fn option(&self) -> String {
        format!("--agent={}", self.socket)
    }

    fn status(&self, scratch: &Scratch) -> Value {
        json(&command(scratch, &["agent", "--status", "--json", "--socket", &self.socket]))
    }

    /// A number of a job.
    fn number_of(&self, scratch: &Scratch, job: &Running, name: &str) -> Option<u64> {
        let status = self.status(scratch);
        let jobs = status["jobs"].as_array().expect("a list");
        jobs.iter().find(|row| row["runner_pid"].as_i64() == Some(job.pid().into()))?[name].as_u64()
    }

    /// A number of a job, in MiB.
    fn mib_of(&self, scratch: &Scratch, job: &Running, name: &str) -> u64 {
        let number = self.number_of(scratch, job, name);
        number.unwrap_or_else(|| panic!("no {name} of {}: {}", job.pid(), self.status(scratch))) / MIB
    }

    fn runs(&self, scratch: &Scratch, job: &Running) -> bool {
        let status = self.status(scratch);
        let jobs = status["jobs"].as_array().expect("a list");
        jobs.iter().any(|row| row["runner_pid"].as_i64() == Some(job.pid().into()) && row["is_running"] == true)
    }
}

#[test]
fn a_budget_changes_while_the_job_runs_and_the_kernel_sees_it() {
    let scratch = Scratch::new("near");
    let Some(job) = hog(&scratch, &["--near", "96M", "--least", "32M"], "80", "2") else { return };
    let pid = job.pid().to_string();
    wait_until("it has its memory", || job.is_over() || seen_bytes(&job) > 70 * MIB);
    for (mib, budget) in [("48M", 48), ("32M", 32), ("96M", 96), ("40M", 40)] {
        let changed = command(&scratch, &["near", "--json", &pid, mib]);
        assert_eq!(changed.code, 0, "{mib}: {}", changed.errors);
        let row = json(&changed);
        assert_eq!(
            (&row["near_offer_bytes"], &row["near_limit_bytes"]),
            (&(budget * MIB).into(), &(budget * MIB).into())
        );
        let seen = seen_bytes(&job);
        assert!(seen <= allowed(budget), "{mib}: the kernel sees {} MiB", seen / MIB);
    }
    let refused = command(&scratch, &["near", &pid, "31M"]);
    assert!(refused.code == 1 && refused.errors.contains("32.0 MiB"), "{}", refused.errors);
    let shown = command(&scratch, &["near", &pid]).text();
    assert!(shown.contains("of 40.0 MiB, offered 40.0 MiB, least 32.0 MiB"), "{shown}");
    let top = json(&command(&scratch, &["top", "--once", "--json", &pid]));
    let seen = ["near_limit_bytes", "near_offer_bytes", "near_least_bytes"].map(|name| top["jobs"][0][name].as_u64());
    assert_eq!(seen, [Some(40 * MIB), Some(40 * MIB), Some(32 * MIB)]);
    let nobody = command(&scratch, &["near", "1"]);
    assert!(nobody.code == 1 && !nobody.errors.is_empty());
    // It would have ended if a word had been wrong.
    assert!(!job.is_over(), "{}", job.errors());
    kill_marked(job.mark(), "hog");
    job.wait();
    let report = farfield_tests::Report::read(&scratch.path().join("report.json"));
    let numbers =
        ["near_limit_bytes", "near_offer_last_bytes", "near_limit_last_bytes"].map(|name| report.number(name));
    assert_eq!(numbers, [96 * MIB, 40 * MIB, 40 * MIB], "{}", report.0);
}

/// A job that holds a slowdown gets what it needs of what it is offered.
#[test]
fn a_job_that_holds_a_slowdown_keeps_within_what_it_is_offered() {
    let scratch = Scratch::new("near-auto");
    let Some(job) = hog(&scratch, &["--near", "96M", "--auto", "--slo", "1.4"], "80", "1") else { return };
    let pid = job.pid().to_string();
    wait_until("it has its memory", || job.is_over() || seen_bytes(&job) > 70 * MIB);
    let changed = command(&scratch, &["near", &pid, "40M"]);
    assert_eq!(changed.code, 0, "{}", changed.errors);
    for _ in 0..tier(5, 50) {
        let row = json(&command(&scratch, &["near", "--json", &pid]));
        assert!(row["near_limit_bytes"].as_u64().is_some_and(|limit| limit <= 40 * MIB), "{row}");
        assert!(seen_bytes(&job) <= allowed(40));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(!job.is_over(), "{}", job.errors());
}

#[test]
fn two_jobs_share_a_machine_and_what_one_leaves_the_other_gets() {
    let scratch = Scratch::new("agent-share");
    let agent = Agent::start(&scratch, "agent", &["--near", "128M", "--metrics", "127.0.0.1:0"]);
    let (first_place, second_place) = (Scratch::new("agent-first"), Scratch::new("agent-second"));
    let options = [&agent.option(), "--mem", "112M", "--least", "40M"];
    let Some(first) = hog(&first_place, &options, "96", "1") else { return };
    wait_until("the first has all its memory near", || first.is_over() || seen_bytes(&first) > 90 * MIB);
    assert_eq!(agent.mib_of(&scratch, &first, "offered_bytes"), 112);
    let Some(second) = hog(&second_place, &options, "96", "1") else { return };
    // The first shrinks before the second starts, and the machine never holds more than it has.
    wait_until("both have their share", || {
        let sum = seen_bytes(&first) + seen_bytes(&second);
        assert!(sum <= allowed(128) + 16 * MIB, "the kernel sees {} MiB", sum / MIB);
        assert!(!first.is_over() && !second.is_over(), "{}{}", first.errors(), second.errors());
        seen_bytes(&second) > 50 * MIB
    });
    // What jobs have beside their budgets, some MiB each, is not divided.
    for job in [&first, &second] {
        let offered = agent.mib_of(&scratch, job, "offered_bytes");
        assert!((52..=64).contains(&offered), "{offered}");
        assert!(seen_bytes(job) <= allowed(64), "{}", seen_bytes(job) / MIB);
    }
    let top =
        json(&command(&scratch, &["top", "--once", "--json", &first.pid().to_string(), &second.pid().to_string()]));
    for job in [&top["jobs"][0], &top["jobs"][1]] {
        let seen = ["near_offer_bytes", "near_limit_bytes", "near_least_bytes"].map(|name| job[name].as_u64());
        let [Some(offer), Some(limit), Some(least)] = seen else { panic!("{job}") };
        assert!(offer == limit && (52..=64).contains(&(offer / MIB)) && least == 40 * MIB, "{job}");
    }
    let told = command(&scratch, &["near", &first.pid().to_string(), "100M"]);
    assert!(told.code == 1 && told.errors.contains("agent.sock"), "{}", told.errors);
    assert!(
        metric(&agent, "farfield_agent_running_jobs 2") && metric(&agent, "farfield_agent_overflow_bytes 100663296")
    );
    kill_marked(first.mark(), "hog");
    first.wait();
    wait_until("the second has what the first left", || {
        assert!(!second.is_over(), "{}", second.errors());
        agent.mib_of(&scratch, &second, "offered_bytes") == 112 && seen_bytes(&second) > 90 * MIB
    });
}

/// The agent learns who waits for far memory, and who asked for more than it uses.
#[test]
fn a_job_that_waits_gets_what_another_does_not_use() {
    let scratch = Scratch::new("agent-learns");
    let agent = Agent::start(&scratch, "agent", &["--near", "128M", "--policy", "worth"]);
    let (waiting_place, idle_place) = (Scratch::new("agent-waiting"), Scratch::new("agent-idle"));
    let options = [&agent.option(), "--mem", "112M", "--least", "40M"];
    let Some(waiting) = hog(&waiting_place, &options, "96", "1") else { return };
    let Some(idle) = hog(&idle_place, &options, "16", "1") else { return };
    wait_until("both run", || agent.runs(&scratch, &waiting) && agent.runs(&scratch, &idle));
    wait_until("the one that waits has most, and both are measured", || {
        assert!(!waiting.is_over() && !idle.is_over(), "{}{}", waiting.errors(), idle.errors());
        let measured = agent.status(&scratch).to_string().matches("\"slowdown\":null").count() == 0;
        measured && agent.mib_of(&scratch, &waiting, "offered_bytes") >= 72
    });
    assert!(agent.mib_of(&scratch, &idle, "target_bytes") <= 48);
    let status = agent.status(&scratch);
    let slowdown = |job: &Running| {
        let jobs = status["jobs"].as_array().expect("a list");
        let row = jobs.iter().find(|row| row["runner_pid"].as_i64() == Some(job.pid().into()));
        row.and_then(|row| row["slowdown"].as_f64()).unwrap_or_else(|| panic!("no slowdown: {status}"))
    };
    assert!(slowdown(&idle) < 1.05 && slowdown(&waiting) >= 1.0, "{status}");
    assert!(command(&scratch, &["agent", "--status", "--socket", &agent.socket]).text().contains("SLOWER"));
}

#[test]
fn a_run_claims_by_what_the_last_one_has_shown() {
    let scratch = Scratch::new("agent-history");
    let agent = Agent::start(&scratch, "agent", &["--near", "64M"]);
    let file = scratch.path().join("hog.json");
    let learn = file.to_str().expect("an ASCII path").to_owned();
    let options = [&agent.option(), "--mem", "256M", "--least", "40M", "--learn", &learn];
    let place = Scratch::new("agent-run");
    let Some(hog) = compile("hog", place.path()) else { return };
    let hog = hog.to_str().expect("an ASCII path");
    let words = [&["run"][..], &options, &["--", hog, "96", "4", "1"]].concat();
    let Ended { code, errors: said, .. } = command(&scratch, &words);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("1 run: at most") && said.contains("would be enough"), "{said}");
    let read = || serde_json::from_slice::<Value>(&std::fs::read(&file).expect("written")).expect("JSON");
    let first = read();
    let point = &first["slowdowns"][0];
    assert!(point["near_bytes"].as_u64().is_some_and(|bytes| (32..=66).contains(&(bytes / MIB))), "{first}");
    assert!(point["slowdown"].as_f64().is_some_and(|slowdown| slowdown > 1.0), "{first}");
    let peak = first["peak_bytes"][0].as_u64().expect("a number") / MIB;
    assert!((96..200).contains(&peak) && first["seconds"].as_f64().is_some_and(|it| it > 0.0), "{first}");
    // The second run says so to the agent before it starts.
    let second = FarRun::new(&place, options, [hog, "16", "0", "1"]).start();
    wait_until("it runs", || agent.runs(&scratch, &second));
    let control = control_of(&second);
    let claim: Value = serde_json::from_str(&control.config().claim.line()).expect("JSON");
    let claimed = claim["slowdowns"].as_array().expect("a list");
    let is_close = |one: &Value, other: &Value| {
        let [one, other] = [one, other].map(|value| value.as_f64().expect("a number"));
        (one - other).abs() < 1e-6
    };
    let is_known = claimed.iter().any(|row| is_close(&row["slowdown"], &point["slowdown"]));
    assert!(is_known && is_close(&claim["seconds"], &first["seconds"]), "{claim}: {first}");
    kill_marked(second.mark(), "hog");
    second.wait();
    assert!(read()["runs"] == 2 && read()["seconds"] == first["seconds"], "a killed run took no time: {}", read());
    // What is no such file is not touched.
    std::fs::write(&file, "mine").expect("ours");
    let refused = FarRun::new(&place, options, ["true"]).run();
    assert!(refused.code == 97 && refused.errors.contains("remove it to begin anew"), "{}", refused.errors);
    assert_eq!(std::fs::read_to_string(&file).expect("ours"), "mine");
}

/// Whether the agent's metrics have this line.
fn metric(agent: &Agent, line: &str) -> bool {
    let ready: Value = serde_json::from_str(&agent.running.output()).expect("one line of JSON");
    let url = ready["metrics"].as_str().expect("started with --metrics");
    let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut stream = std::net::TcpStream::connect(address).expect("the agent lives");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it listens");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    text.lines().any(|this| this == line)
}

#[test]
fn jobs_outlive_their_agent_and_the_next_one_finds_them() {
    let scratch = Scratch::new("agent-gone");
    let agent = Agent::start(&scratch, "agent", &["--near", "128M"]);
    let places = ["agent-one", "agent-two", "agent-three"].map(Scratch::new);
    let options = [&agent.option(), "--mem", "80M", "--least", "32M"];
    let mut jobs = Vec::new();
    for place in &places[..2] {
        let Some(job) = hog(place, &options, "64", "1") else { return };
        jobs.push(job);
    }
    wait_until("both run", || jobs.iter().all(|job| agent.runs(&scratch, job)));
    let has_half = |agent: &Agent, job: &Running| (52..=64).contains(&agent.mib_of(&scratch, job, "offered_bytes"));
    wait_until("both have half", || jobs.iter().all(|job| has_half(&agent, job)));
    let socket = agent.socket.clone();
    agent.running.signal(libc::SIGKILL);
    agent.running.wait();
    // Nobody notices, and a job that comes now is told what is missing.
    let third = hog(&places[2], &options, "64", "1").expect("a compiler");
    for job in &jobs {
        let near = json(&command(&scratch, &["near", "--json", &job.pid().to_string()]));
        assert!(near["near_limit_bytes"].as_u64().is_some_and(|limit| (52..=64).contains(&(limit / MIB))), "{near}");
        assert!(!job.is_over(), "{}", job.errors());
    }
    let third_ended = third.wait();
    assert_eq!(third_ended.code, 97, "{}", third_ended.errors);
    assert!(
        third_ended.errors.contains("farfield agent") && third_ended.errors.contains(&socket),
        "{}",
        third_ended.errors
    );
    let agent = Agent::start(&scratch, "again", &["--near", "128M"]);
    assert!(jobs.iter().all(|job| agent.runs(&scratch, job)), "{}", agent.status(&scratch));
    assert!(jobs.iter().all(|job| has_half(&agent, job)), "{}", agent.status(&scratch));
    // There is one agent at a socket.
    let twice = command(&scratch, &["agent", "--near", "128M", "--socket", &agent.socket]);
    assert!(twice.code == 1 && twice.errors.contains("already"), "{}", twice.errors);
    // A third job squeezes those that were found.
    let third = hog(&places[2], &options, "64", "1").expect("a compiler");
    wait_until("the third runs", || agent.runs(&scratch, &third));
    wait_until("all have a third", || {
        let all = jobs.iter().chain([&third]);
        all.map(|job| agent.mib_of(&scratch, job, "offered_bytes")).all(|mib| (34..=43).contains(&mib))
    });
    assert!(jobs.iter().chain([&third]).all(|job| !job.is_over()));
}

/// Jobs come and go, and the agent is killed while budgets move.
#[test]
fn agents_that_are_killed_at_any_moment_promise_nothing_twice_and_lose_no_job() {
    let scratch = Scratch::new("agent-kills");
    let start = |round: u64| Agent::start(&scratch, &format!("agent-{round}"), &["--near", "128M"]);
    let places = ["kills-1", "kills-2", "kills-3", "kills-4"].map(Scratch::new);
    let mut jobs: [Option<Running>; 4] = [const { None }; 4];
    let (mut agent, mut random) = (start(0), fastrand::Rng::with_seed(5));
    let options = [&agent.option(), "--mem", "64M", "--least", "28M"];
    for round in 1..=tier(4, 150) {
        let slot = random.usize(..jobs.len());
        match jobs[slot].take() {
            Some(job) => {
                kill_marked(job.mark(), "hog");
                job.wait();
            }
            None => {
                let Some(job) = hog(&places[slot], &options, "56", "1") else { return };
                // Without any agent a job would not start at all.
                wait_until("the agent knows it", || {
                    assert!(!job.is_over(), "{}", job.errors());
                    agent.number_of(&scratch, &job, "memory_bytes").is_some()
                });
                jobs[slot] = Some(job);
            }
        }
        // Not to wait for anything: each agent ends at another moment.
        std::thread::sleep(Duration::from_millis(random.u64(..400)));
        agent.running.signal(libc::SIGKILL);
        agent.running.wait();
        agent = start(round);
        let status = agent.status(&scratch);
        let rows = status["jobs"].as_array().expect("a list").iter().filter(|row| row["is_running"] == true);
        let offered: u64 = rows.filter_map(|row| row["offered_bytes"].as_u64()).sum();
        assert!(offered <= 128 * MIB, "round {round}: {status}");
        for job in jobs.iter().flatten() {
            assert!(!job.is_over(), "round {round}: {}", job.errors());
        }
    }
    for (job, place) in jobs.iter_mut().zip(&places) {
        job.get_or_insert_with(|| hog(place, &options, "56", "1").expect("a compiler"));
    }
    wait_until("all four run, with no more than there is", || {
        let all = jobs.iter().flatten().all(|job| !job.is_over() && agent.runs(&scratch, job));
        all && agent.status(&scratch)["held_bytes"].as_u64().is_some_and(|held| held <= 128 * MIB)
    });
}

/// A job whose processes are stopped cannot give anything up.
#[test]
fn a_job_that_does_not_shrink_keeps_a_newcomer_waiting_and_not_for_ever() {
    let scratch = Scratch::new("agent-stuck");
    let agent = Agent::start(&scratch, "agent", &["--near", "112M"]);
    let (stuck_place, newcomer_place) = (Scratch::new("agent-stopped"), Scratch::new("agent-newcomer"));
    let Some(stuck) = hog(&stuck_place, &[&agent.option(), "--mem", "112M", "--least", "40M"], "96", "1") else {
        return;
    };
    wait_until("it has its memory", || stuck.is_over() || seen_bytes(&stuck) > 90 * MIB);
    let signal_hog = |signal: &str| {
        for pid in marked_processes(stuck.mark()) {
            if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "hog") {
                let ended = Command::new(&scratch.folder("kill"), ["kill", signal, &pid.to_string()]).run();
                assert_eq!(ended.code, 0, "{}", ended.errors);
            }
        }
    };
    signal_hog("-STOP");
    let options = [&agent.option(), "--mem", "64M", "--least", "48M", "--wait", "3s"];
    let newcomer = hog(&newcomer_place, &options, "48", "1").expect("a compiler");
    let refused = newcomer.wait();
    assert_eq!(refused.code, 97, "{}", refused.errors);
    assert!(refused.errors.contains("no room within 3 s"), "{}", refused.errors);
    let status = agent.status(&scratch);
    assert!(status["held_bytes"].as_u64().is_some_and(|held| held > 90 * MIB), "measured from outside: {status}");
    signal_hog("-CONT");
    let newcomer = hog(&newcomer_place, &options[..5], "48", "1").expect("a compiler");
    wait_until("the newcomer runs", || agent.runs(&scratch, &newcomer));
    wait_until("both keep their budgets", || {
        assert!(!stuck.is_over() && !newcomer.is_over(), "{}{}", stuck.errors(), newcomer.errors());
        seen_bytes(&stuck) + seen_bytes(&newcomer) <= allowed(112) + 16 * MIB && seen_bytes(&newcomer) > 30 * MIB
    });
}

#[test]
fn a_job_that_dies_while_it_shrinks_leaves_its_room_to_the_newcomer() {
    let scratch = Scratch::new("agent-dies");
    let agent = Agent::start(&scratch, "agent", &["--near", "112M"]);
    let (dying_place, newcomer_place) = (Scratch::new("agent-dying"), Scratch::new("agent-after"));
    let options = [&agent.option(), "--mem", "112M", "--least", "40M"];
    let Some(dying) = hog(&dying_place, &options, "96", "1") else { return };
    wait_until("it has its memory", || dying.is_over() || seen_bytes(&dying) > 90 * MIB);
    // A process that is stopped stays in the middle of what it gives up.
    for pid in marked_processes(dying.mark()) {
        if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "hog") {
            // SAFETY: a system call with two integers; the process carries the mark of this test.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
        }
    }
    let options = [&agent.option(), "--mem", "64M", "--least", "48M"];
    let newcomer = hog(&newcomer_place, &options, "48", "1").expect("a compiler");
    wait_until("it is told to shrink, and the newcomer waits", || {
        assert!(!newcomer.is_over(), "{}", newcomer.errors());
        let status = agent.status(&scratch);
        status["jobs"].as_array().is_some_and(|jobs| jobs.len() == 2)
            && agent.mib_of(&scratch, &dying, "target_bytes") <= 64
    });
    assert!(!agent.runs(&scratch, &newcomer));
    kill_marked(dying.mark(), "hog");
    dying.wait();
    wait_until("the newcomer has all it asked for", || {
        assert!(!newcomer.is_over(), "{}", newcomer.errors());
        agent.runs(&scratch, &newcomer) && agent.mib_of(&scratch, &newcomer, "offered_bytes") == 64
    });
    let status = agent.status(&scratch);
    assert_eq!(status["jobs"].as_array().map(Vec::len), Some(1), "{status}");
}

/// Whoever runs a job can write into its blocks, and so can the job.
#[test]
fn a_job_that_raises_its_own_budget_has_it_changed_back() {
    let scratch = Scratch::new("agent-raised");
    let agent = Agent::start(&scratch, "agent", &["--near", "112M"]);
    let (raising_place, other_place) = (Scratch::new("agent-raising"), Scratch::new("agent-other"));
    let options = [&agent.option(), "--mem", "112M", "--least", "40M"];
    let Some(raising) = hog(&raising_place, &options, "96", "1") else { return };
    let Some(other) = hog(&other_place, &options, "96", "1") else { return };
    let told = |job: &Running| agent.mib_of(&scratch, job, "offered_bytes");
    let have_half = || [&raising, &other].iter().all(|job| (44..=56).contains(&told(job)));
    wait_until("both run", || agent.runs(&scratch, &raising) && agent.runs(&scratch, &other) && have_half());
    let control = control_of(&raising);
    let in_force = || {
        let near = json(&command(&scratch, &["near", "--json", &raising.pid().to_string()]));
        near["near_limit_bytes"].as_u64().expect("a number") / MIB
    };
    for round in 1..=tier(2, 20) {
        offer_near(&control, 112 * MIB).expect("nobody keeps it from that");
        wait_until("the agent has seen it", || {
            agent.number_of(&scratch, &raising, "corrections").is_some_and(|times| times >= round)
        });
        wait_until("its budget is the agent's", || in_force() == told(&raising) && have_half());
        wait_until("it has given the rest back", || seen_bytes(&raising) <= allowed(56));
    }
    assert!(agent.running.errors().contains("changed the budget of a job"), "{}", agent.running.errors());
    assert!(have_half() && !raising.is_over() && !other.is_over(), "{}{}", raising.errors(), other.errors());
}

#[test]
fn jobs_wait_until_their_memory_servers_have_room_and_answer() {
    let scratch = Scratch::new("agent-servers");
    let server = Server::start_tcp(&scratch, "server", ["--capacity", "144M"]);
    let agent = Agent::start(&scratch, "agent", &["--near", "64M", "--pool", server.url()]);
    let places = ["agent-first", "agent-second", "agent-third"].map(Scratch::new);
    // One job has 48 MiB of its memory far, and a second one would need 112 MiB more.
    let options = [&agent.option(), "--mem", "112M", "--least", "32M"];
    let Some(first) = hog(&places[0], &options, "96", "1") else { return };
    wait_until("the first runs", || agent.runs(&scratch, &first));
    let second = hog(&places[1], &options, "96", "1").expect("a compiler");
    let waits_for =
        |reason: &str| {
            let status = agent.status(&scratch);
            status["jobs"].as_array().expect("a list").iter().any(|row| {
                row["is_running"] == false && row["reason"].as_str().is_some_and(|text| text.contains(reason))
            })
        };
    wait_until("the second waits for the server", || waits_for("the memory servers have no room"));
    let shown = command(&scratch, &["agent", "--status", "--socket", &agent.socket]).text();
    assert!(shown.contains("the memory servers have room for"), "{shown}");
    assert!(!agent.runs(&scratch, &second));
    kill_marked(first.mark(), "hog");
    first.wait();
    wait_until("the second runs when the first has left its room", || {
        assert!(!second.is_over(), "{}", second.errors());
        agent.runs(&scratch, &second)
    });
    wait_until("it has far memory", || seen_bytes(&second) > 50 * MIB);
    let third = hog(&places[2], &options, "96", "1").expect("a compiler");
    wait_until("the third waits", || waits_for("the memory servers have no room"));
    server.kill();
    assert_eq!(second.wait().code, 93);
    wait_until("nobody starts while the server is silent", || waits_for("does not answer"));
    assert!(agent.status(&scratch)["is_server_silent"] == true && !third.is_over(), "{}", third.errors());
    assert!(agent.running.errors().contains("no job starts"), "{}", agent.running.errors());
}

/// The pool is the agent's, and the quota that of whose token it is.
#[test]
fn a_job_with_a_token_of_its_own_is_its_users_tenant() {
    let scratch = Scratch::new("agent-tenants");
    let [agents, alices, nobodys] =
        [("agent", "0123456789abcdef"), ("alice", "fedcba9876543210"), ("nobody", "00112233")]
            .map(|(name, token)| scratch.token(name, token).to_str().expect("an ASCII path").to_owned());
    let tenants = scratch.token("tenants", "agent 0123456789abcdef -\nalice fedcba9876543210 256M");
    let tenants = tenants.to_str().expect("an ASCII path");
    let server = Server::start_tcp(&scratch, "server", ["--capacity", "1G", "--token-file", tenants]);
    let agent = Agent::start(&scratch, "daemon", &["--near", "64M", "--pool", server.url(), "--token-file", &agents]);
    let run = |token: &[&str]| {
        let hog = compile("hog", scratch.path())?;
        let option = agent.option();
        let options = [&[option.as_str(), "--mem", "64M", "--least", "32M"], token].concat();
        Some(FarRun::new(&scratch, options, [hog.to_str().expect("an ASCII path"), "96", "1", "1"]).run())
    };
    let Some(plain) = run(&[]) else { return };
    assert_eq!(plain.code, 0, "{}", plain.errors);
    let own = run(&["--token-file", &alices]).expect("a compiler");
    assert_eq!(own.code, 0, "{}", own.errors);
    let wrong = run(&["--token-file", &nobodys]).expect("a compiler");
    assert!(wrong.code == 97 && wrong.errors.contains("token"), "{}: {}", wrong.code, wrong.errors);
}

#[test]
fn what_cannot_be_met_is_refused_with_what_to_do() {
    let scratch = Scratch::new("agent-refuses");
    let agent = Agent::start(&scratch, "agent", &["--near", "64M", "--far", "64M"]);
    let refused = |options: &[&str], part: &str| {
        let ended = FarRun::new(&scratch, options, ["true"]).run();
        assert!(ended.code == 97 && ended.errors.contains(part), "{options:?}: {} {}", ended.code, ended.errors);
    };
    let option = agent.option();
    refused(&[&option, "--mem", "100M", "--least", "80M"], "at least 80 MiB near");
    refused(&[&option, "--mem", "200M", "--least", "20M"], "far memory");
    refused(&[&option, "--mem", "100M"], "--least");
    refused(&[&option, "--least", "32M"], "--mem");
    refused(&[&option, "--mem", "32M", "--least", "64M"], "more than");
    refused(&[&option, "--mem", "32M", "--least", "8M"], "at least 16M");
    refused(&["--mem", "32M"], "--agent");
    refused(&["--agent=/no/such.sock", "--mem", "32M", "--least", "32M"], "/no/such.sock");
    // Frames of nonsense, and of another version.
    let answer = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(&agent.socket).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket of ours");
        stream.write_all(bytes).expect("it listens");
        let mut text = Vec::new();
        stream.read_to_end(&mut text).expect("it closes the connection");
        String::from_utf8_lossy(text.get(4..).unwrap_or_default()).into_owned()
    };
    let frame = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    assert!(answer(&[0xff; 100]).contains("at most 16384"));
    assert!(answer(&frame("{}")).contains("not a message"));
    assert!(answer(&frame(r#"{"status":{"version":99}}"#)).contains("version 99"));
    // A runner of an older farfield.
    let old = r#"{"register":{"version":0,"claim":{"memory_bytes":33554432,"least_bytes":33554432}}}"#;
    assert!(answer(&frame(old)).contains("asked in version 0: use the same farfield"));
    assert!(answer(&frame(r#""ready""#)).contains("registers before"));
    // A stranger that registers is no job.
    let claim = r#"{"register":{"version":1,"claim":{"memory_bytes":33554432,"least_bytes":33554432}}}"#;
    let both = [frame(claim), frame(r#""ready""#)].concat();
    assert!(answer(&both).contains("cannot be watched"));
    assert_eq!(agent.status(&scratch)["jobs"], Value::Array(vec![]));
    assert!(Path::new(&agent.socket).exists() && !agent.running.is_over());
    agent.running.signal(libc::SIGTERM);
    let socket = PathBuf::from(&agent.socket);
    assert_eq!(agent.running.wait().code, 0);
    assert!(!socket.exists(), "it takes its socket along");
}
