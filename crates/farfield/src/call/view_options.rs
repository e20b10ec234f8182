//! Views of options of plain values, and of tuples.
//!
//! Rust does not specify where an `Option` keeps its tag. So the compiler is asked: constants are
//! read of a sample of `None` and of `Some`. A byte that a sample does not have is refused by the
//! compiler, so another layout than the one expected here does not build.

use super::part::NearTables;
use super::view_mut::{FarViewMut, OwnedTypes, ViewFields};
use super::view_traits::{FarView, Loan, ViewSource, ViewTypes, layout};
use core::mem::offset_of;

/// Returns the offset of the value in an option that has one.
const fn value_offset<T>(some: &Option<T>) -> usize {
    let Some(value) = some else { panic!("a sample with a value") };
    // SAFETY: the value lies in the option.
    unsafe { core::ptr::from_ref(value).byte_offset_from_unsigned(core::ptr::from_ref(some)) }
}

/// Returns a byte of an option. Only for constants: whether the byte is initialised is what the
/// compiler verifies when it evaluates one.
const fn byte_of<T>(option: &Option<T>, index: usize) -> u8 {
    assert!(index < size_of::<Option<T>>());
    // SAFETY: inside the option, as was just compared. Only constants are made of this, and the
    // compiler refuses one that reads a byte which is not initialised.
    unsafe { core::ptr::from_ref(option).cast::<u8>().add(index).read() }
}

macro_rules! options_of_numbers {
    ($($number:ty)*) => {$(
        const _: () = {
            const NONE: Option<$number> = None;
            const SOME: Option<$number> = Some(0 as $number);
            const VALUE: usize = value_offset(&SOME);
            // The tag lies before the value, and this is its lowest byte.
            const TAG: usize = if cfg!(target_endian = "little") { 0 } else { VALUE - 1 };
            const TAG_OF_NONE: u8 = byte_of(&NONE, TAG);
            const TAG_OF_SOME: u8 = byte_of(&SOME, TAG);
            const _: () = assert!(TAG < VALUE && TAG_OF_NONE != TAG_OF_SOME);

            // SAFETY: a number has no interior mutability.
            unsafe impl FarView for Option<$number> {
                type View<'f> = Option<$number>;
                const NAME: &'static str = concat!("Option<", stringify!($number), ">");
                const LAYOUT: u64 = layout(
                    Self::NAME,
                    size_of::<Self>(),
                    align_of::<Self>(),
                    &[("None", TAG_OF_NONE as usize, 0), ("Some", TAG_OF_SOME as usize, 0), ("value", VALUE, 0)],
                );

                #[inline]
                fn view<'f>(&self, _: Loan<'f>) -> Option<$number> {
                    *self
                }

                #[inline]
                fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
                    let value = bytes.get(VALUE..VALUE + size_of::<$number>())?;
                    match bytes[TAG] {
                        TAG_OF_NONE => Some(None),
                        TAG_OF_SOME => <$number>::decode(value, source).map(Some),
                        _ => None,
                    }
                }

                fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
                    image[TAG] = if self.is_some() { TAG_OF_SOME } else { TAG_OF_NONE };
                    if let Some(value) = self {
                        value.write_image(&mut image[VALUE..VALUE + size_of::<$number>()], tables);
                    }
                }

                fn add_pointees(_: &mut ViewTypes) {}
            }

            // All other bytes before the value are zero: whoever writes an option writes them so.
            const _: () = {
                let mut index = 0;
                while index < VALUE {
                    assert!(index == TAG || byte_of(&NONE, index) == 0 && byte_of(&SOME, index) == 0);
                    index += 1;
                }
            };

            // SAFETY: all bytes up to the end of the value, as the compiler says, change together.
            unsafe impl FarViewMut for Option<$number> {
                type ViewMut<'f> = Option<$number>;
                const OWNS: bool = false;

                #[inline]
                fn view_mut<'f>(&self, _: Loan<'f>) -> Option<$number> {
                    *self
                }

                #[inline]
                fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                    Self::decode(bytes, ViewSource::Region)
                }

                fn encode(view: &Option<$number>, bytes: &mut [u8]) {
                    bytes.fill(0);
                    bytes[TAG] = if view.is_some() { TAG_OF_SOME } else { TAG_OF_NONE };
                    if let Some(value) = view {
                        bytes[VALUE..VALUE + size_of::<$number>()].copy_from_slice(&value.to_ne_bytes());
                    }
                }

                fn patched<'f>(_: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                    Self::decode_mut(bytes)
                }

                fn describe(at: usize, fields: &mut ViewFields) {
                    fields.add_whole::<Self>(at);
                }

                fn add_owned(_: &mut OwnedTypes) {}
            }
        };
    )*};
}

options_of_numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

// The bytes that no `bool` and no `char` has say that there is none.
const NO_BOOL: u8 = byte_of(&None::<bool>, 0);
// SAFETY: of the same size, and the compiler verifies that all bytes are initialised.
const NO_CHAR: u32 = unsafe { core::mem::transmute(None::<char>) };
const _: () = assert!(NO_BOOL > 1 && char::from_u32(NO_CHAR).is_none() && size_of::<Option<bool>>() == 1);

