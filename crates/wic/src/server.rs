//! The place beside the memory: accesses complete at once.
//!
//! A function that runs alone runs to completion. When several run, each announces its next read
//! and lets the others have their turn, so that the processor prefetches the memory of all of them
//! meanwhile. A simulation works in the same way, but a random number decides how long each waits.

use crate::bounds::{check_lock, check_range, check_word};
use crate::executor::{ExecutorHost, SLEEP_MIN, StepMeter, WaitTicket};
use crate::{Fault, Fence, Memory, Place, RANGE_BYTES_MAX};
use arrayvec::ArrayVec;
use core::cell::{Cell, RefCell};
use core::ops::Deref;
use core::time::Duration;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::lock::{self, LockMode, LockRecord, LockReply};
use std::collections::VecDeque;

/// Time at which an access completes.
pub(crate) enum Pace {
    /// At once.
    Immediate,
    /// After the others had their turn.
    Prefetched,
    /// After a random number of turns.
    Dice(Dice),
}

/// Repeatable small random numbers (xorshift). They are written out, because a seed of a simulation
/// names one run, in every release.
pub(crate) struct Dice(Cell<u64>);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        // Seeds differ in few bits, and zero would stay zero.
        Dice(Cell::new(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1))
    }

    pub(crate) fn roll(&self, sides: u64) -> u64 {
        let mut state = self.0.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.0.set(state);
        state % sides
    }
}

/// Most bytes to be read next that are prefetched: more would evict each other from the caches.
const AHEAD_BYTES: usize = 8192;
/// Most accesses that are prefetched.
const AHEAD_MAX: usize = 16;

/// A place that has the memory.
pub(crate) struct ServerPlace<'m, M: Memory + ?Sized> {
    memory: &'m M,
    pace: Pace,
    meter: StepMeter,
    /// Next reads of the tasks that yielded in this sweep. They are announced together, so that
    /// the processor prefetches them side by side.
    wanted: RefCell<ArrayVec<(u64, usize), AHEAD_MAX>>,
    /// Free buffers.
    buffers: RefCell<Vec<Vec<u8>>>,
}

/// A buffer lent by the place.
pub(crate) struct BufferGuard<'p> {
    bytes: Vec<u8>,
    home: &'p RefCell<Vec<Vec<u8>>>,
}

impl Deref for BufferGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BufferGuard<'_> {
    fn drop(&mut self) {
        self.home.borrow_mut().push(core::mem::take(&mut self.bytes));
    }
}

impl<'m, M: Memory + ?Sized> ServerPlace<'m, M> {
    pub(crate) fn new(memory: &'m M, pace: Pace) -> ServerPlace<'m, M> {
        ServerPlace { memory, pace, meter: StepMeter::new(), wanted: RefCell::default(), buffers: RefCell::default() }
    }

    /// Takes the steps of an access, checks its range, and lets others run according to the pace.
    async fn begin(&self, offset: u64, len: usize) -> Result<(), Fault> {
        self.meter.step(len).await;
        check_range(self.memory.region_bytes(), offset, len)?;
        match &self.pace {
            Pace::Immediate => {}
            Pace::Prefetched => {
                // A hint: an access that finds no room goes without.
                let _ = self.wanted.borrow_mut().try_push((offset, len));
                self.meter.yield_now().await;
            }
            Pace::Dice(dice) => {
                for _ in 0..dice.roll(4) {
                    self.meter.yield_now().await;
                }
            }
        }
        Ok(())
    }
}

impl<M: Memory + ?Sized> ServerPlace<'_, M> {
    /// Changes a word atomically, if `change` returns a new value. Returns the word as it was.
    async fn change_word(&self, offset: u64, change: impl Fn(u64) -> Option<u64>) -> Result<u64, Fault> {
        self.begin(offset, size_of::<u64>()).await?;
        check_word(self.memory.region_bytes(), offset)?;
        let mut before = 0;
        self.memory.alone(&mut || {
            let mut bytes = [0; size_of::<u64>()];
            self.memory.read(offset, &mut bytes)?;
            before = u64::from_le_bytes(bytes);
            change(before).map_or(Ok(()), |after| self.memory.write(offset, &after.to_le_bytes()))
        })?;
        Ok(before)
    }

