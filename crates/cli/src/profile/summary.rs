//! Summary of a profile in a few lines, for people.

use farfield_core::policy::curve::Curve;
use farfield_core::policy::profile::{AnonymousUse, DataSegment, FileUse, Profile, SegmentKind, StageKind};
use farfield_pager::runner::{ByteSize, CompactCount};
use std::fmt::Write;

/// Most segments, and most stages, that are listed.
const TOLD: usize = 4;

pub(super) fn of(profile: &Profile) -> String {
    let (seen, found) = (&profile.observation, &profile.findings);
    let mut text = format!(
        "farfield: {:.1} s, {:.1} s of processor time, {}, at most {} threads; looking cost it about {:.1} %\n",
        seen.wall_ms as f64 / 1000.0,
        seen.cpu_ms as f64 / 1000.0,
        if seen.processes == 1 { "1 process".into() } else { format!("{} processes", seen.processes) },
        seen.threads_max,
        seen.cost.share * 100.0,
    );
    let mut line = |name: &str, said: String| {
        let _ = writeln!(text, "  {name:<12}{said}");
    };
    let memory = match found.anonymous_use {
        AnonymousUse::Low => "mostly of files",
        AnonymousUse::Medium => "as much of files",
        AnonymousUse::High => "mostly anonymous",
    };
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    line(
        "memory",
        format!(
            "{} anonymous at most, {} of files; {memory} ({})",
            ByteSize(found.anonymous_peak_bytes),
            ByteSize(found.file_peak_bytes),
            percent(found.anonymous_share)
        ),
    );
    line("working set", format!("{} within {} ms", ByteSize(found.hot_bytes), found.hot_within_ms));
    let huge = if found.is_dense() { "huge pages fit it" } else { "huge pages would carry what it does not use" };
    line(
        "density",
        format!("{} of what it uses lies in mappings that it uses from end to end: {huge}", percent(found.dense_share)),
    );
    line(
        "files",
        match found.file_use {
            FileUse::Little => "hardly used".into(),
            FileUse::Calls => format!(
                "read and written by calls ({} and {}): the kernel's cache can shrink",
                ByteSize(seen.read_bytes),
                ByteSize(seen.written_bytes)
            ),
            FileUse::Mappings => "mapped: less memory for them means faults of the kernel".into(),
        },
    );
    for stage in found.stages.iter().take(TOLD) {
        let kind = match stage.kind {
            StageKind::Preparation => "prepares",
            StageKind::Execution => "executes",
        };
        let (from, to) = (stage.from_ms as f64 / 1000.0, stage.to_ms as f64 / 1000.0);
        let faults = CompactCount(stage.faults_per_s as u64);
        line(
            "stage",
            format!(
                "{from:.1} to {to:.1} s {kind}, {faults} page faults/s, {} in the end",
                ByteSize(stage.anonymous_bytes)
            ),
        );
    }
    line_more(&mut text, found.stages.len(), "stages");
    for segment in found.segments.iter().take(TOLD) {
        let _ = writeln!(text, "  {:<12}{}", "segment", of_segment(segment));
    }
    line_more(&mut text, found.segments.len(), "segments");
    let _ = writeln!(text, "  {:<12}{} by the kinds of its segments", "can be far", ByteSize(found.offloadable_bytes));
    far_runs(&mut text, profile);
    text
}

/// Writes the slowdown for each budget and place that was tried, and the fitted curves.
fn far_runs(text: &mut String, profile: &Profile) {
    let mut before = None;
    for run in &profile.far_runs {
        if before != Some(&run.url) {
            let place = if run.url.is_empty() { "a private server" } else { &run.url };
            let _ = writeln!(text, "  far at {place}");
        }
        before = Some(&run.url);
        let _ = writeln!(
            text,
            "  {:<12}{:.0} % near: {}{:.2} × as long ({:.1} s), {} faults, {} pages in, {} out",
            ByteSize(run.near_bytes).to_string(),
            run.near_share * 100.0,
            if run.is_cut { "more than " } else { "" },
            run.slowdown,
            run.wall_ms as f64 / 1000.0,
            CompactCount(run.faults),
            CompactCount(run.pages_in),
            CompactCount(run.pages_out),
        );
    }
    for url in Curve::places(profile) {
        let Some((curve, fit)) = Curve::of(profile, url) else { continue };
        let place = if url.is_empty() { "a private server" } else { url };
        let left_out = fit.left_out_error.map_or(String::new(), |error| {
            format!(", {:.0} % off in the mean where a point is left out", error * 100.0)
        });
        let _ = writeln!(
            text,
            "  {:<12}{place}: a falling line with {} corners says {:.0} % of the differences, {:.0} % off at \
             most{left_out}",
            "fit",
            curve.points().len(),
            fit.explained * 100.0,
            fit.error_max * 100.0,
        );
    }
}

fn line_more(text: &mut String, number: usize, what: &str) {
    if number > TOLD {
        let _ = writeln!(text, "  {:<12}and {} {what} more", "", number - TOLD);
    }
}

fn of_segment(segment: &DataSegment) -> String {
    let kind = match segment.kind {
        SegmentKind::LongInterval => "long rests",
        SegmentKind::SequentialAccess => "used on and on",
        SegmentKind::Mixed => "now and then",
    };
    let (access, interval) = (segment.access_ms as f64 / 1000.0, segment.interval_ms as f64 / 1000.0);
    format!(
        "{} of {}: {kind} ({access:.1} s used, {interval:.1} s not)",
        ByteSize(segment.bytes),
        segment.name.trim_end()
    )
}
