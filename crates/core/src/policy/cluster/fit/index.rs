//! Nodes of a large cluster, found without looking at all of them.
//!
//! A vertex of a tournament tree has the most that any node below it has free, each resource by
//! itself. A search leaves out what is below a vertex that has too little of one of them. It looks at
//! two vertices for each level of the tree if the nodes that have enough of one resource have enough
//! of the others too, and at all of them at worst. Whether a job fits anywhere, and what it lacks, is
//! told by the Pareto front of the nodes.

use super::super::job::JobClass;
use super::{Cluster, NodeClaims, Shortage};
use alloc::vec::Vec;

/// Cluster with a tree over its nodes.
#[derive(Clone, Debug)]
pub(in crate::policy::cluster) struct IndexedCluster {
    cluster: Cluster,
    tree: FreeTree,
    /// Bytes of the pool for which its servers have room.
    room_bytes: u64,
}

impl IndexedCluster {
    /// Makes the tree of a cluster for whose pool servers have room for `room_bytes` more.
    pub(in crate::policy::cluster) fn new(cluster: Cluster, room_bytes: u64) -> IndexedCluster {
        let tree = FreeTree::new(cluster.nodes.iter().map(Free::of));
        IndexedCluster { cluster, tree, room_bytes }
    }

    /// Finds the node that [`Cluster::find`] finds from node 0 on.
    pub(in crate::policy::cluster) fn find(&self, class: &JobClass) -> Option<usize> {
        self.tree.find(class, self.far_free_bytes())
    }

    /// Does what [`Cluster::admit`] does. Returns the additional overflow in bytes.
    pub(in crate::policy::cluster) fn admit(&mut self, node: usize, class: &JobClass) -> u64 {
        let before = self.cluster.overflow_bytes(node);
        self.cluster.admit(node, class);
        self.tree.set(node, Free::of(&self.cluster.nodes[node]));
        let far_bytes = self.cluster.overflow_bytes(node) - before;
        self.room_bytes = self.room_bytes.saturating_sub(far_bytes);
        far_bytes
    }

    /// Returns the best of the nodes, with what is free now.
    pub(in crate::policy::cluster) fn best_nodes(&self) -> BestNodes {
        BestNodes::new(self.cluster.nodes.iter().map(Free::of), self.far_free_bytes())
    }

    /// Returns the best of the nodes, as if no job ran and nothing of the pool were gone.
    pub(in crate::policy::cluster) fn best_empty_nodes(&self) -> BestNodes {
        let empty = self.cluster.nodes.iter().map(|node| Free::of(&node.without_jobs()));
        BestNodes::new(empty, self.cluster.far_bytes)
    }

    fn far_free_bytes(&self) -> u64 {
        self.cluster.far_bytes.saturating_sub(self.cluster.far_used_bytes).min(self.room_bytes)
    }
}

/// Pareto front of nodes: each has more of something than any other one. Mostly they are few.
#[derive(Clone, Debug)]
pub(in crate::policy::cluster) struct BestNodes {
    front: Vec<Free>,
    far_free_bytes: u64,
}

impl BestNodes {
    fn new(nodes: impl Iterator<Item = Free>, far_free_bytes: u64) -> BestNodes {
        let mut front: Vec<Free> = Vec::new();
        for node in nodes {
            if !front.iter().any(|best| best.most(node) == *best) {
                front.retain(|best| node.most(*best) != node);
                front.push(node);
            }
        }
        BestNodes { front, far_free_bytes }
    }

    /// Tells whether a job fits on any node.
    pub(in crate::policy::cluster) fn take(&self, class: &JobClass) -> bool {
        let demand = Demand::new(class, self.far_free_bytes);
        self.front.iter().any(|free| demand.fits_near(free) || demand.fits_far(free))
    }

    /// Returns what [`Cluster::shortage`] does of a job that fits on no node.
    pub(in crate::policy::cluster) fn shortage(&self, class: &JobClass) -> Shortage {
        let demand = Demand::new(class, self.far_free_bytes);
        let with_cores = || self.front.iter().filter(|free| free.far_cores >= demand.cores);
        let with_least = with_cores().filter(|free| free.spare_bytes >= demand.least_bytes);
        if let Some(most) = with_least.map(|free| free.headroom_bytes).max() {
            let missing = demand.memory_bytes.saturating_sub(most).max(0).unsigned_abs();
            return Shortage::Far(missing.saturating_sub(self.far_free_bytes));
        }
        let most = with_cores().map(|free| free.spare_bytes).max();
        most.map_or(Shortage::Cores, |most| Shortage::Near(demand.least_bytes.saturating_sub(most).unsigned_abs()))
    }
}

/// What a job needs of a node.
struct Demand {
    cores: u64,
    memory_bytes: i64,
    least_bytes: i64,
    /// Part of its memory for which the pool has no room.
    unpooled_bytes: i64,
    has_pool: bool,
}

impl Demand {
    fn new(class: &JobClass, far_free_bytes: u64) -> Demand {
        let memory_bytes = signed(class.memory_bytes());
        Demand {
            cores: u64::from(class.cores()),
            memory_bytes,
            least_bytes: signed(class.least_bytes()),
            unpooled_bytes: memory_bytes.saturating_sub(signed(far_free_bytes)),
            has_pool: far_free_bytes > 0,
        }
    }

    fn fits_near(&self, free: &Free) -> bool {
        free.cores >= self.cores && free.headroom_bytes >= self.memory_bytes
    }

    fn fits_far(&self, free: &Free) -> bool {
        self.has_pool
            && free.far_cores >= self.cores
            && free.spare_bytes >= self.least_bytes
            && free.headroom_bytes >= self.unpooled_bytes
    }
}