// SAFETY: a `bool` has no interior mutability.
unsafe impl FarView for Option<bool> {
    type View<'f> = Option<bool>;
    const NAME: &'static str = "Option<bool>";
    const LAYOUT: u64 = layout(Self::NAME, 1, 1, &[("None", NO_BOOL as usize, 0)]);

    fn view<'f>(&self, _: Loan<'f>) -> Option<bool> {
        *self
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
        if bytes == [NO_BOOL] { Some(None) } else { bool::decode(bytes, source).map(Some) }
    }

    fn write_image(&self, image: &mut [u8], _: &mut NearTables) {
        image[0] = self.map_or(NO_BOOL, u8::from);
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

// SAFETY: a `char` has no interior mutability.
unsafe impl FarView for Option<char> {
    type View<'f> = Option<char>;
    const NAME: &'static str = "Option<char>";
    const LAYOUT: u64 = layout(Self::NAME, size_of::<Self>(), align_of::<Self>(), &[("None", NO_CHAR as usize, 0)]);

    fn view<'f>(&self, _: Loan<'f>) -> Option<char> {
        *self
    }

    fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
        match u32::decode(bytes, source)? {
            NO_CHAR => Some(None),
            other => char::from_u32(other).map(Some),
        }
    }

    fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
        self.map_or(NO_CHAR, u32::from).write_image(image, tables);
    }

    fn add_pointees(_: &mut ViewTypes) {}
}

macro_rules! changeable_options {
    ($($value:ty, $encode:expr;)*) => {$(
        // SAFETY: the bytes of the value, some of which mean that there is none, change together.
        unsafe impl FarViewMut for Option<$value> {
            type ViewMut<'f> = Option<$value>;
            const OWNS: bool = false;

            fn view_mut<'f>(&self, _: Loan<'f>) -> Option<$value> {
                *self
            }

            fn decode_mut<'f>(bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                Self::decode(bytes, ViewSource::Region)
            }

            fn encode(view: &Option<$value>, bytes: &mut [u8]) {
                bytes.copy_from_slice(&$encode(*view));
            }

            fn patched<'f>(_: &Self::ViewMut<'f>, bytes: &[u8]) -> Option<Self::ViewMut<'f>> {
                Self::decode_mut(bytes)
            }

            fn describe(at: usize, fields: &mut ViewFields) {
                fields.add_whole::<Self>(at);
            }

            fn add_owned(_: &mut OwnedTypes) {}
        }
    )*};
}

changeable_options! {
    bool, |view: Option<bool>| [view.map_or(NO_BOOL, u8::from)];
    char, |view: Option<char>| view.map_or(NO_CHAR, u32::from).to_ne_bytes();
}

// SAFETY: it has no bytes.
unsafe impl FarView for () {
    type View<'f> = ();
    const NAME: &'static str = "()";
    const LAYOUT: u64 = layout("()", 0, 1, &[]);

    fn view<'f>(&self, _: Loan<'f>) {}

    fn decode<'f>(bytes: &[u8], _: ViewSource) -> Option<Self::View<'f>> {
        bytes.is_empty().then_some(())
    }

    fn write_image(&self, _: &mut [u8], _: &mut NearTables) {}

    fn add_pointees(_: &mut ViewTypes) {}
}

macro_rules! tuples {
    ($($name:literal: $($part:ident $index:tt)*;)*) => {$(
        // SAFETY: the parts are `FarView`, and each is viewed and decoded at its own place.
        unsafe impl<$($part: FarView),*> FarView for ($($part,)*) {
            type View<'f> = ($($part::View<'f>,)*);
            const NAME: &'static str = $name;
            const LAYOUT: u64 = layout(
                $name,
                size_of::<Self>(),
                align_of::<Self>(),
                &[$((stringify!($index), offset_of!(Self, $index), $part::LAYOUT)),*],
            );

            #[inline]
            fn view<'f>(&self, loan: Loan<'f>) -> Self::View<'f> {
                ($(self.$index.view(loan),)*)
            }

            #[inline]
            fn decode<'f>(bytes: &[u8], source: ViewSource) -> Option<Self::View<'f>> {
                let part = |at: usize, size: usize| bytes.get(at..at + size);
                Some(($($part::decode(part(offset_of!(Self, $index), size_of::<$part>())?, source)?,)*))
            }

            fn write_image(&self, image: &mut [u8], tables: &mut NearTables) {
                $({
                    let at = offset_of!(Self, $index);
                    self.$index.write_image(&mut image[at..at + size_of::<$part>()], tables);
                })*
            }

            fn add_pointees(types: &mut ViewTypes) {
                $($part::add_pointees(types);)*
            }
        }
    )*};
}

tuples! {
    "tuple of 1": A 0;
    "tuple of 2": A 0 B 1;
    "tuple of 3": A 0 B 1 C 2;
    "tuple of 4": A 0 B 1 C 2 D 3;
}
