//! Does it matter at which moment something is killed? Runners, programs and their children end by SIGKILL after a random time:
//! before they arm, while they arm, while pages travel, in a fork.
//!
//! Danger: a process that waits for a dead one for ever; a server that keeps what nobody owns. `FARFIELD_SEED` repeats the choices.

use farfield_tests::{FarRun, Running, Scratch, Server, compile, kill_marked, marked_processes, tier, wait_until};
use std::time::Duration;

/// Who is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Runner,
    /// Its child would run for ever.
    Program,
    /// Its parent goes on, and ends with the right results.
    Child,
}

/// The process of the job that is to be killed. `None`: it is not there yet, or has ended.
fn find(job: &Running, victim: Victim) -> Option<i32> {
    let children_of = |parent: i32| {
        let text = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        text.split_whitespace().filter_map(|word| word.parse::<i32>().ok()).collect::<Vec<_>>()
    };
    let is_hog =
        |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "hog");
    let program = children_of(job.pid()).into_iter().find(is_hog);
    match victim {
        Victim::Runner => Some(job.pid()),
        Victim::Program => program,
        Victim::Child => children_of(program?).first().copied(),
    }
}

/// Starts jobs that would run for ever, kills one process of each, and looks whether the others and the server notice.
fn kill_many(name: &str, mode: &str, start: impl Fn(&Scratch) -> Server) {
    let seed = std::env::var("FARFIELD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1u64);
    println!("FARFIELD_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let scratch = Scratch::new(name);
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let hog = hog.to_str().expect("an ASCII path");
    let server = start(&scratch);
    let options = ["--near", "16M", "--mode", mode, "--far", server.url()];
    let mut killed = [0; 3];
    for round in 0..tier(6, 1000) {
        let victim = [Victim::Runner, Victim::Program, Victim::Child][random.u64(..3) as usize];
        let threads = ["1", "3"][random.u64(..2) as usize];
        let rounds = if victim == Victim::Child { "2" } else { "0" };
        let job = FarRun::new(&scratch, options, [hog, "48", rounds, "2", threads]).start();
        // Any moment is as good as another.
        std::thread::sleep(Duration::from_millis(random.u64(..150)));
        if let Some(pid) = find(&job, victim) {
            // SAFETY: a system call with two integers; a process of this job.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            killed[victim as usize] += 1;
        }
        let mark = job.mark().to_owned();
        // A runner stays until the last process of its job has ended.
        wait_until("all processes of the program are gone", || {
            if victim != Victim::Child {
                kill_marked(&mark, "hog");
            }
            job.is_over()
        });
        let ended = job.wait();
        let said = || format!("round {round}, {victim:?}: {}\n{}", ended.text(), ended.errors);
        if victim == Victim::Child {
            assert!(ended.code == 0 && ended.text().contains("0 wrong"), "{}", said());
        } else {
            assert_eq!(ended.code, 137, "{}", said());
        }
        wait_until("all processes of the job are gone", || {
            kill_marked(&mark, "hog");
            marked_processes(&mark).is_empty()
        });
        let _ = std::fs::remove_file(&ended.output);
        let _ = std::fs::remove_file(ended.output.with_extension("err"));
    }
    println!("killed {} runners, {} programs, {} children", killed[0], killed[1], killed[2]);
    assert!(killed.iter().sum::<u32>() > 0, "nothing was there to be killed");
    for name in ["farfield_used_bytes", "farfield_reserved_bytes", "farfield_regions"] {
        wait_until(name, || server.metric(name) == 0);
    }
    let ended = FarRun::new(&scratch, options, [hog, "48", "1"]).run();
    assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
}

const SERVER: [&str; 4] = ["--lease", "1s", "--metrics", "127.0.0.1:0"];

#[test]
fn jobs_of_a_local_server_can_be_killed_at_any_moment() {
    kill_many("kills-unix", "signal", |scratch| Server::start(scratch, "server", SERVER));
}

#[test]
fn jobs_of_a_server_elsewhere_can_be_killed_at_any_moment() {
    kill_many("kills-tcp", "signal", |scratch| Server::start_tcp(scratch, "server", SERVER));
}

#[test]
fn jobs_with_handler_threads_can_be_killed_at_any_moment() {
    kill_many("kills-thread", "thread", |scratch| Server::start(scratch, "server", SERVER));
}
