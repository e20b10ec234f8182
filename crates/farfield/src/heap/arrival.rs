//! What a task waits for: a page, or a small object of the object plane.

use super::access::{Want, count_use};
use super::frames::Purse;
use super::io::Flight;
use super::room::Round;
use super::segments::Unit;
use super::threads::{add, count};
use super::waiters::{Ticket, Turn};
use super::{Core, Scope};
use crate::error::FarError;
use crate::plane::object::{ObjectId, Objects, Sight, Way};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::Ordering;
use core::task::{Context, Poll};
use farfield_core::geometry::PAGE_BYTES;
use farfield_core::heap::{Deref, FrameId, FrameWord, Handle, Path, Place, State};
use std::time::Instant;

/// Ends when what it waits for is near, until the scope ends or is renewed: where an object is, or where the page begins. Dropped before,
/// nobody waits any more, but it arrives.
pub(crate) struct Arrival<'a> {
    core: &'a Core,
    scope: &'a Scope<'a>,
    /// Of a value that lives as long as this: its page's number within the heap, or its handle's above all pages.
    number: u32,
    want: Want,
    /// Counted in the scope as awaiting something.
    awaits: bool,
    wait: Wait,
}

/// What an arrival knows of its waiting, without the scope.
#[derive(Default)]
pub(super) struct Wait {
    ticket: Option<Ticket>,
    /// So many frames shall be free; 0: there was room. Not 0: the scope is marked as hungry.
    goal: u32,
    /// In the queue of those who wait for room.
    turn: Option<Turn>,
    /// When the first wait that is no flight's began: flights have deadlines of their own.
    since: Option<Instant>,
    /// It began a flight.
    brought: bool,
    /// That of a page which comes whole.
    whole_page: Option<u32>,
}

impl Wait {
    /// Nobody waits any more.
    pub(super) fn stop(&mut self, core: &Core) {
        if let Some(ticket) = self.ticket.take() {
            core.waiters.forget(ticket);
        }
        self.leave_queue(core);
    }

    /// It needs no room, or no more of it.
    fn leave_queue(&mut self, core: &Core) {
        // What it was woken for is for another one.
        if let Some(turn) = self.turn.take()
            && !core.waiters.leave_room(turn)
            && core.waiters.want_room()
        {
            core.reclaimer.ring();
        }
    }
}

impl Core {
    /// A task waits for this page, and is to be told when it arrives; false if it is not on its way.
    fn want(&self, page: u32) -> bool {
        let word = &self.words[page];
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            match seen.want() {
                Some(next) if next == seen || self.exchange(word, seen, next) => return true,
                Some(_) => {}
                None => return false,
            }
        }
    }
}

