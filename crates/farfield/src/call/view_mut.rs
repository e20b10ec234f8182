//! Views of values that a function may change: plain fields as they are, and for each owner a
//! pointer that says whether the function may change what it leads to.
//!
//! A [`FarMut`] comes into being in two ways: of the root of a call, which is borrowed mutably, and
//! of a [`FarBox`] in a value to which a `FarMut` leads. So whatever it leads to has one owner, and
//! nobody else sees it during the call. A [`FarArc`] gives a [`FarRef`], which no store accepts.

use super::part::NearTables;
use super::view_traits::{FarRef, FarView, Loan, ViewSource, ViewTypes};
use crate::ptr::{FarArc, FarBox, Follow};
use core::any::TypeId;
use core::fmt::Debug;
use core::mem::offset_of;

/// A type whose plain fields a [`FarFunctionMut`](crate::FarFunctionMut) can change, at the client
/// and at a memory server. `#[derive(FarViewMut)]` implements it for a type that has
/// `#[derive(FarView)]`.
///
/// For a type `Node`, the derive makes a type `NodeViewMut` with the same fields or variants. In it, each
/// [`FarBox`] is a [`FarMut`], which leads to a value that may be changed too, and each [`FarArc`] is
/// a [`FarRef`], which leads to one that is only read. What a box owns has the derive itself.
///
/// A function changes an enum as a whole: it stores another variant, or the same one with other fields. So
/// an enum with far pointers, which stay where they are, cannot be changed.
///
/// The derive is a promise of its own: whoever may write a function can give the plain fields of one
/// value to another one, as by an assignment of each field. A type that relies on a relation of its
/// fields keeps them private, as elsewhere in Rust.
///
/// ```
/// use farfield::{FarArc, FarBox, FarView, FarViewMut};
///
/// #[derive(FarView)]
/// struct Branch {
///     city: u32,
/// }
///
/// #[derive(FarView, FarViewMut)]
/// #[repr(u8)]
/// enum State {
///     Open,
///     Closed { day: u32, by: Option<u16> },
/// }
///
/// #[derive(FarView, FarViewMut)]
/// struct Account {
///     cents: i64,
///     state: State,
///     limits: (u32, [Option<i32>; 2]),
///     branch: FarArc<Branch>,
///     next: Option<FarBox<Account>>,
/// }
/// ```
///
/// An owner in a variant would go with it, or come into being:
///
/// ```compile_fail,E0080
/// #[derive(farfield::FarView, farfield::FarViewMut)]
/// #[repr(u8)]
/// enum Tree {
///     Leaf(u64),
///     Inner(farfield::FarBox<Tree>, farfield::FarBox<Tree>), // error: it has far pointers
/// }
/// ```
///
/// ```compile_fail,E0080
/// # #[derive(farfield::FarView, farfield::FarViewMut)]
/// # struct Leaf { number: u64 }
/// #[derive(farfield::FarView, farfield::FarViewMut)]
/// #[repr(u8)]
/// enum Shared {
///     None,
///     Some { pair: (u8, [Option<farfield::FarArc<Leaf>>; 2]) }, // error: it has far pointers
/// }
/// ```
///
/// The variants of another enum lie where Rust does not say:
///
/// ```compile_fail
/// #[derive(farfield::FarViewMut)]
/// enum State {
///     Open, // error: give it a tag with #[repr(u8)]
///     Closed,
/// }
/// ```
///
/// A type that a function may not read is none that it may change:
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarViewMut)]
/// #[repr(u8)]
/// enum State {
///     Open, // error: the trait bound `State: FarView` is not satisfied
///     Closed,
/// }
/// ```
///
/// ```compile_fail,E0277
/// #[derive(farfield::FarView, farfield::FarViewMut)]
/// struct Named {
///     name: (u8, farfield::FarString), // error: the trait bound `FarString: FarViewMut` is not satisfied
/// }
/// ```
///
/// What a box owns has to be changeable, too:
///
/// ```compile_fail,E0277
/// use farfield::{FarBox, FarView, FarViewMut};
///
/// #[derive(FarView)]
/// struct Fixed {
///     number: u64,
/// }
///
/// #[derive(FarView, FarViewMut)]
/// struct Holder {
///     fixed: FarBox<Fixed>, // error: the trait bound `Fixed: FarViewMut` is not satisfied
/// }
/// ```
///
/// A reference cannot be stored, because there is none in such a type:
///
/// ```compile_fail
/// #[derive(farfield::FarViewMut)]
/// struct Borrowing<'a> {
///     name: &'a u64, // error: a far value outlives every borrow
/// }
/// ```
///
/// # Safety
/// `describe` names all bytes of a value but its padding, at their places and by their kinds. `encode`
/// writes exactly these, and `patched` takes exactly those of plain fields.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be changed by a function",
    note = "fields of a FarViewMut are numbers, `bool`, `char`, `FarArc`, `FarBox` of a FarViewMut, options of all \
            these, arrays, tuples, and types with `#[derive(FarView, FarViewMut)]`"
)]
pub unsafe trait FarViewMut: FarView {
    /// Copy of a value, in which boxes are [`FarMut`]s.
    type ViewMut<'f>: Copy + Debug;

