//! Word count by map and reduce (Atlas, Figure 4: Metis). *Map*: a text is read in order, and each word of it looked up in a table and
//! counted; *reduce*: all words of the table are read, and the most frequent ones kept.
//!
//! The text is made up: words by Zipf's law, as in any language. With `real = 1` it is that of the law ([`real`]).

use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, Outcome, course, figures_since, real};
use anyhow::{Context, Result};
use farfield::collections::Index;
use farfield::{FarError, FarMap, FarVec, Heap, Scope};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::Read;

/// Of the text that is looked at in one scope, each word of which may bring a page.
const RUN: usize = 256;
/// Words that are kept.
const MOST_FREQUENT: usize = 100;
/// Of the plain program: a word of the table.
const BYTES_PER_WORD: u64 = 80;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    // Real text has fewer different words.
    let eighths = if options.real == 1 { 5 } else { 3 };
    let bytes = (options.data_bytes() * eighths / 8) as usize;
    match options.heap(0)? {
        None => count(options, bytes, &mut Near { text: Vec::with_capacity(bytes), table: HashMap::new() }),
        Some(heap) => course::followed(options, &heap, || {
            let before = heap.stats();
            let table = FarMap::builder().index(Index::Far).build(&heap)?;
            let mut outcome = count(options, bytes, &mut Far { heap: &heap, text: FarVec::new(), table })?;
            figures_since(&mut outcome, &before, &heap.stats(), bytes as u64, 0);
            Ok(outcome)
        }),
    }
}

/// Text and table.
trait Job {
    fn push(&mut self, text: &[u8]) -> Result<()>;
    /// Counts all words.
    fn map(&mut self) -> Result<()>;
    /// Shows each word and how often it is in the text.
    fn reduce(&self, see: impl FnMut(&[u8], u64)) -> Result<()>;
}

fn count(options: &Options, bytes: usize, job: &mut impl Job) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let words = outcome.phase("fill", bytes as u64, || fill(options, bytes, job))?;
    let mut found = Found::default();
    outcome.phase("count", words, || {
        job.map()?;
        job.reduce(|word, count| found.add(word, count))
    })?;
    found.keep_most();
    outcome.figure("different_words", found.different as f64);
    outcome.checked(found.checksum(), found.words.abs_diff(words));
    Ok(outcome)
}

/// What the table says.
#[derive(Default)]
struct Found {
    words: u64,
    different: u64,
    /// Of all words and their counts, in any order.
    sum: u64,
    most: Vec<(Reverse<u64>, Box<[u8]>)>,
    /// Who is below is not among them.
    least: u64,
}

impl Found {
    fn add(&mut self, word: &[u8], count: u64) {
        self.words += count;
        self.different += 1;
        self.sum = self.sum.wrapping_add(word.iter().fold(count, |hash, byte| mix(hash ^ u64::from(*byte))));
        if count >= self.least {
            self.most.push((Reverse(count), word.into()));
        }
        if self.most.len() == 2 * MOST_FREQUENT {
            self.keep_most();
        }
    }

    fn keep_most(&mut self) {
        self.most.sort_unstable();
        self.most.truncate(MOST_FREQUENT);
        self.least = self.most.get(MOST_FREQUENT - 1).map_or(0, |(least, _)| least.0);
    }

    fn checksum(&self) -> u64 {
        self.most.iter().fold(self.sum, |checksum, (Reverse(count), _)| mix(checksum ^ count))
    }
}

/// Puts the text in; how many words it has.
fn fill(options: &Options, bytes: usize, job: &mut impl Job) -> Result<u64> {
    let mut text = source(options)?;
    let mut piece = vec![0; 1 << 16];
    let (mut left, mut words, mut is_inside) = (bytes, 0, false);
    while left > 0 {
        let piece = &mut piece[..left.min(1 << 16)];
        text.read_exact(piece).context("the text is too short")?;
        for byte in piece.iter() {
            words += u64::from(!is_inside && !byte.is_ascii_whitespace());
            is_inside = !byte.is_ascii_whitespace();
        }
        job.push(piece)?;
        left -= piece.len();
    }
    Ok(words)
}

fn source(options: &Options) -> Result<Box<dyn Read>> {
    if options.real == 0 {
        // As many words as are expected to have room; rare ones will not come.
        let zipf = Zipf::new(options.data_bytes() / BYTES_PER_WORD, 1.0);
        return Ok(Box::new(MadeUp { zipf, random: Random::new(options.seed), word: Vec::new() }));
    }
    Ok(Box::new(real::open(real::TEXT)?))
}

/// Words by Zipf's law.
struct MadeUp {
    zipf: Zipf,
    random: Random,
    /// What is left of the one that is being read.
    word: Vec<u8>,
}

