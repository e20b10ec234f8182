//! Functions that are shipped to memory servers as WebAssembly: an example of a guest, and what the sandbox's tests run.
//!
//! `cargo build --profile guest --target wasm32-unknown-unknown -p farfield-guest` makes `farfield_guest.wasm`. The same source is a library of natively
//! compiled functions, so tests compare the two, and `libfarfield_guest.so`, which `farfield serve --functions` loads.

mod stray;

pub use stray::{Beyond, Deep, Endless, Flood, Hoard, Panics, Reach, Stray};

use core::time::Duration;
use farfield_bench_functions::List;
use farfield_wic::{Fault, Function, Place, Totals, WicLock};

farfield_sandbox::export!(
    List,
    Totals<u64>,
    Totals<f64>,
    Gather,
    Reverse,
    Increment,
    Echo,
    Endless,
    Hoard,
    Deep,
    Reach,
    Panics,
    Stray,
    Flood,
);

// As a library that servers load, it has the functions whose names are its own.
#[cfg(not(target_family = "wasm"))]
farfield_plugin::export!(List, Gather, Reverse, Increment, Echo, Reach, Panics);

/// The sum of words that lie anywhere, all asked for at once.
#[derive(Debug)]
pub struct Gather;

impl Function for Gather {
    const NAME: &'static str = "guest.gather";
    const VERSION: u32 = 1;
    type Argument = Vec<u64>;
    type Answer = u64;

    async fn run<P: Place>(place: &P, offsets: Vec<u64>) -> Result<u64, Fault> {
        let mut words = vec![[0; 8]; offsets.len()];
        place.read_many(&offsets, &mut words).await?;
        Ok(words.into_iter().map(u64::from_le_bytes).fold(0, u64::wrapping_add))
    }
}

/// Turns the bytes of a range around.
#[derive(Debug)]
pub struct Reverse;

impl Function for Reverse {
    const NAME: &'static str = "guest.reverse";
    const VERSION: u32 = 1;
    type Argument = (u64, u32);
    type Answer = ();

    async fn run<P: Place>(place: &P, (offset, len): (u64, u32)) -> Result<(), Fault> {
        let mut bytes = place.read_range(offset, len as usize).await?.to_vec();
        bytes.reverse();
        place.write(offset, &bytes).await
    }
}

/// Adds one to the word behind the lock at offset 0, as often as it is told; natively and in a sandbox at once, nothing is lost.
#[derive(Debug)]
pub struct Increment;

impl Function for Increment {
    const NAME: &'static str = "guest.increment";
    const VERSION: u32 = 1;
    type Argument = u32;
    type Answer = u64;

    async fn run<P: Place>(place: &P, times: u32) -> Result<u64, Fault> {
        // Nobody is given up for being slow: the machine may be busy.
        let lock = WicLock::at(0).lease(Duration::from_secs(60)).within(Duration::from_secs(60));
        let mut last = 0;
        for _ in 0..times {
            let held = lock.lock(place).await?;
            last = place.read_u64(WicLock::BYTES).await? + 1;
            held.write_u64(WicLock::BYTES, last).await?;
            held.unlock().await?;
            place.fetch_add(WicLock::BYTES + 8, 1).await?;
        }
        Ok(last)
    }
}

/// What it is told.
#[derive(Debug)]
pub struct Echo;

impl Function for Echo {
    const NAME: &'static str = "guest.echo";
    const VERSION: u32 = 3;
    type Argument = String;
    type Answer = String;

    async fn run<P: Place>(_place: &P, text: String) -> Result<String, Fault> {
        Ok(text)
    }
}
