//! Backup of a node's objects in a region of a memory server, without I/O: a log of batches.
//!
//! ```text
//! page 0     commit word
//! half 0     batches, one behind the other, each from the beginning of a page
//! half 1     the same
//! ```
//!
//! A *batch* is what a node has to store before it sends a message (group commit): new contents of
//! objects, and words of objects that were freed. Its pages are written behind the batch before, in any
//! order. Then the commit word is exchanged for the next one, if it is still the one before: that is the
//! moment from which the batch counts. So a batch counts whole or not at all, and nothing that counts is
//! ever overwritten. If a half is full, the next batch has all objects and begins the other half (a
//! checkpoint).
//!
//! Whoever takes the backup over exchanges the commit word for one with the *fence*. No exchange of the
//! writer succeeds from then on, so a writer that was only slow sends nothing more; and what the fenced word
//! names is all that anybody was told.
//!
//! A node that keeps what another one had stored says in its own log what changes of that. So whoever takes
//! its backup over reads the other one's first, which does not change any more, and then this one
//! ([`super::MemberView::backups_of`]).

use super::{BlockKey, OwnerWord, StoredChannel, StoredLock, StoredMessage};
use crate::geometry::PAGE_BYTES;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Bytes of a batch before its entries: its number, and the bytes of its entries.
const HEADER_BYTES: usize = 16;
/// Number of bytes of an entry that frees an object.
const FREED: u64 = u64::MAX;
/// Mark of an entry that is a lock's, beside the number of its bytes.
const LOCK: u64 = 1 << 62;
/// Mark of an entry that is a channel's.
const CHANNEL: u64 = 1 << 61;
/// Mark of an entry that is a value's in a channel.
const MESSAGE: u64 = 1 << 60;
/// Mark of an entry that is a group's.
const GROUP: u64 = 1 << 59;
const MARKS: u64 = LOCK | CHANNEL | MESSAGE | GROUP;
/// Contents are aligned to this, in a batch.
const ALIGN: usize = 8;

/// Word of a backup that says up to which batch it counts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CommitWord(u64);

const FENCE: u64 = 1 << 63;
const SECOND_HALF: u64 = 1 << 62;

impl CommitWord {
    /// Offset of the word in the region, in bytes.
    pub const OFFSET: u64 = 0;

    /// Returns the word that has these bits.
    pub fn from_bits(bits: u64) -> CommitWord {
        CommitWord(bits)
    }

    /// Returns the bits of the word.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the word with the fence, which whoever takes the backup over exchanges for this one. `None`
    /// if somebody has taken it over.
    pub fn fenced(self) -> Option<CommitWord> {
        (!self.is_fenced()).then_some(CommitWord(self.0 | FENCE))
    }

    /// Returns whether somebody has taken the backup over.
    pub fn is_fenced(self) -> bool {
        self.0 & FENCE != 0
    }

    /// Returns the number of the last batch that counts; zero if none does.
    pub fn batch(self) -> u64 {
        self.0 & (SECOND_HALF - 1)
    }

    fn half(self) -> u64 {
        u64::from(self.0 & SECOND_HALF != 0)
    }

    fn next(self, half: u64) -> CommitWord {
        CommitWord((self.batch() + 1) | (half * SECOND_HALF))
    }
}

/// Where the batches of a backup are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackupLayout {
    half_pages: u64,
}

impl BackupLayout {
    /// Returns the layout for objects that take at most so many bytes with their blocks' headers.
    pub fn for_objects(bytes: u64) -> BackupLayout {
        // An object's entry is no larger than its block, so a checkpoint of objects takes half of a half at
        // most. A lock's entry has 8 bytes more, and 16 for each holder; that of a value in a channel has 16,
        // and that of a channel some 100.
        BackupLayout { half_pages: 2 * bytes.div_ceil(PAGE_BYTES as u64) + 2 }
    }

