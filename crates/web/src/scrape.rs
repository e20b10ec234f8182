//! Answers `GET /metrics` for Prometheus.

use crate::{HttpLimits, Method, StatusCode, WebRequest, WebResponse, bytes, serve, text};
use std::net::TcpListener;
use std::time::Duration;

/// Limits of a server of metrics. Each connection has one request, so the thread that serves them
/// ends soon after it is told to.
const LIMITS: HttpLimits = HttpLimits {
    connections: 8,
    event_streams: 0,
    head_bytes: 8 * 1024,
    body_bytes: 0,
    request_within: Duration::from_secs(2),
    response_within: Duration::from_secs(2),
    idle_within: Duration::ZERO,
};

/// Answers scrapes with the text that `encode` returns (OpenMetrics), until `is_over` returns true.
/// It is checked once a second, and whenever a client connects. Blocks the calling thread until
/// then.
pub fn answer_scrapes(
    listener: &TcpListener,
    is_over: impl Fn() -> bool + Sync,
    encode: impl Fn() -> Result<String, std::fmt::Error> + Sync,
) -> std::io::Result<()> {
    serve(listener, &LIMITS, is_over, |request| route(request, &encode))
}

fn route(request: &WebRequest, encode: impl Fn() -> Result<String, std::fmt::Error>) -> WebResponse {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => metrics(encode()),
        (&Method::GET, _) => text(StatusCode::NOT_FOUND, "the metrics are at /metrics"),
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "only GET"),
    }
}

/// Makes a response of metrics.
pub fn metrics(encoded: Result<String, std::fmt::Error>) -> WebResponse {
    match encoded {
        Ok(text) => {
            bytes(StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text.into_bytes())
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}
