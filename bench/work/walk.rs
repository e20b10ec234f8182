//! Walks over far pointers of a heap of which a tenth is near: along lists and trees of `FarBox`, and through a graph of `FarArc`.
//!
//! The walks are functions, which run at the client (`--peer client:URL`), at the server (`server:URL`) or where it was faster lately
//! (`auto:URL`). Answers are compared with those of walks through the same structures in the program's own memory.

use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_of};
use anyhow::{Result, ensure};
use farfield::{FarArc, FarBox, FarError, FarFunction, FarRef, Heap, Where};
use farfield_bench_functions::{Branch, Course, Vertex, WalkBranches, WalkGraph};

/// Nodes of a list, and layers of the graph.
const DEPTH: usize = 64;
/// Of the data, one part in so many is near.
const NEAR_PART: u64 = 10;

/// Next nodes, by their numbers, as a walk sees them.
type NextNodes = Vec<u32>;
const NONE: u32 = u32::MAX;

/// Makes a structure and walks through it. Returns the sum of the answers, and how many are wrong.
type Walks<'w> = dyn Fn(&Heap, &mut Outcome) -> Result<(u64, u64)> + 'w;

/// What of a structure is known here: where walks begin, and the next nodes of each node.
struct Sketch {
    ways: usize,
    roots: Vec<u32>,
    next: NextNodes,
    seed: u64,
}

impl Sketch {
    fn value(&self, node: u32) -> u64 {
        mix(u64::from(node) ^ self.seed)
    }

    fn end(&self, root: u32, course: Course) -> u64 {
        let next = |node: u32, way: usize| self.next[node as usize * self.ways + way];
        let node = (1..course.nodes).fold(root, |node, hop| {
            let mut to = next(node, course.way(hop, self.ways as u64));
            if to == NONE && self.ways == 2 {
                to = next(node, 0);
            }
            if to == NONE { root } else { to }
        });
        self.value(node)
    }
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    ensure!((1..=10_000).contains(&options.nodes), "--nodes must be 1 to 10000");
    let (place, url) = options.called_peer()?;
    let part = options.data_bytes() / 3;
    let near = part / NEAR_PART;
    let mut outcome = Outcome::new();
    let (mut sum, mut errors) = (0, 0);
    let mut each = |name: &str, outcome: &mut Outcome, walks: &Walks<'_>| {
        let heap = Heap::builder().near(near).near_max(near).far(part * 3).pool(options.throttled(url)).build()?;
        let (part_sum, part_errors) = walks(&heap, outcome)?;
        (sum, errors) = (part_sum.wrapping_add(sum), errors + part_errors);
        outcome.figure(&format!("{name}_ns"), 1e9 / outcome.per_second(name));
        outcome.figure(&format!("{name}_misses"), heap.stats().misses as f64);
        if name == "graph" {
            figures_of(outcome, &heap.stats(), 0);
        }
        anyhow::Ok(())
    };
    let branches = (part as usize / size_of::<Branch>()).max(DEPTH);
    each("list", &mut outcome, &|heap, outcome| {
        let (lists, sketch) =
            outcome.phase("fill-lists", branches as u64, || make_lists(heap, branches, options.seed))?;
        walk::<WalkBranches, _>("list", heap, &lists, &sketch, place, options, outcome)
    })?;
    each("tree", &mut outcome, &|heap, outcome| {
        let (tree, sketch) = outcome.phase("fill-tree", branches as u64, || make_tree(heap, branches, options.seed))?;
        walk::<WalkBranches, _>("tree", heap, &tree, &sketch, place, options, outcome)
    })?;
    let vertices = (part as usize / size_of::<Vertex>()).max(DEPTH);
    each("graph", &mut outcome, &|heap, outcome| {
        let (graph, sketch) =
            outcome.phase("fill-graph", vertices as u64, || make_graph(heap, vertices, options.seed))?;
        walk::<WalkGraph, _>("graph", heap, &graph, &sketch, place, options, outcome)
    })?;
    outcome.all("walk", &["list", "tree", "graph"]);
    outcome.checked(sum, errors);
    Ok(outcome)
}

