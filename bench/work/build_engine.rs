//! An incremental build engine whose texts are edited: tables of words of texts, of chapters and of
//! a book. In a collected heap it is the example `build_engine` of `farfield-gc`; with std's types
//! it is what one writes with `Arc` and `Weak`. Tables are bytes in both.
//!
//! Texts are made up; with `real = 1` they are passages of the law ([`real`]), and an edit puts one
//! of another place into the second half of a text.

#[path = "../../crates/gc/examples/build_engine/engine.rs"]
mod engine;

use crate::collected::{collected, figures_of_collections};
use crate::random::{Random, mix};
use crate::{Options, Outcome, figures_since, real};
use anyhow::{Result, ensure};
use engine::{Engine, Shape, Table, add_table, count_words, encode, text_of, words};
use farfield_gc::GcError;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Texts of a chapter.
const TEXTS: usize = 64;
const TEXT_BYTES: usize = 3000;
/// Edits after which the book is brought up to date.
const EDITS_PER_BUILD: u64 = 50;

/// What a text takes, with its task, its table, and its part of the chapter's and the book's tables.
struct TextBytes {
    plain: u64,
    collected: u64,
}

const MADE: TextBytes = TextBytes { plain: 4500, collected: 4350 };
/// Real texts have more different words. Of the plain program, half are tables while they are added up.
const REAL: TextBytes = TextBytes { plain: 11_000, collected: 7300 };

