//! Do the examples do what they say?
//!
//! Danger: the first thing a user copies does not work.

use farfield_tests::{Command, Scratch, farfield, project};

/// Runs the example with the build under test in front of the PATH; gives back what it printed.
fn run(name: &str) -> String {
    let scratch = Scratch::new(name);
    let script = project().join("examples").join(name);
    let folder = farfield().parent().expect("a file in a folder").to_owned();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let command = Command::new(&scratch.folder("run"), ["sh".as_ref(), script.as_os_str()]);
    let ended = command.env("PATH", path).run();
    assert_eq!(ended.code, 0, "{name}: {}\n{}", ended.text(), ended.errors);
    ended.text()
}

#[test]
fn one_machine() {
    let text = run("one-machine.sh");
    assert!(text.contains("400000 different words"), "{text}");
    assert!(text.contains("far_peak_bytes"), "{text}");
}

#[test]
fn two_servers() {
    assert_eq!(run("two-servers.sh"), "99999\n");
}

#[test]
fn in_a_script() {
    let text = run("in-a-script.sh");
    let starts: Vec<&str> = text.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(starts, ["0", "5", "127", "97"], "{text}");
}
