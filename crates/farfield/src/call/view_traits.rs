//! Views: copies of values whose far pointers can be followed at both sides.
//!
//! A value of a far heap has pointers that own and have destructors, so no second one may come
//! into being at a memory server. A view has the same fields: plain ones as they are, and for each
//! owner a [`FarRef`], which owns nothing. It is made of the value where the heap is, and of the
//! value's bytes anywhere else, so a server never has a value whose bytes it must believe.

use super::part::NearTables;
use crate::ptr::{FarArc, FarBox, Follow, Pointer};
use core::any::TypeId;
use core::fmt::Debug;
use core::marker::PhantomData;
use core::num::NonZeroU32;

/// A type whose values a [`FarFunction`](crate::FarFunction) can read, at the client and at a memory
/// server: plain values and far pointers. `#[derive(FarView)]` implements it for structs, and for
/// enums with a primitive representation.
///
/// Fields can be integers, floating-point numbers, `bool`, `char`, and `Option`s of these; [`FarBox`]
/// and [`FarArc`] of a type that is `FarView` too, or an `Option` of those pointers;
/// [`FarBytes`](crate::FarBytes), [`FarString`](crate::FarString), and lists, queues, stacks, vectors,
/// arrays, ordered maps and sets, and flat maps of such types; other types with this derive; arrays of all these,
/// and tuples of up to four. For a type `Node`, the derive makes a
/// type `NodeView` with the same fields or variants, in which each pointer is a [`FarRef`]. A function
/// gets that one.
///
/// ```
/// use farfield::{FarBox, FarView};
///
/// #[derive(FarView)]
/// struct Node {
///     key: u64,
///     weights: [f32; 4],
///     next: Option<FarBox<Node>>,
/// }
///
/// #[derive(FarView)]
/// #[repr(u8)]
/// enum Event {
///     Opened { at: u64 },
///     Moved(FarBox<Node>, Option<f64>),
///     Closed = 9,
/// }
/// ```
///
/// The tag of an enum is compared with those of its variants where bytes are read. Where Rust does
/// not say where the tag lies, a server cannot do that:
///
/// ```compile_fail
/// #[derive(farfield::FarView)]
/// enum Event {
///     Opened { at: u64 }, // error: give it a tag with #[repr(u8)]
///     Closed,
/// }
/// ```
///
/// What owns memory outside of the heap, or borrows, means nothing at a server:
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// struct Named {
///     name: String, // error: the trait bound `String: FarView` is not satisfied
/// }
/// ```
///
/// ```compile_fail
/// #[derive(farfield::FarView)]
/// struct Borrowing<'a> {
///     name: &'a u64, // error: a far value outlives every borrow
/// }
/// ```
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// struct Named {
///     name: &'static str, // error: the trait bound `&'static str: FarView` is not satisfied
/// }
/// ```
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// #[repr(u8)]
/// enum Name {
///     None,
///     Some(Option<String>), // error: the trait bound `Option<String>: FarView` is not satisfied
/// }
/// ```
///
/// Addresses of code and of data are those of one process:
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// struct Callback {
///     call: fn(u64) -> u64, // error: the trait bound `fn(u64) -> u64: FarView` is not satisfied
/// }
/// ```
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// struct Raw(*const u64); // error: the trait bound `*const u64: FarView` is not satisfied
/// ```
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView)]
/// struct Counter {
///     count: std::cell::Cell<u64>, // error: the trait bound `Cell<u64>: FarView` is not satisfied
/// }
/// ```
///
/// A type with a destructor of its own holds something that a copy of its fields would not:
///
/// ```compile_fail,E0119
/// #[derive(farfield::FarView)]
/// struct File {
///     descriptor: i32,
/// }
///
/// impl Drop for File {
///     // error: conflicting implementations of trait `HasNoDestructor`
///     fn drop(&mut self) {}
/// }
/// ```
///
/// ```compile_fail,E0119
/// #[derive(farfield::FarView)]
/// #[repr(u8)]
/// enum Handle {
///     Open(i32),
/// }
///
/// impl Drop for Handle {
///     fn drop(&mut self) {} // error: conflicting implementations of trait `HasNoDestructor`
/// }
/// ```
///
/// # Safety
/// As long as a value is shared, none of its bytes changes except those that say where a far
/// pointer's value was last seen. `decode` reads exactly the bytes of a value.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be read at a memory server",
    note = "fields of a FarView are numbers, `bool`, `char`, `FarBox`, `FarArc`, options of all these, arrays, tuples, \
            far collections, and types with `#[derive(FarView)]`"
)]
pub unsafe trait FarView: Sized + 'static {
    /// Copy of a value, in which far pointers are [`FarRef`]s.
    type View<'f>: Copy + Debug;

    #[doc(hidden)]
    const NAME: &'static str;
    /// Digest of the names, types and places of all fields.
    #[doc(hidden)]
    const LAYOUT: u64;

    #[doc(hidden)]
    fn view<'f>(&self, loan: Loan<'f>) -> Self::View<'f>;

    /// Makes the view of a value with these bytes; `None` if no value has them.
    #[doc(hidden)]
    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>>;

    /// Writes bytes of which [`FarView::decode`] makes the view elsewhere, over zeros. What is near,
    /// such as the table of a list, goes to `tables`.
    #[doc(hidden)]
    fn write_image(&self, image: &mut [u8], tables: &mut NearTables);

    /// Makes the views of an array with these bytes.
    #[doc(hidden)]
    fn decode_array<'f, const N: usize>(bytes: &[u8], source: ViewSource) -> Option<[Self::View<'f>; N]> {
        let element = |index: usize| bytes.get(index * size_of::<Self>()..(index + 1) * size_of::<Self>());
        let decoded: [_; N] = core::array::from_fn(|index| Self::decode(element(index)?, source));
        // An array is made only if all its elements are values.
        if decoded.iter().any(Option::is_none) {
            return None;
        }
        Some(decoded.map(|element| element.unwrap_or_else(|| unreachable!("all of them were looked at"))))
    }

    /// Appends the views of the values in these bytes, which lie side by side and are not empty. `None` if
    /// one is no value.
    #[doc(hidden)]
    fn decode_many<'f>(bytes: &[u8], source: ViewSource, views: &mut Vec<Self::View<'f>>) -> Option<()> {
        for value in bytes.chunks_exact(size_of::<Self>()) {
            views.push(Self::decode(value, source)?);
        }
        Some(())
    }

    /// Adds the types to which the type's pointers lead.
    #[doc(hidden)]
    fn add_pointees(types: &mut ViewTypes);
}

