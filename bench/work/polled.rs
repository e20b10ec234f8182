//! Two ends of a connection that both poll, and a thread at the other one: what stands for a server without Farfield.

use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread::JoinHandle;

pub(crate) struct Polled {
    pub(crate) stream: TcpStream,
    listener: TcpListener,
    server: Option<JoinHandle<Result<()>>>,
}

impl Polled {
    pub(crate) fn new() -> Result<Polled> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        Ok(Polled { stream, listener, server: None })
    }

    /// A thread answers questions of so many bytes from now on: `answer` adds the answer of one to a list of bytes.
    pub(crate) fn serve(
        &mut self,
        question_bytes: usize,
        answer: impl FnMut(&[u8], &mut Vec<u8>) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let (theirs, _) = self.listener.accept()?;
        for stream in [&theirs, &self.stream] {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        self.server = Some(std::thread::spawn(move || serve(theirs, question_bytes, answer)));
        Ok(())
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.stream.shutdown(Shutdown::Both).ok();
        if let Some(server) = self.server.take() {
            server.join().ok();
        }
    }
}

/// Bytes that went through; 0 if none can now.
pub(crate) fn now(moved: std::io::Result<usize>) -> Result<usize> {
    match moved {
        Ok(0) => bail!("the other side has ended"),
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Answers until the other side ends.
fn serve(
    mut stream: TcpStream,
    question_bytes: usize,
    mut answer: impl FnMut(&[u8], &mut Vec<u8>) -> Result<()>,
) -> Result<()> {
    let mut inbox = vec![0; 64 * 1024];
    let mut answers = Vec::new();
    let mut filled = 0;
    loop {
        filled += now(stream.read(&mut inbox[filled..]))?;
        let whole = filled - filled % question_bytes;
        for question in inbox[..whole].chunks_exact(question_bytes) {
            answer(question, &mut answers)?;
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
