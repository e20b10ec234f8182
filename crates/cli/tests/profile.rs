//! `farfield profile` around real processes.
//!
//! Danger: a program that behaves differently because it is looked at, and a profile of something else.

mod common;

use common::{Folder, farfield, json, text};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

/// `farfield profile -o FOLDER/p.json OPTIONS -- PROGRAM`.
fn profile(folder: &Folder, options: &[&str], program: &[&str]) -> Command {
    let mut command = farfield();
    command.arg("profile").arg("-o").arg(folder.path("p.json")).args(options).arg("--").args(program);
    command
}

#[test]
fn the_program_ends_as_it_ends_without_us() {
    let folder = Folder::new("profile-ends");
    for code in [0, 7, 255] {
        let output =
            profile(&folder, &["-q"], &["sh", "-c", &format!("echo $0; sleep 0.02; exit {code}")]).output().unwrap();
        assert_eq!((output.status.code(), text(&output).as_str()), (Some(code), "sh\n"));
    }
    let output = profile(&folder, &["-q"], &["sh", "-c", "sleep 0.02; kill -TERM $$"]).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGTERM));
    let output = profile(&folder, &[], &["no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127), "{}", text(&output));
    let output = profile(&folder, &["--interval", "5"], &["true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(97), "{}", text(&output));
    let mut nowhere = farfield();
    let output = nowhere.args(["profile", "-o", "/no/such/p.json", "--", "true"]).output().unwrap();
    assert!(output.status.code() == Some(97) && text(&output).contains("/no/such"), "{}", text(&output));
}

#[test]
fn the_environment_is_the_programs_own() {
    let folder = Folder::new("profile-environment");
    let mut command = profile(&folder, &["-q"], &["sh", "-c", "echo $LD_PRELOAD$FARFIELD_CONTROL $mine; sleep 0.02"]);
    let output = command.env("mine", "yes").output().unwrap();
    assert_eq!(text(&output), "yes\n");
}

#[test]
fn what_all_its_processes_use_is_written() {
    let folder = Folder::new("profile-memory");
    // A child that has 32 MiB and uses them.
    let child = "x=$(head -c 33554432 /dev/zero | tr '\\0' x); sleep 0.3; echo ${#x}";
    let program = ["sh", "-c", "sh -c \"$0\"; true", child];
    let output = profile(&folder, &["--interval", "10ms"], &program).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() && said.contains("33554432"), "{said}");
    assert!(said.contains("working set") && said.contains("looking cost it about"), "{said}");
    let profile = json(&folder.path("p.json"));
    let peak = profile["findings"]["anonymous_peak_bytes"].as_u64().unwrap();
    assert!(peak >= 32 << 20, "{peak}");
    assert!(profile["observation"]["processes"].as_u64().unwrap() >= 2);
    assert_eq!((&profile["version"], &profile["command"][0]), (&1.into(), &"sh".into()));
    assert!(!profile["findings"]["heat"]["rows"].as_array().unwrap().is_empty());
    let picture = std::fs::read_to_string(folder.path("p.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("<title>"));
}
