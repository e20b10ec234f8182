//! Election by leases: who leads, who is gone and who must end, as a store of leases says, without I/O.
//!
//! Each node has a lease at the store, and the store has the newest view. The first node that has its lease leads: it
//! has the next view written without a node whose lease is over. The store takes a view only in place of the one that
//! its writer has read, and only from a node that has its lease (compare-and-swap with a fencing token, as in Chubby).
//! So there is one order of views, whoever believes to lead.

use super::MemberView;
use core::time::Duration;

/// Lease of a node, as the node knows it: it is over here before it is over at the store, if both clocks run alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseTerm {
    /// Time at which the renewal was asked for that was granted last, by the clock of the node.
    asked: Duration,
    term: Duration,
}

impl LeaseTerm {
    /// Creates the lease that was asked for at this time, and was granted for this long.
    pub fn granted(asked: Duration, term: Duration) -> LeaseTerm {
        LeaseTerm { asked, term }
    }

    /// Records that a renewal was granted. One that was asked for earlier than the last changes nothing.
    pub fn renew(&mut self, asked: Duration, term: Duration) {
        if asked + term > self.asked + self.term {
            (self.asked, self.term) = (asked, term);
        }
    }

    /// Returns how long the lease lasts at least; zero if the node must end.
    pub fn left(&self, now: Duration) -> Duration {
        (self.asked + self.term).saturating_sub(now)
    }
}

/// Next step of a node that has read the leases and the view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemberStep {
    /// The node has nothing to decide: another one leads.
    Follow,
    /// The node leads, and all nodes of the view have their leases.
    Lead,
    /// The node decides, and this one has no lease: the next view is without it.
    Expel(u16),
    /// The node has no lease, or is not in the view: it must end.
    End,
}

impl MemberStep {
    /// Returns the next step of a node among so many, by a view and by who has a lease.
    pub fn next(node: u16, nodes: u16, view: &MemberView, has_lease: impl Fn(u16) -> bool) -> MemberStep {
        if !view.has(node) || !has_lease(node) {
            return MemberStep::End;
        }
        let members = || (0..nodes).filter(|other| view.has(*other));
        if members().find(|other| has_lease(*other)) != Some(node) {
            return MemberStep::Follow;
        }
        members().find(|other| !has_lease(*other)).map_or(MemberStep::Lead, MemberStep::Expel)
    }
}

/// Returns the node that another one watches: the next one in the ring of those that have leases.
pub fn watched_node(node: u16, nodes: u16, has_lease: impl Fn(u16) -> bool) -> Option<u16> {
    (node + 1..nodes).chain(0..node).find(|other| has_lease(*other))
}

#[cfg(test)]
mod tests {
    //! Guards against two views of one number, and against a backup that is taken over although it was given up.
    use super::*;
    use crate::dsm::{LossCause, ViewChange};
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    const NODES: u16 = 3;

    fn view_without(gone: &[u16]) -> MemberView {
        let mut view = MemberView::default();
        for node in gone {
            view.expel(ViewChange { node: *node, host: None, cause: LossCause::Ended });
        }
        view
    }

    /// Rules, each with a switch.
    #[derive(Clone, Copy)]
    struct RuleSwitches {
        /// A view is written in place of the one that was read only.
        compares: bool,
        /// A node without a lease writes no view.
        needs_lease: bool,
        /// A node whose backup is taken over cannot give it up any more.
        marks_take_over: bool,
    }

    const ALL: RuleSwitches = RuleSwitches { compares: true, needs_lease: true, marks_take_over: true };

    /// Changes of a view: who is gone, and whether its backup counts.
    type Changes = Vec<(u16, bool)>;

    /// The store, and what each node has read. Nodes read, decide, take over and write at different times, with others
    /// between: a node that was stopped goes on with what it has read. One view that is to be written arrives late.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
    struct Candidates {
        view: Changes,
        leases_over: u8,
        taken_over: u8,
        given_up: u8,
        states: [CandidateState; NODES as usize],
        late: Option<(u16, Changes)>,
        was_late: bool,
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
    enum CandidateState {
        #[default]
        Idle,
        /// View and leases, as they were read.
        Read(Changes, u8),
        /// The node has taken a backup over, and writes this view.
        Writes(Changes),
        Ended,
    }

    fn bit(node: u16) -> u8 {
        1 << node
    }

    fn gone(changes: &Changes) -> Vec<u16> {
        changes.iter().map(|(node, _)| *node).collect()
    }

    impl Candidates {
        fn has_lease(&self, node: u16) -> bool {
            self.leases_over & bit(node) == 0
        }

        /// Returns all that may be after one step, or the promise that is broken.
        fn next(&self, rules: RuleSwitches) -> Result<Vec<Candidates>, &'static str> {
            let mut all = Vec::new();
            for node in 0..NODES {
                if self.leases_over.count_ones() < 2 {
                    all.push(Candidates { leases_over: self.leases_over | bit(node), ..self.clone() });
                }
                let is_refused = rules.marks_take_over && self.taken_over & bit(node) != 0;
                if self.given_up == 0 && !is_refused {
                    all.push(Candidates { given_up: bit(node), ..self.clone() });
                }
                all.push(self.step(node, rules)?);
                if let CandidateState::Writes(changes) = &self.states[usize::from(node)]
                    && !self.was_late
                {
                    let mut later = self.clone();
                    (later.late, later.was_late) = (Some((node, changes.clone())), true);
                    later.states[usize::from(node)] = CandidateState::Idle;
                    all.push(later);
                }
            }
            if let Some((node, changes)) = &self.late {
                let mut written = Candidates { late: None, ..self.clone() };
                written.write(*node, changes, rules)?;
                all.push(written);
            }
            Ok(all)
        }

