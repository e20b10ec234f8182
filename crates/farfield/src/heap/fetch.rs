//! Bringing units near, with or without waiting for them.
//!
//! A fetch begins with `Core::launch`: the unit's page becomes Fetching, and a flight of the thread's lane owns it. It ends with
//! `Core::land`, by whoever polls the lane: its thread at its next miss, or any thread that waits for a page (`help`).

use super::evictor::Urgency;
use super::frames::Purse;
use super::io::{Flight, Io, Landing, Part};
use super::threads::{Record, add, count};
use super::{Core, Patience};
use crate::error::FarError;
use core::sync::atomic::Ordering;
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Deref, FrameId, FrameWord, State};
use farfield_pool::{PoolError, Priority};
use std::sync::{MutexGuard, PoisonError, TryLockError};

impl Core {
    /// Begins to bring units near, and does not wait; how many are on their way now that were not. No errors: whoever needs one
    /// asks again. For a page of far values that live.
    pub(crate) fn prefetch(&self, record: &Record, pages: impl IntoIterator<Item = u32>) -> u32 {
        if self.frames.room() < self.reserve().low {
            // With our own hands, if the reclaimer is behind: a thread that misses would have to, a little later.
            self.reclaimer.wake();
            let _ = self.evictor.try_run(self, self.reserve().low, Urgency::Background);
        }
        let Ok(mut io) = self.open_io(record) else { return 0 };
        let Some(io) = io.as_mut() else { return 0 };
        let mut started = 0;
        for page in pages.into_iter().filter(|page| *page < self.pages) {
            let Some(unit) = self.segments.unit_of(page) else { continue };
            let word = &self.words[unit.page];
            let seen = FrameWord(word.load(Ordering::Acquire));
            let (next, Deref::Fetch) = seen.deref(false) else { continue };
            let Some(frame) = self.take_frames_ahead(unit.pages) else { break };
            if !self.exchange(word, seen, next) {
                self.frames.put(frame, unit.pages);
                continue;
            }
            count(&record.counters.prefetches);
            add(&record.counters.fetched_bytes, u64::from(unit.pages) * PAGE_BYTES as u64);
            io.launch(self, Flight { unit, frame, landing: Landing::Ahead }, Priority::Background);
            started += 1;
        }
        io.collect(self);
        record.in_flight.store(io.in_flight() as u32, Ordering::Release);
        started
    }

    /// Frames for what nobody needs yet. An eighth of the clean reserve is left to those who need some.
    fn take_frames_ahead(&self, pages: u32) -> Option<FrameId> {
        let low = self.reserve().low;
        if self.frames.room() < low {
            self.reclaimer.wake();
        }
        if self.frames.room() < low / 8 + pages {
            return None;
        }
        self.frames.take(pages, Purse::Open)
    }

    /// Brings a unit near whose page we made Fetching, into these frames, and waits for it.
    pub(crate) fn fetch(&self, record: &Record, flight: Flight) -> Result<(), FarError> {
        let mut io = match self.open_io(record) {
            Ok(io) => io,
            Err(error) => {
                self.land(flight, Err(error));
                return Err(error.into());
            }
        };
        let Some(lane) = io.as_mut() else { unreachable!("the lane was just opened") };
        let number = lane.launch(self, flight, Priority::Demand);
        record.in_flight.store(lane.in_flight() as u32, Ordering::Release);
        let outcome = lane.wait_for(self, number);
        record.in_flight.store(lane.in_flight() as u32, Ordering::Release);
        match outcome {
            Some(result) => result.map_err(FarError::Pool),
            None => {
                if let Some(io) = io.take() {
                    io.abandon(self);
                }
                record.in_flight.store(0, Ordering::Release);
                Err(FarError::Stalled { after: self.patience * 2 })
            }
        }
    }

    /// Reads a part of a page that is Far and stays so, and waits for it.
    pub(crate) fn read_part(&self, record: &Record, part: Part, take: impl FnOnce(&[u8])) -> Result<(), FarError> {
        let mut io = self.open_io(record)?;
        let Some(lane) = io.as_mut() else { unreachable!("the lane was just opened") };
        add(&record.counters.fetched_bytes, part.part.len() as u64);
        match lane.read_part(self, part, take) {
            Some(result) => result.map_err(FarError::Pool),
            None => {
                if let Some(io) = io.take() {
                    io.abandon(self);
                }
                record.in_flight.store(0, Ordering::Release);
                Err(FarError::Stalled { after: self.patience * 2 })
            }
        }
    }

    /// The thread's lane, open. Held by the thread itself while it reads, and by others for a look.
    fn open_io<'a>(&self, record: &'a Record) -> Result<MutexGuard<'a, Option<Io>>, PoolError> {
        let mut io = record.io.lock().unwrap_or_else(PoisonError::into_inner);
        if io.is_none() {
            *io = Some(Io::new(&*self.backend, self.patience)?);
        }
        Ok(io)
    }

    /// The end of a flight.
    pub(crate) fn land(&self, flight: Flight, result: Result<(), PoolError>) {
        let Flight { unit, frame, landing } = flight;
        let word = &self.words[unit.page];
        let seen = FrameWord(word.load(Ordering::Acquire));
        let next = match (result, landing) {
            (Ok(()), Landing::Ahead) => seen.arrived_ahead(frame),
            (Ok(()), _) => seen.arrived(frame, landing == Landing::Dirty),
            (Err(_), _) => seen.gave_up(State::Far),
        };
        match result {
            Ok(()) => self.frames.infos[frame.0].moved_in(unit.page),
            Err(_) => self.frames.put(frame, unit.pages),
        }
        // Release: the bytes are there.
        word.store(next.0, Ordering::Release);
    }

    /// For a thread that waits, perhaps for this page: lands what has arrived anywhere.
    pub(crate) fn help(&self, record: &Record, page: Option<u32>) {
        if record.in_flight.load(Ordering::Relaxed) > 0 {
            self.look(record, page);
        }
        for other in self.threads.in_flight() {
            if !core::ptr::eq(&*other, record) {
                self.look(&other, page);
            }
        }
    }

    /// Lands what has arrived; the number of flights that have not.
    pub(crate) fn help_all(&self) -> u32 {
        let records = self.threads.in_flight();
        records.iter().for_each(|record| self.look(record, None));
        records.iter().map(|record| record.in_flight.load(Ordering::Acquire)).sum()
    }

    /// Waits until nothing is in flight. The lanes see to it that this ends.
    pub(crate) fn land_all(&self) {
        let mut patience = Patience::new(self.patience * 2);
        while self.help_all() > 0 && patience.wait().is_ok() {}
    }

    /// Lands what has arrived on a lane, unless its thread is at it.
    fn look(&self, record: &Record, wanted: Option<u32>) {
        let mut io = match record.io.try_lock() {
            Ok(io) => io,
            Err(TryLockError::Poisoned(io)) => io.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let Some(io) = io.as_mut() else { return };
        if let Some(page) = wanted {
            io.hurry(self, page);
        }
        io.collect(self);
        record.in_flight.store(io.in_flight() as u32, Ordering::Release);
    }
}
