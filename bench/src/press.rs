//! What a web front end does with an element of its array: it encrypts it with AES-CBC and packs it with
//! Snappy. As a function, it does that where the array is (Atlas, Figure 8).

use aes::Aes128;
use aes::cipher::block_padding::NoPadding;
use aes::cipher::{BlockModeEncrypt, KeyIvInit};
use farfield::{FarFunction, FarPlace, FarRef, FarVec, Fault};
use std::cell::RefCell;

/// Bytes of an element.
pub const ELEMENT_BYTES: usize = 8192;

/// An element of the array.
pub type Element = [u8; ELEMENT_BYTES];

/// Buffers in which elements are encrypted and packed.
pub struct Press {
    sealed: Vec<u8>,
    packed: Vec<u8>,
    encoder: snap::raw::Encoder,
}

impl Default for Press {
    fn default() -> Press {
        let packed = vec![0; snap::raw::max_compress_len(ELEMENT_BYTES)];
        Press { sealed: vec![0; ELEMENT_BYTES], packed, encoder: snap::raw::Encoder::new() }
    }
}

impl core::fmt::Debug for Press {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Press({} bytes)", self.packed.len())
    }
}

impl Press {
    /// Encrypts and packs an element. Returns the number of packed bytes, to which a byte of them is added.
    pub fn press(&mut self, element: &Element) -> u64 {
        let cipher = cbc::Encryptor::<Aes128>::new(&[0; 16].into(), &[0; 16].into());
        let sealed = cipher.encrypt_padded_b2b::<NoPadding>(element, &mut self.sealed);
        let sealed = sealed.expect("an element is a whole number of blocks");
        let bytes = self.encoder.compress(sealed, &mut self.packed).expect("there is room for what cannot be packed");
        bytes as u64 + u64::from(self.packed[bytes / 2])
    }
}

/// Presses an element of an array.
#[derive(Debug)]
pub struct PressElement;

impl FarFunction for PressElement {
    const NAME: &'static str = "bench.press-element";
    const VERSION: u32 = 1;
    type Root = FarVec<Element>;
    /// Index of the element.
    type Argument = u64;
    type Answer = Option<u64>;

    async fn run<P: FarPlace>(far: &P, array: FarRef<'_, FarVec<Element>>, index: u64) -> Result<Option<u64>, Fault> {
        thread_local! {
            static PRESS: RefCell<Press> = RefCell::default();
        }
        let array = far.follow(array).await?;
        let element = far.item(array, index as usize).await?;
        Ok(element.map(|element| PRESS.with_borrow_mut(|press| press.press(&element))))
    }
}
