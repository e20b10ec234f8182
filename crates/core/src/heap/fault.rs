//! The fault: the steps by which a mutator finds a page, or a small object, and takes it when it is
//! far.
//!
//! A step loads words that other threads change, decides, and makes at most one transition of each.
//! It never waits; what a driver does between two steps (wait, take frames, read from the pool) is
//! its own affair. The words are behind two traits, so the heap runs these steps on its atomics,
//! the models on loom's (`tests/*_model.rs`), and the tests below on cells.
//!
//! ```text
//!                 look_up_page / look_up_object
//!        ┌──────────────┬─────────────┬─────────────┐
//!        ▼              ▼             ▼             ▼
//!     Resident   Loading, Moving    Retry       Far, Empty
//!                       │                           │ PageClaim::take, fetch_log_page, lock_object
//!                       │ want_page, want_object    ▼
//!                       │                        a flight
//!                       └────────── told ◀──────────│ land_page, land_object
//! ```
//!
//! Every exchange is sequenced as the trait says. Sources: single flight, LeanStore's cooling stage
//! ([`FrameWord`]), Atlas's split of objects and whole pages ([`LogWord`]).

use super::{DerefOutcome, FrameId, FrameWord, Handle, LogClass, LogWord, ObjectLocation, SlotHint, State};

/// Access that a mutator needs to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessMode {
    /// Access to bytes that stay as they are.
    Read,
    /// The same, by a thread whose uses do not show what the program uses, as a collector: the page
    /// does not count as used.
    Peek,
    /// Access to bytes that change.
    Write,
    /// Access to make an object: the page may be Empty.
    Create,
}

impl AccessMode {
    /// Decides what this access has to do with a page, by its word.
    #[inline]
    pub fn decide(self, word: FrameWord) -> (FrameWord, DerefOutcome) {
        match self {
            AccessMode::Read => word.deref(false),
            AccessMode::Peek => word.peek(),
            AccessMode::Write => word.deref(true),
            AccessMode::Create => word.create(),
        }
    }

    /// Returns the state in which a page fetched for this access lands.
    pub fn fetch_intent(self) -> FetchIntent {
        if self.is_read() { FetchIntent::Read } else { FetchIntent::Write }
    }

    /// Checks whether the bytes stay as they are.
    #[inline]
    pub fn is_read(self) -> bool {
        matches!(self, AccessMode::Read | AccessMode::Peek)
    }
}

/// State in which a fetched unit becomes near.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FetchIntent {
    /// Wanted by a reader.
    Read,
    /// Wanted by a writer.
    Write,
    /// Prefetched: no access has asked for it yet.
    Prefetch,
}

/// Frame words of a heap, one for each page.
pub trait PageWords {
    /// Loads a word. Acquire: the thread that brought the page has filled its frame.
    fn load_page(&self, page: u32) -> FrameWord;

    /// Replaces a word by compare-exchange; false if it has changed. Acquire: sees all that the
    /// last owner of the page did to its frame. Release: publishes what the caller did.
    fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool;
}

/// Handles and log words of a heap with small objects, beside its frame words.
pub trait ObjectWords: PageWords {
    /// Loads a handle. Acquire: the thread that put the object there is done.
    fn load_handle(&self, object: u32) -> Handle;

    /// Replaces a handle by compare-exchange (acquire and release); false if it has changed.
    fn exchange_handle(&self, object: u32, seen: Handle, next: Handle) -> bool;

    /// Loads a log word (sequentially consistent).
    fn load_log(&self, page: u32) -> LogWord;

    /// Makes a transition of a log word (sequentially consistent), and returns its flag.
    fn update_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) -> bool;

    /// Retires a log page that has died by a transition; called once for each death.
    fn retire_log(&self, page: u32);

    /// Makes a transition of a log word whose flag says that the page is dead, and then retires it.
    fn end_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) {
        if self.update_log(page, transition) {
            self.retire_log(page);
        }
    }
}