impl<'a> Arrival<'a> {
    pub(crate) fn new(scope: &'a Scope<'a>, number: u32, want: Want) -> Arrival<'a> {
        Arrival { core: scope.core, scope, number, want, awaits: false, wait: Wait::default() }
    }

    /// Goes on with what another one began, in a scope that has ended.
    pub(super) fn resume(scope: &'a Scope<'_>, number: u32, want: Want, wait: Wait) -> Arrival<'a> {
        let open = scope.open;
        if wait.goal > 0 {
            scope.record.set_hungry(open, true);
        }
        Arrival { wait, ..Arrival::new(scope, number, want) }
    }

    /// The scope ends, and the wait goes on.
    pub(super) fn suspend(mut self) -> Wait {
        let wait = core::mem::take(&mut self.wait);
        self.wait.goal = wait.goal;
        wait
    }

    /// Is there no room for what it waits for?
    pub(crate) fn waits_for_room(&self) -> bool {
        self.wait.goal > 0
    }

    /// Waits for something that is about to happen, at most as long as the heap is patient.
    fn still<T>(&mut self) -> Poll<Result<T, FarError>> {
        let after = self.wait.since.get_or_insert_with(Instant::now).elapsed();
        if after > self.core.patience { Poll::Ready(Err(FarError::Stalled { after })) } else { Poll::Pending }
    }

    fn step(&mut self, context: &mut Context<'_>) -> Poll<Result<Place, FarError>> {
        match (&self.core.objects, self.number.checked_sub(self.core.pages)) {
            (Some(objects), Some(object)) => self.step_object(context, objects, object),
            _ => self.step_page(context),
        }
    }

    fn step_page(&mut self, context: &mut Context<'_>) -> Poll<Result<Place, FarError>> {
        let (core, record, page) = (self.core, self.scope.record, self.number);
        let word = &core.words[page];
        loop {
            let seen = FrameWord(word.load(Ordering::Acquire));
            let (next, what) = self.want.decide(seen);
            match what {
                Deref::Here(frame) => {
                    if next == seen || core.exchange(word, seen, next) {
                        count_use(record, seen);
                        return Poll::Ready(Ok(Place::new(frame, 0)));
                    }
                }
                Deref::Wait if seen.state() == State::Fetching => {
                    // What was seen before may have landed, and been told to those who wait.
                    if self.wait(page, context, || core.want(page)) {
                        core.hurry(record, page);
                        core.attend();
                        return Poll::Pending;
                    }
                }
                Deref::Wait => {
                    // One page is being copied meanwhile.
                    if next == seen || core.exchange(word, seen, next) {
                        context.waker().wake_by_ref();
                        return self.still();
                    }
                }
                Deref::Fetch | Deref::Zero => {
                    let pages = core.segments.unit_of(page).map_or(1, |unit| unit.pages);
                    let frame = core::task::ready!(self.take_wanted_frames(pages, context))?;
                    let mark = || next.want().is_some_and(|next| core.exchange(word, seen, next));
                    if !self.wait(page, context, mark) {
                        core.frames.put(frame, pages);
                        continue;
                    }
                    core.count_miss(record, page, Path::Page);
                    add(&record.counters.fetched_bytes, u64::from(pages) * PAGE_BYTES as u64);
                    core.begin(
                        record,
                        Flight::Unit { unit: Unit { page, pages }, frame, landing: self.want.landing() },
                    );
                    core.attend();
                    return Poll::Pending;
                }
            }
        }
    }

    fn step_object(
        &mut self,
        context: &mut Context<'_>,
        objects: &Objects,
        object: ObjectId,
    ) -> Poll<Result<Place, FarError>> {
        let (core, record) = (self.core, self.scope.record);
        let handle = &objects.handles[object];
        let mark = || {
            let mut seen = Handle(handle.load(Ordering::Acquire));
            while let Some(next) = seen.want() {
                match handle.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => return true,
                    Err(now) => seen = Handle(now),
                }
            }
            false
        };
        loop {
            match core.look_at(record, objects, object, self.want, self.wait.brought) {
                Sight::Here(place) => {
                    if let Some(page) = self.wait.whole_page.take() {
                        core.leave_after(record, page);
                    }
                    return Poll::Ready(Ok(place));
                }
                Sight::Moving => {
                    if self.wait(self.number, context, mark) {
                        core.hurry(record, self.number);
                        core.attend();
                        return Poll::Pending;
                    }
                }
                Sight::Busy => {
                    context.waker().wake_by_ref();
                    return self.still();
                }
                Sight::Coming(page) => {
                    // While the object is there the page is not Fetching for anything else.
                    let is_there = || Handle(handle.load(Ordering::Acquire)).is_in(page);
                    if self.wait(page, context, || core.want(page) && is_there()) {
                        core.hurry(record, page);
                        core.attend();
                        return Poll::Pending;
                    }
                }
                Sight::Far(_, Way::Page(page)) => {
                    let frame = core::task::ready!(self.take_wanted_frames(1, context))?;
                    let landing = self.want.landing();
                    let Some(flight) = core.depart_page(record, objects, page, frame, landing) else { continue };
                    // It is ours, so it is still on its way.
                    assert!(self.wait(page, context, || core.want(page)));
                    self.wait.brought = true;
                    self.wait.whole_page = Some(page);
                    core.begin(record, flight);
                    core.attend();
                    return Poll::Pending;
                }
                Sight::Far(seen, Way::Object(class)) => {
                    let Some(spot) = core.spot_now(record, objects, object, class, true)? else {
                        let frame = core::task::ready!(self.take_frames(1, context))?;
                        core.open_page(record, objects, class, frame)?;
                        continue;
                    };
                    let Some(flight) = core.depart(record, objects, object, seen, spot, false) else { continue };
                    // It is ours, so it is still moving.
                    assert!(self.wait(self.number, context, mark));
                    self.wait.brought = true;
                    core.begin(record, Flight::Object(flight));
                    core.attend();
                    return Poll::Pending;
                }
            }
        }
    }

    /// Waits for the flight of this number, if `mark` says that it is under way and has been marked as wanted.
    fn wait(&mut self, number: u32, context: &mut Context<'_>, mark: impl FnOnce() -> bool) -> bool {
        // What it waited for until now keeps nothing near.
        if !self.scope.open.keeps() {
            self.scope.record.renew(&self.core.epoch, self.scope.open);
        }
        self.wait.ticket = self.core.waiters.wait(number, context.waker(), mark);
        let waits = self.wait.ticket.is_some();
        if waits {
            self.stop_hunger();
            if !core::mem::replace(&mut self.awaits, true) {
                let awaited = &self.scope.open.awaited;
                awaited.set(awaited.get() + 1);
            }
        }
        waits
    }

    /// As [`Core::take_wanted_frames`], for a task.
    fn take_wanted_frames(&mut self, pages: u32, context: &mut Context<'_>) -> Poll<Result<FrameId, FarError>> {
        self.take_frames(pages, context).map(|frames| match frames {
            Err(error) if self.want == Want::Read => self.core.take_to_read(self.scope.record, pages, false, error),
            frames => frames,
        })
    }

    /// As [`Core::take_frames`], for a task: it lets others run while it waits.
    fn take_frames(&mut self, pages: u32, context: &mut Context<'_>) -> Poll<Result<FrameId, FarError>> {
        let (core, record, open) = (self.core, self.scope.record, self.scope.open);
        // Who came first gets room first.
        let before = core.throttle.waiting();
        if (self.wait.goal > 0 || !core.waiters.want_room())
            && let Some(frame) = core.frames.take(pages, Purse::Behind(before))
        {
            if core.frames.room() < core.reserve().low {
                core.reclaimer.wake();
            }
            return Poll::Ready(Ok(frame));
        }
        core.check_size(pages)?;
        let is_first = self.wait.goal == 0;
        if is_first {
            count(&record.counters.throttled);
            record.set_hungry(open, true);
            self.wait.goal = core.first_goal(pages);
        }
        // With our own hands, unless others came first: the reclaimer may be waiting for the scope that we are in.
        if !is_first || !core.waiters.want_room() {
            // Others of the same thread may go on and make room, as long as they have not looked for any.
            let is_own = |epoch| !is_first && waits_for_itself(self.scope, epoch);
            match core.make_frames(record, pages, &mut self.wait.goal, before, is_own)? {
                Round::Got(frame) => return Poll::Ready(Ok(frame)),
                Round::OwnScope => {
                    return Poll::Ready(core.frames.take(pages, Purse::Reserve).ok_or(FarError::NearFull));
                }
                _ => {}
            }
        }
        let since = *self.wait.since.get_or_insert_with(Instant::now);
        self.wait.turn = Some(core.waiters.wait_for_room(self.wait.turn, context.waker(), since));
        // After that: the reclaimer wakes whoever waits at the end of its next round.
        core.reclaimer.ring();
        self.still()
    }

    fn stop_waiting(&mut self) {
        self.wait.stop(self.core);
        self.stop_hunger();
        let open = self.scope.open;
        if core::mem::take(&mut self.awaits) {
            open.awaited.set(open.awaited.get() - 1);
        }
    }

    /// There is room for what it waits for, or it needs none.
    fn stop_hunger(&mut self) {
        self.wait.leave_queue(self.core);
        if core::mem::take(&mut self.wait.goal) > 0 {
            self.scope.record.set_hungry(self.scope.open, false);
        }
    }
}

