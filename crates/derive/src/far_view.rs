//! `#[derive(FarView)]` of `farfield`: says which fields of a type are plain, and which are far pointers.
//!
//! The derive emits the struct that a function reads, and how it is made of a value and of a value's
//! bytes. Each field is described by its own type; a type that has no description is refused by the
//! compiler.

use crate::far_view_enum;
use crate::view_struct::{refuse_parameters, union_error, view_struct};
use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error, Ident};

pub(crate) fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    refuse_parameters(input)?;
    let fields = match &input.data {
        Data::Struct(data) => &data.fields,
        Data::Enum(data) => return far_view_enum::expand(input, data),
        Data::Union(data) => return Err(union_error(data)),
    };
    let (name, view_name) = (&input.ident, format_ident!("{}View", input.ident));
    let about = format!("What a function reads of a [`{name}`]: its fields, with far pointers that can be followed.");
    let members: Vec<_> = fields.members().collect();
    let types: Vec<_> = fields.iter().map(|field| &field.ty).collect();
    if fields.is_empty() {
        return Err(Error::new_spanned(name, "a function reads fields, and this type has none"));
    }
    let view_struct =
        view_struct(input, fields, &view_name, &about, |ty| quote!(<#ty as ::farfield::FarView>::View<'farfield>));
    let no_destructor = no_destructor(name);
    Ok(quote! {
        #view_struct

        // SAFETY: each field is `FarView`, and is viewed and decoded by its own type, at its own place.
        unsafe impl ::farfield::FarView for #name {
            type View<'farfield> = #view_name<'farfield>;
            const NAME: &'static str = ::core::stringify!(#name);
            const LAYOUT: u64 = ::farfield::view::layout(
                ::core::stringify!(#name),
                ::core::mem::size_of::<Self>(),
                ::core::mem::align_of::<Self>(),
                &[#((
                    ::core::stringify!(#members),
                    ::core::mem::offset_of!(Self, #members),
                    <#types as ::farfield::FarView>::LAYOUT,
                )),*],
            );

            #[inline]
            fn view<'farfield>(&self, farfield_loan: ::farfield::view::Loan<'farfield>) -> #view_name<'farfield> {
                // A macro that has changed the type since is refused: all its fields are named here.
                let _ = |Self { #(#members: _),* }: &Self| ();
                #view_name {
                    #(#members: <#types as ::farfield::FarView>::view(&self.#members, farfield_loan),)*
                }
            }

            #[inline]
            fn decode<'farfield>(
                farfield_bytes: &[u8],
                farfield_source: ::farfield::view::ViewSource,
            ) -> ::core::option::Option<#view_name<'farfield>> {
                ::core::option::Option::Some(#view_name {
                    #(#members: {
                        let at = ::core::mem::offset_of!(Self, #members);
                        let field = farfield_bytes.get(at..at + ::core::mem::size_of::<#types>())?;
                        <#types as ::farfield::FarView>::decode(field, farfield_source)?
                    },)*
                })
            }

            fn write_image(&self, farfield_image: &mut [u8], farfield_tables: &mut ::farfield::view::NearTables) {
                #({
                    let at = ::core::mem::offset_of!(Self, #members);
                    let field = &mut farfield_image[at..at + ::core::mem::size_of::<#types>()];
                    <#types as ::farfield::FarView>::write_image(&self.#members, field, farfield_tables);
                })*
            }

            fn add_pointees(farfield_types: &mut ::farfield::view::ViewTypes) {
                #(<#types as ::farfield::FarView>::add_pointees(farfield_types);)*
            }
        }

        impl<'farfield> ::core::convert::From<&'farfield #name> for ::farfield::FarRef<'farfield, #name> {
            fn from(value: &'farfield #name) -> Self {
                ::farfield::FarRef::near(value)
            }
        }

        #no_destructor
    })
}

/// Lets the compiler refuse a type with a destructor of its own.
pub(crate) fn no_destructor(name: &Ident) -> Tokens {
    quote! {
        const _: () = {
            trait HasNoDestructor {}
            #[allow(drop_bounds)]
            impl<FarfieldType: ::core::ops::Drop> HasNoDestructor for FarfieldType {}
            impl HasNoDestructor for #name {}
        };
    }
}