/// Result of a look at a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageLookup {
    /// The page is usable in this frame. Its word was this one before the access.
    Resident(FrameId, FrameWord),
    /// The page is on its way, in a flight of somebody else.
    Loading,
    /// The page belongs to the evictor for a short time: look again soon.
    Retry,
    /// The page is far: fetch it.
    Far(PageClaim),
    /// The page is Empty, and the caller makes objects: fill it with zeros.
    Empty(PageClaim),
}

/// Transition to Loading that makes a page the caller's, if its word is still the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageClaim {
    page: u32,
    seen: FrameWord,
}

impl PageClaim {
    /// Returns the page.
    pub fn page(self) -> u32 {
        self.page
    }

    /// Returns the word of the page as it was before.
    pub fn seen(self) -> FrameWord {
        self.seen
    }

    /// Returns the word of the page while it is the caller's.
    pub fn claimed(self) -> FrameWord {
        self.seen.create().0
    }

    /// Makes the page the caller's, who begins a flight afterwards; false if the word has changed.
    ///
    /// `is_wanted`: a task waits for the landing. As the flight begins later, the task has time to
    /// leave its waker.
    pub fn take(self, words: &impl PageWords, is_wanted: bool) -> bool {
        let next = self.claimed();
        let marked = if is_wanted { next.want() } else { Some(next) };
        marked.is_some_and(|next| words.exchange_page(self.page, self.seen, next))
    }
}

/// Looks at a page for this access, and makes the page usable if it is near.
///
/// The caller is in a scope, for which a resident page stays where it is.
#[inline]
pub fn look_up_page(words: &impl PageWords, page: u32, mode: AccessMode) -> PageLookup {
    loop {
        let seen = words.load_page(page);
        let (next, outcome) = mode.decide(seen);
        let lookup = match outcome {
            DerefOutcome::Resident(frame) => PageLookup::Resident(frame, seen),
            DerefOutcome::Wait if seen.state() == State::Loading => PageLookup::Loading,
            DerefOutcome::Wait => PageLookup::Retry,
            DerefOutcome::Fetch => return PageLookup::Far(PageClaim { page, seen }),
            DerefOutcome::Zero => return PageLookup::Empty(PageClaim { page, seen }),
        };
        if next == seen || words.exchange_page(page, seen, next) {
            return lookup;
        }
    }
}

/// Returns the claim of a page, if it is far; changes and marks nothing.
pub fn peek_page(words: &impl PageWords, page: u32) -> Option<PageClaim> {
    let seen = words.load_page(page);
    (seen.state() == State::Far).then_some(PageClaim { page, seen })
}

/// Marks a page as wanted, so that a task is told when it lands; false if it is not on its way.
///
/// The caller holds the lock under which it leaves its waker, so that the lander finds it.
pub fn want_page(words: &impl PageWords, page: u32) -> bool {
    loop {
        let seen = words.load_page(page);
        match seen.want() {
            Some(next) if next == seen || words.exchange_page(page, seen, next) => return true,
            Some(_) => {}
            None => return false,
        }
    }
}

/// Ends the caller's flight of a page, which came to this frame, or did not come and is Far again.
///
/// True if tasks wait for the landing, which must be told now.
pub fn land_page(words: &impl PageWords, page: u32, frame: Option<FrameId>, intent: FetchIntent) -> bool {
    loop {
        let seen = words.load_page(page);
        let next = match (frame, intent) {
            (Some(frame), FetchIntent::Prefetch) => seen.finish_prefetch(frame),
            (Some(frame), _) => seen.finish_load(frame, intent == FetchIntent::Write),
            (None, _) => seen.cancel_load(State::Far),
        };
        // Only marks change while a flight owns the page.
        if words.exchange_page(page, seen, next) {
            return seen.is_wanted();
        }
    }
}

