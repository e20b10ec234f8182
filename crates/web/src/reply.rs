//! Requests and responses, and the headers that every response has.

use crate::EventChannel;
use std::borrow::Cow;
use std::sync::Arc;
use ureq_proto::http::{Request, Response, StatusCode};

/// Request with its whole body.
pub type WebRequest = Request<Vec<u8>>;
/// Response with a body that is known, or a stream of events.
pub type WebResponse = Response<WebBody>;

/// Body of a response.
pub enum WebBody {
    /// Bytes that are sent at once.
    Bytes(Cow<'static, [u8]>),
    /// Events that are sent until one of the two ends has enough.
    Events(Arc<EventChannel>),
}

/// Headers of every response. A page may load, and talk to, nothing but the server that it came
/// from. No script can turn text into markup (Trusted Types). Nobody may embed or keep an answer.
const HEADERS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("x-frame-options", "DENY"),
    ("cache-control", "no-store"),
];

/// Makes a response of this media type.
pub fn bytes(status: StatusCode, kind: &'static str, body: impl Into<Cow<'static, [u8]>>) -> WebResponse {
    response(status, kind, WebBody::Bytes(body.into()))
}

/// Makes a response of one line of plain text for people.
pub fn text(status: StatusCode, line: impl std::fmt::Display) -> WebResponse {
    bytes(status, "text/plain; charset=utf-8", format!("{line}\n").into_bytes())
}

/// Makes a response that streams the events of a channel.
pub fn events(channel: Arc<EventChannel>) -> WebResponse {
    response(StatusCode::OK, "text/event-stream", WebBody::Events(channel))
}

fn response(status: StatusCode, kind: &'static str, body: WebBody) -> WebResponse {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    for (name, value) in HEADERS.into_iter().chain([("content-type", kind)]) {
        response.headers_mut().insert(name, ureq_proto::http::HeaderValue::from_static(value));
    }
    response
}