    /// Returns the number of pages of the region.
    pub fn pages(self) -> u64 {
        1 + 2 * self.half_pages
    }

    /// Returns the first page of the half that a commit word names.
    pub fn first_page(self, word: CommitWord) -> u64 {
        1 + word.half() * self.half_pages
    }

    /// Returns the page behind that half.
    pub fn end_page(self, word: CommitWord) -> u64 {
        self.first_page(word) + self.half_pages
    }
}

/// Where a batch is written, and what makes it count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchPlace {
    /// Page at which it begins.
    pub first_page: u64,
    /// Number of its pages.
    pub pages: u64,
    /// Commit word with it.
    pub commit: CommitWord,
    /// Whether it begins a half, and so has all objects.
    pub is_checkpoint: bool,
}

/// Log of a backup, as its writer knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackupLog {
    layout: BackupLayout,
    commit: CommitWord,
    /// Page behind the last batch.
    end: u64,
}

impl BackupLog {
    /// Creates the log of a region that has this commit word. If another writer has used it, the next batch
    /// is a checkpoint.
    pub fn new(layout: BackupLayout, commit: CommitWord) -> BackupLog {
        let end = if commit.batch() == 0 { layout.first_page(commit) } else { layout.end_page(commit) };
        BackupLog { layout, commit, end }
    }

    /// Returns the commit word without the next batch.
    pub fn commit(&self) -> CommitWord {
        self.commit
    }

    /// Returns where the next batch goes; `None` if the half has no room for it, so that a checkpoint is
    /// due.
    pub fn append(&self, batch: &BackupBatch) -> Option<BatchPlace> {
        let commit = self.commit.next(self.commit.half());
        let place = BatchPlace { first_page: self.end, pages: batch.pages(), commit, is_checkpoint: false };
        (place.first_page + place.pages <= self.layout.end_page(commit)).then_some(place)
    }

    /// Returns where a checkpoint goes: to the other half. `None` if it is too large.
    pub fn checkpoint(&self, batch: &BackupBatch) -> Option<BatchPlace> {
        let commit = self.commit.next(1 - self.commit.half());
        let (first_page, pages) = (self.layout.first_page(commit), batch.pages());
        let place = BatchPlace { first_page, pages, commit, is_checkpoint: true };
        (pages <= self.layout.half_pages).then_some(place)
    }

    /// Records that a batch counts. Returns the pages that hold nothing any more: the first one, and how
    /// many.
    pub fn advance(&mut self, place: BatchPlace) -> Option<(u64, u64)> {
        let before = self.layout.first_page(self.commit);
        let unused = (place.is_checkpoint && self.end > before).then_some((before, self.end - before));
        (self.commit, self.end) = (place.commit, place.first_page + place.pages);
        unused
    }
}

/// What is stored at a time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackupBatch {
    bytes: Vec<u8>,
}

impl Default for BackupBatch {
    fn default() -> BackupBatch {
        BackupBatch { bytes: alloc::vec![0; HEADER_BYTES] }
    }
}

impl BackupBatch {
    /// Adds the contents of an object.
    pub fn put(&mut self, word: OwnerWord, contents: &[u8]) {
        self.put_entry(word, 0, contents);
    }

    /// Adds an object with all that is tied to it, as it travels.
    pub fn put_group(&mut self, word: OwnerWord, contents: &[u8]) {
        self.put_entry(word, GROUP, contents);
    }

    /// Adds the state of a lock.
    pub fn put_lock(&mut self, word: OwnerWord, lock: &StoredLock) {
        self.put_entry(word, LOCK, &lock.encode());
    }

    /// Adds the state of a channel.
    pub fn put_channel(&mut self, word: OwnerWord, channel: &StoredChannel) {
        self.put_entry(word, CHANNEL, &channel.encode());
    }

    /// Adds a value of a channel.
    pub fn put_message(&mut self, word: OwnerWord, message: &StoredMessage) {
        self.put_entry(word, MESSAGE, &message.encode());
    }

