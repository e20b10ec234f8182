//! Nodes, the pool of far memory, and where a job fits.
//!
//! Two passes: a node where all of the job is near, else one where it is partly far. Where reclaim
//! has cores of its own, jobs may use them as long as the node uses no far memory.

mod index;

pub(super) use index::IndexedCluster;

use super::job::JobClass;
use alloc::vec::Vec;

/// What a node has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeShape {
    /// All its cores.
    pub cores: u32,
    /// Cores of these that are kept for reclaim while the node uses far memory.
    pub reclaim_cores: u32,
    /// Near memory for jobs.
    pub memory_bytes: u64,
}

/// A node with what its jobs asked for.
#[derive(Clone, Copy, Debug)]
struct NodeClaims {
    shape: NodeShape,
    used_cores: u64,
    asked_bytes: u64,
    least_bytes: u64,
}

impl NodeClaims {
    fn overflow_bytes(&self) -> u64 {
        self.asked_bytes.saturating_sub(self.shape.memory_bytes)
    }

    /// Tells whether a job has its cores, with those for reclaim or without.
    fn has_cores(&self, cores: u32, reclaim_cores: u32) -> bool {
        self.used_cores + u64::from(cores) + u64::from(reclaim_cores) <= u64::from(self.shape.cores)
    }

    /// Returns the bytes near that a job lacks even if all jobs have their least shares only.
    fn missing_near_bytes(&self, class: &JobClass) -> u64 {
        (self.least_bytes + class.least_bytes()).saturating_sub(self.shape.memory_bytes)
    }

    /// Returns the far memory that a job would need beside what the node has of it.
    fn additional_far_bytes(&self, class: &JobClass) -> u64 {
        let overflow = (self.asked_bytes + class.memory_bytes()).saturating_sub(self.shape.memory_bytes);
        overflow - self.overflow_bytes()
    }

    fn fits_near(&self, class: &JobClass) -> bool {
        self.has_cores(class.cores(), 0) && self.asked_bytes + class.memory_bytes() <= self.shape.memory_bytes
    }

    fn fits_far(&self, class: &JobClass, far_free_bytes: u64) -> bool {
        self.has_cores(class.cores(), self.shape.reclaim_cores)
            && self.missing_near_bytes(class) == 0
            && self.additional_far_bytes(class) <= far_free_bytes
    }
}

/// Resource that keeps a job from every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// No node has enough free cores.
    Cores,
    /// Bytes near that are missing on the best node, even if all jobs have their least shares only.
    Near(u64),
    /// Bytes that are missing in the pool.
    Far(u64),
}

/// Nodes of a cluster, the jobs on them, and the pool of far memory that they share.
#[derive(Clone, Debug)]
pub struct Cluster {
    nodes: Vec<NodeClaims>,
    far_bytes: u64,
    far_used_bytes: u64,
}

impl Cluster {
    /// Makes a cluster without jobs. A pool of 0 bytes means no far memory.
    pub fn new(nodes: &[NodeShape], far_bytes: u64) -> Cluster {
        let node = |&shape: &NodeShape| NodeClaims { shape, used_cores: 0, asked_bytes: 0, least_bytes: 0 };
        Cluster { nodes: nodes.iter().map(node).collect(), far_bytes, far_used_bytes: 0 }
    }

    /// Returns the number of nodes.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Finds a node for a job: the first where all of it is near, else the first where it fits. Nodes
    /// are tried in their order, beginning with node `first` and ending with the one before it.
    pub fn find(&self, class: &JobClass, first: usize) -> Option<usize> {
        self.position(first, |node| node.fits_near(class)).or_else(|| {
            let free = self.far_bytes.saturating_sub(self.far_used_bytes);
            if free == 0 {
                return None;
            }
            self.position(first, |node| node.fits_far(class, free))
        })
    }

    /// Tells whether a job fits on this node, near or partly far.
    pub fn fits_on(&self, node: usize, class: &JobClass) -> bool {
        self.fit(node, class).is_ok()
    }

    /// Returns the part of the pool that a job would add to that of this node, which is 0 if all of
    /// it is near. The error is what the job lacks there.
    pub fn fit(&self, node: usize, class: &JobClass) -> Result<u64, Shortage> {
        let (node, free) = (&self.nodes[node], self.far_bytes.saturating_sub(self.far_used_bytes));
        if node.fits_near(class) {
            return Ok(0);
        }
        if !node.has_cores(class.cores(), node.shape.reclaim_cores) {
            return Err(Shortage::Cores);
        }
        match (node.missing_near_bytes(class), node.additional_far_bytes(class)) {
            (0, far_bytes) if far_bytes <= free => Ok(far_bytes),
            (0, far_bytes) => Err(Shortage::Far(far_bytes - free)),
            (missing_bytes, _) => Err(Shortage::Near(missing_bytes)),
        }
    }