/// Where the bytes of a view are from.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ViewSource {
    /// The region of the heap: what a pointer leads to.
    Region,
    /// The image of a root, which came with the call.
    Root,
}

/// Permission to make views of values that stay as they are for `'f`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Loan<'f>(PhantomData<&'f ()>);

impl Loan<'_> {
    /// # Safety
    /// The value that is viewed stays alive and unchanged for this lifetime.
    pub(crate) unsafe fn new<'f>() -> Loan<'f> {
        Loan(PhantomData)
    }
}

/// A far pointer that owns nothing, with which a [`FarFunction`](crate::FarFunction) follows an owner
/// ([`FarPlace::follow`](crate::FarPlace::follow)).
///
/// `FarRef::from(&owner)` makes one of a [`FarBox`] or a [`FarArc`], and borrows it. One of a near value,
/// such as a struct of collections, is a root for [`Heap::call`](crate::Heap::call) ([`FarRef::near`]).
pub struct FarRef<'f, T: FarView> {
    /// The halves of the slot word.
    pub(super) place: u32,
    pub(super) number: NonZeroU32,
    /// Whether it was made of an owner in this process, which is borrowed for `'f`.
    pub(super) is_here: bool,
    /// Whether it leads to a root that is near at the client, and has no number.
    pub(super) is_root: bool,
    /// That root, in its process.
    pub(super) near: Option<&'f T>,
}

impl<T: FarView> Clone for FarRef<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: FarView> Copy for FarRef<'_, T> {}

impl<T: FarView> Debug for FarRef<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarRef({})", self.number)
    }
}

impl<'f, T: FarView> FarRef<'f, T> {
    /// Makes one of a value that is not in far memory, for [`Heap::call`](crate::Heap::call): a
    /// structure whose fields are far, such as collections. It travels with the call.
    pub fn near(value: &'f T) -> FarRef<'f, T> {
        FarRef { is_here: true, near: Some(value), ..FarRef::root() }
    }

    /// Makes one of the root that came with the call.
    pub(super) fn root() -> FarRef<'f, T> {
        FarRef { place: 0, number: NonZeroU32::MAX, is_here: false, is_root: true, near: None }
    }

    pub(super) fn of(pointer: &Pointer, _: Loan<'f>) -> FarRef<'f, T> {
        let (place, number) = pointer.halves();
        FarRef { place, number, is_here: true, is_root: false, near: None }
    }

    /// Makes a pointer of a slot word's halves, which may be those of no value.
    pub(super) fn elsewhere(place: u32, number: u32) -> Option<FarRef<'f, T>> {
        let number = NonZeroU32::new(number)?;
        Some(FarRef { place, number, is_here: false, is_root: false, near: None })
    }

