//! ObjectLayout of what an owner owns: a value, or a slice of values.

use crate::ptr::MemberType;
use crate::{Far, FarGroup};
use core::mem::needs_drop;
use farfield_core::dsm::OwnerWord;

/// Type of the objects that a [`DBox`](crate::DBox) can own: a [`FarGroup`] type, or a slice of a
/// [`Far`] one.
#[diagnostic::on_unimplemented(
    message = "values of `{Self}` cannot lie in shared memory",
    note = "types that are `FarGroup` can, and slices of those that are `Far`"
)]
pub trait Object: sealed::ObjectLayout {}

impl<T: FarGroup> Object for T {}
impl<T: Far> Object for [T] {}

/// An object that a value owns: where it is, and what it owns itself.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct OwnedObject {
    pub(crate) word: OwnerWord,
    pub(crate) bytes: usize,
    /// Number of values that lie side by side in it.
    pub(crate) count: usize,
    pub(crate) contents: ObjectContents,
}

/// Kind of an object's contents. Loans have one, and a task has many of these, so it is small.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ObjectContents {
    /// Values that do not change as long as the owner is borrowed; the function passes what so many of them
    /// own.
    Values(unsafe fn(*const u8, usize, &mut dyn FnMut(OwnedObject))),
    /// An atomic number.
    Number,
    /// A value under a lock. The home of the lock knows what it owns.
    Locked,
    /// A channel. Its home knows its values.
    Channel,
    /// A value to which others are tied, of this type.
    Group(fn() -> MemberType),
}

const _: () = assert!(size_of::<ObjectContents>() <= 16);

impl OwnedObject {
    pub(crate) fn of<T: Object + ?Sized>(word: OwnerWord, extent: T::Extent) -> OwnedObject {
        let (count, contents) = T::contents(extent);
        OwnedObject { word, bytes: T::bytes(extent), count, contents }
    }

    pub(crate) fn number(word: OwnerWord) -> OwnedObject {
        OwnedObject { word, bytes: size_of::<u64>(), count: 1, contents: ObjectContents::Number }
    }

    pub(crate) fn channel(word: OwnerWord) -> OwnedObject {
        OwnedObject { word, bytes: 0, count: 1, contents: ObjectContents::Channel }
    }

    pub(crate) fn locked(word: OwnerWord) -> OwnedObject {
        OwnedObject { word, bytes: 0, count: 1, contents: ObjectContents::Locked }
    }
}

/// Returns the objects that a value owns.
pub(crate) fn owned_by(value: &impl FarGroup) -> Vec<OwnedObject> {
    let mut owned = Vec::new();
    value.visit_owned(&mut |object| owned.push(object));
    owned
}

/// Passes what so many values own.
///
/// # Safety
/// They lie there, side by side and aligned, and nobody writes to them.
#[allow(unsafe_code, reason = "objects are found by their words")]
unsafe fn visit_values<T: FarGroup>(values: *const u8, count: usize, visit: &mut dyn FnMut(OwnedObject)) {
    if needs_drop::<T>() {
        // SAFETY: the caller's promise.
        unsafe { core::slice::from_raw_parts(values.cast::<T>(), count) }
            .iter()
            .for_each(|value| value.visit_owned(visit));
    }
}

#[allow(unnameable_types, private_interfaces, reason = "nobody else implements or uses what is sealed")]
pub(crate) mod sealed {
    use super::{ObjectContents, visit_values};
    use crate::node::GroupType;
    use crate::ptr::MemberType;
    use crate::task::code::ShippedCode;
    use crate::{Far, FarGroup};
    use core::mem::{align_of, needs_drop, size_of};
    use core::ptr::slice_from_raw_parts_mut;
    use farfield_core::dsm::OwnerWord;

    /// Layout of an object in its block.
    pub trait ObjectLayout: Send + Sync + 'static {
        /// Part of an owner that its word does not say: nothing of a value, the length of a slice.
        type Extent: Copy + Send + Sync + 'static;
        /// Refuses, when it is compiled, what blocks do not align.
        const ALIGNED: ();
        /// Whether an object may own others.
        const OWNS_OTHERS: bool;
        /// Whether others may be tied to an object.
        const IS_GROUP: bool = false;

        /// Returns the size of an object, in bytes.
        fn bytes(extent: Self::Extent) -> usize;

        /// Returns the object at this address.
        fn at(address: *mut u8, extent: Self::Extent) -> *mut Self;

        /// Returns what drops an object; `None` if that is nothing.
        fn destructor(extent: Self::Extent) -> Option<ShippedCode>;

        /// Returns how many values lie side by side in an object, and what they are.
        fn contents(extent: Self::Extent) -> (usize, ObjectContents);

        /// Returns the type of the group that an object begins; `None` if nothing is tied to it.
        fn group() -> Option<GroupType> {
            None
        }
    }

    impl<T: FarGroup> ObjectLayout for T {
        type Extent = ();
        const ALIGNED: () =
            assert!(align_of::<T>() <= OwnerWord::ALIGN as usize, "shared objects are aligned to 16 bytes at most");
        const OWNS_OTHERS: bool = needs_drop::<T>();
        const IS_GROUP: bool = T::HAS_TIES;

        #[inline]
        fn bytes((): ()) -> usize {
            size_of::<T>()
        }

        #[inline]
        fn at(address: *mut u8, (): ()) -> *mut T {
            address.cast()
        }

        fn destructor((): ()) -> Option<ShippedCode> {
            ShippedCode::of_destructor::<T>(1)
        }

        fn contents((): ()) -> (usize, ObjectContents) {
            let group = || ObjectContents::Group(MemberType::of::<T>);
            (1, if T::HAS_TIES { group() } else { ObjectContents::Values(visit_values::<T>) })
        }

        fn group() -> Option<GroupType> {
            T::HAS_TIES.then(|| GroupType {
                root: MemberType::of::<T>(),
                code: ShippedCode::of_object::<T>,
                release: ShippedCode::of_release::<T>,
            })
        }
    }

    impl<T: Far> ObjectLayout for [T] {
        type Extent = usize;
        const ALIGNED: () = <T as ObjectLayout>::ALIGNED;
        const OWNS_OTHERS: bool = needs_drop::<T>();

        #[inline]
        fn bytes(len: usize) -> usize {
            len * size_of::<T>()
        }

        #[inline]
        fn at(address: *mut u8, len: usize) -> *mut [T] {
            slice_from_raw_parts_mut(address.cast(), len)
        }

        fn destructor(len: usize) -> Option<ShippedCode> {
            ShippedCode::of_destructor::<T>(len)
        }

        fn contents(len: usize) -> (usize, ObjectContents) {
            (len, ObjectContents::Values(visit_values::<T>))
        }
    }
}
