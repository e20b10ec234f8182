//! The least that a server and a client can do: messages as long as Farfield's, and nothing in them but a number and an object.
//! What the kernel's loopback lets through.

use super::{Gets, OBJECT_BYTES, Object, Peer, bytes_of, object};
use crate::polled::{Polled, now};
use anyhow::Result;
use std::io::{Read, Write};

/// Bytes of a question: a head of the protocol.
const QUESTION: usize = 40;
/// Bytes of an answer: a head, a checksum, the object.
const ANSWER: usize = 48 + OBJECT_BYTES;

pub(super) struct Loopback {
    ends: Polled,
    in_flight: u64,
}

impl Loopback {
    pub(super) fn new(in_flight: u64) -> Result<Loopback> {
        Ok(Loopback { ends: Polled::new()?, in_flight })
    }
}

impl Peer for Loopback {
    fn fill(&mut self, count: u64, seed: u64) -> Result<()> {
        let objects: Vec<Object> = (0..count).map(|number| object(number, seed)).collect();
        self.ends.serve(QUESTION, move |question, answers| {
            let number = u64::from_le_bytes(question[..8].try_into()?);
            answers.extend(&question[..QUESTION]);
            answers.extend([0; 8]);
            answers.extend(bytes_of(&objects[number as usize]));
            Ok(())
        })
    }

    fn get(&mut self, gets: &mut Gets) -> Result<()> {
        let mut questions = Vec::with_capacity(self.in_flight as usize * QUESTION);
        let mut inbox = vec![0; self.in_flight as usize * ANSWER];
        let (mut sent, mut filled) = (0, 0);
        loop {
            if sent == questions.len() {
                (sent, _) = (0, questions.clear());
                // Half of them at a time, so that both sides have something to do.
                if gets.waiting <= self.in_flight / 2 {
                    while gets.waiting < self.in_flight
                        && let Some(number) = gets.next()
                    {
                        let start = questions.len();
                        questions.extend(number.to_le_bytes());
                        questions.resize(start + QUESTION, 0);
                    }
                }
            }
            if sent < questions.len() {
                sent += now(self.ends.stream.write(&questions[sent..]))?;
            }
            if gets.waiting == 0 {
                return Ok(());
            }
            filled += now(self.ends.stream.read(&mut inbox[filled..]))?;
            let whole = filled - filled % ANSWER;
            for answer in inbox[..whole].chunks_exact(ANSWER) {
                let number = u64::from_le_bytes(answer[..8].try_into()?);
                gets.arrived(number, &answer[48..]);
            }
            inbox.copy_within(whole..filled, 0);
            filled -= whole;
        }
    }
}
