//! Hash join of two frames on the equality of some columns.
//!
//! If the second frame has few rows, a hash table of them is near. If it has more, both frames are
//! partitioned into far ones by the hash of their keys, and part is joined with part. A part that
//! cannot be cut, because it is one key, is joined chunk by chunk.
//!
//! Danger: a pair that appears twice or not at all; a row without a partner that is lost, or
//! appears beside its partners; nulls that are equal; one key that fills everything.

use crate::column::CHUNK_ROWS;
use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use crate::keys::KeyConverter;
use arrow::array::{ArrayRef, RecordBatch, UInt32Array, new_null_array};
use arrow::compute::{and, interleave, is_not_null, take};
use arrow::datatypes::{Field, Schema, SchemaRef};
use std::collections::HashMap;
use std::hash::RandomState;
use std::sync::Arc;

/// Most chunks of the second frame that are near in a hash table.
const BUILD_CHUNKS: usize = 16;
/// Most times that frames are partitioned. With different keys, 2³⁷ rows are cut to 16 chunks.
const CUTS_MAX: u32 = 5;

/// Description of a join: its columns, and the rows that it returns. See [`FarFrame::join`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Join {
    on: Vec<(String, String)>,
    keeps_left: bool,
    suffix: Option<String>,
}

impl Join {
    /// Joins each pair of rows that are equal in these columns, which both frames have.
    pub fn inner(on: &[&str]) -> Join {
        Join {
            on: on.iter().map(|name| ((*name).to_owned(), (*name).to_owned())).collect(),
            keeps_left: false,
            suffix: None,
        }
    }

    /// Joins as `inner` does, and keeps the rows of the first frame that have no partner, with
    /// nulls in the columns of the second frame.
    pub fn left(on: &[&str]) -> Join {
        Join { keeps_left: true, ..Join::inner(on) }
    }

    /// Adds a condition: `first` of the first frame equals `second` of the second frame.
    pub fn on(mut self, first: impl Into<String>, second: impl Into<String>) -> Join {
        self.on.push((first.into(), second.into()));
        self
    }

    /// Sets a suffix for columns of the second frame whose names the first frame has, too. Without
    /// a suffix they are an error.
    pub fn suffix(mut self, suffix: impl Into<String>) -> Join {
        self.suffix = Some(suffix.into());
        self
    }
}

impl FarFrame {
    /// Joins the rows of this frame with those of another. The result has all columns of this
    /// frame, and the columns of the other that rows are not joined by. As in SQL, null is equal to
    /// nothing; NaN is equal to NaN, and −0 to +0. Rows come in no particular order.
    ///
    /// Besides the heap's budget, 16 chunks of the other frame and their keys are near, and one
    /// chunk of this one. While a frame is partitioned, 16 chunks of it are near. Call this on the
    /// larger frame.
    ///
    /// ```
    /// use farfield::Heap;
    /// use farfield_frame::{FarFrame, Join};
    /// use std::sync::Arc;
    ///
    /// let heap = Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_csv_text(&heap, "zone,fare\nHarlem,7.5\nAstoria,12\nHarlem,52.5\n")?;
    /// let zones = FarFrame::from_csv_text(&heap, "name,borough\nHarlem,Manhattan\n")?;
    /// let joined = trips.join(&zones, &Join::left(&[]).on("zone", "name"))?;
    /// assert_eq!((joined.rows(), joined.describe()?[2].nulls), (3, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn join(&self, other: &FarFrame, join: &Join) -> Result<FarFrame, FrameError> {
        let plan = JoinPlan::new(self, other, join)?;
        let mut maker = Maker::new(&self.heap, plan.joined.clone())?;
        let right = other.in_order(&plan.right)?.present(plan.key_columns)?;
        plan.join(self.in_order(&plan.left)?, right, CUTS_MAX, &mut maker)?;
        maker.finish()
    }

    fn in_order(&self, columns: &[usize]) -> Result<FarFrame, FrameError> {
        let names: Vec<&str> = columns.iter().map(|index| self.schema.field(*index).name().as_str()).collect();
        self.select(&names)
    }

    /// Returns the rows without a null in the first `columns` columns.
    pub(crate) fn present(self, columns: usize) -> Result<FarFrame, FrameError> {
        let names: Vec<&str> = self.schema.fields()[..columns].iter().map(|field| field.name().as_str()).collect();
        if self.columns[..columns].iter().all(|column| column.nulls() == 0) {
            return Ok(self);
        }
        self.filter(&names, |batch| {
            let mut present = is_not_null(batch.column(0))?;
            for column in &batch.columns()[1..] {
                present = and(&present, &is_not_null(column)?)?;
            }
            Ok(present)
        })
    }
}

