//! `farfield top --otlp`: sends what `--metrics` would answer to a collector of OpenTelemetry, as OTLP
//! over HTTP (protobuf).
//!
//! Counters are sent as sums since their start (cumulative), so that a message that was lost loses
//! nothing: the next one has all of it. The messages are those of `opentelemetry/proto/metrics/v1` and
//! `collector/metrics/v1`, as far as they are used here.

use super::metrics::ScrapeCollector;
use crate::metrics::MetricSource;
use anyhow::Context;
use prost::Message;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// Longest time for one message and its answer.
const WITHIN: Duration = Duration::from_secs(10);
/// Longest answer in bytes that is read.
const ANSWER_BYTES_MAX: u64 = 64 << 10;
/// Path of metrics at a collector.
const PATH: &str = "/v1/metrics";
/// `AGGREGATION_TEMPORALITY_CUMULATIVE`.
const CUMULATIVE: i32 = 2;

/// Sends all metrics of jobs, heaps and nodes to the collector at `url`, at intervals of `every`, until
/// interrupted. Fails if the first message is not accepted; later failures are printed, once for each
/// cause, and the next message is sent as always.
pub(super) fn export(url: &str, every: Duration) -> anyhow::Result<()> {
    let url = endpoint(url)?;
    let source = MetricSource::new("farfield", Box::new(ScrapeCollector));
    send(&url, &source).with_context(|| format!("no collector takes metrics at {url}"))?;
    let mut failure = String::new();
    loop {
        std::thread::sleep(every);
        let now = send(&url, &source).err().map(|error| format!("{error:#}")).unwrap_or_default();
        if now != failure {
            crate::say(match now.as_str() {
                "" => "the collector takes metrics again",
                now => now,
            });
            failure = now;
        }
    }
}

/// Returns the URL to post to: one without a path means a collector as a whole.
fn endpoint(url: &str) -> anyhow::Result<String> {
    let host =
        url.strip_prefix("http://").context("--otlp takes http://HOST:PORT: the collector is one without TLS")?;
    Ok(match host.split_once('/') {
        None => format!("{url}{PATH}"),
        Some((_, "")) => format!("{}{PATH}", url.trim_end_matches('/')),
        Some(_) => url.to_owned(),
    })
}

fn send(url: &str, source: &MetricSource) -> anyhow::Result<()> {
    let text = source.text().context("the metrics cannot be read")?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let request = request(&text, now);
    let answer = farfield_web::post(url, "application/x-protobuf", &request.encode_to_vec(), WITHIN, ANSWER_BYTES_MAX)?;
    let answer = ExportResponse::decode(answer.as_slice()).context("the answer is none of a collector")?;
    if let Some(refused) = answer.partial_success.filter(|partial| partial.rejected_data_points > 0) {
        anyhow::bail!("the collector refuses {} numbers: {}", refused.rejected_data_points, refused.error_message);
    }
    Ok(())
}

/// Makes a message of OpenMetrics text with gauges and counters, as it is at `now` since 1970.
fn request(text: &str, now: Duration) -> ExportRequest {
    let time_unix_nano = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
    let mut metrics = BTreeMap::<&str, Metric>::new();
    for line in text.lines() {
        if let Some(described) = line.strip_prefix("# ") {
            let mut words = described.splitn(3, ' ');
            let (Some(what), Some(name), rest) = (words.next(), words.next(), words.next()) else { continue };
            let metric = metrics.entry(name).or_default();
            let rest = rest.unwrap_or_default();
            metric.name = name.to_owned();
            match (what, rest) {
                ("HELP", _) => metric.description = rest.to_owned(),
                ("UNIT", "bytes") => metric.unit = "By".to_owned(),
                ("UNIT", "seconds") => metric.unit = "s".to_owned(),
                ("TYPE", "counter") => {
                    let aggregation_temporality = CUMULATIVE;
                    let sum = SumData { data_points: Vec::new(), aggregation_temporality, is_monotonic: true };
                    metric.data = Some(Data::Sum(sum));
                }
                ("TYPE", _) => metric.data = Some(Data::Gauge(GaugeData::default())),
                _ => {}
            }
            continue;
        }
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let name = if metrics.contains_key(name) { name } else { name.trim_end_matches("_total") };
        let (Some(metric), Some(value)) = (metrics.get_mut(name), number(value)) else { continue };
        let point = NumberDataPoint { attributes: attributes(labels), time_unix_nano, value: Some(value) };
        match &mut metric.data {
            Some(Data::Gauge(GaugeData { data_points }) | Data::Sum(SumData { data_points, .. })) => {
                data_points.push(point)
            }
            None => {}
        }
    }
    let has_points = |metric: &Metric| match &metric.data {
        Some(Data::Gauge(GaugeData { data_points }) | Data::Sum(SumData { data_points, .. })) => {
            !data_points.is_empty()
        }
        None => false,
    };
    let metrics = metrics.into_values().filter(has_points).collect();
    let scope = InstrumentationScope { name: "farfield".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let attributes = vec![attribute("service.name", "farfield"), attribute("host.name", host.trim_end())];
    let scope_metrics = vec![ScopeMetrics { scope: Some(scope), metrics }];
    ExportRequest {
        resource_metrics: vec![ResourceMetrics { resource: Some(SourceResource { attributes }), scope_metrics }],
    }
}

fn number(text: &str) -> Option<PointValue> {
    let integer = text.parse::<i64>().ok().map(PointValue::AsInt);
    integer.or_else(|| text.parse::<f64>().ok().map(PointValue::AsDouble))
}

/// Reads labels, `name="value",…}`, in which quotes, backslashes and ends of lines are escaped.
fn attributes(mut labels: &str) -> Vec<KeyValue> {
    let mut found = Vec::new();
    while let Some((name, rest)) = labels.split_once("=\"") {
        let mut value = String::new();
        let mut letters = rest.char_indices();
        let end = loop {
            match letters.next() {
                Some((_, '\\')) => match letters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, letter)) => value.push(letter),
                    None => break rest.len(),
                },
                Some((at, '"')) => break at + 1,
                Some((_, letter)) => value.push(letter),
                None => break rest.len(),
            }
        };
        found.push(attribute(name.trim_start_matches(','), &value));
        labels = &rest[end..];
    }
    found
}

