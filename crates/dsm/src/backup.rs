//! The memory servers that keep the backup of one node. [`farfield_core::dsm::BackupLog`] says what is where in it.
//!
//! Each server has a *replica*: a region with the same bytes. The first process opens the regions of each other node,
//! and keeps its sessions open: the regions are there as long as the program. The node is given the right to them
//! (`farfield_pool::Share`), and writes alone. After the node's death the first process sets the fences, and reads; if
//! etcd decides, any node may do that.
//!
//! A batch counts when all replicas have it. The writer gives up one that fails, and has the first process know that
//! before anybody is told what is stored without it. So each replica that the first process knows of has all that was
//! told, and one fence is enough to end the writer. A mirror of the pool is another thing: which of its members hold
//! what is known by one process only, and dies with it.

use crate::NodeStartError;
use farfield_core::PageId;
use farfield_core::dsm::{
    BackupBatch, BackupImage, BackupLayout, BackupReadStep, BackupReader, BatchPlace, CommitWord,
};
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{
    Backend, Buffer, CallChannel, Completion, FarCall, Lane, LaneRequest, Op, PoolBuilder, Priority, Share,
};
use farfield_wic::Function;
use farfield_wic::access::{Access, Answer, Ask};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for which the memory server is waited for.
const WITHIN: Duration = Duration::from_secs(10);
/// Pages of a transfer.
const TRANSFER_PAGES: u64 = 256;
/// Pages that are read in a row.
const RUN_PAGES: u64 = 16 * TRANSFER_PAGES;

/// Most replicas of a backup, as members of a mirror.
const REPLICAS_MAX: usize = 8;

/// Right to the replicas of a node's backup.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupAccess {
    replicas: Vec<ReplicaAccess>,
    /// Bytes of objects for which the region has room.
    pub(crate) object_bytes: u64,
}

impl core::fmt::Debug for BackupAccess {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Token and shares are secrets.
        write!(f, "BackupAccess(at {})", self.url())
    }
}

/// Right to one region.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplicaAccess {
    url: String,
    token: String,
    share: String,
}

impl ReplicaAccess {
    /// Returns the secret by which the region is joined. Who has it needs the token of the server, too.
    pub(crate) fn into_share(self) -> String {
        self.share
    }

    /// Joins the session at the memory server: the region is there as long as one process has it open.
    pub(crate) fn attach(&self) -> Result<Arc<dyn Backend>, BackupError> {
        let share = Share::from_secret(&self.share).ok_or(BackupError::Malformed)?;
        builder(&self.url, &self.token).attach(&share).map_err(BackupError::server)
    }
}

impl core::fmt::Debug for ReplicaAccess {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "ReplicaAccess(at {})", self.url)
    }
}

/// Sessions that keep the regions of a backup.
pub(crate) type BackupSessions = Vec<Arc<dyn Backend>>;

/// Replica that its writer does not use any more.
pub(crate) struct LostReplica {
    /// Number of the replica, in the order of the URLs.
    pub(crate) number: u8,
    pub(crate) url: String,
    pub(crate) error: BackupError,
}

/// Why a backup cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BackupError {
    #[error("another node has taken it over")]
    Fenced,
    #[error("{0}")]
    Server(String),
    #[error("it has no room for the objects of this node")]
    TooSmall,
    #[error("what it holds is no backup")]
    Malformed,
}

impl BackupError {
    fn server(error: impl core::fmt::Display) -> BackupError {
        BackupError::Server(error.to_string())
    }
}

/// Pages that were read in a row: batches are small, and lie one behind the other.
struct PageRun {
    first: u64,
    bytes: Vec<u8>,
}

