//! `ff.compute.*`: number, sum, smallest and largest of what formulas make of the numbers of a row,
//! grouped by the values of other columns. `ff.column.*` writes what a formula makes of rows to a column.
//! There is one function for each type in which is computed.
//!
//! A formula is a program of a stack machine, in postfix order. Each value on its stack is a column: the
//! numbers of some rows side by side, as in MonetDB/X100 (CIDR'05). So a step is one loop.

use super::copy::PageStreamWriter;
use super::group::{Grouping, Groups};
use super::{CHUNK_BYTES, Cell, Column, Condition, Kind, PieceCursor, RowCursor, VALUES_MAX, room};
use crate::totals::Number;
use crate::{Fault, Function, Place, Range};
use core::marker::PhantomData;
use serde::{Deserialize, Serialize};

/// Most steps of all formulas of a call together.
pub const FORMULA_STEPS_MAX: usize = 64;
/// Most values on the stack of a formula.
pub const FORMULA_DEPTH_MAX: usize = 16;
/// Most columns of which formulas are made in a call.
pub const FORMULA_INPUTS_MAX: usize = 16;

/// Aggregates what formulas make of rows, by keys.
#[derive(Debug)]
pub struct Compute<N>(PhantomData<N>);

/// Columns to group and to compute with, of equal length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Computed {
    /// Columns that form the key, at most [`KEYS_MAX`](super::KEYS_MAX).
    pub keys: Vec<Column>,
    /// Columns of numbers with which formulas compute, one at least, at most [`FORMULA_INPUTS_MAX`].
    pub inputs: Vec<Column>,
    /// Formulas whose numbers are aggregated, at most [`VALUES_MAX`].
    pub formulas: Vec<Vec<FormulaStep>>,
    /// Conditions on the rows to aggregate.
    pub conditions: Vec<Condition>,
}

/// A step of a formula. Whole numbers wrap around.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FormulaStep {
    /// Puts the numbers of an input on the stack, in the type in which is computed (as by `as`).
    Input(u32),
    /// Puts the number with this image on the stack, for each row.
    Constant(u64),
    /// Replaces the two uppermost values by their sum.
    Add,
    /// Replaces them by their difference: the lower one less the upper one.
    Subtract,
    /// Replaces them by their product.
    Multiply,
}

/// Returns the most values that are on the stack of a formula. `None` if it does not leave one, takes more
/// than there are, or names an input that does not exist.
fn depth_of(formula: &[FormulaStep], inputs: usize) -> Option<usize> {
    let (mut depth, mut most) = (0usize, 0);
    for step in formula {
        match step {
            FormulaStep::Input(input) if *input as usize >= inputs => return None,
            FormulaStep::Input(_) | FormulaStep::Constant(_) => depth += 1,
            FormulaStep::Add | FormulaStep::Subtract | FormulaStep::Multiply => {
                depth = depth.checked_sub(1).filter(|depth| *depth > 0)?;
            }
        }
        most = most.max(depth);
    }
    (depth == 1).then_some(most)
}

/// Checks whether a server computes these formulas of so many inputs in one call.
pub fn is_computable<'f>(formulas: impl Iterator<Item = &'f [FormulaStep]> + Clone, inputs: usize) -> bool {
    let is_right = |formula| depth_of(formula, inputs).is_some_and(|depth| depth <= FORMULA_DEPTH_MAX);
    (1..=VALUES_MAX).contains(&formulas.clone().count())
        && (1..=FORMULA_INPUTS_MAX).contains(&inputs)
        && formulas.clone().map(<[_]>::len).sum::<usize>() <= FORMULA_STEPS_MAX
        && formulas.clone().all(is_right)
}

/// Computes formulas for some rows at a time.
#[derive(Debug)]
pub struct FormulaMachine<N> {
    inputs: Vec<Vec<N>>,
    stack: Vec<Vec<N>>,
    results: Vec<Vec<N>>,
}

