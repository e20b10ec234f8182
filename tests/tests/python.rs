//! Far memory in a running Python: the wheel is made from the programs under test, installed into an environment of its own, and
//! used by programs (`programs/python/`) that compare what they compute.
//!
//! Danger: a process that far memory is switched on in late has a past: threads, handlers, a heap. And an `enable()` that is refused
//! must leave the process as it was.

use farfield_tests::{
    Command, Ended, Scratch, Server, deep, project, python, python_command, python_filled, python_program,
};
use farfield_tests::{skip, soak_time, tier};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(180);

/// Runs these situations, one after the other.
fn check(names: &[&str]) {
    check_in("situations.py", names);
}

fn check_in(file: &str, names: &[&str]) {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("situations");
    for name in names {
        let ended = python_command(&scratch, &[&python_program(file), name]).run();
        assert_ok(name, &ended);
    }
}

fn assert_ok(name: &str, ended: &Ended) {
    assert_eq!(ended.code, 0, "{name}: {}", ended.errors);
    assert!(ended.text().ends_with("ok\n"), "{name}: {}", ended.text());
}

#[test]
fn libraries_beyond_their_budget_compute_the_same() {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("jobs");
    let (near, rows) = tier(("24M", "300000"), ("64M", "3000000"));
    let job = |near: &str| python_command(&scratch, &[&python_program("jobs.py"), near, rows]).run();
    let [plain, far] = ["plain", near].map(job);
    assert_eq!((plain.code, far.code), (0, 0), "{} {}", plain.errors, far.errors);
    assert_eq!(plain.text(), far.text());
}

/// Runs recipes of the guide. Those whose module this machine does not have are skipped.
fn follow(recipes: &[&str]) {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("recipes");
    for recipe in recipes {
        let ended = python_command(&scratch, &[&python_program("recipes.py"), recipe]).run();
        match ended.text().trim_end().lines().last().and_then(|line| line.strip_prefix("absent ")) {
            Some(module) => skip(&format!("{recipe}: python3 has no module {module} (FARFIELD_PYTHON names another)")),
            None => assert_ok(recipe, &ended),
        }
    }
}

#[test]
fn processes_of_a_job_follow_the_recipes() {
    follow(&["multiprocessing", "joblib"]);
}

#[test]
fn kernels_are_written_listed_and_removed() {
    follow(&["kernels"]);
}

#[test]
fn the_tutorial_can_be_followed() {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("tutorial");
    let notebook = project().join("python/examples/tutorial.ipynb");
    let notebook = notebook.to_str().expect("UTF-8");
    let ended = python_command(&scratch, &[&python_program("tutorial.py"), notebook]).run();
    assert_ok("tutorial", &ended);
}

#[test]
fn notebooks_and_foreign_workers_follow_the_recipes() {
    if deep() {
        follow(&["pytest", "jupyter", "dask", "ray"]);
    }
}

#[test]
fn children_and_older_threads_and_handlers_go_on() {
    check(&["children", "threads", "handlers", "in_child", "preloaded"]);
}

#[test]
fn types_of_the_package_are_complete() {
    if !deep() {
        return;
    }
    let Some(python) = python() else { return };
    let (scratch, package) = (Scratch::new("types"), project().join("python/farfield"));
    let [python, package] = [python, &package].map(|path| path.to_str().expect("UTF-8"));
    let mypy = |words: &[&str]| Command::new(scratch.path(), [&[python, "-m", "mypy"][..], words].concat()).run();
    if mypy(&["--version"]).code != 0 {
        return skip("python3 has no module mypy (FARFIELD_PYTHON names another)");
    }
    let ended = mypy(&["--strict", "--ignore-missing-imports", package]);
    assert_eq!(ended.code, 0, "{}{}", ended.text(), ended.errors);
}

#[test]
fn the_budget_is_told_changed_and_not_contradicted() {
    check(&["budget"]);
}

#[test]
fn refused_starts_change_nothing() {
    check(&["refusals", "wrong_token", "limit", "mask", "untraced", "forbidden", "interrupt"]);
}

#[test]
fn a_program_that_runs_begins_at_an_encrypted_server() {
    check(&["encrypted"]);
}

