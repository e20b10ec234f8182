//! The workload programs of the far heap, small: whatever keeps the data, the result is the same. Danger: an experiment that measures a
//! mistake, and is not looked at before it has run for an hour.

use farfield_bench::with_functions;
use farfield_server::{Config, Server};
use farfield_wic::Registry;
use std::ffi::OsStr;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Once;
use std::thread;
use std::time::Duration;

/// Machines that do much else are slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the functions of a server of experiments.
fn functions() -> Registry {
    with_functions(Registry::standard())
}

/// Starts a server of experiments.
fn server(listen: &str) -> Server {
    let listen = vec![listen.parse().unwrap()];
    Server::start(Config { listen, functions: functions(), call_within: PATIENCE, ..Config::default() }).unwrap()
}

/// Starts a server of experiments that is asked through shared memory.
fn local_server(name: &str) -> Server {
    let path = std::env::temp_dir().join(format!("farfield-bench-{name}-{}.sock", std::process::id()));
    server(&format!("unix:{}", path.display()))
}

/// Runs a workload; its checksum and its phases.
fn work(arguments: &[impl AsRef<OsStr>]) -> (String, Vec<String>) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data");
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
    command.args(arguments).env("FARFIELD_DATA", folder);
    result(command)
}

/// Runs a program; its checksum and its phases.
fn result(mut command: Command) -> (String, Vec<String>) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["verified"], true, "{command:?}: {line}");
    let phases = line["phases"].as_array().unwrap().iter();
    let phases = phases.map(|phase| phase["name"].as_str().unwrap().to_owned()).collect();
    (line["checksum"].as_str().unwrap().to_owned(), phases)
}

/// With std's types, and on each plane; in CI on the one that is made of the others.
fn check(workload: &str, phase: &str, near_mib: u64, more: &[&str]) {
    let near = (near_mib << 20).to_string();
    let mut words = vec![workload];
    words.extend(more);
    let (expected, phases) = work(&words);
    assert!(phases.iter().any(|name| name == phase), "{workload} has no phase {phase}: {phases:?}");
    let is_deep = std::env::var("FARFIELD_DEEP").is_ok_and(|deep| deep == "1");
    for plane in if is_deep { &["page", "object", "hybrid"][..] } else { &["hybrid"] } {
        let far = ["--near", near.as_str(), "--pool", "ram:", "--plane", plane];
        assert_eq!(work(&[&words[..], &far].concat()).0, expected, "{workload}, {plane}");
    }
}

#[test]
fn pointers() {
    // A scope of 64 pages is to be far below what may be near, whatever else the machine does.
    check("deref", "access", 16, &["--data-mib", "32", "--ops", "8000", "--write-percent", "50"]);
    check("tasks", "read", 3, &["--data-mib", "6", "--ops", "20000", "--threads", "2", "--in-flight", "8"]);
    let large = ["--data-mib", "6", "--ops", "3000", "--in-flight", "16", "--object-bytes", "4096"];
    check("tasks", "read", 3, &large);
}

#[test]
fn collected_objects() {
    for words in [
        &["follow", "--data-mib", "8", "--ops", "20000"][..],
        &["follow", "--data-mib", "4", "--ops", "20000", "--set-kib", "16"],
        &["trees", "--data-mib", "10", "--ops", "100"],
        &["gcbench", "--data-mib", "16", "--ops", "100000"],
        &["graph-store", "--data-mib", "2", "--ops", "3000"],
        &["build", "--data-mib", "5", "--ops", "520"],
        &["gc-cache", "--data-mib", "8", "--ops", "8000", "--zipf-percent", "99"],
        &["trie-map", "--data-mib", "6", "--ops", "20000", "--zipf-percent", "99", "--write-percent", "10"],
        &["ordered-map", "--data-mib", "6", "--ops", "20000", "--zipf-percent", "99", "--write-percent", "10"],
        &["map-scan", "--data-mib", "6", "--ops", "2000", "--write-percent", "10"],
        &["append-log", "--data-mib", "6", "--ops", "50000", "--write-percent", "50"],
        &["table", "--data-mib", "6", "--ops", "20000", "--mix", "insert-intensive"],
        &["table", "--data-mib", "6", "--ops", "20000", "--mix", "read-dominant", "--aged", "0"],
        &["closure", "--data-mib", "6", "--ops", "50000"],
        &["clusters", "--data-mib", "6", "--ops", "100000"],
    ] {
        check_collected(words);
    }
}

