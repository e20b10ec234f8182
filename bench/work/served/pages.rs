//! Pages of a region, read and written one-sided through a lane by one who is alone with them.

use super::{DEADLINE, PAGE_BYTES, word};
use anyhow::{Context, Result, anyhow};
use farfield_core::PageId;
use farfield_pool::{Backend, Buffer, Completion, Lane, LaneRequest, Op, Priority};
use std::sync::Arc;

/// See the module. Pages that were read stay until [`Pages::forget`].
pub(super) struct Pages {
    /// Lives as long as its lane.
    _backend: Arc<dyn Backend>,
    lane: Box<dyn Lane>,
    done: Vec<Completion>,
    here: Vec<(u64, Buffer)>,
    spare: Vec<Buffer>,
}

impl Pages {
    pub(super) fn open(backend: Arc<dyn Backend>) -> Result<Pages> {
        let lane = backend.open_lane()?;
        Ok(Pages { _backend: backend, lane, done: Vec::with_capacity(2), here: Vec::new(), spare: Vec::new() })
    }

    /// Others may have come to be what they are: they are read again.
    pub(super) fn forget(&mut self) {
        self.spare.extend(self.here.drain(..).map(|(_, buffer)| buffer));
    }

    /// Brings the pages of these offsets that are not here, all on their way at once.
    pub(super) fn bring(&mut self, offsets: &[u64]) -> Result<()> {
        let mut under_way = 0;
        for (number, offset) in offsets.iter().enumerate() {
            let page = offset / PAGE_BYTES;
            let is_asked = offsets[..number].iter().any(|before| before / PAGE_BYTES == page);
            if is_asked || self.here.iter().any(|(here, _)| *here == page) {
                continue;
            }
            let buffer = self.spare.pop().unwrap_or_else(|| Buffer::new(1));
            self.submit(page, Op::Read { page: PageId(page), buffer })?;
            under_way += 1;
        }
        while under_way > 0 {
            if self.lane.poll(&mut self.done) == 0 {
                self.lane.wait(DEADLINE);
            }
            for completion in self.done.drain(..) {
                completion.result?;
                let buffer = completion.buffer.context("the buffer of a read comes back")?;
                self.here.push((completion.tag, buffer));
                under_way -= 1;
            }
        }
        Ok(())
    }

    /// Words at an offset, inside a page.
    pub(super) fn read<const N: usize>(&mut self, offset: u64) -> Result<[u64; N]> {
        self.bring(&[offset])?;
        let (_, buffer) = self.here.iter().find(|(page, _)| *page == offset / PAGE_BYTES).context("just brought")?;
        let bytes = &buffer.page(0)[(offset % PAGE_BYTES) as usize..][..N * 8];
        Ok(std::array::from_fn(|index| word(bytes, index)))
    }

    /// Changes words at an offset, inside a page, and writes the page.
    pub(super) fn write<const N: usize>(&mut self, offset: u64, words: [u64; N]) -> Result<()> {
        self.bring(&[offset])?;
        let page = offset / PAGE_BYTES;
        let index = self.here.iter().position(|(here, _)| *here == page).context("just brought")?;
        let (_, mut buffer) = self.here.swap_remove(index);
        let bytes = &mut buffer.page_mut(0)[(offset % PAGE_BYTES) as usize..][..N * 8];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        buffer.seal();
        self.submit(page, Op::Write { page: PageId(page), buffer })?;
        while self.lane.poll(&mut self.done) == 0 {
            self.lane.wait(DEADLINE);
        }
        let completion = self.done.pop().context("it has ended")?;
        completion.result?;
        self.here.push((page, completion.buffer.context("the buffer of a write comes back")?));
        Ok(())
    }

    /// Words that lie in any number of pages.
    pub(super) fn words(&mut self, offset: u64, count: u64) -> Result<Vec<u64>> {
        let mut words = Vec::with_capacity(count as usize);
        for at in (offset..offset + count * 8).step_by(8) {
            if at % PAGE_BYTES == 0 {
                self.forget();
            }
            words.extend(self.read::<1>(at)?);
        }
        self.forget();
        Ok(words)
    }

    fn submit(&mut self, tag: u64, op: Op) -> Result<()> {
        let request = LaneRequest { tag, priority: Priority::Demand, deadline: DEADLINE, op };
        self.lane.submit(request).map_err(|_| anyhow!("the lane is full"))
    }
}
