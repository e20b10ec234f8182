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
fn a_profile_counts_all_processes_of_the_job() {
    let folder = Folder::new("profile-memory");
    // A child that has 32 MiB, uses them, and works until somebody has seen that and taken the accessed bits away.
    let child = "x=$(head -c 33554432 /dev/zero | tr '\\0' x); looks=0
        until [ $(awk '/^Referenced/ { used += $2 } END { print used }' /proc/$$/smaps) -lt 16384 ] || [ $looks = 2000 ]; do
            looks=$((looks + 1))
        done; echo ${#x}";
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

#[test]
fn runs_with_far_memory_and_advice_follow() {
    let folder = Folder::new("profile-far");
    // With a library that does nothing, runs with far memory are as fast as those without.
    let program = ["sh", "-c", "x=$(head -c 20971520 /dev/zero | tr '\\0' x); sleep 0.5; echo ${#x}"];
    let options = ["--interval", "20ms", "--near", "100%,90%,16M"];
    let mut command = profile(&folder, &options, &program);
    let output = command.env("FARFIELD_PRELOAD", folder.library()).output().unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).matches("20971520").count(), 5, "seen, alone, and three times");
    assert!(said.contains("run 3: 16.0 MiB near") && said.contains("a falling line"), "{said}");
    let profile = json(&folder.path("p.json"));
    let shares: Vec<f64> =
        profile["far_runs"].as_array().unwrap().iter().map(|run| run["near_share"].as_f64().unwrap()).collect();
    assert!(shares.len() == 3 && shares.is_sorted_by(|a, b| a > b), "{shares:?}");
    let advise = |slo: &str, more: &[&str]| {
        let mut command = farfield();
        command.args(["advise", "--slo", slo]).args(more).arg(folder.path("p.json")).output().unwrap()
    };
    let output = advise("50", &["--json"]);
    let advice: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(
        (&advice["choice"]["near_bytes"], &advice["choice"]["source"]),
        (&(16 << 20).into(), &"measured".into())
    );
    let output = advise("50", &[]);
    assert!(text(&output).contains("farfield run --near 16M -- sh -c"), "{}", text(&output));
    let output = advise("1.4", &["--far", "unix:/no/such/socket"]);
    assert!(output.status.code() == Some(1) && text(&output).contains("/no/such/socket"), "{}", text(&output));
    // And it is applied.
    let report = folder.path("run.json");
    let mut command = farfield();
    command.env("FARFIELD_PRELOAD", folder.library()).args(["run", "--auto", "--slo", "50", "--profile"]);
    command
        .arg(folder.path("p.json"))
        .args(["--near", "100M", "--report"])
        .arg(&report)
        .args(["--", "sh", "-c", "exit 5"]);
    let output = command.output().unwrap();
    assert!(
        output.status.code() == Some(5) && text(&output).contains("starts with 16.0 MiB near"),
        "{}",
        text(&output)
    );
    let report = json(&report);
    assert_eq!((&report["hold"]["slo"], &report["hold"]["near_limit_last_bytes"]), (&50.0.into(), &(16 << 20).into()));
}

#[test]
fn the_least_budget_that_is_fast_enough_is_sought_and_what_is_slow_by_far_is_ended() {
    let folder = Folder::new("profile-slo");
    // The fourth time (seen, alone, once with far memory, and then) it takes a minute, unless it is ended.
    let script = "x=$(head -c 67108864 /dev/zero | tr '\\0' x); echo >> $0; echo ${#x}
        if [ $(wc -l < $0) = 4 ]; then exec sleep 60; fi; sleep 0.3";
    let runs = folder.path("runs");
    let program = ["sh", "-c", script, runs.to_str().unwrap()];
    let options = ["--interval", "20ms", "--slo", "3"];
    let started = std::time::Instant::now();
    let output = profile(&folder, &options, &program).env("FARFIELD_PRELOAD", folder.library()).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() && started.elapsed().as_secs() < 50, "{said}");
    assert!(said.contains("more than"), "{said}");
    let seen = json(&folder.path("p.json"));
    let runs = seen["far_runs"].as_array().unwrap();
    let cut: Vec<bool> = runs.iter().map(|run| run["is_cut"].as_bool().unwrap()).collect();
    assert!(cut[1] && cut.iter().filter(|cut| **cut).count() == 1, "{cut:?}");
    assert_eq!(std::fs::read_to_string(folder.path("runs")).unwrap().lines().count(), runs.len() + 2);
    let near = |run: &serde_json::Value| run["near_bytes"].as_u64().unwrap();
    let peak = seen["findings"]["anonymous_peak_bytes"].as_u64().unwrap();
    let fast = runs.iter().zip(&cut).filter(|(_, cut)| !**cut).map(|(run, _)| near(run)).min().unwrap();
    assert!(fast > near(&runs[1]) && fast - near(&runs[1]) <= peak / 20, "{runs:?}");
    let mut advise = farfield();
    let output = advise.args(["advise", "--json", "--slo", "3"]).arg(folder.path("p.json")).output().unwrap();
    let advice: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let advised = advice["choice"]["near_bytes"].as_u64().unwrap();
    assert!(advised > near(&runs[1]) && advised <= fast, "{advice}");
    let both = profile(&folder, &["--slo", "3", "--near", "50%"], &["true"]).output().unwrap();
    assert_eq!(both.status.code(), Some(97), "{}", text(&both));
}

#[test]
fn a_program_that_ends_otherwise_with_far_memory_is_told_of() {
    let folder = Folder::new("profile-differs");
    let once = folder.path("once");
    let script = format!("sleep 0.05; mkdir {}", once.display());
    let mut command = profile(&folder, &["--near", "50%"], &["sh", "-c", &script]);
    let output = command.env("FARFIELD_PRELOAD", folder.library()).output().unwrap();
    assert!(output.status.code() == Some(1) && text(&output).contains("differently than before"), "{}", text(&output));
    assert_eq!(json(&folder.path("p.json"))["far_runs"], serde_json::json!([]), "what was seen is there");
}
