//! The workload `sql`, small: whatever keeps the rows and wherever groups are found, the answers are the same. Built with the feature `sql`.

use farfield_server::{Config, Server};
use farfield_wic::Registry;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The checksum of all answers.
fn ask(more: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sql-data");
    let output = command.args(["sql", "--data-mib", "12"]).args(more).env("FARFIELD_DATA", data).output().unwrap();
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

/// Small files in the form of real ones: a place whose name another has, places without a name, fares that are missing.
#[test]
fn real_trips_are_those_of_the_file() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sql-data/nyc-green-taxi");
    fs::create_dir_all(&folder).unwrap();
    let places = "LocationID,borough,zone,lon,lat\n7,Queens,Astoria,0,0\n8,Queens,Corona,0,0\n9,Queens,Corona,0,0\n";
    fs::write(folder.join("taxi_zone_centroids.csv"), places).unwrap();
    let mut trips = ",".repeat(12) + "\n";
    for trip in 0..5000u32 {
        let fare = if trip % 9 == 0 { String::new() } else { format!("{}.5", trip % 170) };
        let (from, to, start) = (trip % 12, 260 + trip % 6, "2020-04-01 00:44:02");
        writeln!(trips, "2,{start},,,,{from},{to},1,{}.25,{fare},,,1.5", trip % 20).unwrap();
    }
    fs::write(folder.join("green_tripdata_2020-04_2022-02.csv"), trips).unwrap();
    let expected = ask(&["--real", "1"]);
    for offload in ["none", "all"] {
        assert_eq!(ask(&["--real", "1", "--near", "2097152", "--pool", "ram:", "--offload", offload]), expected);
    }
}
