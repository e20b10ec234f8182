//! `farfield top` and the heaps of programs: this one's.
//!
//! Danger: numbers of the wrong heap or of another moment, heaps that somebody wants to keep to himself.

mod common;

use common::{Running, farfield, scrape, text, until};
use farfield::{FarBox, Heap, Plane, Stats};
use farfield_gc::GcHeap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Value = [u64; 8];

/// Descriptors are those of the process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn top(arguments: &[&str]) -> Output {
    farfield().args(["top", "--once"]).args(arguments).output().unwrap()
}

/// Heaps of a process. `top` fails if there are none.
fn heaps(pid: u32) -> Vec<serde_json::Value> {
    let output = top(&["--json", &pid.to_string()]);
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    view["heaps"].as_array().cloned().unwrap_or_default()
}

fn filled(heap: &Heap) -> Vec<FarBox<Value>> {
    (0..100_000).map(|index| heap.alloc([index; 8]).unwrap()).collect()
}

fn read_all(values: &[FarBox<Value>]) {
    for step in 0..values.len() {
        let index = step * 7919 % values.len();
        assert_eq!(values[index].read(|value| value[1]), Ok(index as u64));
    }
}

/// What of a heap's statistics is to be seen.
fn says(heap: &serde_json::Value, stats: &Stats) -> bool {
    let counters = [
        ("near_limit_bytes", stats.near_limit_bytes),
        ("near_bytes", stats.near_bytes),
        ("table_bytes", stats.table_bytes),
        ("misses", stats.misses),
        ("object_misses", stats.object_misses),
        ("value_pages", stats.value_pages),
        ("pages_to_come_whole", stats.pages_to_come_whole),
        ("whole_pages", stats.whole_pages),
        ("left_to_come_whole", stats.left_to_come_whole),
        ("fetched_bytes", stats.fetched_bytes),
        ("used_bytes", stats.used_bytes),
        ("written_pages", stats.written_pages),
        ("evicting_ns", stats.evicting.as_nanos() as u64),
    ];
    let part = |part: u64, whole: u64| part as f64 / whole as f64;
    let parts = [
        ("amplification", part(stats.fetched_bytes, stats.used_bytes)),
        ("page_path_share", part(stats.pages_to_come_whole, stats.value_pages)),
        ("whole_share", part(stats.left_to_come_whole, stats.access_rates.iter().sum())),
    ];
    counters.iter().all(|(name, expected)| heap["counters"][name] == *expected)
        && parts.iter().all(|(name, expected)| heap[name].as_f64().is_some_and(|is| (is - expected).abs() < 1e-9))
        && heap["access_rates"] == serde_json::json!(stats.access_rates)
        && heap["pauses"] == serde_json::json!(stats.pauses)
}

#[test]
fn a_heap_with_a_name_says_what_its_stats_say() {
    let _alone = alone();
    let heap = Heap::builder().near(2 << 20).plane(Plane::Hybrid).name("orders of June").build().unwrap();
    let unnamed = Heap::builder().near(1 << 20).build().unwrap();
    let values = filled(&heap);
    read_all(&values);
    let stats = heap.stats();
    assert!(stats.misses > 50_000 && stats.used_bytes > 0 && stats.access_rates.iter().sum::<u64>() > 0, "{stats:?}");
    // Notices are a little older, and the reclaimer may still be at it.
    let pid = std::process::id();
    until("a notice says what the stats say", || says(&heaps(pid)[0], &heap.stats()));
    let seen = heaps(pid);
    assert_eq!(seen[0]["name"], "orders of June");
    assert_eq!((seen[0]["plane"].as_str(), seen[0]["alive"].as_bool()), (Some("hybrid"), Some(true)));
    // Who has no name is not seen.
    assert_eq!(seen.len(), 1, "{seen:?}");
    // Among all heaps of this user, for people.
    let all = top(&[]);
    assert!(text(&all).contains(&format!("heap orders of June  process {pid}  ")), "{}", text(&all));
    drop((values, heap, unnamed));
    assert_eq!(heaps(pid), Vec::<serde_json::Value>::new());
}

