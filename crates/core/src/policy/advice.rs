//! Advises where far memory should be, and how much near memory a program needs, to stay within a
//! given slowdown.
//!
//! Three sources of figures, best first:
//!
//! - a falling line through runs that were measured at this place ([`Curve`]);
//! - the same runs, with this place's time for a page instead of the other's;
//! - for a program that never ran with far memory, the misses that its working sets predict
//!   ([`WorkingSet`]), each at the price of a fault and a page.
//!
//! The less is known, the more room is left.

use super::curve::{Curve, Point};
use super::profile::{AnonymousUse, FarRun, FileUse, Profile, WorkingSet};
use crate::cast::saturating_u64;
use crate::geometry::PAGE_BYTES;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use serde::Serialize;

/// Cost of a page fault in the faulting thread, without the transfer of the page. `LEAVE_NS` is the
/// cost of a page that leaves (ARCHITECTURE.md, numbers to design with).
const FAULT_NS: f64 = 3500.0;
const LEAVE_NS: f64 = 1000.0;
/// Extra time of a first touch served by us instead of the kernel.
const FIRST_TOUCH_NS: f64 = 2300.0;
/// Least near memory that `farfield run` takes.
const NEAR_BYTES_MIN: u64 = 16 << 20;
/// Room added to the budget when all is near: memory that a program could touch, and does not,
/// counts against its budget.
const ROOM_BYTES: u64 = 16 << 20;
/// Number of equal steps of the near size that are tried where there is no line.
const STEPS: u64 = 20;
/// Largest part of a run with a near size below the least working set seen; above it the misses are
/// unknown.
const UNKNOWN_MAX: f64 = 0.05;
/// Difference of near sizes, as a part of all, below which the faster place is chosen.
const CLOSE: f64 = 0.02;

/// A place where far memory could be, as it was measured just now. The load of other users there is
/// in the figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredPool {
    /// Pool URL; empty for a private server.
    pub url: String,
    /// Time to read one page with nothing else under way.
    pub read_ns: u64,
    /// Throughput of runs of pages, with several under way.
    pub bytes_per_s: f64,
    /// Least number of reads under way at which the place is about as fast as it can be.
    pub best_depth: usize,
}

/// Question to the adviser.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// Profile of the program.
    pub profile: &'a Profile,
    /// Greatest allowed slowdown, as a multiple of the native time.
    pub slo: f64,
    /// Places where far memory could be.
    pub places: &'a [MeasuredPool],
    /// Memory that this machine has free for near memory.
    pub near_free_bytes: u64,
}

/// Source of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimateSource {
    /// Runs that were measured at this place.
    Measured,
    /// Runs that were measured at another place.
    Scaled,
    /// Working sets alone, without any run with far memory.
    Predicted,
}

impl EstimateSource {
    /// Returns the part of the allowed slowdown that is left unused, because the figure may be
    /// wrong.
    fn margin(self) -> f64 {
        match self {
            EstimateSource::Measured => 0.1,
            EstimateSource::Scaled => 0.2,
            EstimateSource::Predicted => 0.3,
        }
    }

    /// Returns the greatest slowdown that a figure of this source may have, so that the program
    /// takes at most `slo` times its native time.
    pub fn allowed(self, slo: f64) -> f64 {
        1.0 + (slo - 1.0) * (1.0 - self.margin())
    }
}

/// A way to run the program: a place, a near budget, and the expected slowdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlacementOption {
    /// Pool URL of the place where far memory is.
    pub url: String,
    /// The near budget.
    pub near_bytes: u64,
    /// Near budget as a share of the most anonymous memory that the program has.
    pub near_share: f64,
    /// Expected slowdown: time as a multiple of the native time.
    pub slowdown: f64,
    /// Source of the expected slowdown.
    pub source: EstimateSource,
    /// Whether its memory may lie in huge pages: nothing has to be far, and the program uses what
    /// it has from end to end.
    pub huge_pages: bool,
}