#[test]
fn a_process_of_a_job_keeps_that_job() {
    let Some(python) = python() else { return };
    let scratch = Scratch::new("inside");
    let python = python.to_str().expect("UTF-8");
    for (what, file, name) in [
        ("everything", "situations.py", "inside"),
        ("everything", "arrays.py", "inside"),
        ("arrays", "arrays.py", "inside_arrays"),
    ] {
        let run = ["-m", "farfield", "run", "--quiet", "--near", "40M", "--what", what, "--"];
        let file = python_program(file);
        assert_ok(name, &python_command(&scratch, &[&run[..], &[python, &file, name]].concat()).run());
    }
}

#[test]
fn arrays_are_where_they_were_placed_and_nothing_else_moves() {
    check_in("arrays.py", &["only_arrays", "among_everything", "refusals"]);
}

#[test]
fn placed_arrays_outlive_their_block_and_change_their_size() {
    check_in("arrays.py", &["lives", "sizes", "ends"]);
}

#[test]
fn placed_arrays_travel_and_follow_contexts() {
    check_in("arrays.py", &["travels", "contexts", "many"]);
}

#[test]
fn a_program_outlives_its_keeper_if_its_server_is_another_one() {
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("keeper");
    let server = Server::start(&scratch, "server", ["--capacity", "512M"]);
    let ended = python_command(&scratch, &[&python_program("situations.py"), "keeper", server.url()]).run();
    assert_ok("keeper", &ended);
}

#[test]
fn an_ordinary_user_can_enable_too() {
    if !deep() {
        return;
    }
    let Some(python) = python() else { return };
    // SAFETY: reads a number.
    if unsafe { libc::geteuid() } != 0 || farfield_tests::program("setpriv").is_none() {
        return; // This user is one, or cannot become one.
    }
    let scratch = Scratch::new("nobody");
    let words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python.to_str().expect("UTF-8")];
    // The project may be in a folder that is closed to others.
    let situations = std::fs::read(python_program("situations.py")).expect("readable");
    let situations = scratch.file("situations.py", situations);
    let words = [&words[..], &[situations.to_str().expect("UTF-8"), "children"]].concat();
    let ended = Command::new(scratch.path(), words).env("XDG_RUNTIME_DIR", "").within(DEADLINE).run();
    assert_ok("nobody", &ended);
}

#[test]
fn a_lost_server_ends_the_interpreter_unless_it_was_mirrored() {
    if python().is_none() {
        return;
    }
    let start = |scratch: &Scratch, name: &str| Server::start(scratch, name, ["--capacity", "512M"]);

    let scratch = Scratch::new("lost");
    let server = start(&scratch, "server");
    let running = python_filled(&scratch, "situations.py", server.url());
    server.kill();
    std::fs::write(scratch.path().join("go"), "\n").expect("it reads");
    let ended = running.wait();
    assert_eq!(ended.code, 93, "{} {}", ended.text(), ended.errors);

    let encrypted =
        |scratch: &Scratch, name: &str| Server::start_tls(scratch, name, "tls://127.0.0.1:0", &["--capacity", "512M"]);
    for (name, start) in [("mirrored", &start as &dyn Fn(&Scratch, &str) -> Server), ("encrypted", &encrypted)] {
        let scratch = Scratch::new(name);
        let (one, other) = (start(&scratch, "one"), start(&scratch, "other"));
        let running = python_filled(&scratch, "situations.py", &format!("mirror({},{})", one.url(), other.url()));
        one.kill();
        std::fs::write(scratch.path().join("go"), "\n").expect("it reads");
        assert_ok(name, &running.wait());
    }
}

/// In the deep tier for an hour.
#[test]
fn a_notebook_is_right_all_day() {
    let Some(time) = soak_time(Duration::from_secs(3600)) else { return };
    if python().is_none() {
        return;
    }
    let scratch = Scratch::new("day");
    let options = ["--capacity", "2G"];
    let servers: Vec<Server> = (0..4)
        .map(|number| match number {
            0 => Server::start_tcp(&scratch, "tcp", options),
            number => Server::start(&scratch, &format!("server-{number}"), options),
        })
        .collect();
    let [first, second, one, other] = &servers[..] else { unreachable!("there are four") };
    let mirror = format!("mirror({},{})", one.url(), other.url());
    let (program, seconds) = (python_program("day.py"), time.as_secs().to_string());
    let words = [program.as_str(), &seconds, first.url(), second.url(), &mirror];
    let ended = python_command(&scratch, &words).within(time + 2 * DEADLINE).run();
    println!("{}", ended.text());
    assert_ok("day", &ended);
}
