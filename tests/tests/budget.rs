//! Does near memory stay within its budget, whatever the program does, measured by us and by the kernel?
//!
//! Danger: a budget that is only believed. The last word has the kernel: proportional set size of the window, sampled from outside.

use farfield_tests::{FarRun, Job, MIB, PATIENCE, Scratch, compile, marked_processes, tier, window_pss_bytes};
use std::time::Duration;

/// Runs `hog` with these arguments and samples its near memory from outside until it ends. The largest sample, and how many there were.
fn sampled(near_mib: u64, arguments: &[&str]) -> Option<(u64, u32)> {
    let scratch = Scratch::new("budget");
    let hog = compile("hog", scratch.path())?;
    let near = format!("{near_mib}M");
    let words = std::iter::once(hog.to_str().expect("an ASCII path")).chain(arguments.iter().copied());
    let far = FarRun::new(&scratch, ["--near", &near], words);
    let running = far.start();
    let (mut peak, mut samples) = (0, 0);
    while !running.is_over() {
        let total: u64 = marked_processes(running.mark()).into_iter().filter_map(window_pss_bytes).sum();
        peak = peak.max(total);
        samples += u32::from(total > 0);
        // A pause, not a wait for something: smaps holds the lock that page faults need.
        std::thread::sleep(Duration::from_millis(15));
    }
    let ended = running.wait();
    assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
    let report = far.report();
    let (limit, counted) = (near_mib * MIB, report.number("near_peak_bytes"));
    println!("limit {limit}, counted {counted}, seen by the kernel {peak} in {samples} samples; {}", report.0);
    assert!(counted <= limit + limit / 50 + 16 * MIB, "counted {counted} of {limit}");
    assert!(peak <= limit + limit / 50 + 16 * MIB, "the kernel saw {peak} of {limit}");
    assert!(report.number("pages_out") > 0, "nothing left: {}", report.0);
    Some((peak, samples))
}

#[test]
fn the_kernel_sees_no_more_than_the_budget() {
    let Some((peak, samples)) = sampled(48, &["192", tier("2", "40")]) else { return };
    assert!(samples >= 3, "only {samples} samples");
    // A budget that is far from used would be a budget kept by paging for nothing.
    assert!(peak >= 24 * MIB, "only {peak} of 48 MiB were ever used");
}

#[test]
fn four_processes_share_one_budget() {
    sampled(48, &["256", tier("2", "20"), "4"]);
}

#[test]
fn eight_threads_share_one_budget() {
    sampled(32, &["192", tier("2", "20"), "1", "8"]);
}

/// The smallest budget: slow, but right.
#[test]
fn a_job_of_half_a_gigabyte_runs_in_16_mib() {
    let Some(job) = Job::probe("hog", &["512", "1"]) else { return };
    let far = job.within(PATIENCE * 3).check_with_near(16 * MIB);
    assert!(far.report.number("far_peak_bytes") >= 400 * MIB, "{}", far.report.0);
}

/// Memory that fits costs nothing: no page leaves, and the program hardly notices.
#[test]
fn a_job_that_fits_stays_near() {
    let Some(mut job) = Job::probe("hog", &["128", tier("10", "40")]) else { return };
    let far = job.check_with_near(512 * MIB);
    assert_eq!(far.report.number("pages_out"), 0, "{}", far.report.0);
    assert_eq!(far.report.number("far_peak_bytes"), 0, "{}", far.report.0);
    // Time of the processors: time on the wall says more about who else is busy.
    let native = job.native_run().cpu;
    let allowed = native.mul_f64(1.5) + Duration::from_secs(2);
    assert!(far.ended.cpu < allowed, "native {native:?}, with enough near memory {:?}", far.ended.cpu);
}

/// Memory given back is given back on both sides: a job that allocates and frees again and again does not fill the pool.
#[test]
fn freed_memory_leaves_the_pool() {
    let scratch = Scratch::new("freed");
    let Some(hog) = compile("hog", scratch.path()) else { return };
    let server = farfield_tests::Server::start(&scratch, "server", ["--capacity", "192M"]);
    // Each round maps 128 MiB in a new process; together more than the pool has, one after the other.
    let rounds = tier("1 2 3", "1 2 3 4 5 6 7 8 9 10 11 12");
    let script = format!("for i in {rounds}; do {} 128 1 || exit 1; done", hog.display());
    let far = FarRun::new(&scratch, ["--near", "16M", "--far", server.url()], ["sh", "-c", &script]);
    let ended = far.run();
    assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
    assert!(far.report().number("far_peak_bytes") < 192 * MIB);
}

/// Time is part of the budget: at half near, a job that walks its memory takes minutes only if something is badly wrong.
#[test]
fn half_near_is_slower_within_reason() {
    let Some(mut job) = Job::probe("hog", &["128", "3"]) else { return };
    let far = job.check_with_near(64 * MIB);
    assert!(far.ended.cpu < Duration::from_secs(60), "{:?}", far.ended.cpu);
}

/// Huge pages that the kernel has taken apart since it was started.
fn huge_pages_split() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("thp_split_page ")).expect("a count of split pages");
    line.trim().parse().unwrap()
}

/// While all is near it may lie in huge pages. One that lost a part would keep all its memory, which no count of mapped pages shows.
#[test]
fn huge_pages_are_taken_apart_when_memory_has_to_leave() {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !enabled.contains("[madvise]") && !enabled.contains("[always]") {
        return println!("skipped: this kernel has no transparent huge pages, or may not use them");
    }
    let scratch = Scratch::new("huge");
    let Some(growing) = compile("growing", scratch.path()) else { return };
    let grow = |options: &[&str], steps: &str| -> Vec<u64> {
        let words = [growing.to_str().expect("an ASCII path"), "64", steps];
        let far = FarRun::new(&scratch, options, words);
        let ended = far.run();
        assert_eq!(ended.code, 0, "{}\n{}", ended.text(), ended.errors);
        assert_eq!(far.report().number("pages_out") > 0, steps != "1", "{}", far.report().0);
        ended.text().lines().map(|kib| kib.parse::<u64>().unwrap() >> 10).collect()
    };
    assert_eq!(grow(&["--near", "96M"], "1"), [0, 0], "nobody has asked for them");
    let all_near = grow(&["--near", "96M", "--huge-pages"], "1");
    assert!(all_near.iter().all(|mib| *mib >= 32), "{all_near:?} MiB");
    let before = huge_pages_split();
    let grown = grow(&["--near", "96M", "--huge-pages"], "4");
    assert!(grown[0] >= 32 && grown[1] == 0, "{grown:?} MiB");
    assert!(huge_pages_split() >= before + 16, "{before}");
}