/// Prepares a page for a copy to the pool that the evictor is about to make while the page stays
/// near. Returns the word of the page before; `None` if the page is not near, or is owned.
///
/// The caller holds the evictor's lock until the copy has arrived. The page counts as clean before
/// it is copied, so that a write beside the copy marks it again.
pub fn flush_page(words: &impl PageWords, page: u32) -> Option<FrameWord> {
    loop {
        let seen = words.load_page(page);
        if words.exchange_page(page, seen, seen.begin_flush()?) {
            return Some(seen);
        }
    }
}

/// Marks a page whose copy did not arrive, if it is near in this frame; false if it is not.
pub fn fail_flush_page(words: &impl PageWords, page: u32, frame: FrameId) -> bool {
    loop {
        let seen = words.load_page(page);
        let Some(next) = seen.fail_flush().filter(|_| seen.frame() == Some(frame)) else { return false };
        if words.exchange_page(page, seen, next) {
            return true;
        }
    }
}

/// Result of a look at an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ObjectLookup {
    /// The object is near, and stays there for the scope that looked. Its handle is this one now.
    Resident(SlotHint, Handle),
    /// The object is on its way, in another flight.
    Relocating,
    /// The page of the object is being copied, or the object has just left it: look again soon.
    Retry,
    /// The object comes with this page, which is on its way.
    Loading(u32),
    /// The object is far, where its handle says.
    Far(FarObject),
}

/// An object that was far when its handle was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FarObject {
    object: u32,
    seen: Handle,
    page: u32,
    card: u8,
}

impl FarObject {
    /// Returns the number of the object's handle.
    pub fn object(self) -> u32 {
        self.object
    }

    /// Returns the page in which the object is.
    pub fn page(self) -> u32 {
        self.page
    }

    /// Returns the card at which the object begins.
    pub fn card(self) -> u8 {
        self.card
    }

    /// Checks whether the object came here before anybody needed it, and has not been used.
    pub fn is_ahead(self) -> bool {
        self.seen.is_ahead()
    }
}

/// Looks at an object for this access, and makes its page usable if that is near.
///
/// Reads the handle, the frame word of its page, and the handle again. If both handles say the same
/// place, the object was there while the page was in that frame. Neither changes for the scope in
/// which the caller is. `on_access` is called for each page that the access has made usable, with
/// the word of the page before; it may be called more than once.
#[inline]
pub fn look_up_object(
    words: &impl ObjectWords,
    object: u32,
    mode: AccessMode,
    mut on_access: impl FnMut(u32, FrameWord),
) -> ObjectLookup {
    loop {
        let seen = words.load_handle(object);
        let (page, card) = match seen.location() {
            ObjectLocation::At { page, card } => (page, card),
            ObjectLocation::Moving => return ObjectLookup::Relocating,
            ObjectLocation::Nowhere => unreachable!("a slot of an object that is gone"),
        };
        match look_up_page(words, page, mode) {
            PageLookup::Resident(frame, held) => {
                on_access(page, held);
                // A scope that finds the page near after the object has moved out finds the handle
                // changed, too.
                let now = words.load_handle(object);
                if now.location() == seen.location() {
                    return ObjectLookup::Resident(SlotHint::new(frame, card), now);
                }
            }
            // Else the page is being made or discarded: the object has moved out.
            PageLookup::Loading if words.load_log(page).is_whole() => return ObjectLookup::Loading(page),
            PageLookup::Loading | PageLookup::Retry => return ObjectLookup::Retry,
            PageLookup::Far(_) => return ObjectLookup::Far(FarObject { object, seen, page, card }),
            PageLookup::Empty(_) => unreachable!("nobody creates by looking"),
        }
    }
}

/// Returns an object, if it is far; changes and marks nothing.
pub fn peek_object(words: &impl ObjectWords, object: u32) -> Option<FarObject> {
    let seen = words.load_handle(object);
    let ObjectLocation::At { page, card } = seen.location() else { return None };
    peek_page(words, page).map(|_| FarObject { object, seen, page, card })
}

