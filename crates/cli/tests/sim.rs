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
