//! Metrics of the server, for Prometheus.

use crate::counters::ServerCounters;
use crate::server::ServerState;
use crate::store::Resource;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::wire::MessageKind;
use farfield_web::answer_scrapes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Answers scrapes until the server stops, which wakes this thread.
pub(crate) fn serve(shared: &Arc<ServerState>, listener: &TcpListener) {
    let mut registry = Registry::with_prefix("farfield");
    registry.register_collector(Box::new(ServerMetrics(shared.clone())));
    let text = || {
        let mut text = String::new();
        encode(&mut text, &registry).map(|()| text)
    };
    if let Err(error) = answer_scrapes(listener, || shared.stopping(), text) {
        tracing::error!(%error, "no metrics");
    }
}

/// Collector that reads all metrics at the time of a scrape.
#[derive(Debug)]
struct ServerMetrics(Arc<ServerState>);

impl Collector for ServerMetrics {
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
        let help = "Bytes of page maps, checksums and the like";
        gauge(&mut out, "bookkeeping", help, Some(&Unit::Bytes), bytes(shared.capacity.bookkeeping_pages()))?;
        let mut held = out.encode_descriptor("held", "What clients hold of what all share", None, MetricType::Gauge)?;
        for resource in Resource::ALL {
            let value = i64::try_from(shared.budget.held(resource)).unwrap_or(i64::MAX);
            held.encode_family(&[("resource", resource.name())])?.encode_gauge(&value)?;
        }
        gauge(&mut out, "uptime", "Time since the start", Some(&Unit::Seconds), stat.uptime_ms / 1000)?;
        let named = shared.tenants.named();
        if !named.is_empty() {
            let help = "Bytes of pages that the server keeps for a tenant, with those set aside";
            let mut used = out.encode_descriptor("tenant_used", help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for tenant in &named {
                let value = bytes(tenant.quota.used_pages());
                used.encode_family(&[("tenant", tenant.name.as_str())])?.encode_gauge(&gauge_value(value))?;
            }
            let help = "Most bytes that a tenant may have, if it has a quota";
            let mut quota = out.encode_descriptor("tenant_quota", help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for tenant in &named {
                let Some(pages) = tenant.quota.limit_pages() else { continue };
                quota.encode_family(&[("tenant", tenant.name.as_str())])?.encode_gauge(&gauge_value(bytes(pages)))?;
            }
        }
        let counters = &shared.counters;
        let counted: [(&str, &str, &AtomicU64); 15] = [
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
            ("evicted_connections", "Connections that gave up their places unheard", &counters.evicted_connections),
            ("broken_connections", "Connections whose bytes were no conversation", &counters.broken_connections),
            ("expired_sessions", "Sessions whose lease ran out", &counters.expired_sessions),
            ("sleeps", "Times that a connection went to sleep", &counters.sleeps),
        ];
        for (name, help, counter) in counted {
            let mut encoder = out.encode_descriptor(name, help, None, MetricType::Counter)?;
            encoder.encode_counter::<NoLabelSet, _, u64>(&ServerCounters::get(counter), None)?;
        }
        let mut requests = out.encode_descriptor("requests", "Requests by kind", None, MetricType::Counter)?;
        for kind in MessageKind::ALL {
            let Some(count) = counters.requests.get(usize::from(kind as u8)).map(ServerCounters::get) else { continue };
            requests.encode_family(&[("kind", kind_name(kind))])?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        Ok(())
    }
}

/// Returns the value of a gauge, which OpenMetrics keeps with a sign.
fn gauge_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn gauge(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: u64,
) -> Result<(), std::fmt::Error> {
    out.encode_descriptor(name, help, unit, MetricType::Gauge)?.encode_gauge(&gauge_value(value))
}

fn kind_name(kind: MessageKind) -> &'static str {
    match kind {
        MessageKind::Hello => "hello",
        MessageKind::CreateRegion => "create_region",
        MessageKind::DropRegion => "drop_region",
        MessageKind::Read => "read",
        MessageKind::ReadPart => "read_part",
        MessageKind::Write => "write",
        MessageKind::Discard => "discard",
        MessageKind::CloneRegion => "clone_region",
        MessageKind::ClaimRegion => "claim_region",
        MessageKind::Stat => "stat",
        MessageKind::Ping => "ping",
        MessageKind::MapRegion => "map_region",
        MessageKind::Station => "station",
        MessageKind::Expose => "expose",
        MessageKind::Call => "call",
        MessageKind::Reserve => "reserve",
        MessageKind::Release => "release",
        MessageKind::Bye => "bye",
    }
}
