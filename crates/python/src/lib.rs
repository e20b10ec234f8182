//! Extension module `farfield._native`: heaps, frames and SQL for Python.
//!
//! The module is thin: `python/farfield/_frames.py` is what people see. Values go in and out by
//! Arrow's C data interface. Operations run without the interpreter's lock, and ^C ends them
//! (`interruptible`).
//!
//! The design is described in `docs/design/python.md`.

#![deny(unsafe_code)]

mod errors;
mod expression;
mod frame;
mod heap;
mod interruptible;
mod of_process;
#[cfg(feature = "sql")]
mod sql;
mod values;

use pyo3::pymodule;

/// Classes behind those of `farfield`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::expression::PyExpression;
    #[pymodule_export]
    use crate::frame::PyFrame;
    #[pymodule_export]
    use crate::heap::PyHeap;

    /// Whether queries by SQL were built in.
    #[pymodule_export]
    const HAS_SQL: bool = cfg!(feature = "sql");
}
