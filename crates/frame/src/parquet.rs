//! Frames from Parquet files.
//!
//! Danger: a whole file that is near at once; a value that becomes null because it does not fit; a
//! damaged file that aborts the program.

use crate::column::CHUNK_ROWS;
use crate::conversion::{in_kept_types, kept_types};
use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use farfield::Heap;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

impl FarFrame {
    /// Reads the table in a Parquet file. Strings of any form become `Utf8`, bytes of any length
    /// `Binary`, and dictionaries become their values, also in lists, structs and maps. A column that
    /// frames do not keep is an error that names it: see [`FarFrame::from_parquet_columns`]. One
    /// batch is near, and the pages of the file that it comes from.
    pub fn from_parquet(heap: &Arc<Heap>, path: impl AsRef<Path>) -> Result<FarFrame, FrameError> {
        read(heap, path.as_ref(), None)
    }

    /// Reads only these columns of the table in a Parquet file, in this order.
    ///
    /// ```no_run
    /// # use farfield::Heap;
    /// # use farfield_frame::FarFrame;
    /// # let heap = std::sync::Arc::new(Heap::builder().near(16 << 20).build()?);
    /// let trips = FarFrame::from_parquet_columns(&heap, "trips.parquet", &["zone", "fare"])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_parquet_columns(
        heap: &Arc<Heap>,
        path: impl AsRef<Path>,
        names: &[&str],
    ) -> Result<FarFrame, FrameError> {
        read(heap, path.as_ref(), Some(names))?.select(names)
    }
}

/// Reads the columns with these names, or all, in the order of the file.
fn read(heap: &Arc<Heap>, path: &Path, names: Option<&[&str]>) -> Result<FarFrame, FrameError> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|why| FrameError::File { name: name.clone(), why })?;
    let wrong = |why: String| FrameError::Parquet { name: name.clone(), why };
    let mut builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| wrong(error.to_string()))?;
    let mut schema = kept_types(builder.schema());
    if let Some(names) = names {
        let index_of =
            |name: &&str| schema.index_of(name).map_err(|_| FrameError::NoColumn { name: (*name).to_owned() });
        let mut indices = names.iter().map(index_of).collect::<Result<Vec<_>, _>>()?;
        indices.sort_unstable();
        indices.dedup();
        schema = schema.project(&indices)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), indices);
        builder = builder.with_projection(mask);
    }
    let schema = Arc::new(schema);
    let mut maker = Maker::new(heap, schema.clone())?;
    let reader = builder.with_batch_size(CHUNK_ROWS).build().map_err(|error| wrong(error.to_string()))?;
    for batch in reader {
        let batch = batch.map_err(|error| wrong(error.to_string()))?;
        maker.push(in_kept_types(&schema, &batch)?)?;
    }
    maker.finish()
}
