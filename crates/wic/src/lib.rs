//! Functions over far memory that run anywhere: where-independent code (WICkit).
//!
//! A [`Function`] is an async function over the bytes of a region, written once against [`Place`],
//! which gives it reads, writes, atomics, locks and time. The same source runs
//!
//! - at the **client**, one-sided, over any lane of the pool: each access is a round trip, and many
//!   calls share one lane;
//! - at the **server**, run to completion beside the memory: one round trip, however many accesses;
//! - in a **simulation** with a seed ([`Sim`]), for tests.
//!
//! A server has the functions of its [`Registry`], by name and version. A [`Caller`] calls:
//!
//! ```no_run
//! use farfield_wic::{Aggregate, Caller, Range, Where};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let backend = farfield_pool::PoolBuilder::new().url("tcp://127.0.0.1:7400").pages(1 << 20).open()?;
//! let mut caller = Caller::new(backend);
//! let summary = caller.call::<Aggregate>(Range { offset: 0, count: 512 }).at(Where::Server).run()?;
//! println!("the sum of {} words is {}", summary.count, summary.sum);
//! # Ok(())
//! # }
//! ```
//!
//! `docs/design/wic.md` describes what each place promises, and what happens when something fails.

pub mod access;
mod aggregate;
pub mod columns;
mod error;
pub mod evacuate;
mod function;
mod lock;
pub mod lookup;
mod place;
mod totals;
pub mod trace;

pub use aggregate::{Aggregate, Range, Summary};
pub use error::{Fault, Stop};
pub use function::Function;
pub use lock::{Exclusive, Fence, Shared, WicLock};
pub use place::{Place, RANGE_BYTES_MAX};
pub use totals::{Number, Part, Totals, Wanted};

// Calling and running functions, which functions compiled to WebAssembly cannot do.
#[cfg(not(target_family = "wasm"))]
mod bounds;
#[cfg(not(target_family = "wasm"))]
mod call_error;
#[cfg(not(target_family = "wasm"))]
mod caller;
#[cfg(not(target_family = "wasm"))]
mod client;
#[cfg(not(target_family = "wasm"))]
mod executor;
#[cfg(not(target_family = "wasm"))]
mod memory;
#[cfg(not(target_family = "wasm"))]
mod registry;
#[cfg(not(target_family = "wasm"))]
mod server;
#[cfg(not(target_family = "wasm"))]
mod sim;

#[cfg(not(target_family = "wasm"))]
pub use bounds::check_range;
#[cfg(not(target_family = "wasm"))]
pub use call_error::CallError;
#[cfg(not(target_family = "wasm"))]
pub use caller::{Call, Caller, Calls, Where};
#[cfg(not(target_family = "wasm"))]
pub use executor::Budget;
#[cfg(not(target_family = "wasm"))]
pub use memory::Memory;
#[cfg(not(target_family = "wasm"))]
pub use registry::{ForeignFunction, Handler, NameTaken, Registry, RowSink, Task, Unknown, run_row};
#[cfg(not(target_family = "wasm"))]
pub use sim::Sim;
