//! `#[derive(FarViewMut)]` for enums with a primitive representation and without far pointers.
//!
//! Which fields an enum has depends on its tag. So a function changes such a value as a whole, and what
//! a server answers is a value or is refused. An enum with owners is refused by the compiler: a change
//! of the variant would drop one, or make one of nothing.

use crate::far_view_enum::{EnumVariant, tag_of, tags_of, view_form};
use proc_macro2::TokenStream as Tokens;
use quote::{format_ident, quote};
use syn::{DataEnum, DeriveInput, Error, parse_quote};

pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<Tokens, Error> {
    let (name, view_name, visibility) = (&input.ident, format_ident!("{}ViewMut", input.ident), &input.vis);
    let tag = tag_of(input, data)?;
    if data.variants.is_empty() {
        return Err(Error::new_spanned(name, "a function changes values, and this type has none"));
    }
    let variants: Vec<EnumVariant<'_>> = data.variants.iter().enumerate().map(EnumVariant::new).collect();
    let (lifetime, comparisons) = view_form(data);
    let about = format!("What a function may change of a [`{name}`]: its variant and fields.");
    let view_variants = variants
        .iter()
        .map(|variant| variant.view(|ty| parse_quote!(<#ty as ::farfield::FarViewMut>::ViewMut<'farfield>)));
    let (tags, mirrors) = (tags_of(&variants), variants.iter().map(EnumVariant::mirror));
    let arms: Vec<VariantArms> = variants.iter().map(|variant| VariantArms::new(variant, &view_name)).collect();
    let views = arms.iter().map(|arms| &arms.view);
    let decodings = arms.iter().map(|arms| &arms.decoding);
    let encodings = arms.iter().map(|arms| &arms.encoding);
    let types: Vec<_> = data.variants.iter().flat_map(|variant| &variant.fields).map(|field| &field.ty).collect();
    let message =
        format!("a function changes `{name}` as a whole, and it has far pointers, which must stay as they are");
    Ok(quote! {
        #[doc = #about]
        #[derive(Clone, Copy, Debug #comparisons)]
        #[allow(dead_code, missing_docs)]
        #visibility enum #view_name #lifetime {
            #(#view_variants,)*
        }

        #[allow(clippy::all)]
        const _: () = {
            type FarfieldTag = #tag;
            #(#tags)*
            #(#mirrors)*

            const _: () = ::core::assert!(!(false #(|| <#types as ::farfield::FarViewMut>::OWNS)*), #message);

            // SAFETY: all bytes of a value but its padding change together. The tag comes first, and says which fields
            // there are; each is encoded by its own type, at its own place.
            unsafe impl ::farfield::FarViewMut for #name {
                type ViewMut<'farfield> = #view_name #lifetime;
                const OWNS: bool = false;

                #[inline]
                #[allow(unused_variables)]
                fn view_mut<'farfield>(
                    &self,
                    farfield_loan: ::farfield::view::Loan<'farfield>,
                ) -> Self::ViewMut<'farfield> {
                    // A macro that has changed the type since is refused: all its variants and fields are named here.
                    match self {
                        #(#views)*
                    }
                }

                #[inline]
                fn decode_mut<'farfield>(farfield_bytes: &[u8]) -> ::core::option::Option<Self::ViewMut<'farfield>> {
                    let tag = farfield_bytes.get(..::core::mem::size_of::<FarfieldTag>())?;
                    match <FarfieldTag as ::farfield::FarViewMut>::decode_mut(tag)? {
                        #(#decodings)*
                        // No variant has this tag.
                        _ => ::core::option::Option::None,
                    }
                }

                fn encode(farfield_view: &Self::ViewMut<'_>, farfield_bytes: &mut [u8]) {
                    farfield_bytes.fill(0);
                    match farfield_view {
                        #(#encodings)*
                    }
                }

                #[inline]
                fn patched<'farfield>(
                    _: &Self::ViewMut<'farfield>,
                    farfield_bytes: &[u8],
                ) -> ::core::option::Option<Self::ViewMut<'farfield>> {
                    <Self as ::farfield::FarViewMut>::decode_mut(farfield_bytes)
                }

                fn describe(farfield_at: usize, farfield_fields: &mut ::farfield::view::ViewFields) {
                    farfield_fields.add_whole::<Self>(farfield_at);
                }

                fn add_owned(_: &mut ::farfield::view::OwnedTypes) {}
            }
        };
    })
}

/// Tokens that are emitted for a variant.
struct VariantArms {
    view: Tokens,
    decoding: Tokens,
    encoding: Tokens,
}

impl VariantArms {
    fn new(variant: &EnumVariant<'_>, view_name: &syn::Ident) -> VariantArms {
        let (source, tag) = (&variant.source.ident, &variant.tag);
        let members: Vec<_> = variant.source.fields.members().collect();
        let names: Vec<_> = (0..members.len()).map(|index| format_ident!("farfield_{}", index)).collect();
        let types: Vec<_> = variant.source.fields.iter().map(|field| &field.ty).collect();
        let offsets: Vec<_> = variant.offsets().collect();
        let view = quote! {
            Self::#source { #(#members: #names),* } => #view_name::#source {
                #(#members: <#types as ::farfield::FarViewMut>::view_mut(#names, farfield_loan)),*
            },
        };
        let decoding = quote! {
            #tag => ::core::option::Option::Some(#view_name::#source {
                #(#members: {
                    let at = #offsets;
                    let field = farfield_bytes.get(at..at + ::core::mem::size_of::<#types>())?;
                    <#types as ::farfield::FarViewMut>::decode_mut(field)?
                },)*
            }),
        };
        let encoding = quote! {
            #view_name::#source { #(#members: #names),* } => {
                let tag = &mut farfield_bytes[..::core::mem::size_of::<FarfieldTag>()];
                <FarfieldTag as ::farfield::FarViewMut>::encode(&#tag, tag);
                #({
                    let at = #offsets;
                    let field = &mut farfield_bytes[at..at + ::core::mem::size_of::<#types>()];
                    <#types as ::farfield::FarViewMut>::encode(#names, field);
                })*
            }
        };
        VariantArms { view, decoding, encoding }
    }
}