    fn position(&self, first: usize, fits: impl Fn(&NodeClaims) -> bool) -> Option<usize> {
        let (before, after) = self.nodes.split_at(first);
        let found = after.iter().position(&fits).map(|index| first + index);
        found.or_else(|| before.iter().position(fits))
    }

    /// Returns what a job lacks that [`find`](Cluster::find) finds no node for: on the node that lacks
    /// the least of it.
    pub fn shortage(&self, class: &JobClass) -> Shortage {
        let with_cores = || self.nodes.iter().filter(|node| node.has_cores(class.cores(), node.shape.reclaim_cores));
        let far_bytes = with_cores().filter(|node| node.missing_near_bytes(class) == 0);
        if let Some(bytes) = far_bytes.map(|node| node.additional_far_bytes(class)).min() {
            return Shortage::Far(bytes.saturating_sub(self.far_bytes.saturating_sub(self.far_used_bytes)));
        }
        with_cores().map(|node| node.missing_near_bytes(class)).min().map_or(Shortage::Cores, Shortage::Near)
    }

    /// Takes cores and near memory of a node that jobs without far memory have.
    pub fn occupy(&mut self, node: usize, cores: u32, memory_bytes: u64) {
        let node = &mut self.nodes[node];
        self.far_used_bytes -= node.overflow_bytes();
        node.used_cores += u64::from(cores);
        node.asked_bytes += memory_bytes;
        node.least_bytes += memory_bytes;
        self.far_used_bytes += node.overflow_bytes();
    }

    /// Tells whether a cluster without any job would take one of this class.
    pub fn takes(&self, class: &JobClass) -> bool {
        Cluster { nodes: self.nodes.iter().map(NodeClaims::without_jobs).collect(), far_used_bytes: 0, ..*self }
            .find(class, 0)
            .is_some()
    }

    /// Puts a job on a node that [`find`](Cluster::find) has found.
    pub fn admit(&mut self, node: usize, class: &JobClass) {
        let node = &mut self.nodes[node];
        self.far_used_bytes -= node.overflow_bytes();
        node.used_cores += u64::from(class.cores());
        node.asked_bytes += class.memory_bytes();
        node.least_bytes += class.least_bytes();
        self.far_used_bytes += node.overflow_bytes();
    }

    /// Takes a job from its node.
    pub fn release(&mut self, node: usize, class: &JobClass) {
        let node = &mut self.nodes[node];
        self.far_used_bytes -= node.overflow_bytes();
        node.used_cores -= u64::from(class.cores());
        node.asked_bytes -= class.memory_bytes();
        node.least_bytes -= class.least_bytes();
        self.far_used_bytes += node.overflow_bytes();
    }

    /// Changes the size of the pool. Jobs that run keep what they have, also if it is more.
    pub fn resize_pool(&mut self, far_bytes: u64) {
        self.far_bytes = far_bytes;
    }

    /// Returns what a node has.
    pub fn shape(&self, node: usize) -> NodeShape {
        self.nodes[node].shape
    }

    /// Returns the far memory that the jobs of a node need: what they asked for beyond its near
    /// memory.
    pub fn overflow_bytes(&self, node: usize) -> u64 {
        self.nodes[node].overflow_bytes()
    }

    /// Returns the size of the pool.
    pub fn far_bytes(&self) -> u64 {
        self.far_bytes
    }

    /// Returns how much of the pool is promised to jobs.
    pub fn far_used_bytes(&self) -> u64 {
        self.far_used_bytes
    }
}

