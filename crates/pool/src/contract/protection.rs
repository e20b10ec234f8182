//! Protection of a pool: how many of the copies, or parts, that there should be are present.

use crate::Backend;

/// Redundancy that a mirror or an erasure code lacks, and pages that it regained.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Protection {
    /// Number of members that have failed and are not replaced, are silent, or do not hold
    /// everything.
    pub missing_legs: u64,
    /// Number of members, beyond the first, at servers that serve as several members (known by
    /// their incarnation). When such a server dies, all of its members die.
    pub shared_legs: u64,
    /// Upper bound of the pages that have fewer copies or parts than they should: all that are
    /// stored, as long as a member is missing or shared. (A mirror that is a snapshot knows only
    /// the pages written since.)
    pub exposed_pages: u64,
    /// Number of pages that members were given because they lacked them, counted at each member.
    pub restored_pages: u64,
}

impl Protection {
    /// Checks whether everything is as well protected as it should be.
    pub fn is_whole(self) -> bool {
        self.missing_legs == 0 && self.shared_legs == 0
    }

    /// Describes what is missing, in a few words; empty if nothing is.
    pub fn what_is_missing(self) -> String {
        let missing = match self.missing_legs {
            0 => None,
            1 => Some("a server is lost, silent, or lacks something".to_owned()),
            members => Some(format!("{members} servers are lost, silent, or lack something")),
        };
        let shared = (self.shared_legs > 0).then(|| {
            format!("one server is {} of the members: name a server of its own for each", self.shared_legs + 1)
        });
        missing.into_iter().chain(shared).collect::<Vec<_>>().join("; ")
    }

    /// Adds up the protection of two parts of a pool.
    pub fn and(self, other: Protection) -> Protection {
        Protection {
            missing_legs: self.missing_legs + other.missing_legs,
            shared_legs: self.shared_legs + other.shared_legs,
            exposed_pages: self.exposed_pages + other.exposed_pages,
            restored_pages: self.restored_pages + other.restored_pages,
        }
    }

    /// Adds up the protection of a pool (`None` if it has no redundancy of its own) and of its
    /// parts.
    pub(crate) fn with_parts(
        own: Option<Protection>,
        parts: impl Iterator<Item = impl AsRef<dyn Backend>>,
    ) -> Option<Protection> {
        own.into_iter().chain(parts.filter_map(|part| part.as_ref().protection())).reduce(Protection::and)
    }
}