/// Marks an object as wanted, so that a task is told when it lands; false if it is not moving.
///
/// The caller holds the lock under which it leaves its waker, so that the lander finds it.
pub fn want_object(words: &impl ObjectWords, object: u32) -> bool {
    loop {
        let seen = words.load_handle(object);
        match seen.want() {
            Some(next) if next == seen || words.exchange_handle(object, seen, next) => return true,
            Some(_) => {}
            None => return false,
        }
    }
}

/// Locks a far object of this class for the caller, who begins a flight afterwards.
///
/// False if it is not the far object that was seen any more. `is_wanted` as for
/// [`PageClaim::take`].
pub fn lock_object(words: &impl ObjectWords, far: FarObject, class: LogClass, is_wanted: bool) -> bool {
    let FarObject { object, seen, page, .. } = far;
    let go = |log: LogWord| log.go().map_or((log, false), |next| (next, true));
    if !words.update_log(page, go) {
        return false;
    }
    // From here on the page stays what it is. The caller may have seen it long ago.
    let is_same = peek_page(words, page).is_some() && words.load_log(page).class() == Some(class);
    let locked = seen.lock().and_then(|locked| if is_wanted { locked.want() } else { Some(locked) });
    let is_locked = is_same && locked.is_some_and(|locked| words.exchange_handle(object, seen, locked));
    if !is_locked {
        words.end_log(page, LogWord::gone);
    }
    is_locked
}

/// Makes a far log page the caller's, to fetch the whole of it.
///
/// False if it is not far any more, or must not come whole. `is_wanted` as for [`PageClaim::take`].
pub fn fetch_log_page(words: &impl ObjectWords, page: u32, is_wanted: bool) -> bool {
    let fetch = |log: LogWord| log.fetch().map_or((log, false), |next| (next, true));
    if !words.update_log(page, fetch) {
        return false;
    }
    let is_ours = peek_page(words, page).is_some_and(|claim| claim.take(words, is_wanted));
    if !is_ours {
        words.end_log(page, |log| log.fetched(false));
    }
    is_ours
}

/// Gives up a place in a log page to which nothing comes after all.
pub fn give_up_place(words: &impl ObjectWords, page: u32) {
    words.end_log(page, LogWord::arrived);
    words.end_log(page, LogWord::remove);
}

/// Ends the caller's flight of an object out of page `from` to this place; its bytes are in the
/// place, or (`None`) did not come.
///
/// True if tasks wait for the landing, which must be told now.
pub fn land_object(
    words: &impl ObjectWords,
    object: u32,
    from: u32,
    (page, card): (u32, u8),
    intent: Option<FetchIntent>,
) -> bool {
    let seen = loop {
        let seen = words.load_handle(object);
        let next = match intent {
            Some(FetchIntent::Prefetch) => seen.moved_ahead(page, card),
            Some(FetchIntent::Read | FetchIntent::Write) => seen.moved(page, card),
            None => seen.unlock(),
        };
        // Only marks change while the handle is the caller's.
        if words.exchange_handle(object, seen, next) {
            break seen;
        }
    };
    match intent {
        Some(_) => {
            words.end_log(page, LogWord::arrived);
            words.end_log(from, LogWord::remove);
        }
        None => give_up_place(words, page),
    }
    words.end_log(from, LogWord::gone);
    seen.is_wanted()
}

#[cfg(test)]
mod tests {
    //! Guards against steps that take what is not theirs, miss a change, or leave a mark or a count
    //! behind. Exhaustive: every reachable frame word, and every word that it may have become when
    //! the step exchanges it.
    use super::super::IngressPath;
    use super::super::frame_word::reachable;
    use super::*;
    use alloc::vec::Vec;
    use core::cell::{Cell, RefCell};

    const CLASS: usize = 3;
    /// Pages: where the object is, and where it comes to.
    const FROM: u32 = 0;
    const TO: u32 = 1;
    const MODES: [AccessMode; 4] = [AccessMode::Read, AccessMode::Peek, AccessMode::Write, AccessMode::Create];
    const INTENTS: [FetchIntent; 3] = [FetchIntent::Read, FetchIntent::Write, FetchIntent::Prefetch];

