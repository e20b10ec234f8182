//! Functions that do what no function should. A sandbox ends them, and nothing else suffers.

use core::future::pending;
use core::hint::black_box;
use farfield_wic::{Fault, Function, Place, RANGE_BYTES_MAX};
use serde::{Deserialize, Serialize};

macro_rules! stray {
    ($(#[$doc:meta])* $name:ident, $text:literal, $argument:ty, |$place:ident, $given:ident| $body:expr) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl Function for $name {
            const NAME: &'static str = $text;
            const VERSION: u32 = 1;
            type Argument = $argument;
            type Answer = u64;

            async fn run<P: Place>($place: &P, $given: $argument) -> Result<u64, Fault> {
                $body
            }
        }
    };
}

stray!(
    /// Computes for ever, and never gives way.
    Endless, "guest.endless", u64, |_place, word| {
        let mut word = word;
        loop {
            word = black_box(word.rotate_left(1) ^ 1);
        }
    }
);

stray!(
    /// Takes more and more memory.
    Hoard, "guest.hoard", u32, |_place, bytes| {
        let mut all: Vec<Vec<u8>> = Vec::new();
        loop {
            all.push(black_box(vec![1; bytes as usize]));
        }
    }
);

/// Calls itself so deep.
fn dive(depth: u64) -> u64 {
    if depth == 0 { 0 } else { black_box(dive(black_box(depth - 1))) + 1 }
}

stray!(
    /// Calls itself deeper than its stack is.
    Deep, "guest.deep", u64, |_place, depth| Ok(dive(depth))
);

/// Where to reach.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Beyond {
    /// Read there.
    Read(u64),
    /// Write there.
    Write(u64),
}

stray!(
    /// Accesses what is not its own.
    Reach, "guest.reach", Beyond, |place, beyond| {
        match beyond {
            Beyond::Read(offset) => place.read_u64(offset).await,
            Beyond::Write(offset) => place.write_u64(offset, 7).await.map(|()| 7),
        }
    }
);

stray!(
    /// Panics.
    Panics, "guest.panics", u64, |_place, word| {
    Ok(100 / word.checked_sub(black_box(word)).filter(|zero| *zero > 0).expect("no zero"))
});

stray!(
    /// Waits for what never comes.
    Stray, "guest.stray", (), |_place, _nothing| pending().await
);

stray!(
    /// Reads as much at a time as it can, again and again.
    Flood, "guest.flood", u32, |place, times| {
        let mut read = 0;
        for _ in 0..times {
            read += place.read_range(0, RANGE_BYTES_MAX).await?.len() as u64;
        }
        Ok(read)
    }
);