impl<N: Number> FormulaMachine<N> {
    /// Creates one for so many inputs and formulas.
    pub fn new(inputs: usize, formulas: usize) -> FormulaMachine<N> {
        FormulaMachine { inputs: vec![Vec::new(); inputs], stack: Vec::new(), results: vec![Vec::new(); formulas] }
    }

    /// Returns the numbers of an input, to be filled with those of some rows. They are none.
    pub fn input(&mut self, input: usize) -> &mut Vec<N> {
        let numbers = &mut self.inputs[input];
        numbers.clear();
        numbers
    }

    /// Computes the formulas for the rows whose numbers the inputs have.
    ///
    /// # Panics
    /// If a formula is none: it takes more from the stack than there is, or names an input that does not
    /// exist; or if the inputs do not have so many rows.
    pub fn compute<'f>(&mut self, formulas: impl Iterator<Item = &'f [FormulaStep]>, rows: usize) {
        for (formula, result) in formulas.zip(&mut self.results) {
            let mut depth = 0;
            for step in formula {
                match step {
                    FormulaStep::Input(input) => {
                        let pushed = push(&mut self.stack, &mut depth);
                        pushed.extend_from_slice(&self.inputs[*input as usize][..rows]);
                    }
                    FormulaStep::Constant(image) => {
                        push(&mut self.stack, &mut depth).resize(rows, N::of_image(*image));
                    }
                    FormulaStep::Add => apply(&mut self.stack, &mut depth, N::plus),
                    FormulaStep::Subtract => apply(&mut self.stack, &mut depth, N::minus),
                    FormulaStep::Multiply => apply(&mut self.stack, &mut depth, N::times),
                }
            }
            assert!(depth == 1, "a formula leaves one value");
            core::mem::swap(result, &mut self.stack[0]);
        }
    }

    /// Returns what each formula has made of the rows.
    pub fn results(&self) -> impl ExactSizeIterator<Item = &[N]> {
        self.results.iter().map(Vec::as_slice)
    }
}

/// Returns an empty value above the others.
fn push<'s, N>(stack: &'s mut Vec<Vec<N>>, depth: &mut usize) -> &'s mut Vec<N> {
    if stack.len() == *depth {
        stack.push(Vec::new());
    }
    *depth += 1;
    let pushed = &mut stack[*depth - 1];
    pushed.clear();
    pushed
}

/// Replaces the two uppermost values by one.
fn apply<N: Copy>(stack: &mut [Vec<N>], depth: &mut usize, operate: impl Fn(N, N) -> N) {
    assert!(*depth >= 2, "an operation takes two values");
    *depth -= 1;
    let (lower, upper) = stack.split_at_mut(*depth);
    lower[*depth - 1].iter_mut().zip(&upper[0]).for_each(|(lower, upper)| *lower = operate(*lower, *upper));
}

impl<N: Number> Function for Compute<N> {
    const NAME: &'static str = N::COMPUTE;
    const VERSION: u32 = 1;
    const ONLY_READS: bool = true;
    type Argument = Computed;
    type Answer = Groups<N>;

    async fn run<P: Place>(place: &P, computed: Computed) -> Result<Groups<N>, Fault> {
        let columns = computed.formulas.len();
        let mut grouping = Grouping::new(columns);
        let inputs = InputCursor::<N>::new(&computed.inputs, &computed.formulas);
        let (Some(mut inputs), Some(mut rows)) = (inputs, RowCursor::new(&computed.keys, &computed.conditions)) else {
            return Ok(grouping.finish());
        };
        let most = room(&computed.keys, Groups::<N>::MOST / columns);
        loop {
            let count = rows.ready().min(inputs.ready());
            if count == 0 {
                return Ok(grouping.finish());
            }
            let numbers = inputs.next(place, count).await?;
            let is_all = grouping.add_all(&rows.next(place, count).await?, numbers.results(), most);
            if !is_all || grouping.is_full() {
                return Ok(grouping.finish());
            }
            place.yield_now().await;
        }
    }
}

/// Computes a column of what a formula makes of rows.
#[derive(Debug)]
pub struct ComputeColumn<N>(PhantomData<N>);

