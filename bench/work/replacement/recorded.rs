//! Recorded traces in the formats of their publishers. Block numbers become page numbers from 0 on, in the order of first use.

use crate::real;
use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::io::{BufRead, Read};

/// Most accesses that are read of one trace.
const ACCESSES_MAX: usize = 4_000_000;
/// Bits of an address within its page, for traces of addresses.
const PAGE_SHIFT: u32 = 12;

/// Numbers pages by first use.
#[derive(Default)]
struct PageNumbers {
    known: HashMap<u64, u32>,
    pages: Vec<u32>,
}

impl PageNumbers {
    fn add(&mut self, block: u64) {
        let next = self.known.len() as u32;
        self.pages.push(*self.known.entry(block).or_insert(next));
    }

    fn is_full(&self) -> bool {
        self.pages.len() >= ACCESSES_MAX
    }
}

/// Reads a trace of the folder `cache-traces`, such as `arc/P6` or `caffeine/lirs/loop`; its pages.
pub(super) fn read(name: &str) -> Result<Vec<u32>> {
    let Some((folder, format)) = FORMATS.iter().find(|(folder, _)| name.starts_with(folder)) else {
        let known: Vec<&str> = FORMATS.iter().map(|(folder, _)| *folder).collect();
        bail!("no trace is called {name}; recorded ones are in {}", known.join(", "));
    };
    let ending = if *folder == "arc/" { "lis" } else { "trace" };
    let file = real::open(&format!("cache-traces/{name}.{ending}"))?;
    let mut numbers = PageNumbers::default();
    format.read(file, &mut numbers).with_context(|| format!("the trace {name}"))?;
    Ok(numbers.pages)
}

const FORMATS: [(&str, Format); 6] = [
    ("arc/", Format::Ranges),
    ("caffeine/address/", Format::Addresses),
    ("caffeine/cache2k/", Format::Binary(|bytes| u32::from_be_bytes(bytes).into())),
    ("caffeine/cloud_physics/", Format::Binary(|bytes| u32::from_le_bytes(bytes).into())),
    ("caffeine/lirs/", Format::Lines),
    ("caffeine/scarab/", Format::LongBinary(u64::from_be_bytes)),
];

enum Format {
    /// Lines with a first block and a number of blocks.
    Ranges,
    /// Lines with an operation and an address.
    Addresses,
    /// Lines with a block; others are remarks.
    Lines,
    Binary(fn([u8; 4]) -> u64),
    LongBinary(fn([u8; 8]) -> u64),
}

impl Format {
    fn read(&self, mut file: impl BufRead, numbers: &mut PageNumbers) -> Result<()> {
        match self {
            Format::Binary(decode) => read_binary(&mut file, *decode, numbers),
            Format::LongBinary(decode) => read_binary(&mut file, *decode, numbers),
            Format::Ranges | Format::Addresses | Format::Lines => {
                let mut line = String::new();
                while !numbers.is_full() && file.read_line(&mut line)? > 0 {
                    self.read_line(line.trim(), numbers)?;
                    line.clear();
                }
                Ok(())
            }
        }
    }

    fn read_line(&self, line: &str, numbers: &mut PageNumbers) -> Result<()> {
        let bad = || format!("not an access: {line:?}");
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().with_context(bad);
        match self {
            Format::Ranges => {
                let (first, count): (u64, u64) = (word()?.parse()?, word()?.parse()?);
                (first..first.saturating_add(count)).take(ACCESSES_MAX).for_each(|block| numbers.add(block));
            }
            Format::Addresses => {
                let address = word().and_then(|_| word())?.trim_start_matches("0x");
                numbers.add(u64::from_str_radix(address, 16).with_context(bad)? >> PAGE_SHIFT);
            }
            _ if line.is_empty() || line == "*" => {}
            _ => numbers.add(line.parse().with_context(bad)?),
        }
        Ok(())
    }
}

fn read_binary<const N: usize>(
    file: &mut impl Read,
    decode: fn([u8; N]) -> u64,
    numbers: &mut PageNumbers,
) -> Result<()> {
    let mut bytes = Vec::new();
    file.take((ACCESSES_MAX * N) as u64).read_to_end(&mut bytes)?;
    bytes.as_chunks::<N>().0.iter().for_each(|&number| numbers.add(decode(number)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read() {
        let check = |format: Format, text: &[u8], expected: &[u32]| {
            let mut numbers = PageNumbers::default();
            format.read(text, &mut numbers).unwrap();
            assert_eq!(numbers.pages, expected);
        };
        check(Format::Ranges, b"7 2 0 0\n8 1 0 1\n7 1 0 2\n", &[0, 1, 1, 0]);
        check(Format::Addresses, b"s 0x1fffff78 1\nl 0x1ffffff8 6\nl 0x10000000 1\n", &[0, 0, 1]);
        check(Format::Lines, b"5\n*\n6\n5\n", &[0, 1, 0]);
        check(Format::Binary(|bytes| u32::from_be_bytes(bytes).into()), &[0, 0, 0, 1, 0, 0, 0, 2, 9], &[0, 1]);
        assert!(Format::Lines.read(&b"five\n"[..], &mut PageNumbers::default()).is_err());
        assert!(read("arc").err().is_some_and(|error| error.to_string().contains("caffeine/lirs/")));
    }
}
