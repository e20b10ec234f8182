//! `#[derive(FarView)]` for enums with a primitive representation.
//!
//! The layout of such an enum is specified: each variant lies as a `repr(C)` struct of the tag and
//! its fields (RFC 2195). The derive emits that struct, and asks the compiler where its fields are.

use crate::far_view::no_destructor;
use proc_macro2::{Span, TokenStream as Tokens};
use quote::{format_ident, quote};
use syn::{DataEnum, DeriveInput, Error, Ident, Type, Variant, parse_quote};

/// Integer types that can be the tag of an enum.
const TAGS: [&str; 12] = ["u8", "u16", "u32", "u64", "u128", "usize", "i8", "i16", "i32", "i64", "i128", "isize"];

pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<Tokens, Error> {
    let (name, view_name, visibility) = (&input.ident, format_ident!("{}View", input.ident), &input.vis);
    let tag = tag_of(input, data)?;
    if data.variants.is_empty() {
        return Err(Error::new_spanned(name, "a function reads values, and this type has none"));
    }
    let variants: Vec<EnumVariant<'_>> = data.variants.iter().enumerate().map(EnumVariant::new).collect();
    let (lifetime, comparisons) = view_form(data);
    let about = format!(
        "What a function reads of a [`{name}`]: its variant and fields, with far pointers that can be followed."
    );
    let view_variants =
        variants.iter().map(|variant| variant.view(|ty| parse_quote!(<#ty as ::farfield::FarView>::View<'farfield>)));
    let tags = tags_of(&variants);
    let mirrors = variants.iter().map(EnumVariant::mirror);
    let layouts = variants.iter().map(EnumVariant::layout);
    let views = variants.iter().map(|variant| variant.make_view(name, &view_name));
    let decodings = variants.iter().map(|variant| variant.decoding(&view_name));
    let images = variants.iter().map(|variant| variant.image(name));
    let types = data.variants.iter().flat_map(|variant| &variant.fields).map(|field| &field.ty);
    let no_destructor = no_destructor(name);
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

            // SAFETY: each field is `FarView`, and is viewed and decoded by its own type, at its own place. The tag
            // comes first, and says which fields there are.
            unsafe impl ::farfield::FarView for #name {
                type View<'farfield> = #view_name #lifetime;
                const NAME: &'static str = ::core::stringify!(#name);
                const LAYOUT: u64 = ::farfield::view::layout(
                    ::core::stringify!(#name),
                    ::core::mem::size_of::<Self>(),
                    ::core::mem::align_of::<Self>(),
                    &[#(#layouts),*],
                );

                #[inline]
                #[allow(unused_variables)]
                fn view<'farfield>(&self, farfield_loan: ::farfield::view::Loan<'farfield>) -> Self::View<'farfield> {
                    // A macro that has changed the type since is refused: all its variants and fields are named here.
                    match self {
                        #(#views)*
                    }
                }

                #[inline]
                fn decode<'farfield>(
                    farfield_bytes: &[u8],
                    farfield_source: ::farfield::view::ViewSource,
                ) -> ::core::option::Option<Self::View<'farfield>> {
                    let tag = farfield_bytes.get(..::core::mem::size_of::<FarfieldTag>())?;
                    match <FarfieldTag as ::farfield::FarView>::decode(tag, farfield_source)? {
                        #(#decodings)*
                        // No variant has this tag.
                        _ => ::core::option::Option::None,
                    }
                }

                fn write_image(&self, farfield_image: &mut [u8], farfield_tables: &mut ::farfield::view::NearTables) {
                    match self {
                        #(#images)*
                    }
                }

                fn add_pointees(farfield_types: &mut ::farfield::view::ViewTypes) {
                    let _ = &farfield_types;
                    #(<#types as ::farfield::FarView>::add_pointees(farfield_types);)*
                }
            }
        };

        impl<'farfield> ::core::convert::From<&'farfield #name> for ::farfield::FarRef<'farfield, #name> {
            fn from(value: &'farfield #name) -> Self {
                ::farfield::FarRef::near(value)
            }
        }

        #no_destructor
    })
}

