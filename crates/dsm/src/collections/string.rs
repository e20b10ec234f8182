//! `DString`: a string in one shared object.
#![allow(unsafe_code, reason = "bytes are those of strings")]

use super::GrowingSlice;
use crate::{Far, FarGroup, Here, OwnedObject, Portable, ShareError};

/// String in shared memory, as `String` is for one process.
///
/// Its bytes lie side by side in one object, so that they can be borrowed as a `str`. It is a few words,
/// which can be sent to tasks and lie in shared objects.
pub struct DString {
    /// UTF-8, as only whole strings are appended.
    text: GrowingSlice<u8>,
}

// SAFETY: an owner and a number.
unsafe impl Portable for DString {
    fn visit_sent(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.visit_owned(visit);
    }
}
// SAFETY: it has no ties.
unsafe impl FarGroup for DString {
    fn visit_owned(&self, visit: &mut dyn FnMut(OwnedObject)) {
        self.text.visit_owned(visit);
    }
}
// SAFETY: as above.
unsafe impl Far for DString {}

impl core::fmt::Debug for DString {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "DString({} bytes)", self.len())
    }
}

impl Default for DString {
    fn default() -> DString {
        DString::new()
    }
}

impl DString {
    /// Returns an empty string, which takes no memory.
    pub const fn new() -> DString {
        DString { text: GrowingSlice::new() }
    }

    /// Stores a string at this node.
    pub fn from_str(here: &Here<'_>, text: &str) -> Result<DString, ShareError> {
        let mut string = DString::new();
        string.push_str(here, text)?;
        Ok(string)
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a string. All of it is at this node afterwards.
    pub fn push_str(&mut self, here: &Here<'_>, text: &str) -> Result<(), ShareError> {
        if text.is_empty() { Ok(()) } else { self.text.push_slice(here, text.as_bytes(), usize::MAX) }
    }

    /// Borrows the string, as [`DBox::get`](crate::DBox::get) does.
    pub fn as_str<'a>(&'a self, here: &'a Here<'_>) -> Result<&'a str, ShareError> {
        // SAFETY: whole strings, one behind the other.
        self.text.get(here).map(|text| unsafe { core::str::from_utf8_unchecked(text) })
    }

    /// Drops the text, where it is.
    pub fn clear(&mut self) {
        *self = DString::new();
    }
}