/// Other collectors make the same trees.
#[cfg(feature = "collectors")]
#[test]
fn trees_of_libraries() {
    let words = ["gcbench", "--data-mib", "6", "--ops", "100000"];
    let expected = work(&words);
    for library in ["gc-arena", "dumpster"] {
        assert_eq!(work(&[&words[..], &["--library", library]].concat()), expected, "{library}");
    }
}

/// With std's types, and in a collected heap.
fn check_collected<T: AsRef<str>>(words: &[T]) {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    let near = ["--near", "3145728", "--pool", "ram:"];
    assert_eq!(work(&words), work(&[&words[..], &near].concat()), "{words:?}");
}

/// The programs in Java do the same as their twins: otherwise their times are not comparable.
#[test]
fn collected_objects_in_java() {
    let classes = Path::new(env!("CARGO_TARGET_TMPDIR")).join("java");
    let sources = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("java")).unwrap();
    let mut javac = Command::new("javac");
    javac.args(["--release", "17", "-Xlint:all", "-Werror", "-d"]).arg(&classes);
    let output = match javac.args(sources.map(|source| source.unwrap().path())).output() {
        Ok(output) => output,
        Err(error) => return eprintln!("skipped: javac cannot be started: {error}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let real_store = real_store("cnr-2000");
    let real_store: Vec<&str> = real_store.iter().map(String::as_str).collect();
    for (class, words) in [
        ("GraphStore", &["graph-store", "--data-mib", "2", "--ops", "3000"][..]),
        ("GraphStore", &real_store[..]),
        ("BuildEngine", &["build", "--data-mib", "5", "--ops", "520"]),
        ("GcCache", &["gc-cache", "--data-mib", "8", "--ops", "8000", "--zipf-percent", "99"]),
    ] {
        let mut java = Command::new("java");
        java.arg("-Xmx256m").arg("-cp").arg(&classes).arg(class).args(&words[1..]);
        assert_eq!(result(java), work(words), "{words:?}");
    }
}

#[test]
fn walks() {
    check("words", "scan", 2, &["--data-mib", "6", "--ops", "1000000"]);
    check("words", "scan", 2, &["--data-mib", "6", "--ops", "1000000", "--set-kib", "256"]);
    check("compute", "scan", 2, &["--data-mib", "6"]);
    check("frame", "ask", 2, &["--data-mib", "4"]);
    for offload in ["none", "all"] {
        check("trips", "ask", 2, &["--data-mib", "4", "--offload", offload]);
    }
    check("pack", "pack", 6, &["--data-mib", "12"]);
    check("unpack", "pack", 6, &["--data-mib", "12"]);
}

#[test]
fn maps() {
    check("hash", "get", 16, &["--data-mib", "32", "--ops", "10000", "--object-bytes", "512", "--zipf-percent", "80"]);
    check("web", "request", 4, &["--data-mib", "8", "--ops", "300", "--zipf-percent", "85", "--once", "1"]);
}

/// A program whose own functions run where its data is does what others do.
#[test]
fn functions_of_the_programs_own() {
    let server = local_server("own");
    let pool = server.endpoints()[0].to_string();
    for (words, near_mib) in [
        (&["trips", "--data-mib", "9"][..], 2),
        (&["trips", "--data-mib", "1"], 2),
        (&["web", "--data-mib", "8", "--ops", "300", "--zipf-percent", "85", "--threads", "3"], 4),
        (&["web", "--data-mib", "8", "--ops", "300", "--zipf-percent", "85"], 4),
    ] {
        let near = (near_mib << 20).to_string();
        let own = ["--offload", "own", "--pool", &pool, "--near", &near];
        assert_eq!(work(words), work(&[words, &own].concat()), "{words:?}");
    }
}

#[test]
fn caches() {
    check("cache", "request", 2, &["--data-mib", "6", "--ops", "10000"]);
    check("cache-uniform", "request", 2, &["--data-mib", "6", "--ops", "10000"]);
    for hotness in ["count", "recency"] {
        check("cache", "request", 2, &["--data-mib", "6", "--ops", "10000", "--hotness", hotness]);
    }
}

#[test]
fn requests_that_do_not_wait_for_each_other() {
    check("cache", "request", 2, &["--data-mib", "6", "--ops", "2000", "--rate-per-s", "50000"]);
}

#[test]
fn graphs() {
    check("pagerank", "evolve", 2, &["--data-mib", "4"]);
    check("triangles", "evolve", 2, &["--data-mib", "4"]);
}

#[test]
fn counts() {
    check("count-words", "count", 2, &["--data-mib", "4"]);
    check("count-views", "count", 2, &["--data-mib", "4", "--moments", "10"]);
    check("count-views-uniform", "count", 2, &["--data-mib", "4"]);
    check("shuffle", "move", 2, &["--data-mib", "4"]);
}

/// Makes small files in the form of real ones, of several pages each, once.
fn make_real_data() {
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let file = |name: &str, bytes: &[u8]| {
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        // Numbers of which few are frequent.
        let numbers = || (1..20_000u64).map(|number| number * number % 7919 % (1 + number % 1000));
        let mut links = String::new();
        numbers().zip(numbers().skip(5)).cycle().take(90_000).for_each(|(from, to)| {
            writeln!(links, "{from} {to}").unwrap();
        });
        file("graphs/cnr-2000.edges.txt", links.as_bytes());
        file("graphs/web-NotreDame.txt", format!("# Two\r\n# lines\r\n{}", links.replace('\n', "\r\n")).as_bytes());
        let views: Vec<u8> = numbers().flat_map(u64::to_be_bytes).collect();
        file("cache-traces/caffeine/scarab/scarab-recs.trace", &views);
        let requests: Vec<u8> = numbers().flat_map(|number| (number as u32).to_le_bytes()).collect();
        file("cache-traces/caffeine/cloud_physics/w106.trace", &requests);
        let mut trips = ",".repeat(16) + "\n";
        numbers().for_each(|number| writeln!(trips, "{}{number}.5,,{}{number}", ",".repeat(8), ",".repeat(6)).unwrap());
        file("nyc-green-taxi/green_tripdata_2020-04_2022-02.csv", trips.as_bytes());
        let letters = |number: u64| number.to_string().bytes().map(|digit| char::from(digit + 49)).collect::<String>();
        let words: Vec<String> =
            numbers().cycle().take(600_000).map(|number| format!("word{}", letters(number))).collect();
        file("text/gesetze-de.txt", words.join(" ").as_bytes());
    });
}

