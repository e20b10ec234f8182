//! A memory server and its tenants, read from its metrics (OpenMetrics text).

use super::super::{ServerRow, TenantRow, TopSnapshot, per_second, printable};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Instant;

/// Numbers of a server: name of the metric, and name in the rows of `farfield top --json`.
const NUMBERS: [(&str, &str); 8] = [
    ("farfield_capacity_bytes", "capacity_bytes"),
    ("farfield_used_bytes", "used_bytes"),
    ("farfield_reserved_bytes", "reserved_bytes"),
    ("farfield_regions", "regions"),
    ("farfield_sessions", "sessions"),
    ("farfield_connections", "connections"),
    ("farfield_read_pages_total", "read_pages"),
    ("farfield_written_pages_total", "written_pages"),
];

/// Reader of one server's metrics, which remembers the last reading for rates.
#[derive(Debug)]
pub(super) struct ServerMetricsReader {
    host: String,
    before: Option<(Instant, ServerRow)>,
}

impl ServerMetricsReader {
    pub(super) fn new(host: &str) -> ServerMetricsReader {
        ServerMetricsReader { host: host.to_owned(), before: None }
    }

    /// Makes a snapshot of the metrics. What is no metric of a server is passed over.
    pub(super) fn read(&mut self, text: &str) -> TopSnapshot {
        let mut server = ServerRow { url: self.host.clone(), ..ServerRow::default() };
        let mut tenants = BTreeMap::<String, TenantRow>::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<u64>() else { continue };
            if let Some((_, name)) = NUMBERS.iter().find(|(metric, _)| *metric == series) {
                server.numbers.insert(Cow::Borrowed(name), value);
            }
            let Some((metric, name)) = tenant_of(series) else { continue };
            let tenant = tenants.entry(name).or_default();
            match metric {
                "farfield_tenant_used_bytes" => tenant.used_bytes = value,
                "farfield_tenant_quota_bytes" => tenant.quota_bytes = Some(value),
                _ => {}
            }
        }
        self.add_rates(&mut server);
        let named = tenants.into_iter().map(|(name, row)| TenantRow { server: self.host.clone(), name, ..row });
        let tenants = named.collect();
        TopSnapshot { machine: self.host.clone(), servers: vec![server], tenants, ..TopSnapshot::default() }
    }

    /// Computes rates since the last reading. A server that was started again begins with none.
    fn add_rates(&mut self, server: &mut ServerRow) {
        let now = Instant::now();
        if let Some((at, before)) = &self.before {
            let rate = |name: &str| {
                let count = |row: &ServerRow| row.numbers.get(name).copied().unwrap_or(0);
                per_second(count(server).saturating_sub(count(before)), now - *at)
            };
            (server.read_pages_per_s, server.written_pages_per_s) = (rate("read_pages"), rate("written_pages"));
        }
        self.before = Some((now, server.clone()));
    }
}

/// Returns the metric and the name of the tenant of a series like `farfield_tenant_used_bytes{tenant="alice"}`.
fn tenant_of(series: &str) -> Option<(&str, String)> {
    let (metric, name) = series.strip_suffix("\"}")?.split_once("{tenant=\"")?;
    let name = name.replace("\\n", "\n").replace("\\\"", "\"").replace("\\\\", "\\");
    Some((metric, printable(&name)))
}

#[cfg(test)]
mod tests {
    //! Guards against figures of the wrong tenant, and against text that is no metric.
    use super::*;

    #[test]
    fn a_server_and_its_tenants_are_read_and_nonsense_is_passed_over() {
        let text = "# HELP farfield_used_bytes Bytes\nfarfield_used_bytes 4096\nfarfield_capacity_bytes 8192\n\
                    farfield_tenant_used_bytes{tenant=\"alice\"} 4096\nfarfield_tenant_used_bytes{tenant=\"<b>\"} 0\n\
                    farfield_tenant_quota_bytes{tenant=\"alice\"} 8192\nfarfield_read_pages_total 7\n\
                    farfield_used_bytes_x 1\nrubbish\nfarfield_sessions -1\n# EOF\n";
        let mut reader = ServerMetricsReader::new("big:7402");
        let all = reader.read(text);
        assert_eq!((all.machine.as_str(), all.servers[0].url.as_str()), ("big:7402", "big:7402"));
        let number = |name: &str| all.servers[0].numbers.get(name).copied();
        assert_eq!(
            (number("used_bytes"), number("capacity_bytes"), number("sessions")),
            (Some(4096), Some(8192), None)
        );
        let tenants: Vec<_> =
            all.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant.used_bytes, tenant.quota_bytes)).collect();
        assert_eq!(tenants, [("<b>", 0, None), ("alice", 4096, Some(8192))]);
        let later = reader.read("farfield_read_pages_total 1000007\n");
        assert!(later.servers[0].read_pages_per_s > 1000.0, "{later:?}");
    }
}