fn attribute(key: &str, value: &str) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { string_value: Some(value.to_owned()) }) }
}

#[derive(Clone, PartialEq, prost::Message)]
struct ExportRequest {
    #[prost(message, repeated, tag = "1")]
    resource_metrics: Vec<ResourceMetrics>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ResourceMetrics {
    #[prost(message, optional, tag = "1")]
    resource: Option<SourceResource>,
    #[prost(message, repeated, tag = "2")]
    scope_metrics: Vec<ScopeMetrics>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SourceResource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ScopeMetrics {
    #[prost(message, optional, tag = "1")]
    scope: Option<InstrumentationScope>,
    #[prost(message, repeated, tag = "2")]
    metrics: Vec<Metric>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct InstrumentationScope {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    version: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Metric {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    description: String,
    #[prost(string, tag = "3")]
    unit: String,
    #[prost(oneof = "Data", tags = "5, 7")]
    data: Option<Data>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Data {
    #[prost(message, tag = "5")]
    Gauge(GaugeData),
    #[prost(message, tag = "7")]
    Sum(SumData),
}

#[derive(Clone, PartialEq, prost::Message)]
struct GaugeData {
    #[prost(message, repeated, tag = "1")]
    data_points: Vec<NumberDataPoint>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SumData {
    #[prost(message, repeated, tag = "1")]
    data_points: Vec<NumberDataPoint>,
    #[prost(int32, tag = "2")]
    aggregation_temporality: i32,
    #[prost(bool, tag = "3")]
    is_monotonic: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NumberDataPoint {
    #[prost(fixed64, tag = "3")]
    time_unix_nano: u64,
    #[prost(oneof = "PointValue", tags = "4, 6")]
    value: Option<PointValue>,
    #[prost(message, repeated, tag = "7")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum PointValue {
    #[prost(double, tag = "4")]
    AsDouble(f64),
    #[prost(sfixed64, tag = "6")]
    AsInt(i64),
}

#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AnyValue {
    #[prost(string, optional, tag = "1")]
    string_value: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ExportResponse {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PartialSuccess {
    #[prost(int64, tag = "1")]
    rejected_data_points: i64,
    #[prost(string, tag = "2")]
    error_message: String,
}

#[cfg(test)]
mod tests {
    //! Danger: a collector takes the message and understands something else.
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const TEXT: &str = "# HELP farfield_job_near_bytes Near memory\n# TYPE farfield_job_near_bytes gauge\n\
                        # UNIT farfield_job_near_bytes bytes\nfarfield_job_near_bytes{job=\"7\",command=\"a \\\"b\\\",\\\\c\"} 4096\n\
                        farfield_job_near_bytes{job=\"8\",command=\"d\"} 0\n\
                        # HELP farfield_job_faults Faults\n# TYPE farfield_job_faults counter\nfarfield_job_faults_total{job=\"7\"} 5\n\
                        # HELP farfield_busy_seconds Time\n# TYPE farfield_busy_seconds counter\n\
                        # UNIT farfield_busy_seconds seconds\nfarfield_busy_seconds_total 0.25\n\
                        # HELP farfield_none Nothing\n# TYPE farfield_none gauge\nrubbish 1\n# EOF\n";

    #[test]
    fn gauges_and_counters_become_points_with_their_labels() {
        let request = request(TEXT, Duration::from_secs(3));
        let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
        let names: Vec<_> = metrics.iter().map(|metric| (metric.name.as_str(), metric.unit.as_str())).collect();
        let expected = [("farfield_busy_seconds", "s"), ("farfield_job_faults", ""), ("farfield_job_near_bytes", "By")];
        assert_eq!(names, expected, "one without numbers is left out");
        let point =
            |value, attributes| NumberDataPoint { time_unix_nano: 3_000_000_000, value: Some(value), attributes };
        let sum =
            |data_points| Some(Data::Sum(SumData { data_points, aggregation_temporality: 2, is_monotonic: true }));
        assert_eq!(metrics[0].data, sum(vec![point(PointValue::AsDouble(0.25), vec![])]));
        assert_eq!(metrics[1].data, sum(vec![point(PointValue::AsInt(5), vec![attribute("job", "7")])]));
        let labels = |job, command| vec![attribute("job", job), attribute("command", command)];
        let points = vec![
            point(PointValue::AsInt(4096), labels("7", "a \"b\",\\c")),
            point(PointValue::AsInt(0), labels("8", "d")),
        ];
        assert_eq!(metrics[2].data, Some(Data::Gauge(GaugeData { data_points: points })));
        assert_eq!(metrics[2].description, "Near memory");
    }

    #[test]
    fn bytes_are_those_of_the_protocol() {
        let point = NumberDataPoint {
            time_unix_nano: 1,
            value: Some(PointValue::AsInt(2)),
            attributes: vec![attribute("k", "v")],
        };
        let gauge = GaugeData { data_points: vec![point] };
        let metric = Metric { name: "m".into(), data: Some(Data::Gauge(gauge)), ..Metric::default() };
        let point =
            [&[0x19, 1, 0, 0, 0, 0, 0, 0, 0, 0x31, 2, 0, 0, 0, 0, 0, 0, 0][..], b"\x3a\x08\x0a\x01k\x12\x03\x0a\x01v"]
                .concat();
        let bytes = [b"\x0a\x01m\x2a\x1e\x0a\x1c", point.as_slice()].concat();
        assert_eq!(metric.encode_to_vec(), bytes);
    }

    #[test]
    fn urls_without_a_path_mean_a_whole_collector() {
        assert_eq!(endpoint("http://a:4318").unwrap(), "http://a:4318/v1/metrics");
        assert_eq!(endpoint("http://a:4318/").unwrap(), "http://a:4318/v1/metrics");
        assert_eq!(endpoint("http://a:4318/x/y").unwrap(), "http://a:4318/x/y");
        assert!(endpoint("https://a:4318").is_err() && endpoint("a:4318").is_err());
    }

    /// Answers one request with `status` and `body`, and returns what came.
    fn collect(listener: &TcpListener, status: &str, body: &[u8]) -> (String, Vec<u8>) {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(WITHIN)).unwrap();
        let (mut came, mut piece) = (Vec::new(), [0; 4096]);
        let (head, length) = loop {
            let len = stream.read(&mut piece).unwrap();
            assert!(len > 0, "the request ends early");
            came.extend_from_slice(&piece[..len]);
            let Some(end) = came.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let head = String::from_utf8_lossy(&came[..end + 4]).to_lowercase();
            let length =
                head.split_once("content-length: ").unwrap().1.lines().next().unwrap().parse::<usize>().unwrap();
            if came.len() >= end + 4 + length {
                break (head, length);
            }
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        stream.write_all(&[answer.as_bytes(), body].concat()).unwrap();
        (head, came.split_off(came.len() - length))
    }

    #[test]
    fn a_collector_gets_the_message_and_what_it_refuses_is_said() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = endpoint(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let collector = std::thread::spawn(move || {
            let refused = PartialSuccess { rejected_data_points: 3, error_message: "too old".into() };
            let refused = ExportResponse { partial_success: Some(refused) }.encode_to_vec();
            let got = collect(&listener, "200 OK", b"");
            collect(&listener, "200 OK", &refused);
            collect(&listener, "503 Service Unavailable", b"");
            got
        });
        let source = MetricSource::new("farfield", Box::new(ScrapeCollector));
        send(&url, &source).unwrap();
        let error = send(&url, &source).unwrap_err().to_string();
        assert_eq!(error, "the collector refuses 3 numbers: too old");
        assert!(send(&url, &source).unwrap_err().to_string().contains("503"));
        let (head, body) = collector.join().unwrap();
        assert!(
            head.starts_with("post /v1/metrics ") && head.contains("content-type: application/x-protobuf"),
            "{head}"
        );
        let request = ExportRequest::decode(body.as_slice()).unwrap();
        let resource = request.resource_metrics[0].resource.as_ref().unwrap();
        assert!(resource.attributes.contains(&attribute("service.name", "farfield")));
    }
}