/// What a node has free, or the most of it that any of several nodes has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Free {
    /// Cores of a job whose memory is near.
    cores: u64,
    /// Cores of a job that is partly far.
    far_cores: u64,
    /// Near memory that no job asked for.
    headroom_bytes: i64,
    /// Near memory beyond the least shares; below 0 if the node does not even have these.
    spare_bytes: i64,
}

impl Free {
    /// No node.
    const NONE: Free = Free { cores: 0, far_cores: 0, headroom_bytes: 0, spare_bytes: i64::MIN };

    fn of(node: &NodeClaims) -> Free {
        let NodeClaims { shape, used_cores, asked_bytes, least_bytes } = *node;
        let cores = u64::from(shape.cores).saturating_sub(used_cores);
        Free {
            cores,
            far_cores: cores.saturating_sub(u64::from(shape.reclaim_cores)),
            headroom_bytes: signed(shape.memory_bytes.saturating_sub(asked_bytes)),
            spare_bytes: signed(shape.memory_bytes).saturating_sub(signed(least_bytes)),
        }
    }

    fn most(self, other: Free) -> Free {
        Free {
            cores: self.cores.max(other.cores),
            far_cores: self.far_cores.max(other.far_cores),
            headroom_bytes: self.headroom_bytes.max(other.headroom_bytes),
            spare_bytes: self.spare_bytes.max(other.spare_bytes),
        }
    }
}

/// Vertices of a complete binary tree: the children of vertex `i` are `2 i` and `2 i + 1`, the root is 1,
/// and the second half are the nodes.
#[derive(Clone, Debug)]
struct FreeTree(Vec<Free>);

impl FreeTree {
    fn new(nodes: impl ExactSizeIterator<Item = Free>) -> FreeTree {
        let width = nodes.len().next_power_of_two();
        let mut vertices = alloc::vec![Free::NONE; 2 * width];
        for (vertex, node) in vertices[width..].iter_mut().zip(nodes) {
            *vertex = node;
        }
        for vertex in (1..width).rev() {
            vertices[vertex] = vertices[2 * vertex].most(vertices[2 * vertex + 1]);
        }
        FreeTree(vertices)
    }

    fn width(&self) -> usize {
        self.0.len() / 2
    }

    fn set(&mut self, node: usize, free: Free) {
        let mut vertex = self.width() + node;
        self.0[vertex] = free;
        while vertex > 1 {
            vertex /= 2;
            self.0[vertex] = self.0[2 * vertex].most(self.0[2 * vertex + 1]);
        }
    }

    /// Finds the first node where all of a job is near, else the first where it fits with this much of the pool.
    fn find(&self, class: &JobClass, far_free_bytes: u64) -> Option<usize> {
        let demand = Demand::new(class, far_free_bytes);
        self.first(1, &|free| demand.fits_near(free)).or_else(|| self.first(1, &|free| demand.fits_far(free)))
    }

    fn first(&self, vertex: usize, fits: &impl Fn(&Free) -> bool) -> Option<usize> {
        if !fits(&self.0[vertex]) {
            return None;
        }
        if vertex >= self.width() {
            return Some(vertex - self.width());
        }
        self.first(2 * vertex, fits).or_else(|| self.first(2 * vertex + 1, fits))
    }
}

/// Bytes as a signed number; more than there can be become the most that there can be.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    //! Guards against a tree that finds another node, or another reason, than looking at all nodes does.
    use super::super::NodeShape;
    use super::*;
    use crate::policy::cluster::job::RunTime;

    fn random_class(random: &mut fastrand::Rng) -> JobClass {
        let least = 0.2 + 0.8 * random.f64();
        JobClass::new(1 + random.u32(..6), 1 + random.u64(..150), least, RunTime::Polynomial(Vec::from([1.0]))).unwrap()
    }

    #[test]
    fn the_tree_says_what_looking_at_all_nodes_says() {
        let (mut found, mut refused) = (0, [0; 3]);
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let shapes: Vec<NodeShape> = (0..random.usize(..20))
                .map(|_| NodeShape {
                    cores: 1 + random.u32(..12),
                    reclaim_cores: random.u32(..2),
                    memory_bytes: 50 + random.u64(..100),
                })
                .collect();
            let mut plain = Cluster::new(&shapes, random.u64(..400));
            for node in 0..shapes.len() {
                // Somebody else may have more than there is.
                plain.occupy(node, random.u32(..4), random.u64(..80) * u64::from(random.u8(..4)));
            }
            let mut indexed = IndexedCluster::new(plain.clone(), u64::MAX);
            let empty = indexed.best_empty_nodes();
            for _ in 0..60 {
                let class = random_class(&mut random);
                assert_eq!(empty.take(&class), plain.takes(&class), "seed {seed}");
                let node = plain.find(&class, 0);
                assert_eq!(indexed.find(&class), node, "seed {seed}");
                assert_eq!(indexed.best_nodes().take(&class), node.is_some(), "seed {seed}");
                match node {
                    Some(node) => {
                        let before = plain.overflow_bytes(node);
                        plain.admit(node, &class);
                        assert_eq!(indexed.admit(node, &class), plain.overflow_bytes(node) - before, "seed {seed}");
                        found += 1;
                    }
                    None => {
                        let shortage = plain.shortage(&class);
                        assert_eq!(indexed.best_nodes().shortage(&class), shortage, "seed {seed}");
                        refused[match shortage {
                            Shortage::Cores => 0,
                            Shortage::Near(_) => 1,
                            Shortage::Far(_) => 2,
                        }] += 1;
                    }
                }
            }
        }
        assert!(found > 1000 && refused.iter().all(|count| *count > 300), "{found} {refused:?}");
    }
}
