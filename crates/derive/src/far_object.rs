//! `#[derive(FarObject)]` of `farfield-gc`: says where the references of a type lie.
//!
//! The derive emits a description and no code that touches an object. Whoever traces a heap reads
//! objects by that description, so it must name every reference: each field is described by its own
//! type, and a type that has no description is refused by the compiler.

use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::{Data, DeriveInput, Error, Fields, GenericParam, Index, TypeParamBound, parse_quote};

pub(crate) fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    refuse_packed(input)?;
    let mut generics = input.generics.clone();
    for param in &mut generics.params {
        match param {
            // A field has a size, so what may have none is behind a reference.
            GenericParam::Type(param) if param.bounds.iter().any(is_maybe_unsized) => {}
            GenericParam::Type(param) => param.bounds.push(parse_quote!(::farfield_gc::FarObject)),
            GenericParam::Lifetime(param) => {
                return Err(Error::new_spanned(param, "a far object outlives every borrow: it has no lifetimes"));
            }
            GenericParam::Const(_) => {}
        }
    }
    let fields = match &input.data {
        Data::Struct(data) => {
            let mut described = describe_fields(&data.fields);
            described.push(name_every_field(&data.fields));
            described
        }
        Data::Enum(data) => {
            if let Some(variant) = data.variants.iter().find(|variant| !variant.fields.is_empty()) {
                let message = "a variant with fields lies in several places: use a struct with a tag";
                return Err(Error::new_spanned(variant, message));
            }
            Vec::new()
        }
        Data::Union(data) => {
            return Err(Error::new_spanned(data.union_token, "nobody can tell which field of a union is a reference"));
        }
    };
    let name = &input.ident;
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        // SAFETY: every field is described, at its own offset, by its own type, and the type has no
        // destructor.
        unsafe impl #impl_generics ::farfield_gc::FarObject for #name #type_generics #where_clause {
            fn describe(at: u32, slots: &mut ::farfield_gc::SlotList) {
                const {
                    ::core::assert!(
                        !::core::mem::needs_drop::<Self>(),
                        "a far object is freed without being looked at: it has no destructor"
                    );
                }
                let _ = (at, &slots);
                #(#fields)*
            }
        }
    })
}

/// Checks whether a bound is `?Sized`.
fn is_maybe_unsized(bound: &TypeParamBound) -> bool {
    matches!(bound, TypeParamBound::Trait(bound) if bound.maybe.is_some())
}

/// Returns the name of each field, or its index.
fn members(fields: &Fields) -> impl Iterator<Item = Tokens> {
    let member = |(index, field): (usize, &syn::Field)| match &field.ident {
        Some(name) => quote!(#name),
        None => {
            let index = Index::from(index);
            quote!(#index)
        }
    };
    fields.iter().enumerate().map(member).collect::<Vec<_>>().into_iter()
}

/// Lets the compiler refuse a struct that has other fields than the derive has seen, because a macro
/// has changed it since.
fn name_every_field(fields: &Fields) -> Tokens {
    let members = members(fields);
    quote! {
        let _ = |Self { #(#members: _),* }: &Self| ();
    }
}

fn describe_fields(fields: &Fields) -> Vec<Tokens> {
    let describe = |(field, member): (&syn::Field, Tokens)| {
        let ty = &field.ty;
        quote! {
            <#ty as ::farfield_gc::FarObject>::describe(at + ::core::mem::offset_of!(Self, #member) as u32, slots);
        }
    };
    fields.iter().zip(members(fields)).map(describe).collect()
}

/// Refuses `repr(packed)`: references must be aligned.
fn refuse_packed(input: &DeriveInput) -> Result<(), Error> {
    for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("repr")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("packed") {
                return Err(meta.error("a far object is not packed: its references are aligned"));
            }
            if meta.input.peek(syn::token::Paren) {
                let content;
                syn::parenthesized!(content in meta.input);
                content.parse::<Tokens>()?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
