//! One connection: requests in, responses out, each with a deadline.

use crate::serving::{HttpLimits, Places, bare_response};
use crate::stream::HttpStream;
use crate::{EventChannel, WebBody, WebRequest, WebResponse, text};
use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};
use ureq_proto::http::{HeaderValue, StatusCode, Version, header};
use ureq_proto::server::state::{ProvideResponse, RecvBody, SendBody};
use ureq_proto::server::{RecvRequestResult, Reply, SendResponseResult};

/// Longest time between two bytes for the reader of an event stream, which tells both ends whether
/// the other one is still there.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Interval at which a connection that waits for an event looks whether the server ends.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes that one call reads or frames.
const PIECE_BYTES: usize = 16 * 1024;

pub(crate) struct HttpConnection<'a> {
    stream: HttpStream,
    limits: &'a HttpLimits,
    /// Bytes that were received and not used yet.
    received: Vec<u8>,
}

/// Reason why no request came.
enum ReceiveError {
    /// The client has closed the connection, or is silent between two requests.
    Closed,
    /// The bytes are no request that is served; status line and explanation.
    Refused(&'static str, &'static str),
    Failed(io::Error),
}

impl From<io::Error> for ReceiveError {
    fn from(error: io::Error) -> ReceiveError {
        ReceiveError::Failed(error)
    }
}

impl From<ureq_proto::Error> for ReceiveError {
    fn from(error: ureq_proto::Error) -> ReceiveError {
        match error {
            ureq_proto::Error::HttpParseTooManyHeaders => TOO_LONG,
            _ => ReceiveError::Refused("400 Bad Request", "this is not HTTP"),
        }
    }
}

const TOO_LONG: ReceiveError = ReceiveError::Refused("431 Request Header Fields Too Large", "the head is too long");
const TOO_LARGE: ReceiveError = ReceiveError::Refused("413 Content Too Large", "the body is too long");
const TOO_LATE: ReceiveError = ReceiveError::Refused("408 Request Timeout", "the request took too long");

