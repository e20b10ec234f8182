//! `GET /metrics` for Prometheus, over as much HTTP as that takes.

use crate::counters::Counters;
use crate::server::Shared;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::Kind;
use farfield_os::net;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Longest request that is read; a scrape has a few hundred bytes.
const REQUEST_BYTES_MAX: usize = 8 * 1024;
/// One scraper is served at a time, so none may take long.
const WITHIN: Duration = Duration::from_secs(2);

/// Answers until the server stops.
pub(crate) fn serve(shared: &Arc<Shared>, listener: &TcpListener) {
    /// Who stops the server wakes this thread; so rarely it looks by itself.
    const LOOK_AGAIN: Duration = Duration::from_secs(1);
    const AFTER_FAILURE: Duration = Duration::from_millis(50);
    if let Err(error) = listener.set_nonblocking(true) {
        tracing::error!(%error, "no metrics");
        return;
    }
    let mut registry = Registry::with_prefix("farfield");
    registry.register_collector(Box::new(Snapshot(shared.clone())));
    while !shared.stopping() {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(stream, &registry) {
                    tracing::debug!(%error, "a scrape failed");
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let _ = net::poll(listener.as_raw_fd(), libc::POLLIN, LOOK_AGAIN);
            }
            Err(_) if shared.stopping() => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a scrape");
                std::thread::sleep(AFTER_FAILURE);
            }
        }
    }
}

fn answer(mut stream: TcpStream, registry: &Registry) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WITHIN))?;
    let request = read_request(&mut stream)?;
    let (status, body) = match route(&request) {
        Route::Metrics => {
            let mut text = String::new();
            encode(&mut text, registry).map_err(std::io::Error::other)?;
            ("200 OK", text)
        }
        Route::NotFound => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        Route::NotAllowed => ("405 Method Not Allowed", "only GET\n".to_owned()),
        Route::Bad => ("400 Bad Request", "this is not HTTP\n".to_owned()),
    };
    let kind = match status {
        "200 OK" => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        _ => "text/plain; charset=utf-8",
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )?;
    stream.flush()
}

/// Reads up to the empty line that ends the head of a request.
fn read_request(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let until = Instant::now() + WITHIN;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while request.len() < REQUEST_BYTES_MAX && !request.windows(4).any(|four| four == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            count => request.extend_from_slice(&piece[..count]),
        }
    }
    Ok(request)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Route {
    Metrics,
    NotFound,
    NotAllowed,
    Bad,
}

fn route(request: &[u8]) -> Route {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or(&[]);
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Route::Bad;
    };
    if !version.starts_with(b"HTTP/1.") {
        return Route::Bad;
    }
    let path = target.split(|byte| *byte == b'?').next().unwrap_or(&[]);
    match (method, path) {
        (b"GET", b"/metrics") => Route::Metrics,
        (b"GET", _) => Route::NotFound,
        _ => Route::NotAllowed,
    }
}

/// Everything as it is when asked.
#[derive(Debug)]
struct Snapshot(Arc<Shared>);