    fn decode(bytes: &[u8]) -> Option<FarRef<'f, T>> {
        let (place, number) = bytes.split_at_checked(size_of::<u32>())?;
        FarRef::elsewhere(u32::from_ne_bytes(*place.first_chunk()?), u32::from_ne_bytes(number.try_into().ok()?))
    }
}

impl<'f, T: FarView + Send> From<&'f FarBox<T>> for FarRef<'f, T> {
    fn from(owner: &'f FarBox<T>) -> FarRef<'f, T> {
        // SAFETY: the owner is borrowed, so its value is neither dropped nor changed; nor is what
        // the value owns (`FarView`).
        FarRef::of(owner.pointer(), unsafe { Loan::new() })
    }
}

impl<'f, T: FarView + Send + Sync> From<&'f FarArc<T>> for FarRef<'f, T> {
    fn from(owner: &'f FarArc<T>) -> FarRef<'f, T> {
        // SAFETY: as above. Other owners cannot change the value as long as there is this one.
        FarRef::of(owner.pointer(), unsafe { Loan::new() })
    }
}

/// The types that a function may meet, in the order in which their pointers lead to them.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct ViewTypes {
    ids: Vec<TypeId>,
    names: Vec<&'static str>,
    layouts: Vec<u64>,
}

impl ViewTypes {
    /// Returns this type and all to which its pointers lead.
    pub(super) fn of<T: FarView>() -> ViewTypes {
        let mut types = ViewTypes::default();
        types.add::<T>();
        types
    }

    /// Adds a type, and those to which its pointers lead.
    pub fn add<T: FarView>(&mut self) {
        let id = TypeId::of::<T>();
        if !self.ids.contains(&id) {
            self.ids.push(id);
            self.names.push(T::NAME);
            self.layouts.push(T::LAYOUT);
            T::add_pointees(self);
        }
    }

    pub(super) fn name(&self, index: usize) -> &'static str {
        self.names.get(index).copied().unwrap_or("(unknown)")
    }

    pub(super) fn layouts(&self) -> &[u64] {
        &self.layouts
    }

    /// Returns the index of the first type that the other side has with another layout.
    pub(super) fn first_difference(&self, theirs: &[u64]) -> Option<usize> {
        let ours = self.layouts();
        let common = ours.iter().zip(theirs).position(|(ours, theirs)| ours != theirs);
        common.or_else(|| (ours.len() != theirs.len()).then(|| ours.len().min(theirs.len())))
    }
}

/// Returns the digest of a layout: FNV-1a over the bytes of all that two builds must agree on.
#[doc(hidden)]
pub const fn layout(name: &str, size: usize, align: usize, fields: &[(&str, usize, u64)]) -> u64 {
    let mut hash = if cfg!(target_endian = "little") { 0xcbf2_9ce4_8422_2325 } else { 0x2523_2284_e49c_f2cb };
    hash = hash_text(hash, name);
    hash = hash_bytes(hash, &(size as u64).to_le_bytes());
    hash = hash_bytes(hash, &(align as u64).to_le_bytes());
    let mut index = 0;
    while index < fields.len() {
        let (name, offset, layout) = fields[index];
        hash = hash_text(hash, name);
        hash = hash_bytes(hash, &(offset as u64).to_le_bytes());
        hash = hash_bytes(hash, &layout.to_le_bytes());
        index += 1;
    }
    hash
}

const fn hash_text(hash: u64, text: &str) -> u64 {
    hash_bytes(hash_bytes(hash, text.as_bytes()), &(text.len() as u64).to_le_bytes())
}

const fn hash_bytes(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut index = 0;
    while index < bytes.len() {
        hash = (hash ^ bytes[index] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        index += 1;
    }
    hash
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: a number has no interior mutability.
        unsafe impl FarView for $number {
            type View<'f> = $number;
            const NAME: &'static str = stringify!($number);
            const LAYOUT: u64 = layout(Self::NAME, size_of::<$number>(), align_of::<$number>(), &[]);

            #[inline]
            fn view<'f>(&self, _: Loan<'f>) -> $number {
                *self
            }

            #[inline]
            fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<Self::View<'f>> {
                Some(<$number>::from_ne_bytes(bytes.try_into().ok()?))
            }

            fn write_image(&self, image: &mut [u8], _: &mut NearTables) {
                image.copy_from_slice(&self.to_ne_bytes());
            }

            // In one loop, which the compiler makes a copy of.
            #[inline]
            fn decode_array<'f, const N: usize>(bytes: &[u8], _: ViewSource) -> Option<[Self::View<'f>; N]> {
                let (numbers, rest) = bytes.as_chunks();
                let mut array = [<$number>::default(); N];
                array.iter_mut().zip(numbers).for_each(|(into, number)| *into = <$number>::from_ne_bytes(*number));
                (numbers.len() == N && rest.is_empty()).then_some(array)
            }

            #[inline]
            fn decode_many<'f>(bytes: &[u8], _: ViewSource, views: &mut Vec<Self::View<'f>>) -> Option<()> {
                views.extend(bytes.as_chunks().0.iter().map(|number| <$number>::from_ne_bytes(*number)));
                Some(())
            }

            fn add_pointees(_: &mut ViewTypes) {}
        }
    )*};
}

numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

// SAFETY: as above.
unsafe impl FarView for bool {
    type View<'f> = bool;
    const NAME: &'static str = "bool";
    const LAYOUT: u64 = layout("bool", 1, 1, &[]);

    fn view<'f>(&self, _: Loan<'f>) -> bool {
        *self
    }

    fn write_image(&self, image: &mut [u8], _: &mut NearTables) {
        image[0] = u8::from(*self);
    }

    fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<Self::View<'f>> {
        match bytes {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

// SAFETY: as above.
unsafe impl FarView for char {
    type View<'f> = char;
    const NAME: &'static str = "char";
    const LAYOUT: u64 = layout("char", size_of::<char>(), align_of::<char>(), &[]);

    fn view<'f>(&self, _: Loan<'f>) -> char {
        *self
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
        char::from_u32(u32::decode(bytes, source)?)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        u32::from(*self).write_image(image, tables);
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

// SAFETY: the elements are `FarView`.
unsafe impl<T: FarView, const N: usize> FarView for [T; N] {
    type View<'f> = [T::View<'f>; N];
    const NAME: &'static str = "array";
    const LAYOUT: u64 = layout("array", size_of::<Self>(), align_of::<Self>(), &[(T::NAME, N, T::LAYOUT)]);

    fn view<'f>(&self, loan: Loan<'f>) -> [T::View<'f>; N] {
        core::array::from_fn(|index| self[index].view(loan))
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<[T::View<'f>; N]> {
        T::decode_array(bytes, source)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        for (index, element) in self.iter().enumerate() {
            element.write_image(&mut image[index * size_of::<T>()..(index + 1) * size_of::<T>()], tables);
        }
    }

    fn add_pointees(types: &mut ViewTypes) {
        T::add_pointees(types);
    }
}

macro_rules! owners {
    ($($owner:ident: $($bound:ident)*;)*) => {$(
        // SAFETY: only the guess of the slot changes while the owner is shared. A slot is its two
        // halves, of four bytes each.
        unsafe impl<T: FarView $(+ $bound)*> FarView for $owner<T> {
            type View<'f> = FarRef<'f, T>;
            const NAME: &'static str = "far pointer";
            const LAYOUT: u64 = layout("far pointer", size_of::<Self>(), align_of::<Self>(), &[(T::NAME, 0, 0)]);

            #[inline]
            fn view<'f>(&self, loan: Loan<'f>) -> FarRef<'f, T> {
                FarRef::of(self.pointer(), loan)
            }

            #[inline]
            fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<FarRef<'f, T>> {
                FarRef::decode(bytes)
            }

            fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
                let (place, number) = self.pointer().halves();
                tables.note(number.get());
                image[..4].copy_from_slice(&place.to_ne_bytes());
                image[4..8].copy_from_slice(&number.get().to_ne_bytes());
            }

            fn add_pointees(types: &mut ViewTypes) {
                types.add::<T>();
            }
        }

        // SAFETY: as above. No pointer is one to number 0.
        unsafe impl<T: FarView $(+ $bound)*> FarView for Option<$owner<T>> {
            type View<'f> = Option<FarRef<'f, T>>;
            const NAME: &'static str = "far pointer or none";
            const LAYOUT: u64 = layout(Self::NAME, size_of::<Self>(), align_of::<Self>(), &[(T::NAME, 0, 0)]);

            #[inline]
            fn view<'f>(&self, loan: Loan<'f>) -> Option<FarRef<'f, T>> {
                self.as_ref().map(|owner| owner.view(loan))
            }

            #[inline]
            fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<Option<FarRef<'f, T>>> {
                (bytes.len() == size_of::<Self>()).then(|| FarRef::decode(bytes))
            }

            fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
                if let Some(owner) = self {
                    owner.write_image(image, tables);
                }
            }

            fn add_pointees(types: &mut ViewTypes) {
                types.add::<T>();
            }
        }
    )*};
}

owners! {
    FarBox: Send;
    FarArc: Send Sync;
}
