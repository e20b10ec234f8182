//! Values of the process that made them.

use crate::errors::exception;
use pyo3::prelude::*;

/// A value with threads and connections behind it. A forked child has a copy of its bytes and none of
/// its threads, so there it is neither used nor dropped.
pub(crate) struct OfProcess<T: Send> {
    /// `None` only while it is dropped.
    value: Option<T>,
    pid: u32,
}

impl<T: Send> OfProcess<T> {
    pub(crate) fn new(value: T) -> OfProcess<T> {
        OfProcess { value: Some(value), pid: std::process::id() }
    }

    /// Returns the value, or an exception in another process.
    pub(crate) fn get(&self) -> PyResult<&T> {
        let is_ours = self.pid == std::process::id();
        self.value.as_ref().filter(|_| is_ours).ok_or_else(|| foreign_heap(self.pid))
    }

    pub(crate) fn get_mut(&mut self) -> PyResult<&mut T> {
        self.get()?;
        self.value.as_mut().ok_or_else(|| foreign_heap(self.pid))
    }
}

/// Returns the exception that the heap of another process is used.
fn foreign_heap(pid: u32) -> PyErr {
    let text = format!(
        "the heap belongs to process {pid}, of which this one is a fork: open a heap here, or start processes by \
         \"spawn\""
    );
    exception("FarfieldError", text)
}

impl<T: Send> Drop for OfProcess<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        if self.pid != std::process::id() {
            std::mem::forget(value);
            return;
        }
        // To give far pages back may take a while, for which other threads of Python go on. If the
        // interpreter is ending, the value is dropped with the closure.
        Python::try_attach(move |py| py.detach(move || drop(value)));
    }
}