/// Both frames with their keys first, and the schema of the result.
struct JoinPlan {
    left: Vec<usize>,
    right: Vec<usize>,
    keys: KeyConverter,
    key_columns: usize,
    keeps_left: bool,
    /// Index of each column of the first frame in its keys-first order.
    order: Vec<usize>,
    joined: SchemaRef,
}

impl JoinPlan {
    fn new(left: &FarFrame, right: &FarFrame, join: &Join) -> Result<JoinPlan, FrameError> {
        if join.on.is_empty() {
            return Err(FrameError::NoKeys);
        }
        let left_keys = join.on.iter().map(|(name, _)| left.key_index(name)).collect::<Result<Vec<_>, _>>()?;
        let right_keys = join.on.iter().map(|(_, name)| right.key_index(name)).collect::<Result<Vec<_>, _>>()?;
        let (left_schema, right_schema) = (left.schema(), right.schema());
        let mut types = Vec::new();
        for (first, second) in left_keys.iter().zip(&right_keys) {
            let (first, second) = (left_schema.field(*first), right_schema.field(*second));
            if first.data_type() != second.data_type() {
                return Err(FrameError::KeyTypes {
                    name: first.name().clone(),
                    first: first.data_type().clone(),
                    second: second.data_type().clone(),
                });
            }
            types.push(first.data_type().clone());
        }
        let keys_first = |keys: &[usize], columns: usize| -> Vec<usize> {
            keys.iter().copied().chain((0..columns).filter(|index| !keys.contains(index))).collect()
        };
        let left_order = keys_first(&left_keys, left_schema.fields().len());
        let right_order = keys_first(&right_keys, right_schema.fields().len());
        let mut fields: Vec<Field> = left_schema.fields().iter().map(|field| Field::clone(field)).collect();
        for index in &right_order[right_keys.len()..] {
            let field = right_schema.field(*index);
            let is_taken = left_schema.field_with_name(field.name()).is_ok();
            let name = match &join.suffix {
                Some(suffix) if is_taken => format!("{}{suffix}", field.name()),
                None if is_taken => return Err(FrameError::BothHave { name: field.name().clone() }),
                _ => field.name().clone(),
            };
            fields.push(Field::new(name, field.data_type().clone(), field.is_nullable() || join.keeps_left));
        }
        let mut order = vec![0; left_order.len()];
        left_order.iter().enumerate().for_each(|(at, index)| order[*index] = at);
        Ok(JoinPlan {
            left: left_order,
            right: right_order,
            keys: KeyConverter::new(&types)?,
            key_columns: types.len(),
            keeps_left: join.keeps_left,
            order,
            joined: Arc::new(Schema::new(fields)),
        })
    }

    fn join(&self, left: FarFrame, right: FarFrame, cuts: u32, maker: &mut Maker) -> Result<(), FrameError> {
        if left.rows() == 0 || right.rows() == 0 && !self.keeps_left {
            return Ok(());
        }
        if right.rows() <= BUILD_CHUNKS * CHUNK_ROWS {
            return self.probe(&left, &right, maker);
        }
        if cuts == 0 {
            return self.nested(&left, &right, maker);
        }
        let all = right.rows();
        let hasher = RandomState::new();
        let parts = self.keys.parts(&right, &hasher)?;
        drop(right);
        for (left, right) in self.keys.parts(&left, &hasher)?.into_iter().zip(parts) {
            // Another hash does not split a key that has nearly all rows.
            let cuts = if right.rows() > all - all / 8 { 0 } else { cuts - 1 };
            self.join(left, right, cuts, maker)?;
        }
        Ok(())
    }

    /// Looks up each row of the first frame in a hash table of the whole second frame.
    fn probe(&self, left: &FarFrame, right: &FarFrame, maker: &mut Maker) -> Result<(), FrameError> {
        let right = right.batches().collect::<Result<Vec<_>, _>>()?;
        let mut table = JoinTable::default();
        for (number, batch) in right.iter().enumerate() {
            table.add(&self.keys, number, batch)?;
        }
        for batch in left.batches() {
            let batch = batch?;
            let keys = self.keys.of(&batch)?;
            let mut pairs = JoinPairs::new(self, &batch, &right, maker);
            for (row, key) in keys.iter().enumerate() {
                let partners = table.of(key.data());
                partners.iter().try_for_each(|partner| pairs.push(row, *partner))?;
                if partners.is_empty() && self.keeps_left {
                    pairs.push_alone(row)?;
                }
            }
            pairs.finish()?;
        }
        Ok(())
    }

