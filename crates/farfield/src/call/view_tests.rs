//! Guards against a view that differs from its value, and against bytes at a server that become a
//! value which Rust does not have: an enum with a tag of no variant, a `bool` that is 2.

use super::function::{AtServer, FarAnswer, FarFunction};
use super::place::FarPlace;
use super::tests::{argument_of, region_of};
use super::view_traits::{FarRef, ViewSource};
use crate::{FarArc, FarBox, FarView, Heap, Where};
use farfield_wic::{Fault, Sim};

/// An enum without fields, whose numbers are not those that the compiler would give.
#[derive(FarView, Clone, Copy)]
#[repr(i16)]
enum Color {
    Red = -3,
    Green,
    Blue = 700,
}

/// An enum with plain data and with owners.
#[derive(FarView)]
#[repr(u8)]
enum Shape {
    Nothing,
    Circle { radius: f64, color: Color },
    Pair(FarBox<Shape>, [Option<FarBox<Shape>>; 2]) = 9,
    Shared(u16, FarArc<Corner>, bool),
    Wide(u128),
}

#[derive(FarView)]
struct Corner {
    at: (i32, u8),
    mark: Option<char>,
    is_sharp: Option<bool>,
    angle: Option<f32>,
    weight: Option<u64>,
    tiny: Option<u8>,
    large: Option<i128>,
    unit: (),
    colors: [Color; 2],
}

/// Text of all that it finds.
struct TellShape;

impl FarFunction for TellShape {
    const NAME: &'static str = "test.tell_shapes";
    const VERSION: u32 = 1;
    type Root = Shape;
    type Argument = ();
    type Answer = String;

    async fn run<P: FarPlace>(far: &P, root: FarRef<'_, Shape>, _: ()) -> Result<String, Fault> {
        let (mut text, mut left) = (String::new(), vec![root]);
        while let Some(pointer) = left.pop() {
            match far.follow(pointer).await? {
                ShapeView::Nothing => text.push_str("nothing"),
                ShapeView::Circle { radius, color } => text.push_str(&format!("{radius} {color:?}")),
                ShapeView::Pair(first, others) => {
                    text.push_str("pair");
                    left.extend(others.iter().flatten().chain([&first]));
                }
                ShapeView::Shared(number, corner, flag) => {
                    let corner = far.follow(corner).await?;
                    text.push_str(&format!("{number} {flag} {corner:?}"));
                }
                ShapeView::Wide(number) => text.push_str(&number.to_string()),
            }
            text.push_str("; ");
        }
        Ok(text)
    }
}

fn color(random: &mut fastrand::Rng) -> Color {
    [Color::Red, Color::Green, Color::Blue][random.usize(..3)]
}

fn corner(random: &mut fastrand::Rng) -> Corner {
    Corner {
        at: (random.i32(..), random.u8(..)),
        mark: random.bool().then(|| random.char(..)),
        is_sharp: [None, Some(false), Some(true)][random.usize(..3)],
        angle: random.bool().then(|| random.f32()),
        weight: random.bool().then(|| random.u64(..)),
        tiny: random.bool().then(|| random.u8(..)),
        large: random.bool().then(|| random.i128(..)),
        unit: (),
        colors: [color(random), color(random)],
    }
}

