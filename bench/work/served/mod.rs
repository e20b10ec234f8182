//! A log and a hash table that are kept at a server, half of the operations changing them (WICkit, second and third workload): `log` and `cuckoo`.
//!
//! Who changes them (`--peer`): a function (`bench.log`, `bench.cuckoo`) at the client (`client:URL`), at the server (`server:URL`) or where it was faster lately (`auto:URL`),
//! under a lock in the region, together with whoever else has the region; a handler that has them in plain memory and runs each call to its end
//! (`loopback:`); or a client written for it that reads and writes pages (`one-sided:URL`) and must be the only one, because pages have no lock.

mod cuckoo;
mod log;
mod pages;

pub(crate) use cuckoo::run as run_cuckoo;
pub(crate) use log::run as run_log;

use crate::Options;
use crate::polled::{Polled, now};
use anyhow::{Context, Result, bail, ensure};
use farfield_pool::{Backend, PoolBuilder};
use farfield_wic::{Caller, Function, Where};
use pages::Pages;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: u64 = 4096;
const DEADLINE: Duration = Duration::from_secs(60);

/// An operation. What it answers is a word, or none.
#[derive(Clone, Copy, Debug)]
struct Ask {
    key: u64,
    put: Option<u64>,
}

/// What is kept.
trait Kept: Copy + Send + 'static {
    type Function: Function;

    /// Bytes of it in a region.
    fn bytes(self) -> u64;
    fn argument(self, ask: Ask) -> <Self::Function as Function>::Argument;
    fn answer(self, answer: <Self::Function as Function>::Answer) -> Result<Option<u64>>;
    /// In plain memory.
    fn handler(self) -> impl FnMut(Ask) -> Result<Option<u64>> + Send + 'static;
    /// In pages, of which one is read or written after the other.
    fn one_sided(self, pages: &mut Pages, ask: Ask) -> Result<Option<u64>>;
}

/// Somebody who does operations.
trait Keeper {
    /// As many side by side as there are.
    fn ask(&mut self, asks: &[Ask], answers: &mut Vec<Option<u64>>) -> Result<()>;
    /// Words of what is kept, as they lie in a region; `None` if they lie otherwise.
    fn words(&mut self, offset: u64, count: u64) -> Result<Option<Vec<u64>>>;
}

fn open<K: Kept>(kept: K, options: &Options) -> Result<Box<dyn Keeper>> {
    ensure!((1..=256).contains(&options.in_flight), "--in-flight must be 1 to 256");
    let peer = options.peer.as_deref().context("--peer is missing")?;
    let region = |url: &str| {
        let pages = kept.bytes().div_ceil(PAGE_BYTES);
        PoolBuilder::new().url(url).client_name("farfield-work").pages(pages).open()
    };
    let called = |url: &str, place: Where| -> Result<Box<dyn Keeper>> {
        let backend = region(url)?;
        Ok(Box::new(Called { caller: Caller::new(backend.clone()), backend, kept, place }))
    };
    Ok(match peer.split_once(':') {
        Some(("loopback", "")) => Box::new(Handler::new(kept.handler())?),
        Some(("one-sided", url)) => Box::new(OneSided { pages: Pages::open(region(url)?)?, kept }),
        Some(("client", url)) => called(url, Where::Client)?,
        Some(("server", url)) => called(url, Where::Server)?,
        Some(("auto", url)) => called(url, Where::Auto)?,
        _ => bail!("--peer must be loopback:, one-sided:URL, client:URL, server:URL or auto:URL, not {peer}"),
    })
}

/// The function, called.
struct Called<K> {
    backend: Arc<dyn Backend>,
    caller: Caller,
    kept: K,
    place: Where,
}

impl<K: Kept> Keeper for Called<K> {
    fn ask(&mut self, asks: &[Ask], answers: &mut Vec<Option<u64>>) -> Result<()> {
        let arguments = asks.iter().map(|ask| self.kept.argument(*ask)).collect();
        for answer in self.caller.calls::<K::Function>(arguments).at(self.place).within(DEADLINE).run() {
            answers.push(self.kept.answer(answer?)?);
        }
        Ok(())
    }

    fn words(&mut self, offset: u64, count: u64) -> Result<Option<Vec<u64>>> {
        Pages::open(self.backend.clone())?.words(offset, count).map(Some)
    }
}

/// A client that is written for it.
struct OneSided<K> {
    pages: Pages,
    kept: K,
}

impl<K: Kept> Keeper for OneSided<K> {
    fn ask(&mut self, asks: &[Ask], answers: &mut Vec<Option<u64>>) -> Result<()> {
        for ask in asks {
            answers.push(self.kept.one_sided(&mut self.pages, *ask)?);
        }
        Ok(())
    }

    fn words(&mut self, offset: u64, count: u64) -> Result<Option<Vec<u64>>> {
        self.pages.words(offset, count).map(Some)
    }
}

/// Bytes of a question and of an answer of the handler, as long as Farfield's.
const QUESTION: usize = 64;
const ANSWER: usize = 64;

/// What a remote procedure call would be: a thread that does nothing else, with no pages, no checksums and no lock.
struct Handler(Polled);

impl Handler {
    fn new(mut procedure: impl FnMut(Ask) -> Result<Option<u64>> + Send + 'static) -> Result<Handler> {
        let mut polled = Polled::new()?;
        polled.serve(QUESTION, move |question, answers| {
            ensure!(word(question, 0) == 0, "no such procedure");
            let put = (word(question, 2) == 1).then(|| word(question, 3));
            let answer = procedure(Ask { key: word(question, 1), put })?;
            let begin = answers.len();
            answers
                .extend([u64::from(answer.is_some()), answer.unwrap_or(0)].iter().flat_map(|word| word.to_le_bytes()));
            answers.resize(begin + ANSWER, 0);
            Ok(())
        })?;
        Ok(Handler(polled))
    }
}

impl Keeper for Handler {
    fn ask(&mut self, asks: &[Ask], answers: &mut Vec<Option<u64>>) -> Result<()> {
        let mut questions = Vec::with_capacity(asks.len() * QUESTION);
        for Ask { key, put } in asks {
            let begin = questions.len();
            let words = [0, *key, u64::from(put.is_some()), put.unwrap_or(0)];
            questions.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            questions.resize(begin + QUESTION, 0);
        }
        let mut inbox = vec![0; asks.len() * ANSWER];
        let (mut sent, mut filled) = (0, 0);
        while filled < inbox.len() {
            if sent < questions.len() {
                sent += now(self.0.stream.write(&questions[sent..]))?;
            }
            filled += now(self.0.stream.read(&mut inbox[filled..]))?;
        }
        answers.extend(inbox.chunks_exact(ANSWER).map(|answer| (word(answer, 0) == 1).then(|| word(answer, 1))));
        Ok(())
    }

    fn words(&mut self, _offset: u64, _count: u64) -> Result<Option<Vec<u64>>> {
        Ok(None)
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    bytes[index * 8..][..8].try_into().map_or(0, u64::from_le_bytes)
}