/// Returns the lifetime of views, and what more they derive. A view of variants without fields borrows
/// nothing, and has nothing but its variant to compare.
pub(crate) fn view_form(data: &DataEnum) -> (Tokens, Tokens) {
    match data.variants.iter().all(|variant| variant.fields.is_empty()) {
        true => (quote!(), quote!(, PartialEq, Eq)),
        false => (quote!(<'farfield>), quote!()),
    }
}

/// Emits a constant for the tag of each variant.
pub(crate) fn tags_of(variants: &[EnumVariant<'_>]) -> Vec<Tokens> {
    let mut previous = quote!(0);
    let tags = variants.iter().map(|variant| {
        let tag_name = &variant.tag;
        let number = match &variant.source.discriminant {
            Some((_, number)) => quote!(#number),
            None => previous.clone(),
        };
        previous = quote!(#tag_name + 1);
        quote!(const #tag_name: FarfieldTag = #number;)
    });
    tags.collect()
}

/// Returns the type of the enum's tag, which its representation names.
pub(crate) fn tag_of(input: &DeriveInput, data: &DataEnum) -> Result<Ident, Error> {
    let mut tag = None;
    for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("repr")) {
        attribute.parse_nested_meta(|meta| {
            if let Some(name) = meta.path.get_ident().filter(|name| TAGS.iter().any(|tag| *name == tag)) {
                tag = Some(name.clone());
                return Ok(());
            }
            if meta.path.is_ident("C") {
                return Err(meta.error("an enum that a memory server reads has its tag type alone: #[repr(u8)]"));
            }
            if meta.input.peek(syn::token::Paren) {
                let content;
                syn::parenthesized!(content in meta.input);
                content.parse::<Tokens>()?;
            }
            Ok(())
        })?;
    }
    let message = "a memory server cannot rely on where the variants of an enum lie: give it a tag with #[repr(u8)]";
    tag.ok_or_else(|| Error::new_spanned(data.enum_token, message))
}

/// A variant, and the names of what is emitted for it.
pub(crate) struct EnumVariant<'a> {
    pub(crate) source: &'a Variant,
    pub(crate) tag: Ident,
    mirror: Ident,
}

impl<'a> EnumVariant<'a> {
    pub(crate) fn new((index, source): (usize, &'a Variant)) -> EnumVariant<'a> {
        let name = |text: &str| Ident::new(&format!("{text}{index}"), Span::call_site());
        EnumVariant { source, tag: name("FARFIELD_TAG_"), mirror: name("FarfieldVariant") }
    }

    /// Returns the variant of the view, with fields of the types that `view_type` makes of theirs.
    pub(crate) fn view(&self, view_type: impl Fn(&Type) -> Type) -> Tokens {
        let mut view = self.source.clone();
        (view.attrs, view.discriminant) = (Vec::new(), None);
        for field in &mut view.fields {
            (field.ty, field.attrs) = (view_type(&field.ty), Vec::new());
        }
        quote!(#view)
    }

    /// Returns the struct whose layout is that of the variant. The tag is its field 0.
    pub(crate) fn mirror(&self) -> Tokens {
        let (mirror, types) = (&self.mirror, self.source.fields.iter().map(|field| &field.ty));
        quote! {
            #[repr(C)]
            #[allow(dead_code)]
            struct #mirror(FarfieldTag, #(#types),*);
        }
    }

    /// Returns the offset of each field.
    pub(crate) fn offsets(&self) -> impl Iterator<Item = Tokens> {
        let mirror = &self.mirror;
        (1..=self.source.fields.len()).map(move |index| {
            let index = syn::Index::from(index);
            quote!(::core::mem::offset_of!(#mirror, #index))
        })
    }

    /// Returns what both sides must agree on: the name, the tag, and the places of the fields.
    fn layout(&self) -> Tokens {
        let (name, tag, mirror) = (&self.source.ident, &self.tag, &self.mirror);
        let (members, offsets) = (self.source.fields.members(), self.offsets());
        let types = self.source.fields.iter().map(|field| &field.ty);
        quote! {
            (
                ::core::stringify!(#name),
                #tag as usize,
                ::farfield::view::layout(
                    ::core::stringify!(#name),
                    ::core::mem::size_of::<#mirror>(),
                    ::core::mem::align_of::<#mirror>(),
                    &[#((::core::stringify!(#members), #offsets, <#types as ::farfield::FarView>::LAYOUT)),*],
                ),
            )
        }
    }

    /// Returns the arm that makes a view of a value.
    fn make_view(&self, name: &Ident, view_name: &Ident) -> Tokens {
        let variant = &self.source.ident;
        let members: Vec<_> = self.source.fields.members().collect();
        let names: Vec<_> = (0..members.len()).map(|index| format_ident!("farfield_{}", index)).collect();
        let types = self.source.fields.iter().map(|field| &field.ty);
        quote! {
            #name::#variant { #(#members: #names),* } => #view_name::#variant {
                #(#members: <#types as ::farfield::FarView>::view(#names, farfield_loan)),*
            },
        }
    }

    /// Returns the arm that writes the bytes of a value.
    fn image(&self, name: &Ident) -> Tokens {
        let (variant, tag) = (&self.source.ident, &self.tag);
        let members: Vec<_> = self.source.fields.members().collect();
        let names: Vec<_> = (0..members.len()).map(|index| format_ident!("farfield_{}", index)).collect();
        let (types, offsets) = (self.source.fields.iter().map(|field| &field.ty), self.offsets());
        quote! {
            #name::#variant { #(#members: #names),* } => {
                let tag = &mut farfield_image[..::core::mem::size_of::<FarfieldTag>()];
                <FarfieldTag as ::farfield::FarView>::write_image(&#tag, tag, farfield_tables);
                #({
                    let at = #offsets;
                    let field = &mut farfield_image[at..at + ::core::mem::size_of::<#types>()];
                    <#types as ::farfield::FarView>::write_image(#names, field, farfield_tables);
                })*
            }
        }
    }

    /// Returns the arm that makes a view of bytes with the tag.
    fn decoding(&self, view_name: &Ident) -> Tokens {
        let (variant, tag) = (&self.source.ident, &self.tag);
        let (members, offsets) = (self.source.fields.members(), self.offsets());
        let types = self.source.fields.iter().map(|field| &field.ty);
        quote! {
            #tag => ::core::option::Option::Some(#view_name::#variant {
                #(#members: {
                    let at = #offsets;
                    let field = farfield_bytes.get(at..at + ::core::mem::size_of::<#types>())?;
                    <#types as ::farfield::FarView>::decode(field, farfield_source)?
                },)*
            }),
        }
    }
}
