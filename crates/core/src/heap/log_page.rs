//! Log pages: how a page of the object plane is cut into objects, and how many of them live.
//!
//! A log page is filled by one owner (a thread, or the evacuator) and is *open* as long as that
//! lasts. While near, it may be opened again when some of its objects are gone, and it goes when
//! the last one is gone. Each object has a *tag* at the page's end, the number of its handle, so
//! that the owner of the page finds the slots of the objects in it. A tag is good if the handle
//! points back. Objects of half a KiB and of one KiB leave no room for tags, which lie *aside*
//! then, near. An object that is still on its way has its place already, and counts as *coming*: as
//! long as one is, the page stays near.
//!
//! A far page may come *whole*, or objects may be *going* out of it to other pages; not both at a
//! time (Atlas 4.2, "object-in vs. page-in"). A page from which a thread takes objects stays Far
//! until that ends, so that nobody changes or moves them meanwhile. The *path* by which its objects
//! come is decided when the page leaves.
//!
//! ```text
//! 0                                            4096
//! +--------+--------+--------+----+---+---+---+
//! | first  | second | third  |    |tag|tag|tag|   the first object's tag is the last one
//! +--------+--------+--------+----+---+---+---+
//! ```

use super::CARD_BYTES;
use crate::cast::{low_u8, u8_of};
use crate::geometry::PAGE_BYTES;

/// Size of a tag in bytes.
pub const TAG_BYTES: usize = 4;

/// Cards of an object, by class. Larger objects would waste too much of a page beside the tags;
/// they are not of the object plane.
const CARDS: [u8; 26] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 21, 25, 28, 31, 32, 36, 42, 50, 63, 64, 85];

/// Greatest number of tags of a page that lie aside.
pub const TAGS_ASIDE: usize = 8;
/// Least size in bytes of objects whose tags lie aside, if the objects would fill a page. For
/// smaller ones this would make room for less than an eighth more objects, which is not worth it.
const ASIDE_FROM: usize = PAGE_BYTES / TAGS_ASIDE;

/// Objects of a page, by class: a table, because every allocation asks.
const CAPACITIES: [u8; CARDS.len()] = {
    let mut capacities = [0; CARDS.len()];
    let mut index = 0;
    while index < CARDS.len() {
        let bytes = CARDS[index] as usize * CARD_BYTES;
        let tag = if bytes >= ASIDE_FROM && PAGE_BYTES.is_multiple_of(bytes) { 0 } else { TAG_BYTES };
        capacities[index] = u8_of(PAGE_BYTES / (bytes + tag));
        index += 1;
    }
    capacities
};

/// Size class of the objects of a log page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogClass(u8);

impl LogClass {
    /// Number of classes.
    pub const COUNT: usize = CARDS.len();

    /// Returns the smallest class for objects of this size and alignment; `None` if they are too
    /// large for the object plane.
    pub const fn of(bytes: usize, align: usize) -> Option<LogClass> {
        let mut index = 0;
        while index < CARDS.len() {
            let class = LogClass(u8_of(index));
            if class.bytes() >= bytes && class.bytes().is_multiple_of(align) {
                return Some(class);
            }
            index += 1;
        }
        None
    }

    /// Returns the class with this index, below [`LogClass::COUNT`].
    pub const fn from_index(index: usize) -> LogClass {
        assert!(index < Self::COUNT);
        LogClass(u8_of(index))
    }

    /// Returns the index of the class.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the bytes that an object occupies.
    #[inline]
    pub const fn bytes(self) -> usize {
        CARDS[self.index()] as usize * CARD_BYTES
    }

    /// Checks whether the tags lie aside.
    #[inline]
    pub const fn has_tags_aside(self) -> bool {
        // Only sizes that divide a page leave it no byte.
        CAPACITIES[self.index()] as usize * self.bytes() == PAGE_BYTES
    }

    /// Returns the number of objects of a full page.
    #[inline]
    pub const fn capacity(self) -> u32 {
        CAPACITIES[self.index()] as u32
    }