impl Collector for Snapshot {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let shared = &*self.0;
        let stat = shared.stat();
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        for (name, help, value) in [
            ("capacity", "Most bytes that the server keeps (0: no limit)", bytes(stat.capacity_pages)),
            ("used", "Bytes of pages that the server keeps", bytes(stat.used_pages)),
            ("reserved", "Bytes set aside for clients that write by themselves", bytes(stat.reserved_pages)),
        ] {
            gauge(&mut out, name, help, Some(&Unit::Bytes), value)?;
        }
        for (name, help, value) in [
            ("regions", "Regions", stat.regions),
            ("sessions", "Sessions, also those on lease", stat.sessions),
            ("connections", "Connections", stat.connections),
        ] {
            gauge(&mut out, name, help, None, value)?;
        }
        gauge(&mut out, "uptime", "Time since the start", Some(&Unit::Seconds), stat.uptime_ms / 1000)?;
        let named = |tenant: &crate::sessions::Tenant| !tenant.name.is_empty();
        if shared.tenants.iter().any(|tenant| named(tenant)) {
            let help = "Bytes of pages that the server keeps for a tenant, with those set aside";
            let mut used = out.encode_descriptor("tenant_used", help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for tenant in shared.tenants.iter().filter(|tenant| named(tenant)) {
                let value = bytes(tenant.quota.used_pages());
                used.encode_family(&[("tenant", tenant.name.as_str())])?.encode_gauge(&(value as i64))?;
            }
        }
        let counters = &shared.counters;
        let counted: [(&str, &str, &AtomicU64); 14] = [
            ("read_pages", "Pages that readers were given", &counters.read_pages),
            ("absent_pages", "Pages asked for that were never written, or discarded", &counters.absent_pages),
            ("written_pages", "Pages stored", &counters.written_pages),
            ("discarded_pages", "Pages forgotten", &counters.discarded_pages),
            ("received_bytes", "Bytes that arrived", &counters.received_bytes),
            ("sent_bytes", "Bytes that were sent", &counters.sent_bytes),
            ("failed_requests", "Requests answered with an error", &counters.failed_requests),
            ("full_requests", "Requests refused because capacity or quota is used up", &counters.full_requests),
            ("corrupt_requests", "Requests that met a page unlike its checksum", &counters.corrupt_requests),
            ("late_requests", "Requests whose deadline had passed", &counters.late_requests),
            ("refused_connections", "Connections that were refused", &counters.refused_connections),
            ("broken_connections", "Connections whose bytes were no conversation", &counters.broken_connections),
            ("expired_sessions", "Sessions whose lease ran out", &counters.expired_sessions),
            ("sleeps", "Times that a connection went to sleep", &counters.sleeps),
        ];
        for (name, help, counter) in counted {
            let mut encoder = out.encode_descriptor(name, help, None, MetricType::Counter)?;
            encoder.encode_counter::<NoLabelSet, _, u64>(&Counters::get(counter), None)?;
        }
        let mut requests = out.encode_descriptor("requests", "Requests by kind", None, MetricType::Counter)?;
        for kind in Kind::ALL {
            let count = Counters::get(&counters.requests[kind as usize]);
            requests.encode_family(&[("kind", kind_name(kind))])?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        Ok(())
    }
}

fn gauge(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: u64,
) -> Result<(), std::fmt::Error> {
    out.encode_descriptor(name, help, unit, MetricType::Gauge)?.encode_gauge(&(value as i64))
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Hello => "hello",
        Kind::CreateRegion => "create_region",
        Kind::DropRegion => "drop_region",
        Kind::Read => "read",
        Kind::ReadPart => "read_part",
        Kind::Write => "write",
        Kind::Discard => "discard",
        Kind::CloneRegion => "clone_region",
        Kind::ClaimRegion => "claim_region",
        Kind::Stat => "stat",
        Kind::Ping => "ping",
        Kind::MapRegion => "map_region",
        Kind::Reserve => "reserve",
        Kind::Release => "release",
        Kind::Bye => "bye",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_get_of_metrics_is_answered_with_metrics() {
        let check = |request: &[u8], expected| assert_eq!(route(request), expected, "{:?}", request.escape_ascii());
        check(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Route::Metrics);
        check(b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", Route::Metrics);
        check(b"GET / HTTP/1.1\r\n\r\n", Route::NotFound);
        check(b"GET /metricsx HTTP/1.1\r\n\r\n", Route::NotFound);
        check(b"POST /metrics HTTP/1.1\r\n\r\n", Route::NotAllowed);
        check(b"", Route::Bad);
        check(b"GET /metrics", Route::Bad);
        check(b"GET /metrics HTTP/2\r\n", Route::Bad);
        check(b"\xff\x00\r\n\r\n", Route::Bad);
    }
}