/// Has the store write a real graph. Returns the words by which a program reads it; the last two name the file.
fn real_store(graph: &str) -> Vec<String> {
    make_real_data();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("links-{graph}-{:?}", thread::current().id()));
    fs::create_dir_all(&folder).unwrap();
    let words = ["graph-store", "--data-mib", "2", "--ops", "3000", "--real", "1", "--graph", graph];
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let mut words = words.map(str::to_owned).to_vec();
    work(&[&words[..], &["--columns".into(), text(&folder)]].concat());
    words.extend(["--links".into(), text(&folder.join("links"))]);
    words
}

#[test]
fn real_data() {
    make_real_data();
    for (workload, phase) in [
        ("pagerank", "evolve"),
        ("triangles", "evolve"),
        ("count-views", "count"),
        ("count-words", "count"),
        ("cache", "request"),
        ("shuffle", "move"),
        ("trips", "ask"),
    ] {
        check(workload, phase, 2, &["--data-mib", "4", "--ops", "20000", "--real", "1"]);
    }
    let stores = ["cnr-2000", "notre-dame", "statutes"].map(|graph| {
        let words = real_store(graph);
        check_collected(&words);
        let (in_memory, from_file) = (work(&words[..words.len() - 2]), work(&words));
        assert_eq!(in_memory, from_file, "{graph}");
        from_file.0
    });
    assert!(stores[0] == stores[1] && stores[0] != stores[2], "{stores:?}");
    check_collected(&["build", "--data-mib", "4", "--ops", "70", "--real", "1"]);
    check_collected(&["gc-cache", "--data-mib", "8", "--ops", "8000", "--real", "1"]);
}

#[test]
fn real_data_that_is_not_there_is_said() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
    let output =
        command.args(["count-words", "--data-mib", "1", "--real", "1"]).env_remove("FARFIELD_DATA").output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("FARFIELD_DATA"));
}