    /// Words of two pages and one object, and what another thread does before the first exchange.
    struct Table {
        pages: [Cell<FrameWord>; 2],
        handle: Cell<Handle>,
        logs: [Cell<LogWord>; 2],
        /// Word that the page at `FROM` gets at the first exchange.
        page_meanwhile: Cell<Option<FrameWord>>,
        handle_meanwhile: Cell<Option<Handle>>,
        accesses: Cell<u32>,
        retired: RefCell<Vec<u32>>,
    }

    impl Table {
        fn new(word: FrameWord) -> Table {
            let class = LogClass::from_index(CLASS);
            let near = FrameWord::EMPTY.create().0.finish_load(FrameId(9), true);
            Table {
                pages: [Cell::new(word), Cell::new(near)],
                handle: Cell::new(Handle::settle(FROM, 4)),
                logs: [Cell::new(LogWord::opened(class).add().closed().0), Cell::new(LogWord::opened(class))],
                page_meanwhile: Cell::new(None),
                handle_meanwhile: Cell::new(None),
                accesses: Cell::new(0),
                retired: RefCell::new(Vec::new()),
            }
        }

        fn word(&self) -> FrameWord {
            self.pages[FROM as usize].get()
        }
    }

    impl PageWords for Table {
        fn load_page(&self, page: u32) -> FrameWord {
            self.pages[page as usize].get()
        }

        fn exchange_page(&self, page: u32, seen: FrameWord, next: FrameWord) -> bool {
            let cell = &self.pages[page as usize];
            if let Some(word) = self.page_meanwhile.take() {
                cell.set(word);
            }
            let is_same = cell.get() == seen;
            if is_same {
                cell.set(next);
            }
            is_same
        }
    }

    impl ObjectWords for Table {
        fn load_handle(&self, _object: u32) -> Handle {
            self.handle.get()
        }

        fn exchange_handle(&self, _object: u32, seen: Handle, next: Handle) -> bool {
            if let Some(handle) = self.handle_meanwhile.take() {
                self.handle.set(handle);
            }
            let is_same = self.handle.get() == seen;
            if is_same {
                self.handle.set(next);
            }
            is_same
        }

        fn load_log(&self, page: u32) -> LogWord {
            self.logs[page as usize].get()
        }

        fn update_log(&self, page: u32, transition: impl Fn(LogWord) -> (LogWord, bool)) -> bool {
            let (next, flag) = transition(self.load_log(page));
            self.logs[page as usize].set(next);
            flag
        }

        fn retire_log(&self, page: u32) {
            self.retired.borrow_mut().push(page);
        }
    }

    /// Looks at the object. Between the two loads of its handle another thread may move it.
    fn look(table: &Table, mode: AccessMode) -> ObjectLookup {
        look_up_object(table, 0, mode, |page, _| {
            assert_eq!(page, FROM);
            table.accesses.set(table.accesses.get() + 1);
            if let Some(handle) = table.handle_meanwhile.take() {
                table.handle.set(handle);
            }
        })
    }

