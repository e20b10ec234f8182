//! Lane to compressed pages: submitted operations end at the next polls, demand first.

use super::pack::{self, PackStep, Packer};
use super::{COMPRESSED_MAX, EncodedHeader, PageEncoding, Region};
use crate::contract::backend::hand_over;
use crate::{Buffer, Completion, Lane, LaneRequest, Op, PoolError, Priority};
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::{PageId, checksum};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most operations of one lane that may be submitted and not yet collected.
const SLOTS: usize = 256;
/// Number of tries to read a page that changes again and again meanwhile.
const TRIES: u32 = 8;

/// Lane to the compressed pages of a region.
pub(super) struct LzLane {
    region: Arc<Region>,
    demand: VecDeque<LaneRequest>,
    background: VecDeque<LaneRequest>,
    ended: VecDeque<Completion>,
    /// Stored bytes of the page that is read.
    kept: Box<[u8; PAGE_BYTES]>,
    /// Compressed bytes of the page that is written.
    compressed: Box<[u8]>,
    table: CompressTable,
    packer: Packer,
    zero_sum: u64,
}

impl LzLane {
    pub(super) fn new(region: Arc<Region>) -> LzLane {
        LzLane {
            region,
            demand: VecDeque::with_capacity(SLOTS),
            background: VecDeque::with_capacity(SLOTS),
            ended: VecDeque::with_capacity(SLOTS),
            kept: Box::new([0; PAGE_BYTES]),
            compressed: vec![0; get_maximum_output_size(PAGE_BYTES)].into_boxed_slice(),
            table: CompressTable::small(),
            packer: Packer::new(),
            zero_sum: checksum(&[0; PAGE_BYTES]),
        }
    }

    fn read(&mut self, page: PageId, buffer: &mut Buffer) -> Result<(), PoolError> {
        self.region.check(page, buffer.pages() as u64)?;
        (0..buffer.pages()).try_for_each(|index| self.read_page(page.0 + index as u64, index, buffer))
    }

    fn read_page(&mut self, page: u64, index: usize, buffer: &mut Buffer) -> Result<(), PoolError> {
        for _ in 0..TRIES {
            let Some(header) = self.region.copy(page, &mut self.kept) else {
                buffer.page_mut(index).fill(0);
                buffer.sums_mut()[index] = self.zero_sum;
                return Ok(());
            };
            let target = buffer.page_mut(index);
            if self.packer.unpacker.unpack(header, &self.kept[..header.bytes], target) && checksum(target) == header.sum
            {
                self.region.is_used(page);
                buffer.sums_mut()[index] = header.sum;
                return Ok(());
            }
        }
        Err(PoolError::Corrupt { page: PageId(page), server: self.region.server })
    }

    fn write(&mut self, page: PageId, buffer: &Buffer) -> Result<(), PoolError> {
        self.region.check(page, buffer.pages() as u64)?;
        (0..buffer.pages())
            .try_for_each(|index| self.write_page(page.0 + index as u64, buffer.page(index), buffer.sums()[index]))
    }

    fn write_page(&mut self, page: u64, bytes: &[u8], sum: u64) -> Result<(), PoolError> {
        let words = bytes.as_chunks::<8>().0;
        let is_repeated = words.iter().all(|word| *word == words[0]);
        if is_repeated && words[0] == [0; 8] {
            self.region.publish(page, None);
            return Ok(());
        }
        let (form, kept) = if is_repeated {
            (PageEncoding::Repeated, &words[0][..])
        } else {
            match compress_into_with_table(bytes, &mut self.compressed, &mut self.table) {
                Ok(len) if len <= COMPRESSED_MAX => (PageEncoding::Lz4, &self.compressed[..len]),
                _ => (PageEncoding::Raw, bytes),
            }
        };
        let header = EncodedHeader::new(sum, form, kept.len());
        let mut unit = self.region.keep(header, kept);
        for _ in 0..pack::STEPS_WHEN_FULL {
            if unit.is_ok() {
                break;
            }
            match self.packer.step(&self.region) {
                PackStep::Packed => unit = self.region.keep(header, kept),
                PackStep::Passed => {}
                PackStep::Exhausted => break,
            }
        }
        self.region.publish(page, Some(unit?));
        if self.region.is_scarce() {
            self.packer.step(&self.region);
        }
        Ok(())
    }

    fn work_on(&mut self, request: LaneRequest) {
        let (result, buffer) = match request.op {
            Op::Read { page, mut buffer } | Op::ReadPart { page, mut buffer, .. } => {
                (self.read(page, &mut buffer), Some(buffer))
            }
            Op::Write { page, buffer } => (self.write(page, &buffer), Some(buffer)),
            Op::Discard { page, count } => (self.region.discard(page, count), None),
        };
        self.ended.push_back(Completion { tag: request.tag, result, buffer });
    }
}

impl Lane for LzLane {
    fn submit(&mut self, request: LaneRequest) -> Result<(), LaneRequest> {
        if self.in_flight() >= SLOTS {
            return Err(request);
        }
        match request.priority {
            Priority::Demand => self.demand.push_back(request),
            Priority::Background => self.background.push_back(request),
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> usize {
        while let Some(request) = self.demand.pop_front() {
            self.work_on(request);
        }
        // A caller that waits for a demand read does not wait for these.
        if self.ended.is_empty()
            && let Some(request) = self.background.pop_front()
        {
            self.work_on(request);
        }
        hand_over(&mut self.ended, done)
    }

    fn in_flight(&self) -> usize {
        self.demand.len() + self.background.len() + self.ended.len()
    }

    fn wait(&mut self, _timeout: Duration) {
        // Submitted operations end at the next polls.
    }
}
