//! What can go wrong with a frame.

use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use farfield::{FarError, OffloadError};

/// Why a frame cannot be made, or not be asked.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Far memory: see [`FarError`].
    #[error(transparent)]
    Far(#[from] FarError),
    /// What was to be found where the values are was not found: see [`OffloadError`].
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// Arrow refuses: types that do not fit, a sum that overflows.
    #[error("{0}")]
    Arrow(#[from] ArrowError),
    /// A file cannot be opened or read.
    #[error("cannot read {name}: {why}")]
    File {
        /// Its path.
        name: String,
        /// What the operating system says.
        why: std::io::Error,
    },
    /// A line of a CSV file is not what its columns are.
    #[error("line {line}: {why}")]
    Csv {
        /// Counted from 1, the names of the columns included; a row of several lines counts once.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A Parquet file is damaged, or of a kind that is not read.
    #[error("{name} is no Parquet file that can be read: {why}")]
    Parquet {
        /// Its path.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The frame has no such column.
    #[error("there is no column {name:?}")]
    NoColumn {
        /// What was asked for.
        name: String,
    },
    /// Rows are grouped or joined by one column at least.
    #[error("there are no columns to group or join rows by")]
    NoKeys,
    /// Columns of different types are equal nowhere: one of them is to be cast.
    #[error(
        "column {name:?} has the type {first}, and is to be joined with one of the type {second}: cast one of them"
    )]
    KeyTypes {
        /// The column of the first frame.
        name: String,
        /// Its type.
        first: DataType,
        /// The type of the other one.
        second: DataType,
    },
    /// Both frames have a column that they are not joined by.
    #[error("both frames have a column {name:?}: join by it, leave it out, or give a suffix")]
    BothHave {
        /// Its name.
        name: String,
    },
    /// There is a column of that name, or there are two.
    #[error("there would be two columns {name:?}")]
    SameName {
        /// Their name.
        name: String,
    },
    /// Columns of this type cannot be kept far.
    #[error(
        "column {name:?} has the type {data_type}, which frames do not keep: cast it, or leave it out \
         (of a Parquet file by from_parquet_columns)"
    )]
    NotKept {
        /// The column.
        name: String,
        /// Its type.
        data_type: DataType,
    },
    /// Columns of this type cannot be asked this.
    #[error("column {name:?} has the type {data_type}, which cannot be used here")]
    Type {
        /// The column.
        name: String,
        /// Its type.
        data_type: DataType,
    },
    /// What a closure gave has not a value for each row.
    #[error("{rows} rows were asked for, and {values} values came")]
    Lengths {
        /// Rows of the batch.
        rows: usize,
        /// Values that came.
        values: usize,
    },
    /// There are no such rows.
    #[error("rows up to {end} of a frame with {rows}")]
    NoRows {
        /// The end of the range, or its start if that is behind it.
        end: usize,
        /// Rows of the frame.
        rows: usize,
    },
}