#[test]
fn recorded_traces_are_replayed() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recordings");
    let alibaba = folder.join("cluster-traces/alibaba");
    fs::create_dir_all(&alibaba).unwrap();
    let pod = |pod: u64| format!("4000,{},{at},{},{at}\n", 4096 * (1 + pod % 3), 10 * pod + 5000, at = 10 * pod);
    let pods = "cpu_milli,memory_mib,creation_time,deletion_time,scheduled_time\n".to_owned();
    fs::write(alibaba.join("openb_pod_list_default.csv"), pods + &(0..90).map(pod).collect::<String>()).unwrap();
    let usage = "value,timestamp_anon,container_ip\n0.2,0,a\n0.3,60,a\n";
    fs::write(alibaba.join("pod_memory_util_anon.csv"), usage).unwrap();
    let replay = |recording: &str, accounting: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
        command.args(["schedule-traces", "--data-mib", "16", "--policy", "memory-time", "--m2c-percent", "160"]);
        command.args(["--recording", recording, "--accounting", accounting]).env("FARFIELD_DATA", &folder);
        command.output().unwrap()
    };
    let figures = |accounting| {
        let output = replay("alibaba", accounting);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((line["phases"][0]["name"].as_str(), line["phases"][0]["ops"].as_u64()), (Some("replay"), Some(90)));
        ["turnaround_over_near", "turnaround_over_requests", "stranded_share", "left_out_share"]
            .map(|name| line["figures"][name].as_f64().unwrap_or_else(|| panic!("{name}: {line}")))
    };
    let [over_near, over_requests, stranded, left_out] = figures("peak");
    assert!(over_near < 1.0 && over_near == over_requests, "far memory gains: {over_near}, {over_requests}");
    assert!((stranded - 0.75).abs() < 1e-9 && left_out == 0.0, "{stranded}, {left_out}");
    let [_, by_use, ..] = figures("use");
    assert!(by_use < over_near, "use is a quarter of what was asked for: {by_use}, {over_near}");
    let absent = replay("bitbrains", "use");
    assert!(!absent.status.success() && String::from_utf8_lossy(&absent.stderr).contains("bitbrains_rnd"));
}

#[test]
fn crowds() {
    // A scope holds what its round changes.
    check("churn", "round", 60, &["--data-mib", "80", "--ops", "3"]);
    check("crowd", "round", 10, &["--data-mib", "24", "--ops", "24", "--threads", "4"]);
}

#[test]
fn switches() {
    let words = ["--data-mib", "24", "--ops", "3000", "--write-percent", "30"];
    check("switch", "during", 8, &[&words[..], &["--to", "ram:"]].concat());
    let (_, phases) = work(&[&["switch"], &words[..]].concat());
    assert_eq!(phases, ["before", "during", "after"]);
}

#[test]
fn lists() {
    let list = |peer, more: &[&str]| {
        let words = ["list", "--data-mib", "4", "--ops", "3000", "--nodes", "9", "--in-flight", "32", "--peer", peer];
        let (sum, phases) = work(&[&words[..], more].concat());
        assert_eq!(phases, ["fill", "walk"]);
        sum
    };
    let expected = list("loopback:", &[]);
    let grpc = cfg!(feature = "grpc").then_some("grpc:");
    // Auto finds no server there.
    for peer in ["client:ram:", "unbatched:ram:", "auto:ram:"].into_iter().chain(grpc) {
        assert_eq!(list(peer, &[]), expected, "{peer}");
        assert_eq!(list(peer, &["--rate-per-s", "20000"]), expected, "{peer}, in an open loop");
    }
}

#[test]
fn walks_over_far_pointers() {
    let server = local_server("walk");
    let url = &server.endpoints()[0];
    let walk = |place: &str| {
        let peer = format!("{place}:{url}");
        let (sum, phases) = work(&["walk", "--data-mib", "32", "--nodes", "20", "--ops", "60", "--peer", &peer]);
        assert_eq!(phases, ["fill-lists", "list", "fill-tree", "tree", "fill-graph", "graph", "walk"]);
        sum
    };
    let expected = walk("client");
    ["server", "auto"].iter().for_each(|place| assert_eq!(walk(place), expected, "{place}"));
}

#[test]
fn walks_whose_best_place_changes() {
    let server = local_server("shift");
    let url = &server.endpoints()[0];
    let shift = |place: &str| {
        let peer = format!("{place}:{url}");
        let (sum, phases) = work(&["shift", "--data-mib", "1", "--ops", "50", "--peer", &peer]);
        assert_eq!(phases, ["fill", "short", "long", "crowded", "quiet", "many", "shift"]);
        sum
    };
    let expected = shift("client");
    ["server", "auto"].iter().for_each(|place| assert_eq!(shift(place), expected, "{place}"));
}

