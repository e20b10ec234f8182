//! The agent at work: its socket, its connections and the jobs that it watches. Decisions are those
//! of [`farfield_cluster::agent`].
//!
//! One thread does everything and never blocks on a connection. A peer is who the kernel says that
//! it is; requests are bounded, and a peer that says nothing is cut off.

use super::metrics::{self, SharedStatus};
use super::servers::RoomThread;
use anyhow::{Context, ensure};
use farfield_cluster::agent::{Agent, AgentJob, JobNumber, LocalJobs, NodeConfig, ServerRoom};
use farfield_core::policy::cluster::JobClaim;
use farfield_os::serving::Peer;
use farfield_os::{serving, signals};
use farfield_pager::runner::{
    self, AGENT_VERSION, AgentReply, AgentRequest, AgentStatus, AgentStatusRow, FrameBuffer, JobActivity, ProcessTree,
    WatchedJob, frame,
};
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Interval between two updates while budgets move or jobs wait, and while nothing happens.
const BUSY_EVERY: Duration = Duration::from_millis(100);
const IDLE_EVERY: Duration = Duration::from_secs(1);
/// Interval between two searches for jobs that run and are not known.
const SEARCH_EVERY: Duration = Duration::from_secs(10);
/// Time that a peer has to register, to become ready, and to take what it is sent.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that a peer has to say its first word.
const FIRST_WORD_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two reasons that a waiting job is given.
const REASON_EVERY: Duration = Duration::from_secs(5);
/// Maximum number of connections that have no job yet.
const STRANGERS_MAX: usize = 256;
/// Bytes that may wait for a peer that does not read.
const OUTBOX_BYTES_MAX: usize = 16 << 20;

/// Options of an agent.
pub(super) struct DaemonOptions {
    pub(super) node: NodeConfig,
    pub(super) policy: String,
    pub(super) pool: Vec<String>,
    pub(super) token: String,
    pub(super) socket: PathBuf,
    pub(super) metrics: Option<SocketAddr>,
}

/// Runs the agent until a signal ends it.
pub(super) fn run(options: DaemonOptions) -> anyhow::Result<()> {
    let stop = signals::bit(libc::SIGTERM) | signals::bit(libc::SIGINT) | signals::bit(libc::SIGHUP);
    signals::set_mask(stop);
    crate::log::start("info", false);
    let _ = serving::raise_descriptor_limit();
    let address = options.socket.to_str().context("--socket: the path is not UTF-8")?.to_owned();
    let door = AgentSocket::open(&options.socket)?;
    let status = SharedStatus::default();
    let served = options.metrics.map(|address| metrics::serve(address, status.clone())).transpose()?;
    let servers = RoomThread::start(&options.pool, options.token.as_bytes()).context("--pool")?;
    let mut daemon = Daemon {
        agent: Agent::new(options.node),
        jobs: BTreeMap::new(),
        activity: BTreeMap::new(),
        connections: Vec::new(),
        started: Instant::now(),
        address,
        options,
        status,
        servers,
    };
    daemon.find_jobs();
    let line = serde_json::json!({
        "ready": true,
        "socket": daemon.address,
        "metrics": served,
        "found_jobs": daemon.jobs.len(),
        "pid": std::process::id(),
    });
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to stdout")?;
    daemon.serve(&door, || Ok(serving::wait_for_signal(stop, Duration::ZERO)?.is_some()))
}

/// Socket of the agent, removed on drop if it is still this one.
struct AgentSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: (u64, u64),
}

