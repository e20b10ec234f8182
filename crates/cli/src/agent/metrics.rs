//! Metrics of an agent for Prometheus.

use anyhow::Context;
use farfield_pager::runner::{AgentStatus, AgentStatusRow};
use farfield_server::answer_scrapes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt::Error;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

/// State of the agent, as the thread that serves metrics sees it.
pub(super) type SharedStatus = Arc<Mutex<AgentStatus>>;

/// Serves the metrics in a thread that lives as long as the process. Returns the address, whose
/// port the kernel has chosen if it was 0.
pub(super) fn serve(address: SocketAddr, status: SharedStatus) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
    let bound = listener.local_addr()?;
    let mut registry = Registry::with_prefix("farfield_agent");
    registry.register_collector(Box::new(StatusCollector(status)));
    std::thread::spawn(move || {
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).map(|()| text)
        };
        answer_scrapes(&listener, || false, text)
    });
    Ok(bound)
}

#[derive(Debug)]
struct StatusCollector(SharedStatus);

impl Collector for StatusCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), Error> {
        let status = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waiting = status.jobs.iter().filter(|job| !job.is_running).count() as u64;
        let over = status.jobs.iter().filter(|job| job.is_running && !job.is_kept).count() as u64;
        let gauges = [
            ("near", Some(&Unit::Bytes), "Near memory that is divided", Some(status.near_bytes)),
            ("held", Some(&Unit::Bytes), "Near memory that jobs hold", Some(status.held_bytes)),
            ("overflow", Some(&Unit::Bytes), "Memory that jobs asked for beyond it", Some(status.overflow_bytes)),
            ("far", Some(&Unit::Bytes), "Most that jobs may ask for beyond it", status.far_bytes),
            ("running_jobs", None, "Jobs that run", Some(status.jobs.len() as u64 - waiting)),
            ("waiting_jobs", None, "Jobs that wait for near memory", Some(waiting)),
            ("over_jobs", None, "Jobs that have more near than they were told", Some(over)),
        ];
        for (name, unit, help, value) in gauges {
            if let Some(value) = value {
                ConstGauge::new(value).encode(out.encode_descriptor(name, help, unit, MetricType::Gauge)?)?;
            }
        }
        type Bytes = fn(&AgentStatusRow) -> u64;
        let sizes: [(&str, Bytes, &str); 5] = [
            ("job_memory", |job| job.memory_bytes, "Memory that the job asked for"),
            ("job_least", |job| job.least_bytes, "Least near memory that it runs with"),
            ("job_target", |job| job.target_bytes, "Near budget that it shall have"),
            ("job_offered", |job| job.offered_bytes, "Near budget that it was told"),
            ("job_near", |job| job.measured_bytes, "Near memory that it has, measured from outside"),
        ];
        for (name, bytes, help) in sizes {
            if status.jobs.is_empty() {
                break;
            }
            let mut family = out.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for job in &status.jobs {
                let labels = [("runner", job.runner_pid.to_string())];
                family.encode_family(&labels)?.encode_gauge(&bytes(job))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Danger: metrics that Prometheus cannot read.
    use super::*;

    #[test]
    fn every_job_is_in_the_metrics() {
        let job = AgentStatusRow { runner_pid: 7, is_running: true, offered_bytes: 5, ..AgentStatusRow::default() };
        let status = AgentStatus { near_bytes: 9, jobs: vec![job], ..AgentStatus::default() };
        let mut registry = Registry::with_prefix("farfield_agent");
        registry.register_collector(Box::new(StatusCollector(Arc::new(Mutex::new(status)))));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "farfield_agent_near_bytes 9",
            "farfield_agent_over_jobs 1",
            "farfield_agent_job_offered_bytes{runner=\"7\"} 5",
        ] {
            assert!(text.lines().any(|this| this == line), "{line}: {text}");
        }
        assert!(!text.contains("farfield_agent_far_bytes"), "no bound, no metric: {text}");
    }
}
