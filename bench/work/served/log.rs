//! `log`: words appended to a log, and its last word read, by turns of chance.

use super::pages::Pages;
use super::{Ask, Kept, open};
use crate::random::{Random, mix};
use crate::{Options, Outcome};
use anyhow::{Context, Result, ensure};
use farfield_bench_functions::{LogRequest, SharedLog};
use farfield_wic::WicLock;
use std::collections::HashSet;

#[derive(Clone, Copy)]
struct Log {
    words_max: u64,
}

/// Where the number of words lies.
const COUNT: u64 = WicLock::BYTES;

impl Kept for Log {
    type Function = SharedLog;

    fn bytes(self) -> u64 {
        SharedLog::bytes(self.words_max)
    }

    fn argument(self, ask: Ask) -> LogRequest {
        LogRequest { log: 0, words_max: self.words_max, append: ask.put }
    }

    fn answer(self, answer: Option<u64>) -> Result<Option<u64>> {
        Ok(answer)
    }

    fn handler(self) -> impl FnMut(Ask) -> Result<Option<u64>> + Send + 'static {
        let mut words = Vec::with_capacity(self.words_max as usize);
        move |ask| {
            let Some(word) = ask.put else {
                // A number that nobody has is the last.
                return Ok(words.get(ask.key as usize).or(words.last()).copied());
            };
            words.push(word);
            Ok(Some(words.len() as u64 - 1))
        }
    }

    fn one_sided(self, pages: &mut Pages, ask: Ask) -> Result<Option<u64>> {
        pages.forget();
        let [count] = pages.read(COUNT)?;
        let Some(word) = ask.put else {
            let Some(last) = count.checked_sub(1) else { return Ok(None) };
            return Ok(Some(pages.read::<1>(SharedLog::word(0, last)?)?[0]));
        };
        ensure!(count < self.words_max, "the log is full");
        pages.write(SharedLog::word(0, count)?, [word])?;
        pages.write(COUNT, [count + 1])?;
        Ok(Some(count))
    }
}

/// The last word is wanted.
const LAST: u64 = u64::MAX;

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let log = Log { words_max: options.data_bytes() / 8 };
    let first = options.ops / 8; // What is opened late is open then.
    ensure!(first + options.ops < log.words_max, "--data-mib must have room for --ops words");
    let mut keeper = open(log, options)?;
    let mut random = Random::new(options.seed);
    let asks: Vec<Ask> = (0..first + options.ops)
        .map(|number| Ask { key: LAST, put: (random.below(2) == 0).then(|| mix(number ^ options.seed)) })
        .collect();
    let mut answers = Vec::with_capacity(asks.len());
    let (before, timed) = asks.split_at(first as usize);
    let mut pass = |asks: &[Ask], answers: &mut Vec<Option<u64>>| {
        asks.chunks(options.in_flight as usize).try_for_each(|row| keeper.ask(row, answers))
    };
    let mut outcome = Outcome::new();
    outcome.phase("fill", first, || pass(before, &mut answers))?;
    outcome.phase("ask", options.ops, || pass(timed, &mut answers))?;
    ensure!(answers.len() == asks.len(), "the peer left operations without an answer");

    let rows = before.chunks(options.in_flight as usize).chain(timed.chunks(options.in_flight as usize));
    let mut errors = 0;
    let mut appended = HashSet::new();
    let (mut numbers, mut at) = (Vec::new(), answers.iter());
    let mut last = None;
    for row in rows {
        let was_empty = appended.is_empty();
        appended.extend(row.iter().filter_map(|ask| ask.put));
        for (ask, answer) in row.iter().zip(&mut at) {
            errors += u64::from(match (ask.put, answer) {
                (Some(word), Some(number)) => {
                    numbers.push((*number, word));
                    false
                }
                (Some(_), None) => true,
                // Alone, it is known which one it is.
                (None, read) if options.in_flight == 1 => *read != last,
                (None, Some(word)) => !appended.contains(word),
                (None, None) => !was_empty,
            });
            last = ask.put.or(last);
        }
    }
    // Each is there once, where it was said to be.
    let count = numbers.len() as u64;
    let kept = match keeper.words(COUNT, 1)? {
        Some(said) => {
            errors += u64::from(said != [count]);
            keeper.words(SharedLog::word(0, 0)?, count)?.context("words were there")?
        }
        None => {
            let asks: Vec<Ask> = (0..count).map(|key| Ask { key, put: None }).collect();
            let mut words = Vec::with_capacity(asks.len());
            asks.chunks(64).try_for_each(|asks| keeper.ask(asks, &mut words))?;
            words.into_iter().map(|word| word.context("a word is missing")).collect::<Result<_>>()?
        }
    };
    numbers.sort_unstable();
    let is_dense = numbers.iter().map(|(number, _)| *number).eq(0..count);
    let wrong = numbers.iter().zip(&kept).filter(|((_, word), kept)| word != *kept).count();
    let sum = kept.iter().fold(0u64, |sum, word| sum.wrapping_add(*word));
    outcome.checked(sum, errors + wrong as u64 + u64::from(!is_dense));
    Ok(outcome)
}