#[test]
fn rates_are_those_since_the_last_notice_and_the_view_ends_with_the_heap() {
    let _alone = alone();
    let heap = Heap::builder().near(1 << 20).plane(Plane::Object).name("busy").build().unwrap();
    let values = filled(&heap);
    let mut command = farfield();
    let mut view = Running::start(command.args(["top", "--json", "--every", "0.05", &std::process::id().to_string()]));
    let next = || {
        let view: serde_json::Value = serde_json::from_str(&view.line()).unwrap();
        view["heaps"][0].clone()
    };
    let first = next();
    assert_eq!(first["alive"], true);
    let misses = |heap: &serde_json::Value| heap["counters"]["misses"].as_u64().unwrap();
    let (mut before, mut now) = (first.clone(), first);
    until("there is a rate", || {
        read_all(&values[..1000]);
        before = std::mem::replace(&mut now, next());
        misses(&now) > misses(&before)
    });
    let seconds = (misses(&now) - misses(&before)) as f64 / now["misses_per_s"].as_f64().unwrap();
    assert!(seconds > 0.2, "{seconds} s between two notices");
    assert!(now["evicting_share"].as_f64().unwrap() >= 0.0);
    drop((values, heap));
    until("the heap has ended", || next()["alive"] == false);
    assert!(view.wait().success());
}

#[test]
fn metrics_say_what_the_stats_say() {
    let _alone = alone();
    let exporter = Running::start(farfield().args(["top", "--metrics", "127.0.0.1:0"]));
    let url = exporter.line();
    // Nobody has to be there yet.
    assert!(scrape(&url).ends_with("# EOF\n"));
    let heap = Heap::builder().near(2 << 20).plane(Plane::Hybrid).name("say \"hi\\\"").build().unwrap();
    let other = Heap::builder().near(1 << 20).name("other").build().unwrap();
    let values = filled(&heap);
    read_all(&values);
    let pid = std::process::id();
    let labels = format!("heap=\"say \\\"hi\\\\\\\"\",plane=\"hybrid\",process=\"{pid}\"");
    let says = |answer: &str, stats: &Stats| {
        let by_page = stats.misses - stats.object_misses;
        [
            format!("farfield_heap_near_limit_bytes{{{labels}}} 2097152"),
            format!("farfield_heap_value_pages{{{labels}}} {}", stats.value_pages),
            format!("farfield_heap_pages_to_come_whole{{{labels}}} {}", stats.pages_to_come_whole),
            format!("farfield_heap_fetched_bytes_total{{{labels}}} {}", stats.fetched_bytes),
            format!("farfield_heap_misses_total{{{labels},path=\"object\"}} {}", stats.object_misses),
            format!("farfield_heap_misses_total{{{labels},path=\"page\"}} {by_page}"),
            format!("farfield_heap_left_pages_total{{{labels},used_percent=\"90\"}} {}", stats.access_rates[9]),
            format!("farfield_heap_evicting_seconds_total{{{labels}}} {}", stats.evicting.as_nanos() as f64 / 1e9),
        ]
        .iter()
        .all(|expected| answer.lines().any(|line| line == expected))
    };
    until("metrics say what the stats say", || says(&scrape(&url), &heap.stats()));
    let answer = scrape(&url);
    assert!(answer.contains("farfield_heap_near_limit_bytes{heap=\"other\",plane=\"page\","), "{answer}");
    assert_eq!(answer.matches("# TYPE farfield_heap_misses counter").count(), 1, "{answer}");
    drop((values, heap, other));
    until("heaps that have ended are gone", || !scrape(&url).contains(&format!("process=\"{pid}\"")));
}

