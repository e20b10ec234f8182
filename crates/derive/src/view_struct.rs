//! What `FarView` and `FarViewMut` share: which types can have views, and the struct that a function sees.

use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::{DataUnion, DeriveInput, Error, Fields, GenericParam, Ident, Type};

/// Refuses lifetimes and type parameters.
pub(crate) fn refuse_parameters(input: &DeriveInput) -> Result<(), Error> {
    let Some(param) = input.generics.params.first() else { return Ok(()) };
    let message = match param {
        GenericParam::Lifetime(_) => "a far value outlives every borrow: it has no lifetimes",
        _ => "a memory server reads types of one layout: they have no parameters",
    };
    Err(Error::new_spanned(param, message))
}

/// Returns the error that a type is a union.
pub(crate) fn union_error(data: &DataUnion) -> Error {
    Error::new_spanned(data.union_token, "nobody can tell which field of a union is a pointer")
}

/// Emits the struct that a function sees of a type: the view of each of its fields, under its name.
pub(crate) fn view_struct(
    input: &DeriveInput,
    fields: &Fields,
    view_name: &Ident,
    about: &str,
    view_type: impl Fn(&Type) -> Tokens,
) -> Tokens {
    let visibility = &input.vis;
    let views = fields.iter().map(|field| {
        let (visibility, ty) = (&field.vis, view_type(&field.ty));
        match &field.ident {
            Some(name) => quote!(#visibility #name: #ty),
            None => quote!(#visibility #ty),
        }
    });
    let (view_fields, semicolon) = match fields {
        Fields::Named(_) => (quote!({ #(#views),* }), quote!()),
        _ => (quote!((#(#views),*)), quote!(;)),
    };
    quote! {
        #[doc = #about]
        #[derive(Clone, Copy, Debug)]
        #[allow(dead_code, missing_docs)]
        #visibility struct #view_name<'farfield> #view_fields #semicolon
    }
}