    /// Returns the greatest number of objects with which a page is worth opening again.
    #[inline]
    pub const fn worth_filling(self) -> u32 {
        let holes = self.capacity() / 16;
        self.capacity() - if holes == 0 { 1 } else { holes }
    }

    /// Returns the first card of the object with this index.
    #[inline]
    pub fn card(self, index: u32) -> u8 {
        debug_assert!(index < self.capacity());
        u8_of(index as usize * CARDS[self.index()] as usize)
    }

    /// Returns the index of the object that begins at this card.
    pub fn index_at(self, card: u8) -> u32 {
        u32::from(card) / u32::from(CARDS[self.index()])
    }

    /// Returns the byte offset in the page of the tag of the object with this index; `None`: the
    /// tag lies aside.
    #[inline]
    pub fn tag_offset(self, index: u32) -> Option<usize> {
        debug_assert!(index < self.capacity());
        (!self.has_tags_aside()).then_some(PAGE_BYTES - (index as usize + 1) * TAG_BYTES)
    }
}

/// Path by which objects of a far log page come near.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IngressPath {
    /// Each object alone, to another page.
    Object,
    /// All objects together, with their page.
    Page,
}

/// Word of a log page: class, stage, path, and the numbers of objects that live, that are coming,
/// and that are going. One atomic word per page.
///
/// ```text
///  31   27   26   25   24 23    16 15     8 7     0
/// +-------+------+-------+--------+--------+------+
/// | class | path | stage | going  | coming | live |
/// +-------+------+-------+--------+--------+------+
/// ```
///
/// *Stage*: closed, open, coming as a whole, or near after it came as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogWord(pub u32);

const COUNT_MASK: u32 = 0xFF;
const COMING: u32 = 1 << 8;
const GOING: u32 = 1 << 16;
const OPEN: u32 = 1 << 24;
const WHOLE: u32 = 2 << 24;
const CAME: u32 = 3 << 24;
const STAGE_MASK: u32 = 3 << 24;
const BY_PAGE: u32 = 1 << 26;
const CLASS_SHIFT: u32 = 27;

const _: () = assert!(LogClass(0).capacity() < COUNT_MASK, "each count fits in eight bits, with one who merges");
const _: () = assert!(LogClass::COUNT < 1 << (u32::BITS - CLASS_SHIFT));

impl LogWord {
    /// Word of a page that is not in use: all zeros, like fresh memory.
    pub const UNUSED: LogWord = LogWord(0);

    /// Returns the word of a page that is in use from now on: open and without objects.
    pub fn opened(class: LogClass) -> LogWord {
        LogWord((class.0 as u32 + 1) << CLASS_SHIFT | OPEN)
    }

    /// Returns the class of the page's objects, while it is in use.
    #[inline]
    pub fn class(self) -> Option<LogClass> {
        (self.0 >> CLASS_SHIFT).checked_sub(1).map(|index| LogClass(low_u8(u64::from(index))))
    }

    /// Checks whether the page is open: an owner fills it.
    pub fn is_open(self) -> bool {
        self.0 & STAGE_MASK == OPEN
    }

    /// Returns the number of objects that live in the page, those that are coming included.
    pub fn live(self) -> u32 {
        self.0 & COUNT_MASK
    }

    /// Returns the number of objects that are on their way to the page. While there is one, the
    /// page must not leave.
    pub fn coming(self) -> u32 {
        (self.0 / COMING) & COUNT_MASK
    }

    /// Returns the number of threads that take objects out of the page while it is Far. While there
    /// is one, it stays Far.
    pub fn going(self) -> u32 {
        (self.0 / GOING) & COUNT_MASK
    }

    /// Checks whether the page is coming near as a whole at this moment.
    pub fn is_whole(self) -> bool {
        self.0 & STAGE_MASK == WHOLE
    }

    /// Checks whether the page is near and came as a whole. Then the used objects tell something,
    /// because those that were not used could have been.
    pub fn came_whole(self) -> bool {
        self.0 & STAGE_MASK == CAME
    }

