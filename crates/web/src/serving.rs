//! Accepts connections, within bounds.

use crate::connection::HttpConnection;
use crate::stream::HttpStream;
use crate::{TlsIdentity, WebRequest, WebResponse};
use farfield_os::net;
use std::io::{ErrorKind, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Bounds on what clients can make a server hold, and on how long it waits for them.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Most connections, each of which has a thread.
    pub connections: usize,
    /// Most connections among them that stream events.
    pub event_streams: usize,
    /// Most bytes of the head of a request.
    pub head_bytes: usize,
    /// Most bytes of the body of a request.
    pub body_bytes: usize,
    /// Longest time from the first byte of a request, or from the connection, to its last byte.
    pub request_within: Duration,
    /// Longest time for which a client may leave a response, or an event, unread.
    pub response_within: Duration,
    /// Longest time between two requests on one connection. Zero: a connection has one request.
    pub idle_within: Duration,
}

impl Default for HttpLimits {
    /// Returns limits for a server that people look at: 64 connections, half of them with events.
    fn default() -> HttpLimits {
        HttpLimits {
            connections: 64,
            event_streams: 32,
            head_bytes: 8 * 1024,
            body_bytes: 8 * 1024,
            request_within: Duration::from_secs(5),
            response_within: Duration::from_secs(10),
            idle_within: Duration::from_secs(30),
        }
    }
}

/// Places of one kind, of which a bounded number is taken at a time.
pub(crate) struct Places {
    taken: AtomicUsize,
    most: usize,
}

/// Place that is given back when it is dropped.
pub(crate) struct TakenPlace<'a>(&'a Places);

impl Places {
    fn new(most: usize) -> Places {
        Places { taken: AtomicUsize::new(0), most }
    }

    /// Takes a place. Returns `None` if all are taken.
    pub(crate) fn take(&self) -> Option<TakenPlace<'_>> {
        let more = |taken| (taken < self.most).then_some(taken + 1);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| TakenPlace(self))
    }
}

impl Drop for TakenPlace<'_> {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves HTTP/1.1 until `is_over` returns true, which is checked once a second and whenever a
/// client connects. Blocks the calling thread until then, and until the last connection has ended.
///
/// `answer` is called by as many threads as there are connections. A client beyond the limit is
/// told so (503) and disconnected.
pub fn serve(
    listener: &TcpListener,
    limits: &HttpLimits,
    is_over: impl Fn() -> bool + Sync,
    answer: impl Fn(&WebRequest) -> WebResponse + Sync,
) -> std::io::Result<()> {
    serve_as(listener, limits, None, is_over, answer)
}

/// Serves HTTP/1.1 over TLS, as [`serve`] does without. The handshake is part of a client's first
/// request.
pub fn serve_tls(
    listener: &TcpListener,
    limits: &HttpLimits,
    identity: &TlsIdentity,
    is_over: impl Fn() -> bool + Sync,
    answer: impl Fn(&WebRequest) -> WebResponse + Sync,
) -> std::io::Result<()> {
    serve_as(listener, limits, Some(identity), is_over, answer)
}

fn serve_as(
    listener: &TcpListener,
    limits: &HttpLimits,
    tls: Option<&TlsIdentity>,
    is_over: impl Fn() -> bool + Sync,
    answer: impl Fn(&WebRequest) -> WebResponse + Sync,
) -> std::io::Result<()> {
    const LOOK_AGAIN: Duration = Duration::from_secs(1);
    const AFTER_FAILURE: Duration = Duration::from_millis(50);
    listener.set_nonblocking(true)?;
    let (connections, streams) = (Places::new(limits.connections), Places::new(limits.event_streams));
    let (is_over, answer, connections, streams) = (&is_over, &answer, &connections, &streams);
    std::thread::scope(|scope| {
        while !is_over() {
            match listener.accept() {
                Ok((stream, _)) => {
                    let Some(place) = connections.take() else {
                        // Who speaks TLS would not understand it.
                        if tls.is_none() {
                            turn_away(stream);
                        }
                        continue;
                    };
                    let serve = move || {
                        let _place = place;
                        let served = HttpStream::new(stream, tls.map(TlsIdentity::config))
                            .map_err(std::io::Error::other)
                            .and_then(|stream| HttpConnection::new(stream, limits).serve(streams, is_over, answer));
                        if let Err(error) = served {
                            tracing::debug!(%error, "an HTTP connection failed");
                        }
                    };
                    // A machine without room for a thread drops the connection.
                    if let Err(error) =
                        std::thread::Builder::new().name("farfield-http".into()).spawn_scoped(scope, serve)
                    {
                        tracing::warn!(%error, "no thread for an HTTP connection");
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let _ = net::poll(listener.as_raw_fd(), libc::POLLIN, LOOK_AGAIN);
                }
                Err(_) if is_over() => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP connection");
                    std::thread::sleep(AFTER_FAILURE);
                }
            }
        }
    });
    Ok(())
}

/// Tells a client that there is no place for it. Does not wait for it to read that.
fn turn_away(mut stream: TcpStream) {
    let _ = stream.set_nonblocking(true);
    let _ =
        stream.write_all(&bare_response("503 Service Unavailable", "too many connections: close some and try again"));
}

/// Returns a response to what is no request.
pub(crate) fn bare_response(status: &str, line: &str) -> Vec<u8> {
    let length = line.len() + 1;
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{line}\n"
    )
    .into_bytes()
}
