//! Text packed with Snappy block by block, or unpacked, from one array into another (AIFM, Figure 11). Every block is read once and
//! written once, so it displaces nothing.
//!
//! Input and output are arrays of blocks of 64 KiB. Packed blocks follow each other without gaps; how long each is, is near.

use crate::random::{Random, mix};
use crate::zipf::Zipf;
use crate::{Options, Outcome, figures_of};
use anyhow::{Context, Result, ensure};
use farfield::{FarError, FarVec, Heap};

const BLOCK_BYTES: usize = 64 << 10;
type Block = [u8; BLOCK_BYTES];

/// Which way.
#[derive(Clone, Copy)]
pub(crate) enum Way {
    Pack,
    Unpack,
}

pub(crate) fn run(options: &Options, way: Way) -> Result<Outcome> {
    // Plain text is about two thirds of the data, packed text the rest.
    let count = options.data_bytes() * 2 / 3 / BLOCK_BYTES as u64;
    match options.heap(count * 4)? {
        None => work(options, way, count, &|| Near(Vec::new()), &|_| {}),
        Some(heap) => {
            let figures = |outcome: &mut Outcome| figures_of(outcome, &heap.stats(), count * 4);
            work(options, way, count, &|| Far { heap: &heap, blocks: FarVec::new() }, &figures)
        }
    }
}

/// An array that grows at its end and is read from its beginning.
trait Blocks {
    fn push(&mut self, block: &Block) -> Result<()>;
    fn for_each(&self, visit: &mut dyn FnMut(&Block) -> Result<()>) -> Result<()>;
}

struct Near(Vec<Block>);

impl Blocks for Near {
    fn push(&mut self, block: &Block) -> Result<()> {
        self.0.push(*block);
        Ok(())
    }

    fn for_each(&self, visit: &mut dyn FnMut(&Block) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(visit)
    }
}

struct Far<'a> {
    heap: &'a Heap,
    blocks: FarVec<Block>,
}

impl Blocks for Far<'_> {
    fn push(&mut self, block: &Block) -> Result<()> {
        let scope = self.heap.enter();
        self.blocks.push(&scope, *block).map_err(FarError::from)?;
        let last = self.blocks.len() - 1;
        self.blocks.cold(&scope, last..);
        Ok(())
    }

    fn for_each(&self, visit: &mut dyn FnMut(&Block) -> Result<()>) -> Result<()> {
        let mut scope = self.heap.enter();
        let mut scan = self.blocks.scan(&mut scope).once();
        while let Some(chunk) = scan.next_chunk()? {
            chunk.iter().try_for_each(&mut *visit)?;
        }
        Ok(())
    }
}

/// Words by Zipf's law, as in a language.
struct Text {
    words: Vec<Vec<u8>>,
    zipf: Zipf,
    seed: u64,
}

impl Text {
    fn new(seed: u64) -> Text {
        let mut random = Random::new(seed);
        let mut word = || -> Vec<u8> { (0..2 + random.below(9)).map(|_| b'a' + random.below(26) as u8).collect() };
        Text { words: (0..20_000).map(|_| word()).collect(), zipf: Zipf::new(20_000, 1.0), seed }
    }

    fn block(&self, number: u64, block: &mut Block) {
        let mut random = Random::new(mix(number) ^ self.seed);
        let mut at = 0;
        while at < BLOCK_BYTES {
            let word = &self.words[self.zipf.sample(&mut random) as usize];
            let bytes = word.len().min(BLOCK_BYTES - at);
            block[at..at + bytes].copy_from_slice(&word[..bytes]);
            at += bytes;
            if let Some(space) = block.get_mut(at) {
                *space = b' ';
                at += 1;
            }
        }
    }
}

/// Packed blocks, one behind the other.
struct Packed<B> {
    blocks: B,
    /// What does not fill a block yet.
    rest: Vec<u8>,
    lengths: Vec<u32>,
    encoder: snap::raw::Encoder,
    buffer: Vec<u8>,
}

impl<B: Blocks> Packed<B> {
    fn new(blocks: B) -> Packed<B> {
        let buffer = vec![0; snap::raw::max_compress_len(BLOCK_BYTES)];
        Packed { blocks, rest: Vec::new(), lengths: Vec::new(), encoder: snap::raw::Encoder::new(), buffer }
    }

    fn add(&mut self, block: &Block) -> Result<()> {
        let bytes = self.encoder.compress(block, &mut self.buffer)?;
        self.lengths.push(bytes as u32);
        self.rest.extend_from_slice(&self.buffer[..bytes]);
        while let Some((full, _)) = self.rest.split_first_chunk::<BLOCK_BYTES>() {
            self.blocks.push(full)?;
            self.rest.drain(..BLOCK_BYTES);
        }
        Ok(())
    }

    /// Unpacks all, in order.
    fn for_each(&self, visit: &mut dyn FnMut(&Block) -> Result<()>) -> Result<()> {
        let mut decoder = snap::raw::Decoder::new();
        let mut plain = Box::new([0; BLOCK_BYTES]);
        let (mut pending, mut lengths) = (Vec::new(), self.lengths.iter());
        let mut next = lengths.next();
        let mut more = |bytes: &[u8]| -> Result<()> {
            pending.extend_from_slice(bytes);
            let mut used = 0;
            while let Some(packed) = next.and_then(|length| pending.get(used..used + *length as usize)) {
                ensure!(decoder.decompress(packed, &mut plain[..])? == BLOCK_BYTES, "a block is not whole");
                used += packed.len();
                visit(&plain)?;
                next = lengths.next();
            }
            pending.drain(..used);
            Ok(())
        };
        self.blocks.for_each(&mut |block| more(block))?;
        more(&self.rest)?;
        ensure!(next.is_none(), "packed blocks are missing");
        Ok(())
    }
}

fn work<B: Blocks>(
    options: &Options,
    way: Way,
    count: u64,
    blocks: &dyn Fn() -> B,
    figures: &dyn Fn(&mut Outcome),
) -> Result<Outcome> {
    let mut outcome = Outcome::new();
    let text = Text::new(options.seed);
    let mut block = Box::new([0; BLOCK_BYTES]);
    let (mut plain, mut packed) = (blocks(), Packed::new(blocks()));
    outcome.phase("fill", count, || {
        (0..count).try_for_each(|number| {
            text.block(number, &mut block);
            match way {
                Way::Pack => plain.push(&block),
                Way::Unpack => packed.add(&block),
            }
        })
    })?;
    // What is near for the first time costs the kernel more than packing does, so that is not in the time.
    for phase in ["warm", "pack"] {
        match way {
            Way::Pack => {
                packed = Packed::new(blocks());
                outcome.phase(phase, count, || plain.for_each(&mut |block| packed.add(block)))?;
            }
            Way::Unpack => {
                plain = blocks();
                outcome.phase(phase, count, || packed.for_each(&mut |block| plain.push(block)))?;
            }
        }
    }
    figures(&mut outcome);
    let bytes: u64 = packed.lengths.iter().map(|length| u64::from(*length)).sum();
    outcome.figure("packed_share", bytes as f64 / (count as f64 * BLOCK_BYTES as f64));
    let (mut number, mut errors) = (0, 0);
    let mut check = |found: &Block| {
        text.block(number, &mut block);
        number += 1;
        errors += u64::from(found[..] != block[..]);
        Ok(())
    };
    match way {
        Way::Pack => packed.for_each(&mut check),
        Way::Unpack => plain.for_each(&mut check),
    }
    .context("while comparing")?;
    errors += number.abs_diff(count);
    outcome.checked(bytes, errors);
    Ok(outcome)
}
