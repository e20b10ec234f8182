//! The engine: the graph of tasks in a collected heap, and what brings it up to date.

use farfield_gc::{Atom, Bytes, FarObject, Gc, GcError, GcHeap, Mutator, Ref, Root, WeakRef};
use std::collections::BTreeMap;

/// Task of the graph, with the value that it has computed last.
#[derive(FarObject)]
pub(crate) struct Task {
    key: u64,
    /// Revision in which the value has changed last.
    changed: Atom<u64>,
    /// Revision in which the value was known to be right.
    verified: Atom<u64>,
    value: Ref<Bytes>,
    /// Text of a task without dependencies.
    source: Ref<Bytes>,
    deps: Ref<[Ref<Task>]>,
    /// Task that depends on this one: a cycle with `deps`.
    parent: Ref<Task>,
    /// Neighbour that was computed before this one, if it still exists.
    before: WeakRef<Task>,
}

impl Task {
    fn new(key: u64) -> Task {
        Task {
            key,
            changed: Atom::new(0),
            verified: Atom::new(0),
            value: Ref::null(),
            source: Ref::null(),
            deps: Ref::null(),
            parent: Ref::null(),
            before: WeakRef::null(),
        }
    }
}

/// Sizes of a graph, in tasks and bytes.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) chapters: usize,
    /// Texts of each chapter.
    pub(crate) texts: usize,
    pub(crate) text_bytes: usize,
}

/// Engine: its root is the only thing that it keeps outside of the heap.
pub(crate) struct Engine<'gc> {
    m: Mutator<'gc>,
    book: Root<Task>,
    shape: Shape,
    revision: u64,
    /// Tasks that were computed.
    pub(crate) computed: u64,
}

/// Table of words and how often each occurs, as tasks keep it.
pub(crate) type Table = BTreeMap<Vec<u8>, u32>;

pub(crate) fn encode(table: &Table) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (word, count) in table {
        bytes.push(word.len() as u8);
        bytes.extend(word);
        bytes.extend(count.to_le_bytes());
    }
    bytes
}

pub(crate) fn add_table(table: &mut Table, mut bytes: &[u8]) {
    while let Some((len, rest)) = bytes.split_first() {
        let (word, rest) = rest.split_at(usize::from(*len));
        let (count, rest) = rest.split_at(4);
        *table.entry(word.to_vec()).or_default() += u32::from_le_bytes([count[0], count[1], count[2], count[3]]);
        bytes = rest;
    }
}

pub(crate) fn count_words(text: &[u8]) -> Table {
    let mut table = Table::new();
    for word in words(text) {
        *table.entry(word.to_vec()).or_default() += 1;
    }
    table
}

/// Returns the words of a text. One of more than 255 bytes counts as several, because a table has a
/// byte for the length.
pub(crate) fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    words.flat_map(|word| word.chunks(usize::from(u8::MAX)))
}

/// Makes the text of this number. Texts of the same number are the same.
pub(crate) fn text_of(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut text = Vec::with_capacity(bytes);
    while text.len() + 8 < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        text.extend(format!("w{} ", state % 150).bytes());
    }
    text
}

fn nothing() -> GcError {
    unreachable!("every task has what the engine has given it")
}

impl<'gc> Engine<'gc> {
    /// Makes a book of chapters without texts.
    pub(crate) fn new(gc: &'gc GcHeap, shape: Shape) -> Result<Engine<'gc>, GcError> {
        let m = gc.enter();
        let book = m.root(m.alloc(Task::new(0))?);
        {
            let task = m.get(&book)?;
            let chapters = m.alloc_array(shape.chapters, |_| Ref::null())?;
            task.deps.store(&m, Some(chapters));
        }
        let mut engine = Engine { m, book, shape, revision: 1, computed: 0 };
        for chapter in 0..shape.chapters {
            engine.m.safepoint()?;
            let m = &engine.m;
            let (book, task) = (m.get(&engine.book)?, m.alloc(Task::new(1 + chapter as u64))?);
            task.parent.store(m, Some(book));
            let texts = m.alloc_array(shape.texts, |_| Ref::null())?;
            task.deps.store(m, Some(texts));
            book.deps.load(m)?.ok_or_else(nothing)?[chapter].store(m, Some(task));
        }
        Ok(engine)
    }

    fn chapter(&self, chapter: usize) -> Result<Gc<'_, Task>, GcError> {
        let chapters = self.m.get(&self.book)?.deps.load(&self.m)?.ok_or_else(nothing)?;
        chapters[chapter].load(&self.m)?.ok_or_else(nothing)
    }

    /// Puts a text in place, with a new task. The task that was there is unreachable.
    pub(crate) fn replace(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        self.m.safepoint_for(source.len() + 512)?;
        self.revision += 1;
        let (m, chapter) = (&self.m, self.chapter(chapter)?);
        let texts = chapter.deps.load(m)?.ok_or_else(nothing)?;
        let task = m.alloc(Task::new(text as u64))?;
        task.changed.set(self.revision);
        task.source.store(m, Some(m.alloc_copy(source)?));
        task.parent.store(m, Some(chapter));
        if let Some(before) = text.checked_sub(1) {
            task.before.store(m, texts[before].load(m)?)?;
        }
        texts[text].store(m, Some(task));
        chapter.verified.set(0);
        m.get(&self.book)?.verified.set(0);
        Ok(())
    }