    /// Whether values have far pointers, which stay as they are.
    #[doc(hidden)]
    const OWNS: bool;

    #[doc(hidden)]
    fn view_mut<'f>(&self, loan: Loan<'f>) -> Self::ViewMut<'f>;

    /// Makes the view of a value with these bytes; `None` if no value has them.
    #[doc(hidden)]
    fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>>;

    /// Makes the views of an array with these bytes.
    #[doc(hidden)]
    fn decode_array_mut<'f, const N: usize>(bytes: &[u8]) -> Option<[Self::ViewMut<'f>; N]> {
        all_of(core::array::from_fn(|index| Self::decode_mut(element::<Self>(bytes, index)?)))
    }

    /// Writes the fields of a view to their places in the bytes of a value.
    #[doc(hidden)]
    fn encode(view: &Self::ViewMut<'_>, bytes: &mut [u8]);

    /// Writes the fields of an array's views to their places in its bytes.
    #[doc(hidden)]
    fn encode_array<const N: usize>(views: &[Self::ViewMut<'_>; N], bytes: &mut [u8]) {
        bytes.chunks_exact_mut(size_of::<Self>().max(1)).zip(views).for_each(|(bytes, view)| Self::encode(view, bytes));
    }

    /// Returns this view with the plain fields of these bytes; `None` if no value has them.
    #[doc(hidden)]
    fn patched<'f>(view: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>>;

    /// Returns these views of an array with the plain fields of these bytes.
    #[doc(hidden)]
    fn patched_array<'f, const N: usize>(
        views: &[Self::ViewMut<'f>; N],
        bytes: &[u8],
    ) -> Option<[Self::ViewMut<'f>; N]> {
        all_of(core::array::from_fn(|index| Self::patched(&views[index], element::<Self>(bytes, index)?)))
    }

    /// Adds the fields of a value that begins at this offset.
    #[doc(hidden)]
    fn describe(at: usize, fields: &mut ViewFields);

    /// Adds the types of the values that boxes in this type own.
    #[doc(hidden)]
    fn add_owned(types: &mut OwnedTypes);
}

/// Returns the bytes of an element of an array.
fn element<T>(bytes: &[u8], index: usize) -> Option<&[u8]> {
    bytes.get(index * size_of::<T>()..(index + 1) * size_of::<T>())
}

/// Returns all elements, if all are there.
fn all_of<T: Copy, const N: usize>(elements: [Option<T>; N]) -> Option<[T; N]> {
    if elements.iter().any(Option::is_none) {
        return None;
    }
    Some(elements.map(|element| element.unwrap_or_else(|| unreachable!("all of them were looked at"))))
}

/// A far pointer that owns nothing, to a value that a [`FarFunctionMut`](crate::FarFunctionMut) may
/// change ([`FarPlaceMut::change`](crate::FarPlaceMut::change)).
///
/// It can be copied: a function sees its own changes through each copy.
pub struct FarMut<'f, T: FarViewMut>(pub(super) FarRef<'f, Changeable<T>>);

