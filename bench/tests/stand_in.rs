//! The driver against a stand-in for the `farfield` binary, whose behaviour the test chooses: that a contender which lies,
//! crashes or hangs is recorded as such, and never as a figure.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the program that follows `--` and writes a report, as `farfield run` does; `serve` listens nowhere but says so.
const HONEST: &str = r#"#!/bin/sh
if [ "$1" = serve ]; then
    echo '{"ready":true,"endpoints":["tcp://127.0.0.1:9"]}'
    exec sleep 1000
fi
case "$*" in *"--near 16777216B --quiet --report "*) ;; *) echo "unexpected: $*" >&2; exit 97;; esac
while [ "$1" != -- ]; do
    [ "$1" = --report ] && report=$2
    [ "$1" = --far ] && far=$2
    shift
done
shift
"$@" || exit $?
echo '{"demand_reads":3072,"prefetched":0,"prefetch_hits":0,"fault_ns_p99":9000,"far":["'"$far"'"]}' > "$report"
"#;

const EXPERIMENT: &str = r#"
name = "test/stand-in"
about = "a"
physics = "b"
baseline = "native"
contenders = ["native", "farfield", "farfield-tcp"]
runs = 2
deadline_seconds = 200
[parameters]
workload = "random"
data_mib = 64
near_percent = 25
ops = 4096
[[bar]]
of = "farfield"
to = "native"
at_most = 1000000
"#;

struct Bench {
    folder: PathBuf,
}

impl Bench {
    fn new(name: &str, farfield: &str) -> Bench {
        let folder = std::env::temp_dir().join(format!("farfield-bench-stand-in-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let binary = folder.join("farfield");
        fs::write(&binary, farfield).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(folder.join("experiment.toml"), EXPERIMENT).unwrap();
        Bench { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn run(&self, more: &[&str]) -> (Output, serde_json::Value) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-bench"));
        command.args(["run", &self.path("experiment.toml"), "--farfield", &self.path("farfield")]);
        command.args(["--results", &self.path("results"), "--scratch", &self.path("scratch")]).args(more);
        let output = command.output().unwrap();
        let line = fs::read_to_string(Path::new(&self.path("results/test-stand-in.jsonl")))
            .unwrap_or_else(|error| panic!("{error}: {output:?}"));
        (output, serde_json::from_str(line.lines().last().unwrap()).unwrap())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}

fn check(name: &str, farfield: &str, code: i32, complaint: &str) {
    let bench = Bench::new(name, farfield);
    let (output, line) = bench.run(&["--only", "farfield"]);
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let ours = &line["points"][0]["contenders"][1];
    assert_eq!(ours["status"]["state"], "failed", "{ours}");
    let why = ours["status"]["why"].as_str().unwrap();
    assert!(why.contains(complaint), "{why}");
    assert_eq!(line["points"][0]["ratios"].as_array().unwrap().len(), 0, "a ratio of a contender that failed");
}

#[test]
fn samples_of_all_contenders_alternate_into_one_line() {
    let bench = Bench::new("honest", HONEST);
    let (output, line) = bench.run(&["--check"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let contenders = line["points"][0]["contenders"].as_array().unwrap();
    for contender in contenders {
        assert_eq!(contender["samples"].as_array().unwrap().len(), 2, "{contender}");
        assert_eq!(contender["samples"][0]["checksum"], contenders[0]["samples"][0]["checksum"]);
    }
    let ours = &contenders[1];
    let time = ours["samples"][0]["ns_per_op"].as_f64().unwrap();
    let fault = ours["samples"][0]["figures"]["ns_per_fault"].as_f64().unwrap();
    assert!((fault / time - 4096.0 / 3072.0).abs() < 1e-6);
    assert_eq!(ours["figures"]["fault_ns_p99"], 9000.0);
    let log = String::from_utf8(output.stderr).unwrap();
    let order: Vec<&str> =
        log.lines().filter(|l| l.contains("ns/")).map(|l| l.split_whitespace().nth(1).unwrap()).collect();
    assert_eq!(order, ["native", "farfield", "farfield-tcp", "native", "farfield", "farfield-tcp"]);
}

#[test]
fn bar_that_is_missed_fails_the_check_only() {
    let bench = Bench::new("missed", HONEST);
    fs::write(bench.path("experiment.toml"), EXPERIMENT.replace("at_most = 1000000", "at_most = 0.000001")).unwrap();
    assert_eq!(bench.run(&[]).0.status.code(), Some(0));
    assert_eq!(bench.run(&["--check"]).0.status.code(), Some(4));
}

#[test]
fn crash_is_recorded_with_its_words() {
    check("crash", "#!/bin/sh\necho 'memory server lost' >&2\nexit 93\n", 1, "memory server lost");
}

#[test]
fn wrong_data_is_no_figure() {
    let liar = HONEST.replace("\"$@\" || exit $?", "\"$@\" | sed 's/\"verified\":true/\"verified\":false/'");
    check("liar", &liar, 1, "wrong data");
}

#[test]
fn other_result_than_the_others_is_no_figure() {
    let other = HONEST.replace("\"$@\" || exit $?", "\"$@\" | sed 's/\"checksum\":\"..../\"checksum\":\"zzzz/'");
    check("other", &other, 1, "differs");
}

#[test]
fn hang_ends_at_the_deadline() {
    let bench = Bench::new("hang", "#!/bin/sh\nexec sleep 1000\n");
    fs::write(bench.path("experiment.toml"), EXPERIMENT.replace("deadline_seconds = 200", "deadline_seconds = 1"))
        .unwrap();
    let (output, line) = bench.run(&["--only", "farfield"]);
    assert_eq!(output.status.code(), Some(1));
    let why = line["points"][0]["contenders"][1]["status"]["why"].as_str().unwrap().to_string();
    assert!(why.contains("did not end within 1 s"), "{why}");
}

#[test]
fn missing_report_is_said() {
    let silent = HONEST.replace("> \"$report\"", "> /dev/null");
    check("silent", &silent, 1, "no report");
}

#[test]
fn reader_that_goes_away_is_no_trouble() {
    let script = format!("{} list | true", env!("CARGO_BIN_EXE_farfield-bench"));
    let output = Command::new("/bin/sh").args(["-c", &script]).output().unwrap();
    assert!(output.stderr.is_empty(), "{output:?}");
}