impl NodeClaims {
    fn without_jobs(&self) -> NodeClaims {
        NodeClaims { used_cores: 0, asked_bytes: 0, least_bytes: 0, ..*self }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a pool or a node that is promised twice.
    use super::*;
    use crate::policy::cluster::job::RunTime;

    fn class(cores: u32, memory_bytes: u64, least: f64) -> JobClass {
        JobClass::new(cores, memory_bytes, least, RunTime::Polynomial(Vec::from([-1.0, 2.0]))).unwrap()
    }

    fn cluster(nodes: usize, far_bytes: u64) -> Cluster {
        Cluster::new(&alloc::vec![NodeShape { cores: 4, reclaim_cores: 1, memory_bytes: 100 }; nodes], far_bytes)
    }

    #[test]
    fn near_comes_before_far() {
        let (mut cluster, job) = (cluster(2, 100), class(1, 80, 0.5));
        let mut places = Vec::new();
        while let Some(node) = cluster.find(&job, 0) {
            cluster.admit(node, &job);
            places.push(node);
        }
        assert_eq!(places, [0, 1, 0], "a fourth job would need more far memory than there is");
        assert_eq!((cluster.far_used_bytes(), cluster.overflow_bytes(0), cluster.overflow_bytes(1)), (60, 60, 0));
        cluster.release(0, &job);
        assert_eq!(cluster.far_used_bytes(), 0);
        cluster.resize_pool(0);
        assert_eq!(cluster.find(&job, 0), None);
    }

    #[test]
    fn a_job_that_fits_nowhere_is_told_what_it_lacks_on_the_best_node() {
        let (mut cluster, job) = (cluster(2, 100), class(1, 80, 0.5));
        cluster.occupy(0, 2, 70);
        assert_eq!(cluster.find(&job, 0), Some(1), "all is near there");
        cluster.occupy(1, 2, 90);
        assert_eq!((cluster.find(&job, 0), cluster.shortage(&job)), (None, Shortage::Near(10)));
        assert_eq!(cluster.find(&class(1, 80, 0.3), 0), Some(0));
        cluster.resize_pool(40);
        assert_eq!(cluster.shortage(&class(1, 80, 0.3)), Shortage::Far(10));
        assert_eq!(cluster.shortage(&class(2, 80, 0.3)), Shortage::Cores, "one is kept for reclaim");
        cluster.occupy(0, 9, 0);
        cluster.occupy(1, 9, 90);
        assert_eq!((cluster.shortage(&job), cluster.far_used_bytes()), (Shortage::Cores, 80), "more than there is");
    }

    #[test]
    fn nodes_are_tried_in_a_circle() {
        let (mut cluster, job) = (cluster(3, 0), class(1, 80, 0.5));
        for place in [2, 0, 1] {
            assert_eq!(cluster.find(&job, 2), Some(place));
            cluster.admit(place, &job);
        }
        assert_eq!(cluster.find(&job, 2), None);
    }

    #[test]
    fn cores_of_reclaim_are_for_jobs_while_nothing_is_far() {
        let (mut cluster, small, large) = (cluster(1, 100), class(1, 10, 0.5), class(1, 90, 0.5));
        for _ in 0..3 {
            assert_eq!(cluster.find(&small, 0), Some(0));
            cluster.admit(0, &small);
        }
        assert_eq!(cluster.find(&large, 0), None, "the last core is kept for reclaim");
        assert_eq!(cluster.find(&small, 0), Some(0));
        assert!(
            cluster.takes(&large) && !cluster.takes(&class(u32::MAX, 1, 1.0)) && !cluster.takes(&class(1, 101, 1.0))
        );
        assert!(cluster.takes(&class(1, 190, 0.5)) && !cluster.takes(&class(1, 201, 0.5)));
    }

    #[test]
    fn random_histories_never_overbook() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut cluster = cluster(1 + random.usize(..4), random.u64(..200));
            let mut running: Vec<(usize, JobClass)> = Vec::new();
            for _ in 0..300 {
                if random.bool() {
                    let job = class(1 + random.u32(..3), 1 + random.u64(..120), 0.3 + 0.7 * random.f64());
                    let fits = (0..cluster.nodes()).any(|node| cluster.fits_on(node, &job));
                    assert_eq!(cluster.find(&job, 0).is_some(), fits, "seed {seed}");
                    if let Some(node) = cluster.find(&job, random.usize(..cluster.nodes())) {
                        cluster.admit(node, &job);
                        running.push((node, job));
                    }
                } else if !running.is_empty() {
                    let (node, job) = running.swap_remove(random.usize(..running.len()));
                    cluster.release(node, &job);
                }
                let mut overflow = 0;
                for node in 0..cluster.nodes() {
                    let jobs = || running.iter().filter(|job| job.0 == node).map(|job| &job.1);
                    let asked: u64 = jobs().map(JobClass::memory_bytes).sum();
                    let cores: u32 = jobs().map(JobClass::cores).sum();
                    let far = asked > 100;
                    assert!(cores <= 4 - u32::from(far), "seed {seed}");
                    assert!(jobs().map(JobClass::least_bytes).sum::<u64>() <= 100, "seed {seed}");
                    overflow += asked.saturating_sub(100);
                }
                assert_eq!(overflow, cluster.far_used_bytes(), "seed {seed}");
                assert!(overflow <= cluster.far_bytes(), "seed {seed}");
            }
        }
    }
}
