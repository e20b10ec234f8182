//! Do jobs and heaps go on, with every byte right, while their pool is exchanged, whatever becomes of the new one?
//!
//! Danger: a page that is read where it was not written last; a process that is left behind, or dies with a server that it does not need.
//! `FARFIELD_SEED` repeats the choices.

use farfield::{FarBox, Heap, Plane};
use farfield_tests::{
    Command, Ended, FarRun, MIB, Over, PATIENCE, Relay, Running, Scratch, Server, compile, deep, farfield, seeded,
    tier, wait_until,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// `farfield pool WORDS`.
fn pool(scratch: &Scratch, words: &[&str]) -> Ended {
    let farfield = farfield();
    let all = [farfield.to_str().expect("an ASCII path"), "pool"].into_iter().chain(words.iter().copied());
    Command::new(&scratch.folder("pool"), all).run()
}

fn pid(job: &Running) -> String {
    job.pid().to_string()
}

fn status(scratch: &Scratch, job: &Running) -> String {
    pool(scratch, &["status", &pid(job)]).text()
}

/// A server that takes long for what a job has.
fn slow(server: &Server) -> String {
    format!("throttle(bandwidth=4M,{})", server.url())
}

fn ssd(scratch: &Scratch) -> String {
    format!("ssd:{}?size=512M", scratch.path().display())
}

/// A job that checks every word of its memory again and again, in two processes, and is busy with that for a while.
fn hog(scratch: &Scratch, mode: &str, rounds: &str) -> Option<Running> {
    let hog = compile("hog", scratch.path())?;
    let job =
        FarRun::new(scratch, ["--near", "16M", "--mode", mode], [hog.to_str().expect("ASCII"), "64", rounds, "2", "2"]);
    let job = job.start();
    wait_until("some of it is far", || job.is_over() || is_armed(scratch, &job));
    Some(job)
}

fn is_armed(scratch: &Scratch, job: &Running) -> bool {
    count(scratch, job, "far_bytes") > 8 * MIB
}

/// What `farfield top` says of the job; 0 while it says nothing.
fn count(scratch: &Scratch, job: &Running, name: &str) -> u64 {
    let words = [
        farfield().to_str().expect("an ASCII path").to_owned(),
        "top".into(),
        "--once".into(),
        "--json".into(),
        pid(job),
    ];
    let top = Command::new(&scratch.folder("top"), words).run();
    let Ok(seen) = serde_json::from_str::<serde_json::Value>(&top.text()) else { return 0 };
    let job = &seen["jobs"][0];
    job[name].as_u64().or(job["counters"][name].as_u64()).unwrap_or(0)
}

#[test]
fn jobs_move_to_and_fro() {
    let scratch = Scratch::new("switch-jobs");
    let server = Server::start_tcp(&scratch, "tcp", ["--capacity", "256M"]);
    let near = Server::start(&scratch, "near", ["--capacity", "256M"]);
    // The job has read no certificates when it starts.
    let tls = Server::start_tls(&scratch, "tls", "tls://127.0.0.1:0", &["--capacity", "256M"]);
    let mirror = format!("mirror({},{})", server.url(), tls.url());
    let urls = [server.url(), tls.url(), &ssd(&scratch), "first", &mirror, near.url(), "first"];
    for (mode, first) in [("signal", 0), ("thread", tier(urls.len() - 3, 0))] {
        let Some(job) = hog(&scratch, mode, "0") else { return };
        for _ in 0..tier(1, 20) {
            for url in &urls[first..] {
                let ended = pool(&scratch, &["switch", &pid(&job), url]);
                assert_eq!(ended.code, 0, "{mode}, {url}: {}", ended.errors);
            }
        }
        // It would have ended if a word had been wrong.
        assert!(!job.is_over(), "{mode}: {}", job.errors());
    }
}

/// Rng exchanges of the pool, some of them cancelled, under programs that check every page they look at; also moves and changes of the
/// budget by the job itself (`--auto`).
#[test]
fn no_write_is_lost_while_pools_are_exchanged() {
    let scratch = Scratch::new("switch-versions");
    let Some(program) = compile("versions", scratch.path()) else { return };
    let program = program.to_str().expect("an ASCII path");
    let mut random = seeded(33);
    let servers = ["one", "other"].map(|name| Server::start_tcp(&scratch, name, ["--capacity", "512M"]));
    let mirror = format!("mirror({},{})", servers[0].url(), servers[1].url());
    let [one, other] = servers.each_ref().map(Server::url);
    let places = [one, other, &mirror, &ssd(&scratch)];
    // A program of one thread is what evicts with the fewest looks; several threads share each page.
    let all = [("1", false), ("3", true), ("3", false), ("1", true)];
    for (threads, is_auto) in all.into_iter().take(tier(2, 4)) {
        let options = ["--near", "24M", "--far", &mirror];
        let auto = ["--near", "24M", "--far", &mirror, "--far", other, "--auto", "--slo", "1.5"];
        let options = if is_auto { &auto[..] } else { &options[..] };
        let job = FarRun::new(&scratch, options, [program, "48", threads, "forks"]).start();
        wait_until("some of it is far", || job.is_over() || is_armed(&scratch, &job));
        for _ in 0..tier(2, 150) {
            let url = places[random.usize(..places.len())];
            if random.usize(..4) == 0 {
                let _ = pool(&scratch, &["switch", "--no-wait", &pid(&job), url]);
                std::thread::sleep(Duration::from_millis(random.usize(..200) as u64));
                let _ = pool(&scratch, &["cancel", &pid(&job)]);
            } else {
                // It is there already, or just moves by itself.
                let _ = pool(&scratch, &["switch", &pid(&job), url]);
            }
            assert!(!job.is_over(), "{threads} threads: {}{}", job.errors(), job.output());
        }
        ends_well(job);
    }
}

/// The job begins at a server with TLS, with its children, leaves it, goes to the other one that it may choose, and comes back.
#[test]
fn jobs_begin_at_an_encrypted_server_and_come_back_to_it() {
    let scratch = Scratch::new("switch-tls");
    let tls = |name: &str| Server::start_tls(&scratch, name, "tls://127.0.0.1:0", &["--capacity", "512M"]);
    let (server, other) = (tls("tls"), tls("other"));
    let plain = Server::start_tcp(&scratch, "tcp", ["--capacity", "512M"]);
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let hog = hog.to_str().expect("ASCII");
    let start = |options: &[&str]| {
        let job = FarRun::new(&scratch, ["--near", "16M"].iter().chain(options), [hog, "64", "0", "2", "2"]).start();
        wait_until("some of it is far", || job.is_over() || is_armed(&scratch, &job));
        job
    };
    let job = start(&["--auto", "--slo", "4", "--far", server.url(), "--far", other.url()]);
    for to in [plain.url(), other.url(), server.url()] {
        // It may move by itself meanwhile.
        wait_until("it has moved there", || {
            let ended = pool(&scratch, &["switch", &pid(&job), to]);
            assert!(!job.is_over(), "{to}: {}{}", ended.errors, job.errors());
            ended.code == 0 || ended.errors.contains("has this pool already")
        });
    }
}

#[test]
fn children_that_are_forked_in_the_middle_of_a_switch_move_too() {
    let scratch = Scratch::new("switch-forks");
    let Some(program) = compile("fork_far", scratch.path()) else { return };
    let server = Server::start_tcp(&scratch, "tcp", ["--capacity", "1G"]);
    let words = [program.to_str().expect("an ASCII path"), tier("20", "32")];
    let native = Command::new(&scratch.folder("native"), words).run();
    let tls = Server::start_tls(&scratch, "tls", "tls://127.0.0.1:0", &["--capacity", "1G"]);
    for _ in 0..tier(1, 20) {
        let job = FarRun::new(&scratch, ["--near", "16M"], words).start();
        for url in [server.url(), tls.url(), "first"].iter().cycle() {
            // A job that ends, or whose child has just ended in the middle of it, says so.
            let _ = pool(&scratch, &["switch", "--no-wait", &pid(&job), url]);
            if job.is_over() {
                break;
            }
        }
        let ended = job.wait();
        assert_eq!((ended.code, ended.text()), (native.code, native.text()), "{}", ended.errors);
    }
}

#[test]
fn a_new_server_that_is_killed_or_full_or_not_wanted_changes_nothing() {
    let scratch = Scratch::new("switch-fails");
    let Some(job) = hog(&scratch, "auto", "0") else { return };
    let before = status(&scratch, &job);
    let begin = |url: &str| {
        assert_eq!(pool(&scratch, &["switch", "--no-wait", &pid(&job), url]).code, 0);
        wait_until("something has moved", || {
            let status = status(&scratch, &job);
            status.contains("moves there") && !status.contains(": 0 of")
        });
    };
    let back = |why: &str| {
        wait_until("all is as before", || {
            let status = status(&scratch, &job);
            status.starts_with(&before) && status.contains(why) && !status.contains("moves there")
        });
    };
    // Killed.
    let server = Server::start_tcp(&scratch, "killed", ["--capacity", "256M"]);
    begin(&slow(&server));
    let again = pool(&scratch, &["switch", &pid(&job), "ssd:/tmp?size=1G"]);
    assert!(again.code == 1 && again.errors.contains("still moving"), "{}", again.errors);
    server.kill();
    back("is gone");
    // Not wanted any more.
    let server = Server::start_tcp(&scratch, "cancelled", ["--capacity", "256M"]);
    begin(&slow(&server));
    assert_eq!(pool(&scratch, &["cancel", &pid(&job)]).code, 0);
    back("cancelled");
    assert_eq!(pool(&scratch, &["cancel", &pid(&job)]).code, 1, "there is nothing to cancel");
    // Too small.
    let small = Server::start_tcp(&scratch, "small", ["--capacity", "16M"]);
    let full = pool(&scratch, &["switch", &pid(&job), small.url()]);
    assert!(full.code == 1 && full.errors.contains("is full"), "{}", full.errors);
    back("is full");
    // Encrypted, and the processes of the job do not find a file that the command has found.
    let tls = Server::start_tls(&scratch, "tls", "tls://127.0.0.1:0", &["--capacity", "256M"]);
    let authority = scratch.path().join("certs/ca.pem");
    std::fs::copy(&authority, scratch.folder("pool").join("ca.pem")).expect("room in the temporary folder");
    let url = tls.url().replace(authority.to_str().expect("ASCII"), "/proc/self/cwd/ca.pem");
    let unreadable = pool(&scratch, &["switch", &pid(&job), &url]);
    let why = "cannot read /proc/self/cwd/ca.pem";
    assert!(unreadable.code == 1 && unreadable.errors.contains(why), "{}", unreadable.errors);
    back(why);
    // Wrong.
    for (url, said) in
        [("tcp:1", "tcp://"), ("lz:?size=1G", "heaps"), ("first", "already"), ("unix:/no/such", "/no/such")]
    {
        let wrong = pool(&scratch, &["switch", &pid(&job), url]);
        assert!(wrong.code == 1 && wrong.errors.contains(said), "{url}: {}", wrong.errors);
    }
    let me = pool(&scratch, &["status", &std::process::id().to_string()]);
    assert!(me.code == 1 && me.errors.contains("does not belong to a job"), "{}", me.errors);
    // It would have ended if a word had been wrong.
    assert!(!job.is_over(), "{}", job.errors());
}

/// What a job that moves may exceed its budget by (docs/cli.md). The buffers for both places are part of the budget.
const OVER_MAX: u64 = 4 * MIB;

#[test]
fn a_job_that_moves_stays_within_its_budget() {
    let scratch = Scratch::new("switch-budget");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let servers = ["a", "b", "c"].map(|name| Server::start_tcp(&scratch, name, ["--capacity", "256M"]));
    let [a, b, c] = servers.each_ref().map(Server::url);
    let places = [a.to_owned(), ssd(&scratch), format!("mirror({a},{b})"), format!("ec(2,1,{a},{b},{c})")];
    for place in &places {
        let words = [hog.to_str().expect("ASCII"), "96", "0"];
        let run = FarRun::new(&scratch, ["--near", "32M"], words);
        let job = run.start();
        wait_until("some of it is far", || job.is_over() || is_armed(&scratch, &job));
        let ended = pool(&scratch, &["switch", &pid(&job), place]);
        assert_eq!(ended.code, 0, "{place}: {}", ended.errors);
        ends_well(job);
        let peak = run.report().number("near_peak_bytes");
        assert!((24 * MIB..=32 * MIB + OVER_MAX).contains(&peak), "{place}: {peak}");
    }
}

/// A mirror of two servers, which loses one of them.
struct FirstPlace {
    stays: Server,
    dies: Server,
}

impl FirstPlace {
    fn start(scratch: &Scratch) -> FirstPlace {
        let server = |name: &str| Server::start_tcp(scratch, name, ["--capacity", "256M"]);
        FirstPlace { stays: server("stays"), dies: server("dies") }
    }

    fn url(&self) -> String {
        format!("mirror({},{})", self.stays.url(), self.dies.url())
    }

    /// A job that checks its memory until it is told to end, and may be here or at `second`; some of it is far.
    fn job(&self, scratch: &Scratch, second: &str) -> Option<Running> {
        let hog = compile("hog", scratch.path())?;
        let first = self.url();
        // It hardly waits, however busy the machine is: so it moves only because of what was lost.
        let options = ["--near", "16M", "--auto", "--slo", "50", "--far", &first, "--far", second];
        let job = FarRun::new(scratch, options, [hog.to_str().expect("ASCII"), "64", "0", "1", "1", "gently"]).start();
        wait_until("some of it is far", || job.is_over() || is_armed(scratch, &job));
        Some(job)
    }
}

/// What `farfield pool status --json` says.
fn seen(scratch: &Scratch, job: &Running) -> serde_json::Value {
    let ended = pool(scratch, &["status", "--json", &pid(job)]);
    serde_json::from_str(&ended.text()).unwrap_or_else(|error| panic!("{error}: {}{}", ended.errors, job.errors()))
}

fn is_moving(seen: &serde_json::Value) -> bool {
    seen["moving"].as_array().is_some_and(|moving| !moving.is_empty())
}

/// It finds every word as it was stored, to the end.
fn ends_well(job: Running) {
    job.signal(libc::SIGUSR1);
    let ended = job.wait();
    assert_eq!((ended.code, ended.text().as_str()), (0, "started\n0 wrong\n"), "{}", ended.errors);
}

#[test]
fn a_job_moves_by_itself_when_its_place_has_lost_a_server_and_not_before() {
    let scratch = Scratch::new("switch-auto");
    let (first, second) = (FirstPlace::start(&scratch), Server::start_tcp(&scratch, "second", ["--capacity", "256M"]));
    let Some(job) = first.job(&scratch, second.url()) else { return };
    let before = seen(&scratch, &job);
    assert_eq!((&before["switches"], &before["degraded"]), (&0.into(), &serde_json::json!([])), "{before}");
    let first_url = first.url();
    first.dies.kill();
    wait_until("it says what is lost", || seen(&scratch, &job)["degraded"] != serde_json::json!([]));
    wait_until("it has moved", || {
        let seen = seen(&scratch, &job);
        assert!(!job.is_over() && seen["reason"].is_null(), "{seen} {}", job.errors());
        seen["moves"] == 1
    });
    let after = seen(&scratch, &job);
    assert_eq!((&after["urls"], &after["before"]), (&serde_json::json!([second.url()]), &before["urls"]));
    assert!(after["cause"].as_str().is_some_and(|cause| cause.contains("server was lost")), "{after}");
    let text = status(&scratch, &job);
    assert!(text.contains(&format!("by itself, from {first_url}: a server was lost there")), "{text}");
    // Nothing of it is left where it was.
    first.stays.kill();
    ends_well(job);
}

#[test]
fn a_job_moves_by_itself_from_a_place_that_has_become_slow() {
    // On a machine with thirty processes waiting no place looks slower than another one for long.
    if !deep() {
        return;
    }
    let scratch = Scratch::new("switch-slow");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    // Each is as far as the other one, so that nothing but what is done to it makes one better.
    let servers = ["one", "other"].map(|name| Server::start_tcp(&scratch, name, ["--capacity", "256M"]));
    let ways = servers.each_ref().map(|server| Relay::to(server.url()));
    let options = ["--near", "16M", "--auto", "--slo", "1.4", "--far", ways[0].url(), "--far", ways[1].url()];
    let job = FarRun::new(&scratch, options, [hog.to_str().expect("ASCII"), "64", "0", "1", "4"]).start();
    wait_until("some of it is far", || job.is_over() || is_armed(&scratch, &job));
    let place = |seen: &serde_json::Value| ways.iter().position(|way| seen["urls"] == serde_json::json!([way.url()]));
    // What the machine does beside may have it move, too, or hide from it for a while how slow it is.
    let has_moved_for_it = || {
        let Some(slow) = place(&seen(&scratch, &job)) else { return false };
        // It has to know what reads take there.
        let before = count(&scratch, &job, "demand_reads");
        wait_until("it reads", || job.is_over() || count(&scratch, &job, "demand_reads") > before + 50_000);
        ways[slow].delay(Duration::from_millis(3));
        let started = Instant::now();
        let mut seen_last = seen(&scratch, &job);
        while place(&seen_last) == Some(slow) && started.elapsed() < PATIENCE / 4 {
            assert!(!job.is_over(), "{seen_last} {}", job.errors());
            seen_last = seen(&scratch, &job);
        }
        ways[slow].delay(Duration::ZERO);
        let cause = seen_last["cause"].as_str().unwrap_or_default();
        place(&seen_last) == Some(1 - slow) && cause.contains("several times what they took before")
    };
    wait_until("it has moved because the place is slow", has_moved_for_it);
    let text = status(&scratch, &job);
    assert!(text.contains("reads took several times what they took before"), "{text}");
    ends_well(job);
}

#[test]
fn a_job_that_begins_at_a_slow_place_without_a_profile_leaves_it() {
    // It takes half a minute until the job has decided.
    if !deep() {
        return;
    }
    let scratch = Scratch::new("switch-unknown");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let server = |name: &str| Server::start_tcp(&scratch, name, ["--capacity", "256M"]);
    let (far, near) = (server("far"), server("near"));
    // So much farther away that no machine is too busy to see it.
    let first = format!("throttle(latency=10ms,{})", far.url());
    let options = ["--near", "32M", "--auto", "--slo", "1.4", "--far", &first, "--far", near.url()];
    let job = FarRun::new(&scratch, options, [hog.to_str().expect("ASCII"), "64", "0", "1", "1"]).start();
    wait_until("some of it is far", || job.is_over() || is_armed(&scratch, &job));
    wait_until("it has moved", || {
        assert!(!job.is_over(), "{}", job.errors());
        seen(&scratch, &job)["moves"] == 1
    });
    let seen = seen(&scratch, &job);
    let places = [[near.url()], [first.as_str()]].map(|urls| serde_json::json!(urls));
    assert_eq!([&seen["urls"], &seen["before"]], places.each_ref(), "{seen}");
    let peak = count(&scratch, &job, "near_peak_bytes");
    assert!((16 * MIB..=32 * MIB + OVER_MAX).contains(&peak), "{peak}");
    // Nothing of it is left where it was.
    far.kill();
    ends_well(job);
}

#[test]
fn a_job_whose_own_move_is_cancelled_or_fails_goes_on_where_it_was() {
    // It takes half a minute until the job has decided.
    if !deep() {
        return;
    }
    let scratches = ["killed", "cancelled"].map(|how| (how, Scratch::new(&format!("switch-auto-{how}"))));
    std::thread::scope(|scope| {
        for (how, scratch) in &scratches {
            scope.spawn(move || {
                let first = FirstPlace::start(scratch);
                let second = Server::start_tcp(scratch, "second", ["--capacity", "256M"]);
                let Some(job) = first.job(scratch, &slow(&second)) else { return };
                let before = seen(scratch, &job);
                first.dies.kill();
                wait_until("something has moved", || {
                    let seen = seen(scratch, &job);
                    assert!(!job.is_over() && seen["reason"].is_null(), "{seen} {}", job.errors());
                    is_moving(&seen) && seen["moving"][0]["moved_pages"].as_u64().is_some_and(|pages| pages > 0)
                });
                let why = match *how {
                    "killed" => {
                        second.kill();
                        "is gone"
                    }
                    _ => {
                        assert_eq!(pool(scratch, &["cancel", &pid(&job)]).code, 0);
                        "cancelled"
                    }
                };
                wait_until("all is as before", || {
                    let seen = seen(scratch, &job);
                    let is_said = seen["reason"].as_str().is_some_and(|reason| reason.contains(why));
                    is_said && !is_moving(&seen)
                });
                let after = seen(scratch, &job);
                assert_eq!((&after["urls"], &after["moves"]), (&before["urls"], &0.into()), "{after}");
                ends_well(job);
            });
        }
    });
}

#[test]
fn heaps_move_between_servers_and_survive_those_that_die() {
    let mut random = seeded(17);
    let scratch = Scratch::new("switch-heaps");
    let tcp = Server::start_tcp(&scratch, "tcp", ["--capacity", "256M"]);
    let near = Server::start(&scratch, "near", ["--capacity", "256M"]);
    for plane in [Plane::Page, Plane::Hybrid].into_iter().take(tier(1, 2)) {
        let heap = Heap::builder().near(2 * MIB).near_max(2 * MIB).far(1 << 30).plane(plane).pool(tcp.url());
        let heap = heap.patience(PATIENCE).build().expect("the server accepts");
        let value = |index: usize, round: u64| [(index as u64) << 32 | round; 256];
        let mut values: Vec<FarBox<[u64; 256]>> =
            (0..4000).map(|index| heap.alloc(value(index, 0)).expect("there is room")).collect();
        let mut rounds = vec![0; values.len()];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let switcher = scope.spawn(|| {
                let over = Over(&is_over);
                let mirror = format!("mirror({},{})", tcp.url(), near.url());
                for url in [near.url(), &ssd(&scratch), "lz:?size=256M", &mirror, tcp.url()] {
                    let dying = Server::start_tcp(&scratch, "dying", ["--capacity", "256M"]);
                    let moving = heap.switch_pool(slow(&dying)).expect("it opens");
                    wait_until("something has moved", || moving.progress().moved_pages > 0);
                    dying.kill();
                    let failed = moving.wait(PATIENCE).expect("it ends");
                    assert!(failed.is_err(), "{failed:?}");
                    let moved = heap.switch_pool(url).expect("it opens").wait(PATIENCE).expect("it ends");
                    assert_eq!(moved, Ok(()), "{url}");
                }
                drop(over);
            });
            while !is_over.load(Ordering::Relaxed) {
                let index = random.usize(..values.len());
                let scope = heap.enter();
                let held = values[index].get_mut(&scope).expect("a pool that lives");
                assert!(*held == value(index, rounds[index]), "value {index}");
                if random.usize(..2) == 0 {
                    rounds[index] += 1;
                    *held = value(index, rounds[index]);
                }
            }
            switcher.join().expect("it ends");
        });
        for (index, held) in values.iter().enumerate() {
            assert!(
                *held.get(&heap.enter()).expect("a pool that lives") == value(index, rounds[index]),
                "value {index}"
            );
        }
        assert_eq!(heap.stats().pool_switches, 5);
        drop(values);
        heap.verify();
    }
}
