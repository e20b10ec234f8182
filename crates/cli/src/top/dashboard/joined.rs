//! Other machines, by what their dashboards answer, and memory servers, by their metrics.

use super::openmetrics::ServerMetricsReader;
use super::pace::StepInterval;
use super::{Dashboard, TopSnapshot, lock};
use anyhow::{Context, bail, ensure};
use farfield_web::{ApiClient, StatusCode};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Interval between two questions to another dashboard, while somebody looks.
const ASK: StepInterval = StepInterval { least: Duration::from_secs(2), share: 20 };
/// Longest time that an answer may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Most bytes of an answer: some 5,000 jobs.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// What proves to joined dashboards over TLS who asks, and to this one that they are who they say.
#[derive(Clone, Default)]
pub(super) struct JoinCredentials {
    /// Authorities that vouch for them.
    pub(super) authorities: Option<PathBuf>,
    /// Token of those who may read them.
    pub(super) token: Option<String>,
}

/// Something at a URL that tells what happens elsewhere: another dashboard, by its JSON, or a memory
/// server, by its metrics.
#[derive(Debug)]
pub(super) struct JoinedSource {
    client: ApiClient,
    token: Option<String>,
    /// Reader of the metrics of a memory server; `None` for a dashboard.
    reader: Option<ServerMetricsReader>,
}

impl JoinedSource {
    /// Parses `http://HOST:PORT` or `https://HOST:PORT` of a dashboard, or such a URL with `/metrics` of a server.
    pub(super) fn parse(url: &str, credentials: &JoinCredentials) -> anyhow::Result<JoinedSource> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let rest = rest.trim_end_matches('/');
        let (host, is_server) = rest.strip_suffix("/metrics").map_or((rest, false), |host| (host, true));
        let is_encrypted = scheme == "https";
        if !is_encrypted && scheme != "http" || host.is_empty() || host.contains(['/', '?', '#', '@', ' ']) {
            bail!(
                "--join {url}: write http://HOST:PORT of a dashboard, or http://HOST:PORT/metrics of a memory server; \
                 another machine's dashboard is reached at https://, or by `ssh -N -L 7405:127.0.0.1:7404 MACHINE` and \
                 http://127.0.0.1:7405"
            );
        }
        let authorities = credentials.authorities.as_deref().filter(|_| is_encrypted);
        ensure!(!is_encrypted || authorities.is_some(), "--join {url}: say with --join-ca FILE who vouches for it");
        let client = ApiClient::new(&format!("{scheme}://{host}"), authorities).context("--join-ca")?;
        // In clear, everybody on the way could read the token.
        let token = credentials.token.clone().filter(|_| is_encrypted);
        Ok(JoinedSource { client, token, reader: is_server.then(|| ServerMetricsReader::new(host)) })
    }

    fn path(&self) -> &'static str {
        if self.reader.is_some() { "/metrics" } else { "/api/top" }
    }

    fn read(&mut self) -> Result<TopSnapshot, String> {
        let answer = self.client.get(self.path(), self.token.as_deref(), ANSWER_WITHIN, ANSWER_BYTES_MAX);
        let answer = answer.map_err(|error| error.to_string())?;
        match (answer.status, &mut self.reader) {
            (StatusCode::OK, Some(reader)) => Ok(reader.read(&String::from_utf8_lossy(&answer.body))),
            (StatusCode::OK, None) => serde_json::from_slice(&answer.body)
                .map_err(|error| format!("its answer is not that of this version's dashboard: {error}")),
            (StatusCode::UNAUTHORIZED, _) => Err("it wants another token: --join-token FILE".to_owned()),
            (status, _) => Err(format!("it answers {status}")),
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
        let parse = |url: &str| JoinedSource::parse(url, &JoinCredentials::default());
        let check = |url: &str, expected: &str| {
            assert_eq!(parse(url).unwrap().path(), expected);
        };
        check("http://127.0.0.1:7405", "/api/top");
        check("http://[::1]:7405/", "/api/top");
        check("http://big:7402/metrics", "/metrics");
        for url in ["127.0.0.1:7405", "http://", "http:///metrics", "http://a/b", "http://user@a", "ftp://a"] {
            assert!(parse(url).unwrap_err().to_string().contains("ssh"), "{url}");
        }
        assert!(parse("https://x").unwrap_err().to_string().contains("--join-ca"));
    }

    #[test]
    fn no_token_is_sent_in_clear() {
        let credentials = JoinCredentials { authorities: None, token: Some("0123456789abcdef".into()) };
        assert_eq!(JoinedSource::parse("http://big:7404", &credentials).unwrap().token, None);
    }
}
