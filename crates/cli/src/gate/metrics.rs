//! Metrics of a gate for Prometheus.

use crate::metrics::MetricKind::{Count, Gauge};
use crate::metrics::{Label, MetricServer, count, gauge, metric};
use farfield_cluster::gate::{BookChange, GateEvent, GateRound};
use farfield_core::policy::cluster::GateWait;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use std::collections::BTreeMap;
use std::fmt::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) const PREFIX: &str = "farfield_gate";

/// Counts of a gate, as the thread that serves metrics sees them.
pub(super) type SharedCounts = Arc<Mutex<GateCounts>>;

/// Counts of a gate since it was started, and its last round that succeeded.
#[derive(Debug, Default)]
pub(super) struct GateCounts {
    rounds: u64,
    failed_rounds: u64,
    admissions: u64,
    charges: u64,
    withdrawals: u64,
    /// Changes that the scheduler refused, by their name.
    refused: BTreeMap<&'static str, u64>,
    last: Option<LastRound>,
}

/// Round that succeeded.
#[derive(Debug)]
struct LastRound {
    ended: Instant,
    took: Duration,
    pool_bytes: Option<u64>,
    charged_bytes: u64,
    held_bytes: u64,
    stored_bytes: Option<u64>,
    running: u64,
    ignored: u64,
    /// Jobs that wait, by the name of the reason.
    waiting: BTreeMap<&'static str, u64>,
}

/// Serves the metrics in a thread that lives as long as the process. Returns their URL.
pub(super) fn serve(address: SocketAddr, counts: SharedCounts) -> anyhow::Result<String> {
    let server = MetricServer::bind(address, PREFIX, Box::new(GateCollector(counts)))?;
    let url = server.url()?;
    std::thread::spawn(move || server.serve());
    Ok(url)
}

/// Counts a round that has just ended, and began at `started`.
pub(super) fn count_round(counts: &SharedCounts, round: &GateRound, started: Instant) {
    let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
    let mut last = LastRound {
        ended: Instant::now(),
        took: started.elapsed(),
        pool_bytes: round.pool_bytes,
        charged_bytes: round.charged_bytes,
        held_bytes: round.held_bytes,
        stored_bytes: round.stored_bytes,
        running: round.running as u64,
        ignored: 0,
        waiting: BTreeMap::new(),
    };
    counts.rounds += 1;
    for event in &round.events {
        match event {
            GateEvent::Admitted { .. } => counts.admissions += 1,
            GateEvent::Charged { .. } => counts.charges += 1,
            GateEvent::Withdrawn { .. } => counts.withdrawals += 1,
            GateEvent::Waits { reason, .. } => *last.waiting.entry(reason.name()).or_default() += 1,
            GateEvent::Ignored { .. } => last.ignored += 1,
            GateEvent::Refused { change, .. } => *counts.refused.entry(change).or_default() += 1,
        }
    }
    counts.last = Some(last);
}

/// Counts a round that failed.
pub(super) fn count_failure(counts: &SharedCounts) {
    counts.lock().unwrap_or_else(PoisonError::into_inner).failed_rounds += 1;
}

#[derive(Debug)]
struct GateCollector(SharedCounts);

impl Collector for GateCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), Error> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = [
            ("rounds", counts.rounds, "Rounds that succeeded"),
            ("failed_rounds", counts.failed_rounds, "Rounds in which the scheduler could not be read"),
            ("admissions", counts.admissions, "Jobs that were admitted"),
            ("charges", counts.charges, "Changes of what running jobs are charged for"),
            ("withdrawals", counts.withdrawals, "Admissions that were taken back"),
        ];
        for (name, total, help) in totals {
            count(out.encode_descriptor(name, help, None, MetricType::Counter)?, total)?;
        }
        let help = "Changes that the scheduler refused";
        let refused = by_name("change", &BookChange::NAMES, &counts.refused);
        metric(&mut out, "refused_changes", Count, help, refused)?;
        let Some(last) = &counts.last else { return Ok(()) };
        let of_round = [
            ("running_jobs", Some(last.running), "Jobs with far memory that run"),
            ("ignored_jobs", Some(last.ignored), "Jobs that are left alone, because they are not understood"),
            ("pool_bytes", last.pool_bytes, "Size of the pool; absent while a memory server does not answer"),
            ("charged_bytes", Some(last.charged_bytes), "Part of the pool that is promised to jobs"),
            ("held_bytes", Some(last.held_bytes), "Part of the pool that is promised to jobs that run"),
            ("stored_bytes", last.stored_bytes, "Bytes that the memory servers store, copies counted once"),
        ];
        for (name, value, help) in of_round {
            value.map_or(Ok(()), |value| gauge(&mut out, name, help, value))?;
        }
        let waiting = by_name("reason", &GateWait::NAMES, &last.waiting);
        metric(&mut out, "waiting_jobs", Gauge, "Jobs that do not run, by what they wait for", waiting)?;
        seconds(&mut out, "round", "Duration of the last round that succeeded", last.took)?;
        seconds(&mut out, "last_success_age", "Time since the last round that succeeded", last.ended.elapsed())
    }
}

