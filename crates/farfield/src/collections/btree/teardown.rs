//! Dropping a tree, whose nodes may be far. Inner nodes come near for it, leaves only if entries
//! have destructors.

use super::node::Node;
use crate::heap::{HeapInner, HeapRef, Panics, SlotWord, Teardown, drop_collection};
use core::marker::PhantomData;

/// Subtrees of dropped maps.
pub(super) struct BTreeTeardown<K: Send + 'static, V: Send + 'static> {
    heap_ref: HeapRef,
    /// Roots and their heights.
    subtrees: Vec<(SlotWord, u32)>,
    /// Number of entries in the subtrees.
    left: usize,
    owns: PhantomData<(K, V)>,
}

impl<K: Send + 'static, V: Send + 'static> BTreeTeardown<K, V> {
    /// Drops everything, or what can be dropped now, and the rest when a scope ends.
    pub(super) fn drop_now(heap_ref: HeapRef, root: SlotWord, height: u32, left: usize) {
        let core: *const HeapInner = heap_ref.core();
        let teardown = BTreeTeardown { heap_ref, subtrees: vec![(root, height)], left, owns: PhantomData::<(K, V)> };
        // SAFETY: its `heap_ref` keeps the heap.
        unsafe { drop_collection(core, Box::new(teardown)) };
    }
}

impl<K: Send + 'static, V: Send + 'static> Teardown for BTreeTeardown<K, V> {
    fn tear_down(&mut self, finally: bool, panics: &mut Panics) -> bool {
        let core = self.heap_ref.core();
        let has_destructors = core::mem::needs_drop::<(K, V)>();
        while let Some((slot, height)) = self.subtrees.pop() {
            let (mut keys, mut values): (Vec<K>, Vec<V>) = (Vec::new(), Vec::new());
            if height > 0 || has_destructors {
                let seen = core.with_object(slot, |at| {
                    let node = Node::<K, V>::at(at, height);
                    let len = node.len();
                    if height > 0 {
                        let children = (0..=len).filter_map(|child| node.child(child).load());
                        self.subtrees.extend(children.map(|child| (child, height - 1)));
                    }
                    if has_destructors {
                        keys.reserve_exact(len);
                        values.reserve_exact(len);
                        // SAFETY: so many entries are in the node, and theirs is the only copy from
                        // now on: the node is freed.
                        unsafe {
                            keys.as_mut_ptr().copy_from_nonoverlapping(node.key(0), len);
                            values.as_mut_ptr().copy_from_nonoverlapping(node.value(0), len);
                            keys.set_len(len);
                            values.set_len(len);
                        }
                        self.left -= len;
                    }
                });
                match seen {
                    Ok(()) => {}
                    Err(error) if finally || core.is_lost(error) => {}
                    Err(_) => {
                        self.subtrees.push((slot, height));
                        return false;
                    }
                }
            }
            // SAFETY: in no tree any more, and empty. The `heap_ref` keeps the heap.
            unsafe { Node::<K, V>::free(core, slot) };
            // In no scope of ours.
            panics.catch(|| drop((keys, values)));
        }
        if has_destructors {
            core.lose_values(self.left);
        }
        true
    }
}
