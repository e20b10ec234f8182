//! The least that a server and a client can do: messages as long as Farfield's, and nothing in them but a number and an object.
//! What the kernel's loopback lets through.

use super::{Gets, OBJECT_BYTES, Object, Peer, bytes_of, object};
use anyhow::{Context, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

/// Bytes of a question: a head of the protocol.
const QUESTION: usize = 40;
/// Bytes of an answer: a head, a checksum, the object.
const ANSWER: usize = 48 + OBJECT_BYTES;

pub(super) struct Loopback {
    stream: TcpStream,
    listener: TcpListener,
    server: Option<JoinHandle<Result<()>>>,
    in_flight: u64,
}

impl Loopback {
    pub(super) fn new(in_flight: u64) -> Result<Loopback> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        Ok(Loopback { stream, listener, server: None, in_flight })
    }
}

impl Peer for Loopback {
    fn fill(&mut self, count: u64, seed: u64) -> Result<()> {
        let objects: Vec<Object> = (0..count).map(|number| object(number, seed)).collect();
        let (theirs, _) = self.listener.accept()?;
        for stream in [&theirs, &self.stream] {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        self.server = Some(std::thread::spawn(move || answer(theirs, &objects)));
        Ok(())
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
                sent += now(self.stream.write(&questions[sent..]))?;
            }
            if gets.waiting == 0 {
                return Ok(());
            }
            filled += now(self.stream.read(&mut inbox[filled..]))?;
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

impl Drop for Loopback {
    fn drop(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).ok();
        if let Some(server) = self.server.take() {
            server.join().ok();
        }
    }
}

/// Bytes that went through; 0 if none can now.
fn now(moved: std::io::Result<usize>) -> Result<usize> {
    match moved {
        Ok(0) => anyhow::bail!("the other side has ended"),
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Answers until the other side ends.
fn answer(mut stream: TcpStream, objects: &[Object]) -> Result<()> {
    let mut inbox = vec![0; 64 * 1024];
    let mut answers = Vec::new();
    let mut filled = 0;
    loop {
        filled += now(stream.read(&mut inbox[filled..]))?;
        let whole = filled - filled % QUESTION;
        for question in inbox[..whole].chunks_exact(QUESTION) {
            let number = u64::from_le_bytes(question[..8].try_into()?);
            answers.extend(&question[..QUESTION]);
            answers.extend([0; 8]);
            answers.extend(bytes_of(&objects[number as usize]));
        }
        inbox.copy_within(whole..filled, 0);
        filled -= whole;
        let mut sent = 0;
        while sent < answers.len() {
            sent += now(stream.write(&answers[sent..]))?;
        }
        answers.clear();
    }
}