/// Returns the count of each name, 0 for those that are not there, so that no series comes and goes.
pub(super) fn by_name<'a>(
    label: &'static str,
    names: &'a [&'static str],
    counts: &'a BTreeMap<&'static str, u64>,
) -> impl Iterator<Item = (Vec<Label>, u64)> + 'a {
    let count = move |name: &&'static str| (vec![(label, (*name).to_owned())], counts.get(name).copied().unwrap_or(0));
    names.iter().map(count)
}

/// Encodes a gauge of seconds.
pub(super) fn seconds(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, time: Duration) -> Result<(), Error> {
    out.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?.encode_gauge(&time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    //! Danger: metrics that Prometheus cannot read, and a gate that has stopped and looks alive.
    use super::*;
    use crate::metrics::MetricSource;

    fn lines(counts: &SharedCounts) -> Vec<String> {
        let source = MetricSource::new(PREFIX, Box::new(GateCollector(counts.clone())));
        source.text().unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn rounds_and_their_events_are_counted() {
        let counts = SharedCounts::default();
        count_failure(&counts);
        let before = lines(&counts);
        assert!(before.iter().any(|line| line == "farfield_gate_failed_rounds_total 1"), "{before:?}");
        assert!(!before.iter().any(|line| line.contains("age")), "no round has succeeded: {before:?}");
        let job = || "1".to_owned();
        let events = vec![
            GateEvent::Admitted { job: job(), node: "n1".into(), far_bytes: 5 },
            GateEvent::Waits { job: job(), reason: GateWait::Near { missing_bytes: 7 } },
            GateEvent::Waits { job: job(), reason: GateWait::Near { missing_bytes: 9 } },
            GateEvent::Waits { job: job(), reason: GateWait::Never },
            GateEvent::Ignored { job: job(), reason: "nonsense".into() },
            GateEvent::Refused { job: job(), change: "admit", error: "no".into() },
        ];
        let round = GateRound { charged_bytes: 70, held_bytes: 60, running: 3, events, ..GateRound::default() };
        count_round(&counts, &round, Instant::now());
        count_round(&counts, &round, Instant::now());
        let text = lines(&counts);
        for line in [
            "farfield_gate_rounds_total 2",
            "farfield_gate_admissions_total 2",
            "farfield_gate_refused_changes_total{change=\"admit\"} 2",
            "farfield_gate_refused_changes_total{change=\"charge\"} 0",
            "farfield_gate_waiting_jobs{reason=\"near\"} 2",
            "farfield_gate_waiting_jobs{reason=\"never\"} 1",
            "farfield_gate_waiting_jobs{reason=\"far\"} 0",
            "farfield_gate_ignored_jobs 1",
            "farfield_gate_running_jobs 3",
            "farfield_gate_charged_bytes 70",
            "farfield_gate_held_bytes 60",
        ] {
            assert!(text.iter().any(|this| this == line), "{line}: {text:?}");
        }
        for name in ["farfield_gate_round_seconds ", "farfield_gate_last_success_age_seconds "] {
            let value = text.iter().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}"));
            assert!((0.0..600.0).contains(&value.parse::<f64>().unwrap()), "{name}{value}");
        }
        assert!(!text.iter().any(|line| line.starts_with("farfield_gate_pool_bytes")), "no server, no pool: {text:?}");
        let round = GateRound { pool_bytes: Some(90), stored_bytes: Some(80), ..GateRound::default() };
        count_round(&counts, &round, Instant::now());
        assert!(lines(&counts).iter().any(|line| line == "farfield_gate_stored_bytes 80"));
    }
}