impl<T: FarViewMut> Clone for FarMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: FarViewMut> Copy for FarMut<'_, T> {}

impl<T: FarViewMut> Debug for FarMut<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "FarMut({})", self.0.number)
    }
}

impl<'f, T: FarViewMut> FarMut<'f, T> {
    fn encode(&self, bytes: &mut [u8]) {
        encode_slot(&self.0, bytes);
    }
}

impl<'h, T: FarViewMut + Send> FarMut<'h, T> {
    /// Makes the pointer to the root of a call.
    pub(super) fn of_root(owner: &'h mut FarBox<T>) -> FarMut<'h, T> {
        // SAFETY: the owner is borrowed mutably, so nobody else reads, changes or drops the value, or what it owns
        // alone. The call changes it when no view of it is left.
        FarMut(FarRef::of(owner.pointer(), unsafe { Loan::new() }))
    }
}

/// A value of which a function gets the view that it may change.
#[doc(hidden)]
#[derive(Debug)]
#[repr(transparent)]
pub struct Changeable<T>(T);

// SAFETY: the same bytes as `T`, in which pointers that may be followed are `FarView`.
unsafe impl<T: FarViewMut> FarView for Changeable<T> {
    type View<'f> = T::ViewMut<'f>;
    const NAME: &'static str = T::NAME;
    const LAYOUT: u64 = T::LAYOUT;

    #[inline]
    fn view<'f>(&self, loan: Loan<'f>) -> T::ViewMut<'f> {
        self.0.view_mut(loan)
    }

    #[inline]
    fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<T::ViewMut<'f>> {
        T::decode_mut(bytes)
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        self.0.write_image(image, tables);
    }

    fn add_pointees(types: &mut ViewTypes) {
        T::add_pointees(types);
    }
}

/// Meaning of some bytes of a value.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum FieldKind {
    /// Bytes of numbers, each of which can be any byte.
    Number,
    /// Bytes that change together, and of which not all make a value: whether these do.
    Whole(fn(&[u8]) -> bool),
    /// A far pointer, which owns: it stays as it is.
    Owner,
}

/// Some bytes of a value that mean the same.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct ViewField {
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) kind: FieldKind,
}

/// The bytes of a value but its padding, by what they mean.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct ViewFields(Vec<ViewField>);

impl ViewFields {
    /// Returns the fields of a type in the order of their places.
    fn of<T: FarViewMut>() -> Vec<ViewField> {
        let mut fields = ViewFields::default();
        T::describe(0, &mut fields);
        let mut fields = fields.0;
        fields.sort_unstable_by_key(|field| field.at);
        fields.dedup_by(|next, last| last.extend(*next));
        fields
    }

    /// Adds a value that changes as a whole.
    pub fn add_whole<T: FarViewMut>(&mut self, at: usize) {
        self.add(at, size_of::<T>(), FieldKind::Whole(|bytes| T::decode_mut(bytes).is_some()));
    }

    /// Adds a field.
    pub(super) fn add(&mut self, at: usize, len: usize, kind: FieldKind) {
        let field = ViewField { at, len, kind };
        // So that a long array of numbers is one field from the beginning.
        if !self.0.last_mut().is_some_and(|last| last.extend(field)) {
            self.0.push(field);
        }
    }
}

impl ViewField {
    /// Makes the field longer by the next one, if both are numbers side by side.
    fn extend(&mut self, next: ViewField) -> bool {
        let are_numbers = matches!((self.kind, next.kind), (FieldKind::Number, FieldKind::Number));
        let is_one = are_numbers && self.at + self.len == next.at;
        if is_one {
            self.len += next.len;
        }
        is_one
    }
}

/// A type whose values a function may change.
#[derive(Debug)]
pub(super) struct OwnedType {
    id: TypeId,
    pub(super) name: &'static str,
    pub(super) size: usize,
    pub(super) fields: Vec<ViewField>,
}

