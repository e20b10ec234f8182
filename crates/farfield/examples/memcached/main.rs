//! A cache server that speaks memcached's text and binary protocols, and keeps most of its data far.
//!
//! ```text
//! cargo run --release -p farfield --example memcached -- --near 64 --capacity 1024 --pool tcp://10.0.0.7:7400
//! printf 'set greeting 0 0 5\r\nhello\r\nget greeting\r\nquit\r\n' | nc 127.0.0.1 11211
//! ```
//!
//! Keys and values are entries of one `FarMap`, which all connections share. `request`, `text` and `binary` understand,
//! `cache` does, `serve` answers. A connection is a thread: the work is in the map, and threads are the shortest way to it.

mod binary;
mod cache;
mod request;
mod serve;
#[cfg(test)]
mod tests;
mod text;

use cache::{Cache, Limits};
use farfield::Heap;
use farfield::collections::Index;
use serve::Next;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const USAGE: &str = "\
memcached [--listen ADDRESS] [--near MIB] [--capacity MIB] [--value-max KIB] [--no-evict] [--far-index] [--pool URL]…
  --listen     where to listen (127.0.0.1:11211)
  --near       near memory, tables included (64)
  --capacity   keys and values in all (1024)
  --value-max  the largest value (1024)
  --no-evict   without room, refuse instead of evicting
  --far-index  the index in far memory, too
  --pool       a memory server; without one, far is this process, to try it out";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut listen, mut near, mut capacity, mut value_max) = ("127.0.0.1:11211".to_owned(), 64u64, 1024u64, 1024usize);
    let (mut evict, mut index, mut pools) = (true, Index::Near, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--listen" => listen = value()?,
            "--near" => near = value()?.parse()?,
            "--capacity" => capacity = value()?.parse()?,
            "--value-max" => value_max = value()?.parse()?,
            "--no-evict" => evict = false,
            "--far-index" => index = Index::Far,
            "--pool" => pools.push(value()?),
            _ => return Err(USAGE.into()),
        }
    }
    // Room for what size classes and retired entries cost.
    let mut builder = Heap::builder().name("memcached").near(near << 20).far((capacity + near) << 21);
    for pool in pools {
        builder = builder.pool(pool);
    }
    let limits = Limits { capacity: capacity << 20, value_max: value_max << 10, index, evict };
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let cache = Arc::new(Cache::new(builder.build()?, limits, clock)?);
    let listener = TcpListener::bind(&listen)?;
    println!("listening on {}", listener.local_addr()?);
    accept(&listener, &cache);
    Ok(())
}

/// Serves clients for ever.
fn accept(listener: &TcpListener, cache: &Arc<Cache>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, most likely; some come back.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let cache = cache.clone();
        // Without a thread the connection closes, which tells the client enough.
        let _ = std::thread::Builder::new().name("client".to_owned()).spawn(move || {
            cache::count(&cache.counts.connections);
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
fn converse_on(cache: &Cache, buffer: &mut Vec<u8>, skip: &mut usize, out: &mut Vec<u8>) -> bool {
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
