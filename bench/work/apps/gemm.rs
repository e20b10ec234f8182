//! Product of two square matrices, cut into tiles: a task for each tile of the product reads a row and a column of tiles
//! (GEMM of DRust, section 7).
//!
//! The nodes are a grid, as the tiles are, and have a block of each matrix (SUMMA, 1997): a node reads some rows of one factor
//! and some columns of the other, and not all of either.
//!
//! Values are small whole numbers, so sums are exact in any order, and the product is checked by Freivalds' method.

use super::dsm::{self, ChunkMut, DBox, DVec, Far, Here, JoinError, Lent, LentMut, NodeId, Owner, ShareError, scope};
use super::{Nodes, count_since, counts, in_threads};
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Result, ensure};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

/// Tiles of each factor that a task has asked for before it multiplies the next one.
const TILES_AHEAD: usize = 2;

/// Form of a matrix.
#[derive(Clone, Copy, Far)]
struct TileGrid {
    /// Tiles of a row, and of a column.
    count: usize,
    /// Values of a row of a tile, and of a column.
    side: usize,
}

impl TileGrid {
    /// Three matrices take all data, and a tile an object.
    fn of(options: &Options) -> Result<TileGrid> {
        let side = (options.object_bytes as usize / 8).isqrt();
        ensure!(side > 0 && side * side * 8 == options.object_bytes as usize, "--object-bytes must be 8 × a square");
        let count = (options.data_bytes() as usize / 24).isqrt() / side;
        ensure!(count > 0, "three tiles are larger than --data-mib");
        Ok(TileGrid { count, side })
    }

    fn tiles(self) -> usize {
        self.count * self.count
    }

    fn values(self) -> usize {
        self.side * self.side
    }

    /// Multiplications of the product.
    fn steps(self) -> u64 {
        ((self.count * self.side) as u64).pow(3)
    }

    /// Returns the node of a tile. The nodes are in rows and columns, too.
    fn node_of(self, here: &Here<'_>, tile: usize) -> NodeId {
        let nodes = here.nodes().count();
        let rows = (1..=nodes.isqrt()).rfind(|rows| nodes.is_multiple_of(*rows)).unwrap_or(1);
        let columns = nodes / rows;
        let (row, column) = (tile / self.count, tile % self.count);
        NodeId((row * rows / self.count * columns + column * columns / self.count) as u16)
    }

    /// Returns the tiles of a node, row by row.
    fn tiles_of(self, here: &Here<'_>, node: NodeId) -> impl Iterator<Item = usize> {
        let tiles: Vec<usize> = (0..self.tiles()).filter(|tile| self.node_of(here, *tile) == node).collect();
        tiles.into_iter()
    }

    /// Fills a tile of a factor.
    fn fill(self, tile: &mut [f64], index: usize, factor: u64, seed: u64) {
        let first = (index as u64) << 32 ^ factor << 63 ^ seed << 7;
        (0..).zip(tile).for_each(|(at, value)| *value = (mix(first ^ at) % 8) as f64);
    }

    /// Adds the product of two tiles to a third.
    fn multiply_add(self, left: &[f64], right: &[f64], sum: &mut [f64]) {
        let view = |tile| ArrayView2::from_shape((self.side, self.side), tile).expect("a tile is a square");
        let mut sum = ArrayViewMut2::from_shape((self.side, self.side), sum).expect("a tile is a square");
        general_mat_mul(1.0, &view(left), &view(right), 1.0, &mut sum);
    }

    /// Returns the product of a matrix and a vector.
    fn times<'a, E>(self, vector: &[f64], tile: impl Fn(usize) -> Result<&'a [f64], E>) -> Result<Vec<f64>, E> {
        let mut product = vec![0.0; vector.len()];
        for index in 0..self.tiles() {
            let (row, column) = (index / self.count * self.side, index % self.count * self.side);
            for (at, values) in tile(index)?.chunks(self.side).enumerate() {
                let part = values.iter().zip(&vector[column..]).map(|(value, factor)| value * factor);
                product[row + at] += part.sum::<f64>();
            }
        }
        Ok(product)
    }
}

/// Compares the product with its factors, and says what it is.
fn check(outcome: &mut Outcome, product: &[f64], expected: &[f64]) {
    let errors = product.iter().zip(expected).filter(|(found, expected)| found != expected).count();
    let sum = product.iter().fold(0u64, |sum, value| mix(sum ^ value.to_bits()));
    outcome.checked(sum, errors as u64);
}

