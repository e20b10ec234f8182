//! The place where a function runs that changes values: a place that reads, under an [`Overlay`].
//!
//! What the function stores goes to the overlay, and what it reads comes from there. So the place
//! below only reads, wherever it is, and a function that does not end well has changed nothing.

use super::overlay::{ChangeList, ChangeStop, Overlay, OverlayLimits};
use super::part::{FarPart, ObjectRef, PartBytes};
use super::place::{FarPlace, sealed};
use super::view_mut::{FarMut, FarViewMut, OwnedTypes};
use super::view_traits::{FarRef, FarView};
use core::cell::{Cell, RefCell};
use core::future::{Future, pending};
use farfield_core::geometry::PAGE_BYTES;
use farfield_wic::Fault;

/// The place where a [`FarFunctionMut`](crate::FarFunctionMut) runs, as far as the function sees it.
///
/// What a function stores, it reads from then on. Everybody else sees it when the function has ended
/// well, and all of it then.
///
/// What was reached through a [`FarArc`](crate::FarArc) has other owners, and cannot be stored to:
///
/// ```compile_fail,E0308
/// use farfield::{FarArc, FarFunctionMut, FarMut, FarPlace, FarPlaceMut, FarView, FarViewMut, Fault};
///
/// #[derive(FarView, FarViewMut)]
/// struct Shared {
///     number: u64,
/// }
///
/// #[derive(FarView, FarViewMut)]
/// struct Root {
///     shared: FarArc<Shared>,
/// }
///
/// struct Set;
///
/// impl FarFunctionMut for Set {
///     const NAME: &'static str = "example.set";
///     const VERSION: u32 = 1;
///     type Root = Root;
///     type Argument = u64;
///     type Answer = ();
///
///     async fn run<P: FarPlaceMut>(far: &P, root: FarMut<'_, Root>, number: u64) -> Result<(), Fault> {
///         let root = far.follow_mut(root).await?;
///         far.change(root.shared, |shared| shared.number = number).await // error: expected `FarMut`, found `FarRef`
///     }
/// }
/// ```
pub trait FarPlaceMut: FarPlace {
    /// Returns a copy of the value to which the pointer leads, as the function has changed it.
    ///
    /// Takes a step, and one more for each whole 4 KiB of the value.
    fn follow_mut<'f, T: FarViewMut>(
        &'f self,
        pointer: FarMut<'f, T>,
    ) -> impl Future<Output = Result<T::ViewMut<'f>, Fault>> + 'f;

    /// Stores the plain fields of `value` in the value to which the pointer leads.
    ///
    /// Far pointers in `value` must be those of the value itself: a function does not make, move or
    /// free values, so it cannot give one to another owner. The call ends with
    /// [`OffloadError::OwnerChanged`](crate::OffloadError::OwnerChanged) otherwise, and with
    /// [`OffloadError::TooManyChanges`](crate::OffloadError::TooManyChanges) if there is no room for the
    /// change. Nothing has changed then.
    ///
    /// Takes two steps, and two more for each whole 4 KiB of the value.
    fn store<'f, T: FarViewMut>(
        &'f self,
        pointer: FarMut<'f, T>,
        value: T::ViewMut<'f>,
    ) -> impl Future<Output = Result<(), Fault>> + 'f;

    /// Lets `change` change a copy of the value to which the pointer leads, and stores it, as
    /// [`FarPlaceMut::store`] does. Returns what `change` does.
    ///
    /// Takes two steps, and two more for each whole 4 KiB of the value.
    fn change<'f, T: FarViewMut, R>(
        &'f self,
        pointer: FarMut<'f, T>,
        change: impl FnOnce(&mut T::ViewMut<'f>) -> R,
    ) -> impl Future<Output = Result<R, Fault>>;
}

/// A place whose function may change values, over one that reads.
pub(super) struct OverlayPlace<'p, P: FarPlace> {
    below: &'p P,
    types: OwnedTypes,
    overlay: RefCell<Overlay>,
    stop: Cell<Option<ChangeStop>>,
}