    fn put_entry(&mut self, word: OwnerWord, mark: u64, contents: &[u8]) {
        self.entry(word, contents.len() as u64 | mark);
        self.bytes.extend_from_slice(contents);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
    }

    /// Adds that whatever has this word was freed.
    pub fn free(&mut self, word: OwnerWord) {
        self.entry(word, FREED);
    }

    fn entry(&mut self, word: OwnerWord, bytes: u64) {
        self.bytes.extend_from_slice(&word.bits().to_le_bytes());
        self.bytes.extend_from_slice(&bytes.to_le_bytes());
    }

    /// Returns whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.bytes.len() == HEADER_BYTES
    }

    /// Returns the number of its bytes.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn pages(&self) -> u64 {
        self.len().div_ceil(PAGE_BYTES as u64)
    }

    /// Returns its bytes as they are stored there.
    pub fn seal(&mut self, place: BatchPlace) -> &[u8] {
        let entries = (self.bytes.len() - HEADER_BYTES) as u64;
        self.bytes[..8].copy_from_slice(&place.commit.batch().to_le_bytes());
        self.bytes[8..HEADER_BYTES].copy_from_slice(&entries.to_le_bytes());
        &self.bytes
    }
}

/// Error: what was read is no batch of this backup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MalformedBatch;

/// Contents of a backup, by their blocks: what the batches say that count.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct BackupImage {
    /// Word and contents of each object.
    pub objects: BTreeMap<BlockKey, (OwnerWord, Vec<u8>)>,
    /// Word and contents of each group.
    pub groups: BTreeMap<BlockKey, (OwnerWord, Vec<u8>)>,
    /// Word and state of each lock.
    pub locks: BTreeMap<BlockKey, (OwnerWord, StoredLock)>,
    /// Word and state of each channel.
    pub channels: BTreeMap<BlockKey, (OwnerWord, StoredChannel)>,
    /// Word and contents of each value of a channel.
    pub messages: BTreeMap<BlockKey, (OwnerWord, StoredMessage)>,
}

impl BackupImage {
    /// Forgets all whose words are not meant.
    pub fn retain(&mut self, is_meant: impl Fn(OwnerWord) -> bool) {
        self.objects.retain(|_, (word, _)| is_meant(*word));
        self.groups.retain(|_, (word, _)| is_meant(*word));
        self.locks.retain(|_, (word, _)| is_meant(*word));
        self.channels.retain(|_, (word, _)| is_meant(*word));
        self.messages.retain(|_, (word, _)| is_meant(*word));
    }

    /// Adds a batch.
    fn apply(&mut self, mut entries: &[u8]) -> Result<(), MalformedBatch> {
        while !entries.is_empty() {
            let word = OwnerWord::from_bits(take_u64(&mut entries)?).ok_or(MalformedBatch)?;
            let bytes = take_u64(&mut entries)?;
            // Whatever has the block now, or nothing.
            let block = word.block();
            self.objects.remove(&block);
            self.groups.remove(&block);
            self.locks.remove(&block);
            self.channels.remove(&block);
            self.messages.remove(&block);
            if bytes == FREED {
                continue;
            }
            let len = usize::try_from(bytes & !MARKS).map_err(|_| MalformedBatch)?;
            let padded = len.checked_next_multiple_of(ALIGN).ok_or(MalformedBatch)?;
            let (contents, rest) = entries.split_at_checked(padded).ok_or(MalformedBatch)?;
            let contents = &contents[..len];
            match bytes & MARKS {
                0 => drop(self.objects.insert(block, (word, contents.to_vec()))),
                GROUP => drop(self.groups.insert(block, (word, contents.to_vec()))),
                LOCK => drop(self.locks.insert(block, (word, StoredLock::decode(contents)?))),
                CHANNEL => drop(self.channels.insert(block, (word, StoredChannel::decode(contents)?))),
                MESSAGE => drop(self.messages.insert(block, (word, StoredMessage::decode(contents)?))),
                _ => return Err(MalformedBatch),
            }
            entries = rest;
        }
        Ok(())
    }
}