    /// Returns the path by which the page's objects come near when it is Far.
    pub fn path(self) -> IngressPath {
        if self.0 & BY_PAGE != 0 { IngressPath::Page } else { IngressPath::Object }
    }

    /// Sets the path by which the objects of the page, which leaves, will come.
    pub fn leave(self, path: IngressPath) -> LogWord {
        let stage = if self.came_whole() { 0 } else { self.0 & STAGE_MASK };
        let path = if path == IngressPath::Page { BY_PAGE } else { 0 };
        LogWord(self.0 & !(STAGE_MASK | BY_PAGE) | stage | path)
    }

    /// Checks whether objects live in at most `quarters` quarters of the page. False for open pages
    /// and for dead ones.
    pub fn is_sparse(self, quarters: u32) -> bool {
        let filled = |class: LogClass| self.live() * 4 <= class.capacity() * quarters;
        !self.is_open() && self.live() > 0 && self.class().is_some_and(filled)
    }

    /// Counts one more object. Only in open pages.
    pub fn add(self) -> LogWord {
        assert!(self.is_open() && self.class().is_some_and(|class| self.live() < class.capacity()));
        LogWord(self.0 + 1)
    }

    /// Counts one more object, which is on its way. Only in open pages.
    pub fn expect(self) -> LogWord {
        LogWord(self.add().0 + COMING)
    }

    /// Ends the coming of one object. It is there, and may even be gone again; or it is not coming
    /// after all, and is to be [removed](LogWord::remove). True if the page is dead now; then the
    /// caller must retire it.
    pub fn arrived(self) -> (LogWord, bool) {
        assert!(self.coming() > 0);
        let after = LogWord(self.0 - COMING);
        (after, after.is_dead())
    }

    /// Counts one object less. True if the page is dead now; then the caller must retire it.
    pub fn remove(self) -> (LogWord, bool) {
        assert!(self.live() > 0, "an object was freed twice");
        let after = LogWord(self.0 - 1);
        (after, after.is_dead())
    }

    /// Opens the page again for the caller, who has it near and fills its holes. `None` if another
    /// thread is at work on it, or nothing lives in it.
    pub fn reopened(self) -> Option<LogWord> {
        let is_at_rest = !self.is_open() && !self.is_whole() && self.coming() == 0 && self.going() == 0;
        (is_at_rest && self.live() > 0).then_some(LogWord(self.0 & !STAGE_MASK | OPEN))
    }

    /// Checks whether the page has enough holes to be worth filling.
    #[inline]
    pub fn is_worth_filling(self) -> bool {
        self.live() > 0 && self.class().is_some_and(|class| self.live() <= class.worth_filling())
    }

    /// Closes the page: its owner fills it no more. True if the page is dead now; then the caller
    /// must retire it.
    pub fn closed(self) -> (LogWord, bool) {
        assert!(self.is_open());
        let after = LogWord(self.0 & !STAGE_MASK);
        (after, after.is_dead())
    }

    /// Begins to take objects out of the page, which stays Far if it is. `None` if the page is
    /// coming near at this moment, or is dead.
    pub fn go(self) -> Option<LogWord> {
        (self.live() > 0 && !self.is_whole()).then_some(LogWord(self.0 + GOING))
    }

    /// Ends the taking of objects out of the page. True if the page is dead now; then the caller
    /// must retire it. Objects that were taken are to be [removed](LogWord::remove).
    pub fn gone(self) -> (LogWord, bool) {
        assert!(self.going() > 0);
        let after = LogWord(self.0 - GOING);
        (after, after.is_dead())
    }

    /// Begins to bring the page, if it is Far, near as a whole, whatever its path; `None` if that
    /// must not be now.
    pub fn fetch(self) -> Option<LogWord> {
        let may = self.live() > 0 && self.going() == 0 && !self.is_open() && !self.is_whole();
        may.then_some(LogWord(self.0 & !STAGE_MASK | WHOLE))
    }

    /// Ends a fetch of the whole page: it has come near (`came`), or not. True if the page is dead
    /// now; then the caller must retire it.
    pub fn fetched(self, came: bool) -> (LogWord, bool) {
        assert!(self.is_whole());
        let after = LogWord(self.0 & !STAGE_MASK | if came { CAME } else { 0 });
        (after, after.is_dead())
    }

