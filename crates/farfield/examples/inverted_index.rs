//! An inverted index, larger than near memory: for each word the lines in which it stands.
//!
//! ```text
//! cargo run --release -p farfield --example inverted_index -- [--near MIB] [--pool URL]… [--text FILE] [WORD]…
//! ```
//!
//! Words are keys of a `FarMap<str, Postings>`; line numbers lie in far blocks that own each other. Without `--text` it takes the German
//! statutes of the text data set (`../shared/data/text/gesetze-de.txt.zst`, read through `zstd`); where they are absent, a
//! small generated text.

use farfield::collections::Entry;
use farfield::{FarBox, FarError, FarMap, Heap, Scope};
use std::io::{BufRead, BufReader, Cursor};
use std::process::{Command, Stdio};
use std::time::Instant;

const DATA: &str = "../shared/data/text/gesetze-de.txt.zst";

/// The lines in which a word stands, the last ones first.
#[derive(Default)]
struct Postings {
    count: u64,
    last: Option<FarBox<Block>>,
}

/// Lines in a row, and those before them.
struct Block {
    before: Option<FarBox<Block>>,
    len: u32,
    lines: [u32; LINES],
}

/// Most words are rare: a small block wastes little, and a common word has many.
const LINES: usize = 13;

/// Words and their postings.
struct Index {
    heap: Heap,
    words: FarMap<str, Postings>,
}

impl Index {
    fn new(heap: Heap) -> Result<Index, Box<dyn std::error::Error>> {
        let words = FarMap::new(&heap)?;
        Ok(Index { heap, words })
    }

    /// The words of a line; how many.
    fn add_line(&mut self, line: &str, number: u32) -> Result<u64, FarError> {
        let mut count = 0;
        for word in line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty() && word.len() <= 100) {
            let word = word.to_lowercase();
            let scope = self.heap.enter();
            let postings = match self.words.entry(&scope, word.as_str())? {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Postings::default())?,
            };
            postings.add(&self.heap, &scope, number)?;
            count += 1;
        }
        Ok(count)
    }

    /// The last lines in which a word stands, latest first, and how often it stands anywhere. (A scope holds what it has seen, so
    /// it is no place to follow all blocks of a common word.)
    fn find(&self, word: &str, most: usize) -> Result<(Vec<u32>, u64), FarError> {
        let scope = self.heap.enter();
        let Some(postings) = self.words.get(&scope, &word.to_lowercase()[..])? else { return Ok((Vec::new(), 0)) };
        let mut lines = Vec::new();
        let mut next = postings.last.as_ref();
        while let Some(block) = next.filter(|_| lines.len() <= most) {
            let block = block.get(&scope)?;
            lines.extend(block.lines[..block.len as usize].iter().rev());
            lines.dedup();
            next = block.before.as_ref();
        }
        lines.truncate(most);
        Ok((lines, postings.count))
    }
}

impl Postings {
    fn add(&mut self, heap: &Heap, scope: &Scope<'_>, line: u32) -> Result<(), FarError> {
        self.count += 1;
        if let Some(last) = &mut self.last {
            let block = last.get_mut(scope)?;
            if let Some(place) = block.lines.get_mut(block.len as usize) {
                *place = line;
                block.len += 1;
                return Ok(());
            }
        }
        let mut lines = [0; LINES];
        lines[0] = line;
        let before = self.last.take();
        match heap.alloc(Block { before, len: 1, lines }) {
            Ok(block) => self.last = Some(block),
            Err(error) => {
                self.last = error.value.before;
                self.count -= 1;
                return Err(error.error);
            }
        }
        Ok(())
    }
}

/// Block by block, as for any long chain of boxes: one destructor inside the other would need a deep stack.
impl Drop for Postings {
    fn drop(&mut self) {
        let mut next = self.last.take();
        while let Some(block) = next {
            // What cannot be had now is dropped later, with all before it.
            next = block.into_inner().ok().and_then(|block| block.before);
        }
    }
}

