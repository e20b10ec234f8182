//! `#[derive(Far)]` and `#[derive(FarGroup)]` of `farfield-dsm`: each field of the type may lie in shared
//! memory, and where in it others are tied to it.
//!
//! The fields are checked in a function and not by bounds of the implementation, so that a type may
//! own values of its own type (`next: Option<DBox<Self>>`).

use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error, Fields, GenericParam, Generics, TypeParamBound, parse_quote};

/// Returns the generics of the type, whose parameters have this bound.
fn bounded(input: &DeriveInput, bound: &TypeParamBound) -> Result<Generics, Error> {
    let mut generics = input.generics.clone();
    for param in &mut generics.params {
        match param {
            GenericParam::Type(param) => param.bounds.push(bound.clone()),
            GenericParam::Lifetime(param) => {
                let message = "a shared value outlives every borrow: it has no lifetimes; own the value with a DBox";
                return Err(Error::new_spanned(param, message));
            }
            GenericParam::Const(_) => {}
        }
    }
    Ok(generics)
}

/// Returns the fields of a struct, or of each variant of an enum, with the path of its patterns.
fn variants(input: &DeriveInput) -> Result<Vec<(Tokens, &Fields)>, Error> {
    match &input.data {
        Data::Struct(data) => Ok(vec![(quote!(Self), &data.fields)]),
        Data::Enum(data) => {
            let of_variant = |variant: &syn::Variant| {
                let name = &variant.ident;
                quote!(Self::#name)
            };
            Ok(data.variants.iter().map(|variant| (of_variant(variant), &variant.fields)).collect())
        }
        Data::Union(data) => {
            Err(Error::new_spanned(data.union_token, "nobody can tell which field of a union is an owner"))
        }
    }
}

/// Implements `FarGroup`: each field is asked for what is tied to it.
pub(crate) fn expand_group(input: &DeriveInput) -> Result<Tokens, Error> {
    let generics = bounded(input, &parse_quote!(::farfield_dsm::FarGroup))?;
    let variants = variants(input)?;
    let types = variants.iter().flat_map(|(_, fields)| *fields).map(|field| &field.ty);
    let visits = variants.iter().map(|(path, fields)| {
        let members = fields.members();
        let names: Vec<_> = (0..fields.len()).map(|index| format_ident!("farfield_{}", index)).collect();
        quote! {
            #path { #(#members: ref #names),* } => {
                #(::farfield_dsm::FarGroup::visit_ties(#names, farfield_visit);)*
            }
        }
    });
    let owned = visit_owned(&variants);
    let name = &input.ident;
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        // SAFETY: each field is `FarGroup`, and all of them are visited.
        unsafe impl #impl_generics ::farfield_dsm::FarGroup for #name #type_generics #where_clause {
            const HAS_TIES: bool = false #(|| <#types as ::farfield_dsm::FarGroup>::HAS_TIES)*;

            #[allow(unreachable_code, unused_variables, clippy::all)]
            fn visit_ties(&self, farfield_visit: &mut dyn ::core::ops::FnMut(::farfield_dsm::Tie)) {
                match *self {
                    #(#visits)*
                }
            }

            #owned
        }
    })
}

/// Returns the method that passes what each field owns.
fn visit_owned(variants: &[(Tokens, &Fields)]) -> Tokens {
    let visits = variants.iter().map(|(path, fields)| {
        let members = fields.members();
        let names: Vec<_> = (0..fields.len()).map(|index| format_ident!("farfield_{}", index)).collect();
        quote! {
            #path { #(#members: ref #names),* } => {
                #(::farfield_dsm::FarGroup::visit_owned(#names, farfield_visit);)*
            }
        }
    });
    quote! {
        #[allow(unreachable_code, unused_variables, clippy::all)]
        fn visit_owned(&self, farfield_visit: &mut dyn ::core::ops::FnMut(::farfield_dsm::OwnedObject)) {
            match *self {
                #(#visits)*
            }
        }
    }
}

/// Implements `Far`, and what it requires.
pub(crate) fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    let generics = bounded(input, &parse_quote!(::farfield_dsm::Far))?;
    let variants = variants(input)?;
    let owned = visit_owned(&variants);
    let patterns = variants.iter().map(|(path, fields)| pattern(path, fields));
    let types = variants.iter().flat_map(|(_, fields)| *fields).map(|field| &field.ty);
    let name = &input.ident;
    let check = format_ident!("fields_of_{}_can_lie_in_shared_memory", name);
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        // SAFETY: each field is `Far`, as is checked below, so it has no loans.
        unsafe impl #impl_generics ::farfield_dsm::Portable for #name #type_generics #where_clause {
            fn visit_sent(&self, farfield_visit: &mut dyn ::core::ops::FnMut(::farfield_dsm::OwnedObject)) {
                ::farfield_dsm::FarGroup::visit_owned(self, farfield_visit);
            }
        }
        // SAFETY: each field is `Far`, so nothing is tied to it, and all of them are visited.
        unsafe impl #impl_generics ::farfield_dsm::FarGroup for #name #type_generics #where_clause {
            #owned
        }
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
