//! Redis: pipelined GETs over a few connections, which is how it answers most.

use super::{Gets, OBJECT_BYTES, Peer, bytes_of, object};
use anyhow::{Context, Result, ensure};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

/// Connections; while one is answered, the questions of the next arrive.
const CONNECTIONS: u64 = 4;
/// What stands around an object in an answer.
const BEFORE: &[u8] = b"$64\r\n";
const AFTER: &[u8] = b"\r\n";
const ANSWER: usize = BEFORE.len() + OBJECT_BYTES + AFTER.len();

pub(super) struct Redis {
    lines: Vec<Line>,
    each: usize,
}

/// One connection, and the numbers that were asked for on it, in order.
struct Line {
    stream: TcpStream,
    asked: VecDeque<u64>,
    questions: Vec<u8>,
    sent: usize,
    inbox: Vec<u8>,
    filled: usize,
}

impl Redis {
    pub(super) fn connect(address: &str, in_flight: u64) -> Result<Redis> {
        let each = in_flight.div_ceil(CONNECTIONS) as usize;
        let line = |_| -> Result<Line> {
            let stream = TcpStream::connect(address).with_context(|| format!("no redis at {address}"))?;
            stream.set_nodelay(true)?;
            let inbox = vec![0; each * ANSWER];
            Ok(Line { stream, asked: VecDeque::new(), questions: Vec::new(), sent: 0, inbox, filled: 0 })
        };
        Ok(Redis { lines: (0..CONNECTIONS.min(in_flight)).map(line).collect::<Result<_>>()?, each })
    }
}

fn get(number: u64, out: &mut Vec<u8>) {
    out.extend(b"*2\r\n$3\r\nGET\r\n$8\r\n");
    out.extend(number.to_le_bytes());
    out.extend(b"\r\n");
}

fn set(number: u64, seed: u64, out: &mut Vec<u8>) {
    out.extend(b"*3\r\n$3\r\nSET\r\n$8\r\n");
    out.extend(number.to_le_bytes());
    out.extend(b"\r\n");
    out.extend(BEFORE);
    out.extend(bytes_of(&object(number, seed)));
    out.extend(AFTER);
}

impl Peer for Redis {
    fn fill(&mut self, count: u64, seed: u64) -> Result<()> {
        let stream = &mut self.lines[0].stream;
        let numbers: Vec<u64> = (0..count).collect();
        let (mut questions, mut answers) = (Vec::new(), Vec::new());
        for batch in numbers.chunks(1000) {
            questions.clear();
            batch.iter().for_each(|number| set(*number, seed, &mut questions));
            stream.write_all(&questions)?;
            answers.resize(batch.len() * 5, 0);
            stream.read_exact(&mut answers)?;
            ensure!(answers.chunks_exact(5).all(|answer| answer == b"+OK\r\n"), "redis does not take the objects");
        }
        for line in &self.lines {
            line.stream.set_nonblocking(true)?;
        }
        Ok(())
    }

    fn get(&mut self, gets: &mut Gets) -> Result<()> {
        loop {
            for line in &mut self.lines {
                line.ask(gets, self.each)?;
                line.hear(gets)?;
            }
            if gets.left == 0 && gets.waiting == 0 {
                return Ok(());
            }
        }
    }
}

impl Line {
    /// When all is answered, asks again.
    fn ask(&mut self, gets: &mut Gets, each: usize) -> Result<()> {
        if self.asked.is_empty() {
            self.questions.clear();
            self.sent = 0;
            while self.asked.len() < each
                && let Some(number) = gets.next()
            {
                get(number, &mut self.questions);
                self.asked.push_back(number);
            }
        }
        while self.sent < self.questions.len() {
            match self.stream.write(&self.questions[self.sent..]) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn hear(&mut self, gets: &mut Gets) -> Result<()> {
        if self.asked.is_empty() {
            return Ok(());
        }
        match self.stream.read(&mut self.inbox[self.filled..]) {
            Ok(0) => anyhow::bail!("redis has ended"),
            Ok(bytes) => self.filled += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let whole = self.filled - self.filled % ANSWER;
        for answer in self.inbox[..whole].chunks_exact(ANSWER) {
            ensure!(answer.starts_with(BEFORE) && answer.ends_with(AFTER), "redis has no such object");
            let number = self.asked.pop_front().context("an answer to nothing")?;
            gets.arrived(number, &answer[BEFORE.len()..]);
        }
        self.inbox.copy_within(whole..self.filled, 0);
        self.filled -= whole;
        Ok(())
    }
}
