//! Names of shared values, at the first node, without I/O.

use super::{HomeTicket, OwnerWord};
use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Value that has a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedValue {
    /// Word of the value. The table has one of its counted handles.
    pub word: OwnerWord,
    /// Hash of the value's type.
    pub types: u128,
    /// Name of the type, for readers.
    pub type_name: String,
}

/// Reason for which a name is not given, or leads to nothing.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum NameRefusal {
    /// No value has the name.
    Absent,
    /// A value has the name already.
    Taken,
    /// The value that has the name is of this type.
    OtherType(String),
    /// The table is full: so many values have names.
    TooManyNames(u64),
    /// So many threads of the node wait for names already.
    TooManyWaits(u64),
}

/// Names of values that many own, and who waits for one: a naming service, as that of `rmiregistry` or the roots of
/// a persistent heap.
///
/// The first one who asks has a name, until it is taken away. The table owns a counted handle of each value, so a
/// value stays as long as its name. Whoever looks a name up is told the word, and then asks the home of the value for
/// a handle of its own; if the name was taken away meanwhile, and the value dropped, the home does not count it any
/// more.
#[derive(Clone, Default, Debug)]
pub struct NameTable {
    named: BTreeMap<String, NamedValue>,
    waiting: BTreeMap<HomeTicket, String>,
}

impl NameTable {
    /// Most names of a program.
    pub const NAMES_MAX: usize = 4096;
    /// Longest name, in bytes.
    pub const NAME_BYTES_MAX: usize = 64;
    /// Longest name of a type that is kept, in bytes. Longer ones are cut.
    pub const TYPE_BYTES_MAX: usize = 160;
    /// Most waits for names of one node: more than a node has threads.
    pub const WAITS_OF_NODE_MAX: usize = 1024;

    /// Returns whether this may be a name: a word of 1 to [`NAME_BYTES_MAX`](NameTable::NAME_BYTES_MAX) bytes, without
    /// white space and control characters.
    pub fn is_name(name: &str) -> bool {
        let is_word = |name: &str| name.chars().all(|part| !part.is_whitespace() && !part.is_control());
        (1..=NameTable::NAME_BYTES_MAX).contains(&name.len()) && is_word(name)
    }

    /// Returns the begin of a type's name, as it is kept.
    pub fn cut_type(type_name: &str) -> &str {
        let mut end = type_name.len().min(NameTable::TYPE_BYTES_MAX);
        while !type_name.is_char_boundary(end) {
            end -= 1;
        }
        &type_name[..end]
    }

    /// Gives a value a name, if no other value has it whose node lives. Returns who waits for the name.
    pub fn publish(
        &mut self,
        name: &str,
        mut value: NamedValue,
        is_gone: impl FnOnce(OwnerWord) -> bool,
    ) -> Result<Vec<HomeTicket>, NameRefusal> {
        match self.named.get(name) {
            Some(known) if !is_gone(known.word) => return Err(NameRefusal::Taken),
            Some(_) => {}
            None if self.named.len() >= NameTable::NAMES_MAX => {
                return Err(NameRefusal::TooManyNames(NameTable::NAMES_MAX as u64));
            }
            None => {}
        }
        value.type_name.truncate(NameTable::cut_type(&value.type_name).len());
        self.named.insert(name.to_owned(), value);
        let mut told = Vec::new();
        self.waiting.retain(|ticket, wanted| {
            let is_told = wanted == name;
            if is_told {
                told.push(*ticket);
            }
            !is_told
        });
        Ok(told)
    }

    /// Returns the word of a value of this type.
    pub fn find(&self, name: &str, types: u128) -> Result<OwnerWord, NameRefusal> {
        let value = self.named.get(name).ok_or(NameRefusal::Absent)?;
        let is_meant = value.types == types;
        is_meant.then_some(value.word).ok_or_else(|| NameRefusal::OtherType(value.type_name.clone()))
    }

    /// Returns the word of a value of this type, or `None` if no value has the name: then the ticket waits for that.
    pub fn find_or_wait(
        &mut self,
        name: &str,
        types: u128,
        ticket: HomeTicket,
    ) -> Result<Option<OwnerWord>, NameRefusal> {
        match self.find(name, types) {
            Err(NameRefusal::Absent) => {}
            found => return found.map(Some),
        }
        let of_node = HomeTicket { number: 0, ..ticket }..=HomeTicket { number: u64::MAX, ..ticket };
        if self.waiting.range(of_node).count() >= NameTable::WAITS_OF_NODE_MAX {
            return Err(NameRefusal::TooManyWaits(NameTable::WAITS_OF_NODE_MAX as u64));
        }
        self.waiting.insert(ticket, name.to_owned());
        Ok(None)
    }

