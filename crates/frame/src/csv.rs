//! Frames from CSV files with a header line.
//!
//! Danger: a wrong line that is skipped, or is reported under another number.

use crate::column::CHUNK_ROWS;
use crate::error::FrameError;
use crate::frame::{FarFrame, Maker};
use arrow::csv::ReaderBuilder;
use arrow::csv::reader::Format;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use farfield::Heap;
use std::fs::File;
use std::io::{BufReader, Cursor, Read, Seek};
use std::path::Path;
use std::sync::Arc;

impl FarFrame {
    /// Reads the table in a CSV file whose first line names the columns. The file is read twice:
    /// only the values of all rows show the type of a column. An empty field is null.
    pub fn from_csv(heap: &Arc<Heap>, path: impl AsRef<Path>) -> Result<FarFrame, FrameError> {
        let name = path.as_ref().display().to_string();
        let file_error = |why| FrameError::File { name, why };
        let file = File::open(path).map_err(file_error)?;
        from_seekable(heap, BufReader::new(file))
    }

    /// Reads the table in a CSV text whose first line names the columns.
    pub fn from_csv_text(heap: &Arc<Heap>, text: &str) -> Result<FarFrame, FrameError> {
        from_seekable(heap, Cursor::new(text))
    }

    /// Reads CSV from any reader, once, into columns with a known schema. The first line is skipped
    /// as the header.
    pub fn from_csv_with(heap: &Arc<Heap>, schema: SchemaRef, text: impl Read) -> Result<FarFrame, FrameError> {
        let mut maker = Maker::new(heap, schema.clone())?;
        let reader = ReaderBuilder::new(schema).with_header(true).with_batch_size(CHUNK_ROWS).build(text)?;
        for batch in reader {
            maker.push(batch.map_err(error_of)?)?;
        }
        maker.finish()
    }
}

fn from_seekable(heap: &Arc<Heap>, mut text: impl Read + Seek) -> Result<FarFrame, FrameError> {
    let (schema, _) = Format::default().with_header(true).infer_schema(&mut text, None).map_err(error_of)?;
    text.rewind().map_err(ArrowError::from)?;
    // A column without any value could have any type.
    let known = |field: &Arc<Field>| match field.data_type() {
        DataType::Null => Arc::new(Field::new(field.name(), DataType::Utf8, true)),
        _ => field.clone(),
    };
    let fields: Vec<Arc<Field>> = schema.fields().iter().map(known).collect();
    FarFrame::from_csv_with(heap, Arc::new(Schema::new(fields)), text)
}

/// Converts an error of Arrow. Its message names the line, and only these words of it are relied
/// on. Arrow counts the line of a wrong value from 0.
fn error_of(error: ArrowError) -> FrameError {
    let (text, before, first) = match &error {
        ArrowError::CsvError(text) => (text, "line ", 0),
        ArrowError::ParseError(text) => (text, " at line ", 1),
        _ => return error.into(),
    };
    let number = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u64>().ok();
    let Some(line) = text.split_once(before).and_then(|(_, rest)| number(rest)) else { return error.into() };
    // The message without Arrow's own line number.
    let why = text.replacen(&format!(" at line {line}"), "", 1);
    FrameError::Csv { line: line + first, why }
}