impl<'p, P: FarPlace> OverlayPlace<'p, P> {
    /// Makes the place of a function with this type of root.
    pub(super) fn new<Root: FarViewMut>(below: &'p P, limits: OverlayLimits) -> OverlayPlace<'p, P> {
        let (types, overlay) = (OwnedTypes::of::<Root>(), RefCell::new(Overlay::new(limits)));
        OverlayPlace { below, types, overlay, stop: Cell::new(None) }
    }

    pub(super) fn stopped(&self) -> Option<ChangeStop> {
        self.stop.get()
    }

    pub(super) fn into_list(self) -> ChangeList {
        self.overlay.into_inner().into_list()
    }

    /// Returns the value as the function sees it, of the value as it is.
    fn present<'f, T: FarViewMut>(&self, pointer: FarMut<'f, T>, value: T::ViewMut<'f>) -> T::ViewMut<'f> {
        let (overlay, slot) = (self.overlay.borrow(), slot(pointer));
        if !overlay.has(slot) {
            return value;
        }
        let mut bytes = encoded::<T>(&value);
        overlay.patch(slot, &mut bytes);
        T::patched(&value, &bytes).unwrap_or_else(|| unreachable!("a view of the type was stored there"))
    }

    /// Notes that the function stores `new` in a value that is `old`.
    async fn put<'f, T: FarViewMut>(&self, pointer: FarMut<'f, T>, old: &T::ViewMut<'f>, new: &T::ViewMut<'f>) {
        for _ in 0..=size_of::<T>() / PAGE_BYTES {
            self.below.yield_now().await;
        }
        let type_index = self.types.index_of::<T>();
        let type_index = type_index.expect("a function changes only values that its root owns");
        let fields = self.types.get(type_index).map_or(&[][..], |owned| &owned.fields);
        let (old, new) = (encoded::<T>(old), encoded::<T>(new));
        let stored = self.overlay.borrow_mut().store(slot(pointer), (type_index, fields), &old, &new);
        if let Err(stop) = stored {
            self.stop.set(Some(stop));
            pending().await
        }
    }
}

/// Returns the halves of the slot word of a pointer.
fn slot<T: FarViewMut>(pointer: FarMut<'_, T>) -> (u32, u32) {
    (pointer.0.place, pointer.0.number.get())
}

/// Returns the bytes of a value with this view, in which padding is zero.
fn encoded<T: FarViewMut>(view: &T::ViewMut<'_>) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<T>()];
    T::encode(view, &mut bytes);
    bytes
}

impl<P: FarPlace> sealed::Sealed for OverlayPlace<'_, P> {}

impl<P: FarPlace> FarPlace for OverlayPlace<'_, P> {
    fn follow<'f, T: FarView>(
        &'f self,
        pointer: FarRef<'f, T>,
    ) -> impl Future<Output = Result<T::View<'f>, Fault>> + 'f {
        // A value to which a `FarRef` leads is shared, so nothing is stored over it.
        self.below.follow(pointer)
    }

    fn yield_now(&self) -> impl Future<Output = ()> {
        self.below.yield_now()
    }

    // Nothing is stored over collections either.
    fn look<'f, R>(
        &'f self,
        part: FarPart<'f>,
        read: impl FnOnce(&PartBytes<'_, 'f>) -> Option<R>,
    ) -> impl Future<Output = Result<R, Fault>> {
        self.below.look(part, read)
    }

    fn announce(&self, object: ObjectRef<'_>) {
        self.below.announce(object);
    }

    fn tables(&self) -> &[u32] {
        self.below.tables()
    }

    fn halt_without_table<R>(&self) -> impl Future<Output = R> {
        self.below.halt_without_table()
    }
}

impl<P: FarPlace> FarPlaceMut for OverlayPlace<'_, P> {
    async fn follow_mut<'f, T: FarViewMut>(&'f self, pointer: FarMut<'f, T>) -> Result<T::ViewMut<'f>, Fault> {
        let value = self.below.follow(pointer.0).await?;
        Ok(self.present(pointer, value))
    }

    async fn store<'f, T: FarViewMut>(&'f self, pointer: FarMut<'f, T>, value: T::ViewMut<'f>) -> Result<(), Fault> {
        let old = self.below.follow(pointer.0).await?;
        self.put(pointer, &old, &value).await;
        Ok(())
    }

    async fn change<'f, T: FarViewMut, R>(
        &'f self,
        pointer: FarMut<'f, T>,
        change: impl FnOnce(&mut T::ViewMut<'f>) -> R,
    ) -> Result<R, Fault> {
        let old = self.below.follow(pointer.0).await?;
        let mut new = self.present(pointer, old);
        let result = change(&mut new);
        self.put(pointer, &old, &new).await;
        Ok(result)
    }
}
