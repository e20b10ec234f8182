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
    /// None.
    pub const fn new() -> FarString {
        FarString { bytes: FarBytes::new() }
    }

    /// A copy of this.
    pub fn copy_of(scope: &Scope<'_>, text: &str) -> Result<FarString, FarError> {
        Ok(FarString { bytes: FarBytes::copy_of(scope, text.as_bytes())? })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Is there none?
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The text.
    pub fn get<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: only whole texts are put in, between characters, and whole characters are taken out.
        self.bytes.get(scope).map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// The same, for a task: while it is on its way, others run.
    pub async fn fetch<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        scope.retry(|| self.get(scope)).await
    }

    /// As [`FarString::get`], for text that will not be used again soon: if it has to be brought near, it leaves first.
    pub fn get_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: as in `get`.
        self.bytes.get_once(scope).map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// The same, for a task.
    pub async fn fetch_once<'a>(&'a self, scope: &'a Scope<'_>) -> Result<&'a str, FarError> {
        // SAFETY: as in `get`.
        self.bytes.fetch_once(scope).await.map(|bytes| unsafe { core::str::from_utf8_unchecked(bytes) })
    }

    /// Begins to bring the text near, and does not wait: see [`Heap::prefetch`](crate::Heap::prefetch).
    pub fn prefetch(&self) {
        self.bytes.prefetch();
    }

    /// The text will not be needed soon: it leaves before others.
    pub fn cold(&self) {
        self.bytes.cold();
    }

    /// Looks at the text. The scope keeps nothing for it afterwards.
    fn read<R>(&self, scope: &Scope<'_>, look: impl FnOnce(&str) -> R) -> Result<R, FarError> {
        // SAFETY: as in `get`.
        self.bytes.read(scope, |bytes| look(unsafe { core::str::from_utf8_unchecked(bytes) }))
    }

    /// More text, at the end.
    pub fn push_str(&mut self, scope: &Scope<'_>, text: &str) -> Result<(), FarError> {
        self.bytes.extend_from_slice(scope, text.as_bytes())
    }

    /// One character more, at the end.
    pub fn push(&mut self, scope: &Scope<'_>, character: char) -> Result<(), FarError> {
        self.push_str(scope, character.encode_utf8(&mut [0; 4]))
    }

    /// Takes the last character off.
    pub fn pop(&mut self, scope: &Scope<'_>) -> Result<Option<char>, FarError> {
        let last = self.read(scope, |text| text.chars().next_back())?;
        self.bytes.truncate(self.len() - last.map_or(0, char::len_utf8));
        Ok(last)
    }

    /// Puts text in before the character at this byte; what is behind it moves.
    ///
    /// # Panics
    /// If no character begins or ends there.
    pub fn insert_str(&mut self, scope: &Scope<'_>, index: usize, text: &str) -> Result<(), FarError> {
        let is_between = self.read(scope, |text| text.is_char_boundary(index))?;
        assert!(is_between, "{index} is not between characters");
        self.bytes.insert_slice(scope, index, text.as_bytes())
    }

    /// Puts a character in before the one at this byte; what is behind it moves.
    ///
    /// # Panics
    /// If no character begins or ends there.
    pub fn insert(&mut self, scope: &Scope<'_>, index: usize, character: char) -> Result<(), FarError> {
        self.insert_str(scope, index, character.encode_utf8(&mut [0; 4]))
    }

    /// Takes the character at this byte out; what is behind it moves.
    ///
    /// # Panics
    /// If no character begins there.
    pub fn remove(&mut self, scope: &Scope<'_>, index: usize) -> Result<char, FarError> {
        let character = self.read(scope, |text| text[index..].chars().next())?;
        let character = character.unwrap_or_else(|| panic!("cannot remove a character from the end of a text"));
        self.bytes.cut(scope, index..index + character.len_utf8())?;
        Ok(character)
    }

    /// Only the first `len` bytes.
    ///
    /// # Panics
    /// If a character does not end there.
    pub fn truncate(&mut self, scope: &Scope<'_>, len: usize) -> Result<(), FarError> {
        if len < self.len() {
            let is_between = self.read(scope, |text| text.is_char_boundary(len))?;
            assert!(is_between, "{len} is inside a character");
            self.bytes.truncate(len);
        }
        Ok(())
    }

    /// None any more.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

impl core::fmt::Debug for FarString {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarString(len {})", self.len())
    }
}