impl PageRun {
    /// Returns so many pages, and reads more than these if they have to be read.
    fn pages(&mut self, region: &mut Replica, first: u64, count: u64, end: u64) -> Result<&[u8], BackupError> {
        let has = self.bytes.len() as u64 / PAGE_BYTES as u64;
        if first < self.first || first + count > self.first + has {
            let ahead = RUN_PAGES.min(end.saturating_sub(first));
            (self.first, self.bytes) = (first, region.read(first, count.max(ahead))?);
        }
        let start = (first - self.first) as usize * PAGE_BYTES;
        self.bytes.get(start..start + count as usize * PAGE_BYTES).ok_or(BackupError::Malformed)
    }
}

/// Backup of a node, open.
pub(crate) struct BackupRegion {
    layout: BackupLayout,
    /// Replicas that have all that counts.
    replicas: Vec<Replica>,
    /// Replicas that were given up since somebody has asked.
    lost: Vec<LostReplica>,
}

/// Region at one memory server, open.
pub(crate) struct Replica {
    number: u8,
    url: String,
    lane: Box<dyn Lane>,
    calls: Box<dyn CallChannel>,
    /// Buffer of one page, for the many small batches.
    page: Option<Buffer>,
    _backend: Arc<dyn Backend>,
}

fn builder(url: &str, token: &str) -> PoolBuilder {
    PoolBuilder::new().url(url).token(token).client_name("share-backup").deadline(WITHIN)
}

/// Returns the URLs of the replicas that a URL of a backup names.
fn replica_urls(url: &str) -> Result<Vec<&str>, &'static str> {
    let Some(members) = url.strip_prefix("mirror(").and_then(|rest| rest.strip_suffix(')')) else {
        return Ok(vec![url]);
    };
    let urls: Vec<&str> = members.split(',').map(str::trim).collect();
    if !(2..=REPLICAS_MAX).contains(&urls.len()) {
        return Err("a mirror for backups has 2 to 8 memory servers");
    }
    if urls.iter().enumerate().any(|(index, url)| urls[..index].contains(url)) {
        return Err("a mirror for backups has different memory servers");
    }
    Ok(urls)
}

impl BackupAccess {
    /// Opens new regions at the memory servers. They are there as long as what is returned with the right to them.
    pub(crate) fn create(
        url: &str,
        token: &str,
        object_bytes: u64,
    ) -> Result<(BackupAccess, BackupSessions), NodeStartError> {
        let failed = |problem: String| NodeStartError::Backup { url: url.to_owned(), problem };
        let one_server = "a backup is kept by one memory server, or by several: write tcp://HOST:PORT, unix:PATH, or \
                          mirror(URL,URL)";
        let mut access = BackupAccess { replicas: Vec::new(), object_bytes };
        let mut sessions = Vec::new();
        for url in replica_urls(url).map_err(|problem| failed(problem.into()))? {
            let backend = builder(url, token).pages(access.layout().pages()).open();
            let backend = backend.map_err(|error| failed(error.to_string()))?;
            let share = backend.share().map_err(|_| failed(one_server.into()))?.to_secret();
            access.replicas.push(ReplicaAccess { url: url.into(), token: token.into(), share });
            sessions.push(backend);
        }
        // As the node will.
        let mut region = access.open().map_err(|error| failed(format!("{error}: {one_server}")))?;
        region.commit_word().map_err(|error| failed(error.to_string()))?;
        Ok((access, sessions))
    }

    /// Returns whether there are several replicas.
    pub(crate) fn is_mirror(&self) -> bool {
        self.replicas.len() > 1
    }

    /// Opens a new region in place of a replica that was given up, for the only writer of the backup.
    pub(crate) fn replace(&self, number: u8) -> Result<(Replica, ReplicaAccess), BackupError> {
        let ReplicaAccess { url, token, .. } = self.replicas.get(usize::from(number)).ok_or(BackupError::Malformed)?;
        let backend = builder(url, token).pages(self.layout().pages()).open().map_err(BackupError::server)?;
        let share = backend.share().map_err(BackupError::server)?.to_secret();
        let access = ReplicaAccess { url: url.clone(), token: token.clone(), share };
        Ok((Replica::new(number, url, backend)?, access))
    }