/// The types whose values a function may change, in the order in which boxes lead to them.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct OwnedTypes(Vec<OwnedType>);

impl OwnedTypes {
    /// Returns this type and all whose values are owned by its values alone.
    pub(super) fn of<T: FarViewMut>() -> OwnedTypes {
        let mut types = OwnedTypes::default();
        types.add::<T>();
        types
    }

    /// Adds a type, and those that its boxes own.
    pub fn add<T: FarViewMut>(&mut self) {
        if self.index_of::<T>().is_none() {
            let (id, fields) = (TypeId::of::<T>(), ViewFields::of::<T>());
            self.0.push(OwnedType { id, name: T::NAME, size: size_of::<T>(), fields });
            T::add_owned(self);
        }
    }

    pub(super) fn index_of<T: FarViewMut>(&self) -> Option<usize> {
        let id = TypeId::of::<T>();
        self.0.iter().position(|owned| owned.id == id)
    }

    pub(super) fn get(&self, index: usize) -> Option<&OwnedType> {
        self.0.get(index)
    }
}

/// Length of a slot, in bytes.
const SLOT_BYTES: usize = size_of::<u64>();

fn decode_slot<'f, T: FarView>(bytes: &[u8]) -> Option<FarRef<'f, T>> {
    let (place, number) = bytes.split_at_checked(size_of::<u32>())?;
    FarRef::elsewhere(u32::decode_mut(place)?, u32::decode_mut(number)?)
}

fn encode_slot<T: FarView>(pointer: &FarRef<'_, T>, bytes: &mut [u8]) {
    if let Some((place, number)) = bytes.split_at_mut_checked(size_of::<u32>()) {
        place.copy_from_slice(&pointer.place.to_ne_bytes());
        number.copy_from_slice(&pointer.number.get().to_ne_bytes());
    }
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: a number is all of its bytes, each of which can be any byte.
        unsafe impl FarViewMut for $number {
            type ViewMut<'f> = $number;
            const OWNS: bool = false;

            #[inline]
            fn view_mut<'f>(&self, _: Loan<'f>) -> $number {
                *self
            }

            #[inline]
            fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                Some(<$number>::from_ne_bytes(bytes.try_into().ok()?))
            }

            // In one loop, which the compiler makes a copy of.
            #[inline]
            fn decode_array_mut<'f, const N: usize>(bytes: &[u8]) -> Option<[Self::ViewMut<'f>; N]> {
                let (numbers, rest) = bytes.as_chunks();
                let mut array = [<$number>::default(); N];
                array.iter_mut().zip(numbers).for_each(|(into, number)| *into = <$number>::from_ne_bytes(*number));
                (numbers.len() == N && rest.is_empty()).then_some(array)
            }

            #[inline]
            fn encode(view: &$number, bytes: &mut [u8]) {
                bytes.copy_from_slice(&view.to_ne_bytes());
            }

            #[inline]
            fn patched<'f>(_: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                Self::decode_mut(bytes)
            }

            // In one loop, as above.
            #[inline]
            fn encode_array<const N: usize>(views: &[Self::ViewMut<'_>; N], bytes: &mut [u8]) {
                let (numbers, _) = bytes.as_chunks_mut();
                numbers.iter_mut().zip(views).for_each(|(into, view)| *into = view.to_ne_bytes());
            }

            #[inline]
            fn patched_array<'f, const N: usize>(
                _: &[Self::ViewMut<'f>; N],
                bytes: &[u8],
            ) -> Option<[Self::ViewMut<'f>; N]> {
                Self::decode_array_mut(bytes)
            }

            #[inline]
            fn describe(at: usize, fields: &mut ViewFields) {
                fields.add(at, size_of::<$number>(), FieldKind::Number);
            }

            fn add_owned(_: &mut OwnedTypes) {}
        }
    )*};
}

numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

// SAFETY: one byte, 0 or 1.
unsafe impl FarViewMut for bool {
    type ViewMut<'f> = bool;
    const OWNS: bool = false;

