//! An incremental build engine whose graph is far.
//!
//! Texts belong to chapters, and chapters to a book. Each text has a task that counts its words, each
//! chapter one that adds these tables up, and the book one more. When a text is edited, only what
//! depends on it is computed again, and nothing above a table that has not changed. Tasks refer to
//! each other in both directions. No task says when its values can be dropped, and none is told that
//! it is far: values that were replaced, and texts that were removed with their tasks, are collected.
//!
//! ```sh
//! cargo run --release -p farfield-gc --example build_engine -- [EDITS] [POOL]
//! ```

mod engine;

use engine::{Engine, Shape, Table, count_words, text_of};
use farfield::{BuildError, Heap};
use farfield_gc::{GcError, GcHeap, GcStats};

/// Result of a run.
struct Outcome {
    computed: u64,
    stats: GcStats,
    near_bytes: u64,
    misses: u64,
}

/// Fills a book, edits it, and compares it with one that is computed anew from its texts.
fn run(heap: &Heap, gc: &GcHeap, shape: Shape, edits: u64) -> Result<Outcome, GcError> {
    let mut engine = Engine::new(gc, shape)?;
    let mut texts = vec![vec![0; shape.texts]; shape.chapters];
    for (chapter, numbers) in texts.iter_mut().enumerate() {
        for (text, number) in numbers.iter_mut().enumerate() {
            *number = (chapter * shape.texts + text) as u64;
            engine.replace(chapter, text, &text_of(*number, shape.text_bytes))?;
        }
    }
    engine.build()?;
    let mut random = 88_172_645_463_325_252u64;
    for edit in 0..edits {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (chapter, text) = (random as usize % shape.chapters, (random >> 20) as usize % shape.texts);
        let number = &mut texts[chapter][text];
        // One in four edits changes nothing that counts.
        if edit % 4 != 0 {
            *number += 1_000_000;
        }
        let source = text_of(*number, shape.text_bytes);
        if edit % 3 == 0 {
            engine.replace(chapter, text, &source)?;
        } else {
            engine.edit(chapter, text, &source)?;
        }
        if edit % 50 == 0 {
            engine.build()?;
        }
    }
    let built = engine.build()?;
    let mut expected = Table::new();
    for number in texts.iter().flatten() {
        let table = count_words(&text_of(*number, shape.text_bytes));
        table.into_iter().for_each(|(word, count)| *expected.entry(word).or_default() += count);
    }
    assert_eq!(built, expected, "the incremental result is that of a full build");
    let last = shape.texts - 1;
    assert_eq!(engine.neighbours(0, last)?[0], last as u64);
    let far = heap.stats();
    Ok(Outcome { computed: engine.computed, stats: gc.stats(), near_bytes: far.near_bytes, misses: far.misses })
}

fn heap(near: u64, pool: Option<&str>) -> Result<Heap, BuildError> {
    let builder = Heap::builder().near(near).near_max(near);
    pool.into_iter().fold(builder, |builder, pool| builder.pool(pool)).build()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let edits = arguments.next().map_or(Ok(20_000), |text| text.parse())?;
    let pool = arguments.next();
    // 32 MiB of tasks, texts and tables, of which 8 MiB are near.
    let shape = Shape { chapters: 128, texts: 64, text_bytes: 3000 };
    let heap = heap(8 << 20, pool.as_deref())?;
    let gc = GcHeap::in_heap(&heap).limit(56 << 20).build()?;
    let outcome = run(&heap, &gc, shape, edits)?;
    let stats = outcome.stats;
    println!("{} tasks computed for {edits} edits, {} misses", outcome.computed, outcome.misses);
    println!(
        "{} KiB near, {} of {} KiB far",
        outcome.near_bytes >> 10,
        stats.used_bytes >> 10,
        stats.limit_bytes >> 10
    );
    println!(
        "{} collections, the longest {:?}; {} objects live",
        stats.collections, stats.longest_pause, stats.live_objects
    );
    Ok(())
}

#[test]
fn a_quarter_is_near_and_far_memory_is_bounded() {
    let shape = Shape { chapters: 16, texts: 64, text_bytes: 2500 };
    let heap = heap(1 << 20, None).unwrap();
    let gc = GcHeap::in_heap(&heap).limit(8 << 20).build().unwrap();
    let edits = 3000;
    let outcome = run(&heap, &gc, shape, edits).unwrap();
    let tasks = (shape.chapters * shape.texts) as u64;
    let stats = outcome.stats;
    println!("{} computed, {} misses, {stats:?}", outcome.computed, outcome.misses);
    // All once, and then one text for each edit, and some of the tables above it.
    assert!((tasks + edits / 2..tasks + 2 * edits).contains(&outcome.computed));
    assert!(stats.collections > 0 && stats.given_up == 0 && stats.used_bytes <= 8 << 20);
    assert!(outcome.near_bytes <= 1 << 20 && outcome.misses > tasks);
    gc.collect().unwrap();
    assert_eq!(gc.stats().live_objects, 0, "the book was dropped");
    gc.verify().unwrap();
    drop(gc);
    heap.verify();
}
