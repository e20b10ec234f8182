//! Checks of what must hold for any text that is given as a pool URL; for unit tests, and for the
//! fuzzer.

use super::{DEPTH_MAX, Tree, leaf_urls, replace_leaves};
use core::convert::Infallible;

/// Parses `text` and returns whether it was understood. Panics unless the tree, or the error, is what
/// [`crate::check_url`] promises.
pub(crate) fn check_tree(text: &str) -> bool {
    assert_eq!(replace_leaves(text, |leaf| Ok::<_, Infallible>(leaf.to_owned())).as_deref(), Ok(text));
    let tree = match Tree::parse(text) {
        Ok(tree) => tree,
        Err(error) => {
            assert!(error.at <= text.chars().count(), "{text:?}: {error}");
            return false;
        }
    };
    assert!(depth(&tree) <= DEPTH_MAX, "{text:?}");
    let mut leaves = Vec::new();
    collect(&tree, &mut leaves);
    assert_eq!(leaves.len(), tree.leaves(), "{text:?}");
    assert_eq!(leaf_urls(text).collect::<Vec<_>>(), leaves, "{text:?}");
    let again = tree.to_string();
    assert_eq!(Tree::parse(&again).as_ref(), Ok(&tree), "{text:?} is said again as {again:?}");
    assert_eq!(leaf_urls(&again).collect::<Vec<_>>(), leaves, "{text:?} is said again as {again:?}");
    true
}

fn members(tree: &Tree) -> Vec<&Tree> {
    match tree {
        Tree::Leaf(_) => vec![],
        Tree::Fault(_, inner) => vec![inner],
        Tree::Stripe { members, .. } | Tree::Tier(members) => members.iter().collect(),
        Tree::Mirror { members, spares, .. } | Tree::Ec { members, spares, .. } => {
            members.iter().chain(spares).collect()
        }
    }
}

fn depth(tree: &Tree) -> usize {
    members(tree).into_iter().map(|member| depth(member) + 1).max().unwrap_or(0)
}

fn collect<'a>(tree: &'a Tree, leaves: &mut Vec<&'a str>) {
    if let Tree::Leaf(url) = tree {
        leaves.push(url);
    }
    members(tree).into_iter().for_each(|member| collect(member, leaves));
}
