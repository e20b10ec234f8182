//! Region of a memory server that keeps the backup of one node. [`farfield_core::dsm::BackupLog`] says what
//! is where in it.
//!
//! The first process opens the region of each other node, and keeps its session open: the region is there
//! as long as the program. The node is given the right to it (`farfield_pool::Share`), and writes alone.
//! After the node's death the first process sets the fence, and reads.

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

/// Right to the region of a node's backup.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupAccess {
    url: String,
    token: String,
    share: String,
    /// Bytes of objects for which the region has room.
    pub(crate) object_bytes: u64,
}

impl core::fmt::Debug for BackupAccess {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Token and share are secrets.
        write!(f, "BackupAccess(at {})", self.url)
    }
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
    fn pages(&mut self, region: &mut BackupRegion, first: u64, count: u64, end: u64) -> Result<&[u8], BackupError> {
        let has = self.bytes.len() as u64 / PAGE_BYTES as u64;
        if first < self.first || first + count > self.first + has {
            let ahead = RUN_PAGES.min(end.saturating_sub(first));
            (self.first, self.bytes) = (first, region.read(first, count.max(ahead))?);
        }
        let start = (first - self.first) as usize * PAGE_BYTES;
        self.bytes.get(start..start + count as usize * PAGE_BYTES).ok_or(BackupError::Malformed)
    }
}

/// Region of a backup, open.
pub(crate) struct BackupRegion {
    layout: BackupLayout,
    lane: Box<dyn Lane>,
    calls: Box<dyn CallChannel>,
    /// Buffer of one page, for the many small batches.
    page: Option<Buffer>,
    _backend: Arc<dyn Backend>,
}

impl BackupAccess {
    /// Opens a new region at a memory server. It is there as long as what is returned with it.
    pub(crate) fn create(
        url: &str,
        token: &str,
        object_bytes: u64,
    ) -> Result<(BackupAccess, Arc<dyn Backend>), NodeStartError> {
        let failed = |problem: String| NodeStartError::Backup { url: url.to_owned(), problem };
        let builder = PoolBuilder::new().url(url).token(token).client_name("share-backup").deadline(WITHIN);
        let pages = BackupLayout::for_objects(object_bytes).pages();
        let backend = builder.clone().pages(pages).open().map_err(|error| failed(error.to_string()))?;
        let one_server = "a backup is kept by one memory server: write tcp://HOST:PORT or unix:PATH";
        let share = backend.share().map_err(|_| failed(one_server.into()))?;
        let access = BackupAccess { url: url.into(), token: token.into(), share: share.to_secret(), object_bytes };
        // As the node will.
        let mut region = access.open().map_err(|error| failed(format!("{error}: {one_server}")))?;
        region.commit_word().map_err(|error| failed(error.to_string()))?;
        Ok((access, backend))
    }

    /// Returns the URL of the memory server.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    fn layout(&self) -> BackupLayout {
        BackupLayout::for_objects(self.object_bytes)
    }

    /// Opens the region for its only writer, or for whoever takes it over.
    pub(crate) fn open(&self) -> Result<BackupRegion, BackupError> {
        let share = Share::from_secret(&self.share).ok_or(BackupError::Malformed)?;
        let builder = PoolBuilder::new().url(&*self.url).token(&*self.token).client_name("share-backup");
        let backend = builder.deadline(WITHIN).attach(&share).map_err(BackupError::server)?;
        let lane = backend.open_lane().map_err(BackupError::server)?;
        let calls = backend.open_calls().map_err(BackupError::server)?;
        Ok(BackupRegion { layout: self.layout(), lane, calls, page: None, _backend: backend })
    }
}

impl BackupRegion {
    pub(crate) fn layout(&self) -> BackupLayout {
        self.layout
    }

    /// Stores a batch and has it count. Returns when it does.
    pub(crate) fn write(
        &mut self,
        before: CommitWord,
        batch: &mut BackupBatch,
        place: BatchPlace,
    ) -> Result<(), BackupError> {
        let bytes = batch.seal(place);
        let mut pages = bytes.chunks(TRANSFER_PAGES as usize * PAGE_BYTES).zip(0u64..);
        self.transfer(|region| {
            let (part, index) = pages.next()?;
            let mut buffer = region.buffer(part.len().div_ceil(PAGE_BYTES));
            let (contents, rest) = buffer.bytes_mut().split_at_mut(part.len());
            contents.copy_from_slice(part);
            rest.fill(0);
            buffer.seal();
            Some(Op::Write { page: PageId(place.first_page + index * TRANSFER_PAGES), buffer })
        })?;
        match self.exchange(before, place.commit)? {
            found if found == before => Ok(()),
            found if found.is_fenced() => Err(BackupError::Fenced),
            _ => Err(BackupError::Malformed),
        }
    }

