//! Minimal HTTP server that answers `GET /metrics` for Prometheus.

use farfield_os::net;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Longest request that is read, in bytes; a scrape has a few hundred.
const REQUEST_BYTES_MAX: usize = 8 * 1024;
/// Longest time for reading a request or writing an answer. Scrapers are served one at a time, so
/// none may take long.
const WITHIN: Duration = Duration::from_secs(2);

/// Answers scrapes with the text that `encode` returns (OpenMetrics), until `is_over` returns true.
/// It is checked once a second, and whenever a client connects. Blocks the calling thread until
/// then.
pub fn answer_scrapes(
    listener: &TcpListener,
    is_over: impl Fn() -> bool,
    encode: impl Fn() -> Result<String, std::fmt::Error>,
) -> std::io::Result<()> {
    const LOOK_AGAIN: Duration = Duration::from_secs(1);
    const AFTER_FAILURE: Duration = Duration::from_millis(50);
    listener.set_nonblocking(true)?;
    while !is_over() {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(stream, &encode) {
                    tracing::debug!(%error, "a scrape failed");
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let _ = net::poll(listener.as_raw_fd(), libc::POLLIN, LOOK_AGAIN);
            }
            Err(_) if is_over() => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a scrape");
                std::thread::sleep(AFTER_FAILURE);
            }
        }
    }
    Ok(())
}

fn answer(mut stream: TcpStream, encode: impl Fn() -> Result<String, std::fmt::Error>) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WITHIN))?;
    let request = read_request(&mut stream)?;
    let (status, body) = match route(&request) {
        Route::Metrics => ("200 OK", encode().map_err(std::io::Error::other)?),
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
