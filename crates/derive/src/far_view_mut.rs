//! `#[derive(FarViewMut)]` of `farfield`: says where the fields of a type lie that a function may change.
//!
//! The derive emits the struct that a function changes a copy of, and how the bytes of a value are made
//! of it. Each field is described by its own type; a type that has no description is refused by the
//! compiler.

use crate::far_view_mut_enum;
use crate::view_struct::{refuse_parameters, union_error, view_struct};
use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error};

pub(crate) fn expand(input: &DeriveInput) -> Result<Tokens, Error> {
    refuse_parameters(input)?;
    let fields = match &input.data {
        Data::Struct(data) => &data.fields,
        Data::Enum(data) => return far_view_mut_enum::expand(input, data),
        Data::Union(data) => return Err(union_error(data)),
    };
    let (name, view_name) = (&input.ident, format_ident!("{}ViewMut", input.ident));
    let about =
        format!("What a function may change of a [`{name}`]: its fields, with far pointers that stay as they are.");
    let members: Vec<_> = fields.members().collect();
    let types: Vec<_> = fields.iter().map(|field| &field.ty).collect();
    if fields.is_empty() {
        return Err(Error::new_spanned(name, "a function changes fields, and this type has none"));
    }
    let view_struct = view_struct(
        input,
        fields,
        &view_name,
        &about,
        |ty| quote!(<#ty as ::farfield::FarViewMut>::ViewMut<'farfield>),
    );
    // The bytes of each field, out of those of a value.
    let bytes: Vec<_> = members
        .iter()
        .zip(&types)
        .map(|(member, ty)| {
            quote!({
                let at = ::core::mem::offset_of!(Self, #member);
                farfield_bytes.get(at..at + ::core::mem::size_of::<#ty>())?
            })
        })
        .collect();
    Ok(quote! {
        #view_struct

        // SAFETY: each field is `FarViewMut`, and is described, encoded and patched by its own type, at its own place.
        unsafe impl ::farfield::FarViewMut for #name {
            type ViewMut<'farfield> = #view_name<'farfield>;
            const OWNS: bool = false #(|| <#types as ::farfield::FarViewMut>::OWNS)*;

            #[inline]
            fn view_mut<'farfield>(
                &self,
                farfield_loan: ::farfield::view::Loan<'farfield>,
            ) -> #view_name<'farfield> {
                // A macro that has changed the type since is refused: all its fields are named here.
                let _ = |Self { #(#members: _),* }: &Self| ();
                #view_name {
                    #(#members: <#types as ::farfield::FarViewMut>::view_mut(&self.#members, farfield_loan),)*
                }
            }

            #[inline]
            fn decode_mut<'farfield>(farfield_bytes: &[u8]) -> ::core::option::Option<Self::ViewMut<'farfield>> {
                ::core::option::Option::Some(#view_name {
                    #(#members: <#types as ::farfield::FarViewMut>::decode_mut(#bytes)?,)*
                })
            }

            #[inline]
            fn encode(farfield_view: &#view_name<'_>, farfield_bytes: &mut [u8]) {
                #({
                    let at = ::core::mem::offset_of!(Self, #members);
                    let field = &mut farfield_bytes[at..at + ::core::mem::size_of::<#types>()];
                    <#types as ::farfield::FarViewMut>::encode(&farfield_view.#members, field);
                })*
            }

            #[inline]
            fn patched<'farfield>(
                farfield_view: &Self::ViewMut<'farfield>,
                farfield_bytes: &[u8],
            ) -> ::core::option::Option<Self::ViewMut<'farfield>> {
                ::core::option::Option::Some(#view_name {
                    #(#members: <#types as ::farfield::FarViewMut>::patched(&farfield_view.#members, #bytes)?,)*
                })
            }

            fn describe(farfield_at: usize, farfield_fields: &mut ::farfield::view::ViewFields) {
                #(
                    <#types as ::farfield::FarViewMut>::describe(
                        farfield_at + ::core::mem::offset_of!(Self, #members),
                        farfield_fields,
                    );
                )*
            }

            fn add_owned(farfield_types: &mut ::farfield::view::OwnedTypes) {
                #(<#types as ::farfield::FarViewMut>::add_owned(farfield_types);)*
            }
        }
    })
}