    fn view_mut<'f>(&self, _: Loan<'f>) -> bool {
        *self
    }

    fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        match bytes {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn encode(view: &bool, bytes: &mut [u8]) {
        bytes.copy_from_slice(&[u8::from(*view)]);
    }

    fn patched<'f>(_: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        Self::decode_mut(bytes)
    }

    fn describe(at: usize, fields: &mut ViewFields) {
        fields.add_whole::<bool>(at);
    }

    fn add_owned(_: &mut OwnedTypes) {}
}

// SAFETY: four bytes, of which some mean no character.
unsafe impl FarViewMut for char {
    type ViewMut<'f> = char;
    const OWNS: bool = false;

    fn view_mut<'f>(&self, _: Loan<'f>) -> char {
        *self
    }

    fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        char::from_u32(u32::decode_mut(bytes)?)
    }

    fn encode(view: &char, bytes: &mut [u8]) {
        bytes.copy_from_slice(&u32::from(*view).to_ne_bytes());
    }

    fn patched<'f>(_: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        Self::decode_mut(bytes)
    }

    fn describe(at: usize, fields: &mut ViewFields) {
        fields.add_whole::<char>(at);
    }

    fn add_owned(_: &mut OwnedTypes) {}
}

// SAFETY: the elements lie side by side, and each is `FarViewMut`.
unsafe impl<T: FarViewMut, const N: usize> FarViewMut for [T; N] {
    type ViewMut<'f> = [T::ViewMut<'f>; N];
    const OWNS: bool = T::OWNS;

    fn view_mut<'f>(&self, loan: Loan<'f>) -> [T::ViewMut<'f>; N] {
        core::array::from_fn(|index| self[index].view_mut(loan))
    }

    fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        T::decode_array_mut(bytes)
    }

    fn encode(view: &[T::ViewMut<'_>; N], bytes: &mut [u8]) {
        T::encode_array(view, bytes);
    }

    fn patched<'f>(view: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        T::patched_array(view, bytes)
    }

    fn describe(at: usize, fields: &mut ViewFields) {
        (0..N).for_each(|index| T::describe(at + index * size_of::<T>(), fields));
    }

    fn add_owned(types: &mut OwnedTypes) {
        T::add_owned(types);
    }
}

// SAFETY: it has no bytes.
unsafe impl FarViewMut for () {
    type ViewMut<'f> = ();
    const OWNS: bool = false;

    fn view_mut<'f>(&self, _: Loan<'f>) {}

    fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
        bytes.is_empty().then_some(())
    }

    fn encode(_: &(), _: &mut [u8]) {}

    fn patched<'f>(_: &Self::ViewMut<'f>, _: &[u8]) -> Option<Self::ViewMut<'f>> {
        Some(())
    }

    fn describe(_: usize, _: &mut ViewFields) {}

    fn add_owned(_: &mut OwnedTypes) {}
}

macro_rules! tuples {
    ($($part:ident $index:tt)*) => {
        // SAFETY: each part is described, encoded and patched by its own type, at its own place.
        unsafe impl<$($part: FarViewMut),*> FarViewMut for ($($part,)*) {
            type ViewMut<'f> = ($($part::ViewMut<'f>,)*);
            const OWNS: bool = $($part::OWNS)||*;

            #[inline]
            fn view_mut<'f>(&self, loan: Loan<'f>) -> Self::ViewMut<'f> {
                ($(self.$index.view_mut(loan),)*)
            }

            #[inline]
            fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                Some(($($part::decode_mut(bytes.get(offset_of!(Self, $index)..)?.get(..size_of::<$part>())?)?,)*))
            }

            #[inline]
            fn encode(view: &Self::ViewMut<'_>, bytes: &mut [u8]) {
                $($part::encode(&view.$index, &mut bytes[offset_of!(Self, $index)..][..size_of::<$part>()]);)*
            }

            #[inline]
            fn patched<'f>(view: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                let part = |at: usize, size: usize| bytes.get(at..at + size);
                Some(($($part::patched(&view.$index, part(offset_of!(Self, $index), size_of::<$part>())?)?,)*))
            }

            fn describe(at: usize, fields: &mut ViewFields) {
                $($part::describe(at + offset_of!(Self, $index), fields);)*
            }

            fn add_owned(types: &mut OwnedTypes) {
                $($part::add_owned(types);)*
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0 B 1);
tuples!(A 0 B 1 C 2);
tuples!(A 0 B 1 C 2 D 3);

