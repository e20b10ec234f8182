//! The derives of Farfield: what a type must say of itself before its values lie in far or shared memory.

use proc_macro::TokenStream;
use syn::{DeriveInput, Error, parse_macro_input};

mod far;
mod far_object;
mod far_view;
mod far_view_enum;
mod far_view_mut;
mod far_view_mut_enum;
mod view_struct;

/// Implements `FarObject` of `farfield-gc` for a struct of described fields, or for an enum without
/// fields.
#[proc_macro_derive(FarObject)]
pub fn derive_far_object(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    far_object::expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// Implements `Far` of `farfield-dsm` for a struct or an enum whose fields are all `Far`.
#[proc_macro_derive(Far)]
pub fn derive_far(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    far::expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// Implements `FarGroup` of `farfield-dsm` for a struct or an enum that may have a `TBox` in it, and whose
/// fields are all `FarGroup`.
#[proc_macro_derive(FarGroup)]
pub fn derive_far_group(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    far::expand_group(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// Implements `FarView` of `farfield` for a struct of plain fields and far pointers, or an enum with a primitive
/// representation whose fields are such.
#[proc_macro_derive(FarView)]
pub fn derive_far_view(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    far_view::expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// Implements `FarViewMut` of `farfield` for a struct that is `FarView`, and whose plain fields a function may
/// change, or for such an enum without far pointers.
#[proc_macro_derive(FarViewMut)]
pub fn derive_far_view_mut(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    far_view_mut::expand(&input).unwrap_or_else(Error::into_compile_error).into()
}
