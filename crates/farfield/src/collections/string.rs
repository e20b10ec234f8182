//! `FarString`: text in one piece.

use super::bytes::FarBytes;
use crate::error::FarError;
use crate::heap::Scope;

/// A `String` whose text is near or far, and always in one piece: see [`FarBytes`].
///
/// ```
/// use farfield::{FarString, Heap};
///
/// let heap = Heap::builder().near(16 << 20).build()?;
/// let scope = heap.enter();
/// let mut text = FarString::copy_of(&scope, "fär")?;
/// text.push_str(&scope, " away")?;
/// assert_eq!(text.get(&scope)?, "fär away");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct FarString {
    /// Valid UTF-8.
    pub(super) bytes: FarBytes,
}

impl FarString {
    /// Makes an empty one, which owns no far memory.
    pub const fn new() -> FarString {
        FarString { bytes: FarBytes::new() }
    }

    /// Copies this text into far memory.
    pub fn copy_of(scope: &Scope<'_>, text: &str) -> Result<FarString, FarError> {
        Ok(FarString { bytes: FarBytes::copy_of(scope, text.as_bytes())? })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Checks whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the text, and brings it near if it is far.
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: only whole texts are put in, between characters, and whole characters are taken out.
        self.bytes.get(scope).map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// Returns the text like [`FarString::get`], for a task: other tasks run while it is fetched.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        scope.retry(|| self.get(scope)).await
    }

    /// Returns the text like [`FarString::get`], with the hint that it will not be used again soon.
    /// If it has to be brought near, it is evicted first.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: as in `get`.
        self.bytes.get_once(scope).map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// Returns the text like [`FarString::get_once`], for a task: other tasks run while it is
    /// fetched.
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: as in `get`.
        self.bytes.fetch_once(scope).await.map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// Begins to bring the text near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        self.bytes.prefetch();
    }

    /// Marks the text as not needed soon: it is evicted before others.
    pub fn cold(&self) {
        self.bytes.cold();
    }

    /// Calls `look` with the text. The scope keeps nothing for it afterwards.
    fn read<R>(&self, scope: &Scope<'_>, look: impl FnOnce(&str) -> R) -> Result<R, FarError> {
        // SAFETY: as in `get`.
        self.bytes.read(scope, |bytes| look(unsafe { core::str::from_utf8_unchecked(bytes) }))
    }

    /// Appends text at the end.
    pub fn push_str(&mut self, scope: &Scope<'_>, text: &str) -> Result<(), FarError> {
        self.bytes.extend_from_slice(scope, text.as_bytes())
    }

    /// Appends a character at the end.
    pub fn push(&mut self, scope: &Scope<'_>, character: char) -> Result<(), FarError> {
        self.push_str(scope, character.encode_utf8(&mut [0; 4]))
    }

    /// Takes the last character off, if there is one.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<char>, FarError> {
        let last = self.read(scope, |text| text.chars().next_back())?;
        self.bytes.truncate(self.len() - last.map_or(0, char::len_utf8));
        Ok(last)
    }

    /// Inserts text at this byte; the characters from there on move.
    ///
    /// # Panics
    /// If the byte is beyond the end, or inside a character.
    pub fn insert_str(&mut self, scope: &Scope<'_>, index: usize, text: &str) -> Result<(), FarError> {
        let is_between = self.read(scope, |text| text.is_char_boundary(index))?;
        assert!(is_between, "{index} is not between characters");
        self.bytes.insert_slice(scope, index, text.as_bytes())
    }

    /// Inserts a character at this byte; the characters from there on move.
    ///
    /// # Panics
    /// If the byte is beyond the end, or inside a character.
    pub fn insert(&mut self, scope: &Scope<'_>, index: usize, character: char) -> Result<(), FarError> {
        self.insert_str(scope, index, character.encode_utf8(&mut [0; 4]))
    }

    /// Removes the character that begins at this byte; those behind it move.
    ///
    /// # Panics
    /// If no character begins there.
    pub fn remove(&mut self, scope: &Scope<'_>, index: usize) -> Result<char, FarError> {
        let character = self.read(scope, |text| text[index..].chars().next())?;
        let character = character.unwrap_or_else(|| panic!("cannot remove a character from the end of a text"));
        self.bytes.cut(scope, index..index + character.len_utf8())?;
        Ok(character)
    }

    /// Shortens to the first `len` bytes, if there are more.
    ///
    /// # Panics
    /// If `len` is inside a character.
    pub fn truncate(&mut self, scope: &Scope<'_>, len: usize) -> Result<(), FarError> {
        if len < self.len() {
            let is_between = self.read(scope, |text| text.is_char_boundary(len))?;
            assert!(is_between, "{len} is inside a character");
            self.bytes.truncate(len);
        }
        Ok(())
    }

    /// Removes all text, and gives its far memory back.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

impl core::fmt::Debug for FarString {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarString(len {})", self.len())
    }
}
