//! Messages between runners and the agent of their node, and the runner's side of them.
//!
//! A runner connects to a Unix socket, says what its job claims, and gets the pool. It makes the
//! blocks of the job and says that it is ready. The agent then finds these blocks by the process id
//! that the kernel names, makes room, stores the budget as an offer into the request block, and
//! says that the program may start. From then on the connection carries nothing: it is open as long
//! as the job runs. An agent that starts again finds running jobs by their blocks, so a runner need
//! not connect again.
//!
//! A frame is its length (four bytes, little endian) and a message as JSON.

use super::server::check_interrupted;
use super::sys::{self, Signals};
use super::{HistoryFile, JobRefusal, RunnerBlock};
use crate::config::CLAIM_BYTES;
use farfield_core::policy::cluster::JobClaim;
use farfield_os::serving;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Version of the messages. An agent refuses every other one, and says which it speaks.
pub const AGENT_VERSION: u32 = 1;
/// Largest request to an agent, in bytes.
const REQUEST_BYTES_MAX: usize = 16 << 10;
/// Largest reply of an agent, in bytes: the status of some thousand jobs.
const REPLY_BYTES_MAX: usize = 8 << 20;
/// Time that an agent may take to receive a message, and to answer one that it answers at once.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two attempts to reach an agent that is not there.
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// Message of a runner, or of a person who looks, to an agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentRequest {
    /// Asks for near memory for a new job.
    Register {
        /// [`AGENT_VERSION`] of the sender.
        version: u32,
        /// What the job asks for.
        claim: JobClaim,
        /// Whether the job has a token of its own for the memory servers.
        #[serde(default)]
        has_token: bool,
    },
    /// Says that the blocks of the job are there, and that it waits for its start.
    Ready,
    /// Asks for the state of the agent.
    Status {
        /// [`AGENT_VERSION`] of the sender.
        version: u32,
    },
}

/// Message of an agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentReply {
    /// Accepts a registration, and names the pool of the job.
    Pool {
        /// Socket of the agent, as the agent itself calls it.
        socket: String,
        /// URLs; empty for a private server.
        urls: Vec<String>,
        /// Token for its servers; empty if none.
        token: String,
    },
    /// Says why the job still waits.
    Waiting {
        /// A sentence for the user.
        reason: String,
    },
    /// The program may start, with the budget in the request block.
    Start,
    /// The request cannot be met, now or later.
    Refused {
        /// A sentence for the user.
        reason: String,
    },
    /// State of the agent.
    Status(AgentStatus),
}

/// State of an agent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct AgentStatus {
    /// Near memory that the agent divides, in bytes.
    pub near_bytes: u64,
    /// Part of it that jobs hold: their budgets, or what they were measured to have.
    pub held_bytes: u64,
    /// Memory that jobs asked for beyond it: what they take of the pool by request.
    pub overflow_bytes: u64,
    /// Most that `overflow_bytes` may be; `None` without a bound.
    pub far_bytes: Option<u64>,
    /// Part of `near_bytes` that is not divided now, because the node is short of memory.
    #[serde(default)]
    pub withheld_bytes: u64,
    /// Part of the last seconds in which everything on the node waited for memory, in millionths.
    #[serde(default)]
    pub pressure_ppm: u64,
    /// Bytes of jobs for which the memory servers have room; `None` if that is unknown, or without limit.
    #[serde(default)]
    pub servers_room_bytes: Option<u64>,
    /// Whether a memory server does not answer, so that no job starts.
    #[serde(default)]
    pub is_server_silent: bool,
    /// Rule by which near memory is divided.
    pub policy: String,
    /// Jobs, in the order of their arrival.
    pub jobs: Vec<AgentStatusRow>,
}

/// Job in the state of an agent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct AgentStatusRow {
    /// Process id of the job's runner.
    pub runner_pid: u32,
    /// Whether the job runs; if not, it waits.
    pub is_running: bool,
    /// Reason why it waits; empty if it runs.
    pub reason: String,
    /// Memory that the job asked for, in bytes.
    pub memory_bytes: u64,
    /// Least near memory with which it runs.
    pub least_bytes: u64,
    /// Budget that it shall have.
    pub target_bytes: u64,
    /// Budget that it was told.
    pub offered_bytes: u64,
    /// Near memory, measured from outside.
    pub measured_bytes: u64,
    /// Whether it keeps within what it was told.
    pub is_kept: bool,
    /// Slowdown by far memory between the last two divisions; `None` if the job did too little.
    #[serde(default)]
    pub slowdown: Option<f64>,
    /// Memory that is stored far, as its processes count it; some of it may be near, too.
    #[serde(default)]
    pub far_bytes: u64,
    /// Number of times that somebody else had changed its budget, and the agent changed it back.
    #[serde(default)]
    pub corrections: u64,
}

