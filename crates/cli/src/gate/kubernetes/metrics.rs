//! Metrics of a gate of Kubernetes for Prometheus.

use super::super::metrics::{PREFIX, by_name, seconds};
use super::{KubernetesGate, now_s};
use crate::metrics::MetricKind::Gauge;
use crate::metrics::{MetricServer, count, gauge, metric};
use farfield_cluster::gate::{BookChange, GateConfig, GateEvent, Scheduler, SchedulerJob, SchedulerState};
use farfield_core::policy::cluster::GateWait;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of a gate since it was started.
#[derive(Debug, Default)]
pub(super) struct PodCounts {
    pub(super) changed: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) bound: AtomicU64,
    pub(super) not_bound: AtomicU64,
}

/// Serves the metrics in a thread that lives as long as the process. Returns their URL.
pub(super) fn serve(address: SocketAddr, gate: &Arc<KubernetesGate>) -> anyhow::Result<String> {
    let server = MetricServer::bind(address, PREFIX, Box::new(PodCollector(gate.clone())))?;
    let url = server.url()?;
    std::thread::spawn(move || server.serve());
    Ok(url)
}

struct PodCollector(Arc<KubernetesGate>);

impl std::fmt::Debug for PodCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PodCollector")
    }
}

/// Books of a gate as a scheduler that is only read.
struct BooksReader<'a>(&'a KubernetesGate);

impl Scheduler for BooksReader<'_> {
    type Error = Infallible;

    fn read(&mut self, now_s: u64) -> Result<SchedulerState, Infallible> {
        Ok(self.0.books().state(self.0.pool_bytes, now_s))
    }

    fn apply(&mut self, _job: &SchedulerJob, _change: &BookChange<'_>) -> Result<(), Infallible> {
        Ok(())
    }
}

impl Collector for PodCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), Error> {
        let gate = &*self.0;
        let totals = [
            ("changed_pods", &gate.counts.changed, "Pods that were given far memory"),
            ("refused_pods", &gate.counts.refused, "Pods that were refused, because they ask for nonsense"),
            ("bound_pods", &gate.counts.bound, "Pods that were bound"),
            ("refused_bindings", &gate.counts.not_bound, "Bindings that the gate or the API server refused"),
        ];
        for (name, total, help) in totals {
            let total = total.load(Ordering::Relaxed);
            count(out.encode_descriptor(name, help, None, MetricType::Counter)?, total)?;
        }
        if let Some(age) = gate.age() {
            seconds(&mut out, "last_success_age", "Time since the last news of pods or nodes", age)?;
        }
        let overtake_within_s = gate.overtake_within_s;
        let config = GateConfig { start_within_s: u64::MAX, overtake_within_s, is_dry_run: true };
        let rules = gate.rules();
        let Ok(round) = config.round(&mut BooksReader(gate), rules.pool_bytes.map(|_| rules.servers), now_s());
        let (mut waiting, mut ignored) = (BTreeMap::new(), 0u64);
        for event in &round.events {
            match event {
                GateEvent::Waits { reason, .. } => *waiting.entry(reason.name()).or_default() += 1,
                // The scheduler has not asked about it yet.
                GateEvent::Admitted { .. } => *waiting.entry(GateWait::Starting.name()).or_default() += 1,
                GateEvent::Ignored { .. } => ignored += 1,
                GateEvent::Charged { .. } | GateEvent::Withdrawn { .. } | GateEvent::Refused { .. } => {}
            }
        }
        let now = [
            ("running_jobs", Some(round.running as u64), "Pods with far memory that have a node"),
            ("ignored_jobs", Some(ignored), "Pods that are left alone, because they are not understood"),
            ("reserved_bindings", Some(gate.books().reserved() as u64), "Bindings on their way"),
            ("pool_bytes", round.pool_bytes, "Size of the pool; absent while no memory server answers"),
            ("charged_bytes", Some(round.charged_bytes), "Part of the pool that is promised to pods"),
        ];
        for (name, value, help) in now {
            value.map_or(Ok(()), |value| gauge(&mut out, name, help, value))?;
        }
        let waiting = by_name("reason", &GateWait::NAMES, &waiting);
        metric(
            &mut out,
            "waiting_jobs",
            Gauge,
            "Pods with far memory that have no node, by what they wait for",
            waiting,
        )
    }
}