    fn lock_at(&self, offset: u64) -> Result<LockRecord, Fault> {
        let mut bytes = [0; LockRecord::BYTES];
        self.memory.read(offset, &mut bytes)?;
        LockRecord::decode(&bytes).ok_or(Fault::NoLock { offset })
    }

    fn step_lock(&self, offset: u64, ask: lock::LockRequest) -> Result<LockReply, Fault> {
        let mut result = LockReply::Over;
        self.memory.alone(&mut || {
            let before = self.lock_at(offset)?;
            let (after, reply) = before.step(self.memory.clock(), ask);
            result = reply;
            if after == before { Ok(()) } else { self.memory.write(offset, &after.encode()) }
        })?;
        // Behind a reader in the line there may be another one.
        let is_shared = |mode| matches!(result, LockReply::Yours { .. }) && mode == LockMode::Shared;
        match ask {
            lock::LockRequest::Release { .. } | lock::LockRequest::GiveUp { .. } => self.meter.free(offset),
            lock::LockRequest::Take { mode, .. } | lock::LockRequest::Look { mode, .. } if is_shared(mode) => {
                self.meter.free(offset)
            }
            _ => {}
        }
        Ok(result)
    }
}

impl<M: Memory + ?Sized> Place for ServerPlace<'_, M> {
    type Bytes<'p>
        = BufferGuard<'p>
    where
        Self: 'p;

    fn region_bytes(&self) -> u64 {
        self.memory.region_bytes()
    }

    async fn read<const N: usize>(&self, offset: u64) -> Result<[u8; N], Fault> {
        self.begin(offset, N).await?;
        let mut bytes = [0; N];
        self.memory.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    async fn read_range(&self, offset: u64, len: usize) -> Result<BufferGuard<'_>, Fault> {
        self.begin(offset, len).await?;
        let mut bytes = self.buffers.borrow_mut().pop().unwrap_or_default();
        bytes.resize(len, 0);
        let mut guard = BufferGuard { bytes, home: &self.buffers };
        self.memory.read(offset, &mut guard.bytes)?;
        Ok(guard)
    }

    async fn read_many<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), Fault> {
        if let Pace::Dice(_) = self.pace {
            for (offset, bytes) in offsets.iter().zip(into) {
                *bytes = self.read(*offset).await?;
            }
            return Ok(());
        }
        // The memory of the next elements is prefetched meanwhile, so no task need yield for
        // that.
        let ahead = AHEAD_BYTES.checked_div(N).map_or(1, |ahead| ahead.clamp(1, AHEAD_MAX));
        let announce = |offsets: &[u64]| {
            let inside = |offset: &u64| check_range(self.memory.region_bytes(), *offset, N).is_ok();
            let inside = offsets.iter().copied().filter(inside);
            self.memory.announce(&mut inside.map(|offset| (offset, N)));
        };
        announce(&offsets[..ahead.min(offsets.len())]);
        for (index, (offset, bytes)) in offsets.iter().zip(into).enumerate() {
            announce(offsets.get(index + ahead..=index + ahead).unwrap_or_default());
            self.meter.step(N).await;
            check_range(self.memory.region_bytes(), *offset, N)?;
            self.memory.read(*offset, bytes)?;
        }
        Ok(())
    }

    async fn load_many<const N: usize>(&self, offsets: &[u64], into: &mut [[u8; N]]) -> Result<(), Fault> {
        if let Pace::Dice(_) = self.pace {
            return self.read_many(offsets, into).await;
        }
        self.meter.step(size_of_val(into)).await;
        self.memory.load(offsets, N, into.as_flattened_mut())
    }

    async fn sums(&self, offset: u64, count: usize) -> Result<Vec<u64>, Fault> {
        self.meter.step(count * size_of::<u64>()).await;
        let mut sums = vec![0; count];
        self.memory.sums(offset, &mut sums)?;
        Ok(sums)
    }

    async fn matches(&self, offset: u64, sums: &[u64]) -> Result<bool, Fault> {
        for (sums, number) in sums.chunks(RANGE_BYTES_MAX / PAGE_BYTES).zip(0..) {
            self.meter.step(sums.len() * PAGE_BYTES).await;
            if !self.memory.matches(offset + number * RANGE_BYTES_MAX as u64, sums)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.begin(offset, bytes.len()).await?;
        self.memory.write(offset, bytes)
    }

    async fn compare_exchange(&self, offset: u64, current: u64, new: u64) -> Result<u64, Fault> {
        self.change_word(offset, |word| (word == current).then_some(new)).await
    }

    async fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, Fault> {
        self.change_word(offset, |word| Some(word.wrapping_add(add))).await
    }

    async fn write_fenced(&self, fence: Fence, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.begin(offset, bytes.len()).await?;
        check_lock(self.memory.region_bytes(), fence.lock)?;
        self.memory.alone(&mut || {
            let now = self.memory.clock();
            if !self.lock_at(fence.lock)?.is_held(now, fence.epoch, LockMode::Exclusive) {
                return Err(Fault::Fenced { offset: fence.lock });
            }
            self.memory.write(offset, bytes)
        })
    }

    async fn lock_step(&self, lock: u64, ask: lock::LockRequest) -> Result<LockReply, Fault> {
        self.begin(lock, LockRecord::BYTES).await?;
        check_lock(self.memory.region_bytes(), lock)?;
        self.step_lock(lock, ask)
    }

    fn give_back(&self, lock: u64, ask: lock::LockRequest) {
        // If this fails, the lease ends the holding.
        let _ = self.step_lock(lock, ask);
    }

    async fn pause(&self, time: Duration) {
        self.meter.step(0).await;
        match &self.pace {
            Pace::Dice(dice) => {
                for _ in 0..=dice.roll(4) {
                    self.meter.yield_now().await;
                }
            }
            _ if time.is_zero() => self.meter.yield_now().await,
            _ => self.meter.sleep_for(time, None).await,
        }
    }

    async fn pause_in_line(&self, lock: u64, ticket: u32, time: Duration) {
        match &self.pace {
            Pace::Dice(_) => self.pause(time).await,
            Pace::Immediate | Pace::Prefetched => {
                self.meter.step(0).await;
                self.meter.sleep_for(time.max(SLEEP_MIN), Some(WaitTicket { lock, ticket })).await;
            }
        }
    }

    fn now(&self) -> Duration {
        self.meter.elapsed()
    }

    async fn yield_now(&self) {
        self.meter.step(0).await;
        self.meter.yield_now().await;
    }
}