/// What is asked of an engine.
trait BuildEngine {
    /// Puts a text in place, with a new task.
    fn replace(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError>;
    /// Changes a text in place.
    fn edit(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError>;
    /// Brings everything up to date, and returns the table of the book.
    fn build(&mut self) -> Result<Table, GcError>;
    /// Returns the keys of a text and of those that were computed before it, as far as their tasks exist.
    fn neighbours(&mut self, chapter: usize, text: usize) -> Result<Vec<u64>, GcError>;
    /// Returns how many tasks were computed.
    fn computed(&self) -> u64;
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let bytes = if options.real == 1 { REAL } else { MADE };
    let chapters = (options.data_bytes() / bytes.plain / TEXTS as u64).max(1) as usize;
    let shape = Shape { chapters, texts: TEXTS, text_bytes: TEXT_BYTES };
    let live_bytes = (chapters * TEXTS) as u64 * bytes.collected;
    match collected(options, live_bytes)? {
        None => use_engine(options, shape, &mut PlainEngine::new(shape)),
        Some((heap, gc)) => {
            let before = heap.stats();
            let mut outcome = use_engine(options, shape, &mut Engine::new(&gc, shape)?)?;
            figures_since(&mut outcome, &before, &heap.stats(), options.ops, 0);
            figures_of_collections(&mut outcome, &gc);
            Ok(outcome)
        }
    }
}

/// What becomes of a text.
struct Edit {
    at: (usize, usize),
    is_replaced: bool,
    source: Vec<u8>,
}

/// Texts as they are now, by their versions, and what is to be found in them.
struct Texts {
    /// The law, if texts are passages of it.
    file: Option<(File, u64)>,
    seed: u64,
    text_bytes: usize,
    /// Version and number of words of each.
    texts: Vec<(u64, u64)>,
    /// Words of all.
    words: u64,
}

impl Texts {
    fn new(options: &Options, shape: Shape) -> Result<Texts> {
        let count = shape.chapters * shape.texts;
        let mut file = None;
        if options.real == 1 {
            let law = real::open(real::TEXT)?.into_inner();
            let passages = law.metadata()?.len() / shape.text_bytes as u64;
            ensure!(count as u64 <= passages, "the text has {passages} passages, and --data-mib asks for {count}");
            file = Some((law, passages));
        }
        let text_bytes = shape.text_bytes;
        Ok(Texts { file, seed: options.seed, text_bytes, texts: vec![(0, 0); count], words: 0 })
    }

    /// Returns a text in the version that it has.
    fn source(&mut self, number: usize) -> Result<Vec<u8>> {
        let ((version, before), bytes) = (self.texts[number], self.text_bytes);
        let own = mix(self.seed ^ number as u64 ^ version << 32);
        let source = match &self.file {
            None => text_of(own, bytes),
            Some((file, passages)) => {
                let mut source = vec![0; bytes];
                file.read_exact_at(&mut source, (number * bytes) as u64)?;
                if version > 0 {
                    file.read_exact_at(&mut source[bytes / 2..], own % passages * bytes as u64)?;
                }
                source
            }
        };
        let words = words(&source).count() as u64;
        self.words = self.words + words - before;
        self.texts[number].1 = words;
        Ok(source)
    }

    /// Makes up the edit of this number.
    fn edit(&mut self, edit: u64, random: &mut Random) -> Result<Edit> {
        let number = random.below(self.texts.len() as u64) as usize;
        // One in four edits changes nothing that counts.
        self.texts[number].0 += u64::from(!edit.is_multiple_of(4));
        let at = (number / TEXTS, number % TEXTS);
        Ok(Edit { at, is_replaced: edit.is_multiple_of(3), source: self.source(number)? })
    }
}

/// What builds have found.
#[derive(Default)]
struct Found {
    sum: u64,
    errors: u64,
}

impl Found {
    /// Adds a book's table, which has this many words in all.
    fn add(&mut self, table: &Table, words: u64) {
        let count: u64 = table.values().map(|count| u64::from(*count)).sum();
        self.errors += u64::from(count != words);
        for (word, count) in table {
            let hash = word.iter().fold(u64::from(*count), |hash, byte| mix(hash ^ u64::from(*byte)));
            self.sum = self.sum.wrapping_add(hash);
        }
        self.sum = mix(self.sum);
    }
}

fn use_engine(options: &Options, shape: Shape, engine: &mut impl BuildEngine) -> Result<Outcome> {
    let (mut outcome, mut found) = (Outcome::new(), Found::default());
    let mut texts = Texts::new(options, shape)?;
    for chapter in 0..shape.chapters {
        let sources: Vec<_> = (0..TEXTS).map(|text| texts.source(chapter * TEXTS + text)).collect::<Result<_>>()?;
        outcome.phase("fill", TEXTS as u64, || {
            sources.iter().enumerate().try_for_each(|(text, source)| engine.replace(chapter, text, source))
        })?;
    }
    let table = outcome.phase("fill", 0, || engine.build())?;
    found.add(&table, texts.words);
    let mut random = Random::new(options.seed);
    for first in (0..options.ops).step_by(EDITS_PER_BUILD as usize) {
        let numbers = first..options.ops.min(first + EDITS_PER_BUILD);
        let edits: Vec<_> = numbers.map(|number| texts.edit(number, &mut random)).collect::<Result<_>>()?;
        let table = outcome.phase("edits", edits.len() as u64, || {
            for Edit { at: (chapter, text), is_replaced, source } in &edits {
                match is_replaced {
                    true => engine.replace(*chapter, *text, source)?,
                    false => engine.edit(*chapter, *text, source)?,
                }
            }
            engine.build()
        })?;
        found.add(&table, texts.words);
    }
    // Tasks that were replaced are collected at some time.
    let last = TEXTS - 1;
    found.errors += u64::from(engine.neighbours(0, last)?.first() != Some(&(last as u64)));
    outcome.checked(mix(found.sum) ^ engine.computed(), found.errors);
    outcome.figure("computed", engine.computed() as f64);
    Ok(outcome)
}

impl BuildEngine for Engine<'_> {
    fn replace(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        Engine::replace(self, chapter, text, source)
    }

    fn edit(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        Engine::edit(self, chapter, text, source)
    }

    fn build(&mut self) -> Result<Table, GcError> {
        Engine::build(self)
    }

    fn neighbours(&mut self, chapter: usize, text: usize) -> Result<Vec<u64>, GcError> {
        Engine::neighbours(self, chapter, text)
    }

    fn computed(&self) -> u64 {
        self.computed
    }
}

/// As threads could share it.
struct PlainTask {
    key: u64,
    changed: AtomicU64,
    verified: AtomicU64,
    value: Mutex<Option<Arc<[u8]>>>,
    source: Mutex<Option<Arc<[u8]>>>,
    deps: Box<[Mutex<Option<Arc<PlainTask>>>]>,
    parent: Weak<PlainTask>,
    before: Weak<PlainTask>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PlainTask {
    fn new(key: u64, deps: usize, parent: Weak<PlainTask>, before: Weak<PlainTask>) -> PlainTask {
        let (changed, verified, value, source) = Default::default();
        let deps = (0..deps).map(|_| Mutex::default()).collect();
        PlainTask { key, changed, verified, value, source, deps, parent, before }
    }

    fn dep(&self, at: usize) -> Arc<PlainTask> {
        lock(&self.deps[at]).clone().unwrap_or_else(|| unreachable!("every task has what the engine has given it"))
    }

    fn value(&self) -> Arc<[u8]> {
        lock(&self.value).clone().unwrap_or_else(|| unreachable!("it was computed before"))
    }

    fn changed(&self) -> u64 {
        self.changed.load(Ordering::Relaxed)
    }

    fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Relaxed) > 0
    }
}

