//! `#[derive(Far)]` of `farfield-dsm`: each field of the type may lie in shared memory.
//!
//! The fields are checked in a function and not by bounds of the implementation, so that a type may
//! own values of its own type (`next: Option<DBox<Self>>`).

use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error, Fields, GenericParam, parse_quote};

pub(crate) fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    let mut generics = input.generics.clone();
    for param in &mut generics.params {
        match param {
            GenericParam::Type(param) => param.bounds.push(parse_quote!(::farfield_dsm::Far)),
            GenericParam::Lifetime(param) => {
                let message = "a shared value outlives every borrow: it has no lifetimes; own the value with a DBox";
                return Err(Error::new_spanned(param, message));
            }
            GenericParam::Const(_) => {}
        }
    }
    let (fields, patterns): (Vec<&Fields>, Vec<Tokens>) = match &input.data {
        Data::Struct(data) => (vec![&data.fields], vec![pattern(&quote!(Self), &data.fields)]),
        Data::Enum(data) => {
            let of_variant = |variant: &syn::Variant| {
                let name = &variant.ident;
                pattern(&quote!(Self::#name), &variant.fields)
            };
            (
                data.variants.iter().map(|variant| &variant.fields).collect(),
                data.variants.iter().map(of_variant).collect(),
            )
        }
        Data::Union(data) => {
            return Err(Error::new_spanned(data.union_token, "nobody can tell which field of a union is an owner"));
        }
    };
    let types = fields.into_iter().flatten().map(|field| &field.ty);
    let name = &input.ident;
    let check = format_ident!("fields_of_{}_can_lie_in_shared_memory", name);
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        // SAFETY: each field is `Far`, as is checked below, so it has no loans.
        unsafe impl #impl_generics ::farfield_dsm::Portable for #name #type_generics #where_clause {}
        // SAFETY: each field is `Far`.
        unsafe impl #impl_generics ::farfield_dsm::Far for #name #type_generics #where_clause {}

        const _: () = {
            #[allow(dead_code, non_snake_case, unreachable_code, clippy::all)]
            impl #impl_generics #name #type_generics #where_clause {
                fn #check(&self) {
                    fn is_far<FarfieldType: ::farfield_dsm::Far>() {}
                    #(is_far::<#types>();)*
                    // A macro that has changed the type since is refused: all its fields are named here.
                    match *self {
                        #(#patterns => {})*
                    }
                }
            }
        };
    })
}

/// Returns a pattern that names every field.
fn pattern(path: &Tokens, fields: &Fields) -> Tokens {
    let members = fields.members();
    quote!(#path { #(#members: _),* })
}