impl Read for MadeUp {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.word.is_empty() {
            let rank = self.zipf.sample(&mut self.random) + 1;
            let letters = 2 + u64::from(rank.ilog2()) / 2;
            self.word.extend((0..letters).map(|at| b'a' + (mix(rank ^ at << 40) % 26) as u8));
            self.word.push(b' ');
        }
        let count = into.len().min(self.word.len());
        into[..count].copy_from_slice(&self.word[..count]);
        self.word.drain(..count);
        Ok(count)
    }
}

/// Shows the words of a text that is read in pieces.
#[derive(Default)]
struct Words {
    /// One that goes on in the next piece.
    open: Vec<u8>,
}

impl Words {
    fn piece(&mut self, mut text: &[u8], mut see: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        while let Some(end) = text.iter().position(u8::is_ascii_whitespace) {
            let word = &text[..end];
            text = &text[end + 1..];
            if self.open.is_empty() {
                if !word.is_empty() {
                    see(word)?;
                }
            } else {
                self.open.extend_from_slice(word);
                see(&self.open)?;
                self.open.clear();
            }
        }
        self.open.extend_from_slice(text);
        Ok(())
    }

    fn end(&mut self, see: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.piece(b" ", see)
    }
}

struct Near {
    text: Vec<u8>,
    table: HashMap<Box<[u8]>, u64>,
}

impl Job for Near {
    fn push(&mut self, text: &[u8]) -> Result<()> {
        self.text.extend_from_slice(text);
        Ok(())
    }

    fn map(&mut self) -> Result<()> {
        let mut see = |word: &[u8]| {
            match self.table.get_mut(word) {
                Some(count) => *count += 1,
                None => drop(self.table.insert(word.into(), 1)),
            }
            Ok(())
        };
        let mut words = Words::default();
        words.piece(&self.text, &mut see)?;
        words.end(&mut see)
    }

    fn reduce(&self, mut see: impl FnMut(&[u8], u64)) -> Result<()> {
        self.table.iter().for_each(|(word, count)| see(word, *count));
        Ok(())
    }
}

struct Far<'a> {
    heap: &'a Heap,
    text: FarVec<u8>,
    table: FarMap<[u8], u64>,
}

impl Job for Far<'_> {
    fn push(&mut self, text: &[u8]) -> Result<()> {
        Ok(self.text.extend_from_slice(&self.heap.enter(), text)?)
    }

    fn map(&mut self) -> Result<()> {
        let mut words = Words::default();
        for start in (0..self.text.len()).step_by(RUN) {
            let scope = self.heap.enter();
            let run = start..self.text.len().min(start + RUN);
            // A run is in one page, so it is one slice.
            let text = self.text.chunks_in(&scope, run).next().unwrap_or(Ok(&[]))?;
            words.piece(text, |word| add(&mut self.table, &scope, word))?;
        }
        let scope = self.heap.enter();
        words.end(|word| add(&mut self.table, &scope, word))
    }

    fn reduce(&self, mut see: impl FnMut(&[u8], u64)) -> Result<()> {
        Ok(self.table.for_each(&mut self.heap.enter(), |word, count| see(word, *count))?)
    }
}

fn add(table: &mut FarMap<[u8], u64>, scope: &Scope<'_>, word: &[u8]) -> Result<()> {
    if let Some(count) = table.get_mut(scope, word)? {
        *count += 1;
        return Ok(());
    }
    table.insert(scope, word, 1u64).map(drop).map_err(|error| FarError::from(error).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_whole_wherever_pieces_end() {
        let text = b"  far away, so\nfar   away ";
        for bytes in 1..text.len() {
            let mut seen = Vec::new();
            let mut words = Words::default();
            let mut see = |word: &[u8]| {
                seen.push(String::from_utf8(word.to_vec()).unwrap());
                Ok(())
            };
            text.chunks(bytes).try_for_each(|piece| words.piece(piece, &mut see)).unwrap();
            words.end(&mut see).unwrap();
            assert_eq!(seen, ["far", "away,", "so", "far", "away"], "pieces of {bytes}");
        }
    }

    #[test]
    fn the_most_frequent_words_are_kept() {
        let mut found = Found::default();
        (1..=1000u64).for_each(|count| found.add(&count.to_le_bytes(), count * 7919 % 1009));
        found.keep_most();
        let mut expected: Vec<u64> = (1..=1000u64).map(|count| count * 7919 % 1009).collect();
        expected.sort_unstable_by_key(|count| Reverse(*count));
        let kept: Vec<u64> = found.most.iter().map(|(Reverse(count), _)| *count).collect();
        assert_eq!(kept, expected[..MOST_FREQUENT]);
    }
}