struct PlainEngine {
    book: Arc<PlainTask>,
    revision: u64,
    computed: u64,
}

impl PlainEngine {
    fn new(shape: Shape) -> PlainEngine {
        let book = Arc::new(PlainTask::new(0, shape.chapters, Weak::new(), Weak::new()));
        for chapter in 0..shape.chapters {
            let task = PlainTask::new(1 + chapter as u64, shape.texts, Arc::downgrade(&book), Weak::new());
            *lock(&book.deps[chapter]) = Some(Arc::new(task));
        }
        PlainEngine { book, revision: 1, computed: 0 }
    }

    fn finish(&mut self, task: &PlainTask, new: &[u8]) {
        self.computed += 1;
        let mut value = lock(&task.value);
        if value.as_deref() != Some(new) {
            *value = Some(new.into());
            task.changed.store(self.revision, Ordering::Relaxed);
        }
        task.verified.store(self.revision, Ordering::Relaxed);
    }

    fn build_text(&mut self, task: &PlainTask) -> u64 {
        if !task.is_verified() {
            let source = lock(&task.source).clone().unwrap_or_default();
            self.finish(task, &encode(&count_words(&source)));
        }
        task.changed()
    }

    fn build_chapter(&mut self, task: &PlainTask) {
        if task.is_verified() {
            return;
        }
        let has_value = lock(&task.value).is_some();
        let newest = (0..task.deps.len()).fold(0, |newest, text| newest.max(self.build_text(&task.dep(text))));
        if has_value && newest <= task.changed() {
            task.verified.store(self.revision, Ordering::Relaxed);
            return;
        }
        let mut table = Table::new();
        (0..task.deps.len()).for_each(|text| add_table(&mut table, &task.dep(text).value()));
        self.finish(task, &encode(&table));
    }
}

impl BuildEngine for PlainEngine {
    fn replace(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        self.revision += 1;
        let chapter = self.book.dep(chapter);
        let before = text.checked_sub(1).and_then(|before| lock(&chapter.deps[before]).as_ref().map(Arc::downgrade));
        let task = PlainTask::new(text as u64, 0, Arc::downgrade(&chapter), before.unwrap_or_default());
        task.changed.store(self.revision, Ordering::Relaxed);
        *lock(&task.source) = Some(source.into());
        *lock(&chapter.deps[text]) = Some(Arc::new(task));
        chapter.verified.store(0, Ordering::Relaxed);
        self.book.verified.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn edit(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        self.revision += 1;
        let task = self.book.dep(chapter).dep(text);
        *lock(&task.source) = Some(source.into());
        let mut stale = Some(task);
        while let Some(task) = stale {
            task.verified.store(0, Ordering::Relaxed);
            stale = task.parent.upgrade();
        }
        Ok(())
    }

    fn build(&mut self) -> Result<Table, GcError> {
        let book = self.book.clone();
        if !book.is_verified() {
            let mut table = Table::new();
            for chapter in 0..book.deps.len() {
                let chapter = book.dep(chapter);
                self.build_chapter(&chapter);
                add_table(&mut table, &chapter.value());
            }
            self.finish(&book, &encode(&table));
        }
        let mut table = Table::new();
        add_table(&mut table, &book.value());
        Ok(table)
    }

    fn neighbours(&mut self, chapter: usize, text: usize) -> Result<Vec<u64>, GcError> {
        let mut keys = Vec::new();
        let mut at = Some(self.book.dep(chapter).dep(text));
        while let Some(task) = at {
            keys.push(task.key);
            at = task.before.upgrade();
        }
        Ok(keys)
    }

    fn computed(&self) -> u64 {
        self.computed
    }
}
