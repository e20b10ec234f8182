//! Heaps and frames from Python: the situations of `programs/python/frames.py`, which compare with plain Python.
//!
//! Danger: an answer that differs from what plain Python says; a lock that is held while a question is far; a child that uses threads
//! which it does not have; a lost server that ends the interpreter.

use farfield_tests::{Ended, Scratch, Server, python, python_command, python_filled, python_program, skip, tier};

/// Runs a situation, which may need a module that this machine does not have.
fn check(situation: &str, argument: &str) {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new(situation);
    assert_ok(situation, &python_command(&scratch, &[&python_program("frames.py"), situation, argument]).run());
}

fn assert_ok(situation: &str, ended: &Ended) {
    assert_eq!(ended.code, 0, "{situation}: {} {}", ended.text(), ended.errors);
    match ended.text().trim_end().lines().last() {
        Some("ok") => {}
        Some(absent) if absent.starts_with("absent ") => skip(&format!("{situation}: {absent}")),
        other => panic!("{situation}: {other:?} {}", ended.errors),
    }
}

#[test]
fn random_chains_of_operations_agree_with_plain_python() {
    let scratch = Scratch::new("servers");
    let (one, other) = (server(&scratch, "one"), server(&scratch, "other"));
    let mirror = format!("mirror({},{})", one.url(), other.url());
    for _ in 0..tier(1, 20) {
        for url in ["", one.url(), &mirror] {
            check("history", url);
        }
    }
}

#[test]
fn arrays_and_frames_of_others_are_the_same() {
    check("numpy", "");
    check("polars", "");
}

#[test]
fn questions_are_interrupted_and_do_not_hold_the_lock() {
    check("interrupt", "");
    check("threads", "");
}

#[test]
fn forked_children_are_refused_and_others_work() {
    check("forks", "");
}

#[test]
fn what_cannot_be_is_said() {
    check("refusals", "");
    check("sql", "");
}

#[test]
fn both_doors_work_in_one_process() {
    check("enabled", "");
}

#[test]
fn a_heap_moves_to_another_pool() {
    let scratch = Scratch::new("moves");
    let (one, other) = (server(&scratch, "one"), server(&scratch, "other"));
    check("moves", &format!("{},{}", one.url(), other.url()));
}

fn server(scratch: &Scratch, name: &str) -> Server {
    Server::start(scratch, name, ["--capacity", "1G"])
}

#[test]
fn a_lost_server_is_an_exception_and_a_mirrored_one_nothing() {
    if python().is_none() {
        return;
    }
    for (name, is_mirrored) in [("lost", false), ("mirrored", true)] {
        let scratch = Scratch::new(name);
        let (one, other) = (server(&scratch, "one"), server(&scratch, "other"));
        let mirror = format!("mirror({},{})", one.url(), other.url());
        let running = python_filled(&scratch, "frames.py", if is_mirrored { &mirror } else { one.url() });
        one.kill();
        std::fs::write(scratch.path().join("go"), "\n").expect("it reads");
        let ended = running.wait();
        assert_ok(name, &ended);
        assert_eq!(ended.text().contains("lost:"), !is_mirrored, "{}", ended.text());
    }
}
