//! Walks over far pointers: of lists and trees of `FarBox`, and of a graph of `FarArc`.

use farfield::{FarArc, FarBox, FarFunction, FarPlace, FarRef, FarView, Fault};
use serde::{Deserialize, Serialize};

/// A node with at most two next ones that it owns: of a list it has one.
#[derive(Debug, FarView)]
pub struct Branch {
    /// Where a walk ends, this is its answer.
    pub value: u64,
    /// The rest of what a node holds.
    pub payload: [u64; 28],
    /// The next nodes.
    pub next: [Option<FarBox<Branch>>; 2],
}

/// A node of a graph, to which any number of others lead.
#[derive(Debug, FarView)]
pub struct Vertex {
    /// Where a walk ends, this is its answer.
    pub value: u64,
    /// The rest of what a node holds.
    pub payload: [u64; 120],
    /// The next nodes.
    pub next: [Option<FarArc<Vertex>>; 4],
}

/// A walk of so many nodes. Which way it goes at a node, `choices` and the node's number of hops
/// say.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Course {
    /// Number of nodes.
    pub nodes: u32,
    /// Bits by which the next node is chosen.
    pub choices: u64,
}

impl Course {
    /// Returns which of so many ways the walk takes after this number of hops.
    pub fn way(self, hop: u32, ways: u64) -> usize {
        let mixed =
            (self.choices ^ u64::from(hop).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        ((mixed >> 33) % ways) as usize
    }
}

/// Walks from a branch on. A walk that comes to an end goes on at its root.
#[derive(Debug)]
pub struct WalkBranches;

impl FarFunction for WalkBranches {
    const NAME: &'static str = "bench.walk-branches";
    const VERSION: u32 = 1;
    type Root = Branch;
    type Argument = Course;
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Branch>, course: Course) -> Result<u64, Fault> {
        let mut branch = far.follow(root).await?;
        for hop in 1..course.nodes {
            let next = branch.next[course.way(hop, 2)].or(branch.next[0]);
            branch = far.follow(next.unwrap_or(root)).await?;
        }
        Ok(branch.value)
    }
}

/// Walks from a vertex on. A walk that comes to an end goes on at its root.
#[derive(Debug)]
pub struct WalkGraph;

impl FarFunction for WalkGraph {
    const NAME: &'static str = "bench.walk-graph";
    const VERSION: u32 = 1;
    type Root = Vertex;
    type Argument = Course;
    type Answer = u64;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Vertex>, course: Course) -> Result<u64, Fault> {
        let mut vertex = far.follow(root).await?;
        for hop in 1..course.nodes {
            vertex = far.follow(vertex.next[course.way(hop, 4)].unwrap_or(root)).await?;
        }
        Ok(vertex.value)
    }
}