/// Walks from random roots on. Returns the sum of the answers, and how many are wrong. The roots
/// are not dropped, because all that they own would come near for that.
fn walk<F, R>(
    name: &str,
    heap: &Heap,
    roots: &[R],
    sketch: &Sketch,
    place: Where,
    options: &Options,
    outcome: &mut Outcome,
) -> Result<(u64, u64)>
where
    F: FarFunction<Argument = Course, Answer = u64>,
    for<'r> &'r R: Into<FarRef<'r, F::Root>>,
{
    let mut random = Random::new(options.seed);
    let mut course = || {
        let root = random.below(roots.len() as u64) as usize;
        (root, Course { nodes: options.nodes as u32, choices: random.below(u64::MAX) })
    };
    // What is opened late is open then, and what was changed has been written back where it is met.
    let early: Vec<_> = (0..options.ops / 8 + 1).map(|_| course()).collect();
    let courses: Vec<_> = (0..options.ops).map(|_| course()).collect();
    let pass = |courses: &[(usize, Course)]| {
        let call = |(root, course): &(usize, Course)| heap.call::<F>(&roots[*root], *course).at(place).run();
        courses.iter().map(call).collect::<Result<Vec<u64>, _>>()
    };
    pass(&early)?;
    let ends = outcome.phase(name, options.ops, || pass(&courses))?;
    let wrong =
        courses.iter().zip(&ends).filter(|((root, course), end)| sketch.end(sketch.roots[*root], *course) != **end);
    Ok((ends.iter().fold(0, |sum, end| end.wrapping_add(sum)), wrong.count() as u64))
}

/// Owners that stay when the program ends.
type Kept<T> = std::mem::ManuallyDrop<Vec<T>>;

fn branch(sketch: &Sketch, node: u32, next: [Option<FarBox<Branch>>; 2]) -> Branch {
    Branch { value: sketch.value(node), payload: [node.into(); 28], next }
}

/// Lists of `DEPTH` nodes each. The nodes of a list are made a layer at a time, so neighbours do not share a page.
fn make_lists(heap: &Heap, nodes: usize, seed: u64) -> Result<(Kept<FarBox<Branch>>, Sketch), FarError> {
    let lists = (nodes / DEPTH).max(1);
    let mut sketch = Sketch { ways: 2, roots: Vec::new(), next: vec![NONE; lists * DEPTH * 2], seed };
    let mut firsts: Vec<Option<FarBox<Branch>>> = (0..lists).map(|_| None).collect();
    for layer in 0..DEPTH {
        for (list, first) in firsts.iter_mut().enumerate() {
            let node = layer * lists + list;
            if layer > 0 {
                sketch.next[node * 2] = (node - lists) as u32;
            }
            *first = Some(heap.alloc(branch(&sketch, node as u32, [first.take(), None]))?);
        }
    }
    sketch.roots = ((DEPTH - 1) * lists..DEPTH * lists).map(|node| node as u32).collect();
    Ok((Kept::new(firsts.into_iter().flatten().collect()), sketch))
}

/// One tree, as balanced as can be: node `n` has the nodes `2n + 1` and `2n + 2`.
fn make_tree(heap: &Heap, nodes: usize, seed: u64) -> Result<(Kept<FarBox<Branch>>, Sketch), FarError> {
    let mut sketch = Sketch { ways: 2, roots: vec![0], next: vec![NONE; nodes * 2], seed };
    let mut made: Vec<Option<FarBox<Branch>>> = (0..nodes).map(|_| None).collect();
    for node in (0..nodes).rev() {
        let children = [2 * node + 1, 2 * node + 2].map(|child| made.get_mut(child).and_then(Option::take));
        for (way, child) in children.iter().enumerate() {
            if child.is_some() {
                sketch.next[node * 2 + way] = (2 * node + 1 + way) as u32;
            }
        }
        made[node] = Some(heap.alloc(branch(&sketch, node as u32, children))?);
    }
    Ok((Kept::new(made.into_iter().flatten().collect()), sketch))
}

/// A graph in layers: each vertex leads to four of the layer before.
fn make_graph(heap: &Heap, nodes: usize, seed: u64) -> Result<(Kept<FarArc<Vertex>>, Sketch), FarError> {
    let width = nodes / DEPTH;
    let mut sketch = Sketch { ways: 4, roots: Vec::new(), next: vec![NONE; width * DEPTH * 4], seed };
    let mut random = Random::new(seed);
    let mut before: Vec<FarArc<Vertex>> = Vec::new();
    for layer in 0..DEPTH {
        let mut now = Vec::with_capacity(width);
        for place in 0..width {
            let node = layer * width + place;
            let next = std::array::from_fn(|way| {
                let to = (layer > 0).then(|| random.below(width as u64) as usize)?;
                sketch.next[node * 4 + way] = ((layer - 1) * width + to) as u32;
                Some(before[to].clone())
            });
            let vertex = Vertex { value: sketch.value(node as u32), payload: [node as u64; 120], next };
            now.push(heap.alloc_shared(vertex)?);
        }
        before = now;
    }
    sketch.roots = ((DEPTH - 1) * width..DEPTH * width).map(|node| node as u32).collect();
    Ok((Kept::new(before), sketch))
}
