//! The workload `sql`, small: whatever keeps the rows and wherever groups are found, the answers are the same. Built with the feature `sql`.

use farfield_server::{Config, Server};
use farfield_wic::Registry;
use std::path::Path;
use std::process::Command;

/// The checksum of all answers.
fn ask(more: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
    let output = command.args(["sql", "--data-mib", "12"]).args(more).output().unwrap();
    assert!(output.status.success(), "{more:?}: {}", String::from_utf8_lossy(&output.stderr));
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["verified"], true, "{more:?}: {line}");
    line["checksum"].as_str().unwrap().to_owned()
}

#[test]
fn answers_are_the_same_wherever_rows_are() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let url = format!("unix:{}", folder.join("sql.sock").display());
    let functions = Registry::standard();
    let _server = Server::start(Config { listen: vec![url.parse().unwrap()], functions, ..Config::default() }).unwrap();
    let expected = ask(&[]);
    for offload in ["none", "all"] {
        for pool in ["ram:", &url] {
            let far = ["--near", "2097152", "--pool", pool, "--offload", offload];
            assert_eq!(ask(&far), expected, "{pool}, {offload}");
        }
    }
    assert_ne!(ask(&["--seed", "1"]), expected, "other trips have other answers");
}
