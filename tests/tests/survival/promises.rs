//! Does a user hear that what is far is not protected as its pool promises, and where?
//!
//! Danger: a job that goes on for days at its last server, and nobody knows.

use super::stops::HOG;
use farfield_tests::{Command, Report, Running, Scratch, Server, compile, farfield, wait_until};

/// `farfield run` with all that it says, and where its report goes.
fn start(scratch: &Scratch, far: &str) -> Option<(Running, std::path::PathBuf)> {
    let hog = compile("hog", scratch.path())?;
    let report = scratch.path().join("report.json");
    let program = farfield();
    let [program, hog, report_text] = [&program, &hog, &report].map(|path| path.to_str().expect("an ASCII path"));
    let ours = [program, "run", "--near", "16M", "--far", far, "--report", report_text, "--", hog];
    let words = ours.iter().chain(&HOG).map(|word| (*word).to_owned());
    Some((Command::new(&scratch.folder("run"), words).start(), report))
}

fn ask(scratch: &Scratch, words: &[&str], job: &Running) -> String {
    let program = farfield();
    let words = [program.to_str().expect("an ASCII path")].into_iter().chain(words.iter().copied()).map(str::to_owned);
    Command::new(&scratch.folder("ask"), words.chain([job.pid().to_string()])).run().text()
}

fn said(job: &Running, what: &str) -> usize {
    job.errors().matches(what).count()
}

/// Ends the program, and then what it has started, for which the runner waits.
fn end(job: &Running) {
    wait_until("it ends", || {
        job.is_over() || {
            job.signal(libc::SIGTERM);
            false
        }
    });
}

const LAPSE: &str = "not protected as its pool promises:";

#[test]
fn a_lost_server_is_said_once_and_everywhere_and_so_is_that_all_is_protected_again() {
    let scratch = Scratch::new("promises");
    let servers = ["one", "two"].map(|name| Server::start_tcp(&scratch, name, ["--capacity", "1G"]));
    let far = format!("mirror({},{})", servers[0].url(), servers[1].url());
    let Some((job, report)) = start(&scratch, &far) else { return };
    wait_until("the job is protected", || ask(&scratch, &["top", "--once"], &job).contains("  protected"));
    // On a busy machine a server may be slow for longer than a moment: that is a lapse, too.
    let before = [said(&job, LAPSE), said(&job, "protected again")];
    let [first, second] = servers;
    let url = first.url().to_owned();
    first.kill();
    wait_until("the loss is said", || said(&job, LAPSE) > before[0]);
    let top = ask(&scratch, &["top", "--once"], &job);
    assert!(top.contains("NOT PROTECTED") && top.contains("a server is lost"), "{top}");
    assert!(ask(&scratch, &["pool", "status"], &job).contains("are not protected"));
    let _again = Server::start_at(&scratch, "again", url, ["--capacity", "1G"]);
    wait_until("that it is protected again is said", || said(&job, "protected again") > before[1]);
    end(&job);
    assert!(job.errors().contains("in the end it was\n"), "{}", job.errors());
    let protection = &Report::read(&report).0["protection"];
    assert!(protection["is_whole"] == true && protection["lapses"].as_u64() >= Some(1), "{protection}");
    assert!(protection["unprotected_s"].as_f64() > Some(1.0) && protection["missing_legs_max"] == 1, "{protection}");
    drop(second);
}

#[test]
fn one_server_named_twice_is_said_at_the_start() {
    let scratch = Scratch::new("promises-twice");
    let server = Server::start_tcp(&scratch, "one", ["--capacity", "1G"]);
    let other_name = server.url().replace("127.0.0.1", "[::ffff:127.0.0.1]");
    let far = format!("mirror({},{other_name})", server.url());
    let Some((job, report)) = start(&scratch, &far) else { return };
    wait_until("it is said", || said(&job, "one server is 2 of the members") == 1);
    wait_until("top says so", || ask(&scratch, &["top", "--once"], &job).contains("NOT PROTECTED"));
    end(&job);
    assert_eq!(said(&job, LAPSE), 1, "{}", job.errors());
    let protection = &Report::read(&report).0["protection"];
    assert!(protection["is_whole"] == false && protection["shared_legs"] == 1, "{protection}");
}
