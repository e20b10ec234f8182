//! Shared memory of several processes, guided by ownership.
//!
//! A program runs in several processes, its *nodes*, which share one heap. An object has one owner,
//! a [`DBox`], as in plain Rust: one writer or many readers. So no protocol has to find out who may
//! read or write what: a mutable borrow brings the object to the borrower's node and gives it a new
//! version; a shared borrow elsewhere reads a copy of the version that the owner names. After DRust
//! (OSDI 2024); `docs/design/dsm.md` says what is promised.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = farfield_dsm::NodeBuilder::new().nodes(2);
//! farfield_dsm::run(&config, |here| {
//!     let numbers = here.alloc([1u64; 100])?;
//!     let other = here.nodes().last().expect("two nodes");
//!     let sum = here.spawn_to(other, (numbers, 3u64), |here, (numbers, factor)| {
//!         numbers.get(here).map(|numbers| factor * numbers.iter().sum::<u64>())
//!     })?;
//!     assert_eq!(sum.join(here)??, 300);
//!     Ok(())
//! })?
//! # }
//! ```
#![deny(unsafe_code)]

mod arena;
mod copies;
mod error;
mod far;
mod member;
mod message;
mod node;
mod ptr;
mod stats;
mod task;

pub use error::{JoinError, NodeStartError, ShareError};
pub use far::Far;
pub use node::{Here, NodeBuilder, NodeId, run};
pub use ptr::{DBox, Mut};
pub use stats::NodeStats;
pub use task::TaskHandle;