/// Answer of the adviser.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Greatest allowed slowdown that was asked for.
    pub slo: f64,
    /// Best way that is within the allowed slowdown and for which the machine has the memory.
    pub choice: Option<PlacementOption>,
    /// Best way for each place, the best of all first.
    pub ways: Vec<PlacementOption>,
    /// Reasons, in sentences.
    pub reasons: Vec<String>,
}

/// Finds the best place and near budget for a program.
pub fn advise(question: &Question<'_>) -> Advice {
    let model = ProgramModel::of(question.profile);
    let mut ways: Vec<PlacementOption> = question.places.iter().map(|place| model.way(place, question.slo)).collect();
    ways.sort_by(|a, b| by_worth(a, b, question));
    let fits = |way: &&PlacementOption| way.near_bytes <= question.near_free_bytes;
    let choice = ways.iter().find(fits).cloned();
    let reasons = model.reasons(question, &ways, choice.as_ref());
    Advice { slo: question.slo, choice, ways, reasons }
}

/// Orders ways by worth. Less near memory is better; where that is about the same, the faster place
/// is.
///
/// For a program of files, a disk is better than a network that is as good: the network is for
/// those that have no other way (DMSwitcher's label). Where only all near is known to be fast
/// enough, all places are as good. A program that has less near all the same waits least at the
/// place that answers soonest.
fn by_worth(a: &PlacementOption, b: &PlacementOption, question: &Question<'_>) -> core::cmp::Ordering {
    let close = (a.near_share - b.near_share).abs() < CLOSE;
    let is_of_files = question.profile.findings.anonymous_use == AnonymousUse::Low;
    let disk = |way: &PlacementOption| is_of_files && way.url.starts_with("ssd:");
    let read_ns =
        |way: &PlacementOption| question.places.iter().find(|place| place.url == way.url).map(|place| place.read_ns);
    match close {
        false => a.near_bytes.cmp(&b.near_bytes),
        true if disk(a) != disk(b) => disk(b).cmp(&disk(a)),
        true => {
            let by_size = a.slowdown.total_cmp(&b.slowdown).then(a.near_bytes.cmp(&b.near_bytes));
            by_size.then_with(|| read_ns(a).cmp(&read_ns(b)))
        }
    }
}

/// Model of a program from its profile.
struct ProgramModel<'a> {
    profile: &'a Profile,
    sets: WorkingSet,
    peak_bytes: u64,
    native_ms: f64,
}