impl<'a> HttpConnection<'a> {
    pub(crate) fn new(stream: HttpStream, limits: &'a HttpLimits) -> HttpConnection<'a> {
        HttpConnection { stream, limits, received: Vec::new() }
    }

    /// Answers requests until the connection ends.
    pub(crate) fn serve(
        mut self,
        streams: &Places,
        is_over: impl Fn() -> bool,
        answer: impl Fn(&WebRequest) -> WebResponse,
    ) -> io::Result<()> {
        self.stream.socket().set_nonblocking(false)?;
        self.stream.socket().set_nodelay(true)?;
        let mut wait = self.limits.request_within;
        loop {
            let (request, reply) = match self.receive(wait) {
                Ok(received) => received,
                Err(ReceiveError::Closed) => return Ok(()),
                Err(ReceiveError::Failed(error)) => return Err(error),
                Err(ReceiveError::Refused(status, line)) => return self.write(&bare_response(status, line)),
            };
            let mut response = answer(&request);
            let place = match response.body() {
                WebBody::Bytes(_) => None,
                WebBody::Events(_) => streams.take(),
            };
            let is_stream = matches!(response.body(), WebBody::Events(_));
            if is_stream && request.version() < Version::HTTP_11 {
                response = text(StatusCode::HTTP_VERSION_NOT_SUPPORTED, "events need HTTP/1.1");
            } else if is_stream && place.is_none() {
                response = text(StatusCode::SERVICE_UNAVAILABLE, "too many readers of events: close some pages");
            }
            let goes_on = self.send(reply, response, &is_over)?;
            if !goes_on || is_over() {
                return Ok(());
            }
            wait = self.limits.idle_within;
        }
    }

    /// Receives one request, whose first byte must come within `wait`.
    fn receive(&mut self, wait: Duration) -> Result<(WebRequest, Reply<ProvideResponse>), ReceiveError> {
        let start = Instant::now();
        let mut deadline = start + wait;
        if self.received.is_empty() {
            match self.read(deadline) {
                Ok(0) => return Err(ReceiveError::Closed),
                Ok(_) => deadline = Instant::now() + self.limits.request_within,
                Err(error) if is_timeout(&error) => return Err(ReceiveError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
        let mut reply = Reply::new()?;
        let head = loop {
            let (used, head) = reply.try_request(&self.received)?;
            self.received.drain(..used);
            match head {
                Some(head) => break head,
                None if self.received.len() >= self.limits.head_bytes => return Err(TOO_LONG),
                None => self.read_more(deadline)?,
            }
        };
        let no_state = || ReceiveError::Refused("400 Bad Request", "this is not HTTP");
        let (body, reply) = match reply.proceed().ok_or_else(no_state)? {
            RecvRequestResult::ProvideResponse(reply) => (Vec::new(), reply),
            RecvRequestResult::RecvBody(reply) => self.receive_body(reply, deadline)?,
            RecvRequestResult::Send100(reply) => {
                let mut line = [0; 64];
                let (used, reply) = reply.accept(&mut line)?;
                self.write(&line[..used])?;
                self.receive_body(reply, deadline)?
            }
        };
        Ok((head.map(|()| body), reply))
    }

    fn receive_body(
        &mut self,
        mut reply: Reply<RecvBody>,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Reply<ProvideResponse>), ReceiveError> {
        let mut body = Vec::new();
        let mut piece = [0; 1024];
        while !reply.is_ended() {
            let (used, count) = reply.read(&self.received, &mut piece)?;
            self.received.drain(..used);
            body.extend_from_slice(&piece[..count]);
            if body.len() > self.limits.body_bytes {
                return Err(TOO_LARGE);
            }
            if used == 0 && count == 0 && !reply.is_ended() {
                self.read_more(deadline)?;
            }
        }
        Ok((body, reply.proceed()?))
    }

    /// Reads bytes of a request that has begun.
    fn read_more(&mut self, deadline: Instant) -> Result<(), ReceiveError> {
        match self.read(deadline) {
            Ok(0) => Err(ReceiveError::Closed),
            Ok(_) => Ok(()),
            Err(error) if is_timeout(&error) => Err(TOO_LATE),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&mut self, deadline: Instant) -> io::Result<usize> {
        self.stream.set_deadline(deadline);
        let mut piece = [0; 4096];
        let count = self.stream.read(&mut piece)?;
        self.received.extend_from_slice(&piece[..count]);
        Ok(count)
    }

    /// Sends a response. Returns whether the connection can have another request.
    fn send(
        &mut self,
        reply: Reply<ProvideResponse>,
        response: WebResponse,
        is_over: impl Fn() -> bool,
    ) -> io::Result<bool> {
        let (mut head, body) = response.into_parts();
        let (name, value) = match &body {
            WebBody::Bytes(bytes) => (header::CONTENT_LENGTH, HeaderValue::from(bytes.len())),
            WebBody::Events(_) => (header::TRANSFER_ENCODING, HeaderValue::from_static("chunked")),
        };
        head.headers.insert(name, value);
        if self.limits.idle_within.is_zero() {
            head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        let mut reply = reply.provide(ureq_proto::http::Response::from_parts(head, ())).map_err(io::Error::other)?;
        let mut bytes = vec![0; PIECE_BYTES];
        let mut used = 0;
        while !reply.is_finished() {
            used += reply.write(&mut bytes[used..]).map_err(io::Error::other)?;
        }
        bytes.truncate(used);
        let cleanup = match (reply.proceed(), body) {
            (SendResponseResult::Cleanup(cleanup), _) => {
                self.write(&bytes)?;
                cleanup
            }
            (SendResponseResult::SendBody(mut reply), WebBody::Bytes(body)) => {
                bytes.extend_from_slice(&body);
                self.write(&bytes)?;
                reply.consume_direct_write(body.len()).map_err(io::Error::other)?;
                reply.proceed()
            }
            (SendResponseResult::SendBody(reply), WebBody::Events(channel)) => {
                self.write(&bytes)?;
                self.stream_events(reply, &channel, is_over)?;
                return Ok(false);
            }
        };
        Ok(!cleanup.must_close_connection())
    }

    /// Sends events until the client is gone or too slow, or the server ends. A reader that has
    /// fallen behind gets the newest snapshot instead of the changes that it missed.
    fn stream_events(
        &mut self,
        mut reply: Reply<SendBody>,
        channel: &EventChannel,
        is_over: impl Fn() -> bool,
    ) -> io::Result<()> {
        let mut reader = channel.subscribe();
        let mut last = Instant::now();
        while !is_over() && !self.is_closed()? {
            match reader.next(LOOK) {
                Some(event) => self.write_chunks(&mut reply, &event)?,
                None if last.elapsed() < HEARTBEAT => continue,
                None => self.write_chunks(&mut reply, b":\n\n")?,
            }
            last = Instant::now();
        }
        Ok(())
    }

    /// Tells whether the client has closed the connection. A reader of events sends nothing.
    fn is_closed(&self) -> io::Result<bool> {
        let socket = self.stream.socket();
        socket.set_nonblocking(true)?;
        let peeked = socket.peek(&mut [0]);
        socket.set_nonblocking(false)?;
        match peeked {
            Ok(count) => Ok(count == 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn write_chunks(&mut self, reply: &mut Reply<SendBody>, mut bytes: &[u8]) -> io::Result<()> {
        let mut framed = vec![0; bytes.len().min(PIECE_BYTES) + 64];
        let deadline = Instant::now() + self.limits.response_within;
        while !bytes.is_empty() {
            let (used, count) = reply.write(bytes, &mut framed).map_err(io::Error::other)?;
            if used == 0 {
                return Err(io::Error::other("no progress in framing"));
            }
            self.write_by(&framed[..count], deadline)?;
            bytes = &bytes[used..];
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_by(bytes, Instant::now() + self.limits.response_within)
    }

    /// Writes all bytes before the deadline, however slowly they are read.
    fn write_by(&mut self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        self.stream.set_deadline(deadline);
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.stream.flush()
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