    /// Records that a replica is in another region now, which is joined by this secret.
    pub(crate) fn set_share(&mut self, number: u8, share: String) {
        if let Some(replica) = self.replicas.get_mut(usize::from(number)) {
            replica.share = share;
        }
    }

    /// Returns the URLs of the memory servers.
    pub(crate) fn url(&self) -> String {
        let urls: Vec<&str> = self.replicas.iter().map(|replica| &*replica.url).collect();
        if let [url] = urls[..] { url.to_owned() } else { format!("mirror({})", urls.join(",")) }
    }

    fn layout(&self) -> BackupLayout {
        BackupLayout::for_objects(self.object_bytes)
    }

    /// Opens all replicas for their only writer.
    pub(crate) fn open(&self) -> Result<BackupRegion, BackupError> {
        let replicas = (0..self.replicas.len()).map(|number| self.open_replica(number)).collect::<Result<_, _>>()?;
        Ok(BackupRegion { layout: self.layout(), replicas, lost: Vec::new() })
    }

    /// Opens the replicas that can be reached, for whoever takes the backup over. Those that `is_lost` names are not
    /// used: the writer goes on without them.
    pub(crate) fn open_for_take_over(&self, is_lost: impl Fn(u8) -> bool) -> Result<BackupRegion, BackupError> {
        let mut region = BackupRegion { layout: self.layout(), replicas: Vec::new(), lost: Vec::new() };
        let mut unreachable = BackupError::Server("its writer has lost all of it".into());
        for number in (0..self.replicas.len()).filter(|number| !is_lost(*number as u8)) {
            match self.open_replica(number) {
                Ok(replica) => region.replicas.push(replica),
                Err(error) => unreachable = error,
            }
        }
        if region.replicas.is_empty() { Err(unreachable) } else { Ok(region) }
    }

    /// Joins the sessions at the memory servers: the regions are there as long as one process has them open.
    #[cfg(feature = "etcd")]
    pub(crate) fn hold(&self) -> Result<BackupSessions, BackupError> {
        self.replicas.iter().map(ReplicaAccess::attach).collect()
    }

    fn open_replica(&self, number: usize) -> Result<Replica, BackupError> {
        let access = self.replicas.get(number).ok_or(BackupError::Malformed)?;
        let number = u8::try_from(number).map_err(|_| BackupError::Malformed)?;
        Replica::new(number, &access.url, access.attach()?)
    }
}

impl BackupRegion {
    pub(crate) fn layout(&self) -> BackupLayout {
        self.layout
    }

    /// Returns how many replicas have all that counts.
    pub(crate) fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Adds a new replica, behind this commit word. It has what counts when a checkpoint is written.
    pub(crate) fn add(&mut self, mut replica: Replica, commit: CommitWord) -> Result<(), BackupError> {
        let unused = CommitWord::from_bits(0);
        if replica.exchange(unused, commit)? != unused {
            return Err(BackupError::Malformed);
        }
        self.replicas.push(replica);
        Ok(())
    }

    /// Returns whether a replica has all that counts.
    pub(crate) fn has(&self, number: u8) -> bool {
        self.replicas.iter().any(|replica| replica.number == number)
    }

    /// Gives a replica up.
    pub(crate) fn remove(&mut self, number: u8) {
        self.replicas.retain(|replica| replica.number != number);
    }

    /// Returns the replicas that were given up since this was called last.
    pub(crate) fn take_lost(&mut self) -> Vec<LostReplica> {
        core::mem::take(&mut self.lost)
    }

