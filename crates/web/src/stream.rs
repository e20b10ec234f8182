//! Streams of connections: sockets whose reads and writes end at a deadline, plain or under TLS.

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Socket whose reads and writes end at a deadline, however many of them TLS needs.
pub(crate) struct TimedSocket {
    socket: TcpStream,
    deadline: Instant,
}

impl TimedSocket {
    /// Returns the time until the deadline, or an error if it has passed.
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for TimedSocket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(self.left()?))?;
        self.socket.read(into)
    }
}

impl Write for TimedSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(self.left()?))?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Stream of one connection.
pub(crate) enum HttpStream {
    Plain(TimedSocket),
    /// The handshake is part of the first read.
    Tls(Box<StreamOwned<ServerConnection, TimedSocket>>),
}

impl HttpStream {
    /// Makes the stream of a connection that was accepted. No byte is moved yet.
    pub(crate) fn new(socket: TcpStream, tls: Option<Arc<ServerConfig>>) -> Result<HttpStream, rustls::Error> {
        let socket = TimedSocket { socket, deadline: Instant::now() };
        Ok(match tls {
            None => HttpStream::Plain(socket),
            Some(config) => {
                let connection = ServerConnection::new(config)?;
                HttpStream::Tls(Box::new(StreamOwned::new(connection, socket)))
            }
        })
    }

    fn timed(&mut self) -> &mut TimedSocket {
        match self {
            HttpStream::Plain(socket) => socket,
            HttpStream::Tls(stream) => &mut stream.sock,
        }
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            HttpStream::Plain(socket) => &socket.socket,
            HttpStream::Tls(stream) => &stream.sock.socket,
        }
    }

    /// Sets the time at which reads and writes that come now end.
    pub(crate) fn set_deadline(&mut self, deadline: Instant) {
        self.timed().deadline = deadline;
    }
}

impl Read for HttpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            HttpStream::Plain(socket) => socket.read(into),
            HttpStream::Tls(stream) => match stream.read(into) {
                // Many clients close without saying so inside TLS. HTTP knows by itself what is missing.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(0),
                other => other,
            },
        }
    }
}

impl Write for HttpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            HttpStream::Plain(socket) => socket.write(bytes),
            HttpStream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            HttpStream::Plain(socket) => socket.flush(),
            HttpStream::Tls(stream) => stream.flush(),
        }
    }
}
