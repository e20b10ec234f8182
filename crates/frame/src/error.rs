//! Errors of frames.

use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use farfield::{FarError, OffloadError};

/// Error of making a frame or of a query to it.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Error of far memory; see [`FarError`].
    #[error(transparent)]
    Far(#[from] FarError),
    /// Error of a computation at the memory server; see [`OffloadError`].
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// Error of Arrow: types that do not fit, a sum that overflows.
    #[error("{0}")]
    Arrow(ArrowError),
    /// A file cannot be opened or read.
    #[error("cannot read {name}: {why}")]
    File {
        /// Path of the file.
        name: String,
        /// Error of the operating system.
        why: std::io::Error,
    },
    /// A line of a CSV file does not match the columns.
    #[error("line {line}: {why}")]
    Csv {
        /// Line number from 1, the header included; a row of several lines counts once.
        line: u64,
        /// Reason, as text.
        why: String,
    },
    /// A Parquet file is damaged, or of a kind that cannot be read.
    #[error("{name} is no Parquet file that can be read: {why}")]
    Parquet {
        /// Path of the file.
        name: String,
        /// Reason, as text.
        why: String,
    },
    /// The frame has no such column.
    #[error("there is no column {name:?}")]
    NoColumn {
        /// Name that was asked for.
        name: String,
    },
    /// No columns were given to group or join rows by.
    #[error("there are no columns to group or join rows by")]
    NoKeys,
    /// Key columns have different types. Such values are never equal: cast one of the columns.
    #[error(
        "column {name:?} has the type {first}, and is to be joined with one of the type {second}: cast one of them"
    )]
    KeyTypes {
        /// Column of the first frame.
        name: String,
        /// Type of the column of the first frame.
        first: DataType,
        /// Type of the column of the second frame.
        second: DataType,
    },
    /// Both frames have a column that they are not joined by.
    #[error("both frames have a column {name:?}: join by it, leave it out, or give a suffix")]
    BothHave {
        /// Name of the column.
        name: String,
    },
    /// A column of this name exists already, or two columns would have it.
    #[error("there would be two columns {name:?}")]
    SameName {
        /// Name that both columns would have.
        name: String,
    },
    /// Columns of this type cannot be kept far.
    #[error(
        "column {name:?} has the type {data_type}, which frames do not keep: cast it, or leave it out \
         (of a Parquet file by from_parquet_columns)"
    )]
    NotKept {
        /// Name of the column.
        name: String,
        /// Type of the column.
        data_type: DataType,
    },
    /// Columns of this type do not support this operation.
    #[error("column {name:?} has the type {data_type}, which cannot be used here")]
    Type {
        /// Name of the column.
        name: String,
        /// Type of the column.
        data_type: DataType,
    },
    /// A closure returned another number of values than the batch has rows.
    #[error("{rows} rows were asked for, and {values} values came")]
    Lengths {
        /// Rows of the batch.
        rows: usize,
        /// Values that the closure returned.
        values: usize,
    },
    /// The range of rows is not within the frame.
    #[error("rows up to {end} of a frame with {rows}")]
    NoRows {
        /// The end of the range, or its start if the start is behind the end.
        end: usize,
        /// Rows of the frame.
        rows: usize,
    },
    /// The types of two values have nothing in common.
    #[error("a value of the type {left} and one of the type {right} do not fit together: cast one of them")]
    Types {
        /// Type of the first value.
        left: DataType,
        /// Type of the second value.
        right: DataType,
    },
    /// The values of an expression are no truth values.
    #[error("a value of the type {data_type} is no condition: compare it with something")]
    NoCondition {
        /// Type of the values.
        data_type: DataType,
    },
    /// An expression has too many levels.
    #[error("an expression has at most {levels_max} levels: compute a part of it as a column first")]
    TooDeep {
        /// Most levels.
        levels_max: usize,
    },
    /// The operation was cancelled; see [`cancellable`](crate::cancellable).
    #[error("the operation was cancelled")]
    Cancelled,
}

impl From<ArrowError> for FrameError {
    /// Takes an error of a frame out of that of Arrow, if it came through Arrow's hands.
    fn from(error: ArrowError) -> FrameError {
        match error {
            ArrowError::ExternalError(error) => match error.downcast() {
                Ok(error) => *error,
                Err(error) => FrameError::Arrow(ArrowError::ExternalError(error)),
            },
            error => FrameError::Arrow(error),
        }
    }
}

impl From<FrameError> for ArrowError {
    fn from(error: FrameError) -> ArrowError {
        match error {
            FrameError::Arrow(error) => error,
            error => ArrowError::from_external_error(Box::new(error)),
        }
    }
}
