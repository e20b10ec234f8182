//! Log pages: how a page of the object plane is cut into objects, and how many of them live.
//!
//! A log page is filled from its beginning by one owner (a thread, or the evacuator), *open* as long as that lasts, and its
//! holes are never filled: it goes when its last object is gone. Each object has a *tag* at the page's end, the number of its handle,
//! so that whoever has the page finds the slots of what is in it. A tag is good if the handle points back.
//! An object that is still on its way has its place already, and counts as *coming*: as long as one is, the page stays near.
//!
//! ```text
//! 0                                            4096
//! +--------+--------+--------+----+---+---+---+
//! | first  | second | third  |    |tag|tag|tag|   the first object's tag is the last one
//! +--------+--------+--------+----+---+---+---+
//! ```

use super::CARD_BYTES;
use crate::geometry::PAGE_BYTES;

/// Bytes of a tag.
pub const TAG_BYTES: usize = 4;

/// Cards of an object. Larger ones would waste too much of a page beside the tags; they are not of the object plane.
const CARDS: [u8; 24] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 21, 25, 28, 31, 36, 42, 50, 63, 85];

/// How large the objects of a log page are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogClass(u8);

impl LogClass {
    /// Number of classes.
    pub const COUNT: usize = CARDS.len();

    /// The smallest class for objects of this size and alignment; `None` if they are too large for the object plane.
    pub const fn of(bytes: usize, align: usize) -> Option<LogClass> {
        let mut index = 0;
        while index < CARDS.len() {
            let class = LogClass(index as u8);
            if class.bytes() >= bytes && class.bytes().is_multiple_of(align) {
                return Some(class);
            }
            index += 1;
        }
        None
    }

    /// The class with this index, below [`LogClass::COUNT`].
    pub fn from_index(index: usize) -> LogClass {
        assert!(index < Self::COUNT);
        LogClass(index as u8)
    }

    /// Its index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Bytes that an object occupies.
    pub const fn bytes(self) -> usize {
        CARDS[self.index()] as usize * CARD_BYTES
    }

    /// Objects of a page.
    pub const fn capacity(self) -> u32 {
        (PAGE_BYTES / (self.bytes() + TAG_BYTES)) as u32
    }

    /// First card of the object with this index.
    pub fn card(self, index: u32) -> u8 {
        debug_assert!(index < self.capacity());
        (index as usize * CARDS[self.index()] as usize) as u8
    }

    /// The object that begins at this card.
    pub fn index_at(self, card: u8) -> u32 {
        u32::from(card) / u32::from(CARDS[self.index()])
    }

    /// Where in the page the tag of the object with this index is.
    pub fn tag_offset(self, index: u32) -> usize {
        debug_assert!(index < self.capacity());
        PAGE_BYTES - (index as usize + 1) * TAG_BYTES
    }
}

/// What is in a log page: class, whether it is open, objects that live, and those of them that are coming. One atomic word per page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogWord(pub u32);

const LIVE_MASK: u32 = COMING - 1;
const COMING: u32 = 1 << 8;
const COMING_MASK: u32 = OPEN - COMING;
const OPEN: u32 = 1 << 16;
const CLASS_SHIFT: u32 = 24;

const _: () = assert!(LogClass(0).capacity() < COMING, "each count fits in eight bits");

impl LogWord {
    /// Not in use. The same as fresh memory.
    pub const UNUSED: LogWord = LogWord(0);

    /// In use from now on: open and without objects.
    pub fn opened(class: LogClass) -> LogWord {
        LogWord((class.0 as u32 + 1) << CLASS_SHIFT | OPEN)
    }

    /// The class of its objects, while it is in use.
    pub fn class(self) -> Option<LogClass> {
        (self.0 >> CLASS_SHIFT).checked_sub(1).map(|index| LogClass(index as u8))
    }

    /// Somebody fills it.
    pub fn is_open(self) -> bool {
        self.0 & OPEN != 0
    }

    /// Objects that live in it, those that are coming included.
    pub fn live(self) -> u32 {
        self.0 & LIVE_MASK
    }

    /// Objects that are on their way to it. While there is one, it must not leave.
    pub fn coming(self) -> u32 {
        (self.0 & COMING_MASK) / COMING
    }

    /// Do objects live in at most so many quarters of it? Not of open pages, and of dead ones there is nothing to say.
    pub fn is_sparse(self, quarters: u32) -> bool {
        let filled = |class: LogClass| self.live() * 4 <= class.capacity() * quarters;
        !self.is_open() && self.live() > 0 && self.class().is_some_and(filled)
    }