/// A text that is the same each time: few words are common, many are rare.
fn generated(lines: u32) -> String {
    let mut text = String::new();
    let mut random = fastrand::Rng::with_seed(88);
    for _ in 0..lines {
        for _ in 0..8 {
            let rank = 50_000 / random.u64(1..=50_000) * random.u64(1..=7);
            text.push_str(&format!("word{rank} "));
        }
        text.push('\n');
    }
    text
}

/// The text to read, and what it is.
fn open(file: Option<&str>) -> Result<(Box<dyn BufRead>, String), Box<dyn std::error::Error>> {
    if file.is_none() && !std::fs::exists(DATA)? {
        println!("{DATA} is absent: a small generated text instead");
        return Ok((Box::new(Cursor::new(generated(200_000))), "generated text".to_owned()));
    }
    let file = file.unwrap_or(DATA);
    if !file.ends_with(".zst") {
        return Ok((Box::new(BufReader::new(std::fs::File::open(file)?)), file.to_owned()));
    }
    let zstd = Command::new("zstd").args(["-dc", file]).stdout(Stdio::piped()).spawn();
    let output = zstd.map_err(|error| format!("zstd: {error}"))?.stdout.ok_or("zstd says nothing")?;
    Ok((Box::new(BufReader::new(output)), file.to_owned()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut near, mut file, mut pools, mut wanted) = (16u64, None, Vec::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--near" => near = value()?.parse()?,
            "--text" => file = Some(value()?),
            "--pool" => pools.push(value()?),
            _ => wanted.push(argument),
        }
    }
    let mut builder = Heap::builder().near(near << 20).far(8 << 30);
    for pool in pools {
        builder = builder.pool(pool);
    }
    let mut index = Index::new(builder.build()?)?;
    let (mut text, name) = open(file.as_deref())?;
    let started = Instant::now();
    let (mut bytes, mut line_count, mut word_count) = (0, 0u32, 0);
    let mut line = Vec::new();
    while text.read_until(b'\n', &mut line)? > 0 {
        line_count += 1;
        bytes += line.len();
        word_count += index.add_line(&String::from_utf8_lossy(&line), line_count)?;
        line.clear();
    }
    let (seconds, stats) = (started.elapsed().as_secs_f64(), index.heap.stats());
    println!("{name}: {} MiB, {line_count} lines, {word_count} words, {} different", bytes >> 20, index.words.len());
    println!(
        "indexed in {seconds:.1} s: {} MiB of pages, {} MiB near, {} misses",
        stats.pages >> 8,
        stats.near_bytes >> 20,
        stats.misses
    );
    if wanted.is_empty() {
        wanted = ["gesetz", "bundesrat", "word7"].map(str::to_owned).to_vec();
    }
    for word in wanted {
        let started = Instant::now();
        let (lines, count) = index.find(&word, 5)?;
        println!("{word}: {count} times, last in lines {lines:?} ({} µs)", started.elapsed().as_micros());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Danger: a line that is lost while postings and index grow, and leave.
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_word_has_its_lines() {
        let heap = Heap::builder().near(1 << 20).near_max(1 << 20).far(1 << 30).build().unwrap();
        let mut index = Index::new(heap).unwrap();
        let mut twin: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (number, line) in generated(60_000).lines().enumerate() {
            index.add_line(line, number as u32).unwrap();
            line.split_whitespace().for_each(|word| twin.entry(word.to_owned()).or_default().push(number as u32));
        }
        assert!(index.heap.stats().misses > 0, "{:?}", index.heap.stats());
        assert_eq!(index.words.len(), twin.len() as u64);
        for (word, mut lines) in twin {
            let count = lines.len() as u64;
            lines.reverse();
            lines.dedup();
            lines.truncate(100);
            assert_eq!(index.find(&word, 100).unwrap(), (lines, count), "{word}");
        }
        assert_eq!(index.find("nowhere", 1).unwrap(), (Vec::new(), 0));
        let Index { heap, words } = index;
        drop(words);
        heap.verify();
    }
}
