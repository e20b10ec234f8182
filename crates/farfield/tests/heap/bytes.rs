//! `FarBytes` and `FarString` are bytes and text, wherever they are. Dangers: bytes of another, of an earlier life, or of nobody.

use crate::common::twin::{Twin, twins};
use crate::common::{MIB, Rng, heap};
use farfield::{FarBytes, FarError, FarString, Heap};

/// Many of them, of all sizes.
struct Texts {
    far: Vec<FarString>,
    near: Vec<String>,
}

fn text(random: &mut Rng) -> String {
    // Mostly short; some of several pages.
    let most = 4 << random.usize(..12);
    let count = random.usize(..most);
    let letter = char::from_u32('a' as u32 + random.usize(..500) as u32).unwrap_or('z');
    std::iter::repeat_n(letter, count).collect()
}

impl Twin for Texts {
    fn filled(heap: &Heap, bytes: u64, random: &mut Rng) -> Self {
        let mut twin = Texts { far: Vec::new(), near: Vec::new() };
        let mut total = 0;
        while total < bytes as usize {
            let text = text(random);
            // What is shorter than a card takes a card.
            total += text.len().max(16);
            twin.far.push(FarString::copy_of(&heap.enter(), &text).unwrap());
            twin.near.push(text);
        }
        twin
    }

    fn step(&mut self, heap: &Heap, random: &mut Rng) {
        let index = random.usize(..self.near.len());
        let (far, near) = (&mut self.far[index], &mut self.near[index]);
        let scope = heap.enter();
        match random.usize(..10) {
            0 => {
                let more = text(random);
                far.push_str(&scope, &more).unwrap();
                near.push_str(&more);
            }
            1 => {
                far.push(&scope, 'ß').unwrap();
                near.push('ß');
            }
            2 => {
                let most = random.usize(..near.len() + 1);
                let len = (0..=most).rev().find(|len| near.is_char_boundary(*len)).unwrap();
                far.truncate(&scope, len).unwrap();
                near.truncate(len);
            }
            4 => {
                let index = random.usize(..near.len() + 1);
                let index = (0..=index).rev().find(|index| near.is_char_boundary(*index)).unwrap();
                let more = text(random);
                far.insert_str(&scope, index, &more).unwrap();
                near.insert_str(index, &more);
                // In a scope of its own: growing twice in one takes more than a scope may count on.
                drop(scope);
                far.insert(&heap.enter(), index, 'é').unwrap();
                near.insert(index, 'é');
            }
            5 => assert_eq!(far.pop(&scope).unwrap(), near.pop()),
            6 if !near.is_empty() => {
                let index = random.usize(..near.len());
                let index = (0..=index).rev().find(|index| near.is_char_boundary(*index)).unwrap();
                assert_eq!(far.remove(&scope, index).unwrap(), near.remove(index));
            }
            // As often as they grow, or they would grow for ever.
            3 | 7 => {
                *near = text(random);
                *far = FarString::copy_of(&scope, near).unwrap();
            }
            _ => assert_eq!(far.get(&scope).unwrap(), near),
        }
        assert_eq!(far.len(), near.len());
    }

    fn compare(&self, heap: &Heap) {
        for (far, near) in self.far.iter().zip(&self.near) {
            assert_eq!(far.get(&heap.enter()).unwrap(), near);
        }
    }
}

twins!(texts, Texts, 3_000);

#[test]
fn bytes_are_changed_in_place() {
    let heap = heap(1);
    let scope = heap.enter();
    let mut bytes = FarBytes::copy_of(&scope, &[7; 5000]).unwrap();
    bytes.get_mut(&scope).unwrap()[4999] = 8;
    assert_eq!(bytes.get(&scope).unwrap()[4998..], [7, 8]);
    bytes.push(&scope, 9).unwrap();
    assert_eq!((bytes.pop(&scope).unwrap(), bytes.pop(&scope).unwrap()), (Some(9), Some(8)));
    bytes.truncate(4);
    assert_eq!(bytes.get(&scope).unwrap(), [7; 4]);
    bytes.clear();
    assert!(bytes.is_empty() && bytes.get(&scope).unwrap().is_empty());
    assert_eq!(bytes.pop(&scope).unwrap(), None);
    assert_eq!(FarBytes::new().get_mut(&scope).unwrap(), []);
    drop(scope);
    heap.verify();
}

#[test]
fn overlong_bytes_are_an_error_and_change_nothing() {
    let heap = heap(1);
    let scope = heap.enter();
    let mut bytes = FarBytes::new();
    let error = loop {
        match bytes.extend_from_slice(&scope, &[3; 10_000]) {
            Ok(()) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FarError::TooLarge { .. }), "{error:?}");
    assert!(bytes.len() >= MIB as usize / 10, "{} bytes", bytes.len());
    let len = bytes.len();
    drop(scope);
    assert_eq!(bytes.get(&heap.enter()).unwrap(), vec![3; len]);
    drop(bytes);
    heap.verify();
}

#[test]
#[should_panic(expected = "1 is inside a character")]
fn text_ends_with_a_character() {
    let heap = heap(1);
    let mut text = FarString::copy_of(&heap.enter(), "ß").unwrap();
    let _ = text.truncate(&heap.enter(), 1);
}

#[test]
fn bytes_outlive_their_heap() {
    let heap = heap(1);
    let bytes = FarBytes::copy_of(&heap.enter(), b"bytes").unwrap();
    drop(heap);
    drop(bytes);
}
