//! Snapshots: far values in serde's formats, and back. Feature `serde`.
//!
//! Writing a snapshot brings the values near piece by piece, and holds only one piece at a time,
//! however they are nested. Reading one makes far values, so it needs a heap: the one of
//! [`Heap::restore`]. If far memory cannot give or take a value, that is an error of the format;
//! nothing is left out.

use crate::{FarArc, FarBox, FarError, FarWeak, Heap};
use core::cell::Cell;
use core::ptr::null;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

thread_local! {
    /// Heap to which this thread restores; null outside of [`Heap::restore`].
    static TARGET: Cell<*const Heap> = const { Cell::new(null()) };
}

/// Guard that makes the previous target the target again.
struct RestoreTargetGuard(*const Heap);

impl Drop for RestoreTargetGuard {
    fn drop(&mut self) {
        TARGET.set(self.0);
    }
}

impl Heap {
    /// Runs `action`; far values that this thread deserializes in it are made in this heap.
    /// Elsewhere they cannot be deserialized. (Feature `serde`.)
    ///
    /// ```
    /// use farfield::{FarBox, FarVec, Heap};
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Serialize, Deserialize)]
    /// struct Track {
    ///     name: String,
    ///     samples: FarVec<i16>,
    ///     next: Option<FarBox<Track>>,
    /// }
    ///
    /// let heap = Heap::builder().near(4 << 20).build()?;
    /// let mut samples = FarVec::new();
    /// samples.extend(&heap.enter(), (0..100_000).map(|n| (n % 1000) as i16))?;
    /// let track = Track { name: "Far".into(), samples, next: None };
    /// let snapshot = serde_json::to_vec(&track)?;
    ///
    /// let other = Heap::builder().near(4 << 20).build()?;
    /// let track: Track = other.restore(|| serde_json::from_slice(&snapshot))?;
    /// assert_eq!(track.samples.read(99_999, |sample| *sample)?, Some(999));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn restore<R>(&self, action: impl FnOnce() -> R) -> R {
        let _before = RestoreTargetGuard(TARGET.replace(self));
        action()
    }
}

/// Runs `action` with the heap to restore to. Fails outside of [`Heap::restore`].
pub(crate) fn with_target<R, E: de::Error>(action: impl FnOnce(&Heap) -> Result<R, E>) -> Result<R, E> {
    let heap = TARGET.get();
    if heap.is_null() {
        return Err(E::custom("far values are restored into a heap: deserialize them in Heap::restore"));
    }
    // SAFETY: `restore` borrows it until it has taken it out again.
    action(unsafe { &*heap })
}

/// Converts the error of a far value that could not be read to an error of the format.
pub(crate) fn not_written<E: ser::Error>(error: FarError) -> E {
    E::custom(format_args!("a far value could not be had: {error}"))
}

/// Converts the error of a far value that could not be made to an error of the format.
pub(crate) fn not_restored<E: de::Error>(error: impl Into<FarError>) -> E {
    E::custom(format_args!("a far value could not be made: {}", error.into()))
}

/// A box is written as its value.
impl<T: Send + Serialize + 'static> Serialize for FarBox<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        T::serialize(&*self.pin().map_err(not_written)?, serializer)
    }
}

impl<'de, T: Send + Deserialize<'de> + 'static> Deserialize<'de> for FarBox<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarBox<T>, D::Error> {
        let value = T::deserialize(deserializer)?;
        with_target(|heap| heap.alloc(value).map_err(not_restored))
    }
}

/// An `Arc` is written as its value, once for each owner. Each owner is restored with a value of
/// its own, as serde does with `Arc`.
impl<T: Send + Sync + Serialize + 'static> Serialize for FarArc<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        T::serialize(&*self.pin().map_err(not_written)?, serializer)
    }
}

impl<'de, T: Send + Sync + Deserialize<'de> + 'static> Deserialize<'de> for FarArc<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarArc<T>, D::Error> {
        FarBox::deserialize(deserializer).map(FarArc::from)
    }
}

/// A weak pointer owns no value, so it is written as `None`: a snapshot of its value would be another value,
/// and that of a child that points to its parent would never end. It is restored as one that leads nowhere
/// ([`FarWeak::new`]), as serde restores `std::sync::Weak`; whoever needs it sets it again.
impl<T: Send + Sync + 'static> Serialize for FarWeak<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_none()
    }
}

impl<'de, T: Send + Sync + 'static> Deserialize<'de> for FarWeak<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FarWeak<T>, D::Error> {
        Option::<()>::deserialize(deserializer).map(|_| FarWeak::new())
    }
}
