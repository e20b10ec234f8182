//! Operation of a caller, as a lane of several members keeps it until all of its pages have ended.

use crate::contract::backend::OpKind;
use crate::{Buffer, PoolError, Priority};
use core::time::Duration;
use farfield_core::MemberSet;

/// Operation of the caller, or one that a lane makes for its own maintenance.
pub(crate) struct Operation {
    pub(super) tag: u64,
    pub(super) priority: Priority,
    pub(super) deadline: Duration,
    pub(super) started_at: u64,
    pub(super) kind: OpKind,
    pub(super) page: u64,
    pub(super) count: u64,
    /// Number of pages that have set out, and of pages that have not ended.
    pub(super) split_pages: u64,
    pub(super) left: u64,
    /// Buffer of the caller; `None` while a member has it.
    pub(super) buffer: Option<Buffer>,
    pub(super) result: Result<(), PoolError>,
    /// Members at which the operation could be made when it began.
    pub(super) knew: MemberSet,
    /// Set if the operation failed only because the members that have it are not relied on any
    /// more. Then it is retried.
    pub(super) is_unlucky: bool,
}

impl Operation {
    /// Returns when the time of the operation is over, on the clock of `now_ns`.
    pub(super) fn ends_at(&self) -> u64 {
        self.started_at.saturating_add(u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns the time that is left; not zero, which would mean that there is no deadline.
    pub(super) fn time_left(&self, now: u64) -> Duration {
        let passed = Duration::from_nanos(now.saturating_sub(self.started_at));
        self.deadline.saturating_sub(passed).max(Duration::from_micros(1))
    }

    /// Checks whether the operation changes pages.
    pub(super) fn is_change(&self) -> bool {
        matches!(self.kind, OpKind::Write | OpKind::Discard)
    }

    /// Checks whether all pages have set out and ended.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0 && self.split_pages == self.count
    }

    /// Counts the pages that have not set out as if they had, and returns their number.
    pub(super) fn drop_unsent(&mut self) -> u64 {
        let unsent = self.count - self.split_pages;
        self.split_pages = self.count;
        unsent
    }

    /// Ends `count` pages with this result. The first error of an operation is its result.
    pub(super) fn end_pages(&mut self, count: u64, result: Result<(), PoolError>) {
        self.left -= count;
        self.result = self.result.and(result);
    }

    /// Starts the operation again, at members that it could be made at now.
    pub(super) fn restart(&mut self, members: MemberSet) {
        (self.split_pages, self.left, self.result) = (0, self.count, Ok(()));
        (self.knew, self.is_unlucky) = (members, false);
    }
}

#[cfg(test)]
mod tests {
    //! Danger: an operation that ends before all of its pages have, or never.
    use super::*;

    #[test]
    fn an_operation_is_over_when_all_pages_have_set_out_and_ended() {
        let mut operation = Operation {
            tag: 1,
            priority: Priority::Demand,
            deadline: Duration::from_nanos(500),
            started_at: 1000,
            kind: OpKind::Write,
            page: 7,
            count: 10,
            split_pages: 0,
            left: 10,
            buffer: None,
            result: Ok(()),
            knew: MemberSet(1),
            is_unlucky: true,
        };
        operation.split_pages = 6;
        operation.end_pages(6, Ok(()));
        assert!(!operation.is_over(), "four have not set out");
        let full = Err(PoolError::PoolFull { server: 3 });
        let unsent = operation.drop_unsent();
        assert!(!operation.is_over(), "four have not ended");
        operation.end_pages(unsent, full);
        operation.end_pages(0, Err(PoolError::PoolFull { server: 4 }));
        assert_eq!((unsent, operation.is_over(), operation.result), (4, true, full));
        operation.restart(MemberSet(2));
        assert_eq!((operation.left, operation.split_pages, operation.result), (10, 0, Ok(())));
        assert!(!operation.is_over() && !operation.is_unlucky && operation.knew == MemberSet(2));
        let least = Duration::from_micros(1);
        assert_eq!((operation.ends_at(), operation.time_left(1001), operation.time_left(9999)), (1500, least, least));
    }
}