impl AgentSocket {
    /// Listens at `path`. Fails if an agent answers there; takes the place of one that is dead.
    fn open(path: &Path) -> anyhow::Result<AgentSocket> {
        let context = || format!("--socket {}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).with_context(context)?;
        }
        ensure!(
            UnixStream::connect(path).is_err(),
            "an agent runs already at {}: end it first, or choose another --socket",
            path.display()
        );
        // The socket gets its rights under a name that nobody knows, and then its own in one step.
        let mut hidden = path.as_os_str().to_owned();
        hidden.push(format!(".{}", std::process::id()));
        let hidden = PathBuf::from(hidden);
        let _ = std::fs::remove_file(&hidden);
        let listener = UnixListener::bind(&hidden).with_context(context)?;
        // Root's agent is for all users: the kernel says who connects.
        let mode = if serving::effective_uid() == 0 { 0o666 } else { 0o600 };
        let metadata = std::fs::symlink_metadata(&hidden).with_context(context)?;
        std::fs::set_permissions(&hidden, Permissions::from_mode(mode)).with_context(context)?;
        std::fs::rename(&hidden, path).with_context(context)?;
        listener.set_nonblocking(true)?;
        Ok(AgentSocket { listener, path: path.to_owned(), inode: (metadata.dev(), metadata.ino()) })
    }

    /// Checks whether who connects to the path comes here.
    fn is_ours(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.inode)
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        if self.is_ours() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

struct Daemon {
    agent: Agent,
    /// Jobs that run or wait, whose blocks are there.
    jobs: BTreeMap<JobNumber, WatchedJob>,
    /// Activity of jobs when the agent last looked at their slowdowns.
    activity: BTreeMap<JobNumber, JobActivity>,
    connections: Vec<Connection>,
    started: Instant,
    /// Socket as text: the name by which jobs are found again.
    address: String,
    options: DaemonOptions,
    status: SharedStatus,
    /// Thread that asks the memory servers, if there are any.
    servers: Option<RoomThread>,
}

struct Connection {
    stream: UnixStream,
    peer: Peer,
    inbox: FrameBuffer,
    outbox: Vec<u8>,
    phase: ConnectionPhase,
    /// Time of the last change of the phase.
    since: Instant,
    /// Reason that the peer was given last, and when.
    told: (String, Option<Instant>),
}

/// Progress of a connection.
enum ConnectionPhase {
    /// Nothing was said yet.
    New,
    /// The job may make its blocks. `has_token` says whether it is a tenant of its own.
    Registered { claim: JobClaim, has_token: bool },
    /// The job waits or runs.
    Job(JobNumber),
    /// Nothing more will be said: the connection is closed when all is sent.
    Closing,
}

impl Daemon {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Serves until `is_over` says so.
    fn serve(&mut self, door: &AgentSocket, is_over: impl Fn() -> anyhow::Result<bool>) -> anyhow::Result<()> {
        let (mut fds, mut ready) = (Vec::new(), Vec::new());
        let (mut updated, mut searched) = (None::<Instant>, Instant::now());
        loop {
            if is_over()? {
                tracing::info!("told to stop; jobs keep what they have");
                return Ok(());
            }
            fds.clear();
            fds.push(door.listener.as_raw_fd());
            fds.extend(self.connections.iter().map(|connection| connection.stream.as_raw_fd()));
            runner::poll(&fds, BUSY_EVERY, &mut ready);
            // Connections that are accepted now are looked at next time.
            let mut is_news = self.receive(&ready[1..]);
            self.accept(&door.listener);
            is_news |= self.forget_ended();
            if let Some(servers) = &self.servers {
                // What they said before a job came or went says nothing of now: a job may have ended with them.
                let asked = is_news.then(|| servers.ask());
                if let Some(room) = asked.or_else(|| servers.take_answer()) {
                    let mut node = OutsideView { jobs: &self.jobs, activity: &mut self.activity, tree: None };
                    self.agent.on_servers(room, &mut node);
                    is_news = true;
                }
            }
            let every = if self.is_settled() { IDLE_EVERY } else { BUSY_EVERY };
            if is_news || updated.is_none_or(|at| at.elapsed() >= every) {
                updated = Some(Instant::now());
                self.update();
                ensure!(door.is_ours(), "another agent has taken {}", door.path.display());
            }
            if searched.elapsed() >= SEARCH_EVERY {
                searched = Instant::now();
                self.find_jobs();
            }
            self.send();
        }
    }

