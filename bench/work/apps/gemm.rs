//! Product of two square matrices, cut into tiles: a task for each tile of the product reads a row and a column of tiles
//! (GEMM of DRust, section 7).
//!
//! Values are small whole numbers, so sums are exact in any order, and the product is checked by Freivalds' method.

use super::dsm::{self, ChunkMut, DBox, DVec, Far, Here, JoinError, Lent, LentMut, ShareError, scope};
use super::{Nodes, count_since, counts, in_threads, node_of};
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Result, ensure};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

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

/// Matrix in shared memory: a chunk for each tile, row by row.
#[derive(Far)]
struct Matrix {
    tiles: DVec<f64>,
    grid: TileGrid,
}

impl Matrix {
    fn zeros(here: &Here<'_>, grid: TileGrid) -> Result<Matrix, ShareError> {
        let mut tiles = DVec::with_chunk(grid.values());
        let zeros = vec![0.0; grid.values()];
        (0..grid.tiles()).try_for_each(|_| tiles.extend_from_slice(here, &zeros))?;
        Ok(Matrix { tiles, grid })
    }

    /// Returns a factor of the product, filled by tasks at all nodes. Tiles stay at the nodes that have written them.
    fn factor(here: &Here<'_>, grid: TileGrid, factor: u64, seed: u64) -> Result<DBox<Matrix>, JoinError> {
        let mut matrix = Matrix::zeros(here, grid)?;
        let mut tiles: Vec<ChunkMut<'_, f64>> = matrix.tiles.chunks_mut(here)?.collect();
        scope(here, |s| {
            let mut tasks = Vec::new();
            for (index, tile) in tiles.iter_mut().enumerate() {
                let (node, arguments) =
                    (node_of(here, index, grid.tiles()), (s.lend_mut(tile), grid, index, factor, seed));
                tasks.push(s.spawn_to(node, arguments, |here, (mut tile, grid, index, factor, seed)| {
                    grid.fill(&mut tile.get_mut(here)?, index, factor, seed);
                    Ok::<_, ShareError>(())
                })?);
            }
            tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join()??))
        })??;
        Ok(here.alloc(matrix)?)
    }

    fn tile<'a>(&'a self, here: &'a Here<'_>, index: usize) -> Result<&'a [f64], ShareError> {
        self.tiles.chunk(here, index)?.map_or(Ok(&[]), |tile| tile.get(here))
    }

    fn times(&self, here: &Here<'_>, vector: &[f64]) -> Result<Vec<f64>, ShareError> {
        self.grid.times(vector, |index| self.tile(here, index))
    }

    /// Adds the product of two matrices, each tile at the node of its row.
    fn multiply_add(&mut self, here: &Here<'_>, left: &DBox<Matrix>, right: &DBox<Matrix>) -> Result<(), JoinError> {
        let grid = self.grid;
        let mut sums: Vec<ChunkMut<'_, f64>> = self.tiles.chunks_mut(here)?.collect();
        scope(here, |s| {
            let mut tasks = Vec::new();
            for (index, sum) in sums.iter_mut().enumerate() {
                let arguments = (s.lend(left), s.lend(right), s.lend_mut(sum), index);
                tasks.push(s.spawn_to(node_of(here, index, grid.tiles()), arguments, add_tile)?);
            }
            tasks.into_iter().try_for_each(|task| Ok::<_, JoinError>(task.join()??))
        })?
    }
}

/// Adds a tile of the product, as a task.
fn add_tile(
    here: &Here<'_>,
    (left, right, mut sum, index): (Lent<'_, Matrix>, Lent<'_, Matrix>, LentMut<'_, [f64]>, usize),
) -> Result<(), ShareError> {
    let (left, right, mut sum) = (left.get(here)?, right.get(here)?, sum.get_mut(here)?);
    let grid = left.grid;
    let (row, column) = (index / grid.count, index % grid.count);
    // Each node begins with its own tiles, so that not all of them ask the same one at the same time.
    for at in (row..grid.count).chain(0..row) {
        let (left, right) = (left.tile(here, row * grid.count + at)?, right.tile(here, at * grid.count + column)?);
        grid.multiply_add(left, right, &mut sum);
    }
    Ok(())
}

fn shared(here: &Here<'_>, options: &Options, grid: TileGrid) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let (left, right, mut product) = outcome.phase("fill", 3, || -> Result<_, JoinError> {
        let factor = |factor| Matrix::factor(here, grid, factor, options.seed);
        Ok((factor(0)?, factor(1)?, Matrix::zeros(here, grid)?))
    })?;
    let before = counts(here)?;
    outcome.phase("multiply", grid.steps(), || dsm::measured(|| product.multiply_add(here, &left, &right)))?;
    count_since(here, before, grid.tiles() as u64, &mut outcome)?;
    let here = &here.enter();
    let vector = vector(grid, options.seed);
    let expected = left.get(here)?.times(here, &right.get(here)?.times(here, &vector)?)?;
    check(&mut outcome, &product.times(here, &vector)?, &expected);
    Ok(outcome)
}
