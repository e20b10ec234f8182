//! Calls over TCP: a connection carries one call at a time, and is used again.

use super::{Peer, Process, ServiceAnswer, ServiceCall, locked};
use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

pub(super) struct TcpPeer {
    address: String,
    idle: Mutex<Vec<TcpStream>>,
}

impl TcpPeer {
    pub(super) fn new(address: &str) -> TcpPeer {
        TcpPeer { address: address.to_owned(), idle: Mutex::default() }
    }
}

impl Peer for TcpPeer {
    fn call(&self, call: ServiceCall) -> Result<ServiceAnswer> {
        let idle = locked(&self.idle).pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => TcpStream::connect(&self.address).with_context(|| format!("no service at {}", self.address))?,
        };
        stream.set_nodelay(true)?;
        send(&mut stream, &call)?;
        let answer = receive(&mut stream)?.context("a service has ended")?;
        locked(&self.idle).push(stream);
        Ok(answer)
    }
}

/// Sends a message with its length before it.
fn send(stream: &mut TcpStream, message: &impl Serialize) -> Result<()> {
    let mut bytes = postcard::to_extend(message, vec![0; 4])?;
    let length = u32::try_from(bytes.len() - 4).context("a message is too long")?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(stream.write_all(&bytes)?)
}

/// Receives a message; `None` if the other side has ended.
fn receive<T: DeserializeOwned>(stream: &mut TcpStream) -> Result<Option<T>> {
    let mut length = [0; 4];
    if stream.read(&mut length[..1])? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut length[1..])?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(Some(postcard::from_bytes(&bytes)?))
}

/// Answers calls in a thread for each connection, for ever.
pub(super) fn listen(process: Arc<Process>) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
    let address = listener.local_addr()?.to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(mut stream), process) = (stream, process.clone()) else { continue };
            thread::spawn(move || -> Result<()> {
                stream.set_nodelay(true)?;
                while let Some(call) = receive(&mut stream)? {
                    send(&mut stream, &process.answer(call))?;
                }
                Ok(())
            });
        }
    });
    Ok(address)
}