    /// Takes jobs that an agent here has admitted and that this one does not know: they have outlived
    /// the agent before.
    fn find_jobs(&mut self) {
        for job in WatchedJob::find_admitted(&self.address) {
            let number = JobNumber(job.runner());
            if self.jobs.contains_key(&number) {
                continue;
            }
            let Some(claim) = job.claim() else {
                tracing::warn!(runner = number.0, "a job whose claim cannot be read is left alone");
                continue;
            };
            let age = crate::top::age(number.0).unwrap_or_default();
            let offered_bytes = job.status().near_offer_bytes;
            match self.agent.adopt(number, &claim, offered_bytes, age, self.now()) {
                Ok(()) => {
                    tracing::info!(runner = number.0, offered_bytes, "found a running job");
                    self.jobs.insert(number, job);
                }
                Err(error) => tracing::warn!(runner = number.0, %error, "a running job is left alone"),
            }
        }
    }

    fn accept(&mut self, listener: &UnixListener) {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    return;
                }
            };
            let strangers =
                self.connections.iter().filter(|this| !matches!(this.phase, ConnectionPhase::Job(_))).count();
            let Ok(peer) = serving::peer(stream.as_fd()) else { continue };
            if strangers >= STRANGERS_MAX || stream.set_nonblocking(true).is_err() {
                tracing::warn!(uid = peer.uid, "too many connections without a job; one is closed");
                continue;
            }
            self.connections.push(Connection {
                stream,
                peer,
                inbox: FrameBuffer::for_requests(),
                outbox: Vec::new(),
                phase: ConnectionPhase::New,
                since: Instant::now(),
                told: (String::new(), None),
            });
        }
    }

    /// Reads from connections that have something to say, and closes those that have ended. Returns
    /// whether jobs have come or gone.
    fn receive(&mut self, ready: &[bool]) -> bool {
        let mut is_news = false;
        let connections = std::mem::take(&mut self.connections);
        for (index, mut connection) in connections.into_iter().enumerate() {
            let is_ready = ready.get(index).copied().unwrap_or(false);
            let is_closing = matches!(connection.phase, ConnectionPhase::Closing);
            let is_open = match (is_ready, is_closing) {
                (false, _) => true,
                (true, true) => discard(&mut connection.stream),
                (true, false) => connection.inbox.fill(&mut connection.stream).unwrap_or(false),
            };
            if is_ready && is_open && !is_closing {
                is_news |= self.read(&mut connection);
            }
            let patience = match connection.phase {
                ConnectionPhase::New => FIRST_WORD_WITHIN,
                ConnectionPhase::Registered { .. } | ConnectionPhase::Closing => PATIENCE,
                ConnectionPhase::Job(_) => Duration::MAX,
            };
            let is_sent = matches!(connection.phase, ConnectionPhase::Closing) && connection.outbox.is_empty();
            if is_open && !is_sent && connection.since.elapsed() < patience {
                self.connections.push(connection);
            } else if let ConnectionPhase::Job(number) = connection.phase {
                is_news |= self.forget(number);
            }
        }
        is_news
    }

    /// Handles all whole messages of a connection. Returns whether jobs have come.
    fn read(&mut self, connection: &mut Connection) -> bool {
        let mut is_news = false;
        loop {
            if matches!(connection.phase, ConnectionPhase::Closing) {
                return is_news;
            }
            match connection.inbox.next_message() {
                Ok(Some(request)) => is_news |= self.handle(connection, request),
                Ok(None) => return is_news,
                Err(error) => {
                    connection.refuse(&error.to_string());
                    return is_news;
                }
            }
        }
    }

    fn handle(&mut self, connection: &mut Connection, request: AgentRequest) -> bool {
        let own = serving::effective_uid();
        let (AgentRequest::Register { version, .. } | AgentRequest::Status { version }) = request else {
            return self.handle_ready(connection);
        };
        if version != AGENT_VERSION {
            connection.refuse(&format!(
                "it speaks version {AGENT_VERSION} and was asked in version {version}: use the same farfield command"
            ));
        } else if ![0, own].contains(&connection.peer.uid) && own != 0 {
            connection.refuse(&format!("it serves user {own} only; an agent of root serves all"));
        } else if let AgentRequest::Register { claim, has_token, .. } = request {
            self.handle_register(connection, claim, has_token);
        } else {
            connection.enqueue(&AgentReply::Status(self.read_status()));
            connection.enter(ConnectionPhase::Closing);
        }
        false
    }

    fn handle_register(&mut self, connection: &mut Connection, claim: JobClaim, has_token: bool) {
        if !matches!(connection.phase, ConnectionPhase::New) {
            return connection.refuse("a job registers once");
        }
        if connection.peer.pid <= 0 {
            return connection.refuse("it cannot see this process: run both in one pid namespace");
        }
        match self.agent.check(&claim) {
            Ok(_) => {
                let DaemonOptions { pool, token, .. } = &self.options;
                let socket = self.address.clone();
                connection.enqueue(&AgentReply::Pool { socket, urls: pool.clone(), token: token.clone() });
                connection.enter(ConnectionPhase::Registered { claim, has_token });
            }
            Err(error) => connection.refuse(&error.to_string()),
        }
    }

    /// Opens the blocks of a job that is ready, and lets it wait for its start. Returns whether it
    /// does.
    fn handle_ready(&mut self, connection: &mut Connection) -> bool {
        let ConnectionPhase::Registered { claim, has_token } = &connection.phase else {
            connection.refuse("a job registers before it is ready");
            return false;
        };
        let Ok(pid) = u32::try_from(connection.peer.pid) else { return false };
        let number = JobNumber(pid);
        let watched = WatchedJob::open(pid).map_err(|error| error.to_string()).and_then(|job| {
            // The kernel named the process, and its configuration is written by itself alone.
            let is_same = job.agent() == self.address && job.claim().as_ref() == Some(claim) && !job.is_admitted();
            if is_same { Ok(job) } else { Err("it is not the job that has registered".to_owned()) }
        });
        let job = match watched {
            Ok(job) => job,
            Err(error) => {
                connection.refuse(&format!("process {pid} cannot be watched: {error}"));
                return false;
            }
        };
        match self.agent.register(number, claim, self.now()) {
            Ok(()) => {
                tracing::info!(
                    runner = pid,
                    uid = connection.peer.uid,
                    memory_bytes = claim.memory_bytes,
                    "a job waits"
                );
                if *has_token {
                    self.agent.set_own_token(number);
                }
                self.jobs.insert(number, job);
                connection.enter(ConnectionPhase::Job(number));
                true
            }
            Err(error) => {
                connection.refuse(&error.to_string());
                false
            }
        }
    }

    /// Forgets jobs whose runner has ended. Returns whether there were any.
    fn forget_ended(&mut self) -> bool {
        let ended: Vec<JobNumber> =
            self.jobs.iter().filter(|(_, job)| job.has_ended()).map(|(number, _)| *number).collect();
        ended.iter().for_each(|number| {
            self.forget(*number);
        });
        !ended.is_empty()
    }

    fn forget(&mut self, number: JobNumber) -> bool {
        let is_known = self.agent.remove(number) | self.jobs.remove(&number).is_some();
        self.activity.remove(&number);
        if is_known {
            tracing::info!(runner = number.0, "a job has ended");
        }
        is_known
    }

    /// Tells whether nothing moves and nobody waits.
    fn is_settled(&self) -> bool {
        let is_settled = |job: &AgentJob| {
            job.is_running() && job.budget.offered_bytes == job.budget.target_bytes && job.budget.is_kept()
        };
        self.agent.jobs().iter().all(is_settled)
    }

    fn update(&mut self) {
        let kept = |agent: &Agent| -> Vec<(JobNumber, bool)> {
            agent.jobs().iter().filter(|job| job.is_running()).map(|job| (job.number, job.budget.is_kept())).collect()
        };
        let corrections = |agent: &Agent| -> BTreeMap<u32, u64> {
            agent.jobs().iter().map(|job| (job.number.0, job.corrections)).collect()
        };
        let (before, corrected, now) = (kept(&self.agent), corrections(&self.agent), self.now());
        let mut node = OutsideView { jobs: &self.jobs, activity: &mut self.activity, tree: None };
        let started = self.agent.update(now, &mut node);
        for number in started {
            let connection = self
                .connections
                .iter_mut()
                .find(|this| matches!(this.phase, ConnectionPhase::Job(job) if job == number));
            if let Some(connection) = connection {
                connection.enqueue(&AgentReply::Start);
            }
            let offered_bytes = self.agent.job(number).map_or(0, |job| job.budget.offered_bytes);
            tracing::info!(runner = number.0, offered_bytes, "a job starts");
        }
        for (number, is_kept) in kept(&self.agent) {
            let was_kept = before.iter().find(|(before, _)| *before == number).is_none_or(|(_, was_kept)| *was_kept);
            if was_kept != is_kept {
                let text = if is_kept { "a job keeps its budget" } else { "a job has more near than its budget" };
                tracing::info!(runner = number.0, "{text}");
            }
        }
        for (runner, times) in corrections(&self.agent) {
            if corrected.get(&runner).is_some_and(|before| *before != times) {
                tracing::warn!(runner, times, "somebody else has changed the budget of a job; it is changed back");
            }
        }
        for connection in &mut self.connections {
            let ConnectionPhase::Job(number) = connection.phase else { continue };
            let Some(reason) = self.agent.job(number).and_then(|job| job.waits) else { continue };
            let is_due = connection.told.1.is_none_or(|at| at.elapsed() >= REASON_EVERY);
            let reason = reason.to_string();
            if is_due && reason != connection.told.0 {
                connection.enqueue(&AgentReply::Waiting { reason: reason.clone() });
                connection.told = (reason, Some(Instant::now()));
            }
        }
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = self.read_status();
    }

    /// Returns the state of the agent.
    fn read_status(&self) -> AgentStatus {
        let row = |job: &AgentJob| AgentStatusRow {
            runner_pid: job.number.0,
            is_running: job.is_running(),
            reason: job.waits.map_or(String::new(), |reason| reason.to_string()),
            memory_bytes: job.class.memory_bytes(),
            least_bytes: job.class.least_bytes(),
            target_bytes: job.budget.target_bytes,
            offered_bytes: job.budget.offered_bytes,
            measured_bytes: job.budget.measured_bytes,
            is_kept: job.budget.is_kept(),
            slowdown: job.slowdown,
            far_bytes: job.far_bytes,
            corrections: job.corrections,
        };
        let room_bytes = match self.agent.servers() {
            ServerRoom::Free { bytes } => Some(bytes),
            ServerRoom::Unknown | ServerRoom::Asked | ServerRoom::Silent => None,
        };
        AgentStatus {
            near_bytes: self.options.node.near_bytes,
            held_bytes: self.agent.held_bytes(),
            overflow_bytes: self.agent.overflow_bytes(),
            far_bytes: self.options.node.far_bytes,
            withheld_bytes: self.agent.withheld_bytes(),
            pressure_ppm: (self.agent.pressure() * 1e6) as u64,
            servers_room_bytes: room_bytes,
            is_server_silent: self.agent.servers() == ServerRoom::Silent,
            policy: self.options.policy.clone(),
            jobs: self.agent.jobs().iter().map(row).collect(),
        }
    }

    /// Sends what connections can take now. One that does not read is closed.
    fn send(&mut self) {
        for connection in &mut self.connections {
            connection.flush();
        }
    }
}