fn vector(grid: TileGrid, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..grid.count * grid.side).map(|_| random.below(16) as f64).collect()
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let grid = TileGrid::of(options)?;
    match Nodes::of(options)? {
        None => plain(options, grid),
        Some(nodes) => nodes.run(|here| shared(here, options, grid)),
    }
}

fn plain(options: &Options, grid: TileGrid) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let zeros = || -> Vec<Vec<f64>> { (0..grid.tiles()).map(|_| vec![0.0; grid.values()]).collect() };
    let filled = |factor| {
        let mut tiles = zeros();
        in_threads(options.threads, tiles.iter_mut().enumerate(), |(index, tile)| {
            grid.fill(tile, index, factor, options.seed);
        });
        tiles
    };
    let (left, right, mut product) = outcome.phase("fill", 3, || {
        let mut product = zeros();
        // The kernel gives zeros page by page, which is not part of the product.
        product.iter_mut().for_each(|tile| std::hint::black_box(tile).fill(0.0));
        (filled(0), filled(1), product)
    });
    outcome.phase("multiply", grid.steps(), || {
        in_threads(options.threads, product.iter_mut().enumerate(), |(index, sum)| {
            let (row, column) = (index / grid.count, index % grid.count);
            for at in 0..grid.count {
                grid.multiply_add(&left[row * grid.count + at], &right[at * grid.count + column], sum);
            }
        });
    });
    let times = |tiles: &Vec<Vec<f64>>, vector: &[f64]| grid.times(vector, |index| Ok::<_, ShareError>(&*tiles[index]));
    let vector = vector(grid, options.seed);
    check(&mut outcome, &times(&product, &vector)?, &times(&left, &times(&right, &vector)?)?);
    Ok(outcome)
}

/// Factor in shared memory: a chunk for each tile, row by row.
#[derive(Far)]
struct Matrix {
    tiles: DVec<f64>,
    grid: TileGrid,
}

impl Matrix {
    /// Returns a factor of the product, filled by tasks at all nodes. Tiles stay at the nodes that have written them.
    fn factor(here: &Here<'_>, grid: TileGrid, factor: u64, seed: u64) -> Result<DBox<Matrix>, JoinError> {
        let mut tiles = DVec::with_chunk(grid.values());
        let zeros = vec![0.0; grid.values()];
        (0..grid.tiles()).try_for_each(|_| tiles.extend_from_slice(here, &zeros))?;
        let mut chunks: Vec<ChunkMut<'_, f64>> = tiles.chunks_mut(here)?.collect();
        scope(here, |s| {
            let mut tasks = Vec::new();
            for (index, tile) in chunks.iter_mut().enumerate() {
                let (node, arguments) = (grid.node_of(here, index), (s.lend_mut(tile), grid, index, factor, seed));
                tasks.push(s.spawn_to(node, arguments, |here, (mut tile, grid, index, factor, seed)| {
                    grid.fill(&mut tile.get_mut(here)?, index, factor, seed);
                    Ok::<_, ShareError>(())
                })?);
            }
            tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join()??))
        })??;
        Ok(here.alloc(Matrix { tiles, grid })?)
    }

    fn tile<'a>(&'a self, here: &'a Here<'_>, index: usize) -> Result<&'a [f64], ShareError> {
        self.tiles.chunk(here, index)?.map_or(Ok(&[]), |tile| tile.get(here))
    }

    /// Has a tile fetched that is read soon.
    fn prefetch(&self, here: &Here<'_>, index: usize) -> Result<(), ShareError> {
        if let Some(tile) = self.tiles.chunk(here, index)? {
            tile.prefetch(here);
        }
        Ok(())
    }

    fn times(&self, here: &Here<'_>, vector: &[f64]) -> Result<Vec<f64>, ShareError> {
        self.grid.times(vector, |index| self.tile(here, index))
    }
}

/// Tiles of the product that are at a node, row by row: a chunk for each.
type Block = DVec<f64>;

