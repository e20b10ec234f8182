//! A heap that nobody uses does nothing. Danger: threads of ours that wake up for ever, on every machine that runs the program.

use crate::common::{MIB, builder};
use std::process::Command;
use std::time::Duration;

/// The name of the test below, for the process that it starts.
const ALONE: &str = "FARFIELD_TEST_ALONE";

/// In a process of its own, because its processor time is what is measured.
#[test]
fn heaps_at_rest_use_no_processor() {
    if std::env::var_os(ALONE).is_some() {
        return rest();
    }
    let program = std::env::current_exe().unwrap();
    let mut alone = Command::new(program);
    alone.args(["--exact", concat!(module_path!(), "::heaps_at_rest_use_no_processor")].map(without_crate));
    let output = alone.env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

/// Tests are named without their crate.
fn without_crate(path: &'static str) -> &'static str {
    path.split_once("::").map_or(path, |(krate, rest)| if krate.starts_with("heap") { rest } else { path })
}

fn rest() {
    let heaps = [25, 400].map(|near_percent| {
        let near = 4 * MIB * near_percent / 100;
        let heap = builder().near(near).near_max(near).far(1 << 30).name("rests").build().unwrap();
        let values: Vec<_> = (0..1024u64).map(|number| heap.alloc([number; 512]).unwrap()).collect();
        for value in values.iter().step_by(3) {
            value.get(&heap.enter()).unwrap();
        }
        (heap, values)
    });
    // What they were doing comes to its end, whenever a busy machine lets it.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let before = farfield_os::process::usage().cpu_ns;
        std::thread::sleep(Duration::from_secs(1));
        let used = Duration::from_nanos(farfield_os::process::usage().cpu_ns - before);
        if used < Duration::from_millis(5) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "two heaps at rest use {used:?} in a second");
    }
    drop(heaps);
}
