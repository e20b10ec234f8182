//! Connections of clients: each is a thread.

use super::cache::Cache;
use super::counts::count;
use super::serve::{self, Next};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Serves clients for ever.
pub(crate) fn accept(listener: &TcpListener, cache: &Arc<Cache>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, most likely; some come back.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let cache = cache.clone();
        // Without a thread the connection closes, which tells the client enough.
        let _ = std::thread::Builder::new().name("client".to_owned()).spawn(move || {
            count(&cache.counts.connections);
            // A client that goes away is no fault of ours.
            let _ = converse(stream, &cache);
            cache.counts.connections.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// One client, until it leaves.
fn converse(mut stream: TcpStream, cache: &Cache) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut buffer, mut out) = (Vec::new(), Vec::new());
    let mut piece = vec![0; 64 << 10];
    // Bytes of a request that was refused, still to come.
    let mut skip = 0;
    loop {
        let count = stream.read(&mut piece)?;
        if count == 0 {
            return Ok(());
        }
        buffer.extend_from_slice(&piece[..count]);
        let closes = converse_on(cache, &mut buffer, &mut skip, &mut out);
        stream.write_all(&out)?;
        out.clear();
        if closes {
            return Ok(());
        }
    }
}

/// Answers everything in the buffer that is whole; does the conversation end?
pub(crate) fn converse_on(cache: &Cache, buffer: &mut Vec<u8>, skip: &mut usize, out: &mut Vec<u8>) -> bool {
    let mut at = 0;
    let closes = loop {
        let skipped = (*skip).min(buffer.len() - at);
        at += skipped;
        *skip -= skipped;
        if at == buffer.len() {
            break false;
        }
        match serve::answer(cache, &buffer[at..], out) {
            Next::Used(0) => break false,
            Next::Used(used) => *skip = used,
            Next::Close => break true,
        }
    };
    buffer.drain(..at);
    closes
}
