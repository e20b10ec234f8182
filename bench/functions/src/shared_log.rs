//! `bench.log`: a log shared by many (WICkit's second workload). Words are appended, and the last one
//! is read.
//!
//! A [`WicLock`] lies first, then the number of words, then the words. A word is written before it
//! is counted, so a function that fails on the way leaves a consistent log.

use core::time::Duration;
use farfield_wic::{Fault, Function, Place, WicLock};
use serde::{Deserialize, Serialize};

/// Appends to a log, or reads its last word.
#[derive(Debug)]
pub struct SharedLog;

/// Request to a log. Zeros are an empty log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogRequest {
    /// Offset of the log: a multiple of 64.
    pub log: u64,
    /// Most words of the log.
    pub words_max: u64,
    /// Word to append; `None`: the last word is read.
    pub append: Option<u64>,
}

impl SharedLog {
    /// Returns the bytes of a log of this many words.
    pub const fn bytes(words_max: u64) -> u64 {
        FIRST + words_max * WORD
    }

    /// Returns the offset of a word of a log.
    pub fn word(log: u64, number: u64) -> Result<u64, Fault> {
        let offset = number.checked_mul(WORD).and_then(|offset| offset.checked_add(FIRST)?.checked_add(log));
        offset.ok_or(Fault::OutOfRange { offset: log })
    }
}

const WORD: u64 = 8;
/// Lease of the lock: a holder that is silent for this long is dead.
const LEASE: Duration = Duration::from_secs(5);
/// Longest wait for the lock. A call has a deadline of its own.
const WITHIN: Duration = Duration::from_secs(60);
const COUNT: u64 = WicLock::BYTES;
const FIRST: u64 = 2 * WicLock::BYTES;

impl Function for SharedLog {
    const NAME: &'static str = "bench.log";
    const VERSION: u32 = 1;
    type Argument = LogRequest;
    /// Number of the word that was appended, or the last word; `None` if the log is full or empty.
    type Answer = Option<u64>;

    async fn run<P: Place>(place: &P, ask: LogRequest) -> Result<Option<u64>, Fault> {
        let LogRequest { log, words_max, append } = ask;
        let lock = WicLock::at(log).lease(LEASE).within(WITHIN);
        let count = log.checked_add(COUNT).ok_or(Fault::OutOfRange { offset: log })?;
        let Some(word) = append else {
            let held = lock.read(place).await?;
            let last = match place.read_u64(count).await?.checked_sub(1) {
                None => None,
                Some(last) => Some(place.read_u64(SharedLog::word(log, last)?).await?),
            };
            held.unlock().await?;
            return Ok(last);
        };
        let held = lock.lock(place).await?;
        let number = place.read_u64(count).await?;
        let is_full = number >= words_max;
        if !is_full {
            held.write_u64(SharedLog::word(log, number)?, word).await?;
            held.write_u64(count, number + 1).await?;
        }
        held.unlock().await?;
        Ok((!is_full).then_some(number))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against words that are lost, or twice, in any order of those who append.
    use super::*;
    use farfield_wic::{Sim, Stop};

    fn ask(append: Option<u64>) -> LogRequest {
        LogRequest { log: 4096, words_max: 40, append }
    }

    #[test]
    fn each_word_is_there_once_in_any_order() {
        for seed in 0..20 {
            let sim = Sim::new(seed, vec![0; 8192]).steps(u64::MAX);
            assert_eq!(sim.run_one::<SharedLog>(ask(None)), Ok(None));
            let asks = (0..50).map(|number| ask((number % 2 == 0).then_some(100 + number))).collect();
            let answers = sim.run::<SharedLog>(asks);
            let mut numbers = Vec::new();
            for (number, answer) in answers.into_iter().enumerate() {
                match answer.unwrap() {
                    Some(at) if number % 2 == 0 => {
                        numbers.push(at);
                        let word: [u8; 8] =
                            sim.bytes()[4096 + FIRST as usize + at as usize * 8..][..8].try_into().unwrap();
                        assert_eq!(u64::from_le_bytes(word), 100 + number as u64, "seed {seed}");
                    }
                    read => assert!(read.is_none_or(|word| (100..150).contains(&word) && word % 2 == 0), "{read:?}"),
                }
            }
            numbers.sort_unstable();
            assert_eq!(numbers, Vec::from_iter(0..25));
        }
    }

    #[test]
    fn a_full_log_says_so_and_stays_as_it_is() {
        let sim = Sim::new(7, vec![0; 8192]).steps(u64::MAX);
        for number in 0..40 {
            assert_eq!(sim.run_one::<SharedLog>(ask(Some(number))), Ok(Some(number)));
        }
        let before = sim.bytes();
        assert_eq!(sim.run_one::<SharedLog>(ask(Some(99))), Ok(None));
        assert_eq!(sim.run_one::<SharedLog>(ask(None)), Ok(Some(39)));
        assert!(before[4096 + COUNT as usize..] == sim.bytes()[4096 + COUNT as usize..]);
        let outside = LogRequest { log: !63, words_max: 1, append: None };
        assert!(matches!(sim.run_one::<SharedLog>(outside), Err(Stop::Fault(_))));
    }
}
