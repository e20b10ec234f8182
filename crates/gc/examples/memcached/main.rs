//! A cache server that speaks memcached's protocols, on a collected heap: what leaves the cache is garbage, and nobody says when
//! its memory can be used again.
//!
//! ```text
//! cargo run --release -p farfield-gc --example gc_memcached -- --near 64 --capacity 1024 --pool tcp://10.0.0.7:7400
//! printf 'set greeting 0 0 5\r\nhello\r\nget greeting\r\nquit\r\n' | nc 127.0.0.1 11211
//! ```
//!
//! `cache` is of its own; what understands and answers clients is that of the example of `farfield`.

#[path = "../../../farfield/examples/memcached/binary.rs"]
mod binary;
mod cache;
#[path = "../../../farfield/examples/memcached/connections.rs"]
mod connections;
#[path = "../../../farfield/examples/memcached/counts.rs"]
mod counts;
#[path = "../../../farfield/examples/memcached/request.rs"]
mod request;
#[path = "../../../farfield/examples/memcached/serve.rs"]
mod serve;
#[cfg(test)]
#[path = "../../../farfield/examples/memcached/tests.rs"]
mod tests;
#[path = "../../../farfield/examples/memcached/text.rs"]
mod text;
#[path = "../../../farfield/examples/memcached/times.rs"]
mod times;

#[cfg(test)]
use cache::trial_cache;
use cache::{Cache, Limits};
use farfield::Heap;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const USAGE: &str = "\
gc_memcached [--listen ADDRESS] [--near MIB] [--capacity MIB] [--value-max KIB] [--no-evict] [--pool URL]…
  --listen     where to listen (127.0.0.1:11211)
  --near       near memory, tables included (64)
  --capacity   keys and values in all; far memory may be twice as much, with garbage (1024)
  --value-max  the largest value (1024)
  --no-evict   without room, refuse instead of evicting what was used least recently
  --pool       a memory server; without one, far is this process, to try it out";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut listen, mut near, mut capacity, mut value_max) = ("127.0.0.1:11211".to_owned(), 64u64, 1024u64, 1024usize);
    let (mut evict, mut pools) = (true, Vec::new());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--listen" => listen = value()?,
            "--near" => near = value()?.parse()?,
            "--capacity" => capacity = value()?.parse()?,
            "--value-max" => value_max = value()?.parse()?,
            "--no-evict" => evict = false,
            "--pool" => pools.push(value()?),
            _ => return Err(USAGE.into()),
        }
    }
    let mut builder = Heap::builder().name("gc_memcached").near(near << 20).far((capacity + near) << 22);
    for pool in pools {
        builder = builder.pool(pool);
    }
    let capacity = capacity << 20;
    let limits = Limits { capacity, far: 2 * capacity + (8 << 20), value_max: value_max << 10, evict };
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let cache = Arc::new(Cache::new(builder.build()?, limits, clock)?);
    let listener = TcpListener::bind(&listen)?;
    println!("listening on {}", listener.local_addr()?);
    connections::accept(&listener, &cache);
    Ok(())
}
