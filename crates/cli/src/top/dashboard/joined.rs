//! Other machines, by what their dashboards answer, and memory servers, by their metrics.

use super::openmetrics::ServerMetricsReader;
use super::pace::StepInterval;
use super::{Dashboard, TopSnapshot, lock};
use anyhow::bail;
use std::time::{Duration, Instant};

/// Interval between two questions to another dashboard, while somebody looks.
const ASK: StepInterval = StepInterval { least: Duration::from_secs(2), share: 20 };
/// Longest time that an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Most bytes of an answer: some 5,000 jobs.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Something at a URL that tells what happens elsewhere.
#[derive(Debug)]
pub(super) enum JoinedSource {
    /// JSON of another dashboard.
    Dashboard { url: String },
    /// Metrics of a memory server.
    Server { url: String, reader: ServerMetricsReader },
}

impl JoinedSource {
    /// Parses `http://HOST:PORT` of a dashboard, or `http://HOST:PORT/metrics` of a server.
    pub(super) fn parse(url: &str) -> anyhow::Result<JoinedSource> {
        let rest = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let (host, is_server) = match rest.map(|rest| (rest.strip_suffix("/metrics"), rest)) {
            Some((Some(host), _)) => (host, true),
            Some((None, host)) => (host, false),
            None => ("", false),
        };
        if host.is_empty() || host.contains(['/', '?', '#', '@', ' ']) {
            bail!(
                "--join {url}: write http://HOST:PORT of a dashboard, or http://HOST:PORT/metrics of a memory server; \
                 another machine's dashboard is reached by `ssh -N -L 7405:127.0.0.1:7404 MACHINE` and \
                 http://127.0.0.1:7405"
            );
        }
        Ok(match is_server {
            true => {
                JoinedSource::Server { url: format!("http://{host}/metrics"), reader: ServerMetricsReader::new(host) }
            }
            false => JoinedSource::Dashboard { url: format!("http://{host}/api/top") },
        })
    }

    fn read(&mut self) -> Result<TopSnapshot, String> {
        let (JoinedSource::Dashboard { url } | JoinedSource::Server { url, .. }) = self;
        let bytes = farfield_web::fetch(url, ANSWER_WITHIN, ANSWER_BYTES_MAX).map_err(|error| error.to_string())?;
        match self {
            JoinedSource::Server { reader, .. } => Ok(reader.read(&String::from_utf8_lossy(&bytes))),
            JoinedSource::Dashboard { .. } => serde_json::from_slice(&bytes)
                .map_err(|error| format!("its answer is not that of this version's dashboard: {error}")),
        }
    }
}

/// Reads a source until the process ends.
pub(super) fn read_for_ever(dashboard: &Dashboard, index: usize, mut source: JoinedSource) {
    loop {
        let start = Instant::now();
        let snapshot = source.read();
        if let Some(machine) = lock(&dashboard.machines).get_mut(index) {
            machine.set(snapshot);
        }
        let wait = ASK.after(start.elapsed());
        std::thread::sleep(if dashboard.has_readers() { wait } else { wait.max(super::LOOK_ALONE) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dashboards_and_servers_are_joined() {
        let check = |url: &str, expected: &str| {
            let (JoinedSource::Dashboard { url } | JoinedSource::Server { url, .. }) =
                JoinedSource::parse(url).unwrap();
            assert_eq!(url, expected);
        };
        check("http://127.0.0.1:7405", "http://127.0.0.1:7405/api/top");
        check("http://[::1]:7405/", "http://[::1]:7405/api/top");
        check("http://big:7402/metrics", "http://big:7402/metrics");
        for url in
            ["https://x", "127.0.0.1:7405", "http://", "http:///metrics", "http://a/b", "http://user@a", "ftp://a"]
        {
            assert!(JoinedSource::parse(url).unwrap_err().to_string().contains("ssh"), "{url}");
        }
    }
}