    /// Stores a batch and has it count. Returns when all replicas have it that are left.
    pub(crate) fn write(
        &mut self,
        before: CommitWord,
        batch: &mut BackupBatch,
        place: BatchPlace,
    ) -> Result<(), BackupError> {
        let bytes = batch.seal(place);
        // All servers work at the same time: what is begun is waited for afterwards.
        let mut transfers: Vec<_> = self.replicas.iter().map(|_| WriteTransfer::new(bytes, place.first_page)).collect();
        for (replica, transfer) in self.replicas.iter_mut().zip(&mut transfers) {
            replica.begin(transfer);
        }
        let mut transfers = transfers.into_iter();
        self.each(|replica| {
            let mut transfer = transfers.next().ok_or(BackupError::Malformed)?;
            replica.finish(&mut transfer).map(drop)
        })?;
        self.each(|replica| replica.begin_exchange(before, place.commit))?;
        self.each(|replica| match CommitWord::from_bits(replica.finish_ask()?) {
            found if found == before => Ok(()),
            found if found.is_fenced() => Err(BackupError::Fenced),
            _ => Err(BackupError::Malformed),
        })
    }

    /// Does something with each replica. One at which it fails is given up; fails if none is left, or if another node
    /// has taken the backup over.
    fn each(&mut self, mut act: impl FnMut(&mut Replica) -> Result<(), BackupError>) -> Result<(), BackupError> {
        let mut is_fenced = false;
        for mut replica in core::mem::take(&mut self.replicas) {
            match act(&mut replica) {
                Ok(()) => self.replicas.push(replica),
                Err(error) => {
                    is_fenced |= matches!(error, BackupError::Fenced);
                    self.lost.push(LostReplica { number: replica.number, url: replica.url, error });
                }
            }
        }
        if is_fenced {
            return Err(BackupError::Fenced);
        }
        match self.replicas.is_empty().then(|| self.lost.pop()).flatten() {
            Some(last) => Err(last.error),
            None => Ok(()),
        }
    }

    /// Frees pages that hold nothing any more.
    pub(crate) fn discard(&mut self, (first, count): (u64, u64)) -> Result<(), BackupError> {
        self.each(|replica| {
            let mut op = Some(Op::Discard { page: PageId(first), count });
            replica.transfer(|_| op.take()).map(drop)
        })
    }

    /// Returns the commit word of a backup that nobody has written to since it was opened.
    pub(crate) fn commit_word(&mut self) -> Result<CommitWord, BackupError> {
        let mut words = self.replicas.iter_mut().map(Replica::commit_word);
        let first = words.next().ok_or(BackupError::Malformed)??;
        for word in words {
            if word? != first {
                return Err(BackupError::Malformed);
            }
        }
        Ok(first)
    }