pub(super) fn take_u64(bytes: &mut &[u8]) -> Result<u64, MalformedBatch> {
    let (first, rest) = bytes.split_first_chunk().ok_or(MalformedBatch)?;
    *bytes = rest;
    Ok(u64::from_le_bytes(*first))
}

/// Reader of a backup that was taken over. It is given the pages for which it asks.
#[derive(Debug)]
pub struct BackupReader {
    layout: BackupLayout,
    commit: CommitWord,
    /// Page of the next batch.
    next: u64,
    /// Number of the batch before; zero before the first one.
    before: u64,
    image: BackupImage,
}

/// What a reader needs next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackupReadStep {
    /// So many pages, from the first one on.
    Pages(u64, u64),
    /// Nothing: all batches were read.
    Done,
}

impl BackupReader {
    /// Begins to read up to the batch that the commit word names, on top of the backups that the writer had taken over.
    pub fn new(layout: BackupLayout, commit: CommitWord, taken_over: BackupImage) -> BackupReader {
        BackupReader { layout, commit, next: layout.first_page(commit), before: 0, image: taken_over }
    }

    /// Returns the pages of which the first is read next: the beginning of the next batch.
    pub fn poll_header(&self) -> BackupReadStep {
        if self.before == self.commit.batch() { BackupReadStep::Done } else { BackupReadStep::Pages(self.next, 1) }
    }

    /// Returns the pages of the batch that begins with this page.
    pub fn on_header(&self, page: &[u8]) -> Result<BackupReadStep, MalformedBatch> {
        let mut header = page;
        let (number, bytes) = (take_u64(&mut header)?, take_u64(&mut header)?);
        // The first batch of a half may have any number that counts.
        let is_next = if self.before == 0 { number > 0 } else { number == self.before + 1 };
        let pages = bytes.checked_add(HEADER_BYTES as u64).ok_or(MalformedBatch)?.div_ceil(PAGE_BYTES as u64);
        let fits = pages <= self.layout.end_page(self.commit) - self.next;
        if is_next && number <= self.commit.batch() && fits {
            Ok(BackupReadStep::Pages(self.next, pages))
        } else {
            Err(MalformedBatch)
        }
    }

    /// Takes the pages of a batch.
    pub fn on_batch(&mut self, pages: &[u8]) -> Result<(), MalformedBatch> {
        let BackupReadStep::Pages(_, expected) = self.on_header(pages)? else { return Err(MalformedBatch) };
        let mut entries = pages;
        let (number, bytes) = (take_u64(&mut entries)?, take_u64(&mut entries)?);
        let entries = usize::try_from(bytes).ok().and_then(|bytes| entries.get(..bytes)).ok_or(MalformedBatch)?;
        self.image.apply(entries)?;
        (self.before, self.next) = (number, self.next + expected);
        Ok(())
    }