        fn step(&self, node: u16, rules: RuleSwitches) -> Result<Candidates, &'static str> {
            let mut next = self.clone();
            next.states[usize::from(node)] = match &self.states[usize::from(node)] {
                CandidateState::Ended => CandidateState::Ended,
                CandidateState::Idle => CandidateState::Read(self.view.clone(), self.leases_over),
                CandidateState::Read(view, leases_over) => {
                    let has_lease = |other| leases_over & bit(other) == 0;
                    match MemberStep::next(node, NODES, &view_without(&gone(view)), has_lease) {
                        MemberStep::End => CandidateState::Ended,
                        MemberStep::Follow | MemberStep::Lead => CandidateState::Idle,
                        MemberStep::Expel(other) => {
                            next.taken_over |= bit(other);
                            let change = (other, self.given_up & bit(other) == 0);
                            CandidateState::Writes(view.iter().copied().chain([change]).collect())
                        }
                    }
                }
                CandidateState::Writes(changes) => {
                    next.write(node, changes, rules)?;
                    CandidateState::Idle
                }
            };
            Ok(next)
        }

        /// Writes a view, if the store takes it.
        fn write(&mut self, node: u16, changes: &Changes, rules: RuleSwitches) -> Result<(), &'static str> {
            let is_next = !rules.compares || self.view.len() + 1 == changes.len();
            if !is_next || rules.needs_lease && !self.has_lease(node) {
                return Ok(());
            }
            if !self.has_lease(node) {
                return Err("a node without a lease has written a view");
            }
            if changes.split_last().is_none_or(|(_, before)| before != self.view) {
                return Err("a view does not follow the one before");
            }
            if changes.iter().any(|(gone, counts)| *counts && self.given_up & bit(*gone) != 0) {
                return Err("a backup counts that was given up before");
            }
            self.view.clone_from(changes);
            Ok(())
        }

        /// Lets the nodes with leases go on, one after the other, until nothing changes.
        fn settled(mut self) -> Candidates {
            for node in (0..8 * NODES).map(|step| step % NODES) {
                if let Ok(next) = self.step(node, ALL) {
                    self = next;
                }
            }
            self
        }
    }

    fn explore(rules: RuleSwitches) -> Result<usize, &'static str> {
        let mut known = BTreeSet::new();
        let mut left = [Candidates::default()].to_vec();
        while let Some(candidates) = left.pop() {
            if !known.insert(candidates.clone()) {
                continue;
            }
            left.extend(candidates.next(rules)?);
            let settled = candidates.settled();
            if settled.view.iter().fold(0, |gone, (node, _)| gone | bit(*node)) != settled.leases_over {
                return Err("a node without a lease stays, or one with a lease does not");
            }
        }
        Ok(known.len())
    }

    #[test]
    fn views_follow_each_other_whoever_believes_to_lead() {
        assert!(explore(ALL).unwrap() > 1000);
        for (rules, broken) in [
            (RuleSwitches { compares: false, ..ALL }, "a view does not follow the one before"),
            (RuleSwitches { needs_lease: false, ..ALL }, "a node without a lease has written a view"),
            (RuleSwitches { marks_take_over: false, ..ALL }, "a backup counts that was given up before"),
        ] {
            assert_eq!(explore(rules), Err(broken));
        }
    }

    #[test]
    fn the_first_node_with_a_lease_decides() {
        let step = |node, gone: &[u16], over: u8| {
            MemberStep::next(node, NODES, &view_without(gone), |other| over & bit(other) == 0)
        };
        assert_eq!(
            [0, 1, 2].map(|node| step(node, &[], 0)),
            [MemberStep::Lead, MemberStep::Follow, MemberStep::Follow]
        );
        assert_eq!(step(1, &[], 0b001), MemberStep::Expel(0));
        assert_eq!([0, 2].map(|node| step(node, &[], 0b001)), [MemberStep::End, MemberStep::Follow]);
        assert_eq!([1, 2].map(|node| step(node, &[0], 0b001)), [MemberStep::Lead, MemberStep::Follow]);
        assert_eq!(step(0, &[0], 0), MemberStep::End);
        assert_eq!(step(2, &[0], 0b011), MemberStep::Expel(1));
        let watched = |node, over: u8| watched_node(node, NODES, |other| over & bit(other) == 0);
        assert_eq!([0, 1, 2].map(|node| watched(node, 0)), [Some(1), Some(2), Some(0)]);
        assert_eq!([watched(1, 0b100), watched(1, 0b101)], [Some(0), None]);
    }

    #[test]
    fn a_lease_is_over_here_before_it_is_over_at_the_store() {
        let second = Duration::from_secs;
        let mut lease = LeaseTerm::granted(second(10), second(5));
        assert_eq!([10, 14, 15, 99].map(|now| lease.left(second(now))), [5, 1, 0, 0].map(second));
        lease.renew(second(12), second(5));
        // An answer that comes late.
        lease.renew(second(11), second(5));
        assert_eq!(lease.left(second(15)), second(2));
    }
}