#[test]
fn a_collected_heap_says_what_its_stats_say() {
    let _alone = alone();
    let exporter = Running::start(farfield().args(["top", "--metrics", "127.0.0.1:0"]));
    let url = exporter.line();
    let heap = Heap::builder().near(2 << 20).name("graph").build().unwrap();
    let pid = std::process::id();
    let labels = format!("heap=\"graph\",plane=\"page\",process=\"{pid}\"");
    let counters = |name: &str| heaps(pid)[0]["counters"][name].clone();
    assert_eq!(counters("gc_limit_bytes"), serde_json::Value::Null);
    assert!(!scrape(&url).contains("farfield_heap_gc_paused_seconds_total{"));
    let collected = GcHeap::in_heap(&heap).limit(8 << 20).build().unwrap();
    let mut mutator = collected.enter();
    let roots: Vec<_> = (0..3).map(|_| mutator.root(mutator.alloc_str("alive").unwrap())).collect();
    for _ in 0..1_000 {
        mutator.alloc_str("dead").unwrap();
    }
    mutator.collect().unwrap();
    let stats = collected.stats();
    assert!(stats.live_objects == 3 && stats.freed_pages > 0 && stats.pauses > 0, "{stats:?}");
    let says = |answer: &str| {
        let stats = collected.stats();
        [
            format!("farfield_heap_gc_limit_bytes{{{labels}}} {}", stats.limit_bytes),
            format!("farfield_heap_gc_used_bytes{{{labels}}} {}", stats.used_bytes),
            format!("farfield_heap_gc_live_objects{{{labels}}} 3"),
            format!("farfield_heap_gc_roots{{{labels}}} 3"),
            format!("farfield_heap_gc_collections_total{{{labels}}} {}", stats.collections),
            format!("farfield_heap_gc_freed_pages_total{{{labels}}} {}", stats.freed_pages),
            format!("farfield_heap_gc_paused_seconds_total{{{labels}}} {}", stats.paused.as_nanos() as f64 / 1e9),
        ]
        .iter()
        .all(|expected| answer.lines().any(|line| line == expected))
    };
    until("metrics say what the stats say", || says(&scrape(&url)));
    assert_eq!(heaps(pid)[0]["gc_pauses"], serde_json::json!(collected.stats().pause_counts));
    let shown = top(&[&pid.to_string()]);
    assert!(text(&shown).contains("collected "), "{}", text(&shown));
    drop((roots, mutator));
    drop(collected);
    until("the far heap is alone", || counters("gc_limit_bytes") == serde_json::Value::Null);
    assert!(counters("near_limit_bytes") == 2 << 20);
}

#[test]
fn a_child_is_not_taken_for_the_heaps_owner() {
    let _alone = alone();
    let heap = Heap::builder().near(1 << 20).name("another").build().unwrap();
    let is_heap = |path: &Path| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.as_os_str().as_bytes().starts_with(b"/memfd:farfield-heap")
    };
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let path = descriptors.into_iter().find(|path| is_heap(path)).unwrap();
    // As after a fork.
    let child = Running::start(Command::new("sleep").arg("600").stdin(std::fs::File::open(path).unwrap()));
    assert!(is_heap(Path::new(&format!("/proc/{}/fd/0", child.pid()))));
    assert_eq!(heaps(child.child.id()), Vec::<serde_json::Value>::new());
    drop(child);
    assert_eq!(heaps(std::process::id()).len(), 1);
    drop(heap);
    assert_eq!(heaps(std::process::id()).len(), 0);
}

#[test]
fn a_name_is_one_line_of_text() {
    let _alone = alone();
    for wrong in ["", "two\nlines", "\x1b[2J", &"x".repeat(65)] {
        assert!(Heap::builder().name(wrong).build().is_err(), "{wrong:?}");
    }
    let longest = "ü".repeat(32);
    let _heap = Heap::builder().name(&longest).build().unwrap();
    assert_eq!(heaps(std::process::id())[0]["name"], longest);
}
