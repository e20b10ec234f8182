//! `farfield sim`: guards against results that differ between equal runs, and against files whose
//! mistakes pass.

mod common;

use common::{Folder, farfield, text};
use std::process::Output;

fn sim(words: &[&str]) -> Output {
    farfield().arg("sim").args(words).output().unwrap()
}

fn check(words: &[&str]) -> Vec<u8> {
    let output = sim(words);
    assert!(output.status.success(), "{words:?}: {}", text(&output));
    output.stdout
}

#[test]
fn equal_seeds_give_equal_bytes_that_can_be_compared() {
    let folder = Folder::new("sim");
    let results =
        |seed: &str| check(&["run", "testbed", "--policy", "worth", "--trials", "2", "--seed", seed, "--json"]);
    let (first, other) = (results("1"), results("7"));
    assert_eq!(first, results("1"));
    assert_ne!(first, other);
    let (a, b) = (folder.path("a.json"), folder.path("b.json"));
    std::fs::write(&a, &first).unwrap();
    std::fs::write(&b, other).unwrap();
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    let changes: serde_json::Value = serde_json::from_slice(&check(&["compare", a, b, "--json"])).unwrap();
    assert_eq!(
        (changes[0]["figure"].as_str(), changes[0]["policies"][0].as_str()),
        (Some("makespan_s"), Some("worth"))
    );
    assert!(String::from_utf8(check(&["compare", a, a])).unwrap().contains("+0.0%"));
    std::fs::write(b, &first[..first.len() / 2]).unwrap();
    assert!(text(&sim(&["compare", a, b])).contains("is not a result of"));
}

#[test]
fn a_table_compares_policies_with_the_first() {
    let folder = Folder::new("sim-jobs");
    let jobs = folder.path("jobs.csv");
    let words = ["run", "testbed", "--policy", "near", "--policy", "variable", "--trials", "1", "--jobs"];
    let table = String::from_utf8(check(&[&words[..], &[jobs.to_str().unwrap()]].concat())).unwrap();
    let line = table.lines().find(|line| line.starts_with("variable")).unwrap();
    assert!(line.contains('+'), "far memory ends the batch sooner: {table}");
    let rows = std::fs::read_to_string(jobs).unwrap();
    assert!(rows.starts_with("class,arrival_s,start_s,end_s,far_share_max\n") && rows.lines().count() > 500);
    assert!(String::from_utf8(check(&["list"])).unwrap().contains("rack"));
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new("sim-wrong");
    let file = folder.path("x.toml");
    let complains = |content: &str, complaint: &str| {
        std::fs::write(&file, content).unwrap();
        let output = sim(&["run", file.to_str().unwrap()]);
        assert!(!output.status.success() && text(&output).contains(complaint), "{content}: {}", text(&output));
    };
    let base = "name = \"x\"\nbase = \"rack\"\nmix = \"1:1:1:1:1:1\"\n";
    complains("name = ", "x.toml");
    complains(&format!("{base}near_mib = nan"), "near_mib");
    complains(&format!("{base}near_mib = 10"), "fits on no node");
    complains(&format!("{base}jobs = 0"), "no jobs");
    complains(&format!("{base}[arrivals]\nfile = \"none.csv\""), "none.csv");
    std::fs::write(folder.path("cut.csv"), "class,arrival_s\nspark").unwrap();
    complains(&format!("{base}[arrivals]\nfile = \"cut.csv\""), "cut short");
    assert!(text(&sim(&["run", "rock"])).contains("farfield sim list"));
    assert!(text(&sim(&["run", "rack", "--policy", "best"])).contains("memory-time"));
}

#[test]
fn a_recorded_trace_is_replayed_by_peak_and_by_use() {
    let folder = Folder::new("sim-replay");
    let header = "Timestamp [ms];CPU cores;Memory capacity provisioned [KB];Memory usage [KB]\n";
    let machines = folder.path("machines");
    std::fs::create_dir(&machines).unwrap();
    for machine in 0..6 {
        let line = |sample: u64| format!("{};2;4194304;{}\n", 1_375_308_176 + 300 * sample, 1_000_000 + sample);
        let table = header.to_owned() + &(0..10).map(line).collect::<String>();
        std::fs::write(machines.join(format!("{machine}.csv")), table).unwrap();
    }
    let machines = machines.to_str().unwrap();
    let words = |trace| ["replay", trace, "--cores", "16", "--near", "12G", "--nodes", "1", "--trials", "1"];
    let table = String::from_utf8(check(&words(machines))).unwrap();
    for part in
        ["(bitbrains): 6 jobs", "\nuse    near", "\npeak   worth", "+100.0%", "assumed: profiles: the trace has no"]
    {
        assert!(table.contains(part), "{part}: {table}");
    }
    let json = |seed| check(&[&words(machines)[..], &["--json", "--seed", seed]].concat());
    assert_eq!(json("4"), json("4"));
    let results: serde_json::Value = serde_json::from_slice(&json("4")).unwrap();
    let near = &results["accountings"][1]["policies"][0];
    assert_eq!((near["policy"].as_str(), near["gain"]["makespan"]["median"].as_f64()), (Some("near"), Some(0.0)));
    assert_eq!(near["gain_over_requests"]["makespan"]["median"].as_f64(), Some(1.0), "{results}");
    assert_eq!((results["trace"]["jobs"].as_u64(), results["trace"]["lines"].as_u64()), (Some(6), Some(60)));
    let complains = |words: &[&str], complaint: &str| {
        let output = sim(words);
        assert!(!output.status.success() && text(&output).contains(complaint), "{words:?}: {}", text(&output));
    };
    complains(&["replay", machines, "--near", "50%"], "--near is a size");
    complains(&["replay", machines, "--format", "alibaba"], "0.csv: line 1 has no column cpu_milli");
    complains(&["replay", machines, "--profiles", "sort"], "no profile is called");
    complains(&["replay", "none.csv"], "cannot read none.csv");
    let pods = folder.path("pods.csv");
    std::fs::write(&pods, "cpu_milli,memory_mib,creation_time,deletion_time,scheduled_time\n1000,5,0,9,0\n").unwrap();
    let pods = pods.to_str().unwrap();
    complains(&["replay", pods, "--account", "use"], "does not say what jobs use over time");
    assert!(!String::from_utf8(check(&words(pods))).unwrap().contains("\nuse "), "only by peak");
}
