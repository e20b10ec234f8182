//! Metrics for Prometheus: how the command encodes and serves them.

use anyhow::Context;
use farfield_web::answer_scrapes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt::Error;
use std::net::{SocketAddr, TcpListener};

/// Server of what a collector collects, which is asked for it at each scrape.
pub(crate) struct MetricServer {
    listener: TcpListener,
    source: MetricSource,
}

impl MetricServer {
    /// Listens at `address`. Names of metrics begin with `prefix`.
    pub(crate) fn bind(address: SocketAddr, prefix: &str, collector: Box<dyn Collector>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
        Ok(MetricServer { listener, source: MetricSource::new(prefix, collector) })
    }

    /// Returns the URL of the metrics, whose port the kernel has chosen if it was 0.
    pub(crate) fn url(&self) -> std::io::Result<String> {
        Ok(format!("http://{}/metrics", self.listener.local_addr()?))
    }

    /// Answers scrapes until the process ends.
    pub(crate) fn serve(&self) -> std::io::Result<()> {
        answer_scrapes(&self.listener, || false, || self.source.text())
    }
}

/// Text of what a collector collects.
pub(crate) struct MetricSource(Registry);

impl MetricSource {
    /// Names of metrics begin with `prefix`.
    pub(crate) fn new(prefix: &str, collector: Box<dyn Collector>) -> MetricSource {
        let mut registry = Registry::with_prefix(prefix);
        registry.register_collector(collector);
        MetricSource(registry)
    }

    /// Returns the metrics as they are now.
    pub(crate) fn text(&self) -> Result<String, Error> {
        let mut text = String::new();
        encode(&mut text, &self.0).map(|()| text)
    }
}

/// Name and value of a label.
pub(crate) type Label = (&'static str, String);

/// Kind of a metric.
#[derive(Clone, Copy)]
pub(crate) enum MetricKind {
    Gauge,
    Count,
}

/// Encodes one metric for all that have it. Writes nothing if `values` is empty. The suffix `_bytes` of a name
/// becomes the unit.
pub(crate) fn metric(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    kind: MetricKind,
    help: &str,
    values: impl Iterator<Item = (Vec<Label>, u64)>,
) -> Result<(), Error> {
    let (name, unit) = unit_of(name);
    let what = match kind {
        MetricKind::Gauge => MetricType::Gauge,
        MetricKind::Count => MetricType::Counter,
    };
    let mut family = None;
    for (labels, value) in values {
        if family.is_none() {
            family = Some(out.encode_descriptor(name, help, unit, what)?);
        }
        let Some(family) = &mut family else { unreachable!("just made") };
        let mut one = family.encode_family(&labels)?;
        match kind {
            MetricKind::Gauge => one.encode_gauge(&value)?,
            MetricKind::Count => count(one, value)?,
        }
    }
    Ok(())
}

/// Encodes a gauge that has no labels, with the same names as [`metric`].
pub(crate) fn gauge(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> Result<(), Error> {
    let (name, unit) = unit_of(name);
    out.encode_descriptor(name, help, unit, MetricType::Gauge)?.encode_gauge(&value)
}

/// Returns the name without its unit, and the unit.
fn unit_of(name: &str) -> (&str, Option<&'static Unit>) {
    name.strip_suffix("_bytes").map_or((name, None), |name| (name, Some(&Unit::Bytes)))
}

/// Encodes the value of a counter.
pub(crate) fn count<V>(mut one: MetricEncoder<'_>, value: V) -> Result<(), Error>
where
    V: prometheus_client::encoding::EncodeCounterValue + prometheus_client::encoding::EncodeExemplarValue,
{
    one.encode_counter::<NoLabelSet, V, u64>(&value, None)
}

/// Escapes a label's value as the format requires. The encoder does not do that.
pub(crate) fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