/// Implements the trait for an owner and for an option of it, whose view is this pointer.
macro_rules! owners {
    ($($owner:ident: $pointer:ident, $bound:ident $(+ $more:ident)*, $add:expr;)*) => {$(
        // SAFETY: an owner is its slot, which stays as it is.
        unsafe impl<T: $bound $(+ $more)*> FarViewMut for $owner<T> {
            type ViewMut<'f> = $pointer<'f, T>;
            const OWNS: bool = true;

            #[inline]
            fn view_mut<'f>(&self, loan: Loan<'f>) -> $pointer<'f, T> {
                $pointer::of_owner(self, loan)
            }

            #[inline]
            fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                $pointer::of_bytes(bytes)
            }

            fn encode(view: &$pointer<'_, T>, bytes: &mut [u8]) {
                view.encode(bytes);
            }

            fn patched<'f>(view: &Self::ViewMut<'f>, _: &[u8]) -> Option<Self::ViewMut<'f>> {
                Some(*view)
            }

            fn describe(at: usize, fields: &mut ViewFields) {
                fields.add(at, SLOT_BYTES, FieldKind::Owner);
            }

            fn add_owned(types: &mut OwnedTypes) {
                let add: fn(&mut OwnedTypes) = $add;
                add(types);
            }
        }

        // SAFETY: as above. No owner is one to number 0.
        unsafe impl<T: $bound $(+ $more)*> FarViewMut for Option<$owner<T>> {
            type ViewMut<'f> = Option<$pointer<'f, T>>;
            const OWNS: bool = true;

            #[inline]
            fn view_mut<'f>(&self, loan: Loan<'f>) -> Option<$pointer<'f, T>> {
                self.as_ref().map(|owner| owner.view_mut(loan))
            }

            #[inline]
            fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                (bytes.len() == SLOT_BYTES).then(|| $pointer::of_bytes(bytes))
            }

            fn encode(view: &Option<$pointer<'_, T>>, bytes: &mut [u8]) {
                match view {
                    Some(pointer) => pointer.encode(bytes),
                    None => bytes.fill(0),
                }
            }

            fn patched<'f>(view: &Self::ViewMut<'f>, _: &[u8]) -> Option<Self::ViewMut<'f>> {
                Some(*view)
            }

            fn describe(at: usize, fields: &mut ViewFields) {
                <$owner<T> as FarViewMut>::describe(at, fields);
            }

            fn add_owned(types: &mut OwnedTypes) {
                <$owner<T> as FarViewMut>::add_owned(types);
            }
        }
    )*};
}

owners! {
    FarBox: FarMut, FarViewMut + Send, OwnedTypes::add::<T>;
    // What is shared is not changed, nor is what it owns.
    FarArc: FarRef, FarView + Send + Sync, |_| {};
}

impl<'f, T: FarViewMut + Send> FarMut<'f, T> {
    fn of_owner(owner: &FarBox<T>, loan: Loan<'f>) -> FarMut<'f, T> {
        FarMut(FarRef::of(owner.pointer(), loan))
    }

    fn of_bytes(bytes: &[u8]) -> Option<FarMut<'f, T>> {
        decode_slot(bytes).map(FarMut)
    }
}

impl<'f, T: FarView + Send + Sync> FarRef<'f, T> {
    fn of_owner(owner: &FarArc<T>, loan: Loan<'f>) -> FarRef<'f, T> {
        FarRef::of(owner.pointer(), loan)
    }

    fn of_bytes(bytes: &[u8]) -> Option<FarRef<'f, T>> {
        decode_slot(bytes)
    }

    fn encode(&self, bytes: &mut [u8]) {
        encode_slot(self, bytes);
    }
}