    /// Returns the objects, after all batches were read.
    pub fn into_image(self) -> BackupImage {
        self.image
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsm::{Colour, HomeTicket, Partition};
    use crate::lock::LockMode;
    use alloc::vec;

    const PAGE: usize = PAGE_BYTES;

    fn word(block: u64, colour: u16) -> OwnerWord {
        OwnerWord::new(Partition::new(3).unwrap(), 16 * (1 + block), Colour(colour)).unwrap()
    }

    /// Memory of a server.
    #[derive(Clone)]
    struct Region(Vec<u8>);

    impl Region {
        fn new(layout: BackupLayout) -> Region {
            Region(vec![0; layout.pages() as usize * PAGE])
        }

        fn commit(&self) -> CommitWord {
            CommitWord::from_bits(u64::from_le_bytes(self.0[..8].try_into().unwrap()))
        }

        fn exchange(&mut self, current: CommitWord, new: CommitWord) -> bool {
            let is_done = self.commit() == current;
            if is_done {
                self.0[..8].copy_from_slice(&new.bits().to_le_bytes());
            }
            is_done
        }

        fn fence(&mut self) -> CommitWord {
            let before = self.commit();
            assert!(self.exchange(before, before.fenced().unwrap()));
            assert_eq!(self.commit().fenced(), None, "once");
            before
        }

        fn write_page(&mut self, place: BatchPlace, bytes: &[u8], page: usize) {
            let at = (place.first_page as usize + page) * PAGE;
            let part = &bytes[page * PAGE..bytes.len().min((page + 1) * PAGE)];
            self.0[at..at + part.len()].copy_from_slice(part);
        }

        fn read(&self, layout: BackupLayout, commit: CommitWord) -> Result<BackupImage, MalformedBatch> {
            let mut reader = BackupReader::new(layout, commit, BackupImage::default());
            let pages = |first: u64, count: u64| &self.0[first as usize * PAGE..(first + count) as usize * PAGE];
            while let BackupReadStep::Pages(first, count) = reader.poll_header() {
                let BackupReadStep::Pages(first, count) = reader.on_header(pages(first, count))? else {
                    unreachable!()
                };
                reader.on_batch(pages(first, count))?;
            }
            Ok(reader.into_image())
        }
    }

    /// What the objects are after each batch.
    fn story() -> Vec<(BackupBatch, BackupImage)> {
        let mut image = BackupImage::default();
        let mut story = Vec::new();
        // Block, colour and size of objects; none if it is freed. Batches of one to three pages.
        let batches: [&[(u64, u16, Option<usize>)]; 8] = [
            &[(1, 0, Some(8)), (2, 0, Some(100))],
            &[(3, 0, Some(5000))],
            &[(1, 1, Some(8)), (2, 0, None)],
            &[(3, 4, Some(7000)), (4, 0, Some(4000))],
            &[(3, 4, None), (4, 0, None), (2, 1, Some(33))],
            &[(5, 0, Some(1)), (1, 1, None), (1, 2, Some(8200))],
            &[(5, 7, Some(0))],
            &[(2, 9, Some(4096))],
        ];
        for (number, entries) in batches.iter().enumerate() {
            let mut batch = BackupBatch::default();
            for (block, colour, bytes) in *entries {
                let word = word(*block, *colour);
                match bytes {
                    Some(bytes) => {
                        let contents = vec![number as u8 + 1; *bytes];
                        batch.put(word, &contents);
                        image.objects.insert(word.block(), (word, contents));
                    }
                    None => {
                        batch.free(word);
                        image.objects.remove(&word.block());
                    }
                }
            }
            // A lock of which each batch has another state, and one that is freed.
            let (lock, other) = (word(6, 1), word(7, 1));
            let ticket = HomeTicket { node: 2, number: number as u64 };
            let holders = (0..number % 3).map(|_| (ticket, LockMode::Shared)).collect();
            let state = StoredLock { value: vec![number as u8; 9], holders, ..StoredLock::default() };
            batch.put_lock(lock, &state);
            image.locks.insert(lock.block(), (lock, state.clone()));
            if number % 2 == 0 {
                batch.put_lock(other, &state);
                image.locks.insert(other.block(), (other, state));
            } else {
                batch.free(other);
                image.locks.remove(&other.block());
            }
            // A group that gets longer, and is a plain object or nothing in between.
            let group = word(9, number as u16);
            image.groups.remove(&group.block());
            image.objects.remove(&group.block());
            let contents = vec![number as u8; 16 * number];
            match number % 3 {
                0 => batch.free(group),
                1 => {
                    batch.put_group(group, &contents);
                    image.groups.insert(group.block(), (group, contents));
                }
                _ => {
                    batch.put(group, &contents);
                    image.objects.insert(group.block(), (group, contents));
                }
            }
            // A channel to which each batch sends a value, and of which every third one is received.
            let (channel, value) = (word(8, 1), word(20 + number as u64, 1));
            let state = StoredChannel { bound: number as u64, ..StoredChannel::default() };
            batch.put_channel(channel, &state);
            image.channels.insert(channel.block(), (channel, state));
            let message = StoredMessage { channel, position: number as u64, value: vec![number as u8; 3] };
            batch.put_message(value, &message);
            image.messages.insert(value.block(), (value, message));
            if number % 3 == 2 {
                let received = word(18 + number as u64, 1);
                batch.free(received);
                image.messages.remove(&received.block());
            }
            story.push((batch, image.clone()));
        }
        story
    }

    fn checkpoint_of(image: &BackupImage) -> BackupBatch {
        let mut batch = BackupBatch::default();
        image.groups.values().for_each(|(word, contents)| batch.put_group(*word, contents));
        image.locks.values().for_each(|(word, lock)| batch.put_lock(*word, lock));
        image.channels.values().for_each(|(word, channel)| batch.put_channel(*word, channel));
        image.messages.values().for_each(|(word, message)| batch.put_message(*word, message));
        image.objects.values().for_each(|(word, contents)| batch.put(*word, contents));
        batch
    }

    /// Writes the story up to a batch, of which these pages arrive, and which counts or not. Returns what
    /// is left to be done.
    fn killed_at(layout: BackupLayout, last: usize, arrive: u32, counts: bool) -> (Region, BatchPlace, Vec<u8>) {
        let (mut region, mut log) = (Region::new(layout), BackupLog::new(layout, CommitWord::default()));
        for (number, (batch, image)) in story().into_iter().enumerate() {
            let (mut batch, place) = match log.append(&batch) {
                Some(place) => (batch, place),
                None => {
                    let all = checkpoint_of(&image);
                    let place = log.checkpoint(&all).unwrap();
                    (all, place)
                }
            };
            let bytes = batch.seal(place).to_vec();
            let is_last = number == last;
            for page in 0..place.pages as usize {
                if !is_last || arrive >> page & 1 == 1 {
                    region.write_page(place, &bytes, page);
                }
            }
            if !is_last || counts {
                assert!(region.exchange(log.commit(), place.commit));
            }
            if is_last {
                return (region, place, bytes);
            }
            log.advance(place);
        }
        unreachable!()
    }

    #[test]
    fn a_batch_is_whole_or_absent_wherever_the_kill_falls() {
        let story = story();
        let mut checkpoints = 0;
        // With halves of five pages some batches are checkpoints, with those of forty none is.
        for half_pages in [5, 6, 40] {
            let layout = BackupLayout { half_pages };
            for last in 0..story.len() {
                let pages = killed_at(layout, last, 0, false).1.pages;
                for (arrive, counts) in (0..1u32 << pages).flat_map(|arrive| [(arrive, false), (arrive, true)]) {
                    if counts && arrive + 1 < 1 << pages {
                        continue; // Pages are waited for before the exchange.
                    }
                    let (mut region, place, bytes) = killed_at(layout, last, arrive, counts);
                    checkpoints += u32::from(place.is_checkpoint);
                    let commit = region.fence();
                    let expected = match (counts, last) {
                        (true, _) => story[last].1.clone(),
                        (false, 0) => BackupImage::default(),
                        (false, _) => story[last - 1].1.clone(),
                    };
                    assert_eq!(region.read(layout, commit), Ok(expected.clone()), "{half_pages} {last} {arrive:b}");
                    // What was only on its way, or was sent by a writer that does not know of its end.
                    (0..place.pages as usize).for_each(|page| region.write_page(place, &bytes, page));
                    assert!(!region.exchange(commit, place.commit), "the writer is fenced");
                    assert!(region.commit().is_fenced());
                    assert_eq!(region.read(layout, commit), Ok(expected), "{half_pages} {last} {arrive:b}, late");
                }
            }
        }
        assert!(checkpoints > 10, "{checkpoints}");
    }

    #[test]
    fn a_second_writer_begins_anew() {
        let layout = BackupLayout { half_pages: 40 };
        let (mut region, ..) = killed_at(layout, 2, u32::MAX, true);
        let log = BackupLog::new(layout, region.commit());
        let mut batch = BackupBatch::default();
        batch.put(word(9, 9), &[9; 9]);
        assert_eq!(log.append(&batch), None);
        let place = log.checkpoint(&batch).unwrap();
        let bytes = batch.seal(place).to_vec();
        region.write_page(place, &bytes, 0);
        assert!(region.exchange(log.commit(), place.commit));
        let image = region.read(layout, region.commit()).unwrap();
        assert_eq!(image.objects.into_values().collect::<Vec<_>>(), [(word(9, 9), vec![9; 9])]);
    }

    #[test]
    fn pages_of_no_batch_are_refused() {
        let layout = BackupLayout { half_pages: 40 };
        let (region, ..) = killed_at(layout, 7, u32::MAX, true);
        let commit = region.commit();
        assert!(region.read(layout, commit).is_ok());
        // Every byte of a header and of an entry's header, and a batch that was never written.
        for byte in (PAGE..PAGE + HEADER_BYTES).chain([PAGE + HEADER_BYTES + 12]) {
            let mut region = region.clone();
            region.0[byte] ^= 0x80;
            assert_eq!(region.read(layout, commit), Err(MalformedBatch), "{byte}");
        }
        let beyond = CommitWord::from_bits(commit.bits() + 1);
        assert_eq!(region.read(layout, beyond), Err(MalformedBatch));
    }

    #[test]
    fn a_changed_batch_is_read_within_its_bounds_or_refused() {
        let layout = BackupLayout { half_pages: 40 };
        let (region, place, _) = killed_at(layout, 7, u32::MAX, true);
        let mut random = fastrand::Rng::with_seed(13);
        let end = (place.first_page + place.pages) as usize * PAGE;
        let mut refused = 0;
        for _ in 0..3000 {
            let mut region = region.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(PAGE..end);
                region.0[at] = random.u8(..);
                // Most bytes are contents, so one of a header is changed, too.
                let header = random.usize(1..end / PAGE) * PAGE + random.usize(..64);
                region.0[header] ^= 1 << random.u8(..8);
            }
            refused += u32::from(region.read(layout, region.commit()).is_err());
        }
        assert!(refused > 500, "{refused}");
    }