    /// Frees pages that hold nothing any more.
    pub(crate) fn discard(&mut self, (first, count): (u64, u64)) -> Result<(), BackupError> {
        let mut op = Some(Op::Discard { page: PageId(first), count });
        self.transfer(|_| op.take()).map(drop)
    }

    /// Returns the commit word.
    pub(crate) fn commit_word(&mut self) -> Result<CommitWord, BackupError> {
        let word = self.ask(&Ask::Add { offset: CommitWord::OFFSET, add: 0 })?;
        Ok(CommitWord::from_bits(word))
    }

    /// Takes the backup over, and returns what it holds. Its writer stores nothing more that counts.
    pub(crate) fn take_over(&mut self) -> Result<BackupImage, BackupError> {
        let commit = self.set_fence()?;
        let mut reader = BackupReader::new(self.layout, commit);
        let end = self.layout.end_page(commit);
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

    /// Sets the fence. Returns the commit word as it was.
    fn set_fence(&mut self) -> Result<CommitWord, BackupError> {
        let until = Instant::now() + WITHIN;
        loop {
            let word = self.commit_word()?;
            let fenced = word.fenced().ok_or(BackupError::Fenced)?;
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
        let (offset, current, new) = (CommitWord::OFFSET, current.bits(), new.bits());
        self.ask(&Ask::Exchange { offset, current, new }).map(CommitWord::from_bits)
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
    fn transfer(&mut self, mut next: impl FnMut(&mut BackupRegion) -> Option<Op>) -> Result<Vec<Buffer>, BackupError> {
        let (mut buffers, mut tag, mut failed) = (Vec::new(), 0, None);
        let mut done: Vec<Completion> = Vec::with_capacity(TRANSFER_PAGES as usize);
        let mut refused = None;
        loop {
            while failed.is_none() {
                let request = match refused.take() {
                    Some(request) => request,
                    None => match next(self) {
                        Some(op) => {
                            tag += 1;
                            LaneRequest { tag: tag - 1, priority: Priority::Demand, deadline: WITHIN, op }
                        }
                        None => break,
                    },
                };
                if let Err(request) = self.lane.submit(request) {
                    refused = Some(request);
                    break;
                }
            }
            self.lane.poll(&mut done);
            for Completion { tag, result, buffer } in done.drain(..) {
                failed = failed.or(result.err());
                buffers.extend(buffer.map(|buffer| (tag, buffer)));
            }
            if self.lane.in_flight() == 0 && (refused.is_none() || failed.is_some()) {
                break;
            }
            self.lane.wait(WITHIN);
        }
        if let Some(error) = failed {
            return Err(BackupError::server(error));
        }
        buffers.sort_by_key(|(tag, _)| *tag);
        Ok(buffers.into_iter().map(|(_, buffer)| buffer).collect())
    }

    /// Has the server make a step of a word, and returns the word as it was.
    fn ask(&mut self, ask: &Ask) -> Result<u64, BackupError> {
        let argument = postcard::to_allocvec(ask).map_err(BackupError::server)?;
        let (name, version) = (Access::NAME, Access::VERSION);
        let call = FarCall { tag: 0, deadline: WITHIN, steps_max: 0, name, version, argument };
        self.calls.submit(call).map_err(|_| BackupError::Server("the channel is full".into()))?;
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

    #[test]
    fn a_writer_that_was_taken_over_stores_nothing_more_that_counts() {
        let server = Server::start(Config {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            functions: farfield_wic::Registry::standard(),
            ..Config::default()
        });
        let server = server.unwrap();
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
        let image = second.take_over().unwrap();
        let found: Vec<_> = image.objects.values().map(|(word, contents)| (*word, contents.len())).collect();
        assert_eq!(found, [(word(0), 0), (word(sizes[3] as u64), sizes[3])]);
        assert!(image.objects.values().all(|(_, contents)| contents.iter().all(|byte| *byte == 4)));
        // The writer was only slow. It is told, each time, and so is whoever comes second.
        for _ in 0..2 {
            assert!(matches!(write(&mut writer, &mut log, &[7; 7]), Err(BackupError::Fenced)));
        }
        assert!(matches!(access.open().unwrap().take_over(), Err(BackupError::Fenced)));
        assert!(second.commit_word().unwrap().is_fenced());
        assert_eq!(format!("{access:?}"), format!("BackupAccess(at {})", server.endpoints()[0]), "it is a secret");
        drop(kept);
    }
}
