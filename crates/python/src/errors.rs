//! Errors as exceptions of the package.

use farfield::{BuildError, FarError, OffloadError};
use farfield_frame::FrameError;
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;

/// Returns an exception of the package `farfield`, by the name of its class.
pub(crate) fn exception(class: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let made = py.import("farfield").and_then(|package| package.getattr(class)?.call1((message,)));
        made.map_or_else(|error| error, PyErr::from_value)
    })
}

pub(crate) fn of_frame(error: FrameError) -> PyErr {
    let text = error.to_string();
    match error {
        FrameError::Far(error) => exception(class_of(&error), text),
        FrameError::Offload(OffloadError::Far(error)) => exception(class_of(&error), text),
        FrameError::Offload(_) => exception("ServerError", text),
        FrameError::File { name, why } => match why.raw_os_error() {
            // Python picks the class (FileNotFoundError, …) by the number.
            Some(number) => PyOSError::new_err((number, plain(&why), name)),
            None => PyOSError::new_err(text),
        },
        FrameError::Cancelled => PyKeyboardInterrupt::new_err(()),
        _ => exception("QueryError", text),
    }
}

pub(crate) fn of_build(error: BuildError) -> PyErr {
    let class = match &error {
        BuildError::Argument(_) => "BudgetError",
        BuildError::Open(_) | BuildError::Pool(_) => "ServerError",
        BuildError::Far(error) => class_of(error),
        _ => "FarfieldError",
    };
    exception(class, error.to_string())
}

fn class_of(error: &FarError) -> &'static str {
    match error {
        FarError::Pool(_) => "ServerError",
        FarError::NearFull | FarError::TooLarge { .. } | FarError::TablesFull { .. } => "BudgetError",
        _ => "FarfieldError",
    }
}

/// Returns the text of an error of the operating system without its number.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split_once(" (os error").map_or(text.clone(), |(text, _)| text.to_owned())
}
