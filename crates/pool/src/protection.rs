//! How many of the copies, or parts, that there should be are there.

use crate::Backend;

/// What a mirror or an erasure code lacks, and what it got back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Protection {
    /// Legs that are lost and not replaced, silent, or do not hold everything.
    pub missing_legs: u64,
    /// Legs beside the first at servers that are several legs, known by their incarnation: when such a server dies, all of them die.
    pub shared_legs: u64,
    /// Pages that may have fewer copies or parts than they should, at most: all that are stored, as long as a leg is missing or shared. (A mirror that is a
    /// snapshot knows those that were written since.)
    pub exposed_pages: u64,
    /// Pages that legs were given because they lacked them, counted at each leg.
    pub restored_pages: u64,
}

impl Protection {
    /// Is everything as well protected as it should be?
    pub fn is_whole(self) -> bool {
        self.missing_legs == 0 && self.shared_legs == 0
    }

    /// Why it is not, in a few words.
    pub fn what_is_missing(self) -> String {
        let missing = match self.missing_legs {
            0 => None,
            1 => Some("a server is lost, silent, or lacks something".to_owned()),
            legs => Some(format!("{legs} servers are lost, silent, or lack something")),
        };
        let shared = (self.shared_legs > 0)
            .then(|| format!("one server is {} of its legs: name servers of their own", self.shared_legs + 1));
        missing.into_iter().chain(shared).collect::<Vec<_>>().join("; ")
    }

    /// Of two parts of a pool.
    pub fn and(self, other: Protection) -> Protection {
        Protection {
            missing_legs: self.missing_legs + other.missing_legs,
            shared_legs: self.shared_legs + other.shared_legs,
            exposed_pages: self.exposed_pages + other.exposed_pages,
            restored_pages: self.restored_pages + other.restored_pages,
        }
    }

    /// Of a pool that protects what it holds, or does not, and of those that it is made of.
    pub(crate) fn with_parts(
        own: Option<Protection>,
        parts: impl Iterator<Item = impl AsRef<dyn Backend>>,
    ) -> Option<Protection> {
        own.into_iter().chain(parts.filter_map(|part| part.as_ref().protection())).reduce(Protection::and)
    }
}