/// Reason why bytes are no message.
#[derive(Debug, thiserror::Error)]
pub enum AgentFrameError {
    /// More than anybody has to say.
    #[error("a message of {bytes} bytes; at most {most} are allowed")]
    TooLong {
        /// Length that was announced.
        bytes: usize,
        /// Length that is allowed.
        most: usize,
    },
    /// Not a message of this version.
    #[error("not a message that is understood here: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Returns a message as bytes.
pub fn frame(message: &impl Serialize) -> Vec<u8> {
    let text = serde_json::to_vec(message).expect("messages have string keys and finite numbers");
    let length = u32::try_from(text.len()).expect("no message has 4 GiB");
    [&length.to_le_bytes()[..], &text].concat()
}

/// Bytes of a connection that are not a whole message yet.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    most: usize,
}

impl FrameBuffer {
    /// Makes a buffer for requests to an agent.
    pub fn for_requests() -> FrameBuffer {
        FrameBuffer { bytes: Vec::new(), most: REQUEST_BYTES_MAX }
    }

    /// Makes a buffer for replies of an agent.
    pub fn for_replies() -> FrameBuffer {
        FrameBuffer { bytes: Vec::new(), most: REPLY_BYTES_MAX }
    }

    /// Reads once from a connection. Returns false at its end. Reads nothing while the buffer is
    /// full: it then holds a whole message, or an error.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<bool> {
        if self.bytes.len() >= self.most + 4 {
            return Ok(true);
        }
        let mut chunk = [0; 16 << 10];
        match from.read(&mut chunk) {
            Ok(0) => Ok(false),
            Ok(read) => {
                self.bytes.extend_from_slice(&chunk[..read]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Takes the next message out of the buffer, if it is there whole.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, AgentFrameError> {
        let Some((length, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes > self.most {
            return Err(AgentFrameError::TooLong { bytes, most: self.most });
        }
        let Some(text) = rest.get(..bytes) else { return Ok(None) };
        let message = serde_json::from_slice(text)?;
        self.bytes.drain(..4 + bytes);
        Ok(Some(message))
    }
}

/// Agent that decides the near budget of a job, and what the job asks it for.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentOptions {
    /// Socket of the agent.
    pub socket: PathBuf,
    /// What the job asks for.
    pub claim: JobClaim,
    /// Longest time to wait for room.
    pub wait: Duration,
    /// File in which the run leaves what it has shown.
    pub history: Option<HistoryFile>,
}

/// Connection of a runner to its agent.
pub(super) struct AgentRegistration {
    options: AgentOptions,
    has_token: bool,
    deadline: Instant,
    stream: UnixStream,
    buffer: FrameBuffer,
    /// Socket of the agent, as the agent itself calls it.
    socket: String,
    /// URLs of the pool; empty for a private server.
    pub(super) urls: Vec<String>,
    /// Token for the servers of the pool; empty if none.
    pub(super) token: Vec<u8>,
}

fn refusal(reason: impl Into<String>) -> JobRefusal {
    JobRefusal::Agent { reason: reason.into() }
}

impl AgentRegistration {
    /// Registers a job, which has a token of its own for the memory servers or not. Blocks until the
    /// agent has named the pool, at most for some seconds.
    pub(super) fn begin(
        options: &AgentOptions,
        has_token: bool,
        signals: &Signals,
    ) -> Result<AgentRegistration, JobRefusal> {
        let deadline = Instant::now() + options.wait;
        AgentRegistration::connect(options, has_token, deadline, signals, Instant::now())
    }

    fn connect(
        options: &AgentOptions,
        has_token: bool,
        deadline: Instant,
        signals: &Signals,
        give_up: Instant,
    ) -> Result<AgentRegistration, JobRefusal> {
        loop {
            let stream = reach(&options.socket, signals, give_up)?;
            let (options, buffer) = (options.clone(), FrameBuffer::for_replies());
            let (socket, urls, token) = (String::new(), Vec::new(), Vec::new());
            let mut registration =
                AgentRegistration { options, has_token, deadline, stream, buffer, socket, urls, token };
            let claim = registration.options.claim.clone();
            registration.send(&AgentRequest::Register { version: AGENT_VERSION, claim, has_token })?;
            return match registration.receive(signals, Instant::now() + ANSWER_WITHIN)? {
                FromAgent::Message(AgentReply::Pool { socket, urls, token }) => {
                    Ok(AgentRegistration { socket, urls, token: token.into_bytes(), ..registration })
                }
                FromAgent::Message(AgentReply::Refused { reason }) => Err(refusal(reason)),
                FromAgent::Late => Err(refusal("it does not answer: is it stopped?")),
                FromAgent::Gone if Instant::now() < give_up => continue,
                FromAgent::Gone => Err(refusal("it has ended: start it again")),
                FromAgent::Message(other) => Err(refusal(format!("an answer that makes no sense: {other:?}"))),
            };
        }
    }

    /// Writes into a new job's configuration what an agent needs to find it again.
    pub(super) fn publish(&self, control: &RunnerBlock) -> Result<(), JobRefusal> {
        let claim = serde_json::to_vec(&self.options.claim).expect("a claim has string keys and finite numbers");
        if claim.len() > CLAIM_BYTES {
            return Err(refusal(format!("the profile is too long: its claim has {} bytes", claim.len())));
        }
        let config = control.config();
        config.near_least_bytes.store(self.options.claim.least_bytes, Ordering::Relaxed);
        config.claim.write(&claim);
        config.agent.write(self.socket.as_bytes());
        Ok(())
    }

    /// Waits until the agent has made room for the job. Blocks at most as long as the job may wait.
    /// An agent that ends meanwhile is waited for, and asked again. Calls `tell` with news for the
    /// user.
    pub(super) fn wait_for_start(
        mut self,
        control: &RunnerBlock,
        signals: &Signals,
        mut tell: impl FnMut(&str),
    ) -> Result<AgentRegistration, JobRefusal> {
        self.send(&AgentRequest::Ready)?;
        let mut waits = "it has not said why the job waits".to_owned();
        loop {
            match self.receive(signals, self.deadline)? {
                FromAgent::Message(AgentReply::Waiting { reason }) => {
                    tell(&format!("waits to start: {reason}"));
                    waits = reason;
                }
                FromAgent::Message(AgentReply::Start) => {
                    control.config().is_admitted.store(1, Ordering::Release);
                    return Ok(self);
                }
                FromAgent::Message(AgentReply::Refused { reason }) => return Err(refusal(reason)),
                FromAgent::Message(_) => {}
                FromAgent::Late => {
                    let seconds = self.options.wait.as_secs();
                    return Err(refusal(format!("no room within {seconds} s: {waits}; --wait TIME waits longer")));
                }
                FromAgent::Gone => {
                    tell("the agent of this node has ended; waiting until it is back");
                    self = AgentRegistration::connect(
                        &self.options,
                        self.has_token,
                        self.deadline,
                        signals,
                        self.deadline,
                    )?;
                    // The job keeps the pool for which its blocks were made.
                    self.send(&AgentRequest::Ready)?;
                }
            }
        }
    }

    fn send(&mut self, message: &AgentRequest) -> Result<(), JobRefusal> {
        match self.stream.write_all(&frame(message)) {
            // A closed connection shows when the answer is read, which may say why.
            Err(error) if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Err(refusal(format!("cannot be told anything: {error}")))
            }
            _ => Ok(()),
        }
    }

    fn receive(&mut self, signals: &Signals, deadline: Instant) -> Result<FromAgent, JobRefusal> {
        let mut ready = Vec::new();
        loop {
            if let Some(message) = self.buffer.next_message().map_err(|error| refusal(error.to_string()))? {
                return Ok(FromAgent::Message(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(FromAgent::Late);
            }
            sys::poll(&[self.stream.as_raw_fd(), signals.fd()], left, &mut ready);
            check_interrupted(signals)?;
            if ready[0] && !matches!(self.buffer.fill(&mut self.stream), Ok(true)) {
                return Ok(FromAgent::Gone);
            }
        }
    }
}

/// Outcome of a wait for a message.
enum FromAgent {
    Message(AgentReply),
    /// Nothing was said in time.
    Late,
    /// The agent has closed the connection.
    Gone,
}

/// Connects to an agent, which may not be there yet. Blocks until `give_up` at most.
fn reach(socket: &Path, signals: &Signals, give_up: Instant) -> Result<UnixStream, JobRefusal> {
    let at = socket.display();
    loop {
        match connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(ConnectError::Os(error)) if Instant::now() >= give_up => {
                return Err(refusal(format!("no `farfield agent` answers at {at}: {error}; start one there")));
            }
            Err(ConnectError::Os(_)) => sys::poll(&[signals.fd()], RETRY_EVERY, &mut Vec::new()),
            Err(ConnectError::OtherUser(uid)) => {
                return Err(refusal(format!("user {uid} listens at {at}: it must be root's, or yours")));
            }
        }
        check_interrupted(signals)?;
    }
}

/// Reason why there is no connection.
enum ConnectError {
    Os(io::Error),
    /// This user, who is not trusted with a job's pool, listens there.
    OtherUser(u32),
}

fn connect(socket: &Path) -> Result<UnixStream, ConnectError> {
    let stream = UnixStream::connect(socket).map_err(ConnectError::Os)?;
    let peer = serving::peer(stream.as_fd()).map_err(|error| ConnectError::Os(error.into()))?;
    if peer.uid != 0 && peer.uid != serving::effective_uid() {
        return Err(ConnectError::OtherUser(peer.uid));
    }
    stream.set_write_timeout(Some(ANSWER_WITHIN)).map_err(ConnectError::Os)?;
    stream.set_nonblocking(false).map_err(ConnectError::Os)?;
    Ok(stream)
}

/// Asks the agent at `socket` for its state. Blocks at most for some seconds.
pub fn read_status(socket: &Path) -> Result<AgentStatus, JobRefusal> {
    let at = socket.display();
    let mut stream = connect(socket).map_err(|error| match error {
        ConnectError::Os(error) => refusal(format!("no `farfield agent` answers at {at}: {error}; start one there")),
        ConnectError::OtherUser(uid) => refusal(format!("user {uid} listens at {at}: it must be root's, or yours")),
    })?;
    let failed = |error: io::Error| refusal(format!("no answer: {error}"));
    stream.set_read_timeout(Some(ANSWER_WITHIN)).map_err(failed)?;
    stream.write_all(&frame(&AgentRequest::Status { version: AGENT_VERSION })).map_err(failed)?;
    let (mut buffer, deadline) = (FrameBuffer::for_replies(), Instant::now() + ANSWER_WITHIN);
    while Instant::now() < deadline {
        match buffer.next_message().map_err(|error| refusal(error.to_string()))? {
            Some(AgentReply::Status(status)) => return Ok(status),
            Some(AgentReply::Refused { reason }) => return Err(refusal(reason)),
            Some(_) => {}
            None if buffer.fill(&mut stream).map_err(failed)? => {}
            None => return Err(refusal("it has closed the connection")),
        }
    }
    Err(refusal("it does not answer: is it stopped?"))
}

#[cfg(test)]
mod tests {
    //! Danger: a runner or an agent that waits for ever, or that believes half a message.
    use super::*;

    fn claim() -> JobClaim {
        JobClaim { memory_bytes: 1 << 30, least_bytes: 1 << 29, slowdowns: vec![], seconds: None }
    }

    #[test]
    fn messages_come_in_any_pieces() {
        let requests = [AgentRequest::Register { version: 7, claim: claim(), has_token: false }, AgentRequest::Ready];
        let bytes: Vec<u8> = requests.iter().flat_map(frame).collect();
        for piece in 1..40 {
            let (mut buffer, mut seen) = (FrameBuffer::for_requests(), Vec::new());
            for mut part in bytes.chunks(piece) {
                assert!(buffer.fill(&mut part).unwrap());
                seen.extend(std::iter::from_fn(|| buffer.next_message::<AgentRequest>().unwrap()));
            }
            assert_eq!(seen, requests, "{piece}");
        }
        assert!(!FrameBuffer::for_requests().fill(&mut io::empty()).unwrap(), "the end");
    }

    #[test]
    fn what_is_no_message_is_an_error_and_never_kept() {
        let check = |bytes: &[u8], expected: &str| {
            let mut buffer = FrameBuffer::for_requests();
            let mut rest = bytes;
            while !rest.is_empty() && buffer.bytes.len() <= buffer.most {
                buffer.fill(&mut rest).unwrap();
            }
            let error = buffer.next_message::<AgentRequest>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(&u32::MAX.to_le_bytes(), "at most 16384");
        check(&[&[2, 0, 0, 0][..], b"{}"].concat(), "not a message");
        check(&[&[4, 0, 0, 0][..], b"\xff\xff\xff\xff"].concat(), "not a message");
        check(&frame(&"unheard_of"), "not a message");
        let endless = vec![0xff; 1 << 20];
        check(&endless, "at most 16384");
        // Half a message is none, and no error yet.
        let mut buffer = FrameBuffer::for_requests();
        buffer.fill(&mut &frame(&AgentRequest::Ready)[..5]).unwrap();
        assert!(matches!(buffer.next_message::<AgentRequest>(), Ok(None)));
    }

    #[test]
    fn a_status_passes_unchanged() {
        let row = AgentStatusRow { runner_pid: 7, is_running: true, memory_bytes: 5, ..AgentStatusRow::default() };
        let status =
            AgentStatus { near_bytes: 1 << 40, far_bytes: None, jobs: vec![row; 2000], ..AgentStatus::default() };
        let reply = AgentReply::Status(status);
        let (mut buffer, bytes) = (FrameBuffer::for_replies(), frame(&reply));
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            buffer.fill(&mut rest).unwrap();
        }
        assert_eq!(buffer.next_message::<AgentReply>().unwrap(), Some(reply));
    }

    #[test]
    fn an_agent_that_is_not_there_is_named() {
        let error = read_status(Path::new("/no/such/agent.sock")).unwrap_err().to_string();
        assert!(error.contains("/no/such/agent.sock") && error.contains("farfield agent"), "{error}");
    }
}
