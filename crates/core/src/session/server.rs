//! One connection as the server sees it: cuts the bytes into messages and holds the client to what
//! was agreed.

use crate::wire::{
    ErrorCode, HEADER_BYTES, Hello, MessageHeader, MessageKind, RefuseCode, Request, VERSION_MAX, VERSION_MIN, Welcome,
    WireError, WireRequest, write_body_bytes,
};

/// Limits for one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionLimits {
    /// Greatest number of pages in one read or write.
    pub batch_pages_max: u32,
    /// Greatest number of requests whose answer is still to come.
    pub in_flight_max: u32,
}

/// Action that the received bytes ask of the server.
#[derive(Debug)]
pub enum ServerAction<'a> {
    /// Nothing yet: the next message is complete when `bytes` are there (counted from the start of
    /// `received`). Make room for that many.
    Need {
        /// Length of the next message as far as it is known.
        bytes: usize,
    },
    /// The client introduces itself. Answer with [`Welcome`] and tell the conversation
    /// ([`ServerConversation::on_welcome`]), or with a refusal and close.
    Hello {
        /// Message of the client.
        hello: Hello<'a>,
        /// Version to speak; `None` if there is none in common: refuse with
        /// [`RefuseCode::Version`].
        version: Option<u16>,
        /// Number of bytes to drop from the front of `received` afterwards.
        used: usize,
    },
    /// A request to be served and answered.
    Request {
        /// The request.
        request: WireRequest<'a>,
        /// Number of bytes to drop from the front of `received` afterwards.
        used: usize,
    },
    /// A request that can be answered with this error at once, without looking at anything.
    Fail {
        /// Tag of the request.
        tag: u64,
        /// Error to answer.
        code: ErrorCode,
        /// Number of bytes to drop from the front of `received` afterwards.
        used: usize,
    },
    /// The bytes are not a conversation. Send a refusal with this code if no [`Welcome`] was sent;
    /// close.
    Broken {
        /// Violation of the protocol.
        error: WireError,
        /// Code for the refusal.
        refuse: RefuseCode,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing was said yet, or `Hello` awaits its answer.
    Greeting,
    Open(ConnectionLimits),
    Broken(WireError),
}

/// Server side of one connection: a state machine without I/O.
#[derive(Debug)]
pub struct ServerConversation {
    state: State,
    in_flight: u32,
}

impl Default for ServerConversation {
    fn default() -> Self {
        Self::new()
    }
}

impl ServerConversation {
    /// Creates the state of a connection on which nothing was said yet.
    pub fn new() -> ServerConversation {
        ServerConversation { state: State::Greeting, in_flight: 0 }
    }

    /// Checks whether the client was welcomed.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Returns the number of requests handed out by [`ServerConversation::step`] and not yet
    /// answered.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Notes that the client was welcomed with this message.
    pub fn on_welcome(&mut self, welcome: &Welcome) {
        debug_assert!(self.state == State::Greeting);
        let Welcome { batch_pages_max, in_flight_max, .. } = *welcome;
        self.state = State::Open(ConnectionLimits { batch_pages_max, in_flight_max });
    }

    /// Notes that the answer to one request was put into the output.
    pub fn on_answered(&mut self) {
        debug_assert!(self.in_flight > 0);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Reads the bytes that were received and not yet used. Call again after dropping the used
    /// bytes, until [`ServerAction::Need`] or [`ServerAction::Broken`].
    pub fn step<'a>(&mut self, received: &'a [u8]) -> ServerAction<'a> {
        match self.try_step(received) {
            Ok(step) => step,
            Err(error) => {
                self.state = State::Broken(error);
                ServerAction::Broken { error, refuse: RefuseCode::Malformed }
            }
        }
    }

    fn try_step<'a>(&mut self, received: &'a [u8]) -> Result<ServerAction<'a>, WireError> {
        if let State::Broken(error) = self.state {
            return Err(error);
        }
        let Some(header) = MessageHeader::decode(received)? else {
            return Ok(ServerAction::Need { bytes: HEADER_BYTES });
        };
        self.check_header(&header)?;
        let used = header.frame_bytes();
        let Some(body) = received.get(HEADER_BYTES..used) else { return Ok(ServerAction::Need { bytes: used }) };
        let State::Open(limits) = self.state else {
            let hello = Hello::decode(&header, body)?;
            return Ok(ServerAction::Hello { hello, version: hello.common_version(VERSION_MIN, VERSION_MAX), used });
        };
        let fail = |code| Ok(ServerAction::Fail { tag: header.tag, code, used });
        if MessageKind::of_request(header.kind).is_none() && header.kind & MessageKind::ANSWER == 0 {
            return fail(ErrorCode::Unsupported); // A request of a later version.
        }
        let request = WireRequest::decode(&header, body)?;
        if let Request::Read { count, .. } = request.request {
            match count {
                0 => return fail(ErrorCode::BadRequest),
                count if count > limits.batch_pages_max => return fail(ErrorCode::TooMuch),
                _ => {}
            }
        }
        if self.in_flight >= limits.in_flight_max {
            return fail(ErrorCode::TooMuch);
        }
        self.in_flight += 1;
        Ok(ServerAction::Request { request, used })
    }

    /// Refuses by its header a message that would otherwise be waited for: a stranger's gigabyte,
    /// or a longer write than agreed.
    fn check_header(&self, header: &MessageHeader) -> Result<(), WireError> {
        let body_max = match self.state {
            State::Open(limits) => write_body_bytes(limits.batch_pages_max),
            _ if header.kind != MessageKind::Hello as u8 => return Err(WireError::Kind(header.kind)),
            _ => Hello::BODY_BYTES_MAX,
        };
        if header.body as usize > body_max {
            return Err(WireError::Length { kind: header.kind, body: header.body });
        }
        Ok(())
    }
}