/// Columns to compute with, of equal length, and pages for the result, which the call must not read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ComputedColumn {
    /// Columns of numbers, as those of [`Computed`].
    pub inputs: Vec<Column>,
    /// The formula.
    pub formula: Vec<FormulaStep>,
    /// Output: whole pages, in this order; counts are of pages. They are overwritten as a whole: the rest
    /// of the last one becomes zeros.
    pub to: Vec<Range>,
}

impl<N: Number> Function for ComputeColumn<N> {
    const NAME: &'static str = N::COLUMN;
    const VERSION: u32 = 1;
    type Argument = ComputedColumn;
    /// Number of rows that were computed; 0 if the formula is none.
    type Answer = u64;

    async fn run<P: Place>(place: &P, computed: ComputedColumn) -> Result<u64, Fault> {
        let mut target = PageStreamWriter::new(place, &computed.to)?;
        let formulas = [computed.formula];
        let Some(mut inputs) = InputCursor::<N>::new(&computed.inputs, &formulas) else { return Ok(0) };
        let (mut bytes, mut rows) = (Vec::new(), 0);
        loop {
            let count = inputs.ready();
            if count == 0 {
                target.end(place).await?;
                return Ok(rows);
            }
            bytes.clear();
            let numbers = inputs.next(place, count).await?;
            numbers.results().flatten().for_each(|number| number.put(&mut bytes));
            target.put(place, &bytes).await?;
            rows += count;
            place.yield_now().await;
        }
    }
}

/// Cursor over the inputs of formulas, side by side, that computes these.
struct InputCursor<'w, N> {
    inputs: Vec<(Kind, PieceCursor<'w>)>,
    formulas: &'w [Vec<FormulaStep>],
    machine: FormulaMachine<N>,
    images: Vec<u64>,
    /// Most rows that are computed between two turns of others: whatever the width of the numbers, that
    /// takes a fraction of a millisecond.
    rows_max: u64,
}