impl<'a> ProgramModel<'a> {
    fn of(profile: &'a Profile) -> ProgramModel<'a> {
        ProgramModel {
            profile,
            sets: WorkingSet::of(&profile.observation),
            peak_bytes: profile.observation.anonymous_peak_bytes(),
            native_ms: profile.observation.native_ms().max(1) as f64,
        }
    }

    /// Returns the way with the least near memory at that place.
    fn way(&self, place: &MeasuredPool, slo: f64) -> PlacementOption {
        let (source, curve) = self.curve(place);
        let allowed = source.allowed(slo);
        let (near_share, slowdown) = match &curve {
            Some(curve) => match curve.least_near(allowed) {
                Some(near) => (near, curve.at(near).unwrap_or(1.0)),
                // Too slow even with the most that was tried.
                None => (1.0f64.max(curve.points().last().map_or(1.0, |point| point.near)), 1.0),
            },
            None => self.least_predicted(place, allowed),
        };
        let bytes = saturating_u64(near_share * self.peak_bytes as f64);
        let room = if near_share >= 1.0 { ROOM_BYTES } else { 0 };
        let near_bytes = bytes.next_multiple_of(PAGE_BYTES as u64).max(NEAR_BYTES_MIN) + room;
        let huge_pages = near_share >= 1.0 && self.profile.findings.is_dense();
        PlacementOption { url: place.url.clone(), near_bytes, near_share, slowdown, source, huge_pages }
    }

    /// Returns the best line that there is for the place, and its source.
    fn curve(&self, place: &MeasuredPool) -> (EstimateSource, Option<Curve>) {
        if let Some((curve, _)) = Curve::of(self.profile, &place.url) {
            return (EstimateSource::Measured, Some(curve));
        }
        let scaled: Vec<Point> = self.profile.far_runs.iter().map(|run| self.scaled(run, place)).collect();
        match Curve::through(&scaled) {
            Some(curve) => (EstimateSource::Scaled, Some(curve)),
            None => (EstimateSource::Predicted, None),
        }
    }

    /// Estimates the run as if it had been at `place`: each demand read takes another time, and all
    /// bytes have to get through.
    fn scaled(&self, run: &FarRun, place: &MeasuredPool) -> Point {
        let there = run
            .read_ns
            .map_or_else(|| run.fault_ns_p50.map_or(0.0, |ns| ns as f64 - FAULT_NS).max(0.0), |ns| ns as f64);
        let more_ms = run.demand_reads as f64 * (place.read_ns as f64 - there) / 1e6 / self.parallelism();
        let moved = (run.pages_in + run.pages_out) as f64 * PAGE_BYTES as f64;
        let least_ms = moved / place.bytes_per_s.max(1.0) * 1000.0;
        // The program cannot become faster than with nothing to wait for, nor than the transfer of
        // what must be moved.
        let slowdown =
            (run.slowdown + more_ms / self.native_ms).max(least_ms / self.native_ms).max(1.0f64.min(run.slowdown));
        Point { near: run.near_share, slowdown }
    }

    /// Returns the least share whose slowdown, predicted from working sets, is within `allowed`,
    /// and that slowdown.
    fn least_predicted(&self, place: &MeasuredPool, allowed: f64) -> (f64, f64) {
        let (mut best, mut slowdown) = (1.0, 1.0);
        for step in (1..STEPS).rev() {
            let share = step as f64 / STEPS as f64;
            match self.predicted(place, share) {
                Some(predicted) if predicted <= allowed => (best, slowdown) = (share, predicted),
                _ => break,
            }
        }
        (best, slowdown)
    }

    /// Predicts the slowdown with this share near; `None` where it is unknown.
    fn predicted(&self, place: &MeasuredPool, share: f64) -> Option<f64> {
        let near = saturating_u64(self.peak_bytes as f64 * share);
        let rate = self.sets.misses(near);
        if rate.unknown_share > UNKNOWN_MAX {
            return None;
        }
        let page = PAGE_BYTES as f64;
        let beyond = (self.peak_bytes - near) as f64 / page;
        let lost_ns = rate.misses * (FAULT_NS + LEAVE_NS + place.read_ns as f64) + beyond * (FIRST_TOUCH_NS + LEAVE_NS);
        Some(1.0 + lost_ns / 1e6 / self.parallelism() / self.native_ms)
    }

    /// Returns the mean number of threads that work at once: threads that wait at the same time do
    /// not wait one after the other.
    fn parallelism(&self) -> f64 {
        self.profile.observation.parallelism()
    }

    fn reasons(
        &self,
        question: &Question<'_>,
        ways: &[PlacementOption],
        choice: Option<&PlacementOption>,
    ) -> Vec<String> {
        let findings = &self.profile.findings;
        let mut reasons = Vec::new();
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let percent = |share: f64| share * 100.0;
        reasons.push(format!(
            "It has {:.0} MiB of anonymous memory at most and uses {:.0} MiB within {} ms.",
            mib(self.peak_bytes),
            mib(findings.hot_bytes),
            findings.hot_within_ms
        ));
        if findings.file_use == FileUse::Mappings {
            reasons.push(
                "It maps its files: they stay in the kernel's cache, which needs memory beside the budget.".to_string(),
            );
        }
        for way in ways {
            let how = match way.source {
                EstimateSource::Measured => "by runs that were measured there",
                EstimateSource::Scaled => "by runs measured elsewhere and what a page takes there now",
                EstimateSource::Predicted => "by its working sets alone, for it never ran with far memory",
            };
            let place = name(&way.url);
            reasons.push(match way.near_share < 1.0 {
                true => format!(
                    "Far at {place}: {:.0} MiB near ({:.0} %) and {:.2} × its time, {how}.",
                    mib(way.near_bytes),
                    percent(way.near_share),
                    way.slowdown
                ),
                false => format!("Far at {place}: nothing less than all near is known to be fast enough, {how}."),
            });
        }
        match choice {
            Some(choice) if Some(choice) != ways.first() => {
                let free = mib(question.near_free_bytes);
                reasons.push(format!("The best of these needs more than the {free:.0} MiB that are free here."));
            }
            None if !ways.is_empty() => {
                let free = mib(question.near_free_bytes);
                reasons.push(format!("None of these fits into the {free:.0} MiB that are free here."));
            }
            _ => {}
        }
        if let Some(choice) = choice
            && let Some(place) = question.places.iter().find(|place| place.url == choice.url)
        {
            reasons.extend(knobs(self.profile, place, choice));
        }
        reasons
    }
}

/// Explains the other settings, and why each is set or not.
fn knobs(profile: &Profile, place: &MeasuredPool, choice: &PlacementOption) -> [String; 3] {
    let dense = profile.findings.dense_share * 100.0;
    let pages = match choice.huge_pages {
        true => format!(
            "All of it is near, and {dense:.0} % of what it uses is used from end to end: huge pages of 2 MiB \
             (`farfield run --huge-pages`)."
        ),
        false if choice.near_share < 1.0 => "Pages are of 4 KiB: what is far comes and goes in such.".to_string(),
        false => format!(
            "Pages are of 4 KiB: {dense:.0} % of what it uses is used from end to end, so huge ones would carry what \
             it does not use."
        ),
    };
    [
        "Prefetch has no knob: each thread's streams take 4 to 64 pages ahead, more while they are used.".to_string(),
        pages,
        format!(
            "Each of its threads has a lane of its own (at most {} at once); the place is as fast as it can be with {} \
             reads under way.",
            profile.observation.threads_max, place.best_depth
        ),
    ]
}

fn name(url: &str) -> &str {
    if url.is_empty() { "a private server" } else { url }
}

#[cfg(test)]
mod tests {
    //! Danger: a program that is told to live with less than it needs.
    use super::super::profile::{Observation, Sample, VERSION, analyse};
    use super::*;
    use alloc::vec;