    fn is_dead(self) -> bool {
        !self.is_open() && !self.is_whole() && self.live() == 0 && self.coming() == 0 && self.going() == 0
    }
}

/// Decision of the evacuator about a log page that was not used for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvacuationDecision {
    /// Nothing lives in the page: its frame is free.
    Drop,
    /// The page leaves as it is.
    Write,
    /// The page keeps its place once more: all of it would be missed. Its objects are not hot any
    /// more.
    Stay,
    /// The objects of the page move: hot ones together, cold ones together. Then its frame is free.
    Evacuate,
}

impl EvacuationDecision {
    /// Decides about a page of `capacity` objects, of which `live` live and `hot` of these were
    /// used lately.
    ///
    /// A page without hot objects that is at least three quarters full leaves whole: moving its
    /// objects first would cost a copy of each and save little. A page that is three quarters full
    /// of hot objects stays, for the same reason.
    pub fn of(live: u32, hot: u32, capacity: u32) -> EvacuationDecision {
        debug_assert!(hot <= live && live <= capacity);
        match live {
            0 => EvacuationDecision::Drop,
            _ if hot == 0 && live * 4 >= capacity * 3 => EvacuationDecision::Write,
            _ if hot * 4 >= capacity * 3 => EvacuationDecision::Stay,
            _ => EvacuationDecision::Evacuate,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that overlap each other or the tags, and pages that die never or twice.
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;

    fn all() -> impl Iterator<Item = LogClass> {
        (0..LogClass::COUNT).map(LogClass::from_index)
    }

    #[test]
    fn objects_and_tags_do_not_overlap() {
        for class in all() {
            let mut taken = vec![false; PAGE_BYTES];
            for index in 0..class.capacity() {
                let card = class.card(index);
                assert_eq!(class.index_at(card), index);
                let first = usize::from(card) * CARD_BYTES;
                let tag = class.tag_offset(index).map(|tag| tag..tag + TAG_BYTES);
                assert!(tag.clone().is_none_or(|tag| tag.start.is_multiple_of(TAG_BYTES)));
                for byte in (first..first + class.bytes()).chain(tag.unwrap_or_default()) {
                    assert!(!core::mem::replace(&mut taken[byte], true), "{class:?}, object {index}, byte {byte}");
                }
            }
            let used = taken.iter().filter(|taken| **taken).count();
            assert!(!class.has_tags_aside() || used == PAGE_BYTES && class.capacity() as usize <= TAGS_ASIDE);
            assert!(used * 100 >= PAGE_BYTES * 94 || class.bytes() >= 512, "{class:?} uses {used}");
        }
    }

    #[test]
    fn every_size_and_alignment_finds_its_class() {
        for bytes in 0..=85 * CARD_BYTES {
            let class = LogClass::of(bytes, 1).unwrap();
            assert!(class.bytes() >= bytes && class.capacity() >= 3);
            assert!(class.index() == 0 || LogClass::from_index(class.index() - 1).bytes() < bytes.max(1));
        }
        for align in [16, 64, 256] {
            let class = LogClass::of(17, align).unwrap();
            for index in 0..class.capacity() {
                assert!((usize::from(class.card(index)) * CARD_BYTES).is_multiple_of(align));
            }
        }
        assert_eq!(LogClass::of(85 * CARD_BYTES + 1, 1), None);
        assert_eq!(LogClass::of(1, 4096), None);
    }

    /// Every order of adding, expecting, arriving, removing, closing, going and coming whole, up to four objects.
    #[test]
    fn a_page_dies_once() {
        type Seen = BTreeSet<(u32, u32, u32, u32)>;
        fn go(seen: &mut Seen, word: LogWord, added: u32, went: u32, died: u32) {
            if !seen.insert((word.0, added, went, died)) {
                return;
            }
            let alive = word.is_open() || word.is_whole() || word.live() + word.coming() + word.going() > 0;
            assert_eq!(died, u32::from(!alive), "{word:?}");
            assert!(!(word.is_whole() && word.going() > 0), "{word:?}");
            let whole = [IngressPath::Object, IngressPath::Page].map(|path| word.leave(path).fetch().is_some());
            assert_eq!(whole, [word.live() > 0 && word.going() == 0 && !word.is_open() && !word.is_whole(); 2]);
            if word.is_open() && added < 4 {
                go(seen, word.add(), added + 1, went, died);
                go(seen, word.expect(), added + 1, went, died);
            }
            if went < 3 {
                let began = [word.go(), word.leave(IngressPath::Object).fetch()];
                began.into_iter().flatten().for_each(|next| go(seen, next, added, went + 1, died));
            }
            if let Some(open) = word.reopened()
                && went < 3
            {
                assert!(open.is_open() && open.live() == word.live() && open.path() == word.path());
                go(seen, open, added, went + 1, died);
            }
            let ended = [
                (word.coming() > 0).then(|| word.arrived()),
                (word.live() > 0).then(|| word.remove()),
                word.is_open().then(|| word.closed()),
                (word.going() > 0).then(|| word.gone()),
                word.is_whole().then(|| word.fetched(true)),
                word.is_whole().then(|| word.fetched(false)),
            ];
            ended.into_iter().flatten().for_each(|(next, dead)| go(seen, next, added, went, died + u32::from(dead)));
        }
        for class in all().filter(|class| class.capacity() >= 4) {
            assert_eq!(LogWord::opened(class).class(), Some(class));
            go(&mut Seen::new(), LogWord::opened(class), 0, 0, 0);
        }
        assert_eq!((LogWord::UNUSED.class(), LogWord::UNUSED.go()), (None, None));
    }

    #[test]
    fn sizes_that_fill_a_page_fill_it() {
        for (bytes, capacity) in [(1024, 4), (512, 8), (1008, 4), (496, 8), (1360, 3)] {
            assert_eq!(LogClass::of(bytes, 1).unwrap().capacity(), capacity, "{bytes}");
        }
    }

    #[test]
    fn pages_worth_filling_have_a_hole_and_an_object() {
        for class in all() {
            let (capacity, least) = (class.capacity(), class.worth_filling());
            assert!(least > 0 && least < capacity && least * 16 >= capacity * 10, "{class:?}");
            let mut word = LogWord::opened(class);
            for live in 0..=capacity {
                assert_eq!(word.is_worth_filling(), (1..=least).contains(&live));
                word = if live < capacity { word.add() } else { word };
            }
        }
    }

    #[test]
    fn sparse_pages_have_few_objects_and_some() {
        for class in all() {
            let mut word = LogWord::opened(class);
            (0..class.capacity()).for_each(|_| word = word.add());
            assert!(!word.is_sparse(4), "open");
            word = word.closed().0;
            while word.live() > 0 {
                for quarters in 0..=4 {
                    assert_eq!(word.is_sparse(quarters), word.live() * 4 <= class.capacity() * quarters, "{word:?}");
                }
                word = word.remove().0;
            }
            assert!(!word.is_sparse(4), "dead");
        }
    }

    #[test]
    fn verdicts_free_frames_and_write_nothing_hot() {
        for class in all() {
            let capacity = class.capacity();
            for live in 0..=capacity {
                for hot in 0..=live {
                    let verdict = EvacuationDecision::of(live, hot, capacity);
                    assert_eq!(verdict == EvacuationDecision::Drop, live == 0);
                    assert!(verdict != EvacuationDecision::Write || hot == 0 && live * 2 > capacity);
                    // What stays is written or moved next time, when nothing in it is hot.
                    assert!(
                        verdict != EvacuationDecision::Stay
                            || !matches!(EvacuationDecision::of(live, 0, capacity), EvacuationDecision::Stay)
                    );
                    // Objects that move need fewer pages than they had, or leave cold ones behind.
                    assert!(verdict != EvacuationDecision::Evacuate || hot < live || live * 4 < capacity * 3);
                }
            }
        }
    }
}