    /// Takes the backup over, and returns what it holds, on top of the backups that its writer had taken over. Its
    /// writer stores nothing more that counts: it needs each of these replicas. The last batch may be at some of them
    /// only, and was told nobody then. Whoever takes it over again finds the same.
    pub(crate) fn take_over(&mut self, taken_over: &BackupImage) -> Result<BackupImage, BackupError> {
        let mut words = Vec::new();
        self.each(|replica| replica.set_fence().map(|word| words.push((word.batch(), replica.number, word))))?;
        words.sort_by_key(|(batch, number, _)| (core::cmp::Reverse(*batch), *number));
        let mut failed = BackupError::Malformed;
        for (_, number, commit) in words {
            let Some(replica) = self.replicas.iter_mut().find(|replica| replica.number == number) else { continue };
            match replica.read_image(self.layout, commit, taken_over.clone()) {
                Ok(image) => return Ok(image),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

/// Pages of a batch on their way to a replica.
struct WriteTransfer<'b> {
    bytes: &'b [u8],
    first_page: u64,
    written: usize,
    state: TransferState,
}

/// Operations of a transfer, by number.
#[derive(Default)]
struct TransferState {
    begun: u64,
    buffers: Vec<(u64, Buffer)>,
    refused: Option<LaneRequest>,
    failed: Option<farfield_pool::PoolError>,
}

impl<'b> WriteTransfer<'b> {
    fn new(bytes: &'b [u8], first_page: u64) -> WriteTransfer<'b> {
        WriteTransfer { bytes, first_page, written: 0, state: TransferState::default() }
    }
}

/// Returns the next operation of a transfer of pages to a replica.
fn next_write(replica: &mut Replica, bytes: &[u8], first_page: u64, written: &mut usize) -> Option<Op> {
    let part = &bytes[*written..bytes.len().min(*written + TRANSFER_PAGES as usize * PAGE_BYTES)];
    if part.is_empty() {
        return None;
    }
    let page = PageId(first_page + (*written / PAGE_BYTES) as u64);
    *written += part.len();
    let mut buffer = replica.buffer(part.len().div_ceil(PAGE_BYTES));
    let (contents, rest) = buffer.bytes_mut().split_at_mut(part.len());
    contents.copy_from_slice(part);
    rest.fill(0);
    buffer.seal();
    Some(Op::Write { page, buffer })
}

impl Replica {
    fn new(number: u8, url: &str, backend: Arc<dyn Backend>) -> Result<Replica, BackupError> {
        let lane = backend.open_lane().map_err(BackupError::server)?;
        let calls = backend.open_calls().map_err(BackupError::server)?;
        Ok(Replica { number, url: url.to_owned(), lane, calls, page: None, _backend: backend })
    }

    /// Returns the number of the replica, in the order of the URLs.
    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Returns the commit word.
    fn commit_word(&mut self) -> Result<CommitWord, BackupError> {
        let word = self.ask(&Ask::Add { offset: CommitWord::OFFSET, add: 0 })?;
        Ok(CommitWord::from_bits(word))
    }

    /// Reads what the replica holds up to this commit word.
    fn read_image(
        &mut self,
        layout: BackupLayout,
        commit: CommitWord,
        taken_over: BackupImage,
    ) -> Result<BackupImage, BackupError> {
        let mut reader = BackupReader::new(layout, commit, taken_over);
        let end = layout.end_page(commit);
        let mut run = PageRun { first: 0, bytes: Vec::new() };
        while let BackupReadStep::Pages(first, count) = reader.poll_header() {
            let header = run.pages(self, first, count, end)?;
            let BackupReadStep::Pages(first, count) = reader.on_header(header).map_err(|_| BackupError::Malformed)?
            else {
                break;
            };
            let batch = run.pages(self, first, count, end)?;
            reader.on_batch(batch).map_err(|_| BackupError::Malformed)?;
        }
        Ok(reader.into_image())
    }

    /// Sets the fence, if it is not there. Returns the commit word.
    fn set_fence(&mut self) -> Result<CommitWord, BackupError> {
        let until = Instant::now() + WITHIN;
        loop {
            let word = self.commit_word()?;
            let Some(fenced) = word.fenced() else { return Ok(word) };
            if self.exchange(word, fenced)? == word {
                return Ok(word);
            }
            // The writer lives, and was faster.
            if Instant::now() > until {
                return Err(BackupError::Server("its writer does not let go of it".into()));
            }
        }
    }

    fn exchange(&mut self, current: CommitWord, new: CommitWord) -> Result<CommitWord, BackupError> {
        self.begin_exchange(current, new)?;
        self.finish_ask().map(CommitWord::from_bits)
    }

    fn begin_exchange(&mut self, current: CommitWord, new: CommitWord) -> Result<(), BackupError> {
        let (offset, current, new) = (CommitWord::OFFSET, current.bits(), new.bits());
        self.begin_ask(&Ask::Exchange { offset, current, new })
    }

    fn buffer(&mut self, pages: usize) -> Buffer {
        if pages == 1 { self.page.take().unwrap_or_else(|| Buffer::new(1)) } else { Buffer::new(pages) }
    }

    fn read(&mut self, first: u64, count: u64) -> Result<Vec<u8>, BackupError> {
        let mut parts = (0..count).step_by(TRANSFER_PAGES as usize);
        let read = self.transfer(|region| {
            let at = parts.next()?;
            let buffer = region.buffer((count - at).min(TRANSFER_PAGES) as usize);
            Some(Op::Read { page: PageId(first + at), buffer })
        })?;
        let mut bytes = Vec::with_capacity(count as usize * PAGE_BYTES);
        for buffer in read {
            bytes.extend_from_slice(buffer.bytes());
            if buffer.capacity() == 1 {
                self.page = Some(buffer);
            }
        }
        Ok(bytes)
    }

    /// Does operations until there are no more. Returns their buffers in order.
    fn transfer(&mut self, mut next: impl FnMut(&mut Replica) -> Option<Op>) -> Result<Vec<Buffer>, BackupError> {
        let mut state = TransferState::default();
        self.advance(&mut state, &mut next);
        self.complete(&mut state, &mut next)
    }

    /// Begins to write the pages of a batch, as many as the lane takes at once.
    fn begin(&mut self, transfer: &mut WriteTransfer<'_>) {
        let WriteTransfer { bytes, first_page, written, state } = transfer;
        self.advance(state, &mut |replica: &mut Replica| next_write(replica, bytes, *first_page, written));
    }

    /// Waits until the pages of a batch are written.
    fn finish(&mut self, transfer: &mut WriteTransfer<'_>) -> Result<Vec<Buffer>, BackupError> {
        let WriteTransfer { bytes, first_page, written, state } = transfer;
        self.complete(state, &mut |replica: &mut Replica| next_write(replica, bytes, *first_page, written))
    }

    /// Begins operations as long as the lane takes them, and takes those that have ended.
    fn advance(&mut self, state: &mut TransferState, next: &mut impl FnMut(&mut Replica) -> Option<Op>) {
        while state.failed.is_none() {
            let request = match state.refused.take() {
                Some(request) => request,
                None => match next(self) {
                    Some(op) => {
                        state.begun += 1;
                        LaneRequest { tag: state.begun - 1, priority: Priority::Demand, deadline: WITHIN, op }
                    }
                    None => break,
                },
            };
            if let Err(request) = self.lane.submit(request) {
                state.refused = Some(request);
                break;
            }
        }
        let mut done: Vec<Completion> = Vec::with_capacity(TRANSFER_PAGES as usize);
        self.lane.poll(&mut done);
        for Completion { tag, result, buffer } in done {
            state.failed = state.failed.take().or(result.err());
            state.buffers.extend(buffer.map(|buffer| (tag, buffer)));
        }
    }

    fn complete(
        &mut self,
        state: &mut TransferState,
        next: &mut impl FnMut(&mut Replica) -> Option<Op>,
    ) -> Result<Vec<Buffer>, BackupError> {
        loop {
            self.advance(state, next);
            if self.lane.in_flight() == 0 && (state.refused.is_none() || state.failed.is_some()) {
                break;
            }
            self.lane.wait(WITHIN);
        }
        if let Some(error) = state.failed.take() {
            return Err(BackupError::server(error));
        }
        let mut buffers = core::mem::take(&mut state.buffers);
        buffers.sort_by_key(|(tag, _)| *tag);
        Ok(buffers.into_iter().map(|(_, buffer)| buffer).collect())
    }

    /// Has the server make a step of a word, and returns the word as it was.
    fn ask(&mut self, ask: &Ask) -> Result<u64, BackupError> {
        self.begin_ask(ask)?;
        self.finish_ask()
    }

    fn begin_ask(&mut self, ask: &Ask) -> Result<(), BackupError> {
        let argument = postcard::to_allocvec(ask).map_err(BackupError::server)?;
        let (name, version) = (Access::NAME, Access::VERSION);
        let call = FarCall { tag: 0, deadline: WITHIN, steps_max: 0, name, version, argument };
        self.calls.submit(call).map_err(|_| BackupError::Server("the channel is full".into()))
    }

    /// Waits for the answer to what was asked last.
    fn finish_ask(&mut self) -> Result<u64, BackupError> {
        let (mut ended, until) = (Vec::with_capacity(1), Instant::now() + 2 * WITHIN);
        while self.calls.poll(&mut ended) == 0 {
            if Instant::now() > until {
                return Err(BackupError::Server("the server does not answer".into()));
            }
            self.calls.wait(WITHIN);
        }
        match ended.pop().map(|end| end.result) {
            Some(Ok(answer)) => match postcard::from_bytes(&answer) {
                Ok(Answer::Word(word)) => Ok(word),
                _ => Err(BackupError::Malformed),
            },
            Some(Err(failure)) => Err(BackupError::Server(format!("{failure:?}"))),
            None => Err(BackupError::Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farfield_core::dsm::{BackupLog, Colour, OwnerWord, Partition};
    use farfield_server::{Config, Server};

    fn word(block: u64) -> OwnerWord {
        OwnerWord::new(Partition::new(1).unwrap(), 16 * (1 + block), Colour(3)).unwrap()
    }

    fn write(region: &mut BackupRegion, log: &mut BackupLog, contents: &[u8]) -> Result<(), BackupError> {
        let mut batch = BackupBatch::default();
        batch.put(word(contents.len() as u64), contents);
        let place = log.append(&batch).or_else(|| log.checkpoint(&batch)).unwrap();
        region.write(log.commit(), &mut batch, place)?;
        log.advance(place).map_or(Ok(()), |unused| region.discard(unused))
    }

    fn server() -> Server {
        let server = Server::start(Config {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            functions: farfield_wic::Registry::standard(),
            ..Config::default()
        });
        server.unwrap()
    }

    /// Two servers, the backup at both, and its writer.
    struct Mirrored {
        servers: [Option<Server>; 2],
        access: BackupAccess,
        _sessions: BackupSessions,
        writer: BackupRegion,
        log: BackupLog,
    }

    impl Mirrored {
        fn new() -> Mirrored {
            let servers = [server(), server()];
            let [one, other] = servers.each_ref().map(|server| server.endpoints()[0].clone());
            let (access, sessions) = BackupAccess::create(&format!("mirror({one}, {other})"), "", 1 << 20).unwrap();
            assert_eq!(access.url(), format!("mirror({one},{other})"));
            let mut writer = access.open().unwrap();
            let log = BackupLog::new(writer.layout(), writer.commit_word().unwrap());
            Mirrored { servers: servers.map(Some), access, _sessions: sessions, writer, log }
        }

        fn shut_down(&mut self, server: usize) {
            self.servers[server].take().unwrap().shutdown(Duration::ZERO);
        }

        fn write(&mut self, contents: &[u8]) -> Result<(), BackupError> {
            write(&mut self.writer, &mut self.log, contents)
        }

        /// Opens the backup without one of its replicas.
        fn without(&self, lost: u8) -> BackupRegion {
            self.access.open_for_take_over(|number| number == lost).unwrap()
        }
    }

    fn contents(image: BackupImage) -> Vec<(usize, u8)> {
        image.objects.into_values().map(|(_, contents)| (contents.len(), contents[0])).collect()
    }

    #[test]
    fn a_backup_is_taken_over_from_any_of_its_servers() {
        for lost in [None, Some(0), Some(1)] {
            let mut backup = Mirrored::new();
            // Of a page, and of more than a lane takes at once.
            backup.write(&[1; 10]).unwrap();
            backup.write(&vec![2; 300_000]).unwrap();
            if let Some(lost) = lost {
                backup.shut_down(lost);
            }
            let mut second = backup.access.open_for_take_over(|_| false).unwrap();
            assert_eq!(
                contents(second.take_over(&BackupImage::default()).unwrap()),
                [(10, 1), (300_000, 2)],
                "without {lost:?}"
            );
            assert!(matches!(backup.write(&[3; 7]), Err(BackupError::Fenced)));
        }
    }

    #[test]
    fn one_fence_ends_the_writer_and_its_last_batch_is_whole_or_not_there() {
        for fenced in [0, 1] {
            let mut backup = Mirrored::new();
            backup.write(&[1; 10]).unwrap();
            // The other server cannot be reached by who takes the backup over.
            let image = backup.without(1 - fenced).take_over(&BackupImage::default()).unwrap();
            assert_eq!(contents(image), [(10, 1)]);
            assert!(matches!(backup.write(&[2; 20]), Err(BackupError::Fenced)), "it has one of two servers");
            assert!(backup.writer.take_lost().iter().any(|lost| lost.number == fenced));
        }
        for written in [0, 1] {
            let mut backup = Mirrored::new();
            backup.write(&[1; 10]).unwrap();
            // The writer dies when one of the servers has its batch.
            let mut half = backup.without(1 - written);
            write(&mut half, &mut backup.log, &[2; 20]).unwrap();
            let image =
                backup.access.open_for_take_over(|_| false).unwrap().take_over(&BackupImage::default()).unwrap();
            assert_eq!(contents(image), [(10, 1), (20, 2)], "it is at server {written}");
        }
    }

    #[test]
    fn the_writer_goes_on_with_the_servers_that_are_left() {
        let mut backup = Mirrored::new();
        backup.write(&[1; 10]).unwrap();
        backup.shut_down(0);
        backup.write(&[2; 20]).unwrap();
        let lost: Vec<_> = backup.writer.take_lost().into_iter().map(|lost| (lost.number, lost.url)).collect();
        assert_eq!(lost, [(0, backup.access.replicas[0].url.clone())]);
        assert_eq!(backup.writer.replicas(), 1);
        backup.write(&[3; 30]).unwrap();
        assert!(backup.writer.take_lost().is_empty());
        let image = backup.without(0).take_over(&BackupImage::default()).unwrap();
        assert_eq!(contents(image), [(10, 1), (20, 2), (30, 3)]);
        backup.shut_down(1);
        assert!(matches!(backup.write(&[4; 40]), Err(BackupError::Server(_) | BackupError::Fenced)));
        assert!(backup.access.open_for_take_over(|_| true).is_err());
    }

    #[test]
    fn a_writer_that_was_taken_over_stores_nothing_more_that_counts() {
        let server = server();
        let (access, kept) = BackupAccess::create(&server.endpoints()[0], "", 1 << 20).unwrap();
        let mut writer = access.open().unwrap();
        let mut log = BackupLog::new(writer.layout(), writer.commit_word().unwrap());
        // Batches of a page, of a transfer, and of several.
        let sizes = [10, 1 << 20, 5000, (1 << 20) + 4096 * 17, 0];
        for (size, number) in sizes.iter().zip(1u8..) {
            write(&mut writer, &mut log, &vec![number; *size]).unwrap();
        }
        // The last two began the other half; what was before is not among all objects here.
        let mut second = access.open().unwrap();
        let image = second.take_over(&BackupImage::default()).unwrap();
        let found: Vec<_> = image.objects.values().map(|(word, contents)| (*word, contents.len())).collect();
        assert_eq!(found, [(word(0), 0), (word(sizes[3] as u64), sizes[3])]);
        assert!(image.objects.values().all(|(_, contents)| contents.iter().all(|byte| *byte == 4)));
        // The writer was only slow. It is told, each time. Whoever comes second finds what the first one has found.
        for _ in 0..2 {
            assert!(matches!(write(&mut writer, &mut log, &[7; 7]), Err(BackupError::Fenced)));
        }
        let again = access.open().unwrap().take_over(&BackupImage::default()).unwrap();
        assert_eq!(again.objects, image.objects);
        assert!(access.open().unwrap().commit_word().unwrap().is_fenced());
        assert_eq!(format!("{access:?}"), format!("BackupAccess(at {})", server.endpoints()[0]), "it is a secret");
        drop(kept);
    }
}
