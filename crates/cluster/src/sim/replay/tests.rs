//! Guards against traces that are believed although they are wrong, and against gains that nobody
//! could have.

use super::*;
use crate::sim::Policy;
use std::path::PathBuf;

/// Folder of a test, which is removed at its end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("farfield-replay-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Packs a file of the folder, and returns the packed one.
    pub(super) fn packed_by_gzip(&self, name: &str) -> PathBuf {
        let path = self.0.join(format!("{name}.gz"));
        let output = std::fs::File::create(&path).unwrap();
        let status = std::process::Command::new("gzip").arg("-c").arg(self.0.join(name)).stdout(output).status();
        assert!(status.unwrap().success());
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Makes an archive of files.
pub(super) fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in files {
        let mut header = [0u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        header[156] = b'0';
        header[257..262].copy_from_slice(b"ustar");
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

const PODS: &str = "name,cpu_milli,memory_mib,creation_time,deletion_time,scheduled_time\n";
const MACHINE: &str =
    "Timestamp [ms];\tCPU cores;\tMemory capacity provisioned [KB];\tMemory usage [KB];\tDisk read throughput [KB/s]\n";
const CONTAINERS: &str = "value,timestamp_anon,container_ip\n";

fn read(path: &Path) -> Result<ClusterTrace, ReplayError> {
    ClusterTrace::read(path, None, &mut |_| {})
}

/// Pods of four cores: as many MiB each, arriving ten seconds apart, and running for 100 s.
fn pods(mib: &[u64]) -> String {
    let line = |(index, mib): (usize, &u64)| {
        let at = 1000 + 10 * index;
        format!("p{index},4000,{mib},{at},{},{at}\n", at + 100)
    };
    PODS.to_owned() + &mib.iter().enumerate().map(line).collect::<String>()
}

fn config() -> ReplayConfig {
    ReplayConfig {
        cores: 16,
        near_bytes: Some(1000 << 20),
        memory_to_cores: 1.4,
        nodes: Some(1),
        far_bytes: Some(500 << 20),
        profiles: "quicksort".parse().unwrap(),
    }
}

fn replay(trace: &ClusterTrace, config: &ReplayConfig, accountings: &[Accounting]) -> ReplayReport {
    trace.replay(config, &[Policy::VARIABLE], accountings, (1, 2), &mut |_| {}).unwrap()
}

#[test]
fn pods_are_read_and_those_that_say_nothing_are_counted() {
    let folder = Folder::new("pods");
    let text = format!(
        "{PODS}a,3152,5600,100,500,200\nb,1000,100,90,95,\nc,0,1,1,9,5\nd,1,0,1,9,5\ne,1,1,3,7,7\nf,1,1,60,,60\n"
    );
    let trace = read(&folder.file("pods.csv", text.as_bytes())).unwrap();
    let job = TraceJob { arrival_s: 0.0, seconds: 300.0, cores: 4, memory_bytes: 5600 << 20, usage: None };
    assert_eq!((trace.format, trace.jobs.as_slice(), trace.lines), (TraceFormat::Alibaba, &[job][..], 6));
    let skipped = SkippedJobs { never_ran: 3, without_cores: 1, without_memory: 1, larger_than_a_node: 0 };
    assert_eq!(trace.skipped, skipped);
}

#[test]
fn machines_are_read_with_their_use() {
    let folder = Folder::new("machines");
    let one = format!("{MACHINE}600;\t2;\t2000.0;\t500;\t1.5\n900;\t2;\t4000;\t4500\t;\t0\n");
    // Milliseconds, as the header says.
    let two = format!("{MACHINE}1375308476000;1;100;50;0\n1375308776000;1;100;60;0\n");
    let tar = archive(&[("1.csv", one.as_bytes()), ("2.csv", MACHINE.as_bytes()), ("3.csv", b"")]);
    let trace = read(&folder.file("machines.tar", &tar)).unwrap();
    let job = &trace.jobs[0];
    assert_eq!((job.cores, job.memory_bytes, job.seconds), (2, 4000 * 1024, 600.0));
    assert_eq!((trace.format, trace.skipped.never_ran, trace.lines), (TraceFormat::Bitbrains, 1, 2));
    let facts = trace.facts(&[0], trace.skipped);
    assert_eq!(facts.used_share, Some(2500.0 / 4000.0));
    let job = &read(&folder.file("ms.csv", two.as_bytes())).unwrap().jobs[0];
    assert_eq!((job.seconds, job.usage.as_ref().unwrap().mean()), (600.0, 55.0 * 1024.0));
}

#[test]
fn wrong_lines_are_named() {
    let folder = Folder::new("wrong");
    let check = |text: String, line: usize, complaint: &str| {
        let path = folder.file("wrong.csv", text.as_bytes());
        let error = read(&path).err().unwrap_or_else(|| panic!("{complaint}: nothing wrong with {text}"));
        let named =
            matches!(&error, ReplayError::Row { file, line: at, .. } if file.ends_with("wrong.csv") && *at == line);
        assert!(named && error.to_string().contains(complaint), "{complaint}: {error:?}");
    };
    let pod = |row: &str, complaint: &str| check(format!("{PODS}a,1,1,1,2,1\n{row}\n"), 3, complaint);
    pod("a,1,1,1", "4 cells instead of 6; was the file cut short?");
    pod("a,NaN,1,1,2,1", "\"NaN\" is not a number");
    pod("a,1,-1,1,2,1", "\"-1\" is not a number");
    pod("a,1,1,inf,2,1", "\"inf\"");
    pod("a,1,,1,2,1", "\"\" is not a number");
    pod("a,1,1e99,1,2,1", "no cluster has");
    pod("a,1e12,1,1,2,1", "no cluster has");
    pod("a,1,1,1,1e300,1", "no cluster has");
    pod("a,1,1,1,5,9", "ends before it starts");
    pod(&format!("a,1,{},1,2,1", "9".repeat(500)), "is not a number");
    pod(&format!("a,1,{},1,2,1", "9".repeat(70_000)), "longer than 65536 bytes");
    check(format!("{PODS}a,1,1,1,2,1"), 2, "no line break");
    let machine = |row: &str, complaint: &str| check(format!("{MACHINE}600;2;20;5;1\n{row}\n"), 3, complaint);
    machine("900;2;20", "3 cells instead of 5");
    machine("900;2;20;nan;1", "\"nan\"");
    machine("900;2;20;-5;1", "\"-5\"");
    machine("900;2;1e30;5;1", "no cluster has");
    machine("1e30;2;20;5;1", "no cluster has");
    machine("599;2;20;5;1", "goes back in time");
    check("cpu_milli,memory_mib\n".into(), 1, "no column creation_time");
    check(format!("{}\n", MACHINE.trim().replace("CPU cores", "cores")), 1, "no column CPU cores");
}

#[test]
fn traces_without_jobs_or_of_no_format_are_refused() {
    let folder = Folder::new("none");
    let error = |text: &str| read(&folder.file("none.csv", text.as_bytes())).unwrap_err();
    assert!(matches!(error(""), ReplayError::NoJobs { .. }));
    let never = error(&format!("{PODS}b,1000,100,90,95,\n"));
    assert!(never.to_string().contains("none.csv has no jobs that can be replayed (1 were left out)"), "{never}");
    assert!(matches!(error("a,b\n1,2\n"), ReplayError::Format { .. }));
    let forced = ClusterTrace::read(&folder.file("x.csv", b"a,b\n1,2\n"), Some(TraceFormat::Alibaba), &mut |_| {});
    assert!(forced.unwrap_err().to_string().contains("line 1 has no column cpu_milli"));
    let many = pods(&vec![1; JOBS_MAX + 1]);
    assert!(matches!(error(&many), ReplayError::TooMany { .. }));
    assert!("openb".parse::<TraceFormat>().is_err() && "bitbrains".parse() == Ok(TraceFormat::Bitbrains));
    assert!("all".parse::<ProfileDraw>().unwrap().names().starts_with("quicksort, kmeans"));
    assert!("kmeans,sort".parse::<ProfileDraw>().unwrap_err().to_string().contains("\"sort\""));
}

#[test]
fn wrong_samples_of_containers_are_named_or_counted() {
    let folder = Folder::new("samples");
    let mut trace = read(&folder.file("pods.csv", pods(&[600]).as_bytes())).unwrap();
    let mut read = |rows: &str| {
        let path = folder.file("use.csv", format!("{CONTAINERS}{rows}").as_bytes());
        trace.read_containers(&path, &mut |_| {}).map(|()| trace.skipped_samples)
    };
    assert_eq!(read("0.5,0,a\n-1.1e-5,60,a\n1.01,120,a\n0.5,180,a\n"), Ok(2));
    let mut check = |rows: &str, complaint: &str| {
        let error = read(rows).unwrap_err().to_string();
        assert!(error.contains(complaint), "{rows:?}: {error}");
    };
    check("0.5,0,a\nNaN,60,a\n", "line 3 \"NaN\" is not a number");
    check("0.5,-1,a\n", "line 2 \"-1\"");
    check("0.5,60,a\n0.5,0,a\n", "line 3 goes back in time");
    check("0.5,60\n", "line 2 has 2 cells instead of 3");
    check("0.5,60,a\n", "no container with two samples");
    check("", "no container with two samples");
    let error = trace.read_containers(&folder.file("use.csv", b"value\n"), &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("line 1 has no column timestamp_anon"), "{error}");
}

#[test]
fn far_memory_gains_by_peak_and_use_gains_without_it() {
    let folder = Folder::new("gains");
    let mut trace = read(&folder.file("pods.csv", pods(&[600, 600, 600]).as_bytes())).unwrap();
    let report = replay(&trace, &config(), &[Accounting::Peak]);
    let [near, variable] = &report.accountings[0].policies[..] else { panic!("{report:?}") };
    assert_eq!(near.runs.makespan_s.median, 300.0, "one after the other");
    assert_eq!((near.gain.makespan.median, near.runs.policy.as_str()), (0.0, "near"));
    assert!(variable.gain.makespan.median > 0.2 && variable.gain.turnaround.min > 0.1, "{variable:?}");
    assert_eq!(report.trace.used_share, None);
    assert!(report.assumptions[0].contains("quicksort"), "{report:?}");
    let refused = trace.replay(&config(), &[], &[Accounting::Use], (1, 1), &mut |_| {});
    assert_eq!(refused, Err(ReplayError::NoUsage));
    // Each job uses a quarter of what it asked for.
    let containers = format!("{CONTAINERS}0.25,0,a\n0.9,0,b\n0.25,60,a\n");
    trace.read_containers(&folder.file("use.csv", containers.as_bytes()), &mut |_| {}).unwrap();
    let report = replay(&trace, &config(), &[Accounting::Peak, Accounting::Use]);
    let near = &report.accountings[1].policies[0];
    assert_eq!((near.runs.makespan_s.median, near.evictions.max), (120.0, 0.0), "all at once");
    assert_eq!((near.gain.makespan.median, near.gain_over_requests.makespan.median), (0.0, 1.5));
    assert_eq!(report.trace.used_share, Some(0.25));
    assert!(report.assumptions.iter().any(|text| text.contains("one of 1 other containers")), "{report:?}");
}

#[test]
fn growth_evicts_and_is_counted() {
    let folder = Folder::new("growth");
    let mut trace = read(&folder.file("pods.csv", pods(&[600, 600]).as_bytes())).unwrap();
    let containers = format!("{CONTAINERS}0.25,0,a\n1.0,60,a\n");
    trace.read_containers(&folder.file("use.csv", containers.as_bytes()), &mut |_| {}).unwrap();
    let report = replay(&trace, &config(), &[Accounting::Use]);
    let [near, variable] = &report.accountings[0].policies[..] else { panic!("{report:?}") };
    // The second grows at 60 s, when it has done half of its work, and the first has grown already.
    assert_eq!((near.evictions.median, near.lost_share.median), (1.0, 0.25));
    assert_eq!(variable.evictions.max, 0.0, "the pool takes it");
}

#[test]
fn the_cluster_follows_from_the_trace() {
    let folder = Folder::new("cluster");
    let trace = read(&folder.file("pods.csv", pods(&[600, 600, 600, 5000]).as_bytes())).unwrap();
    let config = ReplayConfig { near_bytes: None, nodes: None, far_bytes: None, ..config() };
    let cluster = trace.cluster(&config).unwrap();
    // 1700 MiB for four cores on average, so 6800 for sixteen, over 1.4.
    assert_eq!((cluster.shape.memory_bytes >> 20, cluster.nodes, cluster.far_bytes >> 20), (4858, 1, 1214));
    assert_eq!((cluster.jobs.len(), cluster.skipped.larger_than_a_node), (3, 1));
    let small = ReplayConfig { near_bytes: Some(1), ..config.clone() };
    assert!(matches!(trace.cluster(&small), Err(ReplayError::NoJobs { .. })));
    for wrong in [
        ReplayConfig { cores: 0, ..config.clone() },
        ReplayConfig { nodes: Some(0), ..config.clone() },
        ReplayConfig { memory_to_cores: f64::NAN, ..config },
    ] {
        assert!(matches!(trace.cluster(&wrong), Err(ReplayError::Cluster(_))));
    }
}

#[test]
fn equal_seeds_give_equal_bytes() {
    let folder = Folder::new("seeds");
    let mut random = fastrand::Rng::with_seed(7);
    let sizes: Vec<u64> = (0..60).map(|_| 50 + random.u64(..900)).collect();
    let mut trace = read(&folder.file("pods.csv", pods(&sizes).as_bytes())).unwrap();
    let lines = (0..300).map(|line| format!("{},{},c{}\n", random.f64(), line / 10 * 60, line % 10));
    let containers = CONTAINERS.to_owned() + &lines.collect::<String>();
    trace.read_containers(&folder.file("use.csv", containers.as_bytes()), &mut |_| {}).unwrap();
    let config = ReplayConfig { profiles: "all".parse().unwrap(), nodes: Some(2), ..config() };
    let json = |seed| {
        let policies = [Policy::MEMORY_TIME, "worth".parse().unwrap()];
        let accountings = [Accounting::Peak, Accounting::Use];
        let report = trace.replay(&config, &policies, &accountings, (seed, 2), &mut |_| {}).unwrap();
        serde_json::to_string(&report).unwrap()
    };
    assert_eq!(json(5), json(5));
    assert_ne!(json(5), json(6));
}
