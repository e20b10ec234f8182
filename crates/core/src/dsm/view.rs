//! View of a program's nodes: who is gone, and who keeps what they had stored, without I/O.

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Cause for which a node counts as gone.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum LossCause {
    /// The process of the node has ended, or its machine says that nobody listens there.
    Ended,
    /// The node has not answered for this time.
    Silent(Duration),
    /// The node has not renewed its lease, which was this long.
    LeaseOver(Duration),
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossCause::Ended => write!(f, "it has ended"),
            LossCause::Silent(time) => write!(f, "it has not answered for {} s", time.as_secs_f64()),
            LossCause::LeaseOver(time) => write!(f, "it has not renewed its lease of {} s", time.as_secs_f64()),
        }
    }
}

/// Loss of a node: the step from one view to the next.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ViewChange {
    /// Number of the node that is gone.
    pub node: u16,
    /// Number of the node that keeps what it had stored, if it had a backup.
    pub host: Option<u16>,
    /// Why it counts as gone.
    pub cause: LossCause,
}

/// Expulsion of a node, as it is told.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Expulsion {
    /// Number of the first view without the node.
    pub view: u32,
    /// Why it counts as gone.
    pub cause: LossCause,
}

impl fmt::Display for Expulsion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "was expelled in view {}, since {}", self.view, self.cause)
    }
}

/// View of the nodes: all changes since all were there, in order.
///
/// One process makes the changes, or a store takes one for each view, so there is one order of views, and the number of
/// a view says which changes are in it. Every message and every answer carries the number of its sender's view. Whoever
/// has an older one learns what is missing before it does what the message asks for, or uses the answer. So nobody is
/// told what follows from the loss of a node before it knows of the loss.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize, Debug)]
pub struct MemberView(Vec<ViewChange>);

impl MemberView {
    /// Returns the number of the view. The first one, in which all nodes are there, has the number 0.
    pub fn number(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Begins the next view. Returns its number, or that in which the node was expelled before.
    pub fn expel(&mut self, change: ViewChange) -> u32 {
        if let Some(expulsion) = self.expulsion(change.node) {
            return expulsion.view;
        }
        self.0.push(change);
        self.number()
    }

    /// Returns the changes after a view.
    pub fn since(&self, number: u32) -> &[ViewChange] {
        self.0.get(number as usize..).unwrap_or_default()
    }

    /// Returns those of some changes after a view that are the next ones here: none if some before them are missing.
    pub fn news(&self, after: u32, changes: &[ViewChange]) -> Vec<ViewChange> {
        let known = self.number().checked_sub(after).map(|known| known as usize);
        known.and_then(|known| changes.get(known..)).map_or_else(Vec::new, <[ViewChange]>::to_vec)
    }

    /// Returns whether a node is in the view.
    pub fn has(&self, node: u16) -> bool {
        self.0.iter().all(|change| change.node != node)
    }

    /// Returns the nodes whose backups hold what a node keeps, in the order in which they are read: those whose objects
    /// it keeps, the first that was lost first, and itself. Each says in its own backup what has changed of those
    /// before.
    pub fn backups_of(&self, node: u16) -> Vec<u16> {
        let mut nodes = alloc::vec![node];
        // A host was lost after those whose objects it kept.
        for ViewChange { node, host, .. } in self.0.iter().rev() {
            if host.is_some_and(|host| nodes.contains(&host)) {
                nodes.push(*node);
            }
        }
        nodes.reverse();
        nodes
    }

    /// Returns when and why a node was expelled; `None` if it was not.
    pub fn expulsion(&self, node: u16) -> Option<Expulsion> {
        let at = self.0.iter().position(|change| change.node == node)?;
        let cause = self.0.get(at)?.cause;
        Some(Expulsion { view: u32::try_from(at).unwrap_or(u32::MAX).saturating_add(1), cause })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;

    fn change(node: u16) -> ViewChange {
        ViewChange { node, host: node.is_multiple_of(2).then_some(0), cause: LossCause::Ended }
    }

    #[test]
    fn views_are_learned_in_order_whatever_arrives_twice_late_or_too_early() {
        let mut all = MemberView::default();
        assert_eq!([3, 1, 2, 3].map(|node| all.expel(change(node))), [1, 2, 3, 1]);
        // Each piece of the changes, at each view.
        for known in 0..=3u32 {
            let view = MemberView(all.since(0)[..known as usize].to_vec());
            for after in 0..=3u32 {
                for end in after..=3 {
                    let piece = &all.since(after)[..(end - after) as usize];
                    let mut learned = view.clone();
                    learned.0.extend(view.news(after, piece));
                    let expected = if after <= known { known.max(end) } else { known };
                    assert_eq!(learned.0, all.since(0)[..expected as usize], "{known}, {after}..{end}");
                }
            }
        }
        assert_eq!((all.since(3), all.since(9)), (&[][..], &[][..]));
    }

    /// All histories of five nodes, each with a backup or without, whose objects go to any node that is left.
    #[test]
    fn the_backups_that_hold_what_a_node_keeps_are_read_in_the_order_of_the_losses() {
        fn try_all(view: &MemberView, histories: &mut u32) {
            // Of each node: where its objects are, and the nodes whose backups say how they are.
            let mut kept: Vec<(Option<u16>, Vec<u16>)> = (0..5).map(|node| (Some(node), vec![node])).collect();
            for ViewChange { node, host, .. } in view.since(0) {
                for (keeper, path) in kept.iter_mut().filter(|(keeper, _)| *keeper == Some(*node)) {
                    *keeper = *host;
                    path.extend(host);
                }
            }
            for node in (0..5).filter(|node| view.has(*node)) {
                let order = view.backups_of(node);
                assert_eq!(order.last(), Some(&node));
                for (of, (keeper, path)) in kept.iter().enumerate() {
                    assert_eq!(order.contains(&(of as u16)), *keeper == Some(node));
                    if *keeper == Some(node) {
                        let at = |node: &u16| order.iter().position(|other| other == node).unwrap();
                        assert!(path.iter().map(at).is_sorted(), "{order:?} {path:?}");
                    }
                }
            }
            *histories += 1;
            let left: Vec<u16> = (0..5).filter(|node| view.has(*node)).collect();
            for gone in left.iter().copied().filter(|_| left.len() > 1) {
                for host in left.iter().copied().filter(|host| *host != gone).map(Some).chain([None]) {
                    let mut view = view.clone();
                    view.expel(ViewChange { host, ..change(gone) });
                    try_all(&view, histories);
                }
            }
        }
        let mut histories = 0;
        try_all(&MemberView::default(), &mut histories);
        // After each loss: five nodes with five hosts each, then four with four.
        assert_eq!(histories, 1 + 25 + 25 * 16 + 25 * 16 * 9 + 25 * 16 * 9 * 4);
    }

    #[test]
    fn who_was_expelled_is_told_when_and_why() {
        let mut view = MemberView::default();
        view.expel(change(5));
        view.expel(ViewChange { node: 2, host: None, cause: LossCause::Silent(Duration::from_millis(2500)) });
        let told = [5, 2, 1].map(|node| view.expulsion(node).map(|expulsion| expulsion.to_string()));
        let texts = [
            "was expelled in view 1, since it has ended",
            "was expelled in view 2, since it has not answered for 2.5 s",
        ];
        assert_eq!(told, [Some(texts[0].to_string()), Some(texts[1].to_string()), None]);
        assert_eq!(vec![view.number()], [2]);
    }
}