    /// Changes a text in place.
    pub(crate) fn edit(&mut self, chapter: usize, text: usize, source: &[u8]) -> Result<(), GcError> {
        self.m.safepoint_for(source.len() + 64)?;
        self.revision += 1;
        let m = &self.m;
        let texts = self.chapter(chapter)?.deps.load(m)?.ok_or_else(nothing)?;
        let task = texts[text].load(m)?.ok_or_else(nothing)?;
        task.source.store(m, Some(m.alloc_copy(source)?));
        // What depends on it is looked at again.
        let mut stale = Some(task);
        while let Some(task) = stale {
            task.verified.set(0);
            stale = task.parent.load(m)?;
        }
        Ok(())
    }

    /// Stores a value, unless it is the one that the task has.
    fn finish(&mut self, task: &Root<Task>, value: &[u8]) -> Result<(), GcError> {
        self.computed += 1;
        self.m.safepoint_for(value.len() + 64)?;
        let m = &self.m;
        let task = m.get(task)?;
        if task.value.load(m)?.as_deref() != Some(value) {
            task.value.store(m, Some(m.alloc_copy(value)?));
            task.changed.set(self.revision);
        }
        task.verified.set(self.revision);
        Ok(())
    }

    /// Brings one text's task up to date, and returns the revision in which it changed.
    fn build_text(&mut self, chapter: usize, text: usize) -> Result<u64, GcError> {
        self.m.safepoint()?;
        let (task, value) = {
            let m = &self.m;
            let texts = self.chapter(chapter)?.deps.load(m)?.ok_or_else(nothing)?;
            let task = texts[text].load(m)?.ok_or_else(nothing)?;
            if task.verified.get() > 0 {
                return Ok(task.changed.get());
            }
            let source = task.source.load(m)?.ok_or_else(nothing)?;
            (m.root(task), encode(&count_words(&source)))
        };
        self.finish(&task, &value)?;
        Ok(self.m.get(&task)?.changed.get())
    }

    /// Brings a chapter's task up to date, and returns the revision in which it changed.
    fn build_chapter(&mut self, chapter: usize) -> Result<u64, GcError> {
        self.m.safepoint()?;
        let (task, verified, has_value) = {
            let task = self.chapter(chapter)?;
            (self.m.root(task), task.verified.get(), !task.value.is_null())
        };
        if verified > 0 {
            return Ok(self.m.get(&task)?.changed.get());
        }
        let mut newest = 0;
        for text in 0..self.shape.texts {
            newest = newest.max(self.build_text(chapter, text)?);
        }
        if has_value && newest <= self.m.get(&task)?.changed.get() {
            // No text's table has changed.
            let task = self.m.get(&task)?;
            task.verified.set(self.revision);
            return Ok(task.changed.get());
        }
        let mut table = Table::new();
        for text in 0..self.shape.texts {
            self.m.safepoint()?;
            let m = &self.m;
            let texts = m.get(&task)?.deps.load(m)?.ok_or_else(nothing)?;
            let text = texts[text].load(m)?.ok_or_else(nothing)?;
            add_table(&mut table, &text.value.load(m)?.ok_or_else(nothing)?);
        }
        self.finish(&task, &encode(&table))?;
        Ok(self.m.get(&task)?.changed.get())
    }

    /// Brings the whole graph up to date, and returns the table of the book.
    pub(crate) fn build(&mut self) -> Result<Table, GcError> {
        if self.m.get(&self.book)?.verified.get() == 0 {
            let mut table = Table::new();
            for chapter in 0..self.shape.chapters {
                self.build_chapter(chapter)?;
                let task = self.chapter(chapter)?;
                add_table(&mut table, &task.value.load(&self.m)?.ok_or_else(nothing)?);
            }
            let book = self.book.clone();
            self.finish(&book, &encode(&table))?;
        }
        self.m.safepoint()?;
        let mut table = Table::new();
        add_table(&mut table, &self.m.get(&self.book)?.value.load(&self.m)?.ok_or_else(nothing)?);
        Ok(table)
    }

    /// Returns the keys of the tasks that were computed before this text's, as far as they exist.
    pub(crate) fn neighbours(&mut self, chapter: usize, text: usize) -> Result<Vec<u64>, GcError> {
        self.m.safepoint()?;
        let m = &self.m;
        let texts = self.chapter(chapter)?.deps.load(m)?.ok_or_else(nothing)?;
        let mut keys = Vec::new();
        let mut at = texts[text].load(m)?;
        while let Some(task) = at {
            keys.push(task.key);
            at = task.before.load(m)?;
        }
        Ok(keys)
    }
}
