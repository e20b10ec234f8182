//! Functions, and regions for them.

pub(crate) use super::list::*;

use super::PATIENCE;
use farfield_core::PageId;
use farfield_core::geometry::PAGE_BYTES;
use farfield_pool::{Backend, Buffer, Op, PoolBuilder, PoolError, Priority};
use farfield_wic::Where;
use std::sync::Arc;

pub(crate) const PAGES: u64 = 64;
pub(crate) const BYTES: u64 = PAGES * PAGE_BYTES as u64;
pub(crate) const EVERYWHERE: [Where; 2] = [Where::Client, Where::Server];

macro_rules! function {
    ($(#[$doc:meta])* $name:ident: $argument:ty => $answer:ty, |$place:ident, $given:ident| $body:block) => {
        $(#[$doc])*
        struct $name;
        impl Function for $name {
            const NAME: &'static str = stringify!($name);
            const VERSION: u32 = 1;
            type Argument = $argument;
            type Answer = $answer;
            async fn run<P: Place>($place: &P, $given: $argument) -> Result<$answer, Fault> $body
        }
    };
}

pub(crate) use function;

pub(crate) fn open(url: &str) -> Arc<dyn Backend> {
    let url = url.replace("unix:", "shm:");
    PoolBuilder::new().url(url).pages(PAGES).client_name("calls").deadline(PATIENCE).open().unwrap()
}

/// One operation on a lane of its own.
pub(crate) fn operate(backend: &dyn Backend, op: Op) -> Result<Option<Buffer>, PoolError> {
    let mut lane = backend.open_lane()?;
    let request = farfield_pool::LaneRequest { tag: 0, priority: Priority::Demand, deadline: PATIENCE, op };
    lane.submit(request).unwrap();
    let mut done = Vec::with_capacity(1);
    while lane.poll(&mut done) == 0 {
        lane.wait(PATIENCE);
    }
    let ended = done.remove(0);
    ended.result.map(|()| ended.buffer)
}

/// Makes these the bytes of the region.
pub(crate) fn fill(backend: &dyn Backend, bytes: &[u8]) {
    for (index, part) in bytes.chunks(16 * PAGE_BYTES).enumerate() {
        let mut buffer = Buffer::new(part.len() / PAGE_BYTES);
        buffer.bytes_mut().copy_from_slice(part);
        buffer.seal();
        operate(backend, Op::Write { page: PageId(index as u64 * 16), buffer }).unwrap();
    }
}

pub(crate) fn contents(backend: &dyn Backend) -> Vec<u8> {
    let mut bytes = Vec::new();
    for page in (0..PAGES).step_by(16) {
        let buffer = operate(backend, Op::Read { page: PageId(page), buffer: Buffer::new(16) }).unwrap().unwrap();
        bytes.extend_from_slice(buffer.bytes());
    }
    bytes
}

pub(crate) fn put(bytes: &mut [u8], offset: u64, word: u64) {
    bytes[offset as usize..][..8].copy_from_slice(&word.to_le_bytes());
}

pub(crate) fn word(bytes: &[u8], offset: u64) -> Option<u64> {
    let bytes = bytes.get(usize::try_from(offset).ok()?..)?.first_chunk::<8>()?;
    Some(u64::from_le_bytes(*bytes))
}