    const MIB: u64 = 1 << 20;

    /// Ten seconds with 400 MiB, of which so much is used within a time.
    fn profile(used: impl Fn(u64) -> u64) -> Profile {
        let look = |look: u64| {
            let since_ms = (look - 1) % 10 * 100 + 100;
            Sample {
                at_ms: look * 100,
                epoch: ((look - 1) / 10) as u32,
                since_ms,
                anonymous_bytes: 400 * MIB,
                anonymous_used_bytes: used(since_ms).min(400 * MIB),
                ..Sample::default()
            }
        };
        let samples = (1..=100).map(look).collect();
        let observation = Observation { wall_ms: 10_000, cpu_ms: 10_000, samples, ..Observation::default() };
        Profile { version: VERSION, command: vec![], findings: analyse(&observation), observation, far_runs: vec![] }
    }

    fn place(url: &str, read_ns: u64) -> MeasuredPool {
        MeasuredPool { url: url.into(), read_ns, bytes_per_s: 1e9, best_depth: 16 }
    }

    fn run(url: &str, near_share: f64, slowdown: f64, demand_reads: u64) -> FarRun {
        FarRun {
            url: url.into(),
            read_ns: Some(10_000),
            near_bytes: (400.0 * MIB as f64 * near_share) as u64,
            near_share,
            wall_ms: (10_000.0 * slowdown) as u64,
            slowdown,
            faults: demand_reads,
            demand_reads,
            pages_in: demand_reads,
            pages_out: 0,
            fault_ns_p50: Some(13_500),
            is_cut: false,
        }
    }