#[test]
fn a_loop_and_a_function_walk_alike() {
    let walk = |workload: &str, together: &str, peer: &str| {
        let words = [workload, "--data-mib", "4", "--ops", "3000", "--nodes", "9", "--in-flight", together];
        work(&[&words[..], &["--peer", peer]].concat()).0
    };
    let expected = walk("list", "1", "loopback:");
    for together in ["1", "16"] {
        for peer in ["loop:", "function:"] {
            assert_eq!(walk("plain", together, peer), expected, "{peer}, {together} together");
        }
    }
}

#[test]
fn logs_and_tables() {
    let server = server("tcp://127.0.0.1:0");
    let url = &server.endpoints()[0];
    let check = |workload: &str, in_flight: &str, ops: &str, peers: &[String]| {
        let ask = |peer: &str| {
            let words = [workload, "--data-mib", "1", "--ops", ops, "--in-flight", in_flight, "--peer", peer];
            let (sum, phases) = work(&words);
            assert_eq!(phases, ["fill", "ask"]);
            sum
        };
        let expected = ask("loopback:");
        peers.iter().for_each(|peer| assert_eq!(ask(peer), expected, "{workload}, {peer}"));
    };
    for workload in ["log", "cuckoo"] {
        check(workload, "32", "2000", &[]);
        check(workload, "1", "300", &["one-sided:ram:".to_owned()]);
        check(workload, "16", "60", &[format!("server:{url}"), format!("auto:{url}")]);
        check(workload, "4", "20", &[format!("client:{url}"), format!("server:{url}")]);
    }
}

/// Whoever keeps what an application shares, threads or processes, it gives the same answers.
#[test]
fn applications_that_share_memory() {
    let check = |words: &[&str], more: &[&[&str]]| {
        let expected = work(words);
        let nodes: [&[&str]; 3] =
            [&["--peer", "share:"], &["--peer", "share:", "--nodes", "2"], &["--peer", "share:place", "--nodes", "3"]];
        for peer in nodes.iter().chain(more) {
            assert_eq!(work(&[words, *peer].concat()), expected, "{words:?}, {peer:?}");
        }
    };
    let rpc: &[&str] = &["--peer", "rpc:", "--nodes", "3"];
    check(&["share-gemm", "--data-mib", "1", "--object-bytes", "8192"], &[]);
    check(&["share-frame", "--data-mib", "1", "--object-bytes", "16384"], &[]);
    let kv = ["share-kv", "--data-mib", "1", "--ops", "2000", "--write-percent", "10", "--zipf-percent", "99"];
    check(&kv, &[]);
    for ycsb in ["a", "b", "c", "d", "e", "f"] {
        let words = ["share-kv", "--data-mib", "1", "--ops", "600", "--zipf-percent", "99", "--ycsb", ycsb];
        check(&words, &[]);
        check(&[&words[..], &["--threads", "6"]].concat(), &[]);
    }
    let grpc: &[&str] = &["--peer", "grpc:", "--nodes", "3"];
    let by_value = if cfg!(feature = "grpc") { &[rpc, grpc][..] } else { &[rpc] };
    check(&["share-social", "--data-mib", "4", "--ops", "60"], by_value);
    // With several clients it depends on their order what they find; each answer is checked by itself.
    check(&[&kv[..], &["--threads", "6"]].concat(), &[]);
    check(&["share-social", "--data-mib", "4", "--ops", "60", "--threads", "6"], by_value);
    let (_, phases) = work(&["share-counts", "--data-mib", "1", "--nodes", "3", "--peer", "share:"]);
    assert_eq!(phases, ["count"]);
}

