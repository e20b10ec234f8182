//! Metrics of an agent for Prometheus.

use crate::metrics::MetricKind::Gauge;
use crate::metrics::{MetricServer, gauge, metric};
use farfield_pager::runner::{AgentStatus, AgentStatusRow};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::fmt::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// State of the agent, as the thread that serves metrics sees it.
pub(super) type SharedStatus = Arc<Mutex<AgentStatus>>;

/// Serves the metrics in a thread that lives as long as the process. Returns their URL.
pub(super) fn serve(address: SocketAddr, status: SharedStatus) -> anyhow::Result<String> {
    let server = MetricServer::bind(address, PREFIX, Box::new(StatusCollector(status)))?;
    let url = server.url()?;
    std::thread::spawn(move || server.serve());
    Ok(url)
}

const PREFIX: &str = "farfield_agent";

#[derive(Debug)]
struct StatusCollector(SharedStatus);

impl Collector for StatusCollector {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), Error> {
        let status = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let waiting = status.jobs.iter().filter(|job| !job.is_running).count() as u64;
        let over = status.jobs.iter().filter(|job| job.is_running && !job.is_kept).count() as u64;
        let of_agent = [
            ("near_bytes", Some(status.near_bytes), "Near memory that is divided"),
            ("held_bytes", Some(status.held_bytes), "Near memory that jobs hold"),
            ("overflow_bytes", Some(status.overflow_bytes), "Memory that jobs asked for beyond it"),
            ("far_bytes", status.far_bytes, "Most that jobs may ask for beyond it"),
            (
                "withheld_bytes",
                Some(status.withheld_bytes),
                "Near memory that is not divided: the node is short of memory",
            ),
            ("servers_room_bytes", status.servers_room_bytes, "Memory for which the memory servers have room"),
            (
                "servers_silent",
                Some(u64::from(status.is_server_silent)),
                "1 while a memory server does not answer, so that no job starts",
            ),
            ("running_jobs", Some(status.jobs.len() as u64 - waiting), "Jobs that run"),
            ("waiting_jobs", Some(waiting), "Jobs that wait for near memory"),
            ("over_jobs", Some(over), "Jobs that have more near than they were told"),
        ];
        for (name, value, help) in of_agent {
            value.map_or(Ok(()), |value| gauge(&mut out, name, help, value))?;
        }
        let mut slowdowns = status.jobs.iter().filter_map(|job| Some((job.runner_pid, job.slowdown?))).peekable();
        if slowdowns.peek().is_some() {
            let help = "Slowdown of the job by far memory between the last two divisions";
            let mut family = out.encode_descriptor("job_slowdown", help, None, MetricType::Gauge)?;
            for (runner, slowdown) in slowdowns {
                family.encode_family(&[("runner", runner.to_string())])?.encode_gauge(&slowdown)?;
            }
        }
        type Bytes = fn(&AgentStatusRow) -> u64;
        let of_jobs: [(&str, Bytes, &str); 7] = [
            ("job_memory_bytes", |job| job.memory_bytes, "Memory that the job asked for"),
            ("job_least_bytes", |job| job.least_bytes, "Least near memory that it runs with"),
            ("job_target_bytes", |job| job.target_bytes, "Near budget that it shall have"),
            ("job_offered_bytes", |job| job.offered_bytes, "Near budget that it was told"),
            ("job_near_bytes", |job| job.measured_bytes, "Near memory that it has, measured from outside"),
            ("job_far_bytes", |job| job.far_bytes, "Memory of it that is stored far, as itself counts it"),
            ("job_corrections", |job| job.corrections, "Times that its budget was changed by others and changed back"),
        ];
        for (name, bytes, help) in of_jobs {
            let values = status.jobs.iter().map(|job| (vec![("runner", job.runner_pid.to_string())], bytes(job)));
            metric(&mut out, name, Gauge, help, values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Danger: metrics that Prometheus cannot read.
    use super::*;
    use crate::metrics::MetricSource;

    #[test]
    fn every_job_is_in_the_metrics() {
        let job = AgentStatusRow {
            runner_pid: 7,
            is_running: true,
            offered_bytes: 5,
            slowdown: Some(1.25),
            ..AgentStatusRow::default()
        };
        let status = AgentStatus { near_bytes: 9, jobs: vec![job], ..AgentStatus::default() };
        let source = MetricSource::new(PREFIX, Box::new(StatusCollector(Arc::new(Mutex::new(status)))));
        let text = source.text().unwrap();
        for line in [
            "farfield_agent_near_bytes 9",
            "farfield_agent_over_jobs 1",
            "farfield_agent_job_offered_bytes{runner=\"7\"} 5",
            "farfield_agent_job_slowdown{runner=\"7\"} 1.25",
        ] {
            assert!(text.lines().any(|this| this == line), "{line}: {text}");
        }
        assert!(!text.contains("farfield_agent_far_bytes"), "no bound, no metric: {text}");
    }
}