    fn ask(profile: &Profile, slo: f64, places: &[MeasuredPool]) -> Advice {
        advise(&Question { profile, slo, places, near_free_bytes: 1 << 40 })
    }

    #[test]
    fn a_program_with_a_small_hot_part_keeps_that() {
        let advice = ask(&profile(|_| 100 * MIB), 1.4, &[place("tcp://a:1", 10_000)]);
        let choice = advice.choice.unwrap();
        assert_eq!((choice.near_share, choice.source), (0.25, EstimateSource::Predicted), "{:?}", advice.reasons);
        assert!(choice.slowdown < 1.1);
        assert_eq!(choice.near_bytes, 100 * MIB);
    }

    #[test]
    fn a_program_that_uses_all_at_once_keeps_all() {
        let advice = ask(&profile(|_| 400 * MIB), 1.8, &[place("tcp://a:1", 10_000)]);
        let choice = advice.choice.unwrap();
        assert_eq!((choice.near_share, choice.near_bytes), (1.0, 416 * MIB), "and room so that nothing is paged");
        assert!(advice.reasons.iter().any(|reason| reason.contains("nothing less than all")), "{:?}", advice.reasons);
    }

    #[test]
    fn huge_pages_are_for_what_is_all_near_and_used_from_end_to_end() {
        let ask_with = |used: u64, dense_share: f64| {
            let mut profile = profile(|_| used * MIB);
            profile.findings.dense_share = dense_share;
            let advice = ask(&profile, 1.4, &[place("tcp://a:1", 10_000)]);
            let says_so = advice.reasons.iter().any(|reason| reason.contains("--huge-pages"));
            let choice = advice.choice.unwrap();
            assert_eq!(choice.huge_pages, says_so, "{:?}", advice.reasons);
            choice.huge_pages
        };
        assert!(ask_with(400, 0.95));
        assert!(!ask_with(400, 0.5), "they would carry what it does not use");
        assert!(!ask_with(100, 0.95), "three quarters of it will be far");
    }

    #[test]
    fn a_loop_over_all_keeps_all_unless_it_is_slow_enough() {
        // 40 MiB, or 10 000 pages, a second: 0.2 s at 20 µs.
        let slow = profile(|ms| 40 * MIB * ms / 1000);
        assert!(ask(&slow, 1.4, &[place("tcp://a:1", 15_000)]).choice.unwrap().near_share <= 0.05);
        assert!(ask(&slow, 1.1, &[place("tcp://a:1", 150_000)]).choice.unwrap().near_share >= 0.9);
    }

    #[test]
    fn measured_runs_are_believed_before_all_else() {
        let mut profile = profile(|_| 400 * MIB);
        profile.far_runs =
            vec![run("tcp://a:1", 0.75, 1.0, 0), run("tcp://a:1", 0.5, 1.2, 9), run("tcp://a:1", 0.25, 3.0, 9)];
        let choice = ask(&profile, 1.4, &[place("tcp://a:1", 10_000)]).choice.unwrap();
        assert_eq!(choice.source, EstimateSource::Measured);
        assert!(choice.near_share > 0.45 && choice.near_share < 0.5, "{choice:?}");
        assert!(choice.slowdown <= 1.4, "not more than allowed");
        // Never below what was tried.
        assert_eq!(ask(&profile, 9.0, &[place("tcp://a:1", 10_000)]).choice.unwrap().near_share, 0.25);
    }