/// A random shape, and the text that tells of it.
fn shape(heap: &Heap, random: &mut fastrand::Rng, depth: u32) -> (Shape, String) {
    match random.u32(if depth > 0 { 0..6 } else { 0..4 }) {
        0 => (Shape::Nothing, "nothing; ".into()),
        1 => {
            let (radius, color) = (random.f64(), color(random));
            let name = match color {
                Color::Red => "Red",
                Color::Green => "Green",
                Color::Blue => "Blue",
            };
            (Shape::Circle { radius, color }, format!("{radius} {name}; "))
        }
        2 => {
            let number = random.u128(..);
            (Shape::Wide(number), format!("{number}; "))
        }
        3 => {
            let (number, flag, corner) = (random.u16(..), random.bool(), corner(random));
            let Corner { at, mark, is_sharp, angle, weight, tiny, large, unit, colors } = &corner;
            let colors = colors.map(|color| match color {
                Color::Red => ColorView::Red,
                Color::Green => ColorView::Green,
                Color::Blue => ColorView::Blue,
            });
            let text = format!(
                "{number} {flag} CornerView {{ at: {at:?}, mark: {mark:?}, is_sharp: {is_sharp:?}, angle: {angle:?}, \
                 weight: {weight:?}, tiny: {tiny:?}, large: {large:?}, unit: {unit:?}, colors: {colors:?} }}; "
            );
            (Shape::Shared(number, heap.alloc_shared(corner).unwrap(), flag), text)
        }
        _ => {
            let mut text = String::from("pair; ");
            let mut part = || {
                let (shape, of_shape) = shape(heap, random, depth - 1);
                text.push_str(&of_shape);
                heap.alloc(shape).unwrap()
            };
            let first = part();
            // What comes last is told of first.
            let second = part();
            (Shape::Pair(first, [None, Some(second)]), text)
        }
    }
}

#[test]
fn enums_options_and_tuples_are_read_alike_in_the_heap_and_over_its_bytes() {
    let heap = Heap::builder().near(2 << 20).far(1 << 30).build().unwrap();
    let mut random = fastrand::Rng::with_seed(3907);
    for round in 0..60 {
        let (root, expected) = shape(&heap, &mut random, 5);
        let root = heap.alloc(root).unwrap();
        assert_eq!(heap.call::<TellShape>(&root, ()).at(Where::Client).run().as_deref(), Ok(&*expected));
        let bytes = region_of(&heap);
        let there = Sim::new(round, bytes).run_one::<AtServer<TellShape>>(argument_of(&heap, FarRef::from(&root), ()));
        assert!(matches!(&there, Ok(FarAnswer::Done(there)) if *there == expected), "{there:?}, not {expected}");
    }
}

#[test]
fn a_tag_of_no_variant_is_no_value() {
    for number in i16::MIN..=i16::MAX {
        let expected = match number {
            -3 => Some(ColorView::Red),
            -2 => Some(ColorView::Green),
            700 => Some(ColorView::Blue),
            _ => None,
        };
        assert_eq!(Color::decode(&number.to_ne_bytes(), ViewSource::Region), expected, "{number}");
    }
    let mut bytes = [0; size_of::<Shape>()];
    for tag in 0..=u8::MAX {
        // The bytes of an owner and of a color are zero, which is no pointer, and no color.
        bytes[0] = tag;
        assert_eq!(Shape::decode(&bytes, ViewSource::Region).is_some(), [0, 11].contains(&tag), "{tag}");
    }
    assert!(Shape::decode(&[], ViewSource::Region).is_none() && Color::decode(&[0], ViewSource::Region).is_none());
}

#[test]
fn random_bytes_become_values_or_nothing() {
    fn check<T: FarView>(random: &mut fastrand::Rng) {
        let mut decoded = 0;
        for _ in 0..20_000 {
            let mut bytes = vec![0; size_of::<T>()];
            random.fill(&mut bytes);
            for byte in &mut bytes {
                // Small bytes are tags more often.
                *byte = if random.bool() { *byte } else { random.u8(..3) };
            }
            if let Some(view) = T::decode(&bytes, ViewSource::Region) {
                decoded += 1;
                assert!(!format!("{view:?}").is_empty());
            }
            let cut = random.usize(..bytes.len());
            assert!(
                T::decode(&bytes[..cut], ViewSource::Region).is_none() || size_of::<T>() == 0,
                "{cut} of {} bytes",
                bytes.len()
            );
        }
        println!("{}: {decoded} of 20000 were values", T::NAME);
    }
    let mut random = fastrand::Rng::with_seed(3908);
    check::<Corner>(&mut random);
    check::<(bool, char, [Option<bool>; 3])>(&mut random);
    check::<Option<char>>(&mut random);
    check::<Option<u128>>(&mut random);
    check::<[Color; 4]>(&mut random);
}
