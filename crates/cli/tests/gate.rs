//! `farfield gate slurm` beside recorded answers of Slurm, and `farfield gate replay`: guards against metrics that
//! do not say what the gate does, a gate that has stopped and looks alive, and a replay that loses jobs.

mod common;

use common::{Folder, Running, farfield, scrape, text, until};

const SCONTROL: &str = r#"#!/bin/sh
case "$*" in
*"show config") echo "SlurmUser = root(0)" ;;
*"show licenses") [ -e "$0.away" ] && exit 1
    echo "LicenseName=farmem Total=100 Used=60 Free=40"; echo "LicenseName=farfield_gate Total=1 Used=0 Free=1" ;;
*"show reservation") echo "ReservationName=farfield_gate Flags=ANY_NODES Licenses=farfield_gate:1 State=ACTIVE" ;;
*"show node") echo "NodeName=n1 CPUTot=8 CPUAlloc=2 RealMemory=1000 AllocMem=500 State=MIXED Partitions=far" ;;
"update reservation"*) ;;
"update JobId=3 "*) echo "slurm_update error: Access denied" >&2; exit 1 ;;
*) ;;
esac
"#;

const SQUEUE: &str = r#"#!/bin/sh
cat << 'END'
1|RUNNING|farmem:60|n1|2|900|farfield:mem=1060,least=500,node=n1,at=150|100|None|
2|PENDING|farfield_gate:1||1|700|farfield:mem=600,least=600|100|Licenses|
3|PENDING|farfield_gate:1||1|600|farfield:mem=20,least=20|100|Licenses|
4|PENDING|farfield_gate:1||1|500|farfield:mem=10,least=5|100|Licenses|
5|PENDING|farfield_gate:1||1|400|nonsense|100|Licenses|
END
"#;

#[test]
fn metrics_say_what_the_gate_decides() {
    let folder = Folder::new("gate-metrics");
    let scontrol = folder.program("scontrol", SCONTROL);
    folder.program("squeue", SQUEUE);
    let path = format!("{}:{}", folder.0.display(), std::env::var("PATH").unwrap());
    let mut command = farfield();
    command.env("PATH", path).args(["gate", "slurm", "--every", "50ms", "--metrics", "127.0.0.1:0", "--lock"]);
    // Nobody has waited so long that none overtakes it.
    command.arg(folder.path("lock")).args(["--overtake", "900000000m"]);
    let gate = Running::start(&mut command);
    let ready: serde_json::Value = serde_json::from_str(&gate.line()).unwrap();
    let url = ready["metrics"].as_str().unwrap().to_owned();
    let metrics = scrape(&url);
    let has = |text: &str, line: &str| text.lines().any(|this| this == line);
    for line in [
        "farfield_gate_running_jobs 1",
        "farfield_gate_waiting_jobs{reason=\"near\"} 1",
        "farfield_gate_waiting_jobs{reason=\"far\"} 0",
        "farfield_gate_ignored_jobs 1",
        "farfield_gate_pool_bytes 104857600",
        "farfield_gate_charged_bytes 62914560",
        "farfield_gate_held_bytes 62914560",
    ] {
        assert!(has(&metrics, line), "{line}\n{metrics}");
    }
    let number = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{name}\n{text}")).parse::<f64>().unwrap()
    };
    assert!(number(&metrics, "farfield_gate_admissions_total") >= 1.0, "job 4 in each round");
    assert!(number(&metrics, "farfield_gate_refused_changes_total{change=\"admit\"}") >= 1.0, "job 3 in each round");
    assert!(number(&metrics, "farfield_gate_round_seconds") > 0.0);
    until("a second round", || number(&scrape(&url), "farfield_gate_rounds_total") >= 2.0);
    // Slurm is away: rounds fail, and the age of the last that succeeded grows.
    std::fs::write(scontrol.with_file_name("scontrol.away"), "").unwrap();
    until("rounds that fail", || number(&scrape(&url), "farfield_gate_failed_rounds_total") >= 2.0);
    let rounds = number(&scrape(&url), "farfield_gate_rounds_total");
    let age = number(&scrape(&url), "farfield_gate_last_success_age_seconds");
    until("a greater age", || number(&scrape(&url), "farfield_gate_last_success_age_seconds") > age + 0.05);
    assert_eq!(number(&scrape(&url), "farfield_gate_rounds_total"), rounds);
}

const SCENARIO: &str = r#"
name = "ours"
nodes = 3
memory_servers = 1
cores = 8
near_mib = 1000
far_mib = 1000
[arrivals]
file = "jobs.csv"
[[class]]
name = "train"
count = 40
cores = 1
memory_mib = 600
least = 0.5
seconds = 100
slowdown = [[0.5, 1.5]]
"#;

#[test]
fn a_replay_says_what_the_gate_does_with_recorded_arrivals() {
    let folder = Folder::new("gate-replay");
    let arrivals: String = (0..40).map(|job| format!("train,{}\n", job * 20)).collect();
    std::fs::write(folder.path("jobs.csv"), format!("class,arrival_s\n{arrivals}")).unwrap();
    let scenario = folder.path("ours.toml");
    std::fs::write(&scenario, SCENARIO).unwrap();
    let replay = |words: &[&str]| farfield().args(["gate", "replay"]).arg(&scenario).args(words).output().unwrap();
    let jobs = folder.path("course.csv");
    let output = replay(&["--json", "--jobs", jobs.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let policies: Vec<_> = result["policies"].as_array().unwrap().iter().map(|row| row["policy"].as_str()).collect();
    assert_eq!(policies, [Some("near"), Some("memory-time"), Some("gate, memory-time")]);
    assert_eq!(result["gate"]["admitted"], 40);
    let makespan_s = |row: usize| result["policies"][row]["makespan_s"]["median"].as_f64().unwrap();
    assert!(makespan_s(2) < makespan_s(0), "far memory gains nothing: {result}");
    assert_eq!(std::fs::read_to_string(jobs).unwrap().lines().count(), 41);
    let table = String::from_utf8(replay(&["--every", "5s"]).stdout).unwrap();
    assert!(table.contains("40 admissions"), "{table}");
    for (wrong, advice) in [(["--every", "10ms"], "at least 1s"), (["--policy", "near"], "no use for a gate")] {
        let refused = replay(&wrong);
        assert!(!refused.status.success() && text(&refused).contains(advice), "{}", text(&refused));
    }
}