    /// Takes a name away from a value of this type. Returns the word; its handle is the caller's.
    pub fn unpublish(&mut self, name: &str, types: u128) -> Result<OwnerWord, NameRefusal> {
        let word = self.find(name, types)?;
        self.named.remove(name);
        Ok(word)
    }

    /// Ends a wait.
    pub fn cancel(&mut self, ticket: HomeTicket) {
        self.waiting.remove(&ticket);
    }

    /// Ends the waits of a node that is gone. The names that it has given stay.
    pub fn lose(&mut self, node: u16) {
        self.waiting.retain(|ticket, _| ticket.node != node);
    }

    /// Puts names back that were stored, beside those who wait.
    pub fn restore(&mut self, stored: impl IntoIterator<Item = (String, NamedValue)>) {
        self.named.extend(stored);
    }

    /// Returns all names with their values, in the order of the names.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &NamedValue)> {
        self.named.iter().map(|(name, value)| (name.as_str(), value))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a name that leads to a value of another type, or to one that was dropped.
    use super::*;
    use crate::dsm::{Colour, Partition};
    use alloc::collections::BTreeSet;
    use alloc::format;
    use alloc::string::ToString;

    fn word(block: u64) -> OwnerWord {
        OwnerWord::new(Partition::new(1).unwrap(), 16 * (1 + block), Colour(0)).unwrap()
    }

    fn value(block: u64, types: u128) -> NamedValue {
        NamedValue { word: word(block), types, type_name: format!("Type{types}") }
    }

    fn ticket(node: u16, number: u64) -> HomeTicket {
        HomeTicket { node, number }
    }

    #[test]
    fn a_name_has_one_value_of_one_type_until_it_is_taken_away_or_its_node_is_gone() {
        let mut names = NameTable::default();
        let lives = |_| false;
        assert_eq!(names.find("a", 1), Err(NameRefusal::Absent));
        assert_eq!(names.publish("a", value(1, 1), lives), Ok(Vec::new()));
        assert_eq!(names.publish("a", value(2, 1), lives), Err(NameRefusal::Taken));
        assert_eq!((names.find("a", 1), names.find("b", 1)), (Ok(word(1)), Err(NameRefusal::Absent)));
        let other = NameRefusal::OtherType("Type1".to_string());
        assert_eq!((names.find("a", 2), names.unpublish("a", 2)), (Err(other.clone()), Err(other)));
        assert_eq!(names.publish("a", value(3, 2), |gone| gone == word(1)), Ok(Vec::new()));
        assert_eq!((names.find("a", 2), names.unpublish("a", 2)), (Ok(word(3)), Ok(word(3))));
        assert_eq!(names.unpublish("a", 2), Err(NameRefusal::Absent));
    }

    #[test]
    fn who_waits_for_a_name_is_told_once_unless_it_gave_up_or_is_gone() {
        let mut names = NameTable::default();
        for number in 1..5 {
            assert_eq!(names.find_or_wait("a", 1, ticket(2, number)), Ok(None));
        }
        assert_eq!(names.find_or_wait("b", 1, ticket(2, 5)), Ok(None));
        assert_eq!(names.find_or_wait("a", 1, ticket(3, 1)), Ok(None));
        names.cancel(ticket(2, 2));
        names.lose(3);
        let told = [1, 3, 4].map(|number| ticket(2, number)).to_vec();
        assert_eq!(names.publish("a", value(1, 1), |_| false), Ok(told));
        assert_eq!(names.find_or_wait("a", 1, ticket(2, 6)), Ok(Some(word(1))));
        assert!(matches!(names.find_or_wait("a", 2, ticket(2, 7)), Err(NameRefusal::OtherType(_))));
        assert_eq!(names.publish("b", value(2, 1), |_| false), Ok([ticket(2, 5)].to_vec()));
        assert!(names.waiting.is_empty());
    }

    #[test]
    fn names_waits_and_texts_are_bounded() {
        let mut names = NameTable::default();
        for number in 0..NameTable::WAITS_OF_NODE_MAX as u64 {
            assert_eq!(names.find_or_wait("z", 1, ticket(2, number)), Ok(None));
        }
        let full = NameRefusal::TooManyWaits(1024);
        assert_eq!(names.find_or_wait("z", 1, ticket(2, 5000)), Err(full));
        assert_eq!(names.find_or_wait("z", 1, ticket(1, 5000)), Ok(None), "each node has its own");
        for number in 0..NameTable::NAMES_MAX as u64 {
            assert!(names.publish(&format!("name{number}"), value(number, 1), |_| false).is_ok());
        }
        let full = NameRefusal::TooManyNames(4096);
        assert_eq!(names.publish("z", value(1, 1), |_| false), Err(full));
        assert_eq!(names.unpublish("name7", 1), Ok(word(7)));
        let long = NamedValue { type_name: "é".repeat(200), ..value(1, 1) };
        assert_eq!(names.publish("z", long, |_| false).map(|told| told.len()), Ok(1025));
        let kept = names.iter().find(|(name, _)| *name == "z").map(|(_, value)| value.type_name.len());
        assert_eq!((kept, names.iter().len()), (Some(160), 4096));
    }

