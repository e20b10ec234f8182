//! One-sided reads on the command line. Without the feature: errors that say what to do.

mod common;

use common::*;
use std::process::Stdio;

#[cfg(feature = "fabric")]
#[test]
fn a_server_with_a_fabric_is_measured_and_unmodified_programs_do_not_get_it() {
    let folder = Folder::new("fabric");
    let mut command = farfield();
    let socket = format!("unix:{}", folder.path("socket").display());
    command.args([
        "serve",
        "--listen",
        "tcp://127.0.0.1:0",
        "--listen",
        &socket,
        "--fabric",
        "tcp",
        "--log-format",
        "json",
    ]);
    let server = Running::start(command.stderr(Stdio::null()));
    let ready: serde_json::Value = serde_json::from_str(&server.line()).unwrap();
    let url = format!("fabric:{}", ready["endpoints"][0].as_str().unwrap());
    let output = farfield().args(["doctor", "--json", "--pool", &url]).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() && said.contains("libfabric"), "{said}");
    // It is refused before anything is loaded.
    let mut run = farfield();
    run.env("FARFIELD_PRELOAD", env!("CARGO_BIN_EXE_farfield"));
    let output = run.args(["run", "--far", &url, "--", "true"]).output().unwrap();
    assert!(!output.status.success() && text(&output).contains("fabric is for heaps"), "{}", text(&output));
}

#[test]
fn a_build_without_libfabric_says_how_to_get_it() {
    let farfield = || match std::env::var_os("FARFIELD_BIN") {
        // What users get is without it.
        Some(path) => std::process::Command::new(path),
        None => farfield(),
    };
    if cfg!(feature = "fabric") && std::env::var_os("FARFIELD_BIN").is_none() {
        println!("skipped: this build has libfabric, and FARFIELD_BIN names no other");
        return;
    }
    let serve = farfield()
        .args(["serve", "--listen", "tcp://127.0.0.1:0", "--fabric", "tcp"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let pool = farfield().args(["doctor", "--pool", "fabric:tcp://127.0.0.1:1"]).output().unwrap();
    for output in [serve, pool] {
        assert!(!output.status.success() && text(&output).contains("libfabric-dev"), "{}", text(&output));
    }
}