    /// Looks up each row of the second frame in a hash table of one chunk of the first frame, for
    /// each of its chunks.
    fn nested(&self, left: &FarFrame, right: &FarFrame, maker: &mut Maker) -> Result<(), FrameError> {
        for batch in left.batches() {
            let batch = batch?;
            let mut table = JoinTable::default();
            table.add(&self.keys, 0, &batch)?;
            let mut is_alone = vec![true; batch.num_rows()];
            for other in right.batches() {
                let other = [other?];
                let mut pairs = JoinPairs::new(self, &batch, &other, maker);
                for (partner, key) in self.keys.of(&other[0])?.iter().enumerate() {
                    for (_, row) in table.of(key.data()) {
                        is_alone[*row] = false;
                        pairs.push(*row, (0, partner))?;
                    }
                }
                pairs.finish()?;
            }
            if self.keeps_left {
                let mut pairs = JoinPairs::new(self, &batch, &[], maker);
                let mut alone = (0..batch.num_rows()).filter(|row| is_alone[*row]);
                alone.try_for_each(|row| pairs.push_alone(row))?;
                pairs.finish()?;
            }
        }
        Ok(())
    }
}

/// Rows of each key: the number of the batch, and the row in it.
#[derive(Default)]
struct JoinTable(HashMap<Box<[u8]>, Vec<(usize, usize)>>);

impl JoinTable {
    fn add(&mut self, keys: &KeyConverter, number: usize, batch: &RecordBatch) -> Result<(), FrameError> {
        for (row, key) in keys.of(batch)?.iter().enumerate() {
            match self.0.get_mut(key.data()) {
                Some(rows) => rows.push((number, row)),
                None => drop(self.0.insert(key.data().into(), vec![(number, row)])),
            }
        }
        Ok(())
    }

    fn of(&self, key: &[u8]) -> &[(usize, usize)] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }
}

/// Pairs of rows of a batch of the first frame and of batches of the second one. They are stored a
/// chunk at a time.
struct JoinPairs<'p> {
    plan: &'p JoinPlan,
    left: &'p RecordBatch,
    right: &'p [RecordBatch],
    rows: Vec<u32>,
    partners: Vec<(usize, usize)>,
    maker: &'p mut Maker,
}

impl<'p> JoinPairs<'p> {
    fn new(plan: &'p JoinPlan, left: &'p RecordBatch, right: &'p [RecordBatch], maker: &'p mut Maker) -> JoinPairs<'p> {
        JoinPairs { plan, left, right, rows: Vec::new(), partners: Vec::new(), maker }
    }

    fn push(&mut self, row: usize, partner: (usize, usize)) -> Result<(), FrameError> {
        self.rows.push(row as u32);
        self.partners.push(partner);
        if self.rows.len() == CHUNK_ROWS { self.store() } else { Ok(()) }
    }

    /// Adds a row without a partner. Its partner is the null behind all batches.
    fn push_alone(&mut self, row: usize) -> Result<(), FrameError> {
        self.push(row, (self.right.len(), 0))
    }

    fn finish(mut self) -> Result<(), FrameError> {
        if self.rows.is_empty() { Ok(()) } else { self.store() }
    }

    fn store(&mut self) -> Result<(), FrameError> {
        let plan = self.plan;
        let rows = UInt32Array::from(std::mem::take(&mut self.rows));
        let left = plan.order.iter().map(|index| take(self.left.column(*index), &rows, None));
        let mut columns = left.collect::<Result<Vec<ArrayRef>, _>>()?;
        for index in plan.key_columns..plan.right.len() {
            let null = new_null_array(plan.joined.field(columns.len()).data_type(), 1);
            let arrays = self.right.iter().map(|batch| &**batch.column(index)).chain([&*null]);
            columns.push(interleave(&arrays.collect::<Vec<_>>(), &self.partners)?);
        }
        self.partners.clear();
        self.maker.push(RecordBatch::try_new(plan.joined.clone(), columns)?)
    }
}