    #[test]
    fn names_are_words() {
        let long = "n".repeat(64);
        for name in ["a", "orders/by-day", "Größe", &long] {
            assert!(NameTable::is_name(name), "{name}");
        }
        for name in ["", "two words", "line\n", "\u{7}", "tab\t", &format!("{long}n")] {
            assert!(!NameTable::is_name(name), "{name}");
        }
    }

    /// What a node does in the model below.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    enum Actor {
        /// It has a handle of the value, and gives the value the name.
        Publishes,
        /// It asks the table for the name.
        LooksUp,
        /// It was told the word, and asks the home for a handle.
        Knows,
        /// It takes the name away.
        Unpublishes,
        /// It has a handle, which it reads through and drops.
        Has,
        Done,
    }

    /// A value, its count at its home, and three nodes that use its name. Messages are steps: each happens at once, and
    /// between two steps of a node others do theirs.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Model {
        is_named: bool,
        handles: u64,
        actors: Vec<Actor>,
    }

    impl Model {
        fn table(&self) -> NameTable {
            let mut names = NameTable::default();
            if self.is_named {
                names.publish("a", value(1, 1), |_| false).unwrap();
            }
            names
        }

        /// Returns what the step of a node leads to.
        fn step(&self, actor: usize, asks_home: bool) -> Model {
            let (mut next, mut names) = (self.clone(), self.table());
            next.actors[actor] = match self.actors[actor] {
                Actor::Publishes => {
                    // A handle for the table, which is dropped again if the name is refused.
                    if names.publish("a", value(1, 1), |_| false).is_ok() {
                        next.handles += 1;
                    }
                    Actor::Has
                }
                Actor::LooksUp => names.find("a", 1).map_or(Actor::Done, |_| Actor::Knows),
                // The home counts it, or does not know it any more.
                Actor::Knows if asks_home && self.handles == 0 => Actor::LooksUp,
                Actor::Knows => {
                    next.handles += 1;
                    Actor::Has
                }
                // The handle of the table is the node's.
                Actor::Unpublishes => names.unpublish("a", 1).map_or(Actor::Done, |_| Actor::Has),
                Actor::Has => {
                    next.handles -= 1;
                    Actor::Done
                }
                Actor::Done => return next,
            };
            next.is_named = names.find("a", 1).is_ok();
            next
        }

        /// Returns whether nobody reads what was dropped, and nothing stays for ever.
        fn is_right(&self) -> bool {
            let have = self.actors.iter().filter(|actor| matches!(actor, Actor::Has | Actor::Publishes)).count() as u64;
            self.handles == have + u64::from(self.is_named)
        }
    }

    /// Explores all orders of steps. Returns whether each state is right, and no more handles are counted once the
    /// value was dropped.
    fn explore(asks_home: bool) -> bool {
        let actors = [Actor::Publishes, Actor::LooksUp, Actor::LooksUp, Actor::Unpublishes].to_vec();
        let begin = Model { is_named: false, handles: 1, actors };
        let (mut seen, mut left) = (BTreeSet::new(), [begin].to_vec());
        let mut ends = 0;
        while let Some(state) = left.pop() {
            if !state.is_right() {
                return false;
            }
            if !seen.insert(state.clone()) {
                continue;
            }
            let nexts = (0..state.actors.len()).map(|actor| state.step(actor, asks_home));
            let nexts: Vec<_> = nexts.filter(|next| *next != state).collect();
            if nexts.iter().any(|next| state.handles == 0 && next.handles > 0) {
                return false;
            }
            ends += u32::from(nexts.is_empty());
            left.extend(nexts);
        }
        assert!(ends > 1 && seen.len() > 50, "{ends} ends of {} states", seen.len());
        true
    }

    #[test]
    fn a_value_lives_as_long_as_its_name_or_a_handle_in_every_order_of_steps() {
        assert!(explore(true));
        // Whoever was told a word and did not ask the home would have a value that was dropped.
        assert!(!explore(false));
    }
}