/// All that could leave since this epoch waits for scopes of this thread, this one among them, and all their tasks wait for room.
fn waits_for_itself(scope: &Scope<'_>, epoch: u64) -> bool {
    let open = scope.open;
    open.is_used() && open.began() <= epoch && !scope.record.keeps_and_goes_on(epoch)
}

impl Future for Arrival<'_> {
    type Output = Result<Place, FarError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Some(ticket) = this.wait.ticket.take() {
            match this.core.waiters.look(ticket, context.waker()) {
                Ok(result) => result?,
                Err(ticket) => {
                    this.wait.ticket = Some(ticket);
                    return Poll::Pending;
                }
            }
        }
        let answer = this.step(context);
        if answer.is_ready() {
            this.stop_waiting();
        }
        answer
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.stop_waiting();
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a task that counts as one that waits for room when it does not: others believe that nobody goes on, and stay behind it.
    //! And against work for each task that is as much as there are tasks.
    use super::*;
    use crate::Heap;
    use crate::heap::evictor::{Outcome, Urgency};
    use core::task::Waker;

    fn far_page(core: &Core) -> u32 {
        let is_far = |page: &u32| FrameWord(core.words[*page].load(Ordering::Acquire)).state() == State::Far;
        (0..core.segments.high_page()).find(is_far).unwrap()
    }

    const TASKS: usize = 4000;

    /// Thousands of tasks wait for room, of which one in so many holds something, behind an older scope. How many scopes they look at.
    fn looks_of_many(heap: &Heap, one_in: usize) -> u64 {
        let core = heap.core();
        // Until nothing can leave but what the older scope holds back.
        let mut frames = Vec::new();
        let mut outcome = None;
        while !matches!(outcome, Some(Outcome::Blocked(_))) {
            frames.extend(core::iter::from_fn(|| core.frames.take(1, Purse::Open)));
            outcome = core.evictor.try_run(core, core.frames.spare() + 1, Urgency::Demand).transpose().unwrap();
        }
        let scopes: Vec<_> = (0..TASKS).map(|_| heap.enter()).collect();
        scopes.iter().step_by(one_in).skip(1).for_each(|scope| scope.open.used.set(true));
        let page = far_page(core);
        let mut context = Context::from_waker(Waker::noop());
        let mut arrivals: Vec<_> = scopes.iter().map(|scope| Box::pin(Arrival::new(scope, page, Want::Read))).collect();
        for _ in 0..4 {
            for arrival in &mut arrivals {
                assert!(arrival.as_mut().poll(&mut context).is_pending());
                assert!(arrival.waits_for_room());
                // Somebody else cools a batch.
                core.next_epoch();
            }
        }
        frames.into_iter().for_each(|frame| core.frames.put(frame, 1));
        scopes[0].record.looks()
    }

    #[test]
    fn thousands_that_wait_for_room_look_at_few_others_each() {
        for (is_own, one_in) in [(true, TASKS), (true, 10), (false, TASKS), (false, 10)] {
            let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
            let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
            heap.core().reclaimer.stop();
            let oldest = heap.enter();
            values[0].get(&oldest).unwrap();
            let looks = if is_own {
                looks_of_many(&heap, one_in)
            } else {
                std::thread::scope(|threads| threads.spawn(|| looks_of_many(&heap, one_in)).join().unwrap())
            };
            assert!(looks < 4 * TASKS as u64 * 100, "{is_own}, {one_in}: {looks} scopes were looked at");
            drop(oldest);
            drop(values);
            heap.verify();
        }
    }

    #[test]
    fn who_waits_for_a_flight_does_not_wait_for_room() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let values: Vec<_> = (0..512u64).map(|index| heap.alloc([index; 512]).unwrap()).collect();
        let core = heap.core();
        core.evictor.paused(|| {
            let page = far_page(core);
            let mut frames: Vec<_> = core::iter::from_fn(|| core.frames.take(1, Purse::Reserve)).collect();
            let scope = heap.enter();
            let mut arrival = core::pin::pin!(Arrival::new(&scope, page, Want::Read));
            let mut context = Context::from_waker(Waker::noop());
            assert!(arrival.as_mut().poll(&mut context).is_pending());
            assert!(arrival.waits_for_room());
            assert!(scope.open.is_hungry());
            frames.drain(..core.first_goal(1) as usize).for_each(|frame| core.frames.put(frame, 1));
            assert!(arrival.as_mut().poll(&mut context).is_pending());
            assert!(!arrival.waits_for_room() && !core.waiters.want_room());
            assert!(!scope.open.is_hungry());
            frames.into_iter().for_each(|frame| core.frames.put(frame, 1));
        });
        drop(values);
        heap.verify();
    }
}