impl<'w, N: Number> InputCursor<'w, N> {
    /// Makes a cursor; `None` if a server does not compute these formulas of these columns.
    fn new(inputs: &'w [Column], formulas: &'w [Vec<FormulaStep>]) -> Option<InputCursor<'w, N>> {
        let number = |column: &'w Column| match column.cell {
            Cell::Number(kind) => Some((kind, PieceCursor::of(column))),
            Cell::Bit => None,
        };
        is_computable(formulas.iter().map(Vec::as_slice), inputs.len()).then_some(())?;
        Some(InputCursor {
            inputs: inputs.iter().map(number).collect::<Option<_>>()?,
            formulas,
            machine: FormulaMachine::new(inputs.len(), formulas.len()),
            images: Vec::new(),
            rows_max: CHUNK_BYTES / (size_of::<u64>() * formulas.len()) as u64,
        })
    }

    /// Returns how many rows lie side by side from here on, in each column; 0 at the end.
    fn ready(&mut self) -> u64 {
        self.inputs.iter_mut().map(|(_, input)| input.ready()).fold(self.rows_max, u64::min)
    }

    /// Computes the formulas for the next `count` rows.
    async fn next<P: Place>(&mut self, place: &P, count: u64) -> Result<&FormulaMachine<N>, Fault> {
        for (index, (kind, input)) in self.inputs.iter_mut().enumerate() {
            let bytes = input.next(place, count).await?;
            let numbers = self.machine.input(index);
            if *kind == N::KIND {
                N::each(&bytes, |number| numbers.push(number));
            } else {
                kind.images(&bytes, &mut self.images);
                N::cast_images(*kind, &self.images, numbers);
            }
        }
        self.machine.compute(self.formulas.iter().map(Vec::as_slice), count as usize);
        Ok(&self.machine)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against numbers that differ from those of a loop, and against formulas that are none.
    use super::*;
    use crate::columns::{Key, VALUES_MAX};
    use crate::totals::Part;
    use crate::{Sim, Stop};
    use core::ops::Bound;
    use std::collections::BTreeMap;

    fn column(kind: Kind, offset: u64, count: u64) -> Column {
        Column { cell: Cell::Number(kind), pieces: vec![Range { offset, count }] }
    }

    use FormulaStep::{Add, Constant, Input, Multiply, Subtract};

    #[test]
    fn aggregates_of_formulas_are_those_of_a_loop() {
        const ROWS: usize = 9000;
        let (keys, bytes): (Vec<u8>, Vec<i8>) =
            (0..ROWS).map(|row| ((row * row % 17) as u8, (row * 31 % 251) as u8 as i8)).unzip();
        let fares: Vec<f32> = (0..ROWS).map(|row| (row % 777) as f32 * 0.1 - 9.0).collect();
        let mut region = keys.clone();
        region.extend(bytes.iter().map(|byte| *byte as u8));
        region.extend(fares.iter().flat_map(|fare| fare.to_le_bytes()));
        let sim = Sim::new(20, region);
        let rows = ROWS as u64;
        let inputs = vec![column(Kind::I8, rows, rows), column(Kind::F32, 2 * rows, rows)];
        let half = 0.5f64.image();
        let formulas = vec![
            // a * (0.5 - b), b, and (a + a) * b - a.
            vec![Input(0), Constant(half), Input(1), Subtract, Multiply],
            vec![Input(1)],
            vec![Input(0), Input(0), Add, Input(1), Multiply, Input(0), Subtract],
        ];
        let low = 50;
        let conditions = vec![Condition { column: column(Kind::I8, rows, rows), low, high: u64::MAX }];
        let computed = Computed { keys: vec![column(Kind::U8, 0, rows)], inputs, formulas, conditions };
        let found = sim.run_one::<Compute<f64>>(computed).unwrap();
        let mut right: BTreeMap<Key, Vec<Part<f64>>> = BTreeMap::new();
        for row in (0..ROWS).filter(|row| bytes[*row].image() >= low) {
            let (a, b) = (f64::from(bytes[row]), f64::from(fares[row]));
            let parts =
                right.entry([keys[row].into(), 0, 0, 0, 0, 0, 0, 0]).or_insert_with(|| vec![Part::default(); 3]);
            for (part, number) in parts.iter_mut().zip([a * (0.5 - b), b, (a + a) * b - a]) {
                part.add_all(&[number], &(Bound::Unbounded, Bound::Unbounded));
            }
        }
        // Sums are equal, and not how they are held.
        let said = |groups: BTreeMap<Key, Vec<Part<f64>>>| -> Vec<_> {
            let said = |part: &Part<f64>| (part.count(), part.sum(), part.min(), part.max());
            groups.into_iter().map(|(key, parts)| (key, Vec::from_iter(parts.iter().map(said)))).collect()
        };
        assert_eq!((found.rows, said(found.groups)), (rows, said(right)));
    }

    #[test]
    fn whole_numbers_wrap_around_and_change_their_type_as_in_rust() {
        let region: Vec<u8> = [-1.5f64, 300.0, f64::NAN, 1e30].iter().flat_map(|number| number.to_le_bytes()).collect();
        let sim = Sim::new(21, region);
        let formulas =
            vec![vec![Input(0)], vec![Input(0), Constant(200u8.image()), Add], vec![Input(0), Input(0), Multiply]];
        let inputs = vec![column(Kind::F64, 0, 4)];
        let computed = Computed { keys: Vec::new(), inputs, formulas, conditions: Vec::new() };
        let found = sim.run_one::<Compute<u8>>(computed).unwrap();
        let sums: Vec<u128> = found.groups[&Key::default()].iter().map(Part::sum).collect();
        // 0, 255, 0 and 255.
        assert_eq!(sums, [510, 2 * 200 + 2 * 199, 2]);
    }

    #[test]
    fn what_is_no_formula_is_not_computed() {
        let sim = Sim::new(22, vec![7; 4096]);
        let run = |formulas: Vec<Vec<FormulaStep>>, inputs: Vec<Column>| {
            let computed = Computed { keys: Vec::new(), inputs, formulas, conditions: Vec::new() };
            sim.run_one::<Compute<i32>>(computed).map(|found| found.rows)
        };
        let one = || vec![column(Kind::U8, 0, 100)];
        assert_eq!(run(vec![vec![Input(0)]], one()), Ok(100));
        let deep = |depth: usize| [vec![Input(0); depth], vec![Add; depth - 1]].concat();
        assert_eq!(run(vec![deep(FORMULA_DEPTH_MAX)], one()), Ok(100));
        for wrong in [
            vec![],
            vec![vec![]],
            vec![vec![Add]],
            vec![vec![Input(0), Add]],
            vec![vec![Input(0), Input(0)]],
            vec![vec![Input(1)]],
            vec![vec![Input(0), Multiply, Input(0)]],
            vec![deep(FORMULA_DEPTH_MAX + 1)],
            vec![[&[Input(0)][..], &[Constant(1), Add].repeat(FORMULA_STEPS_MAX / 2)].concat()],
            vec![vec![Input(0)]; VALUES_MAX + 1],
            vec![vec![Input(0)], vec![Subtract]],
        ] {
            assert_eq!(run(wrong.clone(), one()), Ok(0), "{wrong:?}");
        }
        let simple = || vec![vec![Input(0)]];
        assert_eq!(run(vec![vec![Constant(1)]], Vec::new()), Ok(0));
        assert_eq!(run(simple(), vec![one(); FORMULA_INPUTS_MAX + 1].concat()), Ok(0));
        let bits = Column { cell: Cell::Bit, ..column(Kind::U8, 0, 100) };
        assert_eq!(run(simple(), vec![bits]), Ok(0));
        let outside = run(simple(), vec![column(Kind::U8, 4090, 100)]);
        assert!(matches!(outside, Err(Stop::Fault(Fault::OutOfRange { .. }))), "{outside:?}");
    }

    #[test]
    fn columns_are_written_to_whole_pages_and_nothing_else() {
        const ROWS: u64 = 5000;
        let mut region: Vec<u8> = (0..ROWS).flat_map(|row| (row as f32 * 0.5).to_le_bytes()).collect();
        region.resize(20 * 4096, 9);
        let sim = Sim::new(23, region.clone());
        let page = |number: u64, count| Range { offset: 4096 * number, count };
        let formula = vec![Input(0), Constant(3i16.image()), Multiply];
        let inputs = vec![Column {
            pieces: vec![Range { offset: 0, count: 4999 }, Range { offset: 4, count: 1 }],
            ..column(Kind::F32, 0, 0)
        }];
        let computed = ComputedColumn { inputs, formula, to: vec![page(9, 1), page(7, 2)] };
        assert_eq!(sim.run_one::<ComputeColumn<i16>>(computed.clone()), Ok(ROWS));
        let mut right: Vec<u8> =
            (0..4999).chain([1]).flat_map(|row| ((row as f32 * 0.5) as i16 * 3).to_le_bytes()).collect();
        right.resize(3 * 4096, 0);
        let bytes = sim.bytes();
        assert!(bytes[9 * 4096..10 * 4096] == right[..4096] && bytes[7 * 4096..9 * 4096] == right[4096..]);
        region[7 * 4096..9 * 4096].copy_from_slice(&right[4096..]);
        region[9 * 4096..10 * 4096].copy_from_slice(&right[..4096]);
        assert!(bytes == region, "other pages are as they were");
        let run = |change: &dyn Fn(&mut ComputedColumn)| {
            let mut computed = computed.clone();
            change(&mut computed);
            sim.run_one::<ComputeColumn<i16>>(computed)
        };
        assert_eq!(run(&|computed| computed.formula.push(Add)), Ok(0));
        assert!(matches!(run(&|computed| computed.to = vec![page(9, 1)]), Err(Stop::Fault(Fault::TooLong { .. }))));
        assert!(matches!(run(&|computed| computed.to[0].offset += 8), Err(Stop::Fault(Fault::Unaligned { .. }))));
        assert!(matches!(run(&|computed| computed.to[0].count = 99), Err(Stop::Fault(Fault::OutOfRange { .. }))));
    }
}