impl<M: Memory + ?Sized> ExecutorHost for ServerPlace<'_, M> {
    const CATCHES: bool = true;

    fn meter(&self) -> &StepMeter {
        &self.meter
    }

    fn turn(&self, ready: &mut VecDeque<u32>, _may_wait: Option<Duration>) -> bool {
        self.memory.turn();
        let mut wanted = self.wanted.borrow_mut();
        if !wanted.is_empty() {
            self.memory.announce(&mut wanted.drain(..));
        }
        if let Pace::Dice(dice) = &self.pace {
            for last in (1..ready.len()).rev() {
                ready.swap(last, dice.roll(last as u64 + 1) as usize);
            }
        }
        false
    }

    fn sleep(&self, time: Duration) {
        self.memory.rest();
        // A sleep takes some 50 µs longer than it should.
        if time < SLEEP_MIN { std::thread::yield_now() } else { std::thread::sleep(time) }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against who waits for a lock beside the memory and is not notified when it is given
    //! back, or not in the order of the line.
    use super::*;
    use crate::columns::{Indices, Take, Taken};
    use crate::executor::{self, Budget, NewTask};
    use crate::{Function, Range, Stop, WicLock};
    use farfield_core::lock::LockRequest;
    use std::future::Future;
    use std::pin::Pin;
    use std::time::Instant;

    struct Plain(RefCell<Vec<u8>>);

    impl Memory for Plain {
        fn region_bytes(&self) -> u64 {
            self.0.borrow().len() as u64
        }

        fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
            into.copy_from_slice(&self.0.borrow()[offset as usize..][..into.len()]);
            Ok(())
        }

        fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
            self.0.borrow_mut()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
            work()
        }

        fn clock(&self) -> u64 {
            1
        }
    }

    type Task<'t> = Pin<Box<dyn Future<Output = Result<(), Fault>> + 't>>;

    fn run<'t, M: Memory>(place: &ServerPlace<'_, M>, tasks: Vec<Task<'t>>) -> Vec<Result<(), Stop>> {
        let budget = Budget { steps_max: 1 << 20, until: Instant::now().checked_add(Duration::from_secs(60)) };
        let (mut tasks, mut ends) = (tasks.into_iter().enumerate(), Vec::new());
        let next = || tasks.next().map(|(id, future)| NewTask { id, future, budget });
        let mut slots: Vec<_> = (0..16).map(|_| Box::pin(None)).collect();
        executor::run(place, &mut slots, next, |_, end, _| ends.push(end));
        ends
    }

    /// What it loads is of no page that ever was.
    struct Torn(Plain);

    impl Memory for Torn {
        fn region_bytes(&self) -> u64 {
            self.0.region_bytes()
        }

        fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
            self.0.read(offset, into)
        }

        fn load(&self, _offsets: &[u64], _each: usize, into: &mut [u8]) -> Result<(), Fault> {
            into.fill(0xEE);
            Ok(())
        }

        fn matches(&self, _offset: u64, _sums: &[u64]) -> Result<bool, Fault> {
            Ok(false)
        }

        fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
            self.0.write(offset, bytes)
        }

        fn alone(&self, work: &mut dyn FnMut() -> Result<(), Fault>) -> Result<(), Fault> {
            self.0.alone(work)
        }

        fn clock(&self) -> u64 {
            self.0.clock()
        }
    }

    #[test]
    fn elements_of_pages_that_do_not_match_are_read_once_more() {
        let (count, page) = (512u64, PAGE_BYTES as u64);
        let bytes: Vec<u8> = (0..4 * count).flat_map(|word| (word * word).to_le_bytes()).collect();
        let memory = Torn(Plain(RefCell::new(bytes)));
        let place = ServerPlace::new(&memory, Pace::Immediate);
        let indices: Vec<u64> = (0..2 * count).map(|index| index * 5 % count).collect();
        let taken = Taken {
            from: vec![Range { offset: page, count }],
            indices: vec![Indices::These(indices.clone())],
            to: vec![Range { offset: 2 * page, count: 2 }],
        };
        let take = async {
            assert_eq!(Take::<8>::run(&place, taken).await?, None);
            Ok(())
        };
        assert_eq!(run(&place, vec![Box::pin(take)]), [Ok(())]);
        let after = memory.0.0.borrow();
        let words = after[2 * PAGE_BYTES..].as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        assert!(words.eq(indices.iter().map(|index| (count + index).pow(2))));
    }

    #[test]
    fn the_first_waiter_is_notified_when_a_lock_is_released() {
        const HOUR: Duration = Duration::from_secs(3600);
        let memory = Plain(RefCell::new(vec![0; 4096]));
        let place = ServerPlace::new(&memory, Pace::Prefetched);
        let order = RefCell::new(Vec::new());
        let (place, order) = (&place, &order);
        let wait = |lock: u64, ticket: u32| -> Task<'_> {
            Box::pin(async move {
                place.pause_in_line(lock, ticket, HOUR).await;
                order.borrow_mut().push((lock, ticket));
                Ok(())
            })
        };
        let hold = async move {
            for lock in [0, 64, 0] {
                WicLock::at(lock).lock(place).await?.unlock().await?;
                place.yield_now().await;
                place.yield_now().await;
            }
            // One that reads lets the next one look, too; and so does one that waits no more.
            let _held = WicLock::at(64).read(place).await?;
            place.yield_now().await;
            place.give_back(0, LockRequest::GiveUp { ticket: 9 });
            Ok(())
        };
        // Tickets begin anew behind the last one.
        let waiting = [wait(0, 7), wait(64, 3), wait(0, u32::MAX), wait(64, 2), wait(0, 8)];
        let ends = run(place, waiting.into_iter().chain([Box::pin(hold) as Task<'_>]).collect());
        assert_eq!(ends, vec![Ok(()); 6]);
        assert_eq!(*order.borrow(), [(0, u32::MAX), (64, 2), (0, 7), (64, 3), (0, 8)]);
    }

    #[test]
    fn many_that_want_a_lock_have_it_one_after_the_other() {
        let memory = Plain(RefCell::new(vec![0; 4096]));
        let place = &ServerPlace::new(&memory, Pace::Prefetched);
        let add = |_| -> Task<'_> {
            Box::pin(async move {
                let held = WicLock::at(0).lock(place).await?;
                let before = place.read_u64(64).await?;
                held.write_u64(64, before + 1).await?;
                held.unlock().await
            })
        };
        assert_eq!(run(place, (0..500).map(add).collect()), vec![Ok(()); 500]);
        assert_eq!(memory.0.borrow()[64..72], 500u64.to_le_bytes());
    }
}