/// A small file in the form of the real one, whose answers follow from how it is made. One that is wrong is noticed.
#[test]
fn answers_about_trips_are_compared() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("taxi-data");
    let taxi = folder.join("nyc-green-taxi");
    fs::create_dir_all(&taxi).unwrap();
    let places = "LocationID,borough,zone,lon,lat\n0,Queens,Astoria,0,0\n1,Bronx,Belmont,0,0\n";
    fs::write(taxi.join("taxi_zone_centroids.csv"), places).unwrap();
    let mut trips = ",".repeat(19) + "\n";
    for trip in 0..1200u32 {
        let (vendor, passengers, flag) = [("", "", ""), ("1", "0", "N"), ("2", "48", "Y")][trip as usize % 3];
        // Of each month a hundred; those of a month take 0 to 99 minutes.
        let (month, hour, minutes, from, to) = (trip / 100 + 1, trip % 6, trip % 100, trip % 4, 260 + trip % 5);
        let (start, end) = (
            format!("2021-{month:02}-10 {hour:02}:00:00"),
            format!("2021-{month:02}-10 {:02}:{:02}:30", hour + minutes / 60, minutes % 60),
        );
        writeln!(trips, "{vendor},{start},{end},{flag},1,{from},{to},{passengers},1.25,,,,,,,,2.5,,,").unwrap();
    }
    fs::write(taxi.join("green_tripdata_2020-04_2022-02.csv"), trips).unwrap();
    let months: Vec<String> = (1..=12).map(|month| format!("\"{month}\": 3000.0")).collect();
    let hours: Vec<String> = (0..6).map(|hour| format!("\"{hour}\": 200")).collect();
    let answers = format!(
        r#"{{"taxi": {{"rows": 1200, "rows_by_VendorID": {{"": 400, "1": 400, "2": 400}}, "distinct_PU_DO_pairs": 20,
        "passenger_count_by_VendorID": {{"/": 400, "1/0": 400, "2/48": 400}}, "sum_trip_distance": 1500.0,
        "store_and_fwd_flag": {{"": 400, "N": 400, "Y": 400}}, "sum_total_amount": 3000.0,
        "duration_s": {{"mean": 3000.0, "min": 30, "max": 5970, "median": 3000.0}},
        "median_duration_s_by_pickup_month": {{{}}}, "rows_by_pickup_hour": {{{}}}}}}}"#,
        months.join(", "),
        hours.join(", "),
    );
    let ask = |peer: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farfield-work"));
        command.args(["share-taxi", "--data-mib", "1", "--object-bytes", "512"]).args(peer);
        command.env("FARFIELD_DATA", &folder);
        command
    };
    fs::write(folder.join("reference_answers.json"), &answers).unwrap();
    let expected = result(ask(&[]));
    for peer in
        [&["--threads", "2"][..], &["--peer", "share:", "--nodes", "2"], &["--peer", "share:place", "--nodes", "3"]]
    {
        assert_eq!(result(ask(peer)), expected, "{peer:?}");
    }
    for (right, wrong) in [("\"2\": 400", "\"2\": 401"), ("\"9\": 3000.0", "\"9\": 3060.0"), (": 5970", ": 5969")] {
        fs::write(folder.join("reference_answers.json"), answers.replace(right, wrong)).unwrap();
        let line: serde_json::Value = serde_json::from_slice(&ask(&[]).output().unwrap().stdout).unwrap();
        assert_eq!((&line["verified"], &line["errors"]), (&false.into(), &1.into()), "{wrong}");
    }
}

#[test]
fn remote_objects() {
    let words = ["remote", "--data-mib", "4", "--ops", "20000", "--in-flight", "32"];
    let expected = work(&[&words[..], &["--peer", "loopback:"]].concat());
    assert_eq!(expected.1, ["fill", "get"]);
    assert_eq!(work(&[&words[..], &["--near", "1048576", "--pool", "ram:"]].concat()), expected, "in a map");
}

/// What others are told of the trips: pandas and Polars say the same of them, where a Python that has them is named.
#[test]
fn others_are_given_columns_and_answers() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("columns");
    fs::create_dir_all(&folder).unwrap();
    let rows = (4 << 20) / (16 * 8);
    work(&["trips", "--data-mib", "4", "--columns", folder.to_str().unwrap()]);
    let words = |name: &str| -> Vec<[u8; 8]> {
        let bytes = fs::read(folder.join(name)).unwrap();
        bytes.as_chunks().0.to_vec()
    };
    let mut order: Vec<_> = words("order").into_iter().map(u64::from_le_bytes).collect();
    order.sort_unstable();
    assert!(order.into_iter().eq(0..rows));
    let fares: Vec<_> = words("column-5").into_iter().map(f64::from_le_bytes).collect();
    let answers: Vec<_> = words("answers").into_iter().map(f64::from_le_bytes).collect();
    // Number and sum of the fares are what is asked first.
    assert_eq!(answers[..2], [rows as f64, fares.iter().sum()]);
    let Some(python) = std::env::var_os("FARFIELD_PYTHON") else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads/trips.py");
    for module in ["pandas", "polars"] {
        let output = Command::new(&python).arg(&script).arg(module).arg(&folder).output().unwrap();
        let line: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(line["verified"], true, "{module}: {line}");
    }
}