    /// One object more. Only in open pages.
    pub fn add(self) -> LogWord {
        assert!(self.is_open() && self.class().is_some_and(|class| self.live() < class.capacity()));
        LogWord(self.0 + 1)
    }

    /// One object more, which is on its way. Only in open pages.
    pub fn expect(self) -> LogWord {
        LogWord(self.add().0 + COMING)
    }

    /// One that was coming is there, and may even be gone again; or it is not coming after all, and is to be
    /// [removed](LogWord::remove). True if the page is dead by that, and the caller's to retire.
    pub fn arrived(self) -> (LogWord, bool) {
        assert!(self.coming() > 0);
        let after = LogWord(self.0 - COMING);
        (after, after.is_dead())
    }

    /// One object less; true if the page is dead by that, and the caller's to retire.
    pub fn remove(self) -> (LogWord, bool) {
        assert!(self.live() > 0, "an object was freed twice");
        let after = LogWord(self.0 - 1);
        (after, after.is_dead())
    }

    /// Its owner fills it no more; true if the page is dead by that, and the caller's to retire.
    pub fn closed(self) -> (LogWord, bool) {
        assert!(self.is_open());
        let after = LogWord(self.0 & !OPEN);
        (after, after.is_dead())
    }

    fn is_dead(self) -> bool {
        !self.is_open() && self.live() == 0 && self.coming() == 0
    }
}

/// What the evacuator does with a log page that nobody used for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing lives in it: its frame is free.
    Drop,
    /// It leaves as it is.
    Write,
    /// It keeps its place once more: all of it would be missed. Its objects are not hot any more.
    Stay,
    /// Its objects move: hot ones together, cold ones together. Then its frame is free.
    Evacuate,
}

impl Verdict {
    /// For a page of `capacity` objects, of which `live` live and `hot` of these were used lately.
    ///
    /// A page without hot objects that is at least three quarters full leaves whole: moving its objects first would cost a copy of
    /// each and save little. One that is full of hot objects to three quarters stays, for the same reason.
    pub fn of(live: u32, hot: u32, capacity: u32) -> Verdict {
        debug_assert!(hot <= live && live <= capacity);
        match live {
            0 => Verdict::Drop,
            _ if hot == 0 && live * 4 >= capacity * 3 => Verdict::Write,
            _ if hot * 4 >= capacity * 3 => Verdict::Stay,
            _ => Verdict::Evacuate,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against objects that overlap each other or the tags, and pages that die never or twice.
    use super::*;
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
                let (first, tag) = (usize::from(card) * CARD_BYTES, class.tag_offset(index));
                assert!(tag.is_multiple_of(TAG_BYTES));
                for byte in (first..first + class.bytes()).chain(tag..tag + TAG_BYTES) {
                    assert!(!core::mem::replace(&mut taken[byte], true), "{class:?}, object {index}, byte {byte}");
                }
            }
            let used = taken.iter().filter(|taken| **taken).count();
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

    /// Every order of adding, expecting, arriving, removing and closing, up to four objects.
    #[test]
    fn a_page_dies_once() {
        fn go(word: LogWord, added: u32, died: u32) {
            let alive = word.is_open() || word.live() > 0 || word.coming() > 0;
            assert_eq!(died, u32::from(!alive), "{word:?}");
            if word.is_open() && added < 4 {
                go(word.add(), added + 1, died);
                go(word.expect(), added + 1, died);
            }
            if word.coming() > 0 {
                let (next, dead) = word.arrived();
                go(next, added, died + u32::from(dead));
            }
            if word.live() > 0 {
                let (next, dead) = word.remove();
                go(next, added, died + u32::from(dead));
            }
            if word.is_open() {
                let (next, dead) = word.closed();
                go(next, added, died + u32::from(dead));
            }
        }
        for class in all().filter(|class| class.capacity() >= 4) {
            assert_eq!(LogWord::opened(class).class(), Some(class));
            go(LogWord::opened(class), 0, 0);
        }
        assert_eq!(LogWord::UNUSED.class(), None);
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
                    let verdict = Verdict::of(live, hot, capacity);
                    assert_eq!(verdict == Verdict::Drop, live == 0);
                    assert!(verdict != Verdict::Write || hot == 0 && live * 2 > capacity);
                    // What stays is written or moved next time, when nothing in it is hot.
                    assert!(verdict != Verdict::Stay || !matches!(Verdict::of(live, 0, capacity), Verdict::Stay));
                    // Objects that move need fewer pages than they had, or leave cold ones behind.
                    assert!(verdict != Verdict::Evacuate || hot < live || live * 4 < capacity * 3);
                }
            }
        }
    }
}
