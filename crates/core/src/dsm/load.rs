//! Where a task begins: nodes tell each other what they have to do with every message.

use serde::{Deserialize, Serialize};

/// Work of a node, as it tells others.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct NodeLoad {
    /// Number of the statement: later ones have greater numbers.
    pub stamp: u64,
    /// Tasks that the node could begin at once, or more.
    pub room: u8,
    /// Tasks that wait at the node and may begin at another one, or more.
    pub waiting: u8,
}

impl NodeLoad {
    const WAITING_SHIFT: u32 = 8;
    /// Leaves the stamp 48 bits: years of messages.
    const STAMP_SHIFT: u32 = 16;

    /// Returns the load in one word. Of two words, the greater one is the later statement.
    pub fn bits(self) -> u64 {
        u64::from(self.room) | u64::from(self.waiting) << NodeLoad::WAITING_SHIFT | self.stamp << NodeLoad::STAMP_SHIFT
    }

    /// Returns the load of a word.
    pub fn from_bits(bits: u64) -> NodeLoad {
        let [room, waiting, ..] = bits.to_le_bytes();
        NodeLoad { stamp: bits >> NodeLoad::STAMP_SHIFT, room, waiting }
    }

    /// Returns where a new task begins: here (`None`) if there is room, or else at the node with the most
    /// room, the first of several. It waits here if no node has room.
    pub fn place(here: NodeLoad, others: impl Iterator<Item = (u16, NodeLoad)>) -> Option<u16> {
        if here.room > 0 {
            return None;
        }
        let with_room = others.filter(|(_, load)| load.room > 0);
        // `max_by_key` would take the last of several.
        let most = with_room.reduce(|most, next| if next.1.room > most.1.room { next } else { most });
        most.map(|(node, _)| node)
    }

    /// Returns how many tasks that wait here are given to a node of this load.
    pub fn gift(here: NodeLoad, other: NodeLoad) -> u8 {
        // What this node has room for begins here.
        here.waiting.saturating_sub(here.room).min(other.room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads() -> impl Iterator<Item = NodeLoad> + Clone {
        (0..3).flat_map(|room| (0..3).map(move |waiting| NodeLoad { stamp: 7, room, waiting }))
    }

    #[test]
    fn words_hold_all_loads() {
        for load in loads().chain([NodeLoad { stamp: 8, room: u8::MAX, waiting: u8::MAX - 1 }]) {
            assert_eq!(NodeLoad::from_bits(load.bits()), load);
            assert!(NodeLoad { stamp: 9, ..NodeLoad::default() }.bits() > load.bits());
        }
    }

    #[test]
    fn tasks_begin_where_there_is_room() {
        for (here, one) in loads().flat_map(|here| loads().map(move |one| (here, one))) {
            for other in loads() {
                let others = [(1, one), (2, other)];
                let most = one.room.max(other.room);
                let expected = match here.room {
                    0 if most > 0 => Some(if one.room == most { 1 } else { 2 }),
                    _ => None,
                };
                assert_eq!(NodeLoad::place(here, others.into_iter()), expected, "{here:?}, {others:?}");
            }
        }
    }

    #[test]
    fn no_more_is_given_than_waits_and_has_room() {
        for (here, other) in loads().flat_map(|here| loads().map(move |other| (here, other))) {
            let gift = NodeLoad::gift(here, other);
            assert!(gift <= other.room && gift <= here.waiting);
            assert!(gift + here.room <= here.waiting.max(here.room), "what begins here stays");
            assert!(gift > 0 || other.room == 0 || here.waiting <= here.room, "nothing waits beside room");
        }
    }
}