    #[test]
    fn a_place_that_nobody_tried_is_reckoned_from_one_that_was() {
        let mut profile = profile(|_| 400 * MIB);
        // 100 000 waits of 10 µs make a tenth of ten seconds.
        profile.far_runs = vec![run("tcp://a:1", 1.0, 1.0, 0), run("tcp://a:1", 0.5, 1.1, 100_000)];
        let way = |read_ns| ask(&profile, 1.25, &[place("ssd:/a", read_ns)]).choice.unwrap();
        assert_eq!((way(10_000).near_share, way(10_000).source), (0.5, EstimateSource::Scaled));
        assert!(way(20_000).near_share < 0.52, "1.2 by waits twice as long: {:?}", way(20_000));
        let slow = way(100_000);
        assert!(slow.near_share > 0.8 && slow.slowdown <= 1.25, "2.0 by waits ten times as long: {slow:?}");
        // 100 000 pages through 10 MB/s take 41 s.
        let narrow = MeasuredPool { bytes_per_s: 1e7, ..place("ssd:/a", 10_000) };
        assert!(ask(&profile, 1.25, &[narrow]).choice.unwrap().near_share > 0.9);
    }

    #[test]
    fn the_place_that_needs_least_near_wins_and_pressure_overrules() {
        let mut profile = profile(|_| 400 * MIB);
        profile.far_runs = vec![
            run("tcp://a:1", 1.0, 1.0, 0),
            run("tcp://a:1", 0.5, 2.0, 9),
            run("ssd:/a", 1.0, 1.0, 0),
            run("ssd:/a", 0.5, 4.0, 9),
        ];
        let places = [place("ssd:/a", 90_000), place("tcp://a:1", 10_000)];
        let advice = ask(&profile, 1.4, &places);
        let urls: Vec<&str> = advice.ways.iter().map(|way| way.url.as_str()).collect();
        assert_eq!((urls, advice.choice.as_ref()), (vec!["tcp://a:1", "ssd:/a"], advice.ways.first()));
        let least = advice.ways[0].near_bytes;
        let answer =
            |near_free_bytes| advise(&Question { profile: &profile, slo: 1.4, places: &places, near_free_bytes });
        assert_eq!(answer(least).choice, advice.choice);
        let none = answer(least - 1);
        assert!(
            none.choice.is_none() && none.reasons.iter().any(|reason| reason.contains("None of these")),
            "{none:?}"
        );
        assert!(ask(&profile, 1.4, &[]).choice.is_none());
    }

    #[test]
    fn the_fastest_pool_comes_first_if_only_all_near_is_fast_enough() {
        let places = [place("ssd:/a", 90_000), place("unix:/a", 2_000), place("tcp://a:1", 10_000)];
        let urls = |profile: &Profile| -> Vec<String> {
            ask(profile, 1.05, &places).ways.into_iter().map(|way| way.url).collect()
        };
        let mut profile = profile(|_| 400 * MIB);
        assert_eq!(urls(&profile), ["unix:/a", "tcp://a:1", "ssd:/a"]);
        // Runs at one of them say the same of it, and by it of the others.
        profile.far_runs = vec![run("ssd:/a", 0.9, 3.0, 90_000)];
        assert_eq!(urls(&profile)[0], "unix:/a");
    }

    #[test]
    fn more_time_never_needs_more_near() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut next = move |below: u64| random.u64(..below);
        for round in 0..100 {
            let hot = next(400) * MIB;
            let rate = next(200) * MIB;
            let mut profile = profile(|ms| hot + rate * ms / 1000);
            let measured = next(3);
            profile.far_runs = (0..measured * 3)
                .map(|_| {
                    run(
                        ["", "tcp://a:1"][next(2) as usize],
                        (1 + next(100)) as f64 / 100.0,
                        1.0 + next(300) as f64 / 100.0,
                        next(100_000),
                    )
                })
                .collect();
            let places = [place("", 1 + next(100_000)), place("tcp://a:1", 1 + next(100_000))];
            let near = |slo: f64| ask(&profile, slo, &places).ways.iter().map(|way| way.near_bytes).min().unwrap();
            let sizes: Vec<u64> = (0..10).map(|step| near(1.0 + f64::from(step) / 5.0)).collect();
            assert!(sizes.windows(2).all(|pair| pair[0] >= pair[1]), "{round}: {sizes:?}");
        }
    }
}
