//! What a remote procedure call would do: a handler, found by its number, that walks a list in plain memory and answers. Messages as
//! long as Farfield's; no pages, no checksums, nobody else to serve.

use super::{NODE_BYTES, Ring, Walker};
use anyhow::{Context, Result, bail};
use farfield_wic::ListStart;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

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

pub(super) struct Handler {
    stream: TcpStream,
    listener: TcpListener,
    server: Option<JoinHandle<Result<()>>>,
}

impl Handler {
    pub(super) fn new() -> Result<Handler> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        Ok(Handler { stream, listener, server: None })
    }
}

impl Walker for Handler {
    fn fill(&mut self, ring: Ring) -> Result<()> {
        let list = ring.written();
        let (theirs, _) = self.listener.accept()?;
        for stream in [&theirs, &self.stream] {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        self.server = Some(std::thread::spawn(move || answer(theirs, &list)));
        Ok(())
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
                sent += now(self.stream.write(&questions[sent..]))?;
            }
            filled += now(self.stream.read(&mut inbox[filled..]))?;
        }
        values.extend(inbox.chunks_exact(ANSWER).map(|answer| word(answer, 0)));
        Ok(())
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).ok();
        if let Some(server) = self.server.take() {
            server.join().ok();
        }
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    bytes[index * 8..][..8].try_into().map_or(0, u64::from_le_bytes)
}

/// Bytes that went through; 0 if none can now.
fn now(moved: std::io::Result<usize>) -> Result<usize> {
    match moved {
        Ok(0) => bail!("the other side has ended"),
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Answers until the other side ends.
fn answer(mut stream: TcpStream, list: &[(u64, u64)]) -> Result<()> {
    let mut inbox = vec![0; 64 * 1024];
    let mut answers = Vec::new();
    let mut filled = 0;
    loop {
        filled += now(stream.read(&mut inbox[filled..]))?;
        let whole = filled - filled % QUESTION;
        for question in inbox[..whole].chunks_exact(QUESTION) {
            let procedure = PROCEDURES.get(word(question, 0) as usize).context("no such procedure")?;
            let begin = answers.len();
            answers.extend(procedure(list, word(question, 1), word(question, 2)).to_le_bytes());
            answers.resize(begin + ANSWER, 0);
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