/// Reads what a peer still says, and drops it. Returns false at the end of the connection.
fn discard(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 4096]) {
        Ok(read) => read > 0,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

impl Connection {
    fn enter(&mut self, phase: ConnectionPhase) {
        (self.phase, self.since) = (phase, Instant::now());
    }

    fn enqueue(&mut self, reply: &AgentReply) {
        self.outbox.extend(frame(reply));
    }

    fn refuse(&mut self, reason: &str) {
        tracing::info!(uid = self.peer.uid, pid = self.peer.pid, reason, "a request is refused");
        self.enqueue(&AgentReply::Refused { reason: reason.to_owned() });
        self.enter(ConnectionPhase::Closing);
    }

    fn flush(&mut self) {
        while !self.outbox.is_empty() {
            match self.stream.write(&self.outbox) {
                Ok(sent) => {
                    self.outbox.drain(..sent);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && self.outbox.len() <= OUTBOX_BYTES_MAX => return,
                // It is read as the end of the connection next time.
                Err(_) => {
                    serving::shut_down(self.stream.as_fd());
                    self.outbox.clear();
                }
            }
        }
    }
}

/// Jobs of this node, met through the blocks of their runners and through `/proc`.
struct OutsideView<'a> {
    jobs: &'a BTreeMap<JobNumber, WatchedJob>,
    activity: &'a mut BTreeMap<JobNumber, JobActivity>,
    /// Processes of the machine, read when they are first needed.
    tree: Option<ProcessTree>,
}

impl LocalJobs for OutsideView<'_> {
    fn near_bytes(&mut self, job: JobNumber, enough_bytes: u64) -> Option<u64> {
        let job = self.jobs.get(&job).filter(|job| !job.has_ended())?;
        let tree = self.tree.get_or_insert_with(ProcessTree::read);
        Some(job.resident_bytes(tree, enough_bytes))
    }

    fn offer(&mut self, job: JobNumber, bytes: u64) {
        let Some(watched) = self.jobs.get(&job) else { return };
        if let Err(error) = watched.offer(bytes) {
            tracing::warn!(runner = job.0, %error, "a job cannot be told its budget");
        }
    }

    fn told_bytes(&mut self, job: JobNumber) -> Option<u64> {
        self.jobs.get(&job).map(WatchedJob::told_bytes)
    }

    fn far_bytes(&mut self, job: JobNumber) -> u64 {
        self.jobs.get(&job).map_or(0, WatchedJob::far_bytes)
    }

    fn slowdown(&mut self, job: JobNumber) -> Option<f64> {
        let watched = self.jobs.get(&job)?;
        let tree = self.tree.get_or_insert_with(ProcessTree::read);
        watched.slowdown_since(self.activity.entry(job).or_default(), tree)
    }

    fn pressure(&mut self) -> f64 {
        std::fs::read_to_string(PRESSURE).ok().and_then(|text| full_pressure(&text)).unwrap_or(0.0)
    }
}

/// Where the kernel says how much everything waits for memory (PSI).
const PRESSURE: &str = "/proc/pressure/memory";

/// Returns the part of the last ten seconds in which all tasks that could have run waited for memory.
fn full_pressure(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let percent = line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse::<f64>().ok()?;
    (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
}

#[cfg(test)]
mod tests {
    //! Danger: a kernel that says how short of memory it is, and is not understood.
    use super::*;

    #[test]
    fn pressure_is_what_the_kernel_says_of_all_tasks() {
        let text =
            "some avg10=30.00 avg60=0.00 avg300=0.00 total=634\nfull avg10=12.50 avg60=0.00 avg300=0.00 total=4\n";
        assert_eq!(full_pressure(text), Some(0.125));
        for other in ["", "full", "full avg10=x", "full avg10=NaN", "full avg10=101.00", "some avg10=1.00"] {
            assert_eq!(full_pressure(other), None, "{other}");
        }
    }
}
