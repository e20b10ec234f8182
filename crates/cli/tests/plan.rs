//! `farfield plan`: guards against advice that differs between equal runs, that spends money for
//! nothing, or that comes of a file whose mistakes pass.

mod common;

use common::{Folder, farfield, text};
use serde_json::Value;
use std::path::Path;
use std::process::Output;

/// Trials of a test: enough to judge noise.
const TRIALS: [&str; 2] = ["--trials", "6"];

fn plan(file: &Path, words: &[&str]) -> Output {
    farfield().arg("plan").arg(file).args(words).output().unwrap()
}

fn check(file: &Path, words: &[&str]) -> String {
    let output = plan(file, &[&TRIALS[..], words].concat());
    assert!(output.status.success(), "{words:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&check(file, &["--json"])).unwrap()
}

/// The example as a stranger gets it.
fn example(folder: &Folder) -> (std::path::PathBuf, String) {
    let output = farfield().args(["plan", "--example"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let file = folder.path("ours.toml");
    std::fs::write(&file, &text).unwrap();
    (file, text)
}

#[test]
fn the_example_recommends_a_purchase_and_equal_seeds_give_equal_bytes() {
    let folder = Folder::new("plan");
    let (file, _) = example(&folder);
    let table = check(&file, &[]);
    assert!(table.contains("\nBuy ") && table.contains("EUR"), "{table}");
    assert!(table.contains("\n>* "), "{table}");
    let first = check(&file, &["--json"]);
    assert_eq!(first, check(&file, &["--json"]));
    assert_ne!(first, check(&file, &["--json", "--seed", "9"]));
    let results: Value = serde_json::from_str(&first).unwrap();
    let choice = &results["purchases"][results["choice"].as_u64().unwrap() as usize];
    assert_eq!(choice["verdict"], "worth_it");
    assert!(choice["price"].as_f64().unwrap() <= results["budget"].as_f64().unwrap());
    assert!(choice["gain"]["low"].as_f64().unwrap() > 0.0);
    assert!(results["answer"].as_str().unwrap().contains(choice["name"].as_str().unwrap()));
    assert!(!results["changes"].as_array().unwrap().is_empty());
    // Without prices it is a scenario.
    let sim = farfield().args(["sim", "run", "--trials", "1"]).arg(&file).output().unwrap();
    assert!(sim.status.success(), "{}", text(&sim));
}

#[test]
fn nothing_is_bought_where_memory_is_not_scarce_or_money_is() {
    let folder = Folder::new("plan-nothing");
    let (file, example) = example(&folder);
    let with = |from: &str, to: &str| {
        assert!(example.contains(from), "{from}");
        std::fs::write(&file, example.replace(from, to)).unwrap();
        json(&file)
    };
    let rich = with("near_mib = 131072", "near_mib = 1048576");
    assert_eq!(rich["choice"], 0);
    assert!(rich["answer"].as_str().unwrap().starts_with("Buy nothing: no purchase gains"), "{}", rich["answer"]);
    let poor = with("budget = 12000", "budget = 100");
    let answer = poor["answer"].as_str().unwrap();
    assert!(
        poor["choice"] == 0 || poor["purchases"][poor["choice"].as_u64().unwrap() as usize]["price"] == 0.0,
        "{answer}"
    );
    let dear = with("budget = 12000", "percent_worth = 0.5");
    assert!(
        dear["changes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|change| change["condition"].get("percent_worth_above").is_some())
    );
}

#[test]
fn mistakes_are_named_with_their_lines() {
    let folder = Folder::new("plan-wrong");
    let (file, example) = example(&folder);
    let complains = |from: &str, to: &str, complaints: &[&str]| {
        assert!(example.contains(from), "{from}");
        std::fs::write(&file, example.replacen(from, to, 1)).unwrap();
        let output = plan(&file, &TRIALS);
        for complaint in [&["ours.toml"], complaints].concat() {
            assert!(!output.status.success() && text(&output).contains(complaint), "{to}: {}", text(&output));
        }
    };
    let line = |of: &str| format!("line {}", example.lines().position(|line| line.starts_with(of)).unwrap() + 1);
    complains("price = 90", "price = nan", &["NaN", &line("price = 90")]);
    complains("base_price = 3200", "base_price = -1", &["-1", &line("base_price = 3200")]);
    complains("budget", "bugdet", &["bugdet", &line("budget")]);
    std::fs::write(&file, example.replace("near_mib = 131072", "near_mib = 4096")).unwrap();
    assert!(text(&plan(&file, &TRIALS)).contains("fits on no node"));
    assert!(text(&plan(&file, &["--trials", "5"])).contains("6.."), "noise of five trials cannot be judged");
    assert!(text(&plan(&folder.path("none.toml"), &[])).contains("cannot read"));
    assert!(!farfield().arg("plan").output().unwrap().status.success());
}
