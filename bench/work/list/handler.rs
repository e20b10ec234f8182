//! What a remote procedure call would do: a handler, found by its number, that walks a list in plain memory and answers. Messages as
//! long as Farfield's; no pages, no checksums, nobody else to serve.

use super::{NODE_BYTES, Ring, Walker};
use crate::polled::{Polled, now};
use anyhow::{Context, Result};
use farfield_bench_functions::ListStart;
use std::io::{Read, Write};

/// Bytes of a question: a head, a name, an argument.
const QUESTION: usize = 64;
/// Bytes of an answer: a head, and where the walk ended.
const ANSWER: usize = 64;

type Procedure = fn(&[(u64, u64)], node: u64, hops: u64) -> u64;
/// What can be called.
const PROCEDURES: [Procedure; 1] = [walk];

fn walk(list: &[(u64, u64)], node: u64, hops: u64) -> u64 {
    let at = |node: u64| list[(node / NODE_BYTES) as usize];
    at((0..hops).fold(node, |node, _| at(node).0)).1
}

pub(super) struct Handler(Polled);

impl Handler {
    pub(super) fn new() -> Result<Handler> {
        Polled::new().map(Handler)
    }
}

impl Walker for Handler {
    fn fill(&mut self, ring: Ring) -> Result<()> {
        let list = ring.written();
        self.0.serve(QUESTION, move |question, answers| {
            let procedure = PROCEDURES.get(word(question, 0) as usize).context("no such procedure")?;
            let begin = answers.len();
            answers.extend(procedure(&list, word(question, 1), word(question, 2)).to_le_bytes());
            answers.resize(begin + ANSWER, 0);
            Ok(())
        })
    }

    fn walk(&mut self, starts: &[ListStart], values: &mut Vec<u64>) -> Result<()> {
        let mut questions = Vec::with_capacity(starts.len() * QUESTION);
        for ListStart { node, hops } in starts {
            let begin = questions.len();
            questions.extend([0, *node, u64::from(*hops)].iter().flat_map(|word| word.to_le_bytes()));
            questions.resize(begin + QUESTION, 0);
        }
        let mut inbox = vec![0; starts.len() * ANSWER];
        let (mut sent, mut filled) = (0, 0);
        while filled < inbox.len() {
            if sent < questions.len() {
                sent += now(self.0.stream.write(&questions[sent..]))?;
            }
            filled += now(self.0.stream.read(&mut inbox[filled..]))?;
        }
        values.extend(inbox.chunks_exact(ANSWER).map(|answer| word(answer, 0)));
        Ok(())
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    bytes[index * 8..][..8].try_into().map_or(0, u64::from_le_bytes)
}