    /// What a look at a page with this word must find, and which word it must leave.
    fn check_look(seen: FrameWord, mode: AccessMode, found: PageLookup, left: FrameWord) {
        match (seen.state(), found) {
            (State::Near | State::Cooling | State::Writeback, PageLookup::Resident(frame, before)) => {
                assert_eq!((Some(frame), before), (seen.frame(), seen));
                let slot = SlotHint::new(frame, 0);
                if mode == AccessMode::Peek {
                    let marks = |word: FrameWord| (word.is_referenced(), word.is_ahead());
                    assert!(left.state() == State::Near && left.frame() == Some(frame));
                    assert!(if seen.state() == State::Near { left == seen } else { marks(left).0 == marks(seen).0 });
                    return;
                }
                assert!(if mode == AccessMode::Read { left.confirms(slot) } else { left.confirms_dirty(slot) });
                assert!(seen.state() == State::Near || left.is_referenced());
            }
            (State::Loading, PageLookup::Loading) => assert_eq!(left, seen),
            (State::Claimed, PageLookup::Retry) => assert!(left.is_wanted() && left.state() == State::Claimed),
            (State::Far, PageLookup::Far(claim)) => assert_eq!((left, claim.seen(), claim.page()), (seen, seen, FROM)),
            (State::Empty, PageLookup::Empty(claim)) => {
                assert_eq!((mode, left, claim.seen()), (AccessMode::Create, seen, seen));
            }
            (State::Empty, PageLookup::Retry) => assert!(mode != AccessMode::Create && left == seen),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_look_finds_what_the_word_says_however_it_changes_meanwhile() {
        let words = reachable();
        for (mode, seen) in MODES.into_iter().flat_map(|mode| words.iter().map(move |word| (mode, *word))) {
            let table = Table::new(seen);
            check_look(seen, mode, look_up_page(&table, FROM, mode), table.word());
            for meanwhile in &words {
                let table = Table::new(seen);
                table.page_meanwhile.set(Some(*meanwhile));
                let found = look_up_page(&table, FROM, mode);
                let is_first = table.page_meanwhile.take().is_some() || *meanwhile == seen;
                check_look(if is_first { seen } else { *meanwhile }, mode, found, table.word());
            }
        }
    }

    #[test]
    fn a_page_is_claimed_once_and_only_as_it_was_seen() {
        let words = reachable();
        for (seen, is_wanted) in words.iter().flat_map(|word| [(*word, false), (*word, true)]) {
            let claim = match look_up_page(&Table::new(seen), FROM, AccessMode::Create) {
                PageLookup::Far(claim) => Some(claim),
                PageLookup::Empty(claim) => Some(claim),
                _ => None,
            };
            assert_eq!(claim.is_some(), matches!(seen.state(), State::Far | State::Empty));
            assert_eq!(peek_page(&Table::new(seen), FROM), claim.filter(|_| seen.state() == State::Far));
            let Some(claim) = claim else { continue };
            for now in &words {
                let table = Table::new(*now);
                assert_eq!(claim.take(&table, is_wanted), *now == seen);
                if *now == seen {
                    assert!(table.word().state() == State::Loading && table.word().is_wanted() == is_wanted);
                    assert_eq!(claim.claimed().want(), table.word().want());
                    assert!(!claim.take(&table, is_wanted), "it is somebody's");
                } else {
                    assert_eq!(table.word(), *now);
                }
            }
        }
    }

    #[test]
    fn a_task_marks_a_page_on_its_way_and_no_other() {
        let words = reachable();
        for (seen, meanwhile) in words.iter().flat_map(|seen| words.iter().map(move |other| (*seen, *other))) {
            let table = Table::new(seen);
            table.page_meanwhile.set(Some(meanwhile));
            let waits = want_page(&table, FROM);
            let is_first = table.page_meanwhile.take().is_some();
            let last = if is_first { seen } else { meanwhile };
            assert_eq!(waits, last.state() == State::Loading, "{seen:?}, then {meanwhile:?}");
            assert_eq!(table.word(), last.want().unwrap_or(last));
        }
    }

    #[test]
    fn a_flight_lands_with_its_marks_and_tells_whether_it_was_wanted() {
        let loading: Vec<FrameWord> = reachable().into_iter().filter(|word| word.state() == State::Loading).collect();
        for seen in &loading {
            for (frame, intent) in INTENTS.into_iter().flat_map(|intent| [(None, intent), (Some(FrameId(7)), intent)]) {
                for meanwhile in [seen.want(), None] {
                    let table = Table::new(*seen);
                    table.page_meanwhile.set(meanwhile);
                    let wanted = land_page(&table, FROM, frame, intent);
                    assert_eq!(wanted, seen.is_wanted() || meanwhile.is_some());
                    let landed = table.word();
                    assert!(landed.frame() == frame && !landed.is_wanted());
                    assert_eq!(landed.state(), if frame.is_some() { State::Near } else { State::Far });
                    assert_eq!(landed.is_ahead(), frame.is_some() && intent == FetchIntent::Prefetch);
                    assert!(frame.is_none() || landed.is_dirty() == (intent == FetchIntent::Write));
                }
            }
        }
    }

    #[test]
    fn a_flush_takes_the_mark_of_a_page_that_is_near_and_gives_it_back_if_it_fails() {
        let words = reachable();
        for (seen, meanwhile) in words.iter().flat_map(|seen| words.iter().map(move |other| (*seen, *other))) {
            let table = Table::new(seen);
            table.page_meanwhile.set(Some(meanwhile));
            let flushed = flush_page(&table, FROM);
            let is_first = table.page_meanwhile.take().is_some() || meanwhile == seen;
            let last = if is_first { seen } else { meanwhile };
            let is_near = matches!(last.state(), State::Near | State::Cooling);
            assert_eq!(flushed, is_near.then_some(last), "{seen:?}, then {meanwhile:?}");
            assert_eq!(table.word(), last.begin_flush().unwrap_or(last));
            if let Some(frame) = last.frame().filter(|_| is_near) {
                assert!(!table.word().is_dirty() && table.word().is_stored());
                assert!(!fail_flush_page(&table, FROM, FrameId(frame.0 + 1)), "another page is there");
                assert!(fail_flush_page(&table, FROM, frame) && table.word().is_dirty());
            }
        }
    }

    #[test]
    fn an_object_is_found_where_its_handle_and_its_page_agree() {
        let here = Handle::settle(FROM, 4);
        let moving = here.lock().unwrap();
        let elsewhere = here.moved(TO, 6);
        for (mode, word) in MODES[..2].iter().flat_map(|mode| reachable().into_iter().map(move |word| (*mode, word))) {
            let table = Table::new(word);
            let found = look(&table, mode);
            let is_near = matches!(found, ObjectLookup::Resident(..));
            assert_eq!(table.accesses.get(), u32::from(is_near));
            match (word.state(), found) {
                (State::Near | State::Cooling | State::Writeback, ObjectLookup::Resident(place, now)) => {
                    assert_eq!((Some(place.frame()), place.card(), now), (word.frame(), 4, here));
                }
                (State::Loading | State::Claimed | State::Empty, ObjectLookup::Retry) => {}
                (State::Far, ObjectLookup::Far(far)) => {
                    assert_eq!((far.page(), far.card(), far.object(), far.is_ahead()), (FROM, 4, 0, false));
                    assert_eq!(peek_object(&table, 0), Some(far));
                }
                other => panic!("{other:?}"),
            }
            assert!(word.state() == State::Far || peek_object(&table, 0).is_none());
            // With a page that comes whole, an object waits for the page.
            if word.state() == State::Loading {
                table.update_log(FROM, |log| (log.fetch().unwrap(), true));
                assert_eq!(look(&table, mode), ObjectLookup::Loading(FROM));
            }
            // The object moves, or begins to, between the loads of its handle.
            for meanwhile in [moving, elsewhere] {
                if !is_near {
                    break;
                }
                let table = Table::new(word);
                table.handle_meanwhile.set(Some(meanwhile));
                table.pages[TO as usize].set(far_word());
                let expected = if meanwhile == moving { None } else { Some(TO) };
                let page = match look(&table, mode) {
                    ObjectLookup::Relocating => None,
                    ObjectLookup::Far(far) => Some(far.page()),
                    other => panic!("{other:?}"),
                };
                assert_eq!(page, expected);
            }
        }
    }

    fn far_word() -> FrameWord {
        let near = FrameWord::EMPTY.create().0.finish_load(FrameId(3), true);
        let copied = near.cool().and_then(FrameWord::claim_for_eviction).map(FrameWord::begin_writeback);
        copied.and_then(FrameWord::finish_writeback).unwrap()
    }

    /// A table with a far object, and what a look at it finds.
    fn far_object() -> (Table, FarObject) {
        let table = Table::new(far_word());
        let ObjectLookup::Far(far) = look(&table, AccessMode::Read) else { panic!("it is far") };
        (table, far)
    }

    #[test]
    fn an_object_is_locked_while_it_is_far_and_the_same() {
        let class = LogClass::from_index(CLASS);
        for is_wanted in [false, true] {
            let (table, far) = far_object();
            assert!(lock_object(&table, far, class, is_wanted));
            let locked = table.handle.get();
            assert!(locked.location() == ObjectLocation::Moving && locked.is_wanted() == is_wanted);
            assert_eq!(table.load_log(FROM).going(), 1);
            // Nobody locks it twice, or fetches its page meanwhile.
            assert!(!lock_object(&table, far, class, false) && !fetch_log_page(&table, FROM, false));
            assert_eq!(table.load_log(FROM).going(), 1);
        }
        for change in [
            |table: &Table| table.pages[FROM as usize].set(FrameWord::EMPTY),
            |table: &Table| table.handle.set(Handle::settle(TO, 6)),
            |table: &Table| table.handle_meanwhile.set(Handle::settle(FROM, 4).lock()),
            |table: &Table| assert!(fetch_log_page(table, FROM, false)),
            |table: &Table| table.logs[FROM as usize].set(LogWord::opened(LogClass::from_index(CLASS + 1)).add()),
        ] {
            let (table, far) = far_object();
            change(&table);
            let handle = table.handle_meanwhile.get().unwrap_or(table.handle.get());
            assert!(!lock_object(&table, far, class, false));
            assert_eq!((table.handle.get(), table.load_log(FROM).going()), (handle, 0));
        }
        // The last object is gone meanwhile: who wanted it retires the page.
        let (table, far) = far_object();
        table.update_log(FROM, LogWord::remove);
        assert!(!lock_object(&table, far, class, false) && table.retired.borrow().is_empty());
    }

    #[test]
    fn a_whole_page_is_fetched_while_it_is_far_and_nobody_takes_out_of_it() {
        for word in reachable() {
            let table = Table::new(word);
            let before = table.load_log(FROM);
            let is_far = word.state() == State::Far;
            assert_eq!(fetch_log_page(&table, FROM, true), is_far);
            assert_eq!(table.load_log(FROM).is_whole(), is_far);
            if is_far {
                assert!(table.word().state() == State::Loading && table.word().is_wanted());
            } else {
                assert_eq!((table.word(), table.load_log(FROM)), (word, before));
            }
        }
    }

    #[test]
    fn an_object_lands_where_it_was_put_or_stays_where_it_was() {
        let class = LogClass::from_index(CLASS);
        for path in [IngressPath::Object, IngressPath::Page] {
            for (intent, is_wanted) in [None, Some(FetchIntent::Read), Some(FetchIntent::Prefetch)]
                .into_iter()
                .flat_map(|intent| [(intent, false), (intent, true)])
            {
                let (table, far) = far_object();
                table.update_log(FROM, |log| (log.leave(path), true));
                table.update_log(TO, |log| (log.expect(), true));
                assert!(lock_object(&table, far, class, false));
                // A task comes while the flight is under way, or while it lands.
                if is_wanted {
                    table.handle_meanwhile.set(table.handle.get().want());
                }
                assert_eq!(land_object(&table, 0, FROM, (TO, 6), intent), is_wanted);
                let (handle, came) = (table.handle.get(), intent.is_some());
                assert!(handle.is_at(if came { TO } else { FROM }, if came { 6 } else { 4 }) && !handle.is_wanted());
                assert_eq!(handle.is_ahead(), intent == Some(FetchIntent::Prefetch));
                let live = [FROM, TO].map(|page| (table.load_log(page).live(), table.load_log(page).coming()));
                assert_eq!(live, if came { [(0, 0), (1, 0)] } else { [(1, 0), (0, 0)] });
                assert_eq!(table.load_log(FROM).going(), 0);
                assert_eq!(*table.retired.borrow(), if came { &[FROM][..] } else { &[] }, "once, by who was last");
                assert!(!want_object(&table, 0));
            }
        }
    }
}