/// Returns the blocks of a product of zeros, each made at its node.
fn zeros(here: &Here<'_>, grid: TileGrid) -> Result<Vec<DBox<Block>>, JoinError> {
    let make = |here: &Here<'_>, (grid,): (TileGrid,)| {
        let mut tiles = DVec::with_chunk(grid.values());
        let zeros = vec![0.0; grid.values()];
        grid.tiles_of(here, here.id()).try_for_each(|_| tiles.extend_from_slice(here, &zeros))?;
        here.alloc(tiles)
    };
    let tasks = here.nodes().map(|node| here.spawn_to(node, (grid,), make)).collect::<Result<Vec<_>, ShareError>>()?;
    tasks.into_iter().map(|task| Ok(task.join(here)??)).collect()
}

/// Adds the product of two matrices to the blocks.
fn multiply_add(
    here: &Here<'_>,
    left: &DBox<Matrix>,
    right: &DBox<Matrix>,
    blocks: &mut [DBox<Block>],
) -> Result<(), JoinError> {
    scope(here, |s| {
        let mut tasks = Vec::new();
        for (node, block) in here.nodes().zip(blocks) {
            tasks.push(s.spawn_to(node, (s.lend(left), s.lend(right), s.lend_mut(block)), add_block)?);
        }
        tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join()??))
    })?
}

/// Adds a node's block of the product, as a task that starts one for each tile. So nobody waits for a message to start it.
fn add_block(
    here: &Here<'_>,
    (left, right, mut block): (Lent<'_, Matrix>, Lent<'_, Matrix>, LentMut<'_, Block>),
) -> Result<(), ShareError> {
    let grid = left.get(here)?.grid;
    let mut block = block.get_mut(here)?;
    let mut sums: Vec<ChunkMut<'_, f64>> = block.chunks_mut(here)?.collect();
    scope(here, |s| {
        let mut tasks = Vec::new();
        for (index, sum) in grid.tiles_of(here, here.id()).zip(&mut sums) {
            let arguments = (s.lend(&left), s.lend(&right), s.lend_mut(sum), index);
            tasks.push(s.spawn_to(here.id(), arguments, add_tile)?);
        }
        tasks.into_iter().try_for_each(|task| task.join()?)
    })?
}

/// Adds a tile of the product, as a task.
fn add_tile(
    here: &Here<'_>,
    (left, right, mut sum, index): (Lent<'_, Matrix>, Lent<'_, Matrix>, LentMut<'_, [f64]>, usize),
) -> Result<(), ShareError> {
    let (left, right, mut sum) = (left.get(here)?, right.get(here)?, sum.get_mut(here)?);
    let grid = left.grid;
    let (row, column) = (index / grid.count, index % grid.count);
    let pair = |at: usize| (row * grid.count + at, at * grid.count + column);
    let prefetch = |at: usize| left.prefetch(here, pair(at).0).and_then(|()| right.prefetch(here, pair(at).1));
    // Each node begins with its own tiles, so that not all of them ask the same one at the same time.
    let order = (column..grid.count).chain(0..column);
    let mut soon = order.clone();
    soon.by_ref().take(TILES_AHEAD).try_for_each(prefetch)?;
    for at in order {
        soon.next().map_or(Ok(()), prefetch)?;
        let (left, right) = (left.tile(here, pair(at).0)?, right.tile(here, pair(at).1)?);
        grid.multiply_add(left, right, &mut sum);
    }
    Ok(())
}

fn shared(here: &Here<'_>, options: &Options, grid: TileGrid) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let (left, right, mut blocks) = outcome.phase("fill", 3, || -> Result<_, JoinError> {
        let factor = |factor| Matrix::factor(here, grid, factor, options.seed);
        Ok((factor(0)?, factor(1)?, zeros(here, grid)?))
    })?;
    let before = counts(here)?;
    let multiply = || multiply_add(here, &left, &right, &mut blocks);
    outcome.phase("multiply", grid.steps(), || dsm::measured(multiply))?;
    count_since(here, before, grid.tiles() as u64, &mut outcome)?;
    let here = &here.enter();
    let vector = vector(grid, options.seed);
    let expected = left.get(here)?.times(here, &right.get(here)?.times(here, &vector)?)?;
    let product = grid.times(&vector, |index| {
        let node = grid.node_of(here, index);
        let position = grid.tiles_of(here, node).take_while(|tile| *tile < index).count();
        let tile = blocks[usize::from(node.0)].get(here)?.chunk(here, position)?;
        tile.map_or(Ok(&[][..]), |tile| tile.get(here))
    })?;
    check(&mut outcome, &product, &expected);
    Ok(outcome)
}