    #[test]
    fn checkpoints_of_all_objects_fit_and_leave_room() {
        for bytes in [0u64, 1, 4096, 1 << 20] {
            let layout = BackupLayout::for_objects(bytes);
            let mut batch = BackupBatch::default();
            // The smallest blocks: a header, and 16 bytes.
            (0..bytes / 32).for_each(|block| batch.put(word(block, 0), &[0; 16]));
            let mut log = BackupLog::new(layout, CommitWord::default());
            let place = log.checkpoint(&batch).unwrap();
            assert_eq!((place.first_page, log.advance(place)), (layout.end_page(CommitWord::default()), None));
            assert!(log.append(&batch).is_some(), "as much again");
            // Locks that nobody holds and values of channels take more, and fit, too.
            let (mut locks, mut messages) = (BackupBatch::default(), BackupBatch::default());
            let lock = StoredLock { value: vec![0; 16], ..StoredLock::default() };
            let message = StoredMessage { channel: word(0, 0), position: 0, value: vec![0; 16] };
            for block in 0..bytes / 32 {
                locks.put_lock(word(block, 0), &lock);
                messages.put_message(word(block, 0), &message);
            }
            assert!(log.checkpoint(&locks).is_some() && log.checkpoint(&messages).is_some());
        }
    }
}
